"""What a checkpoint holds of a run, and the way back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cosmati.core.batch import iterate_tensors
from cosmati.core.clock import Clock
from cosmati.core.method import State
from cosmati.core.plain import decode, encode
from cosmati.core.plan import Plan
from cosmati.core.state import optimizer_tensors, restore_optimizer
from cosmati.train.assembly import Assembly
from cosmati.train.feed import Feed
from cosmati.train.loss_state import loss_buffers, restore_loss_buffers
from cosmati.train.run.checkpoints import Checkpoint


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
) -> Checkpoint:
    """Gather the state of a run, and further facts about it. Every rank has to take part."""
    names = _names(assembly)
    tensors: dict[str, torch.Tensor] = {}
    optimizers = []
    for index, scheduled in enumerate(assembly.optimizers):
        own, facts = optimizer_tensors(scheduled.optimizer, names)
        own = assembly.layout.whole_state(own, of_optimizers=True)
        tensors |= {f"optimizer/{index}/{name}": value for name, value in own.items()}
        optimizers.append(facts)
    for index, state in states.items():
        kept = {name: value for name, value in state.items() if next(iterate_tensors(value), None) is not None}
        kept = assembly.layout.whole_state(kept, of_optimizers=False)
        tensors |= {f"method/{index}/{name}": value for name, value in kept.items()}
    tensors |= {
        name: value.clone()
        for name, value in loss_buffers([turn.loss for turn in assembly.turns], assembly.model).items()
    }
    data, own = encode(dict(feed.state()) if feed else {})
    tensors |= {f"feed/{name}": value for name, value in own.items()}
    tensors |= {f"deferred/{name}": rows for name, rows in assembly.deferred_rows.state().items()}
    return Checkpoint(
        clock.step,
        dict(assembly.layout.save()),
        tensors,
        {
            "clock": list(clock),
            "feed": data,
            "optimizers": optimizers,
            "withdrawn": [[g.name, g.because] for g in plan.guarantees if not g.holds],
            **(about or {}),
        },
    )


def restore(checkpoint: Checkpoint, assembly: Assembly, feed: Feed | None) -> Restored:
    """Put a checkpoint's state into model, optimizers and data, and return the rest.

    Raises:
        CheckpointError: it doesn't fit the model.
    """
    facts = checkpoint.facts
    assembly.layout.load(checkpoint.model)
    names = _names(assembly)
    for index, scheduled in enumerate(assembly.optimizers):
        own = assembly.layout.own_state(_below(checkpoint.state, f"optimizer/{index}/"), of_optimizers=True)
        restore_optimizer(scheduled.optimizer, names, own, facts["optimizers"][index])
    restore_loss_buffers([turn.loss for turn in assembly.turns], assembly.model, checkpoint.state, assembly.device)
    states: dict[int, State] = {}
    for index in range(len(assembly.plan.methods)):
        own = assembly.layout.own_state(_below(checkpoint.state, f"method/{index}/"), of_optimizers=False)
        states[index] = {name: value.to(assembly.device) for name, value in own.items()}
    assembly.deferred_rows.restore(_below(checkpoint.state, "deferred/"))
    clock = Clock(*facts["clock"])
    if feed is not None:
        feed.restore(decode(facts["feed"], _below(checkpoint.state, "feed/")), clock)
    return Restored(clock, states, assembly.plan.recalled(facts["withdrawn"]))


def _names(assembly: Assembly) -> dict[int, str]:
    return {id(parameter): name for name, parameter in assembly.layout.pieces()}


def _below(state: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
