"""Keys of rows that can be forgotten one by one: Goldreich, Goldwasser and Micali's tree of keys, 256-ary, punctured.

Each node's key gives those of its 256 children, and none gives its parent's: child i of a node is bytes 32 i to
32 i + 31 of BLAKE3 over `cosmati row keys`, keyed with it. A row's key is the leaf of its id, eight levels down: a
byte of the id each, the highest first. Classes have leaves too, in the half of the tree that no row's id reaches.

What is kept at first is the root. To forget a leaf is to put the siblings along its path in place of their ancestors:
all other keys follow from what is left, and the forgotten one from nothing. That's a puncture.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import blake3

from cosmati.errors import LedgerError
from cosmati.records.foreign_json import read_foreign_json
from cosmati.storage.atomic import replace_secret

KEY_BYTES = 32
KEYS_MAGIC = b"cosmati row keys 1\n"
_CONTEXT = b"cosmati row keys"
_LEVELS, _CHILDREN = 8, 256
_OF_CLASSES = 1 << 63
"""Where the leaves of classes begin: ids of rows are below."""
_MOST_CACHED = 1 << 17
_OPENED = b""
"""In place of a node's key: its children are kept."""

Node = tuple[int, int]
"""Level (0 is the root's, 8 that of leaves) and position on it."""


