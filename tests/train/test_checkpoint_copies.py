"""Copies of checkpoints elsewhere: whole or none, the newest ones kept, and a run that goes on from there."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from cosmati.data.shards.remote import Remote, RemoteError
from cosmati.data.shards.upload import Target
from cosmati.errors import CheckpointError
from cosmati.records.copies import read_copied_to
from cosmati.train.run.checkpoints import Checkpoint, list_checkpoints, read_checkpoint
from cosmati.train.run.copies import Copies
from cosmati.train.run.copy_place import CopyPlace
from tests.train.in_parts import put_into_parts
from tests.train.test_checkpoint_files import _checkpoint, _save
from tests.train.test_checkpoint_parts import make_trainer

pytestmark = pytest.mark.long

STEPS = 5


@pytest.fixture(params=["memory", "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Somewhere else."""
    if request.param == "folder":
        yield str(tmp_path / "elsewhere")
        return
    yield "memory://elsewhere"
    memory = fsspec.filesystem("memory")
    if memory.exists("/elsewhere"):
        memory.rm("/elsewhere", recursive=True)


def steps(place: str) -> list[str]:
    return sorted(name.partition("/")[0] for name in Target(place).names("step-*/digests.json"))


def test_a_run_goes_on_from_copies_where_its_folder_is_gone(tmp_path: Path, place: str) -> None:
    """To the bits of the run that nobody stopped; of checkpoints in parts, too."""
    given = {"checkpoint_every": "1ba", "checkpoint_to": place, "ledger": False}
    run = tmp_path / "run"
    make_trainer(run, "2ba", **given).fit()
    assert steps(f"{place}/run") == ["step-00000001", "step-00000002"]
    # As several ranks would have written it.
    for path in list_checkpoints(run / "checkpoints"):
        put_into_parts(path)
    Target(f"{place}/run").remove(Target(f"{place}/run").names("step-*/**"))
    make_trainer(run, "2ba", **given).fit()
    assert steps(f"{place}/run") == ["step-00000002"], "what wasn't copied before the end is copied by the next start"
    shutil.rmtree(run)
    trainer = make_trainer(run, f"{STEPS}ba", **given, change="budget", checkpoint_async=True)
    trainer.fit()
    make_trainer(tmp_path / "whole", f"{STEPS}ba", ledger=False).fit()
    last, whole = (read_checkpoint(list_checkpoints(tmp_path / n / "checkpoints")[0]) for n in ("run", "whole"))
    assert (last.step, last.state_digest) == (STEPS, whole.state_digest)
    assert json.loads((run / "steps.jsonl").read_text().splitlines()[0])["step"] == 3
    assert steps(f"{place}/run") == ["step-00000004", "step-00000005"]
    there = sorted(name for name in Target(f"{place}/run").names("step-00000005/**"))
    here = run / "checkpoints" / "step-00000005"
    assert there == sorted(p.relative_to(here.parent).as_posix() for p in here.rglob("*") if p.is_file())


def test_a_run_that_began_elsewhere_goes_on_from_copies_when_that_is_gone_too(tmp_path: Path, place: str) -> None:
    make_trainer(tmp_path / "parent", "1ba", ledger=False).fit()
    given = {"checkpoint_every": "1ba", "load_weights": tmp_path / "parent", "ledger": False}
    make_trainer(tmp_path / "whole", f"{STEPS}ba", **given).fit()
    run = tmp_path / "run"
    make_trainer(run, "2ba", **given, checkpoint_to=place).fit()
    for folder in (run, tmp_path / "parent"):
        shutil.rmtree(folder)
    make_trainer(run, f"{STEPS}ba", **given, checkpoint_to=place, change="budget").fit()
    last, whole = (read_checkpoint(list_checkpoints(tmp_path / n / "checkpoints")[0]) for n in ("run", "whole"))
    assert (last.step, last.state_digest) == (STEPS, whole.state_digest)


