"""A decoder-only transformer for bytes, with the parts that training speed records are made of.

Pre-norm blocks without biases (Radford et al., 2019), rotary positions (Su et al., 2021, arXiv 2104.09864),
and as
options: normalised queries and keys (Henry et al., 2020, arXiv 2010.04245), squared ReLU (So et al., 2021,
arXiv 2109.08668), projections that start at zero (as in Fixup, Zhang et al., 2019, arXiv 1901.09321), a
soft cap on logits (Gemma 2, 2024, arXiv 2408.00118), a scale of them (the output multiplier of Yang et al., 2022, arXiv
2203.03466), embeddings of n-grams (see `NgramEmbedding`), embeddings that are mixed into attention's values
(Koszarsky, 2024, modded-nanoGPT's record of 4 December), and attention within documents alone (as in Llama 3, 2024,
arXiv 2407.21783).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from cosmati.core.later import later, told_fields
from cosmati.core.virtual_shards import VirtualShards, has_hooks
from cosmati.errors import BatchError, PlanError
from cosmati.models.attending import attend, documents_of, places_in, rotary_table, rotate, seen_within
from cosmati.models.ngram_embedding import NgramEmbedding

ActivationName = Literal["gelu", "relu_squared"]
Normalisation = Literal["layer", "rms"]
_Product = Callable[[Tensor], Tensor]

_FEED_FORWARD_RATIO = 4


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Shape and options of a `GPT`.

    Args:
        vocabulary_size: tokens; 256 for bytes.
        sequence_length: longest sequence that the model takes.
        width: of the residual stream, a multiple of `num_heads`.
        num_blocks: blocks, each attention and a feed-forward layer of four times the width.
        num_heads: attention heads; with `rotary`, width / num_heads is even.
        qk_norm: divide each head's queries and keys by their root mean square, without parameters.
        activation: of the feed-forward layers.
        zero_init_projections: start each block's two projections at zero, so each block starts as the
            identity.
        logit_soft_cap: bound logits by `cap * tanh(logits / cap)`; None doesn't.
        tied: let the head use the embedding's weights.
        rotary: rotate queries and keys by position; False learns a position embedding.
        dropout: rate on what each block adds to the residual stream.
        normalisation: LayerNorm, or RMSNorm (Zhang and Sennrich, 2019, arXiv 1910.07467).
        init_scale: multiplies the standard deviation at which the blocks' matrices start.
        ngrams: lengths of n-grams whose embeddings are added to the token's, such as (2, 3).
        ngram_rows: rows of each length's table.
        all_scores: keep the attention scores of all pairs in place of a fused kernel: memory grows with the square of
            the length, and short rows are faster in bfloat16 on a CPU (see `Attention`).
        value_embeddings: tables of the vocabulary's size, each of which one of the first blocks and one of the last
            ones mix into attention's values, in the same order; at most one for two blocks.
        document_end: token that ends a document, such as 256 of `ByteTokenizer`: attention and n-grams don't look
            beyond the one before, though positions go on. None lets each row be one document.
        logit_scale: multiplies the logits, before they're capped.

    Raises:
        PlanError: sizes that don't fit together.
    """

    vocabulary_size: int = 256
    sequence_length: int = 256
    width: int = 128
    num_blocks: int = 4
    num_heads: int = 4
    qk_norm: bool = False
    activation: ActivationName = "gelu"
    zero_init_projections: bool = False
    logit_soft_cap: float | None = None
    tied: bool = False
    rotary: bool = True
    dropout: float = 0.0
    normalisation: Normalisation = "layer"
    init_scale: float = 1.0
    ngrams: tuple[int, ...] = ()
    ngram_rows: int = 8192
    all_scores: bool = False
    value_embeddings: int = later(default=0)
    document_end: int | None = later(default=None)
    logit_scale: float = later(default=1.0)

    def __post_init__(self) -> None:
        sizes = (self.vocabulary_size, self.sequence_length, self.width, self.num_blocks, self.num_heads)
        problems = []
        if min(sizes) < 1:
            problems.append("all sizes are at least 1")
        elif self.width % (self.num_heads * (2 if self.rotary else 1)):
            kind = "even widths" if self.rotary else "equal widths"
            problems.append(f"{self.num_heads} heads of {kind} don't make up width {self.width}")
        if self.activation not in ("gelu", "relu_squared") or self.normalisation not in ("layer", "rms"):
            problems.append(f"activation {self.activation!r} or normalisation {self.normalisation!r} is unknown")
        if not 0 <= self.dropout < 1 or (self.logit_soft_cap is not None and self.logit_soft_cap <= 0):
            problems.append("dropout is in [0, 1), and a soft cap is positive")
        if self.init_scale <= 0:
            problems.append("init_scale is positive")
        if not 0 <= self.value_embeddings <= self.num_blocks // 2 or not 0 < self.logit_scale < torch.inf:
            problems.append("value_embeddings are at most half as many as blocks, and logit_scale is positive")
        if self.document_end is not None and not 0 <= self.document_end < self.vocabulary_size:
            problems.append(f"document_end={self.document_end} is no token")
        if problems:
            msg = f"No GPT can be built: {'; '.join(problems)}. Change {self}."
            raise PlanError(msg)

    def __repr__(self) -> str:
        return f"GPTConfig({', '.join(f'{name}={value!r}' for name, value in told_fields(self).items())})"


