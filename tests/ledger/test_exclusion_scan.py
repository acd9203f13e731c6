"""An exclusion is stated only where a whole scan found no cell of the class that wrote, and says what was scanned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cosmati.errors import LedgerError, RefutedError, TamperError
from cosmati.ledger.exclusion import ExclusionStatement, exclusions
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.note import TreeHead
from cosmati.ledger.reader import read_head
from cosmati.ledger.writer import details_digest
from cosmati.records.ledger import AmendEntry, EvaluationEntry, MicrobatchCell, ResumeEntry, RunEntry, StepEntry

from .ledgers import ORIGIN, digest
from .test_verify import Item, write_signed

KEY = SigningKey.generate(ORIGIN)
FULL, LAST, NONE = 0, 1, 2
ROUTES = [[1.0, 1.0], [0.0, 0.5], [0.0, 0.0]]
Norms = dict[str, list[float | None]]


def tables(classes: Sequence[str], regions: Sequence[str]) -> dict[str, object]:
    return {"classes": list(classes), "regions": list(regions), "routes": ROUTES, "phases": [], "seed": 0}


def run(classes: Sequence[str] = ("a", "b", "a&c"), regions: Sequence[str] = ("in", "out")) -> Item:
    details = tables(classes, regions)
    return RunEntry("r", (), details_digest(details)), details


def amend(at: int, classes: Sequence[str], regions: Sequence[str]) -> Item:
    details = tables(classes, regions) | {"changes": []}
    return AmendEntry(at, (), details_digest(details)), details


def step(number: int, *cells: tuple[int, int, int, float], norms: Any = None, attempt: int = 0, by: str = "p") -> Item:
    """A step of cells (class, route, rows, weight)."""
    details: dict[str, object] = {"step": number, "gradient_norm": norms or {}, "update_norm": None, "loss": None}
    own = tuple(MicrobatchCell(c, 0, 0, route, n, w, digest("rows")) for c, route, n, w in cells)
    return StepEntry(number, attempt, digest(by), details_digest(details), None, own), details


class Witnesses:
    """What asks nobody, and writes down what it's asked."""

    def __init__(self, *heads: TreeHead) -> None:
        self.heads = list(heads)
        self.asked: list[Any] = []

    def check(self, keys: Any) -> None:
        self.asked.append(tuple(keys))

    def level(self, size: int) -> str:
        return f"level of {size}"


def stated(
    folder: Path, items: list[Item], *pairs: tuple[str, str], witnesses: Witnesses | None = None
) -> tuple[ExclusionStatement, ...]:
    write_signed(folder, items, KEY)
    head = read_head(folder, KEY.verifier)
    return exclusions(folder, KEY.verifier, head, witnesses or Witnesses(), pairs)  # type: ignore[arg-type]


def refuted(folder: Path, items: list[Item], *pairs: tuple[str, str]) -> str:
    with pytest.raises(RefutedError) as caught:
        stated(folder, items, *pairs)
    return str(caught.value)


def changed_over() -> list[Item]:
    """Three steps, of which one is superseded; two more of other classes, under other regions."""
    return [
        run(),
        step(0, (0, LAST, 2, 1.0), (1, NONE, 2, 1.0), (2, LAST, 1, 1.0)),
        step(1, (0, LAST, 2, 1.0), (0, LAST, 2, 1.0), by="q"),
        (ResumeEntry(1, 2, 1), None),
        amend(1, ["b", "new"], ["out", "top"]),
        step(1, (1, LAST, 2, 1.0), (0, NONE, 2, 1.0), attempt=1),
        step(2, (1, LAST, 2, 1.0), attempt=1, by="q"),
    ]


