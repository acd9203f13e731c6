"""(k) What it costs that data are signed: to open 100,000 shards that an authority vouches for, a GB of their bytes.

Opening verifies the authority's metadata, the manifest, and that each shard is there with its length; the bytes are
hashed once a process, before their first row is read. CPU time of the process and of the system for it, local disk,
warm; how many files are looked at and how many digests are made is counted, which no busy machine changes.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from time import process_time
from typing import Any
from unittest import mock

from benchmarks.measure import in_turns, write
from cosmati.data.shards.index import dump_index, parse_index
from cosmati.data.shards.manifest import MANIFEST_FILE, ShardDigest, SourceManifest
from cosmati.data.shards.writer import ShardWriter
from cosmati.data.streaming import StreamingDataset
from cosmati.data.vouching import CheckedOnce

CLASS = "unknown"
NUM_SHARDS, SHARD_MB, NUM_LARGE = 100_000, 64, 16
BUDGET_SECONDS = 2.0


def write_source(folder: Path, row: bytes, num_shards: int) -> None:
    """Write a source of equal shards with a row each."""
    size = len(row) + 4096
    with ShardWriter(folder, {"row": "bytes"}, class_path=CLASS, source=folder.name, size_limit=size) as writer:
        writer.write({"row": row})
    index = parse_index((folder / "index.json").read_bytes(), name="index.json")
    manifest = SourceManifest.from_bytes((folder / MANIFEST_FILE).read_bytes())
    first, content = index.shard(0), (folder / index.shard(0).raw.basename).read_bytes()
    names = [f"shard.{number:06}.mds" for number in range(num_shards)]
    for name in names:
        (folder / name).write_bytes(content)
    infos = [replace(first, raw=replace(first.raw, basename=name)) for name in names]
    digests = [ShardDigest(name=name, sha256=manifest.shards[0].sha256, rows=1) for name in names]
    whole = {"num_rows": num_shards, "num_bytes": num_shards * len(content), "shards": tuple(digests)}
    (folder / MANIFEST_FILE).write_bytes(manifest.model_copy(update=whole).to_bytes())
    (folder / "index.json").write_bytes(dump_index(infos, index.extra))


def signed(folder: Path, *sources: Path) -> Any:  # noqa: ANN401  (an Authority, where it's installed)
    """Make an authority that vouches for sources, and return it as who opens them sees it."""
    from cosmati.data.signing import sign_sources
    from cosmati.provenance.authority import ceremony
    from cosmati.provenance.authority.keys import KeyRing, create_key
    from cosmati.provenance.authority.repository import AuthorityRepository
    from cosmati.provenance.authority.trusted import Authority
    from cosmati.provenance.taxonomy import software_licences

    root = ceremony.init(folder / "authority", folder / "keys", software_licences())
    repository, ring = AuthorityRepository(folder / "authority"), KeyRing([folder / "keys"])
    with repository.change(ring) as change:
        ceremony.delegate(change, software_licences(), CLASS, [create_key(folder / "keys", "ada")])
    ring = KeyRing([folder / "keys"])
    for source in sources:
        list(sign_sources(str(source), folder / "authority", ring))
    return Authority(folder / "authority", root, state=folder / "seen")


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count how many files are looked at, and how many SHA-256 are made."""
    found = {"files looked at": 0, "SHA-256": 0}

    def counting(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counts(*given: Any, **options: Any) -> Any:  # noqa: ANN401
            found[what] += 1
            return call(*given, **options)

        return counts

    with (
        mock.patch.object(os, "stat", counting("files looked at", os.stat)),
        mock.patch.object(hashlib, "sha256", counting("SHA-256", hashlib.sha256)),
    ):
        yield found


def run(*, quick: bool = False) -> str:
    """Measure, write the results and return the tables."""
    if find_spec("tuf") is None:
        return "# vouching\n\nLeft out: it needs another package (tuf): pip install 'cosmati[authority]'.\n"
    rounds = 3 if quick else 11
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        small, large = folder / "small", folder / "large"
        write_source(small, b"row", 1000 if quick else NUM_SHARDS)
        write_source(large, os.urandom(SHARD_MB << 20), 2 if quick else NUM_LARGE)
        authority = signed(folder, small, large)
        suffix = "_quick" if quick else ""
        return f"{_opening(small, authority, rounds, suffix)}\n{_hashing(large, authority, rounds, suffix)}"


def _opening(folder: Path, authority: Any, rounds: int, suffix: str) -> str:  # noqa: ANN401
    def opened(**options: Any) -> Callable[[], float]:  # noqa: ANN401
        def seconds() -> float:
            start = process_time()
            StreamingDataset(folder, **options)
            return process_time() - start

        return seconds

    arms = {"unsigned": opened(), "the same again (A/A)": opened(), "signed": opened(authority=authority)}
    rows = in_turns(arms, rounds)
    counts = {}
    for name in ("unsigned", "signed"):
        with counted() as found:
            arms[name]()
        counts[name] = ", ".join(f"{number:,} {what}" for what, number in found.items())
    shards = len(StreamingDataset(folder))
    added = rows[2].over_baseline_us / 1e6
    notes = {
        "what": f"a step is an opening of {shards:,} shards; CPU time of the process",
        **{f"counted, {name}": words for name, words in counts.items()},
        "budget": f"signed adds {added:.2f} s, and may add {BUDGET_SECONDS:g} s to 100,000 shards",
    }
    return write(f"vouching_opening{suffix}", rows, notes)


def _hashing(folder: Path, authority: Any, rounds: int, suffix: str) -> str:  # noqa: ANN401
    (source,) = StreamingDataset(folder, authority=authority).sources
    assert source.vouched is not None
    infos = [source.index.shard(number) for number in range(source.index.num_shards)]
    gigabytes = len(infos) * (SHARD_MB << 20) / 1e9

    def read() -> float:
        start, piece = process_time(), bytearray(1 << 18)
        for info in infos:
            with (folder / info.raw.basename).open("rb", buffering=0) as file:
                while file.readinto(piece):
                    pass
        return (process_time() - start) / gigabytes

    def check() -> float:
        start, checked = process_time(), CheckedOnce(source.vouched)
        for number, info in enumerate(infos):
            checked.check(number, folder / info.raw.basename, info)
        return (process_time() - start) / gigabytes

    rows = in_turns(
        {"read": read, "the same again (A/A)": read, "read and compared with what was signed": check}, rounds
    )
    notes = {"what": f"a step is a GB, in shards of {SHARD_MB} MiB, once a process; CPU time of the process"}
    return write(f"vouching_bytes{suffix}", rows, notes)
