"""The policies on the governance pages compile and mean what the pages say; each question of the guide is answered."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from cosmati import Classification, InMemory, RunConfig, Taxonomy, Trainer, load_policy, software_licences
from cosmati.cli.commands import load_command
from cosmati.cli.main import app
from cosmati.core.loss import LanguageModel
from cosmati.core.plan import Promise
from cosmati.ledger.evidence import LEVEL_0
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.optim import SGD
from cosmati.routing.policy import compile_policy, partition_by
from cosmati.routing.regions import Regions, partition_parameters

DOCS = Path(__file__).parents[2] / "docs"
PAGE, POLICIES, ROUTING = ((DOCS / f"{name}.md").read_text() for name in ("governance", "policies", "routing"))


def test_the_bands_of_the_page_do_what_it_says() -> None:
    policy = load_policy("version: 1\ntaxonomy: t\n" + POLICIES.split("```yaml\n")[1].split("```")[0])
    assert policy.bands is not None
    assert [policy.bands.band_of(value) for value in (0.29, 0.3, 0.69, 0.7)] == [0, 1, 1, 2]
    names = Taxonomy("t", "1", (("licensed/news", ""),))
    regions = Regions(("all",), (("weight",),), (("all",),))
    table = compile_policy(policy, taxonomy=names, regions=regions, num_steps=10)
    assert [table.route(0, 0, band) for band in range(3)] == [(0.0,), (0.5,), (1.0,)]


def test_the_policy_of_the_page_compiles() -> None:
    policy = load_policy(PAGE.split("```yaml\n")[1].split("```")[0])
    model = GPT(GPTConfig(sequence_length=8, width=16, num_blocks=4, num_heads=2))
    regions = partition_parameters(model, policy.regions)
    compiled = compile_policy(policy, taxonomy=software_licences(), regions=regions, num_steps=100)
    psf = compiled.classes.index("open/psf")
    by_region = dict(zip(compiled.regions, compiled.route(psf, 50), strict=True))
    assert by_region == {"embedding": 0.0, "near_input": 0.0, "near_output": 1.0}
    copyleft = compiled.classes.index("open/copyleft")
    assert compiled.route(copyleft, 5) == (0.5, 0.5, 0.5)
    assert compiled.route(copyleft, 50) == (1.0, 1.0, 1.0)
    assert compiled.decision[compiled.classes.index("unknown")] == ("reject", "reject")


def test_the_kinds_of_data_of_the_page_compile() -> None:
    code = next(part.split("```")[0] for part in ROUTING.split("```python\n") if "SelectiveGradientMasking" in part)
    names: dict[str, object] = {}
    exec(code, names)
    text = ROUTING.partition("## Gradient Routing")[2]
    policy = load_policy("version: 1\ntaxonomy: t\n" + text.split("```yaml\n")[1].split("```")[0])
    classes = Taxonomy("t", "1", (("customer/pii", ""), ("public-domain", ""), ("unknown", "")))
    model = nn.ModuleDict({"expert": nn.Linear(2, 2), "stem": nn.Linear(2, 2)})
    regions = partition_parameters(model, policy.regions)
    compiled = compile_policy(policy, taxonomy=classes, regions=regions, num_steps=10)
    routes = [dict(zip(compiled.regions, compiled.route(own, 0), strict=True)) for own in range(3)]
    assert routes == [{"expert": 1.0, "rest": 0.0}, {"expert": 0.0, "rest": 1.0}, {"expert": 1.0, "rest": 1.0}]
    assert names["ablate_region"](model, policy, "expert") == ("expert.weight", "expert.bias")  # type: ignore[operator]


def test_what_the_page_isolates_is_promised() -> None:
    text = ROUTING.partition("## Isolated regions")[2]
    policy = load_policy("version: 1\ntaxonomy: t\n" + text.split("```yaml\n")[1].split("```")[0])
    scope: dict[str, Any] = {}
    python = [block.split("```")[0] for block in text.split("```python\n")[1:3]]
    exec(compile(python[0], "routing.md", "exec"), scope)
    names = ("open", "customer/pii")
    data = InMemory((torch.randn(32, 4), torch.randint(3, (32,))), 16, torch.arange(32) % 2, names)
    trainer = Trainer(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
        Classification(3),
        data,
        optimizers=[SGD(lr=0.1)],
        methods=scope["methods"],
        policy=policy,
        taxonomy=Taxonomy("t", "1", tuple((name, "") for name in names)),
        config=RunConfig(budget="2ba", num_microbatches=2, num_threads=1),
    )
    trainer.fit()
    assert trainer.plan.holds(Promise.ISOLATED, ("customer/pii", "pii"))
    assert "isolated(customer/pii, pii)" in str(trainer.plan)
    scope |= {"model": trainer.model, "rows": torch.randn(2, 4)}
    exec(compile(python[1], "routing.md", "exec"), scope)
    assert scope["logits"].shape == (2, 3)
    assert [type(layer).__name__ for layer in scope["model"]] == ["Linear", "ReLU", "Linear"]


def test_the_grades_of_the_page_do_what_it_says() -> None:
    block = next(one for one in POLICIES.split("```yaml\n")[1:] if one.startswith("measures:")).split("```")[0]
    front = "version: 1\ntaxonomy: t\nregions: {head: {tag: head}, rest: {params: '*', exclude: ['head.*']}}\n"
    policy = load_policy(f"{front}rules: [{{class: '**', weight: 1}}]\n{block}")
    assert policy.measures["trust"].grade_of(0.3) == "middle"
    names = Taxonomy("t", "1", (("medical/notes", ""), ("news", "")))
    regions = Regions(("head", "rest"), (("h",), ("r",)), (("head",), ("rest",)), (), ("head", "rest"))
    table = compile_policy(policy, taxonomy=names, regions=regions, num_steps=10)

    def weights(class_id: int, **grades: str) -> tuple[float, ...]:
        return table.route(class_id, 0, table.kind_of(0, grades))

    assert weights(0, evidence="trial", trust="high") == (1.0, 1.0)
    assert weights(0, evidence="cohort", trust="high") == (0.25, 0.25)
    assert weights(0, evidence="trial", trust="low") == (0.0, 1.0)
    assert weights(0) == (0.0, 0.25)
    assert weights(1, evidence="cohort", trust="high") == (1.0, 1.0)


def test_the_schedule_of_the_page_opens_what_it_says() -> None:
    block = next(one for one in POLICIES.split("```yaml\n")[1:] if one.startswith("depth:")).split("```")[0]
    phases = "phases: [{name: start, until: 2ba}, {name: middle, until: 4ba}, {name: main}]\n"
    policy = load_policy(f"version: 1\ntaxonomy: t\n{phases}rules: [{{class: '**', weight: 1}}]\n{block}")
    names = Taxonomy("t", "1", (("customer/mail", ""), ("news", "")))
    regions = partition_by(policy, GPT(GPTConfig(sequence_length=8, width=16, num_blocks=10, num_heads=2)))
    assert regions.names == ("rest", "blocks.0-3", "blocks.4-7", "blocks.8-")
    table = compile_policy(policy, taxonomy=names, regions=regions, num_steps=6)
    assert [table.route(1, step) for step in (0, 2, 4)] == [(1, 0, 0, 1), (1, 0, 1, 1), (1, 1, 1, 1)]
    assert {table.route(0, step) for step in range(6)} == {(1, 0, 0, 1)}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with `RUN`: a run under the page's own policy."""
    folder = tmp_path_factory.mktemp("questions")
    names = software_licences().classes
    tokens = torch.randint(255, (32, 9))
    own = torch.tensor([names.index(name) for name in ("open/psf", "open/permissive")] * 16)
    Trainer(
        GPT(GPTConfig(sequence_length=8, width=16, num_blocks=4, num_heads=2)),
        LanguageModel(),
        InMemory((tokens[:, :-1], tokens[:, 1:]), 8, own, names),
        optimizers=[SGD(lr=0.1)],
        policy=load_policy(PAGE.split("```yaml\n")[1].split("```")[0]),
        taxonomy=software_licences(),
        config=RunConfig(budget="3ba", num_microbatches=2, num_threads=1, run_folder=folder / "RUN"),
    ).fit()
    return folder


