"""Segmentation: parts alone and all their pairs over one baseline, for the interactions; a screening, not a headline.

    python -m benchmarks.headline segmentation      about 25 minutes on two cores

The baseline's settings weren't searched, and the parts have it: what is asked is whether parts help each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.headline.interactions import say_interactions
from benchmarks.measure import RESULTS
from cosmati import methods as m
from cosmati.corpora.placed_items import ItemKind, PlacedItemsPlan, items_at_hand
from cosmati.optim import WSD, AdamW, Muon
from cosmati.recipes.recipe import Recipe
from cosmati.recipes.segmentation import PLAN, segmentation_unet
from cosmati.records.study import StudyRecord
from cosmati.study.composition import pair_arms
from cosmati.study.definition import Arm, Study
from cosmati.study.runner import run_study
from cosmati.train.facts import describe_hardware
from cosmati.train.trainer import Trainer

NAME = "segmentation"
FULL_STEPS = 600
BUDGETS = (0.5, 1.0)
SEEDS = tuple(range(4000, 4005))
AA_OFFSET = 1000
COST_TURNS, COST_BUDGET = 5, 0.1
METHODS: Mapping[str, m.Method] = {
    "blurpool": m.BlurPool(),
    "label smoothing": m.LabelSmoothing(smoothing=0.1),
    "mixup": m.MixUp(alpha=0.2),
    "ema": m.EMA(half_life="0.02dur"),
    "resizing": m.ProgressiveResizing(delay_fraction=0.3, finetune_fraction=0.3, resize_targets=True),
}
"""Mean intersection over union moves by definition with none of them; EMA averages a decaying run here."""
PARTS = (*METHODS, "muon")


def recipe_of_parts(
    parts: tuple[str, ...], items: ItemKind, budget: float, seed: int, plan: PlacedItemsPlan = PLAN
) -> Recipe:
    """Return the baseline with parts, at a share of the full budget."""
    schedule = WSD(warmup="0.1dur", decay="0.9dur")
    muon = (
        Muon(lr=0.02, schedule=schedule),
        AdamW(lr=1e-2, weight_decay=0.01, decay_vectors=False, schedule=schedule),
    )
    made = segmentation_unet(
        items=items,
        num_steps=max(1, round(FULL_STEPS * budget)),
        seed=seed,
        optimizers=muon if "muon" in parts else (),
        methods=tuple(METHODS[part] for part in parts if part in METHODS),
        plan=plan,
    )
    return replace(made, config=replace(made.config, num_threads=1), name=" + ".join(parts) or "baseline")


def start(parts: tuple[str, ...], items: ItemKind, plan: PlacedItemsPlan, budget: float, seed: int) -> Trainer:
    """Make a run; another process can do it too."""
    torch.set_num_threads(1)
    return recipe_of_parts(parts, items, budget, seed, plan).trainer()


def segmentation_study(items: ItemKind, plan: PlacedItemsPlan = PLAN) -> Study:
    """Return the study: the baseline, its double, each part, each pair."""
    named: dict[str, tuple[str, ...]] = {"baseline": (), "aa": ()}
    named |= {" + ".join(parts): parts for parts in [*((part,) for part in PARTS), *pair_arms(PARTS)]}
    arms = {
        name: Arm(
            start=partial(start, parts, items, plan),
            description="the baseline with other seeds" if name == "aa" else name,
            recipe_text=recipe_of_parts(parts, items, 1.0, 0, plan).text,
            methods=parts,
            seed_offset=AA_OFFSET if name == "aa" else 0,
        )
        for name, parts in named.items()
    }
    return Study(
        name=f"headline-{NAME}",
        task=f"Segmentation of {items} on noisy images of {plan.size} pixels a side, a U-Net of 16 to 64 channels",
        arms=arms,
        budgets=BUDGETS,
        seeds=SEEDS,
        quality="mean_iou",
        quality_name="mean intersection over union",
        higher_is_better=True,
        cost_turns=COST_TURNS,
        cost_budget=COST_BUDGET,
        notes="A screening: settings weren't searched, neither the baseline's nor the parts'.",
    )


def run_segmentation(jobs: int, *, study: Study | None = None, folder: Path | None = None) -> StudyRecord:
    """Run the study, print the interactions; what is finished isn't run again."""
    record = run_study(
        study or segmentation_study(items_at_hand()),
        folder or RESULTS / "headline" / NAME,
        hardware=describe_hardware(torch.device("cpu")),
        command=f"python -m benchmarks.headline {NAME}",
        jobs=jobs,
    )
    say_interactions(record, axes=("seconds", "step"))
    return record
