"""Points as they come: whoever asks again and again holds in the end what the file says, whatever happened between."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.storage.atomic import replace_file
from cosmati.store.live import FilePlace, extremes
from cosmati.store.series import MAX_MEASURES, ROWS_A_SECOND, TOKENS_A_SECOND, NewPoints, new_points


class Page:
    """What a page does with answers, by the rule that `NewPoints` states."""

    def __init__(self) -> None:
        self.held: dict[str, list[tuple[int, float]]] = {}
        self.place = FilePlace()

    def ask(self, path: Path) -> NewPoints:
        told = new_points(path, self.place)
        since = -math.inf if told.is_anew else math.inf if told.since is None else told.since
        self.held = {name: [one for one in points if one[0] < since] for name, points in self.held.items()}
        for name, (steps, values) in told.measures.items():
            self.held.setdefault(name, []).extend(zip(steps, values, strict=True))
        self.place = told.place
        return told


def text_of(steps: list[int], attempt: int) -> str:
    return "".join(json.dumps({"step": step, "loss": step + attempt / 4}) + "\n" for step in steps)


@given(st.data())
def test_a_page_holds_what_the_file_says_through_resumes_and_torn_lines(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("run") / "steps.jsonl"
    page, step, truth = Page(), 0, dict[int, float]()
    for attempt in range(data.draw(st.integers(1, 4))):
        step = data.draw(st.integers(0, step))
        truth = {one: value for one, value in truth.items() if one <= step}
        kept = "".join(json.dumps({"step": one, "loss": value}) + "\n" for one, value in truth.items())
        replace_file(path, kept.encode())
        for _ in range(data.draw(st.integers(0, 5))):
            new = list(range(step + 1, step + 1 + data.draw(st.integers(0, 4))))
            whole = text_of(new, attempt).encode()
            cut = data.draw(st.integers(0, len(whole)))
            with path.open("ab") as file:
                file.write(whole[:cut])
                file.flush()
                if data.draw(st.booleans()):
                    page.ask(path)
                file.write(whole[cut:])
            truth |= {one: one + attempt / 4 for one in new}
            step = max([step, *new])
            if data.draw(st.booleans()):
                page.ask(path)
    page.ask(path)
    assert dict(page.held.get("loss", [])) == truth
    assert page.held.get("loss", []) == sorted(truth.items())
    assert page.ask(path).measures == {}


def test_a_file_that_is_removed_leaves_nothing_and_one_that_comes_back_is_read(tmp_path: Path) -> None:
    path, page = tmp_path / "steps.jsonl", Page()
    path.write_text(text_of([1, 2, 3], 0))
    page.ask(path)
    path.unlink()
    page.ask(path)
    assert page.held == {"loss": []}
    path.write_text(text_of([1], 1))
    page.ask(path)
    assert page.held == {"loss": [(1, 1.25)]}


def test_a_successor_of_the_same_number_is_another_file(tmp_path: Path) -> None:
    """A file system gives a removed file's number to the next one: here, the same file written over."""
    path, page = tmp_path / "steps.jsonl", Page()
    path.write_text(text_of([1, 2], 0))
    page.ask(path)
    path.write_text(text_of([1, 2, 3], 4))  # lines as long as those of before
    page.ask(path)
    assert page.held == {"loss": [(1, 2.0), (2, 3.0), (3, 4.0)]}


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(4, 60))
def test_thinning_keeps_ends_and_extremes_and_no_more_points_than_asked(values: list[float], most: int) -> None:
    steps = [10 * place for place in range(len(values))]
    kept_steps, kept = extremes(steps, values, most)
    assert len(kept) <= most
    assert (kept_steps[0], kept_steps[-1]) == (steps[0], steps[-1])
    assert kept_steps == sorted(set(kept_steps))
    assert {min(values), max(values)} <= set(kept)
    assert all(values[step // 10] == value for step, value in zip(kept_steps, kept, strict=True))
    if len(values) <= most:
        assert kept == values


def test_a_long_run_is_thinned_to_what_a_page_can_hold(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    peak = 123_450
    path.write_text(
        "".join(f'{{"step": {step}, "loss": {9.0 if step == peak else 1.0}}}\n' for step in range(0, 300_000, 10))
    )
    told = new_points(path, FilePlace())
    steps, values = told.measures["loss"]
    assert len(steps) <= 2000
    assert (peak, 9.0) in zip(steps, values, strict=True)
    assert told.place.offset == path.stat().st_size
    assert new_points(path, told.place).measures == {}


def test_pace_is_between_neighbouring_lines_also_of_two_looks(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    clocks = [(1, 8, 800, 1.0), (2, 16, 1600, 3.0), (3, 24, 2400, 3.0), (4, 32, 3200, 7.0)]
    texts = [json.dumps({"step": a, "rows": b, "tokens": c, "seconds": d, "loss": 1.0}) + "\n" for a, b, c, d in clocks]
    path.write_text(texts[0])
    first = new_points(path, FilePlace(), has_pace=True)
    assert set(first.measures) == {"loss"}
    path.write_text("".join(texts))
    told = new_points(path, first.place, has_pace=True).measures
    assert told[ROWS_A_SECOND] == ([2, 4], [4.0, 2.0])
    assert told[TOKENS_A_SECOND] == ([2, 4], [400.0, 200.0])
    assert set(new_points(path, FilePlace()).measures) == {"loss"}


def test_what_is_no_number_and_too_many_names_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    line = {"step": 1, "a": None, "b": True, "c": "9", "d": [1], "e": 10**400, "rows": 3}
    many = {"step": 2} | {f"m{place}": place for place in range(MAX_MEASURES + 20)}
    path.write_text(f'{json.dumps(line)}\n{{"step": true, "f": 1}}\n[1]\n{json.dumps(many)}\n')
    told = new_points(path, FilePlace())
    assert set(told.measures) == {f"m{place}" for place in range(MAX_MEASURES)}
