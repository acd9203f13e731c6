"""What is vouched for in a run, what became of it, and what follows, in words and as facts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from cosmati.core.plan import Promise
from cosmati.provenance.voucher import POLICY, LostVoucher, VouchedData, Voucher, Withdrawn
from cosmati.records.artifacts import EVALUATION_DATA
from cosmati.routing.policy import CompiledPolicy
from cosmati.train.asking import Watched
from cosmati.train.assembly import Assembly
from cosmati.train.facts import RunFacts
from cosmati.train.identity import Change


class Thing(NamedTuple):
    """Something that is vouched for.

    Attributes:
        of: what it is: empty of data, `POLICY`, or the label of an artifact.
        watched: it, to be asked about.
    """

    of: str
    watched: Watched


class News(NamedTuple):
    """What has changed.

    Attributes:
        changes: in words, for the record.
        vouched: who vouches now for what they vouch for otherwise, or for longer, by what it is; none on all ranks but
            the first.
        withdrawn: what they have taken back; None for nothing.
        policy: that is in force with it.
    """

    changes: Sequence[Change]
    vouched: Mapping[str, VouchedData]
    withdrawn: Withdrawn | None
    policy: CompiledPolicy | None

    def facts(self, was: RunFacts) -> dict[str, Any]:
        """Return the run's facts that are others now."""
        now: dict[str, Any] = {"withdrawn": self.withdrawn, "policy": self.policy}
        if "" in self.vouched:
            now["vouched"] = self.vouched[""]
        if POLICY in self.vouched:
            now["vouched_policy"] = self.vouched[POLICY]
        if self.vouched.keys() - {"", POLICY}:
            artifacts = [replace(one, vouched=self.vouched.get(one.label, one.vouched)) for one in was.artifacts]
            now["artifacts"] = tuple(artifacts)
        return now


def without(lost: Mapping[Any, LostVoucher], known: Collection[Any]) -> list[tuple[Any, LostVoucher]]:
    """Return what is lost and wasn't known to be, with its key."""
    return [(key, one) for key, one in lost.items() if key not in known]


def of_thing(answer: Literal["stop", "reject"], of: str) -> Literal["stop", "reject", "skip"]:
    """Return what a grace's answer means for a thing: of a policy or a tokenizer no part can be left out."""
    if not of or answer == "stop":
        return answer
    return "skip" if of.startswith(EVALUATION_DATA) else "stop"


def holds(of: str, voucher: Voucher) -> str:
    """Return in words by whom something is signed, and until when: where that is otherwise, it goes on record."""
    keys = f"signed by {', '.join(keyid[:12] for keyid in voucher.keyids)}"
    if of == POLICY:  # each version that is signed lets all of them hold for longer
        return keys
    besides = f", as version {', '.join(voucher.others)} is" if voucher.others else ""
    return f"{keys} until {voucher.expires}{besides}"


def deletion(assembly: Assembly, class_path: str) -> str:
    """Return how what a class has taught is deleted, in words."""
    own = [g.pair for g in assembly.plan.guarantees if g.promise is Promise.ISOLATED and g.holds and g.pair]
    regions = [region for name, region in own if name == class_path]
    if regions:
        return (
            f"What it has taught is in {', '.join(regions)} alone, while the plan promises isolated({class_path}, "
            f"{regions[0]}): cosmati.methods.functional.drop_isolated(model, {class_path!r}) deletes it."
        )
    return "What it has taught is only gone from a run that is begun again without it."


def targets(found: VouchedData) -> set[str]:
    """Return what something that was found is about."""
    return {one.target for one in found.vouchers} | {one.target for one in found.lost}
