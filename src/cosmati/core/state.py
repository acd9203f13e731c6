"""All that a run has to remember: tensors by name, facts as JSON, and a digest that doesn't depend on sharding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import blake3
import torch
from torch import Tensor, nn

from cosmati.core.plain import decode, encode
from cosmati.errors import CheckpointError
from cosmati.storage.merkle import MerkleTree, leaf_hash

CHUNK_BYTES = 1 << 20


_PLAIN = "$plain/"
"""Prefix of tensors that lie deeper in an optimizer's state than a parameter's own keys."""


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return an optimizer's state by parameter name, tensors apart from facts.

    Args:
        optimizer: any optimizer whose state is plain: tensors, numbers, strings, bytes, None, and lists, tuples and
            dictionaries of these.
        names: name of each parameter by `id`.

    Returns:
        Tensors as `name/key`, and facts as JSON: groups, and what a state holds beside tensors.

    Raises:
        CheckpointError: it keeps something else, by its place and type.
    """
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    other: dict[str, Any] = {}
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, str):
            other[parameter] = state
            continue
        name = names[id(parameter)]
        for key, value in state.items():
            if isinstance(value, Tensor) and type(key) in (str, int):
                tensors[f"{name}/{_written(key)}"] = value
            else:
                plain.setdefault(name, {})[key] = value
    groups = [
        # What can be called is code, and belongs to the recipe.
        {key: value for key, value in group.items() if key != "params" and not callable(value)}
        for group in optimizer.param_groups
    ]
    facts, deeper = encode({"groups": groups, "state": plain, "other": other})
    return tensors | {f"{_PLAIN}{path}": value for path, value in deeper.items()}, facts


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
) -> None:
    """Put an optimizer's state back.

    Raises:
        CheckpointError: the number of parameter groups differs.
    """
    deeper = {name.removeprefix(_PLAIN): value for name, value in tensors.items() if name.startswith(_PLAIN)}
    saved = decode(facts, deeper)
    if len(saved["groups"]) != len(optimizer.param_groups):
        msg = (
            f"The checkpoint's optimizer has {len(saved['groups'])} parameter groups, and this one "
            f"{len(optimizer.param_groups)}. "
            "Resume with the recipe that wrote it."
        )
        raise CheckpointError(msg)
    for group, own_group in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in own_group.items():
            own = group.get(key)
            if isinstance(own, Tensor) and isinstance(value, Tensor):
                # In place: it stays on its device, and is the very tensor that a captured graph reads.
                own.detach().copy_(value)
            else:
                group[key] = value
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names.get(id(parameter))  # A frozen one has none, and no state.
            if name is None:
                continue
            parts = [(*key.rpartition("/"), value) for key, value in tensors.items()]
            own = {_read(key): value for of, _, key, value in parts if of == name}
            # Step counters stay where the optimizer keeps them, on CPU unless its kernels read them; what is shaped as
            # the parameter follows it.
            on_device = bool(group.get("capturable") or group.get("fused"))
            state = {
                key: _as_kept(value, parameter) if value.ndim or on_device else value.clone()
                for key, value in own.items()
            }
            state |= saved["state"].get(name, {})
            if state:
                optimizer.state[parameter] = state
    optimizer.state.update(saved["other"])


def _written(key: str | int) -> str:
    """Return a key of a parameter's state as the last part of a tensor's name."""
    return f"%int{key}" if isinstance(key, int) else key.replace("%", "%25").replace("/", "%2F")


def _read(text: str) -> str | int:
    return int(text[4:]) if text.startswith("%int") else text.replace("%2F", "/").replace("%25", "%")


