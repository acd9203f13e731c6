"""A policy that changes without a stop: one that's left in the run's folder is put on record, and acts from a step on.

The first rank looks at the borders of steps whose number `LOOK_EVERY` divides, and reads in a thread, so that no step
waits. Under a policy that an authority has signed, its next version is found in the authority's repository likewise
(`policy_source`). What is found is asked what a resume asks (`policy_change`): the operator alone may tighten, and what
loosens was signed for it. Then all ranks are told the policy and a step that's still to come, an entry says so, and
another one stands before that step itself. Who resumes reads them: the run goes on as if nobody had stopped it.

The order of the rows stays the one that the run began with. So a change that would put off rows, offer a class that
the run has none of, or cut the model otherwise, is refused, and is for a resume: RunConfig(change="policy"). So is one
by which methods would cut otherwise (Gradient Routing), which may turn out to be impossible in the step itself.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from cosmati.core.clock import Clock
from cosmati.core.plan import Plan
from cosmati.core.source import Source
from cosmati.errors import CheckpointError, CosmatiError, PolicyError
from cosmati.provenance.kept_vouchers import kept_policy
from cosmati.provenance.voucher import FOLDER
from cosmati.routing.policy import CompiledPolicy, partition_by
from cosmati.routing.policy_file import PolicyFile
from cosmati.routing.signed_policy import signed_policy
from cosmati.routing.starvation import kind_map, token_kinds
from cosmati.storage.atomic import replace_file
from cosmati.train.assembly import Assembly
from cosmati.train.authority_watch import LOOK_EVERY, AuthorityWatch
from cosmati.train.continuity import Continuity
from cosmati.train.facts import PolicyChanges
from cosmati.train.given_policy import compile_given
from cosmati.train.identity import Change
from cosmati.train.ingredients import Ingredients
from cosmati.train.isolation import without_admitted
from cosmati.train.observers.ledger_checks import policy_changes_in
from cosmati.train.policy_change import change_policy, is_anothers, refuse_anothers
from cosmati.train.prepare import Prepared
from cosmati.train.refusals import refuse_waiting
from cosmati.train.run.checkpoints import Checkpoint
from cosmati.train.run.session import OpenRun
from cosmati.train.signed import refuse_declared

FILE = "policy-change.json"
"""In a run's folder: a `policy`, or where a signed one is (`url`, `root`, `name`, `number`)."""
REFUSED_FILE = "policy-change-refused.json"
MOST_BYTES = 1 << 23
"""A longer file isn't read: a policy's text has a million characters at most."""
_MEND = "Stop the run, and go on with RunConfig(change='policy')."
LATE = "To go on with it, give the policy and a longer budget: RunConfig(change=('policy', 'budget'))."
_Found = tuple[bytes, PolicyFile | CosmatiError]


class _Newest(NamedTuple):
    """A change that was found: the file's content if it came in one, what is told of it, and what bears it out."""

    raw: bytes | None
    change: dict[str, Any]
    files: Mapping[str, bytes]


