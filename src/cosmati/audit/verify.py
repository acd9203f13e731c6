"""Checks a bundle with nothing but itself and what an auditor got elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cosmati import __version__
from cosmati.audit.about import read_about
from cosmati.audit.bundle import LIST_FILE, LIST_STATEMENT, sha256_of, unpack
from cosmati.audit.claims import training_claim
from cosmati.audit.documents import documents
from cosmati.audit.enclosed import check_certificates, check_replays
from cosmati.audit.export import (
    ABOUT,
    EXCLUSIONS,
    FIGURES,
    LEDGER,
    README,
    README_FILE,
    TRAINING,
    WEIGHTS,
    WEIGHTS_KEY,
    WEIGHTS_SIGNATURE,
)
from cosmati.audit.figures import figures
from cosmati.audit.rights import check_rights
from cosmati.audit.signed_weights import verify_weights
from cosmati.audit.statements import read_statement
from cosmati.audit.trust import TrustFile
from cosmati.audit.unread import unread_files
from cosmati.audit.weights import check_weights
from cosmati.errors import CosmatiError, RefutedError, TamperError
from cosmati.ledger.details import encode_details
from cosmati.ledger.evidence import NOBODY
from cosmati.ledger.kept import kept_lines
from cosmati.ledger.note import VerifierKey
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.reader import CHECKPOINT_FILE, read_verifier_key
from cosmati.ledger.verify import LEVEL_0, LedgerReport, verify_ledger
from cosmati.provenance.authority.audit import audit, audit_all_withdrawn, audit_policy
from cosmati.provenance.rehearsal import SAYS, rehearsed
from cosmati.provenance.voucher import FOLDER
from cosmati.records.artifacts import signed_by


@dataclass(frozen=True)
class BundleReport:
    """What was found to hold; there's a report only where nothing was wrong.

    Attributes:
        lines: what holds, by what it's about.
        unpinned: what holds by the bundle's own word alone, since the auditor named nothing to compare it with.
        evidence_level: what the bundle shows at most.
        figures: what its documents were made from.
    """

    lines: tuple[tuple[str, str], ...]
    unpinned: tuple[str, ...]
    evidence_level: str
    figures: Mapping[str, Any]


@dataclass
class _Findings:
    """What is found on the way."""

    trust: TrustFile | None
    lines: list[tuple[str, str]] = field(default_factory=list)
    unpinned: list[str] = field(default_factory=list)

    def say(self, what: str, words: str) -> None:
        self.lines.append((what, words))

    def pin(self, what: str, root: str, known: Sequence[str]) -> None:
        """Compare an authority's root with those that the auditor knows."""
        words = f"{what}: the authority {root} is the bundle's own word"
        if not known and words not in self.unpinned:
            self.unpinned.append(words)
        if known and root not in known:
            raise RefutedError(f"The {what} is signed by the authority {root}, and you trust {', '.join(known)}.")


def verify_bundle(
    bundle: Path, folder: Path, trust: TrustFile | None = None, holder_key: Path | None = None
) -> BundleReport:
    """Check every signature, digest, figure and document of a bundle.

    Args:
        bundle: the file.
        folder: an empty one, where its files are unpacked and may be read afterwards.
        trust: what the auditor got elsewhere; without it, what holds is consistent in itself and nothing more.
        holder_key: the private key that the bundle's credential names: what it covers is opened, and checked.

    Raises:
        RefutedError: something doesn't hold, or is signed by somebody else than the auditor trusts. LedgerError: it
            can't be read, or isn't a bundle.
    """
    try:
        return _verified(bundle, folder, trust, holder_key)
    except RefutedError:
        raise
    except TamperError as error:
        raise RefutedError(str(error)) from error
    except FileNotFoundError as error:
        lacking = Path(error.filename)
        if not lacking.is_relative_to(folder):
            raise
        raise RefutedError(
            f"The bundle lacks {lacking.relative_to(folder).as_posix()}, which its list doesn't name, and each bundle "
            "has: it was left out before the list was signed. Ask the operator for a whole one."
        ) from error


