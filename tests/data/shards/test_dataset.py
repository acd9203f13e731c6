"""Data sets by the Python API: what a write commits to holds through crashes, other processes and remotes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from cosmati.data.ingest import read_image_folder, read_text
from cosmati.data.opened import CacheOptions
from cosmati.data.shards.convert import mds_to_parquet
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.shards.journal import Journal
from cosmati.data.shards.manifest import SALT_FILE, SourceFacts, SourceManifest
from cosmati.data.shards.upload import Destination
from cosmati.data.shards.verify import verify_list, verify_source
from cosmati.data.shards.writer import ShardWriter
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import DataError

COLUMNS = {"id": "int", "text": "str"}


def rows(start: int, stop: int) -> list[dict[str, Any]]:
    return [{"id": n, "text": f"row {n} " + "y" * (n * 13 % 90)} for n in range(start, stop)]


def write(out: Any, start: int = 0, stop: int = 200, *, licence: str = "MIT", name: str = "", **options: Any) -> None:
    settings = {"class_of": "open/psf", "source": "notes", "size_limit": 8192, **options}
    inputs = {name or f"{start}-{stop}": hashlib.sha256(f"{start} {stop}".encode()).hexdigest()}
    settings = {"inputs": inputs, **settings}
    write_dataset(settings.pop("rows", rows(start, stop)), out, COLUMNS, facts=SourceFacts(licence=licence), **settings)


def listed(folder: Path) -> dict[str, tuple[str, int]]:
    entries = json.loads((folder / "sources.json").read_text())["sources"]
    manifests = {e["path"]: json.loads((folder / e["path"] / "manifest.json").read_bytes()) for e in entries}
    return {path: (found["facts"]["licence"], found["num_rows"]) for path, found in manifests.items()}


def forked(work: Callable[..., None], *arguments: Any) -> multiprocessing.context.ForkProcess:
    process = multiprocessing.get_context("fork").Process(target=work, args=arguments)
    process.start()
    return process


def slow(start: int, stop: int) -> Iterator[dict[str, Any]]:
    for row in rows(start, stop):
        time.sleep(0.0005)
        yield row
    time.sleep(600)  # until it's killed, however late that comes


def kill_when(process: multiprocessing.context.ForkProcess, path: Path) -> None:
    while process.is_alive() and not path.exists():
        time.sleep(0.002)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.long
def test_a_replacement_that_is_killed_leaves_the_old_source_and_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "corpus"
    write(out, 0, 900)
    new = {"licence": "B", "mode": "replace"}
    kill_when(forked(lambda: write(out, 0, 2000, rows=slow(0, 2000), **new)), out / "open/psf.2/shard.00003.mds")
    assert listed(out) == {"open/psf": ("MIT", 900)}
    assert verify_source(out / "open/psf").problems == ()
    kept = (out / "open/psf.2/shard.00001.mds").stat()
    write(out, 0, 2000, **new)
    assert listed(out) == {"open/psf.2": ("B", 2000)}
    assert not (out / "open/psf").exists()
    after = (out / "open/psf.2/shard.00001.mds").stat()
    assert (after.st_ino, after.st_mtime_ns) == (kept.st_ino, kept.st_mtime_ns)
    assert verify_source(out / "open/psf.2").problems == ()
    write(out, 0, 2000, **new)  # anew, whole as it was
    assert listed(out) == {"open/psf": ("B", 2000)}


@pytest.mark.long
def test_several_processes_write_their_classes_into_one_data_set_at_once(tmp_path: Path) -> None:
    names = [f"open/c{number}" for number in range(4)]
    barrier = multiprocessing.get_context("fork").Barrier(len(names))

    def work(number: int) -> None:
        for begin in (0, 10):
            barrier.wait()
            mode = "append" if begin else "new"
            write(tmp_path, 100 * number + begin, 100 * number + begin + 10, class_of=names[number], mode=mode)

    running = [forked(work, number) for number in range(len(names))]
    for process in running:
        process.join()
    assert [process.exitcode for process in running] == [0] * len(names)
    assert list(listed(tmp_path)) == [path for name in names for path in (name, f"{name}.2")]
    data = StreamingDataset(tmp_path, columns=("id",))
    found = sorted(int(row["id"]) for row in data.__getitems__(range(len(data))))
    assert found == [100 * number + n for number in range(4) for n in range(20)]
    assert verify_list(str(tmp_path)) == []


def test_a_rerun_with_other_rows_or_fewer_is_refused(tmp_path: Path) -> None:
    def broken(changed: int = -1) -> Iterator[dict[str, Any]]:
        for row in rows(0, 400):
            yield row | {"text": "another"} if row["id"] == changed else row
            if row["id"] == 300:
                raise RuntimeError("a crash")

    with pytest.raises(RuntimeError, match="a crash"):
        write(tmp_path, inputs={}, rows=broken())
    with pytest.raises(DataError, match=r"aren't the rows that .*shard.00003.mds would be another"):
        write(tmp_path, inputs={}, rows=broken(changed=200))
    noted = [json.loads(line[17:]) for line in (tmp_path / "open/psf/writer.jsonl").read_text().splitlines()[1:]]
    first, all_of_them = noted[0]["digest"]["rows"], sum(one["digest"]["rows"] for one in noted)
    with pytest.raises(DataError, match=f"they are {first} of {all_of_them}"):
        write(tmp_path, 0, first, inputs={})
    write(tmp_path, 0, 400, inputs={})
    with pytest.raises(DataError, match="aren't the rows"):
        write(tmp_path, 0, 500, inputs={})
    with pytest.raises(DataError, match="Name inputs="):
        write(tmp_path, 400, 500, inputs={}, mode="append")
    with pytest.raises(DataError, match="licence 'B', was 'MIT'"):
        write(tmp_path, 0, 400, inputs={}, licence="B")
    assert listed(tmp_path) == {"open/psf": ("MIT", 400)}


def test_an_input_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    read = read_text([tmp_path / "a.txt", tmp_path / "b.txt"], class_of="open/psf")

    def change(_number: int) -> None:
        (tmp_path / "b.txt").write_text("changed")

    with pytest.raises(DataError, match=r"b.txt changed while it was read"):
        write_dataset(read, tmp_path / "out", read.columns, class_of="open/psf", source="x", on_row=change)
    assert not list((tmp_path / "out").rglob("*.json"))


def test_a_place_that_cant_be_written_to_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(DataError, match="file can't be written to"):
        write(tmp_path / "file")


def test_one_content_has_one_class_in_a_data_set(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(DataError, match="class 'open/gpl', was 'open/psf'"):
        write(tmp_path, class_of="open/gpl", name="the same under another name")
    with pytest.raises(DataError, match="Replace that class too"):
        write(tmp_path, class_of="open/gpl", mode="replace")
    assert listed(tmp_path) == {"open/psf": ("MIT", 200)}
    other = tmp_path / "other"
    with pytest.raises(DataError, match="class 'open/gpl', was 'open/psf'"):  # whoever comes second to the list
        write(other, class_of="open/gpl", on_row=lambda number: write(other) if number == 200 else None)
    assert listed(other) == {"open/psf": ("MIT", 200)}


def test_a_source_that_a_replacement_left_behind_is_in_nobodys_way(tmp_path: Path) -> None:
    write(tmp_path)
    shutil.copytree(tmp_path / "open/psf", tmp_path / "copy")
    write(tmp_path, licence="B", mode="replace")
    shutil.copytree(tmp_path / "copy", tmp_path / "open/psf")  # as if it had been killed before it was removed
    write(tmp_path, licence="B")
    assert listed(tmp_path) == {"open/psf.2": ("B", 200)}
    write(tmp_path, licence="C", mode="replace")
    assert list(listed(tmp_path).values()) == [("C", 200)]
    assert {p.parent.name for p in tmp_path.rglob("writer.jsonl")} == {"copy", "psf.3"}  # a copy is its owner's


def test_a_writer_by_itself_keeps_the_facts_that_its_source_was_begun_with(tmp_path: Path) -> None:
    options = {"class_path": "open/psf", "source": "x"}
    with ShardWriter(tmp_path / "a", COLUMNS, facts=SourceFacts(licence="MIT"), **options) as writer:  # type: ignore[arg-type]
        writer.write(rows(0, 1)[0])
    with pytest.raises(DataError, match="licence 'B', was 'MIT'"):
        ShardWriter(tmp_path / "a", COLUMNS, facts=SourceFacts(licence="B"), **options)  # type: ignore[arg-type]
    (tmp_path / "a/writer.jsonl").unlink()
    with pytest.raises(DataError, match="no journal"):
        ShardWriter(tmp_path / "a", COLUMNS, facts=SourceFacts(licence="B"), **options)  # type: ignore[arg-type]


def test_a_row_that_was_changed_is_found_though_every_hash_fits(tmp_path: Path) -> None:
    write(tmp_path)
    source = tmp_path / "open/psf"
    shard = (source / "shard.00000.mds").read_bytes()
    forged = shard.replace(b"row 3 ", b"row 4 ", 1)
    (source / "shard.00000.mds").write_bytes(forged)
    old, new = (hashlib.sha256(data).hexdigest().encode() for data in (shard, forged))
    manifest = (source / "manifest.json").read_bytes().replace(old, new)
    before = hashlib.sha256((source / "manifest.json").read_bytes()).hexdigest().encode()
    (source / "manifest.json").write_bytes(manifest)
    index = (source / "index.json").read_bytes().replace(old, new)
    index = index.replace(before, hashlib.sha256(manifest).hexdigest().encode())
    (source / "index.json").write_bytes(index)
    assert verify_list(str(tmp_path)) == ["open/psf/index.json isn't the one that sources.json names"]
    entries = json.loads((tmp_path / "sources.json").read_text())
    entries["sources"][0]["index_sha256"] = hashlib.sha256(index).hexdigest()
    (tmp_path / "sources.json").write_text(json.dumps(entries))
    assert verify_list(str(tmp_path)) == []
    found = verify_source(source)
    assert found.problems == ("the rows' Merkle root isn't the manifest's: rows were changed, added, removed or moved",)
    (source / SALT_FILE).rename(tmp_path / SALT_FILE)
    without = verify_source(source)
    assert without.problems == ()
    assert "salt isn't here" in without.unchecked[0]
    assert verify_source(source, keep=tmp_path).problems == found.problems


def test_parquet_is_verified_by_its_rows_too(tmp_path: Path) -> None:
    write(tmp_path / "mds", 0, 40)
    out = tmp_path / "parquet"
    mds_to_parquet(tmp_path / "mds/open/psf", out)
    found = verify_source(out)
    assert (found.problems, found.unchecked, found.num_rows, found.class_path) == ((), (), 40, "open/psf")
    file = next(out.glob("*.parquet"))
    table = pq.read_table(file)
    texts = [text.replace("row 3 ", "row 4 ") for text in table["text"].to_pylist()]
    place = table.column_names.index("text")
    pq.write_table(
        table.set_column(place, table.schema.field("text"), pa.array(texts, table.schema.types[place])), file
    )
    assert "Merkle root" in " ".join(verify_source(out).problems)
    with pytest.raises(DataError, match="is remote"):
        mds_to_parquet("s3://bucket/corpus", out)


@pytest.fixture(params=["memory", "local"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Destination]:
    """Two file systems of fsspec: an object store's ways, and folders."""
    url = f"memory://{tmp_path.name}/corpus" if request.param == "memory" else f"local://{tmp_path}/remote/corpus"
    yield Destination(url, tmp_path / "kept")
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()


