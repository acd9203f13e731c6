"""A process that has imported what is slow to import, and forks for each run: `python -m tools.mutants.forks`.

A request is a line of JSON on standard input, `{"pytest": [arguments]}` or `{"import": [modules]}` with `"variables"`
of the environment and a file for the `"output"`. The answer is two lines: the process's id, and its exit status once
it has ended.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from typing import Any

BROKEN = 97
"""Status of a run that ended before pytest did."""

SLOW = (
    "torch",
    "torch._dynamo",  # the first optimizer imports it: 2.7 s, more than most of the tests take
    "torch.distributed.checkpoint",
    "safetensors.torch",
    "numpy",
    "pydantic.dataclasses",
    "pydantic.main",
    "cryptography.x509",
    "duckdb",
    "yaml",
    "pytest",
    "hypothesis",
    "rich.progress",
)


def run(request: dict[str, Any]) -> int:
    """Do what is asked, in this process; its exit status."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.update(request["variables"])
    if "import" in request:
        for module in request["import"]:
            import_module(module)
        return 0
    import pytest

    return int(pytest.main(request["pytest"]))


def main() -> None:
    """Serve requests until there are no more."""
    for module in SLOW:
        with suppress(ImportError):
            import_module(module)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            status = BROKEN
            try:
                status = run(json.loads(line))
            except BaseException:  # noqa: BLE001 - whatever a mutant raises at import
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
