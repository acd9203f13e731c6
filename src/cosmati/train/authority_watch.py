"""Goes by what those who vouch for a run's data, its policy and what was prepared for it say as it goes on.

The first rank asks, in threads (`cosmati.train.asking`), so that no step waits. What has come is taken at the border of
a step whose number `LOOK_EVERY` divides, told to all ranks, put on record, and acted on one step later: every rank does
the same at the same step, and who resumes or replays reads the entry. No clock decides anything but when it's asked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace

from cosmati.core.clock import Clock
from cosmati.data.tombstoned import beneath
from cosmati.data.vouching import VouchedShards, vouched_sources
from cosmati.provenance.artifact import Artifact
from cosmati.provenance.authority.errors import NoLongerVouchedError
from cosmati.provenance.voucher import (
    POLICY,
    LostVoucher,
    VouchedData,
    VouchedPolicy,
    Withdrawal,
    Withdrawn,
    class_of_target,
    together,
)
from cosmati.records.joint_classes import members_of
from cosmati.routing.grace import Grace
from cosmati.routing.policy import CompiledPolicy, resolve_time
from cosmati.routing.tightening import without_class
from cosmati.train.asking import Found, askings_of
from cosmati.train.assembly import Assembly
from cosmati.train.evaluation import Evaluation
from cosmati.train.identity import Change
from cosmati.train.ingredients import Ingredients
from cosmati.train.observers.ledger_checks import Recorded
from cosmati.train.policy_source import PolicySource
from cosmati.train.run.session import OpenRun
from cosmati.train.vouched_things import News, Thing, deletion, holds, of_thing, targets, without

LOOK_EVERY = 4
"""Steps between looks at what has come: on several ranks each look is a small exchange."""
_MEND = "There's a checkpoint of this step: once that is mended, start the run again, and it goes on."


class AuthorityWatch:
    """Watches over what a run learns from, and what it goes by.

    Args:
        things: that are vouched for, by those who can be asked.
        data: who vouched for the data when they were opened; None where nobody did.
        assembly: of the run.
        grace: what follows where they do no longer; None, of a run without a policy or a memory of it, stops.
        gone: classes whose rows are tombstones: nobody has to vouch for anything of theirs.

    Raises:
        NoLongerVouchedError: something was opened as another run has kept it, or in another process.
    """

    def __init__(
        self,
        things: Sequence[Thing],
        data: VouchedData | None,
        assembly: Assembly,
        grace: Grace | None,
        gone: Collection[str] = (),
    ) -> None:
        self._things, self._data, self._a = things, data, assembly
        self._grace = grace or Grace()
        own = [one.watched for one in things if not one.of]
        named = {one.manifest.class_name for one in own if isinstance(one, VouchedShards)} - {*gone}
        # Of rows of several classes each has to be vouched for, as long as one such row is there.
        self._there = {member for name in named for member in members_of(name)}
        self._base = assembly.policy
        self._withdrawn: Withdrawn | None = None
        self._heeded = -1
        if any(one.watched.asked is None for one in things):
            msg = "Signed data were opened in another process, and who vouches for them can't be asked again from here."
            raise NoLongerVouchedError(f"{msg} Open them in the process that trains.")
        self._known = [holds(one.of, one.watched.voucher) for one in things]
        watched = [one.watched for one in things]
        self._latest = [VouchedData(one.opened, (one.voucher,), one.archive, lost=one.lost) for one in watched]
        self._askings = askings_of(dict(enumerate(watched)))
        self._starts = {phase.start_step for phase in assembly.policy.phases[1:]} if assembly.policy else set()
        self._refuse_of_another_run()

    def _refuse_of_another_run(self) -> None:
        folder = self._a.config.run_folder
        for of, one in ((one.of, one.watched) for one in self._things):
            lost = [lost for lost in one.lost if self._is_read(of, lost)]
            run = one.asked.authority.run if one.asked is not None else None
            if lost and (folder is None or run is None or run.resolve() != folder.resolve()):
                msg = f"{lost[0].because} What {run} has kept of it is for going on with that run, and run_folder is"
                raise NoLongerVouchedError(f"{msg} {folder}.")

    @property
    def policy_source(self) -> PolicySource | None:
        """The signed policy, where somebody can be asked for its next version."""
        return next((one.watched for one in self._things if isinstance(one.watched, PolicySource)), None)

    def rebase(self, policy: CompiledPolicy, grace: Grace | None, vouched: VouchedPolicy | None) -> CompiledPolicy:
        """Go by another policy and grace; return it without what was withdrawn. All ranks do.

        Args:
            policy: compiled.
            grace: that it says.
            vouched: who has signed it; None where it's declared, or on another rank than the first.
        """
        self._base, self._grace = policy, grace or Grace()
        self._starts = {phase.start_step for phase in policy.phases[1:]}
        if vouched is not None and self.policy_source is not None:
            self.policy_source.go_by(vouched)
            number = next(n for n, one in enumerate(self._things) if one.of == POLICY)
            self._known[number], self._latest[number] = (
                holds(POLICY, self.policy_source.voucher),
                self.policy_source.vouched,
            )
        tightened = self._tightened(self.withdrawals)
        assert tightened is not None, "a governed run"
        self._a.router.tighten(tightened)
        return tightened

    @property
    def withdrawals(self) -> tuple[Withdrawal, ...]:
        """What is in force."""
        return self._withdrawn.in_force if self._withdrawn is not None else ()

    def reads(self, evaluation: Evaluation, *, step: int) -> bool:
        """Return whether one is measured at a step: no data that were withdrawn, no modules of a rejected class."""
        gone = [one for one in self.withdrawals if one.step <= step]
        rejected = {one.class_path for one in gone if one.action == "reject"}
        classes = evaluation.classes
        if rejected & ({classes} if isinstance(classes, str) else {*classes}):
            return False
        skipped = {(one.root, one.target) for one in gone if one.action == "skip"}
        return not skipped or not any(
            (o.voucher.root, o.voucher.target) in skipped for o in vouched_sources(evaluation.data)
        )

    def resume(self, recorded: Recorded, clock: Clock) -> News | None:
        """Go on with what the ledger has recorded, and with what was found when all was opened. All ranks ask.

        What was rejected or skipped stays so. A stop is lifted where those who vouch do so again, and not by a clock
        that was set back: they're asked as of the last time that the ledger knows of.

        Args:
            recorded: by the ledger; the first rank's counts.
            clock: where the run goes on.
        """
        if self._a.ranks.rank:
            return self._agreed((), ())
        before = recorded.withdrawn.in_force if recorded.withdrawn is not None else ()
        behind = self._behind(recorded)
        if behind is not None or any(one.watched.lost for one in self._things):
            self.look()
            self._take(self._newest())
        lost = dict(self._lost(range(len(self._things))))
        kept = [one for one in before if one.action != "stop" or (one.key in lost and not self._rejects(one))]
        known = {one.key for one in kept}
        new = self._answers([(of, one) for (of, *_), one in without(lost, known)], kept, clock.step)
        changes = self._changes(new)
        lifted = [(one, "answered anew" if one.key in lost else self._why_lifted(one)) for one in before]
        changes += [Change("provenance", str(one), now) for one, now in lifted if one not in kept]
        other = self._other_keys()
        changes += [*other.values(), *([behind] if behind is not None and behind.was else [])]
        asked_anew = [n for n, one in enumerate(self._latest) if one.vouchers and (n in other or behind is not None)]
        self._withdrawn = recorded.withdrawn
        return self._agreed([*kept, *new], changes, asked_anew, self._latest)

    def _behind(self, recorded: Recorded) -> Change | None:
        """Have nobody asked as of a time before the ledger's last one; return what to say where a clock says one."""
        clocks = [one.watched.asked.authority.now for one in self._things if one.watched.asked is not None]
        known = recorded.last_time
        if known is None or not [one for one in clocks if one.not_before(known, "the run's ledger")]:
            return None
        said = next((one.said for one in clocks if one.said), "")
        return Change("clock", said, f"asked as of {known:%Y-%m-%d %H:%M} UTC")

    def _why_lifted(self, one: Withdrawal) -> str:
        return "its rows are gone" if not (one.of or one.class_path in self._there) else "vouched for again"

    def _rejects(self, one: Withdrawal) -> bool:
        """Return whether the grace in force now rejects, where an earlier one has stopped the run."""
        answer, _ = self._grace.answer(one.reason, self._steps)
        return of_thing(answer, one.of) != "stop"

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
            run.amend(clock, news.changes, **news.facts(run.facts))
        if why := self.refuse(clock.step):
            run.ask_to_stop(why, follows_from_rows=False)
            save()
            raise NoLongerVouchedError(f"{why} {_MEND}")

    def heed(self, clock: Clock) -> News | None:
        """Return what has changed since, at the border of a step; nearly always nothing. All ranks ask.

        Args:
            clock: stands at the step; what is returned acts from the next one on.
        """
        if clock.step in self._starts:
            for asking in self._askings:
                asking.wake()
        if clock.step % LOOK_EVERY or clock.step == self._heeded:
            return None
        self._heeded = clock.step
        found = self._newest() if self._a.ranks.rank == 0 else {}
        if not found:
            return self._agreed((), ())
        self._take(found)
        known = {one.key for one in self.withdrawals}
        lost = [(of, one) for (of, *_), one in without(dict(self._lost(found)), known)]
        new = self._answers(lost, self.withdrawals, clock.step + 1)
        other = {} if new else self._other_keys()
        in_force = [*self.withdrawals, *new] if new or other else ()
        return self._agreed(in_force, [*self._changes(new), *other.values()], other, list(found.values()))

    def _newest(self) -> Found:
        """Return what was found last, without what is of a policy that isn't in force any more."""
        found = {number: one for asking in self._askings for number, one in asking.newest().items()}
        now = [one.watched.voucher.target for one in self._things]
        return {n: one for n, one in found.items() if targets(one) == {now[n]}}

    def _take(self, found: Found) -> None:
        for number, one in found.items():
            self._latest[number] = one

    def _lost(self, numbers: Iterable[int]) -> Iterator[tuple[tuple[str, str, str, str], LostVoucher]]:
        for number in numbers:
            of = self._things[number].of
            for one in self._latest[number].lost:
                if self._is_read(of, one):
                    yield (of, one.root, one.target, one.reason), one

    def _is_read(self, of: str, one: LostVoucher) -> bool:
        """Say whether what is lost matters: of rows that are tombstones nobody has to vouch for anything."""
        return bool(of) or class_of_target(one.target) in self._there

    def _other_keys(self) -> dict[int, Change]:
        """Return which things are signed by others than before, for longer, or in another version; it's known now."""
        changes = dict[int, Change]()
        for number, (was, one) in enumerate(zip(self._known, self._latest, strict=True)):
            for voucher in one.vouchers:
                of = self._things[number].of
                if (now := holds(of, voucher)) != was:
                    named = voucher.target if of in ("", POLICY) else f"{of} {voucher.target}"
                    changes[number] = Change("provenance", f"{named}: {was}", f"{named}: {now}")
                    self._known[number] = now
        return changes

    def refuse(self, step: int) -> str:
        """Return why the run stops before a step, empty where it doesn't."""
        return next((str(one) for one in self.withdrawals if one.action == "stop" and one.step <= step), "")

    def _answers(
        self, lost: Sequence[tuple[str, LostVoucher]], before: Sequence[Withdrawal], step: int
    ) -> list[Withdrawal]:
        """Return what follows from what is lost, from a step on."""
        found = list[Withdrawal]()
        for of, one in lost:
            answer, later = self._grace.answer(one.reason, self._steps)
            action = of_thing(answer, of)
            found.append(Withdrawal(one.target, one.reason, one.because, action, step + later, of, one.root))
            if not of and one.reason != "expiry":
                found[-1] = replace(found[-1], deletion=deletion(self._a, found[-1].class_path))
        if self._base is not None and self._data is not None and found and not self._offers([*before, *found], step):
            # Nothing would be left to learn from: as good as a stop, and it says why.
            found = [replace(one, action="stop") if not one.of else one for one in found]
        return found

    def _changes(self, new: Sequence[Withdrawal]) -> list[Change]:
        known = {
            (one.of, one.watched.voucher.root, one.watched.voucher.target): n for n, one in enumerate(self._things)
        }
        was = [self._known[known[one.of, one.root, one.target]] for one in new]
        return [Change("provenance", f"{one.target}: {text}", str(one)) for one, text in zip(new, was, strict=True)]

    def _steps(self, span: str) -> int:
        return resolve_time(span, num_steps=self._a.budget.num_steps or 0)

    def _offers(self, withdrawals: Sequence[Withdrawal], step: int) -> bool:
        policy = self._tightened(withdrawals)
        assert policy is not None, "asked under a policy"
        late = [number for number, phase in enumerate(policy.phases) if phase.end_step > step]
        data = [one.watched for one in self._things if not one.of]
        own = {policy.classes.index(one.manifest.class_name) for one in data if isinstance(one, VouchedShards)}
        return any(policy.decision[row][p] != "reject" for c in own for row in policy.rows_of(c) for p in late)

    def _tightened(self, withdrawals: Sequence[Withdrawal]) -> CompiledPolicy | None:
        policy = self._base
        for one in withdrawals:
            if policy is not None and one.action == "reject":
                policy = without_class(policy, policy.classes.index(one.class_path), one.step)
        return policy

    def _agreed(
        self,
        withdrawals: Sequence[Withdrawal],
        changes: Sequence[Change],
        other: Collection[int] = (),
        found: Sequence[VouchedData] = (),
    ) -> News | None:
        """Let every rank have what the first one has found, and go by it.

        Args:
            withdrawals: that are in force now.
            changes: for the record.
            other: numbers of the things that are vouched for otherwise now; the first rank's.
            found: what bears it out; likewise.
        """
        told = {"withdrawals": list(map(asdict, withdrawals)), "changes": [[c.name, c.was, c.now] for c in changes]}
        message = self._a.ranks.told(json.dumps(told).encode() if withdrawals or changes else b"")
        if not message:
            return None
        told = json.loads(message)
        in_force = tuple(Withdrawal(**one) for one in told["withdrawals"])
        if in_force != self.withdrawals:
            seen = together(found) if found else VouchedData("", (), {})  # the first rank alone writes
            last = max((one.opened for one in found), default="")  # by then all that is lost was
            self._withdrawn = Withdrawn(last, in_force, seen.digests, seen.files) if in_force else None
        policy = self._tightened(in_force)
        if policy is not None:
            self._a.router.tighten(policy)
        vouched = {of: self._vouched_now(of) for of in {self._things[number].of for number in other}}
        return News([Change(*one) for one in told["changes"]], vouched, self._withdrawn, policy)

    def _vouched_now(self, of: str) -> VouchedData:
        own = [latest for one, latest in zip(self._things, self._latest, strict=True) if one.of == of]
        return own[0] if of == POLICY else together(own)

    def start(self) -> None:
        """Begin to ask, on the first rank."""
        for asking in self._askings if self._a.ranks.rank == 0 else ():
            asking.start()

    def close(self) -> None:
        """Ask no more; what is being asked is given a moment."""
        for asking in self._askings:
            asking.close()
        for asking in self._askings:
            asking.wait()

    def look(self) -> None:
        """Ask now; what is found is heeded at the next step at which it is looked for."""
        for asking in self._askings:
            asking.look()


