"""How often this process has met others: code of the user's own may wait for them, where only some of them run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist

_MET = ("reduce", "gather", "scatter", "broadcast", "all_to_all", "alltoall", "send", "recv", "barrier")
"""What the names of a group's functions hold that wait for others."""
_OPERATORS = (
    *("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_", "broadcast", "broadcast_"),
    *("all_gather_into_tensor", "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced", "all_to_all_single"),
    *("reduce_scatter_tensor", "reduce_scatter_tensor_out", "reduce_scatter_tensor_coalesced"),
    *("isend", "irecv", "batch_p2p_ops"),
)
"""Those of torch's functional collectives, which reach a group past its functions."""
_forbidden = list[list[str]]()


class MetAloneError(RuntimeError):
    """Code has called a collective where no other process would."""


def num_collectives() -> list[int]:
    """Return how many collectives each process group has seen; nothing where a process is alone."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return []
    groups = list(dist.distributed_c10d._world.pg_map)  # noqa: SLF001  (no other list of them)
    return [group._get_sequence_number_for_group() for group in groups]  # type: ignore[attr-defined]  # noqa: SLF001


def may_meet() -> bool:
    """Say whether collectives may be called: not within `meeting_nobody`."""
    return not _forbidden


@contextmanager
def meeting_nobody() -> Iterator[None]:
    """Let code call no collective, which would wait for ever for processes that don't run it.

    What a graph holds that was compiled before isn't seen: it calls none of these functions.

    Raises:
        MetAloneError: it has called one, and whoever called it may have caught that.
    """
    tried = list[str]()
    with ExitStack() as stack:
        _forbidden.append(tried)
        stack.callback(_forbidden.pop)
        waiting = [name for name in vars(dist.ProcessGroup) if any(part in name for part in _MET)]
        operators = (torch.ops._c10d_functional, torch.ops._c10d_functional_autograd)  # noqa: SLF001  (torch's own)
        for owner, names in ((dist.ProcessGroup, waiting), *((one, _OPERATORS) for one in operators)):
            for name in names:
                stack.callback(_put_back, owner, name, vars(owner).get(name))
                setattr(owner, name, _refusing(name, tried))
        yield
    if tried:
        raise MetAloneError(tried[0])


def _refusing(name: str, tried: list[str]) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **_named: Any) -> NoReturn:  # noqa: ANN401  (a collective's)
        tried.append(name)
        raise MetAloneError(name)

    return refuse


def _put_back(owner: Any, name: str, was: object) -> None:  # noqa: ANN401  (a class, or a namespace of operators)
    if was is None:
        delattr(owner, name)
    else:
        setattr(owner, name, was)
