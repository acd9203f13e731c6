"""Which reason each proposed row's decision has, and how many rows it is about, by counting a ledger made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cosmati.errors import LedgerError
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import PolicyFile
from cosmati.routing.proposals import Proposal, _because, _in_turn, _policy_of, _reason, proposals

NO_TEXT = ("the ledger doesn't hold the policy's text",)
TEXT: dict[str, Any] = {
    "version": 1,
    "taxonomy": "t",
    "phases": [{"name": "warm", "until": "4ba"}, {"name": "main"}],
    "regions": {"head": {"params": ["1.*"]}, "body": {"params": ["0.*"]}},
    "measures": {"trust": {"grades": ["low", "high"]}},
    "attenuate": [{"class": "a", "measure": "trust", "grade": "low", "factor": 0.5, "region": "head"}],
    "rules": [{"class": "a", "weight": 1}, {"class": "b", "phase": "warm", "decision": "defer"}],
}
POLICY = PolicyFile.model_validate(TEXT)
DEFAULT = "the default (no rule covers the cell, and the default is reject)"
ONLY = "it's the only rule that covers the cell"


def tables(index: int = 0, step: int | None = None, **changed: Any) -> Any:
    """Return tables with two classes and two bands; each row of the policy has another decision."""
    decisions = [[((), f"{index}{row}{phase}") for phase in "wm"] for row in range(4)]
    usual = {
        "index": index,
        "entry": SimpleNamespace() if step is None else SimpleNamespace(step=step),
        "classes": ("a", "b"),
        "bands": ("low", "high"),
        "kinds": (),
        "phases": ((0, 4), (4, 10)),
        "policy": decisions,
        "withdrawn": (),
        "details": {"phases": [["warm", 0, 4], ["main", 4, 10]]},
        "row_of": lambda cell, item: cell.class_id * 2 + cell.band,
    }
    return SimpleNamespace(**usual | changed)


def ledger(every: list[Any], steps: list[tuple[int, Any, list[tuple[int, int, int, int]]]]) -> Any:
    """Return a ledger of steps, each with its index, tables and cells: class, band, phase and rows."""
    found = [
        (
            SimpleNamespace(index=index),
            SimpleNamespace(
                microbatches=[SimpleNamespace(class_id=c, band=b, phase=p, num_rows=n) for c, b, p, n in cells]
            ),
            own,
        )
        for index, own, cells in steps
    ]
    standing = {index for index, _, _ in steps if index != 99}
    return SimpleNamespace(tables=every, classes=("a", "b"), steps=lambda: iter(found), standing=standing)


def test_rows_are_counted_by_tables_class_band_and_phase_where_their_steps_stand() -> None:
    first, second = tables(), tables(7, 6)
    made = ledger(
        [first, second],
        [
            (1, first, [(0, 0, 0, 5), (0, 1, 0, 7), (1, 1, 0, 0)]),
            (2, first, [(0, 0, 0, 11), (1, 0, 1, 13)]),
            (99, first, [(0, 0, 0, 1000)]),
            (8, second, [(0, 0, 1, 17), (1, 1, 1, 19)]),
        ],
    )
    counts = {
        (0, "a", "low", 0): (2, 16),
        (0, "a", "high", 0): (1, 7),
        (0, "b", "high", 0): (1, 0),
        (0, "b", "low", 4): (1, 13),
        (7, "a", "low", 6): (1, 17),
        (7, "b", "high", 6): (1, 19),
    }
    expected = []
    for index, start, end, phase in ((0, 0, 4, "w"), (0, 4, 6, "m"), (7, 6, 10, "m")):
        for row, (name, kind) in enumerate([("a", "low"), ("a", "high"), ("b", "low"), ("b", "high")]):
            num = counts.get((index, name, kind, start), (0, 0))
            expected.append(Proposal(name, kind, start, end, f"{index}{row}{phase}", *num, NO_TEXT))
    assert proposals(made) == expected
    assert proposals(made, "b") == [one for one in expected if one.class_name == "b"]


def test_each_kind_and_phase_has_the_reason_of_its_own() -> None:
    told = {"policy_text": TEXT, "phases": [["warm", 0, 4], ["main", 4, 10]]}
    graded = tables(bands=("low", "high"), kinds=((0, {"trust": "low"}), (0, {"trust": "high"})), details=told)
    found = {(one.class_name, one.kind, one.start_step): one.because for one in proposals(ledger([graded], []))}
    for start in (0, 4):
        assert [len(found["a", kind, start]) for kind in ("low", "high")] == [2, 1]
    for kind in ("low", "high"):
        assert found["b", kind, 0][0].startswith("class b, phase warm: defer (")
        assert found["b", kind, 4] == (DEFAULT,)


def test_phases_of_which_no_step_stands_are_left_out() -> None:
    for step, spans in (
        (4, [(0, 0, 4), (1, 4, 10)]),
        (3, [(0, 0, 3), (1, 3, 4), (1, 4, 10)]),
        (0, [(1, 0, 4), (1, 4, 10)]),
    ):
        found = proposals(ledger([tables(), tables(1, step)], []))
        assert list(dict.fromkeys((int(one.decision[0]), one.start_step, one.end_step) for one in found)) == spans


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([None], [(0, 0, 10)]),
        ([None, 4], [(0, 0, 4), (1, 4, 10)]),
        ([None, 4, 4], [(0, 0, 4), (2, 4, 10)]),
        ([None, 6, 3], [(0, 0, 3), (2, 3, 10)]),
        ([None, 2, 6, 4], [(0, 0, 2), (1, 2, 4), (3, 4, 10)]),
        ([None, 2, 0], [(2, 0, 10)]),
    ],
)
def test_what_a_resume_supersedes_is_not_among_what_stands(
    steps: list[int | None], expected: list[tuple[int, int, int]]
) -> None:
    every = [tables(index, step) for index, step in enumerate(steps)]
    assert [(one.index, begin, end) for one, begin, end in _in_turn(every)] == expected


def test_the_run_ends_where_the_last_phase_of_what_stands_does() -> None:
    longer = tables(1, 2, phases=((0, 30), (30, 20)))
    assert [(begin, end) for _, begin, end in _in_turn([tables(), longer])] == [(0, 2), (2, 30)]


def test_a_run_without_a_policy_and_a_class_that_is_not_there_are_refused() -> None:
    with pytest.raises(LedgerError, match=r"^The run has no policy: all its rows were admitted\."):
        proposals(ledger([tables(policy=())], []))
    with pytest.raises(LedgerError, match=r"^The ledger has no class 'c'\. It has a, b\.$"):
        proposals(ledger([tables()], []), "c")


def test_a_policy_is_read_from_its_text_where_that_is_one() -> None:
    assert _policy_of(tables(details={"policy_text": TEXT})) == POLICY
    for details in ({}, {"policy_text": None}, {"policy_text": {"version": 1}}):
        assert _policy_of(tables(details=details)) is None


def taken(name: str, action: str, step: int, target: str = "t/a/s/1") -> Any:
    return SimpleNamespace(class_name=name, action=action, step=step, target=target)


@pytest.mark.parametrize(
    ("withdrawn", "name", "phase", "target"),
    [
        ((taken("a", "reject", 4),), "a", 1, "t/a/s/1"),
        ((taken("a", "reject", 3),), "a", 1, "t/a/s/1"),
        ((taken("a", "reject", 5),), "a", 1, None),
        ((taken("a", "reject", 4),), "a", 0, None),
        ((taken("a", "stop", 4),), "a", 1, None),
        ((taken("b", "reject", 4),), "a", 1, None),
        ((taken("b", "reject", 4, "t/b/s/2"),), "a&b", 1, "t/b/s/2"),
        ((taken("a", "stop", 1), taken("a", "reject", 4, "first"), taken("a", "reject", 2, "second")), "a", 1, "first"),
    ],
)
def test_rows_that_nobody_vouches_for_say_so_before_all_else(
    withdrawn: tuple[Any, ...], name: str, phase: int, target: str | None
) -> None:
    for policy in (None, POLICY):
        found = _because(tables(withdrawn=withdrawn), policy, name, 0, phase)
        if target is not None:
            [step] = [one.step for one in withdrawn if one.target == target]
            assert found == (f"nobody vouches for {target} any more, from step {step} on",)
        elif policy is None:
            assert found == NO_TEXT
        else:
            assert "vouches" not in " ".join(found)


def test_regions_with_one_reason_are_named_together_and_alone_it_has_no_name() -> None:
    graded = tables(kinds=((0, {"trust": "low"}), (0, {"trust": "high"}), (0, {})))
    rule = f"class a: weight 1 ({ONLY}"
    lowered = f"head: {rule}; times 0.5, for trust low: the least factor of 1); class a, "
    [body, head] = _because(graded, POLICY, "a", 0, 1)
    assert body == f"body: {rule})"
    assert head.startswith(lowered.removesuffix("class a, "))
    assert head.count("; class a") == 1, "the attenuation is told in words"
    assert _because(graded, POLICY, "a", 1, 1) == (f"{rule})",)
    assert "times 0.5, for trust unmeasured" in _because(graded, POLICY, "a", 2, 1)[1]
    assert _because(graded, POLICY, "b", 1, 1) == (DEFAULT,)
    joint = _because(tables(classes=("a", "b", "a&b")), POLICY, "a&b", 0, 1)
    assert [one.partition(" (")[0] for one in joint] == ["the default"], "the least of its members"
    three = PolicyFile.model_validate(
        TEXT
        | {
            "regions": TEXT["regions"] | {"tail": {"params": ["2.*"]}},
            "rules": [{"class": "a", "region": "head", "weight": 1}],
        }
    )
    found = _because(graded, three, "a", 1, 1)
    assert found == (f"body, tail: {DEFAULT}", f"head: class a, region head: weight 1 ({ONLY})")
    alone = {name: value for name, value in TEXT.items() if name not in ("regions", "attenuate", "measures")}
    assert _because(tables(), PolicyFile.model_validate(alone), "a", 0, 1) == (f"{rule})",)


def test_a_phase_that_was_cut_has_the_reasons_of_its_own_whole() -> None:
    cut = tables(
        details={"phases": [["warm"], ["warm from 3"], ["main"], ["warmer"]]}, phases=((0, 3), (3, 4), (4, 9), (9, 10))
    )
    found = [_because(cut, POLICY, "b", 0, phase) for phase in range(4)]
    assert found[0] == found[1]
    assert found[0][0].startswith("class b, phase warm: defer (")
    assert found[2] == (DEFAULT,)
    assert found[3][0].startswith("it can't be explained: There's no phase 'warmer'")


def test_a_reason_is_a_rule_in_words_or_why_there_is_none() -> None:
    taxonomy = Taxonomy("t", "of the ledger", (("a", ""), ("b", "")))
    low = {"trust": "low"}
    assert _reason(POLICY, ("a", "body", "main", ""), {}, taxonomy) == f"class a: weight 1 ({ONLY})"
    assert _reason(POLICY, ("b", "body", "main", ""), low, taxonomy) == DEFAULT
    assert _reason(POLICY, ("a", "nowhere", "main", ""), {}, taxonomy).startswith(
        "it can't be explained: There's no region"
    )
    lowered = _reason(POLICY, ("a", "head", "main", ""), low, taxonomy)
    assert lowered.split("; ")[0] == f"class a: weight 1 ({ONLY}"
    assert len(lowered.split("; ")) == 3
    assert not lowered.endswith(")")
