"""Who may see row ids: the one place where a credential is read."""

from __future__ import annotations


def reader_of_row_ids(run_id: str) -> str | None:  # noqa: ARG001  (a credential names its run)
    """Return who may see the row ids of a run here, None for nobody.

    Row ids tell what a run learnt from, so they're withheld from whoever has no credential. A credential will be one
    signed file: its holder's key, the run, classes, columns and an expiry. No release writes such files yet, so the
    answer is nobody. Pages, queries and bundles ask here, and nowhere else.
    """
    return None
