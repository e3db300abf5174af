"""Settings of saves and loads, and the only place that reads the environment.

Each setting has three levels: argument, then ``WAYPOST_<NAME>`` in the environment, then default.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from waypost import limits
from waypost._version import __version__

DIGESTS = ("xxh3-128", "blake3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of one save, load or open. ``None`` means: environment, then default.

    Attributes:
        allow_pickle: Store, or restore, objects outside the documented set of values by pickle.
            Must be given at save *and* at load. Never read from the environment. Default: no.
        durable: Sync every file and directory before a save returns. Default: yes. Without it a
            snapshot survives a crash of the process, not one of the machine.
        digest: ``"xxh3-128"`` (as fast as memory; finds accidents) or ``"blake3"`` (cryptographic,
            needs the package ``blake3``; for writers that are not trusted).
        workers: Threads of one machine that write or read; ranks on it divide them, one each at
            least. Default 3: some copy and digest while another waits for the disk.
        segment_bytes: Bytes of one write or read call, a multiple of 256 KiB. Default 8 MiB.
        direct_io: Bypass the page cache when writing where the file system allows it. Default:
            yes; it takes a third to a seventh of the processor time of buffered writing.
        file_bytes_max: Size in bytes from which on data goes to a next file. Default 64 GiB.
        check_space: Compare the bytes needed with the bytes free before writing. Default: yes.
        timeout_s: Seconds that ranks wait for one another without any progress. Default 180:
            longer than ranks drift apart, shorter than the watchdogs of collective libraries.
        check_replicas: Compare, by digest, what several ranks hold alike by declaration or by
            their sharding. Default: no. What nobody declared is always compared.
        share_reads: Read what several ranks want on one of them, and send it to the others.
            Default: yes; on one machine with fast disks, no may be faster.
    """

    allow_pickle: bool = False
    durable: bool | None = None
    digest: str | None = None
    workers: int | None = None
    segment_bytes: int | None = None
    direct_io: bool | None = None
    file_bytes_max: int | None = None
    check_space: bool | None = None
    timeout_s: float | None = None
    check_replicas: bool | None = None
    share_reads: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Options with every level resolved and checked."""

    allow_pickle: bool = False
    durable: bool = True
    digest: str = "xxh3-128"
    workers: int = 3
    segment_bytes: int = limits.SEGMENT_BYTES
    direct_io: bool = True
    file_bytes_max: int = limits.FILE_BYTES_MAX
    check_space: bool = True
    timeout_s: float = limits.TIMEOUT_S
    check_replicas: bool = False
    share_reads: bool = True


def divided(settings: Settings, local_size: int) -> Settings:
    """Returns the settings of one of ``local_size`` ranks that share a machine's threads."""
    return replace(settings, workers=max(1, settings.workers // local_size))


def resolve(options: Options | None, environment: Mapping[str, str] | None = None) -> Settings:
    """Returns the settings that hold: argument, else environment, else default.

    Raises:
        ValueError: A value is outside its bounds; the message names the setting and its source.
    """
    environment = os.environ if environment is None else environment
    options = options or Options()
    chosen: dict[str, Any] = {}
    for field in fields(Settings):
        given = getattr(options, field.name)
        if given is not None:
            chosen[field.name] = given
            continue
        name = f"WAYPOST_{field.name.upper()}"
        text = environment.get(name)
        if text is not None and field.name != "allow_pickle":
            chosen[field.name] = _parse(name, text, _PARSERS[type(field.default)])
    settings = Settings(**chosen)
    _check(settings)
    return settings


def color_wanted(is_terminal: bool) -> bool:
    """Returns whether output should have colour, by the terminal and ``NO_COLOR``."""
    return is_terminal and not os.environ.get("NO_COLOR")


def _parse(name: str, text: str, parser: Callable[[str], Any]) -> Any:
    try:
        return parser(text)
    except (ValueError, KeyError) as error:
        raise ValueError(f"environment variable {name}={text!r} is not a valid value") from error


_TRUTH = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_PARSERS: dict[type, Callable[[str], Any]] = {
    bool: lambda text: _TRUTH[text.strip().lower()],
    int: lambda text: int(text.replace("_", "")),
    float: float,
    str: lambda text: text.strip(),
}


def _check(settings: Settings) -> None:
    if settings.digest not in DIGESTS:
        raise ValueError(f"digest={settings.digest!r}: expected one of {', '.join(DIGESTS)}")
    if not 1 <= settings.workers <= limits.WORKERS_MAX:
        raise ValueError(f"workers={settings.workers}: expected 1 to {limits.WORKERS_MAX}")
    if settings.segment_bytes < limits.CHUNK_BYTES or settings.segment_bytes % limits.CHUNK_BYTES:
        raise ValueError(
            f"segment_bytes={settings.segment_bytes}: expected a multiple of {limits.CHUNK_BYTES}"
        )
    if not 0 < settings.timeout_s < limits.TIMEOUT_S_MAX:
        raise ValueError(
            f"timeout_s={settings.timeout_s}: expected seconds, below {limits.TIMEOUT_S_MAX}"
        )
    if settings.file_bytes_max < limits.CHUNK_BYTES:
        raise ValueError(
            f"file_bytes_max={settings.file_bytes_max}: expected at least {limits.CHUNK_BYTES}"
        )


def software() -> str:
    """Returns the name and version that snapshots record as their writer."""
    return f"waypost {__version__}"
