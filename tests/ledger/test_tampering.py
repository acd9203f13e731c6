"""Random tampering with a real ledger, by outsiders and by its operator, under a pinned checkpoint.

Whatever is done to its files, `verify_ledger` finds it, or it changed nothing that the pin covers.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from cosmati.errors import LedgerError
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.reader import Scan, read_head
from cosmati.ledger.verify import verify_ledger
from cosmati.ledger.writer import LedgerWriter, details_digest
from cosmati.records.ledger import CheckpointEntry, EndEntry, RunEntry, StepEntry

from .ledgers import ORIGIN, digest
from .test_amend import FIRST, SECOND
from .test_verify import Item, signed_files

pytestmark = pytest.mark.long

Files = dict[str, bytes]
KEY = SigningKey.generate(ORIGIN)
THIEF = SigningKey.generate(ORIGIN)
NOT_THE_LEDGERS = {"lock", "epoch"}


@dataclass(frozen=True)
class World:
    """A ledger, and all that somebody who tampers may have beside it.

    Attributes:
        files: The ledger's.
        items: Its entries with their details.
        early: Its files before the run was resumed.
        other: Those of another run of the same operator.
        pins: Checkpoints that somebody kept, with their sizes.
    """

    files: Files
    items: list[Item]
    early: Files
    other: Files
    pins: list[tuple[int, str]]


def read_files(directory: Path) -> Files:
    found = (path for path in directory.rglob("*") if path.is_file() and path.name not in NOT_THE_LEDGERS)
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in found}


def make_world(folder: Path, num_steps: int) -> World:
    """Write a run that resumed under another policy and ended, and another run beside it."""
    pins: list[tuple[int, str]] = []
    items: list[Item] = []
    ledger = folder / "run"

    def add(writer: LedgerWriter, *more: Item) -> None:
        for entry, details in more:
            writer.append(entry, details)
        items.extend(more)
        pins.append((writer.checkpoint().size, (ledger / "checkpoint").read_text()))

    with LedgerWriter.create(ledger, origin=ORIGIN, key=KEY) as writer:
        add(writer, FIRST.run(), FIRST.step(0))
        add(writer, *(FIRST.step(step) for step in range(1, 6)), (CheckpointEntry(6, digest("s"), digest("r")), None))
    early = read_files(ledger)
    with LedgerWriter.open(ledger, key=KEY) as writer:
        add(writer, (writer.resume_entry(4), None), SECOND.amend(4), *(SECOND.step(s, 1) for s in range(4, num_steps)))
        add(writer, (EndEntry(num_steps, "completed", digest("r")), None))
    with LedgerWriter.create(folder / "other", origin=ORIGIN, key=KEY) as writer:
        for entry, details in (SECOND.run(), *(SECOND.step(step) for step in range(8))):
            writer.append(entry, details)
    return World(read_files(ledger), items, early, read_files(folder / "other"), pins)


# --------------------------------------------------------------------------------- what an outsider can do to files


def any_file(files: Files, draw: random.Random) -> str:
    return draw.choice(sorted(files))


def flip_bytes(files: Files, draw: random.Random, world: World) -> None:
    name = any_file(files, draw)
    data = bytearray(files[name])
    for _ in range(draw.choice([1, 1, 2, 8])):
        if data:
            data[draw.randrange(len(data))] ^= draw.randrange(1, 256)
    files[name] = bytes(data)


def truncate(files: Files, draw: random.Random, world: World) -> None:
    name = any_file(files, draw)
    files[name] = files[name][: draw.randrange(len(files[name]) + 1)]


def insert_bytes(files: Files, draw: random.Random, world: World) -> None:
    name = any_file(files, draw)
    data, place = files[name], draw.randrange(len(files[name]) + 1)
    files[name] = data[:place] + draw.choice([b"\n", b" ", bytes(32), draw.randbytes(9), data[:40]]) + data[place:]


def remove(files: Files, draw: random.Random, world: World) -> None:
    del files[any_file(files, draw)]


def remove_tiles(files: Files, draw: random.Random, world: World) -> None:
    kind = draw.choice(["tile/0/", "tile/1/", "tile/entries/", "tile/"])
    for name in [name for name in files if name.startswith(kind)]:
        del files[name]


def change_lines(files: Files, draw: random.Random, world: World) -> None:
    lines = files.get("details.jsonl", b"").splitlines(keepends=True)
    if len(lines) < 2:
        return
    one, two = draw.randrange(len(lines)), draw.randrange(len(lines))
    how = draw.choice(["drop", "swap", "repeat", "move"])
    if how == "swap":
        lines[one], lines[two] = lines[two], lines[one]
    elif how == "repeat":
        lines.insert(two, lines[one])
    else:
        line = lines.pop(one)
        lines[two:two] = [line] if how == "move" else []
    files["details.jsonl"] = b"".join(lines)


def edit_details(files: Files, draw: random.Random, world: World) -> None:
    """Write a line anew, with one value changed or only written otherwise."""
    lines = files.get("details.jsonl", b"").splitlines()
    try:
        number = draw.randrange(len(lines))
        details = json.loads(lines[number])
        details[draw.choice(sorted(details))] = draw.choice([None, 0, "0", [], {}, 0.125])
    except (ValueError, TypeError, IndexError):
        return
    lines[number] = json.dumps(details).encode()
    files["details.jsonl"] = b"\n".join([*lines, b""])


def swap_files(files: Files, draw: random.Random, world: World) -> None:
    one, two = any_file(files, draw), any_file(files, draw)
    files[one], files[two] = files[two], files[one]


def exchange(files: Files, draw: random.Random, world: World) -> None:
    """Put files of an earlier time or of another run in place of these."""
    source = draw.choice([world.early, world.other])
    shared = sorted(source)
    for name in draw.sample(shared, draw.randrange(1, len(shared) + 1)):
        files[name] = source[name]


def roll_back_checkpoint(files: Files, draw: random.Random, world: World) -> None:
    files["checkpoint"] = draw.choice(world.pins)[1].encode()
    if draw.random() < 0.5:
        files.pop("wal", None)


def replace_all(files: Files, draw: random.Random, world: World) -> None:
    """Put the whole ledger back to an earlier time, or another run in its place."""
    source = draw.choice([world.early, world.other])
    files.clear()
    files.update(source)


def add_file(files: Files, draw: random.Random, world: World) -> None:
    name = draw.choice(["tile/0/000.p/200", "tile/entries/000.p/3", "tile/1/000.p/1", "tile/0/000", "notes.txt"])
    files[name] = draw.randbytes(draw.randrange(200))


def rebuild_tree(files: Files, draw: random.Random, world: World) -> None:
    """Drop, move or repeat an entry and make all hashes anew, with the checkpoint as it was signed."""
    items, checkpoint = list(world.items), files.get("checkpoint", b"")
    one, two = draw.randrange(len(items)), draw.randrange(len(items))
    how = draw.choice(["drop", "move", "repeat"])
    item = items[one] if how == "repeat" else items.pop(one)
    items[two:two] = [] if how == "drop" else [item]
    files.update(signed_files(items, KEY))
    files["checkpoint"] = checkpoint


def change_key(files: Files, draw: random.Random, world: World) -> None:
    """Put another key in the place of the operator's, and sign the checkpoint with it or leave that."""
    files["operator.vkey"] = (THIEF.verifier.text + "\n").encode()
    if draw.random() < 0.5 and b"\n\n" in files.get("checkpoint", b""):
        text = files["checkpoint"].decode("utf-8", "replace").partition("\n\n")[0] + "\n"
        files["checkpoint"] = THIEF.sign_note(text).encode()


