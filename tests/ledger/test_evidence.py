"""The evidence level that every answer prints: what it takes, and that nothing claims more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.cosignature import Cosignature
from cosmati.ledger.cosigned import CosignedHead
from cosmati.ledger.evidence import (
    LEVEL_0,
    ReplayedHead,
    TrustedEvidence,
    WitnessedHead,
    evidence_level,
    is_witnessed,
    read_replayed,
    utc,
)
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.note import TreeHead
from cosmati.ledger.profile import ATTESTED, OPERATOR_ALONE, SELF, LedgerProfile, lapses
from cosmati.ledger.proof import check_inclusion, prove_inclusion
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.replay_result import ReplayResult, SegmentResult
from cosmati.ledger.verify import verify_ledger
from cosmati.ledger.writer import LedgerWriter

from .ledgers import ORIGIN, append_steps, write_run

KEY = SigningKey.generate(ORIGIN)
SEEN = WitnessedHead(10, 1_700_000_000, 2, 3)
L2 = "L2: steps chosen after the ledger's head was witnessed were replayed"


def replayed(size: int, level: str = L2) -> ReplayedHead:
    return ReplayedHead(ORIGIN, TreeHead(size, bytes(32)), level)


@pytest.mark.parametrize(
    ("size", "witnessed", "found", "level"),
    [
        (10, None, None, LEVEL_0),
        (10, SEEN, None, "L1: witnessed at 2023-11-14T22:13:20Z by 2 of 3"),
        (9, SEEN, None, "L1: "),
        (11, SEEN, None, f"{LEVEL_0}; the first 10 of its 11 entries were witnessed at"),
        (10, WitnessedHead(0, 0, 1, 3), None, f"{LEVEL_0}; 1 of 3 witnesses have cosigned, which is too few"),
        (10, SEEN, replayed(10), f"{L2}; witnessed at"),
        (10, None, replayed(10), L2),
        (11, None, replayed(10), LEVEL_0),
        (10, None, replayed(10, "L3: the whole run was replayed"), "L3: the whole run was replayed"),
        (10, None, replayed(10, "L0: replayed; the head wasn't witnessed"), LEVEL_0),
        (10, SEEN, replayed(10, "none: not every digest was equal"), "L1: "),
    ],
)
def test_levels(size: int, witnessed: WitnessedHead | None, found: ReplayedHead | None, level: str) -> None:
    assert evidence_level(size, witnessed, found).startswith(level)
    assert evidence_level(size, witnessed, found).count("L0") == level.count("L0")


def _result(path: Path, ledger: Path, **changed: object) -> Path:
    """Write the result of a spot check that found one segment equal, the head of which had been witnessed."""
    report = verify_ledger(ledger)
    segment = SegmentResult(first=1, end=2, start=0, from_entry_0=True, outcome="equal", num_differences=0)
    told: dict[str, Any] = {
        "origin": ORIGIN,
        "vkey": KEY.verifier.text,
        "size": report.size,
        "root": report.root,
        "num_steps": report.num_steps,
        "has_ended": False,
        "is_witnessed": True,
        "seed": "s",
        "segments": (segment,),
        "compares_rows": True,
    }
    path.write_bytes(ReplayResult(**told | changed).to_bytes())
    return path


def test_a_replay_counts_for_the_tree_that_it_was_of(tmp_path: Path) -> None:
    write_run(tmp_path / "l", KEY, 5).close()
    result = _result(tmp_path / "result.json", tmp_path / "l")
    trusted = TrustedEvidence.parse(replayed=result)
    assert verify_ledger(tmp_path / "l", witnesses=trusted).evidence_level == L2
    assert VerifiedLedger(tmp_path / "l", None, trusted).evidence_level == L2
    proof = prove_inclusion(tmp_path / "l", step=1)
    assert check_inclusion(proof, KEY.verifier.text, trusted).evidence_level == L2
    write_run(tmp_path / "fork", KEY, 3).close()
    with LedgerWriter.open(tmp_path / "fork", key=KEY) as writer:
        append_steps(writer, range(3, 6), salt="other")
    with pytest.raises(TamperError, match="rewritten"):
        verify_ledger(tmp_path / "fork", witnesses=trusted)
    with LedgerWriter.open(tmp_path / "l", key=KEY) as writer:
        append_steps(writer, range(5, 6))
    assert verify_ledger(tmp_path / "l", witnesses=trusted).evidence_level == LEVEL_0
    proof = prove_inclusion(tmp_path / "l", step=1)
    assert check_inclusion(proof, KEY.verifier.text, trusted).evidence_level == LEVEL_0


def test_a_replay_of_another_log_or_of_nothing_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "l", KEY, 2).close()
    other = TrustedEvidence.parse(replayed=_result(tmp_path / "other", tmp_path / "l", origin="another"))
    with pytest.raises(LedgerError, match="was of the log 'another'"):
        verify_ledger(tmp_path / "l", witnesses=other)
    for changed in ({"size": "3"}, {"root": "x"}, {"origin": 3}):
        with pytest.raises(LedgerError, match="is no result of a replay"):
            read_replayed(_result(tmp_path / "wrong", tmp_path / "l", **changed))
    sound = _result(tmp_path / "sound", tmp_path / "l").read_text()
    edited = sound.replace("L2: steps", "L3: steps"), sound.replace('"cosmati replay"', '"a run"')
    for text in ("", "[]", "{}", *edited):
        (tmp_path / "wrong").write_text(text)
        with pytest.raises(LedgerError, match="is no result of a replay"):
            read_replayed(tmp_path / "wrong")
    assert not is_witnessed(tmp_path / "l", TreeHead(1, b""), TrustedEvidence())


WITNESSES = tuple(SigningKey.generate(f"w{number}.example").witness for number in range(2))
BOTH = LedgerProfile(ATTESTED, WITNESSES, 2)


def cosigned(size: int, *times: int) -> CosignedHead:
    given = tuple(Cosignature(key, time) for key, time in zip(WITNESSES, times, strict=False))
    return CosignedHead(TreeHead(size, bytes(32)), given, b"")


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        ([cosigned(2, 0, 0), cosigned(9, 4000, 4500)], []),
        ([cosigned(2, 0, 0), cosigned(9, 4501, 4400)], ["nothing was witnessed between"]),
        ([cosigned(4, 0, 0), cosigned(9, 10, 10)], ["entry 0 wasn't"]),
        ([cosigned(2, 0), cosigned(9, 10, 10)], ["entry 0 wasn't"]),
        ([cosigned(2, 0, 0), cosigned(9, 10)], ["the end isn't"]),
        ([cosigned(2, 0, 0), cosigned(8, 10, 10)], ["the end isn't"]),
        ([], ["entry 0 wasn't", "the end isn't"]),
    ],
)
def test_lapses_of_an_attested_run(heads: list[CosignedHead], words: list[str]) -> None:
    found = lapses(BOTH, heads, first_step=3, size=9, has_ended=True)
    assert [text[: len(word)] for text, word in zip(found, words, strict=True)] == words
    assert lapses(LedgerProfile(SELF, WITNESSES, 2), heads, first_step=3, size=9, has_ended=True) == []
    going = lapses(BOTH, heads, first_step=3, size=9, has_ended=False)
    assert going == [text for text in found if not text.startswith("the end")]


@pytest.mark.parametrize(
    "told",
    [
        [],
        {"profile": "self"},
        {"profile": "notarised", "witnesses": [], "quorum": 0},
        {"profile": "attested", "witnesses": [], "quorum": 0},
        {"profile": "attested", "witnesses": [WITNESSES[0].text], "quorum": 2},
        {"profile": "self", "witnesses": [KEY.verifier.text], "quorum": 0},
        {"profile": "self", "witnesses": [], "quorum": "0"},
    ],
)
def test_a_profile_that_no_run_writes_is_refused(told: object) -> None:
    with pytest.raises(LedgerError, match="can't be read"):
        LedgerProfile.of({"witnessing": told})


def test_a_profile_is_read_as_it_was_written() -> None:
    assert LedgerProfile.of({"witnessing": BOTH.facts}) == BOTH
    assert LedgerProfile.of({}) == OPERATOR_ALONE
    assert str(OPERATOR_ALONE) == "self: operator-asserted; nobody else is asked"


def test_times_in_words() -> None:
    assert utc(0) == "1970-01-01T00:00:00Z"
    assert utc(1_792_454_400) == "2026-10-20T00:00:00Z"
    assert utc(1 << 62) == f"{1 << 62} s"
