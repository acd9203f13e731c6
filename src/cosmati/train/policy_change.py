"""What a run may do with a policy that an authority has signed: the operator alone tightens, the authority loosens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cosmati.errors import CheckpointError, LedgerError
from cosmati.ledger.reader import read_verifier_key
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.provenance.voucher import VouchedPolicy
from cosmati.records.grace import more_grace
from cosmati.records.joint_classes import is_joint
from cosmati.routing.policy import compile_policy, partition_by
from cosmati.routing.policy_analysis import CellChange, diff
from cosmati.routing.policy_diff import other_changes
from cosmati.routing.policy_file import PolicyFile
from cosmati.train.assembly import Assembly
from cosmati.train.identity import Change

Anchor = dict[str, Any]
"""Of a run under a signed policy, as JSON has it: the `text` in force, and the `root` and `number` last signed."""
_NAMED = 4


def anchor_of(policy: PolicyFile | None) -> Anchor | None:
    """Return what a later change is held against; None where the policy is declared."""
    vouched = policy.vouched if policy is not None else None
    if policy is None or vouched is None:
        return None
    return {"text": policy.to_mapping(), "root": vouched.voucher.root, "number": vouched.number}


def refuse_anothers(policy: PolicyFile | None, assembly: Assembly) -> None:
    """Refuse a policy that was signed for another run.

    Raises:
        CheckpointError: it was.
    """
    if policy is not None and policy.vouched is not None and is_anothers(policy, assembly):
        msg = (
            f"{policy.vouched.voucher.target} was signed as a change of the run {policy.vouched.statement['run']}, and "
            f"this is {_run_of(assembly) or 'a new one'}. Take another version of the policy: number=."
        )
        raise CheckpointError(msg)


def is_anothers(policy: PolicyFile, assembly: Assembly) -> bool:
    """Return whether a policy was signed for another run."""
    statement = policy.vouched.statement if policy.vouched is not None else {}
    return "run" in statement and statement["run"] != _run_of(assembly)


def change_policy(
    was: Anchor | None, policy: PolicyFile | None, assembly: Assembly, step: int
) -> tuple[Anchor | None, list[Change]]:
    """Return what later changes are held against, and what to record of this one.

    Args:
        was: as the checkpoint has it; None where its policy was declared.
        policy: under which the run goes on.
        assembly: of the run as it goes on.
        step: at which it does.

    Raises:
        CheckpointError: it loosens what was signed, and the authority hasn't signed that.
    """
    if was is None:
        return anchor_of(policy), []
    assert policy is not None, "without one the taxonomy is gone, and the run another one"
    old = PolicyFile.model_validate(was["text"])
    if old.digest == policy.digest:
        return was, []
    loosened = [change for change in _changes(old, assembly, step) if change.direction == "loosens"]
    # What a run does where data lack isn't more or less: it stays as it was signed.
    others = [line for line in other_changes(old, policy) if not line.startswith("grace:")]
    more = [*map(str, loosened), *others, *_more_grace(old, policy, assembly)]
    vouched = policy.vouched if policy.signed_root == was["root"] else None
    number = max(was["number"], vouched.number) if vouched else was["number"]
    anchor = {"text": policy.to_mapping(), "root": was["root"], "number": number}
    if not more:
        by = "the operator" if vouched is None else f"the authority {was['root'][:12]}, {vouched.voucher.target}"
        return anchor, [Change("policy.changed_by", None, f"{by}, who only tightens")]
    wrong = _missing(vouched, was, old.digest.hex(), loosened, assembly, step)
    if wrong:
        raise _loosens(was, step, more, wrong)
    assert vouched is not None, "nothing is missing"
    return anchor, [Change("policy.changed_by", None, f"the authority {was['root'][:12]}, {vouched.voucher.target}")]


def _more_grace(old: PolicyFile, new: PolicyFile, assembly: Assembly) -> list[str]:
    assert assembly.policy is not None, "a governed run"
    was, now = old.to_mapping().get("grace"), new.to_mapping().get("grace")
    return more_grace(was, now, assembly.policy.phases[-1].end_step)


def _changes(old: PolicyFile, assembly: Assembly, step: int) -> list[CellChange]:
    """Return what changes in the steps that are still to come."""
    now = assembly.policy
    assert now is not None, "a governed run"
    before = compile_policy(
        old,
        taxonomy=Taxonomy(old.taxonomy, "the same", tuple((name, "") for name in now.classes if not is_joint(name))),
        joint=[name for name in now.classes if is_joint(name)],
        regions=partition_by(old, assembly.model),
        num_steps=now.phases[-1].end_step,
        resolve=assembly.budget.step_of,
    )
    return [change for change in diff(before, now) if change.end_step > step]


def _missing(
    vouched: VouchedPolicy | None,
    was: Anchor,
    previous: str,
    loosened: Sequence[CellChange],
    assembly: Assembly,
    step: int,
) -> str:
    """Return why a signature doesn't allow this change here; empty where it does."""
    if vouched is None:
        return "the authority that signed the policy before hasn't signed this one"
    statement, name = vouched.statement, vouched.voucher.target
    wanted: Mapping[str, object] = {"run": _run_of(assembly), "previous": previous}
    for field, value in wanted.items():
        if statement.get(field) != value:
            return f"{name} was signed for the {field} {statement.get(field, '(none)')}, and here that is {value}"
    if vouched.number != was["number"] + 1:
        return f"{name} isn't the version after number {was['number']}"
    if not isinstance(begin := statement.get("from_step"), int) or begin > step:
        return f"{name} may act from step {begin} on, and the run is at step {step}: go on with the policy before"
    if any(not one.old_weight and one.new_weight for one in loosened) and len(vouched.voucher.keyids) < 2:
        return f"{name} admits again what was denied, which takes two signers, and one has signed"
    return ""


def _loosens(was: Anchor, step: int, what: Sequence[str], why: str) -> CheckpointError:
    more = f" and {len(what) - _NAMED} more" if len(what) > _NAMED else ""
    signed = f"{was['root'][:12]} has signed (number {was['number']})"
    return CheckpointError(
        f"From step {step} on, the policy would allow more than, or something else than, the one that {signed}: "
        f"{'; '.join(what[:_NAMED])}{more}. Only that authority may, and {why}. Have the change signed: "
        "`cosmati policy sign FILE --run RUN --from-step STEP`; or go on with the policy before, or less."
    )


def _run_of(assembly: Assembly) -> str:
    """Return the verifier key of the run's ledger: no other run has it. Empty where there's no ledger yet."""
    folder = assembly.config.run_folder
    try:
        return read_verifier_key(folder / "ledger").text if folder is not None else ""
    except LedgerError:
        return ""
