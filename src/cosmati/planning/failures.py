"""What failures leave of a run: a simulation of nodes that fail, of spares, repairs and fewer ranks; and closed forms.

Nodes fail independently, each after an exponentially distributed time. Whatever fails stops all ranks: what came after
the last checkpoint is done again, after a restart. A spare node takes the failed one's place. Where there's none, the
run goes on with the largest number of ranks that divides V, at that share of its speed, until repaired nodes let it
grow.
"""

from __future__ import annotations

import heapq
import math
import statistics
from dataclasses import dataclass

import numpy as np

from cosmati.planning.figures import refuse_beyond, refuse_parts
from cosmati.planning.memory import divisors

_HOUR = 3600.0
_Z = 1.959964
"""Of a 95 % interval; the mean of a hundred runs is near enough to normal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureModel:
    """How nodes fail, and what that costs.

    Args:
        node_mtbf_hours: mean time between a node's failures. Llama 3 had 419 interruptions in 54 days on 2,048 nodes,
            6,300 hours a node (arXiv 2407.21783, section 3.3.4).
        restart_seconds: from a failure to the first step after it.
        checkpoint_seconds: for which a checkpoint holds the steps up.
        checkpoint_every_seconds: of training between checkpoints; None takes Daly's optimum.
        spares: nodes that stand by.
        repair_hours: until a failed node is back.
        days: of each simulated run.
        num_runs: that are simulated.
        seed: of the draws.
    """

    node_mtbf_hours: float = 6300.0
    restart_seconds: float = 120.0
    checkpoint_seconds: float = 5.0
    checkpoint_every_seconds: float | None = None
    spares: int = 0
    repair_hours: float = 24.0
    days: float = 30.0
    num_runs: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the figures.

        Raises:
            PlanError: one can't be.
        """
        for name in ("node_mtbf_hours", "checkpoint_seconds", "days", "checkpoint_every_seconds"):
            if getattr(self, name) is not None:
                refuse_beyond(name, getattr(self, name))
        for name in ("restart_seconds", "repair_hours", "spares", "seed"):
            refuse_beyond(name, getattr(self, name), 0)
        refuse_beyond("num_runs", self.num_runs, 2)  # One gives no interval.
        for name in ("spares", "num_runs", "seed"):
            refuse_parts(name, getattr(self, name))

    def interval(self, nodes: int) -> float:
        """Return the seconds of training between two checkpoints."""
        if self.checkpoint_every_seconds is not None:
            return self.checkpoint_every_seconds
        return best_interval(self.checkpoint_seconds, self.node_mtbf_hours * _HOUR / nodes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """What is left of a run's time: training that counts, over all time, where all ranks' full speed is 1.

    Attributes:
        mean: over the simulated runs.
        low: of its 95 % interval.
        high: of its 95 % interval.
        num_runs: n.
        of_paid: the mean, of all nodes that are paid, spares too.
        failures_per_day: of the nodes that compute, mean.
        checkpoint_every_seconds: as it was reckoned.
        closed_form: for spares without end (Daly); what the simulation comes to with enough of them.
        nodes: that compute.
        spares: that stand by.
    """

    mean: float
    low: float
    high: float
    num_runs: int
    of_paid: float
    failures_per_day: float
    checkpoint_every_seconds: float
    closed_form: float
    nodes: int
    spares: int


def best_interval(checkpoint: float, mtbf: float) -> float:
    """Return the time between checkpoints that loses least: Daly 2006, equation 37 (doi:10.1016/j.future.2004.11.016).

    It's Young's sqrt(2 C M) where a checkpoint C is short against the time M between failures.

    Args:
        checkpoint: seconds that one takes.
        mtbf: mean seconds between failures of the whole.
    """
    if checkpoint >= 2 * mtbf:
        return mtbf
    x = checkpoint / (2 * mtbf)
    return math.sqrt(2 * checkpoint * mtbf) * (1 + math.sqrt(x) / 3 + x / 9) - checkpoint


def daly_goodput(interval: float, checkpoint: float, restart: float, mtbf: float) -> float:
    """Return the share of time that counts where each failure is followed by a restart of the same size.

    Exact for exponential times, failures during a restart included: T / (M e^(R/M) (e^((T+C)/M) - 1)).

    Args:
        interval: seconds of training between checkpoints, T.
        checkpoint: C.
        restart: R.
        mtbf: mean seconds between failures of the whole, M.
    """
    segment = (interval + checkpoint) / mtbf
    # By negative powers, which don't overflow.
    return interval / mtbf * math.exp(-restart / mtbf - segment) / -math.expm1(-segment)


def simulate(model: FailureModel, ranks: int, ranks_per_node: int, num_microbatches: int) -> Goodput:
    """Return the goodput of simulated runs.

    Args:
        model: of the failures.
        ranks: W of the whole run, which divides V.
        ranks_per_node: of a node; fewer ranks than that are one node.
        num_microbatches: V.
    """
    nodes = -(-ranks // ranks_per_node)
    own = min(ranks, ranks_per_node)
    interval, horizon = model.interval(nodes), model.days * 24 * _HOUR
    # Ranks that so many healthy nodes can have: the largest number that divides V.
    usable = [0] + [
        max((w for w in divisors(num_microbatches) if w <= min(ranks, n * own)), default=0) for n in range(1, nodes + 1)
    ]
    found = [
        _one_run(model, usable, own, interval, horizon, np.random.default_rng((model.seed, run)))
        for run in range(model.num_runs)
    ]
    shares = [useful / horizon for useful, _ in found]
    mean, half = statistics.fmean(shares), _Z * statistics.stdev(shares) / math.sqrt(len(shares))
    mtbf = model.node_mtbf_hours * _HOUR / nodes
    return Goodput(
        mean=mean,
        low=max(0.0, mean - half),
        high=min(1.0, mean + half),
        num_runs=model.num_runs,
        of_paid=mean * nodes / (nodes + model.spares),
        failures_per_day=statistics.fmean(failures for _, failures in found) / model.days,
        checkpoint_every_seconds=interval,
        closed_form=daly_goodput(interval, model.checkpoint_seconds, model.restart_seconds, mtbf),
        nodes=nodes,
        spares=model.spares,
    )


def _one_run(
    model: FailureModel, usable: list[int], own: int, interval: float, horizon: float, draws: np.random.Generator
) -> tuple[float, int]:
    """Simulate one run; return its seconds of training that count, at full speed, and how often it failed.

    A stretch lies between two events: a failure, a growth, the end. It begins with a restart. What a failure ends
    counts up to its last checkpoint; what a growth ends is checkpointed first.

    Args:
        model: of the failures.
        usable: number of ranks by number of healthy nodes.
        own: ranks of a node.
        interval: seconds between checkpoints.
        horizon: seconds of the run.
        draws: of times.
    """
    nodes, full = len(usable) - 1, usable[-1]
    healthy, repairs = nodes + model.spares, list[float]()
    now = useful = 0.0
    failures, is_first = 0, True
    while now < horizon:
        while repairs and repairs[0] <= now:
            heapq.heappop(repairs)
            healthy += 1
        ranks = usable[min(healthy, nodes)]
        if not ranks:
            now = repairs[0]
            continue
        active = -(-ranks // own)
        fails = now + draws.exponential(model.node_mtbf_hours * _HOUR / active)
        grows = _grows_at(usable, healthy, ranks, repairs)
        end = min(fails, grows, horizon)
        trained = max(0.0, end - now - (0.0 if is_first else model.restart_seconds))
        kept = math.floor(trained / (interval + model.checkpoint_seconds)) * interval
        if end != fails:
            rest = math.fmod(trained, interval + model.checkpoint_seconds)
            # At the horizon the run goes on: what is under way counts. Before a growth it's checkpointed.
            kept += min(interval, max(0.0, rest - (model.checkpoint_seconds if end == grows else 0.0)))
        useful += kept * ranks / full
        now, is_first = end, False
        if end == fails:
            failures += 1
            healthy -= 1
            heapq.heappush(repairs, now + model.repair_hours * _HOUR)
    return useful, failures


def _grows_at(usable: list[int], healthy: int, ranks: int, repairs: list[float]) -> float:
    """Return when enough nodes are repaired for more ranks than now."""
    for number, back in enumerate(sorted(repairs), start=1):
        if usable[min(healthy + number, len(usable) - 1)] > ranks:
            return back
    return math.inf
