"""Routes of packs: what each token may teach, by its class.

A region that all classes of a microbatch may teach alike goes the road of route-pure microbatches, bit for bit; one
that none may teach is absent. Only where they differ are gradients masked by token (`routing/token_masks.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor, nn

from cosmati.core.batch import TOMBSTONE, Batch
from cosmati.core.labels import IGNORED, predicts_next
from cosmati.core.meetings import num_collectives
from cosmati.errors import BatchError, PlanError
from cosmati.routing.split_forward import ALONE
from cosmati.routing.token_layers import TokenMask
from cosmati.routing.token_masks import TokenMasks, UntappedError
from cosmati.train.held import remember


class Learner(Protocol):
    """A parameter of the layout, which stands above."""

    @property
    def name(self) -> str:
        """The user's own."""
        ...

    @property
    def region(self) -> int:
        """Index of its region."""
        ...

    @property
    def tensor(self) -> Tensor:
        """What the model reads."""
        ...


class TokenRoute(NamedTuple):
    """What the tokens of one microbatch may teach.

    Attributes:
        weights: by the source's class and region, float64 [classes + 1, regions]; the last is padding's, 0.
        mixed: regions that its classes may not teach alike.
        withheld: classes whose tokens are left out before the forward pass: rejected ones.
        cells: the policy's class, kind and route id of each of the source's classes.
    """

    weights: Tensor
    mixed: frozenset[int]
    withheld: tuple[int, ...]
    cells: tuple[tuple[int, int, int], ...]

    @property
    def groups(self) -> dict[tuple[int, int, int], list[int]]:
        """The source's classes that each cell is of: a policy may tell fewer kinds apart than the data do."""
        found: dict[tuple[int, int, int], list[int]] = {}
        for class_id, cell in enumerate(self.cells):
            found.setdefault(cell, []).append(class_id)
        return found

    def teachers(self, labels: Tensor) -> Tensor:
        """Return how many labels may teach each region, float64 [regions].

        Args:
            labels: of each class, float64 [classes].
        """
        return (labels[:, None] * (self.weights[:-1] != 0).to(labels.device)).sum(0)


def count_tokens(mine: Sequence[Batch], num_classes: int, device: torch.device) -> Tensor:
    """Count the tokens of each class in microbatches of packs; none in others. float64 [microbatches, classes]."""
    counts = torch.zeros(len(mine), num_classes + 1, dtype=torch.float64)
    for line, batch in zip(counts, mine, strict=True):
        if batch.lineage.token_class_ids is not None:
            line.copy_(torch.bincount(token_classes(batch).flatten() + 1, minlength=num_classes + 1))
    return counts[:, 1:].to(device)


def without_withheld(batch: Batch, route: TokenRoute | None) -> Batch:
    """Return a batch in which tokens that nothing admits are 0, and aren't predicted."""
    if route is None or not route.withheld:
        return batch
    gone = torch.isin(token_classes(batch), torch.tensor(route.withheld))
    given, target = _of_tokens(batch, "input"), _of_tokens(batch, "target")
    gone = gone.to(given.device)
    return batch.replace(input=given.masked_fill(gone, 0), target=target.masked_fill(gone, IGNORED))


def count_labels_by_class(model: nn.Module, batch: Batch, num_classes: int) -> Tensor:
    """Return how many labels a microbatch of packs has of each class, float64 [classes] on the data's device.

    Raises:
        PlanError: methods have changed the tokens, and lineage doesn't tell their classes any more.
    """
    target = _of_tokens(batch, "target")
    ids = token_classes(batch)
    # Probabilities are [rows, vocabulary, tokens].
    is_label = (target != 0).any(1) if target.is_floating_point() else target != IGNORED
    if is_label.shape != ids.shape or _of_tokens(batch, "input").shape[:2] != ids.shape:
        msg = (
            f"The lineage tells the classes of tokens {tuple(ids.shape)}, and the step's input is "
            f"{tuple(_of_tokens(batch, 'input').shape)} with labels {tuple(is_label.shape)}. A method that changes the "
            "length of packs cuts their lineage too, by batch.lineage.cut(...): leave it out, or mend it."
        )
        raise PlanError(msg)
    if isinstance(batch.data, Mapping) and "labels" in batch.data and predicts_next(model):  # It shifts them itself.
        is_label = is_label & (torch.arange(is_label.shape[1], device=is_label.device) > 0)
    # Sums of ones: exact in any order. Padding counts into a place of its own.
    counts = torch.zeros(num_classes + 1, dtype=torch.float64, device=is_label.device)
    return counts.index_add_(0, ids.to(is_label.device).flatten() + 1, is_label.flatten().double())[1:]


def refuse_compiled() -> NoReturn:
    """Refuse compiled blocks where gradients are masked: what is compiled shows no layer.

    Raises:
        PlanError: always.
    """
    msg = (
        "Compiled blocks show no layer whose gradients could be masked by token, and packs of several classes need "
        "that under this policy. Use compile_blocks=False, or pack each class by itself."
    )
    raise PlanError(msg)


