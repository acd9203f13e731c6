"""What regrouping, Gradient Routing and SGTM cost beside a policy's routes alone: a GPT, V = 8, rows of four classes.

The region is the feed-forward layers of the upper half. Under the first policy half of the classes may not teach it;
under the second these teach it alone, and the others may not. Microbatches are pure and of one size, or regrouped from
mixed rows in each step, and ragged. Everything is over plain accumulation.
"""

from __future__ import annotations

from contextlib import ExitStack

from benchmarks.over_plain import Step, governed, table
from benchmarks.token_routing import TAXONOMY, Packs
from cosmati import PolicyFile, load_policy
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


def arms_of(size: Packs, runs: ExitStack) -> dict[str, Step]:
    """Return the governed arms."""
    denied, kinds, batches = policy(size, kinds=False), policy(size, kinds=True), size.batches(None)
    masking = [SelectiveGradientMasking(forget="branch")]
    return {
        "half denied the branch, routes alone": governed(size, runs, batches, denied, TAXONOMY),
        "likewise, of mixed rows, regrouped": governed(size, runs, size.mixed(), denied, TAXONOMY),
        "and GradientRouting": governed(size, runs, batches, denied, TAXONOMY, methods=[GradientRouting()]),
        "half teach the branch alone, routes alone": governed(size, runs, batches, kinds, TAXONOMY),
        "and SelectiveGradientMasking": governed(size, runs, batches, kinds, TAXONOMY, methods=masking),
    }


def run(*, quick: bool) -> str:
    """Run the benchmark on CPU, write its results and return the tables."""
    return "\n".join(
        table(
            f"strategies_{tokens}" + "_quick" * quick,
            Packs.on_cpu(tokens, quick=quick),
            arms_of,
            rounds=2 if quick else 12 if tokens < 2048 else 4,
        )
        for tokens in ((512,) if quick else (512, 2048))
    )
