"""What watches a run: an observer is told of steps, evaluations, checkpoints and the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from cosmati.core.clock import Budget, Clock
from cosmati.core.plain import decode, encode
from cosmati.errors import CheckpointError, PlanError
from cosmati.records.run import CLOCK_FIELDS
from cosmati.train.facts import RunFacts
from cosmati.train.outcome import StepOutcome

T = TypeVar("T")
_BELOW = "observer/"


@dataclass(frozen=True, kw_only=True)
class WatchedRun:
    """What an observer may see of a run, and ask of it.

    Attributes:
        facts: what the run is.
        model: that trains; look, and change nothing.
        folder: of the run, None where nothing is kept.
        rank: of this process among the data-parallel ranks.
        attempt: number of this start in the run folder, from 0; ranks after the first one have 0.
        started: of this attempt, in seconds since 1970.
        superseded: earlier attempts of which steps are taken anew, by number: from which step.
        stop: `stop(why)` ends the run after the step in progress, with a checkpoint. The reason stands in the run's
            result and in `attempts.jsonl`; the same command goes on.
        publish: `publish(clock, values)` tells every observer of values that were measured, and the run folder keeps
            them in `monitors.jsonl`. Numbers of Python and NumPy, and tensors of one element.
    """

    facts: RunFacts
    model: nn.Module
    folder: Path | None
    rank: int
    attempt: int
    started: float
    superseded: Mapping[int, int]
    stop: Callable[[str], None]
    publish: Callable[[Clock, Mapping[str, float]], None]


class Observer:
    """Base of observers: every call does nothing.

    Attributes:
        every: call `on_step_begin` and `on_step` every so many steps, at least 1.
        ends_runs: whether it may ask for the run's end by what it has seen. Then no class is promised to be isolated.
    """

    every: int = 1
    ends_runs: bool = False

    def on_open(self, run: WatchedRun) -> None:
        """Take note of what is about to start: keep `run` to see the model, to publish values or to ask for a stop."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return what a resumed run needs to go on watching: plain values and tensors, kept in each checkpoint.

        It's taken after the step's and the evaluation's events, so that a run that was stopped and one that wasn't tell
        an observer the same.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` had returned, before `on_start`; not called where the run begins."""

    def on_start(self, clock: Clock, budget: Budget) -> None:
        """Take note that the run starts or goes on."""

    def on_step_begin(self, clock: Clock) -> None:
        """Take note that a step is about to be taken of which `on_step` will tell, too."""

    def on_step(self, outcome: StepOutcome) -> None:
        """Take note of a commit."""

    def on_values(self, clock: Clock, values: Mapping[str, float]) -> None:
        """Take note of what monitors have measured."""

    def on_evaluation(self, clock: Clock, metrics: Mapping[str, float], seconds: float) -> None:
        """Take note of metrics, after this many seconds of training."""

    def on_checkpoint(self, clock: Clock, state_digest: bytes, parameter_root: bytes) -> None:
        """Take note of a model checkpoint, before it's published."""

    def on_end(self, clock: Clock, ended: str) -> None:
        """Take note that the run has ended."""


def checked_observers(observers: Sequence[Observer] | Observer) -> list[Observer]:
    """Return observers as a list, seen to be such.

    Raises:
        PlanError: one is none, or its `every` is no number of steps.
    """
    found = [observers] if isinstance(observers, Observer) else list(observers)
    for one in found:
        if not isinstance(one, Observer):
            hint = ""
            if isinstance(one, type) and issubclass(one, Observer):
                hint = f" It's a class: give {one.__name__}(...)."
            elif callable(getattr(one, "measure", None)):
                hint = f" It's a monitor: give Monitors([{type(one).__name__}(...)])."
            msg = f"observers has {one!r}, which is no Observer.{hint} Derive yours from cosmati.Observer."
            raise PlanError(msg)
        refuse_odd_interval(one)
    return found


def refuse_odd_interval(observer: Observer) -> None:
    """Refuse what can't be counted in steps.

    Raises:
        PlanError: `every` is no number of steps.
    """
    if not isinstance(observer.every, int) or observer.every < 1:
        msg = (
            f"{type(observer).__name__}.every is {observer.every!r}, and it is a number of steps, at least 1. For what "
            "is counted in epochs or seconds, look at outcome.clock in on_step."
        )
        raise PlanError(msg)


def plain_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return values that were measured as plain numbers; a tensor of one element is read from its device.

    Raises:
        PlanError: one is no number, or has no name.
    """
    found: dict[str, float] = {}
    for name, value in values.items():
        try:
            if not isinstance(name, str) or name in CLOCK_FIELDS or isinstance(value, str | bytes):
                raise TypeError
            found[name] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            msg = (
                f"publish() is given {name!r:.80}: {value!r:.80}. It takes names, but for those of the clock "
                f"({', '.join(CLOCK_FIELDS)}), and numbers: Python's, NumPy's, and tensors of one element."
            )
            raise PlanError(msg) from None
    return found


def states_of(observers: Sequence[Observer]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the states of those observers that have one, as JSON and tensors by name.

    Raises:
        CheckpointError: one is no dictionary, or holds what only pickle could write, by its path.
    """
    facts: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for name, observer in named(observers).items():
        state = observer.state_dict()
        if not isinstance(state, Mapping):
            msg = f"state_dict() of {name} returned {state!r:.80}. Return a dictionary, empty where it keeps nothing."
            raise CheckpointError(msg)
        if state:
            told, own = encode({name: dict(state)})
            facts |= told
            tensors |= {_BELOW + path: tensor for path, tensor in own.items()}
    return facts, tensors


def restore_states(observers: Sequence[Observer], facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    """Give observers their states back, by class and order; return the names of states that nobody took."""
    known = named(observers)
    own = {path.removeprefix(_BELOW): tensor for path, tensor in tensors.items() if path.startswith(_BELOW)}
    for name, observer in known.items():
        if name in facts:
            observer.load_state_dict(decode(facts[name], own))
    return sorted(facts.keys() - known.keys())


def named(watchers: Sequence[T]) -> dict[str, T]:
    """Return observers, or monitors, by class; the second and further of a class with their number."""
    found: dict[str, T] = {}
    for one in watchers:
        kind = type(one).__qualname__
        number = sum(type(other).__qualname__ == kind for other in found.values())
        found[f"{kind} {number + 1}" if number else kind] = one
    return found


@dataclass
class History(Observer):
    """Keep losses and metrics in memory.

    Attributes:
        losses: (step, loss).
        evaluations: (clock, seconds of training, metrics).
    """

    def __post_init__(self) -> None:
        self.losses: list[tuple[int, float]] = []
        self.evaluations: list[tuple[Clock, float, Mapping[str, float]]] = []

    def on_step(self, outcome: StepOutcome) -> None:
        """Keep the loss."""
        self.losses.append((outcome.clock.step, float(outcome.loss)))

    def on_evaluation(self, clock: Clock, metrics: Mapping[str, float], seconds: float) -> None:
        """Keep the metrics."""
        self.evaluations.append((clock, seconds, metrics))
