"""Tampering with a ledger's files under a pinned checkpoint, and with a log that a witness has cosigned."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

from cosmati.errors import LedgerError
from cosmati.ledger.cosigned import FOLDER, ask_witness
from cosmati.ledger.details import encode_details
from cosmati.ledger.entry import encode_entry
from cosmati.ledger.evidence import NOBODY, TrustedEvidence, Witnessing
from cosmati.ledger.files import check_overlap
from cosmati.ledger.note import parse_checkpoint
from cosmati.ledger.reader import Scan, operators, read_head, read_verifier_key
from cosmati.ledger.tables import in_force
from cosmati.ledger.verify import LedgerReport, verify_ledger
from cosmati.ledger.wal import WAL_FILE, read_wal
from cosmati.ledger.witness import Witness, create_witness
from cosmati.records.ledger import StepEntry
from tests.ledger.ledgers import step_entry, write_run
from tests.ledger.outside_reader import read_checkpoint, read_entries
from tests.ledger.test_tampering import KEY, TAMPERINGS, Disk, change_step, make_world
from tests.ledger.test_verify import Item, items, signed_files

from .sumdb import Sumdb
from .trials import DIFFER, FOUND, HARMLESS, MISSED, Trial

VKEY = KEY.verifier.text


def read_carefully(directory: Path, pinned: str) -> tuple[object, ...]:
    """Verify as `verify_ledger` does, one entry after the other, and return what both have to say."""
    key = read_verifier_key(directory, VKEY)
    witnessing = Witnessing(directory, NOBODY)
    wal = read_wal(directory) if (directory / WAL_FILE).exists() else None
    head = read_head(directory, key)
    roots = [*witnessing.heads, parse_checkpoint(pinned.encode(), key), *([] if wal is None else [wal.head])]
    scan = Scan(directory, head, roots)
    for item, _ in in_force(scan):
        check_overlap({} if wal is None else wal.entries, item.index, item.data)
    witnessing.check(operators(scan.history, key))
    own = scan.history
    steps = own.num_steps, own.num_superseded, own.num_confirmed, tuple(sorted(own.diverged_steps)), own.has_ended
    return (head.size, head.root.hex(), own.attempt + 1, *steps)


def _told(report: LedgerReport) -> tuple[object, ...]:
    own = report.num_steps, report.num_superseded, report.num_confirmed, report.diverged_steps, report.has_ended
    return (report.size, report.root, report.num_attempts, *own)


class LedgerTarget:
    """The files of a run that resumed under another policy; pins of four ages."""

    def __init__(self, folder: Path, num_steps: int, outside: Sumdb | None) -> None:
        self.name = f"ledger of {num_steps} steps"
        self._world = make_world(folder, num_steps)
        self._disk = Disk(folder / "disk")
        self._outside = outside
        self._entries = [encode_entry(entry) for entry, _ in self._world.items]
        self._lines = [None if told is None else encode_details(told) for _, told in self._world.items]

    def check_untouched(self) -> None:
        """Fail unless each pin holds of what nobody touched."""
        self._disk.hold(self._world.files)
        for size, pin in self._world.pins:
            assert verify_ledger(self._disk.directory, vkey=VKEY, pinned=pin).pinned_size == size
            if self._outside is not None:
                assert self._outside.log(self._disk.directory, VKEY, pin) == ("", self._digest(size))

    def try_once(self, draw: random.Random) -> Trial:
        """Tamper with it in one way, or in two or three one after the other."""
        files = dict(self._world.files)
        kinds = draw.choices(TAMPERINGS, k=draw.choice([1, 1, 1, 2, 3]))
        for kind in kinds:
            if files:
                kind(files, draw, self._world)
        size, pin = draw.choice(self._world.pins)
        self._disk.hold(files)
        directory = self._disk.directory
        ours, careful = self._judge(pin), _said(read_carefully, directory, pin)
        wrong, digest = ("", "") if self._outside is None else self._outside.log(directory, VKEY, pin)
        outside = "" if self._outside is None else FOUND if wrong else "taken"
        name = kinds[0].__name__ if len(kinds) == 1 else "several"
        if ours != careful:
            return Trial(name, DIFFER, outside)
        # What they take gives the same entries; what they refuse, ours refuses too.
        if outside and (digest != self._digest(size) if not wrong else not isinstance(ours, str)):
            return Trial(name, DIFFER, outside)
        if isinstance(ours, str):
            return Trial(name, FOUND, outside)
        return Trial(name, HARMLESS if self._is_whole(size) else MISSED, outside)

    def _judge(self, pin: str) -> object:
        return _said(lambda *_: _told(verify_ledger(self._disk.directory, vkey=VKEY, pinned=pin)))

    def _digest(self, size: int) -> str:
        told = b"".join(len(one).to_bytes(2, "big") + one for one in self._entries[:size])
        return hashlib.sha256(told).hexdigest()

    def _is_whole(self, size: int) -> bool:
        """Say whether the entries under the pin and their details are there, by a reader that knows only the form."""
        directory = self._disk.directory
        lines = [line for line in self._lines[:size] if line is not None]
        held = (directory / "details.jsonl").read_bytes().split(b"\n")
        entries = read_entries(directory, read_checkpoint(directory)[1])
        return entries[:size] == self._entries[:size] and held[: len(lines)] == lines


def _said(read: object, *given: object) -> object:
    try:
        return read(*given)  # type: ignore[operator]
    except LedgerError as error:
        return str(error)


class ForkTarget:
    """A log that its operator forks at some entry: a witness had cosigned so many of the first ones."""

    name = "fork"
    num_steps = 12

    def __init__(self, folder: Path, outside: Sumdb | None) -> None:
        self._outside = outside
        self._disk = Disk(folder / "disk")
        create_witness(folder / "witness", "witness.example/w")
        witness = Witness(folder / "witness")
        witness.trust(KEY.verifier)
        self._trusted = TrustedEvidence((witness.key,))
        self._items: list[Item] = items(self.num_steps)
        ledger = folder / "run"
        write_run(ledger, KEY, 0).close()
        self._cosigned: dict[int, tuple[bytes, str]] = {}
        for size in range(2, len(self._items) + 1):
            for name, data in signed_files(self._items[:size], KEY).items():
                (ledger / name).parent.mkdir(parents=True, exist_ok=True)
                (ledger / name).write_bytes(data)
            ask_witness(ledger, witness.key, witness.send)
            note = (ledger / FOLDER / str(size)).read_bytes()
            self._cosigned[size] = note, (ledger / "checkpoint").read_text()

    def check_untouched(self) -> None:
        """Fail unless the log itself goes on from all that was cosigned."""
        notes = {f"{FOLDER}/{size}": note for size, (note, _) in self._cosigned.items()}
        self._disk.hold(signed_files(self._items, KEY) | notes)
        report = verify_ledger(self._disk.directory, vkey=VKEY, witnesses=self._trusted)
        assert report.evidence_level.startswith("L1")

    def try_once(self, draw: random.Random) -> Trial:
        """Fork at an entry, sign so many, and show that with the witness's note, or before there was one."""
        at, cosigned = draw.randrange(1, len(self._items)), draw.choice(sorted(self._cosigned))
        forked = list(self._items[:at])
        entry, told = self._items[at]
        assert isinstance(entry, StepEntry)
        assert told is not None
        forked.append(change_step(entry, told, draw))
        while forked[-1] == self._items[at]:
            forked[-1] = change_step(entry, told, draw)
        num = draw.randrange(at, self.num_steps + 4)
        forked += [step_entry(step, salt=draw.choice(["", "other"])) for step in range(at, num)]
        files, (note, pin) = signed_files(forked, KEY), self._cosigned[cosigned]
        self._disk.hold(files)
        directory = self._disk.directory
        assert verify_ledger(directory, vkey=VKEY).size == len(forked), "nothing shows a fork before somebody cosigned"
        self._disk.hold(files | {f"{FOLDER}/{cosigned}": note})
        is_found = isinstance(_said(lambda: verify_ledger(directory, vkey=VKEY, witnesses=self._trusted)), str)
        outside = ""
        if self._outside is not None:
            outside = FOUND if self._outside.log(directory, VKEY, pin)[0] else "taken"
        is_covered = at < cosigned or len(forked) < cosigned
        kind = "before its end" if is_covered else "after its end"
        if outside and (outside == FOUND) != is_found:
            return Trial(kind, DIFFER, outside)
        if is_covered:
            return Trial(kind, FOUND if is_found else MISSED, outside)
        return Trial(kind, MISSED if is_found else HARMLESS, outside)
