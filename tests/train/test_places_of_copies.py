"""The place of a run's copies: whose it is, which files it has, and in which order they come and go."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmati.data.shards.remote import RemoteError
from cosmati.errors import CheckpointError
from cosmati.records.copies import CopiedTo, read_copied_to
from cosmati.train.run import copy_place
from cosmati.train.run.checkpoints import Checkpoint, publish_checkpoint, write_checkpoint
from cosmati.train.run.copy_place import CopyPlace, url_of_copies


def published(folder: Path, step: int) -> Path:
    made = Checkpoint(step, {"w": torch.full((2,), float(step))}, {}, {})
    return publish_checkpoint(write_checkpoint(folder, made), keep=9)


def raises(error: Exception) -> Callable[..., Any]:
    def fails(*_: object) -> None:
        raise error

    return fails


class Run:
    """Folders of a run, and the place of its copies."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder, self.place, self.made = tmp_path / "run", tmp_path / "there", tmp_path / "made"
        self.checkpoints = self.folder / "checkpoints"
        self.checkpoints.mkdir(parents=True)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


# ---------------------------------------------------------------------------------------------------- whose place it is


def test_a_recipe_s_runs_have_a_place_each() -> None:
    assert url_of_copies("s3://bucket/a//", Path("runs/one")) == "s3://bucket/a/one"
    assert url_of_copies(Path("/there"), Path("one")) == "/there/one"  # type: ignore[arg-type]


def test_a_place_is_told_by_its_whole_path_or_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert CopyPlace("a/b").url == str(tmp_path / "a" / "b")
    assert CopyPlace("memory://me:secret@there/b/").url == "memory://there/b"


def test_who_claims_a_place_notes_it_before_it_says_so(run: Run) -> None:
    place = CopyPlace(str(run.place))
    assert (place.token(), place.tokens_of(run.folder)) == ("", [])
    first = place.claim(run.folder)
    assert len(first) == 32
    assert json.loads((run.place / "writer.json").read_text()) == {"run": str(run.folder), "token": first}
    assert list(read_copied_to(run.folder)) == [CopiedTo(str(run.place), first)]
    assert place.claim(run.folder) == first
    assert place.tokens_of(run.folder) == [first], "its own is noted once"
    place.say(run.folder, "other")
    third = place.claim(run.folder)
    assert third not in (first, "other")
    assert place.tokens_of(run.folder) == [first, "other", third], "with the one that it has taken the place of"
    place.say(run.folder, "other")
    fourth = place.claim(run.folder)
    assert place.tokens_of(run.folder) == [first, "other", third, fourth]
    assert place.claim(run.folder) == fourth, "its last one"
    elsewhere = CopyPlace(str(run.place / "else"))
    assert elsewhere.tokens_of(run.folder) == []


def test_a_place_or_a_folder_that_can_not_be_written_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(copy_place, "sync", synced.append)
    CopyPlace(str(run.place)).claim(run.folder)
    assert synced == [run.folder / "copies.jsonl", run.folder]
    words = rf"^{run.place} can't be made the place of this run's copies: .* Mend that, or leave checkpoint_to out"
    for error in (RemoteError("it's dark."), OSError("it's dark.")):
        monkeypatch.setattr(CopyPlace, "token", raises(error))
        with pytest.raises(CheckpointError, match=words):
            CopyPlace(str(run.place)).claim(run.folder)


@pytest.mark.parametrize("told", ["no json", "{}", "7", '["token"]'])
def test_a_writer_that_says_nothing_readable_is_refused(run: Run, told: str) -> None:
    run.place.mkdir()
    (run.place / "writer.json").write_text(told)
    with pytest.raises(
        CheckpointError, match=rf"^{run.place}/writer\.json can't be read: .*Remove it, or take another"
    ):
        CopyPlace(str(run.place)).token()


# ----------------------------------------------------------------------------------------------------- files of a place


