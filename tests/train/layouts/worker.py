"""Puts one layout through the contract, on one rank or two, and prints what came out as JSON: `worker.py KIND`.

The same acts for every layout; `test_layouts.py` compares what they give with brute force, and with each other.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cosmati.core.pieces import Uncut
from cosmati.core.state import model_tensors, optimizer_tensors, parameter_root
from cosmati.routing.regions import Regions, partition_parameters
from cosmati.routing.selectors import RegionSelector
from cosmati.train.layout.layout import Layout
from cosmati.train.layout.optimizer_sharded import OptimizerSharded
from cosmati.train.layout.sharded import Sharded
from cosmati.train.layout.whole import Whole
from cosmati.train.ranks import Ranks

V = 4
ROUTES = ((1.0, 1.0), (0.0, 1.0), (1.0, 0.3), (0.0, 0.5))
NEAR_OUTPUT_ALONE = ((0.0, 1.0), (0.0, 1.0), (0.0, 0.0), (0.0, 0.25))
KINDS: dict[str, Callable[..., Layout]] = {
    "whole": Whole,
    "shared out": OptimizerSharded,
    "sharded": Sharded,
    "copies": partial(Sharded, num_shards=2),
}
DENOMINATORS = torch.tensor([3.0, 7.0], dtype=torch.float64)


class Block(nn.Module):
    """Sizes that two ranks can't share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks between two matrices; one parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 5)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make() -> tuple[Net, Regions, list[Tensor]]:
    """Return the model, its regions and the data of V microbatches."""
    torch.manual_seed(0)
    model = Net()
    near_input = RegionSelector(params=("stem.*", "blocks.0.*"))
    near_output = RegionSelector(params=("blocks.1.*", "head.*"))
    regions = partition_parameters(model, {"near_input": near_input, "near_output": near_output})
    return model, regions, [torch.randn(6, 3) for _ in range(V)]


def objective(model: nn.Module, rows: Tensor) -> Tensor:
    """Return a scalar."""
    return model(rows).square().sum()


def run_pass(
    layout: Layout, model: nn.Module, data: list[Tensor], routes: Any, learns: frozenset[int], *, measure: bool = True
) -> tuple[Any, Tensor | None]:
    """Return the root of one pass, and the leaves' norms [V, regions]."""
    norms = []
    with layout.step(routes, learns, measure=measure) as step:
        for index in layout.mine:
            with step.slot(index) as slot:
                slot.backward(objective(model, data[index]))
            norms.append(torch.stack(list(slot.norms)) if measure else torch.zeros(0))
        root = step.root(DENOMINATORS)
    return root, layout.gather(torch.stack(norms)) if measure else None


def digest(tensor: Tensor) -> str:
    """Return the bytes' digest; NaN has one."""
    return hashlib.sha256(
        repr(tuple(tensor.shape)).encode() + tensor.detach().contiguous().numpy().tobytes()
    ).hexdigest()


def whole(pieces: Any) -> dict[str, str]:
    """Return digests of whole tensors."""
    return {name: digest(pieces.whole(name)) for name in pieces.names}


def on_any_rank(ranks: Ranks, names: list[str]) -> list[str]:
    """Return the names that any rank has."""
    return sorted({name for told in ranks.told_by_all({"names": names}) for name in told["names"]})


