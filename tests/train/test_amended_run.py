"""A governed run that goes on with another policy: refused, or by name, with an entry by which its steps are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from cosmati import InMemory, RunConfig, Taxonomy, Trainer, load_policy
from cosmati.core.batch import Batch, Lineage
from cosmati.core.loss import Classification
from cosmati.core.plan import Promise
from cosmati.errors import CheckpointError, PlanError, RefutedError
from cosmati.ledger.query import contributions, direct_write_exclusion
from cosmati.ledger.verify import verify_ledger
from cosmati.optim import AdamW
from cosmati.train.observers.observer import Observer
from cosmati.train.outcome import StepOutcome
from cosmati.train.run.checkpoints import _digests, list_checkpoints

pytestmark = pytest.mark.long

GENERATOR = torch.Generator().manual_seed(0)
ROWS = torch.randn(64, 4, generator=GENERATOR), torch.randint(3, (64,), generator=GENERATOR)
CLASS_IDS = torch.arange(64) % 2
TAXONOMY = {"name": "two", "version": "1", "classes": {"cold": "cold rows", "hot": "hot rows"}}
POLICY = """
version: 1
taxonomy: two
regions:
  body: {{params: ["0.*"]}}
  head: {{params: ["2.*"]}}
rules:
  - {{class: "**", weight: 1}}
  - {{class: cold, region: body, weight: {weight}}}
"""


class StopAt(Observer):
    """Asks the trainer to stop after a step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.trainer: Trainer | None = None

    def on_step(self, outcome: StepOutcome) -> None:
        if outcome.clock.step == self.step and self.trainer is not None:
            self.trainer.stop()


def run(
    folder: Path, weight: float = 0, stop_at: int = -1, classes: Any = None, text: str = "", **config: Any
) -> Trainer:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    taxonomy = Taxonomy.from_mapping(TAXONOMY | ({} if classes is None else {"classes": classes}))
    names = ("cold", "hot")
    stop = StopAt(stop_at)
    settings = {"budget": "6ba", "num_threads": 1, "num_microbatches": 4, "run_folder": folder, "details_every": 1}
    stop.trainer = Trainer(
        model,
        Classification(3),
        InMemory(ROWS, 16, CLASS_IDS, names),
        optimizers=[AdamW(lr=0.01)],
        policy=load_policy(text or POLICY.format(weight=weight)),
        taxonomy=taxonomy,
        observers=[stop],
        config=RunConfig(**settings | config),
    )
    return stop.trainer


@pytest.fixture(scope="module")
def once_stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("governed") / "run"
    assert run(folder, stop_at=3).fit().outcome == "stopped"
    return folder


@pytest.fixture
def stopped(once_stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(once_stopped, tmp_path / "run"))


def test_another_policy_is_refused_unless_it_is_asked_for(stopped: Path) -> None:
    with pytest.raises(CheckpointError, match=r"policy .*, was .*RunConfig\(change=\('policy',\)\)"):
        run(stopped, weight=0.5).fit()
    assert run(stopped).fit().outcome == "completed"
    assert direct_write_exclusion(stopped / "ledger", "cold", "body").num_steps_scanned == 6


def test_steps_are_read_by_the_policy_that_was_in_force(stopped: Path) -> None:
    trainer = run(stopped, weight=0.5, change=("policy",))
    assert trainer.fit().outcome == "completed"
    report = verify_ledger(stopped / "ledger")
    assert (report.num_steps, report.has_ended) == (6, True)
    with pytest.raises(RefutedError, match=r"step 3.*weight 0\.5 in 'body'"):
        direct_write_exclusion(stopped / "ledger", "cold", "body")
    cell = next(c for c in contributions(stopped / "ledger").cells if (c.class_name, c.region) == ("cold", "body"))
    # Three steps of two microbatches of four rows, at half weight.
    assert (cell.num_steps, cell.num_microbatches, cell.weight) == (3, 6, 12.0)
    (line,) = [json.loads(text) for text in (stopped / "changes.jsonl").read_text().splitlines()]
    assert line["step"] == 3
    assert [name for name, _, _ in line["changes"]] == ["policy"]


