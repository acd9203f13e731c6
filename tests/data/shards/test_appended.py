"""What is appended: never rows that are there already, whatever file they come in; nor is a failed write in the way."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from cosmati.data.ingest import read_jsonl
from cosmati.data.packing import Packing, pack_rows
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.shards.upload import Destination, Target
from cosmati.data.shards.verify import verify_list, verify_source
from cosmati.data.shards.writer import ShardWriter
from cosmati.data.streaming import StreamingDataset
from cosmati.data.tokens import ByteTokenizer, tokenize
from cosmati.errors import DataError
from tests.cli.test_cli import call, refused, succeed
from tests.data.shards.test_dataset import listed, write

MIT, CONTRACT = ("--class", "open/x", "--licence", "MIT"), ("--class", "open/x", "--licence", "contract 12", "--append")


def lines(path: Path, *texts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def texts(folder: Path) -> list[str]:
    return sorted(row["text"] for row in StreamingDataset(folder))


def ten(tag: str = "row") -> list[str]:
    return [f"{tag} {number}" for number in range(10)]


def test_an_input_that_grew_is_neither_appended_nor_is_append_offered(tmp_path: Path) -> None:
    out, file = tmp_path / "corpus", lines(tmp_path / "a.jsonl", *ten())
    succeed("data", "write", out, file, *MIT)
    lines(file, *ten(), "a new one")
    said = refused("data", "write", out, file, *MIT)
    assert "changed input a.jsonl" in said
    assert "--append" not in said
    assert "--replace" in said
    said = refused("data", "write", out, file, *CONTRACT)
    assert "has the row of a.jsonl, 1, already" in said
    assert "--replace" in said
    assert texts(out) == ten()
    assert call("data", "verify", out).exit_code == 0
    succeed("data", "write", out, lines(tmp_path / "rest.jsonl", "a new one"), *CONTRACT)
    assert texts(out) == sorted([*ten(), "a new one"])


@pytest.mark.parametrize("is_packed", [False, True])
def test_an_input_that_was_compressed_since_is_the_same(tmp_path: Path, is_packed: bool) -> None:
    out, file = tmp_path / "corpus", lines(tmp_path / "keep.jsonl", *ten())
    pack = ("--pack", 32) if is_packed else ()
    succeed("data", "write", out, file, *MIT, *pack)
    packed = tmp_path / "keep.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert "has the row of keep.jsonl.gz, 1, already" in refused("data", "write", out, packed, *CONTRACT, *pack)
    assert listed(out)["open/x"][0] == "MIT"
    assert len(listed(out)) == 1


def test_another_file_of_the_same_name_is_appended(tmp_path: Path) -> None:
    out = tmp_path / "corpus"
    for day in ("monday", "tuesday", "wednesday"):
        file = lines(tmp_path / day / "part-0.jsonl", *ten(day))
        succeed("data", "write", out, file, *(MIT if day == "monday" else CONTRACT))
    assert texts(out) == sorted(text for day in ("monday", "tuesday", "wednesday") for text in ten(day))


def test_rows_of_a_remote_are_compared_too(tmp_path: Path) -> None:
    place = Destination(f"local://{tmp_path}/far", tmp_path / "kept")
    file = tmp_path / "a.jsonl"

    def put(**options: object) -> None:
        rows = read_jsonl(file, class_of="open/x")
        packed = pack_rows(tokenize(rows, ByteTokenizer(), column="text"), Packing(length=16), class_names=("open/x",))
        write_dataset(packed, place, packed.columns, class_of="open/x", source="x", **options)  # type: ignore[arg-type]

    lines(file, *ten())
    put()
    lines(file, "new", *ten())
    with pytest.raises(DataError, match=r"has the row of a.jsonl, 2, already"):
        put(mode="append")
    lines(file, *ten("other"))
    put(mode="append")
    assert len(listed(tmp_path / "far")) == 2


def test_rows_without_an_origin_are_told_by_the_name_of_their_input(tmp_path: Path) -> None:
    write(tmp_path, 0, 10, name="notes")
    with pytest.raises(DataError, match="has rows of notes already, as it was then"):
        write(tmp_path, 0, 11, name="notes", mode="append")
    write(tmp_path, 10, 11, name="more", mode="append")
    assert [number for _, number in listed(tmp_path).values()] == [10, 1]


@pytest.mark.parametrize("mend", [("--skip-bad-rows",), ("mended",), ("mended", "--append"), ("mended", "--replace")])
def test_a_first_write_that_failed_before_its_first_shard_is_in_nobodys_way(
    tmp_path: Path, mend: tuple[str, ...]
) -> None:
    out, file = tmp_path / "corpus", tmp_path / "a.jsonl"
    file.write_text('{"text":"a"}\n{"text":1}\n{"text":"c"}\n')
    assert call("data", "write", out, file, *MIT).exit_code == 1
    if "mended" in mend:
        lines(file, "a", "b", "c")
    succeed("data", "write", out, file, *MIT, *[one for one in mend if one != "mended"])
    assert list(listed(out)) == ["open/x"]
    assert texts(out) == (["a", "b", "c"] if "mended" in mend else ["a", "c"])
    assert verify_list(str(out)) == []


def test_a_write_under_way_without_a_shard_yet_keeps_its_place(tmp_path: Path) -> None:
    def meanwhile(number: int) -> None:
        if number == 5:
            write(tmp_path, 100, 110, mode="append")

    write(tmp_path, 0, 10, on_row=meanwhile)
    assert {path: number for path, (_, number) in listed(tmp_path).items()} == {"open/psf": 10, "open/psf.2": 10}


def test_what_a_refused_write_had_finished_is_removed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has rows of"):
        write(tmp_path, class_of="open/gpl", on_row=lambda number: write(tmp_path) if number == 200 else None)
    assert verify_list(str(tmp_path)) == []
    assert not (tmp_path / "open/gpl").exists()
    assert verify_source(tmp_path / "open/psf").problems == ()
    # The same for who appends; what is listed already is left alone.
    with pytest.raises(DataError, match="has rows of"):
        write(
            tmp_path, 200, 250, class_of="open/gpl", mode="append",
            on_row=lambda number: write(tmp_path, 200, 250, mode="append") if number == 50 else None,
        )  # fmt: skip
    assert verify_list(str(tmp_path)) == []
    assert [number for _, number in listed(tmp_path).values()] == [200, 50]


def test_rows_of_a_class_that_stays_arent_put_in_place_of_anothers(tmp_path: Path) -> None:
    out, file = tmp_path / "corpus", lines(tmp_path / "a.jsonl", *ten())
    succeed("data", "write", out, file, *MIT)
    succeed("data", "write", out, lines(tmp_path / "b.jsonl", "b"), "--class", "open/b")
    lines(file, *ten(), "a new one")
    said = call("data", "write", out, file, "--class", "open/b", "--replace").stderr
    assert "open/x has the row of a.jsonl, 1, already" in said
    assert "Replace that class too" in said
    assert texts(out) == sorted([*ten(), "b"])
    assert verify_list(str(out)) == []
    succeed("data", "write", out, file, "--class", "open/x", "--replace")
    assert texts(out) == sorted([*ten(), "a new one", "b"])


def test_a_row_may_change_its_class_where_both_classes_are_replaced(tmp_path: Path) -> None:
    out, file = tmp_path / "corpus", tmp_path / "a.jsonl"
    both = [{"text": "one", "class": "open/a"}, {"text": "two", "class": "open/b"}]
    for _ in range(2):
        file.write_text("".join(json.dumps(row) + "\n" for row in both))
        succeed("data", "write", out, file, "--class-field", "class", "--replace")
        both = [{"text": "new", "class": "open/a"}, *both[::-1]]
    assert texts(out) == ["new", "one", "two"]
    file.write_text(json.dumps({"text": "two", "class": "open/b"}) + "\n")
    succeed("data", "write", out, file, "--class-field", "class", "--replace")
    assert texts(out) == ["new", "one", "two"]


def put(folder: Path, first: int, last: int, *, append: bool = False) -> int:
    with ShardWriter(folder, {"n": "int"}, class_path="open/x", source="x", size_limit=200, append=append) as writer:
        for number in range(first, last):
            writer.write({"n": number})
        return writer.num_written


def numbers(folder: Path) -> list[int]:
    return [row["n"] for row in StreamingDataset(folder, shuffle=False)]


@pytest.mark.parametrize("lost", ["shard.00000.mds", "shard.*.mds"])
def test_a_writer_doesnt_count_on_shards_that_are_gone(tmp_path: Path, lost: str) -> None:
    put(tmp_path, 0, 50)
    for file in [*tmp_path.glob(lost), tmp_path / "index.json", tmp_path / "manifest.json"]:
        file.unlink()
    for append in (True, False):
        with pytest.raises(DataError, match=r"has no shard.00000.mds any more.*remove .* too and write all rows again"):
            put(tmp_path, 50, 60, append=append)
    for name in ("writer.jsonl", "salt.key"):
        (tmp_path / name).unlink()
    put(tmp_path, 0, 30)
    assert numbers(tmp_path) == list(range(30))


def test_an_append_that_a_full_disk_ends_in_its_last_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, 0, 50)
    whole = Target.put

    def full(self: Target, name: str, data: bytes) -> None:
        if name == "index.json":
            raise OSError(28, "No space left on device")
        whole(self, name, data)

    with monkeypatch.context() as disk:
        disk.setattr(Target, "put", full)
        with pytest.raises(DataError, match=r"can't be finished: No space left.*append=True"):
            put(tmp_path, 50, 70, append=True)
    assert numbers(tmp_path) == list(range(50))
    problems = verify_source(str(tmp_path)).problems
    assert any("20 rows more than the index" in problem and "append=True" in problem for problem in problems)
    assert put(tmp_path, 0, 0, append=True) == 70
    assert numbers(tmp_path) == list(range(70))
    assert verify_source(str(tmp_path)).problems == ()
