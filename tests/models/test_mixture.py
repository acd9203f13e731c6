"""The mixture of experts against the papers' formulas, token by token in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cosmati import History, InMemory, LanguageModel, RunConfig, Trainer
from cosmati.errors import BatchError, PlanError
from cosmati.models.mixture import ExpertLayer, MixtureConfig, MixtureModel, within_capacity
from cosmati.optim import AdamW

SMALL = {"vocabulary_size": 11, "sequence_length": 8, "width": 6, "num_blocks": 2, "num_heads": 1, "num_experts": 4}
DISPATCHES = ("gathered", "dense")


def config(**changes: Any) -> MixtureConfig:
    return MixtureConfig(**SMALL | changes)


def layer(**changes: Any) -> ExpertLayer:
    torch.manual_seed(0)
    return ExpertLayer(config(**changes)).double()


HIDDEN = torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])


def choices(made: ExpertLayer, token: Tensor) -> list[tuple[int, float]]:
    """Return a token's experts, best first, and their weights."""
    scores = (made.router.weight @ token).softmax(0).tolist()
    bias = [0.0] * 4 if made.bias is None else made.bias.tolist()
    best = sorted(range(4), key=lambda e: scores[e] + bias[e], reverse=True)[: made.config.top_k]
    return [(e, scores[e] / sum(scores[b] for b in best)) for e in best]


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_each_token_goes_to_its_experts(dispatch: str, top_k: int) -> None:
    made = layer(dispatch=dispatch, top_k=top_k)
    found, _ = made(HIDDEN, DOCUMENTS)
    for row in range(2):
        for place in range(5):
            token = HIDDEN[row, place]
            parts = [gate * made.experts[e](token) for e, gate in choices(made, token)]
            torch.testing.assert_close(found[row, place], torch.stack(parts).sum(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("factor", [0.3, 0.5, 0.75, 1.0, 2.0])
@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_an_expert_takes_what_it_has_room_for(factor: float, dispatch: str) -> None:
    made = layer(capacity_factor=factor, dispatch=dispatch)
    found, _ = made(HIDDEN, DOCUMENTS)
    room = dict.fromkeys(range(4), math.ceil(factor * 10 * 2 / 4))
    expected = torch.zeros(10, 6, dtype=torch.float64)
    chosen = [choices(made, token) for token in HIDDEN.flatten(0, 1)]
    dropped = 0
    for rank in range(2):
        for index, token in enumerate(HIDDEN.flatten(0, 1)):
            expert, gate = chosen[index][rank]
            if room[expert]:
                expected[index] += gate * made.experts[expert](token)
                room[expert] -= 1
            else:
                dropped += 1
    assert dropped or factor >= 1
    torch.testing.assert_close(found.flatten(0, 1), expected, rtol=1e-12, atol=1e-12)


def test_first_choices_come_before_second_ones() -> None:
    chosen = torch.tensor([[[0, 1], [1, 0], [0, 1]]])
    assert within_capacity(chosen, 1).tolist() == [[[True, False], [True, False], [False, False]]]
    assert within_capacity(chosen, 2).tolist() == [[[True, True], [True, False], [True, False]]]


@pytest.mark.parametrize("balance", ["sequence", "batch"])
def test_the_balancing_loss(balance: str) -> None:
    """E / k times the sum over experts of (share of the tokens that choose it) x (mean score), for each unit."""
    made = layer(balance=balance)
    _, found = made(HIDDEN, DOCUMENTS)
    units = {"batch": [torch.ones(2, 5, dtype=torch.bool)], "sequence": []}[balance] or [
        torch.stack([(DOCUMENTS[r] == d) & (r == row) for r in range(2)]) for row in range(2) for d in range(2)
    ]
    for unit in units:
        own = HIDDEN[unit]
        scores = (own @ made.router.weight.T).softmax(1)
        share = [sum(e in [c for c, _ in choices(made, t)] for t in own) / len(own) for e in range(4)]
        expected = 4 / 2 * sum(share[e] * scores[:, e].mean().item() for e in range(4))
        assert found[unit].mean().item() == pytest.approx(expected, rel=1e-12)


def test_the_balance_is_least_where_loads_are_even() -> None:
    made = layer(balance="batch", top_k=1)
    hidden = torch.eye(6, dtype=torch.float64)[None, :4]
    with torch.no_grad():
        made.router.weight.copy_(20 * torch.eye(4, 6))
    even = made(hidden, torch.zeros(1, 4))[1].mean().item()
    uneven = made(hidden[:, [0, 0, 0, 1]], torch.zeros(1, 4))[1].mean().item()
    assert even == pytest.approx(1.0)
    assert uneven == pytest.approx(4 * (0.75**2 + 0.25**2), rel=1e-6)


def test_the_bias_moves_against_the_loads_and_acts_on_the_choice_alone() -> None:
    made = layer(balance="bias", bias_rate=0.5)
    assert made.bias is not None
    before = [choices(made, token) for token in HIDDEN.flatten(0, 1)]
    loads = [sum(e in [c for c, _ in own] for own in before) for e in range(4)]
    found, balance = made(HIDDEN, DOCUMENTS)
    assert balance is None
    assert made.bias.tolist() == [0.5 * ((load < 5) - (load > 5)) for load in loads]
    parts = [sum(g * made.experts[e](t) for e, g in own) for own, t in zip(before, HIDDEN.flatten(0, 1), strict=True)]
    torch.testing.assert_close(found.flatten(0, 1), torch.stack(parts), rtol=1e-12, atol=1e-12)
    moved = made.bias.clone()
    made.eval()
    again, _ = made(HIDDEN, DOCUMENTS)
    assert torch.equal(made.bias, moved)
    for token, given in zip(HIDDEN.flatten(0, 1), again.flatten(0, 1), strict=True):
        expected = sum(gate * made.experts[e](token) for e, gate in choices(made, token))
        torch.testing.assert_close(given, expected, rtol=1e-12, atol=1e-12)


def test_what_couples_rows_says_so() -> None:
    assert not layer(dispatch="dense").couples
    assert not layer(dispatch="dense", balance="bias").couples
    for changes in ({"dispatch": "gathered"}, {"balance": "batch"}, {"capacity_factor": 1.0}):
        assert layer(**{"dispatch": "dense"} | changes).couples == {"rows"}


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_shapes_documents_and_the_loss(dispatch: str) -> None:
    torch.manual_seed(0)
    model = MixtureModel(config(dispatch=dispatch, balance_weight=0.5)).double()
    tokens = torch.arange(8)[None]
    belongs = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    found = model(tokens, belongs)
    assert found.logits.shape == (1, 8, 11)
    assert 0.5 <= found.aux["balance"].item() < 2.0
    # A document is what it would be in a row of its own, up to the tables of rotations, which are float32.
    torch.testing.assert_close(found.logits[:, 3:], model(tokens[:, 3:]).logits, rtol=1e-6, atol=1e-7)
    targets = torch.arange(1, 9)[None]
    loss = LanguageModel(11)(model, {"input": tokens, "target": targets, "documents": belongs})
    expected = F.cross_entropy(found.logits.float()[0], targets[0]) + found.aux["balance"]
    torch.testing.assert_close(loss.mean(), expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(BatchError, match="9 tokens"):
        model(torch.zeros(1, 9, dtype=torch.int64))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"top_k": 5}, "top_k=5"),
        ({"balance": "even"}, "balance='even'"),
        ({"dispatch": "sparse"}, "dispatch='sparse'"),
        ({"capacity_factor": 0.0}, "capacity_factor"),
        ({"balance_weight": -1.0}, "balance_weight"),
        ({"num_heads": 4}, "4 heads"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        config(**changes)


@pytest.mark.long
@pytest.mark.parametrize("balance", ["sequence", "bias"])
def test_it_learns_a_text(balance: Any) -> None:
    text = torch.frombuffer(bytearray(b"the cat sat on the mat and the dog sat on the log. " * 40), dtype=torch.uint8)
    rows = text[: 33 * 60].view(60, 33).long()
    torch.manual_seed(0)
    model = MixtureModel(MixtureConfig(sequence_length=32, width=32, num_blocks=2, num_heads=2, balance=balance))
    config = RunConfig(budget="60ba", num_threads=1)
    history = History()
    data = InMemory(rows, 12)
    Trainer(model, LanguageModel(256), data, optimizers=AdamW(lr=5e-3), observers=history, config=config).fit()
    losses = [loss for _, loss in history.losses]
    assert losses[0] > 4.0
    assert losses[-1] < 1.0
