"""Packs whose documents are of several bands and grades: each teaches by its own, and the ledger says which."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmati.core.labels import IGNORED
from cosmati.core.source import Source
from cosmati.data.graded import SourceKind
from cosmati.data.in_memory import InMemory
from cosmati.data.ingest import attribute, class_by_field, read_jsonl
from cosmati.data.ingest.measured import kinds_in, measure, of_field
from cosmati.data.packed import PackedSource, pack_tensors, read_packs
from cosmati.data.packing import Packing, pack_rows
from cosmati.data.people import rows_by
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import StreamingDataset
from cosmati.data.tokens import ByteTokenizer, tokenize
from cosmati.data.tombstoned import Tombstoned
from cosmati.errors import DataError, PlanError, PolicyError
from cosmati.ledger.query import VerifiedLedger, contributions
from cosmati.ledger.verify import verify_ledger
from cosmati.methods import IsolatedAdapters
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.optim import SGD, AdamW
from cosmati.routing.policy_file import PolicyFile, load_policy
from cosmati.routing.starvation import token_kinds
from cosmati.train.rows_taught import regions_taught_by
from tests.ledger.plain_answers import check_answers
from tests.train.packs.samples import (
    CLASSES,
    LENGTH,
    REGIONS,
    TAXONOMY,
    documents,
    exact,
    first_step,
    model,
    oracle,
    region_of,
    trainer,
    values,
)

pytestmark = pytest.mark.long

NAMES = ("open", "open", "doubtful", "personal", "open")
KINDS = (
    SourceKind(1, (("trust", "high"),)),
    SourceKind(1, (("trust", "low"),)),
    SourceKind(0, (("trust", "high"),)),
    SourceKind(1, (("rank", "x"), ("trust", "high"))),
    SourceKind(1, (("trust", "high"),), ("personal",)),
)
"""Five class ids: bands, grades, something that no policy asks for, and rows of two classes."""
FACTORS = (1.0, 0.5, 0.25, 1.0, 1.0)


def graded(weights: str = "", extra: str = "") -> PolicyFile:
    regions = "".join(f"  {name}: {{params: {globs}}}\n" for name, globs in REGIONS.items())
    return load_policy(
        f"version: 1\ntaxonomy: t\nregions:\n{regions}"
        "bands: {measure: readability, names: [dull, bright], thresholds: [0.5]}\n"
        "measures: {trust: {grades: [low, high]}}\n"
        f"rules:\n  - {{class: '**', weight: 1}}\n{weights}attenuate:\n"
        f"  - {{class: '**', measure: trust, grade: low, factor: 0.5}}\n{extra}"
    )


POLICY = graded(
    "  - {class: personal, region: lower, weight: 0}\n  - {class: doubtful, band: dull, weight: 0.25}\n",
    "  - {class: open, measure: trust, grade: low, region: head, factor: 0}\n",
)


def rho(class_id: int, name: str) -> float:
    """What a token of a class id may teach a parameter, by hand."""
    region = region_of(name)
    if region == "lower" and "personal" in (NAMES[class_id], *KINDS[class_id].also):
        return 0.0
    return 0.0 if region == "head" and class_id == 1 else FACTORS[class_id]


def packs(number: int = 40, *, swapped: int | None = None) -> Any:
    """Return packs of documents whose class ids go round; one's tokens may be others."""
    found = documents(number)
    for one in found:
        one.spans[:, 1] = one.spans[:, 0] % len(NAMES)
        for start, stop in one.spans[one.spans[:, 1] == swapped][:, 2:4].tolist():
            one.tokens[start:stop] = (one.tokens[start:stop] + 3) % 11
    return pack_tensors(found)


def source(**options: Any) -> PackedSource:
    return PackedSource(InMemory(packs(**options), 4, tail="pad"), NAMES, KINDS)


def taught(network: Any, data: Any, policy: PolicyFile, **options: Any) -> Any:
    before = values(network)
    made = trainer(network, data, policy, loss=exact, **options)
    made.fit()
    return {name: before[name] - parameter.detach() for name, parameter in network.named_parameters()}


@pytest.mark.parametrize("gone", [None, 7])
def test_each_document_teaches_by_its_own_band_and_grade(gone: int | None) -> None:
    network, data = model().double(), source()
    given: Source = data if gone is None else Tombstoned(data, classes=["open"], rows=[gone])
    if gone is not None:
        labelled = [batch.lineage.token_class_ids[batch.target != IGNORED] for batch in first_step(given)]  # type: ignore[index]
        assert {*torch.cat(labelled).tolist()} == {2, 3, 4}, "both kinds of the class are gone, and what is joint isn't"
    expected = oracle(network, first_step(given), rho)
    for name, found in taught(network, given, POLICY).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-12, atol=1e-14)


