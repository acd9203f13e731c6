"""Whose fault an error is: a row's own, which may be left out, or the environment's, which never may."""

from __future__ import annotations

import errno

from cosmati.data.shards.remote import EnvironmentFaultError
from cosmati.errors import MissingExtraError

_OF_MEMORY = ("can't allocate memory", "cannot allocate memory", "out of memory", "can't start new thread")


def is_of_the_environment(error: BaseException) -> bool:
    """Say whether an error, or what it came of, is of a disk, a limit, a permission, memory or a whole shard.

    The operating system's errors carry a number; those that a decoder raises under the same name (Pillow does) don't.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, EnvironmentFaultError | MissingExtraError | MemoryError):
            return True
        # EINVAL stands for nonsense that was asked for, as from a row's own numbers.
        if isinstance(cause, OSError) and cause.errno not in (None, errno.EINVAL):
            return True
        if isinstance(cause, RuntimeError | OSError) and any(words in str(cause).lower() for words in _OF_MEMORY):
            return True
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False
