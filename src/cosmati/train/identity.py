"""What makes a run this run and no other: facts by name, and what a resume may do with one that has changed.

Each fact has a kind. What fixes the bits may not change. Some things may, where they are asked for by name and go on
record: the policy, the budget. Cadences are free. What is around the run (threads, PyTorch, the processor) may change
too, and then the promises that rest on it are withdrawn.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
from collections.abc import Collection, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from cosmati.core.batch import Batch
from cosmati.core.later import untold
from cosmati.core.loss import LossFunction
from cosmati.core.plain import encode
from cosmati.core.source import Source
from cosmati.core.state import parameter_root
from cosmati.errors import ChangedRunError, CheckpointError
from cosmati.train.config import CHANGEABLE, LEARNING_CADENCES
from cosmati.train.content import content_digest
from cosmati.train.options import DECLARED, Described, name_of
from cosmati.train.script_names import by_file, is_same
from cosmati.train.user_code import HOOKS, functions_within, names_said, names_written

Identity = Mapping[str, Any]
"""Facts of a run: dotted name, and value as JSON holds it."""

CADENCES = (
    "checkpoint_every",
    "num_checkpoints",
    "evaluate_every",
    "details_every",
    "update_norm_every",
    *LEARNING_CADENCES,
    "check_every",
    "on_divergence",
)
"""Settings that say how often, or what to do about a step that diverged: none changes a step that was taken."""

SURROUNDINGS = ("threads", "torch", "device", "cpu_capability", "kernels", "cuda")
"""Facts of the environment on which bits rest."""

_PREPARED = "artifacts"
"""Preparation artifacts: who names none may name them later, and those stay."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_MAX_FUNCTIONS = 1000
"""Of a model's whose names are read."""
_LARGEST = 1 << 30
"""Bytes of a loader's data set above which its content isn't compared: hashing takes about a second."""
_HOW = ("num_workers", "steps_ahead", "cache_directory", "max_bytes", "timeout")
"""Fields of a source that say how it's read, and not what."""

_MAY_COUNT = re.compile(
    r"model\.(options|contents|globals)\.|loss\.|(optimizers|method_options)\.\d+\..*(globals|options)\."
)
_WORDS = {"lr": "learning rate", "num_microbatches": "V", "rows_per_step": "rows a step"}


@dataclass(frozen=True)
class Change:
    """A fact that isn't what it was; None where it wasn't there, or isn't any more."""

    name: str
    was: object
    now: object

    @property
    def label(self) -> str:
        """Which fact it is, in words."""
        *place, last = self.name.split(".")
        return f"{' '.join(place)}: {_WORDS.get(last, last)}" if place else _WORDS.get(last, last)

    def __str__(self) -> str:
        return f"{self.label} {_short(self.now)}, was {_short(self.was)}"


def changes(was: Identity, now: Identity) -> list[Change]:
    """Return what differs, in the order of names; the user's files may have been started or imported (`note_files`)."""
    then, today = by_file(was, now)
    return [
        Change(name, was.get(name), now.get(name))
        for name in sorted({**then, **today})
        if not is_same(then.get(name), today.get(name))
    ]


def schedules_in(recipe: Mapping[str, str]) -> dict[int, str]:
    """Return the schedules of the learning rates that a ledger tells, by the number of the optimizer."""
    found = ((re.fullmatch(r"optimizers\.([0-9]{1,9})\.schedule", name), text) for name, text in recipe.items())
    return {int(name[1]): text for name, text in found if name}


def kind_of(name: str) -> str:
    """Return what a resume does with a change: `free`, the name under which it has to be asked for, or `fixed`.

    What a run was derived from is a fact of its first start: a resume reads no other run.
    """
    head, _, rest = name.partition(".")
    if head in ("cadence", "parent"):
        return "free"
    if head == "optimizers" and rest.split(".")[1:2] == ["schedule"]:
        return "schedule"
    return head if head in (*CHANGEABLE, _PREPARED) else "fixed"


def check_resume(
    was: Identity, now: Identity, *, asked: Collection[str], where: str, is_elsewhere: bool = False
) -> list[Change]:
    """Refuse to go on as another run; return the changes that were asked for, or are free, for the record.

    Args:
        was: identity that the checkpoint holds.
        now: identity of the run that resumes.
        asked: what the user lets change, of `CHANGEABLE`.
        where: the checkpoint, in words.
        is_elsewhere: another PyTorch or processor may compute a model's tables to other bits.

    Raises:
        ChangedRunError: what fixes the bits has changed, or what may change wasn't asked for.
    """
    found = differences(was, now, is_elsewhere=is_elsewhere)
    named_before = any(kind_of(name) == _PREPARED for name in was)
    free = {"free", *asked} | (set() if named_before else {_PREPARED})
    wrong = [change for change in found if kind_of(change.name) not in free]
    wrong += _other_parent(was, now)
    if wrong:
        mend = _mend(wrong)
        may = sorted({kind_of(change.name) for change in wrong} & {*CHANGEABLE})
        if may:
            mend += f" To change the {' and the '.join(may)} on purpose, say so: RunConfig(change={tuple(may)!r})."
        msg = f"{where} is of another run: {'; '.join(map(str, wrong))}. {mend}"
        raise ChangedRunError(msg)
    return [change for change in found if not change.name.startswith("parent.")]


