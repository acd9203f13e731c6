"""The state of a loader: one position, what it's a position in, and how to go on when that has grown."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cosmati.data.order.mixture import Mixture
from cosmati.data.places import Places
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import DataError

_SHARES = "repeats, choose or epochs_of"


def state_of(dataset: StreamingDataset, position: int) -> dict[str, Any]:
    """Return the state of a loader of some data that is at a position."""
    return {
        "position": position,
        "digest": dataset.digest,
        "seed": dataset.seed,
        "rows": len(dataset),
        "facts": _facts(dataset),
        "sources": [
            [s.index.num_shards, _source(dataset, n, s.index.num_shards)] for n, s in enumerate(dataset.sources)
        ],
    }


def _facts(dataset: StreamingDataset, classes: Collection[str] | None = None) -> dict[str, str]:
    """Return a digest of each part of what data are, so that a refusal can name the part that differs.

    Args:
        dataset: the data.
        classes: whose shares count; None for all.
    """
    facts: dict[str, object] = {
        "data or classes": [[s.index.digest, s.class_path, s.band] for s in dataset.sources],
        "filter or subset": [
            selection and selection.digest(source.index.num_shards)
            for source, selection in zip(dataset.sources, dataset.selections, strict=True)
        ],
        _SHARES: {name: str(value) for name, value in dataset.repeats.items() if classes is None or name in classes},
        "shuffle, window_rows or curriculum": dataset.order_facts,
    }
    return {name: hashlib.sha256(json.dumps(fact).encode()).hexdigest() for name, fact in facts.items()}


def _source(dataset: StreamingDataset, number: int, num_shards: int) -> str:
    """Return a digest of the first shards of a source, and of what is visited of them."""
    source, selection = dataset.sources[number], dataset.selections[number]
    facts = [source.class_path, source.band, source.index.digest_of_first(num_shards)]
    visited = selection and selection.digest(num_shards)
    return hashlib.sha256(json.dumps([*facts, visited]).encode()).hexdigest()


def check_state(dataset: StreamingDataset, state: Mapping[str, Any]) -> int:
    """Return the position in a state, if it's one of these data.

    Raises:
        DataError: it's of other data, or another seed; the message says what differs.
    """
    if not isinstance(state, Mapping) or not {"position", "digest", "seed"} <= set(state):
        keys = ", ".join(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        msg = f"This is no state of a StreamingLoader ({keys}). Give what its state_dict() returned."
        raise DataError(msg)
    for name, own in (("digest", dataset.digest), ("seed", dataset.seed)):
        if state[name] != own:
            more = _what_differs(dataset, state) if name == "digest" else ""
            msg = (
                f"The state was saved with the {name} {state[name]}, and the data have {own}: to go on would repeat "
                f"some rows and leave out others. {more}Load it with the same data, classes, repeats and seed; one "
                "that was saved before order version 2, with StreamingDataset(order_version=1)."
            )
            raise DataError(msg)
    if state.get("grown"):
        msg = (
            "The state is in the midst of an epoch of the data as they were before they grew. Load it with grown=True, "
            "which finishes that epoch first."
        )
        raise DataError(msg)
    return int(state["position"])


def _what_differs(dataset: StreamingDataset, state: Mapping[str, Any]) -> str:
    saved = state.get("facts", {})
    others = [name for name, digest in _facts(dataset).items() if saved.get(name, digest) != digest]
    if not others:
        return ""
    grown = " If rows were appended, load_state_dict(state, grown=True) goes on." if "data" in others[0] else ""
    return f"What differs: {'; '.join(others)}.{grown} "


class Growth:
    """An epoch begun on data that have grown since: it's finished as it was planned, and the next has all rows.

    Positions are those of the grown data; of the epoch that is being finished, the last ones stand for what is left.

    Args:
        dataset: the data as they are now.
        state: of a loader of the data as they were.

    Raises:
        DataError: the data aren't those of the state with shards or sources added, or an epoch's end isn't one of each
            source.
    """

    def __init__(self, dataset: StreamingDataset, state: Mapping[str, Any]) -> None:
        before = state.get("grown") or {name: state.get(name) for name in ("sources", "rows", "facts")}
        self.facts: dict[str, Any] = dict(before)
        numbers = _check_growth(dataset, before, state)
        shards = [int(num_shards) for num_shards, _ in before["sources"]]
        rows = [dataset.shard_rows(number)[:count] for number, count in zip(numbers, shards, strict=True)]
        groups = [dataset.groups[number] for number in numbers]
        self._mixture = Mixture([replace(g, rows=int(one.sum())) for g, one in zip(groups, rows, strict=True)])
        # Orders are keyed by the numbers that the sources had.
        added = [np.zeros(0, np.int64)] * (len(dataset.sources) - len(rows))
        keyed = dataset.orders(dataset.seed, [*rows, *added])
        self._orders = list(keyed)
        for number, order in zip(numbers, keyed, strict=False):
            self._orders[number] = order
        self._numbers = np.asarray(numbers)
        # At the very end of an epoch nothing is left to finish.
        epochs = -(-int(state["position"]) // int(state["rows"]))
        all_rows = [dataset.sources[n].index.shard_rows[:count].sum() for n, count in zip(numbers, shards, strict=True)]
        first, until = np.zeros(len(self._orders), np.int64), np.zeros(len(self._orders), np.int64)
        first[numbers] = np.cumsum(all_rows) - all_rows
        until[numbers] = [epochs * int(group.repeat) for group in groups]
        self.rows: StreamingDataset = dataset.with_earlier_ids(first, until)
        """The data, with the row ids that rows had, in the epoch that is being finished."""
        self.stop = epochs * len(dataset)
        """Position from which all rows are visited."""
        self._stop_before = epochs * self._mixture.num_rows
        self.position = self.stop - (epochs * int(state["rows"]) - int(state["position"]))
        """Where to go on."""

    def locate(self, dataset: StreamingDataset, positions: Sequence[int]) -> Places:
        """Return where rows lie (see `StreamingDataset.locate`)."""
        wanted = np.asarray(positions, np.int64)
        found = dataset.locate(wanted)
        mine = np.flatnonzero((wanted >= 0) & (wanted < self.stop))
        sources, epochs, indices = self._mixture.locate(wanted[mine] - self.stop + self._stop_before)
        before = dataset.places(self._numbers[sources], epochs, indices, self._orders)
        for column, part in zip(found.columns, before.columns, strict=True):
            column[mine] = part
        return found


def _numbers_now(dataset: StreamingDataset, before: Sequence[Sequence[Any]]) -> list[int]:
    """Return the number that each source of a state has now: others may have come between them."""
    numbers: list[int] = []
    for num_shards, digest in before:
        start = numbers[-1] + 1 if numbers else 0
        candidates = [
            n for n in range(start, len(dataset.sources)) if dataset.sources[n].index.num_shards >= num_shards
        ]
        found = next((n for n in candidates if _source(dataset, n, num_shards) == digest), None)
        if found is None:
            msg = (
                f"{dataset.sources[min(start, len(dataset.sources) - 1)].url} isn't what the state was saved with and "
                f"shards or sources added: its first {num_shards} shards, or what is visited of them, are others. "
                "Restore them, or start anew."
            )
            raise DataError(msg)
        numbers.append(found)
    return numbers


def _check_growth(dataset: StreamingDataset, before: Mapping[str, Any], state: Mapping[str, Any]) -> list[int]:
    """Return the numbers that the sources of a state have in the data that they've grown to."""
    if not before.get("sources") or state.get("seed") != dataset.seed:
        raise DataError("The state doesn't say what it's a state of, or has another seed. Load it without grown=True.")
    numbers = _numbers_now(dataset, before["sources"])
    own = _facts(dataset, {dataset.sources[number].class_path for number in numbers})
    others = [name for name in (_SHARES, "shuffle, window_rows or curriculum") if before["facts"][name] != own[name]]
    if others:
        raise DataError(f"Beside the rows, {'; '.join(others)} differ from the state's. Change nothing else.")
    if dataset.phases or any(repeat.denominator != 1 for repeat in dataset.repeats.values()):
        msg = (
            "With a curriculum, or with repeats that aren't whole numbers, an epoch ends in the midst of some source, "
            "and data can't grow there. Start anew, or go on with the data as they were."
        )
        raise DataError(msg)
    return numbers
