"""The operator changes the key: an entry that both keys sign, over the tree before it, and the new one signs all after.

    message    "cosmati key rotation/v1", the tree's size, its root and the new key in base64, a line each

`operator.vkey` names the new key. Who trusts the old one follows the entries from it to the new one.
"""

from __future__ import annotations

import base64

from cosmati.errors import TamperError
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.note import TreeHead, VerifierKey, check_signature
from cosmati.records.ledger import KeyEntry


def rotation_message(head: TreeHead, new_key: bytes) -> bytes:
    """Return what both keys sign."""
    root, key = (base64.b64encode(part).decode() for part in (head.root, new_key))
    return f"cosmati key rotation/v1\n{head.size}\n{root}\n{key}\n".encode()


def rotation_entry(old: SigningKey, new: SigningKey, head: TreeHead) -> KeyEntry:
    """Return the entry with which a key hands over, after the tree of `head`."""
    message = rotation_message(head, new.verifier.public)
    signed = old.private.sign(message), new.private.sign(message)
    return KeyEntry(old.verifier.public, new.verifier.public, *signed)


def check_rotation(entry: KeyEntry, head: TreeHead) -> None:
    """Check that both keys have signed.

    Raises:
        TamperError: one hasn't, or another tree stands before the entry.
    """
    message = rotation_message(head, entry.new_key)
    for name, key, signature in (
        ("old", entry.old_key, entry.old_signature),
        ("new", entry.new_key, entry.new_signature),
    ):
        try:
            check_signature(signature, message, VerifierKey(name, key))
        except (TamperError, ValueError) as error:
            raise TamperError(f"the operator's {name} key hasn't signed the change of keys.") from error
