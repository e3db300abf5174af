"""Every bound in one place: what it limits, its unit, and why it has that value.

A bound exists so that bad input, a lost peer or a slow disk leads to an error in bounded time and
memory, never to a hang or to a process that eats the machine.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

# Format: sizes of what is parsed before it can be checked against a digest.
MANIFEST_BYTES_MAX: Final = 64 * MIB
"""A manifest is a few KiB; metadata and a row per rank may grow it. Read whole into memory."""

INDEX_BYTES_MAX: Final = 1 * GIB
"""Index and structure files grow with leaves: about 100 bytes each, so this is 10 million."""

HEADER_BYTES_MAX: Final = 100_000_000
"""The bound that the safetensors format itself sets on its header, in bytes."""

POINTER_BYTES_MAX: Final = 64 * KIB
"""``LATEST`` and ``run.json`` are below 1 KiB."""

VALUE_DEPTH_MAX: Final = 80
"""Nesting of user containers. Each level takes up to three levels of JSON and a few of Python's
stack, which allows 1000."""

LEAF_COUNT_MAX: Final = 10_000_000
"""Leaves of one snapshot; the largest known models have below one million tensors."""

DIMENSIONS_MAX: Final = 64
"""Dimensions of a tensor; torch itself allows 64."""

PATH_CHARACTERS_MAX: Final = 16_384
"""Characters of one leaf path, after escaping."""

# Layout of data files.
CHUNK_BYTES: Final = 256 * KIB
"""Unit of digests. Small enough to stay in a core's cache between copy and digest and to make a
partial read cheap; large enough that a digest call (0.3 µs) and 21 bytes of index do not count."""

DATA_ALIGNMENT_BYTES: Final = 4096
"""Data starts at a multiple of this, as direct I/O wants on every disk in use."""

FILE_BYTES_MAX: Final = 64 * GIB
"""A file family goes on in a next file beyond this size."""

# Pipeline.
SEGMENT_BYTES: Final = 8 * MIB
"""One write or read call. Disks reach their rate from about 4 MiB on; four of these fit the
64 MiB that a save may use above the state."""

WORKERS_MAX: Final = 64
"""Threads of one save or load."""

VECTOR_BUFFERS_MAX: Final = 512
"""Buffers of one vectored call; Linux allows 1024."""

# Runs.
STEP_MAX: Final = 2**63 - 1
"""Steps are stored as signed 64-bit integers by most tools that read them."""

RETRIES_MAX: Final = 6
"""Tries of a file system call that network mounts are known to answer falsely at first."""

RETRY_WAIT_S: Final = 0.05
"""First wait between such retries, in seconds; doubled each time."""

LISTING_NAMES_MAX: Final = 1_000_000
"""Names in one directory."""

FOLDER_DEPTH_MAX: Final = 16
"""Levels of folders below a snapshot that are looked at; Waypost makes two."""

ROLLBACKS_MAX: Final = 500
"""Roll-backs that ``run.json`` remembers; retention has long removed what older ones gave up."""

# Ranks.
WORLD_SIZE_MAX: Final = 1_000_000
"""Ranks of one job; the largest known have some 100,000."""

SHARDING_CHARACTERS_MAX: Final = 64 * MIB
"""A mesh takes some 20 characters; boxes named one by one, some 20 for each rank."""

DIVISIONS_MAX: Final = 1024
"""Divisions of a dimension within which another one is made; in use are the ranks of a mesh, which
may be more. Each costs time to compute what a rank holds."""

TIMEOUT_S: Final = 180.0
"""How long ranks wait for one another without any progress. Longer than any rank compiles or
collects garbage between two steps, shorter than the watchdogs of collective libraries."""

TIMEOUT_S_MAX: Final = 7 * 24 * 3600.0
"""A week, in seconds: beyond that a number is a mistake, and some stores fail."""

BEAT_S: Final = 1.0
"""How often, at most, a rank that writes or reads tells the others of its progress."""

DIFFERENCES_MAX: Final = 1000
"""Differences between ranks that one rank reports to the others."""

WATCH_S: Final = 1.0
"""How often a rank that waits for others looks whether the training of one of them has failed."""

POLL_S: Final = 0.0002
"""First pause between two looks at the store that ranks share; doubled each time."""

POLL_S_MAX: Final = 0.5
"""Longest such pause: 4096 ranks then ask a store 8,000 times a second, which it can answer."""

EXCHANGE_BYTES: Final = 8 * MIB
"""One message between ranks that share what they read; small tensors travel together in one."""
