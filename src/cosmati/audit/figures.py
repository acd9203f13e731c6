"""The figures of all that a bundle says: from the ledger and its archive alone, so that who checks it has the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from cosmati.errors import RefutedError
from cosmati.forget.past_run import CERTIFICATE, FORGOTTEN
from cosmati.ledger.query import VerifiedLedger, contributions, direct_write_exclusions
from cosmati.ledger.verify import LedgerReport
from cosmati.provenance.voucher import FOLDER, class_of_target

_OF_MANIFEST = (
    "source",
    "source_version",
    "num_rows",
    "num_bytes",
    "band",
    "grades",
    "also",
    "row_root",
    "shards",
    "facts",
)

_DELETION = (FORGOTTEN, CERTIFICATE)


def figures(ledger: VerifiedLedger, report: LedgerReport, directory: Path) -> dict[str, Any]:
    """Return what a ledger says, as JSON has it.

    Args:
        ledger: of the run.
        report: of the same ledger.
        directory: of the ledger, with the archive of those who vouched.
    """
    table = contributions(ledger)
    seen = _seen(ledger)
    by_class = {
        name: {
            "rows": seen[name][0],
            "microbatches": seen[name][1],
            "regions": {
                cell.region: {"rows": cell.num_rows, "microbatches": cell.num_microbatches, "weight": cell.weight}
                for cell in table.cells
                if cell.class_name == name
            },
        }
        for name in table.classes
    }
    return {
        "run": {
            "id": ledger.run.run_id,
            "origin": report.origin,
            "operator": ledger.key.text,
            "tree_size": report.size,
            "root": report.root,
            "steps": report.num_steps,
            "attempts": report.num_attempts,
            "has_ended": report.has_ended,
            "recipe": ledger.details.get("recipe"),
            "environment": ledger.details.get("environment"),
            "plan": ledger.details.get("plan"),
        },
        "classes": by_class,
        "regions": list(table.regions),
        "sources": _sources(report, directory / FOLDER),
        "policies": [_policy(one.step, one.digest, one.facts) for one in report.policies],
        "artifacts": [
            {"from_step": step, "label": label, **one}
            for step, facts in report.artifacts_from
            for label, one in (facts or {}).items()
        ],
        "withdrawn": [
            {"from_step": step, **one}
            for step, facts in report.withdrawn_from
            for one in (facts["in_force"] if facts else ())
        ],
        "deletions": list(deletions(ledger)),
        "exclusions": exclusions(ledger),
    }


def exclusions(ledger: VerifiedLedger) -> list[list[str]]:
    """Return each class and region of which it can be stated that no logged step gave such rows weight there."""

    def holds(pair: tuple[str, str]) -> bool:
        try:
            direct_write_exclusions(ledger, [pair])
        except RefutedError:
            return False
        return True

    # Most pairs are refuted by what the class taught at all; a scan of its own is for those that may hold.
    taught = {(one.class_name, one.region) for one in contributions(ledger).cells if one.weight > 0}
    return [list(pair) for pair in product(ledger.classes, ledger.regions) if pair not in taught and holds(pair)]


def deletions(ledger: VerifiedLedger) -> list[dict[str, Any]]:
    """Return what a ledger says was deleted from the model, in order, with the certificates that it signed."""
    found = list[dict[str, Any]]()
    for tables in ledger.tables:
        names = {name for name, *_ in tables.changes}
        told, signed = ({**one} if isinstance(one := tables.details.get(n), Mapping) else {} for n in _DELETION)
        if FORGOTTEN in names:
            facts = {name: told.get(name) for name in ("asked", "method", "classes", "num_rows")}
            step = getattr(tables.entry, "step", 0)
            found.append({"from_step": step, "entry": tables.index, "certificates": [], **facts})
        if CERTIFICATE in names:
            own = [one for one in found if one["asked"] == signed.get("asked")]
            for one in own[-1:]:
                one["certificates"].append(signed.get("digest"))
    return found


def _seen(ledger: VerifiedLedger) -> dict[str, tuple[int, int]]:
    """Return how many rows and microbatches of each class went forward in the steps that stand, repeats counted."""
    seen = dict.fromkeys(ledger.classes, (0, 0))
    for item, entry, tables in ledger.steps():
        if item.index in ledger.standing:
            for cell in entry.microbatches:
                rows, number = seen[name := tables.class_of(cell, item)]
                seen[name] = rows + cell.num_rows, number + (cell.num_rows > 0)
    return seen


def _sources(report: LedgerReport, archive: Path) -> list[dict[str, Any]]:
    """Return each source that was vouched for, by its manifest; the last word where it was said again."""
    found = dict[str, dict[str, Any]]()
    for facts in report.provenance:
        for one in facts["sources"]:
            manifest = json.loads((archive / facts["archive"][f"manifests/{one['manifest_sha256']}.json"]).read_bytes())
            told = {name: manifest[name] for name in _OF_MANIFEST if name in manifest}
            signed = {name: one[name] for name in ("target", "root", "manifest_sha256", "keyids", "expires")}
            found[one["target"]] = {"class": class_of_target(one["target"]), **signed, **told}
    return [found[target] for target in sorted(found)]


def _policy(step: int, digest: bytes, facts: Mapping[str, Any] | None) -> dict[str, Any]:
    signed = None
    if facts is not None:
        (source,) = facts["sources"]
        signed = {name: source[name] for name in ("target", "root", "keyids", "expires")}
    return {"from_step": step, "digest": digest.hex(), "signed": signed}
