"""How a step that was run again differs from its entry, field by field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cosmati.ledger.details import encode_details
from cosmati.ledger.difference import compare_step, compare_tables
from cosmati.ledger.reader import ScannedEntry
from cosmati.ledger.tables import Tables, in_force
from cosmati.records.ledger import StepEntry

from .ledgers import digest, run_entry, step_entry


def tables() -> Tables:
    entry, details = run_entry()
    ((_, found),) = in_force([ScannedEntry(0, b"", entry, encode_details(details))])
    return found


def compared(
    entry: dict[str, Any] | None = None,
    logged: dict[str, Any] | None = None,
    made: dict[str, Any] | None = None,
    without: str = "",
) -> tuple[list[str], set[str]]:
    """Compare a step with itself, but for what is changed in its entry, or in the details of either."""
    step, details = step_entry(1)
    details = {name: value for name, value in details.items() if name != without}
    changed = replace(step, **entry or {})
    item = ScannedEntry(2, b"", changed, encode_details(details | (logged or {})))
    found, skipped = compare_step(item, changed, tables(), step, details | (made or {}))
    return list(map(str, found)), skipped


def cells(**changes: Any) -> dict[str, Any]:
    step, _ = step_entry(1)
    assert isinstance(step, StepEntry)
    return {"microbatches": (step.microbatches[0], replace(step.microbatches[1], **changes), *step.microbatches[2:])}


def test_a_step_is_itself() -> None:
    assert compared() == ([], set())


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"policy_digest": digest("x")}, "step 1, policy digest: "),
        ({"parameter_root": digest("x")}, "step 1, root of the parameters: none, and the ledger says "),
        (cells(band=1), "step 1, band, microbatch 1: 0, and the ledger says 1"),
        (cells(phase=3), "step 1, phase, microbatch 1: 'main', and the ledger says 3"),
        (cells(class_id=1), "step 1, class, microbatch 1: 'private', and the ledger says 'news'"),
        (
            cells(route_id=1),
            "step 1, weight of its route in region near_output, microbatch 1: 0.0, and the ledger says 0.5",
        ),
        (cells(num_rows=9), "step 1, num rows, microbatch 1: 3, and the ledger says 9"),
        (cells(weight=9.0), "step 1, weight, microbatch 1: 3.0, and the ledger says 9.0"),
        (cells(row_commitment=digest("x")), "step 1, row commitment, microbatch 1: "),
        ({"microbatches": ()}, "step 1, number of cells: 4, and the ledger says 0"),
    ],
)
def test_each_field_of_an_entry(entry: dict[str, Any], said: str) -> None:
    (found,), _ = compared(entry)
    assert found.startswith(said)


@pytest.mark.parametrize("name", ["loss", "gradient_norm", "update_norm", "kept_rows", "sub_steps", "left_out"])
def test_what_is_measured_differs_where_one_side_has_it(name: str) -> None:
    for side in ("logged", "made"):
        (found, *_), skipped = compared(**{side: {name: {"0": [7.0, 8.0]}}}, without=name)
        assert found.startswith(f"step 1, {name.replace('_', ' ')}")
        assert not skipped


def test_what_no_replay_can_give_is_told() -> None:
    assert compared(logged={"sketch": [1], "when": "then"}, made={"when": "now"}) == ([], {"sketch", "when"})
    assert compared(logged={"sketch": [1]}, made={"sketch": [2]})[0] == ["step 1, sketch 0: 2, and the ledger says 1"]


def test_a_norm_is_told_by_region() -> None:
    step, details = step_entry(1)
    norms = {**details["gradient_norm"], "3": [5.0, 6.0]}  # type: ignore[dict-item]
    found, _ = compared(made={"gradient_norm": norms, "update_norm": None})
    assert found[-1].startswith("step 1, gradient norm of region near_output, microbatch 3: 6, ")
    assert step.step == 1


def test_tables_are_compared_by_their_leaves() -> None:
    was: dict[str, Any] = {"regions": ["a", "b"], "policy": [], "seed": 3}
    now: dict[str, Any] = {"regions": ["a", "c"], "policy": [[1.0]], "seed": 3}
    found = list(map(str, compare_tables(4, was, now, ("regions", "policy", "seed"))))
    assert found == [
        "step 4, table regions.1: 'c', and the ledger says 'b'",
        "step 4, table policy.0.0: 1, and the ledger says nothing",
    ]


def test_a_commitment_that_nobody_can_make_is_compared_with_nothing() -> None:
    """It's what the replay lacks that counts: a ledger that has zeros for a commitment is one that lies."""
    step, details = step_entry(1)
    assert isinstance(step, StepEntry)
    unknown = replace(step, microbatches=tuple(replace(one, row_commitment=bytes(32)) for one in step.microbatches))
    told = encode_details(details)
    assert compare_step(ScannedEntry(2, b"", step, told), step, tables(), unknown, details) == ([], set())
    found, _ = compare_step(ScannedEntry(2, b"", unknown, told), unknown, tables(), step, details)
    assert len(found) == len(step.microbatches)


def test_boxes_of_a_step_whose_tables_seal_nothing_differ() -> None:
    """A replay writes in the clear what the ledger has put into boxes: it's said, not left out."""
    assert compared(logged={"sealed": {"pii": {"loss": "AAAA"}}}) == (
        [f"step 1, sealed 0 {at}: nothing, and the ledger says {said!r}" for at, said in enumerate(["pii", "loss"])],
        {"loss of pii, which is sealed"},
    )
