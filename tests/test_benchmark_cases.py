"""Single results can be measured again: what `--only` runs, and what it refuses."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import accumulation, scaling


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of results that a benchmark writes, of which none is measured."""
    names: list[str] = []

    def write(name: str, rows: list[Any], notes: Mapping[str, object]) -> str:
        names.append(name)
        return name

    for module in (accumulation, scaling):
        monkeypatch.setattr(module, "write", write)
    monkeypatch.setattr(scaling, "_launched", lambda asked: 1.0 if "alone" in asked else [])
    monkeypatch.setattr(accumulation, "compare", lambda *_: [])
    monkeypatch.setattr(accumulation, "memory", lambda: names.append("memory") or "memory")
    return names


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["scaling", "--only", "ddp_07m_512_v2"], ["scaling_ddp_07m_512_v2"]),
        (["scaling", "--only", "fsdp_5m_2048"], [f"scaling_fsdp_5m_2048_v{v}" for v in (2, 4, 8)]),
        (["accumulation", "--only", "gpt_69m_v8"], ["accumulation_gpt_69m_v8"]),
        (["accumulation", "scaling", "--only", "08m_v64"], ["accumulation_gpt_08m_v64"]),
    ],
)
def test_only_what_is_named_runs(
    arguments: list[str],
    expected: list[str],
    written: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    command.main()
    assert written == expected
    assert capsys.readouterr().out.split() == expected


def test_as_many_rounds_as_asked_for(written: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = []
    monkeypatch.setattr(
        scaling, "_launched", lambda asked: rounds.append(asked["rounds"]) or (1.0 if "alone" in asked else [])
    )
    monkeypatch.setattr(accumulation, "compare", lambda *asked: rounds.append(asked[-1]) or [])
    for more in ((), ("--rounds", "40")):
        monkeypatch.setattr(sys, "argv", ["benchmarks", "accumulation", "scaling", "--only", "v8", *more])
        command.main()
    assert [n for n in rounds if n] == [15] * 3 + [9] * 8 + [40] * 11  # 0: of resident memory


@pytest.mark.long
def test_without_it_all_cases_run(written: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "accumulation", "scaling"])
    command.main()
    assert len(written) == len(set(written)) == 3 * 5 + 1 + 2 * 2 * 2 * 3


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["scaling", "--only", "ddp_7m"], "no result has 'ddp_7m' in its name"),
        (["streaming", "--only", "v2"], "--only is for accumulation and scaling"),
        (["--only", "v2"], "--only is for accumulation and scaling"),
        (["streaming", "--rounds", "20"], "--rounds is for accumulation and scaling"),
        (["scaling", "--rounds", "1"], "--rounds 2 or more"),
        (["scaling", "--rounds", "-2"], "--rounds 2 or more"),
    ],
)
def test_what_names_nothing_is_refused(
    arguments: list[str],
    told: str,
    written: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert told in capsys.readouterr().err
    assert written == []
