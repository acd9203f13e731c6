"""The text task of the headline: a byte GPT on Python source, an AdamW opponent, and a composition.

Every arm trains the same blocks (width 128, four of them, 0.85 million parameters) in bfloat16 autocast on one thread,
for as long at each budget: an arm whose rows cost less, by its parts or its batch size, sees more of them. So what is
searched is what is claimed, the quality for a training time. The composition adds Muon, iterated in bfloat16, for the
blocks' matrices, and embeddings of the last two, three, four and five bytes: four tables of 8,192 rows, 4.2 million
parameters more, of which a byte reads 512. Everything that isn't one of these two is searched for both arms, over the
same ranges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Literal

import torch
from torch import Tensor

from cosmati.core.loss import LanguageModel
from cosmati.corpora.python_library import PythonLibrary, load_python_library
from cosmati.data.in_memory import InMemory
from cosmati.errors import PlanError
from cosmati.methods import GradientClipping
from cosmati.models.gpt import GPTConfig
from cosmati.optim import WSD, AdamW, Cosine, Muon, Optimizer
from cosmati.recipes.language import BuildGPT, bits_per_byte
from cosmati.recipes.recipe import Recipe
from cosmati.records.study import Setting
from cosmati.study.search import Dimension
from cosmati.train.config import RunConfig
from cosmati.train.evaluation import Evaluation, batches

HeldOut = Literal["selection", "reported"]
Settings = Mapping[str, Setting]

SEQUENCE_LENGTH = 128
SECONDS = 30.0
"""Training time of the largest budget, by `STEP_SECONDS`."""
BATCH_SIZES = (1, 2, 4, 8, 16, 32)
STEP_SECONDS: Mapping[str, Mapping[int, float]] = {
    "opponent": {1: 0.01242, 2: 0.01626, 4: 0.02371, 8: 0.03838, 16: 0.07093, 32: 0.13479},
    "muon": {1: 0.02107, 2: 0.02528, 4: 0.03248, 8: 0.04719, 16: 0.07996, 32: 0.14422},
    "ngrams": {1: 0.01682, 2: 0.0212, 4: 0.02866, 8: 0.04526, 16: 0.0803, 32: 0.14955},
    "composition": {1: 0.02625, 2: 0.03066, 4: 0.03779, 8: 0.05388, 16: 0.08831, 32: 0.15341},
    "plain": {12: 0.05527},
}
"""Of a step, by arm and batch size: `python -m benchmarks.headline.step_costs`, AMD EPYC, one of two shared cores.

On other machines a budget is that many steps still, and about another time for all arms.
"""
MAX_BYTES = 16_000_000
NUM_HELD_OUT = 1024
"""Rows measured on, of either half of the held-out packages."""
MODEL = GPTConfig(sequence_length=SEQUENCE_LENGTH, width=128, num_blocks=4, num_heads=4, all_scores=True)
"""All arms'; `all_scores` is only a faster kernel at this length."""
NGRAMS = (2, 3, 4, 5)
TABLES = "ngram_embedding.*"

ARMS: Mapping[str, frozenset[str]] = {
    "opponent": frozenset(),
    "muon": frozenset({"muon"}),
    "ngrams": frozenset({"ngrams"}),
    "composition": frozenset({"muon", "ngrams"}),
}
"""What each arm adds to AdamW on the same blocks."""

SHARED: tuple[Dimension, ...] = (
    Dimension(name="batch_size", choices=(1, 2, 4, 8), wider=((), (16, 32))),
    Dimension(name="lr", low=1e-3, high=1.6e-2),
    Dimension(name="beta1", choices=(0.8, 0.9, 0.95), wider=((0.0, 0.6), (0.98,))),
    Dimension(name="beta2", choices=(0.95, 0.98, 0.99), wider=((0.8, 0.9), (0.995, 0.999))),
    Dimension(name="weight_decay", low=0.01, high=0.4),
    Dimension(name="clipping", choices=("off", "2", "1", "0.5"), wider=((), ("0.25", "0.1"))),
    Dimension(name="warmup", low=0.01, high=0.16, widest=(0.0, 0.5)),
    Dimension(name="decay", low=0.4, high=1.0, is_log=False, widest=(0.0, 1.0)),
    Dimension(name="final", choices=(0.0, 0.05, 0.1), wider=((), (0.2,))),
    Dimension(name="init_scale", low=0.5, high=2.0),
    Dimension(name="projections", choices=("zero", "scaled")),
    Dimension(name="tied", choices=(False, True)),
)
"""What is searched for both arms, over the same ranges; `decay` is the share of what follows the warm-up."""
OWN: tuple[Dimension, ...] = (
    Dimension(name="matrix_lr", low=0.01, high=0.16),
    Dimension(name="ngram_lr", low=2e-3, high=6.4e-2),
)
"""The composition's own: the rates of Muon and of the n-grams' tables."""

