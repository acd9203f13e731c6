"""The page on studies: its example runs by the command that it gives, and says what the page promises."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cosmati.cli.main import app
from cosmati.records.study import StudyRecord
from cosmati.study.checks import checks_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "studies.md").read_text()
SOURCES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [one for one in re.findall(r"```\n(cosmati.*?)```", PAGE, re.DOTALL) if "--on " not in one]  # a cluster's


def outputs_of(commands: str) -> list[str]:
    outputs = []
    for line in commands.splitlines():
        result = CliRunner().invoke(app, shlex.split(line, comments=True)[1:])
        assert result.exit_code == 0, result.output
        outputs.append(result.output)
    return outputs


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scipy")
    monkeypatch.chdir(tmp_path)
    Path("adam_study.py").write_text(SOURCES[0])
    outputs = outputs_of(COMMANDS[0] + COMMANDS[1])
    record = StudyRecord.from_json(Path("adam/study.json").read_text())
    sizes = {arm.name: len(arm.search.trials) for arm in record.arms if arm.search}
    assert sizes["baseline"] == sizes["adam"] >= 14
    assert "over a tuned opponent (" in outputs[1]
    assert "as many as the arm's)" in outputs[1]
    assert "predicted adam over baseline, by training time: ≥ 1.50×; came" in outputs[1]
    assert "3 arms x 3 budgets x 5 seeds = 45 runs" in outputs[0]
    assert "a family of 1 test, at p < 0.01" in outputs[0]
    assert "no point was searched on several seeds" in outputs[0]
    unmet = {item.name for item in checks_of(record) if not item.met}
    # A network of 1,000 parameters in float32: its steps are so short that its data may take more than 5 % of them.
    assert "Mixed precision" in unmet
    assert unmet <= {"Optimum inside of what was searched", "Mixed precision", "Data loading isn't the bottleneck"}
    assert min(run.final.cpu_seconds for run in record.runs) > 0
    assert "\nstudies\n" in (ROOT / "docs" / "index.md").read_text()


@pytest.mark.slow
def test_the_pool_of_parts_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scipy")
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    small = {"FULL_STEPS = 120": "FULL_STEPS = 8", "(0.25, 12), (0.5, 4), (1.0, 2)": "(0.25, 7), (1.0, 2)"}
    source = SOURCES[1]
    for whole, part in small.items():
        assert whole in source
        source = source.replace(whole, part)
    Path("parts.py").write_text(source)
    composing, training = outputs_of(COMMANDS[2])
    assert "the best of 7 at equal time: accuracy " in composing
    assert re.search(r"counted: 9 runs, 0 of which diverged, \d+ steps, .* and 28 short ones", composing)
    for part in ("smoothing", "cutout", "mixup", "no momentum"):
        assert re.search(rf"^  {part}: [+-]\S+ \(95 % .* with it, \d without\)$", composing, re.MULTILINE)
    # The file trains what was measured: the same steps, seed and quality.
    trials = [json.loads(line)["trial"] for line in Path("digits-parts/search/trials.jsonl").read_text().splitlines()]
    best = max(
        (trial for trial in trials if trial["budget"] == 1.0), key=lambda trial: (trial["quality"], -trial["point"])
    )
    assert f"completed after {best['steps']} steps" in training
    assert f"accuracy {best['quality']:.4f}" in training
