"""Run mutants against their tests: who kills which."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

from .nearest import Test
from .operators import Mutant
from .sandbox import Sandbox

KILLED, SURVIVED, BREAKS_IMPORT = "killed", "survived", "breaks the import"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of one mutant. `by` is the first test that failed, or what else ended the run."""

    path: str
    line: int
    kind: str
    edit: tuple[int, int, str]
    before: str
    after: str
    state: str
    by: str
    num_tests: int
    seconds: float

    @property
    def key(self) -> tuple[str, int, str]:
        """That of the mutant."""
        return self.path, self.edit[0], self.edit[2]


class Bench:
    """Runs mutants side by side, each in a sandbox of its own while it lasts.

    Results are kept in `path` as they come, and those found there aren't run again.
    """

    def __init__(self, sandboxes: Sequence[Sandbox], path: Path) -> None:
        self._sandboxes = sandboxes
        self._free: SimpleQueue[Sandbox] = SimpleQueue()
        for sandbox in sandboxes:
            self._free.put(sandbox)
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        read = [Result(**{**json.loads(line), "edit": tuple(json.loads(line)["edit"])}) for line in lines]
        self._held = {result.key: result for result in read}

    def run(self, mutants: Iterable[Mutant], num: int, choose: Callable[[Mutant], list[Test]]) -> Iterator[Result]:
        """The first `num` mutants that import, in the order in which they end; those that don't come between.

        `choose` gives the tests of a mutant. Changes that make no other program are passed over.
        """
        mutants, left, running = iter(mutants), num, set[Future[Result | None]]()
        with ThreadPoolExecutor(len(self._sandboxes)) as pool:
            try:
                while left or running:
                    while left and len(running) < len(self._sandboxes) and (mutant := next(mutants, None)):
                        left -= 1
                        running.add(pool.submit(self._one, mutant, choose))
                    if not running:
                        return
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for result in (future.result() for future in done):
                        left += result is None or result.state == BREAKS_IMPORT
                        if result is not None:
                            yield result
            except BaseException:
                for sandbox in self._sandboxes:
                    sandbox.stop()
                raise

    def forget(self, keys: Iterable[tuple[str, int, str]]) -> None:
        """Run these again when they come."""
        for key in keys:
            self._held.pop(key, None)

    def failing_alone(self, tests: Sequence[Test]) -> set[str]:
        """Which of these tests fail without a mutant, run by themselves in their order."""
        if not tests:
            return set()
        sandbox = self._free.get()
        try:
            status, failed = self._run_tests(sandbox, tests, stop_at_first=False)
        finally:
            self._free.put(sandbox)
        if status not in {0, 1}:
            msg = f"pytest ended with {status} on the tree without a mutant:\n{sandbox.last_words}"
            raise RuntimeError(msg)
        return set(failed)

    def _one(self, mutant: Mutant, choose: Callable[[Mutant], list[Test]]) -> Result | None:
        """Run one mutant, none where it isn't real."""
        sandbox = self._free.get()
        try:
            source = (sandbox.root / mutant.path).read_bytes()
            if not mutant.is_real(source):
                return None
            before, after = mutant.difference(source)
            held = self._held.get(mutant.key)
            if held is not None and (held.before, held.after) == (before, after):
                return held
            tests, started = choose(mutant), time.monotonic()
            with sandbox.changed(mutant.path, mutant.apply(source)):
                state, by = self._judge(sandbox, mutant, tests)
            facts = {name: getattr(mutant, name) for name in ("path", "line", "kind", "edit")}
            seconds = round(time.monotonic() - started, 2)
            result = Result(
                **facts, before=before, after=after, state=state, by=by, num_tests=len(tests), seconds=seconds
            )
        finally:
            self._free.put(sandbox)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        return result

    def _judge(self, sandbox: Sandbox, mutant: Mutant, tests: Sequence[Test]) -> tuple[str, str]:
        if not tests:
            return SURVIVED, "no test"
        status, failed = self._run_tests(sandbox, tests)
        if status is None:
            return KILLED, "time-out"
        if status in {0, 5}:  # 5: none of the chosen tests was collected, so none failed
            return SURVIVED, ""
        by = failed[0] if failed else f"signal {-status}"
        is_a_test = "::" in by  # else a module that couldn't be collected, or nothing at all
        if (mutant.at_import or not is_a_test) and not _imports(sandbox, mutant):
            return BREAKS_IMPORT, ""
        if failed or status < 0:
            return KILLED, by
        msg = f"pytest ended with {status} and no test failed:\n{sandbox.last_words}"
        raise RuntimeError(msg)

    @staticmethod
    def _run_tests(
        sandbox: Sandbox, tests: Sequence[Test], *, stop_at_first: bool = True
    ) -> tuple[int | None, list[str]]:
        """Status of pytest and the tests that failed, in order. A test has five times its seconds and twenty more."""
        chosen, failed = sandbox.root.parent / "chosen.json", sandbox.root.parent / "failed"
        failed.unlink(missing_ok=True)
        chosen.write_text(json.dumps({test.name: 20 + 5 * test.seconds for test in tests}))
        files = sorted({test.name.split("::")[0] for test in tests})
        status = sandbox.pytest(
            [*(["-x"] if stop_at_first else []), *files],
            {"MUTANTS_TESTS": str(chosen)},
            seconds=60 + 3 * sum(test.seconds for test in tests),
        )
        return status, failed.read_text().splitlines() if failed.exists() else []


def _imports(sandbox: Sandbox, mutant: Mutant) -> bool:
    """Whether the changed module and the whole package can be imported."""
    module = mutant.path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return sandbox.imports(module, module.split(".", maxsplit=1)[0])
