"""Deletion from runs with a sensitive class: the successor seals as the run did, with the same secret."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cosmati.cli.forget import maker as maker_of
from cosmati.errors import ForgetError
from cosmati.forget.ablation import region_shares
from cosmati.forget.asked import ToForget
from cosmati.forget.past_run import Gone
from cosmati.ledger.details import details_digest
from cosmati.ledger.query import VerifiedLedger, contributions
from cosmati.ledger.sealing import SEALED, OperatorKeys
from cosmati.ledger.verify import verify_ledger
from cosmati.recipes.recipe import Recipe
from cosmati.recipes.replaying import trainers_of
from tests.forget.recipe import data
from tests.forget.samples import bare, differing, forgotten, maker, rows_of_step, tensors, trained, without
from tests.forget.stopped import HALF, recipe_of
from tests.forget.stopped import trained as trained_with_stops
from tests.train.isolated.samples import CASES, source
from tests.train.replay_world import replayed

pytestmark = pytest.mark.long

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


def sealing(recipe: Recipe, *classes: str) -> Recipe:
    """Return a recipe that measures in each step, and seals classes."""
    return replace(recipe, config=replace(recipe.config, sensitive=classes, details_every=1))


@pytest.mark.parametrize("policy", [None, HALF], ids=["nothing else changed", "and the policy changed"])
def test_what_is_sealed_from_a_stop_on_is_sealed_in_all_that_is_taken_anew(policy: Any, tmp_path: Path) -> None:
    """That the run came to seal more changes no bit of it, so that a replay from before goes through it."""
    end = recipe_of() if policy is None else recipe_of(policy)
    stops = ((sealing(recipe_of()), 3), (sealing(end, "personal"), 6))
    run, rows = trained_with_stops(stops, tmp_path / "run"), rows_of_step(data(), 1)
    done = forgotten(run, ToForget(rows=rows), maker_of(stops[-1][0]), tmp_path / "out")
    truth = trained_with_stops(((recipe_of(), 3), (end, 6)), tmp_path / "truth", without(rows=rows))
    assert not differing(tensors(done.out), tensors(truth))
    verify_ledger(done.out / "ledger", pinned=(run / "ledger/checkpoint").read_text())
    ledger = VerifiedLedger(done.out / "ledger")
    (after,) = [one for one in ledger.tables if "forgotten" in {name for name, *_ in one.changes}]
    assert after.details[SEALED]["classes"] == ["personal"], "from here on no recipe can put it into the open"
    assert dict(after.entry.commitments)[SEALED] == details_digest({SEALED: after.details[SEALED]})
    assert SEALED in {name for name, *_ in after.changes}
    theirs = [one for one in contributions(ledger).cells if one.class_name == "personal" and one.num_rows]
    assert theirs
    assert all(one.num_sealed for one in theirs)
    key = (run / "private/columns.key").read_bytes()
    assert key == (done.out / "private/columns.key").read_bytes()
    ledger.keys = OperatorKeys(key, ledger.key.name)
    assert not any(one.num_sealed for one in contributions(ledger).cells)
    salt = (done.out / "private/rows.salt").read_bytes()
    make = trainers_of(stops[-1][0], lambda digest, given: Gone.after(done.out, digest).of(given, salt))
    assert replayed(done.out, 0, 6, make).differences == ()


@pytest.mark.parametrize("lost", ["recipe", "secret", "secret for another one"])
def test_what_would_not_be_sealed_the_plan_refuses_and_nothing_is_succeeded(
    lost: str, run: Path, tmp_path: Path
) -> None:
    """The resume would, but in a successor that can't go on, of a run that can't any more."""
    folder, rows = tmp_path / "run", rows_of_step(source(CASES["CNN with BatchNorm"]), 2)
    shutil.copytree(run, folder)
    (folder / "succeeded.json").unlink(missing_ok=True)
    if lost == "secret for another one":
        (folder / "private/columns.key").write_bytes(bytes(32))
    if lost == "secret":
        (folder / "private/columns.key").unlink()
    why = "the recipe doesn't" if lost == "recipe" else r"columns\.key isn't there"
    make = made() if lost == "recipe" else made(sensitive=("personal",))
    with pytest.raises(ForgetError, match=why):
        forgotten(folder, ToForget(rows=rows), make, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (folder / "succeeded.json").exists()
