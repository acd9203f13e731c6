"""Replay against the run that never had the content, which the tests make by themselves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmati.core.loss import Loss
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.shards.upload import Destination
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import ForgetError, RunError
from cosmati.forget.ablation import Wrap
from cosmati.forget.asked import ToForget
from cosmati.forget.certificate import verify_certificate
from cosmati.forget.past_run import PastRun
from cosmati.ledger.details import decode_details
from cosmati.ledger.verify import verify_ledger
from cosmati.methods import SelectiveBackprop
from cosmati.optim import AdamW
from cosmati.train.config import RunConfig
from cosmati.train.observers import Observer, StepReport
from cosmati.train.trainer import Trainer
from tests.forget.samples import (
    bare,
    differing,
    forgotten,
    maker,
    packed,
    rows_of_step,
    tensors,
    trained,
    unwrapped,
    without,
)
from tests.ledger.plain_answers import check_answers
from tests.train.isolated.samples import source

pytestmark = pytest.mark.long


def test_the_bits_are_those_of_the_run_without_the_rows(tmp_path: Path) -> None:
    """Muon and AdamW, an average, BatchNorm; from a checkpoint, the ledger going on."""
    case = bare("CNN with BatchNorm")
    make = maker(case, data := source(case))
    run = trained(make, tmp_path / "run")
    rows = rows_of_step(data, 3)
    done = forgotten(run, ToForget(rows=rows), make, tmp_path / "out")
    truth = trained(make, tmp_path / "truth", without(rows=rows))
    assert done.told is not None
    assert done.told["replayed_from"]["step"] == 2
    assert not differing(tensors(done.out), tensors(truth))
    assert differing(tensors(run), tensors(truth)), "the control: the rows had taught"
    pinned = (run / "ledger" / "checkpoint").read_text()
    report = verify_ledger(done.out / "ledger", pinned=pinned)
    assert (report.num_steps, report.diverged_steps, report.has_ended) == (6, (), True)
    check_answers(done.out / "ledger")
    assert PastRun(done.out).record.num_steps == 6


@pytest.mark.parametrize(
    "asked", [ToForget(classes=("personal",)), ToForget(rows=frozenset({3, 9}))], ids=["class", "rows"]
)
def test_of_packed_text_documents_are_forgotten(asked: ToForget, tmp_path: Path) -> None:
    """A class's, or single ones, in packs of several classes."""
    make = packed()
    run = trained(make, tmp_path / "run")
    done = forgotten(run, asked, make, tmp_path / "out")
    truth = trained(make, tmp_path / "truth", without(classes=list(asked.classes), rows=asked.rows))
    assert not differing(tensors(done.out), tensors(truth))
    assert differing(tensors(run), tensors(truth))
    assert done.certificate is not None
    assert verify_certificate(done.certificate, done.out / "ledger").entry


class Stops(Observer):
    """Fails after a step, as a process does that's killed there: nothing is said, nothing is saved."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, report: StepReport) -> None:
        if report.clock.step == self._step:
            raise InterruptedError


def test_broken_off_in_the_middle_it_goes_on(tmp_path: Path) -> None:
    case = bare("MLP, low rank")
    data = source(case)
    make, rows = maker(case, data), rows_of_step(data, 2)
    run = trained(make, tmp_path / "run")
    for step in (4, 5):
        with pytest.raises(InterruptedError):
            forgotten(run, ToForget(rows=rows), maker(case, data, observers=[Stops(step)]), tmp_path / "out")
        assert not (tmp_path / "out" / "certificates").exists()
    done = forgotten(run, ToForget(rows=rows), make, tmp_path / "out")
    assert not differing(tensors(done.out), tensors(trained(make, tmp_path / "truth", without(rows=rows))))
    assert done.certificate is not None


def test_a_second_deletion_goes_on_from_the_first(tmp_path: Path) -> None:
    """From a checkpoint of the successor's, and from before it, where nothing is kept."""
    case = bare("MLP, low rank")
    data = source(case)
    make = maker(case, data)
    run = trained(make, tmp_path / "run")
    late, early = rows_of_step(data, 3), rows_of_step(data, 0)
    first = forgotten(run, ToForget(rows=late), make, tmp_path / "one").out
    with pytest.raises(ForgetError, match=r"was succeeded by .*one, which goes on with its ledger"):
        forgotten(run, ToForget(rows=early), make, tmp_path / "two")
    second = forgotten(first, ToForget(rows=early), make, tmp_path / "two")
    truth = trained(make, tmp_path / "truth", without(rows=late | early))
    assert not differing(tensors(second.out), tensors(truth))
    third = forgotten(second.out, ToForget(classes=("personal",)), make, tmp_path / "three")
    truth = trained(make, tmp_path / "truth 3", without(rows=late | early, classes=["personal"]))
    assert not differing(tensors(third.out), tensors(truth))
    assert PastRun(third.out).gone.rows == late | early


