"""Gradient Routing: gradients are stopped at activations, by the class of the data (Cloud et al., 2024, 2410.04332).

An activation `x` becomes `m * x + (1 - m) * x.detach()`: its value stays, and what flows back through it is multiplied
by `m`, which goes by the class. Route-wise denial, which a policy does by itself, leaves a denied region's gradients
out and what flows on towards the input as it is. Here that is cut as well: what lies nearer the input learns nothing
through a denied region.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cosmati.core.containers import rebuilt
from cosmati.core.method import Method, Position, Stage
from cosmati.core.passing import Passing
from cosmati.errors import BatchError, PlanError
from cosmati.records.joint_classes import members_of
from cosmati.routing.autograd_graph import parameters_reached
from cosmati.routing.split_forward import is_by_token


@dataclass(frozen=True, kw_only=True)
class GradientMask:
    """A mask on a module's output for some classes.

    Args:
        classes: a class, `branch/**` or `**`.
        module: its name, as `named_modules` has it.
        units: the first unit that is masked, and the one after the last, of the first tensor that the module gives;
            None masks all that it gives.
        dim: dimension of the units: the last, or 1 for the channels of images.
        weight: what the gradient is multiplied by, in [0, 1]; 0 stops it.
    """

    classes: str
    module: str
    units: tuple[int, int] | None = None
    dim: int = -1
    weight: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not 0 <= self.weight <= 1:
            msg = f"{self}: a method may lower what a class teaches, and never lift it. Give a weight from 0 to 1."
            raise PlanError(msg)
        if self.units is not None and not 0 <= self.units[0] < self.units[1]:
            msg = f"{self}: units are (first, one after the last), with 0 <= first < last."
            raise PlanError(msg)

    def covers(self, class_name: str) -> bool:
        """Say whether it's meant for a class; rows of several classes are rows of each."""
        branch = self.classes.removesuffix("/**")
        is_below = any(branch != self.classes and one.startswith(f"{branch}/") for one in members_of(class_name))
        return is_below or self.classes in ("**", class_name, *members_of(class_name))


@dataclass(frozen=True, kw_only=True)
class GradientRouting(Method):
    """Stop gradients at activations, by the policy's denials or by masks of your own.

    Without `cuts` the policy's denials count: what a class may not teach is detached where it gives its output, for
    the class's rows, in packs for its tokens. These are the outermost modules whose parameters all lie in regions that
    the class is denied. An output that holds the residual stream cuts that, too: make regions of branches
    (`blocks.*.mlp.*`) to leave it. With `cuts` those masks count, beside the policy's routes. The paper's weights below
    0 and above 1 aren't taken: a method never lifts.

    Forward bits don't change. `no_direct_write` rests on the policy's routes and holds as without it. What changes is
    what *admitted* regions learn. A region's mean is over the rows that may teach it, cut or not, as in the paper, and
    the ledger counts them so. Where every teacher of a parameter was cut, it has no gradient and isn't touched.

    Args:
        cuts: masks; empty takes them from the policy.
    """

    stage: ClassVar[Stage] = Stage.ROUTE

    cuts: tuple[GradientMask, ...] = ()

    def __post_init__(self) -> None:
        """Check that the masks are several."""
        if not isinstance(self.cuts, tuple | list) or not all(isinstance(cut, GradientMask) for cut in self.cuts):
            msg = f"cuts={self.cuts!r} aren't masks. Give a tuple: cuts=(GradientMask(classes=..., module=...),)."
            raise PlanError(msg)

    @property
    def contract(self) -> str:
        """That admitted regions learn less."""
        where = "at the masked units" if self.cuts else "at denied regions' outputs"
        return f"activation gradients are cut {where}, so what an admitted region learns there differs"

    @contextmanager
    def passing(self, passing: Passing, at: Position) -> Iterator[None]:  # noqa: ARG002  (the hook's)
        """Put the masks on modules for one microbatch."""
        found = _of_cuts(self.cuts, passing) if self.cuts else _of_policy(passing)
        masks = [mask for mask in found if not mask.is_open]
        if not masks:
            yield
            return
        if passing.is_compiled:
            msg = (
                "GradientRouting masks what modules give, and compiled blocks may not let it. Use compile_blocks=False."
            )
            raise PlanError(msg)
        seen: set[str] = set()
        passing.looks.append(lambda objective: _refuse_ways_past(objective, masks, seen, passing))
        with ExitStack() as hooks:
            for mask in masks:
                handle = mask.module.register_forward_hook(_masking(mask, seen))
                hooks.callback(handle.remove)
            try:
                yield
            except BatchError as error:
                if "has no graph" not in str(error):
                    raise
                raise _nothing_left(passing) from error


