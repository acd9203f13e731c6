"""A private copy of the tree, in which a file is changed and tests run."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

HERE = Path(__file__).resolve().parents[2]
"""Where pytest finds the plugin, for a tree that has none."""

ENVIRONMENT = {
    "CI": "1",  # laws are tried on the same examples each time
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}


class Sandbox:
    """A copy of the files that git knows or doesn't ignore, in a temporary folder."""

    def __init__(self, root: Path) -> None:
        self._source = root
        self._folder = Path(tempfile.mkdtemp(prefix="mutants-")).resolve()
        self._running: subprocess.Popen[bytes] | None = None
        self._is_stopped = False
        self.root = self._folder / "tree"

    def __enter__(self) -> Self:
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=self._source, check=True, capture_output=True, text=True).stdout  # noqa: S603 - fixed arguments
        for name in listed.split("\0"):
            if name and (self._source / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self._source / name, self.root / name)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextmanager
    def changed(self, path: str, text: bytes) -> Iterator[None]:
        """Replace a file for a while. Its compiled form goes too: it may be as long and as young as the next one."""
        file = self.root / path
        compiled, original = Path(importlib.util.cache_from_source(str(file))), file.read_bytes()
        try:
            compiled.unlink(missing_ok=True)
            file.write_bytes(text)
            yield
        finally:
            file.write_bytes(original)
            compiled.unlink(missing_ok=True)

    def pytest(
        self, arguments: Sequence[str], variables: Mapping[str, str], *, seconds: float | None = None
    ) -> int | None:
        """Run pytest in the copy; its exit status, or none where it took too long."""
        options = ["-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-p", "tools.mutants.plugin"]
        return self.python(["-m", "pytest", *options, *arguments], variables, seconds=seconds)

    def python(
        self,
        arguments: Sequence[str],
        variables: Mapping[str, str] | None = None,
        *,
        seconds: float | None = None,
    ) -> int | None:
        """Run Python in the copy; its exit status, or none where it took longer than `seconds`."""
        scratch = self._folder / "tmp"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        paths = [str(self.root / "src"), str(self.root), str(HERE)]
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "MAKE"))},
            **ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join(paths),
            "TMPDIR": str(scratch),
            **(variables or {}),
        }
        self._running = subprocess.Popen(  # noqa: S603 - our own tests
            [sys.executable, *arguments],
            cwd=self.root,
            env=environment,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            status = self._running.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            self._end()
        if self._is_stopped:
            msg = "What ran in the sandbox was stopped from outside, so its status says nothing."
            raise RuntimeError(msg)
        return status

    def stop(self) -> None:
        """End what runs, and let nothing more run."""
        self._is_stopped = True
        self._end()

    def _end(self) -> None:
        """End the process with all that it started."""
        if self._running is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._running.pid, signal.SIGKILL)
            self._running.wait()
