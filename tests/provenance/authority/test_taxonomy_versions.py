"""New versions of a taxonomy: what was signed under the old one, and what happens to classes that go, move or come."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from typer.testing import CliRunner

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati import RunConfig, Trainer
from cosmati.cli.main import app
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.shards.manifest import SourceFacts
from cosmati.data.shards.upload import Destination
from cosmati.data.signing import sign_sources
from cosmati.data.source import StreamingSource
from cosmati.data.streaming import StreamingDataset
from cosmati.data.vouching import vouched_data
from cosmati.errors import CheckpointError, ProvenanceError
from cosmati.optim.optimizers import SGD
from cosmati.provenance.authority import ceremony, errors
from cosmati.provenance.authority.audit import audit
from cosmati.provenance.authority.repository import publish_taxonomy
from cosmati.provenance.authority.taxonomies import compare
from cosmati.provenance.authority.trusted import Authority
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import load_policy
from tests.provenance.authority.people import NEWS, PII, TAXONOMY, People, name_of

pytestmark = pytest.mark.long

MAPS, PRESS = "licensed/maps", "press/news"


def version(number: str, **changes: str | None) -> Taxonomy:
    """Return a version of the taxonomy with classes added, reworded or (None) taken out."""
    meanings = {**dict(TAXONOMY.meanings), **{path.replace("_", "/"): text for path, text in changes.items()}}
    return Taxonomy("firm", number, tuple((path, text) for path, text in meanings.items() if text is not None))


def publish(people: People, after: Taxonomy, **said: Any) -> None:
    with people.repository.change(people.ring()) as change:
        before = ceremony.taxonomy_of(people.repository, people.repository.chain())
        ceremony.publish(change, before, after, **said)


def write(people: People, path: str, *names: str) -> Path:
    folder = people.root / path.replace("/", "-")
    rows = [{"number": number} for number in range(3)]
    facts = SourceFacts()
    write_dataset(rows, Destination(str(folder)), {"number": "int"}, class_of=lambda _: path, source="s", facts=facts)
    list(sign_sources(str(folder), people.folder, people.ring(*names)))
    return folder


def opened(people: People, *folders: Path) -> StreamingDataset:
    authority = Authority(people.folder, people.pin, state=people.root / "seen")
    return StreamingDataset(folders, authority=authority)


@pytest.fixture
def people(tmp_path: Path) -> People:
    made = People(tmp_path).begin()
    made.delegate(NEWS, "ada")
    made.delegate(PII, "bob")
    return made


def test_sources_signed_under_two_versions_open_together(people: People) -> None:
    old = write(people, NEWS, "ada")
    publish(people, version("2", licensed_maps="Bought too."))
    with people.repository.change(people.ring()) as change:
        ceremony.delegate(change, version("2", licensed_maps="Bought too."), MAPS, [people.person("carol")])
    new = write(people, MAPS, "carol")
    assert opened(people, old, new).class_names == (MAPS, NEWS)
    assert people.sign(NEWS, "ada", version="2") == "signed", "who signs a class that stays signs on"


def test_the_newest_is_the_last_and_not_the_highest_word(people: People) -> None:
    for number in ("9", "10", "0.5"):
        publish(people, version(number))
        assert Authority(people.folder, people.pin, state=people.root / "seen").taxonomy.version == number


def test_a_withdrawn_class_is_refused_and_the_others_open(people: People) -> None:
    news, pii = write(people, NEWS, "ada"), write(people, PII, "bob")
    with pytest.raises(ProvenanceError, match=r"customer/pii \(signed sources: 1\).*--withdraw customer/pii"):
        publish(people, version("2", customer_pii=None))
    assert opened(people, news, pii).class_names == (PII, NEWS), "nothing was published"
    publish(people, version("2", customer_pii=None), withdraw=[PII])
    with pytest.raises(errors.WithdrawnClassError, match="firm 1 was the last version that had it, and 2 is the new"):
        opened(people, pii)
    with pytest.raises(errors.WithdrawnClassError):
        opened(people, news, pii)
    assert opened(people, news).class_names == (NEWS,)
    with pytest.raises(errors.WithdrawnClassError):
        list(sign_sources(str(pii), people.folder, people.ring("bob")))
    with pytest.raises(errors.OutOfScopeError):
        people.repository.chain().source(name_of(PII))
    publish(people, version("3"))  # it comes back, and is anybody's to sign whom the authority names
    with pytest.raises(errors.OutOfScopeError, match="lets nobody sign"):
        opened(people, pii)
    people.delegate(PII, "bob")
    assert opened(people, pii).class_names == (PII,)


def test_a_moved_class_is_signed_anew_under_its_new_name(people: People) -> None:
    old = write(people, NEWS, "ada")
    moved = version("2", licensed_news=None, press_news="Bought.")
    publish(people, moved, withdraw=[NEWS])
    with pytest.raises(errors.WithdrawnClassError, match="moved to 'press/news': write its sources again"):
        opened(people, old)
    with people.repository.change(people.ring()) as change:
        ceremony.delegate(change, moved, PRESS, [people.keys["ada"]])
    assert opened(people, write(people, PRESS, "ada")).class_names == (PRESS,)


def test_a_class_that_becomes_a_branch_was_withdrawn(people: People) -> None:
    with people.repository.change(people.ring()) as change:
        ceremony.delegate(change, TAXONOMY, "public-domain", [people.person("carol")])
    old = write(people, "public-domain", "carol")
    meanings = {NEWS: "Bought.", PII: "Of customers.", "public-domain/books": "Old ones."}
    publish(people, Taxonomy("firm", "2", tuple(meanings.items())), withdraw=["public-domain"])
    with pytest.raises(errors.WithdrawnClassError, match="'public-domain' was withdrawn"):
        opened(people, old)


def test_other_words_for_a_class_are_said(people: People) -> None:
    old = write(people, NEWS, "ada")
    after = version("2", licensed_news="Bought for a year.")
    with pytest.raises(ProvenanceError, match=r"signed the old ones.*--reword licensed/news"):
        publish(people, after)
    with pytest.raises(ProvenanceError, match="doesn't reword 'customer/pii'"):
        publish(people, after, reword=[NEWS, PII])
    publish(people, after, reword=[NEWS])
    assert opened(people, old).class_names == (NEWS,)


def test_a_version_is_published_once(people: People) -> None:
    for same in (TAXONOMY, version("1", licensed_maps="Bought too.")):
        with pytest.raises(ProvenanceError, match="published already"):
            publish(people, same)
    with pytest.raises(ProvenanceError, match="is called 'firm'"):
        publish(people, Taxonomy("bank", "2", TAXONOMY.meanings))
    with pytest.raises(ProvenanceError, match="can't stand in a signed path"):
        publish(people, version("2/3"))


def test_a_class_that_never_was_is_another_error(people: People) -> None:
    authority = Authority(people.folder, people.pin, state=people.root / "seen")
    with pytest.raises(errors.UnknownClassError, match="did you mean licensed/news"):
        authority.vouch(b"", class_path="licensed/nws", source="s", version="1")


def test_the_archive_says_what_the_classes_meant(people: People) -> None:
    vouched = opened(people, write(people, NEWS, "ada")).sources[0].vouched
    assert vouched is not None
    data = vouched_data([vouched])
    assert data is not None
    folder = people.root / "archive"
    folder.mkdir()
    for name, content in data.files.items():
        (folder / name).write_bytes(content)
    assert audit(folder, data.facts) == []
    (name,) = [name for name in data.archive if "/targets/" in name]
    assert json.loads(data.archive[name]) == TAXONOMY.to_mapping()
    facts = {**data.facts, "archive": {one: sha for one, sha in data.facts["archive"].items() if one != name}}
    assert audit(folder, facts) == [f"firm/{NEWS}/s/1: taxonomy/firm/1.json isn't in the archive"]


def test_an_auditor_is_told_of_a_class_that_was_withdrawn_by_then(people: People) -> None:
    """Its signers may sign still, in an archive that somebody has put together: the taxonomy hasn't the class."""
    vouched = opened(people, write(people, NEWS, "ada")).sources[0].vouched
    assert vouched is not None
    less = version("2", licensed_news=None)
    with people.repository.change(people.ring()) as change:
        publish_taxonomy(change, less)
    newer = Authority(people.folder, people.pin, state=people.root / "seen")
    assert newer.taxonomy == less
    data = vouched_data([dataclasses.replace(vouched, archive={**vouched.archive, **newer.archive()})])
    assert data is not None
    folder = people.root / "archive"
    folder.mkdir()
    for name, content in data.files.items():
        (folder / name).write_bytes(content)
    (problem,) = audit(folder, data.facts)
    assert "has no class 'licensed/news'" in problem


