"""The methods of a plan at work: each hook called in order, and only where a method has it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cosmati.core.batch import Batch
from cosmati.core.loss import LossFunction
from cosmati.core.method import Method, Position, Stage, State
from cosmati.core.pieces import Pieces
from cosmati.core.plan import Plan
from cosmati.core.rng import DefaultGenerators, position_key
from cosmati.errors import PlanError
from cosmati.routing.policy import CompiledPolicy
from cosmati.train.followed import refuse_unfollowed

Trace = Callable[[str], None]


class AppliedMethods:
    """Calls the methods of a plan, and keeps their states.

    Args:
        plan: the methods in their order.
        weights: of all trainable parameters.
        generators: seeded by position before batch methods draw.
        tell: told of each event.
        policy: under one, a method that loses track of its rows is refused.

    Attributes:
        states: of the methods, by their index in the plan.
    """

    def __init__(
        self,
        plan: Plan,
        weights: Pieces,
        generators: DefaultGenerators,
        tell: Trace,
        *,
        policy: CompiledPolicy | None = None,
    ) -> None:
        def having(hook: str) -> list[int]:
            chosen = plan.with_hook(hook)
            # Not by `in`: two of one class may be equal, or hold tensors that can't be compared.
            return [index for index, method in enumerate(plan.methods) if any(method is one for one in chosen)]

        self._methods = plan.methods
        self._weights = weights
        self._generators = generators
        self._tell = tell
        self._is_governed = policy is not None
        self.states: dict[int, State] = {
            index: _of_tensors(method, method.init(weights)) for index, method in enumerate(plan.methods)
        }
        self._of_batch = [(plan.methods[i].stage.name.lower(), plan.methods[i]) for i in having("batch")]
        self._of_loss = having("loss")
        self._of_gradients = having("gradients")
        self._freezing = having("frozen")
        self._after = having("after")
        self.change_batches = bool(self._of_batch)
        self.change_losses = bool(self._of_loss)
        self.change_gradients = bool(self._of_gradients)
        self.need_microbatches = bool(self._freezing or having("perturbation") or having("passing")) or any(
            method.stage is Stage.SELECT for _, method in self._of_batch
        )

    def batch(self, batch: Batch, at: Position) -> Batch:
        """Return a microbatch changed, in the order of the stages."""
        if self._of_batch:
            self._generators.seed(position_key(at.seed, "prepare", at.clock.step, at.microbatch))
        for event, method in self._of_batch:
            self._tell(event)
            made = method.batch(batch, at)
            if self._is_governed and made is not batch:
                refuse_unfollowed(batch, made, method)
            batch = made
        return batch

    def loss(self, loss: LossFunction, at: Position) -> LossFunction:
        """Return a loss with the loss methods around it."""
        for index in self._of_loss:
            self._tell("loss")
            loss = self._methods[index].loss(loss, self.states[index], at)
        return loss

    def frozen(self, at: Position) -> frozenset[str]:
        """Return the names of the parameters that don't learn in a step."""
        names = self._weights.names
        return frozenset[str]().union(*(self._methods[index].frozen(names, at) for index in self._freezing))

    def gradients(self, gradients: Pieces, at: Position) -> Pieces:
        """Return the step's gradients changed."""
        if self._of_gradients:
            self._tell("gradients")
        with torch.no_grad():
            for index in self._of_gradients:
                method = self._methods[index]
                changed = method.gradients(gradients, gradients.alike(self._weights), at)
                if not isinstance(changed, Pieces):
                    msg = (
                        f"{type(method).__name__}.gradients returned a {type(changed).__name__}, and the loop takes "
                        "`Pieces`: return gradients.map(...), or gradients.having({name: tensor})."
                    )
                    raise PlanError(msg)
                gradients = changed
        return gradients

    def after(self, position: Callable[[], Position], learnt: frozenset[str] | None) -> None:
        """Let states follow a commit."""
        for index in self._after:
            self._tell("after")
            method = self._methods[index]
            state = method.after(self.states[index], self._weights, position(), learnt)
            self.states[index] = _of_tensors(method, state)


def _of_tensors(method: Method, state: State) -> State:
    """Return a state; refuse one that no checkpoint would hold: the run would go on without it."""
    if isinstance(state, dict) and all(issubclass(kind, Tensor) for kind in set(map(type, state.values()))):
        return state
    held = type(state).__name__
    if isinstance(state, dict):
        held = ", ".join(f"{name}: {type(value).__name__}" for name, value in state.items())
    msg = (
        f"{type(method).__name__}'s state is {held}, where checkpoints hold a dict of tensors. Keep a number "
        "as a tensor: torch.tensor(0)."
    )
    raise PlanError(msg)