class PolicyWatch:
    """Watches for a change of a run's policy.

    Args:
        assembly: of the run, with the policy that it was begun with.
        class_map: policy's class of each of the source's classes.
        given: what the run was made of.
        vouchers: watches over the data; None where nobody does.

    Attributes:
        recorded: the changes that a ledger elsewhere says; None asks that of the run's folder.
    """

    recorded: list[dict[str, Any]] | None = None

    def __init__(
        self,
        given: Ingredients,
        assembly: Assembly,
        class_map: Sequence[int],
        vouchers: AuthorityWatch | None,
    ) -> None:
        self._given, self._a, self._class_map, self._vouchers = given, assembly, class_map, vouchers
        self._data = given.data
        assert assembly.config.run_folder is not None, "a run without a folder isn't watched"
        self._folder: Path = assembly.config.run_folder
        self._changes: list[dict[str, Any]] = []
        self._num_made = 0
        self._heeded = -1
        self._found: SimpleQueue[_Found] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def resume(self, run: OpenRun, continuity: Continuity, checkpoint: Checkpoint | None, policy: object) -> None:
        """Go on with what the ledger has recorded. All ranks ask.

        Args:
            run: is told.
            continuity: likewise; it hasn't compared the checkpoint yet.
            checkpoint: from which the run goes on; None where it begins.
            policy: digest of the policy that was given, as the run's identity has it.

        Raises:
            CheckpointError: another policy is given, while a change is to come.
        """
        at, facts = (0, dict[str, Any]()) if checkpoint is None else (checkpoint.step, checkpoint.facts)
        logged = policy_changes_in(self._folder) if self._a.ranks.rank == 0 and self.recorded is None else []
        logged = logged if self.recorded is None else self.recorded
        logged = json.loads(self._a.ranks.told(json.dumps(logged).encode()))
        coming = [one for one in logged if one["step"] > at]
        made = [one for one in facts.get("policy_changes", ()) if one["step"] <= at]
        if checkpoint is not None and facts["identity"].get("policy") != policy:
            made = []  # Another policy is given: `change_policy` holds it against the one in force.
            self._refuse_taken(logged)
            if coming and self.recorded is None:  # else it was found after the policy was given
                msg = (
                    f"The ledger says that another policy acts from step {coming[0]['step']} on, and the run is at "
                    f"step {at}. Go on with the policy that it was begun with, and change it once that step is taken."
                )
                raise CheckpointError(msg)
        self._changes, self._num_made = [*made, *coming], len(made)
        if made:
            run.restate(**self._go_by(made[-1], continuity))
        continuity.policy_changes = self._changes  # the list itself, which grows
        run.restate(policy_changes=PolicyChanges(tuple(self._changes)))

    def _refuse_taken(self, logged: Sequence[Mapping[str, Any]]) -> None:
        """Refuse a policy that the run has taken up by itself in the place of the one that it was begun with."""
        given = self._given.policy
        assert given is not None, "a governed run"
        taken = [one["step"] for one in logged if PolicyFile.model_validate(one["text"]).digest == given.digest]
        if taken and "policy" not in self._given.config.change:
            msg = (
                f"The run has taken this policy up by itself, from step {taken[0]} on, and was begun with another one. "
                "Give that one, and the ledger says when which of them acts: signed_policy(..., run=FOLDER) finds it."
            )
            raise CheckpointError(msg)

    def before_step(self, run: OpenRun, clock: Clock, continuity: Continuity, plan: Plan) -> Plan:
        """Let a change act that is due, and put on record one that was found. All ranks ask, before each step.

        Args:
            run: is told.
            clock: stands at the step.
            continuity: is told.
            plan: of the run so far.

        Returns:
            The plan, without promises that the policy doesn't keep any more.
        """
        if self._is_due(clock.step):
            change = self._changes[self._num_made]
            was = continuity.close_span(clock.step, plan)
            facts = self._go_by(change, continuity)
            self._num_made += 1
            changes = [Change("policy", was.hex(), facts["policy"].policy_digest.hex())]
            run.amend(clock, [*changes, Change("policy.changed_by", None, change["by"])], **facts)
            plan = without_admitted(plan, self._a.model, facts["policy"], self._class_map, clock.step)
        if clock.step % LOOK_EVERY or clock.step == self._heeded or self._num_made < len(self._changes):
            return plan
        self._heeded = clock.step
        found = self._newest(clock.step, continuity) if self._a.ranks.rank == 0 else None
        message = self._a.ranks.told(b"" if found is None else json.dumps(found.change).encode())
        if message:
            self._changes.append(json.loads(message))
            change = self._changes[-1]
            told = Change("policy.to_come", None, f"from step {change['step']} on, by {change['by']}")
            files = {} if found is None else found.files
            run.amend(clock, [told], policy_changes=PolicyChanges(tuple(self._changes), files))
            if found is not None:  # Only now: until the entry is on disk, the file is all there is.
                self._take_away(found.raw)
        return plan

    def _compiled(self, policy: PolicyFile) -> CompiledPolicy:
        given = dataclasses.replace(self._given, policy=policy)
        compiled, _ = compile_given(given, partition_by(policy, self._a.model), self._a.budget)
        assert compiled is not None, "there's a policy"
        return compiled

    def _is_due(self, step: int) -> bool:
        return self._num_made < len(self._changes) and self._changes[self._num_made]["step"] == step

    def _go_by(self, change: Mapping[str, Any], continuity: Continuity) -> dict[str, Any]:
        """Let a change act; return the run's facts that are others with it."""
        policy = PolicyFile.model_validate(change["text"])
        vouched = None
        if change["signed"] is not None and self._a.ranks.rank == 0:  # who alone writes
            vouched = kept_policy(self._folder / "ledger" / FOLDER, change["signed"])
        compiled = self._compiled(policy)
        self._a.router.go_by(compiled, kind_map(compiled, self._data), token_kinds(compiled, self._data))
        self._a.deferred_rows.go_by(compiled)
        if self._vouchers is not None:
            compiled = self._vouchers.rebase(compiled, policy.grace, vouched)
        continuity.go_by(policy, compiled, change["anchor"] and {"text": policy.to_mapping(), **change["anchor"]})
        return {"policy": compiled, "policy_text": policy.to_mapping(), "vouched_policy": vouched}

    def _newest(self, step: int, continuity: Continuity) -> _Newest | None:
        """Return a change that was found and may be made; one that may not is told."""
        try:
            raw, found = self._found.get_nowait()
        except Empty:
            if (self._folder / FILE).exists() and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self.look, daemon=True, name="cosmati-policy")
                self._thread.start()
            source = self._vouchers.policy_source if self._vouchers is not None else None
            if source is None or source.found.empty():
                return None
            raw, found = None, source.found.get_nowait()
        try:
            if isinstance(found, CosmatiError):
                raise found
            if raw is None and is_anothers(found, self._a):
                return None
            change = self._allowed(found, step, continuity)
        except Exception as error:  # noqa: BLE001  (whatever is wrong with it: the other ranks wait for a word)
            vouched = found.vouched if raw is None and isinstance(found, PolicyFile) else None
            given = raw or b"" if vouched is None else vouched.voucher.target.encode()
            self._refuse(raw, given, str(error) or type(error).__name__)
            return None
        if change is None:
            self._take_away(raw)
            return None
        return _Newest(raw, change, found.vouched.files if found.vouched is not None else {})

    def _refuse(self, raw: bytes | None, given: bytes, why: str) -> None:
        told = {"why": why, "given": given[: 1 << 20].decode("utf-8", "replace")}
        replace_file(self._folder / REFUSED_FILE, json.dumps(told, indent=2).encode())
        self._take_away(raw)
        warnings.warn(f"The run goes on with the policy that it has. {why}", stacklevel=2)

    def _take_away(self, raw: bytes | None) -> None:
        """Remove what was read, if it was a file, and nothing that has come in its place since."""
        if raw is not None and self._content() == raw:
            (self._folder / FILE).unlink(missing_ok=True)

    def _content(self) -> bytes | None:
        """Return what lies there now, its beginning where it's too long; None where there's no file."""
        try:
            with (self._folder / FILE).open("rb") as file:
                return file.read(MOST_BYTES + 1)
        except OSError:
            return None

    def look(self) -> None:
        """Read what lies there now; it's heeded at the next step at which it is looked for."""
        raw = self._content()
        if raw is not None:
            self._found.put((raw, _read(raw)))

    def close(self, outcome: str) -> None:
        """Say of what still lies there that it came too late, where the run was completed. After its end.

        Args:
            outcome: of the run; one that was stopped or broken off heeds it when it's resumed.
        """
        if outcome != "completed" or self._a.ranks.rank != 0:
            return
        raw = self._content()
        if raw is not None:
            self._refuse(raw, raw, f"The run was completed before it looked at {FILE}. {LATE}")

    def _allowed(self, policy: PolicyFile, step: int, continuity: Continuity) -> dict[str, Any] | None:
        """Return a change from the next step on, or a later one that its signers name; None where it's none.

        Raises:
            CosmatiError: it may not be made, or not without a stop.
        """
        now = continuity.policy_in_force
        if policy.digest == now.policy_digest:
            return None
        refuse_declared(dataclasses.replace(self._given, policy=policy))
        refuse_anothers(policy, self._a)
        statement = policy.vouched.statement if policy.vouched is not None else {}
        named = statement.get("from_step")
        begin = max(step + 1, named if isinstance(named, int) else 0)
        new = self._compiled(policy)
        self._refuse_for_a_resume(now, new, begin)
        assembly = dataclasses.replace(self._a, policy=new)
        anchor, by = change_policy(continuity.anchor, policy, assembly, begin)
        return {
            "step": begin,
            "text": policy.to_mapping(),
            "by": str(by[0].now) if by else "the operator, of a policy that nobody had signed",
            "signed": policy.vouched.facts if policy.vouched is not None else None,
            "anchor": anchor and {name: value for name, value in anchor.items() if name != "text"},
        }

    def _refuse_for_a_resume(self, now: CompiledPolicy, new: CompiledPolicy, begin: int) -> None:
        """Refuse what the order of the rows, or the model as it was cut, doesn't allow."""
        if begin >= new.phases[-1].end_step:
            raise PolicyError(f"The policy would act from step {begin} on, and the run ends before it.")
        if (now.regions, now.partition.parameters) != (new.regions, new.partition.parameters):
            raise PolicyError(f"The policy cuts the model into other regions than the run has. {_MEND}")
        _refuse_for_methods(self._a.plan, now, new, begin)
        if self._a.plan.facts.packed and (told := self._unlike(new, begin) - self._unlike(now)):
            what = ", ".join(sorted(told))
            raise PolicyError(f"In packs, the policy tells classes apart in {what}, and none did so before. {_MEND}")
        if not isinstance(self._data, Source):  # a loop of the user's own has no order, and nor has a loader
            if self._data is not None:
                refuse_waiting(new, "a step's rows are regrouped as they come")
            return
        # Either may change a class's fate: what was to be admitted by now may be deferred on.
        first, starts = self._a.policy, {phase.start_step for phase in (*now.phases, *new.phases)}
        assert first is not None, "a governed run"
        kinds = getattr(self._data, "kinds", [(class_id, 0) for class_id in range(len(self._class_map))])
        for class_id, number in kinds:
            own = self._class_map[class_id]
            before, after = (one.row(own, kind_map(one, self._data)(number)) for one in (now, new))
            for step in sorted({begin, *(start for start in starts if start > begin)}):
                decision = new.decision[after][new.phase_at(step)]
                if decision == "defer" and now.decision[before][now.phase_at(step)] != "defer":
                    raise PolicyError(f"The policy defers {new.classes[own]} from step {step} on, and did not. {_MEND}")
                if decision in ("admit", "gate") and not first.ever_admits(own):
                    msg = f"The policy admits {new.classes[own]}, of which the run has no rows in its order. {_MEND}"
                    raise PolicyError(msg)

    def _unlike(self, policy: CompiledPolicy, begin: int = 0) -> set[str]:
        """Return the regions that the packs' classes don't teach alike: if tokens can be told apart, a step tells."""
        late = [index for index, phase in enumerate(policy.phases) if phase.end_step > begin]
        kinds = token_kinds(policy, self._data) or (0,) * len(self._class_map)
        rows = [policy.weight[policy.row(*one)] for one in zip(self._class_map, kinds, strict=True)]
        return {
            name for r, name in enumerate(policy.regions) if any(len({row[p][r] for row in rows}) > 1 for p in late)
        }


