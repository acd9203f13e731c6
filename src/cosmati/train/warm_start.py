"""Weights of another run to start from, and what the new run says of that run."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from cosmati.core.state import load_model_tensors, parameter_root
from cosmati.errors import CheckpointError
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint


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
    found = list_checkpoints(path / "checkpoints") or ([path] if (path / "model.safetensors").exists() else [])
    if not found:
        msg = f"{path} holds no weights. Give a run's folder, one of its checkpoints, or a safetensors file."
        raise CheckpointError(msg)
    checkpoint = read_checkpoint(found[0])
    load_model_tensors(model, checkpoint.model)
    run = found[0].parent.parent.name
    return {"run": run, "step": checkpoint.step, "root": parameter_root(checkpoint.model).hex()}
