"""What a training method is: a frozen configuration with a place in the loop.

A method overrides the hooks of its stage; the plan calls only those that it overrides, so an absent hook costs
nothing. State is a dictionary that `init` returns and `after` renews; the trainer keeps, checkpoints and restores it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from cosmati.core.batch import Batch, InputKind
from cosmati.core.clock import Budget, Clock
from cosmati.core.function_code import names_read
from cosmati.core.loss import LossFunction, huggingface_loss
from cosmati.core.named_settings import NamedSettings
from cosmati.core.own_loss import num_own_classes
from cosmati.core.passing import Passing
from cosmati.core.pieces import Pieces
from cosmati.core.rng import position_generator, row_uniform
from cosmati.core.source import ImageSize
from cosmati.errors import PlanError

HOOKS = (
    "dilation",
    "apply",
    "shapes",
    "image_size",
    "batch",
    "loss",
    "frozen",
    "passing",
    "perturbation",
    "gradients",
    "learning_rate",
    "init",
    "after",
    "evaluation_weights",
)
State = dict[str, Tensor]
Coupling = Literal["rows", "regions"]


class Stage(IntEnum):
    """Places in the loop, in the order in which they act."""

    BUDGET = 0
    REPLACE = 10
    CAST = 20
    SELECT = 30
    SHAPE = 40
    PERTURB = 50
    MIX = 60
    LABEL = 70
    LOSS = 75
    ROUTE = 80
    AGAIN = 90
    GRADIENT = 100
    AVERAGE = 110


class Position:
    """Where in the run a hook is called, with the randomness that belongs there.

    Attributes:
        clock: what has been committed.
        seed: the run's seed.
        microbatch: index of the microbatch in its step, 0 to V - 1.
        model: the model in training.
        loss: the loss function.
        image_size: full size of the step's images, where they come from their decoder in the size that
            `Method.image_size` says; None where they come as they are.
    """

    __slots__ = ("_budget", "_on_budget", "clock", "image_size", "loss", "microbatch", "model", "seed")

    def __init__(
        self,
        clock: Clock,
        budget: Budget,
        seed: int,
        microbatch: int,
        model: nn.Module,
        loss: LossFunction,
        on_budget: Callable[..., None] | None = None,
        image_size: ImageSize | None = None,
    ) -> None:
        self.clock = clock
        self._budget = budget
        self._on_budget = on_budget
        self.seed = seed
        self.microbatch = microbatch
        self.model = model
        self.loss = loss
        self.image_size = image_size

    @property
    def budget(self) -> Budget:
        """The run's length. Who has read it has acted by it: another budget would change what is past."""
        if self._on_budget is not None:
            self._on_budget(is_told=False)
        return self._budget

    @property
    def budget_told(self) -> Budget:
        """The run's length, for a method that says in `taken_from` all that it takes from it."""
        if self._on_budget is not None:
            self._on_budget(is_told=True)
        return self._budget

    @property
    def elapsed(self) -> float:
        """Fraction of the run that has passed, in [0, 1].

        Raises:
            PlanError: the run's length is in epochs, and nobody knows theirs: it would stand still within one.
        """
        if self._budget.goes_by_epochs:
            msg = (
                f"A method asks how far a run of {str(self._budget.span)!r} is, and nobody knows that within an epoch: "
                "the data don't say how long one is. Give the budget in steps, RunConfig(budget='1000ba')."
            )
            raise PlanError(msg)
        return self.budget.elapsed(self.clock)

    def generator(self, stream: str) -> torch.Generator:
        """Return a CPU generator for draws that belong to this microbatch."""
        return position_generator(self.seed, stream, self.clock.step, self.microbatch)

    def row_uniform(self, stream: str, batch: Batch, num: int = 1) -> Tensor:
        """Draw uniforms in [0, 1) that belong to the rows: float64 [rows, num] on CPU."""
        return row_uniform(self.seed, stream, self.clock.epoch, batch.lineage.row_ids, num=num)

    def num_classes(self, target: Tensor, method: str) -> int:
        """Return the number of classes that integer targets index, as the loss declares it, or a Hugging Face model."""
        num_classes = getattr(self.loss, "num_classes", None)
        if self.loss is huggingface_loss:
            num_classes = num_own_classes(self.model, target)
        if num_classes is None:
            msg = (
                f"{method} needs the number of classes of targets {tuple(target.shape)} {target.dtype}, and the loss "
                "doesn't declare `num_classes`. Use Classification(num_classes=...), or give targets as probabilities."
            )
            raise PlanError(msg)
        return int(num_classes)


