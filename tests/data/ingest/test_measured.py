"""What was measured of each row: it's written with its shards, for every row, and bad values leave nothing behind."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cosmati.cli.main import app
from cosmati.data.graded import SourceKind
from cosmati.data.ingest import read_hugging_face, read_jsonl, read_text
from cosmati.data.ingest.measured import MAX_KINDS, kinds_in, measure, of_field
from cosmati.data.packing import Pack, Packing, pack_rows
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.shards.manifest import SourceManifest
from cosmati.data.streaming import StreamingDataset
from cosmati.data.tokens import ByteTokenizer, tokenize
from cosmati.errors import DataError
from cosmati.routing.measures import Grading

POLICY = """
version: 1
taxonomy: t
bands: {measure: readability, names: [low, middle, high], thresholds: [0.25, 0.5]}
measures:
  evidence: {grades: [report, trial]}
  trust: {grades: [low, high], thresholds: [0.5]}
rules: [{class: "**", weight: 1}]
"""
OPTIONS = ["--class-field", "kind", "--also-field", "topics", "--by-field", "annotator=who"]
for name, field in {"readability": "read", "evidence": "level", "trust": "score"}.items():
    OPTIONS += ["--grade-field", f"{name}={field}"]

numbers = st.one_of(st.integers(-1, 2), st.sampled_from([0.0, 0.25, 0.4999, 0.5, 0.75, -0.0, 1e300]))
rows = st.fixed_dictionaries(
    {
        "text": st.text("ab", min_size=1, max_size=9),
        "kind": st.sampled_from(["open", "open/psf"]),
        "topics": st.lists(st.sampled_from(["mail", "news", "open"]), max_size=2),
        "who": st.one_of(st.integers(0, 2), st.integers(7, 9)),
        "read": numbers,
        "level": st.sampled_from(["report", "trial"]),
        "score": numbers,
    }
)


def command(folder: Path, *options: str, file: str = "rows.jsonl", policy: str = POLICY) -> tuple[int, str]:
    (folder / "policy.yaml").write_text(policy)
    said = ["data", "write", str(folder / "out"), str(folder / file), "--policy", str(folder / "policy.yaml"), *options]
    done = CliRunner().invoke(app, said)
    return done.exit_code, done.output + str(done.exception or "")


def write(folder: Path, given: Sequence[dict[str, Any]]) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))


def expected(row: dict[str, Any]) -> tuple[str, int, dict[str, str], tuple[str, ...]]:
    """Class, band, grades and further classes of a row, by hand."""
    band = 0 if row["read"] < 0.25 else 1 if row["read"] < 0.5 else 2
    grades = {"evidence": row["level"], "trust": "low" if row["score"] < 0.5 else "high"}
    return row["kind"], band, grades, tuple(sorted({*row["topics"]} - {row["kind"]}))


def manifests(out: Path) -> dict[str, SourceManifest]:
    listed = [one["path"] for one in json.loads((out / "sources.json").read_text())["sources"]]
    return {path: SourceManifest.from_bytes((out / path / "manifest.json").read_bytes()) for path in listed}


def told(one: SourceManifest) -> str:
    return repr((one.class_path, one.band, dict(one.grades), one.also))


@pytest.mark.long
@settings(max_examples=8, deadline=None)
@given(st.lists(rows, min_size=1, max_size=12), st.sampled_from([0, 4]))
def test_each_row_is_in_a_source_of_its_kind(given: list[dict[str, Any]], pack: int) -> None:
    """Against the file itself; packed rows token by token, and written twice to the same bytes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, given)
        options = [*OPTIONS, *(["--pack", str(pack)] if pack else [])]
        code, said = command(folder, *options)
        assert code == 0, said
        wanted = Counter[tuple[str, str, str]]()
        for row in given:
            parts = [*row["text"].encode(), 256] if pack else [row["text"]]
            wanted.update((repr(expected(row)), str(row["who"]), str(part)) for part in parts)
        found = Counter[tuple[str, str, str]]()
        for path, manifest in manifests(folder / "out").items():
            data = StreamingDataset(folder / "out" / path)
            assert [(dict(one.grades), one.band) for one in data.sources] == [(manifest.grades, manifest.band)]
            for row in data:
                if pack:
                    whos = zip(row["people"], Pack.of_row(row).pieces(), strict=True)
                    pieces = [(who["annotator"], token) for who, (*_, own) in whos for token in own.tolist()]
                else:
                    pieces = [(row["annotator"], row["text"])]
                found.update((told(manifest), str(who), str(part)) for who, part in pieces)
        assert found == wanted
        names = [(one.class_path, one.source, one.source_version) for one in manifests(folder / "out").values()]
        assert len({*names}) == len(names), "each is signed by its name"
        before = {path: path.read_bytes() for path in (folder / "out").rglob("*") if path.is_file()}
        assert command(folder, *options)[0] == 0
        assert before == {path: path.read_bytes() for path in (folder / "out").rglob("*") if path.is_file()}


