"""The noise arm: the baseline once more with other seeds. And the arms that are compared, which are all others."""

from __future__ import annotations

import json

from cosmati.records.study import ArmRecord, StudyRecord
from cosmati.study.kept import kept

NOISE_ARM = "aa"
_LABELS = frozenset({"name", "seed"})
"""What the recipe of the double may have of its own."""


@kept(8)
def noise_arm(study: StudyRecord) -> str:
    """Return the name of the baseline's double, empty where there's none.

    An arm `aa` with a part of its own, or with another recipe than the baseline's, is an arm like others:
    AutoAugment is called so too.
    """
    arms = {arm.name: arm for arm in study.arms}
    double, base = arms.get(NOISE_ARM), arms[study.baseline_arm]
    return NOISE_ARM if double is not None and double is not base and is_double(double, base) else ""


def is_double(arm: ArmRecord, base: ArmRecord) -> bool:
    """Whether an arm does what the baseline does: no part beyond the baseline's, and its recipe but for name and seed.

    Takes records of arms, finished or not.
    """
    return set(arm.methods) <= set(base.methods) and _what_it_does(arm.recipe_text) == _what_it_does(base.recipe_text)


def compared_arms(study: StudyRecord) -> list[ArmRecord]:
    """Return all arms but the baseline and its double."""
    return [arm for arm in study.arms if arm.name not in (study.baseline_arm, noise_arm(study))]


def _what_it_does(recipe: str) -> object:
    try:
        found = json.loads(recipe)
    except (ValueError, RecursionError):
        return recipe
    return {name: value for name, value in found.items() if name not in _LABELS} if isinstance(found, dict) else found
