"""What a run has kept of those who vouched for its data, for when it's resumed and they do no longer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cosmati.errors import ProvenanceError
from cosmati.provenance.voucher import FOLDER, KEPT_FILE, POLICY, VouchedData, VouchedPolicy, Voucher
from cosmati.storage.atomic import replace_file, replace_files


def keep_vouchers(run: Path, vouched: VouchedData, of: str = "") -> None:
    """Note in a run's folder who vouches for its data from now on; what bears it out has to be in the archive.

    Args:
        run: the run's folder.
        vouched: who does.
        of: label of an artifact, or `POLICY`, for which they vouch instead.
    """
    path = run / KEPT_FILE
    try:
        told = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        told = []
    facts = vouched.facts | ({"of": of} if of else {})
    if of == POLICY:  # an earlier one may be given again
        told = [one for one in told if one != facts]
    if facts not in told:
        replace_file(path, json.dumps([*told, facts]).encode())


def keep_given_policy(run: Path, vouched: VouchedPolicy) -> None:
    """Note in a run's folder which signed policy it was started with, and keep what bears it out."""
    replace_files(run / "ledger" / FOLDER, vouched.files)
    keep_vouchers(run, vouched, POLICY)


def kept_policy(archive: Path, facts: Mapping[str, Any]) -> VouchedPolicy:
    """Return who vouched for a policy, as a run's ledger says it, borne out by its archive.

    Args:
        archive: of the ledger.
        facts: as the ledger has them.

    Raises:
        ProvenanceError: the archive doesn't bear it out.
    """
    try:
        found = _told(archive, facts)
        return VouchedPolicy(found.opened, (found.vouchers[0],), found.archive, dict(facts["statement"]))
    except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
        msg = f"What {archive} has kept of who signed the policy doesn't hold: {error}. Restore the run's folder."
        raise ProvenanceError(msg) from error


def kept_given_policy(run: Path) -> VouchedPolicy | None:
    """Return who vouched for the policy that a run was last started with; None where nobody did.

    Raises:
        ProvenanceError: the archive doesn't bear it out.
    """
    from cosmati.provenance.authority.audit import audit_policy

    archive = run / "ledger" / FOLDER
    told = [facts for facts in _listed(run) if isinstance(facts, dict) and facts.get("of") == POLICY]
    if not told:
        return None
    try:
        digest = bytes.fromhex(told[-1]["sources"][0]["manifest_sha256"])
        problems = audit_policy(archive, told[-1], digest)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise _unborne(run, error) from error
    if problems:
        raise _unborne(run, ProvenanceError("; ".join(problems)))
    return kept_policy(archive, told[-1])


def _listed(run: Path) -> list[Any]:
    try:
        told = json.loads((run / KEPT_FILE).read_bytes())
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise _unborne(run, error) from error
    return list(told)


def _unborne(run: Path, error: Exception) -> ProvenanceError:
    return ProvenanceError(
        f"What {run} has kept of those who vouched for its data doesn't hold: {error}. Restore the run's folder."
    )


def _told(archive: Path, facts: Mapping[str, Any]) -> VouchedData:
    sources = [one | {name: tuple(one[name]) for name in ("keyids", "others")} for one in facts["sources"]]
    files = {name: (archive / digest).read_bytes() for name, digest in facts["archive"].items()}
    return VouchedData(facts["opened"], tuple(Voucher(**one) for one in sources), files)


def kept_vouchers(run: Path) -> tuple[tuple[VouchedData, ...], ...]:
    """Return what a run's folder has of them: first of its data, then of each artifact, and of each the oldest first.

    Each is borne out by the archive. Nobody has signed the list, and nobody needs to: who has signed the data is in the
    archive.

    Args:
        run: the run's folder.

    Raises:
        ProvenanceError: the archive doesn't bear it out.
    """
    from cosmati.provenance.authority.audit import audit

    archive, found = run / "ledger" / FOLDER, dict[str, tuple[VouchedData, ...]]()
    try:
        for facts in _listed(run):
            if (of := str(facts.get("of", ""))) == POLICY:
                continue
            if problems := audit(archive, facts):
                raise ProvenanceError("; ".join(problems))
            found[of] = (*found.get(of, ()), _told(archive, facts))
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # an error of provenance is one of them
        raise _unborne(run, error) from error
    return tuple(found[of] for of in sorted(found))