FREE = st.sampled_from([0.0, 0.25, 0.5, 1.0])


@settings(max_examples=4, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(CLASSES), st.integers(0, 2)), min_size=2, max_size=5, unique=True), st.data())
def test_any_table_of_factors(pairs: list[tuple[str, int]], drawn: st.DataObject) -> None:
    """Random factors by class and grade, and random class ids of the documents."""
    factors = {(name, grade): drawn.draw(FREE) for name in CLASSES for grade in range(3)}
    rules = "".join(
        f"  - {{class: {name}, measure: m, grade: g{grade}, factor: {factor}}}\n"
        for (name, grade), factor in factors.items()
    )
    text = "version: 1\ntaxonomy: t\nmeasures: {m: {grades: [g0, g1, g2]}}\nrules: [{class: '**', weight: 1}]\n"
    chosen = load_policy(f"{text}attenuate:\n{rules}")
    found = documents(16, seed=drawn.draw(st.integers(0, 9)))
    for one in found:
        one.spans[:, 1] = one.spans[:, 0] * 7 % len(pairs)
    names, kinds = zip(*((name, SourceKind(0, (("m", f"g{grade}"),))) for name, grade in pairs), strict=True)
    data = PackedSource(InMemory(pack_tensors(found), 4, tail="pad"), names, kinds)
    network = model().double()
    expected = oracle(network, first_step(data), lambda class_id, _: factors[pairs[class_id]])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The data have no rows that may teach")
        for name, gradient in taught(network, data, chosen).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1), AdamW(lr=0.01)], ids=["SGD", "AdamW"])
def test_all_ones_is_the_ungoverned_run_bit_for_bit(optimizer: Any) -> None:
    ones = load_policy(
        "version: 1\ntaxonomy: t\nbands: {measure: m, names: [dull, bright], thresholds: [0.5]}\n"
        "measures: {trust: {grades: [low, high]}}\nrules: [{class: '**', weight: 1}]\n"
        "attenuate: [{class: '**', measure: trust, grade: [low, high], factor: 1}]\n"
    )
    runs = []
    for chosen in (ones, None):
        network = model()
        trainer(network, source(), chosen, optimizers=[optimizer], budget="3ba").fit()
        runs.append(values(network))
    assert all(map(torch.equal, runs[0].values(), runs[1].values()))


@pytest.mark.parametrize("swapped", range(5))
def test_the_content_of_a_denied_kind_moves_nothing(swapped: int) -> None:
    """The swap test in bits: other tokens in documents of one kind change the regions that it may teach, no others."""
    one, two = (taught(model(), source(swapped=which), POLICY) for which in (None, swapped))
    moved = {region_of(name) for name in one if not torch.equal(one[name], two[name])}
    assert moved == {region_of(name) for name in one if rho(swapped, name)}


def test_the_ledger_has_a_cell_for_each_class_and_kind(tmp_path: Path) -> None:
    data = source()
    config = {"run_folder": tmp_path / "run", "details_every": 1}
    trainer(model(), data, POLICY, budget="3ba", config=config).fit()
    ledger = VerifiedLedger(tmp_path / "run" / "ledger")
    assert verify_ledger(tmp_path / "run" / "ledger").num_steps == 3
    order = data.order(seed=0, num_microbatches=2, route_pure=True)
    weights = Counter[tuple[str, str]]()
    for item, entry, tables in ledger.steps():
        found, wanted = Counter[Any](), Counter[Any]()
        for cell in entry.microbatches:
            band, grades = tables.kinds[cell.band]
            key = tables.classes[cell.class_id], band, grades["trust"], tables.route(cell, item)
            found[key] += round(cell.weight)
        for index in range(2):
            batch = order.microbatch(entry.step, index)
            classes: Any = batch.lineage.token_class_ids
            for class_id, number in Counter(classes[batch.target != IGNORED].tolist()).items():
                name, kind = "&".join(sorted([NAMES[class_id], *KINDS[class_id].also])), KINDS[class_id]
                route = {region_of(own): rho(class_id, own) for own, _ in model().named_parameters()}
                wanted[name, kind.band, dict(kind.grades)["trust"], tuple(route[r] for r in tables.regions)] += number
                weights.update({(name, region): number * rate for region, rate in route.items()})
        assert found == wanted
    cells = {(c.class_name, c.region): c.weight for c in contributions(tmp_path / "run" / "ledger").cells if c.weight}
    assert cells == pytest.approx(+weights, rel=1e-12)
    check_answers(tmp_path / "run" / "ledger")


