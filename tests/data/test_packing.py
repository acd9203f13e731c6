"""Packing: nothing lost, nothing twice, every token's row known, and attention as if each document were alone."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.data.ingest import Rows, class_by_field, read_jsonl
from cosmati.data.packing import Pack, Packing, number_rows, pack, pack_rows
from cosmati.data.shards.encodings import encoding
from cosmati.data.tokens import ByteTokenizer, tokenize
from cosmati.errors import DataError

Table = list[dict[str, Any]]


def table(lengths: Sequence[int], classes: Sequence[int]) -> Table:
    """Return rows whose tokens are all different, with ids that aren't their places."""
    starts = np.cumsum([0, *lengths])
    return [
        {"tokens": np.arange(start, start + length), "row_id": 1000 - index, "class_id": kind}
        for index, (start, length, kind) in enumerate(zip(starts, lengths, classes, strict=False))
    ]


TABLES = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 2)), max_size=25).map(
    lambda pairs: table([length for length, _ in pairs], [kind for _, kind in pairs])
)
PACKINGS = st.builds(
    Packing,
    length=st.integers(1, 16),
    class_pure=st.booleans(),
    cut_rows=st.booleans(),
    num_open=st.integers(1, 4),
    pad_id=st.just(7),
)


@given(rows=TABLES, packing=PACKINGS)
def test_nothing_is_lost_and_nothing_is_twice(rows: Table, packing: Packing) -> None:
    packs = list(pack(rows, packing))
    found: dict[int, list[tuple[int, list[int]]]] = {}
    for one in packs:
        assert one.tokens.shape == (packing.length,)
        assert (one.tokens[one.spans[-1, 3] :] == packing.pad_id).all()
        for row, _, offset, tokens in one.pieces():
            found.setdefault(row, []).append((offset, tokens.tolist()))
    # Laid end to end by their offsets, the pieces are the row, without gap or overlap.
    assert found.keys() == {row["row_id"] for row in rows}
    for row in rows:
        whole: list[int] = []
        for offset, tokens in sorted(found[row["row_id"]]):
            assert offset == len(whole)
            whole += tokens
        assert whole == row["tokens"].tolist()


@given(rows=TABLES, packing=PACKINGS)
def test_every_span_is_a_piece_of_its_row(rows: Table, packing: Packing) -> None:
    by_id = {row["row_id"]: row for row in rows}
    for one in pack(rows, packing):
        for row, class_id, start, stop, offset in one.spans.tolist():
            assert class_id == by_id[row]["class_id"]
            assert one.tokens[start:stop].tolist() == by_id[row]["tokens"][offset : offset + stop - start].tolist()
        if packing.class_pure:
            assert len(set(one.spans[:, 1].tolist())) == 1


@given(rows=TABLES, packing=PACKINGS)
def test_packs_of_a_class_do_not_depend_on_other_classes(rows: Table, packing: Packing) -> None:
    if not packing.class_pure:
        return
    together = list(pack(rows, packing))
    for kind in range(3):
        alone = list(pack([row for row in rows if row["class_id"] == kind], packing))
        of_kind = [one for one in together if one.spans[0, 1] == kind]
        assert [one.tokens.tolist() for one in of_kind] == [one.tokens.tolist() for one in alone]


@given(rows=TABLES, length=st.integers(1, 16))
def test_cutting_is_the_stream_of_all_tokens_cut_at_every_length(rows: Table, length: int) -> None:
    packs = list(pack(rows, Packing(length=length, class_pure=False)))
    stream = np.concatenate([np.empty(0, np.int64), *(row["tokens"] for row in rows)])
    padded = np.append(stream, np.zeros(-len(stream) % length, np.int64)).reshape(-1, length)
    assert [one.tokens.tolist() for one in packs] == padded.tolist()


