"""What a step costs on one device beside plain accumulation, DDP and FSDP2 of one rank; its ledger and hashes too.

Two ranks can't share a GPU under NCCL, so this is a world of one: what is left are the tree of gradients, the ledger
and the digests, without an exchange. `sharding="full"` trains on no accelerator, so FSDP2 is PyTorch's own here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measure import in_turns, write
from benchmarks.over_plain import LOSS, Size, Step, V
from cosmati import Batch, Lineage, RunConfig, Trainer


def _accumulating(size: Size, model: Any, let: Callable[[Any, bool], Any]) -> Step:  # noqa: ANN401  (PyTorch's wrappers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        torch.use_deterministic_algorithms(False)
        for index, data in enumerate(size.data):
            with let(model, index == V - 1):
                with torch.autocast(size.device.type, torch.bfloat16, enabled=size.bfloat16):
                    loss = LOSS(model, data).mean() / V
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.use_deterministic_algorithms(True)

    return step


def _reduce_at_the_end(model: DistributedDataParallel, is_last: bool) -> Any:  # noqa: ANN401
    return nullcontext() if is_last else model.no_sync()


def _scatter_at_the_end(model: Any, is_last: bool) -> Any:  # noqa: ANN401
    model.set_requires_gradient_sync(is_last)
    return nullcontext()


def _sharded(size: Size) -> nn.Module:
    model, mesh = size.model(), init_device_mesh(size.device.type, (1,))
    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    for part in (*blocks, model):
        # gloo has no mean
        fully_shard(part, mesh=mesh).set_force_sum_reduction_for_comms(size.device.type == "cpu")
    return model


def ours(size: Size, runs: ExitStack, *, ledger: bool = False, **config: Any) -> tuple[Trainer, Step]:  # noqa: ANN401
    """Return a Trainer, open until `runs` closes, and its step.

    Args:
        size: what is measured.
        runs: closes the run.
        ledger: whether it keeps one.
        **config: other fields of `RunConfig`.
    """
    folder = Path(runs.enter_context(tempfile.TemporaryDirectory())) / "run" if ledger else None
    settings = RunConfig(
        budget="1000000ba",
        num_microbatches=V,
        precision="bfloat16" if size.bfloat16 else "float32",
        device=str(size.device),
        ledger=ledger,
        run_folder=folder,
        **config,
    )
    model = size.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = runs.enter_context(Trainer(model, LOSS, optimizers=[optimizer], config=settings))
    batches = []
    for index, rows in enumerate(size.data):
        lineage = Lineage(torch.arange(len(rows)) + index * len(rows), torch.zeros(len(rows), dtype=torch.int64))
        batches.append(Batch(rows, lineage))
    return trainer, lambda: trainer.step_microbatches(batches, [0] * V)


def alone(size: Size, runs: ExitStack) -> None:
    """Begin a process group of one rank, until `runs` closes."""
    backend = "nccl" if size.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    runs.callback(dist.destroy_process_group)


def arms_of(size: Size, runs: ExitStack) -> dict[str, Step]:
    """Return the arms beside plain accumulation."""
    alone(size, runs)
    return {
        "DDP, one rank": _accumulating(size, DistributedDataParallel(size.model()), _reduce_at_the_end),
        "FSDP2, one rank": _accumulating(size, _sharded(size), _scatter_at_the_end),
        "replicated": ours(size, runs)[1],
        "optimizer": ours(size, runs, sharding="optimizer")[1],
        "ledger without norms": ours(size, runs, ledger=True, details_every=1_000_000)[1],
        "ledger": ours(size, runs, ledger=True)[1],
        "ledger, norms in every step": ours(size, runs, ledger=True, details_every=1)[1],
    }


def hashing(name: str, size: Size, *, rounds: int, folder: Path | None) -> str:
    """Time the digest of parameters and buffers, as a checkpoint has it, beside their copy to the host's memory.

    Args:
        name: of the results.
        size: whose model.
        rounds: turns of each.
        folder: for the results; None is `benchmarks/results`.
    """

    def timed(call: Callable[[], object]) -> Callable[[], float]:
        def seconds() -> float:
            size.wait()
            start = perf_counter()
            call()
            size.wait()
            return perf_counter() - start

        return seconds

    with ExitStack() as runs:
        layout = ours(size, runs)[0].assembly.layout
        tensors = [tensor for _, tensor in layout.save()]
        arms = {
            "copy to the host": lambda: [tensor.detach().to("cpu", copy=True) for tensor in tensors],
            "digest": layout.digest,
        }
        rows = in_turns({arm: timed(call) for arm, call in arms.items()}, rounds)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return write(name, rows, {"bytes": num_bytes, "clock": "wall clock"}, folder)
