"""Planned bytes against those that two real ranks send, and against the figures of the design."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.errors import PlanError
from cosmati.ledger.entry import encode_entry
from cosmati.planning.measuring import MeasuredParts
from cosmati.planning.scaling import entry_bytes, scale_table
from cosmati.planning.traffic import strided_bytes, traffic_of, tree_levels
from cosmati.records.ledger import MicrobatchCell, StepEntry
from tests.planning.made import made
from tests.processes import launch_ranks

WORLD = 2


def test_two_ranks_send_what_was_planned() -> None:
    """By the assignment that the layout has: strided ones reduce each microbatch, consecutive ones once a step."""
    said = [json.loads(text) for text in launch_ranks([Path(__file__).with_name("counted_bytes.py")], WORLD)]
    size = 4 * (32 * 256 + 256 + 256 * 256 + 256 + 256 + 1)
    is_strided = said[0]["mine"][:2] != [0, 1]
    parts = made(gradients=size, learning=size)
    planned = strided_bytes(size, 8, WORLD) if is_strided else traffic_of(parts, WORLD, "replicated").total
    for rank in said:
        # Tensors begin at aligned addresses: at most 64 bytes of filling each, in each exchange.
        assert planned <= rank["sent"] <= planned + 5 * 6 * 64


@given(power=st.integers(0, 10), gap=st.integers(0, 6), p=st.integers(1, 10**9))
def test_bytes_are_the_designs(power: int, gap: int, p: int) -> None:
    w, v = 2**power, 2 ** (power + gap)
    parts = made(gradients=4 * p, learning=2 * p, parameters=2 * p, num_microbatches=v)
    share = (w - 1) / w
    near = pytest.approx
    assert traffic_of(parts, w, "replicated").total == near(2 * 4 * p * share, abs=2)
    assert traffic_of(parts, w, "optimizer").total == near((4 + 2) * p * share, abs=2)
    full = traffic_of(parts, w, "full")
    assert full.gradients == near(v / w * 4 * p * share, abs=v / w)
    assert full.gathers == near(2 * v / w * 2 * p * share, abs=2 * v / w)
    assert strided_bytes(4 * p, v, w) == near((v / w + 1) * 4 * p * share, abs=v / w + 1)
    assert traffic_of(parts, 1, "full").total == 0
    within, across = tree_levels(v, w)
    assert (2**within, 2**across) == (v // w, w)


@given(copies=st.integers(0, 4), power=st.integers(1, 4), gap=st.integers(0, 4), p=st.integers(1, 10**9))
def test_copies_exchange_their_sums_once_a_step(copies: int, power: int, gap: int, p: int) -> None:
    r, s = 2**copies, 2**power
    v = r * s * 2**gap
    parts = made(gradients=4 * p, parameters=2 * p, num_microbatches=v)
    cut = traffic_of(parts, r * s, "full", s)
    within, across = 2**gap * 4 * p * (s - 1) / s, 4 * p / s * (r - 1) / r
    near = pytest.approx
    assert cut.gathers == near(2 * 2**gap * 2 * p * (s - 1) / s, abs=2 * 2**gap)
    assert cut.results == near(across, abs=2)
    assert cut.gradients == near(within + across, abs=2 + 2**gap)
    assert traffic_of(parts, s, "full", 2 * s) == traffic_of(parts, s, "full")
    rounded = dataclasses.replace(parts, gathered=p)
    assert traffic_of(rounded, r * s, "full", s).gathers == near(cut.gathers / 2, abs=2 * 2**gap)


def test_a_second_pass_sends_everything_twice() -> None:
    once, twice = made(gradients=400), made(gradients=400, again=800)
    for sharding in ("replicated", "full"):
        assert traffic_of(twice, 4, sharding).total == 2 * traffic_of(once, 4, sharding).total  # type: ignore[arg-type]
    assert traffic_of(twice, 4, "full", 2).total == 2 * traffic_of(once, 4, "full", 2).total


@pytest.mark.parametrize("v", [1, 8, 1024])
def test_the_ledgers_rate_is_that_of_its_entries(v: int) -> None:
    cells = tuple(MicrobatchCell(i, 0, 1, 2, 3, 4.0, bytes([i % 256]) * 32) for i in range(v))
    entry = StepEntry(7, 1, b"p" * 32, b"d" * 32, None, cells)
    assert entry_bytes(v) == len(encode_entry(entry))
    row = scale_table([(1, v)], 1000, 2.0)[0]
    assert row.ledger_bytes_a_day == len(encode_entry(entry)) * 43_200


def test_a_log_holds_no_entry_of_two_thousand_microbatches() -> None:
    assert entry_bytes(2048) is None
    assert scale_table([(8, 2048)], 1000, 2.0)[0].ledger_bytes_a_day is None


def test_a_table_has_the_bytes_of_float32_gradients() -> None:
    row = scale_table([(4, 8)], 1000, 1.0)[0]
    assert (row.levels_within, row.levels_across) == (1, 2)
    assert (row.sent, row.sent_strided) == (2 * 3000, 3 * 3000)


def test_a_step_of_no_time_has_no_rate() -> None:
    with pytest.raises(PlanError, match="seconds_per_step=0 can't be"):
        scale_table([(4, 8)], 1000, 0.0)


def test_what_is_made_for_tests_is_whole() -> None:
    assert isinstance(made(), MeasuredParts)
