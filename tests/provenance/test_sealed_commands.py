"""Commands about a run with a sensitive class, as people give them: what they say and write, with whose credential."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

pytest.importorskip("model_signing", reason="the extra `audit` isn't installed")

from starlette.testclient import TestClient

from cosmati.cli import column_keys
from cosmati.cli.column_keys import ReadingRights
from cosmati.explorer.server.app import make_app
from cosmati.ledger.details import details_digest
from cosmati.ledger.query import VerifiedLedger, contributions
from cosmati.ledger.released_keys import blocks_in, read_holder_key, read_released, release
from cosmati.ledger.sealing import COLUMNS, SEALED, OperatorKeys, SealedClasses, boxes_of, open_box, sealed
from cosmati.provenance.authority.credential import Credential, sign_credential
from cosmati.provenance.voucher import FOLDER
from cosmati.records.ledger import StepEntry
from cosmati.store.index import RunIndex
from tests.explorer.test_checked_ledgers import settled
from tests.provenance import vouched_recipe
from tests.provenance.authority import people
from tests.provenance.authority.people import NEWS, PII
from tests.provenance.test_credentials import Sealed
from tests.train.replay_world import build, entries, sign_again
from tests.train.test_sealed_run import leaks

pytestmark = pytest.mark.long

RECIPE = str(Path(vouched_recipe.__file__))
Values = set[float | str]


class Asked(Sealed):
    """A run whose operator has lied about a norm of the sensitive class, so that replays have something to tell."""

    def train(self) -> None:
        """Train, and then lie."""
        vouched_recipe.recipe().trainer(run_folder=self.run).fit()
        items = entries(self.run)
        for number, (entry, told) in enumerate(items):
            if isinstance(entry, StepEntry) and entry.step == 2 and told is not None:
                box = self.keys(PII, "gradient_norm", 0)
                norms = open_box(told[SEALED][PII]["gradient_norm"], box, self.origin, PII, "gradient_norm", 2)
                norms = {place: [norm + 0.125 for norm in of] for place, of in norms.items()}
                told[SEALED][PII] |= sealed({}, {PII: {"gradient_norm": norms}}, self.keys, 2)[SEALED][PII]
                items[number] = replace(entry, details_digest=details_digest(told)), told
        archive = shutil.copytree(self.run / "ledger" / FOLDER, self.root / "archive")
        sign_again(self.run, items)
        shutil.copytree(archive, self.run / "ledger" / FOLDER)

    @property
    def keys(self) -> OperatorKeys:
        """The operator's own."""
        return OperatorKeys((self.run / "private/columns.key").read_bytes(), self.origin)

    def values(self, *columns: str) -> Values:
        """Return what is in the boxes of columns (all, where none is named) and isn't in the open besides."""
        found, clear = Values(), list[object]()
        for entry, told in entries(self.run):
            if not isinstance(entry, StepEntry) or told is None:
                continue
            for name, column, box in boxes_of(told):
                if not columns or column in columns:
                    key = self.keys(name, column, 0)
                    found |= {*flat(open_box(box, key, self.origin, name, column, entry.step))}
            clear += [told.get(column) for column in COLUMNS]
        return found - {*leaks(json.dumps(clear).encode(), found)}  # Some rows of two sources are equal.

    def handed(self, folder: Path, *of: str) -> list[str]:
        """Have a credential signed and keys released for it, and return the options that give them."""
        folder.mkdir(parents=True, exist_ok=True)
        self.grant(folder / "credential", *of)
        self.release(folder / "credential", folder / "keys")
        return self.given(folder / "credential", folder / "keys")

    def given(self, credential: Path, keys: Path) -> list[str]:
        """Return the options that give a holder's files."""
        own = str(self.root / "eve/eve.holder.key")
        return ["--credential", str(credential), "--keys", str(keys), "--holder-key", own]


