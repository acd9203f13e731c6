"""A bundle is checked with nothing but itself and what its reader got elsewhere; whatever is changed in it is found."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import threading
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")
pytest.importorskip("model_signing", reason="the extra `audit` isn't installed")

from cosmati.audit import bundle as bundles
from cosmati.audit import export as exports
from cosmati.audit.about import About, read_about
from cosmati.audit.export import copy_ledger, export_bundle
from cosmati.audit.signed_weights import KEY_FILE, sign_weights
from cosmati.audit.statements import read_statement, signed_statement
from cosmati.audit.trust import TrustFile, read_trust
from cosmati.audit.verify import BundleReport, verify_bundle
from cosmati.cli.main import app
from cosmati.errors import CosmatiError, ExportError, LedgerError, RefutedError, TamperError
from cosmati.ledger.details import encode_details
from cosmati.ledger.entry import decode_entry
from cosmati.ledger.keys import SigningKey, load_key
from cosmati.ledger.note import TreeHead, checkpoint_text
from cosmati.ledger.reader import read_head
from cosmati.ledger.row_keys import RowKeys
from cosmati.ledger.tiles import decode_bundle
from cosmati.ledger.verify import verify_ledger
from cosmati.records.ledger import StepEntry
from tests.audit.signed_runs import ORIGIN, make_run
from tests.ledger.ledgers import append_steps, write_run
from tests.processes import PythonProcess
from tests.train.in_parts import put_into_parts

Change = Callable[[Path], None]


@dataclass(frozen=True)
class Signed:
    run: Path
    bundle: Path
    trust: TrustFile

    @property
    def key(self) -> SigningKey:
        return load_key(self.run / "private" / "operator.key", name=self.trust.operator.partition("+")[0])


def export_of(run: Path, bundle: Path, about: About | None = None) -> Path:
    weights = run / "checkpoints" / "step-00000006" / "model.safetensors"
    return export_bundle(run / "ledger", bundle, key=run / "private" / "operator.key", weights=weights, about=about)


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Signed:
    folder = tmp_path_factory.mktemp("signed")
    run = make_run(folder)
    facts = json.loads((run / "ledger" / "details.jsonl").read_text().splitlines()[0])
    trust = TrustFile(
        operator=(run / "ledger" / "operator.vkey").read_text().strip(),
        data_roots=(facts["provenance"]["sources"][0]["root"],),
        policy_roots=(facts["policy_provenance"]["sources"][0]["root"],),
    )
    return Signed(run, export_of(run, folder / "run.audit.zip"), trust)


def changed(signed: Signed, path: Path, change: Change, *, relist: bool = False) -> Path:
    """Write a bundle with its files changed; as the operator would, with a new list and signature, if asked."""
    folder = path.with_suffix(".files")
    with zipfile.ZipFile(signed.bundle) as archive:
        archive.extractall(folder)
    change(folder)
    if relist:
        told = json.loads((folder / bundles.LIST_FILE).read_text())
        facts = {name: told[name] for name in ("made", "release", "origin", "tree_size", "root")}
        for name in (bundles.LIST_FILE, bundles.LIST_STATEMENT):
            (folder / name).unlink()
        (folder / bundles.LIST_FILE).write_bytes(bundles.list_of(folder, facts))
        subjects = {bundles.LIST_FILE: bundles.sha256_of(folder / bundles.LIST_FILE)}
        (folder / bundles.LIST_STATEMENT).write_bytes(signed_statement(signed.key, "bundle", subjects, facts))
    bundles.pack(folder, path)
    return path


def verified(bundle: Path, tmp_path: Path, trust: TrustFile | None) -> BundleReport:
    folder = tmp_path / "unpacked"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return verify_bundle(bundle, folder, trust)


def test_weights_in_parts_are_packed_whole(signed: Signed, tmp_path: Path) -> None:
    """As several ranks write them; who reads the bundle has one file."""
    run = tmp_path / "run"
    shutil.copytree(signed.run, run)
    newest = put_into_parts(run / "checkpoints" / "step-00000006")
    key = run / "private" / "operator.key"
    made = export_bundle(run / "ledger", tmp_path / "parts.audit.zip", key=key, weights=newest)
    assert "after 6 steps" in dict(verified(made, tmp_path, signed.trust).lines)["weights"]
    assert (tmp_path / "unpacked" / "weights" / "model.safetensors").is_file()


def test_it_holds_under_what_its_reader_got_elsewhere(signed: Signed, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    report = verify_bundle(signed.bundle, tmp_path / "in", signed.trust)
    assert report.unpinned == ()
    said = dict(report.lines)
    assert "6 steps" in said["ledger"]
    assert "after 6 steps" in said["weights"]
    assert said["excluded"] == "no logged step gave rows of open/psf weight in low"


def test_without_that_it_is_consistent_in_itself_and_nothing_more(signed: Signed, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    report = verify_bundle(signed.bundle, tmp_path / "in")
    assert [words.split(":")[0] for words in report.unpinned] == ["operator", "data", "policy"]


@pytest.mark.parametrize("left_out", ["data_roots", "policy_roots"])
def test_each_root_that_its_reader_does_not_name_is_said(signed: Signed, tmp_path: Path, left_out: str) -> None:
    (tmp_path / "in").mkdir()
    report = verify_bundle(signed.bundle, tmp_path / "in", signed.trust.model_copy(update={left_out: ()}))
    assert len(report.unpinned) == 1
    assert report.unpinned[0].startswith(left_out.partition("_")[0])


@pytest.mark.parametrize(
    ("update", "because"),
    [
        ({"operator": SigningKey.generate("cosmati/run").verifier.text}, "and you trust"),
        ({"data_roots": ("ab" * 32,)}, "data is signed by the authority"),
        ({"policy_roots": ("ab" * 32,)}, "policy is signed by the authority"),
    ],
)
def test_another_signer_than_its_reader_trusts_is_refused(
    signed: Signed, tmp_path: Path, update: dict[str, object], because: str
) -> None:
    with pytest.raises(RefutedError, match=because):
        verified(signed.bundle, tmp_path, signed.trust.model_copy(update=update))


def test_a_checkpoint_that_its_reader_kept_has_to_be_a_beginning(signed: Signed, tmp_path: Path) -> None:
    head, name = read_head(signed.run / "ledger", signed.key.verifier), signed.key.name
    kept = signed.trust.model_copy(update={"pinned": (signed.run / "ledger" / "checkpoint").read_text()})
    assert f"the checkpoint of {head.size} entries that you kept" in str(verified(signed.bundle, tmp_path, kept))
    for other, because in ((TreeHead(5, bytes(32)), "rewritten"), (TreeHead(head.size + 1, head.root), "cut back")):
        note = signed.key.sign_note(checkpoint_text(name, other))
        with pytest.raises(RefutedError, match=because):
            verified(signed.bundle, tmp_path, signed.trust.model_copy(update={"pinned": note}))
    with pytest.raises(LedgerError, match="pinned checkpoint"):
        verified(signed.bundle, tmp_path, signed.trust.model_copy(update={"pinned": "what I kept"}))


def test_what_nobody_signed_does_not_pass_for_who_trusts_somebody(signed: Signed, tmp_path: Path) -> None:
    run = make_run(tmp_path / "declared", is_signed=False)
    bundle = export_of(run, tmp_path / "declared.zip")
    operator = (run / "ledger" / "operator.vkey").read_text().strip()
    report = verified(bundle, tmp_path, TrustFile(operator=operator))
    assert "declared: nobody vouches" in str(report)
    for name, because in (("data_roots", "vouches"), ("policy_roots", "signed")):
        with pytest.raises(RefutedError, match=because):
            verified(bundle, tmp_path, TrustFile.model_validate({"operator": operator, name: signed.trust.data_roots}))


def test_every_changed_file_is_found(signed: Signed, tmp_path: Path) -> None:
    draw = random.Random(0)
    with zipfile.ZipFile(signed.bundle) as archive:
        names = archive.namelist()
    for number, name in enumerate(names):

        def change(folder: Path, name: str = name) -> None:
            data = bytearray((folder / name).read_bytes())
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            (folder / name).write_bytes(data)

        with pytest.raises(CosmatiError):
            verified(changed(signed, tmp_path / f"{number}.zip", change), tmp_path, signed.trust)


def test_every_file_left_out_or_slipped_in_is_found(signed: Signed, tmp_path: Path) -> None:
    with zipfile.ZipFile(signed.bundle) as archive:
        names = archive.namelist()
    for number, name in enumerate(names):
        bundle = changed(signed, tmp_path / f"{number}.zip", lambda folder, name=name: (folder / name).unlink())  # type: ignore[misc]
        with pytest.raises(LedgerError):
            verified(bundle, tmp_path, signed.trust)
    more = changed(signed, tmp_path / "more.zip", lambda folder: (folder / "more.txt").write_text("?") and None)
    with pytest.raises(RefutedError, match=r"more\.txt, which its list doesn't name"):
        verified(more, tmp_path, signed.trust)


def _other_weights(folder: Path) -> None:
    path = folder / "weights" / "model.safetensors"
    weights = load_file(path)
    weights["0.weight"] += 1
    save_file(weights, path)


def _figures(folder: Path) -> None:
    told = json.loads((folder / "figures.json").read_text())
    told["classes"]["open/psf"]["rows"] += 1
    (folder / "figures.json").write_bytes(encode_details(told))


def _summary(folder: Path) -> None:
    path = folder / "documents" / "training-content-summary.html"
    path.write_text(path.read_text("utf-8").replace("open/psf", "open/permissive"), "utf-8")


def _no_croissant(folder: Path) -> None:
    next((folder / "documents" / "croissant").iterdir()).unlink()


def _second_weights(folder: Path) -> None:
    shutil.copy(folder / "weights" / "model.safetensors", folder / "weights" / "other.safetensors")


@pytest.mark.parametrize(
    ("change", "because"),
    [
        (_other_weights, "weights doesn't hold"),
        (_second_weights, "weights doesn't hold"),
        (_figures, "figures aren't those that its ledger gives"),
        (_summary, "isn't what its figures give"),
        (_no_croissant, "isn't what its figures give"),
    ],
)
def test_what_an_operator_signs_anew_is_still_compared_with_the_ledger(
    signed: Signed, tmp_path: Path, change: Change, because: str
) -> None:
    with pytest.raises(RefutedError, match=because):
        verified(changed(signed, tmp_path / "b.zip", change, relist=True), tmp_path, signed.trust)


def test_weights_that_the_ledger_does_not_sign_are_refused_though_the_operator_signs_them(
    signed: Signed, tmp_path: Path
) -> None:
    def change(folder: Path) -> None:
        _other_weights(folder)
        (folder / exports.WEIGHTS_SIGNATURE).unlink()
        sign_weights(folder / "weights", folder / exports.WEIGHTS_SIGNATURE, signed.run / "private" / KEY_FILE)

    with pytest.raises(RefutedError, match="No entry signs the weights"):
        verified(changed(signed, tmp_path / "b.zip", change, relist=True), tmp_path, signed.trust)


@pytest.mark.parametrize("name", [exports.TRAINING, exports.EXCLUSIONS])
def test_a_claim_that_the_ledger_does_not_give_is_refused(signed: Signed, tmp_path: Path, name: str) -> None:
    kind = Path(name).name.partition(".")[0]

    def change(folder: Path) -> None:
        subjects, claim = read_statement((folder / name).read_bytes(), signed.key.verifier, kind)
        claim["more"] = "and better"
        (folder / name).write_bytes(signed_statement(signed.key, kind, subjects, claim))

    with pytest.raises(RefutedError, match=f"'{kind}' says something else"):
        verified(changed(signed, tmp_path / "b.zip", change, relist=True), tmp_path, signed.trust)


@pytest.mark.parametrize("name", [exports.TRAINING, exports.FIGURES, exports.WEIGHTS_KEY, exports.ABOUT])
def test_a_file_that_is_left_out_before_the_list_is_signed_is_missed(signed: Signed, tmp_path: Path, name: str) -> None:
    bundle = changed(signed, tmp_path / "b.zip", lambda folder: (folder / name).unlink(), relist=True)
    with pytest.raises(CosmatiError, match=name.rpartition("/")[2].partition(".")[0]):
        verified(bundle, tmp_path, signed.trust)


@pytest.mark.parametrize(
    "name", ["more.txt", "ledger/tile/0/000.p/7.more", "ledger/provenance/" + "0" * 64, "statements/other.dsse.json"]
)
def test_a_file_that_no_check_reads_is_named(signed: Signed, tmp_path: Path, name: str) -> None:
    assert not [words for label, words in verified(signed.bundle, tmp_path, signed.trust).lines if label == "but"]
    bundle = changed(signed, tmp_path / "b.zip", lambda folder: (folder / name).write_text("?") and None, relist=True)
    told = verified(bundle, tmp_path, signed.trust)
    assert ("but", f"no check reads {name}: believe nothing there") in told.lines


def test_a_readme_that_says_something_else_is_found(signed: Signed, tmp_path: Path) -> None:
    bundle = changed(
        signed, tmp_path / "b.zip", lambda folder: (folder / "README.txt").write_text("Fine!") and None, relist=True
    )
    with pytest.raises(RefutedError, match=r"README\.txt of the bundle isn't what"):
        verified(bundle, tmp_path, signed.trust)


def test_a_statement_of_one_kind_does_not_pass_for_another(signed: Signed) -> None:
    data = signed_statement(signed.key, "training", {"a": "0" * 64}, {})
    with pytest.raises(TamperError, match="says something else"):
        read_statement(data, signed.key.verifier, "exclusions")


def zipped(path: Path, entries: list[tuple[zipfile.ZipInfo | str, bytes]]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return path


def _link(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = 0o120777 << 16
    return info


@pytest.mark.parametrize("name", ["../out", "/out", "a/../../out", "a\\..\\..\\out", "C:out", "a//b", ".hidden", "a/"])
def test_names_that_lead_elsewhere_are_refused_before_a_byte_is_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    bundle = zipped(tmp_path / "b.zip", [("bundle.json", b"{}"), (name, b"x")])
    with pytest.raises(TamperError, match="no plain file below it"):
        bundles.unpack(bundle, tmp_path / "in")
    assert not list((tmp_path / "in").iterdir())
    assert {one.name for one in tmp_path.iterdir()} == {"in", "b.zip"}


def test_links_and_second_files_of_a_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for entries, because in (
        ([(_link("weights"), b"/etc")], "no plain file"),
        ([("a", b"1"), ("A", b"2")], "two files of one name"),
    ):
        with pytest.raises(TamperError, match=because):
            bundles.unpack(zipped(tmp_path / "b.zip", [("bundle.json", b"{}"), *entries]), tmp_path / "in")
        assert not list((tmp_path / "in").iterdir())


def test_a_bomb_stops_at_the_size_that_its_list_says(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    told = {"format": bundles.FORMAT, "version": 1, "files": {"a": {"size": 10, "sha256": "0" * 64}}}
    with zipfile.ZipFile(tmp_path / "b.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(bundles.LIST_FILE, json.dumps(told))
        archive.writestr(bundles.LIST_STATEMENT, "{}")
        archive.writestr("a", bytes(50 << 20))
    with pytest.raises(TamperError, match="isn't the file that its list names"):
        bundles.unpack(tmp_path / "b.zip", tmp_path / "in")
    assert (tmp_path / "in" / "a").stat().st_size <= 1 << 20


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"not a zip", b"{}"])
def test_what_is_no_archive_is_refused_in_words(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "b.zip").write_bytes(data)
    with pytest.raises(LedgerError, match="ZIP archive"):
        bundles.unpack(tmp_path / "b.zip", tmp_path / "in")


@pytest.mark.parametrize(
    "told",
    [b"[]", b"{", b'{"format": "cosmati-audit-bundle", "version": 1, "files": {"../a": {"size": 1, "sha256": ""}}}'],
)
def test_a_list_of_another_form_is_refused(tmp_path: Path, told: bytes) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(TamperError, match="list"):
        bundles.unpack(zipped(tmp_path / "b.zip", [("bundle.json", told)]), tmp_path / "in")


def test_figures_are_those_of_a_plain_count(signed: Signed) -> None:
    rows, cells = Counter[str](), Counter[str]()
    names = json.loads((signed.run / "ledger" / "details.jsonl").read_text().splitlines()[0])["classes"]
    newest = max((signed.run / "ledger" / "tile" / "entries" / "000.p").iterdir(), key=lambda path: int(path.name))
    for data in decode_bundle(newest.read_bytes()):
        entry = decode_entry(data)
        if isinstance(entry, StepEntry):
            for cell in entry.microbatches:
                rows[names[cell.class_id]] += cell.num_rows
                cells[names[cell.class_id]] += cell.num_rows > 0
    with zipfile.ZipFile(signed.bundle) as archive:
        found = json.loads(archive.read("figures.json"))
    assert {name: one["rows"] for name, one in found["classes"].items() if one["rows"]} == dict(rows)
    assert {name: one["microbatches"] for name, one in found["classes"].items() if one["rows"]} == dict(cells)
    assert sum(one["num_rows"] for one in found["sources"] if one["class"].startswith("open/")) == 32


def test_nothing_secret_leaves(signed: Signed) -> None:
    secrets = [path.read_bytes().strip() for path in (signed.run / "private").iterdir()]
    assert len(secrets) == 4
    secrets += [key for _, key in RowKeys.load(signed.run / "private" / "rows.keys").nodes()]
    with zipfile.ZipFile(signed.bundle) as archive:
        for name in archive.namelist():
            assert not any(secret in archive.read(name) for secret in secrets), name


def test_what_others_wrote_is_never_markup(signed: Signed) -> None:
    with zipfile.ZipFile(signed.bundle) as archive:
        page = archive.read("documents/training-content-summary.html").decode()
    assert "a place called &lt;b&gt;Here &amp; there&lt;/b&gt;" in page
    assert ORIGIN not in page


def test_the_providers_words_stand_in_the_summary_and_what_lacks_is_said(signed: Signed, tmp_path: Path) -> None:
    about = tmp_path / "about.yaml"
    about.write_text("provider: Example <Ltd>\nmodalities: [text]\nsources: {rows: user}\nuser: What users wrote.\n")
    bundle = export_of(signed.run, tmp_path / "b.zip", read_about(about))
    verified(bundle, tmp_path, signed.trust)
    with zipfile.ZipFile(bundle) as archive:
        page = archive.read("documents/training-content-summary.html").decode()
    assert "Example &lt;Ltd&gt;" in page
    user = page[page.index("2.4 User data") : page.index("2.5 Synthetic")]
    assert "What users wrote." in user
    assert "open/psf" in user
    licensed = page[page.index("2.2.1") : page.index("2.2.2")]
    assert "The ledger names none" in licensed
    assert page.count("Not stated by the provider.") >= 8


@pytest.mark.parametrize(
    "text", ["provider: 3", "who: me", "placed_on_market: soon", "sources: {a: stolen}", "a: [", "[]x"]
)
def test_a_wrong_file_of_the_providers_is_told_what_is_wrong(tmp_path: Path, text: str) -> None:
    (tmp_path / "about.yaml").write_text(text)
    with pytest.raises(ExportError, match="cosmati audit about"):
        read_about(tmp_path / "about.yaml")


@pytest.mark.parametrize(
    "text", ["", "operator: me", "operator: a+b+c", "data_roots: [x]", "[1]", "operator: x\noperator: y"]
)
def test_a_wrong_file_of_trust_is_told_what_is_wrong(tmp_path: Path, text: str) -> None:
    (tmp_path / "trust.yaml").write_text(text)
    with pytest.raises(LedgerError, match="cosmati audit trust"):
        read_trust(tmp_path / "trust.yaml")


def test_a_ledger_is_copied_whole_while_its_run_goes_on(tmp_path: Path) -> None:
    """The writer is let on by each copy: it has something to write during each, however fast or slow it is."""
    writer = write_run(tmp_path / "ledger", SigningKey.generate("example.com/run-1"), 3, every=1)
    may_write, has_written = threading.Semaphore(0), threading.Event()
    sizes = [verify_ledger(copy_ledger(tmp_path / "ledger", tmp_path / "before")).size]

    def go_on() -> None:
        for step in range(3, 403):
            may_write.acquire()
            append_steps(writer, range(step, step + 1))
            has_written.set()

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        for n in range(8):
            may_write.release(50)
            sizes.append(verify_ledger(copy_ledger(tmp_path / "ledger", tmp_path / f"copy-{n}")).size)
            assert has_written.wait(60)
    finally:
        may_write.release(400)
        thread.join()
        writer.close()
    sizes.append(verify_ledger(copy_ledger(tmp_path / "ledger", tmp_path / "after")).size)
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-2] <= sizes[-1] == 1 + 403 + 100


def test_a_tile_whose_parts_go_while_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer has signed the whole tile by then, and writes no other checkpoint before its parts are gone."""
    writer = write_run(tmp_path / "ledger", SigningKey.generate("example.com/run-1"), 3)
    writer.checkpoint()
    parts = tmp_path / "ledger" / "tile" / "0" / "000.p"
    kept = shutil.copytree(parts, tmp_path / "parts")
    append_steps(writer, range(3, 300))
    writer.close()
    assert not parts.exists()
    shutil.copytree(kept, parts)
    scandir = os.scandir

    def listed(path: Any) -> Any:
        found = scandir(path)
        if not isinstance(path, int) and Path(path) == parts and parts.exists():
            names = list(found)
            shutil.rmtree(parts)
            return contextlib.nullcontext(iter(names))
        return found

    monkeypatch.setattr(os, "scandir", listed)
    copy = copy_ledger(tmp_path / "ledger", tmp_path / "copy")
    assert verify_ledger(copy).size == verify_ledger(tmp_path / "ledger").size > 256