@dataclass(frozen=True)
class _Mask:
    """What the gradient of a module's output is multiplied by.

    Attributes:
        path: of the module.
        factor: by row and token, [] or [rows, tokens].
        cut: which units; None is all of them.
    """

    path: str
    module: nn.Module
    factor: Tensor
    cut: GradientMask | None = None

    @property
    def is_open(self) -> bool:
        return bool((self.factor == 1).all())

    @property
    def has_units(self) -> bool:
        return self.cut is not None and self.cut.units is not None

    @property
    def is_shut(self) -> bool:
        """Whether nothing passes it at all."""
        return not self.has_units and not bool(self.factor.any())


def _of_cuts(cuts: tuple[GradientMask, ...], passing: Passing) -> Iterator[_Mask]:
    modules = dict(passing.model.named_modules(remove_duplicate=False))
    for cut in cuts:
        covered = [index for index, name in enumerate(passing.class_names) if cut.covers(name)]
        if cut.module not in modules or not covered:
            what = f"no class {cut.classes!r}" if cut.module in modules else f"no module {cut.module!r}"
            msg = f"{cut} has nothing to mask: there is {what}. Mend it; classes are {', '.join(passing.class_names)}."
            raise PlanError(msg)
        is_covered = torch.isin(passing.class_ids, torch.tensor(covered))
        factor = torch.ones(is_covered.shape, dtype=torch.float64).masked_fill(is_covered, cut.weight)
        yield _Mask(cut.module, modules[cut.module], factor, cut)


def _of_policy(passing: Passing) -> Iterator[_Mask]:
    """Yield a mask for each outermost module that some rows or tokens may not teach, and may teach another."""
    is_denied = torch.stack([weights == 0 for weights in passing.weights.values()], -1)
    teaches = (passing.class_ids >= 0) & ~is_denied.all(-1)  # Not padding, or what isn't predicted.
    modules: dict[str, nn.Module] = {}
    is_cut: dict[str, Tensor] = {}
    for pattern in is_denied[teaches].unique(dim=0):  # Of one class too, grades may be denied unlike regions.
        denied = frozenset(itertools.compress(passing.weights, pattern.tolist()))
        key = "outermost", denied
        if key not in passing.memory:
            passing.memory[key] = list(outermost(passing.model, passing.named(denied)))
        is_its = teaches & (is_denied == pattern).all(-1)
        for path, module in passing.memory[key]:
            modules[path] = module
            is_cut[path] = is_cut.get(path, torch.zeros_like(is_its)) | is_its
    for path, module in modules.items():
        yield _Mask(path, module, 1.0 - is_cut[path].float())


