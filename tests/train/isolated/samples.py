"""Models with what is one class's own, and the same run with the class present, tombstoned, or never there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.batch import Data
from cosmati.core.loss import Classification, LanguageModel, LossFunction
from cosmati.core.method import Method
from cosmati.core.plan import Guarantee, Promise
from cosmati.data.in_memory import InMemory
from cosmati.methods import IsolatedAdapters
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.optim import SGD, AdamW, Muon
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import PolicyFile, load_policy
from cosmati.train.config import RunConfig
from cosmati.train.ingredients import AnyOptimizer
from cosmati.train.trainer import Trainer

CLASSES = ("open", "personal", "other")
TAXONOMY = Taxonomy("t", "1", tuple((name, name) for name in CLASSES))
PAIR = ("personal", "own")
THREE = Classification(3)
ROWS = 4


def policy(*, trunk: str = "0", own: str = "0", regions: str = "", rules: str = "", name: str = "own") -> PolicyFile:
    """Return a policy that confines `personal` to what is its own.

    Args:
        trunk: what `personal` may teach of all others.
        own: what others may teach of what is `personal`'s own.
        regions: in place of the two.
        rules: more of them.
        name: of the region of its own.
    """
    regions = regions or f"{{trunk: {{params: '*', exclude: '*.isolated.*'}}, {name}: {{tag: isolated/personal}}}}"
    return load_policy(
        f"version: 1\ntaxonomy: t\nregions: {regions}\nrules:\n"
        f"  - {{class: '**', weight: 1}}\n  - {{class: '**', region: {name}, weight: {own}}}\n"
        f"  - {{class: personal, region: trunk, weight: {trunk}}}\n"
        f"  - {{class: personal, region: {name}, weight: 1}}\n{rules}"
    )


@dataclass(frozen=True)
class Case:
    """A model, its rows, and what `personal` has of its own."""

    build: Callable[[], nn.Module]
    rows: Callable[[torch.Generator, int], Data]
    adapters: IsolatedAdapters
    loss: LossFunction = THREE


def _features(generator: torch.Generator, num: int, *shape: int) -> Data:
    return torch.randn(num, *shape, generator=generator), torch.randint(3, (num,), generator=generator)


class Attending(nn.Module):
    """An encoder of PyTorch's own."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(8, 3)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.encoder(rows).mean(1))


class Stem(nn.Module):
    """A convolution and its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, rows: Tensor) -> Tensor:
        return self.norm(self.conv(rows)).relu()


def cnn(*, conv: type[nn.Module] = nn.Conv2d, norm: type[nn.Module] = nn.BatchNorm2d) -> nn.Module:
    """Return two convolutions, a norm and a head."""
    pool = nn.AdaptiveAvgPool2d(1) if conv is nn.Conv2d else nn.AdaptiveAvgPool1d(1)
    return nn.Sequential(
        *(conv(1, 4, 3, padding=1, bias=False), norm(4), nn.ReLU(), nn.Dropout(0.2)),  # type: ignore[call-arg, arg-type]
        *(conv(4, 4, 3, stride=2), nn.ReLU(), pool, nn.Flatten(), nn.Linear(4, 3)),  # type: ignore[call-arg, arg-type]
    )


def _gpt() -> nn.Module:
    return GPT(GPTConfig(vocabulary_size=16, sequence_length=8, width=8, num_blocks=2, num_heads=2, dropout=0.1))


def _tokens(generator: torch.Generator, num: int) -> Data:
    return torch.randint(16, (num, 9), generator=generator)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def _of_personal(**options: Any) -> IsolatedAdapters:
    return IsolatedAdapters(classes="personal", rank=2, **options)


CASES = {
    "MLP, low rank": Case(_mlp, lambda g, n: _features(g, n, 6), _of_personal()),
    "MLP, expert": Case(_mlp, lambda g, n: _features(g, n, 6), _of_personal(layers="3", kind="expert")),
    "MLP, beside": Case(_mlp, lambda g, n: _features(g, n, 6), _of_personal(layers="3", kind="beside")),
    "CNN with BatchNorm": Case(cnn, lambda g, n: _features(g, n, 1, 8, 8), _of_personal()),
    "CNN, expert with BatchNorm": Case(
        lambda: nn.Sequential(Stem(), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
        lambda g, n: _features(g, n, 1, 8, 8),
        _of_personal(layers="0", kind="expert"),
    ),
    "Conv1d": Case(
        lambda: cnn(conv=nn.Conv1d, norm=nn.BatchNorm1d), lambda g, n: _features(g, n, 1, 8), _of_personal()
    ),
    "attention": Case(Attending, lambda g, n: _features(g, n, 5, 8), _of_personal()),
    "GPT, low rank": Case(_gpt, _tokens, _of_personal(), LanguageModel(16)),
    "GPT, expert": Case(_gpt, _tokens, _of_personal(layers="blocks.*.feed_forward", kind="expert"), LanguageModel(16)),
    "GPT, attention beside": Case(
        _gpt, _tokens, _of_personal(layers="blocks.*.attention", kind="beside"), LanguageModel(16)
    ),
}
OPTIMIZERS: dict[str, Callable[[], list[AnyOptimizer]]] = {
    "SGD": lambda: [SGD(lr=0.1, momentum=0.9, weight_decay=0.01)],
    "AdamW": lambda: [AdamW(lr=0.01)],
    "Muon": lambda: [Muon(lr=0.02), AdamW(lr=0.01)],
}


def sampled(names: Iterable[Any], others: Sequence[Any]) -> list[Any]:
    """Return all pairs as parameters, of which each name with one of the others, in turns, isn't slow."""
    return [
        pytest.param(name, other, marks=() if place == index % len(others) else pytest.mark.slow)
        for index, name in enumerate(names)
        for place, other in enumerate(others)
    ]


