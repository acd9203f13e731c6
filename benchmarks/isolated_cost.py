"""What isolated regions cost: a GPT, V = 8, one class with adapters or experts of its own, beside plain accumulation.

Arms differ in how many of the eight microbatches are of the class that has modules of its own. Operations are counted,
too; seconds on CPU are the process's own, so that what else the machine does counts less.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter, process_time

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measure import Row, in_turns, write
from cosmati import Batch, LanguageModel, Lineage, PolicyFile, RunConfig, Trainer, load_policy
from cosmati.methods import IsolatedAdapters
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.models.size import count_parameters
from cosmati.provenance.taxonomy import Taxonomy

V = 8
LOSS = LanguageModel()
TAXONOMY = Taxonomy("t", "1", (("open", "free to learn from"), ("personal", "by itself")))
ADAPTERS = IsolatedAdapters(classes="personal", rank=8)
EXPERTS = IsolatedAdapters(classes="personal", layers="blocks.*.feed_forward", kind="expert")

Step = Callable[[], object]


class Tokens:
    """What is measured: the model, and the microbatches of a step."""

    def __init__(self, width: int, blocks: int, tokens: int, length: int, device: str, *, bfloat16: bool) -> None:
        self.device, self.bfloat16, self.tokens = torch.device(device), bfloat16, tokens
        self.config = GPTConfig(sequence_length=length, width=width, num_blocks=blocks, num_heads=max(2, width // 64))
        generator = torch.Generator().manual_seed(0)
        shape = (max(1, tokens // length), length + 1)
        self.rows = [torch.randint(0, 256, shape, generator=generator).to(self.device) for _ in range(V)]

    def model(self) -> GPT:
        """Return a fresh model."""
        torch.manual_seed(0)
        return GPT(self.config).to(self.device)

    def batches(self, num_own: int) -> list[Batch]:
        """Return the microbatches, of which so many are of the class with modules of its own."""
        found = []
        for index, rows in enumerate(self.rows):
            class_id = int(index * num_own // V < (index + 1) * num_own // V)
            lineage = Lineage(torch.arange(len(rows)) + index * len(rows), torch.full((len(rows),), class_id))
            found.append(Batch(rows, lineage, class_id))
        return found

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def policy() -> PolicyFile:
    """Return the policy that confines the class."""
    return load_policy(
        "version: 1\ntaxonomy: t\n"
        "regions: {shared: {params: '*', exclude: '*.isolated.*'}, own: {tag: isolated/personal}}\nrules:\n"
        "  - {class: '**', weight: 1}\n  - {class: '**', region: own, weight: 0}\n"
        "  - {class: personal, region: shared, weight: 0}\n  - {class: personal, region: own, weight: 1}\n"
    )


def plain(size: Tokens) -> Step:
    """Return a step of plain accumulation."""
    model = size.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        torch.use_deterministic_algorithms(False)
        for rows in size.rows:
            with torch.autocast(size.device.type, torch.bfloat16, enabled=size.bfloat16):
                loss = LOSS(model, rows).mean() / V
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.use_deterministic_algorithms(True)

    return step


def isolated(size: Tokens, runs: ExitStack, method: IsolatedAdapters, num_own: int) -> Step:
    """Return a step under the policy; its run is open until `runs` closes."""
    model = method.apply(size.model())
    config = RunConfig(
        budget="1000000ba",
        num_microbatches=V,
        precision="bfloat16" if size.bfloat16 else "float32",
        device=str(size.device),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = Trainer(model, LOSS, optimizers=[optimizer], policy=policy(), taxonomy=TAXONOMY, config=config)
    runs.enter_context(trainer)
    batches = size.batches(num_own)
    classes = [batch.class_id for batch in batches]
    return lambda: trainer.step_microbatches(batches, classes)


def compare(size: Tokens, steps: int, rounds: int) -> tuple[list[Row], dict[str, float]]:
    """Time every arm against plain accumulation, in turns, and count its operations by the baseline's."""
    now = process_time if size.device.type == "cpu" else perf_counter

    def timed(step: Step) -> Callable[[], float]:
        def seconds() -> float:
            size.wait()
            start = now()
            for _ in range(steps):
                step()
            size.wait()
            return (now() - start) / steps

        return seconds

    with ExitStack() as runs:
        arms = {"plain accumulation": plain(size), "plain again (A/A)": plain(size)}
        for kind, method in (("adapters", ADAPTERS), ("experts", EXPERTS)):
            for num_own in (0, 2, 8):
                arms[f"{kind}, {num_own} of 8 microbatches"] = isolated(size, runs, method, num_own)
        for step in arms.values():  # What is looked at in the steps 0, 1, 2 and 4 isn't counted.
            for _ in range(6):
                step()
        flops = {}
        for name, step in arms.items():
            with FlopCounterMode(display=False) as counter:
                step()
            flops[name] = counter.get_total_flops()
        base = flops["plain accumulation"]
        rows = in_turns({name: timed(step) for name, step in arms.items()}, rounds)
        return rows, {name: round(number / base, 4) for name, number in flops.items()}


def run(*, quick: bool) -> str:
    """Run the benchmark on CPU, write its results and return the tables."""
    tables = []
    for tokens in (512,) if quick else (512, 2048):
        size = (
            Tokens(64, 2, 128, 64, "cpu", bfloat16=False)
            if quick
            else Tokens(256, 6, tokens, 256, "cpu", bfloat16=False)
        )
        rows, flops = compare(size, 1, 2 if quick else 12)
        name = f"isolated_cost_{tokens}" + ("_quick" if quick else "")
        notes = {"parameters": count_parameters(size.model()), "V": V, "tokens a microbatch": size.tokens}
        notes["operations, by plain's"] = flops  # type: ignore[assignment]
        tables.append(write(name, rows, notes))
    return "\n".join(tables)
