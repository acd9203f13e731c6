"""What all ranks have to do together: none waits for one that has failed, or doesn't come, without a word."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cosmati.errors import RunError, words_of
from cosmati.train.ranks import Ranks

_PATIENCE_SECONDS = 20.0


@contextmanager
def all_or_none(ranks: Ranks) -> Iterator[None]:
    """Stand around what one rank may fail at: then all raise, where others would wait for it.

    Raises:
        RunError: another rank has failed; it says at what.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as found:  # noqa: BLE001  (raised again)
        error = found
    raise_together(ranks, error)


def raise_together(ranks: Ranks, error: Exception | None) -> None:
    """Raise what this rank has failed at; otherwise say which other has. On all ranks.

    Raises:
        RunError: another rank has failed; it says at what.
    """
    told = ranks.told_by_all({"error": "" if error is None else f"{type(error).__name__}: {words_of(error)}"})
    if error is not None:
        try:
            raise error
        finally:
            error = None  # Or it would be held by its own frames.
    for rank, one in enumerate(told):
        if one["error"]:
            raise RunError(f"Rank {rank} couldn't go on, and so the others don't. {one['error']}")


def meet(ranks: Ranks, what: str) -> None:
    """Wait for every rank; say so where one doesn't come.

    Args:
        ranks: all of them.
        what: is called, in words.
    """
    if not ranks.is_parallel:
        return
    waits = threading.Timer(_PATIENCE_SECONDS, _say_who_waits, (ranks.rank, what))
    waits.daemon = True
    waits.start()
    try:
        ranks.agree(flag=False)
    finally:
        waits.cancel()


def _say_who_waits(rank: int, what: str) -> None:
    sys.stderr.write(
        f"Rank {rank} has waited for other ranks in {what} for {_PATIENCE_SECONDS:.0f} s. All ranks have a part in it: "
        f"call {what} on every rank, not under `if rank == 0`.\n"
    )
    sys.stderr.flush()
