"""Tampering with proofs: that an entry is in a log, and that one signed tree begins with another."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

from cosmati.errors import LedgerError
from cosmati.ledger.consistency import is_consistent, prove_consistency
from cosmati.ledger.details import encode_details
from cosmati.ledger.entry import encode_entry
from cosmati.ledger.note import TreeHead, parse_checkpoint
from cosmati.ledger.proof import check_inclusion, prove_inclusion
from tests.ledger.outside_witness import tree_hash
from tests.ledger.test_tampering import KEY, THIEF, make_world
from tests.ledger.test_verify import write_signed

from .sumdb import Sumdb
from .trials import DIFFER, FOUND, HARMLESS, MISSED, Trial, change_bytes

VKEY = KEY.verifier.text


class InclusionTarget:
    """Proofs of a log's entries. One that's taken may prove whatever is so: that entry, in that place, with that."""

    name = "proof of an entry"

    def __init__(self, folder: Path, outside: Sumdb | None) -> None:
        self._outside = outside
        world = make_world(folder, 14)
        self._leaves = [encode_entry(entry) for entry, _ in world.items]
        self._lines = [None if told is None else encode_details(told).decode() for _, told in world.items]
        self._proofs = [prove_inclusion(folder / "run", entry=index) for index in range(len(self._leaves))]
        self._notes = [pin for _, pin in world.pins]

    def check_untouched(self) -> None:
        """Fail unless each proof holds as it was made."""
        for index, text in enumerate(self._proofs):
            assert check_inclusion(text, VKEY).index == index
            assert self._asked(json.loads(text)) in {"", "taken"}

    def try_once(self, draw: random.Random) -> Trial:
        """Change bytes of a proof, or what it says."""
        index = draw.randrange(len(self._proofs))
        if draw.random() < 0.4:
            kind, data = change_bytes(self._proofs[index].encode(), draw)
            text = data.decode("utf-8", "replace")
        else:
            kind, told = self._say_otherwise(json.loads(self._proofs[index]), draw)
            text = json.dumps(told)
        try:
            proven = check_inclusion(text, VKEY)
        except LedgerError:
            is_found = True
        else:
            is_found = False
        try:
            told = json.loads(text)
            outside = self._asked(told)
        except (ValueError, TypeError, LookupError, AttributeError):
            told, outside = None, ""
        if is_found:
            return Trial(kind, FOUND, outside)
        assert told is not None, "what isn't JSON is no proof"
        data, line = base64.b64decode(told["entry"]), told["details"]
        is_so = self._leaves[proven.index] == data and self._lines[proven.index] == line
        head = TreeHead(proven.head.size, proven.head.root)
        is_so = is_so and tree_hash(self._leaves[: head.size]) == head.root
        if outside == FOUND:
            return Trial(kind, DIFFER, outside)
        return Trial(kind, HARMLESS if is_so else MISSED, outside)

    def _asked(self, told: dict[str, Any]) -> str:
        """Return what the other verifier says of a proof's fields."""
        if self._outside is None:
            return ""
        entry, *path = (base64.b64decode(one, validate=True) for one in (told["entry"], *told["path"]))
        return FOUND if self._outside.proof(VKEY, told["checkpoint"], told["index"], entry, path) else "taken"

    def _say_otherwise(self, told: dict[str, Any], draw: random.Random) -> tuple[str, dict[str, Any]]:
        other = json.loads(draw.choice(self._proofs))
        path, kind = told["path"], draw.choice(["details", "entry", "index", "path", "checkpoint", "key", "field"])
        if kind in {"details", "entry"}:
            told[kind] = other[kind]
        elif kind == "index":
            told["index"] = draw.choice([other["index"], -1, told["index"] + 1, 1 << 40, str(told["index"])])
        elif kind == "path":
            how, place = draw.choice(["drop", "reorder", "duplicate", "other"]), draw.randrange(len(path))
            if how == "drop":
                del path[place]
            elif how == "reorder":
                draw.shuffle(path)
            elif how == "duplicate":
                path.insert(place, path[place])
            else:
                told["path"] = other["path"]
        elif kind == "checkpoint":
            told["checkpoint"] = draw.choice(self._notes)
        elif kind == "key":
            text = told["checkpoint"].partition("\n\n")[0] + "\n"
            told["checkpoint"] = THIEF.sign_note(text)
        else:
            del told[draw.choice(sorted(told))]
        return kind, told


class ConsistencyTarget:
    """Proofs that the tree of one signed checkpoint begins with that of another."""

    name = "proof of a beginning"

    def __init__(self, folder: Path, outside: Sumdb | None) -> None:
        self._outside = outside
        world = make_world(folder, 40)
        self._heads, self._folder = list[tuple[TreeHead, str]](), folder / "log"
        for size in (*range(2, len(world.items), 3), len(world.items)):
            write_signed(self._folder, world.items[:size], KEY)  # a tile of each width stays there
            note = (self._folder / "checkpoint").read_text()
            self._heads.append((parse_checkpoint(note.encode(), KEY.verifier), note))

    def _proof(self, was: int, now: int) -> list[bytes]:
        return prove_consistency(self._folder, self._heads[was][0].size, self._heads[now][0].size)

    def check_untouched(self) -> None:
        """Fail unless each honest pair is consistent."""
        for now in range(len(self._heads)):
            for was in range(now + 1):
                assert self._judge(was, now, self._proof(was, now)) in {(False, ""), (False, "taken")}

    def try_once(self, draw: random.Random) -> Trial:
        """Change a proof's hashes, or say it of another pair of trees."""
        was, now = sorted(draw.choices(range(len(self._heads)), k=2))
        proof = list(self._proof(was, now))
        kind, place = draw.choice(["flip", "drop", "reorder", "duplicate", "truncate", "trees"]), 0
        if proof:
            place = draw.randrange(len(proof))
        if kind == "trees" or not proof:
            kind, other = "trees", draw.randrange(len(self._heads))
            was, now = sorted((other, draw.choice([was, now])))
        elif kind == "flip":
            proof[place] = bytes([proof[place][0] ^ 1 << draw.randrange(8)]) + proof[place][1:]
        elif kind == "drop":
            del proof[place]
        elif kind == "reorder":
            draw.shuffle(proof)
        elif kind == "duplicate":
            proof.insert(place, proof[place])
        else:
            proof[place] = proof[place][: draw.randrange(32)]
        is_found, outside = self._judge(was, now, proof)
        if outside and (outside == FOUND) != is_found:
            return Trial(kind, DIFFER, outside)
        if is_found:
            return Trial(kind, FOUND, outside)
        return Trial(kind, HARMLESS if proof == self._proof(was, now) else MISSED, outside)

    def _judge(self, was: int, now: int, proof: list[bytes]) -> tuple[bool, str]:
        (old, first), (new, last) = self._heads[was], self._heads[now]
        wrong = "" if self._outside is None else self._outside.consistency(VKEY, first, last, proof)
        outside = "" if self._outside is None else FOUND if wrong else "taken"
        return not is_consistent(old, new, proof), outside
