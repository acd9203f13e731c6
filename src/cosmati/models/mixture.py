"""A byte-level transformer whose feed-forward layers are mixtures of experts (Shazeer et al., 2017, arXiv 1701.06538).

Each token goes to the `top_k` experts that the router likes best, weighted by how much. What keeps all experts in work
is one of: a loss of each sequence's loads (DeepSeek-V3, 2024, arXiv 2412.19437, section 2.1.2), one of the microbatch's
(Switch, Fedus et al., 2021, arXiv 2101.03961), or no loss but a bias on the choice that follows the loads (Wang et al.,
2024, arXiv 2408.15664).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmati.errors import BatchError, PlanError
from cosmati.models.attending import seen_within
from cosmati.models.gpt import Attention, FeedForward, GPTConfig

Balance = Literal["sequence", "batch", "bias", "none"]
Dispatch = Literal["gathered", "dense"]


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Shape and options of a `MixtureModel`.

    Args:
        vocabulary_size: tokens; 256 for bytes.
        sequence_length: longest sequence that the model takes.
        width: of the residual stream, a multiple of `num_heads` by an even number.
        num_blocks: blocks, each attention and a mixture.
        num_heads: attention heads, with rotary positions.
        num_experts: of each block; each is a feed-forward layer of four times the width.
        top_k: experts of each token.
        balance: `sequence` and `batch` add a loss of each document's, or the whole microbatch's loads; `bias` lets the
            forward pass move a bias on the choice, which is state; `none` leaves loads alone.
        balance_weight: of the loss.
        bias_rate: by how much the bias moves in each forward pass.
        capacity_factor: an expert takes at most this many times its even share of a microbatch's tokens; the rest of
            them pass it by, last choices first. None has no limit.
        dispatch: `gathered` runs an expert on its own tokens. `dense` runs each expert on all of them, which costs
            num_experts / top_k times as much; what a token is given then follows in no bit from others' choices.

    Raises:
        PlanError: numbers that don't fit together.
    """

    vocabulary_size: int = 256
    sequence_length: int = 256
    width: int = 128
    num_blocks: int = 4
    num_heads: int = 4
    num_experts: int = 4
    top_k: int = 2
    balance: Balance = "sequence"
    balance_weight: float = 0.01
    bias_rate: float = 0.001
    capacity_factor: float | None = None
    dispatch: Dispatch = "gathered"

    def __post_init__(self) -> None:
        problems = []
        if not 1 <= self.top_k <= self.num_experts:
            problems.append(f"top_k={self.top_k} is from 1 to num_experts={self.num_experts}")
        if self.balance not in get_args(Balance) or self.dispatch not in get_args(Dispatch):
            problems.append(f"balance={self.balance!r} or dispatch={self.dispatch!r} is unknown")
        if not (self.balance_weight >= 0 and self.bias_rate >= 0):
            problems.append("balance_weight and bias_rate are 0 or more")
        if self.capacity_factor is not None and not 0 < self.capacity_factor < math.inf:
            problems.append("capacity_factor is positive, or None")
        if problems:
            msg = f"No mixture of experts can be built: {'; '.join(problems)}. Change {self}."
            raise PlanError(msg)
        self.transformer()

    def transformer(self) -> GPTConfig:
        """Return the configuration of the layers that aren't mixtures.

        Raises:
            PlanError: sizes that don't fit together.
        """
        return GPTConfig(
            vocabulary_size=self.vocabulary_size,
            sequence_length=self.sequence_length,
            width=self.width,
            num_blocks=self.num_blocks,
            num_heads=self.num_heads,
        )


class MixtureOutput(NamedTuple):
    """What a `MixtureModel` gives.

    Attributes:
        logits: [rows, length, vocabulary_size].
        aux: `balance`, a weighted scalar, where the balance is a loss; `LanguageModel` adds it.
    """

    logits: Tensor
    aux: Mapping[str, Tensor]


class MixtureModel(nn.Module):
    """A causal language model with experts.

    Parameters are named `embedding`, `blocks.N.attention_norm`, `blocks.N.attention.{query,key,value,projection}`,
    `blocks.N.mixture_norm`, `blocks.N.mixture.router`, `blocks.N.mixture.experts.M.{up,down}`, `norm` and `head`; the
    bias, if there's one, is the buffer `blocks.N.mixture.bias`.
    """

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary_size, config.width)
        self.blocks = nn.ModuleList(MixtureBlock(config) for _ in range(config.num_blocks))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary_size, bias=False)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                std = 1 / config.width if name == "head" else module.in_features**-0.5
                is_last = name.endswith((".projection", ".down"))
                nn.init.normal_(module.weight, std=std * ((2 * config.num_blocks) ** -0.5 if is_last else 1))

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> MixtureOutput:
        """Return logits for the token after each one, and what is added to the loss.

        Args:
            tokens: integers [rows, length], of any length up to `sequence_length`.
            documents: which document each token belongs to, integers [rows, length], each document in one piece:
                attention doesn't look across a border. None lets each row be one document.

        Raises:
            BatchError: the sequences are too long.
        """
        if tokens.shape[1] > self.config.sequence_length:
            msg = (
                f"Sequences of {tokens.shape[1]} tokens are longer than sequence_length={self.config.sequence_length}."
            )
            raise BatchError(f"{msg} Cut them, or build the model longer.")
        if documents is None:
            documents = torch.zeros_like(tokens)
        seen = seen_within(documents)
        hidden = self.embedding(tokens.long())
        balances = []
        for block in self.blocks:
            hidden, balance = block(hidden, seen, documents)
            balances += [] if balance is None else [balance]
        logits = self.head(self.norm(hidden))
        aux = {"balance": torch.stack(balances).mean() * self.config.balance_weight} if balances else {}
        return MixtureOutput(logits, aux)


