"""Lets methods stand around a governed microbatch's way through the model, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from cosmati.core.batch import Batch
from cosmati.core.method import Position
from cosmati.core.passing import Passing
from cosmati.errors import PlanError
from cosmati.train.assembly import Assembly
from cosmati.train.routes import Route
from cosmati.train.token_routes import token_classes


class Around(NamedTuple):
    """What methods want of a microbatch beside what they do by themselves.

    Attributes:
        look: at its objective, before that's differentiated.
        zeroed: names of parameters that a token reads as zeros where it may not teach them.
    """

    look: Callable[[Tensor], None]
    zeroed: frozenset[str] = frozenset()


class PassingMethods:
    """The methods of a plan that have a hook `passing`, at work.

    Args:
        assembly: of the run.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._a = assembly
        self._methods = assembly.plan.with_hook("passing")
        named = assembly.layout.weights().tensors
        self._parameters = {
            region: {name: named[name] for name in names}
            for region, names in zip(assembly.regions.names, assembly.regions.parameters, strict=True)
        }
        self._memory: dict[object, object] = {}

    @contextmanager
    def around(self, batch: Batch, position: Position, route: Route) -> Iterator[Around]:
        """Stand around a microbatch.

        Raises:
            PlanError: a method's hook returns something else than a context.
        """
        if not self._methods:
            yield Around(lambda _: None)
            return
        passing = self._passing(batch, route)

        def look(objective: Tensor) -> None:
            for one in passing.looks:
                one(objective)

        with ExitStack() as around:
            for method in self._methods:
                own = method.passing(passing, position)
                if not isinstance(own, AbstractContextManager):
                    msg = (
                        f"{type(method).__name__}.passing returned a {type(own).__name__}, and the loop takes a "
                        "context: return contextlib.nullcontext() where there's nothing to do."
                    )
                    raise PlanError(msg)
                around.enter_context(own)
            yield Around(look, frozenset(passing.zeroed))

    def _passing(self, batch: Batch, route: Route) -> Passing:
        a = self._a
        assert a.policy is not None, "refused at setup"
        if route.tokens is None:
            ids, table = torch.tensor(route.class_id), torch.tensor(route.weights, dtype=torch.float64)
        else:
            own = token_classes(batch)  # The source's: the last place of both tables is padding's.
            ids = torch.tensor([*(cell[0] for cell in route.tokens.cells), -1])[own]
            table = route.tokens.weights[own]
        weights = dict(zip(a.regions.names, table.unbind(-1), strict=True))
        return Passing(
            a.model,
            a.policy.classes,
            ids,
            weights,
            self._parameters,
            a.config.compile_blocks,
            a.layout.replaced,
            self._memory,
        )
