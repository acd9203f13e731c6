"""The page on tags: its code, run from top to bottom, and the names that it speaks of."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from cosmati.core.lineage import Lineage

PAGE = (Path(__file__).parents[2] / "docs" / "tags.md").read_text()


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "tags.md", "exec"), scope)
    told, plan = capsys.readouterr().out.split("\n", maxsplit=1)
    region, _, num_rows = told.rpartition(" ")
    assert region.startswith("all (")
    assert 0 < int(num_rows) <= 16
    assert "statistics: ungoverned: nobody vouches for it" in plan
    assert "from made here" in plan


def test_the_table_has_every_field_of_a_lineage() -> None:
    table = PAGE.partition("| field |")[2].partition("\n\n")[0]
    assert {*re.findall(r"`([a-z_]+)`", table)} >= {field.name for field in dataclasses.fields(Lineage)}
