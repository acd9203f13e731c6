"""What the details of a step say of cells and regions: by hand, one by one, in blocks, and where boxes hold it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cosmati.errors import TamperError
from cosmati.ledger.columns import _CELL, StepBlock
from cosmati.ledger.details import encode_details
from cosmati.ledger.entry import encode_entry
from cosmati.ledger.reader import ScannedEntry
from cosmati.ledger.sealing import (
    BLOCK_STEPS,
    SEALED,
    ColumnKeys,
    OperatorKeys,
    SealedClasses,
    divided,
    seal_names,
    sealed,
)
from cosmati.ledger.step_details import BlockDetails, learnt_weights, open_details, read_details, read_norms
from cosmati.ledger.tables import Tables
from cosmati.records.ledger import NO_DETAILS, MicrobatchCell, RunEntry, StepEntry

ORIGIN = "log.example"
KEYS = OperatorKeys(bytes(32), ORIGIN)
CLASSES, ROUTES = ("open", "shut"), ((1.0, 0.5), (0.0, 0.25))
# Class, route, rows and weight of each cell of each step.
CELLS = (((0, 0, 2, 1.5), (1, 1, 3, 2.0)), ((1, 0, 0, 0.0), (0, 1, 1, 4.0)), ((1, 1, 1, 1.0), (1, 0, 5, 3.0)))
Details = Mapping[str, Any] | bytes | None


def tables(**details: Any) -> Tables:
    entry = RunEntry("r", (), NO_DETAILS)
    return Tables(0, entry, details, CLASSES, ("in", "out"), ROUTES, (), (), ())


def sealing(block_steps: int = BLOCK_STEPS) -> Tables:
    return tables(**{SEALED: {"classes": ["shut"], "block_steps": block_steps}})


def line_of(details: Details) -> bytes | None:
    return details if details is None or isinstance(details, bytes) else encode_details(details)


def step_of(number: int) -> StepEntry:
    cells = tuple(MicrobatchCell(c, 0, 0, r, rows, weight, bytes(32)) for c, r, rows, weight in CELLS[number])
    return StepEntry(10 + number, 0, bytes(32), NO_DETAILS, None, cells)


def item_of(number: int, details: Details) -> ScannedEntry:
    return ScannedEntry(5 + number, b"", step_of(number), line_of(details))


def block_of(details: Sequence[Details], of: Tables | None = None) -> StepBlock:
    cells = np.zeros((len(details), 2), _CELL)
    for step, own in enumerate(CELLS[: len(details)]):
        for cell, values in enumerate(own):
            for name, value in zip(("class_id", "route", "rows", "weight"), values, strict=True):
                cells[name][step, cell] = value
    data = [encode_entry(step_of(number)) for number in range(len(details))]
    return StepBlock(5, 10, 0, bytes(32), of or tables(), data, [line_of(one) for one in details], cells)


def read(*details: Details, of: Tables | None = None, keys: ColumnKeys | None = None) -> BlockDetails:
    return read_details(block_of(details, of), ORIGIN, keys)


def refused(*details: Details) -> str:
    with pytest.raises(TamperError) as caught:
        read(*details)
    return str(caught.value)


def plain(values: Any) -> Any:
    """Return arrays as lists, NaN as None."""
    return None if values is None else np.where(np.isnan(values), np.asarray(None), values).tolist()


# --------------------------------------------------------------------------------------------------------- one by one


def test_norms_are_by_microbatch_and_region() -> None:
    given = {"gradient_norm": {"1": [None, 2.5], "0": [0, 1]}}
    assert read_norms(item_of(0, given), 2, 2) == {1: [None, 2.5], 0: [0, 1]}
    assert read_norms(item_of(0, given), 2, 2, {"gradient_norm": {"0": [3.0, 4.0]}}) == {0: [3.0, 4.0]}
    nothings: list[Details] = [None, {}, {"gradient_norm": None}, {"gradient_norm": [1.0]}, {"gradient_norm": {}}]
    for nothing in nothings:
        assert read_norms(item_of(0, nothing), 2, 2) == {}
    assert read_norms(item_of(0, given), 2, 2, {}) == {}


@pytest.mark.parametrize("name", ["2", "-1", "00", "01", "x", "", "1.0", "²"])
def test_a_norm_is_of_a_microbatch_that_there_is(name: str) -> None:
    with pytest.raises(TamperError) as caught:
        read_norms(item_of(0, {"gradient_norm": {name: [1.0, 2.0]}}), 2, 2)
    assert f"Entry 5 breaks the ledger's contract: gradient_norm {name!r} isn't a microbatch" in str(caught.value)


@pytest.mark.parametrize("row", [[1.0], [1.0, 2.0, 3.0], [], None, 3.0, {"0": 1.0, "1": 2.0}, "ab"])
def test_a_microbatch_has_a_norm_for_each_region(row: object) -> None:
    said = "gradient_norm '1' isn't a microbatch with a value for each region"
    given = {"gradient_norm": {"1": row}}
    with pytest.raises(TamperError, match=said):
        read_norms(item_of(0, given), 2, 2)
    assert said in refused(given)


@pytest.mark.parametrize("value", [-1.0, "1", True, [1.0]])
def test_a_norm_is_a_number_or_nothing(value: object) -> None:
    given = {"gradient_norm": {"0": [1.0, 2.0], "1": [None, value]}}
    said = "gradient_norm '1' has a value that is neither a norm nor null"
    with pytest.raises(TamperError, match=said):
        read_norms(item_of(0, given), 2, 2)
    assert said in refused(given)
    assert f"Entry 7 breaks the ledger's contract: {said}" in refused({}, None, given)


def test_without_sub_steps_each_microbatch_weighed_its_weight_in_each_region() -> None:
    for nothing in (None, {}, {"sub_steps": None}):
        assert learnt_weights(item_of(0, nothing), step_of(0), 2) == [[1.5, 1.5], [2.0, 2.0]]
    assert learnt_weights(item_of(0, {}), step_of(0), 3) == [[1.5] * 3, [2.0] * 3]


def test_what_sub_steps_weighed_is_added_up_by_region() -> None:
    given = {"sub_steps": [{"regions": [1], "weights": [1.0, 0]}, {"regions": [0, 1], "weights": [0.5, 2.0]}]}
    assert learnt_weights(item_of(0, given), step_of(0), 3) == [[0.5, 1.5, None], [2.0, 2.0, None]]
    assert learnt_weights(item_of(0, {"sub_steps": []}), step_of(0), 2) == [[None, None]] * 2
    assert plain(read(given).weights) == [[[0.5, 1.5], [2.0, 2.0]]]
    assert plain(read({"sub_steps": []}).weights) == [[[0.0, 0.0]] * 2]


@pytest.mark.parametrize(
    ("sub_steps", "said"),
    [
        (3, "which regions learnt"),
        ({"regions": [0], "weights": [1.0, 1.0]}, "which regions learnt"),
        ([3], "which regions learnt"),
        ([{"weights": [1.0, 1.0]}], "which regions learnt"),
        ([{"regions": 0, "weights": [1.0, 1.0]}], "which regions learnt"),
        ([{"regions": [2], "weights": [1.0, 1.0]}], "which regions learnt"),
        ([{"regions": [-1], "weights": [1.0, 1.0]}], "which regions learnt"),
        ([{"regions": [True], "weights": [1.0, 1.0]}], "which regions learnt"),
        ([{"regions": ["0"], "weights": [1.0, 1.0]}], "which regions learnt"),
        ([{"regions": [0]}], "what each microbatch weighed"),
        ([{"regions": [0], "weights": 1.0}], "what each microbatch weighed"),
        ([{"regions": [0], "weights": [1.0]}], "what each microbatch weighed"),
        ([{"regions": [0], "weights": [1.0] * 3}], "what each microbatch weighed"),
        ([{"regions": [0], "weights": [1.0, -1.0]}], "what each microbatch weighed"),
        ([{"regions": [0], "weights": [1.0, None]}], "what each microbatch weighed"),
        ([{"regions": [], "weights": [-1.0, 1.0]}], "what each microbatch weighed"),
        ([{"regions": [0], "weights": [1.0, 1.0]}, None], "which regions learnt"),
    ],
)
def test_sub_steps_that_say_nothing_are_refused_in_either_way(sub_steps: object, said: str) -> None:
    with pytest.raises(TamperError, match=f"Entry 5 breaks the ledger's contract: a sub-step doesn't say .*{said}"):
        learnt_weights(item_of(0, {"sub_steps": sub_steps}), step_of(0), 2)
    assert said in refused({"sub_steps": sub_steps})


# ------------------------------------------------------------------------------------------------------- in a block


def test_a_block_says_of_each_step_what_it_says() -> None:
    found = read(
        {"gradient_norm": {"1": [2, None]}, "loss": 0.5, "cell_microbatches": [4, 4]},
        None,
        {"gradient_norm": {"0": [1.0, 0.0], "1": [None, 3.0]}, "sub_steps": [{"regions": [1], "weights": [7, 8]}]},
    )
    assert plain(found.weights) == [[[1.5] * 2, [2.0] * 2], [[0.0] * 2, [4.0] * 2], [[0.0, 7.0], [0.0, 8.0]]]
    assert plain(found.norms) == [
        [[None, None], [2.0, None]],
        [[None, None], [None, None]],
        [[1.0, 0.0], [None, 3.0]],
    ]
    assert found.microbatches.tolist() == [[4, 4], [0, 1], [0, 1]]
    assert plain(found.losses) == [0.5, None, None]
    assert found.sealed.tolist() == [[False] * 2] * 3
    assert not hasattr(found, "__dict__")


def test_a_block_without_norms_has_none() -> None:
    found = read({"loss": -1}, {}, {"gradient_norm": {}})
    assert found.norms is None
    assert plain(found.losses) == [-1.0, None, None]
    assert plain(read({"gradient_norm": {"0": [None, None]}}).norms) == [[[None, None]] * 2]


@pytest.mark.parametrize("owners", [[0], [0, 1, 2], []])
def test_microbatches_that_are_not_one_for_each_cell_are_passed_over(owners: list[int]) -> None:
    assert read({"cell_microbatches": owners}).microbatches.tolist() == [[0, 1]]


def test_a_step_that_looks_unlike_what_runs_write_is_read_by_itself_and_those_beside_it_as_ever() -> None:
    strange = {"loss": "x", "gradient_norm": {"1": [5, 6]}, "sub_steps": [{"regions": [0], "weights": [9, 9]}]}
    for value in (strange, encode_details(strange).replace(b'"1"', b'"\\u0031"')):
        found = read(
            {"loss": 1.0, "gradient_norm": {"0": [1, 2]}}, value, {"gradient_norm": {"1": [3, 4]}, "loss": 2.0}
        )
        assert plain(found.losses) == [1.0, None, 2.0]
        assert plain(found.norms) == [
            [[1.0, 2.0], [None, None]],
            [[None, None], [5.0, 6.0]],
            [[None, None], [3.0, 4.0]],
        ]
        assert plain(found.weights) == [[[1.5] * 2, [2.0] * 2], [[9.0, 0.0]] * 2, [[1.0] * 2, [3.0] * 2]]
    for nonsense in (b"[]", b"{", b"\xff"):
        assert "details line" in refused({}, nonsense)


def test_what_a_cell_without_rows_or_with_a_route_of_nothing_taught_is_nothing() -> None:
    block = block_of([{}, {}, {"sub_steps": [{"regions": [1], "weights": [1.0, 0.0]}]}])
    found = read_details(block)
    assert found.routes(block).tolist() == [
        [[1.0, 0.5], [0.0, 0.25]],
        [[0.0, 0.0], [0.0, 0.25]],
        [[0.0, 0.25], [1.0, 0.5]],
    ]
    assert found.reached(block).tolist() == [
        [[True, True], [False, True]],
        [[False, False], [False, True]],
        [[False, True], [False, False]],
    ]
    tiny = replace(block, tables=replace(block.tables, routes=((5e-324, 0.0), (0.0, 5e-324))))
    assert (replace(found, weights=np.full((3, 2, 2), 5e-324)).reached(tiny) == (found.routes(tiny) > 0)).all()


# -------------------------------------------------------------------------------------------------------- in boxes


def boxed(number: int, details: Mapping[str, Any]) -> dict[str, Any]:
    entry = step_of(number)
    clear, parts = divided(details, entry.microbatches, seal_names(CLASSES, ["shut"]))
    return sealed(clear, parts, KEYS, entry.step)


NORMS = [{"gradient_norm": {"0": [1.0 + n, 2.0], "1": [3.0, None]}, "loss": 9.0} for n in range(3)]


def test_one_step_is_opened_by_its_keys_or_says_which_cells_stay_shut() -> None:
    classes = SealedClasses.of(sealing().details, CLASSES, ORIGIN)
    item = item_of(0, boxed(0, NORMS[0]))
    assert open_details(item, step_of(0), classes, KEYS) == (NORMS[0], [])
    details, hidden = open_details(item, step_of(0), classes, None)
    assert (details, hidden) == ({"gradient_norm": {"0": [1.0, 2.0]}, "loss": 9.0}, [1])
    assert open_details(item_of(0, NORMS[0]), step_of(0), classes, None) == (NORMS[0], [])
    assert open_details(item_of(0, None), step_of(0), classes, KEYS) == ({}, [])
    with pytest.raises(TamperError, match="doesn't open"):
        open_details(item_of(1, boxed(0, NORMS[0])), step_of(1), classes, KEYS)


def test_a_block_is_opened_by_its_keys_step_by_step() -> None:
    lines = [boxed(number, one) for number, one in enumerate(NORMS)]
    found = read(*lines, of=sealing(), keys=KEYS)
    assert plain(found.norms) == [[[1.0 + n, 2.0], [3.0, None]] for n in range(3)]
    assert plain(found.losses) == [9.0] * 3
    assert not found.sealed.any()
    shut = read(*lines, of=sealing())
    assert shut.sealed.tolist() == [[False, True], [True, False], [True, True]]
    # The last step's loss would tell what its only class measured.
    assert plain(shut.losses) == [9.0, 9.0, None]
    assert plain(shut.norms) == [
        [[1.0, 2.0], [None, None]],
        [[None, None], [3.0, None]],
        [[None, None], [None, None]],
    ]


def test_without_the_name_of_the_log_no_key_opens_anything() -> None:
    block = block_of([boxed(0, NORMS[0])], sealing())
    with pytest.raises(TamperError, match="doesn't open"):
        read_details(block, keys=KEYS)
    assert read_details(block).sealed.tolist() == [[False, True]]


def test_a_strange_step_with_boxes_is_opened_too() -> None:
    strange = {**boxed(2, NORMS[2]), "cell_microbatches": "none"}
    found = read(NORMS[0], boxed(1, NORMS[1]), strange, of=sealing(), keys=KEYS)
    assert plain(found.norms)[2] == [[3.0, 2.0], [3.0, None]]
    assert not found.sealed.any()
    assert read(NORMS[0], {}, strange, of=sealing()).sealed.tolist() == [[False] * 2, [False] * 2, [True] * 2]
    with pytest.raises(TamperError, match="isn't boxes by class and column"):
        read({SEALED: {"shut": {"gradient_norm": 3}}}, of=sealing(), keys=KEYS)


def test_a_box_of_numbers_for_other_regions_is_refused() -> None:
    short = boxed(0, {"gradient_norm": {"1": [1.0]}})
    with pytest.raises(TamperError, match="gradient_norm '1' isn't a microbatch with a value for each region"):
        read(short, of=sealing(), keys=KEYS)
    assert read(short, of=sealing()).sealed.tolist() == [[False, True]]


def test_cells_and_regions_are_told_apart_where_there_are_not_as_many() -> None:
    """Of the same step as runs write it, and as it's read by itself: then its loss isn't asked for."""
    for regions, num in ((("in", "mid", "out"), 3), (("all",), 1)):
        routes = tuple((0.5,) * num for _ in range(2))
        of = replace(tables(), regions=regions, routes=routes)
        row, learnt = [1.0, 2.0, 3.0][:num], [[6.0, 0.0, 6.0][:num], [7.0, 0.0, 7.0][:num]]
        given = {"gradient_norm": {"1": row}, "loss": 4.0, "sub_steps": [{"regions": [0, num - 1], "weights": [6, 7]}]}
        if num == 1:
            learnt = [[12.0], [14.0]]  # the region is named twice
        for details, loss in ((given, 4.0), ({**given, "loss": "x"}, None)):
            found = read({}, details, of=of)
            assert plain(found.weights) == [[[1.5] * num, [2.0] * num], learnt]
            assert plain(found.norms) == [[[None] * num] * 2, [[None] * num, row]]
            assert plain(found.losses) == [None, loss]
            assert found.routes(block_of([{}], of)).tolist() == [[[0.5] * num] * 2]
    assert read(of=replace(tables(), regions=())).weights.shape == (0, 2, 0)
