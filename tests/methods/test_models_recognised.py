"""Models are recognised by what they are: subclasses, copies in other modules and renamed parts work or are refused."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmati.errors import PlanError
from cosmati.methods.alibi import AlibiAttention, apply_alibi
from cosmati.methods.building_blocks.surgery import is_loaded_instance, strangers
from cosmati.methods.gated_linear_units import GatedBlock, apply_gated_linear_units
from cosmati.methods.stochastic_depth import apply_stochastic_depth
from cosmati.models import gpt
from tests.methods.cases import CASES

CONFIG = {"width": 12, "num_blocks": 2, "num_heads": 3, "sequence_length": 8, "rotary": False}
TOKENS = torch.arange(12).view(2, 6)


@pytest.fixture
def vendored(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return this library's GPT as a user's own module, copied."""
    module = types.ModuleType("somebodys_model")
    monkeypatch.setitem(sys.modules, "somebodys_model", module)
    exec(inspect.getsource(gpt), module.__dict__)
    return module


def built(module: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return module.GPT(module.GPTConfig(**{**CONFIG, **options})).eval()


@pytest.fixture
def hugging_face() -> Callable[[], Any]:
    transformers = pytest.importorskip("transformers")

    def make() -> Any:
        torch.manual_seed(0)
        sizes = {"vocab_size": 50, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 16}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, attn_implementation="eager")).eval()

    return make


def gated(model: nn.Module, **options: Any) -> nn.Module:
    return apply_gated_linear_units(model, generator=torch.Generator().manual_seed(1), **options)


def untouched(model: nn.Module) -> Callable[[], bool]:
    """Return a check that nothing has been done to a model."""
    kinds, state = [type(module) for module in model.modules()], {n: v.clone() for n, v in model.state_dict().items()}

    def check() -> bool:
        now = model.state_dict()
        same = now.keys() == state.keys() and all(torch.equal(now[name], value) for name, value in state.items())
        return same and [type(module) for module in model.modules()] == kinds

    return check


SURGERY = [lambda model: apply_alibi(model, 8), gated]


@pytest.mark.parametrize("surgery", SURGERY, ids=["Alibi", "GatedLinearUnits"])
def test_a_copy_of_the_gpt_in_another_module_is_the_gpt(surgery: Callable[[Any], Any], vendored: Any) -> None:
    copied, own = built(vendored), built(gpt)
    assert not isinstance(copied, gpt.GPT)
    before = own(TOKENS)
    assert torch.equal(surgery(copied)(TOKENS), surgery(own)(TOKENS))
    assert not torch.equal(own(TOKENS), before)


class OwnForward(gpt.Attention):
    def forward(self, hidden: Tensor) -> Tensor:
        return F.relu(super().forward(hidden))


class OwnBias(OwnForward):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.bias(hidden)[0].softmax(-1) @ hidden

    def bias(self, query: Tensor) -> Tensor:
        return query.new_zeros(1, query.shape[-2], query.shape[-2])


def replaced(model: Any, place: str, kind: type[nn.Module], *, only: int | None = None) -> Any:
    """Give the layers in a place of each block, or of one, another class."""
    for index, block in enumerate(getattr(model, "blocks", None) or model.transformer.h):
        if only in (None, index):
            getattr(block, place).__class__ = kind
    return model


def test_attention_that_may_not_ask_for_a_bias_is_refused() -> None:
    model = replaced(built(gpt), "attention", OwnForward)
    check = untouched(model)
    with pytest.raises(
        PlanError, match=r"OwnForward: its forward is of OwnForward and its `bias` of Attention.*one cla"
    ):
        apply_alibi(model, 8)
    assert check()
    model = replaced(built(gpt), "attention", OwnBias)
    hidden = torch.randn(1, 4, 12)
    before = model.blocks[0].attention(hidden)
    after = apply_alibi(model, 8).blocks[0].attention(hidden)
    torch.testing.assert_close(after[0, 0], hidden[0, 0], msg="the first one attends to itself alone")
    assert not torch.allclose(before[0, 0], hidden[0, 0])