ROW = {"text": "a", "kind": "open", "topics": [], "who": "ada", "read": 0.3, "level": "trial", "score": 0.3}
BAD: dict[str, tuple[str, str]] = {
    "another grade": (json.dumps(ROW | {"level": "rumour"}), "'rumour' is none of the grades report, trial"),
    "a number for a word": (json.dumps(ROW | {"level": 3}), "field 'level' is 3, not text"),
    "NaN": (json.dumps(ROW).replace('"score": 0.3', '"score": NaN'), "holds NaN"),
    "infinity": (json.dumps(ROW).replace('"score": 0.3', '"score": 1e999'), "beyond float64"),
    "null": (json.dumps(ROW | {"score": None}), "field 'score' is None"),
    "missing": (json.dumps({name: value for name, value in ROW.items() if name != "read"}), "lacks 'read'"),
    "no class": (json.dumps(ROW | {"topics": ["Mail"]}), "'Mail' is no class path"),
    "no list": (json.dumps(ROW | {"topics": {"a": 1}}), "and that's no class"),
    "nobody": (json.dumps(ROW | {"who": ""}), "isn't the id of anybody"),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("pack", [[], ["--pack", "4"]], ids=["rows", "packs"])
def test_a_bad_value_is_named_and_nothing_is_written(tmp_path: Path, what: str, pack: list[str]) -> None:
    line, why = BAD[what]
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(ROW)}\n" * 3 + f"\n{line}\n")
    code, said = command(tmp_path, *OPTIONS, "--size-limit", "4200", *pack)
    assert code == 1
    assert "rows.jsonl, 5: " in said
    assert why in said
    assert not (tmp_path / "out").exists()
    code, said = command(tmp_path, *OPTIONS, "--skip-bad-rows", *pack)
    assert code == 0, said
    assert said.count("rows.jsonl, 5: ") == 1
    assert sum(1 for one in StreamingDataset(tmp_path / "out") for _ in one.get("origins", [0])) == 3


def test_a_broken_write_goes_on_for_each_kind(tmp_path: Path) -> None:
    """The source of one kind was finished, that of another begun, and that of the third not."""
    given = [{"text": str(number), "level": "abc"[number % 3]} for number in range(30)]
    write(tmp_path, given)
    rows = measure(read_jsonl(tmp_path / "rows.jsonl", class_of="open"), grades={"level": of_field("level")})
    options: dict[str, Any] = {"class_of": "open", "source": "s", "size_limit": 4300}

    def stop(number: int) -> None:
        if number == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_dataset(rows, tmp_path / "out", rows.columns, on_row=stop, **options)
    made = write_dataset(rows, tmp_path / "out", rows.columns, **options)
    assert [(one.grades, one.num_rows) for one in made] == [({"level": level}, 10) for level in "abc"]
    assert {one["text"] for one in StreamingDataset(tmp_path / "out")} == {row["text"] for row in given}


def test_the_same_input_measured_otherwise_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, [ROW])
    assert command(tmp_path, *OPTIONS)[0] == 0
    said = command(tmp_path, *OPTIONS, "--grade", "level=x")[1]
    assert "no measure 'level'" in said
    said = command(tmp_path, *OPTIONS, policy=POLICY.replace("[0.5]}", "[0.2]}"))[1]
    assert "trust by" in said
    assert '"thresholds": [0.2]' in said
    replaced = command(tmp_path, *OPTIONS, "--replace")
    assert replaced[0] == 0, replaced


