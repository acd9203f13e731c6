"""SGTM in packs: kept documents read the forget region as zeros, others as it is, each held against itself alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cosmati.core.labels import IGNORED
from cosmati.core.plan import Promise
from cosmati.data.packing import Packing, pack
from cosmati.errors import PlanError
from cosmati.optim import SGD, AdamW, Muon
from cosmati.routing.gradient_routing import GradientRouting
from cosmati.routing.selective_masking import SelectiveGradientMasking
from tests.train.packs.samples import (
    CLASSES,
    LENGTH,
    documents,
    first_step,
    model,
    oracle,
    policy,
    source,
    trainer,
    values,
)
from tests.train.packs.test_split import Body, Flattened, Recurrent, build, exact, mixture
from tests.train.packs.test_swap import Unmasked

pytestmark = pytest.mark.long

MASKING = SelectiveGradientMasking(forget="forget")
WEIGHTS = {
    "open": {"rest": 1.0, "forget": 0.0},
    "doubtful": {"rest": 0.0, "forget": 1.0},
    "personal": {"rest": 0.5, "forget": 0.25},
}
"""To be kept, to be removable, unlabelled."""
APART = {**WEIGHTS, "personal": {"rest": 1.0, "forget": 0.0}}
"""No class is unlabelled."""


class Watching(Flattened):
    """Decides by its own weights, where nobody learns: what is read without a gradient counts, too."""

    def forward(self, hidden: Tensor, documents: Tensor) -> Tensor:
        with torch.no_grad():
            share = (hidden.abs() @ self.weight.abs()).tanh()
        return super().forward(hidden, documents) * share


class Joined(nn.Module):
    """Reads its parameters among others, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(4, 8))

    def forward(self, hidden: Tensor, documents: Tensor) -> Tensor:
        del documents
        with torch.no_grad():
            whole = torch.cat([self.one, self.other])
        return hidden @ whole + nn.functional.linear(hidden, torch.cat([self.one, self.other]))


class Choosing(nn.Module):
    """Gives a number for each token beside what is learnt, and none of them follows from the weight by a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        found = torch.addmm(hidden.new_zeros(8), hidden.view(-1, 8), self.weight).view(hidden.shape)
        return found, 1 + found.detach().argmax(-1)


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Choosing()

    def forward(self, hidden: Tensor, documents: Tensor) -> Tensor:
        del documents
        found, chosen = self.inner(hidden)
        result: Tensor = (hidden + found) * chosen[..., None]
        return result


KINDS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "feed-forward": (model, "blocks.0.feed_forward.*", ""),
    "a block": (model, "blocks.1.*", ""),
    "tied embedding": (lambda: model(tied=True), "[embedding.*, head.*]", ""),
    "positions": (lambda: model(rotary=False), "position.*", ""),
    "head and norms": (model, "[head.*, norm.*]", ""),
    "value embeddings": (lambda: build("value embeddings"), "blocks.0.*", "blocks.0.attention"),
    "gathered experts": (lambda: build("gathered experts"), "blocks.0.mixture.*", "blocks.0.mixture"),
    "one of the experts": (lambda: build("gathered experts"), "blocks.1.mixture.experts.1.*", "blocks.1.mixture"),
    "dense experts": (mixture(dispatch="dense"), "blocks.1.mixture.*", ""),
    "state space": (lambda: build("state space"), "blocks.1.*", "blocks.1"),
    "flattened": (lambda: Body(Flattened()), "body.*", "body"),
    "PyTorch's attention": (lambda: build("PyTorch's attention"), "body.*", "body.inner"),
    "recurrent": (lambda: Body(Recurrent()), "body.*", "body"),
    "without a gradient": (lambda: Body(Watching()), "body.*", "body"),
    "what isn't learnt": (lambda: Body(Chosen()), "body.*", "body.inner"),
    "in a list": (lambda: Body(Joined()), "body.*", "body"),
}


QUICK = ("feed-forward", "tied embedding", "value embeddings", "flattened", "without a gradient", "what isn't learnt")


def policy_of(forget: str, weights: Mapping[str, Mapping[str, float]]) -> Any:
    globs = forget if forget.startswith("[") else f"['{forget}']"
    return policy(weights, {"forget": globs, "rest": f"'*', exclude: {globs}"})


def made_of(kind: str) -> tuple[nn.Module, set[str]]:
    """Return a model without draws, in float64, and the names of what's to be forgotten."""
    torch.manual_seed(0)
    network = KINDS[kind][0]().double()
    for module in network.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    globs = KINDS[kind][1].strip("[]").split(", ")
    return network, {n for n, _ in network.named_parameters() if any(n.startswith(one.rstrip("*")) for one in globs)}


