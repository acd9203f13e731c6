"""Which of two graces lets a run do more: `stop` less than `reject`, that less than `finish`, and a longer one most.

A grace is what a policy says under `grace`, as JSON has it: by reason `stop`, `reject` or `{"finish": SPAN}`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

REASONS = ("expiry", "revocation", "licence")


def more_grace(was: Mapping[str, Any] | None, now: Mapping[str, Any] | None, num_steps: int) -> list[str]:
    """Return for which reasons a later grace lets a run do more than an earlier one, a line each.

    Args:
        was: the earlier one; None is `stop` for each reason.
        now: the later one.
        num_steps: of the run, of which `0.1dur` is a part.
    """
    pairs = [(reason, (was or {}).get(reason, "stop"), (now or {}).get(reason, "stop")) for reason in REASONS]
    return [
        f"grace for {reason}: {before} -> {after}"
        for reason, before, after in pairs
        if _rank(after, num_steps) > _rank(before, num_steps)
    ]


def _rank(answer: object, num_steps: int) -> tuple[int, int]:
    if isinstance(answer, Mapping):
        span = str(answer["finish"])
        steps = int(span[:-2]) if span.endswith("ba") else math.floor(Fraction(span[:-3]) * num_steps)
        return (2, steps) if steps else (0, 0)
    return (1 if answer == "reject" else 0), 0
