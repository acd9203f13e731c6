"""A campaign of SIGKILLs, which anyone can run again: `python -m tests.launch.campaign --kills 100 --seed 7`.

Each job trains the same recipe on so many ranks under some sharding. Each kill waits for a moment that was drawn (ranks
begin, meet, compute, exchange, write a checkpoint, publish it, end) and takes one of a rank, an agent, the supervisor,
or all of them. Where a rank stood is what it has written itself, so it's known after its death. In the end the job has
to hold the state of one process that nobody disturbed, and its rows, each once.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cosmati.launch.guard import send
from cosmati.launch.job import attempt_folder
from cosmati.launch.notes import processes_in
from cosmati.launch.queue import JobQueue
from cosmati.launch.states import ENDED, LaunchState
from tests.launch.jobs import (
    alone,
    asked,
    assert_same_run,
    is_there,
    marks_of,
    recipe_in,
    serving,
    standing_rows,
    states_seen,
    until,
    with_secrets_of,
)

VICTIMS = ("rank", "agent", "supervisor", "all")
MOMENTS = ("begin", "meet", "compute", "exchange", "checkpoint", "publish")
LAST = ("end", "over")
SETUPS = [(1, "replicated"), *itertools.product((2, 4), ("replicated", "optimizer", "full"))]
_STEPS_AN_EPOCH, _SECONDS = 4, 120.0

# Each rank writes where it is, and stays there for a moment.
MARKS = """
    import atexit
    from pathlib import Path
    import torch.distributed as dist
    from cosmati.train.run import saving, session

    note = os.environ.get("COSMATI_LAUNCH_NOTE")
    if note is not None:
        place = os.open(Path(note).with_name(f"moment-{os.environ['RANK']}"), os.O_WRONLY | os.O_CREAT)

        def marked(module, name, moment, seconds):
            plain = getattr(module, name)

            def call(*given, **named):
                os.pwrite(place, moment.ljust(12).encode(), 0)
                time.sleep(seconds)
                return plain(*given, **named)

            setattr(module, name, call)

        marked(Slow, "__call__", "compute", 0.0)
        marked(dist, "all_to_all_single", "exchange", 0.003)
        marked(saving, "write_checkpoint", "checkpoint", 0.01)
        marked(saving, "write_part", "checkpoint", 0.01)
        marked(saving, "publish_checkpoint", "publish", 0.01)
        marked(session, "end_attempt", "end", 0.1)

        @atexit.register
        def over():
            os.pwrite(place, b"over        ", 0)
            time.sleep(0.1)
