"""A policy that was signed: fetched from the authority for policies, and trusted by the digest of its first root."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from cosmati.errors import MissingExtraError, PolicyError
from cosmati.routing.policy_file import PolicyFile


def signed_policy(
    url: str | Path, name: str = "main", *, root: str, number: int | None = None, state: str | Path | None = None
) -> PolicyFile:
    """Return a policy that an authority has signed, for `Recipe(policy=...)` and `Trainer(policy=...)`.

    Args:
        url: of the authority's repository: a folder, http(s)://, or any that fsspec knows.
        name: of the policy.
        root: SHA-256 of the authority's first root in hex, as `cosmati keys init --policies` has said it.
        number: of the version; None is the newest.
        state: folder for what was seen of the authority; None is one below the user's cache.

    Raises:
        ProvenanceError: one of `cosmati.provenance.authority.errors`: each wrong has its own.
        PolicyError: what was signed is no policy in its canonical form.
        MissingExtraError: the extra `authority` isn't installed.
    """
    try:
        from cosmati.provenance.authority.policies import fetch_policy
        from cosmati.provenance.authority.trusted import Authority
    except ImportError as error:
        msg = f"Signed policies need another package ({error.name}): pip install 'cosmati[authority]'."
        raise MissingExtraError(msg) from error
    data, vouched = fetch_policy(Authority(url, root, state=state), name, number)
    return policy_of_canonical(data, vouched.voucher.target).with_voucher(vouched)


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
