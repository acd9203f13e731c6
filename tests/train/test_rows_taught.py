"""Which regions somebody's rows taught, and at which steps: the query against what the run was seen to do."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from cosmati.cli.files import load_recipe
from cosmati.cli.main import app
from cosmati.core.labels import IGNORED
from cosmati.core.loss import LanguageModel, Loss
from cosmati.core.method import Method
from cosmati.data.ingest import read_jsonl
from cosmati.data.ingest.rows import class_by_field
from cosmati.data.named_rows import rows_with_ids
from cosmati.data.packed import PackedSource, read_packs
from cosmati.data.packing import Packing, pack_rows
from cosmati.data.people import ChosenRows, rows_by
from cosmati.data.rows import RowBatch
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import LedgerError
from cosmati.forget.subjects import index_subjects, make_key
from cosmati.ledger.row_keys import RowKeys
from cosmati.methods import LayerFreezing, MixUp, SelectiveBackprop
from cosmati.optim import SGD
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import load_policy
from cosmati.train.config import RunConfig
from cosmati.train.observers.observer import Observer
from cosmati.train.outcome import StepOutcome
from cosmati.train.rows_taught import RegionTaught, regions_taught_by
from cosmati.train.trainer import Trainer
from tests.train.packs.samples import LENGTH, VOCABULARY, model

pytestmark = pytest.mark.long

CLASSES = ("open", "personal", "withheld")
TAXONOMY = Taxonomy("t", "1", tuple((name, name) for name in CLASSES))
NUM_ROWS = 48
POLICY = """
version: 1
taxonomy: t
regions: {lower: {params: ['%s']}, upper: {params: '*', exclude: ['%s']}}
rules:
  - {class: open, weight: 1}
  - {class: personal, region: upper, weight: 0.5}
  - {class: personal, region: lower, weight: 0}
"""


REACHED = {"open": ("lower", "upper"), "personal": ("upper",), "withheld": ()}


def annotator(number: int) -> str:
    return ("ada", "bob", "eve")[number * 7 // 3 % 3]


def class_of(number: int) -> str:
    return CLASSES[number * 5 // 2 % 3]


def read(folder: Path, **fields: str) -> Any:
    path = folder / "rows.jsonl"
    made = [
        {
            "number": number,
            "tokens": [number % VOCABULARY, *range(1, 2 + number % 5)],
            "class": class_of(number),
            "annotator": annotator(number),
        }
        for number in range(NUM_ROWS)
    ]
    path.write_text("\n".join(map(json.dumps, made)))
    columns = {"class": "str", "annotator": "str"} | fields
    return read_jsonl(path, columns, class_of=class_by_field("class"))


def vectors(rows: RowBatch) -> tuple[Tensor, Tensor]:
    numbers = rows.tensor("number")
    return torch.stack([numbers, torch.ones_like(numbers)], 1).float(), (numbers % 2).float()[:, None]


def squared(network: nn.Module, data: Any) -> Loss:
    each = (network(data[0] / NUM_ROWS) - data[1]).square().mean(1)
    return Loss(each.sum(), torch.tensor(float(len(each))), each, torch.ones_like(each))


class Watching(Observer):
    """Notes, by what stands in the rows that were trained on, which region whose rows reached, and when."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], dict[int, int]] = defaultdict(lambda: defaultdict(int))

    def on_step(self, outcome: StepOutcome) -> None:
        for m, batch in enumerate(outcome.batches):
            route = outcome.routes[m]
            if not route.offered:
                continue
            for region in range(2):
                frozen = region not in outcome.taught[0].regions
                for number in [] if frozen or not route.weights[region] else batch.data[0][:, 0].long().tolist():
                    self.seen[annotator(number), ("lower", "upper")[region]][outcome.clock.step - 1] += 1


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    rows = read(folder, number="int")
    write_dataset(rows, folder / "out", rows.columns, class_of=rows.class_of, source="s", size_limit=700)
    return folder / "out"


