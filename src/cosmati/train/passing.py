"""Lets methods stand around a governed microbatch's way through the model, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from cosmati.core.batch import Batch
from cosmati.core.method import Method, Position
from cosmati.core.passing import Passing
from cosmati.train.assembly import Assembly
from cosmati.train.routes import Route
from cosmati.train.token_routes import token_classes


@contextmanager
def passing_by(
    methods: Sequence[Method], assembly: Assembly, batch: Batch, position: Position, route: Route
) -> Iterator[Callable[[Tensor], None]]:
    """Let methods stand around a microbatch; give what looks at its objective before it's differentiated.

    Args:
        methods: those with a hook `passing`.
        assembly: of the run, which is governed.
        batch: the microbatch.
        position: its own.
        route: what it may teach.
    """
    if not methods:
        yield lambda _: None
        return
    passing = _passing(assembly, batch, route)

    def look(objective: Tensor) -> None:
        for one in passing.looks:
            one(objective)

    with ExitStack() as around:
        for method in methods:
            around.enter_context(method.passing(passing, position))
        yield look


def _passing(a: Assembly, batch: Batch, route: Route) -> Passing:
    assert a.policy is not None, "refused at setup"
    if route.tokens is None:
        ids, table = torch.tensor(route.class_id), torch.tensor(route.weights, dtype=torch.float64)
    else:
        own = token_classes(batch)  # The source's: the last place of both tables is padding's.
        ids = torch.tensor([*(cell[0] for cell in route.tokens.cells), -1])[own]
        table = route.tokens.weights[own]
    return Passing(
        a.model,
        a.policy.classes,
        ids,
        dict(zip(a.regions.names, table.unbind(-1), strict=True)),
        dict(zip(a.regions.names, a.regions.parameters, strict=True)),
        a.config.compile_blocks,
        a.layout.replaced,
    )
