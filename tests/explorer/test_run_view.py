"""Pages of run folders: what the loop did is what the page's facts say, and what a folder lacks is said in words."""

from __future__ import annotations

import json
import math
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from cosmati import (
    Classification,
    Evaluation,
    InMemory,
    Observer,
    RunConfig,
    StepReport,
    Taxonomy,
    Trainer,
    accuracy,
    load_policy,
)
from cosmati.core.batch import Data
from cosmati.core.loss import Loss
from cosmati.errors import RunError
from cosmati.explorer.learning import denied_pairs
from cosmati.explorer.report import render_report
from cosmati.explorer.run_view import RunView, read_run
from cosmati.models.mlp import MLP
from cosmati.optim import SGD
from tests.processes import PythonProcess

pytestmark = pytest.mark.long

# Names that HTML, Plotly and Jinja would read as something else.
NAME = "<b>x</b> {{ 7*7 }} %{x} № 訓練"
TAXONOMY = Taxonomy("mine", "1", (("open/a", "one"), ("shut/b", "two"), ("shut/c", "three"), ("unseen", "none")))
POLICY = """
version: 1
taxonomy: mine
regions:
  low: {params: ["layers.0.*"]}
  high: {params: ["layers.1.*"]}
phases:
  - {name: warm, until: 0.25dur}
  - {name: main}
rules:
  - {class: "**", weight: 1}
  - {class: shut/b, region: low, weight: 0}
  - {class: shut/c, phase: warm, weight: 0.5}
  - {class: unseen, decision: reject}
"""


class Seen(Observer):
    """Keeps classes and norms of each step as the loop reports them: the oracle of what the page says."""

    def __init__(self) -> None:
        self.classes: list[tuple[str, ...]] = []
        self.norms: dict[tuple[str, str], dict[int, float]] = {}

    def on_step(self, report: StepReport) -> None:
        names = [TAXONOMY.classes[route.class_id] for route in report.routes]
        self.classes.append(tuple(names))
        assert report.norms is not None
        for name, row in zip(names, report.norms.tolist(), strict=True):
            for region, norm in zip(("low", "high"), row, strict=True):
                if not math.isnan(norm):  # absent leaves are NaN
                    by_step = self.norms.setdefault((name, region), {})
                    by_step[report.clock.step - 1] = by_step.get(report.clock.step - 1, 0.0) + norm


class Scaled:
    """A loss that gives other gradients where nobody looks: as kernels do that aren't deterministic."""

    num_classes = 2

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def __call__(self, model: nn.Module, data: Data) -> Loss:
        loss = Classification(2)(model, data)
        if not torch.is_grad_enabled() or loss.per_row is None:
            return loss
        return Loss(loss.sum * self._scale, loss.weight, loss.per_row * self._scale, loss.per_row_weight)


def trainer_in(
    folder: Path | None, *, governed: bool = True, budget: str = "40ba", scale: float = 1.0, **config: object
) -> Trainer:
    generator = torch.Generator().manual_seed(0)
    rows, targets = torch.randn(96, 6, generator=generator), torch.randint(0, 2, (96,), generator=generator)
    data = InMemory((rows, targets), 16, class_ids=torch.arange(96) % 3, class_names=TAXONOMY.classes)
    torch.manual_seed(0)
    return Trainer(
        MLP((6, 8, 2)),
        Scaled(scale),
        data,
        optimizers=[SGD(lr=0.05)],
        policy=load_policy(POLICY) if governed else None,
        taxonomy=TAXONOMY if governed else None,
        evaluation=Evaluation([(rows, targets)], {"accuracy": accuracy}),
        config=RunConfig(
            name=NAME,
            budget=budget,
            run_folder=folder,
            num_microbatches=4,
            evaluate_every="10ba",
            details_every=1,
            **config,  # type: ignore[arg-type]
        ),
    )


@pytest.fixture(scope="module")
def governed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trainer, Seen]:
    folder = tmp_path_factory.mktemp("runs") / "governed"
    trainer, seen = trainer_in(folder), Seen()
    trainer.observers.append(seen)
    trainer.fit()
    return folder, trainer, seen


def page_of(run: RunView) -> str:
    return render_report(title=run.record.recipe_name, run=run)


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "copy"))


