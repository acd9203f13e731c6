"""What was withdrawn in mid-run stays so in each later table, and data that were vouched for are the run's data."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from cosmati.errors import TamperError
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.verify import verify_ledger
from cosmati.ledger.writer import details_digest
from cosmati.records.ledger import AmendEntry, ResumeEntry, RunEntry

from .ledgers import ORIGIN, digest
from .test_amend import Policy
from .test_verify import Item, write_signed

KEY = SigningKey.generate(ORIGIN)
ADMITTED, REJECTED = ([1.0], "admit"), ([0.0], "reject")
BEFORE = Policy("p", ["all"], {"a": [ADMITTED, ADMITTED], "b": [ADMITTED, ADMITTED]})
WITHOUT_A = Policy("p", ["all"], {"a": [ADMITTED, REJECTED], "b": [ADMITTED, ADMITTED]})
WITHOUT_BOTH = Policy("p", ["all"], {"a": [ADMITTED, REJECTED], "b": [ADMITTED, REJECTED]})


def taken(class_name: str = "a", action: str = "reject", step: int = 4, **more: Any) -> dict[str, Any]:
    told = {"target": f"t/{class_name}/s/1", "class": class_name, "reason": "licence", "because": "it ended"}
    return told | {"action": action, "step": step} | more


def withdrawn(*in_force: Any) -> dict[str, Any]:
    return {"withdrawn": {"seen": "2026-01-01T00:00:00+00:00", "in_force": list(in_force), "archive": {}}}


def ledger(*later: Item) -> list[Item]:
    """Three steps, and an amendment before step 3."""
    return [BEFORE.run(), *(BEFORE.step(step) for step in range(3)), (ResumeEntry(3, 4, 1), None), *later]


def steps(policy: Policy, first: int, end: int, attempt: int = 1) -> list[Item]:
    return [policy.step(step, attempt) for step in range(first, end)]


def refused(folder: Path, items: list[Item]) -> str:
    write_signed(folder / "l", items, KEY)
    with pytest.raises(TamperError) as caught:
        verify_ledger(folder / "l")
    return str(caught.value)


def test_a_class_is_rejected_from_its_step_on(tmp_path: Path) -> None:
    items = ledger(WITHOUT_A.amend(3, **withdrawn(taken())), *steps(WITHOUT_A, 3, 6))
    write_signed(tmp_path / "l", items, KEY)
    report = verify_ledger(tmp_path / "l")
    assert [step for step, facts in report.withdrawn_from if facts] == [3]
    assert report.withdrawn[0]["in_force"] == [taken()]


def test_a_policy_has_to_say_so_too(tmp_path: Path) -> None:
    said = refused(tmp_path, ledger(BEFORE.amend(3, **withdrawn(taken())), *steps(BEFORE, 3, 6)))
    assert "'a'" not in said
    assert "a is rejected from step 4 on, and its policy says admit" in said


@pytest.mark.parametrize("step", [3, 5])
def test_from_the_very_step(tmp_path: Path, step: int) -> None:
    items = ledger(WITHOUT_A.amend(3, **withdrawn(taken(step=step))), *steps(WITHOUT_A, 3, 4))
    assert f"rejected from step {step} on" in refused(tmp_path, items)


def test_a_rejected_class_comes_never_back(tmp_path: Path) -> None:
    again = [(ResumeEntry(5, 8, 2), None), BEFORE.amend(5), *steps(BEFORE, 5, 6, 2)]
    items = ledger(WITHOUT_A.amend(3, **withdrawn(taken())), *steps(WITHOUT_A, 3, 5), *again)
    assert "a was rejected from step 4 on, and isn't any more" in refused(tmp_path, items)


def test_nor_later_than_it_was_said(tmp_path: Path) -> None:
    late = Policy("p", ["all"], {"a": [ADMITTED, REJECTED], "b": [ADMITTED, ADMITTED]})
    late.details["phases"] = [["warm", 0, 7], ["main", 7, 400]]
    again = [(ResumeEntry(4, 7, 2), None), late.amend(4, **withdrawn(taken(step=7)))]
    items = ledger(WITHOUT_A.amend(3, **withdrawn(taken())), *steps(WITHOUT_A, 3, 4), *again)
    assert "isn't any more" in refused(tmp_path, items)


def test_another_class_may_follow(tmp_path: Path) -> None:
    more = [(ResumeEntry(4, 7, 2), None), WITHOUT_BOTH.amend(4, **withdrawn(taken(), taken("b")))]
    items = ledger(
        WITHOUT_A.amend(3, **withdrawn(taken())), *steps(WITHOUT_A, 3, 4), *more, *steps(WITHOUT_BOTH, 4, 6, 2)
    )
    write_signed(tmp_path / "l", items, KEY)
    assert [len(facts["in_force"]) for facts in verify_ledger(tmp_path / "l").withdrawn] == [1, 2]


def test_no_step_stands_after_a_stop_that_is_not_lifted(tmp_path: Path) -> None:
    stop = BEFORE.amend(3, **withdrawn(taken(action="stop", step=5)))
    write_signed(tmp_path / "stopped", ledger(stop, *steps(BEFORE, 3, 5)), KEY)
    verify_ledger(tmp_path / "stopped")
    lifted = [(ResumeEntry(5, 8, 2), None), BEFORE.amend(5), *steps(BEFORE, 5, 7, 2)]
    write_signed(tmp_path / "lifted", ledger(stop, *steps(BEFORE, 3, 5), *lifted), KEY)
    verify_ledger(tmp_path / "lifted")
    assert "should have stopped before it" in refused(tmp_path, ledger(stop, *steps(BEFORE, 3, 6)))


@pytest.mark.parametrize(
    "told",
    [
        {"withdrawn": []},
        {"withdrawn": {"in_force": "a"}},
        {"withdrawn": {"in_force": []}},
        withdrawn(3),
        withdrawn(taken(step="4")),
        withdrawn(taken(step=True)),
        withdrawn(taken(action="admit")),
        withdrawn(taken(target="t/b/s/1")),
        withdrawn({"class": "a"}),
    ],
)
def test_what_breaks_the_contract_is_refused(tmp_path: Path, told: dict[str, Any]) -> None:
    assert "what was withdrawn" in refused(tmp_path, ledger(WITHOUT_A.amend(3, **told)))


def test_without_a_policy_nothing_can_be_rejected(tmp_path: Path) -> None:
    assert "no policy that says so" in refused(tmp_path, ledger(BEFORE.amend(3, policy=[], **withdrawn(taken()))))


# ------------------------------------------------------------------------------------------ the data

TEXT = json.dumps([[["11", "a", 0, "1"], ["22", "b", 0, "1/2"]], [3, True]])
SOURCES = [
    {"target": "t/a/first/1", "index_sha256": "11"},
    {"target": "t/b/second/1", "index_sha256": "22"},
]


def run_with(text: object, sources: object, *, committed: str = TEXT) -> Item:
    details = BEFORE.details | {"data_text": text, "provenance": {"sources": sources}}
    return RunEntry("r", commitments(committed), details_digest(details)), details


def commitments(text: str) -> tuple[tuple[str, bytes], ...]:
    data = hashlib.sha256(hashlib.sha256(text.encode()).hexdigest().encode()).digest()
    return (("data", data), ("policy", digest("p")))


def test_the_data_are_those_that_were_vouched_for(tmp_path: Path) -> None:
    write_signed(tmp_path / "l", [run_with(TEXT, SOURCES)], KEY)
    verify_ledger(tmp_path / "l")


def test_what_is_lost_needs_no_voucher_any_more(tmp_path: Path) -> None:
    """And what else stands is the run's data still."""
    for name, sources in (("lost", SOURCES[1:]), ("moved", [{**SOURCES[1], "index_sha256": "33"}])):
        told = {"data_text": TEXT, "provenance": {"sources": sources}, "changes": []} | withdrawn(taken())
        details = WITHOUT_A.details | told
        amend = AmendEntry(3, commitments(TEXT), details_digest(details)), details
        if name == "lost":
            write_signed(tmp_path / name, ledger(amend), KEY)
            verify_ledger(tmp_path / name)
        else:
            assert "isn't among the data" in refused(tmp_path, ledger(amend))


OTHERS: dict[str, tuple[object, object, str]] = {
    "other data": (TEXT.replace("22", "33"), SOURCES, "commits to other data than it names"),
    "nobody's source": (TEXT, SOURCES[:1], "nobody has vouched for the data with the index 22"),
    "another class": (TEXT, [SOURCES[0], {**SOURCES[1], "target": "t/a/second/1"}], "isn't among the data"),
    "another source": (TEXT, [*SOURCES, {"target": "t/a/third/1", "index_sha256": "33"}], "isn't among the data"),
    "no list": (TEXT, {"a": 1}, "can't be read"),
    "no index": (TEXT, [{"target": "t/a/first/1"}], "can't be read"),
    "no text": (["a"], SOURCES, "can't be read"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_data_are_told(tmp_path: Path, what: str) -> None:
    text, sources, said = OTHERS[what]
    assert said in refused(tmp_path, [run_with(text, sources)])


def test_an_earlier_release_has_tied_nothing(tmp_path: Path) -> None:
    details = BEFORE.details | {"provenance": {"sources": SOURCES}}
    first = RunEntry("r", BEFORE.commitments, details_digest(details)), details
    write_signed(tmp_path / "l", [first], KEY)
    verify_ledger(tmp_path / "l")
