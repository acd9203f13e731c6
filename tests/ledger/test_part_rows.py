"""Columns of the tables are what a loop over steps, cells and regions gives; each set of regions has one number."""

from __future__ import annotations

import base64
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmati.ledger.columns import ColumnScan, StepBlock
from cosmati.ledger.derived import rows
from cosmati.ledger.derived.rows import SKETCH, STEP, TABLES, PartRows, RegionSets, form_of
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.learning import SKETCH_WIDTH
from cosmati.ledger.reader import read_head
from cosmati.ledger.sealing import OperatorKeys, divided, seal_names, sealed
from cosmati.ledger.writer import details_digest
from cosmati.records.ledger import MicrobatchCell, ResumeEntry, RunEntry, StepEntry

from .ledgers import ORIGIN, digest
from .test_verify import Item, write_signed

KEY = SigningKey.generate(ORIGIN)
ROUTES = [[1.0, 1.0, 1.0], [0.0, 0.5, 2.0], [0.0, 0.0, 0.0]]
REGIONS = ("in", "mid", "out")
CLASSES = ("a", "b", "secret")
OPERATOR = OperatorKeys(bytes(range(32)), ORIGIN)


def texts(numbers: Sequence[float]) -> str:
    return base64.b64encode(np.asarray(numbers, "<f2").tobytes()).decode()


ONE, OTHER = [0.25] * SKETCH_WIDTH, [float(n) for n in range(SKETCH_WIDTH)]


def run(**more: object) -> Item:
    details: dict[str, object] = {
        "classes": list(CLASSES),
        "regions": list(REGIONS),
        "routes": ROUTES,
        "phases": [],
        "seed": 0,
        **more,
    }
    return RunEntry("r", (), details_digest(details)), details


def cell(class_id: int, route: int, num_rows: int = 2, weight: float = 3.0, band: int = 0) -> MicrobatchCell:
    return MicrobatchCell(class_id, band, 0, route, num_rows, weight, digest("rows"))


def step(number: int, *cells: MicrobatchCell, attempt: int = 0, **told: object) -> Item:
    details: dict[str, object] = {"step": number, "gradient_norm": {}, "update_norm": None, "loss": None, **told}
    return StepEntry(number, attempt, digest("p"), details_digest(details), None, tuple(cells)), details


def blocks(folder: Path, items: list[Item]) -> list[StepBlock]:
    write_signed(folder, items, KEY)
    scan = ColumnScan(folder, read_head(folder, KEY.verifier))
    return [one for one in scan.blocks() if isinstance(one, StepBlock)]


def taken(folder: Path, items: list[Item], epoch: int = 3, keys: Any = None) -> tuple[PartRows, dict[str, list[Any]]]:
    """Take all blocks; return the columns of each table as a list of rows."""
    part = PartRows(RegionSets(), ORIGIN, keys)
    for block in blocks(folder, items):
        part.take(block, epoch)
    return part, {name: rows_of(columns) for name, columns in part.columns().items()}


def rows_of(columns: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        dict(zip(columns, row, strict=True)) for row in zip(*(one.tolist() for one in columns.values()), strict=True)
    ]


def only(found: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in found]


def test_a_table_has_the_columns_of_a_step_and_its_own() -> None:
    assert list(form_of("steps")) == ["entry", "step", "attempt", "policy_epoch", "loss"]
    for name, own in TABLES.items():
        assert form_of(name) == {**STEP, **own}
    assert list(SKETCH) == [f"d{number}" for number in range(16)]


def test_sets_are_numbered_as_they_come_and_the_empty_one_is_nought() -> None:
    sets = RegionSets()
    members = np.asarray([[1, 0, 1], [0, 0, 0], [1, 0, 1], [0, 1, 0]], bool)
    found = sets.numbers(7, members)
    assert found.dtype == np.uint32
    assert found[0] == found[2] != found[3]
    assert found[1] == 0
    assert sets.known[0] == (0, [])
    assert [sets.known[number] for number in found.tolist()] == [(7, [0, 2]), (0, []), (7, [0, 2]), (7, [1])]
    assert len(sets.known) == 3
    again = sets.numbers(7, members[::-1])
    assert again.tolist() == found[::-1].tolist()
    other = sets.numbers(8, members[:1])
    assert sets.known[int(other[0])] == (8, [0, 2])
    assert len(sets.known) == 4


