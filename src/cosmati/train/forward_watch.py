"""Sees what a forward pass changes besides gradients, and which promises that breaks.

State that one microbatch changes and the next one reads carries a class's content where its route doesn't lead, and
makes bits follow from which rank ran what. BatchNorm's statistics are folded by route (`train/buffers.py`); everything
else that moves is found here. Looking costs a copy of all buffers, so it's done in steps 0, 1, 2, 4, 8 and so on: a run
of a million steps has 21 such looks. What moves only in between isn't seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from cosmati.core.plan import Plan, Promise
from cosmati.routing.regions import Regions
from cosmati.train.ranks import Ranks

_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)
_UNWATCHED = nullcontext()
_MAX_DEPTH = 3
_MAX_COPIED = 1 << 20
"""Elements of the largest tensor that is compared by its content; of a larger one, by identity and version counter."""


class ForwardWatch:
    """Compares buffers and plain attributes of model and losses before and after each forward pass.

    A module may declare attributes that follow from shapes and position alone: `forward_caches = ("_mask",)`. They
    aren't looked at.

    Args:
        model: in training.
        losses: an `nn.Module`'s buffers, and any object's attributes.
        folded: names of buffers that a commit folds by itself.
        regions: of the model.
        ranks: all of them say the same of the promises.

    Attributes:
        is_on: whether this step is looked at.
        has_moved: whether anything has ever been found.
    """

    def __init__(
        self, model: nn.Module, losses: Iterable[object], folded: Iterable[str], regions: Regions, ranks: Ranks
    ) -> None:
        self._holders: dict[str, object] = dict(model.named_modules())
        for loss in losses:
            parts = loss.named_modules() if isinstance(loss, nn.Module) else [("", loss)]
            # A loss may hold the model too.
            held = {id(holder) for holder in self._holders.values()}
            self._holders |= {f"loss.{name}".rstrip("."): part for name, part in parts if id(part) not in held}
        self._folded = frozenset(folded)
        self._regions = regions
        self._ranks = ranks
        self._moved: set[str] = set()
        self.is_on = False
        self.has_moved = False

    def step_begins(self, step: int) -> None:
        """Say which step comes; steps 0, 1, 2, 4, 8 ... are looked at."""
        self.is_on = step & (step - 1) == 0 if step else True

    def forward(self) -> AbstractContextManager[None]:
        """Stand around a microbatch's forward pass."""
        return self._watched() if self.is_on else _UNWATCHED

    @contextmanager
    def _watched(self) -> Iterator[None]:
        before = self._state()
        yield
        after = self._state()
        self._moved |= {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}

    def judged(self, plan: Plan) -> Plan:
        """Return the plan without the promises that what has moved breaks. Every rank has to ask."""
        if not (self.is_on and self._ranks.agree(bool(self._moved))):
            return plan
        self.has_moved = True
        moved, self._moved = sorted(self._moved), set()
        kept = set(self._buffers(persistent=True))
        for promise, names in (
            (Promise.ELASTIC, moved),
            (Promise.RESUME, [name for name in moved if name not in kept]),
            (Promise.REPLAYABLE, [name for name in moved if name not in kept]),
        ):
            # Of what moved on another rank, this one knows no name.
            if plan.holds(promise) and (names or not moved):
                plan = plan.withdraw(promise, self._because(names))
        for guarantee in plan.guarantees:
            if guarantee.promise is not Promise.NO_DIRECT_WRITE or not guarantee.holds:
                continue
            assert guarantee.pair is not None, "it's about a class and a region"
            names = [name for name in moved if self._reaches(name, guarantee.pair[1])]
            if names or not moved:
                plan = plan.withdraw(guarantee.promise, self._because(names), guarantee.pair)
        return plan

    def _because(self, names: list[str]) -> str:
        buffers = self._buffers()
        told = [
            f"the {kind} {', '.join(some)}"
            for kind, some in (
                ("buffers", [name for name in names if name in buffers]),
                ("attributes", [name for name in names if name not in buffers]),
            )
            if some
        ]
        mend = "" if all(name in buffers for name in names) else " (in `forward_caches`, if nothing reads them back)"
        return f"forward changes {' and '.join(told) or 'state on another rank'}{mend}"

    def _reaches(self, name: str, region: str) -> bool:
        """Say whether what moves may carry a class's content into a region.

        The next microbatch's forward may read it, and then every region's gradients follow from it, wherever it lies.
        InstanceNorm's statistics aren't read in training: they are in their own region only.
        """
        if isinstance(self._holders.get(name.rpartition(".")[0]), _InstanceNorm) and name in self._buffers():
            own = self._regions.region_of_buffer(name)
            return own is None or self._regions.names[own] == region
        return True

    def _buffers(self, *, persistent: bool = False) -> Mapping[str, Tensor]:
        return {
            f"{path}.{name}".lstrip("."): buffer
            for path, holder in self._holders.items()
            if isinstance(holder, nn.Module)
            for name, buffer in holder.named_buffers(recurse=False)
            if not (persistent and name in holder._non_persistent_buffers_set)  # noqa: SLF001
        }

    def _state(self) -> dict[str, object]:
        """Return what can be compared of all buffers and attributes, by name.

        Contents rather than version counters: kernels of norms write statistics without marking them.
        """
        state: dict[str, object] = {
            name: _content(buffer) for name, buffer in self._buffers().items() if name not in self._folded
        }
        for path, holder in self._holders.items():
            declared = (vars(kind).get("forward_caches", ()) for kind in type(holder).__mro__)
            skipped = _OF_EVERY_MODULE.union(*declared)
            for name, value in getattr(holder, "__dict__", {}).items():
                if name not in skipped:
                    state[f"{path}.{name}".lstrip(".")] = _content(value)
        return state


def _content(value: object, depth: int = 0) -> object:
    """Return something that's equal to its like as long as the value is the same."""
    content: object = id(value)
    if isinstance(value, nn.Parameter):
        pass  # What learns moves at the commit, by its route.
    elif isinstance(value, Tensor):
        if value.numel() <= _MAX_COPIED and value.layout is torch.strided and value.device.type != "meta":
            flat = value.detach().cpu().contiguous().flatten().view(torch.uint8)
            content = (value.dtype, tuple(value.shape), flat.numpy().tobytes())
        else:
            content = (id(value), value._version)  # noqa: SLF001
    elif isinstance(value, np.ndarray):
        content = (value.dtype.str, value.shape, value.tobytes())
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        content = repr(value)
    elif depth < _MAX_DEPTH and isinstance(value, Mapping):
        content = [(repr(key), _content(item, depth + 1)) for key, item in value.items()]
    elif depth < _MAX_DEPTH and isinstance(value, list | tuple | set | frozenset | deque):
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        content = [_content(item, depth + 1) for item in items]
    return type(value), content