def answers_of(section: str) -> dict[str, list[str]]:
    """Return the commands below each question."""
    parts = re.split(r"^### ", section, flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0]: re.findall(r"^cosmati .*$", part, flags=re.MULTILINE) for part in parts}


@pytest.mark.long
def test_each_of_the_five_questions_is_answered_with_its_level(asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(asked)
    answers = answers_of(PAGE.partition("## Five questions")[2].partition("\n## ")[0])
    assert len(answers) == 5
    said = {}
    for question, commands in answers.items():
        assert commands, question
        for command in commands:
            words = shlex.split(command)[1:]
            if words[:2] == ["forget", "verify"]:  # of a run that forgot: tests/docs/test_deletion_page.py
                known = {name for one in load_command("forget").commands["verify"].params for name in one.opts}
                assert {word for word in words if word.startswith("--")} <= known
                continue
            found = CliRunner().invoke(app, words)
            assert found.exit_code == 0, (command, found.output)
            said[command] = found.output
    assert sum(LEVEL_0 in text for text in said.values()) == 5, "all but the plan, which changes nothing"
    kept_out = said["cosmati ledger query RUN --class open/psf --region embedding"]
    assert kept_out.startswith("No logged step gave rows tagged open/psf any weight in embedding")
    assert "No logged step gave rows tagged open/psf any weight in embedding" in PAGE
    regions = {line.split()[1] for line in said["cosmati ledger query RUN --class open/psf"].splitlines()[:-1]}
    assert regions == {"near_output"}


def test_anchors_that_other_pages_link_to_are_there() -> None:
    linked = {
        anchor
        for page in DOCS.rglob("*.md")
        for anchor in re.findall(r"\]\((?:\.\./)?governance\.md#([\w-]+)\)", page.read_text())
    }
    titles = re.findall(r"^#+ (.*)$", PAGE, flags=re.MULTILINE)
    assert linked <= {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
    assert len(linked) > 6