def test_a_crash_before_the_first_step_and_another_policy(tmp_path: Path) -> None:
    trainer = run(tmp_path / "run", weight=0)
    with pytest.raises(ZeroDivisionError), trainer:
        raise ZeroDivisionError
    with pytest.raises(CheckpointError, match="policy"):
        run(tmp_path / "run", weight=0.5).fit()
    run(tmp_path / "run", weight=0.5, change=("policy",)).fit()
    with pytest.raises(RefutedError, match=r"weight 0\.5 in 'body'"):
        direct_write_exclusion(tmp_path / "run" / "ledger", "cold", "body")


def test_going_back_to_an_earlier_checkpoint_brings_its_policy_back(stopped: Path) -> None:
    run(stopped, weight=0.5, change=("policy",), stop_at=5).fit()
    shutil.rmtree(stopped / "checkpoints" / "step-00000005")
    assert run(stopped, weight=0).fit().outcome == "completed"
    verify_ledger(stopped / "ledger")
    cell = next(c for c in contributions(stopped / "ledger").cells if (c.class_name, c.region) == ("cold", "body"))
    assert cell.num_microbatches == 0
    # What was superseded did happen, and a statement is about all that happened.
    with pytest.raises(RefutedError, match=r"weight 0\.5"):
        direct_write_exclusion(stopped / "ledger", "cold", "body")


def test_one_more_class_in_the_taxonomy_is_another_run(stopped: Path) -> None:
    """Ids shift: cold's rows would teach as another class's."""
    more = {"aaa": "comes first", "cold": "cold rows", "hot": "hot rows"}
    with pytest.raises(CheckpointError, match="taxonomy"):
        run(stopped, classes=more).fit()


def test_exchanged_weights_are_found_though_their_digests_were_made_anew(stopped: Path) -> None:
    newest = list_checkpoints(stopped / "checkpoints")[0]
    weights = load_file(newest / "model.safetensors")
    weights["2.bias"] += 1e-6
    save_file(weights, newest / "model.safetensors")
    (newest / "digests.json").write_text(json.dumps(_digests(newest)))
    with pytest.raises(CheckpointError, match="isn't one that the ledger has signed"):
        run(stopped).fit()


def test_a_renamed_folder_keeps_its_log(stopped: Path) -> None:
    moved = stopped.rename(stopped.parent / "another name+")
    assert run(moved).fit().outcome == "completed"
    report = verify_ledger(moved / "ledger")
    assert (report.origin, report.num_steps) == ("cosmati/run", 6)


def test_entry_0_says_what_an_auditor_asks(stopped: Path) -> None:
    first = json.loads((stopped / "ledger" / "details.jsonl").read_text().splitlines()[0])
    assert first["parameters"] == [["0.weight", "0.bias"], ["2.weight", "2.bias"]]
    assert first["policy_text"]["taxonomy"] == "two"
    assert first["recipe"]["settings.seed"] == "0"
    assert first["recipe"]["optimizers.0.lr"] == "0.01"


# ------------------------------------------------------------------------------------------------ no class by accident


def batch(class_ids: Any, class_id: int | None = None) -> Batch:
    ids = torch.as_tensor(class_ids)
    return Batch((ROWS[0][: len(ids)], ROWS[1][: len(ids)]), Lineage(torch.arange(len(ids)), ids), class_id)


def test_rows_without_lineage_are_of_no_class(tmp_path: Path) -> None:
    with run(tmp_path / "run") as trainer, pytest.raises(PlanError, match=r"have no lineage.*no class 'unknown'"):
        trainer.step((ROWS[0][:16], ROWS[1][:16]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (batch([-1] * 16), "Class id -1 names no class"),
        (batch([2] * 16), "Class id 2 names no class"),
        (batch([1] * 16, class_id=0), r"classes \[0, 1\] \(class_id = 0"),
    ],
)
def test_ids_are_checked_and_contradictions_refused(tmp_path: Path, given: Batch, message: str) -> None:
    with run(tmp_path / "run") as trainer, pytest.raises(PlanError, match=message):
        trainer.step(given)


