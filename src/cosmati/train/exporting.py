"""A trainer's way out: the model that is evaluated, exported and checked against what was measured."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cosmati.core.batch import Data
from cosmati.core.plan import describe
from cosmati.errors import ExportError, PlanError
from cosmati.export.comparison import EXACT, LOW_PRECISION, CallInputs, Metrics, is_close
from cosmati.export.formats import ExportForm
from cosmati.export.publishing import Check, Origin, Say, export_model, quiet
from cosmati.optim.stepping import GroupedOptimizer
from cosmati.records.run import GuaranteeRecord, RunRecord
from cosmati.train.averaging import averaged_weights
from cosmati.train.evaluation import kept_state, try_out
from cosmati.train.facts import facts_of
from cosmati.train.identity import Change, changes, is_other_python
from cosmati.train.lifecycle import Lifecycle
from cosmati.train.named_evaluations import evaluate_all, first_batch
from cosmati.train.probe import Probe
from cosmati.train.ranks import Ranks
from cosmati.train.recalibration import put_back_modes
from cosmati.train.run.checkpoints import Checkpoint, list_checkpoints
from cosmati.train.run.environment import numerics
from cosmati.train.run.folder import describe_run
from cosmati.train.script_names import NOTED
from cosmati.train.snapshot import restore

_HEADS = ("model.", "methods.", "method_options.")
"""Facts that say what a run's model is."""
_TABLES = "model.contents."
"""Those that another PyTorch or processor may compute to other bits: no part of the structure."""

_FILE = re.compile(r"\b(?:file_[^.\s'\"(<>]+|__main__|__mp_main__)\.")
"""The module that a user's own file is, as a recipe and as a script."""
_ROWS = ("settings.seed", "settings.num_microbatches", "settings.precision", "data.digest", "data.content", "policy")
"""What BatchNorm's statistics of averaged weights follow from, besides."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A run whose checkpoint was put into a trainer: what its export is checked with, and noted in.

    Attributes:
        record: as its folder has it.
        folder: where the export is noted.
        checkpoint: name of the checkpoint.
        metrics: recorded at that step; None where there are none.
    """

    record: RunRecord
    folder: Path
    checkpoint: str
    metrics: Metrics | None


