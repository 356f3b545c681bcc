"""Keys of masks that are hashes, and the texts of values that are hashed. Python's way; the compiled one, which is the
same, is in :mod:`~airflow_bottledwater.encoding.kernels.sha256`."""

from __future__ import annotations

import hmac
import struct
import uuid
from typing import Any

from airflow_bottledwater.errors import Refused

#: how the values of a type become the text that is hashed, by oid (src/include/catalog/pg_type.dat): the bytes of text
#: and varchar, the digits of int2, int4 and int8, the characters of uuid; as kernels.sha256 numbers them
FORMS = {25: 0, 1043: 0, 21: 1, 23: 1, 20: 1, 2950: 2}
_INTEGERS = {2: ">h", 4: ">i", 8: ">q"}
#: the keys of this process by their ids, by which columns name them
_keys: dict[str, HashKey] = {}


def text_of(oid: int, value: bytes) -> bytes:
    """The text of a value in binary form, as PostgreSQL writes it.

    :param oid: of its type, one of :data:`FORMS`.
    """
    if FORMS[oid] == 1:
        return str(struct.unpack(_INTEGERS[len(value)], value)[0]).encode()
    return str(uuid.UUID(bytes=value)).encode() if FORMS[oid] == 2 else value


def remember(secret: str) -> HashKey:
    """The key with this text, which :func:`known` finds from now on."""
    key = HashKey(secret.encode())
    return _keys.setdefault(key.id, key)


def known(id: str) -> HashKey:
    """A key by its id.

    :raises Refused: this process does not have it.
    """
    if (key := _keys.get(id)) is None:
        raise Refused(
            f"Values are to be hashed with the key {id}, which is not the key of today.",
            "Start the job again with the key that the pipeline had, or read the tables again with the one of today.",
        )
    return key


class HashKey:
    """The key of HMAC-SHA-256. Nothing prints it.

    :param secret: its bytes.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @property
    def id(self) -> str:
        """Tells the key from others, and does not tell the key."""
        return hmac.digest(self._secret, b"airflow-bottledwater key id", "sha256")[:8].hex()

    def digits(self, text: bytes) -> bytes:
        """The hash of a text: 64 hexadecimal digits."""
        return hmac.digest(self._secret, text, "sha256").hex().encode()

    def words(self) -> Any:
        """The scratch memory of the compiled way, with the states behind both padded keys; for one user at a time."""
        # imported here, since operators need no compiled code
        from airflow_bottledwater.encoding.kernels import sha256

        return sha256.scratch(self._secret)