@dataclass(frozen=True, kw_only=True)
class Method(NamedSettings):
    """Base of all methods: every hook does nothing.

    Class attributes:
        stage: where in the loop it acts; ties keep the user's order.
        owns: things that only one method of a plan may hold ("loss interpolation", "evaluation weights", ...).
        reads: kinds of input that it can change; empty where it takes any, or doesn't read the input.
    """

    stage: ClassVar[Stage]
    owns: ClassVar[frozenset[str]] = frozenset()
    reads: ClassVar[frozenset[InputKind]] = frozenset()

    @property
    def couples(self) -> frozenset[Coupling]:
        """What the method lets act on one another: the rows of a microbatch, or regions of the model."""
        return frozenset()

    @property
    def contract(self) -> str:
        """What regions learn otherwise on account of it, in words for the plan; empty where a route says it all."""
        return ""

    @property
    def claims(self) -> frozenset[str]:
        """What this configuration owns; `owns` unless it depends on the options."""
        return self.owns

    @property
    def follows_elapsed(self) -> bool:
        """Whether what it does depends on how far the run is: where its code reads `elapsed`, unless told otherwise."""
        functions = [value for kind in type(self).__mro__ if kind is not Method for value in vars(kind).values()]
        return any("elapsed" in names_read(one.__code__) for one in functions if inspect.isfunction(one))

    def dilation(self) -> float:
        """BUDGET: return the factor by which the whole run is dilated."""
        return 1.0

    def apply(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> nn.Module:
        """REPLACE, CAST: return the model with the surgery done; may be another root."""
        return model

    def shapes(self, budget: Budget) -> int:
        """SHAPE: return how many different input shapes the run will see on account of this method."""
        return 1

    def image_size(self, full: ImageSize, elapsed: float) -> ImageSize:
        """SHAPE: return the size in which images are wanted, so that a source can decode them so.

        Args:
            full: their height and width.
            elapsed: fraction of the run that has passed.
        """
        return full

    def batch(self, batch: Batch, at: Position) -> Batch:
        """Return the batch changed, in the order of the stages; surgery may use it to set its layers by position."""
        return batch

    def frozen(self, parameters: Sequence[str], at: Position) -> frozenset[str]:
        """ROUTE: return the names of the parameters that don't learn in this step.

        Args:
            parameters: trainable names, from the input to the output.
            at: position of the step.
        """
        return frozenset()

    def passing(self, passing: Passing, at: Position) -> AbstractContextManager[object]:
        """ROUTE: return what stands around a microbatch's forward and backward pass. A run without a policy is refused.

        It may cut gradients or have parameters read as other values, and leaves the model as it was. What a route
        denies stays denied: no hook lifts a weight.

        Args:
            passing: the microbatch, and what it may teach.
            at: its position.
        """
        return nullcontext()

    def loss(self, loss: LossFunction, state: State, at: Position) -> LossFunction:
        """LOSS: return the loss function with something around it: a term added, a teacher asked, rows weighed anew.

        Args:
            loss: what the methods before it have made of the user's; takes the model and a batch's data.
            state: as `init` or the last `after` has returned it.
            at: position of the microbatch.
        """
        return loss

    def perturbation(self, weights: Pieces, gradients: Pieces, at: Position) -> Pieces | None:
        """AGAIN: return what to add to the weights for a second pass over the same microbatches, or None.

        Args:
            weights: of the parameters that have a gradient in this step.
            gradients: of the first pass.
            at: position of the step.
        """
        return None

    def gradients(self, gradients: Pieces, weights: Pieces, at: Position) -> Pieces:
        """GRADIENT: return the step's gradients changed.

        Args:
            gradients: summed over the step. A parameter that doesn't learn in it is absent, and stays so.
            weights: of all trainable parameters.
            at: position of the step.
        """
        return gradients

    def learning_rate(self, scheduled: Callable[[float], float], elapsed: float, budget: Budget) -> float:
        """Return the learning rate of a parameter group for the step that starts at a fraction of the run.

        Args:
            scheduled: what the schedule gives at any fraction of the run.
            elapsed: fraction that has passed.
            budget: the run's length.
        """
        return scheduled(elapsed)

    def taken_from(self, budget: Budget) -> object:
        """Return all that the hooks take from the run's length by `at.budget_told`, to be compared.

        A run goes on with another budget where this is the same for both: its past would have been, too. What reads
        `at.budget` or `at.elapsed` doesn't say what it does with it, and keeps the run's budget as it is.
        """
        return None

    def init(self, weights: Pieces) -> State:
        """Return the state at step 0.

        Args:
            weights: of all trainable parameters; state named after them is cut as they are.
        """
        return {}

    def after(self, state: State, weights: Pieces, at: Position, learnt: frozenset[str] | None) -> State:
        """AVERAGE: return the state after a commit; `at.clock` has advanced.

        Args:
            state: of the step before.
            weights: of all trainable parameters, after the commit.
            at: position after the commit.
            learnt: names of the parameters that moved; None means all.
        """
        return state

    def evaluation_weights(self, state: State, at: Position) -> Mapping[str, Tensor] | None:
        """Return parameters to evaluate with, by name, or None for the model's own."""
        return None


_FORMER_ARGUMENTS = {"perturbation": "parameters", "gradients": "parameters", "init": "model", "after": "model"}


def check_hooks(method: Method) -> None:
    """Check that a method's hooks take what the loop gives.

    Raises:
        PlanError: a hook has other arguments, such as whole parameters and the model, which earlier releases gave.
    """
    for hook in HOOKS:
        if not overrides(method, hook):
            continue
        own, given = (
            [p for p in inspect.signature(getattr(kind, hook)).parameters.values() if p.name != "self"]
            for kind in (type(method), Method)
        )
        names, wanted = [p.name for p in own], [p.name for p in given]
        takes_any = any(p.kind is p.VAR_POSITIONAL for p in own)
        if (len(names) != len(wanted) and not takes_any) or _FORMER_ARGUMENTS.get(hook) in names:
            msg = (
                f"{type(method).__name__}.{hook}({', '.join(names)}) can't be called: the loop gives "
                f"{hook}({', '.join(wanted)}). Weights and gradients are `Pieces` now, of which a rank may hold a "
                "part: see 'Weights and gradients' in docs/writing-a-method.md."
            )
            raise PlanError(msg)


def operated(
    model: nn.Module, methods: Sequence[Method], optimizers: Sequence[torch.optim.Optimizer] = ()
) -> nn.Module:
    """Return a model after the surgery of methods, in the order of their stages.

    Args:
        model: changed in place; it may get another root.
        methods: in any order.
        optimizers: ready-made ones, which hold its parameters.
    """
    for method in sorted(methods, key=lambda method: method.stage):
        if method.stage in (Stage.REPLACE, Stage.CAST) and overrides(method, "apply"):
            model = method.apply(model, optimizers)
    return model


def overrides(method: Method, hook: str) -> bool:
    """Say whether a method has a hook of its own."""
    return getattr(type(method), hook) is not getattr(Method, hook)
