"""Blocks are runs of like steps with their places, lines and cells; a cell that doesn't fit the tables is refused."""

from __future__ import annotations

import itertools
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cosmati.errors import TamperError
from cosmati.ledger import columns
from cosmati.ledger.columns import ColumnScan, StepBlock
from cosmati.ledger.details import encode_details
from cosmati.ledger.entry import encode_entry
from cosmati.ledger.note import TreeHead
from cosmati.ledger.reader import Scan
from cosmati.ledger.writer import details_digest
from cosmati.records.ledger import NO_DETAILS, EndEntry, MicrobatchCell, ResumeEntry, RunEntry, StepEntry

from .ledgers import digest
from .test_amend import FIRST, SECOND, amended
from .test_columns import write
from .test_verify import Item

Encoded = list[tuple[bytes, bytes | None]]


def encoded(items: list[Item]) -> Encoded:
    return [(encode_entry(entry), None if told is None else encode_details(told)) for entry, told in items]


def scanned(folder: Path, items: Encoded) -> tuple[ColumnScan, list[Any]]:
    scan = ColumnScan(folder, write(folder, items))
    return scan, list(scan.blocks())


def steps(*numbers: int, attempt: int = 0) -> list[Item]:
    return [FIRST.step(number, attempt) for number in numbers]


def bare(item: Item) -> Item:
    """The same step without details."""
    entry, _ = item
    assert isinstance(entry, StepEntry)
    return replace(entry, details_digest=NO_DETAILS), None


def test_like_steps_stand_in_one_block_and_other_entries_by_themselves(tmp_path: Path) -> None:
    rooted = steps(2)[0]
    assert isinstance(rooted[0], StepEntry)
    rooted = replace(rooted[0], parameter_root=digest("root")), rooted[1]
    items = [FIRST.run(), *steps(0, 1), rooted, bare(steps(3)[0]), (EndEntry(4, "completed", digest("end")), None)]
    told = encoded(items)
    scan, found = scanned(tmp_path, told)
    run, first, second, third, end = found
    assert (run.index, run.entry, run.details) == (0, items[0][0], told[0][1])
    assert (end.index, end.entry, end.details) == (5, items[5][0], None)
    assert [(one.first, one.step, len(one.data), one.attempt) for one in (first, second, third)] == [
        (1, 0, 2, 0),
        (3, 2, 1, 0),
        (4, 3, 1, 0),
    ]
    assert list(first.lines) == [told[1][1], told[2][1]]
    assert list(third.lines) == [None]
    for block in (first, second, third):
        assert block.policy == FIRST.digest
        assert block.tables.classes == ("a", "b", "c")
        for number, data in enumerate(block.data):
            index = block.first + number
            item, entry = block.item(number)
            assert (item.index, item.data, item.entry, item.details) == (index, data, entry, told[index][1])
            assert (data, entry) == (told[index][0], items[index][0])
            cells = [(c["class_id"], c["phase"], c["route"], c["rows"], c["weight"]) for c in block.cells[number]]
            own = [(c.class_id, c.phase, c.route_id, c.num_rows, c.weight) for c in entry.microbatches]
            assert cells == own
            assert [c["commitment"].tobytes() for c in block.cells[number]] == [digest("rows")] * 3
    assert scan.details_size == (tmp_path / "details.jsonl").stat().st_size


def test_tables_change_with_an_amendment(tmp_path: Path) -> None:
    _, found = scanned(tmp_path, encoded(amended()))
    first, second = (one for one in found if isinstance(one, StepBlock))
    assert (first.tables.regions, second.tables.regions) == (("low", "high"), ("top", "low"))
    assert (second.first, second.step, second.attempt, second.policy) == (7, 3, 1, SECOND.digest)


def many(num: int) -> Encoded:
    return encoded([FIRST.run(), *steps(*range(num))])