def test_what_holds_for_all_rows_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("text")
    said = ["--class", "open", "--grade", "trust=high", "--grade", "readability=middle", "--also", "mail"]
    code, output = command(tmp_path, *said, file="notes")
    assert code == 0, output
    assert "band 1, trust high, also mail" in output
    (one,) = manifests(tmp_path / "out").values()
    assert (one.band, one.grades, one.also, one.source) == (1, {"trust": "high"}, ("mail",), "out")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--grade-field", "trust=score"], "a field of JSON Lines or Parquet, and these are text. Use --grade"),
        (["--grade", "trust"], "has no name and word. Give --grade evidence=trial, say"),
        (["--grade", "trust=high", "--grade", "trust=low"], "says trust a second time"),
        (["--grade", "trust=higher"], "'higher' is neither a finite number nor one of the grades low, high"),
        (["--grade", "rank=high"], "has no measure 'rank'. It measures evidence, trust, readability"),
        ([], "no --grade names one"),
        (["--grade", "trust=high", "--also", "a", "--also-field", "b"], "Give one of them"),
        (["--grade", "trust=high", "--also", "A b"], "is no class path"),
        (["--by", "annotator=a", "--grade", "trust=low", "--by-field", "annotator=b"], "annotator a second time"),
    ],
)
def test_what_a_command_cant_say_is_refused(tmp_path: Path, options: list[str], why: str) -> None:
    (tmp_path / "a.txt").write_text("text")
    code, said = command(tmp_path, "--class", "open", *options, file="a.txt")
    assert code == 1
    assert why in said
    assert not (tmp_path / "out").exists()


def test_a_field_that_isnt_there_is_named_with_its_option(tmp_path: Path) -> None:
    write(tmp_path, [ROW])
    for pack in ([], ["--pack", "4"]):
        said = command(tmp_path, "--class", "open", "--grade-field", "trust=rank", *pack)[1]
        assert "no field 'rank'" in said
        assert "--grade-field" in said


def test_hugging_face_rows_are_measured_alike(tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "score": [0.1, 0.5, float("nan")]})
    trust = Grading(grades=("low", "high"), thresholds=(0.5,))
    for on_error in ("raise", "record"):
        read = read_hugging_face(table, name="hf", class_of="open", on_error=on_error)
        rows = measure(read, grades={"trust": of_field("score", trust.read)})
        if on_error == "raise":
            with pytest.raises(DataError, match=r"hf, 2: field 'score': nan is neither a finite number"):
                kinds_in(rows)
    made = write_dataset(rows, tmp_path / "out", rows.columns, class_of="open", source="s", inputs={})
    assert [(one.grades["trust"], one.num_rows) for one in made] == [("high", 1), ("low", 1)]


def test_what_isnt_a_measure_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    rows = read_text(tmp_path / "a.txt", class_of="open")
    refused: list[tuple[dict[str, Any], str]] = [
        ({"band": -1}, "band is -1"),
        ({"band": True}, "band is True"),
        ({"grades": {"trust": 0.5}}, "a number wants the thresholds"),
        ({"grades": {"a b": "high"}}, "measure's name is 'a b'"),
        ({"also": ["A"]}, "no class path"),
        ({"also": [3]}, "no class, nor a list"),
    ]
    for said, why in refused:
        with pytest.raises(DataError, match=why):
            measure(rows, **said)
        functions: dict[str, Any] = {
            name: (lambda _, value=value: value) for name, value in said.items() if name != "grades"
        }
        if functions:
            with pytest.raises(DataError, match=rf"a\.txt, 1: .*{why}"):
                kinds_in(measure(rows, **functions))
    with pytest.raises(DataError, match=r"a\.txt, 1: not so"):
        kinds_in(measure(rows, band=lambda _: _raise()))
    with pytest.raises(DataError, match="measured of these rows already"):
        measure(measure(rows, band=1), also=["mail"])
    with pytest.raises(DataError, match="band of all rows is said, and of each row"):
        write_dataset(measure(rows, band=1), tmp_path / "out", rows.columns, class_of="open", source="s", band=2)
    with pytest.raises(DataError, match="lacks 'score'"):
        kinds_in(measure(rows, grades={"trust": of_field("score")}))
    with pytest.raises(DataError, match="packs would be of several kinds"):
        pack_rows(tokenize(measure(rows, band=1), ByteTokenizer()), Packing(4), class_names=["open"])


def _raise() -> int:
    raise ValueError("not so")


def test_too_many_kinds_are_refused(tmp_path: Path) -> None:
    write(tmp_path, [{"text": "a", "id": f"x{number}"} for number in range(MAX_KINDS + 1)])
    rows = measure(read_jsonl(tmp_path / "rows.jsonl", class_of="open"), grades={"id": of_field("id")})
    with pytest.raises(DataError, match=f"more than {MAX_KINDS} kinds"):
        kinds_in(rows)


def test_a_kind_in_words() -> None:
    assert str(SourceKind(1, (("trust", "low"),), ("mail",))) == "band 1, trust low, also mail"
    assert not str(SourceKind())
