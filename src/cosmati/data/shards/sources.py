"""`sources.json`: which sources a data set has."""

from __future__ import annotations

import json
import posixpath
from typing import Any

from cosmati.data.shards.remote import Remote
from cosmati.errors import DataError

SOURCES_FILE = "sources.json"
_MAX_BYTES = 1 << 28


def listed_sources(folder: Remote) -> list[dict[str, Any]] | None:
    """Return the entries, each with `path`, `class` and `index_sha256`; None where there is no such file.

    Raises:
        DataError: it can't be read, or doesn't hold.
    """
    if not folder.exists(SOURCES_FILE):
        return None
    return parse_sources(folder.url, folder.read(SOURCES_FILE, max_bytes=_MAX_BYTES))


def parse_sources(root: str, text: bytes) -> list[dict[str, Any]]:
    """Return the entries of a data set's `sources.json`.

    Raises:
        DataError: it can't be read, leads out of the data set, or names nothing, or a source twice.
    """
    try:
        content = json.loads(text)
        entries = [
            {**one, **{key: str(one[key]) for key in ("path", "class", "index_sha256")}} for one in content["sources"]
        ]
        bad = [entry["path"] for entry in entries if entry["path"].startswith("/") or ".." in entry["path"].split("/")]
    except (ValueError, KeyError, TypeError) as error:
        msg = f"{root}/{SOURCES_FILE} can't be read: {error!r}. Restore it, or write the data set again."
        raise DataError(msg) from error
    paths = [posixpath.normpath(entry["path"]) for entry in entries]
    twice = sorted({path for path in paths if paths.count(path) > 1}) if len({*paths}) < len(paths) else []
    if content.get("version") != 1 or not entries or bad or twice:
        what = f"a path that leaves it: {bad[0]}" if bad else "no source, or a version that isn't 1"
        what = f"{twice[0]} twice" if twice else what
        raise DataError(f"{root}/{SOURCES_FILE} names {what}. Write the data set again with this version.")
    return entries
