"""Keys that stay on a token (a smart card, a hardware security module): PKCS#11, by securesystemslib's `HSMSigner`.

A key file names the token and the key on it by a URI of RFC 7512, and holds no secret:
`pkcs11:token=bank;id=%02?module-path=/usr/lib/softhsm/libsofthsm2.so`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl, quote, quote_from_bytes, unquote, unquote_to_bytes

from securesystemslib.signer import HSMSigner, Signature, SSlibKey

from cosmati.errors import MissingExtraError, ProvenanceError

AskPin = Callable[[str], str]
"""Returns the PIN of a token, by its label."""
_MODULE = "PYKCS11LIB"
"""The variable of the environment in which `HSMSigner` looks for the library."""


@dataclass(frozen=True)
class TokenKey:
    """Where a key lies.

    Args:
        module: path of the token's PKCS#11 library, which is loaded into this process.
        token: label of the token; empty is the only one that there is.
        number: the key's id on it (CKA_ID), from 1; 0 is one that has still to be made.
    """

    module: str
    token: str = ""
    number: int = 0

    @property
    def uri(self) -> str:
        """How a key file names it (RFC 7512)."""
        number = quote_from_bytes(_id_bytes(self.number), safe="")
        return f"pkcs11:token={quote(self.token, safe='')};id={number}?module-path={quote(self.module)}"

    @classmethod
    def of_uri(cls, text: str) -> TokenKey:
        """Read a key file.

        Raises:
            ProvenanceError: it names no key, or holds a PIN.
        """
        path, _, query = text.strip().partition("?")
        scheme, _, attributes = path.partition(":")
        named = dict(part.split("=", 1) for part in attributes.split(";") if "=" in part)
        asked = dict(parse_qsl(query.replace("+", "%2B"), keep_blank_values=True))
        if {"pin-value", "pin-source"} & {*named, *asked}:
            raise ProvenanceError("It holds a PIN. Take it out, and change the PIN: who read the file knows it.")
        number = unquote_to_bytes(named.get("id", ""))
        if scheme != "pkcs11" or not named.get("token") or not number.lstrip(b"\0") or not asked.get("module-path"):
            raise ProvenanceError("It has the form pkcs11:token=LABEL;id=%01?module-path=/path/of/the/library.so.")
        return cls(asked["module-path"], unquote(named["token"]), int.from_bytes(number, "big"))


def find_key(place: TokenKey, ask_pin: AskPin) -> tuple[TokenKey, SSlibKey]:
    """Return where a key on a token is, by the token's own label, and its public half.

    Raises:
        ProvenanceError: there's no such token or key, it isn't EC P-256, or the PIN isn't its own.
        MissingExtraError: python-pkcs11 isn't installed.
    """
    with _reached(place):
        label = _token(place).label
        place = replace(place, token=label)
        _, key = HSMSigner.import_(place.number, label, lambda _: ask_pin(label))
    if key.scheme != "ecdsa-sha2-nistp256":
        raise ProvenanceError(f"Key {place.number} of the token {label!r} is {key.scheme}. Make one that's EC P-256.")
    return place, key


def generate_key(place: TokenKey, name: str, ask_pin: AskPin) -> tuple[TokenKey, SSlibKey]:
    """Make a key on a token, which it can't leave, under the lowest free number; return both as `find_key` does.

    Raises:
        ProvenanceError: there's no such token, it makes no such keys, or the PIN isn't its own.
        MissingExtraError: python-pkcs11 isn't installed.
    """
    with _reached(place):
        import pkcs11

        token = _token(place)
        with token.open(rw=True, user_pin=ask_pin(token.label)) as session:
            taken = {bytes(one[pkcs11.Attribute.ID]) for one in session.get_objects() if _has_id(one)}
            number = next(one for one in range(1, len(taken) + 2) if _id_bytes(one) not in taken)
            curve = pkcs11.util.ec.encode_named_curve_parameters("secp256r1")
            domain = session.create_domain_parameters(
                pkcs11.KeyType.EC, {pkcs11.Attribute.EC_PARAMS: curve}, local=True
            )
            domain.generate_keypair(
                id=_id_bytes(number),
                label=name,
                store=True,
                capabilities=pkcs11.MechanismFlag.SIGN | pkcs11.MechanismFlag.VERIFY,
                private_template={pkcs11.Attribute.SENSITIVE: True, pkcs11.Attribute.EXTRACTABLE: False},
            )
        place = replace(place, token=token.label, number=number)
    return find_key(place, ask_pin)


class TokenSigner(HSMSigner):
    """Signs on a token.

    Args:
        place: of the key.
        public_key: its public half.
        ask_pin: for the PIN.
    """

    def __init__(self, place: TokenKey, public_key: SSlibKey, ask_pin: AskPin) -> None:
        super().__init__(place.number, public_key, lambda _: ask_pin(place.token), place.token)
        self._place = place

    def sign(self, payload: bytes) -> Signature:
        """Sign.

        Raises:
            ProvenanceError: the token or the key isn't there, or the PIN isn't its own.
        """
        with _reached(self._place):
            return super().sign(payload)


def _id_bytes(number: int) -> bytes:
    return number.to_bytes((number.bit_length() + 7) // 8, "big")


def _token(place: TokenKey) -> Any:  # noqa: ANN401  (python-pkcs11 has a class for it, where it's installed)
    found = HSMSigner._find_token(place.token or None)  # noqa: SLF001  (the one that will sign)
    if not found.label:
        raise ProvenanceError(f"The token of {place.module} has no label. Give it one with its own tool.")
    return found


def _has_id(thing: Any) -> bool:  # noqa: ANN401
    from pkcs11 import Attribute, ObjectClass

    return thing[Attribute.CLASS] in {ObjectClass.PRIVATE_KEY, ObjectClass.PUBLIC_KEY}


@contextmanager
def _reached(place: TokenKey) -> Iterator[None]:
    """Let `HSMSigner` find a token's library, and tell its errors as ours."""
    try:
        from pkcs11 import exceptions
    except ImportError as error:
        msg = f"Keys on tokens need another package ({error.name}): pip install python-pkcs11."
        raise MissingExtraError(msg) from error
    before = os.environ.get(_MODULE)
    os.environ[_MODULE] = place.module
    where = f"the token {place.token!r}" if place.token else f"a token of {place.module}"
    try:
        yield
    except (exceptions.PinIncorrect, exceptions.PinLenRange, exceptions.PinInvalid) as error:
        msg = f"That isn't the PIN of {where}. Tokens lock themselves after a few wrong ones: look it up first."
        raise ProvenanceError(msg) from error
    except exceptions.PinLocked as error:
        raise ProvenanceError(
            f"The PIN of {where} is locked after wrong ones. Unlock it with the token's tool."
        ) from error
    except (exceptions.PKCS11Error, ValueError) as error:
        if isinstance(error, ProvenanceError):
            raise
        why = str(error) or type(error).__name__
        msg = (
            f"The key {place.number or '(new)'} on {where} can't be used: {why}. Look whether the token is there, and "
            f"whether {place.module} is its library; where it's elsewhere, leave its folder out of --keys."
        )
        raise ProvenanceError(msg) from error
    finally:
        if before is None:
            os.environ.pop(_MODULE, None)
        else:
            os.environ[_MODULE] = before
