"""A replay takes the spans that its steps lie in, in their order, and says of what it found how much that means."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosmati.errors import LedgerError
from cosmati.ledger.replay_result import BUT_FORGOTTEN, BUT_ROWS
from cosmati.train import replay as module
from cosmati.train.replay import From, ReplayFound, _quiet, replay, replay_segments

EQUAL = ReplayFound(
    segment=range(3, 6),
    start=1,
    from_entry_0=False,
    num_steps=5,
    num_roots=2,
    differences=(),
    num_differences=0,
    without_rows=frozenset(),
    forgotten={},
    skipped=(),
    doubts=(),
    is_interrupted=False,
)


def found(**changed: Any) -> ReplayFound:
    return dataclasses.replace(EQUAL, **changed)


@pytest.mark.parametrize(
    ("changed", "outcome"),
    [
        ({}, "equal"),
        ({"num_differences": 1}, "different"),
        ({"num_differences": 1, "is_interrupted": True, "without_rows": frozenset({3})}, "different"),
        ({"num_differences": 1, "doubts": ("why",)}, "not comparable"),
        ({"doubts": ("why",)}, "equal"),
        ({"is_interrupted": True, "without_rows": frozenset({3})}, "interrupted"),
        ({"without_rows": frozenset({5}), "forgotten": {3: (1,)}}, BUT_ROWS),
        ({"without_rows": frozenset({2, 6})}, "equal"),
        ({"forgotten": {5: (2,)}}, BUT_FORGOTTEN),
        ({"forgotten": {2: (2,), 6: (2,), 4: ()}}, "equal"),
    ],
)
def test_the_outcome_is_the_worst_that_was_found_in_the_segment(changed: Mapping[str, Any], outcome: str) -> None:
    assert found(**changed).outcome == outcome


def test_rows_and_certificates_are_those_of_the_segment() -> None:
    assert found().compares_rows
    assert found(without_rows=frozenset({1, 2, 6})).compares_rows
    assert not found(without_rows=frozenset({2, 3})).compares_rows
    assert found(forgotten={2: (9,), 5: (4, 1), 3: (4, 2), 6: (8,)}).forgotten_by == (1, 2, 4)


class Comparison:
    """What is found as the steps of spans are taken."""

    def __init__(self, run: Any, segment: range, blinds: Any, *, keep_going: bool, told: Any) -> None:
        self.given = segment, blinds, keep_going, told
        self.differences: list[Any] = []
        self.num_differences, self.num_steps, self.num_roots = 0, 17, 4
        self.is_over = False
        self.without_rows, self.forgotten, self.skipped = {4}, {5: (1,)}, {"z", "b"}

    def differs(self, *differences: Any) -> None:
        self.differences += differences
        self.num_differences += len(differences)


class World:
    """Spans, each with its doubts, what breaks, and how it ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *spans: tuple[int, int], **of_spans: Mapping[int, Any]) -> None:
        self.doubts, self.broken = of_spans.get("doubts", {}), of_spans.get("broken", {})
        self.ends, self.differs = of_spans.get("ends", {}), of_spans.get("differs", {})
        named = [SimpleNamespace(first=first, end=end) for first, end in spans]
        self.run: Any = SimpleNamespace(spans=named, dropped=["b", "a"], checkpoints={})
        self.log: list[Any] = []
        self.comparisons: list[Comparison] = []
        monkeypatch.setattr(module, "LedgerComparison", self._comparison)
        monkeypatch.setattr(module, "SpanAgain", self._span)
        monkeypatch.setattr(module, "furnish", lambda *given: self.log.append(("furnish", *given)))

    def _comparison(self, *given: Any, **named: Any) -> Comparison:
        self.comparisons.append(Comparison(*given, **named))
        return self.comparisons[-1]

    def _span(self, run: Any, span: Any, comparison: Comparison, scratch: Path, checkpoint: Any, make: Any) -> Any:
        assert (run, make, checkpoint) == (self.run, "make", None)
        assert scratch.name == "run"
        assert scratch.parent.is_dir()
        assert scratch.parent.name.startswith("cosmati-replay-")
        self.log.append(("made", span.first))

        def take(end: int) -> bool:
            self.log.append(("taken", span.first, end))
            warnings.warn("The checkpoint of step 3 (of 7) keeps the state of nothing", stacklevel=1)
            if span.first in self.differs:
                comparison.differs(f"d{span.first}")
                comparison.is_over = self.differs[span.first]
            return bool(self.ends.get(span.first))

        doubts, broken = self.doubts.get(span.first, []), self.broken.get(span.first, [])
        return SimpleNamespace(doubts=lambda: doubts, broken=lambda: broken, take=take)

    def replayed(self, segment: range, start: From | None = None, **options: Any) -> ReplayFound:
        make: Any = "make"
        return replay(self.run, segment, make, ledger=Path("ledger"), start=start, **options)

    @property
    def taken(self) -> list[tuple[int, int]]:
        return [(one[1], one[2]) for one in self.log if one[0] == "taken"]


SPANS = (0, 4), (4, 8), (8, 12), (12, 16)


def test_the_spans_from_the_start_to_the_segments_end_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for segment, start, taken in (
        (range(5, 8), 4, [(4, 8)]),
        (range(5, 9), 4, [(4, 8), (8, 9)]),
        (range(5, 7), 3, [(0, 4), (4, 7)]),
        (range(12, 40), 12, [(12, 16)]),
        (range(1, 4), 0, [(0, 4)]),
    ):
        world = World(monkeypatch, *SPANS)
        one = world.replayed(segment, From(step=start))
        assert world.taken == taken
        assert (one.segment, one.start) == (segment, start)
        assert world.comparisons[0].given == (range(start, segment.stop), None, False, None)


