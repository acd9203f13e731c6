"""Makes a run's trainer once more: as its recipe says, or as it was before a stop at which something was changed."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cosmati import optim
from cosmati.errors import PlanError
from cosmati.forget.ablation import Wrap
from cosmati.optim import Optimizer, Schedule
from cosmati.routing.policy_file import PolicyFile
from cosmati.train.trainer import Trainer


@dataclass(frozen=True, slots=True)
class RecipeThen:
    """What a run's recipe was in steps before a stop, as far as it's another one now.

    Attributes:
        policy: that was in force; None for a run without one.
        schedules: of the learning rates, as the ledger has them, by the number of the optimizer.
    """

    policy: PolicyFile | None
    schedules: Mapping[int, str]

    def policy_for(self, now: PolicyFile | None) -> PolicyFile | None:
        """Return the policy; the recipe's own where it's the same one: it knows whom to ask about it."""
        is_same = self.policy is not None and now is not None and now.digest == self.policy.digest
        return now if is_same else self.policy

    def optimizers_for(self, now: Sequence[Optimizer]) -> tuple[Optimizer, ...]:
        """Return a recipe's optimizers with the schedules of then; what can't be made again stays as it is now."""
        return tuple(self._with_schedule(index, one) for index, one in enumerate(now))

    def _with_schedule(self, index: int, optimizer: Optimizer) -> Optimizer:
        told = self.schedules.get(index, "")
        made = None if told in ("", repr(optimizer.schedule)) else schedule_of(told)
        return optimizer if made is None else dataclasses.replace(optimizer, schedule=made)


def schedule_of(text: str) -> Schedule | None:
    """Return the schedule of this library that a text tells, such as `Cosine(warmup='0ba', final=0.1)`.

    Returns:
        The schedule; None where it's somebody else's, or has options that the text doesn't tell.
    """
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            return None
        kind: Any = vars(optim).get(call.func.id)
        if not isinstance(kind, type) or not hasattr(kind, "multiplier"):
            return None
        made: Any = kind(**{str(one.arg): ast.literal_eval(one.value) for one in call.keywords})
    except (SyntaxError, ValueError, TypeError, PlanError):
        return None
    return made if repr(made) == text and isinstance(made, Schedule) else None


class Make(Protocol):
    """Makes the run's trainer anew."""

    def __call__(self, wrap: Wrap, folder: Path | None, /, **config: Any) -> Trainer:  # noqa: ANN401  (settings)
        """Return it.

        Args:
            wrap: puts another source around the run's own.
            folder: of the run; None keeps nothing.
            config: settings of `RunConfig` that differ; and `then`, a `RecipeThen`, of a run that was changed at a
                stop, for the steps before it.
        """
        ...
