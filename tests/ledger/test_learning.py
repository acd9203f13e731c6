"""Directions, entropies, updates and digests in derived tables and answers, against loops over what was written."""

from __future__ import annotations

import json
import random
from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.derived.folder import FORMAT, INDEX_FILE, place_of
from cosmati.ledger.derived.learning import learning, region_moves
from cosmati.ledger.derived.opened import open_derived, open_proven
from cosmati.ledger.derived.views import run_sql
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.learning import decode_direction
from cosmati.ledger.writer import details_digest
from cosmati.records.ledger import ResumeEntry
from tests.cli.test_ledger_commands import unanswered, yes

from .ledgers import CLASSES, ORIGIN, REGIONS, run_entry, step_entry
from .test_amend import FIRST, RESUME, SECOND
from .test_verify import Item, write_signed

pytest.importorskip("duckdb", reason="the extra `queries` isn't installed")
KEY = SigningKey.generate(ORIGIN)
NUM, RESUMED = 9, 6


def text_of(values: np.ndarray[Any, Any]) -> str:
    return b64encode(values.astype("<f2").tobytes()).decode()


def told_of(step: int, draw: random.Random) -> dict[str, Any]:
    """Return what a step says of learning, at random and not of everything."""
    vectors = np.random.default_rng(draw.randrange(1 << 30))

    def sketch() -> str | None:
        return None if draw.random() < 0.2 else text_of(vectors.normal(size=16) / 4)

    told: dict[str, Any] = {}
    if step % 2 == 0:
        told["direction"] = {str(m): [sketch() for _ in REGIONS] for m in range(4)}
    if step % 3 != 1:
        told["entropy"] = {str(m): [draw.choice([None, draw.random()]) for _ in REGIONS] for m in range(4)}
    told["update_norm"] = [draw.choice([None, draw.random()]) for _ in REGIONS] if step % 4 else None
    if step % 4 == 2:
        told["update_direction"] = [sketch() for _ in REGIONS]
    if step != 3:
        told["region_digests"] = {
            "before": [f"{step:02x}{r:02x}" * 16 for r in range(len(REGIONS))],
            "after": [f"{step + (1 if (step, r) != (4, 1) else 9):02x}{r:02x}" * 16 for r in range(len(REGIONS))],
        }
    return told


def written() -> tuple[list[Item], list[tuple[dict[str, Any], Any]]]:
    """Return a ledger in which some steps were superseded, and the details and cells of those that stand."""
    draw, items, standing = random.Random(3), [run_entry()], dict[int, Any]()
    for attempt, steps in ((0, range(8)), (1, range(RESUMED, NUM))):
        if attempt:
            items.append((ResumeEntry(RESUMED, RESUMED + 1, 1), None))
        for step in steps:
            entry, details = step_entry(step, attempt)
            details |= told_of(step, draw)
            items.append((replace(entry, details_digest=details_digest(details)), details))
            standing[step] = details, entry.microbatches
    return items, list(standing.values())


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learning") / "run" / "ledger"
    write_signed(folder, written()[0], KEY)
    return folder


def columns(name: str) -> Iterator[tuple[int, int, str, str, Any]]:
    """Yield what stands of a column: step, cell, class, region, value."""
    for details, cells in written()[1]:
        for cell, row in details.get(name, {}).items():
            for region, value in zip(REGIONS, row, strict=True):
                if value is not None:
                    yield details["step"], int(cell), CLASSES[cells[int(cell)].class_id], region, value


