"""(b) What routing and ledger cost: a GPT, V = 8, against plain accumulation of the same microbatches."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
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


Step = Callable[[], object]


def plain(size: Size) -> Step:
    """Return a step of plain accumulation: backward into `.grad`, eight times, and the optimizer."""
    model = size.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        # The open runs have asked for deterministic kernels; who accumulates by hand rarely does.
        torch.use_deterministic_algorithms(False)
        for rows in size.rows:
            with torch.autocast(size.device.type, torch.bfloat16, enabled=size.bfloat16):
                loss = LOSS(model, rows).mean() / V
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.use_deterministic_algorithms(True)

    return step


def governed(size: Size, runs: ExitStack, confined: int, *, ledger: bool = True, norms: bool = True) -> Step:
    """Return a governed step; its run is open until `runs` closes."""
    model: nn.Module = size.model()
    batches = size.batches(confined)
    classes = [batch.class_id for batch in batches]
    folder = runs.enter_context(tempfile.TemporaryDirectory())
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
    runs.enter_context(trainer)
    return lambda: trainer.step_microbatches(batches, classes)


def compare(size: Size, steps: int, rounds: int) -> list[Row]:
    """Time every arm against plain accumulation, in turns; all runs stay open, so that no round pays for set-up."""

    def timed(step: Step) -> Callable[[], float]:
        def seconds() -> float:
            size.wait()
            start = perf_counter()
            for _ in range(steps):
                step()
            size.wait()
            return (perf_counter() - start) / steps

        return seconds

    with ExitStack() as runs:
        arms = {
            "plain accumulation": plain(size),
            "plain again (A/A)": plain(size),
            "all-ones, ledger": governed(size, runs, 0),
            "all-ones, ledger without norms": governed(size, runs, 0, norms=False),
            "all-ones, no ledger (tree only)": governed(size, runs, 0, ledger=False, norms=False),
            "a quarter confined, ledger": governed(size, runs, 4),
            "all confined, ledger": governed(size, runs, 1),
        }
        return in_turns({name: timed(step) for name, step in arms.items()}, rounds)


def run(*, quick: bool) -> str:
    """Run the benchmark on CPU, write its results and return the tables."""
    tables = []
    for tokens in (512,) if quick else (512, 2048):
        size = (
            Size(64, 2, 128, 64, "cpu", bfloat16=False) if quick else Size(256, 6, tokens, 256, "cpu", bfloat16=False)
        )
        rows = compare(size, 1, 2 if quick else 20)
        name = f"routing_cost_{tokens}" + ("_quick" if quick else "")
        notes = {"parameters": count_parameters(size.model()), "V": V, "tokens a microbatch": size.tokens}
        tables.append(write(name, rows, notes))
    return "\n".join(tables)
