"""A monitor measures; `Monitors` says when, brings all of it to the host at once, and publishes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cosmati.core.clock import Budget, Clock
from cosmati.train.observers.observer import Observer, WatchedRun, named
from cosmati.train.outcome import StepOutcome

Measured = Mapping[str, "float | Tensor"]


class Monitor:
    """Base of monitors: measures nothing. None of its calls may wait for an accelerator: return tensors as they are."""

    def open(self, run: WatchedRun) -> None:
        """Look at the run that is about to start."""

    def start(self, clock: Clock, budget: Budget) -> None:
        """Take note of where it starts."""

    def before(self, clock: Clock, number: int) -> None:
        """Get ready for a step that will be measured, as the run's first, second, ... one."""

    def note(self, outcome: StepOutcome) -> None:
        """Take note of every step, measured or not."""

    def measure(self, outcome: StepOutcome) -> Measured:
        """Return values by name; tensors of one dimension at most stay on their device."""
        return {}

    def judge(self, found: Mapping[str, float | list[float]], outcome: StepOutcome) -> Mapping[str, float]:
        """Return what is published, given on the host what was measured."""
        return {name: value for name, value in found.items() if not isinstance(value, list)}

    def end(self) -> None:
        """Let go of what was taken for a step, also where the step has failed."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return what a resumed run needs (see `Observer.state_dict`)."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` had returned."""


class Monitors(Observer):
    """Measures every so many steps, and publishes: the run folder and trackers have the values.

    What stays on an accelerator is read once a measured step, all at once, whatever the number of monitors.

    Args:
        monitors: in any order; names that two of them publish are the later one's.
        every: steps between measurements.

    Raises:
        ValueError: `every` isn't at least 1, or one is no monitor.
    """

    def __init__(self, monitors: Sequence[Monitor] | Monitor, *, every: int = 10) -> None:
        if not isinstance(every, int) or every < 1:
            msg = f"Monitors(every={every!r}): it is a number of steps, at least 1."
            raise ValueError(msg)
        self.monitors = (monitors,) if isinstance(monitors, Monitor) else tuple(monitors)
        for one in self.monitors:
            if not isinstance(one, Monitor):
                msg = (
                    f"Monitors is given {one!r}, which is no Monitor: give instances, GradientNorms() for one. An "
                    "observer goes to the trainer: Trainer(..., observers=[...])."
                )
                raise ValueError(msg)  # noqa: TRY004  (as for the other argument)
        self.interval = every
        # Every step notices a call that does nothing.
        self._noting = [one.note for one in self.monitors if type(one).note is not Monitor.note]
        self._ending = [one.end for one in self.monitors if type(one).end is not Monitor.end]
        self._is_ready = False

    def on_open(self, run: WatchedRun) -> None:
        """Show each the run."""
        self._run = run
        for one in self.monitors:
            one.open(run)

    def on_start(self, clock: Clock, budget: Budget) -> None:
        """Tell each where it starts."""
        for one in self.monitors:
            one.start(clock, budget)

    def on_step_begin(self, clock: Clock) -> None:
        """Get ready where the step will be measured."""
        number, rest = divmod(clock.step + 1, self.interval)
        if not rest:
            self._is_ready = True
            for one in self.monitors:
                one.before(clock, number)

    def on_step(self, outcome: StepOutcome) -> None:
        """Measure, read, judge, publish."""
        for note in self._noting:
            note(outcome)
        if outcome.clock.step % self.interval:
            return
        with torch.no_grad():
            measured = [one.measure(outcome) for one in self.monitors] if self._is_ready else []
            self._release()
            read = _read(measured)
        values: dict[str, float] = {}
        for one, found in zip(self.monitors, read, strict=False):
            values |= one.judge(found, outcome)
        if values:
            self._run.publish(outcome.clock, values)

    def _release(self) -> None:
        self._is_ready = False
        for end in self._ending:
            end()

    def on_end(self, clock: Clock, ended: str) -> None:
        """Let go of everything."""
        self._release()

    def state_dict(self) -> Mapping[str, Any]:
        """Return the monitors' states."""
        states = {name: dict(one.state_dict()) for name, one in named(self.monitors).items()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hand each its own."""
        for name, one in named(self.monitors).items():
            if name in state:
                one.load_state_dict(state[name])


def _read(measured: Sequence[Measured]) -> list[dict[str, float | list[float]]]:
    """Bring tensors to the host, with one wait for each device."""
    tensors = [
        value if value.dim() else value[None] for own in measured for value in own.values() if isinstance(value, Tensor)
    ]
    flat: list[float] = []
    if tensors:
        device = tensors[0].device
        flat = torch.cat([tensor.to(device, torch.float32) for tensor in tensors]).tolist()
    found: list[dict[str, float | list[float]]] = []
    place = 0
    for own in measured:
        mine: dict[str, float | list[float]] = {}
        for name, value in own.items():
            if isinstance(value, Tensor):
                numbers = flat[place : place + value.numel()]
                place += value.numel()
                mine[name] = numbers if value.dim() else numbers[0]
            else:
                mine[name] = value
        found.append(mine)
    return found