_SCHEDULE: Settings = {"warmup": 0.05, "decay": 1.0, "final": 0.0}
_START: Settings = {"init_scale": 1.0, "tied": False}
_ADAM: Settings = {"beta1": 0.9, "beta2": 0.98, "weight_decay": 0.1}
_COMMON: Settings = {**_ADAM, **_SCHEDULE, **_START}
_OPPONENT: Settings = {"batch_size": 2, "lr": 2e-3, "clipping": "1", "projections": "scaled", **_COMMON}
_COMPOSITION: Settings = {"batch_size": 4, "lr": 8e-3, "clipping": "off", "projections": "zero", **_COMMON}
_OWN: Settings = {"matrix_lr": 0.03, "ngram_lr": 2.4e-2}
_LARGE_BATCH: Settings = {
    **_OPPONENT,
    "batch_size": 8,
    "lr": 3.4e-3,
    "beta1": 0.8,
    "weight_decay": 0.0112,
    "clipping": "0.5",
    "warmup": 0.0677,
    "decay": 0.884,
    "final": 0.1,
    "init_scale": 0.7555,
    "projections": "zero",
    "tied": True,
}
KNOWN: Mapping[str, tuple[Settings, ...]] = {
    "opponent": (_OPPONENT, {**_OPPONENT, "batch_size": 4, "lr": 4e-3}, _LARGE_BATCH),
    "composition": (
        {**_COMPOSITION, **_OWN},
        {**_COMPOSITION, **_OWN, "batch_size": 8},
        {**_COMPOSITION, **_OWN, "batch_size": 8, "beta1": 0.8},
    ),
}
"""The best settings known before the search: by hand, and by a search at equal rows in place of equal time."""
BY_HAND: Mapping[str, int] = {"opponent": 15 + 41, "composition": 25 + 41}
"""Trials before the search: about so many by hand, and those of the search at equal rows."""


def recipe(arm: str, settings: Settings, budget: float, seed: int, *, rows: HeldOut) -> Recipe:
    """Return an arm's run.

    Args:
        arm: one of `ARMS`.
        settings: of every dimension of the arm; what is left out is as in `KNOWN`.
        budget: share of the full budget.
        seed: keys every draw.
        rows: which half of the held-out packages is measured on.

    Raises:
        PlanError: an unknown arm or setting, or a budget of less than a step.
    """
    if arm not in ARMS:
        msg = f"The text task has no arm {arm!r}. It has {', '.join(ARMS)}."
        raise PlanError(msg)
    chosen = _all_settings(arm, settings)
    batch_size = int(chosen["batch_size"])
    size = Size(batch_size=batch_size, num_steps=steps_of(arm, batch_size, budget), seed=seed, rows=rows)
    return _recipe(arm, chosen, size)


def _all_settings(arm: str, settings: Settings) -> Settings:
    known = KNOWN["composition" if ARMS[arm] else "opponent"][0]
    if unknown := sorted(settings.keys() - known.keys()):
        msg = f"The text task has no setting {', '.join(unknown)}. It has {', '.join(known)}."
        raise PlanError(msg)
    return {**known, **settings}


def _recipe(arm: str, chosen: Settings, size: Size) -> Recipe:
    adds, clipping = ARMS[arm], str(chosen["clipping"])
    model = replace(
        MODEL,
        zero_init_projections=chosen["projections"] == "zero",
        init_scale=float(chosen["init_scale"]),
        tied=bool(chosen["tied"]),
        ngrams=NGRAMS if "ngrams" in adds else (),
    )
    methods = () if clipping == "off" else (GradientClipping(clipping_type="norm", clipping_threshold=float(clipping)),)
    return _run(f"text-{arm}", model, _optimizers(adds, chosen), methods, size)


def steps_of(arm: str, batch_size: int, budget: float) -> int:
    """Return the steps that an arm does in a share of the full training time.

    Raises:
        PlanError: less than a step, or a batch size whose steps weren't timed.
    """
    timed = STEP_SECONDS[arm]
    if batch_size not in timed or budget * SECONDS < timed[batch_size]:
        msg = (
            f"A budget of {budget:g} and steps of {batch_size} rows: {arm} needs a whole step at least, and its steps "
            f"were timed for {', '.join(map(str, timed))} rows. Use another budget or batch size."
        )
        raise PlanError(msg)
    return round(budget * SECONDS / timed[batch_size])


def short_run(arm: str, batch_size: int, num_steps: int) -> Recipe:
    """Return a run of so many steps at the settings that were known first, to time them."""
    size = Size(batch_size=batch_size, num_steps=num_steps, seed=0, rows="selection")
    made = _plain(size) if arm == "plain" else _recipe(arm, _all_settings(arm, {"batch_size": batch_size}), size)
    return replace(made, evaluation=None)


