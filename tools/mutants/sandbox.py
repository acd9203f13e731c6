"""A private copy of the tree, in which a file is changed and tests run."""

from __future__ import annotations

import importlib.util
import json
import os
import select
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
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # pytest compiles them anew in each process, where it may write nothing
}

PLUGINS = ("xdist.plugin", "pytest_timeout", "_hypothesis_pytestplugin", "tools.mutants.plugin")


class Sandbox:
    """A copy of the files that git knows or doesn't ignore, in a temporary folder, with a process that runs tests."""

    def __init__(self, root: Path) -> None:
        self._source = root
        self._folder = Path(tempfile.mkdtemp(prefix="mutants-")).resolve()
        self._server: subprocess.Popen[bytes] | None = None
        self._child = 0
        self._output = self._folder / "output"
        self.root = self._folder / "tree"

    def __enter__(self) -> Self:
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=self._source, check=True, capture_output=True)  # noqa: S603 - fixed
        for name in listed.stdout.decode().split("\0"):
            if name and (self._source / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self._source / name, self.root / name)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
        if self._server is not None:
            self._server.__exit__(kind, error, at)  # closes its pipes and waits
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
        """Run pytest in the copy; its exit status, or none where it took longer than `seconds`."""
        options = ["-q", "-p", "no:cacheprovider", *(word for name in PLUGINS for word in ("-p", name))]
        return self._ask({"pytest": [*options, *arguments], "variables": dict(variables)}, seconds)

    def imports(self, *modules: str) -> bool:
        """Whether these modules can be imported."""
        return self._ask({"import": modules, "variables": {}}, 120) == 0

    @property
    def last_words(self) -> str:
        """The end of what the last run printed."""
        return "\n".join(self._output.read_text(errors="replace").splitlines()[-40:])

    def stop(self) -> None:
        """End everything that runs here."""
        if self._server is not None:
            self._server.kill()
        self._end_child()

    def _ask(self, request: dict[str, object], seconds: float | None) -> int | None:
        scratch = self._folder / "tmp"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        self._server = self._server or self._start(scratch)
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        try:
            self._server.stdin.write(json.dumps(request | {"output": str(self._output)}).encode() + b"\n")
            self._child = int(self._server.stdout.readline())
            in_time, _, _ = select.select([self._server.stdout], [], [], seconds)
            self._end_child()
            status = int(self._server.stdout.readline())
        except (BrokenPipeError, ValueError) as error:
            msg = "The process that runs the tests has ended, so nothing more can be said about mutants."
            raise RuntimeError(msg) from error
        return status if in_time else None

    def _start(self, scratch: Path) -> subprocess.Popen[bytes]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "MAKE"))}
        paths = os.pathsep.join([str(self.root / "src"), str(self.root), str(HERE)])
        return subprocess.Popen(
            [sys.executable, "-m", "tools.mutants.forks"],
            cwd=self.root,
            env={**inherited, **ENVIRONMENT, "PYTHONPATH": paths, "TMPDIR": str(scratch)},
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,  # what `select` waits for mustn't lie in a buffer
        )

    def _end_child(self) -> None:
        """End the run, with the processes that it started."""
        if self._child:
            with suppress(ProcessLookupError):
                os.killpg(self._child, signal.SIGKILL)
        self._child = 0
