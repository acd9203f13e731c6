"""What lies beside the ledger in a bundle: cosignatures, certificates, results of replays; after a change of key."""

from __future__ import annotations

import dataclasses
import json
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("model_signing", reason="the extra `audit` isn't installed")

from cosmati.audit import bundle as bundles
from cosmati.audit.bundle import sha256_of
from cosmati.audit.export import copy_ledger, export_bundle
from cosmati.audit.statements import signed_statement
from cosmati.audit.trust import TrustFile
from cosmati.audit.verify import BundleReport, verify_bundle
from cosmati.cli.main import app
from cosmati.errors import ExportError, LedgerError, RefutedError
from cosmati.forget.asked import ToForget
from cosmati.ledger.cosigned import ask_witness
from cosmati.ledger.key_change import rotate_key
from cosmati.ledger.keys import SigningKey, load_key
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.reader import read_verifier_key
from cosmati.ledger.replay_result import ReplayResult, SegmentResult
from cosmati.ledger.spot_check import choose_segments, result_of
from cosmati.ledger.standing import StandingSteps
from cosmati.ledger.witness import Witness, create_witness
from tests.forget.samples import bare, forgotten, maker, trained
from tests.train.isolated.samples import source

pytestmark = pytest.mark.long

SEED = "the auditor's"


@dataclass(frozen=True)
class Handed:
    """A successor whose key was changed and which a witness has seen, with its bundle."""

    run: Path
    bundle: Path
    first_key: str
    witness: str
    replay: Path

    @property
    def trust(self) -> TrustFile:
        return TrustFile(operator=self.first_key, witnesses=(self.witness,))


def replayed(ledger: Path, path: Path, **changes: object) -> Path:
    """Write the result of a spot check of a ledger, as if all had come out equal."""
    verified = VerifiedLedger(ledger)
    run = StandingSteps(verified)
    chosen = choose_segments(verified.head, SEED, num_steps=run.num_steps, number=2, length=2)
    segments = [
        SegmentResult(first=c.start, end=c.stop, start=0, from_entry_0=True, outcome="equal", num_differences=0)
        for c in chosen
    ]
    if "seed" in changes:  # one that chooses others
        places = {"num_steps": run.num_steps, "number": 2, "length": 2}
        every = (str(number) for number in range(99))
        changes["seed"] = next(one for one in every if choose_segments(verified.head, one, **places) != chosen)
    found = result_of(verified, run, segments, seed=SEED, witnessed=True, compares_rows=True, environment={})
    path.write_bytes(dataclasses.replace(found, **changes).to_bytes())  # type: ignore[arg-type]
    return path


@pytest.fixture(scope="module")
def handed(tmp_path_factory: pytest.TempPathFactory) -> Handed:
    folder = tmp_path_factory.mktemp("handed")
    case = bare("MLP, low rank")
    make = maker(case, source(case))
    asked = ToForget(classes=("personal",))
    run = forgotten(trained(make, folder / "run"), asked, make, folder / "out", delete=True).out
    first = read_verifier_key(run / "ledger").text
    _, key = rotate_key(run / "ledger", run / "private" / "operator.key")
    witness = create_witness(folder / "witness", "witness.example.com/w1")
    asked = Witness(folder / "witness")
    asked.trust(key)
    ask_witness(run / "ledger", witness, asked.send)
    result = replayed(run / "ledger", folder / "found.json")
    return Handed(run, export_of(run, folder / "b.zip", result), first, witness.text, result)


def export_of(run: Path, bundle: Path, *replays: Path) -> Path:
    weights = run / "checkpoints" / "step-00000006" / "model.safetensors"
    return export_bundle(run / "ledger", bundle, key=run / "private" / "operator.key", weights=weights, replays=replays)


def verified(bundle: Path, folder: Path, trust: TrustFile | None) -> BundleReport:
    shutil.rmtree(folder / "in", ignore_errors=True)
    (folder / "in").mkdir()
    return verify_bundle(bundle, folder / "in", trust)


