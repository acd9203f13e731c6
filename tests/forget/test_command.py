"""`cosmati forget` as a person gives it: plan, deletion, verification, holds, erasing, kills, ranks."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cosmati.cli import forget
from cosmati.cli.main import app
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import StreamingDataset
from cosmati.data.tombstoned import Tombstoned
from cosmati.errors import ForgetError
from cosmati.forget import deletion
from cosmati.forget.subjects import index_subjects, make_key
from tests.forget import recipe as own
from tests.forget.samples import differing, rows_of_step, tensors
from tests.processes import launch_ranks, run_python

pytestmark = pytest.mark.long

RECIPE = str(Path(own.__file__))


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["forget", *map(str, arguments)])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    own.recipe().trainer(run_folder=folder).fit()
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def ids(folder: Path) -> tuple[Path, frozenset[int]]:
    rows = rows_of_step(own.data(), 3)
    path = folder / "ids"
    path.write_text("\n".join(map(str, rows)))
    return path, rows


def truth(folder: Path, rows: frozenset[int]) -> Path:
    """Return the run without the rows, in which nothing of `forget` had a part."""
    made = replace(own.recipe(), data=lambda: Tombstoned(own.data(), rows=rows))
    made.trainer(run_folder=folder / "truth").fit()
    return folder / "truth"


def test_plan_deletion_and_verification(run: Path, tmp_path: Path) -> None:
    path, rows = ids(tmp_path)
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    planned = call(run, "--rows", path, "--recipe", RECIPE)
    assert planned.exit_code == 0, planned.output
    assert "forget 2 rows" in planned.output
    assert (
        "replay     exact with respect to content; that rows were there, and where, remains (4 steps" in planned.output
    )
    assert "Nothing was done" in planned.output
    told = json.loads(call(run, "--rows", path, "--recipe", RECIPE, "--json").output)
    assert told["options"][0]["method"] == "replay"
    assert told["options"][0]["from_step"] == 2
    assert before == {p: p.stat().st_mtime_ns for p in run.rglob("*")}, "a plan changes nothing"
    done = call(run, "--rows", path, "--recipe", RECIPE, "--yes", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    certificate = tmp_path / "out" / "certificates" / "0001.json"
    assert f"Check it: cosmati forget verify {certificate}" in done.output
    assert not differing(tensors(tmp_path / "out"), tensors(truth(tmp_path, rows)))
    checked = call("verify", certificate)
    assert checked.exit_code == 0, checked.output
    assert "L0: consistent in itself" in checked.output
    assert "give --vkey" in checked.output
    letter = (tmp_path / "out" / "certificates" / "0001-notices" / "copies.txt").read_text()
    assert "Stop using it, delete it" in letter
    again = call(run, "--rows", path, "--recipe", RECIPE, "--yes", "--out", tmp_path / "out")
    assert again.exit_code == 0
    assert len(list((tmp_path / "out" / "certificates").glob("*.json"))) == 1, "nothing is done twice"
    assert call("verify", certificate, "--ledger", run / "ledger").exit_code == 1
    assert call("verify", tmp_path / "none").exit_code == 2


def test_refusals_say_what_and_how(run: Path, tmp_path: Path) -> None:
    path, _ = ids(tmp_path)
    for arguments, words in [
        ((run,), "by one of --class, --rows, --documents, --packs, --subject; given: none"),
        ((run, "--class", "open", "--rows", path), "given: --class, --rows"),
        ((run, "--subject", "4711"), "--subjects INDEX KEY"),
        ((tmp_path, "--class", "open"), "is no run folder"),
        ((run, "--class", "open", "--yes"), "Nothing is possible. drop: class open isn't isolated"),
        ((run, "--class", "open", "--yes", "--method", "drop"), "drop isn't possible"),
        (
            (run, "--rows", path, "--recipe", f"{RECIPE}:other_seed", "--yes"),
            "is of another run: settings: seed 1, was 0",
        ),
        ((run, "--rows", path, "--recipe", RECIPE, "--yes", "--out", tmp_path), "isn't what a deletion has begun"),
        ((run, "--rows", path, "--recipe", RECIPE, "--yes", "--method", "melt"), "no method 'melt' here"),
    ]:
        done = call(*arguments)
        assert done.exit_code == 1, done.output
        assert words in done.output
    assert not (run / "succeeded.json").exists()


def test_a_subject_s_rows_are_found_by_an_index(run: Path, tmp_path: Path) -> None:
    rows = [{"author": 4711 if number in (3, 4) else number} for number in range(8)]
    write_dataset(rows, tmp_path / "rows", {"author": "int"}, class_of="open", source="s")
    made, key = tmp_path / "people.index", make_key(tmp_path / "key")
    index_subjects(StreamingDataset(tmp_path / "rows"), ["author"], made, key)
    index = ("--subjects", made, tmp_path / "key", "--recipe", RECIPE)
    planned = call(run, "--subject", "4711", *index)
    assert planned.exit_code == 0, planned.output
    assert "forget 2 rows of a subject" in planned.output
    assert "no rows in the index" in call(run, "--subject", "4712", *index).output


def test_an_index_of_other_data_is_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers would be those of other rows."""
    for name in ("own", "other"):
        rows = [{"author": name if number in (3, 4) else "x"} for number in range(8)]
        write_dataset(rows, tmp_path / name, {"author": "str"}, class_of="open", source=name)
    key = make_key(tmp_path / "key")
    index_subjects(StreamingDataset(tmp_path / "other"), ["author"], tmp_path / "index", key)
    loaded = replace(own.recipe(), data=lambda: StreamingSource(StreamingDataset(tmp_path / "own"), 4))
    monkeypatch.setattr(forget, "load_recipe", lambda *_: loaded)
    asked = ("--subject", "other", "--subjects", tmp_path / "index", tmp_path / "key", "--recipe", RECIPE)
    assert "is the index of other data" in call(run, *asked).output


