"""Which tests a mutant is run against."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .operators import Lines, Mutant

WORK = 240.0
"""Processor seconds that the tests of one mutant may take together, as they took when the map was made: coverage.py
makes them about twice as long as they are."""
FEW = 24
"""So many tests of one mutant all run, whatever they take: several ranks' are slow, and few."""
EACH = 2
"""So many tests run each line of a mutant's file that any of its tests runs."""


@dataclass(frozen=True, kw_only=True)
class Test:
    """One test as it ran on the tree without mutants: passed, failed or skipped.

    `work` are the seconds of its processes, its `seconds` those of the clock on the wall, which other work on the
    machine makes longer. `lines` are those that it runs, by file.
    """

    name: str
    work: float
    seconds: float
    outcome: str
    lines: dict[str, Lines]

    @property
    def file(self) -> str:
        """Where it stands."""
        return self.name.split("::", maxsplit=1)[0]

    @property
    def function(self) -> str:
        """The test without its parameters."""
        return self.name.split("[", maxsplit=1)[0]

    def runs(self, path: str, lines: Lines) -> bool:
        """Whether any of these lines ran."""
        return self.lines.get(path, 0) & lines != 0


def choose(mutant: Mutant, tests: Iterable[Test], work: float = WORK, few: int = FEW) -> list[Test]:
    """The tests nearest to a mutant, in the order in which to run them.

    They are those that run lines near it (see `Mutant.near`), the nearest that anybody runs; where there are none, all
    of its room and those of the golden bits. For a statement that runs at import those of the whole house come first
    (`tests/test_*.py`). Then come those that run the rest of its file, `EACH` for each of its lines: where thousands
    make an object, few may read the attribute that isn't set. Then the tests of its room, quick ones before slow ones;
    of a test with many parameters a second case is taken once every other test has its first. More than `few` tests
    may take `work` seconds together.
    """
    passed = [test for test in tests if test.outcome == "passed"]
    room = f"tests/{mutant.path.split('/')[2]}/"
    found: list[Test] = []
    for lines in mutant.near:
        found = found or [test for test in passed if test.runs(mutant.path, lines)]
    if not found:
        found = [test for test in passed if test.name.startswith((room, "tests/golden/"))]
    first: tuple[str, ...] = (room,)
    house: list[Test] = []
    if mutant.at_import:
        first = ("tests/test_", room)
        house = [test for test in passed if test.name.startswith(first[0])]
        found += [test for test in house if test not in found]
    work = work if len(found) > few else math.inf
    chosen: dict[str, Test] = {}
    for test in (*_spread(house, first), *_of_all_lines(found, mutant), *_spread(found, first)):
        if test.name not in chosen and (test.work <= work or not chosen):
            chosen[test.name] = test
            work -= test.work
    return sorted(chosen.values(), key=lambda test: (_turn(test, first), test.work))


def _of_all_lines(found: list[Test], mutant: Mutant) -> Iterator[Test]:
    """Quick tests, `EACH` for each line of the mutant's file that any runs: those first that few run."""
    running: dict[int, list[Test]] = defaultdict(list)
    for test in sorted(found, key=lambda test: test.work):
        lines = test.lines.get(mutant.path, 0) & mutant.near[-1]
        while lines:
            line = lines & -lines
            running[line].append(test)
            lines ^= line
    taken: dict[str, Test] = {}
    for line, tests in sorted(running.items(), key=lambda one: len(one[1])):
        missing = EACH - sum(test.runs(mutant.path, line) for test in taken.values())
        new = [test for test in tests if test.name not in taken] if missing > 0 else []
        taken |= {test.name: test for test in new[:missing]}
    yield from taken.values()


def _turn(test: Test, first: tuple[str, ...]) -> int:
    """The number of the folder that a test stands in, or how many come first."""
    return next((number for number, folder in enumerate(first) if test.name.startswith(folder)), len(first))


def _spread(found: list[Test], first: tuple[str, ...]) -> list[Test]:
    """Tests of the first folders, then one case of each test, then the second ones, and so on; quick before slow."""
    rounds: dict[str, int] = defaultdict(int)
    keys = {}
    for test in sorted(found, key=lambda test: test.work):
        keys[test.name] = (_turn(test, first), rounds[test.function], test.work)
        rounds[test.function] += 1
    return sorted(found, key=lambda test: keys[test.name])
