"""Check that local links and pictures of README and docs lead somewhere: `python tools/check_links.py [BUILT]`.

Looked at are the Markdown files as they stand in the repository, the method cards as the docs' build writes them, and
with a folder of built pages these too: a link that works on one side may be broken on the other. Nothing is fetched.
"""

from __future__ import annotations

import importlib
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from os.path import normpath
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("*.md", "docs/**/*.md", "changelog.d/*.md")
MADE = ("docs/_build/", "docs/api/_generated/", "docs/methods/")
"""Folders of pages that a build writes. The cards are checked as they'd be written now."""
PICTURES = {".svg", ".png", ".jpg", ".jpeg", ".gif", ".webp"}
_FENCE = re.compile(
    r"^[ ]*(?P<fence>`{3,}|~{3,})(?P<info>[^\n]*)\n.*?(?:^[ ]*(?P=fence)[`~]*[ ]*$|\Z)", re.MULTILINE | re.DOTALL
)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_DIRECTIVE = re.compile(r"\{(?:image|figure|include|literalinclude)\}\s+(\S+)")
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(
    r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(\s*<?([^\s<>()]+(?:\([^\s()]*\))?)>?(?:\s+[\"'][^\"']*[\"'])?\s*\)"
)
_REFERENCE = re.compile(r"^ {0,3}\[[^\]^]+\]:\s+<?(\S+?)>?\s*$", re.MULTILINE)
_HEADING = re.compile(r"^(#{1,6})\s+(.+?)\s*#*$", re.MULTILINE)
_TARGET = re.compile(r"^\(([\w.-]+)\)=\s*$", re.MULTILINE)
_LEVELS = 3
"""Headings down to this level are anchors in the built docs (`myst_heading_anchors` of docs/conf.py)."""

Anchors = set[str]


class _Markup(HTMLParser):
    """Collects what HTML refers to, its anchors, and pictures without words."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: Anchors = set()
        self.wordless: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        self.targets += [found[name] for name in ("href", "src", "poster") if found.get(name)]
        self.targets += [part.split()[0] for part in found.get("srcset", "").split(",") if part.strip()]
        if tag == "img" and not found.get("alt", "").strip():
            self.wordless.append(found.get("src", ""))


def slug(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and MyST make it."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def read_markdown(text: str) -> tuple[list[str], Anchors, list[str]]:
    """Return the targets, anchors and wordless pictures of a Markdown page; code holds neither."""
    targets = [found for block in _FENCE.finditer(text) for found in _DIRECTIVE.findall(block["info"])]
    prose = _COMMENT.sub("", _FENCE.sub("", text))
    anchors: Anchors = set(_TARGET.findall(prose))
    for marks, heading in _HEADING.findall(prose):
        if len(marks) <= _LEVELS:
            name = first = slug(heading)
            count = 0
            while name in anchors:
                count += 1
                name = f"{first}-{count}"
            anchors.add(name)
    prose = _CODE.sub("", prose)
    markup = _Markup()
    markup.feed(prose)
    wordless = list(markup.wordless)
    for mark, words, target in _links(prose):
        targets.append(target)
        wordless += [target] if mark and not words.strip() else []
    return [*targets, *_REFERENCE.findall(prose), *markup.targets], anchors | markup.anchors, wordless


def _links(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the mark (of a picture), words and target of each link, those within a link's words too."""
    for mark, words, target in _LINK.findall(text):
        yield mark, words, target
        yield from _links(words)


def read_built(text: str) -> tuple[list[str], Anchors, list[str]]:
    """Return the targets, anchors and wordless pictures of a built page."""
    markup = _Markup()
    markup.feed(text)
    return markup.targets, markup.anchors, markup.wordless


def broken(pages: Mapping[Path, str]) -> Iterator[str]:
    """Yield a sentence for each target of the pages, by their absolute paths, that isn't there.

    A target may be another page or any file or folder on disk. What names a scheme or a host isn't looked at.
    """
    read = {p: (read_built if p.suffix == ".html" else read_markdown)(text) for p, text in pages.items()}
    anchors = {page: found for page, (_, found, _) in read.items()}
    for page, (targets, _, wordless) in read.items():
        for target in dict.fromkeys(targets):
            if why := _why_broken(page, target, anchors):
                yield f"{_shown(page)}: {target} {why}"
        if page.suffix == ".md":
            yield from (
                f"{_shown(page)}: {one} has no words in place of the picture. Add alt text." for one in wordless
            )


def _why_broken(page: Path, target: str, anchors: Mapping[Path, Anchors]) -> str:
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return ""
    if target.startswith("/"):
        return "is a path from the root of a host. Write it relative to the page."
    path = Path(normpath(page.parent / unquote(parts.path))) if parts.path else page
    if path not in anchors and not path.exists():
        return "isn't there. Mend the path, or put the file there."
    fragment = unquote(parts.fragment)
    if fragment and path in anchors and fragment not in anchors[path]:
        return f"names no heading or anchor of {_shown(path)}. Its headings may have changed."
    return _why_no_picture(path) if path.suffix in PICTURES else ""


def _why_no_picture(path: Path) -> str:
    content = path.read_bytes()
    if not content:
        return "is an empty file. Draw it again."
    if path.suffix == ".svg":
        try:
            ET.fromstring(content)  # noqa: S314  (our own file)
        except ET.ParseError as error:
            return f"isn't well-formed SVG ({error}). Draw it again."
    return ""


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def source_pages() -> dict[Path, str]:
    """Return the text of each Markdown page of the repository, the method cards among them."""
    sys.path.insert(0, str(ROOT / "docs"))
    cards = importlib.import_module("cards.cards")
    files = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    texts = {path: path.read_text("utf-8") for path in files if not _shown(path).startswith(MADE)}
    return texts | {ROOT / "docs" / "methods" / name: text for name, text in cards.card_pages().items()}


def built_pages(folder: Path) -> dict[Path, str]:
    """Return the text of each built page in a folder."""
    return {path.resolve(): path.read_text("utf-8") for path in sorted(folder.rglob("*.html"))}


def main(arguments: list[str]) -> int:
    """Print what is broken; return the exit status."""
    pages = source_pages()
    for folder in map(Path, arguments):
        found = built_pages(folder)
        if not found:
            print(f"{folder} holds no built pages. Build them first: make docs")
            return 1
        pages |= found
    wrong = list(broken(pages))
    print("\n".join(wrong) or f"{len(pages)} pages: every local link and picture leads somewhere.")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