Result = TypeVar("Result")


class RunApart:
    """The modules that run once for each route: the smallest around what reads a parameter in no way that is known.

    Which one that is for a parameter follows from the model alone, so that bits follow from no order of microbatches.

    Args:
        model: in training.
        roots: model and losses, by the names with which their places begin.
    """

    def __init__(self, model: nn.Module, roots: Mapping[str, object]) -> None:
        self._model = model
        self._roots = roots
        self._around: dict[str, str] = {}
        self._known: frozenset[int] = frozenset()
        self._zeroed: frozenset[str] = frozenset()
        self._put_back: Callable[[], None] | None = None

    def around(self, names: Iterable[str], zeroed: Collection[str] = ()) -> dict[str, nn.Module]:
        """Return the modules that have to run apart in a forward pass that comes, by name.

        Args:
            names: of the parameters that are masked.
            zeroed: of those that some tokens read as zeros.
        """
        if not self._zeroed.issuperset(zeroed):  # They may be read so that only larger modules can be taken apart.
            self._zeroed |= frozenset(zeroed)
            self._put_back = self._put_back or remember(self._roots)
        chosen = sorted({self._around[name] for name in names if name in self._around})
        return {name: self._model.get_submodule(name) for name in chosen}

    def settled(self, attempt: Callable[[], Result], route: TokenRoute | None) -> Result:
        """Return what an attempt gives, with larger and larger modules apart as long as parameters are read otherwise.

        Args:
            attempt: runs a microbatch forward, the same in each call, and then differentiates it.
            route: of its tokens, None where rows aren't packs.

        Raises:
            PlanError: even the whole model can't run once for each route; or the attempt has waited for other ranks.
        """
        mixed = frozenset[int]() if route is None else route.mixed
        # What follows from the data may be read for the first time later: then a forward pass too many is left.
        self._put_back, is_new = None if mixed <= self._known else remember(self._roots), False
        while True:
            before = num_collectives()
            try:
                result = attempt()
            except UntappedError as error:
                if before != num_collectives():
                    raise PlanError(f"The model or its loss {ALONE}") from error
                if any(self._around.get(name, name) == "" for name in error.names):
                    raise
                self._around |= {name: self._around.get(name, name).rpartition(".")[0] for name in error.names}
                is_new = True
                if self._put_back is not None:
                    self._put_back()
            else:
                self._known |= mixed
                if is_new:
                    self._tell()
                return result

    def _tell(self) -> None:
        found = set(self._around.values())
        largest = sorted(name for name in found if not any(f"{name}.".startswith(f"{one}.") for one in found - {name}))
        names = "the whole model" if "" in found else ", ".join(largest)
        msg = (
            "Parameters are read in ways that can't be taken apart by token, so these modules run once for each route "
            f"in a microbatch of several classes, and take as many times their time: {names}. Packs of one class each "
            "don't need it."
        )
        warnings.warn(msg, stacklevel=2)


def masking(
    route: TokenRoute | None,
    batch: Batch,
    parameters: Sequence[Learner],
    apart: RunApart | None = None,
    *,
    zeroed: Collection[str] = (),
    keep: bool = False,
) -> TokenMasks | None:
    """Return what masks a microbatch's gradients, None where no region needs it.

    Args:
        route: of its tokens, None where rows aren't packs.
        batch: the microbatch.
        parameters: of the layout.
        apart: knows which modules run once for each route; None lets none.
        zeroed: names of parameters that a token reads as zeros where it may not teach them.
        keep: keep what is tapped.
    """
    if route is None or not route.mixed:
        assert not zeroed, "some tokens may teach them"
        return None
    ids, device = token_classes(batch), parameters[0].tensor.device
    masks = {region: TokenMask.of(route.weights[ids][..., region]).to(device) for region in route.mixed}
    chosen = [p for p in parameters if p.region in masks]
    own, tensors = {p.name: masks[p.region] for p in chosen}, {p.name: p.tensor for p in chosen}
    assert own.keys() >= set(zeroed), "likewise"
    return TokenMasks(own, tensors, apart.around(own, zeroed) if apart else None, zeroed=zeroed, keep=keep)


def token_classes(batch: Batch) -> Tensor:
    """Return the class of each token, `TOMBSTONE` where there is none: int64 [rows, tokens] on CPU."""
    ids, present = batch.lineage.token_class_ids, batch.present
    assert ids is not None, "of packs"
    return ids if present is None else ids.masked_fill(~present[:, None], TOMBSTONE)


def _of_tokens(batch: Batch, which: str) -> Tensor:
    """Return input or target of packs.

    Raises:
        PlanError: there is none, or it isn't a tensor.
    """
    try:
        found = batch.input if which == "input" else batch.target
    except BatchError as error:
        msg = f"Under a policy, packs need an {which} that can be told. {error}"
        raise PlanError(msg) from error
    if not isinstance(found, Tensor):
        msg = f"Under a policy, the {which} of packs is a tensor [rows, tokens], not a {type(found).__name__}."
        raise PlanError(msg)
    return found
