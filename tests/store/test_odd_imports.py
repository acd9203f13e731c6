"""Exports of other tools that are easily taken for something else, or lose what they say on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cosmati.errors import RunError
from cosmati.store.importing import import_runs
from cosmati.store.parquet import write_parquet
from tests.store.event_files import double, event, first, part, record, simple, whole
from tests.store.samples import indexed
from tests.store.test_importing import imported, mlflow_store

CLOCKS = ("step", "seconds", "rows", "tokens")


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def values_of(lines: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(line["step"], line[name]) for line in lines if name in line]


def mlflow_run(folder: Path, metrics: dict[str, str]) -> Path:
    write(folder / "meta.yaml", "run_id: abc\nrun_name: named\nstart_time: 1000\nend_time: 9000\nstatus: 3\n")
    for name, text in metrics.items():
        write(folder / "metrics" / name, text)
    return folder


def test_measures_called_as_the_clock_is_are_measures(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    events = [event(100.0 + n, 10 * n, *(simple(name, n / 4) for name in ("loss", *CLOCKS))) for n in (1, 2)]
    (logs / "events.out.tfevents.1").write_bytes(first(1.0) + b"".join(events))
    mlflow_run(tmp_path / "ml" / "abc", dict.fromkeys(("loss", *CLOCKS), "1 0.25 10\n2 0.5 20\n"))
    rows = [{"_step": 10 * n, "_runtime": float(n), "loss": n / 4} | dict.fromkeys(CLOCKS[1:], n / 4) for n in (1, 2)]
    write(tmp_path / "w.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    header = ['"Step"', *(f'"r - {name}"' for name in ("loss", *CLOCKS))]
    write(tmp_path / "chart.csv", ",".join(header) + "\n10,.25,.25,.25,.25,.25\n20,.5,.5,.5,.5,.5\n")
    sources = {"logs": CLOCKS, "ml": CLOCKS, "w.jsonl": CLOCKS[1:], "chart.csv": CLOCKS}
    for name, clocks in sources.items():
        ((told, lines),) = imported(tmp_path / name, tmp_path / f"store of {name}").values()
        for clock in ("loss", *(f"{clock} (logged)" for clock in clocks)):
            assert values_of(lines, clock) == [(10, 0.25), (20, 0.5)], (name, clock)
            assert told.metrics[clock] == 0.5
        assert not {"rows", "tokens"} & {key for line in lines for key in line}
        assert told.num_steps == 20
    ((_, lines),) = imported(tmp_path / "w.jsonl", tmp_path / "store of w.jsonl").values()
    assert values_of(lines, "seconds") == [(10, 1.0), (20, 2.0)]
    table = write(tmp_path / "runs.csv", "run_id,status,metrics.seconds\naa,FINISHED,0.5\n")
    ((told, _),) = imported(table, tmp_path / "store of a table").values()
    assert told.metrics == {"seconds (logged)": 0.5}


@pytest.mark.parametrize("inside", ["data.parquet", "logs/events.out.tfevents.1", "wandb-summary.json"])
def test_what_mlflow_kept_is_mlflows_whatever_lies_in_it(tmp_path: Path, inside: str) -> None:
    source = mlflow_store(tmp_path)
    artifact = source / "123" / f"{0:032x}" / "artifacts" / inside
    artifact.parent.mkdir(exist_ok=True)
    if inside.endswith("parquet"):
        write_parquet(artifact, [{"step": 1, "price": 99.0}], {"step": "BIGINT", "price": "DOUBLE"})
    elif inside.endswith("json"):
        artifact.write_text('{"_step": 3, "acc": 1}')
    else:
        artifact.write_bytes(first(1.0) + event(2.0, 1, simple("epoch_loss", 2.0)))
    assert set(imported(source, tmp_path / "store")) == {"wistful-ant-0", "wistful-ant-1"}
    _, notes = import_runs(source, tmp_path / "store")
    other = "tensorboard" if "tfevents" in inside else "wandb"
    assert any(f"--format {other}" in note for note in notes)


def session(time: float, step: int) -> bytes:
    """As a writer with a `purge_step` begins: SessionLog, START."""
    return record(double(1, time) + whole(2, step) + part(7, whole(1, 1)))


def test_a_restart_of_tensorboard_takes_the_place_of_what_came_after_its_step(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    before = [event(100.0 + n, 10 * n, simple("loss", 1.0), simple("rare", 3.0)) for n in range(11)]
    after = [event(200.0 + n, 50 + 10 * n, simple("loss", 9.0)) for n in range(3)]
    (logs / "events.out.tfevents.100.a").write_bytes(first(100.0) + b"".join(before))
    (logs / "events.out.tfevents.200.a").write_bytes(first(200.0) + session(200.0, 50) + b"".join(after))
    ((told, lines),) = imported(logs, tmp_path / "store").values()
    assert values_of(lines, "loss") == [*((n, 1.0) for n in range(0, 50, 10)), (50, 9.0), (60, 9.0), (70, 9.0)]
    assert [step for step, _ in values_of(lines, "rare")] == [0, 10, 20, 30, 40]
    assert told.num_steps == 70


def test_bare_words_for_what_is_not_finite_are_read(tmp_path: Path) -> None:
    rows = [{"_step": n, "loss": float("nan") if n == 2 else 1.0, "acc": n / 10} for n in range(4)]
    lines = [json.dumps(row) for row in rows]
    assert "NaN" in lines[2]
    path = write(tmp_path / "h.jsonl", "\n".join([lines[0], "{damaged", *lines[1:], '{"_step": 9, "lo']))
    ((_, found),) = imported(path, tmp_path / "store").values()
    assert values_of(found, "acc") == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3)]
    assert values_of(found, "loss") == [(0, 1.0), (1, 1.0), (2, None), (3, 1.0)]
    _, notes = import_runs(path, tmp_path / "store")
    assert len(notes) == 1
    assert "1 line of" in notes[0]


def test_what_is_not_taken_of_a_table_is_counted_and_named(tmp_path: Path) -> None:
    path = write(tmp_path / "eu.csv", "step;loss;rate;note\n1;2,5;0.1;warm\n2;1,5;0.2;\n0.5;1;0.3;\n;1;;\n")
    ((_, lines),) = imported(path, tmp_path / "store").values()
    assert lines == [{"step": 1, "rate": 0.1}, {"step": 2, "rate": 0.2}]
    _, notes = import_runs(path, tmp_path / "store")
    said = " ".join(notes)
    assert "2 values of loss, the first '2,5'" in said
    assert "1 value of note, the first 'warm'" in said
    assert "2 rows" in said
    assert "whole" in said
    path = write(tmp_path / "fractions.csv", "step,loss\n0.25,4\n0.5,3\n0.75,2\n")
    with pytest.raises(RunError, match=r"3 rows .*'0.25'"):
        import_runs(path, tmp_path / "store")


def test_a_download_of_tensorboard_has_its_value_as_quality(tmp_path: Path) -> None:
    path = write(tmp_path / "run_val.csv", "Wall time,Step,Value\n1700000000.1,0,2.5\n1700000060.2,10,1.5\n")
    ((told, lines),) = imported(path, tmp_path / "store").values()
    assert told.metrics == {"Value": 1.5}
    assert lines == [{"step": 0, "Value": 2.5}, {"step": 10, "Value": 1.5}]


def test_a_saved_table_leaves_a_local_run_of_wandb_its_summary(tmp_path: Path) -> None:
    files = tmp_path / "wandb" / "run-1-abc" / "files"
    summary = {"_step": 9, "acc": 0.9, "_runtime": 12.5, "_timestamp": 2000.0}
    write(files / "wandb-summary.json", json.dumps(summary))
    write(files / "predictions.csv", "id,label\n1,2\n")
    ((told, lines),) = imported(tmp_path / "wandb", tmp_path / "store").values()
    assert lines == [{"step": 9, "acc": 0.9, "seconds": 12.5}]
    # 2000 s after 1970 began is 33 min 20 s; 12.5 s before that is 33 min 7.5 s.
    assert (told.started, told.ended) == ("1970-01-01T00:33:07+00:00", "1970-01-01T00:33:20+00:00")


@pytest.mark.parametrize("step", ["nan", "inf", "-inf", "1e400", "9" * 400])
def test_a_line_of_mlflow_whose_step_is_none_is_named(tmp_path: Path, step: str) -> None:
    mlflow_run(tmp_path / "run", {"loss": f"1 0.5 {step}\n2 0.25 7\n"})
    ((_, lines),) = imported(tmp_path / "run", tmp_path / "store").values()
    assert lines == [{"step": 7, "loss": 0.25}]
    _, notes = import_runs(tmp_path / "run", tmp_path / "store")
    assert len(notes) == 1


def test_a_source_is_the_same_one_by_whatever_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tmp_path / "work" / "wandb" / "run-1-abc" / "files"
    write(files / "wandb-summary.json", '{"_step": 9, "acc": 0.9}')
    write(tmp_path / "work" / "m.csv", "step,loss\n1,2\n")
    (tmp_path / "link").symlink_to(tmp_path / "work")
    (tmp_path / "work" / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "work" / "deep")
    for top in (Path(".."), tmp_path / "work", tmp_path / "link", Path("../../link/deep/..")):
        assert import_runs(top / "wandb", tmp_path / "store")[0] == 1
        assert import_runs(top / "m.csv", tmp_path / "store")[0] == 1
    monkeypatch.chdir(files)
    assert import_runs(Path(), tmp_path / "store", "wandb")[0] == 1
    names = sorted(one.name for one in indexed(tmp_path / "store").runs())
    assert names == ["m", "run-1-abc", "run-1-abc"]