def test_kinds_that_the_policy_takes_for_one_share_a_cell(tmp_path: Path) -> None:
    """A measure that the policy lacks tells nothing apart: neither in cells nor in what somebody's rows taught."""
    kinds = tuple(SourceKind(0, (("rank", word),)) for word in "abc")
    tensors = packs()
    tensors["token_class_ids"] = torch.where(tensors["token_class_ids"] == -1, -1, tensors["token_class_ids"] % 3)
    data = PackedSource(InMemory(tensors, 4, tail="pad"), ("open",) * 3, kinds)
    policy = load_policy("version: 1\ntaxonomy: t\nrules: [{class: '**', weight: 0.5}]\n")
    trainer(model(), data, policy, config={"run_folder": tmp_path / "run"}).fit()
    ((_, entry, _),) = VerifiedLedger(tmp_path / "run" / "ledger").steps()
    assert [cell.class_id for cell in entry.microbatches] == [TAXONOMY.classes.index("open")] * 2
    labels = sum(int((batch.target != IGNORED).sum()) for batch in first_step(data))
    assert sum(cell.weight for cell in entry.microbatches) == labels
    owners = [
        batch.data["documents"].masked_fill(batch.lineage.token_class_ids == -1, -1) for batch in first_step(data)
    ]
    whole = sum(len({*row.tolist()} - {-1}) for rows in owners for row in rows)
    assert sum(cell.num_rows for cell in entry.microbatches) == whole


