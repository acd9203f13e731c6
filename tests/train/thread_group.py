"""Ranks in threads of one process, with PyTorch's own collectives, FSDP2 among them: what its own tests run on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from cosmati.train.ranks import Ranks

Result = TypeVar("Result")


def on_threads(world: int, work: Callable[[Ranks], Result]) -> list[Result]:
    """Return what each rank's thread returns; the first error of one ends them all."""
    isolate: Any = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    store = dist.HashStore()
    errors: list[BaseException] = []

    def start(rank: int) -> Result | None:
        dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
        try:
            return work(Ranks())
        except BaseException as error:  # noqa: BLE001  (also what ends the threads that wait for one that failed)
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)
            return None
        finally:
            dist.destroy_process_group()

    threaded._install_threaded_pg()
    isolate(True)
    try:
        with ThreadPoolExecutor(world) as pool:
            found: list[Any] = list(pool.map(start, range(world)))
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        isolate(False)
    if errors:
        raise errors[0]
    return found
