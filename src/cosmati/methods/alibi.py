"""ALiBi: attention falls off with distance, in place of position embeddings (Press et al., arXiv 2108.12409)."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor, nn

from cosmati.core.batch import Batch, InputKind, iterate_tensors, map_tensors
from cosmati.core.method import Method, Position, Stage
from cosmati.errors import BatchError, PlanError
from cosmati.methods.building_blocks.surgery import (
    Graft,
    Optimizers,
    graft,
    is_loaded_instance,
    replace_in_groups,
    strangers,
)

__all__ = ["Alibi", "apply_alibi"]

_ADDITIVE = ("eager", "sdpa")
"""Hugging Face's attention implementations that take a bias."""
_ATTENTION = (
    "transformers.models.gpt2.modeling_gpt2.GPT2Attention",
    "transformers.models.bert.modeling_bert.BertSelfAttention",
)
_POSITIONS = {
    "transformers.models.gpt2.modeling_gpt2.GPT2Model": "wpe",
    "transformers.models.bert.modeling_bert.BertEmbeddings": "position_embeddings",
}
"""Where Hugging Face's models hold what they have learnt of positions."""


def alibi_slopes(num_heads: int) -> Tensor:
    """Return how steeply each head's attention falls off: float32 [num_heads].

    A geometric series from 2^(-8 / n) to 2^-8 for a power of two; for other numbers that of the power below, and then
    every second one of the power above.
    """
    if num_heads < 1:
        msg = f"num_heads={num_heads} leaves nobody to attend. Give at least 1."
        raise PlanError(msg)
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-4 * i / power) for i in range(1, 2 * power + 1, 2)]
    return torch.tensor(slopes[:num_heads])


def alibi_bias(slopes: Tensor, query_length: int, key_length: int, *, is_causal: bool) -> Tensor:
    """Return what is added to attention's scores: [num_heads, query_length, key_length], minus slope times distance.

    The last query stands at the last key, as in generation with a cache. A causal one is -inf ahead.

    Args:
        slopes: [num_heads].
        query_length: positions that attend.
        key_length: positions that are attended to.
        is_causal: whether what's ahead is hidden; otherwise distance counts in both directions.
    """
    keys = torch.arange(key_length, device=slopes.device)
    queries = torch.arange(key_length - query_length, key_length, device=slopes.device)
    distance = queries[:, None] - keys
    bias = -slopes[:, None, None] * distance.abs()
    return bias.masked_fill(distance < 0, -torch.inf) if is_causal else bias


class AlibiAttention(Graft):
    """Attention with the bias; `slopes` is a buffer, not saved."""

    prefix = "Alibi"
    slopes: Tensor


class _OwnAttention(AlibiAttention):
    """Of this library's GPT, which asks for a bias."""

    def bias(self, query: Tensor) -> Tensor:
        length = query.shape[-2]
        return alibi_bias(self.slopes, length, length, is_causal=True).to(query.dtype)


