"""Threads, deterministic kernels and generators of a run, and the signals that ask it to stop."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

import torch

from cosmati.core.memory import freed_memory_kept
from cosmati.errors import PlanError
from cosmati.train.assembly import Assembly
from cosmati.train.compiled_blocks import is_compiled

# A property of the module, which the stubs lack.
_FILL = "fill_uninitialized_memory"


@contextmanager
def environment(assembly: Assembly) -> Iterator[None]:
    """Set all that is around a run, and leave it as it was found."""
    with freed_memory_kept(), numerics(assembly):
        yield


@contextmanager
def numerics(assembly: Assembly) -> Iterator[None]:
    """Set threads, deterministic kernels and generators for a run, and leave them as they were found."""
    config = assembly.config
    with ExitStack() as stack:
        if config.num_threads is not None:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(config.num_threads)
        if config.deterministic:
            _require_workspace(assembly.device)
            was, warned = (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            )
            settings = sys.modules["torch.utils.deterministic"]
            fills, benchmark = getattr(settings, _FILL), torch.backends.cudnn.benchmark
            stack.callback(torch.use_deterministic_algorithms, was, warn_only=warned)
            stack.callback(setattr, settings, _FILL, fills)
            stack.callback(setattr, torch.backends.cudnn, "benchmark", benchmark)
            torch.use_deterministic_algorithms(mode=True)
            setattr(settings, _FILL, False)
            torch.backends.cudnn.benchmark = False
        if config.compile_blocks:
            # A silent fall back to eager would change bits.
            # The limit counts the blocks of one class together, in training and in evaluation, for each shape.
            blocks = sum(map(is_compiled, assembly.model.modules()))
            shapes = math.prod(method.shapes(assembly.budget) for method in assembly.plan.methods)
            limit = max(torch._dynamo.config.recompile_limit, 2 * blocks * shapes)  # noqa: SLF001
            stack.enter_context(
                torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=limit)  # noqa: SLF001
            )
        stack.enter_context(assembly.generators.restored())
        yield


def _require_workspace(device: torch.device) -> None:
    if device.type == "cuda" and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        msg = (
            "Deterministic cuBLAS needs CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment before the process starts. "
            "Set it in the launcher, or use RunConfig(deterministic=False) and give up the guarantees."
        )
        raise PlanError(msg)


class StopSignal:
    """Turns Ctrl-C and SIGTERM into a stop after the step in progress; a second Ctrl-C interrupts at once.

    Attributes:
        is_set: whether to stop: somebody may set it who isn't a signal.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._was_signalled = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen, in the main thread only, and put back whoever listened before."""
        with ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGINT, signal.SIGTERM):
                    stack.callback(signal.signal, number, signal.signal(number, self._on_signal))
            yield

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._was_signalled:
            raise KeyboardInterrupt
        self.is_set = self._was_signalled = True