def trainer(shards: Path, folder: Path, *methods: Method, seed: int = 0, **config: Any) -> tuple[Trainer, Watching]:
    torch.manual_seed(0)
    watching = Watching()
    settings: dict[str, Any] = {"budget": "5ba", "num_microbatches": 4, "num_threads": 1, "seed": seed}
    made = Trainer(
        nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)),
        config.pop("loss", squared),
        StreamingSource(StreamingDataset(shards, transform=vectors), rows_per_step=16, tail="pad"),
        optimizers=[SGD(lr=0.01)],
        methods=methods,
        policy=load_policy(POLICY % ("0.*", "0.*")),
        taxonomy=TAXONOMY,
        observers=[watching],
        config=RunConfig(run_folder=folder, **settings | config),
    )
    return made, watching


def compare(found: tuple[RegionTaught, ...], watching: Watching, who: str) -> None:
    expected = {region: steps for (one, region), steps in watching.seen.items() if one == who}
    assert {one.region: one.steps for one in found} == {
        region: tuple(sorted(steps)) for region, steps in expected.items()
    }
    assert {one.region: one.num_rows for one in found} == {region: sum(n.values()) for region, n in expected.items()}


@pytest.mark.parametrize(
    "methods",
    [(), (SelectiveBackprop(start=0.0, end=1.0, keep=0.5, interrupt=2),), (LayerFreezing(freeze_start=0.4),)],
)
def test_the_answer_is_what_the_run_was_seen_to_do(shards: Path, tmp_path: Path, methods: tuple[Method, ...]) -> None:
    made, watching = trainer(shards, tmp_path / "run", *methods)
    made.fit()
    again, _ = trainer(shards, tmp_path / "run", *methods)
    answers = []
    for who in ("ada", "bob", "eve"):
        found = regions_taught_by(again, rows_by(StreamingDataset(shards), "annotator", who))
        compare(found, watching, who)
        assert not any(one.num_unopened for one in found)
        answers.append(found)
    assert len({*answers}) == 3
    assert not regions_taught_by(again, rows_by(StreamingDataset(shards), "annotator", "nobody"))


def test_rows_that_were_mixed_are_counted_and_said_to_be_unopened(shards: Path, tmp_path: Path) -> None:
    made, _ = trainer(shards, tmp_path / "run", MixUp(alpha=1.0))
    made.fit()
    plain, watching = trainer(shards, tmp_path / "plain")
    plain.fit()
    found = regions_taught_by(made, rows_by(StreamingDataset(shards), "annotator", "ada"))
    compare(found, watching, "ada")  # All rows of a microbatch that is mixed take part in it.
    assert all(one.num_unopened for one in found)


