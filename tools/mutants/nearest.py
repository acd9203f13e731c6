"""Which tests a mutant is run against."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from .operators import Lines, Mutant

WORK = 90.0
"""Processor seconds that the tests of one mutant may take together, as they took when the map was made."""


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


class Words:
    """How much a test speaks of a mutant: of its statement, and of its function's name. Rare words count more.

    A line that thousands of tests run is looked at by few of them.

    Args:
        root: of the tree.
        tests: all of them.
    """

    def __init__(self, root: Path, tests: Iterable[Test]) -> None:
        self._root = root
        self._of: dict[str, set[str]] = {}
        for file in sorted({test.file for test in tests}):
            source = (root / file).read_text()
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                    self._of[f"{file}::{node.name}"] = _words(ast.get_source_segment(source, node) or "")
        self._num_tests = Counter(word for words in self._of.values() for word in words)

    def __call__(self, mutant: Mutant) -> Callable[[Test], float]:
        """Return what gives more for a test that is nearer; 0 where nothing is in common."""
        source = (self._root / mutant.path).read_text()
        own = {
            word for n, text in enumerate(source.splitlines(), 1) if 1 << n & mutant.near[0] for word in _words(text)
        }
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and node.lineno <= mutant.line <= (node.end_lineno or node.lineno):
                own |= _words(node.name)
        return lambda test: sum(1 / self._num_tests[word] for word in own & self._of.get(test.function, set()))


def _words(text: str) -> set[str]:
    names = {word.lower() for word in re.findall(r"[A-Za-z_]\w{3,}", text)}
    return names | {part for name in names for part in name.split("_") if len(part) > 3}


def choose(
    mutant: Mutant,
    tests: Iterable[Test],
    work: float = WORK,
    words: Callable[[Mutant], Callable[[Test], float]] = lambda _: lambda _: 0.0,
) -> list[Test]:
    """The tests nearest to a mutant, in the order in which to run them.

    They are those that run lines near it (see `Mutant.near`), the nearest that anybody runs; where there are none, all
    of its room and those of the golden bits. For a statement that runs at import come those of the whole house
    (`tests/test_*.py`). Half of the work is for those that speak of its line. The tests of its room come first, quick
    ones before slow ones; of a test with many parameters a second case is taken once every other test has its first.
    """
    passed = [test for test in tests if test.outcome == "passed"]
    room = f"tests/{mutant.path.split('/')[2]}/"
    found: list[Test] = []
    for lines in mutant.near:
        found = found or [test for test in passed if test.runs(mutant.path, lines)]
    if not found:
        found = [test for test in passed if test.name.startswith((room, "tests/golden/"))]
    if mutant.at_import:
        found += [test for test in passed if test.name.startswith("tests/test_") and test not in found]
    spread, nearness = _spread(found, room), words(mutant)
    alike = sorted((test for test in spread if nearness(test)), key=nearness, reverse=True)
    chosen: dict[str, Test] = {}
    for until, turn in ((work / 2, alike), (work, spread)):
        left = until - sum(test.work for test in chosen.values())
        for test in turn:
            if test.name not in chosen and (test.work <= left or not chosen):
                chosen[test.name] = test
                left -= test.work
    return sorted(chosen.values(), key=lambda test: (not test.name.startswith(room), test.work))


def _spread(found: list[Test], room: str) -> list[Test]:
    """Tests of the room first, then one case of each test, then the second ones, and so on; quick before slow."""
    rounds: dict[str, int] = defaultdict(int)
    keys = {}
    for test in sorted(found, key=lambda test: test.work):
        keys[test.name] = (not test.name.startswith(room), rounds[test.function], test.work)
        rounds[test.function] += 1
    return sorted(found, key=lambda test: keys[test.name])
