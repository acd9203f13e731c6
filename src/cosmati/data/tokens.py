"""From text to tokens: bytes, or any Hugging Face tokenizer; and rows of text to rows of tokens."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cosmati.data.ingest.people import PEOPLE
from cosmati.data.ingest.rows import ORIGIN_COLUMNS, Reading, Row, Rows
from cosmati.errors import DataError

Tokens = NDArray[np.integer[Any]]


class Tokenizer(Protocol):
    """What turns text into tokens.

    Attributes:
        vocabulary_size: tokens are below it.
        end_id: ends each document; None if none does.
        digest: SHA-256 in hex of all that the tokens depend on.
    """

    @property
    def vocabulary_size(self) -> int:
        """Tokens are below it."""
        ...

    @property
    def end_id(self) -> int | None:
        """Ends each document; None if none does."""
        ...

    @property
    def digest(self) -> str:
        """SHA-256 in hex of all that the tokens depend on."""
        ...

    def encode(self, text: str | bytes) -> Tokens:
        """Return a document's tokens, int [tokens], its end among them."""
        ...

    def decode(self, tokens: Tokens) -> str:
        """Return the text of tokens; ends of documents are no text."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """Each byte of UTF-8 is a token, 0 to 255; 256 ends a document.

    Args:
        with_end: end each document; without, there are 256 tokens, and an empty document has none.
    """

    with_end: bool = True

    @property
    def vocabulary_size(self) -> int:
        """257, or 256 without an end."""
        return 257 if self.with_end else 256

    @property
    def end_id(self) -> int | None:
        """256, or None without an end."""
        return 256 if self.with_end else None

    @property
    def digest(self) -> str:
        """SHA-256 in hex of the tokenizer's name."""
        return hashlib.sha256(f"cosmati bytes, {self.vocabulary_size} tokens".encode()).hexdigest()

    def encode(self, text: str | bytes) -> Tokens:
        """Return bytes as tokens: uint16 [bytes + 1], or uint8 [bytes] without an end."""
        data = np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8)
        return np.append(data.astype(np.uint16), np.uint16(256)) if self.with_end else data

    def decode(self, tokens: Tokens) -> str:
        """Return the text; bytes that aren't UTF-8, as where a document is cut, become U+FFFD."""
        tokens = np.asarray(tokens)
        return tokens[tokens < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


@dataclass(frozen=True, eq=False)
class HuggingFaceTokenizer:
    """A `tokenizers.Tokenizer`, or a tokenizer of `transformers`; told apart by what they can do.

    Args:
        tokenizer: it must not truncate or pad. Its own special tokens aren't added, only the end.
        end_id: ends each document. None takes `eos_token_id`, where the tokenizer says one, and otherwise none.

    Raises:
        DataError: it truncates or pads, or has neither form.
    """

    tokenizer: Any
    end_id: int | None = None

    def __post_init__(self) -> None:
        if not hasattr(self._core, "to_str") and not hasattr(self.tokenizer, "get_vocab"):
            msg = (
                f"A {type(self.tokenizer).__name__} is no tokenizer of tokenizers or transformers. "
                "Write a class with the methods of cosmati.data.tokens.Tokenizer."
            )
            raise DataError(msg)
        if getattr(self._core, "truncation", None) or getattr(self._core, "padding", None):
            msg = "The tokenizer truncates or pads: tokens would be lost or added."
            raise DataError(f"{msg} Call no_truncation() and no_padding().")
        if self.end_id is None:
            object.__setattr__(self, "end_id", getattr(self.tokenizer, "eos_token_id", None))
        if self.end_id is not None and not 0 <= self.end_id < self.vocabulary_size:
            raise DataError(f"end_id={self.end_id} is not one of the tokenizer's {self.vocabulary_size} tokens.")

    @property
    def _core(self) -> Any:  # noqa: ANN401  (told apart by what it can do)
        return getattr(self.tokenizer, "backend_tokenizer", self.tokenizer)

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens, added ones included."""
        if hasattr(self.tokenizer, "get_vocab_size"):
            return int(self.tokenizer.get_vocab_size())
        return len(self.tokenizer)

    @property
    def digest(self) -> str:
        """SHA-256 in hex of the tokenizer's own serialisation, or of class name and vocabulary where it has none."""
        if hasattr(self._core, "to_str"):
            text = self._core.to_str()
        else:
            text = json.dumps([type(self.tokenizer).__name__, sorted(self.tokenizer.get_vocab().items())])
        return hashlib.sha256(f"{text}\0{self.end_id}".encode()).hexdigest()

    def encode(self, text: str | bytes) -> Tokens:
        """Return a document's tokens: the smallest unsigned integers that hold the vocabulary."""
        if isinstance(text, bytes):
            try:
                text = text.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"isn't UTF-8 at byte {error.start}, and this tokenizer reads text") from error
        found = self.tokenizer.encode(text, add_special_tokens=False)
        ids = list(getattr(found, "ids", found))
        return np.asarray(ids if self.end_id is None else [*ids, self.end_id], dtype=token_dtype(self))

    def decode(self, tokens: Tokens) -> str:
        """Return the text of tokens."""
        ids = [token for token in np.asarray(tokens).tolist() if token != self.end_id]
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


def token_dtype(tokenizer: Tokenizer) -> str:
    """Return the smallest of `uint8`, `uint16`, `uint32` that holds a tokenizer's vocabulary."""
    return str(np.min_scalar_type(tokenizer.vocabulary_size - 1))


def tokenize(rows: Rows, tokenizer: Tokenizer, *, column: str = "text", keep: Sequence[str] | None = None) -> Rows:
    """Turn a column of text into the column `tokens`; each row stays a row, with its class and origin.

    A row without a token is bad, since shards hold no empty array; only tokenizers without an end have such rows.

    Args:
        rows: of a reader.
        tokenizer: for instance `ByteTokenizer()`.
        column: of text or bytes; it's left out afterwards.
        keep: other columns to keep; None means all, and those of origin and people always stay. Classes must still be
            found in what is kept.

    Raises:
        DataError: there is no such column, or it holds neither text nor bytes.
    """
    if rows.columns.get(column) not in {"str", "bytes"}:
        there = ", ".join(f"{name} ({encoding})" for name, encoding in rows.columns.items())
        raise DataError(f"Column {column!r} holds no text to tokenize. There is {there}. Rename one.")
    wanted = list(rows.columns if keep is None else keep)
    unknown = [name for name in wanted if name not in rows.columns]
    if unknown or ("tokens" in wanted and column != "tokens"):
        what = f"have no column {', '.join(unknown)}" if unknown else "have a column 'tokens' already"
        raise DataError(f"The rows {what}. Name in keep= which of {', '.join(rows.columns)} to keep.")
    kept = [name for name in rows.columns if name != column and (name in wanted or name in (*ORIGIN_COLUMNS, *PEOPLE))]
    dtype = token_dtype(tokenizer)

    def read(reading: Reading) -> Iterator[Row]:
        for row in rows.pass_over(reading):
            try:
                tokens = tokenizer.encode(row[column]).astype(dtype, copy=False)
                if not len(tokens):
                    raise DataError("has no token: let the tokenizer end each document, or leave empty ones out")
            except DataError as error:
                reading.reject(row["origin_file"], row["origin_place"], str(error), error)
                continue
            yield {"tokens": tokens} | {name: row[name] for name in kept}

    columns = {"tokens": f"ndarray:{dtype}"} | {name: rows.columns[name] for name in kept}
    return dataclasses.replace(rows, columns=MappingProxyType(columns), read=read)
