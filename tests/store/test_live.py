"""The lines of running jobs as they come, and curves thinned, against the same in Python."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from statistics import fmean

import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.store.compact import compact, is_current
from cosmati.store.live import curve, lines_after
from cosmati.store.parquet import read_parquet
from tests.store.samples import HOSTILE, run_record, write_run

NAMES = st.sampled_from(("loss", 'a"b', "a/b~c", "ü", "Loss"))


@pytest.mark.long
@given(st.lists(st.dictionaries(NAMES, st.one_of(st.floats(-9, 9), st.none(), st.text())), max_size=9), st.data())
def test_whatever_is_written_between_looks_each_line_comes_once(
    tmp_path_factory: pytest.TempPathFactory, lines: list[dict[str, object]], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("run") / "steps.jsonl"
    whole = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
    found: list[dict[str, object]] = []
    offset = written = 0
    while written < len(whole):
        piece = data.draw(st.integers(1, len(whole) - written))
        with path.open("ab") as file:
            file.write(whole[written : written + piece])
        written += piece
        came, offset = lines_after(path, offset)
        assert came == lines[len(found) : len(found) + len(came)]
        found += came
    assert found == lines
    assert offset == len(whole)
    assert lines_after(path, offset) == ([], offset)


def test_a_long_file_comes_in_pieces_and_a_line_without_end_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    lines = [{"step": n} for n in range(100)]
    texts = [json.dumps(line) + "\n" for line in lines]
    texts[50] = json.dumps({"step": 50, "x": "y" * 1000}) + "\n"
    path.write_text("".join(texts))
    found, offset, looks = [], 0, 0
    while offset < path.stat().st_size:
        came, offset = lines_after(path, offset, max_bytes=200)
        found += came
        looks += 1
    assert found == lines[:50] + lines[51:]
    assert looks > 5


def test_a_file_that_was_cut_by_a_resume_is_read_from_the_start(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 30}\n')
    _, offset = lines_after(path)
    path.write_text('{"step": 1}\n')
    assert lines_after(path, offset) == ([{"step": 1}], 12)
    path.write_text('{"step": 1, "x": 5000}\n{"step": 2, "x": 5000}\n')
    came, _ = lines_after(path, offset)
    assert [one["step"] for one in came] == [1, 2]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\n", b"[1]\n3\nnull\n{\n"])
def test_what_is_no_line_is_left_out(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(content)
    assert lines_after(path)[0] == []
    assert lines_after(tmp_path / "none") == ([], 0)
    os.mkfifo(tmp_path / "pipe")
    assert lines_after(tmp_path / "pipe") == ([], 0)
    assert curve(path, ["loss"])["loss"].num_points == 0


def written(path: Path, values: list[object], name: str = "loss") -> list[tuple[int, float]]:
    path.write_text("".join(json.dumps({"step": n, name: value}) + "\n" for n, value in enumerate(values)))
    return [(n, v) for n, v in enumerate(values) if isinstance(v, float) and math.isfinite(v)]


@pytest.mark.parametrize("num", [0, 1, 2, 9, 10, 11, 57, 1000])
@pytest.mark.parametrize("thinning", ["extremes", "mean"])
def test_a_curve_has_its_ends_and_its_extremes_or_means(tmp_path: Path, num: int, thinning: str) -> None:
    path = tmp_path / "it's [a]*.jsonl"
    values: list[object] = [math.sin(n) * n if n % 7 else None for n in range(num)]
    points = written(path, values)
    with path.open("a") as file:
        file.write('junk\n{"step": 5000, "loss": 1')
    found = curve(path, ["loss", "absent"], 10, thinning=thinning)["loss"]  # type: ignore[arg-type]
    thinned = list(zip(found.steps, found.values, strict=True))
    assert found.num_points == len(points)
    assert len(thinned) == min(len(points), 10) if thinning == "mean" else len(thinned) <= 10
    assert [step for step, _ in thinned] == sorted(step for step, _ in thinned)
    if len(points) <= 10:
        assert thinned == points
    else:
        assert (thinned[0], thinned[-1]) == (points[0], points[-1])
        if thinning == "extremes":
            assert set(thinned) <= set(points)
            assert {max(v for _, v in points), min(v for _, v in points)} <= set(found.values)
        else:
            inner = points[1:-1]
            buckets: dict[int, list[float]] = {}
            for place, (_, value) in enumerate(inner):
                buckets.setdefault(place * 8 // len(inner), []).append(value)
            assert list(found.values[1:-1]) == pytest.approx([fmean(one) for one in buckets.values()])


@pytest.mark.parametrize("name", HOSTILE)
def test_a_measure_may_be_called_anything(tmp_path: Path, name: str) -> None:
    points = written(tmp_path / "steps.jsonl", [0.5, 1.5, 2.5], name)
    found = curve(tmp_path / "steps.jsonl", [name])[name]
    assert list(zip(found.steps, found.values, strict=True)) == points


@pytest.mark.long
def test_a_copy_says_what_the_lines_say_and_counts_while_they_stay(tmp_path: Path) -> None:
    steps = [{"step": n, "rows": 32 * n, "loss": 1 / (n + 1), "learning_rate": None, "at": 0.1 * n} for n in range(300)]
    evaluations = [{"step": 10, "accuracy": 0.5}, {"step": 20, "accuracy": 1, "note": "it's"}]
    folder = tmp_path / "a'b"
    write_run(folder, run_record(), steps, evaluations)
    found = list(compact(tmp_path))
    assert [(one.path.name, one.refused) for one in found] == [("steps.jsonl", ""), ("evaluations.jsonl", "")]
    table = pyarrow.parquet.read_table(folder / "steps.parquet").to_pylist()
    assert table == steps
    assert [
        {k: v for k, v in row.items() if v is not None} for row in read_parquet(folder / "evaluations.parquet")
    ] == (evaluations)
    assert list(compact(tmp_path)) == []  # all are up to date
    path = folder / "steps.jsonl"
    by_lines = curve(path, ["loss", "at", "none"], 20)
    path.rename(tmp_path / "away")
    assert curve(path, ["loss", "at", "none"], 20) == by_lines
    (tmp_path / "away").rename(path)
    with path.open("a") as file:
        file.write('{"step": 300, "loss": 9.0}\n')
    assert not is_current(folder / "steps.parquet", path)
    assert curve(path, ["loss"])["loss"].values[-1] == 9.0
    (folder / "evaluations.parquet").write_bytes(b"PAR1junk")
    assert curve(folder / "evaluations.jsonl", ["accuracy"])["accuracy"].values == (0.5, 1.0)
    assert len(list(compact(tmp_path))) == 2


@pytest.mark.parametrize(
    "line",
    [{"step": 2**70}, {"x": [1]}, {"loss": 1, "Loss": 2}, {"big": 2**62 + 1, "step": 0.5}, {"x": True, "step": "a"}],
)
def test_lines_that_a_copy_cannot_say_exactly_stay_alone(tmp_path: Path, line: dict[str, object]) -> None:
    write_run(tmp_path / "a", run_record(), [{"step": 1, "big": 0.5, "x": 1}, line])
    found = list(compact(tmp_path))
    assert [bool(one.refused) for one in found] == [True]
    assert not (tmp_path / "a" / "steps.parquet").exists()
    assert len(lines_after(tmp_path / "a" / "steps.jsonl")[0]) == 2


def test_a_running_job_and_a_torn_file_are_not_copied(tmp_path: Path) -> None:
    write_run(tmp_path / "running", run_record(outcome="running"), [{"step": 1}])
    write_run(tmp_path / "torn", run_record(), [{"step": 1}])
    with (tmp_path / "torn" / "steps.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    assert [(one.path.parent.name, bool(one.refused)) for one in compact(tmp_path)] == [("torn", True)]