def test_an_export_of_a_broken_ledger_leaves_nothing(signed: Signed, tmp_path: Path) -> None:
    shutil.copytree(signed.run, tmp_path / "run")
    details = tmp_path / "run" / "ledger" / "details.jsonl"
    details.write_bytes(details.read_bytes().replace(b"open/psf", b"open/bsd"))
    with pytest.raises(TamperError):
        export_of(tmp_path / "run", tmp_path / "b.zip")
    assert {one.name for one in tmp_path.iterdir()} == {"run"}


@pytest.mark.slow
def test_what_a_killed_export_has_left_goes_with_the_next_one(signed: Signed, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from cosmati.audit import export\n"
        "export.pack = lambda *_: (print('packing', flush=True), signal.pause())\n"
        "export.export_bundle(Path(sys.argv[1]) / 'ledger', Path(sys.argv[2]), "
        "key=Path(sys.argv[1]) / 'private' / 'operator.key')\n"
    )
    bundle, theirs = tmp_path / "b.zip", tmp_path / ".b.zip.notes.draft"
    theirs.mkdir()
    others = [PythonProcess(["-c", code, signed.run, bundle]) for _ in range(2)]
    try:
        for one in others:
            assert one.stdout.readline() == "packing\n"
        assert len(hidden := set(tmp_path.iterdir()) - {theirs}) == 2
        others[0].kill()
        others[0].wait()
        export_of(signed.run, bundle)
        left = set(tmp_path.iterdir()) - {bundle, theirs}
        assert len(left) == 1, "of the one that still runs"
        assert left < hidden
    finally:
        for one in others:
            one.kill()
            one.communicate()
    export_of(signed.run, bundle)
    assert set(tmp_path.iterdir()) == {bundle, theirs}
    assert verified(bundle, tmp_path, signed.trust)


