"""Recipes: one setting changed by name, initial weights from the seed, and the quickstart's parts."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from cosmati.core.loss import Classification
from cosmati.data.in_memory import InMemory
from cosmati.errors import PlanError
from cosmati.methods import LabelSmoothing, MixUp
from cosmati.models.mlp import MLP
from cosmati.optim import SGD, Cosine
from cosmati.provenance.taxonomy import software_licences
from cosmati.recipes.digits import ARM_METHODS, DigitsTask, digits_baseline, digits_with
from cosmati.recipes.language import LanguageTask, python_gpt_baseline, python_gpt_composed
from cosmati.recipes.quickstart import (
    QuickstartSize,
    Trial,
    best_rate,
    digits_study,
    language_study,
    quickstart_policy,
    search_record,
)
from cosmati.recipes.recipe import Recipe, parse_setting
from cosmati.records.run import RunRecord
from cosmati.records.study import ChecklistItem, StudyRecord
from cosmati.routing.policy import compile_policy
from cosmati.routing.regions import partition_parameters
from cosmati.study.checks import checks_of, is_as_hard
from cosmati.train.config import RunConfig
from cosmati.train.evaluation import Evaluation, accuracy
from tests.store.samples import all_runs, indexed


def rows() -> InMemory:
    return InMemory((torch.arange(48.0).reshape(16, 3) / 48, torch.arange(16) % 2), 4)


def small(**changes: object) -> Recipe:
    settings = {
        "name": "small",
        "model": lambda: MLP((3, 4, 2)),
        "loss": Classification(2),
        "data": rows,
        "optimizers": (SGD(lr=0.1, schedule=Cosine()),),
        "methods": (LabelSmoothing(), MixUp()),
        "config": RunConfig(budget="3ba"),
    }
    return Recipe(**{**settings, **changes})  # type: ignore[arg-type]


def weights(model: nn.Module) -> list[list[float]]:
    return [p.detach().flatten().tolist() for p in model.parameters()]


def test_initial_weights_follow_from_the_seed_and_leave_the_generator_alone() -> None:
    before = torch.get_rng_state()
    first, second = small().build_model(), small().build_model()
    other = small().with_settings({"config.seed": 1}).build_model()
    assert weights(first) == weights(second)
    assert weights(first) != weights(other)
    assert torch.equal(before, torch.get_rng_state())


def test_a_recipe_trains_in_its_folder(tmp_path: Path) -> None:
    trainer = small().trainer(run_folder=tmp_path / "run")
    assert trainer.fit().clock.step == 3
    assert (tmp_path / "run" / "run.json").exists()


def test_a_recipe_says_its_task_in_the_record_and_in_nothing_that_makes_it_another(tmp_path: Path) -> None:
    def run_of(name: str, **changes: object) -> RunRecord:
        small(name=name, **changes).trainer(run_folder=tmp_path / name).fit()
        return RunRecord.from_json((tmp_path / name / "run.json").read_text())

    plain = run_of("plain")
    told = [run_of("own", task="Even or odd"), run_of("set", config=RunConfig(budget="3ba", task="Even or odd"))]
    assert {one.digests["plan"] for one in told} == {plain.digests["plan"]}
    assert [json.loads(one.recipe_text).get("task") for one in (plain, *told)] == [None, "Even or odd", "Even or odd"]
    assert small(task="Even or odd").text == small().text
    assert small(config=RunConfig(budget="3ba", task="Even or odd")).text == small().text
    with indexed(tmp_path) as index:
        tasks = {run.name: run.task for run in all_runs(index).values()}
    assert tasks == {"plain": "plain", "own": "Even or odd", "set": "Even or odd"}


def test_name_and_task_are_settings() -> None:
    assert small().with_settings({"task": "Even or odd", "name": "other"}).task == "Even or odd"


def test_the_quickstarts_studies_and_their_runs_have_one_task() -> None:
    size = QuickstartSize()
    trials = [Trial(arm, 0.1, 1.0) for arm in ("baseline", "composition")]
    assert language_study(size, trials).task == python_gpt_composed(size.language).task
    assert digits_study(size).task == digits_baseline(size.digits).task


def test_settings_change_what_they_name_and_nothing_else() -> None:
    recipe = small()
    changed = recipe.with_settings(
        {"config.seed": 3, "methods.1.alpha": 0.3, "optimizers.0.schedule.warmup": "2ba", "config.run_folder": "runs/x"}
    )
    assert changed == dataclasses.replace(
        recipe,
        config=dataclasses.replace(recipe.config, seed=3, run_folder=Path("runs/x")),
        methods=(LabelSmoothing(), MixUp(alpha=0.3)),
        optimizers=(SGD(lr=0.1, schedule=Cosine(warmup="2ba")),),
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("config.sed", 1, "Did you mean seed"),
        ("config.seed", "many", "config.seed='many' isn't possible"),
        ("config.precision", "float8", "isn't possible"),
        ("config.num_microbatches", 3, "power of two"),
        ("methods.7.alpha", 1, "2 entries are counted from 0"),
        ("methods.0", 1, "Name one of them"),
        ("config.seed.x", 1, "which has none"),
        ("nothing", 1, "has no setting 'nothing'. It has name"),
        ("optimizers.0.schedule", "cosine", "can't be given as text"),
        ("loss", "mse", "can't be given as text"),
    ],
)
def test_settings_that_cannot_be_say_why(name: str, value: object, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        small().with_settings({name: value})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b=3", ("a.b", 3)),
        ("a=1e-3", ("a", 1e-3)),
        ("a=true", ("a", True)),
        ("a=3ep", ("a", "3ep")),
        ("a=b=c", ("a", "b=c")),
    ],
)
def test_settings_are_read_as_json_or_text(text: str, expected: tuple[str, object]) -> None:
    assert parse_setting(text) == expected


@pytest.mark.parametrize("text", ["seed", "=3"])
def test_a_setting_without_a_name_or_value_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="name=value"):
        parse_setting(text)


def test_the_text_tells_recipes_apart_but_not_seeds() -> None:
    recipe = small()
    assert recipe.text == recipe.with_settings({"config.seed": 9}).text
    for name, value in (("methods.1.alpha", 0.3), ("optimizers.0.lr", 0.2), ("config.budget", "4ba")):
        assert recipe.with_settings({name: value}).text != recipe.text


def test_the_text_speaks_of_virtual_shards_where_there_are_any_and_never_of_ranks() -> None:
    assert "virtual_shards" not in small().text
    cut = small().with_settings({"config.virtual_shards": 4})
    assert '"virtual_shards": 4' in cut.text
    assert cut.with_settings({"config.tensor_parallel": 2}).text == cut.text


@pytest.mark.parametrize("other", [{"virtual_shards": 4}, {"parallel_styles": {"*": "colwise"}}])
@pytest.mark.parametrize("is_first", [True, False])
def test_settings_that_go_together_only_come_in_any_order(other: dict[str, object], is_first: bool) -> None:
    cut = {f"config.{name}": value for name, value in other.items()}
    degree = {"config.tensor_parallel": 2}
    recipe = small().with_settings(cut | degree if is_first else degree | cut)
    assert recipe.config.tensor_parallel == 2
    with pytest.raises(PlanError, match=r"config\.tensor_parallel=2: .*can't share virtual_shards=None"):
        small().with_settings({**degree, "config.seed": 3})


def test_the_text_of_a_partial_is_the_same_in_every_process() -> None:
    first, second = (small(data=partial(InMemory, rows_per_step=size)).text for size in (4, 8))
    assert '"data": "InMemory(rows_per_step=4)"' in first
    assert first != second
    assert " at 0x" not in first


def test_the_policy_of_the_quickstart_keeps_psf_out_of_what_is_near_the_input() -> None:
    policy = quickstart_policy()
    regions = partition_parameters(python_gpt_composed(LanguageTask()).build_model(), policy.regions)
    compiled = compile_policy(policy, taxonomy=software_licences(), regions=regions, num_steps=100)
    psf = compiled.classes.index("open/psf")
    for phase in range(2):
        got = dict(zip(compiled.regions, compiled.weight[psf][phase], strict=True))
        assert got == {"embedding": 0, "near_input": 0, "near_output": 1, "head": 1}
    assert set(compiled.decision[compiled.classes.index("unknown")]) == {"reject"}


def test_the_best_rate_is_the_arms_own() -> None:
    trials = [Trial("a", 1, 3.0), Trial("a", 2, 2.0), Trial("b", 3, 1.0)]
    assert (best_rate(trials, "a"), best_rate(trials, "b")) == (2, 3)


def checklist(size: QuickstartSize, best: float = 2.0) -> dict[str, ChecklistItem]:
    """What the language study's page lists, its runs left out, where the best of the rates 1, 2, 3 is this one."""
    trials = [
        Trial(arm, lr, abs(lr - best), size.search_steps) for arm in ("baseline", "composition") for lr in (1, 2, 3)
    ]
    study = language_study(size, trials)
    record = StudyRecord(
        name=study.name,
        task=study.task,
        quality_name=study.quality_name,
        higher_is_better=False,
        unit="",
        baseline_arm="baseline",
        arms=tuple(arm.record(name) for name, arm in study.arms.items()),
        runs=(),
        checklist=study.checklist,
        hardware="",
        price_per_hour=None,
        command="",
        notes="",
    )
    return {item.name: item for item in checks_of(record)}


