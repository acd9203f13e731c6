"""What a checkpoint holds of a run, and the way back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cosmati.core.clock import Clock
from cosmati.core.method import State
from cosmati.core.plain import decode, encode
from cosmati.core.plan import Plan
from cosmati.core.state import optimizer_tensors, restore_optimizer
from cosmati.train.assembly import Assembly
from cosmati.train.feed import Feed
from cosmati.train.layout.span import HeldSpan
from cosmati.train.loss_state import loss_buffers, restore_loss_buffers
from cosmati.train.observers.observer import Observer, states_of
from cosmati.train.run.checkpoints import Checkpoint
from cosmati.train.run.parts import HeldState


@dataclass(frozen=True)
class Restored:
    """What goes on from a checkpoint, beside model, optimizers and data.

    Attributes:
        clock: where it stands.
        states: of the methods, by their index in the plan.
        plan: without the promises that the run has broken.
    """

    clock: Clock
    states: dict[int, State]
    plan: Plan


def snapshot(
    assembly: Assembly,
    states: Mapping[int, State],
    clock: Clock,
    plan: Plan,
    feed: Feed | None,
    about: Mapping[str, Any] | None = None,
) -> HeldState:
    """Return what this rank holds of the state of a run, and further facts about it. Every rank has to take part."""
    names = _names(assembly)
    tensors: dict[str, HeldSpan] = {}
    optimizers = []
    for index, scheduled in enumerate(assembly.optimizers):
        own, facts = optimizer_tensors(scheduled.optimizer, names)
        spans = assembly.layout.held_state(own, of_optimizers=True)
        tensors |= {f"optimizer/{index}/{name}": span for name, span in spans.items()}
        optimizers.append(facts)
    for index, state in states.items():
        spans = assembly.layout.held_state(state, of_optimizers=False)
        tensors |= {f"method/{index}/{name}": span for name, span in spans.items()}
    data, own = encode(dict(feed.state()) if feed else {})
    own = {f"feed/{name}": value for name, value in own.items()}
    own |= {f"deferred/{name}": rows for name, rows in assembly.deferred_rows.state().items()}
    own |= {
        name: value.clone()
        for name, value in loss_buffers([turn.loss for turn in assembly.turns], assembly.model).items()
    }
    if assembly.ranks.rank == 0 or not assembly.layout.is_cut:
        tensors |= {name: HeldSpan.of(value) for name, value in own.items()}
    return HeldState(
        clock.step,
        assembly.layout.held(),
        tensors,
        {
            "clock": list(clock),
            "feed": data,
            "optimizers": optimizers,
            "withdrawn": [[g.name, g.because] for g in plan.guarantees if not g.holds],
            **(about or {}),
        },
    )


def with_observers(taken: HeldState, observers: Sequence[Observer], assembly: Assembly) -> HeldState:
    """Return a state with what observers keep beside it: those of the first rank, where each writes its part."""
    told, tensors = states_of(observers)
    if not told:
        return taken
    is_mine = assembly.ranks.rank == 0 or not assembly.layout.is_cut
    own = {name: HeldSpan.of(value) for name, value in tensors.items() if is_mine}
    return replace(taken, state={**taken.state, **own}, facts={**taken.facts, "observers": told})


def restore(checkpoint: Checkpoint, assembly: Assembly, feed: Feed | None) -> Restored:
    """Put a checkpoint's state into model, optimizers and data, and return the rest.

    Raises:
        CheckpointError: it doesn't fit the model.
    """
    facts = checkpoint.facts
    assembly.layout.load(checkpoint.model)
    names = _names(assembly)
    for index, scheduled in enumerate(assembly.optimizers):
        own = assembly.layout.own_state(_Below(checkpoint.state, f"optimizer/{index}/"), of_optimizers=True)
        restore_optimizer(scheduled.optimizer, names, own, facts["optimizers"][index])
    restore_loss_buffers([turn.loss for turn in assembly.turns], assembly.model, checkpoint.state, assembly.device)
    states: dict[int, State] = {}
    for index in range(len(assembly.plan.methods)):
        own = assembly.layout.own_state(_Below(checkpoint.state, f"method/{index}/"), of_optimizers=False)
        states[index] = {name: value.to(assembly.device) for name, value in own.items()}
    assembly.deferred_rows.restore(_Below(checkpoint.state, "deferred/"))
    clock = Clock(*facts["clock"])
    if feed is not None:
        feed.restore(decode(facts["feed"], _Below(checkpoint.state, "feed/")), clock)
    return Restored(clock, states, assembly.plan.recalled(facts["withdrawn"]))


def _names(assembly: Assembly) -> dict[int, str]:
    return {id(parameter): name for name, parameter in assembly.layout.pieces()}


class _Below(Mapping[str, torch.Tensor]):
    """Those of some tensors whose names have a prefix, without it; each is read when it's asked for."""

    def __init__(self, state: Mapping[str, torch.Tensor], prefix: str) -> None:
        self._state, self._prefix = state, prefix
        self._names = [name.removeprefix(prefix) for name in state if name.startswith(prefix)]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._state[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
