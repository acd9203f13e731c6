"""Pieces of parameters that one rank each holds: how whole tensors are had from them, and their norms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cosmati.core.pieces import Uncut
from cosmati.train.layout.layout import Parameter
from cosmati.train.layout.piece import Piece, laid_out, memory, strides_of
from cosmati.train.layout.span import HeldSpan
from cosmati.train.ranks import Ranks, all_gather


class OwnedCut:
    """How gradients are cut into pieces with an owner each (see `Cut`).

    A rank holds nothing of most tensors: their pieces are then empty here.

    Args:
        ranks: the data-parallel ranks.
        parameters: all of them.
        pieces: all of them, on all ranks.
    """

    def __init__(self, ranks: Ranks, parameters: Sequence[Parameter], pieces: Sequence[Piece]) -> None:
        self._ranks = ranks
        self._like: dict[str, nn.Parameter] = {p.name: p.tensor for p in parameters}
        self.pieces: dict[str, list[Piece]] = {name: [] for name in self._like}
        for piece in pieces:
            self.pieces[parameters[piece.parameter].name].append(piece)

    def own(self, name: str) -> Piece | None:
        """Return this rank's piece of a parameter."""
        return next((piece for piece in self.pieces[name] if piece.owner == self._ranks.rank), None)

    def is_whole(self, name: str) -> bool:
        """Say whether a parameter is with one rank."""
        return len(self.pieces[name]) <= 1

    def norms(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the norm of each whole tensor: where it lies, or of what is cut for its size, everywhere."""
        if not tensors:
            return []
        cut = self.wholes({name: piece for name, piece in tensors.items() if not self.is_whole(name)})
        own = {name: piece for name, piece in tensors.items() if self.is_whole(name) and self.own(name) is not None}
        found = dict(zip((*own, *cut), Uncut().norms({**own, **cut}), strict=True))
        like = next(iter(tensors.values()))
        kind = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors.values()) else torch.float32
        table = torch.zeros(1, len(tensors), dtype=kind, device=like.device)
        for place, name in enumerate(tensors):
            if name in found:
                table[0, place] = found[name]
        everyone = self._ranks.gather_by_rank(table)
        owners = [self.pieces[name][0].owner if self.pieces[name] else 0 for name in tensors]
        return [
            everyone[owner, place].to(piece.dtype)
            for place, (owner, piece) in enumerate(zip(owners, tensors.values(), strict=True))
        ]

    def whole(self, name: str, piece: Tensor) -> Tensor:
        """Return the whole tensor."""
        return self.wholes({name: piece})[name]

    def piece(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's piece of a whole tensor, in memory of its own only where it's laid out otherwise."""
        own = self.own(name)
        if own is None:
            return whole.new_empty(0)
        if self.is_whole(name):
            return whole
        return memory(whole, self._like[name])[own.start : own.stop]

    def anywhere(self, flag: bool) -> bool:
        """Return whether any rank says so of its pieces."""
        return self._ranks.agree(flag)

    def wholes(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors, of which this rank holds pieces, laid out as their parameters are."""
        found: dict[str, Tensor] = {}
        for name, own in tensors.items():
            like = self._like[name]
            found[name] = torch.empty_strided(like.shape, strides_of(like), dtype=own.dtype, device=own.device)
        flat = {name: memory(one, self._like[name]) for name, one in found.items()}
        for name, piece, run in self.travelled({name: self._flat(name, own) for name, own in tensors.items()}):
            flat[name][piece.start : piece.stop].copy_(run)
        return found

    def _flat(self, name: str, own: Tensor) -> Tensor:
        if not own.numel():
            return own
        return memory(own, self._like[name]) if self.is_whole(name) else own.reshape(-1)

    def travelled(self, own: Mapping[str, Tensor]) -> Iterator[tuple[str, Piece, Tensor]]:
        """Yield every piece of some tensors, from whichever rank, flat: one exchange for each type.

        Args:
            own: this rank's piece of each, flat; every rank gives the same names and types.
        """
        kinds: dict[torch.dtype, list[str]] = defaultdict(list)
        for name, tensor in own.items():
            kinds[tensor.dtype].append(name)
        for names in kinds.values():
            pieces = [(name, piece) for name in names for piece in self.pieces[name]]
            lengths: list[list[int]] = [[] for _ in range(self._ranks.world)]
            for _, piece in pieces:
                lengths[piece.owner].append(piece.stop - piece.start)
            totals = [sum(of_rank) for of_rank in lengths]
            if not any(totals):
                continue
            flat, here = own[names[0]].new_empty(max(totals)), self._ranks.rank
            if totals[here]:
                sent = [own[name] for name, piece in pieces if piece.owner == here]
                torch._foreach_copy_(flat[: totals[here]].split(lengths[here]), sent)
            runs = [
                iter(run[:total].split(of_rank) if total else run.new_empty(len(of_rank), 0))
                for run, total, of_rank in zip(self._from_all(flat, totals), totals, lengths, strict=True)
            ]
            for name, piece in pieces:
                yield name, piece, next(runs[piece.owner])

    def _from_all(self, flat: Tensor, lengths: Sequence[int]) -> Sequence[Tensor]:
        """Return what each rank has for all others, so long. Two ranks swap it, which costs less than gathering."""
        if len(lengths) == 2:
            here = self._ranks.rank
            received = flat.new_empty(lengths[1 - here])
            sent, got = ([lengths[at] * (rank != here) for rank in (0, 1)] for at in (here, 1 - here))
            dist.all_to_all_single(received, flat[: lengths[here]], got, sent)
            return (flat, received) if here == 0 else (received, flat)
        everyone = flat.new_empty(len(lengths) * len(flat))
        all_gather(everyone, flat)
        return everyone.view(len(lengths), -1).unbind()

    def spread(self, names: Sequence[str]) -> None:
        """Bring this rank's pieces of parameters to the others, and theirs here, in place."""
        flat = {name: memory(self._like[name].detach(), self._like[name]) for name in names}
        runs = {(name, piece): flat[name][piece.start : piece.stop] for name in names for piece in self.pieces[name]}
        own = {name: flat[name][:0] for name in names}
        own |= {name: run for (name, piece), run in runs.items() if piece.owner == self._ranks.rank}
        arrived = [
            (runs[name, piece], run) for name, piece, run in self.travelled(own) if piece.owner != self._ranks.rank
        ]
        if arrived:
            torch._foreach_copy_([to for to, _ in arrived], [run for _, run in arrived])
        for name in names:
            like = self._like[name]
            if like.stride() != strides_of(like):  # with gaps: what was filled is a copy
                like.detach().copy_(laid_out(flat[name], like))

    def whole_state(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return an optimizer's state, `parameter/key`, whole; what isn't of a parameter as it is. One after the other.

        What is as long as a piece is cut as it is; numbers are the same in each piece of a parameter.
        """
        names = {key: key.rpartition("/")[0] for key in tensors}
        told = {
            key: [list(value.shape), str(value.dtype).removeprefix("torch."), value.device.type]
            for key, value in tensors.items()
            if names[key] in self.pieces
        }
        everyone = self._ranks.told_by_all(told)
        found = {key: value for key, value in tensors.items() if names[key] not in self.pieces}
        for name, pieces in self.pieces.items():
            there = everyone[pieces[0].owner] if pieces else {}
            for key in (key for key in there if key.rpartition("/")[0] == name):
                shape, kind, device = there[key]
                dtype = getattr(torch, kind)
                if len(pieces) > 1 and shape:
                    own = tensors.get(key)
                    found[key] = self.whole(name, self._like[name].new_empty(0, dtype=dtype) if own is None else own)
                else:
                    found[key] = self._sent(tensors.get(key), pieces[0].owner, shape, dtype).to(device)
        return found

    def _sent(self, own: Tensor | None, owner: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        device = next(iter(self._like.values())).device
        is_here = own is not None and owner == self._ranks.rank
        sent = own.to(device).contiguous() if is_here and own is not None else None
        sent = torch.empty(shape, dtype=dtype, device=device) if sent is None else sent
        dist.broadcast(sent, owner)
        return sent

    def held_state(self, tensors: Mapping[str, Tensor]) -> dict[str, HeldSpan]:
        """Return this rank's pieces of an optimizer's state, by `parameter/key`; what is whole, on one rank alone.

        A piece of a parameter whose memory is in another order (channels-last) is no run of its elements: such a
        tensor is gathered, and the first of its owners keeps it.
        """
        found: dict[str, HeldSpan] = {}
        odd = [name for name in self._like if not self.is_whole(name) and not self._like[name].is_contiguous()]
        for name in odd:
            own = {key: value for key, value in tensors.items() if key.rpartition("/")[0] == name}
            whole = self.whole_state(own)
            if self._is_first(name):
                found |= {key: HeldSpan.of(value) for key, value in whole.items()}
        for key, value in tensors.items():
            name = key.rpartition("/")[0]
            piece = self.own(name) if name in self.pieces else None
            if piece is not None and name not in odd and value.ndim and not self.is_whole(name):
                found[key] = HeldSpan(value, tuple(self._like[name].shape), piece.start)
            elif name not in odd and self._is_first(name):
                found[key] = HeldSpan.of(value)
        return found

    def _is_first(self, name: str) -> bool:
        """Say whether this rank is the first that holds something of a parameter; of other things it's rank 0."""
        pieces = self.pieces.get(name)
        return self._ranks.rank == (pieces[0].owner if pieces else 0)

    def own_state(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's part of what `whole_state` returns."""
        found = {}
        for key, value in tensors.items():
            name = key.rpartition("/")[0]
            if name not in self.pieces:
                found[key] = value
            elif self.own(name) is not None:
                # A view would keep the whole tensor.
                found[key] = self.piece(name, value).clone() if value.ndim and not self.is_whole(name) else value
        return found