def resigned(handed: Handed, folder: Path, change: Callable[[Path], None]) -> Path:
    """Write the bundle with other files, which the operator lists and signs anew."""
    files = folder / "files"
    with zipfile.ZipFile(handed.bundle) as archive:
        archive.extractall(files)
    change(files)
    told = json.loads((files / bundles.LIST_FILE).read_text())
    facts = {name: told[name] for name in ("made", "release", "origin", "tree_size", "root")}
    for name in (bundles.LIST_FILE, bundles.LIST_STATEMENT):
        (files / name).unlink()
    (files / bundles.LIST_FILE).write_bytes(bundles.list_of(files, facts))
    key = load_key(handed.run / "private" / "operator.key", name=told["origin"])
    subjects = {bundles.LIST_FILE: sha256_of(files / bundles.LIST_FILE)}
    (files / bundles.LIST_STATEMENT).write_bytes(signed_statement(key, "bundle", subjects, facts))
    bundles.pack(files, folder / "again.zip")
    return folder / "again.zip"


def test_who_trusts_the_first_key_trusts_those_that_it_handed_over_to(handed: Handed, tmp_path: Path) -> None:
    now = read_verifier_key(handed.run / "ledger").text
    assert now != handed.first_key
    for key in (now, handed.first_key):
        assert not verified(handed.bundle, tmp_path, TrustFile(operator=key)).unpinned
    other = SigningKey.generate(now.partition("+")[0]).verifier.text
    with pytest.raises(RefutedError, match="you trust"):
        verified(handed.bundle, tmp_path, TrustFile(operator=other))


def test_the_old_key_signs_no_bundle(handed: Handed, tmp_path: Path) -> None:
    stolen = tmp_path / "private" / "operator.key"
    stolen.parent.mkdir()
    shutil.copy2(handed.run.with_name("run") / "private" / "operator.key", stolen)
    with pytest.raises(LedgerError, match="isn't the key that signs"):
        export_bundle(handed.run / "ledger", tmp_path / "b.zip", key=stolen)


def test_the_level_is_what_witnesses_whom_the_reader_named_have_seen(handed: Handed, tmp_path: Path) -> None:
    assert verified(handed.bundle, tmp_path, handed.trust).evidence_level.startswith("L1: witnessed at ")
    for update in ({"witnesses": ()}, {"witnesses": (other_witness(tmp_path),)}):
        report = verified(handed.bundle, tmp_path, handed.trust.model_copy(update=update))
        assert report.evidence_level.startswith("L0")
    two = handed.trust.model_copy(update={"witnesses": (handed.witness, other_witness(tmp_path)), "quorum": 2})
    assert "1 of 2 witnesses have cosigned, which is too few" in verified(handed.bundle, tmp_path, two).evidence_level
    assert verified(handed.bundle, tmp_path, two.model_copy(update={"quorum": 1})).evidence_level.startswith("L1")


def other_witness(folder: Path) -> str:
    shutil.rmtree(folder / "other", ignore_errors=True)
    return create_witness(folder / "other", "witness.example.com/w2").text


def test_what_was_cosigned_must_be_the_ledger_s(handed: Handed, tmp_path: Path) -> None:
    def forge(files: Path) -> None:
        (note,) = (files / "ledger" / "cosigned").iterdir()
        note.write_bytes(note.read_bytes().replace(b"cosmati/", b"cosmati-", 1))

    with pytest.raises(RefutedError):
        verified(resigned(handed, tmp_path, forge), tmp_path, handed.trust)


def test_what_was_cosigned_after_the_copied_checkpoint_stays_behind(handed: Handed, tmp_path: Path) -> None:
    """A run that goes on is witnessed between two reads."""
    live = tmp_path / "live"
    shutil.copytree(handed.run / "ledger", live)
    (note,) = (live / "cosigned").iterdir()
    size = int(note.name)
    later = note.read_text().split("\n")
    later[1] = str(size + 5)
    (live / "cosigned" / later[1]).write_text("\n".join(later))
    copy = copy_ledger(live, tmp_path / "copy")
    assert [one.name for one in (copy / "cosigned").iterdir()] == [str(size)]


def test_certificates_are_in_it_and_are_checked(handed: Handed, tmp_path: Path) -> None:
    report = verified(handed.bundle, tmp_path, handed.trust)
    said = dict(report.lines)["deleted"]
    assert said.startswith("class personal: replay, exact with respect to content")
    (deletion,) = report.figures["deletions"]
    assert (deletion["classes"], deletion["method"], deletion["from_step"]) == (["personal"], "replay", 0)
    signed = [sha256_of(handed.run / "certificates" / f"000{number}.json") for number in (1, 2)]
    assert deletion["certificates"] == signed, "of the deletion, and of that of the run's checkpoints"
    page = (tmp_path / "in" / "documents" / "training-content-summary.html").read_text()
    assert "Deleted from the trained model" in page
    assert "<td>personal</td>" in page


