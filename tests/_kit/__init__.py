"""What several test files share: exact comparison, raw tensors, children, toy training."""

from _kit.children import Outcome, die, in_child
from _kit.compare import assert_same, refusal
from _kit.places import PLACES, files_under, new_place, tree_of
from _kit.tensors import (
    QUANTISED,
    QUANTISED_SUB_BYTE,
    assert_same_tensor,
    every_dtype,
    filled,
    forms,
    quantised,
    raw,
)

__all__ = [
    "PLACES",
    "QUANTISED",
    "QUANTISED_SUB_BYTE",
    "Outcome",
    "assert_same",
    "assert_same_tensor",
    "die",
    "every_dtype",
    "files_under",
    "filled",
    "forms",
    "in_child",
    "new_place",
    "quantised",
    "raw",
    "refusal",
    "tree_of",
]
