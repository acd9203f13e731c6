"""Weight gradients of some tokens only: what packed rows of several classes need.

While `TokenMasks` is on, a layer that reads a masked parameter gives it the gradient of each token times that token's
weight. What flows on towards the input stays as it is, so that what one region learns doesn't follow from what another
one may. A masked parameter is detached for the layer itself, and a *tap* behind the layer's output computes its
gradient: the only way by which gradients may reach it. `differentiating` walks the graph and refuses any other.

Known are linear layers, embeddings, layer and RMS norms, one-dimensional convolutions, and products and sums with a
parameter. Tokens have to be the second dimension, after rows (the last one of a convolution): nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.grad import conv1d_weight
from torch.overrides import TorchFunctionMode

from cosmati.errors import PlanError

Formula = Callable[[Tensor, Tensor, "Read"], Tensor]
"""Gradient of a parameter, from that of the output, weighted by token, and the layer's input."""


class TokenMask(NamedTuple):
    """What each token of a microbatch may teach one region.

    Attributes:
        admits: bool [rows, tokens].
        scale: weights [rows, tokens]; None where all are 0 or 1.
    """

    admits: Tensor
    scale: Tensor | None = None

    @classmethod
    def of(cls, weights: Tensor) -> TokenMask:
        """Return the mask of weights [rows, tokens]."""
        admits = weights != 0
        is_plain = bool((weights == admits).all())
        return cls(admits, None if is_plain else weights)

    def to(self, device: torch.device) -> TokenMask:
        """Move it."""
        return TokenMask(self.admits.to(device), None if self.scale is None else self.scale.to(device))

    def over(self, gradient: Tensor, axis: int = 1) -> Tensor:
        """Return each token's gradient times its weight; 0 for denied tokens, even where theirs isn't finite.

        Args:
            gradient: [rows, tokens, ...], or with the tokens elsewhere.
            axis: the dimension of the tokens.
        """
        shape = [1] * gradient.ndim
        shape[0], shape[axis] = self.admits.shape
        found = torch.where(self.admits.view(shape), gradient, 0.0)
        return found if self.scale is None else found.mul_(self.scale.to(found.dtype).view(shape))


class Read(NamedTuple):
    """How a layer has read a masked parameter, for when its gradient is due.

    Attributes:
        size: shape of the parameter.
        mask: of its region.
        options: the layer's arguments that aren't tensors, by name.
        formula: of the gradient.
        shape: of the layer's output.
        axis: dimension of the tokens in it.
    """

    size: torch.Size
    mask: TokenMask
    options: Mapping[str, Any]
    formula: Formula
    shape: torch.Size
    axis: int


def _linear(gradient: Tensor, tokens: Tensor, _: Read) -> Tensor:
    return gradient.flatten(0, -2).t() @ tokens.flatten(0, -2).to(gradient.dtype)


def _table(gradient: Tensor, tokens: Tensor, read: Read) -> Tensor:
    # An accelerator sums in an order that follows from how often each index comes: a denied token's mustn't count.
    admits, padding = read.mask.admits, read.options.get("padding_idx")
    indices = tokens.masked_fill(~admits.view(*admits.shape, *[1] * (tokens.ndim - 2)), 0)
    place = -1 if padding is None else padding % read.size[0]
    found: Tensor = torch.ops.aten.embedding_dense_backward(
        gradient, indices, read.size[0], place, scale_grad_by_freq=False
    )
    return found


def _layer_scale(gradient: Tensor, tokens: Tensor, read: Read) -> Tensor:
    tokens = tokens.to(gradient.dtype)
    plain = F.layer_norm(tokens, read.options["normalized_shape"], eps=read.options.get("eps", _LAYER_NORM_EPSILON))
    return (gradient * plain).sum_to_size(read.size)


def _rms_scale(gradient: Tensor, tokens: Tensor, read: Read) -> Tensor:
    plain = F.rms_norm(tokens.to(gradient.dtype), read.options["normalized_shape"], eps=read.options.get("eps"))
    return (gradient * plain).sum_to_size(read.size)


def _kernel(gradient: Tensor, tokens: Tensor, read: Read) -> Tensor:
    options = {name: value for name, value in read.options.items() if name != "bias"}
    found: Tensor = conv1d_weight(tokens.to(gradient.dtype), read.size, gradient, **options)
    return found


def _channels(gradient: Tensor, _: Tensor, __: Read) -> Tensor:
    return gradient.sum((0, 2))


def _summed(gradient: Tensor, _: Tensor, read: Read) -> Tensor:
    return gradient.sum_to_size(read.size)


def _product(gradient: Tensor, tokens: Tensor, read: Read) -> Tensor:
    return (gradient * tokens).sum_to_size(read.size)


_LAYER_NORM_EPSILON = 1e-5
"""PyTorch's own."""


class Layer(NamedTuple):
    """A function that reads tokens with parameters.

    Attributes:
        names: of its arguments, in order; the first are the tokens.
        formulas: of each parameter's gradient.
        unknown: arguments with which its gradients follow from other tokens too.
        axis: dimension of the tokens in its output.
    """

    names: tuple[str, ...]
    formulas: Mapping[str, Formula]
    unknown: tuple[str, ...] = ()
    axis: int = 1


