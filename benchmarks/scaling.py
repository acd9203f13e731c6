"""What a step on two ranks costs beside PyTorch's DistributedDataParallel and FSDP2, in time and in resident memory.

Two processes over gloo, one thread each. All arms live in the same two processes and take turns, so that drift hits all
alike; a round ends where the slower rank ends. DDP accumulates with `no_sync` and reduces once a step, while the last
microbatch's backward runs. FSDP2 reduces each microbatch, as it does by itself and as `sharding="full"` has to; beside
it stands what accumulates whole gradients. Resident memory is of processes that run one arm alone.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measure import Row, in_turns, write
from cosmati import Batch, LanguageModel, Lineage, RunConfig, Trainer
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.optim import AdamW
from cosmati.train.config import Sharding

WORLD = 2
SIZES = {"0.7M": (128, 3), "5M": (256, 6)}
"""Width and blocks."""
LENGTH = 128
TOKENS = (512, 2048)
ARMS = {
    "ddp": ("DDP", "DDP again (A/A)", "replicated", "optimizer"),
    "fsdp": ("FSDP2", "FSDP2 again (A/A)", "FSDP2, whole gradients", "full"),
}
_LOSS = LanguageModel()
_TOGETHER = 4
"""Steps of an arm after one another: their first one waits for the other rank."""


def _model(size: str) -> GPT:
    torch.manual_seed(0)
    width, blocks = SIZES[size]
    return GPT(GPTConfig(sequence_length=LENGTH, width=width, num_blocks=blocks, num_heads=4))


def _rows(tokens: int) -> torch.Tensor:
    return torch.randint(0, 256, (tokens // LENGTH, LENGTH + 1), generator=torch.Generator().manual_seed(0))


def _ddp(size: str, rows: torch.Tensor, v: int) -> Callable[[], object]:
    model = DistributedDataParallel(_model(size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        torch.use_deterministic_algorithms(False)
        for index in range(v // WORLD):
            with nullcontext() if index == v // WORLD - 1 else model.no_sync():
                (_LOSS(model, rows).mean() / (v // WORLD)).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.use_deterministic_algorithms(True)

    return step


def _fsdp(size: str, rows: torch.Tensor, v: int, *, reduces_each: bool) -> Callable[[], object]:
    model, mesh = _model(size), init_device_mesh("cpu", (WORLD,))
    blocks = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    for part in (*blocks, model):
        fully_shard(part, mesh=mesh)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        torch.use_deterministic_algorithms(False)
        for index in range(v // WORLD):
            model.set_requires_gradient_sync(reduces_each or index == v // WORLD - 1)
            (_LOSS(model, rows).mean() / (v // WORLD)).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.use_deterministic_algorithms(True)

    return step


def _ours(size: str, rows: torch.Tensor, v: int, sharding: Sharding, runs: ExitStack) -> Callable[[], object]:
    config = RunConfig(budget="1000000ba", num_microbatches=v, sharding=sharding)
    trainer = runs.enter_context(Trainer(_model(size), _LOSS, optimizers=[AdamW(lr=1e-3)], config=config))
    batch = Batch(rows, Lineage(torch.arange(len(rows)), torch.zeros(len(rows), dtype=torch.int64)))
    return lambda: trainer.step_microbatches([batch] * (v // WORLD), [0] * v)


def _step(arm: str, size: str, rows: torch.Tensor, v: int, runs: ExitStack) -> Callable[[], object]:
    if arm.startswith("DDP"):
        return _ddp(size, rows, v)
    if arm.startswith("FSDP2"):
        return _fsdp(size, rows, v, reduces_each="whole" not in arm)
    ours: dict[str, Sharding] = {"replicated": "replicated", "optimizer": "optimizer", "full": "full"}
    return _ours(size, rows, v, ours[arm], runs)


def _timed(step: Callable[[], object], steps: int) -> Callable[[], float]:
    def seconds() -> float:
        dist.barrier()
        start = perf_counter()
        for _ in range(steps):
            step()
        dist.barrier()
        return (perf_counter() - start) / steps

    return seconds


def _rank(folder: Path, asked: dict[str, Any]) -> None:
    """Be one rank: time all arms in turns, or run one and tell its resident memory."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows, rounds, arm = _rows(asked["tokens"]), asked["rounds"], asked.get("alone")
    with ExitStack() as runs:
        if arm is None:
            together = asked["together"]
            arms = {
                name: _timed(_step(name, asked["size"], rows, asked["v"], runs), together) for name in asked["arms"]
            }
            found: Any = [row.__dict__ for row in in_turns(arms, rounds, asked["turns"])]
        else:
            step = _step(arm, asked["size"], rows, asked["v"], runs)
            for _ in range(4):
                step()
            status = Path("/proc/self/status").read_text()
            found = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    # A reducer of DDP that dies joins gloo's threads, and holds the lock that they wait for (torch 2.13): no farewell.
    os._exit(0)


def _launched(asked: dict[str, Any]) -> Any:  # noqa: ANN401  (rows, or MiB)
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
        probe.close()
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(WORLD), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.scaling", folder, json.dumps(asked)]
        ranks = [subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank)}) for rank in range(WORLD)]
        assert [rank.wait() for rank in ranks] == [0] * WORLD
        return json.loads((Path(folder) / "found.json").read_text())


def run(*, quick: bool = False, only: str = "", rounds: int = 0) -> str:
    """Write `results/scaling_*` whose names hold `only`, and return the tables.

    Args:
        quick: see that it runs.
        only: part of a result's name.
        rounds: of each result; 0 for as many as usual.
    """
    cases = [(size, tokens, v) for size in SIZES for tokens in TOKENS for v in (2, 4, 8)]
    tables = []
    for peer, (size, tokens, v) in product(ARMS, cases[:1] if quick else cases):
        name = f"scaling_{peer}_{size.lower().replace('.', '')}_{tokens}_v{v}"
        if only not in name:
            continue
        steps = max(1, round((40 if size == "0.7M" else 8) * 512 * 2 / (tokens * v)))
        together = min(_TOGETHER, steps)
        turns = steps // together
        asked = {"arms": ARMS[peer], "size": size, "tokens": tokens, "v": v, "together": together, "turns": turns}
        rows = [Row(**row) for row in _launched({**asked, "rounds": rounds or (3 if quick else 9)})]
        memory = {arm: _launched({**asked, "rounds": 0, "alone": arm}) for arm in ARMS[peer] if "again" not in arm}
        notes = {
            "clock": "wall clock, to the slower rank's end",
            "ranks": f"{WORLD} processes on one machine, gloo, one thread each",
            "steps a round": turns * together,
            "resident MiB of a rank, at its peak": {arm: round(mib, 1) for arm, mib in memory.items()},
        }
        tables.append(write(name, rows, notes))
    return "\n".join(tables)


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), json.loads(sys.argv[2]))