def files_at(place: Destination) -> dict[str, bytes]:
    system, root = fsspec.core.url_to_fs(place.url)
    system.invalidate_cache()
    return {name.removeprefix(str(root)).lstrip("/"): system.cat_file(name) for name in system.find(root)}


def test_a_remote_is_written_like_a_directory_and_gets_no_salt(remote: Destination, tmp_path: Path) -> None:
    salt = bytes(range(32))
    write(remote, salt=salt)
    write(tmp_path / "here", salt=salt)
    here = {p.relative_to(tmp_path / "here").as_posix(): p for p in (tmp_path / "here").rglob("*") if p.is_file()}
    owners = {"open/psf/salt.key", "open/psf/writer.jsonl", "writes.jsonl"}
    assert files_at(remote) == {name: path.read_bytes() for name, path in here.items() if name not in owners}
    kept = tmp_path / "kept"
    assert {p.relative_to(kept).as_posix() for p in kept.rglob("*") if p.is_file()} == owners
    data = StreamingDataset(remote.url, columns=("id",), cache=CacheOptions(tmp_path / "cache"))
    assert sorted(int(row["id"]) for row in data.__getitems__(range(200))) == list(range(200))
    verified = verify_source(f"{remote.url}/open/psf", cache=tmp_path / "cache2", keep=kept / "open/psf")
    assert (verified.problems, verified.unchecked, verified.num_rows) == ((), (), 200)
    assert "salt" in verify_source(f"{remote.url}/open/psf", cache=tmp_path / "cache2").unchecked[0]
    with pytest.raises(DataError, match="licence 'B', was 'MIT'"):
        write(remote, licence="B")
    write(remote, 200, 210, licence="B", mode="append", salt=salt)
    write(remote, 0, 50, class_of="open/gpl", salt=salt)
    write(remote, 0, 205, licence="C", mode="replace", salt=salt)
    manifests = {n: SourceManifest.from_bytes(d) for n, d in files_at(remote).items() if n.endswith("manifest.json")}
    assert {(m.class_path, m.num_rows, m.facts.licence) for m in manifests.values()} == {
        ("open/gpl", 50, "MIT"),
        ("open/psf", 205, "C"),
    }
    with pytest.raises(DataError, match=r"nothing here says|no journal|knows nothing"):
        write(Destination(remote.url, tmp_path / "elsewhere"))
    with pytest.raises(DataError, match="keeps what belongs to"):
        write(Destination(f"{remote.url}2", kept))


