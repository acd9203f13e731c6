"""The swap test: the same run twice, where in one a denied class's rows hold something else in the last step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmati.core.batch import Batch, Data, Lineage
from cosmati.core.loss import Classification, LanguageModel, LossFunction
from cosmati.core.method import Method
from cosmati.core.plan import Promise
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.optim import Optimizer
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import PolicyFile, load_policy
from cosmati.train.config import RunConfig
from cosmati.train.ingredients import AnyOptimizer
from cosmati.train.trainer import Trainer

TAXONOMY = Taxonomy("t", "1", (("open", "free to learn from"), ("doubtful", "only near the output")))
PAIR = ("doubtful", "near_input")
NUM_STEPS = 4
ROWS = 4


@dataclass(frozen=True)
class Positions:
    """Microbatches as a pure function of the position: odd ones are of the denied class.

    Args:
        make: a microbatch's data, given a generator.
        swap: other content for a microbatch's data.
        swapped: the step in which the denied class's rows are swapped; None swaps none.
        second: class of odd microbatches.
    """

    make: Callable[[torch.Generator], Data]
    swap: Callable[[Data], Data]
    swapped: int | None
    num_microbatches: int = 4
    steps_per_epoch: int = 16
    rows_per_step: int = 4 * ROWS
    class_names: tuple[str, ...] = ("open", "doubtful")
    digest: str = "positions"

    def order(
        self, *, seed: int, num_microbatches: int, route_pure: bool, classes: Collection[int] | None = None
    ) -> Positions:
        return self

    def class_id(self, step: int, index: int) -> int:
        return (index if self.num_microbatches > 1 else step) % 2

    def microbatch(self, step: int, index: int) -> Batch:
        first = (step * self.num_microbatches + index) * ROWS
        data = self.make(torch.Generator().manual_seed(first))
        class_id = self.class_id(step, index)
        if class_id == 1 and step == self.swapped:
            data = self.swap(data)
        lineage = Lineage(first + torch.arange(ROWS), torch.full((ROWS,), class_id))
        return Batch(data, lineage, class_id)


def features(generator: torch.Generator, *shape: int) -> Data:
    """Rows of numbers, and one of three labels each."""
    return torch.randn(ROWS, *shape, generator=generator), torch.randint(3, (ROWS,), generator=generator)


def other_features(data: Data) -> Data:
    """Rows of quite other numbers, and other labels."""
    return data[0] * 30 + 7, (data[1] + 1) % 3


THREE = Classification(3)


@dataclass(frozen=True)
class Case:
    """A model, what it reads, and which of its parameters the denied class may not move."""

    build: Callable[[], nn.Module]
    near_input: tuple[str, ...]
    near_output: tuple[str, ...]
    loss: LossFunction = THREE
    make: Callable[[torch.Generator], Data] = lambda generator: features(generator, 6)
    swap: Callable[[Data], Data] = other_features
    tied: bool = False

    def policy(self, rules: str = "") -> PolicyFile:
        """Two regions, of which the denied class may teach the one near the output."""
        regions = (
            f"{{near_input: {{params: {list(self.near_input)}}}, near_output: {{params: {list(self.near_output)}}}}}"
        )
        rules = rules or (
            "[{class: open, weight: 1}, {class: doubtful, region: near_input, weight: 0},"
            " {class: doubtful, region: near_output, weight: 1}]"
        )
        allow = "allow: {tied: true}\n" if self.tied else ""
        return load_policy(f"version: 1\ntaxonomy: t\n{allow}regions: {regions}\nrules: {rules}\n")


class Quantised(nn.Module):
    """Rows become the nearest entry of a codebook, which follows their average in the forward pass (VQ-VAE)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(4, 3)
        self.register_buffer("codebook", torch.randn(8, 4))

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.encoder(rows)
        nearest = torch.cdist(hidden, self.codebook.clone()).argmin(1)
        if self.training:
            chosen = F.one_hot(nearest, 8).float()
            means = chosen.T @ hidden.detach() / chosen.sum(0)[:, None].clamp(min=1)
            self.codebook.lerp_(torch.where(chosen.sum(0)[:, None] > 0, means, self.codebook), 0.1)
        return self.decoder(hidden + (self.codebook[nearest] - hidden).detach())


