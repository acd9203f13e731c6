"""Made-up studies, runs and governance facts for the tests of the pages."""

from __future__ import annotations

import math
from collections.abc import Callable

from cosmati.explorer.run_view import RunView
from cosmati.records.governance import (
    ContributionSeries,
    ContributionTotal,
    GovernanceFacts,
    LedgerFacts,
    SourceRow,
)
from cosmati.records.run import GuaranteeRecord, PlanLine, RunRecord
from cosmati.records.study import StudyRecord
from tests.study.oracles import study

REGIONS = ("embedding", "near-input", "middle", "near-output", "head")
CLASSES = ("public-domain", "open/permissive", "licensed/news", "customer/pii")
WEIGHTS = {
    "public-domain": (1.0, 1.0, 1.0, 1.0, 1.0),
    "open/permissive": (1.0, 1.0, 1.0, 1.0, 0.5),
    "licensed/news": (0.0, 0.0, 0.25, 1.0, 1.0),
    "customer/pii": (0.0, 0.0, 0.0, 0.0, 0.0),
}


def wobble(arm: int, gain: float, slope: float = 0.1) -> Callable[[float, int], float]:
    return lambda b, s: 0.912 + gain + slope * 0.4 * math.log(b) + 0.0016 * math.sin(37 * (arm + 1) * (s + 1) * (b + 1))


def demo_study(num_seeds: int = 5) -> StudyRecord:
    arms = {
        "baseline": wobble(0, 0.0),
        "label smoothing": wobble(1, 0.006),
        "progressive": wobble(2, 0.001),
        "freezing": wobble(3, -0.013, 0.08),
        "composed": wobble(4, 0.009),
        "aa": wobble(5, 0.0002),
    }
    methods = {
        "label smoothing": ("LabelSmoothing",),
        "progressive": ("ProgressiveResizing",),
        "freezing": ("LayerFreezing",),
        "composed": ("LabelSmoothing", "ProgressiveResizing"),
    }
    pace = {"progressive": 0.72, "freezing": 0.8, "composed": 0.74}
    budgets = (0.25, 0.33, 0.5, 0.67, 0.8, 1.0)
    return study(
        arms,
        seeds=range(num_seeds),
        budgets=budgets,
        pace=pace,
        methods=methods,
        name="Digits, small network",
    )


def demo_record() -> RunRecord:
    plan = (
        PlanLine(
            "shape",
            "ProgressiveResizing",
            "grows the image side from 20 to 28 over the first 80 % of the steps",
        ),
        PlanLine("label", "LabelSmoothing", "smooths targets by 0.1"),
        PlanLine("update", "AdamW", "decoupled weight decay 0.05, cosine schedule"),
    )
    guarantees = (
        GuaranteeRecord("resume", holds=True, because="all state is in the checkpoint"),
        GuaranteeRecord("elastic", holds=False, because="BatchNorm2d in block 3 couples rows of a microbatch"),
        GuaranteeRecord("no_direct_write(customer/pii, *)", holds=True, because="route weight 0 in all phases"),
    )
    return RunRecord(
        run_id="composed-1.0-0",
        recipe_name="composed",
        recipe_text='{"lr": 0.1}',
        digests={"plan": "9f2c" * 16, "model": "11aa" * 16, "data": "77be" * 16, "policy": "03d1" * 16},
        environment={"python": "3.11.9", "torch": "2.13.0", "numpy": "2.3.1", "device": "cpu"},
        plan=plan,
        guarantees=guarantees,
        seed=0,
        num_microbatches=4,
        num_steps=1000,
        hardware="one CPU core",
        cost=0.1,
        seconds_by_part={"data": 37.0, "forward": 222.0},
        outcome="completed",
        started="2025-03-01T10:00:00+00:00",
        ended="2025-03-01T10:12:20+00:00",
        metrics={"accuracy": 0.92},
    )


def demo_run() -> RunView:
    facts = demo_facts()
    return RunView(
        record=demo_record(),
        status="completed",
        num_steps=1000,
        losses=tuple((step, math.exp(-step / 400)) for step in range(10, 1001, 10)),
        metrics={"accuracy": ((500, 0.8), (1000, 0.92))},
        ledger=facts.ledger,
        governance=facts,
        schedule=tuple((CLASSES[step % 2], CLASSES[2]) for step in range(1000)),
    )


def demo_facts() -> GovernanceFacts:
    steps = tuple(range(0, 1000, 10))
    phases = ("opening", "main")
    weight = {
        name: {
            phase: {
                r: w if phase == "main" or name == "public-domain" else 0.0 for r, w in zip(REGIONS, row, strict=True)
            }
            for phase in phases
        }
        for name, row in WEIGHTS.items()
    }
    decision = {
        name: {
            phase: "reject"
            if name == "customer/pii"
            else "defer"
            if phase == "opening" and name != "public-domain"
            else "admit"
            for phase in phases
        }
        for name in CLASSES
    }
    series, totals = [], []
    for r, region in enumerate(REGIONS):
        sums = {}
        for c, name in enumerate(CLASSES):
            w = WEIGHTS[name][r]
            if w:
                norms = tuple(w * (0.4 + math.exp(-s / 300) + 0.08 * math.sin(s / 17 + c * 2 + r)) for s in steps)
                series.append(ContributionSeries(name, region, steps, norms))
                sums[name] = sum(norms)
        totals += [
            ContributionTotal(n, region, 1000, 32000, value, value / sum(sums.values())) for n, value in sums.items()
        ]
    return GovernanceFacts(
        classes=CLASSES,
        regions=REGIONS,
        phases=phases,
        weight=weight,
        decision=decision,
        contribution=tuple(series),
        totals=tuple(totals),
        exclusions=(
            "No logged step gave rows tagged customer/pii weight in any region (a scan of 1,024 entries, level L0).",
        ),
        sources=(
            SourceRow("public-domain", "old-books", 60000, 12, "CC0-1.0", "declared"),
            SourceRow("open/permissive", "python-packages", 48211, 93, "MIT OR Apache-2.0", "normalised"),
            SourceRow("licensed/news", "newswire-2024", 9800, 1, "LicenseRef-news", "declared"),
        ),
        ledger=LedgerFacts(
            origin="example.org/digits",
            size=1024,
            root="5be1f0c3" * 8,
            level="L0",
            checked=True,
            problems=(),
            num_witnesses=0,
            commands=(
                "cosmati ledger verify runs/composed-1.0-0/ledger",
                "cosmati ledger query --class customer/pii",
            ),
        ),
        notes=("The tokenizer is ungoverned.",),
    )
