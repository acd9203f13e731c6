"""What the details of steps say of learning beside norms: directions, entropies, updates, digests of regions.

Details of a step may have, each on its cadence; no earlier release has them::

    {"direction": {"<cell index>": [sketch per region; null where the gradient is absent], ...},
     "entropy": {"<cell index>": [nats per region; null where there's none], ...},
     "update_direction": [sketch per region; null where it didn't move],
     "region_digests": {"before": [hex per region], "after": [hex per region]}, ...}

A sketch in "direction" and "update_direction" is 16 numbers in float16, little-endian, as base64: of a microbatch's
gradient over its norm, or of the region's update in the step (parameters after less before; weight decay is in it) over
the update's. Entry 0's seed and the parameters' names say onto what it's projected (`cosmati.train.direction_sketch`).
"entropy" is the spectral entropy, in nats, of what the region's last module to run has given for the microbatch
(`cosmati.train.entropy_profile`). "region_digests" are Merkle roots over each region's parameters as the step found and
left them (`cosmati.core.state.parameter_root`, names as in entry 0's "parameters"); no salt is in them.
"""

from __future__ import annotations

from base64 import b64decode
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from cosmati.ledger.columns import StepBlock
from cosmati.ledger.details import decode_details, encode_details
from cosmati.ledger.sealing import SEALED_MARK, ColumnKeys, SealedClasses
from cosmati.ledger.tables import broken

SKETCH_WIDTH = 16
_MARKS = (b'"direction":{', b'"entropy":{', b'"region_digests":{', b'"update_direction":[', b'"update_norm":[')
"""How canonical details begin what is read here: lines without any aren't decoded."""
_HEX = 64


class _Digests(msgspec.Struct):
    before: list[str]
    after: list[str]


class _Learning(msgspec.Struct):
    direction: dict[str, list[str | None]] = {}
    entropy: dict[str, list[float | None]] = {}
    update_norm: list[float | None] | None = None
    update_direction: list[str | None] | None = None
    region_digests: _Digests | None = None


_DECODER = msgspec.json.Decoder(_Learning)


class LearningRows(NamedTuple):
    """What was logged in a block of steps, a row each; places are indices into the block's steps, cells and regions.

    Attributes:
        directions: (step, cell, region, [16 numbers]).
        entropies: (step, cell, region, nats).
        updates: (step, region, norm, [16 numbers], digest before, digest after); None for what wasn't measured.
    """

    directions: list[tuple[int, int, int, NDArray[np.float32]]]
    entropies: list[tuple[int, int, int, float]]
    updates: list[tuple[int, int, float | None, NDArray[np.float32] | None, str | None, str | None]]


def decode_direction(text: str) -> NDArray[np.float32]:
    """Return the sketch of a direction, [16]: of length about 1, so that scalar products of two estimate cosines.

    Raises:
        ValueError: it isn't 16 finite numbers of float16 in base64.
    """
    found = np.frombuffer(b64decode(text, validate=True), "<f2").astype(np.float32)
    if found.shape != (SKETCH_WIDTH,) or not np.isfinite(found).all():
        raise ValueError(f"{text!r:.80} isn't 16 finite numbers")
    return found


def read_learning(block: StepBlock, origin: str = "", keys: ColumnKeys | None = None) -> LearningRows:
    """Return what the steps of a block have logged.

    Args:
        block: of steps.
        origin: name of the log.
        keys: of columns that are sealed; what they don't open is left out.

    Raises:
        TamperError: it doesn't follow the contract in `cosmati.records.ledger`, or doesn't open with its key.
    """
    rows = LearningRows([], [], [])
    classes = SealedClasses.of(block.tables.details, block.tables.classes, origin)
    for number, kept in enumerate(block.lines):
        line = kept
        if kept is not None and keys is not None and SEALED_MARK in kept:
            line = encode_details(classes.open(decode_details(kept), block.step + number, keys)[0])
        if line is None or not any(mark in line for mark in _MARKS):
            continue
        try:
            _take(rows, _DECODER.decode(line), number, block.cells.shape[1], len(block.tables.regions))
        except (ValueError, msgspec.DecodeError, RecursionError) as error:
            item, _ = block.item(number)
            raise broken(item, f"what its details say of directions, entropies or updates is none: {error}") from error
    return rows


def _take(rows: LearningRows, told: _Learning, step: int, num_cells: int, num_regions: int) -> None:
    names = {str(cell): cell for cell in range(num_cells)}
    for column in (told.direction, told.entropy):
        if not (column.keys() <= names.keys() and all(len(row) == num_regions for row in column.values())):
            raise ValueError("a column isn't of this step's cells and regions")
    for name, texts in told.direction.items():
        rows.directions.extend(
            (step, names[name], region, decode_direction(text)) for region, text in enumerate(texts) if text is not None
        )
    for name, values in told.entropy.items():
        if any(value is not None and value < 0 for value in values):
            raise ValueError("an entropy is negative")
        found = ((step, names[name], region, value) for region, value in enumerate(values) if value is not None)
        rows.entropies.extend(found)
    rows.updates.extend(_updates(told, step, num_regions))


def _updates(told: _Learning, step: int, num_regions: int) -> list[Any]:
    nothing: list[Any] = [None] * num_regions
    digests = told.region_digests
    norms, texts = told.update_norm or nothing, told.update_direction or nothing
    before, after = (nothing, nothing) if digests is None else (digests.before, digests.after)
    if any(len(one) != num_regions for one in (norms, texts, before, after)):
        raise ValueError("the update isn't of this step's regions")
    if any(norm is not None and norm < 0 for norm in norms):
        raise ValueError("the norm of an update is negative")
    if any(digest is not None and len(bytes.fromhex(digest)) * 2 != _HEX for digest in (*before, *after)):
        raise ValueError("the digest of a region isn't 32 bytes")
    directions = (None if text is None else decode_direction(text) for text in texts)
    found = zip([step] * num_regions, range(num_regions), norms, directions, before, after, strict=True)
    return [row for row in found if any(value is not None for value in row[2:])]
