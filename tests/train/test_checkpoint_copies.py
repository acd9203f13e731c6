"""Copies of checkpoints elsewhere: whole or none, the newest ones kept, and a run that goes on from there."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from cosmati.data.shards.remote import RemoteError
from cosmati.data.shards.upload import Target
from cosmati.errors import CheckpointError
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from cosmati.train.run.copies import Copies
from tests.train.in_parts import put_into_parts
from tests.train.test_checkpoint_files import _checkpoint, _save
from tests.train.test_checkpoint_parts import make_trainer

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


def test_the_newer_of_both_places_is_taken(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "checkpoints"
    copies = Copies(place, 9)
    for step in (3, 7):
        copies.begin(_save(tmp_path / "made", _checkpoint(step)))
    copies.settle()
    _save(folder, _checkpoint(8))
    copies.fetch(folder, has_ledger=False)
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000008"]
    shutil.rmtree(folder / "step-00000008")
    _save(folder, _checkpoint(5))
    copies.fetch(folder, has_ledger=False)
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000007", "step-00000005"]
    assert read_checkpoint(folder / "step-00000007").roots == _checkpoint(7).roots


def test_the_mark_comes_last_and_goes_first(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads in between finds no checkpoint that isn't whole."""
    did: list[str] = []
    put, remove = Target.put_file, Target.remove
    monkeypatch.setattr(Target, "put_file", lambda self, name, path: did.append(name) or put(self, name, path))
    monkeypatch.setattr(Target, "remove", lambda self, names: did.extend(names) or remove(self, names))
    copies = Copies(place, 1)
    Target(place).put_file("step-00000001/state.json", Path(__file__))  # of a process that was killed
    del did[:]
    for step in (2, 3):
        copies.begin(_save(tmp_path, _checkpoint(step)))
    copies.settle()
    assert steps(place) == ["step-00000003"]
    assert not [name for name in Target(place).names("**") if not name.startswith("step-00000003/")]
    files = [name.partition("/")[2] for name in did if name.startswith("step-00000002/")]
    assert files[len(files) // 2 - 1] == "digests.json" == files[len(files) // 2]
    assert "step-00000001/state.json" in did


def test_a_damaged_copy_is_not_taken(tmp_path: Path, place: str) -> None:
    copies = Copies(place, 1)
    copies.begin(_save(tmp_path / "made", _checkpoint(3)))
    copies.settle()
    Target(place).put("step-00000003/state.json", b"{}")
    with pytest.raises(CheckpointError, match="damaged"):
        copies.fetch(tmp_path / "checkpoints", has_ledger=False)
    assert list_checkpoints(tmp_path / "checkpoints") == []


def test_what_an_object_is_called_leads_nowhere_else(tmp_path: Path) -> None:
    """Whoever can write to the bucket can't write to this machine."""
    copies = Copies("memory://calls", 1)
    copies.begin(_save(tmp_path / "made", _checkpoint(3)))
    copies.settle()
    memory = fsspec.filesystem("memory")
    for name in ("step-99999999x/digests.json", "step-abc/digests.json"):
        memory.pipe_file(f"/calls/{name}", b"{}")
    memory.store["/calls/step-00000003/a/../../../../out"] = memory.store["/calls/step-00000003/digests.json"]
    with pytest.raises(CheckpointError, match="leads out of it"):
        copies.fetch(tmp_path / "run" / "checkpoints", has_ledger=False)
    assert not (tmp_path / "out").exists()
    del memory.store["/calls/step-00000003/a/../../../../out"]
    copies.fetch(tmp_path / "run" / "checkpoints", has_ledger=False)
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-00000003"]
    memory.rm("/calls", recursive=True)


def test_a_run_with_a_ledger_needs_it_beside_the_copy(tmp_path: Path, place: str) -> None:
    given = {"checkpoint_every": "1ba", "checkpoint_to": place}
    run = tmp_path / "run"
    make_trainer(run, "2ba", **given).fit()
    run.rename(tmp_path / "kept")
    with pytest.raises(CheckpointError, match=r"keeps a ledger, and the ledger isn't in .*`ledger` and `private`"):
        make_trainer(run, f"{STEPS}ba", **given, change="budget").fit()
    assert list_checkpoints(run / "checkpoints") == []
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
