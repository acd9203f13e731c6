"""The model card: what an exported model is, from the run's own record."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from cosmati.export.comparison import Difference
from cosmati.export.folding import Folded
from cosmati.export.formats import ONNX, PROGRAM, WEIGHTS, Program
from cosmati.export.rebuilding import needs_rebuilding
from cosmati.records.run import RunRecord

_MARKS = re.compile(r"([\\`*_\[\]<>#|~$])")
_MAX_LAYERS = 40
_MOVED = ("forward changes", "no checkpoint holds")
"""How the run says that state has moved which it can't take up again."""


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What a card says.

    Attributes:
        record: of the run.
        to: the form.
        model: class of the model.
        loader: what `from_pretrained` is called on, in Hugging Face's form.
        step: after which the weights are.
        checkpoint: name of the checkpoint they're from; None where there is none of this step.
        root: Merkle root of the weights, hex.
        structure: digest of the model's structure, hex; empty where it isn't known.
        averaged: whose average the weights are, in words; empty where they're the latest.
        metrics: measured on the export itself; None where there was nothing to evaluate on.
        recorded: what the run had recorded at this step; None where nothing.
        tolerance: within which the two agree.
        where: what was evaluated, in words.
        difference: of the outputs, exported beside trained.
        folded: what has become of surgery's layers; None where there was no model, only weights.
        program: what has become of `model.pt2`; None where it wasn't asked for.
        has_rebuilding: whether `rebuild.py` is there.
        files: bytes by name.
    """

    record: RunRecord
    to: str
    model: str
    loader: str = "YourModel"
    step: int
    checkpoint: str | None
    root: str
    structure: str = ""
    averaged: str = ""
    metrics: Mapping[str, float] | None = None
    recorded: Mapping[str, float] | None = None
    tolerance: float = 0.0
    where: str = ""
    difference: Difference | None = None
    folded: Folded | None = None
    program: Program | None = None
    has_rebuilding: bool = False
    files: Mapping[str, int]


def card(facts: CardFacts) -> str:
    """Return the card as Markdown."""
    name = facts.record.recipe_name or facts.model
    sections = [
        f"# {text(name)}\n",
        _summary(facts),
        _measured(facts),
        _use(facts),
        _layers(facts),
        _left_out(facts),
        _run(facts.record, facts),
        _guarantees(facts.record),
    ]
    return (_front_matter(facts) if facts.to == "hf" else "") + "\n".join(one for one in sections if one)


def text(value: object) -> str:
    """Return a user's text as Markdown that shows it as it is: one line, and no mark of its own."""
    line = " ".join(str(value).split())
    return _MARKS.sub(r"\\\1", line).replace("&", "&amp;")


def code(value: object) -> str:
    """Return a user's text as code: one line, within more back-ticks than it has in a row."""
    line = " ".join(str(value).split())
    fence = "`" * (max((len(run) for run in re.findall("`+", line)), default=0) + 1)
    pad = " " if "`" in line else ""
    # A table's cell ends at a bar, in code too.
    return f"{fence}{pad}{line}{pad}{fence}".replace("|", "\\|") if line else "none"


def _front_matter(facts: CardFacts) -> str:
    lines = ["library_name: transformers", "tags:", "- cosmati"]
    if facts.metrics:
        lines += ["metrics:", *(f"- {json.dumps(name)}" for name in facts.metrics)]
    return "---\n" + "\n".join(lines) + "\n---\n\n"


def _summary(facts: CardFacts) -> str:
    weights = f"the average that {code(facts.averaged)} keeps" if facts.averaged else "the weights that were trained"
    source = (
        f"checkpoint {code(facts.checkpoint)}" if facts.checkpoint else "the trainer, which had no checkpoint there"
    )
    promise = "" if _moved(facts.record) else " What is evaluated is what is here."
    return f"A {code(facts.model)} after {facts.step} steps, exported by Cosmati from {source}: {weights}.{promise}\n"


def _measured(facts: CardFacts) -> str:
    lines = ["## What was measured\n"]
    if facts.metrics is None:
        lines.append("**Unchecked**: there were no data to evaluate on, so no figure of the run is claimed for this.\n")
    else:
        lines.append(f"Measured on this very export, read back from its files, on {text(facts.where)}.\n")
        lines.append("| metric | this export | recorded by the run |\n|---|---|---|")
        recorded = facts.recorded or {}
        for name, value in facts.metrics.items():
            was = f"{recorded[name]:.6g}" if name in recorded else "not at this step"
            lines.append(f"| {text(name)} | {value:.6g} | {was} |")
        if recorded:
            lines.append(f"\nThey have to agree within {facts.tolerance:g}, or nothing is exported.")
        lines.append("")
    if facts.difference is not None:
        lines.append(f"Outputs beside those of the model as it was trained: {facts.difference}.\n")
    return "\n".join(lines)


