"""Preparation artifacts that an authority vouches for: signed as data are, archived, audited when nobody is there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati import RunConfig, StreamingDataset, StreamingLoader, artifact
from cosmati.cli.main import app
from cosmati.data.plain_files import TamperedFileError, describe_files
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.shards.manifest import SourceFacts, SourceManifest
from cosmati.data.signing import sign_sources
from cosmati.data.vouching import LicenceExpiredError
from cosmati.errors import ProvenanceError
from cosmati.ledger.query import VerifiedLedger
from cosmati.provenance.authority.errors import OutOfScopeError, TamperedManifestError
from cosmati.provenance.authority.trusted import Authority
from tests.provenance.authority.people import NEWS, PII, People
from tests.train.test_artifacts import trainer

pytestmark = pytest.mark.long


@pytest.fixture
def people(tmp_path: Path) -> People:
    made = People(tmp_path).begin()
    made.delegate(NEWS, "ada")
    return made


def described(people: People, *, path: str = NEWS, until: str = "") -> Path:
    folder = people.root / "tokenizer"
    folder.mkdir()
    (folder / "vocab.txt").write_text("a b c")
    (folder / "merges.txt").write_text("a b")
    facts = SourceFacts(origin="https://example.org/bpe", licence_valid_until=until)
    describe_files(folder, class_path=path, source="bpe", version="1", facts=facts)
    return folder


@pytest.fixture
def signed(people: People) -> Path:
    folder = described(people)
    assert [state for _, state in sign_sources(str(folder), people.folder, people.ring("ada"))] == ["signed"]
    return folder


def authority(people: People) -> Authority:
    return Authority(people.folder, people.pin, state=people.root / "seen")


def test_a_signed_tokenizer_is_archived_and_audited(people: People, signed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    tokenizer = artifact("tokenizer", signed, origin="example.org", authority=authority(people))
    made = trainer(run, artifacts=[tokenizer])
    assert f"tokenizer: signed, as firm/{NEWS}/bpe/1 of the authority {people.pin[:12]}" in str(made.plan)
    made.fit()
    (told,) = VerifiedLedger(run / "ledger").details["artifacts"]
    assert (told["state"], told["origin"]) == ("signed", "example.org")
    shutil.rmtree(people.folder)  # Nobody is asked again.
    verified = CliRunner().invoke(app, ["ledger", "verify", str(run)])
    assert verified.exit_code == 0, verified.output
    assert f"tokenizer: signed, as firm/{NEWS}/bpe/1" in verified.output
    for file in (run / "ledger" / "provenance").iterdir():
        kept = file.read_bytes()
        file.write_bytes(kept[:-1] + b" ")
        refuted = CliRunner().invoke(app, ["ledger", "verify", str(run)])
        assert refuted.exit_code == 1, file
        assert "Who signed the tokenizer" in refuted.output + str(refuted.exception)
        file.write_bytes(kept)


def test_two_commands_sign_a_tokenizer(people: People, tmp_path: Path) -> None:
    folder = tmp_path / "bpe"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")

    def ask(*words: object) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["data", *map(str, words)])
        return result.exit_code, result.output

    code, said = ask("describe", folder, "--class", NEWS, "--licence", "MIT", "--licence-until", "2031-12-31")
    assert (code, "1 file(s)" in said) == (0, True), said
    keys = ["--keys", people.root / "ada", "--keys", people.root / "own"]
    code, said = ask("sign", folder, "--authority", people.folder, *keys)
    assert (code, "bpe 1: signed" in said) == (0, True), said
    signed = artifact("tokenizer", folder, authority=authority(people))
    assert signed.state == "signed"
    manifest = SourceManifest.from_bytes((folder / "manifest.json").read_bytes(), name="manifest.json")
    assert (manifest.facts.licence, manifest.facts.licence_valid_until) == ("MIT", "2031-12-31")
    (folder / "index.json").write_text("{}")
    for words, why in (
        ((folder, "--class", NEWS), "it's a data set"),
        ((tmp_path / "none", "--class", NEWS), "holds no file"),
        ((tmp_path / "bpe", "--class", NEWS, "--licence-until", "2031-13-01"), "is no day"),
    ):
        code, said = ask("describe", *words)
        assert (code, why in said) == (1, True), said
        (folder / "index.json").unlink(missing_ok=True)


def test_to_sign_it_later_changes_nothing_but_the_word(people: People, tmp_path: Path) -> None:
    """A run that began with the same files unsigned goes on, and says from then on that they're signed."""
    folder, run = described(people), tmp_path / "run"
    trainer(run, artifacts=[artifact("tokenizer", folder)]).fit()
    list(sign_sources(str(folder), people.folder, people.ring("ada")))
    now = artifact("tokenizer", folder, authority=authority(people))
    trainer(run, artifacts=[now], budget="3ba", change="budget").fit()
    verified = CliRunner().invoke(app, ["ledger", "verify", str(run)]).output
    assert "prepared  tokenizer: ungoverned" in verified
    assert "prepared  from step 2 on, tokenizer: signed" in verified


def _changed(folder: Path) -> None:
    (folder / "vocab.txt").write_text("a b d")


def _removed(folder: Path) -> None:
    (folder / "vocab.txt").unlink()


def _added(folder: Path) -> None:
    (folder / "special.txt").write_text("<evil>")


def _described_anew(folder: Path) -> None:
    _changed(folder)
    (folder / "manifest.json").unlink()
    describe_files(folder, class_path=NEWS, source="bpe", version="1")


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        (_changed, TamperedFileError, "vocab.txt isn't what was signed"),
        (_removed, TamperedFileError, "vocab.txt is missing"),
        (_added, TamperedFileError, "special.txt wasn't signed"),
        (_described_anew, TamperedManifestError, "was signed"),
    ],
)
def test_files_that_werent_signed_are_refused(
    people: People, signed: Path, change: Callable[[Path], None], error: type[Exception], why: str
) -> None:
    change(signed)
    with pytest.raises(error, match=why):
        artifact("tokenizer", signed, authority=authority(people))


def test_nobody_vouches_for_what_nobody_has_signed(people: People) -> None:
    with pytest.raises(OutOfScopeError):
        artifact("tokenizer", described(people), authority=authority(people))


def test_a_class_that_nobody_may_sign_is_refused(people: People) -> None:
    with pytest.raises(ProvenanceError):
        artifact("tokenizer", described(people, path=PII), authority=authority(people))


def test_a_licence_that_has_ended_is_refused(people: People) -> None:
    folder = described(people, until="2020-01-01")
    list(sign_sources(str(folder), people.folder, people.ring("ada")))
    with pytest.raises(LicenceExpiredError, match="valid until 2020"):
        artifact("tokenizer", folder, authority=authority(people))


def test_signed_evaluation_data_bring_their_authority_with_them(people: People, tmp_path: Path) -> None:
    folder = tmp_path / "held-out"
    write_dataset([{"x": n} for n in range(8)], folder, {"x": "int"}, class_of=NEWS, source="s")
    list(sign_sources(str(folder), people.folder, people.ring("ada")))
    rows: Any = StreamingDataset(folder, columns=("x",), authority=authority(people))
    for content in (rows, StreamingLoader(rows, 4)):
        made = artifact("evaluation data", content)
        assert (made.state, made.digest) == ("signed", rows.digest)
    assert RunConfig(artifacts=(made,)).artifacts == (made,)
