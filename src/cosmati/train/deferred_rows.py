"""Rows that a loop of one's own gives while their class is deferred: a source would give them again, nobody does here.

They're left out, as the policy says. Which ones wait is kept, over a resume too, until the loop gives them again in a
phase that admits their class. So the run can say in the end what was never offered.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from cosmati.core.batch import TOMBSTONE, Batch
from cosmati.routing.policy import CompiledPolicy
from cosmati.train.routes import Router


class DeferredRows:
    """Follows deferred rows through a loop of the user's own.

    Args:
        policy: of the run; None defers nothing.
        class_map: policy's class of each of the source's classes.
        is_told: the user was told at the start what it defers, so that the first row isn't worth another warning.
    """

    def __init__(self, policy: CompiledPolicy | None, class_map: Sequence[int], *, is_told: bool) -> None:
        names = () if policy is None else policy.classes
        self._names = [names[own] for own in class_map]
        self._is_on = bool(deferred_phases(policy))
        self._told = set(deferred_phases(policy)) if is_told else set[str]()
        self._waiting: dict[str, set[int]] = {}

    @property
    def num_waiting(self) -> dict[str, int]:
        """Rows by class that were left out and haven't been given again since; of packs, documents."""
        return {name: len(rows) for name, rows in sorted(self._waiting.items()) if rows}

    def go_by(self, policy: CompiledPolicy) -> None:
        """Go by another policy over the same classes: it may defer what the one before did not."""
        self._is_on |= bool(deferred_phases(policy))

    def see(self, parts: Sequence[Batch], class_ids: Sequence[int | None], step: int, router: Router) -> None:
        """Look at all of a step's microbatches, the same on every rank.

        Args:
            parts: of the step.
            class_ids: of each, as the source numbers them; None of packs.
            step: its number.
            router: says what is deferred there.
        """
        if not self._is_on:
            return
        for part, given in zip(parts, class_ids, strict=True):
            for class_id, rows in _rows_by_class(part, given):
                name = self._names[class_id]
                waiting = self._waiting.setdefault(name, set())
                decision = router.decision(class_id, step, part.band, in_packs=given is None)
                if decision == "defer":
                    self._tell(name, step)
                    waiting.update(rows)
                elif decision != "reject":  # Those that come again and are rejected are offered nothing.
                    waiting.difference_update(rows)

    def _tell(self, name: str, step: int) -> None:
        if name not in self._told:
            self._told.add(name)
            warnings.warn(
                f"Step {step} was given rows of {name}, which the policy defers there: they're left out. step() can't "
                "give them again later, as fit() with a Source does: give them once the class is admitted.",
                stacklevel=6,
            )

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds: their ids by class, int64 [rows]."""
        return {name: torch.tensor(sorted(rows), dtype=torch.int64) for name, rows in self._waiting.items() if rows}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on with what a checkpoint holds."""
        self._waiting = {name: set(ids.tolist()) for name, ids in state.items()}
        self._is_on |= bool(self._waiting)  # Of an earlier policy, until they come again.


def _rows_by_class(part: Batch, class_id: int | None) -> Iterator[tuple[int, set[int]]]:
    """Yield the classes of a microbatch with their rows' ids; of packs that don't tell documents apart, the packs'."""
    lineage = part.lineage
    if class_id is not None:
        yield class_id, set(lineage.row_ids.tolist()) - {TOMBSTONE}
        return
    classes, rows = lineage.by_token
    assert classes is not None, "of packs"
    rows = lineage.row_ids[:, None].expand_as(classes) if rows is None else rows
    for own in set(classes.unique().tolist()) - {TOMBSTONE}:
        yield own, set(rows[classes == own].tolist()) - {TOMBSTONE}


def deferred_phases(policy: CompiledPolicy | None) -> dict[str, tuple[str, ...]]:
    """Return the classes of which a policy defers rows, with the names of the phases in which it does."""
    found: dict[str, tuple[str, ...]] = {}
    for own, name in enumerate(() if policy is None else policy.classes):
        assert policy is not None, "it has classes"
        decided = [policy.decision[row] for row in policy.rows_of(own)]
        phases = tuple(p.name for p, *of in zip(policy.phases, *decided, strict=True) if "defer" in of)
        found |= {name: phases} if phases else {}
    return found


def warn_of_own_loop(policy: CompiledPolicy | None) -> tuple[str, ...]:
    """Say at the start that a loop of the user's own can't reschedule; return the plan's words for it."""
    deferred = deferred_phases(policy)
    told = tuple(f"{name} in {', '.join(phases)}" for name, phases in deferred.items())
    if told:
        warnings.warn(
            f"The policy defers {'; '.join(told)}, and a loop of your own can't be rescheduled: rows of these classes "
            "that step() is given there are left out. Give them again once their class is admitted, or give a Source "
            "to fit(). What is never given again is told at the end.",
            stacklevel=5,
        )
    return tuple(f"rows of {one} that your loop doesn't give again later" for one in told)
