"""The shape of the source: what CONTRIBUTING.md promises about it, checked."""
