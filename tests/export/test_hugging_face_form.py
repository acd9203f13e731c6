"""Models of transformers leave by `save_pretrained`, and come back with the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati import Evaluation, Method, RunConfig, Trainer, huggingface_loss
from cosmati.core.loss import Loss
from cosmati.errors import ExportError
from cosmati.methods import EMA, Alibi, GyroDropout
from cosmati.optim import AdamW, ScheduleFreeAdamW

transformers = pytest.importorskip("transformers", reason="the extra `llm` isn't installed")
pytestmark = [pytest.mark.filterwarnings("ignore:::transformers"), pytest.mark.long]


def gpt2(*, tied: bool = True) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False, tie_word_embeddings=tied
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config).train()
    return model


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=3
    )
    model: nn.Module = transformers.BertForSequenceClassification(config).train()
    return model


def batch(seed: int, *, classes: bool = False) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    tokens = torch.randint(64, (8, 12), generator=draws)
    labels = torch.randint(3, (8,), generator=draws) if classes else tokens
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def mean_loss(model: nn.Module, data: Any) -> Loss:
    return huggingface_loss(model, data)


def trained(model: nn.Module, folder: Path, *methods: Method, optimizer: Any = None) -> Trainer:
    classes = hasattr(model, "classifier")
    trainer = Trainer(
        model,
        huggingface_loss,
        [batch(seed, classes=classes) for seed in range(4)],
        optimizers=[optimizer or AdamW(lr=1e-2)],
        methods=list(methods),
        evaluation=Evaluation([batch(seed, classes=classes) for seed in (8, 9)], {"loss": mean_loss}),
        config=RunConfig(name="tuned | <b>", budget="4ba", run_folder=folder),
    )
    trainer.fit()
    return trainer


CASES: dict[str, tuple[Any, tuple[Method, ...], Any]] = {
    "GPT-2, tied": (gpt2, (EMA(half_life="2ba"),), None),
    "GPT-2, untied, schedule-free": (lambda: gpt2(tied=False), (), ScheduleFreeAdamW(lr=1e-2)),
    "BERT, tied within, gyro dropout": (bert, (GyroDropout(sigma=4, tau=2), EMA(half_life="2ba")), None),
}


@pytest.mark.parametrize("name", CASES)
def test_a_model_comes_back_with_the_same_logits(name: str, tmp_path: Path) -> None:
    build, methods, optimizer = CASES[name]
    trainer = trained(build(), tmp_path / "run", *methods, optimizer=optimizer)
    out = tmp_path / "out"
    exported = trainer.export(out, to="hf")
    read = type(exported).from_pretrained(out).eval()  # type: ignore[attr-defined]
    given = {key: value for key, value in batch(8).items() if key != "labels"}
    with trainer.averaged() as measured, torch.no_grad():
        logits = measured.eval()(**given).logits
    with torch.no_grad():
        assert torch.equal(read(**given).logits, logits)
        assert torch.equal(exported(**given).logits, logits)
        assert not torch.equal(trainer.model.eval()(**given).logits, logits)
    if "tied" in name and "untied" not in name and "GPT" in name:
        assert read.lm_head.weight is read.transformer.wte.weight
    assert not any(path.suffix in (".bin", ".pt", ".pth", ".pkl") for path in out.rglob("*"))
    card = (out / "README.md").read_text()
    assert card.startswith('---\nlibrary_name: transformers\ntags:\n- cosmati\nmetrics:\n- "loss"\n---\n')
    assert f"transformers.{type(read).__name__}.from_pretrained" in card
    # The run's name is the user's text: no mark of it acts.
    assert "# tuned \\| \\<b\\>" in card
    assert "<b>" not in card.replace("`tuned \\| <b>`", "")
    assert json.loads((tmp_path / "run/exports.jsonl").read_text())["to"] == "hf"


def test_surgery_that_hugging_face_cannot_hold_is_refused(tmp_path: Path) -> None:
    surgery = Alibi(max_sequence_length=32, train_sequence_length_scaling=1.0)
    trainer = trained(gpt2(), tmp_path / "run", surgery)
    with pytest.raises(ExportError, match="from_pretrained would leave them out"):
        trainer.export(tmp_path / "out", to="hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    # As a program it leaves whole.
    trainer.export(tmp_path / "out", to="safetensors")
    assert "Alibi(max_sequence_length=32" in (tmp_path / "out/rebuild.py").read_text()


def test_what_transformers_refuses_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trained(gpt2(), tmp_path / "run")

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("The generation config is invalid")

    monkeypatch.setattr(type(trainer.model), "save_pretrained", refuse)
    with pytest.raises(ExportError, match=r"can't write this GPT2LMHeadModel.*generation config is invalid"):
        trainer.export(tmp_path / "out", to="hf")


def test_a_model_of_transformers_leaves_as_a_program_too(tmp_path: Path) -> None:
    trainer = trained(gpt2(), tmp_path / "run", EMA(half_life="2ba"))
    exported = trainer.export(tmp_path / "out")
    program = torch.export.load(tmp_path / "out/model.pt2").module()
    given = batch(8)
    with torch.no_grad():
        assert torch.equal(program(**given).logits, exported(**given).logits)


def with_an_extra_head() -> nn.Module:
    model = gpt2()
    model.extra = nn.Linear(16, 3)
    return model


def with_another_activation() -> nn.Module:
    model: Any = gpt2()
    for block in model.transformer.h:
        block.mlp.act = nn.ReLU()
    return model  # type: ignore[no-any-return]


ODD: dict[str, Any] = {
    "other layers: extra; other tensors: extra.bias, extra.weight": with_an_extra_head,
    "other layers: transformer.h.0.mlp.act": with_another_activation,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("told", ODD)
def test_what_its_config_does_not_say_is_refused(told: str, tmp_path: Path) -> None:
    """Without an evaluation, too: no rows are needed to see it."""
    trainer = Trainer(
        ODD[told](),
        huggingface_loss,
        [batch(seed) for seed in range(2)],
        optimizers=[AdamW(lr=1e-2)],
        config=RunConfig(budget="2ba", run_folder=tmp_path / "run"),
    )
    trainer.fit()
    with pytest.raises(ExportError, match=told):
        trainer.export(tmp_path / "out", to="hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_weights_that_do_not_come_back_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One unit in the last place is far within what outputs may differ by."""
    trainer = trained(gpt2(), tmp_path / "run")
    kind: Any = type(trainer.model)
    own = kind.from_pretrained

    def other(*given: Any, **options: Any) -> Any:
        read = own(*given, **options)
        with torch.no_grad():
            bias = read.transformer.ln_f.bias
            bias[0] = torch.nextafter(bias[0], torch.tensor(torch.inf))
        return read

    monkeypatch.setattr(kind, "from_pretrained", other)
    with pytest.raises(ExportError, match=r"other tensors: transformer\.ln_f\.bias"):
        trainer.export(tmp_path / "out", to="hf")
