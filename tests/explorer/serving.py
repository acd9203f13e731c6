"""`cosmati explore` in a process of its own, as a user has it, and stores for it to show."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from http.client import HTTPMessage
from pathlib import Path
from typing import Self

from cosmati.records.study import StudyRecord
from tests.processes import PythonProcess
from tests.store.samples import begin_study, run_record, small_study, write_run, write_study
from tests.study.oracles import log_quality, study

SERVE = """
import os, sys
from pathlib import Path
import uvicorn, duckdb, plotly
import cosmati.explorer.server.app
from cosmati.explorer.server.serve import serve
os.dup2(1, 2)
{before}
serve(Path(sys.argv[1]), port=int(sys.argv[2]))
"""
OFTEN = "from cosmati.explorer.server import site; site._SOONEST = 0.3"
"""What a server begins with that looks for changes several times a second."""
EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script></script>\"'=cmd()"


def child_environment(**more: str) -> dict[str, str]:
    """Return the environment of a process that finds the library and these tests where this one does."""
    path = os.pathsep.join([str(Path.cwd() / "src"), str(Path.cwd()), *(one for one in sys.path if one)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


class ExploreServer:
    """A server of a store's pages, in a process of its own.

    Args:
        store: its folder.
        port: 0 takes a free one.
        environment: more of it.
        before: code that its process begins with, once its libraries are there.
    """

    def __init__(
        self, store: Path, port: int = 0, environment: Mapping[str, str] | None = None, before: str = ""
    ) -> None:
        self.process = PythonProcess(
            ["-c", SERVE.format(before=before), store, str(port)], env=child_environment(**(environment or {}))
        )
        self.said: list[str] = []
        self.address = ""
        for line in self.process.stdout:
            self.said.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                self.address = found[0]
                break
        # A pipe that nobody empties would stop its writer one day.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        self.said += list(self.process.stdout)

    def get(
        self, path: str, *, method: str = "GET", headers: Mapping[str, str] | None = None
    ) -> tuple[int, str, HTTPMessage]:
        request = urllib.request.Request(self.address + path, method=method, headers=dict(headers or {}))
        try:
            answer = urllib.request.urlopen(request, timeout=60)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            return answer.status, answer.read().decode(), answer.headers

    def kill(self) -> None:
        """Take it away without a word."""
        self.process.kill()
        self.process.wait(timeout=120)

    def close(self) -> str:
        """End it by Ctrl-C, as a user does, and return what it has said."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(timeout=120)
        self._reader.join(timeout=60)
        self.process.stdout.close()
        return "".join(self.said)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def known_study() -> StudyRecord:
    """A study whose arm `twice` is exactly twice as fast as the baseline at each quality that both reach."""
    arms = {"baseline": log_quality(), "twice": log_quality(0.1 * math.log(2)), "no change": log_quality()}
    return study(arms, seeds=(0, 1, 2), methods={"twice": ("Twice",)}, name="Known speed-up")


def study_of_parts() -> StudyRecord:
    """A study with two parts, alone and together: each a third faster, and both at once as fast as their product."""
    gain = 0.1 * math.log(1.5)
    arms = {
        "baseline": log_quality(),
        "shapes": log_quality(gain),
        "labels": log_quality(gain),
        "both": log_quality(2 * gain),
    }
    methods = {"shapes": ("Shapes",), "labels": ("Labels",), "both": ("Shapes", "Labels")}
    return study(arms, seeds=(0, 1, 2), methods=methods, name="Parts and pairs")


def evil_study() -> StudyRecord:
    """A study that says something else than it seems to wherever it may speak."""
    record = small_study(EVIL, seeds=(0, 1))
    names = {"baseline": "baseline", "fast": f"fast {EVIL}"}
    arms = tuple(
        replace(arm, name=names[arm.name], description=EVIL, recipe_text=EVIL, methods=(EVIL,)) for arm in record.arms
    )
    runs = tuple(replace(run, arm=names[run.arm], run_id=EVIL) for run in record.runs)
    return replace(record, arms=arms, runs=runs, task=EVIL, hardware=EVIL, notes=EVIL, command=EVIL)


def fill(store: Path) -> None:
    """Put studies and runs of every kind into a store: whole, going on, failed, damaged, and of evil names."""
    write_study(store / "known", known_study())
    write_study(store / "words", small_study("Words", task="Words, small network", hardware="another core"))
    write_study(store / "parts", study_of_parts())
    write_study(store / "evil", evil_study())
    begin_study(store / "begun", small_study("Begun", task="Begun task"), num_done=3)
    steps = [{"step": n, "rows": 32 * n, "loss": 2.0 / n} for n in range(1, 100)]
    write_run(store / "runs" / "failed", run_record("failed", outcome="failed", metrics={}), steps)
    write_run(store / "runs" / "broken-off", run_record("broken off", outcome="running", ended=None), steps)
    write_run(store / "runs" / EVIL.replace("/", "_"), run_record(EVIL, recipe_name=EVIL, recipe_text=EVIL), steps)
    (store / "damaged").mkdir()
    (store / "damaged" / "study.json").write_text("{")
