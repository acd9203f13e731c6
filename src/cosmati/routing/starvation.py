"""Whether the data of a run have what its policy speaks of: bands that it knows, and classes for each region."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from cosmati.core.source import Source
from cosmati.errors import PolicyError
from cosmati.routing.policy import CompiledPolicy


def starved(policy: CompiledPolicy, kinds: Sequence[tuple[int, int]]) -> list[tuple[str, str]]:
    """Return region and phase wherever the policy lets some class teach, and none that is there may.

    What the policy denies to all classes is meant: a curriculum of depth is a policy.

    Args:
        policy: compiled.
        kinds: class id and band of the rows that are there.

    Raises:
        PolicyError: there's a band that the policy doesn't have.
    """
    there = {policy.row(class_id, band) for class_id, band in kinds}
    return [
        (region, phase.name)
        for p, phase in enumerate(policy.phases)
        for r, region in enumerate(policy.regions)
        if any(row[p][r] for row in policy.weight) and not any(policy.weight[row][p][r] for row in there)
    ]


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
    kinds = getattr(data, "kinds", ((class_id, 0) for class_id in range(len(class_map))))
    found = starved(policy, [(class_map[class_id], band) for class_id, band in kinds])
    if not found:
        return
    named = ", ".join(f"{region} in phase {phase}" for region, phase in found)
    text = f"The data have no rows that may teach {named}, and the policy lets other classes do so."
    if on_starvation == "stop":
        raise PolicyError(f"{text} Add data of those classes, or leave out `starvation: stop`.")
    warnings.warn(f"{text} Nothing is learnt there.", stacklevel=6)
