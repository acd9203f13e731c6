"""The Python source library as shards: one source for each licence class, kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cosmati.corpora.python_library import PythonLibrary
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.shards.manifest import SourceFacts

_SALT = hashlib.sha256(b"rows of public packages: nothing to hide").digest()
"""A fixed salt, so that one machine's shards are always the same."""


def user_cache() -> Path:
    """Return where this user's caches go: `$XDG_CACHE_HOME/cosmati`, or `~/.cache/cosmati`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cosmati"


def write_python_shards(library: PythonLibrary, folder: str | Path | None = None) -> Path:
    """Write the training rows as shards, unless they're there; return the data set's directory.

    Args:
        library: the corpus.
        folder: where data sets go, one for each manifest; None is the user's cache.
    """
    out = Path(folder or user_cache() / "python-library").expanduser() / library.manifest_digest[:32]
    if (out / "sources.json").exists():
        return out
    rows = library.train
    names = [library.class_names[class_id] for class_id in rows.class_ids.tolist()]

    def numbered() -> Iterator[Mapping[str, Any]]:
        return ({"tokens": row, "manifest_row": row_id} for row, row_id in zip(rows.tokens.numpy(), ids, strict=True))

    ids = rows.row_ids.tolist()
    of_row = dict(zip(ids, names, strict=True))
    write_dataset(
        numbered(),
        out,
        {"tokens": f"ndarray:uint8:{rows.tokens.shape[1]}", "manifest_row": "int"},
        class_of=lambda row: of_row[row["manifest_row"]],
        source="python-library",
        source_version=library.manifest_digest[:16],
        size_limit=1 << 22,
        facts=SourceFacts(origin="Python packages and standard library of this machine", obtained="installed"),
        salt=_SALT,
        mode="replace",  # what an earlier version left half done
    )
    return out
