"""What the details of a block of steps say of each cell and region: weights that were learnt, and gradient norms.

Blocks are read at once; what looks unlike what runs write is left to `read_norms` and `learnt_weights`, which read one
step and say what is wrong with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from cosmati.ledger.columns import StepBlock
from cosmati.ledger.details import decode_details
from cosmati.ledger.reader import ScannedEntry
from cosmati.ledger.sealing import SEALED, ColumnKeys, SealedClasses
from cosmati.ledger.tables import broken, is_number
from cosmati.records.ledger import StepEntry

CellValues = NDArray[np.float64]


def open_details(
    item: ScannedEntry, entry: StepEntry, classes: SealedClasses, keys: ColumnKeys | None
) -> tuple[Mapping[str, Any], list[int]]:
    """Return a step's details with what the keys open in its place, and the cells whose gradient norms stay sealed.

    Raises:
        TamperError: what is sealed isn't of the form that runs write, or doesn't open with its key.
    """
    details = decode_details(item.details) if item.details is not None else {}
    if SEALED not in details:
        return details, []
    found, left = classes.open(details, entry.step, keys)
    return found, classes.hidden(left, [cell.class_id for cell in entry.microbatches], "gradient_norm")


def read_norms(
    item: ScannedEntry, num_microbatches: int, num_regions: int, details: Mapping[str, Any] | None = None
) -> dict[int, list[float | None]]:
    """Return the gradient norms of a step by microbatch and region; `details` are its own, opened.

    Raises:
        TamperError: they don't follow the contract in `cosmati.records.ledger`.
    """
    if details is None:
        details = decode_details(item.details) if item.details is not None else {}
    value = details.get("gradient_norm")
    norms: dict[int, list[float | None]] = {}
    for name, row in (value if isinstance(value, dict) else {}).items():
        is_index = name.isascii() and name.isdigit() and str(int(name)) == name and int(name) < num_microbatches
        if not is_index or not isinstance(row, list) or len(row) != num_regions:
            raise broken(item, f"gradient_norm {name!r} isn't a microbatch with a value for each region")
        if not all(v is None or is_number(v) for v in row):
            raise broken(item, f"gradient_norm {name!r} has a value that is neither a norm nor null")
        norms[int(name)] = row
    return norms


def learnt_weights(item: ScannedEntry, entry: StepEntry, num_regions: int) -> list[list[float | None]]:
    """Return what each microbatch weighed in each region, before its route; None where the region didn't learn."""
    value = decode_details(item.details).get("sub_steps") if item.details is not None else None
    if value is None:
        return [[cell.weight] * num_regions for cell in entry.microbatches]
    weights: list[list[float | None]] = [[None] * num_regions for _ in entry.microbatches]
    for sub_step in value if isinstance(value, list) else [None]:
        regions, own = (sub_step.get(n) if isinstance(sub_step, dict) else None for n in ("regions", "weights"))
        if not isinstance(regions, list) or not all(type(r) is int and 0 <= r < num_regions for r in regions):
            raise broken(item, "a sub-step doesn't say by index which regions learnt")
        if not isinstance(own, list) or len(own) != len(weights) or not all(map(is_number, own)):
            raise broken(item, "a sub-step doesn't say what each microbatch weighed")
        for row, weight in zip(weights, own, strict=True):
            for region in regions:
                row[region] = (row[region] or 0.0) + weight
    return weights


class _SubStep(msgspec.Struct):
    regions: list[int]
    weights: list[float]


class _Details(msgspec.Struct):
    gradient_norm: dict[str, list[float | None]] | None = None
    sub_steps: list[_SubStep] | None = None
    cell_microbatches: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]] | None = None
    loss: float | None = None
    sealed: dict[str, dict[str, str]] | None = None


_DECODER = msgspec.json.Decoder(_Details)


@dataclass(frozen=True, slots=True)
class BlockDetails:
    """Arrays over the steps, cells and regions of a block.

    Attributes:
        weights: what a cell weighed in a region before its route, 0 where it didn't learn [steps, cells, regions].
        norms: gradient norms, NaN where none was logged, of the same shape; None where none was logged at all.
        microbatches: index of each cell's microbatch [steps, cells].
        losses: NaN where there's none [steps].
        sealed: which cells have gradient norms that the keys don't open [steps, cells].
    """

    weights: CellValues
    norms: CellValues | None
    microbatches: NDArray[np.int64]
    losses: CellValues
    sealed: NDArray[np.bool_]

    def routes(self, block: StepBlock) -> CellValues:
        """Return the weight that each cell's rows had in each region; 0 everywhere where it has no rows."""
        routes = np.asarray(block.tables.routes, np.float64).reshape(len(block.tables.routes), self.weights.shape[2])
        given: CellValues = routes[block.cells["route"]] * (block.cells["rows"] > 0)[..., None]
        return given

    def reached(self, block: StepBlock) -> NDArray[np.bool_]:
        """Return which regions each cell's rows taught: the product of the two weights may be too small for a float."""
        return (self.routes(block) > 0) & (self.weights > 0)


