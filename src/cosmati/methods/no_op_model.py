"""A model that computes nothing: the control that shows what all the rest of a run costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from cosmati.core.method import Method, Stage
from cosmati.methods.building_blocks.surgery import Graft, graft

__all__ = ["NoOpModel"]


@dataclass(frozen=True)
class _Shape:
    """What is remembered of a tensor in the output."""

    size: torch.Size
    dtype: torch.dtype


class NoOpForward(Graft):
    """Zeros in place of a model's output.

    Each parameter gets a gradient of zeros. The shapes come from one real forward pass for each new shape of the
    input, in evaluation mode and without a trace in buffers.
    """

    prefix = "NoOp"
    forward_caches = ("_outputs",)
    _outputs: dict[Any, Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (the model's own)
        """Return zeros of the shapes and in the structure of the model's output."""
        leaves, structure = _pytree.tree_flatten((args, kwargs))
        key = (str(structure), *(_signature(leaf) for leaf in leaves))
        if key not in self._outputs:
            self._outputs[key] = _pytree.tree_map(_shape, self._real_output(args, kwargs))
        anchor = sum((p.sum() * 0.0 for p in self.parameters() if p.requires_grad), torch.zeros(()))
        device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), None)

        def zeros(leaf: object) -> object:
            if not isinstance(leaf, _Shape):
                return leaf
            output = torch.zeros(leaf.size, dtype=leaf.dtype, device=device)
            return output + anchor.to(output) if output.is_floating_point() else output

        return _pytree.tree_map(zeros, self._outputs[key])

    def _real_output(self, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
        modes = {module: module.training for module in self.modules()}
        self.eval()
        try:
            with torch.no_grad():
                return super().forward(*args, **kwargs)
        finally:
            for module, mode in modes.items():
                module.training = mode


def apply_no_op(model: nn.Module) -> nn.Module:
    """Take the computation out of a model, in place; its parameters, names, hooks and output shapes stay."""
    if not isinstance(model, NoOpForward):
        graft(model, NoOpForward)
        model.__dict__["_outputs"] = {}
    return model


@dataclass(frozen=True, kw_only=True)
class NoOpModel(Method):
    """Take the model's computation out of the run: data, methods, optimizers, ledger and checkpoints stay.

    The step that's left is what the loop costs. Nothing is learnt: gradients are zeros.
    """

    stage: ClassVar[Stage] = Stage.CAST

    def apply(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> nn.Module:
        """Return the model without its computation."""
        return apply_no_op(model)


def _signature(leaf: object) -> object:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)


def _shape(leaf: object) -> object:
    return _Shape(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf
