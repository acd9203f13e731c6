"""The certificate of a deletion: one canonical JSON file whose digest the run's ledger has signed.

It's no proof that content is nowhere: it says what the operator did, and gives what anybody needs to check it against
a copy of the ledger. An amendment after the replay names its digest, and the operator's signed checkpoint covers that.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import rfc8785

from cosmati.errors import ForgetError, RefutedError, TamperError
from cosmati.forget.ablation import STRENGTH, ablated_weights
from cosmati.forget.ablation_certificate import check_ablation, told_of_ablation, unchecked
from cosmati.forget.asked import is_within
from cosmati.forget.derived import COPY, DELETED, Derived
from cosmati.forget.holds import all_holds
from cosmati.forget.past_run import CERTIFICATE, FORGOTTEN, PastRun
from cosmati.forget.planning import EXACT, FROM_ENTRY_0, DeletionPlan, Option, own_regions
from cosmati.forget.shredding import KEPT, SALTED, SHREDDED, WORDS, Shredded
from cosmati.forget.succession import CERTIFICATES, append_certified
from cosmati.ledger.evidence import LEVEL_0, NOBODY, TrustedEvidence
from cosmati.ledger.note import TreeHead
from cosmati.ledger.query import VerifiedLedger, direct_write_exclusions
from cosmati.ledger.reader import Scan
from cosmati.ledger.roots import signed_certificates
from cosmati.records.ledger import AmendEntry, CheckpointEntry
from cosmati.storage.atomic import replace_files

KIND, VERSION = "cosmati deletion certificate", 1
_STRENGTHS = {"drop": (EXACT,), "replay": (EXACT, FROM_ENTRY_0), "ablate": (STRENGTH,)}


def certify(
    run: PastRun, out: Path, plan: DeletionPlan, option: Option, derived: tuple[Derived, ...], keys: Shredded
) -> tuple[Path, dict[str, Any]]:
    """Write a certificate of what was done, with notices, and have the ledger sign its digest.

    Args:
        run: that had the content.
        out: the run that succeeds it, at its end.
        plan: of the deletion.
        option: how it was done.
        derived: what was made of the run, as it is now.
        keys: what became of the rows' keys.

    Returns:
        The file, and what it says.
    """
    told = _certificate(run, PastRun(out), plan, option, derived, keys)
    data = rfc8785.dumps(told)
    number = 1 + len(signed_certificates(PastRun(out).ledger))
    name = f"{CERTIFICATES}/{number:04d}"
    files = {f"{name}.json": data}
    files |= {f"{name}-notices/{one}": text.encode() for one, text in notices(told).items()}
    replace_files(out, files)
    digest = hashlib.sha256(data).hexdigest()
    about = {"digest": digest, "asked": plan.digest, "method": option.method, "strength": told["strength"]}
    append_certified(out, about, [[CERTIFICATE, told["previous"], digest]])
    return out / f"{name}.json", told


def _certificate(
    run: PastRun, after: PastRun, plan: DeletionPlan, option: Option, derived: tuple[Derived, ...], keys: Shredded
) -> dict[str, Any]:
    end = _last_checkpoint(after.ledger)
    previous = signed_certificates(after.ledger)
    holds = [f"hold {one.number} was released: {one.released}" for one in all_holds(run.folder) if one.released]
    told: dict[str, Any] = {
        "kind": KIND,
        "version": VERSION,
        "run": plan.run,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "asked": {"what": plan.asked, "digest": plan.digest, "classes": list(plan.classes), "num_rows": plan.num_rows},
        "method": option.method,
        "strength": option.strength,
        "evidence": LEVEL_0,
        "to": {
            "tree_size": after.ledger.head.size,
            "root": after.ledger.head.root.hex(),
            "step": end.step,
            "state": end.state_digest.hex(),
            "parameters": end.parameter_root.hex(),
        },
        "regions": [list(pair) for pair in own_regions(run, plan.classes)] if option.method == "drop" else [],
        "derived": [asdict(one) for one in derived],
        "row_keys": keys.status,
        "not_covered": [*plan.not_covered, *keys.not_covered, *_kept_by_stores(derived)],
        "notes": [*option.notes, *holds, *([WORDS] if keys.status == SHREDDED else [])],
        "previous": previous[-1] if previous else "",
    }
    if option.is_approximate:
        del told["row_keys"]  # The run that has the content goes on, and its rows can be asked for.
        told["not_covered"] = [
            *plan.not_covered,
            f"{ablated_weights(after.folder).name}: the weights before the repair",
        ]
        return told | told_of_ablation(run, after.folder)
    if option.method == "replay" and (reason := after.broken("replayable")):
        told["notes"] = [f"not bit for bit what another machine would give: {reason}", *told["notes"]]
    forgotten, begun = _forgotten(after.ledger, plan.digest)
    begins = {"step": option.from_step, "first_contact": plan.first_contact, "entry": begun}
    return told | {"from": forgotten["succeeds"], "replayed_from": begins}


def _kept_by_stores(derived: tuple[Derived, ...]) -> list[str]:
    """Return what may be left of copies that were deleted elsewhere."""
    is_deleted = any(one.kind == COPY and one.status == DELETED for one in derived)
    return ["older versions and replicas that a store keeps by itself of the copies deleted there"] * is_deleted


def notices(told: Mapping[str, Any]) -> dict[str, str]:
    """Return letters to the holders of what a certificate doesn't cover, by file name."""
    letters = {
        "copies.txt": _letter(told, "a copy of the weights of", f"run {told['run']}, of any step, in whatever form"),
    }
    outside = [one for one in told["derived"] if one["status"] == "not covered" and not Derived(**one).is_own]
    for number, one in enumerate(outside, 1):
        letters[f"{number:03d}.txt"] = _letter(told, f"the {one['kind']}", f"{one['path']}, made at step {one['step']}")
    return letters


