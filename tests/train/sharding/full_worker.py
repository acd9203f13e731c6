"""One rank of the tests of full sharding: `full_worker.py FOLDER CASES [STOP [SHARDING]]`, cases with commas between.

Rank 0 writes what came out of each as JSON. STOP 0 goes to the end. Where the environment has KILLED, `RANKS AT WHEN`,
each of these ranks kills itself at that exchange with others, `before` it or `after`; KILLED=none only counts them.
V and SHARD_RANKS are settings.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from cosmati.core.loss import Classification
from cosmati.core.state import parameter_root
from cosmati.data.in_memory import InMemory
from cosmati.errors import ExportError, PlanError
from cosmati.ledger.details import decode_details
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.row_keys import KEY_BYTES, RowKeys
from cosmati.ledger.row_secrets import KEYS_FILE, SALT_FILE
from cosmati.methods import EMA, SAM, SWA, GradientClipping, LabelSmoothing, LayerFreezing, MixUp
from cosmati.optim import SGD, SGDW, SOAP, AdamW, Aurora, Cosine, Lion, Muon, NorMuon, ScheduleFreeAdamW, Sophia
from cosmati.optim.optimizers import matrices
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import load_policy
from cosmati.storage.atomic import create_secret
from cosmati.train.config import RunConfig
from cosmati.train.evaluation import Evaluation, accuracy, batches
from cosmati.train.layout import shard_groups
from cosmati.train.layout import sharded as sharded_layout
from cosmati.train.layout.optimizer_sharded import OptimizerSharded
from cosmati.train.layout.whole import Whole
from cosmati.train.observers import Observer
from cosmati.train.observers.monitors.norms import parameter_groups
from cosmati.train.observers.observer import WatchedRun
from cosmati.train.ranks import Ranks
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from cosmati.train.trainer import Trainer
from tests.train.elastic_worker import StopAt

STEPS, ROWS, CLASSES = 6, 24, 5
TAXONOMY = Taxonomy(
    "t", "1", (("open", "free to learn from"), ("doubtful", "only near the output"), ("closed", "learnt from at first"))
)
POLICY = """
version: 1
taxonomy: t
regions:
  near_input: {params: ["stem.*", "blocks.0.*"]}
  near_output: {params: "*", exclude: ["stem.*", "blocks.0.*"]}
phases: [{name: first, until: 3ba}, {name: rest}]
rules:
  - {class: open, weight: 1}
  - {class: doubtful, region: near_input, weight: 0}
  - {class: doubtful, region: near_output, weight: 0.5}
  - {class: closed, phase: first, weight: 0.25}
  - {class: closed, phase: rest, decision: reject}
"""


class Block(nn.Module):
    """BatchNorm, dropout, and a parameter beside its modules; sizes that no number of ranks divides."""

    def __init__(self, is_saving: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(7)
        self.up = nn.Linear(7, 9)
        self.down = nn.Linear(9, 7, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 7))
        self.is_saving = is_saving

    def forward(self, x: Tensor) -> Tensor:
        run = self._run
        normed = self.norm(x)
        return x + (checkpoint(run, normed, use_reentrant=False) if self.is_saving else run(normed))

    def _run(self, x: Tensor) -> Tensor:
        return self.scale * self.down(nn.functional.dropout(torch.relu(self.up(x)), 0.2, self.training))


class Net(nn.Module):
    """Blocks between two matrices, and a parameter of the model's own."""

    def __init__(self, blocks: int = 3, is_saving: bool = False) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.ones(1))
        self.stem = nn.Linear(6, 7)
        self.blocks = nn.ModuleList([Block(is_saving) for _ in range(blocks)])
        self.head = nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) + self.offset
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Smooth(nn.Module):
    """Two blocks that can be compiled in every shape of the tests: few, and without statistics."""

    def __init__(self, is_saving: bool = False) -> None:
        super().__init__()
        self.is_saving = is_saving
        self.stem = nn.Linear(6, 7)
        self.blocks = nn.ModuleList([SmoothBlock() for _ in range(2)])
        self.head = nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_saving else block(x)
        return self.head(x)


