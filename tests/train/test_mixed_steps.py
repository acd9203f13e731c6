"""Loaders and sources whose steps hold rows of several classes, under a policy."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from cosmati import Classification, InMemory, RunConfig, Taxonomy, Trainer, load_policy
from cosmati.core.batch import TOMBSTONE, Batch, Lineage
from cosmati.core.plan import Promise
from cosmati.errors import BatchError, DataError, PlanError, PolicyError
from cosmati.ledger.query import VerifiedLedger, contributions
from cosmati.methods import MixUp
from cosmati.optim import SGD, AdamW
from cosmati.train.observers.observer import Observer
from cosmati.train.outcome import StepOutcome
from cosmati.train.step_rows import split_batch

NUM, STEP = 60, 10
CLASSES = ("closed", "doubtful", "open")
TAXONOMY = Taxonomy("t", "1", tuple((name, name) for name in CLASSES))
POLICY = """
version: 1
taxonomy: t
regions:
  body: {params: ["0.*"]}
  head: {params: ["2.*"]}
rules:
  - {class: open, weight: 1}
  - {class: doubtful, weight: 0.5}
  - {class: doubtful, region: body, weight: 0}
"""
"""`closed` is rejected."""
ONES = "version: 1\ntaxonomy: t\nrules:\n  - {class: '**', weight: 1}\n"
INPUTS = torch.randn(NUM, 4, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(3, (NUM,), generator=torch.Generator().manual_seed(1))
CLASS_OF = torch.randint(3, (NUM,), generator=torch.Generator().manual_seed(2))


def chosen(indices: Any, *, band: Tensor | None = None) -> Batch:
    ids = torch.as_tensor(indices)
    bands = None if band is None else band[ids]
    return Batch((INPUTS[ids], TARGETS[ids]), Lineage(ids + 100, CLASS_OF[ids], bands=bands))


def loader(**options: Any) -> DataLoader[Any]:
    """Return rows as they come, in an order that follows from the run's seed and the pass."""
    return DataLoader(range(NUM), STEP, shuffle=True, collate_fn=chosen, **options)  # type: ignore[arg-type]


class Seen(Observer):
    """What each step was given, and taught."""

    def __init__(self) -> None:
        self.steps: list[StepOutcome] = []

    def on_step(self, outcome: StepOutcome) -> None:
        self.steps.append(outcome)


def run(data: Any, *, policy: str | None = POLICY, folder: Path | None = None, **options: Any) -> Trainer:
    torch.manual_seed(0)
    settings = {"budget": "9ba", "num_microbatches": 4, "num_threads": 1, "run_folder": folder}
    settings |= {name: options.pop(name) for name in list(options) if name in RunConfig.__dataclass_fields__}
    return Trainer(
        options.pop("model", None) or nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
        options.pop("loss", Classification(3)),
        data,
        optimizers=options.pop("optimizers", [AdamW(lr=0.01)]),
        policy=load_policy(policy) if policy else None,
        taxonomy=TAXONOMY if policy else None,
        config=RunConfig(**settings),
        **options,
    )