# ------------------------------------------------------------------------------------ what the operator can do to it


def change_step(entry: StepEntry, details: dict[str, object], draw: random.Random) -> Item:
    """Return another step in a step's place: other rows, weights, classes, or norms."""
    number = draw.randrange(len(entry.microbatches))
    cells = list(entry.microbatches)
    changed: dict[str, object] = {
        "rows": {"row_commitment": draw.randbytes(32)},
        "weight": {"weight": draw.random()},
        "num_rows": {"num_rows": draw.randrange(9)},
        "class": {"class_id": draw.randrange(3)},
        "route": {"route_id": draw.randrange(3)},
    }[draw.choice(["rows", "weight", "num_rows", "class", "route"])]
    cells[number] = replace(cells[number], **changed)
    if draw.random() < 0.5:
        details = details | {"loss": draw.random()}
    return replace(entry, microbatches=tuple(cells), details_digest=details_digest(details)), details


def change_items(items: list[Item], draw: random.Random) -> list[Item]:
    place = draw.randrange(len(items))
    entry, details = items[place]
    how = draw.choice(["cut", "drop", "swap", "repeat", "change", "change", "rename"])
    if how == "cut":
        return items[:place]
    if how == "repeat":
        return [*items[: place + 1], *items[place:]]
    if how == "drop":
        return items[:place] + items[place + 1 :]
    if how == "swap":
        other = draw.randrange(len(items))
        items[place], items[other] = items[other], items[place]
    elif how == "change" and isinstance(entry, StepEntry) and details is not None:
        items[place] = change_step(entry, details, draw)
    elif how == "rename" and isinstance(items[0][0], RunEntry):
        items[0] = replace(items[0][0], run_id=f"run {draw.random()}"), items[0][1]
    return items


