"""A signed ledger of a million steps, written in seconds: entries, tiles and details as a run's writer leaves them."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path

from cosmati.ledger.details import encode_details
from cosmati.ledger.entry import encode_entry
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.note import TreeHead, checkpoint_text
from cosmati.ledger.tiles import ENTRIES, TILE_WIDTH, Frontier, encode_bundle, tile_path
from cosmati.ledger.writer import details_digest
from cosmati.records.ledger import AmendEntry, CheckpointEntry, ResumeEntry, RunEntry
from cosmati.storage.merkle import leaf_hash

ORIGIN = "cosmati/ledger-scale"
CLASSES = ("licensed/news", "open/permissive", "public-domain", "unknown")
REGIONS = ("embedding", "blocks.0-3", "blocks.4-7", "blocks.8-11", "head")
V, ROWS = 8, 16
NORMS_EVERY = 16  # as runs log them
_HEAD, _CELL = struct.Struct(">BBQI32s32sBH"), struct.Struct(">IHHIId32s")


def tables(loose: bool, num_steps: int) -> dict[str, object]:
    """Return the details of entry 0, or of the amendment that loosens."""
    weight = [[1.0] * 5, [0.0, 0.5, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0, 1.0], [1.0 if loose else 0.0] * 5]
    routes = sorted({tuple(row) for row in (*weight, [0.0] * 5)})
    return {
        "run_id": "ledger-scale",
        "seed": 7,
        "classes": list(CLASSES),
        "regions": list(REGIONS),
        "routes": [list(row) for row in routes],
        "phases": [["warm", 0, num_steps // 10], ["main", num_steps // 10, num_steps]],
        "policy": [[[row, row], ["admit" if any(row) else "reject"] * 2] for row in weight],
    }


def _steps(
    steps: range, attempt: int, details: dict[str, object], policy: bytes, warm: int
) -> Iterator[tuple[bytes, bytes]]:
    routes = [tuple(row) for row in details["routes"]]  # type: ignore[attr-defined]
    of_class = [routes.index(tuple(one[0][0])) for one in details["policy"]]  # type: ignore[attr-defined]
    rejects = [one[1][0] == "reject" for one in details["policy"]]  # type: ignore[attr-defined]
    sha256, pack = hashlib.sha256, _CELL.pack
    for step in steps:
        cells, norms = [], []
        for m in range(V):
            class_id = (step * 5 + m * m + step // 7) % 4
            num = 0 if rejects[class_id] else ROWS
            commitment = sha256(step.to_bytes(8, "big") + bytes([m])).digest()
            cells.append(pack(class_id, 0, int(step >= warm), of_class[class_id], num, float(num), commitment))
            if step % NORMS_EVERY == 0:
                rho = routes[of_class[class_id]]
                row = ",".join("null" if not w else repr(round(w * (1 + (step * 31 + m) % 97 / 7), 6)) for w in rho)
                norms.append(f'"{m}":[{row}]')
        told = f'"gradient_norm":{{{",".join(norms)}}},"loss":{1 + 1 / (step + 3)!r},"step":{step},"update_norm":null'
        line = f"{{{told}}}".encode()
        yield _HEAD.pack(1, 1, step, attempt, policy, sha256(line).digest(), 0, V) + b"".join(cells), line


def entries(num_steps: int) -> Iterator[tuple[bytes, bytes | None]]:
    """Yield entries with their details lines: a run with three resumes, a policy loosened halfway, checkpoints."""
    policies, warm = [hashlib.sha256(name).digest() for name in (b"first", b"second")], num_steps // 10
    given = [tables(loose, num_steps) for loose in (False, True)]
    commitments = [(("data", policy), ("policy", policy)) for policy in policies]
    yield encode_entry(RunEntry("ledger-scale", commitments[0], details_digest(given[0]))), encode_details(given[0])
    every, lost, size, step = max(1, num_steps // 200), max(1, num_steps // 1000), 1, 0
    stops = [num_steps // 4, num_steps // 2, 3 * num_steps // 4, num_steps]
    index_of: dict[int, int] = {}
    for attempt, stop in enumerate(stops):
        now = int(attempt >= 2)
        while step < stop:
            until = min(stop, (step // every + 1) * every)
            for one in _steps(range(step, until), attempt, given[now], policies[now], warm):
                index_of[step] = size
                size, step = size + 1, step + 1
                yield one
            yield encode_entry(CheckpointEntry(step, policies[0], hashlib.sha256(str(step).encode()).digest())), None
            size += 1
        if attempt < len(stops) - 1:
            step -= lost
            yield encode_entry(ResumeEntry(step, index_of[step], attempt + 1)), None
            size += 1
            if attempt == 1:
                details = given[1] | {"changes": [["policy", "first", "second"]]}
                yield encode_entry(AmendEntry(step, commitments[1], details_digest(details))), encode_details(details)
                size += 1


def write_ledger(directory: Path, num_steps: int, key: SigningKey | None = None) -> SigningKey:
    """Write a signed ledger of so many steps that stand, without the writer's flushes; return its key."""
    key = key or SigningKey.generate(ORIGIN)
    directory.mkdir(parents=True)
    frontier, bundle = Frontier(), list[bytes]()
    with (directory / "details.jsonl").open("wb") as details:
        for data, line in entries(num_steps):
            if line is not None:
                details.write(line + b"\n")
            bundle.append(data)
            for level, index, hashes in frontier.append(leaf_hash(data)):
                _put(directory, tile_path(level, index), b"".join(hashes))
            if len(bundle) == TILE_WIDTH:
                _put(directory, tile_path(ENTRIES, frontier.size // TILE_WIDTH - 1), encode_bundle(bundle))
                bundle = []
    if bundle:
        _put(directory, tile_path(ENTRIES, frontier.size // TILE_WIDTH, len(bundle)), encode_bundle(bundle))
    for level, index, hashes in frontier.partial_tiles():
        _put(directory, tile_path(level, index, len(hashes)), b"".join(hashes))
    head = TreeHead(frontier.size, frontier.root())
    (directory / "operator.vkey").write_text(key.verifier.text + "\n")
    (directory / "checkpoint").write_text(key.sign_note(checkpoint_text(key.name, head)))
    return key


def _put(directory: Path, name: str, data: bytes) -> None:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
