"""Routes by token, what is one class's own, and SGTM in one run of packs: each document alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.isolated import isolated_modules, running
from cosmati.core.labels import IGNORED
from cosmati.core.plan import Promise
from cosmati.methods import EMA, GradientClipping, IsolatedAdapters
from cosmati.models.gpt import GPT
from cosmati.optim import AdamW
from cosmati.routing.policy_file import load_policy
from cosmati.routing.selective_masking import SelectiveGradientMasking
from tests.train.packs.samples import CLASSES, documents, exact, first_step, model, source, trainer, values
from tests.train.packs.test_swap import Unmasked

pytestmark = pytest.mark.long

REGIONS = ("forget", "lower", "upper", "own")
WEIGHTS = {
    "open": dict(zip(REGIONS, (0.0, 1.0, 1.0, 0.0), strict=True)),
    "doubtful": dict(zip(REGIONS, (1.0, 0.0, 0.25, 0.0), strict=True)),
    "personal": dict(zip(REGIONS, (0.0, 0.0, 0.0, 1.0), strict=True)),
}
LABELLED = {**WEIGHTS, "doubtful": {**WEIGHTS["doubtful"], "upper": 0.0}}
MASKING = SelectiveGradientMasking(forget="forget")
KINDS = {
    "low rank": IsolatedAdapters(classes="personal", rank=2),
    "expert": IsolatedAdapters(classes="personal", layers="blocks.*.feed_forward", kind="expert"),
    "beside": IsolatedAdapters(classes="personal", layers="blocks.*.attention", kind="beside"),
}


def region_of(name: str) -> str:
    if ".isolated." in name:
        return "own"
    if name.startswith("blocks.0.feed_forward."):
        return "forget"
    return "upper" if name.startswith(("blocks.1.", "norm.", "head.")) else "lower"


def policy(weights: Any = WEIGHTS) -> Any:
    own, upper = "'*.isolated.*'", "'blocks.1.*', 'norm.*', 'head.*'"
    rules = "".join(
        f"  - {{class: {c}, region: {r}, weight: {w}}}\n" for c, row in weights.items() for r, w in row.items()
    )
    return load_policy(f"""
version: 1
taxonomy: t
regions:
  forget: {{params: ['blocks.0.feed_forward.*'], exclude: [{own}]}}
  upper: {{params: [{upper}], exclude: [{own}]}}
  lower: {{params: ['*'], exclude: ['blocks.0.feed_forward.*', {upper}, {own}]}}
  own: {{tag: isolated/personal}}
rules:
{rules}""")


def started(kind: str) -> GPT:
    """Return a model in float64 whose adapters already do something."""
    network = model(rotary=False).double()
    KINDS[kind].apply(network)
    for module in isolated_modules(network).values():
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(1))
    return network


def by_document(network: GPT, *, masked: bool) -> dict[str, Tensor]:
    without = copy.deepcopy(network)
    with torch.no_grad():
        for name, parameter in without.named_parameters():
            if region_of(name) == "forget":
                parameter.zero_()
    total = {name: torch.zeros_like(p) for name, p in network.named_parameters()}
    teachers = dict.fromkeys(total, 0)
    for batch in first_step(source(documents())):
        classes, pieces = batch.lineage.token_class_ids, batch.data["documents"]
        assert classes is not None
        for row, number in [(r, d) for r in range(len(pieces)) for d in pieces[r].unique().tolist()]:
            chosen = pieces[row] == number
            class_id, target = int(classes[row][chosen][0]), batch.data["target"][row][chosen]
            labels = int((target != IGNORED).sum())
            if class_id < 0 or not labels:
                continue
            weights = WEIGHTS[CLASSES[class_id]]
            read = without if masked and not weights["forget"] else network
            read.zero_grad()
            with running(isolated_modules(read).values(), {CLASSES[class_id]: True}):
                tokens = batch.data["input"][row][chosen][None]
                nn.functional.cross_entropy(read(tokens)[0], target, reduction="sum").backward()
            for name, parameter in read.named_parameters():
                rho = weights[region_of(name)]
                teachers[name] += labels * bool(rho)
                if rho and parameter.grad is not None:
                    total[name] += rho * parameter.grad
    return {name: value / max(1, teachers[name]) for name, value in total.items()}


@pytest.mark.parametrize("masked", [False, True], ids=["routes", "with SGTM"])
@pytest.mark.parametrize("kind", ["low rank", *(pytest.param(k, marks=pytest.mark.slow) for k in ("expert", "beside"))])
def test_each_region_learns_what_each_document_alone_may_teach_it(kind: str, masked: bool) -> None:
    network = started(kind)
    before, expected = values(network), by_document(network, masked=masked)
    methods = [KINDS[kind], *([MASKING] if masked else [])]
    made = trainer(network, source(documents()), policy(), methods=methods, loss=exact)
    made.fit()
    for name, parameter in made.model.named_parameters():
        found = before[name] - parameter.detach()
        torch.testing.assert_close(found, expected[name], rtol=1e-9, atol=1e-12, msg=name)
    assert made.plan.holds(Promise.ISOLATED, ("personal", "own")), made.plan
    assert made.plan.holds(Promise.NO_DIRECT_WRITE), made.plan


def flat(state: Any, name: str = "") -> list[tuple[str, Tensor]]:
    if isinstance(state, Tensor):
        return [(name, state.detach().clone())]
    return [one for key, value in state.items() for one in flat(value, f"{name}.{key}".removeprefix("."))]


@pytest.mark.parametrize(("swapped", "moves"), [(2, {"own"}), (1, {"forget"})], ids=["its own", "removable"])
def test_what_one_class_holds_reaches_its_own_place_alone(swapped: int, moves: set[str]) -> None:
    """Over four steps, every bit, under averages and clipping by region."""
    clipping = GradientClipping(clipping_type="norm", clipping_threshold=0.01, per_region=True)
    methods = [KINDS["low rank"], MASKING, clipping, EMA(half_life="2ba", update_interval="1ba")]
    learnt = []
    for swapping in ((), (swapped,)):
        data = source(documents(90, swapped=swapping))
        options: dict[str, Any] = {"optimizers": [AdamW(lr=0.01, weight_decay=0.1)], "budget": "4ba"}
        made = trainer(model(), data, policy(LABELLED), methods=methods, **options)
        made.fit()
        assert made.plan.holds(Promise.NO_DIRECT_WRITE), made.plan
        averages = {name: value for state in made.states.values() for name, value in flat(state)}
        learnt.append(values(made.model) | averages)
    moved = {name for name in learnt[0] if not torch.equal(learnt[0][name], learnt[1][name])}
    assert {region_of(name.removeprefix("average/")) for name in moved} == moves
    assert any(name.startswith("average/") for name in moved)


def test_documents_that_see_one_another_withdraw_both_promises_by_name() -> None:
    network = Unmasked(model().config)
    made = trainer(network, source(documents()), policy(), methods=[KINDS["low rank"], MASKING])
    made.fit()
    broken = [g for g in made.plan.guarantees if g.promise in (Promise.NO_DIRECT_WRITE, Promise.ISOLATED)]
    assert len(broken) == 8
    assert all(
        not g.holds and "reads, at one document's tokens, what follows from another's" in g.because for g in broken
    )
