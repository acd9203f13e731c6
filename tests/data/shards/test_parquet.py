"""Parquet: read as it comes, and MDS there and back with every bit and its provenance."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cosmati.data.loader import StreamingLoader
from cosmati.data.shards.convert import mds_to_parquet, parquet_to_mds
from cosmati.data.shards.verify import verify_source
from cosmati.data.shards.writer import ShardWriter
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import DataError

COLUMNS = {
    "id": "int",
    "name": "str",
    "raw": "bytes",
    "half": "float16",
    "small": "uint8",
    "fixed": "ndarray:int32:2,2",
    "free": "ndarray",
    "facts": "json",
    "price": "str_decimal",
}


def row(n: int) -> dict[str, object]:
    return {
        "id": n - 3,
        "name": f"é {n}",
        "raw": bytes([n, 0]),
        "half": n / 2,
        "small": n,
        "fixed": np.arange(4, dtype=np.int32).reshape(2, 2) * n,
        "free": np.ones((n % 3 + 1, 2), np.float32) * n,
        "facts": {"n": [n, None]},
        "price": Decimal(n) / 4,
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "mds"
    with ShardWriter(
        folder, COLUMNS, class_path="open/psf", source="things", size_limit=5500, salt=bytes(32)
    ) as writer:
        for n in range(50):
            writer.write(row(n))
    return folder


def test_there_and_back_every_bit_is_kept(source: Path, tmp_path: Path) -> None:
    assert mds_to_parquet(source, tmp_path / "parquet") == 50
    assert len(list((tmp_path / "parquet").glob("*.parquet"))) == len(list(source.glob("*.mds"))) > 1
    left, right = (StreamingDataset(folder, seed=4) for folder in (source, tmp_path / "parquet"))
    assert right.class_names == ("open/psf",)
    positions = list(range(50))
    mds, parquet = (data.read(data.locate(positions), with_digests=True) for data in (left, right))
    assert np.array_equal(mds.row_ids, parquet.row_ids)
    assert mds.digests is not None
    assert np.array_equal(mds.digests, parquet.digests)
    for one, other in zip(mds, parquet, strict=True):
        for name in COLUMNS:
            assert np.array_equal(one[name], other[name]), name
    back = parquet_to_mds(tmp_path / "parquet", tmp_path / "back", size_limit=5500)
    assert (tmp_path / "back/manifest.json").read_bytes() == (source / "manifest.json").read_bytes()
    assert back.class_path == "open/psf"
    assert verify_source(str(tmp_path / "back")).problems == ()
    with pytest.raises(DataError, match="empty directory"):
        mds_to_parquet(source, tmp_path / "parquet")


def test_files_of_others_are_read_by_row_group(tmp_path: Path) -> None:
    for number in range(2):
        table = pa.table(
            {
                "number": pa.array(range(10 * number, 10 * number + 10), pa.int32()),
                "text": [f"t{n}" for n in range(10)],
                "tokens": pa.array([[n, n + 1, n + 2] for n in range(10)], pa.list_(pa.int64(), 3)),
                "ragged": [[1.5] * (n % 3 + 1) for n in range(10)],
                "flag": [n % 2 == 0 for n in range(10)],
                "nested": [{"a": n} for n in range(10)],
            }
        )
        pq.write_table(table, tmp_path / f"part-{number}.parquet", row_group_size=4)
    data = StreamingDataset(tmp_path, class_path="unknown")
    assert len(data) == 20
    assert data.sources[0].index.num_shards == 6
    rows = list(data.__getitems__(range(20)))
    assert Counter(one["number"] for one in rows) == Counter(range(20))
    for one in rows:
        n = one["number"] % 10
        assert (one["text"], one["tokens"].tolist(), one["nested"]) == (f"t{n}", [n, n + 1, n + 2], {"a": n})
        assert (one["ragged"].tolist(), one["flag"]) == ([1.5] * (n % 3 + 1), n % 2 == 0)
    batch = next(iter(StreamingLoader(StreamingDataset(tmp_path, columns=("number", "tokens")), 8, num_workers=1)))
    assert [tuple(tensor.shape) for tensor in batch.data] == [(8,), (8, 3)]
    made = parquet_to_mds(tmp_path, tmp_path / "mds", class_path="open/psf")
    assert made.num_rows == 20
    with pytest.raises(DataError, match="don't say their class"):
        parquet_to_mds(tmp_path, tmp_path / "other")


def test_bad_files_say_so(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(DataError, match="isn't a Parquet file"):
        StreamingDataset(tmp_path)
    pq.write_table(pa.table({"a": [1, None]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="has nulls"):
        StreamingDataset(tmp_path).__getitems__([0, 1])
    pq.write_table(pa.table({"b": [1]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="different columns"):
        StreamingDataset(tmp_path)
    pq.write_table(pa.table({"b": pa.array([1], pa.date32())}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="has the type date32"):
        StreamingDataset(tmp_path)


@pytest.mark.filterwarnings("ignore:.*can't be reached", "ignore:.*has no hashes")
@pytest.mark.parametrize(("which", "rows"), [("", 9), ("/*.parquet", 9), ("/p1.parquet", 3)])
def test_files_that_are_cached_are_read_while_their_place_is_away(tmp_path: Path, which: str, rows: int) -> None:
    (tmp_path / "data").mkdir()
    for number in range(3):
        pq.write_table(pa.table({"n": range(3 * number, 3 * number + 3)}), tmp_path / f"data/p{number}.parquet")
    url = f"file://{tmp_path}/data{which}"
    before = sorted(row["n"] for row in StreamingDataset(url, cache=tmp_path / "cache"))
    (tmp_path / "data").rename(tmp_path / "away")
    assert len(before) == rows
    assert sorted(row["n"] for row in StreamingDataset(url, cache=tmp_path / "cache")) == before
    with pytest.raises(DataError):
        StreamingDataset(f"file://{tmp_path}/data/p[01].parquet", cache=tmp_path / "cache")
