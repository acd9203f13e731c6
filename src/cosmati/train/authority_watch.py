"""Asks those who vouch for a run's data again as it goes on, and says from which step on the run does what about it.

The first rank asks, in a thread, so that no step waits. What has come is taken at the border of a step whose number
`LOOK_EVERY` divides, told to all ranks, put on record, and acted on one step later: every rank does the same at the
same step, and who resumes or replays reads the entry. No clock decides anything but when it's asked.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from datetime import datetime
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, NamedTuple

from cosmati.core.clock import Clock
from cosmati.data.tombstoned import Tombstoned
from cosmati.data.vouching import VouchedShards, look_again, vouched_sources
from cosmati.provenance.authority.errors import NoLongerVouchedError
from cosmati.provenance.voucher import LostVoucher, VouchedData, Voucher, Withdrawal, Withdrawn, class_of_target
from cosmati.routing.grace import Grace
from cosmati.routing.policy import CompiledPolicy, resolve_time
from cosmati.routing.tightening import without_class
from cosmati.train.assembly import Assembly
from cosmati.train.identity import Change
from cosmati.train.ingredients import Ingredients
from cosmati.train.run.session import OpenRun
from cosmati.train.signed import vouched_of

LOOK_EVERY = 4
"""Steps between looks at what has come: on several ranks each look is a small exchange."""
_PATIENCE_SECONDS = 300.0
"""For who doesn't answer."""
_AGAIN_SECONDS = (2.0, 15.0)
"""After which it's asked again where nothing trusted came: a connection fails, a repository is being changed."""
_END_SECONDS = 1.0
_MEND = "There's a checkpoint of this step: once that is mended, start the run again, and it goes on."


class News(NamedTuple):
    """What has changed.

    Attributes:
        changes: in words, for the record.
        vouched: who vouches for the data now, where that is others or longer; None on all ranks but the first.
        withdrawn: what they have taken back; None for nothing.
        policy: that is in force with it.
    """

    changes: Sequence[Change]
    vouched: VouchedData | None
    withdrawn: Withdrawn | None
    policy: CompiledPolicy | None

    @property
    def facts(self) -> dict[str, Any]:
        """The run's facts that are others now."""
        vouched = {} if self.vouched is None else {"vouched": self.vouched}
        return {"withdrawn": self.withdrawn, "policy": self.policy, **vouched}


