"""A client of other people's, which knows nothing of this library, reads a repository over HTTP."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from datetime import UTC, datetime, timedelta

from cosmati.provenance.authority import errors
from cosmati.provenance.authority.chain import read_chain
from cosmati.routing.policy_file import load_policy
from tests.provenance.authority.people import NEWS, People, name_of
from tests.provenance.authority.test_policies import TEXT, PolicyPeople

pytestmark = pytest.mark.long

CLIENT = """
import sys
from pathlib import Path
from tuf.ngclient import Updater

url, root, state, target = sys.argv[1:]
updater = Updater(
    f"{state}/metadata", f"{url}/metadata/", f"{state}/targets", f"{url}/targets/", bootstrap=Path(root).read_bytes()
)
info = updater.get_targetinfo(target)
print(Path(updater.download_target(info)).read_text() if info else "nobody signed it")
assert not [name for name in sys.modules if name.startswith("cosmati")]
"""


def fetched(people: People, target: str) -> str:
    """Return what a stock client says of a target, over loopback HTTP."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(people.folder))
    handler.log_message = lambda *_: None  # type: ignore[attr-defined]
    state = people.root / "state"
    (state / "metadata").mkdir(parents=True, exist_ok=True)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url, root = f"http://127.0.0.1:{server.server_port}", people.folder / "metadata" / "1.root.json"
        command = [sys.executable, "-I", "-c", CLIENT, url, str(root), str(state), target]
        found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        server.shutdown()
    assert found.returncode == 0, found.stderr
    return found.stdout.removesuffix("\n")


def test_a_stock_client_fetches_a_source(tmp_path: Path) -> None:
    people = People(tmp_path).begin()
    people.delegate(NEWS, "ada")
    people.sign(NEWS, "ada", data=b'{"source": "s"}')
    for name, said in ((name_of(NEWS), '{"source": "s"}'), (name_of("public-domain"), "nobody signed it")):
        assert fetched(people, name.target) == said


def test_a_stock_client_fetches_a_policy_whose_digest_is_that_of_its_bytes(tmp_path: Path) -> None:
    people = PolicyPeople(tmp_path).begin()
    people.let_sign("ada")
    people.sign_text(TEXT, "ada")
    assert hashlib.sha256(fetched(people, "policy/main/1").encode()).digest() == load_policy(TEXT).digest
    assert fetched(people, "policy/main/2") == "nobody signed it"


def test_an_archive_is_verified_years_later_as_of_its_time(tmp_path: Path) -> None:
    """The files of a chain are all that an auditor needs; what has expired since says nothing of then."""
    people = People(tmp_path).begin()
    people.delegate(NEWS, "ada")
    people.sign(NEWS, "ada")
    then = datetime.now(UTC) + timedelta(days=1)
    archive = dict(people.repository.chain().files)
    chain = read_chain(archive.get, at=then, root_sha256=people.pin)
    assert chain.source(name_of(NEWS)).length == len(b"manifest")
    for days, role in ((8, "timestamp"), (31, "timestamp")):
        with pytest.raises(errors.ExpiredMetadataError, match=role):
            read_chain(archive.get, at=then + timedelta(days=days), root_sha256=people.pin)
    for name, data in archive.items():
        content = json.loads(data)
        content["signed"]["expires"] = "2099-01-01T00:00:00Z"
        forged = {**archive, name: json.dumps(content).encode()}
        with pytest.raises((errors.UnsignedMetadataError, errors.UntrustedRootError)):
            read_chain(forged.get, at=then, root_sha256=people.pin).source(name_of(NEWS))
