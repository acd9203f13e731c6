"""The commands, on small things."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cosmati.cli.main import app
from cosmati.records.study import ProfileRecord, StudyRecord
from tests.study.oracles import log_quality, study

RECIPE = '''
import torch
from cosmati import Classification, InMemory, RunConfig, load_policy, software_licences
from cosmati.methods import LabelSmoothing
from cosmati.models.mlp import MLP
from cosmati.optim import SGD
from cosmati.recipes.recipe import Recipe

NAMES = software_licences().classes
POLICY = """
version: 1
taxonomy: software-licences
regions:
  low: {params: ["layers.0.*"]}
  high: {params: ["*"], exclude: ["layers.0.*"]}
rules:
  - {class: "open/**", weight: 1}
  - {class: open/psf, region: low, weight: 0}
"""

def data():
    ids = torch.tensor([NAMES.index("open/psf"), NAMES.index("open/permissive")]).repeat_interleave(16)
    return InMemory((torch.arange(96.0).reshape(32, 3) / 96, torch.arange(32) % 2), 8, class_ids=ids, class_names=NAMES)

def recipe():
    return Recipe(name="small", model=lambda: MLP((3, 4, 2)), loss=Classification(2), data=data,
                  optimizers=(SGD(lr=0.1),), methods=(LabelSmoothing(),), config=RunConfig(budget="4ba"))

def governed():
    return Recipe(name="governed", model=lambda: MLP((3, 4, 2)), loss=Classification(2), data=data,
                  optimizers=(SGD(lr=0.1),), config=RunConfig(budget="4ba", num_microbatches=2),
                  policy=load_policy(POLICY), taxonomy=software_licences())

def wrong():
    return 3

def interrupted():
    raise KeyboardInterrupt
'''

STUDY = """
from cosmati.cli.files import load_recipe
from cosmati.study.runner import Arm, Study
from pathlib import Path
import dataclasses, torch
from cosmati import Evaluation, accuracy

def start(budget, seed):
    settings = [f"config.seed={seed}", f"config.budget={round(4 * budget)}ba"]
    made = load_recipe(str(Path(__file__).with_name("recipe.py")), settings)
    data = (torch.arange(96.0).reshape(32, 3) / 96, torch.arange(32) % 2)
    return dataclasses.replace(made, evaluation=lambda: Evaluation([data], {"accuracy": accuracy})).trainer()

def study():
    return Study(name="tiny", task="none", arms={"baseline": Arm(start=start), "same": Arm(start=start)},
                 budgets=(0.5, 1.0), seeds=(0, 1), quality="accuracy", higher_is_better=True)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return path


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def succeed(*arguments: object) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: object, code: int = 1) -> str:
    result = call(*arguments)
    assert result.exit_code == code, result.output
    assert result.stderr.startswith("Error: ")
    assert "Traceback" not in result.output
    return result.stderr


@pytest.mark.parametrize(
    "command",
    [
        "quickstart",
        "train",
        "plan",
        "report",
        "study run",
        "study plan",
        "study profile",
        "study report",
        "ledger verify",
        "ledger show",
        "ledger query",
        "ledger prove",
        "ledger check-weights",
        "policy check",
        "policy show",
        "policy explain",
    ],
)
def test_each_command_teaches_with_an_example(command: str) -> None:
    text = succeed(*command.split(), "--help")
    assert "Example" in text
    assert f"cosmati {command}" in text


