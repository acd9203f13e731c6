"""Which tests run which lines, from one run of the tests of each folder.

The map is kept. A test whose own file hasn't changed since, nor any of `src` and `tests` that it runs lines of, isn't
run again. Processes that a test starts are measured too.
"""

from __future__ import annotations

import ast
import fnmatch
import hashlib
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING

from .nearest import Test
from .operators import IMPORTED
from .sandbox import Sandbox

if TYPE_CHECKING:
    from coverage import CoverageData

FOLDERS = (
    *("core", "train", "routing", "ledger", "optim", "golden", "test_*.py", "cli/test_ledger*.py"),
    *("methods", "recipes", "docs", "forget", "export", "provenance", "launch", "data"),
)
"""What may run lines of the five rooms and is quick enough, below `tests`, in the order in which it's mapped."""


def read_or_build(root: Path, sandbox: Sandbox, cache: Path, jobs: int) -> list[Test]:
    """The map of the tree at `root`, from the cache as far as it still holds. Each folder is kept at once."""
    path, digests = cache / "map.json", _digests(root)
    known, done = _read(path, digests)
    for folder in (folder for folder in FOLDERS if folder not in done):
        started, files = time.monotonic(), sorted((root / "tests").glob(folder))
        if files:
            known = _run(sandbox, [str(file.relative_to(root)) for file in files], known, jobs)
            print(f"lines of tests/{folder}: {time.monotonic() - started:.0f} s", flush=True)
        done.append(folder)
        _write(path, digests, known, done)
    if failed := [test.name for test in known if test.outcome == "failed"]:
        print("left out, since they fail without a mutant:", *failed, sep="\n  ")
    return known


def tree_digest(root: Path) -> str:
    """One digest of everything that results depend on."""
    return hashlib.sha256(json.dumps(_digests(root)).encode()).hexdigest()


def _digests(root: Path) -> dict[str, str]:
    files = [path for folder in ("src", "tests") for path in sorted((root / folder).rglob("*")) if path.is_file()]
    files += [root / "pyproject.toml", root / "constraints.txt"]
    found = {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.exists() and "__pycache__" not in path.parts
    }
    # Tests are skipped where a package is absent.
    installed = sorted(f"{one.name}=={one.version}" for one in distributions())
    return found | {"installed.txt": hashlib.sha256("\n".join(installed).encode()).hexdigest()}


def _read(path: Path, digests: dict[str, str]) -> tuple[list[Test], list[str]]:
    """The tests that still hold, and the folders in which nothing has to be looked for."""
    if not path.exists():
        return [], []
    held = json.loads(path.read_text())
    tests = [
        Test(**test | {"lines": {file: int(bits, 16) for file, bits in test["lines"].items()}})
        for test in held["tests"]
    ]
    changed = {name for name in held["digests"] | digests if held["digests"].get(name) != digests.get(name)}
    if any(name.endswith(("conftest.py", ".toml", ".txt")) for name in changed):
        return [], []
    stale = {test.name for test in tests if test.file in changed or not changed.isdisjoint(test.lines)}
    touched = changed | {test.file for test in tests if test.name in stale}
    done = [folder for folder in held["done"] if not fnmatch.filter(touched, f"tests/{folder}*")]
    return [test for test in tests if test.name not in stale], done


def _write(path: Path, digests: dict[str, str], tests: list[Test], done: list[str]) -> None:
    known = [vars(test) | {"lines": {file: f"{bits:x}" for file, bits in test.lines.items()}} for test in tests]
    path.write_text(json.dumps({"digests": digests, "done": done, "tests": known}))


def _run(sandbox: Sandbox, files: list[str], known: list[Test], jobs: int) -> list[Test]:
    """Run the tests of some files that aren't known; all tests that are known then, without those that are gone."""
    folder = sandbox.root.parent / "mapping"
    folder.mkdir()
    (folder / "known.json").write_text(json.dumps([test.name for test in known]))
    (folder / "coverage.ini").write_text(
        f"[run]\nsource = {sandbox.root / 'src'}, {sandbox.root / 'tests'}\ndata_file = {folder / 'process'}\n"
        "parallel = true\ncontext = ${MUTANTS_CURRENT}\n"
        "patch = _exit\ndisable_warnings = no-data-collected, module-not-imported\n"
    )
    sandbox.pytest(["-n", str(jobs if jobs > 1 else 0), *files], {"MUTANTS_MAP": str(folder)})
    seen = [json.loads(path.read_text()) for path in sorted(folder.glob("seen-*.json"))]
    if not seen:
        msg = f"pytest couldn't run {' '.join(files)}:\n{sandbox.last_words}"
        raise RuntimeError(msg)
    lines: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    in_workers = ((test, path, int(bits, 16)) for facts in seen for test, path, bits in facts["lines"])
    for test, path, bits in (*in_workers, *_in_processes(folder, sandbox.root)):
        lines[test][path] |= bits
    for test, fixtures in (one for facts in seen for one in facts["fixtures"].items()):
        for path, bits in (one for fixture in fixtures for one in lines[fixture].items()):
            lines[test][path] |= bits
    for test, path in _imports(sandbox.root, {name for facts in seen for name in facts["tests"]}):
        lines[test][path] |= IMPORTED
    ran = {test: result for facts in seen for test, result in facts["tests"].items()}
    collected = {name for facts in seen for name in facts["collected"]}
    shutil.rmtree(folder)
    return [
        *(test for test in known if test.name in collected or not test.file.startswith(tuple(files))),
        *(
            Test(name=test, work=round(work, 4), seconds=round(seconds, 4), outcome=outcome, lines=dict(lines[test]))
            for test, (work, seconds, outcome) in ran.items()
        ),
    ]


def _in_processes(folder: Path, root: Path) -> Iterator[tuple[str, str, int]]:
    from coverage import CoverageData
    from coverage.exceptions import DataError

    for path in folder.glob("process.*"):
        data = CoverageData(basename=str(path))
        with suppress(DataError):  # a process that was killed leaves half a file
            data.read()
            yield from lines_by_test(data, root)


def _imports(root: Path, tests: set[str]) -> Iterator[tuple[str, str]]:
    """Tests, each with the files of `src` that the file it stands in imports by name."""
    by_file: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        by_file[test.split("::", maxsplit=1)[0]].append(test)
    for file, own in by_file.items():
        for node in ast.walk(ast.parse((root / file).read_bytes())):
            if isinstance(node, ast.ImportFrom) and node.module:
                for module in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    path = f"src/{module.replace('.', '/')}.py"
                    if (root / path).exists():
                        yield from ((test, path) for test in own)


def lines_by_test(data: CoverageData, root: Path) -> Iterator[tuple[str, str, int]]:
    """Test, path below `root` and lines, as bits, of what was measured; what no test asked for is left out."""
    for file in data.measured_files():
        lines: dict[str, int] = defaultdict(int)
        for line, contexts in data.contexts_by_lineno(file).items():
            for test in contexts:
                lines[test] |= 1 << line
        path = Path(file).relative_to(root).as_posix()
        yield from ((test, path, bits) for test, bits in lines.items() if test)
