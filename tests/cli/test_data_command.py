"""`cosmati data write`: no ordinary command changes what rows were written with, or takes inputs for others."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cosmati.data.shards.manifest import SourceManifest
from cosmati.data.streaming import StreamingDataset
from tests.cli.test_cli import call, refused, succeed

pytestmark = pytest.mark.long

MIT = ("--class", "open/permissive", "--licence", "MIT")


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"note {number}")
    return folder


def rows(data_set: Path, column: str = "text") -> list[tuple[str, Any]]:
    """Class and value of every row, by the reader."""
    data = StreamingDataset(data_set, columns=(column,), shuffle=False)
    return sorted((data.class_names[row["class_id"]], row[column]) for row in data.__getitems__(range(len(data))))


def licences(data_set: Path) -> dict[str, tuple[str, int]]:
    """Licence and rows of each source that is listed, by path, from the files themselves."""
    listed = json.loads((data_set / "sources.json").read_text())["sources"]
    for entry in listed:
        index = (data_set / entry["path"] / "index.json").read_bytes()
        assert hashlib.sha256(index).hexdigest() == entry["index_sha256"]
    manifests = {e["path"]: json.loads((data_set / e["path"] / "manifest.json").read_bytes()) for e in listed}
    return {path: (found["facts"]["licence"], found["num_rows"]) for path, found in manifests.items()}


def content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_rerun_changes_nothing_and_another_licence_or_input_is_refused_by_name(notes: Path, tmp_path: Path) -> None:
    out = tmp_path / "corpus"
    succeed("data", "write", out, notes, *MIT)
    before = content(out)
    succeed("data", "write", out, notes, *MIT)
    assert content(out) == before
    said = refused("data", "write", out, notes, "--class", "open/permissive", "--licence", "contract 12")
    assert "licence 'contract 12', was 'MIT'" in said
    assert "--append" in said
    assert "--replace" in said
    assert "class 'open/psf', was 'open/permissive'" in refused("data", "write", out, notes, "--class", "open/psf")
    assert "origin 'https://x', was not given" in refused("data", "write", out, notes, *MIT, "--origin", "https://x")
    assert "pack '64', was not given" in refused("data", "write", out, notes, *MIT, "--pack", "64")
    (notes / "6.txt").write_text("note 6")
    assert "new input 6.txt" in refused("data", "write", out, notes, *MIT)
    (notes / "6.txt").unlink()
    (notes / "3.txt").write_text("note 3, mended")
    assert "changed input 3.txt" in refused("data", "write", out, notes, *MIT)
    (notes / "3.txt").unlink()
    assert "gone input 3.txt" in refused("data", "write", out, notes, *MIT)
    written = {name: data for name, data in content(out).items() if name != "writes.jsonl"}
    assert written == {name: data for name, data in before.items() if name != "writes.jsonl"}
    assert licences(out) == {"open/permissive": ("MIT", 6)}


def test_appended_rows_have_facts_of_their_own_and_the_old_ones_keep_theirs(notes: Path, tmp_path: Path) -> None:
    out, more = tmp_path / "corpus", tmp_path / "more"
    more.mkdir()
    (more / "a.txt").write_text("another")
    contract = ("--class", "open/permissive", "--licence", "contract 12", "--append")
    succeed("data", "write", out, notes, *MIT)
    first = SourceManifest.from_bytes((out / "open/permissive/manifest.json").read_bytes())
    assert "0.txt" in refused("data", "write", out, notes, *contract)
    for _ in range(2):  # a rerun appends nothing more
        succeed("data", "write", out, more, *contract)
        assert licences(out) == {"open/permissive": ("MIT", 6), "open/permissive.2": ("contract 12", 1)}
    assert SourceManifest.from_bytes((out / "open/permissive/manifest.json").read_bytes()) == first
    succeed("data", "write", out, notes, *MIT)
    assert rows(out) == sorted(("open/permissive", t) for t in [*(f"note {n}" for n in range(6)), "another"])
    assert succeed("data", "verify", out).count("ok ") == 2


def test_replaced_rows_take_the_place_of_the_old_ones_once_they_are_whole(notes: Path, tmp_path: Path) -> None:
    out, bad = tmp_path / "corpus", notes / "5.txt"
    succeed("data", "write", out, notes, *MIT)
    before = content(out / "open")
    anew = ("--class", "open/permissive", "--licence", "contract 12", "--replace")
    bad.write_bytes(b"\xff")
    assert "isn't UTF-8" in call("data", "write", out, notes, *anew).stderr
    assert {name: data for name, data in content(out / "open").items() if name in before} == before
    assert licences(out) == {"open/permissive": ("MIT", 6)}
    bad.write_text("mended")
    for _ in range(2):
        path = next(iter(licences(out)))
        assert f"replaced and removed: {path}\n" in succeed("data", "write", out, notes, *anew)
        assert list(licences(out).values()) == [("contract 12", 6)]
        assert len(list(out.rglob("index.json"))) == len(list(out.rglob("writer.jsonl"))) == 1
    assert ("open/permissive", "mended") in rows(out)
    assert succeed("data", "verify", out).startswith("ok ")
    succeed("data", "write", out, notes, *anew[:-1])


def test_a_second_class_is_added_to_the_first(tmp_path: Path) -> None:
    out, classes = tmp_path / "corpus", [f"open/c{number}" for number in range(3)]
    for number, name in enumerate(classes):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
        succeed("data", "write", out, tmp_path / f"{number}.txt", "--class", name)
    assert rows(out) == [(name, f"text {number}") for number, name in enumerate(classes)]
    (tmp_path / "5.txt").write_text("text 5")
    succeed("data", "write", out, tmp_path / "5.txt", "--class", "open")
    assert list(licences(out)) == ["open", *classes]
    succeed("data", "write", out, tmp_path / "5.txt", "--class", "open", "--licence", "X", "--replace")
    assert list(licences(out)) == ["open.2", *classes]
    assert len(rows(out)) == 4


def test_kinds_are_inferred_and_contradictions_refused(notes: Path, tmp_path: Path) -> None:
    lines = tmp_path / "crawl.jsonl"
    lines.write_text('{"text": "a", "licence": "open/psf"}\n{"text": "b", "licence": "open/gpl"}\n')
    succeed("data", "write", tmp_path / "one", lines, "--class-field", "licence")
    assert rows(tmp_path / "one") == [("open/gpl", "b"), ("open/psf", "a")]
    assert "of the kind jsonl, not text" in refused(
        "data", "write", tmp_path / "two", lines, "--kind", "text", "--class", "open/psf"
    )
    said = refused("data", "write", tmp_path / "two", lines, notes, "--class", "open/psf")
    assert "several kinds" in said
    assert "crawl.jsonl" in said
    (notes / "rows.jsonl").write_text('{"text": "c"}\n')
    assert "several kinds" in refused("data", "write", tmp_path / "two", notes, "--class", "open/psf")
    succeed("data", "write", tmp_path / "two", notes, "--class", "open/psf", "--kind", "jsonl")
    assert rows(tmp_path / "two") == [("open/psf", "c")]
    (tmp_path / "x.dat").write_text("d")
    assert "Say --kind" in refused("data", "write", tmp_path / "three", tmp_path / "x.dat", "--class", "open/psf")
    succeed("data", "write", tmp_path / "three", tmp_path / "x.dat", "--class", "open/psf", "--kind", "text")
    assert "Use --class" in refused("data", "write", tmp_path / "four", tmp_path / "x.dat", "--kind", "text",
                                    "--class-field", "licence")  # fmt: skip
    assert "Give one of them" in refused("data", "write", tmp_path / "four", lines, "--class-field", "licence", *MIT)
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    assert "can't be read as Parquet" in refused("data", "write", tmp_path / "four", tmp_path / "t.parquet", *MIT)
    assert not (tmp_path / "four").exists()


def test_a_mixed_file_is_packed_by_class(tmp_path: Path) -> None:
    lines, texts = tmp_path / "mixed.jsonl", {"open/psf": b"", "open/gpl": b"", "unknown": b""}
    with lines.open("w") as file:
        for number in range(60):
            name = list(texts)[number * 7 % 3]
            text = f"{name}:{number}|" * (number % 5 + 1)
            texts[name] += text.encode()
            file.write(json.dumps({"text": text, "licence": name}) + "\n")
    succeed("data", "write", tmp_path / "packed", lines, "--class-field", "licence", "--pack", 32)
    data = StreamingDataset(tmp_path / "packed", columns=("tokens",), shuffle=False)
    for number, source in enumerate(data.sources):
        found = bytearray()
        for row in data.__getitems__(range(len(data))):
            if data.where(row["row_id"])[0] is source:
                found += bytes(t for t in np.asarray(row["tokens"]).tolist() if t < 256)
        assert bytes(found).rstrip(b"\0").replace(b"\0", b"") == texts[source.class_path], number
    assert len(data.sources) == 3


def test_packs_are_made_from_the_field_that_is_named_whatever_else_rows_have(tmp_path: Path) -> None:
    lines, out, usual = tmp_path / "posts.jsonl", tmp_path / "packed", tmp_path / "usual.jsonl"
    posts: list[dict[str, Any]] = [
        {"id": 1, "body": "first"},
        {"id": None, "body": "second", "tags": ["a"]},
        {"body": "third", "text": 3},
    ]
    lines.write_text("".join(json.dumps(one) + "\n" for one in posts))
    usual.write_text("".join(json.dumps({"text": one["body"]}) + "\n" for one in posts))
    said = refused("data", "write", out, lines, *MIT, "--pack", 8)
    assert "no field 'text'. They have 'id', 'body': name one with --text-field" in said
    said = refused("data", "write", out, lines, *MIT, "--pack", 8, "--text-field", "id")
    assert "'id' holds no text. Text is in 'body': name it with --text-field" in said
    said = refused("data", "write", out, lines, "--class-field", "of", "--pack", 8, "--text-field", "body")
    assert "no field 'of'" in said
    assert "--class-field" in said
    assert "keep all fields" in refused("data", "write", out, lines, *MIT, "--text-field", "body")
    assert not out.exists()
    succeed("data", "write", out, lines, *MIT, "--pack", 8, "--text-field", "body")
    succeed("data", "write", tmp_path / "as-ever", usual, *MIT, "--pack", 8, "--text-field", "text")
    succeed("data", "write", tmp_path / "as-ever", usual, *MIT, "--pack", 8)
    data = [StreamingDataset(one, columns=("tokens",), shuffle=False) for one in (out, tmp_path / "as-ever")]
    tokens = [[np.asarray(row["tokens"]).tolist() for row in one.__getitems__(range(len(one)))] for one in data]
    assert tokens[0] == tokens[1]
    assert b"first" in bytes(t for row in tokens[0] for t in row if t < 256)
    assert "text field" in refused("data", "write", out, usual, *MIT, "--pack", 8)


def test_a_text_field_is_of_json_lines(notes: Path, tmp_path: Path) -> None:
    said = refused("data", "write", tmp_path / "out", notes, *MIT, "--text-field", "body", "--pack", 8)
    assert "these are text" in said


def image(seed: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(stream, "JPEG")
    return stream.getvalue()


def test_all_image_folders_are_read_and_labels_keep_their_numbers(tmp_path: Path) -> None:
    for number, name in enumerate(("a/cat/1.jpg", "a/dog/2.jpg", "b/cat/3.jpg", "c/ant/4.jpg", "c/dog/5.jpg")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(image(number))
    out, options = tmp_path / "photos", ("--class", "customer/pii")
    succeed("data", "write", out, tmp_path / "a", tmp_path / "b", "--kind", "images", *options)
    assert [value for _, value in rows(out, "label")] == [0, 0, 1]
    succeed("data", "write", out, tmp_path / "c", *options, "--append")
    succeed("data", "write", out, tmp_path / "a", tmp_path / "b", "--kind", "images", *options)
    data = StreamingDataset(out, columns=("label", "origin_file"), shuffle=False)
    found = {(Path(row["origin_file"]).parent.name, int(row["label"])) for row in data.__getitems__(range(len(data)))}
    assert found == {("cat", 0), ("dog", 1), ("ant", 2)}
    stored = {bytes(value) for _, value in rows(out, "image")}
    assert stored == {image(number) for number in range(5)}
    (tmp_path / "loose").mkdir()
    (tmp_path / "loose/x.jpg").write_bytes(image(9))
    assert "--no-labels" in refused("data", "write", tmp_path / "l", tmp_path / "loose", *options)
    succeed("data", "write", tmp_path / "l", tmp_path / "loose", *options, "--no-labels")


def test_append_and_replace_together_are_refused(notes: Path, tmp_path: Path) -> None:
    result = call("data", "write", tmp_path / "x", notes, *MIT, "--append", "--replace")
    assert result.exit_code == 1
    assert "Give one of them" in result.stderr


def test_convert_refuses_what_it_would_pass_over_and_says_how_a_data_set_is_converted(
    notes: Path, tmp_path: Path
) -> None:
    succeed("data", "write", tmp_path / "corpus", notes, *MIT)
    source, out = tmp_path / "corpus/open/permissive", tmp_path / "pq"
    assert "--class open/other" in refused("data", "convert", source, out, "--class", "open/other")
    assert "--compression" in refused("data", "convert", source, out, "--compression", "lz9")
    assert f"one by one: {source}" in refused("data", "convert", tmp_path / "corpus", out)
    assert not out.exists()
    succeed("data", "convert", source, out)
    assert "no compression" in refused("data", "convert", out, tmp_path / "back", "--compression", "lz9")
    succeed("data", "convert", out, tmp_path / "back2", "--class", "open/permissive")


def test_labels_are_numbered_as_another_data_set_does_and_inspect_names_them(tmp_path: Path) -> None:
    for place in ("train/ash", "train/birch", "train/oak", "test/birch", "test/oak", "new/fir"):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(folder / f"{folder.name}.png")
    train, held_out, other = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    succeed("data", "write", train, tmp_path / "train", "--class", "open/trees")
    assert "label 0 is ash\nlabel 1 is birch\nlabel 2 is oak\n" in succeed("data", "inspect", train)
    succeed("data", "write", held_out, tmp_path / "test", "--class", "open/trees", "--labels-of", train)
    assert rows(held_out, "label") == [("open/trees", 1), ("open/trees", 2)]
    assert "label 1 is birch" in succeed("data", "inspect", held_out)
    succeed("data", "write", other, tmp_path / "new", "--class", "open/trees")
    again = ("--class", "open/trees", "--replace", "--labels-of")
    assert "has other labels than" in refused("data", "write", other, tmp_path / "train", *again, train)
    assert "notes no labels" in refused("data", "write", other, tmp_path / "train", *again, tmp_path / "train")
