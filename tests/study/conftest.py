"""What this room's tests run under."""

from __future__ import annotations

import pytest

from tests.processes import preloaded


@pytest.fixture
def quick_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a study's processes begin with PyTorch loaded."""
    monkeypatch.setattr("cosmati.study.jobs.get_context", preloaded)
