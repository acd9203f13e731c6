"""Sees whether documents of a pack are kept apart: the tokens of one class are exchanged, and others mustn't notice.

What a masked layer reads, what it gives and its output's gradient are compared in bits at the tokens of all other
classes. They differ where attention looks across borders, where a label or a statistic does, or where a layer's second
dimension isn't the tokens'. It costs two more passes, so only the steps are looked at that `ForwardWatch` looks at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cosmati.core.batch import Batch, map_tensors
from cosmati.core.labels import IGNORED
from cosmati.routing.token_masks import TokenMasks
from cosmati.train.cutting import shortage
from cosmati.train.token_routes import Learner, RunApart, TokenRoute, masking, token_classes

Objective = Callable[[Batch, TokenMasks], Tensor]
"""Runs a microbatch forward under masks, always with the same draws; returns what is differentiated."""


class _Trace(NamedTuple):
    name: str
    axis: int
    read: Tensor
    given: Tensor
    gradient: Tensor | None


def leak_between_documents(
    objective: Objective,
    batch: Batch,
    route: TokenRoute,
    parameters: Sequence[Learner],
    apart: RunApart,
    zeroed: Collection[str] = (),
) -> str:
    """Say how tokens of one class reach others in a microbatch of packs; empty where they don't.

    Args:
        objective: of a microbatch.
        batch: of packs.
        route: of its tokens; some regions' classes differ.
        parameters: of the layout.
        apart: knows which modules run once for each route.
        zeroed: names of parameters that a token reads as zeros where it may not teach them.
    """
    classes = token_classes(batch)
    changed = classes == _denied_class(route, classes)
    other = _exchanged(batch, changed)

    def traced(one: Batch) -> list[_Trace]:
        masks = masking(route, one, parameters, apart, zeroed=zeroed, keep=True)
        assert masks is not None, "some regions' classes differ"
        value = objective(one, masks)
        taps, masks.tapped = masks.tapped, []
        if taps and value.requires_grad:
            for tap in taps:
                tap.output.retain_grad()
            with masks.differentiating(value):
                torch.autograd.backward(value, inputs=[tap.output for tap in taps])
        return [_Trace(t.name, t.axis, t.tokens, t.output.detach(), t.output.grad) for t in taps]

    own = dataclasses.replace(batch, data=map_tensors(torch.clone, batch.data))  # A loss may change it in place.
    try:
        before, after = traced(own), traced(other)
    except (RuntimeError, MemoryError) as error:
        if not (why := shortage(error)):
            raise
        return f"memory was too short to see whether a pack's documents are kept apart ({why})"
    kept = (~changed).to(before[0].given.device) if before else ~changed
    for one, two in zip(before, after, strict=False):
        if not _same(one.read, two.read, kept, one.axis) or not _same(one.given, two.given, kept, one.axis):
            return f"{one.name} reads, at one document's tokens, what follows from another's"
    for one, two in reversed(list(zip(before, after, strict=False))):
        if not _same(one.gradient, two.gradient, kept, one.axis):
            return f"the gradient at {one.name} follows, at one document's tokens, from another's (its labels, say)"
    return "" if len(before) == len(after) else "which layers run follows from the tokens"


def _denied_class(route: TokenRoute, classes: Tensor) -> int:
    """Return a class that has tokens and may not teach what another one may."""
    present = [c for c in classes.unique().tolist() if c >= 0]
    mixed = sorted(route.mixed)
    return int(min(present, key=lambda c: route.weights[c, mixed].sum().item()))


def _exchanged(batch: Batch, changed: Tensor) -> Batch:
    """Return the batch with other tokens, and other labels, in some places; how many labels there are stays."""
    target = batch.target
    if target.is_floating_point():
        return batch.replace(input=_other(batch.input, changed))
    is_label = changed.to(target.device) & (target != IGNORED)
    return batch.replace(input=_other(batch.input, changed), target=_other(target, is_label))


def _other(tokens: Tensor, places: Tensor) -> Tensor:
    """Return tokens with another one in some places: of those in the microbatch, the one that's rarest there."""
    places, tokens = places.to(tokens.device), tokens.clone()
    known = tokens[tokens >= 0].unique()
    numbers = torch.bincount(torch.searchsorted(known, tokens[places]), minlength=len(known))
    tokens[places] = known[numbers.argmin()]
    return tokens


def _same(one: Tensor | None, two: Tensor | None, kept: Tensor, axis: int) -> bool:
    if one is None or two is None or one.shape != two.shape:
        return one is two
    return torch.equal(one.movedim(axis, 1)[kept], two.movedim(axis, 1)[kept])
