"""What is forgotten of packs whose documents are of several kinds: a class has several ids there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cosmati.core.loss import LanguageModel
from cosmati.data.graded import SourceKind
from cosmati.data.in_memory import InMemory
from cosmati.data.packed import PackedSource, pack_tensors
from cosmati.data.packing import Packing, pack
from cosmati.forget.asked import ToForget
from cosmati.forget.past_run import PastRun
from cosmati.forget.replay import Wrap
from cosmati.forget.request import Request
from cosmati.optim import SGD
from cosmati.train.config import RunConfig
from cosmati.train.trainer import Trainer
from tests.forget.samples import differing, forgotten, tensors, trained, without
from tests.train.packs.samples import LENGTH, VOCABULARY, model

pytestmark = pytest.mark.long

NAMES = ("open", "news", "news")
KINDS = (SourceKind(), SourceKind(grades=(("trust", "low"),)), SourceKind(grades=(("trust", "high"),)))


ROWS = [{"tokens": torch.arange(LENGTH).numpy() % 11, "row_id": i} for i in range(16)]


def source(last: int) -> PackedSource:
    """Return packs, one in each step: open ones, `news` of the one kind in the last step alone, of the other before."""
    plain = InMemory(torch.arange(16), 4)
    met = [plain.order(seed=0, num_microbatches=1, route_pure=False).microbatch(s, 0).data.tolist() for s in range(4)]
    kind = {row: k for rows, k in zip(met, (0, 0, 3 - last, last), strict=True) for row in rows}
    rows = [row | {"class_id": kind[number]} for number, row in enumerate(ROWS)]
    data = pack_tensors(list(pack(rows, Packing(LENGTH, class_pure=False))))
    return PackedSource(InMemory(data, 4), NAMES, KINDS)


@pytest.mark.parametrize("last", [1, 2])
def test_a_class_of_several_kinds_is_met_with_the_first_of_them(tmp_path: Path, last: int) -> None:
    """Without a policy the data tell the classes, and a class has an id for each kind of its rows there."""

    def make(wrap: Wrap, folder: Path) -> Trainer:
        config = RunConfig(budget="4ba", run_folder=folder, ledger=True, num_threads=1, checkpoint_every="1ba")
        data = wrap(source(last))
        return Trainer(model(), LanguageModel(VOCABULARY), data, optimizers=[SGD(lr=0.1)], config=config)

    run, asked = trained(make, tmp_path / "run"), ToForget(classes=("news",))
    assert Request.open(PastRun(run), asked, make).contact.first_step == 2
    done = forgotten(run, asked, make, tmp_path / "out")
    truth = trained(make, tmp_path / "truth", without(classes=["news"]))
    assert not differing(tensors(done.out), tensors(truth))
