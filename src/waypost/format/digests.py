"""Digests by name: fast ones against accidents, cryptographic ones against people.

A digest in a document is written ``"<algorithm>:<hex>"``, so that a reader never guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import xxhash

from waypost.errors import FormatError

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Hasher(Protocol):
    """An incremental digest."""

    def update(self, data: Buffer, /) -> object:
        """Adds ``data``."""
        ...

    def digest(self) -> bytes:
        """Returns the digest of all that was added."""
        ...


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One digest algorithm.

    Attributes:
        name: What documents call it.
        size_bytes: Length of a digest.
        one_shot: Digest of one buffer; releases the GIL.
        new: An incremental digest.
    """

    name: str
    size_bytes: int
    one_shot: Callable[[Buffer], bytes]
    new: Callable[[], Hasher]

    def text(self, digest: bytes) -> str:
        """Returns the form in which documents hold ``digest``."""
        return f"{self.name}:{digest.hex()}"

    def of(self, data: Buffer) -> str:
        """Returns the digest of ``data`` in the form that documents hold."""
        return self.text(self.one_shot(data))

    def over(self, parts: Iterable[Buffer]) -> bytes:
        """Returns the digest of the concatenated ``parts``."""
        hasher = self.new()
        for part in parts:
            hasher.update(part)
        return hasher.digest()


def algorithm(name: str) -> Algorithm:
    """Returns the algorithm called ``name``.

    Raises:
        FormatError: The name is unknown, or its package is not installed.
    """
    if name == "xxh3-128":
        return _XXH3_128
    if name == "blake3":
        return _blake3()
    raise FormatError(f"unknown digest algorithm {name[:40]!r}: known are xxh3-128 and blake3")


def split(text: str) -> tuple[Algorithm, bytes]:
    """Returns the algorithm and the raw digest of ``"<algorithm>:<hex>"``.

    Raises:
        FormatError: ``text`` has another form, or the wrong length.
    """
    name, _, hexadecimal = text.partition(":")
    found = algorithm(name)
    try:
        raw = bytes.fromhex(hexadecimal)
    except ValueError:
        raw = b""
    if len(raw) != found.size_bytes or raw.hex() != hexadecimal:
        raise FormatError(f"not a digest: {text[:80]!r}")
    return found, raw


_XXH3_128 = Algorithm("xxh3-128", 16, xxhash.xxh3_128_digest, xxhash.xxh3_128)


def _blake3() -> Algorithm:
    try:
        from blake3 import blake3
    except ImportError as error:
        raise FormatError(
            "digest blake3 needs the package 'blake3': pip install 'waypost[blake3]'"
        ) from error

    def one_shot(data: Buffer) -> bytes:
        return bytes(blake3(data).digest())

    return Algorithm("blake3", 32, one_shot, blake3)
