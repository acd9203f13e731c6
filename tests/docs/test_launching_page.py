"""The page on launching names the states that there are, and options, files and words that exist."""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner

from cosmati import launch
from cosmati.cli.main import app
from cosmati.launch.job import JobRequest
from cosmati.launch.states import LaunchState

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "launching.md").read_text(encoding="utf-8")


def test_each_state_has_its_line_and_its_place_in_the_drawing() -> None:
    drawing = PAGE.partition("```text\n")[2].partition("```")[0]
    assert set(re.findall(r"[A-Z]{5,}", drawing)) == set(LaunchState)
    assert re.findall(r"^\| ([A-Z]+) \|", PAGE, re.MULTILINE) == list(LaunchState)


def test_its_options_are_those_of_the_commands() -> None:
    runner, told = CliRunner(env={"COLUMNS": "200"}), ""
    for verb in ("launch", "runs", "show", "logs", "stop", "resume", "clone", "delete"):
        told += runner.invoke(app, [verb, "--help"]).output
    assert {one for one in re.findall(r"--[a-z][a-z-]+", PAGE) if one not in told} == set()


def test_its_figures_are_the_defaults() -> None:
    defaults = {name: field.default for name, field in JobRequest.__dataclass_fields__.items()}
    assert (defaults["retries"], defaults["backoff_seconds"], defaults["patience"]) == (5, 5.0, 30.0)
    assert (defaults["min_silence_seconds"], defaults["start_seconds"]) == (120.0, 1800.0)
    for words in ("5 s, doubled", "up to five minutes", "30 times the median step, but two minutes", "half an hour"):
        assert words in PAGE


def test_its_python_is_that_of_the_room() -> None:
    code = PAGE.partition("```python\n")[2].partition("```")[0]
    compile(code, "launching.md", "exec")
    names = re.findall(r"^from cosmati.launch import (.*)$", code, re.MULTILINE)[0].split(", ")
    assert set(names) <= set(launch.__all__)