class GPT(nn.Module):
    """A causal language model.

    Parameters are named `embedding`, `ngram_embedding` (with n-grams), `value_embeddings.N` (with these), `position`
    (without rotary), `blocks.N.attention_norm`, `blocks.N.attention. {query,key,value,projection}`,
    `blocks.N.attention.value_mix` (where values are mixed), `blocks.N.feed_forward_norm`,
    `blocks.N.feed_forward.{up,down}`, `norm` and `head`. Queries, keys and values are matrices of their
    own, so that a region or an optimizer may treat them apart.

    Embeddings start at standard deviation 1 (a tied one at width^-1/2, since it makes the logits too),
    matrices at fan_in^-1/2, the blocks' projections smaller by (2 * num_blocks)^-1/2 (Radford et al., 2019)
    or zero, and the head at 1 / width, so that the first loss is near log(vocabulary_size). Value embeddings start at
    standard deviation 1, as values do, and are mixed half and half; they're drawn last, so that the rest is the model
    of the same seed without them.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary_size, config.width)
        size, width = config.vocabulary_size, config.width
        self.ngram_embedding = NgramEmbedding(config.ngrams, size, config.ngram_rows, width) if config.ngrams else None
        self.position = None if config.rotary else nn.Embedding(config.sequence_length, config.width)
        self.blocks = nn.ModuleList(Block(config, mixes_values=table is not None) for table in _value_tables(config))
        self.norm = _norm(config)
        self.head = nn.Linear(config.width, config.vocabulary_size, bias=False)
        # Nothing is drawn before the rest.
        tables = [skip_init(nn.Embedding, size, width) for _ in range(config.value_embeddings)]
        self.value_embeddings = nn.ModuleList(tables) if tables else None
        self._initialise()
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return logits [rows, length, vocabulary_size] for the token after each one.

        Args:
            tokens: integers [rows, length], of any length up to `sequence_length`.
            documents: which document each token belongs to, integers [rows, length], each document in one piece:
                nothing is looked at across a border, and learnt positions begin anew. None goes by `document_end`.

        Raises:
            BatchError: the sequences are too long.
        """
        length = tokens.shape[1]
        if length > self.config.sequence_length:
            msg = (
                f"Sequences of {length} tokens are longer than the model's sequence_length of "
                f"{self.config.sequence_length}. Cut them, or build the model longer."
            )
            raise BatchError(msg)
        end = self.config.document_end
        begun = None if documents is None or self.position is None else places_in(documents)
        if documents is None and end is not None:
            documents = documents_of(tokens, end)
        hidden = self.embedding(tokens.long())
        if self.ngram_embedding is not None:
            hidden = hidden + self.ngram_embedding(tokens, documents)
        if self.position is not None:
            hidden = hidden + (self.position.weight[:length] if begun is None else self.position(begun))
        seen = None if documents is None else seen_within(documents)
        values = [table(tokens.long()) for table in self.value_embeddings or ()]
        for block, table in zip(self.blocks, _value_tables(self.config), strict=True):
            # A block that someone has replaced may take the stream alone.
            is_plain = table is None and seen is None
            hidden = block(hidden) if is_plain else block(hidden, None if table is None else values[table], seen)
        logits: Tensor = self.head(self.norm(hidden))
        if self.config.logit_scale != 1:
            logits = logits * self.config.logit_scale
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def compute_in_parts(self, shards: VirtualShards | None) -> dict[str, int]:
        """Compute each block's attention and feed-forward layer in U parts from now on; None puts them back.

        A part has 1 / U of the heads and of the feed-forward layer's width. Norms, embeddings and head aren't cut.

        Args:
            shards: U parts, and who computes which of them.

        Returns:
            Names of the parameters that are cut, and the dimension along which each is.

        Raises:
            PlanError: U doesn't divide the heads, or surgery has changed what would be cut.
        """
        if shards is not None:
            self._refuse_uncuttable(shards.number)
        for module in self.blocks.modules():
            if isinstance(module, Attention | FeedForward):
                vars(module).pop("shards", None)
                if shards is not None:
                    module.shards = shards
        layers = [
            name for name, one in self.named_modules() if isinstance(one, nn.Linear) and name.startswith("blocks.")
        ]
        return {f"{name}.weight": int(name.endswith((".projection", ".down"))) for name in layers}

    def _refuse_uncuttable(self, number: int) -> None:
        if self.config.num_heads % number:
            msg = (
                f"{self.config.num_heads} heads can't be shared out to virtual_shards={number}. Take a number that "
                "divides the heads, or as many heads more."
            )
            raise PlanError(msg)
        within = {name: one for name, one in self.named_modules() if name.startswith("blocks.")}
        own = (Block, Attention, FeedForward, nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Dropout)
        cut = {name: one for name, one in within.items() if isinstance(one, nn.Linear)}
        why = [] if type(self) is GPT else [f"{type(self).__name__} isn't GPT itself"]
        why += [f"{name} is another layer than GPT's own" for name, one in within.items() if type(one) not in own]
        why += [f"{name} has a bias, or hooks" for name, one in cut.items() if one.bias is not None or has_hooks(one)]
        why += ["weights are tied in blocks"] if len({id(one.weight) for one in cut.values()}) < len(cut) else []
        if why:
            msg = (
                f"virtual_shards={number} cuts the project's own GPT, and {why[0]}. Leave that out, or virtual_shards."
            )
            raise PlanError(msg)

    def _initialise(self) -> None:
        config = self.config
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding) and not name.startswith(("ngram_embedding.", "value_embeddings.")):
                nn.init.normal_(module.weight, std=config.width**-0.5 if config.tied else 1.0)
            elif isinstance(module, nn.Linear):
                std = config.init_scale * module.in_features**-0.5
                if name == "head":
                    std = 1 / config.width
                elif name.endswith((".projection", ".down")):
                    std *= 0 if config.zero_init_projections else (2 * config.num_blocks) ** -0.5
                nn.init.normal_(module.weight, std=std)
        for table in self.value_embeddings or ():
            assert isinstance(table, nn.Embedding), "made so"
            nn.init.normal_(table.weight)


