"""What is told of proposed rows from ledgers that say little of their policy, or that took a class away in mid-run."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rfc8785

from cosmati.errors import LedgerError
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.query import VerifiedLedger
from cosmati.routing.policy_file import PolicyFile
from cosmati.routing.proposals import Proposal, _because, proposals
from tests.ledger.ledgers import ORIGIN
from tests.ledger.test_amend import FIRST, Policy, amended
from tests.ledger.test_verify import Item, write_signed
from tests.ledger.test_withdrawn import BEFORE, WITHOUT_A, ledger, steps, taken, withdrawn

KEY = SigningKey.generate(ORIGIN)
NO_TEXT = ("the ledger doesn't hold the policy's text",)
TEXT: dict[str, Any] = {
    "version": 1,
    "taxonomy": "t",
    "phases": [{"name": "warm", "until": "4ba"}, {"name": "main"}],
    "regions": {"all": {"params": ["*"]}},
    "rules": [{"class": "**", "weight": 1}],
}


def told(folder: Path, items: list[Item], class_name: str = "") -> list[Proposal]:
    write_signed(folder / "l", items, KEY)
    return proposals(VerifiedLedger(folder / "l"), class_name)


def with_text(policy: Policy, **changed: Any) -> Policy:
    policy = Policy("p", ["all"], policy.cells)
    text = policy.details["policy_text"] = TEXT | changed
    policy.digest = hashlib.sha256(rfc8785.dumps(text)).digest()
    return policy


def test_each_class_and_phase_is_told_without_the_policys_text(tmp_path: Path) -> None:
    found = told(tmp_path, [FIRST.run(), *(FIRST.step(step) for step in range(6))])
    assert [(one.class_name, one.start_step, one.end_step, one.decision) for one in found] == [
        *(("a", 0, 4, "admit"), ("b", 0, 4, "admit"), ("c", 0, 4, "defer")),
        *(("a", 4, 400, "admit"), ("b", 4, 400, "gate"), ("c", 4, 400, "admit")),
    ]
    assert [(one.num_microbatches, one.num_rows) for one in found] == [(4, 8), (4, 8), (4, 0), (2, 4), (2, 4), (2, 4)]
    assert {one.because for one in found} == {NO_TEXT}


def test_superseded_steps_and_what_was_in_force_for_them_do_not_count(tmp_path: Path) -> None:
    found = {(one.class_name, one.start_step): one for one in told(tmp_path, amended())}
    assert {place: (one.end_step, one.num_microbatches) for place, one in found.items()} == {
        **dict.fromkeys([("a", 0), ("b", 0), ("c", 0)], (3, 3)),
        **dict.fromkeys([("a", 3), ("b", 3), ("new", 3)], (4, 1)),
        **dict.fromkeys([("a", 4), ("b", 4), ("new", 4)], (400, 2)),
    }
    assert (found["b", 0].decision, found["b", 3].decision, found["new", 4].decision) == ("admit", "gate", "reject")


def test_one_class_is_told_alone_and_no_other_is_known(tmp_path: Path) -> None:
    items = [FIRST.run(), FIRST.step(0)]
    assert [(one.class_name, one.start_step) for one in told(tmp_path, items, "b")] == [("b", 0), ("b", 4)]
    with pytest.raises(LedgerError, match=r"no class 'd'\. It has a, b, c"):
        proposals(VerifiedLedger(tmp_path / "l"), "d")


@pytest.mark.parametrize("has_text", [False, True])
def test_a_class_that_was_taken_away_is_so_from_its_step_on(tmp_path: Path, has_text: bool) -> None:
    before, after = (with_text(one) if has_text else one for one in (BEFORE, WITHOUT_A))
    items: list[Item] = [before.run(), *(before.step(step) for step in range(3)), *ledger()[4:]]
    items += [after.amend(3, **withdrawn(taken(), taken("b", "stop"))), *steps(after, 3, 4)]
    found = {(one.class_name, one.start_step): one for one in told(tmp_path, items)}
    assert found["a", 4].decision == "reject"
    assert found["a", 4].because == ("nobody vouches for t/a/s/1 any more, from step 4 on",)
    for place in [("a", 0), ("b", 0), ("a", 3), ("b", 3), ("b", 4)]:  # What stops a run takes no class away.
        assert found[place].decision == "admit"
        assert (found[place].because == NO_TEXT) is not has_text
        assert "vouches" not in found[place].because[0]


def test_a_text_that_says_nothing_of_a_phase_is_no_reason(tmp_path: Path) -> None:
    policy = with_text(BEFORE, phases=[{"name": "early", "until": "4ba"}, {"name": "late"}])
    found = told(tmp_path, [policy.run(), policy.step(0)], "a")
    assert [one.because[0].split(":")[0] for one in found] == ["it can't be explained"] * 2


def test_a_phase_that_was_cut_in_two_has_the_reasons_of_the_whole(tmp_path: Path) -> None:
    policy = with_text(BEFORE)
    policy.details["phases"] = [["warm", 0, 4], ["warm from step 4", 4, 400]]
    (first, second) = told(tmp_path, [policy.run(), policy.step(0)], "a")
    assert first.because == second.because
    assert "explained" not in first.because[0]


@pytest.mark.parametrize("has_kinds", [False, True])
def test_rows_of_each_band_have_the_reasons_of_their_band(has_kinds: bool) -> None:
    """Bands are the policy's own, in its order, or what the ledger says of each kind of row."""
    rules = [{"class": "**", "weight": 1}, {"class": "a", "band": "high", "region": "head", "weight": 0.5}]
    bands = {"measure": "m", "names": ["low", "high"], "thresholds": [0.5]}
    regions = {"body": {"params": ["0.*"]}, "head": {"params": ["1.*"]}}
    policy = PolicyFile.model_validate(TEXT | {"rules": rules, "bands": bands, "regions": regions})
    kinds = [(1, {}), (0, {})] if has_kinds else []
    tables: Any = SimpleNamespace(
        phases=((0, 4), (4, 400)), withdrawn=(), details={"phases": [["warm"], ["main"]]}, kinds=kinds, classes=("a",)
    )
    low, high = (_because(tables, policy, "a", kind, 1) for kind in ((1, 0) if has_kinds else (0, 1)))
    assert len(low) == 1
    assert low[0].startswith("class **: ")
    assert [one.partition(" (")[0] for one in high] == [
        "body: class **: weight 1",
        "head: class a, region head, band high: weight 0.5",
    ]
