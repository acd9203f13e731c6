"""What classes have of their own in layers: who reads it, what it computes, how it goes, what is refused."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmati.core.isolated import isolated_classes, isolated_modules, running
from cosmati.errors import PlanError
from cosmati.methods import IsolatedAdapters
from cosmati.methods.building_blocks.isolated_layers import Expert, LowRankAttention, LowRankConv, LowRankLinear
from cosmati.methods.functional import apply_isolated, drop_isolated, enabled_classes
from tests.methods.cases import CASES, digits, run_of


def filled(model: nn.Module) -> nn.Module:
    """Return a model whose isolated parameters aren't zero."""
    generator = torch.Generator().manual_seed(3)
    for module in isolated_modules(model).values():
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.5, generator=generator)
    return model


def only(model: nn.Module) -> nn.Module:
    (found,) = isolated_modules(model).values()
    return found


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_reads_a_merged_matrix(bias: bool) -> None:
    layer = nn.Linear(6, 5, bias=bias).double()
    model = filled(apply_isolated(copy.deepcopy(layer), "a", rank=2, scale=0.5))
    own, rows = only(model), torch.randn(3, 4, 6).double()
    assert isinstance(own, LowRankLinear)
    torch.testing.assert_close(model(rows), layer(rows), rtol=0, atol=0)
    weight = layer.weight + 0.5 * own.matrix.up @ own.matrix.down
    with enabled_classes(model, "a"):
        torch.testing.assert_close(model(rows), F.linear(rows, weight, layer.bias))
        torch.testing.assert_close(model(input=rows), F.linear(rows, weight, layer.bias))


CONVS = [
    nn.Conv1d(4, 6, 3, padding=1),
    nn.Conv1d(4, 6, 3, padding=2, dilation=2, padding_mode="circular"),
    nn.Conv2d(4, 6, 3, stride=2, padding=1),
    nn.Conv2d(4, 6, (3, 5), padding="same", groups=2),
    nn.Conv2d(4, 6, 3, padding=(2, 1), padding_mode="reflect", bias=False),
    nn.Conv2d(4, 6, 3, padding="same", padding_mode="replicate"),
]


@pytest.mark.parametrize("layer", CONVS, ids=str)
def test_a_convolution_reads_a_merged_kernel(layer: nn.Conv1d | nn.Conv2d) -> None:
    layer = copy.deepcopy(layer).double()
    model = filled(apply_isolated(copy.deepcopy(layer), "a", rank=2))
    own, rows = only(model), torch.randn(2, 4, 9, *([8] if layer.weight.ndim == 4 else [])).double()
    assert isinstance(own, LowRankConv)
    # The same layer without groups, whose kernel is the product.
    merged = type(layer)(
        *(4, 6, layer.kernel_size),  # type: ignore[arg-type]
        stride=layer.stride,  # type: ignore[arg-type]
        padding=layer.padding,  # type: ignore[arg-type]
        dilation=layer.dilation,  # type: ignore[arg-type]
        padding_mode=layer.padding_mode,
        bias=False,
    ).double()
    with torch.no_grad():
        merged.weight.copy_(torch.einsum("or,ri...->oi...", own.up.flatten(1), own.down))
    with enabled_classes(model, "a"):
        torch.testing.assert_close(model(rows), layer(rows) + merged(rows))
    torch.testing.assert_close(model(rows), layer(rows), rtol=0, atol=0)


@pytest.mark.parametrize("sizes", [{}, {"kdim": 5, "vdim": 7}])
def test_attention_reads_merged_projections(sizes: dict[str, int]) -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True, **sizes).double()
    model = filled(apply_isolated(copy.deepcopy(layer), "a", rank=2))
    own = only(model)
    assert isinstance(own, LowRankAttention)
    merged = copy.deepcopy(layer)
    added = [part.up @ part.down for part in (own.query, own.key, own.value)]
    with torch.no_grad():
        merged.out_proj.weight += own.out.up @ own.out.down
        if sizes:
            for name, part in zip("qkv", added, strict=True):
                merged.get_parameter(f"{name}_proj_weight").add_(part)
        else:
            merged.in_proj_weight += torch.cat(added)
    query = torch.randn(2, 3, 8).double()
    key, value = (torch.randn(2, 4, sizes.get(size, 8)).double() for size in ("kdim", "vdim"))
    for training in (True, False):
        model.train(training)
        with enabled_classes(model, "a"):
            torch.testing.assert_close(model(query, key, value), merged(query, key, value))
        torch.testing.assert_close(model(query, key, value)[0], layer(query, key, value)[0], rtol=0, atol=0)
    assert set(dict(model.named_parameters())) > set(dict(layer.named_parameters())), "no parameter has gone"


