"""What the operator claims of the weights in a bundle: made from its figures, by who exports and by who checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def training_claim(
    found: Mapping[str, Any], evidence_level: str, step: int | None, weights_key_sha256: str
) -> dict[str, Any]:
    """Return the predicate of the statement about training.

    Args:
        found: the figures.
        evidence_level: what the ledger shows at most.
        step: after which the weights are; None without weights.
        weights_key_sha256: of the file of the public key that the weights are signed with; empty without weights.
    """
    run = found["run"]
    return {
        "run": {name: run[name] for name in ("id", "origin", "tree_size", "root", "steps", "has_ended")},
        "evidence_level": evidence_level,
        "weights": {"step": step, "key_sha256": weights_key_sha256},
        "policies": found["policies"],
        "sources": [
            {name: one[name] for name in ("target", "class", "root", "manifest_sha256", "keyids")}
            for one in found["sources"]
        ],
        "classes": {
            name: {"rows": one["rows"], "taught": [r for r, part in one["regions"].items() if part["weight"] > 0]}
            for name, one in found["classes"].items()
        },
    }
