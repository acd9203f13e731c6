"""Processes that come and go by themselves: what others of a job, strangers and frozen ones may cost, on real ones."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from cosmati.errors import RunError
from cosmati.launch.membership import train_among
from cosmati.launch.torchft import Lighthouse
from cosmati.storage.fence import Fence
from cosmati.storage.lock import is_locked
from tests.launch.slurm_cluster import until
from tests.launch.test_membership import LOST, Agreed, ended, listening
from tests.processes import PythonProcess

pytestmark = pytest.mark.long

MEMBER = """
import json, os, signal, sys, time
from pathlib import Path

import torch
import torch.distributed as dist

from cosmati.core.clock import Clock
from cosmati.launch import claim, membership
from cosmati.storage.fence import Fence
from cosmati.train.run.result import RunResult

folder, name, options = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
claim._BEAT_SECONDS, claim._WATCH_SECONDS, claim._LOCK_SECONDS = 0.1, 1.5, 0.2


def note(*words):
    with (folder / f"{name}.notes").open("a") as file:
        file.write(" ".join(map(str, words)) + "\\n")


def ended(outcome="completed"):
    return RunResult(outcome, Clock(), {}, 0.0, {}, None)


class Planned:
    '''Agrees on what a file says, once it says something new. The test has the store.'''

    def __init__(self):
        self.name, self.number = options.pop("job", "job"), 0

    def agree(self):
        note("agrees")
        while True:
            number, port, *names = json.loads((folder / "plan.json").read_text())
            if number > self.number and name in names:
                self.number = number
                agreed(number)
                rank = names.index(name)
                return membership.RankGroup(number=number, rank=rank, size=len(names), host="127.0.0.1", port=port)
            time.sleep(0.02)


def agreed(number):
    pass


def reduce_until(*are_over):
    said = torch.zeros(len(are_over))
    while not said.any():  # alike on all ranks: one that left alone would be lost to the others
        said = torch.tensor([float(bool(is_over())) for is_over in are_over])
        dist.all_reduce(said, dist.ReduceOp.MAX)
        time.sleep(0.02)
    return said.tolist()


def train():
    note("trains", dist.get_rank(), dist.get_world_size())
    return ended()


options = {"run_folder": folder / "run", "num_ranks": 4, **options}
BODY
membership.train_among(Planned(), train, **options)
note("leaves")
"""


class Members:
    """Processes, and the store where they meet."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.number = folder, folder / "run", 0
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._all: list[PythonProcess] = []

    def plan(self, *names: str) -> None:
        """Have some agree."""
        self.number += 1
        draft = self.folder / "plan.draft"
        draft.write_text(json.dumps([self.number, self._store.port, *names]))
        draft.rename(self.folder / "plan.json")

    def begin(self, name: str, body: str = "", world: str | None = None, **options: Any) -> PythonProcess:
        """Begin one; what is given replaces parts of the script above."""
        script = self.folder / f"{name}.py"
        script.write_text(MEMBER.replace("BODY", body))
        environment = {key: value for key, value in os.environ.items() if key != "WORLD_SIZE"}
        environment |= {} if world is None else {"WORLD_SIZE": world}
        command = [script, self.folder, name, json.dumps(options)]
        self._all.append(PythonProcess(command, cwd=self.folder, env=environment))
        return self._all[-1]

    def notes(self, name: str) -> list[str]:
        """Return what one has noted."""
        path = self.folder / f"{name}.notes"
        return path.read_text().splitlines() if path.exists() else []

    def until(self, name: str, word: str, times: int = 1) -> None:
        """Wait until one has noted something so often."""
        until(lambda: sum(note.startswith(word) for note in self.notes(name)) >= times, 60.0)

    def close(self) -> None:
        """Kill those that are left."""
        for one in self._all:
            one.kill()
            one.communicate(timeout=30)


@pytest.fixture
def members(tmp_path: Path) -> Any:
    made = Members(tmp_path)
    yield made
    made.close()


