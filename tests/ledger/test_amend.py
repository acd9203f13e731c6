"""Runs that went on under another policy: what is in force for a step, and what nobody may answer from."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import pytest

from cosmati.errors import LedgerError, RefutedError, TamperError
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.query import (
    VerifiedLedger,
    contributions,
    direct_write_exclusion,
    logged_steps,
    regions_of_class,
)
from cosmati.ledger.tables import is_number
from cosmati.ledger.verify import Amendment, verify_ledger
from cosmati.ledger.writer import LedgerWriter, details_digest
from cosmati.records.ledger import (
    NO_DETAILS,
    AmendEntry,
    CheckpointEntry,
    EndEntry,
    MicrobatchCell,
    ResumeEntry,
    RunEntry,
    StepEntry,
)

from .ledgers import ORIGIN, digest
from .test_verify import Item, write_signed

KEY = SigningKey.generate(ORIGIN)


class Policy:
    """A policy by hand: its tables, and the entries that it gives."""

    def __init__(self, name: str, regions: list[str], cells: dict[str, list[tuple[list[float], str]]]) -> None:
        self.digest = digest(name)
        self.cells = cells
        self.classes = list(cells)
        self.routes = sorted({tuple(w) for rows in cells.values() for w, _ in rows})
        self.details: dict[str, object] = {
            "classes": self.classes,
            "regions": regions,
            "routes": [list(route) for route in self.routes],
            "phases": [["warm", 0, 4], ["main", 4, 400]],
            "policy": [[[w for w, _ in rows], [d for _, d in rows]] for rows in cells.values()],
        }

    @property
    def commitments(self) -> tuple[tuple[str, bytes], ...]:
        return (("data", digest("data")), ("policy", self.digest))

    def run(self) -> Item:
        return RunEntry("r", self.commitments, details_digest(self.details)), self.details

    def amend(self, step: int, **changed: object) -> Item:
        details = self.details | {"changes": [["policy", "first", "second"]]} | changed
        return AmendEntry(step, self.commitments, details_digest(details)), details

    def step(self, step: int, attempt: int = 0, **changed: Any) -> Item:
        """One microbatch of each class, with rows where the class is admitted; `changed` goes to the first cell."""
        phase = int(step >= 4)
        norms: dict[str, object] = {}
        cells = []
        for class_id, rows in enumerate(self.cells.values()):
            weights, decision = rows[phase]
            num_rows = 2 if decision in {"admit", "gate"} else 0
            fields = {"class_id": class_id, "phase": phase, "route_id": self.routes.index(tuple(weights))}
            fields |= {"num_rows": num_rows} | (changed if class_id == 0 else {})
            cells.append(MicrobatchCell(band=0, weight=2.0, row_commitment=digest("rows"), **fields))
            norms[str(class_id)] = [None if w == 0 or not num_rows else 1.0 + step for w in weights]
        details: dict[str, object] = {"step": step, "gradient_norm": norms, "update_norm": None, "loss": None}
        return StepEntry(step, attempt, self.digest, details_digest(details), None, tuple(cells)), details


FIRST = Policy(
    "first",
    ["low", "high"],
    {
        "a": [([1.0, 1.0], "admit"), ([1.0, 1.0], "admit")],
        "b": [([0.0, 1.0], "admit"), ([0.0, 0.5], "gate")],
        "c": [([0.0, 0.0], "defer"), ([0.0, 1.0], "admit")],
    },
)
# One class more, another order, one region renamed: every id means something else than before.
SECOND = Policy(
    "second",
    ["top", "low"],
    {
        "b": [([1.0, 0.5], "gate"), ([1.0, 0.5], "gate")],
        "new": [([0.0, 0.0], "reject"), ([0.0, 0.0], "reject")],
        "a": [([1.0, 1.0], "admit"), ([1.0, 1.0], "admit")],
    },
)
RESUME = (ResumeEntry(3, 4, 1), None)


def amended() -> list[Item]:
    """Four steps under the first policy, of which the last is superseded; then three under the second."""
    before = [FIRST.run(), *(FIRST.step(step) for step in range(4))]
    return [*before, RESUME, SECOND.amend(3), *(SECOND.step(step, 1) for step in range(3, 6))]


def test_a_step_is_read_with_what_is_in_force_for_it(tmp_path: Path) -> None:
    write_signed(tmp_path / "l", amended(), KEY)
    table = contributions(tmp_path / "l")
    assert (table.classes, table.regions) == (("a", "b", "c", "new"), ("low", "high", "top"))
    found = {(c.class_name, c.region): (c.num_steps, c.num_rows, c.weight) for c in table.cells}
    assert found == {
        ("a", "low"): (6, 12, 12.0),
        ("a", "high"): (3, 6, 6.0),
        ("a", "top"): (3, 6, 6.0),
        ("b", "low"): (3, 6, 3.0),
        ("b", "high"): (3, 6, 6.0),
        ("b", "top"): (3, 6, 6.0),
        **{(name, region): (0, 0, 0.0) for name in ("c", "new") for region in table.regions},
    }
    steps = list(logged_steps(tmp_path / "l"))
    assert [one.class_names for one in steps] == [("a", "b")] * 3 + [("b", "a")] * 3
    assert steps[2].norms == {("a", "low"): 3.0, ("a", "high"): 3.0, ("b", "high"): 3.0}
    assert steps[3].norms == {("b", "top"): 4.0, ("b", "low"): 4.0, ("a", "top"): 4.0, ("a", "low"): 4.0}
    assert [c.region for c in regions_of_class(tmp_path / "l", "b")] == ["low", "high", "top"]


def test_an_exclusion_knows_every_policy_that_was_in_force(tmp_path: Path) -> None:
    write_signed(tmp_path / "l", amended(), KEY)
    with pytest.raises(RefutedError, match=r"entry 7 \(step 3\), microbatch 0, gave rows of 'b' weight 0.5 in 'low'"):
        direct_write_exclusion(tmp_path / "l", "b", "low")
    statement = direct_write_exclusion(tmp_path / "l", "c", "low")
    assert statement.policy_digests == (FIRST.digest.hex(), SECOND.digest.hex())
    assert (statement.num_steps_scanned, statement.num_class_microbatches) == (7, 4)
    assert statement.num_steps_without_region == 0
    assert direct_write_exclusion(tmp_path / "l", "new", "high").num_steps_without_region == 3
    assert direct_write_exclusion(tmp_path / "l", "c", "top").num_steps_without_region == 4


def test_a_policy_that_was_changed_without_a_word_is_found(tmp_path: Path) -> None:
    """The tables of entry 0 gave "no weight" for steps that went by another policy."""
    items = [FIRST.run(), FIRST.step(0), (ResumeEntry(1, 2, 1), None), SECOND.step(1, 1)]
    write_signed(tmp_path / "l", items, KEY)
    for asked in (verify_ledger, contributions, lambda path: direct_write_exclusion(path, "b", "low")):
        with pytest.raises(TamperError, match=rf"Entry 3 .*policy {SECOND.digest.hex()[:16]}.*changes by an amendment"):
            asked(tmp_path / "l")


def test_the_report_says_what_was_amended(tmp_path: Path) -> None:
    write_signed(tmp_path / "l", amended(), KEY)
    report = verify_ledger(tmp_path / "l")
    assert report.amendments == (Amendment(3, (("policy", "first", "second"),)),)
    assert (report.num_steps, report.num_superseded, report.num_attempts) == (6, 1, 2)
    # Step 3 came out differently, as it should under another policy.
    assert (report.num_confirmed, report.diverged_steps) == (0, ())
    ledger = VerifiedLedger(tmp_path / "l")
    assert [tables.entry for tables in ledger.tables] == [amended()[0][0], amended()[6][0]]
    assert (ledger.run, ledger.details) == FIRST.run()


def test_going_back_behind_an_amendment_takes_another_one(tmp_path: Path) -> None:
    tail: list[Item] = [(ResumeEntry(1, 2, 2), None), FIRST.amend(1), FIRST.step(1, 2)]
    write_signed(tmp_path / "l", [*amended(), *tail], KEY)
    assert [one.step for one in verify_ledger(tmp_path / "l").amendments] == [3, 1]
    weights = {(c.class_name, c.region): c.weight for c in contributions(tmp_path / "l").cells}
    assert (weights["b", "low"], weights["b", "high"]) == (0.0, 4.0)
    # In force is the latest in the log's order, so the first policy can't come back by itself.
    write_signed(tmp_path / "m", [*amended(), tail[0], tail[2]], KEY)
    with pytest.raises(TamperError, match="by an amendment"):
        verify_ledger(tmp_path / "m")


def test_a_step_run_again_under_the_same_amendment_is_compared(tmp_path: Path) -> None:
    """Step 3 too, which was allowed to come out differently once, when the policy was changed."""
    again = [SECOND.step(3, 2, num_rows=9), SECOND.step(4, 2), SECOND.step(5, 2, num_rows=9)]
    write_signed(tmp_path / "l", [*amended(), (ResumeEntry(3, 7, 2), None), *again], KEY)
    report = verify_ledger(tmp_path / "l")
    assert (report.num_superseded, report.num_confirmed, report.diverged_steps) == (4, 1, (3, 5))


# --------------------------------------------------------------------------------------------- where it may stand


def test_the_writer_keeps_an_amendment_where_it_belongs(tmp_path: Path) -> None:
    with LedgerWriter.create(tmp_path / "l", origin=ORIGIN, key=KEY) as writer:
        assert writer.in_force is None
        writer.append(*FIRST.run())
        with pytest.raises(LedgerError, match="right after a resume"):
            writer.append(*SECOND.amend(0))
        for step in range(3):
            writer.append(*FIRST.step(step))
        writer.append(CheckpointEntry(3, digest("state"), digest("root")))
        for kind in (SECOND.amend(3), SECOND.step(3)):
            with pytest.raises(LedgerError, match=r"right after a resume|by an amendment"):
                writer.append(*kind)
        assert writer.in_force == FIRST.run()[0]
        writer.append(writer.resume_entry(2))
        with pytest.raises(LedgerError, match=r"from step 3 on.*says the steps that stand, 2"):
            writer.append(*SECOND.amend(3))
        with pytest.raises(LedgerError, match="other details"):
            writer.append(SECOND.amend(2)[0])
        writer.append(*SECOND.amend(2))
        writer.append(*SECOND.amend(2, changes=[["budget", "4ba", "400ba"]]))
        assert writer.in_force == SECOND.amend(2, changes=[["budget", "4ba", "400ba"]])[0]
        writer.append(*SECOND.step(2, 1))
        with pytest.raises(LedgerError, match="right after a resume"):
            writer.append(*FIRST.amend(3))
        writer.append(EndEntry(3, "completed", digest("end")))
        with pytest.raises(LedgerError, match="only resume"):
            writer.append(*FIRST.amend(3))
    report = verify_ledger(tmp_path / "l")
    assert [one.changes[0][0] for one in report.amendments] == ["policy", "budget"]


@pytest.mark.parametrize("place", [1, 3, 5])
def test_a_signed_amendment_anywhere_else_is_refused(tmp_path: Path, place: int) -> None:
    items = [item for item in amended() if not isinstance(item[0], AmendEntry)]
    items.insert(place, SECOND.amend(place - 1))
    write_signed(tmp_path / "l", items[: place + 1], KEY)
    with pytest.raises(TamperError, match=rf"Entry {place} .*right after a resume"):
        verify_ledger(tmp_path / "l")


def test_an_amendment_takes_few_bytes_as_documented(tmp_path: Path) -> None:
    from cosmati.ledger.entry import encode_entry

    entry = AmendEntry(5, (("policy", digest("p")),), digest("d"))
    assert encode_entry(entry) == (
        b"\x01\x05" + (5).to_bytes(8) + digest("d") + b"\x00\x01" + b"\x00\x06policy" + hashlib.sha256(b"p").digest()
    )


# ----------------------------------------------------------------------------------------- a step and its policy


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"class_id": 3}, "class 3 isn't in the tables of entry 0"),
        ({"route_id": 9}, "route 9 isn't in the tables of entry 0"),
        ({"phase": 2}, "in phase 2, which isn't in the tables"),
        ({"phase": 1}, "says phase 1, which goes from step 4 to 400"),
        ({"route_id": 0}, r"weights \(0.0, 0.0\).*gives 'a' \(1.0, 1.0\)"),
        ({"class_id": 1}, r"gives 'b' \(0.0, 1.0\)"),
        ({"class_id": 2, "route_id": 0}, "2 rows of 'c', which the policy says to defer"),
    ],
)
def test_a_cell_that_the_policy_in_force_would_not_give_is_found(
    tmp_path: Path, changed: dict[str, int], reason: str
) -> None:
    write_signed(tmp_path / "l", [FIRST.run(), FIRST.step(0)], KEY)
    assert verify_ledger(tmp_path / "l").num_steps == 1
    write_signed(tmp_path / "m", [FIRST.run(), FIRST.step(0, **changed)], KEY)
    for asked in (verify_ledger, contributions):
        with pytest.raises(TamperError, match=rf"Entry 1 breaks.*{reason}"):
            asked(tmp_path / "m")


def test_without_a_policy_only_queries_need_a_name_for_each_class(tmp_path: Path) -> None:
    """Runs without a policy have one class in their tables, and batches that the user made may say any."""
    details = FIRST.details | {"policy": []}
    run: Item = (RunEntry("r", FIRST.commitments, details_digest(details)), details)
    write_signed(tmp_path / "l", [run, FIRST.step(0, class_id=9, phase=7)], KEY)
    assert verify_ledger(tmp_path / "l").num_steps == 1
    with pytest.raises(TamperError, match="class 9 isn't in the tables of entry 0"):
        contributions(tmp_path / "l")
    write_signed(tmp_path / "m", [run, FIRST.step(0, route_id=9)], KEY)
    with pytest.raises(TamperError, match="route 9 isn't in the tables of entry 0"):
        verify_ledger(tmp_path / "m")


def test_tombstones_of_a_deferred_class_are_no_rows(tmp_path: Path) -> None:
    write_signed(tmp_path / "l", [FIRST.run(), FIRST.step(0, class_id=2, route_id=0, num_rows=0), FIRST.step(1)], KEY)
    assert verify_ledger(tmp_path / "l").num_steps == 2


def test_a_step_behind_the_policys_last_phase_is_found(tmp_path: Path) -> None:
    write_signed(tmp_path / "l", [FIRST.run(), *(FIRST.step(step) for step in range(401))], KEY)
    with pytest.raises(TamperError, match=r"Entry 401 breaks.*from step 4 to 400"):
        verify_ledger(tmp_path / "l")


@pytest.mark.parametrize(
    "changed",
    [
        {"policy": [[[[1.0, 1.0]], ["admit"]]]},
        {"policy": [[1, 2], [1, 2], [1, 2]]},
        {"policy": {"a": 1}},
        {"policy": [[[[1.0], [1.0]], ["admit", "admit"]]] * 3},
        {"policy": [[[[1.0, 1.0], [1.0, -1.0]], ["admit", "admit"]]] * 3},
        {"policy": [[[[1.0, 1.0], [1.0, 1.0]], ["admit", "allow"]]] * 3},
        {"phases": None},
        {"phases": [["warm", 0, 4]]},
        {"phases": [["warm", 0, 4], ["main", 4, "400"]]},
        {"phases": [["warm", 0], ["main", 4]]},
        {"phases": [["warm", "0", 4], ["main", 4, 400]]},
    ],
)
def test_a_policy_that_breaks_the_contract_is_refused(tmp_path: Path, changed: dict[str, object]) -> None:
    details = FIRST.details | changed
    write_signed(tmp_path / "l", [(RunEntry("r", (), details_digest(details)), details)], KEY)
    with pytest.raises(TamperError, match=r"Entry 0 breaks.*its policy isn't"):
        verify_ledger(tmp_path / "l")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, True), (0.5, True), (1e308, True), (-0.5, False), (math.nan, False), (math.inf, False), (10**400, False)]
    + [(value, False) for value in (True, None, "1", [1])],
)
def test_a_weight_is_a_number_that_a_float_can_hold(value: object, expected: bool) -> None:
    """JSON has integers of any size, and Python's reader takes NaN."""
    assert is_number(value) is expected


@pytest.mark.parametrize("changes", [None, {}, [["policy", "first"]], [["steps", 3, 4]], ["policy"]])
def test_an_amendment_says_what_it_changes(tmp_path: Path, changes: object) -> None:
    write_signed(tmp_path / "l", [*amended()[:6], SECOND.amend(3, changes=changes)], KEY)
    with pytest.raises(TamperError, match=r"Entry 6 breaks.*name, was, now"):
        verify_ledger(tmp_path / "l")


def test_an_amendment_without_tables_is_refused(tmp_path: Path) -> None:
    bare = AmendEntry(3, SECOND.commitments, NO_DETAILS)
    write_signed(tmp_path / "l", [*amended()[:6], (bare, None)], KEY)
    with pytest.raises(TamperError, match=r"Entry 6 breaks.*class and region names"):
        verify_ledger(tmp_path / "l")