def test_pytorchs_encoder_reads_them_in_evaluation_too() -> None:
    """Its fast path reads its layers' weights by itself."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = filled(apply_isolated(nn.TransformerEncoder(layer, 2), "a", rank=2))
    rows = torch.randn(2, 3, 8)
    with enabled_classes(model, "a"):
        trained = model.train()(rows)
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(rows), trained)


@pytest.mark.slow  # transformers
def test_gpt2s_layers_of_transformers_are_known() -> None:
    Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D  # noqa: N806  (a class)
    layer = Conv1D(5, 6)  # to, from
    model, rows = filled(apply_isolated(copy.deepcopy(layer), "a", rank=2)), torch.randn(3, 6)
    own = only(model)
    assert isinstance(own, LowRankLinear)
    with enabled_classes(model, "a"):
        torch.testing.assert_close(model(rows), layer(rows) + rows @ (own.matrix.up @ own.matrix.down).t())


class Block(nn.Module):
    """Gives its output and a number beside, as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, rows: Tensor) -> tuple[Tensor, int]:
        return self.linear(rows), 7


def test_experts_stand_in_place_or_beside() -> None:
    block, rows = Block(), torch.randn(3, 4)
    shared = block(rows)[0]
    instead = apply_isolated(copy.deepcopy(block), "a", "", "expert")
    beside = apply_isolated(copy.deepcopy(block), "a", "", "beside")
    with enabled_classes(instead, "a"):
        assert torch.equal(instead(rows)[0], shared), "it begins as the layer is"
    with enabled_classes(beside, "a"):
        assert torch.equal(beside(rows)[0], shared), "its gate is shut"
    filled(instead)
    filled(beside)
    for model in (instead, beside):
        own = only(model)
        assert isinstance(own, Expert)
        alone = own.expert(rows)[0]
        with enabled_classes(model, "a"):
            found, number = model(rows)
        torch.testing.assert_close(found, alone if own.gate is None else shared + own.gate * alone)
        assert number == 7
        assert torch.equal(model(rows)[0], shared)


def test_experts_of_two_classes_in_one_place_are_refused() -> None:
    model = apply_isolated(Block(), ("a", "b"), "", "expert")
    with enabled_classes(model, "a", "b"), pytest.raises(PlanError, match="Experts of a and b can't both stand"):
        model(torch.randn(3, 4))
    low = filled(apply_isolated(nn.Linear(4, 4), ("a", "b"), rank=2))
    rows = torch.randn(3, 4)
    with enabled_classes(low, "a", "b"):
        both = low(rows)
    parts = []
    for name in ("a", "b"):
        with enabled_classes(low, name):
            parts.append(low(rows) - drop_isolated(copy.deepcopy(low), "a", "b")(rows))
    torch.testing.assert_close(both, drop_isolated(low, "a", "b")(rows) + parts[0] + parts[1])


def test_at_tokens_of_the_class_alone() -> None:
    for layer, shape in ((nn.Linear(4, 4), (2, 5, 4)), (nn.Conv1d(4, 4, 1), (2, 4, 5))):
        model, tokens = filled(apply_isolated(copy.deepcopy(layer), "a", rank=2)), torch.randn(*shape)
        mask = torch.rand(2, 5) < 0.5
        with running(isolated_modules(model).values(), {"a": mask}):
            found = model(tokens)
        with enabled_classes(model, "a"):
            own = model(tokens)
        at = mask[..., None] if isinstance(layer, nn.Linear) else mask[:, None]
        assert torch.equal(found, torch.where(at, own, layer(tokens)))


def test_the_context_is_put_back_after_errors_and_nests() -> None:
    model = apply_isolated(nn.Linear(4, 4), ("a", "b"), rank=2)

    def enabled() -> list[str]:
        return [m.class_name for m in isolated_modules(model).values() if m.is_enabled]

    def fails() -> None:
        with enabled_classes(model, "a"):
            assert enabled() == ["a"]
            with enabled_classes(model, "b"):
                assert enabled() == ["b"]
            assert enabled() == ["a"]
            with enabled_classes(model):
                assert enabled() == []
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert enabled() == []
    with (
        pytest.raises(PlanError, match=r"nothing of class 'c' to enable; it has 'a', 'b'"),
        enabled_classes(model, "c"),
    ):
        pass
    with pytest.raises(PlanError, match="no isolated modules"), enabled_classes(nn.Linear(2, 2), "a"):
        pass


