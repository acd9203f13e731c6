"""A signed policy as a run asks again about it: whether it still holds, and whether its next version was signed."""

from __future__ import annotations

from queue import SimpleQueue

from cosmati.data.vouching import AskedAuthority
from cosmati.errors import CosmatiError, ProvenanceError
from cosmati.provenance.authority.errors import TamperedManifestError
from cosmati.provenance.voucher import VouchedData, VouchedPolicy, Voucher
from cosmati.routing.policy_file import PolicyFile
from cosmati.routing.signed_policy import authority_at, policy_of_canonical


class PolicySource:
    """The signed policy that a run goes by; who gives another one in mid-run says so.

    Args:
        vouched: who has signed it, and where it's from.

    Attributes:
        found: the version after it, once it's signed, or why it can't be read; each once.
    """

    def __init__(self, vouched: VouchedPolicy) -> None:
        assert vouched.place is not None, "somebody can be asked"
        self.place = vouched.place
        self._authority = authority_at(self.place)
        self.asked = AskedAuthority(self._authority, is_fresh=True)
        self.vouched = vouched
        self.opened, self.archive, self.lost = vouched.opened, vouched.archive, vouched.lost
        self.found: SimpleQueue[PolicyFile | CosmatiError] = SimpleQueue()
        self._looked_at, self._told = vouched.number, ""

    @property
    def voucher(self) -> Voucher:
        """That the authority vouches for the policy in force."""
        return self.vouched.voucher

    def go_by(self, vouched: VouchedPolicy) -> None:
        """Take another version for the one in force; one of another authority, or by another name, is none."""
        if vouched.is_of(self.place):
            self.vouched = vouched

    def again(self) -> VouchedData:
        """Return who vouches for the policy in force now, or why nobody does; look for the version after it."""
        from cosmati.provenance.authority.policies import read_policy  # needs packages that are an extra

        was, now = self.vouched, self._authority.now().isoformat(timespec="seconds")
        try:
            if self.asked.failed is not None:
                raise self.asked.failed
            _, found = read_policy(self._authority, self.place.name, was.number)
            if found.voucher.manifest_sha256 != was.voucher.manifest_sha256:
                raise TamperedManifestError(f"Another policy is signed as {was.voucher.target} than the run was given.")
            self._look_for_the_next(was.number)
        except ProvenanceError as error:
            # What was known before shows later that it had expired.
            archive = was.archive if self.asked.failed is not None else self._authority.archive()
            return VouchedData(now, (), archive, lost=(self.asked.lost(was.voucher.target, error),))
        return VouchedPolicy(now, found.vouchers, found.archive, found.statement, place=self.place)

    def _look_for_the_next(self, number: int) -> None:
        """Hand on the very next version: what stands behind a gap isn't looked at."""
        from cosmati.provenance.authority.policies import numbers_of, read_policy

        after = max(number, self._looked_at) + 1
        if after not in numbers_of(self._authority.chain, self.place.name):
            return
        try:
            data, vouched = read_policy(self._authority, self.place.name, after)
            policy = policy_of_canonical(data, vouched.voucher.target)
            self.found.put(policy.with_voucher(vouched))
            self._looked_at = after
        except CosmatiError as error:  # it isn't the one in force, which holds
            if self._told != str(error):
                self._told = str(error)
                self.found.put(error)
