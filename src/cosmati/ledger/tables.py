"""What a step is read with: the names, routes and policy that the entry in force for it commits to.

A step's cells hold indices. They mean nothing without their tables, and an amendment brings others.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import rfc8785

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.details import decode_details, details_digest, encode_details
from cosmati.ledger.reader import ScannedEntry
from cosmati.ledger.vouched import Taken, problem_with, problem_with_data, read_withdrawals
from cosmati.records.artifacts import label_of, problem_with_artifacts
from cosmati.records.ledger import AmendEntry, MicrobatchCell, RunEntry, StepEntry

RouteWeights = tuple[float, ...]
_OFFERED = ("admit", "gate")
WITHHELD = ("defer", "reject")


@dataclass(frozen=True, slots=True)
class Tables:
    """What entry 0 or an amendment says of classes, regions, routes and policy.

    Attributes:
        index: Index of the entry.
        entry: It.
        details: Its details, as JSON has them.
        classes: Names; a cell's `class_id` is the index.
        regions: Names, in the order of a route's weights.
        routes: A weight for each region; a cell's `route_id` is the index.
        phases: First step and end of each phase of the policy, none without a policy.
        policy: By row and phase, the weights and the decision; empty without a policy. A class has a row for each band.
        changes: What an amendment changed: name, was, now.
        withdrawn: What nobody vouches for any more, and what is done about it.
        bands: Names of the kinds of rows that a policy tells apart in each class, bands for one; one without a name
            where it tells none apart.
        kinds: What rows of each kind are: the number of their band, and their grade by measure, empty where it wasn't
            measured. Empty itself where they have no grades: then a kind is a band.
    """

    index: int
    entry: RunEntry | AmendEntry
    details: Mapping[str, Any]
    classes: tuple[str, ...]
    regions: tuple[str, ...]
    routes: tuple[RouteWeights, ...]
    phases: tuple[tuple[int, int], ...]
    policy: tuple[tuple[tuple[RouteWeights, str], ...], ...]
    changes: tuple[tuple[str, str, str], ...]
    withdrawn: tuple[Taken, ...] = ()
    bands: tuple[str, ...] = ("",)
    kinds: tuple[tuple[int, Mapping[str, str]], ...] = ()

    @property
    def artifacts(self) -> Mapping[str, Mapping[str, Any]]:
        """What was prepared before the run, by its labels."""
        return {label_of(one): one for one in self.details.get("artifacts") or ()}

    @property
    def policy_of_classes(self) -> tuple[tuple[tuple[RouteWeights, str], ...], ...]:
        """By class and phase, what the most that a band of it may: its weights' maximum, and its decision."""
        step = len(self.bands)
        rows = [self.policy[start : start + step] for start in range(0, len(self.policy), step)]
        return tuple(tuple(_most(cells) for cells in zip(*bands, strict=True)) for bands in rows)

    def row_of(self, cell: MicrobatchCell, item: ScannedEntry) -> int:
        """Return the row of the policy that a cell's class and band have.

        Raises:
            TamperError: there's none.
        """
        if self.bands == ("",):
            return cell.class_id
        if cell.band >= len(self.bands):
            raise broken(item, f"band {cell.band} isn't in the tables of entry {self.index}")
        return cell.class_id * len(self.bands) + cell.band

    def class_of(self, cell: MicrobatchCell, item: ScannedEntry) -> str:
        """Return the name of a cell's class.

        Raises:
            TamperError: it isn't in the tables.
        """
        if cell.class_id >= len(self.classes):
            raise broken(item, f"class {cell.class_id} isn't in the tables of entry {self.index}")
        return self.classes[cell.class_id]

    def route(self, cell: MicrobatchCell, item: ScannedEntry) -> RouteWeights:
        """Return the weight that a cell's rows had in each region; 0 everywhere where it has no rows.

        Raises:
            TamperError: its route isn't in the tables.
        """
        if cell.route_id >= len(self.routes):
            raise broken(item, f"route {cell.route_id} isn't in the tables of entry {self.index}")
        return self.routes[cell.route_id] if cell.num_rows else (0.0,) * len(self.regions)


