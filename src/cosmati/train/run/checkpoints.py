"""Checkpoints: whole or absent, verified before use, and free of pickle.

A checkpoint is a folder `step-00000100/` with `model.safetensors` (weights and buffers), `state/` (optimizers and
method states, written by PyTorch's distributed checkpoint in its safetensors form), `state.json` (the clock and
all that isn't a tensor) and `digests.json` (SHA-256 of every other file). Where ranks hold unlike parts of the state,
each writes its own in place of the first two (see parts.py). It's written beside its place, synced and renamed.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from cosmati.core.state import tensor_root
from cosmati.errors import CheckpointError
from cosmati.storage.atomic import publish, sync
from cosmati.train.layout.shares import SharePlan, name_of, root_over
from cosmati.train.run.parts import DTYPES, INDEX, HeldState, finish_parts, parts_written, read_parts

_NAME = re.compile(r"step-\d{8,}")
_SIGNED = ("optimizers", "feed", "identity", "initial_root", "phases", "budget_was_read")


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run at one step.

    Attributes:
        step: commits so far.
        model: parameters and buffers by name.
        state: tensors of optimizers and methods by name.
        facts: everything else, as JSON holds it.
    """

    step: int
    model: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    facts: Mapping[str, Any]

    @property
    def signed_digest(self) -> bytes:
        """What the ledger signs: the state's root, and those facts that a resume goes by. 32 bytes."""
        return self.roots.signed_digest

    @property
    def state_digest(self) -> bytes:
        """Merkle root over all tensors: 32 bytes. The files' own digests also cover their order, which varies.

        What observers keep is left out: who watches a run doesn't make it another one.
        """
        return self.roots.state_digest

    @property
    def roots(self) -> Roots:
        """Its digests, for which all tensors are hashed."""
        kinds = {"model": self.model, "state": self.state}
        found = {f"{kind}/{name}": tensor_root(name, one) for kind, own in kinds.items() for name, one in own.items()}
        return roots_over(found, self.facts)


def whole(held: HeldState) -> Checkpoint:
    """Return the state of a run of which this rank holds all."""
    model, state = ({name: span.tensor for name, span in own.items()} for own in (held.model, held.state))
    return Checkpoint(held.step, model, state, held.facts)


class Roots(NamedTuple):
    """What stands for a checkpoint: 32 bytes each.

    Attributes:
        signed_digest: of all that a resume goes by.
        state_digest: of all tensors but for observers' own.
        parameter_root: of parameters and buffers.
    """

    signed_digest: bytes
    state_digest: bytes
    parameter_root: bytes


def roots_over(roots: Mapping[str, bytes], facts: Mapping[str, Any]) -> Roots:
    """Return the digests of a checkpoint.

    Args:
        roots: of its tensors, by `model/name` and `state/name`.
        facts: beside them.
    """
    model = {name_of(key): key for key in roots if key.startswith("model/")}
    state = {name_of(key): key for key in roots if key.startswith("state/") and not key.startswith("state/observer/")}
    digest = root_over(roots, {**model, **state}.values())
    return Roots(signed_digest_of(digest, facts), digest, root_over(roots, model.values()))


def signed_digest_of(state_digest: bytes, facts: Mapping[str, Any]) -> bytes:
    """Return what the ledger signs of a state and its facts.

    Seconds and environment differ between runs of the same bits, and stay out.
    """
    told = {name: facts[name] for name in _SIGNED if name in facts}
    if not facts.get("budget_use_is_told", True):  # else it's as earlier releases signed it
        told["budget_use_is_told"] = False
    text = json.dumps({**told, "clock": list(facts.get("clock", ()))[:5]}, sort_keys=True)
    return hashlib.sha256(state_digest + text.encode()).digest()


