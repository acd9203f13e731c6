"""ALiBi: attention falls off with distance, in place of position embeddings (Press et al., arXiv 2108.12409)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from cosmati.core.batch import Batch, InputKind, iterate_tensors, map_tensors
from cosmati.core.method import Method, Position, Stage
from cosmati.core.surgery import Optimizers, replace_in_groups, replace_modules
from cosmati.errors import BatchError, PlanError

_ADDITIVE = ("eager", "sdpa")
"""Hugging Face's attention implementations that take a bias."""


def alibi_slopes(num_heads: int) -> Tensor:
    """Return how steeply each head's attention falls off: float32 [num_heads].

    A geometric series from 2^(-8 / n) to 2^-8 for a power of two; for other numbers that of the power below, and then
    every second one of the power above.

    Raises:
        PlanError: fewer than one head.
    """
    if num_heads < 1:
        msg = f"num_heads={num_heads} leaves nobody to attend. Give at least 1."
        raise PlanError(msg)
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-4 * i / power) for i in range(1, 2 * power + 1, 2)]
    return torch.tensor(slopes[:num_heads])


def alibi_bias(num_heads: int, query_length: int, key_length: int, *, is_causal: bool = True) -> Tensor:
    """Return what is added to attention's scores: float32 [num_heads, query_length, key_length].

    It is minus slope times distance. The last query stands at the last key, as in generation with a cache.

    Args:
        num_heads: attention heads, >= 1.
        query_length: positions that attend.
        key_length: positions that are attended to, at least as many.
        is_causal: -inf for keys ahead of their query; otherwise distance counts in both directions.

    Raises:
        BatchError: more queries than keys.
    """
    if query_length > key_length:
        msg = f"{query_length} queries don't stand at the end of {key_length} keys. Give as many keys or more."
        raise BatchError(msg)
    keys = torch.arange(key_length)
    return _bias(alibi_slopes(num_heads), keys[key_length - query_length :], keys, is_causal=is_causal)


class AlibiAttention(nn.Module):
    """Attention with the bias, combined with the layer's own class by the surgery; `slopes` is a buffer, not saved."""

    slopes: Tensor


class _OwnAttention(AlibiAttention):
    """Of this library's GPT, which asks for a bias."""

    def bias(self, query: Tensor) -> Tensor:
        positions = torch.arange(query.shape[-2], device=query.device)
        return _bias(self.slopes, positions, positions, is_causal=True).to(query.dtype)


class _HuggingFaceAttention(AlibiAttention):
    """The bias goes in with the mask."""

    config: Any
    is_causal: bool
    layer_idx: int

    def forward(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,  # noqa: ANN401  (theirs)
        **options: Any,  # noqa: ANN401  (theirs)
    ) -> Any:  # noqa: ANN401  (theirs)
        _check_implementation(self)
        seen, num_keys = 0, hidden_states.shape[1]
        if past_key_values is not None:
            seen = past_key_values.get_seq_length(self.layer_idx)
            num_keys, _ = past_key_values.get_mask_sizes(hidden_states.shape[1], self.layer_idx)
        if attention_mask is not None:
            num_keys = attention_mask.shape[-1]
        device, dtype = hidden_states.device, hidden_states.dtype
        queries = torch.arange(hidden_states.shape[1], device=device) + seen
        is_causal = self.is_causal and attention_mask is None
        bias = _bias(self.slopes, queries, torch.arange(num_keys, device=device), is_causal=is_causal).to(dtype)[None]
        if attention_mask is not None and attention_mask.dtype is torch.bool:
            bias = torch.where(attention_mask, bias, torch.finfo(dtype).min)
        elif attention_mask is not None:
            bias = bias + attention_mask
        return super().forward(hidden_states, attention_mask=bias, past_key_values=past_key_values, **options)


class _Embeddings(nn.Module):
    """BERT's, that don't look into their tables of positions and token types, which have an end."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **options: Any,  # noqa: ANN401  (theirs)
    ) -> Any:  # noqa: ANN401  (theirs)
        given = inputs_embeds if input_ids is None else input_ids
        assert given is not None, "the model has checked it"
        zeros = torch.zeros(given.shape[:2], dtype=torch.int64, device=given.device)
        types = zeros if token_type_ids is None else token_type_ids
        own = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "token_type_ids": types, "position_ids": zeros}
        return super().forward(**own, **options)


class NoPositions(nn.Module):
    """One vector of zeros in place of position embeddings, whatever they're asked for; it has no weights."""

    zero: Tensor

    def __init__(self, like: nn.Embedding) -> None:
        super().__init__()
        self.register_buffer("zero", torch.zeros_like(like.weight[0]).detach(), persistent=False)

    def forward(self, *args: object, **options: object) -> Tensor:
        """Return zeros [width]."""
        return self.zero