def test_blocks_of_which_some_are_unknown_are_refused(hugging_face: Callable[[], Any]) -> None:
    for model, name in ((built(gpt), "blocks.1.attention"), (hugging_face(), "transformer.h.1.attn")):
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, nn.Identity())
        check = untouched(model)
        with pytest.raises(PlanError, match=rf"can't change {name} is a Identity .* Remove it from the methods"):
            apply_alibi(model, 8)
        assert check()
    for model, name in ((built(gpt), "blocks.0.feed_forward"), (hugging_face(), "transformer.h.0.mlp")):
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, nn.Identity())
        check = untouched(model)
        with pytest.raises(PlanError, match=rf"only some of the blocks: {name} is a Identity .* target_layer_name"):
            gated(model)
        assert check()


def test_positions_under_another_name_are_refused() -> None:
    model = built(gpt)
    model.places, model.position = model.position, None
    with pytest.raises(PlanError, match=r"GPT: it has no learnt positions to take out"):
        apply_alibi(model, 8)
    assert not [module for module in model.modules() if isinstance(module, AlibiAttention)]


class GPT2Model(nn.Module):
    """Bears the name of one of Hugging Face's, and is another thing."""

    def __init__(self) -> None:
        super().__init__()
        self.wpe = nn.Embedding(4, 4)
        self.attention = nn.MultiheadAttention(4, 2)


def test_a_name_alone_is_nothing() -> None:
    with pytest.raises(PlanError, match="no attention that is known"):
        apply_alibi(GPT2Model(), 8)


@pytest.mark.parametrize("surgery", SURGERY, ids=["Alibi", "GatedLinearUnits"])
def test_subclasses_of_hugging_faces_layers_are_known(
    surgery: Callable[[Any], Any], hugging_face: Callable[[], Any]
) -> None:
    model, plain = hugging_face(), hugging_face()
    for place in ("attn", "mlp"):
        kind = type(getattr(model.transformer.h[0], place))
        replaced(model, place, type(f"My{kind.__name__}", (kind,), {"__doc__": "A user's."}))
    assert torch.equal(surgery(model)(TOKENS).logits, surgery(plain)(TOKENS).logits)


def test_hugging_faces_attention_with_a_forward_that_takes_no_mask_is_refused(hugging_face: Callable[[], Any]) -> None:
    model = hugging_face()
    kind = type(model.transformer.h[0].attn)
    replaced(model, "attn", type("MyAttention", (kind,), {"forward": lambda self, *args, **kwargs: args}), only=1)
    check = untouched(model)
    with pytest.raises(PlanError, match="MyAttention: its forward has no `hidden_states` and `attention_mask`"):
        apply_alibi(model, 8)
    assert check()


class Residual(gpt.FeedForward):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + super().forward(hidden)


class Refusing(gpt.FeedForward):
    def forward(self, hidden: Tensor) -> Tensor:
        raise TypeError(hidden.shape)


@pytest.mark.parametrize("kind", [Residual, Refusing])
def test_a_feed_forward_that_computes_something_else_is_refused_and_left_as_it_was(kind: type[nn.Module]) -> None:
    model = replaced(built(gpt, zero_init_projections=True), "feed_forward", kind, only=1)
    calls: list[str] = []
    model.blocks[1].feed_forward.up.register_forward_hook(lambda *_: calls.append("up"))
    check, state = untouched(model.train()), torch.get_rng_state()
    with pytest.raises(PlanError, match=rf"can't gate blocks.1.feed_forward, a {kind.__name__}: .* GatedFeedForward"):
        gated(model)
    assert check()
    assert (calls, model.blocks[1].feed_forward.training) == ([], True)
    assert torch.equal(torch.get_rng_state(), state)
    if kind is Residual:
        model(TOKENS)
        assert calls == ["up"], "the hooks are back"