class SmoothBlock(nn.Module):
    """A normalised block, with a parameter beside its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.up = nn.Linear(7, 9)
        self.down = nn.Linear(9, 7, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 7))

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(nn.functional.gelu(self.up(self.norm(x))), 0.2, self.training)
        return x + self.scale * self.down(hidden)


class Saved(Net):
    """Blocks that are run anew in backward, whole."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Tied(nn.Module):
    """An embedding whose weights are the head's, a block with a matrix of another one, a frozen one, and odd names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 6, bias=False)
        self.by_name = nn.ParameterDict({"a/b": torch.ones(7), "exp_avg": torch.zeros(7)})
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.blocks[2].down.weight.requires_grad_(False)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.embed.weight * self.by_name["a/b"] + self.by_name["exp_avg"]
        for block in self.blocks:
            x = block(x)
        return self.head(self.embed(x))


class Shared(nn.Module):
    """A matrix that two blocks use, and a block that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        shared, twice = nn.Linear(6, 6), Smooth().blocks[0]
        own = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.blocks = nn.ModuleList([nn.Sequential(shared, nn.Tanh()), own, nn.Sequential(shared, nn.Linear(6, 7))])
        self.again = nn.ModuleList([twice, twice])
        self.head = nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.again):
            x = block(x)
        return self.head(x)


CLIPPED = GradientClipping(clipping_type="norm", clipping_threshold=0.3)
ADAMW = AdamW(lr=1e-2, weight_decay=0.1, schedule=Cosine())
CASES: dict[str, dict[str, Any]] = {
    "sgd": {"optimizers": SGD(lr=0.1, momentum=0.9, weight_decay=0.01, schedule=Cosine())},
    "adamw": {"optimizers": ADAMW},
    "bfloat16": {"optimizers": ADAMW, "precision": "bfloat16", "methods": [MixUp(), LabelSmoothing(smoothing=0.1)]},
    "rounded routed": {
        "optimizers": Muon(lr=0.02),
        "policy": True,
        "precision": "bfloat16",
        "gather_precision": "bfloat16",
        "methods": [SAM(interval=2)],
    },
    "averaged": {"optimizers": ADAMW, "methods": [MixUp(), CLIPPED, EMA(half_life="3ba")]},
    "sam": {"optimizers": SGD(lr=0.1, momentum=0.9), "methods": [SAM(interval=2), CLIPPED]},
    "swa": {"optimizers": SGDW(lr=0.05), "methods": [SWA(swa_start="0.3dur", update_interval="1ba")]},
    "frozen": {"optimizers": ADAMW, "methods": [LayerFreezing(freeze_start=0.2, freeze_level=1.0)]},
    "tied": {"optimizers": ADAMW, "model": Tied, "methods": [EMA(half_life="3ba")]},
    "tied rounded": {
        "optimizers": ADAMW,
        "model": Tied,
        "gather_precision": "bfloat16",
        "methods": [EMA(half_life="3ba")],
    },
    "shared": {"optimizers": ADAMW, "model": Shared, "methods": [CLIPPED]},
    "compiled": {"optimizers": ADAMW, "model": Smooth, "compile_blocks": True},
    "compiled bn": {"optimizers": ADAMW, "model": lambda: Net(blocks=1), "compile_blocks": True},
    "as compiled": {"optimizers": ADAMW, "model": Smooth},
    "compiled saved": {"optimizers": Muon(lr=0.02), "model": lambda: Smooth(is_saving=True), "compile_blocks": True},
    "compiled routed": {
        "optimizers": ADAMW,
        "model": Smooth,
        "policy": True,
        "precision": "bfloat16",
        "gather_precision": "bfloat16",
        "methods": [CLIPPED],
        "compile_blocks": True,
    },
    "saved": {"optimizers": ADAMW, "model": Saved},
    "saved within": {"optimizers": ADAMW, "model": lambda: Net(is_saving=True)},
    "double": {"optimizers": ADAMW, "model": lambda: Net().double()},
    "everything": {"optimizers": ADAMW, "policy": True, "methods": [SAM(interval=2), CLIPPED, EMA(half_life="3ba")]},
    "routed": {"optimizers": ADAMW, "policy": True, "methods": [CLIPPED, EMA(half_life="3ba")]},
    "routed sam": {"optimizers": Muon(lr=0.02), "policy": True, "methods": [SAM(interval=2)]},
    "sorted": {"optimizers": ADAMW, "policy": True, "methods": [CLIPPED, EMA(half_life="3ba")], "sort_by_class": True},
    "muon": {"optimizers": Muon(lr=0.02, weight_decay=0.1, schedule=Cosine()), "methods": [CLIPPED]},
    "muon in bfloat16": {"optimizers": Muon(lr=0.02, bfloat16=True)},
    "normuon": {"optimizers": NorMuon(lr=0.02)},
    "aurora": {"optimizers": Aurora(lr=0.02)},
    "soap": {"optimizers": SOAP(lr=0.01, precondition_frequency=2)},
    "lion": {"optimizers": Lion(lr=1e-3, weight_decay=0.1)},
    "sophia": {"optimizers": Sophia(lr=1e-3, num_labels=24)},
    "schedule-free": {"optimizers": ScheduleFreeAdamW(lr=1e-2)},
    "cautious": {"optimizers": AdamW(lr=1e-2, weight_decay=0.1, cautious=True)},
    "hyperball": {"optimizers": AdamW(lr=1e-2, weight_decay=0.0, hyperball=True, parameters=matrices)},
}

