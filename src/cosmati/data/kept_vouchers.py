"""What a run has kept of those who vouched for its data, for when it's resumed and they do no longer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cosmati.errors import ProvenanceError
from cosmati.provenance.voucher import FOLDER, KEPT_FILE, VouchedData, VouchedPolicy, Voucher
from cosmati.storage.atomic import replace_file


def keep_vouchers(run: Path, vouched: VouchedData) -> None:
    """Note in a run's folder who vouches for its data from now on; what bears it out has to be in the archive."""
    path = run / KEPT_FILE
    try:
        told = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        told = []
    if vouched.facts not in told:
        replace_file(path, json.dumps([*told, vouched.facts]).encode())


def kept_policy(archive: Path, facts: Mapping[str, Any]) -> VouchedPolicy:
    """Return who vouched for a policy, as a run's ledger says it, borne out by its archive.

    Args:
        archive: of the ledger.
        facts: as the ledger has them.

    Raises:
        ProvenanceError: the archive doesn't bear it out.
    """
    try:
        (source,) = facts["sources"]
        voucher = Voucher(**source | {name: tuple(source[name]) for name in ("keyids", "others")})
        files = {name: (archive / digest).read_bytes() for name, digest in facts["archive"].items()}
        return VouchedPolicy(facts["opened"], (voucher,), files, dict(facts["statement"]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        msg = f"What {archive} has kept of who signed the policy doesn't hold: {error}. Restore the run's folder."
        raise ProvenanceError(msg) from error


def kept_vouchers(run: Path) -> tuple[VouchedData, ...]:
    """Return what a run's folder has of them, oldest first, each borne out by its archive; nothing where there's none.

    Nobody has signed the list, and nobody needs to: who has signed the data is in the archive.

    Args:
        run: the run's folder.

    Raises:
        ProvenanceError: the archive doesn't bear it out.
    """
    from cosmati.provenance.authority.audit import audit

    archive, found = run / "ledger" / FOLDER, list[VouchedData]()
    try:
        told = json.loads((run / KEPT_FILE).read_bytes())
        for facts in told:
            if problems := audit(archive, facts):
                raise ProvenanceError("; ".join(problems))
            sources = [one | {name: tuple(one[name]) for name in ("keyids", "others")} for one in facts["sources"]]
            vouchers = tuple(Voucher(**one) for one in sources)
            files = {name: (archive / digest).read_bytes() for name, digest in facts["archive"].items()}
            found.append(VouchedData(facts["opened"], vouchers, files))
    except FileNotFoundError:
        return ()
    except (ValueError, TypeError, KeyError) as error:  # an error of provenance is one of them
        msg = f"What {run} has kept of those who vouched for its data doesn't hold: {error}. Restore the run's folder."
        raise ProvenanceError(msg) from error
    return tuple(found)
