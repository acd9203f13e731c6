"""What is printed: a line for each mutant, then the rate of every room and the survivors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .run import KILLED, SURVIVED, Result
from .sample import Equivalent, room


def progress(result: Result, num_done: int, num: int, seconds: float) -> str:
    """One line for one mutant, with the time that the others will take if they take as long."""
    left = seconds / max(1, num_done) * (num - num_done) / 60
    return f"[{num_done}/{num}, {left:.0f} min left] {result.state}: {result.path}:{result.line} {result.kind}"


def report(results: Sequence[Result], equivalents: Sequence[Equivalent]) -> Iterator[str]:
    """The survivors, then the rooms, then `mutants: K of N killed`."""
    reasons = {(e.file, e.line, e.becomes): e.reason for e in equivalents}
    for result in sorted(results, key=lambda result: (result.path, result.line)):
        if result.state == SURVIVED:
            tests = f"{result.num_tests} tests, {result.seconds:.0f} s"
            yield f"\nsurvived: {result.path}:{result.line} {result.kind} ({tests})"
            yield from (f"  - {result.before}", f"  + {result.after}")
            if reason := reasons.get((result.path, result.before, result.after)):
                yield f"  equivalent: {reason}"
    yield "\nroom       killed  of"
    for name in dict.fromkeys(room(result.path) for result in results):
        states = [result.state for result in results if room(result.path) == name]
        yield f"{name:<10} {states.count(KILLED):>6} {len(states):>3}  {states.count(KILLED) / len(states):4.0%}"
    yield f"mutants: {sum(result.state == KILLED for result in results)} of {len(results)} killed"
