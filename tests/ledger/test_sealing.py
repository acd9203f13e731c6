"""Sealing as laws: what is divided can be merged, a box opens in its own place alone, and nothing tells its content."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.sealing import (
    BLOCK_STEPS,
    COLUMNS,
    SEALED,
    OperatorKeys,
    SealedClasses,
    boxes_of,
    divided,
    merged,
    open_box,
    seal_names,
    sealed,
)
from cosmati.records.joint_classes import members_of
from cosmati.records.ledger import MicrobatchCell

CLASSES = ("open", "pii/names", "pii/faces", "open&pii/names", "pii/faces&pii/names")
SENSITIVE = ("pii/names", "pii/faces")
UPDATES = "pii/faces&pii/names"
ROUTES = ((1.0, 1.0, 1.0), (0.0, 0.5, 1.0), (0.0, 0.0, 0.0))
KEYS = OperatorKeys(bytes(range(32)), "cosmati/one")
TABLE = SealedClasses("cosmati/one", seal_names(CLASSES, SENSITIVE), BLOCK_STEPS)
numbers = st.floats(0.001, 1000)
values = st.one_of(st.none(), numbers)


@st.composite
def steps(draw: st.DrawFn) -> tuple[dict[str, Any], tuple[MicrobatchCell, ...]]:
    """Draw a step's details and cells, of packs too: cells of a microbatch stand together."""
    is_packed = draw(st.booleans())
    owners = [m for m in range(draw(st.integers(1, 4))) for _ in range(draw(st.integers(1, 3)) if is_packed else 1)]
    cells = tuple(
        MicrobatchCell(
            draw(st.integers(0, len(CLASSES) - 1)),
            0,
            0,
            draw(st.integers(0, 2)),
            draw(st.integers(0, 3)),
            1.0,
            bytes(32),
        )
        for _ in owners
    )
    alone = {str(n): m for n, m in enumerate(owners) if owners.count(m) == 1}
    row = st.lists(values, min_size=3, max_size=3)
    details: dict[str, Any] = {
        "step": 7,
        "gradient_norm": {n: draw(row) for n in alone},
        "update_norm": draw(st.one_of(st.none(), row)),
        "loss": draw(values),
    }
    if is_packed:
        details["cell_microbatches"] = owners
        shared = {str(m) for m in owners if owners.count(m) > 1}
        details["packed_gradient_norm"] = {m: draw(row) for m in sorted(shared)}
    return details, cells


def is_sensitive(cell: MicrobatchCell) -> bool:
    return bool({*members_of(CLASSES[cell.class_id])} & {*SENSITIVE})


@pytest.mark.long
@given(steps())
def test_what_is_divided_is_what_was_there_and_hides_what_the_rules_say(
    step: tuple[dict[str, Any], tuple[MicrobatchCell, ...]],
) -> None:
    details, cells = step
    clear, parts = divided(details, cells, TABLE.names)
    everything = {(name, column) for name, own in parts.items() for column in own}
    assert merged(clear, parts, everything) == details
    owners = details.get("cell_microbatches", range(len(cells)))
    for number, cell in enumerate(cells):
        assert (str(number) in clear["gradient_norm"]) == (
            str(number) in details["gradient_norm"] and not is_sensitive(cell)
        )
    for m in details.get("packed_gradient_norm", {}):
        hidden = any(is_sensitive(c) for c, o in zip(cells, owners, strict=True) if str(o) == m)
        assert (m in clear["packed_gradient_norm"]) == (not hidden)
    taught = [cell for cell in cells if cell.num_rows]
    assert {*(clear["update_norm"] or ())} <= {None}, "momentum is in all of them"
    assert clear["loss"] == (None if taught and all(map(is_sensitive, taught)) else details["loss"])
    for name, own in parts.items():
        assert {*members_of(name)} <= {*SENSITIVE}
        assert {*own} <= {*COLUMNS}


