"""Each way in which a step that was run again can differ is told once, by name and place, with both values."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from cosmati.ledger.details import encode_details
from cosmati.ledger.difference import (
    _ABSENT,
    UNKNOWN_ROWS,
    LedgerDifference,
    _at,
    _label,
    _leaves,
    _names_of,
    _say,
    _unlike_routes,
    compare_step,
    compare_tables,
)
from cosmati.ledger.reader import ScannedEntry
from cosmati.ledger.sealing import BLOCK_STEPS, COLUMNS, SEALED, ColumnKeys, OperatorKeys, divided, seal_names, sealed
from cosmati.ledger.tables import Tables, in_force
from cosmati.records.ledger import NO_DETAILS, StepEntry

from .ledgers import CLASSES, ORIGIN, digest, run_entry, step_entry

KEYS = OperatorKeys(bytes(range(32)), ORIGIN)


def tables(**more: Any) -> Tables:
    entry, details = run_entry()
    ((_, found),) = in_force([ScannedEntry(0, b"", entry, encode_details(details))])
    return replace(found, details={**found.details, **more})


def compared(
    logged: tuple[StepEntry, dict[str, Any] | None],
    made: tuple[StepEntry, dict[str, Any]],
    of: Tables | None = None,
    *,
    keys: ColumnKeys | None = None,
) -> tuple[list[str], set[str]]:
    entry, told = logged
    item = ScannedEntry(2, b"", entry, None if told is None else encode_details(told))
    found, skipped = compare_step(item, entry, of or tables(), *made, origin=ORIGIN, keys=keys)
    return list(map(str, found)), skipped


# --------------------------------------------------------------------------------------------------------- the words


def test_a_difference_names_its_step_where_it_is_of_one() -> None:
    assert str(LedgerDifference(0, "loss", "1", "2")) == "step 0, loss: 2, and the ledger says 1"
    one = LedgerDifference(None, "what", "a", "b")
    assert str(one) == "what: b, and the ledger says a"
    with pytest.raises(FrozenInstanceError):
        one.what = "else"  # type: ignore[misc]
    assert not hasattr(one, "__dict__")


@pytest.mark.parametrize("column", COLUMNS)
def test_of_what_may_be_sealed_a_file_for_others_has_no_value(column: str) -> None:
    what = f"{column.replace('_', ' ')} of region near_input, microbatch 1"
    assert (
        LedgerDifference(3, what, "1", "2").without_sealed() == f"step 3, {what}: it differs, and the values are sealed"
    )
    assert LedgerDifference(None, what, "1", "2").without_sealed() == f"{what}: it differs, and the values are sealed"
    for other in (f"a {what}", "kept rows", "weight, microbatch 1"):
        assert LedgerDifference(3, other, "1", "2").without_sealed() == f"step 3, {other}: 2, and the ledger says 1"


def test_values_are_said_in_short() -> None:
    said = [_say(value) for value in (_ABSENT, None, b"\xab" * 32, b"", 1.5, "x", [1], True)]
    assert said == ["nothing", "none", "ab" * 8, "", "1.5", "'x'", "[1]", "True"]


REGIONS = ("low", "high")


@pytest.mark.parametrize(
    ("name", "path", "words"),
    [
        ("gradient_norm", ("3", 1), "gradient norm of region high, microbatch 3"),
        ("gradient_norm", ("3", 0), "gradient norm of region low, microbatch 3"),
        ("gradient_norm", ("3", 2), "gradient norm 3 2"),
        ("gradient_norm", ("3",), "gradient norm 3"),
        ("gradient_norm", ("3", "1"), "gradient norm 3 1"),
        ("gradient_norm", ("3", 1, 0), "gradient norm 3 1 0"),
        ("gradient_norm", (), "gradient norm"),
        ("packed_entropy", ("0", 1), "packed entropy of region high, microbatch 0"),
        ("packed_direction", ("0", 1), "packed direction of region high, microbatch 0"),
        ("update_norm", (1,), "update norm of region high"),
        ("update_direction", (0,), "update direction of region low"),
        ("update_direction", (0, 1), "update direction 0 1"),
        ("update_norm", (2,), "update norm 2"),
        ("region_digests", ("before", 1), "digest of region high before the step"),
        ("region_digests", ("after", 0), "digest of region low after the step"),
        ("region_digests", ("after", 2), "region digests after 2"),
        ("kept_rows", ("3", 1), "kept rows 3 1"),
        ("loss", (), "loss"),
        ("sub_steps", (0, "regions", 1), "sub steps 0 regions 1"),
    ],
)
def test_a_value_of_the_details_is_named_by_region_and_microbatch(
    name: str, path: tuple[str | int, ...], words: str
) -> None:
    assert _label(name, path, REGIONS) == words


def test_leaves_are_all_that_is_neither_an_object_nor_a_list() -> None:
    value = {"a": [1, (2, {"b": None})], "c": {}, "d": "text", "e": []}
    assert list(_leaves(value)) == [(("a", 0), 1), (("a", 1, 0), 2), (("a", 1, 1, "b"), None), (("d",), "text")]
    assert list(_leaves(3, ("x",))) == [(("x",), 3)]
    assert list(_leaves(None)) == [((), None)]


def test_an_index_is_said_as_what_it_names_where_that_has_a_name() -> None:
    names = ("a", "", "c")
    assert [_at(names, index) for index in (0, 1, 2, 3)] == ["a", 1, "c", 3]
    assert (_at(names, "0"), _at(names, 0.0), _at((), 0)) == ("0", 0.0, 0)
    assert _names_of([["warm", 0, 3], ["main", 3, 9]]) == ["warm", "main"]
    assert _names_of([["warm"], [], "x", None]) == ["warm"]
    assert _names_of(None) == _names_of("ab") == _names_of({"a": 1}) == []


def test_routes_are_told_by_region_where_both_are_known() -> None:
    assert list(_unlike_routes((1.0, 0.5), (1.0, 0.0), REGIONS)) == [("weight of its route in region high", 0.5, 0.0)]
    assert list(_unlike_routes((1.0, 0.5), (0.5, 0.0), REGIONS)) == [
        ("weight of its route in region low", 1.0, 0.5),
        ("weight of its route in region high", 0.5, 0.0),
    ]
    assert list(_unlike_routes(7, (0.5, 0.0), REGIONS)) == [("route", 7, (0.5, 0.0))]
    assert list(_unlike_routes((0.5, 0.0), 7, REGIONS)) == [("route", (0.5, 0.0), 7)]


# -------------------------------------------------------------------------------------------------------- the tables


def test_of_each_table_the_first_leaf_that_differs_is_told() -> None:
    was: dict[str, Any] = {"a": [1, 2, 3], "b": {"x": {"y": 1}}, "same": [1], "gone": 5}
    now: dict[str, Any] = {"a": (1, 5, 6), "b": {"x": {"y": 1, "z": "w"}}, "same": (1,), "other": 3}
    assert list(compare_tables(7, was, now, ("b", "a", "same", "gone", "none"))) == [
        LedgerDifference(7, "table b.x.z", "nothing", "'w'"),
        LedgerDifference(7, "table a.1", "2", "5"),
        LedgerDifference(7, "table gone", "5", "none"),
    ]
    assert list(compare_tables(7, was, now, ())) == []


# --------------------------------------------------------------------------------------------------------- the steps


def test_all_that_differs_is_told_in_the_entrys_order_then_by_the_details_names() -> None:
    (entry, details), root = step_entry(1), digest("root")
    cells = list(entry.microbatches)
    cells[0] = replace(cells[0], weight=9.0, num_rows=0)
    cells[3] = replace(cells[3], route_id=2, band=4, class_id=0, row_commitment=root)
    other = replace(entry, policy_digest=digest("x"), parameter_root=root, microbatches=tuple(cells))
    changed = {**details, "update_norm": [1.0, None], "loss": 3.0, "gradient_norm": {}, "entropy": {"0": [1.0, 2.0]}}
    found, skipped = compared((other, changed), (entry, details))
    assert [one.removeprefix("step 1, ").partition(":")[0] for one in found] == [
        "policy digest",
        "root of the parameters",
        "num rows, microbatch 0",
        "weight, microbatch 0",
        "class, microbatch 3",
        "band, microbatch 3",
        "weight of its route in region near_output, microbatch 3",
        "row commitment, microbatch 3",
        "entropy of region near_input, microbatch 0",
        "entropy of region near_output, microbatch 0",
        "entropy",
        *(
            f"gradient norm of region {region}, microbatch {m}"
            for m in range(4)
            for region in ("near_input", "near_output")
        ),
        "loss",
        "update norm of region near_input",
        "update norm of region near_output",
        "update norm",
    ]
    assert skipped == set()
    assert found[4] == "step 1, class, microbatch 3: 'news', and the ledger says 'open'"
    assert found[1].endswith(f"none, and the ledger says {root.hex()[:16]}")
    # Who logged no root said nothing of it.
    assert compared((entry, details), (replace(entry, parameter_root=root), details)) == ([], set())
    assert compared((replace(entry, parameter_root=root), details), (replace(entry, parameter_root=root), details)) == (
        [],
        set(),
    )


def test_cells_are_named_by_the_microbatch_that_owns_them() -> None:
    entry, details = step_entry(1)
    details |= {"cell_microbatches": [0, 0, 5, 6]}
    cells = tuple(replace(one, weight=9.0 + n) for n, one in enumerate(entry.microbatches))
    found, _ = compared((replace(entry, microbatches=cells), details), (entry, details))
    assert [one.partition(":")[0] for one in found] == [f"step 1, weight, microbatch {m}" for m in (0, 0, 5, 6)]
    # What both have is compared, however many there are.
    found, _ = compared((replace(entry, microbatches=cells[:2]), details), (entry, details))
    assert found == [
        "step 1, number of cells: 4, and the ledger says 2",
        "step 1, weight, microbatch 0: 2.0, and the ledger says 9.0",
        "step 1, weight, microbatch 0: 3.0, and the ledger says 10.0",
    ]
    found, _ = compared((replace(entry, microbatches=cells), details | {"cell_microbatches": 3}), (entry, details))
    assert [one.partition(":")[0] for one in found[:4]] == [f"step 1, weight, microbatch {m}" for m in range(4)]


def test_an_unknown_commitment_of_a_replay_is_passed_over_and_nothing_beside_it() -> None:
    entry, details = step_entry(1)
    cells = tuple(replace(one, row_commitment=UNKNOWN_ROWS, num_rows=50) for one in entry.microbatches)
    found, _ = compared((entry, details), (replace(entry, microbatches=cells), details))
    assert [one.partition(":")[0] for one in found] == [f"step 1, num rows, microbatch {m}" for m in range(4)]


def test_details_that_are_missing_differ_in_all_that_is_measured() -> None:
    entry, details = step_entry(1)
    bare = replace(entry, details_digest=NO_DETAILS)
    found, skipped = compared((bare, None), (entry, {"loss": 2.0, "seed": 7, "step": 1}))
    assert found == ["step 1, loss: 2, and the ledger says none", "step 1, step: 1, and the ledger says none"]
    assert skipped == {"seed"}
    assert compared((bare, None), (entry, {})) == ([], set())
    found, skipped = compared((entry, {"seed": 7, "when": 1, "x": 2}), (entry, {"seed": 8, "when": 2, "y": 2}))
    assert (found, skipped) == (["step 1, seed: 8, and the ledger says 7"], {"when", "x", "y"})
    assert details["step"] == 1


# -------------------------------------------------------------------------------------------------- what is sealed


def sealed_step(**changed: Any) -> tuple[Tables, tuple[StepEntry, dict[str, Any]], tuple[StepEntry, dict[str, Any]]]:
    """Return tables that seal two of the classes, a step as it's logged, and the step in the clear, changed or not."""
    entry, details = step_entry(1)
    of = tables(**{SEALED: {"classes": ["news", "private"], "block_steps": BLOCK_STEPS}})
    clear, parts = divided(details, entry.microbatches, seal_names(CLASSES, ["news", "private"]))
    return of, (entry, sealed(clear, parts, KEYS, 1)), (entry, {**details, **changed})


