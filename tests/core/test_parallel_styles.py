"""Linear layers cut by styles: the whole layers' function and gradients, by whoever computes which features."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.nn.utils import parametrizations

from cosmati.core.parallel_styles import ColwiseLinear, RowwiseLinear, StyledShards, cut_by_styles, named_styles
from cosmati.core.virtual_shards import VirtualShards, compute_whole
from cosmati.errors import PlanError
from tests.core.test_virtual_shards import Threads

STYLES = named_styles({"layers.*.up": "colwise", "layers.*.down": "rowwise"})


class Layer(nn.Module):
    def __init__(self, width: int, features: int, *, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, features, bias=bias), nn.Linear(features, width, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(self.up(hidden).tanh())


class Model(nn.Module):
    def __init__(self, width: int = 6, features: int = 8, *, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(width, features, bias=bias) for _ in range(2)])

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def run(model: nn.Module, rows: Tensor) -> dict[str, Tensor]:
    """What a model gives, and all gradients."""
    rows = rows.clone().requires_grad_()
    out = model(rows)
    out.square().sum().backward()
    assert rows.grad is not None
    return {"out": out.detach(), "rows": rows.grad, **{n: p.grad for n, p in model.named_parameters()}}  # type: ignore[dict-item]


class Attending(nn.Module):
    """Three layers that read one tensor, which may change in between."""

    def __init__(self, *, changes: bool = False) -> None:
        super().__init__()
        self.changes = changes
        self.q, self.k, self.v, self.down = (nn.Linear(8, 8, bias=False) for _ in range(4))
        if changes:  # who learns keeps what it has read, and nobody may change that
            self.q.requires_grad_(False)
            self.k.requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = rows * 2
        found = self.q(hidden) + self.k(hidden)
        if self.changes:
            hidden.sin_()
        return self.down(found + self.v(hidden))


@pytest.mark.parametrize("changes", [False, True])
def test_layers_that_read_one_tensor_sum_its_gradient_once(changes: bool) -> None:
    styles = named_styles({"[qkv]": "colwise", "down": "rowwise"})
    torch.manual_seed(0)
    model, rows = Attending(changes=changes).double(), torch.randn(3, 8, dtype=torch.float64)
    whole, threads = run(copy.deepcopy(model), rows), Threads(2)

    def one(shards: VirtualShards) -> dict[str, Tensor]:
        own = copy.deepcopy(model)
        cut_by_styles(own, styles, StyledShards(2, shards.peers))
        with torch.inference_mode():
            own(rows)
        with torch.no_grad():
            own(rows)
        return run(own, rows)

    for found in threads.run(one, puts_off=True):
        for name in ("out", "rows"):
            torch.testing.assert_close(found[name], whole[name], rtol=1e-12, atol=1e-12)
    assert threads.num_exchanges == 3 + 1 + changes, "three forward passes, and what's read"


def test_what_was_read_is_let_go_of_by_the_sum_and_not_taken_again_with_a_graph() -> None:
    layer, hidden = Layer(4, 6, bias=False), torch.ones(2, 4, requires_grad=True)
    cut_by_styles(layer, named_styles({"up": "colwise", "down": "rowwise"}), StyledShards(1))
    with torch.no_grad():
        layer.up(hidden)  # it breaks off before the sum
    (layer.up(hidden).sum() * 2).backward()
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, 2 * layer.up.weight.sum(0).expand(2, 4))
    kept = weakref.ref(hidden)
    layer(hidden)
    del hidden
    gc.collect()
    assert kept() is None


def together(model: nn.Module, degree: int, rows: Tensor) -> list[dict[str, Tensor]]:
    """What each of several ranks, as threads, gives of a model cut over them."""

    def one(shards: VirtualShards) -> dict[str, Tensor]:
        own = copy.deepcopy(model)
        cut_by_styles(own, STYLES, StyledShards(degree, shards.peers))
        return run(own, rows)

    return Threads(degree).run(one)


@pytest.mark.long
@given(st.sampled_from([2, 4, 8]), st.integers(1, 5), st.integers(1, 3), st.booleans(), st.integers(0, 9))
def test_every_rank_has_the_whole_models_values_and_gradients(
    degree: int, width: int, share: int, bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    model, rows = Model(width, degree * share, bias=bias).double(), torch.randn(3, width, dtype=torch.float64)
    whole = run(copy.deepcopy(model), rows)
    for found in together(model, degree, rows):
        assert found.keys() == whole.keys()
        for name, value in whole.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


def test_ranks_agree_to_the_last_bit_and_another_number_of_them_does_not() -> None:
    torch.manual_seed(0)
    model, rows = Model(16, 64), torch.randn(5, 16)
    two, four = together(model, 2, rows), together(model, 4, rows)
    for found in (two, four):
        assert all(torch.equal(one[name], found[0][name]) for one in found for name in one)
    assert not torch.equal(two[0]["out"], four[0]["out"])


def test_it_says_what_is_cut_and_is_put_back_with_the_plain_bits() -> None:
    torch.manual_seed(0)
    model, rows = Model(), torch.randn(2, 6)
    plain = run(copy.deepcopy(model), rows)
    names, shards = list(model.state_dict()), StyledShards(2)
    cut = cut_by_styles(model, STYLES, shards)
    expected = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    assert cut == {f"layers.{index}.{name}": dim for index in range(2) for name, dim in expected.items()}
    assert (type(model.layers[0].up), type(model.layers[0].down)) == (ColwiseLinear, RowwiseLinear)
    assert model.layers[0].up.shards is shards
    assert list(model.state_dict()) == names
    assert cut_by_styles(model, STYLES, shards) == cut, "again"
    assert copy.deepcopy(model).layers[0].up.compute_in_parts(None) == {}, "nothing is cut any more"
    compute_whole(model)
    assert not any("shards" in vars(module) for module in model.modules())
    assert {type(module) for module in model.modules()} == {Model, Layer, nn.ModuleList, nn.Linear}
    assert all(torch.equal(value, plain[name]) for name, value in run(model, rows).items())
    assert cut_by_styles(Model(bias=False), STYLES, None).keys() == {n for n in cut if n.endswith("weight")}


@pytest.mark.parametrize("pattern", ["layers.*.up", "layers.0.up", "layers.1.up"])
def test_a_layer_under_two_names_is_cut_once_by_either(pattern: str) -> None:
    model = Model()
    model.layers[1].up = model.layers[0].up
    cut = cut_by_styles(model, named_styles({pattern: "colwise", "layers.*.down": "rowwise"}), StyledShards(2))
    assert {name: dim for name, dim in cut.items() if ".up." in name} == {
        "layers.0.up.weight": 0,
        "layers.0.up.bias": 0,
    }
    with pytest.raises(PlanError, match="twice, with two styles"):
        cut_by_styles(model, named_styles({"layers.0.up": "colwise", "layers.1.up": "rowwise"}), StyledShards(2))


@pytest.mark.parametrize("bias", [False, True])
def test_autocast_leaves_the_types_of_whole_layers(bias: bool) -> None:
    model, rows = Model(bias=bias), torch.randn(2, 6)
    hidden = model.layers[0].up(rows)
    with torch.autocast("cpu", torch.bfloat16):
        plain = model.layers[0].up(rows).dtype, model.layers[0].down(hidden).dtype
        cut_by_styles(model, STYLES, StyledShards(1))
        assert (model.layers[0].up(rows).dtype, model.layers[0].down(hidden).dtype) == plain


@pytest.mark.parametrize(
    ("styles", "said"),
    [
        ({"layers.*.middle": "colwise"}, r"names 'layers\.\*\.middle', and Model has no module of that name"),
        ({"*.up": "colwise"}, r"names '\*\.up', and Model has no module"),
        ({"layers": "colwise"}, r"cuts plain nn\.Linear layers, and layers is a ModuleList"),
        ({"layers.*.up.more": "colwise"}, r"has no module of that name"),
        ({"layers.*": "colwise"}, r"cuts plain nn\.Linear layers, and layers\.0 is a Layer"),
        ({"layers.0.up": "colwise", "layers.*.up": "rowwise"}, r"names layers\.0\.up twice, with two styles"),
    ],
)
def test_what_names_no_linear_layer_is_refused(styles: dict[str, str], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        cut_by_styles(model := Model(), named_styles(styles), StyledShards(2))
    assert type(model.layers[0].up) is nn.Linear


def test_layers_that_are_not_plain_are_refused() -> None:
    model = Model()
    parametrizations.weight_norm(model.layers[1].down)
    with pytest.raises(PlanError, match=r"layers\.1\.down is a ParametrizedLinear"):
        cut_by_styles(model, STYLES, StyledShards(2))
    patched = Model()
    patched.layers[0].up.forward = patched.layers[0].up.forward
    with pytest.raises(PlanError, match=r"layers\.0\.up is a layer with a `forward` of its own"):
        cut_by_styles(patched, STYLES, StyledShards(2))
    with pytest.raises(PlanError, match="the model itself is a Model"):
        cut_by_styles(patched, named_styles({"": "colwise"}), StyledShards(2))
    hooked = Model()
    hooked.layers[0].up.register_forward_hook(lambda *_: None)
    with pytest.raises(PlanError, match=r"layers\.0\.up is a layer with hooks, which would see a part of it"):
        cut_by_styles(hooked, STYLES, StyledShards(2))


def test_pytorchs_objects_are_taken_for_their_names() -> None:
    given = {"up": ColwiseParallel(), "down": RowwiseParallel(), "other": "rowwise"}
    assert named_styles(given) == (("down", "rowwise"), ("other", "rowwise"), ("up", "colwise")), "in any order"
    assert named_styles(named_styles(given)) == named_styles(given)
    assert named_styles([["up", "colwise"]]) == (("up", "colwise"),), "as JSON has it"  # type: ignore[list-item]


@pytest.mark.parametrize("given", ["auto", ["up", "down"], None, {1: "colwise"}, 3, [("up",)]])
def test_what_is_no_mapping_is_told_the_form(given: Any) -> None:
    with pytest.raises(PlanError, match=r'parallel_styles = .*Give names of layers .*"layers\.\*\.up": "colwise"'):
        named_styles(given)


@pytest.mark.parametrize(
    "style",
    [
        "columnwise",
        "",
        None,
        ColwiseParallel(output_layouts=Replicate()),
        RowwiseParallel(use_local_output=False),
        SequenceParallel(),
    ],
)
def test_other_styles_are_refused(style: Any) -> None:
    with pytest.raises(PlanError, match=r"RunConfig\.parallel_styles has .* for 'up'.*'colwise' and 'rowwise'"):
        named_styles({"up": style})


class Pretended:
    """Other ranks that give what this one gives."""

    place = 0

    def __init__(self, degree: int) -> None:
        self.degree = degree

    def puts_off(self, parameter: int, dim: int) -> bool:
        return True

    def total(self, own: Tensor) -> Tensor:
        return own * self.degree

    def everyone(self, own: Tensor) -> list[Tensor]:
        return [own] * self.degree


def kept_bytes(model: nn.Module, rows: Tensor) -> int:
    """What a backward pass would need, besides parameters."""
    seen = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(rows).sum()
    return sum(size for address, size in seen.items() if address not in parameters)


def test_a_rank_keeps_its_own_features_for_backward_alone() -> None:
    sizes, rows = [], torch.randn(32, 8)
    for degree in (1, 2, 4, 8):
        model = Model(8, 512)
        if degree > 1:
            cut_by_styles(model, STYLES, StyledShards(degree, Pretended(degree)))
        sizes.append(kept_bytes(model, rows))
    own = 2 * 32 * 512 * 4  # of two layers' tanh
    assert sizes == pytest.approx([sizes[0] - own * (1 - 1 / degree) for degree in (1, 2, 4, 8)], rel=0.01)