@pytest.mark.long
@given(steps(), st.integers(0, 3 * BLOCK_STEPS))
def test_what_is_sealed_is_opened_by_its_keys_and_by_no_fewer(
    step: tuple[dict[str, Any], tuple[MicrobatchCell, ...]], number: int
) -> None:
    details, cells = step
    told = sealed(*divided(details, cells, TABLE.names), KEYS, number)
    told = json.loads(json.dumps(told))
    assert TABLE.open(told, number, KEYS) == (details, [])
    boxes = {(name, column) for name, column, _ in boxes_of(told)}
    clear, left = TABLE.open(told, number, None)
    assert {*left} == boxes
    assert clear == {name: value for name, value in told.items() if name != SEALED}
    only = TABLE.open(told, number, lambda name, column, block: KEYS(name, column, block) if column == "loss" else None)
    assert {*only[1]} == {one for one in boxes if one[1] != "loss"}
    assert only[0]["loss"] == details["loss"]


def box_of(told: object, step: int = 5, keys: OperatorKeys = KEYS) -> str:
    details = sealed({}, {"pii/names": {"gradient_norm": {"0": told}}}, keys, step)
    return str(details[SEALED]["pii/names"]["gradient_norm"])


def test_a_box_opens_in_its_own_place_and_nowhere_else() -> None:
    key, here = KEYS("pii/names", "gradient_norm", 0), ("cosmati/one", "pii/names", "gradient_norm", 5)
    box = box_of([0.25, None])
    assert open_box(box, key, *here) == {"0": [0.25, None]}
    moved = [("cosmati/two", *here[1:]), (here[0], "pii/faces", *here[2:]), (*here[:2], "loss", 5), (*here[:3], 6)]
    for other in moved:
        with pytest.raises(TamperError, match="moved"):
            open_box(box, key, *other)
    data = base64.b64decode(box)
    for place in range(0, len(data), 7):
        flipped = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        with pytest.raises(TamperError):
            open_box(base64.b64encode(flipped).decode(), key, *here)
    for wrong in ("", "AAAA", "!", box[:-4], f"{box[:8]}!{box[8:]}", f"{box}\n", f" {box}"):
        with pytest.raises(TamperError):
            open_box(wrong, key, *here)


def test_a_box_is_plain_aes_gcm_under_a_key_that_changes_with_class_column_block_and_run() -> None:
    data = base64.b64decode(box_of([0.25]))
    bound = b'["cosmati sealed column/1","cosmati/one","pii/names","gradient_norm",5]'
    found = AESGCM(KEYS("pii/names", "gradient_norm", 0)).decrypt(data[:12], data[12:], bound)
    assert json.loads(found) == {"0": [0.25]}
    keys = {KEYS(name, column, block) for name in CLASSES for column in COLUMNS for block in range(3)}
    keys |= {OperatorKeys(bytes(32), "cosmati/one")("open", "loss", 0), OperatorKeys(bytes(32), "b")("open", "loss", 0)}
    assert len(keys) == len(CLASSES) * len(COLUMNS) * 3 + 2
    assert {len(key) for key in keys} == {32}
    of_steps = [box_of([0.5], step) for step in (BLOCK_STEPS - 1, BLOCK_STEPS)]
    for step, box in zip((BLOCK_STEPS - 1, BLOCK_STEPS), of_steps, strict=True):
        for block in (0, 1):
            key, at = KEYS("pii/names", "gradient_norm", block), ("cosmati/one", "pii/names", "gradient_norm", step)
            if block == step // BLOCK_STEPS:
                assert open_box(box, key, *at) == {"0": [0.5]}
            else:
                with pytest.raises(TamperError):
                    open_box(box, key, *at)


