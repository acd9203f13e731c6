"""Makes one bundle about a run: its ledger with the archive of who vouched, its weights, claims and documents."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from safetensors.torch import save_file

from cosmati import __version__
from cosmati.audit.about import About
from cosmati.audit.bundle import LIST_FILE, LIST_STATEMENT, list_of, pack, sha256_of
from cosmati.audit.claims import training_claim
from cosmati.audit.documents import documents
from cosmati.audit.enclosed import CERTIFICATES, enclose
from cosmati.audit.figures import figures
from cosmati.audit.rights import enclose_rights
from cosmati.audit.signed_weights import KEY_FILE, public_key_of, sign_weights
from cosmati.audit.statements import signed_statement
from cosmati.audit.weights import check_weights
from cosmati.errors import ExportError, LedgerError, TamperError
from cosmati.ledger.cosigned import FOLDER as COSIGNED
from cosmati.ledger.cosigned import cosigned_heads
from cosmati.ledger.details import DETAILS_FILE, encode_details
from cosmati.ledger.keys import SigningKey, load_key
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.reader import CHECKPOINT_FILE, VKEY_FILE, Scan, read_head, read_verifier_key
from cosmati.ledger.verify import LEVEL_0, verify_ledger
from cosmati.provenance.voucher import FOLDER
from cosmati.storage.draft_folder import draft_folder
from cosmati.train.run.checkpoints import read_checkpoint

WHOLE_FILE = "model.safetensors"
LEDGER, WEIGHTS, WEIGHTS_SIGNATURE, WEIGHTS_KEY = "ledger", "weights", "weights.sig.json", "weights.pub.pem"
FIGURES, ABOUT, README_FILE = "figures.json", "about.json", "README.txt"
TRAINING, EXCLUSIONS = "statements/training.dsse.json", "statements/exclusions.dsse.json"
_TRIES = 20
"""To copy a ledger whose run goes on: each signed checkpoint replaces files of the one before."""
README = """\
This is what a training run says of itself, and who signed which part of it.

Check it with nothing but this file and what you trust (keys and fingerprints that you got another way):

    cosmati audit trust > trust.yaml        # fill it in
    cosmati audit verify BUNDLE.zip --trust trust.yaml

ledger/       the run's log: signed checkpoint, entries, details, what witnesses cosigned, and the archived metadata of
              who vouched
certificates/ of deletions, as the ledger has signed them
replays/      results of replays; who made them isn't signed
rights/       a credential, and keys to what it covers of the ledger's sealed columns, sealed to its holder's key
weights/      the model, signed as OpenSSF model-signing does (weights.sig.json, weights.pub.pem)
statements/   in-toto statements in DSSE envelopes, signed with the operator's key
documents/    CycloneDX bill of materials, Croissant of each signed source, public summary of training content
figures.json  what all documents are made from; it follows from the ledger alone
bundle.json   every file by its SHA-256

