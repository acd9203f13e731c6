"""Which mutants are run: drawn evenly over lines, the same ones for the same seed; and the list of equivalent ones."""

from __future__ import annotations

import random
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .operators import Mutant, find

PACKAGE = "src/cosmati"
ROOMS = ("core", "train", "routing", "ledger", "optim")


@dataclass(frozen=True, kw_only=True)
class Equivalent:
    """A mutant that no test can kill, known by its file and its line before and after, and why."""

    file: str
    line: str
    becomes: str
    reason: str


def room(path: str) -> str:
    """The room of a file: `src/cosmati/core/plan.py` is in `core`."""
    return path.removeprefix(f"{PACKAGE}/").split("/")[0]


def mutants_of(root: Path, rooms: Sequence[str]) -> Iterator[Mutant]:
    """Every mutant of the rooms' files."""
    for name in rooms:
        files = sorted((root / PACKAGE / name).rglob("*.py"))
        if not files:
            msg = f"There is no room {PACKAGE}/{name}. Rooms are the folders of {PACKAGE}."
            raise ValueError(msg)
        for file in files:
            yield from find(file.read_bytes(), file.relative_to(root).as_posix())


def draw(mutants: Iterable[Mutant], seed: str) -> Iterator[Mutant]:
    """The mutants in an order that the seed fixes: one of each line, then a second one of each, and so on."""
    by_line: dict[tuple[str, int], list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        by_line[mutant.path, mutant.line].append(mutant)
    choice = random.Random(seed)  # noqa: S311 - a sample, not a secret
    lines = list(by_line.values())
    for line in lines:
        choice.shuffle(line)
    choice.shuffle(lines)
    while lines:
        for line in lines:
            yield line.pop()
        lines = [line for line in lines if line]


def read_equivalents(path: Path) -> list[Equivalent]:
    """Read the list. A missing field, an unknown one or an empty reason raises."""
    tables = tomllib.loads(path.read_text(encoding="utf-8")).get("equivalent", [])
    equivalents = [Equivalent(**table) for table in tables]
    for equivalent in equivalents:
        if not equivalent.reason.strip():
            msg = f"{path}: {equivalent} needs a reason: why can no test tell it from the program?"
            raise ValueError(msg)
    return equivalents
