"""What the ledger of a run on packs says, against a count over its tokens."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmati.core.batch import Batch, Lineage
from cosmati.core.labels import IGNORED
from cosmati.data.in_memory import InMemory
from cosmati.data.packed import PackedSource, pack_tensors
from cosmati.errors import RefutedError
from cosmati.ledger.query import VerifiedLedger, contributions, direct_write_exclusion
from cosmati.ledger.verify import verify_ledger
from cosmati.optim import SGD
from cosmati.train.assembly import SubStep
from cosmati.train.config import RunConfig
from cosmati.train.token_routes import TokenRoute
from cosmati.train.trainer import Trainer
from tests.ledger.row_oracle import Rows
from tests.train.packs.samples import (
    CLASSES,
    REGIONS,
    TAXONOMY,
    WEIGHTS,
    documents,
    exact,
    first_step,
    model,
    policy,
    source,
    trainer,
)

pytestmark = pytest.mark.long

STEPS = 3
REJECTING = {name: row for name, row in WEIGHTS.items() if name != "personal"}


def trained(folder: Path, weights: Any = WEIGHTS) -> Any:
    data = source(documents(48, turns=2))
    config = {"run_folder": folder, "details_every": 1}
    made = trainer(model(), data, policy(weights), budget=f"{STEPS}ba", config=config)
    made.fit()
    return data.order(seed=0, num_microbatches=2, route_pure=True)


@pytest.mark.parametrize("weights", [WEIGHTS, REJECTING], ids=["all admitted", "one rejected"])
def test_each_cell_is_a_class_of_a_microbatch(tmp_path: Path, weights: Any) -> None:
    order = trained(tmp_path / "run", weights)
    ledger = tmp_path / "run" / "ledger"
    assert verify_ledger(ledger).num_steps == STEPS
    own_rows = Rows(tmp_path / "run")
    for _, entry, tables in VerifiedLedger(ledger).steps():
        found = {(tables.class_of(c, _), c.num_rows, round(c.weight, 9), c.row_commitment) for c in entry.microbatches}
        expected = set()
        for index in range(2):
            batch = order.microbatch(entry.step, index)
            classes, rows = (ids.numpy() for ids in batch.lineage.by_token)
            pairs = []  # Pack, row, class of each document, in order.
            for pack, one, own in zip(batch.lineage.row_ids.tolist(), classes, rows, strict=True):
                for token in range(len(own)):
                    is_new = token == 0 or own[token] != own[token - 1]
                    if is_new and one[token] >= 0 and pack >= 0:
                        pairs.append((pack, own[token], one[token]))
            labels = Counter(classes[(batch.target != IGNORED).numpy()].tolist())
            for class_id, name in enumerate(CLASSES):
                places = [i for i, pair in enumerate(pairs) if pair[2] == class_id]
                if not places:
                    continue
                is_in = name in weights
                told = [(i, *pairs[i][:2]) for i in places if is_in]
                leaves = [own_rows.leaf(name, entry.step, index, i, [pack, row], owners=[row]) for i, pack, row in told]
                digest = hashlib.sha256(b"".join(leaves)).digest()
                expected.add((name, len(leaves), float(labels[class_id] * is_in), digest))
        assert found == expected


def test_queries_count_tokens(tmp_path: Path) -> None:
    order = trained(tmp_path / "run")
    ledger = tmp_path / "run" / "ledger"
    labels: Counter[int] = Counter()
    for step, index in ((s, i) for s in range(STEPS) for i in range(2)):
        batch = order.microbatch(step, index)
        classes: Any = batch.lineage.token_class_ids
        labels.update(classes[batch.target != IGNORED].tolist())
    table = contributions(ledger)
    found = {(c.class_name, c.region): c.weight for c in table.cells}
    for class_id, name in enumerate(CLASSES):
        for region in REGIONS:
            assert found[name, region] == pytest.approx(labels[class_id] * WEIGHTS[name][region], rel=1e-12)
    # A norm of several classes is nobody's.
    assert all(c.num_norms == 0 for c in table.cells)
    statement = direct_write_exclusion(ledger, "doubtful", "lower")
    assert statement.num_steps_scanned == STEPS
    with pytest.raises(RefutedError, match="false"):
        direct_write_exclusion(ledger, "personal", "lower")


def test_steps_of_packs_and_of_one_class_with_sub_steps(tmp_path: Path) -> None:
    """Cells are by microbatch and class, and what each sub-step taught is by cell."""
    data = PackedSource(InMemory(pack_tensors(documents()), 4), TAXONOMY.classes)
    first, second = first_step(data)
    pure = Batch(second.data, Lineage(second.lineage.row_ids, torch.full((2,), 2)), 2)
    batches = {"packed": first, "pure": pure}
    made = Trainer(
        model(),
        [SubStep("near the input", exact, "[e]*"), SubStep("beyond", exact, "[!e]*")],
        optimizers=[SGD(lr=0.1, parameters="[e]*"), SGD(lr=0.1, parameters="[!e]*")],
        policy=policy(),
        taxonomy=TAXONOMY,
        config=RunConfig(budget="1ba", num_microbatches=2, num_threads=1, run_folder=tmp_path / "run"),
    )
    with made:
        made.step_microbatches([pure, first], [2, None])
    ((item, entry, tables),) = VerifiedLedger(tmp_path / "run" / "ledger").steps()
    details = json.loads(item.details or b"")
    labels = {name: (batch.target != IGNORED).sum().item() for name, batch in batches.items()}
    ids: Any = first.lineage.token_class_ids
    own = [int(((first.target != IGNORED) & (ids == c)).sum()) for c in range(3)]
    assert details["cell_microbatches"] == [0, 1, 1, 1]
    assert [tables.class_of(c, item) for c in entry.microbatches] == ["personal", *TAXONOMY.classes]
    assert [c.weight for c in entry.microbatches] == pytest.approx([labels["pure"], *own])
    assert list(details["gradient_norm"]) == ["0"]
    assert list(details["packed_gradient_norm"]) == ["1"]
    near, beyond = details["sub_steps"]
    assert near["weights"] == beyond["weights"] == pytest.approx([labels["pure"], *own])
    found = {(c.class_name, c.region): c for c in contributions(tmp_path / "run" / "ledger").cells}
    embedding = found["personal", "embedding"]
    assert embedding.weight == pytest.approx(WEIGHTS["personal"]["embedding"] * (labels["pure"] + own[2]))
    assert embedding.num_norms == 1
    assert not found["doubtful", "embedding"].num_microbatches


def test_a_region_without_a_label_that_may_teach_rests(tmp_path: Path) -> None:
    """Documents of one token have no label: they weigh nothing, and what only they may teach isn't moved."""
    packs = documents(24)
    for pack in packs:
        pack.spans[:, 1] = 1
    network = model()
    before = network.embedding.weight.detach().clone()
    trainer(network, source(packs), policy(), config={"run_folder": tmp_path / "run"}).fit()
    assert torch.equal(network.embedding.weight, before)
    assert verify_ledger(tmp_path / "run" / "ledger").num_steps == 1
    route = TokenRoute(torch.zeros(3, 2, dtype=torch.float64), frozenset(), (), ())
    assert route.teachers(torch.tensor([2.0, 1.0], dtype=torch.float64)).tolist() == [0.0, 0.0]


def test_what_is_measured_of_several_classes_is_told_of_none(tmp_path: Path) -> None:
    config = {"run_folder": tmp_path / "run", "direction_every": 1, "entropy_every": 1}
    trainer(model(), source(documents(48, turns=2)), policy(), budget="1ba", config=config).fit()
    (entry,) = (item for item, _, _ in VerifiedLedger(tmp_path / "run/ledger").steps())
    assert entry.details is not None
    told = json.loads(entry.details)
    owners = told["cell_microbatches"]
    mixed = sorted({m for m in owners if owners.count(m) > 1})
    pure = [cell for cell, m in enumerate(owners) if owners.count(m) == 1]
    assert mixed
    for name in ("gradient_norm", "direction", "entropy"):
        assert sorted(map(int, told[name])) == pure
        assert sorted(map(int, told[f"packed_{name}"])) == mixed
    assert all(value is None or value > 0 for row in told["packed_entropy"].values() for value in row)
    assert any(value for row in told["packed_entropy"].values() for value in row)
