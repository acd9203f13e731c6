"""What Gradient Routing and SGTM cost beside a policy's routes alone: a GPT, V = 8 pure microbatches of four classes.

The region is the feed-forward layers of the upper half. Under the first policy half of the classes may not teach it;
under the second these teach it alone, and the others may not. Everything is over plain accumulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from benchmarks.measure import write
from benchmarks.token_routing import LOSS, TAXONOMY, Packs, Step, V, compare, plain
from cosmati import PolicyFile, RunConfig, Trainer, load_policy
from cosmati.core.method import Method
from cosmati.models.size import count_parameters
from cosmati.routing.gradient_routing import GradientRouting
from cosmati.routing.selective_masking import SelectiveGradientMasking


def policy(size: Packs, *, kinds: bool) -> PolicyFile:
    """Return a policy over a branch and the rest.

    Args:
        size: of the model.
        kinds: the classes that the branch is denied keep out of it, and the others teach it alone.
    """
    blocks = size.config.num_blocks
    names = ", ".join(f"'blocks.{i}.feed_forward.*'" for i in range(blocks // 2, blocks))
    regions = f"  branch: {{params: [{names}]}}\n  rest: {{params: '*', exclude: [{names}]}}\n"
    rules = ["{class: '**', weight: 1}"]
    rules += [f"{{class: c{index}, region: branch, weight: 0}}" for index in (0, 2)]
    rules += [f"{{class: c{index}, region: rest, weight: 0}}" for index in (1, 3) if kinds]
    told = "".join(f"  - {rule}\n" for rule in rules)
    return load_policy(f"version: 1\ntaxonomy: t\nregions:\n{regions}rules:\n{told}")


def governed(size: Packs, runs: ExitStack, chosen: PolicyFile, methods: Sequence[Method] = ()) -> Step:
    """Return a step under a policy; its run is open until `runs` closes."""
    model = size.model()
    config = RunConfig(budget="1000000ba", num_microbatches=V, device=str(size.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = Trainer(
        model, LOSS, optimizers=[optimizer], methods=methods, policy=chosen, taxonomy=TAXONOMY, config=config
    )
    runs.enter_context(trainer)
    batches = size.batches(None)
    return lambda: trainer.step_microbatches(batches, [batch.class_id for batch in batches])


def arms_of(size: Packs, runs: ExitStack) -> dict[str, Step]:
    """Return all arms, the baseline first."""
    denied, kinds = policy(size, kinds=False), policy(size, kinds=True)
    return {
        "plain accumulation": plain(size),
        "plain again (A/A)": plain(size),
        "half denied the branch, routes alone": governed(size, runs, denied),
        "and GradientRouting": governed(size, runs, denied, [GradientRouting()]),
        "half teach the branch alone, routes alone": governed(size, runs, kinds),
        "and SelectiveGradientMasking": governed(size, runs, kinds, [SelectiveGradientMasking(forget="branch")]),
    }


def run(*, quick: bool) -> str:
    """Run the benchmark on CPU, write its results and return the tables."""
    tables = []
    for tokens in (512,) if quick else (512, 2048):
        size = (
            Packs(64, 2, 128, 64, "cpu", bfloat16=False) if quick else Packs(256, 6, tokens, 256, "cpu", bfloat16=False)
        )
        rows, flops = compare(size, 1, 2 if quick else 12, arms_of)
        name = f"strategies_{tokens}" + ("_quick" if quick else "")
        notes: dict[str, object] = {"parameters": count_parameters(size.model()), "V": V}
        notes |= {"tokens a microbatch": size.tokens, "operations, by plain's": flops}
        tables.append(write(name, rows, notes))
    return "\n".join(tables)
