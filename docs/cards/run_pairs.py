"""Run every pair of methods on the two small models, and write what became of it: `python docs/cards/run_pairs.py`.

Named methods (`run_pairs.py MixUp`) are run with each other one, and the rest of the pairs is kept as it was.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from pathlib import Path

import torch
from rich.progress import track

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from cosmati.errors import PlanError  # noqa: E402  (after the tests' folder is found)
from tests.methods.cases import CASES, Case, trainer  # noqa: E402


def outcome_of(pair: tuple[Case, Case], *, is_text: bool) -> dict[str, str]:
    """Train three steps with a pair, or a method alone, and return what became of it and why."""
    chosen = [case.settings(is_text=is_text) for case in dict.fromkeys(pair)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            run = trainer(chosen, is_text=is_text, budget="3ba")
            run.fit()
        except PlanError as error:
            return {"outcome": "refused", "reason": str(error)}
    assert all(bool(value.isfinite().all()) for value in run.model.state_dict().values())
    reasons = [str(w.message) for w in said if " changes nothing" in str(w.message)]
    return {"outcome": "unneeded" if reasons else "trains", "reason": " ".join(reasons)}


def main(named: list[str]) -> None:
    """Write `pairs.json` beside this file."""
    torch.set_num_threads(1)
    path = Path(__file__).with_name("pairs.json")
    known = json.loads(path.read_text()) if named else {}
    found = {}
    for task in ("vision", "language"):
        cells = {}
        for pair in track(list(itertools.combinations_with_replacement(CASES, 2)), description=task):
            key = "|".join(map(str, pair))
            kept = None if set(named) & set(key.split("|")) else known.get(task, {}).get("cells", {}).get(key)
            cells[key] = kept or outcome_of(pair, is_text=task == "language")
        found[task] = {"methods": [str(case) for case in CASES], "cells": cells}
    path.write_text(json.dumps(found, indent=0) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