def other_norms(**rows: list[float]) -> dict[str, Any]:
    _, details = step_entry(1)
    norms = details["gradient_norm"]
    assert isinstance(norms, dict)
    return {"gradient_norm": {**norms, **{name[1:]: row for name, row in rows.items()}}}


def test_what_the_keys_open_is_compared_with_what_is_in_the_clear() -> None:
    of, logged, made = sealed_step()
    assert compared(logged, made, of, keys=KEYS) == ([], set())
    of, logged, made = sealed_step(**other_norms(m0=[50.0, 60.0], m2=[7.0, 8.0]))
    found, skipped = compared(logged, made, of, keys=KEYS)
    assert {one.partition(", and the")[0] for one in found} == {
        f"step 1, gradient norm of region {region}, microbatch {m}: {value}"
        for m, values in ((0, (50, 60)), (2, (7, 8)))
        for region, value in zip(("near_input", "near_output"), values, strict=True)
    }
    assert len(found) == 4
    assert skipped == set()


def test_what_no_key_opens_is_named_and_the_rest_is_compared() -> None:
    of, logged, made = sealed_step(**other_norms(m0=[50.0, 60.0]))
    boxes = logged[1][SEALED]
    named = {f"{column} of {name}, which is sealed" for name, own in boxes.items() for column in own}
    assert compared(logged, made, of) == ([], named)
    assert "gradient_norm of news, which is sealed" in named
    # Of class "open" nothing is sealed.
    of, logged, made = sealed_step(**other_norms(m2=[7.0, 8.0]))
    assert len(compared(logged, made, of)[0]) == 2

    def one(classes: str, column: str, block: int) -> bytes | None:
        return KEYS(classes, column, block) if classes == "news" else None

    of, logged, made = sealed_step(**other_norms(m0=[50.0, 60.0], m1=[7.0, 8.0]))
    found, skipped = compared(logged, made, of, keys=one)
    assert [one.partition(":")[0] for one in found] == [
        f"step 1, gradient norm of region {region}, microbatch 0" for region in ("near_input", "near_output")
    ]
    assert skipped == {text for text in named if " of news," not in text}


def test_what_one_side_seals_and_the_other_does_not_is_told() -> None:
    of, (entry, told), made = sealed_step()
    without = {**told, SEALED: {name: own for name, own in told[SEALED].items() if name != "news"}}
    found, _ = compared((entry, without), made, of)
    lacking = {f"gradient norm of region {region}, microbatch {m}" for m in "03" for region in of.regions}
    told_of = {one.removeprefix("step 1, ").partition(":")[0] for one in found}
    assert {one for one in told_of if not one.startswith("sealed ")} == lacking
    assert any(one.startswith("step 1, sealed ") and "'news'" in one for one in found)
    bare = {name: value for name, value in told.items() if name != SEALED}
    found, skipped = compared((entry, bare), made, of, keys=KEYS)
    assert any(text.startswith("step 1, sealed") for text in found)
    assert skipped == set()
