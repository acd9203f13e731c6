"""Runs steps of a ledger again, through the ordinary loop, and compares every digest with what it says of them.

A replay takes what it needs from the ledger: the policy, the budget and the cadences that were in force, and from which
step on microbatches were cut. Model, data, loss, optimizers and methods come from the recipe; that they're those that
the ledger commits to is compared first. The run's own folder is read and never written: the steps are taken in a
scratch folder, from a copy of the nearest checkpoint that the ledger has signed.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from cosmati.core.plan import Plan, Promise
from cosmati.errors import CheckpointError, DivergenceError, LedgerError, RefutedError
from cosmati.ledger.difference import Difference
from cosmati.ledger.reader import VKEY_FILE
from cosmati.ledger.standing import Span, StandingSteps
from cosmati.provenance.voucher import FOLDER
from cosmati.routing.policy_file import PolicyFile
from cosmati.train.config import CHANGEABLE
from cosmati.train.facts import describe_environment
from cosmati.train.identity import CADENCES, SURROUNDINGS, Change, changes, differences, kind_of
from cosmati.train.observers.observer import Observer
from cosmati.train.observers.replayed import Comparison, ReplayedLedger, Told
from cosmati.train.run.checkpoints import Checkpoint, list_checkpoints, publish_checkpoint, read_checkpoint
from cosmati.train.run.checkpoints import write_checkpoint as draft_checkpoint
from cosmati.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a replay asks of whoever makes its trainer.

    Attributes:
        run_folder: a scratch one.
        observers: to be given to the trainer, and no others.
        policy: that was in force, as the ledger has it; None for a run without.
        settings: of `RunConfig`, in place of the recipe's own.
    """

    run_folder: Path
    observers: Sequence[Observer]
    policy: PolicyFile | None
    settings: Mapping[str, Any]


