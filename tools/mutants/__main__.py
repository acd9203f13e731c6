"""Plant mutants, run the tests nearest to them and say which survive: `python -m tools.mutants --help`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from .line_map import read_or_build, tree_digest
from .nearest import Test, choose
from .operators import Mutant
from .report import progress, report
from .run import BREAKS_IMPORT, SURVIVED, Bench, Result
from .sample import ROOMS, draw, mutants_of, read_equivalents
from .sandbox import Sandbox


def main(arguments: Sequence[str] | None = None, root: Path | None = None) -> int:
    """Run a sample of a tree's mutants; 130 where it was interrupted."""
    options, root = _options(arguments), (root or Path.cwd()).resolve()
    cache = root / ".mutants"
    cache.mkdir(exist_ok=True)
    seed = options.seed or _commit(root)
    path = cache / f"results-{tree_digest(root)[:12]}-{seed[:12]}-{options.num}.jsonl"
    results: dict[tuple[str, int, str], Result] = {}
    status = 0
    with ExitStack() as stack:
        sandboxes = [stack.enter_context(Sandbox(root)) for _ in range(options.jobs)]
        try:
            tests = read_or_build(root, sandboxes[0], cache, options.jobs)
            mutants = list(draw(mutants_of(root, options.rooms), seed))
            if options.again:
                mutants = list(_survivors(mutants, options.again, root))
            print(
                f"{min(options.num, len(mutants))} of {len(mutants)} mutants, seed {seed}, kept in {path}", flush=True
            )
            _run(Bench(sandboxes, path), mutants, options.num, {test.name: test for test in tests}, results)
        except KeyboardInterrupt:
            print(f"interrupted: the same command goes on from {path}")
            status = 130
    print(*report(list(results.values()), read_equivalents(root / "tools" / "equivalent_mutants.toml")), sep="\n")
    return status


def _run(
    bench: Bench,
    mutants: Sequence[Mutant],
    num: int,
    tests: dict[str, Test],
    results: dict[tuple[str, int, str], Result],
) -> None:
    """Fill `results`. Tests that killed have to pass by themselves without a mutant, or what they killed runs again."""
    started, todo, broken = time.monotonic(), mutants, set[str]()
    while todo:
        sound = [test for test in tests.values() if test.name not in broken]
        for result in bench.run(todo, num, partial(choose, tests=sound)):
            if result.state != BREAKS_IMPORT:
                results[result.key] = result
            print(progress(result, len(results), num, time.monotonic() - started), flush=True)
        killers = {result.by for result in results.values()} & tests.keys()
        broken |= (failing := bench.failing_alone([tests[name] for name in sorted(killers)]))
        doubtful = {key for key, result in results.items() if result.by in failing}
        if doubtful:
            print("left out, since they fail by themselves without a mutant:", *sorted(failing), sep="\n  ")
        bench.forget(doubtful)
        for key in doubtful:
            del results[key]
        todo, num = [mutant for mutant in mutants if mutant.key in doubtful], len(results) + len(doubtful)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("--num", type=int, default=400, help="how many mutants are run")
    parser.add_argument("--seed", default="", help="what fixes the sample; the commit where none is given")
    parser.add_argument("--rooms", type=lambda text: tuple(text.split(",")), default=ROOMS, help="comma-separated")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at a time")
    parser.add_argument("--again", type=Path, help="run the survivors that this file of results holds")
    return parser.parse_args(arguments)


def _commit(root: Path) -> str:
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.strip()  # noqa: S603


def _survivors(mutants: Sequence[Mutant], path: Path, root: Path) -> Iterator[Mutant]:
    """The mutants that survived in a file of results, wherever their lines are now."""
    results = [json.loads(line) for line in path.read_text().splitlines()]
    wanted = {(r["path"], r["before"], r["after"]) for r in results if r["state"] == SURVIVED}
    sources = {path: (root / path).read_bytes() for path, _, _ in wanted}
    for mutant in mutants:
        source = sources.get(mutant.path)
        if source is not None and mutant.is_real(source) and (mutant.path, *mutant.difference(source)) in wanted:
            yield mutant


if __name__ == "__main__":
    sys.exit(main())