_LAYERS: dict[Callable[..., Any], Layer] = {
    F.linear: Layer(("input", "weight", "bias"), {"weight": _linear, "bias": _summed}),
    F.embedding: Layer(
        ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
        {"weight": _table},
        ("max_norm", "scale_grad_by_freq", "sparse"),
    ),
    F.layer_norm: Layer(
        ("input", "normalized_shape", "weight", "bias", "eps"),
        {"weight": _layer_scale, "bias": _summed},
    ),
    F.rms_norm: Layer(("input", "normalized_shape", "weight", "eps"), {"weight": _rms_scale}),
    F.conv1d: Layer(
        ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
        {"weight": _kernel, "bias": _channels},
        axis=2,
    ),
}
_PRODUCT = torch.mul, Layer(("input", "other"), {"other": _product})
_SUM = torch.add, Layer(("input", "other"), {"other": _summed})
_OPERATORS: dict[Callable[..., Any], tuple[Callable[..., Any], Layer]] = {
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), _PRODUCT),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _SUM),
}


class Tapped(NamedTuple):
    """A layer's output that was tapped.

    Attributes:
        name: of the parameter.
        tokens: what the layer read.
        output: what it gave.
        axis: dimension of the tokens in both.
    """

    name: str
    tokens: Tensor
    output: Tensor
    axis: int


class _Tap(torch.autograd.Function):
    """Leaves a layer's output alone; backward, it gives a parameter its gradient and hands the output's on."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, _: Tensor, tokens: Tensor, read: Read) -> Tensor:  # noqa: ANN401
        """Take an output, the parameter, what the layer has read, and how."""
        ctx.mark_dirty(output)  # Not a view of it: what comes behind may work in place.
        ctx.save_for_backward(tokens)
        ctx.read = read
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:  # noqa: ANN401
        (tokens,) = ctx.saved_tensors
        with torch._C.DisableTorchFunction():  # noqa: SLF001  (nothing to look at here, and looking takes time)
            own = ctx.read.mask.over(gradient.reshape(ctx.read.shape), ctx.read.axis)
            return gradient, ctx.read.formula(own, tokens, ctx.read), None, None


_TAP: type = _Tap._backward_cls  # noqa: SLF001  (a tap in a graph)


class TokenMasks(TorchFunctionMode):
    """While it's on, each masked parameter learns from every token by that token's weight.

    Args:
        masks: by the parameter's name.
        parameters: by name.
        keep: keep what is tapped.

    Attributes:
        tapped: what was, in the order of the forward pass.
    """

    def __init__(self, masks: Mapping[str, TokenMask], parameters: Mapping[str, Tensor], *, keep: bool = False) -> None:
        super().__init__()
        self._names = {id(parameters[name]): name for name in masks}
        self._masks = {id(parameters[name]): mask for name, mask in masks.items()}
        self._parameters = [parameters[name] for name in masks]
        self._own = frozenset(self._masks)
        self._held: list[Tensor] = []
        self._unread: dict[str, str] = {}
        self._keep = keep
        self.tapped: list[Tapped] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  (whatever the function gives)
        """Run a function of PyTorch's, and tap what it makes of tokens with a masked parameter."""
        kwargs = kwargs or {}
        if func in (Tensor.backward, torch.autograd.backward) and len(args) == 1:
            return self._differentiate(args[0], **kwargs)
        if not any(id(one) in self._masks for one in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        layer = _LAYERS.get(func)
        if layer is not None:
            return self._read(func, layer, dict(zip(layer.names, args, strict=False)) | dict(kwargs))
        if func in _OPERATORS and not kwargs and isinstance(args[0], Tensor) and isinstance(args[1], Tensor):
            tokens, parameter = args[::-1] if id(args[0]) in self._masks else args
            if id(tokens) not in self._masks:
                return self._read(_OPERATORS[func][0], _OPERATORS[func][1], {"input": tokens, "other": parameter})
        result = func(*args, **kwargs)
        self._follow(result, [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)], func.__name__)
        return result

    def _differentiate(
        self,
        roots: Tensor | tuple[Tensor, ...],
        *,
        inputs: Iterable[Tensor] | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        **gradients: Any,  # noqa: ANN401  (by either function's name)
    ) -> None:
        """Do what `torch.autograd.backward` does, and stay on in it: what is checkpointed is computed anew there."""
        roots = (roots,) if isinstance(roots, Tensor) else tuple(roots)
        given = next((one for one in gradients.values() if one is not None), [torch.ones_like(root) for root in roots])
        with self:
            torch.autograd.Variable._execution_engine.run_backward(  # noqa: SLF001
                roots,
                (given,) if isinstance(given, Tensor) else tuple(given),
                create_graph if retain_graph is None else retain_graph,
                create_graph,
                () if inputs is None else tuple([inputs] if isinstance(inputs, Tensor) else inputs),
                allow_unreachable=True,
                accumulate_grad=True,
            )

    def _read(self, func: Callable[..., Any], layer: Layer, given: dict[str, Any]) -> Tensor:
        """Run a layer, and tap its output for each masked parameter that it reads."""
        masked = {name: given[name] for name in layer.formulas if id(given.get(name)) in self._masks}
        output: Tensor = func(**given | {name: one.detach() for name, one in masked.items()})
        options = {name: value for name, value in given.items() if not isinstance(value, Tensor)}
        for name, parameter in masked.items():
            mask, known = self._masks[id(parameter)], self._names[id(parameter)]
            has_tokens = output.ndim > 2 and all(
                one.ndim > layer.axis and (one.shape[0], one.shape[layer.axis]) == mask.admits.shape
                for one in (given["input"], output)
            )
            if not has_tokens or any(given.get(option) for option in layer.unknown):
                self._unread[known] = f"{func.__name__} gives {list(output.shape)}"
                return cast("Tensor", func(**given))
            read = Read(parameter.shape, mask, options, layer.formulas[name], output.shape, layer.axis)
            output = _behind(output, parameter, given["input"].detach(), read)
            if self._keep:
                self.tapped.append(Tapped(known, given["input"].detach(), output, layer.axis))
        return output

    def _follow(self, result: object, read: list[Tensor], by: str) -> None:
        """Take what is made of one region's parameters alone (a part, another type) for a parameter of it."""
        made = list(result) if isinstance(result, list | tuple) else [result]
        if any(id(one) not in self._masks for one in read):
            for one in read:
                self._unread.setdefault(self._names.get(id(one), ""), by)
            for changed in made:  # In place, by something else: it's no parameter's any more.
                if id(changed) not in self._own:
                    self._masks.pop(id(changed), None)
            return
        masks = {id(self._masks.get(id(one))): self._masks.get(id(one)) for one in read}
        mask = masks.popitem()[1] if len(masks) == 1 else None
        for tensor in made:
            if mask is not None and isinstance(tensor, Tensor) and tensor.requires_grad:
                self._held.append(tensor)  # An id is a tensor's as long as that lives.
                self._masks.setdefault(id(tensor), mask)
                self._names.setdefault(id(tensor), self._names[id(read[0])])

    @contextmanager
    def differentiating(self, objective: Tensor) -> Iterator[None]:
        """Stand around the backward pass: gradients that would reach a masked parameter whole are refused.

        Args:
            objective: what is differentiated.

        Raises:
            PlanError: the graph has such gradients, or a backward within the backward gives some; names are told.
        """
        if not objective.requires_grad:
            yield
            return
        self._refuse_untapped(objective)
        own: list[int] = []
        handles = [objective.register_hook(lambda _: own.append(_current_pass()))]
        handles += [p.register_hook(partial(_refuse_hidden, own, self._names[id(p)])) for p in self._parameters]
        try:
            with self:  # What is checkpointed is computed anew.
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _refuse_untapped(self, objective: Tensor) -> None:
        """Walk the graph.

        Raises:
            PlanError: it leads to a masked parameter otherwise than by a tap.
        """
        found: dict[str, str] = {}
        waiting = [objective.grad_fn]
        seen = set(waiting)
        while waiting:
            node = waiting.pop()
            if node is None:
                continue
            edges = node.next_functions[:1] if isinstance(node, _TAP) else node.next_functions
            for child, _ in edges:
                parameter = id(getattr(child, "variable", None))
                if parameter in self._own:
                    found.setdefault(self._names[parameter], node.name())
                elif child not in seen:
                    seen.add(child)
                    waiting.append(child)
        if found:
            told = "; ".join(f"{name} ({self._unread.get(name, by)})" for name, by in list(found.items())[:5])
            msg = (
                f"Tokens of several classes can't be told apart where these parameters are read: {told}. A layer has "
                "to read [rows, tokens, ...] and be linear, an embedding, a layer or RMS norm, a Conv1d, a product or "
                "a sum. Write it so, uncompiled and without flattening rows and tokens; or pack each class by itself; "
                "or give these parameters a region that all classes may teach alike."
            )
            raise PlanError(msg)


def _refuse_hidden(own: list[int], name: str, _: Tensor) -> None:
    if _current_pass() not in own:
        msg = (
            f"The gradient of {name} comes from a backward within the backward, where nobody sees whether tokens of "
            "several classes are told apart. With torch.utils.checkpoint, pass use_reentrant=False."
        )
        raise PlanError(msg)


def _current_pass() -> int:
    """Return the number of the backward pass that is under way."""
    return torch._C._current_graph_task_id()  # noqa: SLF001


def _behind(output: Tensor, parameter: Tensor, tokens: Tensor, read: Read) -> Tensor:
    """Tap an output; of one that is a view, what it's a view of, since that one is the layer's own."""
    own, base = output, output._base  # noqa: SLF001
    if output._is_view():  # noqa: SLF001
        own = base if base is not None and base.numel() == output.numel() else output.clone()
    tapped: Tensor = _Tap.apply(own, parameter, tokens, read)  # type: ignore[no-untyped-call]
    return tapped.view(read.shape) if tapped.shape != read.shape else tapped
