"""What was withdrawn from a run, as its ledger says it: for a replay, which asks nobody."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cosmati.core.clock import Clock
from cosmati.provenance.voucher import Withdrawn
from cosmati.routing.policy import CompiledPolicy
from cosmati.train.assembly import Assembly
from cosmati.train.authority_watch import AuthorityWatch
from cosmati.train.observers.ledger_checks import Recorded
from cosmati.train.run.session import OpenRun
from cosmati.train.vouched_things import News


class RecordedVouchers(AuthorityWatch):
    """Stands in for the watch over those who vouch for the data.

    Args:
        assembly: of the replay.
        told: from which step on the ledger says what was withdrawn, rising.
    """

    def __init__(self, assembly: Assembly, told: Sequence[tuple[int, Withdrawn | None]]) -> None:
        self._a, self._base, self._told = assembly, assembly.policy, told
        self._things = ()  # nobody is asked for anything
        self._withdrawn: Withdrawn | None = None

    def resume(self, recorded: Recorded, clock: Clock) -> News | None:  # noqa: ARG002  (the run's)
        """Go by what was in force."""
        return self._at(clock.step)

    def before_step(self, run: OpenRun, clock: Clock, save: Callable[[], object]) -> None:  # noqa: ARG002
        """Go by what came into force with this step."""
        if (news := self._at(clock.step)) is not None:
            run.amend(clock, news.changes, **news.facts(run.facts))

    def start(self) -> None:
        """Ask nobody."""

    def close(self) -> None:
        """Nobody was asked."""

    def _at(self, step: int) -> News | None:
        now = next((withdrawn for first, withdrawn in reversed(self._told) if first <= step), None)
        if now == self._withdrawn:
            return None
        self._withdrawn = now
        policy: CompiledPolicy | None = self._tightened(self.withdrawals)
        if policy is not None:
            self._a.router.tighten(policy)
        return News((), {}, now, policy)
