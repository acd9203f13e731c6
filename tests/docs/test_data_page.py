"""The page on data: its commands and its code, run from top to bottom."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cosmati.cli.main import app
from cosmati.data.order.plan import Tail
from cosmati.data.shards.encodings import encoding

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    for number in range(40):
        (tmp_path / "notes" / f"{number}.txt").write_text(f"Note {number}: " + "marble of known origin, " * 12)
    commands = re.findall(r"^cosmati (data .*?)(?: +#.*)?$", PAGE, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        result = CliRunner().invoke(app, shlex.split(command))
        assert result.exit_code == 0, result.output
    scope: dict[str, object] = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "data.md", "exec"), scope)
    assert scope["tokens"].shape[1] == 128  # type: ignore[attr-defined]
    assert scope["state"]["position"] == len(scope["rows"])  # type: ignore[index, arg-type]


def test_names_on_the_page_are_real() -> None:
    for name in ("carry", "pad", "drop"):
        assert name in str(Tail)
        assert f"`{name}`" in PAGE
    table = PAGE.split("| encoding | value |")[1].split("\n\n")[0]
    for name in re.findall(r"`([a-z_0-9:]+)`", table):
        if name not in ("pkl", "allow_pickle"):
            assert encoding(name).name == name
