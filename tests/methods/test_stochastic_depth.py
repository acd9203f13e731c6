"""Stochastic depth: its draws, means and surgery, on blocks of several kinds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cosmati.core.batch import Batch, Lineage
from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.method import Position, Stage
from cosmati.errors import BatchError, PlanError
from cosmati.methods.stochastic_depth import StochasticBlock, StochasticDepth, apply_stochastic_depth
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.models.resnet import ResidualBlock, ResNet, ResNetConfig

torch.set_num_threads(1)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Add(nn.Module):
    """The plainest block: x + value."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.value


class Pair(Add):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), "cache"


class Halve(Add):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, ::2]


def chain(num: int = 4, kind: type[nn.Module] = Add) -> nn.Sequential:
    return nn.Sequential(*[kind() for _ in range(num)])


def rates(model: nn.Module) -> list[float]:
    return [module.drop_rate for module in model.modules() if isinstance(module, StochasticBlock)]


def position(model: nn.Module, step: int) -> Position:
    return Position(Clock(step=step), Budget(Time.parse("10ba")), 3, 0, model, None)


def test_rates_along_the_depth() -> None:
    assert rates(apply_stochastic_depth(chain(), "Add", drop_rate=0.4)) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert rates(apply_stochastic_depth(chain(), Add, drop_rate=0.4, drop_distribution="uniform")) == [0.4] * 4


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 5), st.floats(0.01, 0.99), st.integers(0, 999))
def test_block_is_whole_or_skipped_as_the_draw_says(num: int, rate: float, seed: int) -> None:
    model = apply_stochastic_depth(chain(num), "Add", "block", rate, "uniform")
    torch.manual_seed(seed)
    output = model(torch.zeros(3, 2))
    torch.manual_seed(seed)
    kept = [float(torch.rand(())) >= rate for _ in range(num)]
    assert output.unique().tolist() == [sum(kept)]
    looked = [not keep for keep in kept]
    assert [block.calls for block in model] == [keep + look for keep, look in zip(kept, looked, strict=True)]
    torch.manual_seed(seed)
    model(torch.zeros(3, 2))
    assert [block.calls for block in model] == [2 if keep else 1 for keep in kept], "a skipped block isn't computed"


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 6), st.floats(0.01, 0.99), st.integers(0, 999))
def test_sample_skips_rows_and_scales_the_rest(rows: int, rate: float, seed: int) -> None:
    block = apply_stochastic_depth(Add(3.0), "Add", "sample", rate)
    input = random(rows, 2, 2, seed=seed)
    torch.manual_seed(seed)
    output = block(input)
    torch.manual_seed(seed)
    draws = torch.rand(rows)
    for row in range(rows):
        expected = input[row].double() + (3.0 / (1 - rate) if draws[row] >= rate else 0.0)
        torch.testing.assert_close(output[row].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_both_ways_have_the_mean_of_evaluation() -> None:
    for method in ("block", "sample"):
        block = apply_stochastic_depth(Add(2.0), "Add", method, 0.3)  # type: ignore[arg-type]
        torch.manual_seed(0)
        outputs = torch.stack([block(torch.ones(8)) for _ in range(2000)])
        torch.testing.assert_close(outputs.mean(), block.eval()(torch.ones(8)).mean(), rtol=0.03, atol=0)
    block = apply_stochastic_depth(Add(2.0), "Add", "block", 0.3).eval()
    torch.testing.assert_close(block(torch.ones(2, 2)), torch.full((2, 2), 1 + 0.7 * 2))
    sample = apply_stochastic_depth(Add(2.0), "Add", "sample", 0.3).eval()
    assert torch.equal(sample(torch.ones(2, 2)), torch.full((2, 2), 3.0))


@pytest.mark.parametrize("pre_activation", [False, True])
def test_residual_network(pre_activation: bool) -> None:
    torch.manual_seed(0)
    net = ResNet(ResNetConfig(widths=(4, 8), blocks_per_stage=2, pre_activation=pre_activation))
    plain = copy.deepcopy(net)
    apply_stochastic_depth(net, ResidualBlock, "block", 0.999, "uniform")
    before = {name: value.clone() for name, value in net.state_dict().items()}
    torch.manual_seed(1)
    hidden = random(2, 1, 8, 8)
    output = net(hidden)
    torch.manual_seed(1)
    assert not bool((torch.rand(4) >= 0.999).any()), "all four are to be skipped"
    expected = plain.blocks[2](plain.stem(hidden))
    expected = nn.functional.relu(plain.norm(expected)).mean(dim=(2, 3))
    torch.testing.assert_close(output, plain.head(expected))
    counts = {name: int(value - before[name]) for name, value in net.state_dict().items() if "num_batches" in name}
    assert {name for name, count in counts.items() if "blocks" in name and count} == {
        name for name in counts if "blocks.2." in name
    }, "looking at the shape leaves no trace, and the block that changes it is computed"
    assert max(counts.values()) == 1
    assert all(module.training for module in net.modules())


def test_transformer_blocks() -> None:
    torch.manual_seed(0)
    net = GPT(GPTConfig(width=16, num_blocks=2, num_heads=2, sequence_length=8))
    kind = type(net.blocks[0])
    tokens = torch.randint(256, (3, 8))
    for method in ("block", "sample"):
        changed = apply_stochastic_depth(copy.deepcopy(net), kind.__name__, method, 0.5)
        assert len(rates(changed)) == 2
        changed(tokens).square().mean().backward()
        with torch.autocast("cpu", torch.bfloat16):
            assert bool(changed(tokens).isfinite().all())
    sample = apply_stochastic_depth(copy.deepcopy(net), kind, "sample", 0.5).eval()
    assert torch.equal(sample(tokens), net.eval()(tokens))


def test_blocks_that_return_tuples_or_other_shapes() -> None:
    pair = apply_stochastic_depth(Pair(), "Pair", "sample", 0.5)
    torch.manual_seed(0)
    output, cache = pair(torch.zeros(20, 1))
    assert cache == "cache"
    assert set(output.detach().flatten().round().tolist()) == {0.0, 2.0}
    whole = apply_stochastic_depth(Pair(), "Pair", "block", 0.999)
    with pytest.raises(BatchError, match="returns a tuple"):
        whole(torch.zeros(2, 1))
    assert whole.eval()(torch.zeros(2, 1))[0].detach().flatten().tolist() == pytest.approx([0.001] * 2)
    for method in ("block", "sample"):
        other = apply_stochastic_depth(Halve(), "Halve", method, 0.999)  # type: ignore[arg-type]
        for _ in range(3):
            assert torch.equal(other(torch.zeros(2, 4)), torch.ones(2, 2))
        assert torch.equal(other.eval()(torch.zeros(2, 4)), torch.ones(2, 2))
    named = apply_stochastic_depth(Add(), "Add", "block", 0.5).eval()
    assert torch.equal(named(x=torch.zeros(2)), torch.full((2,), 0.5))


def test_surgery_shares_everything_and_is_idempotent() -> None:
    model = chain(3)
    objects, keys = list(model.modules()), list(model.state_dict())
    seen: list[int] = []
    handle = model[1].register_forward_hook(lambda *_: seen.append(1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert apply_stochastic_depth(model, "Add", drop_rate=0.3, optimizers=optimizer) is model
    assert all(a is b for a, b in zip(objects, model.modules(), strict=True))
    assert list(model.state_dict()) == keys
    assert all(isinstance(block, Add) for block in model)
    kinds = [type(block) for block in model]
    apply_stochastic_depth(model, "Add", drop_rate=0.9)
    assert [type(block) for block in model] == kinds
    assert rates(model) == pytest.approx([0.1, 0.2, 0.3])
    model(torch.zeros(2))
    assert seen == [1]
    handle.remove()
    root = Add()
    assert apply_stochastic_depth(root, Add) is root
    copied = copy.deepcopy(model).double().eval()
    assert copied(torch.zeros(2).double()).dtype == torch.float64
    assert "drop_rate=0.2" in repr(model)
    plain = chain(3)
    plain.load_state_dict(model.state_dict())


def test_exports_and_compiles_without_a_trace() -> None:
    model = apply_stochastic_depth(chain(2), "Add", "block", 0.4).eval()
    example = (torch.zeros(2, 3),)
    exported = torch.export.export(model, example).module()
    assert not [module for module in exported.modules() if type(module).__module__.startswith("cosmati")]
    torch.testing.assert_close(exported(*example), torch.full((2, 3), 0.8 + 0.6))


def test_warmup_follows_the_position() -> None:
    model = chain(1)
    method = StochasticDepth(target_layer_name="Add", drop_rate=0.5, drop_warmup="4ba")
    assert method.apply(model) is model
    batch = Batch((torch.zeros(2, 1), torch.zeros(2)), Lineage.of_rows(0, 2))
    for step, scale in ((0, 0.0), (1, 0.25), (3, 0.75), (4, 1.0), (9, 1.0), (2, 0.5)):
        assert method.batch(batch, position(model, step)) is batch
        assert model[0].drop_scale == pytest.approx(scale)
    by_fraction = StochasticDepth(target_layer_name="Add", drop_warmup=0.4)
    by_fraction.batch(batch, position(model, 1))
    assert model[0].drop_scale == pytest.approx(0.25)
    by_fraction.batch(batch, position(model, 0))
    state = torch.get_rng_state()
    assert torch.equal(model(torch.zeros(2)), torch.ones(2))
    assert torch.equal(torch.get_rng_state(), state)
    model[0].drop_scale = 1.0
    StochasticDepth(target_layer_name="Add").batch(batch, position(model, 0))
    assert model[0].drop_scale == 1.0


def test_off_and_nothing_to_change() -> None:
    model = chain(2)
    assert StochasticDepth(target_layer_name="Add", drop_rate=0.0).apply(model) is model
    assert [type(block) for block in model] == [Add, Add]
    assert StochasticDepth(target_layer_name="Add").stage is Stage.REPLACE
    with pytest.warns(UserWarning, match="no ResNetBottleneck. Name the class .* it has Add, Sequential"):
        apply_stochastic_depth(model, "ResNetBottleneck")

    class Bottleneck(Add):
        pass

    assert len(rates(apply_stochastic_depth(Bottleneck(), "ResNetBottleneck"))) == 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"stochastic_method": "row"}, "stochastic_method='row'"),
        ({"drop_distribution": "cubic"}, "drop_distribution='cubic'"),
        ({"drop_rate": 1.0}, "drop_rate=1.0"),
        ({"drop_rate": -0.1}, "drop_rate=-0.1"),
        ({"drop_warmup": "soon"}, "soon"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(PlanError, match=match):
        StochasticDepth(target_layer_name="Add", **options)
    if "drop_warmup" not in options:
        with pytest.raises(PlanError, match=match):
            apply_stochastic_depth(chain(), "Add", **options)


@pytest.mark.parametrize("method", ["block", "sample"])
def test_torch_fx_keeps_the_survival_factor(method: Any) -> None:
    """A proxy is no tensor: the factor was once left out of the traced graph without a word."""
    model = nn.Sequential(Add(1.0), Halve(2.0), Add(3.0)).eval()
    apply_stochastic_depth(model, Add, method, 0.5, "uniform")
    traced = torch.fx.symbolic_trace(model)
    for rows in (1, 5):
        x = random(rows, 6)
        assert torch.equal(traced(x), model(x))
    share = 0.5 if method == "block" else 1.0
    x = random(2, 4)
    torch.testing.assert_close(traced(x), (x + share)[:, ::2] + 2.0 + 3.0 * share)


@pytest.mark.parametrize("method", ["block", "sample"])
def test_torch_fx_refuses_to_write_a_draw_down(method: Any) -> None:
    model = nn.Sequential(Add())
    apply_stochastic_depth(model, Add, method, 0.5)
    with pytest.raises(BatchError, match=r"model\.eval"):
        torch.fx.symbolic_trace(model.train())
