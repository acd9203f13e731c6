"""Bytes as tokens, and real tokenizers of `tokenizers` and `transformers`, trained here on a few words."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.data.ingest import Rows, read_text
from cosmati.data.ingest.rows import ORIGIN_COLUMNS
from cosmati.data.tokens import ByteTokenizer, HuggingFaceTokenizer, token_dtype, tokenize
from cosmati.errors import DataError

TEXT = "the stone that the mason lays beside the stone"


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_there_and_back(text: str) -> None:
    for tokenizer in (ByteTokenizer(), ByteTokenizer(with_end=False)):
        tokens = tokenizer.encode(text)
        end = [] if tokenizer.end_id is None else [256]
        assert tokens.tolist() == [*text.encode(), *end]
        assert tokens.dtype == token_dtype(tokenizer)
        assert tokenizer.decode(tokens) == text
        assert np.array_equal(tokenizer.encode(text.encode()), tokens)


def test_sizes_and_digests_of_byte_tokenizers_differ() -> None:
    one, other = ByteTokenizer(), ByteTokenizer(with_end=False)
    assert (one.vocabulary_size, other.vocabulary_size) == (257, 256)
    assert one.digest != other.digest
    assert one.digest == ByteTokenizer().digest
    assert one.decode(np.array([0xE2, 0x82])) == "\ufffd"


def trained() -> Any:
    tokenizers = pytest.importorskip("tokenizers", reason="the extra `llm` isn't installed")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def test_a_tokenizer_of_tokenizers() -> None:
    own = trained()
    tokenizer = HuggingFaceTokenizer(own, end_id=0)
    tokens = tokenizer.encode(TEXT)
    assert tokens.tolist() == [*own.encode(TEXT).ids, 0]
    assert len(tokens) < len(TEXT)
    assert tokenizer.decode(tokens) == TEXT
    assert tokenizer.vocabulary_size == own.get_vocab_size()
    assert tokens.dtype == token_dtype(tokenizer) == "uint16"
    assert HuggingFaceTokenizer(own).encode("").tolist() == []
    assert tokenizer.digest == hashlib.sha256(f"{own.to_str()}\x000".encode()).hexdigest()
    assert tokenizer.digest != HuggingFaceTokenizer(own).digest
    with pytest.raises(DataError, match="isn't UTF-8 at byte 1"):
        tokenizer.encode(b"a\xff")


@pytest.mark.long
def test_a_tokenizer_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="the extra `llm` isn't installed")
    own = trained()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<end>", model_max_length=4)
    tokenizer = HuggingFaceTokenizer(fast)
    assert tokenizer.end_id == 0
    # Longer than model_max_length: nothing is cut.
    assert tokenizer.encode(TEXT).tolist() == [*own.encode(TEXT).ids, 0]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.vocabulary_size == own.get_vocab_size()


class Words:
    """A tokenizer in plain Python, with the methods of a slow one of transformers."""

    words = ("<end>", "stone", "mason")
    eos_token_id = 0

    def __len__(self) -> int:
        return len(self.words)

    def get_vocab(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [self.words.index(word) for word in text.split()]

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return " ".join(self.words[i] for i in ids)


def test_any_tokenizer_that_can_do_the_same() -> None:
    tokenizer = HuggingFaceTokenizer(Words())
    assert tokenizer.encode("mason stone").tolist() == [2, 1, 0]
    assert tokenizer.decode(np.array([2, 1, 0])) == "mason stone"
    text = json.dumps(["Words", [["<end>", 0], ["mason", 2], ["stone", 1]]])
    assert tokenizer.digest == hashlib.sha256(f"{text}\x000".encode()).hexdigest()


def test_tokenizers_that_would_lose_or_add_tokens_are_refused() -> None:
    for change in ("enable_truncation", "enable_padding"):
        own = trained()
        getattr(own, change)(**({"max_length": 4} if change == "enable_truncation" else {}))
        with pytest.raises(DataError, match="truncates or pads"):
            HuggingFaceTokenizer(own)
    with pytest.raises(DataError, match="end_id=3 is not one of the tokenizer's 3 tokens"):
        HuggingFaceTokenizer(Words(), end_id=3)
    with pytest.raises(DataError, match="A str is no tokenizer"):
        HuggingFaceTokenizer("gpt2")


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    (tmp_path / "a.txt").write_text("mason stone\nstone\nbrick\nmason\n")
    return read_text(tmp_path, class_of="unknown", separator="\n", on_error="record")


def test_rows_of_text_become_rows_of_tokens(rows: Rows) -> None:
    found = tokenize(rows, ByteTokenizer())
    assert dict(found.columns) == {"tokens": "ndarray:uint16"} | dict(ORIGIN_COLUMNS)
    for before, after in zip(rows, found, strict=True):
        assert after["tokens"].tolist() == [*before["text"].encode(), 256]
        assert {name: after[name] for name in ORIGIN_COLUMNS} == {name: before[name] for name in ORIGIN_COLUMNS}
    assert found.files == rows.files
    assert len(found.files) == 1


def test_rows_without_tokens_are_recorded(rows: Rows) -> None:
    class Lowercase(Words):
        """Knows no brick, and drops what it doesn't know."""

        eos_token_id = None  # type: ignore[assignment]

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [self.words.index(word) for word in text.split() if word in self.words]

    found = tokenize(rows, HuggingFaceTokenizer(Lowercase()))
    assert [row["tokens"].tolist() for row in found] == [[2, 1], [1], [2]]
    assert [(bad.file, bad.place) for bad in found.skipped] == [("a.txt", 3)]
    assert rows.skipped == ()  # the pass was the tokenized rows' own


def test_columns_to_keep(rows: Rows) -> None:
    with pytest.raises(DataError, match="Column 'x' holds no text"):
        tokenize(rows, ByteTokenizer(), column="x")
    with pytest.raises(DataError, match="have no column x"):
        tokenize(rows, ByteTokenizer(), keep=["x"])
    assert list(tokenize(rows, ByteTokenizer(), keep=[]).columns) == ["tokens", *ORIGIN_COLUMNS]
