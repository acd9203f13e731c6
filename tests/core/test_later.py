"""Options that came later: untold at their default, so a run without them is the one that it was."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest

from cosmati.core.later import later, told_fields, untold
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.optim import AdamW, Lion, Muon, NorMuon
from cosmati.recipes import language
from cosmati.train.identity import changes, describe_model, identify

AS_RELEASED = {
    AdamW: ["betas", "eps", "weight_decay", "decay_vectors", "fused"],
    Lion: ["betas", "weight_decay", "decay_vectors"],
    Muon: ["momentum", "nesterov", "weight_decay", "num_iterations", "scale", "bfloat16"],
    NorMuon: ["momentum", "beta2", "eps", "nesterov", "weight_decay", "num_iterations"],
}


@dataclass(frozen=True, kw_only=True)
class Part:
    size: int = 1
    sharp: bool = later(default=False)
    share: float | None = later(default=None)


def test_only_what_differs_from_its_default_is_told() -> None:
    assert told_fields(Part()) == {"size": 1}
    assert told_fields(Part(size=2, sharp=True)) == {"size": 2, "sharp": True}
    assert untold(Part(share=0.5)) == {"sharp"}
    assert Part(sharp=True) != Part()
    assert dataclasses.replace(Part(), share=0.1).share == 0.1
    assert untold(Part) == untold(3) == frozenset()


def test_optimizers_are_told_as_they_were() -> None:
    for kind, names in AS_RELEASED.items():
        assert list(told_fields(kind(lr=0.1))) == ["lr", "schedule", "parameters", *names]
        assert told_fields(kind(lr=0.1, cautious=True))["cautious"] is True


def test_the_text_of_a_recipe_speaks_of_what_is_used() -> None:
    recipe = language.python_gpt_baseline()
    assert "cautious" not in recipe.text
    assert "value_embeddings" not in recipe.text
    assert "cautious=True" in recipe.with_settings({"optimizers.0.cautious": True}).text
    changed = dataclasses.replace(recipe, model=language.BuildGPT(GPTConfig(value_embeddings=1)))
    assert "value_embeddings=1" in changed.text
    assert repr(GPTConfig()).startswith("GPTConfig(vocabulary_size=256, sequence_length=256, ")
    assert repr(GPTConfig()).endswith("ngram_rows=8192, all_scores=False)")


@pytest.mark.long
def test_a_models_identity_tells_of_an_option_that_is_used_and_of_no_other() -> None:
    def facts(**options: object) -> dict[str, object]:
        sizes = {"vocabulary_size": 9, "sequence_length": 4, "width": 4, "num_blocks": 2, "num_heads": 1}
        return identify(model=describe_model(GPT(GPTConfig(**sizes, **options))))  # type: ignore[arg-type]

    plain = facts()
    assert "all_scores" in str(plain)
    assert not [name for name in ("value_embeddings", "value_mix", "document_end", "logit_scale") if name in str(plain)]
    for option, value in (("document_end", 3), ("logit_scale", 2.0), ("value_embeddings", 1)):
        found = changes(plain, facts(**{option: value}))
        assert any(option in change.name and change.now == value for change in found), option
        assert changes(facts(**{option: value}), facts(**{option: value})) == []
