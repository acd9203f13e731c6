"""The templates compile on real models to what is written here by hand, and a run under each keeps its promises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from cosmati import LanguageModel, RunConfig, StreamingDataset, StreamingSource, Trainer
from cosmati.cli.main import app
from cosmati.data.shards.dataset import write_dataset
from cosmati.errors import PolicyError
from cosmati.ledger.query import VerifiedLedger, contributions
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.models.resnet import ResNet, ResNetConfig
from cosmati.optim import SGD
from cosmati.recipes.policy_templates import MODELS, TEMPLATES, policy_template, template_classes, template_taxonomy
from cosmati.routing.policy import CompiledPolicy, compile_policy, partition_by
from cosmati.routing.policy_file import load_policy

pytestmark = pytest.mark.long

REGIONS = ("input", "lower", "upper", "head")
FULL, NONE = (1.0, 1.0, 1.0, 1.0), (0.0, 0.0, 0.0, 0.0)
Cell = tuple[str, tuple[float, ...]]
ADMIT, REJECT, DEFER = ("admit", FULL), ("reject", NONE), ("defer", NONE)


def near_output(weight: float) -> Cell:
    return ("admit" if weight == 1 else "gate", (0.0, 0.0, weight, weight))


def everywhere(weight: float) -> Cell:
    return ("gate", (weight,) * 4)


GRADES = ("", "very-low", "low", "moderate", "high")
STUDY = dict(zip(GRADES, (REJECT, REJECT, everywhere(0.3), everywhere(0.7), ADMIT), strict=True))
SETTLED = {grade: ADMIT if grade == "high" else REJECT for grade in GRADES}
GUIDELINE = {grade: ADMIT if grade in ("moderate", "high") else REJECT for grade in GRADES}
STUDIES = ("study/review", "study/trial", "study/observation")
FIRST_WORDS = ("gate", (0.3, 0.3, 0.0, 0.0))
PERSUASIVE = ("gate", (0.5, 0.5, 0.5, 0.2))
FILING = ("gate", (0.2, 0.2, 0.0, 0.0))
EXPECTED: dict[str, dict[str, dict[str, Cell | dict[str, Cell]]]] = {
    "rights-compliant": {
        "main": {
            "public-domain": ADMIT,
            "open/permissive": ADMIT,
            "open/share-alike": near_output(0.5),
            "licensed/perpetual": ADMIT,
            "licensed/term": near_output(1),
            "reserved": REJECT,
            "unknown": REJECT,
        }
    },
    "personal-data": {
        "nobody": {
            "no-person": ADMIT,
            "anonymous": ADMIT,
            "personal/consent": DEFER,
            "personal/contract": DEFER,
            "personal/pseudonymous": DEFER,
            "special-category": REJECT,
            "children": REJECT,
        },
        "people": {
            "no-person": ADMIT,
            "anonymous": ADMIT,
            "personal/consent": near_output(0.5),
            "personal/contract": near_output(0.25),
            "personal/pseudonymous": near_output(0.5),
            "special-category": REJECT,
            "children": REJECT,
        },
    },
    "medical": {
        "learning": {
            "guideline": GUIDELINE,
            **dict.fromkeys(STUDIES, STUDY),
            "case-report": near_output(0.2),
            "preprint": near_output(0.2),
            "record/deidentified": near_output(0.5),
            "record/identifiable": REJECT,
            "retracted": REJECT,
        },
        "settling": {
            "guideline": GUIDELINE,
            **dict.fromkeys(STUDIES, SETTLED),
            "case-report": REJECT,
            "preprint": REJECT,
            "record/deidentified": REJECT,
            "record/identifiable": REJECT,
            "retracted": REJECT,
        },
    },
    "legal": {
        "language": {
            "binding/statute": ADMIT,
            "binding/precedent": ADMIT,
            "persuasive/precedent": PERSUASIVE,
            "persuasive/commentary": PERSUASIVE,
            "superseded/statute": FIRST_WORDS,
            "superseded/precedent": FIRST_WORDS,
            "filing": FILING,
            "privileged": REJECT,
        },
        "law": {
            "binding/statute": ADMIT,
            "binding/precedent": ADMIT,
            "persuasive/precedent": PERSUASIVE,
            "persuasive/commentary": PERSUASIVE,
            "superseded/statute": REJECT,
            "superseded/precedent": REJECT,
            "filing": FILING,
            "privileged": REJECT,
        },
    },
}


def gpt() -> GPT:
    return GPT(GPTConfig(vocabulary_size=16, sequence_length=8, width=16, num_blocks=3, num_heads=2))


def model_of(kind: str) -> nn.Module:
    if kind == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3}
        return LlamaForCausalLM(LlamaConfig(vocab_size=16, num_key_value_heads=2, **sizes))
    return gpt() if kind == "transformer" else ResNet(ResNetConfig(widths=(4, 8)))


def compiled(name: str, kind: str) -> CompiledPolicy:
    policy = load_policy(policy_template(name, kind))
    return compile_policy(
        policy, taxonomy=template_taxonomy(name), regions=partition_by(policy, model_of(kind)), num_steps=100
    )


def check_table(table: CompiledPolicy, name: str) -> None:
    """Compare each cell with what is written above, and nothing is left over on either side."""
    expected = EXPECTED[name]
    assert tuple(phase.name for phase in table.phases) == tuple(expected)
    assert table.regions == REGIONS
    rows = [(one, kind) for one in table.classes for kind in table.kinds]
    assert len(rows) == len(table.weight) == len(table.decision)
    for (class_name, kind), weights, decisions in zip(rows, table.weight, table.decision, strict=True):
        for number, cells in enumerate(expected.values()):
            wanted = cells[class_name]
            wanted = wanted[dict(kind.grades).get("certainty", "")] if isinstance(wanted, dict) else wanted
            assert (decisions[number], weights[number]) == (wanted[0], pytest.approx(wanted[1])), (class_name, kind)
    assert all(set(cells) == set(table.classes) for cells in expected.values())


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", ["transformer", "resnet"])
def test_each_cell_is_what_it_was_meant_to_be(name: str, kind: str) -> None:
    check_table(compiled(name, kind), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_so_it_is_for_models_of_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    check_table(compiled(name, "llama"), name)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_regions_of_the_file_are_those_of_the_kind_that_it_names(name: str) -> None:
    texts = {kind: policy_template(name, kind) for kind in MODELS}
    rest = {re.sub(r"regions:\n(?:  .*\n){4}", "", text) for text in texts.values()}
    assert len(rest) == 1, "nothing else depends on the model"
    assert len(set(texts.values())) == len(MODELS)
    digests = {load_policy(texts["transformer"]).digest}
    assert load_policy(Path(__file__).parents[2] / f"src/cosmati/recipes/policies/{name}.yaml").digest in digests


def corpus(folder: Path, name: str) -> list[Path]:
    """Write 16 rows of each class, and of each grade where there are grades."""
    drawn = torch.Generator().manual_seed(0)
    grades = ({}, {"certainty": "low"}, {"certainty": "high"}) if name == "medical" else ({},)
    places = []
    for class_name in template_taxonomy(name).classes:
        for number, graded in enumerate(grades):
            tokens = torch.randint(0, 16, (16, 9), generator=drawn, dtype=torch.int64).numpy()
            place = folder / f"{class_name.replace('/', '-')}-{number}"
            rows = ({"tokens": row} for row in tokens)
            source = f"s{number}"
            write_dataset(rows, place, {"tokens": "ndarray:int64:9"}, class_of=class_name, source=source, grades=graded)
            places.append(place)
    return places


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_run_under_it_keeps_what_it_promises(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = StreamingSource(StreamingDataset(corpus(tmp_path / "data", name), columns=("tokens",)), 16)
    trainer = Trainer(
        gpt(),
        LanguageModel(),
        source,
        optimizers=SGD(lr=0.1),
        policy=load_policy(policy_template(name)),
        taxonomy=template_taxonomy(name),
        config=RunConfig(budget="10ba", num_threads=1, num_microbatches=8, run_folder=tmp_path / "run"),
    )
    trainer.fit()
    table = compiled(name, "transformer")
    most = {
        class_name: [max(w[region] for row in table.rows_of(number) for w in table.weight[row]) for region in range(4)]
        for number, class_name in enumerate(table.classes)
    }
    promised = {one.name for one in trainer.plan.guarantees if one.holds and one.name.startswith("no_direct_write")}
    assert promised == {
        f"no_direct_write({class_name}, {region})"
        for class_name, weights in most.items()
        for region, weight in zip(REGIONS, weights, strict=True)
        if any(weights) and not weight
    }
    assert all(one in str(trainer.plan) for one in promised)
    ledger = VerifiedLedger(tmp_path / "run" / "ledger")
    taught = {(one.class_name, one.region): one.weight for one in contributions(ledger).cells}
    assert set(taught) == {(class_name, region) for class_name in most for region in REGIONS}
    for (class_name, region), weight in taught.items():
        assert bool(weight) == bool(most[class_name][REGIONS.index(region)]), (class_name, region)


def test_the_command_prints_them() -> None:
    said = CliRunner().invoke(app, ["policy", "template"]).output
    assert [line.split()[0] for line in said.splitlines()] == list(TEMPLATES)
    for name in TEMPLATES:
        for more, text in (
            ([], policy_template(name)),
            (["--model", "resnet"], policy_template(name, "resnet")),
            (["--classes"], template_classes(name)),
        ):
            assert CliRunner().invoke(app, ["policy", "template", name, *more]).output == text


def test_what_is_not_there_is_refused_by_name() -> None:
    for call, words in (
        (lambda: policy_template("medcal"), "There's no template 'medcal'; did you mean medical?"),
        (lambda: template_classes("../legal"), "There's no template '../legal'; did you mean legal?"),
        (lambda: policy_template("legal", "resnt"), "There's no kind of model 'resnt'; did you mean resnet?"),
    ):
        with pytest.raises(PolicyError, match=re.escape(words)):
            call()


def test_a_taxonomy_from_a_file_serves_each_command(tmp_path: Path) -> None:
    policy, classes = tmp_path / "policy.yaml", tmp_path / "classes.yaml"
    policy.write_text(policy_template("legal"))
    classes.write_text(template_classes("legal"))
    given = ["--taxonomy", str(classes)]
    for command, words in (
        (["check", str(policy)], "Sound: 64 cells are decided (8 classes, 4 regions, 2 phases)."),
        (["show", str(policy)], "binding/precedent      admit     █ 1    █ 1    █ 1    █ 1"),
        (["explain", "superseded/statute", "head", "--file", str(policy)], "phase law: reject"),
        (["diff", str(policy), str(policy)], "Nothing"),
    ):
        result = CliRunner().invoke(app, ["policy", *command, *given])
        assert result.exit_code == 0, result.output
        assert words in result.output
    for command in (["explain", "superseded/statute", "head", "--file", str(policy)], ["show", str(policy)]):
        refused = CliRunner().invoke(app, ["policy", *command])
        assert refused.exit_code == (2 if "explain" in command else 1)
        assert "--taxonomy FILE" in refused.output
