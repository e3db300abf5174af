"""Tools for tests, public: a storage that fails at a chosen call, and ranks that are threads."""

from waypost.testing.faults import Fault, FaultyLocation, FaultyStorage, faulty
from waypost.testing.ranks import Outcome, RankFault, RankGroup, RankKilled, run_ranks, values

__all__ = [
    "Fault",
    "FaultyLocation",
    "FaultyStorage",
    "Outcome",
    "RankFault",
    "RankGroup",
    "RankKilled",
    "faulty",
    "run_ranks",
    "values",
]
