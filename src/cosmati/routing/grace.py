"""What a run does when an authority vouches for a class no longer: the field `grace` of a policy.

    grace:
      expiry: {finish: 100ba}   # or a part of the run, 0.1dur: train for so long yet, then stop
      revocation: reject        # rows of the class are offered no more
      licence: stop             # the default of all three: stop, with a checkpoint

It only ever takes away. What a class may not teach, no grace lets it teach.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import AfterValidator

from cosmati.provenance.voucher import Reason
from cosmati.routing.selectors import Strict

_SPAN = re.compile(r"[0-9]+ba|(0(\.[0-9]+)?|1(\.0+)?)dur")


def _span(text: str) -> str:
    if not _SPAN.fullmatch(text):
        msg = f"{text!r:.60} isn't a span of the run: write '100ba' (steps) or '0.1dur' (part of the run)"
        raise ValueError(msg)
    return text


class Finish(Strict):
    """Go on for a span of the run, and stop then."""

    finish: Annotated[str, AfterValidator(_span)]


class Grace(Strict):
    """What follows from each reason for which a class isn't vouched for any more."""

    expiry: Literal["stop", "reject"] | Finish = "stop"
    revocation: Literal["stop", "reject"] = "stop"
    licence: Literal["stop", "reject"] = "stop"

    def answer(self, reason: Reason, step_of: Callable[[str], int]) -> tuple[Literal["stop", "reject"], int]:
        """Return what is done, and how many steps later than at once.

        Args:
            reason: why the class isn't vouched for.
            step_of: number of steps of a span.
        """
        found = getattr(self, reason)
        return ("stop", step_of(found.finish)) if isinstance(found, Finish) else (found, 0)