def source(case: Case, *, num_rows: int = 96, rows_per_step: int = 4 * ROWS, swapped: bool = False) -> InMemory:
    """Return rows of three classes; those of `personal` are quite others where they're swapped."""
    data = case.rows(torch.Generator().manual_seed(7), num_rows)
    class_ids = torch.arange(num_rows) % 3
    if swapped:
        other = case.rows(torch.Generator().manual_seed(8), num_rows)
        chosen = class_ids == 1
        pairs = [(data, other)] if isinstance(data, Tensor) else zip(data, other, strict=True)
        found = [torch.where(chosen.view(-1, *[1] * (one.ndim - 1)), two, one) for one, two in pairs]
        data = found[0] if isinstance(data, Tensor) else tuple(found)
    return InMemory(data, rows_per_step, class_ids, CLASSES)


def trainer(
    case: Case,
    data: Any,
    optimizers: Sequence[AnyOptimizer] | None = None,
    methods: Sequence[Method] = (),
    *,
    num_microbatches: int = 4,
    budget: str = "6ba",
    chosen: PolicyFile | None = None,
    loss: LossFunction | None = None,
    **options: Any,
) -> Trainer:
    """Return the run of a case."""
    torch.manual_seed(0)
    config = RunConfig(budget=budget, num_microbatches=num_microbatches, num_threads=1, **options.pop("config", {}))
    return Trainer(
        case.build(),
        loss or case.loss,
        data,
        optimizers=[AdamW(lr=0.01)] if optimizers is None else optimizers,
        methods=[case.adapters, *methods],
        policy=chosen or policy(),
        taxonomy=TAXONOMY,
        config=config,
        **options,
    )


def fitted(*args: Any, **options: Any) -> Trainer:
    """Return the run, after its end."""
    made = trainer(*args, **options)
    made.fit()
    return made


_FLAGS = {"moved", "counts"}
"""Of averages, one for each parameter."""


def others(run: Trainer, *, averaged: bool = False) -> dict[str, Tensor]:
    """Return all that a run has but what is `personal`'s own: weights, buffers, states of optimizers and methods."""
    region = run.assembly.regions
    own = set(region.parameters[region.names.index(PAIR[1])])
    names = {id(p): name for name, p in run.model.named_parameters()}
    inside = [name.rpartition(".")[0] for name in own]
    found = {
        n: v.clone() for n, v in run.model.state_dict().items() if n not in own and n.rpartition(".")[0] not in inside
    }
    for scheduled in run.assembly.optimizers:
        for parameter, state in scheduled.optimizer.state.items():
            found |= {
                f"{names[id(parameter)]}/{key}": value.clone()
                for key, value in state.items()
                if isinstance(value, Tensor) and names[id(parameter)] not in own
            }
    weights = run.assembly.layout.weights().names
    shared = [place for place, name in enumerate(weights) if name not in own]
    for index, state in run.states.items():
        found |= {f"{index}/{n}": v.clone() for n, v in state.items() if n.removeprefix("average/") not in own | _FLAGS}
        found |= {f"{index}/{n}": v[shared] for n, v in state.items() if n in _FLAGS}
    if averaged:
        with run.averaged() as model:
            found |= {f"averaged {n}": v.clone() for n, v in model.state_dict().items() if n in found}
    return found


def differing(one: dict[str, Tensor], two: dict[str, Tensor]) -> list[str]:
    """Return names of what isn't equal in every bit."""
    assert one.keys() == two.keys()
    return [name for name in one if not torch.equal(one[name], two[name])]


def promise(run: Trainer) -> Guarantee:
    """Return what the run says of `personal` and what is its own."""
    (found,) = [g for g in run.plan.guarantees if g.promise is Promise.ISOLATED and g.pair == PAIR]
    return found
