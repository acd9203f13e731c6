"""The scan in columns takes what the scan entry by entry takes, and refuses what that refuses."""

from __future__ import annotations

import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmati.errors import TamperError
from cosmati.ledger.columns import ColumnScan, StepBlock
from cosmati.ledger.details import encode_details
from cosmati.ledger.entry import encode_entry
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.note import TreeHead, checkpoint_text
from cosmati.ledger.reader import Scan, read_head, read_verifier_key
from cosmati.ledger.step_details import learnt_weights, read_details, read_norms
from cosmati.ledger.tables import in_force
from cosmati.ledger.tiles import Frontier, encode_bundle, tile_path
from cosmati.ledger.writer import details_digest
from cosmati.records.ledger import StepEntry
from cosmati.storage.merkle import leaf_hash
from tests.storage.rfc6962 import mth

from .ledgers import ORIGIN
from .random_runs import random_run
from .test_amend import FIRST, Policy
from .test_verify import write_signed

KEY = SigningKey.generate(ORIGIN)
Encoded = list[tuple[bytes, bytes | None]]


def write(folder: Path, encoded: Encoded) -> TreeHead:
    """Sign bytes of entries as they are, whatever they are."""
    frontier, tiles = Frontier(), list[Any]()
    for data, _ in encoded:
        tiles += frontier.append(leaf_hash(data))
    files = {tile_path(level, i, len(h)): b"".join(h) for level, i, h in (*tiles, *frontier.partial_tiles())}
    for start in range(0, len(encoded), 256):
        chunk = [data for data, _ in encoded[start : start + 256]]
        files[tile_path("entries", start // 256, len(chunk))] = encode_bundle(chunk)
    head = TreeHead(frontier.size, frontier.root())
    files["checkpoint"] = KEY.sign_note(checkpoint_text(KEY.name, head)).encode()
    files["details.jsonl"] = b"".join(line + b"\n" for _, line in encoded if line is not None)
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return head


def read_by_entry(folder: Path, head: TreeHead) -> list[Any]:
    """Return all that is asked of steps, read one by one."""
    found = list[Any]()
    scan = Scan(folder, head)
    for item, tables in in_force(scan):
        if isinstance(item.entry, StepEntry):
            cells, num = item.entry.microbatches, len(tables.regions)
            norms = read_norms(item, len(cells), num)
            learnt = learnt_weights(item, item.entry, num)
            routes = [(tables.class_of(c, item), c.band, c.phase, tables.route(c, item), c.num_rows) for c in cells]
            logged = [[None if v is None else float(v) for v in norms.get(m, [None] * num)] for m in range(len(cells))]
            found.append((item.index, item.entry.step, routes, [[w or 0.0 for w in row] for row in learnt], logged))
    return [found, scan.history.standing(), scan.history.diverged_steps, scan.history.num_confirmed]


def read_by_column(folder: Path, head: TreeHead) -> list[Any]:
    """Return the same, read in blocks."""
    found = list[Any]()
    scan = ColumnScan(folder, head)
    for block in scan.blocks():
        if not isinstance(block, StepBlock):
            continue
        told = read_details(block)
        routes, num = told.routes(block), len(block.tables.regions)
        for i in range(len(block.data)):
            own = [
                (block.tables.classes[c["class_id"]], c["band"], c["phase"], tuple(route), c["rows"])
                for c, route in zip(block.cells[i], routes[i].tolist(), strict=True)
            ]
            norms = np.full((len(own), num), np.nan) if told.norms is None else told.norms[i]
            logged = [[None if np.isnan(v) else v for v in row] for row in norms.tolist()]
            found.append((block.first + i, block.step + i, own, told.weights[i].tolist(), logged))
    return [found, scan.history.standing(), scan.history.diverged_steps, scan.history.num_confirmed]


def outcome(read: Any, folder: Path, head: TreeHead) -> Any:
    try:
        return read(folder, head)
    except TamperError:
        return "refused"


def encoded(seed: int, length: int) -> Encoded:
    return [(encode_entry(e), None if d is None else encode_details(d)) for e, d in random_run(seed, length).items]


def _flip(draw: random.Random, data: bytes) -> bytes:
    place = draw.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]


def _field(draw: random.Random, data: bytes) -> bytes:
    """Change a field of a cell, or of the head, to a value that may mean something."""
    offset, form = draw.choice(
        [(2, ">Q"), (10, ">I"), (78, "B"), (81, ">I"), (85, ">H"), (87, ">H"), (89, ">I"), (93, ">I")]
    )
    value = draw.choice([0, 1, 2, 3, 7, 255])
    if draw.random() < 0.2:
        offset, form, value = 97, ">d", draw.choice([float("nan"), float("inf"), -1.0, -0.0, 3.0])  # type: ignore[assignment]
    packed = struct.pack(form, value)
    return data if len(data) < offset + len(packed) else data[:offset] + packed + data[offset + len(packed) :]


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 100, 255, 256, 257, 512, 530])
def test_the_root_at_an_earlier_size_is_held_against_the_entries(tmp_path: Path, size: int) -> None:
    entries = encoded(3, 600)
    head = write(tmp_path, entries)
    assert head.size > 530
    own = TreeHead(size, mth([data for data, _ in entries[:size]]))
    for scan in (ColumnScan(tmp_path, head, [own]).blocks(), Scan(tmp_path, head, [own])):
        assert len(list(scan)) > 0
    other = TreeHead(size, mth([data for data, _ in entries[1 : size + 1]]))
    for scan in (ColumnScan(tmp_path, head, [own, other]).blocks(), Scan(tmp_path, head, [own, other])):
        with pytest.raises(TamperError, match=f"The first {size} entries in .* aren't those of the earlier checkpoint"):
            list(scan)


