"""What time it is for who trusts signatures: a clock that is set back makes nothing valid again."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import datetime, timedelta

_UNSAID = timedelta(minutes=1)
"""By so much the clocks of two machines may differ without a word."""


class KnownTime:
    """A clock that never says an earlier time than what is known of already.

    Args:
        clock: says what time it is.

    Attributes:
        said: that the clock is behind, and of what; empty where it isn't, or by less than a minute.
    """

    def __init__(self, clock: Callable[[], datetime]) -> None:
        self._clock = clock
        self._known: datetime | None = None
        self.said = ""

    def __call__(self) -> datetime:
        """Return the time."""
        now = self._clock()
        return now if self._known is None else max(now, self._known)

    def not_before(self, known: datetime, whose: str) -> bool:
        """Say no earlier time than this from now on; return whether the clock does.

        Args:
            known: the time.
            whose: who knows it, in words.
        """
        behind = known - (now := self._clock())
        is_new = self._known is None or known > self._known
        if is_new:
            self._known = known
        if is_new and behind > _UNSAID:
            self.said = (
                f"The clock here says {now:%Y-%m-%d %H:%M}, and {whose} knows of {known:%Y-%m-%d %H:%M} UTC already, "
                "which is what signatures and licences are held against. Set the clock right."
            )
            warnings.warn(self.said, stacklevel=2)
        return behind > timedelta()
