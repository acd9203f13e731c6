"""Freezing, depth curricula and selection multiply with a policy's routes: whole runs, computed again by hand in NumPy.

A row's effective weight in a region is the policy's, or 0 where a method leaves the row out or has shut the layer: the
product of what methods say and what the policy says, never above the policy's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from cosmati.methods import EMA, DepthCurriculum, LayerFreezing, SelectiveBackprop
from cosmati.optim import AdamW
from cosmati.train.config import RunConfig
from tests.train.strategies.samples import CLASSES, REGIONS, Array, Net, by_hand, microbatches, region_of, trainer

pytestmark = pytest.mark.long

LAYERS = ("stem.", "side.up.", "side.down.", "head.", "extra.up.", "extra.down.")
STEPS, RATE, DECAY, SMOOTHING = 5, 0.05, 0.1, 0.5


@dataclass(frozen=True)
class Spans:
    """When layers learn.

    Attributes:
        freezing: start and level.
        opening: start and end, None without a curriculum.
        first: the end that opens first.
    """

    freezing: tuple[float, float]
    opening: tuple[float, float] | None
    first: Any

    def shut(self, step: int) -> set[str]:
        """Return the layers that don't learn."""
        elapsed, others = step / STEPS, len(LAYERS) - 1
        (start, level), found = self.freezing, set[str]()
        if elapsed > start:
            found |= set(LAYERS[: math.floor(level * (elapsed - start) / (1 - start) * others + 1e-9)])
        if self.opening is not None and elapsed < self.opening[1]:
            low, high = self.opening
            share = (elapsed - low) / (high - low) if elapsed > low else 0.0
            num_open = 1 + math.floor(share * others + 1e-9)
            found |= set(LAYERS[:-num_open] if self.first == "output" else LAYERS[num_open:])
        return found


class ByHand:
    """AdamW with decoupled decay and an average, of which what nobody teaches in a step is left alone whole."""

    def __init__(self, network: Net) -> None:
        self.p = {name: p.detach().numpy().copy() for name, p in network.named_parameters()}
        self.average = {name: value.copy() for name, value in self.p.items()}
        self.moments = {name: (np.zeros_like(v), np.zeros_like(v)) for name, v in self.p.items()}
        self.steps = dict.fromkeys(self.p, 0)
        self.started = False

    def step(self, rows: Sequence[tuple[str, Array, int]], weights: Any, shut: set[str]) -> None:
        """Take a step on rows: class, input, target."""
        total = {name: np.zeros_like(value) for name, value in self.p.items()}
        teachers = dict.fromkeys(total, 0)
        for class_name, row, target in rows:
            found = by_hand(self.p, row, target)
            for name in total:
                is_open = float(not name.startswith(tuple(shut))) if shut else 1.0
                effective = min(is_open * weights[class_name][region_of(name)], weights[class_name][region_of(name)])
                total[name] += effective * found[name]
                teachers[name] += effective > 0
        moved = [name for name in total if teachers[name]]
        for name in moved:
            self._adam(name, total[name] / teachers[name])
        for name in total if not self.started else moved:
            share = 1 - SMOOTHING if self.started else 1.0
            self.average[name] += share * (self.p[name] - self.average[name])
        self.started = True

    def _adam(self, name: str, gradient: Array) -> None:
        self.steps[name] += 1
        first, second = self.moments[name]
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        self.moments[name] = first, second
        count = self.steps[name]
        size = np.sqrt(second / (1 - 0.999**count)) + 1e-8
        self.p[name] = self.p[name] * (1 - RATE * DECAY) - RATE * first / (1 - 0.9**count) / size


weight = st.sampled_from([0.0, 0.25, 0.5, 1.0])
fraction = st.sampled_from([0.0, 0.2, 0.5, 0.6, 1.0])


@st.composite
def policies(draw: st.DrawFn) -> dict[str, dict[str, float]]:
    """Draw weights; a class that may teach nothing would have to be rejected."""
    found = {c: {r: draw(weight) for r in REGIONS} for c in CLASSES}
    for row in found.values():
        if not any(row.values()):
            row[draw(st.sampled_from(sorted(REGIONS)))] = 0.5
    return found


@st.composite
def spans(draw: st.DrawFn) -> Spans:
    opening = draw(st.none() | st.tuples(fraction, fraction).map(sorted).map(tuple))
    return Spans((draw(fraction), draw(fraction)), opening, draw(st.sampled_from(["output", "input"])))


drawn = given(policies(), spans(), st.sampled_from([0.25, 0.5, 1.0]), st.integers(0, 99))


@settings(max_examples=7, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@drawn
def test_the_run_is_the_product_of_methods_and_policy(weights: Any, when: Spans, keep: float, seed: int) -> None:
    _is_the_product(weights, when, keep, seed)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@drawn
def test_many_runs_are_the_product_of_methods_and_policy(weights: Any, when: Spans, keep: float, seed: int) -> None:
    _is_the_product(weights, when, keep, seed)


def _is_the_product(weights: Any, when: Spans, keep: float, seed: int) -> None:
    network = Net()
    expected = ByHand(network)
    methods: list[Any] = [
        LayerFreezing(freeze_start=when.freezing[0], freeze_level=when.freezing[1]),
        SelectiveBackprop(start=0.0, end=1.0, keep=keep, interrupt=3),
        EMA(smoothing=SMOOTHING, half_life=None),
    ]
    if when.opening is not None:
        methods.append(DepthCurriculum(first=when.first, start=when.opening[0], end=when.opening[1]))
    config = RunConfig(budget=f"{STEPS}ba", num_microbatches=8, num_threads=1, seed=seed)
    optimizer = AdamW(lr=RATE, weight_decay=DECAY, betas=(0.9, 0.999))
    run = trainer(network, weights, *methods, optimizers=[optimizer], config=config)
    with run:
        for step in range(STEPS):
            given_rows = microbatches(seed=seed + step)
            outcome = run.step_microbatches(given_rows, [batch.class_id for batch in given_rows])
            rows = []
            for before, after in zip(given_rows, outcome.batches, strict=True):
                is_all = keep == 1 or (step + 1) % 3 == 0
                assert after.num_rows == (4 if is_all else int(4 * keep))
                kept = [int((before.lineage.row_ids == one).nonzero()) for one in after.lineage.row_ids]
                named = CLASSES[int(before.class_id or 0)]
                rows += [(named, before.input[k].numpy(), int(before.target[k])) for k in kept]
            shut = when.shut(step)
            event(f"{len(shut)} layers shut")
            expected.step(rows, weights, shut)
            _compare(run, expected)


def _compare(run: Any, expected: ByHand) -> None:
    averages = next(state for state in run.states.values() if any(name.startswith("average/") for name in state))
    held = run.assembly.optimizers[0].optimizer.state
    for name, p in run.model.named_parameters():
        np.testing.assert_allclose(p.detach().numpy(), expected.p[name], rtol=1e-9, atol=1e-11, err_msg=name)
        average = averages[f"average/{name}"].numpy()
        np.testing.assert_allclose(average, expected.average[name], rtol=1e-9, atol=1e-11, err_msg=f"average of {name}")
        state = held.get(p, {})
        assert int(state.get("step", 0)) == expected.steps[name]
        if state:
            np.testing.assert_allclose(state["exp_avg"].numpy(), expected.moments[name][0], rtol=1e-8, atol=1e-11)