def policy_watch_of(prepared: Prepared) -> PolicyWatch | None:
    """Return what looks for a change of a run's policy; None where it has none, or no ledger could say it."""
    a, p = prepared.assembly, prepared
    if a.policy is None or not a.plan.facts.has_ledger:
        return None
    return PolicyWatch(p.given, a, p.class_map, p.watch)


def _refuse_for_methods(plan: Plan, now: CompiledPolicy, new: CompiledPolicy, begin: int) -> None:
    """Refuse denials of which only a step tells whether methods can keep them: it would end the run, and each resume.

    Raises:
        PolicyError: a method acts by what a class is denied, and it would be denied other regions than ever before.
    """
    methods = plan.with_hook("passing")
    late = [index for index, phase in enumerate(new.phases) if phase.end_step > begin]
    for own, name in enumerate(new.classes) if methods else ():
        before = {_denied(weights) for row in now.rows_of(own) for weights in now.weight[row]}
        after = [new.weight[row][phase] for row in new.rows_of(own) for phase in late]
        if any(any(weights) and _denied(weights) not in before for weights in after):
            what = ", ".join(type(method).__name__ for method in methods)
            raise PolicyError(f"The policy denies {name} other regions than before, and {what} acts by that. {_MEND}")


def _denied(weights: Sequence[float]) -> tuple[bool, ...]:
    return tuple(not weight for weight in weights)


def _read(raw: bytes) -> PolicyFile | CosmatiError:
    """Return the policy that a file of changes holds or names, or why there's none."""
    if len(raw) > MOST_BYTES:
        return PolicyError(f"{FILE} is longer than {MOST_BYTES:,} bytes. Write it with `cosmati policy change`.")
    try:
        told = json.loads(raw)
        if "policy" in told:
            return PolicyFile.model_validate(told["policy"])
        return signed_policy(told["url"], told["name"], root=told["root"], number=told["number"])
    except CosmatiError as error:
        return error
    except Exception as error:  # noqa: BLE001  (of a file, a repository, a network: the run goes on)
        return PolicyError(f"{FILE} can't be read: {error!r}. Write it with `cosmati policy change`.")
