"""What the ids of a request are of: of rows, of packs, or of the documents in packs. A number may be one of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from cosmati.data.in_memory import InMemory
from cosmati.data.packed import PackedSource
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import ForgetError
from cosmati.forget.asked import IdKind, ToForget
from cosmati.forget.reading import every_row, holds_packs

_ROW_OF_TOKENS = "token_row_ids"


def kind_read(source: object) -> IdKind:
    """Return what a run's own ids are of: of documents where it reads packs by token, else of whatever its rows are."""
    if any(isinstance(one, PackedSource) for one in _within(source)):
        return "documents"
    dataset = _dataset(source)
    return "packs" if dataset is not None and any(map(holds_packs, dataset.sources)) else "rows"


def asked_of(source: object, kind: IdKind, ids: frozenset[int]) -> ToForget:
    """Return a request in the run's own ids.

    Args:
        source: of the run.
        kind: what the ids are of; `rows` of what the run calls so.
        ids: that were given.

    Raises:
        ForgetError: the run's rows aren't packs, nobody can say what is in them, or the data haven't got one.
    """
    own = kind_read(source)
    if kind in ("rows", own):
        doubtful = mistakable(source, ids) if kind == "rows" else ()
        return ToForget(rows=ids, meant=f"{len(ids)} {own}", doubtful=doubtful)
    if own == "rows":
        raise ForgetError(f"Ids of {kind} were given, and the run's rows are no packs. Give its rows' ids: --rows.")
    found, known = set[int](), set[int]()
    for pack, documents in _packs(source):
        met = ids & documents if kind == "documents" else ids & {pack}
        known |= met
        found |= ({pack} if kind == "documents" else documents) if met else set()
    if missing := sorted(ids - known):
        raise ForgetError(f"The data have no {kind} {', '.join(map(str, missing[:5]))}. Nothing was done.")
    what = f"{len(found)} packs that hold {len(ids)} documents"
    if kind == "packs":
        elsewhere = sum(bool(documents & found) for pack, documents in _packs(source) if pack not in ids)
        what = f"the {len(found)} documents of {len(ids)} packs"
        what += f", of which some are in {elsewhere} other packs, too" if elsewhere else ""
    return ToForget(rows=frozenset(found), meant=what)


def mistakable(source: object, ids: AbstractSet[int]) -> tuple[int, ...]:
    """Return those ids that are of something else, too: of packs where the run's are of documents, or the reverse.

    Of a source that can't be asked what its packs hold, none.
    """
    own, dataset = kind_read(source), _dataset(source)
    if own == "rows":
        return ()
    if own == "documents" and dataset is not None:
        num_packs = sum(one.num_rows for one in dataset.sources)
        return tuple(sorted(one for one in ids if one < num_packs))
    try:
        others = [{pack} if own == "documents" else documents for pack, documents in _packs(source)]
    except ForgetError:
        return ()
    return tuple(sorted(ids & set[int]().union(*others)))


def _within(source: object) -> Iterator[object]:
    """Yield a source, and those that lie in it."""
    while source is not None:
        yield source
        source = getattr(source, "source", None)


def _dataset(source: object) -> StreamingDataset | None:
    found = getattr(source, "dataset", None)
    return found if isinstance(found, StreamingDataset) else None


def _packs(source: object) -> Iterator[tuple[int, set[int]]]:
    """Yield each pack's id, and those of its documents.

    Raises:
        ForgetError: nobody can say.
    """
    *_, inner = _within(source)
    dataset, data = _dataset(source), getattr(inner, "data", None)
    if dataset is not None:
        for part in every_row(dataset, lambda one: {"spans"} if holds_packs(one) else set()):
            spans: Any = part.rows.columns.get("spans", ())
            for pack, own in zip(part.rows.row_ids.tolist(), spans, strict=False):
                yield pack, set(own[:, 0].tolist())
    elif isinstance(inner, InMemory) and isinstance(data, Mapping) and _ROW_OF_TOKENS in data:
        for pack, own in zip(inner.lineage.row_ids.tolist(), data[_ROW_OF_TOKENS].tolist(), strict=True):
            yield pack, {one for one in own if one >= 0}
    else:
        msg = f"Which documents are in which packs is looked up in shards or in memory, not in a {type(inner).__name__}"
        raise ForgetError(f"{msg}. Give the ids that the run's lineage has: --rows.")
