"""What compiling a policy costs: 200 classes, 50 regions, 10 phases, a hundred rules; reading it, and comparing two."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.measure import in_turns, write
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy import CompiledPolicy, compile_policy
from cosmati.routing.policy_diff import PolicyDiff
from cosmati.routing.policy_file import PolicyFile, load_policy
from cosmati.routing.regions import Regions

BRANCHES, LEAVES, NUM_STEPS = 20, 10, 1000
REGIONS = tuple(f"region-{r}" for r in range(50))
PHASES = tuple(f"phase-{p}" for p in range(10))


def policy_text(weight: float = 1.0) -> str:
    """Return a policy with a rule for each branch, and four for a class of each: by itself, region, phase, and both."""
    rules = ["{class: '**', weight: 0.25}"]
    rules += [f"{{class: 'branch-{b}/**', weight: 0.5}}" for b in range(BRANCHES)]
    for b in range(BRANCHES):
        name, region, phase = f"branch-{b}/class-{b % LEAVES}", f"[{REGIONS[b]}, {REGIONS[b + 1]}]", PHASES[b % 9]
        rules.append(f"{{class: {name}, weight: {weight}}}")
        rules.append(f"{{class: {name}, region: {region}, weight: 0}}")
        rules.append(f"{{class: {name}, phase: {phase}, weight: 0.75}}")
        rules.append(f"{{class: {name}, region: {region}, phase: {phase}, weight: 0}}")
    regions = "".join(f"  {name}: {{params: '{name}.*'}}\n" for name in REGIONS)
    ends = [f"{{name: {name}, until: {100 * (p + 1)}ba}}" for p, name in enumerate(PHASES[:-1])]
    lists = {"phases": [*ends, f"{{name: {PHASES[-1]}}}"], "rules": rules}
    told = "".join(f"{name}:\n" + "".join(f"  - {one}\n" for one in entries) for name, entries in lists.items())
    return f"version: 1\ntaxonomy: large\nregions:\n{regions}{told}"


def compiled(policy: PolicyFile) -> CompiledPolicy:
    """Compile a policy for a model of which each region has one parameter."""
    names = tuple((f"branch-{b}/class-{c}", "") for b in range(BRANCHES) for c in range(LEAVES))
    parameters = tuple((f"{name}.weight",) for name in REGIONS)
    regions = Regions(REGIONS, parameters, tuple((name,) for name in REGIONS), (), tuple(sorted(REGIONS)))
    return compile_policy(policy, taxonomy=Taxonomy("large", "1", names), regions=regions, num_steps=NUM_STEPS)


def _timed(do: Callable[[], object]) -> Callable[[], float]:
    def seconds() -> float:
        start = time.perf_counter()
        do()
        return time.perf_counter() - start

    return seconds


def run(*, quick: bool) -> str:
    """Run the benchmark, write its results and return the table."""
    text = policy_text()
    policy = load_policy(text)
    old, new = compiled(policy), compiled(load_policy(policy_text(0.75)))
    arms = {
        "compile": lambda: compiled(policy),
        "compile again (A/A)": lambda: compiled(policy),
        "read the file": lambda: load_policy(text),
        "compare two versions": lambda: PolicyDiff(old, new).changes,
    }
    rows = in_turns({name: _timed(do) for name, do in arms.items()}, 3 if quick else 20)
    notes = {
        "what": "a step is one call",
        "cells": len(old.classes) * len(old.regions) * len(old.phases),
        "rules": len(policy.rules),
        "changed cells": len(PolicyDiff(old, new).changes),
    }
    return write(f"policy_compile{'_quick' if quick else ''}", rows, notes)