def write_checkpoint(folder: Path, checkpoint: Checkpoint, epoch: int | None = None) -> Path:
    """Write a checkpoint, leaving it unpublished until `publish_checkpoint`.

    Args:
        folder: the run's `checkpoints/`.
        checkpoint: what to write.
        epoch: of the writer: one that doesn't know that it's stale may still be at a draft of this step.

    Returns:
        The unpublished folder.

    Raises:
        CheckpointError: the disk refused, or a tensor is of a type that files don't hold.
    """
    if unsaved := unsavable({**checkpoint.model, **checkpoint.state}):
        raise CheckpointError(f"The checkpoint of step {checkpoint.step} can't be written. {unsaved}")
    draft = draft_folder(folder, checkpoint.step, epoch)
    try:
        shutil.rmtree(draft, ignore_errors=True)
        (draft / "state").mkdir(parents=True)
        save_file(_in_own_memory(checkpoint.model), draft / "model.safetensors")
        if checkpoint.state:
            # Imported where it's used: it brings sympy, and 0.8 s.
            from torch.distributed.checkpoint.api import CheckpointException
            from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
            from torch.distributed.checkpoint.state_dict_saver import save

            try:
                with _single_process():
                    save(
                        _in_own_memory(checkpoint.state),
                        storage_writer=HuggingFaceStorageWriter(path=str(draft / "state")),
                        no_dist=True,
                    )
            except CheckpointException as error:
                # It is no Exception, so that nobody would catch it.
                raise OSError(str(error)) from error
        _seal(draft, checkpoint.step, checkpoint.facts, {})
    except (OSError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise not_written(checkpoint.step, folder, error) from error
    return draft


def _seal(draft: Path, step: int, facts: Mapping[str, Any], known: Mapping[str, str]) -> None:
    """Write facts and digests, and sync all; `known` are digests of files that were synced by who wrote them."""
    (draft / "state.json").write_text(json.dumps({"step": step, **facts}))
    digests = {**known, **_digests(draft, known)}
    (draft / "digests.json").write_text(json.dumps(digests, indent=1))
    for path in (*draft.rglob("*"), draft):
        if path.name not in known:
            sync(path)


def not_written(step: int, folder: Path, error: Exception) -> CheckpointError:
    """Return what to say where the disk refused."""
    return CheckpointError(
        f"The checkpoint of step {step} couldn't be written to {folder}: {error}. Free "
        "space or fix the folder, and resume; earlier checkpoints are whole."
    )


def finish_checkpoint(
    draft: Path,
    step: int,
    facts: Mapping[str, Any],
    plan: SharePlan,
    world: int,
    patience_seconds: float,
    abandoned: Event,
) -> Roots:
    """Make one checkpoint of the parts that ranks write, unpublished as yet; return its digests.

    Args:
        draft: with the parts.
        step: of the checkpoint.
        facts: beside its tensors.
        plan: of all parts.
        world: number of ranks.
        patience_seconds: how long to wait for those that aren't there.
        abandoned: says to wait no longer.

    Raises:
        CheckpointError: the disk refused, or a part isn't there.
    """
    try:
        roots, digests = finish_parts(draft, plan, parts_written(draft, world, patience_seconds, abandoned))
        _seal(draft, step, facts, digests)
    except OSError as error:
        raise not_written(step, draft.parent, error) from error
    return roots_over(roots, facts)


def draft_folder(folder: Path, step: int, epoch: int | None) -> Path:
    """Return where a checkpoint is written before it's published."""
    return folder / f".draft-{step:08d}{'' if epoch is None else f'-{epoch}'}"


def unsavable(tensors: Mapping[str, Tensor]) -> str:
    """Say which tensors no checkpoint can hold, why, and what to do; empty where there is none."""
    found = [
        f"{name} ({value.dtype if value.layout is torch.strided else value.layout})"
        for name, value in sorted(tensors.items())
        if value.layout is not torch.strided or value.dtype not in DTYPES.values()
    ]
    if not found:
        return ""
    return (
        f"{', '.join(found[:5])}: safetensors has no such type. Keep it dense and as complex64 or real numbers "
        "(torch.view_as_real), or as a buffer with persistent=False, which is made anew."
    )


def _in_own_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors on the CPU, none of which is a view of something larger, or of another one."""
    found, seen = dict[str, Tensor](), set[int]()
    for name, given in tensors.items():
        value = given.detach().cpu().resolve_conj().resolve_neg().contiguous()
        memory = value.untyped_storage()
        is_own = memory.nbytes() == value.nbytes and memory.data_ptr() not in seen
        seen.add(memory.data_ptr())
        found[name] = value if is_own else value.clone()
    return found


def publish_checkpoint(draft: Path, *, keep: int) -> Path:
    """Give a written checkpoint its name, atomically; remove all but the newest `keep`, and drafts of the killed."""
    target = draft.with_name(f"step-{draft.name.split('-')[1]}")
    shutil.rmtree(target, ignore_errors=True)
    publish(draft, target)
    for old in list_checkpoints(target.parent)[keep:]:
        shutil.rmtree(old)
    for left in target.parent.glob(".draft-*"):
        shutil.rmtree(left, ignore_errors=True)
    return target


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the published checkpoints, newest first; what else somebody has put there is none."""
    found = folder.glob("step-*") if folder.exists() else ()
    return sorted((path for path in found if is_step_name(path.name) and path.is_dir()), key=step_of, reverse=True)


def is_step_name(name: str) -> bool:
    """Say whether a checkpoint may be called so."""
    return _NAME.fullmatch(name) is not None


def step_of(path: Path) -> int:
    """Return the step that the name of a checkpoint's folder says; of a draft, and of one that was set aside, too."""
    found = re.search(r"\d{8,}", path.name)
    return int(found[0]) if found else 0


def choose_checkpoint(folder: Path, which: Literal["newest", "whole"], *, may_move: bool) -> Checkpoint | None:
    """Return the checkpoint to go on from; None where there is none.

    Args:
        folder: the run's `checkpoints/`.
        which: the newest one, or the newest whole one: damaged ones before it are then set aside, under another name.
        may_move: this process is the one that sets them aside.

    Raises:
        CheckpointError: the newest is damaged, or none is whole; the message names the newest whole one.
    """
    damage: list[tuple[Path, CheckpointError]] = []
    for path in list_checkpoints(folder):
        try:
            checkpoint = read_checkpoint(path)
        except CheckpointError as error:
            damage.append((path, error))
            continue
        if damage and which == "newest":
            msg = f"{damage[0][1]} Step {checkpoint.step} is whole: RunConfig(resume_from='whole') goes on from it."
            raise CheckpointError(msg)
        for damaged, _ in damage if may_move else ():
            taken = len(list(folder.glob(f"damaged-*{damaged.name}")))
            damaged.rename(folder / f"damaged-{taken + 1}-{damaged.name}")
        return checkpoint
    if damage:
        raise CheckpointError(f"{damage[0][1]} No checkpoint before it is whole: start again in another folder.")
    return None


def weights_in(checkpoint: Path) -> Path:
    """Return a checkpoint's file of weights; its folder, where ranks have written them in parts."""
    return checkpoint if (checkpoint / INDEX).exists() else checkpoint / "model.safetensors"


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint after checking every byte of it.

    Raises:
        CheckpointError: a file is missing, damaged or foreign.
    """
    try:
        recorded = json.loads((path / "digests.json").read_text())
        actual = _digests(path)
        if recorded != actual:
            wrong = sorted(name for name in {**recorded, **actual} if recorded.get(name) != actual.get(name))
            msg = f"Checkpoint {path} is damaged: {', '.join(wrong)} don't match digests.json."
            raise CheckpointError(msg)
        facts = json.loads((path / "state.json").read_text())
        step = facts.pop("step")
        if is_step_name(path.name) and step != step_of(path):
            raise CheckpointError(f"Checkpoint {path} is of step {step}: its folder's name says another number.")
        if (path / INDEX).exists():
            return Checkpoint(step, *read_parts(path), facts)
        return Checkpoint(step, load_file(path / "model.safetensors"), _read_state(path / "state"), facts)
    except (OSError, ValueError, KeyError, IndexError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"Checkpoint {path} can't be read: {error}.") from error


def _read_state(folder: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118  (not a mapping)
                part = content.get_slice(name)
                state[name] = torch.empty(part.get_shape(), dtype=DTYPES[part.get_dtype()])
    if state:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        with _single_process():
            load(state, storage_reader=HuggingFaceStorageReader(path=str(folder)), no_dist=True)
    return state


@contextmanager
def _single_process() -> Iterator[None]:
    """Rank 0 writes and reads by itself: every rank has the same state, or reads the same files."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _digests(folder: Path, but_for: Collection[str] = ()) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in ("digests.json", *but_for))
    return {str(path.relative_to(folder)): _sha256(path) for path in files}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