class _HuggingFaceAttention(AlibiAttention):
    """The bias goes in with the mask."""

    is_causal: bool
    layer_idx: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (the layer's own)
        bound = inspect.signature(super().forward).bind(*args, **kwargs).arguments
        hidden: Tensor = bound["hidden_states"]
        mask: Tensor | None = bound.get("attention_mask")
        past = bound.get("past_key_values")
        seen = 0 if past is None else past.get_seq_length(self.layer_idx)
        length = hidden.shape[1]
        keys = seen + length if mask is None else mask.shape[-1]
        bias = alibi_bias(self.slopes, length, keys, is_causal=self.is_causal and mask is None).to(hidden.dtype)[None]
        if mask is not None and mask.dtype is torch.bool:
            bias = bias.masked_fill(~mask, torch.finfo(hidden.dtype).min)
        elif mask is not None:
            bias = bias + mask
        more = bound.pop("kwargs", {})
        return super().forward(**{**bound, **more, "attention_mask": bias})


class NoPositions(nn.Module):
    """Zeros in place of position embeddings of a width; it has no weights."""

    zero: Tensor

    def __init__(self, like: nn.Embedding) -> None:
        super().__init__()
        self.register_buffer("zero", torch.zeros_like(like.weight[0]).detach(), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        """Return zeros [*positions, width]."""
        return self.zero.expand(*positions.shape, -1)


def apply_alibi(model: nn.Module, max_sequence_length: int, optimizers: Optimizers = None) -> nn.Module:
    """Take a transformer's position embeddings out, and let its attention fall off with distance, in place.

    Known are Hugging Face's GPT-2, and BERT with eager or sdpa attention, their subclasses, and models built as this
    library's GPT: attention that asks a method `bias(query)` for what it adds to its scores, with `num_heads` in itself
    or its `config`, and learnt positions in `position`, which may be None. Layers keep their hooks, names and other
    parameters. Anything else is refused and left as it is.

    Args:
        model: the model; everything that holds positions, not an attention layer alone.
        max_sequence_length: longest sequence that will be seen, in training or after it, >= 1. A model that has ALiBi
            already takes longer ones from now on; a shorter length takes nothing back.
        optimizers: the position embeddings leave their parameter groups.

    Returns:
        The same model.

    Raises:
        PlanError: attention or positions that aren't known, or a length below 1.
    """
    _check(max_sequence_length)
    if any(isinstance(module, AlibiAttention) for module in model.modules()):
        for module in model.modules():
            if _has_lost_positions(module):
                _lengthen(module, max_sequence_length)
        return model
    attention = [module for module in model.modules() if _is_theirs(module) or _asks_for_bias(module)]
    positions = [(module, name) for module in model.modules() if (name := _positions_of(module))]
    if not attention or not positions:
        _refuse(model, has_attention=bool(attention))
    for name, layer in strangers(model, attention).items():
        _stop(
            f"{name} is a {type(layer).__name__} that isn't known, beside others that are: it would know no positions"
        )
    for layer in attention:
        _check_layer(layer)
    for layer in attention:
        graft(layer, _HuggingFaceAttention if _is_theirs(layer) else _OwnAttention)
        slopes = alibi_slopes(_num_heads(layer)).to(next(layer.parameters()).device)
        layer.register_buffer("slopes", slopes, persistent=False)
    for module, name in positions:
        embedding = getattr(module, name)
        replace_in_groups(optimizers, embedding.weight, {})
        setattr(module, name, None if _is_built_as_own(module) else NoPositions(embedding))
        _lengthen(module, max_sequence_length)
    return model


@dataclass(frozen=True, kw_only=True)
class Alibi(Method):
    """Attention that falls off with distance, in place of position embeddings.

    Args:
        max_sequence_length: longest sequence that will be seen, in training or after it.
        train_sequence_length_scaling: rows are cut into pieces of this fraction of their length while training, and
            the model is used on whole ones; 1 doesn't cut. The number of pieces is whole, and divides the length.
    """

    stage: ClassVar[Stage] = Stage.REPLACE
    reads: ClassVar[frozenset[InputKind]] = frozenset({"tokens"})

    max_sequence_length: int
    train_sequence_length_scaling: float = 0.25

    def __post_init__(self) -> None:
        """Check length and scale."""
        _check(self.max_sequence_length)
        scale = self.train_sequence_length_scaling
        if not 0 < scale <= 1 or abs(1 / scale - round(1 / scale)) > 1e-6:
            msg = (
                f"train_sequence_length_scaling={scale} cuts rows into {1 / scale if scale else 'no'} pieces. Give 1, "
                "0.5, 0.25 or another share that makes a whole number of them."
            )
            raise PlanError(msg)

    def apply(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> nn.Module:
        """Return the model with ALiBi."""
        return apply_alibi(model, self.max_sequence_length, optimizers)

    def batch(self, batch: Batch, at: Position) -> Batch:
        """Return the batch with its rows cut into pieces, which keep the row's id."""
        pieces = round(1 / self.train_sequence_length_scaling)
        if pieces == 1:
            return batch
        shapes = {tuple(tensor.shape) for tensor in iterate_tensors(batch.data)}
        length = min((shape[1] for shape in shapes if len(shape) > 1), default=0)
        if len(shapes) != 1 or length % pieces or not length:
            msg = (
                f"Alibi can't cut rows into {pieces} pieces in a batch of tensors {sorted(shapes)}: each must be "
                f"[rows, length], with a length that {pieces} divides. Use train_sequence_length_scaling=1, or pad."
            )
            raise BatchError(msg)

        def cut(tokens: Tensor) -> Tensor:
            return tokens.reshape(-1, length // pieces)

        lineage = batch.lineage.cut(cut, pieces)
        return dataclasses.replace(batch, data=map_tensors(cut, batch.data), lineage=lineage)


def _check(max_sequence_length: int) -> None:
    if not max_sequence_length >= 1:
        msg = f"max_sequence_length={max_sequence_length} holds no token. Give the longest sequence's length."
        raise PlanError(msg)


def _is_theirs(module: nn.Module) -> bool:
    return is_loaded_instance(module, _ATTENTION) and not getattr(module, "is_cross_attention", False)


def _asks_for_bias(module: nn.Module) -> bool:
    """Say whether a module has a method `bias`, not a parameter, and heads."""
    return inspect.isfunction(inspect.getattr_static(type(module), "bias", None)) and _num_heads(module) > 0


def _num_heads(layer: nn.Module) -> int:
    places = (layer, getattr(layer, "config", None))
    counts = (getattr(place, name, None) for place in places for name in ("num_heads", "num_attention_heads"))
    return next((count for count in counts if isinstance(count, int)), 0)


def _is_built_as_own(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    return hasattr(module, "position") and dataclasses.is_dataclass(config) and hasattr(config, "sequence_length")


def _positions_of(module: nn.Module) -> str | None:
    """Return the name of a module's learnt positions."""
    names = [name for path, name in _POSITIONS.items() if is_loaded_instance(module, [path])]
    names += ["position"] * _is_built_as_own(module)
    return next((name for name in names if isinstance(getattr(module, name, None), nn.Embedding)), None)


def _has_lost_positions(module: nn.Module) -> bool:
    """Say whether a module is one that `_positions_of` has found before."""
    if _is_built_as_own(module):
        return module.position is None
    return any(isinstance(child, NoPositions) for child in module.children())


def _refuse(model: nn.Module, *, has_attention: bool) -> NoReturn:
    why = "it has no attention that is known" if not has_attention else "it has no learnt positions to take out"
    # Tables of rotations are buffers: of this library's attention, of Hugging Face's models.
    if any(name.rpartition(".")[2] in ("cosine", "inv_freq") for name, _ in model.named_buffers()):
        why = "its positions are rotary, inside its attention: there's nothing to take out"
    _stop(f"{type(model).__name__}: {why}")


def _stop(why: str) -> NoReturn:
    msg = (
        f"Alibi can't change {why}. Known are models built as this library's GPT (rotary=False) and Hugging Face's "
        "GPT-2 and BERT. Use one of these. Remove it from the methods of this run otherwise."
    )
    raise PlanError(msg)


def _check_layer(layer: nn.Module) -> None:
    """Refuse attention that a bias wouldn't reach."""
    kind = type(layer)
    if not _is_theirs(layer):
        forward, bias = (next(k for k in kind.__mro__ if name in k.__dict__) for name in ("forward", "bias"))
        if forward is not bias:
            _stop(
                f"{kind.__name__}: its forward is of {forward.__name__} and its `bias` of {bias.__name__}, so nothing "
                "says that one asks the other (define both in one class)"
            )
        return
    if not {"hidden_states", "attention_mask"} <= inspect.signature(kind.forward).parameters.keys():
        _stop(f"{kind.__name__}: its forward has no `hidden_states` and `attention_mask`, where the bias goes in")
    implementation = cast("Any", layer).config._attn_implementation  # noqa: SLF001  (theirs)
    if implementation not in _ADDITIVE:
        msg = (
            f"Alibi adds to attention's scores, and attn_implementation={implementation!r} takes no bias. Build "
            f"the model with one of {_ADDITIVE}. Remove it from the methods of this run otherwise."
        )
        raise PlanError(msg)


def _lengthen(module: nn.Module, length: int) -> None:
    """Let a model take sequences of this length, now that no table of positions ends before."""
    if _is_built_as_own(module):
        own: Any = module
        own.config = dataclasses.replace(own.config, sequence_length=max(length, own.config.sequence_length))
        return
    held = getattr(module, "position_ids", None)
    if isinstance(held, Tensor) and held.shape[1] < length:
        module.register_buffer("position_ids", torch.arange(length, device=held.device)[None], persistent=False)
        types = torch.zeros(1, length, dtype=torch.int64, device=held.device)
        module.register_buffer("token_type_ids", types, persistent=False)
