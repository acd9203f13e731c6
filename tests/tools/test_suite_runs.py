"""The record of runs of the suite: what is counted, what ends a row, and what a run beside a heavy job is."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from tools.suite_runs import SuiteRun, add, busy, green_in_a_row, main, read, told

pytestmark = pytest.mark.long

RUN = SuiteRun(
    date="2026-01-01 00:00",
    commit="abcd1234",
    seed=1,
    beside=0,
    passed=7,
    failed=0,
    skipped=1,
    seconds=9,
    python="3.11.7",
    cores=2,
    is_green=True,
    which="",
)
RED = dataclasses.replace(RUN, seed=2, failed=1, is_green=False, which="tests/a.py::test_b")


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = tmp_path / "runs.csv"
    assert read(record) == []
    for run in (RUN, RED):
        add(record, run)
    assert read(record) == [RUN, RED]
    assert len(record.read_text().splitlines()) == 3


def test_a_row_ends_at_the_last_red_run_and_counts_a_seed_once() -> None:
    def green(seed: int) -> SuiteRun:
        return dataclasses.replace(RUN, seed=seed)

    assert green_in_a_row([]) == []
    assert green_in_a_row([RUN, RED]) == []
    assert [run.seed for run in green_in_a_row([green(5), RED, green(3), green(4), green(3)])] == [4, 3]


def test_lines_say_what_failed_and_what_ran_beside() -> None:
    assert told(RUN) == "seed 1: 7 passed, 0 failed, 9 s, green"
    assert "RED: tests/a.py::test_b" in told(RED)
    assert "beside 1 heavy job:" in told(dataclasses.replace(RUN, beside=1))
    assert "beside 2 heavy jobs:" in told(dataclasses.replace(RUN, beside=2))


@pytest.mark.parametrize(
    ("body", "code", "counts"), [("assert True", 0, (2, 0)), ("assert 'passed 9' == 1", 1, (0, 2))]
)
def test_a_suite_is_run_counted_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str, code: int, counts: tuple[int, int]
) -> None:
    suite, record = tmp_path / "test_one.py", tmp_path / "runs.csv"
    suite.write_text(f"import pytest\n@pytest.mark.parametrize('x', [1, 2])\ndef test_it(x):\n    {body}\n")
    given = ["--num", "2", "--busy", "1", "--record", str(record), "--", "-q", f"--rootdir={tmp_path}", str(suite)]
    assert main(given) == code
    runs = read(record)
    # What is red ends the campaign: somebody has to look.
    assert len(runs) == (1 if code else 2)
    assert [(run.passed, run.failed) for run in runs] == [counts] * len(runs)
    assert [run.beside > 0 for run in runs] == [True, False][: len(runs)]
    assert len({run.seed for run in runs}) == len(runs)
    told = capsys.readouterr().out
    assert f"green in a row: {0 if code else 2}" in told
    assert ("E       AssertionError" in told or "assert 'passed 9' == 1" in told) == bool(code)  # why it was red
    assert runs[0].which.count("test_it") == counts[1]


@pytest.mark.parametrize(("signal", "num_kept"), [("SIGTERM", 0), ("SIGKILL", 1)])
def test_what_somebody_ends_isnt_counted_and_what_dies_is_red(tmp_path: Path, signal: str, num_kept: int) -> None:
    suite, record = tmp_path / "test_one.py", tmp_path / "runs.csv"
    suite.write_text(f"import os, signal\ndef test_it():\n    os.kill(os.getpid(), signal.{signal})\n")
    assert main(["--num", "2", "--record", str(record), "--", "-q", f"--rootdir={tmp_path}", str(suite)]) == 1
    assert [run.is_green for run in read(record)] == [False] * num_kept


def test_a_suite_without_a_test_isnt_green(tmp_path: Path) -> None:
    suite, record = tmp_path / "test_none.py", tmp_path / "runs.csv"
    suite.write_text("")
    assert main(["--record", str(record), "--", "-q", f"--rootdir={tmp_path}", str(suite)]) == 1
    assert not read(record)[0].is_green


def test_heavy_jobs_are_busy_and_end_with_the_run() -> None:
    def running() -> list[str]:
        return [
            path.name
            for path in Path("/proc").iterdir()
            if path.name.isdigit() and b"i * i for i in range(10_000)" in content(path / "cmdline")
        ]

    def content(path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError:  # It has ended since.
            return b""

    before = set(running())
    with busy(2):
        time.sleep(0.1)
        assert len(set(running()) - before) == 2
    assert set(running()) <= before
