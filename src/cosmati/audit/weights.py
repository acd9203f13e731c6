"""Whether a file of weights is what a run's ledger says that it trained."""

from __future__ import annotations

import re
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from cosmati.core.state import parameter_root
from cosmati.errors import CheckpointError, RefutedError
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.roots import SignedRoot, signed_roots
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint, weights_in

_STEP_FOLDER = re.compile(r"step-(\d+)")


def named_weights(place: Path, ledger: Path) -> Path:
    """Return the weights that a path within a run names: a checkpoint's, or the newest one's if it's the run itself.

    They are a file; or the checkpoint's folder, where ranks have written them in parts.

    Args:
        place: the run's folder, its `ledger` or `checkpoints`, a checkpoint's folder, or a file of weights.
        ledger: the folder of the run's ledger.

    Raises:
        CheckpointError: there are no weights.
    """
    place, ledger = place.resolve(), ledger.resolve()
    run = ledger.parent
    found = list_checkpoints(run / "checkpoints")
    if place not in (run, ledger, run / "checkpoints"):
        named = weights_in(place) if place.is_dir() else place
        if not named.exists():
            others = ", ".join(one.name for one in found[:3]) or "none"
            msg = (
                f"There are no weights in {place}: it isn't a checkpoint of {run}. Name one that's there (newest "
                f"first: {others}), or give the run itself for its newest."
            )
            raise CheckpointError(msg)
        return named
    if not found:
        msg = f"{run} holds no checkpoint. Name the file of weights: --weights FILE.safetensors."
        raise CheckpointError(msg)
    return weights_in(found[0])


def check_weights(ledger: VerifiedLedger, path: Path) -> SignedRoot:
    """Return the signed root that the weights in a file have.

    Args:
        ledger: of the run.
        path: a safetensors file of parameters and buffers by name, or the folder of a checkpoint in parts. A checkpoint
            must hold the weights of its folder's step.

    Raises:
        CheckpointError: the file can't be read. RefutedError: no entry signs these weights, or none that stands, or
            they're those of another step.
    """
    try:
        root = parameter_root(read_checkpoint(path).model if path.is_dir() else load_file(path))
    except (OSError, ValueError, SafetensorError) as error:
        msg = f"The weights {path} can't be read: {error}. Give a whole safetensors file."
        raise CheckpointError(msg) from error
    signed = signed_roots(ledger)
    same = [one for one in signed if one.root == root]
    standing = [one for one in same if one.stands]
    match = _STEP_FOLDER.fullmatch((path / "_" if path.is_dir() else path).resolve().parent.name)
    wanted = [one for one in standing if match is None or one.step == int(match[1])]
    if wanted:
        return wanted[-1]
    if standing:
        raise RefutedError(
            f"{path} holds the weights after {standing[-1].step} steps, which entry {standing[-1].index} signs, and "
            "its folder's name says another number: one checkpoint's weights were put into another's folder."
        )
    if same:
        raise RefutedError(
            f"{path} holds the weights after {same[-1].step} steps of an attempt that was superseded (entry "
            f"{same[-1].index}): the run went on from an earlier step, or something was dropped from them since."
        )
    steps = ", ".join(str(one.step) for one in signed if one.stands) or "none"
    raise RefutedError(
        f"No entry signs the weights in {path}, whose root is {root.hex()}: they were changed, or are of another run. "
        f"Numbers of steps after which a root is signed: {steps}."
    )
