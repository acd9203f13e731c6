"""The digests that stand in the repository, by platform: `python -m tests.golden.digests` (`make golden`) writes them.

They don't depend on the machine's CPU: the variables below hold PyTorch's own kernels, oneDNN and MKL to code that
every x86-64 has, and the worker takes square roots that don't go by the CPU's maker.
On another architecture the variables may do nothing, and the digests are then those of its CPUs.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from tools.compare_bits import Runs, run_worker

DIGESTS = Path(__file__).with_name("digests.json")
WORKER = Path(__file__).with_name("worker.py")
SOURCE = Path(__file__).parents[2] / "src"
PINNED = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}


def this_platform() -> str:
    """Return what the digests are filed under."""
    return f"{platform.system().lower()} {platform.machine().lower()} torch {torch.__version__}"


def known(name: str) -> Runs:
    """Return the digests of a platform.

    Raises:
        LookupError: it has none.
    """
    every: dict[str, Runs] = json.loads(DIGESTS.read_text())
    # A build of the same PyTorch for CUDA has the same kernels for CPUs: `2.13.0+cu130` and `2.13.0+cpu`.
    same = {other.partition("+")[0]: other for other in every}
    name = name if name in every else same.get(name.partition("+")[0], name)
    if name not in every:
        msg = (
            f"There are no golden digests for {name!r}, only for {', '.join(sorted(every))}. At a commit "
            "whose bits you trust (`make bits` compares them), run `make golden` and commit tests/golden/digests.json."
        )
        raise LookupError(msg)
    return every[name]


def measure(*names: str, source: Path = SOURCE) -> Runs:
    """Train the named runs, or all of them, from some sources, and return their digests."""
    return run_worker(WORKER, source, PINNED | {"PYTHONWARNINGS": "error"}, *names)


def write() -> None:
    """Write this platform's digests."""
    every: dict[str, Any] = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    every[this_platform()] = measure()
    DIGESTS.write_text(json.dumps(dict(sorted(every.items())), indent=1) + "\n")
    sys.stdout.write(f"Wrote the digests of {len(every[this_platform()])} runs on {this_platform()} to {DIGESTS}.\n")


if __name__ == "__main__":
    write()
