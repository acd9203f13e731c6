"""(c) What importing costs beyond torch: seconds and memory, each in a process of its own."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

from benchmarks.measure import RESULTS

_PROGRAM = """
import resource, sys, time
import torch
before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
exec(sys.argv[1])
print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def run(*, quick: bool) -> str:
    """Run the benchmark, write its results and return the table."""
    lines = ["# import_cost", "", "Beyond torch's own; memory is the growth of the peak.", ""]
    lines += ["| import | seconds, median | MB, median | n |", "|---|---|---|---|"]
    facts = {}
    for statement in ("import cosmati", "from cosmati import Trainer", "import cosmati.cli.main"):
        seen = []
        for _ in range(2 if quick else 7):
            command = [sys.executable, "-c", _PROGRAM, statement]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            seen.append([float(value) for value in output.split()])
        seconds, kilobytes = (statistics.median(values) for values in zip(*seen, strict=True))
        facts[statement] = {"seconds": seconds, "megabytes": kilobytes / 1024, "n": len(seen)}
        lines.append(f"| `{statement}` | {seconds:.3f} | {kilobytes / 1024:.1f} | {len(seen)} |")
    table = "\n".join(lines) + "\n"
    RESULTS.mkdir(parents=True, exist_ok=True)
    name = "import_cost" + ("_quick" if quick else "")
    (RESULTS / f"{name}.md").write_text(table)
    (RESULTS / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")
    return table
