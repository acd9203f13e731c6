"""A page of the docs, walked through as its reader would: files saved, code run, commands typed, results compared.

Save this as `NAME`:      the next block is written to that file
```python                 run, in one session for the whole page
```sh                     typed into a shell, where `cosmati` is this source
```text                   what the block before it prints; `...` stands for anything
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "src"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SAVE = re.compile(r"[Ss]ave\s+(?:this|it)\s+as\s+`([^`]+)`[^\n]*:\s*\Z")
_COMMANDS = {"cosmati": "-m cosmati", "python": "", "torchrun": "-m torch.distributed.run"}
_EXPLORE = "cosmati explore "


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the file that the line above it names, and its line in the page."""

    language: str
    text: str
    file: str
    line: int


def blocks_of(page: str) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    found = []
    for match in _BLOCK.finditer(page):
        save = _SAVE.search(page[: match.start()])
        line = page.count("\n", 0, match.start()) + 1
        found.append(Block(match[1], match[2], save[1] if save else "", line))
    return found


def walk(page: Path, folder: Path) -> dict[str, Any]:
    """Do what a page says in an empty folder, which is the current one; return the names that its code leaves.

    Files that it saves can be imported, as in a session that was begun there.
    """
    environment = shell_environment(folder)
    scope: dict[str, Any] = {"__name__": "page"}
    sys.path.insert(0, str(folder))
    try:
        _walk(blocks_of(page.read_text()), page.name, scope, environment)
    finally:
        sys.path.remove(str(folder))
        for name, module in list(sys.modules.items()):
            own = vars(module)  # not `getattr`, which modules of PyTorch answer for any name
            if any(str(place).startswith(str(folder)) for place in (own.get("__file__"), *own.get("__path__", ()))):
                del sys.modules[name]
    return scope


def _walk(blocks: list[Block], name: str, scope: dict[str, Any], environment: Mapping[str, str]) -> None:
    printed = ""
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        where = f"{name}, line {block.line}"
        if block.file:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text)
        elif block.language == "python":
            printed = run_code(block.text, scope, where)
        elif block.language == "sh":
            fails = following is not None and following.language == "text" and following.text.startswith("Error: ")
            printed = run_commands(block.text, environment, where, fails=fails)
        elif block.language == "text":
            compare(block.text, printed, where)


def shell_environment(folder: Path) -> Mapping[str, str]:
    """Return an environment in which the commands of the pages are this interpreter's, and this source's."""
    commands = folder / ".commands"
    commands.mkdir(exist_ok=True)
    for name, module in _COMMANDS.items():
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (commands / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(SOURCE),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def run_code(code: str, scope: dict[str, Any], where: str) -> str:
    """Run code in a session, and return what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, where, "exec"), scope)
    return printed.getvalue()


def run_commands(commands: str, environment: Mapping[str, str], where: str, *, fails: bool) -> str:
    """Run commands in a shell, and return what they print; of those that fail as they should, the error."""
    if commands.startswith(_EXPLORE):
        return look_around(commands, environment)
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", commands],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode != 0) == fails, f"{where}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stderr if fails else done.stdout


def look_around(command: str, environment: Mapping[str, str]) -> str:
    """Start the Explorer, open its first page, and stop it as Ctrl-C does."""
    server = subprocess.Popen(
        ["bash", "-c", f"exec {command}"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert server.stdout is not None
    printed = ""
    try:
        while "http://" not in printed:
            line = server.stdout.readline()
            assert line, f"{command} ended: {printed}"
            printed += line
        with urllib.request.urlopen(re.findall(r"http://\S+", printed)[0].rstrip(".,)"), timeout=60) as page:
            assert page.status == 200
    finally:
        server.send_signal(signal.SIGINT)
        printed += server.communicate(timeout=60)[0]
    return printed


def compare(expected: str, printed: str, where: str) -> None:
    """Compare what was printed with what a page says."""
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    checker = doctest.OutputChecker()
    if not checker.check_output(expected, printed, options):
        told = checker.output_difference(doctest.Example("", expected), printed, options)
        raise AssertionError(f"{where}: {told}")