@pytest.mark.long
def test_a_scan_holds_the_heads_of_one_bundle(tmp_path: Path) -> None:
    entries = encoded(3, 600)
    earlier = [TreeHead(size, mth([data for data, _ in entries[:size]])) for size in (100, 300, 500)]
    scan = ColumnScan(tmp_path, write(tmp_path, entries), earlier)
    most = max(len(scan._heads_before) for _ in scan.blocks())
    assert 0 < most <= 256


@pytest.mark.parametrize("name", ["0", "1", "2", "3", "-1", "00", "x", ""])
@pytest.mark.parametrize("num_regions", [1, 3])
def test_a_norm_of_no_cell_is_refused_whichever_way_it_is_read(tmp_path: Path, name: str, num_regions: int) -> None:
    """Of two cells, and of fewer or more regions than that."""
    regions = [f"r{n}" for n in range(num_regions)]
    policy = Policy(
        "p", regions, {"a": [([1.0] * num_regions, "admit")] * 2, "b": [([1.0] * num_regions, "admit")] * 2}
    )
    items = [policy.run(), *(policy.step(step) for step in range(3))]
    entry, details = items[2]
    assert isinstance(entry, StepEntry)
    assert details is not None
    details = details | {"gradient_norm": {name: [1.5] * num_regions}}
    items[2] = replace(entry, details_digest=details_digest(details)), details
    head = write(tmp_path, [(encode_entry(e), None if d is None else encode_details(d)) for e, d in items])
    by_entry, by_column = outcome(read_by_entry, tmp_path, head), outcome(read_by_column, tmp_path, head)
    assert by_column == by_entry
    assert (by_column == "refused") == (name not in ("0", "1"))


@pytest.mark.parametrize("loss", ["high", [1.0], {"of": 3}, True])
def test_a_loss_that_is_no_number_takes_nothing_from_what_stands_beside_it(tmp_path: Path, loss: Any) -> None:
    """Nobody asks a step's details for its loss where its norms and weights are read."""
    items = random_run(7, 14).items
    steps = [i for i, (entry, _) in enumerate(items) if isinstance(entry, StepEntry)]
    for i in steps[1::2]:
        entry, details = items[i]
        assert isinstance(entry, StepEntry)
        assert details is not None
        details = details | {"loss": loss}
        items[i] = replace(entry, details_digest=details_digest(details)), details
    head = write(tmp_path, [(encode_entry(e), None if d is None else encode_details(d)) for e, d in items])
    by_entry, by_column = read_by_entry(tmp_path, head), read_by_column(tmp_path, head)
    assert by_column == by_entry
    measured = [step[4] for step in by_column[0]]
    assert sum(norm is not None for cells in measured[1::2] for row in cells for norm in row) > 3


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_signed_nonsense_is_refused_or_taken_by_both(seed: int, tmp_path_factory: Any) -> None:
    draw, folder = random.Random(seed), tmp_path_factory.mktemp("l")
    entries = encoded(seed, 14)
    for _ in range(draw.choice([0, 1, 1, 2])):
        place = draw.randrange(len(entries))
        data, line = entries[place]
        act = draw.randrange(6)
        if act == 0:
            data = _flip(draw, data)
        elif act == 1:
            data = _field(draw, data)
        elif act == 2:
            data = data[: draw.randrange(len(data))] if draw.random() < 0.5 else data + b"\0"
        elif act == 3 and line is not None:
            line = _flip(draw, line)
        elif act == 4 and len(entries) > 2:
            other = draw.randrange(len(entries))
            entries[place], entries[other] = entries[other], entries[place]
            continue
        entries[place] = data, line
    head = write(folder, entries)
    assert outcome(read_by_column, folder, head) == outcome(read_by_entry, folder, head)


