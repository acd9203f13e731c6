"""The Python library as shards: the same rows as in memory, by class, written once."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from cosmati.corpora.python_library import load_python_library
from cosmati.corpora.python_shards import user_cache, write_python_shards
from cosmati.data.streaming import StreamingDataset

pytestmark = pytest.mark.long


def test_shards_hold_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = load_python_library(sequence_length=64, max_bytes=200_000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = write_python_shards(library)
    assert folder.is_relative_to(user_cache())
    written = {path: path.stat().st_mtime_ns for path in folder.rglob("*.*")}
    assert write_python_shards(library) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.*")} == written
    data = StreamingDataset(folder, shuffle=False)
    rows = data.__getitems__(range(len(data)))
    assert len(rows) == len(library.train.tokens)
    place = {row_id: n for n, row_id in enumerate(library.train.row_ids.tolist())}
    for row in rows:
        n = place[row["manifest_row"]]
        assert torch.equal(torch.from_numpy(row["tokens"]), library.train.tokens[n])
        assert data.class_names[row["class_id"]] == library.class_names[int(library.train.class_ids[n])]
    again = write_python_shards(library, tmp_path / "elsewhere")
    digests = [hashlib.sha256((one / "sources.json").read_bytes()).hexdigest() for one in (folder, again)]
    assert digests[0] == digests[1]