def test_the_checklist_is_read_from_trials_and_recipes() -> None:
    small = LanguageTask(sequence_length=32, rows_per_step=8, width=16, num_blocks=1)
    met, edge = (checklist(QuickstartSize(language=small), best) for best in (2.0, 1.0))
    inside = "Optimum inside of what was searched"
    assert (met[inside].met, edge[inside].met) == (True, False)
    searched = met["Opponent searched as hard as the arms"]
    assert searched.met
    assert "baseline: 3 runs, 3 settings, 360 steps, over AdamW's learning rate 1, 2, 3" in searched.note
    assert "composition: 3 runs, 3 settings, 360 steps, over Muon's learning rate 1, 2, 3" in searched.note
    assert not met["Batch size, ties and clipping searched"].met
    assert met["Settings chosen on seeds of their own"].note == "searched on seed 100"
    assert met["Decoupled weight decay"].note == "0.01 times the learning rate, on matrices only"
    assert met["Schedule fully decayed at every budget"].met
    assert not met["Mixed precision"].met
    parameters = sum(one.numel() for one in python_gpt_baseline(small).build_model().parameters())
    enough = math.ceil(20 * parameters / (32 * 8))
    for steps, is_met in ((enough, True), (enough - 1, False)):
        size = checklist(QuickstartSize(language=small, language_steps=steps))["Scaling-law size"]
        assert size.met is is_met
        assert f"{parameters:,} parameters" in size.note