STRANGE_DETAILS = [
    b'{"gradient_norm":{"0":[1.0]}}',
    b'{"gradient_norm":{"0":[1,2.5]}}',
    b'{"gradient_norm":{"0":[null,-1.0]}}',
    b'{"gradient_norm":{"0":[true,1.0]}}',
    b'{"gradient_norm":{"0":[1e999,1.0]}}',
    b'{"gradient_norm":{"0":[NaN,1.0]}}',
    b'{"gradient_norm":{"00":[1.0,1.0]}}',
    b'{"gradient_norm":{"7":[1.0,1.0]}}',
    b'{"gradient_norm":{"\\u0030":[1.0,3.0]}}',
    b'{ "gradient_norm" : {"0" : [1.0, 3.0]} }',
    b'{"gradient_norm":3,"loss":"x"}',
    b'{"gradient_norm":{"0":[1.0,1.0]},"gradient_norm":{"0":[2.0,2.0]}}',
    b'{"gradient_norm":{"0":[123456789012345678901234567890,1.0]}}',
    b'{"sub_steps":[{"regions":[0],"weights":[1.5]}]}',
    b'{"sub_steps":[{"regions":[0,0,1],"weights":[1]},{"regions":[],"weights":[2]}]}',
    b'{"sub_steps":[{"regions":[2],"weights":[1.5]}]}',
    b'{"sub_steps":[{"regions":[0],"weights":[-1.5]}]}',
    b'{"sub_steps":[{"regions":[true],"weights":[1.5]}]}',
    b'{"sub_steps":[{"regions":[0],"weights":[1.5,2]}]}',
    b'{"sub_steps":[]}',
    b'{"sub_steps":3}',
    b'{"sub_steps":null}',
    b"[]",
    b"{",
    b"\xff",
    '{"loss":1}'.encode("utf-16"),
]


@pytest.mark.parametrize("line", STRANGE_DETAILS)
def test_details_are_read_as_one_by_one(tmp_path: Path, line: bytes) -> None:
    import hashlib

    from cosmati.ledger.writer import details_digest
    from cosmati.records.ledger import MicrobatchCell, RunEntry

    details: dict[str, object] = {"classes": ["a"], "regions": ["in", "out"], "routes": [[1.0, 0.5]], "phases": []}
    cell = MicrobatchCell(0, 0, 0, 0, 2, 2.0, bytes(32))
    step = StepEntry(0, 0, bytes(32), hashlib.sha256(line).digest(), None, (cell,))
    run = RunEntry("r", (), details_digest(details))
    head = write(tmp_path, [(encode_entry(run), encode_details(details)), (encode_entry(step), line)])
    assert outcome(read_by_column, tmp_path, head) == outcome(read_by_entry, tmp_path, head)


@pytest.mark.parametrize("length", [255, 256, 257, 600, pytest.param(70_000, marks=pytest.mark.slow)])
def test_many_bundles_are_read_as_one_by_one_and_from_any_of_them(tmp_path: Path, length: int) -> None:
    entries = encoded(3, length)
    head = write(tmp_path, entries)
    assert read_by_column(tmp_path, head) == read_by_entry(tmp_path, head)
    for size in range(0, len(entries), 256 * max(1, length // 1024)):
        edge, frontier = Frontier.of_tiles(tmp_path, size), Frontier()
        for data, _ in entries[:size]:
            frontier.append(leaf_hash(data))
        assert edge.root() == frontier.root()
        for data, _ in entries[size:]:
            edge.append(leaf_hash(data))
        assert (edge.root(), edge.size) == (head.root, head.size)


@pytest.mark.long
def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    write_signed(tmp_path, random_run(11, 16).items, KEY)
    key = read_verifier_key(tmp_path)
    for path in sorted(p for p in tmp_path.rglob("*") if p.is_file() and p.name != "operator.vkey"):
        data = path.read_bytes()
        for place in range(0, len(data), 7):
            path.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
            with pytest.raises(TamperError):
                list(ColumnScan(tmp_path, read_head(tmp_path, key)).blocks())
        path.write_bytes(data)
    list(ColumnScan(tmp_path, read_head(tmp_path, key)).blocks())


def wrong_weight(data: bytes, value: float) -> bytes:
    return data[:97] + struct.pack(">d", value) + data[105:]


@pytest.mark.parametrize(
    ("step", "changed"),
    [
        (0, {"phase": 1}),
        (4, {"phase": 0}),
        (4, {"phase": 2}),
        (0, {"class_id": 2, "route_id": 0}),
        (0, {"class_id": 3}),
        (0, {"route_id": 0}),
        (0, {"route_id": 9}),
    ],
)
def test_a_signed_cell_that_no_policy_gives_is_refused(tmp_path: Path, step: int, changed: dict[str, int]) -> None:
    steps = [FIRST.step(n, **(changed if n == step else {})) for n in range(5)]
    items = [(encode_entry(e), None if d is None else encode_details(d)) for e, d in (FIRST.run(), *steps)]
    head = write(tmp_path, items)
    assert outcome(read_by_entry, tmp_path, head) == outcome(read_by_column, tmp_path, head) == "refused"


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), -float("inf")])
def test_a_signed_weight_that_is_no_weight_is_refused(tmp_path: Path, value: float) -> None:
    items = [(encode_entry(e), None if d is None else encode_details(d)) for e, d in (FIRST.run(), FIRST.step(0))]
    items[1] = wrong_weight(items[1][0], value), items[1][1]
    head = write(tmp_path, items)
    assert outcome(read_by_entry, tmp_path, head) == outcome(read_by_column, tmp_path, head) == "refused"
