"""Run the suite under one seed after another, long tests too, and keep what came of it: see `--help`.

A suite that is green once may be so by chance. Each run has a seed of its own, which orders the tests and seeds
generators, and some run beside a heavy job, where what waits for a time comes late. The record goes on from one session
and one commit to the next: what counts is how many runs in a row were green.
"""

from __future__ import annotations

import argparse
import csv
import datetime as dt
import os
import platform
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

RECORD = Path("benchmarks/results/suite_runs.csv")
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped)")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_BUSY = "while True: sum(i * i for i in range(10_000))"


@dataclass(frozen=True, kw_only=True)
class SuiteRun:
    """One run of the suite.

    Attributes:
        date: UTC.
        commit: short; with a `+` where files differ from it.
        seed: of order and generators.
        beside: heavy jobs beside it.
        passed, failed, skipped: tests; errors count as failed.
        seconds: by the clock.
        python: version.
        cores: of the machine.
        is_green: pytest ended well.
        which: tests that failed, by spaces.
    """

    date: str
    commit: str
    seed: int
    beside: int
    passed: int
    failed: int
    skipped: int
    seconds: int
    python: str
    cores: int
    is_green: bool
    which: str


def read(record: Path) -> list[SuiteRun]:
    """Return the runs of a record, the oldest first; none where there's no file."""
    if not record.exists():
        return []
    with record.open(newline="") as file:
        rows = list(csv.DictReader(file))
    kinds = {"seed": int, "beside": int, "passed": int, "failed": int, "skipped": int, "seconds": int, "cores": int}
    return [
        SuiteRun(
            **{key: kinds.get(key, str)(value) for key, value in row.items()} | {"is_green": row["is_green"] == "1"}
        )
        for row in rows
    ]


def add(record: Path, run: SuiteRun) -> None:
    """Add a run to a record, which then holds it whole or not at all."""
    is_new = not record.exists()
    with record.open("a", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(SuiteRun)], lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(asdict(run) | {"is_green": int(run.is_green)})


def green_in_a_row(runs: Sequence[SuiteRun]) -> list[SuiteRun]:
    """Return the last runs of which none failed, each seed once."""
    found: dict[int, SuiteRun] = {}
    for run in reversed(runs):
        if not run.is_green:
            break
        found.setdefault(run.seed, run)
    return list(found.values())[::-1]


def run_suite(command: Sequence[str], seed: int, beside: int) -> SuiteRun:
    """Run the suite once.

    Args:
        command: of pytest, without a seed.
        seed: given to it.
        beside: heavy jobs that run as long.

    Raises:
        KeyboardInterrupt: somebody has ended it: that says nothing of the suite.
    """
    start = time.monotonic()
    with busy(beside):
        done = subprocess.run(  # noqa: S603
            [*command, "-rfE", f"--randomly-seed={seed}"], capture_output=True, text=True, check=False
        )
    if done.returncode in (-signal.SIGINT, -signal.SIGTERM):
        raise KeyboardInterrupt
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", flush=True)  # why: it may not come again for days
    # The last line is pytest's summary; earlier ones may be what a test has printed.
    count = {kind.rstrip("s"): int(number) for number, kind in _COUNT.findall((done.stdout.splitlines() or [""])[-1])}
    return SuiteRun(
        date=dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%d %H:%M"),
        commit=commit(),
        seed=seed,
        beside=beside,
        passed=count.get("passed", 0),
        failed=count.get("failed", 0) + count.get("error", 0),
        skipped=count.get("skipped", 0),
        seconds=round(time.monotonic() - start),
        python=platform.python_version(),
        cores=len(os.sched_getaffinity(0)),
        is_green=done.returncode == 0 and count.get("passed", 0) > 0,
        which=" ".join(_FAILED.findall(done.stdout)),
    )


@contextmanager
def busy(num: int) -> Iterator[None]:
    """Keep so many processors busy for a while."""
    with ExitStack() as stack:
        for _ in range(num):
            job = subprocess.Popen([sys.executable, "-c", _BUSY])  # noqa: S603
            stack.callback(job.wait)
            stack.callback(job.kill)
        yield


def commit() -> str:
    """Return the commit that the files are of."""
    given = ["git", "rev-parse", "--short=8", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"]
    name, changed = (subprocess.run(one, capture_output=True, text=True, check=False).stdout for one in given)  # noqa: S603
    ours = [line for line in changed.splitlines() if not line.endswith(str(RECORD))]
    return name.strip() + ("+" if ours else "")


def told(run: SuiteRun) -> str:
    """Return a run as a line."""
    said = "green" if run.is_green else f"RED: {run.which or 'it ended otherwise than by a test'}"
    beside = f" beside {run.beside} heavy job{'s'[: run.beside > 1]}" if run.beside else ""
    return f"seed {run.seed}{beside}: {run.passed:,} passed, {run.failed} failed, {run.seconds} s, {said}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line names, and return how it ended."""
    parser = argparse.ArgumentParser(prog="python -m tools.suite_runs", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--num", type=int, default=1, help="how many runs; Ctrl-C ends after those that are whole")
    parser.add_argument("--busy", type=int, default=0, help="how many of them run beside a heavy job on each core")
    parser.add_argument("--record", type=Path, default=RECORD, help="where runs are kept, a line each")
    parser.add_argument("suite", nargs="*", help="what pytest is given; by default the whole suite on two processes")
    given = parser.parse_args(arguments)
    command = [sys.executable, "-m", "pytest", *(given.suite or ["-n", "2", "--dist", "worksteal"])]
    taken, cores = {run.seed for run in read(given.record)}, len(os.sched_getaffinity(0))
    try:
        for number in range(given.num):
            seed = random.SystemRandom().randrange(1, 1 << 31)
            while seed in taken:
                seed += 1
            run = run_suite(command, seed, cores if number < given.busy else 0)
            taken.add(seed)
            add(given.record, run)
            print(told(run), flush=True)
            if not run.is_green:
                break
    except KeyboardInterrupt:
        print("stopped; the run under way isn't counted")
    row = green_in_a_row(read(given.record))
    print(f"green in a row: {len(row)}, {sum(run.beside > 0 for run in row)} of them beside a heavy job")
    return 0 if row else 1


if __name__ == "__main__":
    sys.exit(main())