def asked(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with open_derived(path) as derived:
        return list(run_sql(derived, sql)[1])


def test_the_views_have_what_the_entries_say(path: Path) -> None:
    found = asked(path, "SELECT step, cell, class, region, entropy FROM entropies WHERE stands ORDER BY ALL")
    assert found == sorted(columns("entropy"))
    rows = asked(path, "SELECT step, cell, class, region, direction FROM directions WHERE stands ORDER BY 1, 2, 3, 4")
    wanted = [(*one, decode_direction(text).tolist()) for *one, text in sorted(columns("direction"))]
    assert rows == [tuple(one) for one in wanted]
    updates = asked(path, "SELECT step, region, norm, direction, before, after FROM updates WHERE stands ORDER BY 1, 2")
    expected = []
    for details, _ in written()[1]:
        for r, region in enumerate(REGIONS):
            norm = (details["update_norm"] or [None] * 9)[r]
            text = details.get("update_direction", [None] * 9)[r]
            both = details.get("region_digests")
            own = norm, None if text is None else decode_direction(text).tolist(), *_digests(both, r)
            if any(value is not None for value in own):
                expected.append((details["step"], region, *own))
    assert updates == sorted(expected, key=lambda row: row[:2])
    superseded = asked(path, "SELECT DISTINCT step FROM entropies WHERE NOT stands ORDER BY ALL")
    assert superseded == [(step,) for step in (6, 7) if step % 3 != 1]


def _digests(both: dict[str, list[str]] | None, region: int) -> tuple[str | None, str | None]:
    return (None, None) if both is None else (both["before"][region], both["after"][region])


def test_answers_are_those_of_loops(path: Path) -> None:
    with open_derived(path) as derived:
        found, moves = learning(derived), region_moves(derived)
    entropies: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for step, _, name, region, value in columns("entropy"):
        entropies[name, region][step].append(value)
    cosines: dict[tuple[str, str], list[float | None]] = defaultdict(list)
    steps = {details["step"]: details for details, _ in written()[1]}
    for step, _, name, region, text in columns("direction"):
        update = steps[step].get("update_direction", [None] * 9)[REGIONS.index(region)]
        if update is None:
            cosines[name, region].append(None)
            continue
        a, b = (decode_direction(one).astype(np.float64) for one in (text, update))
        cosines[name, region].append(-float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)))
    assert {(one.class_name, one.region) for one in found} == {*entropies, *cosines}
    for one in found:
        by_step, along = entropies[one.class_name, one.region], cosines[one.class_name, one.region]
        known = [value for value in along if value is not None]
        assert one.num_directions == len(along)
        assert one.along_update == (pytest.approx(np.mean(known), abs=1e-5) if known else None)
        assert one.num_entropies == sum(map(len, by_step.values()))
        first, last = ([np.mean(by_step[f(by_step)])] if by_step else [None] for f in (min, max))
        assert [one.first_entropy] == pytest.approx(first)
        assert [one.last_entropy] == pytest.approx(last)
    assert [one.region for one in moves] == list(REGIONS)
    for r, move in enumerate(moves):
        norms = [d["update_norm"][r] for d in steps.values() if d["update_norm"] and d["update_norm"][r] is not None]
        assert (move.num_updates, move.num_digests) == (len(norms), NUM - 1)
        assert move.mean_update == pytest.approx(np.mean(norms))
        # Of step 3 nothing is known: that breaks nothing. What step 4 left in the second region isn't what 5 found.
        assert move.broken_after == ((4,) if r == 1 else ())


@pytest.mark.long
def test_it_is_asked_as_a_command(path: Path) -> None:
    name, region = CLASSES[1], REGIONS[1]
    lines = yes("query", path.parent, "--learning").splitlines()
    assert sum(line.startswith(name) for line in lines) == len(REGIONS)
    assert any(line.startswith(f"region {region}") and "CHANGED BETWEEN STEPS, after 4" in line for line in lines)
    assert lines[-2].startswith("Cosines are means over sketches")
    own = yes("query", path.parent, "--learning", "--class", name, "--region", region, "--format", "json").splitlines()
    with open_derived(path) as derived:
        (wanted,) = (one for one in learning(derived) if (one.class_name, one.region) == (name, region))
    (told,) = [json.loads(line) for line in own if line.startswith("{")]
    assert (told["num_directions"], told["last_entropy"]) == (wanted.num_directions, wanted.last_entropy)
    assert "CHANGED BETWEEN STEPS" not in yes("query", path.parent, "--learning", "--region", REGIONS[0])
    assert "no class 'unknown'" in unanswered("query", path.parent, "--learning", "--class", "unknown")
    assert "Leave out --checkpoint" in unanswered("query", path.parent, "--learning", "--steps")


def test_a_ledger_without_any_of_it_says_so(tmp_path: Path) -> None:
    write_signed(tmp_path / "run" / "ledger", [run_entry(), step_entry(0)], KEY)
    assert "Nothing was measured beside norms" in yes("query", tmp_path / "run", "--learning")


