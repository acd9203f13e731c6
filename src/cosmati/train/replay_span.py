"""The steps that one recipe took, once more: its trainer made as the ledger says, in a scratch folder."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from cosmati.core.clock import Time
from cosmati.core.plan import Plan, Promise
from cosmati.errors import CheckpointError, DivergenceError, LedgerError
from cosmati.ledger.difference import LedgerDifference
from cosmati.ledger.reader import VKEY_FILE
from cosmati.ledger.standing import RecipeSpan, StandingSteps
from cosmati.ledger.tables import Tables
from cosmati.provenance.voucher import FOLDER, Withdrawn
from cosmati.routing.policy_file import PolicyFile
from cosmati.train.config import CHANGEABLE, LEARNING_CADENCES, RunConfig
from cosmati.train.facts import describe_environment
from cosmati.train.identity import CADENCES, SURROUNDINGS, Change, changes, differences, kind_of, schedules_in
from cosmati.train.observers.observer import Observer
from cosmati.train.observers.replayed import LedgerComparison, ReplayedLedger
from cosmati.train.other_source import of_another_source
from cosmati.train.policy_watch import policy_watch_of
from cosmati.train.recorded_vouchers import RecordedVouchers
from cosmati.train.run.checkpoints import (
    Checkpoint,
    list_checkpoints,
    publish_checkpoint,
    read_checkpoint,
    signed_digest_of,
    write_checkpoint,
)
from cosmati.train.trainer import Trainer

_DIGITS, _THREADS = 10, 1025
"""Below which the ledger's numbers are taken for what they say."""


@dataclass(frozen=True, kw_only=True)
class ReplayRequest:
    """What a replay asks of whoever makes its trainer.

    Attributes:
        run_folder: a scratch one.
        observers: to be given to the trainer, and no others.
        policy: that was in force, as the ledger has it; None for a run without.
        settings: of `RunConfig`, in place of the recipe's own.
        forgotten: digest of the deletion in whose place the data have tombstones; empty for the recipe's own data.
        schedules: of the learning rates, as the ledger has them, by the number of the optimizer.
    """

    run_folder: Path
    observers: Sequence[Observer]
    policy: PolicyFile | None
    settings: Mapping[str, Any]
    forgotten: str = ""
    schedules: Mapping[int, str] = field(default_factory=dict)


_LATER = tuple(f"cadence.{name}" for name in LEARNING_CADENCES)
"""Of a run's identity: what earlier releases hadn't."""

MakeTrainer = Callable[[ReplayRequest], Trainer]