def test_from_a_file_to_what_each_grade_taught(tmp_path: Path) -> None:
    """Rows of two classes and three grades, packed together, written, streamed, trained on; against the file."""
    rows: list[dict[str, Any]] = [
        {"text": "abcdefghij"[: 2 + n % 5], "class": CLASSES[n % 2], "trust": ["low", "high"][n // 2 % 2], "who": n % 3}
        for n in range(60)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = read_jsonl(tmp_path / "rows.jsonl", class_of=class_by_field("class"))
    read = attribute(read, annotator=lambda row: f"a{row['who']}")
    read = measure(read, band=1, grades={"trust": of_field("trust")})
    names, kinds = zip(*kinds_in(read), strict=True)
    packed = pack_rows(
        tokenize(read, ByteTokenizer()),
        Packing(LENGTH, class_pure=False, cut_rows=False),
        class_names=names,
        kinds=kinds,
        class_of="mixture",
    )
    write_dataset(packed, tmp_path / "packs", packed.columns, class_of="mixture", source="s")
    dataset = StreamingDataset(tmp_path / "packs", transform=read_packs)

    def made() -> Any:
        torch.manual_seed(0)
        config = GPTConfig(vocabulary_size=257, sequence_length=LENGTH, width=8, num_blocks=2, num_heads=2)
        data = PackedSource(StreamingSource(dataset, 4, tail="pad"))
        assert (data.class_names, data.row_kinds) == (names, kinds), "the shards say them"
        own = {"run_folder": tmp_path / "run"}
        return trainer(GPT(config), data, POLICY, loss=exact, budget="1ep", config=own)

    made().fit()
    wanted, found = Counter[Any](), Counter[Any]()
    for row in rows:  # a document has a label for each token but its first, and an end
        wanted[row["class"], row["trust"]] += len(row["text"])
    for _, entry, tables in VerifiedLedger(tmp_path / "run" / "ledger").steps():
        for cell in entry.microbatches:
            found[tables.classes[cell.class_id], tables.kinds[cell.band][1]["trust"]] += round(cell.weight)
    assert found == wanted
    taught_by = regions_taught_by(made(), rows_by(dataset, "annotator", "a1"))
    own = [(row["class"], row["trust"]) for row in rows if row["who"] == 1]
    without_head = own.count(("open", "low"))
    assert {one.region: one.num_rows for one in taught_by} == {
        region: len(own) - without_head * (region == "head") for region in REGIONS
    }


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Two data sets of packs, of the same rows and of other classes."""
    (tmp_path / "rows.jsonl").write_text('{"text": "abc", "trust": "low"}\n{"text": "defg", "trust": "high"}\n')
    for out, name in (("one", "open"), ("two", "doubtful")):
        rows = tokenize(read_jsonl(tmp_path / "rows.jsonl", class_of=name), ByteTokenizer(), keep=("trust",))
        rows = measure(rows, grades={"trust": of_field("trust")}, also=["personal"])
        names, kinds = zip(*kinds_in(rows), strict=True)
        packing = Packing(LENGTH, class_pure=False)
        packed = pack_rows(rows, packing, class_names=names, kinds=kinds, class_of="mixture")
        (manifest,) = write_dataset(packed, tmp_path / out, packed.columns, class_of="mixture", source="s")
        assert [(one.class_path, one.kind) for one in manifest.packed] == list(zip(names, kinds, strict=True))
    return tmp_path


def streamed(*folders: Path) -> StreamingSource:
    return StreamingSource(StreamingDataset([*folders], transform=read_packs), 1)


def test_shards_say_what_their_class_ids_mean(written: Path) -> None:
    data = PackedSource(streamed(written / "one"))
    assert data.class_names == ("open&personal",) * 2
    assert [dict(kind.grades) for kind in data.row_kinds] == [{"trust": "high"}, {"trust": "low"}]
    assert PackedSource(streamed(written / "one"), ("open",) * 2, data.row_kinds).digest == data.digest
    for names, kinds in (
        (("open",), ()),
        (("personal&open",) * 2, data.row_kinds[::-1]),
        (("mail",) * 2, data.row_kinds),
    ):
        with pytest.raises(
            DataError, match="ids mean open, trust high, also personal; open, trust low, also personal,"
        ):
            PackedSource(streamed(written / "one"), names, kinds)
    with pytest.raises(DataError, match="mean different classes or kinds"):
        PackedSource(streamed(written / "one", written / "two"))


@pytest.mark.parametrize("said", [[{"class_path": "A"}], [3], 3, [{"class_path": "a", "rank": 1}]])
def test_an_index_that_says_something_else_of_class_ids_is_refused(written: Path, said: object) -> None:
    path = written / "one" / "mixture" / "index.json"
    index = json.loads(path.read_text())
    assert len(index["cosmati"]["packed"]) == 2
    index["cosmati"]["packed"] = said
    path.write_text(json.dumps(index))
    with pytest.raises(DataError, match="says that class ids in packs mean"):
        StreamingDataset(path.parent)


def test_what_a_class_has_of_its_own_runs_for_all_its_kinds() -> None:
    """Adapters of `open`, whose tokens are of two class ids, run at the tokens of both."""
    text = (
        "version: 1\ntaxonomy: t\nregions:\n  own: {tag: isolated/open}\n"
        "  rest: {params: '*', exclude: '*.isolated.*'}\n"
        "measures: {trust: {grades: [low, high]}}\nrules:\n  - {class: '**', weight: 1}\n"
        "  - {class: '**', region: own, weight: 0}\n  - {class: open, region: own, weight: 1}\n"
    )
    runs = []
    for kinds in (tuple(SourceKind(0, (("trust", word),)) for word in ("low", "high")), ()):
        tensors = packs()
        ids = tensors["token_class_ids"]
        tensors["token_class_ids"] = torch.where(ids == -1, -1, ids % 2 if kinds else 0)
        network = model()
        chosen = load_policy(text if kinds else text.replace("measures: {trust: {grades: [low, high]}}\n", ""))
        data = PackedSource(InMemory(tensors, 4, tail="pad"), ("open",) * len(kinds or [0]), kinds)
        made = trainer(network, data, chosen, methods=[IsolatedAdapters(classes="open", rank=2)], budget="2ba")
        made.fit()
        runs.append({name: p.detach() for name, p in made.model.named_parameters()})
    assert any("isolated" in name for name in runs[0])
    for name in runs[0]:
        torch.testing.assert_close(runs[0][name], runs[1][name], rtol=1e-5, atol=1e-7)


def test_what_packs_dont_say_is_refused_by_name() -> None:
    plain = PackedSource(InMemory(pack_tensors(documents()), 4), CLASSES)
    with pytest.raises(PlanError, match="these packs don't say those of their tokens"):
        trainer(model(), plain, POLICY)
    with pytest.raises(PolicyError, match="say trust 'odd', and the policy has the grades high, low"):
        trainer(
            model(), PackedSource(InMemory(packs(), 4), NAMES, (*KINDS[:4], SourceKind(1, (("trust", "odd"),)))), POLICY
        )
    with pytest.raises(PolicyError, match="say band 7"):
        trainer(model(), PackedSource(InMemory(packs(), 4), NAMES, (*KINDS[:4], SourceKind(7))), POLICY)
    with pytest.raises(DataError, match="4 row_kinds go with 5 class_names"):
        PackedSource(InMemory(packs(), 4), NAMES, KINDS[:4])
    with pytest.raises(DataError, match="distinct"):
        PackedSource(InMemory(packs(), 4), ("open", "open"), KINDS[:1] * 2)
    deferring = graded("  - {class: open, band: dull, decision: defer}\n")
    with pytest.raises(PolicyError, match="defer"):
        trainer(model(), source(), deferring, budget="4ba")


def test_what_was_measured_is_part_of_what_a_run_is(tmp_path: Path) -> None:
    held = InMemory(packs(), 4, tail="pad")
    one, other = PackedSource(held, NAMES, KINDS), PackedSource(held, NAMES, (KINDS[1], KINDS[0], *KINDS[2:]))
    assert len({one.digest, other.digest, held.digest}) == 3
    assert PackedSource(held, CLASSES).digest == held.digest
    assert token_kinds(None, one) == ()
    assert one.class_names == ("open", "open", "doubtful", "personal", "open&personal")
