"""Compares the bits of small trainings with those of another commit, on this machine: `compare_bits.py [BASE]`.

BASE, the parent commit where none is given, is checked out into a temporary git worktree; `tests/golden/worker.py`
trains the same runs from both sources, with the kernels that this machine's CPU has. Digests that differ are named,
and are an error, unless the change adds a `changelog.d/*.bits.md`: another set of bits is then a decision.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Runs = dict[str, dict[str, Any]]
"""Digests by the run's name: parameters, checkpoint, and the ledger's entries by number and kind."""

PARENT = "HEAD~1"
WORKER = Path("tests/golden/worker.py")
_CAPABILITIES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "DNNL_MAX_CPU_ISA")
_SECONDS = 300


class WorkerError(Exception):
    """The worker failed, or trained with other sources than it was given."""


def run_worker(worker: Path, source: Path, variables: Mapping[str, str], *names: str) -> Runs:
    """Train the named runs, or all of them, in a process of their own.

    Args:
        worker: the script.
        source: folder that has the package `cosmati` in it.
        variables: capability variables; the environment's own are left out.
        names: runs.

    Raises:
        WorkerError: it failed.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _CAPABILITIES}
    environment |= {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, str(worker), *names]
    done = subprocess.run(  # noqa: S603  (our own script)
        command, env=environment, check=False, capture_output=True, text=True, timeout=_SECONDS
    )
    if done.returncode:
        msg = f"{worker} failed on the sources in {source}:\n{done.stderr}"
        raise WorkerError(msg)
    found = json.loads(done.stdout)
    if Path(found["cosmati"]).resolve() != (source / "cosmati").resolve():
        msg = f"{worker} trained with {found['cosmati']}, and was given {source}."
        raise WorkerError(msg)
    runs: Runs = found["runs"]
    return runs


def differences(before: Runs, after: Runs) -> list[str]:
    """Return a line for each run whose digests differ, with what differs, and for each that is gone."""
    lines = [f"{name}: the run is gone" for name in before if name not in after]
    for name, digests in before.items():
        parts = _parts(digests), _parts(after.get(name, digests))
        differing = [part for part in parts[0] | parts[1] if parts[0].get(part) != parts[1].get(part)]
        if differing:
            lines.append(f"{name}: other {', '.join(differing)}")
    return lines


def _parts(digests: Mapping[str, Any]) -> dict[str, str]:
    entries = {f"ledger entry {entry}": digest for entry, digest in digests.get("ledger", {}).items()}
    return {part: digest for part, digest in digests.items() if part != "ledger"} | entries


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(  # noqa: S603
        ["git", "-C", str(root), *arguments],  # noqa: S607
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


def _commit(root: Path, base: str) -> str | None:
    """Return the commit that BASE names; None where this checkout has no history to find it in.

    Raises:
        ValueError: there is history, and no such commit in it.
    """
    try:
        shallow = _git(root, "rev-parse", "--is-shallow-repository") == "true"
    except (OSError, subprocess.CalledProcessError):
        return None
    try:
        return _git(root, "rev-parse", "--verify", "--quiet", base + "^{commit}")
    except subprocess.CalledProcessError as error:
        if shallow or base == PARENT:
            return None
        msg = f"No commit is called {base!r} here. Name one of this repository's: make bits BASE=main."
        raise ValueError(msg) from error


@contextmanager
def _checked_out(root: Path, commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        _git(root, "worktree", "add", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            _git(root, "worktree", "remove", "--force", str(tree))


def compare(root: Path, commit: str) -> tuple[list[str], list[str]]:
    """Return what differs from a commit, and the fragments that say so."""
    own = root / WORKER
    with _checked_out(root, commit) as base:
        # A commit's own worker knows its own names; one from before there was a worker takes ours.
        worker = base / WORKER if (base / WORKER).exists() else own
        before = run_worker(worker, base / "src", {})
        told = {path.name for path in (base / "changelog.d").glob("*.bits.md")}
    fragments = sorted(path.name for path in (root / "changelog.d").glob("*.bits.md") if path.name not in told)
    return differences(before, run_worker(own, root / "src", {})), fragments


def main(arguments: list[str], root: Path) -> int:
    """Compare, say what differs, and return the exit status."""
    base = arguments[0] if arguments else PARENT
    try:
        commit = _commit(root, base)
        if commit is None:
            print(f"{base} isn't in this checkout's history, so there are no bits to compare with.")
            return 0
        lines, fragments = compare(root, commit)
    except (ValueError, WorkerError) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(lines) or f"The same bits as {base}.")
    if not lines:
        return 0
    if fragments:
        print(f"Other bits than {base}, as {', '.join(fragments)} says.")
        return 0
    print(f"Other bits than {base}. Mend that, or say it in a changelog.d/NNN.bits.md and run `make golden`.")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(__file__).parents[1]))