class RowKeys:
    """The keys of a run's rows and classes that weren't forgotten.

    Args:
        root: key of the tree, 32 bytes, drawn at random.

    Attributes:
        commitment: to the root, 32 bytes; it stays when the root is gone.
        certificates: of deletions that have punctured it: number by digest, in hex.
    """

    def __init__(self, root: bytes) -> None:
        assert len(root) == KEY_BYTES
        self.commitment = blake3.blake3(b"cosmati row keys root" + root).digest()
        self.certificates: Mapping[str, int] = {}
        self._root: bytes | None = root
        self._opened: dict[Node, list[bytes | None]] = {}
        self._cache: dict[Node, bytes] = {}
        self._above_leaves: dict[int, bytes] = {}

    def of(self, row_id: int) -> bytes | None:
        """Return a row's key, 32 bytes; None where it was forgotten, or no row has such an id: a tombstone's is -1."""
        return self._leaf(int(row_id)) if 0 <= row_id < _OF_CLASSES else None

    def of_class(self, name: str) -> bytes | None:
        """Return a class's key, 32 bytes; None where it was forgotten."""
        return self._leaf(_place_of(name))

    def has(self, row_id: int) -> bool:
        """Say whether a row's key can be derived."""
        return self.of(row_id) is not None

    def forget(self, ids: Iterable[int]) -> None:
        """Forget the keys of rows; ids that no row has have none. It's lost when it's saved, and not before."""
        for row_id in ids:
            if 0 <= row_id < _OF_CLASSES:
                self._puncture(int(row_id))

    def forget_classes(self, names: Iterable[str]) -> None:
        """Forget the keys of classes, and with them whatever took part as a row of theirs."""
        for name in names:
            self._puncture(_place_of(name))

    def nodes(self) -> Iterator[tuple[Node, bytes]]:
        """Yield all that's kept: level and position of each node, and its key."""
        if self._root:
            yield (0, 0), self._root
        for (level, position), children in sorted(self._opened.items()):
            for index, key in enumerate(children):
                if key:
                    yield (level + 1, position * _CHILDREN + index), key

    def _leaf(self, place: int) -> bytes | None:
        parent = place >> 8
        if children := self._opened.get((_LEVELS - 1, parent)):
            return children[place & 255]
        key = self._above_leaves.get(parent)
        if key is None:
            key = self._key(_LEVELS - 1, parent)
            if key is None:
                return None
            if len(self._above_leaves) >= _MOST_CACHED:  # they come and go; the fewer ones above them stay
                self._above_leaves.clear()
            self._above_leaves[parent] = key
        return _child(key, place & 255)

    def _key(self, level: int, position: int) -> bytes | None:
        """Return a node's key; None where it can't be derived."""
        if not level:
            return self._root or None
        if (level, position) in self._cache:
            return self._cache[level, position]
        above = level - 1, position >> 8
        if (children := self._opened.get(above)) is not None:
            return children[position & 255] or None
        parent = self._key(*above)
        if parent is None:
            return None
        key = _child(parent, position & 255)
        if level < _LEVELS - 1:
            if len(self._cache) >= _MOST_CACHED:
                self._cache.clear()
            self._cache[level, position] = key
        return key

    def _puncture(self, place: int) -> None:
        if self._leaf(place) is None:
            return
        for level in range(_LEVELS):
            self._open(level, place >> 8 * (_LEVELS - level))
        self._cache.clear()
        self._above_leaves.clear()
        self._put(_LEVELS, place, None)

    def _open(self, level: int, position: int) -> None:
        """Have a node's children in place of it."""
        if (level, position) not in self._opened:
            key = self._key(level, position)
            assert key is not None, "something below it can be derived"
            whole = _stream(key)(length=_CHILDREN * KEY_BYTES)
            children = [whole[start : start + KEY_BYTES] for start in range(0, len(whole), KEY_BYTES)]
            self._opened[level, position] = [*children]
            self._put(level, position, _OPENED)

    def _put(self, level: int, position: int, key: bytes | None) -> None:
        """Keep something in a node's place; where nothing is left of all children, their parent's gone, too."""
        if not level:
            self._root = key
            return
        above = level - 1, position >> 8
        children = self._opened[above]
        children[position & 255] = key
        if key is None and children.count(None) == _CHILDREN:
            del self._opened[above]
            self._put(*above, None)

    def to_bytes(self) -> bytes:
        """Return what the file holds.

        A line that names the form; a line of JSON (commitment, certificates, and each opened node's level and
        position); for the root and each child a byte that says what is kept of it; the keys; BLAKE3 over all before.
        """
        nodes = sorted(self._opened)
        places = [self._root, *(key for node in nodes for key in self._opened[node])]
        head = {"certificates": dict(self.certificates), "commitment": self.commitment.hex(), "opened": nodes}
        marks = bytes(0 if key is None else 1 if key else 2 for key in places)
        text = json.dumps(head, sort_keys=True, separators=(",", ":")).encode()
        data = KEYS_MAGIC + text + b"\n" + marks + b"".join(filter(None, places))
        return data + blake3.blake3(data).digest()

    @classmethod
    def from_bytes(cls, data: bytes) -> RowKeys:
        """Read what a file holds.

        Raises:
            LedgerError: it isn't one, or isn't whole.
        """
        try:
            return cls._parsed(data)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            msg = (
                f"This is no file of row keys, or it's damaged ({error!r}). Restore it from a copy, and forget again "
                "whatever was forgotten since: the copy may still have its keys."
            )
            raise LedgerError(msg) from error

    @classmethod
    def _parsed(cls, data: bytes) -> RowKeys:
        body, found = data[:-KEY_BYTES], cls(bytes(KEY_BYTES))
        if not body.startswith(KEYS_MAGIC) or blake3.blake3(body).digest() != data[-KEY_BYTES:]:
            raise ValueError("its first line or its digest is another")
        text, rest = body[len(KEYS_MAGIC) :].split(b"\n", 1)
        head = read_foreign_json(text)
        nodes: list[Node] = [(level, position) for level, position in head["opened"]]
        marks, keys = rest[: 1 + _CHILDREN * len(nodes)], rest[1 + _CHILDREN * len(nodes) :]
        if len(keys) != KEY_BYTES * marks.count(1):
            raise ValueError("it has more or fewer keys than it says")
        each = (keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES))
        places = [(None, next(each) if mark == 1 else None, _OPENED)[mark] for mark in marks]
        found.commitment = bytes.fromhex(head["commitment"])
        found.certificates = {str(digest): int(number) for digest, number in head["certificates"].items()}
        found._root, children = places[0], places[1:]
        found._opened = {node: children[_CHILDREN * n : _CHILDREN * (n + 1)] for n, node in enumerate(nodes)}
        return found

    @classmethod
    def load(cls, path: Path) -> RowKeys:
        """Read a run's file.

        Raises:
            LedgerError: it's gone, or isn't whole.
        """
        try:
            return cls.from_bytes(path.read_bytes())
        except OSError as error:
            raise LedgerError(f"{path} can't be read: {error}. Put the run's own row keys back.") from error
        except LedgerError as error:
            raise LedgerError(f"{path}: {error}") from error

    def save(self, path: Path) -> None:
        """Put it in a file's place, durably: after a crash there's the one or the other, and never a key too many."""
        replace_secret(path, self.to_bytes())


def _place_of(name: str) -> int:
    """Return the leaf of a class: BLAKE3 over its name, its first bit set."""
    return int.from_bytes(blake3.blake3(f"cosmati class {name}".encode()).digest(length=8), "big") | _OF_CLASSES


def _stream(key: bytes) -> Callable[..., bytes]:
    return blake3.blake3(_CONTEXT, key=key).digest


def _child(key: bytes, index: int) -> bytes:
    return _stream(key)(length=KEY_BYTES, seek=KEY_BYTES * index)
