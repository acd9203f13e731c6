"""S3, as moto serves it on loopback: read by fsspec, cached, and its errors told apart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cosmati.data.loader import StreamingLoader
from cosmati.data.opened import CacheOptions
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.shards.manifest import SourceFacts
from cosmati.data.shards.remote import Remote, RemoteError
from cosmati.data.shards.upload import Destination
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import DataError
from tests.data.shard_files import write_data_set
from tests.processes import run_python

pytestmark = [pytest.mark.s3, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore"), pytest.mark.long]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    server_of = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    pytest.importorskip("s3fs")
    folder = write_data_set(tmp_path_factory.mktemp("s3"), {"open/psf": [6, 7], "unknown": [5]})
    server = server_of.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {"endpoint_url": f"http://{host}:{port}", "key": "testing", "secret": "testing"}
    client = boto3.client(
        "s3",
        endpoint_url=options["endpoint_url"],
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket="bucket")
    for path in folder.rglob("*.*"):
        client.upload_file(str(path), "bucket", f"corpus/{path.relative_to(folder).as_posix()}")
    try:
        yield {"options": options, "client": client}
    finally:
        server.stop()


def opened(bucket: dict[str, Any], cache: Path, name: str = "corpus", deadline: float = 200.0) -> StreamingDataset:
    options = CacheOptions(cache, deadline_seconds=deadline, storage_options=bucket["options"])
    return StreamingDataset(f"s3://bucket/{name}", columns=("number",), cache=options)


def test_rows_come_exactly_once_with_workers_too(bucket: dict[str, Any], tmp_path: Path) -> None:
    data = opened(bucket, tmp_path)
    assert data.class_names == ("open/psf", "unknown")
    for workers in (0, 1):
        loader = StreamingLoader(data, 4, num_workers=workers, multiprocessing_context="spawn" if workers else None)
        assert sorted(n for batch in loader for n in batch.data.tolist()) == list(range(18))
    assert len(list(tmp_path.rglob("*.shard"))) == 3


def test_a_bucket_is_written_to_and_a_broken_write_goes_on(bucket: dict[str, Any], tmp_path: Path) -> None:
    place = Destination("s3://bucket/written", tmp_path / "kept", bucket["options"], deadline_seconds=60.0)
    client, num_rows = bucket["client"], 3000

    def write(stop: int = num_rows, licence: str = "MIT", **options: Any) -> None:
        def rows() -> Iterator[dict[str, int]]:
            for number in range(num_rows):
                if number == stop:
                    raise RuntimeError("broken off")
                yield {"number": number}

        settings = {"class_of": "open/psf", "source": "x", "size_limit": 8192, **options}
        write_dataset(rows(), place, {"number": "int"}, facts=SourceFacts(licence=licence), **settings)

    def objects() -> dict[str, tuple[str, Any]]:
        found = client.list_objects_v2(Bucket="bucket", Prefix="written/").get("Contents", [])
        return {entry["Key"]: (entry["ETag"], entry["LastModified"]) for entry in found}

    with pytest.raises(RuntimeError, match="broken off"):
        write(stop=2000)
    before = objects()
    assert before
    assert all(name.endswith(".mds") for name in before)
    write()
    after = objects()
    assert {name: after[name] for name in before} == before
    assert not [name for name in after if name.endswith((".key", ".jsonl"))]
    with pytest.raises(DataError, match="licence 'B', was 'MIT'"):
        write(licence="B")
    write(licence="B", mode="replace")
    assert {name.rpartition("/")[0] for name in objects()} == {"written", "written/open/psf.2"}
    data = opened(bucket, tmp_path / "cache", "written")
    assert sorted(int(row["number"]) for row in data.__getitems__(range(num_rows))) == list(range(num_rows))


def test_what_isnt_there_is_told_at_once(bucket: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither an index.json \(MDS\) nor Parquet files"):
        opened(bucket, tmp_path, "nothing")
    client = bucket["client"]
    for entry in client.list_objects_v2(Bucket="bucket", Prefix="corpus/")["Contents"]:
        copied = entry["Key"].replace("corpus/", "partial/")
        client.copy_object(Bucket="bucket", CopySource={"Bucket": "bucket", "Key": entry["Key"]}, Key=copied)
    client.delete_object(Bucket="bucket", Key="partial/unknown/shard.00000.mds")
    data = opened(bucket, tmp_path, "partial")
    with pytest.raises(RemoteError, match="isn't there"):
        data.__getitems__(range(18))


def test_one_list_tells_the_lengths(bucket: dict[str, Any]) -> None:
    remote = Remote("s3://bucket/corpus/unknown", options=bucket["options"])
    shard = "shard.00000.mds"
    head = bucket["client"].head_object(Bucket="bucket", Key=f"corpus/unknown/{shard}")
    assert remote.sizes([shard, "other.mds"], sure=("index.json", 0)) == {shard: head["ContentLength"]}


def test_obstore_in_fsspecs_place(bucket: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    # In a process of its own: to register it is to replace fsspec's own for good.
    options = bucket["options"]
    config = {
        "aws_endpoint": options["endpoint_url"],
        "aws_access_key_id": options["key"],
        "aws_secret_access_key": options["secret"],
        "aws_region": "us-east-1",
    }
    script = (
        "import sys, json\n"
        "from pathlib import Path\n"
        "import obstore.fsspec\n"
        "from cosmati.data.opened import CacheOptions\n"
        "from cosmati.data.streaming import StreamingDataset\n"
        "obstore.fsspec.register('s3')\n"
        "own = {'config': json.loads(sys.argv[2]), 'client_options': {'allow_http': True}}\n"
        "data = StreamingDataset('s3://bucket/corpus', cache=CacheOptions(Path(sys.argv[1]), storage_options=own))\n"
        "print(sorted(int(row['number']) for row in data.__getitems__(range(len(data)))))\n"
    )
    done = run_python(["-c", script, tmp_path, json.dumps(config)])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == list(range(18))
