"""What a run starts from: the model on its device, the same weights on every rank, those of another run if asked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from cosmati.core.state import load_model_tensors, parameter_root
from cosmati.errors import CheckpointError, CosmatiError, PlanError
from cosmati.train.config import RunConfig
from cosmati.train.content import content_digest
from cosmati.train.ingredients import Ingredients
from cosmati.train.loss_state import loss_module
from cosmati.train.ranks import Ranks
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from cosmati.train.run.copy_place import CopyPlace, url_of_copies


def place(model: nn.Module, device: torch.device, given: Ingredients, ranks: Ranks) -> Mapping[str, object]:
    """Put the model where it trains, with the weights to begin with; return what they're derived from."""
    model.to(device)
    config = given.config
    begins_elsewhere = config.load_weights is not None and not _has_begun(config)
    parent = load_weights(model, Path(str(config.load_weights))) if begins_elsewhere else {}
    # Whatever each rank has drawn: all start from one root.
    losses = [given.loss] if callable(given.loss) else [sub_step.loss for sub_step in given.loss]
    modules = [model, *(module for loss in losses if (module := loss_module(loss)) is not None)]
    held = [pair for module in modules for pair in (*module.named_parameters(), *module.named_buffers())]
    ranks.share(tensor for _, tensor in held if tensor.layout is torch.strided)
    _refuse_unlike_sparse(ranks, {name: tensor for name, tensor in held if tensor.layout is not torch.strided})
    return parent


def _refuse_unlike_sparse(ranks: Ranks, tensors: Mapping[str, Tensor]) -> None:
    """Refuse what the first rank's can't be received into, where ranks have made it unlike.

    Raises:
        PlanError: on all ranks, by name.
    """
    if tensors and (unlike := ranks.unlike_names({name: content_digest(one) for name, one in tensors.items()})):
        msg = (
            f"{', '.join(unlike[:5])} (sparse) differs from rank to rank, and every rank has to make the same: the "
            "first one's can't be sent into another's memory. Seed what it's made from alike on all ranks."
        )
        raise PlanError(msg)


def _has_begun(config: RunConfig) -> bool:
    """Say whether the run has checkpoints already, be it only where they are copied to: they're fetched later."""
    if config.run_folder is None:
        return False
    run = Path(config.run_folder)
    if list_checkpoints(run / "checkpoints"):
        return True
    if not config.checkpoint_to:
        return False
    try:
        return bool(CopyPlace(url_of_copies(config.checkpoint_to, run)).steps())
    except (CosmatiError, OSError, ValueError):
        return True  # Who fetches them says what's wrong.


def load_weights(model: nn.Module, path: Path) -> dict[str, object]:
    """Put another run's weights and buffers into a model.

    Args:
        model: after surgery.
        path: a run's folder (its newest checkpoint is taken), a checkpoint, or a safetensors file.

    Returns:
        What the new run is derived from: run, step, and the weights' Merkle root.

    Raises:
        CheckpointError: nothing to load there, or it doesn't fit the model.
    """
    if path.is_file():
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} can't be read as safetensors: {error}. Give another file.") from error
        load_model_tensors(model, tensors)
        return {"file": path.name, "root": parameter_root(tensors).hex()}
    found = list_checkpoints(path / "checkpoints") or ([path] if (path / "digests.json").exists() else [])
    if not found:
        msg = f"{path} holds no weights. Give a run's folder, one of its checkpoints, or a safetensors file."
        raise CheckpointError(msg)
    checkpoint = read_checkpoint(found[0])
    load_model_tensors(model, checkpoint.model)
    run = found[0].parent.parent.name
    return {"run": run, "step": checkpoint.step, "root": parameter_root(checkpoint.model).hex()}
