"""A small taxonomy, two regions and two phases, and policies over them."""

from __future__ import annotations

import pytest

from cosmati.errors import PolicyError
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy import CompiledPolicy, compile_policy
from cosmati.routing.policy_file import PolicyFile
from cosmati.routing.regions import Regions

CLASSES = ("a/b/c", "a/b/d", "a/e", "f")
REGIONS = ("head", "tail")
PHASES = ("early", "late")
TAXONOMY = Taxonomy("t", "1", tuple((path, "") for path in CLASSES))
PARTITION = Regions(("tail", "head"), (("t",), ("h",)), (("tail",), ("head",)), (), REGIONS)
MERGED = Regions(("head&tail",), (("w",),), (("head", "tail"),), (("v", "w"),), REGIONS)
FRONT_MATTER = {
    "version": 1,
    "taxonomy": "t",
    "regions": {"head": {"params": "h"}, "tail": {"params": "t"}},
    "phases": [{"name": "early", "until": "0.5dur"}, {"name": "late"}],
}


def policy_of(rules: list[dict[str, object]], **fields: object) -> PolicyFile:
    return PolicyFile.model_validate(FRONT_MATTER | {"rules": rules} | fields)


def compiled(rules: list[dict[str, object]], regions: Regions = PARTITION, **fields: object) -> CompiledPolicy:
    return compile_policy(policy_of(rules, **fields), taxonomy=TAXONOMY, regions=regions, num_steps=10)


def refusal(rules: list[dict[str, object]], regions: Regions = PARTITION, **fields: object) -> str:
    with pytest.raises(PolicyError) as caught:
        compiled(rules, regions, **fields)
    return str(caught.value)
