"""A run over signed data forgets rows of them: what's left is still signed, and by whom the ledger goes on to say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati import RunConfig, Trainer
from cosmati.core.loss import Loss
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.shards.manifest import SourceFacts
from cosmati.data.shards.upload import Destination
from cosmati.data.signing import sign_sources
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import StreamingDataset
from cosmati.forget.asked import ToForget
from cosmati.forget.certificate import verify_certificate
from cosmati.ledger.verify import verify_ledger
from cosmati.optim import AdamW
from cosmati.provenance.authority.trusted import Authority
from tests.forget.samples import differing, forgotten, tensors, trained, without
from tests.provenance.authority.people import NEWS, People


def loss(model: nn.Module, rows: Tensor) -> Loss:
    output: Tensor = model(rows.float()[:, None] / 32)
    values = output.square().mean(1)
    return Loss(values.sum(), torch.tensor(float(len(values))), per_row=values)


@pytest.fixture
def people(tmp_path: Path) -> People:
    made = People(tmp_path).begin()
    made.delegate(NEWS, "ada")
    rows = [{"number": number} for number in range(32)]
    destination = Destination(str(tmp_path / "corpus"))
    write_dataset(
        rows, destination, {"number": "int"}, class_of=lambda _row: NEWS, source="corpus", facts=SourceFacts()
    )
    list(sign_sources(str(tmp_path / "corpus"), made.folder, made.ring("ada")))
    return made


def test_what_is_left_is_signed(people: People, tmp_path: Path) -> None:
    def make(wrap: Any, folder: Path) -> Trainer:
        torch.manual_seed(0)
        authority = Authority(people.folder, people.pin, state=people.root / "seen")
        data = StreamingSource(StreamingDataset(people.root / "corpus", columns=("number",), authority=authority), 8)
        config = RunConfig(
            budget="8ba", num_threads=1, ledger=True, run_folder=folder, checkpoint_every="1ba", num_checkpoints=9,
            require_signed=True, trusted_roots=(people.pin,),
        )  # fmt: skip
        return Trainer(nn.Linear(1, 1), loss, wrap(data), optimizers=AdamW(lr=0.01), config=config)

    run = trained(make, tmp_path / "run")
    order = StreamingSource(StreamingDataset(people.root / "corpus", columns=("number",)), 8).order(
        seed=0, num_microbatches=1, route_pure=False
    )
    rows = frozenset(order.microbatch(2, 0).lineage.row_ids.tolist()[:3])
    done = forgotten(run, ToForget(rows=rows), make, tmp_path / "out")
    truth = trained(make, tmp_path / "truth", without(rows=rows))
    assert not differing(tensors(done.out), tensors(truth))
    before, after = verify_ledger(run / "ledger"), verify_ledger(done.out / "ledger")
    assert len({str(one["sources"]) for one in (*before.provenance, *after.provenance)}) == 1
    assert done.certificate is not None
    assert verify_certificate(done.certificate, done.out / "ledger").told["replayed_from"]["step"] == 2
