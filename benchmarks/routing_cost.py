"""(b) What routing and ledger cost: a GPT, V = 8, against plain accumulation of the same microbatches."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from torch import nn

from benchmarks.measure import Row, in_turns, write
from cosmati import Batch, LanguageModel, Lineage, PolicyFile, RunConfig, Trainer, load_policy, software_licences
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.models.size import count_parameters

V = 8
LOSS = LanguageModel()


class Size:
    """What is measured: the model and the microbatches of a step."""

    def __init__(self, width: int, blocks: int, tokens: int, length: int, device: str, *, bfloat16: bool) -> None:
        self.device, self.bfloat16, self.tokens = torch.device(device), bfloat16, tokens
        self.config = GPTConfig(sequence_length=length, width=width, num_blocks=blocks, num_heads=max(2, width // 64))
        taxonomy = software_licences()
        self.classes = [taxonomy.id_of("open/permissive"), taxonomy.id_of("open/psf")]
        generator = torch.Generator().manual_seed(0)
        shape = (max(1, tokens // length), length + 1)
        self.rows = [torch.randint(0, 256, shape, generator=generator).to(self.device) for _ in range(V)]

    def model(self) -> GPT:
        """Return a fresh model."""
        return GPT(self.config).to(self.device)

    def batches(self, confined: int) -> list[Batch]:
        """Return the microbatches, every `confined`-th of the class that may only teach the upper half; 0 for none."""
        found = []
        for index, rows in enumerate(self.rows):
            class_id = self.classes[1 if confined and index % confined == 0 else 0]
            lineage = Lineage(torch.arange(len(rows)) + index * len(rows), torch.full((len(rows),), class_id))
            found.append(Batch(rows, lineage, class_id))
        return found

    def policy(self) -> PolicyFile:
        """Return a policy that keeps `open/psf` out of the embedding and the lower half of the blocks."""
        half = self.config.num_blocks // 2
        names = ", ".join(["'embedding.*'", *(f"'blocks.{i}.*'" for i in range(half))])
        lower = f"  lower: {{params: [{names}]}}\n"
        upper = f"  upper: {{params: '*', exclude: [{names}]}}\n"
        rules = "rules:\n  - {class: '**', weight: 1}\n  - {class: open/psf, region: lower, weight: 0}\n"
        return load_policy(f"version: 1\ntaxonomy: software-licences\nregions:\n{lower}{upper}{rules}")

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def plain(size: Size, steps: int) -> float:
    """Time plain accumulation: backward into `.grad`, eight times, and a step."""
    model = size.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        for rows in size.rows:
            with torch.autocast(size.device.type, torch.bfloat16, enabled=size.bfloat16):
                loss = LOSS(model, rows).mean() / V
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return _timed(size, step, steps)


def governed(size: Size, steps: int, confined: int, *, ledger: bool = True, norms: bool = True) -> float:
    """Time a governed step."""
    model: nn.Module = size.model()
    batches = size.batches(confined)
    classes = [batch.class_id for batch in batches]
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(
            budget="1000000ba",
            num_microbatches=V,
            precision="bfloat16" if size.bfloat16 else "float32",
            run_folder=Path(folder) / "run" if ledger else None,
            details_every=1 if norms else 1_000_000,
            device=str(size.device),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        trainer = Trainer(
            model, LOSS, optimizers=[optimizer], policy=size.policy(), taxonomy=software_licences(), config=config
        )
        with trainer:
            return _timed(size, lambda: trainer.step_microbatches(batches, classes), steps)


def _timed(size: Size, step: Callable[[], object], steps: int) -> float:
    step()
    size.wait()
    start = perf_counter()
    for _ in range(steps):
        step()
    size.wait()
    return (perf_counter() - start) / steps


def compare(size: Size, steps: int, rounds: int) -> list[Row]:
    """Time every arm against plain accumulation, in turns."""
    arms: dict[str, Callable[[], float]] = {
        "plain accumulation": lambda: plain(size, steps),
        "plain again (A/A)": lambda: plain(size, steps),
        "all-ones, ledger": lambda: governed(size, steps, 0),
        "all-ones, ledger without norms": lambda: governed(size, steps, 0, norms=False),
        "all-ones, no ledger (tree only)": lambda: governed(size, steps, 0, ledger=False, norms=False),
        "a quarter confined, ledger": lambda: governed(size, steps, 4),
        "all confined, ledger": lambda: governed(size, steps, 1),
    }
    return in_turns(arms, rounds)


def run(*, quick: bool) -> str:
    """Run the benchmark on CPU, write its results and return the tables."""
    tables = []
    for tokens in (512,) if quick else (512, 2048):
        size = (
            Size(64, 2, 128, 64, "cpu", bfloat16=False) if quick else Size(256, 6, tokens, 256, "cpu", bfloat16=False)
        )
        rows = compare(size, 1 if quick else 2, 2 if quick else 5)
        name = f"routing_cost_{tokens}" + ("_quick" if quick else "")
        notes = {"parameters": count_parameters(size.model()), "V": V, "tokens a microbatch": size.tokens}
        tables.append(write(name, rows, notes))
    return "\n".join(tables)
