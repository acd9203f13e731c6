"""Columns of sensitive classes: sealed in the details of a step, opened by whoever was given keys.

A class is sensitive where the taxonomy says so, or the run besides. What its microbatches measured isn't in the open
then, nor a total that would tell it: a step's loss where only such classes weighed anything, and the norm of a region's
update wherever they reached the region. Rows, weights and routes of each cell stay: they're the proof.

There's a key for each class, column and block of steps, HKDF-SHA256 of one secret of the operator's. Boxes are
AES-256-GCM; run, class, column and step are authenticated, so that no box can be moved. Its nonce is a MAC of what is
in it: a step that is run again gives the same bytes, and two contents never share a nonce. The entry commits to the
details with the boxes in them, so that whoever verifies the log needs no key.

What rows of several classes did is sealed for all those of them that are sensitive, under their joint name.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import rfc8785
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from cosmati.errors import LedgerError, TamperError
from cosmati.records.joint_classes import joint_name, members_of
from cosmati.records.ledger import MicrobatchCell

SEALED = "sealed"
"""Name in the details: of what is sealed in a step, and of which classes are, and how, in entry 0 and amendments."""
SEALED_MARK = b'"sealed":{'
"""How canonical details begin what is sealed in them."""
KEY_FILE = "columns.key"
"""Of the operator's secret, in the run's private folder."""
BLOCK_STEPS = 1024
SECRET_BYTES = KEY_BYTES = 32
BY_CELL = ("gradient_norm", "direction", "entropy")
BY_MICROBATCH = ("packed_gradient_norm", "packed_direction", "packed_entropy")
BY_REGION = ("update_norm", "update_direction")
OF_STEP = ("loss",)
COLUMNS = (*BY_CELL, *BY_MICROBATCH, *BY_REGION, *OF_STEP)
"""Details of a step that are sealed. A new one that is told by cell, microbatch, region or step is named above."""
_FORMAT = "cosmati sealed column/1"
_NONCE_BYTES = 12
_PADDED_TO = 64
"""Bytes: how long a number's digits are tells something of it."""

SealedParts = Mapping[str, Mapping[str, Any]]
"""What is sealed of a step, by class and column."""


class ColumnKeys(Protocol):
    """Gives the key of a class's column in a block of steps, 32 bytes; None where it hasn't it."""

    def __call__(self, classes: str, column: str, block: int) -> bytes | None:
        """Return it."""


class OperatorKeys:
    """All keys of a run, from the operator's secret.

    Args:
        secret: the content of `private/columns.key`.
        origin: name of the run's log.

    Raises:
        LedgerError: it isn't 32 bytes.
    """

    def __init__(self, secret: bytes, origin: str) -> None:
        if len(secret) != SECRET_BYTES:
            msg = f"The columns' secret has {len(secret)} bytes, and {SECRET_BYTES} are one. Put the run's own back."
            raise LedgerError(msg)
        self._secret, self.origin = secret, origin
        self._pair = lru_cache(maxsize=4096)(self._derived)

    @property
    def commitment(self) -> bytes:
        """What entry 0 commits to of the secret: 32 bytes."""
        return hashlib.sha256(b"cosmati columns key" + self._secret).digest()

    def __call__(self, classes: str, column: str, block: int) -> bytes:
        """Return the key of a block."""
        return self._pair(classes, column, block)[:KEY_BYTES]

    def nonce(self, classes: str, column: str, block: int, content: bytes) -> bytes:
        """Return the nonce of a content, which no other one of the block has."""
        key = self._pair(classes, column, block)[KEY_BYTES:]
        return hmac.digest(key, content, "sha256")[:_NONCE_BYTES]

    def _derived(self, classes: str, column: str, block: int) -> bytes:
        info = rfc8785.dumps([_FORMAT, self.origin, classes, column, block])
        return HKDF(SHA256(), 2 * KEY_BYTES, None, info).derive(self._secret)


def seal_names(classes: Sequence[str], sensitive: Iterable[str]) -> tuple[str, ...]:
    """Return for each class under which name its columns are sealed: itself, its sensitive members, or nothing."""
    known = {*sensitive}
    return tuple(joint_name(one for one in members_of(name) if one in known) for name in classes)