@pytest.mark.parametrize("cut", [256, 512])
def test_a_scan_goes_on_from_where_another_one_stood(tmp_path: Path, cut: int) -> None:
    items = many(390) if cut == 256 else many(399)
    items += encoded([(ResumeEntry(380, 381, 1), None), *steps(*range(380, 399), attempt=1)])
    items += encoded(steps(*range(399, 400), attempt=1)) + encoded([(ResumeEntry(300, 301, 2), None)])
    items += encoded(steps(*range(300, 400), attempt=2))
    head = write(tmp_path, items)
    before = ColumnScan(tmp_path, head)
    for one in before.blocks():
        last = one.first + len(one.data) if isinstance(one, StepBlock) else one.index + 1
        if last == cut:
            break
    size = sum(len(line) + 1 for _, line in items[:cut] if line is not None)
    assert before.details_size == size
    again = ColumnScan(
        tmp_path, head, start=cut, history=before.history, tables=before.tables, details_size=before.details_size
    )
    assert again.frontier.size == cut
    found = list(again.blocks())
    assert isinstance(found[0], StepBlock)
    assert found[0].first == cut
    assert found[0].lines[0] == items[cut][1]
    assert again.details_size == (tmp_path / "details.jsonl").stat().st_size


def test_a_scan_begins_at_whole_bundles_and_with_nothing(tmp_path: Path) -> None:
    head = TreeHead(1, bytes(32))
    with pytest.raises(AssertionError, match="bundles are read whole"):
        ColumnScan(tmp_path, head, start=255)
    scan = ColumnScan(tmp_path, head)
    assert (scan.tables, scan.details_size, scan.frontier.size, scan.history.size) == (None, 0, 0, 0)


def refused(folder: Path, items: Encoded) -> str:
    """Return the words with which both readings refuse, entry by entry and in blocks."""
    head = write(folder, items)
    with pytest.raises(TamperError) as caught:
        list(ColumnScan(folder, head).blocks())
    return str(caught.value)


def other(data: bytes, place: int, value: bytes) -> bytes:
    return data[:place] + value + data[place + len(value) :]


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (2, struct.pack(">Q", 2), "it is step 2 of attempt 0, where step 1 of attempt 0 must follow"),
        (10, struct.pack(">I", 1), "it is step 1 of attempt 1, where step 1 of attempt 0 must follow"),
        (14, digest("other"), "went by the policy"),
        (78, b"\2", "Entry 2 in"),
        (79, struct.pack(">H", 2), "Entry 2 in"),
        (97, struct.pack(">d", -1.0), "Entry 2 in"),
        (97, struct.pack(">d", float("nan")), "Entry 2 in"),
        (97, struct.pack(">d", float("inf")), "Entry 2 in"),
    ],
)
def test_a_step_that_may_not_stand_is_refused_as_one_by_one(
    tmp_path: Path, place: int, value: bytes, said: str
) -> None:
    items = many(3)
    items[2] = other(items[2][0], place, value), items[2][1]
    told = refused(tmp_path, items)
    assert said in told
    with pytest.raises(TamperError) as caught:
        list(Scan(tmp_path, write(tmp_path, items)))
    assert str(caught.value) == told


def test_a_weight_of_nought_may_stand(tmp_path: Path) -> None:
    items = many(2)
    items[1] = other(items[1][0], 97, struct.pack(">d", 0.0)), items[1][1]
    (block,) = (one for one in scanned(tmp_path, items)[1] if isinstance(one, StepBlock))
    assert block.cells["weight"][0, 0] == 0.0


def test_a_step_without_cells_may_stand(tmp_path: Path) -> None:
    entry, details = steps(0)[0]
    assert isinstance(entry, StepEntry)
    items = encoded([FIRST.run(), (replace(entry, microbatches=()), details)])
    (block,) = (one for one in scanned(tmp_path, items)[1] if isinstance(one, StepBlock))
    assert block.cells.shape == (1, 0)


def test_a_step_after_the_end_and_one_before_the_run_are_refused(tmp_path: Path) -> None:
    end: Item = (EndEntry(1, "completed", digest("end")), None)
    ended = encoded([FIRST.run(), *steps(0), end, *steps(1)])
    assert "after its end a run can only resume" in refused(tmp_path / "a", ended)
    assert "a run entry is entry 0" in refused(tmp_path / "b", encoded(steps(0)))


