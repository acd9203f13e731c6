"""`cosmati ledger replay` of runs that were forgotten from: what stands comes out the same."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cosmati.cli.main import app
from cosmati.forget.asked import ToForget
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.row_blinds import secrets_of_run
from cosmati.ledger.standing import StandingSteps
from cosmati.recipes.replaying import trainers_of
from cosmati.train import settings
from cosmati.train.config import LEARNING_CADENCES
from cosmati.train.identity import CADENCES
from cosmati.train.replay import ReplayRequest, replay
from cosmati.train.trainer import Trainer
from tests.forget import recipe as publisher
from tests.forget.samples import ISOLATED, forgotten, maker, rows_of_step, trained
from tests.train.isolated.samples import CASES, source

pytestmark = pytest.mark.long

RECIPE = str(Path(publisher.__file__))


def ask(run: Path, steps: str, *more: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["ledger", "replay", str(run), "--recipe", RECIPE, "--steps", steps, *more])
    return result.exit_code, " ".join(result.output.split())


def forget(run: Path, step: int, out: Path) -> Path:
    """Have rows of a step forgotten, as a person does."""
    rows = out.with_suffix(".txt")
    rows.write_text("\n".join(map(str, rows_of_step(publisher.data(), step))))
    done = ["forget", str(run), "--rows", str(rows), "--recipe", RECIPE, "--method", "replay", "--yes"]
    assert CliRunner().invoke(app, [*done, "--out", str(out)]).exit_code == 0
    return out


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run from which rows were forgotten from step 2 on, and others from step 4 on."""
    folder = tmp_path_factory.mktemp("forgotten")
    publisher.recipe().trainer(run_folder=folder / "one").fit()
    return forget(forget(folder / "one", 2, folder / "two"), 4, folder / "three")


def test_what_stands_comes_out_the_same(twice: Path) -> None:
    """From entry 0 it's over three kinds of data: whole, without the first rows, without both."""
    assert [one.first for one in StandingSteps(VerifiedLedger(twice / "ledger")).spans] == [0, 2, 4]
    for run in (twice, twice.with_name("two"), twice.with_name("one")):
        code, said = ask(run, ":")
        assert (code, said.endswith("Yes. Equal in every digest.")) == (0, True), said
        assert "evidence L3: the whole run was replayed" in said
    code, said = ask(twice, "5:")
    assert code == 0
    assert "from the checkpoint of step 4; 2 steps" in said


def test_an_earlier_releases_run_that_was_forgotten_from_since_comes_out_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoints tell no cadences of learning, and the steps after the deletion do."""
    with monkeypatch.context() as before:
        before.setattr(settings, "CADENCES", tuple(name for name in CADENCES if name not in LEARNING_CADENCES))
        before.setattr(settings, "_NEUTRAL", (*settings._NEUTRAL, *LEARNING_CADENCES))
        recipe = publisher.recipe()
        config = replace(recipe.config, **dict.fromkeys(LEARNING_CADENCES, 0))
        replace(recipe, config=config).trainer(run_folder=tmp_path / "one").fit()
    code, said = ask(forget(tmp_path / "one", 4, tmp_path / "two"), ":")
    assert (code, said.endswith("Yes. Equal in every digest.")) == (0, True), said


def test_who_does_not_know_what_was_forgotten_gets_no_answer(twice: Path, tmp_path: Path) -> None:
    """Not a no: the ledger's copy says nothing false."""
    shutil.copytree(twice / "ledger", tmp_path / "copy")
    code, said = ask(tmp_path / "copy", "3:", "--without-rows")
    assert (code, "which rows that was is only in the run's private folder" in said) == (2, True)
    assert ask(tmp_path / "copy", ":2", "--without-rows")[0] == 0


def test_another_deletion_than_was_logged_is_found(twice: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(twice, run)
    path = run / "private" / "forgotten.json"
    told = json.loads(path.read_text())
    for one in told["after"].values():
        one["rows"] = one["rows"][1:]
    path.write_text(json.dumps(told))
    code, said = ask(run, ":")
    assert (code, "data without what was forgotten: commitment" in said) == (1, True)


def test_content_that_went_on_to_teach_is_found(twice: Path) -> None:
    """Whoever says that it was forgotten and trains on it has other digests, though the recipe is the same."""
    run, folder = StandingSteps(VerifiedLedger(twice / "ledger")), twice
    whole = trainers_of(publisher.recipe(), lambda asked, data: data)  # type: ignore[arg-type,return-value]

    def make(asked: ReplayRequest) -> Trainer:
        return whole(asked)

    blinds = secrets_of_run(run, folder / "private")
    found = replay(run, range(6), make, ledger=folder / "ledger", blinds=blinds, keep_going=True)
    assert found.outcome == "different"
    steps = {one.step for one in found.differences if one.what.startswith("row commitment")}
    assert min(step for step in steps if step is not None) == 2


def test_a_run_before_this_release_remembers_the_last_deletion_alone(twice: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(twice, run)
    path = run / "private" / "forgotten.json"
    told = json.loads(path.read_text())
    del told["after"]
    path.write_text(json.dumps(told))
    assert ask(run, "4:")[0] == 0


def test_what_was_dropped_is_said_not_to_be_compared(tmp_path: Path) -> None:
    case = CASES["MLP, low rank"]
    make = maker(case, source(case), chosen=ISOLATED)
    run = trained(make, tmp_path / "run")
    out = forgotten(run, ToForget(classes=("personal",)), None, tmp_path / "out", "drop").out
    steps = StandingSteps(VerifiedLedger(out / "ledger"))
    assert steps.dropped == ("the weights from which something was dropped after 6 steps",)
    assert steps.end is None, "no step gives what is left"
    assert steps.roots == StandingSteps(VerifiedLedger(run / "ledger")).roots


def test_the_key_of_a_run_that_was_succeeded_is_changed_in_its_successor(twice: Path, tmp_path: Path) -> None:
    """Its ledger goes on there, and an entry in the old folder would be a fork of it."""
    for name in ("one", "two"):
        before = (twice.with_name(name) / "ledger" / "checkpoint").read_bytes()
        result = CliRunner().invoke(app, ["ledger", "rotate-key", str(twice.with_name(name))])
        assert (result.exit_code, "would be a fork" in result.output) == (2, True), result.output
        assert (twice.with_name(name) / "ledger" / "checkpoint").read_bytes() == before
    shutil.copytree(twice, tmp_path / "run")
    assert CliRunner().invoke(app, ["ledger", "rotate-key", str(tmp_path / "run")]).exit_code == 0
    assert ask(tmp_path / "run", "4:")[0] == 0