class ExportingTrainer(Lifecycle):
    """A trainer that can give its model away."""

    def recall(self, checkpoint: Checkpoint) -> None:
        """Put a checkpoint's weights, averages and optimizers in, to evaluate or export: nothing is opened or written.

        Raises:
            CheckpointError: it doesn't fit the model. PlanError: the run is open, and goes on from its own checkpoint.
        """
        if self._opened is not None:
            msg = (
                "recall() would put other weights into an open run. Call it in a new Trainer, before fit() and step()."
            )
            raise PlanError(msg)
        restored = restore(checkpoint, self.assembly, None)
        self.clock, self.methods.states = restored.clock, restored.states

    def other_code(self, checkpoint: Checkpoint) -> str:
        """Return which other loss a recalled checkpoint's fixed microbatch has here, in words; empty where it's equal.

        It's empty, too, where that can't be known: the run couldn't compare, or its batches aren't at hand.
        """
        a, kept = self.assembly, checkpoint.facts["probe"]
        batch = next(iter(self.feed.again(0)), None) if self.feed is not None else None
        if batch is None or not kept["losses"]:
            return ""
        probe = Probe(kept["specs"])
        probe.see(batch.to(a.device).data)
        with numerics(a), a.config.autocast(a.device):
            found = probe.losses(a.model, [turn.loss for turn in a.turns], a.generators, a.device) or []
        tolerance = LOW_PRECISION if a.config.precision == "bfloat16" else EXACT
        pairs = [(float.fromhex(w), float.fromhex(n)) for w, n in zip(kept["losses"], found, strict=False) if w and n]
        other = [f"{now:.6g} here, and {was:.6g} in the run" for was, now in pairs if not is_close(was, now, tolerance)]
        return ", ".join(other)

    def export(
        self, out: str | Path, to: ExportForm = "torch", *, fold: bool = True, tolerance: float | None = None
    ) -> nn.Module:
        """Write the model that is evaluated, for others to use, and return it in plain layers.

        Averages are put in, surgery is folded into PyTorch's own layers, and what was written is read back and measured
        before it's published: as `cosmati export` does (`docs/exporting.md`). The trainer stays as it is. All ranks
        have to call it: the first one folds, measures and writes, and the others get a copy as it was trained.

        Args:
            out: a folder that isn't there yet.
            to: `torch` (weights, and a program where the model allows), `safetensors`, `hf` or `onnx`.
            fold: False keeps surgery's layers.
            tolerance: within which metrics agree with what the run recorded, relative, or absolute for values below 1;
                None takes what the arithmetic needs.

        Raises:
            ExportError: it can't be exported so, or the export isn't what was measured; nothing is published then.
            MissingExtraError: a package is missing.
            PlanError: averages stand in for the weights already: within `averaged()`.
        """
        return self.export_recorded(None, Path(out).expanduser(), to, fold=fold, tolerance=tolerance)

    def export_recorded(
        self,
        run: RecordedRun | None,
        out: Path,
        to: str,
        *,
        fold: bool = True,
        tolerance: float | None = None,
        say: Say = quiet,
    ) -> nn.Module:
        """Export as `export` does.

        Args:
            run: whose checkpoint was put in (`recall`); None where it's this trainer's own.
            out: a folder that isn't there yet.
            to: the form.
            fold: False keeps surgery's layers.
            tolerance: see `export`.
            say: told of what is being done.
        """
        self._refuse_averaged("export()")
        a = self.assembly
        if a.ranks.in_lockstep:
            msg = (
                "export() reads a whole model on one rank, and each holds a part under sharding='full', or computes "
                "one under tensor_parallel. Export a checkpoint of the run in one process: cosmati export."
            )
            raise ExportError(msg)
        run = run or self._own_run()
        whose = self._whose_average()
        with numerics(a), self.averaged() as model:
            if a.ranks.rank:
                return copy.deepcopy(model).eval()
            origin = Origin(
                record=run.record,
                folder=run.folder if run.record.run_id else None,
                checkpoint=run.checkpoint or None,
                step=self.clock.step,
                structure=structure_digest(self.prepared.identity),
                averaged=whose,
                methods=a.plan.methods,
                is_low=a.config.precision == "bfloat16",
            )
            inputs, where = self._example(model)
            check = Check(
                measure=self._measure if first_batch(self.evaluation) is not None else None,
                recorded=run.metrics,
                where=where,
                inputs=inputs,
                tolerance=tolerance,
            )
            return export_model(model, to, out, origin, check, folds=fold, say=say)

    def _own_run(self) -> RecordedRun:
        """Return what is known of this trainer's run, in a folder or not."""
        a, folder = self.assembly, self.assembly.config.run_folder
        path = folder / "run.json" if folder is not None else None
        if path is not None and folder is not None and path.exists():
            record = RunRecord.from_json(path.read_text())
            promises = tuple(GuaranteeRecord(g.name, g.holds, g.because) for g in self.plan.guarantees)
            record = dataclasses.replace(record, guarantees=promises, num_steps=self.clock.step)
        else:
            facts = facts_of(
                a, self.prepared.data_digest, self.prepared.identity, self.prepared.given.policy, self.prepared.vouched
            )
            record = describe_run(facts, self.plan, self.clock, run_id="", model_digest="")
        name = f"step-{self.clock.step:08d}"
        there = folder is not None and any(one.name == name for one in list_checkpoints(folder / "checkpoints"))
        metrics = dict(self._metrics) if self._evaluated_at == self.clock else None
        return RecordedRun(record=record, folder=folder or Path(), checkpoint=name if there else "", metrics=metrics)

    def _whose_average(self) -> str:
        a = self.assembly
        at = self.position()
        if averaged_weights(a, self.methods.states, at) is None:
            return ""
        for index, method in enumerate(a.plan.methods):
            if method.evaluation_weights(self.methods.states[index], at) is not None:
                return describe(method)
        own = [scheduled.optimizer for scheduled in a.optimizers]
        return ", ".join(type(o).__name__ for o in own if isinstance(o, GroupedOptimizer) and o.evaluation_weights())

    def _measure(self, model: nn.Module) -> Metrics:
        """Return the metrics of a model, as an evaluation of this run has them."""
        assert self.evaluation is not None, "asked for"
        a = self.assembly
        losses = [turn.loss for turn in a.turns]
        with kept_state(model, losses), a.generators.restored():
            return evaluate_all(model, self.evaluation, Ranks.alone(), a.device, a.config.autocast(a.device), losses)

    def _example(self, model: nn.Module) -> tuple[CallInputs | None, str]:
        """Return what the model is first called with when it's evaluated, or trained; and the data, in words."""
        a = self.assembly
        losses = [turn.loss for turn in a.turns]
        first = first_batch(self.evaluation)
        if first is not None:
            with _first_call(model) as seen:
                try_out(model, first, a.device, a.config.autocast(a.device), losses)
                if not seen:  # Metrics that make no sense of one batch were left out.
                    self._measure(model)
            low = ", under autocast in bfloat16" if a.config.precision == "bfloat16" else ""
            return (seen[0] if seen else None), f"the run's data to evaluate on{low}"
        batch = next(iter(self.feed.again(0)), None) if self.feed is not None else None
        if batch is None:
            return None, ""
        modes = [(module, module.training) for module in model.modules()]
        with _first_call(model) as seen, kept_state(model, losses), a.generators.restored(), torch.no_grad():
            model.eval()
            try:
                losses[0](model, batch.to(a.device).data)
            except Exception:  # noqa: BLE001  (a loss of the user's own that can't be evaluated: no rows, then)
                seen.clear()
            finally:
                put_back_modes(modes)
        return (seen[0] if seen else None), ""