def in_force(items: Iterable[ScannedEntry]) -> Iterator[tuple[ScannedEntry, Tables]]:
    """Yield entries, each with the tables in force for it, after checking steps against them.

    Raises:
        TamperError: tables that don't follow the contract in `cosmati.records.ledger`, or a step that another policy
            than theirs would give.
    """
    tables: Tables | None = None
    for item in items:
        if isinstance(item.entry, RunEntry | AmendEntry):
            tables = read_tables(item, item.entry, tables)
        assert tables is not None, "the history refuses anything else than a run entry as entry 0"
        if isinstance(item.entry, StepEntry):
            check_step(tables, item, item.entry)
        yield item, tables


def read_tables(item: ScannedEntry, entry: RunEntry | AmendEntry, before: Tables | None) -> Tables:
    """Return what an entry says, after the tables that were in force before it.

    Raises:
        TamperError: it doesn't follow the contract in `cosmati.records.ledger`.
    """
    tables = _read_tables(item, entry)
    _check_vouched(item, tables, before)
    return tables


def broken(item: ScannedEntry, reason: str) -> TamperError:
    """Return the error for an entry that was signed as it stands, and can't be right."""
    return TamperError(f"Entry {item.index} breaks the ledger's contract: {reason}. No answer can be drawn from it.")


