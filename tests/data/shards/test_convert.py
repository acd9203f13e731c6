"""Conversion: broken off it's never taken for whole, and the rows of two versions never stand in one source."""

from __future__ import annotations

import signal
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

pytestmark = pytest.mark.long


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


CONVERT = """
import sys, time
from pathlib import Path
from cosmati.data.shards.convert import mds_to_parquet, parquet_to_mds

def wait(done, _all):
    if done == {number}:
        print("waits", flush=True)
        while not Path(sys.argv[2] + ".go").exists():
            time.sleep(0.01)

{call}
"""


def begun(call: str, number: int, source: Path, out: Path) -> PythonProcess:
    """Return a process that converts, and waits after so many parts until the file `OUT.go` is there."""
    process = PythonProcess(["-c", CONVERT.format(call=call, number=number), source, out])
    assert process.stdout.readline() == "waits\n", process.communicate()
    return process


def kill(process: PythonProcess) -> None:
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
    options = "class_path='open/x', size_limit=8192, salt=bytes(32)"
    call = f"parquet_to_mds(sys.argv[1], sys.argv[2], {options}, on_shard=wait)"
    kill(begun(call, 100, tmp_path / "pq", tmp_path / "out"))
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


TO_PARQUET = "print(mds_to_parquet(sys.argv[1], sys.argv[2], on_shard=wait))"


@pytest.fixture
def mds(tmp_path: Path) -> Path:
    with ShardWriter(
        tmp_path / "mds", {"n": "int"}, class_path="open/x", source="n", size_limit=6000, salt=bytes(32)
    ) as writer:
        for number in range(6_000):
            writer.write({"n": number})
    return tmp_path / "mds"


def test_a_killed_conversion_to_parquet_leaves_nothing_that_reads_as_whole(mds: Path, tmp_path: Path) -> None:
    out, draft = tmp_path / "pq", tmp_path / ".pq.unfinished"
    kill(begun(TO_PARQUET, 4, mds, out))
    assert len(list(draft.glob("*.parquet"))) == 4
    with pytest.raises(DataError):
        StreamingDataset(out)
    assert mds_to_parquet(mds, out) == 6_000
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
    process = begun(TO_PARQUET, 1, mds, tmp_path / "pq")
    assert list((tmp_path / ".pq.unfinished").glob("*.parquet"))
    try:
        with pytest.raises(DataError, match="another process"):
            mds_to_parquet(mds, tmp_path / "pq")
    finally:
        (tmp_path / "pq.go").touch()
    assert process.communicate() == ("6000\n", "")
    assert len(StreamingDataset(tmp_path / "pq")) == 6_000
