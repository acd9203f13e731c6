"""Tiny models of each family, rows for them, and what a step may teach them, taken row by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from cosmati.core.batch import Batch, Data, Lineage
from cosmati.core.loss import Loss, LossFunction
from cosmati.core.rng import position_key
from cosmati.models.diffusion import Denoising, DiffusionConfig, DiffusionUNet
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.models.mixture import MixtureConfig, MixtureModel
from cosmati.models.resnet import ResNet, ResNetConfig
from cosmati.models.state_space import StateSpaceConfig, StateSpaceModel
from cosmati.optim import SGD, SGDW, SOAP, AdamW, Aurora, Lion, Muon, NorMuon, Optimizer, ScheduleFreeAdamW, Sophia
from cosmati.optim.optimizers import assign_parameters
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import PolicyFile, load_policy
from cosmati.testing.rows import gradients_by_row
from cosmati.train.config import RunConfig
from cosmati.train.trainer import Trainer

LENGTH, VOCABULARY = 6, 11
CLASSES = ("open", "doubtful", "personal")
TAXONOMY = Taxonomy("t", "1", tuple((name, name) for name in CLASSES))
WEIGHTS = {
    "open": {"lower": 1.0, "upper": 1.0, "head": 1.0},
    "doubtful": {"lower": 0.0, "upper": 0.5, "head": 1.0},
    "personal": {"lower": 0.3, "upper": 0.0, "head": 1.0},
}
OPTIMIZERS: dict[str, Callable[[], list[Optimizer]]] = {
    "SGD": lambda: [SGD(lr=0.1, momentum=0.9, weight_decay=0.01)],
    "AdamW": lambda: [AdamW(lr=0.01, weight_decay=0.1)],
    "Muon": lambda: [Muon(lr=0.02), AdamW(lr=0.01)],
    "SGDW": lambda: [SGDW(lr=0.1, momentum=0.9, weight_decay=0.01)],
    "Aurora": lambda: [Aurora(lr=0.02), AdamW(lr=0.01)],
    "Lion": lambda: [Lion(lr=0.01)],
    "NorMuon": lambda: [NorMuon(lr=0.02), AdamW(lr=0.01)],
    "SOAP": lambda: [SOAP(lr=0.01)],
    "Sophia": lambda: [Sophia(lr=0.01, num_labels=8)],
    "ScheduleFreeAdamW": lambda: [ScheduleFreeAdamW(lr=0.01)],
}
NARROW: dict[str, Any] = {"vocabulary_size": VOCABULARY, "width": 8, "num_blocks": 2, "num_heads": 2}
REGIONS = {"lower": "['embedding.*', 'blocks.0.*']", "upper": "['blocks.1.*', 'norm.*']", "head": "['head.*']"}
NOISE = Denoising(num_steps=50)


def language(network: nn.Module, data: Any) -> Loss:
    """Cross-entropy in the model's own type, of tokens [rows, length + 1] or of packs."""
    is_packed = isinstance(data, Mapping)
    tokens, target = (data["input"], data["target"]) if is_packed else (data[:, :-1], data[:, 1:])
    output = network(tokens, data["documents"] if is_packed else None)
    logits = getattr(output, "logits", output)
    values = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape).sum(1)
    weight = (target != -100).double().sum(1)
    return Loss(values.sum(), weight.sum(), values, weight, getattr(output, "aux", {}))


def labels(network: nn.Module, data: Any) -> Loss:
    """Cross-entropy of images in the model's own type."""
    values = F.cross_entropy(network(data[0]), data[1], reduction="none")
    return Loss(values.sum(), float(len(values)), values)


def denoised(network: nn.Module, data: Any, seed: int) -> list[Loss]:
    """Return each row's loss by itself, with the draws of its microbatch."""
    torch.manual_seed(seed)
    times = torch.randint(NOISE.num_steps, data.shape[:1])
    noise = torch.randn_like(data)
    rows = zip(data[:, None], times[:, None], noise[:, None], strict=True)
    return [NOISE.compare(network, *row) for row in rows]


def tokens(generator: torch.Generator, rows: int) -> Data:
    return torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=generator)


def images(generator: torch.Generator, rows: int) -> Data:
    return torch.randn(rows, 1, 8, 8, generator=generator)


def labelled(generator: torch.Generator, rows: int) -> Data:
    return images(generator, rows), torch.randint(3, (rows,), generator=generator)