@given(st.lists(numbers, min_size=1, max_size=3), st.lists(numbers, min_size=1, max_size=3))
def test_the_same_content_gives_the_same_box_and_another_shares_no_nonce(one: list[float], other: list[float]) -> None:
    assert box_of(one) == box_of(one)
    nonces = {base64.b64decode(box)[:12] for box in (box_of(one), box_of(other), box_of(one, 6))}
    assert len(nonces) == 2 + (one != other)
    assert (len(base64.b64decode(box_of(one))) - 12 - 16) % 64 == 0, "how long the digits are isn't told"


def test_what_isnt_of_the_form_is_refused() -> None:
    for wrong in ([], {"pii": 3}, {"pii": {"loss": 3}}, {"pii": {"colour": "x"}}, 3):
        with pytest.raises(TamperError, match="boxes by class and column"):
            boxes_of({SEALED: wrong})
    for wrong in ({}, {"classes": 3, "block_steps": 1}, {"classes": [], "block_steps": "x"}, 3):
        with pytest.raises(TamperError, match="form that runs write"):
            SealedClasses.of({SEALED: wrong}, CLASSES, "a")
    with pytest.raises(TamperError, match="after 0 steps"):
        SealedClasses.of({SEALED: {"classes": [], "block_steps": 0}}, CLASSES, "a")
    with pytest.raises(LedgerError, match="31 bytes"):
        OperatorKeys(bytes(31), "a")


def test_a_class_is_sealed_under_its_sensitive_members_names() -> None:
    classes = ("a/b", "a/b&c", "c", "c&d", "d", "a/b&c&d")
    assert seal_names(classes, ["d", "a/b"]) == ("a/b", "a/b", "", "d", "d", "a/b&d")
    assert seal_names(classes, []) == ("",) * 6


def test_what_an_entry_says_is_sealed_is_read_by_class() -> None:
    told = {SEALED: {"classes": ["d", "a/b"], "block_steps": 7}}
    found = SealedClasses.of(told, ("c&d", "d", "e", "a/b"), "log")
    assert found == SealedClasses("log", ("d", "d", "", "a/b"), 7)
    assert SealedClasses.of({}, ("c&d", "d"), "log") == SealedClasses("log", ("", ""), BLOCK_STEPS)
    for steps in (0, -1):
        with pytest.raises(TamperError, match=f"keys change after {steps} steps"):
            SealedClasses.of({SEALED: {"classes": [], "block_steps": steps}}, (), "log")
    for nonsense in (
        {"classes": []},
        {"classes": 3, "block_steps": 1},
        {"block_steps": 1},
        [],
        {"classes": [], "block_steps": "x"},
    ):
        with pytest.raises(TamperError, match="isn't of the form that runs write"):
            SealedClasses.of({SEALED: nonsense}, ("a",), "log")


def test_one_step_by_hand() -> None:
    cells = (MicrobatchCell(0, 0, 0, 0, 2, 2.0, bytes(32)), MicrobatchCell(3, 0, 0, 1, 2, 2.0, bytes(32)))
    told = {"gradient_norm": {"0": [1.0, 2.0, 3.0], "1": [None, 4.0, 5.0]}, "update_norm": [6.0, 7.0, 8.0], "loss": 9.0}
    clear, parts = divided(told, cells, TABLE.names)
    assert clear == {"gradient_norm": {"0": [1.0, 2.0, 3.0]}, "update_norm": [None] * 3, "loss": 9.0}
    assert parts == {
        "pii/names": {"gradient_norm": {"1": [None, 4.0, 5.0]}},
        UPDATES: {"update_norm": {"0": 6.0, "1": 7.0, "2": 8.0}},
    }
    alone = {**told, "gradient_norm": {"0": [None, 4.0, 5.0]}}
    assert divided(alone, cells[1:], TABLE.names)[0]["loss"] is None
    idle = (cells[0], replace(cells[1], num_rows=0))
    assert divided({**alone, "loss": 9.0}, idle, TABLE.names)[0]["loss"] == 9.0, "no row of it took part"
    assert TABLE.hidden([("pii/names", "loss"), ("pii/faces", "gradient_norm")], [1, 2, 0, 99], "gradient_norm") == [1]
