"""Weights without their model's code: what a checkpoint gives by itself, which nothing can measure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from cosmati.core.state import parameter_root
from cosmati.errors import ExportError
from cosmati.export.card import CardFacts
from cosmati.export.formats import WEIGHTS, describe_files
from cosmati.export.publishing import Origin, drafted, finish

_KNOWN = ("EMA(", "SWA(")
"""Methods whose averages a checkpoint holds as they are."""
_MEND = "Give the recipe: --recipe FILE[:FUNCTION]."


def export_weights(
    model: Mapping[str, Tensor], state: Mapping[str, Tensor], identity: Mapping[str, Any], out: Path, origin: Origin
) -> None:
    """Write a checkpoint's weights, averages in their places where the run kept them.

    Args:
        model: parameters and buffers by name.
        state: tensors of optimizers and methods by name.
        identity: the run's, of the checkpoint.
        out: a folder that isn't there yet.
        origin: what the weights come from.

    Raises:
        ExportError: what was evaluated can't be told from the checkpoint alone.
    """
    averages, whose = averages_in(state, identity, origin)
    statistics = [name for name in model if name.endswith("running_mean")]
    if averages and statistics:
        msg = (
            f"{whose} was evaluated with BatchNorm's statistics of its own ({statistics[0]}), which are computed from "
            f"the data and stand in no checkpoint. {_MEND}"
        )
        raise ExportError(msg)
    tensors = {n: averages[n].to(v.dtype) if n in averages else v for n, v in model.items()}
    with drafted(out) as draft:
        held = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
        save_file(held, draft / WEIGHTS, metadata={"format": "pt"})
        facts = CardFacts(
            record=origin.record,
            to="safetensors",
            model="model",
            step=origin.step,
            checkpoint=origin.checkpoint,
            root=parameter_root(tensors).hex(),
            structure=origin.structure,
            averaged=whose,
            files=describe_files(draft),
        )
        finish(draft, out, facts, origin.folder)


def averages_in(
    state: Mapping[str, Tensor], identity: Mapping[str, Any], origin: Origin
) -> tuple[dict[str, Tensor], str]:
    """Return the averages that a checkpoint holds, by parameter name, and whose they are.

    Raises:
        ExportError: the run kept others, which only its own code computes.
    """
    lines = list(origin.record.plan)
    strangers = [line.method for line in lines if line.stage == "average" and not line.method.startswith(_KNOWN)]
    strangers += [str(v) for n, v in identity.items() if n.startswith("optimizers.") and "ScheduleFree" in str(v)]
    # A class of the user's own may average too.
    own = [
        n.split(".")[1] for n in identity if n.startswith(("optimizers.", "method_options.")) and n.endswith(".code")
    ]
    strangers += [f"an optimizer or a method of your own (number {index})" for index in own]
    if strangers:
        msg = (
            f"What the run was evaluated on can't be told from a checkpoint alone: {strangers[0]} may compute an "
            f"average that no checkpoint holds. {_MEND}"
        )
        raise ExportError(msg)
    for index, line in enumerate(lines):
        prefix = f"method/{index}/average/"
        found = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        if found and line.method.startswith(_KNOWN):
            return found, line.method
    return {}, ""
