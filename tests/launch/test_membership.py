"""Processes that come and go by themselves: who trains, what is begun again, and what isn't."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch.distributed as dist

from cosmati.core.clock import Clock
from cosmati.errors import MissingExtraError, RunError
from cosmati.launch.membership import RankGroup, train_among
from cosmati.launch.torchft import Lighthouse, train_with_torchft
from cosmati.train.run.result import RunResult
from tests.launch.slurm_cluster import result_of, step_of, until
from tests.processes import PythonProcess

LOST = ConnectionResetError("gloo: Connection reset by peer")


def ended(outcome: str = "completed") -> RunResult:
    return RunResult(outcome, Clock(), {}, 0.0, {}, None)


class Agreed:
    """Gives groups of this process alone, or of which it's a rank that isn't needed."""

    def __init__(self, *ranks: int) -> None:
        self.name, self._ranks = "job", list(ranks)
        self.number = 0
        self._stores: list[dist.TCPStore] = []

    def agree(self) -> RankGroup:
        self.number += 1
        if not self._ranks:
            raise RunError("the lighthouse has gone")
        self._stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        rank = self._ranks.pop(0)
        return RankGroup(number=self.number, rank=rank, size=rank + 1, host="127.0.0.1", port=self._stores[-1].port)


def test_who_is_not_needed_waits_for_the_next_agreement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = []

    def train() -> RunResult:
        sizes.append(dist.get_world_size())
        return ended()

    for ranks, most in (((2, 1, 0), 1), ((2, 0), 4)):  # the third of three doesn't train where four may
        members = Agreed(*ranks)
        train_among(members, train, run_folder=tmp_path / "run", num_ranks=most)
        assert members.number == len(ranks)
    assert sizes == [1, 1]
    assert "lost" not in capsys.readouterr().err
    assert not dist.is_initialized()


@pytest.mark.long
def test_who_agreed_and_does_not_come_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cosmati.launch.membership._MEET_SECONDS", 0.5)

    class Leaving(Agreed):
        """Agrees with one who is killed before they meet, then alone."""

        def agree(self) -> RankGroup:
            return replace(super().agree(), size=2 if self.number == 1 else 1)

    for rank in (1, 0):
        begun = time.monotonic()
        train_among(Leaving(rank, 0), ended, run_folder=tmp_path, num_ranks=2)
        assert time.monotonic() - begun < 30
        assert capsys.readouterr().err.count("Others were lost (DistStoreError") == 1


def test_somebody_else_s_run_is_not_fenced_off(tmp_path: Path) -> None:
    for name, is_fenced in (("one", False), ("another", False), ("another", True)):
        members = Agreed(0)
        members.name = name
        train_among(members, ended, run_folder=tmp_path, num_ranks=1)
        assert (tmp_path / "epoch").exists() is is_fenced


def test_an_error_of_one_s_own_is_raised(tmp_path: Path) -> None:
    def train() -> RunResult:
        raise ValueError("no such thing")

    members = Agreed(0, 0)
    with pytest.raises(ValueError, match="no such thing"):
        train_among(members, train, run_folder=tmp_path, num_ranks=1)
    assert members.number == 1


def listening(seconds: float = 20.0) -> str:
    """Do as `fit` does: take SIGTERM as a stop."""
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        end = time.monotonic() + seconds
        while not told and time.monotonic() < end:
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGTERM, before)
    return "stopped" if told else "completed"


def test_a_look_stops_the_run_and_goes_on(tmp_path: Path) -> None:
    outcomes: list[str] = []

    def train() -> RunResult:
        time.sleep(0.1)  # several looks before anybody listens
        outcomes.append(listening() if len(outcomes) < 2 else "completed")
        return ended(outcomes[-1])

    before = signal.getsignal(signal.SIGTERM)
    train_among(Agreed(0, 0, 0), train, run_folder=tmp_path, num_ranks=1, look_seconds=0.03)
    assert outcomes == ["stopped", "stopped", "completed"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_stop_that_somebody_asked_for_ends_it(tmp_path: Path) -> None:
    members = Agreed(0, 0)
    train_among(members, lambda: ended("stopped"), run_folder=tmp_path, num_ranks=1)
    assert members.number == 1
    members = Agreed(0, 0)

    def early() -> RunResult:
        time.sleep(0.1)  # looks that nobody listens to are no reason to go on
        return ended("stopped")

    train_among(members, early, run_folder=tmp_path, num_ranks=1, look_seconds=0.03)
    assert members.number == 1
    with pytest.raises(SystemExit):  # and one before `fit` ends the process, as without a handler
        train_among(Agreed(0), lambda: signal.raise_signal(signal.SIGTERM) or ended(), run_folder=tmp_path, num_ranks=1)


@pytest.mark.parametrize("num", [0, -1, 3, 6])
def test_ranks_that_cannot_be_halved_are_refused(tmp_path: Path, num: int) -> None:
    with pytest.raises(RunError, match="Give a power of two"):
        train_among(Agreed(0), ended, run_folder=tmp_path, num_ranks=num)


def test_a_run_folder_of_nowhere_in_particular_is_refused() -> None:
    with pytest.raises(RunError, match="isn't absolute"):
        train_among(Agreed(0), ended, run_folder=Path("run"), num_ranks=1)


@pytest.mark.skipif(find_spec("torchft") is not None, reason="torchft is installed")
def test_without_torchft_it_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(MissingExtraError, match=r"cosmati\[torchft\]"):
        train_with_torchft(ended, lighthouse="http://127.0.0.1:1", run_folder=tmp_path, num_ranks=1)


NODE = """
import json, os, sys, time
from pathlib import Path

