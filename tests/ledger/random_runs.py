"""Random small runs of any shape, and what they taught by plain loops: the oracle of every question."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cosmati.ledger.history import RunHistory
from cosmati.ledger.writer import details_digest
from cosmati.records.ledger import (
    AmendEntry,
    CheckpointEntry,
    EndEntry,
    EvaluationEntry,
    MicrobatchCell,
    RunEntry,
    StepEntry,
    TimeEntry,
)

from .ledgers import digest
from .test_verify import Item

WEIGHTS = [0.0, 0.25, 1.0, 2.0]


@dataclass
class PlainTables:
    """Tables as a test has them."""

    classes: list[str]
    regions: list[str]
    routes: list[list[float]]
    phases: list[list[Any]]
    bands: list[str]
    policy: list[list[list[Any]]]
    digest: bytes

    @property
    def details(self) -> dict[str, object]:
        told: dict[str, object] = {n: getattr(self, n) for n in ("classes", "regions", "routes", "phases", "policy")}
        return told | ({"bands": self.bands} if self.bands else {})


@dataclass
class PlainStep:
    """A step as a test has it: cells of class, band, phase, route, rows and weight, and what each region learnt."""

    entry: int
    step: int
    epoch: int
    cells: list[tuple[int, int, int, int, int, float]]
    norms: dict[int, list[float | None]]
    sub_steps: list[tuple[list[int], list[float]]] | None

    def learnt(self, cell: int, region: int) -> float:
        if self.sub_steps is None:
            return self.cells[cell][5]
        return sum((weights[cell] for regions, weights in self.sub_steps if region in regions), 0.0)


@dataclass
class PlainRun:
    """Entries, and what stood at each moment."""

    items: list[Item] = field(default_factory=list)
    tables: list[PlainTables] = field(default_factory=list)
    standing: list[PlainStep] = field(default_factory=list)
    seen: list[PlainStep] = field(default_factory=list)
    checkpoints: list[tuple[int, int, list[PlainStep]]] = field(default_factory=list)


def _tables(draw: random.Random, governed: bool, number: int) -> PlainTables:
    classes = draw.sample(["a", "b", "a&b", "c"], draw.randint(1, 4))
    regions = draw.sample(["in", "mid", "out"], draw.randint(1, 3))
    phases = [["first", 0, 3], ["then", 3, 1000]]
    bands = draw.sample(["low", "high"], 2) if governed and draw.random() < 0.4 else []
    if not governed:
        routes = [[draw.choice(WEIGHTS) for _ in regions] for _ in range(3)]
        return PlainTables(classes, regions, routes, phases, [], [], digest(f"policy {number}"))
    policy = []
    for _ in range(len(classes) * max(1, len(bands))):
        weights = [[draw.choice(WEIGHTS) for _ in regions] for _ in phases]
        policy.append([weights, [draw.choice(["admit", "gate", "reject"]) for _ in phases]])
    routes = sorted({tuple(row) for weights, _ in policy for row in weights})
    return PlainTables(classes, regions, [list(r) for r in routes], phases, bands, policy, digest(f"policy {number}"))


def _cell(draw: random.Random, t: PlainTables, step: int) -> tuple[int, int, int, int, int, float]:
    class_id, num = draw.randrange(len(t.classes)), draw.randint(0, 3)
    weight = draw.choice([0.0, 1.0, 2.5])
    if not t.policy:
        return class_id, draw.randint(0, 2), 2 * int(step >= 3), draw.randrange(len(t.routes)), num, weight
    band = draw.randrange(max(1, len(t.bands)))
    phase = int(step >= 3)
    weights, decisions = t.policy[class_id * max(1, len(t.bands)) + band]
    num = 0 if decisions[phase] == "reject" else num
    return class_id, band, phase, t.routes.index(weights[phase]), num, weight


def _step(draw: random.Random, run: PlainRun, history: RunHistory) -> None:
    t, step = run.tables[-1], history.num_steps
    cells = [_cell(draw, t, step) for _ in range(draw.choice([0, 1, 2, 2, 4]))]
    norms = {
        m: [draw.choice([None, 0.0, draw.uniform(0, 9)]) for _ in t.regions]
        for m in range(len(cells))
        if draw.random() < 0.3
    }
    sub_steps = None
    if draw.random() < 0.3:
        sub_steps = [
            (
                draw.sample(range(len(t.regions)), draw.randint(0, len(t.regions))),
                [draw.choice([0.0, 1.0, c[5]]) for c in cells],
            )
            for _ in range(draw.randint(1, 2))
        ]
    details: dict[str, object] = {
        "step": step,
        "gradient_norm": {str(m): row for m, row in norms.items()},
        "update_norm": None,
        "loss": draw.choice([None, 0.5]),
    }
    if draw.random() < 0.3:  # as packs have it: cells are a microbatch's kinds of rows
        details["cell_microbatches"] = sorted(draw.choices(range(2), k=len(cells)))
    if sub_steps is not None:
        details["sub_steps"] = [{"regions": regions, "weights": weights} for regions, weights in sub_steps]
    made = tuple(MicrobatchCell(*cell, digest(f"rows {step}")) for cell in cells)
    root = digest("root") if draw.random() < 0.2 else None
    entry = StepEntry(step, history.attempt, t.digest, details_digest(details), root, made)
    one = PlainStep(len(run.items), step, len(run.tables) - 1, cells, norms, sub_steps)
    run.standing.append(one)
    run.seen.append(one)
    _append(run, history, (entry, details))


def _told_between(draw: random.Random, step: int) -> Item:
    """Return an entry that says a time, or what was measured."""
    if draw.random() < 0.5:
        return TimeEntry(step, draw.randrange(1 << 32)), None
    details: dict[str, object] = {"step": step, "metrics": {"loss": draw.random()}, "weights": "trained"}
    return EvaluationEntry(step, digest("root"), details_digest(details)), details


def _append(run: PlainRun, history: RunHistory, item: Item) -> None:
    history.append(item[0])
    run.items.append(item)


def random_run(
    seed: int, length: int = 24, interjected: Callable[[list[Item]], Item | None] = lambda _: None
) -> PlainRun:
    """Return a run with resumes, amendments, checkpoints and an end, as the draws of a seed have it.

    `interjected` returns an entry to put after those that it's given, or None.
    """
    draw, run, history = random.Random(seed), PlainRun(), RunHistory()
    governed = draw.random() < 0.5
    run.tables.append(_tables(draw, governed, 0))
    first = run.tables[0]
    _append(run, history, (RunEntry("r", _commitments(first), details_digest(first.details)), first.details))
    while len(run.items) < length:
        if (item := interjected(run.items)) is not None:
            _append(run, history, item)
            continue
        what = draw.random()
        if what < 0.1 and history.num_steps:
            back = draw.randint(0, history.num_steps)
            _append(run, history, (history.resume_entry(back), None))
            del run.standing[back:]
            if draw.random() < 0.5:
                run.tables.append(_tables(draw, governed, len(run.tables)))
                details = run.tables[-1].details | {"changes": [["policy", "was", "is"]]}
                amend = AmendEntry(back, _commitments(run.tables[-1]), details_digest(details))
                _append(run, history, (amend, details))
        elif what < 0.13:
            _append(run, history, _told_between(draw, history.num_steps))
        elif what < 0.2:
            done = history.num_steps
            run.checkpoints.append((len(run.items), done, list(run.standing)))
            _append(run, history, (CheckpointEntry(done, digest(f"state {len(run.items)}"), digest("root")), None))
        else:
            _step(draw, run, history)
    if draw.random() < 0.5:
        _append(run, history, (EndEntry(history.num_steps, "completed", digest("end")), None))
    return run


def _commitments(t: PlainTables) -> tuple[tuple[str, bytes], ...]:
    return (("data", digest("data")), ("policy", t.digest))


def hits(run: PlainRun, steps: list[PlainStep]) -> Iterator[tuple[PlainStep, int, str, str, float]]:
    """Yield what reached what: step, cell, class, region, weight."""
    for one in steps:
        t = run.tables[one.epoch]
        for number, (class_id, _, _, route, num, _) in enumerate(one.cells):
            for column, region in enumerate(t.regions):
                rho, weight = t.routes[route][column], one.learnt(number, column)
                if num and rho > 0 and weight > 0:
                    yield one, number, t.classes[class_id], region, rho * weight


def group_of(run: PlainRun, one: PlainStep, cell: int, each: str) -> str:
    """Return the phase or the policy epoch of a cell, in words."""
    phases = [name for name, *_ in run.tables[one.epoch].phases]
    phase = one.cells[cell][2]
    return {"": "", "policy": str(one.epoch), "phase": phases[phase] if phase < len(phases) else str(phase)}[each]


def taught_by_loops(
    run: PlainRun, steps: list[PlainStep], each: str = ""
) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return by group, class and region: steps, microbatches, rows, weight and norms."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for one, cell, name, region, weight in hits(run, steps):
        key = group_of(run, one, cell, each), name, region
        total = found.setdefault(key, {"steps": set(), "microbatches": 0, "rows": 0, "weight": 0.0, "norms": []})
        total["steps"].add(one.step)
        total["microbatches"] += 1
        total["rows"] += one.cells[cell][4]
        total["weight"] += weight
        norm = one.norms.get(cell, [None] * 3)[run.tables[one.epoch].regions.index(region)]
        total["norms"] += [] if norm is None else [norm]
    return found


def spans_by_loops(steps: set[int]) -> list[tuple[int, int]]:
    """Return numbers as spans."""
    groups = itertools.groupby(enumerate(sorted(steps)), key=lambda pair: pair[1] - pair[0])
    return [(numbers[0], numbers[-1]) for numbers in ([n for _, n in group] for _, group in groups)]
