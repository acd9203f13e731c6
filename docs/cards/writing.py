"""Pieces of Markdown that cards and their overview share."""

from __future__ import annotations


def raw(html: str) -> list[str]:
    """Return lines that stand in the page as they are."""
    return ["```{raw} html", html, "```", ""]


def cell(text: str) -> str:
    """Return a text that fits into a table's cell."""
    return text.replace("|", "\\|").replace("\n", " ")