def sign_again(files: Files, draw: random.Random, world: World) -> None:
    """Sign other entries: with the operator's key, or with another one that is put beside them."""
    items = change_items(list(world.items), draw)
    files.clear()
    files.update(signed_files(items, draw.choice([KEY, KEY, KEY, THIEF])))


TAMPERINGS: list[Callable[[Files, random.Random, World], None]] = [
    flip_bytes,
    truncate,
    insert_bytes,
    remove,
    remove_tiles,
    change_lines,
    edit_details,
    swap_files,
    exchange,
    roll_back_checkpoint,
    replace_all,
    add_file,
    rebuild_tree,
    change_key,
    sign_again,
]


# ------------------------------------------------------------------------------------------------------ the promise


class Disk:
    """A directory that is made to hold given files, writing only what differs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._held: Files = {}

    def hold(self, files: Files) -> None:
        for name in self._held.keys() - files.keys():
            (self.directory / name).unlink()
        for name, data in files.items():
            if self._held.get(name) != data:
                path = self.directory / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        self._held = dict(files)


def read_back(directory: Path, size: int) -> list[tuple[bytes, bytes | None]]:
    """Return the first entries and their details lines."""
    items = list(Scan(directory, read_head(directory, KEY.verifier)))
    return [(item.data, item.details) for item in items[:size]]


def tamper(
    folder: Path, seeds: range, num_steps: int, *, is_pinned: bool = True
) -> tuple[Counter[tuple[str, str]], list[int]]:
    """Tamper once for each seed.

    Returns:
        How often each kind was found, changed nothing that the pin covers, or was missed; and the seeds of the missed.
    """
    world = make_world(folder, num_steps)
    disk = Disk(folder / "disk")
    disk.hold(world.files)
    whole = read_back(disk.directory, len(world.items))
    assert len(whole) == len(world.items)
    counts: Counter[tuple[str, str]] = Counter()
    missed = []
    for seed in seeds:
        draw = random.Random(seed)
        files = dict(world.files)
        kinds = draw.choices(TAMPERINGS, k=draw.choice([1, 1, 1, 2, 3]))
        for kind in kinds:
            if files:
                kind(files, draw, world)
        size, pin = draw.choice(world.pins)
        disk.hold(files)
        try:
            verify_ledger(disk.directory, vkey=KEY.verifier.text, pinned=pin if is_pinned else None)
            is_missed = read_back(disk.directory, size) != whole[:size]
            how = "missed" if is_missed else "changed nothing covered"
        except LedgerError:
            how = "found"
        counts[kinds[0].__name__ if len(kinds) == 1 else "several", how] += 1
        missed += [seed] * (how == "missed")
    return counts, missed


@pytest.mark.parametrize(
    ("num_steps", "seeds"),
    [
        (12, range(280)),
        (270, range(280, 310)),
    ],
)
def test_tampering_is_found_or_changes_nothing_that_the_pin_covers(
    tmp_path: Path, num_steps: int, seeds: range
) -> None:
    counts, missed = tamper(tmp_path, seeds, num_steps)
    assert missed == []
    found = sum(number for (_, how), number in counts.items() if how == "found")
    assert len(seeds) / 2 < found < len(seeds)


def test_without_the_pin_some_of_it_is_missed(tmp_path: Path) -> None:
    """The control: what only the operator can do, and putting everything back to an earlier time."""
    counts, missed = tamper(tmp_path, range(280), 12, is_pinned=False)
    assert missed
    kinds = {kind for (kind, how) in counts if how == "missed"}
    assert kinds <= {"roll_back_checkpoint", "replace_all", "exchange", "sign_again", "several"}
    assert {"replace_all", "sign_again"} <= kinds