MakeTrainer = Callable[[Asked], Trainer]


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What a replay found.

    Attributes:
        segment: the steps that were asked for.
        start: number of the first step that was taken.
        checkpoint: that the replay went on from, None where it began at entry 0.
        num_steps: compared, those before the segment included.
        num_roots: signed states of weights and optimizers that were compared.
        differences: the first ones, in words.
        num_differences: all of them.
        compares_rows: whether row commitments were compared: it takes the salt.
        skipped: names of details in the ledger that this release can't compare.
        doubts: why a difference says nothing: other surroundings, or a run that isn't promised to be replayable.
        is_interrupted: it was stopped before its end.
    """

    segment: range
    start: int
    checkpoint: int | None
    num_steps: int
    num_roots: int
    differences: tuple[Difference, ...]
    num_differences: int
    compares_rows: bool
    skipped: tuple[str, ...]
    doubts: tuple[str, ...]
    is_interrupted: bool

    @property
    def outcome(self) -> str:
        """`equal`, `equal, rows not compared`, `different`, `not comparable` or `interrupted`."""
        if self.num_differences:
            return "not comparable" if self.doubts else "different"
        if self.is_interrupted:
            return "interrupted"
        return "equal" if self.compares_rows else "equal, rows not compared"


@dataclass(frozen=True, kw_only=True)
class From:
    """Where a replay begins.

    Attributes:
        checkpoint: that it goes on from; None begins at entry 0.
        unsigned: checkpoints that were passed over, since the ledger has signed others.
    """

    checkpoint: Checkpoint | None
    unsigned: tuple[Difference, ...] = ()

    @property
    def step(self) -> int:
        """Number of the first step to take."""
        return 0 if self.checkpoint is None else self.checkpoint.step


def nearest_checkpoint(run: StandingSteps, step: int, folder: Path | None) -> From:
    """Return the nearest checkpoint at or before a step that the ledger has signed, and that lies on what stands.

    Args:
        run: the steps that stand.
        step: number of the first step that is wanted.
        folder: with `step-...` folders in it, or one of these; None for none.
    """
    unsigned = list[Difference]()
    is_one = folder is not None and (folder / "state.json").exists()
    for path in [] if folder is None else [folder] if is_one else list_checkpoints(folder):
        try:
            checkpoint = read_checkpoint(path)
        except CheckpointError:
            if is_one:
                raise
            continue  # Damaged, or a running process has just removed it.
        if checkpoint.step > step:
            if is_one:
                msg = f"{path} holds the state after {checkpoint.step} steps, and step {step} was asked for."
                raise LedgerError(f"{msg} Give an earlier one, or none.")
            continue
        digest = checkpoint.signed_digest
        if digest in [one.state_digest for one in run.checkpoints.get(checkpoint.step, ())]:
            return From(checkpoint=checkpoint, unsigned=tuple(unsigned))
        if (checkpoint.step, digest) not in run.signed_states:
            signed = [one.state_digest.hex()[:16] for one in run.checkpoints.get(checkpoint.step, ())]
            what = f"checkpoint {path.name}"
            unsigned.append(Difference(None, what, signed[-1] if signed else "no such checkpoint", digest.hex()[:16]))
        elif is_one:
            raise LedgerError(f"{path} is of an attempt that was superseded. Give another one, or none.")
    if is_one:
        raise RefutedError(f"{unsigned[0]}: weights or state were exchanged.")
    return From(checkpoint=None, unsigned=tuple(unsigned))


def replay(
    run: StandingSteps,
    segment: range,
    make: MakeTrainer,
    *,
    ledger: Path,
    start: From | None = None,
    salt: bytes | None = None,
    keep_going: bool = False,
    anyway: bool = False,
    told: Told | None = None,
) -> Replayed:
    """Run steps again and compare them with the ledger's.

    Args:
        run: the steps that stand.
        segment: which are wanted; those between the nearest checkpoint and them are taken and compared, too.
        make: makes the trainer, as the run's own was made.
        ledger: the ledger's folder; read, and not written.
        start: where to begin (`nearest_checkpoint`); None is at entry 0.
        salt: of the row commitments, `private/rows.salt` of the run; without it they aren't compared.
        keep_going: compare all steps, and don't stop at the first that differs.
        anyway: replay where a difference would say nothing: in other surroundings, or a run that isn't `replayable`.
        told: is called with each step and how it differs.

    Raises:
        LedgerError: it can't be replayed here: other surroundings by name, or no promise that it can.
    """
    start = start or From(checkpoint=None)
    taken = range(start.step, segment.stop)
    comparison = Comparison(run, taken, salt, keep_going=keep_going, told=told)
    comparison.differs(*start.unsigned)
    doubts = list[str]()
    is_interrupted = False
    with tempfile.TemporaryDirectory(prefix="cosmati-replay-") as place, _quiet():
        scratch = Path(place) / "run"
        _furnish(scratch, ledger, run, start.checkpoint)
        for span in run.spans:
            if comparison.is_over or is_interrupted or span.end <= taken.start or span.first >= taken.stop:
                continue
            again = _Again(run, span, comparison, scratch, start.checkpoint, make)
            doubts += [one for one in again.doubts() if one not in doubts]
            if doubts and not anyway:
                raise LedgerError(_refusal(span, doubts))
            if not comparison.is_over:
                is_interrupted = again.take(min(span.end, taken.stop))
                doubts += again.broken() if comparison.num_differences else []
    return Replayed(
        segment=segment,
        start=start.step,
        checkpoint=None if start.checkpoint is None else start.checkpoint.step,
        num_steps=comparison.num_steps,
        num_roots=comparison.num_roots,
        differences=tuple(comparison.differences),
        num_differences=comparison.num_differences,
        compares_rows=comparison.compares_rows,
        skipped=tuple(sorted(comparison.skipped)),
        doubts=tuple(dict.fromkeys(doubts)),
        is_interrupted=is_interrupted,
    )


class _Again:
    """The steps of one span, once more.

    Args:
        run: the steps that stand.
        span: of them.
        comparison: takes what is found.
        scratch: the folder in which they're taken.
        checkpoint: from which the replay began.
        make: makes the trainer.
    """

    def __init__(
        self,
        run: StandingSteps,
        span: Span,
        comparison: Comparison,
        scratch: Path,
        checkpoint: Checkpoint | None,
        make: MakeTrainer,
    ) -> None:
        self._span, self._comparison, self._scratch, self._start = span, comparison, scratch, checkpoint
        observer = ReplayedLedger(comparison, self._digest)
        settings = _settings(span)
        asked = Asked(run_folder=scratch, observers=[observer], policy=_policy(run, span), settings=settings)
        self._trainer = make(asked)
        # Who vouches for the data today says nothing of then.
        self._trainer.prepared = replace(self._trainer.prepared, watch=None)
        watch = self._trainer.policy_watch
        if watch is not None:
            watch.recorded = list(span.tables.details.get("policy_changes") or [])
        comparison.save, comparison.signs_otherwise = self._trainer.save, self._signs_otherwise
        self._compare_recipe()

    def _digest(self) -> bytes:
        return self._trainer.assembly.layout.digest()

    def _compare_recipe(self) -> None:
        """Compare what makes the run itself with what the ledger says of it; of cadences nobody needs to know."""
        files = {} if self._start is None else self._start.facts.get("files", {})
        now = {name: "" if value is None else str(value) for name, value in self._trainer.prepared.identity.items()}
        found = differences({**self._span.recipe, **files}, now, is_elsewhere=bool(self._elsewhere()))
        for change in found:
            if kind_of(change.name) != "free" and change.was != change.now and not change.name.startswith("files."):
                was, is_now = (str(value or "nothing")[:200] for value in (change.was, change.now))
                self._comparison.differs(Difference(None, f"recipe, {change.label}", was, is_now))

    def doubts(self) -> Iterator[str]:
        """Yield why a difference in these steps would say nothing.

        Raises:
            LedgerError: they can't be replayed at all.
        """
        if self._trainer.assembly.ranks.is_parallel:
            raise LedgerError("A replay runs on one rank, whatever the run had. Start it without a launcher.")
        if any(one.step < self._comparison.segment.stop for one in self._span.tables.withdrawn):
            msg = "what was withdrawn from the run can't be replayed yet, and would act in these steps"
            raise LedgerError(f"Steps {self._span.first}:{self._span.end}: {msg}. Ask for the steps before it.")
        for change in self._elsewhere():
            yield f"{change.name} is {change.now}, and was {change.was}"
        if why := _unpromised(self._trainer.plan):
            yield f"the run isn't promised to be replayable: {why}"

    def _elsewhere(self) -> list[Change]:
        was = {name: _without_cores(self._span.environment.get(name, "")) for name in SURROUNDINGS}
        here = describe_environment(self._trainer.assembly.device)
        now = {name: _without_cores(here.get(name, "")) for name in SURROUNDINGS}
        # Threads are a setting, which is taken from the ledger.
        return [change for change in changes(was, now) if change.name != "threads"]

    def broken(self) -> list[str]:
        """Return why it turned out that the steps needn't come out the same."""
        why = _unpromised(self._trainer.plan)
        return [f"the run isn't replayable: {why}"] if why else []

    def take(self, end: int) -> bool:
        """Take the steps up to `end`; return whether somebody has interrupted that."""
        comparison, trainer = self._comparison, self._trainer
        comparison.span_end = end
        try:
            result = trainer.fit()
        except DivergenceError as error:
            comparison.differs(Difference(trainer.clock.step, "loss and gradients", "a step", str(error)))
            comparison.is_over = True
            return False
        except CheckpointError as error:
            if error.__cause__ is not None:  # of a disk
                raise
            comparison.differs(Difference(None, "recipe or code", "another run", str(error)))
            comparison.is_over = True
            return False
        if comparison.is_over or comparison.done >= end:
            return False
        if result.outcome == "stopped":
            return True
        comparison.differs(Difference(result.clock.step, "length of the run", "a step", f"its end ({result.outcome})"))
        comparison.is_over = True
        return False

    def _signs_otherwise(self, step: int, signed: Sequence[bytes]) -> bool:
        """Say whether a state is one that was signed, but for facts that bits don't rest on.

        Whether an evaluation has asked for the budget is one; another, how the recipe's file is called today.
        """
        made = read_checkpoint(self._scratch / "checkpoints" / f"step-{step:08d}")
        identities = [made.facts["identity"]] + ([] if self._start is None else [self._start.facts["identity"]])
        for identity, was_read, is_told in product(identities, (False, True), (True, False)):
            facts = {"identity": identity, "budget_was_read": was_read, "budget_use_is_told": is_told}
            if replace(made, facts={**made.facts, **facts}).signed_digest in signed:
                return True
        return False