def errors_of(process: PythonProcess) -> str:
    """Return what one that ends well has said."""
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 0, errors
    return errors


HOLDS = """
def train():
    note("trains", dist.get_rank(), dist.get_world_size(), (folder / "run" / "epoch").exists())
    until = time.monotonic() + 60
    while not (folder / "opens").exists() and time.monotonic() < until:  # a model that takes a while to be built
        time.sleep(0.02)
    fence = Fence(folder / "run")
    note("holds")
    while fence.holds() and not (folder / "ends").exists() and time.monotonic() < until:
        time.sleep(0.02)
    note("is stale" if not fence.holds() else "ends")
    fence.release()
    return ended()
"""
SEES = """
def train():
    epoch = (folder / "run" / "epoch").read_text().split()[0]
    note("trains", dist.get_rank(), dist.get_world_size(), epoch)
    return ended()
"""


@pytest.mark.parametrize("is_open", [False, True])
def test_those_who_wait_take_no_healthy_run_away(members: Members, is_open: bool) -> None:
    if is_open:
        (members.folder / "opens").touch()
    members.plan("a")
    first = members.begin("a", HOLDS)
    members.until("a", "holds" if is_open else "trains")
    members.plan("b", "c")
    others = [members.begin(name, SEES) for name in "bc"]
    for times in (2, 3):  # they leave, and agree anew
        for name in "bc":
            members.until(name, "agrees", times)
        assert [members.notes(name)[-1] for name in "bc"] == ["agrees", "agrees"]
        members.plan("b", "c")
    if is_open:
        first.kill()
        first.communicate(timeout=30)
    else:
        (members.folder / "opens").touch()
        (members.folder / "ends").touch()
        errors_of(first)
        assert members.notes("a")[-3:] == ["holds", "ends", "leaves"]
    for name, other in zip("bc", others, strict=True):
        for _ in range(4):  # it may have found the first one alive once more
            if other.poll() is None and len([note for note in members.notes(name) if note == "agrees"]) > 3:
                members.plan("b", "c")
            time.sleep(0.3)
        errors = errors_of(other)
        assert errors.count("Others of this job train in") == 1
        assert "lost" not in errors
        assert members.notes(name)[-1] == "leaves"


def test_one_that_leaves_to_agree_is_agreed_with(members: Members) -> None:
    """Those who watch it then would else take its place, and it would wait for their look."""
    (members.folder / "opens").touch()
    members.plan("a")
    first = members.begin("a", HOLDS + "\nclaim._BEAT_SECONDS = 1000.0\n")
    members.until("a", "holds")
    members.plan("b")
    other = members.begin("b", SEES + "\nclaim._WATCH_SECONDS = 60.0\nagreed = lambda number: note('agreed')\n")
    members.until("b", "agreed")
    time.sleep(1.0)
    (members.folder / "ends").touch()
    errors_of(first)
    members.until("b", "agrees", 2)
    assert "is stale" not in members.notes("a")
    members.plan("b")
    errors_of(other)


def test_one_that_is_frozen_is_fenced_off_before_any_rank_begins(members: Members) -> None:
    (members.folder / "opens").touch()
    members.plan("a")
    first = members.begin("a", HOLDS)
    members.until("a", "holds")
    first.send_signal(signal.SIGSTOP)
    members.plan("b", "c")
    body = SEES + "\nclaim._WATCH_SECONDS, membership._MEET_SECONDS = 4.0, 10.0\n"
    for name, other in [(name, members.begin(name, body, wait_seconds=2.0)) for name in "bc"]:
        assert "Others" not in errors_of(other)
        assert members.notes(name)[1] == f"trains {'bc'.index(name)} 2 2"  # the first one's epoch was 1
    told = (members.run / "members.alive").read_text()
    first.send_signal(signal.SIGCONT)
    errors_of(first)
    assert "is stale" in members.notes("a")
    assert (members.run / "members.alive").read_text() == told  # which isn't its own any more


