"""Gated linear units: a linear gate multiplies the hidden layer (Shazeer, 2020, arXiv 2002.05202)."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmati.core.method import Method, Stage
from cosmati.core.rng import position_generator
from cosmati.errors import PlanError
from cosmati.methods.building_blocks.surgery import Graft, Optimizers, graft, join_groups, strangers

__all__ = ["GatedFeedForward", "GatedLinearUnits", "apply_gated_linear_units"]

Activation = Callable[[Tensor], Tensor]


class GatedFeedForward(nn.Module):
    """A gated feed-forward: `down(dropout(activation(up(x)) * gate(x)))`.

    Args:
        in_features: of input and output.
        hidden_features: in between.
        activation: of the gated half.
        gated_layer_bias: of `up`.
        non_gated_layer_bias: of `gate`.
        dropout: of the hidden layer.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        activation: Activation = F.silu,
        gated_layer_bias: bool = False,
        non_gated_layer_bias: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(in_features, hidden_features, bias=gated_layer_bias)
        self.gate = nn.Linear(in_features, hidden_features, bias=non_gated_layer_bias)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(hidden_features, in_features, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., in_features] to the same shape."""
        hidden = self.activation(self.up(input)) * self.gate(input)
        output: Tensor = self.down(self.dropout(hidden))
        return output


@dataclass(frozen=True)
class _Parts:
    """Names of a feed-forward's parts, in the order in which they act."""

    up: str
    activation: Activation | str
    after: tuple[str, ...]


class GatedBlock(Graft):
    """A feed-forward with a gate.

    The block's own layers keep their names and parameters; the gate is the child `gate`.
    """

    prefix = "Gated"
    gate: nn.Linear
    parts: _Parts

    def forward(self, input: Tensor) -> Tensor:
        """Return the block's output, with its hidden layer gated."""
        return _compute(self, self.parts, input, self.gate)


