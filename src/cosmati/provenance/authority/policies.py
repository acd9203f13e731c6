"""Signed policies: each version is a target of an authority of its own, `policy/NAME/NUMBER`."""

from __future__ import annotations

from collections.abc import Mapping

from cosmati.errors import ProvenanceError
from cosmati.provenance.authority.chain import Chain
from cosmati.provenance.authority.keys import KeyRing
from cosmati.provenance.authority.names import PolicyName
from cosmati.provenance.authority.repository import AuthorityRepository
from cosmati.provenance.authority.signing import sign_targets
from cosmati.provenance.authority.trusted import Authority
from cosmati.provenance.voucher import VouchedPolicy, Voucher


def sign_policy(
    repository: AuthorityRepository,
    ring: KeyRing,
    name: str,
    content: bytes,
    *,
    number: int | None = None,
    custom: Mapping[str, str | int] | None = None,
) -> tuple[PolicyName, str]:
    """Sign a version of a policy with the keys at hand; return its name and what came of it (see `sign_targets`).

    Args:
        repository: of the authority for policies.
        ring: the keys at hand.
        name: of the policy.
        content: its canonical form.
        number: of the version; None takes the one after the newest, or the newest where that has this content.
        custom: what else is said: for which run it is, and from which step on.

    Raises:
        ProvenanceError: nobody here may sign it, or the number leaves a gap or stands for another content.
    """
    chain = repository.chain()
    chain.check_kind(policies=True)
    newest = max(numbers_of(chain, name), default=0)
    if number is None:
        number = newest + 1
        info = chain.policy(PolicyName(name, newest)) if newest else None
        if info is not None and repository.target(info) == content and info.custom == (dict(custom or {}) or None):
            number = newest
    if not 1 <= number <= newest + 1:
        msg = f"The next version of the policy {name!r} is number {newest + 1}, not {number}. Leave no gap."
        raise ProvenanceError(msg)
    policy = PolicyName(name, number)
    state = sign_targets(repository, ring, policy.role, {policy.target: content}, what=name, custom=custom)
    return policy, state[policy.target]


def fetch_policy(authority: Authority, name: str, number: int | None = None) -> tuple[bytes, VouchedPolicy]:
    """Return a policy's canonical form as it was signed, and who vouches for it.

    Args:
        authority: for policies.
        name: of the policy.
        number: of its version; None is the newest.

    Raises:
        ProvenanceError: one of `cosmati.provenance.authority.errors`: each wrong has its own.
    """
    authority.refresh()
    return read_policy(authority, name, number)


def read_policy(authority: Authority, name: str, number: int | None = None) -> tuple[bytes, VouchedPolicy]:
    """Return likewise what the authority has said when it was asked last (see `fetch_policy`)."""
    chain = authority.chain
    newest = max(numbers_of(chain, name), default=0)
    if number is None and not newest:
        chain.policy(PolicyName(name))  # says why there's none
    policy = PolicyName(name, number or newest)
    info = chain.policy(policy)
    data = authority.target(info)
    expires = chain.targets[policy.role].signed.expires.isoformat()
    digest = info.hashes["sha256"]
    voucher = Voucher(authority.root, policy.target, digest, chain.signers(policy.role), expires)
    archive = {**authority.archive(), f"manifests/{digest}.json": data}
    opened = authority.now().isoformat(timespec="seconds")
    return data, VouchedPolicy(opened, (voucher,), archive, dict(info.custom or {}))


def numbers_of(chain: Chain, name: str) -> list[int]:
    """Return the numbers under which versions of a policy were signed."""
    metadata, prefix = chain.targets.get(PolicyName(name).role), PolicyName(name).target.removesuffix("1")
    paths = metadata.signed.targets if metadata else {}
    return [PolicyName.of_target(path).number for path in paths if path.startswith(prefix)]
