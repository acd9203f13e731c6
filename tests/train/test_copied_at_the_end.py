"""A run ends once its last checkpoint is copied, and says where it couldn't be."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from cosmati.errors import CheckpointError
from cosmati.train.run.copy_place import CopyPlace
from tests.train.policy_world import trainer

pytestmark = pytest.mark.long


@pytest.mark.parametrize("is_async", [False, True])
def test_who_waits_for_a_run_has_its_copy(is_async: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put = CopyPlace.put

    def slowly(self: CopyPlace, *given: Any) -> None:
        time.sleep(0.3)
        put(self, *given)

    monkeypatch.setattr(CopyPlace, "put", slowly)
    run = trainer(tmp_path / "run", budget="2ba", checkpoint_to=str(tmp_path / "copies"), checkpoint_async=is_async)
    run.fit()
    assert (tmp_path / "copies" / "run" / "step-00000002").is_dir()


def test_a_copy_that_fails_ends_the_run_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one does: of those before it the run has warned, and gone on."""
    put = CopyPlace.put

    def full(self: CopyPlace, checkpoint: Path, *given: Any) -> None:
        if checkpoint.name == "step-00000002":
            time.sleep(0.3)
            raise OSError("no space")
        put(self, checkpoint, *given)

    run = trainer(tmp_path / "run", budget="2ba", checkpoint_every="2ba", checkpoint_to=str(tmp_path / "copies"))
    monkeypatch.setattr(CopyPlace, "put", full)
    with pytest.raises(CheckpointError, match=r"couldn't be copied to .*no space It's whole in"):
        run.fit()
