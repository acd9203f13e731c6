"""`cosmati forget --method ablate`: asked for by name, done as `ablate` does it, certified with what was measured."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rfc8785
import torch
from typer.testing import CliRunner, Result

from cosmati.cli.main import app
from cosmati.data.tombstoned import Tombstoned
from cosmati.errors import ForgetError, RefutedError, TamperError
from cosmati.forget import deletion
from cosmati.forget.ablation import STRENGTH, AblationReport, Wrap, ablate, ablated_weights
from cosmati.forget.asked import ToForget
from cosmati.forget.certificate import verify_certificate
from cosmati.forget.past_run import CERTIFICATE, PastRun
from cosmati.forget.planning import EXACT
from cosmati.forget.shredding import superseded_by
from cosmati.forget.succession import append_certified
from cosmati.ledger.query import VerifiedLedger
from cosmati.records.ledger import CheckpointEntry
from cosmati.train.observers import Observer
from cosmati.train.trainer import Trainer
from tests.forget import recipe as plain
from tests.forget import routed
from tests.forget.samples import differing, forgotten, tensors
from tests.forget.test_replay import Stops

pytestmark = pytest.mark.long

RECIPE, PERSONAL = ("--recipe", Path(routed.__file__)), ToForget(classes=("personal",))
ABLATE = ("--class", "personal", *RECIPE, "--method", "ablate", "--yes", "--repair-steps", 3)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["forget", *map(str, arguments)])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("routed") / "run"
    routed.recipe().trainer(run_folder=folder).fit()
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture(scope="module")
def done(trained: Path) -> Path:
    """Return a repaired run, certified."""
    out = trained.with_name("done")
    said = call(trained, *ABLATE, "--out", out)
    assert said.exit_code == 0, said.output
    return out


def directly(run: Path, out: Path, num_steps: int = 3, **gone: Any) -> AblationReport:
    """Ablate without any of the deletion's parts."""

    def make(wrap: Wrap, **config: Any) -> Trainer:
        folder = config.pop("run_folder")
        return routed.maker()(lambda source: wrap(Tombstoned(source, **gone)), folder, **config)

    found = ablate(run, make, ["personal"], out, repair_steps=num_steps)
    assert found is not None
    return found


