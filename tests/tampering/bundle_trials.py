"""Tampering with a bundle: by somebody on its way, and by the operator, who signs its list anew."""

from __future__ import annotations

import json
import random
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cosmati.audit.trust import TrustFile
from cosmati.audit.verify import BundleReport, verify_bundle
from cosmati.errors import CosmatiError
from tests.audit.signed_runs import make_run
from tests.audit.test_bundle import Signed, changed, export_of

from .trials import FOUND, HARMLESS, MISSED, Trial, change_bytes


def _held(bundle: Path) -> Mapping[str, bytes]:
    with zipfile.ZipFile(bundle) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


class BundleTarget:
    """A bundle of a small signed run with its weights, for an auditor who knows the keys of all three parties."""

    name = "bundle"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        run = make_run(folder)
        facts = json.loads((run / "ledger" / "details.jsonl").read_text().splitlines()[0])
        trust = TrustFile(
            operator=(run / "ledger" / "operator.vkey").read_text().strip(),
            data_roots=(facts["provenance"]["sources"][0]["root"],),
            policy_roots=(facts["policy_provenance"]["sources"][0]["root"],),
        )
        self._signed = Signed(run, export_of(run, folder / "run.zip"), trust)
        self._files = _held(self._signed.bundle)
        self._told = self._verified(self._signed.bundle)

    def _verified(self, bundle: Path) -> BundleReport:
        place = self._folder / "unpacked"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        return verify_bundle(bundle, place, self._signed.trust)

    def check_untouched(self) -> None:
        """Fail unless it holds as it was made."""
        assert self._verified(self._signed.bundle) == self._told

    def try_once(self, draw: random.Random) -> Trial:
        """Change the archive's bytes, or its files, or files that the operator lists and signs anew."""
        path = self._folder / "tampered.zip"
        if draw.random() < 0.3:
            kind, data = change_bytes(self._signed.bundle.read_bytes(), draw)
            path.write_bytes(data)
            return Trial(f"{kind} in the archive", self._judge(path))
        what, is_signed = draw.choice(["bytes", "drop", "add", "swap", "figure"]), draw.random() < 0.5
        kinds: list[str] = []
        shutil.rmtree(path.with_suffix(".files"), ignore_errors=True)
        changed(self._signed, path, lambda folder: kinds.append(_change(folder, what, draw)), relist=is_signed)
        return Trial(kinds[0] + (", signed anew" if is_signed else ""), self._judge(path))

    def _judge(self, path: Path) -> str:
        try:
            told = self._verified(path)
        except CosmatiError:
            return FOUND
        if any(label == "but" and words.startswith("no check reads") for label, words in told.lines):
            return FOUND  # by name
        is_same = _covered(_held(path)) == _covered(self._files) and _said(told) == _said(self._told)
        return HARMLESS if is_same else MISSED


def _said(told: BundleReport) -> object:
    """Return all of a report but how many files there were."""
    return [line for line in told.lines if line[0] != "files"], told.unpinned, told.evidence_level, told.figures


def _covered(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Leave out the list, which may be signed anew, and partial tiles of which a wider one holds all."""
    held = {name: data for name, data in files.items() if name not in ("bundle.json", "statements/bundle.dsse.json")}
    wider = {name for name in held for other in held if _is_part(name, other) and held[other].startswith(held[name])}
    return {name: data for name, data in held.items() if name not in wider}


def _is_part(name: str, other: str) -> bool:
    (tile, _, width), (wide, _, most) = name.partition(".p/"), other.partition(".p/")
    return bool(width) and tile == wide and int(width) < int(most or 256)


def _change(folder: Path, what: str, draw: random.Random) -> str:
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    names = [name for name in names if name != "bundle.json"]
    path, other = folder / draw.choice(names), folder / draw.choice(names)
    if what == "bytes":
        kind, data = change_bytes(path.read_bytes(), draw)
        path.write_bytes(data)
        return f"{kind} in a file"
    if what == "drop":
        path.unlink()
        return "drop file"
    if what == "add":
        path.with_name(f"{path.name}.more").write_bytes(other.read_bytes())
        return "duplicate file"
    if what == "swap":
        one, two = path.read_bytes(), other.read_bytes()
        path.write_bytes(two)
        other.write_bytes(one)
        return "swap files"
    figures = folder / "figures.json"
    told: dict[str, Any] = json.loads(figures.read_bytes())
    one = draw.choice([name for name in told["classes"] if told["classes"][name]["rows"]])
    told["classes"][one]["rows"] += draw.choice([-1, 1, 100])
    figures.write_text(json.dumps(told, separators=(",", ":"), sort_keys=True))
    return "figures"
