"""Runs on packs: from written shards, with workers, resumed, cut, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cosmati.core.batch import Batch, Lineage
from cosmati.core.labels import IGNORED
from cosmati.core.loss import LanguageModel, Loss
from cosmati.core.method import Method, Position, Stage
from cosmati.core.plan import Promise
from cosmati.core.source import Source
from cosmati.data.in_memory import InMemory
from cosmati.data.packed import PackedSource, pack_tensors, read_packs
from cosmati.data.packing import Packing, pack, pack_columns
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import CosmatiError, DataError, PlanError
from cosmati.ledger.verify import verify_ledger
from cosmati.methods import LabelSmoothing, LayerFreezing, SelectiveBackprop, SeqLengthWarmup
from cosmati.optim import SGD, AdamW
from cosmati.routing.policy_file import load_policy
from cosmati.train import gradients, token_routes
from cosmati.train.config import RunConfig
from cosmati.train.held import remember
from cosmati.train.token_routes import count_labels_by_class, count_tokens
from cosmati.train.token_watch import leak_between_documents
from cosmati.train.trainer import Trainer
from tests.train.packs.samples import (
    CLASSES,
    LENGTH,
    TAXONOMY,
    VOCABULARY,
    WEIGHTS,
    documents,
    exact,
    first_step,
    model,
    oracle,
    policy,
    region_of,
    source,
    trainer,
    values,
)

pytestmark = pytest.mark.long


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Packs of three classes, written as a source of a mixture."""
    rows = ({"tokens": one.tokens, "spans": one.spans} for one in documents(60))
    write_dataset(rows, tmp_path / "packs", pack_columns(LENGTH, "int64"), class_of="mixture", source="s")
    return tmp_path / "packs"


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_written_packs_are_routed_by_token(shards: Path, num_workers: int) -> None:
    dataset = StreamingDataset(shards, transform=read_packs)
    data = PackedSource(StreamingSource(dataset, rows_per_step=4, num_workers=num_workers), CLASSES)
    network = model().double()
    before = values(network)
    expected = oracle(network, first_step(data), lambda c, name: WEIGHTS[CLASSES[c]][region_of(name)])
    trainer(network, data, policy(), loss=exact).fit()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(before[name] - parameter.detach(), expected[name], rtol=1e-12, atol=1e-14)


def test_what_is_read_of_packs_is_what_was_packed() -> None:
    generator = np.random.default_rng(0)
    rows: list[dict[str, Any]] = [
        {"tokens": generator.integers(1, 9, int(generator.integers(1, 30))), "row_id": i, "class_id": i % 2}
        for i in range(20)
    ]
    packs = list(pack(rows, Packing(8, class_pure=False, cut_rows=False)))
    read = pack_tensors(packs)
    seen: dict[Any, list[tuple[int, int]]] = {row["row_id"]: [] for row in rows}
    for number in range(len(packs)):
        inputs, targets, owners, classes, ids = (read[name][number].tolist() for name in read)
        for place in range(8):
            if ids[place] == -1:
                assert classes[place] == -1
                assert targets[place] == -100
                continue
            seen[ids[place]].append((inputs[place], targets[place]))
            assert classes[place] == ids[place] % 2
            follows = place < 7 and owners[place + 1] == owners[place]
            assert targets[place] == (inputs[place + 1] if follows else -100)
    for row in rows:
        assert sorted(token for token, _ in seen[row["row_id"]]) == sorted(row["tokens"].tolist())


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    def run(folder: Path, budget: str) -> dict[str, Tensor]:
        network = model(dropout=0.2)
        config = {"run_folder": folder, "checkpoint_every": "2ba"}
        trainer(
            network, source(documents(60)), policy(), optimizers=[AdamW(lr=0.01)], budget=budget, config=config
        ).fit()
        return values(network)

    whole = run(tmp_path / "whole", "5ba")
    half = tmp_path / "half"
    run(half, "5ba")
    for checkpoint in sorted((half / "checkpoints").iterdir())[1:]:
        shutil.rmtree(checkpoint)
    resumed = run(half, "5ba")
    assert all(map(torch.equal, whole.values(), resumed.values()))
    report = verify_ledger(half / "ledger")
    assert report.num_steps == 5
    assert not report.diverged_steps


def test_a_run_that_goes_on_with_packs_read_otherwise_is_refused(tmp_path: Path) -> None:
    config = {"run_folder": tmp_path / "run"}
    packs = pack_tensors(documents(60))
    for tail in ("pad", "drop"):
        made = trainer(model(), PackedSource(InMemory(packs, 4, tail=tail), CLASSES), policy(), config=config)
        if tail == "pad":
            made.fit()
    with pytest.raises(CosmatiError, match="tail drop, was pad"):
        made.fit()


