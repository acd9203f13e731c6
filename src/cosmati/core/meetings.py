"""How often this process has met others: code of the user's own may wait for them, where only some of them run it."""

from __future__ import annotations

import torch.distributed as dist


def num_collectives() -> list[int]:
    """Return how many collectives each process group has seen; nothing where a process is alone."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return []
    groups = list(dist.distributed_c10d._world.pg_map)  # noqa: SLF001  (no other list of them)
    return [group._get_sequence_number_for_group() for group in groups]  # type: ignore[attr-defined]  # noqa: SLF001
