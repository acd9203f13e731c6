"""Names and texts that hold anything, as DuckDB reads them back."""

from __future__ import annotations

import pytest

pytest.importorskip("duckdb", reason="the extra `queries` isn't installed")

from cosmati.storage.duck import connection, quoted, text

ODD = ["plain", 'a "quoted" name', '"', "it's", "''", "a; DROP TABLE b --", "back\\slash", "Ω\n"]


@pytest.mark.parametrize("odd", ODD)
def test_a_name_and_a_text_come_back_as_they_were(odd: str) -> None:
    with connection() as database:
        found = database.execute(f"SELECT {text(odd)} AS {quoted(odd)}")
        assert [one[0] for one in found.description or ()] == [odd]
        assert found.fetchall() == [(odd,)]