def _letter(told: Mapping[str, Any], kind: str, what: str) -> str:
    done = "The run was succeeded by one that doesn't have it"
    if "ablation" in told:
        done = "What only or mostly that had taught was set to zero, and the rest trained on without it"
    return (
        f"Notice of a deletion\n\nTo whoever holds {kind} {what}.\n\n"
        f"On {told['at']} the operator of run {told['run']} was asked to forget: {told['asked']['what']}. {done} "
        f"({told['method']}: {told['strength']}).\n\n"
        "What you hold was made before, and may have learnt from it. Nobody can take it out of your copy for you. Stop "
        "using it, delete it, and make it anew from the new run, whose weights have the Merkle root\n"
        f"{told['to']['parameters']}.\n\n"
        f"Evidence of this deletion: {told['evidence']}. Request {told['asked']['digest']}.\n"
    )


def _forgotten(ledger: VerifiedLedger, asked: str) -> tuple[dict[str, Any], int]:
    """Return what the ledger says of a deletion, and the index of the entry that says it."""
    for tables in reversed(ledger.tables):
        told = tables.details.get(FORGOTTEN)
        if isinstance(told, dict) and told.get("asked") == asked and any(c[0] == FORGOTTEN for c in tables.changes):
            return told, tables.index
    msg = f"The ledger of {ledger.key.name} knows of no deletion with the request {asked}."
    raise RefutedError(msg)


def _last_checkpoint(ledger: VerifiedLedger) -> CheckpointEntry:
    found = [item.entry for item in ledger.entries() if isinstance(item.entry, CheckpointEntry)]
    if not found:
        raise ForgetError("The run wrote no checkpoint, so there are no weights to certify. Let it end first.")
    return found[-1]


