"""Why a signature doesn't allow a change of the policy: field by field, and at the edges of numbers and steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cosmati.train import policy_change
from cosmati.train.policy_change import _loosens, _missing, is_anothers, refuse_anothers

WAS = {"text": {}, "root": "ab" * 32, "number": 3}
STATEMENT = {"run": "key of the run", "previous": "cd" * 32, "from_step": 7}
A: Any = SimpleNamespace()


def vouched(*, number: int = 4, keyids: tuple[str, ...] = ("k1",), **statement: Any) -> Any:
    said = {name: value for name, value in (STATEMENT | statement).items() if value is not None}
    voucher = SimpleNamespace(target=f"policy/main/{number}", keyids=keyids)
    return SimpleNamespace(statement=said, voucher=voucher, number=number)


def change(old: float, new: float) -> Any:
    return SimpleNamespace(old_weight=old, new_weight=new)


@pytest.fixture(autouse=True)
def run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_change, "_run_of", lambda _: "key of the run")


def missing(of: Any, *loosened: Any, step: int = 7) -> str:
    return _missing(of, WAS, "cd" * 32, loosened, A, step)


@pytest.mark.parametrize(
    ("of", "step", "why"),
    [
        (vouched(), 7, ""),
        (vouched(), 8, ""),
        (vouched(from_step=0), 7, ""),
        (vouched(), 6, "may act from step 7 on, and the run is at step 6"),
        (vouched(from_step="7"), 7, "may act from step 7 on"),
        (vouched(from_step=None), 7, "may act from step None on"),
        (vouched(number=3), 7, "policy/main/3 isn't the version after number 3"),
        (vouched(number=5), 7, "policy/main/5 isn't the version after number 3"),
        (vouched(run="another"), 7, "was signed for the run another, and here that is key of the run"),
        (vouched(run=None), 7, "was signed for the run (none)"),
        (vouched(previous="ef" * 32), 7, f"was signed for the previous {'ef' * 32}, and here that is {'cd' * 32}"),
        (None, 7, "the authority that signed the policy before hasn't signed this one"),
    ],
)
def test_each_thing_that_was_signed_has_to_be_so(of: Any, step: int, why: str) -> None:
    found = missing(of, step=step)
    assert why in found
    assert bool(found) == bool(why)


def test_what_was_denied_is_admitted_again_by_two() -> None:
    both = vouched(keyids=("k1", "k2"))
    for loosened in ([change(0.5, 1.0)], [change(0.5, 1.0), change(0.25, 0.5)], [change(0.0, 0.0)]):
        assert missing(vouched(), *loosened) == missing(both, *loosened) == ""
    for loosened in ([change(0.0, 0.5)], [change(0.5, 1.0), change(0.0, 1.0)]):
        assert "which takes two signers, and one has signed" in missing(vouched(), *loosened)
        assert missing(both, *loosened) == ""


def test_a_policy_of_another_run_is_known() -> None:
    def policy(**statement: Any) -> Any:
        return SimpleNamespace(vouched=SimpleNamespace(statement=statement, voucher=SimpleNamespace(target="t")))

    declared: Any = SimpleNamespace(vouched=None)
    for own in (declared, policy(), policy(run="key of the run")):
        assert not is_anothers(own, A)
        refuse_anothers(own, A)
    refuse_anothers(None, A)
    assert is_anothers(policy(run="another"), A)
    with pytest.raises(policy_change.CheckpointError, match="change of the run another, and this is key of the run"):
        refuse_anothers(policy(run="another"), A)


@pytest.mark.parametrize(("num", "told"), [(1, "0. Only"), (4, "0; 1; 2; 3. Only"), (5, "0; 1; 2; 3 and 1 more. Only")])
def test_four_things_are_named(num: int, told: str) -> None:
    said = str(_loosens(WAS, 7, [str(n) for n in range(num)], "why"))
    assert f"abababababab has signed (number 3): {told} that authority may, and why." in said
    assert said.startswith("From step 7 on, ")