class MixtureBlock(nn.Module):
    """Attention, then a mixture; each reads a norm of the residual stream and adds to it."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config.transformer())
        self.mixture_norm = nn.LayerNorm(config.width)
        self.mixture = ExpertLayer(config)

    def forward(self, hidden: Tensor, seen: Tensor, documents: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map the residual stream [rows, length, width] to the next one; `ExpertLayer.forward` tells the rest."""
        hidden = hidden + self.attention(self.attention_norm(hidden), seen=seen)
        added, balance = self.mixture(self.mixture_norm(hidden), documents)
        return hidden + added, balance


class ExpertLayer(nn.Module):
    """A router and its experts.

    Attributes:
        couples: `rows` where what one token is given or teaches follows from all others of the microbatch; where
            they're gathered, in the last bits alone, since kernels follow from their number.
    """

    bias: Tensor | None

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.width, config.num_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(config.transformer()) for _ in range(config.num_experts))
        self.register_buffer("bias", torch.zeros(config.num_experts) if config.balance == "bias" else None)
        is_coupled = config.balance == "batch" or config.capacity_factor is not None or config.dispatch == "gathered"
        self.couples = frozenset({"rows"}) if is_coupled else frozenset[str]()

    def forward(self, hidden: Tensor, documents: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what the chosen experts add, and each token's part of the balancing loss.

        Args:
            hidden: [rows, length, width].
            documents: which document each token belongs to, integers [rows, length].

        Returns:
            [rows, length, width]; and [rows, length], whose mean is the loss, None where the balance is none.
        """
        liking = self.router(hidden)
        scores = liking.to(torch.promote_types(liking.dtype, torch.float32)).softmax(-1)
        chosen, gates = self._choice(scores)
        # What is dropped keeps its place in the loads, as in Switch: it's what the loss should act against.
        load = F.one_hot(chosen, self.config.num_experts).to(scores.dtype).sum(2)
        kept = None if self.config.capacity_factor is None else within_capacity(chosen, self._capacity(chosen))
        weights = gates if kept is None else torch.where(kept, gates, 0.0)
        spread = torch.zeros_like(scores).scatter(-1, chosen, weights)
        added = self._dense(hidden, spread) if self.config.dispatch == "dense" else self._gathered(hidden, spread)
        if self.bias is not None and self.training:
            with torch.no_grad():
                total = load.sum((0, 1))
                self.bias += self.config.bias_rate * (total.mean() - total).sign()
        return added, self._balance(scores, load, documents)

    def _choice(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's experts, best first, and their weights, which add up to 1: [rows, length, top_k] each."""
        liked = scores.detach() if self.bias is None else scores.detach() + self.bias
        chosen = liked.topk(self.config.top_k, dim=-1).indices
        gates = scores.gather(-1, chosen)
        return chosen, gates / gates.sum(-1, keepdim=True)

    def _capacity(self, chosen: Tensor) -> int:
        assert self.config.capacity_factor is not None, "it's asked for"
        return max(1, math.ceil(self.config.capacity_factor * chosen.numel() / self.config.num_experts))

    def _dense(self, hidden: Tensor, spread: Tensor) -> Tensor:
        added = torch.zeros_like(hidden)
        for index, expert in enumerate(self.experts):
            added = added + expert(hidden) * spread[..., index, None]
        return added

    def _gathered(self, hidden: Tensor, spread: Tensor) -> Tensor:
        tokens, weights = hidden.flatten(0, 1), spread.flatten(0, 1)
        added = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            (own,) = (weights[:, index] != 0).nonzero(as_tuple=True)
            found = expert(tokens[own]) * weights[own, index, None]
            added = added.index_add(0, own, found.to(added.dtype))
        return added.view_as(hidden)

    def _balance(self, scores: Tensor, load: Tensor, documents: Tensor) -> Tensor | None:
        """Return each token's part of num_experts / top_k * (sum of each expert's share of the tokens * mean score).

        [rows, length]. Shares and means are a document's or the microbatch's; the least is 1, where all are even.
        """
        if self.config.balance not in ("sequence", "batch"):
            return None
        if self.config.balance == "batch":
            share = load.mean((0, 1))
        else:
            same = (documents[:, :, None] == documents[:, None, :]).to(load.dtype)
            share = same @ load / same.sum(2, keepdim=True)
        return (scores * share).sum(-1) * (self.config.num_experts / self.config.top_k)


def within_capacity(chosen: Tensor, capacity: int) -> Tensor:
    """Say which choices an expert has room for: all first choices in the order of tokens, then all second ones.

    Args:
        chosen: experts of each token, best first, integers [rows, length, top_k].
        capacity: tokens that an expert takes.

    Returns:
        bool [rows, length, top_k].
    """
    in_order = chosen.flatten(0, 1).T.flatten()
    taken = F.one_hot(in_order).cumsum(0).gather(1, in_order[:, None]).squeeze(1)
    return (taken <= capacity).view(chosen.shape[2], -1).T.view(chosen.shape)
