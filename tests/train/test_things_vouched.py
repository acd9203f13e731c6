"""What follows for each thing of a run from what an authority says, and in which words it's put on record."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from cosmati.core.plan import Promise
from cosmati.train.vouched_things import EVALUATION_DATA, POLICY, News, deletion, holds, of_thing, targets, without


@pytest.mark.parametrize(
    ("answer", "of", "expected"),
    [
        ("stop", "", "stop"),
        ("reject", "", "reject"),
        ("stop", POLICY, "stop"),
        ("reject", POLICY, "stop"),
        ("reject", "tokenizer t", "stop"),
        ("reject", f"{EVALUATION_DATA} held out", "skip"),
        ("stop", f"{EVALUATION_DATA} held out", "stop"),
    ],
)
def test_of_data_a_class_can_be_left_out_and_of_other_things_no_part(answer: Any, of: str, expected: str) -> None:
    assert of_thing(answer, of) == expected


@dataclass
class Voucher:
    keyids: tuple[str, ...] = ("k" * 20, "m" * 20)
    expires: str = "2027"
    others: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("of", "others", "said"),
    [
        (POLICY, ("2",), ""),
        ("", (), " until 2027"),
        ("", ("2",), " until 2027, as version 2 is"),
        ("tokenizer t", ("2", "3"), " until 2027, as version 2, 3 is"),
    ],
)
def test_who_signed_and_until_when_is_put_in_words(of: str, others: tuple[str, ...], said: str) -> None:
    given: Any = Voucher(others=others)
    assert holds(of, given) == f"signed by {'k' * 12}, {'m' * 12}{said}"


def guarantee(promise: Promise, pair: tuple[str, str] | None, *, is_held: bool = True) -> Any:
    return SimpleNamespace(promise=promise, pair=pair, holds=is_held)


def test_what_a_class_alone_has_taught_is_deleted_with_its_region() -> None:
    guarantees = [
        guarantee(Promise.NO_DIRECT_WRITE, ("a", "shared")),
        guarantee(Promise.ISOLATED, ("a", "own")),
        guarantee(Promise.ISOLATED, ("a", "also")),
        guarantee(Promise.ISOLATED, ("b", "lost"), is_held=False),
        guarantee(Promise.RESUME, None),
    ]
    assembly: Any = SimpleNamespace(plan=SimpleNamespace(guarantees=guarantees))
    said = deletion(assembly, "a")
    assert said.startswith("What it has taught is in own, also alone, while the plan promises isolated(a, own): ")
    assert "drop_isolated(model, 'a') deletes it" in said
    for other in ("b", "c"):
        assert deletion(assembly, other) == "What it has taught is only gone from a run that is begun again without it."


def test_only_what_was_not_known_to_be_lost_is_news() -> None:
    lost: Any = {"a": 1, ("b", 2): 2, "c": 3}
    assert without(lost, {"a", "x"}) == [(("b", 2), 2), ("c", 3)]
    assert without(lost, lost) == []
    given: Any = SimpleNamespace(vouchers=[SimpleNamespace(target="t1")], lost=[SimpleNamespace(target="t2")])
    assert targets(given) == {"t1", "t2"}


@dataclass(frozen=True)
class Artifact:
    label: str
    vouched: object


def test_facts_are_renewed_where_something_was_said_of_them() -> None:
    was: Any = SimpleNamespace(artifacts=(Artifact("one", "old"), Artifact("two", "old")))
    always = {"withdrawn": None, "policy": "in force"}
    for vouched, more in (
        ({}, {}),
        ({"": "data"}, {"vouched": "data"}),
        ({POLICY: "signed"}, {"vouched_policy": "signed"}),
        ({"two": "new"}, {"artifacts": (Artifact("one", "old"), Artifact("two", "new"))}),
        (
            {"": "data", "one": "new"},
            {"vouched": "data", "artifacts": (Artifact("one", "new"), Artifact("two", "old"))},
        ),
    ):
        given: Any = vouched
        news: Any = News((), given, None, "in force")  # type: ignore[arg-type]
        assert news.facts(was) == always | more
