"""How each record of the engine is made is pinned: is it frozen, has it slots, an order, fields that must be named.

A record without slots takes any attribute, and a field that needn't be named may be confused with its neighbour. A
change of one is a decision. `python -m tests.test_records` writes the list anew.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tests.test_dataclasses import dataclasses_of

LIST = Path(__file__).parent / "golden" / "records.txt"
ROOMS = ("core", "ledger", "optim", "routing", "train")


def _told(kind: type) -> str:
    made = kind.__dataclass_params__  # type: ignore[attr-defined]
    has = [name for name in ("frozen", "eq", "order", "repr", "unsafe_hash") if getattr(made, name)]
    has += ["slots"] * ("__slots__" in vars(kind))
    own = [field for field in dataclasses.fields(kind) if field.name in vars(kind).get("__annotations__", ())]
    unnamed, named = ([f.name for f in own if f.init and f.kw_only is is_named] for is_named in (False, True))
    hidden = [field.name for field in own if not (field.repr and field.compare and field.init)]
    fields = ", ".join([*unnamed, *["*"] * bool(named), *named])
    return " ".join([*has, f"({fields})", *["without"] * bool(hidden), *hidden])


def listed() -> list[str]:
    """Every record of the rooms, a line each."""
    return sorted(f"{name}: {_told(kind)}" for room in ROOMS for name, kind in dataclasses_of(room).items())


def test_records_are_made_as_listed() -> None:
    assert listed() == LIST.read_text().splitlines(), "if that's meant: python -m tests.test_records"


if __name__ == "__main__":
    LIST.write_text("\n".join(listed()) + "\n")
