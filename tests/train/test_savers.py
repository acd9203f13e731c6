"""Savers write whole checkpoints and parts, while the loop waits or beside it, and publish them once all is there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmati.core.clock import Clock
from cosmati.errors import CheckpointError, RunError
from cosmati.train.layout.span import HeldSpan
from cosmati.train.ranks import Ranks
from cosmati.train.run import saving
from cosmati.train.run.checkpoints import Checkpoint, Roots, list_checkpoints, read_checkpoint
from cosmati.train.run.parts import HeldState, part_name
from cosmati.train.run.saving import Flight, Saver, WholeDraft
from tests.train.hand_made import SecondOfTwo

ROOTS = Roots(b"a" * 32, b"b" * 32, b"c" * 32)


def state(step: int = 1, weight: Tensor | None = None, **facts: Any) -> Checkpoint:
    return Checkpoint(step, {"w": torch.arange(4.0) if weight is None else weight}, {"m": torch.ones(2)}, facts)


def held(step: int = 1, **tensors: Tensor) -> HeldState:
    model = {name: HeldSpan.of(one) for name, one in (tensors or {"w": torch.arange(4.0)}).items()}
    return HeldState(step, model, {"m": HeldSpan.of(torch.ones(2))}, {"about": step})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@dataclass
class Told:
    """What a saver asks of others, in order, with what each finds in the folder."""

    folder: Path
    events: list[Any] = field(default_factory=list)
    is_busy: bool = False

    def check(self) -> None:
        self.events.append("check")

    def tell(self, clock: Clock, roots: Roots) -> None:
        self.events.append(("tell", clock.step, roots, len(list_checkpoints(self.folder))))

    def wait(self, seconds: float | None = None) -> bool:
        self.events.append(("wait", seconds))
        return not self.is_busy or seconds is None

    def begin(self, checkpoint: Path) -> None:
        self.events.append(("begin", checkpoint.name, checkpoint.exists()))

    def warn(self, besides: str) -> None:
        self.events.append(("warn", besides))

    def settle(self) -> None:
        self.events.append("settle")


def saver(folder: Path, ranks: Ranks | None = None, told: Told | None = None, **changed: Any) -> Saver:
    told = told or Told(folder)
    given: dict[str, Any] = {"keep": 2, "epoch": 5, "check": told.check, "tell": told.tell}
    return Saver(folder, ranks or Ranks(), **given | {"is_async": False, "copies": None} | changed)


class Saying(Ranks):
    """The only rank that does anything, among others that say something."""

    def __init__(self, *, others: bool = False) -> None:
        super().__init__()
        self.others, self.said = others, list[Any]()

    def agree(self, flag: bool) -> bool:
        self.said.append(flag)
        return flag or self.others

    def barrier(self) -> None:
        self.said.append("barrier")


class OfTwo(Ranks):
    """One of two ranks in threads of one process, which tell each other what they have to."""

    def __init__(self, rank: int, told: list[Any], meet: threading.Barrier) -> None:
        super().__init__()
        self.is_parallel, self.world, self.rank, self._told, self._meet = True, 2, rank, told, meet

    def all(self, own: Any) -> list[Any]:
        self._told[self.rank] = own
        self._meet.wait(60)
        found = list(self._told)
        self._meet.wait(60)
        return found

    def agree(self, flag: bool) -> bool:
        return any(self.all(flag))

    def barrier(self) -> None:
        self.all(None)

    def told(self, message: bytes) -> bytes:
        return bytes(self.all(message)[0])

    def told_by_all(self, own: Any) -> list[Any]:
        return self.all(own)


def both(work: Callable[[Ranks], object]) -> list[BaseException | None]:
    """Let two ranks do something; return how each has failed."""
    told, meet, failed = [None, None], threading.Barrier(2), list[BaseException | None]([None, None])

    def run(rank: int) -> None:
        try:
            work(OfTwo(rank, told, meet))
        except BaseException as error:  # noqa: BLE001  (returned)
            failed[rank] = error
            if not isinstance(error, CheckpointError):
                meet.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return failed


# ------------------------------------------------------------------------------------------------- while the loop waits


def test_observers_are_told_and_the_place_is_looked_at_before_a_checkpoint_has_its_name(tmp_path: Path) -> None:
    told, made = Told(tmp_path), state(3)
    saver(tmp_path, told=told, copies=told).save(Clock(step=3), made)
    assert told.events == [
        "check",
        ("wait", 10.0),
        "check",
        ("tell", 3, made.roots, 0),
        "check",
        ("wait", None),
        ("begin", "step-00000003", True),
    ]
    read = read_checkpoint(tmp_path / "step-00000003")
    assert (read.step, read.roots) == (3, made.roots)


def test_so_many_are_kept_and_the_drafts_of_a_writer_are_its_own(tmp_path: Path) -> None:
    one = saver(tmp_path, keep=2)
    for step in (1, 2, 3):
        one.save(Clock(step=step), state(step))
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    draft = WholeDraft(tmp_path, state(7), 5)
    assert (draft.path, draft.abandoned.is_set()) == (tmp_path / ".draft-00000007-5", False)
    draft.write()
    assert draft.path.exists()
    assert draft.finish() == state(7).roots


def test_what_has_another_rank_s_whole_checkpoint_writes_nothing_and_asks_nobody(tmp_path: Path) -> None:
    for is_async in (False, True):
        told = Told(tmp_path)
        one = saver(tmp_path, SecondOfTwo(), told, is_async=is_async)
        one.save(Clock(step=1), state())
        assert (told.events, one._flight) == ([], None)
    assert names(tmp_path) == []


def test_where_another_rank_fails_this_one_refuses_too(tmp_path: Path) -> None:
    told = Told(tmp_path)
    with pytest.raises(CheckpointError, match="Another rank couldn't write its part"):
        saver(tmp_path, Saying(others=True), told).save(Clock(step=1), state())
    assert list_checkpoints(tmp_path) == []
    assert told.events == ["check"]


def test_without_a_copy_to_wait_for_nothing_is_settled_while_the_loop_waits(tmp_path: Path) -> None:
    ranks, told = Saying(), Told(tmp_path)
    one = saver(tmp_path, ranks, told, copies=told)
    one.settle()
    assert (ranks.said, told.events) == ([], [])
    one.settle(copied=True)
    assert ranks.said == ["barrier", False, False, False, False]
    assert told.events == [("wait", 10.0), ("wait", 10.0), "settle"]
    saver(tmp_path, ranks).settle(copied=True)
    saver(tmp_path, ranks).abandon()


# --------------------------------------------------------------------------------------------------- beside the loop


def test_beside_the_loop_the_state_is_written_as_it_was(tmp_path: Path) -> None:
    weight, facts, told = torch.arange(4.0), {"list": [1]}, Told(tmp_path)
    one = saver(tmp_path, told=told, is_async=True)
    one.save(Clock(step=1), state(1, weight, **facts))
    weight.zero_()
    facts["list"].append(2)
    one.settle()
    read = read_checkpoint(tmp_path / "step-00000001")
    assert read.model["w"].tolist() == [0, 1, 2, 3]
    assert read.state["m"].tolist() == [1, 1]
    assert read.facts == {"list": [1]}
    assert [event[0] for event in told.events if isinstance(event, tuple)] == ["tell"]
    assert one._flight is None


def test_in_one_go_the_state_is_not_copied(tmp_path: Path) -> None:
    one, made = saver(tmp_path), state()
    draft = one._drafted(made)
    assert isinstance(draft, WholeDraft)
    assert draft._given[::2] == (tmp_path, 5)
    assert draft._given[1] is made
    assert one._kept == {}


@dataclass
class Drafted:
    """A draft whose every part waits until it may go on."""

    path: Path
    fails: str = ""
    may_finish: Event = field(default_factory=Event)
    abandoned: Event = field(default_factory=Event)
    done: list[str] = field(default_factory=list)

    def write(self) -> None:
        self.done.append("write")
        if self.fails == "write":
            raise CheckpointError("the disk refused")

    def finish(self) -> Roots:
        self.done.append("finish")
        assert self.may_finish.wait(60)
        if self.fails == "finish":
            raise CheckpointError("not all are there")
        return ROOTS


def test_a_flight_says_when_its_own_part_is_written_and_when_all_are(tmp_path: Path) -> None:
    draft = Drafted(tmp_path)
    flight = Flight(Clock(step=1), draft, is_first=True)
    assert flight.written.wait(60)
    assert (flight.is_alive(), flight.daemon, flight.name) == (True, True, "checkpoint")
    draft.may_finish.set()
    flight.join(60)
    assert (flight.roots, flight.error, flight.clock, draft.done) == (ROOTS, None, Clock(step=1), ["write", "finish"])
    second = Drafted(tmp_path)
    other = Flight(Clock(step=1), second, is_first=False)
    other.join(60)
    assert (other.roots, other.error, other.written.is_set(), second.done) == (None, None, True, ["write"])


def test_who_has_written_its_own_part_waits_for_the_others(tmp_path: Path) -> None:
    """A rank that has died is found by all then, and not by the first one alone."""
    ranks, draft = Saying(), Drafted(tmp_path)

    class Written(Event):
        def wait(self, timeout: float | None = None) -> bool:
            ranks.said.append("written")
            return super().wait(timeout)

    one = saver(tmp_path, ranks, is_async=True)
    one._flight = flight = Flight(Clock(step=1), draft, is_first=False)
    flight.join(60)
    flight.written = Written()
    flight.written.set()
    one.settle()
    assert ranks.said == ["written", "barrier", False, False]


@pytest.mark.parametrize("fails", ["write", "finish"])
def test_a_flight_that_fails_is_raised_in_the_loop_once(tmp_path: Path, fails: str) -> None:
    one, draft = saver(tmp_path, is_async=True), Drafted(tmp_path, fails)
    draft.may_finish.set()
    one._flight = Flight(Clock(step=1), draft, is_first=True)
    assert one._flight.written.wait(60)
    with pytest.raises(CheckpointError, match=r"the disk refused|not all are there"):
        one.settle()
    assert one._flight is None
    one.settle()


def test_the_loop_looks_and_does_not_wait(tmp_path: Path) -> None:
    (tmp_path / ".draft-00000001").mkdir()
    told = Told(tmp_path)
    one, draft = saver(tmp_path, told=told, is_async=True), Drafted(tmp_path / ".draft-00000001")
    one.land(wait=False)
    one._flight = flight = Flight(Clock(step=1), draft, is_first=True)
    one.land(wait=False)
    assert (one._flight, told.events) == (flight, [])
    draft.may_finish.set()
    one.land(wait=True)
    assert one._flight is None
    assert ("tell", 1, ROOTS, 0) in told.events
    assert names(tmp_path) == ["step-00000001"]


def test_alone_a_checkpoint_waits_for_the_copy_before_it(tmp_path: Path) -> None:
    (tmp_path / ".draft-00000001").mkdir()
    told = Told(tmp_path, is_busy=True)
    one, draft = saver(tmp_path, told=told, is_async=True, copies=told), Drafted(tmp_path / ".draft-00000001")
    draft.may_finish.set()
    one._flight = Flight(Clock(step=1), draft, is_first=True)
    one._flight.join(60)
    one.land(wait=False)
    assert told.events[-2:] == [("wait", None), ("begin", "step-00000001", True)]


@pytest.mark.parametrize("fails", ["", "finish"])
def test_what_is_abandoned_is_published_unless_it_fails(tmp_path: Path, fails: str) -> None:
    (tmp_path / ".draft-00000001").mkdir()
    told, draft, ranks = Told(tmp_path, is_busy=True), Drafted(tmp_path / ".draft-00000001", fails), Saying()
    ranks.is_parallel = True
    one = saver(tmp_path, ranks, told, is_async=True, copies=told)
    draft.may_finish = draft.abandoned
    one._flight = Flight(Clock(step=1), draft, is_first=True)
    one.abandon()
    assert len(list_checkpoints(tmp_path)) == (0 if fails else 1)
    assert told.events[-2:] == [("wait", None), ("warn", "")]


# ------------------------------------------------------------------------------------------------------------ in parts


@pytest.mark.parametrize("is_async", [True, False])
def test_two_ranks_write_one_checkpoint(tmp_path: Path, *, is_async: bool) -> None:
    (tmp_path / ".draft-00000001-5").mkdir()
    (tmp_path / ".draft-00000001-5" / "left by the killed").touch()
    told: list[Told] = [Told(tmp_path), Told(tmp_path)]
    shares: list[int] = [-1, -1]

    def save(ranks: Ranks) -> None:
        epoch = None if ranks.rank else 5
        one = saver(tmp_path, ranks, told[ranks.rank], is_async=is_async, epoch=epoch)
        one.save(Clock(step=1), held())
        one.settle()
        shares[ranks.rank] = len(one._share.placed)

    assert both(save) == [None, None]
    whole = Checkpoint(1, {"w": torch.arange(4.0)}, {"m": torch.ones(2)}, {"about": 1})
    read = read_checkpoint(tmp_path / "step-00000001")
    assert (read.roots, read.facts) == (whole.roots, whole.facts)
    files = {"digests.json", "index.json", "state.json", *(part_name(rank, 2) for rank in range(2))}
    assert set(names(tmp_path / "step-00000001")) == files
    assert told[0].events == ["check", "check", ("tell", 1, whole.roots, 0), "check"]
    assert told[1].events == []
    # Memory for the next copy beside the loop is kept, and while the loop waits it's needed elsewhere.
    assert (sum(shares) > 0) is is_async
    assert names(tmp_path) == ["step-00000001"]


def test_a_tensor_of_one_rank_that_no_file_holds_is_refused_by_all(tmp_path: Path) -> None:
    def save(ranks: Ranks) -> None:
        tensors = {"c": torch.ones(2, dtype=torch.complex128)} if ranks.rank else {}
        saver(tmp_path, ranks).save(Clock(step=4), held(4, **tensors))

    first, second = both(save)
    assert str(first) == "The checkpoint of step 4 can't be written. Another rank says why."
    assert str(second).startswith("The checkpoint of step 4 can't be written. c (torch.complex128): safetensors has no")
    assert names(tmp_path) == []


def test_a_part_that_the_disk_refuses_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        CheckpointError, match=r"checkpoint of step 1 couldn't be written to .*/file: .*Not a directory"
    ):
        saver(tmp_path / "file").save(Clock(step=1), held())


def test_parts_of_ranks_that_are_not_there_are_waited_for_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(saving, "finish_checkpoint", lambda *all_given: given.append(all_given) or ROOTS)
    one = saver(tmp_path)
    draft = one._drafted(held(3))
    assert draft is not None
    assert (draft.path, draft.finish()) == (tmp_path / ".draft-00000003-5", ROOTS)
    assert given == [(draft.path, 3, {"about": 3}, one._shares._plan, 1, 600.0, draft.abandoned)]
    assert not draft.abandoned.is_set()


def test_who_is_stale_drafts_nothing(tmp_path: Path) -> None:
    def stale() -> None:
        raise RunError("stale")

    for made in (state(), held()):
        with pytest.raises(RunError, match="stale"):
            saver(tmp_path, check=stale).save(Clock(step=1), made)
    assert names(tmp_path) == []
