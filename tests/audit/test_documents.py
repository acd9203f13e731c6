"""Documents from figures alone: what they say, and that the page to file can be read by everybody, wide and narrow."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cosmati.audit.about import About
from cosmati.audit.documents import bom, croissant, documents
from cosmati.audit.summary import summary_page
from tests.browser.conftest import FLAGS
from tests.browser.pages import sideways

if TYPE_CHECKING:
    from playwright.sync_api import Browser

MADE = "2026-01-02T03:04:05+00:00"
EVIL = "<script>alert('x')</script> & \"co\""


def source(name: str, class_name: str, **facts: Any) -> dict[str, Any]:
    """Return a signed source, of 1,000 rows, as the figures have it."""
    own = {"origin": EVIL, "obtained": "downloaded", "licence": "MIT", "licence_valid_until": "", "lawful_basis": ""}
    return {
        "class": class_name,
        "target": f"t/{class_name}/{name}/1",
        "root": "ab" * 32,
        "manifest_sha256": "cd" * 32,
        "keyids": ["ef" * 32],
        "expires": "2030-01-01T00:00:00+00:00",
        "source": name,
        "source_version": "1",
        "num_rows": 1000,
        "num_bytes": 123456,
        "band": 0,
        "row_root": "00" * 32,
        "shards": [{"name": "shard.00000.mds", "rows": 1000, "sha256": "12" * 32}],
        "facts": own | {"reservations": [], "annotators": [], "custody": [], "notes": ""} | facts,
    }


def taught(rows: int, low: float, high: float) -> dict[str, Any]:
    """Return what a class gave two regions."""
    regions = {"low": low, "high": high}
    return {
        "rows": rows,
        "microbatches": rows // 8,
        "regions": {name: {"rows": rows if w else 0, "microbatches": 1, "weight": w} for name, w in regions.items()},
    }


def deletion(method: str, class_name: str, num_rows: int) -> dict[str, Any]:
    """Return what was deleted from the model, from step 8 on."""
    own = {"method": method, "classes": [class_name], "num_rows": num_rows}
    return {"from_step": 8, "entry": 9, "asked": "ab" * 32, "certificates": [], **own}


FIGURES: dict[str, Any] = {
    "run": {
        "id": EVIL,
        "origin": "cosmati/run",
        "operator": "cosmati/run+00000000+AAAA",
        "tree_size": 1234,
        "root": "34" * 32,
        "steps": 1200,
        "attempts": 1,
        "has_ended": True,
        "recipe": {},
        "environment": {},
        "plan": [],
    },
    "classes": {
        "open/permissive": taught(9000, 1.0, 1.0),
        "licensed/news": taught(640, 0.0, 0.5),
        "personal": taught(0, 0.0, 0.0),
    },
    "regions": ["low", "high"],
    "sources": [
        source("books", "open/permissive"),
        source("news", "licensed/news", obtained="licensed", licence="A contract", licence_valid_until="2031-12-31"),
        source("letters", "personal", obtained="", licence="", reservations=[EVIL], lawful_basis="consent"),
    ],
    "policies": [],
    "artifacts": [
        {"from_step": 0, "label": "tokenizer", "kind": "tokenizer", "digest": "", "origin": EVIL, "state": "ungoverned"}
    ],
    "withdrawn": [
        {
            "from_step": 40,
            "target": "t/licensed/news/news/1",
            "reason": "licence",
            "because": EVIL,
            "action": "reject",
            "step": 40,
            "class": "licensed/news",
        }
    ],
    "deletions": [
        deletion("replay", EVIL, 0),
        deletion("drop", "personal", 3),
    ],
    "exclusions": [["licensed/news", "low"], ["personal", "low"], ["personal", "high"]],
}


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen = set[str]()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)


def section(page: str, begin: str, end: str) -> str:
    """Return the words from one heading to another, without tags."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page[page.index(begin) : page.index(end)]))


