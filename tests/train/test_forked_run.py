"""Forked on resume: two copies of a run's folder train on, by a real trainer, and each log is whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cosmati.errors import TamperError
from cosmati.ledger.cosigned import ForkError, ask_witness
from cosmati.ledger.reader import read_verifier_key
from cosmati.ledger.verify import verify_ledger
from cosmati.ledger.witness import Witness, create_witness
from cosmati.routing.policy_file import load_policy
from tests.forget.samples import bare, maker, unwrapped
from tests.train.isolated.samples import source

TIGHTER = load_policy("version: 1\ntaxonomy: t\nregions: {all: {params: '*'}}\nrules: [{class: '**', weight: 0.5}]\n")


@pytest.mark.long
def test_a_run_that_two_copies_go_on_with_has_two_ends_and_a_pin_knows_one(tmp_path: Path) -> None:
    case = bare("MLP, low rank")
    data, shown, hidden = source(case), tmp_path / "shown", tmp_path / "hidden"
    maker(case, data, budget="2ba")(unwrapped, shown).fit()
    create_witness(tmp_path / "witness", "witness.example/w")
    witness = Witness(tmp_path / "witness")
    witness.trust(read_verifier_key(shown / "ledger"))
    ask_witness(shown / "ledger", witness.key, witness.send)
    before = (shown / "ledger" / "checkpoint").read_text()
    shutil.copytree(shown, hidden)
    maker(case, data, budget="4ba")(unwrapped, shown, change="budget").fit()
    maker(case, data, budget="4ba", chosen=TIGHTER)(unwrapped, hidden, change=("budget", "policy")).fit()
    ends = [verify_ledger(folder / "ledger", pinned=before) for folder in (shown, hidden)]
    assert [one.num_steps for one in ends] == [4, 4], "each goes on from what both had, and is whole"
    with pytest.raises(TamperError, match="rewritten"):
        verify_ledger(hidden / "ledger", pinned=(shown / "ledger" / "checkpoint").read_text())
    ask_witness(shown / "ledger", witness.key, witness.send)
    with pytest.raises(ForkError, match="Forked"):
        ask_witness(hidden / "ledger", witness.key, witness.send)