@pytest.mark.parametrize("is_told", [True, False])
def test_it_never_begins_with_other_weights_where_copies_go_or_never_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, is_told: bool
) -> None:
    """A trainer that expects copies loads nothing: what it was made with are weights that nobody asked for."""
    make_trainer(tmp_path / "parent", "1ba", ledger=False).fit()
    given = {"load_weights": tmp_path / "parent", "ledger": False, "checkpoint_to": place}
    with monkeypatch.context() as patch:
        said = ["step-00000001"] if is_told else OSError("the network is down")
        patch.setattr(CopyPlace, "steps", lambda _: said if is_told else (_ for _ in ()).throw(said))
        trainer = make_trainer(tmp_path / "run", "1ba", **given)
    with pytest.raises(CheckpointError, match="by now there is no checkpoint"):
        trainer.fit()
    assert not list_checkpoints(tmp_path / "run" / "checkpoints")
    make_trainer(tmp_path / "run", "1ba", **given).fit()


def test_without_copies_it_begins_with_what_it_asks_for(tmp_path: Path, place: str) -> None:
    given = {"load_weights": tmp_path / "parent", "ledger": False, "checkpoint_to": place}
    with pytest.raises(CheckpointError, match="parent holds no weights"):
        make_trainer(tmp_path / "run", "1ba", **given)


