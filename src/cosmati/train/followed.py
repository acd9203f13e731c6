"""Whether lineage has followed the rows through a method: under a policy, rows of which nobody can say are refused."""

from __future__ import annotations

from cosmati.core.batch import TOMBSTONE, Batch, first_tensor
from cosmati.errors import BatchError, PlanError


def classes_in(batch: Batch) -> list[int]:
    """Return the classes of a batch's rows and of all rows that they were mixed of, in order; of packs their tokens'.

    Raises:
        PlanError: rows were mixed, and the lineage doesn't say of which classes.
    """
    lineage, present = batch.lineage, batch.present
    if lineage.parents is not None and lineage.parent_class_ids is None:
        msg = (
            "Rows were mixed of others, and their lineage doesn't say of which classes: what may they teach? Give "
            "Lineage(..., parents=..., parent_class_ids=...), or mix by batch.lineage.mix(indices)."
        )
        raise PlanError(msg)
    tokens = lineage.token_class_ids
    told = [lineage.class_ids[:, None] if tokens is None else tokens]
    if lineage.parent_class_ids is not None:
        told.append(lineage.parent_class_ids)
    found = {int(one) for ids in told for one in (ids if present is None else ids[present]).unique()}
    return sorted(found if tokens is None else found - {TOMBSTONE})


def check_rows(batch: Batch) -> None:
    """Compare the number of rows that lineage and data speak of; it's the first tensor that's looked at, mostly.

    Raises:
        BatchError: they differ.
    """
    first = first_tensor(batch.data)
    if first is None or first.size(0) != batch.num_rows:
        batch.check()


def refuse_unfollowed(given: Batch, made: object, method: object) -> None:
    """Refuse what a method has made of a governed microbatch, where the lineage isn't that of the rows any more.

    Rows that were put in another order under the same lineage can't be told from those that weren't.

    Args:
        given: to the method.
        made: by it.
        method: which.

    Raises:
        PlanError: the rows are others in number, of other classes, or of unknown origin.
    """
    name = type(method).__name__
    mend = (
        "Have it select rows by batch.select(indices), mix them by batch.lineage.mix(indices), and cut them by "
        "batch.lineage.cut(...), which keep lineage and data together; or leave it out under a policy."
    )
    if not isinstance(made, Batch):
        raise PlanError(f"{name} gave a {type(made).__name__}, and a Batch is wanted. {mend}")
    if given.lineage.is_known and not made.lineage.is_known:
        raise PlanError(f"{name} gave rows of unknown origin for rows whose origin was known. {mend}")
    try:
        check_rows(made)
    except BatchError as error:
        raise PlanError(f"{name} gave rows that nobody can tell: {error} {mend}") from error
    if made.lineage is given.lineage or not made.lineage.is_known:
        return
    if others := sorted({*classes_in(made)} - {*classes_in(given)}):
        msg = f"{name} was given rows of classes {classes_in(given)}, and gave some of {others}: they have no route."
        raise PlanError(f"{msg} {mend}")