def by_document(network: nn.Module, forget: set[str], microbatches: Any, weights: Any) -> dict[str, Tensor]:
    """Each document alone, times its route: in the model as it is, or with the forget parameters at zero."""
    without = copy.deepcopy(network)
    with torch.no_grad():
        for name in forget:
            without.get_parameter(name).zero_()
    total = {name: torch.zeros_like(p) for name, p in network.named_parameters()}
    teachers = dict.fromkeys(total, 0.0)
    for class_id, class_name in enumerate(CLASSES):
        rho = {name: weights[class_name]["forget" if name in forget else "rest"] for name in total}

        def weight_of(own: int, name: str, class_id: int = class_id, rho: dict[str, float] = rho) -> float:
            return rho[name] * (own == class_id)

        read = network if weights[class_name]["forget"] else without
        labels = sum(int(((b.target != IGNORED) & (b.lineage.token_class_ids == class_id)).sum()) for b in microbatches)
        for name, mean in oracle(read, microbatches, weight_of, exact).items():
            total[name] += mean * labels * bool(rho[name])
            teachers[name] += labels * bool(rho[name])
    return {name: value / max(1.0, teachers[name]) for name, value in total.items()}


def fitted(network: nn.Module, chosen: Any, *methods: Any, warns: str = "", **options: Any) -> Any:
    run = trainer(network, options.pop("data", source(documents())), chosen, methods=list(methods), **options)
    if warns:
        with pytest.warns(UserWarning, match=warns):
            run.fit()
    else:
        run.fit()
    return run


