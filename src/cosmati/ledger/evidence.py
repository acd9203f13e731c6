"""How much an answer from a ledger shows: its evidence level, the same words wherever it's printed.

L0: the ledger is consistent in itself, and all that it says is the operator's word. L1: witnesses whom the asker trusts
had seen it by a certain time, so it wasn't rewritten since. L2: an auditor replayed segments that were chosen after
that. L3: the whole run was replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.cosignature import WitnessKey
from cosmati.ledger.cosigned import CosignedHead, cosigned_heads, refuse_contradictions, signed_by_one_of
from cosmati.ledger.note import TreeHead, VerifierKey
from cosmati.ledger.replay_result import ReplayResult

_REPLAYED = ("L2:", "L3:")
LEVEL_0 = "L0: consistent in itself, operator-asserted"


class ReplayedHead(NamedTuple):
    """What a replay's result says: of which log and tree, and the level that it reached, in words."""

    origin: str
    head: TreeHead
    level: str


def read_replayed(path: Path) -> ReplayedHead:
    """Read the file that `cosmati ledger replay` or `spot-check` has written: canonical JSON.

    Raises:
        LedgerError: it's none, or can't be read.
    """
    try:
        found = ReplayResult.from_bytes(path.read_bytes())
        if type(found.size) is not int or type(found.origin) is not str:
            raise ValueError("it names no log and no size")
        return ReplayedHead(found.origin, TreeHead(found.size, bytes.fromhex(found.root)), found.level)
    except (OSError, ValueError, TypeError, LedgerError) as error:
        raise LedgerError(f"{path} is no result of a replay: {error}. Give what `spot-check --out` wrote.") from error


@dataclass(frozen=True, slots=True)
class TrustedEvidence:
    """Whom the asker trusts to say when a ledger was as it is, and what an auditor has found of it.

    Attributes:
        keys: of the witnesses, from a source that isn't the operator.
        quorum: how many of them have to have seen it; 0 takes all.
        replayed: the result of a replay that the asker has run, or whose auditor the asker trusts.
    """

    keys: tuple[WitnessKey, ...] = ()
    quorum: int = 0
    replayed: ReplayedHead | None = None

    def __post_init__(self) -> None:
        """Refuse a quorum that can't be met, and one key given twice."""
        names = {one.public for one in self.keys}
        if len(names) < len(self.keys):
            raise LedgerError("A witness is given twice, and would be counted twice. Give each key once.")
        if not 0 <= self.quorum <= len(self.keys):
            raise LedgerError(f"A quorum of {self.quorum} of {len(self.keys)} witnesses can't be met. Give more keys.")

    @classmethod
    def parse(cls, texts: Iterable[str] = (), quorum: int = 0, replayed: Path | None = None) -> TrustedEvidence:
        """Read the keys' `vkey` form, and the file of a replay's result.

        Raises:
            LedgerError: one is none, is given twice, or the quorum can't be met.
        """
        return cls(tuple(map(WitnessKey.parse, texts)), quorum, None if replayed is None else read_replayed(replayed))

    @property
    def num_needed(self) -> int:
        """How many have to have seen it."""
        return self.quorum or len(self.keys)


NOBODY = TrustedEvidence()


@dataclass(frozen=True, slots=True)
class WitnessedHead:
    """The largest tree that enough witnesses had seen.

    Attributes:
        size: Its entries; 0 where too few have seen any.
        time: By when they had, in seconds since 1970; 0 where they haven't.
        num_seen: How many of them have.
        num_asked: How many were asked for.
    """

    size: int
    time: int
    num_seen: int
    num_asked: int

    def __str__(self) -> str:
        """Say when, and by how many."""
        return f"witnessed at {utc(self.time)} by {self.num_seen} of {self.num_asked}"


def is_witnessed(directory: Path, head: TreeHead, trusted: TrustedEvidence) -> bool:
    """Return whether enough trusted witnesses had seen all of a ledger's tree that has been verified."""
    seen = Witnessing(directory, trusted).witnessed
    return seen is not None and seen.size >= head.size


