"""From blocks of steps to columns: what a step, a cell, a logged norm and a sub-step's own weight are in the tables.

Two columns stand for lists. `reaches` names the set of regions that a cell's rows taught, and `opens` those of them
that no earlier cell of its step and class has, so that the steps in which a class taught a region are a plain count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cosmati.ledger.columns import StepBlock
from cosmati.ledger.learning import SKETCH_WIDTH, LearningRows, read_learning
from cosmati.ledger.sealing import ColumnKeys
from cosmati.ledger.step_details import read_details

Columns: TypeAlias = dict[str, NDArray[Any]]
SKETCH: Mapping[str, type] = {f"d{number}": np.float32 for number in range(SKETCH_WIDTH)}
"""Columns of a direction's 16 numbers, NaN where it wasn't logged."""
_OF_CELLS: Mapping[str, type] = {
    "cell": np.uint32,
    "class_id": np.uint32,
    "phase": np.uint16,
    "region_id": np.uint32,
}
TABLES: Mapping[str, Mapping[str, type]] = {
    "steps": {"loss": np.float64},
    "cells": {
        "cell": np.uint32,
        "microbatch": np.uint32,
        "class_id": np.uint32,
        "band": np.uint16,
        "phase": np.uint16,
        "route": np.uint32,
        "rows": np.uint32,
        "weight": np.float64,
        "reaches": np.uint32,
        "opens": np.uint32,
        "has_own": np.bool_,
        "has_norms": np.bool_,
    },
    "norms": {**_OF_CELLS, "norm": np.float64, "counts": np.bool_},
    "learnt": {**_OF_CELLS, "learnt": np.float64},
    "directions": {**_OF_CELLS, **SKETCH},
    "entropies": {**_OF_CELLS, "entropy": np.float64},
    "updates": {"region_id": np.uint32, "norm": np.float64, **SKETCH, "before": np.object_, "after": np.object_},
    "sealed": _OF_CELLS,
}
"""Columns of each file, after those of `STEP`. Where a cell `has_own` weights, `learnt` has what its regions learnt."""
STEP: Mapping[str, type] = {"entry": np.uint64, "step": np.uint64, "attempt": np.uint32, "policy_epoch": np.uint32}


class RegionSets:
    """Sets of regions, each with a number; 0 is the empty one of all tables.

    Args:
        known: `policy_epoch` and regions of those numbered so far.
    """

    def __init__(self, known: list[tuple[int, list[int]]] | None = None) -> None:
        self.known = known or [(0, [])]
        self._numbers = {(epoch, tuple(regions)): number for number, (epoch, regions) in enumerate(self.known)}

    def numbers(self, epoch: int, members: NDArray[np.bool_]) -> NDArray[np.uint32]:
        """Return the numbers of sets, new ones too; `members` is [sets, regions]."""
        if not members.size:
            return np.zeros(len(members), np.uint32)
        packed = np.packbits(members, axis=1)
        keys = packed[:, 0] if packed.shape[1] == 1 else np.ascontiguousarray(packed).view(f"V{packed.shape[1]}")[:, 0]
        _, firsts, places = np.unique(keys, return_index=True, return_inverse=True)
        found = [self._number(epoch, np.flatnonzero(members[first]).tolist()) for first in firsts.tolist()]
        return np.asarray(found, np.uint32)[places]

    def _number(self, epoch: int, regions: list[int]) -> int:
        if not regions:
            return 0
        key = epoch, tuple(regions)
        if key not in self._numbers:
            self._numbers[key] = len(self.known)
            self.known.append((epoch, regions))
        return self._numbers[key]


class PartRows:
    """Collects the columns of consecutive steps.

    Args:
        sets: numbers of sets of regions, which go on from part to part.
        origin: name of the log.
        keys: of columns that are sealed. What they open mustn't reach a file that others read.
    """

    def __init__(self, sets: RegionSets, origin: str = "", keys: ColumnKeys | None = None) -> None:
        self.num_rows = 0
        self._origin, self._keys = origin, keys
        self._sets = sets
        self._pieces: dict[str, list[Columns]] = {name: [] for name in TABLES}

    def take(self, block: StepBlock, epoch: int) -> None:
        """Take a block of steps.

        Raises:
            TamperError: its details don't follow the contract in `cosmati.records.ledger`.
        """
        told = read_details(block, self._origin, self._keys)
        num_steps, num_cells = block.cells.shape
        reached, weights = told.reached(block), told.weights
        own = ((weights != 0) & (weights != block.cells["weight"][..., None])).any(axis=2)
        steps = np.arange(num_steps)
        self._put("steps", block, epoch, steps, {"loss": told.losses})
        flat = reached.reshape(num_steps * num_cells, reached.shape[2])
        cells = {name: block.cells[name].ravel() for name in ("class_id", "band", "phase", "route", "rows", "weight")}
        of_cells: Columns = {
            "cell": np.tile(np.arange(num_cells), num_steps),
            "microbatch": told.microbatches.ravel(),
            **cells,
            "reaches": self._sets.numbers(epoch, flat),
            "opens": self._sets.numbers(epoch, _firsts(reached, block.cells["class_id"]).reshape(flat.shape)),
            "has_own": own.ravel(),
            "has_norms": told.sealed.ravel()
            if told.norms is None
            else told.sealed.ravel() | ~np.isnan(told.norms).all(axis=2).ravel(),
        }
        self._put("cells", block, epoch, np.repeat(steps, num_cells), of_cells)
        self.num_rows += num_steps * (1 + num_cells)
        if told.norms is not None:
            self._put_long("norms", block, epoch, {"norm": told.norms, "counts": reached}, ~np.isnan(told.norms))
        if told.sealed.any():
            self._put_long("sealed", block, epoch, {}, told.sealed[..., None] & reached)
        if own.any():
            self._put_long("learnt", block, epoch, {"learnt": told.routes(block) * weights}, own[..., None] & reached)
        self._put_learning(block, epoch, read_learning(block, self._origin, self._keys))

    def _put_learning(self, block: StepBlock, epoch: int, told: LearningRows) -> None:
        found: dict[str, tuple[Sequence[tuple[Any, ...]], Callable[[Sequence[Any]], Columns]]] = {
            "directions": (told.directions, _sketches),
            "entropies": (told.entropies, lambda values: {"entropy": np.asarray(values)}),
        }
        for table, (rows, form) in found.items():
            if rows:
                step, cell, region = np.asarray([row[:3] for row in rows]).T
                of_cells = {key: block.cells[key][step, cell] for key in ("class_id", "phase")}
                own = {"cell": cell, **of_cells, "region_id": region, **form([row[3] for row in rows])}
                self._put(table, block, epoch, step, own)
        if told.updates:
            steps, regions, norms, directions, before, after = zip(*told.updates, strict=True)
            values = {"norm": np.asarray(norms, np.float64), **_sketches(directions)}
            texts = {name: np.asarray(one, np.object_) for name, one in (("before", before), ("after", after))}
            self._put("updates", block, epoch, np.asarray(steps), {"region_id": np.asarray(regions), **values, **texts})
        self.num_rows += len(told.directions) + len(told.entropies) + len(told.updates)

    def _put_long(self, table: str, block: StepBlock, epoch: int, values: Columns, chosen: NDArray[np.bool_]) -> None:
        step, cell, region = np.nonzero(chosen)
        of_cells = {name: block.cells[name][step, cell] for name in ("class_id", "phase")}
        found = {name: value[chosen] for name, value in values.items()}
        self._put(table, block, epoch, step, {"cell": cell, **of_cells, "region_id": region, **found})
        self.num_rows += len(step)

    def _put(self, table: str, block: StepBlock, epoch: int, steps: NDArray[Any], columns: Columns) -> None:
        shared = {"entry": block.first + steps, "step": block.step + steps}
        same = {"attempt": block.attempt, "policy_epoch": epoch}
        filled: Columns = {name: np.full(len(steps), value, STEP[name]) for name, value in same.items()}
        given = {**shared, **filled, **columns}
        self._pieces[table].append({name: given[name].astype(form) for name, form in form_of(table).items()})

    def columns(self) -> dict[str, Columns]:
        """Return what was collected, by table."""
        return {
            table: {
                name: np.concatenate([one[name] for one in pieces]) if pieces else np.empty(0, form)
                for name, form in form_of(table).items()
            }
            for table, pieces in self._pieces.items()
        }


def form_of(table: str) -> dict[str, type]:
    """Return the columns of a table with their types."""
    return {**STEP, **TABLES[table]}


def _sketches(rows: Sequence[NDArray[np.float32] | None]) -> Columns:
    """Return the columns of directions."""
    nothing = np.full(SKETCH_WIDTH, np.nan, np.float32)
    return dict(zip(SKETCH, np.stack([nothing if row is None else row for row in rows]).T, strict=True))


def _firsts(reached: NDArray[np.bool_], class_ids: NDArray[Any]) -> NDArray[np.bool_]:
    """Keep of what cells reached what no earlier cell of the same step and class did."""
    firsts = np.zeros_like(reached)
    num_classes = int(class_ids.max(initial=0)) + 1
    keys = np.arange(len(reached))[:, None] * num_classes + class_ids.astype(np.int64)
    for region in range(reached.shape[2]):
        places = np.flatnonzero(reached[..., region])
        _, first = np.unique(keys.ravel()[places], return_index=True)
        steps, cells = np.divmod(places[first], reached.shape[1])
        firsts[steps, cells, region] = True
    return firsts
