"""Copies in a folder, without a run: whose the place is, what goes there and from there, and what is told of it."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmati.data.shards.remote import RemoteError
from cosmati.errors import CheckpointError
from cosmati.train.run.checkpoints import Checkpoint, list_checkpoints, publish_checkpoint, write_checkpoint
from cosmati.train.run.copies import Copies
from cosmati.train.run.copy_place import CopyPlace


def published(folder: Path, step: int, facts: Mapping[str, Any] | None = None) -> Path:
    made = Checkpoint(step, {"w": torch.full((2,), float(step))}, {}, facts or {})
    return publish_checkpoint(write_checkpoint(folder, made), keep=9)


def damaged(folder: Path, step: int) -> Path:
    path = published(folder, step)
    (path / "state.json").write_text("{}")
    return path


def names(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder)]


def copied(copies: Copies, *checkpoints: Path) -> None:
    for path in checkpoints:
        copies.begin(path)
    copies.settle()


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

    def copies(self, keep: int = 9, *, claimed: bool = True) -> Copies:
        copies = Copies(str(self.place), keep, self.folder)
        if claimed:
            copies.claim()
        return copies


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


# ---------------------------------------------------------------------------------------------------------- going there


def test_a_place_is_a_folder_that_is_made(tmp_path: Path) -> None:
    Copies(str(tmp_path / "a" / "b"), 1, tmp_path)
    Copies(str(tmp_path / "a" / "b"), 1, tmp_path)
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"checkpoint_to can't be a folder in .*/file: .*Give another") as caught:
        Copies(str(tmp_path / "file"), 1, tmp_path)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_copy_has_every_byte(run: Run) -> None:
    made = published(run.made, 3)
    copied(run.copies(), made)
    for path in made.rglob("*"):
        there = run.place / path.relative_to(run.made)
        assert there.is_dir() if path.is_dir() and any(path.iterdir()) else True
        assert not path.is_file() or there.read_bytes() == path.read_bytes()


def test_the_newest_are_kept_there_and_what_is_newer_goes(run: Run) -> None:
    """A run that has gone back takes its steps anew: what it had of them before is another's."""
    copies = run.copies(keep=2)
    copied(copies, *(published(run.made, step) for step in (1, 2, 3)))
    assert names(run.place) == ["step-00000003", "step-00000002"]
    (run.place / "step-00000009").mkdir()
    (run.place / "step-00000009" / "torn").touch()
    copied(copies, published(run.made, 2))
    assert names(run.place) == ["step-00000002"]
    assert sorted(path.name for path in run.place.iterdir()) == ["step-00000002", "writer.json"]


def test_a_start_copies_what_it_goes_on_from_where_that_is_not_there(run: Run) -> None:
    made, copies = published(run.made, 2), run.copies(keep=1)
    copies.catch_up(made)
    copies.settle()
    assert names(run.place) == ["step-00000002"]
    mark = run.place / "step-00000002" / "digests.json"
    mark.write_bytes(b"as it was")
    published(run.place, 1)
    copies.catch_up(made)
    copies.settle()
    assert mark.read_bytes() == b"as it was", "what is there isn't copied again"
    assert names(run.place) == ["step-00000002"], "and it's tidied up"