def test_a_statement_says_all_that_was_scanned(tmp_path: Path) -> None:
    witnesses = Witnesses()
    pairs = [("a", "in"), ("b", "out"), ("a&c", "in"), ("new", "in"), ("b", "top"), ("new", "out"), ("a", "top")]
    found = stated(tmp_path, changed_over(), *pairs, witnesses=witnesses)
    head = read_head(tmp_path, KEY.verifier)
    same: dict[str, Any] = {
        "origin": ORIGIN,
        "tree_size": 7,
        "root": head.root.hex(),
        "num_steps_scanned": 4,
        "policy_digests": (digest("p").hex(), digest("q").hex()),
        "evidence_level": "level of 7",
    }
    # Microbatches: a has one and the joint one in step 0, and two in the step that was superseded.
    numbers = [(2, 4), (0, 2), (2, 1), (2, 2), (2, 2), (0, 2), (2, 4)]
    assert found == tuple(
        ExclusionStatement(
            class_name=name, region=region, num_steps_without_region=without, num_class_microbatches=cells, **same
        )
        for (name, region), (without, cells) in zip(pairs, numbers, strict=True)
    )
    assert witnesses.asked == [(KEY.verifier,)]


def test_of_no_pair_nothing_is_stated_and_the_log_is_read_all_the_same(tmp_path: Path) -> None:
    assert stated(tmp_path, changed_over()) == ()
    wrong = step(0, (0, NONE, 1, 1.0), norms={"7": [1.0, 1.0]})
    with pytest.raises(TamperError, match="gradient_norm '7'"):
        stated(tmp_path / "other", [run(), wrong])


def test_the_trees_that_witnesses_have_seen_are_held_against_the_log(tmp_path: Path) -> None:
    with pytest.raises(TamperError, match=r"The first 3 entries in .* aren't those of the earlier checkpoint"):
        stated(tmp_path, changed_over(), ("a", "in"), witnesses=Witnesses(TreeHead(3, bytes(32))))


def test_an_empty_log_states_nothing(tmp_path: Path) -> None:
    head = TreeHead(0, bytes(32))
    with pytest.raises(LedgerError, match=r"The ledger .* is empty\. Query it once the run has begun"):
        exclusions(tmp_path, KEY.verifier, head, Witnesses(), [("a", "in")])  # type: ignore[arg-type]


def test_a_log_without_a_step_states_of_the_names_that_it_has(tmp_path: Path) -> None:
    (found,) = stated(tmp_path, [run()], ("a", "in"))
    assert (found.tree_size, found.num_steps_scanned, found.num_class_microbatches) == (1, 0, 0)
    assert (found.num_steps_without_region, found.policy_digests) == (0, ())


@pytest.mark.parametrize(
    ("pair", "told"),
    [
        (("x", "in"), "The ledger has no class 'x'. It has a, b, a&c, new."),
        (("a", "x"), "The ledger has no region 'x'. It has in, out, top."),
        (("x", "y"), "The ledger has no class 'x'. It has a, b, a&c, new."),
    ],
)
def test_a_name_that_no_table_has_is_refused_with_those_there_are(
    tmp_path: Path, pair: tuple[str, str], told: str
) -> None:
    with pytest.raises(LedgerError) as caught:
        stated(tmp_path, changed_over(), ("a", "in"), pair)
    assert str(caught.value) == told


def test_the_tables_that_other_entries_stand_under_are_named_once(tmp_path: Path) -> None:
    evaluation: Item = (EvaluationEntry(1, digest("root"), details_digest({"step": 1})), {"step": 1})
    with pytest.raises(LedgerError, match=r"It has in, out\."):
        stated(tmp_path, [run(), step(0, (0, NONE, 1, 1.0)), evaluation], ("a", "x"))


@pytest.mark.parametrize(
    ("cell", "wrote"),
    [
        ((0, LAST, 2, 3.0), True),
        ((0, FULL, 1, 1e-300), True),
        ((0, LAST, 0, 3.0), False),
        ((0, LAST, 2, 0.0), False),
        ((0, NONE, 2, 3.0), False),
        ((1, LAST, 2, 3.0), False),
        ((2, LAST, 2, 3.0), True),
    ],
)
def test_a_cell_writes_with_rows_a_weight_and_a_route(
    tmp_path: Path, cell: tuple[int, int, int, float], wrote: bool
) -> None:
    items = [run(), step(0, (1, NONE, 2, 1.0)), step(1, (1, NONE, 2, 1.0)), step(2, cell)]
    if not wrote:
        assert stated(tmp_path, items, ("a", "out"))[0].region == "out"
        return
    name, weight = ("a", "b", "a&c")[cell[0]], ROUTES[cell[1]][1]
    assert refuted(tmp_path, items, ("a", "out")) == (
        f"The statement is false: entry 3 (step 2), microbatch 0, gave rows of {name!r} weight {weight} in 'out' "
        "(gradient norm None). How much there was: cosmati ledger query RUN with --class or --region alone."
    )


