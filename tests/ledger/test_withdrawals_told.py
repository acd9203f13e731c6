"""What tables say of withdrawals is read as the contract has it, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from cosmati.ledger.vouched import Taken, read_withdrawals

ONE: dict[str, Any] = {
    "target": "data/open/news/source/1",
    "class": "open/news",
    "reason": "consent",
    "because": "it was taken back",
    "action": "reject",
    "step": 3,
}


def told(**changes: object) -> dict[str, Any]:
    return {"withdrawn": {"in_force": [ONE, ONE | changes]}}


def test_withdrawals_are_read_in_their_order() -> None:
    assert read_withdrawals({}) == ()
    found = read_withdrawals(told(step=5, action="stop"))
    assert found == (Taken(ONE["target"], "open/news", "reject", 3), Taken(ONE["target"], "open/news", "stop", 5))
    prepared = told(of="tokenizer", action="skip", root="ab", deletion="cd")
    assert read_withdrawals(prepared)[1] == Taken(ONE["target"], "open/news", "skip", 3, "tokenizer")


@pytest.mark.parametrize("name", ["target", "class", "reason", "because", "of", "root", "deletion"])
@pytest.mark.parametrize("value", [3, None, ["x"]])
def test_words_that_are_no_text_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match="isn't a list of target, class, action and step"):
        read_withdrawals(told(**{name: value}))


@pytest.mark.parametrize(
    "changes",
    [
        {"action": "skip"},
        {"action": "reject", "of": "tokenizer"},
        {"action": "admit"},
        {"step": True},
        {"step": 3.0},
        {"class": "open"},
        {"target": "data/open/source/1"},
    ],
)
def test_what_the_contract_does_not_have_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="isn't a list of target, class, action and step"):
        read_withdrawals(told(**changes))


@pytest.mark.parametrize("withdrawn", [[], {}, {"in_force": []}, {"in_force": [3]}, {"in_force": "x"}, 3])
def test_a_list_of_none_is_no_list(withdrawn: object) -> None:
    with pytest.raises(ValueError, match="isn't a list"):
        read_withdrawals({"withdrawn": withdrawn})