def apply_gated_linear_units(
    model: nn.Module,
    optimizers: Optimizers = None,
    act_fn: Activation | str | None = None,
    gated_layer_bias: bool = False,
    non_gated_layer_bias: bool = False,
    target_layer_name: str | type[nn.Module] | None = None,
    *,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Gate every feed-forward of a model, in place: `activation(up(x)) * gate(x)` in the place of `activation(up(x))`.

    Known are feed-forwards built as those of this library's GPT, of Hugging Face's GPT-2, or of BERT and its kin, by
    the names of their parts. Others are named by `target_layer_name`: blocks of a linear layer, an activation that is
    a module, maybe dropout, and a second linear layer. Each is tried on a few numbers first: one that computes
    anything else is refused. The first linear layer stays what it was, and the gate is a new layer of the same size,
    so a feed-forward costs half as much again. Its weights are normal, with the standard deviation of the layer beside
    it.

    Args:
        model: the model.
        optimizers: the gates join the groups that hold the weights beside them.
        act_fn: activation, or the name of one in `torch.nn.functional`; None keeps the block's own.
        gated_layer_bias: give the first linear layer a bias where it has none; one that it has stays.
        non_gated_layer_bias: give the gate a bias.
        target_layer_name: class of the feed-forwards, or its name; None takes those that are known.
        generator: of the CPU, for the gates' weights; None is PyTorch's default generator.

    Returns:
        The same model.

    Raises:
        PlanError: an unknown activation; a block that isn't built like that, or doesn't compute that; blocks of which
            some are known and others aren't. The model is then as it was.

    Warns:
        UserWarning: there's no feed-forward to gate.
    """
    activation = _activation(act_fn)
    parts_of = _parts_by_name(model, target_layer_name)
    for name, parts in parts_of.items():
        block = model.get_submodule(name)
        up = cast("nn.Linear", getattr(block, parts.up))
        gate = _gate(up, bias=non_gated_layer_bias, generator=generator)
        block.add_module("gate", gate)
        prefix = f"{name}." if name else ""
        # Of a factorized layer, the weight is a product and no parameter.
        beside = next(up.parameters())
        join_groups(optimizers, beside, {f"{prefix}gate.{n}": p for n, p in gate.named_parameters()})
        if gated_layer_bias and isinstance(up, nn.Linear) and up.bias is None:
            up.register_parameter("bias", nn.Parameter(up.weight.new_zeros(up.weight.shape[0])))
            join_groups(optimizers, beside, {f"{prefix}{parts.up}.bias": up.bias})
        graft(block, GatedBlock)
        block.__dict__["parts"] = _Parts(parts.up, activation or parts.activation, parts.after)
    if not parts_of and not any(isinstance(block, GatedBlock) for block in model.modules()):
        gated = any(isinstance(part, nn.Linear) and "gate" in name for name, part in model.named_modules())
        why = "its feed-forwards have gates already" if gated else "it has no feed-forward that is known"
        msg = (
            f"GatedLinearUnits changes nothing: {type(model).__name__} has been looked through, and {why}. Name the "
            "class of its feed-forwards with target_layer_name, or leave it out."
        )
        warnings.warn(msg, UserWarning, stacklevel=2)
    return model


@dataclass(frozen=True, kw_only=True)
class GatedLinearUnits(Method):
    """Gate the feed-forwards of a transformer: half as much again of their operations and weights.

    Args:
        act_fn: name of an activation in `torch.nn.functional`; None keeps the blocks' own.
        gated_layer_bias: give the first linear layer a bias where it has none.
        non_gated_layer_bias: give the gate a bias.
        target_layer_name: class of the feed-forwards, or its name; None takes those that are known.
        seed: of the new weights.
    """

    stage: ClassVar[Stage] = Stage.REPLACE

    act_fn: str | None = None
    gated_layer_bias: bool = False
    non_gated_layer_bias: bool = False
    target_layer_name: str | type[nn.Module] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the activation."""
        _activation(self.act_fn)

    def apply(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> nn.Module:
        """Return the model with its feed-forwards gated."""
        return apply_gated_linear_units(
            model,
            optimizers,
            self.act_fn,
            self.gated_layer_bias,
            self.non_gated_layer_bias,
            self.target_layer_name,
            generator=position_generator(self.seed, "gated_linear_units"),
        )


def _activation(act_fn: Activation | str | None) -> Activation | None:
    if not isinstance(act_fn, str):
        return act_fn
    function = getattr(F, act_fn, None)
    if not callable(function) or act_fn.startswith("_"):
        msg = f"act_fn={act_fn!r} is no activation of torch.nn.functional. Use 'gelu', 'silu', 'relu' or 'sigmoid'."
        raise PlanError(msg)
    return cast("Activation", function)


def _parts_by_name(model: nn.Module, target: str | type[nn.Module] | None) -> dict[str, _Parts]:
    """Return the parts of each block that is to be gated, by the block's name."""
    found: dict[str, _Parts] = {}
    known: list[nn.Module] = []
    for name, block in model.named_modules():
        parts = None
        if isinstance(block, GatedBlock):
            known.append(block)
        elif (parts := _known_parts(block) if target is None else _named_parts(block, target)) is not None:
            found[name] = parts
            known.append(block)
            if not _computes(block, parts):
                msg = (
                    f"GatedLinearUnits can't gate {name or 'the model'}, a {type(block).__name__}: it doesn't compute "
                    f"{' -> '.join((parts.up, 'activation', *parts.after))}, which a gate would put in its place. Name "
                    "another class with target_layer_name, or build the model with GatedFeedForward."
                )
                raise PlanError(msg)
    for name, block in strangers(model, known).items() if target is None else ():
        msg = (
            f"GatedLinearUnits would gate only some of the blocks: {name} is a {type(block).__name__} that isn't "
            "known, beside others that are. Name the class of those to gate with target_layer_name."
        )
        raise PlanError(msg)
    return found


def _known_parts(block: nn.Module) -> _Parts | None:
    children = {name for name, _ in block.named_children()}
    if children == {"up", "down"}:
        functions: dict[object, Activation] = {"gelu": F.gelu, "relu_squared": _relu_squared}
        function = functions.get(str(getattr(block, "activation", None)))
        return None if function is None else _Parts("up", function, ("down",))
    if children == {"c_fc", "act", "c_proj", "dropout"}:
        return _Parts("c_fc", "act", ("c_proj", "dropout"))
    if children - {"intermediate_act_fn"} == {"dense"} and callable(getattr(block, "intermediate_act_fn", None)):
        return _Parts("dense", "intermediate_act_fn", ())
    return None


def _compute(block: nn.Module, parts: _Parts, input: Tensor, gate: nn.Module | None) -> Tensor:
    activation = getattr(block, parts.activation) if isinstance(parts.activation, str) else parts.activation
    hidden: Tensor = activation(getattr(block, parts.up)(input))
    if gate is not None:
        hidden = hidden * gate(input)
    for name in parts.after:
        hidden = getattr(block, name)(hidden)
    return hidden


@torch.no_grad()
def _computes(block: nn.Module, parts: _Parts) -> bool:
    """Try whether a block is what its parts make of it, in evaluation and without its hooks; it's left as it was."""
    weight = cast("Tensor", getattr(block, parts.up).weight)
    if weight.is_meta:
        return True
    kept = {module: dict(module.__dict__) for module in block.modules()}
    for module in kept:
        hooks = {name: OrderedDict[int, object]() for name, value in module.__dict__.items() if name.endswith("hooks")}
        module.__dict__ |= {"training": False, **hooks}
    inputs = _sizes(getattr(block, parts.up))[0]
    input = torch.linspace(-2, 2, 3 * inputs, device=weight.device, dtype=weight.dtype).view(1, 3, inputs)
    try:
        own, expected = block.forward(input), _compute(block, parts, input, None)
        # To a low precision's rounding; a residual or a norm is another order of magnitude. Weights that aren't there
        # yet may be anything.
        size = expected.abs().max()
        return own.shape == expected.shape and not bool((own - expected).abs().max() > 0.01 * size)
    except Exception:  # noqa: BLE001  (whatever a block says that takes something else)
        return False
    finally:
        for module, facts in kept.items():
            module.__dict__ |= facts


def _named_parts(block: nn.Module, target: str | type[nn.Module]) -> _Parts | None:
    names = {kind.__name__ for kind in type(block).__mro__}
    if not (target in names if isinstance(target, str) else isinstance(block, target)):
        return None
    if (known := _known_parts(block)) is not None:
        return known
    children = dict(block.named_children())
    linear = [name for name, child in children.items() if _is_linear(child)]
    dropout = [name for name, child in children.items() if isinstance(child, nn.Dropout)]
    others = [name for name in children if name not in (*linear, *dropout)]
    if len(linear) != 2 or len(others) != 1:
        msg = (
            f"GatedLinearUnits can't gate {type(block).__name__}: it needs two linear layers and one activation that's "
            f"a module; it has linear layers {linear} and others {others}. Name another class, or build the model with "
            "GatedFeedForward."
        )
        raise PlanError(msg)
    order = [name for name in children if name not in others and name != linear[0]]
    return _Parts(linear[0], others[0], tuple(order))


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) or _is_transposed(layer)


def _is_transposed(layer: nn.Module) -> bool:
    """Say whether a layer is built as Hugging Face's Conv1D: its weight is [inputs, outputs], `nf` the outputs."""
    weight = getattr(layer, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and getattr(layer, "nf", None) == weight.shape[1]


def _sizes(layer: nn.Module) -> tuple[int, int]:
    """Return a linear layer's number of inputs and of outputs."""
    rows, columns = cast("Tensor", layer.weight).shape
    return (rows, columns) if _is_transposed(layer) else (columns, rows)


def _gate(up: nn.Module, *, bias: bool, generator: torch.Generator | None) -> nn.Linear:
    weight = cast("Tensor", up.weight)
    inputs, outputs = _sizes(up)
    gate = nn.Linear(inputs, outputs, bias=bias, device="meta").to_empty(device=weight.device).to(weight.dtype)
    draws = torch.randn(outputs, inputs, generator=generator)
    with torch.no_grad():
        gate.weight.copy_(draws * weight.detach().float().std().cpu())
        if gate.bias is not None:
            gate.bias.zero_()
    return gate.train(up.training).requires_grad_(weight.requires_grad)


def _relu_squared(hidden: Tensor) -> Tensor:
    return F.relu(hidden).square()
