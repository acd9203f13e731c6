"""From which checkpoint a replay begins: the nearest one that was signed and stands, and which were passed over."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cosmati.errors import CheckpointError, LedgerError, RefutedError
from cosmati.train.replay_start import From, nearest_checkpoint
from cosmati.train.run.checkpoints import Checkpoint, publish_checkpoint, read_checkpoint, write_checkpoint

STEPS = (0, 2, 4, 6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in STEPS:
        made = Checkpoint(step, {"w": torch.full((2,), float(step))}, {}, {"clock": [step]})
        publish_checkpoint(write_checkpoint(tmp_path, made), keep=9)
    return tmp_path


def at(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def run_of(folder: Path, *, signed: tuple[int, ...] = STEPS, superseded: tuple[int, ...] = ()) -> Any:
    """A ledger that has signed some of them, beside others of the same steps; those of an attempt were superseded."""
    digests = {step: read_checkpoint(at(folder, step)).signed_digest for step in STEPS}
    standing = {step: [SimpleNamespace(state_digest=one) for one in (b"other", digests[step])] for step in signed}
    standing |= {step: [SimpleNamespace(state_digest=b"another")] for step in superseded}
    return SimpleNamespace(checkpoints=standing, signed_states={(step, digests[step]) for step in superseded})


@pytest.mark.parametrize(("wanted", "begins"), [(9, 6), (6, 6), (5, 4), (4, 4), (3, 2), (2, 2), (1, 0), (0, 0)])
def test_the_nearest_one_at_or_before_a_step_is_taken(folder: Path, wanted: int, begins: int) -> None:
    found = nearest_checkpoint(run_of(folder), wanted, folder)
    assert found == (From(step=begins, path=at(folder, begins)) if begins else From())
    loaded = found.load(run_of(folder))
    assert (None if loaded is None else loaded.step) == (begins or None)
    assert nearest_checkpoint(run_of(folder), wanted, None) == From()


def test_what_was_not_signed_is_passed_over_and_told(folder: Path) -> None:
    found = nearest_checkpoint(run_of(folder, signed=(2,), superseded=(6,)), 9, folder)
    assert (found.step, found.path) == (2, at(folder, 2))
    (told,) = found.unsigned
    digest = read_checkpoint(at(folder, 4)).signed_digest.hex()
    assert (told.step, told.what) == (None, "digest of the checkpoint step-00000004")
    assert (told.logged, told.replayed) == ("no such checkpoint", digest[:16])
    other = run_of(folder, signed=())
    other.checkpoints[4] = [SimpleNamespace(state_digest=bytes(32)), SimpleNamespace(state_digest=b"\x01" * 32)]
    found = nearest_checkpoint(other, 5, folder)
    assert (found.step, found.path, len(found.unsigned)) == (0, None, 2)
    assert found.unsigned[0].logged == "01" * 8


def test_a_damaged_one_is_passed_over(folder: Path) -> None:
    run = run_of(folder)
    (at(folder, 6) / "model.safetensors").write_bytes(b"")
    assert nearest_checkpoint(run, 9, folder) == From(step=4, path=at(folder, 4))


def test_one_that_is_named_is_taken_or_refused(folder: Path) -> None:
    run = run_of(folder)
    assert nearest_checkpoint(run, 4, at(folder, 4)) == From(step=4, path=at(folder, 4))
    assert nearest_checkpoint(run, 5, at(folder, 0)) == From(step=0, path=at(folder, 0))
    with pytest.raises(LedgerError, match="holds the state after 6 steps, and step 5 was asked for"):
        nearest_checkpoint(run, 5, at(folder, 6))
    with pytest.raises(LedgerError, match="is of an attempt that was superseded"):
        nearest_checkpoint(run_of(folder, signed=(), superseded=(6,)), 6, at(folder, 6))
    with pytest.raises(RefutedError, match="weights or state were exchanged"):
        nearest_checkpoint(run_of(folder, signed=(2,)), 6, at(folder, 6))


def test_one_that_is_exchanged_since_is_refused(folder: Path) -> None:
    run = run_of(folder)
    found = nearest_checkpoint(run, 6, folder)
    shutil.rmtree(at(folder, 6))
    made = Checkpoint(6, {"w": torch.zeros(2)}, {}, {"clock": [6]})
    publish_checkpoint(write_checkpoint(folder, made), keep=9)
    with pytest.raises(CheckpointError, match="was exchanged just now"):
        found.load(run)
