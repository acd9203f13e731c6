"""What the link check finds, and what it lets be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_links import broken, built_pages, main, read_markdown, slug

SVG = '<svg xmlns="http://www.w3.org/2000/svg"/>'


def found(folder: Path, text: str, *, name: str = "page.md") -> list[str]:
    """Return what is broken of a page that stands beside `other.md` and three pictures."""
    (folder / "fine.svg").write_text(SVG)
    (folder / "cut.svg").write_text(SVG[:20])
    (folder / "empty.png").touch()
    (folder / "some folder").mkdir(exist_ok=True)
    other = "# Other\n\n## A `code` heading, with a [link](fine.svg)\n\n## Twice\n\n## Twice\n\n(a-target)=\n"
    pages = {folder / name: text, folder / "other.md": other}
    (folder / "other.md").write_text(other)
    return list(broken(pages))


@pytest.mark.parametrize(
    "text",
    [
        "[x](other.md) [x](other.md#twice-1) [x](other.md#a-target) [x](some%20folder) [x](#here)\n\n# Here",
        "[x](other.md#a-code-heading-with-a-link)",
        "[x](https://nowhere.example/a#b) [x](mailto:a@nowhere.example) <https://nowhere.example>",
        "`[x](gone.md)` and ``[`x`](gone.md)``",
        "```text\n[x](gone.md)\n<img src=gone.png>\n```",
        "````md\n```\n[x](gone.md)\n```\n````",
        "![words](fine.svg) <img alt='words' src='fine.svg'> [![words](fine.svg)](other.md)",
        "[x][one]\n\n[one]: other.md",
        '[x](other.md "a title")',
        "<a id='spot'></a> [x](#spot)",
        "```{image} fine.svg\n:alt: words\n```",
        "see [a, b] (and gone.md)",
        "<!-- [x](gone.md) -->",
        "- a list\n\n  ```\n  [x](gone.md)\n  ```\n",
    ],
)
def test_what_leads_somewhere_is_let_be(tmp_path: Path, text: str) -> None:
    assert found(tmp_path, text) == []


@pytest.mark.parametrize(
    ("text", "target", "why"),
    [
        ("[x](gone.md)", "gone.md", "isn't there"),
        ("[x](gone.md#part)", "gone.md#part", "isn't there"),
        ("[a [nested] one](gone.md)", "gone.md", "isn't there"),
        ("[x](#nowhere)", "#nowhere", "names no heading"),
        ("[x](other.md#twice-2)", "other.md#twice-2", "names no heading"),
        ("[x](other.md#Twice)", "other.md#Twice", "names no heading"),
        ("[x][one]\n\n[one]: gone.md", "gone.md", "isn't there"),
        ("![words](gone.png)", "gone.png", "isn't there"),
        ("[![words](gone.png)](other.md)", "gone.png", "isn't there"),
        ("```\ncode\n```\n[x](gone.md)", "gone.md", "isn't there"),
        ("<img alt='words' src='gone.png'>", "gone.png", "isn't there"),
        ("<source srcset='fine.svg 1x, gone.png 2x'>", "gone.png", "isn't there"),
        ("<a href='gone.html'>x</a>", "gone.html", "isn't there"),
        ("```{image} gone.png\n:alt: words\n```", "gone.png", "isn't there"),
        ("```{include} gone.md\n```", "gone.md", "isn't there"),
        ("[x](/other.md)", "/other.md", "from the root"),
        ("![words](cut.svg)", "cut.svg", "isn't well-formed"),
        ("![words](empty.png)", "empty.png", "is an empty file"),
        ("![](fine.svg)", "fine.svg", "no words"),
        ("<img src='fine.svg'>", "fine.svg", "no words"),
        ("#### Too deep\n\n[x](#too-deep)", "#too-deep", "names no heading"),
    ],
)
def test_what_is_broken_is_said(tmp_path: Path, text: str, target: str, why: str) -> None:
    (said,) = found(tmp_path, text)
    assert said.startswith(f"{tmp_path / 'page.md'}: {target} ")
    assert why in said


def test_a_built_page_is_read_as_html(tmp_path: Path) -> None:
    page = '<h1 id="top">`[x](gone.md)`</h1><a href="#top"></a><img src="fine.svg"><a href="other.md#twice"></a>'
    assert found(tmp_path, page, name="page.html") == []
    (said,) = found(tmp_path, page.replace("#top", "#bottom"), name="page.html")
    assert "#bottom names no heading or anchor" in said
    (tmp_path / "page.html").write_text(page)
    assert built_pages(tmp_path) == {tmp_path / "page.html": page}


def test_a_folder_without_pages_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page.md").write_text("[x](gone.md)")
    monkeypatch.setattr("tools.check_links.source_pages", lambda: {tmp_path / "page.md": "[x](gone.md)"})
    assert main([str(tmp_path / "built")]) == 1
    assert "Build them first: make docs" in capsys.readouterr().out
    assert main([]) == 1
    assert "gone.md isn't there" in capsys.readouterr().out
    monkeypatch.setattr("tools.check_links.source_pages", lambda: {tmp_path / "page.md": "fine"})
    assert main([]) == 0


def test_anchors_are_made_as_the_hosts_make_them() -> None:
    assert slug("What `cosmati` is, and *isn't*: v1.2") == "what-cosmati-is-and-isnt-v12"
    _, anchors, _ = read_markdown("# A b\n\n## A b\n\n```\n# no heading\n```\n\n(own)=\n")
    assert anchors == {"a-b", "a-b-1", "own"}
