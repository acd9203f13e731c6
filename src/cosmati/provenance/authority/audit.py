"""Whether what a run has kept of its authorities bears out what its ledger says: nobody else is asked, and no clock."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from tuf.api.metadata import TargetFile

from cosmati.errors import ProvenanceError
from cosmati.provenance.authority.chain import Chain, checked, read_chain
from cosmati.provenance.authority.errors import ExpiredMetadataError
from cosmati.provenance.authority.names import PolicyName, SourceName, role_of, target_file
from cosmati.provenance.authority.taxonomies import read_taxonomies
from cosmati.provenance.voucher import POLICY

_HEX = re.compile(r"[0-9a-f]{64}")

TargetOf = Callable[[str], tuple[str, TargetFile]]
"""Returns the role that has signed a target, and what it has signed."""
TargetsOf = Callable[[Chain, Mapping[str, bytes]], TargetOf]
"""Returns that of an authority: its metadata, and its files by their names."""


def audit(folder: Path, facts: Mapping[str, Any]) -> list[str]:
    """Return what doesn't hold, a line each, of the archive in a folder.

    Args:
        folder: of the archive.
        facts: what the ledger's entry says (`VouchedData.facts`); whoever wrote the ledger may have made it up.
    """
    return _audited(folder, facts, _sources)


def audit_policy(folder: Path, facts: Mapping[str, Any], digest: bytes) -> list[str]:
    """Return likewise what doesn't hold of a signed policy.

    Args:
        folder: of the archive.
        facts: what the ledger's entry says (`VouchedPolicy.facts`).
        digest: of the policy that the steps went by.
    """

    def policies(chain: Chain, _: Mapping[str, bytes]) -> TargetOf:
        def named(target: str) -> tuple[str, TargetFile]:
            policy = PolicyName.of_target(target)
            info = chain.policy(policy)
            if (info.custom or {}) != facts["statement"]:
                raise ProvenanceError("its signers have stated something else than the ledger says")
            return policy.role, info

        return named

    problems = _audited(folder, facts, policies)
    if not problems and [one["manifest_sha256"] for one in facts["sources"]] != [digest.hex()]:
        problems.append(f"the steps went by the policy {digest.hex()[:16]}, which isn't the one that was signed")
    return problems


def _sources(chain: Chain, files: Mapping[str, bytes]) -> TargetOf:
    taxonomy = next(read_taxonomies(chain, partial(_content, files)))

    def named(target: str) -> tuple[str, TargetFile]:
        name = SourceName.of_target(target)
        taxonomy.id_of(name.class_path)
        return role_of(name.class_path), chain.source(name)

    return named


def _audited(folder: Path, facts: Mapping[str, Any], targets: TargetsOf) -> list[str]:
    try:
        return _problems(folder, facts, targets)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return [f"what the ledger says of it isn't of the form that runs write: {error!r}"]


def audit_withdrawn(folder: Path, facts: Mapping[str, Any], manifests: Mapping[str, str]) -> list[tuple[str, bool]]:
    """Return in words how each withdrawal is borne out by the archive in a folder, and whether it's refuted.

    Args:
        folder: of the archive.
        facts: what the ledger's entry says (`Withdrawn.facts`); whoever wrote the ledger may have made it up.
        manifests: SHA-256 of each manifest by its target, as the ledger has said before; or by `ROOT/TARGET`, where
            several authorities have signed one.
    """
    try:
        found, problems = _archived(folder, facts["archive"])
        at = datetime.fromisoformat(facts["seen"])
        told = [_borne_out(one, found, at, _manifest_of(one, manifests)) for one in facts["in_force"]]
        return [(problem, True) for problem in problems] + told
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return [(f"what the ledger says was withdrawn isn't of the form that runs write: {error!r}", True)]


def audit_all_withdrawn(
    folder: Path, withdrawn: Iterable[Mapping[str, Any]], manifests: Mapping[str, str]
) -> Iterator[tuple[str, bool]]:
    """Yield likewise how all that was ever withdrawn is borne out, each once, by the archive of its own time.

    Args:
        folder: of the archive.
        withdrawn: the facts of the ledger's entries, in their order.
        manifests: as `audit_withdrawn` takes them.
    """
    known = list[Mapping[str, Any]]()
    for facts in withdrawn:
        new = [one for one in facts["in_force"] if one not in known]
        known = facts["in_force"]
        yield from audit_withdrawn(folder, {**facts, "in_force": new}, manifests)


def _manifest_of(one: Mapping[str, Any], manifests: Mapping[str, str]) -> str:
    return manifests.get(f"{one.get('root', '')}/{one['target']}") or manifests.get(one["target"], "")


def _borne_out(one: Mapping[str, Any], found: Mapping[str, bytes], at: datetime, manifest: str) -> tuple[str, bool]:
    """Return how one withdrawal is borne out as of a time, and whether it's refuted."""
    of = f"{one['of']} " if one.get("of") not in (None, "", POLICY) else ""
    says = f"{of}{one['target']} ({one['reason']}), {one['action']} from step {one['step']} on"
    if one["reason"] == "licence":
        until = json.loads(found[f"manifests/{manifest}.json"])["facts"]["licence_valid_until"]
        if until and datetime.fromisoformat(until).date() < at.date():
            return f"{says}: the manifest says until {until}", False
        return f"{says}: the manifest says {f'until {until}' if until else 'nothing of the kind'}", True
    wrongs, signed = list[ProvenanceError](), list[str]()
    roots = {name.partition("/")[0] for name in found if _HEX.fullmatch(name.partition("/")[0])}
    for root in roots & {one["root"]} if one.get("root") else roots:
        own = {name.removeprefix(f"{root}/"): data for name, data in found.items() if name.startswith(f"{root}/")}
        try:
            chain = read_chain(own.get, at=at, root_sha256=root)
            if one.get("of") == POLICY:
                info = chain.policy(PolicyName.of_target(one["target"]))
            else:
                info = chain.source(SourceName.of_target(one["target"]))
            signed.append(info.hashes["sha256"])
        except ProvenanceError as error:
            wrongs.append(error)
    had_expired = any(isinstance(error, ExpiredMetadataError) for error in wrongs)
    if one["reason"] == "expiry":
        return f"{says}: {'it had expired' if had_expired else 'nobody could be asked, so the operator says'}", False
    if manifest in signed or had_expired or not (wrongs or signed):
        return f"{says}: the archive says nothing of the kind", True
    return f"{says}: it isn't signed any more in the archive", False


