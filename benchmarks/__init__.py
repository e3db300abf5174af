"""Benchmarks: Waypost beside its peers and beside the bare limits of the machine, in one run."""