def test_what_was_compared_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, *SPANS)
    blinds, told = object(), object()
    unsigned: Any = ("u1", "u2")
    one = world.replayed(range(2, 3), From(unsigned=unsigned), blinds=blinds, keep_going=True, told=told)
    assert world.comparisons[0].given == (range(3), blinds, True, told)
    assert world.log[0][0] == "furnish"
    assert world.log[0][2:] == (Path("ledger"), world.run, None)
    assert one == found(
        segment=range(2, 3),
        start=0,
        from_entry_0=True,
        num_steps=17,
        num_roots=4,
        differences=("u1", "u2"),
        num_differences=2,
        without_rows=frozenset({4}),
        forgotten={5: (1,)},
        skipped=("a", "b", "z"),
    )


def test_it_ends_where_a_difference_or_somebody_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stops = World(monkeypatch, *SPANS, differs={4: True}, broken={4: ["b"], 0: ["never asked"]})
    one = stops.replayed(range(15))
    assert stops.taken == [(0, 4), (4, 8)]
    assert [*map(str, one.differences)] == ["d4"]
    assert (one.doubts, one.is_interrupted) == (("b",), False)
    ended = World(monkeypatch, *SPANS, ends={4: True})
    assert ended.replayed(range(15)).is_interrupted
    assert ended.taken == [(0, 4), (4, 8)]
    goes_on = World(monkeypatch, *SPANS, differs={4: False, 12: False})
    assert [*map(str, goes_on.replayed(range(15), keep_going=True).differences)] == ["d4", "d12"]
    assert goes_on.taken == [(0, 4), (4, 8), (8, 12), (12, 15)]


def test_a_span_in_other_surroundings_is_refused_unless_it_is_wanted_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    doubts = {4: ["other threads", "other torch"], 8: ["other torch", "other model"]}
    refused = World(monkeypatch, *SPANS, doubts=doubts)
    with pytest.raises(LedgerError, match=r"Steps 4:8 aren't comparable here: other threads; other torch\. A diff"):
        refused.replayed(range(15))
    assert refused.taken == [(0, 4)]
    assert World(monkeypatch, *SPANS, doubts=doubts).replayed(range(4)).doubts == ()
    wanted = World(monkeypatch, *SPANS, doubts=doubts, differs={8: False}, broken={8: ["other torch", "b"]})
    one = wanted.replayed(range(15), anyway=True)
    assert len(wanted.taken) == 4
    assert one.doubts == ("other threads", "other torch", "other model", "b")
    assert one.outcome == "not comparable"


def test_a_checkpoint_is_loaded_before_anything_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world = World(monkeypatch, (0, 4))
    loaded: list[Any] = []

    class Start(From):
        def load(self, run: Any) -> Any:
            loaded.append(run)

    one = world.replayed(range(3), Start(step=2, path=tmp_path))
    assert loaded == [world.run]
    assert (one.from_entry_0, one.start) == (False, 2)


def test_what_was_said_when_the_steps_were_first_taken_is_kept_back() -> None:
    texts = "The checkpoint of step 12 keeps the state of x", "Memory is too short for step 3"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with _quiet():
            for text in (*texts, "another"):
                warnings.warn(text, stacklevel=1)
        warnings.warn(texts[0], stacklevel=1)
    assert [str(one.message) for one in told] == ["another", texts[0]]


def replayed_segments(
    monkeypatch: pytest.MonkeyPatch, planned: Sequence[tuple[From, Sequence[range]]], *results: ReplayFound
) -> tuple[list[ReplayFound], list[Any]]:
    calls: list[Any] = []
    left = iter(results)

    def one(*given: Any, **named: Any) -> ReplayFound:
        calls.append((given, named))
        return dataclasses.replace(next(left), segment=given[1], start=named["start"].step)

    monkeypatch.setattr(module, "replay", one)
    told: Any = [object() for _ in range(5)]
    run, make, ledger, blinds, teller = told
    options = {"ledger": ledger, "blinds": blinds, "told": teller, "anyway": True}
    got = replay_segments(run, planned, make, **options)
    for (first, _, third), named in calls:
        assert (first, third) == (run, make)
        assert {name: value for name, value in named.items() if name != "start"} == options | {"keep_going": True}
    return got, [(given[1], named["start"].step) for given, named in calls]


def test_each_group_is_replayed_whole_and_its_segments_have_what_came_before_their_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    differences: Any = tuple(SimpleNamespace(step=step) for step in (None, 4, 5, 9))
    first = found(differences=differences, num_differences=9, num_steps=10)
    planned = [(From(), [range(2, 5), range(3, 12), range(4, 6)]), (From(step=20), [range(22, 24)])]
    got, calls = replayed_segments(monkeypatch, planned, first, found())
    assert calls == [(range(2, 12), 0), (range(22, 24), 20)]
    assert [(one.segment, [d.step for d in one.differences], one.num_differences) for one in got] == [
        (range(2, 5), [None, 4], 2),
        (range(3, 12), [None, 4, 5, 9], 4),
        (range(4, 6), [None, 4, 5], 3),
        (range(22, 24), [], 0),
    ]
    assert not any(one.is_interrupted for one in got)


def test_segments_that_were_not_reached_are_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = [(From(step=2), [range(3, 5), range(4, 6), range(4, 7)]), (From(step=20), [range(22, 24), range(23, 25)])]
    got, calls = replayed_segments(monkeypatch, planned, found(is_interrupted=True, num_steps=4))
    assert calls == [(range(3, 7), 2)]
    assert [one.is_interrupted for one in got] == [False, False, True, True, True]
    assert [(one.segment, one.start, one.num_steps) for one in got[3:]] == [
        (range(22, 24), 20, 0),
        (range(23, 25), 20, 0),
    ]
