"""Regions: a partition of a model's trainable parameters, over which a route has one weight each.

Regions are ordered as their first parameter comes in the model. A parameter that the model holds under
several names (tied weights) may belong to one region only; with `allow_tied` it forms a region of its own,
`a&b`, that learns as little as the lesser of the two may.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from torch import nn

from cosmati.core.isolated import isolated_modules
from cosmati.errors import PolicyError
from cosmati.routing.selectors import ISOLATED, BlockRange, RegionSelector, odd_letters

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_MAX_NAMED = 12


@dataclass(frozen=True)
class Regions:
    """A partition of the trainable parameters.

    Args:
        names: names of the regions, in the order of their first parameter.
        parameters: names of each region's parameters, in the model's order, each parameter once.
        members: the selectors' names that each region stands for: itself, or several where tied parameters
            merge them.
        aliases: (other name, name) of tied parameters.
        declared: the selectors' names, in alphabetical order; policy rules speak of these.
    """

    names: tuple[str, ...]
    parameters: tuple[tuple[str, ...], ...]
    members: tuple[tuple[str, ...], ...]
    aliases: tuple[tuple[str, str], ...] = ()
    declared: tuple[str, ...] = ("all",)

    @cached_property
    def region_of(self) -> dict[str, int]:
        """Index of the region by parameter name; tied parameters under each of their names."""
        index = {name: i for i, names in enumerate(self.parameters) for name in names}
        return index | {alias: index[name] for alias, name in self.aliases}

    def region_of_buffer(self, name: str) -> int | None:
        """Return the region that a buffer follows, or None where several could claim it.

        It's the region of the trainable parameters that share the longest module path with it: BatchNorm's
        statistics go with its weight.
        """
        path = name.split(".")[:-1]
        while True:
            prefix = "".join(f"{part}." for part in path)
            found = {region for parameter, region in self.region_of.items() if parameter.startswith(prefix)}
            if found or not path:
                return found.pop() if len(found) == 1 else None
            path = path[:-1]


def partition_parameters(
    model: nn.Module,
    selectors: Mapping[str, RegionSelector] | None = None,
    *,
    allow_tied: bool = False,
    may_be_empty: Collection[str] = (),
) -> Regions:
    """Divide the trainable parameters of a model among regions.

    Args:
        model: the model before it's wrapped, sharded or compiled, so that names are the user's.
        selectors: what each region takes; without any, everything is one region `all`.
        allow_tied: whether a parameter tied across regions merges them, or is refused.
        may_be_empty: regions of which nothing need be there.

    Raises:
        PolicyError: a parameter in two regions or in none, a region without trainable parameters, a tie
            across regions, a container that isn't there. All of them are named.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    ties = _ties(model)
    aliases = tuple((alias, name) for name in names for alias in ties.get(name, ())[1:])
    if not selectors:
        if not names:
            msg = "The model has no trainable parameter: nothing learns. Set requires_grad_(True) on some."
            raise PolicyError(msg)
        return Regions(("all",), (tuple(names),), (("all",),), aliases)
    problems: list[str] = []
    chosen = {region: _select(model, region, selectors[region], problems) for region in sorted(selectors)}
    claims = {
        name: tuple(region for region in chosen if name in chosen[region])
        for name in [*names, *(alias for alias, _ in aliases)]
    }
    owners = {
        name: tuple(sorted({region for alias in ties.get(name, (name,)) for region in claims[alias]})) for name in names
    }
    problems += _overlaps(claims) + _orphans([name for name in names if not owners[name]])
    problems += _empty({name: own for name, own in chosen.items() if name not in may_be_empty}, owners)
    if not allow_tied:
        problems += _spread_ties([ties[name] for name in names if name in ties and owners[name]], claims)
    if problems:
        msg = "The regions don't partition the trainable parameters:\n" + "\n".join(f"  - {text}" for text in problems)
        raise PolicyError(msg)
    members = tuple(dict.fromkeys(owners.values()))
    return Regions(
        tuple("&".join(member) for member in members),
        tuple(tuple(name for name in names if owners[name] == member) for member in members),
        members,
        aliases,
        tuple(sorted(selectors)),
    )


