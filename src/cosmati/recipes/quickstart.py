"""The quickstart's parts: a small search, two studies and a governed run. `cosmati quickstart` puts them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files

from cosmati.core.plan import describe
from cosmati.data.source import StreamingSource
from cosmati.data.vouching import Vouches
from cosmati.optim import AdamW
from cosmati.recipes.digits import ARM_METHODS, DigitsTask, digits_baseline, digits_with
from cosmati.recipes.language import LANGUAGE, LanguageTask, python_gpt_baseline, python_gpt_composed
from cosmati.recipes.recipe import Recipe
from cosmati.records.study import ChecklistItem, DimensionRecord, SearchRecord, TrialRecord
from cosmati.routing.policy_file import PolicyFile, load_policy
from cosmati.study.runner import Arm, Study
from cosmati.train.trainer import Trainer

BASELINE_RATES = (4e-3, 8e-3, 1.6e-2)
COMPOSED_RATES = (0.015, 0.03, 0.06)
RATE_NAMES = {"baseline": "AdamW's learning rate", "composition": "Muon's learning rate"}
SEARCH_SEED = 100
"""No study uses it."""
OPTIMAL_TOKENS = 20
"""For each parameter, about (Hoffmann et al., 2022, arXiv 2203.15556)."""
AA_OFFSET = 1000
"""Added to the seeds of the A/A arm: the baseline once more, with other seeds."""

_LANGUAGE = LanguageTask()
_DIGITS = DigitsTask()


@dataclass(frozen=True, kw_only=True)
class QuickstartSize:
    """How much the quickstart does.

    Args:
        language_steps: steps at the language models' full budget.
        search_steps: steps of each trial of the learning-rate search.
        governed_steps: steps of each governed run, and of each without a policy that it's compared with.
        digits_steps: steps at the digits' full budget.
        seeds: of both studies.
        language_budgets: shares of the full budget.
        digits_budgets: shares of the full budget.
        language: data and size of the language models.
        digits: data and size of the image model.
    """

    language_steps: int = 240
    search_steps: int = 120
    governed_steps: int = 160
    digits_steps: int = 160
    seeds: tuple[int, ...] = (0, 1, 2)
    language_budgets: tuple[float, ...] = (0.25, 0.5, 1.0)
    digits_budgets: tuple[float, ...] = (0.25, 0.5, 1.0)
    language: LanguageTask = _LANGUAGE
    digits: DigitsTask = _DIGITS

    def scaled(self, factor: float) -> QuickstartSize:
        """Return the size with all steps multiplied."""
        names = ("language_steps", "search_steps", "governed_steps", "digits_steps")
        return replace(self, **{name: max(8, round(getattr(self, name) * factor)) for name in names})


@dataclass(frozen=True)
class Trial:
    """One trial of a learning-rate search, and what it took: optimizer steps, rows, seconds of training."""

    arm: str
    lr: float
    quality: float
    steps: int = 0
    rows: int = 0
    seconds: float = 0.0


def quickstart_policy_text() -> str:
    """Return the policy file that comes with the quickstart."""
    return files("cosmati.recipes").joinpath("quickstart_policy.yaml").read_text(encoding="utf-8")


def quickstart_policy() -> PolicyFile:
    """Return the policy that comes with the quickstart."""
    return load_policy(quickstart_policy_text())


def rate_search(size: QuickstartSize) -> tuple[tuple[str, float, Recipe], ...]:
    """Return arm, rate and recipe of each trial: as many for both arms, on one seed that no study uses."""
    seed, task = SEARCH_SEED, size.language
    trials = [
        ("baseline", lr, python_gpt_baseline(task, num_steps=size.search_steps, seed=seed, lr=lr))
        for lr in BASELINE_RATES
    ]
    trials += [
        ("composition", lr, python_gpt_composed(task, num_steps=size.search_steps, seed=seed, lr=lr))
        for lr in COMPOSED_RATES
    ]
    return tuple(trials)


def best_rate(trials: Sequence[Trial], arm: str) -> float:
    """Return the rate with the lowest bits per byte."""
    return min((trial for trial in trials if trial.arm == arm), key=lambda trial: trial.quality).lr


def search_record(trials: Sequence[Trial], arm: str, size: QuickstartSize) -> SearchRecord:
    """Return how an arm's learning rate was found, for its study's record."""
    name, own = RATE_NAMES[arm], sorted((trial for trial in trials if trial.arm == arm), key=lambda trial: trial.lr)
    rates = DimensionRecord(name, 0.0, 0.0, is_log=True, choices=tuple(str(one.lr) for one in own), widened=0)
    records = [
        TrialRecord(
            point=point,
            settings={name: one.lr},
            is_known=False,
            budget=size.search_steps / size.language_steps,
            seed=SEARCH_SEED,
            quality=one.quality,
            steps=one.steps,
            rows=one.rows,
            seconds=one.seconds,
        )
        for point, one in enumerate(own)
    ]
    best = best_rate(trials, arm)
    return SearchRecord((rates,), tuple(records), next(point for point, one in enumerate(own) if one.lr == best))


def _start(make: Callable[..., Recipe], full: int, budget: float, seed: int) -> Trainer:
    return make(num_steps=max(1, round(full * budget)), seed=seed).trainer()


def _arm(make: Callable[..., Recipe], full: int, description: str, *, seed_offset: int = 0) -> Arm:
    recipe = make(num_steps=full, seed=0)
    return Arm(
        start=partial(_start, make, full),
        description=description,
        recipe_text=recipe.text,
        methods=tuple(describe(method) for method in recipe.methods),
        seed_offset=seed_offset,
    )


def language_study(size: QuickstartSize, trials: Sequence[Trial]) -> Study:
    """Return the study of the language models, each with the learning rate that its search found."""
    task = size.language
    baseline = partial(python_gpt_baseline, task, lr=best_rate(trials, "baseline"))
    composed = partial(python_gpt_composed, task, lr=best_rate(trials, "composition"))
    composition = replace(
        _arm(composed, size.language_steps, "Muon for the hidden matrices, zero-init projections, sequence warm-up"),
        methods=("Muon", "zero-init", "sequence warm-up"),
        search=search_record(trials, "composition", size),
    )
    adamw = replace(
        _arm(baseline, size.language_steps, "AdamW, warm-up, linear decay to zero"),
        search=search_record(trials, "baseline", size),
    )
    return Study(
        name="python-language-model",
        task=LANGUAGE,
        arms={
            "baseline": adamw,
            "aa": _arm(
                baseline,
                size.language_steps,
                "The baseline once more, with other seeds: the noise floor",
                seed_offset=AA_OFFSET,
            ),
            "composition": composition,
        },
        budgets=size.language_budgets,
        seeds=size.seeds,
        quality="bits_per_byte",
        quality_name="bits per byte",
        higher_is_better=False,
        checklist=_language_checklist(baseline(num_steps=size.language_steps), adamw.search, size),
        notes="A small model, trained for seconds: it shows the way, not what holds at scale. "
        "Which methods compose, and AdamW's rate for what Muon leaves (0.012), were chosen in earlier trials. AdamW at "
        "a batch of 4, with tied embeddings and clipping, takes most of the gain (docs/findings.md).",
    )


def _language_checklist(
    baseline: Recipe, search: SearchRecord | None, size: QuickstartSize
) -> tuple[ChecklistItem, ...]:
    """Return what the study's records can't tell, read from the baseline's recipe and its search.

    Args:
        baseline: at the full budget.
        search: of the baseline.
        size: of the study.
    """
    searched = {one.name for one in search.dimensions} if search else set()
    task, adamws = size.language, [one for one in baseline.optimizers if isinstance(one, AdamW)]
    decays = [
        f"{one.weight_decay:g} times the learning rate, on {'all parameters' if one.decay_vectors else 'matrices only'}"
        for one in adamws
        if one.weight_decay > 0
    ]
    parameters = sum(parameter.numel() for parameter in baseline.build_model().parameters())
    tokens = size.language_steps * task.rows_per_step * task.sequence_length
    return (
        ChecklistItem(
            "Batch size, ties and clipping searched",
            met=searched >= {"batch size", "ties", "clipping"},
            note=f"searched: {', '.join(sorted(searched)) or 'nothing'}",
        ),
        ChecklistItem(
            "Decoupled weight decay",
            met=bool(decays) and len(decays) == len(baseline.optimizers),
            note="; ".join(decays) or "the baseline has none",
        ),
        ChecklistItem(
            "Scaling-law size",
            met=tokens >= OPTIMAL_TOKENS * parameters,
            note=f"trained on {tokens / parameters:.2g} bytes for each of {parameters:,} parameters; about "
            f"{OPTIMAL_TOKENS} tokens make the best use of a training time (Hoffmann et al., 2022)",
        ),
    )


def digits_study(size: QuickstartSize) -> Study:
    """Return the study of training methods on the digits, with an A/A arm for the noise."""
    task, full = size.digits, size.digits_steps
    baseline = partial(digits_baseline, task)
    arms = {
        "baseline": _arm(baseline, full, "SGD with Nesterov momentum, warm-up, cosine to zero"),
        "aa": _arm(baseline, full, "The baseline once more, with other seeds: the noise floor", seed_offset=AA_OFFSET),
    }
    for name, methods in ARM_METHODS.items():
        added = " and ".join(describe(method) for method in methods)
        arms[name] = _arm(partial(digits_with, methods, task, name=name), full, f"The baseline with {added}")
    return Study(
        name="digits",
        task=task.in_words,
        arms=arms,
        budgets=size.digits_budgets,
        seeds=size.seeds,
        quality="accuracy",
        higher_is_better=True,
        notes="Accuracy is on 450 held-out images, so one image is 0.0022; writers are on both sides of the split. "
        "The learning rate is 0.1 for all arms, from earlier trials.",
    )


def governed_recipe(
    size: QuickstartSize,
    trials: Sequence[Trial],
    policy: PolicyFile | None,
    *,
    seed: int = 0,
    authority: Vouches | None = None,
) -> Recipe:
    """Return the composition under a policy; with None, the same steps on the same data without one.

    The first seed's runs are evaluated along the way, for their curves, the others at the end alone. Each quarter's
    checkpoint is kept: a deletion begins from the last one before what is forgotten came.

    Args:
        size: of the run.
        trials: of the search of the learning rate.
        policy: of the run.
        seed: of the run.
        authority: that has signed the data; None leaves them declared.
    """
    lr = best_rate(trials, "composition")
    recipe = python_gpt_composed(size.language, num_steps=size.governed_steps, seed=seed, lr=lr, policy=policy)
    every = "0.125dur" if seed == size.seeds[0] else None

    def signed_data() -> StreamingSource:
        return size.language.data(authority)

    return replace(
        recipe,
        name="python-gpt-governed" if policy else "python-gpt-ungoverned",
        data=signed_data if authority else recipe.data,
        evaluation=size.language.evaluation_by_class,
        config=replace(recipe.config, evaluate_every=every, checkpoint_every="0.25dur", num_checkpoints=5),
    )
