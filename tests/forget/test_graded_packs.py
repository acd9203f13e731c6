"""What is forgotten of packs whose documents are of several kinds: a class has several ids there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmati.core.loss import LanguageModel
from cosmati.data.graded import SourceKind
from cosmati.data.in_memory import InMemory
from cosmati.data.ingest import read_jsonl
from cosmati.data.packed import PackedSource, pack_tensors, read_packs
from cosmati.data.packing import Packing, pack, pack_rows
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import StreamingDataset
from cosmati.data.tokens import ByteTokenizer, tokenize
from cosmati.errors import ForgetError
from cosmati.forget.asked import ToForget
from cosmati.forget.past_run import PastRun
from cosmati.forget.replay import Wrap
from cosmati.forget.request import Request
from cosmati.forget.subjects import SubjectIndex, index_subjects, make_key, read_key
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.optim import SGD
from cosmati.train.config import RunConfig
from cosmati.train.trainer import Trainer
from tests.forget.samples import differing, forgotten, tensors, trained, without
from tests.train.packs.samples import LENGTH, VOCABULARY, model

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


def test_a_subject_in_packs_that_come_whole_is_refused(tmp_path: Path) -> None:
    """The index has documents' ids, and the run's rows are packs: others would be forgotten in their place."""
    texts = [{"text": f"{n}abcd"[:4], "annotator": f"a{n % 3}"} for n in range(24)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, texts)), "utf-8")
    rows = read_jsonl(tmp_path / "rows.jsonl", {"text": "str", "annotator": "str"}, class_of="open")
    packed = pack_rows(tokenize(rows, ByteTokenizer()), Packing(length=LENGTH), class_names=("open",))
    write_dataset(packed, tmp_path / "packs", packed.columns, class_of="open", source="s")
    dataset = StreamingDataset(tmp_path / "packs", transform=read_packs)

    whole = StreamingSource(dataset, 4)

    def make(wrap: Wrap, folder: Path, source: Any = whole) -> Trainer:
        config = RunConfig(budget="3ba", run_folder=folder, ledger=True, num_threads=1, checkpoint_every="1ba")
        torch.manual_seed(0)
        network = GPT(GPTConfig(vocabulary_size=257, sequence_length=LENGTH, width=8, num_blocks=1, num_heads=2))
        return Trainer(network, LanguageModel(257), wrap(source), optimizers=[SGD(lr=0.1)], config=config)

    index_subjects(dataset, ["annotator"], tmp_path / "index", make_key(tmp_path / "key"))
    asked = ToForget.of_subject("a1", SubjectIndex.open(tmp_path / "index", read_key(tmp_path / "key"), dataset))
    assert asked.rows == {1, 4, 7, 10, 13, 16, 19, 22}
    run = trained(make, tmp_path / "run")
    with pytest.raises(ForgetError, match="StreamingSource gives packs whole, whose ids are others"):
        Request.open(PastRun(run), asked, make)

    def by_document(wrap: Wrap, folder: Path) -> Trainer:
        return make(wrap, folder, PackedSource(StreamingSource(dataset, 4), ("open",)))

    other = trained(by_document, tmp_path / "other")
    assert Request.open(PastRun(other), asked, by_document).contact.num_rows == 8