def is_number(value: object) -> bool:
    """Say whether a JSON value is a number that is finite as a float, and not negative."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def check_step(tables: Tables, item: ScannedEntry, entry: StepEntry) -> None:
    """Check each cell against the policy. Without one its route has to be there, and classes say nothing.

    Raises:
        TamperError: a cell is another one than the policy gives.
    """
    if any(one.action == "stop" and one.step <= entry.step for one in tables.withdrawn):
        raise broken(
            item, f"it is step {entry.step}, and the run should have stopped before it: see entry {tables.index}"
        )
    for number, cell in enumerate(entry.microbatches):
        tables.route(cell, item)
        if not tables.policy:
            continue
        name = f"microbatch {number} of step {entry.step}"
        class_name = tables.class_of(cell, item)
        if cell.phase >= len(tables.phases):
            raise broken(item, f"{name} is in phase {cell.phase}, which isn't in the tables of entry {tables.index}")
        start, end = tables.phases[cell.phase]
        if not start <= entry.step < end:
            raise broken(item, f"{name} says phase {cell.phase}, which goes from step {start} to {end}")
        weights, decision = tables.policy[tables.row_of(cell, item)][cell.phase]
        if tables.routes[cell.route_id] != weights:
            raise broken(
                item,
                f"{name} has the weights {tables.routes[cell.route_id]}, and the policy in force "
                f"(entry {tables.index}) gives {class_name!r} {weights} in that phase",
            )
        if cell.num_rows and decision in WITHHELD:
            raise broken(
                item, f"{name} has {cell.num_rows} rows of {class_name!r}, which the policy says to {decision}"
            )


def _check_vouched(item: ScannedEntry, tables: Tables, before: Tables | None) -> None:
    decisions = tuple(tuple(kind for _, kind in one) for one in tables.policy_of_classes)
    earlier = before.withdrawn if before is not None else ()
    problem = problem_with(tables.withdrawn, earlier, tables.classes, tables.phases, decisions)
    committed = dict(tables.entry.commitments)
    problem = problem or problem_with_data(tables.details, committed.get("data"))
    told, digest = tables.details.get("artifacts"), committed.get("artifacts")
    if not problem and (told is not None or digest is not None):
        problem = problem_with_artifacts(told)
        if not problem and details_digest({"artifacts": told}) != digest:
            problem = "it commits to other preparation artifacts than it names"
    if problem:
        raise broken(item, problem)


def _details_of(item: ScannedEntry) -> dict[str, Any]:
    details = decode_details(item.details) if item.details is not None else {}
    try:
        encode_details(details)  # texts, numbers and depth are then such as whoever asks can write down again
    except LedgerError as error:
        raise broken(item, f"its details aren't canonical JSON: {error.__cause__}") from error
    return details


def _read_tables(item: ScannedEntry, entry: RunEntry | AmendEntry) -> Tables:
    details = _details_of(item)
    classes, regions = (_names(item, details.get(name)) for name in ("classes", "regions"))
    routes = details.get("routes")
    if not isinstance(routes, list) or not all(_is_route(row, regions) for row in routes):
        raise broken(item, "its details have no list of routes with a weight for each region")
    changes = details.get("changes") if isinstance(entry, AmendEntry) else []
    if not isinstance(changes, list) or not all(_is_change(change) for change in changes):
        raise broken(item, "its details don't say what was changed: name, was, now")
    text: Any = details.get("policy_text")
    if text is not None and hashlib.sha256(rfc8785.dumps(text)).digest() != dict(entry.commitments).get("policy"):
        raise broken(item, "the text of its policy isn't that of the digest that it commits to")
    bands = _names(item, details["bands"]) if details.get("bands") else ("",)
    phases, policy = _read_policy(item, details, len(classes) * len(bands), regions)
    kinds = details.get("kinds", [])
    if not isinstance(kinds, list) or (kinds and len(kinds) != len(bands)) or not all(map(_is_kind, kinds)):
        raise broken(item, "its details don't say of each kind of rows which band and grades it has")
    try:
        withdrawn = read_withdrawals(details)
    except ValueError as error:
        raise broken(item, str(error)) from error
    return Tables(
        index=item.index,
        entry=entry,
        details=details,
        classes=classes,
        regions=regions,
        routes=tuple(_weights(row) for row in routes),
        phases=phases,
        policy=policy,
        changes=tuple((name, was, now) for name, was, now in changes),
        withdrawn=withdrawn,
        bands=bands,
        kinds=tuple((band, grades) for band, grades in kinds),
    )


def _read_policy(
    item: ScannedEntry, details: Mapping[str, Any], num_rows: int, regions: tuple[str, ...]
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[tuple[RouteWeights, str], ...], ...]]:
    """Return phases and policy as `Tables` have them."""
    spans, policy = details.get("phases"), details.get("policy")
    if not policy:
        if spans and not _are_spans(spans):
            raise broken(item, "its phases aren't each a name, a first step and an end")
        return (), ()
    if not _are_spans(spans) or not _is_policy(policy, num_rows, len(spans), regions):
        raise broken(item, "its policy isn't a weight for each region and a decision, for each class, band and phase")
    by_class = tuple(tuple((_weights(row), kind) for row, kind in zip(*one, strict=True)) for one in policy)
    return tuple((start, end) for _, start, end in spans), by_class


def _most(cells: Iterable[tuple[RouteWeights, str]]) -> tuple[RouteWeights, str]:
    weights, decisions = zip(*cells, strict=True)
    return tuple(map(max, zip(*weights, strict=True))), min(decisions, key=(*_OFFERED, *WITHHELD).index)


def _are_spans(spans: object) -> TypeGuard[list[list[Any]]]:
    return isinstance(spans, list) and all(
        isinstance(span, list) and len(span) == 3 and all(type(n) is int for n in span[1:]) for span in spans
    )


def _is_policy(policy: object, num_rows: int, num_phases: int, regions: tuple[str, ...]) -> bool:
    return (
        isinstance(policy, list)
        and len(policy) == num_rows
        and all(isinstance(one, list) and len(one) == 2 for one in policy)
        and all(isinstance(column, list) and len(column) == num_phases for one in policy for column in one)
        and all(_is_route(row, regions) for weights, _ in policy for row in weights)
        and all(kind in _OFFERED + WITHHELD for _, decisions in policy for kind in decisions)
    )


def _names(item: ScannedEntry, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(n, str) for n in value) or len(set(value)) < len(value):
        raise broken(item, "its details have no list of distinct class and region names")
    return tuple(value)


def _is_kind(kind: object) -> bool:
    return (
        isinstance(kind, list)
        and len(kind) == 2
        and type(kind[0]) is int
        and isinstance(kind[1], dict)
        and all(isinstance(grade, str) for grade in kind[1].values())
    )


def _is_route(row: object, regions: tuple[str, ...]) -> bool:
    return isinstance(row, list) and len(row) == len(regions) and all(map(is_number, row))


def _is_change(change: object) -> bool:
    return isinstance(change, list) and len(change) == 3 and all(isinstance(text, str) for text in change)


def _weights(row: Iterable[float]) -> RouteWeights:
    return tuple(map(float, row))
