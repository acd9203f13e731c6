"""How many directions a microbatch's activations fill, region by region: spectral entropy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cosmati.routing.regions import Regions

MAX_SAMPLES = 256
_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that hold others, and aren't run."""


def spectral_entropy(samples: Tensor) -> float:
    """Return the spectral entropy of samples in nats: 0 where they differ in one direction, or in none.

    With X the samples less their mean, in float64, and p the eigenvalues of X X^T over their sum, it's
    -sum p ln p: the von Neumann entropy of the representation (J. Kim et al., "VNE", CVPR 2023), here of centred
    samples. Its exponential is an effective number of dimensions (O. Roy, M. Vetterli, "The effective rank",
    EUSIPCO 2007); so it's at most ln(min(samples - 1, features)).

    Args:
        samples: [samples, features], on any device; computed on the CPU.

    Returns:
        NaN where a sample isn't finite.
    """
    wide = samples.detach().to("cpu", torch.float64)
    if not bool(wide.isfinite().all()):
        return torch.nan
    centred = wide - wide.mean(0)
    scale = centred.abs().max() if centred.numel() else centred.new_zeros(())
    if scale == 0:
        return 0.0
    centred = centred / scale  # Squares of large values would be infinite.
    gram = centred @ centred.T if centred.shape[0] <= centred.shape[1] else centred.T @ centred
    shares = torch.linalg.eigvalsh(gram).clamp(min=0)
    shares = shares / shares.sum()
    return max(0.0, float(torch.special.entr(shares).sum()))


def places_of_regions(model: nn.Module, regions: Regions) -> dict[str, int]:
    """Return the modules whose outputs are looked at by name, with their region's index.

    They're the largest modules below the model itself all of whose trainable parameters are of one region.
    """
    found: dict[str, int] = {}

    def descend(module: nn.Module, name: str) -> None:
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            own = {regions.region_of[f"{path}.{p}"] for p, _ in child.named_parameters() if _is_known(regions, path, p)}
            if len(own) == 1 and not isinstance(child, _HOLDERS):
                found[path] = own.pop()
            elif own:
                descend(child, path)

    descend(model, "")
    return found


def _is_known(regions: Regions, path: str, parameter: str) -> bool:
    return f"{path}.{parameter}" in regions.region_of


class EntropyProfile:
    """Reads the entropy of each region's last module to run in a microbatch's forward pass, by hooks that only look.

    Regions none of whose parameters lie in a module of their own have none, and are named in a warning.

    Args:
        model: in training.
        regions: of it.
    """

    def __init__(self, model: nn.Module, regions: Regions) -> None:
        self._model, self._regions = model, regions
        self._places: Mapping[nn.Module, int] | None = None
        self._samples: dict[int, Tensor] = {}
        self._is_on = False

    @contextmanager
    def reading(self, *, is_on: bool) -> Iterator[None]:
        """Stand around a step's forward passes; after each, `read` gives what was found."""
        self._is_on, self._samples = is_on, {}
        places = self._found() if is_on else {}
        handles = [module.register_forward_hook(self._see_for(region)) for module, region in places.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def read(self) -> list[Tensor]:
        """Return the entropy of each region in the microbatch that has just run, float64 [regions], in a list.

        It's NaN where there is none; the list is empty where nobody asked.
        """
        samples, self._samples = self._samples, {}
        own = range(len(self._regions.names))
        found = [spectral_entropy(samples[region]) if region in samples else torch.nan for region in own]
        return [torch.tensor(found, dtype=torch.float64)] if self._is_on else []

    def _found(self) -> Mapping[nn.Module, int]:
        if self._places is None:
            modules = dict(self._model.named_modules())
            self._places = {modules[name]: own for name, own in places_of_regions(self._model, self._regions).items()}
            missing = [name for i, name in enumerate(self._regions.names) if i not in self._places.values()]
            if missing:
                warnings.warn(
                    f"No module has parameters of {', '.join(missing)} alone, so nothing is said of the entropy there: "
                    "the ledger has null. Put such parameters into a module, or leave out entropy_every.",
                    stacklevel=2,
                )
        return self._places

    def _see_for(self, region: int) -> Callable[[nn.Module, object, object], None]:
        def see(_module: nn.Module, _args: object, output: object) -> None:
            with torch.no_grad(), torch._C.DisableTorchFunction():  # noqa: SLF001  (masks by token look at functions)
                found = _first_tensor(output)
                if found is not None:
                    self._samples[region] = _samples_of(found.detach())

        return see


def _first_tensor(output: object) -> Tensor | None:
    """Return the first floating-point tensor that a module has given: what it hands on, in what others return."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() and output.dim() else None
    within = list(output.values()) if isinstance(output, Mapping) else output
    found = (
        (_first_tensor(one) for one in within) if isinstance(within, Sequence) and not isinstance(within, str) else ()
    )
    return next((one for one in found if one is not None), None)


def _samples_of(output: Tensor) -> Tensor:
    """Return at most `MAX_SAMPLES` rows or positions of an output, evenly spaced, as a copy [samples, features].

    Features are the last dimension; of images and volumes (four dimensions and more) the channels, which are second.
    """
    by_channel = output.movedim(1, -1) if output.dim() > 3 else output
    rows = by_channel.reshape(-1, output.shape[1] if output.dim() > 3 else output.shape[-1]) if output.numel() else ()
    if not len(rows):
        return output.new_zeros((0, 1))
    num = min(len(rows), MAX_SAMPLES)
    return rows[torch.arange(num, device=output.device) * len(rows) // num].clone()
