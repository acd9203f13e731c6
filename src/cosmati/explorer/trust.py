"""Who vouched for a run's data and who decided its policy, read from its ledger and followed through its archive."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from cosmati.ledger.policy_changes import PolicyInForce
from cosmati.ledger.verify import LedgerReport
from cosmati.provenance.rehearsal import rehearsed
from cosmati.provenance.voucher import FOLDER, POLICY, class_of_target
from cosmati.records.joint_classes import joint_name
from cosmati.store.scan import plain_bytes

_MAX_MANIFESTS = 5_000
_ACTIONS = {"stop": "the run stops", "reject": "its rows are rejected", "skip": "it isn't read any more"}


class SignedSource(NamedTuple):
    """A source that somebody vouched for.

    Attributes:
        target: path under which it was signed.
        keyids: of the keys that have signed it.
        root: SHA-256 in hex of their authority's first root.
        expires: when what they have signed holds no longer, ISO 8601.
        num_rows: that its signed manifest says; None where the archive doesn't have it.
        also: the other classes of its rows, likewise.
    """

    target: str
    keyids: tuple[str, ...]
    root: str
    expires: str
    num_rows: int | None
    also: tuple[str, ...] = ()

    @property
    def class_name(self) -> str:
        """Its class, as the ledger calls it: joint where its rows belong to several, all of which were signed."""
        return joint_name((class_of_target(self.target), *self.also))


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Who vouched and who decided: as the ledger says it at its end, and what it said before.

    Attributes:
        sources: that were vouched for; none where the data are declared.
        opened: when that was found, ISO 8601, by the operator's clock.
        policy: under which the policy was signed; None where it's declared.
        policy_digest: of its canonical form, in hex.
        operator: id of the key that signs the ledger.
        missing: the package without which signatures can't be followed; empty where they were.
        problems: what the archive doesn't bear out. Nothing is believed then.
        history: what was said at which step, a line each, where something has changed in mid-run.
        rehearsed: first roots, in hex, of the authorities among them that say they're a rehearsal's.
    """

    sources: tuple[SignedSource, ...]
    opened: str
    policy: SignedSource | None
    policy_digest: str
    operator: str
    missing: str = ""
    problems: tuple[str, ...] = ()
    history: tuple[str, ...] = ()
    rehearsed: tuple[str, ...] = ()

    @property
    def is_signed(self) -> bool:
        """Whether anything was signed."""
        return bool(self.sources or self.policy)


