"""Loops with nothing of ours in them reach what the headline's studies say their arms reach.

Opponent and composition of both tasks are run again by `independent_text` and `independent_images`, at the settings
that the search chose and the study's smallest budget, with two seeds that no run of the study has: each quality lies
within the 99 % prediction interval of the study's runs. Settings are read from the study; the text's bytes come from
our corpus, as arrays. They are the machine's Python source: the studies on text are of two states of one environment,
and those whose bytes aren't here are skipped by name.
"""

from __future__ import annotations

import math
import re
import statistics
from functools import lru_cache
from pathlib import Path

import pytest
from scipy import stats

from benchmarks.headline import text
from cosmati.records.study import StudyRecord
from cosmati.study.points import chosen_settings
from tests.headline.independent_images import run_images
from tests.headline.independent_text import Corpus, run_text

pytestmark = pytest.mark.slow

STUDIES = ("text", "text_parts", "images")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "headline"
ARMS = ("opponent", "composition")
SEEDS = (9001, 9002)
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


@lru_cache(maxsize=1)
def bytes_here() -> tuple[Corpus, str]:
    """Return this machine's Python source, and its digest."""
    library = text.library()
    held_out = library.validation
    found = Corpus(library.train.tokens.numpy(), held_out.tokens.numpy(), held_out.package_ids.numpy())
    return found, library.manifest_digest


def bytes_of(study: StudyRecord) -> Corpus:
    """Return what a study learnt from, where this machine has it."""
    (digest,) = re.findall(r"SHA-256 of what is learnt from: ([0-9a-f]{64})\.", study.notes)
    corpus, here = bytes_here()
    if here != digest:
        pytest.skip(f"{study.name} was made on the Python source {digest[:12]}, and this machine has {here[:12]}")
    return corpus


def prediction_interval(qualities: list[float]) -> tuple[float, float]:
    """Return where one further run lies with 99 %, if all are draws of one normal distribution."""
    n = len(qualities)
    mean = sum(qualities) / n
    deviation = math.sqrt(sum((quality - mean) ** 2 for quality in qualities) / (n - 1))
    reach = stats.t.ppf(0.995, n - 1) * deviation * math.sqrt(1 + 1 / n)
    return mean - reach, mean + reach


def test_interval_covers_what_it_says() -> None:
    draws = stats.norm.rvs(size=(4000, 9), random_state=0).tolist()
    inside = [low <= last <= high for *first, last in draws for low, high in [prediction_interval(first)]]
    assert 0.985 < sum(inside) / len(inside) < 0.995


def study_of(name: str) -> StudyRecord:
    """Return a committed study; a missing one is an error."""
    return StudyRecord.from_json((RESULTS / name / "study.json").read_text())


def test_text_gives_both_arms_equal_training_times() -> None:
    study = study_of("text")
    seconds = {}
    for arm in ARMS:
        cost = statistics.fmean(one.seconds / one.steps for one in study.costs if one.arm == arm)
        seconds[arm] = [run.final.step * cost for run in study.runs if run.arm == arm and run.budget == 1.0]
    assert len(set(seconds["opponent"])) == len(set(seconds["composition"])) == 1
    # Profiled on another day than the table of steps.
    assert 0.8 < seconds["composition"][0] / seconds["opponent"][0] < 1.25


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("name", STUDIES)
def test_an_independent_loop_reaches_the_same_quality(name: str, arm: str, seed: int) -> None:
    study = study_of(name)
    search = next(record.search for record in study.arms if record.name == arm)
    assert search is not None
    settings = chosen_settings(search)
    budget = min(run.budget for run in study.runs)
    runs = [run for run in study.runs if (run.arm, run.budget) == (arm, budget)]
    assert seed not in {run.seed for run in study.runs}
    low, high = prediction_interval([run.final.quality for run in runs])

    is_composition = arm == "composition"
    (num_steps,) = {run.final.step for run in runs}
    if name != "images":
        quality = run_text(bytes_of(study), settings, num_steps, seed, is_composition=is_composition)
    elif FASHION_MNIST.is_dir():
        quality, own_steps = run_images(FASHION_MNIST, settings, budget, seed, is_composition=is_composition)
        assert own_steps == num_steps
    else:
        pytest.skip("Debian's package dataset-fashion-mnist isn't installed")
    assert low <= quality <= high, f"{quality:.4f} isn't in {low:.4f} to {high:.4f}, of {len(runs)} runs"
