"""Where a run's checkpoints have been copied to: `copies.jsonl` in its folder, a line before the first byte goes there.

Who has to say what still holds what a run has learnt reads it: nothing else tells of a place that is given up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cosmati.records.attempts import read_lines

COPIES_FILE = "copies.jsonl"
_CREDENTIALS = re.compile(r"(?<=://)[^/@]*@")


@dataclass(frozen=True)
class CopiedTo:
    """A place to which a run copies its checkpoints, or once did.

    Attributes:
        url: a folder's whole path, or a URL; without name and password.
        token: under which the run has written there; the place has it, too.
    """

    url: str
    token: str


def told_url(url: str) -> str:
    """Return a URL without name and password, which go into no record."""
    return _CREDENTIALS.sub("", url)


def read_copied_to(run: Path) -> Iterator[CopiedTo]:
    """Yield all places to which a run has copied checkpoints, in their order; nothing where it never has."""
    for line in read_lines(run / COPIES_FILE):
        url, token = line.get("url"), line.get("token")
        if isinstance(url, str) and isinstance(token, str):
            yield CopiedTo(url, token)