def weights(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def fitted(data: Any, **options: Any) -> Trainer:
    made = run(data, **options)
    made.fit()
    return made


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


def commitment(salt: bytes, step: int, microbatch: int, ids: list[int]) -> bytes:
    """The commitment to rows by its definition."""
    stream = blake3.blake3(f"cosmati rows {step}/{microbatch}".encode(), key=salt)
    hashes = [
        hashlib.sha256(bytes([0, 0]) + stream.digest(length=32, seek=32 * slot) + struct.pack("<q", row)).digest()
        for slot, row in enumerate(ids)
    ]
    return hashlib.sha256(b"".join(hashes)).digest()


def test_each_cell_is_a_count_over_the_rows_of_a_class(tmp_path: Path) -> None:
    batches = [chosen(range(STEP * i, STEP * i + STEP)) for i in range(6)]
    fitted(batches, folder=tmp_path / "run", budget="6ba")
    salt = (tmp_path / "run/private/rows.salt").read_bytes()
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
            assert cell.row_commitment == commitment(salt, entry.step, number, mine)
            assert cell.weight == cell.num_rows
            found[name] += mine
        assert {name: rows_of[name] for name in ("open", "doubtful")} | {"closed": []} == found
        taught.update({name: len(rows) for name, rows in found.items()})
    table = {(c.class_name, c.region): c.weight for c in contributions(tmp_path / "run/ledger").cells}
    assert table["open", "body"] == taught["open"]
    assert table["doubtful", "head"] == 0.5 * taught["doubtful"]
    assert not table.get(("doubtful", "body"))


# ------------------------------------------------------------------------------------------------------------ bands

BANDED = """
version: 1
taxonomy: t
bands: {measure: readability, names: [low, high], thresholds: [0.5]}
rules:
  - {class: "**", weight: 1}
  - {class: open, band: low, weight: 0.25}
  - {class: doubtful, band: low, decision: reject}
"""


def test_rows_of_unlike_bands_are_regrouped_by_band() -> None:
    bands = torch.arange(NUM) % 2
    batches = [chosen(range(STEP * i, STEP * i + STEP), band=bands) for i in range(6)]
    seen = Seen()
    made = fitted(batches, policy=BANDED, budget="6ba", num_microbatches=8, observers=[seen])
    own = run(None, policy=BANDED, num_microbatches=8)
    with own:
        for batch, one in zip(batches, seen.steps, strict=True):
            lineage = batch.lineage
            kinds = sorted(set(zip(lineage.class_ids.tolist(), lineage.bands.tolist(), strict=True)))  # type: ignore[union-attr]
            told = [(b.class_id, b.band) for b in one.batches]
            assert sorted(set(told)) == kinds
            parts = []
            for number, (kind, band) in enumerate(told):
                # By hand: this kind's rows, the first of its microbatches with one more where they don't divide.
                rows = ((lineage.class_ids == kind) & (lineage.bands == band)).nonzero().flatten()
                place = number - told.index((kind, band))
                ids = rows.tensor_split(told.count((kind, band)))[place]
                parts.append(Batch(tuple(d[ids] for d in batch.data), Lineage(ids, lineage.class_ids[ids]), kind, band))
            own.step_microbatches(parts, [part.class_id for part in parts])
            assert [r.offered for r in one.routes] == [(kind, band) != (1, 0) for kind, band in told]
    assert torch.equal(weights(made), weights(own))


def test_bands_that_say_nothing_new_change_nothing() -> None:
    plain = [chosen(range(STEP * i, STEP * i + STEP)) for i in range(6)]
    banded = [chosen(range(STEP * i, STEP * i + STEP), band=torch.zeros(NUM, dtype=torch.int64)) for i in range(6)]
    assert torch.equal(*(weights(fitted(batches, policy=BANDED, budget="6ba")) for batches in (plain, banded)))


def test_a_microbatch_that_lies_about_its_bands_is_refused() -> None:
    lied = chosen([0, 1], band=torch.ones(NUM, dtype=torch.int64))
    lied = Batch(lied.data, Lineage(lied.lineage.row_ids, torch.zeros(2, dtype=torch.int64), bands=lied.lineage.bands))
    with run(None, policy=BANDED, num_microbatches=1) as made, pytest.raises(PlanError, match=r"band 0 .* bands \[1\]"):
        made.step_microbatches([lied], [0])
    mixed = Batch(lied.data, lied.lineage.mix(torch.tensor([1, 0])))
    with run(None, policy=BANDED) as made, pytest.raises(PlanError, match="don't tell the bands"):
        made.step(mixed)
    with run([chosen(range(10), band=torch.full((NUM,), 7))], policy=BANDED) as made, pytest.raises(PolicyError):
        made.fit()


# ------------------------------------------------------------------------------------------------------------ sources


@dataclass(frozen=True)
class Together:
    """A source of somebody's own, whose microbatches hold rows of all classes."""

    class_names: tuple[str, ...] = ("doubtful", "closed", "open")
    digest: str = "00" * 32

    def order(self, *, seed: int, num_microbatches: int, route_pure: bool, classes: Any = None) -> Any:
        del route_pure, classes
        inner = InMemory((INPUTS, TARGETS), STEP if num_microbatches == 1 else 12, row_ids=torch.arange(NUM) + 100)
        return _Mixed(inner.order(seed=seed, num_microbatches=num_microbatches, route_pure=False))


class _Mixed:
    def __init__(self, inner: Any) -> None:
        self._inner, self.steps_per_epoch, self.rows_per_step = inner, inner.steps_per_epoch, inner.rows_per_step

    def class_id(self, step: int, index: int) -> None:
        return None

    def microbatch(self, step: int, index: int) -> Batch:
        batch = self._inner.microbatch(step, index)
        ids = batch.lineage.row_ids
        of_class = torch.tensor([1, 0, 2])[CLASS_OF[ids - 100]]
        return Batch(batch.data, Lineage(ids, of_class))


def test_a_source_whose_steps_mix_classes_is_regrouped(tmp_path: Path) -> None:
    """By its own numbers of classes."""
    seen = Seen()
    made = fitted(Together(), observers=[seen])
    assert not made.plan.holds(Promise.ELASTIC)
    assert made.plan.holds(Promise.RESUME)
    own = run(None)
    with own:
        for outcome in seen.steps:
            ids = torch.cat([b.lineage.row_ids for b in outcome.batches]) - 100
            order = ids[CLASS_OF[ids].sort(stable=True).indices]
            assert len(ids) == STEP
            own.step(chosen(order))
    torch.testing.assert_close(weights(own), weights(made), rtol=1e-4, atol=1e-6)
    stopped = run(Together(), folder=tmp_path)
    with stopped:
        for _ in range(4):
            stopped._take(*stopped._next(stopped.feed))  # type: ignore[arg-type, misc]
        stopped.save()
    again = fitted(Together(), folder=tmp_path)
    assert torch.equal(weights(again), weights(made))
    told = {(c.class_name, c.region) for c in contributions(tmp_path / "ledger").cells if c.weight}
    assert told == {("open", "body"), ("open", "head"), ("doubtful", "head")}


# ------------------------------------------------------------------------------------------------------------ refused


def as_they_come(batches: Any) -> Any:
    class Given:
        def __iter__(self) -> Iterator[Any]:
            return iter(batches)

        def __len__(self) -> int:
            return len(batches)

    return Given()


NUMBERED = Batch((INPUTS[:10], TARGETS[:10]), Lineage.of_rows(0, 10), 0)


@pytest.mark.parametrize("given", [(INPUTS[:10], TARGETS[:10]), NUMBERED, {"input": INPUTS, "target": TARGETS}])
def test_batches_without_lineage_are_refused(given: Any) -> None:
    for data, when in (([given], "made"), ((given, given), "made"), (as_they_come([chosen(range(10)), given]), "run")):
        if when == "made":
            with pytest.raises(PlanError, match=rf"A policy needs rows with classes, and {type(data).__name__} has"):
                run(data)
            continue
        made = run(data)
        with pytest.raises(PlanError, match="A policy needs rows with classes, and Given has none"):
            made.fit()
        assert made.clock.step == 1


def relabelled(class_id: int) -> Batch:
    batch = chosen(range(10))
    kinds = batch.lineage.class_ids.clone()
    kinds[3] = class_id
    return Batch(batch.data, Lineage(batch.lineage.row_ids, kinds))


def test_what_cannot_be_regrouped_is_refused() -> None:
    for batch, options, error, why in (
        (chosen(range(10)), {"num_microbatches": 2}, PlanError, "10 rows of 3 classes for V = 2"),
        (chosen(range(3)), {}, PlanError, "3 rows of . classes for V = 4"),
        (relabelled(3), {}, PlanError, "names no class"),
        (relabelled(-1), {}, PlanError, "-1 doesn't wrap"),
        (Batch((INPUTS[:9], TARGETS[:9]), chosen(range(10)).lineage), {}, BatchError, "9 rows, and its lineage 10"),
        (
            chosen(range(10)),
            {"loss": lambda m, d: nn.functional.cross_entropy(m(d[0]), d[1]), "policy": ONES},
            BatchError,
            "weigh labels unequally",
        ),
    ):
        made = run(as_they_come([batch]), **options)
        with pytest.raises(error, match=why):
            made.fit()
        assert made.clock.step == 0


def test_a_class_with_one_row_and_batch_norm_is_explained() -> None:
    rows = torch.cat([(CLASS_OF == 2).nonzero()[:7, 0], (CLASS_OF == 1).nonzero()[:1, 0]])
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(ValueError, match="more than 1 value") as raised:
        fitted([chosen(rows)], model=model, policy=ONES)
    assert "one class may have a single row in a step" in raised.value.__notes__[0]


def test_rows_that_are_regrouped_cannot_wait() -> None:
    phases = "phases:\n  - {name: warm, until: 4ba}\n  - {name: main}\n"
    text = POLICY.replace("rules:", phases + "rules:") + "  - {class: closed, phase: warm, decision: defer}\n"
    text += "  - {class: closed, phase: main, weight: 1}\n"
    for data in (loader(), Together()):
        with pytest.raises(PlanError, match=r"defers closed, and a step's rows are regrouped .* can't wait"):
            run(data, policy=text)


def test_a_run_whose_length_nobody_knows_is_refused() -> None:
    with pytest.raises(PlanError, match="number of steps is known"):
        run((batch for batch in [chosen(range(10))]), budget="2ep")
    with pytest.raises(DataError, match="gives rows one by one"):
        run({"input": INPUTS})


def test_rows_of_one_class_that_do_not_divide_are_cut_unlike() -> None:
    """Which classes a batch of a loader happens to hold is nothing that a run should end by."""
    pure = (CLASS_OF == 0).nonzero().flatten()[:10]
    parts = split_batch(chosen(pure), 4, by_class=True)
    assert [part.num_rows for part in parts] == [3, 3, 2, 2]
    assert torch.cat([part.lineage.row_ids for part in parts]).tolist() == (pure + 100).tolist()


def test_a_step_of_nothing_but_tombstones_teaches_nothing() -> None:
    gone = chosen(range(10))
    gone = Batch((torch.zeros(10, 4), torch.zeros(10, dtype=torch.int64)), gone.lineage.without(torch.ones(10) > 0))
    made = run([gone], optimizers=[SGD(lr=0.1, weight_decay=0.5)], budget="1ba")
    before = weights(made)
    made.fit()
    assert torch.equal(before, weights(made))
    assert bool((gone.lineage.row_ids == TOMBSTONE).all())