def flat(value: Any) -> Iterator[float | str]:
    """Yield the numbers and sketches in what a box holds."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from flat(one)
    elif value:
        yield value


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("asked")
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        patch.setenv("WORLD", str(root / "firm"))
        patch.setattr(people, "TAXONOMY", replace(people.TAXONOMY, sensitive=("customer",)))
        yield Asked(root)


def copied(asked: Asked, folder: Path) -> Path:
    """Return a copy of the ledger, which is all that an auditor has."""
    return Path(shutil.copytree(asked.run / "ledger", folder / "copy/ledger")).parent


READS = {
    "query": ["ledger", "query", "RUN"],
    "query json": ["ledger", "query", "RUN", "--format", "json", "--each", "phase"],
    "learning": ["ledger", "query", "RUN", "--learning", "--prove"],
    "learning csv": ["ledger", "query", "RUN", "--learning", "--format", "csv"],
    "sql": ["ledger", "sql", "RUN", "FROM norms", "--format", "csv"],
    "sql directions": ["ledger", "sql", "RUN", "FROM directions", "--format", "csv"],
    "sql updates": ["ledger", "sql", "RUN", "FROM updates", "--format", "csv"],
    "sql entropies": ["ledger", "sql", "RUN", "FROM entropies", "--format", "csv"],
}


@pytest.mark.parametrize("command", READS)
def test_without_a_credential_no_answer_and_no_file_has_a_sealed_value(
    command: str, asked: Asked, tmp_path: Path
) -> None:
    run = copied(asked, tmp_path)
    assert len(secret := asked.values()) > 20
    said = asked.cli(*[str(run) if word == "RUN" else word for word in READS[command]])
    assert not leaks((said.stdout + said.stderr).encode(), secret)
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or not leaks(path.read_bytes(), secret), path


def test_a_replay_writes_no_sealed_value_into_its_file_whoever_asks(asked: Asked, tmp_path: Path) -> None:
    run, secret = copied(asked, tmp_path), asked.values()
    replays = ["ledger", "replay", "RUN", "--recipe", RECIPE, "--steps", "1:4", "--without-rows", "--out", "FILE"]
    for name, of, more, code in (
        ("operator", asked.run, [], 1),
        ("anybody", run, [], 0),
        ("holder", run, asked.rights, 1),
    ):
        file = tmp_path / f"{name}.json"
        words = {"RUN": str(of), "FILE": str(file)}
        said = asked.cli(*[words.get(word, word) for word in replays], *more, code=code)
        assert not leaks(file.read_bytes(), secret), name
        (found,) = json.loads(file.read_text())["segments"]
        assert found["outcome"].startswith("different" if code else "equal")
        assert bool(leaks(said.stdout.encode(), secret)) == bool(code), "who may read it is told on the screen"
        assert ("sealed" in said.stdout) != bool(code)
    page = tmp_path / "page.html"
    asked.cli("report", str(run), "--out", str(page), code=1)  # it has no record
    asked.cli("report", str(asked.run), "--out", str(page))
    assert not leaks(page.read_bytes(), secret)


def test_a_credential_for_other_columns_or_classes_opens_what_it_says_and_no_more(asked: Asked, tmp_path: Path) -> None:
    run = copied(asked, tmp_path)
    norms = asked.handed(tmp_path / "norms", "--columns", "gradient_norm")
    query = ["ledger", "query", str(run), "--format", "json"]

    def norm_of(said: str) -> object:
        return next(one for one in map(json.loads, said.splitlines()) if one["class_name"] == PII)["norm_sum"]

    assert norm_of(asked.cli(*query, *norms).stdout) != "sealed"
    rest = asked.values() - asked.values("gradient_norm")
    for view in ("norms", "directions", "updates", "steps"):
        said = asked.cli("ledger", "sql", str(run), f"FROM {view}", "--format", "csv", *norms)
        assert not leaks(said.stdout.encode(), rest), view
    updates = asked.handed(tmp_path / "updates", "--columns", "update_norm")
    said = asked.cli(*query, *updates)
    assert norm_of(said.stdout) == "sealed"
    assert said.stderr == f"Your credential covers update_norm of {PII}, until 2999-12-31.\n"
    opened, rest = asked.values("update_norm"), asked.values() - asked.values("update_norm")
    said = asked.cli("ledger", "sql", str(run), "FROM updates", "--format", "csv", *updates)
    assert leaks(said.stdout.encode(), opened) == sorted(opened, key=str)
    said = asked.cli("ledger", "replay", str(run), "--recipe", RECIPE, "--without-rows", *updates)
    assert "Equal in every digest but those of rows" in said.stdout, "the lie is in what stays sealed"
    assert (f"gradient_norm of {PII}, which is sealed" in said.stdout, "update_norm" in said.stdout) == (True, False)
    page = tmp_path / "page.html"
    asked.cli("report", str(asked.run), "--out", str(page), *updates)
    assert not leaks(page.read_bytes(), rest)


def test_keys_that_were_released_beyond_a_credential_open_nothing_beyond_it(asked: Asked, tmp_path: Path) -> None:
    """An operator who gives more away than the authority has signed doesn't do it with this library's commands."""
    given = asked.handed(tmp_path, "--columns", "update_norm")
    head = json.loads((tmp_path / "keys").read_text())
    told = [(e.step, t, SealedClasses("", (), 1024)) for e, t in entries(asked.run) if isinstance(e, StepEntry) and t]
    everything = release(
        asked.keys, blocks_in(told), lambda *_: True, holder=head["holder"], credential=head["credential"]
    )
    (tmp_path / "keys").write_bytes(everything)
    holder = read_holder_key(Path(given[-1]).read_bytes())
    options = {"run": asked.origin, "credential": head["credential"]}
    opened = read_released(everything, holder, **options, covers=lambda *_: True)
    assert opened(PII, "gradient_norm", 0) == asked.keys(PII, "gradient_norm", 0), "the control: it's in the file"
    run, rest = copied(asked, tmp_path), asked.values() - asked.values("update_norm")
    for view in ("updates", "norms", "directions", "steps"):
        said = asked.cli("ledger", "sql", str(run), f"FROM {view}", "--format", "csv", *given)
        assert not leaks(said.stdout.encode(), rest), view
        assert view != "updates" or leaks(said.stdout.encode(), asked.values("update_norm"))
    asked.cli("audit", "export", str(asked.run), "--out", str(tmp_path / "run.zip"), *given[:4])
    said = asked.cli("audit", "verify", str(tmp_path / "run.zip"), "--holder-key", given[-1], code=3)
    told_of = " ".join(said.output.split())
    assert f"update_norm of {PII} in 0 steps; 6 opened with your key" in told_of
    assert f"gradient_norm of {PII} in 6 steps" in told_of


def test_for_a_class_that_isnt_sealed_nothing_is_released(asked: Asked, tmp_path: Path) -> None:
    firm = asked.world.people
    wanted = Credential(
        authority=firm.pin,
        holder=(asked.root / "eve/eve.holder.pub").read_text().strip(),
        run=asked.origin,
        classes=(NEWS,),
        columns=COLUMNS,
        until=date(2999, 1, 1),
    )
    (tmp_path / "credential").write_bytes(sign_credential(wanted, firm.repository.chain(), firm.ring("ada")))
    said = asked.release(tmp_path / "credential", tmp_path / "keys", code=2)
    assert "covers nothing that is sealed in these steps" in said.output
    assert not (tmp_path / "keys").exists()


COMMANDS = {
    "explore": ["explore", "STORE"],
    "query": ["ledger", "query", "RUN"],
    "learning": ["ledger", "query", "RUN", "--learning"],
    "sql": ["ledger", "sql", "RUN", "FROM norms"],
    "replay": ["ledger", "replay", "RUN", "--recipe", RECIPE, "--without-rows", "--out", "FILE"],
    "spot-check": ["ledger", "spot-check", "RUN", "--recipe", RECIPE, "--auditor-seed", "x", "--out", "FILE"],
    "report": ["report", "RUN", "--out", "FILE"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_wrong_with_a_credential_is_told_and_nothing_is_written(
    command: str, asked: Asked, wrongs: dict[str, list[str]], tmp_path: Path
) -> None:
    file = tmp_path / "out"
    words = {"RUN": str(asked.run), "FILE": str(file), "STORE": str(store(asked, tmp_path / "store"))}
    asked.cli("ledger", "derive", str(asked.run))
    before = {*asked.run.rglob("*")}
    for told, given in wrongs.items():
        said = asked.cli(
            *[words.get(word, word) for word in COMMANDS[command]],
            *given,
            code=1 + (command not in ("report", "explore")),
        )
        of_none = "for none of the store's runs" if command == "explore" and "other" in told else told
        assert of_none in " ".join(said.stderr.split()), said.output
        assert said.stdout == ""
        assert not file.exists()
    assert {*asked.run.rglob("*")} == before


@pytest.fixture(scope="module")
def wrongs(asked: Asked, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Files of which one is wrong, by the words that tell it."""
    root, found = tmp_path_factory.mktemp("wrongs"), dict[str, list[str]]()
    asked.grant(root / "other run", "--run", "cosmati/other")
    found["is for the run 'cosmati/other'"] = asked.given(root / "other run", asked.root / "keys")
    asked.grant(root / "old", "--until", "2020-01-01")
    found["was valid until 2020-01-01"] = asked.given(root / "old", asked.root / "keys")
    asked.grant(root / "norms", "--columns", "loss")
    found["for the credential"] = asked.given(root / "norms", asked.root / "keys")
    text = (asked.root / "credential").read_bytes()
    (root / "changed").write_bytes(
        text.replace(b'"payload": "', b'"payload": "A').replace(b'"payload":"', b'"payload":"A')
    )
    found["This is no credential"] = asked.given(root / "changed", asked.root / "keys")
    found["none can't be read: No such file"] = asked.given(root / "none", asked.root / "keys")
    asked.cli("keys", "holder", "mallory", "--keys", str(root))
    stolen = asked.given(asked.root / "credential", asked.root / "keys")
    found["holder"] = [*stolen[:-1], str(root / "mallory.holder.key")]
    found["three files"] = stolen[:4]
    return found


