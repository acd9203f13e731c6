"""Of one run that was written down by hand, each answer is the one that stands beside it, by entries and by tables."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from cosmati.cli.main import app
from cosmati.errors import LedgerError, RefutedError, TamperError
from cosmati.ledger.derived.answers import (
    ClassTaught,
    PolicyEffect,
    num_standing,
    policy_effects,
    spans_of,
    steps_taught,
    taught,
)
from cosmati.ledger.derived.opened import DerivedLedger, open_derived
from cosmati.ledger.details import details_digest
from cosmati.ledger.entry import encode_entry
from cosmati.ledger.evidence import LEVEL_0, ReplayedHead, TrustedEvidence
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.note import TreeHead
from cosmati.ledger.query import (
    Contribution,
    ContributionSum,
    VerifiedLedger,
    classes_of_region,
    contributions,
    direct_write_exclusion,
    direct_write_exclusions,
    logged_steps,
    regions_of_class,
    require,
    total_norm,
)
from cosmati.records.ledger import AmendEntry, CheckpointEntry, MicrobatchCell, ResumeEntry, RunEntry, StepEntry
from cosmati.storage.duck import has_duckdb
from tests.storage.rfc6962 import mth

from .ledgers import ORIGIN, digest
from .test_verify import Item, write_signed

KEY, OTHER = SigningKey.generate(ORIGIN), SigningKey.generate(ORIGIN)
needs_duckdb = pytest.mark.skipif(not has_duckdb(), reason="the extra `queries` isn't installed")


def step(number: int, attempt: int, cells: list[tuple[int, int, int, float]], **details: Any) -> Item:
    """A step with cells of class, route, rows and weight; its phase is its number."""
    told: dict[str, object] = {"step": number, **details}
    made = tuple(MicrobatchCell(c, 0, min(number, 2), r, n, w, digest("rows")) for c, r, n, w in cells)
    return StepEntry(number, attempt, digest("policy"), details_digest(told), None, made), told


TABLES: dict[str, object] = {
    "classes": ["a", "b", "a&b", "s"],
    "regions": ["x", "y"],
    "routes": [[1.0, 1.0], [0.0, 0.5], [0.0, 0.0]],
    "phases": [["early", 0, 1], ["late", 1, 9]],
    "sealed": {"classes": ["s"], "block_steps": 10},
}
LATER: dict[str, object] = {
    "classes": ["b", "n"],
    "regions": ["y", "z"],
    "routes": [[1.0, 2.0]],
    "phases": [["early", 0, 1]],
    "changes": [["regions", "x", "z"]],
}
ITEMS: list[Item] = [
    (RunEntry("r", (), details_digest(TABLES)), TABLES),
    step(
        0,
        0,
        [(0, 0, 2, 2.0), (0, 1, 3, 4.0), (1, 0, 0, 0.0), (2, 1, 1, 1.0)],
        gradient_norm={"0": [1.0, 2.0], "1": [None, 3.0], "3": [None, 0.0]},
    ),
    step(
        1,
        0,
        [(3, 0, 2, 2.0), (1, 0, 1, 0.0), (3, 0, 4, 1.0)],
        gradient_norm={"1": [5.0, 5.0], "2": [6.0, None]},
        sealed={"s": {"gradient_norm": "AAAA"}},
    ),
    step(2, 0, [(0, 0, 9, 9.0)], gradient_norm={"0": [9.0, 9.0]}),
    (CheckpointEntry(3, digest("state"), digest("root")), None),
    (ResumeEntry(2, 3, 1), None),
    (AmendEntry(2, (), details_digest(LATER)), LATER),
    step(
        2,
        1,
        [(0, 0, 5, 1.5), (1, 0, 1, 3.0)],
        gradient_norm={"0": [7.0, 8.0], "1": [4.0, 2.0]},
        sub_steps=[{"regions": [0], "weights": [1.0, 0.0]}, {"regions": [1], "weights": [0.5, 2.0]}],
    ),
]
DATA = [encode_entry(entry) for entry, _ in ITEMS]
CLASSES, REGIONS = ("a", "b", "a&b", "s", "n"), ("x", "y", "z")
# Steps, microbatches, rows, weight, norms, and how many microbatches were sealed.
Given = tuple[int, int, int, float, list[float], int]
NOTHING: Given = (0, 0, 0, 0.0, [], 0)
GIVEN: dict[tuple[str, str], Given] = {
    ("a", "x"): (1, 1, 2, 2.0, [1.0], 0),
    ("a", "y"): (1, 2, 5, 4.0, [2.0, 3.0], 0),
    ("a&b", "y"): (1, 1, 1, 0.5, [0.0], 0),
    ("s", "x"): (1, 2, 6, 3.0, [6.0], 2),
    ("s", "y"): (1, 2, 6, 3.0, [], 2),
    ("b", "y"): (1, 1, 5, 1.0, [7.0], 0),
    ("b", "z"): (1, 1, 5, 1.0, [8.0], 0),
    ("n", "z"): (1, 1, 1, 4.0, [2.0], 0),
}


def contribution(name: str, region: str, given: Given = NOTHING, total: float | None = None) -> Contribution:
    steps, microbatches, rows, weight, norms, hidden = given
    norm_sum = math.nan if hidden and not norms else sum(norms)
    rms = math.sqrt(sum(norm * norm for norm in norms) / len(norms)) if norms else None
    share = None if total is None else sum(norms) / total
    return Contribution(name, region, steps, microbatches, rows, weight, len(norms), norm_sum, rms, share, hidden)


def check(found: Contribution, expected: Contribution) -> None:
    for name, value in asdict(expected).items():
        one = asdict(found)[name]
        assert one == (pytest.approx(value, nan_ok=True) if isinstance(value, float) else value), (found, name)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    write_signed(tmp_path / "ledger", ITEMS, KEY)
    return tmp_path / "ledger"


@pytest.fixture
def derived(ledger: Path) -> Iterator[DerivedLedger]:
    with open_derived(ledger) as found:
        yield found


# ----------------------------------------------------------------------------------------------------- by the entries


def test_what_each_class_gave_each_region_is_told_in_the_order_of_the_log(ledger: Path) -> None:
    table = contributions(ledger, vkey=KEY.verifier.text)
    assert (table.origin, table.tree_size, table.root) == (ORIGIN, len(ITEMS), mth(DATA).hex())
    assert (table.evidence_level, table.num_steps) == (LEVEL_0, 3)
    assert (table.classes, table.regions) == (CLASSES, REGIONS)
    pairs = [(name, region) for name in CLASSES for region in REGIONS]
    assert [(one.class_name, one.region) for one in table.cells] == pairs
    for one in table.cells:
        total = 10.0 if one.region == "z" else None
        check(one, contribution(one.class_name, one.region, GIVEN.get((one.class_name, one.region), NOTHING), total))


def test_a_class_is_found_in_joint_ones_and_a_region_by_itself(ledger: Path) -> None:
    def pairs(found: tuple[Contribution, ...]) -> list[tuple[str, str]]:
        return [(one.class_name, one.region) for one in found]

    opened = VerifiedLedger(ledger)
    for asked in (ledger, opened):
        assert pairs(regions_of_class(asked, "a")) == [("a", "x"), ("a", "y"), ("a&b", "y")]
        assert pairs(regions_of_class(asked, "b")) == [("b", "y"), ("b", "z"), ("a&b", "y")]
        assert pairs(regions_of_class(asked, "a&b")) == [("a&b", "y")]
        assert pairs(classes_of_region(asked, "x")) == [("a", "x"), ("s", "x")]
        assert pairs(classes_of_region(asked, "z")) == [("b", "z"), ("n", "z")]
        with pytest.raises(LedgerError, match=r"no class 'x'\. It has a, b, a&b, s, n"):
            regions_of_class(asked, "x")
        with pytest.raises(LedgerError, match=r"no region 'a'\. It has x, y, z"):
            classes_of_region(asked, "a")


def test_steps_are_told_with_the_classes_that_have_rows_and_the_norms_in_the_open(ledger: Path) -> None:
    assert [(one.step, one.class_names, one.norms) for one in logged_steps(ledger)] == [
        (0, ("a", "a", "a&b"), {("a", "x"): 1.0, ("a", "y"): 5.0, ("a&b", "y"): 0.0}),
        (1, ("s", "b", "s"), {("b", "x"): 5.0, ("b", "y"): 5.0, ("s", "x"): 6.0}),
        (2, ("b", "n"), {("b", "y"): 7.0, ("b", "z"): 8.0, ("n", "y"): 4.0, ("n", "z"): 2.0}),
    ]


def test_a_ledger_is_opened_with_all_that_its_entries_say(ledger: Path) -> None:
    found = VerifiedLedger(ledger)
    assert (found.directory, found.key, found.keys) == (ledger, KEY.verifier, None)
    assert found.head == TreeHead(len(ITEMS), mth(DATA))
    assert (found.run, found.details, found.evidence_level) == (ITEMS[0][0], TABLES, LEVEL_0)
    assert [(one.index, one.classes, one.regions) for one in found.tables] == [
        (0, ("a", "b", "a&b", "s"), ("x", "y")),
        (6, ("b", "n"), ("y", "z")),
    ]
    assert (found.classes, found.regions, found.standing) == (CLASSES, REGIONS, {1, 2, 7})
    assert [one.data for one in found.entries()] == DATA
    assert [(item.index, entry.step, tables.index) for item, entry, tables in found.steps()] == [
        (1, 0, 0),
        (2, 1, 0),
        (3, 2, 0),
        (7, 2, 6),
    ]
    told = [found.norms(*one) for one in found.steps()]
    assert [hidden for _, hidden in told] == [[], [0, 2], [], []]
    assert told[1][0] == {1: [5.0, 5.0], 2: [6.0, None]}


def test_what_the_quick_reader_refuses_is_left_to_the_careful_one(tmp_path: Path) -> None:
    """A class without a name says nothing where no policy is; who asks by classes is told."""
    write_signed(tmp_path / "l", [*ITEMS, step(3, 1, [(9, 0, 1, 1.0)])], KEY)
    found = VerifiedLedger(tmp_path / "l")
    assert ([one.index for one in found.tables], found.standing) == ([0, 6], {1, 2, 7, 8})
    with pytest.raises(TamperError, match="class 9 isn't in the tables of entry 6"):
        contributions(found)
    write_signed(tmp_path / "l", [*ITEMS, step(3, 1, [(0, 9, 1, 1.0)])], KEY)
    with pytest.raises(TamperError, match="route 9 isn't in the tables of entry 6"):
        VerifiedLedger(tmp_path / "l")


def test_what_the_asker_trusts_is_held_against_the_ledger_and_raises_the_level(ledger: Path) -> None:
    replayed = ReplayedHead(ORIGIN, TreeHead(len(ITEMS), mth(DATA)), "L2: replayed")
    trusted = TrustedEvidence(replayed=replayed)
    assert VerifiedLedger(ledger, witnesses=trusted).evidence_level == "L2: replayed"
    assert contributions(VerifiedLedger(ledger, witnesses=trusted)).evidence_level == "L2: replayed"
    assert direct_write_exclusion(ledger, "n", "x", witnesses=trusted).evidence_level == "L2: replayed"
    stated = direct_write_exclusions(VerifiedLedger(ledger, witnesses=trusted), [("n", "x"), ("s", "z")])
    assert [(one.region, one.evidence_level) for one in stated] == [("x", "L2: replayed"), ("z", "L2: replayed")]
    assert [one.evidence_level for one in direct_write_exclusions(ledger, [("n", "x")])] == [LEVEL_0]
    other = TrustedEvidence(replayed=replayed._replace(head=TreeHead(3, bytes(32))))
    for asked in (
        lambda: VerifiedLedger(ledger, witnesses=other),
        lambda: direct_write_exclusion(ledger, "n", "x", witnesses=other),
    ):
        with pytest.raises(TamperError, match="The first 3 entries"):
            asked()
    with pytest.raises(LedgerError, match="The replay was of the log 'another'"):
        VerifiedLedger(ledger, witnesses=TrustedEvidence(replayed=replayed._replace(origin="another")))


def test_another_key_than_the_trusted_one_answers_nothing(ledger: Path) -> None:
    vkey = OTHER.verifier.text
    for asked in (
        lambda: VerifiedLedger(ledger, vkey),
        lambda: contributions(ledger, vkey=vkey),
        lambda: regions_of_class(ledger, "a", vkey=vkey),
        lambda: classes_of_region(ledger, "x", vkey=vkey),
        lambda: list(logged_steps(ledger, vkey=vkey)),
        lambda: direct_write_exclusion(ledger, "n", "x", vkey=vkey),
    ):
        with pytest.raises(TamperError, match="you trust"):
            asked()
    with pytest.raises(RefutedError, match="statement is false"):
        direct_write_exclusion(ledger, "a", "x", vkey=KEY.verifier.text)


def test_a_ledger_without_entries_is_empty(tmp_path: Path) -> None:
    write_signed(tmp_path / "l", [], KEY)
    with pytest.raises(LedgerError, match=r"is empty\. Query it once the run has begun"):
        VerifiedLedger(tmp_path / "l")


def test_a_total_is_of_all_classes_and_there_is_none_where_one_is_sealed() -> None:
    assert total_norm(iter([ContributionSum(norm_sum=1.5), ContributionSum(norm_sum=2.0)])) == 3.5
    assert math.isnan(total_norm(iter([ContributionSum(norm_sum=1.5), ContributionSum(num_sealed=1)])))
    assert total_norm([]) == 0
    assert ContributionSum(norm_sum=1.0).of("a", "x", 0.0).norm_share is None
    assert ContributionSum(norm_sum=1.0).of("a", "x", 0.5).norm_share == 2.0
    assert ContributionSum(norm_sum=1.0).of("a", "x", math.nan).norm_share is None
    assert Contribution("a", "x", 0, 0, 0, 0.0, 0, 0.0, None, None).num_sealed == 0
    assert ContributionSum() == ContributionSum(0, 0, 0, 0.0, 0, 0.0, 0.0, 0)


# ------------------------------------------------------------------------------------------------------ by the tables


def taught_at(derived: DerivedLedger, **asked: Any) -> dict[tuple[str, str, str], ClassTaught]:
    found = taught(derived, **asked)
    by_name = {(one.group, one.contribution.class_name, one.contribution.region): one for one in found}
    assert len(by_name) == len(found)
    return by_name


@needs_duckdb
def test_tables_say_what_the_entries_say_and_when(derived: DerivedLedger) -> None:
    found = taught_at(derived)
    assert list(found) == [("", name, region) for name in CLASSES for region in REGIONS]
    when = {"a": 0, "a&b": 0, "s": 1, "b": 2, "n": 2}
    for (_, name, region), one in found.items():
        given = GIVEN.get((name, region), NOTHING)
        check(one.contribution, contribution(name, region, given, 10.0 if region == "z" else None))
        assert (one.first_step, one.last_step) == ((when[name],) * 2 if given is not NOTHING else (-1, -1))
    assert num_standing(derived) == 3


@needs_duckdb
def test_a_checkpoint_that_was_superseded_had_learnt_what_stood_then(derived: DerivedLedger) -> None:
    [at] = derived.milestones
    found = taught_at(derived, at=at)
    before = contribution("a", "x", (2, 2, 11, 11.0, [1.0, 9.0], 0))
    check(found["", "a", "x"].contribution, before)
    assert (found["", "a", "x"].first_step, found["", "a", "x"].last_step) == (0, 2)
    assert found["", "n", "z"].contribution == contribution("n", "z")
    assert num_standing(derived, at) == 3
    assert steps_taught(derived, "a", at=at) == ((0, 0), (2, 2))
    assert steps_taught(derived, "a") == ((0, 0),), "what stands is asked anew"


@needs_duckdb
def test_each_phase_and_each_policy_has_its_own_totals(derived: DerivedLedger) -> None:
    by_phase = taught_at(derived, each="phase")
    assert {group for group, _, _ in by_phase} == {"early", "late", "2"}, "a phase without a name has its number"
    check(by_phase["early", "a", "y"].contribution, contribution("a", "y", GIVEN["a", "y"], 5.0))
    check(by_phase["late", "s", "x"].contribution, contribution("s", "x", GIVEN["s", "x"]))
    check(by_phase["2", "b", "y"].contribution, contribution("b", "y", GIVEN["b", "y"], 7.0))
    by_policy = taught_at(derived, each="policy")
    assert {group for group, _, _ in by_policy} == {"0", "1"}
    check(by_policy["1", "b", "y"].contribution, contribution("b", "y", GIVEN["b", "y"], 7.0))
    check(by_policy["0", "b", "y"].contribution, contribution("b", "y"))
    assert len(by_policy) == 2 * len(CLASSES) * len(REGIONS)


@needs_duckdb
def test_steps_are_found_by_class_and_region_and_joint_ones_where_they_are_asked_for(derived: DerivedLedger) -> None:
    assert steps_taught(derived) == ((0, 2),)
    assert steps_taught(derived, "b") == ((0, 0), (2, 2))
    assert steps_taught(derived, "b", joint=False) == ((2, 2),)
    assert steps_taught(derived, region="x") == ((0, 1),)
    assert steps_taught(derived, region="z") == ((2, 2),)
    assert steps_taught(derived, "a", "x") == ((0, 0),)
    assert steps_taught(derived, "n", "y") == ()
    for asked in ({"class_name": "x"}, {"region": "a"}):
        with pytest.raises(LedgerError, match="It has "):
            steps_taught(derived, **asked)  # type: ignore[arg-type]


def test_spans_are_those_of_a_loop() -> None:
    for bits in range(1 << 7):
        steps = [step for step in range(7) if bits >> step & 1]
        found = spans_of(np.asarray(steps, np.int64))
        assert [step for first, last in found for step in range(first, last + 1)] == steps
        assert all(a[1] + 1 < b[0] for a, b in pairwise(found))


def test_a_name_that_is_not_asked_for_is_not_required() -> None:
    require(("a", "b"), None, "class")
    require(("a", "b"), "b", "class")
    with pytest.raises(LedgerError, match=r"The ledger has no class 'c'\. It has a, b\."):
        require(("a", "b"), "c", "class")


# ------------------------------------------------------------------------------------------- what changes of policy did


def policy_of(rows: dict[str, list[tuple[list[float], str]]], phases: list[tuple[str, int, int]]) -> dict[str, object]:
    routes = sorted({tuple(weights) for cells in rows.values() for weights, _ in cells})
    return {
        "classes": list(rows),
        "regions": ["x", "y"],
        "routes": [list(route) for route in routes],
        "phases": [list(phase) for phase in phases],
        "policy": [[[weights for weights, _ in cells], [kind for _, kind in cells]] for cells in rows.values()],
        "changes": [],
    }


@needs_duckdb
def test_a_change_of_policy_is_told_cell_by_cell_from_its_step_on(tmp_path: Path) -> None:
    one, half, none = [1.0, 1.0], [0.0, 0.5], [0.0, 0.0]
    plain: dict[str, object] = {"classes": ["a"], "regions": ["x"], "routes": [[1.0]], "changes": []}
    second = policy_of(
        {"a": [(none, "defer"), (half, "gate"), (one, "admit")], "c": [(one, "admit"), (one, "gate"), (half, "gate")]},
        [("past", 0, 3), ("now", 3, 5), ("then", 5, 9)],
    )
    phases = [("p", 0, 2), ("q", 2, 9)]
    third = policy_of({"a": [(none, "admit"), (one, "admit")], "b": [(none, "reject")] * 2}, phases)
    fourth = policy_of({"a": [(one, "admit"), (one, "gate")], "b": [(none, "reject")] * 2}, phases)
    items: list[Item] = [(RunEntry("r", (), details_digest(plain)), plain), *(step(n, 0, []) for n in range(3))]
    items += [(ResumeEntry(3, 4, 1), None)]
    items += [(AmendEntry(3, (), details_digest(told)), told) for told in (plain, second, third, fourth)]
    write_signed(tmp_path / "ledger", items, KEY)
    with open_derived(tmp_path / "ledger") as derived:
        assert policy_effects(derived) == (
            PolicyEffect(2, "a", "", "x", "now", None, 0.0, "", "gate"),
            PolicyEffect(2, "a", "", "y", "now", None, 0.5, "", "gate"),
            PolicyEffect(2, "c", "", "x", "now", None, 1.0, "", "gate"),
            PolicyEffect(2, "c", "", "y", "now", None, 1.0, "", "gate"),
            PolicyEffect(2, "a", "", "x", "then", None, 1.0, "", "admit"),
            PolicyEffect(2, "a", "", "y", "then", None, 1.0, "", "admit"),
            PolicyEffect(2, "c", "", "x", "then", None, 0.0, "", "gate"),
            PolicyEffect(2, "c", "", "y", "then", None, 0.5, "", "gate"),
            PolicyEffect(3, "a", "", "x", "q", 0.0, 1.0, "gate", "admit"),
            PolicyEffect(3, "a", "", "y", "q", 0.5, 1.0, "gate", "admit"),
            PolicyEffect(3, "c", "", "x", "q", 1.0, None, "gate", ""),
            PolicyEffect(3, "c", "", "y", "q", 1.0, None, "gate", ""),
            PolicyEffect(3, "b", "", "x", "q", None, 0.0, "", "reject"),
            PolicyEffect(3, "b", "", "y", "q", None, 0.0, "", "reject"),
            PolicyEffect(4, "a", "", "x", "q", 1.0, 1.0, "admit", "gate"),
            PolicyEffect(4, "a", "", "y", "q", 1.0, 1.0, "admit", "gate"),
        )


@needs_duckdb
def test_where_no_policy_takes_a_policys_place_all_its_cells_are_told(tmp_path: Path) -> None:
    one, none = [1.0, 1.0], [0.0, 0.0]
    plain: dict[str, object] = {"classes": ["a"], "regions": ["x"], "routes": [[1.0]], "changes": []}
    phases = [("past", 0, 2), ("now", 2, 5), ("then", 5, 9)]
    first = policy_of({"a": [(one, "admit"), (none, "reject"), (one, "gate")]}, phases)
    items: list[Item] = [(RunEntry("r", (), details_digest(first)), first)]
    items += [*(step(n, 0, []) for n in range(3)), (ResumeEntry(3, 4, 1), None)]
    items += [(AmendEntry(3, (), details_digest(told)), told) for told in (plain, plain, first)]
    write_signed(tmp_path / "ledger", items, KEY)
    denied, gated = (("now", 0.0, "reject"), ("then", 1.0, "gate"))
    every = [(region, *cell) for cell in (denied, gated) for region in "xy"]
    with open_derived(tmp_path / "ledger") as derived:
        assert policy_effects(derived) == (
            *(PolicyEffect(1, "a", "", region, phase, had, None, did, "") for region, phase, had, did in every),
            *(PolicyEffect(3, "a", "", region, phase, None, had, "", did) for region, phase, had, did in every),
        )
    said = CliRunner().invoke(app, ["ledger", "policy-effect", str(tmp_path)]).output
    assert "  a in x, now: 0 (reject) -> no policy: allowed; 0 rows in 0 steps before, 0 in 0 after\n" in said
    assert "  a in y, then: no policy: allowed -> 1 (gate); 0 rows in 0 steps before, 0 in 0 after\n" in said