@dataclass(frozen=True)
class Family:
    """A model, its rows and its loss.

    Attributes:
        build: makes it.
        regions: globs by region.
        make: rows, given a generator and how many.
        swap: other content for rows.
        loss: in the model's own type.
        unit: what teaches by itself: a row, or the microbatch where the model couples rows.
        reads_packs: it keeps the documents of a pack apart.
    """

    build: Callable[[], nn.Module]
    regions: Mapping[str, str]
    make: Callable[[torch.Generator, int], Data] = tokens
    swap: Callable[[Any], Data] = lambda data: (data * 5 + 3) % VOCABULARY
    loss: LossFunction = language
    unit: str = "row"
    reads_packs: bool = True

    def model(self) -> nn.Module:
        """Return a model; the same one each time."""
        torch.manual_seed(0)
        made = self.build()
        with torch.no_grad():
            for parameter in made.parameters():  # Some layers begin at 0, and would hide what's behind them.
                parameter.add_(0.05 * torch.randn_like(parameter))
        return made

    def region_of(self, name: str) -> str:
        """Return a parameter's region."""
        first = name.split(".", maxsplit=1)[0] if not name.startswith("blocks.") else name[: len("blocks.0")]
        return next(region for region, globs in self.regions.items() if f"'{first}." in globs)


def _mixture(**options: Any) -> Family:
    more: dict[str, Any] = {"sequence_length": 12, "num_experts": 3, "balance_weight": 0.5} | options
    unit = "row" if options.get("balance") != "batch" and "capacity_factor" not in options else "microbatch"
    is_apart = options.get("dispatch") == "dense" and unit == "row"
    return Family(lambda: MixtureModel(MixtureConfig(**NARROW | more)), REGIONS, unit=unit, reads_packs=is_apart)


def _frozen_statistics() -> nn.Module:
    made = _resnet()
    for module in made.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return made


def _resnet() -> nn.Module:
    return ResNet(ResNetConfig(num_classes=3, widths=(4, 6)))


def _denoising() -> nn.Module:
    return DiffusionUNet(DiffusionConfig(widths=(4, 8), num_groups=2, num_heads=2))


_UNET = {
    "lower": "['time.*', 'stem.*', 'falling.*', 'shrinking.*']",
    "upper": "['middle.*', 'attention.*', 'growing.*', 'rising.*', 'norm.*']",
    "head": "['head.*']",
}
_RESNET = {"lower": "['stem.*', 'blocks.0.*']", "upper": "['blocks.1.*']", "head": "['head.*']"}


def _other_images(data: Any) -> Data:
    return data * 3 + 1


def _other_labelled(data: Any) -> Data:
    return data[0] * 3 + 1, (data[1] + 1) % 3


def _images(build: Callable[[], nn.Module], unit: str) -> Family:
    return Family(build, _RESNET, labelled, _other_labelled, labels, unit, reads_packs=False)


FAMILIES: dict[str, Family] = {
    "transformer": Family(lambda: GPT(GPTConfig(**NARROW, sequence_length=12)), REGIONS),
    "mixture of experts": _mixture(balance="sequence", dispatch="dense"),
    "gathered experts": _mixture(balance="sequence"),
    "experts balanced together": _mixture(balance="batch"),
    "experts of limited capacity": _mixture(balance="none", capacity_factor=0.75),
    "state space": Family(lambda: StateSpaceModel(StateSpaceConfig(**NARROW, state_size=3, kernel_size=3)), REGIONS),
    "diffusion U-Net": Family(_denoising, _UNET, images, _other_images, NOISE, reads_packs=False),
    "ResNet": _images(_resnet, "microbatch"),
    "ResNet with frozen statistics": _images(_frozen_statistics, "row"),
}
BIASED = _mixture(balance="bias", bias_rate=0.3)
"""Its bias is state, which a forward pass moves: nothing is promised of it."""
PACKED = [name for name, family in FAMILIES.items() if family.reads_packs]
SIZES = {"pure": (3, 3, 3, 3), "ragged": (4, 1, 2, 5)}
"""Rows of each microbatch."""


def policy(family: Family, weights: Mapping[str, Mapping[str, float]] = WEIGHTS) -> PolicyFile:
    regions = "".join(f"  {name}: {{params: {globs}}}\n" for name, globs in family.regions.items())
    rules = "".join(
        f"  - {{class: {c}, region: {r}, weight: {w}}}\n" for c, row in weights.items() for r, w in row.items()
    )
    return load_policy(f"version: 1\ntaxonomy: t\nregions:\n{regions}rules:\n{rules}")


