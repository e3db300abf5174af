"""Tools for tests, public: a storage that fails, tears or dies at a chosen call."""

from waypost.testing.faults import Fault, FaultyLocation, FaultyStorage, faulty

__all__ = ["Fault", "FaultyLocation", "FaultyStorage", "faulty"]