class Conv1D(nn.Module):
    """As in the first GPT-2 that was published."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.2)
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Mlp(nn.Module):
    def __init__(self, *, renamed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order = ("expand", "nonlinearity", "contract", "drop") if renamed else ("c_fc", "act", "c_proj", "dropout")
        layers = (Conv1D(7, 5), nn.Tanh(), Conv1D(5, 7), nn.Dropout(0.5))
        for name, layer in zip(self.order, layers, strict=True):
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = getattr(self, name)(x)
        return x


def test_a_copied_feed_forward_is_gated_and_a_renamed_one_when_it_is_named() -> None:
    x = torch.randn(3, 5)
    copied, renamed = (nn.ModuleList([Mlp(renamed=name)]).eval() for name in (False, True))
    gated(copied)
    with pytest.warns(UserWarning, match="GatedLinearUnits changes nothing.*target_layer_name"):
        gated(renamed)
    gated(renamed, target_layer_name=Mlp)
    block: Any = copied[0]
    assert isinstance(block, GatedBlock)
    assert isinstance(renamed[0], GatedBlock)
    hidden = (x @ block.c_fc.weight + block.c_fc.bias).tanh() * (x @ block.gate.weight.T)
    torch.testing.assert_close(block(x), hidden @ block.c_proj.weight + block.c_proj.bias)
    assert torch.equal(block(x), renamed[0](x))


def test_a_forward_on_the_object_itself_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    layer: Any = model[0]
    layer.forward = types.MethodType(nn.Linear.forward, layer)
    with pytest.raises(PlanError, match=r"This Linear has had its forward replaced.* Apply methods first"):
        apply_stochastic_depth(model, nn.Linear)
    assert type(layer) is nn.Linear


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> type[nn.Module]:
    module = types.ModuleType("a_package.layers")
    module.__dict__["Layer"] = type("Layer", (nn.Module,), {})
    module.__dict__["number"] = 3
    monkeypatch.setitem(sys.modules, "a_package.layers", module)
    kind: type[nn.Module] = module.__dict__["Layer"]
    return kind


def test_classes_are_looked_up_and_not_imported(loaded: type[nn.Module]) -> None:
    paths = ["a_package.layers.number", "wave.Wave_read", "a_package.layers.Layer"]
    assert is_loaded_instance(loaded(), paths)
    assert is_loaded_instance(type("Mine", (loaded,), {})(), paths)
    assert not is_loaded_instance(type("Layer", (nn.Module,), {})(), paths)
    assert not is_loaded_instance(loaded(), paths[:2])
    assert "wave" not in sys.modules or sys.modules["wave"].__name__ == "wave"


def test_strangers_stand_where_the_known_ones_do() -> None:
    model = nn.Sequential(nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Linear(1, 1))
    assert strangers(model, [model[0][0], model[0][1], model[1][0], model[1][1]]) == {}
    assert strangers(model, [model[0][0], model[0][1], model[1][0]]) == {"1.1": model[1][1]}
    assert strangers(model, []) == {}


LEFT_ALONE: dict[str, tuple[type[nn.Module], tuple[Any, ...]]] = {
    "BlurPool": (nn.MaxPool2d, (2,)),
    "Factorize": (nn.Linear, (8, 8)),
    "GhostBatchNorm": (nn.BatchNorm2d, (4,)),
    "GyroDropout": (nn.Dropout, ()),
    "LowPrecisionGroupNorm": (nn.GroupNorm, (2, 4)),
    "LowPrecisionLayerNorm": (nn.LayerNorm, (4,)),
    "SqueezeExcite": (nn.Conv2d, (8, 8, 3)),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_subclasses_that_are_left_alone_are_named(name: str) -> None:
    case = next(case for case in CASES if str(case) == name)
    native, sizes = LEFT_ALONE[name]
    model = nn.Sequential(type("MyLayer", (native,), {})(*sizes), nn.Flatten())
    check = untouched(model)
    with pytest.warns(UserWarning, match=rf"{name} changes nothing: .*left alone.* it has MyLayer\.$"):
        case.on.apply(model)
    assert check()
    with pytest.warns(UserWarning, match=rf"{name} changes nothing: ") as said:
        case.on.apply(nn.Sequential(nn.Flatten()))
    assert "left alone" not in str(said[0].message)