@dataclass(frozen=True, slots=True)
class SealedClasses:
    """What entry 0 or an amendment says of sealing.

    Attributes:
        origin: name of the run's log.
        names: under which the columns of each class are sealed, by its id; empty for those in the open.
        block_steps: after which a key changes.
    """

    origin: str
    names: tuple[str, ...]
    block_steps: int

    @classmethod
    def of(cls, details: Mapping[str, Any], classes: Sequence[str], origin: str) -> SealedClasses:
        """Read the details of an entry.

        Raises:
            TamperError: they aren't of the form that runs write.
        """
        told = details.get(SEALED, {"classes": [], "block_steps": BLOCK_STEPS})
        try:
            names, block_steps = seal_names(classes, map(str, told["classes"])), int(told["block_steps"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TamperError(f"What an entry says is sealed isn't of the form that runs write: {error!r}.") from error
        if block_steps < 1:
            raise TamperError(f"An entry says that keys change after {block_steps} steps. Restore the ledger.")
        return cls(origin, names, block_steps)

    def open(
        self, details: Mapping[str, Any], step: int, keys: ColumnKeys | None
    ) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        """Return a step's details with what the keys open in its place, and the class and column of what they don't.

        Raises:
            TamperError: a box isn't one, or isn't this run's, class's, column's or step's.
        """
        found, left = {name: value for name, value in details.items() if name != SEALED}, list[tuple[str, str]]()
        for name, column, box in boxes_of(details):
            key = keys(name, column, step // self.block_steps) if keys is not None else None
            if key is None:
                left.append((name, column))
            else:
                places = open_box(box, key, self.origin, name, column, step)
                try:
                    found[column] = _merged(column, found.get(column), places)
                except (AttributeError, KeyError, TypeError) as error:
                    what = f"Step {step}'s sealed {column} of {name}, opened, isn't of the form that runs write"
                    raise TamperError(f"{what}: {error!r}. Ask the operator.") from error
        return found, left

    def hidden(self, left: Iterable[tuple[str, str]], class_ids: Iterable[int], column: str) -> list[int]:
        """Return which of a step's cells have a value in a column that stays sealed."""
        names = {name for name, one in left if one == column}
        # Whether each class has a name is for others to say.
        known = dict(enumerate(self.names))
        return [cell for cell, class_id in enumerate(class_ids) if known.get(class_id) in names]


def divided(
    details: Mapping[str, Any], cells: Sequence[MicrobatchCell], names: Sequence[str]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Divide a step's details into what is in the open, and what is sealed by class and column.

    Args:
        details: as they were measured.
        cells: of the step.
        names: under which the columns of each class are sealed (`seal_names`).
    """
    dividing = _Dividing(dict(details))
    # Of every step: an optimizer's momentum carries what a class taught into the updates of steps without it.
    dividing.by_region(joint_name(name for name in names if name))
    of_cells = [names[cell.class_id] for cell in cells]
    if not any(of_cells):
        return dividing.clear, dividing.parts
    dividing.by_place(BY_CELL, {str(number): {name} for number, name in enumerate(of_cells)})
    of_microbatches = dict[str, set[str]]()
    for owner, name in zip(details.get("cell_microbatches", range(len(cells))), of_cells, strict=True):
        of_microbatches.setdefault(str(owner), set()).add(name)
    dividing.by_place(BY_MICROBATCH, of_microbatches)
    dividing.of_step({name for name, cell in zip(of_cells, cells, strict=True) if _taught(cell)})
    return dividing.clear, dividing.parts


def _taught(cell: MicrobatchCell) -> bool:
    return cell.num_rows > 0 and cell.weight > 0


@dataclass(frozen=True, slots=True)
class _Dividing:
    """What is in the open, and what isn't any more. Names are those that classes are sealed under; empty is open."""

    clear: dict[str, Any]
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def by_place(self, columns: Iterable[str], names: Mapping[str, set[str]]) -> None:
        for column in columns:
            for place, value in list((self.clear.get(column) or {}).items()):
                # A microbatch without a document, as at the end of the data, has no cell: it's nobody's.
                if own := joint_name(names.get(place, set()) - {""}):
                    self._put(own, column, place, value)
                    self.clear[column] = {p: one for p, one in self.clear[column].items() if p != place}

    def by_region(self, name: str) -> None:
        for column in BY_REGION if name else ():
            for region, value in enumerate(values := self.clear.get(column) or ()):
                if value is not None:
                    self._put(name, column, str(region), value)
            if values:
                self.clear[column] = [None] * len(values)

    def of_step(self, names: set[str]) -> None:
        for column in OF_STEP:
            if names and all(names) and self.clear.get(column) is not None:
                self._put(joint_name(names), column, "", self.clear[column])
                self.clear[column] = None

    def _put(self, name: str, column: str, place: str, value: object) -> None:
        self.parts.setdefault(name, {}).setdefault(column, {})[place] = value


def merged(clear: Mapping[str, Any], parts: SealedParts, chosen: Collection[tuple[str, str]]) -> dict[str, Any]:
    """Return the details of a step with some of its parts, chosen by class and column, in their places."""
    found = dict(clear)
    for name, own in parts.items():
        for column in (one for one in own if (name, one) in chosen):
            found[column] = _merged(column, found.get(column), own[column])
    return found


def sealed(clear: Mapping[str, Any], parts: SealedParts, keys: OperatorKeys, step: int) -> dict[str, Any]:
    """Return the details of a step with boxes in place of what is sealed."""
    boxes = {name: {c: _box(value, keys, name, c, step) for c, value in own.items()} for name, own in parts.items()}
    return {**clear, SEALED: boxes} if boxes else dict(clear)


def boxes_of(details: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return class, column and box of all that is sealed in a step.

    Raises:
        TamperError: it isn't of the form that runs write.
    """
    told = details.get(SEALED, {})
    try:
        found = [(name, column, box) for name, own in told.items() for column, box in own.items()]
    except AttributeError as error:
        raise TamperError(f"What a step's details seal isn't boxes by class and column: {told!r:.80}.") from error
    if not all(isinstance(box, str) and column in COLUMNS for _, column, box in found):
        raise TamperError(f"What a step's details seal isn't boxes by class and column: {told!r:.80}.")
    return found


def open_box(box: str, key: bytes, origin: str, classes: str, column: str, step: int) -> Any:  # noqa: ANN401  (JSON)
    """Return what is in a box: for each place of the column its value.

    Raises:
        TamperError: it was changed, or moved here from elsewhere, or the key is another one's.
    """
    try:
        data = base64.b64decode(box, validate=True)
        content = AESGCM(key).decrypt(
            data[:_NONCE_BYTES], data[_NONCE_BYTES:], _bound_to(origin, classes, column, step)
        )
        return json.loads(content)
    except (InvalidTag, ValueError, RecursionError) as error:
        raise TamperError(
            f"Step {step}'s sealed {column} of {classes} doesn't open: the box was changed or moved, or the key isn't "
            "its own. Ask the operator to release the keys again; if that doesn't help, the details are wrong."
        ) from error


def _box(value: object, keys: OperatorKeys, classes: str, column: str, step: int) -> str:
    bound, block = _bound_to(keys.origin, classes, column, step), step // BLOCK_STEPS
    content = rfc8785.dumps(value)  # type: ignore[arg-type]  # JSON
    content += b" " * (-len(content) % _PADDED_TO)
    nonce = keys.nonce(classes, column, block, bound + b"\0" + content)
    return base64.b64encode(nonce + AESGCM(keys(classes, column, block)).encrypt(nonce, content, bound)).decode()


def _bound_to(origin: str, classes: str, column: str, step: int) -> bytes:
    return rfc8785.dumps([_FORMAT, origin, classes, column, step])


def _merged(column: str, clear: Any, places: Mapping[str, Any]) -> Any:  # noqa: ANN401  (JSON)
    if column in OF_STEP:
        return places[""]
    if column in BY_REGION:
        return [places.get(str(region), value) for region, value in enumerate(clear)]
    return {**(clear or {}), **places}
