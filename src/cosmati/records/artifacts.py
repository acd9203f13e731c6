"""What a ledger says of preparation artifacts: in words, and what may be wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EVALUATION_DATA = "evaluation data"
KINDS = ("tokenizer", "base weights", "statistics", EVALUATION_DATA, "reference model")
ARTIFACT = "artifact: "
"""Before a label, in the digests of a run's record."""
SIGNED, UNGOVERNED = "signed", "ungoverned"
_TEXTS = ("kind", "name", "digest", "origin")


def words_of(facts: Mapping[str, Any]) -> str:
    """Return in words what an entry says of an artifact, without its label."""
    if facts["state"] == SIGNED:
        sources = facts["provenance"]["sources"]
        state = "signed, as " + ", ".join(f"{one['target']} of the authority {one['root'][:12]}" for one in sources)
    else:
        state = f"{UNGOVERNED}: nobody vouches for it"
    content = facts["digest"][:16] or "its content isn't told"
    return f"{state}; {content}" + (f", from {facts['origin']}" if facts["origin"] else "")


def signed_by(source: Mapping[str, Any]) -> str:
    """Return in words by whom a source was signed, of what an entry says of it."""
    keys = ", ".join(keyid[:12] for keyid in source["keyids"])
    return f"{source['target']}, signed by {keys} of {source['root'][:12]}"


def label_of(facts: Mapping[str, Any]) -> str:
    """Return the kind that an entry says, and the name where there is one."""
    return f"{facts['kind']} {facts['name']}".rstrip()


def problem_with_artifacts(told: object) -> str:
    """Return what isn't right about what an entry says of its artifacts; empty for nothing."""
    if not isinstance(told, list) or not told:
        return "what it says of preparation artifacts is no list of them"
    labels = set[str]()
    for one in told:
        if not isinstance(one, dict) or not all(isinstance(one.get(name), str) for name in _TEXTS):
            return "a preparation artifact doesn't say its kind, name, digest and origin"
        label = label_of(one)
        if one["kind"] not in KINDS or not is_digest(one["digest"]):
            return f"the preparation artifact {label!r} is of no known kind, or its digest is none"
        if one.get("state") not in (SIGNED, UNGOVERNED) or (one["state"] == SIGNED) != _names_sources(one):
            return f"the {label} is neither signed by somebody nor ungoverned"
        if label in labels:
            return f"it names the {label} twice"
        labels.add(label)
    return ""


def is_digest(text: str) -> bool:
    """Say whether a text is a digest in hex, or empty where nobody can tell one."""
    return set(text) <= set("0123456789abcdef") and len(text) <= 128


def _names_sources(one: Mapping[str, Any]) -> bool:
    told = one.get("provenance")
    sources = told.get("sources") if isinstance(told, dict) else None
    if not isinstance(sources, list) or not sources:
        return False
    return all(isinstance(s, dict) and all(isinstance(s.get(n), str) for n in ("target", "root")) for s in sources)
