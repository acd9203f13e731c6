"""Whether what a run has kept of its authorities bears out what its ledger says: nobody else is asked, and no clock."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from tuf.api.metadata import TargetFile

from cosmati.errors import ProvenanceError
from cosmati.provenance.authority.chain import Chain, read_chain
from cosmati.provenance.authority.names import PolicyName, SourceName, role_of

_HEX = re.compile(r"[0-9a-f]{64}")


TargetOf = Callable[[Chain, str], tuple[str, TargetFile]]
"""Returns the role that has signed a target, and what it has signed."""


def audit(folder: Path, facts: Mapping[str, Any]) -> list[str]:
    """Return what doesn't hold, a line each, of the archive in a folder.

    Args:
        folder: of the archive.
        facts: what the ledger's entry says (`VouchedData.facts`); whoever wrote the ledger may have made it up.
    """
    return _audited(folder, facts, _source)


def audit_policy(folder: Path, facts: Mapping[str, Any], digest: bytes) -> list[str]:
    """Return likewise what doesn't hold of a signed policy.

    Args:
        folder: of the archive.
        facts: what the ledger's entry says (`VouchedPolicy.facts`).
        digest: of the policy that the steps went by.
    """

    def named(chain: Chain, target: str) -> tuple[str, TargetFile]:
        policy = PolicyName.of_target(target)
        info = chain.policy(policy)
        if (info.custom or {}) != facts["statement"]:
            raise ProvenanceError("its signers have stated something else than the ledger says")
        return policy.role, info

    problems = _audited(folder, facts, named)
    if not problems and [one["manifest_sha256"] for one in facts["sources"]] != [digest.hex()]:
        problems.append(f"the steps went by the policy {digest.hex()[:16]}, which isn't the one that was signed")
    return problems


def _source(chain: Chain, target: str) -> tuple[str, TargetFile]:
    name = SourceName.of_target(target)
    return role_of(name.class_path), chain.source(name)


def _audited(folder: Path, facts: Mapping[str, Any], named: TargetOf) -> list[str]:
    try:
        return _problems(folder, facts, named)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return [f"what the ledger says of it isn't of the form that runs write: {error!r}"]


def _problems(folder: Path, facts: Mapping[str, Any], named: TargetOf) -> list[str]:
    found, problems = dict[str, bytes](), list[str]()
    for name, digest in facts["archive"].items():
        if not _HEX.fullmatch(digest):
            problems.append(f"{name} of the archive is named by no SHA-256")
            continue
        try:
            data = (folder / digest).read_bytes()
        except OSError as error:
            problems.append(f"{name} of the archive can't be read: {error.strerror}")
            continue
        if hashlib.sha256(data).hexdigest() != digest:
            problems.append(f"{name} of the archive isn't the file that the ledger names")
        found[name] = data
    at = datetime.fromisoformat(facts["opened"])
    chains = dict[str, Chain]()
    if at.tzinfo is None or not facts["sources"]:
        problems.append("the ledger names no source" if at.tzinfo else "the ledger names a time without its zone")
        return problems
    for source in facts["sources"]:
        root = str(source["root"])
        try:
            if root not in chains:
                own = {name.removeprefix(f"{root}/"): data for name, data in found.items()}
                chains[root] = read_chain(own.get, at=at, root_sha256=root)
            problems += _differences(chains[root], source, named)
            if f"manifests/{source['manifest_sha256']}.json" not in found:
                problems.append(f"{source['target']}: its manifest isn't in the archive")
        except ProvenanceError as error:
            problems.append(f"{source['target']}: {error}")
    return problems


def _differences(chain: Chain, source: Mapping[str, Any], named: TargetOf) -> list[str]:
    role, signed = named(chain, source["target"])
    problems = list[str]()
    if signed.hashes["sha256"] != source["manifest_sha256"]:
        problems.append(f"{source['target']}: the archive's signers have signed another manifest")
    if list(chain.signers(role)) != list(source["keyids"]):
        problems.append(f"{source['target']}: other keys have signed it than the ledger says")
    return problems
