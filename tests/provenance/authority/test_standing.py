"""`cosmati keys status`: what wants doing, who may sign what and until when, and who may no more."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati.cli.keys_status import left
from cosmati.cli.main import app
from cosmati.provenance.authority import ceremony
from cosmati.provenance.authority.standing import fold, is_due, standing
from cosmati.provenance.taxonomy import Taxonomy
from tests.provenance.authority.people import NEWS, PII, People


@pytest.fixture
def people(tmp_path: Path) -> People:
    """News that expired yesterday, personal data whose only signer was revoked, and a root for two months more."""
    people = People(tmp_path, days=-300).begin()
    people.delegate(NEWS, "ada", "bob")
    people.delegate(PII, "eve")
    people.days = -366
    people.sign(NEWS, "ada")
    people.days = 0
    people.sign(PII, "eve")
    with people.repository.change(people.ring()) as change:
        ceremony.replace_key(change, people.keys["eve"].keyid, None)
    return people


def page(people: People, *options: object) -> str:
    names = [option for name in people.keys for option in ("--keys", people.root / name)]
    command = ["keys", "status", people.folder, "--keys", people.root / "own", *names, *options]
    result = CliRunner().invoke(app, [str(word) for word in command], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return re.sub(r" +", " ", result.output)


def test_a_long_path_stays_on_one_line(tmp_path: Path) -> None:
    """It's copied from there, and searched for."""
    folder = tmp_path / ("far/" * 40)
    folder.mkdir(parents=True)
    people = People(folder).begin()
    assert f"{people.folder}, taxonomy firm 1\n" in page(people)


def test_the_page_says_what_wants_doing(people: People) -> None:
    said = page(people)
    for line in (
        f"{people.folder}, taxonomy firm 1",
        f"root {people.pin}",
        f"✗ {PII}: what was signed isn't trusted, since nobody may sign it any more: cosmati keys delegate",
        f"✗ Expired: {NEWS}. Renew, with the keys of their people: cosmati keys renew {people.folder} {NEWS}",
        "Next to expire: timestamp, in 6 days.",
        "Nobody may sign: customer/pii, public-domain",
        f"eve {people.keys['eve'].keyid[:12]} nothing any more: revoked or rotated",
        f"ada {people.keys['ada'].keyid[:12]} {NEWS}",
    ):
        assert line in said
    assert re.search(rf"^{NEWS} 1 of 2 ada, bob 1 \S+ expired 24 hours ago", said, re.MULTILINE)
    assert re.search(r"^root 2 of 3 root-1, root-2, root-3 \S+ in 6[45] days", said, re.MULTILINE)


def test_programs_read_the_same(people: People) -> None:
    told = json.loads(page(people, "--json"))
    roles = {one["role"]: one for one in told["roles"]}
    assert (told["root"], told["next"], told["taxonomy"]) == (people.pin, "timestamp", {"name": "firm", "version": "1"})
    assert (roles[NEWS]["days_left"], roles[NEWS]["is_class"], roles["root"]["is_class"]) == (-1, True, False)
    assert (told["nobody_signs"], told["lapsed"]) == ([PII, "public-domain"], [PII])
    signs = {one["name"]: one["signs"] for one in told["keys"]}
    assert (signs["eve"], signs["ada"], signs["root-1"]) == ([], [NEWS], ["root"])


def test_keys_without_names_are_shown_by_their_ids(people: People) -> None:
    result = CliRunner().invoke(app, ["keys", "status", str(people.folder)])
    assert people.keys["ada"].keyid[:12] in result.output
    assert not re.search(r"\bada\b", result.output)


def test_what_is_not_trusted_is_told(people: People) -> None:
    people.edit("class.licensed.news", lambda signed: signed["targets"].clear())
    said = page(people)
    assert f"✗ {NEWS} isn't trusted: The metadata of" in said
    assert re.search(rf"^{NEWS} .* not trusted", said, re.MULTILINE)


@pytest.mark.parametrize(("role", "days"), [("timestamp", 1), ("snapshot", 7), ("root", 14), ("targets", 14)])
def test_what_expires_soon_is_told_in_time(tmp_path: Path, role: str, days: int) -> None:
    people = People(tmp_path).begin()
    (one,) = [one for one in standing(people.repository).roles if one.role == role]
    assert one.expires is not None
    for short, due in ((days, True), (days + 1, False)):
        assert is_due(one, one.expires - timedelta(days=short, seconds=-5), people.repository) == due
    assert is_due(one, one.expires + timedelta(days=1), people.repository)


def test_names_of_files_are_words(people: People) -> None:
    (people.root / "own" / "targets.pub.pem").rename(people.root / "own" / "[red]:smile:.pub.pem")
    assert re.search(r"^targets 1 of 1 \[red\]:smile: ", page(people), re.MULTILINE)


def test_a_page_of_what_has_all_expired(tmp_path: Path) -> None:
    people = People(tmp_path, days=-800).begin()
    said = page(people)
    assert "Next to expire" not in said
    assert "✗ Expired: timestamp, snapshot. Renew: cosmati keys renew" in said
    assert f"cosmati keys renew {people.folder} root targets" in said
    assert json.loads(page(people, "--json"))["next"] is None


def test_times_in_words() -> None:
    hour = timedelta(hours=1)
    words = {500 * hour: "in 20 days", 47 * hour: "in 47 hours", hour: "in 1 hour", hour / 2: "in 0 hours"}
    words |= {-49 * hour: "expired 2 days ago", -hour: "expired 1 hour ago"}
    assert {time: left(time) for time in words} == words


PATHS = ("a/b", "a/c", "a/d", "e/f", "g", "h/i", "h/j")
TREE = Taxonomy("t", "1", tuple((path, "x") for path in PATHS))


@given(st.sets(st.sampled_from(PATHS)))
def test_classes_in_few_words_are_those_classes(paths: set[str]) -> None:
    told = fold(sorted(paths), TREE)
    meant = []
    for word in told:
        branch, star, number = word.partition("/** (")
        below = [path for path in PATHS if path.startswith(f"{branch}/")]
        assert not star or number == f"{len(below)})"
        meant += below if star else [word]
    assert sorted(meant) == sorted(paths)
    assert not {"a/b", "a/c", "a/d"} <= set(told)