class Short:
    """A loss without room for more than two rows."""

    def __call__(self, network: nn.Module, data: Any) -> Loss:
        if len(data[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return squared(network, data)


def test_microbatches_that_memory_has_cut_are_told_by_their_pieces(shards: Path, tmp_path: Path) -> None:
    made, watching = trainer(shards, tmp_path / "run", loss=Short())
    with pytest.warns(UserWarning, match="microbatches"):
        made.fit()
    again, _ = trainer(shards, tmp_path / "run")
    compare(regions_taught_by(again, rows_by(StreamingDataset(shards), "annotator", "ada")), watching, "ada")


def test_a_run_that_went_on_counts_each_step_once(shards: Path, tmp_path: Path) -> None:
    made, watching = trainer(shards, tmp_path / "run", checkpoint_every="1ba")
    made.fit()
    for checkpoint in sorted((tmp_path / "run" / "checkpoints").iterdir())[:-3]:
        shutil.rmtree(checkpoint)
    for checkpoint in sorted((tmp_path / "run" / "checkpoints").iterdir())[1:]:
        shutil.rmtree(checkpoint)
    trainer(shards, tmp_path / "run", checkpoint_every="1ba")[0].fit()
    found = regions_taught_by(made, rows_by(StreamingDataset(shards), "annotator", "bob"))
    compare(found, watching, "bob")


def test_other_rows_than_those_of_the_run_are_refused(shards: Path, tmp_path: Path) -> None:
    made, _ = trainer(shards, tmp_path / "run")
    made.fit()
    chosen = rows_by(StreamingDataset(shards), "annotator", "ada")
    other, _ = trainer(shards, tmp_path / "run", seed=1)
    with pytest.raises(LedgerError, match="aren't those that the ledger commits to"):
        regions_taught_by(other, chosen)
    whole = regions_taught_by(made, chosen)
    assert not any(one.num_unopened for one in whole)
    keys = RowKeys.load(tmp_path / "run" / "private" / "rows.keys")
    keys.forget([next(iter(chosen.row_ids.tolist()))])
    keys.save(tmp_path / "run" / "private" / "rows.keys")
    shredded = regions_taught_by(made, chosen)
    assert all(one.num_unopened for one in shredded), "nobody can open a microbatch of which a row was forgotten"
    assert [(one.region, one.steps, one.num_rows) for one in shredded] == [
        (one.region, one.steps, one.num_rows) for one in whole
    ]
    RowKeys(bytes(32)).save(tmp_path / "run" / "private" / "rows.keys")
    with pytest.raises(LedgerError, match="other row keys"):
        regions_taught_by(made, chosen)
    (tmp_path / "run" / "private" / "rows.salt").unlink()
    with pytest.raises(LedgerError, match=r"rows\.salt"):
        regions_taught_by(made, chosen)


@pytest.mark.parametrize("governed", [True, False])
def test_documents_of_packs_are_told_apart(tmp_path: Path, governed: bool) -> None:
    rows = read(tmp_path, tokens="ndarray:int64")
    packed = pack_rows(rows, Packing(LENGTH, class_pure=False), class_names=CLASSES, class_of="mixture")
    write_dataset(packed, tmp_path / "packs", packed.columns, class_of=packed.class_of, source="s")
    seen: dict[tuple[str, str], set[int]] = defaultdict(set)
    counts: dict[tuple[str, str], int] = defaultdict(int)

    class Documents(Observer):
        def on_step(self, outcome: StepOutcome) -> None:
            for ids, target in ((b.lineage.token_row_ids, b.data["target"]) for b in outcome.batches):
                assert ids is not None
                # A class none of whose tokens is followed by another of its document has nothing to learn from.
                learns = {class_of(number) for number in ids[target != IGNORED].tolist()}
                for number in (n for line in ids.tolist() for n in {*line} - {-1}):
                    reached = REACHED[class_of(number)] if class_of(number) in learns else ()
                    for region in reached if governed else ("all",):
                        seen[annotator(number), region].add(outcome.clock.step - 1)
                        counts[annotator(number), region] += 1

    dataset = StreamingDataset(tmp_path / "packs", transform=read_packs)
    made = Trainer(
        model(),
        LanguageModel(VOCABULARY),
        PackedSource(StreamingSource(dataset, rows_per_step=4), CLASSES),
        optimizers=[SGD(lr=0.1)],
        policy=load_policy(POLICY % ("embedding.*", "embedding.*")) if governed else None,
        taxonomy=TAXONOMY if governed else None,
        observers=[Documents()],
        config=RunConfig(budget="4ba", num_microbatches=2, num_threads=1, run_folder=tmp_path / "run", ledger=True),
    )
    made.fit()
    for who in ("ada", "bob", "eve"):
        theirs = rows_by(dataset, "annotator", who)
        named = rows_with_ids(dataset, theirs.documents[:, 1])
        assert sorted(named.documents.tolist()) == sorted(theirs.documents.tolist())
        assert not len(named.row_ids)
        found = regions_taught_by(made, theirs)
        expected = {region: tuple(sorted(steps)) for (one, region), steps in seen.items() if one == who}
        assert {one.region: one.steps for one in found} == expected
        assert {one.region: one.num_rows for one in found} == {r: n for (one, r), n in counts.items() if one == who}
        assert not any(one.num_unopened for one in found)


RECIPE = """
from pathlib import Path
from torch import nn
from cosmati import RunConfig, StreamingDataset, StreamingSource, load_policy
from cosmati.methods import SelectiveBackprop
from cosmati.optim import SGD
from cosmati.recipes.recipe import Recipe
from tests.train.test_rows_taught import POLICY, TAXONOMY, squared, vectors


def recipe():
    return Recipe(
        name="r",
        model=lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)),
        loss=squared,
        data=lambda: StreamingSource(StreamingDataset({shards!r}, transform=vectors), rows_per_step=16),
        optimizers=(SGD(lr=0.01),),
        config=RunConfig(budget="4ba", num_microbatches=4, num_threads=1),
        policy=load_policy(POLICY % ("0.*", "0.*")),
        taxonomy=TAXONOMY,
    )
"""


def agrees(output: str, made: Trainer, chosen: ChosenRows) -> None:
    for one in regions_taught_by(made, chosen):
        (line,) = (line for line in output.splitlines() if line.startswith(one.region))
        told, _, spans = line.partition(":")
        assert told.split()[1:5:3] == [str(one.num_rows), str(len(one.steps))]
        ends = [list(map(int, span.split("-"))) for span in spans.split(", ")]
        assert [step for span in ends for step in range(span[0], span[-1] + 1)] == [*one.steps]


def test_the_command_answers_alike(shards: Path, tmp_path: Path) -> None:
    file, run = tmp_path / "recipe.py", tmp_path / "run"
    file.write_text(RECIPE.replace("{shards!r}", repr(str(shards))))
    made = load_recipe(str(file), []).trainer(run_folder=run)
    made.fit()
    asked = ["ledger", "query", str(run), "--by", "annotator=ada", "--recipe", str(file)]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    agrees(done.output, made, rows_by(StreamingDataset(shards), "annotator", "ada"))
    (tmp_path / "ids").write_text("3\n11\n")
    for by, ids in (("row=3", [3]), (f"rows={tmp_path / 'ids'}", [3, 11])):
        told = CliRunner().invoke(app, [*asked[:3], "--by", by, *asked[5:]])
        agrees(told.output, made, ChosenRows(np.asarray(ids), np.empty((0, 2), np.int64)))
    for by in ("row=x", "row=99999", "subject=eve", "nobody", f"rows={tmp_path}"):
        assert CliRunner().invoke(app, [*asked[:3], "--by", by, *asked[5:]]).exit_code == 2
    key, whose = tmp_path / "whose.key", ["--by", "subject=ada", *asked[5:]]
    dataset = StreamingDataset(shards)
    index_subjects(dataset, ["annotator"], tmp_path / "whose.key.subjects", make_key(key))
    of_subject = CliRunner().invoke(app, [*asked[:3], *whose, "--key", str(key)])
    agrees(of_subject.output, made, rows_by(dataset, "annotator", "ada"))
    assert of_subject.output == done.output.replace("annotator=ada", "subject=ada")
    hidden = [*asked[:3], "--by", "subject=-", *asked[5:], "--key", str(key)]
    told = CliRunner().invoke(app, hidden, input="ada\n").output
    assert "Rows of the subject, each" in told
    assert told.splitlines()[:-2] == done.output.splitlines()[:-2]
    for wrong in ([*whose], ["--by", "row=3", *asked[5:], "--key", str(key)]):  # before a recipe is read
        refused = CliRunner().invoke(app, [*asked[:3], *wrong])
        assert (refused.exit_code, "only these together" in refused.output) == (2, True)
    other = CliRunner().invoke(app, [*asked[:3], *whose, "--key", str(key), "--index", str(tmp_path / "ids")])
    assert (other.exit_code, "is no index of subjects" in other.output) == (2, True)
    nobody = [*asked[:3], "--by", "annotator=nobody", *asked[5:]]
    assert "None of annotator=nobody" in CliRunner().invoke(app, nobody).output
    for wrong in (asked[:5], [*asked, "--class", "open"], [*asked[:3], *asked[5:]]):
        assert CliRunner().invoke(app, wrong).exit_code == 2