def watch_of(
    given: Ingredients, data: VouchedData | None, artifacts: Sequence[Artifact], assembly: Assembly
) -> AuthorityWatch | None:
    """Return what watches over a run; None where nobody vouches for anything of it, and nothing is to be watched.

    Args:
        given: by the user.
        data: who vouches for the data; None where nobody does.
        artifacts: what was prepared before the run.
        assembly: of the run.
    """
    things = [Thing("", one) for one in vouched_sources(given.data)] if data is not None else []
    things += [Thing(a.label, one) for a in artifacts for one in a.sources if isinstance(one, VouchedShards)]
    vouched = given.policy.vouched if given.policy is not None else None
    if vouched is not None and vouched.place is not None:
        things.append(Thing(POLICY, PolicySource(vouched)))
    if not things:
        return None
    # What is rejected has to be known to who resumes.
    remembers = given.config.run_folder is None or assembly.plan.facts.has_ledger
    grace = given.policy.grace if given.policy is not None and remembers else None
    _, gone = beneath(given.data)
    return AuthorityWatch(things, data, assembly, grace, gone)


def still_measured(
    evaluation: Evaluation | Mapping[str, Evaluation] | None, watch: AuthorityWatch | None, step: int
) -> Evaluation | Mapping[str, Evaluation] | None:
    """Return the evaluations that are measured at a step; None where none is left."""
    if watch is None or evaluation is None:
        return evaluation
    if isinstance(evaluation, Evaluation):
        return evaluation if watch.reads(evaluation, step=step) else None
    return {name: one for name, one in evaluation.items() if watch.reads(one, step=step)} or None
