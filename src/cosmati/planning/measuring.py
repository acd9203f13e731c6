"""What one microbatch and one commit of a run take, measured on this machine with a trainer that's thrown away."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from cosmati.core.batch import Batch, count_rows_and_tokens
from cosmati.core.loss import Loss, as_loss, without_tombstones
from cosmati.core.method import Method
from cosmati.core.rng import position_key
from cosmati.errors import DataError
from cosmati.optim.stepping import GroupedOptimizer
from cosmati.planning.attention_flops import missing_formulas
from cosmati.planning.beside import Beside, beside
from cosmati.planning.live_bytes import LiveBytes, bytes_of, tensors_in
from cosmati.planning.rows import AtPoint, Changed, changed_rows, unplanned
from cosmati.train.assembly import Turn
from cosmati.train.feed import in_microbatches
from cosmati.train.layout.blocks import blocks_in
from cosmati.train.layout.pair_sum import clear
from cosmati.train.run.environment import numerics
from cosmati.train.step_rows import split_step
from cosmati.train.trainer import Trainer

_MOST_TIMES, _TIMED_SECONDS = 5, 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredParts:
    """Sizes in bytes, work in floating-point operations, time in seconds: of one rank that holds everything.

    Attributes:
        num_microbatches: V.
        precision: of the run.
        num_steps: of the whole run; None where that isn't known ahead.
        parameters: all, frozen ones too.
        gathered: these as full sharding sends them; None where that's as they are.
        learning: those that learn.
        num_elements: of those that learn.
        gradients: one copy of the step's sum.
        largest_block: parameters of the largest block that full sharding would wrap by itself.
        outside_blocks: parameters in none.
        buffers: of the model.
        state_cut: optimizer state that can be cut anywhere.
        state_whole: of each matrix whose state has one owner.
        averages: what methods keep: averaged weights and the like.
        again: a second pass over the microbatches (SAM): the weights that are put back, offsets, the first pass's sum.
        rows: one microbatch of the data.
        activations: the most that forward and backward of a microbatch hold beside weights, gradients and data, where
            gradients are added to those that are there.
        first_activations: likewise of the first microbatch, whose gradients aren't added to any.
        narrow: gradients of narrow parameters (bfloat16), as a backward pass leaves them.
        widened: the same, in float32, as they're summed.
        largest_narrow: of these, the largest as it's left.
        is_plain: a step is one microbatch, of which gradients are as backward leaves them.
        changed: rows of a microbatch as methods leave them, beside those that they're made of.
        changing: the most that changing them takes, these included.
        elsewhere: the last four at other points of the run, where methods leave rows in other shapes.
        unplanned: names of methods of whose later changes nothing is known.
        beside: what the run holds and copies beside that.
        commit: the most that changing gradients and stepping the optimizers hold for a while.
        num_rows: of a microbatch.
        num_tokens: of a microbatch.
        flops: of a microbatch, forward and backward.
        kernels: operators of a microbatch, forward and backward, that aren't views.
        seconds: that it took here.
    """

    num_microbatches: int
    precision: str
    num_steps: int | None
    parameters: int
    learning: int
    num_elements: int
    gradients: int
    largest_block: int
    outside_blocks: int
    buffers: int
    state_cut: int
    state_whole: tuple[int, ...]
    averages: int
    again: int
    rows: int
    activations: int
    first_activations: int
    narrow: int
    widened: int
    largest_narrow: int
    is_plain: bool
    changed: int
    changing: int
    elsewhere: tuple[AtPoint, ...]
    unplanned: tuple[str, ...]
    beside: Beside
    commit: int
    num_rows: int
    num_tokens: int
    flops: int
    kernels: int
    seconds: float
    gathered: int | None = None

    @property
    def points(self) -> tuple[MeasuredParts, ...]:
        """These, and what they are at other points of the run."""
        return self, *(dataclasses.replace(self, **dataclasses.asdict(point)) for point in self.elsewhere)

    @property
    def state(self) -> int:
        """All of the optimizers' state."""
        return self.state_cut + sum(self.state_whole)


