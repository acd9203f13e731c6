"""Code of the user's own that waits for other ranks, where they would run it unlike many times: none waits for ever."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed._functional_collectives as functional

from cosmati.core.meetings import MetAloneError, meeting_nobody
from cosmati.train.gradients import StepPasses
from tests.processes import launch_ranks
from tests.train.packs.samples import documents, first_step, model, policy, source, trainer

pytestmark = pytest.mark.long

WORKER = Path(__file__).with_name("collectives_worker.py")
DONE = "done, and promises neither"
OFFERED = "refused: Model, loss or a hook call collectives"
CASES = {
    "looks, named": (DONE, DONE),
    "a search": ("step 0 refused: .* unlike many times", "step 0 the other rank has ended"),
    "a module apart": ("step 1 refused: body calls .* unlike many times", "step 1 the other rank has ended"),
    "both offered": (DONE, DONE),
    "one rejected, named": (f"step 0 {OFFERED}", f"step 0 {OFFERED}"),
    "one rejected later": (f"step 1 {OFFERED}", f"step 1 {OFFERED}"),
}


REJECTED = {
    "one rejected, unnamed": 0,
    "one rejected, an operator": 0,
    "one rejected, quietly": 0,
    "one rejected, backward": 0,
    "one rejected, scored": 0,
    "one rejected, from the second step on": 1,
}
"""At which step each is refused, on both ranks: none has met before, so that nobody knows that it would."""


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_that_meet_end_alike_or_are_refused(case: str) -> None:
    for said, expected in zip(launch_ranks([WORKER, case], 2, timeout=60), CASES[case], strict=True):
        assert re.match(expected, said), said


def test_a_rank_that_has_nothing_to_run_is_waited_for_by_nobody() -> None:
    """Also in the first step of all: what the other rank runs is stopped before it waits."""
    cases = [*REJECTED, "looks, unnamed", "one rejected, nobody meets"]
    expected = [f"step {step} {OFFERED}" for step in REJECTED.values()]
    for said in launch_ranks([WORKER, *cases], 2, timeout=60):
        lines = said.splitlines()
        assert [line[: len(told)] for line, told in zip(lines, expected, strict=False)] == expected
        assert lines[len(expected) :] == [DONE, "done, and promises elastic, no_direct_write"]


def test_torch_is_as_before_once_nobody_is_kept_from_meeting() -> None:
    functions = torch.distributed.ProcessGroup, torch.ops._c10d_functional
    before = [dict(vars(one)) for one in functions]
    with pytest.raises(MetAloneError, match="all_reduce"), meeting_nobody():
        functional.all_reduce(torch.ones(1), "sum", "nobody")
    assert [dict(vars(one)) for one in functions] == before


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