def test_nothing_that_others_wrote_is_markup() -> None:
    page = summary_page(FIGURES, About(provider=EVIL, languages=EVIL), MADE)
    tags = _Tags()
    tags.feed(page)
    assert "script" not in tags.seen
    assert page.count("&lt;script&gt;") >= 6


def test_each_source_stands_under_its_kind() -> None:
    page = summary_page(FIGURES, About(sources={"letters": "user"}), MADE)
    assert "books 1" in section(page, "2.1 ", "2.2.1 ")
    licensed = section(page, "2.2.1 ", "2.2.2 ")
    assert "A contract, until 2031-12-31" in licensed
    assert "books" not in licensed
    assert "letters" in section(page, "2.4 ", "2.5 ")
    assert "letters" in section(summary_page(FIGURES, About(), MADE), "2.6 ", "3. ")


def test_what_is_in_neither_ledger_nor_file_is_said_to_be_missing() -> None:
    empty = summary_page(FIGURES, About(), MADE)
    words = {name: "Stated." for name, field in About.model_fields.items() if field.annotation is str}
    full = summary_page(FIGURES, About(**words | {"placed_on_market": "2026-02-03", "modalities": ["text"]}), MADE)
    assert empty.count("Not stated by the provider.") > 12
    assert "Not stated by the provider." not in full


def test_rows_and_what_they_taught_are_the_figures() -> None:
    rows = section(summary_page(FIGURES, About(), MADE), "Rows by class", "2. Data")
    assert "open/permissive 9,000 the whole model" in rows
    assert "licensed/news 640 high" in rows
    assert "no row was used: personal" in rows
    other = section(summary_page(FIGURES, About(), MADE), "3. Data processing", "</main>")
    assert "licensed/news low" in other
    assert "personal low" not in other  # of a class that wasn't there, it says nothing
    assert "reject from step 40 on" in other


def test_without_a_signed_source_it_says_whose_word_it_is() -> None:
    page = summary_page(FIGURES | {"sources": []}, About(), MADE)
    assert "No source is signed" in page
    assert page.count("The ledger names none, and the provider states none.") == 7


def test_documents_are_the_same_for_the_same_figures() -> None:
    first, second = (documents(FIGURES, About(), {"weights/a": "56" * 32}, MADE) for _ in range(2))
    assert first == second
    assert len(first) == 5


def test_the_bill_names_each_thing_once_and_refers_to_what_is_there() -> None:
    found = bom(FIGURES, About(provider="Example"), {"weights/a": "56" * 32}, MADE)
    refs = [one["bom-ref"] for one in found["components"]]
    assert len(refs) == len(set(refs)) == 4
    assert set(found["dependencies"][0]["dependsOn"]) < set(refs)
    assert found["metadata"]["component"]["hashes"] == [{"alg": "SHA-256", "content": "56" * 32}]
    assert found["metadata"]["component"]["manufacturer"] == {"name": "Example"}


def test_a_licence_is_an_address_where_it_is_an_identifier() -> None:
    assert croissant(FIGURES["sources"][0])["license"] == "https://spdx.org/licenses/MIT.html"
    assert croissant(FIGURES["sources"][1])["license"] == "A contract"
    assert "license" not in croissant(FIGURES["sources"][2])
    json.dumps(croissant(FIGURES["sources"][0]))


@pytest.fixture(scope="module")
def chromium() -> Any:
    import shutil

    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found: Browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        yield found
        found.close()


@pytest.mark.browser
def test_the_page_is_sound_wide_and_light_narrow_and_dark(chromium: Browser, tmp_path: Path) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core isn't installed").Axe()
    (tmp_path / "page.html").write_text(summary_page(FIGURES, About(languages="word" * 100), MADE), "utf-8")
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    page.goto((tmp_path / "page.html").as_uri())
    for width, scheme in ((1280, "light"), (390, "dark")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        assert sideways(page) == 0
        assert axe.run(page).response["violations"] == []
