"""The lengths of files: here, and over HTTP, which has no lists: a server is asked for each (HEAD)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

AT_ONCE = 32
"""Requests on their way at the same time."""
MOST = 5000
"""Files that are asked for: more take longer than a start may."""
MOST_SECONDS = 10.0
_OK, _GONE = 200, (404, 410)
_Answer = tuple[int, int | None]


def lengths_here(folder: Path, paths: Sequence[str]) -> dict[str, int]:
    """Return the lengths in bytes of those files of a folder that are there; there may be very many."""
    found, place = dict[str, int](), os.fspath(folder)
    for path in paths:
        with suppress(FileNotFoundError):
            found[path] = os.stat(os.path.join(place, path)).st_size  # noqa: PTH116, PTH118
    return found


def lengths_over_http(
    files: Any,  # noqa: ANN401  (fsspec has no types)
    root: str,
    paths: Sequence[str],
    *,
    sure: tuple[str, int],
    seconds: float,
) -> Mapping[str, int | None] | None:
    """Ask for the lengths of files.

    Args:
        files: fsspec's file system for HTTP.
        root: directory of the files.
        paths: below it.
        sure: a file that is there, and its length. A server that says otherwise is believed of no other file.
        seconds: for all of it, `MOST_SECONDS` at most.

    Returns:
        The length in bytes of each, None where the server says none or says it too late; those that aren't there are
        left out. None where the server answers no such questions, or they're more than `MOST`.
    """
    if len(paths) > MOST or not hasattr(files, "set_session"):  # another file system may have taken fsspec's place
        return None
    from fsspec.asyn import sync

    found: Mapping[str, int | None] | None = sync(files.loop, _ask, files, root, paths, sure, seconds)
    return found


async def _ask(
    files: Any,  # noqa: ANN401
    root: str,
    paths: Sequence[str],
    sure: tuple[str, int],
    seconds: float,
) -> Mapping[str, int | None] | None:
    answers = dict[str, _Answer]()
    name, length = sure

    async def work(todo: Iterable[str]) -> None:
        for path in todo:
            answers[path] = await _head(files, f"{root}/{path}")

    with suppress(TimeoutError):
        async with asyncio.timeout(min(seconds, MOST_SECONDS)):
            await work([name])
            if answers[name] not in [(_OK, length), (_OK, None)]:
                return None
            todo = iter(paths)
            await asyncio.gather(*(work(todo) for _ in range(AT_ONCE)))
    if name not in answers:
        return None
    late = (0, None)
    return {path: answers.get(path, late)[1] for path in paths if answers.get(path, late)[0] not in _GONE}


async def _head(files: Any, path: str) -> _Answer:  # noqa: ANN401
    """Return the status of an answer, and the length of the file; that of what was compressed on its way is another."""
    options = {**files.kwargs, "allow_redirects": True}
    options["headers"] = {**options.get("headers", {}), "Accept-Encoding": "identity"}
    try:
        session = await files.set_session()
        async with session.head(files.encode_url(path), **options) as response:
            length = response.headers.get("Content-Length", "")
            is_whole = response.headers.get("Content-Encoding", "identity") == "identity"
            return response.status, int(length) if response.status == _OK and is_whole and length.isdigit() else None
    except Exception:  # noqa: BLE001  (whatever is wrong, fetching the file says it, and tries again)
        return 0, None
