"""The page on authorities: its five commands and its example run, and its table names the errors that there are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati import load_policy
from cosmati.cli.main import app
from cosmati.data import vouching
from cosmati.errors import CosmatiError
from cosmati.provenance.authority import errors

GOVERNANCE, POLICIES = (
    (Path(__file__).parents[2] / "docs" / f"{name}.md").read_text() for name in ("governance", "policies")
)
PAGE = (Path(__file__).parents[2] / "docs" / "authorities.md").read_text()


@pytest.mark.long
def test_the_ceremony_and_the_example_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("notes.txt").write_text("some words\n")
    (commands,) = re.findall(r"```\n(cosmati.*?)```", PAGE, re.DOTALL)
    outputs = []
    for line in commands.splitlines():
        result = CliRunner().invoke(app, shlex.split(line)[1:])
        assert result.exit_code == 0, result.output
        outputs.append(result.output)
    assert len(outputs) == 5
    (root,) = re.findall(r"^  ([0-9a-f]{64})$", outputs[0], re.MULTILINE)
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(example, "authorities.md", "exec"), {"ROOT": root})
    assert f"{capsys.readouterr().out.strip()}" == re.findall(r"print\(.*\)  # (.*)", example)[0]


def test_a_policy_is_signed_as_the_page_of_policies_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = GOVERNANCE.split("```yaml\n")[1].split("```")[0]
    Path("policy.yaml").write_text(text)
    section = POLICIES.partition("## Who has signed it")[2].partition("\n## ")[0]
    outputs = []
    for line in re.findall(r"```\n(cosmati.*?)```", section, re.DOTALL)[0].splitlines():
        result = CliRunner().invoke(app, shlex.split(line)[1:])
        assert result.exit_code == 0, result.output
        outputs.append(result.output)
    assert ["1 of 2 signatures" in said for said in outputs[-2:]] == [True, False]
    (root,) = re.findall(r"^  ([0-9a-f]{64})$", outputs[0], re.MULTILINE)
    (example,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    exec(compile(example, "policies.md", "exec"), names := {"ROOT": root})
    assert names["policy"].digest == load_policy(text).digest
    assert names["policy"].signed_root == root


def test_the_table_names_every_error() -> None:
    named = set(re.findall(r"`(\w+Error)`", PAGE))
    there = {
        name
        for module in (errors, vouching)
        for name, one in vars(module).items()
        if isinstance(one, type) and issubclass(one, CosmatiError) and one.__module__ == module.__name__
    }
    assert named == there