def test_weights_of_another_run_are_not_exported(signed: Signed, tmp_path: Path) -> None:
    save_file({"0.weight": torch.zeros(4, 1)}, tmp_path / "other.safetensors")
    with pytest.raises(RefutedError, match="No entry signs"):
        export_bundle(
            signed.run / "ledger",
            tmp_path / "b.zip",
            key=signed.run / "private" / "operator.key",
            weights=tmp_path / "other.safetensors",
        )


def test_the_commands_answer_by_their_exit_code(
    signed: Signed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    done = runner.invoke(app, ["audit", "export", str(signed.run), "--out", "b.zip"])
    assert done.exit_code == 0, done.output
    assert "lacks what only its provider knows: provider" in done.output
    alone = runner.invoke(app, ["audit", "verify", "b.zip"])
    assert alone.exit_code == 3
    assert "Consistent in itself" in alone.output
    assert "L0" in alone.output
    Path("trust.yaml").write_text(json.dumps(signed.trust.model_dump(mode="json")))
    whole = runner.invoke(app, ["audit", "verify", "b.zip", "--trust", "trust.yaml", "--out", "files"])
    assert whole.exit_code == 0, whole.output
    assert whole.output.startswith("Verified: b.zip")
    assert Path("files/figures.json").is_file()
    Path("b.zip").write_bytes(Path("b.zip").read_bytes()[:-100])
    assert runner.invoke(app, ["audit", "verify", "b.zip", "--trust", "trust.yaml"]).exit_code == 1
    assert runner.invoke(app, ["audit", "verify", "none.zip"]).exit_code == 2


def test_the_blanks_are_of_the_form_that_is_read(tmp_path: Path) -> None:
    runner = CliRunner()
    (tmp_path / "about.yaml").write_text(runner.invoke(app, ["audit", "about"]).output)
    assert read_about(tmp_path / "about.yaml") == About()
    key = SigningKey.generate("example.com/run").verifier.text
    (tmp_path / "trust.yaml").write_text(runner.invoke(app, ["audit", "trust"]).output.replace('""', key, 1))
    assert read_trust(tmp_path / "trust.yaml") == TrustFile(operator=key)
