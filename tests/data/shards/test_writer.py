"""The writer: one class a source, resumed to the same bytes, nothing visible before it's whole, all verifiable."""

from __future__ import annotations

import hashlib
import hmac
import json
import random
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.data.shards.dataset import write_dataset
from cosmati.data.shards.manifest import Custody, ShardDigest, SourceFacts, SourceManifest
from cosmati.data.shards.verify import source_urls, verify_source
from cosmati.data.shards.writer import ShardWriter, merge_sources
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import DataError
from tests.data.shards import killed_writer
from tests.data.shards.mds_reader import read_source
from tests.processes import PythonProcess, run_python

pytestmark = pytest.mark.long

COLUMNS = {"id": "int", "text": "str"}
SALT = bytes(range(32))


def rows(start: int, stop: int) -> list[dict[str, object]]:
    return [{"id": n, "text": f"row {n} " + "y" * (n * 13 % 90)} for n in range(start, stop)]


def write(out: Path, start: int = 0, stop: int = 200, **options: object) -> SourceManifest:
    settings = {"class_path": "open/permissive", "source": "notes", "size_limit": 8192, "salt": SALT, **options}
    with ShardWriter(out, COLUMNS, **settings) as writer:  # type: ignore[arg-type]
        for row in rows(start, stop):
            writer.write(row)
    return SourceManifest.from_bytes((out / "manifest.json").read_bytes())


