"""Modules of one class's own, and who says for which rows they run: nobody, unless something around says so.

A model's shared parameters are read by rows of every class. An `Isolated` module is read by rows of its class alone:
dropped, it leaves what a model is that never read them. Which rows a forward pass has is known outside of the model:
to the loop, which runs microbatches of one class each, and to whoever evaluates, exports or serves the model, who says
so with `methods.functional.enabled_classes`. What's said stands in the modules themselves, not in a global: autograd
runs checkpointed layers anew on threads of its own, and models may be trained side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cosmati.errors import PlanError

Forward = Callable[..., Any]


class Isolated(nn.Module):
    """Base of a module that runs only for rows of one class.

    Args:
        class_name: of the class.

    Attributes:
        rows: those of the class in the forward pass: none, all, or a mask of tokens, bool [rows, tokens].
    """

    rows: bool | Tensor

    def __init__(self, class_name: str) -> None:
        super().__init__()
        self.class_name = class_name
        self.rows = False

    @property
    def is_enabled(self) -> bool:
        """Whether it runs for any rows."""
        return self.rows is not False

    def around(self, layer: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Return what a layer gives for the rows of the class.

        Args:
            layer: that it stands in.
            forward: of the layer, without this module.
            args: of the layer's forward.
            kwargs: likewise.
        """
        raise NotImplementedError

    def chosen(self, own: Tensor, shared: Tensor, axis: int = 1) -> Tensor:
        """Return the class's own output at its rows, or tokens, and the shared one at all others.

        Args:
            own: [rows, ...]; in packs [rows, tokens, ...], or with the tokens elsewhere.
            shared: of the same shape.
            axis: the dimension of the tokens.

        Raises:
            PlanError: the layer's output doesn't tell tokens apart.
        """
        if not isinstance(self.rows, Tensor):
            return own
        mask = self.rows
        if own.ndim < 3 or (own.shape[0], own.shape[axis]) != tuple(mask.shape):
            self.refuse_tokens(f"its output is {tuple(own.shape)}, and the tokens are {tuple(mask.shape)}")
        shape = [1] * own.ndim
        shape[0], shape[axis] = mask.shape
        return torch.where(mask.view(shape), own, shared)

    def refuse_tokens(self, why: str) -> None:
        """Refuse packs of several classes.

        Raises:
            PlanError: always.
        """
        msg = (
            f"A {type(self).__name__} of class {self.class_name!r} can't run for some tokens of a pack only: {why}. "
            "Pack each class by itself (class_pure=True), or choose other layers for what is isolated."
        )
        raise PlanError(msg)

    def extra_repr(self) -> str:
        """Show the class."""
        return repr(self.class_name)


def isolated_modules(model: nn.Module) -> dict[str, Isolated]:
    """Return the modules of classes' own, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Isolated)}


def isolated_classes(model: nn.Module) -> tuple[str, ...]:
    """Return the classes that a model has modules of their own for, in alphabetical order."""
    return tuple(sorted({module.class_name for module in isolated_modules(model).values()}))


@contextmanager
def running(modules: Iterable[Isolated], rows: Mapping[str, bool | Tensor]) -> Iterator[None]:
    """Say for which rows modules run: by class, all or a mask of tokens; of a class that isn't named, for none."""
    before = [(module, module.rows) for module in modules]
    try:
        for module, _ in before:
            module.rows = rows.get(module.class_name, False)
        yield
    finally:
        for module, own in before:
            module.rows = own
