"""Weight gradients of some tokens only: what packed rows of several classes need.

While `TokenMasks` is on, a layer that reads a masked parameter gives it the gradient of each token times that token's
weight. What flows on towards the input stays as it is, so that what one region learns doesn't follow from what another
one may. A masked parameter is detached for the layer itself, and a *tap* behind the layer's output computes its
gradient: the only way by which gradients may reach it. `differentiating` walks the graph and refuses any other.

Known are linear layers, embeddings, layer and RMS norms, one-dimensional convolutions, and products and sums with a
parameter. Tokens have to be the second dimension, after rows (the last one of a convolution): nothing is guessed. A
module that reads parameters otherwise can run once for each route (`split_forward.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from types import TracebackType
from typing import Any, NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cosmati.core.batch import Data, iterate_tensors
from cosmati.errors import PlanError
from cosmati.routing.autograd_graph import RunSpan, gated_behind, made_by, next_number
from cosmati.routing.split_forward import (
    GATE,
    Gating,
    TokenGroup,
    gated,
    groups_of,
    is_by_token,
    reads_tokens,
    replace_forward,
    run_apart,
    tensors_in,
)
from cosmati.routing.token_layers import LAYERS, OPERATORS, TAP, Layer, Read, TokenMask, behind


class UntappedError(PlanError):
    """Parameters are read otherwise than token by token.

    Attributes:
        names: of these parameters.
    """

    def __init__(self, message: str, names: Iterable[str]) -> None:
        super().__init__(message)
        self.names = tuple(names)


class Tapped(NamedTuple):
    """A layer's output that was tapped, or that of a module that ran once for each route.

    Attributes:
        name: of the parameter, or of the module.
        tokens: what was read.
        output: what was given.
        axis: dimension of the tokens in both.
    """

    name: str
    tokens: Tensor
    output: Tensor
    axis: int


class TokenMasks(TorchFunctionMode):
    """While it's on, each masked parameter learns from every token by that token's weight.

    Args:
        masks: by the parameter's name.
        parameters: by name.
        apart: modules that run once for each route, by name.
        zeroed: names of masked parameters that a token reads as zeros where it may not teach them.
        keep: keep what is tapped.

    Attributes:
        tapped: what was, in the order of the forward pass.
    """

    def __init__(
        self,
        masks: Mapping[str, TokenMask],
        parameters: Mapping[str, Tensor],
        apart: Mapping[str, nn.Module] | None = None,
        *,
        zeroed: Iterable[str] = (),
        keep: bool = False,
    ) -> None:
        super().__init__()
        self._names = {id(parameters[name]): name for name in masks}
        self._masks = {id(parameters[name]): mask for name, mask in masks.items()}
        self._parameters = [parameters[name] for name in masks]
        self._own, self._zeroed = frozenset(self._masks), frozenset(id(parameters[name]) for name in zeroed)
        self._held: list[Tensor] = []
        self._unread: dict[str, str] = {}
        self._keep = keep
        self._apart = dict(apart or {})
        self._depth = 0
        self._group: TokenGroup | None = None
        self._passed: set[int] = set()
        self._within: set[str] = set()
        self._runs: list[RunSpan] = []
        self._num_passed = 0
        self._kinds = list({id(mask): mask for mask in masks.values()}.values())
        self._put_back: list[Callable[[], None]] = []
        self.tapped: list[Tapped] = []

    def __enter__(self) -> Self:
        """Be on; the modules that run apart do so from now on."""
        self._depth += 1
        if self._depth == 1:
            self._put_back = [replace_forward(m, partial(self._run, name, m)) for name, m in self._apart.items()]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Be off, unless it was on before."""
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        self._depth -= 1
        if not self._depth:
            for put_back in self._put_back:
                put_back()

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
        if self._group is not None:
            return func(*gated(args, self._gating), **gated(dict(kwargs), self._gating))
        given = (*args, *kwargs.values())
        read = set(map(id, tensors_in(given) if self._zeroed else given))
        if not self._masks.keys() & read or self._is_anew(read):
            return func(*args, **kwargs)
        layer = LAYERS.get(func)
        if layer is not None:
            return self._read(func, layer, dict(zip(layer.names, args, strict=False)) | dict(kwargs))
        if func in OPERATORS and not kwargs and isinstance(args[0], Tensor) and isinstance(args[1], Tensor):
            tokens, parameter = args[::-1] if id(args[0]) in self._masks else args
            if id(tokens) not in self._masks:
                return self._read(OPERATORS[func][0], OPERATORS[func][1], {"input": tokens, "other": parameter})
        result = func(*args, **kwargs)
        zeroed = self._zeroed & read
        if zeroed and (func in _VALUES or next(tensors_in(result), None) is not None):
            raise self._untapped({self._names[one]: func.__name__ for one in zeroed})
        self._follow(result, [one for one in given if isinstance(one, Tensor)], func.__name__)
        return result

    def _is_anew(self, read: set[int]) -> bool:
        """Say whether parameters are read in a backward pass, by a checkpoint within a module that ran apart.

        Its graph is there already.

        Raises:
            PlanError: some tokens read them as zeros, and nobody knows which ones these are.
        """
        is_anew = bool(self._passed & read) and _current_pass() != -1
        if is_anew and (zeroed := self._zeroed & read):
            raise PlanError(_ANEW.format(min(self._names[one] for one in zeroed)))
        return is_anew

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
        given = next((one for one in gradients.values() if one is not None), [None] * len(roots))
        given = (given,) if isinstance(given, Tensor) else tuple(given)
        with self:
            torch.autograd.Variable._execution_engine.run_backward(  # noqa: SLF001
                roots,
                torch.autograd._make_grads(roots, given, is_grads_batched=False),  # noqa: SLF001
                create_graph if retain_graph is None else retain_graph,
                create_graph,
                () if inputs is None else tuple([inputs] if isinstance(inputs, Tensor) else inputs),
                allow_unreachable=True,
                accumulate_grad=True,
            )

    @cached_property
    def _groups(self) -> list[TokenGroup]:
        return groups_of(self._kinds)

    def _gating(self, tensor: Tensor) -> Gating | None:
        """Return what the group that runs has to do with a parameter; None where it's none, or isn't masked."""
        mask = self._masks.get(id(tensor))
        if mask is None or self._group is None:
            return None
        self._passed.add(id(tensor))
        self._num_passed += 1
        weight = self._group.weights[id(mask)]
        return Gating(weight, reads=bool(weight) or id(tensor) not in self._zeroed)

    def _run(self, name: str, module: nn.Module, forward: Callable[..., Data], *args: Data, **kwargs: Data) -> Data:
        """Run a module once for each group of tokens, in place of its forward pass."""
        given = (args, kwargs)
        shape = self._kinds[0].admits.shape
        if self._group is not None:
            self._within.add(name)
            return forward(*args, **kwargs)
        is_anew = name in self._within and _current_pass() != -1  # As it ran: within a larger one, for one group.
        if is_anew or not torch.is_grad_enabled() or not reads_tokens(given, shape):
            return forward(*args, **kwargs)

        counts, known = list[int](), (set(self._passed), set(self._within))
        spans: list[tuple[int, int]] = []

        def run(group: TokenGroup) -> Data:
            self._group, before, first = group, self._num_passed, next_number()
            try:
                return forward(*args, **kwargs)
            finally:
                self._group = None
                counts.append(self._num_passed - before)
                spans.append((first, next_number()))

        output = run_apart(module, self._groups, run, given, name, reads_alike=not self._zeroed)
        if len(set(counts)) > 1:
            msg = (
                f"{name or 'The model'} has to run once for each route, and keeps from one run to the next what it "
                f"makes of parameters: it has read them {counts[0]} times in the first run and {counts[-1]} times in "
                "the last. Let it make them anew (no torch.nn.utils.parametrize.cached, say), or pack each class by "
                "itself."
            )
            raise PlanError(msg)
        if output is None:
            self._passed, self._within = known  # Nothing of these runs is differentiated.
            return forward(*args, **kwargs)
        if len(self._groups) > 1:  # Of one, all tokens' weights are alike, whichever way they're reached.
            merged = next_number()
            self._runs += [RunSpan(*span, spans[-1][1], merged) for span in spans]
        if self._keep:
            read = next(one for one in iterate_tensors(given) if is_by_token(one, shape)).detach()
            outputs = [one for one in iterate_tensors(output) if one.requires_grad]
            self.tapped += [Tapped(name or "the model", read, one, 1) for one in outputs]
        return output

    def _read(self, func: Callable[..., Any], layer: Layer, given: dict[str, Any]) -> Tensor:
        """Run a layer, and tap its output for each masked parameter that it reads."""
        masked = {name: given[name] for name in layer.formulas if id(given.get(name)) in self._masks}
        if func is F.linear:  # Of other strides, it takes another kernel where the weight needs no gradient.
            given["input"] = given["input"].contiguous()
        detached = given | {name: one.detach() for name, one in masked.items()}
        output: Tensor = func(**detached)
        options = {name: value for name, value in given.items() if not isinstance(value, Tensor)}
        has_tokens = output.ndim > 2 and all(
            one.ndim > layer.axis and (one.shape[0], one.shape[layer.axis]) == self._kinds[0].admits.shape
            for one in (given["input"], output)
        )
        if layer.axis == 1:
            has_tokens &= is_by_token(output, self._kinds[0].admits.shape)
        is_known = has_tokens and not any(given.get(option) for option in layer.unknown)
        if zeroed := {name: one for name, one in given.items() if id(one) in self._zeroed}:
            kinds = {id(self._masks[id(one)]): self._masks[id(one)] for one in zeroed.values()}
            if not is_known or len(kinds) > 1 or not zeroed.keys() <= masked.keys():
                raise self._untapped({self._names[id(one)]: func.__name__ for one in zeroed.values()})
            zeros = {name: torch.zeros_like(one) for name, one in zeroed.items()}
            output = kinds.popitem()[1].chosen(output, func(**detached | zeros), layer.axis)
        for name, parameter in masked.items():
            mask, known = self._masks[id(parameter)], self._names[id(parameter)]
            if not is_known:
                self._unread[known] = f"{func.__name__} gives {list(output.shape)}"
                return cast("Tensor", func(**given))
            read = Read(parameter.shape, mask, options, layer.formulas[name], output.shape, layer.axis)
            output = behind(output, parameter, given["input"].detach(), read)
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
            UntappedError: the graph has such gradients; names are told.
            PlanError: a backward within the backward gives some.
        """
        if not objective.requires_grad:
            yield
            return
        self._refuse_untapped(objective)
        own: list[int] = []
        handles = [objective.register_hook(lambda _: own.append(_current_pass()))]
        handles += [  # A loss may have frozen some for another sub-step.
            parameter.register_hook(partial(_refuse_hidden, own, self._names[id(parameter)]))
            for parameter in self._parameters
            if parameter.requires_grad
        ]
        try:
            with self:  # What is checkpointed is computed anew.
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _refuse_untapped(self, objective: Tensor) -> None:
        """Walk the graph.

        Raises:
            UntappedError: it leads to a masked parameter otherwise than by a tap, or by a gate; or into a module that
                ran apart past what was taken of each token.
        """
        found: dict[str, str] = {}
        waiting, seen = [objective.grad_fn], {objective.grad_fn}
        past = [(one, "the loss") for one in waiting if made_by(one, self._runs)]
        while waiting:
            node = waiting.pop()
            if node is None or isinstance(node, GATE):
                continue
            edges = node.next_functions[:1] if isinstance(node, TAP) else node.next_functions
            for child, _ in edges:
                parameter = id(getattr(child, "variable", None))
                if parameter in self._own:
                    found.setdefault(self._names[parameter], node.name())
                run = made_by(child, self._runs)
                if run is not None and not run.may_lead_in(node):
                    past.append((child, node.name()))
                if child not in seen:
                    seen.add(child)
                    waiting.append(child)
        for entrance, by in past:
            for parameter in gated_behind(entrance, self._runs) & self._own:
                found.setdefault(self._names[parameter], by)
        if found:
            raise self._untapped(found)

    def _untapped(self, found: Mapping[str, str]) -> UntappedError:
        told = "; ".join(f"{name} ({self._unread.get(name, by)})" for name, by in list(found.items())[:5])
        msg = (
            f"Tokens of several classes can't be told apart where these parameters are read: {told}. A layer has to "
            "read [rows, tokens, ...] and be linear, an embedding, a layer or RMS norm, a Conv1d, a product or a sum; "
            "or a module around it has to map [rows, tokens, ...] to the same, so that it can run once for each route; "
            "and there may be no other dimension (heads) between as long as that of tokens. "
            "Write it so, uncompiled; or pack each class by itself; or give these parameters a region that all classes "
            "may teach alike."
        )
        return UntappedError(msg, found)


_VALUES = (Tensor.item, Tensor.tolist)
"""What gives a parameter's numbers otherwise than as tensors."""
_ANEW = (
    "{} is computed anew in the backward pass, within a module that runs once for each route, where nobody knows for "
    "which tokens: some of them read it as zeros. Leave torch.utils.checkpoint out there; or pack each class by itself."
)


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
