"""Loaders whose steps hold rows of several classes, under a policy: what they learn, promise and put on record."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from cosmati import Trainer, load_policy
from cosmati.core.batch import Batch, Lineage
from cosmati.core.plan import Promise
from cosmati.data.people import ChosenRows
from cosmati.ledger.details import decode_details
from cosmati.ledger.query import VerifiedLedger, contributions
from cosmati.ledger.verify import verify_ledger
from cosmati.methods import MixUp, SelectiveBackprop
from cosmati.train.outcome import StepOutcome
from cosmati.train.policy_watch import REFUSED_FILE
from cosmati.train.rows_taught import regions_taught_by
from cosmati.train.step_rows import split_batch
from tests.ledger.plain_answers import check_answers
from tests.ledger.row_oracle import Rows
from tests.train.mixed.world import (
    CLASS_OF,
    CLASSES,
    INPUTS,
    NUM,
    ONES,
    POLICY,
    STEP,
    TARGETS,
    Seen,
    chosen,
    fitted,
    loader,
    run,
    weights,
)
from tests.train.policy_world import leave

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def whole() -> tuple[Tensor, list[StepOutcome]]:
    """Nine steps of a loader, in one go."""
    seen = Seen()
    return weights(fitted(loader(), observers=[seen])), seen.steps


def test_a_loader_is_regrouped_as_a_loop_of_ones_own_is(whole: tuple[Tensor, list[StepOutcome]]) -> None:
    expected, steps = whole
    given = [torch.cat([b.lineage.row_ids for b in one.batches]).sort().values - 100 for one in steps]
    assert not torch.equal(given[0], given[6])  # Six steps are a pass.
    own = run(None)
    with own:
        for ids in given:
            own.step(chosen(ids))
    # The same rows in their order in the data: of a class, they're in another order within microbatches.
    torch.testing.assert_close(weights(own), expected, rtol=1e-4, atol=1e-6)
    assert {b.class_id for one in steps for b in one.batches} == {0, 1, 2}
    assert len({b.num_rows for one in steps for b in one.batches}) > 2
    assert all(sum(b.num_rows for b in one.batches) == STEP and len(one.batches) == 4 for one in steps)


def test_the_plan_promises_what_it_does_in_a_loop_of_ones_own_but_for_ranks(tmp_path: Path) -> None:
    given, own = (
        {g.name: (g.holds, g.because) for g in run(data, folder=tmp_path / name).plan.guarantees}
        for name, data in (("loader", loader()), ("own", None))
    )
    assert {name for name in own if own[name][0] != given[name][0]} == {"elastic"}
    assert given["elastic"] == (False, "a step's rows are regrouped by class, into microbatches of unlike sizes")
    assert given["no_direct_write(doubtful, body)"][0]
    ungoverned = run(loader(), policy=None, ledger=False).plan
    assert ungoverned.holds(Promise.ELASTIC)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_goes_on_in_the_middle_of_a_pass_to_the_same_bits(
    whole: tuple[Tensor, list[StepOutcome]], tmp_path: Path, num_workers: int
) -> None:
    """Workers read ahead of the steps, and give lineage back through pipes."""
    options = {"num_workers": num_workers} | ({"multiprocessing_context": "fork"} if num_workers else {})
    first = run(loader(**options), folder=tmp_path)
    with first:
        for _ in range(4):
            first._take(*first._next(first.feed))  # type: ignore[arg-type, misc]
        first.save()
    again = run(loader(**options), folder=tmp_path)
    assert again.fit().outcome == "completed"
    assert torch.equal(weights(again), whole[0])
    # In mid-run too, rows of a class that's denied a region don't reach it.
    assert again.plan.holds(Promise.NO_DIRECT_WRITE, ("doubtful", "body"))


def test_a_list_of_batches_is_regrouped_and_read_again_by_position() -> None:
    batches = [chosen(range(STEP * i, STEP * i + STEP)) for i in range(6)]
    made = fitted(batches)
    own = run(None)
    with own:
        for step in range(9):
            own.step(batches[step % 6])
    assert torch.equal(weights(own), weights(made))
    assert made.feed is not None
    again = made.feed.again(2)
    expected = split_batch(batches[2], 4, by_class=True)
    assert [b.lineage.row_ids.tolist() for b in again] == [b.lineage.row_ids.tolist() for b in expected]


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_steps_of_one_class_are_those_of_a_run_without_a_policy(num_microbatches: int) -> None:
    """With ones everywhere, and nothing to regroup."""
    pure = [(kind == CLASS_OF).nonzero().flatten()[:8] for kind in range(3)]
    batches = [chosen(ids) for ids in pure]
    one, other = (fitted(batches, policy=p, num_microbatches=num_microbatches) for p in (ONES, None))
    assert torch.equal(weights(one), weights(other))


def test_ones_everywhere_are_a_run_without_a_policy_over_the_same_microbatches() -> None:
    batches = [chosen(range(STEP * i, STEP * i + STEP)) for i in range(6)]
    governed, free = fitted(batches, policy=ONES, budget="6ba"), run(None, policy=None)
    with free:
        for batch in batches:
            free.step_microbatches(split_batch(batch, 4, by_class=True), [0] * 4)
    assert torch.equal(weights(governed), weights(free))


def test_a_hugging_face_data_set_gives_its_classes_by_the_collate_function() -> None:
    datasets = pytest.importorskip("datasets")
    columns = {
        "input": INPUTS.tolist(),
        "target": TARGETS.tolist(),
        "licence": CLASS_OF.tolist(),
        "id": list(range(NUM)),
    }

    def collate(rows: list[dict[str, Any]]) -> Batch:
        data = {name: torch.tensor([row[name] for row in rows]) for name in columns}
        lineage = Lineage(data.pop("id") + 100, data.pop("licence"))
        return Batch(data, lineage)

    loaded = DataLoader(datasets.Dataset.from_dict(columns), STEP, collate_fn=collate)
    made = fitted(loaded)
    other = fitted([chosen(range(STEP * i, STEP * i + STEP)) for i in range(6)])
    assert torch.equal(weights(made), weights(other))


def test_methods_mix_rows_of_one_class(whole: tuple[Tensor, list[StepOutcome]]) -> None:
    seen = Seen()
    made = fitted(loader(), methods=[MixUp()], observers=[seen])
    assert made.plan.holds(Promise.NO_DIRECT_WRITE)
    assert not torch.equal(weights(made), whole[0])
    mixed = [b.lineage.parent_class_ids for one in seen.steps for b in one.batches if b.lineage.parents is not None]
    assert mixed
    assert all(bool((kinds == kinds[0, 0]).all()) for kinds in mixed if kinds is not None)


# ------------------------------------------------------------------------------------------------------------ ledger


def test_each_cell_is_a_count_over_the_rows_of_a_class(tmp_path: Path) -> None:
    batches = [chosen(range(STEP * i, STEP * i + STEP)) for i in range(6)]
    fitted(batches, folder=tmp_path / "run", budget="6ba")
    own = Rows(tmp_path / "run")
    taught: Counter[str] = Counter()
    for _, entry, tables in VerifiedLedger(tmp_path / "run/ledger").steps():
        lineage = batches[entry.step].lineage
        rows_of = {
            name: [r for r, c in zip(lineage.row_ids.tolist(), lineage.class_ids.tolist(), strict=True) if c == kind]
            for kind, name in enumerate(CLASSES)
        }
        found: dict[str, list[int]] = {name: [] for name in CLASSES}
        for number, cell in enumerate(entry.microbatches):
            name = tables.class_of(cell, _)
            if name == "closed":  # rejected: nothing of it takes part
                assert (cell.num_rows, cell.weight) == (0, 0.0)
                continue
            mine = rows_of[name][len(found[name]) : len(found[name]) + cell.num_rows]
            assert cell.row_commitment == own.commitment(name, entry.step, number, enumerate(mine))
            assert cell.weight == cell.num_rows
            found[name] += mine
        assert {name: rows_of[name] for name in ("open", "doubtful")} | {"closed": []} == found
        taught.update({name: len(rows) for name, rows in found.items()})
    table = {(c.class_name, c.region): c.weight for c in contributions(tmp_path / "run/ledger").cells}
    assert table["open", "body"] == taught["open"]
    assert table["doubtful", "head"] == 0.5 * taught["doubtful"]
    assert not table.get(("doubtful", "body"))
    check_answers(tmp_path / "run/ledger")


# ------------------------------------------------------------------------------------------------------------ a change

PHASES = "phases:\n  - {name: warm, until: 5ba}\n  - {name: main}\n"
LATER = POLICY.replace("{class: doubtful, weight: 0.5}", "{class: doubtful, weight: 0.25}")


def changing(folder: Path, text: str) -> Trainer:
    made = run(loader(), folder=folder)
    with made:
        while not made.should_stop:
            if made.clock.step == 3:
                leave(load_policy(text))(made)
            made._get_ready()
            made._take(*made._next(made.feed))  # type: ignore[arg-type, misc]
    return made


def test_a_policy_is_changed_in_mid_run_as_a_phase_would(tmp_path: Path) -> None:
    changed = changing(tmp_path / "changed", LATER)
    steps = [entry.step for entry in verify_ledger(tmp_path / "changed/ledger").policies]
    assert len(steps) == 2
    rule = "  - {class: doubtful, phase: main, region: head, weight: 0.25}\n"
    phased = POLICY.replace("rules:", PHASES.replace("5ba", f"{steps[1]}ba") + "rules:") + rule
    assert torch.equal(weights(changed), weights(fitted(loader(), policy=phased)))


def test_a_change_that_has_rows_wait_is_refused_and_the_run_goes_on(
    tmp_path: Path, whole: tuple[Tensor, list[StepOutcome]]
) -> None:
    text = POLICY.replace("rules:", PHASES.replace("5ba", "8ba") + "rules:")
    text += "  - {class: closed, phase: warm, decision: defer}\n  - {class: closed, phase: main, weight: 1}\n"
    with pytest.warns(UserWarning, match="goes on with the policy that it has"):
        made = changing(tmp_path, text)
    assert torch.equal(weights(made), whole[0])
    assert "defers closed" in (tmp_path / REFUSED_FILE).read_text()


def test_a_list_says_whom_rows_have_taught(tmp_path: Path) -> None:
    """Rows of a list can be read again, and are compared with what the ledger commits to."""
    batches = [chosen(range(STEP * i, STEP * i + STEP)) for i in range(6)]
    fitted(batches, folder=tmp_path / "run", budget="6ba")
    wanted = [3, 14, 15, 40, 41, 59]
    ids = torch.tensor(wanted) + 100
    asked = ChosenRows(ids.numpy(), torch.zeros(0, 2, dtype=torch.int64).numpy())
    found = {one.region: one for one in regions_taught_by(run(batches, folder=tmp_path / "run", budget="6ba"), asked)}
    for region, classes in (("body", (2,)), ("head", (1, 2))):
        taught = [row for row in wanted if int(CLASS_OF[row]) in classes]
        assert found[region].num_rows == len(taught)
        assert list(found[region].steps) == sorted({row // STEP for row in taught})
        assert found[region].num_unopened == 0


@pytest.mark.parametrize("num_twice", [0, 6])
def test_which_of_unlike_many_rows_were_selected_is_on_record(tmp_path: Path, num_twice: int) -> None:
    """Microbatches of unlike sizes, of which every other step takes a share: their slots, and whom the rows taught.

    A loader that draws with replacement gives a row twice, and one of the two may be kept.
    """
    rows = [[*range(STEP * i, STEP * i + STEP), *range(STEP * i, STEP * i + num_twice)] for i in range(6)]
    batches, seen = [chosen(ids) for ids in rows], Seen()
    options: dict[str, Any] = {"methods": [SelectiveBackprop(start=0, end=1)], "folder": tmp_path, "budget": "6ba"}
    fitted(batches, observers=[seen], **options)
    taught: Counter[str] = Counter()
    for (item, entry, tables), outcome in zip(VerifiedLedger(tmp_path / "ledger").steps(), seen.steps, strict=True):
        assert len({batch.num_rows for batch in outcome.given}) > 1
        given = [batch.lineage.row_ids.tolist() for batch in outcome.given]
        kept = [batch.lineage.row_ids.tolist() for batch in outcome.batches]
        slots = decode_details(item.details or b"").get("kept_rows", {})
        assert slots.keys() == {str(m) for m, ids in enumerate(given) if ids != kept[m]}
        assert all([given[int(m)][slot] for slot in own] == kept[int(m)] for m, own in slots.items())
        for cell, ids in zip(entry.microbatches, kept, strict=True):
            rates = dict(zip(tables.regions, tables.route(cell, item), strict=True))
            taught.update({region: len(ids) for region, rate in rates.items() if rate})
    asked = ChosenRows((torch.arange(NUM) + 100).numpy(), torch.zeros(0, 2, dtype=torch.int64).numpy())
    assert {one.region: one.num_rows for one in regions_taught_by(run(batches, **options), asked)} == taught
