"""How long a step takes: products at a share of the peak, optimizers at the memory's speed, bytes at the network's."""

from __future__ import annotations

from dataclasses import dataclass

from cosmati.planning.devices import Device
from cosmati.planning.measuring import MeasuredParts
from cosmati.planning.memory import leaves_of, ranks_of_a_copy
from cosmati.planning.traffic import Traffic
from cosmati.train.config import Sharding

EFFICIENCY = 0.4
"""Share of the peak that training's products reach where nobody says: Llama 3's had 0.38 to 0.43 of bfloat16's
(arXiv 2407.21783, table 4). Small microbatches reach less."""
LAUNCH_SECONDS = 5e-6
"""That the host takes to start a kernel on an accelerator: small microbatches take no less."""
_BACKWARD = 2 / 3
"""Of forward and backward together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        compute: forward and backward of a rank's microbatches.
        optimizers: weights, gradients and state, read and written once.
        sending: all bytes that a rank sends.
        hidden: of these, what backward can hide.
        efficiency: share of the peak that was reckoned with.
        is_launch_bound: starting kernels takes longer than they would.
    """

    compute: float
    optimizers: float
    sending: float
    hidden: float
    efficiency: float
    is_launch_bound: bool

    @property
    def overlapped(self) -> float:
        """Where what can be sent during backward is."""
        return self.compute + self.optimizers + self.sending - self.hidden

    @property
    def one_after_another(self) -> float:
        """Where nothing is sent while anything is computed."""
        return self.compute + self.optimizers + self.sending


def step_time(
    parts: MeasuredParts,
    ranks: int,
    sharding: Sharding,
    traffic: Traffic,
    device: Device,
    efficiency: float | None = None,
    shards: int | None = None,
) -> StepTime:
    """Return how long a step takes.

    Args:
        parts: as measured.
        ranks: W.
        sharding: see `memory_of`.
        traffic: what a rank sends.
        device: of each rank.
        efficiency: share of the peak; None takes the one that this machine has reached, or on another `EFFICIENCY`.
        shards: see `memory_of`.
    """
    leaves, own = leaves_of(parts.num_microbatches, ranks), device.shared(ranks)
    passes, peak = 2 if parts.again else 1, own.flops(parts.precision)
    launched = 0.0 if device.is_here else parts.kernels * LAUNCH_SECONDS
    if device.is_here and efficiency is None:
        whole = device.flops(parts.precision)
        products, efficiency = parts.seconds * whole / peak, parts.flops / (parts.seconds * whole)
    else:
        efficiency = EFFICIENCY if efficiency is None else efficiency
        products = parts.flops / (peak * efficiency)
    one = max(products, launched)
    cut = ranks_of_a_copy(ranks, sharding, shards)
    sharding = "replicated" if ranks == 1 else sharding
    moved = (2 * (parts.learning + parts.state) + parts.gradients) / cut
    sending = traffic.total / own.bandwidth(ranks)
    # Consecutive microbatches are exchanged once, as the last one is differentiated; under full sharding, each.
    hides = one * (passes * leaves if sharding == "full" else _BACKWARD)
    return StepTime(
        compute=one * passes * leaves,
        optimizers=moved / (1e9 * own.memory_gb_per_second),
        sending=sending,
        hidden=min(sending, hides),
        efficiency=efficiency,
        is_launch_bound=launched > products,
    )
