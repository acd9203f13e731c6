"""Where a step that was run again isn't the step that a ledger holds, in words: field by field, region by region."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from cosmati.ledger.details import decode_details, encode_details
from cosmati.ledger.reader import ScannedEntry
from cosmati.ledger.sealing import COLUMNS, SEALED, ColumnKeys, SealedClasses, boxes_of, divided, merged
from cosmati.ledger.tables import Tables
from cosmati.records.ledger import DIGEST_SIZE, MicrobatchCell, StepEntry

_MEASURED = (
    "step",
    "loss",
    "gradient_norm",
    "packed_gradient_norm",
    "direction",
    "packed_direction",
    "entropy",
    "packed_entropy",
    "update_norm",
    "update_direction",
    "region_digests",
    "sub_steps",
    "kept_rows",
    "cell_microbatches",
    "left_out",
    SEALED,
)
"""Details that this release computes for every step: one that only the ledger has, or only the replay, differs."""

_BY_REGION = frozenset(
    {*(name for name in _MEASURED if name.endswith(("norm", "direction", "entropy"))), "region_digests"}
)
"""Details that have a value for each region, of a microbatch or of all."""

_OF_THE_CLOCK = ("when",)
"""Details that no replay can give again."""

UNKNOWN_ROWS = bytes(DIGEST_SIZE)
"""In place of a row commitment that nobody can make here: it's compared with nothing."""

_ABSENT = object()


_SEALABLE = tuple(column.replace("_", " ") for column in COLUMNS)


@dataclass(frozen=True, slots=True)
class LedgerDifference:
    """Something that came out otherwise.

    Attributes:
        step: number of the step; None for what is the same in all of them.
        what: the field, with microbatch and region.
        logged: what the ledger says.
        replayed: what the replay found.
    """

    step: int | None
    what: str
    logged: str
    replayed: str

    def __str__(self) -> str:
        where = "" if self.step is None else f"step {self.step}, "
        return f"{where}{self.what}: {self.replayed}, and the ledger says {self.logged}"

    def without_sealed(self) -> str:
        """Return it in words for a file that others read: of a column that may be sealed, without values."""
        if not self.what.startswith(_SEALABLE):
            return str(self)
        where = "" if self.step is None else f"step {self.step}, "
        return f"{where}{self.what}: it differs, and the values are sealed"


def compare_step(
    item: ScannedEntry,
    logged: StepEntry,
    tables: Tables,
    made: StepEntry,
    details: Mapping[str, Any],
    *,
    origin: str = "",
    keys: ColumnKeys | None = None,
) -> tuple[list[LedgerDifference], set[str]]:
    """Return how a step that was run again differs from its entry, and which details couldn't be compared.

    Args:
        item: of the ledger.
        logged: its entry.
        tables: in force for it; those of the replay say the same.
        made: what the replay would have written; a row commitment may be `UNKNOWN_ROWS`.
        details: likewise.
        origin: name of the log.
        keys: of columns that are sealed; what they don't open isn't compared.
    """
    found: list[tuple[str, object, object]] = []
    skipped = set[str]()
    if logged.policy_digest != made.policy_digest:
        found.append(("policy digest", logged.policy_digest, made.policy_digest))
    if logged.parameter_root not in (None, made.parameter_root):
        found.append(("root of the parameters", logged.parameter_root, made.parameter_root))
    told = decode_details(item.details) if item.details is not None else {}
    if SEALED in told or SEALED in tables.details:
        told, details, unread = _as_sealed(told, tables, made, details, origin, keys)
        skipped |= unread
    owners = told.get("cell_microbatches")
    names = [f"microbatch {m}" for m in (owners if isinstance(owners, list) else range(len(logged.microbatches)))]
    if len(logged.microbatches) != len(made.microbatches):
        found.append(("number of cells", len(logged.microbatches), len(made.microbatches)))
    for name, one, other in zip(names, logged.microbatches, made.microbatches, strict=False):
        found += [(f"{field}, {name}", a, b) for field, a, b in _unlike_cells(one, other, tables)]
    if encode_details(told) != (line := encode_details(details)):
        now = decode_details(line)
        compared = [name for name in {**told, **now} if name in _MEASURED or (name in told and name in now)]
        compared = [name for name in compared if name not in _OF_THE_CLOCK]
        skipped |= {*told, *now} - {*compared}
        for name in sorted(compared):
            found += _unlike_details(name, told.get(name), now.get(name), tables.regions)
    return [LedgerDifference(logged.step, what, _say(was), _say(now)) for what, was, now in found], skipped


