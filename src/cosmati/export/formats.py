"""The forms in which a model leaves: each writes into a draft folder, and reads back what it wrote."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import io
import json
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils import _pytree

from cosmati.core.state import load_model_tensors, model_tensors
from cosmati.errors import ExportError, MissingExtraError
from cosmati.export.comparison import CallInputs, difference_of, is_expanded
from cosmati.export.folding import Folded
from cosmati.methods.building_blocks.surgery import is_loaded_instance

ExportForm = Literal["torch", "safetensors", "hf", "onnx"]
FORMS: tuple[str, ...] = get_args(ExportForm)
WEIGHTS = "model.safetensors"
PROGRAM = "model.pt2"
ONNX = "model.onnx"
_ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def check_form(to: str) -> None:
    """Check that a form is known, and that what writes it is installed.

    Raises:
        ExportError: it's unknown. MissingExtraError: a package is missing.
    """
    if to not in FORMS:
        raise ExportError(f"There is no form {to!r} to export to. Use one of {', '.join(FORMS)}.")
    missing = [name for name in _ONNX_PACKAGES if importlib.util.find_spec(name) is None] if to == "onnx" else []
    if missing:
        msg = (
            f"ONNX is written and checked with {', '.join(_ONNX_PACKAGES)}; not installed: {', '.join(missing)}. Run: "
            "pip install 'cosmati[onnx]'. Or export --to torch: model.pt2 runs where PyTorch does."
        )
        raise MissingExtraError(msg)
    if to == "hf" and importlib.util.find_spec("transformers") is None:
        msg = "Hugging Face's form is written with transformers, which isn't installed. Run: pip install 'cosmati[llm]'"
        raise MissingExtraError(msg)


def write_weights(model: nn.Module, folder: Path) -> nn.Module:
    """Write a model's weights, tied ones once, and return another model that has them from the file alone.

    Raises:
        ExportError: the file doesn't give the weights that went in.
    """
    tensors = {
        name: value.detach().cpu().contiguous().clone(memory_format=torch.contiguous_format)
        for name, value in model_tensors(model).items()
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    read = copy.deepcopy(model)
    with torch.no_grad():
        for value in model_tensors(read).values():
            if not is_expanded(value):
                value.zero_()
    load_model_tensors(read, load_file(folder / WEIGHTS))
    before, after = model_tensors(model), model_tensors(read)
    wrong = [name for name, value in before.items() if not _same(value, after.get(name))]
    if wrong:
        raise ExportError(f"{WEIGHTS} doesn't give back {', '.join(wrong[:5])} as written. Try another disk.")
    return read.eval()


def _same(first: Tensor, second: Tensor | None) -> bool:
    if second is None or first.shape != second.shape or first.dtype is not second.dtype:
        return False
    bits = [value.detach().contiguous().reshape(-1).view(torch.uint8) for value in (first, second)]
    return torch.equal(*bits)


@dataclass(frozen=True)
class Program:
    """What has become of a `torch.export` program.

    Attributes:
        inputs: name, type and shape of each input; a size of `any` is free.
        why_none: why there is none, in words; empty where there is one.
    """

    inputs: tuple[str, ...] = ()
    why_none: str = ""


def write_program(model: nn.Module, inputs: CallInputs | None, folder: Path) -> Program:
    """Write a `torch.export` program where the model allows.

    Args:
        model: on any device; the program is of its copy on the CPU.
        inputs: of one call, whose number of rows (and of tokens) may be any afterwards, where the model allows.
        folder: where it goes.

    Raises:
        ExportError: the file isn't what was written. OSError: the disk refuses it.
    """
    if inputs is None:
        return Program(why_none="there were no rows to trace the model with")
    model = copy.deepcopy(model).cpu().eval()
    inputs = _pytree.tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, inputs)
    path = folder / PROGRAM
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program = _traced(model, inputs)
            program._example_inputs = None  # noqa: SLF001  (they'd be pickled, and are rows of the run's data)
            # Into memory: on a full disk PyTorch's writer ends the process.
            written = io.BytesIO()
            torch.export.save(program, written)
            pickled = _pickled_parts(written)
            if pickled:
                return Program(why_none=f"it would hold pickles: {', '.join(pickled[:3])}")
            difference_of(model, torch.export.load(io.BytesIO(written.getvalue())).module(), inputs)
    except Exception as error:  # noqa: BLE001  (whatever a model's code says to being traced)
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        return Program(why_none=f"torch.export can't trace this model: {type(error).__name__}: {first}")
    path.write_bytes(written.getvalue())
    if path.read_bytes() != written.getvalue():
        raise ExportError(f"{PROGRAM} doesn't come back as written. Try another disk.")
    return Program(tuple(_inputs_of(program)))


def _traced(model: nn.Module, inputs: CallInputs) -> torch.export.ExportedProgram:
    """Trace a model with free sizes, or with those of the inputs where it can't be otherwise."""
    try:
        return torch.export.export(model, *inputs, dynamic_shapes=_free_sizes(model, inputs))
    except Exception:  # noqa: BLE001  (whatever a model's code says; the second attempt's error is the one to tell)
        return torch.export.export(model, *inputs)


def _inputs_of(program: torch.export.ExportedProgram) -> Iterator[str]:
    """Yield what a program takes, in words."""
    names = set(program.graph_signature.user_inputs)
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and node.name in names and isinstance(value, Tensor):
            sizes = ", ".join("any" if isinstance(size, torch.SymInt) else str(size) for size in value.shape)
            yield f"{node.name}: {str(value.dtype).removeprefix('torch.')} [{sizes}]"