class _Family(NamedTuple):
    """A transformer: its classes, and where it keeps what is changed, as dotted names."""

    module: str
    model: str
    attention: str
    """Class of its layers of attention."""
    positions: str
    blocks: str
    layer: str
    """The layer of attention within a block."""


def _hugging_face(name: str, model: str, attention: str, positions: str, blocks: str, layer: str) -> _Family:
    return _Family(f"transformers.models.{name}.modeling_{name}", model, attention, positions, blocks, layer)


_BERT = ("embeddings.position_embeddings", "encoder.layer", "attention.self")
_FAMILIES = (
    _Family("cosmati.models.gpt", "GPT", "Attention", "position", "blocks", "attention"),
    _hugging_face("gpt2", "GPT2Model", "GPT2Attention", "wpe", "h", "attn"),
    _hugging_face("opt", "OPTDecoder", "OPTAttention", "embed_positions", "layers", "self_attn"),
    _hugging_face("bert", "BertModel", "BertSelfAttention", *_BERT),
    _hugging_face("roberta", "RobertaModel", "RobertaSelfAttention", *_BERT),
)
_OWN = _FAMILIES[0]


class _Place(NamedTuple):
    """A transformer within the model, with its layers of attention."""

    owner: Any
    family: _Family
    layers: list[nn.Module]


def apply_alibi(model: nn.Module, max_sequence_length: int, optimizers: Optimizers = None) -> nn.Module:
    """Take a transformer's position embeddings out, and let its attention fall off with distance, in place.

    Known are this library's GPT with learnt positions, and Hugging Face's GPT-2, OPT, BERT and RoBERTa with eager or
    sdpa attention, in any model that holds one. Layers keep their hooks, names and other parameters. Anything else is
    refused and left as it is. Weights saved afterwards fit the same model after the same surgery.

    Args:
        model: the model; everything that holds positions, not an attention layer alone.
        max_sequence_length: longest sequence that will be seen, in training or after it, >= 1. This library's GPT
            refuses longer ones; Hugging Face's models take any, and note it as `config.max_position_embeddings`.
            Neither gets shorter than it was.
        optimizers: the position embeddings leave their parameter groups.

    Returns:
        The same model.

    Raises:
        PlanError: attention or positions that aren't known, or a length below 1.
    """
    _check(max_sequence_length)
    places = _places_in(model)
    made: dict[tuple[type, type], type[nn.Module]] = {}
    for owner, family, layers in places:
        for layer in layers:
            _change(layer, made)
        positions = attrgetter(family.positions)(owner)
        if isinstance(positions, nn.Embedding):
            replace_in_groups(optimizers, positions.weight, {})
            if family is _OWN:
                owner.position = None
            else:
                replace_modules(model, {positions: NoPositions(positions)})
        if family.positions.startswith("embeddings."):
            _mix(owner.embeddings, _Embeddings, made)
        _lengthen(owner, family, max_sequence_length)
    return model


@dataclass(frozen=True, kw_only=True)
class Alibi(Method):
    """Attention that falls off with distance, in place of position embeddings.

    Args:
        max_sequence_length: longest sequence that will be seen, in training or after it.
        train_sequence_length_scaling: rows are cut into pieces of this fraction of their length while training, and
            the model is used on whole ones; 1 doesn't cut. The number of pieces is whole, and divides the length. The
            pieces of one tensor of tokens [rows, length + 1] share a token, which one predicts and the next one
            reads; a model that shifts its labels itself doesn't predict the first token of each piece.
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
        """Return the batch with its rows cut into pieces, which follow one another and keep the row's id."""
        pieces = round(1 / self.train_sequence_length_scaling)
        if pieces == 1:
            return batch
        shared = int(isinstance(batch.data, Tensor))
        shapes = {tuple(tensor.shape) for tensor in iterate_tensors(batch.data)}
        lengths = {shape[1] - shared if len(shape) > 1 else 0 for shape in shapes}
        length = min(lengths, default=0)
        if len(lengths) != 1 or length < 1 or length % pieces:
            msg = (
                f"Alibi can't cut rows into {pieces} pieces in a batch of tensors {sorted(shapes)}: each must be "
                f"[rows, length, ...], or one tensor alone [rows, length + 1], with a length that {pieces} divides. "
                "Use train_sequence_length_scaling=1, or pad."
            )
            raise BatchError(msg)
        size = length // pieces
        data = map_tensors(lambda t: t.unfold(1, size + shared, size).movedim(-1, 2).flatten(0, 1), batch.data)
        rows = torch.arange(batch.num_rows).repeat_interleave(pieces)
        return Batch(data, batch.lineage.select(rows), batch.class_id)


def _check(max_sequence_length: int) -> None:
    if not max_sequence_length >= 1:
        msg = f"max_sequence_length={max_sequence_length} holds no token. Give the longest sequence's length."
        raise PlanError(msg)


