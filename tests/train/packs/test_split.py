"""Modules that run once for each route: what each document alone may teach, in float64; and what is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cosmati.core.batch import Batch
from cosmati.core.loss import Loss
from cosmati.core.plan import Promise
from cosmati.core.rng import position_key
from cosmati.errors import PlanError
from cosmati.models.gpt import places_in, seen_within
from cosmati.models.mixture import ExpertLayer, MixtureConfig, MixtureModel
from cosmati.models.state_space import StateSpaceConfig, StateSpaceModel
from cosmati.train.observers import History
from tests.train.packs.samples import (
    CLASSES,
    LENGTH,
    REGIONS,
    VOCABULARY,
    WEIGHTS,
    documents,
    first_step,
    model,
    policy,
    source,
    trainer,
    values,
)

pytestmark = pytest.mark.long

NARROW = {"vocabulary_size": VOCABULARY, "width": 8, "num_blocks": 2, "num_heads": 2}


class Body(nn.Module):
    """An embedding, something that reads parameters in a way of its own, and a head."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(VOCABULARY, 8), body
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        logits: Tensor = self.head(self.norm(hidden + self.body(hidden, documents)))
        return logits


class Flattened(nn.Module):
    """As GPT-2's `Conv1D` of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, hidden: Tensor, documents: Tensor) -> Tensor:
        del documents
        return torch.addmm(self.bias, hidden.view(-1, 8), self.weight).view(hidden.shape)


class Attending(nn.Module):
    """PyTorch's attention, with dropout, told of documents."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)

    def forward(self, hidden: Tensor, documents: Tensor) -> Tensor:
        unseen = ~seen_within(documents).repeat(1, 2, 1, 1).flatten(0, 1)
        found: Tensor = self.inner(hidden, hidden, hidden, attn_mask=unseen, need_weights=False)[0]
        return found


class Recurrent(nn.Module):
    """An LSTM cell, whose state begins anew in each document; it reads rows, and never tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 8)

    def forward(self, hidden: Tensor, documents: Tensor) -> Tensor:
        places, found = places_in(documents), []
        state = (hidden.new_zeros(len(hidden), 8), hidden.new_zeros(len(hidden), 8))
        for place in range(hidden.shape[1]):
            goes_on = places[:, place, None] > 0
            state = self.cell(hidden[:, place], tuple(torch.where(goes_on, part, 0.0) for part in state))
            found.append(state[0])
        return torch.stack(found, dim=1)


def gpt(**options: Any) -> Callable[[], nn.Module]:
    return lambda: model(**options)


def mixture(**options: Any) -> Callable[[], nn.Module]:
    more: dict[str, Any] = {"sequence_length": LENGTH, "num_experts": 3, "balance": "none"}
    return lambda: MixtureModel(MixtureConfig(**NARROW | more | options))


def state_space() -> nn.Module:
    return StateSpaceModel(StateSpaceConfig(**NARROW, state_size=3, kernel_size=3))


BODY = {**REGIONS, "lower": "['body.*']", "upper": "['norm.*']", "embedding": "['embedding.*']"}
KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, str], str]] = {
    "value embeddings": (gpt(value_embeddings=1), REGIONS, "blocks.0.attention, blocks.1.attention"),
    "gathered experts": (mixture(), REGIONS, "blocks.0.mixture, blocks.1.mixture"),
    "balanced experts": (mixture(balance="sequence", balance_weight=0.5), REGIONS, "blocks.0.mixture"),
    "dense experts": (mixture(dispatch="dense", balance="sequence", balance_weight=0.5), REGIONS, ""),
    "state space": (state_space, REGIONS, ""),
    "flattened": (lambda: Body(Flattened()), BODY, "several classes, and take as many times their time: body."),
    "PyTorch's attention": (lambda: Body(Attending()), BODY, "body.inner"),
    "recurrent": (lambda: Body(Recurrent()), BODY, "body"),
}


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[kind][0]()


def region_of(name: str) -> str:
    first = {"embedding": "embedding", "head": "head", "body": "lower", "value_embeddings": "embedding"}
    return first.get(name.split(".", maxsplit=1)[0], "lower" if name.startswith("blocks.0.") else "upper")


def token_losses(network: nn.Module, data: Any) -> tuple[Tensor, Any]:
    """Return each token's cross-entropy, and what the model gives."""
    output = network(data["input"], data["documents"])
    logits = getattr(output, "logits", output)
    found = F.cross_entropy(logits.flatten(0, 1), data["target"].flatten(), reduction="none")
    return found.view(data["target"].shape), output


def exact(network: nn.Module, data: Any) -> Loss:
    """Cross-entropy in the model's own type, with what the model adds."""
    found, output = token_losses(network, data)
    weight = (data["target"] != -100).double().sum(1)
    return Loss(found.sum(), weight.sum(), found.sum(1), weight, getattr(output, "aux", {}))


