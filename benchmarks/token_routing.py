"""What routes by token cost: packs of 1 to 8 classes in a GPT, V = 8, against plain accumulation of the same packs.

Every pack has eight documents; arms differ in whose they are. Half of the classes may not teach the lower half of the
model, and half of these teach the upper half at 0.5: with two classes one region is masked, with four and more both. On
CPU the seconds are the process's own, so that what else the machine does counts less.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter, process_time
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measure import Row, in_turns, write
from cosmati import Batch, LanguageModel, Lineage, PolicyFile, RunConfig, Trainer, load_policy
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.models.size import count_parameters
from cosmati.provenance.taxonomy import Taxonomy

V, CLASSES, DOCUMENTS = 8, 8, 8
LOSS = LanguageModel()
TAXONOMY = Taxonomy("t", "1", tuple((f"c{index}", f"class {index}") for index in range(CLASSES)))


class Packs:
    """What is measured: the model, and the packs of a step."""

    def __init__(self, width: int, blocks: int, tokens: int, length: int, device: str, *, bfloat16: bool) -> None:
        self.device, self.bfloat16, self.tokens = torch.device(device), bfloat16, tokens
        self.config = GPTConfig(sequence_length=length, width=width, num_blocks=blocks, num_heads=max(2, width // 64))
        generator = torch.Generator().manual_seed(0)
        shape = (max(1, tokens // length), length)
        self.documents = (torch.arange(length) * DOCUMENTS // length).expand(shape).contiguous()
        is_border = torch.ones(shape, dtype=torch.bool)
        is_border[:, :-1] = self.documents[:, 1:] != self.documents[:, :-1]
        self.data: list[dict[str, Any]] = []
        for _ in range(V):
            tokens_of = torch.randint(0, 256, shape, generator=generator)
            target = tokens_of.roll(-1, 1).masked_fill(is_border, -100)
            data = {"input": tokens_of, "target": target, "documents": self.documents}
            self.data.append({name: tensor.to(self.device) for name, tensor in data.items()})

    def model(self) -> GPT:
        """Return a fresh model."""
        torch.manual_seed(0)
        return GPT(self.config).to(self.device)

    def policy(self) -> PolicyFile:
        """Return the policy: what is denied or attenuated goes by the class's number."""
        half = self.config.num_blocks // 2
        names = ", ".join(["'embedding.*'", *(f"'blocks.{i}.*'" for i in range(half))])
        lower, upper = f"  lower: {{params: [{names}]}}\n", f"  upper: {{params: '*', exclude: [{names}]}}\n"
        rules = "  - {class: '**', weight: 1}\n"
        rules += "".join(f"  - {{class: c{index}, region: lower, weight: 0}}\n" for index in range(1, CLASSES, 2))
        rules += "".join(f"  - {{class: c{index}, region: upper, weight: 0.5}}\n" for index in range(3, CLASSES, 4))
        return load_policy(f"version: 1\ntaxonomy: t\nregions:\n{lower}{upper}rules:\n{rules}")

    def batches(self, num_classes: int | None) -> list[Batch]:
        """Return microbatches of packs with so many classes; None gives pure ones, whose classes take turns."""
        found = []
        for index, data in enumerate(self.data):
            rows = len(data["input"])
            ids = torch.arange(rows) + index * rows
            if num_classes is None:
                found.append(Batch(data, Lineage(ids, torch.full((rows,), index % 4)), index % 4))
            else:
                classes = self.documents % num_classes
                lineage = Lineage(ids, torch.full((rows,), -1), None, None, classes, ids[:, None] * 8 + self.documents)
                found.append(Batch(data, lineage))
        return found

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


Step = Callable[[], object]


def plain(size: Packs) -> Step:
    """Return a step of plain accumulation."""
    model = size.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        torch.use_deterministic_algorithms(False)
        for data in size.data:
            with torch.autocast(size.device.type, torch.bfloat16, enabled=size.bfloat16):
                loss = LOSS(model, data).mean() / V
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.use_deterministic_algorithms(True)

    return step


def governed(size: Packs, runs: ExitStack, num_classes: int | None) -> Step:
    """Return a step under the policy; its run is open until `runs` closes."""
    model = size.model()
    config = RunConfig(
        budget="1000000ba",
        num_microbatches=V,
        precision="bfloat16" if size.bfloat16 else "float32",
        device=str(size.device),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = Trainer(model, LOSS, optimizers=[optimizer], policy=size.policy(), taxonomy=TAXONOMY, config=config)
    runs.enter_context(trainer)
    batches = size.batches(num_classes)
    classes = [batch.class_id for batch in batches]
    return lambda: trainer.step_microbatches(batches, classes)


def arms_of(size: Packs, runs: ExitStack) -> dict[str, Step]:
    """Return all arms, the baseline first."""
    return {
        "plain accumulation": plain(size),
        "plain again (A/A)": plain(size),
        "pure: one class a microbatch": governed(size, runs, None),
        "packs of 1 class": governed(size, runs, 1),
        "packs of 2 classes": governed(size, runs, 2),
        "packs of 4 classes": governed(size, runs, 4),
        "packs of 8 classes": governed(size, runs, 8),
    }


def compare(
    size: Packs, steps: int, rounds: int, arms_of: Callable[[Packs, ExitStack], dict[str, Step]]
) -> tuple[list[Row], dict[str, float]]:
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
        arms = arms_of(size, runs)
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
            Packs(64, 2, 128, 64, "cpu", bfloat16=False) if quick else Packs(256, 6, tokens, 256, "cpu", bfloat16=False)
        )
        rows, flops = compare(size, 1, 2 if quick else 12, arms_of)
        name = f"token_routing_{tokens}" + ("_quick" if quick else "")
        notes = {"parameters": count_parameters(size.model()), "V": V, "tokens a microbatch": size.tokens}
        notes["operations, by plain's"] = flops  # type: ignore[assignment]
        tables.append(write(name, rows, notes))
    return "\n".join(tables)
