"""A run that goes on over data in which something isn't any more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cosmati.train.run.checkpoints import Checkpoint
from cosmati.train.script_names import note_files


def of_another_source(checkpoint: Checkpoint, identity: Mapping[str, Any]) -> Checkpoint:
    """Return a checkpoint as a run's over other data: each tensor, and each fact that isn't of the data, as it was."""
    kept = {name: value for name, value in checkpoint.facts["identity"].items() if not name.startswith("data.")}
    data = {name: value for name, value in identity.items() if name.startswith("data.")}
    now = {**kept, **data}
    files = {**checkpoint.facts.get("files", {}), **note_files(now)}
    return replace(checkpoint, facts={**checkpoint.facts, "identity": now, "files": files})
