from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from cosmati.progress import ProgressDisplay


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_line_tells_each_tenth_and_the_time_left(clock: list[float]) -> None:
    file = io.StringIO()
    with ProgressDisplay("work [b]", start=0.2, console=Console(file=file)) as display:
        for percent in range(20, 101, 4):
            clock[0] = 100 + (percent - 20) * 60
            display.update(percent / 100, f"at {percent}")
    lines = file.getvalue().splitlines()
    assert [int(line.split()[2].rstrip("%")) for line in lines] == [20, 32, 40, 52, 60, 72, 80, 92, 100]
    assert lines[0] == "work [b]:  20%  at 20"
    assert lines[1] == "work [b]:  32%  at 32, 1:08:00 left"
    assert lines[-1] == "work [b]: 100%  at 100, 0:00:00 left"


def test_what_has_no_end_is_told_once() -> None:
    file = io.StringIO()
    with ProgressDisplay("writing", console=Console(file=file)) as display:
        for number in range(3):
            display.update(None, f"{number} rows")
        assert file.getvalue() == ""
    display.close()
    assert file.getvalue() == "writing: 2 rows\n"


def test_a_terminal_has_a_bar(clock: list[float]) -> None:
    file = io.StringIO()
    with ProgressDisplay("work", console=Console(file=file, force_terminal=True, width=120)) as display:
        clock[0] += 30
        display.update(0.25, "loss 0.5")
    shown = file.getvalue()
    assert "loss 0.5, 0:01:30 left" in shown
    assert "25%" in shown
    assert "━" in shown
    assert "work: " not in shown