def test_the_plan_has_it_last_and_it_is_done_as_ablate_does_it(run: Path, tmp_path: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    plan = call(run, "--class", "personal", *RECIPE).output
    assert f"  ablate     {STRENGTH} (1 steps, about 0.0 minutes)" in plan, "a tenth of six"
    assert "region own is set to zero: of its teaching 100.0% was theirs" in plan
    assert "stays: what other regions learnt" in plan
    told = json.loads(call(run, "--class", "personal", *RECIPE, "--repair-steps", 3, "--json").output)["options"]
    assert [(one["method"], one["is_approximate"]) for one in told] == [
        ("replay", False),
        ("drop", False),
        ("ablate", True),
    ]
    assert told[-1]["num_steps"] == 3
    out = tmp_path / "out"
    said = call(run, *ABLATE, "--out", out)
    assert said.exit_code == 0, said.output
    assert before == {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.name != "lock"} | {
        p: at for p, at in before.items() if p.name == "lock"
    }, "the run stays as it was, and isn't succeeded"
    report = directly(run, tmp_path / "by hand")
    assert not differing(tensors(out), tensors(tmp_path / "by hand"))
    told = json.loads((out / "certificates" / "0001.json").read_text())
    assert (told["strength"], told["method"]) == (STRENGTH, "ablate")
    assert told["ablation"]["measured"] == {
        name: [report.before[name], report.between[name], report.after[name]] for name in ("retain", "forget")
    }
    assert [told["from"]["parameters"], told["ablation"]["parameters"], told["to"]["parameters"]] == [*report.roots]
    retain = " -> ".join(f"{one:.4f}" for one in told["ablation"]["measured"]["retain"])
    assert f"retain: {retain} (before, ablated, repaired)" in said.output
    assert not any(word in said.output.lower() for word in ("erase", "exact", "run without"))
    letter = (out / "certificates" / "0001-notices" / "copies.txt").read_text()
    assert "doesn't have it" not in letter
    assert STRENGTH in letter


def test_only_who_asks_by_name_gets_it(run: Path, tmp_path: Path) -> None:
    exact = call(run, "--class", "personal", *RECIPE, "--yes", "--out", tmp_path / "exact")
    assert "replay: exact" in exact.output
    record = PastRun(tmp_path / "exact").record
    assert record.outcome == "completed"


def test_where_nothing_exact_is_possible_that_is_said(run: Path) -> None:
    record = PastRun(run).record
    said = tuple(
        dataclasses.replace(one, holds=False, because="x") if one.name == "replayable" else one
        for one in record.guarantees
    )
    (run / "run.json").write_text(dataclasses.replace(record, guarantees=said).to_json())
    refused = call(run, "--class", "personal", *RECIPE, "--yes")
    assert refused.exit_code == 1
    assert "Nothing exact is possible. drop: class personal" in refused.output
    assert "by name: --method ablate." in refused.output


def test_without_its_weights_nothing_is_ablated(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    plan = call(run, "--class", "personal", *RECIPE).output
    assert "ablate     not possible" in plan
    assert "holds no checkpoint" in plan


def test_refusals_say_what_and_how(run: Path, done: Path, tmp_path: Path) -> None:
    (ids := tmp_path / "ids").write_text("1\n")
    ablating = ("--method", "ablate", "--yes", *RECIPE)
    for arguments, words in [
        ((run, *ABLATE, "--delete-superseded", "--out", tmp_path / "a"), "An ablation supersedes nothing"),
        ((run, "--class", "personal", *RECIPE, "--yes", "--repair-steps", 3), "goes with --method ablate"),
        ((run, "--class", "personal", "--method", "ablate", "--yes"), "needs the run's recipe"),
        ((run, "--rows", ids, *ablating), "rows are asked for, and what can be ablated"),
        ((run, "--class", "open", *ablating), "No region separates open from the rest: of what each was taught"),
        ((done.with_name("run"), *ABLATE[:-1], 4, "--out", done), "another deletion (class personal, by ablate with 3"),
        (
            (done.with_name("run"), "--class", "personal", *RECIPE, "--yes", "--method", "replay", "--out", done),
            "is of another deletion (class personal, by ablate",
        ),
        ((run, *ABLATE, "--set", "config.seed=1"), "is of another run: settings: seed 1, was 0"),
    ]:
        said = call(*arguments)
        assert said.exit_code == 1, said.output
        assert words in said.output
    assert {one.name for one in tmp_path.iterdir()} == {"run", "ids"}
    other = tmp_path / "other"
    plain.recipe().trainer(run_folder=other).fit()
    said = call(other, "--class", "open", "--recipe", plain.__file__, "--method", "ablate", "--yes")
    assert "ablate isn't possible: No region separates open" in said.output


class Ends(Observer):
    """Asks for the run's end, as Ctrl-C does."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_open(self, run: Any) -> None:
        self._run = run

    def on_step(self, report: Any) -> None:
        if report.clock.step == self._step:
            self._run.stop("enough")


@pytest.mark.parametrize("place", ["stopped", "killed", "made", "certify"])
def test_broken_off_it_goes_on(place: str, run: Path, done: Path, tmp_path: Path, monkeypatch: Any) -> None:
    out = tmp_path / "out"

    def go(*observers: Observer) -> deletion.Deletion:
        past = PastRun(run)
        begun = deletion.begun_in(out)
        if begun is None:
            request = deletion.Request.open(past, PERSONAL, routed.maker(), repair_steps=3)
            begun = deletion.begin(request, "ablate", out)
        make = routed.maker(*observers)
        return deletion.carry_out(past, PERSONAL, begun, make, out, delete_superseded=False, say=lambda _: None)

    if place == "stopped":
        found = go(Ends(2))
        assert (found.outcome, found.certificate) == ("stopped", None)
        assert not (out / "ablation.json").exists()
    elif place == "killed":
        with pytest.raises(InterruptedError):
            go(Stops(2))
    else:
        with monkeypatch.context() as patch:
            patch.setattr(
                deletion if place == "certify" else Trainer, "certify" if place == "certify" else "fit", _fails
            )
            with pytest.raises(ForgetError, match="killed"):
                go()
    assert not (out / "certificates").exists()
    found = go()
    assert found.certificate is not None
    assert not differing(tensors(out), tensors(done))
    ablated_weights(out).unlink()
    assert go().certificate == found.certificate, "nothing is done twice"
    assert len(list((out / "certificates").glob("*.json"))) == 1


def _fails(*_: object) -> None:
    raise ForgetError("killed")


def test_a_repair_that_diverges_is_not_certified(run: Path, tmp_path: Path) -> None:
    def make(wrap: Wrap, folder: Path | None, /, **config: Any) -> Trainer:
        trainer = routed.maker()(wrap, folder, **config)
        if config.get("load_weights"):
            fit = trainer.fit

            def spoilt() -> Any:
                found = fit()
                with torch.no_grad():
                    trainer.model.rest.bias.fill_(torch.nan)
                return found

            trainer.fit = spoilt  # type: ignore[method-assign]
        return trainer

    with pytest.raises(ForgetError, match="After the repair, retain and forget can't be measured: nan; it diverged"):
        forgotten(run, PERSONAL, make, tmp_path / "out", "ablate")
    assert not (tmp_path / "out" / "certificates").exists()


def test_what_is_gone_stays_gone_in_the_next_deletion(run: Path, tmp_path: Path) -> None:
    """Rows are forgotten exactly, a class is ablated, then rows are asked of the repaired run: as by hand."""
    early, late = frozenset({0, 3}), frozenset({2, 5, 8})
    first = forgotten(run, ToForget(rows=early), routed.maker(), tmp_path / "one").out
    ablated = forgotten(first, PERSONAL, routed.maker(), tmp_path / "two", "ablate")
    report, out = directly(first, tmp_path / "by hand", 1, rows=early), ablated.out
    assert ablated.told is not None
    assert ablated.told["ablation"]["measured"]["retain"][0] == report.before["retain"], "over the rows that are left"
    assert not differing(tensors(out), tensors(tmp_path / "by hand"))
    assert superseded_by(out) == [], "it has a log and row keys of its own"
    told = call(out, "--class", "personal", *RECIPE, "--set", "config.budget=1ba").output
    assert "No step had any of it" in told
    assert "the base weights isn't made again" in told, "they may have it"
    again = routed.maker()

    def make(wrap: Wrap, folder: Path | None, /, **config: Any) -> Trainer:
        return again(wrap, folder, **{"budget": "1ba", **config})

    third = forgotten(out, ToForget(rows=late), make, tmp_path / "three")
    gone = {"classes": ["personal"], "rows": early | late}
    truth = make(
        lambda source: Tombstoned(source, **gone),  # type: ignore[arg-type]
        tmp_path / "truth",
        load_weights=tmp_path / "by hand.ablated.safetensors",
    )
    truth.fit()
    assert not differing(tensors(third.out), tensors(tmp_path / "truth"))
    assert third.told is not None
    assert third.told["strength"].startswith("exact with respect to content from entry 0 on")


LIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "other weights to begin with": (lambda told: told["ablation"].update(parameters="00" * 32), "began from other"),
    "a longer repair": (lambda told: told["ablation"].update(repair_steps=4), "how long the repair was"),
    "other weights": (lambda told: told["to"].update(parameters="00" * 32), "signed no checkpoint with the weights"),
    "where it led": (lambda told: told["to"].update(root="00" * 32), "aren't those of the earlier checkpoint"),
    "a class that taught on": (lambda told: told["asked"].update(classes=["open"]), "which stands, ran rows of open"),
    "that it was a replay": (lambda told: told.update(method="replay", strength=EXACT), "trees have 18 and 13"),
    "that it's exact": (lambda told: told.update(strength=EXACT), "calls what ablate gives 'exact with respect"),
    "a method of its own": (lambda told: told.update(method="melt"), "can't be read as one"),
    "a measure in words": (
        lambda told: told["ablation"]["measured"].update(forget=["a", "b", "c"]),
        "can't be read as",
    ),
    "half of the measures": (lambda told: told["ablation"]["measured"].update(forget=[0.5]), "can't be read as one"),
    "a later tree": (lambda told: told["to"].update(tree_size=10**6), "certificate's trees have"),
}


def signed_too(out: Path, told: dict[str, Any]) -> Path:
    """Have the operator's key sign another certificate; return its file."""
    (path := out / "certificates" / "0002.json").write_bytes(data := rfc8785.dumps(told))
    digest = hashlib.sha256(data).hexdigest()
    append_certified(out, {"digest": digest}, [[CERTIFICATE, "", digest]])
    return path


@pytest.mark.parametrize("name", LIES)
def test_the_operator_s_own_key_makes_no_lie_true(name: str, done: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(done, tmp_path / "out"))
    told = json.loads((out / "certificates" / "0001.json").read_text())
    LIES[name][0](told)
    lie = signed_too(out, told)
    with pytest.raises((RefutedError, TamperError), match=LIES[name][1]):
        verify_certificate(lie, out / "ledger")
    assert verify_certificate(out / "certificates" / "0001.json", out / "ledger"), "the first still stands"


def test_weights_from_the_middle_of_the_repair_are_not_certified(done: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(done, tmp_path / "out"))
    entries = [item.entry for item in PastRun(out).ledger.entries()]
    middle = next(one for one in entries if isinstance(one, CheckpointEntry) and one.step == 2)
    told = json.loads((out / "certificates" / "0001.json").read_text())
    told["to"].update(step=2, state=middle.state_digest.hex(), parameters=middle.parameter_root.hex())
    with pytest.raises(RefutedError, match="how long the repair was"):
        verify_certificate(signed_too(out, told), out / "ledger")


def test_it_is_checked_from_copies_with_whom_one_trusts(done: Path, tmp_path: Path) -> None:
    """A witness has seen it: then it's L1; one who hasn't makes it no more than the operator's word."""
    shutil.copytree(done / "ledger", tmp_path / "ledger")
    certificate = shutil.copy2(done / "certificates" / "0001.json", tmp_path)
    asked = ("verify", certificate, "--ledger", tmp_path / "ledger")
    assert "Evidence: L0: consistent in itself" in call(*asked).output
    for name in ("w", "other"):
        CliRunner().invoke(app, ["ledger", "witness", "init", str(tmp_path / name), "--name", f"{name}.example"])
    signed = CliRunner().invoke(
        app, ["ledger", "witness", "sign", str(tmp_path / "ledger"), "--key", str(tmp_path / "w")]
    )
    assert signed.exit_code == 0, signed.output
    keys = [("--witness", (tmp_path / name / "witness.vkey").read_text().strip()) for name in ("w", "other")]
    said = call(*asked, *keys[0], "--vkey", (done / "ledger" / "operator.vkey").read_text().strip())
    assert said.exit_code == 0, said.output
    assert "Evidence: L1: witnessed at 20" in said.output
    assert "give --vkey" not in said.output
    assert "Evidence: L0: consistent in itself, operator-asserted; 0 of 1" in call(*asked, *keys[1]).output
    assert "Evidence: L1: witnessed at 20" in call(*asked, *keys[0], *keys[1], "--quorum", 1).output
    assert call(*asked, *keys[0], "--quorum", 2).exit_code == 2
    assert VerifiedLedger(tmp_path / "ledger").evidence_level.startswith("L0")
