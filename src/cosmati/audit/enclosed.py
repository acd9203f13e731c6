"""What lies beside the ledger in a bundle, and is checked against it: certificates of deletions, results of replays."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from cosmati.audit.bundle import sha256_of
from cosmati.errors import CosmatiError, ExportError, RefutedError
from cosmati.forget.certificate import verify_certificate
from cosmati.ledger.evidence import ReplayedHead, read_replayed
from cosmati.ledger.note import TreeHead, VerifierKey
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.reader import Scan, operators_of, read_head
from cosmati.ledger.replay_result import ReplayResult
from cosmati.ledger.roots import signed_certificates
from cosmati.ledger.spot_check import choose_segments

CERTIFICATES, REPLAYS = "certificates", "replays"
Saying = Callable[[str, str], None]


def enclose(folder: Path, ledger: VerifiedLedger, certificates: Path, replays: Sequence[Path]) -> None:
    """Put into a bundle's folder the certificates that its ledger has signed, and results of replays of it.

    Raises:
        ExportError: a result is none of this ledger.
    """
    signed = signed_certificates(ledger)
    own = [path for path in sorted(certificates.glob("*.json")) if sha256_of(path) in signed]
    for name, paths in ((CERTIFICATES, own), (REPLAYS, replays)):
        if paths:
            (folder / name).mkdir()
        for number, path in enumerate(paths, 1):
            target = folder / name / f"{number:04d}.json"
            try:
                shutil.copyfile(path, target)
                if name == REPLAYS:
                    read_result(target, folder / "ledger", ledger.key)
            except (CosmatiError, OSError) as error:
                raise ExportError(f"{path} can't be enclosed: {error}") from error


def read_result(path: Path, directory: Path, key: VerifierKey) -> ReplayResult:
    """Return what a replay has found, if it's one of this ledger and of the steps that its seed chooses.

    Raises:
        LedgerError: it's no result. TamperError, RefutedError: it's another ledger's, or its steps were chosen by
            somebody.
    """
    read_replayed(path)
    found = ReplayResult.from_bytes(path.read_bytes())
    if found.vkey not in [one.text for one in operators_of(directory, key)]:
        raise RefutedError(f"It's of the ledger of {found.vkey}, and not of this one, of {key.text}.")
    head = TreeHead(found.size, bytes.fromhex(found.root))
    scan, known = Scan(directory, read_head(directory, key), [head]), (0, False)
    for item in scan:  # Whoever reads to the end has compared the roots.
        if item.index < head.size:
            known = scan.history.num_steps, scan.history.has_ended
    if (found.num_steps, found.has_ended) != known:
        raise RefutedError(f"It says that {found.num_steps} steps stood, and the ledger that {known[0]} did.")
    told = [range(one.first, one.end) for one in found.segments]
    if found.seed and told != _chosen(found, head, told):
        raise RefutedError("Its steps aren't those that the tree head and its seed choose.")
    return found


def _chosen(found: ReplayResult, head: TreeHead, told: Sequence[range]) -> list[range]:
    lengths = {len(one) for one in told}
    if len(lengths) != 1:
        return []
    return choose_segments(head, found.seed, num_steps=found.num_steps, number=len(told), length=lengths.pop())


def check_replays(
    say: Saying, folder: Path, directory: Path, key: VerifierKey, believed: Sequence[str]
) -> ReplayedHead | None:
    """Check a bundle's results of replays, and return the best of those that the auditor believes.

    Nobody signs them: one that the auditor doesn't know by its digest is the operator's word.

    Raises:
        RefutedError: one isn't of this ledger.
    """
    best = None
    for path in _enclosed(folder / REPLAYS):
        try:
            found = read_result(path, directory, key)
        except CosmatiError as error:
            raise RefutedError(f"{REPLAYS}/{path.name} doesn't hold: {error}") from error
        is_believed = sha256_of(path) in believed
        whose = "which you believe" if is_believed else f"by the bundle's own word (SHA-256 {sha256_of(path)})"
        steps = ", ".join(f"{one.first}:{one.end} {one.outcome}" for one in found.segments)
        say("replayed", f"of {found.num_steps} steps {steps}, {whose}")
        one = read_replayed(path)
        shows = is_believed and one.level.startswith(("L2:", "L3:"))
        if shows and (best is None or (one.head.size, one.level) > (best.head.size, best.level)):
            best = one
    return best


def check_certificates(say: Saying, folder: Path, ledger: VerifiedLedger, directory: Path) -> None:
    """Check a bundle's certificates of deletions against its ledger, and say which aren't there.

    Raises:
        RefutedError: the ledger doesn't bear one out.
    """
    missing = signed_certificates(ledger)
    for path in _enclosed(folder / CERTIFICATES):
        try:
            found = verify_certificate(path, directory, vkey=ledger.key.text)
            told = found.told
            say("deleted", f"{told['asked']['what']}: {told['method']}, {told['strength']}; entry {found.entry}")
        except (CosmatiError, KeyError) as error:
            raise RefutedError(f"{CERTIFICATES}/{path.name} doesn't hold: {error}") from error
        for words in found.not_checked:
            say("", f"rests on the operator's word: {words}")
        missing = [one for one in missing if one != sha256_of(path)]
    for one in missing:
        say("deleted", f"the ledger has signed the certificate {one[:16]}, and it isn't in this bundle")


def _enclosed(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
