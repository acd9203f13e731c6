"""The profile under which a run keeps its ledger: `self`, or `attested`, which takes witnesses to begin and to go on.

Entry 0 commits to it. The witnesses that it names are the operator's choice: what they say counts for an auditor only
where the auditor trusts them (`cosmati.ledger.evidence`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from cosmati.errors import LedgerError
from cosmati.ledger.cosignature import WitnessKey
from cosmati.ledger.cosigned import CosignedHead
from cosmati.ledger.evidence import utc

PROFILES = SELF, ATTESTED = "self", "attested"
HOUR_SECONDS = 3600
PATIENCE_SECONDS = 900


@dataclass(frozen=True, slots=True)
class LedgerProfile:
    """Whom a run asks to cosign its ledger, and whether it needs them.

    Attributes:
        name: `self` goes on without them; `attested` doesn't.
        witnesses: who are asked.
        quorum: how many of them `attested` needs.
    """

    name: str = SELF
    witnesses: tuple[WitnessKey, ...] = ()
    quorum: int = 0

    @property
    def facts(self) -> dict[str, object]:
        """What entry 0 says of it."""
        return {"profile": self.name, "witnesses": [one.text for one in self.witnesses], "quorum": self.quorum}

    @classmethod
    def of(cls, details: Mapping[str, Any]) -> LedgerProfile:
        """Read what the tables of a ledger say; nothing there is `self`, without witnesses.

        Raises:
            LedgerError: it isn't of the form that runs write.
        """
        told = details.get("witnessing")
        if told is None:
            return cls()
        try:
            name, quorum = told["profile"], told["quorum"]
            found = cls(name, tuple(map(WitnessKey.parse, told["witnesses"])), quorum)
            if name not in PROFILES or type(quorum) is not int or quorum < (name == ATTESTED):
                raise ValueError("it names no profile, or no quorum")
            if quorum > len(found.witnesses):
                raise ValueError("its quorum is one that nobody can meet")
        except (KeyError, TypeError, ValueError, AttributeError, LedgerError) as error:
            raise LedgerError(f"what it says of its witnesses can't be read: {error!r}") from error
        return found

    def __str__(self) -> str:
        """Say it in words."""
        names = ", ".join(one.name for one in self.witnesses)
        if self.name == SELF:
            return f"self: operator-asserted; {f'{names} are asked to cosign' if names else 'nobody else is asked'}"
        return f"attested: {self.quorum} of {len(self.witnesses)} witnesses ({names}) at entry 0, hourly, at the end"


OPERATOR_ALONE = LedgerProfile()


def lapses(
    profile: LedgerProfile, heads: Sequence[CosignedHead], *, first_step: int | None, size: int, has_ended: bool
) -> list[str]:
    """Return where an attested run went on without its quorum, a line each; nothing of a run that isn't attested.

    Args:
        profile: the run's, as entry 0 has it.
        heads: cosigned by the profile's witnesses, smallest first.
        first_step: index of the first step's entry, None before it.
        size: of the signed tree.
        has_ended: whether the run has.
    """
    if profile.name != ATTESTED:
        return []
    met = [
        (head.size, sorted(one.time for one in given)[profile.quorum - 1])
        for head, given, _, _ in heads
        if len(given) >= profile.quorum
    ]
    found = []
    if not met or (first_step is not None and met[0][0] > first_step):
        found.append("entry 0 wasn't witnessed before the first step")
    for (_, before), (_, after) in pairwise(met):
        if after - before > HOUR_SECONDS + PATIENCE_SECONDS:
            found.append(f"nothing was witnessed between {utc(before)} and {utc(after)}")
    if has_ended and (not met or met[-1][0] < size):
        found.append("the end isn't witnessed: `cosmati ledger witness sign` sends it")
    return found
