"""Checkpoints on disk, without a trainer: whole or absent, checked before use, the newest ones kept."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from cosmati.core.state import parameter_root
from cosmati.errors import CheckpointError
from cosmati.train.run import checkpoints
from cosmati.train.run.checkpoints import (
    Checkpoint,
    choose_checkpoint,
    list_checkpoints,
    publish_checkpoint,
    read_checkpoint,
    signed_digest_of,
    step_of,
    write_checkpoint,
)

KINDS = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
]  # fmt: skip


def _checkpoint(step: int = 3, *, value: float = 1.0) -> Checkpoint:
    model = {str(kind): torch.tensor([[value, 0, 1]]).to(kind) for kind in KINDS}
    model["turned"] = torch.arange(6.0).view(2, 3).t()
    state = {f"of/{name}": tensor.flatten() * 0 + tensor.flatten() for name, tensor in model.items()}
    state["scalar"] = torch.tensor(value)
    return Checkpoint(step, model, state, {"clock": [step, 0], "about": "it"})


def _save(folder: Path, checkpoint: Checkpoint, keep: int = 9) -> Path:
    return publish_checkpoint(write_checkpoint(folder, checkpoint), keep=keep)


def test_a_place_where_no_draft_can_be_begun_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"checkpoint of step 3 couldn't be written to .*Not a directory"):
        write_checkpoint(tmp_path / "file", _checkpoint())


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    written = _checkpoint()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = read_checkpoint(_save(tmp_path, written))
    assert (read.step, read.facts) == (3, {"clock": [3, 0], "about": "it"})
    for name in ("model", "state"):
        before, after = getattr(written, name), getattr(read, name)
        assert set(before) == set(after)
        assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
        assert all(tensor.dtype == after[key].dtype for key, tensor in before.items())
    assert read.state_digest == written.state_digest == parameter_root({**written.model, **written.state})
    assert _checkpoint(value=0.0).state_digest != written.state_digest


def test_what_a_resume_goes_by_is_signed_and_what_differs_between_equal_runs_is_not() -> None:
    clock = [3, 0, 1, 8, 8, 2.5]
    signed = ("optimizers", "feed", "identity", "initial_root", "phases", "budget_was_read")
    plain = {"clock": clock, **dict.fromkeys(signed, "a")}
    digest = signed_digest_of(b"state", plain)
    for name in signed:
        assert signed_digest_of(b"state", {**plain, name: "b"}) != digest, name
        assert signed_digest_of(b"state", {k: v for k, v in plain.items() if k != name}) != digest, name
    for at in range(5):
        other = [one + (place == at) for place, one in enumerate(clock)]
        assert signed_digest_of(b"state", {**plain, "clock": other}) != digest, at
    assert signed_digest_of(b"State", plain) != digest
    slower = {**plain, "clock": [*clock[:5], 9.0], "environment": {"cpu": "another"}}
    assert signed_digest_of(b"state", slower) == digest


def test_a_checkpoint_may_have_no_state(tmp_path: Path) -> None:
    read = read_checkpoint(_save(tmp_path, Checkpoint(0, {"w": torch.ones(1)}, {}, {})))
    assert (read.step, dict(read.state), dict(read.facts)) == (0, {}, {})


def test_a_checkpoint_has_its_name_only_once_it_is_published(tmp_path: Path) -> None:
    draft = write_checkpoint(tmp_path, _checkpoint(12))
    assert draft == tmp_path / ".draft-00000012"
    assert list_checkpoints(tmp_path) == []
    assert publish_checkpoint(draft, keep=1) == tmp_path / "step-00000012"
    assert list_checkpoints(tmp_path) == [tmp_path / "step-00000012"]
    assert not draft.exists()


def test_every_file_but_the_list_is_in_the_list(tmp_path: Path) -> None:
    path = _save(tmp_path, _checkpoint())
    files = [file for file in path.rglob("*") if file.is_file() and file.name != "digests.json"]
    expected = {str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    assert json.loads((path / "digests.json").read_text()) == expected
    assert {"model.safetensors", "state.json"} < set(expected)
    assert any(name.startswith("state/") for name in expected)


def test_the_newest_are_kept_in_the_order_of_their_steps(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "none") == []
    for step in (9, 100, 20):
        _save(tmp_path, _checkpoint(step))
    assert [path.name for path in list_checkpoints(tmp_path)] == [f"step-{step:08d}" for step in (100, 20, 9)]
    _save(tmp_path, _checkpoint(101), keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000101", "step-00000100"]


def test_steps_of_more_than_eight_digits_come_after_the_others(tmp_path: Path) -> None:
    for step in (99_999_998, 99_999_999, 100_000_000, 100_000_001):
        _save(tmp_path, _checkpoint(step), keep=3)
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [100_000_001, 100_000_000, 99_999_999]


def test_what_somebody_else_puts_there_is_no_checkpoint_and_stays(tmp_path: Path) -> None:
    path = _save(tmp_path, _checkpoint(5))
    shutil.copytree(path, tmp_path / "step-00000005.bak")
    (tmp_path / "step-notes.txt").write_text("mine")
    (tmp_path / "step-00000009").write_text("mine, too")
    _save(tmp_path, _checkpoint(6), keep=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000006"]
    assert choose_checkpoint(tmp_path, "newest", may_move=True) is not None
    assert len(list(tmp_path.iterdir())) == 4


def test_a_checkpoint_under_another_step_s_name_is_refused(tmp_path: Path) -> None:
    """It would be gone on from as the newest, and outlive those that are newer in truth."""
    _save(tmp_path, _checkpoint(1))
    renamed = _save(tmp_path, _checkpoint(2)).rename(tmp_path / "step-00000009")
    with pytest.raises(CheckpointError, match="is of step 2: its folder's name says another number"):
        read_checkpoint(renamed)
    found = choose_checkpoint(tmp_path, "whole", may_move=True)
    assert found is not None
    assert found.step == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged-1-step-00000009", "step-00000001"]
    assert read_checkpoint(renamed.with_name("damaged-1-step-00000009").rename(tmp_path / "mine")).step == 2


def test_a_draft_or_a_checkpoint_of_the_same_step_gives_way(tmp_path: Path) -> None:
    (tmp_path / ".draft-00000003" / "state").mkdir(parents=True)
    (tmp_path / ".draft-00000003" / "left over").write_text("by a crash")
    _save(tmp_path, _checkpoint(value=1.0))
    read = read_checkpoint(_save(tmp_path, _checkpoint(value=0.0)))
    assert float(read.state["scalar"]) == 0.0
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("damage", ["changed", "gone", "added", "unlisted"])
def test_a_damaged_checkpoint_is_refused_and_the_files_named(tmp_path: Path, damage: str) -> None:
    path = _save(tmp_path, _checkpoint())
    file = path / "state.json"
    if damage == "changed":
        file.write_text(file.read_text().replace("it", "at"))
    elif damage == "gone":
        file.unlink()
    elif damage == "added":
        file = path / "state" / "more"
        file.write_text("")
    else:
        listed = json.loads((path / "digests.json").read_text())
        del listed["state.json"]
        (path / "digests.json").write_text(json.dumps(listed))
    name = str(file.relative_to(path))
    with pytest.raises(CheckpointError, match=rf"is damaged: {name} don't match digests\.json"):
        read_checkpoint(path)


@pytest.mark.parametrize("file", ["digests.json", "state.json", "model.safetensors"])
def test_what_is_no_checkpoint_cannot_be_read(tmp_path: Path, file: str) -> None:
    path = _save(tmp_path, _checkpoint())
    if file == "digests.json":
        (path / file).unlink()
    else:
        (path / file).write_text('{"about": "no step"}' if file == "state.json" else "no tensors")
        (path / "digests.json").write_text(json.dumps(checkpoints._digests(path)))
    with pytest.raises(CheckpointError, match=r"can't be read"):
        read_checkpoint(path)


def test_a_disk_that_refuses_leaves_no_draft_and_the_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path, _checkpoint(1))

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "sync", full)
    with pytest.raises(CheckpointError, match=r"checkpoint of step 2 couldn't be written to .*No space left"):
        write_checkpoint(tmp_path, _checkpoint(2))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_everything_is_durable_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(checkpoints, "sync", synced.append)
    draft = write_checkpoint(tmp_path, _checkpoint())
    assert set(synced) == {draft, *draft.rglob("*")}
    shutil.rmtree(draft)


def test_what_stands_where_a_killed_runs_draft_would_and_cannot_go_stays(tmp_path: Path) -> None:
    """Drafts that a kill has left go when the next checkpoint is published; a file of that name is nobody's draft."""
    for name in (".draft-00000003-killed", ".draft-of-mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_text("")
    (tmp_path / ".draft-file").write_text("somebody's")
    draft = write_checkpoint(tmp_path, Checkpoint(4, {"w": torch.ones(2)}, {}, {"about": 4}))
    assert publish_checkpoint(draft, keep=1) == tmp_path / "step-00000004"
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000004", ".draft-file"}