def test_a_place_that_can_not_be_listed_is_told_at_the_start(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = run.copies()
    for error in (RemoteError("it's dark."), OSError("it's dark.")):
        monkeypatch.setattr(CopyPlace, "steps", raises(error))
        with pytest.raises(CheckpointError, match=rf"^{run.place} can't be listed: it's dark\. Mend that"):
            copies.catch_up(published(run.made, 2))


def test_what_could_not_be_copied_is_told_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, made = run.copies(), published(run.made, 2)
    put = CopyPlace.put
    monkeypatch.setattr(CopyPlace, "put", raises(LookupError("a client's own.")))
    words = (
        rf"^The checkpoint step-00000002 couldn't be copied to {run.place}: a client's own\. It's whole in {run.made}"
    )
    copies.begin(made)
    with pytest.raises(CheckpointError, match=words):
        copies.settle()
    copies.settle()
    copies.begin(made)
    copies.wait()
    with pytest.warns(UserWarning, match=words) as caught:
        copies.warn("")
    assert str(caught[0].message).endswith("copies it.")
    copies.begin(made)
    copies.wait()
    monkeypatch.setattr(CopyPlace, "put", put)
    with pytest.warns(UserWarning, match=words) as caught:
        copies.begin(made)
    assert str(caught[0].message).endswith("copies it. The run goes on.")
    assert caught[0].filename == __file__
    copies.settle()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copies.warn("")
    assert names(run.place) == ["step-00000002"]


def test_copies_go_one_after_the_other(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go, done = threading.Event(), list[str]()
    monkeypatch.setattr(CopyPlace, "put", lambda _, one: may_go.wait(60) and done.append(one.name))
    copies = run.copies()
    assert copies.wait(0.0)
    copies.begin(Path("step-00000001"))
    assert copies._thread is not None
    assert (copies._thread.daemon, copies._thread.name) == (True, "copy")
    assert not copies.wait(0.0)
    assert copies._thread is not None, "it goes on"
    may_go.set()
    copies.begin(Path("step-00000002"))
    assert done[0] == "step-00000001"
    assert copies.wait()
    assert done == ["step-00000001", "step-00000002"]
    assert copies._thread is None


def test_who_finds_another_token_copies_nothing_and_says_so(run: Run) -> None:
    copies, made = run.copies(), published(run.made, 2)
    (run.place / "writer.json").write_text(json.dumps({"run": "other", "token": "other"}))
    copies.begin(made)
    with pytest.raises(CheckpointError, match=r"Another process goes on with this run from there, or another run"):
        copies.settle()
    assert names(run.place) == []
    (run.place / "writer.json").unlink()
    copied(copies, made)
    told = json.loads((run.place / "writer.json").read_text())
    assert told == {"run": str(run.folder), "token": copies._token}
    assert names(run.place) == ["step-00000002"], "who has emptied the place has left it to this run"


# ----------------------------------------------------------------------------------------------------------- from there


def test_nothing_is_fetched_where_nothing_newer_is_there(run: Run) -> None:
    copies = run.copies(claimed=False)
    assert copies.told_of_newest() == copies.give_back() == ""
    copies.fetch(run.checkpoints, "newest", has_ledger=False)
    assert names(run.checkpoints) == []
    published(run.place, 3)
    published(run.checkpoints, 3)
    copies.fetch(run.checkpoints, "newest", has_ledger=False)
    assert copies.give_back() == ""
    assert names(run.checkpoints) == ["step-00000003"]
    words = f" {run.place} has a copy of step-00000003: move {run.checkpoints} away, and it's fetched."
    assert copies.told_of_newest() == words


def test_the_newest_is_brought_beside_what_is_here_and_may_be_given_back(run: Run) -> None:
    for step in (3, 4):
        published(run.place, step)
    for step in (1, 2):
        published(run.checkpoints, step)
    left = run.checkpoints / ".draft-00000004"
    left.mkdir()
    (left / "torn").touch()
    copies = run.copies(claimed=False)
    copies.fetch(run.checkpoints, "newest", has_ledger=False)
    assert names(run.checkpoints) == ["step-00000004", "step-00000002", "step-00000001"]
    assert not (run.checkpoints / "step-00000004" / "torn").exists()
    assert copies.give_back().startswith(f" It was brought from {run.place}. If the copies there are another run's")
    assert names(run.checkpoints) == ["step-00000002", "step-00000001"]


@pytest.mark.parametrize(
    ("whole", "broken", "here", "which", "expected"),
    [
        ((2,), (3,), (), "newest", None),
        ((2,), (3,), (), "whole", 2),
        ((), (2, 3), (), "whole", None),
        ((), (2, 3), (1,), "whole", 1),
        ((), (3,), (1,), "newest", None),
        ((1,), (2, 3), (), "whole", 1),
    ],
)
def test_damaged_copies_are_passed_over_unless_the_run_would_begin_anew(
    run: Run, whole: tuple[int, ...], broken: tuple[int, ...], here: tuple[int, ...], which: Any, expected: int | None
) -> None:
    for step in whole:
        published(run.place, step)
    for step in broken:
        damaged(run.place, step)
    for step in here:
        published(run.checkpoints, step)
    copies = run.copies(claimed=False)
    if expected is None:
        words = rf"newest copy of the run's checkpoints in {run.place} can't be had: .* is damaged.*resume_from='whole'"
        with pytest.raises(CheckpointError, match=words):
            copies.fetch(run.checkpoints, which, has_ledger=False)
        assert [path.name for path in run.checkpoints.iterdir()] == [f"step-0000000{step}" for step in here]
    else:
        copies.fetch(run.checkpoints, which, has_ledger=False)
        assert names(run.checkpoints) == [f"step-0000000{expected}"]


@pytest.mark.parametrize("error", [RemoteError("it's dark."), OSError("it's dark."), ValueError("it's dark.")])
def test_a_place_that_can_not_be_read_is_told(run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    published(run.place, 3)
    monkeypatch.setattr(CopyPlace, "fetch", raises(error))
    with pytest.raises(CheckpointError, match=r"can't be had: it's dark\. Mend that, or leave checkpoint_to out"):
        run.copies(claimed=False).fetch(run.checkpoints, "newest", has_ledger=False)


@pytest.mark.parametrize("has_ledger", [True, False])
@pytest.mark.parametrize("kept", [True, False])
def test_a_ledger_has_to_be_here_for_a_run_that_keeps_one(run: Run, *, has_ledger: bool, kept: bool) -> None:
    published(run.place, 3, {"identity": {"settings.ledger": kept}})
    copies = run.copies(claimed=False)
    if kept and not has_ledger:
        with pytest.raises(CheckpointError, match=rf"has the checkpoint step-00000003 .* isn't in {run.folder}: "):
            copies.fetch(run.checkpoints, "newest", has_ledger=has_ledger)
        assert list(run.checkpoints.iterdir()) == []
        assert copies.give_back() == ""
    else:
        copies.fetch(run.checkpoints, "newest", has_ledger=has_ledger)
        assert names(run.checkpoints) == ["step-00000003"]


def test_a_run_with_checkpoints_of_its_own_takes_no_other_s(run: Run, tmp_path: Path) -> None:
    other = Run(tmp_path / "other")
    other.place = run.place
    copied(other.copies(), published(other.made, 3))
    copies = run.copies(claimed=False)
    copies.fetch(run.checkpoints, "newest", has_ledger=False)
    assert names(run.checkpoints) == ["step-00000003"], "without any, it goes on with that run"
    with pytest.raises(CheckpointError, match=rf"They're of another run, .* or {run.folder} another name\."):
        copies.fetch(run.checkpoints, "newest", has_ledger=False)
    copies.claim()
    copies.fetch(run.checkpoints, "newest", has_ledger=False)
