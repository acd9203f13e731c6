"""A GPT that computes in parts is the same function, and says what it can't cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from cosmati.core.virtual_shards import VirtualShards
from cosmati.errors import PlanError
from cosmati.methods.functional import apply_alibi
from cosmati.models.gpt import GPT, Attention, GPTConfig

SHAPE: dict[str, Any] = {"vocabulary_size": 11, "sequence_length": 9, "width": 16, "num_blocks": 2, "num_heads": 4}
TOKENS = torch.randint(11, (3, 9), generator=torch.Generator().manual_seed(0))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "values": {"value_embeddings": 1, "qk_norm": True},
    "learnt": {"rotary": False, "tied": True, "activation": "relu_squared", "normalisation": "rms"},
    "documents": {"document_end": 3, "all_scores": True},
}


def made(**options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**SHAPE, **options}))


def run(model: GPT) -> dict[str, Tensor]:
    """Logits and every gradient."""
    model.zero_grad()
    logits = model(TOKENS)
    logits.logsumexp(-1).square().mean().backward()
    return {"logits": logits.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("options", list(OPTIONS))
@pytest.mark.parametrize("number", [2, 4])
def test_parts_are_the_whole_model_in_float64(options: str, number: int) -> None:
    model = made(**OPTIONS[options]).double()
    whole = run(model)
    cut = model.compute_in_parts(VirtualShards(number))
    found = run(model)
    assert found.keys() == whole.keys() >= cut.keys()
    for name, value in whole.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-15)


def test_each_number_of_parts_has_its_own_bits_and_none_those_of_the_plain_model() -> None:
    model = made()
    plain = run(model)["logits"]
    seen = [plain]
    for number in (2, 4):
        model.compute_in_parts(VirtualShards(number))
        found = run(model)["logits"]
        assert torch.equal(found, run(model)["logits"])
        assert not any(torch.equal(found, other) for other in seen)
        seen.append(found)
    model.compute_in_parts(None)
    assert torch.equal(run(model)["logits"], plain)
    assert not any("shards" in vars(module) for module in model.modules())


def test_it_says_what_is_cut_and_along_which_dimension() -> None:
    cut = made(num_blocks=1).compute_in_parts(VirtualShards(2))
    rows = {"attention.query": 0, "attention.key": 0, "attention.value": 0, "feed_forward.up": 0}
    columns = {"attention.projection": 1, "feed_forward.down": 1}
    assert cut == {f"blocks.0.{name}.weight": dim for name, dim in (rows | columns).items()}


class Pretended:
    """Other ranks that give what this one gives."""

    place = 0

    def __init__(self, degree: int) -> None:
        self.degree = degree

    def total(self, own: Tensor) -> Tensor:
        return own.clone()

    def everyone(self, own: Tensor) -> list[Tensor]:
        return [own] * self.degree

    def puts_off(self, parameter: int, dim: int) -> bool:
        return True


def kept_bytes(model: GPT) -> int:
    """What autograd keeps for backward, but for parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(TOKENS)
    assert logits.requires_grad
    return sum(size for address, size in seen.items() if address not in parameters)


def test_a_rank_keeps_its_own_parts_for_backward_alone() -> None:
    model = made(width=64, num_heads=8, num_blocks=4)
    sizes = []
    for degree in (1, 2, 4, 8):
        model.compute_in_parts(VirtualShards(8, Pretended(degree)))
        sizes.append(kept_bytes(model))
    shared = 2 * (sizes[0] - sizes[1])  # half of it went
    assert shared > 0.6 * sizes[0]
    assert sizes == pytest.approx([sizes[0] - shared * (1 - 1 / degree) for degree in (1, 2, 4, 8)], rel=0.02)


class Own(Attention):
    """A subclass."""


class OwnGPT(GPT):
    """A subclass."""


def _exchanged(model: GPT) -> GPT:
    model.blocks[1].attention = Own(model.config)
    return model


def _biased(model: GPT) -> GPT:
    model.blocks[0].feed_forward.up = nn.Linear(16, 64)
    return model


def _hooked(model: GPT) -> GPT:
    model.blocks[0].attention.query.register_forward_hook(lambda *_: None)
    return model


def _normed(model: GPT) -> GPT:
    parametrizations.weight_norm(model.blocks[1].attention.key)
    return model


def _tied(model: GPT) -> GPT:
    model.blocks[0].attention.query.weight = model.blocks[0].attention.projection.weight
    return model


def _alibi(model: GPT) -> GPT:
    apply_alibi(model, max_sequence_length=9)
    return model


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_exchanged, r"blocks\.1\.attention is another layer"),
        (_biased, r"blocks\.0\.feed_forward\.up has a bias, or hooks"),
        (_hooked, r"blocks\.0\.attention\.query has a bias, or hooks"),
        (_normed, r"blocks\.1\.attention\.key is another layer"),
        (_tied, "weights are tied in blocks"),
        (_alibi, r"blocks\.0\.attention is another layer"),
        (lambda _: OwnGPT(GPTConfig(**SHAPE)), "OwnGPT isn't GPT itself"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(change: Callable[[GPT], GPT], named: str) -> None:
    with pytest.raises(PlanError, match=f"virtual_shards=2 cuts the project's own GPT, and {named}"):
        change(made(rotary=False)).compute_in_parts(VirtualShards(2))


def test_the_number_of_parts_divides_the_heads() -> None:
    with pytest.raises(PlanError, match="4 heads can't be shared out to virtual_shards=8"):
        made().compute_in_parts(VirtualShards(8))
