"""Tests of Waypost; CONTRIBUTING.md says which directory holds what."""