import torch
import torch.distributed as dist

from cosmati import Classification, InMemory, RunConfig, Trainer
from cosmati.launch.membership import RankGroup, train_among
from cosmati.launch.torchft import train_with_torchft
from cosmati.models.mlp import MLP
from cosmati.optim import AdamW

folder, pause, look, name = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4]


class Slow(Classification):
    def __call__(self, model, data):
        time.sleep(pause)
        return super().__call__(model, data)


def train():
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    with (folder / "begins.txt").open("a") as file:
        file.write(f"{os.getpid()} {rank} {world}\\n")
    generator = torch.Generator().manual_seed(1)
    data = InMemory((torch.randn(64, 6, generator=generator), torch.randint(3, (64,), generator=generator)), 16)
    torch.manual_seed(0)
    config = RunConfig(budget="60ba", num_microbatches=4, num_threads=1, run_folder=folder / "run", ledger=True,
                       checkpoint_every="5ba")
    return Trainer(MLP((6, 8, 3)), Slow(3), data, optimizers=[AdamW(lr=0.01)], config=config).fit()


class Planned:
    '''Agrees on what a file says, once it says something new.'''

    name = "planned"

    def __init__(self):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / f"{name}.port").write_text(str(self.store.port))
        self.number = 0

    def agree(self):
        while True:
            number, *names = json.loads((folder / "plan.json").read_text())
            if number > self.number and name in names:
                port = folder / f"{names[0]}.port"
                if port.exists():
                    self.number = number
                    return RankGroup(number=number, rank=names.index(name), size=len(names), host="127.0.0.1",
                                 port=int(port.read_text()))
            time.sleep(0.05)


options = {"run_folder": folder / "run", "num_ranks": 4, "look_seconds": look}
if name == "alone":
    train()
elif name.startswith("http"):
    train_with_torchft(train, lighthouse=name, **options)
else:
    train_among(Planned(), train, **options)
