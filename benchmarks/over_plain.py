"""What benchmarks of routing share: a GPT's governed steps beside plain accumulation of the same V = 8 microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measure import Row, in_turns, write
from cosmati import Batch, LanguageModel, PolicyFile, RunConfig, Taxonomy, Trainer
from cosmati.core.method import Method
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.models.size import count_parameters

V = 8
LOSS = LanguageModel()
BASELINE = "plain accumulation"
_LOOKED_AT = 9

Step = Callable[[], object]
AnySize = TypeVar("AnySize", bound="Size")


class Size:
    """What is measured: the model, and the microbatches of a step.

    Args:
        width, blocks: of the model.
        tokens: of a microbatch.
        length: of a row.
        device: where all of it is.
        bfloat16: the precision of forward passes; float32 otherwise.
    """

    def __init__(self, width: int, blocks: int, tokens: int, length: int, device: str, *, bfloat16: bool) -> None:
        self.device, self.bfloat16, self.tokens = torch.device(device), bfloat16, tokens
        self.config = GPTConfig(sequence_length=length, width=width, num_blocks=blocks, num_heads=max(2, width // 64))
        self.data: list[Any] = self.drawn((max(1, tokens // length), length), torch.Generator().manual_seed(0))

    def drawn(self, shape: tuple[int, int], generator: torch.Generator) -> list[Any]:
        """Return the rows of each microbatch."""
        longer = (shape[0], shape[1] + 1)
        return [torch.randint(0, 256, longer, generator=generator).to(self.device) for _ in range(V)]

    def model(self) -> GPT:
        """Return a fresh model."""
        torch.manual_seed(0)
        return GPT(self.config).to(self.device)

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @classmethod
    def on_cpu(cls, tokens: int, *, quick: bool) -> Self:
        """Return the 5-million-parameter model of the results, or a tiny one, to see that it runs."""
        width, blocks, length = (64, 2, 64) if quick else (256, 6, 256)
        return cls(width, blocks, 128 if quick else tokens, length, "cpu", bfloat16=False)


def plain(size: Size) -> Step:
    """Return a step of plain accumulation: backward into `.grad`, eight times, and the optimizer."""
    model = size.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        # The open runs have asked for deterministic kernels; who accumulates by hand rarely does.
        torch.use_deterministic_algorithms(False)
        for data in size.data:
            with torch.autocast(size.device.type, torch.bfloat16, enabled=size.bfloat16):
                loss = LOSS(model, data).mean() / V
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.use_deterministic_algorithms(True)

    return step


def governed(
    size: Size,
    runs: ExitStack,
    batches: Sequence[Batch] | Batch,
    policy: PolicyFile,
    taxonomy: Taxonomy,
    *,
    model: nn.Module | None = None,
    methods: Sequence[Method] = (),
    **config: Any,  # noqa: ANN401
) -> Step:
    """Return a step under a policy, which has had its first ones; its run is open until `runs` closes.

    Args:
        size: what is measured.
        runs: closes the run.
        batches: of each step: its microbatches, or its rows in one, which are regrouped by class each time.
        policy: of the run.
        taxonomy: likewise.
        model: that surgery has changed already; a fresh one if left out.
        methods: of the run.
        **config: other fields of `RunConfig`.
    """
    model = model or size.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = RunConfig(
        budget="1000000ba",
        num_microbatches=V,
        precision="bfloat16" if size.bfloat16 else "float32",
        device=str(size.device),
        **config,
    )
    trainer = Trainer(
        model, LOSS, optimizers=[optimizer], methods=methods, policy=policy, taxonomy=taxonomy, config=settings
    )
    runs.enter_context(trainer)
    # What is looked at in the steps 0, 1, 2, 4 and 8 isn't counted, and takes few rows as well as many.
    if isinstance(batches, Batch):
        for _ in range(_LOOKED_AT):
            trainer.step(batches.select(slice(0, 2 * V)))
        return lambda: trainer.step(batches)
    classes = [batch.class_id for batch in batches]
    for _ in range(_LOOKED_AT):
        trainer.step_microbatches([batch.select(slice(0, 1)) for batch in batches], classes)
    return lambda: trainer.step_microbatches(batches, classes)


def compare(
    size: AnySize,
    arms_of: Callable[[AnySize, ExitStack], dict[str, Step]],
    *,
    steps: int,
    rounds: int,
    now: Callable[[], float] | None = None,
) -> tuple[list[Row], dict[str, float]]:
    """Time every arm against plain accumulation, in turns, and count its operations by the baseline's.

    All runs stay open, so that no round pays for set-up.

    Args:
        size: what is measured.
        arms_of: gives the arms beside the baseline and its twin.
        steps: of a turn.
        rounds: turns of each arm.
        now: the clock; of processor time on CPU otherwise, so that what else the machine does counts less.
    """
    clock = now or (process_time if size.device.type == "cpu" else perf_counter)
    torch.set_num_threads(1)

    def timed(step: Step) -> Callable[[], float]:
        def seconds() -> float:
            size.wait()
            start = clock()
            for _ in range(steps):
                step()
            size.wait()
            return (clock() - start) / steps

        return seconds

    with ExitStack() as runs:
        arms = {BASELINE: plain(size), "plain again (A/A)": plain(size), **arms_of(size, runs)}
        operations = {}
        for name, step in arms.items():
            with FlopCounterMode(display=False) as counter:
                step()
            operations[name] = counter.get_total_flops()
        rows = in_turns({name: timed(step) for name, step in arms.items()}, rounds)
        return rows, {name: round(number / operations[BASELINE], 4) for name, number in operations.items()}


def table(
    name: str,
    size: AnySize,
    arms_of: Callable[[AnySize, ExitStack], dict[str, Step]],
    *,
    steps: int = 1,
    rounds: int,
    now: Callable[[], float] | None = None,
    folder: Path | None = None,
) -> str:
    """Compare, write the results and return their table; arguments are those of `compare` and `write`."""
    is_cuda = size.device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    rows, operations = compare(size, arms_of, steps=steps, rounds=rounds, now=now)
    notes: dict[str, Any] = {"parameters": count_parameters(size.model()), "V": V, "tokens a microbatch": size.tokens}
    notes["operations, by plain's"] = operations
    if is_cuda:
        notes["peak memory, GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    return write(name, rows, notes, folder)
