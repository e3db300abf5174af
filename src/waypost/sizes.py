"""Numbers of bytes, for people."""

from __future__ import annotations

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def size_text(nbytes: int) -> str:
    """Returns a number of bytes in powers of ten, such as ``1.3 GB``."""
    size, unit = float(nbytes), 0
    while size >= 999.5 and unit + 1 < len(_UNITS):
        size /= 1000
        unit += 1
    return f"{size:.3g} {_UNITS[unit]}"
