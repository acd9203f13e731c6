"""What entry 0 and amendments tell of the policy's kinds of rows, and commit to of who vouches."""

from __future__ import annotations

from cosmati.ledger.details import details_digest
from cosmati.routing.policy import CompiledPolicy
from cosmati.train.facts import RunFacts


def kinds_told(policy: CompiledPolicy) -> dict[str, object]:
    """Say which kinds of rows the policy tells apart in each class: their names, and where rows have grades what of."""
    if not policy.kinds[0].grades:
        return {"bands": list(policy.bands)}
    numbers = [policy.band_names.index(kind.band) for kind in policy.kinds]
    told = [[number, dict(kind.grades)] for number, kind in zip(numbers, policy.kinds, strict=True)]
    return {"bands": list(policy.bands), "kinds": told}


def vouched_for(facts: RunFacts) -> dict[str, bytes]:
    """Return the commitments to who vouches for data, policy and what was prepared."""
    given = {"provenance": facts.vouched, "policy_provenance": facts.vouched_policy}
    found = {name: details_digest(one.facts) for name, one in given.items() if one is not None}
    if facts.artifacts:
        found["artifacts"] = details_digest({"artifacts": [one.facts for one in facts.artifacts]})
    return found
