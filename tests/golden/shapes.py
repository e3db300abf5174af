"""Classes that golden snapshots name, as `golden.shapes:…`. Never rename one."""

import dataclasses
import enum
from typing import Any, NamedTuple

import torch


class Phase(enum.Enum):
    """A plain enumeration."""

    WARMUP = "warmup"
    MAIN = "main"


class Colour(enum.Flag):
    """An enumeration whose members combine."""

    RED = 1
    BLUE = 2


class Point(NamedTuple):
    """A namedtuple class."""

    x: int
    y: Any


@dataclasses.dataclass
class Config:
    """A dataclass that holds other values."""

    rate: float
    names: list[str]


class Vocabulary:
    """Storable only because it is registered."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.words == other.words

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Vocabulary({self.words})"


class Opaque:
    """Storable only by pickle."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and self.number == other.number

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Opaque({self.number})"


class Marked(torch.Tensor):
    """A subclass over plain memory."""


class Scaled(torch.Tensor):
    """A wrapper subclass: integers and a scale, with a context."""

    codes: torch.Tensor
    scale: torch.Tensor
    label: str

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, label: str) -> "Scaled":
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, label: str) -> None:
        self.codes, self.scale, self.label = codes, scale, label

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, str]]:
        return ["codes", "scale"], {"label": self.label}

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, torch.Tensor], context: dict[str, str], size: Any, stride: Any
    ) -> "Scaled":
        return Scaled(parts["codes"], parts["scale"], context["label"])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        if func is torch.ops.aten.detach.default:
            (found,) = args
            return Scaled(found.codes, found.scale, found.label)
        raise NotImplementedError(f"{func} of a Scaled tensor")


class Net(torch.nn.Module):
    """Tied weights, buffers, a submodule with a version of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