@contextmanager
def _first_call(model: nn.Module) -> Iterator[list[CallInputs]]:
    """Give a list that gets a copy of the first call's arguments."""
    seen: list[CallInputs] = []

    def note(_: nn.Module, args: tuple[Data, ...], kwargs: dict[str, Data]) -> None:
        if not seen:
            seen.append(copy.deepcopy((args, kwargs)))

    handle = model.register_forward_pre_hook(note, prepend=True, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def structure_of(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a run's identity that say what its model is: modules, options, parameters, surgery."""
    chosen = {n: v for n, v in identity.items() if n.startswith(_HEADS) and not n.startswith(_TABLES)}
    return _wherever_it_ran(chosen)


def _wherever_it_ran(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out whether the user's own file ran as a script or was given as a recipe."""
    return {name: _FILE.sub("", value) if isinstance(value, str) else value for name, value in facts.items()}


def structure_digest(identity: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a model's structure, hex."""
    return hashlib.sha256(json.dumps(structure_of(identity), sort_keys=True).encode()).hexdigest()


def other_model(was: Mapping[str, Any], now: Mapping[str, Any], *, is_elsewhere: bool) -> list[Change]:
    """Return what makes a trainer's model, or the rows that give averages their statistics, another run's.

    Args:
        was: identity that a checkpoint holds.
        now: identity of the trainer.
        is_elsewhere: another PyTorch or processor may compute a model's tables to other bits.
    """
    told = (*_HEADS, NOTED)
    facts = [{n: v for n, v in one.items() if n in _ROWS or n.startswith(told)} for one in (was, now)]
    others = {change.name for change in changes(*facts)}
    found = [c for c in changes(*map(_wherever_it_ran, facts)) if c.name in others and not is_other_python(c)]
    return [change for change in found if not (is_elsewhere and change.name.startswith(_TABLES))]
