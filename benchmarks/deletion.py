"""What ways to take a class back cost, and what they leave: `python -m benchmarks.deletion`.

Bytes of this machine's Python sources; one class is to be forgotten, in which canaries are planted. Each way is trained
or repaired for every seed, and attacked: by a threshold on the loss, by a loss calibrated with a model that never had
the rows, and by the canaries' prefixes. Everything is trained on one thread; nothing is tuned on these figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.measure import RESULTS, surroundings
from cosmati.core.loss import LanguageModel
from cosmati.core.method import Method
from cosmati.core.source import Source
from cosmati.core.state import load_model_tensors
from cosmati.corpora.python_library import load_python_library
from cosmati.data.in_memory import InMemory
from cosmati.data.tombstoned import Tombstoned
from cosmati.forget.ablation import ablate
from cosmati.forget.attacks import extracted, membership_auc
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.optim import AdamW
from cosmati.progress import ProgressDisplay
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import PolicyFile, load_policy
from cosmati.routing.selective_masking import SelectiveGradientMasking, ablate_region
from cosmati.study.statistics import student_quantile
from cosmati.train.config import RunConfig
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from cosmati.train.trainer import Trainer

LENGTH, ROWS_PER_STEP, V = 64, 32, 4
CLASSES = ("forget", "retain")
TAXONOMY = Taxonomy("deletion", "1", tuple((name, name) for name in CLASSES))
OWN = "blocks.2.*"
EVERYTHING = "rules:\n  - {class: '**', weight: 1}\n"
APART = (
    "rules:\n  - {class: retain, region: rest, weight: 1}\n  - {class: retain, region: own, weight: 0}\n"
    "  - {class: forget, region: rest, weight: 0}\n  - {class: forget, region: own, weight: 1}\n"
)
PREFIX, DIGITS = 24, 6
COLUMNS = {
    "retain": "retain loss",
    "forget": "forget loss, held out",
    "members": "forget loss, trained on",
    "auc": "AUC, loss",
    "calibrated": "AUC, calibrated",
    "extracted": "canaries extracted",
    "steps": "steps to delete",
    "seconds": "processor seconds to delete",
}


@dataclass(frozen=True)
class Size:
    """How much is trained and measured."""

    steps: int = 300
    repair_steps: int = 30
    num_retain: int = 2048
    num_forget: int = 96
    num_canaries: int = 8
    copies: int = 4
    seeds: int = 3


@dataclass(frozen=True, eq=False)
class Task:
    """A seed's rows, uint8 [rows, tokens + 1].

    Attributes:
        train: the rows that are trained on; the first `num_forget` are to be forgotten, canaries last among them.
        num_forget: of them.
        members: rows to be forgotten, without canaries.
        others: of the same packages, never trained on.
        held_out: rows of retained packages, never trained on.
        canaries: each once.
    """

    train: Tensor
    num_forget: int
    members: Tensor
    others: Tensor
    held_out: Tensor
    canaries: Tensor


def tasks_of(size: Size, seed: int) -> Task:
    """Draw a seed's rows: of packages under the Python licence those to retain, of all others those to forget."""
    library = load_python_library(sequence_length=LENGTH, max_bytes=3_000_000)
    names, tokens, ids = library.class_names, library.train.tokens, library.train.class_ids
    draw = np.random.default_rng([seed, 77])
    retain = draw.permutation(np.flatnonzero(ids == names.index("open/psf")))
    forget = draw.permutation(np.flatnonzero(ids != names.index("open/psf")))
    canaries = torch.tensor(np.stack([_canary(draw) for _ in range(size.num_canaries)]))
    members = tokens[forget[: size.num_forget]]
    to_forget = torch.cat([members, canaries.repeat(size.copies, 1)])
    return Task(
        train=torch.cat([to_forget, tokens[retain[: size.num_retain]]]),
        num_forget=len(to_forget),
        members=members,
        others=tokens[forget[size.num_forget : 2 * size.num_forget]],
        held_out=tokens[retain[size.num_retain : size.num_retain + 512]],
        canaries=canaries,
    )


def _canary(draw: np.random.Generator) -> NDArray[np.uint8]:
    name = "".join(draw.choice(list("abcdefghijklmnopqrstuvwxyz"), 8))
    number = "".join(draw.choice(list("0123456789"), DIGITS))
    text = f"the number of {name}: ".ljust(PREFIX) + number
    return np.frombuffer(text.ljust(LENGTH + 1, "\n").encode(), np.uint8)