@pytest.mark.parametrize("kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_each_document_reads_the_region_or_zeros(kind: str) -> None:
    network, forget = made_of(kind)
    before, expected = values(network), by_document(network, forget, first_step(source(documents())), WEIGHTS)
    fitted(network, policy_of(KINDS[kind][1], WEIGHTS), MASKING, loss=exact, warns=KINDS[kind][2])
    # With SGD at rate 1 the change of a parameter is its gradient.
    for name, parameter in network.named_parameters():
        found = before[name] - parameter.detach()
        torch.testing.assert_close(found, expected[name], rtol=1e-9, atol=1e-12, msg=name)


def test_without_it_kept_documents_read_the_region() -> None:
    """The control: the policy's routes are the mask on gradients alone."""
    (network, _), (plain, _) = made_of("feed-forward"), made_of("feed-forward")
    fitted(network, policy_of(KINDS["feed-forward"][1], WEIGHTS), MASKING, loss=exact)
    fitted(plain, policy_of(KINDS["feed-forward"][1], WEIGHTS), loss=exact)
    assert not torch.allclose(network.get_parameter("head.weight"), plain.get_parameter("head.weight"), rtol=1e-6)


@pytest.mark.parametrize(
    "optimizers",
    [[AdamW(lr=0.01, weight_decay=0.1)], [SGD(lr=0.1, momentum=0.9)], [Muon(lr=0.02), AdamW(lr=0.01)]],
    ids=["AdamW", "SGD", "Muon"],
)
@pytest.mark.parametrize("kind", ["feed-forward", pytest.param("value embeddings", marks=pytest.mark.slow)])
def test_what_is_kept_never_follows_from_what_is_gone(kind: str, optimizers: Any) -> None:
    """Over four steps, every bit: where all data are labelled, removable documents reach their own region alone."""
    learnt = []
    for swapped in ((), (1,)):
        network, forget = made_of(kind)
        data = source(documents(90, swapped=swapped))
        options = {"optimizers": optimizers, "budget": "4ba", "data": data, "warns": KINDS[kind][2]}
        run = fitted(network.float(), policy_of(KINDS[kind][1], APART), MASKING, **options)
        assert run.plan.holds(Promise.NO_DIRECT_WRITE)
        learnt.append(values(network))
    assert {name for name in learnt[0] if not torch.equal(learnt[0][name], learnt[1][name])} == forget


@pytest.mark.parametrize(("weights", "methods"), [(APART, []), (WEIGHTS, [MASKING])], ids=["unmasked", "unlabelled"])
def test_without_the_mask_on_parameters_or_with_unlabelled_data_it_spreads(weights: Any, methods: Any) -> None:
    """The controls: the promise above is made by both masks, and an unlabelled class carries content on."""
    learnt = []
    for swapped in ((), (1,)):
        network, forget = made_of("feed-forward")
        data = source(documents(90, swapped=swapped))
        fitted(network, policy_of(KINDS["feed-forward"][1], weights), *methods, budget="4ba", data=data)
        learnt.append(values(network))
    moved = {name for name in learnt[0] if not torch.equal(learnt[0][name], learnt[1][name])}
    assert moved > forget


def test_where_every_class_teaches_the_region_the_bits_are_the_ungoverned_runs() -> None:
    ones = {name: {"rest": 1.0, "forget": 1.0} for name in CLASSES}
    learnt = []
    for chosen, methods in ((policy_of("blocks.0.*", ones), [MASKING]), (None, [])):
        network = model(dropout=0.1)
        fitted(network, chosen, *methods, budget="3ba", data=source(documents(90)))
        learnt.append(values(network))
    assert all(map(torch.equal, learnt[0].values(), learnt[1].values()))


def test_documents_that_see_one_another_withdraw_the_promise() -> None:
    run = trainer(Unmasked(model().config), source(documents()), policy_of("blocks.1.*", WEIGHTS), methods=[MASKING])
    assert run.plan.holds(Promise.NO_DIRECT_WRITE)
    run.fit()
    assert not run.plan.holds(Promise.NO_DIRECT_WRITE)


def test_with_gradient_routing_both_act() -> None:
    """Removable documents are cut where they may not teach; kept ones read zeros where nothing flows back anyway."""
    weights = {**WEIGHTS, "doubtful": {"rest": 1.0, "forget": 1.0, "side": 0.0}}
    weights = {name: {"side": 1.0} | row for name, row in weights.items()}
    globs = {"forget": "['blocks.0.feed_forward.*']", "side": "['blocks.1.feed_forward.*']"}
    globs["rest"] = "'*', exclude: ['blocks.0.feed_forward.*', 'blocks.1.feed_forward.*']"
    network = model().double()
    before = values(network)
    expected: dict[str, Tensor] = {}
    labels_of: dict[str, float] = {}
    data = source(documents())
    for class_id, class_name in enumerate(CLASSES):
        alone = copy.deepcopy(network)
        if class_name == "open":
            for p in alone.blocks[0].feed_forward.parameters():
                nn.init.zeros_(p)
        cut = {"open": 0, "doubtful": 1}.get(class_name)
        if cut is not None:
            alone.blocks[cut].feed_forward.register_forward_hook(lambda _, __, given: given.detach())

        def region(name: str) -> str:
            found = {"blocks.0.feed_forward": "forget", "blocks.1.feed_forward": "side"}
            return next((r for path, r in found.items() if name.startswith(f"{path}.")), "rest")

        def weight_of(own: int, name: str, class_id: int = class_id) -> float:
            return weights[CLASSES[own]][region(name)] * (own == class_id)

        labels = sum(
            int(((b.target != IGNORED) & (b.lineage.token_class_ids == class_id)).sum()) for b in first_step(data)
        )
        for name, mean in oracle(alone, first_step(data), weight_of, exact).items():
            if weights[class_name][region(name)]:
                expected[name] = expected.get(name, 0) + mean * labels
                labels_of[name] = labels_of.get(name, 0) + labels
    trainer(network, data, policy(weights, globs), methods=[MASKING, GradientRouting()], loss=exact).fit()
    for name, p in network.named_parameters():
        found = before[name] - p.detach()
        torch.testing.assert_close(found, expected[name] / labels_of[name], rtol=1e-9, atol=1e-12, msg=name)


class Checkpointed(Flattened):
    """Computes itself anew in the backward pass."""

    def forward(self, hidden: Tensor, documents: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, hidden, documents, use_reentrant=False)
        return found


def test_what_is_computed_anew_where_nobody_knows_for_whom_is_refused() -> None:
    """A layer that's known is computed anew as it was; a module that runs for each route isn't."""
    run = trainer(Body(Checkpointed()), source(documents()), policy_of("body.*", WEIGHTS), methods=[MASKING])
    with pytest.raises(PlanError, match=r"body\.bias is computed anew in the backward pass"):
        run.fit()


def test_known_layers_within_a_checkpoint_read_what_they_have_read() -> None:
    learnt = []
    for anew in (False, True):
        network = model()
        if anew:
            inner = network.blocks[0].feed_forward
            forward = inner.forward
            inner.forward = lambda given, forward=forward: checkpoint(forward, given, use_reentrant=False)
        fitted(network, policy_of("blocks.0.feed_forward.*", WEIGHTS), MASKING)
        learnt.append(values(network))
    assert all(map(torch.equal, learnt[0].values(), learnt[1].values()))


def test_what_divides_by_the_region_is_refused_by_name() -> None:
    network = model()
    network.blocks[0].feed_forward.up = nn.utils.parametrizations.weight_norm(network.blocks[0].feed_forward.up)
    chosen = policy_of("blocks.0.feed_forward.*", WEIGHTS)
    with pytest.raises(PlanError, match="With the parameters of forget at zero the loss is nan"):
        trainer(network, source(documents()), chosen, methods=[MASKING]).fit()


def test_rejected_documents_make_no_pack_one_of_both_kinds() -> None:
    """They're left out: what teaches the region runs with it whole, and may be computed anew."""
    weights = {name: row for name, row in WEIGHTS.items() if name != "open"}
    anew = fitted(Body(Checkpointed()), policy_of("body.*", weights), MASKING, warns="body")
    assert anew.plan.holds(Promise.NO_DIRECT_WRITE)
    learnt = []
    for methods in ([MASKING], []):
        network = model()
        fitted(network, policy_of("blocks.0.*", weights), *methods)
        learnt.append(values(network))
    assert all(map(torch.equal, learnt[0].values(), learnt[1].values()))


class Counting(nn.Module):
    """Counts its runs, and reads its weight in a way that's known by token, but not where some tokens read zeros."""

    runs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, hidden: Tensor, documents: Tensor) -> Tensor:
        del documents
        self.runs += 1
        return nn.functional.linear(hidden, self.weight * 1.0)


@pytest.mark.filterwarnings("ignore:Parameters are read in ways")
def test_a_search_for_what_has_to_run_apart_leaves_no_trace() -> None:
    """At first packs are of two classes that read the region, though not alike; then come some that don't read it."""
    weights = {**WEIGHTS, "open": {"rest": 1.0, "forget": 1.0}, "doubtful": {"rest": 1.0, "forget": 0.0}}
    torch.manual_seed(0)
    network = Body(Counting())
    run = trainer(network, None, policy_of("body.*", weights), methods=[MASKING], budget="2ba")
    runs = []
    with run:
        for classes in ((1, 2), (1, 0)):  # Of the taxonomy, in order of their names.
            rows = [{"tokens": torch.arange(5).numpy(), "row_id": i, "class_id": classes[i % 2]} for i in range(8)]
            run.step_microbatches(first_step(source(list(pack(rows, Packing(LENGTH, class_pure=False))))), [None] * 2)
            runs.append(int(network.get_buffer("body.runs")))
    assert runs == [2, 4]
