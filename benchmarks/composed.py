"""(g) Methods composed: this library's loop beside Composer's with the same five, and beside five functions.

`python -m benchmarks.composed --composer PYTHON [--clock wall] [--methods five] [--quick]`. PYTHON is the interpreter
of an environment that has Composer (`pip install mosaicml`) and the same PyTorch as this one, so that both call the
same kernels. Each library has a process, and only one of them works at a time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.composed_task import Task
from benchmarks.measure import in_turns, write

METHODS = {
    "none": "none",
    "five": "BlurPool, ChannelsLast, MixUp, LabelSmoothing, EMA",
    "other five": "SqueezeExcite, ProgressiveResizing, CutOut, CutMix, SAM",
}
CLOCKS = {"cpu": "processor time of the training thread", "wall": "wall time"}
ROOT = Path(__file__).parents[1]


class Worker:
    """A process that waits while others are timed.

    Args:
        python: its interpreter.
        module: what it runs.
    """

    def __init__(self, python: str, module: str) -> None:
        self._what = f"{python} -m benchmarks.{module}"
        self._process = subprocess.Popen(
            [python, "-m", f"benchmarks.{module}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"},
        )
        self.name = self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None, "asked for"
        line = self._process.stdout.readline().strip()
        if not line:
            msg = f"No answer from `{self._what}`. Start it by hand to see why: it reads lines from the terminal."
            raise RuntimeError(msg)
        return line

    def __call__(self, task: Task, arm: str) -> float:
        """Let it train, and return the seconds of a step."""
        assert self._process.stdin is not None, "asked for"
        print(arm, task.side, task.batch_size, task.num_steps, task.clock, sep="\t", file=self._process.stdin)
        return float(self._answer())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End it."""
        assert self._process.stdin is not None, "asked for"
        self._process.stdin.close()
        self._process.wait()


def arms_of(
    task: Task, which: str, ours: Worker, by_hand: Worker, composer: Worker | None
) -> dict[str, Callable[[], float]]:
    """Return the arms for a set of methods, the one to compare with first."""
    others = {} if composer is None else {f"Composer's Trainer, {which}": partial(composer, task, which)}
    if which != "other five":
        name = "bare loop" if which == "none" else "bare loop, functional forms"
        others[name] = partial(by_hand, task, which)
    if not others:
        return {}
    first, run = next(iter(others.items()))
    return {first: run, f"{first} (A/A)": run, **others, f"Trainer.fit, {which}": partial(ours, task, which)}


def run(*, quick: bool, composer: str | None = None, clock: str = "cpu", methods: str | None = None) -> str:
    """Time the sets of methods on two tasks, and write a table each."""
    suffix = ("_wall" if clock == "wall" else "") + ("_quick" if quick else "")
    tables = []
    with ExitStack() as stack:
        ours, by_hand = (
            stack.enter_context(Worker(sys.executable, module)) for module in ("composed_ours", "composed_by_hand")
        )
        peer = None if composer is None else stack.enter_context(Worker(composer, "composed_peer"))
        for side, steps in ((32, 6), (8, 40)):
            task = Task(side, 64, steps // 3 if quick else steps, clock)
            for which in [methods] if methods else METHODS:
                arms = arms_of(task, which, ours, by_hand, peer)
                if not arms:
                    continue
                rows = in_turns(arms, 3 if quick else 15)
                notes = {
                    "command": f"python -m benchmarks.composed --composer PYTHON --clock {clock}"
                    + f" --methods {methods}" * bool(methods),
                    "threads": 1,
                    "what": f"ResNet of 78 thousand parameters, {side} x {side} images, 64 rows, SGD with momentum",
                    "methods": METHODS[which],
                    "clock": f"{CLOCKS[clock]}; ratios are taken round by round",
                    "peer": peer.name if peer else "Composer isn't at hand",
                    "steps a round": task.num_steps,
                }
                tables.append(write(f"composed_{which.replace(' ', '_')}_{side}{suffix}", rows, notes))
                print(tables[-1], flush=True)
    return "\n".join(tables)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.composed", description=__doc__)
    parser.add_argument("--composer", metavar="PYTHON", help="interpreter of an environment with Composer")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    parser.add_argument("--methods", choices=tuple(METHODS), help="one set of methods; all by default")
    parser.add_argument("--quick", action="store_true", help="a few rounds, to see that it runs; not for quoting")
    run(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
