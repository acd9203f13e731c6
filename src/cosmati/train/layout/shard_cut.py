"""Parameters cut by rows, as FSDP2 cuts them: each rank has ceil(rows / W) of them, the last ones fewer or none."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cosmati.core.batch import iterate_tensors
from cosmati.errors import PlanError
from cosmati.optim.sharing import assign_owners
from cosmati.train.ranks import Ranks, all_gather

_REGISTERED = ("_parameters", "_modules", "_buffers")
"""Attributes of a module, in which parameters are as they should be."""
_ALIGNMENT = 16
"""Bytes: products' bits follow where a matrix begins beside their multiples, and what's gathered begins at one."""


@dataclass(frozen=True, slots=True)
class RowsCut:
    """How one parameter is cut.

    Attributes:
        shape: of the whole parameter, of one dimension at least.
        world: number of ranks that have a piece.
    """

    shape: tuple[int, ...]
    world: int

    @property
    def most(self) -> int:
        """Rows of the first rank, which has most."""
        return -(-self.shape[0] // self.world)

    @property
    def row_size(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape[1:])

    @property
    def padded(self) -> int:
        """Elements that each rank sends where all send equally many."""
        return self.most * self.row_size

    def of(self, rank: int) -> slice:
        """Return a rank's rows."""
        start = min(rank * self.most, self.shape[0])
        return slice(start, min(start + self.most, self.shape[0]))

    def piece_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's piece."""
        own = self.of(rank)
        return (own.stop - own.start, *self.shape[1:])

    def num_elements(self, rank: int) -> int:
        """Return the number of elements of a rank's piece."""
        return math.prod(self.piece_shape(rank))


