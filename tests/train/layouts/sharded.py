"""A layout over FSDP2's shards, small and for tests only: it shows that the contract has a place for sharding.

Weights are gathered in forward and gradients reduced in backward, block by block, by FSDP2 itself; what a leaf
undergoes before it's summed happens in hooks on the gathered parameters' gradients. Every slot has to be offered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from cosmati.core.pieces import Pieces
from cosmati.core.state import parameter_root
from cosmati.routing.policy import RegionWeights
from cosmati.routing.regions import Regions
from cosmati.train.direction_sketch import DirectionSketch
from cosmati.train.layout.layout import Parameter
from cosmati.train.layout.tree import Leaf, Tree, add_leaves, present
from cosmati.train.ranks import Ranks


class ShardCut:
    """Cuts along FSDP2's placements."""

    def __init__(self, parameters: Mapping[str, DTensor]) -> None:
        self._parameters = parameters

    def norms(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        return [torch.linalg.vector_norm(self.whole(name, piece)) for name, piece in tensors.items()]

    def whole(self, name: str, piece: Tensor) -> Tensor:
        like = self._parameters[name]
        pieces = DTensor.from_local(
            piece, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        return pieces.full_tensor()

    def anywhere(self, flag: bool) -> bool:
        raise AssertionError(flag)

    def piece(self, name: str, whole: Tensor) -> Tensor:
        like = self._parameters[name]
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


class Sharded:
    """The layout of a model that `fully_shard` has cut over the ranks, block by block."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[nn.Module], regions: Regions, ranks: Ranks, num_microbatches: int
    ) -> None:
        mesh = init_device_mesh("cpu", (ranks.world,))
        for block in [*blocks, model]:
            fully_shard(block, mesh=mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        named = dict(model.named_parameters())
        self.parameters = [Parameter(i, n, regions.region_of[n], p) for i, (n, p) in enumerate(named.items())]
        ranks.share_out(num_microbatches, is_strided=True)  # FSDP2 reduces each microbatch at once.
        self.mine = ranks.mine(num_microbatches)
        self.num_regions = len(regions.names)
        self.ranks = ranks
        self.model = model
        self.dtensors: dict[str, Any] = named
        self._weights = Pieces(
            {name: p.to_local() for name, p in self.dtensors.items()},
            {p.name: p.region for p in self.parameters},
            ShardCut(self.dtensors),
        )

    def pieces(self) -> list[tuple[str, nn.Parameter]]:
        return [(p.name, p.tensor) for p in self.parameters]

    def weights(self) -> Pieces:
        return self._weights.map(Tensor.detach)

    def whole_state(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        raise AssertionError(tensors)

    def own_state(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        raise AssertionError(tensors)

    def gather(self, rows: Tensor) -> Tensor:
        return self.ranks.gather(rows)

    @contextmanager
    def step(
        self,
        routes: Sequence[RegionWeights],
        learns: frozenset[int],
        *,
        measure: bool,
        sketch: DirectionSketch | None = None,
    ) -> Iterator[ShardedStep]:
        assert sketch is None, "a sketch is of whole leaves"
        try:
            yield ShardedStep(self, routes, learns, measure=measure)
        finally:
            for parameter in self.parameters:
                parameter.tensor.grad = None

    def commit(self, root: Pieces, learns: Collection[int], step: Callable[[], None]) -> frozenset[str]:
        moved = [self.parameters[i].name for i in learns if self.parameters[i].name in root]
        for name in moved:
            like = self.dtensors[name]
            like.grad = DTensor.from_local(
                root.tensors[name], like.device_mesh, like.placements, run_check=False, shape=like.shape,
                stride=like.stride(),
            )  # fmt: skip
        step()
        return frozenset(moved)

    @contextmanager
    def perturbed(self, offsets: Pieces) -> Iterator[None]:
        with self.replaced({n: self._weights.tensors[n].detach() + o for n, o in offsets.tensors.items()}):
            yield

    @contextmanager
    def replaced(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        kept = {name: self._weights.tensors[name].detach().clone() for name in values}
        with torch.no_grad():
            try:
                for name, value in values.items():
                    self._weights.tensors[name].copy_(value)
                with torch.enable_grad():
                    yield
            finally:
                for name, value in kept.items():
                    self._weights.tensors[name].copy_(value)

    def save(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in self.model.state_dict().items():
            yield name, value.full_tensor() if isinstance(value, DTensor) else value

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, piece in self._weights.tensors.items():
                piece.copy_(self._weights.cut.piece(name, tensors[name]))

    def digest(self) -> bytes:
        return parameter_root(dict(self.save()))


class ShardedStep:
    """One pass over a step's microbatches."""

    def __init__(
        self, layout: Sharded, routes: Sequence[RegionWeights], learns: frozenset[int], *, measure: bool
    ) -> None:
        self.layout, self.measure = layout, measure
        self._routes, self._learns = routes, learns
        self._tree: Tree[Leaf] = Tree(add_leaves)
        self._present = torch.zeros(len(layout.parameters), dtype=torch.uint8)

    def slot(self, microbatch: int) -> ShardedSlot:
        weights = self._routes[microbatch]
        factors = {p.name: weights[p.region] if p.index in self._learns else 0.0 for p in self.layout.parameters}
        return ShardedSlot(self, factors)

    def fold(self, seen: Collection[str]) -> None:
        leaf: Leaf = []
        for parameter in self.layout.parameters:
            gradient: Any = parameter.tensor.grad
            leaf.append(None if gradient is None else gradient.to_local())
            parameter.tensor.grad = None
            self._present[parameter.index] |= parameter.name in seen
        self._tree.push(leaf)

    def root(self, denominators: Tensor | None) -> Pieces:
        root = self._tree.root()
        dist.all_reduce(self._present, op=dist.ReduceOp.MAX)
        if denominators is not None:
            for region, divisor in enumerate(denominators.float()):
                members = [p.index for p in self.layout.parameters if p.region == region]
                torch._foreach_div_(present(root, members), divisor)
        found = {
            p.name: g
            for p, g, seen in zip(self.layout.parameters, root, self._present.tolist(), strict=True)
            if seen and g is not None
        }
        return self.layout.weights().having(found)


class ShardedSlot:
    """One microbatch: hooks on the gathered parameters, from before forward to after backward."""

    def __init__(self, step: ShardedStep, factors: Mapping[str, float]) -> None:
        self.norms: list[Tensor] = []
        self.sketches: list[Tensor] = []
        self._step, self._factors = step, factors
        self._seen: dict[str, Tensor] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        for path, module in self._step.layout.model.named_modules():
            if isinstance(module, FSDPModule):
                # FSDP2's own hook, which gathers, comes first.
                handle = module.register_forward_pre_hook(lambda m, _, path=path: self._watch(m, path))
                self._hooks.callback(handle.remove)
        return self

    def _watch(self, module: nn.Module, path: str) -> None:
        for name, parameter in module.named_parameters(prefix=path):
            if not isinstance(parameter, DTensor):
                self._hooks.callback(parameter.register_hook(self._on_arrival(name)).remove)

    def _on_arrival(self, name: str) -> Callable[[Tensor], Tensor]:
        def arrive(gradient: Tensor) -> Tensor:
            factor = self._factors[name]
            if factor == 0:
                # -0.0 is what leaves every float as it is when added.
                return torch.full_like(gradient, -0.0)
            gradient = gradient if factor == 1 else gradient * factor
            self._seen[name] = torch.linalg.vector_norm(gradient)
            return gradient

        return arrive

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hooks.close()
        if kind is None:
            self._step.fold(self._seen)
            if self._step.measure:
                layout = self._step.layout
                nothing = torch.tensor(torch.nan, dtype=torch.float64)
                regions = [
                    [self._seen[p.name] for p in layout.parameters if p.region == r and p.name in self._seen]
                    for r in range(layout.num_regions)
                ]
                self.norms = [torch.linalg.vector_norm(torch.stack(n)).double() if n else nothing for n in regions]

    def backward(self, objective: Tensor, *, is_final: bool = True) -> None:
        objective.backward()
