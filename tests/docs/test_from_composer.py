"""The page for who comes from Composer: its ports run, and every name on it is real."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import cosmati
import cosmati.methods.functional as cf
from cosmati import integrations, methods, optim
from cosmati.train import observers
from cosmati.train.observers import monitors

pytestmark = pytest.mark.long

PAGE = (Path(__file__).parents[2] / "docs" / "from-composer.md").read_text()


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page: dict[str, Any] = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "from-composer.md", "exec"), page)
    assert page["result"].metrics["accuracy"] > 0.8
    assert "BlurConv2d" in str(page["model"])
    assert "StandardizedBlurConv2d" in str(page["model"])
    first, again = page["first"], page["again"]
    assert (first.outcome, first.clock.step) == ("stopped", 20)
    assert (again.outcome, again.clock.step) == ("completed", 32)
    # Stopped and gone on, or never stopped: one run.
    assert again.metrics == page["result"].metrics
    whole, parts = page["started"].model.state_dict(), page["resumed"].model.state_dict()
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
    assert page["tuned"].clock.step == 16
    assert page["stopped"].outcome == page["enough"].outcome == "stopped"
    assert page["stopped"].clock.step < 320


def test_names_on_the_page_are_real() -> None:
    right = "\n".join(line.split(" | ")[1] for line in PAGE.splitlines() if line.startswith("| `"))
    places = (cosmati, integrations, methods, optim, observers, monitors)
    names = set(re.findall(r"\b([A-Z]\w+)\(", right))
    assert {"MixUp", "ScaleSchedule", "RunConfig", "Cosine", "LabelSmoothing", "Evaluation", "AdamW"} <= names
    for name in names:
        assert any(hasattr(place, name) for place in places), name
    for name in re.findall(r"cf\.(\w+)\(|`(\w+_batch)\b", PAGE):
        assert hasattr(cf, "".join(name)), name