"""


def node(folder: Path, name: str, pause: float = 0.03, look: float = 600.0) -> PythonProcess:
    folder.mkdir(exist_ok=True)
    script = folder / "node.py"
    script.write_text(NODE)
    return PythonProcess([script, folder, str(pause), str(look), name], cwd=folder, env={**os.environ})


def begins(folder: Path) -> list[list[int]]:
    """Return process, rank and world of each begin of training."""
    path = folder / "begins.txt"
    return [[int(word) for word in line.split()] for line in path.read_text().splitlines()] if path.exists() else []


def finish(process: PythonProcess) -> None:
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 0, errors


@pytest.mark.slow
def test_processes_that_go_and_come_cost_no_bit(tmp_path: Path) -> None:
    folder, alone = tmp_path / "job", tmp_path / "alone"

    def plan(number: int, *names: str) -> None:
        draft = folder / "plan.draft"
        draft.write_text(json.dumps([number, *names]))
        draft.rename(folder / "plan.json")

    def runs(step: int) -> Callable[[], bool]:
        return lambda: step_of(folder / "run") >= step

    folder.mkdir()
    plan(1, "a", "b")
    first, second = node(folder, "a", look=3.0), node(folder, "b")
    until(runs(10))
    second.kill()  # a rank that the other one, which holds the run's lock, needs
    second.communicate(timeout=60)
    plan(2, "a")
    until(lambda: len(begins(folder)) >= 3)
    third = node(folder, "c")
    plan(3, "c", "a")
    finish(third)
    finish(first)
    finish(node(alone, "alone", pause=0.0))
    assert [(rank, world) for _, rank, world in begins(folder)[2:3]] == [(0, 1)]
    assert sorted((rank, world) for _, rank, world in begins(folder)[3:5]) == [(0, 2), (1, 2)]
    assert result_of(folder / "run") == result_of(alone / "run")


@pytest.mark.torchft
@pytest.mark.slow
def test_a_lighthouse_s_processes_that_go_and_come_cost_no_bit(tmp_path: Path) -> None:
    from torchft.coordination import LighthouseServer

    folder, alone = tmp_path / "job", tmp_path / "alone"
    light = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=3000, join_timeout_ms=10_000)
    address = f"http://127.0.0.1:{light.address().rpartition(':')[2]}"
    try:
        nodes = [node(folder, address, 0.15, look=5.0)]
        until(lambda: step_of(folder / "run") >= 2)
        nodes.append(node(folder, address, 0.15, look=5.0))
        until(lambda: len(begins(folder)) >= 3 and begins(folder)[-1][2] == 2)
        begun, step = begins(folder), step_of(folder / "run")
        until(lambda: step_of(folder / "run") > step)
        (first,) = [pid for pid, rank, world in begun[-2:] if rank == 0]
        os.kill(first, signal.SIGKILL)  # it held the run's lock
        killed = time.monotonic()
        until(lambda: len(begins(folder)) > len(begun) and begins(folder)[-1][2] == 1)
        sys.stdout.write(f"begun again {time.monotonic() - killed:.1f} s after a process was killed\n")
        nodes.append(node(folder, address, 0.15, look=600.0))
        for one in nodes:
            if one.pid == first:
                one.communicate(timeout=60)
            else:
                finish(one)
        finish(node(alone, "alone", pause=0.0))
        assert result_of(folder / "run") == result_of(alone / "run")
    finally:
        light.shutdown()


@pytest.mark.torchft
def test_those_who_agree_again_meet_elsewhere() -> None:
    """Where they met before stand addresses that nobody listens on any more: they'd wait for each other there."""
    from torchft.coordination import LighthouseServer

    light = LighthouseServer(bind="127.0.0.1:0", min_replicas=2)
    address = f"http://127.0.0.1:{light.address().rpartition(':')[2]}"
    try:
        with Lighthouse(address) as one, Lighthouse(address) as other, ThreadPoolExecutor(2) as threads:
            first, again = (list(threads.map(Lighthouse.agree, (one, other), timeout=30)) for _ in range(2))
    finally:
        light.shutdown()
    assert first[0].number == first[1].number
    assert again[0].number == again[1].number != first[0].number
    assert {group.rank for group in again} == {0, 1}


@pytest.mark.torchft
def test_a_lighthouse_that_is_not_there_is_told() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(RunError, match=f"No lighthouse answers at {address}"):
        Lighthouse(address, answer_seconds=1.0)
