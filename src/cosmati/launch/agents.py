"""What engines of several nodes have in common: how many nodes share a run's ranks, and the agent of each."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from cosmati.errors import RunError
from cosmati.launch.engine import RankProgram
from cosmati.records.launched import LaunchedRun
from cosmati.storage.fence import fence_off

_LOCK_SECONDS = 5.0
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
"""Ranks meet in a store of their own. The agents' stays for all begins: in it a rank may find where one of before was
that it takes for its fellow, and waits for it (seen: one begin in two)."""


def check_settings(engine: str, given: Mapping[str, str], known: Collection[str]) -> Mapping[str, str]:
    """Return an engine's settings.

    Raises:
        RunError: it has one that the engine doesn't know.
    """
    if unknown := sorted(set(given) - set(known)):
        msg = f"The engine {engine} has no setting {', '.join(unknown)}. It has {', '.join(sorted(known))}."
        raise RunError(msg)
    return given


def count_of(settings: Mapping[str, str], name: str, otherwise: int) -> int:
    """Return a setting that says how often: 0, 1, 2, ...

    Raises:
        RunError: it's no such number.
    """
    told = settings.get(name, str(otherwise))
    if not told.isdecimal():
        raise RunError(f"{name} is {told!r}. Say how often that may be: --with {name}={otherwise}, or 0, 1, 2, ...")
    return int(told)


def node_counts(ranks: int, nodes: str, degree: int = 1) -> tuple[list[int], int]:
    """Return with how many nodes a run may go on, most first, and the ranks of each.

    Ranks divide V. So does every number that divides theirs: with half of the nodes a run goes on, with two thirds of
    them it can't.

    Args:
        ranks: with all nodes.
        nodes: `N`, or `FEWEST-MOST`.
        degree: T, a multiple of which go on together, or one alone.

    Raises:
        RunError: the ranks can't be shared out evenly.
    """
    fewest, dash, most = nodes.partition("-")
    most = most if dash else fewest
    if not (fewest.isdecimal() and most.isdecimal()):
        msg = f"{nodes!r} is no number of nodes. Give one, `2`, or the fewest and the most, `1-2`."
        raise RunError(msg)
    low, high = int(fewest), int(most)
    if not 1 <= low <= high or ranks % high:
        msg = (
            f"{ranks} ranks can't be shared by {nodes} nodes: each has as many as the others. "
            "Give a number of nodes that divides the ranks."
        )
        raise RunError(msg)
    each = ranks // high
    counts = [count for count in range(high, low - 1, -1) if high % count == 0]
    return [count for count in counts if count * each in (1, ranks) or count * each % degree == 0], each


def agent_command(
    program: RankProgram,
    *,
    folder: str,
    per_node: int,
    restarts: int,
    nodes: str,
    run_id: str,
    endpoint: str,
    is_host: str,
) -> str:
    """Return the shell command of one node's agent: torchrun, which begins its ranks, and all anew where one dies.

    Args:
        program: what every rank runs.
        folder: the attempt's own.
        per_node: ranks of a node.
        restarts: how often the agents begin again by themselves, without going back to a queue.
        nodes: how many, as the shell has it.
        run_id: of this rendezvous, as the shell has it: agents of an earlier begin have another.
        endpoint: `HOST:PORT` of the first node, as the shell has it.
        is_host: `true` on the first node, else `false`, as the shell has it.
    """
    python, own = shlex.quote(str(program.python)), shlex.join([folder, *program.command])
    return (
        f"env {_OWN_STORE} {python} -m torch.distributed.run --nnodes={nodes} --nproc-per-node={per_node} "
        f"--max-restarts={restarts} --rdzv-backend=c10d --rdzv-id={run_id} --rdzv-endpoint={endpoint} "
        f"--rdzv-conf=is_host={is_host} "
        f'--local-addr="$({python} -m cosmati.launch.address {endpoint})" -m cosmati.launch.worker {own}'
    )


def fence_off_earlier(folder: Path) -> None:
    """Make whoever may still train an attempt's run stale, before it's begun again by its scheduler.

    Args:
        folder: the attempt's own, in which the run has noted where it is.

    Raises:
        OSError: the run's folder can't be written.
    """
    if told := _told(folder):
        run = Path(told.folder)
        for path in (run, run / "ledger"):
            fence_off(path, wait_seconds=_LOCK_SECONDS)


def _told(folder: Path) -> LaunchedRun | None:
    note = folder / "run"
    return LaunchedRun.from_json(note.read_text()) if note.exists() else None


def _begin_again(folder: str, *shared: str) -> None:
    """Fence off who trained before, and say with how many nodes a job may go on whose run has told its T by now.

    Args:
        folder: of the attempt.
        shared: ranks and nodes, as `node_counts` takes them, where that's asked.
    """
    if shared and (told := _told(Path(folder))):
        print(*node_counts(int(shared[0]), shared[1], told.tensor_parallel)[0], flush=True)  # noqa: T201  # the answer
    fence_off_earlier(Path(folder))


if __name__ == "__main__":
    _begin_again(*sys.argv[1:])
