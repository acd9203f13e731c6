"""An export from start to end: folded, written to a draft, read back, checked, noted, and only then published."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from cosmati.core.method import Method
from cosmati.core.state import model_tensors, parameter_root
from cosmati.core.virtual_shards import compute_whole
from cosmati.errors import ExportError
from cosmati.export.card import CardFacts, card
from cosmati.export.comparison import (
    EXACT,
    LOW_PRECISION,
    MOVED,
    CallInputs,
    Difference,
    Metrics,
    check_metrics,
    difference_of,
    refuse_shared,
)
from cosmati.export.folding import Folded, channels_seen, fold
from cosmati.export.formats import (
    check_form,
    describe_files,
    write_hugging_face,
    write_onnx,
    write_program,
    write_weights,
)
from cosmati.export.rebuilding import methods_of_others, needs_rebuilding, rebuilding_code
from cosmati.records.run import RunRecord
from cosmati.storage.atomic import publish, sync, write_all

NOTES = "exports.jsonl"
"""In a run's folder: one line for each export."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a model that leaves comes from.

    Attributes:
        record: of the run.
        folder: of the run, where the export is noted; None where it has none.
        checkpoint: name of the one that the weights are from; None where there is none of this step.
        step: after which the weights are.
        structure: digest of the model's structure, hex.
        averaged: whose average the weights are; empty where they're the latest.
        methods: of the run, in their order.
        is_low: forward passes run in bfloat16.
    """

    record: RunRecord
    folder: Path | None
    checkpoint: str | None
    step: int
    structure: str = ""
    averaged: str = ""
    methods: Sequence[Method] = ()
    is_low: bool = False


@dataclass(frozen=True, kw_only=True)
class Check:
    """What an export is checked with.

    Attributes:
        measure: gives the metrics of a model; None where there is nothing to evaluate on.
        recorded: what the run recorded at this step; None where nothing.
        where: what is evaluated, in words.
        inputs: of one call of the model; None where there were no rows.
        tolerance: relative, or absolute for values below 1; None takes what the arithmetic needs.
    """

    measure: Callable[[nn.Module], Metrics] | None = None
    recorded: Metrics | None = None
    where: str = ""
    inputs: CallInputs | None = None
    tolerance: float | None = None


@dataclass(frozen=True)
class _Written:
    """What stands in the draft: the model read back from it, and what the card tells of it."""

    model: nn.Module
    folded: Folded
    difference: Difference | None
    has_rebuilding: bool


def quiet(_: str) -> None:
    """Say nothing."""


def export_model(
    model: nn.Module, to: str, out: Path, origin: Origin, check: Check, *, folds: bool = True, say: Say = quiet
) -> nn.Module:
    """Write a model in a form that others read, once it's known to be the one that was measured.

    Args:
        model: with the weights that are evaluated put in; it's left as it is.
        to: `torch`, `safetensors`, `hf` or `onnx`.
        out: a folder that isn't there yet.
        origin: what the model comes from.
        check: what it's checked with.
        folds: put plain layers in the places of surgery's.
        say: told of what is being done.

    Returns:
        The exported model, in evaluation mode, as its files give it.

    Raises:
        ExportError: it can't be written so, or it isn't the model that was measured: nothing is published then.
        MissingExtraError: a package is missing.
    """
    check_form(to)
    if check.tolerance is not None and not check.tolerance >= 0:
        raise ExportError(f"tolerance={check.tolerance} is no distance. Give a number >= 0, or None.")
    with drafted(out) as draft:
        written = _written(model, to, draft, check, folds=folds, methods=origin.methods, say=say)
        metrics, tolerance = _checked(model, written, origin, check, say)
        program = None
        if to == "torch":
            say("Tracing with torch.export")
            program = write_program(written.model, check.inputs, draft)
        kind = type(written.folded.model)
        root = parameter_root(model_tensors(written.folded.model)).hex()
        facts = CardFacts(
            record=origin.record,
            to=to,
            model=kind.__name__,
            loader=f"transformers.{kind.__name__}" if kind.__module__.startswith("transformers.") else "YourModel",
            step=origin.step,
            checkpoint=origin.checkpoint,
            root=root,
            structure=origin.structure,
            averaged=origin.averaged,
            metrics=metrics,
            recorded=check.recorded,
            tolerance=tolerance,
            where=check.where,
            difference=written.difference,
            folded=written.folded,
            program=program,
            has_rebuilding=written.has_rebuilding,
            files=describe_files(draft),
        )
        finish(draft, out, facts, origin.folder)
    return written.model


@contextmanager
def drafted(out: Path) -> Iterator[Path]:
    """Give a draft folder beside the place of an export; whatever ends the block, no draft is left.

    Raises:
        ExportError: there is something at the place, or the disk refuses.
    """
    if out.exists() or out.is_symlink():
        msg = f"{out} is there already, and an export takes nobody's place. Give another --out, or remove it."
        raise ExportError(msg)
    draft = out.with_name(f".{out.name}.draft-{os.getpid()}")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        yield draft
    except (OSError, SafetensorError) as error:
        msg = f"{out} can't be written: {error}. Nothing was exported. Free space, or give another --out."
        raise ExportError(msg) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _written(
    model: nn.Module, to: str, draft: Path, check: Check, *, folds: bool, methods: Sequence[Method], say: Say
) -> _Written:
    """Fold a copy, write it, and return it as its files give it."""
    say("Folding surgery into plain layers" if folds else "Copying the model")
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        channels = channels_seen(model, copy.deepcopy(check.inputs)) if check.inputs is not None and folds else {}
        folded = fold(_copied(model), channels) if folds else _unfolded(_copied(model))
        folded.own = methods_of_others(methods)
        say(f"Writing {'weights' if to in ('torch', 'safetensors') else to}")
        if to == "hf":
            read = write_hugging_face(folded, draft)
        elif to == "onnx":
            read = write_onnx(folded.model, check.inputs, draft)
        else:
            read = write_weights(folded.model, draft)
        code = rebuilding_code(folded, methods) if needs_rebuilding(folded) and to in ("torch", "safetensors") else None
        if code is not None:
            (draft / "rebuild.py").write_text(code, encoding="utf-8")
        difference = None if check.inputs is None else difference_of(model, read, check.inputs)
        if check.inputs is not None:
            refuse_shared(model, read, check.inputs)
    finally:
        for module, training in was_training.items():
            module.training = training
    return _Written(read, folded, difference, code is not None)


def _copied(model: nn.Module) -> nn.Module:
    try:
        copied = copy.deepcopy(model)
    except Exception as error:
        msg = (
            f"The {type(model).__name__} can't be copied, and an export is made of a copy: {type(error).__name__}: "
            f"{error}. Keep files, locks and tensors with a graph out of the model's attributes."
        )
        raise ExportError(msg) from error
    compute_whole(copied)
    return copied


def _unfolded(model: nn.Module) -> Folded:
    """Return a model as surgery made it, with the layers that are surgery's."""
    found = Folded(model.eval())
    for name, module in model.named_modules(remove_duplicate=False):
        own = [kind for kind in type(module).__mro__ if kind.__module__.startswith("cosmati.methods.")]
        if own:
            found.kept[name] = own[0]
    return found


