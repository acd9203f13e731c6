"""The migration page: its code runs, and every name on it is real."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import cosmati
from cosmati import integrations, methods, optim

PAGE = (Path(__file__).parents[2] / "docs" / "from-composer.md").read_text()


@pytest.mark.filterwarnings("error")
def test_the_page_runs() -> None:
    torch.manual_seed(0)
    scope: dict[str, object] = {"__name__": "page"}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile("\n".join(blocks), "from-composer.md", "exec"), scope)
    assert scope["loss"].isfinite()  # type: ignore[attr-defined]
    assert "BlurConv2d" in str(scope["model"])


def test_names_on_the_page_are_real() -> None:
    right = "\n".join(line.split("|")[2] for line in PAGE.splitlines() if line.startswith("| `"))
    for name in re.findall(r"\b([A-Z]\w+)\(", right):
        assert any(hasattr(place, name) for place in (cosmati, integrations, methods, optim)), name
    assert {"MixUp", "ScaleSchedule", "RunConfig", "Cosine"} <= set(re.findall(r"\b([A-Z]\w+)\(", right))