def test_sets_go_on_from_those_that_are_known() -> None:
    known = [(0, []), (2, [0]), (2, [0, 1])]
    sets = RegionSets(known)
    assert sets.numbers(2, np.asarray([[1, 1], [1, 0], [0, 1]], bool)).tolist() == [2, 1, 3]
    assert sets.known == [(0, []), (2, [0]), (2, [0, 1]), (2, [1])]
    assert RegionSets([]).known == RegionSets().known == [(0, [])]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_no_sets_and_sets_of_no_region_are_nought(shape: tuple[int, int]) -> None:
    sets = RegionSets()
    found = sets.numbers(1, np.zeros(shape, bool))
    assert (found.tolist(), found.dtype) == ([0] * shape[0], np.uint32)
    assert sets.known == [(0, [])]


@pytest.mark.parametrize("num_regions", [1, 7, 8, 9, 16, 17, 40])
def test_sets_of_many_regions_are_told_apart(num_regions: int) -> None:
    draw = random.Random(num_regions)
    members = np.asarray([[draw.random() < 0.5 for _ in range(num_regions)] for _ in range(30)], bool)
    members[5] = members[6]
    members[7] = False
    sets = RegionSets()
    found = [sets.known[number] for number in sets.numbers(4, members).tolist()]
    assert found == [(4, np.flatnonzero(row).tolist()) if row.any() else (0, []) for row in members]
    assert len(sets.known) == len({tuple(row) for row in members.tolist()})


@pytest.mark.parametrize("seed", range(5))
def test_what_a_cell_opens_is_what_no_earlier_one_of_its_step_and_class_reached(seed: int) -> None:
    draw = np.random.default_rng(seed)
    reached = draw.random((4, 5, 3)) < 0.5
    ids = draw.integers(0, 3, (4, 5)).astype(">u4")
    found = rows._firsts(reached, ids)
    for place in np.ndindex(reached.shape):
        number, own, region = place
        earlier = [c for c in range(own) if ids[number, c] == ids[number, own] and reached[number, c, region]]
        assert found[place] == (bool(reached[place]) and not earlier)


def test_of_no_cells_none_opens_anything() -> None:
    assert rows._firsts(np.zeros((2, 0, 3), bool), np.zeros((2, 0), np.uint32)).shape == (2, 0, 3)


def test_directions_are_sixteen_columns_with_nothing_where_none_was_logged() -> None:
    found = rows._sketches([np.asarray(OTHER, np.float32), None])
    assert list(found) == list(SKETCH)
    for number, column in enumerate(found.values()):
        assert column.dtype == np.float32
        assert column[0] == number
        assert np.isnan(column[1])