def policy(rules: str) -> PolicyFile:
    """Return a policy over the last block, and the rest."""
    regions = f"regions:\n  own: {{params: '{OWN}'}}\n  rest: {{params: '*', exclude: ['{OWN}']}}\n"
    return load_policy(f"version: 1\ntaxonomy: deletion\n{regions}{rules}")


@dataclass(frozen=True, eq=False)
class Making:
    """Makes trainers of one kind (see `cosmati.forget.ablation.Make`).

    Args:
        task: whose rows.
        steps: of a run.
        seed: of weights and order.
        rules: of the policy.
        methods: training methods.
        only_retained: train on the rows to retain alone, in their own order.
    """

    task: Task
    steps: int
    seed: int
    rules: str
    methods: tuple[Method, ...] = ()
    only_retained: bool = False

    def __call__(self, wrap: Callable[[object], Source] | None = None, **config: object) -> Trainer:
        """Return a trainer over these rows, or over what is put around them."""
        rows, num_forget = self.task.train, self.task.num_forget
        # Of few rows to forget each is visited many times, as text that is found in many copies is.
        chosen = torch.arange(num_forget, len(rows)) if self.only_retained else _balanced(num_forget, len(rows))
        data, class_ids = rows[chosen].long(), (chosen >= num_forget).long()
        source = InMemory((data[:, :-1], data[:, 1:]), ROWS_PER_STEP, class_ids, CLASSES)
        torch.manual_seed(self.seed)
        settings = {"budget": f"{self.steps}ba", "seed": self.seed, "num_microbatches": V, "num_threads": 1, **config}
        return Trainer(
            GPT(GPTConfig(sequence_length=LENGTH, width=48, num_blocks=3, num_heads=4)),
            LanguageModel(),
            source if wrap is None else wrap(source),
            optimizers=[AdamW(lr=5e-3)],
            methods=self.methods,
            policy=policy(self.rules),
            taxonomy=TAXONOMY,
            config=dataclasses.replace(RunConfig(), **settings),  # type: ignore[arg-type]
        )


def _balanced(num_forget: int, num_rows: int) -> Tensor:
    """Repeat the rows to forget until they're a quarter of all."""
    times = max(1, round((num_rows - num_forget) / 3 / num_forget))
    return torch.cat([torch.arange(num_forget).repeat(times), torch.arange(num_forget, num_rows)])


@torch.no_grad()
def losses(model: nn.Module, rows: Tensor) -> NDArray[np.float64]:
    """Return each row's mean loss, nats per byte."""
    model.eval()
    found = [
        F.cross_entropy(model(part[:, :-1].long()).transpose(1, 2), part[:, 1:].long(), reduction="none").mean(1)
        for part in rows.split(128)
    ]
    return torch.cat(found).double().numpy()


def measured(model: nn.Module, task: Task, reference: nn.Module) -> dict[str, float]:
    """Return what is measured of a model, but for what it cost."""
    members, others = losses(model, task.members), losses(model, task.others)
    known, unknown = losses(reference, task.members), losses(reference, task.others)
    canaries = task.canaries.long()
    told = extracted(model, canaries[:, :PREFIX], canaries[:, PREFIX : PREFIX + DIGITS])
    return {
        "retain": float(losses(model, task.held_out).mean()),
        "forget": float(others.mean()),
        "members": float(members.mean()),
        "auc": membership_auc(-members, -others),
        "calibrated": membership_auc(known - members, unknown - others),
        "extracted": float(told.mean()),
    }


