"""A state space model for bytes: selective scans in place of attention (Mamba-2, Dao and Gu, 2024, arXiv 2405.21060).

Each head keeps a matrix that fades and takes in what a token brings, both by an amount that the token itself chooses
(Gu and Dao, 2023, arXiv 2312.00752). It's computed in the quadratic form of that paper's section 5, as a product with
the fading between each pair of places, so that memory grows with the square of the length, as attention's does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmati.errors import PlanError
from cosmati.models.attending import documents_of, places_in

_SLOWEST, _FASTEST = 1e-3, 1e-1
"""Step sizes at which heads start, drawn evenly in their logarithm."""


@dataclass(frozen=True, kw_only=True)
class StateSpaceConfig:
    """Shape of a `StateSpaceModel`.

    Args:
        vocabulary_size: tokens; 256 for bytes.
        width: of the residual stream.
        num_blocks: blocks, each one scan.
        num_heads: of the scans; they divide `expansion * width`.
        state_size: columns of each head's state.
        expansion: how much wider than the residual stream the scans are.
        kernel_size: tokens that the convolution before each scan reads, the present one among them.
        document_end: token that ends a document: states begin anew behind it. None lets each row be one document.

    Raises:
        PlanError: sizes that don't fit together.
    """

    vocabulary_size: int = 256
    width: int = 128
    num_blocks: int = 4
    num_heads: int = 4
    state_size: int = 16
    expansion: int = 2
    kernel_size: int = 4
    document_end: int | None = None

    def __post_init__(self) -> None:
        sizes = (self.vocabulary_size, self.width, self.num_blocks, self.num_heads)
        if min(*sizes, self.state_size, self.expansion, self.kernel_size) < 1:
            msg = f"All sizes of a state space model are at least 1; this is {self}."
            raise PlanError(msg)
        if self.inner_width % self.num_heads:
            msg = f"{self.num_heads} heads of equal widths don't make up width {self.inner_width}. Change {self}."
            raise PlanError(msg)
        if self.document_end is not None and not 0 <= self.document_end < self.vocabulary_size:
            msg = f"document_end={self.document_end} is no token of {self.vocabulary_size}."
            raise PlanError(msg)

    @property
    def inner_width(self) -> int:
        """Width of the scans, all heads together."""
        return self.expansion * self.width


class StateSpaceModel(nn.Module):
    """A causal language model without attention, and without positions: the scans tell the order.

    Parameters are named `embedding`, `blocks.N.norm`, `blocks.N.{gate,content,size}` (linear layers),
    `blocks.N.{kernel,kernel_bias}`, `blocks.N.{size_bias,log_rate,skip}` (one number a head), `blocks.N.inner_norm`,
    `blocks.N.projection`, `norm` and `head`.
    """

    def __init__(self, config: StateSpaceConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary_size, config.width)
        self.blocks = nn.ModuleList(StateSpaceBlock(config) for _ in range(config.num_blocks))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary_size, bias=False)
        nn.init.normal_(self.head.weight, std=1 / config.width)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return logits [rows, length, vocabulary_size] for the token after each one.

        Args:
            tokens: integers [rows, length], of any length.
            documents: which document each token belongs to, integers [rows, length], each document in one piece: states
                and convolutions begin anew in each. None goes by `document_end`.
        """
        if documents is None and self.config.document_end is not None:
            documents = documents_of(tokens, self.config.document_end)
        if documents is None:
            documents = torch.zeros_like(tokens)
        places = places_in(documents)
        hidden = self.embedding(tokens.long())
        for block in self.blocks:
            hidden = block(hidden, places)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class StateSpaceBlock(nn.Module):
    """A short convolution and a selective scan, gated; it reads a norm of the residual stream and adds to it."""

    def __init__(self, config: StateSpaceConfig) -> None:
        super().__init__()
        self.config = config
        width, inner, heads = config.width, config.inner_width, config.num_heads
        channels = inner + 2 * config.state_size
        self.norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, inner, bias=False)
        self.content = nn.Linear(width, channels, bias=False)
        self.size = nn.Linear(width, heads, bias=False)
        self.kernel = nn.Parameter(torch.empty(channels, config.kernel_size).uniform_(-1, 1) * config.kernel_size**-0.5)
        self.kernel_bias = nn.Parameter(torch.zeros(channels))
        sizes = torch.exp(torch.empty(heads).uniform_(math.log(_SLOWEST), math.log(_FASTEST)))
        self.size_bias = nn.Parameter(torch.log(torch.expm1(sizes)))  # softplus gives the sizes
        self.log_rate = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.skip = nn.Parameter(torch.ones(heads))
        self.inner_norm = nn.RMSNorm(inner)
        self.projection = nn.Linear(inner, width, bias=False)
        nn.init.normal_(self.projection.weight, std=(2 * inner * config.num_blocks) ** -0.5)

    def forward(self, hidden: Tensor, places: Tensor) -> Tensor:
        """Map the residual stream [rows, length, width] to the next one.

        Args:
            hidden: the residual stream.
            places: of each token in its document, integers [rows, length].
        """
        normed = self.norm(hidden)
        content = F.silu(short_convolution(self.content(normed), self.kernel, self.kernel_bias, places))
        state = self.config.state_size
        value, write, read = content.split([self.config.inner_width, state, state], dim=-1)
        value = value.unflatten(-1, (self.config.num_heads, -1))
        size = F.softplus(self.size(normed) + self.size_bias)
        fading = size * -self.log_rate.exp()
        found = selective_scan(value * size[..., None], fading, write, read, places) + value * self.skip[:, None]
        added: Tensor = self.projection(self.inner_norm(found.flatten(2) * F.silu(self.gate(normed))))
        return hidden + added