def outermost(model: nn.Module, parameters: dict[str, Tensor]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that have nothing to train but some parameters, with no such module around them.

    Lists of modules aren't called, so that they have no output; what's in them does.

    Raises:
        PlanError: a module holds one of the parameters beside others, so that it has no output of its own to cut.
    """
    own = {id(parameter): name for name, parameter in parameters.items()}

    def within(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        held = {id(p) for p in module.parameters() if p.requires_grad}
        if not held & own.keys():
            return
        if held <= own.keys() and type(module).forward is not nn.Module.forward:
            yield path, module
            return
        for parameter in module.parameters(recurse=False):
            if id(parameter) in own:
                msg = (
                    f"GradientRouting has no output to cut for {own[id(parameter)]}: {path or 'the model'} "
                    f"({type(module).__name__}) holds it beside what this class may teach. Put it into a module of its "
                    "own, or into the region of the rest; or give cuts=."
                )
                raise PlanError(msg)
        for name, child in module.named_children():
            yield from within(f"{path}.{name}".removeprefix("."), child)

    yield from within("", model)


class _Scaled(torch.autograd.Function):
    """Leaves an activation alone; its gradient is multiplied by a mask, and is 0 where that is, even if it was NaN."""

    @staticmethod
    def forward(ctx: Any, activation: Tensor, mask: Tensor) -> Tensor:  # noqa: ANN401
        """Take an activation and a mask that broadcasts to it."""
        ctx.save_for_backward(mask)
        return activation.clone()  # Not a view: what comes behind may work in place.

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        (mask,) = ctx.saved_tensors
        return torch.where(mask == 0, 0.0, gradient * mask), None


def _masking(mask: _Mask, seen: set[str]) -> Callable[[nn.Module, Any, Any], Any]:
    def hook(_: nn.Module, __: Any, output: Any) -> Any:  # noqa: ANN401  (the module's own structure)
        is_done = False

        def masked(part: Any) -> Any:  # noqa: ANN401
            nonlocal is_done
            if not isinstance(part, Tensor):
                return rebuilt(masked, part)
            if not part.is_floating_point() or (is_done and mask.has_units):
                return part
            is_done = True
            seen.add(mask.path)
            if not part.requires_grad:
                return part
            if mask.is_shut:
                return part.detach()
            scaled: Tensor = _Scaled.apply(part, _broadcast(mask, part))  # type: ignore[no-untyped-call]
            return scaled

        return masked(output)

    return hook


def _broadcast(mask: _Mask, output: Tensor) -> Tensor:
    """Return the mask in the shape of an output.

    Raises:
        PlanError: the output has no such units, or of packs no such tokens.
    """
    factor = mask.factor.to(output)
    shape = factor.shape
    if shape and (output.ndim < 3 or not is_by_token(output, shape)):
        msg = (
            f"GradientRouting masks packs by token, and {mask.path} gives {list(output.shape)} for packs "
            f"{list(shape)}. Let it give [rows, tokens, ...], with no other dimension (heads) between as long as that "
            "of tokens; or pack each class by itself."
        )
        raise PlanError(msg)
    factor = factor.view([*shape, *[1] * (output.ndim - len(shape))])
    if mask.cut is None or mask.cut.units is None:
        return factor
    dim, (first, end) = mask.cut.dim, mask.cut.units
    dim = dim + output.ndim if dim < 0 else dim
    if not 0 <= dim < output.ndim or dim < max(1, len(shape)) or end > output.shape[dim]:
        msg = f"{mask.cut}: {mask.path} gives {list(output.shape)}, which has no such units. Mend units or dim."
        raise PlanError(msg)
    is_masked = torch.zeros(output.shape[dim], dtype=torch.bool, device=output.device)
    is_masked[first:end] = True
    return torch.where(is_masked.view(*[-1 if d == dim else 1 for d in range(output.ndim)]), factor, 1.0)


def _refuse_ways_past(objective: Tensor, masks: list[_Mask], seen: set[str], passing: Passing) -> None:
    """Look whether gradients get round the masks: a module that isn't called, a weight that is read by itself.

    Raises:
        PlanError: they do; or nothing that may learn is left.
    """
    reached = parameters_reached(objective)
    missed = [mask for mask in masks if mask.path not in seen]
    ways = [m for m in masks if m.cut is None and m.is_shut] + missed
    found = [m.path for m in ways if any(id(p) in reached for p in m.module.parameters())]
    found += [m.path for m in missed if not any(True for _ in m.module.parameters())]
    if found:
        msg = (
            f"GradientRouting can't cut {', '.join(dict.fromkeys(found))}: the loss gets past what the module gives "
            "(it isn't called, gives no tensor, is compiled, shares its weights, or something keeps what it computes). "
            "Call the module itself, uncompiled; or leave GradientRouting out: the policy's routes hold without it."
        )
        raise PlanError(msg)
    admitted = passing.named(name for name, weights in passing.weights.items() if bool(weights.any()))
    if admitted and not any(id(p) in reached for p in admitted.values()):
        raise _nothing_left(passing)


def _nothing_left(passing: Passing) -> PlanError:
    names = {passing.class_names[i] for i in passing.class_ids.unique().tolist() if i >= 0}
    return PlanError(
        f"With GradientRouting, {', '.join(sorted(names))} can teach nothing at all: every way from the loss to what "
        "the policy admits is cut. Deny it regions nearer the input, or reject the class."
    )
