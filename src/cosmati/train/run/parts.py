"""A checkpoint in parts: each rank writes its share of the state, and no rank ever holds all of it.

Its folder has `part-00000-of-00004.safetensors` and so on, `index.json` (each tensor's type and shape, and which part
holds which of its elements; the root of the weights), and `state.json` and `digests.json` as every checkpoint has. A
tensor `model/w` stands in a part as `model/w@0`: flat, from its element 0 on. There is no pickle, and one plain process
can read it.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from cosmati.core.state import chunk_hashes
from cosmati.errors import CheckpointError
from cosmati.storage.atomic import replace_file, sync
from cosmati.train.layout.shares import ElementRun, RunContent, SharePlan, root_over, roots_of
from cosmati.train.layout.span import HeldSpan

INDEX = "index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
}
"""What safetensors files hold, by their names for it."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_WRITTEN_BYTES = 16 << 20
_PAUSE_SECONDS = 0.02


@dataclass(frozen=True)
class HeldState:
    """What this rank holds of the state of a run at one step.

    Attributes:
        step: commits so far.
        model: parameters and buffers by name.
        state: tensors of optimizers and methods by name.
        facts: everything else, as JSON holds it.
    """

    step: int
    model: Mapping[str, HeldSpan]
    state: Mapping[str, HeldSpan]
    facts: Mapping[str, Any]

    @property
    def spans(self) -> dict[str, HeldSpan]:
        """All tensors, by keys that say which kind of thing each is of."""
        kinds = {"model": self.model, "state": self.state}
        return {f"{kind}/{name}": span for kind, own in kinds.items() for name, span in own.items()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What this rank holds of all tensors, by name."""
        return {name: span.tensor for own in (self.model, self.state) for name, span in own.items()}


class Placed(NamedTuple):
    """A run of this rank's, and where its bytes are among those of its part."""

    key: str
    run: ElementRun
    start: int
    stop: int


class Share:
    """This rank's share of a state, in memory of its own that the next checkpoint uses again."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.placed: list[Placed] = []

    def fill(self, plan: SharePlan, rank: int, parts: Iterable[RunContent]) -> None:
        """Copy this rank's runs: those of the widest types first, so that each is aligned."""
        own = [(key, run) for key, one in plan.items() for run in one.runs if run.writer == rank]
        self.placed, place = [], 0
        for key, run in sorted(own, key=lambda one: (-plan[one[0]].dtype.itemsize, one)):
            stop = place + plan[key].num_bytes(run.stop - run.start)
            self.placed.append(Placed(key, run, place, stop))
            place = stop
        if len(self._memory) < place:
            self._memory = torch.empty(place, dtype=torch.uint8)
        places = {(one.key, one.run): one for one in self.placed}
        for part in parts:
            self.content(places[part.key, part.run]).copy_(part.content)

    def content(self, one: Placed) -> Tensor:
        """Return a run's bytes."""
        return self._memory[one.start : one.stop]

    @property
    def num_bytes(self) -> int:
        """Of all runs."""
        return self.placed[-1].stop if self.placed else 0

    def hashes(self) -> bytes:
        """Return the leaf hashes of all chunks, in the order of keys and runs."""
        ordered = sorted(self.placed, key=lambda one: (one.key, one.run.start))
        return b"".join(found for one in ordered for found in chunk_hashes(self.content(one)))

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Yield all bytes as they follow each other."""
        for start in range(0, self.num_bytes, _WRITTEN_BYTES):
            yield self._memory[start : min(start + _WRITTEN_BYTES, self.num_bytes)].numpy().data


def part_name(rank: int, world: int) -> str:
    """Return the name of a rank's part."""
    return f"part-{rank:05d}-of-{world:05d}.safetensors"


def write_part(draft: Path, rank: int, world: int, plan: SharePlan, share: Share) -> None:
    """Write and sync this rank's part, and beside it, once it's on disk, its digests; no other rank is asked.

    Raises:
        OSError: the disk refused.
    """
    tensors = {
        f"{one.key}@{one.run.start}": {
            "dtype": _NAMES[plan[one.key].dtype],
            "shape": [one.run.stop - one.run.start],
            "data_offsets": [one.start, one.stop],
        }
        for one in share.placed
    }
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % 8)
    path, digest = draft / part_name(rank, world), hashlib.sha256()
    draft.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for piece in chain((len(text).to_bytes(8, "little"), text), share.pieces()):
            digest.update(piece)
            file.write(piece)
    sync(path)
    told = {"sha256": digest.hexdigest(), "bytes": path.stat().st_size, "chunks": share.hashes().hex()}
    replace_file(_told(path), json.dumps(told).encode())