def measure(trainer: Trainer) -> MeasuredParts:
    """Run a microbatch of the first step a few times and commit twice, and count.

    The first pass makes what later ones find there (optimizer state). Then memory is counted twice: of a first
    microbatch, and of one that adds to gradients that are there, as in a step of several. Where methods leave rows in
    other shapes as the run goes on, it's counted for each. What takes time is measured where activations take most.

    Args:
        trainer: made for this, with data; it isn't opened, and is of no use afterwards.

    Raises:
        DataError: it has no data.
    """
    a = trainer.assembly
    with numerics(a), a.generators.restored():
        given = _first_microbatch(trainer)
        batch = trainer.methods.batch(given, trainer.position())
        _run(trainer, batch)
        _commit(trainer)
        trainer.methods.after(trainer.position, None)
        found = changed_rows(trainer, given)
        points = [_at_point(trainer, given, one) for one in found]
        dearest = max(range(len(points)), key=lambda index: points[index].activations)
        trainer.clock, batch = found[dearest].clock, found[dearest].batch
        counted = FlopCounterMode(display=False, custom_mapping=missing_formulas())
        with counted, LiveBytes() as kernels:
            _run(trainer, batch)
        seconds = _timed(partial(_run, trainer, batch))
        with LiveBytes([*_held(trainer, given, batch), *_gradients_of(a.model)]) as commit:
            _commit(trainer)
        work = _Work(int(counted.get_total_flops()), kernels.num_kernels, seconds, commit.peak)
        return _parts(trainer, given, [points.pop(dearest), *points], work)


def _at_point(trainer: Trainer, given: Batch, changed: Changed) -> AtPoint:
    """Count the memory of a microbatch as methods have left it."""
    a, trainer.clock = trainer.assembly, changed.clock
    held = _held(trainer, given, changed.batch)
    clear([*a.model.parameters()])
    with LiveBytes(held) as first:
        _run(trainer, changed.batch)
    first_activations = first.peak - bytes_of(_gradients_of(a.model))
    # Those of narrow parameters are widened aside, and nothing is added to them.
    narrow = _narrow(trainer)
    clear(narrow)
    with LiveBytes([*held, *_gradients_of(a.model)]) as added:
        _run(trainer, changed.batch)
    activations = added.peak - bytes_of(gradient for p in narrow if (gradient := p.grad) is not None)
    return AtPoint(
        activations=activations, first_activations=first_activations, changed=changed.kept, changing=changed.most
    )


def _held(trainer: Trainer, given: Batch, batch: Batch) -> list[Tensor]:
    model = trainer.model
    states = [dict(one.optimizer.state) for one in trainer.assembly.optimizers]
    return [*model.parameters(), *model.buffers(), *tensors_in([given.data, batch.data, states])]


def _narrow(trainer: Trainer) -> list[nn.Parameter]:
    return [p.tensor for p in trainer.assembly.layout.parameters if _widened(p.tensor) > p.tensor.nbytes]


class _Work(NamedTuple):
    """Of a microbatch; and the most that a commit holds for a while."""

    flops: int
    kernels: int
    seconds: float
    commit: int


def _parts(trainer: Trainer, batch: Batch, points: Sequence[AtPoint], work: _Work) -> MeasuredParts:
    a, model = trainer.assembly, trainer.assembly.model
    learning = [p.tensor for p in a.layout.parameters]
    num_elements = sum(tensor.numel() for tensor in learning)
    wide = sum(map(_widened, learning))
    narrow = _narrow(trainer)
    cut, whole = _states(trainer)
    blocks = blocks_in(model)
    in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    parameters = bytes_of(model.parameters())
    kept = bytes_of(tensors_in([dict(state) for state in trainer.states.values()]))
    averages = any("evaluation weights" in method.claims for method in a.plan.methods)
    rows, tokens = count_rows_and_tokens(batch.data)
    return MeasuredParts(
        num_microbatches=a.num_microbatches,
        precision=a.config.precision,
        num_steps=a.budget.num_steps,
        parameters=parameters,
        gathered=2 * sum(p.numel() for p in model.parameters()) if a.config.rounds_weights else None,
        learning=bytes_of(learning),
        num_elements=num_elements,
        gradients=wide,
        largest_block=max((bytes_of(block.parameters()) for block in blocks), default=0),
        outside_blocks=bytes_of(p for p in model.parameters() if id(p) not in in_blocks),
        buffers=bytes_of(model.buffers()),
        state_cut=cut,
        state_whole=whole,
        # Averages that begin later in the run aren't there yet.
        averages=max(kept, wide if averages else 0),
        again=bytes_of(learning) + 2 * wide if _goes_twice(a.plan.methods) else 0,
        # Not the memory that slices of a larger tensor are cut from; nor what isn't there of expanded ones.
        rows=sum(min(one.nbytes, bytes_of([one])) for one in tensors_in(batch.data)),
        narrow=sum(tensor.nbytes for tensor in narrow),
        widened=sum(map(_widened, narrow)),
        largest_narrow=max((tensor.nbytes for tensor in narrow), default=0),
        is_plain=trainer.is_plain,
        **dataclasses.asdict(points[0]),
        elsewhere=tuple(points[1:]),
        unplanned=unplanned(trainer),
        beside=beside(trainer),
        num_rows=rows,
        num_tokens=tokens,
        **work._asdict(),
    )