def test_the_newer_of_both_places_is_taken(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "checkpoints"
    copies = Copies(place, 9, tmp_path)
    for step in (3, 7):
        copies.begin(_save(tmp_path / "made", _checkpoint(step)))
    copies.settle()
    _save(folder, _checkpoint(8))
    copies.fetch(folder, "newest", has_ledger=False)
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000008"]
    shutil.rmtree(folder / "step-00000008")
    _save(folder, _checkpoint(5))
    copies.fetch(folder, "newest", has_ledger=False)
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000007", "step-00000005"]
    assert read_checkpoint(folder / "step-00000007").roots == _checkpoint(7).roots
    Target(place).remove(["step-00000007/state.json"])  # what isn't newer isn't even read
    copies.fetch(folder, "newest", has_ledger=False)
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000007", "step-00000005"]


def test_the_mark_comes_last_and_goes_first(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads in between finds no checkpoint that isn't whole."""
    did: list[str] = []
    put, remove = Target.put_file, Target.remove
    monkeypatch.setattr(Target, "put_file", lambda self, name, path: did.append(name) or put(self, name, path))
    monkeypatch.setattr(Target, "remove", lambda self, names: did.extend(names) or remove(self, names))
    copies = Copies(place, 1, tmp_path)
    Target(place).put_file("step-00000001/state.json", Path(__file__))  # of a process that was killed
    del did[:]
    for step in (2, 3):
        copies.begin(_save(tmp_path, _checkpoint(step)))
    copies.settle()
    assert steps(place) == ["step-00000003"]
    assert {name.partition("/")[0] for name in Target(place).names("**")} == {"step-00000003", "writer.json"}
    files = [name.partition("/")[2] for name in did if name.startswith("step-00000002/")]
    # Removed in case it's there, put last, and removed first again.
    half = (len(files) + 1) // 2
    assert [at for at, name in enumerate(files) if name == "digests.json"] == [0, half - 1, half]
    assert "step-00000001/state.json" in did


def test_a_damaged_copy_is_not_taken(tmp_path: Path, place: str) -> None:
    copies = Copies(place, 1, tmp_path)
    copies.begin(_save(tmp_path / "made", _checkpoint(3)))
    copies.settle()
    Target(place).put("step-00000003/state.json", b"{}")
    with pytest.raises(CheckpointError, match="damaged"):
        copies.fetch(tmp_path / "checkpoints", "newest", has_ledger=False)
    assert list_checkpoints(tmp_path / "checkpoints") == []


def test_what_an_object_is_called_leads_nowhere_else(tmp_path: Path) -> None:
    """Whoever can write to the bucket can't write to this machine."""
    copies = Copies("memory://calls", 1, tmp_path)
    copies.begin(_save(tmp_path / "made", _checkpoint(3)))
    copies.settle()
    memory = fsspec.filesystem("memory")
    for name in ("step-99999999x/digests.json", "step-abc/digests.json"):
        memory.pipe_file(f"/calls/{name}", b"{}")
    memory.store["/calls/step-00000003/a/../../../../out"] = memory.store["/calls/step-00000003/digests.json"]
    with pytest.raises(CheckpointError, match="leads out of it"):
        copies.fetch(tmp_path / "run" / "checkpoints", "newest", has_ledger=False)
    assert not (tmp_path / "out").exists()
    del memory.store["/calls/step-00000003/a/../../../../out"]
    copies.fetch(tmp_path / "run" / "checkpoints", "newest", has_ledger=False)
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-00000003"]
    memory.rm("/calls", recursive=True)


def test_a_run_with_a_ledger_needs_it_beside_the_copy(tmp_path: Path, place: str) -> None:
    given = {"checkpoint_every": "1ba", "checkpoint_to": place}
    run = tmp_path / "run"
    make_trainer(run, "2ba", **given).fit()
    run.rename(tmp_path / "kept")
    with pytest.raises(CheckpointError, match=r"keeps a ledger, and the ledger isn't in .*`ledger` and `private`"):
        make_trainer(run, f"{STEPS}ba", **given, change="budget").fit()
    assert list((run / "checkpoints").iterdir()) == []
    for name in ("ledger", "private"):
        shutil.copytree(tmp_path / "kept" / name, run / name)
    result = make_trainer(run, f"{STEPS}ba", **given, change="budget").fit()
    assert (result.outcome, result.clock.step) == ("completed", STEPS)


def test_what_cannot_be_copied_is_warned_of_and_an_error_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Target, name: str, path: Path) -> None:
        raise RemoteError(f"{name} can't be written.")

    monkeypatch.setattr(Target, "put_file", refuse)
    given: dict[str, Any] = {"checkpoint_every": "1ba", "checkpoint_to": "memory://nowhere", "ledger": False}
    with (
        pytest.warns(UserWarning, match=r"couldn't be copied to memory://nowhere/run: .* The run goes on"),
        pytest.raises(CheckpointError, match=r"step-00000002 couldn't be copied .*starting the run again copies it"),
    ):
        make_trainer(tmp_path / "run", "2ba", **given).fit()
    assert list_checkpoints(tmp_path / "run" / "checkpoints")[0].name == "step-00000002"
    monkeypatch.undo()
    make_trainer(tmp_path / "run", "2ba", **given).fit()
    assert steps("memory://nowhere/run") == ["step-00000002"]
    fsspec.filesystem("memory").rm("/nowhere", recursive=True)


def test_the_loop_does_not_wait_for_a_copy_and_what_is_copied_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, put = threading.Event(), Target.put_file

    def wait(self: Target, name: str, path: Path) -> None:
        assert opened.wait(60)
        put(self, name, path)

    monkeypatch.setattr(Target, "put_file", wait)
    trainer = make_trainer(
        tmp_path / "run", "9ba", checkpoint_to=str(tmp_path / "elsewhere"), num_checkpoints=1, ledger=False
    )
    with trainer:
        assert steps(str(tmp_path / "elsewhere/run")) == [], "it's under way"
        trainer.step((torch.zeros(8, 3), torch.zeros(8, dtype=torch.long)))
        threading.Timer(0.3, opened.set).start()
        trainer.save()  # It would have the one before removed, and waits.
        assert opened.is_set()
    assert steps(str(tmp_path / "elsewhere/run")) == ["step-00000001"]


def test_a_damaged_checkpoint_is_not_copied_over_a_whole_one(tmp_path: Path, place: str) -> None:
    """With one kept there, the damaged one would have the whole one removed."""
    given: dict[str, Any] = {"checkpoint_every": "1ba", "num_checkpoints": 1, "ledger": False}
    make_trainer(tmp_path / "run", "2ba", **given, checkpoint_to=place).fit()
    make_trainer(tmp_path / "run", "3ba", **given, change=("budget",)).fit()
    (tmp_path / "run" / "checkpoints" / "step-00000003" / "state.json").write_text("{}")
    again = {**given, "checkpoint_to": place, "change": ("budget",)}
    with pytest.raises(CheckpointError, match=r"No checkpoint before it is whole.* has a copy of step-00000002: move"):
        make_trainer(tmp_path / "run", "4ba", **again).fit()
    assert steps(f"{place}/run") == ["step-00000002"]
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert make_trainer(tmp_path / "run", "4ba", **again).fit().clock.step == 4
    assert steps(f"{place}/run") == ["step-00000004"]


def test_damaged_copies_are_passed_over_where_that_is_asked_for(tmp_path: Path, place: str) -> None:
    copies = Copies(place, 9, tmp_path)
    for step in (3, 7):
        copies.begin(_save(tmp_path / "made", _checkpoint(step)))
    copies.settle()
    Target(place).put("step-00000007/state.json", b"{}")
    with pytest.raises(CheckpointError, match=r"damaged.*resume_from='whole'"):
        copies.fetch(tmp_path / "checkpoints", "newest", has_ledger=False)
    assert list((tmp_path / "checkpoints").iterdir()) == [], "no half of it is left"
    copies.fetch(tmp_path / "checkpoints", "whole", has_ledger=False)
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000003"]
    Target(place).put("step-00000003/state.json", b"{}")
    with pytest.raises(CheckpointError, match="damaged"):
        copies.fetch(tmp_path / "empty", "whole", has_ledger=False)
    _save(tmp_path / "own", _checkpoint(1))
    copies.fetch(tmp_path / "own", "whole", has_ledger=False)
    assert [path.name for path in list_checkpoints(tmp_path / "own")] == ["step-00000001"]


def test_what_a_run_had_before_it_went_back_leaves_the_place(tmp_path: Path, place: str) -> None:
    """Kept as the newest, it would be gone on from, and the new ones removed."""
    copies = Copies(place, 1, tmp_path)
    if "memory" not in place:
        (Path(place) / "step-00000001" / "state").mkdir(parents=True)  # A kill came before they were removed.
    for step in (9, 100_000_000, 5, 6):
        copies.begin(_save(tmp_path / "made", _checkpoint(step)))
        copies.settle()
        assert steps(place) == [f"step-{step:08d}"]
    if "memory" not in place:  # An object store has no empty folders.
        assert sorted(path.name for path in Path(place).iterdir()) == ["step-00000006", "writer.json"]


def test_what_a_kill_has_left_there_goes_at_the_next_start(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"checkpoint_every": "1ba", "ledger": False, "checkpoint_to": place, "num_checkpoints": 1}
    make_trainer(tmp_path / "run", "2ba", **given).fit()
    target = Target(f"{place}/run")
    target.put("step-00000001/state.json", b"{}")  # its list of digests has gone, as the first of its files
    target.put("step-00000000/digests.json", b"{}")
    monkeypatch.setattr(Target, "put_file", lambda *_: pytest.fail("what is there isn't copied again"))
    make_trainer(tmp_path / "run", "2ba", **given).fit()
    assert {name.partition("/")[0] for name in target.names("**")} == {"step-00000002", "writer.json"}


def test_another_checkpoint_of_a_step_takes_the_place_of_the_one_there(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in between, there is none: never a mixture."""
    copies = Copies(place, 9, tmp_path)
    copies.begin(_save(tmp_path / "made", _checkpoint(3)))
    copies.settle()
    put = Target.put_file
    seen: list[list[str]] = []
    monkeypatch.setattr(Target, "put_file", lambda self, *given: seen.append(steps(place)) or put(self, *given))
    copies.begin(_save(tmp_path / "made", _checkpoint(3, value=0.0)))
    copies.settle()
    assert seen
    assert not any(seen)
    copies.fetch(tmp_path / "checkpoints", "newest", has_ledger=False)
    assert read_checkpoint(tmp_path / "checkpoints" / "step-00000003").roots == _checkpoint(3, value=0.0).roots


def test_a_place_is_one_run_s(tmp_path: Path, place: str) -> None:
    """Another run neither mixes its checkpoints in, nor is given those that are there."""
    given: dict[str, Any] = {"checkpoint_every": "1ba", "ledger": False}
    make_trainer(tmp_path / "a" / "run", "2ba", **given, checkpoint_to=place).fit()
    there = Target(f"{place}/run").read("writer.json", max_bytes=999)
    with pytest.raises(CheckpointError, match=r"settings: seed 7, was 0.* It was brought from .*run"):
        make_trainer(tmp_path / "b" / "run", "2ba", **given, checkpoint_to=place, seed=7).fit()
    assert list_checkpoints(tmp_path / "b" / "run" / "checkpoints") == [], "what isn't its own is given back"
    assert Target(f"{place}/run").read("writer.json", max_bytes=999) == there
    make_trainer(tmp_path / "b" / "run", "1ba", **given, seed=7).fit()
    again = make_trainer(tmp_path / "b" / "run", "9ba", **given, checkpoint_to=place, seed=7, change=("budget",))
    with pytest.raises(CheckpointError, match=r"They're of another run.*writer\.json names its folder"):
        again.fit()
    assert list_checkpoints(tmp_path / "b" / "run" / "checkpoints")[0].name == "step-00000001"
    assert str(tmp_path / "a" / "run") in json.loads(there)["run"]
    assert (
        make_trainer(tmp_path / "a" / "run", "3ba", **given, checkpoint_to=place, change=("budget",)).fit().metrics
        == {}
    )


def test_who_goes_on_from_a_place_has_it_and_who_had_it_is_told(tmp_path: Path, place: str) -> None:
    made = _save(tmp_path / "made", _checkpoint(3))
    for name in ("old", "new", "other"):
        (tmp_path / name).mkdir()
    old, new = (Copies(place, 1, tmp_path / name) for name in ("old", "new"))
    old.claim()
    old.begin(made)
    old.settle()
    new.fetch(tmp_path / "new" / "checkpoints", "newest", has_ledger=False)
    new.claim()
    old.begin(_save(tmp_path / "made", _checkpoint(4)))
    with pytest.raises(
        CheckpointError, match=r"step-00000004 couldn't be copied.*Another process goes on with this run"
    ):
        old.settle()
    assert steps(place) == ["step-00000003"]
    new.begin(_save(tmp_path / "made", _checkpoint(5)))
    new.settle()
    again = Copies(place, 1, tmp_path / "new")
    again.fetch(tmp_path / "new" / "checkpoints", "newest", has_ledger=False)
    again.claim()
    new.begin(_save(tmp_path / "made", _checkpoint(6)))
    new.settle()
    assert steps(place) == ["step-00000006"]
    with pytest.raises(CheckpointError, match="They're of another run"):
        old.fetch(tmp_path / "made", "newest", has_ledger=False)
    Target(place).remove(["writer.json"])  # Somebody has tidied up.
    new.begin(_save(tmp_path / "made", _checkpoint(7)))
    new.settle()
    assert [one.url for one in read_copied_to(tmp_path / "new")] == [place] * 2, "the one before, and its own"


@pytest.mark.parametrize("killed", ["before anything is said there", "after"])
def test_a_kill_while_a_place_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: str) -> None:
    place = str(tmp_path / "elsewhere")
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    old, new = (Copies(place, 1, tmp_path / name) for name in ("old", "new"))
    old.claim()
    old.begin(_save(tmp_path / "made", _checkpoint(3)))
    old.settle()
    new.fetch(tmp_path / "new" / "checkpoints", "newest", has_ledger=False)
    put = Target.put

    def stops(self: Target, name: str, data: bytes) -> None:
        if killed == "after":
            put(self, name, data)
        raise OSError("killed")

    monkeypatch.setattr(Target, "put", stops)
    with pytest.raises(CheckpointError, match="killed"):
        new.claim()
    monkeypatch.undo()
    new = Copies(place, 1, tmp_path / "new")
    new.fetch(tmp_path / "new" / "checkpoints", "newest", has_ledger=False)
    new.claim()
    old.begin(tmp_path / "made" / "step-00000003")
    with pytest.raises(CheckpointError, match="Another process"):
        old.settle()


def test_a_place_is_noted_before_anything_goes_there_and_without_a_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[list[str]] = []
    monkeypatch.setattr(Target, "put", lambda *_: noted.append([one.url for one in read_copied_to(tmp_path)]))
    monkeypatch.setattr(Target, "read", lambda *_, **__: b'{"token": ""}')
    CopyPlace("sftp://me:secret@host/runs/a/").claim(tmp_path)
    assert noted == [["sftp://host/runs/a"]]
    monkeypatch.chdir(tmp_path)
    CopyPlace("here/run").claim(tmp_path)
    assert noted[1][1] == str(tmp_path / "here" / "run"), "it's found from another directory, too"


def test_a_folder_that_cannot_be_and_a_client_s_own_error_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"checkpoint_to can't be a folder in .*/file/run"):
        make_trainer(tmp_path / "run", "1ba", checkpoint_to=str(tmp_path / "file")).fit()

    def fail(*_: object) -> None:
        raise RuntimeError("cannot schedule new futures")

    monkeypatch.setattr(Target, "put_file", fail)
    copies = Copies(str(tmp_path / "elsewhere"), 1, tmp_path)
    copies.begin(_save(tmp_path / "made", _checkpoint(3)))
    with pytest.raises(CheckpointError, match=r"step-00000003 couldn't be copied to .*cannot schedule new futures"):
        copies.settle()
    copies.settle()  # It's told once.


def test_a_long_file_has_longer_to_come_and_is_on_disk_when_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = Copies("memory://long", 1, tmp_path)
    path = _save(tmp_path / "made", Checkpoint(3, {"w": torch.zeros(300_000)}, {}, {}))
    copies.begin(path)
    copies.settle()
    deadlines, synced, fetch, fsync = {}, [], Remote.fetch, os.fsync

    def note(self: Target, name: str, to: Any, *, num_bytes: int | None = None) -> None:
        deadlines[name.partition("/")[2]] = (num_bytes, self._deadline_seconds)
        fetch(self, name, to, num_bytes=num_bytes)

    monkeypatch.setattr(Remote, "fetch", note)
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink().name) or fsync(fd))
    copies.fetch(tmp_path / "checkpoints", "newest", has_ledger=False)
    sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
    assert deadlines == {name: (size, 60 + size / 100_000) for name, size in sizes.items()}
    assert deadlines["model.safetensors"][1] > 71
    assert {*sizes} <= {*synced}
    assert synced[-2:] == [".draft-00000003", "checkpoints"]
    fsspec.filesystem("memory").rm("/long", recursive=True)


def test_a_run_that_fails_tells_of_the_copy_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Target, name: str, path: Path) -> None:
        raise RemoteError(f"{name} can't be written.")

    monkeypatch.setattr(Target, "put_file", refuse)
    trainer = make_trainer(tmp_path / "run", "9ba", checkpoint_to=str(tmp_path / "elsewhere"), ledger=False)
    with (
        pytest.warns(UserWarning, match=r"step-00000000 couldn't be copied .*copies it\.$"),
        pytest.raises(ZeroDivisionError),
        trainer,
    ):
        raise ZeroDivisionError


@pytest.mark.s3
@pytest.mark.filterwarnings("ignore")  # of moto and botocore
@pytest.mark.timeout(300)
def test_copies_in_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As moto serves S3 on loopback; credentials come as clients of S3 have them."""
    server_of, boto3 = pytest.importorskip("moto.server"), pytest.importorskip("boto3")
    pytest.importorskip("s3fs")
    server = server_of.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        }.items():
            monkeypatch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="bucket")
        given = {"checkpoint_every": "1ba", "checkpoint_to": "s3://bucket/runs", "ledger": False}
        run = tmp_path / "run"
        make_trainer(run, "3ba", **given).fit()
        shutil.rmtree(run)
        make_trainer(run, f"{STEPS}ba", **given, change="budget").fit()
        make_trainer(tmp_path / "whole", f"{STEPS}ba", ledger=False).fit()
        last, whole = (read_checkpoint(list_checkpoints(tmp_path / n / "checkpoints")[0]) for n in ("run", "whole"))
        assert last.state_digest == whole.state_digest
        assert steps("s3://bucket/runs/run") == ["step-00000004", "step-00000005"]
    finally:
        server.stop()