def test_a_place_lists_checkpoints_by_number_and_files_by_checkpoint(run: Run) -> None:
    place = CopyPlace(str(run.place))
    for name in ("step-00000009", "step-00000010", "step-100000000", "step-notes"):
        (run.place / name / "state").mkdir(parents=True)
        (run.place / name / "digests.json").write_text(name)
        (run.place / name / "state" / "one").touch()
    (run.place / "step-00000011").mkdir()
    (run.place / "step-00000011" / "state.json").touch()
    assert place.steps() == ["step-100000000", "step-00000010", "step-00000009"]
    files = place.files()
    assert set(files) == {*place.steps(), "step-00000011", "step-notes"}
    assert sorted(files["step-00000009"]) == ["step-00000009/digests.json", "step-00000009/state/one"]
    assert files["step-00000011"] == ["step-00000011/state.json"]
    assert place.digests("step-00000009") == b"step-00000009"
    assert place.digests("step-00000011") == b""


def test_the_list_of_digests_is_put_last_and_goes_first(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[tuple[str, str]] = []
    place, made = CopyPlace(str(run.place)), published(run.made, 3)
    (made / "zzz").touch()
    monkeypatch.setattr(place._target, "put_file", lambda name, path: did.append(("put", name)))
    monkeypatch.setattr(place._target, "remove", lambda all_names: did.extend(("remove", name) for name in all_names))
    place.put(made)
    mark = "step-00000003/digests.json"
    assert (did[0], did[-1]) == (("remove", mark), ("put", mark))
    others = ("model.safetensors", "state.json", "zzz")
    assert sorted(did[1:-1]) == [("put", f"step-00000003/{name}") for name in others]
    did.clear()
    place.remove(["step-00000003/a", "step-00000003/digests.json", "step-00000003/digests.json.old"])
    assert [name.partition("/")[2] for _, name in did] == ["digests.json", "a", "digests.json.old"]


def test_folders_without_a_file_go_and_others_stay(run: Run) -> None:
    for name in ("step-00000001/a/b", "step-00000002/a", "other/a"):
        (run.place / name).mkdir(parents=True)
    for name in ("step-00000001/a/b/file", "step-00000002/a/file", "step-00000002/gone"):
        (run.place / name).touch()
    CopyPlace(str(run.place)).remove(["step-00000001/a/b/file", "step-00000002/gone"])
    assert sorted(path.relative_to(run.place).as_posix() for path in run.place.rglob("*")) == [
        "other",
        "other/a",
        "step-00000002",
        "step-00000002/a",
        "step-00000002/a/file",
    ]


def test_what_is_fetched_is_synced_and_stays_below_its_draft(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(copy_place, "sync", synced.append)
    place, draft = CopyPlace(str(run.place)), run.checkpoints / ".draft"
    (run.place / "step-00000001" / "a").mkdir(parents=True)
    for name in ("digests.json", "a/one"):
        (run.place / "step-00000001" / name).write_text(name)
    place.fetch("step-00000001", draft)
    assert (draft / "a" / "one").read_text() == "a/one"
    assert sorted(synced) == sorted(draft.rglob("*"))
    assert len(synced) == 3
    monkeypatch.setattr(place._target, "names", lambda _: ["step-00000001/../../out"])
    with pytest.raises(ValueError, match=r"^step-00000001/\.\./\.\./out leads out of it\.$"):
        place.fetch("step-00000001", draft)
    assert not (run.folder / "out").exists()


@pytest.mark.parametrize("sizes", [{"step-00000001/a": 7}, None])
def test_a_file_is_fetched_by_its_length_where_that_is_known(
    run: Run, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int] | None
) -> None:
    told: list[Any] = []
    place, files = CopyPlace(str(run.place)), ["step-00000001/a", "step-00000001/b"]
    monkeypatch.setattr(place._target, "names", lambda pattern: told.append(pattern) or files)
    monkeypatch.setattr(place._target, "sizes", lambda names, *, sure: told.append((names, sure)) or sizes)
    monkeypatch.setattr(place._target, "fetch", lambda path, to, *, num_bytes: told.append((path, num_bytes)))
    place.fetch("step-00000001", run.checkpoints / ".draft")
    known = None if sizes is None else 7
    assert told == ["step-00000001/**", (files, ("", 0)), (files[0], known), (files[1], None)]