def test_dropped_it_is_the_model_that_it_was() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), Block())
    model = apply_isolated(copy.deepcopy(plain), ("a", "b"), rank=2)
    apply_isolated(model, "a", "1", "expert")
    drop_isolated(model, "b")
    assert isolated_classes(model) == ("a",)
    drop_isolated(model, "a")
    assert str(model) == str(plain)
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    with pytest.raises(PlanError, match="nothing of class a to drop"):
        drop_isolated(model, "a")


def test_nothing_is_put_into_what_is_isolated() -> None:
    """An expert copies a layer without its adapters, and gets none of another class."""
    model = nn.Sequential(nn.Linear(4, 4), Block())
    apply_isolated(model, "a", rank=2)
    apply_isolated(model, "b", "1", "expert")
    apply_isolated(model, "c", rank=2)
    expert = next(m for m in isolated_modules(model).values() if isinstance(m, Expert))
    assert not isolated_modules(expert.expert)
    names = [name for name, _ in model.named_parameters() if ".c." in name]
    assert names == [f"{layer}.isolated.c.matrix.{part}" for layer in ("0", "1.linear") for part in ("down", "up")]


def test_a_class_may_be_called_like_anything() -> None:
    model = apply_isolated(nn.Linear(4, 4), ("items", "pop", "train", "licensed/news"), rank=2)
    assert isolated_classes(model) == ("items", "licensed/news", "pop", "train")
    assert isolated_classes(pickle.loads(pickle.dumps(model))) == isolated_classes(model)
    drop_isolated(model, "items")
    assert isolated_classes(model) == ("licensed/news", "pop", "train")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rank": 0}, "rank=0 is a whole number"),
        ({"rank": True}, "rank=True"),
        ({"scale": 0.0}, "scale=0.0 positive"),
        ({"kind": "adapter"}, "kind='adapter' is none of"),
        ({"kind": "expert"}, "an expert copies whole layers"),
        ({"classes": ("a", "")}, r"\[''\] name no class"),
        ({"classes": "a.b"}, "name no class"),
    ],
)
def test_odd_options_are_refused(options: dict[str, object], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        IsolatedAdapters(**{"classes": "a", **options})  # type: ignore[arg-type]


def test_containers_are_refused_and_idle_names_are_told() -> None:
    with pytest.raises(PlanError, match=r"'0' \(Sequential\): a container runs"):
        apply_isolated(nn.Sequential(nn.Sequential(nn.Linear(2, 2))), "a", "0", "expert")
    with pytest.warns(UserWarning, match="blocks names no layer of Sequential that is a Linear"):
        apply_isolated(nn.Sequential(nn.ReLU()), "a", "blocks")


def test_layers_that_arent_there_and_odd_ones_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(PlanError, match=r"layers: '1' names no layer that could have"):
        apply_isolated(model, "a", ("0", "1"))
    model[0].isolated = 1
    with pytest.raises(PlanError, match="0 has something called 'isolated' already"):
        apply_isolated(model, "a")
    whole = nn.Linear(2, 2)
    whole.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    with pytest.raises(PlanError, match=r"The weight of the model is torch\.int8"):
        apply_isolated(whole, "a")

    class Told(nn.Linear):
        def forward(self, input: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return {"output": super().forward(input)}

    told = apply_isolated(Told(2, 2), "a", "", "beside")
    with enabled_classes(told, "a"), pytest.raises(PlanError, match="A IsolatedTold gives a dict"):
        told(torch.randn(1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_models_of_transformers_read_them(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "GPT2": {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8},
        "Llama": {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    }
    config = getattr(transformers, f"{kind}Config")(vocab_size=16, **sizes[kind])
    model = filled(
        apply_isolated(
            getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config), "a", rank=2
        )
    )
    with enabled_classes(model, "a"):
        model(input_ids=torch.arange(8).view(2, 4), labels=torch.arange(8).view(2, 4)).loss.backward()
    own = [p for name, p in model.named_parameters() if "isolated" in name]
    assert len(own) > 8
    assert all(p.grad is not None and bool(p.grad.any()) for p in own)


def test_an_export_leaves_it_out(tmp_path: Path) -> None:
    case = next(case for case in CASES if isinstance(case.on, IsolatedAdapters))
    run = run_of(case)
    run.fit()
    exported = run.export(tmp_path / "out", to="safetensors")
    assert not isolated_modules(exported)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert not any(b"isolated" in path.read_bytes() for path in files if path.suffix == ".safetensors")
    images = digits()[0][:4]
    assert torch.equal(exported(images), run.model.eval()(images))