def _verified(bundle: Path, folder: Path, trust: TrustFile | None, holder_key: Path | None) -> BundleReport:
    found = _Findings(trust)
    told = unpack(bundle, folder)
    directory = folder / LEDGER
    # Of a key that was rotated, the one that the auditor trusts has handed over to it.
    key = read_verifier_key(directory, trust.operator if trust else None)
    if trust is None:
        found.unpinned.append(f"operator: the key {key.text} is the bundle's own word")
    subjects, facts = read_statement((folder / LIST_STATEMENT).read_bytes(), key, "bundle")
    if subjects != {LIST_FILE: sha256_of(folder / LIST_FILE)} or facts != {name: told.get(name) for name in facts}:
        raise TamperError("The bundle's list isn't the one that the operator has signed.")
    found.say("files", f"{len(told['files'])}, each as the operator's list says; made {told.get('made')}")
    if unread := unread_files(folder, told["files"]):
        names = ", ".join(unread[:5]) + (f" and {len(unread) - 5} more" if len(unread) > 5 else "")
        found.say("but", f"no check reads {names}: believe nothing there")
    replayed = check_replays(found.say, folder, directory, key, trust.replays if trust else ())
    evidence = replace(trust.evidence if trust else NOBODY, replayed=replayed)
    pinned = trust.pinned if trust and trust.pinned else None
    report = verify_ledger(directory, vkey=key.text, pinned=pinned, witnesses=evidence)
    if (told.get("origin"), told.get("tree_size"), told.get("root")) != (report.origin, report.size, report.root):
        raise TamperError("The bundle's ledger isn't the one that its list names.")
    ledger = VerifiedLedger(directory, key.text)
    found.say("ledger", f"{report.origin}: {report.size} entries, {report.num_steps} steps, root {report.root}")
    if report.pinned_size is not None:
        found.say("pinned", f"it goes on from the checkpoint of {report.pinned_size} entries that you kept")
    _say_history(found, directory, report)
    _check_data(found, directory, report)
    _check_policies(found, directory, report)
    _check_artifacts(found, directory, report)
    figured = figures(ledger, report, directory)
    if encode_details(figured) != (folder / FIGURES).read_bytes():
        raise TamperError("The bundle's figures aren't those that its ledger gives.")
    found.say(
        "figures", f"{len(figured['classes'])} classes, {len(figured['regions'])} regions, as the ledger gives them"
    )
    credential = check_rights(found.say, folder, ledger, holder_key)
    if credential is not None:
        found.pin("credential", credential.authority, trust.data_roots if trust else ())
    check_certificates(found.say, folder, ledger, directory)
    digests, step = _check_weights(found, folder, ledger)
    _check_claims(found, folder, key, figured, digests, step)
    _check_documents(found, folder, told, figured, digests)
    return BundleReport(tuple(found.lines), tuple(found.unpinned), report.evidence_level, figured)


def _say_history(found: _Findings, directory: Path, report: LedgerReport) -> None:
    """Say how the ledger was kept, and what an auditor asks about."""
    if report.witnessed is not None:
        seen = report.witnessed
        tail = f"{report.size - seen.size} entries after that" if seen.size < report.size else "all of it"
        words = f"{seen}; {tail}" if seen.size else f"too few: {seen.num_seen} of {seen.num_asked}"
        found.say("seen", words)
    for what, words in kept_lines(report):
        found.say(what, words)
    for root in rehearsed(directory / FOLDER, report.vouched_facts):
        found.say("rehearsal", f"the authority {root[:12]} is {SAYS}")
    if report.diverged_steps:
        found.say("but", f"steps that came out differently when run again: {list(report.diverged_steps)}")


def _check_data(found: _Findings, directory: Path, report: LedgerReport) -> None:
    roots = found.trust.data_roots if found.trust else ()
    for step, facts in report.provenance_from:
        since = f"from step {step} on, " if step else ""
        if facts is None:
            if roots:
                raise RefutedError(
                    f"Nobody vouches for the data {since or 'of the run'}, and you trust {', '.join(roots)}."
                )
            found.say("data", f"{since}declared: nobody vouches for their classes")
            continue
        if problems := audit(directory / FOLDER, facts):
            raise RefutedError("Who vouched for the data doesn't hold: " + "; ".join(problems))
        for source in facts["sources"]:
            found.pin("data", source["root"], roots)
            found.say("data", f"{since}{signed_by(source)}, {facts['opened']}")
    for words, is_refuted in audit_all_withdrawn(directory / FOLDER, report.withdrawn, report.manifests):
        if is_refuted:
            raise RefutedError(f"What was withdrawn doesn't hold: {words}.")
        found.say("withdrawn", words)


