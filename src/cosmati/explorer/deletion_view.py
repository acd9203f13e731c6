"""A deletion as a page shows it: plan, what was done, certificate, before and after.

Whoever fills it in has checked the certificate against a ledger; what isn't borne out is the view's problem.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cosmati.explorer.wording import number
from cosmati.records.deleted import DeletedRecord

_SHORT = 16


class PlannedWay(NamedTuple):
    """A method of the plan: its name, what it costs, and how strong it is, or why it isn't possible."""

    method: str
    costs: str
    strength: str


class KeptCheckpoint(NamedTuple):
    """A checkpoint of the run that had the content: its step and path, and whether it never had it."""

    step: int
    path: str
    is_clean: bool


@dataclass(frozen=True, kw_only=True)
class CertificateWords:
    """What a certificate says, and what it rests on.

    Attributes:
        sentence: what was asked of which run, when, and how it was done.
        digest: SHA-256 of its file, in hex.
        weights_before: Merkle root of the weights that had the content, in hex; empty where it isn't known.
        weights_after: of those that are left.
        checked: what was checked against the ledger.
        not_checked: what rests on the operator's word.
        not_covered: what isn't covered.
        evidence: the ledger's level, in words.
    """

    sentence: str
    digest: str
    weights_before: str
    weights_after: str
    checked: tuple[str, ...]
    not_checked: tuple[str, ...]
    not_covered: tuple[str, ...]
    evidence: str

    @property
    def grounds(self) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
        """What it rests on, and what it leaves: style, heading, lines."""
        return (
            ("met", "Checked against the ledger", self.checked),
            ("open", "On the operator's word", self.not_checked),
            ("unmet", "Not covered", self.not_covered),
        )


@dataclass(frozen=True, kw_only=True)
class DeletionView:
    """What a page shows of a deletion.

    Attributes:
        asked: what was to be forgotten, in words.
        method: by which it was done.
        ways: of the plan.
        num_rows: of what was asked for, as far as the run was given them; 0 where classes were asked for.
        first_contact: the first step with any; None where there's none.
        from_step: where a replay began.
        trained_steps: that it trained.
        num_steps: of the run, to its end.
        checkpoints: of the run that had the content.
        problem: why nothing else is shown; empty where the ledger bears the certificate out.
        certificate: its words; None with a problem.
        about: what the program that did it tells besides, unsigned; None where it told nothing.
        commands: with which a reader checks it.
    """

    asked: str
    method: str
    ways: tuple[PlannedWay, ...]
    num_rows: int
    first_contact: int | None
    from_step: int
    trained_steps: int
    num_steps: int = 0
    checkpoints: tuple[KeptCheckpoint, ...] = ()
    problem: str = ""
    certificate: CertificateWords | None = None
    about: DeletedRecord | None = None
    commands: tuple[str, ...] = ()

    @property
    def changed(self) -> tuple[tuple[str, str, str], ...]:
        """Rows of the table of the models: a figure, before, after."""
        words = self.certificate
        roots = (words.weights_before[:_SHORT], words.weights_after[:_SHORT]) if words else ("", "")
        rows = [("weights, Merkle root", *roots)] if roots[0] else []
        if self.about is None:
            return tuple(rows)
        taught = ", ".join(f"{one.region} {one.num_rows:,}" for one in self.about.taught)
        return (*rows, ("its rows that taught, by region", taught or "none", "none"), *self._measured(is_attack=False))

    @property
    def attacked(self) -> tuple[tuple[str, str, str], ...]:
        """Rows of the table of what is found of the content: a figure, before, after."""
        return self._measured(is_attack=True)

    def _measured(self, *, is_attack: bool) -> tuple[tuple[str, str, str], ...]:
        found = self.about.measures if self.about else ()
        return tuple((m.name, _figure(m.before), _figure(m.after)) for m in found if m.is_attack == is_attack)


def _figure(value: float) -> str:
    """Return a count as one, and other figures with four digits."""
    return f"{value:,.0f}" if value.is_integer() else number(value, 4)