def with_balances(network: nn.Module, data: Any) -> tuple[Tensor, list[Tensor]]:
    """Return each token's cross-entropy, and its part of each block's balancing loss."""
    balances: list[Tensor] = []
    layers = [layer for layer in network.modules() if isinstance(layer, ExpertLayer)]
    handles = [layer.register_forward_hook(lambda *given: balances.append(given[2][1])) for layer in layers]
    found, _ = token_losses(network, data)
    for handle in handles:
        handle.remove()
    return found, balances


def by_document(network: nn.Module, batches: Sequence[Batch], scale: float = 0.0) -> dict[str, Tensor]:
    """Differentiate each document's part of the loss by itself, add it up by weight, and divide by the labels.

    Of a balancing loss, whose mean over tokens weighs as much as the mean over labels, a document's part is that of its
    tokens.

    Args:
        network: keeps documents apart.
        batches: of a step.
        scale: of the balancing loss.
    """
    named = dict(network.named_parameters())
    total = {name: torch.zeros_like(p) for name, p in named.items()}
    teachers = dict.fromkeys(named, 0)
    for index, batch in enumerate(batches):
        torch.manual_seed(position_key(0, "forward", 0, index))
        found, balances = with_balances(network, batch.data)
        num_labels = int((batch.target != -100).sum())
        if scale:
            found = found + scale * num_labels * torch.stack(balances).mean(0) / found.numel()
        classes = batch.lineage.token_class_ids
        assert classes is not None
        for row, number in {(r, int(n)) for r in range(len(found)) for n in batch.data["documents"][r]}:
            own = batch.data["documents"][row] == number
            class_id = int(classes[row][own][0])
            if class_id < 0:  # padding
                continue
            given = torch.autograd.grad(
                found[row][own].sum(), list(named.values()), retain_graph=True, allow_unused=True
            )
            labels = int((batch.target[row][own] != -100).sum())
            for name, gradient in zip(named, given, strict=True):
                rho = WEIGHTS[CLASSES[class_id]][region_of(name)]
                teachers[name] += labels * (rho != 0)
                if gradient is not None:
                    total[name] += rho * gradient
    return {name: value / teachers[name] for name, value in total.items()}


def losses_of(made: Any) -> list[tuple[int, float]]:
    (history,) = made.observers
    found: list[tuple[int, float]] = history.losses
    return found


def run(kind: str, network: nn.Module, **options: Any) -> Any:
    made = trainer(network, source(documents()), policy(regions=KINDS[kind][1]), observers=History(), **options)
    if KINDS[kind][2]:
        with pytest.warns(UserWarning, match=KINDS[kind][2]):
            made.fit()
    else:
        made.fit()
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_each_region_learns_what_each_document_alone_may_teach_it(kind: str) -> None:
    network = build(kind).double()
    before = values(network)
    expected = by_document(
        network, first_step(source(documents())), 0.5 if "balanced" in kind or "dense" in kind else 0
    )
    run(kind, network, loss=exact)
    for name, parameter in network.named_parameters():
        # With SGD at rate 1 the change of a parameter is its gradient.
        torch.testing.assert_close(before[name] - parameter.detach(), expected[name], rtol=1e-11, atol=1e-13)


class Checkpointed(nn.Module):
    """The whole model runs for each route, since it reads positions by itself, and so would attention within it."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(LENGTH, 8))
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.body = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.is_anew = True

    def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.position[places_in(documents)]
        unseen = ~seen_within(documents).repeat(1, 2, 1, 1).flatten(0, 1)
        logits: Tensor = self.head(
            checkpoint(self.body, hidden, unseen, use_reentrant=False) if self.is_anew else self.body(hidden, unseen)
        )
        return logits


@pytest.mark.filterwarnings("ignore:Parameters are read in ways")
def test_what_is_checkpointed_within_what_runs_for_each_route_is_computed_anew_as_it_ran() -> None:
    regions = {**BODY, "embedding": "[embedding.*, position]", "upper": "['body.norm*']"}
    regions["lower"] = "'body.*', exclude: ['body.norm*']"
    learnt = []
    for is_anew in (True, False):
        torch.manual_seed(0)
        network = Checkpointed().double()
        network.is_anew = is_anew
        trainer(network, source(documents()), policy(regions=regions), loss=exact, budget="2ba").fit()
        learnt.append(values(network))
    assert all(torch.equal(learnt[0][name], learnt[1][name]) for name in learnt[0])


@pytest.mark.parametrize("kind", KINDS)
def test_what_runs_for_each_route_gives_what_it_gives_when_it_runs_once(kind: str) -> None:
    """Loss and draws are the ungoverned run's in bits, and so is a region that all classes may teach alike."""
    governed, plain = build(kind), build(kind)
    made = run(kind, governed, loss=exact)
    other = trainer(plain, source(documents()), None, loss=exact, observers=History())
    other.fit()
    assert losses_of(made) == losses_of(other)
    assert torch.equal(governed.get_parameter("head.weight"), plain.get_parameter("head.weight"))
    assert not torch.equal(governed.get_parameter("norm.weight"), plain.get_parameter("norm.weight"))


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({}, r"blocks\.0\.mixture couples rows"),
        ({"dispatch": "dense", "balance": "batch"}, r"blocks\.0\.mixture couples rows"),
        ({"dispatch": "dense", "capacity_factor": 1.0}, r"blocks\.0\.mixture couples rows"),
        ({"dispatch": "dense", "balance": "bias"}, r"forward changes the buffers|follows from another's"),
        ({"dispatch": "dense", "balance": "sequence"}, ""),
        ({"dispatch": "dense"}, ""),
    ],
)
@pytest.mark.filterwarnings("ignore:Parameters are read in ways")
def test_what_lets_experts_reach_from_document_to_document_is_named(options: dict[str, Any], because: str) -> None:
    made = trainer(mixture(**options)(), source(documents()), policy())
    is_declared = "couples rows" in because
    assert made.plan.holds(Promise.NO_DIRECT_WRITE) != is_declared
    made.fit()
    broken = [g.because for g in made.plan.guarantees if g.promise is Promise.NO_DIRECT_WRITE and not g.holds]
    assert bool(broken) == bool(because)
    # What a bias changes is seen in it or, where a look's second pass chose other experts for it, in what they read.
    assert all(re.search(because, one) for one in broken)