def _ties(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return all names of each tied parameter, by its first name."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {names[0]: tuple(names) for names in groups.values() if len(names) > 1}


def _overlaps(claims: Mapping[str, tuple[str, ...]]) -> list[str]:
    shared = dict.fromkeys(regions for regions in claims.values() if len(regions) > 1)
    return [
        f"in regions {' and '.join(regions)}: {_listed([n for n in claims if claims[n] == regions])}. "
        "Exclude them from all but one"
        for regions in shared
    ]


def _orphans(names: Sequence[str]) -> list[str]:
    return [f"in no region: {_listed(names)}. Select them in a region, or set requires_grad_(False)"] if names else []


def _spread_ties(groups: Sequence[Sequence[str]], claims: Mapping[str, tuple[str, ...]]) -> list[str]:
    found = []
    for group in groups:
        if len({claims[alias] for alias in group}) > 1:
            where = ", ".join(f"{alias!r} in {' and '.join(claims[alias]) or 'no region'}" for alias in group)
            found.append(f"one tied parameter is spread: {where}. Put its names in one region, untie it, or allow tied")
    return found


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(repr(name) for name in names[:_MAX_NAMED]) + more


def _empty(chosen: Mapping[str, set[str]], owners: Mapping[str, Sequence[str]]) -> list[str]:
    found = []
    for region, selected in chosen.items():
        if any(region in regions for regions in owners.values()):
            continue
        why = f"its {len(selected)} parameters are frozen" if selected else "it selects no parameter of the model"
        found.append(f"region {region!r} is empty: {why}. Remove it or mend its selector")
    return found


def _select(model: nn.Module, region: str, selector: RegionSelector, problems: list[str]) -> set[str]:
    """Return all names that a selector takes, of frozen and tied parameters too."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    prefixes: list[str] = []
    if selector.blocks is not None:
        prefixes += _block_prefixes(model, region, selector.blocks, problems)
    tagged = {tag: _tagged_modules(model, tag) for tag in selector.tag}
    prefixes += [f"{path}." if path else "" for paths in tagged.values() for path in paths]
    idle = [f"tag {tag}" for tag, paths in tagged.items() if not paths]
    idle += [
        f"{field} {glob!r}{odd_letters(glob)}"
        for field, globs in (("params", selector.params), ("exclude", selector.exclude))
        for glob in globs
        if not any(fnmatchcase(name, glob) for name in names)
    ]
    problems += [f"region {region!r}: {what} matches nothing in the model. Mend it or leave it out" for what in idle]
    return {
        name
        for name in names
        if (any(fnmatchcase(name, glob) for glob in selector.params) or name.startswith(tuple(prefixes)))
        and not any(fnmatchcase(name, glob) for glob in selector.exclude)
    }


def _block_prefixes(model: nn.Module, region: str, blocks: BlockRange, problems: list[str]) -> list[str]:
    modules = dict(model.named_modules(remove_duplicate=False))
    container = modules.get(blocks.container)
    if not isinstance(container, _CONTAINERS):
        is_there = container is not None
        what = f"is a {type(container).__name__}, whose parts have no order" if is_there else "isn't in the model"
        known = [name for name, module in modules.items() if name and isinstance(module, _CONTAINERS)]
        problems.append(
            f"region {region!r}: container {blocks.container!r} {what}. "
            f"Name one of: {', '.join(known) or 'none'}; or use params"
        )
        return []
    keys = [name for name, _ in container.named_modules(remove_duplicate=False) if name and "." not in name]
    end = len(keys) if blocks.to is None else blocks.to
    if end > len(keys) or blocks.start >= len(keys):
        problems.append(
            f"region {region!r}: blocks {blocks.start} to {end}, but {blocks.container!r} has {len(keys)}. "
            "Mend from and to"
        )
        return []
    return [f"{blocks.container}.{key}.".removeprefix(".") for key in keys[blocks.start : end]]


def _tagged_modules(model: nn.Module, tag: str) -> list[str]:
    if tag == "head":
        head = next((module for module in reversed([*model.modules()]) if isinstance(module, nn.Linear)), None)
        return [name for name, module in model.named_modules(remove_duplicate=False) if module is head]
    if tag.startswith(ISOLATED):
        own = isolated_modules(model).items()
        return [name for name, module in own if module.class_name == tag.removeprefix(ISOLATED)]
    kinds = _EMBEDDINGS if tag == "embedding" else _NORMS
    return [name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, kinds)]
