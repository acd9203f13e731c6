"""Parquet's rows, written anew: the same values as in the files, with what the files' own fields say of them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from cosmati.cli.main import app
from cosmati.data.ingest import read_parquet
from cosmati.data.shards.convert import mds_to_parquet
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import DataError

ROWS: list[dict[str, Any]] = [
    {"text": f"text {n}", "class": ["open", "open/psf"][n % 2], "score": n / 8, "of": ["mail"][: n % 3], "a.b": n}
    for n in range(12)
]
POLICY = (
    "{version: 1, taxonomy: t, rules: [{class: x, weight: 1}], "
    "measures: {trust: {grades: [low, high], thresholds: [0.5]}}}"
)


def write(folder: Path, name: str, rows: list[dict[str, Any]], **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / name, **options)
    return folder / name


@pytest.fixture
def files(tmp_path: Path) -> Path:
    write(tmp_path / "in", "a.parquet", ROWS[:7], row_group_size=3)
    write(tmp_path / "in", "b.parquet", ROWS[7:])
    return tmp_path / "in"


def test_rows_are_those_of_the_files(files: Path) -> None:
    rows = read_parquet(files, class_of="open")
    read = list(rows)
    assert [{name: row[name] for name in ROWS[0]} for row in read] == ROWS
    assert [(row["origin_file"], row["origin_place"]) for row in read[6:8]] == [("a.parquet", 6), ("b.parquet", 0)]
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files.iterdir()}
    assert rows.inputs() == digests == {file.name: file.sha256 for file in rows.files}
    some = read_parquet(files / "a.parquet", class_of="open", columns=["score"])
    assert [row["score"] for row in some] == [row["score"] for row in ROWS[:7]]


@pytest.mark.parametrize("pack", [[], ["--pack", "8"]], ids=["rows", "packs"])
def test_a_command_takes_class_and_grade_from_its_columns(files: Path, tmp_path: Path, pack: list[str]) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY)
    said = ["--class-field", "class", "--grade-field", "trust=score", "--policy", str(tmp_path / "policy.yaml")]
    command = ["data", "write", str(tmp_path / "out"), str(files), *said, "--also-field", "of", *pack]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    found: set[tuple[str, ...]] = set()
    for source in StreamingDataset(tmp_path / "out").sources:
        for row in StreamingDataset(source.url):
            files_of = row["origins"] if pack else [(row["origin_file"], row["origin_place"])]
            for file, place, *_ in files_of:
                found.add((file, str(place), source.class_path, source.grades["trust"]))
    wanted = set()
    for number, row in enumerate(ROWS):
        name = "&".join(sorted({row["class"], *row["of"]}))
        at = ("a.parquet", str(number)) if number < 7 else ("b.parquet", str(number - 7))
        wanted.add((*at, name, "high" if row["score"] >= 0.5 else "low"))
    assert found == wanted


def test_a_null_is_a_bad_row(tmp_path: Path) -> None:
    write(tmp_path / "in", "a.parquet", [ROWS[0], ROWS[1] | {"score": None}])
    with pytest.raises(DataError, match=r"a\.parquet, 1: column 'score' is null"):
        list(read_parquet(tmp_path / "in", class_of="open"))
    rows = read_parquet(tmp_path / "in", class_of="open", on_error="record")
    assert len(list(rows)) == 1
    assert [(bad.file, bad.place) for bad in rows.skipped] == [("a.parquet", 1)]


def test_files_that_arent_alike_or_whole_are_refused_by_name(files: Path, tmp_path: Path) -> None:
    for change, why in (({"score": "high"}, "score"), ({"more": 1}, "more")):
        write(files, "c.parquet", [ROWS[2] | change])
        with pytest.raises(DataError, match=rf"c\.parquet has other columns than a\.parquet has .*: {why}"):
            read_parquet(files, class_of="open")
    assert len(list(read_parquet(files, class_of="open", columns=["text"]))) == 13
    (files / "c.parquet").write_bytes((files / "a.parquet").read_bytes()[:-9])
    with pytest.raises(DataError, match=r"c\.parquet can't be read as Parquet"):
        read_parquet(files, class_of="open")
    (files / "c.parquet").unlink()
    with pytest.raises(DataError, match="has no column rank"):
        read_parquet(files, class_of="open", columns=["rank"])
    write(tmp_path / "own", "d.parquet", [{"origin_file": "x"}])
    with pytest.raises(DataError, match="taken by a row's origin"):
        read_parquet(tmp_path / "own", class_of="open")
    pq.write_table(pa.table([[1], [2]], names=["x", "x"]), tmp_path / "own" / "d.parquet")
    with pytest.raises(DataError, match="the column 'x' twice"):
        read_parquet(tmp_path / "own", class_of="open")
    pq.write_table(pa.table({"x": pa.array([1], pa.time64("us"))}), tmp_path / "own" / "d.parquet")
    with pytest.raises(DataError, match=r"column 'x' is time64\[us\], which no encoding holds"):
        read_parquet(tmp_path / "own", class_of="open")


def test_what_was_made_of_shards_says_its_own_class(tmp_path: Path) -> None:
    write_dataset([{"text": "a"}], tmp_path / "out", {"text": "str"}, class_of="mail", source="s")
    mds_to_parquet(tmp_path / "out" / "mail", tmp_path / "in")
    with pytest.raises(DataError, match="says itself of which class its rows are"):
        read_parquet(tmp_path / "in", class_of="open")


def test_damage_within_a_file_and_a_change_while_it_is_read_are_told(files: Path, tmp_path: Path) -> None:
    whole = (files / "a.parquet").read_bytes()
    rows = read_parquet(files / "a.parquet", class_of="open")

    def change(number: int) -> None:
        if number == 1:
            write(files, "a.parquet", ROWS[:6])

    with pytest.raises(DataError, match=r"a\.parquet"):
        write_dataset(rows, tmp_path / "out", rows.columns, class_of="open", source="s", on_row=change)
    assert not (tmp_path / "out" / "sources.json").exists()
    (files / "a.parquet").write_bytes(whole[:4] + bytes(200) + whole[204:])
    with pytest.raises(DataError, match=r"a\.parquet, 0: the file is damaged"):
        list(read_parquet(files / "a.parquet", class_of="open"))