class Experts(nn.Module):
    """A mixture whose router has a bias against experts that had too many rows (DeepSeek-V3's balancing)."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.trunk = nn.Linear(6, 4), nn.Linear(6, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 3) for _ in range(4))
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, rows: Tensor) -> Tensor:
        logits = self.router(rows) + self.bias
        load = F.one_hot(logits.argmax(1), 4).float().mean(0)
        if self.training:
            self.bias += 0.3 * (0.25 - load).sign()
        outputs = torch.stack([expert(self.trunk(rows)) for expert in self.experts], 1)
        return (logits.softmax(1)[..., None] * outputs).sum(1)


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def _gpt(*, tied: bool) -> nn.Module:
    return GPT(GPTConfig(vocabulary_size=16, sequence_length=8, width=8, num_blocks=2, num_heads=2, tied=tied))


def _tokens(generator: torch.Generator) -> Data:
    return torch.randint(16, (ROWS, 9), generator=generator)


MODELS = {
    "MLP": Case(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), ("0.*",), ("2.*",)),
    "CNN with BatchNorm": Case(
        _cnn, ("0.*", "1.*", "3.*", "4.*"), ("8.*",), make=lambda generator: features(generator, 1, 8, 8)
    ),
    "GPT": Case(
        lambda: _gpt(tied=False),
        ("embedding*", "blocks.0.*"),
        ("blocks.1.*", "norm*", "head*"),
        LanguageModel(16),
        _tokens,
        lambda tokens: (tokens * 5 + 3) % 16,
    ),
    "tied GPT": Case(
        lambda: _gpt(tied=True),
        ("embedding*", "head*", "blocks.0.*"),
        ("blocks.1.*", "norm*"),
        LanguageModel(16),
        _tokens,
        lambda tokens: (tokens * 5 + 3) % 16,
        tied=True,
    ),
    "codebook": Case(Quantised, ("encoder.*",), ("decoder.*",)),
    "expert bias": Case(Experts, ("router.*", "trunk.*"), ("experts.*",)),
}


def trained(
    case: Case,
    optimizers: Sequence[AnyOptimizer] | Callable[[nn.Module], Sequence[AnyOptimizer]],
    methods: Sequence[Method] = (),
    *,
    swapped: int | None = None,
    num_microbatches: int = 4,
    num_steps: int = NUM_STEPS,
    rules: str = "",
) -> Trainer:
    """Train a case on its rows, swapped in one step or not."""
    torch.manual_seed(0)
    model = case.build()
    source = Positions(
        case.make, case.swap, swapped, num_microbatches=num_microbatches, rows_per_step=num_microbatches * ROWS
    )
    trainer = Trainer(
        model,
        case.loss,
        source,
        optimizers=optimizers(model) if callable(optimizers) else optimizers,
        methods=methods,
        policy=case.policy(rules),
        taxonomy=TAXONOMY,
        config=RunConfig(budget=f"{num_steps}ba", num_microbatches=num_microbatches, num_threads=1),
    )
    trainer.fit()
    return trainer


def denied_state(trainer: Trainer) -> dict[str, Tensor]:
    """Parameters and buffers of the denying region, as they are and as they're averaged."""
    regions = trainer.assembly.regions
    names = set(regions.parameters[regions.names.index(PAIR[1])])
    for name, _ in trainer.model.named_buffers():
        region = regions.region_of_buffer(name)
        names |= {name} if region is None or regions.names[region] == PAIR[1] else set()
    state = {name: value.clone() for name, value in trainer.model.state_dict().items() if name in names}
    with trainer.averaged() as model:
        return state | {f"averaged {n}": value.clone() for n, value in model.state_dict().items() if n in names}


def promised(trainer: Trainer) -> bool:
    """Whether the run says that the denied class moved nothing of the denying region."""
    return trainer.plan.holds(Promise.NO_DIRECT_WRITE, PAIR)


def leaked(one: Trainer, other: Trainer) -> list[str]:
    """Names of what differs in the denying region."""
    first, second = denied_state(one), denied_state(other)
    return [name for name in first if not torch.equal(first[name], second[name])]


__all__ = ["MODELS", "NUM_STEPS", "PAIR", "Case", "Optimizer", "Positions", "leaked", "promised", "trained"]
