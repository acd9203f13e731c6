"""Linear layers cut over ranks from outside, by the parallel styles that PyTorch has: `colwise` and `rowwise`.

They mean what `torch.distributed.tensor.parallel` means by them: a colwise layer gives each rank its own part of the
features, which a rowwise one takes and sums over all ranks. What lies between works with a rank's own features. Here
parameters stay whole on each rank, and sums are taken in one tree over the ranks, so the same number of them has the
same bits each time. Another number has others: what lies between isn't cut into parts of a fixed shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmati.core.virtual_shards import Peers, VirtualShards, has_hooks
from cosmati.errors import PlanError

Styles = tuple[tuple[str, str], ...]
"""Patterns of layers' names, and the style of each."""


class StyledShards(VirtualShards):
    """As many parts as there are ranks, one for each.

    Args:
        number: T, how many ranks share a microbatch.
        peers: these ranks; None where one process only looks what could be cut.
    """

    def __init__(self, number: int, peers: Peers | None = None) -> None:
        super().__init__(number, peers, called="tensor_parallel")
        self._last: tuple[Tensor, tuple[bool, int | None], Tensor] | None = None

    def read(self, tensor: Tensor) -> Tensor:
        """Return a tensor for this rank's part; its gradient is the sum over all ranks.

        Layers that read one tensor, as query, key and value do, sum its gradient once.
        """
        when = torch.is_grad_enabled(), None if tensor.is_inference() else tensor._version  # noqa: SLF001
        if self._last is None or self._last[0] is not tensor or self._last[1] != when:
            (own,) = self.copies(tensor)
            self._last = tensor, when, own
        return self._last[2]

    def end(self) -> None:
        """Let go of what was read: a rowwise layer's sum follows."""
        self._last = None


class _CutLinear(nn.Linear):
    """A linear layer of which this rank computes a part; its parameters are whole."""

    shards: StyledShards

    def compute_in_parts(self, shards: VirtualShards | None) -> Mapping[str, int]:
        """Become the plain layer again where there are no shards (see `compute_whole`)."""
        if shards is None:
            del self.shards
            self.__class__ = nn.Linear  # type: ignore[assignment]  # a subclass without anything more
        return {}


class ColwiseLinear(_CutLinear):
    """Maps what all ranks read, [..., in_features], to this rank's own features [..., out_features / T]."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute this rank's features."""
        (weight,) = self.shards.weights(self.weight, 0)
        bias = None if self.bias is None else self.shards.weights(self.bias, 0)[0]
        return F.linear(self.shards.read(input), weight, bias)


class RowwiseLinear(_CutLinear):
    """Maps this rank's own features, [..., in_features / T], to the sum over all ranks, [..., out_features]."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute this rank's addend, and the sum."""
        self.shards.end()
        (weight,) = self.shards.weights(self.weight, 1)
        total = self.shards.total([F.linear(input, weight)])
        # As a whole layer would: under autocast the sum is narrow, and a parameter isn't.
        return total if self.bias is None else total + self.bias.to(total.dtype)


_KINDS: dict[str, type[_CutLinear]] = {"colwise": ColwiseLinear, "rowwise": RowwiseLinear}


def named_styles(given: Mapping[str, object] | Sequence[tuple[str, object]]) -> Styles:
    """Return styles by their names, `colwise` and `rowwise`.

    Args:
        given: patterns of layers' names, and the style of each: its name, or PyTorch's object of it, made without
            arguments. In any order.

    Raises:
        PlanError: a style isn't one of these, or what's given isn't patterns and styles.
    """
    try:
        pairs = given.items() if isinstance(given, Mapping) else [(pattern, style) for pattern, style in given]
        asked = [(pattern.strip(), style) for pattern, style in pairs]
    except (TypeError, ValueError, AttributeError):
        msg = (
            f"RunConfig.parallel_styles = {given!r:.100}. Give names of layers and a style for each: "
            '{"layers.*.up": "colwise", "layers.*.down": "rowwise"}.'
        )
        raise PlanError(msg) from None
    return tuple(sorted((pattern, _name_of(pattern, style)) for pattern, style in asked))


def _name_of(pattern: str, style: object) -> str:
    if isinstance(style, str):
        found = style if style in _KINDS else None
    else:
        # Who has such an object has loaded this already; others needn't.
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        plain = {"colwise": ColwiseParallel(), "rowwise": RowwiseParallel()}
        same = [name for name, one in plain.items() if type(one) is type(style) and vars(one) == vars(style)]
        found = same[0] if same else None
    if found is None:
        msg = (
            f"RunConfig.parallel_styles has {style!r:.100} for {pattern!r}. Layers are cut by 'colwise' and 'rowwise', "
            "or PyTorch's ColwiseParallel() and RowwiseParallel() without arguments; leave other layers out: each rank "
            "computes them whole."
        )
        raise PlanError(msg)
    return found


def cut_by_styles(model: nn.Module, styles: Styles, shards: StyledShards | None) -> Mapping[str, int]:
    """Cut linear layers by their styles; None puts them back.

    Args:
        model: after surgery.
        styles: patterns, each part of which between dots may have `*`, and the style of what they name.
        shards: as many as there are ranks, of which each has one.

    Returns:
        Names of the parameters that are cut, and the dimension along which each is.

    Raises:
        PlanError: a pattern names nothing, or something else than plain linear layers, or what another one names too.
    """
    named, kinds = dict(model.named_modules(remove_duplicate=False)), dict[int, type[_CutLinear]]()
    for pattern, style in styles:
        found = [name for name in named if _is_named(name, pattern)]
        if not found:
            msg = f"RunConfig.parallel_styles names {pattern!r}, and {type(model).__name__} has no module of that name."
            raise PlanError(msg)
        for name in found:
            _refuse_uncuttable(name, named[name])
            if kinds.setdefault(id(named[name]), _KINDS[style]) is not _KINDS[style]:
                msg = f"RunConfig.parallel_styles names {name} twice, with two styles. Leave one of them out."
                raise PlanError(msg)
    cut = dict[int, int]()
    for module in {id(one): one for one in named.values() if id(one) in kinds}.values():
        assert isinstance(module, nn.Linear), "others are refused"
        kind = kinds[id(module)]
        cut |= {id(module.weight): 0, id(module.bias): 0} if kind is ColwiseLinear else {id(module.weight): 1}
        if isinstance(module, _CutLinear):
            module.compute_in_parts(None)
        if shards is not None:
            module.__class__ = kind
            vars(module)["shards"] = shards
    return {name: cut[id(parameter)] for name, parameter in model.named_parameters() if id(parameter) in cut}


def _is_named(name: str, pattern: str) -> bool:
    """Say whether a pattern names a module, as PyTorch's `parallelize_module` reads it: between dots."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _refuse_uncuttable(name: str, module: nn.Module) -> None:
    why = "" if type(module) in (nn.Linear, *_KINDS.values()) else f"a {type(module).__name__}"
    why = why or ("a layer with hooks, which would see a part of it" if has_hooks(module) else "")
    why = why or ("a layer with a `forward` of its own" if "forward" in vars(module) else "")
    if why:
        what = name or "the model itself"
        msg = f"RunConfig.parallel_styles cuts plain nn.Linear layers, and {what} is {why}. Leave it out."
        raise PlanError(msg)
