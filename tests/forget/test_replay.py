"""Replay against the run that never had the content, which the tests make by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmati.forget.asked import Asked
from cosmati.forget.past_run import PastRun
from cosmati.ledger.verify import verify_ledger
from tests.forget.samples import bare, differing, forgotten, maker, rows_of_step, source, tensors, trained, without


def test_the_bits_are_those_of_the_run_without_the_rows(tmp_path: Path) -> None:
    """Muon and AdamW, an average, BatchNorm; from a checkpoint, the ledger going on."""
    case = bare("CNN with BatchNorm")
    make = maker(case, data := source(case))
    run = trained(make, tmp_path / "run")
    rows = rows_of_step(data, 3)
    done = forgotten(run, Asked(rows=rows), make, tmp_path / "out")
    truth = trained(make, tmp_path / "truth", without(rows=rows))
    assert done.told is not None
    assert done.told["replayed_from"]["step"] == 2
    assert not differing(tensors(done.out), tensors(truth))
    assert differing(tensors(run), tensors(truth)), "the control: the rows had taught"
    pinned = (run / "ledger" / "checkpoint").read_text()
    report = verify_ledger(done.out / "ledger", pinned=pinned)
    assert (report.num_steps, report.diverged_steps, report.has_ended) == (6, (), True)
    assert PastRun(done.out).record.num_steps == 6
