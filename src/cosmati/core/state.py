"""All that a run has to remember: tensors by name, facts as JSON, and a digest that doesn't depend on sharding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
            if isinstance(value, Tensor):
                tensors[f"{name}/{key}"] = value
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
            own = {key.rpartition("/")[2]: value for key, value in tensors.items() if key.rpartition("/")[0] == name}
            # Step counters stay where the optimizer keeps them, on CPU unless its kernels read them; what is shaped as
            # the parameter follows it.
            on_device = bool(group.get("capturable") or group.get("fused"))
            state = {
                key: value.to(parameter.device, copy=True) if value.ndim or on_device else value.clone()
                for key, value in own.items()
            }
            state |= saved["state"].get(name, {})
            if state:
                optimizer.state[parameter] = state
    optimizer.state.update(saved["other"])


def parameter_root(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the Merkle root over 1 MiB chunks of named tensors: BLAKE3, 32 bytes.

    A tensor's leaf-hashes cover name, dtype, shape and canonical (contiguous, little-endian) bytes, so the root
    doesn't depend on sharding, memory layout or device, and an unchanged tensor has an unchanged subtree.
    """
    return merkle_root(tensor_root(name, tensor) for name, tensor in sorted(tensors.items()))


def tensor_root(name: str, tensor: Tensor) -> bytes:
    """Return the Merkle root of one named tensor."""
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    head = f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}".encode()
    chunks = (content[i : i + CHUNK_BYTES].tobytes() for i in range(0, content.size, CHUNK_BYTES))
    return merkle_root(leaf_hash(data, _blake3) for data in (head, *chunks))


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
    found: dict[str, Tensor] = {}
    seen: set[object] = set()
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor) and (place := _place(value)) not in seen:
            seen.add(place)
            found[name.replace("_orig_mod.", "")] = value
    return found


def load_model_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy what `model_tensors` gave into a model, in place, so that what is tied stays tied.

    Raises:
        CheckpointError: a name, a shape or a type differs; nothing has changed then.
    """
    own = model_tensors(model)
    problems = [f"{name} is missing" for name in own.keys() - tensors.keys()]
    problems += [f"{name} isn't in the model" for name in tensors.keys() - own.keys()]
    for name in own.keys() & tensors.keys():
        was, now = ((value.dtype, tuple(value.shape)) for value in (tensors[name], own[name]))
        if was != now:
            problems.append(f"{name} is {now[0]} {now[1]}, and was {was[0]} {was[1]}")
    if problems:
        msg = f"The checkpoint's weights don't fit the model: {'; '.join(sorted(problems)[:5])}."
        raise CheckpointError(msg)
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(tensors[name])


def _place(tensor: Tensor) -> object:
    """Return what two names of one tensor have in common; nothing is equal to an empty tensor."""
    if not tensor.numel():
        return object()
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