def _furnish(scratch: Path, ledger: Path, run: StandingSteps, checkpoint: Checkpoint | None) -> None:
    """Put into a scratch folder what a run that goes on finds in its own."""
    (scratch / "ledger").mkdir(parents=True)
    (scratch / "checkpoints").mkdir()
    shutil.copy(ledger / VKEY_FILE, scratch / "ledger" / VKEY_FILE)
    if (ledger / FOLDER).is_dir():
        shutil.copytree(ledger / FOLDER, scratch / "ledger" / FOLDER)
    if run.cuts:
        (scratch / "cuts.json").write_text(json.dumps(run.cuts))
    if checkpoint is not None:
        publish_checkpoint(draft_checkpoint(scratch / "checkpoints", checkpoint), keep=1)


def _settings(span: Span) -> dict[str, Any]:
    """Return the settings that were in force, as far as they don't make the run itself."""
    recipe = span.recipe
    told = {name: recipe[f"cadence.{name}"] for name in CADENCES if f"cadence.{name}" in recipe}
    cadences = {name: int(text) if text.isdecimal() else text or None for name, text in told.items()}
    budget = {"budget": recipe["budget.span"]} if "budget.span" in recipe else {}
    threads = span.environment.get("threads", "")
    threads_then = {"num_threads": int(threads)} if threads.isdecimal() else {}
    return {**budget, **cadences, **threads_then, "change": CHANGEABLE, "ledger": True, "progress": False}


