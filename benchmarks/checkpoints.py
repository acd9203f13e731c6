"""How long a checkpoint holds the loop: a model of 50 MB with AdamW, 150 MB of state, one process; wall-clock time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from torch import Tensor, nn

from benchmarks.measure import in_turns, write
from cosmati import RunConfig, Trainer
from cosmati.optim import AdamW

WIDTH, LAYERS = 1024, 12


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the mean square."""
    output: Tensor = model(rows)
    return output.square().mean()


def trainer_in(folder: Path, *, is_async: bool) -> Trainer:
    """Return a trainer whose run keeps a ledger and one checkpoint."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    config = RunConfig(
        budget="1000000ba", num_threads=1, run_folder=folder, ledger=True, num_checkpoints=1, checkpoint_async=is_async
    )
    return Trainer(model, loss_of, optimizers=AdamW(lr=1e-3), config=config)


def copying(trainer: Trainer) -> Callable[[], float]:
    """Time a copy of model and optimizer into memory that is there already."""
    optimizer = trainer.assembly.optimizers[0].optimizer
    held = [*trainer.model.parameters(), *(one for kept in optimizer.state.values() for one in kept.values())]
    tensors = [one.detach() for one in held if isinstance(one, Tensor)]
    copies = [torch.empty_like(one) for one in tensors]

    def copy() -> float:
        start = perf_counter()
        for to, value in zip(copies, tensors, strict=True):
            to.copy_(value)
        return perf_counter() - start

    return copy


def saving(trainer: Trainer, rows: Tensor) -> Callable[[], float]:
    """Time `save` after a step; what is written beside the loop ends before the next round."""

    def save() -> float:
        trainer.step(rows)
        start = perf_counter()
        trainer.save()
        held = perf_counter() - start
        assert trainer._run is not None, "entered"  # noqa: SLF001
        trainer._run.settle()  # noqa: SLF001
        return held

    return save


def run(*, quick: bool = False) -> str:
    """Return the table of how long the loop is held."""
    rows = torch.randn(4, WIDTH)
    with TemporaryDirectory() as folder, ExitStack() as stack:
        trainers = [trainer_in(Path(folder) / str(is_async), is_async=is_async) for is_async in (False, True)]
        for trainer in trainers:
            stack.enter_context(trainer)
            trainer.step(rows)
        arms = {
            "a copy of the state": copying(trainers[0]),
            "checkpoint_async=False": saving(trainers[0], rows),
            "checkpoint_async=True": saving(trainers[1], rows),
        }
        found = in_turns(arms, 2 if quick else 15)
    return write("checkpoints_held", found, {"what": __doc__ or "", "state": "50 MB of parameters, 150 MB with AdamW"})
