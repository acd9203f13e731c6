"""Ray Train: runs a training function on as many workers as the cluster has, and goes on when it loses or gains nodes.

Needs the extra `ray`. Ray begins the workers and watches them; the run goes on from its last checkpoint, to the bits of
one process, with however many workers there are.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from cosmati.errors import MissingExtraError, RunError
from cosmati.storage.fence import fence_off

_BEGUN = "ray.begun"
_START_SECONDS = "15"
"""That Ray waits for workers: a dead node counts for a while, and workers that it's given never come."""
_LOCK_SECONDS = 5.0


def train_on_ray(
    train: Callable[[], object],
    *,
    run_folder: Path,
    num_workers: int,
    fewest_workers: int = 1,
    use_gpu: bool = False,
    max_failures: int = 10,
    resources: Mapping[str, float] | None = None,
    look_seconds: float = 60.0,
) -> None:
    """Train on a Ray cluster, and return when the run has ended.

    Of the workers that there are, so many train as divide `num_workers`; the others idle. Where `num_workers` divides
    V, so do they.

    Args:
        train: builds a `Trainer` and calls `fit()`. It's called by each worker, sent by Ray, and told nothing: the
            process group is there, and the run folder says where to go on.
        run_folder: of the run, absolute, on a disk that all nodes share; the one that `train` gives its `RunConfig`.
        num_workers: at most; a worker is a rank.
        fewest_workers: with fewer, the run waits.
        use_gpu: one for each worker.
        max_failures: how often the workers may be begun again.
        resources: of each worker, as Ray has them; None for a processor or a GPU.
        look_seconds: between two looks for nodes that have come, which the run then grows to.

    Raises:
        MissingExtraError: Ray isn't installed.
        RunError: it has failed too often; its cause is Ray's.
    """
    try:
        from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
        from ray.train.torch import TorchTrainer
    except ImportError as error:
        msg = "Training on Ray needs Ray Train 2. Install it: pip install 'cosmati[ray]'"
        raise MissingExtraError(msg) from error
    _check(run_folder, fewest_workers, num_workers)
    token = secrets.token_hex(8)

    def work() -> None:
        _begin_worker(run_folder, token)
        if _join_divisor(num_workers):
            train()

    trainer = TorchTrainer(
        work,
        scaling_config=ScalingConfig(
            num_workers=num_workers if fewest_workers == num_workers else (fewest_workers, num_workers),
            use_gpu=use_gpu,
            resources_per_worker=dict(resources) if resources else None,
            elastic_resize_monitor_interval_s=look_seconds,
        ),
        run_config=RunConfig(
            name=f"cosmati-{token}",
            storage_path=str(run_folder / "ray"),
            failure_config=FailureConfig(max_failures=max_failures),
        ),
    )
    try:
        with _start_timeout():
            trainer.fit()
    except TrainingFailedError as error:
        msg = f"The run in {run_folder} has failed on Ray: {error}. Mend it, and the same call goes on."
        raise RunError(msg) from error


def _check(run_folder: Path, fewest_workers: int, num_workers: int) -> None:
    if not 1 <= fewest_workers <= num_workers:
        msg = f"{fewest_workers} to {num_workers} workers is no range. Give one at least, and no more than the most."
        raise RunError(msg)
    if not run_folder.is_absolute():
        msg = (
            f"{run_folder} isn't absolute, and a worker begins elsewhere. Give Path(...).absolute(), on a shared disk."
        )
        raise RunError(msg)


def _begin_worker(run_folder: Path, token: str) -> None:
    """Prepare a worker's process, as a launcher does: deterministic cuBLAS, and no earlier worker that may write.

    Args:
        run_folder: of the run.
        token: of the call: where it stands in the folder, workers of this call were there before.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if dist.get_rank() == 0:
        begun = run_folder / _BEGUN
        if begun.exists() and begun.read_text() == token:
            for path in (run_folder, run_folder / "ledger"):
                fence_off(path, wait_seconds=_LOCK_SECONDS)
        else:
            run_folder.mkdir(parents=True, exist_ok=True)
            begun.write_text(token)
    dist.barrier()


def _join_divisor(num_workers: int) -> bool:
    """Leave the process group for one whose ranks divide the most workers; return whether this worker is in it."""
    world, rank = dist.get_world_size(), dist.get_rank()
    most = max(count for count in range(1, world + 1) if num_workers % count == 0)
    if most == world:
        return True
    backend = dist.get_backend()
    port = torch.tensor([_free_port() if rank == 0 else 0], device="cuda" if backend == "nccl" else "cpu")
    dist.broadcast(port, 0)
    dist.destroy_process_group()
    if rank >= most:
        return False
    host = os.environ["MASTER_ADDR"]
    dist.init_process_group(backend, init_method=f"tcp://{host}:{int(port)}", rank=rank, world_size=most)
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _start_timeout() -> Iterator[None]:
    """Let Ray give up workers that don't come, unless the environment says after how long."""
    name = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
    if name in os.environ:
        yield
        return
    os.environ[name] = _START_SECONDS
    try:
        yield
    finally:
        del os.environ[name]