class OfSeed:
    """One seed's arms, trained one after another.

    Attributes:
        found: what was measured of each.
    """

    def __init__(self, size: Size, seed: int, folder: Path, tell: Callable[[str], None]) -> None:
        self._size, self._seed, self._folder, self._tell = size, seed, folder, tell
        self._task = tasks_of(size, seed)
        self.found: dict[str, dict[str, float]] = {}
        self._reference, _ = self._trained("reference", self._making(EVERYTHING, seed=seed + 1000), without)
        self._note("no deletion", self._trained("no deletion", self._making(EVERYTHING))[0])
        model, seconds = self._trained("retain-only", self._making(EVERYTHING), without)
        self._note("retain-only: replay from the start", model, size.steps, seconds)
        filtered = self._making(EVERYTHING, only_retained=True)
        self._note("filtered from the start", self._trained("filtered", filtered)[0])
        self._take_away("routed")
        self._take_away("SGTM", SelectiveGradientMasking(forget="own"))

    def _making(self, rules: str, *methods: Method, seed: int | None = None, only_retained: bool = False) -> Making:
        seed = self._seed if seed is None else seed
        return Making(self._task, self._size.steps, seed, rules, methods, only_retained)

    def _trained(
        self, name: str, make: Making, wrap: Callable[[object], Source] | None = None, **config: object
    ) -> tuple[nn.Module, float]:
        self._tell(f"seed {self._seed}, {name}")
        trainer, begin = make(wrap, **config), time.process_time()
        trainer.fit()
        return trainer.model, time.process_time() - begin

    def _note(self, name: str, model: nn.Module, steps: int = 0, seconds: float = 0.0) -> None:
        self.found[name] = {**measured(model, self._task, self._reference), "steps": steps, "seconds": seconds}

    def _take_away(self, kind: str, *methods: Method) -> None:
        """Train with the class apart, and measure before, ablated, and repaired."""
        make, run = self._making(APART, *methods), self._folder / f"{kind}-{self._seed}"
        out, repair_steps = run.with_name(f"{run.name}-repaired"), self._size.repair_steps
        model, _ = self._trained(kind, make, run_folder=run)
        self._note(f"{kind}, before", model)
        ablate_region(model, policy(APART), "own")
        self._note(f"{kind}, ablated", model)
        self._tell(f"seed {self._seed}, {kind}, repair")
        begin = time.process_time()
        ablate(run, make, ["forget"], out, repair_steps=repair_steps)
        seconds = time.process_time() - begin
        load_model_tensors(model, read_checkpoint(list_checkpoints(out / "checkpoints")[0]).model)
        self._note(f"{kind}, ablated and repaired", model, repair_steps, seconds)


def without(source: object) -> Source:
    """Put tombstones in place of the rows to forget."""
    assert isinstance(source, Source), "the task's own"
    return Tombstoned(source, ["forget"])


def table_of(seeds: Sequence[Mapping[str, Mapping[str, float]]]) -> str:
    """Return the table as Markdown: means, and half of each 95 % interval's width."""
    quantile = student_quantile(0.975, len(seeds) - 1)
    lines = [f"| way | {' | '.join(COLUMNS.values())} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for name in seeds[0]:
        cells = []
        for column in COLUMNS:
            values = np.asarray([one[name][column] for one in seeds])
            if column == "steps" or not values.any():
                cells.append(f"{values.mean():.0f}")
                continue
            half = quantile * values.std(ddof=1) / np.sqrt(len(values))
            digits = 1 if column == "seconds" else 3
            cells.append(f"{values.mean():.{digits}f} ± {half:.{digits}f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None, folder: Path = RESULTS) -> None:
    """Train, write `deletion.json` and `.md`, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deletion", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs; nothing is written")
    quick = parser.parse_args(arguments).quick
    size = Size(steps=4, repair_steps=2, num_retain=256, num_forget=32, seeds=2) if quick else Size()
    torch.set_num_threads(1)
    num_trainings = 8 * size.seeds
    told = list[str]()
    with ProgressDisplay("deletion") as progress, tempfile.TemporaryDirectory() as runs:

        def tell(text: str) -> None:
            told.append(text)
            progress.update((len(told) - 1) / num_trainings, text)

        seeds = [OfSeed(size, seed, Path(runs), tell).found for seed in range(size.seeds)]
    table = table_of(seeds)
    sys.stdout.write(table)
    if not quick:
        facts = {**surroundings(), "command": "python -m benchmarks.deletion", **asdict(size)}
        lines = "".join(f"- {key}: {value}\n" for key, value in facts.items())
        note = f"Means of {size.seeds} seeds, ± half of a 95 % interval. Losses are nats per byte.\n"
        (folder / "deletion.md").write_text(f"# deletion\n\n{lines}\n{note}\n{table}")
        (folder / "deletion.json").write_text(json.dumps({**facts, "found": seeds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
