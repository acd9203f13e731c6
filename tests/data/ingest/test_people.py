"""Who has made a row stays with it: from files of every kind, through tokens and packs, into shards and out again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from cosmati.cli.main import app
from cosmati.data.ingest import (
    Rows,
    attribute,
    read_hugging_face,
    read_image_folder,
    read_jsonl,
    read_text,
    to_hugging_face,
)
from cosmati.data.packing import Packing, pack_rows
from cosmati.data.people import rows_by
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.streaming import StreamingDataset
from cosmati.data.tokens import ByteTokenizer, tokenize
from cosmati.errors import DataError

WHO = {"a": "ada", "b": "bob", "c": "ada"}
FIELDS = {"annotator": "ada", "label_function": "keywords-v2", "rater": "rob"}


def jsonl(folder: Path) -> Rows:
    lines = ({"text": f"{name * 5} text", "annotator": who, "rater": "rob"} for name, who in WHO.items())
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return read_jsonl(folder / "rows.jsonl", class_of="open/x")


def text(folder: Path) -> Rows:
    (folder / "rows.txt").write_text("\n".join(f"{name * 5} text" for name in WHO))
    return attribute(
        read_text(folder / "rows.txt", class_of="open/x", separator="\n"),
        annotator=lambda row: WHO[row["text"][0]],
        rater="rob",
    )


def images(folder: Path) -> Rows:
    for name in WHO:
        (folder / "cats").mkdir(exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), ord(name), np.uint8)).save(folder / "cats" / f"{name}.png")
    found = read_image_folder(folder, class_of="open/x")
    return attribute(found, annotator=lambda row: WHO[Path(row["origin_file"]).stem], rater="rob")


def hugging_face(folder: Path) -> Rows:
    datasets = pytest.importorskip("datasets")
    del folder
    columns = {"text": [f"{name * 5} text" for name in WHO], "annotator": [*WHO.values()], "rater": ["rob"] * 3}
    return read_hugging_face(datasets.Dataset.from_dict(columns), name="theirs", class_of="open/x")


def _name(row: Mapping[str, Any]) -> str:
    return Path(row["origin_file"]).stem if "image" in row else str(row["text"])[0]


@pytest.mark.parametrize("read", [jsonl, text, images, hugging_face])
def test_who_has_made_a_row_survives_into_shards(tmp_path: Path, read: Any) -> None:
    (tmp_path / "in").mkdir()
    rows = read(tmp_path / "in")
    write_dataset(rows, tmp_path / "out", rows.columns, class_of=rows.class_of, source="s")
    dataset = StreamingDataset(tmp_path / "out")
    found = {_name(row): (row["annotator"], row["rater"]) for row in dataset}
    assert found == {name: (who, "rob") for name, who in WHO.items()}
    places = {dataset[place]["row_id"]: _name(dataset[place]) for place in range(3)}
    assert [places[one] for one in rows_by(dataset, "annotator", "ada").row_ids.tolist()] == ["a", "c"]
    assert [places[one] for one in rows_by(dataset, "rater", "rob").row_ids.tolist()] == ["a", "b", "c"]
    assert not len(rows_by(dataset, "annotator", "nobody").row_ids)
    with pytest.raises(DataError, match="The data have no label_function"):
        rows_by(dataset, "label_function", "f")
    with pytest.raises(DataError, match="none of annotator"):
        rows_by(dataset, "author", "ada")


@pytest.mark.parametrize("cut_rows", [True, False])
def test_each_document_of_a_pack_keeps_who_has_made_it(tmp_path: Path, cut_rows: bool) -> None:
    rows = tokenize(jsonl(tmp_path), ByteTokenizer(), keep=[])
    packed = pack_rows(rows, Packing(8, cut_rows=cut_rows), class_names=("open/x",))
    write_dataset(packed, tmp_path / "out", packed.columns, class_of=packed.class_of, source="s")
    dataset, seen = StreamingDataset(tmp_path / "out"), set[tuple[int, int]]()
    for row in dataset:
        assert len(row["people"]) == len(row["spans"])
        for (number, _, start, _, offset), people in zip(row["spans"].tolist(), row["people"], strict=True):
            assert people == {"annotator": [*WHO.values()][number], "rater": "rob"}
            if not offset:
                assert chr(row["tokens"][start]) == [*WHO][number]
            if people["annotator"] == "ada":
                seen.add((row["row_id"], number))
    found = rows_by(dataset, "annotator", "ada")
    assert {(pack, row) for pack, row in found.documents.tolist()} == seen
    assert seen


def test_packs_without_people_are_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("some text")
    rows = tokenize(read_text(tmp_path / "rows.txt", class_of="open/x"), ByteTokenizer())
    assert "people" not in pack_rows(rows, Packing(8), class_names=("open/x",)).columns


def test_a_command_says_it_of_files_and_packs_what_a_field_says(tmp_path: Path) -> None:
    text(tmp_path)
    jsonl(tmp_path)
    said = [part for name, who in FIELDS.items() for part in ("--by", f"{name}={who}")]
    for out, given, options in (("a", "rows.txt", said), ("b", "rows.jsonl", ["--pack", "8"])):
        command = ["data", "write", str(tmp_path / out), str(tmp_path / given), "--class", "open/x", *options]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    (row, *_) = StreamingDataset(tmp_path / "a")
    assert {name: row[name] for name in FIELDS} == FIELDS
    manifest = json.loads(next((tmp_path / "a").rglob("manifest.json")).read_text())
    assert sorted(manifest["facts"]["annotators"]) == sorted(FIELDS.values())
    assert len(rows_by(StreamingDataset(tmp_path / "b"), "annotator", "bob").documents)


@pytest.mark.parametrize("said", ["ada", "annotator=", "author=ada"])
def test_what_a_command_cant_say_is_refused(tmp_path: Path, said: str) -> None:
    text(tmp_path)
    command = ["data", "write", str(tmp_path / "out"), str(tmp_path / "rows.txt"), "--class", "open/x", "--by", said]
    done = CliRunner().invoke(app, command)
    assert done.exit_code != 0
    assert "--by annotator=ada" in done.output + str(done.exception)


def test_what_isnt_an_id_is_refused(tmp_path: Path) -> None:
    rows = text(tmp_path)
    with pytest.raises(DataError, match="already: what a file says"):
        attribute(rows, annotator="eve")
    with pytest.raises(DataError, match="isn't the id of anybody"):
        attribute(rows, label_function="")
    with pytest.raises(DataError, match="isn't the id of anybody"):
        list(attribute(rows, label_function=lambda row: row["origin_place"]))
    (tmp_path / "odd.jsonl").write_text('{"text": "a", "annotator": {"id": 3}}')
    odd = tokenize(read_jsonl(tmp_path / "odd.jsonl", class_of="open/x"), ByteTokenizer())
    with pytest.raises(DataError, match="'annotator' is json"):
        pack_rows(odd, Packing(8), class_names=("open/x",))


def test_people_survive_a_conversion_there_and_back(tmp_path: Path) -> None:
    rows = pack_rows(tokenize(jsonl(tmp_path), ByteTokenizer()), Packing(8), class_names=("open/x",))
    write_dataset(rows, tmp_path / "packs", rows.columns, class_of=rows.class_of, source="s")
    plain = jsonl(tmp_path)
    write_dataset(plain, tmp_path / "plain", plain.columns, class_of=plain.class_of, source="s")
    for name in ("packs", "plain"):
        (source,) = (one.parent for one in (tmp_path / name).rglob("index.json"))
        there, back = tmp_path / f"{name}-parquet", tmp_path / f"{name}-mds"
        for command in (
            ["data", "convert", str(source), str(there)],
            ["data", "convert", str(there), str(back), "--class", "open/x"],
        ):
            done = CliRunner().invoke(app, command)
            assert done.exit_code == 0, done.output
        for folder in (there, back):
            found, was = (rows_by(StreamingDataset(one), "annotator", "ada") for one in (folder, source))
            assert found.row_ids.tolist() == was.row_ids.tolist()
            assert found.documents.tolist() == was.documents.tolist()
            assert len(was.row_ids) + len(was.documents)


def test_people_go_on_to_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    assert to_hugging_face(jsonl(tmp_path))["annotator"][:] == [*WHO.values()]
