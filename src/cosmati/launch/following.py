"""Reads a log as it grows."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from pathlib import Path

_LONGEST_READ = 1 << 20


class LogWords:
    """What a log says, in whole characters; of one that was cut or made anew, from its beginning.

    Attributes:
        num_bytes: that were read so far.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._place = self._file = self.num_bytes = 0

    def more(self, log: Path) -> Iterator[str]:
        """Yield what it has said since the last time."""
        while piece := self._piece(log):
            self.num_bytes += len(piece)
            if text := self._decoder.decode(piece):
                yield text

    def rest(self) -> str:
        """Return what is left of a torn character."""
        return self._decoder.decode(b"", final=True)

    def _piece(self, log: Path) -> bytes:
        try:
            with log.open("rb") as file:
                state = os.fstat(file.fileno())
                if state.st_ino != self._file or state.st_size < self._place:
                    self._file, self._place = state.st_ino, 0
                file.seek(self._place)
                piece = file.read(_LONGEST_READ)
        except FileNotFoundError:
            return b""
        self._place += len(piece)
        return piece
