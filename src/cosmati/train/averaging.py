"""The averages that methods and optimizers keep, in place of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from cosmati.core.method import Position, State
from cosmati.optim.stepping import GroupedOptimizer
from cosmati.train.assembly import Assembly
from cosmati.train.evaluation import kept_state
from cosmati.train.feed import Feed
from cosmati.train.recalibration import recalibrate, recalibration_passes


def averaged_weights(assembly: Assembly, states: Mapping[int, State], at: Position) -> dict[str, Tensor] | None:
    """Return the averages that a method or an optimizer keeps, by parameter name; None where none does."""
    for index, method in enumerate(assembly.plan.methods):
        weights = method.evaluation_weights(states[index], at)
        if weights is not None:
            return dict(weights)
    names = {id(parameter): name for name, parameter in assembly.layout.pieces()}
    found: dict[str, Tensor] = {}
    for scheduled in assembly.optimizers:
        if isinstance(scheduled.optimizer, GroupedOptimizer):
            own = scheduled.optimizer.evaluation_weights()
            pieces = {f"{names[id(p)]}/average": value for p, value in own.items()}
            whole = assembly.layout.whole_state(pieces, of_optimizers=True)
            alike = assembly.layout.own_state(whole, of_optimizers=False)  # as weights are cut
            found |= {name.removesuffix("/average"): value for name, value in alike.items()}
    return found or None


@contextmanager
def averaged(assembly: Assembly, weights: Mapping[str, Tensor] | None, feed: Feed | None) -> Iterator[nn.Module]:
    """Give the model with averages in place of its weights, and BatchNorm's statistics computed for them."""
    model, losses = assembly.model, [turn.loss for turn in assembly.turns]
    # The training data's own generators among them: a validation loader may draw from the same one.
    drawn_from = feed.generators if feed is not None else ()
    if weights is None:
        with kept_state(model, losses), assembly.generators.restored(drawn_from):
            yield model
        return
    with assembly.layout.replaced(weights), kept_state(model, losses), assembly.generators.restored(drawn_from):
        if assembly.statistics.layers:
            recalibrate(model, assembly.statistics.layers.values(), recalibration_passes(assembly, feed))
        yield model