A signature shows who said something, never that it's so. The ledger shows what was said; only a replay shows what was
trained. That a class never wrote to a part of the model doesn't say that it had no influence there.
"""


def export_bundle(
    ledger: Path,
    bundle: Path,
    *,
    key: Path,
    weights: Path | None = None,
    replays: Sequence[Path] = (),
    about: About | None = None,
    rights: tuple[Path, Path] | None = None,
    now: datetime | None = None,
) -> Path:
    """Write a run's bundle, whole or not at all, and return its path.

    Args:
        ledger: folder of the run's ledger; the run may go on meanwhile.
        bundle: the file to write, replaced if it's there.
        key: the operator's key; the one for weights lies beside it, and is made if there's none.
        weights: a safetensors file, or the folder of a checkpoint in parts, that the ledger signs; none are packed if
            left out.
        replays: results of replays of this run (`ReplayResult`).
        about: the provider's words.
        rights: a credential, and the keys that were released under it, for its holder; the ledger's boxes stay boxes.
        now: the time that documents name; the clock's if left out.

    Raises:
        LedgerError: the ledger or a key can't be read. TamperError: the ledger doesn't verify. RefutedError: the ledger
            doesn't sign these weights. ExportError: the bundle can't be written there.
    """
    if not bundle.parent.is_dir():
        raise ExportError(
            f"There's no folder {bundle.parent} to write {bundle.name} in. Make it, or name another file."
        )
    present = read_verifier_key(ledger)
    signer = load_key(key, name=present.name)
    if signer.verifier != present:
        raise LedgerError(f"{key} isn't the key that signs {ledger}, {present.text}. Give that one: --key FILE.")
    made = (now or datetime.now(UTC)).isoformat(timespec="seconds")
    with draft_folder(bundle) as folder:
        copy_ledger(ledger, folder / LEDGER)
        enclose(folder, VerifiedLedger(folder / LEDGER), ledger.parent / CERTIFICATES, replays)
        if rights is not None:
            enclose_rights(folder, VerifiedLedger(folder / LEDGER), *rights)
        _fill(folder, signer, key.with_name(KEY_FILE), weights, about or About(), made)
        pack(folder, bundle)
    return bundle


def _fill(folder: Path, signer: SigningKey, weights_key: Path, weights: Path | None, about: About, made: str) -> None:
    copy = folder / LEDGER
    report = verify_ledger(copy)
    opened = VerifiedLedger(copy)
    digests = dict[str, str]()
    signed_step = None
    if weights is not None:
        (folder / WEIGHTS).mkdir()
        packed = folder / WEIGHTS / (WHOLE_FILE if weights.is_dir() else weights.name)
        if weights.is_dir():  # a checkpoint in parts
            save_file(dict(read_checkpoint(weights).model), packed)
        else:
            _link(weights, packed)
        signed_step = check_weights(opened, weights).step
        (folder / WEIGHTS_KEY).write_bytes(public_key_of(weights_key))
        sign_weights(folder / WEIGHTS, folder / WEIGHTS_SIGNATURE, weights_key)
        digests[f"{WEIGHTS}/{packed.name}"] = sha256_of(packed)
    found = figures(opened, report, copy)
    (folder / FIGURES).write_bytes(encode_details(found))
    (folder / ABOUT).write_bytes(encode_details(about.model_dump(mode="json")))
    (folder / README_FILE).write_text(README, "utf-8")
    for name, data in documents(found, about, digests, made).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / TRAINING).parent.mkdir()
    subjects = digests or {f"{LEDGER}/{CHECKPOINT_FILE}": sha256_of(copy / CHECKPOINT_FILE)}
    weights_key_digest = sha256_of(folder / WEIGHTS_KEY) if weights is not None else ""
    claim = training_claim(found, LEVEL_0, signed_step, weights_key_digest)
    (folder / TRAINING).write_bytes(signed_statement(signer, "training", subjects, claim))
    claim = {"figures_sha256": sha256_of(folder / FIGURES), "pairs": found["exclusions"]}
    (folder / EXCLUSIONS).write_bytes(signed_statement(signer, "exclusions", subjects, claim))
    facts = {
        "made": made,
        "release": __version__,
        "origin": report.origin,
        "tree_size": report.size,
        "root": report.root,
    }
    (folder / LIST_FILE).write_bytes(list_of(folder, facts))
    signed = signed_statement(signer, "bundle", {LIST_FILE: sha256_of(folder / LIST_FILE)}, facts)
    (folder / LIST_STATEMENT).write_bytes(signed)


def copy_ledger(ledger: Path, folder: Path) -> Path:
    """Copy what a ledger's signed checkpoint covers, and return the copy's folder; a run may write on meanwhile.

    Raises:
        LedgerError: it can't be read. TamperError: it doesn't verify.
    """
    for left in reversed(range(_TRIES)):
        try:
            return _copied(ledger, folder)
        except (TamperError, OSError) as error:
            before = (folder / CHECKPOINT_FILE).read_bytes() if (folder / CHECKPOINT_FILE).exists() else b""
            now = (ledger / CHECKPOINT_FILE).read_bytes() if (ledger / CHECKPOINT_FILE).exists() else b""
            # A writer removes the parts of a tile after it has signed the whole one: what was listed is gone.
            is_live = bool(now) and (now != before or isinstance(error, shutil.Error))
            shutil.rmtree(folder, ignore_errors=True)
            if not (left and is_live):
                if isinstance(error, LedgerError):
                    raise
                raise LedgerError(f"The ledger {ledger} can't be copied: {error}. Try again.") from error
    raise AssertionError("the last try returns or raises")


def _copied(ledger: Path, folder: Path) -> Path:
    folder.mkdir()
    for name in (CHECKPOINT_FILE, VKEY_FILE):  # before all that the checkpoint covers
        shutil.copyfile(ledger / name, folder / name)
    for name in ("tile", FOLDER, COSIGNED):
        if (ledger / name).is_dir():
            shutil.copytree(ledger / name, folder / name)
    shutil.copyfile(ledger / DETAILS_FILE, folder / DETAILS_FILE)
    head = read_head(folder, read_verifier_key(folder))
    for one in cosigned_heads(folder, ()):
        if one.head.size > head.size:  # cosigned since
            (folder / COSIGNED / str(one.head.size)).unlink()
    scan = Scan(folder, head)
    for _ in scan:
        pass
    os.truncate(folder / DETAILS_FILE, scan.details_size)
    return folder


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where the disk has no such thing: it may be large."""
    try:
        target.hardlink_to(source.resolve())
    except OSError:
        shutil.copyfile(source, target)
