"""A policy that was signed: fetched from the authority for policies, and trusted by the digest of its first root."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from cosmati.errors import MissingExtraError, PolicyError, ProvenanceError
from cosmati.provenance.authority.errors import TamperedManifestError, reason_of
from cosmati.provenance.kept_vouchers import kept_given_policy
from cosmati.provenance.voucher import LostVoucher, PolicyPlace
from cosmati.routing.policy_file import PolicyFile

if TYPE_CHECKING:
    from cosmati.provenance.authority.trusted import Authority


def signed_policy(
    url: str | Path,
    name: str = "main",
    *,
    root: str,
    number: int | None = None,
    state: str | Path | None = None,
    refresh: float | str = "10m",
    run: str | Path | None = None,
    clock: Callable[[], datetime] | None = None,
) -> PolicyFile:
    """Return a policy that an authority has signed, for `Recipe(policy=...)` and `Trainer(policy=...)`.

    A run under it asks again as it goes on: whether it still holds, and whether its next version was signed.

    Args:
        url: of the authority's repository: a folder, http(s)://, or any that fsspec knows.
        name: of the policy.
        root: SHA-256 of the authority's first root in hex, as `cosmati keys init --policies` has said it.
        number: of the version; None is the newest, or the one that `run` was last started with.
        state: folder for what was seen of the authority; None is one below the user's cache.
        refresh: how often the run asks: seconds, or a time string (`10m`).
        run: folder of the run that it's for. Where what the run was given holds no longer, it can go on from what it
            has kept, as the policy's `grace` says.
        clock: says what time it is; None is the machine's.

    Raises:
        ProvenanceError: one of `cosmati.provenance.authority.errors`: each wrong has its own.
        PolicyError: what was signed is no policy in its canonical form.
        MissingExtraError: the extra `authority` isn't installed.
    """
    folder = None if run is None else Path(run).expanduser().absolute()
    place = PolicyPlace(str(url), name, str(root).removeprefix("sha256:"), state, refresh, clock, folder)
    authority = authority_at(place)
    from cosmati.provenance.authority.policies import read_policy

    kept = kept_given_policy(folder) if folder is not None else None
    if kept is not None and not (kept.is_of(place) and number in (None, kept.number)):
        kept = None
    was_asked = False
    try:
        authority.refresh()
        was_asked = True
        data, vouched = read_policy(authority, name, number if kept is None else kept.number)
        if kept is not None and kept.voucher.manifest_sha256 != vouched.voucher.manifest_sha256:
            msg = f"{vouched.voucher.target} was signed with another content than the run began with. Ask who has."
            raise TamperedManifestError(msg)
    except ProvenanceError as error:
        if kept is None:
            raise
        reason = reason_of(error, was_asked=was_asked)
        data = kept.archive[f"manifests/{kept.voucher.manifest_sha256}.json"]
        vouched = replace(kept, lost=(LostVoucher(kept.voucher.target, reason, str(error), place.root),))
    return policy_of_canonical(data, vouched.voucher.target).with_voucher(replace(vouched, place=place))


def authority_at(place: PolicyPlace) -> Authority:
    """Return the authority for policies at a place; it isn't asked yet.

    Raises:
        MissingExtraError: the extra `authority` isn't installed.
    """
    try:
        from cosmati.provenance.authority.trusted import Authority
    except ImportError as error:
        msg = f"Signed policies need another package ({error.name}): pip install 'cosmati[authority]'."
        raise MissingExtraError(msg) from error
    clock = {} if place.clock is None else {"clock": place.clock}
    return Authority(place.url, place.root, state=place.state, refresh=place.refresh, run=place.run, **clock)


def policy_of_canonical(data: bytes, where: str) -> PolicyFile:
    """Read a policy's canonical form, and nothing else, so that its digest is that of the bytes.

    Args:
        data: the bytes.
        where: they come from, for the message.

    Raises:
        PolicyError: they aren't one.
    """
    try:
        policy = PolicyFile.model_validate(json.loads(data))
    except (ValueError, RecursionError, ValidationError) as error:
        raise PolicyError(f"What was signed as {where} is no policy: {error}") from error
    if policy.canonical != data:
        msg = f"What was signed as {where} isn't a policy's canonical form. Sign it with `cosmati policy sign`."
        raise PolicyError(msg)
    return policy
