"""A process that has imported what is slow to import, and forks for each run: `python -m tools.mutants.forks`.

A request is a line of JSON on standard input, `{"pytest": [arguments]}` or `{"import": [modules]}` with
`"variables"` of the environment. The answer is two lines: the process's id, and its exit status once it has ended.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

SLOW = ("numpy", "torch", "pydantic", "cryptography", "hypothesis", "pytest", "rich.console", "safetensors.torch")


def run(request: dict[str, Any]) -> int:
    """Do what is asked, in this process; its exit status."""
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
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
            status = 1
            try:
                status = run(json.loads(line))
            finally:
                os._exit(status)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