def _told(part: Path) -> Path:
    return part.with_suffix(".json")


def parts_written(draft: Path, world: int, patience_seconds: float, abandoned: Event) -> list[dict[str, Any]]:
    """Return what each rank has told of its part, once all have; don't wait where that is abandoned.

    Raises:
        CheckpointError: one hasn't, or what it has written isn't seen here.
    """
    until = time.monotonic() + patience_seconds
    found: list[dict[str, Any]] = []
    for rank in range(world):
        path = draft / part_name(rank, world)
        while not _told(path).exists():
            if time.monotonic() > until or abandoned.is_set():
                msg = (
                    f"Rank {rank}'s part of the checkpoint isn't in {draft}, and was waited for. All ranks "
                    "have to see one run folder: give one on a file system that they share, and look whether that "
                    "rank runs."
                )
                raise CheckpointError(msg)
            abandoned.wait(_PAUSE_SECONDS)
        found.append(json.loads(_told(path).read_text()))
        if path.stat().st_size != found[-1]["bytes"]:
            raise CheckpointError(f"{path} has another length here than rank {rank} has written. Look at the disk.")
    return found


def finish_parts(
    draft: Path, plan: SharePlan, told: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, bytes], dict[str, str]]:
    """Write the index over all parts; return each tensor's root, and the digests of the parts' files."""
    world = len(told)
    index = {
        key: {
            "dtype": str(one.dtype).removeprefix("torch."),
            "shape": list(one.shape),
            "runs": [[run.writer, run.start, run.stop] for run in one.runs],
        }
        for key, one in plan.items()
    }
    roots = roots_of(plan, [bytes.fromhex(one["chunks"]) for one in told])
    root = root_over(roots, [key for key in plan if key.startswith("model/")]).hex()
    about = {"version": 1, "world": world, "parameter_root": root, "tensors": index}
    (draft / INDEX).write_text(json.dumps(about))
    names = [part_name(rank, world) for rank in range(world)]
    for name in names:
        _told(draft / name).unlink()
    return roots, {name: one["sha256"] for name, one in zip(names, told, strict=True)}


class StoredTensors(Mapping[str, Tensor]):
    """Whole tensors of one kind, each read when it's asked for: a rank that takes its part of each holds no more.

    Args:
        kind: `model` or `state`.
        tensors: by key, as the index tells of them.
        parts: opened, by rank.
    """

    def __init__(self, kind: str, tensors: Mapping[str, Any], parts: Sequence[Any]) -> None:
        self._kind, self._parts = kind, parts
        self._told = {key.partition("/")[2]: told for key, told in tensors.items() if key.startswith(f"{kind}/")}
        for name in self._told:
            self._check(name)

    def _check(self, name: str) -> None:
        key, told = f"{self._kind}/{name}", self._told[name]
        ends = [0, *(number for _, *run in told["runs"] for number in run), math.prod(told["shape"])]
        if any(one != other for one, other in list(pairwise(ends))[::2]):
            raise ValueError(f"index.json doesn't say where each element of {key} is")
        for writer, start, stop in told["runs"]:
            found = self._parts[writer].get_slice(f"{key}@{start}")
            if DTYPES.get(found.get_dtype()) != getattr(torch, told["dtype"], None) or found.get_shape() != [
                stop - start
            ]:
                raise ValueError(f"{key} isn't in part {writer} as index.json says")

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor."""
        told = self._told[name]
        whole = torch.empty(math.prod(told["shape"]), dtype=getattr(torch, told["dtype"]))
        for writer, start, stop in told["runs"]:
            whole[start:stop].copy_(self._parts[writer].get_tensor(f"{self._kind}/{name}@{start}"))
        return whole.view(told["shape"])

    def __iter__(self) -> Iterator[str]:
        """Go through the names."""
        return iter(self._told)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._told)


def read_parts(path: Path) -> tuple[StoredTensors, StoredTensors]:
    """Return model and state of a checkpoint in parts.

    Raises:
        ValueError: the index isn't one, or doesn't say where each element is. SafetensorError: a part is damaged.
    """
    index = json.loads((path / INDEX).read_text())
    if index["version"] != 1:
        raise ValueError(f"its parts are of version {index['version']}, and this release knows 1")
    world, tensors = index["world"], index["tensors"]
    # Open as long as somebody may read.
    parts = [safe_open(path / part_name(rank, world), framework="pt") for rank in range(world)]
    return StoredTensors("model", tensors, parts), StoredTensors("state", tensors, parts)