def test_a_hold_refuses_until_it_is_released(run: Path, tmp_path: Path) -> None:
    path, _ = ids(tmp_path)
    assert call("hold", run, "--rows", path, "--because", "case 12").output == f"Hold 1 is on 2 rows of {run}.\n"
    for asked in (("--rows", path), ("--class", "open"), ("--class", "other"), ("--class", "personal")):
        planned = call(run, *asked, "--recipe", RECIPE)
        is_meant = "Legal hold 1" in planned.output
        assert planned.exit_code == (1 if is_meant else 0)
        assert is_meant or asked[0] == "--class"
    assert call("hold", run, "--class", "opn", "--because", "x").exit_code == 1
    assert call("release", run, 1, "--because", "settled").exit_code == 0
    assert call(run, "--rows", path, "--recipe", RECIPE).exit_code == 0


@pytest.mark.parametrize("place", ["certify", "erase", "certify again"])
def test_a_kill_between_any_two_parts_leaves_what_a_second_call_ends(
    place: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replay, certificate, erasing: in that order, whatever comes between."""
    path, rows = ids(tmp_path)
    out = tmp_path / "out"
    command = (run, "--rows", path, "--recipe", RECIPE, "--yes", "--delete-superseded", "--out", out)
    calls: list[str] = []
    whole = {name: getattr(deletion, name) for name in ("certify", "erase")}

    def broken(name: str) -> object:
        def stops(*arguments: object) -> object:
            calls.append(name)
            if calls.count("certify") == (2 if place == "certify again" else 1) and name == place.split(maxsplit=1)[0]:
                raise ForgetError("killed")
            return whole[name](*arguments)

        return stops

    for name in whole:
        monkeypatch.setattr(deletion, name, broken(name))
    assert call(*command).exit_code == 1
    steps = sorted(p.name for p in (run / "checkpoints").iterdir())
    assert ("step-00000006" in steps) == (place != "certify again"), "deleted only once that's certified"
    monkeypatch.undo()
    assert call(*command).exit_code == 0
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-00000000", "step-00000002"]
    last = max((out / "certificates").glob("*.json"))
    told = json.loads(last.read_text())
    assert last.name == "0002.json"
    assert [one["status"] for one in told["derived"]] == ["never had it"] * 2 + ["deleted"] * 2
    assert call("verify", last).exit_code == 0
    assert call(*command).exit_code == 0
    assert len(list((out / "certificates").glob("*.json"))) == 2
    assert not differing(tensors(out), tensors(truth(tmp_path, rows)))


@pytest.mark.slow
def test_killed_in_the_middle_of_the_replay_it_goes_on(run: Path, tmp_path: Path) -> None:
    path, rows = ids(tmp_path)
    command: list[str | Path] = ["-m", "cosmati", "forget", run, "--rows", path, "--yes", "--out", tmp_path / "out"]
    done = run_python([*command, "--recipe", f"{RECIPE}:killed"])
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "out" / "certificates").exists()
    done = run_python([*command, "--recipe", RECIPE])
    assert done.returncode == 0, done.stderr
    assert not differing(tensors(tmp_path / "out"), tensors(truth(tmp_path, rows)))


@pytest.mark.slow
def test_two_ranks_give_the_same(run: Path, tmp_path: Path) -> None:
    path, rows = ids(tmp_path)
    command: list[str | Path] = [
        "-m",
        "cosmati",
        "forget",
        run,
        "--rows",
        path,
        "--yes",
        "--out",
        tmp_path / "out",
        "--recipe",
        RECIPE,
    ]
    said = launch_ranks(command, 2)
    assert [bool(one) for one in said] == [True, False], "one rank speaks"
    assert not differing(tensors(tmp_path / "out"), tensors(truth(tmp_path, rows)))
    assert call("verify", tmp_path / "out" / "certificates" / "0001.json").exit_code == 0