def _policy(run: StandingSteps, span: Span) -> PolicyFile | None:
    """Return the policy with which the span began; changes without a stop follow from the ledger."""
    digest = span.recipe.get("policy")
    if not digest:
        return None
    for tables in run.ledger.tables:
        if dict(tables.entry.commitments).get("policy", b"").hex() == digest and tables.details.get("policy_text"):
            return PolicyFile.model_validate(tables.details["policy_text"])
    raise LedgerError(f"The ledger commits to the policy {digest[:16]} and has no text of it, so nobody can replay it.")


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what was said when the steps were first taken."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The checkpoint of step .* keeps the state of")
        warnings.filterwarnings("ignore", message="Memory is too short for step")
        yield


def _unpromised(plan: Plan) -> str:
    found = [g for g in plan.guarantees if g.promise is Promise.REPLAYABLE and not g.holds]
    return found[0].because if found else ""


def _refusal(span: Span, doubts: Sequence[str]) -> str:
    return (
        f"Steps {span.first}:{span.end} aren't comparable here: {'; '.join(doubts)}. A difference would say nothing of "
        "the run. Replay them where they were trained, or try all the same: --anyway, in Python anyway=True."
    )


def _without_cores(device: str) -> str:
    """Return a processor without the number of its cores: threads are what bits rest on."""
    return device.rpartition(", ")[0] if device.endswith(" cores") else device
