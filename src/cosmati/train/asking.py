"""Asks an authority again about what it vouches for, in a thread of its own: no step waits, and no other authority."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import datetime
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Protocol

from cosmati.data.vouching import AskedAuthority
from cosmati.provenance.voucher import LostVoucher, VouchedData, Voucher

Found = Mapping[int, VouchedData]
"""What was found, by the number of the thing that was asked about."""
_PATIENCE_SECONDS = 300.0
"""For who doesn't answer."""
_AGAIN_SECONDS = (2.0, 15.0)
"""After which it's asked again where nothing trusted came: a connection fails, a repository is being changed."""
_END_SECONDS = 1.0


class Watched(Protocol):
    """Something that an authority vouches for: a source, or a policy."""

    @property
    def voucher(self) -> Voucher:
        """That it does."""
        ...

    @property
    def opened(self) -> str:
        """When that was found first, ISO 8601."""
        ...

    @property
    def archive(self) -> Mapping[str, bytes]:
        """What bears it out."""
        ...

    @property
    def lost(self) -> tuple[LostVoucher, ...]:
        """Why it held no longer when it was opened."""
        ...

    @property
    def asked(self) -> AskedAuthority | None:
        """Who vouches; None in another process than the one that has opened it."""
        ...

    def again(self) -> VouchedData:
        """Return what holds of it now, or what doesn't, as the authority has said it when it was asked last."""
        ...


class Asking:
    """Asks one authority.

    Args:
        things: that it vouches for, by their numbers.
    """

    def __init__(self, things: Mapping[int, Watched]) -> None:
        self._things = things
        everyone = {id(one.asked): one.asked for one in things.values() if one.asked is not None}
        self._asked = list(everyone.values())
        self._authority = self._asked[0].authority
        self._every = min(threading.TIMEOUT_MAX, self._authority.refresh_seconds)
        self._found: SimpleQueue[Found] = SimpleQueue()
        self._since: float | None = None
        self._wake, self._is_closed = threading.Event(), False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to ask."""
        if self._thread is None:
            self._is_closed = False
            self._wake.clear()
            self._thread = threading.Thread(target=self._ask, daemon=True, name="cosmati-authority")
            self._thread.start()

    def wake(self) -> None:
        """Have it asked at once."""
        self._wake.set()

    def close(self) -> None:
        """Ask no more."""
        self._is_closed = True
        self._wake.set()

    def wait(self) -> None:
        """Give what is being asked a moment, once it's closed."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_END_SECONDS)

    def look(self) -> None:
        """Ask now."""
        self._found.put(self._answer())

    def newest(self) -> Found:
        """Return what was found last, nothing where that was told; after a long silence, that nothing holds."""
        found: Found = {}
        try:
            while True:
                found = self._found.get_nowait()
        except Empty:
            pass
        since = self._since
        if not found and since is not None and monotonic() - since > _PATIENCE_SECONDS:
            return self._nothing(f"it hasn't answered for {_PATIENCE_SECONDS:.0f} seconds")
        return found

    def _ask(self) -> None:
        pause = self._every if self._seconds_open() < self._every else 0.0
        while not self._ends(pause):
            found = self._answer()
            for again in _AGAIN_SECONDS:
                if self._is_closed or not _is_unsure(found) or self._ends(again):
                    break
                found = self._answer()
            if not self._is_closed:
                self._found.put(found)
            pause = self._every

    def _ends(self, seconds: float) -> bool:
        """Wait for so long, or until it's to be asked at once; return whether nothing is to be asked any more."""
        self._wake.wait(seconds)
        self._wake.clear()
        return self._is_closed

    def _seconds_open(self) -> float:
        """Return how long ago the authority was asked first."""
        opened = min(datetime.fromisoformat(one.opened) for one in self._things.values())
        return (self._authority.now() - opened).total_seconds()

    def _answer(self) -> Found:
        self._since = monotonic()
        try:
            for asked in self._asked:
                asked.refresh()
            found: Found = {number: one.again() for number, one in self._things.items()}
        except Exception as error:  # noqa: BLE001  (whatever stands between the run and those who vouch: nothing holds)
            found = self._nothing(f"it can't be asked: {error or type(error).__name__}")
        self._since = None
        return found

    def _nothing(self, why: str) -> Found:
        now = self._authority.now().isoformat(timespec="seconds")
        vouchers = {number: one.voucher for number, one in self._things.items()}
        return {
            number: VouchedData(now, (), {}, lost=(LostVoucher(one.target, "expiry", why, one.root),))
            for number, one in vouchers.items()
        }


def _is_unsure(found: Found) -> bool:
    return any(lost.reason == "expiry" for one in found.values() for lost in one.lost)


def askings_of(things: Mapping[int, Watched]) -> list[Asking]:
    """Return who asks each authority about what it vouches for."""
    by_authority: dict[int, dict[int, Watched]] = {}
    for number, one in things.items():
        if one.asked is not None:
            by_authority.setdefault(id(one.asked.authority), {})[number] = one
    return [Asking(own) for own in by_authority.values()]