@pytest.mark.parametrize(
    "wrong",
    [
        {"direction": {"4": [None] * len(REGIONS)}},
        {"direction": {"0": []}},
        {"direction": {"0": ["AAAA"] * len(REGIONS)}},
        {"direction": {"0": ["not base64!"] * len(REGIONS)}},
        {"direction": {"0": [text_of(np.full(16, np.nan))] * len(REGIONS)}},
        {"entropy": {"0": [-1.0] * len(REGIONS)}},
        {"entropy": {"0": ["1"] * len(REGIONS)}},
        {"update_norm": [-1.0] * len(REGIONS)},
        {"update_norm": [1.0]},
        {"update_direction": ["AAAA"] * len(REGIONS)},
        {"region_digests": {"before": ["ab" * 32] * len(REGIONS), "after": ["zz" * 32] * len(REGIONS)}},
        {"region_digests": {"before": ["ab" * 32] * len(REGIONS), "after": ["ab"] * len(REGIONS)}},
        {"region_digests": {"before": ["ab" * 32] * len(REGIONS)}},
    ],
)
def test_what_breaks_the_contract_is_refused_by_its_entry(tmp_path: Path, wrong: dict[str, Any]) -> None:
    items = [run_entry(), step_entry(0), step_entry(1)]
    entry, details = step_entry(2)
    details |= wrong
    items.append((replace(entry, details_digest=details_digest(details)), details))
    write_signed(tmp_path / "ledger", items, KEY)
    with (
        pytest.raises(TamperError, match="Entry 3 breaks the ledger's contract: what its details say of directions"),
        open_derived(tmp_path / "ledger"),
    ):
        pass


@pytest.mark.long
def test_tables_of_an_earlier_form_are_made_anew(path: Path, tmp_path: Path) -> None:
    write_signed(tmp_path / "ledger", written()[0], KEY)
    with open_derived(tmp_path / "ledger") as derived:
        fresh = [learning(derived), region_moves(derived)]
    index = place_of(tmp_path / "ledger") / INDEX_FILE
    told = json.loads(index.read_bytes())
    for part in told["parts"]:  # as an earlier release left them
        part["files"] = {name: one for name, one in part["files"].items() if name in ("steps", "cells", "norms")}
    index.write_text(json.dumps({**told, "format": "cosmati-derived/1"}))
    with open_proven(tmp_path / "ledger") as (derived, was_other):
        assert not was_other
    index.write_text(json.dumps({**told, "format": "cosmati-derived/1"}))
    with open_derived(tmp_path / "ledger") as derived:
        assert [learning(derived), region_moves(derived)] == fresh
    assert json.loads(index.read_bytes())["format"] == FORMAT
    index.write_text(json.dumps({**told, "format": "cosmati-derived/9"}))
    with pytest.raises(TamperError, match="cosmati-derived/9"), open_derived(tmp_path / "ledger"):
        pass


ONE_BAD = np.where(np.arange(16) == 3, np.nan, 1.0)


@pytest.mark.parametrize(
    "bad", ["", "AAAA", "a" * 44, *map(text_of, (np.full(16, np.inf), np.zeros(17), np.zeros(15), ONE_BAD))]
)
def test_a_direction_is_sixteen_finite_numbers(bad: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (base64's own, or ours)
        decode_direction(bad)
    good: Callable[[str], Any] = decode_direction
    assert good(text_of(np.arange(16.0))).tolist() == list(range(16))


def test_an_unknown_region_is_refused_by_name(path: Path) -> None:
    assert "no region 'nowhere'" in unanswered("query", path.parent, "--learning", "--region", "nowhere")
    with pytest.raises(LedgerError, match=r"docs/queries\.md"):
        asked(path, "SELECT nothing FROM updates")


def test_a_region_that_an_amendment_has_cut_otherwise_breaks_nothing(tmp_path: Path) -> None:
    """Its digest is of other parameters then, under the same name."""

    def with_digests(item: Item, before: int, after: int) -> Item:
        entry, details = item
        both = {"before": [f"{before:02x}" * 32] * 2, "after": [f"{after:02x}" * 32] * 2}
        told = {**(details or {}), "region_digests": both}
        return replace(entry, details_digest=details_digest(told)), told  # type: ignore[arg-type]

    before = [FIRST.run(), *(with_digests(FIRST.step(step), step, step + 1) for step in range(4))]
    after = [with_digests(SECOND.step(step, 1), 2 * step, 2 * step + 1) for step in range(3, 6)]
    write_signed(tmp_path / "ledger", [*before, RESUME, SECOND.amend(3), *after], KEY)
    with open_derived(tmp_path / "ledger") as derived:
        broken = {one.region: one.broken_after for one in region_moves(derived)}
    assert broken == {"low": (3, 4), "high": (), "top": (3, 4)}  # and not after step 2
