"""Schedules of depth: each parameter of a real model, in each phase, against what the entries say of its block."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cosmati import Classification, InMemory, RunConfig, Trainer
from cosmati.errors import PolicyError
from cosmati.optim import SGD
from cosmati.routing.policy import CompiledPolicy, compile_policy, partition_by
from cosmati.routing.policy_analysis import diff, explain
from cosmati.routing.policy_file import PolicyFile, load_policy
from tests.routing.samples import CLASSES, TAXONOMY

pytestmark = pytest.mark.long

NUM_BLOCKS, PHASES = 6, ("early", "middle", "late")
FRONT: dict[str, Any] = {
    "version": 1,
    "taxonomy": "t",
    "phases": [{"name": "early", "until": "2ba"}, {"name": "middle", "until": "4ba"}, {"name": "late"}],
}


class Deep(nn.Module):
    """Something before the blocks, and something after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.blocks = nn.ModuleList([nn.Linear(2, 2) for _ in range(NUM_BLOCKS)])
        self.head = nn.Linear(2, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.first(rows)
        for block in self.blocks:
            rows = block(rows).tanh()
        output: torch.Tensor = self.head(rows)
        return output


DEEP = Deep()


def compiled(policy: PolicyFile, model: nn.Module = DEEP) -> CompiledPolicy:
    return compile_policy(policy, taxonomy=TAXONOMY, regions=partition_by(policy, model), num_steps=6)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[tuple[int, int]], dict[str, Any]]:
    """Return the ranges as first block and the one after the last, and a schedule."""
    cuts = [0, *sorted(draw(st.sets(st.integers(1, NUM_BLOCKS - 1), max_size=3))), NUM_BLOCKS]
    spans = list(pairwise(cuts))
    is_open = draw(st.booleans())
    names = [f"{a}-" if is_open and b == NUM_BLOCKS else f"{a}-{b - 1}" for a, b in spans]
    entry = st.fixed_dictionaries(
        {
            "phase": st.lists(st.sampled_from((*PHASES, "*")), min_size=1, max_size=2),
            "blocks": st.lists(st.sampled_from(names), min_size=1, max_size=2),
        },
        optional={"class": st.lists(st.sampled_from(("**", "a/**", *CLASSES)), min_size=1, max_size=2)},
    )
    entries = draw(st.lists(entry, min_size=1, max_size=3))
    return spans, {"container": "blocks", "ranges": names, "open": entries}


def is_closed(spans: list[tuple[int, int]], depth: dict[str, Any], path: str, phase: str, block: int) -> bool:
    """Return whether some entry for class and phase doesn't list the range that a block is in."""
    for entry in depth["open"]:
        classes = entry.get("class", ["**"])
        is_meant = any(one in ("**", path) or (one == "a/**" and path.startswith("a/")) for one in classes)
        if is_meant and {phase, "*"} & {*entry["phase"]}:
            listed = [span for span, name in zip(spans, depth["ranges"], strict=True) if name in entry["blocks"]]
            if not any(start <= block < end for start, end in listed):
                return True
    return False


