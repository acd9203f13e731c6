"""What watching costs the training thread: a tracker and all monitors, every 10 steps, of steps of about 10 ms.

Counted is the training thread's processor time inside their calls, the hooks that monitors set included: nothing in
them waits on a CPU, and others who share the machine don't count. The tracker's own thread isn't counted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from time import thread_time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import RESULTS, Row, write
from cosmati import Observer, RunConfig, Trainer
from cosmati.integrations import TrackedRun, Tracking
from cosmati.train.observers.monitors import all_monitors

EVERY = 10
ROWS, PAIRS = 64, ((3, 32), (32, 64), (64, 64), (64, 64), (64, 64))
_EVENTS = ("on_step_begin", "on_step", "on_values", "on_evaluation", "on_checkpoint")


class LinesFile:
    """A tracker that appends lines to a file."""

    label, rewrites = "lines", False

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._file = path.open("a")

    def open(self, run: TrackedRun, attempt: int, first_step: int, config: Mapping[str, object]) -> None:
        """Begin."""
        self._file.write(f"{run} {attempt} {first_step} {config}\n")

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Append values."""
        self._file.write(f"{step} {values} {time}\n")
        self._file.flush()

    def summary(self, values: Mapping[str, float]) -> None:
        """Append what came out."""
        self._file.write(f"{values}\n")

    def artifact(self, path: Path, digest: str) -> None:
        """Append a place."""
        self._file.write(f"{path} {digest}\n")

    def supersede(self, run: TrackedRun, attempt: int, from_step: int) -> bool:
        """Append that."""
        self._file.write(f"{run} {attempt} {from_step}\n")
        return True

    def close(self, outcome: str) -> None:
        """End."""
        self._file.write(outcome)
        self._file.close()


class Counted:
    """Adds up the seconds in calls; of calls within calls, the outer one's."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call, counted."""

        def counted(*args: Any, **options: Any) -> Any:  # noqa: ANN401
            start, self._depth = thread_time(), self._depth + 1
            try:
                return call(*args, **options)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += thread_time() - start

        return counted

    def of(self, observer: Observer) -> Observer:
        """Count all calls of an observer, by an observer that has it."""
        own = {name: self.around(getattr(observer, name)) for name in _EVENTS}
        kind = type(observer)
        body = {
            name: staticmethod(call) for name, call in own.items() if getattr(kind, name) is not getattr(Observer, name)
        }
        for name in ("on_open", "on_start", "on_end", "state_dict", "load_state_dict"):
            body[name] = staticmethod(getattr(observer, name))
        return type("CountedObserver", (Observer,), {**body, "every": observer.every})()


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy."""
    return nn.functional.cross_entropy(model(data[0]), data[1])


def watched(steps: int, which: str) -> tuple[float, float]:
    """Return seconds a step, and of these the ones in observers' calls."""
    counted = Counted()
    with tempfile.TemporaryDirectory() as folder:
        observers: list[Observer] = []
        if which in ("monitors", "both"):
            monitors = all_monitors(every=EVERY)
            for one in monitors.monitors:
                if hasattr(one, "_see"):
                    one._see = counted.around(one._see)  # noqa: SLF001
            observers.append(counted.of(monitors))
        if which in ("tracker", "both"):
            observers.append(counted.of(Tracking(LinesFile(Path(folder) / "lines"), every=EVERY)))
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for pair in PAIRS for layer in (nn.Conv2d(*pair, 3, 2, 1), nn.ReLU())))
        model.extend([nn.Flatten(), nn.Linear(64, 10)])
        data = (torch.randn(ROWS, 3, 32, 32), torch.randint(10, (ROWS,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        config = RunConfig(budget=f"{steps + EVERY}ba")
        with Trainer(model, loss_of, optimizers=[optimizer], observers=observers, config=config) as trainer:
            for _ in range(EVERY):
                trainer.step(data)
            counted.seconds, start = 0.0, thread_time()
            for _ in range(steps):
                trainer.step(data)
            return (thread_time() - start) / steps, counted.seconds / steps


def run(*, quick: bool) -> str:
    """Time steps with and without, and write what the calls took."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        steps, rounds = (20, 2) if quick else (100, 8)
        arms = ("nothing", "tracker", "monitors", "both")
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
        for number in range(rounds):
            for name in arms[number % 4 :] + arms[: number % 4]:
                seen[name].append(watched(steps, name))
        step = sorted(one[0] for one in seen["nothing"])[rounds // 2]
        rows = [_row(name, [own for _, own in values], step) for name, values in seen.items() if name != "nothing"]
        notes = {"steps": steps, "every": EVERY, "step_us": step * 1e6, "what": "us a step in calls; ratio: of a step"}
        return write("watching" + ("_quick" if quick else ""), rows, notes, RESULTS)
    finally:
        torch.set_num_threads(threads)


def _row(name: str, seconds: list[float], step: float) -> Row:
    values = sorted(one * 1e6 for one in seconds)
    low, middle, high = values[len(values) // 4], values[len(values) // 2], values[(3 * len(values)) // 4]
    part = 1e-6 / step
    return Row(name, middle, low, high, middle, middle * part, low * part, high * part, len(values))