def differences(was: Identity, now: Identity, *, is_elsewhere: bool) -> list[Change]:
    """Return what differs between two identities, but for what another Python, or another machine, explains."""
    declared = [name for facts in (was, now) for name, value in facts.items() if value == DECLARED]
    found = [c for c in changes(was, now) if not (_lies_in(c.name, declared) or is_other_python(c))]
    return [c for c in found if not (is_elsewhere and c.name.startswith("model.contents."))]


def _lies_in(name: str, places: Sequence[str]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def is_other_python(change: Change) -> bool:
    """Say whether a function's code was compiled by another Python: it's another one then, whatever it does."""
    releases = [str(value).rpartition(" of Python ")[2] for value in (change.was, change.now)]
    return change.name.endswith(".code") and None not in (change.was, change.now) and releases[0] != releases[1]


def _other_parent(was: Identity, now: Identity) -> Iterator[Change]:
    """Yield whose weights a resume asks for, where the run began with others; who asks for none goes on."""
    asked, step = now.get("parent.asked"), now.get("parent.asked_step")
    begun = was.get("parent.run", was.get("parent.file"))
    if asked is not None and asked != begun:
        yield Change("load_weights", begun, asked)
    elif step is not None and step != was.get("parent.step"):
        yield Change("load_weights.step", was.get("parent.step"), step)


def _mend(wrong: Sequence[Change]) -> str:
    mend = "Resume with the recipe that wrote it, or give the new run a folder of its own."
    may_count = [change.name for change in wrong if _MAY_COUNT.match(change.name)]
    names = [_attribute(name) for name in may_count if not name.endswith(".is")]
    if names:
        mend += f" If it only counts or caches, say so in its class or function: forward_caches = ({names[0]!r},)."
    return mend


def _attribute(name: str) -> str:
    """Return whose change a fact's name tells of: a global, what is closed over, or an attribute."""
    parts = [part for part in name.split(".") if not part.isdigit()]
    place = next((parts.index(one) for one in ("globals", "closure") if one in parts[:-1]), -2)
    return parts[place + 1]


def flatten(tree: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings and sequences under dotted names."""
    if isinstance(tree, Mapping):
        items = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list | tuple):
        items = [(str(index), value) for index, value in enumerate(tree)]
    else:
        yield prefix, tree
        return
    if not items:
        yield prefix, None
    for key, value in items:
        yield from flatten(value, f"{prefix}.{key}" if prefix else key)


def _text(value: object) -> object:
    """Return what stands for a value that JSON hasn't; sets in an order that every process gives them."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def identify(**parts: object) -> dict[str, Any]:
    """Return the facts of a run under dotted names, as they come back from JSON."""
    facts: dict[str, Any] = json.loads(json.dumps(dict(flatten(parts)), default=_text))
    # No two processes have an object at the same address.
    return {name: _ADDRESS.sub("", value) if isinstance(value, str) else value for name, value in facts.items()}


def describe_model(model: nn.Module, losses: Sequence[object] = ()) -> dict[str, object]:
    """Return a model's structure: its modules and their options, parameters, buffers, hooks, and globals it names.

    Args:
        model: in training.
        losses: what they read of it counts, too.
    """
    functions = [function for one in (model, *losses) for function in functions_within(one)]
    said, written = names_said(functions, _MAX_FUNCTIONS), names_written(functions, _MAX_FUNCTIONS)
    tensors = (*model.parameters(), *model.buffers())
    described = Described(tensors, with_code=True, in_model=True)
    named = [(name or "(model)", module) for name, module in model.named_modules()]
    rest = {
        "hooks": _hooks_of(model, described),
        "contents": {name: told for name, one in named if (told := Described().contents(one, written))},
        **dict(Described(tensors, in_model=True).globals(functions_within(model), *model.modules())),
    }
    return {
        "modules": {
            name: f"{type(module).__qualname__}({module.extra_repr()})" + ("" if module.training else " in eval mode")
            for name, module in named
        },
        "options": {name: told for name, one in named if (told := described.module(one, said, written))},
        "parameters": {
            name: f"{_shape(p)}{_order(p)}" + ("" if p.requires_grad else " frozen")
            for name, p in model.named_parameters(remove_duplicate=False)
        },
        "buffers": {name: _shape(buffer) for name, buffer in model.named_buffers(remove_duplicate=False)},
    } | {name: told for name, told in rest.items() if told}


def _hooks_of(model: nn.Module, described: Described) -> dict[str, list[object]]:
    """Return the hooks that modules and parameters carry: their names, options and code."""
    kinds = (*HOOKS, "_post_accumulate_grad_hooks")
    carried = {
        name: [hook for kind in kinds for hook in (getattr(part, kind, None) or {}).values()]
        for name, part in (*model.named_modules(), *model.named_parameters())
    }
    return {
        name or "(model)": [described.value(hook, None) or name_of(hook) for hook in hooks]
        for name, hooks in carried.items()
        if hooks
    }


def describe_loss(loss: LossFunction, model: nn.Module) -> dict[str, object]:
    """Return a loss's name, options and state. Its code isn't read: the probe (`Probe`) runs it.

    Args:
        loss: as given.
        model: in training; what a loss holds of it is the model's state, not the loss's.
    """
    return Described((*model.parameters(), *model.buffers())).loss(loss)


def describe_source(data: object) -> dict[str, object]:
    """Return what is known of data before they are read: kind, digest, classes, options that fix their order."""
    facts: dict[str, object] = {"is": type(data).__qualname__}
    if isinstance(data, Source):
        read = {name: _value_of(data, name) for name in ("columns", "transform", "on_bad_row")}
        inner = getattr(data, "source", None)  # What it reads packs from, say.
        within = {"source": describe_source(inner)} if isinstance(inner, Source) else {}
        facts |= {"digest": data.digest, "classes": list(data.class_names)}
        return facts | read | dict(_plain_fields(data)) | within
    if isinstance(data, DataLoader):
        return facts | dict(_describe_loader(data))
    if isinstance(data, list | tuple):
        return facts | {"batches": len(data), "content": _content_digest(data)}
    if isinstance(data, Sequence):
        return facts | {"batches": len(data)}
    return facts


def _describe_loader(loader: DataLoader[Any]) -> Iterator[tuple[str, object]]:
    dataset = loader.dataset
    yield "dataset", name_of(dataset)
    if isinstance(dataset, Sized):
        with suppress(TypeError):
            yield "rows", len(dataset)
    if isinstance(dataset, TensorDataset) and sum(tensor.nbytes for tensor in dataset.tensors) <= _LARGEST:
        yield "content", _content_digest([dataset.tensors])
    yield "batch_size", loader.batch_size
    yield "drop_last", loader.drop_last
    yield "sampler", name_of(loader.sampler)
    if isinstance(loader.batch_sampler, list | tuple):
        yield "batch_sampler", content_digest(loader.batch_sampler).hex()
    if type(dataset) is not TensorDataset or loader.collate_fn is not default_collate:
        # What is drawn while a row is made follows from the worker that makes it.
        yield "num_workers", loader.num_workers


def _content_digest(batches: Sequence[object]) -> str:
    """Return the Merkle root of a list of batches in memory, tensor by tensor; the order of names doesn't count."""
    tensors: dict[str, torch.Tensor] = {}
    for index, batch in enumerate(batches):
        data = batch.data if isinstance(batch, Batch) else batch
        try:
            text, own = encode(data)
        except CheckpointError:  # Objects of the user's own.
            text, own = content_digest(data).hex(), {}
        if any(tensor.layout is not torch.strided or tensor.is_nested for tensor in own.values()):
            text, own = content_digest(data).hex(), {}
        tensors |= {f"{index}/{place}": tensor for place, tensor in own.items()}
        beside = {"rest": torch.frombuffer(bytearray(json.dumps(text, sort_keys=True).encode()), dtype=torch.uint8)}
        if isinstance(batch, Batch):
            beside |= {"rows": batch.lineage.row_ids, "classes": batch.lineage.class_ids}
        for name, held in beside.items():
            while (place := f"{index}/{name}") in tensors:
                name += "/"  # noqa: PLW2901  (a batch may have such a name)
            tensors[place] = held
    return parameter_root(tensors).hex()


def _value_of(source: object, name: str) -> object:
    """Return how a source's rows are read, which their digest doesn't cover."""
    value = getattr(getattr(source, "dataset", None), name, None)
    return _called(value) if callable(value) else list(value) if isinstance(value, list | tuple) else value


def _called(function: object) -> object:
    """Return what a function that makes rows is: its name, options and code."""
    return Described(with_code=True).value(function, None)


def _plain_fields(value: Any) -> Iterator[tuple[str, object]]:  # noqa: ANN401  (any dataclass)
    if not dataclasses.is_dataclass(value):
        return
    for field in dataclasses.fields(value):
        content = getattr(value, field.name)
        if field.name in _HOW or field.name in untold(value):
            continue
        if isinstance(content, bool | int | float | str | types.NoneType):
            yield field.name, content
        elif isinstance(content, tuple) and all(isinstance(item, bool | int | float | str) for item in content):
            yield field.name, list(content)
        elif callable(content):
            yield field.name, _called(content)


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _order(parameter: torch.Tensor) -> str:
    """Return the order in memory where it isn't the usual one: kernels go by it, and their bits."""
    is_usual = parameter.layout is not torch.strided or parameter.is_contiguous()
    return "" if is_usual else f" strides {list(parameter.stride())}"


def _short(value: object) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:24]}...{text[-24:]}"
