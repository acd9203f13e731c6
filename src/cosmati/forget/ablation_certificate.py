"""What a certificate says of an ablation, and what of that the repaired run's own ledger bears out."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cosmati.errors import RefutedError
from cosmati.forget.ablation import REPORT
from cosmati.forget.past_run import PastRun
from cosmati.ledger.query import VerifiedLedger


def told_of_ablation(run: PastRun, out: Path) -> dict[str, Any]:
    """Return which weights were ablated, how, and each measure: before, between and after the repair.

    Args:
        run: that had the content.
        out: the repaired run's folder.
    """
    report, head = json.loads((out / REPORT).read_text()), run.ledger.head
    before, ablated, _ = report["roots"]
    stages = [report[stage] for stage in ("before", "between", "after")]
    return {
        "from": {
            "log": run.ledger.key.name,
            "tree_size": head.size,
            "root": head.root.hex(),
            "parameters": before,
        },
        "ablation": {
            "regions": [[one["region"], one["share"]] for one in report["ablated"]],
            "left": [[one["region"], one["share"]] for one in report["left"]],
            "num_parameters": report["num_parameters"],
            "fill": report["fill"],
            "repair_steps": report["repair_steps"],
            "parameters": ablated,
            "measured": {name: [one[name] for one in stages] for name in report["before"]},
        },
    }


def check_ablation(told: Mapping[str, Any], ledger: VerifiedLedger) -> list[str]:
    """Compare what a certificate says of an ablation with the repaired run's ledger; return what was compared.

    Raises:
        RefutedError: the run began from other weights, or was trained for another number of steps.
        TypeError: a measure isn't three numbers.
    """
    for before, between, after in told["ablation"]["measured"].values():
        math.fsum((before, between, after))
    ablated, num_steps = told["ablation"]["parameters"], told["ablation"]["repair_steps"]
    if dict(ledger.run.commitments)["model"].hex() != ablated:
        raise RefutedError("The ledger's run began from other weights than those that the certificate says were left.")
    if not told["to"]["step"] == num_steps <= len(ledger.standing):
        raise RefutedError("The certificate and the ledger say otherwise of how long the repair was.")
    return [f"its run began from the weights {ablated}, and took {num_steps} steps"]


def unchecked(told: Mapping[str, Any]) -> list[str]:
    """Return what of an ablation rests on the operator's word."""
    was = told["from"]
    return [
        f"that {was['parameters']} were the weights before: the first {was['tree_size']} entries of {was['log']}",
        "that only what the certificate names was set to zero: compare the weights before and after",
        "what was measured: the operator's own figures",
    ]