@given(schedules(), st.sampled_from([0.5, 1.0]))
def test_every_parameter_learns_when_its_block_is_open(
    drawn: tuple[list[tuple[int, int]], dict[str, Any]], weight: float
) -> None:
    spans, depth = drawn
    rules = [{"class": "**", "weight": 1}, {"class": "f", "weight": weight}]
    table = compiled(PolicyFile.model_validate({**FRONT, "rules": rules, "depth": depth}))
    assert {*table.partition.region_of} == {name for name, _ in DEEP.named_parameters()}
    for (c, path), step in product(enumerate(CLASSES), range(6)):
        full = weight if path == "f" else 1.0
        for parameter, region in table.partition.region_of.items():
            parts = parameter.split(".")
            closed = parts[0] == "blocks" and is_closed(spans, depth, path, PHASES[step // 2], int(parts[1]))
            assert table.route(c, step)[region] == (0.0 if closed else full), (path, step, parameter)


@given(schedules())
def test_a_schedule_only_ever_lowers(drawn: tuple[list[tuple[int, int]], dict[str, Any]]) -> None:
    rules = [{"class": "**", "weight": 1}]
    one = {**drawn[1], "open": [{"phase": "*", "blocks": drawn[1]["ranges"]}]}
    plain, scheduled = (
        compiled(PolicyFile.model_validate({**FRONT, "rules": rules, "depth": d})) for d in (one, drawn[1])
    )
    assert all(change.direction == "tightens" for change in diff(plain, scheduled))


TEXT = """version: 1
taxonomy: t
phases: [{name: start, until: 2ba}, {name: main}]
rules: [{class: "**", weight: 1}, {class: f, region: blocks.0-1, weight: 0.5}]
"""


@pytest.mark.parametrize(
    ("depth", "why"),
    [
        ("{container: blocks, ranges: [0-1, 3-], open: [{phase: start, blocks: 3-}]}", "3- doesn't go on .* 2 is next"),
        ("{container: blocks, ranges: [1-], open: [{phase: start, blocks: 1-}]}", "0 is next"),
        ("{container: blocks, ranges: [0-, 4-], open: [{phase: start, blocks: 4-}]}", "none follows"),
        ("{container: blocks, ranges: [0-2, 2-], open: [{phase: start, blocks: 2-}]}", "3 is next"),
        ("{container: blocks, ranges: [0-1, 2-1], open: [{phase: start, blocks: 0-1}]}", "range 2-1 is empty"),
        (
            "{container: blocks, ranges: [0, 1-], open: [{phase: start, blocks: 1-}]}",
            "0 is a number: write a range, 0-0",
        ),
        ("{container: blocks, ranges: [0:1], open: [{phase: start, blocks: 1-}]}", "'0:1' is no range"),
        ("{container: blocks, ranges: [0-1, 2-], open: [{phase: start, blocks: 2-5}]}", "no range '2-5' to open"),
        ("{container: blocks, ranges: [0-1, 2-], open: [{phase: begin, blocks: 2-}]}", "no phase 'begin'"),
        ("{container: blocks, ranges: [0-1, 2-], open: [{class: g, phase: start, blocks: 2-}]}", "no class 'g'"),
        ("{container: blocks, ranges: [0-1, 2-], open: [{phase: start}]}", "blocks: Field required"),
        ("{container: blocks, ranges: [0-1, 2-], open: [{blocks: 2-}]}", "phase: Field required"),
        ("{container: blocks, ranges: [0-1, 2-], open: []}", "at least 1"),
        (
            "{container: block, ranges: [0-1, 2-], open: [{phase: start, blocks: 2-}]}",
            "container 'block' isn't in the model",
        ),
        ("{container: blocks, ranges: [0-1, 2-9], open: [{phase: start, blocks: 0-1}]}", "but 'blocks' has 6"),
        (
            "{container: blocks, ranges: [0-1, 2-3], open: [{phase: start, blocks: 0-1}]}",
            "in no region: 'blocks.4.weight'",
        ),
        (
            "{container: 'blocks.*', ranges: [0-1, 2-3], open: [{phase: start, blocks: 0-1}]}",
            "container: String should match",
        ),
        ("{ranges: [0-1, 2-], open: [{phase: start, blocks: 2-}], until: 3ba}", "no such field"),
    ],
)
def test_what_is_no_schedule_is_refused_with_its_line(depth: str, why: str) -> None:
    with pytest.raises(PolicyError, match=rf"(?s)line 5.*{why}"):
        compiled(load_policy(f"{TEXT}depth: {depth}\n"))


def test_rules_and_schedules_go_together() -> None:
    policy = load_policy(TEXT + "depth: {container: blocks, ranges: [0-1, 2-], open: [{phase: start, blocks: 2-}]}\n")
    table = compiled(policy)
    assert table.regions == ("rest", "blocks.0-1", "blocks.2-")
    f, e = CLASSES.index("f"), CLASSES.index("a/e")
    assert [table.route(own, step) for own in (f, e) for step in (0, 2)] == [
        (1, 0, 1),
        (1, 0.5, 1),
        (1, 0, 1),
        (1, 1, 1),
    ]
    found = explain(policy, "f", "blocks.0-1", "start", taxonomy=TAXONOMY)
    assert (found.weight, found.lowered) == (0, ("opening 1 (phase start, blocks 2- alone)",))
    assert explain(policy, "f", "blocks.0-1", "main", taxonomy=TAXONOMY).lowered == ()
    other = (
        TEXT + "depth: {open: [{blocks: [2-], class: ['**'], phase: [start]}], ranges: [0-1, 2-], container: blocks}\n"
    )
    assert load_policy(other).digest == policy.digest != load_policy(TEXT.replace("blocks.0-1", "all")).digest


def test_a_model_of_blocks_alone_has_no_rest() -> None:
    model = nn.ModuleDict({"blocks": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})
    policy = load_policy(
        "version: 1\ntaxonomy: t\nphases: [{name: start, until: 2ba}, {name: main}]\n"
        "rules: [{class: '**', weight: 1}]\n"
        "depth: {container: blocks, ranges: [0-0, 1-], open: [{phase: start, blocks: 1-}]}\n"
    )
    table = compiled(policy, model)
    assert table.regions == ("blocks.0-0", "blocks.1-")
    assert [table.route(0, step) for step in (0, 2)] == [(0, 1), (1, 1)]


def test_a_class_for_which_nothing_is_open_is_rejected() -> None:
    text = TEXT.replace("rules: [", "rules: [{class: f, region: [rest, blocks.2-], weight: 0}, ")
    table = compiled(
        load_policy(text + "depth: {container: blocks, ranges: [0-1, 2-], open: [{phase: start, blocks: 2-}]}\n")
    )
    assert table.decision[CLASSES.index("f")] == ("reject", "gate")


def test_closed_blocks_keep_their_bits_until_they_open() -> None:
    torch.manual_seed(0)
    rows, names = torch.randn(16, 2), ("a/e", "f")
    model = Deep()
    policy = load_policy(
        TEXT.replace("f, region: blocks.0-1, weight: 0.5", "f, weight: 1")
        + "depth: {container: blocks, ranges: [0-1, 2-], open: [{phase: start, blocks: 2-}]}\n"
    )
    trainer = Trainer(
        model,
        Classification(2),
        InMemory((rows, torch.arange(16) % 2), 8, torch.arange(16) // 8, names),
        optimizers=SGD(lr=0.1, weight_decay=0.1),
        policy=policy,
        taxonomy=TAXONOMY,
        config=RunConfig(budget="6ba", num_threads=1, num_microbatches=2),
    )
    moved = []
    with trainer:
        for _ in range(4):
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            trainer._take(*trainer._next(trainer.feed))  # type: ignore[arg-type, misc]
            moved.append({name for name, p in model.named_parameters() if not torch.equal(p, before[name])})
    first = {f"blocks.{n}.{kind}" for n in (0, 1) for kind in ("weight", "bias")}
    assert [bool(first & names) for names in moved] == [False, False, True, True]
    assert all("blocks.5.weight" in names and "first.weight" in names for names in moved)