def store(asked: Asked, folder: Path) -> Path:
    """Return a store that has the run, and another one that it knows nothing of."""
    for name in ("run", "other"):
        shutil.copytree(asked.run, folder / name)
    build("routed", folder / "third", budget="2ba", sensitive="hot").fit()
    return folder


def test_pages_of_a_store_show_a_holder_what_the_credential_says(asked: Asked, tmp_path: Path) -> None:
    place, secret = store(asked, tmp_path / "store"), asked.values()
    norm = sum(one.norm_sum for one in contributions(opened_by(asked)).cells if one.class_name == PII)
    key = asked.root / "eve/eve.holder.key"
    rights = ReadingRights(asked.root / "credential", asked.root / "keys", key)
    with RunIndex(place) as index:
        index.refresh()
        for keys_of in (None, rights.open_run):
            client = TestClient(make_app(index, keys_of), base_url="http://localhost")
            for run in index.runs():
                for kind in ("governance", "runs"):
                    page = settled(client, f"/{kind}/{run.key}")
                    is_its_own = keys_of is not None and run.path != "third"
                    assert (f">{norm:,.4g}<" in page) == is_its_own, (kind, run.path)
                    assert ("for its holder alone" in page) == is_its_own
                    assert ("sealed" in page) or is_its_own
                    assert ("a page is for everybody" in page) == (kind == "governance" and not is_its_own)
                    assert keys_of is not None or not leaks(page.encode(), secret)
    for path in place.rglob("*"):
        assert not path.is_file() or not leaks(path.read_bytes(), secret), path