def best_fit(lengths: Sequence[int], length: int, num_open: int) -> list[list[tuple[int, int]]]:
    """Pack by the words of the docstring, with lists of (row, piece length)."""
    opened: list[list[tuple[int, int]]] = []
    done: list[list[tuple[int, int]]] = []

    def used(bin_: list[tuple[int, int]]) -> int:
        return sum(size for _, size in bin_)

    for row, total in enumerate(lengths):
        pieces = [length] * (total // length) + ([total % length] if total % length else [])
        for size in pieces:
            room = [length - used(b) - size for b in opened]
            fits = [i for i, r in enumerate(room) if r >= 0]
            if fits:
                chosen = opened[min(fits, key=lambda i: room[i])]
            else:
                if len(opened) == num_open:
                    done.append(opened.pop(max(range(num_open), key=lambda i: used(opened[i]))))
                chosen = []
                opened.append(chosen)
            chosen.append((row, size))
            if used(chosen) == length:
                done.append(opened.pop(next(i for i, b in enumerate(opened) if b is chosen)))
    return done + opened


@given(lengths=st.lists(st.integers(1, 30), max_size=30), length=st.integers(1, 16), num_open=st.integers(1, 4))
def test_without_cutting_pieces_go_where_they_leave_least_room(lengths: list[int], length: int, num_open: int) -> None:
    packing = Packing(length=length, class_pure=False, cut_rows=False, num_open=num_open)
    packs = list(pack(table(lengths, [0] * len(lengths)), packing))
    found = [[(1000 - row, len(tokens)) for row, _, _, tokens in one.pieces()] for one in packs]
    assert found == best_fit(lengths, length, num_open)
    cut = {row for bin_ in found for row, size in bin_ if size < lengths[row]}
    assert all(lengths[row] > length for row in cut)


@pytest.mark.usefixtures("alone")
def test_packing_is_lazy_and_holds_no_more_than_its_open_packs() -> None:
    def endless() -> Iterator[dict[str, Any]]:
        number = 0
        while True:
            yield {"tokens": np.arange(100) + number, "row_id": number, "class_id": number % 3}
            number += 1

    packs = pack(endless(), Packing(length=512))
    for _ in range(20):
        next(packs)
    tracemalloc.start()
    for _ in range(500):
        next(packs)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # 500 packs of 512 int64 would be 2 MB.
    assert peak < 1_000_000


@given(rows=TABLES, packing=PACKINGS)
def test_written_and_read_back_a_pack_is_the_same(rows: Table, packing: Packing) -> None:
    kinds = {"tokens": encoding(f"ndarray:uint16:{packing.length}"), "spans": encoding("ndarray:int64")}
    for one in pack(rows, packing, dtype="uint16"):
        row = {name: kinds[name].decode(memoryview(kinds[name].encode(value))) for name, value in one.to_row().items()}
        again = Pack.of_row(row)
        assert np.array_equal(again.tokens, one.tokens)
        assert np.array_equal(again.spans, one.spans)


@pytest.fixture
def source(tmp_path: Path) -> Rows:
    texts = ["mason", "a stone that is longer than a pack", "x", "brick", "mortar and lime", "?"]
    licences = ["MIT", "GPL", "MIT", "MIT", "GPL", "none"]
    lines = [f'{{"text": "{t}", "licence": "{c}"}}\n' for t, c in zip(texts, licences, strict=True)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    return read_jsonl(
        tmp_path,
        {"text": "str", "licence": "str"},
        class_of=class_by_field("licence", {"MIT": "open/permissive", "GPL": "open/copyleft"}),
        on_error="record",
    )


NAMES = ("open/copyleft", "open/permissive")


@pytest.mark.parametrize("cut_rows", [False, True])
def test_on_the_fly_and_at_write_time_are_the_same(cut_rows: bool, source: Rows) -> None:
    packing = Packing(length=12, cut_rows=cut_rows)
    tokens = tokenize(source, ByteTokenizer())
    written = pack_rows(tokens, packing, class_names=NAMES)
    rows = list(written)
    flying = list(pack(number_rows(tokens, NAMES), packing, dtype="uint16"))
    assert [row["tokens"].tolist() for row in rows] == [one.tokens.tolist() for one in flying]
    assert [row["spans"].tolist() for row in rows] == [one.spans.tolist() for one in flying]
    assert [written.class_path(row) for row in rows] == [NAMES[int(one.spans[0, 1])] for one in flying]
    assert {written.class_path(row) for row in rows} == set(NAMES)
    assert [(bad.place, bad.file) for bad in written.skipped] == [(6, "a.jsonl")]
    assert len(written.files) == 1


def test_a_written_pack_resolves_to_the_lines_of_the_file(source: Rows) -> None:
    lines = {row["origin_place"]: row for row in source}
    written = pack_rows(tokenize(source, ByteTokenizer()), Packing(length=12), class_names=NAMES)
    seen: dict[int, bytes] = {}
    for row in written:
        assert row.keys() == written.columns.keys()
        for name, kind in written.columns.items():
            encoding(kind).encode(row[name])
        for (file, place, sha256), piece in zip(row["origins"], Pack.of_row(row).pieces(), strict=True):
            line = lines[place]
            assert (file, sha256) == (line["origin_file"], line["origin_sha256"].hex())
            content = piece[3][piece[3] < 256].astype(np.uint8).tobytes()
            seen[place] = seen.get(place, b"") + content
            assert source.class_path(line) == written.class_path(row)
        assert (row["origin_file"], row["origin_place"]) == tuple(row["origins"][0][:2])
    assert seen == {place: line["text"].encode() for place, line in lines.items()}


def test_mixed_packs_need_a_class_of_their_own(source: Rows) -> None:
    tokens = tokenize(source, ByteTokenizer())
    mixed = Packing(length=12, class_pure=False)
    with pytest.raises(DataError, match="don't go together"):
        pack_rows(tokens, mixed, class_names=NAMES)
    with pytest.raises(DataError, match="don't go together"):
        pack_rows(tokens, Packing(length=12), class_names=NAMES, class_of="open/copyleft")
    rows = pack_rows(tokens, mixed, class_names=NAMES, class_of="open/copyleft")
    assert any(len(set(row["spans"][:, 1].tolist())) == 2 for row in rows)
    assert {rows.class_path(row) for row in rows} == {"open/copyleft"}
    with pytest.raises(DataError, match="isn't one of open/copyleft"):
        list(pack(number_rows(read_raising(tokens), NAMES[:1]), mixed))
    with pytest.raises(DataError, match="is missing, not an ndarray"):
        pack_rows(source, mixed, class_names=NAMES, class_of="open/copyleft")


def read_raising(rows: Rows) -> Rows:
    import dataclasses

    return dataclasses.replace(rows, on_error="raise")


def test_bad_rows_and_packs_are_refused() -> None:
    good = {"tokens": np.array([1, 2]), "row_id": 5, "class_id": 0}
    packing = Packing(length=4)
    for change, reason in (
        ({"tokens": np.array([], np.int64)}, "Row 5: its tokens are"),
        ({"tokens": np.array([1.0])}, "Row 5: its tokens are"),
        ({"tokens": np.array([[1]])}, "Row 5: its tokens are"),
        ({"tokens": np.array([70000])}, "beyond uint16"),
        ({"tokens": np.array([-1])}, "beyond uint16"),
    ):
        with pytest.raises(DataError, match=reason):
            list(pack([good | change], packing, dtype="uint16"))
    with pytest.raises(DataError, match="has no row_id"):
        list(pack([{"tokens": np.array([1]), "class_id": 0}], packing))
    with pytest.raises(DataError, match="pad_id=300 is beyond uint8"):
        list(pack([good], Packing(length=4, pad_id=300), dtype="uint8"))
    with pytest.raises(DataError, match="must be 1 at least"):
        Packing(length=0)
    one = next(pack([good], packing))
    for spans in ([[5, 0, 1, 2, 0]], [[5, 0, 0, 2, 0], [6, 0, 3, 4, 0]], [[5, 0, 0, 5, 0]], [[5, 0, 0, 0, 0]]):
        with pytest.raises(DataError, match="don't lie one after another"):
            Pack.of_row({"tokens": one.tokens, "spans": np.array(spans)})
    with pytest.raises(DataError, match="tokens \\[length\\]"):
        Pack.of_row({"tokens": one.tokens, "spans": np.zeros((0, 5), np.int64)})