def test_steps_and_cells_are_columns_in_the_order_of_the_log(tmp_path: Path) -> None:
    items = [
        run(),
        step(0, cell(0, 1), cell(1, 2), loss=0.5),
        step(1, cell(1, 0, band=4), cell(1, 1, num_rows=0), gradient_norm={"0": [1.0, None, 2.0]}),
        (ResumeEntry(1, 2, 1), None),
        step(1, cell(0, 0, weight=0.0), cell(0, 1, num_rows=5), cell(0, 0), attempt=1, cell_microbatches=[0, 0, 1]),
    ]
    part, found = taken(tmp_path, items)
    same = {"policy_epoch": 3}
    nan = pytest.approx(float("nan"), nan_ok=True)
    assert found["steps"] == [
        {"entry": 1, "step": 0, "attempt": 0, **same, "loss": 0.5},
        {"entry": 2, "step": 1, "attempt": 0, **same, "loss": nan},
        {"entry": 4, "step": 1, "attempt": 1, **same, "loss": nan},
    ]
    told = ("entry", "step", "attempt", "cell", "microbatch", "class_id", "band", "route", "rows", "weight")
    assert only(found["cells"], *told) == [
        (1, 0, 0, 0, 0, 0, 0, 1, 2, 3.0),
        (1, 0, 0, 1, 1, 1, 0, 2, 2, 3.0),
        (2, 1, 0, 0, 0, 1, 4, 0, 2, 3.0),
        (2, 1, 0, 1, 1, 1, 0, 1, 0, 3.0),
        (4, 1, 1, 0, 0, 0, 0, 0, 2, 0.0),
        (4, 1, 1, 1, 0, 0, 0, 1, 5, 3.0),
        (4, 1, 1, 2, 1, 0, 0, 0, 2, 3.0),
    ]
    sets = [regions for _, regions in part._sets.known]
    reaches = [sets[one] for (one,) in only(found["cells"], "reaches")]
    assert reaches == [[1, 2], [], [0, 1, 2], [], [], [1, 2], [0, 1, 2]]
    opens = [sets[one] for (one,) in only(found["cells"], "opens")]
    assert opens == [[1, 2], [], [0, 1, 2], [], [], [1, 2], [0]]
    assert only(found["cells"], "has_own", "has_norms") == [(False, own) for own in (0, 0, 1, 0, 0, 0, 0)]
    assert only(found["norms"], "entry", "step", "cell", "class_id", "region_id", "norm", "counts") == [
        (2, 1, 0, 1, 0, 1.0, True),
        (2, 1, 0, 1, 2, 2.0, True),
    ]
    assert found["learnt"] == found["sealed"] == found["directions"] == found["updates"] == []
    assert part.num_rows == 3 + 7 + 2
    for table, columns in part.columns().items():
        assert {name: column.dtype.type for name, column in columns.items()} == {
            name: np.dtype(form).type for name, form in form_of(table).items()
        }


def test_a_norm_of_a_region_that_was_not_reached_does_not_count(tmp_path: Path) -> None:
    part, found = taken(tmp_path, [run(), step(0, cell(1, 1), cell(0, 2), gradient_norm={"0": [4.0, 5.0, None]})])
    assert only(found["norms"], "cell", "region_id", "norm", "counts") == [(0, 0, 4.0, False), (0, 1, 5.0, True)]
    assert only(found["cells"], "has_norms") == [(True,), (False,)]
    assert part.num_rows == 1 + 2 + 2


def test_where_sub_steps_weigh_otherwise_what_each_region_learnt_is_told(tmp_path: Path) -> None:
    told = [{"regions": [0, 1], "weights": [3.0, 4.0, 3.0]}, {"regions": [1], "weights": [1.0, 0.0, 0.0]}]
    cells = (cell(0, 0), cell(1, 1), cell(2, 0))
    part, found = taken(tmp_path, [run(), step(0, *cells), step(1, *cells, sub_steps=told)])
    # The first learnt 3 and 4, the second 4 by half a weight, and the third what its cell says, where it learnt at all.
    assert only(found["cells"], "step", "cell", "has_own") == [
        (0, 0, False),
        (0, 1, False),
        (0, 2, False),
        (1, 0, True),
        (1, 1, True),
        (1, 2, False),
    ]
    assert only(found["learnt"], "step", "entry", "cell", "class_id", "region_id", "learnt") == [
        (1, 2, 0, 0, 0, 3.0),
        (1, 2, 0, 0, 1, 4.0),
        (1, 2, 1, 1, 1, 2.0),
    ]
    assert part.num_rows == 2 + 6 + 3