@pytest.mark.parametrize("name", ["job", "another"])
def test_strangers_that_train_keep_their_run(members: Members, name: str) -> None:
    members.run.mkdir()
    (members.run / "members.begun").write_text("job")
    fence = Fence(members.run)
    before = {path.name: path.read_text() for path in members.run.iterdir()}
    for _ in range(2):  # the second one had it
        members.plan("a", "b")
        for process in [members.begin(one, job=name) for one in "ab"]:
            errors = process.communicate(timeout=60)[1]
            assert process.returncode == 1
            assert "RunError: Another process is training in" in errors
            assert "which isn't this job's" in errors
    after = {path.name: path.read_text() for path in members.run.iterdir() if path.name != "members.alive"}
    assert after == before
    assert (members.run / "members.alive").exists() is (name == "job")
    assert fence.holds()
    fence.release()
    members.plan("c")
    errors_of(members.begin("c", job=name))


def test_another_job_s_members_keep_their_run_while_they_build_it(members: Members) -> None:
    members.plan("a")
    first = members.begin("a", HOLDS)
    members.until("a", "trains")
    members.plan("b")
    assert "which isn't this job's" in members.begin("b", job="another").communicate(timeout=60)[1]
    (members.folder / "opens").touch()
    (members.folder / "ends").touch()
    errors_of(first)
    assert "ends" in members.notes("a")


REDUCES = """
def train():
    note("trains", dist.get_rank(), dist.get_world_size())
    reduce_until((folder / "ends").exists)
    return ended()
"""


@pytest.mark.parametrize("world", [None, "1"])  # torchrun with one process a node says 1
def test_others_that_are_killed_are_agreed_upon_anew_and_fenced_off(members: Members, world: str | None) -> None:
    members.plan("a", "b")
    first, second = (members.begin(name, REDUCES, world) for name in "ab")
    members.until("a", "trains")
    members.until("b", "trains")
    assert not (members.run / "epoch").exists()
    second.kill()
    members.until("a", "agrees", 2)
    (members.folder / "ends").touch()
    members.plan("a")
    assert errors_of(first).count("Others were lost (RuntimeError") == 1
    assert (members.run / "epoch").read_text().startswith("1 ")
    assert members.notes("a") == ["agrees", "trains 0 2", "agrees", "trains 0 1", "leaves"]


def test_one_that_is_frozen_is_waited_for_as_long_as_was_said(members: Members) -> None:
    members.plan("a", "b")
    first, second = (members.begin(name, REDUCES, wait_seconds=2.0) for name in "ab")
    members.until("b", "trains")
    second.send_signal(signal.SIGSTOP)
    frozen = time.monotonic()
    members.until("a", "agrees", 2)
    assert 0.5 < time.monotonic() - frozen < 30
    members.plan("a")
    members.until("a", "trains 0 1")
    second.send_signal(signal.SIGCONT)
    members.until("b", "agrees", 2)
    (members.folder / "ends").touch()
    assert "Timed out waiting 2000ms" in errors_of(first)


MEETS = """
membership._MEET_SECONDS = 2.0


def freeze():
    note("frozen")
    os.kill(os.getpid(), signal.SIGSTOP)


def agreed(number):
    if number == 1 and WHEN == "agreed":
        freeze()


class Store(membership.PrefixStore):
    def wait(self, keys, limit):
        if WHEN in keys[0] and (folder / "plan.json").read_text().startswith("[1,"):
            freeze()
        super().wait(keys, limit)


membership.PrefixStore = Store
"""


@pytest.mark.parametrize("when", ["agreed", "here", "all"])
def test_one_that_is_frozen_while_they_meet_comes_back_to_agreeing(members: Members, when: str) -> None:
    members.plan("a", "b")
    first = members.begin("a", MEETS.replace("WHEN", "'never'"))
    second = members.begin("b", MEETS.replace("WHEN", repr(when)))
    members.until("b", "frozen")
    members.until("a", "agrees", 2)
    members.plan("a")
    assert errors_of(first).count("Others were lost") == 1
    assert members.notes("a")[-2:] == ["trains 0 1", "leaves"]
    second.send_signal(signal.SIGCONT)
    thawed = time.monotonic()
    members.until("b", "agrees", 2)
    assert time.monotonic() - thawed < 20
    members.plan("b")
    errors_of(second)


