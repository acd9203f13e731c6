"""What an entry's details must be to be tables: each wrong place is refused by what is wrong, wherever it stands."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from cosmati.errors import TamperError
from cosmati.ledger.details import encode_details
from cosmati.ledger.reader import ScannedEntry
from cosmati.ledger.tables import Tables, _is_policy, _most, in_force, is_number
from cosmati.records.ledger import AmendEntry, MicrobatchCell

from .ledgers import REGIONS as REGION_NAMES
from .ledgers import digest, run_entry, step_entry

REGIONS = ("a", "b")


def policy() -> list[Any]:
    """Three rows, two phases."""
    routes = [[[1, 0], [0.5, 2]], [[0, 0], [1, 1]], [[3, 0.25], [0, 1]]]
    kinds = [["admit", "gate"], ["defer", "admit"], ["gate", "reject"]]
    return [list(row) for row in zip(routes, kinds, strict=True)]


def changed(value: Any, path: tuple[int, ...], new: object) -> Any:
    """A copy with one place changed."""
    if not path:
        return new
    return [changed(one, path[1:], new) if at == path[0] else one for at, one in enumerate(value)]


def wrong_policies() -> Iterator[Any]:
    for at, phase in itertools.product(range(3), range(2)):
        for new in (None, {}, [], [1], [[], [], []], "ab"):
            yield changed(policy(), (at,), new)
        for part in (0, 1):
            for new in (None, "ab", {}, policy()[at][part][:1], [*policy()[at][part], policy()[at][part][0]]):
                yield changed(policy(), (at, part), new)
        for new in ([1], [1, 2, 3], "ab", {0: 1, 1: 2}, [1, None], [-1, 1], [1, True], ["1", 1], [1, float("inf")]):
            yield changed(policy(), (at, 0, phase), new)
        for new in ("", "allow", "Admit", 1, None):
            yield changed(policy(), (at, 1, phase), new)
    yield from (policy()[:2], [*policy(), policy()[0]], tuple(policy()), {0: policy()}, "abc", None)


def test_a_policy_is_a_weight_for_each_region_and_a_decision_for_each_row_and_phase() -> None:
    assert _is_policy(policy(), 3, 2, REGIONS) is True
    wrong = list(wrong_policies())
    assert len(wrong) > 150
    assert [one for one in wrong if _is_policy(one, 3, 2, REGIONS) is not False] == []


def test_a_number_is_finite_and_not_negative() -> None:
    assert all(is_number(one) for one in (0, 0.0, 1, 1e308, 5e-324, 10**300))
    assert not any(is_number(one) for one in (-1, -1e-300, True, False, "1", None, float("nan"), float("inf"), 10**400))


def test_the_most_of_several_cells_is_each_regions_largest_weight_and_the_least_withheld_decision() -> None:
    kinds = ("admit", "gate", "defer", "reject")
    for one, other in itertools.product(kinds, repeat=2):
        found = _most([((1.0, 0.0), one), ((0.5, 2.0), other)])
        assert found == ((1.0, 2.0), kinds[min(kinds.index(one), kinds.index(other))])
    assert _most([((0.25, 3.0), "defer")]) == ((0.25, 3.0), "defer")


def read(**changes: Any) -> Tables:
    entry, details = run_entry()
    told = {name: value for name, value in (details | changes).items() if value is not ...}
    ((_, found),) = in_force([ScannedEntry(0, b"", entry, encode_details(told))])
    return found


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(({name: wrong}, "distinct class and region names")
          for name in ("classes", "regions")
          for wrong in (..., 3, "abc", ["a", "a", "b"], ["a", 3, "b"], {"a": 1})),
        *(({"routes": wrong}, "routes with a weight for each region")
          for wrong in (..., 3, {}, [[1]], [[1] * 9], [[1] * (len(REGION_NAMES) - 1) + ["1"]], ["abc"])),
        *(({"bands": wrong}, "distinct class and region names") for wrong in (3, ["", ""], ["", 1], "ab")),
        *(({"kinds": wrong}, "which band and grades") for wrong in
          (3, {}, [[0]], [[0, {}, {}]], [["0", {}]], [[0, []]], [[0, {"a": 1}]], [[True, {}]], [[0, {}], [1, {}]])),
        *(({"policy": [[[[1] * len(REGION_NAMES)], ["admit"]]] * 3, "phases": wrong}, "its policy isn't")
          for wrong in (..., 3, [["main", 0]], [["main", 0, "9"]], [["main", 0.5, 9]], [["main", 0, True]],
                        [["main", 0, 100], 3], "abc")),
        ({"policy": [[[[1] * len(REGION_NAMES)], ["admit"]]] * 2}, "its policy isn't"),
        ({"policy_text": "x"}, "isn't that of the digest"),
    ],
)  # fmt: skip
def test_what_isnt_of_the_form_breaks_the_contract(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(TamperError, match=said):
        read(**changes)


def test_tables_are_what_the_details_say() -> None:
    entry, details = run_entry()
    regions: Any = details["regions"]
    own = [[[[1] * len(regions)], [kind]] for kind in ("admit", "gate", "reject")]
    found = read(policy=own, kinds=[[0, {"a": "b"}]])
    assert found.phases == ((0, 100),)
    assert found.policy == tuple((((1.0,) * len(regions), kind),) for kind in ("admit", "gate", "reject"))
    assert found.kinds == ((0, {"a": "b"}),)
    assert (found.bands, found.changes, found.index, found.entry) == (("",), (), 0, entry)
    assert read().phases == read(phases=[]).phases == ()
    assert read().policy == ()
    assert all(type(weight) is float for row in found.routes for weight in row)


@pytest.mark.parametrize("wrong", [3, [["seed", "1"]], [["seed", "1", 2]], [["seed", "1", "2", "3"]], ["abc"], {}])
def test_an_amendment_says_what_was_changed(wrong: object) -> None:
    first, details = run_entry()
    amend = AmendEntry(0, first.commitments, digest("x"))
    items = [ScannedEntry(0, b"", first, encode_details(details))]
    good = [["seed", "7", "8"], ["plan", "a", "b"]]
    *_, (_, found) = in_force([*items, ScannedEntry(1, b"", amend, encode_details(details | {"changes": good}))])
    assert found.changes == (("seed", "7", "8"), ("plan", "a", "b"))
    assert found.index == 1
    with pytest.raises(TamperError, match=r"Entry 1 breaks .* name, was, now"):
        list(in_force([*items, ScannedEntry(1, b"", amend, encode_details(details | {"changes": wrong}))]))


def cell(class_id: int = 0, **changes: Any) -> MicrobatchCell:
    return replace(MicrobatchCell(class_id, 0, 0, 0, 2, 2.0, bytes(32)), **changes)


@pytest.mark.parametrize(
    ("step", "one", "said"),
    [
        (5, cell(), ""),
        (9, cell(1), ""),
        (10, cell(phase=1, route_id=1), ""),
        (19, cell(phase=1, route_id=1), ""),
        (10, cell(), "phase 0, which goes from step 0 to 10"),
        (9, cell(phase=1, route_id=1), "phase 1, which goes from step 10 to 20"),
        (20, cell(phase=1, route_id=1), "phase 1, which goes from step 10 to 20"),
        (5, cell(phase=2), "is in phase 2, which isn't in the tables of entry 0"),
        (5, cell(route_id=1), "has the weights .* and the policy in force"),
        (5, cell(route_id=3), "route 3 isn't in the tables of entry 0"),
        (5, cell(2, num_rows=0), ""),
        (5, cell(2, num_rows=1), "microbatch 1 of step 5 has 1 rows of '.*', which the policy says to reject"),
        (15, cell(2, phase=1, route_id=1, num_rows=1), "which the policy says to defer"),
    ],
)
def test_a_cell_is_the_one_that_the_policy_gives(step: int, one: MicrobatchCell, said: str) -> None:
    entry, details = run_entry()
    num = len(REGION_NAMES)
    first, second = ([float(route == at) for at in range(num)] for route in (0, 1))
    told = details | {
        "routes": [first, second, [9.0] * num],
        "phases": [["main", 0, 10], ["late", 10, 20]],
        "policy": [[[first, second], kinds] for kinds in (["admit", "gate"], ["gate", "admit"], ["reject", "defer"])],
    }
    made, _ = step_entry(step)
    items = [
        ScannedEntry(0, b"", entry, encode_details(told)),
        ScannedEntry(
            1, b"", replace(made, microbatches=(cell(phase=min(step // 10, 1), route_id=min(step // 10, 1)), one)), b""
        ),
    ]
    if said:
        with pytest.raises(TamperError, match=said):
            list(in_force(items))
    else:
        assert len(list(in_force(items))) == 2
