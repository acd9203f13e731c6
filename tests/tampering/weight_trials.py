"""Tampering with model checkpoints whose weights a ledger signs."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cosmati.audit.weights import check_weights
from cosmati.core.state import parameter_root
from cosmati.errors import CosmatiError
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.writer import LedgerWriter
from cosmati.records.ledger import CheckpointEntry
from tests.ledger.ledgers import ORIGIN, append_steps, digest, run_entry
from tests.ledger.test_tampering import KEY

from .trials import FOUND, HARMLESS, MISSED, Trial, change_bytes

STEPS = (2, 4, 6)


def tensors_of(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return all that a safetensors file holds, in bytes."""
    read = load_file(path)
    return {
        name: (str(one.dtype), tuple(one.shape), one.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for name, one in read.items()
    }


class WeightsTarget:
    """Three checkpoints in their folders, and one of steps that a resume has superseded."""

    name = "checkpoint"

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self._folder = folder / "checkpoints"
        self._models: dict[int, dict[str, Tensor]] = {}
        with LedgerWriter.create(folder / "ledger", origin=ORIGIN, key=KEY) as writer:
            writer.append(*run_entry())
            append_steps(writer, range(3))
            self._lost = self._model()
            writer.append(CheckpointEntry(3, digest("lost"), parameter_root(self._lost)))
            writer.append(writer.resume_entry(2))
            for step in range(2, 7):
                if step in STEPS:
                    self._models[step] = self._model()
                    root = parameter_root(self._models[step])
                    writer.append(CheckpointEntry(step, digest(f"s{step}"), root))
                append_steps(writer, range(step, step + 1), attempt=1)
        self._ledger = VerifiedLedger(folder / "ledger")
        self._true = {step: self._save(step, model) for step, model in self._models.items()}
        self._whole = {step: tensors_of(self._path(step)) for step in STEPS}

    @staticmethod
    def _model() -> dict[str, Tensor]:
        bias = torch.randn(4, dtype=torch.bfloat16)
        return {"0.weight": torch.randn(4, 4), "0.bias": bias, "1.weight": torch.randn(4, 4), "seen": torch.tensor(3)}

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08}" / "model.safetensors"

    def _save(self, step: int, model: Mapping[str, Tensor]) -> bytes:
        self._path(step).parent.mkdir(parents=True, exist_ok=True)
        save_file(dict(model), self._path(step))
        return self._path(step).read_bytes()

    def check_untouched(self) -> None:
        """Fail unless each checkpoint is that of its step."""
        for step in STEPS:
            self._path(step).write_bytes(self._true[step])
            assert check_weights(self._ledger, self._path(step)).step == step

    def try_once(self, draw: random.Random) -> Trial:
        """Change bytes of a file, or its tensors, or put another file in its place."""
        step = draw.choice(STEPS)
        path = self._path(step)
        if draw.random() < 0.5:
            kind, data = change_bytes(self._true[step], draw)
            path.write_bytes(data)
        elif draw.random() < 0.2:
            kind = "header"
            path.write_bytes(_reheaded(self._true[step], draw))
        else:
            kind, model = self._changed(step, draw)
            self._save(step, model)
        try:
            check_weights(self._ledger, path)
        except CosmatiError:
            return Trial(kind, FOUND)
        try:
            is_whole = tensors_of(path) == self._whole[step]
        except (SafetensorError, ValueError):
            is_whole = False
        return Trial(kind, HARMLESS if is_whole else MISSED)

    def _changed(self, step: int, draw: random.Random) -> tuple[str, Mapping[str, Tensor]]:
        model: dict[str, Tensor] = {name: one.clone() for name, one in self._models[step].items()}
        name, kinds = draw.choice(sorted(model)), ("drop", "duplicate", "swap", "rename", "cast", "shape", "change")
        kind = draw.choice([*kinds, "checkpoint of another step", "checkpoint of a superseded step"])
        if kind.startswith("checkpoint"):
            others = [self._models[one] for one in STEPS if one != step]
            return kind, draw.choice(others) if kind.endswith("another step") else self._lost
        if kind == "drop":
            del model[name]
        elif kind == "duplicate":
            model[f"{name}.1"] = model[name].clone()
        elif kind == "swap":
            model["0.weight"], model["1.weight"] = model["1.weight"], model["0.weight"]
        elif kind == "rename":
            model[f"{name}s"] = model.pop(name)
        elif kind == "cast":
            model[name] = model[name].to(torch.float64)
        elif kind == "shape":
            model[name] = model[name].reshape(1, -1)
        else:
            flat = model[name].view(-1).view(torch.uint8)
            flat[draw.randrange(len(flat))] ^= 1 << draw.randrange(8)
        return kind, model


def _reheaded(data: bytes, draw: random.Random) -> bytes:
    """Write a file's header anew: in another order, with words beside it, or pointing elsewhere."""
    (size,) = struct.unpack("<Q", data[:8])
    header: dict[str, Any] = json.loads(data[8 : 8 + size])
    names = [name for name in header if name != "__metadata__"]
    how = draw.choice(["order", "words", "offsets"])
    if how == "order":
        draw.shuffle(names)
        header = {name: header[name] for name in names}
    elif how == "words":
        header["__metadata__"] = {"step": str(draw.randrange(99))}
    else:
        one, two = "0.weight", "1.weight"
        header[one]["data_offsets"], header[two]["data_offsets"] = (
            header[two]["data_offsets"],
            header[one]["data_offsets"],
        )
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data[8 + size :]