def test_a_gradient_that_should_not_be_refutes_as_a_weight_does(tmp_path: Path) -> None:
    items = [run(), step(0, (1, LAST, 1, 1.0), (0, NONE, 1, 1.0), norms={"0": [None, 3.0], "1": [0.0, 0.25]})]
    said = "entry 1 (step 0), microbatch 1, gave rows of 'a' weight 0.0 in 'out' (gradient norm 0.25)"
    assert said in refuted(tmp_path, items, ("a", "out"))
    assert stated(tmp_path, items, ("a", "in"))[0].num_class_microbatches == 1


def test_the_norm_of_a_cell_that_wrote_is_told(tmp_path: Path) -> None:
    items = [run(), step(0, (0, FULL, 1, 1.0), norms={"0": [0.0, 2.0]})]
    assert "weight 1.0 in 'in' (gradient norm 0.0)" in refuted(tmp_path, items, ("a", "in"))


@pytest.mark.parametrize(
    ("pairs", "told"),
    [
        ([("b", "out"), ("a", "in")], "entry 2 (step 1), microbatch 1, gave rows of 'a' weight 1.0 in 'in'"),
        ([("a", "out"), ("a", "in")], "entry 2 (step 1), microbatch 1, gave rows of 'a' weight 1.0 in 'in'"),
        ([("b", "out")], "entry 3 (step 2), microbatch 0, gave rows of 'b' weight 0.5 in 'out'"),
        ([("a&c", "out"), ("b", "in")], "entry 3 (step 2), microbatch 2, gave rows of 'a&c' weight 1.0 in 'out'"),
        ([("b", "in"), ("a", "top"), ("b", "out")], "entry 3 (step 2), microbatch 0, gave rows of 'b' weight 0.5"),
    ],
)
def test_the_first_cell_that_wrote_is_named(tmp_path: Path, pairs: list[tuple[str, str]], told: str) -> None:
    items = [
        run(),
        step(0, (1, NONE, 1, 1.0), (0, NONE, 1, 1.0), (0, NONE, 1, 1.0)),
        step(1, (1, NONE, 1, 1.0), (0, FULL, 1, 1.0), (0, FULL, 1, 1.0)),
        step(2, (1, LAST, 1, 1.0), (0, FULL, 1, 1.0), (2, FULL, 1, 1.0)),
        # Of another block.
        step(3, (1, FULL, 1, 1.0), by="q"),
        (ResumeEntry(4, 5, 1), None),
        amend(4, ["a"], ["top"]),
    ]
    # Routes have as many weights as there are regions.
    items[-1][1]["routes"] = [[1.0]]  # type: ignore[index]
    items[-1] = (AmendEntry(4, (), details_digest(items[-1][1])), items[-1][1])  # type: ignore[arg-type]
    assert told in refuted(tmp_path, items, *pairs)


def test_an_earlier_write_is_not_forgotten_for_a_later_one(tmp_path: Path) -> None:
    items = [run(), step(0, (0, FULL, 1, 1.0)), step(1, (0, FULL, 1, 1.0), by="q")]
    assert "entry 1 (step 0)" in refuted(tmp_path, items, ("a", "in"))


def test_a_superseded_step_refutes(tmp_path: Path) -> None:
    items = [*changed_over()]
    items[2] = step(1, (0, FULL, 2, 1.0), by="q")
    assert "entry 2 (step 1), microbatch 0" in refuted(tmp_path, items, ("a", "in"))


def test_where_tables_have_other_names_ids_are_not_taken_for_these(tmp_path: Path) -> None:
    items = [*changed_over()]
    # Class 0 is b there, and region 0 is out.
    items[-1] = step(2, (0, FULL, 2, 1.0), attempt=1, by="q")
    assert [one.class_name for one in stated(tmp_path, items, ("a", "in"), ("a", "top"))] == ["a", "a"]
    assert "gave rows of 'b' weight 1.0 in 'top'" in refuted(tmp_path, items, ("a", "in"), ("b", "top"))
