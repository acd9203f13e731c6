"""(d) What the tree costs beside plain accumulation, in time and in memory: three sizes, V = 1, 2, 4, 8 and 64."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import thread_time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import CLOCK, Row, in_turns, write
from cosmati import Batch, LanguageModel, Lineage, RunConfig, Trainer
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.models.size import count_parameters

LOSS = LanguageModel()
SIZES = ("100 small tensors", "GPT, 0.8M", "GPT, 6.9M")


def squares(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean squared error."""
    return nn.functional.mse_loss(model(data[0]), data[1])


class Task:
    """A model and the rows of one microbatch."""

    def __init__(self, name: str) -> None:
        self.name = name
        generator = torch.Generator().manual_seed(0)
        self.is_text = name != SIZES[0]
        if self.is_text:
            self.rows: Any = torch.randint(0, 256, (1, 33), generator=generator)
            self.loss: Any = LOSS
        else:
            self.rows = (torch.randn(8, 16, generator=generator), torch.randn(8, 16, generator=generator))
            self.loss = squares

    def model(self) -> nn.Module:
        """Return a fresh model."""
        torch.manual_seed(0)
        if not self.is_text:
            return nn.Sequential(*(nn.Linear(16, 16) for _ in range(50)))
        width, blocks = (128, 4) if self.name == SIZES[1] else (256, 8)
        return GPT(GPTConfig(sequence_length=32, width=width, num_blocks=blocks, num_heads=4))

    def batch(self) -> Batch:
        """Return a microbatch with lineage."""
        num = 1 if self.is_text else 8
        return Batch(self.rows, Lineage(torch.arange(num), torch.zeros(num, dtype=torch.int64)))


Step = Callable[[], object]


def plain(task: Task, v: int) -> Step:
    """Return a step of plain accumulation: backward into `.grad`, V times, and the optimizer."""
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        # The open runs have asked for deterministic kernels; who accumulates by hand rarely does.
        torch.use_deterministic_algorithms(False)
        for _ in range(v):
            found = task.loss(model, task.rows)
            (found if isinstance(found, Tensor) else found.mean()).div(v).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.use_deterministic_algorithms(True)

    return step


EVERY = RunConfig.details_every
"""Steps between gradient norms in the ledger, as a run has it by default."""


def ours(task: Task, v: int, runs: ExitStack, *, ledger: bool = False, every: int = EVERY) -> Step:
    """Return a step of the Trainer, its ledger with norms every so many steps; its run is open until `runs` closes."""
    folder = runs.enter_context(tempfile.TemporaryDirectory())
    config = RunConfig(
        budget="1000000ba",
        num_microbatches=v,
        run_folder=Path(folder) / "run" if ledger else None,
        ledger=ledger,
        details_every=every,
    )
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = runs.enter_context(Trainer(model, task.loss, optimizers=[optimizer], config=config))
    batches = [task.batch() for _ in range(v)]
    if v == 1 and not ledger:
        return lambda: trainer.step(task.rows)
    return lambda: trainer.step_microbatches(batches, [0] * v) if v > 1 else trainer.step(batches[0])


def timed(step: Step, steps: int) -> Callable[[], float]:
    """Return a function that gives seconds a step."""

    def seconds() -> float:
        start = thread_time()
        for _ in range(steps):
            step()
        return (thread_time() - start) / steps

    return seconds


def compare(name: str, v: int, rounds: int) -> list[Row]:
    """Time plain accumulation, itself again, and the Trainer without and with a ledger, in turns."""
    task = Task(name)
    with ExitStack() as runs:
        arms = {
            f"plain accumulation, V = {v}": plain(task, v),
            "plain again (A/A)": plain(task, v),
            "Trainer": ours(task, v, runs),
            "Trainer, ledger without norms": ours(task, v, runs, ledger=True, every=1_000_000),
            "Trainer, ledger": ours(task, v, runs, ledger=True),
            "Trainer, ledger, norms in every step": ours(task, v, runs, ledger=True, every=1),
        }
        # Whole cadences of norms, a step of each arm after one of the others.
        turns = EVERY * max(1, (4 if name == SIZES[0] else 1) // max(1, v // 8))
        return in_turns({arm: timed(step, 1) for arm, step in arms.items()}, rounds, turns)


def peak_bytes(step: Step) -> int:
    """Return the most bytes of tensors that a step has alive beyond what was alive before it."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most


def memory() -> str:
    """Return a table of peak memory: gradients alive beside those of plain accumulation."""
    task = Task(SIZES[2])
    size = 4 * count_parameters(task.model())
    lines = [
        "| V | plain, MB | Trainer, MB | further copies of the gradients | allowed: log2(V) - 1 |",
        "|---|---|---|---|---|",
    ]
    for v in (1, 2, 4, 8, 64):
        with ExitStack() as runs:
            own, other = peak_bytes(ours(task, v, runs)), peak_bytes(plain(task, v))
        allowed = max(0, v.bit_length() - 2)
        lines.append(f"| {v} | {other / 1e6:.1f} | {own / 1e6:.1f} | {(own - other) / size:+.2f} | {allowed} |")
    return "\n".join(lines) + "\n"


def run(*, quick: bool, only: str = "", rounds: int = 0) -> str:
    """Run the benchmark, write those results whose names hold `only`, and return the tables.

    Args:
        quick: see that it runs.
        only: part of a result's name.
        rounds: of each result; 0 for as many as usual.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tables = []
    try:
        for name in SIZES[:1] if quick else SIZES:
            for v in (2,) if quick else (1, 2, 4, 8, 64):
                usual = 2 if quick else 5 if v == 64 else 15
                label = name.replace(", ", "_").replace(" ", "_").replace(".", "").lower()
                result = f"accumulation_{label}_v{v}{'_quick' if quick else ''}"
                if only in result:
                    notes = {"clock": CLOCK, "parameters": count_parameters(Task(name).model()), "V": v}
                    tables.append(write(result, compare(name, v, rounds or usual), notes))
        if not only:
            tables.append(memory())
    finally:
        torch.set_num_threads(threads)
    return "\n".join(tables)