def _check_policies(found: _Findings, directory: Path, report: LedgerReport) -> None:
    roots = found.trust.policy_roots if found.trust else ()
    for policy in report.policies:
        since = f"from step {policy.step} on, " if policy.step else ""
        # Whoever signed a change meant the key that signed the ledger then.
        problems = min((policy.problems(key.text) for key in report.keys), key=len)
        if policy.facts is not None:
            problems = audit_policy(directory / FOLDER, policy.facts, policy.digest) or problems
        if problems:
            raise RefutedError("Who signed the policy doesn't hold: " + "; ".join(problems))
        if policy.facts is None:
            if roots:
                raise RefutedError(
                    f"Nobody has signed the policy {policy.digest.hex()}, and you trust {', '.join(roots)}."
                )
            found.say("policy", f"{since}{policy.digest.hex()[:16]}, declared: nobody has signed it")
            continue
        (source,) = policy.facts["sources"]
        found.pin("policy", source["root"], roots)
        found.say("policy", f"{since}{signed_by(source)}")


def _check_artifacts(found: _Findings, directory: Path, report: LedgerReport) -> None:
    roots = found.trust.data_roots if found.trust else ()
    for _, facts in report.artifacts_from:
        for label, one in (facts or {}).items():
            if "provenance" not in one:
                found.say("prepared", f"{label}: ungoverned, nobody vouches for it")
                continue
            if problems := audit(directory / FOLDER, one["provenance"]):
                raise RefutedError(f"Who signed the {label} doesn't hold: " + "; ".join(problems))
            for source in one["provenance"]["sources"]:
                found.pin(label, source["root"], roots)
                found.say("prepared", f"{label}: {signed_by(source)}")


def _check_weights(found: _Findings, folder: Path, ledger: VerifiedLedger) -> tuple[dict[str, str], int | None]:
    if not (folder / WEIGHTS).is_dir():
        found.say("weights", "none in this bundle")
        return {}, None
    verify_weights(folder / WEIGHTS, folder / WEIGHTS_SIGNATURE, folder / WEIGHTS_KEY)
    files = sorted((folder / WEIGHTS).iterdir())
    if len(files) != 1:
        raise TamperError(f"The bundle holds {len(files)} files of weights, and one is signed by the ledger.")
    try:
        signed = check_weights(ledger, files[0])
    except CosmatiError as error:
        raise RefutedError(str(error)) from error
    found.say(
        "weights", f"{files[0].name}, those after {signed.step} steps: root {signed.root.hex()}, entry {signed.index}"
    )
    return {f"{WEIGHTS}/{files[0].name}": sha256_of(files[0])}, signed.step


def _check_claims(
    found: _Findings,
    folder: Path,
    key: VerifierKey,
    figured: Mapping[str, Any],
    digests: Mapping[str, str],
    step: int | None,
) -> None:
    wanted = dict(digests) or {f"{LEDGER}/{CHECKPOINT_FILE}": sha256_of(folder / LEDGER / CHECKPOINT_FILE)}
    key_digest = sha256_of(folder / WEIGHTS_KEY) if digests else ""
    claims = {
        "training": (TRAINING, training_claim(figured, LEVEL_0, step, key_digest)),
        "exclusions": (EXCLUSIONS, {"figures_sha256": sha256_of(folder / FIGURES), "pairs": figured["exclusions"]}),
    }
    for kind, (name, claim) in claims.items():
        subjects, predicate = read_statement((folder / name).read_bytes(), key, kind)
        if subjects != wanted or encode_details(predicate) != encode_details(claim):
            raise TamperError(f"The statement {kind!r} says something else than the ledger gives.")
    found.say("statements", f"{', '.join(claims)}: signed, and as the ledger gives them")
    for class_name, region in figured["exclusions"]:
        if figured["classes"][class_name]["rows"]:
            found.say("excluded", f"no logged step gave rows of {class_name} weight in {region}")


def _check_documents(
    found: _Findings, folder: Path, told: Mapping[str, Any], figured: Mapping[str, Any], digests: Mapping[str, str]
) -> None:
    if told.get("release") != __version__:
        found.say(
            "documents", f"rendered by release {told.get('release')}; this one, {__version__}, can't compare them"
        )
        return
    rendered = documents(figured, read_about(folder / ABOUT), digests, str(told.get("made")))
    num, rendered = len(rendered), {**rendered, README_FILE: README.encode()}
    there = {name for name in told["files"] if name.startswith("documents/")}
    wrong = [name for name in sorted(there | rendered.keys()) if not _is_same(folder / name, rendered.get(name))]
    if wrong:
        raise TamperError(f"{', '.join(wrong[:3])} of the bundle isn't what its figures give.")
    found.say("documents", f"{num}, as the figures give them")


def _is_same(path: Path, data: bytes | None) -> bool:
    return path.is_file() and path.read_bytes() == data