@pytest.mark.filterwarnings("ignore:Parameters are read in ways")
@pytest.mark.parametrize("dispatch", ["gathered", "dense"])
def test_a_bias_moves_once_for_each_microbatch_however_often_its_layer_runs(dispatch: str) -> None:
    biases = []
    for chosen in (policy(), None):
        torch.manual_seed(0)
        network = mixture(balance="bias", dispatch=dispatch)()
        trainer(network, source(documents()), chosen, num_microbatches=2).fit()
        biases.append(network.get_buffer("blocks.1.mixture.bias"))
    # The governed run looks at packs by two passes more, and looks for modules that run apart.
    assert biases[1].abs().max() > 0
    assert torch.equal(*biases)


class Added(nn.Module):
    """Gives a number for the loss beside the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Body(Flattened())

    def forward(self, tokens: Tensor, documents: Tensor) -> Any:
        hidden = self.inner.embedding(tokens)
        body = self.inner.body
        assert isinstance(body, Flattened)
        return self.inner.head(body(hidden, documents)), body.weight.square().mean()


def with_penalty(network: nn.Module, data: Any) -> Loss:
    logits, penalty = network(data["input"], data["documents"])
    values = F.cross_entropy(logits.flatten(0, 1), data["target"].flatten(), reduction="none")
    weight = (data["target"] != -100).sum()
    return Loss(values.sum(), weight, aux={"penalty": penalty})


def test_what_no_module_can_take_apart_is_refused_by_name() -> None:
    regions = {**BODY, "embedding": "['inner.embedding.*']", "lower": "['inner.body.*']", "upper": "['inner.norm.*']"}
    regions["head"] = "['inner.head.*']"
    with pytest.raises(PlanError, match=r"inner\.body\.weight \(.*run once for each route"):
        trainer(Added(), source(documents()), policy(regions=regions), loss=with_penalty).fit()


class OfTransformers(nn.Module):
    """GPT-2, whose `Conv1D` flattens rows and tokens."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers", reason="the extra `llm` isn't installed")
        sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 8, "n_layer": 2, "n_head": 2}
        ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False, "tie_word_embeddings": False}
        self.inner = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends)).train()

    def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
        found: Tensor = self.inner(input_ids=tokens, position_ids=places_in(documents)).logits
        return found


@pytest.mark.filterwarnings("ignore:::transformers")
def test_gpt2_of_transformers_trains_on_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout: what runs for each route has the draws of one run."""
    torch.manual_seed(0)
    network = OfTransformers().double()
    layers = {"wte": "embedding", "wpe": "embedding", "0": "lower", "lm_head": "head"}

    def region(name: str) -> str:
        return next((found for part, found in layers.items() if f".{part}." in name), "upper")

    regions = {name: str([p for p, _ in network.named_parameters() if region(p) == name]) for name in REGIONS}
    monkeypatch.setattr(f"{__name__}.region_of", region)
    before = values(network)
    expected = by_document(network, first_step(source(documents())))
    made = trainer(network, source(documents()), policy(regions=regions), loss=exact)
    with pytest.warns(UserWarning, match=r"time: inner\.transformer\.h\.0\.attn\.c_attn, .*\.mlp\.c_proj\. Packs"):
        made.fit()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(before[name] - parameter.detach(), expected[name], rtol=1e-11, atol=1e-13)
    assert made.plan.holds(Promise.NO_DIRECT_WRITE)