class Block(nn.Module):
    """Attention, then a feed-forward layer; each reads a norm of the residual stream and adds to it."""

    def __init__(self, config: GPTConfig, *, mixes_values: bool = False) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config, mixes_values=mixes_values)
        self.feed_forward_norm = _norm(config)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, value: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
        """Map the residual stream [rows, length, width] to the next one; `value` and `seen` are attention's."""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden), value, seen))
        added: Tensor = self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))
        return hidden + added


class Attention(nn.Module):
    """Causal self-attention of several heads.

    Args:
        config: of the model.
        mixes_values: have two weights, `value_mix`, of values and of embeddings that are mixed into them.

    The fused kernel's backward pass is slow in bfloat16 on a CPU (torch 2.13, one thread of an AMD EPYC with
    avx512_bf16, 4 rows of 128 tokens, 4 heads of 32: forward and backward 5.3 ms, 1.7 with `all_scores`; 256 tokens:
    9.4 and 5.3; in float32 2.0 and 3.2).
    """

    cosine: Tensor
    sine: Tensor
    value_mix: nn.Parameter | None
    shards: VirtualShards | None = None

    def __init__(self, config: GPTConfig, *, mixes_values: bool = False) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.value_mix = nn.Parameter(torch.full((2,), 0.5)) if mixes_values else None
        if config.rotary:
            cosine, sine = rotary_table(config.sequence_length, width // config.num_heads)
            self.register_buffer("cosine", cosine, persistent=False)
            self.register_buffer("sine", sine, persistent=False)

    def forward(self, hidden: Tensor, embedded: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
        """Map [rows, length, width] to the same shape.

        Args:
            hidden: what is attended to.
            embedded: mixed into the values, of the same shape.
            seen: which places each one sees, bool [rows, 1, length, length], of those that aren't ahead; None is all.
        """
        shards, layers = self.shards, (self.query, self.key, self.value, self.projection)
        if shards is None:
            return self._attended(hidden, layers, embedded, self.value_mix, seen)
        cut = [shards.weights(layer.weight, 1 if layer is self.projection else 0) for layer in layers]
        own = [None] * len(shards.own) if embedded is None else shards.slices(embedded, -1)
        mixes = [None] * len(shards.own) if self.value_mix is None else shards.copies(self.value_mix)
        parts = zip(shards.copies(hidden), zip(*cut, strict=True), own, mixes, strict=True)
        return shards.total([self._attended(one, _by(weights), value, mix, seen) for one, weights, value, mix in parts])

    def _attended(
        self,
        hidden: Tensor,
        layers: Sequence[_Product],
        embedded: Tensor | None,
        mix: Tensor | None,
        seen: Tensor | None,
    ) -> Tensor:
        """Attend with all heads, or with those of one part of the weights."""
        *projections, output = layers
        head_width = self.config.width // self.config.num_heads
        query, key, value = (layer(hidden).unflatten(-1, (-1, head_width)).transpose(1, 2) for layer in projections)
        if embedded is not None and mix is not None:
            own, other = mix
            value = own * value + other * embedded.unflatten(-1, (-1, head_width)).transpose(1, 2)
        if self.config.qk_norm:
            query, key = (F.rms_norm(part, part.shape[-1:]) for part in (query, key))
        if self.config.rotary:
            length = hidden.shape[1]
            cosine, sine = self.cosine[:length], self.sine[:length]
            query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        bias = self.bias(query)
        if seen is not None:
            bias = torch.where(seen, query.new_zeros(()) if bias is None else bias, -torch.inf)
        if self.config.all_scores:
            mixed = attend(query, key, value, bias)
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, is_causal=bias is None)
        return output(mixed.transpose(1, 2).flatten(2))

    def bias(self, query: Tensor) -> Tensor | None:  # noqa: ARG002  (of subclasses)
        """Return what is added to the scores of queries [rows, heads, length, head_width], with -inf ahead; or None."""
        return None


class FeedForward(nn.Module):
    """Two linear layers with an activation between them."""

    shards: VirtualShards | None = None

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.up = nn.Linear(config.width, _FEED_FORWARD_RATIO * config.width, bias=False)
        self.down = nn.Linear(_FEED_FORWARD_RATIO * config.width, config.width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [rows, length, width] to the same shape."""
        if (shards := self.shards) is None:
            return self._mapped(hidden, self.up, self.down)
        cut = zip(shards.weights(self.up.weight, 0), shards.weights(self.down.weight, 1), strict=True)
        copies = zip(shards.copies(hidden), cut, strict=True)
        return shards.total([self._mapped(one, *_by(weights)) for one, weights in copies])

    def _mapped(self, hidden: Tensor, up: _Product, down: _Product) -> Tensor:
        hidden = up(hidden)
        return down(F.gelu(hidden) if self.activation == "gelu" else F.relu(hidden).square())


def _by(weights: Sequence[Tensor]) -> tuple[_Product, ...]:
    """Return linear maps without bias by weights [out, in]."""
    return tuple(partial(F.linear, weight=weight) for weight in weights)


def _norm(config: GPTConfig) -> nn.Module:
    return nn.LayerNorm(config.width) if config.normalisation == "layer" else nn.RMSNorm(config.width)


def _value_tables(config: GPTConfig) -> tuple[int | None, ...]:
    """Return which table each block mixes into its values: the first blocks and the last ones, in the same order."""
    own = tuple(range(config.value_embeddings))
    return (*own, *[None] * (config.num_blocks - 2 * len(own)), *own)
