"""Copies of checkpoints elsewhere: a plan and a certificate name them, and erasing ends those that can be reached."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

from cosmati.cli import forget
from cosmati.data.shards.remote import RemoteError
from cosmati.data.shards.upload import Target
from cosmati.errors import ForgetError
from cosmati.forget import deletion
from cosmati.forget.derived import TAKEN, UNSEEN, Derived, copies_of, derived_of
from cosmati.forget.past_run import PastRun
from cosmati.forget.stored_copies import erase_copies
from cosmati.records.attempts import append_lines
from tests.forget import recipe as own
from tests.forget.samples import rows_of_step
from tests.forget.test_command import call

pytestmark = pytest.mark.long

CONTACT = 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and its copies."""
    base = tmp_path_factory.mktemp("trained")
    made = own.recipe()
    replace(made, config=replace(made.config, checkpoint_to=str(base / "store"))).trainer(run_folder=base / "run").fit()
    return base


@pytest.fixture(params=["folder", "memory"])
def place(request: pytest.FixtureRequest, trained: Path, tmp_path: Path) -> Iterator[str]:
    """Where the copies of `tmp_path`'s run are."""
    shutil.copytree(trained / "run", tmp_path / "run")
    url = str(tmp_path / "store") if request.param == "folder" else "memory://store"
    for path in (trained / "store" / "run").rglob("*"):
        if path.is_file():
            Target(f"{url}/run").put_file(path.relative_to(trained / "store" / "run").as_posix(), path)
    noted = tmp_path / "run" / "copies.jsonl"
    noted.write_text(noted.read_text().replace(str(trained / "store"), url))
    yield f"{url}/run"
    memory = fsspec.filesystem("memory")
    if memory.exists("/store"):
        memory.rm("/store", recursive=True)


