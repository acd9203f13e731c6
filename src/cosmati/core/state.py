"""All that a run has to remember: tensors by name, facts as JSON, and a digest that doesn't depend on sharding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import blake3
import torch
from torch import Tensor, nn

from cosmati.errors import CheckpointError
from cosmati.storage.merkle import MerkleTree, leaf_hash

CHUNK_BYTES = 1 << 20


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return an optimizer's state by parameter name, tensors apart from facts.

    Args:
        optimizer: any optimizer whose state is tensors, numbers, strings, None, or lists of these.
        names: name of each parameter by `id`.

    Returns:
        Tensors as `name/key`, and facts as `{"groups": [...], "state": {name: {key: value}}}`.
    """
    tensors: dict[str, Tensor] = {}
    facts: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = names[id(parameter)]
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{key}"] = value
            else:
                facts.setdefault(name, {})[key] = value
    groups = [
        {key: _fact(value) for key, value in group.items() if key != "params" and _is_fact(_fact(value))}
        for group in optimizer.param_groups
    ]
    return tensors, {"groups": groups, "state": facts}


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
    if len(facts["groups"]) != len(optimizer.param_groups):
        msg = (
            f"The checkpoint's optimizer has {len(facts['groups'])} parameter groups, and this one "
            f"{len(optimizer.param_groups)}. "
            "Resume with the recipe that wrote it."
        )
        raise CheckpointError(msg)
    for group, saved in zip(optimizer.param_groups, facts["groups"], strict=True):
        for key, value in saved.items():
            own = group.get(key)
            if isinstance(own, Tensor):
                # In place: a captured graph, or a scheduler, holds this very tensor.
                own.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(own, tuple) else value
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            own = {key.rpartition("/")[2]: value for key, value in tensors.items() if key.rpartition("/")[0] == name}
            # Step counters stay where the optimizer keeps them, on CPU unless its kernels read them; what is shaped as
            # the parameter follows it.
            on_device = bool(group.get("capturable") or group.get("fused"))
            state = {
                key: value.to(parameter.device, copy=True) if value.ndim or on_device else value.clone()
                for key, value in own.items()
            }
            state |= facts["state"].get(name, {})
            if state:
                optimizer.state[parameter] = state


def _fact(value: object) -> object:
    """Return an option as JSON holds it: a learning rate may be a tensor of one number."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _is_fact(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_fact(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


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