def _bias(slopes: Tensor, queries: Tensor, keys: Tensor, *, is_causal: bool) -> Tensor:
    """Return minus slope times distance: [num_heads, queries, keys]."""
    distance = queries[:, None] - keys
    # In float32 at least: bfloat16 counts to 256.
    slopes = slopes.to(torch.promote_types(slopes.dtype, torch.float32))
    bias = -slopes[:, None, None] * distance.abs()
    return bias.masked_fill(distance < 0, -torch.inf) if is_causal else bias


def _places_in(model: nn.Module) -> list[_Place]:
    """Return the model's transformers, all checked, so that a refusal leaves no model half changed."""
    candidates = [(m, f) for m in model.modules() for f in _FAMILIES if _class_of(m, f.module, f.model)]
    places: list[_Place] = []
    for owner, family in candidates:
        try:
            layers = [attrgetter(family.layer)(block) for block in attrgetter(family.blocks)(owner)]
            has_positions = isinstance(attrgetter(family.positions)(owner), nn.Embedding)
        except AttributeError:
            continue
        if has_positions or all(isinstance(layer, AlibiAttention) for layer in layers):
            places.append(_Place(owner, family, layers))
    if not places and any("rotary" in type(m).__name__.lower() or _is_rotary_gpt(m) for m in model.modules()):
        _refuse(model, "its positions are rotary, inside its attention: there's nothing to take out")
    if not places:
        _refuse(model, "it has no learnt positions to take out" if candidates else "it has no attention that is known")
    for _, family, layers in places:
        for layer in layers:
            if not _is_known(layer, family):
                _refuse(model, f"its attention {type(layer).__name__} isn't one that is known")
            if family is not _OWN:
                _check_implementation(layer)
    return places


def _class_of(module: nn.Module, home: str, name: str) -> type | None:
    """Return the class of that name that a module is of; neither package is imported for it."""
    return next((kind for kind in type(module).__mro__ if (kind.__module__, kind.__name__) == (home, name)), None)


def _is_known(layer: nn.Module, family: _Family) -> bool:
    """Say whether a layer attends as its class does, or has been changed already."""
    kind = _class_of(layer, family.module, family.attention)
    if kind is None or isinstance(layer, AlibiAttention):
        return kind is not None
    overrides = (getattr(type(layer), name, None) is not getattr(kind, name, None) for name in ("forward", "bias"))
    return "forward" not in vars(layer) and not any(overrides)


def _check_implementation(layer: Any) -> None:  # noqa: ANN401  (theirs)
    implementation = layer.config._attn_implementation  # noqa: SLF001  (theirs)
    if implementation not in _ADDITIVE:
        msg = (
            f"Alibi adds to attention's scores, and attn_implementation={implementation!r} takes no bias. Build "
            f"the model with one of {_ADDITIVE}. Remove it from the methods of this run otherwise."
        )
        raise PlanError(msg)


def _refuse(model: nn.Module, why: str) -> NoReturn:
    msg = (
        f"Alibi can't change {type(model).__name__}: {why}. Known are this library's GPT (rotary=False) and Hugging "
        "Face's GPT-2, OPT, BERT and RoBERTa. Use one of these. Remove it from the methods of this run otherwise."
    )
    raise PlanError(msg)


def _is_rotary_gpt(module: Any) -> bool:  # noqa: ANN401  (of any class)
    return _class_of(module, _OWN.module, _OWN.model) is not None and bool(module.config.rotary)


def _mix(module: nn.Module, mixin: type[nn.Module], made: dict[tuple[type, type], type[nn.Module]]) -> None:
    kind = type(module)
    if not issubclass(kind, mixin):
        key = (mixin, kind)
        made[key] = made.get(key) or type(f"Alibi{kind.__name__}", key, {})
        module.__class__ = made[key]


def _change(layer: Any, made: dict[tuple[type, type], type[nn.Module]]) -> None:  # noqa: ANN401  (of any class)
    if isinstance(layer, AlibiAttention):
        return
    is_own = _class_of(layer, _OWN.module, _OWN.attention) is not None
    _mix(layer, _OwnAttention if is_own else _HuggingFaceAttention, made)
    num_heads = layer.config.num_heads if is_own else layer.config.num_attention_heads
    layer.register_buffer("slopes", alibi_slopes(num_heads).to(next(layer.parameters()).device), persistent=False)


def _lengthen(owner: Any, family: _Family, length: int) -> None:  # noqa: ANN401  (of any class)
    """Let a model take sequences of this length, now that no table of positions ends before."""
    if family is _OWN:
        owner.config = dataclasses.replace(owner.config, sequence_length=max(length, owner.config.sequence_length))
    else:
        owner.config.max_position_embeddings = max(length, owner.config.max_position_embeddings)
