"""Bytes and their meaning: paths, JSON documents, values, safetensors headers, digests.

Nothing here knows torch or a storage. The normative text is ``docs/spec/format-v1.md``.
"""