def recipe(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Have the command find the recipe that copies."""
    made = own.recipe()
    copying = replace(made, config=replace(made.config, checkpoint_to=place.rpartition("/")[0]))
    monkeypatch.setattr(forget, "load_recipe", lambda *_: copying)


def command(tmp_path: Path, *more: str) -> list[object]:
    (tmp_path / "ids").write_text("\n".join(map(str, rows_of_step(own.data(), CONTACT))))
    return [tmp_path / "run", "--rows", tmp_path / "ids", "--recipe", "own.py", "--out", tmp_path / "out", *more]


def told(tmp_path: Path) -> tuple[str, dict[str, str], list[str]]:
    """Return the last certificate's name, what it says of copies, and what it doesn't cover."""
    last = max((tmp_path / "out" / "certificates").glob("*.json"))
    found = json.loads(last.read_text())
    copies = {one["path"]: one["status"] for one in found["derived"] if "cop" in one["kind"]}
    return last.name, copies, found["not_covered"]


def steps(place: str) -> list[str]:
    return sorted({name.partition("/")[0] for name in Target(place).names("step-*/**")})


def test_copies_are_named_then_deleted_and_that_is_certified(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe(monkeypatch, place)
    assert steps(place) == [f"step-0000000{step}" for step in (0, 2, 4, 6)]
    planned = call(*command(tmp_path))
    assert f"never had it copy of a checkpoint {place}/step-00000002, step 2" in planned.output
    assert f"not covered  copy of a checkpoint {place}/step-00000004, step 4" in planned.output
    assert len(steps(place)) == 4
    assert call(*command(tmp_path, "--yes")).exit_code == 0
    listed = {f"{place}/step-0000000{step}": "never had it" for step in (0, 2)}
    left = {f"{place}/step-0000000{step}": "not covered" for step in (4, 6)}
    name, copies, not_covered = told(tmp_path)
    assert (name, copies) == ("0001.json", listed | left)
    assert not any("store" in one for one in not_covered)
    letters = [path.read_text() for path in (tmp_path / "out" / "certificates" / "0001-notices").iterdir()]
    assert len(letters) == 3, "one is for copies that nobody knows of, and what lies in the run's folder needs none"
    assert sum(f"the copy of a checkpoint {place}/step-0000000" in one for one in letters) == 2
    Target(place).put("step-00000008/model.safetensors", b"half of one")  # its list of digests never came
    Target(place).put("step-00000001.bak/model.safetensors", b"of whatever step")

    done = call(*command(tmp_path, "--yes", "--delete-superseded"))
    assert done.exit_code == 0, done.output
    assert f"Deleting {place}/step-00000006" in done.output
    assert steps(place) == ["step-00000000", "step-00000002"]
    deleted = {f"{place}/step-0000000{step}": "deleted" for step in (4, 6, 8, "1.bak")}
    name, copies, not_covered = told(tmp_path)
    assert (name, copies) == ("0002.json", listed | deleted)
    assert "older versions and replicas that a store keeps by itself of the copies deleted there" in not_covered
    assert call("verify", tmp_path / "out" / "certificates" / name).exit_code == 0
    assert call(*command(tmp_path, "--yes", "--delete-superseded")).exit_code == 0
    assert told(tmp_path)[0] == "0002.json", "nothing is done twice"
    assert len(steps(place.replace("/run", "/out"))) == 3, "the new run's own stay"


@pytest.mark.parametrize("place", ["folder"], indirect=True)
@pytest.mark.parametrize("killed", ["before it", "in the middle", "before it's certified"])
def test_a_kill_while_copies_are_deleted(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    recipe(monkeypatch, place)
    assert call(*command(tmp_path, "--yes")).exit_code == 0
    remove, certify, number = Target.remove, deletion.certify, [0]

    def removes(self: Target, names: list[str]) -> None:
        number[0] += 1
        remove(self, [] if killed == "before it" else names[: 1 if number[0] == 2 else None])
        if killed == "before it" or (killed == "in the middle" and number[0] == 2):
            raise KeyboardInterrupt

    def certifies(*given: object) -> object:
        raise ForgetError("killed")

    monkeypatch.setattr(Target, "remove", removes)
    if killed == "before it's certified":
        monkeypatch.setattr(deletion, "certify", certifies)
    assert call(*command(tmp_path, "--yes", "--delete-superseded")).exit_code != 0
    monkeypatch.setattr(Target, "remove", remove)
    monkeypatch.setattr(deletion, "certify", certify)
    assert told(tmp_path)[0] == "0001.json"
    assert call(*command(tmp_path, "--yes", "--delete-superseded")).exit_code == 0
    assert steps(place) == ["step-00000000", "step-00000002"]
    name, copies, _ = told(tmp_path)
    assert name == "0002.json"
    assert sorted(copies.values()) == ["deleted"] * 2 + ["never had it"] * 2


def test_what_cannot_be_reached_is_named_and_the_same_command_comes_back_to_it(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RemoteError("no way there")

    recipe(monkeypatch, place)
    assert call(*command(tmp_path, "--yes")).exit_code == 0
    with monkeypatch.context() as broken:
        broken.setattr(Target, "remove", lambda *_: None)  # It says that it did.
        assert call(*command(tmp_path, "--yes", "--delete-superseded")).exit_code == 0
        name, copies, not_covered = told(tmp_path)
        assert (name, sorted(copies.values())) == ("0002.json", ["never had it"] * 2 + ["not covered"] * 2)
        assert not any("a store keeps" in one for one in not_covered)
        broken.setattr(Target, "remove", refuse)
        assert call(*command(tmp_path, "--yes", "--delete-superseded")).exit_code == 0
        assert told(tmp_path)[0] == "0002.json", "nothing is other than it was"
        broken.setattr(Target, "read", refuse)
        done = call(*command(tmp_path, "--yes", "--delete-superseded"))
        assert f"not covered  {UNSEEN} {place}, step 6" in done.output
        assert f"not covered  copy of a checkpoint {place}/step-00000004" in done.output, "it's there as it was"
        assert told(tmp_path)[1][place] == "not covered"
    assert call(*command(tmp_path, "--yes", "--delete-superseded")).exit_code == 0
    name, copies, _ = told(tmp_path)
    assert (name, sorted(copies.values())) == ("0004.json", ["deleted"] * 2 + ["never had it"] * 2)
    assert place not in copies


def test_what_is_not_shown_to_be_the_run_s_own_stays(tmp_path: Path, place: str) -> None:
    """Another run's copies, a disk that isn't mounted, an endpoint that is another one."""
    run = PastRun(tmp_path / "run")
    append_lines(tmp_path / "run" / "copies.jsonl", {"url": "nosuch://x", "token": "t"})
    Target(place).put("writer.json", b'{"token": "another"}')
    found = list(copies_of(run, CONTACT))
    assert found == [Derived(TAKEN, place, 6, "", "not covered"), Derived(UNSEEN, "nosuch://x", 6, "", "not covered")]
    assert erase_copies(run, CONTACT, found, str) == tuple(found)
    assert len(steps(place)) == 4
    Target(place).remove(["writer.json"])
    assert [one.kind for one in copies_of(run, CONTACT)] == [UNSEEN, UNSEEN]
    Target(place).put("writer.json", b"no JSON")
    assert [one.kind for one in copies_of(run, CONTACT)] == [UNSEEN, UNSEEN]
    assert not any(one.is_own for one in found)


def test_a_second_deletion_names_what_the_runs_before_have(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked for then is in the first run's checkpoints and copies, too."""
    recipe(monkeypatch, place)
    assert call(*command(tmp_path, "--yes", "--delete-superseded")).exit_code == 0
    Target(place).put("step-00000006/model.safetensors", b"put back from a backup")
    found = derived_of(PastRun(tmp_path / "out"), 1)
    own_copies = place.replace("/run", "/out")
    assert {one.path: one.status for one in found} == {
        **{f"checkpoints/step-0000000{step}": "not covered" for step in (2, 4, 6)},
        str(tmp_path / "run" / "checkpoints" / "step-00000000"): "never had it",
        str(tmp_path / "run" / "checkpoints" / "step-00000002"): "not covered",
        **{f"{own_copies}/step-0000000{step}": "not covered" for step in (2, 4, 6)},
        f"{place}/step-00000000": "never had it",
        f"{place}/step-00000002": "not covered",
        f"{place}/step-00000006": "not covered",
    }
    assert [one.path for one in found if one.is_own] == [f"checkpoints/step-0000000{step}" for step in (2, 4, 6)]
    shutil.rmtree(tmp_path / "run")
    lost = [one for one in derived_of(PastRun(tmp_path / "out"), 1) if "isn't where it was" in one.kind]
    assert [(one.path, one.status) for one in lost] == [(str(tmp_path / "run"), "not covered")]
