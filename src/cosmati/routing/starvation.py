"""Whether the data of a run have what its policy speaks of: bands that it knows, and classes for each region."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from cosmati.core.source import Source
from cosmati.errors import PolicyError
from cosmati.routing.policy import CompiledPolicy


def starved(policy: CompiledPolicy, kinds: Sequence[tuple[int, int]]) -> list[tuple[str, str]]:
    """Return region and phase wherever the policy lets some class teach, and none that is there may.

    What the policy denies to all classes is meant: a curriculum of depth is a policy.

    Args:
        policy: compiled.
        kinds: class id and kind of the rows that are there.
    """
    there = {policy.row(class_id, kind) for class_id, kind in kinds}
    return [
        (region, phase.name)
        for p, phase in enumerate(policy.phases)
        for r, region in enumerate(policy.regions)
        if any(row[p][r] for row in policy.weight) and not any(policy.weight[row][p][r] for row in there)
    ]


KindNumbers = Mapping[int, tuple[int, Mapping[str, str]]]
"""What the numbers that a source gives its rows' kinds stand for: a band, and grades by measure."""


def kind_map(policy: CompiledPolicy | None, data: object) -> Callable[[int], int]:
    """Return what gives the policy's kind of rows that a source, or a batch of the user's own, says to be of a band.

    A source whose rows have grades says in `measured` what its numbers stand for; elsewhere nothing was measured.
    """
    if policy is None:
        return int
    described = described_by(data)
    return lambda number: policy.kind_of(*described(number))


def described_by(data: object) -> Callable[[int], tuple[int, Mapping[str, str]]]:
    """Return what gives band and grades of rows that a source says to be of a band."""
    measured: KindNumbers = getattr(data, "measured", {})
    return lambda number: measured.get(number, (number, {}))


class SaidKind(Protocol):
    """What packs say was measured of the rows of one class id."""

    @property
    def band(self) -> int:
        """Number of the band."""
        ...

    @property
    def grades(self) -> tuple[tuple[str, str], ...]:
        """Measure and grade."""
        ...


def token_kinds(policy: CompiledPolicy | None, data: object) -> tuple[int, ...]:
    """Return the policy's kind of the tokens of each of the source's classes; empty where packs say none.

    Raises:
        PolicyError: a band or a grade that the policy doesn't have.
    """
    said: Sequence[SaidKind] = getattr(data, "row_kinds", ())
    return () if policy is None else tuple(policy.kind_of(one.band, dict(one.grades), "Packs") for one in said)


def check_kinds(policy: CompiledPolicy, data: object, class_map: Sequence[int], *, on_starvation: str) -> None:
    """Refuse data of bands that a policy doesn't have, and say which regions they'd starve. No weight is ever raised.

    Args:
        policy: compiled.
        data: of the run; who feeds batches by hand isn't asked.
        class_map: the policy's class of each of the source's classes.
        on_starvation: `alarm` warns, `stop` refuses.

    Raises:
        PolicyError: such a band, or a starved region where that stops.
    """
    if not isinstance(data, Source):
        return
    pairs = getattr(data, "kinds", ((class_id, 0) for class_id in range(len(class_map))))
    described, found = described_by(data), list[tuple[int, int]]()
    for class_id, number in pairs:
        own, (band, grades) = class_map[class_id], described(number)
        found.append((own, policy.kind_of(band, grades, f"Rows of {policy.classes[own]}")))
    missing = starved(policy, found)
    if not missing:
        return
    named = ", ".join(f"{region} in phase {phase}" for region, phase in missing)
    text = f"The data have no rows that may teach {named}, and the policy lets other classes do so."
    if on_starvation == "stop":
        raise PolicyError(f"{text} Add data of those classes, or leave out `starvation: stop`.")
    warnings.warn(f"{text} Nothing is learnt there.", stacklevel=6)