def _use(facts: CardFacts) -> str:
    lines = ["## How to use it\n"]
    if facts.program is not None and not facts.program.why_none:
        lines.append(
            f"`{PROGRAM}` is the whole model, as a program that needs PyTorch alone:\n\n```python\nimport torch\n\n"
            f'model = torch.export.load("{PROGRAM}").module()\n```\n'
        )
        lines.append(f"It is called as evaluation calls the model: {', '.join(map(code, facts.program.inputs))}.\n")
    elif facts.program is not None:
        lines.append(f"There is no `{PROGRAM}`: {text(facts.program.why_none)}.\n")
    if facts.to == "hf":
        start = "import transformers\n\n" if facts.loader.startswith("transformers.") else ""
        lines.append(f'```python\n{start}model = {facts.loader}.from_pretrained(".")\n```\n')
    elif ONNX in facts.files:
        lines.append(f'```python\nimport onnxruntime\n\nsession = onnxruntime.InferenceSession("{ONNX}")\n```\n')
    elif facts.has_rebuilding:
        if facts.folded is not None and facts.folded.own:
            own = ", ".join(map(code, facts.folded.own))
            lines.append(f"Apply {own} to a model of its own class first: that code isn't in these files.\n")
        lines.append(
            f"`{WEIGHTS}` has the weights. They fit the model's own class once `rebuild.py` has put in what surgery "
            f"changed:\n\n```python\nfrom rebuild import rebuild\nfrom safetensors.torch import load_model\n\n"
            f'model = rebuild(YourModel())\nload_model(model, "{WEIGHTS}")\nmodel.eval()\n```\n'
        )
    elif facts.folded is not None and not needs_rebuilding(facts.folded) and not facts.folded.own:
        lines.append(
            f"`{WEIGHTS}` has the weights, by the names of the model's own class:\n\n```python\nfrom safetensors.torch "
            f'import load_model\n\nmodel = YourModel()\nload_model(model, "{WEIGHTS}")\nmodel.eval()\n```\n'
        )
    else:
        lines.append(
            f"`{WEIGHTS}` has the weights of the model after surgery. Apply the methods below to a model of its own "
            "class before they're loaded: all names may fit a plain model too, which computes something else.\n"
        )
    return "\n".join(lines)


def _layers(facts: CardFacts) -> str:
    folded = facts.folded
    if folded is None:
        surgery = [line.method for line in facts.record.plan if line.stage in ("replace", "cast")]
        told = ", ".join(map(code, surgery)) or "none"
        return f"## Surgery\n\nMethods that had rebuilt the model: {told}. Nothing was folded: no recipe was given.\n"
    rows = [(name, code(type(layer).__name__), "plain layers") for name, layer in folded.replaced.items()]
    rows += [(n, "a forward hook", f"the block counts by {share:.6g}") for n, share in folded.shares.items()]
    rows += [
        (n, code(kind.__name__), "as surgery made it: nothing plain computes it") for n, kind in folded.kept.items()
    ]
    rows += [(n, "a weight of its own", "was tied to another, which surgery reads otherwise") for n in folded.untied]
    rows += [
        ("(the model)", code(own), "a method of the run's own code: apply it before loading") for own in folded.own
    ]
    rows += [(n, "its native class", f"was {code(was)}") for n, was in folded.turned_back.items()]
    if not rows:
        return ""
    lines = ["## Surgery\n", "| layer | is now | how |\n|---|---|---|"]
    lines += [f"| {code(name)} | {now} | {how} |" for name, now, how in rows[:_MAX_LAYERS]]
    if len(rows) > _MAX_LAYERS:
        lines.append(f"| and {len(rows) - _MAX_LAYERS} more | | |")
    return "\n".join([*lines, ""])


def _left_out(facts: CardFacts) -> str:
    """Return what the model has computed with, and the file of weights doesn't hold."""
    modules = facts.folded.model.named_modules() if facts.folded is not None else ()
    buffers = [f"{prefix}.{name}".lstrip(".") for prefix, module in modules for name in _lost_buffers(module)]
    lines = [
        f"**Training moved what no file of weights holds**: {text(told)}. Nor does a checkpoint: in a model of its own "
        "class, and in an export from a run folder, it's as the model's code makes it anew.\n"
        for told in _moved(facts.record)
    ]
    if buffers:
        told = ", ".join(map(code, buffers[:_MAX_LAYERS])) + (" and more" if len(buffers) > _MAX_LAYERS else "")
        lines.append(f"Buffers with `persistent=False`, which the model's own code has to make: {told}.\n")
    return "\n".join(["## Not in the weights\n", *lines]) if lines else ""


def _moved(record: RunRecord) -> list[str]:
    """Return what a run's own watch says that its forward moved past the checkpoints (`forward_watch`)."""
    lost = [g.because for g in record.guarantees if g.name == "resume" and not g.holds]
    return [because for because in lost if any(mark in because for mark in _MOVED)]


def _lost_buffers(module: nn.Module) -> list[str]:
    return [name for name in sorted(module._non_persistent_buffers_set) if getattr(module, name, None) is not None]  # noqa: SLF001


def _run(record: RunRecord, facts: CardFacts) -> str:
    digests = record.digests
    rows: Sequence[tuple[str, object]] = [
        ("recipe", record.recipe_name),
        ("run", record.run_id),
        ("seed", record.seed),
        ("methods", ", ".join(line.method for line in record.plan)),
        ("data", digests.get("data", "")),
        ("policy", digests.get("policy", "")),
        ("plan", digests.get("plan", "")),
        ("model before its first step", digests.get("model", "")),
        ("structure of the model", facts.structure),
        ("weights (BLAKE3 Merkle root)", facts.root),
        ("trained on", record.hardware),
        ("PyTorch", record.environment.get("torch", "")),
        ("started", record.started),
        ("ended", f"{record.ended or ''} {record.outcome}"),
    ]
    lines = ["## The run\n", "| | |\n|---|---|", *(f"| {label} | {code(value)} |" for label, value in rows)]
    return "\n".join([*lines, ""])


def _guarantees(record: RunRecord) -> str:
    if not record.guarantees:
        return ""
    lines = ["## What the run promises\n", "| promise | holds | because |\n|---|---|---|"]
    lines += [f"| {code(g.name)} | {'yes' if g.holds else 'no'} | {text(g.because)} |" for g in record.guarantees]
    return "\n".join([*lines, ""])
