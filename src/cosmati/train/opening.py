"""Opens a run: its folder, its facts, and the checkpoint from which it goes on."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from cosmati.core.clock import Clock
from cosmati.core.method import State
from cosmati.core.plan import Plan, Promise
from cosmati.errors import CheckpointError, PlanError
from cosmati.provenance.kept_vouchers import keep_given_policy
from cosmati.train.all_ranks import all_or_none
from cosmati.train.artifacts import with_base
from cosmati.train.assembly import Assembly
from cosmati.train.continuity import Continuity
from cosmati.train.cutting import Cuts
from cosmati.train.facts import facts_of
from cosmati.train.fleet import compare_fleet
from cosmati.train.isolation import without_admitted
from cosmati.train.observers.ledger_checks import Recorded, recorded_in
from cosmati.train.observers.observer import Observer, restore_states
from cosmati.train.policy_watch import PolicyWatch
from cosmati.train.prepare import Prepared
from cosmati.train.run.checkpoints import Checkpoint, list_checkpoints, read_checkpoint
from cosmati.train.run.session import OpenRun
from cosmati.train.sensitive import sensitive_of
from cosmati.train.snapshot import restore

_READ_BACK_BYTES = 1 << 30


class Opened(NamedTuple):
    """An open run.

    Attributes:
        run: its folder and observers.
        continuity: with the run that was stopped.
        plan: without the promises that are broken.
        clock: where it goes on.
        cuts: of the microbatches, where memory was short.
        states: of the methods, None where the run begins.
    """

    run: OpenRun
    continuity: Continuity
    plan: Plan
    clock: Clock
    cuts: Cuts
    states: dict[int, State] | None


def open_run(
    prepared: Prepared, observers: Sequence[Observer], plan: Plan, clock: Clock, policy_watch: PolicyWatch | None
) -> Opened:
    """Lock the run folder, if there is one, and go on from its last checkpoint, if there is one.

    Args:
        prepared: what the run needs.
        observers: the user's.
        plan: where no checkpoint says otherwise.
        clock: likewise.
        policy_watch: looks for a change of the policy; None where no ledger could say it.

    Raises:
        RunError: another process has the folder, or it can't be written.
        CheckpointError: the checkpoint is damaged, or of another run.
        PlanError: ranks hold different models.
    """
    a = prepared.assembly
    p = prepared
    facts = facts_of(a, p.data_digest, p.identity, p.given.policy, p.vouched, p.data_text, p.artifacts)
    facts = replace(facts, sensitive=sensitive_of(p.given, a.policy, p.vouched))
    run = OpenRun(facts, a.config, a.budget, a.ranks, observers, a.layout.digest, a.model)
    continuity = Continuity(a, prepared.identity, facts.environment, facts.model_root, p.given.policy)
    states = None
    made: list[list[int]] = []
    with run.opening() as checkpoint:
        if checkpoint is None and "parent.asked" in prepared.identity:
            raise CheckpointError(
                f"{a.config.load_weights} wasn't loaded, because the run had begun when its Trainer was made, and "
                "by now there is no checkpoint of it, here or among its copies. Make the Trainer anew."
            )
        if policy_watch is not None:
            policy_watch.resume(run, continuity, checkpoint, prepared.identity.get("policy"))
        if checkpoint is not None:
            plan = continuity.resume(checkpoint, plan)
            run.restate(artifacts=with_base(facts.artifacts, checkpoint.facts["identity"]))
            restored = restore(checkpoint, a, prepared.feed)
            plan = plan.recalled((g.name, g.because) for g in restored.plan.guarantees if not g.holds)
            if policy_watch is not None:
                plan = without_admitted(plan, a.model, continuity.policy_in_force, p.class_map, checkpoint.step)
            clock, states, made = restored.clock, restored.states, checkpoint.facts["cuts"]
            _restore_observers(observers, checkpoint, a.ranks.rank)
        plan = without_schedulers(plan, a)
        if a.ranks.is_parallel:
            plan = compare_fleet(plan, facts.environment, a.ranks)
            _compare_ranks(prepared)
        cuts = Cuts.found(a.config.run_folder, made, clock.step)
        if prepared.watch is not None:
            recorded = recorded_in(a.config.run_folder) if a.ranks.rank == 0 else Recorded()
            news = prepared.watch.resume(recorded, clock)
            if news is not None:
                run.restate(**news.facts(run.facts))
                continuity.changed += news.changes
        with all_or_none(a.ranks):
            run.start(clock, continuity.changed, plan, None if checkpoint is None else checkpoint.signed_digest)
        given = p.given.policy.vouched if p.given.policy is not None else None
        if given is not None and a.config.run_folder is not None and a.plan.facts.has_ledger and a.ranks.rank == 0:
            keep_given_policy(Path(a.config.run_folder), given)  # for who resumes: `signed_policy(run=...)`
    return Opened(run, continuity, plan, clock, cuts, states)


def _restore_observers(observers: Sequence[Observer], checkpoint: Checkpoint, rank: int) -> None:
    left = restore_states(observers, checkpoint.facts.get("observers", {}), checkpoint.state)
    if left and rank == 0:  # Others may have no observers.
        warnings.warn(
            f"The checkpoint of step {checkpoint.step} keeps the state of {', '.join(left)}, and the run goes on "
            "without such an observer: the next checkpoint won't have it. Give the observers that the run began with.",
            stacklevel=2,
        )


def _compare_ranks(prepared: Prepared) -> None:
    a = prepared.assembly
    # Tensors that each rank has drawn for itself are told by the watch on state, which withdraws what they break.
    own = {name: value for name, value in prepared.identity.items() if not name.startswith("model.contents.")}
    if not a.ranks.all_equal(_digest(own)):
        names = a.ranks.unlike_names({name: _digest(value) for name, value in own.items()})
        msg = (
            f"The ranks have been given different runs: {', '.join(names[:5])} differ. Every rank has to be given the "
            "same, all batches too; the trainer shares them out."
        )
        raise PlanError(msg)
    if not a.ranks.all_equal(a.layout.digest()):
        msg = (
            "The ranks hold different weights at the start. Every rank has to build the same model, with the same "
            "surgery, and see the same run folder."
        )
        raise PlanError(msg)


def _digest(facts: object) -> bytes:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()


def read_back(assembly: Assembly) -> None:
    """Load the checkpoint from before the first step, so that what nothing can go on from is found before it's trained.

    Raises:
        CheckpointError: it can't be read, or doesn't fit the model.
    """
    folder = assembly.config.run_folder
    num_bytes = sum(tensor.nbytes for _, tensor in assembly.layout.save())
    newest = list_checkpoints(Path(folder) / "checkpoints")[:1] if folder is not None else []
    if newest and num_bytes <= _READ_BACK_BYTES:
        assembly.layout.load(read_checkpoint(newest[0]).model)


def without_schedulers(plan: Plan, assembly: Assembly) -> Plan:
    """Take back what a torch scheduler breaks: its count isn't in a checkpoint, and nothing leads to it from here.

    One may be made at any time, so it's looked for whenever a checkpoint would be written.
    """
    for scheduled in assembly.optimizers:
        # What every torch scheduler leaves in the groups of its optimizer.
        if any("initial_lr" in group for group in scheduled.optimizer.param_groups):
            because = (
                f"{type(scheduled.optimizer).__name__} has a torch scheduler, whose count no checkpoint holds: give "
                "cosmati.optim's configuration a schedule"
            )
            for promise in (Promise.RESUME, Promise.REPLAYABLE):
                plan = plan.withdraw(promise, because) if plan.holds(promise) else plan
    return plan


def without_ends(plan: Plan, observers: Sequence[Observer], stop_reason: str = "") -> Plan:
    """Take back that a class is isolated where the run ends, or has ended, by what an observer has seen.

    Args:
        plan: of the run.
        observers: the user's.
        stop_reason: why somebody has asked for the end; empty where nobody said.
    """
    ending = [type(observer).__name__ for observer in observers if observer.ends_runs]
    if not (ending or stop_reason):
        return plan
    who = f"the run was stopped: {stop_reason}" if stop_reason else f"{', '.join(ending)} may end the run"
    because = f"{who}, which may follow from any row; give a budget in steps instead"
    for guarantee in plan.guarantees:
        if guarantee.holds and guarantee.promise is Promise.ISOLATED:
            plan = plan.withdraw(Promise.ISOLATED, because, guarantee.pair)
    return plan


def warn_of_idle_schedulers(assembly: Assembly, observers: Sequence[Observer]) -> None:
    """Warn of a torch scheduler that nobody would step: `fit` doesn't, and no observer of the user's own is there."""
    if any(not type(observer).__module__.startswith("cosmati.") for observer in observers):
        return
    for scheduled in assembly.optimizers:
        if getattr(scheduled.optimizer.step, "_wrapped_by_lr_sched", False):
            kind = type(scheduled.optimizer).__name__
            warnings.warn(
                f"A torch scheduler is bound to the {kind}, and fit() doesn't step it: the learning rate would stay. "
                f"Give a configuration with a schedule, such as cosmati.optim.SGD(lr=0.1, schedule=Cosine()), or call "
                "its step() in an observer's on_step or a loop of your own.",
                stacklevel=3,
            )