def read_details(block: StepBlock, origin: str = "", keys: ColumnKeys | None = None) -> BlockDetails:
    """Read a block's details.

    Args:
        block: of the log.
        origin: name of the log, without which no key opens anything.
        keys: of columns that are sealed; what they don't open has no value.

    Raises:
        TamperError: they don't follow the contract in `cosmati.records.ledger`.
    """
    num_steps, num_cells = block.cells.shape
    num_regions = len(block.tables.regions)
    own = block.cells["weight"].astype(np.float64)
    classes = SealedClasses.of(block.tables.details, block.tables.classes, origin)
    reading = _Reading(
        block, classes, keys, (num_steps, num_cells, num_regions), np.repeat(own[..., None], num_regions, axis=2)
    )
    for number, line in enumerate(block.lines):
        if line is not None:
            reading.take(number, line)
    return BlockDetails(reading.weights, reading.collected(), reading.microbatches, reading.losses, reading.sealed)


class _Reading:
    def __init__(
        self,
        block: StepBlock,
        classes: SealedClasses,
        keys: ColumnKeys | None,
        shape: tuple[int, int, int],
        weights: CellValues,
    ) -> None:
        self._block, self._shape = block, shape
        self._classes, self._keys = classes, keys
        self.sealed = np.zeros(shape[:2], bool)
        self.weights = weights
        self.microbatches = np.tile(np.arange(shape[1]), (shape[0], 1))
        self.losses = np.full(shape[0], np.nan)
        self._names = {str(number): number for number in range(shape[1])}
        self._places: list[int] = []
        self._values: list[float | None] = []

    def take(self, number: int, line: bytes) -> None:
        """Read the details of one step."""
        _, num_cells, num_regions = self._shape
        try:
            found = _DECODER.decode(line)
            if found.sealed is not None:
                found = self._opened(number, line)
            norms = found.gradient_norm or {}
            if not all(name in self._names and len(row) == num_regions for name, row in norms.items()):
                raise msgspec.ValidationError
            learnt = None if found.sub_steps is None else self._learnt(found.sub_steps)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._take_slowly(number)
            return
        for name, row in norms.items():
            self._places.append(number * num_cells + self._names[name])
            self._values += row
        if learnt is not None:
            self.weights[number] = learnt
        if found.cell_microbatches is not None and len(found.cell_microbatches) == num_cells:
            self.microbatches[number] = found.cell_microbatches
        if found.loss is not None:
            self.losses[number] = found.loss

    def _opened(self, number: int, line: bytes) -> _Details:
        """Return a step's details with what the keys open, and take note of the cells whose norms they don't."""
        details, left = self._classes.open(decode_details(line), self._block.step + number, self._keys)
        class_ids = self._block.cells["class_id"][number].tolist()
        self.sealed[number, self._classes.hidden(left, class_ids, "gradient_norm")] = True
        # As from a line: what JSON doesn't have, infinity say, is refused there.
        return _DECODER.decode(json.dumps(details))

    def _learnt(self, sub_steps: list[_SubStep]) -> CellValues:
        _, num_cells, num_regions = self._shape
        learnt = np.zeros((num_cells, num_regions))
        for one in sub_steps:
            if len(one.weights) != num_cells or not all(0 <= r < num_regions for r in one.regions):
                raise msgspec.ValidationError
            weights = np.asarray(one.weights)
            if (weights < 0).any():
                raise msgspec.ValidationError
            for region in one.regions:
                learnt[:, region] += weights
        return learnt

    def _take_slowly(self, number: int) -> None:
        """Read them as they are read one by one: what is wrong with them is said there."""
        item, entry = self._block.item(number)
        _, num_cells, num_regions = self._shape
        details, hidden = open_details(item, entry, self._classes, self._keys)
        self.sealed[number, hidden] = True
        for cell, row in read_norms(item, num_cells, num_regions, details).items():
            self._places.append(number * num_cells + cell)
            self._values += row
        learnt: Any = learnt_weights(item, entry, num_regions)
        self.weights[number] = np.nan_to_num(np.asarray(learnt, np.float64).reshape(num_cells, num_regions))

    def collected(self) -> CellValues | None:
        """Return the norms.

        Raises:
            TamperError: one of them is negative.
        """
        if not self._places:
            return None
        num_steps, num_cells, num_regions = self._shape
        values = np.asarray(self._values, np.float64).reshape(-1, num_regions)
        if (values < 0).any():
            for number in range(num_steps):
                item, entry = self._block.item(number)
                details, _ = open_details(item, entry, self._classes, self._keys)
                read_norms(item, num_cells, num_regions, details)
        norms = np.full((num_steps * num_cells, num_regions), np.nan)
        norms[self._places] = values
        return norms.reshape(self._shape)
