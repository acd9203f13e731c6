"""SGTM, selective gradient masking: some knowledge goes into parameters that can be taken away (Shilov et al., 2025).

"Beyond Data Filtering: Knowledge Localization for Capability Removal in LLMs", arXiv 2512.05648. Parameters are divided
into *forget* and *retain* ones, and data into three kinds. Data that should be removable teach forget parameters alone:
that is a mask on gradients of parameters, and what flows back through activations stays as it is (which sets it apart
from Gradient Routing). Data to be kept are run with the forget parameters at zero, so that they neither need nor teach
them. Unlabelled data teach both. Afterwards the forget parameters are set to zero.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from cosmati.core.method import Method, Position, Stage
from cosmati.core.passing import Passing
from cosmati.errors import PlanError
from cosmati.routing.policy import partition_by
from cosmati.routing.policy_file import PolicyFile


@dataclass(frozen=True, kw_only=True)
class SelectiveGradientMasking(Method):
    """Run the classes that may not teach the forget region with its parameters at zero.

    The policy says which class is of which kind: one to be removable has weight 0 in every region but the forget one,
    one to be kept has weight 0 there, and an unlabelled one has weight 1 everywhere. The first is the paper's mask on
    gradients, which a policy does by itself: a leaf of weight 0 is absent, so that optimizers don't touch what nobody
    taught in a step (the authors' code sets gradients to zero). This method adds the paper's mask on parameters in the
    forward pass. Whether removable data teach embeddings and norms, as the authors' code lets them unless told
    otherwise, is the policy's to say, too.

    Where no class is unlabelled, and removable ones teach nothing else, the other regions' bits don't follow from what
    removable rows hold, at any step. An unlabelled class carries it there, and so does a method that runs the model by
    itself (SelectiveBackprop's scores). In packs of both kinds each token reads the parameters or zeros, by its class.
    Parameters that aren't trained, and buffers, keep their values. A forget region is whole parameters: heads or hidden
    units have to be parameters of their own.

    Args:
        forget: name of the policy's region.
    """

    stage: ClassVar[Stage] = Stage.ROUTE

    forget: str

    @property
    def contract(self) -> str:
        """That what is denied the region doesn't read it either."""
        return f"classes that may not teach {self.forget} are run with its parameters at zero"

    def passing(self, passing: Passing, at: Position) -> AbstractContextManager[object]:
        """Read the forget parameters as zeros where the microbatch may not teach them."""
        if self.forget not in passing.weights:
            msg = f"SelectiveGradientMasking: {self.forget!r} is no region of the policy, which has "
            raise PlanError(msg + f"{', '.join(passing.weights)}.")
        # Padding of packs teaches nothing, and rejected tokens are left out.
        teaches = (torch.stack([*passing.weights.values()]) != 0).any(0)
        is_denied = (passing.weights[self.forget] == 0)[teaches]
        if not bool(is_denied.any()):
            return nullcontext()
        if at.clock.step == 0:
            passing.looks.append(self._refuse_undefined)
        own = passing.parameters[self.forget]
        if not bool(is_denied.all()):
            passing.zeroed.update(own)
            return nullcontext()
        return passing.replaced({name: torch.zeros_like(parameter) for name, parameter in own.items()})

    def _refuse_undefined(self, objective: Tensor) -> None:
        if not bool(objective.isfinite()):
            msg = (
                f"With the parameters of {self.forget} at zero the loss is {objective.item()}: something divides by "
                "them (weight_norm, a cosine). Leave that part out of the region, or end it in a plain layer."
            )
            raise PlanError(msg)


def ablate_region(model: nn.Module, policy: PolicyFile, region: str) -> tuple[str, ...]:
    """Set a region's parameters to zero, in place: what it alone has learnt is gone from the model.

    Checkpoints, averages and copies that were made before still have it.

    Args:
        model: trained.
        policy: whose regions are meant.
        region: its name.

    Returns:
        Names of the parameters.

    Raises:
        PlanError: there is no such region.
    """
    regions = partition_by(policy, model)
    if region not in regions.names:
        msg = f"There is no region {region!r} to take away. The policy has {', '.join(regions.names)}."
        raise PlanError(msg)
    names = regions.parameters[regions.names.index(region)]
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name in names:
            named[name].zero_()
    return names