class Short:
    """A loss whose microbatches have no room where they have more than one row."""

    def __call__(self, network: nn.Module, data: Any) -> Loss:
        if len(data["input"]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return exact(network, data)


def test_packs_are_cut_where_memory_is_short(tmp_path: Path) -> None:
    network, data = model().double(), source(documents())
    before = values(network)
    expected = oracle(network, first_step(data), lambda c, name: WEIGHTS[CLASSES[c]][region_of(name)])
    made = trainer(network, data, policy(), loss=Short(), config={"run_folder": tmp_path / "run"})
    with pytest.warns(UserWarning, match="microbatches"):
        made.fit()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(before[name] - parameter.detach(), expected[name], rtol=1e-12, atol=1e-14)
    assert verify_ledger(tmp_path / "run" / "ledger").num_steps == 1


@pytest.mark.parametrize(
    ("method", "holds"),
    [
        (LabelSmoothing(smoothing=0.1), True),
        (LayerFreezing(freeze_start=0.0), True),
        (SelectiveBackprop(start=0.0, end=1.0, keep=0.5, interrupt=0), False),
    ],
)
def test_methods_hold_or_withdraw_the_promise(method: Any, holds: bool) -> None:
    """What a denied class holds moves nothing, or the plan says so before."""
    runs = []
    for swapped in ((), (1,)):
        network = model()
        made = trainer(network, source(documents(swapped=swapped)), policy(), methods=[method])
        made.fit()
        runs.append(values(network))
    assert made.plan.holds(Promise.NO_DIRECT_WRITE) == holds
    if holds:
        assert torch.equal(runs[0]["embedding.weight"], runs[1]["embedding.weight"])


@pytest.mark.parametrize("truncate", [True, False])
def test_packs_that_are_shortened_teach_what_their_documents_may(truncate: bool) -> None:
    """The classes of the tokens are cut as they are: the gradients are those of what is left of each document."""
    method = SeqLengthWarmup(duration=1.0, min_seq_length=4, max_seq_length=LENGTH, step_size=4, truncate=truncate)

    def short(tensor: Tensor) -> Tensor:
        return tensor[:, :4] if truncate else torch.cat([row.reshape(-1, 4) for row in tensor])

    def shortened(batch: Batch) -> Batch:
        data = {name: short(tensor) for name, tensor in batch.data.items()}
        nothing = torch.zeros(len(data["input"]), dtype=torch.int64)
        assert batch.lineage.token_class_ids is not None
        return Batch(data, Lineage(nothing, nothing, token_class_ids=short(batch.lineage.token_class_ids)))

    network, data = model().double(), source(documents())
    before, given = values(network), [shortened(batch) for batch in first_step(data)]
    expected = oracle(network, given, lambda c, name: WEIGHTS[CLASSES[c]][region_of(name)])
    trainer(network, data, policy(), loss=exact, methods=[method]).fit()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(before[name] - parameter.detach(), expected[name], rtol=1e-12, atol=1e-14)


@dataclass(frozen=True)
class Halved(Method):
    """Cuts packs off, and leaves their lineage as it was."""

    stage: ClassVar[Stage] = Stage.SHAPE

    def batch(self, batch: Batch, at: Position) -> Batch:
        del at
        data = {name: tensor[:, : LENGTH // 2] for name, tensor in batch.data.items()}
        return Batch(data, batch.lineage, batch.class_id)


def test_a_method_that_changes_the_length_of_packs_alone_is_refused() -> None:
    with pytest.raises(PlanError, match="length of packs"):
        trainer(model(), source(documents()), policy(), methods=[Halved()]).fit()


@dataclass(frozen=True)
class Untold:
    """Packs without the classes of their tokens."""

    inner: Any
    lineage: bool
    class_names: tuple[str, ...] = CLASSES
    digest: str = "untold"

    def order(
        self, *, seed: int, num_microbatches: int, route_pure: bool, classes: Collection[int] | None = None
    ) -> Any:
        order = self.inner.order(seed=seed, num_microbatches=num_microbatches, route_pure=route_pure)
        return Untold2(order, self.lineage, order.steps_per_epoch, order.rows_per_step)


@dataclass(frozen=True)
class Untold2:
    inner: Any
    lineage: bool
    steps_per_epoch: int
    rows_per_step: int

    def class_id(self, step: int, index: int) -> None:
        return None

    def microbatch(self, step: int, index: int) -> Batch:
        batch = self.inner.microbatch(step, index)
        own = batch.lineage
        if not self.lineage:
            return Batch(batch.data, Lineage.of_rows(0, batch.num_rows))
        return Batch(batch.data, Lineage(own.row_ids, own.class_ids))


@pytest.mark.parametrize(
    ("lineage", "why"), [(False, "A policy needs rows with classes"), (True, "tells the class of each token")]
)
def test_packs_that_dont_tell_their_tokens_classes_are_refused(lineage: bool, why: str) -> None:
    untold = Untold(source(documents()), lineage)
    assert isinstance(untold, Source)
    with pytest.raises(PlanError, match=why):
        trainer(model(), untold, policy()).fit()


def test_a_policy_that_defers_a_class_is_refused_on_packs() -> None:
    phases = "phases: [{name: a, until: 2ba}, {name: b}]\n"
    rules = "rules:\n  - {class: '**', weight: 1}\n  - {class: personal, phase: a, decision: defer}\n"
    with pytest.raises(PlanError, match="personal, and packs"):
        trainer(model(), source(documents()), load_policy(f"version: 1\ntaxonomy: t\n{phases}{rules}"), budget="4ba")


def test_a_policy_with_bands_is_refused_on_packs() -> None:
    bands = "bands: {measure: m, names: [low, high], thresholds: [0.5]}\nrules:\n  - {class: '**', weight: 1}\n"
    with pytest.raises(PlanError, match="low, high"):
        trainer(model(), source(documents()), load_policy(f"version: 1\ntaxonomy: t\n{bands}"), budget="4ba")


def test_rows_that_arent_packs_and_classes_without_names_are_refused() -> None:
    rows = InMemory(torch.randint(9, (8, LENGTH)), 4)
    with pytest.raises(DataError, match="aren't packs"):
        trainer(model(), PackedSource(rows, CLASSES), policy())
    with pytest.raises(DataError, match="class ids from"):
        trainer(model(), PackedSource(InMemory(pack_tensors(documents()), 4), CLASSES[:2]), policy())
    with pytest.raises(DataError, match="distinct"):
        PackedSource(rows, ("open", "open"))
    with pytest.raises(DataError, match="lengths"):
        pack_tensors([])


def test_a_class_outside_the_taxonomy_is_refused() -> None:
    data = PackedSource(InMemory(pack_tensors(documents()), 4), ("open", "doubtful", "secret"))
    with pytest.raises(PlanError, match="secret"):
        trainer(model(), data, policy())


def test_an_own_loop_gives_packs_and_rows_of_one_class_in_one_step() -> None:
    """Microbatch 0 is of packs, 1 of one class: both go to one denominator."""
    # Without a source, class ids are the taxonomy's.
    data = PackedSource(InMemory(pack_tensors(documents()), 4), TAXONOMY.classes)
    network, (first, second) = model().double(), first_step(data)
    ids = second.lineage.token_class_ids
    assert ids is not None
    rows = second.lineage.row_ids
    pure = Batch(second.data, Lineage(rows, torch.ones(2, dtype=torch.int64)), 1)
    as_packs = Batch(second.data, Lineage(rows, rows, token_class_ids=ids.masked_fill(ids != -1, 1)))
    before = values(network)
    expected = oracle(network, [first, as_packs], lambda c, name: WEIGHTS[TAXONOMY.classes[c]][region_of(name)])
    made = Trainer(
        network,
        exact,
        optimizers=[SGD(lr=1.0)],
        policy=policy(),
        taxonomy=TAXONOMY,
        config=RunConfig(budget="1ba", num_microbatches=2, num_threads=1),
    )
    with made:
        made.step_microbatches([first, pure], [None, 1])
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(before[name] - parameter.detach(), expected[name], rtol=1e-12, atol=1e-14)


def test_packs_that_arent_there_teach_nothing() -> None:
    """Padding of an epoch's last step, and rows of a user's own whose lineage still has their tokens' classes."""
    data = source(documents(12)[:3])
    network, batches = model().double(), first_step(data)
    gone = next(batch for batch in batches if batch.present is not None)
    assert gone.present is not None
    assert (gone.lineage.token_class_ids[~gone.present] == -1).all()  # type: ignore[index]
    assert (gone.target[~gone.present] == IGNORED).all()
    before = values(network)
    expected = oracle(network, batches, lambda c, name: WEIGHTS[CLASSES[c]][region_of(name)])
    trainer(network, data, policy(), loss=exact).fit()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(before[name] - parameter.detach(), expected[name], rtol=1e-12, atol=1e-14)


def test_rows_of_ones_own_that_arent_there_have_no_labels() -> None:
    full, _ = first_step(source(documents()))
    ids = full.lineage.token_class_ids
    assert ids is not None
    gone = Batch(full.data, Lineage(torch.tensor([-1, 1]), full.lineage.class_ids, token_class_ids=ids))
    one = full.select(slice(1, 2))
    assert count_labels_by_class(model(), gone, 3).equal(count_labels_by_class(model(), one, 3))
    assert count_tokens([gone], 3, torch.device("cpu")).equal(count_tokens([one], 3, torch.device("cpu")))


@pytest.mark.parametrize("options", [{}, {"rotary": False}, {"ngrams": (2, 3)}])
def test_a_document_in_a_pack_is_what_it_is_alone(options: Any) -> None:
    network = model(**options).double()
    (batch, _) = first_step(source(documents()))
    data: Any = batch.data
    with torch.no_grad():
        together = network(data["input"], data["documents"])
        for row, number in ((r, n) for r in range(2) for n in range(LENGTH)):
            own = data["documents"][row] == number
            if own.any():
                alone = network(data["input"][row][own][None])
                # Rotary angles are in float32.
                torch.testing.assert_close(together[row][own], alone[0], rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:::torch")
def test_compiled_blocks_are_refused_by_name() -> None:
    with pytest.raises(PlanError, match="compile_blocks=False"):
        trainer(model(), source(documents()), policy(), config={"compile_blocks": True}).fit()


def test_in_bfloat16_masked_gradients_are_those_of_float32_up_to_rounding() -> None:
    found = []
    for precision in ("float32", "bfloat16"):
        network = model()
        before = values(network)
        trainer(network, source(documents()), policy(), config={"precision": precision}).fit()
        found.append({name: before[name] - tensor for name, tensor in values(network).items()})
    for name, exactly in found[0].items():
        assert (found[1][name] - exactly).norm() <= 0.05 * exactly.norm() + 1e-6


class Encoder(nn.Module):
    """PyTorch's own layers, which read parameters in functions of many layers at once."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.layer: Any = nn.LSTM(8, 8, batch_first=True) if kind == "LSTM" else layer
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
        del documents
        found = self.layer(self.embedding(tokens))
        logits: Tensor = self.head(found[0] if isinstance(found, tuple) else found)
        return logits


@pytest.mark.parametrize(("kind", "apart"), [("LSTM", "the whole model"), ("attention", r"time: layer\.self_attn\.")])
def test_what_looks_across_borders_runs_apart_and_is_promised_nothing(kind: str, apart: str) -> None:
    regions = {"embedding": "[embedding.*]", "lower": "['layer.*']", "upper": "[head.bias]", "head": "[head.weight]"}
    made = trainer(Encoder(kind), source(documents()), policy(regions=regions))
    with pytest.warns(UserWarning, match=apart):
        made.fit()
    broken = [g.because for g in made.plan.guarantees if g.promise is Promise.NO_DIRECT_WRITE]
    assert broken
    assert all("reads, at one document's tokens, what follows from another's" in because for because in broken)


def test_what_isnt_known_may_be_in_a_region_that_all_classes_teach_alike() -> None:
    regions = {"embedding": "[embedding.*]", "lower": "[head.bias]", "upper": "[head.weight]", "head": "['layer.*']"}
    made = trainer(Encoder("LSTM"), source(documents()), policy(regions=regions))
    made.fit()
    # It has a state that goes across borders, which the plan tells.
    broken = [g.because for g in made.plan.guarantees if g.promise is Promise.NO_DIRECT_WRITE]
    assert broken
    assert all("reads, at one document's tokens" in because for because in broken)


def test_without_a_policy_packs_train_as_any_rows() -> None:
    network = model()
    made = trainer(network, source(documents()), None, loss=LanguageModel(VOCABULARY), num_microbatches=1)
    made.fit()
    assert made.clock.step == 1


@pytest.mark.parametrize(("error", "is_told"), [(MemoryError(), True), (RuntimeError("shapes don't fit"), False)])
def test_memory_that_is_too_short_to_see_documents_apart_withdraws_the_promise(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_told: bool
) -> None:
    def fails(*_: Any) -> Tensor:
        raise error

    def looks(_: Any, *given: Any, **more: Any) -> str:
        return leak_between_documents(fails, *given, **more)

    def run() -> Trainer:
        torch.manual_seed(0)
        made = trainer(model(), source(documents()), policy())
        made.fit()
        return made

    expected = run()
    assert expected.plan.holds(Promise.NO_DIRECT_WRITE)
    monkeypatch.setattr(gradients, "leak_between_documents", looks)
    if not is_told:
        with pytest.raises(RuntimeError, match="shapes don't fit"):
            run()
        return
    found = run()
    broken = [g.because for g in found.plan.guarantees if g.promise is Promise.NO_DIRECT_WRITE]
    assert any(
        "memory was too short to see whether a pack's documents are kept apart (MemoryError)" in b for b in broken
    )
    assert all(map(torch.equal, found.model.parameters(), expected.model.parameters()))


def test_what_a_model_holds_is_copied_once_for_each_mix_of_regions_and_not_in_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To put it back, where a first pass shows what can't be taken apart: later passes are known not to."""
    copies: list[int] = []
    monkeypatch.setattr(token_routes, "remember", lambda roots: [copies.append(1), remember(roots)][1])
    made = trainer(model(), source(documents(60)), policy(), budget="8ba")
    made.fit()
    assert made.clock.step == 8
    assert copies == [1]