DIES = "\ndist.init_process_group = lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)\n"


def test_one_that_is_killed_in_the_moment_of_meeting_is_waited_for_no_longer(members: Members) -> None:
    members.plan("a", "b")
    first, second = members.begin("a", MEETS.replace("WHEN", "'never'")), members.begin("b", DIES)
    second.communicate(timeout=60)
    assert second.returncode == -signal.SIGKILL
    members.until("a", "agrees", 2)
    members.plan("a")
    assert errors_of(first).count("Others were lost (DistStoreError") == 1


LOOKS = """
times = []


def agreed(number):
    time.sleep(1.0 * (number > 1 and name == "b"))  # the other one is there long before


def train():
    note("trains", dist.get_rank(), dist.get_world_size())
    told = []
    before = signal.getsignal(signal.SIGTERM)
    times.append(name)
    if len(times) == 1:  # it listens to one look
        signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    is_stopped, _ = reduce_until(lambda: told, (folder / "ends").exists)
    signal.signal(signal.SIGTERM, before)
    note("looked" if told else "was told")
    return ended("stopped" if is_stopped else "completed")
"""


def test_all_ranks_go_on_after_a_look_and_meet_where_they_met_before(members: Members) -> None:
    members.plan("a", "b")
    first, second = (members.begin(name, LOOKS, look_seconds=2.0) for name in "ab")
    for name in "ab":
        members.until(name, "agrees", 2)
    assert (members.notes("a")[2], members.notes("b")[2]) == ("looked", "was told")
    members.plan("a", "b")
    for name in "ab":
        members.until(name, "trains", 2)
    (members.folder / "ends").touch()
    for process in (first, second):
        assert "lost" not in errors_of(process)


def test_a_stop_takes_longer_than_the_time_between_two_looks(tmp_path: Path) -> None:
    told: list[int] = []
    outcomes = iter(("stopped", "completed"))

    def train() -> Any:
        outcome = next(outcomes)
        if outcome == "stopped":
            before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
            end = time.monotonic() + 0.5
            while time.monotonic() < end:
                time.sleep(0.01)
            signal.signal(signal.SIGTERM, before)
        return ended(outcome)

    train_among(Agreed(0, 0), train, run_folder=tmp_path, num_ranks=1, look_seconds=0.05)
    assert told == [signal.SIGTERM]


def test_a_look_s_signal_that_comes_after_fit_ends_nothing(tmp_path: Path) -> None:
    outcomes: list[str] = []

    def train() -> Any:
        outcomes.append("completed" if outcomes else listening())
        if len(outcomes) == 1:
            signal.raise_signal(signal.SIGTERM)
        return ended(outcomes[-1])

    train_among(Agreed(0, 0), train, run_folder=tmp_path, num_ranks=1, look_seconds=0.05)
    assert outcomes == ["stopped", "completed"]


@pytest.mark.parametrize("error", [LOST, TimeoutError("my data server"), RuntimeError("the store is closed")])
def test_one_alone_has_lost_no_others(tmp_path: Path, error: Exception) -> None:
    def train() -> Any:
        raise error

    members = Agreed(0, 0)
    with pytest.raises(type(error), match=str(error)):
        train_among(members, train, run_folder=tmp_path, num_ranks=1)
    assert members.number == 1