def plain_recipe(budget: float, seed: int, *, rows: HeldOut = "reported") -> Recipe:
    """Return nanoGPT's run for a computer without an accelerator, with only the data, rows and budget changed.

    README.md of github.com/karpathy/nanoGPT, "I only have a macbook", on config/train_shakespeare_char.py (November
    2025): four layers, four heads, width 128, batches of 12, no dropout; AdamW at 1e-3 with betas 0.9 and 0.99, decay
    0.1 on what has two dimensions, clipping at 1; warm-up for a twentieth of the run, then a cosine to a tenth. Rows
    have 128 bytes, as in all arms, for its 64, and positions are rotary for its learnt ones, which is kinder to it.
    """
    return _plain(Size(batch_size=12, num_steps=steps_of("plain", 12, budget), seed=seed, rows=rows))


def _plain(size: Size) -> Recipe:
    optimizer = AdamW(
        lr=1e-3,
        betas=(0.9, 0.99),
        weight_decay=0.1,
        decay_vectors=False,
        fused=True,
        schedule=Cosine(warmup="0.05dur", final=0.1),
    )
    clipping = GradientClipping(clipping_type="norm", clipping_threshold=1.0)
    return _run("text-plain", replace(MODEL, tied=True), (optimizer,), (clipping,), size)


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much a run trains on, and what it's measured on.

    Args:
        batch_size: rows of a step.
        num_steps: of the run.
        seed: keys every draw.
        rows: which half of the held-out packages is measured on.
    """

    batch_size: int
    num_steps: int
    seed: int
    rows: HeldOut


def training_rows(batch_size: int) -> InMemory:
    """Return the rows to train on."""
    corpus = library()
    train = corpus.train
    return InMemory(
        train.tokens,
        batch_size,
        class_ids=train.class_ids,
        class_names=corpus.class_names,
        row_ids=train.row_ids,
        row_digests=train.row_digests,
    )


def evaluation(rows: HeldOut) -> Evaluation:
    """Return bits per byte on one half of the held-out packages."""
    tokens = held_out(library(), rows)
    chosen = torch.linspace(0, len(tokens) - 1, min(NUM_HELD_OUT, len(tokens))).long()
    return Evaluation(batches(tokens[chosen], 64), {"bits_per_byte": bits_per_byte})


def held_out(corpus: PythonLibrary, rows: HeldOut) -> Tensor:
    """Return the rows [rows, sequence length + 1] of one half of the held-out packages: every second one by size."""
    validation = corpus.validation
    ids, sizes = validation.package_ids.unique(return_counts=True)
    by_size = ids[sizes.argsort(descending=True, stable=True)]
    mine = by_size[("selection", "reported").index(rows) :: 2]
    return validation.tokens[torch.isin(validation.package_ids, mine)]


@lru_cache(maxsize=1)
def library() -> PythonLibrary:
    """Return the corpus; read once a process."""
    return load_python_library(sequence_length=SEQUENCE_LENGTH, max_bytes=MAX_BYTES)


def corpus_digest() -> str:
    """Return the SHA-256 of the corpus' manifest, in hex."""
    return library().manifest_digest


def _optimizers(adds: frozenset[str], settings: Settings) -> tuple[Optimizer, ...]:
    warmup, decay = float(settings["warmup"]), float(settings["decay"])
    schedule = WSD(warmup=f"{warmup}dur", decay=f"{decay * (1 - warmup)}dur", final=float(settings["final"]))
    adam = AdamW(
        lr=float(settings["lr"]),
        betas=(float(settings["beta1"]), float(settings["beta2"])),
        weight_decay=float(settings["weight_decay"]),
        decay_vectors=False,
        fused=True,
        schedule=schedule,
    )
    first: list[Optimizer] = []
    if "muon" in adds:
        first.append(Muon(lr=float(settings["matrix_lr"]), bfloat16=True, schedule=schedule))
    if "ngrams" in adds:
        # A row of a table is seldom read, and decay would take it back in between.
        lr = float(settings["ngram_lr"])
        tables = AdamW(lr=lr, betas=adam.betas, weight_decay=0.0, fused=True, parameters=TABLES, schedule=schedule)
        first.append(tables)
    return (*first, adam)


def _run(
    name: str,
    model: GPTConfig,
    optimizers: tuple[Optimizer, ...],
    methods: tuple[GradientClipping, ...],
    size: Size,
) -> Recipe:
    return Recipe(
        name=name,
        model=BuildGPT(model),
        loss=LanguageModel(),
        data=partial(training_rows, size.batch_size),
        optimizers=optimizers,
        methods=methods,
        evaluation=partial(evaluation, size.rows),
        config=RunConfig(budget=f"{size.num_steps}ba", seed=size.seed, precision="bfloat16", num_threads=1),
    )