def test_the_checklist_sees_a_search_that_was_shorter() -> None:
    size = QuickstartSize()
    trials = [Trial("baseline", 1, 1.0, 120), *(Trial("composition", lr, 1.0, 120) for lr in (1, 2))]
    base, composed = (search_record(trials, arm, size) for arm in ("baseline", "composition"))
    assert not is_as_hard(base, composed)
    assert is_as_hard(composed, composed)


def test_the_aa_arm_is_the_baseline_with_seeds_of_its_own() -> None:
    study = digits_study(QuickstartSize())
    assert study.arms["aa"].recipe_text == study.arms["baseline"].recipe_text
    seeds = {name: {s for n, _, s in study.cells() if n == name} for name in study.arms}
    assert not seeds["aa"] & seeds["baseline"]
    assert all(seeds[name] == seeds["baseline"] for name in study.arms if name != "aa")


@pytest.mark.long
@pytest.mark.parametrize("name", ARM_METHODS)
def test_digits_recipes_train(name: str) -> None:
    task = DigitsTask(size=8, widths=(4,))
    plain = digits_baseline(task, num_steps=2).trainer().fit()
    run = digits_with(ARM_METHODS[name], task, num_steps=2).trainer().fit()
    assert run.clock.step == 2
    assert run.metrics != plain.metrics
    assert set(run.metrics) == {"accuracy", "cross_entropy"}


def test_the_text_tells_what_a_tasks_rows_are() -> None:
    sizes = {LanguageTask(rows_per_step=rows, max_bytes=most) for rows in (4, 16) for most in (10**6, 6 * 10**6)}
    assert len({python_gpt_baseline(task).text for task in sizes}) == len(sizes) == 4


def test_the_text_tells_what_is_measured() -> None:
    measured = [None, partial(Evaluation, (), {"a": accuracy}), partial(Evaluation, (), {"b": accuracy})]
    assert len({small(evaluation=one).text for one in measured}) == 3