def read_trust(directory: Path, report: LedgerReport) -> Trust | None:
    """Read who vouched for the data and the policy of a ledger that verified; None for one without a policy.

    Args:
        directory: of the ledger.
        report: of its verification.
    """
    if not report.policies:
        return None
    policy, archive = report.policies[-1], directory / FOLDER
    said = report.provenance_from[-1][1] if report.provenance_from else None
    declared = Trust(sources=(), opened="", policy=None, policy_digest=policy.digest.hex(), operator=report.key_id)
    problems, missing = _followed(directory, report)
    if problems:
        return replace(declared, problems=problems)
    try:
        decided = _sources(policy.facts, archive)
        return replace(
            declared,
            sources=_sources(_all_sources(report) if said else None, archive),
            opened=str((said or policy.facts or {}).get("opened", "")),
            policy=decided[0] if decided else None,
            missing=missing,
            history=tuple(_history(report)),
            rehearsed=rehearsed(archive, report.vouched_facts),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return replace(declared, problems=(f"what the ledger says of signatures can't be read: {error!r}",))


def _all_sources(report: LedgerReport) -> Mapping[str, Any]:
    """Return each source that was ever vouched for, as it was said last: one that was withdrawn has taught, too."""
    every = [one for facts in report.provenance for one in facts["sources"]]
    by_target = {(one["root"], one["target"]): one for one in every}
    return {"sources": list(by_target.values())}


def _sources(facts: Mapping[str, Any] | None, archive: Path) -> tuple[SignedSource, ...]:
    return tuple(
        SignedSource(
            str(one["target"]),
            tuple(map(str, one["keyids"])),
            str(one["root"]),
            str(one["expires"]),
            *(_told_by(archive, str(one["manifest_sha256"])) if number < _MAX_MANIFESTS else (None, ())),
        )
        for number, one in enumerate((facts or {}).get("sources", ()))
    )


def _told_by(archive: Path, sha256: str) -> tuple[int | None, tuple[str, ...]]:
    """Return how many rows a source's manifest says, and of which other classes; nothing of what isn't as signed."""
    if len(sha256) != 64 or not sha256.isalnum():
        return None, ()
    try:
        data = plain_bytes(archive / sha256)
        found = json.loads(data) if hashlib.sha256(data).hexdigest() == sha256 else {}
        rows, also = found.get("num_rows"), found.get("also", [])
    except (OSError, ValueError, AttributeError, RecursionError):
        return None, ()
    is_number = isinstance(rows, int) and not isinstance(rows, bool) and rows >= 0
    return rows if is_number else None, tuple(map(str, also)) if isinstance(also, list) else ()


def _followed(directory: Path, report: LedgerReport) -> tuple[tuple[str, ...], str]:
    """Follow all signatures that a ledger speaks of, as `cosmati ledger verify` does.

    Returns:
        What doesn't hold, and the package that is missing for it.
    """
    archive = directory / FOLDER
    problems = [text for one in report.policies for text in min((one.problems(k.text) for k in report.keys), key=len)]
    if not any(policy.facts for policy in report.policies) and not report.provenance:
        return tuple(problems), ""
    try:
        from cosmati.provenance.authority.audit import audit, audit_policy, audit_withdrawn
    except ImportError as error:
        return tuple(problems), str(error.name).partition(".")[0]
    for facts in report.provenance:
        problems += audit(archive, facts)
    for policy in report.policies:
        problems += [] if policy.facts is None else audit_policy(archive, policy.facts, policy.digest)
    if not problems:  # these speak of the same sources
        for _, facts in _withdrawn(report):
            problems += [words for words, is_refuted in audit_withdrawn(archive, facts, report.manifests) if is_refuted]
    return tuple(dict.fromkeys(problems)), ""


def _withdrawn(report: LedgerReport) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield what was withdrawn from which step on, each withdrawal once: it's borne out by the archive of its time."""
    known = list[Mapping[str, Any]]()
    for step, facts in report.withdrawn_from:
        if facts is not None:
            yield step, {**facts, "in_force": [one for one in facts["in_force"] if one not in known]}
            known = facts["in_force"]


def _history(report: LedgerReport) -> Iterator[str]:
    if len(report.provenance_from) > 1:
        for step, facts in report.provenance_from:
            found = len(facts["sources"]) if facts else 0
            said = f"{found} {'source' if found == 1 else 'sources'} vouched for" if facts else "data declared"
            yield f"From step {step} on: {said}."
    known = list[Mapping[str, Any]]()
    for step, facts in report.withdrawn_from:
        now = facts["in_force"] if facts else []
        for one in (one for one in now if one not in known):
            what = f"{_ACTIONS[one['action']]} from step {one['step']} on"
            yield f"Found at step {step}: {_named(one)} is withdrawn ({one['reason']}), {what}."
        yield from (f"From step {step} on: {_named(one)} is vouched for again." for one in known if one not in now)
        known = now
    if len(report.policies) > 1:
        yield from (f"From step {one.step} on: {_policy_text(one)}." for one in report.policies)


def _named(one: Mapping[str, Any]) -> str:
    of = one.get("of", "")
    return f"{of} {one['target']}" if of not in ("", POLICY) else str(one["target"])


def _policy_text(policy: PolicyInForce) -> str:
    digest = policy.digest.hex()[:16]
    return f"the policy {policy.facts['sources'][0]['target']} ({digest})" if policy.facts else f"{digest}, declared"
