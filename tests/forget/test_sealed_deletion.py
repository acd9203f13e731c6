"""Deletion from runs with a sensitive class: the successor seals as the run did, with the same secret."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cosmati.forget.ablation import region_shares
from cosmati.forget.asked import ToForget
from cosmati.ledger.query import VerifiedLedger, contributions
from cosmati.ledger.sealing import SEALED, OperatorKeys
from cosmati.ledger.verify import verify_ledger
from tests.forget.samples import bare, differing, forgotten, maker, rows_of_step, tensors, trained, without
from tests.train.isolated.samples import CASES, source

CASE = bare("CNN with BatchNorm")


def made(**config: Any) -> Any:
    return maker(CASE, source(CASES["CNN with BatchNorm"]), config={"details_every": 1, **config})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(made(sensitive=("personal",)), tmp_path_factory.mktemp("runs") / "run")


def test_a_replay_after_a_deletion_goes_on_sealing(run: Path, tmp_path: Path) -> None:
    rows = rows_of_step(source(CASES["CNN with BatchNorm"]), 2)
    forgotten(run, ToForget(rows=rows), made(sensitive=("personal",)), tmp_path / "out")
    retained = trained(made(), tmp_path / "retained", without(rows=rows))
    assert not differing(tensors(tmp_path / "out"), tensors(retained)), "sealing changes no bit"
    key = (tmp_path / "out/private/columns.key").read_bytes()
    assert key == (run / "private/columns.key").read_bytes()
    verify_ledger(tmp_path / "out/ledger")
    ledger = VerifiedLedger(tmp_path / "out/ledger")
    assert all(one.details[SEALED]["classes"] == ["personal"] for one in ledger.tables)
    assert all(one.num_sealed for one in contributions(ledger).cells if one.class_name == "personal" and one.num_rows)
    ledger.keys = OperatorKeys(key, ledger.key.name)
    assert not any(one.num_sealed for one in contributions(ledger).cells)
    lines = map(json.loads, (tmp_path / "out/ledger/details.jsonl").read_text().splitlines())
    assert sum(SEALED in told and "gradient_norm" in told for told in lines) > 6


def test_shares_of_an_ablation_leave_norms_out(run: Path) -> None:
    found = region_shares(VerifiedLedger(run / "ledger"), ["personal"])
    assert {one.norm_share for one in found} == {None}
    assert all(0 < one.share < 1 for one in found)
