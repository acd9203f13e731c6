"""Go's `sumdb/tlog` and `sumdb/note` as a second opinion on trees and proofs: none of it is ours.

Debian has both (`apt-get install golang-go golang-golang-x-mod-dev`). Without them `opinion` is None.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SOURCES = Path("/usr/share/gocode")
SOURCE = Path(__file__).parent / "sumdb" / "main.go"


def has_sumdb() -> bool:
    """Return whether Go and the package are there."""
    return shutil.which("go") is not None and (SOURCES / "src/golang.org/x/mod/sumdb/tlog").is_dir()


class Sumdb:
    """A running verifier."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def _ask(self, **question: Any) -> dict[str, str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        told: dict[str, str] = json.loads(self._process.stdout.readline())
        return told

    def log(self, directory: Path, vkey: str, pinned: str = "") -> tuple[str, str]:
        """Return what is wrong with a log, empty for nothing; and the digest of the entries that the pin covers."""
        told = self._ask(what="log", directory=str(directory), vkey=vkey, pinned=pinned)
        return told["error"], told["digest"]

    def proof(self, vkey: str, checkpoint: str, index: int, entry: bytes, path: Sequence[bytes]) -> str:
        """Return what is wrong with a proof of inclusion."""
        told = self._ask(
            what="proof", vkey=vkey, checkpoint=checkpoint, index=index, entry=_text(entry), path=list(map(_text, path))
        )
        return told["error"]

    def consistency(self, vkey: str, was: str, now: str, path: Sequence[bytes]) -> str:
        """Return what is wrong with a proof that one signed tree begins with another."""
        told = self._ask(what="consistency", vkey=vkey, pinned=was, checkpoint=now, path=list(map(_text, path)))
        return told["error"]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


@contextmanager
def sumdb(folder: Path) -> Iterator[Sumdb | None]:
    """Build the verifier in a folder and run it; None where Go or the package is missing."""
    if not has_sumdb():
        yield None
        return
    program = folder / "sumdb"
    around = os.environ | {"GO111MODULE": "off", "GOPATH": str(SOURCES), "GOCACHE": str(folder / "cache")}
    subprocess.run(["go", "build", "-o", program, SOURCE], check=True, env=around, timeout=250)
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Sumdb(process)
        finally:
            process.kill()