@pytest.mark.parametrize("act", ["other", "missing", "cut"])
def test_details_are_those_that_a_step_commits_to(tmp_path: Path, act: str) -> None:
    head = write(tmp_path, many(3))
    path = tmp_path / "details.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    if act == "other":
        lines[2] = lines[2].replace(b'"loss":null', b'"loss":1.25')
    elif act == "missing":
        lines = [*lines[:2], *lines[3:]]
    else:
        lines[3] = lines[3][:-1]
    path.write_bytes(b"".join(lines))
    with pytest.raises(TamperError) as by_column:
        list(ColumnScan(tmp_path, head).blocks())
    with pytest.raises(TamperError) as by_entry:
        list(Scan(tmp_path, head))
    assert str(by_column.value) == str(by_entry.value)
    assert f"entry {3 if act == 'cut' else 2}" in str(by_column.value)


def test_what_steps_of_a_block_have_in_common() -> None:
    data = encode_entry(steps(0)[0][0])
    assert columns._key(data) == (len(data), FIRST.digest, 0)
    assert columns._key(other(data, 78, b"\1")) == (len(data), FIRST.digest, 1)
    assert columns._key(other(data, 10, b"\7")) == columns._key(data)
    assert columns._key(encode_entry(FIRST.run()[0])) is None
    assert columns._key(other(data, 0, b"\xff")) is None
    assert columns._key(data[:81]) == (81, FIRST.digest, 0)
    assert columns._key(data[:80]) is None
    assert columns._key(b"") is None


ROUTES = ((0.0, 0.0), (0.0, 1.0), (1.0, 1.0))


def tables(**changed: Any) -> Any:
    """Tables of two classes, of each two bands, in two phases."""
    policy = (
        ((ROUTES[2], "admit"), (ROUTES[1], "gate")),
        ((ROUTES[1], "admit"), (ROUTES[0], "reject")),
        ((ROUTES[0], "defer"), (ROUTES[1], "admit")),
        ((ROUTES[0], "admit"), (ROUTES[2], "admit")),
    )
    given = {
        "classes": ("a", "b"),
        "routes": ROUTES,
        "bands": ("low", "high"),
        "phases": ((0, 4), (4, 9)),
        "policy": policy,
        "withdrawn": (),
        "index": 0,
        "regions": ("in", "out"),
    }
    return SimpleNamespace(**given | changed)


def fits(told: Any, class_id: int, band: int, phase: int, route: int, *, has_rows: bool) -> bool:
    """By the policy as it's written."""
    bands = len(told.bands)
    if told.bands == ("",):
        band = 0
    if band >= bands:
        return False
    weights, decision = told.policy[class_id * bands + band][phase]
    return bool(told.routes[route] == weights and not (has_rows and decision in ("defer", "reject")))


@pytest.mark.parametrize("bands", [("low", "high"), ("",)])
def test_a_cell_is_of_the_policy_as_it_is_written(bands: tuple[str, ...]) -> None:
    told = tables(bands=bands, classes=("a", "b") if len(bands) == 2 else ("a", "b", "c", "d"))
    seen = set()
    for class_id, band, phase, route, has_rows in itertools.product(
        range(len(told.classes)), range(4), range(2), range(3), (False, True)
    ):
        key = (((class_id * 3 + route) << 16 | band) << 16 | phase) << 1 | has_rows
        expected = fits(told, class_id, band, phase, route, has_rows=has_rows)
        assert columns._is_of_policy(told, key) == expected
        seen.add(expected)
    assert seen == {True, False}


def block(told: Any, *rows: list[tuple[int, int, int, int, int]], step: int = 0) -> StepBlock:
    """A block of cells (class, band, phase, route, rows)."""
    cells = np.zeros((len(rows), len(rows[0]) if rows else 0), columns._CELL)
    for number, row in enumerate(rows):
        for place, one in enumerate(row):
            cells[number, place] = (*one, 1.0, bytes(32))
    return StepBlock(1, step, 0, bytes(32), told, [b""] * len(rows), [None] * len(rows), cells)


