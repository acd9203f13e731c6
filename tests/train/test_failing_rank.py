"""A rank that fails at its own microbatch tells the others: none waits for it, and all may go on."""

from __future__ import annotations

import json

import pytest

from tests.processes import launch_ranks
from tests.train import failing_ranks

pytestmark = pytest.mark.long

AT = failing_ranks.FAILS_AT
OTHER = f"{AT} RunError: Rank {{}} couldn't go on, and so the others don't. {{}}"
NEGATIVE = "BatchError: "
EXPECTED = {
    "an exception": (OTHER.format(1, "KeyError: 'words'"), f"{AT} KeyError: 'words'"),
    "of the first": (f"{AT} KeyError: 'words'", OTHER.format(0, "KeyError: 'words'")),
    "a negative weight": (OTHER.format(1, NEGATIVE), f"{AT} {NEGATIVE}"),
    "on the way back": (OTHER.format(1, "ArithmeticError: on the way back"), f"{AT} ArithmeticError: on the way back"),
    "of no words": (OTHER.format(1, "WordlessError: "), f"{AT} WordlessError: "),
    "both": (f"{AT} {NEGATIVE}", f"{AT} KeyError: 'words'"),
    "while another is short of memory": (OTHER.format(1, "KeyError: 'words'"), f"{AT} KeyError: 'words'"),
    "a method": (OTHER.format(1, "ValueError: no such row"), f"{AT} ValueError: no such row"),
}


@pytest.mark.timeout(300)
def test_a_rank_that_fails_is_named_on_all_and_all_may_go_on() -> None:
    found = [json.loads(said) for said in launch_ranks([failing_ranks.__file__, *failing_ranks.CASES], 2)]
    for case, expected in EXPECTED.items():
        for sharding in ("replicated", "optimizer"):
            name = f"{case}, {sharding}"
            for own, told in zip(found, expected, strict=True):
                assert len(own[name]["told"]) == 1, (name, own[name]["told"])
                assert own[name]["told"][0].startswith(told), name
                assert own[name]["weights"] == found[0]["nothing, replicated"]["weights"], name
                assert own[name]["elastic"], name
    for own, first, steps in zip(found, ("0 RunError: Rank 1", "0 KeyError"), ("6", "55"), strict=True):
        (looked,) = own["look"]["told"]
        assert looked.startswith(first)
        assert own["look"]["weights"] == found[0]["no look"]["weights"]
        late = own[failing_ranks.TOO_LATE]["told"]  # Once the others have committed, at the next step.
        assert "".join(one[0] for one in late) == steps
        assert "RunError: Ranks are at steps 5 and 6" in late[-1]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", failing_ranks.APART)
def test_a_rank_that_fails_amid_a_pass_of_all_raises_that_and_all_end(case: str) -> None:
    """At once, but where code of one's own meets that nobody has seen: then after the group's timeout."""
    other, own = (json.loads(said) for said in launch_ranks([failing_ranks.__file__, case], 2))
    expected = "ArithmeticError: on the way back" if case == "full" else "KeyError: 'words'"
    late = " after RuntimeError" if case == "ranks that meet unseen" else ""
    assert own == [f"{AT} {expected}{late}"]
    assert len(other) == 1
    assert other[0].startswith(f"{AT} ")
