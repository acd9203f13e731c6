"""Schedules of depth: which blocks learn in which phase, as ranges counted from the input.

    depth:
      container: blocks               # of the model's blocks
      ranges: [0-3, 4-7, 8-]          # all of them, from the input; regions blocks.0-3, blocks.4-7 and blocks.8-
      open:                           # in the phases named, these ranges alone; in others, all
        - {phase: start, blocks: 8-}
        - {phase: middle, blocks: [4-7, 8-]}
        - {class: customer/mail, phase: "*", blocks: 8-}

The ranges are regions, of which rules may speak by name. What a class has of its own in a block belongs to the region
that takes it by its tag (`isolated/CLASS`), and isn't opened or closed by depth. What else the model has is in the
policy's own `regions`, or, where it gives none, in one region `rest`. A range that an entry closes has weight 0 there,
whatever the rules say, and only a range that all entries for a class and phase leave open learns. So an entry only
ever lowers, as an attenuation does; a class for which no region is left in a phase is rejected there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from cosmati.routing.selectors import ISOLATED, BlockRange, Names, RegionSelector, Strict

REST = "rest"
_RANGE = re.compile(r"(0|[1-9][0-9]{0,8})-(0|[1-9][0-9]{0,8})?")


def _spelt_out(text: object) -> object:
    """Refuse a number: pydantic would only say that it's no string."""
    if isinstance(text, int) and not isinstance(text, bool):
        msg = f"{text} is a number: write a range, {text}-{text}"
        raise ValueError(msg)  # noqa: TRY004  (pydantic's way)
    return text


class OpenBlocks(Strict):
    """Which ranges learn from some classes in some phases: those alone."""

    classes: Annotated[Names, Field(alias="class", min_length=1)] = ("**",)
    phase: Annotated[Names, Field(min_length=1)]
    blocks: Annotated[Names, Field(min_length=1)]

    def __str__(self) -> str:
        axes = [("class", self.classes, ("**",)), ("phase", self.phase, ("*",)), ("blocks", self.blocks, ())]
        return ", ".join(f"{axis} {' | '.join(names)}" for axis, names, usual in axes if names != usual) + " alone"


class Depth(Strict):
    """Ranges of blocks, and when they learn."""

    container: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*$")]
    ranges: Annotated[tuple[Annotated[str, BeforeValidator(_spelt_out)], ...], Field(min_length=1, max_length=1000)]
    open: Annotated[tuple[OpenBlocks, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _in_order(self) -> Depth:
        following: int | None = 0
        for text in self.ranges:
            match = _RANGE.fullmatch(text)
            if match is None:
                msg = f"{text!r:.40} is no range of blocks: write 0-3 (3 is in it), or 8- (to the end)"
                raise ValueError(msg)
            if int(match[1]) != following:
                wanted = (
                    "none follows, since the one before goes to the end"
                    if following is None
                    else f"{following} is next"
                )
                msg = f"the ranges are all blocks in order, and {text} doesn't go on from the one before: {wanted}"
                raise ValueError(msg)
            to = blocks_of(text)[1]
            if to is not None and to <= following:
                msg = f"the range {text} is empty: the second number is that of its last block"
                raise ValueError(msg)
            following = to
        unknown = sorted({name for one in self.open for name in one.blocks if name not in self.ranges})
        if unknown:
            msg = f"no range {', '.join(map(repr, unknown))} to open. There are: {', '.join(self.ranges)}."
            raise ValueError(msg)
        return self

    def name_of(self, text: str) -> str:
        """Return the name of a range's region."""
        return f"{self.container}.{text}"

    def regions_beside(self, others: Iterable[RegionSelector]) -> dict[str, RegionSelector]:
        """Return the ranges' regions by name, without what a class has of its own in a region of its own."""
        tags = sorted({tag for one in others for tag in one.tag if tag.startswith(ISOLATED)})
        left = tuple(f"*.isolated.{tag.removeprefix(ISOLATED)}.*" for tag in tags)
        found = {text: blocks_of(text) for text in self.ranges}
        blocks = {text: BlockRange(container=self.container, start=start, to=to) for text, (start, to) in found.items()}
        return {self.name_of(text): RegionSelector(blocks=own, exclude=left) for text, own in blocks.items()}

    @property
    def rest(self) -> dict[str, RegionSelector]:
        """The region of all that isn't in the container."""
        return {REST: RegionSelector(params=("*",), exclude=(f"{self.container}.*",))}


def blocks_of(text: str) -> tuple[int, int | None]:
    """Return the first block of a range, and the one after its last; None for all that follow."""
    first, _, last = text.partition("-")
    return int(first), int(last) + 1 if last else None