GOOD = (0, 0, 0, 2, 5)


def test_cells_fit_tables_whose_policy_gives_each() -> None:
    assert columns._fit_tables(block(tables(), [GOOD, (1, 1, 0, 0, 3)], [GOOD, (1, 0, 0, 0, 0)]))
    for wrong in ((0, 0, 0, 1, 5), (1, 0, 0, 0, 1), (0, 2, 0, 2, 5), (2, 0, 0, 2, 5), (0, 0, 0, 3, 5), (0, 0, 2, 2, 5)):
        assert not columns._fit_tables(block(tables(), [GOOD, GOOD], [GOOD, wrong]))
        assert not columns._fit_tables(block(tables(), [wrong]))


@pytest.mark.parametrize(
    ("step", "phase", "is_so"), [(0, 0, True), (2, 0, True), (3, 0, False), (3, 1, False), (4, 1, True), (7, 1, True)]
)
def test_cells_fit_where_their_phase_goes_on_for_each_of_two_steps(step: int, phase: int, is_so: bool) -> None:
    cell = (0, 0, phase, 2 if phase == 0 else 1, 1)
    assert columns._fit_tables(block(tables(), [cell], [cell], step=step)) == is_so


def test_two_steps_end_with_their_phase() -> None:
    cell = (0, 0, 1, 1, 1)
    assert not columns._fit_tables(block(tables(), [cell], [cell], step=8))
    assert columns._fit_tables(block(tables(), [cell], step=8))


def test_without_a_policy_only_classes_and_routes_have_to_be_there() -> None:
    told = tables(policy=(), phases=())
    assert columns._fit_tables(block(told, [(1, 9, 9, 2, 5)]))
    assert not columns._fit_tables(block(told, [(2, 0, 0, 0, 1)]))
    assert not columns._fit_tables(block(told, [(0, 0, 0, 3, 1)]))


def test_steps_without_cells_fit() -> None:
    assert columns._fit_tables(block(tables(phases=()), []))


@pytest.mark.parametrize(
    ("action", "at", "is_so"), [("stop", 6, True), ("stop", 5, False), ("stop", 4, False), ("reject", 0, True)]
)
def test_no_step_stands_where_the_run_should_have_stopped(action: str, at: int, is_so: bool) -> None:
    own = (SimpleNamespace(action="skip", step=0), SimpleNamespace(action=action, step=at))
    cell = (0, 0, 1, 1, 1)
    assert columns._fit_tables(block(tables(withdrawn=own), [cell], [cell], step=4)) == is_so
    assert columns._fit_tables(block(tables(withdrawn=own, phases=()), [], [], step=4)) == is_so


def test_tables_too_large_for_keys_are_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = block(tables(), [GOOD])
    monkeypatch.setattr(columns, "_LARGEST_KEY", 6)
    assert columns._fit_tables(cell)
    monkeypatch.setattr(columns, "_LARGEST_KEY", 5)
    assert not columns._fit_tables(cell)


def test_what_seems_not_to_fit_is_asked_cell_by_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "_LARGEST_KEY", 0)
    _, found = scanned(tmp_path / "a", many(5))
    assert sum(len(one.data) for one in found if isinstance(one, StepBlock)) == 5
    wrong = encoded([FIRST.run(), *steps(0), FIRST.step(1, route_id=0)])
    assert "Entry 2 breaks the ledger's contract" in refused(tmp_path / "b", wrong)


def test_a_class_without_a_name_is_refused_without_a_policy_too(tmp_path: Path) -> None:
    details = {"classes": ["a"], "regions": ["in"], "routes": [[1.0]], "phases": []}

    run: Item = (RunEntry("r", (), details_digest(details)), details)
    cells = (MicrobatchCell(0, 0, 0, 0, 1, 1.0, bytes(32)), MicrobatchCell(1, 0, 0, 0, 1, 1.0, bytes(32)))
    step: Item = (StepEntry(0, 0, bytes(32), NO_DETAILS, None, cells), None)
    assert "class 1 isn't in the tables of entry 0" in refused(tmp_path, encoded([run, step]))
