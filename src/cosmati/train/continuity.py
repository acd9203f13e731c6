"""What ties a checkpoint to its run: identity, surroundings, first root, and the loss of a fixed microbatch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from cosmati.core.batch import Data
from cosmati.core.plan import Plan, Promise
from cosmati.errors import ChangedRunError, CheckpointError, PlanError
from cosmati.routing.policy import CompiledPolicy
from cosmati.routing.policy_file import PolicyFile
from cosmati.train.assembly import Assembly
from cosmati.train.budget_change import check_past
from cosmati.train.finite import not_finite
from cosmati.train.fleet import surroundings_of
from cosmati.train.forward_watch import numbers_among
from cosmati.train.held import places_in
from cosmati.train.identity import SURROUNDINGS, Change, changes, check_resume
from cosmati.train.loss_state import loss_buffers, loss_module
from cosmati.train.past_policies import Broken, Past, with_broken, with_span, without_broken, without_taught
from cosmati.train.policy_change import Anchor, anchor_of, change_policy, refuse_anothers
from cosmati.train.probe import Probe
from cosmati.train.run.checkpoints import Checkpoint
from cosmati.train.script_names import note_files
from cosmati.train.values import content_of

CHECKPOINT_VERSION = 4
"""Of the facts in a checkpoint. Version 1 had no identity, version 3 no past policies."""


class Continuity:
    """Says whether what resumes is the run that was stopped, and writes down what a later resume needs to say so.

    Args:
        assembly: of the run.
        identity: its facts by name.
        environment: what is around it.
        initial_root: Merkle root of the model before its first step.
        policy: as given.

    Attributes:
        initial_root: as given, or as the checkpoint has it.
        changed: what the last resume changed, for the record.
        budget_was_read: whether a method has asked how far the run is: another budget would then change its past.
        budget_use_is_told: whether each that has says what it took (`Method.taken_from`), so that it can be compared.
        never_finite: names, as checkpoints have them, of what began with infinities (masks, say).
        has_seen: whether `see` was called.
        policy_changes: that were made without a stop, or are to come, as the ledger says them.
    """

    def __init__(
        self,
        assembly: Assembly,
        identity: Mapping[str, Any],
        environment: Mapping[str, str],
        initial_root: bytes,
        policy: PolicyFile | None = None,
    ) -> None:
        self._a = assembly
        self._policy, self.anchor = policy, anchor_of(policy)
        self.policy_changes: list[dict[str, Any]] = []
        refuse_anothers(policy, assembly)
        self._identity = identity
        self._environment = {name: environment.get(name, "") for name in SURROUNDINGS}
        self.initial_root = initial_root
        self.changed: list[Change] = []
        self.budget_was_read, self.budget_use_is_told = False, True
        self._probe = Probe()
        self._expected: list[str | None] | None = None
        self._where = ""
        begun = {name: span.tensor for name, span in assembly.layout.held().items()}
        begun |= loss_buffers([turn.loss for turn in assembly.turns], assembly.model)
        # A part of it may be on another rank.
        told = assembly.ranks.told_by_all({"names": sorted(not_finite(begun))})
        self.never_finite = {name for one in told for name in one["names"]}
        self.has_seen = False
        self._since, self._past, self._broken = 0, Past(), Broken()
        self._modes = {name: module.training for name, module in self._modules()}

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        found = (loss_module(turn.loss) for turn in self._a.turns)
        for index, root in enumerate([self._a.model, *(module for module in found if module is not None)]):
            for name, module in root.named_modules():
                yield f"{index}/{name}", module

    def facts(self, step: int, plan: Plan, *, compare_code: bool, keep_modes: bool) -> dict[str, Any]:
        """Return what a checkpoint keeps.

        Args:
            step: of the checkpoint.
            plan: without the promises that are broken by then.
            compare_code: by what it computes; where that follows from state that no checkpoint holds, it can't be.
            keep_modes: whether modules are in the modes in which the next step finds them.
        """
        modes = {name: module.training for name, module in self._modules()}
        changed = {name: mode for name, mode in modes.items() if mode != self._modes.get(name, True)}
        policy, signed = self._a.policy, {"signed_policy": self.anchor} if self.anchor else {}
        changes = {"policy_changes": list(self.policy_changes)} if self.policy_changes else {}
        return (
            signed
            | changes
            | {
                "version": CHECKPOINT_VERSION,
                "identity": dict(self._identity),
                "files": note_files(self._identity),
                "environment": dict(self._environment),
                "initial_root": self.initial_root.hex(),
                "phases": [[p.name, p.start_step, p.end_step] for p in policy.phases] if policy else [],
                "past_policies": with_span(self._past, policy, self._since, step),
                "broken_pairs": with_broken(self._broken, plan, policy, self._since, step),
                "budget_was_read": self.budget_was_read,
                "budget_use_is_told": self.budget_use_is_told,
                # From the recipe's own. None: nobody knows.
                "modes": changed if keep_modes else None,
                "probe": {"specs": self._probe.specs, "losses": self._losses() if compare_code else None},
            }
        )

    @property
    def policy_in_force(self) -> CompiledPolicy:
        """The policy, compiled; the run has one."""
        assert self._a.policy is not None, "a governed run"
        return self._a.policy

    def close_span(self, step: int, plan: Plan) -> bytes:
        """Write down what the policy in force has allowed so far, since another one takes its place; return its digest.

        Args:
            step: from which on that one acts.
            plan: without the promises that are broken by then.
        """
        policy = self.policy_in_force
        self._past = with_span(self._past, policy, self._since, step)
        self._broken = with_broken(self._broken, plan, policy, self._since, step)
        self._since = step
        return policy.policy_digest

    def go_by(self, policy: PolicyFile, compiled: CompiledPolicy, anchor: Anchor | None) -> None:
        """Take another policy for the one in force, and what later changes are held against."""
        self._policy, self.anchor = policy, anchor
        self._a = dataclasses.replace(self._a, policy=compiled)

    def resume(self, checkpoint: Checkpoint, plan: Plan) -> Plan:
        """Compare with a checkpoint that is about to be restored.

        Returns:
            The plan, without the promises that other surroundings break.

        Raises:
            CheckpointError: it is of another run, by name; or of an earlier release.
        """
        facts, config = checkpoint.facts, self._a.config
        self._where = f"The checkpoint of step {checkpoint.step} in {config.run_folder}"
        if facts.get("version") != CHECKPOINT_VERSION:
            msg = (
                f"{self._where} has version {facts.get('version', 1)}, and this release resumes version "
                f"{CHECKPOINT_VERSION}. Finish the run with the release that began it, or start a new one from its "
                "weights: RunConfig(load_weights=...)."
            )
            raise CheckpointError(msg)
        around = changes(facts["environment"], self._environment)
        was = {**facts["identity"], **facts.get("files", {})}
        now = {**self._identity, **note_files(self._identity)}
        self.changed = check_resume(was, now, asked=config.change, where=self._where, is_elsewhere=bool(around))
        parent = {name: value for name, value in facts["identity"].items() if name.startswith("parent")}
        self._identity = {n: v for n, v in self._identity.items() if not n.startswith("parent")} | parent
        self.anchor, by = change_policy(facts.get("signed_policy"), self._policy, self._a, checkpoint.step)
        self.changed += by
        if any(change.name.startswith("budget.") for change in self.changed):
            check_past(self._a, checkpoint, schedule_is_new="schedule" in config.change)
        self.initial_root = bytes.fromhex(facts["initial_root"])
        self.budget_was_read = facts["budget_was_read"]
        # Of an earlier release, nobody knows.
        self.budget_use_is_told = facts.get("budget_use_is_told", not self.budget_was_read)
        self._probe, self._expected = Probe(facts["probe"]["specs"]), facts["probe"]["losses"]
        if around:
            self._expected = None  # Other kernels, other bits.
        self.changed += around
        for promise in (Promise.RESUME, Promise.ELASTIC, Promise.REPLAYABLE, Promise.PARITY) if around else ():
            if plan.holds(promise):
                plan = plan.withdraw(promise, f"resumed with {'; '.join(map(str, around))}")
        self._since, self._past = checkpoint.step, facts["past_policies"]
        self._broken = facts.get("broken_pairs", [])
        plan = without_taught(plan, self._past, self._a.policy)
        plan = without_broken(plan, self._broken, self._a.policy)
        return self._put_modes_back(facts.get("modes", {}), plan)

    def _put_modes_back(self, modes: Mapping[str, bool] | None, plan: Plan) -> Plan:
        for name, module in self._modules():
            module.training = (modes or {}).get(name, module.training)
        if modes is None:
            because = (
                f"{self._where} was saved in another mode than its last step's: call model.train() before save(), and "
                "before the loop ends"
            )
            for promise in (Promise.RESUME, Promise.REPLAYABLE):
                plan = plan.withdraw(promise, because) if plan.holds(promise) else plan
        return plan

    def see(self, data: Data) -> None:
        """Take note of a microbatch: of its form, and after a resume of what the code makes of the fixed one.

        Raises:
            ChangedRunError: model or loss compute something else than before.
            PlanError: or than on another rank.
        """
        self.has_seen = True
        if self._a.ranks.is_parallel:
            self._compare_ranks(data)
        self._probe.see(data)
        expected, self._expected = self._expected, None
        if expected is None:
            return
        found = self._losses()
        both = _comparable([expected, found])
        if len({*both}) > 1:
            was, now = (", ".join(map(_decimal, values)) for values in both)
            msg = (
                f"{self._where} is of another run: from the same weights, a fixed microbatch has the loss {now}, and "
                f"had {was}. The code of the model or of the loss has changed, or what it reads. Resume with the code "
                "that wrote it, or give the new run a folder of its own."
            )
            raise ChangedRunError(msg)

    def _compare_ranks(self, data: Data) -> None:
        """Refuse ranks that compute unlike losses, where nothing is known by which they may.

        Raises:
            PlanError: on all ranks.
        """
        ranks, own = self._a.ranks, Probe(self._probe.specs)
        own.see(data)
        # Integers are drawn below the largest that was seen: of all ranks' microbatches, the first one's counts.
        self._probe = Probe(ranks.told_by_all({"specs": own.specs})[0]["specs"])
        self._probe.see(data)
        around = [
            surroundings_of(self._environment),
            {name: value for name, value in self._identity.items() if name.startswith("model.contents.")},
        ]
        told = ranks.told_by_all({"around": around, "meets": ranks.has_met, "losses": self._losses()})
        if any(one["meets"] or one["around"] != told[0]["around"] for one in told):
            return  # Promises are withdrawn for what they differ in.
        losses = _comparable([one["losses"] for one in told])
        rank = next((rank for rank, one in enumerate(losses) if one != losses[0]), None)
        if rank is not None and not self._holds_unlike_numbers():
            first, other = (", ".join(map(_decimal, one)) for one in (losses[0], losses[rank]))
            msg = (
                f"A fixed microbatch has the loss {first} on rank 0, and {other} on rank {rank}, from the same "
                "weights: model or loss are other code there, or what they read differs, or a setting of its kernels. "
                "Give every rank the same files and environment variables."
            )
            raise PlanError(msg)

    def _holds_unlike_numbers(self) -> bool:
        """Say whether ranks have drawn numbers for themselves, of which the watch on state tells. All ranks ask."""
        roots = {"": self._a.model, **{f"loss {i}": turn.loss for i, turn in enumerate(self._a.turns)}}
        state = {place.name: (content_of(place.value), place) for place in places_in(roots)}
        told = self._a.ranks.told_by_all({name: digest.hex() for name, digest in numbers_among(state).items()})
        # Other code may reach other numbers.
        return any(one[name] != told[0][name] for one in told for name in one.keys() & told[0].keys())

    def _losses(self) -> list[str | None] | None:
        a = self._a
        with a.config.autocast(a.device):
            return self._probe.losses(a.model, [turn.loss for turn in a.turns], a.generators, a.device)


def _comparable(losses: Sequence[Sequence[str | None] | None]) -> list[tuple[str, ...]]:
    """Return of each one's losses those that could be computed everywhere, in their order."""
    columns = zip(*(one or () for one in losses), strict=False)  # where there are none, nothing is compared
    kept = [column for column in columns if None not in column]
    return [*zip(*kept, strict=True)] or [() for _ in losses]


def _decimal(value: str) -> str:
    return value if value in ("nan", "inf", "-inf") else f"{float.fromhex(value)!r}"