def short_convolution(content: Tensor, kernel: Tensor, bias: Tensor, places: Tensor) -> Tensor:
    """Convolve each channel with the tokens before, of the same document alone.

    Args:
        content: [rows, length, channels].
        kernel: [channels, size]; its last column is for the present token.
        bias: [channels].
        places: of each token in its document, integers [rows, length].

    Returns:
        The shape of `content`.
    """
    length = content.shape[1]
    found = content * kernel[:, -1] + bias
    for back in range(1, min(kernel.shape[1], length)):
        earlier = F.pad(content, (0, 0, back, 0))[:, :length]
        # Not a product with 0: what isn't finite stays in its own document.
        found = found + torch.where((places >= back)[..., None], earlier, 0.0) * kernel[:, -1 - back]
    return found


def selective_scan(value: Tensor, fading: Tensor, write: Tensor, read: Tensor, places: Tensor) -> Tensor:
    """Return read_t S_t with S_t = exp(fading_t) S_(t-1) + write_t value_t^T, from 0 in each document.

    Args:
        value: [rows, length, heads, head_width].
        fading: 0 or less, [rows, length, heads].
        write: [rows, length, state], the same for all heads.
        read: the same shape.
        places: of each token in its document, integers [rows, length].

    Returns:
        [rows, length, heads, head_width].
    """
    length = value.shape[1]
    pairs = torch.ones(length, length, dtype=torch.bool, device=value.device)
    # Sums begin behind the earlier place of a pair: differences of sums from the row's start would round by all of it.
    between = running_sums(fading.mT[..., None].expand(-1, -1, -1, length).masked_fill(~pairs.tril(-1), 0.0))
    # The place t sees s where t - s is no more than t's place in its document.
    back = torch.arange(length, device=value.device)
    is_seen = pairs.tril() & ((back[:, None] - back) <= places[..., None])
    scores = (read @ write.mT)[:, None] * torch.where(is_seen[:, None], between.exp(), 0.0)
    return (scores @ value.transpose(1, 2)).transpose(1, 2)


def running_sums(values: Tensor) -> Tensor:
    """Return sums over places up to each one, of values [rows, heads, length, ...].

    In log2(length) additions: `cumsum` has no deterministic kernel on accelerators.
    """
    step, length = 1, values.shape[2]
    while step < length:
        values = values + torch.cat([torch.zeros_like(values[:, :, :step]), values[:, :, :-step]], dim=2)
        step *= 2
    return values