def opened_by(asked: Asked) -> VerifiedLedger:
    return VerifiedLedger(asked.run / "ledger", keys=asked.keys)


def test_a_page_that_outlives_its_credential_shows_it_no_more(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = store(asked, tmp_path / "store")
    rights = ReadingRights(asked.root / "credential", asked.root / "keys", asked.root / "eve/eve.holder.key")
    with RunIndex(place) as index:
        index.refresh()
        client = TestClient(make_app(index, rights.open_run), base_url="http://localhost")
        (key,) = (run.key for run in index.runs() if run.path == "run")
        assert "for its holder alone" in settled(client, f"/governance/{key}")

        class Later(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:
                return datetime(3000, 1, 1, tzinfo=tz)

        monkeypatch.setattr(column_keys, "datetime", Later)
        client.post(f"/governance/{key}/check")
        page = settled(client, f"/governance/{key}")
        assert "was valid until 2999-12-31" in page
        assert "for its holder alone" not in page


def test_what_a_bundle_shows_is_what_its_credential_says(asked: Asked, tmp_path: Path) -> None:
    given = asked.handed(tmp_path / "given", "--columns", "update_norm")
    bundle, key = tmp_path / "run.zip", given[-1]
    asked.cli("audit", "export", str(asked.run), "--out", str(bundle), *given[:4])
    secret, opened = asked.values(), asked.values("update_norm")
    for name, more in (("anybody", []), ("holder", ["--holder-key", key])):
        kept = tmp_path / name
        said = asked.cli("audit", "verify", str(bundle), "--out", str(kept), *more, code=3)
        assert not leaks(said.output.encode(), secret)
        assert not any(leaks(path.read_bytes(), secret) for path in kept.rglob("*") if path.is_file())
        told = " ".join(said.output.split())
        assert f"update_norm of {PII}, for the holder of" in told
        assert (f"update_norm of {PII} in 0 steps; 6 opened with your key" in told) == bool(more)
        assert f"gradient_norm of {PII} in 6 steps" in told
        # What was unpacked opens for a credential as the run's own ledger does, and no further.
        said = asked.cli("ledger", "sql", str(kept / "ledger"), "FROM updates", "--format", "csv", *given)
        assert leaks(said.stdout.encode(), opened) == sorted(opened, key=str)
        asked.cli("ledger", "query", str(kept / "ledger"), "--learning", *given)
        assert not leaks(said.stdout.encode(), secret - opened)
