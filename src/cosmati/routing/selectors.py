"""Which parameters a region takes, as written in a policy; `regions` applies it to a model. No torch here."""

from __future__ import annotations

import unicodedata
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _sorted_names(value: object) -> tuple[str, ...]:
    """Read one name or a list of them; order and repeats mean nothing, so they don't reach the digest."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list | tuple) and all(isinstance(entry, str) for entry in value):
        return tuple(sorted(set(value)))
    msg = f"give a name or a list of names, not {value!r:.60}; quote what reads as a number"
    raise ValueError(msg)


_LARGEST = 2**53 - 1
"""Integer that canonical JSON (RFC 8785) has as a number."""


def odd_letters(name: str) -> str:
    """Return in words which characters of a name only look like plain ones, or can't be seen; empty for none."""
    odd = [f"U+{ord(letter):04X} {unicodedata.name(letter, 'without a name')}" for letter in name if letter > "~"]
    return f" (it has {', '.join(dict.fromkeys(odd))})" if odd else ""


Names = Annotated[tuple[str, ...], BeforeValidator(_sorted_names)]
ISOLATED = "isolated/"
"""Before the name of a class: its own adapters and experts."""


def _known_tag(tag: str) -> str:
    if tag not in ("embedding", "head", "norm") and not tag.removeprefix(ISOLATED) != tag != ISOLATED:
        msg = f"tag {tag!r} is unknown: it's 'embedding', 'head' or 'norm', or '{ISOLATED}CLASS' for a class's own"
        raise ValueError(msg)
    return tag


Tag = Annotated[str, AfterValidator(_known_tag)]
RegionName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]


class Strict(BaseModel):
    """A frozen model that takes no unknown field."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class BlockRange(Strict):
    """Blocks `start` to `to` of a container, counted from the input; `to` isn't among them.

    Args:
        container: module path of an `nn.ModuleList`, `nn.Sequential` or `nn.ModuleDict`.
        start: first block, `from` in a policy file.
        to: the block after the last one, or None for all that follow.
    """

    container: str
    start: Annotated[int, Field(alias="from", strict=True, ge=0, le=_LARGEST)] = 0
    to: Annotated[int, Field(strict=True, ge=1, le=_LARGEST)] | None = None

    @model_validator(mode="after")
    def _not_empty(self) -> BlockRange:
        if self.to is not None and self.to <= self.start:
            msg = f"blocks from {self.start} to {self.to} are none: `to` is the block after the last one"
            raise ValueError(msg)
        return self


class RegionSelector(Strict):
    """What a region takes: all that `params`, `blocks` or `tag` select, less what `exclude` names.

    Args:
        params: globs over parameter names, `*` matches dots too (`layer1.*`).
        blocks: a range of blocks.
        tag: `embedding` (parameters of embedding modules), `norm` (of normalisation modules), `head` (of the
            last `nn.Linear` in the order in which modules are registered), `isolated/CLASS` (of the adapters and
            experts that a class has of its own).
        exclude: globs over parameter names that are left to other regions.
    """

    params: Names = ()
    blocks: BlockRange | None = None
    tag: Annotated[tuple[Tag, ...], BeforeValidator(_sorted_names)] = ()
    exclude: Names = ()

    @model_validator(mode="after")
    def _selects(self) -> RegionSelector:
        if not self.params and self.blocks is None and not self.tag:
            msg = "a region needs params, blocks or tag"
            raise ValueError(msg)
        return self