@pytest.mark.parametrize("number", [1, 2])
def test_a_certificate_that_is_left_out_is_missed(handed: Handed, tmp_path: Path, number: int) -> None:
    name = f"000{number}.json"
    bundle = resigned(handed, tmp_path, lambda files: (files / "certificates" / name).unlink())
    digest = sha256_of(handed.run / "certificates" / name)
    said = dict(verified(bundle, tmp_path, handed.trust).lines)["deleted"]
    assert said == f"the ledger has signed the certificate {digest[:16]}, and it isn't in this bundle"


def test_a_certificate_that_the_ledger_has_not_signed_is_refused(handed: Handed, tmp_path: Path) -> None:
    def prettier(files: Path) -> None:
        path = files / "certificates" / "0001.json"
        path.write_text(path.read_text().replace("class personal", "class open"))

    with pytest.raises(RefutedError, match="has signed no certificate"):
        verified(resigned(handed, tmp_path, prettier), tmp_path, handed.trust)


def test_a_replay_raises_the_level_for_who_believes_it_alone(handed: Handed, tmp_path: Path) -> None:
    report = verified(handed.bundle, tmp_path, handed.trust)
    assert "by the bundle's own word" in dict(report.lines)["replayed"]
    assert report.evidence_level.startswith("L1")
    believing = handed.trust.model_copy(update={"replays": (sha256_of(handed.replay),)})
    assert verified(handed.bundle, tmp_path, believing).evidence_level.startswith("L2: steps chosen after")
    # One that was begun and broken off takes nothing from it.
    found = ReplayResult.from_bytes(handed.replay.read_bytes())
    cut = tuple(dataclasses.replace(one, outcome="interrupted") for one in found.segments)
    broken_off = replayed(handed.run / "ledger", tmp_path / "broken-off.json", segments=cut)
    bundle = export_of(handed.run, tmp_path / "b.zip", handed.replay, broken_off)
    both = handed.trust.model_copy(update={"replays": (*believing.replays, sha256_of(broken_off))})
    assert verified(bundle, tmp_path, both).evidence_level.startswith("L2: steps chosen after")
    assert verified(bundle, tmp_path, both.model_copy(update={"replays": both.replays[1:]})).evidence_level[:2] == "L1"


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({"seed": "another"}, "aren't those that the tree head and its seed choose"),
        ({"num_steps": 4}, "says that 4 steps stood, and the ledger that 6"),
        ({"has_ended": False}, "steps stood"),
        ({"root": "00" * 32}, "aren't those of the earlier checkpoint"),
        ({"size": 10**6}, "cut back"),
        ({"vkey": SigningKey.generate("cosmati/run").verifier.text}, "and not of this one"),
    ],
)
def test_a_replay_of_something_else_is_refused(
    handed: Handed, tmp_path: Path, changes: dict[str, object], because: str
) -> None:
    other = replayed(handed.run / "ledger", tmp_path / "other.json", **changes)
    assert isinstance(ReplayResult.from_bytes(other.read_bytes()), ReplayResult), "the control: it's well formed"
    with pytest.raises(ExportError, match=because):
        export_of(handed.run, tmp_path / "b.zip", other)

    def exchange(files: Path) -> None:
        shutil.copyfile(other, files / "replays" / "0001.json")

    bundle = resigned(handed, tmp_path, exchange)
    with pytest.raises(RefutedError, match=because):
        verified(bundle, tmp_path, handed.trust)


def test_the_commands_take_it_along(handed: Handed, tmp_path: Path) -> None:
    runner = CliRunner()
    export = ["audit", "export", str(handed.run), "--out", str(tmp_path / "b.zip"), "--replay", str(handed.replay)]
    assert runner.invoke(app, export).exit_code == 0
    (tmp_path / "trust.json").write_text(handed.trust.model_dump_json())
    answer = runner.invoke(app, ["audit", "verify", str(tmp_path / "b.zip"), "--trust", str(tmp_path / "trust.json")])
    assert answer.exit_code == 0, answer.output
    assert "evidence   L1" in answer.output
    twice = handed.trust.model_copy(update={"witnesses": (handed.witness, handed.witness)})
    (tmp_path / "trust.json").write_text(twice.model_dump_json())
    answer = runner.invoke(app, ["audit", "verify", str(tmp_path / "b.zip"), "--trust", str(tmp_path / "trust.json")])
    assert answer.exit_code == 2