def test_a_source_that_announces_another_class_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from cosmati.data.in_memory import InMemoryOrder

    usual = InMemoryOrder.class_id
    monkeypatch.setattr(InMemoryOrder, "class_id", lambda order, step, index: 1 - (usual(order, step, index) or 0))
    with pytest.raises(PlanError, match=r"announces a microbatch of class .*, and its rows' lineage says"):
        run(tmp_path / "run").fit()


def test_rows_of_unknown_class_teach_as_unknown() -> None:
    classes = {"cold": "cold rows", "unknown": "nobody knows"}
    policy = """
version: 1
taxonomy: two
regions:
  body: {params: ["0.*"]}
  head: {params: ["2.*"]}
rules:
  - {class: "**", weight: 1}
  - {class: unknown, region: body, weight: 0}
"""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    before = [p.detach().clone() for p in model.parameters()]
    trainer = Trainer(
        model,
        Classification(3),
        optimizers=[AdamW(lr=0.01)],
        policy=load_policy(policy),
        taxonomy=Taxonomy.from_mapping(TAXONOMY | {"classes": classes}),
        config=RunConfig(budget="2ba", num_threads=1, num_microbatches=2),
    )
    with trainer:
        trainer.step((ROWS[0][:16], ROWS[1][:16]))
    moved = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
    assert moved == [False, False, True, True]


def test_a_folder_with_a_space_in_its_name(tmp_path: Path) -> None:
    run(tmp_path / "my new + run", budget="2ba").fit()
    assert verify_ledger(tmp_path / "my new + run" / "ledger").origin == "cosmati/my-new-run"


# -------------------------------------------------------------------------- promises of a run that went by two policies

COLD = ("cold", "body")


def because(trainer: Trainer, pair: tuple[str, str] = COLD) -> str:
    """What broke the promise of a class and a region; empty where it holds."""
    (found,) = [g for g in trainer.plan.guarantees if g.pair == pair]
    return "" if found.holds else found.because


def test_what_an_earlier_policy_let_a_class_teach_is_no_promise(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, weight=0.5, stop_at=3).fit()
    second = run(folder, change=("policy",), stop_at=4)
    second.fit()
    assert "steps 0 to 2" in because(second)
    assert second.plan.holds(Promise.RESUME)
    third = run(folder)
    third.fit()
    assert because(third) == because(second)
    record = json.loads((folder / "run.json").read_text())
    assert [g["holds"] for g in record["guarantees"] if g["name"] == "no_direct_write(cold, body)"] == [False]


def test_there_and_back_again(stopped: Path) -> None:
    run(stopped, weight=0.5, change=("policy",), stop_at=5).fit()
    back = run(stopped, change=("policy",))
    back.fit()
    assert "steps 3 to 4" in because(back)
    with pytest.raises(RefutedError):
        direct_write_exclusion(stopped / "ledger", "cold", "body")


def test_a_policy_under_which_nothing_was_trained_breaks_nothing(stopped: Path) -> None:
    same = run(stopped, stop_at=4)
    same.fit()
    assert because(same) == ""
    early = run(stopped.parent / "early", weight=0.5)
    with pytest.raises(ZeroDivisionError), early:
        raise ZeroDivisionError
    later = run(stopped.parent / "early", change=("policy",))
    later.fit()
    assert because(later) == ""


def test_a_region_by_another_name_is_known_by_its_parameters(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, text=POLICY.format(weight=0.5).replace("body", "stem"), stop_at=3).fit()
    named = run(folder, change=("policy",))
    named.fit()
    assert "steps 0 to 2" in because(named)
    assert "'stem'" in because(named)
