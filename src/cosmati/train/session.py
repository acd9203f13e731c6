"""A run from its opening to its end: the run folder, resumption, what is due when, and a clean stop."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from cosmati.core.batch import iterate_tensors
from cosmati.core.clock import Clock, Time, Unit
from cosmati.core.state import model_tensors, optimizer_tensors, parameter_root, restore_optimizer
from cosmati.errors import CheckpointError, DataError, DivergenceError, PlanError
from cosmati.train.assembly import Assembly
from cosmati.train.checkpoint import (
    Checkpoint,
    list_checkpoints,
    publish_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from cosmati.train.evaluation import evaluate
from cosmati.train.ledger import LedgerObserver
from cosmati.train.observers import MetricsFile, Observer, ProgressBar
from cosmati.train.run_folder import RunFolder

if TYPE_CHECKING:
    from cosmati.train.trainer import Trainer

# A property of the module, which the stubs lack.
_FILL = "fill_uninitialized_memory"


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        outcome: `completed`, or `stopped` by Ctrl-C or SIGTERM.
        clock: where it stands.
        metrics: of the last evaluation.
        seconds: of training, without evaluation and checkpoints.
        seconds_by_part: host seconds by part of a step.
        run_folder: where it is kept.
    """

    outcome: str
    clock: Clock
    metrics: Mapping[str, float]
    seconds: float
    seconds_by_part: Mapping[str, float]
    run_folder: Path | None


@contextmanager
def environment(assembly: Assembly) -> Iterator[None]:
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
            blocks = sum(module._compiled_call_impl is not None for module in assembly.model.modules())  # noqa: SLF001
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