def test_the_facts_are_those_of_the_loop(governed: tuple[Path, Trainer, Seen]) -> None:
    folder, trainer, seen = governed
    run, policy = read_run(folder), trainer.assembly.policy
    facts = run.governance
    assert policy is not None
    assert facts is not None
    assert (run.status, run.num_steps, run.warnings) == ("completed", 40, ())
    assert run.notes == (
        f"The policy {policy.policy_digest.hex()[:16]}, from step 0 on, is declared: nobody signed it.",
    )
    assert facts.classes == TAXONOMY.classes
    assert facts.regions == policy.regions
    for c, name in enumerate(facts.classes):
        for p, phase in enumerate(facts.phases):
            assert tuple(facts.weight[name][phase].values()) == policy.weight[c][p]
            assert facts.decision[name][phase] == policy.decision[c][p]
    assert list(run.schedule) == seen.classes
    series = {(s.class_name, s.region): dict(zip(s.steps, s.norms, strict=True)) for s in facts.contribution}
    assert series == seen.norms
    assert {(t.class_name, t.region): t.norm_sum for t in facts.totals if t.norm_sum} == pytest.approx(
        {key: sum(norms.values()) for key, norms in seen.norms.items()}
    )
    assert run.classes_seen == TAXONOMY.classes[:3]
    assert denied_pairs(facts.weight) == [("shut/b", "low"), ("unseen", "low"), ("unseen", "high")]
    assert [text.partition(":")[0].removeprefix("No logged step gave rows tagged ") for text in facts.exclusions] == [
        "shut/b any weight in low",
        "unseen any weight in any region",
    ]
    assert run.ledger is not None
    assert run.ledger.is_verified
    assert [step for step, _ in run.losses] == [1, 10, 20, 30, 40]
    assert run.metrics["accuracy"][-1] == (40, run.record.metrics["accuracy"])


def test_the_page_shows_the_run_with_odd_names(governed: tuple[Path, Trainer, Seen]) -> None:
    page = page_of(read_run(governed[0]))
    assert "<b>x</b>" not in page
    assert "&lt;b&gt;x&lt;/b&gt; {{ 7*7 }} %{x} № 訓練" in page
    for anchor in ("training", "plan", "policy", "schedule", "contribution", "exclusions", "ledger"):
        assert f'id="{anchor}"' in page


def test_a_run_without_a_policy_shows_what_it_has(tmp_path: Path) -> None:
    trainer_in(tmp_path / "plain", governed=False).fit()
    run = read_run(tmp_path / "plain")
    assert (run.is_governed, run.ledger, run.governance) == (False, None, None)
    page = page_of(run)
    assert "The run had no policy" in page
    assert 'data-figure="loss"' in page
    assert 'data-figure="metric-0"' in page
    assert "governance" not in page.split("<script")[0].split("<main>")[1]
    trainer_in(tmp_path / "kept", governed=False, ledger=True).fit()
    kept = read_run(tmp_path / "kept")
    assert kept.ledger is not None
    assert kept.ledger.is_verified
    assert kept.governance is None


def test_a_policy_without_a_ledger_is_a_warning(governed: tuple[Path, Trainer, Seen], tmp_path: Path) -> None:
    folder = copied(governed[0], tmp_path)
    shutil.rmtree(folder / "ledger")
    run = read_run(folder)
    assert "or it is gone" in run.warnings[0]
    assert "or it is gone" in page_of(run)


def tear_off(folder: Path) -> None:
    (folder / "ledger" / "details.jsonl").write_bytes((folder / "ledger" / "details.jsonl").read_bytes()[:-40])


def change_a_loss(folder: Path) -> None:
    path = folder / "ledger" / "details.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"loss":0.', b'"loss":1.', 1))


def lose_the_checkpoint(folder: Path) -> None:
    (folder / "ledger" / "checkpoint").unlink()


def empty_it(folder: Path) -> None:
    shutil.rmtree(folder / "ledger")
    (folder / "ledger").mkdir()


