"""What a run holds and copies beside what it trains: tensors of losses, looks at what passes change, ways back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cosmati.planning.live_bytes import LiveBytes, bytes_of, tensors_in
from cosmati.train.forward_watch import loss_roots
from cosmati.train.held import Place, places_in, remember
from cosmati.train.trainer import Trainer

SUMMED = 1 << 16
"""Elements above which a tensor is compared by sums of its bits, for which PyTorch widens each element to 8 bytes."""
_WIDE = 8
_AT_A_TIME = 64
"""Parts of a tensor that are widened one after another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """Sizes in bytes.

    Attributes:
        losses: tensors that losses and modules hold, and that are neither parameters nor buffers of the model.
        look: the most that comparing one tensor takes for a while, parameters of the model aside.
        look_cut: the most that comparing one of these takes.
        put_back: what a step copies that may be left out.
        has_undo: whether a step copies weights and state, for sub-steps after the first may break off.
    """

    losses: int
    look: int
    look_cut: int
    put_back: int
    has_undo: bool


def beside(trainer: Trainer) -> Beside:
    """Return what a trainer's run holds and copies beside what it trains."""
    a = trainer.assembly
    roots = {"": a.model, **loss_roots([turn.loss for turn in a.turns])}
    own = {id(parameter) for parameter in a.model.parameters()}
    places = list(places_in(roots))
    tensors = [place.value for place in places if isinstance(place.value, Tensor)]
    known = own | {id(buffer) for buffer in a.model.buffers()}
    return Beside(
        losses=bytes_of(one for one in tensors if id(one) not in known and _is_there(one, a.device)),
        look=max((_compared(one) for one in tensors if id(one) not in own), default=0),
        look_cut=max((_compared(one) for one in tensors if id(one) in own), default=0),
        put_back=_copied(roots, places) if a.config.on_divergence == "skip" else 0,
        has_undo=len(a.turns) > 1,
    )


def _copied(roots: Mapping[str, object], places: Iterable[Place]) -> int:
    """Return the bytes of copies by which what models and losses hold is put back."""
    with LiveBytes(tensors_in([place.value for place in places])) as copied:
        put_back = remember(roots)
        size: int = copied.now
        del put_back
    return size


def _is_there(tensor: Tensor, device: torch.device) -> bool:
    return tensor.layout is torch.strided and tensor.device.type == device.type


def _compared(tensor: Tensor) -> int:
    """Return the bytes that comparing a tensor takes for a while, see `train/values.py`."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.numel() <= SUMMED:
        return 0
    size: int = tensor.element_size()
    widened = _WIDE * tensor.numel() // _AT_A_TIME if size < _WIDE else 0
    return widened if tensor.is_contiguous() else widened + size * tensor.numel()
