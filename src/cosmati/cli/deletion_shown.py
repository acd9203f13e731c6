"""A successor's folder as its page shows it: the plan by which it was made, and its certificate, checked first."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cosmati.errors import CosmatiError, RefutedError, RunError
from cosmati.explorer.deletion_view import CertificateWords, DeletionView, KeptCheckpoint, PlannedWay
from cosmati.explorer.wording import number
from cosmati.forget.certificate import read_certificate, verify_certificate
from cosmati.forget.deletion import Begun, begun_in, last_certificate
from cosmati.forget.derived import CLEAN, NOT_COVERED
from cosmati.forget.past_run import PastRun
from cosmati.forget.planning import Option
from cosmati.forget.succession import CERTIFICATES, REQUEST
from cosmati.records.deleted import DELETED_FILE, DeletedRecord
from cosmati.records.ledger import CheckpointEntry


def read_deletion(folder: Path) -> DeletionView | None:
    """Read the last deletion of a successor's folder; None where it's no successor, or has no certificate yet.

    Args:
        folder: of the run that goes on without the content.

    Raises:
        ForgetError: what was asked can't be read. What doesn't verify is no error, but the view's problem.
    """
    begun = begun_in(folder) if (folder / REQUEST).is_file() else None
    if begun is None or not any((folder / CERTIFICATES).glob("*.json")):
        return None
    view = _planned(begun)
    try:
        return _checked(folder, begun, view)
    except CosmatiError as error:
        return dataclasses.replace(view, problem=str(error))


def _planned(begun: Begun) -> DeletionView:
    plan, option = begun.plan, begun.option
    return DeletionView(
        asked=plan.asked,
        method=option.method,
        ways=tuple(map(_way, plan.options)),
        num_rows=plan.num_rows,
        first_contact=plan.first_contact,
        from_step=option.from_step,
        trained_steps=option.num_steps,
        checkpoints=tuple(
            KeptCheckpoint(one.step, one.path, one.status == CLEAN) for one in plan.derived if one.kind == "checkpoint"
        ),
    )


def _checked(folder: Path, begun: Begun, view: DeletionView) -> DeletionView:
    found = last_certificate(folder, begun.plan.digest)
    if found is None:
        raise RefutedError(f"No certificate in {folder / CERTIFICATES} is one that the ledger has signed for it.")
    path, told = found
    certificate, digest = verify_certificate(path, folder / "ledger"), read_certificate(path)[1]
    outside = _by_kind(one for one in told["derived"] if one["status"] == NOT_COVERED)
    about = _about(folder, digest)
    return dataclasses.replace(
        view,
        asked=about.what if about else view.asked,
        num_steps=int(told["to"]["step"]),
        certificate=CertificateWords(
            sentence=f"{told['run']} was asked to forget {told['asked']['what']}, {told['at']}. "
            f"{str(told['method']).capitalize()}: {told['strength']}.",
            digest=digest,
            weights_before=_weights_before(folder, told),
            weights_after=told["to"]["parameters"],
            checked=certificate.checked,
            not_checked=certificate.not_checked,
            not_covered=(*outside, *told["not_covered"]),
            evidence=certificate.evidence,
        ),
        about=about,
        commands=(f"cosmati forget verify {shlex.quote(str(path))}",),
    )


def _way(option: Option) -> PlannedWay:
    if not option.is_possible:
        return PlannedWay(option.method, "–", f"not possible: {'; '.join(option.why_not)}")
    minutes = "" if option.minutes is None else f", about {number(option.minutes * 60, 2)}\u00a0s"
    costs = f"{option.num_steps:,} steps{minutes}" if option.num_steps else "no training"
    return PlannedWay(option.method, costs, option.strength)


def _by_kind(derived: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each kind of what was made of the run, with all its paths: whose they are has to be said."""
    paths: dict[str, list[str]] = {}
    for one in derived:
        paths.setdefault(one["kind"], []).append(one["path"])
    return [f"{kind}, of the run that had it: {', '.join(found)}" for kind, found in paths.items()]


def _weights_before(folder: Path, told: Mapping[str, Any]) -> str:
    """Return the root of the last weights that the ledger signed before it went on without the content."""
    size = told.get("from", {}).get("tree_size", 0)
    entries = (one for one in PastRun(folder).ledger.entries() if one.index < size)
    found = [one.entry.parameter_root.hex() for one in entries if isinstance(one.entry, CheckpointEntry)]
    return found[-1] if found else ""


def _about(folder: Path, digest: str) -> DeletedRecord | None:
    """Return what was told of this certificate; of an earlier one, or damaged, it's nothing."""
    try:
        found = DeletedRecord.from_json((folder / DELETED_FILE).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, RunError):
        return None
    return found if found.certificate == digest else None
