"""What pytest is asked to do on the way: run chosen tests in a given order, or note which lines each test runs.

Loaded with `-p tools.mutants.plugin`. `MUTANTS_TESTS` names a file with a list of test ids: those run, in that
order, each with as many seconds as stand beside it. `MUTANTS_MAP` names a folder: tests that its `known.json`
holds aren't run again; for the others, lines, duration and outcome are written there, by each process.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .line_map import lines_by_test

if TYPE_CHECKING:
    from coverage import Coverage

CURRENT = "MUTANTS_CURRENT"
"""The test that runs now, or the fixture, for the processes that it starts: they have a static context of that name."""


def pytest_configure(config: pytest.Config) -> None:
    """Take part where one of the two variables asks for it."""
    if chosen := os.environ.get("MUTANTS_TESTS"):
        config.pluginmanager.register(Chosen(Path(chosen)))
    if folder := os.environ.get("MUTANTS_MAP"):
        config.pluginmanager.register(Mapping(Path(folder), config))


class Chosen:
    """Runs the tests of a list and no others."""

    def __init__(self, chosen: Path) -> None:
        self._seconds: dict[str, float] = json.loads(chosen.read_text())
        self._failed = chosen.with_name("failed")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the chosen ones, in the order of the list."""
        place = {test: number for number, test in enumerate(self._seconds)}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in place])
        items[:] = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])
        for item in items:
            item.add_marker(pytest.mark.timeout(self._seconds[item.nodeid]))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write down what couldn't be collected."""
        self._note(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write down what failed."""
        self._note(report)

    def _note(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.failed:
            with self._failed.open("a") as file:
                file.write(f"{report.nodeid}\n")


class Mapping:
    """Notes which lines each test runs, in this process and in those that it starts."""

    def __init__(self, folder: Path, config: pytest.Config) -> None:
        self._folder = folder
        self._known: set[str] = set(json.loads((folder / "known.json").read_text()))
        self._collected: list[str] = []
        self._work: dict[str, float] = {}
        self._duration: dict[str, float] = defaultdict(float)
        self._outcome: dict[str, str] = {}
        self._fixtures: dict[str, list[str]] = {}
        worker = getattr(config, "workerinput", None)
        self._name = "main" if worker is None else worker["workerid"]
        is_controller = worker is None and config.getoption("numprocesses", None)
        self._coverage = None if is_controller else self._start(folder / "coverage.ini")

    @staticmethod
    def _start(settings: Path) -> Coverage:
        from coverage import Coverage

        os.environ["COVERAGE_PROCESS_START"] = str(settings)  # what coverage looks for in every process that starts
        coverage = Coverage(config_file=str(settings), data_file=None)
        coverage.start()
        return coverage

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what is known."""
        self._collected = [item.nodeid for item in items]
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self._known])
        items[:] = [item for item in items if item.nodeid not in self._known]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Name the context after the test."""
        before = sum(os.times()[:4])
        known = getattr(item, "_fixtureinfo", None)
        used = [definitions[-1] for definitions in known.name2fixturedefs.values()] if known is not None else []
        self._fixtures[item.nodeid] = [_name_of(fixture) for fixture in used if fixture.scope != "function"]
        with self._context(item.nodeid):
            yield
        self._work[item.nodeid] = sum(os.times()[:4]) - before

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        """Name the context after a fixture that tests share: whichever comes first, all of them rest on it."""
        if fixturedef.scope == "function":
            yield
            return
        with self._context(_name_of(fixturedef)):
            yield

    @contextmanager
    def _context(self, name: str) -> Iterator[None]:
        before = os.environ.get(CURRENT, "")
        self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, name: str) -> None:
        os.environ[CURRENT] = name
        if self._coverage is not None:
            self._coverage.switch_context(name)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Sum the durations of set-up, call and tear-down."""
        self._duration[report.nodeid] += report.duration
        if self._outcome.get(report.nodeid, "passed") == "passed":
            self._outcome[report.nodeid] = report.outcome

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write what this process saw."""
        facts = {
            "collected": self._collected,
            # What forks do for a test is none of its children's time, but of the clock's.
            "tests": {
                test: (max(work, self._duration[test]), self._duration[test], self._outcome[test])
                for test, work in self._work.items()
            },
            "fixtures": self._fixtures,
            "lines": [] if self._coverage is None else self._lines(self._coverage, session.config.rootpath),
        }
        (self._folder / f"seen-{self._name}.json").write_text(json.dumps(facts))

    @staticmethod
    def _lines(coverage: Coverage, root: Path) -> list[tuple[str, str, str]]:
        coverage.stop()
        return [(test, path, f"{bits:x}") for test, path, bits in lines_by_test(coverage.get_data(), root)]


def _name_of(fixture: pytest.FixtureDef[Any]) -> str:
    return f"fixture {fixture.baseid}::{fixture.argname}"
