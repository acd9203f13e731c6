"""Each part of sealing by hand: keys by HKDF, nonces by HMAC, what is divided and how, and what a box is bound to."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger import sealing
from cosmati.ledger.sealing import (
    BLOCK_STEPS,
    SEALED,
    OperatorKeys,
    SealedClasses,
    boxes_of,
    divided,
    merged,
    open_box,
    sealed,
)
from cosmati.records.ledger import MicrobatchCell

SECRET, ORIGIN = bytes(range(32)), "log/one"
KEYS = OperatorKeys(SECRET, ORIGIN)
NAMES = ("", "x", "y", "x&y")


def cell(class_id: int, num_rows: int = 1, weight: float = 1.0) -> MicrobatchCell:
    return MicrobatchCell(class_id, 0, 0, 0, num_rows, weight, bytes(32))


def pair(name: str, column: str, block: int) -> bytes:
    info = json.dumps(["cosmati sealed column/1", ORIGIN, name, column, block], separators=(",", ":")).encode()
    return HKDF(SHA256(), 64, None, info).derive(SECRET)


def test_names_and_sizes_are_those_of_files_that_exist() -> None:
    assert (sealing.BLOCK_STEPS, sealing.SECRET_BYTES, sealing.KEY_BYTES) == (1024, 32, 32)
    assert (sealing.SEALED, sealing.SEALED_MARK, sealing.KEY_FILE) == ("sealed", b'"sealed":{', "columns.key")
    assert len(set(sealing.COLUMNS)) == len(sealing.COLUMNS) == 9


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_secret_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(LedgerError, match=rf"has {size} bytes, and 32 are one\. Put the run's own back"):
        OperatorKeys(bytes(size), ORIGIN)


def test_keys_are_halves_of_hkdf_and_nonces_are_macs() -> None:
    assert KEYS.origin == ORIGIN
    assert KEYS.commitment == hashlib.sha256(b"cosmati columns key" + SECRET).digest()
    for place in (("x", "loss", 0), ("x", "loss", 3), ("y", "entropy", 0)):
        both = pair(*place)
        assert KEYS(*place) == KEYS(*place) == both[:32]
        assert KEYS.nonce(*place, b"content") == hmac.digest(both[32:], b"content", "sha256")[:12]


def test_a_box_holds_its_content_padded_to_blocks_of_64_bytes() -> None:
    step = 2 * BLOCK_STEPS + 5
    for values, size in (({"0": 1.5}, 64), ({"0": "x" * 58}, 128), ({"0": "x" * 56}, 64), ({}, 64)):
        told = sealed({"step": step}, {"x": {"loss": values}}, KEYS, step)
        data = base64.b64decode(told[SEALED]["x"]["loss"])
        bound = json.dumps(["cosmati sealed column/1", ORIGIN, "x", "loss", step], separators=(",", ":")).encode()
        content = AESGCM(pair("x", "loss", 2)[:32]).decrypt(data[:12], data[12:], bound)
        assert len(content) == size
        assert json.loads(content) == values
        assert content.rstrip(b" ") == json.dumps(values, separators=(",", ":")).encode()
        assert data[:12] == hmac.digest(pair("x", "loss", 2)[32:], bound + b"\0" + content, "sha256")[:12]


def test_where_nothing_is_sealed_details_stay_as_they_are() -> None:
    clear = {"loss": 1.0}
    told = sealed(clear, {}, KEYS, 0)
    assert told == clear
    assert told is not clear
    assert boxes_of(told) == []


def test_boxes_are_told_with_class_and_column() -> None:
    told = sealed({"loss": None}, {"x": {"loss": {"": 1}, "entropy": {}}, "y": {"direction": {}}}, KEYS, 0)
    assert told["loss"] is None
    assert [one[:2] for one in boxes_of(told)] == [("x", "loss"), ("x", "entropy"), ("y", "direction")]
    assert {box for _, _, box in boxes_of(told)} == {box for own in told[SEALED].values() for box in own.values()}


@pytest.mark.parametrize("wrong", [{"x": {"loss": None}}, {"x": {"loss": "b", "step": "b"}}, {"x": []}, "x", 1])
def test_what_is_no_box_by_class_and_column_is_refused(wrong: Any) -> None:
    with pytest.raises(TamperError, match="isn't boxes by class and column: ") as caught:
        boxes_of({SEALED: wrong})
    assert repr(wrong) in str(caught.value)


def box(step: int, value: Any, column: str = "loss", name: str = "x") -> str:
    return str(sealed({}, {name: {column: value}}, KEYS, step)[SEALED][name][column])


@pytest.mark.parametrize("other", [("log/two", "x", "loss", 3), (ORIGIN, "y", "loss", 3), (ORIGIN, "x", "loss", 4)])
def test_a_box_that_was_moved_does_not_open_and_says_where(other: tuple[str, str, str, int]) -> None:
    key, own = KEYS("x", "loss", 0), box(3, {"": 2.5})
    assert open_box(own, key, ORIGIN, "x", "loss", 3) == {"": 2.5}
    said = rf"Step {other[3]}'s sealed {other[2]} of {other[1]} doesn't open: the box was changed or moved"
    with pytest.raises(TamperError, match=said):
        open_box(own, key, *other)
    with pytest.raises(TamperError, match="release the keys again"):
        open_box(own, KEYS("y", "loss", 0), ORIGIN, "x", "loss", 3)


@pytest.mark.parametrize("wrong", ["", "!", "AAAA", "no base64"])
def test_what_is_no_box_does_not_open(wrong: str) -> None:
    with pytest.raises(TamperError, match="doesn't open"):
        open_box(wrong, KEYS("x", "loss", 0), ORIGIN, "x", "loss", 3)
    with pytest.raises(TamperError, match="doesn't open"):
        open_box("!" + box(3, {"": 1.0}), KEYS("x", "loss", 0), ORIGIN, "x", "loss", 3)


def test_a_table_opens_with_the_keys_of_the_steps_block_and_leaves_the_rest() -> None:
    table = SealedClasses(ORIGIN, ("", "x"), 10)
    details = {"step": 25, "loss": None, SEALED: {"x": {"loss": "b1", "entropy": "b2"}}}
    asked: list[tuple[str, str, int]] = []

    def none(name: str, column: str, block: int) -> None:
        asked.append((name, column, block))

    open_now = table.open(details, 25, none)
    assert open_now == ({"step": 25, "loss": None}, [("x", "loss"), ("x", "entropy")])
    assert asked == [("x", "loss", 2), ("x", "entropy", 2)]
    assert table.open(details, 25, None) == open_now
    assert table.open({"loss": 1.0}, 3, KEYS) == ({"loss": 1.0}, [])
    assert SEALED in details, "what is given stays"


def test_what_is_opened_stands_in_its_place() -> None:
    table = SealedClasses(ORIGIN, ("", "x"), BLOCK_STEPS)
    details = {
        "loss": None,
        "gradient_norm": {"0": [1.0]},
        "update_norm": [None, None],
        SEALED: {
            "x": {
                "loss": box(7, {"": 0.5}),
                "gradient_norm": box(7, {"1": [2.0]}, "gradient_norm"),
                "entropy": box(7, {"1": [3.0]}, "entropy"),
                "update_norm": box(7, {"1": 4.0}, "update_norm"),
            }
        },
    }
    assert table.open(details, 7, KEYS) == (
        {
            "loss": 0.5,
            "gradient_norm": {"0": [1.0], "1": [2.0]},
            "entropy": {"1": [3.0]},
            "update_norm": [None, 4.0],
        },
        [],
    )


def test_cells_are_hidden_whose_name_is_left_in_that_column() -> None:
    table = SealedClasses(ORIGIN, NAMES, BLOCK_STEPS)
    left = [("x", "gradient_norm"), ("y", "entropy"), ("x&y", "gradient_norm")]
    assert table.hidden(left, [0, 1, 2, 3, 1], "gradient_norm") == [1, 3, 4]
    assert table.hidden(left, [0, 1, 2, 3], "entropy") == [2]
    assert table.hidden(left, [0, 1, 2, 3], "loss") == []
    assert table.hidden([], [1], "entropy") == []
    assert table.hidden(left, [4, 99, 1], "gradient_norm") == [2], "a class without a name isn't for this to refuse"


def test_a_table_of_an_entry_is_read_with_its_members() -> None:
    told = {SEALED: {"classes": ["x"], "block_steps": 1}}
    assert SealedClasses.of(told, ("x", "x&z", "z"), ORIGIN) == SealedClasses(ORIGIN, ("x", "x", ""), 1)
    with pytest.raises(TamperError, match="keys change after 0 steps"):
        SealedClasses.of({SEALED: {"classes": [], "block_steps": 0}}, (), ORIGIN)


def test_of_cells_in_the_open_only_the_updates_are_sealed() -> None:
    details = {"gradient_norm": {"0": [1.0]}, "update_norm": [2.0, None], "update_direction": None, "loss": 3.0}
    clear, parts = divided(details, (cell(0),), NAMES)
    assert clear == {**details, "update_norm": [None, None]}
    assert parts == {"x&y": {"update_norm": {"0": 2.0}}}
    assert details["update_norm"] == [2.0, None]
    assert divided(details, (cell(0),), ("", "")) == (details, {})


def test_what_each_column_has_of_a_cell_is_sealed_under_its_name() -> None:
    details = {
        "gradient_norm": {"0": [1.0], "1": [2.0], "2": [3.0]},
        "direction": {"1": ["d"]},
        "entropy": {"0": [0.0], "2": [0.5]},
        "loss": 3.0,
    }
    clear, parts = divided(details, (cell(0), cell(1), cell(2)), NAMES)
    assert clear == {"gradient_norm": {"0": [1.0]}, "direction": {}, "entropy": {"0": [0.0]}, "loss": 3.0}
    assert parts == {
        "x": {"gradient_norm": {"1": [2.0]}, "direction": {"1": ["d"]}},
        "y": {"gradient_norm": {"2": [3.0]}, "entropy": {"2": [0.5]}},
    }


def test_what_a_microbatch_of_several_classes_has_is_sealed_under_all_their_names() -> None:
    packed = {"0": [1.0], "1": [2.0], "2": [3.0], "9": [4.0]}
    details = {"cell_microbatches": [0, 0, 1, 1, 2], "packed_gradient_norm": packed, "loss": 1.0}
    clear, parts = divided(details, (cell(1), cell(2), cell(0), cell(2), cell(0)), NAMES)
    assert parts == {"x&y": {"packed_gradient_norm": {"0": [1.0]}}, "y": {"packed_gradient_norm": {"1": [2.0]}}}
    assert clear["packed_gradient_norm"] == {"2": [3.0], "9": [4.0]}, "nobody's is in the open"
    alone = {"packed_entropy": {"0": [1.0], "1": [2.0]}, "loss": None}
    assert divided(alone, (cell(0), cell(1)), NAMES)[1] == {"x": {"packed_entropy": {"1": [2.0]}}}


@pytest.mark.parametrize(
    ("cells", "name"),
    [
        ((cell(1),), "x"),
        ((cell(1), cell(2)), "x&y"),
        ((cell(1), cell(0)), ""),
        ((cell(1), cell(0, num_rows=0)), "x"),
        ((cell(1), cell(0, weight=0.0)), "x"),
        ((cell(1, num_rows=0), cell(2)), "y"),
        ((cell(1, num_rows=0), cell(2, weight=0.0)), ""),
    ],
)
def test_a_loss_is_sealed_where_only_sealed_classes_taught(cells: tuple[MicrobatchCell, ...], name: str) -> None:
    clear, parts = divided({"loss": 0.5, "step": 1}, cells, NAMES)
    assert parts == ({name: {"loss": {"": 0.5}}} if name else {})
    assert clear == {"loss": None if name else 0.5, "step": 1}


def test_a_loss_of_nought_is_sealed_and_none_is_none() -> None:
    assert divided({"loss": 0.0}, (cell(1),), NAMES)[1] == {"x": {"loss": {"": 0.0}}}
    assert divided({"loss": None}, (cell(1),), NAMES) == ({"loss": None}, {})
    assert divided({}, (cell(1),), NAMES) == ({}, {})


def test_parts_that_are_chosen_come_back_and_no_others() -> None:
    clear = {"loss": None, "gradient_norm": {"0": [1.0]}, "update_norm": [None, None]}
    parts = {
        "x": {"gradient_norm": {"1": [2.0]}, "loss": {"": 3.0}},
        "y": {"gradient_norm": {"2": [4.0]}, "update_norm": {"1": 5.0}, "entropy": {"0": [6.0]}},
    }
    assert merged(clear, parts, []) == clear
    assert merged(clear, parts, [("x", "loss"), ("y", "gradient_norm")]) == {
        **clear,
        "loss": 3.0,
        "gradient_norm": {"0": [1.0], "2": [4.0]},
    }
    assert merged(clear, parts, [("y", "update_norm"), ("y", "entropy"), ("y", "loss")]) == {
        **clear,
        "update_norm": [None, 5.0],
        "entropy": {"0": [6.0]},
    }
    assert clear["gradient_norm"] == {"0": [1.0]}