def merkle(leaves: list[bytes]) -> bytes:
    """RFC 6962, section 2.1, as it's written there."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return leaves[0]
    k = 1
    while k * 2 < len(leaves):
        k *= 2
    return hashlib.sha256(b"\x01" + merkle(leaves[:k]) + merkle(leaves[k:])).digest()


def content(folder: Path) -> dict[str, bytes]:
    skipped = {"salt.key"}
    return {p.name: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and p.name not in skipped}


def test_what_is_written_is_read_by_another_reader(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    found = read_source(tmp_path)
    assert [int.from_bytes(row["id"], "little", signed=True) for row in found] == list(range(200))
    assert [row["text"].decode() for row in found] == [row["text"] for row in rows(0, 200)]
    shards = sorted(tmp_path.glob("*.mds"))
    assert len(shards) > 1
    assert all(path.stat().st_size <= 8192 for path in shards)
    assert manifest.num_rows == 200
    assert manifest.num_bytes == sum(path.stat().st_size for path in shards)


def test_the_row_root_is_the_brute_force_one(tmp_path: Path) -> None:
    manifest = write(tmp_path, stop=77)
    leaves = []
    for number, row in enumerate(read_source(tmp_path)):
        sample = len(row["text"]).to_bytes(4, "little") + row["id"] + row["text"]
        keyed = hmac.new(SALT, number.to_bytes(8, "big"), hashlib.sha256).digest()
        leaves.append(hashlib.sha256(b"\x00" + keyed + hashlib.sha256(sample).digest()).digest())
    assert manifest.row_root == merkle(leaves).hex()
    assert manifest.row_root == "836a8392df2bdcd31ef9fca6eb4d84245105315025aa84ea732f719322600332"  # as first published
    assert manifest.salt_commitment == hashlib.sha256(SALT).hexdigest()
    assert stat.S_IMODE((tmp_path / "salt.key").stat().st_mode) == 0o600


@pytest.mark.timeout(300)
def test_a_killed_writer_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    script, whole = killed_writer.__file__, tmp_path / "whole"
    assert run_python([script, whole, "12000"]).returncode == 0
    broken, draw = tmp_path / "broken", random.Random(1)
    for _ in range(5):
        process = PythonProcess([script, broken, "12000", "11999"])
        process.stdout.readline()
        time.sleep(draw.uniform(0.0, 0.12))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert not (broken / "index.json").exists()
    assert run_python([script, broken, "12000"]).returncode == 0
    assert content(broken) == content(whole)
    assert verify_source(str(broken)).problems == ()


def test_a_finished_source_is_appended_to(tmp_path: Path) -> None:
    write(tmp_path, 0, 100)
    before = sorted(p.name for p in tmp_path.glob("*.mds"))
    finished = content(tmp_path)
    with pytest.raises(DataError, match=r"is finished, with 100 rows.*append=True"):
        write(tmp_path, 0, 100)
    assert content(tmp_path) == finished
    manifest = write(tmp_path, 100, 150, append=True)
    assert manifest.num_rows == 150
    assert [int.from_bytes(row["id"], "little") for row in read_source(tmp_path)] == list(range(150))
    assert before == sorted(p.name for p in tmp_path.glob("*.mds"))[: len(before)]
    assert verify_source(str(tmp_path)).problems == ()
    with pytest.raises(DataError, match="size_limit 4096, was 8192"):
        write(tmp_path, 150, 160, size_limit=4096)
    with pytest.raises(DataError, match="class_path 'open/psf', was 'open/permissive'"):
        write(tmp_path, 150, 160, class_path="open/psf")
    with pytest.raises(DataError, match="another salt"):
        write(tmp_path, 150, 160, salt=bytes(32), append=True)


def test_an_append_that_was_broken_off_goes_on(tmp_path: Path) -> None:
    write(tmp_path / "a", 0, 100)
    options = {"class_path": "open/permissive", "source": "notes", "size_limit": 8192, "salt": SALT}
    broken = ShardWriter(tmp_path / "a", COLUMNS, append=True, **options)  # type: ignore[arg-type]
    for row in rows(100, 400):
        broken.write(row)
    broken.close()
    assert StreamingDataset(tmp_path / "a").sources[0].num_rows == 100
    with pytest.raises(DataError, match="is finished, with 100 rows, and an append to it was broken off"):
        ShardWriter(tmp_path / "a", COLUMNS, **options)  # type: ignore[arg-type]
    with ShardWriter(tmp_path / "a", COLUMNS, append=True, **options) as writer:  # type: ignore[arg-type]
        assert 100 < writer.num_written < 400
        for row in rows(writer.num_written, 400):
            writer.write(row)
    assert [int.from_bytes(row["id"], "little") for row in read_source(tmp_path / "a")] == list(range(400))
    assert verify_source(str(tmp_path / "a")).problems == ()


def test_two_writers_of_one_directory_are_refused(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, COLUMNS, class_path="open/psf", source="x") as writer:
        writer.write(rows(0, 1)[0])
        with pytest.raises(DataError, match="being written by another"):
            ShardWriter(tmp_path, COLUMNS, class_path="open/psf", source="x")


def test_parts_written_in_parallel_become_one_source(tmp_path: Path) -> None:
    for part in range(3):
        write(tmp_path / f"part-{part}", 50 * part, 50 * part + 50, salt=bytes([part]) * 32)
    merged = merge_sources([tmp_path / f"part-{part}" for part in range(3)], tmp_path, salt=SALT)
    assert merged.num_rows == 150
    assert verify_source(str(tmp_path)).problems == ()
    unbroken = write(tmp_path.parent / f"{tmp_path.name}-unbroken", 0, 150)
    assert merged.row_root == unbroken.row_root
    data = StreamingDataset(tmp_path, shuffle=False)
    assert [row["id"] for row in data.__getitems__(range(150))] == list(range(150))
    write(tmp_path / "other", class_path="open/psf", salt=bytes(32))
    with pytest.raises(DataError, match="differ in class"):
        merge_sources([tmp_path / "part-0", tmp_path / "other"], tmp_path, salt=SALT)
    with pytest.raises(DataError, match="isn't a finished source below"):
        merge_sources([tmp_path / "nowhere"], tmp_path, salt=SALT)


def test_a_part_that_is_given_twice_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    write(tmp_path / "p", 0, 20)
    write(tmp_path / "whole", 0, 20)
    for parts in (["p", "p"], ["p", "p/../p"]):
        with pytest.raises(DataError, match=r"/p is given twice.*rows twice"):
            merge_sources([tmp_path / part for part in parts], tmp_path)
    with pytest.raises(DataError, match="isn't a finished source below"):
        merge_sources([tmp_path / "p", tmp_path / "nowhere"], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p", "whole"]
    write(tmp_path / "whole/part", 20, 40)
    for part in ("whole/part", "whole"):
        with pytest.raises(DataError, match=r"whole holds a source that was written there"):
            merge_sources([tmp_path / part], tmp_path / "whole")
    assert verify_source(tmp_path / "whole").problems == ()


def test_a_data_set_has_a_source_for_each_class_and_goes_on_after_a_crash(tmp_path: Path) -> None:
    def class_of(row: object) -> str:
        return ("open/permissive", "open/psf", "unknown")[row["id"] % 3]  # type: ignore[index]

    def broken() -> object:
        yield from rows(0, 120)
        raise RuntimeError("a crash")

    options = {"class_of": class_of, "source": "notes", "size_limit": 8192, "salt": SALT}
    with pytest.raises(RuntimeError, match="a crash"):
        write_dataset(broken(), tmp_path, COLUMNS, **options)  # type: ignore[arg-type]
    assert not (tmp_path / "sources.json").exists()
    manifests = write_dataset(rows(0, 300), tmp_path, COLUMNS, **options)  # type: ignore[arg-type]
    assert [m.class_path for m in manifests] == ["open/permissive", "open/psf", "unknown"]
    write_dataset(rows(0, 300), tmp_path.parent / "unbroken", COLUMNS, **options)  # type: ignore[arg-type]
    assert content(tmp_path) == content(tmp_path.parent / "unbroken")
    data = StreamingDataset(tmp_path, columns=("id",))
    assert sorted(row["id"] for row in data.__getitems__(range(300))) == list(range(300))
    assert all(class_of(row) == data.class_names[row["class_id"]] for row in data.__getitems__(range(300)))
    assert [Path(url).relative_to(tmp_path).as_posix() for url in source_urls(str(tmp_path))] == [
        "open/permissive",
        "open/psf",
        "unknown",
    ]


def test_a_full_disk_is_told_and_loses_no_finished_shard(tmp_path: Path) -> None:
    script = (
        "import resource, sys\n"
        "from tests.data.shards.killed_writer import row\n"
        "from cosmati.data.shards.writer import ShardWriter\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "writer = ShardWriter(sys.argv[1], {'id': 'int', 'text': 'str'}, class_path='a', source='s',"
        " size_limit=20_000, salt=bytes(32))\n"
        "try:\n"
        "    for n in range(writer.num_written, 900):\n"
        "        if n > 400 and len(sys.argv) > 2: resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))\n"
        "        writer.write(row(n))\n"
        "    writer.finish()\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
        "    sys.exit(3)\n"
    )
    command = [sys.executable, "-c", script]
    full = subprocess.run([*command, str(tmp_path / "a"), "limited"], capture_output=True, text=True, check=False)
    assert full.returncode == 3
    assert "DataError" in full.stdout
    assert "go on with row number" in full.stdout
    assert not list((tmp_path / "a").glob("*.tmp"))
    subprocess.run([*command, str(tmp_path / "a")], check=True)
    subprocess.run([*command, str(tmp_path / "b")], check=True)
    assert content(tmp_path / "a") == content(tmp_path / "b")


@contextmanager
def no_room_beyond(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size_limit", [4200, 8192])
def test_rows_come_once_where_the_journal_met_a_full_disk_and_one_goes_on(tmp_path: Path, size_limit: int) -> None:
    options = {"class_path": "open/permissive", "source": "notes", "size_limit": size_limit, "salt": SALT}
    failed = 0
    with ShardWriter(tmp_path, {"id": "int"}, **options) as writer:  # type: ignore[arg-type]
        while writer.num_written < 20:
            with no_room_beyond((tmp_path / "writer.jsonl").stat().st_size + 50):
                try:
                    writer.write({"id": writer.num_written})
                    continue
                except DataError as error:
                    assert "writer.jsonl can't be written" in str(error)  # noqa: PT017
                    failed += 1
            writer.write({"id": writer.num_written})
        full = no_room_beyond((tmp_path / "writer.jsonl").stat().st_size + 50)
        with full, pytest.raises(DataError, match=r"writer.jsonl can't be written.*go on"):
            writer.finish()
    assert (failed > 1) == (size_limit == 4200)
    assert [int.from_bytes(row["id"], "little") for row in read_source(tmp_path)] == list(range(20))
    assert verify_source(tmp_path).problems == ()
    with ShardWriter(tmp_path, {"id": "int"}, append=True, **options) as again:  # type: ignore[arg-type]
        assert again.num_written == 20, "the journal says the same"


def test_a_closed_writer_says_so(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, COLUMNS, class_path="a", source="s") as writer:
        writer.write(rows(0, 1)[0])
    for act in (lambda: writer.write(rows(1, 2)[0]), writer.finish):
        with pytest.raises(DataError, match=r"was closed\. Open it again"):
            act()
    assert len(read_source(tmp_path)) == 1


def test_verification_finds_every_change(tmp_path: Path) -> None:
    write(tmp_path, stop=60)
    url = str(tmp_path)
    whole = verify_source(url)
    assert (whole.problems, whole.unchecked, whole.num_rows, whole.class_path) == ((), (), 60, "open/permissive")

    def changed(name: str, old: bytes, new: bytes) -> tuple[str, ...]:
        path = tmp_path / name
        kept = path.read_bytes()
        assert kept.count(old) >= 1
        path.write_bytes(kept.replace(old, new, 1))
        try:
            return verify_source(url).problems
        finally:
            path.write_bytes(kept)

    assert "damaged" in " ".join(changed("shard.00000.mds", b"row 3 ", b"row 4 "))
    assert "index names another manifest" in " ".join(
        changed("manifest.json", b'"source":"notes"', b'"source":"notez"')
    )
    assert "class" in " ".join(changed("index.json", b"open/permissive", b"open/permissivf"))
    # A manifest with another root, in an index that names it: only the rows themselves tell. Likewise another salt.
    manifest = SourceManifest.from_bytes((tmp_path / "manifest.json").read_bytes())
    forged_manifest = manifest.model_copy(update={"row_root": "0" * 64})
    (tmp_path / "manifest.json").write_bytes(forged_manifest.to_bytes())
    not_the_root = ("the rows' Merkle root isn't the manifest's: rows were changed, added, removed or moved",)
    assert changed("index.json", manifest.digest.encode(), forged_manifest.digest.encode()) == not_the_root
    (tmp_path / "manifest.json").write_bytes(manifest.to_bytes())
    assert "isn't the salt" in " ".join(changed("salt.key", (tmp_path / "salt.key").read_bytes(), bytes(32)))
    assert verify_source(url) == whole
    # A row exchanged with all hashes of the index made to fit: the manifest's digest and root still tell.
    shard = (tmp_path / "shard.00000.mds").read_bytes()
    forged = shard.replace(b"row 3 ", b"row 4 ", 1)
    (tmp_path / "shard.00000.mds").write_bytes(forged)
    index = (tmp_path / "index.json").read_text()
    old, new = (hashlib.sha256(data).hexdigest() for data in (shard, forged))
    (tmp_path / "index.json").write_text(index.replace(old, new))
    assert "isn't what the manifest says" in " ".join(verify_source(url).problems)
    (tmp_path / "index.json").write_text(index)
    (tmp_path / "shard.00000.mds").write_bytes(shard)
    (tmp_path / "salt.key").unlink()
    assert "salt" in verify_source(url).unchecked[0]
    (tmp_path / "manifest.json").unlink()
    assert "no manifest" in verify_source(url).unchecked[0]


def test_manifests_are_canonical_and_strict() -> None:
    facts = SourceFacts(origin="https://example.org", licence="MIT", licence_valid_until="2026-12-31")
    manifest = SourceManifest(
        source="s",
        source_version="1",
        class_path="open/permissive",
        num_rows=0,
        num_bytes=0,
        shards=(),
        row_root="0" * 64,
        salt_commitment="0" * 64,
        facts=facts,
    )
    data = manifest.to_bytes()
    assert SourceManifest.from_bytes(data) == manifest
    assert manifest.digest == hashlib.sha256(data).hexdigest()
    with pytest.raises(DataError, match="canonical"):
        SourceManifest.from_bytes(json.dumps(json.loads(data), indent=1).encode())
    with pytest.raises(DataError, match="source manifest"):
        SourceManifest.from_bytes(data.replace(b'"num_rows":0', b'"num_rows":-1'))
    with pytest.raises(DataError, match="source manifest"):
        SourceManifest.from_bytes(data[:-1] + b',"more":1}')


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@given(texts=st.lists(TEXTS, min_size=4, max_size=4), num=st.integers(0, 2**53 - 1))
def test_what_is_written_canonically_is_read_and_nothing_else(texts: list[str], num: int) -> None:
    """Whatever the words are, reading takes the bytes of RFC 8785, which another library writes, and no others."""
    source, origin, name, note = texts
    facts = SourceFacts(origin=origin, annotators=(note, name), custody=(Custody(holder=name, since="2026", did=note),))
    shards = (ShardDigest(name=name, sha256="a" * 64, rows=num),)
    row_root = salt = "0" * 64
    fields = {"source": source, "source_version": "1", "class_path": "a/b", "num_rows": num, "num_bytes": 0}
    manifest = SourceManifest(**fields, shards=shards, row_root=row_root, salt_commitment=salt, facts=facts)
    data = manifest.to_bytes()
    assert SourceManifest.from_bytes(data) == manifest
    with pytest.raises(DataError, match="canonical"):
        SourceManifest.from_bytes(json.dumps(json.loads(data), sort_keys=True).encode())


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"class_path": "Open/Source"}, "no class path"),
        ({"size_limit": 1 << 32}, "less than 4 GiB"),
        ({"compression": "rar"}, "no compression"),
        ({"hashes": ("crc",)}, "can't be computed"),
        ({"salt": b"short"}, "32 bytes"),
    ],
)
def test_wrong_arguments_say_what_is_wrong(options: dict[str, object], what: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=what):
        write(tmp_path, **options)  # type: ignore[arg-type]


def test_a_row_longer_than_the_limit_has_a_shard_of_its_own(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, {"text": "str"}, class_path="a", source="s", size_limit=5000) as writer:
        for size in (10, 20_000, 10):
            writer.write({"text": "x" * size})
    assert [len(row["text"]) for row in read_source(tmp_path)] == [10, 20_000, 10]
    assert len(list(tmp_path.glob("*.mds"))) == 3
