"""What the ledger says that rows contributed is what happened."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.batch import Batch, Data
from cosmati.core.loss import Classification, Loss, LossFunction
from cosmati.core.method import Method
from cosmati.data.in_memory import InMemory
from cosmati.errors import RefutedError, TamperError
from cosmati.ledger.query import VerifiedLedger, contributions, direct_write_exclusion, learnt_weights
from cosmati.ledger.reader import Scan, ScannedEntry, read_head, read_verifier_key
from cosmati.methods import SAM, LayerFreezing, SelectiveBackprop
from cosmati.optim import SGD, Optimizer
from cosmati.records.ledger import MicrobatchCell, StepEntry
from cosmati.train.assembly import SubStep
from cosmati.train.config import RunConfig
from cosmati.train.observers import Observer, StepReport
from cosmati.train.trainer import Trainer
from tests.ledger.row_oracle import Rows
from tests.train.promises.swapped import TAXONOMY, Case

CASE = Case(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), ("0.*",), ("2.*",))
NUM_ROWS = 64


def _deep() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))


class Movements(Observer):
    """The parameters after each step, as they are."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.seen = [self._now()]
        self.reports: list[StepReport] = []

    def _now(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def on_step(self, report: StepReport) -> None:
        self.seen.append(self._now())
        self.reports.append(report)

    def steps_that_moved(self, prefix: str) -> int:
        return sum(
            any(not torch.equal(one[n], other[n]) for n in one if n.startswith(prefix))
            for one, other in zip(self.seen, self.seen[1:], strict=False)
        )


def _source() -> InMemory:
    generator = torch.Generator().manual_seed(3)
    rows = (torch.randn(NUM_ROWS, 6, generator=generator), torch.randint(3, (NUM_ROWS,), generator=generator))
    return InMemory(rows, 16, class_ids=(torch.arange(NUM_ROWS) % 2), class_names=("open", "doubtful"))


def _run(
    folder: Path,
    methods: Sequence[Method],
    loss: LossFunction | Sequence[SubStep] | None = None,
    optimizers: Sequence[Optimizer] = (SGD(lr=0.1),),
    case: Case = CASE,
    source: InMemory | None = None,
) -> Movements:
    torch.manual_seed(0)
    model = case.build()
    seen = Movements(model)
    Trainer(
        model,
        loss or Classification(3),
        source or _source(),
        optimizers=optimizers,
        methods=methods,
        policy=case.policy(),
        taxonomy=TAXONOMY,
        observers=[seen],
        config=RunConfig(budget="4ep", num_microbatches=4, num_threads=1, run_folder=folder, details_every=1),
    ).fit()
    return seen


def _steps(folder: Path) -> list[tuple[StepEntry, dict[str, Any]]]:
    ledger = folder / "ledger"
    items = list(Scan(ledger, read_head(ledger, read_verifier_key(ledger))))
    return [(i.entry, json.loads(i.details or "{}")) for i in items if isinstance(i.entry, StepEntry)]


def test_a_frozen_region_was_taught_only_where_it_moved(tmp_path: Path) -> None:
    seen = _run(tmp_path, [LayerFreezing(freeze_start=0.1)], case=Case(_deep, ("0.*",), ("[245].*",)))
    moved = {region: seen.steps_that_moved(prefix) for region, prefix in (("near_input", "0."), ("near_output", "5."))}
    assert 0 < moved["near_input"] < moved["near_output"] == 16
    table = contributions(tmp_path / "ledger")
    found = {(c.class_name, c.region): c for c in table.cells}
    assert {region: found["open", region].num_steps for region in moved} == moved
    for (name, region), cell in found.items():
        # Two microbatches of four rows of each class in each step; the denied class teaches nothing near the input.
        taught = 0 if (name, region) == ("doubtful", "near_input") else moved[region]
        assert (cell.num_steps, cell.num_microbatches, cell.num_rows, cell.weight) == (
            taught,
            2 * taught,
            8 * taught,
            8.0 * taught,
        )
        assert cell.num_norms == 2 * taught


def test_a_learning_region_is_the_usual_case_and_takes_no_room(tmp_path: Path) -> None:
    _run(tmp_path, [])
    assert all(not {"sub_steps", "kept_rows"} & details.keys() for _, details in _steps(tmp_path))


def test_norms_are_those_of_the_pass_that_was_applied(tmp_path: Path) -> None:
    """Against the gradients of SAM's second point, by hand."""
    seen = _run(tmp_path, [SAM(rho=0.5)])
    model, before = CASE.build(), seen.seen[0]
    source = _source().order(seed=0, num_microbatches=4, route_pure=True)
    batches = [source.microbatch(0, m) for m in range(4)]

    def gradients(weights: dict[str, Tensor], only: Sequence[Batch]) -> dict[str, Tensor]:
        model.load_state_dict(weights)
        model.zero_grad()
        for batch in only:
            (nn.functional.cross_entropy(model(batch.data[0]), batch.data[1], reduction="sum")).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    open_only = gradients(before, [b for b in batches if b.class_id == 0])
    everyone = gradients(before, batches)
    root = {n: open_only[n] / 8 if n.startswith("0.") else everyone[n] / 16 for n in before}
    norm = torch.cat([g.flatten() for g in root.values()]).norm()
    away = {name: value + 0.5 * root[name] / norm for name, value in before.items()}
    logged = _steps(tmp_path)[0][1]["gradient_norm"]
    for m, batch in enumerate(batches):
        leaf = gradients(away, [batch])
        near_output = torch.cat([leaf[n].flatten() for n in leaf if n.startswith("2.")]).norm() / 16
        assert logged[str(m)][1] == pytest.approx(float(near_output), rel=1e-4)


def _half(scale: float) -> LossFunction:
    def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Loss:
        found = Classification(3)(model, data)
        return Loss(found.sum * scale, found.weight * scale)

    return loss


@pytest.mark.long
def test_each_sub_steps_weight_counts_where_it_taught(tmp_path: Path) -> None:
    turns = [SubStep("low", _half(1.0), "0.*"), SubStep("high", _half(0.25), "2.*")]
    seen = _run(tmp_path, [], turns, [SGD(lr=0.1, parameters="0.*"), SGD(lr=0.1, parameters="2.*")])
    assert seen.steps_that_moved("0.") == seen.steps_that_moved("2.") == 16
    found = {(c.class_name, c.region): c for c in contributions(tmp_path / "ledger").cells}
    assert found["open", "near_input"].weight == 16 * 8
    assert found["open", "near_output"].weight == found["doubtful", "near_output"].weight == 16 * 8 * 0.25
    assert found["doubtful", "near_input"].weight == 0
    assert found["open", "near_input"].num_norms == found["open", "near_output"].num_norms == 32
    assert direct_write_exclusion(tmp_path / "ledger", "doubtful", "near_input").num_steps_scanned == 16


def test_rows_without_any_label_have_taught_nothing(tmp_path: Path) -> None:
    """All labels of one class are ignored, of the other none: one may state of the first that it was excluded."""
    whole = Classification(3)

    def loss(model: nn.Module, data: Data) -> Loss:
        return whole(model, (data[0], torch.where(data[2] == 1, -100, data[1])))

    source = _source()
    labelled = replace(source, data=(*source.data, source.class_ids))
    _run(tmp_path, [], loss, source=labelled)
    found = {(c.class_name, c.region): c for c in contributions(tmp_path / "ledger").cells}
    for region in ("near_input", "near_output"):
        cell = found["doubtful", region]
        assert (cell.num_steps, cell.num_microbatches, cell.num_rows, cell.weight, cell.num_norms) == (0, 0, 0, 0, 0)
        assert (found["open", region].num_steps, found["open", region].weight) == (16, 16 * 8)
        statement = direct_write_exclusion(tmp_path / "ledger", "doubtful", region)
        assert statement.num_class_microbatches == 32
        with pytest.raises(RefutedError, match=r"weight 1\.0 in"):
            direct_write_exclusion(tmp_path / "ledger", "open", region)


def test_commitments_to_selected_rows_can_be_opened(tmp_path: Path) -> None:
    """By the documented form, from the data's order, the keys and the slots; nothing of the library."""
    _run(tmp_path, [SelectiveBackprop(start=0.0, end=1.0, keep=0.5, interrupt=2)])
    own, names = Rows(tmp_path), VerifiedLedger(tmp_path / "ledger").tables[0].classes
    order = _source().order(seed=0, num_microbatches=4, route_pure=True)
    num_opened, num_selected = 0, 0
    for step, (entry, details) in enumerate(_steps(tmp_path)):
        for m, cell in enumerate(entry.microbatches):
            ids = order.microbatch(step, m).lineage.row_ids.numpy()
            slots = details.get("kept_rows", {}).get(str(m), list(range(len(ids))))
            num_selected += len(slots) < len(ids)
            assert cell.num_rows == len(slots)
            rows = [(i, int(ids[slot])) for i, slot in enumerate(slots)]
            num_opened += own.commitment(names[cell.class_id], step, m, rows) == cell.row_commitment
    assert num_opened == 64
    assert num_selected == 32


@pytest.mark.parametrize(
    "told",
    [
        {"regions": [0], "weights": [1, 1]},
        [{"regions": [2], "weights": [1.0, 1.0]}],
        [{"regions": [True], "weights": [1.0, 1.0]}],
        [{"regions": [0], "weights": [1.0]}],
        [{"regions": [0], "weights": [1.0, -1.0]}],
        [{"weights": [1.0, 1.0]}],
        [3],
    ],
)
def test_sub_steps_that_make_no_sense_are_refused(told: object) -> None:
    cell = MicrobatchCell(0, 0, 0, 0, 4, 4.0, bytes(32))
    entry = StepEntry(0, 0, bytes(32), bytes(32), None, (cell, cell))

    def read(value: object) -> list[list[float | None]]:
        details = json.dumps({"sub_steps": value}).encode()
        return learnt_weights(ScannedEntry(1, b"", entry, details), entry, 2)

    with pytest.raises(TamperError, match="sub-step"):
        read(told)
    assert read([{"regions": [1], "weights": [1.0, 2.5]}]) == [[None, 1.0], [None, 2.5]]