def test_a_person_publishes(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(people.root)
    people.sign(PII, "bob")
    write_taxonomy = Path("classes.yaml").write_text
    write_taxonomy(
        'name: firm\nversion: "2"\nclasses:\n  licensed: {news: Paid., maps: New.}\n  people: Of customers.\n'
    )
    command = ["keys", "publish", "authority", "classes.yaml", "--keys", "own"]
    refused = CliRunner().invoke(app, [*command, "--withdraw", "public-domain"])
    assert refused.exit_code == 1
    assert "--withdraw customer/pii" in refused.output
    assert "--withdraw public-domain" not in refused.output
    result = CliRunner().invoke(
        app, [*command, "--withdraw", "public-domain", "--withdraw", PII, "--reword", NEWS], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    for line in (
        "firm 2 is published, in place of 1.",
        f"added      {MAPS}: nobody signs it",
        f"withdrawn  {PII}: signed sources, not vouched for any more: 1; it has moved to people",
        f"reworded   {NEWS}: signed sources, which stay so: 0",
    ):
        assert line in result.output


def train(people: People, folder: Path, budget: str, under: str | None = None) -> None:
    torch.manual_seed(0)
    authority = Authority(people.folder, people.pin, state=people.root / "seen")
    data = StreamingDataset(folder, columns=("number",), authority=authority)
    run = people.root / "run"
    change = ("budget",) if run.exists() else ()
    config = RunConfig(budget=budget, run_folder=run, num_threads=1, num_microbatches=1, change=change)
    policy = load_policy("version: 1\ntaxonomy: firm\nrules:\n  - {class: '**', weight: 1}\n")

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return model(rows.float()[:, None]).square().mean()

    Trainer(
        nn.Linear(1, 1),
        loss,
        StreamingSource(data, 1),
        optimizers=SGD(lr=1e-4),
        policy=policy,
        taxonomy=next(one for one in authority.taxonomies() if under in (None, one.version)),
        config=config,
    ).fit()


def test_a_governed_run_ends_under_the_version_that_it_began_with(people: People) -> None:
    folder = write(people, NEWS, "ada")
    train(people, folder, "2ba")
    train(people, folder, "3ba")
    publish(people, version("2", licensed_maps="Bought too."))
    with pytest.raises(CheckpointError, match="taxonomy"):
        train(people, folder, "4ba")
    train(people, folder, "4ba", under="1")


trees = st.dictionaries(st.sampled_from(["a", "b", "c/d", "c/e", "f"]), st.sampled_from(["x", "y"]), min_size=1)


@settings(max_examples=60, deadline=None)
@given(trees, trees)
def test_what_a_comparison_says_makes_the_one_of_the_other(before: dict[str, str], after: dict[str, str]) -> None:
    old, new = (Taxonomy("t", "1", tuple(one.items())) for one in (before, after))
    found = compare(old, new)
    assert (set(before) - set(found.withdrawn)) | set(found.added) == set(after)
    same = {path for path in set(before) & set(after) if before[path] == after[path]}
    assert same == set(after) - set(found.added) - set(found.reworded)
    assert all(before[path] == after[to] for path, to in found.moved.items())
