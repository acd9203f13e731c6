"""Code of the user's own that waits for other ranks, where they would run it unlike many times: none waits for ever."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from cosmati.train.gradients import StepPasses
from tests.processes import launch_ranks
from tests.train.packs.samples import documents, first_step, model, policy, source, trainer

WORKER = Path(__file__).with_name("collectives_worker.py")
DONE = "done, and promises neither"
OFFERED = "refused: Model, loss or a hook call collectives"
CASES = {
    "looks, named": (DONE, DONE),
    "looks, unnamed": (DONE, DONE),
    "a search": ("step 0 refused: .* unlike many times", "step 0 the other rank has ended"),
    "a module apart": ("step 1 refused: body calls .* unlike many times", "step 1 the other rank has ended"),
    "both offered": (DONE, DONE),
    "one rejected, named": (f"step 0 {OFFERED}", f"step 0 {OFFERED}"),
    "one rejected later": (f"step 1 {OFFERED}", f"step 1 {OFFERED}"),
}


QUICK = ("looks, unnamed",)


@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_two_ranks_that_meet_end_alike_or_are_refused(case: str) -> None:
    for said, expected in zip(launch_ranks([WORKER, case], 2, timeout=60), CASES[case], strict=True):
        assert re.match(expected, said), said


def test_a_look_leaves_draws_as_the_last_microbatch_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop of one's own may draw between steps, and steps that are looked at are others after a resume."""
    drawn = []
    for looks in (True, False):
        if not looks:
            monkeypatch.setattr(StepPasses, "_look", lambda *_: None)
        made = trainer(model(dropout=0.1), None, policy())
        with made:
            made.step_microbatches(first_step(source(documents())), [None, None])
            drawn.append(torch.rand(3))
    assert torch.equal(*drawn)
