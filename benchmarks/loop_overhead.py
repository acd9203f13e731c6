"""(a) What the loop adds to a step: a 16-wide MLP, batch 8, one thread, V = 1; by that thread's processor time."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import thread_time
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.measure import CLOCK, in_turns, write
from cosmati import Batch, Method, Position, RunConfig, Stage, Trainer

DATA = (torch.randn(8, 16), torch.randn(8, 16))


@dataclass(frozen=True, kw_only=True)
class NoOp(Method):
    """A method that is called and does nothing."""

    stage: ClassVar[Stage] = Stage.PERTURB

    def batch(self, batch: Batch, at: Position) -> Batch:  # noqa: ARG002
        """Return the batch."""
        return batch


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    """Return the squared error."""
    return nn.functional.mse_loss(model(data[0]), data[1])


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return model and optimizer."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def bare(steps: int) -> float:
    """Time the loop that one writes by hand."""
    model, optimizer = make()
    start = thread_time()
    for _ in range(steps):
        loss = loss_of(model, DATA)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return (thread_time() - start) / steps


def ours(steps: int, num_methods: int = 0) -> float:
    """Time `Trainer.step`."""
    model, optimizer = make()
    config = RunConfig(budget=f"{steps}ba")
    methods = [NoOp() for _ in range(num_methods)]
    with Trainer(model, loss_of, optimizers=[optimizer], methods=methods, config=config) as trainer:
        start = thread_time()
        for _ in range(steps):
            trainer.step(DATA)
        return (thread_time() - start) / steps


def fit(steps: int) -> float:
    """Time `Trainer.fit`, its setting up included."""
    model, optimizer = make()
    trainer = Trainer(model, loss_of, [DATA], optimizers=[optimizer], config=RunConfig(budget=f"{steps}ba"))
    start = thread_time()
    trainer.fit()
    return (thread_time() - start) / steps


def fabric(steps: int) -> float:
    """Time Lightning Fabric."""
    from lightning.fabric import Fabric

    engine = Fabric(accelerator="cpu", devices=1)
    model, optimizer = engine.setup(*make())
    start = thread_time()
    for _ in range(steps):
        loss = loss_of(model, DATA)
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return (thread_time() - start) / steps


def accelerate(steps: int) -> float:
    """Time Hugging Face Accelerate."""
    from accelerate import Accelerator

    engine = Accelerator(cpu=True)
    model, optimizer = engine.prepare(*make())
    start = thread_time()
    for _ in range(steps):
        loss = loss_of(model, DATA)
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return (thread_time() - start) / steps


class Repeated:
    """The one batch, so many times: Lightning takes a list for several loaders."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([DATA] * self.steps)


def lightning(steps: int) -> float:
    """Time Lightning's Trainer, its setting up included."""
    import lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.optimizer = make()

        def training_step(self, batch: Any, _: int) -> Tensor:  # noqa: ANN401
            return loss_of(self.network, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.optimizer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(accelerator="cpu", max_steps=steps, **quiet)
        start = thread_time()
        trainer.fit(Module(), Repeated(steps))
    return (thread_time() - start) / steps


def run(*, quick: bool) -> str:
    """Run the benchmark, write its results and return the table."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    steps, rounds = (200, 3) if quick else (2000, 15)
    arms: dict[str, Callable[[], float]] = {
        "bare": lambda: bare(steps),
        "bare again (A/A)": lambda: bare(steps),
        "Trainer.step": lambda: ours(steps),
        "Trainer.fit": lambda: fit(steps),
        "Trainer.step, 1 no-op method": lambda: ours(steps, 1),
        "Trainer.step, 2 no-op methods": lambda: ours(steps, 2),
        "Trainer.step, 4 no-op methods": lambda: ours(steps, 4),
    }
    missing = []
    for name, peer in (("accelerate", accelerate), ("lightning", fabric), ("lightning", lightning)):
        if importlib.util.find_spec(name) is None:
            missing.append(name)
        else:
            arms[peer.__name__] = lambda peer=peer: peer(steps)  # type: ignore[misc]
    rows = in_turns(arms, rounds)
    notes = {"clock": CLOCK, "steps a round": steps, "not installed": ", ".join(sorted(set(missing))) or "nothing"}
    try:
        return write("loop_overhead" + ("_quick" if quick else ""), rows, notes)
    finally:
        torch.set_num_threads(threads)
