"""The pages of the policy templates show what the commands print, and what they say to change compiles."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cosmati.cli.main import app
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.models.resnet import ResNet, ResNetConfig
from cosmati.recipes.policy_templates import MODELS, TEMPLATES, policy_template, template_taxonomy
from cosmati.routing.policy import CompiledPolicy, compile_policy, partition_by
from cosmati.routing.policy_file import load_policy

PAGES = Path(__file__).parents[2] / "docs" / "templates"
INDEX = (PAGES / "index.md").read_text()
REGIONS = ("input", "lower", "upper", "head")


def compiled(text: str, name: str) -> CompiledPolicy:
    policy = load_policy(text)
    model = GPT(GPTConfig(sequence_length=8, width=16, num_blocks=3, num_heads=2))
    return compile_policy(policy, taxonomy=template_taxonomy(name), regions=partition_by(policy, model), num_steps=1000)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_page_shows_what_its_commands_print(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (PAGES / f"{name}.md").read_text()
    monkeypatch.chdir(tmp_path)
    commands, shown = re.findall(r"```(?:text)?\n(.*?)```", page, re.DOTALL)
    output = ""
    for line in commands.splitlines():
        command, _, target = line.partition(" > ")
        result = CliRunner().invoke(app, command.split()[1:])
        assert result.exit_code == 0, result.output
        output = result.output
        if target:
            Path(target).write_text(output)
    assert output.startswith(shown), "all tables; what else a policy says may follow"
    phases = re.findall(r"^  - \{name: ([a-z]+)", policy_template(name), re.MULTILINE) or ["main"]
    assert re.findall(r"^phase ([a-z]+), steps", shown, re.MULTILINE) == phases
    assert len(re.findall(r" (?:admit|gate|defer|reject) ", shown)) == len(
        re.findall(r" (?:admit|gate|defer|reject) ", output)
    )
    assert page.index("## What it does not mean") < page.index("## What each class may teach")
    table = re.findall(r"^\| `([a-z/-]+)` \| (.*) \|$", page, re.MULTILINE)
    assert tuple(table) == template_taxonomy(name).meanings


@pytest.mark.parametrize("name", ["rights-compliant", "legal"])
def test_a_class_is_thrown_out_as_its_page_says(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text()
    (rule,) = re.findall(r"`(\{class: .*?, decision: reject\})`", page)
    (pattern,) = re.findall(r"class: \"?([a-z/*-]+)", rule)
    lines = [line for line in policy_template(name).splitlines() if pattern not in line]
    text = "\n".join(lines).replace("rules:\n", f"rules:\n  - {rule}\n")
    before, after = compiled(policy_template(name), name), compiled(text, name)
    stem = pattern.removesuffix("**")
    for number, class_name in enumerate(after.classes):
        if class_name.startswith(stem):
            assert set(after.decision[number]) == {"reject"} != set(before.decision[number])
        else:
            assert after.weight[number] == before.weight[number]


def test_each_kind_of_model_is_on_the_index() -> None:
    assert re.findall(r"^\| `(\w+)` \| (.*) \|$", INDEX, re.MULTILINE) == list(MODELS.items())
    assert re.findall(r"^\| \[`([a-z-]+)`\]\(\1\.md\)", INDEX, re.MULTILINE) == list(TEMPLATES)


def changed(text: str, **lines: str) -> str:
    for region, line in lines.items():
        text = re.sub(rf"^  {region}: .*$", f"  {line}", text, count=1, flags=re.MULTILINE)
    return text


def test_a_resnet_that_normalises_first_takes_the_line_of_the_index() -> None:
    (line,) = re.findall(r"pre_activation=True` \| `(upper: .*)` \|", INDEX)
    policy = load_policy(changed(policy_template("legal", "resnet"), upper=line))
    assert partition_by(policy, ResNet(ResNetConfig(widths=(4, 8), pre_activation=True))).names == REGIONS


@pytest.mark.slow
def test_models_of_transformers_take_the_lines_of_the_index() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3}
    vit = transformers.ViTForImageClassification(transformers.ViTConfig(image_size=8, patch_size=4, **sizes))
    (row,) = (line for line in INDEX.splitlines() if line.startswith("| a vision transformer"))
    first, container, norm = re.findall(r"`([^`]+)`", row)[1:]
    text = changed(policy_template("legal"), input=first)
    text = text.replace("container: blocks", f"container: {container}").replace('params: "norm.*"', norm)
    assert partition_by(load_policy(text), vit).names == REGIONS
    gpt = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=3, n_head=2)
    )
    (row,) = (line for line in INDEX.splitlines() if line.startswith("| GPT-2"))
    container, norm, tied = re.findall(r"`([^`]+)`", row)[1:]
    text = policy_template("legal").replace("container: blocks", f"container: {container}")
    policy = load_policy(text.replace('params: "norm.*"', norm) + f"{tied}\n")
    regions = partition_by(policy, gpt)
    assert regions.names == ("head&input", "input", "lower", "upper")
    table = compile_policy(policy, taxonomy=template_taxonomy("legal"), regions=regions, num_steps=100)
    persuasive = table.weight[table.classes.index("persuasive/precedent")][0]
    assert persuasive == (0.2, 0.5, 0.5, 0.5), "the lesser of head's and input's"


def test_the_example_of_the_index_reads_both_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("policy.yaml").write_text(policy_template("medical"))
    result = CliRunner().invoke(app, ["policy", "template", "medical", "--classes"])
    Path("classes.yaml").write_text(result.output)
    (example,) = re.findall(r"```python\n(.*?)```", INDEX, re.DOTALL)
    exec(compile(example, "index.md", "exec"), names := {})
    assert names["taxonomy"] == template_taxonomy("medical")
    assert names["policy"].taxonomy == "medical-evidence"