@pytest.mark.long
def test_a_remote_write_that_is_killed_goes_on_and_writes_no_shard_twice(tmp_path: Path) -> None:
    far = tmp_path / "remote"
    place = Destination(f"local://{far}", tmp_path / "kept")
    kill_when(forked(lambda: write(place, 0, 2000, rows=slow(0, 2000))), far / "open/psf/shard.00004.mds")
    assert not list(far.rglob("*.json"))
    noted = (tmp_path / "kept/open/psf/writer.jsonl").read_text().count("\n") - 1
    assert noted >= 4
    before = {path: path.stat() for path in sorted(far.rglob("*.mds"))[:noted]}
    write(place, 0, 2000)
    assert {path: path.stat().st_ino for path in before} == {path: stat.st_ino for path, stat in before.items()}
    verified = verify_source(f"{place.url}/open/psf", cache=tmp_path / "c", keep=tmp_path / "kept/open/psf")
    assert (verified.problems, verified.num_rows) == ((), 2000)


def test_a_remote_without_a_place_for_its_salt_is_refused_and_makes_no_local_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="--keep"):
        write("s3://bucket/corpus")
    with pytest.raises(DataError, match="--keep"):
        ShardWriter("s3://bucket/corpus", COLUMNS, class_path="open/psf", source="x")
    with pytest.raises(DataError, match="Leave keep"):
        write(Destination("here", tmp_path / "kept"))
    assert list(tmp_path.iterdir()) == []
    write(f"file://{tmp_path}/there")
    assert listed(tmp_path / "there") == {"open/psf": ("MIT", 200)}


