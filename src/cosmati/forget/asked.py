"""What is to be forgotten: classes, or rows by their ids; a subject's rows are found by an index first."""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import rfc8785

from cosmati.errors import ForgetError
from cosmati.records.joint_classes import members_of

IdKind = Literal["rows", "documents", "packs"]
"""What an id is of. `rows` are what the run itself calls its rows, which may be either of the others."""
KINDS: Mapping[str, IdKind] = {"row_id": "rows", "document": "documents", "pack": "packs"}
"""The same, by the name that a file of ids has for it."""


@dataclass(frozen=True)
class ToForget:
    """A request. Its `repr` shows no row and no subject.

    Attributes:
        classes: names of classes, with all below them.
        rows: ids of rows, or of documents of packs.
        subject: whose rows they are, where that's known.
        meant: what these rows are, in words, where that's known.
        doubtful: those of the ids that are of something else, too (of packs as well as of documents), where nobody has
            said which is meant.

    Raises:
        ForgetError: neither classes nor rows, or both.
    """

    classes: tuple[str, ...] = ()
    rows: frozenset[int] = field(default=frozenset(), repr=False)
    subject: str = field(default="", repr=False)
    meant: str = field(default="", compare=False)
    doubtful: tuple[int, ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        if bool(self.classes) == bool(self.rows):
            what = f"The subject has no rows in the index{': nothing is to be forgotten' if self.subject else ''}"
            msg = f"{what}." if self.subject and not self.rows else "Ask for classes, or for rows: one of the two."
            raise ForgetError(msg)

    @property
    def words(self) -> str:
        """It in words, without ids."""
        if self.classes:
            return f"class {', '.join(self.classes)}"
        return f"{len(self.rows)} rows" + (" of a subject" if self.subject else "")

    def digest(self, salt: bytes) -> str:
        """Return the hex digest by which a record names the request: who lacks the run's salt can't try ids out."""
        told = {"classes": sorted(self.classes), "rows": sorted(map(str, self.rows)), "subject": self.subject}
        return hmac.digest(salt, b"cosmati forget\0" + rfc8785.dumps(told), "sha256").hex()

    def names_in(self, known: Iterable[str]) -> tuple[str, ...]:
        """Return those of the known classes whose rows are meant: rows of several classes belong to each of them.

        Raises:
            ForgetError: one that's asked for is none of them.
        """
        known = list(dict.fromkeys(known))
        for name in self.classes:
            if not any(is_within(one, name) for one in known):
                msg = f"The run has no class {name!r}. It has {', '.join(known)}."
                raise ForgetError(msg)
        return tuple(one for one in known if any(is_within(one, name) for name in self.classes))

    def has_any(self, classes: Iterable[str]) -> bool:
        """Say whether rows of one of these classes are meant."""
        return any(is_within(name, one) for name in classes for one in self.classes)


def is_within(name: str, asked: str) -> bool:
    """Say whether rows of a class belong to another one: it itself, one below it, or several of which it's one."""
    return any(one == asked or one.startswith(f"{asked}/") for one in members_of(name))


def read_ids(path: Path) -> tuple[IdKind, frozenset[int]]:
    """Read ids: a whole number on each line, or JSON with `row_id`, `document` or `pack`, which says what it's of.

    Returns:
        What they're of, `rows` where nothing is said, and the ids.

    Raises:
        ForgetError: the file can't be read, has none, a line is something else, or they're of several things.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ForgetError(f"{path} can't be read: {error}. Give a text file with a row's id on each line.") from error
    found = {_id(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()}
    if not found:
        raise ForgetError(f"{path} names no row. Write a row's id on each line.")
    kinds = {kind for kind, _ in found}
    if len(kinds) > 1:
        msg = f"{path} has ids of {' and of '.join(sorted(kinds))}, and a number means another one in each. Give a file"
        raise ForgetError(f"{msg} of each.")
    return kinds.pop(), frozenset(one for _, one in found)


def _id(line: str, where: str) -> tuple[IdKind, int]:
    try:
        told = json.loads(line)
    except ValueError:
        told = None
    said = [name for name in KINDS if isinstance(told, dict) and name in told]
    value = told[said[0]] if len(said) == 1 else told
    if type(value) is not int or not 0 <= value < 1 << 63:
        msg = (
            f"{where}: {line.strip()[:60]!r} is no row. Write its id, such as 17, or "
            '{"row_id": 17}, {"document": 17} or {"pack": 17}.'
        )
        raise ForgetError(msg)
    return KINDS[said[0]] if said else "rows", value


def overlap(one: ToForget, other: ToForget) -> bool:
    """Say whether two requests may mean the same rows; rows and classes may, since ids say no class."""
    if one.rows and other.rows:
        return bool(one.rows & other.rows) or one.subject == other.subject != ""
    if one.classes and other.classes:
        return any(is_within(a, b) or is_within(b, a) for a in one.classes for b in other.classes)
    return True