def _as_sealed(
    told: Mapping[str, Any],
    tables: Tables,
    made: StepEntry,
    details: Mapping[str, Any],
    origin: str,
    keys: ColumnKeys | None,
) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
    """Return the details of both sides without what stays sealed, and what that is, in words.

    What is sealed of the one and not of the other differs: it's given as boxes by class and column.
    """
    classes = SealedClasses.of(tables.details, tables.classes, origin)
    known, left = classes.open(told, made.step, keys)
    clear, parts = divided(details, made.microbatches, classes.names)
    boxes = {(name, column) for name, column, _ in boxes_of(told)}
    places = {(name, column) for name, own in parts.items() for column in own}
    now = merged(clear, parts, places - {*left})
    if boxes != places:
        known |= {SEALED: [list(one) for one in sorted(boxes)]}
        now |= {SEALED: [list(one) for one in sorted(places)]}
    return known, now, {f"{column} of {name}, which is sealed" for name, column in left}


def compare_tables(
    step: int, logged: Mapping[str, Any], made: Mapping[str, Any], names: Sequence[str]
) -> Iterator[LedgerDifference]:
    """Yield how the tables with which a replay's steps are read differ from those in force in the ledger.

    Args:
        step: from which on they're in force.
        logged: details of the entry in force.
        made: likewise, of the replay.
        names: of the tables.
    """
    now = decode_details(encode_details(made))
    for name in names:
        for path, was, is_now in _unlike(logged.get(name), now.get(name))[:1]:
            what = ".".join(map(str, (name, *path)))
            yield LedgerDifference(step, f"table {what}", _say(was), _say(is_now))


def _unlike_cells(one: MicrobatchCell, other: MicrobatchCell, tables: Tables) -> Iterator[tuple[str, object, object]]:
    listed: Mapping[str, Sequence[Any]] = {
        "class_id": tables.classes,
        "band": tables.bands,
        "phase": _names_of(tables.details.get("phases")),
    }
    for field in fields(one):
        was, now = getattr(one, field.name), getattr(other, field.name)
        if was == now or (field.name == "row_commitment" and now == UNKNOWN_ROWS):
            continue
        if field.name == "route_id":
            yield from _unlike_routes(_at(tables.routes, was), _at(tables.routes, now), tables.regions)
            continue
        names = listed.get(field.name, ())
        yield field.name.removesuffix("_id").replace("_", " "), _at(names, was), _at(names, now)


def _names_of(phases: object) -> list[Any]:
    return [one[0] for one in phases if isinstance(one, list) and one] if isinstance(phases, list) else []


def _at(names: Sequence[Any], index: Any) -> object:  # noqa: ANN401  (a cell's field)
    return names[index] if names and isinstance(index, int) and index < len(names) and names[index] != "" else index


def _unlike_routes(was: object, now: object, regions: Sequence[str]) -> Iterator[tuple[str, object, object]]:
    if not isinstance(was, tuple) or not isinstance(now, tuple):
        yield "route", was, now
        return
    for region, a, b in zip(regions, was, now, strict=True):
        if a != b:
            yield f"weight of its route in region {region}", a, b


def _unlike_details(
    name: str, logged: object, made: object, regions: Sequence[str]
) -> Iterator[tuple[str, object, object]]:
    for path, was, now in _unlike(logged, made):
        yield _label(name, path, regions), was, now


def _unlike(was: object, now: object) -> list[tuple[tuple[str | int, ...], object, object]]:
    """Return where two values differ: the way there, and what is there."""
    leaves, others = dict(_leaves(was)), dict(_leaves(now))
    pairs = [(path, leaves.get(path, _ABSENT), others.get(path, _ABSENT)) for path in {**leaves, **others}]
    found = [(path, one, other) for path, one, other in pairs if type(one) is not type(other) or one != other]
    # What is empty has no leaves.
    return found if found or encode_details({"": was}) == encode_details({"": now}) else [((), was, now)]


def _leaves(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], object]]:
    """Yield what is in nested objects and lists, with the way there."""
    if not isinstance(value, Mapping | list | tuple):
        yield path, value
        return
    for key, one in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from _leaves(one, (*path, key))


def _label(name: str, path: tuple[str | int, ...], regions: Sequence[str]) -> str:
    """Return which value of a step's details it is, in words."""
    words = name.replace("_", " ")
    depth = 1 if name.startswith("update") else 2
    if name in _BY_REGION and len(path) == depth and isinstance(path[-1], int) and path[-1] < len(regions):
        if name == "region_digests":
            return f"digest of region {regions[path[-1]]} {path[0]} the step"
        return ", ".join([f"{words} of region {regions[path[-1]]}", *(f"microbatch {m}" for m in path[:-1])])
    return " ".join([words, *map(str, path)])


def _say(value: object) -> str:
    if value is _ABSENT:
        return "nothing"
    return value.hex()[:16] if isinstance(value, bytes) else "none" if value is None else repr(value)
