"""The Python packages of this machine: their source files, and the licence that each one declares.

Two origins: the standard library of the running interpreter, where each top-level module or package counts
as one package, and the distributions installed beside it, whose `RECORD` lists every file with its SHA-256.
Left out are

- tests, which many builds of Python don't install at all, so that machines differ less;
- vendored copies, which would put one text under two licences and on both sides of a split;
- the editable or installed package of Cosmati itself, since a change of the library would change the data;
- files that a build of Python writes for one machine (`_sysconfigdata_*`).
"""

from __future__ import annotations

import base64
import csv
import dataclasses
import hashlib
import platform
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path, PurePosixPath

from cosmati.provenance.licences import LicenceFinding, classify_licence

_LICENCE_FILE = re.compile(r"(?i)(?:licen[cs]e|copying)")
_MAX_LICENCE_FILE = 1 << 18
_TESTS = frozenset({"test", "tests", "idle_test"})
_VENDORED = frozenset(
    {
        "_vendor",
        "vendor",
        "_vendored",
        "vendored",
        "extern",
        "_extern",
        "externals",
        "third_party",
        "thirdparty",
    }
)


@dataclass(frozen=True)
class SourceFile:
    """A Python file.

    Args:
        name: path relative to its root, with forward slashes.
        path: where it lies.
        sha256: digest of the content in hex: as its `RECORD` claims, or computed where there is no such list.
        num_bytes: length, likewise.
    """

    name: str
    path: Path
    sha256: str
    num_bytes: int


@dataclass(frozen=True)
class Package:
    """A module or package of the standard library (`python/json`), or an installed distribution (`numpy`)."""

    name: str
    version: str
    licence: LicenceFinding
    files: tuple[SourceFile, ...]


def find_packages(roots: Sequence[Path] | None = None) -> tuple[list[Package], Counter[str]]:
    """Find the packages of this machine.

    Args:
        roots: directories with installed distributions, searched instead of this machine's packages. None
            means the standard library and the interpreter's own site directories; `sys.path` isn't asked,
            because it depends on where and how Python was started.

    Returns:
        Packages sorted by name, the standard library first, none without files; and how many files were
        left out, by reason.
    """
    skipped: Counter[str] = Counter()
    paths = sysconfig.get_paths()
    standard: list[Package] = []
    if roots is None:
        standard = _standard_library(Path(paths["stdlib"]), skipped)
        roots = [Path(paths["purelib"]), Path(paths["platlib"])]
    installed: dict[str, Package] = {}
    for distribution in distributions(path=list(dict.fromkeys(map(str, roots)))):
        package = _distribution_package(distribution, skipped)
        # As in an import, the first one found counts.
        if package.name != "cosmati" and package.files and package.name not in installed:
            installed[package.name] = package
    return standard + [installed[name] for name in sorted(installed)], skipped


def _standard_library(root: Path, skipped: Counter[str]) -> list[Package]:
    licence = dataclasses.replace(
        classify_licence(None, (), "PSF-2.0"),
        evidence=f"standard library of {platform.python_implementation()}",
    )
    found: dict[str, list[SourceFile]] = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        # What can't be imported is no part of the library: site-packages, config-3.x and other folders.
        importable = all(part.isidentifier() for part in name.with_suffix("").parts)
        if not importable or path.name.startswith("_sysconfigdata"):
            continue
        reason = _reason_to_skip(name.parts)
        if reason:
            skipped[reason] += 1
            continue
        content = path.read_bytes()
        file = SourceFile(name.as_posix(), path, hashlib.sha256(content).hexdigest(), len(content))
        found.setdefault(name.with_suffix("").parts[0], []).append(file)
    version = platform.python_version()
    return [Package(f"python/{name}", version, licence, tuple(files)) for name, files in sorted(found.items())]


def _distribution_package(distribution: Distribution, skipped: Counter[str]) -> Package:
    metadata = distribution.metadata
    licence = classify_licence(
        _first(metadata.get_all("License-Expression")),
        [str(entry) for entry in metadata.get_all("Classifier") or ()],
        _first(metadata.get_all("License")),
        _licence_files(distribution),
    )
    name = re.sub(r"[-_.]+", "-", _first(metadata.get_all("Name")) or "unnamed").lower()
    files = tuple(sorted(_recorded_files(distribution, skipped), key=lambda file: file.name))
    return Package(name, _first(metadata.get_all("Version")) or "unknown", licence, files)


def _licence_files(distribution: Distribution) -> dict[str, str]:
    """Return the licence files in the metadata's folder: those that it names (PEP 639), else by their names."""
    named = [str(name) for name in distribution.metadata.get_all("License-File") or ()]
    if not named:
        listed = csv.reader((distribution.read_text("RECORD") or "").splitlines())
        paths = [PurePosixPath(row[0]) for row in listed if row]
        named = [p.name for p in paths if p.parent.name.endswith(".dist-info") and _LICENCE_FILE.match(p.name)]
    found = {}
    for name in dict.fromkeys(named):
        if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
            continue
        text = distribution.read_text(f"licenses/{name}") or distribution.read_text(name)
        if text is not None and len(text) <= _MAX_LICENCE_FILE:
            found[name] = text
    return found


def _recorded_files(distribution: Distribution, skipped: Counter[str]) -> Iterator[SourceFile]:
    """Read the Python files of `RECORD`, whose rows are path, hash and size (PEP 376)."""
    record = distribution.read_text("RECORD")
    if record is None:
        skipped["distribution without RECORD"] += 1
        return
    for row in csv.reader(record.splitlines()):
        if not row or not row[0].endswith(".py"):
            continue
        name, claim, size = [*row, "", ""][:3]
        digest = _decode_sha256(claim)
        reason = _reason_to_skip(PurePosixPath(name).parts)
        if reason:
            skipped[reason] += 1
        elif digest is None or not size.isdecimal():
            skipped["no sha256 in RECORD"] += 1
        else:
            yield SourceFile(name, Path(str(distribution.locate_file(name))), digest, int(size))


def _reason_to_skip(parts: Sequence[str]) -> str | None:
    folders = set(parts[:-1])
    if ".." in folders or parts[0] == "/":
        return "outside the site directory"
    if folders & _VENDORED:
        return "vendored"
    return "tests" if folders & _TESTS else None


def _decode_sha256(claim: str) -> str | None:
    """Return the digest in hex, or None unless the claim is `sha256=` and URL-safe base64 (PEP 427)."""
    if not re.fullmatch(r"sha256=[A-Za-z0-9_-]{43}", claim):
        return None
    return base64.urlsafe_b64decode(claim.removeprefix("sha256=") + "=").hex()


def _first(values: Sequence[object] | None) -> str | None:
    return str(values[0]) if values else None
