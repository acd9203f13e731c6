"""How the steps of a span end, and what is told of it, by a replay that goes on and one that stops at a difference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cosmati.errors import CheckpointError, DivergenceError, LedgerError
from cosmati.train.config import CHANGEABLE, LEARNING_CADENCES
from cosmati.train.observers.replayed import LedgerComparison
from cosmati.train.replay_span import SpanAgain, _settings


def comparison(*, done: int, keep_going: bool) -> LedgerComparison:
    run: Any = SimpleNamespace(steps=lambda first, end: iter(range(first, end)), ledger=SimpleNamespace(details={}))
    found = LedgerComparison(run, range(8), None, keep_going=keep_going)
    found.done = done
    return found


def span_of(comparison: LedgerComparison, ends: str | Exception) -> SpanAgain:
    """A span whose trainer ends in some way, after step 3."""

    def fit() -> Any:
        if isinstance(ends, Exception):
            raise ends
        return SimpleNamespace(outcome=ends, clock=clock)

    clock = SimpleNamespace(step=3)
    made: Any = object.__new__(SpanAgain)
    made._comparison, made._trainer = comparison, SimpleNamespace(fit=fit, clock=clock)
    made._span = SimpleNamespace(forgotten="")
    taken: SpanAgain = made
    return taken


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("keep_going", [False, True])
@pytest.mark.parametrize(
    ("ends", "done", "what"),
    [
        (DivergenceError("nan"), 3, (3, "loss and gradients")),
        (CheckpointError("another run"), 3, (None, "recipe or code")),
        ("completed", 3, (3, "length of the run")),
        ("stopped", 5, None),
        ("completed", 6, None),
    ],
)
def test_what_ends_the_steps_too_soon_is_a_difference_after_which_none_are_taken(
    ends: str | Exception, done: int, what: tuple[int | None, str] | None, keep_going: bool
) -> None:
    found = comparison(done=done, keep_going=keep_going)
    assert span_of(found, ends).take(5) is False
    assert found.span_end == 5
    assert [(one.step, one.what) for one in found.differences] == ([] if what is None else [what])
    assert found.is_over == (what is not None)


def test_who_interrupts_is_believed_unless_the_replay_was_over() -> None:
    assert span_of(comparison(done=3, keep_going=False), "stopped").take(5) is True
    over = comparison(done=3, keep_going=True)
    over.is_over = True
    assert span_of(over, "stopped").take(5) is False
    assert not over.differences


def test_a_disk_that_fails_is_no_difference() -> None:
    found = comparison(done=3, keep_going=True)
    with pytest.raises(CheckpointError, match="full"):
        span_of(found, caused(CheckpointError("full"), OSError())).take(5)
    assert not found.differences


@pytest.mark.parametrize(
    ("threads", "settings"),
    [("1", {"num_threads": 1}), ("1024", {"num_threads": 1024}), ("1025", {}), ("0", {}), ("many", {}), ("", {})],
)
def test_threads_are_those_of_then_as_far_as_that_is_a_number_of_them(threads: str, settings: dict[str, int]) -> None:
    span: Any = SimpleNamespace(recipe={}, environment={"threads": threads})
    assert {name: value for name, value in _settings(span).items() if name == "num_threads"} == settings


def test_a_replay_writes_its_own_checkpoints_before_it_goes_on_and_measures_what_was_measured() -> None:
    """Of a recipe that says nothing of either."""
    span: Any = SimpleNamespace(recipe={}, environment={})
    assert _settings(span) == {
        "change": CHANGEABLE,
        "ledger": True,
        "progress": False,
        "checkpoint_async": False,
        "checkpoint_to": "",
        **dict.fromkeys(LEARNING_CADENCES, 0),
    }
    span.recipe = {"cadence.details_every": "7", "budget.span": "9ba", "cadence.digests_every": "3"}
    assert _settings(span).items() >= {"details_every": 7, "budget": "9ba", "digests_every": 3}.items()
    for odd in ("1234567890", "-1", "x", "1.5"):
        span.recipe = {"cadence.details_every": odd}
        with pytest.raises(LedgerError, match="which it can't have been"):
            _settings(span)