def microbatches(family: Family, strategy: str, step: int, swapped: str = "") -> list[Batch]:
    """Return a step's four microbatches, of all classes and the first again, of which one may hold something else."""
    found, first = [], 100 * step
    for index, size in enumerate(SIZES[strategy]):
        class_id = TAXONOMY.id_of(CLASSES[index % 3])
        data = family.make(torch.Generator().manual_seed(first), size)
        lineage = Lineage(first + torch.arange(size), torch.full((size,), class_id))
        found.append(Batch(family.swap(data) if CLASSES[index % 3] == swapped else data, lineage, class_id))
        first += size
    return found


def mixed(family: Family, swapped: str = "") -> DataLoader[Batch]:
    """Return a loader of two batches of eleven rows, whose classes come as they come.

    Rows of one class may hold something else in the last one.
    """
    kinds = torch.tensor([0, 2, 2, 1, 0, 2, 2, 2, 1, 2, 2, 1, 0, 2, 1, 1, 0, 0, 2, 1, 0, 1])
    data = family.make(torch.Generator().manual_seed(9), len(kinds))
    is_other = (kinds == (CLASSES.index(swapped) if swapped else -1)) & (torch.arange(len(kinds)) >= 11)

    def chosen(own: Any, other: Any) -> Any:
        if isinstance(own, tuple):
            return tuple(map(chosen, own, other))
        return torch.where(is_other.view(-1, *[1] * (own.ndim - 1)), other, own)

    of_class = torch.tensor([TAXONOMY.id_of(name) for name in CLASSES])[kinds]
    rows = Batch(chosen(data, family.swap(data)), Lineage(torch.arange(len(kinds)), of_class))
    return DataLoader(range(len(kinds)), 11, collate_fn=lambda indices: rows.select(torch.tensor(indices)))  # type: ignore[arg-type]


def trainer(family: Family, network: nn.Module, optimizers: Any, chosen: PolicyFile | None, **options: Any) -> Trainer:
    budget, precision = options.pop("budget", "5ba"), options.pop("precision", "float32")
    config = RunConfig(budget=budget, num_microbatches=4, num_threads=1, precision=precision)
    taxonomy = TAXONOMY if chosen else None
    loss = options.pop("loss", family.loss)
    return Trainer(network, loss, optimizers=optimizers, policy=chosen, taxonomy=taxonomy, config=config, **options)


def run(made: Trainer, steps: Sequence[Sequence[Batch]]) -> Trainer:
    with made:
        for batches in steps:
            made.step_microbatches(batches, [batch.class_id for batch in batches])
    return made


def in_double(batches: Sequence[Batch]) -> list[Batch]:
    def wide(data: Any) -> Any:
        if isinstance(data, tuple):
            return tuple(map(wide, data))
        return data.double() if data.is_floating_point() else data

    return [Batch(wide(batch.data), batch.lineage, batch.class_id) for batch in batches]


def oracle(family: Family, network: nn.Module, batches: Sequence[Batch], step: int) -> dict[str, Tensor]:
    """Take each row (or microbatch) alone, times its route, summed, over the weight of what may teach the region."""

    def weight_of(class_id: int, name: str) -> float:
        return WEIGHTS[TAXONOMY.classes[class_id]][family.region_of(name)]

    if family.unit == "row" and family.loss is not NOISE:
        return gradients_by_row(network, batches, weight_of, family.loss)
    named = dict(network.named_parameters())
    total = {name: torch.zeros_like(p) for name, p in named.items()}
    teachers = dict.fromkeys(named, 0.0)
    for index, batch in enumerate(batches):
        assert batch.class_id is not None
        seed = position_key(0, "forward", step, index)
        is_noise = family.loss is NOISE
        for part in denoised(network, batch.data, seed) if is_noise else [_loss(family, network, batch.data)]:
            value = part.sum + sum(part.aux.values()) * part.weight
            found = torch.autograd.grad(value, list(named.values()), allow_unused=True)
            for name, gradient in zip(named, found, strict=True):
                rho = weight_of(batch.class_id, name)
                teachers[name] += float(part.weight) * (rho > 0)
                if gradient is not None:
                    total[name] += rho * gradient
    return {name: value / teachers[name] for name, value in total.items() if teachers[name]}


def _loss(family: Family, network: nn.Module, data: Any) -> Loss:
    found = family.loss(network, data)
    assert isinstance(found, Loss)
    return found


def by_hand(optimizers: Sequence[Optimizer], network: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a model, to be stepped by oneself."""
    named = list(network.named_parameters())
    return [o.build(share) for o, share in zip(optimizers, assign_parameters(optimizers, named), strict=True)]