class RowCut:
    """Cuts whole tensors by rows (see `Cut`). Each parameter has an owner too, who works on it where it must be whole.

    Args:
        rows: how each parameter is cut, by name.
        ranks: those that hold one copy together.
    """

    def __init__(self, rows: Mapping[str, RowsCut], ranks: Ranks) -> None:
        self.rows = rows
        self._ranks = ranks
        owners = assign_owners([float(math.prod(one.shape)) for one in rows.values()], ranks.world)
        self.owner_of = dict(zip(rows, owners, strict=True))

    def norms(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the norm of each whole tensor: its owner's."""
        if not tensors:
            return []
        own = self.collected(tensors)
        names = list(own)
        found = dict(zip(names, torch._foreach_norm(list(own.values())), strict=True)) if own else {}  # noqa: SLF001
        like = next(iter(tensors.values()))
        nothing = like.new_zeros(())
        table = self._ranks.gather_by_rank(torch.stack([found.get(name, nothing) for name in tensors])[None])
        return [table[self.owner_of[name], index] for index, name in enumerate(tensors)]

    def anywhere(self, flag: bool) -> bool:
        """Return whether any rank says so of its rows."""
        return self._ranks.agree(flag)

    def whole(self, name: str, piece: Tensor) -> Tensor:
        """Return the whole tensor of which this rank holds a piece."""
        cut = self.rows[name]
        padded = piece.new_zeros(cut.padded)
        padded[: piece.numel()].copy_(piece.detach().reshape(-1))
        gathered = piece.new_empty(cut.world * cut.padded)
        all_gather(gathered, padded, group=self._ranks.group)
        return gathered[: math.prod(cut.shape)].view(cut.shape)

    def piece(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's rows of a whole tensor, in their own memory."""
        return whole[self.rows[name].of(self._ranks.rank)].clone()

    def collected(self, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the whole tensors of which this rank is the owner. Every rank has to ask for the same."""
        names, world, rank = list(pieces), self._ranks.world, self._ranks.rank
        by_owner = [[name for name in names if self.owner_of[name] == one] for one in range(world)]
        sent = [[pieces[name].detach().reshape(-1) for name in own] for own in by_owner]
        sizes = [[self.rows[name].num_elements(one) for name in by_owner[rank]] for one in range(world)]
        parts = self._exchanged(sent, sizes, next(iter(pieces.values())))
        return {
            name: torch.cat([parts[one][index] for one in range(world)]).view(self.rows[name].shape)
            for index, name in enumerate(by_owner[rank])
        }

    def handed_out(self, whole: Mapping[str, Tensor], names: Sequence[str], like: Tensor) -> dict[str, Tensor]:
        """Return this rank's pieces of what the owners have whole.

        Args:
            whole: those of which this rank is the owner.
            names: of all, in one order on every rank.
            like: a tensor of their type and device.
        """
        world, rank = self._ranks.world, self._ranks.rank
        by_owner = [[name for name in names if self.owner_of[name] == one] for one in range(world)]
        sent = [[whole[name][self.rows[name].of(one)].reshape(-1) for name in by_owner[rank]] for one in range(world)]
        sizes = [[self.rows[name].num_elements(rank) for name in own] for own in by_owner]
        parts = self._exchanged(sent, sizes, like)
        return {
            name: part.view(self.rows[name].piece_shape(rank))
            for own, received in zip(by_owner, parts, strict=True)
            for name, part in zip(own, received, strict=True)
        }

    def _exchanged(
        self, sent: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]], like: Tensor
    ) -> list[tuple[Tensor, ...]]:
        """Send flat tensors to each rank, and return those that each has sent."""
        out = torch.cat([like.new_empty(0), *(tensor for own in sent for tensor in own)])
        received = like.new_empty(sum(map(sum, sizes)))
        dist.all_to_all_single(
            received,
            out,
            [sum(own) for own in sizes],
            [sum(tensor.numel() for tensor in own) for own in sent],
            group=self._ranks.group,
        )
        flat: Iterator[Tensor] = iter(received.split([size for own in sizes for size in own]))
        return [tuple(next(flat) for _ in own) for own in sizes]


def refuse_uncuttable(model: nn.Module) -> None:
    """Refuse a model whose parameters can't be cut by rows.

    Raises:
        PlanError: the model is a container; its parameters are of several types, or one is a scalar, or empty, or not
            contiguous, or begins at an odd place in memory, or has hooks; or a module holds some in an attribute of its
            own.
    """
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        msg = (
            f"The model is a {type(model).__name__}, which has no forward of its own, and sharding='full' gathers "
            "weights around one. Put it into a module with a forward, or use another sharding."
        )
        raise PlanError(msg)
    named = dict(model.named_parameters())
    own = {id(parameter) for parameter in named.values()}
    for path, module in model.named_modules():
        for place, value in vars(module).items():
            if place not in _REGISTERED and any(id(tensor) in own for tensor in iterate_tensors(value)):
                msg = (
                    f"{path or 'The model'} ({type(module).__name__}) holds parameters in {place} too, and under "
                    "sharding='full' what stands there would be no weights. Use another sharding."
                )
                raise PlanError(msg)
    kinds = {parameter.dtype for parameter in named.values()}
    if len(kinds) > 1 or not kinds <= {torch.float32, torch.float64}:
        msg = (
            f"sharding='full' cuts models of one type, float32 or float64, and this one has "
            f"{', '.join(sorted(map(str, kinds)))}. Bring it to one: model.float()."
        )
        raise PlanError(msg)
    for name, parameter in named.items():
        wrong = (
            ("is a scalar", "Give it a shape of [1]")
            if parameter.ndim == 0
            else ("has no elements", "Leave it out")
            if parameter.numel() == 0
            else ("isn't contiguous in memory", "Make it contiguous")
            if not parameter.is_contiguous()
            else (f"begins between multiples of {_ALIGNMENT} bytes in memory", "Give it memory of its own: clone it")
            if parameter.data_ptr() % _ALIGNMENT
            else ("has hooks, which its pieces wouldn't have", "Register them on a module")
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)  # noqa: SLF001
            else None
        )
        if wrong:
            what, mend = wrong
            msg = f"{name} {what}, and sharding='full' cuts parameters by rows. {mend}, or use another sharding."
            raise PlanError(msg)