def test_others_may_be_lost_so_often_and_the_last_cause_is_told(tmp_path: Path) -> None:
    class Two(Agreed):
        def agree(self) -> Any:
            return replace(super().agree(), size=2)

    members = Two(0, 0, 0, 0)
    told = r"lost 3 times, and 2 are allowed. The last time it was DistStoreError: "
    begun = time.monotonic()
    with pytest.raises(RunError, match=told) as lost:  # the other one never comes
        train_among(members, ended, run_folder=tmp_path, num_ranks=2, max_failures=2, wait_seconds=0.1)
    assert time.monotonic() - begun < 30
    assert members.number == 3
    assert isinstance(lost.value.__cause__, dist.DistStoreError)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("num_ranks", (2.0, True, "2", None)),
        ("max_failures", (-1, 1.0, False)),
        ("look_seconds", (0, -1.0, math.nan, math.inf, 1e10, "5", True)),
        ("wait_seconds", (0, -1.0, math.nan, math.inf, 1e10, None)),
    ],
)
def test_numbers_that_cannot_be_are_refused_by_name(tmp_path: Path, name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        members = Agreed(0)
        given: dict[str, Any] = {"num_ranks": 1, name: value}
        with pytest.raises(RunError, match=f"{name}={value!r} "):
            train_among(members, ended, run_folder=tmp_path, **given)
        assert members.number == 0
    assert not any(tmp_path.iterdir())


def test_who_has_trained_shows_nothing_any_more(tmp_path: Path) -> None:
    def alive() -> bool:
        return any(thread.name == "cosmati-alive" for thread in threading.enumerate())

    def train() -> Any:
        assert alive()
        assert is_locked(tmp_path / "members.alive")
        return ended()

    train_among(Agreed(0), train, run_folder=tmp_path, num_ranks=1)
    assert not is_locked(tmp_path / "members.alive")
    until(lambda: not alive(), 10.0)


def test_a_train_that_returns_nothing_is_told(tmp_path: Path) -> None:
    def train() -> Any:
        ended()

    with pytest.raises(RunError, match=r"train returned None.* Return what fit\(\) returns"):
        train_among(Agreed(0), train, run_folder=tmp_path, num_ranks=1)


def test_another_thread_and_another_process_group_are_refused(tmp_path: Path) -> None:
    said: list[str] = []

    def refused() -> None:
        with pytest.raises(RunError) as told:
            train_among(Agreed(0), ended, run_folder=tmp_path, num_ranks=1)
        said.append(str(told.value))

    thread = threading.Thread(target=refused)
    thread.start()
    thread.join()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        refused()
    finally:
        dist.destroy_process_group()
    assert "only the main thread" in said[0]
    assert "dist.destroy_process_group()" in said[1]


NOWHERE = ["", "host", "host:1", "http://", "http://host", "http://host:", "http://host:0x1", "http://[::1", None]


@pytest.mark.torchft
@pytest.mark.parametrize("address", [*NOWHERE, "http://host:70000", "http://host:1/x", "http://host:1?x", "ftp://a:1"])
def test_a_lighthouse_s_address_has_a_form(address: Any) -> None:
    with pytest.raises(RunError, match=r"is no lighthouse's address. Give http://HOST:PORT"):
        Lighthouse(address)


@pytest.mark.torchft
@pytest.mark.parametrize(
    ("bind", "form"),
    [("127.0.0.1:0", "http://127.0.0.1:{}/"), ("[::1]:0", "http://[::1]:{}"), ("[::1]:0", "http://[::1]:{}/")],
)
def test_a_lighthouse_s_address_may_end_with_a_slash_and_be_ipv6(bind: str, form: str) -> None:
    from torchft.coordination import LighthouseServer

    light = LighthouseServer(bind=bind, min_replicas=2, join_timeout_ms=1000)
    try:
        port = light.address().rpartition(":")[2]
        with Lighthouse(form.format(port)) as one, Lighthouse(form.format(port)) as other:
            assert one.name == other.name == form.format(port).rstrip("/")
            groups: list[Any] = []
            threads = [threading.Thread(target=lambda it=it: groups.append(it.agree())) for it in (one, other)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
            assert {group.rank for group in groups} == {0, 1}
            store = dist.TCPStore(groups[0].host, groups[0].port)
            store.set("reached", "")
    finally:
        light.shutdown()