def _checked(
    model: nn.Module, written: _Written, origin: Origin, check: Check, say: Say
) -> tuple[Mapping[str, float] | None, float]:
    """Measure the export, and compare with what was recorded."""
    is_moved = written.difference is not None and written.difference.own > 0
    # Outputs are compared in the weights' own precision, where these norms are the native ones.
    rounds = {"LayerNormInAutocast", "GroupNormInAutocast"} & {*written.folded.turned_back.values()}
    usual = MOVED if is_moved else EXACT
    if origin.is_low and (is_moved or rounds):
        usual = LOW_PRECISION
    tolerance = usual if check.tolerance is None else check.tolerance
    if check.measure is None:
        return None, tolerance
    say("Measuring the exported model")
    metrics, measure = check.measure(written.model), check.measure
    expected = check.recorded or measure(model)
    check_metrics(expected, metrics, tolerance, lambda: measure(model), check.where)
    return metrics, tolerance


def finish(draft: Path, out: Path, facts: CardFacts, run: Path | None) -> None:
    """Write the card, note the export in the run's folder, and give the draft its name."""
    readme = draft / "README.md"
    readme.write_text(card(facts), encoding="utf-8")
    for path in (*draft.rglob("*"), draft):
        if path.is_file():
            path.chmod(readme.stat().st_mode)  # Some are written for their owner alone, and these are to be given away.
        sync(path)
    if run is not None:
        # Before it's there: an export that nobody knows of is worse than a note of one that isn't.
        note_export(run, _line(out, facts))
    publish(draft, out)


def _line(out: Path, facts: CardFacts) -> dict[str, Any]:
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "to": facts.to,
        "out": str(out.absolute()),
        "checkpoint": facts.checkpoint,
        "step": facts.step,
        "weights": facts.root,
        "structure": facts.structure,
        "metrics": None if facts.metrics is None else {n: _finite(v) for n, v in facts.metrics.items()},
        "checked": facts.metrics is not None and bool(facts.recorded),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN.


def note_export(run: Path, line: Mapping[str, Any]) -> None:
    """Append a line to a run's `exports.jsonl`, whole and durable; a line that a crash has torn is ended first.

    Raises:
        ExportError: the folder can't be written.
    """
    path = run / NOTES
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            is_torn = bool(size) and os.pread(descriptor, 1, size - 1) != b"\n"
            write_all(descriptor, (b"\n" if is_torn else b"") + json.dumps(line).encode() + b"\n")
        finally:
            os.close(descriptor)
        sync(run)
    except OSError as error:
        msg = f"The export can't be noted in {path}: {error}. Nothing was published; make the run's folder writable."
        raise ExportError(msg) from error
