"""What a ledger says of the steps that stand: under what each was taken, and from where a part of them can be replayed.

A resume supersedes steps and amendments change what they're read by. Here both are resolved: a step has one entry, and
the run is cut into spans, in each of which it was one recipe in one environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cosmati.errors import LedgerError
from cosmati.ledger.details import decode_details
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.reader import ScannedEntry
from cosmati.ledger.roots import FORGOTTEN, drops
from cosmati.ledger.tables import Tables, broken, in_force
from cosmati.records.ledger import AmendEntry, CheckpointEntry, EndEntry, ResumeEntry, StepEntry


@dataclass(frozen=True, slots=True)
class RecipeSpan:
    """Steps that one recipe took in one environment, over data from which the same was forgotten.

    Attributes:
        first: number of its first step.
        end: of the first one after it.
        tables: in force at its last step.
    """

    first: int
    end: int
    tables: Tables

    @property
    def recipe(self) -> Mapping[str, str]:
        """What made the run itself, by name, as texts."""
        return _texts(self.tables.details.get("recipe"))

    @property
    def environment(self) -> Mapping[str, str]:
        """What was around it: PyTorch's release, threads, processor."""
        return _texts(self.tables.details.get("environment"))

    @property
    def forgotten(self) -> str:
        """Digest of the last deletion in whose place the steps had tombstones; empty where there was none."""
        return _forgotten(self.tables)


class StandingSteps:
    """The steps of a verified ledger that stand.

    Args:
        ledger: of the run.

    Attributes:
        ledger: as given.
        spans: in the order of steps, without a gap.
        checkpoints: entries of model checkpoints that lie on the steps that stand, by their number of steps.
        roots: each root of parameters and buffers that lies on the steps that stand, of checkpoints and ends, by step.
        dropped: in words, what was signed of a model from which something was dropped: no step gives that.
        signed_states: step and state digest of all model checkpoints, superseded ones too.
        end: the run's end, where it stands.
        cuts: from which step on each microbatch was cut into how many pieces, where memory was short.
        withdrawn: from which step on what was withdrawn, as the tables in force say it; None for nothing.
        num_steps: that stand.
    """

    def __init__(self, ledger: VerifiedLedger) -> None:
        self.ledger = ledger
        self.spans: tuple[RecipeSpan, ...] = ()
        self.checkpoints: dict[int, list[CheckpointEntry]] = {}
        self.roots: dict[int, set[bytes]] = {}
        self.dropped: tuple[str, ...] = ()
        self.signed_states = set[tuple[int, bytes]]()
        self._forgotten_at = set[tuple[CheckpointEntry, str]]()
        self.end: EndEntry | None = None
        self.cuts: list[tuple[int, int]] = []
        self.withdrawn: list[tuple[int, Mapping[str, Any] | None]] = []
        self.num_steps = len(ledger.standing)
        for item, tables in in_force(ledger.entries()):
            if isinstance(item.entry, StepEntry) and item.index in ledger.standing:
                self._take_step(item, item.entry, tables)
            elif isinstance(item.entry, ResumeEntry):
                self._go_back(item.entry.from_step)
            elif isinstance(item.entry, CheckpointEntry | EndEntry):
                self._take_state(item.entry, tables)
            elif isinstance(item.entry, AmendEntry) and drops(tables):
                self.dropped = (f"the weights from which something was dropped after {item.entry.step} steps",)

    def _take_state(self, entry: CheckpointEntry | EndEntry, tables: Tables) -> None:
        if isinstance(entry, CheckpointEntry):
            self.signed_states.add((entry.step, entry.state_digest))
            self._forgotten_at.add((entry, _forgotten(tables)))
        if self.dropped:
            return
        self.roots.setdefault(entry.step, set()).add(entry.parameter_root)
        if isinstance(entry, EndEntry):
            self.end = entry
        else:
            self.checkpoints.setdefault(entry.step, []).append(entry)

    def _go_back(self, step: int) -> None:
        self.end = None
        self.checkpoints = {at: own for at, own in self.checkpoints.items() if at <= step}
        self.roots = {at: own for at, own in self.roots.items() if at <= step}
        if step < self.num_steps:  # and what was dropped before is trained anew
            self.dropped = ()

    def _take_step(self, item: ScannedEntry, entry: StepEntry, tables: Tables) -> None:
        own = RecipeSpan(entry.step, entry.step + 1, tables)
        last = self.spans[-1] if self.spans else None
        is_same = last is not None and (
            last.tables is tables
            or (last.recipe, last.environment, last.forgotten) == (own.recipe, own.environment, own.forgotten)
        )
        if last is not None and is_same:
            self.spans = (*self.spans[:-1], RecipeSpan(last.first, own.end, tables))
        else:
            self.spans = (*self.spans, own)
        withdrawn = tables.details.get("withdrawn")
        if withdrawn != (self.withdrawn[-1][1] if self.withdrawn else None):
            self.withdrawn.append((entry.step, withdrawn))
        whole = self.ledger.details.get("num_microbatches")
        number = max(microbatch_of_cells(item, entry), default=0) + 1
        pieces = number // whole if isinstance(whole, int) and whole > 0 else 1
        if pieces > (self.cuts[-1][1] if self.cuts else 1):
            self.cuts.append((entry.step, pieces))

    def states(self, step: int, forgotten: str) -> frozenset[bytes]:
        """Return digests of the states that are signed after so many steps, of a run that has forgotten just that."""
        own = (one for one in self.checkpoints.get(step, ()) if (one, forgotten) in self._forgotten_at)
        return frozenset(one.state_digest for one in own)

    def steps(self, first: int, end: int) -> Iterator[tuple[ScannedEntry, StepEntry, Tables]]:
        """Yield the entries of steps `first` to `end - 1`, with the tables in force for them, in order."""
        for item, entry, tables in self.ledger.steps():
            if first <= entry.step < end and item.index in self.ledger.standing:
                yield item, entry, tables

    def segment(self, first: int, end: int) -> range:
        """Return steps `first` to `end - 1`.

        Raises:
            LedgerError: there are none, or fewer were signed.
        """
        if not 0 <= first < end:
            raise LedgerError(f"Steps {first}:{end} are none. Write FIRST:END, where END is the first one left out.")
        if end > self.num_steps:
            msg = f"The ledger has signed {self.num_steps} steps, and {end} were asked for. Ask for fewer, or later."
            raise LedgerError(msg)
        return range(first, end)


def _forgotten(tables: Tables) -> str:
    told = tables.details.get(FORGOTTEN)
    if not isinstance(told, Mapping) or told.get("method") == "drop":
        return ""
    return str(told.get("asked"))


def microbatch_of_cells(item: ScannedEntry, entry: StepEntry) -> list[int]:
    """Return of which microbatch each cell of a step is."""
    if item.details is not None and b'"cell_microbatches"' in item.details:
        owners = decode_details(item.details).get("cell_microbatches")
        if not isinstance(owners, list) or not all(type(m) is int and m >= 0 for m in owners):
            raise broken(item, "its cells don't say of which microbatches they are")
        return owners
    return list(range(len(entry.microbatches)))


def _texts(value: object) -> dict[str, str]:
    """Return an object of texts; nothing where it's something else, so that whatever is compared with it differs."""
    items = value.items() if isinstance(value, Mapping) else ()
    return {name: text for name, text in items if isinstance(text, str)}
