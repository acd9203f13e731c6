"""A run over signed data forgets rows of them: what's left is still signed, and by whom the ledger goes on to say."""

from __future__ import annotations

import contextlib
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
from cosmati.forget.past_run import PastRun
from cosmati.ledger.key_change import rotate_key
from cosmati.ledger.verify import verify_ledger
from cosmati.optim import AdamW
from cosmati.provenance.authority.errors import NoLongerVouchedError
from cosmati.provenance.authority.trusted import Authority
from tests.forget.samples import KEPT, differing, forgotten, tensors, trained, unwrapped, without
from tests.provenance.authority.people import NEWS, People
from tests.worked_examples import test_three_authorities as story

pytestmark = pytest.mark.long


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
    pytest.importorskip("model_signing", reason="the extra `audit` isn't installed")
    from cosmati.audit.export import export_bundle
    from cosmati.audit.trust import TrustFile
    from cosmati.audit.verify import verify_bundle

    rotate_key(done.out / "ledger", done.out / "private" / "operator.key")
    bundle = export_bundle(done.out / "ledger", tmp_path / "b.zip", key=done.out / "private" / "operator.key")
    (tmp_path / "in").mkdir()
    operator = (run / "ledger" / "operator.vkey").read_text().strip()
    report = verify_bundle(bundle, tmp_path / "in", TrustFile(operator=operator, data_roots=(people.pin,)))
    assert dict(report.lines)["deleted"].startswith("3 rows: replay, exact")
    assert not report.unpinned


@pytest.mark.parametrize("grace", ["reject", "stop"])
def test_what_a_licence_was_for_is_forgotten_after_its_end(
    grace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run went on without the class, or stopped; whoever vouches for nobody's rows isn't asked about them."""
    monkeypatch.setattr(story, "POLICY", story.POLICY.replace("licence: reject", f"licence: {grace}"))
    monkeypatch.setattr(story, "STEPS", 16)
    publisher = story.Publisher(tmp_path)
    events: dict[int, Any] = {}

    def make(wrap: Any, folder: Path) -> Trainer:
        monkeypatch.setattr(story, "StreamingSource", lambda *given: wrap(StreamingSource(*given)))
        monkeypatch.setattr(story, "RunConfig", lambda **given: RunConfig(**{**given, **KEPT, "run_folder": folder}))
        monkeypatch.setattr(publisher, "authority", lambda _run: authority(tmp_path / "run"))
        return publisher.trainer(events)

    authority = publisher.authority
    truth = trained(make, tmp_path / "truth", without(classes=["licensed/articles"]))
    events[10] = publisher.licence_ends
    with contextlib.suppress(NoLongerVouchedError):
        make(unwrapped, tmp_path / "run").fit()
    assert PastRun(tmp_path / "run").num_steps == (16 if grace == "reject" else 13), "found at step 12"
    events.clear()
    done = forgotten(tmp_path / "run", ToForget(classes=("licensed",)), make, tmp_path / "out")
    assert not differing(tensors(done.out), tensors(truth))
    assert done.certificate is not None
    assert verify_certificate(done.certificate, done.out / "ledger").checked[-1].endswith("rows of licensed/articles")
