"""Sensitive classes of a run, and what of a step isn't told to those who watch it, since it would tell of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from cosmati.errors import PlanError
from cosmati.ledger.sealing import seal_names
from cosmati.provenance.sensitive import marked_in, sensitive_classes
from cosmati.provenance.voucher import VouchedData
from cosmati.routing.policy import CompiledPolicy
from cosmati.train.ingredients import Ingredients
from cosmati.train.outcome import StepOutcome
from cosmati.train.routes import Route

_TELLING = ("gradient_norm", "update_norm", "activation")
"""How the names of values begin that a monitor has of the step's own gradients, update and activations."""
_UNMEASURED: dict[str, Any] = dict.fromkeys(("norms", "sketches", "entropies", "update_norms", "update_sketches"))
"""Columns by microbatch and region, as of a step in which nothing was measured."""


def sensitive_of(given: Ingredients, policy: CompiledPolicy | None, vouched: VouchedData | None) -> tuple[str, ...]:
    """Return a run's sensitive classes: what the taxonomy says, what the data's authority has published, and its own.

    Raises:
        PlanError: the run names one that it hasn't.
    """
    own = given.config.sensitive
    classes = policy.classes if policy is not None else ()
    for name in own:
        if not sensitive_classes(classes, [name]):
            there = f"It has {', '.join(classes)}" if classes else "Classes come with a policy: give one"
            raise PlanError(f"RunConfig.sensitive names {name!r}, and the run has no such class. {there}.")
    marked = {*own, *(given.taxonomy.sensitive if given.taxonomy is not None else ())}
    return sensitive_classes(classes, marked | (marked_in(vouched.archive) if vouched is not None else set()))


class Withholding:
    """What watchers of a run are told of its steps: not what tells of its sensitive classes alone.

    Which class a microbatch is of is known without a wait for the device; whether its rows took part isn't asked.

    Args:
        policy: of the run.
        sensitive: its sensitive classes.
    """

    def __init__(self, policy: CompiledPolicy, sensitive: tuple[str, ...]) -> None:
        self._hidden = [bool(name) for name in seal_names(policy.classes, sensitive)]

    def of(self, outcome: StepOutcome) -> StepOutcome:
        """Return the outcome without updates, without norms where a sensitive class taught, or losses where all are."""
        offered = [route for route in outcome.routes if route.offered]
        hidden = [self._is_hidden(route) for route in offered]
        if not any(some for some, _ in hidden):
            # An optimizer's momentum carries what a class taught into the updates of steps without it.
            return outcome._replace(update_norms=None, update_sketches=None, withheld=("updates",))
        seen = outcome._replace(**_UNMEASURED, gradient_norm=_untold, withheld=("norms",))
        if not all(alone for _, alone in hidden):
            return seen
        nothing = torch.full_like(outcome.loss, math.nan)
        losses = [nothing] * len(outcome.sub_losses)
        return seen._replace(loss=nothing, sub_losses=losses, withheld=("norms", "loss"))

    def _is_hidden(self, route: Route) -> tuple[bool, bool]:
        """Return whether a microbatch may have rows of a sensitive class, and whether it can have no others."""
        if route.tokens is None:
            return self._hidden[route.class_id], self._hidden[route.class_id]
        own = [self._hidden[class_id] for class_id, _, _ in route.tokens.groups]
        return any(own), all(own)


def _untold() -> float:
    return math.nan


def withholding_of(policy: CompiledPolicy | None, sensitive: tuple[str, ...]) -> Withholding | None:
    """Return what a run withholds from those who watch it; None where it has no sensitive class."""
    return Withholding(policy, sensitive) if policy is not None and sensitive else None


def is_withheld(name: str, withheld: Sequence[str]) -> bool:
    """Say whether a value that a monitor has measured isn't told of a step of which something is withheld."""
    return bool(withheld) and name.startswith(_TELLING if "norms" in withheld else "update_norm")
