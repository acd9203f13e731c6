"""Replay against the run that never had the content, which the tests make by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmati.errors import ForgetError
from cosmati.forget.asked import ToForget
from cosmati.forget.certificate import verify_certificate
from cosmati.forget.past_run import PastRun
from cosmati.ledger.verify import verify_ledger
from cosmati.train.observers import Observer, StepReport
from tests.forget.samples import bare, differing, forgotten, maker, packed, rows_of_step, tensors, trained, without
from tests.train.isolated.samples import source


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
