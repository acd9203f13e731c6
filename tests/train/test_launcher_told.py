"""Whoever launches a run is told which attempt at it this is, and how it's cut."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosmati.records.launched import NOTE_VARIABLE
from cosmati.train.run import folder
from cosmati.train.run.folder import RunFolder


@pytest.mark.parametrize(("earlier", "number"), [([], 0), ([0], 1), ([0, 1, 2], 3), ([0, 4, 7], 8)])
def test_an_attempt_is_numbered_after_the_last_one(
    earlier: list[int], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NOTE_VARIABLE, str(tmp_path / "note"))
    monkeypatch.setattr(folder, "read_attempts", lambda _path: [SimpleNamespace(number=one) for one in earlier])
    run: Any = object.__new__(RunFolder)
    run.path = tmp_path
    run._facts = SimpleNamespace(num_microbatches=8, num_steps=30, tensor_parallel=2)
    run._tell_launcher()
    told = json.loads((tmp_path / "note").read_text())
    expected = {"folder": str(tmp_path), "attempt": number, "num_microbatches": 8, "num_steps": 30}
    assert told | expected | {"tensor_parallel": 2} == told