def _widened(tensor: Tensor) -> int:
    """Return the bytes of a parameter's gradient as it's summed."""
    return tensor.numel() * max(4, tensor.element_size())


def _gradients_of(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _timed(work: Callable[[], None]) -> float:
    """Return the median seconds of a few, or of one where that takes long."""
    seconds: list[float] = []
    while len(seconds) < _MOST_TIMES and sum(seconds) < _TIMED_SECONDS:
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _goes_twice(methods: Sequence[Method]) -> bool:
    return any(type(method).perturbation is not Method.perturbation for method in methods)


def _first_microbatch(trainer: Trainer) -> Batch:
    a, feed = trainer.assembly, trainer.feed
    if feed is None:
        raise DataError(
            "A plan of memory and time runs a microbatch, and this recipe has no data. Give Recipe(data=...)."
        )
    cut = in_microbatches(feed)
    if cut is not None:
        data = cut.microbatches(trainer.clock, [0])[0]
    else:
        whole = feed.whole(trainer.clock)
        if whole is None:
            raise DataError("A plan of memory and time runs a microbatch, and the data are empty. Give some rows.")
        data = split_step(a, trainer.clock, whole)[0][0]
    return data.to(a.device)


@contextmanager
def _seeded(trainer: Trainer) -> Iterator[None]:
    a, at = trainer.assembly, trainer.clock.step
    a.generators.seed(position_key(a.config.seed, "forward", at, 0))
    with a.config.autocast(a.device):
        yield


def _run(trainer: Trainer, batch: Batch) -> None:
    """Run every sub-step's loss forward and backward, as `gradients.py` does, with nothing denied."""
    for turn in trainer.assembly.turns:
        with _seeded(trainer):
            loss = trainer.methods.loss(turn.loss, trainer.position())
            result = as_loss(without_tombstones(as_loss(loss(trainer.model, batch.data)), batch.present))
        objective = result.mean() if isinstance(result, Loss) else result
        torch.autograd.backward(objective, inputs=_learning(trainer, turn))


def _learning(trainer: Trainer, turn: Turn) -> list[Tensor]:
    return [trainer.assembly.layout.parameters[index].tensor for index in sorted(turn.indices)]


def _commit(trainer: Trainer) -> None:
    """Change the gradients and step the optimizers, as `commit.py` does."""
    a = trainer.assembly
    for turn in a.turns:
        own = [a.layout.parameters[index] for index in turn.indices]
        held = {p.name: p.tensor.grad for p in own if p.tensor.grad is not None}
        root = trainer.methods.gradients(a.layout.weights().having(held), trainer.position())
        a.layout.commit(root, turn.indices, partial(turn.step, trainer.clock, a.budget))


def _states(trainer: Trainer) -> tuple[int, tuple[int, ...]]:
    """Return the bytes of state that can be cut anywhere, and those of each whole matrix."""
    cut, whole = 0, []
    for scheduled in trainer.assembly.optimizers:
        is_grouped = isinstance(scheduled.optimizer, GroupedOptimizer)
        for parameter, state in scheduled.optimizer.state.items():
            size = bytes_of(tensors_in(dict(state)) if isinstance(state, dict) else tensors_in(state))
            if is_grouped and isinstance(parameter, Tensor) and parameter.ndim > 1:
                whole.append(size)
            else:
                cut += size
    return cut, tuple(whole)