def test_directions_entropies_and_updates_have_a_row_for_each_that_was_logged(tmp_path: Path) -> None:
    learning = {
        "direction": {"1": [None, texts(ONE), texts(OTHER)]},
        "entropy": {"0": [0.5, None, 1.5]},
        "update_norm": [1.0, None, 3.0],
        "update_direction": [texts(OTHER), None, None],
        "region_digests": {"before": ["0" * 64] * 3, "after": ["1" * 64] * 3},
    }
    part, found = taken(tmp_path, [run(), step(0, cell(0, 0), cell(1, 0)), step(1, cell(2, 0), cell(1, 0), **learning)])
    told = ("entry", "step", "cell", "class_id", "region_id")
    assert only(found["directions"], *told, "d0", "d15") == [
        (2, 1, 1, 1, 1, 0.25, 0.25),
        (2, 1, 1, 1, 2, 0.0, 15.0),
    ]
    assert only(found["entropies"], *told, "entropy") == [(2, 1, 0, 2, 0, 0.5), (2, 1, 0, 2, 2, 1.5)]
    updates = only(found["updates"], "entry", "step", "region_id", "norm", "d1", "before", "after")
    nan = pytest.approx(float("nan"), nan_ok=True)
    assert updates == [
        (2, 1, 0, 1.0, 1.0, "0" * 64, "1" * 64),
        (2, 1, 1, nan, nan, "0" * 64, "1" * 64),
        (2, 1, 2, 3.0, nan, "0" * 64, "1" * 64),
    ]
    assert part.num_rows == 2 + 4 + 2 + 2 + 3


def sealed_run() -> list[Item]:
    """A run whose class `secret` is sealed: in step 0 with norms, in step 1 with norms of another class."""
    names = seal_names(CLASSES, ["secret"])
    items = [run(sealed={"classes": ["secret"], "block_steps": 1024, "key": "0" * 64})]
    for number, cells in enumerate([(cell(2, 1), cell(0, 1)), (cell(2, 1), cell(0, 1))]):
        norms = {"0": [None, 1.0, 2.0]} if number == 0 else {"1": [None, 3.0, 4.0]}
        details = {"step": number, "gradient_norm": norms, "update_norm": None, "loss": 1.0}
        told = sealed(*divided(details, cells, names), OPERATOR, number)
        items.append((StepEntry(number, 0, digest("p"), details_digest(told), None, cells), told))
    return items


def test_a_sealed_cell_is_told_as_such_where_no_key_opens_it(tmp_path: Path) -> None:
    part, found = taken(tmp_path, sealed_run())
    assert only(found["sealed"], "step", "cell", "class_id", "region_id") == [(0, 0, 2, 1), (0, 0, 2, 2)]
    assert only(found["cells"], "step", "cell", "has_norms") == [
        (0, 0, True),
        (0, 1, False),
        (1, 0, False),
        (1, 1, True),
    ]
    assert only(found["norms"], "step", "norm") == [(1, 3.0), (1, 4.0)]
    assert part.num_rows == 2 + 4 + 2 + 2


def test_a_sealed_cell_of_a_block_without_open_norms_has_some(tmp_path: Path) -> None:
    _, found = taken(tmp_path, sealed_run()[:2])
    assert found["norms"] == []
    assert only(found["cells"], "cell", "has_norms") == [(0, True), (1, False)]


def test_keys_open_a_sealed_cell_of_their_log_alone(tmp_path: Path) -> None:
    part, found = taken(tmp_path, sealed_run(), keys=OPERATOR)
    assert found["sealed"] == []
    assert only(found["norms"], "step", "cell", "norm") == [(0, 0, 1.0), (0, 0, 2.0), (1, 1, 3.0), (1, 1, 4.0)]
    assert part.num_rows == 2 + 4 + 4


def test_of_nothing_each_column_is_there_and_empty() -> None:
    part = PartRows(RegionSets())
    assert part.num_rows == 0
    assert (part._origin, part._keys) == ("", None)
    for table, columns in part.columns().items():
        assert {name: (len(one), one.dtype) for name, one in columns.items()} == {
            name: (0, np.dtype(form)) for name, form in form_of(table).items()
        }
