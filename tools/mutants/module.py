"""Plant a mutant of each line of one module, and say which ones some tests leave alive: to write those tests by.

    python -m tools.mutants.module src/cosmati/train/options.py tests/train/test_options_of_objects.py

About a second each: give quick tests, of the module itself. `make mutants` asks all that are near.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from .nearest import Test
from .operators import Mutant, find
from .report import progress, report
from .run import BREAKS_IMPORT, KILLED, Bench, Result
from .sample import PACKAGE, draw, read_equivalents
from .sandbox import Sandbox


def main(arguments: Sequence[str] | None = None, root: Path | None = None) -> int:
    """Run them; 1 where one survives, 2 where a test fails without any, 130 where it was interrupted."""
    options, root = _options(arguments), (root or Path.cwd()).resolve()
    tests, mutants = _tests(root, options.tests), _mutants(root, options)
    results, status, started = list[Result](), 0, time.monotonic()
    with ExitStack() as stack:
        bench = Bench(
            [stack.enter_context(Sandbox(root)) for _ in range(options.jobs)],
            Path(stack.enter_context(TemporaryDirectory())) / "results.jsonl",
        )
        if failing := bench.failing_alone(tests):
            print("these fail without a mutant:", *sorted(failing), sep="\n  ")
            return 2
        try:
            for one in bench.run(mutants, len(mutants), lambda _: tests):
                results += [one] if one.state != BREAKS_IMPORT else []
                print(progress(one, len(results), len(mutants), time.monotonic() - started), flush=True)
        except KeyboardInterrupt:
            print("interrupted")
            status = 130
    print(*report(results, read_equivalents(root / "tools" / "equivalent_mutants.toml")), sep="\n")
    return status or int(any(one.state != KILLED for one in results))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutants.module", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("module", help="a file of src/cosmati")
    parser.add_argument("tests", nargs="+", help="files of tests, or single ones")
    parser.add_argument("--lines", type=_lines, help="first-last, both in it; all where none are given")
    parser.add_argument("--all", action="store_true", help="every mutant of a line, and not one")
    parser.add_argument("--seed", default="1", help="which of a line's mutants it is")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at a time")
    return parser.parse_args(arguments)


def _lines(text: str) -> range:
    first, last = map(int, text.split("-"))
    return range(first, last + 1)


def _mutants(root: Path, options: argparse.Namespace) -> list[Mutant]:
    file = (root / options.module).resolve()
    if not file.is_file() or not file.is_relative_to(root / PACKAGE):
        msg = f"{options.module} is no file of {PACKAGE}. Run it from the repository's root."
        raise SystemExit(msg)
    found: dict[object, Mutant] = {}
    for mutant in draw(find(file.read_bytes(), file.relative_to(root).as_posix()), options.seed):
        if options.lines is None or mutant.line in options.lines:
            found.setdefault(mutant.key if options.all else mutant.line, mutant)
    return list(found.values())


def _tests(root: Path, given: Sequence[str]) -> list[Test]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *given]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    told = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, check=False)  # noqa: S603
    names = [line for line in told.stdout.splitlines() if "::" in line]
    if told.returncode or not names:
        msg = f"No tests could be collected from {', '.join(given)}:\n{told.stdout[-2000:]}"
        raise SystemExit(msg)
    return [Test(name=name, work=0.1, seconds=1.0, outcome="passed", lines={}) for name in names]


if __name__ == "__main__":
    sys.exit(main())