def test_a_remote_that_refuses_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="can't be written"):
        write(Destination("http://127.0.0.1:9/corpus", tmp_path / "kept", deadline_seconds=0.5))


def test_shards_that_were_removed_meanwhile_are_written_again(tmp_path: Path) -> None:
    write(tmp_path, 0, 900)
    shards = sorted((tmp_path / "open/psf").glob("shard.*"))
    for shard in shards[1:3]:
        shard.unlink()
    write(tmp_path, 0, 900)
    assert sorted((tmp_path / "open/psf").glob("shard.*")) == shards
    assert verify_source(tmp_path / "open/psf").problems == ()


def test_what_a_replacement_left_is_not_listed_beside_it(tmp_path: Path) -> None:
    write(tmp_path)
    shutil.copytree(tmp_path / "open/psf", tmp_path / "copy")
    write(tmp_path, licence="B", mode="replace")
    shutil.copytree(tmp_path / "copy", tmp_path / "open/psf")  # as if it had been killed before it was removed
    with pytest.raises(DataError, match="licence 'MIT', was 'B'"):
        write(tmp_path)
    assert listed(tmp_path) == {"open/psf.2": ("B", 200)}


def test_a_journal_that_was_only_made_begins_nothing(tmp_path: Path) -> None:
    (tmp_path / "open/psf").mkdir(parents=True)
    (tmp_path / "open/psf/writer.jsonl").touch()
    write(tmp_path)
    assert listed(tmp_path) == {"open/psf": ("MIT", 200)}


