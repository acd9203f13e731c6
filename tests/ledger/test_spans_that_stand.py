"""Steps that stand are cut where recipe, environment or deletion change, and states are of the steps they lie on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.details import details_digest, encode_details
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.reader import ScannedEntry
from cosmati.ledger.standing import StandingSteps, microbatch_of_cells
from cosmati.records.ledger import AmendEntry, CheckpointEntry, EndEntry, ResumeEntry, RunEntry, StepEntry

from .ledgers import digest
from .test_answers_by_hand import step
from .test_verify import Item, write_signed

BASE: dict[str, object] = {
    "classes": ["a"],
    "regions": ["x"],
    "routes": [[1.0]],
    "recipe": {"lr": "1", "rows": 3},
    "environment": {"torch": "2", "threads": 1},
    "num_microbatches": 2,
}
RUN: Item = (RunEntry("r", (), details_digest(BASE)), BASE)
CELL = (0, 0, 1, 1.0)


def amend(number: int, **changed: object) -> Item:
    told = BASE | {"changes": []} | changed
    return AmendEntry(number, (), details_digest(told)), told


def resume(from_step: int, supersedes: int, attempt: int) -> Item:
    return ResumeEntry(from_step, supersedes, attempt), None


def checkpoint(number: int, name: str) -> Item:
    return CheckpointEntry(number, digest(f"state {name}"), digest(f"root {name}")), None


def end(number: int, name: str) -> Item:
    return EndEntry(number, "completed", digest(f"root {name}")), None


def standing(place: Path, *items: Item) -> StandingSteps:
    write_signed(place / "l", list(items))
    return StandingSteps(VerifiedLedger(place / "l"))


def steps(first: int, end: int, attempt: int = 0) -> list[Item]:
    return [step(number, attempt, [CELL] * 2) for number in range(first, end)]


def test_a_run_that_never_stopped_is_one_span(tmp_path: Path) -> None:
    run = standing(tmp_path, RUN, *steps(0, 3))
    [span] = run.spans
    assert (span.first, span.end, span.tables.index) == (0, 3, 0)
    assert (span.recipe, span.environment, span.forgotten) == ({"lr": "1"}, {"torch": "2"}, "")
    assert (run.num_steps, run.checkpoints, run.roots, run.dropped, run.end) == (3, {}, {}, (), None)
    assert (run.cuts, run.withdrawn, run.signed_states) == ([], [], set())
    assert standing(tmp_path / "none", RUN).spans == ()


def test_a_span_ends_where_recipe_environment_or_deletion_change_and_nowhere_else(tmp_path: Path) -> None:
    gone: dict[str, object] = {"forgotten": {"asked": "ab", "method": "retrain"}}
    changes: list[dict[str, object]] = [
        {"note": "x"},
        {"recipe": {"lr": "2"}},
        {"recipe": {"lr": "2"}, "environment": {"torch": "3"}},
        {"recipe": {"lr": "2"}, "environment": {"torch": "3"}} | gone,
        {"recipe": {"lr": "2"}, "environment": {"torch": "3"}, "note": "y"} | gone,
        {"recipe": 3, "environment": ["x"], "forgotten": {"asked": "ab", "method": "drop"}},
        {"recipe": {}, "environment": {}, "forgotten": 5},
    ]
    items = [RUN, step(0, 0, [CELL])]
    for number, changed in enumerate(changes, 1):
        items += [resume(number, len(items), number), amend(number, **changed), step(number, number, [CELL])]
    spans = standing(tmp_path, *items).spans
    assert [(one.first, one.end) for one in spans] == [(0, 2), (2, 3), (3, 4), (4, 6), (6, 8)]
    assert [one.tables.index for one in spans] == [3, 6, 9, 15, 21], "those in force at the last step"
    assert [one.forgotten for one in spans] == ["", "", "", "ab", ""]
    assert [dict(one.recipe) for one in spans] == [{"lr": "1"}, *[{"lr": "2"}] * 3, {}]
    assert [dict(one.environment) for one in spans] == [{"torch": "2"}] * 2 + [{"torch": "3"}] * 2 + [{}]


def test_superseded_steps_are_in_no_span_and_their_entries_are_not_given(tmp_path: Path) -> None:
    items = [RUN, *steps(0, 4), resume(2, 3, 1), amend(2, recipe={"lr": "2"}), *steps(2, 5, 1)]
    run = standing(tmp_path, *items)
    assert [(one.first, one.end) for one in run.spans] == [(0, 2), (2, 5)]
    found = list(run.steps(1, 4))
    assert [(item.index, entry.step, tables.index) for item, entry, tables in found] == [
        (2, 1, 0),
        (7, 2, 6),
        (8, 3, 6),
    ]
    assert list(run.steps(5, 9)) == []
    assert (run.segment(1, 5), run.segment(0, 1)) == (range(1, 5), range(1))
    for first, last in ((-1, 2), (2, 2), (3, 2)):
        with pytest.raises(LedgerError, match=f"Steps {first}:{last} are none"):
            run.segment(first, last)
    with pytest.raises(LedgerError, match="has signed 5 steps, and 6 were asked for"):
        run.segment(4, 6)


def test_states_lie_on_steps_that_stand_and_are_of_one_deletion(tmp_path: Path) -> None:
    gone = {"forgotten": {"asked": "ab", "method": "retrain"}}
    run = standing(
        tmp_path,
        RUN,
        checkpoint(0, "begun"),
        *steps(0, 2),
        checkpoint(2, "a"),
        checkpoint(2, "b"),
        step(2, 0, [CELL]),
        checkpoint(3, "c"),
        end(3, "c"),
        resume(2, 6, 1),
        amend(2, **gone),
        checkpoint(2, "d"),
        step(2, 1, [CELL]),
        step(3, 1, [CELL]),
        checkpoint(4, "e"),
    )

    def names(found: Any) -> list[str]:
        return [name for name in "abcde" if digest(f"state {name}") in found]

    assert {at: [one.state_digest for one in own] for at, own in run.checkpoints.items()} == {
        0: [digest("state begun")],
        2: [digest(f"state {name}") for name in "abd"],
        4: [digest("state e")],
    }
    assert run.roots == {
        0: {digest("root begun")},
        2: {digest(f"root {name}") for name in "abd"},
        4: {digest("root e")},
    }
    assert (names(run.states(2, "")), names(run.states(2, "ab"))) == (["a", "b"], ["d"])
    assert (names(run.states(4, "ab")), names(run.states(4, "")), names(run.states(3, ""))) == (["e"], [], [])
    assert run.signed_states == {(0, digest("state begun"))} | {
        (at, digest(f"state {name}")) for at, name in ((2, "a"), (2, "b"), (3, "c"), (2, "d"), (4, "e"))
    }
    assert run.end is None, "it was superseded"
    assert standing(tmp_path / "ended", RUN, *steps(0, 2), end(2, "z")).end == end(2, "z")[0]


def test_what_is_signed_of_a_model_that_lost_a_part_is_told_and_lies_on_no_step(tmp_path: Path) -> None:
    drop: dict[str, object] = {"forgotten": {"asked": "ab", "method": "drop"}, "changes": [["forgotten", "", "ab"]]}
    items = [RUN, *steps(0, 2), checkpoint(2, "a"), resume(2, 4, 1), amend(2, **drop), checkpoint(2, "b"), end(2, "c")]
    run = standing(tmp_path, *items)
    assert run.dropped == ("the weights from which something was dropped after 2 steps",)
    assert (run.roots, run.end) == ({2: {digest("root a")}}, None)
    assert [one.state_digest for one in run.checkpoints[2]] == [digest("state a")]
    assert run.signed_states == {(2, digest("state a")), (2, digest("state b"))}
    again = standing(tmp_path / "again", *items, resume(1, 2, 2), *steps(1, 3, 2), end(3, "d"))
    assert (again.dropped, again.end) == ((), end(3, "d")[0])
    assert again.roots == {3: {digest("root d")}}
    still = standing(tmp_path / "still", *items, resume(2, 8, 2))
    assert still.dropped == run.dropped


def test_a_step_in_more_pieces_is_noted_and_one_in_fewer_is_not(tmp_path: Path) -> None:
    sizes = [2, 3, 4, 5, 2, 6, 6, 8]
    run = standing(tmp_path, RUN, *(step(number, 0, [CELL] * size) for number, size in enumerate(sizes)))
    assert run.cuts == [(2, 2), (5, 3), (7, 4)]
    packs = step(0, 0, [CELL] * 4, cell_microbatches=[0, 3, 1, 1]), step(1, 0, [CELL] * 9, cell_microbatches=[0] * 9)
    assert standing(tmp_path / "packs", RUN, *packs, step(2, 0, [])).cuts == [(0, 2)]
    for whole in (0, -1, "2", None):
        told = BASE | {"num_microbatches": whole}
        first: Item = (RunEntry("r", (), details_digest(told)), told)
        assert standing(tmp_path / repr(whole), first, step(0, 0, [CELL] * 8)).cuts == []


def test_what_was_withdrawn_is_told_where_it_changes(tmp_path: Path) -> None:
    taken = {"target": "r/a/set/1", "class": "a", "reason": "x", "because": "y", "action": "stop", "step": 90}
    told: dict[str, object] = {"withdrawn": {"in_force": [taken]}}
    items = [RUN, *steps(0, 2), resume(2, 3, 1), amend(2, **told), *steps(2, 4, 1)]
    items += [resume(4, len(items), 2), amend(4, **told, note="x"), *steps(4, 5, 2)]
    items += [resume(5, len(items), 3), amend(5), *steps(5, 7, 3)]
    assert standing(tmp_path, *items).withdrawn == [(2, told["withdrawn"]), (5, None)]


def test_cells_are_each_of_its_own_microbatch_unless_they_say_of_which() -> None:
    entry, told = step(0, 0, [CELL] * 3, cell_microbatches=[0, 0, 4])
    assert isinstance(entry, StepEntry)
    assert told is not None
    assert microbatch_of_cells(ScannedEntry(1, b"", entry, encode_details(told)), entry) == [0, 0, 4]
    for line in (None, b"{}", b'{"step":0}'):
        assert microbatch_of_cells(ScannedEntry(1, b"", entry, line), entry) == [0, 1, 2]
    for wrong in (b"3", b'"0"', b"[0,-1]", b"[0,1.0]", b"[true]", b"null", b'{"0":0}'):
        item = ScannedEntry(7, b"", entry, b'{"cell_microbatches":' + wrong + b"}")
        with pytest.raises(TamperError, match=r"Entry 7 breaks .*don't say of which microbatches they are"):
            microbatch_of_cells(item, entry)