def _as_kept(value: Tensor, parameter: Tensor) -> Tensor:
    """Copy what was saved for a parameter: on its device, and laid out as it is (channels-last, say).

    PyTorch's fused optimizers go through the memory of both as if it had one order, whatever their strides say.
    """
    if value.shape != parameter.shape:
        return value.to(parameter.device, copy=True)
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def parameter_root(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the Merkle root over 1 MiB chunks of named tensors: BLAKE3, 32 bytes.

    A tensor's leaf-hashes cover name, dtype, shape and canonical (contiguous, little-endian) bytes, so the root
    doesn't depend on sharding, memory layout or device, and an unchanged tensor has an unchanged subtree.
    """
    return merkle_root(tensor_root(name, tensor) for name, tensor in sorted(tensors.items()))


def tensor_root(name: str, tensor: Tensor) -> bytes:
    """Return the Merkle root of one named tensor."""
    content = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return root_of_chunks(name, tensor.dtype, tuple(tensor.shape), chunk_hashes(content))


def chunk_hashes(content: Tensor) -> list[bytes]:
    """Return the leaf hashes of canonical bytes that begin a chunk: uint8 [n], on the CPU."""
    held = content.numpy()
    return [leaf_hash(held[i : i + CHUNK_BYTES].tobytes(), _blake3) for i in range(0, held.size, CHUNK_BYTES)]


def root_of_chunks(name: str, dtype: torch.dtype, shape: tuple[int, ...], chunks: Iterable[bytes]) -> bytes:
    """Return the Merkle root of one named tensor, whose chunks may have been hashed in several places."""
    return merkle_root((leaf_hash(f"{name}\0{dtype}\0{shape}".encode(), _blake3), *chunks))


def merkle_root(hashes: Iterable[bytes]) -> bytes:
    """Fold hashes into one, as RFC 6962 pairs them, with BLAKE3."""
    tree = MerkleTree(digest=_blake3)
    for one in hashes:
        tree.append(one)
    return tree.root()


def _blake3(data: bytes) -> bytes:
    return blake3.blake3(data).digest()


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name: tied ones once, under the first of their names.

    Names are without what compilation adds to them.
    """
    return distinct_tensors(model.state_dict())


def distinct_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a state, as `model_tensors` names them."""
    found: dict[str, Tensor] = {}
    seen: set[object] = set()
    for name, value in state.items():
        if isinstance(value, Tensor) and (place := _place(value)) not in seen:
            seen.add(place)
            found[name.replace("_orig_mod.", "")] = value
    return found


def load_model_tensors(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    *,
    resumes: bool = False,
    own: Mapping[str, Tensor] | None = None,
) -> None:
    """Copy what `model_tensors` gave into a model, in place, so that what is tied stays tied.

    Args:
        model: the model.
        tensors: by name.
        resumes: they're of the very run that goes on. A buffer may have grown then, or have been None before the first
            forward pass (a memory bank, say), and takes the saved tensor.
        own: what the model holds of them, by name; None for all that it has.

    Raises:
        CheckpointError: a name, a shape or a type differs; nothing has changed then.
    """
    own = model_tensors(model) if own is None else own
    slots = _buffer_slots(model)
    renewed = {name for name in slots.keys() & tensors.keys() if resumes and not _fits(own.get(name), tensors[name])}
    problems = [f"{name} is missing" for name in own.keys() - tensors.keys()]
    problems += [f"{name} isn't in the model" for name in tensors.keys() - own.keys() - renewed]
    for name in (own.keys() & tensors.keys()) - renewed:
        was, now = ((value.dtype, tuple(value.shape)) for value in (tensors[name], own[name]))
        if was != now:
            problems.append(f"{name} is {now[0]} {now[1]}, and was {was[0]} {was[1]}")
    if problems:
        msg = f"The checkpoint's weights don't fit the model: {'; '.join(sorted(problems)[:5])}."
        raise CheckpointError(msg)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with torch.no_grad():
        for name in own.keys() | renewed:
            _put(own.get(name), tensors[name], slots.get(name, ()), device)


_Slots = Sequence[tuple[nn.Module, str]]


def _buffer_slots(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Return where persistent buffers are registered, those that are None too: tied ones under their first name."""
    found: dict[str, list[tuple[nn.Module, str]]] = {}
    first: dict[object, str] = {}
    for path, module in model.named_modules():
        for leaf, value in module._buffers.items():  # noqa: SLF001
            if leaf not in module._non_persistent_buffers_set:  # noqa: SLF001
                name = f"{path}.{leaf}".lstrip(".").replace("_orig_mod.", "")
                name = name if value is None else first.setdefault(_place(value), name)
                found.setdefault(name, []).append((module, leaf))
    return found


def _fits(own: Tensor | None, saved: Tensor) -> bool:
    return own is not None and (own.dtype, own.shape) == (saved.dtype, saved.shape)


def _put(own: Tensor | None, saved: Tensor, slots: _Slots, device: torch.device) -> None:
    """Copy a saved tensor into its place; where that can't hold it, a buffer becomes a tensor of its own."""
    if own is not None and _fits(own, saved):
        repeats = any(size > 1 and not stride for size, stride in zip(own.shape, own.stride(), strict=True))
        if not repeats:
            own.copy_(saved)
            return
        if torch.equal(own, saved.to(own.device)):
            return  # Expanded, as it was: elements that share their memory can't be written to.
    made = saved.to(own.device if own is not None else device, copy=True)
    for module, leaf in slots:
        module._buffers[leaf] = made  # noqa: SLF001


def _place(tensor: Tensor) -> object:
    """Return what two names of one tensor have in common; nothing is equal to an empty tensor."""
    if not tensor.numel():
        return object()
    # On `meta` all of them are at 0.
    place = tensor.data_ptr() or (tensor.untyped_storage()._cdata, tensor.storage_offset())  # noqa: SLF001
    return tensor.device, place, tuple(tensor.shape), tensor.stride(), tensor.dtype