"""


@dataclass(kw_only=True)
class Campaign:
    """What has fallen, and where.

    Attributes:
        fallen: how often which victim at which moment.
        num_attempts: of all jobs.
        seconds: together.
    """

    fallen: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_attempts: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        """Return it as a table."""
        moments = (*MOMENTS, *LAST)
        rows = [(victim, *(str(self.fallen[victim, moment]) for moment in moments)) for victim in VICTIMS]
        lines = ["".join(f"{cell:>12}" for cell in row) for row in (("", *moments), *rows)]
        total = f"{self.fallen.total()} kills, {self.num_attempts} attempts, {self.seconds:.0f} s: the same bits"
        return "\n".join([*lines, total])


class HuntedJob:
    """A job whose processes are killed."""

    def __init__(self, jobs: JobQueue, file: Path, run: Path, ranks: int, sharding: str, draw: random.Random) -> None:
        self._jobs, self._draw, self._run = jobs, draw, run
        settings = (f"config.sharding={sharding}",)
        agents = {"agents": str(draw.choice((1, 2)))}
        request = asked(file, run, settings, ranks=ranks, retries=10**6, backoff_seconds=1e-9, settings=agents)
        self.id = jobs.add(request).id
        self._supervisor = serving(jobs.home, self.id)
        self._seen: set[str] = set()
        self._struck = -1

    @property
    def has_ended(self) -> bool:
        """Whether its supervisor has; one that ends by itself leaves an ended job."""
        ended = self._supervisor.poll() is not None
        assert not ended or self._jobs.get(self.id).state in ENDED, self._supervisor.communicate()
        return ended

    def strike(self, victim: str, moment: str) -> tuple[str, str] | None:
        """Kill at a moment, or a moment later; return who fell where, None where the job has ended before."""
        until(lambda: self._at(moment, victim) or self.has_ended, _SECONDS, every=0.001)
        if self.has_ended:
            return None
        time.sleep(self._draw.choice((0.0, 0.0, self._draw.uniform(0.0, 0.02))))
        number = len(self._jobs.attempts(self.id)) - 1
        family = {kind: marks_of(self._jobs, self.id, kind) for kind in ("rank", "agent")}
        together = [mark for marks in family.values() for mark in marks]
        self._seen |= set(together)
        rank = self._draw.randrange(max(1, len(family["rank"])))
        fell = self._kill(victim, family, rank)
        if not fell:
            return None  # it has ended by itself
        self._struck = number
        until(lambda: not any(map(is_there, together)))
        if victim in ("supervisor", "all"):
            self._supervisor = serving(self._jobs.home, self.id)
        return victim, self._moment(number, rank)

    def end(self) -> int:
        """Wait for its end, check that nothing of it is left, and return how many attempts it took."""
        said, errors = self._supervisor.communicate(_SECONDS)
        job, attempts = self._jobs.get(self.id), self._jobs.attempts(self.id)
        assert job.state is LaunchState.COMPLETED, states_seen(job) + said + errors
        for one in attempts:
            folder = attempt_folder(self._jobs.home, self.id, one.number)
            self._seen |= {mark for kind in ("rank", "agent") for mark in processes_in(folder, kind)}
        assert not [mark for mark in self._seen if is_there(mark)]
        assert all(one.outcome for one in attempts), attempts
        return len(attempts)

    def _kill(self, victim: str, family: dict[str, list[str]], rank: int) -> bool:
        fell = False
        if victim in ("supervisor", "all"):
            self._supervisor.kill()
            fell = True
        if victim in ("agent", "all"):
            fell |= sum(send(mark, signal.SIGKILL) for mark in family["agent"]) > 0
        if victim == "all":
            fell |= sum(send(mark, signal.SIGKILL) for mark in family["rank"]) > 0
        if victim == "rank" and family["rank"]:
            fell = send(family["rank"][rank], signal.SIGKILL)
        if victim in ("supervisor", "all"):
            self._supervisor.communicate()
        return fell

    def _at(self, moment: str, victim: str) -> bool:
        """Whether an attempt after the one that was struck last has some rank at a moment."""
        latest = len(self._jobs.attempts(self.id)) - 1
        if latest <= self._struck:
            return False
        if moment == "begin":
            return bool(marks_of(self._jobs, self.id, "rank" if victim == "rank" else "agent"))
        ranks = len(marks_of(self._jobs, self.id, "rank"))
        return any(self._moment(latest, rank) == moment for rank in range(ranks))

    def _moment(self, number: int, rank: int) -> str:
        folder = attempt_folder(self._jobs.home, self.id, number)
        if (folder / f"moment-{rank}").exists():
            return (folder / f"moment-{rank}").read_text().strip() or "meet"
        return "meet" if (folder / f"rank-{rank}.process").exists() else "begin"


def strikes(draw: random.Random, kills: int, ranks: int) -> Iterator[tuple[str, str]]:
    """Yield who is to fall and when, the last ones at the job's end."""
    moments = [moment for moment in MOMENTS if ranks > 1 or moment != "exchange"]
    for number in range(kills):
        is_last = kills - number <= len(LAST) and kills > len(LAST)
        yield draw.choice(VICTIMS), LAST[number - kills] if is_last else draw.choice(moments)


def hunt(folder: Path, kills: int, ranks: int, sharding: str, draw: random.Random, told: Campaign) -> None:
    """Train a job, kill so many times, and hold it against a run of one process that nobody disturbs."""
    num_steps = max(12, 3 * kills)
    folder.mkdir(parents=True)
    file = recipe_in(folder, num_steps, pause=0.01 * ranks, before=MARKS.strip())
    whole, run = folder / "whole" / "run", folder / "hunted" / "run"
    began = time.monotonic()
    alone(file, whole)
    with_secrets_of(whole, run)
    with JobQueue(folder / "queue") as jobs:
        job = HuntedJob(jobs, file, run, ranks, sharding, draw)
        for victim, moment in strikes(draw, kills, ranks):
            if fell := job.strike(victim, moment):
                told.fallen[fell] += 1
        told.num_attempts += job.end()
    assert_same_run(whole, run, num_steps)
    rows = [row for _, step in standing_rows(run) for row in step]
    each = _STEPS_AN_EPOCH * len(rows) // num_steps
    assert all(len(set(rows[at : at + each])) == len(rows[at : at + each]) for at in range(0, len(rows), each))
    told.seconds += time.monotonic() - began


def main() -> None:
    """Hunt jobs in turns of all numbers of ranks and shardings until so many kills have fallen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--a-job", type=int, default=14, help="kills of one job")
    parser.add_argument("--ranks", type=int, help="only jobs of so many")
    parser.add_argument("--sharding", help="only jobs under this one")
    given = parser.parse_args()
    setups = [
        (ranks, sharding)
        for ranks, sharding in SETUPS
        if given.ranks in (None, ranks) and given.sharding in (None, sharding)
    ]
    told, draw = Campaign(), random.Random(given.seed)
    folder = Path(tempfile.mkdtemp(prefix="campaign-"))  # stays where a job has failed
    for number, (ranks, sharding) in enumerate(itertools.cycle(setups)):
        if told.fallen.total() >= given.kills:
            break
        hunt(folder / str(number), given.a_job, ranks, sharding, draw, told)
        sys.stdout.write(f"{ranks} ranks, {sharding}\n{told}\n")
        sys.stdout.flush()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
