"""Compares what is around the ranks: machines of a fleet aren't all alike.

What may differ without harm isn't compared: hosts, number of cores, drivers, memory. Another release of PyTorch or of
Cosmati on some ranks is refused, since ranks meet by what both do. All else on which bits rest (kind of card or of
processor, instruction set, kernels, threads, build) withdraws what rests on it, by name: the run trains, and its bits
depend on who ran which microbatch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import groupby

from cosmati.core.plan import Plan, Promise
from cosmati.errors import PlanError
from cosmati.train.identity import SURROUNDINGS
from cosmati.train.ranks import Ranks

_RELEASES = ("torch", "cosmati")
_WORDS = {"cpu_capability": "instruction set", "torch": "build of PyTorch"}


def compare_fleet(plan: Plan, environment: Mapping[str, str], ranks: Ranks) -> Plan:
    """Return the plan without the promises that unlike ranks break.

    Args:
        plan: of the run.
        environment: what is around this rank.
        ranks: that are asked what is around them.

    Raises:
        PlanError: on all ranks, some of which have another release of PyTorch or Cosmati.
    """
    return without_unlike(plan, ranks.told_by_all(surroundings_of(environment)))


def surroundings_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what of an environment is compared between ranks."""
    told = {name: environment.get(name, "") for name in SURROUNDINGS}
    # Threads are what bits rest on, and machines of a kind may have more or fewer cores.
    device = told["device"]
    return {
        **told,
        "device": device.rpartition(", ")[0] if device.endswith(" cores") else device,
        "cosmati": sys.modules["cosmati"].__version__,
    }


def without_unlike(plan: Plan, told: Sequence[Mapping[str, str]]) -> Plan:
    """Return the plan without the promises that unlike ranks break.

    Args:
        plan: of the run.
        told: what is around each rank, in their order.

    Raises:
        PlanError: some have another release of PyTorch or Cosmati.
    """
    for name in _RELEASES:
        releases = [one[name].partition("+")[0] for one in told]
        if len({*releases}) > 1:
            msg = (
                f"The ranks have unlike releases of {name}: {_by_rank(releases)}. They have to compute alike, and to "
                "meet alike: install one release on all nodes."
            )
            raise PlanError(msg)
    unlike = {name: [one[name] for one in told] for name in sorted(told[0]) if len({one[name] for one in told}) > 1}
    why = "; ".join(f"{_WORDS.get(name, name)} {_by_rank(values)}" for name, values in unlike.items())
    for promise in (Promise.RESUME, Promise.ELASTIC, Promise.REPLAYABLE, Promise.PARITY) if unlike else ():
        if plan.holds(promise):
            plan = plan.withdraw(promise, f"ranks run on unlike machines: {why}")
    return plan


def _by_rank(values: Sequence[str]) -> str:
    """Return which ranks have which value, in words."""
    ranks = sorted(range(len(values)), key=values.__getitem__)
    shared = {value: list(group) for value, group in groupby(ranks, values.__getitem__)}
    listed = sorted(shared.items(), key=lambda item: item[1])
    return ", ".join(f"{value or 'none'} on {_ranks(group)}" for value, group in listed)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    is_row = ranks[-1] - ranks[0] == len(ranks) - 1
    return f"ranks {ranks[0]} to {ranks[-1]}" if is_row else f"ranks {', '.join(map(str, ranks))}"