def states(layout: Layout, ranks: Ranks, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return digests of the optimizer's state and of a method's, whole; and whether each rank gets back what it had."""
    names = {id(held): name for name, held in layout.pieces()}
    of_method = {f"average/{name}": weight.detach() for name, weight in layout.weights().tensors.items()}
    found: dict[str, Any] = {}
    for kind, own in (("optimizer", optimizer_tensors(optimizer, names)[0]), ("method", of_method)):
        of_optimizers = kind == "optimizer"
        saved = layout.whole_state(own, of_optimizers=of_optimizers)
        again = layout.own_state(saved, of_optimizers=of_optimizers)
        is_same = own.keys() == again.keys() and all(torch.equal(own[key], again[key]) for key in own)
        found[f"state of the {kind}"] = {key: digest(saved[key]) for key in sorted(saved)}
        found[f"{kind} again"] = not ranks.agree(not is_same)
    return found


def exercise(kind: str) -> dict[str, Any]:
    """Go through the contract."""
    model, regions, data = make()
    ranks = Ranks()
    ranks.share_out(V, is_strided=kind == "sharded")
    layout: Layout = KINDS[kind](model, regions, ranks, V)
    optimizer = torch.optim.AdamW([p.tensor for p in layout.parameters], lr=0.1, weight_decay=0.1)
    if isinstance(layout, OptimizerSharded):
        layout.rehome([optimizer])
    else:
        optimizer = torch.optim.AdamW([p for _, p in layout.pieces()], lr=0.1, weight_decay=0.1)
    everything = frozenset(p.index for p in layout.parameters)
    found: dict[str, Any] = {
        "parameters": [[p.index, p.name, p.region] for p in layout.parameters],
        "pieces": on_any_rank(ranks, [name for name, _ in layout.pieces()]),
        "mine": list(layout.mine),
        "start": layout.digest().hex(),
    }
    root, norms = run_pass(layout, model, data, ROUTES, everything)
    # Of what all hold, all say the same.
    among = layout.shards if isinstance(layout, Sharded) else ranks
    last = root.cut.anywhere(among.rank == among.world - 1 or isinstance(root.cut, Uncut))
    found["said by the last"] = [last, root.cut.anywhere(flag=False)]
    found |= {"root": whole(root), "leaf norms": digest(norms), "norm": digest(root.norm())}
    found["norm by region"] = {str(r): digest(n) for r, n in root.norm_by_region().items()}
    found["rows normalized"] = whole(
        root.map_whole(lambda g: g / (1 + torch.linalg.vector_norm(g, dim=-1, keepdim=True)))
    )
    found["scaled"] = whole(root.scaled({0: torch.tensor(0.5), 1: torch.tensor(3.0)}))
    unmeasured, _ = run_pass(layout, model, data, ROUTES, everything, measure=False)
    found["unmeasured"] = whole(unmeasured)
    with layout.perturbed(root.only(root.names[:4])):
        found["perturbed"] = layout.digest().hex()
        found["root there"] = whole(run_pass(layout, model, data, ROUTES, everything)[0])
    found["after perturbed"] = layout.digest().hex()
    with layout.replaced({name: 2 * weight.detach() for name, weight in layout.weights().tensors.items()}):
        found["replaced"] = layout.digest().hex()
    found["after replaced"] = layout.digest().hex()
    part, _ = run_pass(layout, model, data, NEAR_OUTPUT_ALONE, everything)
    found["near output alone"] = whole(part)
    few, _ = run_pass(layout, model, data, ROUTES, everything - {0, 5})
    found["frozen"] = whole(few)
    found["moved"] = sorted(layout.commit(part, everything, optimizer.step))
    found["held after commit"] = on_any_rank(ranks, [name for name, held in layout.pieces() if held.grad is not None])
    found |= states(layout, ranks, optimizer)
    found["after commit"] = {name: digest(value) for name, value in layout.save()}
    found["digest of saved"] = parameter_root(dict(layout.save())).hex()
    found["digest"] = layout.digest().hex()
    fresh = {name: value + 1 for name, value in layout.save()}
    layout.load(fresh)
    found["loaded"] = layout.digest().hex() == parameter_root(fresh).hex()
    if kind == "whole":
        found["digest of the model"] = parameter_root(model_tensors(model)).hex() == layout.digest().hex()
    return found


def main() -> None:
    """Print what one layout gives."""
    warnings.simplefilter("error")
    # FSDP2 itself calls what PyTorch 2.13 has renamed.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    found = exercise(sys.argv[1])
    if int(os.environ.get("RANK", "0")) == 0:
        sys.stdout.write(json.dumps(found))
    if dist.is_initialized():
        # FSDP's modules hold the group, in circles: what still holds it while the interpreter ends may bring it down.
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