@pytest.mark.parametrize("url", ["", "  ", "s3:/bucket/data"])
def test_a_place_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(DataError, match="is no place to write to"):
        Destination(url)


def test_a_remote_of_which_this_directory_knows_nothing_is_refused(tmp_path: Path) -> None:
    url = f"memory://kept-{tmp_path.name}/corpus"
    write(Destination(url, tmp_path / "one"))
    with pytest.raises(DataError, match=r"has open/psf, of which .*two knows nothing"):
        write(Destination(url, tmp_path / "two"), class_of="secret/z", licence="contract 12")


def test_a_journal_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "writes.jsonl")
    journal._file.close()
    journal._file = Path("/dev/full").open("a+b", buffering=0)  # noqa: SIM115
    with pytest.raises(DataError, match=r"writes.jsonl can't be written: No space left.*go on"):
        journal.note({"a": 1})
    journal.close()


def rewritten(path: Path, was: str, now: str) -> None:
    text = path.read_text()
    assert was in text
    path.write_text(text.replace(was, now))


@pytest.mark.parametrize(
    ("tamper", "told"),
    [
        (lambda out: rewritten(out / "open/psf/manifest.json", '"MIT"', '"GPL"'), "written with licence 'MIT'"),
        (lambda out: rewritten(out / "open/psf/index.json", '"text"', '"other"'), "written with the columns"),
        (
            lambda out: rewritten(out / "sources.json", "open/psf", "open/gone"),
            "open/psf was written, and sources",
        ),
    ],
)
def test_verify_compares_with_what_the_writer_noted(tmp_path: Path, tamper: Any, told: str) -> None:
    write(tmp_path)
    tamper(tmp_path)
    with contextlib.suppress(DataError):
        found = [*verify_list(str(tmp_path)), *verify_source(tmp_path / "open/psf").problems]
    assert any(told in line for line in found), found


def test_a_source_that_is_listed_twice_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    listing = json.loads((tmp_path / "sources.json").read_text())
    listing["sources"].append({**listing["sources"][0], "path": "./open/psf"})
    (tmp_path / "sources.json").write_text(json.dumps(listing))
    with pytest.raises(DataError, match="open/psf twice"):
        StreamingDataset(tmp_path)
    with pytest.raises(DataError, match="open/psf twice"):
        verify_list(str(tmp_path))


def test_an_image_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    for number in range(4):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "cat" / f"{number}.png")
    found = read_image_folder(tmp_path, class_of="open/psf")

    def replace_one(number: int) -> None:
        if number == 2:
            Image.new("RGB", (8, 8), (0, 255, 0)).save(tmp_path / "cat" / "3.png")

    with pytest.raises(DataError, match=r"cat/3.png changed while it was read"):
        write_dataset(
            found, tmp_path / "out", dict(found.columns), class_of="open/psf", source="pics", on_row=replace_one
        )