COMPILED = tuple(case for case, given in CASES.items() if given.get("compile_blocks"))


class Looks(Observer):
    """Is told by name that it can't look at parameters of which each rank holds a part; others it sees."""

    def on_open(self, run: WatchedRun) -> None:
        if any(isinstance(parameter, DTensor) for parameter in run.model.parameters()):
            with pytest.raises(PlanError, match="UpdateNorms look at a model's parameters"):
                parameter_groups(run)
        else:
            assert parameter_groups(run)


def make_trainer(case: str, folder: Path, stop: int, sharding: str) -> Trainer:
    """Return the trainer of a case; everything follows from fixed seeds."""
    given = CASES[case]
    generator = torch.Generator().manual_seed(1)
    data = (torch.randn(120, 6, generator=generator), torch.randint(CLASSES, (120,), generator=generator))
    if case == "double":
        data = data[0].double(), data[1]
    torch.manual_seed(0)
    model = given.get("model", Net)()
    optimizers = [given["optimizers"]]
    if optimizers[0].parameters != "*":
        optimizers.append(AdamW(lr=1e-2))
    named = {"class_ids": torch.arange(120) // 7 % 3, "class_names": ("open", "doubtful", "closed"), "tail": "pad"}
    named["sort_by_class"] = given.get("sort_by_class", False)
    is_routed = "policy" in given
    return Trainer(
        model,
        Classification(CLASSES),
        InMemory(data, ROWS, **(named if is_routed else {})),
        optimizers=optimizers,
        methods=given.get("methods", []),
        policy=load_policy(POLICY) if is_routed else None,
        taxonomy=TAXONOMY if is_routed else None,
        evaluation=Evaluation(batches(data, 50), {"accuracy": accuracy, "loss": Classification(CLASSES)}),
        observers=[StopAt(stop), Looks()],
        config=RunConfig(
            budget=f"{STEPS}ba",
            num_microbatches=int(os.environ.get("V", "4")),
            num_threads=1,
            run_folder=folder / case.replace(" ", "-"),
            precision=given.get("precision", "float32"),
            compile_blocks=given.get("compile_blocks", False),
            gather_precision=given.get("gather_precision", "float32"),
            sharding=sharding,
            shard_ranks=int(os.environ["SHARD_RANKS"]) if "SHARD_RANKS" in os.environ else None,
            ledger=True,
            details_every=2,
            update_norm_every=2,
            direction_every=3,
            update_direction_every=3,
            digests_every=3,
            checkpoint_every="1ba" if "KILLED" in os.environ else None,
        ),
    )


def control(kind: str) -> None:
    """Sum otherwise than in the tree."""
    if kind == "scattered replicas":  # The two shards of each run 0 and 2, or 1 and 3.
        Ranks.slots = lambda *_: [[0, 2, 1, 3]]
        Ranks.gather = lambda self, rows: self.gather_by_rank(rows)[[0, 2, 1, 3]]
        return

    def scatter(output: Tensor, flat: Tensor, _: object) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        parts = [torch.empty_like(flat) for _ in range(world)]
        dist.all_gather(parts, flat)
        if kind == "all_reduce":
            dist.all_reduce(flat)
        else:
            flat.copy_(sum(parts[1:], start=parts[0]))
        output.copy_(flat.view(world, -1)[rank])

    shard_groups.tree_reduce_scatter = sharded_layout.tree_reduce_scatter = scatter


def count_exchanges(told: str) -> Callable[[], int]:
    """Count the exchanges of tensors with other ranks, and die at one of them; return what says how many there were."""
    ranks, at, when = ("", "0", "") if told == "none" else told.split()
    numbers = itertools.count(1)
    last = [0]

    def counted(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            last[0] = next(numbers)
            is_now = str(dist.get_rank()) in ranks.split(",") and last[0] == int(at)
            if is_now and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            found = exchange(*args, **more)
            if is_now:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        return call

    for name in ("all_to_all_single", "all_gather_single", "all_gather_into_tensor"):
        if hasattr(dist, name):
            setattr(dist, name, counted(getattr(dist, name)))
    return lambda: last[0]


def standing(ledger: Path) -> list[Any]:
    """Return each step that stands, with class, rows, weight and gradient norms of its microbatches; on rank 0."""
    if os.environ.get("RANK", "0") != "0":
        return []
    opened = VerifiedLedger(ledger)
    return [
        [
            entry.step,
            [[cell.class_id, cell.num_rows, cell.weight, cell.row_commitment.hex()] for cell in entry.microbatches],
            repr(sorted(opened.norms(item, entry, tables)[0].items())),
            {name: value for name, value in decode_details(item.details or b"{}").items() if name != "when"},
        ]
        for item, entry, tables in opened.steps()
        if item.index in opened.standing
    ]


def give_same_secrets(run_folder: Path) -> None:
    """Have all runs commit to rows alike; on rank 0."""
    private = run_folder / "private"
    if os.environ.get("RANK", "0") == "0" and not private.exists():
        private.mkdir(parents=True)
        RowKeys(bytes(KEY_BYTES)).save(private / KEYS_FILE)
        create_secret(private / SALT_FILE, bytes(32))


def run(case: str, folder: Path, stop: int, sharding: str) -> dict[str, Any]:
    """Train one case, and return digests and metrics."""
    give_same_secrets(folder / case.replace(" ", "-"))
    if case in COMPILED:
        torch._dynamo.reset()  # blocks of all cases count towards one limit
    trainer = make_trainer(case, folder, stop, sharding)
    result = trainer.fit()
    layouts: dict[str, type] = {"replicated": Whole, "optimizer": OptimizerSharded, "full": sharded_layout.Sharded}
    is_parallel = trainer.assembly.ranks.is_parallel
    assert type(trainer.assembly.layout) is (layouts[sharding] if is_parallel else Whole)
    if is_parallel and sharding == "full":
        with pytest.raises(ExportError, match="one process: cosmati export"):
            trainer.export(folder / "exported")
    assert {getattr(one.optimizer, "holds_pieces", False) for one in trainer.assembly.optimizers} == {
        is_parallel and sharding != "replicated"
    }
    last = read_checkpoint(list_checkpoints(folder / case.replace(" ", "-") / "checkpoints")[0])
    return {
        "withdrawn": sorted(f"{g.name}: {g.because}" for g in trainer.plan.guarantees if not g.holds),
        "outcome": result.outcome,
        "step": last.step,
        "model": {name: parameter_root({name: value}).hex() for name, value in sorted(last.model.items())},
        "state": {name: parameter_root({name: value}).hex() for name, value in sorted(last.state.items())},
        "metrics": dict(result.metrics),
        "signed": last.signed_digest.hex(),
        "ledger": standing(folder / case.replace(" ", "-") / "ledger"),
    }


def main() -> None:
    """Run the cases under one process group."""
    base, cases = Path(sys.argv[1]), sys.argv[2].split(",")
    stop, sharding = int((sys.argv[3:] or ["0"])[0]), (sys.argv[4:] or ["full"])[0]
    torch.set_num_threads(1)
    # FSDP2 itself calls what PyTorch 2.13 has renamed.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    if any(case in COMPILED for case in cases):
        warnings.simplefilter("ignore")  # what a first compilation imports, and looks at
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    if "CONTROL" in os.environ:
        control(os.environ["CONTROL"])
    num_exchanges = count_exchanges(os.environ.get("KILLED", "none"))
    found = {case: run(case, base, stop, sharding) for case in cases}
    if os.environ.get("RANK", "0") == "0":
        (base / f"{stop}.json").write_text(json.dumps(found))
        (base / "exchanges").write_text(str(num_exchanges()))
    if dist.is_initialized():
        # FSDP's modules hold the group, in circles: what still holds it while the interpreter ends may bring it down.
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