def _archived(folder: Path, archive: Mapping[str, str]) -> tuple[dict[str, bytes], list[str]]:
    """Return the archive's files that can be read, and what is wrong with it."""
    found, problems = dict[str, bytes](), list[str]()
    for name, digest in archive.items():
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
    return found, problems


def _problems(folder: Path, facts: Mapping[str, Any], targets: TargetsOf) -> list[str]:
    found, problems = _archived(folder, facts["archive"])
    at = datetime.fromisoformat(facts["opened"])
    chains = dict[str, tuple[Chain, TargetOf]]()
    if at.tzinfo is None or not facts["sources"]:
        problems.append("the ledger names no source" if at.tzinfo else "the ledger names a time without its zone")
        return problems
    for source in facts["sources"]:
        root = str(source["root"])
        try:
            if root not in chains:
                own = {name.removeprefix(f"{root}/"): data for name, data in found.items()}
                chain = read_chain(own.get, at=at, root_sha256=root)
                chains[root] = chain, targets(chain, own)
            problems += _differences(*chains[root], source)
            if f"manifests/{source['manifest_sha256']}.json" not in found:
                problems.append(f"{source['target']}: its manifest isn't in the archive")
        except ProvenanceError as error:
            problems.append(f"{source['target']}: {error}")
    return problems


def _content(files: Mapping[str, bytes], info: TargetFile) -> bytes:
    data = files.get(target_file(info.path, info.hashes["sha256"]))
    if data is None:
        raise ProvenanceError(f"{info.path} isn't in the archive")
    return checked(data, info)


def _differences(chain: Chain, named: TargetOf, source: Mapping[str, Any]) -> list[str]:
    role, signed = named(source["target"])
    problems = list[str]()
    if signed.hashes["sha256"] != source["manifest_sha256"]:
        problems.append(f"{source['target']}: the archive's signers have signed another manifest")
    if list(chain.signers(role)) != list(source["keyids"]):
        problems.append(f"{source['target']}: other keys have signed it than the ledger says")
    return problems
