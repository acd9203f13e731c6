"""What ranks tell one another of a failure, and which error each of them raises."""

from __future__ import annotations

from typing import Any

import pytest

from cosmati.errors import OutOfMemoryError, PlanError
from cosmati.train import failures
from cosmati.train.failures import ALONE, FAILED, SHORT, Failure
from cosmati.train.leaf_facts import NO_LEAF

RANKS: Any = None


@pytest.mark.parametrize(
    ("error", "told"),
    [(None, None), (OutOfMemoryError("short"), SHORT), (ValueError("x"), FAILED), (PlanError("x"), FAILED)],
)
def test_what_a_rank_has_failed_at_is_told(error: Exception | None, told: float | None) -> None:
    own: Any = "of a leaf"
    found = Failure(error).facts(own)
    assert found == (own if told is None else NO_LEAF._replace(failure=told))
    assert len({SHORT, ALONE, FAILED, NO_LEAF.failure}) == 4


def test_the_worst_that_any_rank_tells_is_raised_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[object] = []

    def together(_ranks: object, error: object) -> None:
        raised.append(error)
        raise ZeroDivisionError

    monkeypatch.setattr(failures, "raise_together", together)
    own = ValueError("own")
    Failure(None).refuse(RANKS, [0.0, 0.0])
    for error, expected in ((own, own), (None, None), (OutOfMemoryError("short"), None)):
        with pytest.raises(ZeroDivisionError):
            Failure(error).refuse(RANKS, [SHORT, FAILED, ALONE])
        assert raised.pop() is expected
    with pytest.raises(PlanError):
        Failure(None).refuse(RANKS, [SHORT, ALONE, 0.0])
    with pytest.raises(OutOfMemoryError, match="on another rank"):
        Failure(None).refuse(RANKS, [SHORT, 0.0])
    with pytest.raises(OutOfMemoryError, match="only so much"):
        Failure(OutOfMemoryError("only so much")).refuse(RANKS, [SHORT, 0.0])
    assert not raised


@pytest.mark.parametrize(
    ("own", "inside", "expected"),
    [
        (None, KeyError("i"), KeyError),
        (ValueError("own"), None, None),
        (ValueError("own"), KeyError("i"), ValueError),  # the others can't be told: that's raised
        (ValueError("own"), PlanError("i"), PlanError),  # they were
        (ValueError("own"), KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_it_is_raised_where_telling_it_has_failed(own: Exception | None, inside: Any, expected: Any) -> None:
    failure = Failure(own)

    def work() -> None:
        with failure:
            if inside is not None:
                raise inside

    if expected is None:
        work()
    else:
        with pytest.raises(expected) as caught:
            work()
        if expected is ValueError:
            assert caught.value.__cause__ is inside
    assert failure.error is None, "its frames would hold what didn't fit"
