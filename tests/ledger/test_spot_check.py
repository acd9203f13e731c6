"""Segments follow from the signed head and the auditor's seed, and a result says no more than what was found."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.errors import LedgerError
from cosmati.ledger.note import TreeHead
from cosmati.ledger.replay_result import LEVEL_2, LEVEL_3, LEVEL_REPLAYED, NO_LEVEL, ReplayResult, SegmentResult
from cosmati.ledger.spot_check import choose_segments

HEAD = TreeHead(1234, hashlib.sha256(b"root").digest())


def choose(head: TreeHead = HEAD, seed: str = "auditor", **options: int) -> list[range]:
    return choose_segments(head, seed, **{"num_steps": 1000, "number": 5, "length": 10, **options})


def test_the_choice_is_the_one_that_the_page_says() -> None:
    """By the formula of docs/replay.md, with nothing of ours."""
    begun = b"cosmati spot check 1\0" + (1234).to_bytes(8, "big") + HEAD.root + hashlib.sha256(b"auditor").digest()
    draws = [hashlib.sha256(begun + i.to_bytes(8, "big")).digest() for i in range(5)]
    assert [one.start for one in choose()] == sorted(int.from_bytes(draw, "big") % 991 for draw in draws)


def test_another_head_or_seed_chooses_others() -> None:
    others = [
        choose(seed="auditor2"),
        choose(TreeHead(1235, HEAD.root)),
        choose(TreeHead(1234, bytes(32))),
        choose(number=6),
    ]
    assert all(one != choose() for one in others)
    assert choose() == choose()
    assert {*choose()} <= {*choose(number=6)}  # more segments, and the same ones among them


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 12), st.text(min_size=1))
def test_segments_lie_in_the_run_and_are_distinct(num_steps: int, number: int, length: int, seed: str) -> None:
    if length > num_steps:
        with pytest.raises(LedgerError):
            choose(seed=seed, num_steps=num_steps, number=number, length=length)
        return
    found = choose(seed=seed, num_steps=num_steps, number=number, length=length)
    assert len({one.start for one in found}) == len(found) == min(number, num_steps - length + 1)
    assert all(len(one) == length and one.start >= 0 and one.stop <= num_steps for one in found)


def test_every_place_is_as_likely() -> None:
    counts = Counter(choose(seed=str(i), num_steps=10, number=1, length=3)[0].start for i in range(4000))
    assert set(counts) == set(range(8))
    assert sum((n - 500) ** 2 / 500 for n in counts.values()) < 24.3  # chi-squared, 7 degrees, 0.001


@pytest.mark.parametrize("options", [{"number": 0}, {"length": 0}, {"num_steps": 0}])
def test_what_cannot_be_chosen_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(LedgerError, match="can't be chosen"):
        choose(**options)
    with pytest.raises(LedgerError, match="can't be chosen"):
        choose(seed="")


def result(**changes: Any) -> ReplayResult:
    own = {"first": 0, "end": 10, "start": 0, "from_entry_0": True, "outcome": "equal", "num_differences": 0}
    segment = SegmentResult(**own | {name: changes.pop(name) for name in own if name in changes})  # type: ignore[arg-type]
    made: dict[str, Any] = {
        "origin": "o",
        "vkey": "k",
        "size": 12,
        "root": "00",
        "num_steps": 10,
        "has_ended": True,
        "is_witnessed": False,
        "seed": "s",
        "segments": (segment,),
        "compares_rows": True,
    }
    return ReplayResult(**made | changes)


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({}, LEVEL_3),
        ({"has_ended": False}, LEVEL_REPLAYED),
        ({"has_ended": False, "is_witnessed": True}, LEVEL_2),
        ({"is_witnessed": True, "first": 1}, LEVEL_2),
        ({"is_witnessed": True, "first": 1, "seed": ""}, LEVEL_REPLAYED),
        ({"from_entry_0": False}, LEVEL_REPLAYED),
        ({"outcome": "equal, rows not compared"}, NO_LEVEL),
        ({"outcome": "different"}, NO_LEVEL),
        ({"outcome": "interrupted", "is_witnessed": True}, NO_LEVEL),
        ({"segments": ()}, NO_LEVEL),
    ],
)
def test_a_level_is_never_more_than_what_was_found(changes: dict[str, Any], level: str) -> None:
    made = result(**changes)
    assert made.level == level
    assert ReplayResult.from_bytes(made.to_bytes()) == made
    assert json.loads(made.to_bytes())["evidence_level"] == level


def test_a_result_that_was_changed_is_refused() -> None:
    data = result(outcome="different").to_bytes()
    assert ReplayResult.from_bytes(data).segments[0].outcome == "different"
    told = json.loads(data)
    for name, value in {"evidence_level": LEVEL_3, "kind": "x", "version": 2, "more": 1, "segments": [{}]}.items():
        with pytest.raises(LedgerError):
            ReplayResult.from_bytes(json.dumps(told | {name: value}).encode())
    for broken in (b"", b"{}", b"[]", data + b" ", data[:-1]):
        with pytest.raises(LedgerError):
            ReplayResult.from_bytes(broken)
    assert dataclasses.is_dataclass(ReplayResult)