def utc(seconds: int) -> str:
    """Return a time in words, from the seconds since 1970; of a time that no calendar has, these."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return f"{seconds} s"


class Witnessing:
    """What trusted witnesses say of a ledger: read before its checkpoint, checked with its entries, then asked.

    Args:
        directory: the ledger's.
        trusted: whom the asker trusts.

    Raises:
        TamperError: a cosigned checkpoint is damaged, or a witness contradicts itself.
    """

    def __init__(self, directory: Path, trusted: TrustedEvidence) -> None:
        self._directory, self._trusted = directory, trusted
        self._heads: Sequence[CosignedHead] = cosigned_heads(directory, trusted.keys)
        refuse_contradictions(self._heads)

    @property
    def heads(self) -> list[TreeHead]:
        """Trees with which the ledger has to begin: what was cosigned, by whomever, and what was replayed."""
        replayed = self._trusted.replayed
        return [*(one.head for one in self._heads), *([] if replayed is None else [replayed.head])]

    def check(self, operator: Iterable[VerifierKey]) -> None:
        """Check that the operator signed what has been cosigned.

        Raises:
            TamperError: somebody else did.
        """
        keys, replayed = tuple(operator), self._trusted.replayed
        if replayed is not None and replayed.origin != keys[-1].name:
            raise LedgerError(f"The replay was of the log {replayed.origin!r}, not of {keys[-1].name!r}. Give its own.")
        for head, _, note, _ in self._heads:
            if not signed_by_one_of(note, keys):
                msg = (
                    f"The cosigned checkpoint of {head.size} entries in {self._directory} isn't signed by the operator."
                )
                raise TamperError(f"{msg} Restore it from a copy.")

    def level(self, size: int) -> str:
        """Return what an answer shows that rests on the first `size` entries; see `evidence_level`."""
        return evidence_level(size, self.witnessed, self._trusted.replayed)

    def notes(self, key: VerifierKey) -> list[tuple[str, int]]:
        """Return the cosigned checkpoints that this key signed, and their sizes, the largest first."""
        own = [one for one in self._heads if signed_by_one_of(one.note, [key])]
        return [(one.note.decode("utf-8"), one.head.size) for one in reversed(own)]

    @property
    def witnessed(self) -> WitnessedHead | None:
        """The largest tree that enough of them had seen; None where nobody is asked for."""
        return witnessed_in(self._heads, self._trusted)


def witnessed_in(heads: Iterable[CosignedHead], trusted: TrustedEvidence) -> WitnessedHead | None:
    """Return the largest of some heads of one log that enough witnesses had seen; None where nobody is asked for."""
    if not trusted.keys:
        return None
    needed, asked = trusted.num_needed, len(trusted.keys)
    # Who has seen a larger tree has seen this one in it.
    seen: dict[WitnessKey, list[tuple[int, int]]] = {}
    for head, given, _, _ in heads:
        for one in given:
            seen.setdefault(one.key, []).append((head.size, one.time))
    sizes = sorted((max(own)[0] for own in seen.values()), reverse=True)
    if len(sizes) < needed:
        return WitnessedHead(0, 0, len(sizes), asked)
    size = sizes[needed - 1]
    times = sorted(min(time for s, time in own if s >= size) for own in seen.values() if max(own)[0] >= size)
    return WitnessedHead(size, times[needed - 1], len(times), asked)


def evidence_level(size: int, witnessed: WitnessedHead | None = None, replayed: ReplayedHead | None = None) -> str:
    """Return what an answer shows that rests on the first `size` entries of a ledger that has verified.

    Args:
        size: of the tree under the answer.
        witnessed: what trusted witnesses had seen of it; None where none was asked for.
        replayed: what the asker believes to have been replayed of it; None for nothing.
    """
    if replayed is not None and replayed.head.size >= size and replayed.level[:3] in _REPLAYED:
        return replayed.level if witnessed is None or not witnessed.size else f"{replayed.level}; {witnessed}"
    if witnessed is None:
        return LEVEL_0
    if not witnessed.size:
        return f"{LEVEL_0}; {witnessed.num_seen} of {witnessed.num_asked} witnesses have cosigned, which is too few"
    if witnessed.size < size:
        return f"{LEVEL_0}; the first {witnessed.size} of its {size} entries were {witnessed}"
    return f"L1: {witnessed}"