def test_rows_that_were_scored_and_not_chosen_are_in_contact_too(tmp_path: Path) -> None:
    """Their losses said which others were kept."""
    case = bare("MLP, low rank")
    data = source(case)
    make = maker(case, data, methods=[SelectiveBackprop(start=0.0, end=1.0, keep=0.5, interrupt=0)])
    run = trained(make, tmp_path / "run")
    (details,) = [decode_details(i.details or b"") for i, e, _ in PastRun(run).ledger.steps() if e.step == 3]
    kept: Any = details["kept_rows"]
    batch = data.order(seed=0, num_microbatches=4, route_pure=True).microbatch(3, 1)
    (row, *_) = [row for slot, row in enumerate(batch.lineage.row_ids.tolist()) if slot not in kept["1"]]
    done = forgotten(run, ToForget(rows=frozenset({row})), make, tmp_path / "out")
    truth = trained(make, tmp_path / "truth", without(rows={row}))
    assert done.told is not None
    assert done.told["replayed_from"]["first_contact"] == 3
    assert not differing(tensors(done.out), tensors(truth))


def test_a_run_that_was_broken_off_and_taken_up_again(tmp_path: Path) -> None:
    """Steps were taken twice, checkpoints in between; the last words of the first process were never signed."""
    case = bare("MLP, low rank")
    data = source(case)
    make = maker(case, data)
    with pytest.raises(InterruptedError):
        maker(case, data, observers=[Stops(5)])(unwrapped, tmp_path / "run").fit()
    make(unwrapped, tmp_path / "run").fit()
    rows = rows_of_step(data, 4)
    (tmp_path / ".out.draft").mkdir()
    (tmp_path / ".out.draft" / "left").write_text("by a kill")
    done = forgotten(tmp_path / "run", ToForget(rows=rows), make, tmp_path / "out")
    assert not differing(tensors(done.out), tensors(trained(make, tmp_path / "truth", without(rows=rows))))
    assert not (done.out / "left").exists()
    lines = [json.loads(line) for line in (done.out / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines}), "each once"


def test_a_run_that_was_succeeded_is_trained_no_more(tmp_path: Path) -> None:
    case = bare("MLP, low rank")
    data = source(case)
    make = maker(case, data)
    run = trained(make, tmp_path / "run")
    done = forgotten(run, ToForget(rows=rows_of_step(data, 4)), make, tmp_path / "out")
    with pytest.raises(RunError, match=r"was succeeded by .*out, which had to forget something. Go on there"):
        make(unwrapped, run).fit()
    shutil.rmtree(done.out)
    with pytest.raises(ForgetError, match=r"It isn't there: if it was deleted before anybody had its ledger, delete"):
        forgotten(run, ToForget(rows=frozenset({1})), make, tmp_path / "other")


def test_data_that_are_streamed(tmp_path: Path) -> None:
    """Rows of shards, read by other processes and ahead; what isn't in the data was never there."""
    rows = [{"number": number} for number in range(48)]
    write_dataset(
        rows, Destination(str(tmp_path / "data")), {"number": "int"}, class_of=lambda _row: "open", source="one"
    )

    def make(wrap: Wrap, folder: Path) -> Trainer:
        torch.manual_seed(0)
        data = StreamingSource(StreamingDataset(tmp_path / "data", columns=("number",)), 8)
        config = RunConfig(
            budget="2ep", num_microbatches=4, num_threads=1, ledger=True, run_folder=folder, checkpoint_every="1ba",
            num_checkpoints=20,
        )  # fmt: skip
        return Trainer(torch.nn.Linear(1, 1), squares, wrap(data), optimizers=[AdamW(lr=0.01)], config=config)

    run = trained(make, tmp_path / "run")
    done = forgotten(run, ToForget(rows=frozenset({5, 6, 47, 1000})), make, tmp_path / "out")
    truth = trained(make, tmp_path / "truth", without(rows=[5, 6, 47]))
    assert done.told is not None
    assert done.told["asked"]["num_rows"] == 3
    assert not differing(tensors(done.out), tensors(truth))
    assert differing(tensors(run), tensors(truth))
    nobody = ToForget(rows=frozenset({1000}))
    with pytest.raises(ForgetError, match="replay isn't possible: no step had any of it"):
        forgotten(done.out, nobody, make, tmp_path / "none")


def squares(model: torch.nn.Module, rows: torch.Tensor) -> Loss:
    values = (model(rows.float()[:, None] / 48) - 1).square().mean(1)
    return Loss(values.sum(), torch.tensor(float(len(values))), per_row=values)