class SpanAgain:
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
        span: RecipeSpan,
        comparison: LedgerComparison,
        scratch: Path,
        checkpoint: Checkpoint | None,
        make: MakeTrainer,
    ) -> None:
        self._span, self._comparison, self._scratch, self._start = span, comparison, scratch, checkpoint
        observer = ReplayedLedger(comparison, self._digest)
        settings = _settings(span)
        self._trainer = make(
            ReplayRequest(
                run_folder=scratch,
                observers=[observer],
                policy=_policy(run, span),
                settings=settings,
                forgotten=span.forgotten,
                schedules=schedules_in(span.recipe),
            )
        )
        # Who vouches for the data today says nothing of then.
        told = [(step, None if facts is None else Withdrawn.of_facts(facts)) for step, facts in run.withdrawn]
        vouchers = RecordedVouchers(self._trainer.assembly, told) if told else None
        self._trainer.prepared = replace(self._trainer.prepared, watch=vouchers)
        self._trainer.policy_watch = policy_watch_of(self._trainer.prepared)
        if self._trainer.policy_watch is not None:
            self._trainer.policy_watch.recorded = _policy_changes(span)
        comparison.save, comparison.unexplained = self._trainer.save, self._unexplained
        comparison.request = span.forgotten
        self._tables = run.ledger.tables
        self._compare_recipe()

    def _digest(self) -> bytes:
        return self._trainer.assembly.layout.digest()

    def _compare_recipe(self) -> None:
        """Compare what makes the run itself with what the ledger says of it; of cadences nobody needs to know."""
        files = {} if self._start is None else self._start.facts.get("files", {})
        now = {name: "" if value is None else str(value) for name, value in self._trainer.prepared.identity.items()}
        found = differences({**self._span.recipe, **files}, now, is_elsewhere=bool(self._elsewhere()))
        for change in found:
            if self._span.forgotten and change.name.startswith("data."):
                continue  # The ledger names the data that the run began with.
            if kind_of(change.name) != "free" and change.was != change.now and not change.name.startswith("files."):
                was, is_now = (str(value or "nothing")[:200] for value in (change.was, change.now))
                self._comparison.differs(LedgerDifference(None, f"recipe, {change.label}", was, is_now))

        if self._span.forgotten:
            logged = dict(self._span.tables.entry.commitments).get("data", b"")
            made = hashlib.sha256(self._trainer.prepared.data_digest.encode()).digest()
            if logged != made:
                what = "data without what was forgotten: commitment"
                self._comparison.differs(LedgerDifference(None, what, logged.hex()[:16], made.hex()[:16]))

    def _go_on_without(self) -> None:
        """Have the newest checkpoint be one over the data without what is forgotten from here on."""
        folder = self._scratch / "checkpoints"
        for path in list_checkpoints(folder)[:1]:
            now = of_another_source(read_checkpoint(path), self._trainer.prepared.identity)
            signed = self._comparison.run.states(now.step, self._span.forgotten)
            self._comparison.differs_in_state(now.step, now.signed_digest, self._left_of(now, signed))
            publish_checkpoint(write_checkpoint(folder, now), keep=1)

    def doubts(self) -> Iterator[str]:
        """Yield why a difference in these steps would say nothing.

        Raises:
            LedgerError: they can't be replayed at all.
        """
        if self._trainer.assembly.ranks.is_parallel:
            raise LedgerError("A replay runs on one rank, whatever the run had. Start it without a launcher.")
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
        if self._span.forgotten:
            self._go_on_without()
        try:
            result = trainer.fit()
        except DivergenceError as error:
            comparison.differs(LedgerDifference(trainer.clock.step, "loss and gradients", "a step", str(error)))
            comparison.is_over = True
            return False
        except CheckpointError as error:
            if error.__cause__ is not None:  # of a disk
                raise
            comparison.differs(LedgerDifference(None, "recipe or code", "another run", str(error)))
            comparison.is_over = True
            return False
        if comparison.is_over or comparison.done >= end:
            return False
        if result.outcome == "stopped":
            return True
        comparison.differs(
            LedgerDifference(result.clock.step, "length of the run", "a step", f"its end ({result.outcome})")
        )
        comparison.is_over = True
        return False

    def _unexplained(self, step: int, signed: Iterable[bytes]) -> list[bytes]:
        return self._left_of(read_checkpoint(self._scratch / "checkpoints" / f"step-{step:08d}"), signed)

    def _left_of(self, made: Checkpoint, signed: Iterable[bytes]) -> list[bytes]:
        """Return those digests that aren't of this state, whatever the facts beside it that bits don't rest on.

        Whether an evaluation has asked for the budget is one; others are how the recipe's file is called today, how a
        policy's phases were cut when a class was rejected, which a resume counts otherwise, and what was changed at
        this very step.
        """
        known = [made.facts, *([] if self._start is None else [self._start.facts]), self._as_then(made.facts)]
        pairs = [(one["identity"], other["phases"]) for one, other in product(known, known)]
        pairs += [_as_told(made.facts["identity"], tables) for tables in self._tables]
        digest, left = made.state_digest, sorted(signed)
        for (identity, phases), was_read, is_told in product(pairs, (False, True), (True, False)):
            facts = {"identity": identity, "phases": phases}
            facts |= {"budget_was_read": was_read, "budget_use_is_told": is_told}
            found = signed_digest_of(digest, {**made.facts, **facts})
            left = [one for one in left if one != found]
        return left

    def _as_then(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the facts of a checkpoint without the cadences of which the ledger said nothing at first.

        A run of before may have gone on since, or have been forgotten from: then later entries tell them.
        """
        told = [_recipe(tables) for tables in self._tables]
        later = {name for name in _LATER if not all(name in recipe for recipe in told)}
        return {**facts, "identity": {name: value for name, value in facts["identity"].items() if name not in later}}


def _recipe(tables: Tables) -> Mapping[str, Any]:
    told = tables.details.get("recipe")
    return told if isinstance(told, Mapping) else {}


def _as_told(identity: Mapping[str, Any], tables: Tables) -> tuple[dict[str, Any], list[Any]]:
    """Return a run's identity and its policy's phases as the ledger tells them of other steps."""
    told = dict(_recipe(tables))
    same = {name: value for name, value in identity.items() if told.get(name) == ("" if value is None else str(value))}
    phases = tables.details.get("phases") if tables.policy else []
    return {**told, **same}, list(phases or [])


def furnish(scratch: Path, ledger: Path, run: StandingSteps, checkpoint: Checkpoint | None) -> None:
    """Put into a scratch folder what a run that goes on finds in its own."""
    (scratch / "ledger").mkdir(parents=True)
    (scratch / "checkpoints").mkdir()
    shutil.copy(ledger / VKEY_FILE, scratch / "ledger" / VKEY_FILE)
    if (ledger / FOLDER).is_dir():
        shutil.copytree(ledger / FOLDER, scratch / "ledger" / FOLDER)
    if run.cuts:
        (scratch / "cuts.json").write_text(json.dumps(run.cuts))
    if checkpoint is not None:
        publish_checkpoint(write_checkpoint(scratch / "checkpoints", checkpoint), keep=1)


def _settings(span: RecipeSpan) -> dict[str, Any]:
    """Return the settings that were in force, as far as they don't make the run itself.

    Raises:
        LedgerError: the ledger says something that is none.
    """
    recipe, threads = span.recipe, span.environment.get("threads", "")
    told = {name: recipe[f"cadence.{name}"] for name in CADENCES if f"cadence.{name}" in recipe}
    told |= {"budget": recipe["budget.span"]} if "budget.span" in recipe else {}
    settings: dict[str, Any] = {"change": CHANGEABLE, "ledger": True, "progress": False}
    settings |= {"checkpoint_async": False, "checkpoint_to": ""}  # They're looked at as soon as they're written.
    settings |= dict.fromkeys(LEARNING_CADENCES, 0)  # A release that says nothing of them measured none.
    for name, text in told.items():
        is_number = isinstance(getattr(RunConfig(), name), int)
        is_time = name == "budget" or name.endswith("_every")
        if (is_number and not (text.isdecimal() and len(text) < _DIGITS)) or (
            not is_number and is_time and text and not math.isfinite(Time.parse(text).value)
        ):
            raise LedgerError(f"The ledger says that {name} was {text!r}, which it can't have been.")
        settings[name] = int(text) if is_number else text or None
    return settings | ({"num_threads": int(threads)} if threads.isdecimal() and 0 < int(threads) < _THREADS else {})


def _policy_changes(span: RecipeSpan) -> list[dict[str, Any]]:
    """Return the changes of the policy without a stop.

    Raises:
        LedgerError: what the ledger says of them is none.
    """
    told = span.tables.details.get("policy_changes") or []
    for one in told if isinstance(told, list) else [told]:
        is_one = isinstance(one, dict) and {"step", "text", "by", "signed", "anchor"} <= one.keys()
        if not is_one or type(one["step"]) is not int or not isinstance(one["anchor"], dict | None):
            raise LedgerError(f"What the ledger says of a changed policy is no change: {one!r:.200}.")
        _policy_of(one["text"])
    return list(told)


def _policy_of(text: object) -> PolicyFile:
    try:
        return PolicyFile.model_validate(text)
    except (ValueError, TypeError) as error:
        raise LedgerError(f"The ledger's text of a policy is none: {error}") from error


def _policy(run: StandingSteps, span: RecipeSpan) -> PolicyFile | None:
    """Return the policy with which the span began; changes without a stop follow from the ledger."""
    digest = span.recipe.get("policy")
    if not digest:
        return None
    for tables in run.ledger.tables:
        if dict(tables.entry.commitments).get("policy", b"").hex() == digest and tables.details.get("policy_text"):
            return _policy_of(tables.details["policy_text"])
    raise LedgerError(f"The ledger commits to the policy {digest[:16]} and has no text of it, so nobody can replay it.")


def _unpromised(plan: Plan) -> str:
    found = [g for g in plan.guarantees if g.promise is Promise.REPLAYABLE and not g.holds]
    return found[0].because if found else ""


def _without_cores(device: str) -> str:
    """Return a processor without the number of its cores: threads are what bits rest on."""
    return device.rpartition(", ")[0] if device.endswith(" cores") else device