class AuthorityWatch:
    """Watches over what a run learns from.

    Args:
        sources: that are vouched for.
        vouched: by whom, when they were opened.
        assembly: of the run.
        grace: what follows where they are no longer; None, of a run without a policy or a memory of it, stops.
        gone: classes whose rows are tombstones.

    Raises:
        NoLongerVouchedError: they have been opened as another run has kept them, or in another process.
    """

    def __init__(
        self,
        sources: Sequence[VouchedShards],
        vouched: VouchedData,
        assembly: Assembly,
        grace: Grace | None,
        gone: Collection[str] = (),
    ) -> None:
        self._sources, self._vouched, self._a = sources, vouched, assembly
        self._grace = grace or Grace()
        self._known = {one.voucher.target: _holds(one.voucher) for one in sources}
        self._base = assembly.policy
        self._withdrawn: Withdrawn | None = None
        self._found: SimpleQueue[VouchedData] = SimpleQueue()
        self._asked_since: float | None = None
        self._wake, self._is_closed = threading.Event(), False
        self._thread: threading.Thread | None = None
        self._heeded = -1
        asked = [one.asked for one in sources if one.asked is not None]
        if len(asked) < len(sources):
            msg = "Signed data were opened in another process, and who vouches for them can't be asked again from here."
            raise NoLongerVouchedError(f"{msg} Open them in the process that trains.")
        self._every = min(threading.TIMEOUT_MAX, *(one.authority.refresh_seconds for one in asked))
        self._starts = {phase.start_step for phase in assembly.policy.phases[1:]} if assembly.policy else set()
        folder = assembly.config.run_folder
        kept = {one.authority.run.resolve() for one in asked if one.authority.run is not None}
        self._gone = frozenset(gone)
        lost = self._read(vouched.lost)
        if lost and (folder is None or kept != {folder.resolve()}):
            msg = (
                f"{lost[0].because} What {asked[0].authority.run} has kept of it is for going on with that "
                f"run, and run_folder is {folder}."
            )
            raise NoLongerVouchedError(msg)

    def rebase(self, policy: CompiledPolicy, grace: Grace | None) -> CompiledPolicy:
        """Go by another policy and grace; return it without what was withdrawn. All ranks do."""
        self._base, self._grace = policy, grace or Grace()
        self._starts = {phase.start_step for phase in policy.phases[1:]}
        tightened = self._tightened(self.withdrawals)
        assert tightened is not None, "a governed run"
        self._a.router.tighten(tightened)
        return tightened

    @property
    def withdrawals(self) -> tuple[Withdrawal, ...]:
        """What is in force."""
        return self._withdrawn.in_force if self._withdrawn is not None else ()

    def resume(self, recorded: Withdrawn | None, clock: Clock) -> News | None:
        """Go on with what the ledger has recorded, and with what was found when the data were opened. All ranks ask.

        Classes that were rejected stay so. A stop is lifted where those who vouch for the source do so again.

        Args:
            recorded: by the ledger; the first rank's counts.
            clock: where the run goes on.
        """
        if self._a.ranks.rank:
            return self._agreed((), (), None)
        before = recorded.in_force if recorded is not None else ()
        seen = look_again(self._sources) if self._vouched.lost else self._vouched
        lost = {(one.target, one.reason): one for one in self._read(seen.lost)}
        kept = [one for one in before if one.action == "reject" or (one.target, one.reason) in lost]
        known = {(one.target, one.reason) for one in kept}
        new = self._answers([one for key, one in lost.items() if key not in known], kept, clock.step)
        changes = self._changes(new)
        changes += [Change("provenance", str(one), self._why_lifted(one)) for one in before if one not in kept]
        other = self._other_keys(seen)
        self._withdrawn = recorded
        news = self._agreed([*kept, *new], [*changes, *other], seen)
        return news._replace(vouched=seen) if news is not None and other else news

    def before_step(self, run: OpenRun, clock: Clock, save: Callable[[], object]) -> None:
        """Put on record what has changed, and stop the run where that is due. All ranks ask, before each step.

        Args:
            run: is told.
            clock: stands at the step.
            save: writes a checkpoint.

        Raises:
            NoLongerVouchedError: it stops here; there's a checkpoint of this step.
        """
        if (news := self.heed(clock)) is not None:
            run.amend(clock, news.changes, **news.facts)
        if why := self.refuse(clock.step):
            run.ask_to_stop(why)
            save()
            raise NoLongerVouchedError(f"{why} {_MEND}")

    def heed(self, clock: Clock) -> News | None:
        """Return what has changed since, at the border of a step; nearly always nothing. All ranks ask.

        Args:
            clock: stands at the step; what is returned acts from the next one on.
        """
        if clock.step in self._starts:
            self._wake.set()
        if clock.step % LOOK_EVERY or clock.step == self._heeded:
            return None
        self._heeded = clock.step
        found = self._newest() if self._a.ranks.rank == 0 else None
        if found is None:
            return self._agreed((), (), None)
        known = {(one.target, one.reason) for one in self.withdrawals}
        lost = [one for one in found.lost if (one.target, one.reason) not in known]
        new = self._answers(lost, self.withdrawals, clock.step + 1)
        if new:
            return self._agreed([*self.withdrawals, *new], self._changes(new), found)
        other = self._other_keys(found)
        news = self._agreed(self.withdrawals if other else (), other, found)
        return news._replace(vouched=found) if news is not None else None

    def _other_keys(self, found: VouchedData) -> list[Change]:
        """Return which sources are signed by others than before, for longer, or in another version; it's known now."""
        holds = {voucher.target: _holds(voucher) for voucher in found.vouchers}
        other = {target: text for target, text in holds.items() if self._known[target] != text}
        changes = [Change("provenance", f"{t}: {self._known[t]}", f"{t}: {text}") for t, text in other.items()]
        self._known |= other
        return changes

    def refuse(self, step: int) -> str:
        """Return why the run stops before a step, empty where it doesn't."""
        return next((str(one) for one in self.withdrawals if one.action == "stop" and one.step <= step), "")

    def _answers(self, lost: Sequence[LostVoucher], before: Sequence[Withdrawal], step: int) -> list[Withdrawal]:
        """Return what follows from what is lost, from a step on."""
        found = list[Withdrawal]()
        for one in self._read(lost):
            action, later = self._grace.answer(one.reason, self._steps)
            found.append(Withdrawal(one.target, one.reason, one.because, action, step + later))
        if self._base is not None and found and not self._offers([*before, *found], step):
            # Nothing would be left to learn from: as good as a stop, and it says why.
            found = [Withdrawal(o.target, o.reason, o.because, "stop", o.step) for o in found]
        return found

    def _read(self, lost: Sequence[LostVoucher]) -> list[LostVoucher]:
        """Leave out what nobody reads: of rows that are tombstones nobody has to vouch for anything."""
        return [one for one in lost if class_of_target(one.target) not in self._gone]

    def _why_lifted(self, one: Withdrawal) -> str:
        return "its rows are gone" if one.class_path in self._gone else "vouched for again"

    def _changes(self, new: Sequence[Withdrawal]) -> list[Change]:
        return [Change("provenance", f"{one.target}: {self._known[one.target]}", str(one)) for one in new]

    def _steps(self, span: str) -> int:
        return resolve_time(span, num_steps=self._a.budget.num_steps or 0)

    def _offers(self, withdrawals: Sequence[Withdrawal], step: int) -> bool:
        policy = self._tightened(withdrawals)
        assert policy is not None, "asked under a policy"
        late = [number for number, phase in enumerate(policy.phases) if phase.end_step > step]
        own = {policy.classes.index(one.manifest.class_name) for one in self._sources}
        return any(policy.decision[row][p] != "reject" for c in own for row in policy.rows_of(c) for p in late)

    def _tightened(self, withdrawals: Sequence[Withdrawal]) -> CompiledPolicy | None:
        policy = self._base
        for one in withdrawals:
            if policy is not None and one.action == "reject":
                policy = without_class(policy, policy.classes.index(one.class_path), one.step)
        return policy

    def _agreed(
        self, withdrawals: Sequence[Withdrawal], changes: Sequence[Change], seen: VouchedData | None
    ) -> News | None:
        """Let every rank have what the first one has found, and go by it."""
        told = {"withdrawals": list(map(asdict, withdrawals)), "changes": [[c.name, c.was, c.now] for c in changes]}
        message = self._a.ranks.told(json.dumps(told).encode() if withdrawals or changes else b"")
        if not message:
            return None
        told = json.loads(message)
        in_force = tuple(Withdrawal(**one) for one in told["withdrawals"])
        if in_force != self.withdrawals:
            seen = seen or VouchedData("", (), {})  # the first rank alone writes
            self._withdrawn = Withdrawn(seen.opened, in_force, seen.digests, seen.files) if in_force else None
        policy = self._tightened(in_force)
        if policy is not None:
            self._a.router.tighten(policy)
        return News([Change(*one) for one in told["changes"]], None, self._withdrawn, policy)

    def start(self) -> None:
        """Begin to ask, on the first rank."""
        if self._a.ranks.rank == 0 and self._thread is None:
            self._is_closed = False
            self._wake.clear()
            self._thread = threading.Thread(target=self._ask, daemon=True, name="cosmati-authority")
            self._thread.start()

    def close(self) -> None:
        """Ask no more; what is being asked is given a moment."""
        self._is_closed = True
        self._wake.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_END_SECONDS)

    def _ask(self) -> None:
        pause = self._every if self._seconds_open() < self._every else 0.0
        while not self._ends(pause):
            found = self._asked()
            for again in _AGAIN_SECONDS:
                if self._is_closed or all(one.reason != "expiry" for one in found.lost) or self._ends(again):
                    break
                found = self._asked()
            if not self._is_closed:
                self._found.put(found)
            pause = self._every

    def _ends(self, seconds: float) -> bool:
        """Wait for so long, or until it's to be asked at once; return whether nothing is to be asked any more."""
        self._wake.wait(seconds)
        self._wake.clear()
        return self._is_closed

    def _seconds_open(self) -> float:
        """Return how long ago the data were opened, and those who vouch for them asked."""
        now = min(one.asked.authority.now() for one in self._sources if one.asked is not None)
        return (now - min(datetime.fromisoformat(one.opened) for one in self._sources)).total_seconds()

    def look(self) -> None:
        """Ask now; what is found is heeded at the next step at which it is looked for."""
        self._found.put(self._asked())

    def _asked(self) -> VouchedData:
        self._asked_since = monotonic()
        try:
            found = look_again(self._sources)
        except Exception as error:  # noqa: BLE001  (whatever stands between the run and those who vouch: nothing holds)
            found = self._nothing(f"it can't be asked: {error or type(error).__name__}")
        self._asked_since = None
        return found

    def _newest(self) -> VouchedData | None:
        """Return what was found last; where nobody has answered for long, that nothing holds."""
        found: VouchedData | None = None
        try:
            while True:
                found = self._found.get_nowait()
        except Empty:
            pass
        since = self._asked_since
        if found is None and since is not None and monotonic() - since > _PATIENCE_SECONDS:
            return self._nothing(f"it hasn't answered for {_PATIENCE_SECONDS:.0f} seconds")
        return found

    def _nothing(self, why: str) -> VouchedData:
        asked = next(one.asked for one in self._sources if one.asked is not None)
        now = asked.authority.now().isoformat(timespec="seconds")
        lost = tuple(LostVoucher(one.voucher.target, "expiry", why) for one in self._sources)
        return VouchedData(now, (), {}, lost=lost)


def _holds(voucher: Voucher) -> str:
    besides = f", as version {', '.join(voucher.others)} is" if voucher.others else ""
    return f"signed by {', '.join(keyid[:12] for keyid in voucher.keyids)} until {voucher.expires}{besides}"


def watch_of(given: Ingredients, assembly: Assembly) -> AuthorityWatch | None:
    """Return what watches over a run's data; None where nobody vouches for them, and nothing is to be watched."""
    sources, vouched = vouched_sources(given.data), vouched_of(given.data)
    if not sources or vouched is None:
        return None
    # What is rejected has to be known to who resumes.
    remembers = given.config.run_folder is None or assembly.plan.facts.has_ledger
    grace = given.policy.grace if given.policy is not None and remembers else None
    gone = given.data.classes if isinstance(given.data, Tombstoned) else ()
    return AuthorityWatch(sources, vouched, assembly, grace, gone)