class FitSession:
    """The open run of a trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self._t = trainer
        self._a = trainer.assembly
        self._folder: RunFolder | None = None
        self._ledger: LedgerObserver | None = None
        self._stop = False
        self._seconds_before = 0.0
        self._running_since = perf_counter()
        self._metrics: Mapping[str, float] = {}
        self._outcome = "failed"
        self._old_handlers: dict[int, Any] = {}
        self._own: list[Observer] = []

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            if self._folder is not None:
                self._folder.unlock()
            raise
        return self

    def _open(self) -> None:
        a, t = self._a, self._t
        checkpoint = None
        if a.config.run_folder is not None:
            is_writer = a.ranks.rank == 0
            if is_writer:
                self._folder = RunFolder.open(a.config.run_folder, t)
            a.ranks.barrier()
            found = list_checkpoints(a.config.run_folder / "checkpoints")
            checkpoint = read_checkpoint(found[0]) if found else None
            if checkpoint is not None:
                self._restore(checkpoint)
            if self._folder is not None:
                self._own = [MetricsFile(self._folder.path)]
            if a.plan.facts.has_ledger:
                self._ledger = LedgerObserver(t, a.config.run_folder)
                self._own.append(self._ledger)
        if a.config.progress and a.ranks.rank == 0:
            self._own.append(ProgressBar())
        t.observers += self._own
        for observer in t.observers:
            observer.on_start(t.clock, a.budget)
        self._listen()
        self._running_since = perf_counter()
        t.stopwatch.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        t = self._t
        self._seconds_before = self.training_seconds()
        if kind is not None:
            self._outcome = "diverged" if issubclass(kind, DivergenceError) else "failed"
        if kind is None and self._outcome == "failed":
            # The user's own loop ends where its `with` does.
            self._outcome = "completed" if self._a.budget.is_over(t.clock) else "stopped"
            self._save()
        try:
            for observer in t.observers:
                observer.on_end(t.clock, self._outcome)
        finally:
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)
            if self._folder is not None:
                self._folder.close(self._outcome, self._result())
            t.observers = [observer for observer in t.observers if observer not in self._own]

    def training_seconds(self) -> float:
        """Return the seconds of training so far, evaluation and checkpoints left out."""
        return self._seconds_before + perf_counter() - self._running_since

    @contextmanager
    def _paused(self, part: str) -> Iterator[None]:
        self._seconds_before = self.training_seconds()
        self._t.stopwatch.start()
        try:
            yield
        finally:
            self._t.stopwatch.lap(part)
            self._running_since = perf_counter()

    def run(self) -> RunResult:
        """Step until the budget is spent, the data end, or somebody asks to stop."""
        t, a = self._t, self._a
        if t.feed is None:
            msg = "fit() needs data: Trainer(model, loss, data, ...). With step(), no data are needed."
            raise DataError(msg)
        mine = list(a.ranks.mine(a.num_microbatches))
        evaluate_every, checkpoint_every = (
            self._interval(t) for t in (a.config.evaluate_every, a.config.checkpoint_every)
        )
        outcome = "completed"
        while not a.budget.is_over(t.clock):
            if self._asked_to_stop():
                outcome = "stopped"
                break
            passes = t.feed.num_passes
            data = t.feed.whole(t.clock) if t.is_plain else t.feed.microbatches(t.clock, mine)
            if t.feed.num_passes != passes and t.feed.steps_per_epoch is None:
                # Data without a length tell of an epoch's end only when asked for more.
                t.clock = t.clock._replace(epoch=t.feed.num_passes, step_in_epoch=0)
                if data is None or a.budget.is_over(t.clock):
                    break
            if data is None:
                break
            if t.is_plain:
                t.plain_step(data)
            else:
                t.step_microbatches(data, t.feed.class_ids(t.clock))
            if evaluate_every and t.clock.step % evaluate_every == 0 and not a.budget.is_over(t.clock):
                self._evaluate()
            if checkpoint_every and t.clock.step % checkpoint_every == 0:
                self._save()
        self._outcome = outcome
        t.finite.look(t.clock.step)
        if outcome == "completed":
            self._evaluate()
        self._save()
        return self._result()

    def _result(self) -> RunResult:
        t = self._t
        return RunResult(
            self._outcome,
            t.clock,
            self._metrics,
            self._seconds_before,
            dict(t.stopwatch.seconds),
            self._a.config.run_folder,
        )

    def _interval(self, time: str | None) -> int | None:
        """Return a span in steps."""
        if time is None:
            return None
        parsed, budget = Time.parse(time), self._a.budget
        if parsed.unit is Unit.STEP:
            return max(1, round(parsed.value))
        return max(1, budget.step_of(parsed))

    def _evaluate(self) -> None:
        t, a = self._t, self._a
        if t.evaluation is None:
            return
        with self._paused("evaluation"):
            t.tell("evaluate")
            with t.averaged() as model:
                self._metrics = evaluate(model, t.evaluation, a.ranks, a.device, a.config.autocast(a.device))
            for observer in t.observers:
                observer.on_evaluation(t.clock, self._metrics, self._seconds_before)

    def _save(self) -> None:
        """Write a checkpoint: the ledger covers it before it's published."""
        t, a = self._t, self._a
        if a.config.run_folder is None:
            return
        with self._paused("checkpoint"):
            t.finite.look(t.clock.step)
            a.ranks.barrier()
            if self._folder is not None:
                folder = self._folder.path / "checkpoints"
                model = model_tensors(a.model)
                published = folder / f"step-{t.clock.step:08d}"
                if not published.exists():
                    t.tell("checkpoint")
                    checkpoint = self._gathered(model)
                    draft = write_checkpoint(folder, checkpoint)
                    root = parameter_root(model)
                    for observer in t.observers:
                        observer.on_checkpoint(t.clock, checkpoint.state_digest, root)
                    publish_checkpoint(draft, keep=a.config.num_checkpoints)
            a.ranks.barrier()

    def _gathered(self, model: Mapping[str, torch.Tensor]) -> Checkpoint:
        t, a = self._t, self._a
        names = {id(p): n for n, p in a.model.named_parameters()}
        tensors: dict[str, torch.Tensor] = {}
        optimizers = []
        for index, scheduled in enumerate(a.optimizers):
            own, facts = optimizer_tensors(scheduled.optimizer, names)
            tensors |= {f"optimizer/{index}/{name}": value for name, value in own.items()}
            optimizers.append(facts)
        for index, state in t.states.items():
            tensors |= {
                f"method/{index}/{name}": value
                for name, value in state.items()
                if next(iterate_tensors(value), None) is not None
            }
        facts = {
            **t.state_facts(),
            "plan": a.plan.digest,
            "optimizers": optimizers,
            "withdrawn": [[g.name, g.because] for g in t.plan.guarantees if not g.holds],
            "attempt": self._ledger.attempt if self._ledger else 0,
        }
        return Checkpoint(t.clock.step, model, tensors, facts)

    def _restore(self, checkpoint: Checkpoint) -> None:
        t, a = self._t, self._a
        facts = checkpoint.facts
        if facts["plan"] != a.plan.digest:
            msg = (
                f"The checkpoint of step {checkpoint.step} in {a.config.run_folder} was made by "
                "another plan or recipe. "
                "Resume with the recipe that wrote it, or give the new run a folder of its own."
            )
            raise CheckpointError(msg)
        try:
            a.model.load_state_dict(dict(checkpoint.model), strict=True)
        except RuntimeError as error:
            msg = f"The checkpoint's weights don't fit the model: {error}"
            raise CheckpointError(msg) from error
        names = {id(p): n for n, p in a.model.named_parameters()}
        for index, scheduled in enumerate(a.optimizers):
            own = _below(checkpoint.state, f"optimizer/{index}/")
            restore_optimizer(scheduled.optimizer, names, own, facts["optimizers"][index])
        t.states = {
            i: {n: v.to(a.device) for n, v in _below(checkpoint.state, f"method/{i}/").items()} for i in t.states
        }
        t.clock = Clock(*facts["clock"])
        self._seconds_before = t.clock.seconds
        for name, because in facts["withdrawn"]:
            t.withdrawn = t.withdrawn.withdraw(name, because)
        if t.feed is not None:
            t.feed.restore(facts["feed"], t.clock)

    def _listen(self) -> None:
        """Turn Ctrl-C and SIGTERM into a stop after the step in progress; a second Ctrl-C interrupts at once."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            self._old_handlers[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stop:
            raise KeyboardInterrupt
        self._stop = True

    def _asked_to_stop(self) -> bool:
        return self._a.ranks.agree(self._stop) if self._a.ranks.is_parallel else self._stop


def _below(state: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