@pytest.mark.parametrize("damage", [tear_off, change_a_loss, lose_the_checkpoint, empty_it])
def test_a_damaged_ledger_is_shown_and_not_believed(
    governed: tuple[Path, Trainer, Seen], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = copied(governed[0], tmp_path)
    damage(folder)
    run = read_run(folder)
    assert run.ledger is not None
    assert run.ledger.problems
    assert (run.ledger.is_verified, run.governance, run.schedule) == (False, None, ())
    page = page_of(run)
    assert page.count('<div class="alarm" role="alert">') == 2
    assert "The ledger does not verify." in page
    assert 'data-figure="loss"' in page


@pytest.mark.parametrize("name", ["plan", "model", "policy"])
def test_a_record_that_contradicts_the_ledger_is_a_warning(
    governed: tuple[Path, Trainer, Seen], tmp_path: Path, name: str
) -> None:
    folder = copied(governed[0], tmp_path)
    record = read_run(folder).record
    changed = replace(record, digests={**record.digests, name: "ab" * 32})
    (folder / "run.json").write_text(changed.to_json(), encoding="utf-8")
    (warning,) = read_run(folder).warnings
    assert f"it names the {name} abababab" in warning


def test_broken_lines_and_missing_files_are_told(governed: tuple[Path, Trainer, Seen], tmp_path: Path) -> None:
    folder = copied(governed[0], tmp_path)
    lines = (folder / "steps.jsonl").read_text().splitlines()
    odd = ["[]", "{", json.dumps({"step": "7", "loss": 1}), json.dumps({"step": 35, "loss": None})]
    (folder / "steps.jsonl").write_text("\n".join([*lines, *odd, '{"step": 4']))
    run = read_run(folder)
    assert [step for step, _ in run.losses] == [1, 10, 20, 30, 40, 35]
    assert run.losses[-1][1] is None
    assert "3 damaged lines" in run.notes[-1]
    (folder / "steps.jsonl").unlink()
    (folder / "evaluations.jsonl").unlink()
    run = read_run(folder)
    assert any("holds no losses" in note for note in run.notes)
    assert run.metrics["accuracy"] == ((40, run.record.metrics["accuracy"]),)


class Dies(Observer):
    """Ends the run after 13 steps without a checkpoint."""

    def on_step(self, report: StepReport) -> None:
        if report.clock.step == 13:
            raise ZeroDivisionError


def test_a_resumed_run_counts_no_step_twice(tmp_path: Path) -> None:
    folder = tmp_path / "resumed"
    trainer = trainer_in(folder)
    trainer.observers.append(Dies())
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    assert read_run(folder).status == "failed"
    seen, again = Seen(), trainer_in(folder)
    again.observers.append(seen)
    again.fit()
    run = read_run(folder)
    assert run.governance is not None
    assert list(run.schedule) == seen.classes
    series = {(s.class_name, s.region): dict(zip(s.steps, s.norms, strict=True)) for s in run.governance.contribution}
    assert series == seen.norms
    assert "went on once after a break: 12 steps were run again, 12 of them with equal content" in run.notes[0]
    assert run.warnings == ()


def test_steps_that_come_out_differently_are_a_warning(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)
    trainer.observers.append(Dies())
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    trainer_in(tmp_path, scale=1.5).fit()
    (warning,) = read_run(tmp_path).warnings
    assert warning == "12 steps came out differently when they were run again: 0, 1, 2, 3, 4, 5, 6, 7 and more."


LONG_RUN = """
import sys
from pathlib import Path
from tests.explorer.test_run_view import trainer_in
trainer_in(Path(sys.argv[1]), budget="1000000ba").fit()
"""


def test_a_run_that_goes_on_and_one_that_was_killed(tmp_path: Path) -> None:
    folder = tmp_path / "long"
    process = PythonProcess(["-c", LONG_RUN, folder], cwd=Path(__file__).parents[2])
    try:
        deadline = time.monotonic() + 60
        while not (folder / "steps.jsonl").exists() or len((folder / "steps.jsonl").read_text()) < 2000:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for _ in range(5):
            going = read_run(folder)
            assert going.status == "still going"
            assert going.ledger is not None
            assert going.ledger.problems == ()
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    run = read_run(folder)
    assert run.status == "broken off"
    assert run.ledger is not None
    assert run.ledger.is_verified
    assert run.num_steps >= len(run.schedule) >= 64
    assert any("has no end yet" in note for note in run.notes)
    assert "Its process is gone without an end" in page_of(run)


def test_what_is_no_run_folder_says_where_one_is(governed: tuple[Path, Trainer, Seen], tmp_path: Path) -> None:
    folder = governed[0]
    for wrong, mend in (
        (folder / "ledger", f"Give {folder}."),
        (folder / "run.json", f"Give {folder}."),
        (folder.parent, "give one: governed."),
        (tmp_path, "run-folder"),
        (tmp_path / "nothing", "run-folder"),
    ):
        with pytest.raises(RunError, match="is no run folder") as caught:
            read_run(wrong)
        assert str(caught.value).endswith(mend) or mend in str(caught.value)
    (tmp_path / "run.json").write_bytes(b"\xff\xfe")
    with pytest.raises(RunError, match="can't be read"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(RunError, match="version"):
        read_run(tmp_path)


def test_a_folder_that_goes_while_it_is_looked_through_is_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(_folder: Path, _pattern: str) -> list[Path]:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "glob", gone)
    with pytest.raises(RunError, match="is no run folder"):
        read_run(tmp_path)
