"""A rank that would save what isn't finite refuses it on all ranks: none waits for it, and all may go on."""

from __future__ import annotations

import json

import pytest

from tests.processes import launch_ranks
from tests.train import spoilt_on_one_rank
from tests.train.spoilt_on_one_rank import CASES

OTHER = "DivergenceError: a value on another rank is not finite: not saved."
OWN = {
    "a buffer of the first": "DivergenceError: mask is not finite: not saved.",
    "a buffer of the second": "DivergenceError: mask is not finite: not saved.",
    "an option of the second": "DivergenceError: optimizer 0 groups 0 own is not finite: not saved.",
}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_what_is_not_finite_on_one_rank_is_saved_by_none_and_all_go_on() -> None:
    ranks = [json.loads(said) for said in launch_ranks([spoilt_on_one_rank.__file__], 2)]
    for rank, own in enumerate(ranks):
        for name, found in own.items():
            case, _, sharding = name.partition(", ")
            spoilt = CASES[case][1]
            expected = OWN[case] if rank == spoilt else OTHER
            if sharding == "optimizer" and "buffer" in case and spoilt == 1:
                expected = ""  # The first rank's buffers are saved.
            assert found["told"][: len(expected) or None] == expected, (rank, name, found["told"])
            steps = ["step-00000000", "step-00000001", "step-00000002"]
            assert found["steps"] == (steps[1:] if not expected else [steps[0], steps[2]]), (rank, name)
        assert len(own) == 2 * len(CASES)
