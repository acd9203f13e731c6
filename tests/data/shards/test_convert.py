"""Conversion: broken off it's never taken for whole, and the rows of two versions never stand in one source."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cosmati.data.shards.convert import mds_to_parquet, parquet_to_mds
from cosmati.data.shards.verify import verify_source
from cosmati.data.shards.writer import ShardWriter
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import DataError
from tests.data.shards.mds_reader import read_source
from tests.processes import PythonProcess


def put(folder: Path, tag: str, num_rows: int, *, group: int = 1000) -> None:
    folder.mkdir(exist_ok=True)
    texts = [f"{tag} {number:04}" for number in range(num_rows)]
    pq.write_table(pa.table({"text": texts}), folder / "a.parquet", row_group_size=group)


def texts(folder: Path) -> list[str]:
    return [row["text"].decode() for row in read_source(folder)]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "salt.key"}


def to_mds(folder: Path, out: Path, **options: object) -> None:
    parquet_to_mds(folder, out, class_path="open/x", **options)  # type: ignore[arg-type]


def run(*arguments: str | Path) -> PythonProcess:
    return PythonProcess(["-m", "cosmati", "data", "convert", *arguments])


def kill_when(process: PythonProcess, folder: Path, pattern: str, number: int) -> None:
    """Kill a process once so many files are there; stop it first, so that it doesn't finish meanwhile."""
    while process.poll() is None and len(list(folder.glob(pattern))) < number:
        time.sleep(0.002)
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize("num_rows", [5, 8, 3])
def test_parquet_that_changed_since_isnt_gone_on_with(tmp_path: Path, num_rows: int) -> None:
    put(tmp_path / "pq", "old", 5)
    to_mds(tmp_path / "pq", tmp_path / "out")
    before = content(tmp_path / "out")
    to_mds(tmp_path / "pq", tmp_path / "out")
    assert content(tmp_path / "out") == before  # the same again changes nothing
    put(tmp_path / "pq", "new", num_rows)
    with pytest.raises(DataError, match=r"out was converted from other files than .*pq holds now.*empty directory"):
        to_mds(tmp_path / "pq", tmp_path / "out")
    assert texts(tmp_path / "out") == [f"old {number:04}" for number in range(5)]
    assert content(tmp_path / "out") == before


def test_what_isnt_this_conversions_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "pq", "old", 5)
    with ShardWriter(tmp_path / "a", {"text": "str"}, class_path="open/x", source="pq") as writer:
        writer.write({"text": "mine"})
    (tmp_path / "b").mkdir()
    (tmp_path / "b/notes.txt").write_text("mine")
    for name in "ab":
        with pytest.raises(DataError, match="empty directory"):
            to_mds(tmp_path / "pq", tmp_path / name)
    assert texts(tmp_path / "a") == ["mine"]
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["notes.txt"]


def test_a_killed_conversion_to_mds_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    put(tmp_path / "pq", "row", 9000, group=30)
    script = (
        "import sys, time\nfrom cosmati.data.shards.convert import parquet_to_mds\n"
        "parquet_to_mds(sys.argv[1], sys.argv[2], class_path='open/x', size_limit=8192, salt=bytes(32),"
        " on_shard=lambda *_: time.sleep(0.005))"
    )
    process = PythonProcess(["-c", script, tmp_path / "pq", tmp_path / "out"])
    kill_when(process, tmp_path / "out", "*.mds", 4)
    assert not (tmp_path / "out/index.json").exists()
    kept = (tmp_path / "out/shard.00001.mds").stat()
    for name in ("out", "whole"):
        to_mds(tmp_path / "pq", tmp_path / name, size_limit=8192, salt=bytes(32))
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert (tmp_path / "out/shard.00001.mds").stat().st_mtime_ns == kept.st_mtime_ns
    assert texts(tmp_path / "out") == [f"row {number:04}" for number in range(9000)]


def test_parquet_that_changes_while_it_is_converted_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "pq", "old", 20, group=10)

    def change(done: int, _all: int) -> None:
        if done == 1:
            put(tmp_path / "pq", "new", 20, group=10)

    with pytest.raises(DataError, match="changed while"):
        to_mds(tmp_path / "pq", tmp_path / "out", on_shard=change)
    assert not (tmp_path / "out/index.json").exists()


@pytest.fixture
def mds(tmp_path: Path) -> Path:
    with ShardWriter(
        tmp_path / "mds", {"n": "int"}, class_path="open/x", source="n", size_limit=6000, salt=bytes(32)
    ) as writer:
        for number in range(30_000):
            writer.write({"n": number})
    return tmp_path / "mds"


def test_a_killed_conversion_to_parquet_leaves_nothing_that_reads_as_whole(mds: Path, tmp_path: Path) -> None:
    out, draft = tmp_path / "pq", tmp_path / ".pq.unfinished"
    kill_when(run(mds, out), draft, "*.parquet", 3)
    assert list(draft.glob("*.parquet"))
    with pytest.raises(DataError):
        StreamingDataset(out)
    assert mds_to_parquet(mds, out) == 30_000
    assert verify_source(out).problems == ()
    names = {f"shard.{number:05}.parquet" for number in range(len(list(mds.glob("*.mds"))))}
    assert {path.name for path in out.iterdir()} == {*names, "manifest.json", "salt.key"}
    assert not draft.exists()


def test_a_conversion_to_parquet_that_fails_leaves_nothing(mds: Path, tmp_path: Path) -> None:
    shard = sorted(mds.glob("*.mds"))[2]
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    out = tmp_path / "pq"
    out.mkdir()
    with pytest.raises(DataError, match=shard.name):
        mds_to_parquet(mds, out)
    assert list(out.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"mds", "pq"}


def test_a_second_conversion_to_the_same_place_is_refused(mds: Path, tmp_path: Path) -> None:
    process = run(mds, tmp_path / "pq")
    while process.poll() is None and not list((tmp_path / ".pq.unfinished").glob("*.parquet")):
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGSTOP)
    assert list((tmp_path / ".pq.unfinished").glob("*.parquet"))
    try:
        with pytest.raises(DataError, match="another process"):
            mds_to_parquet(mds, tmp_path / "pq")
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert "".join(process.communicate()).count("30,000 rows") == 1
    assert len(StreamingDataset(tmp_path / "pq")) == 30_000