def _free_sizes(model: nn.Module, inputs: CallInputs) -> Any:  # noqa: ANN401  (torch.export's own)
    """Let the number of rows be any, and of whole numbers that of tokens too; torch.export finds what can't be."""
    auto = torch.export.Dim.AUTO

    def sizes(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            return None
        return dict.fromkeys(range(1 if leaf.is_floating_point() else min(leaf.ndim, 2)), auto)

    arguments, keywords = inputs
    free = [_pytree.tree_map(sizes, one) for one in arguments]
    by_name = {name: _pytree.tree_map(sizes, one) for name, one in keywords.items()}
    return _by_parameter(model, free) | by_name


def _by_parameter(model: nn.Module, free: list[Any]) -> dict[str, Any]:
    """Name what is given by place after the parameters of forward; `*args` takes the rest as a tuple."""
    found: dict[str, Any] = {}
    rest = list(free)
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            found[name] = tuple(rest)
            break
        if not rest:
            break
        found[name] = rest.pop(0)
    return found


def _pickled_parts(path: Path | io.BytesIO) -> list[str]:
    """Return what of a program is pickled: tensors of subclasses, objects of the user's own."""
    found: list[str] = []
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith("_config.json"):
                entries = json.loads(archive.read(name)).get("config", {})
                found += [key for key, entry in entries.items() if entry.get("use_pickle")]
            if "/sample_inputs/" in name and archive.getinfo(name).file_size:
                found.append("example inputs")
    return found


def write_hugging_face(folded: Folded, folder: Path) -> nn.Module:
    """Write a model as its own class of transformers has it, and read it back.

    Raises:
        ExportError: it isn't of transformers, or holds what that class hasn't.
    """
    model = folded.model
    if not is_loaded_instance(model, ["transformers.modeling_utils.PreTrainedModel"]):
        msg = (
            f"A {type(model).__name__} is no model of transformers (PreTrainedModel), and only these have Hugging "
            "Face's form. Export --to torch, or --to safetensors for its weights."
        )
        raise ExportError(msg)
    changed = sorted({*folded.replaced, *folded.shares, *folded.kept, *folded.untied})
    if changed:
        msg = (
            f"{type(model).__name__} of transformers hasn't the layers that surgery put at {', '.join(changed[:5])}: "
            "from_pretrained would leave them out, and compute something else. Export --to torch."
        )
        raise ExportError(msg)
    own = cast("Any", model)
    try:
        own.save_pretrained(folder)
        read = type(own).from_pretrained(folder, dtype="auto")
    except OSError:
        raise  # The disk's.
    except Exception as error:
        msg = (
            f"transformers can't write this {type(model).__name__} and read it back: {type(error).__name__}: {error}. "
            "Mend its config, or export --to torch."
        )
        raise ExportError(msg) from error
    device = next(model.parameters()).device
    read = cast("nn.Module", read.to(device).eval())
    _refuse_other(model, read)
    return read


def _refuse_other(model: nn.Module, read: nn.Module) -> None:
    """Check that `from_pretrained` gives the layers and the tensors that went in.

    Raises:
        ExportError: it lost some, made others, or changed their bits.
    """
    layers = [{name: type(module) for name, module in one.named_modules()} for one in (model, read)]
    before, after = model.state_dict(), read.state_dict()
    wrong = {
        "layers": [name for name in sorted({*layers[0], *layers[1]}) if layers[0].get(name) is not layers[1].get(name)],
        "tensors": [n for n in sorted({*before, *after}) if n not in before or not _same(before[n], after.get(n))],
    }
    told = "; ".join(f"other {what}: {', '.join(names[:5])}" for what, names in wrong.items() if names)
    if told:
        msg = (
            f"{type(model).__name__}.from_pretrained doesn't give back the model that went in ({told}): its config "
            "says nothing of them. Mend the config, or export --to torch."
        )
        raise ExportError(msg)


class OnnxModel(nn.Module):
    """An ONNX file as a model: the same call, and an output of the same structure.

    Args:
        path: of the file.
        output: of the model itself, for its structure.
    """

    def __init__(self, path: Path, output: object) -> None:
        super().__init__()
        import onnxruntime

        self._session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self._names = [one.name for one in self._session.get_inputs()]
        leaves, self._structure = _pytree.tree_flatten(output)
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (the model's own)
        """Return what the session gives."""
        tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        given = {name: leaf.detach().cpu().numpy() for name, leaf in zip(self._names, tensors, strict=True)}
        device = tensors[0].device
        leaves: list[object] = list(self._leaves)
        for place, one in zip(self._places, self._session.run(None, given), strict=True):
            leaves[place] = torch.from_numpy(one).to(device)
        return _pytree.tree_unflatten(leaves, self._structure)


def write_onnx(model: nn.Module, inputs: CallInputs | None, folder: Path) -> nn.Module:
    """Write an ONNX file, and return it as a model.

    Raises:
        ExportError: there are no rows to trace it with, or it can't be traced.
    """
    if inputs is None:
        msg = "ONNX is traced with rows, and there are none. Give the recipe: --recipe FILE[:FUNCTION]."
        raise ExportError(msg)
    model = copy.deepcopy(model).cpu().eval()
    arguments, keywords = _pytree.tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, inputs)
    path = folder / ONNX
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            output = model(*copy.deepcopy(arguments), **copy.deepcopy(keywords))
            sizes = _free_sizes(model, (arguments, keywords))
            torch.onnx.export(
                model, arguments, path, kwargs=keywords, dynamo=True, dynamic_shapes=sizes, external_data=False
            )
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        msg = f"torch.onnx can't write this model: {type(error).__name__}: {first}. Export --to torch."
        raise ExportError(msg) from error
    return OnnxModel(path, output).eval()


def describe_files(folder: Path) -> Mapping[str, int]:
    """Return the bytes of each file of a folder, by name."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
