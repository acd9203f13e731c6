"""How much memory tensors take at most, counted as operators make them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operators have made and that are still alive, forward and backward alike.

    What a kernel takes for itself and gives back isn't seen, nor what an allocator keeps in reserve.

    Args:
        known: tensors that are there already, and aren't counted.

    Attributes:
        now: bytes that are alive.
        peak: the most there have been.
        num_kernels: operators that ran and aren't views.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = self.num_kernels = 0
        # Held, so that no other storage gets their identity.
        self._known = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in known)}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401  (an operator's own)
        """Run an operator, and count what it has made."""
        del types
        made = func(*args, **(kwargs or {}))
        self.num_kernels += not getattr(func, "is_view", False)
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                self._count(leaf.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if not size or key in self._known or key in self._alive:
            return

        def freed(_: object) -> None:
            self.now -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors' storages; what shares memory counts once."""
    storages = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors of a nest."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