def read_certificate(path: Path) -> tuple[dict[str, Any], str]:
    """Return what a certificate says, and its digest.

    Raises:
        ForgetError: it can't be read, or isn't one. TamperError: it isn't in the form in which it was signed.
    """
    try:
        data = path.read_bytes()
        told = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise ForgetError(f"{path} is no certificate: {error}. Give a file of RUN/{CERTIFICATES}.") from error
    if not isinstance(told, dict) or told.get("kind") != KIND or told.get("version") != VERSION:
        raise ForgetError(f"{path} is no deletion certificate of version {VERSION}. Give a file of RUN/{CERTIFICATES}.")
    if rfc8785.dumps(told) != data:
        msg = f"{path} isn't the canonical JSON that was signed: it was reformatted or changed. Take it from a copy."
        raise TamperError(msg)
    return told, hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class VerifiedCertificate:
    """A certificate that the ledger bears out.

    Attributes:
        told: what it says.
        entry: index of the ledger's entry that names it.
        checked: in words, what was checked against the ledger.
        not_checked: in words, what rests on the operator's word.
        evidence: how much the ledger shows, by those whom the asker trusts.
    """

    told: Mapping[str, Any]
    entry: int
    checked: tuple[str, ...]
    not_checked: tuple[str, ...]
    evidence: str


def verify_certificate(
    path: Path, ledger: Path, *, vkey: str | None = None, witnesses: TrustedEvidence = NOBODY
) -> VerifiedCertificate:
    """Check a certificate against a copy of the ledger, with nothing else of the operator's.

    Args:
        path: of the certificate.
        ledger: the folder of the ledger.
        vkey: the operator's verifier key from a source that you trust.
        witnesses: whom you trust to have seen the ledger, and what was replayed of it.

    Raises:
        ForgetError: no certificate. RefutedError: the ledger doesn't bear it out. TamperError: the ledger or the
            certificate doesn't verify.
    """
    told, digest = read_certificate(path)
    verified = VerifiedLedger(ledger, vkey, witnesses)
    entry = next((t.index for t in verified.tables if _names(t.details, digest, t.changes)), None)
    if entry is None:
        msg = f"The ledger of {verified.key.name} has signed no certificate {digest[:16]}: another run's, or made up."
        raise RefutedError(msg)
    try:
        checked = _check(told, verified, ledger, entry)
    except (KeyError, TypeError, ValueError) as error:
        raise RefutedError(
            f"The certificate can't be read as one: {error!r}. The ledger's key signed its digest."
        ) from error
    not_checked = [
        "that the rows of the request are those that somebody meant: ids are keyed, and the operator has the key",
        "what was made of the run, and where it is: the operator's own list",
    ]
    if told.get("row_keys") == SHREDDED:
        not_checked.append("that the row keys were shredded, and that no copy of them is left")
    if told["method"] == "replay":
        not_checked.append("that the steps were trained as the ledger says: replay them, which needs the data")
    if told["method"] == "ablate":
        not_checked += unchecked(told)
    return VerifiedCertificate(told, entry, tuple(checked), tuple(not_checked), verified.evidence_level)


def _names(details: Mapping[str, Any], digest: str, changes: tuple[tuple[str, str, str], ...]) -> bool:
    told = details.get(CERTIFICATE)
    is_its = any(name == CERTIFICATE and now == digest for name, _, now in changes)
    return is_its and isinstance(told, dict) and told.get("digest") == digest


def _check(told: Mapping[str, Any], ledger: VerifiedLedger, directory: Path, entry: int) -> list[str]:
    method, to = told["method"], told["to"]
    if told["strength"] not in _STRENGTHS[method]:
        raise RefutedError(f"The certificate calls what {method} gives {told['strength']!r:.60}, and it's less.")
    if told["evidence"] != LEVEL_0:
        raise RefutedError(f"No certificate shows {told['evidence']!r:.100} by itself: it shows less.")
    if told.get("row_keys", SALTED) not in (KEPT, SHREDDED, SALTED):
        raise RefutedError(f"The certificate says of row keys {told['row_keys']!r:.60}, which isn't known.")
    names = ("to",) if method == "ablate" else ("from", "to")
    heads = [TreeHead(told[n]["tree_size"], bytes.fromhex(told[n]["root"])) for n in names]
    sizes = [one.size for one in heads]
    if sizes[-1] > entry or sizes != sorted({*sizes}):
        raise RefutedError(f"The certificate's trees have {' and '.join(map(str, sizes))} entries; it's entry {entry}.")
    for _ in Scan(directory, ledger.head, heads):
        pass  # Whoever reads to the end has compared the roots.
    begun, num_rows = (0, 0) if method == "ablate" else _check_begun(told, ledger)
    state = (to["step"], to["state"], to["parameters"])
    if not any(
        begun < item.index < entry
        and isinstance(item.entry, CheckpointEntry)
        and (item.entry.step, item.entry.state_digest.hex(), item.entry.parameter_root.hex()) == state
        for item in ledger.entries()
    ):
        raise RefutedError("The ledger has signed no checkpoint with the weights that the certificate names.")
    signed = f"entry {entry} of the ledger, which its operator's key has signed, names the certificate"
    goes_on = f"the ledger goes on with the one of {sizes[0]} entries that had the content: nothing was rewritten"
    weights = f"its checkpoint of step {to['step']} has the weights {to['parameters']}"
    if method == "ablate":
        return [signed, weights, *check_ablation(told, ledger), *_check_replayed(told, ledger)]
    is_dropped = method == "drop"
    checked = (_check_dropped if is_dropped else _check_replayed)(told, ledger)
    _check_words(told, num_rows)
    return [signed, goes_on, weights, *checked]


def _check_begun(told: Mapping[str, Any], ledger: VerifiedLedger) -> tuple[int, int]:
    """Compare what a certificate and the ledger say of a deletion; return the ledger's entry, and how many rows."""
    forgotten, begun = _forgotten(ledger, told["asked"]["digest"])
    step = told["replayed_from"]["step"] if told["method"] == "replay" else told["to"]["step"]
    amended = next(t.entry for t in ledger.tables if t.index == begun)
    if forgotten["succeeds"] != told["from"] or not isinstance(amended, AmendEntry) or amended.step != step:
        raise RefutedError("The certificate and the ledger say otherwise of where the deletion began.")
    if forgotten["method"] != told["method"] or sorted(forgotten["classes"]) != sorted(told["asked"]["classes"]):
        raise RefutedError("The certificate and the ledger say otherwise of what was done, or to which classes.")
    return begun, forgotten["num_rows"]


def _check_words(told: Mapping[str, Any], num_rows: int) -> None:
    """Look whether what people read is what was done: nothing signed says more than its ledger."""
    asked = told["asked"]
    is_rows = re.fullmatch(r"\d+ rows( of a subject)?", asked["what"]) is not None
    names = asked["what"].removeprefix("class ").split(", ")
    is_classes = not num_rows and all(any(is_within(own, one) for own in asked["classes"]) for one in names)
    if asked["num_rows"] != num_rows or not (is_rows or is_classes):
        raise RefutedError(f"The certificate says {asked['what']!r:.200}, and the ledger that other rows were meant.")


def _check_dropped(told: Mapping[str, Any], ledger: VerifiedLedger) -> list[str]:
    own = [(one, region) for one, region in told["regions"]]
    classes = {one for one, _ in own}
    others = [(one, r) for one in classes for r in ledger.regions if (one, r) not in own]
    direct_write_exclusions(ledger, others)
    return [f"no step gave {one} weight in {region}" for one, region in others]


def _check_replayed(told: Mapping[str, Any], ledger: VerifiedLedger) -> list[str]:
    """Look whether a step that stands had rows of a class that's forgotten as a whole."""
    if told["asked"]["num_rows"] or not any(tables.policy for tables in ledger.tables):
        return []
    classes = set(told["asked"]["classes"])
    for item, entry, tables in ledger.steps():
        if item.index in ledger.standing:
            names = [tables.class_of(cell, item) for cell in entry.microbatches if cell.num_rows]
            if found := classes & {*names}:
                msg = f"Step {entry.step}, which stands, ran rows of {', '.join(sorted(found))}: it wasn't forgotten."
                raise RefutedError(msg)
    return [f"no step that stands ran rows of {', '.join(sorted(classes))}"]


def pending(told: Mapping[str, Any]) -> list[Derived]:
    """Return the checkpoints of a certificate's run that have the content, and weren't deleted."""
    found = [Derived(**one) for one in told["derived"]]
    return [one for one in found if one.is_own and one.status not in (DELETED, "never had it")]