def test_train_and_the_ledger_commands_on_its_run(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert "governed: completed after 4 steps" in succeed("train", f"{recipe}:governed", "--run-folder", run)
    verified = succeed("ledger", "verify", run)
    assert "4 steps" in verified
    assert "the run has ended" in verified
    assert "open/psf" in succeed("ledger", "show", run / "ledger")
    assert "low" not in succeed("ledger", "query", run, "--class", "open/psf")
    assert "open/permissive" in succeed("ledger", "query", run, "--region", "low")
    assert "No logged step gave rows tagged open/psf any weight in low" in succeed(
        "ledger", "query", run, "--class", "open/psf", "--region", "low"
    )
    answer = call("ledger", "query", run, "--class", "open/permissive", "--region", "low")
    assert (answer.exit_code, answer.stderr) == (1, "")
    assert answer.stdout.startswith("No. The statement is false: entry 4 (step 0)")
    assert "cosmati ledger query RUN with --class or --region alone" in answer.stdout


def test_a_changed_byte_in_the_ledger_is_reported(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    succeed("train", f"{recipe}:governed", "--run-folder", run)
    path = run / "ledger" / "details.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"loss"', b'"lass"', 1))
    answer = call("ledger", "verify", run)
    assert (answer.exit_code, answer.stderr) == (1, "")
    assert "doesn't verify" in answer.stdout


def test_any_run_has_a_page(recipe: Path, tmp_path: Path) -> None:
    for name in ("governed", "recipe"):
        run = tmp_path / name
        succeed("train", f"{recipe}:{name}", "--run-folder", run)
        page = Path(succeed("report", run).strip())
        assert page == run / "report.html"
        assert ('id="policy"' in page.read_text(encoding="utf-8")) == (name == "governed")
    assert succeed("report", run, "--out", tmp_path / "new" / "page.html").strip() == str(
        tmp_path / "new" / "page.html"
    )
    assert "is no run folder" in refused("report", tmp_path / "nothing")


def test_a_page_about_a_damaged_ledger_is_written_and_the_command_fails(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    succeed("train", f"{recipe}:governed", "--run-folder", run)
    (run / "ledger" / "checkpoint").unlink()
    result = call("report", run)
    assert result.exit_code == 1
    assert result.stderr.startswith("Warning: ")
    assert "does not verify" in (run / "report.html").read_text(encoding="utf-8")


def test_settings_reach_the_run(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    succeed("train", recipe, "--set", "config.seed=5", "--set", "config.budget=2ba", "--run-folder", run)
    record = json.loads((run / "run.json").read_text())
    assert (record["seed"], record["num_steps"], record["recipe_name"]) == (5, 2, "small")


def test_plan_shows_methods_and_guarantees(recipe: Path) -> None:
    assert "LabelSmoothing" in succeed("plan", recipe)
    assert "no_direct_write(open/psf, low)" in succeed("plan", f"{recipe}:governed")


def test_a_plan_says_of_the_ledger_what_the_run_will_do(recipe: Path, tmp_path: Path) -> None:
    for name, has_policy in (("governed", True), ("recipe", False)):
        folder, without = tmp_path / name, succeed("plan", f"{recipe}:{name}")
        planned = succeed("plan", f"{recipe}:{name}", "--run-folder", folder)
        assert not folder.exists()
        succeed("train", f"{recipe}:{name}", "--run-folder", folder)
        kept = {one["name"]: one["holds"] for one in json.loads((folder / "run.json").read_text())["guarantees"]}
        assert ("holds   replayable" in planned) is kept["replayable"] is (folder / "ledger").exists() is has_policy
        assert "broken  replayable: no ledger is kept" in without
        assert ("With --run-folder the run keeps a ledger" in without) is has_policy
        assert "With --run-folder" not in planned
    assert "With --run-folder" not in succeed("plan", f"{recipe}:governed", "--set", "config.ledger=false")


def test_bad_inputs_are_one_clean_message(recipe: Path, tmp_path: Path) -> None:
    assert "no Python file" in refused("train", tmp_path / "nothing.py")
    assert "has no function 'other'. It has" in refused("train", f"{recipe}:other")
    assert "returns a int" in refused("plan", f"{recipe}:wrong")
    assert "Did you mean seed" in refused("train", recipe, "--set", "config.sead=1")
    assert "name=value" in refused("train", recipe, "--set", "seed")
    assert "There is no ledger" in refused("ledger", "verify", tmp_path, code=2)
    assert "holds no study.json" in refused("study", "report", tmp_path)
    (tmp_path / "broken.py").write_text("1 / 0")
    assert "ZeroDivisionError" in refused("plan", tmp_path / "broken.py")
    (tmp_path / "policy.yaml").write_text("version: 1\nrulez: []\n")
    assert "did you mean rules" in refused("policy", "check", tmp_path / "policy.yaml")


def test_an_interrupted_command_says_how_to_go_on(recipe: Path) -> None:
    result = call("plan", f"{recipe}:interrupted")
    assert result.exit_code == 130
    assert "goes on" in result.stderr


def test_the_shipped_policy_is_sound_shown_and_explained() -> None:
    assert "Sound: 64 cells" in succeed("policy", "check")
    shown = succeed("policy", "show", "--steps", 100)
    assert "phase start, steps 0 to 25" in shown
    assert "phase main, steps 25 to 100" in shown
    assert "open/psf in embedding, phase main: weight 0" in succeed("policy", "explain", "open/psf", "embedding")
    assert "defer" in succeed("policy", "explain", "open/weak-copyleft", "head", "--phase", "start")
    assert "no class 'open/pfs'" in refused("policy", "explain", "open/pfs", "embedding", code=2)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ("- {class: open/psf, region: low, weight: 0}\n  - {class: open/psf, phase: main, weight: 1}", "is ambiguous"),
        ("- {class: open/gpl, weight: 1}", "no class 'open/gpl'"),
        ("- {class: open/psf, weight: 0}", "admitted in phase start with weight 0 for every region"),
        ("- {class: open/psf, decision: defer}", "no later phase admits it"),
        ("- {class: open/psf, weight: 1, phase: maim}", "no phase 'maim'"),
    ],
)
def test_a_policy_that_is_refused_is_not_explained(rules: str, said: str, tmp_path: Path) -> None:
    text = """
version: 1
taxonomy: software-licences
regions: {low: {params: ["*.0.*"]}, high: {params: ["*"]}}
phases: [{name: start, until: 3ep}, {name: main}]
rules:
  - {class: open/permissive, weight: 0.5}
"""
    policy = tmp_path / "wrong.yaml"
    asked = ("policy", "explain", "open/permissive", "low", "--file", policy)
    policy.write_text(text)
    assert "phase main: weight 0.5" in succeed(*asked)
    policy.write_text(f"{text}  {rules}\n")
    assert said in refused(*asked, code=2)
    policy.unlink()
    assert "can't be read" in refused(*asked, code=2)


def test_a_policy_over_classes_of_ones_own_is_explained_by_its_recipe(recipe: Path, tmp_path: Path) -> None:
    policy = tmp_path / "own.yaml"
    policy.write_text("version: 1\ntaxonomy: own\nrules:\n  - {class: mine/notes, weight: 0.5}\ndefault: reject\n")
    asked = ("policy", "explain", "mine/notes", "all", "--file", policy)
    assert "--recipe FILE" in refused(*asked, code=2)
    own = tmp_path / "own.py"
    lines = "\n\ndef own():\n    return dataclasses.replace(recipe(), taxonomy=OWN)\n"
    tree = '{"name": "own", "version": "1", "classes": {"mine": {"notes": "Mine."}}}'
    head = f"import dataclasses\nfrom cosmati import Taxonomy\nOWN = Taxonomy.from_mapping({tree})\n"
    own.write_text(head + recipe.read_text().replace("from __future__ import annotations\n", "") + lines)
    assert "mine/notes in all, phase main: weight 0.5" in succeed(*asked, "--recipe", f"{own}:own")


def test_a_study_runs_and_is_reported(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "study.py").write_text(STUDY)
    text = succeed("study", "run", tmp_path / "study.py", "--folder", tmp_path / "tiny")
    assert "same:" in text
    page = Path(succeed("study", "report", tmp_path / "tiny").strip())
    assert "tiny" in page.read_text(encoding="utf-8")


def test_a_study_is_planned_without_a_run(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "study.py").write_text(STUDY)
    folder = tmp_path / "tiny"
    text = succeed("study", "plan", tmp_path / "study.py", "--folder", folder)
    assert "2 arms x 2 budgets x 2 seeds = 8 runs" in text
    assert "no run and no trial of baseline, same" in text
    assert not folder.exists()
    succeed("study", "run", tmp_path / "study.py", "--folder", folder)
    text = succeed("study", "plan", tmp_path / "study.py", "--folder", folder, "--like", folder / "study.json")
    assert "8 are finished" in text
    assert "of training, 1 at a time" in text
    assert "can't be read" in refused("study", "plan", tmp_path / "study.py", "--like", tmp_path / "absent.json")


def test_a_study_is_profiled_and_reported_as_on_other_hardware(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "study.py").write_text(STUDY)
    succeed("study", "run", tmp_path / "study.py", "--folder", tmp_path / "tiny")
    sheet = tmp_path / "there.json"
    record = tmp_path / "tiny" / "study.json"
    text = succeed("study", "profile", tmp_path / "study.py", "--output", sheet, "--turns", 2, "--like", record)
    assert "ms a step" in text
    costs = ProfileRecord.from_json(sheet.read_text()).costs
    assert {one.arm for one in costs} == {"baseline", "same"}
    assert {one.num_threads for one in costs} == {
        one.num_threads for one in StudyRecord.from_json(record.read_text()).runs
    }
    assert {one.evaluated_rows for one in costs} == {32}
    page = Path(
        succeed("study", "report", tmp_path / "tiny", "--profile", sheet, "--hardware", "NVIDIA H200 SXM5").strip()
    ).read_text(encoding="utf-8")
    assert "(extrapolated)" in page
    assert "4 US dollars an hour as of" in page
    assert "All had" in page
    other = tmp_path / "other.py"
    other.write_text(STUDY.replace('name="tiny"', 'name="huge"'))
    assert "it's of 'huge'" in refused("study", "profile", other, "--like", record)
    assert "Name one of its entries" in refused("study", "report", tmp_path / "tiny", "--catalogue", sheet)
    assert "can't be read" in refused("study", "report", tmp_path / "tiny", "--profile", tmp_path / "absent.json")
    sheet.write_text("{}")
    assert "version" in refused("study", "report", tmp_path / "tiny", "--profile", sheet)


def test_a_file_may_define_dataclasses_and_be_called_like_a_library(recipe: Path, tmp_path: Path) -> None:
    own = "from dataclasses import dataclass\n\n\n@dataclass\nclass Size:\n    rows: int = 8\n"
    path = tmp_path / "json.py"
    path.write_text(recipe.read_text().replace("from __future__ import annotations\n", "", 1) + own)
    path.write_text("from __future__ import annotations\n" + path.read_text())
    assert "V = " in succeed("plan", path)


def test_version_is_the_packages() -> None:
    found = CliRunner().invoke(app, ["--version"])
    assert (found.exit_code, found.output) == (0, f"cosmati {importlib.metadata.version('cosmati')}\n")


def test_a_report_may_be_asked_for_as_html(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text(log_study().to_json())
    page = Path(succeed("study", "report", tmp_path).strip())
    bare = page.read_text(encoding="utf-8")
    page.unlink()
    assert Path(succeed("study", "report", tmp_path, "--html").strip()) == page
    assert page.read_text(encoding="utf-8") == bare


def log_study() -> StudyRecord:
    return study({"baseline": log_quality(), "fast": log_quality(0.05)}, seeds=(0, 1))
