"""Details beside the tree: a line of canonical JSON (RFC 8785) for each entry that has them, in order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import rfc8785

from cosmati.errors import LedgerError, TamperError
from cosmati.records.ledger import NO_DETAILS, AmendEntry, Entry, EvaluationEntry, RunEntry, StepEntry

DETAILS_FILE = "details.jsonl"


def encode_details(details: Mapping[str, object]) -> bytes:
    """Return the details' line, without the newline.

    Raises:
        LedgerError: they aren't JSON: NaN or infinity, an integer over 2**53, a key that isn't text, another
        type.
    """
    try:
        return rfc8785.dumps(dict(details))  # type: ignore[arg-type]  # what isn't JSON raises
    except (ValueError, TypeError, RecursionError) as error:
        raise LedgerError(
            f"These details aren't canonical JSON: {error}. Write null for what isn't finite, text for "
            "integers over "
            "2**53, and plain dicts, lists, text and numbers for the rest."
        ) from error


def details_digest(details: Mapping[str, object]) -> bytes:
    """Return the SHA-256 of the details' line: what an entry commits to."""
    return hashlib.sha256(encode_details(details)).digest()


def committed_digest(entry: Entry) -> bytes:
    """Return the details digest of an entry; `NO_DETAILS` for kinds that have none."""
    if isinstance(entry, RunEntry | StepEntry | AmendEntry | EvaluationEntry):
        return entry.details_digest
    return NO_DETAILS


def check_line(line: bytes, entry: Entry, where: str) -> bytes | None:
    """Return a stored line without its newline where the entry has details, after checking it.

    Raises:
        TamperError: it isn't the line that the entry commits to.
    """
    if hashlib.sha256(line[:-1]).digest() != committed_digest(entry) or line[-1:] != b"\n":
        raise TamperError(
            f"{where} doesn't hold the details that the entry commits to: the line was changed, dropped "
            "or moved. "
            "Restore details.jsonl from a copy."
        )
    return line[:-1]


def decode_details(line: bytes) -> dict[str, object]:
    """Return the details of a line.

    Raises:
        TamperError: it isn't a JSON object.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TamperError(f"A details line isn't JSON: {error}. Restore details.jsonl from a copy.") from error
    if not isinstance(value, dict):
        raise TamperError("A details line isn't a JSON object. Restore details.jsonl from a copy.")
    return value
