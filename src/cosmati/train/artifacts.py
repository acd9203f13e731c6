"""What was prepared before a run: the user says it, and base weights and evaluation data are found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from cosmati.core.batch import Batch
from cosmati.core.state import parameter_root
from cosmati.data.plain_files import digests_of_files, file_sha256, vouched_files
from cosmati.data.tokens import HuggingFaceTokenizer
from cosmati.data.vouching import VouchedShards, Vouches, vouched_data, vouched_sources
from cosmati.errors import ProvenanceError
from cosmati.provenance.artifact import Artifact, distinct
from cosmati.provenance.authority.errors import DeclaredOnlyError
from cosmati.train.content import content_digest
from cosmati.train.ingredients import Ingredients
from cosmati.train.signed import refuse_ungoverned, vouched_of

_MAX_AROUND = 8
_LARGEST = 1 << 30
"""Bytes of evaluation data above which its content isn't hashed unasked."""


def artifact(
    kind: str, content: object, *, origin: str = "", name: str = "", authority: Vouches | None = None
) -> Artifact:
    """Return a preparation artifact of a run, for `RunConfig(artifacts=[...])`.

    Args:
        kind: `tokenizer`, `base weights`, `statistics`, `evaluation data` or `reference model`.
        content: it itself, or where it lies: a file, a folder, a tokenizer, a model, a data set, or a nest of tensors,
            arrays and numbers.
        origin: where it's from, in words; the path where that's given.
        name: tells it from others of its kind.
        authority: who must vouch for it, where `content` is a folder that `describe_files` has described and somebody
            has signed. A `StreamingDataset` has its own.

    Raises:
        ProvenanceError: there's no such kind, nobody vouches for it, or its content can't be told.
        DataError: there's no such file, or a file isn't what was signed.
    """
    is_path = isinstance(content, str | Path)
    told, kind_given = str(content) if is_path else "", type(content).__name__
    content = Path(str(content)).expanduser() if is_path else content
    sources = vouched_sources(content)
    if authority is not None:
        if not is_path or not Path(str(content)).is_dir():
            msg = (
                f"authority= is for a folder of files that somebody has signed, and the {kind} is a "
                f"{kind_given}. Give its folder; a StreamingDataset takes its own authority=."
            )
            raise ProvenanceError(msg)
        sources = [vouched_files(Path(str(content)), authority)]
    digest = _digest_of(kind, content)
    return Artifact(kind, digest, origin or told, name, vouched_data(sources), tuple(sources))


def _digest_of(kind: str, content: Any) -> str:  # noqa: ANN401  (whatever was prepared)
    if isinstance(content, str | Path):
        path = Path(content)
        return file_sha256(path) if path.is_file() else content_digest(dict(digests_of_files(path))).hex()
    if own := _own_digest(content):
        return own
    if isinstance(content, nn.Module):
        return parameter_root(content.state_dict()).hex()
    if hasattr(content, "get_vocab"):
        return HuggingFaceTokenizer(content).digest
    if content is None or callable(content) or isinstance(content, Iterator):
        msg = (
            f"The content of the {kind} can't be told of a {type(content).__name__}. Give its file or folder, a model, "
            "a data set, or tensors."
        )
        raise ProvenanceError(msg)
    return content_digest(content).hex()


def _own_digest(content: object) -> str:
    """Return what a tokenizer, a source or a data set says of itself, a loader around it too; empty for nothing."""
    for _ in range(_MAX_AROUND):
        if isinstance(own := getattr(content, "digest", None), str):
            return own
        content = getattr(content, "dataset", None)
    return ""


def artifacts_of(given: Ingredients, parent: Mapping[str, object]) -> tuple[Artifact, ...]:
    """Return a run's preparation artifacts: those that the user has named, and of a governed run what is found.

    One that is named stands for what is found under its label, or for the only one that is found of its kind.

    Args:
        given: by the user.
        parent: what the weights were loaded from, if any were.

    Raises:
        ProvenanceError: two have one label; or nobody vouches for one, and the run takes only what is signed.
    """
    named = given.config.artifacts
    is_governed = given.policy is not None or given.config.require_signed or vouched_of(given.data) is not None
    found = [*_base_of(parent), *_evaluated_on(given.evaluation)] if is_governed else []
    labels, kinds, num_found = {one.label for one in named}, {one.kind for one in named}, Counter(f.kind for f in found)
    unnamed = [f for f in found if f.label not in labels and (f.kind not in kinds or num_found[f.kind] > 1)]
    artifacts = distinct([*named, *unnamed])
    refuse_ungoverned(given, artifacts)
    _refuse_other_weights(given, artifacts, parent)
    return artifacts


def _refuse_other_weights(given: Ingredients, artifacts: Iterable[Artifact], parent: Mapping[str, object]) -> None:
    """Refuse base weights that aren't among the files that were signed, where the run takes only what is signed."""
    path = Path(str(given.config.load_weights))
    if not (given.config.require_signed and parent):
        return
    files = [one for a in artifacts if a.kind == "base weights" for one in a.sources if isinstance(one, VouchedShards)]
    signed = {shard.sha256 for one in files for shard in one.manifest.shards}
    if not path.is_file() or file_sha256(path) not in signed:
        raise DeclaredOnlyError(
            f"require_signed=True, and {path} isn't one of the files that were signed as base weights. Load a file out "
            "of the folder that RunConfig(artifacts=[artifact('base weights', FOLDER, authority=...)]) names."
        )


def with_base(artifacts: Iterable[Artifact], identity: Mapping[str, Any]) -> tuple[Artifact, ...]:
    """Return the artifacts of a run that is resumed, with the base weights that its checkpoint says it began with."""
    known = tuple(artifacts)
    if any(one.kind == "base weights" for one in known):
        return known
    parent = {name.partition(".")[2]: value for name, value in identity.items() if name.startswith("parent.")}
    return distinct([*known, *_base_of(parent)])


def _base_of(parent: Mapping[str, object]) -> Iterator[Artifact]:
    if "root" in parent:
        yield Artifact("base weights", str(parent["root"]), str(parent.get("file", parent.get("run", ""))))


def _evaluated_on(evaluation: Any) -> Iterator[Artifact]:  # noqa: ANN401  (one, several by name, or none)
    """Yield the data of evaluations: by name where there are several."""
    if evaluation is None:
        return
    for name, one in evaluation.items() if isinstance(evaluation, Mapping) else [("", evaluation)]:
        data = getattr(one, "data", None)
        if _own_digest(data) or (isinstance(data, list | tuple) and _num_bytes(data) <= _LARGEST):
            yield artifact("evaluation data", data, name=str(name))
        else:
            sources, kind = vouched_sources(data), type(data).__name__
            yield Artifact("evaluation data", "", kind, str(name), vouched_data(sources), tuple(sources))


def _num_bytes(data: object) -> int:
    if isinstance(data, torch.Tensor | np.ndarray):
        return data.nbytes
    if isinstance(data, Batch):
        return _num_bytes(data.data)
    children = data.values() if isinstance(data, Mapping) else data if isinstance(data, list | tuple) else ()
    return sum(map(_num_bytes, children))
