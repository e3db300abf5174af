"""Plain values as JSON nodes, exact in type and in every bit.

``None``, booleans, strings, small integers, finite floats, lists and dictionaries with string keys
are JSON as they are. All else is an object with one key that begins with ``$``, the tag. What has
no tag is refused by name, or pickled where the caller asked for that.
"""

from __future__ import annotations

import base64
import math
import pickle
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, Final, TypeAlias

from waypost import limits
from waypost.errors import FormatError, UnsupportedError
from waypost.format import classes, jsontext, paths, scalars
from waypost.format.jsontext import Json

Leaf: TypeAlias = Callable[[Any, str], Json | None]
"""Turns an object that only a higher layer knows into a node, or returns None."""

Restore: TypeAlias = Callable[[str, Json, str], Any]
"""Turns tag, payload and path back into the object that a :data:`Leaf` hook took."""

SAFE_INTEGER_MAX: Final = 2**53
"""Beyond this, readers in other languages lose digits."""

FACTORIES: Final[dict[str, Callable[[], Any]]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "list": list,
    "dict": dict,
    "set": set,
    "tuple": tuple,
}
"""What a ``defaultdict`` may have as its factory."""

_BAD_NODE: Final = (
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
    OSError,
    SyntaxError,
    struct.error,
)
"""What putting a value together may raise when the node is not one that an encoder wrote."""

_ATOMS: Final = frozenset({type(None), bool, str})


class Encoder:
    """Turns values into nodes; not thread-safe, one per save.

    Args:
        leaf: Asked first for every object that is not a plain builtin.
        allow_pickle: Pickle what nothing else can hold.
    """

    def __init__(self, leaf: Leaf, *, allow_pickle: bool = False) -> None:
        self._leaf = leaf
        self._allow_pickle = allow_pickle
        self._open: set[int] = set()
        self.has_pickle = False

    def node(self, value: Any, path: str) -> Json:
        """Returns the node of ``value``, which stands at ``path``.

        Raises:
            UnsupportedError: Something in it cannot be restored exactly; names its path.
        """
        kind = type(value)
        if kind in _ATOMS:
            return value  # type: ignore[no-any-return]  # None, bool or str
        if kind is int:
            return value if abs(value) <= SAFE_INTEGER_MAX else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": _float_text(value)}
        encode = _CONTAINERS.get(kind)
        if encode is not None:
            return self._nested(encode, value, path)
        found = self._leaf(value, path)
        if found is None:
            found = scalars.encode(value)
        if found is None:
            found = self._by_class(value, path)
        return found

    def _nested(self, encode: Callable[[Encoder, Any, str], Json], value: Any, path: str) -> Json:
        if id(value) in self._open:
            raise UnsupportedError(f"{path}: a container that contains itself", path=path)
        if len(self._open) >= limits.VALUE_DEPTH_MAX:
            raise UnsupportedError(
                f"{path}: nested deeper than {limits.VALUE_DEPTH_MAX} levels", path=path
            )
        self._open.add(id(value))
        try:
            return encode(self, value, path)
        finally:
            self._open.remove(id(value))

    def _by_class(self, value: Any, path: str) -> Json:
        registered = classes.registered(type(value))
        if registered is not None:
            return {"$registered": [registered.name, self.node(registered.encode(value), path)]}
        if isinstance(value, Enum):
            classes.check_reachable(type(value), path)
            return {"$enum": [classes.name_of(type(value)), self._member(value)]}
        members = classes.members(value, path)
        if members is not None:
            return self._nested(_encode_members, (classes.name_of(type(value)), members), path)
        if self._allow_pickle:
            return self._pickled(value, path)
        raise UnsupportedError(
            f"{path}: an object of class {classes.name_of(type(value))} cannot be stored and "
            f"restored exactly. Leave it out, turn it into plain values, register it with "
            f"waypost.register_value, or pass Options(allow_pickle=True) at save and at load",
            path=path,
        )

    @staticmethod
    def _member(value: Enum) -> str | int:
        """Returns the member's name, or the bits of a combination of flags."""
        is_named = value.name is not None and value.name in type(value).__members__
        return value.name if is_named else int(value.value)

    def _pickled(self, value: Any, path: str) -> Json:
        try:
            data = pickle.dumps(value)
        except Exception as error:  # any class may raise anything from its __reduce__
            raise UnsupportedError(
                f"{path}: an object of class {classes.name_of(type(value))} cannot be pickled: "
                f"{error}",
                path=path,
            ) from error
        self.has_pickle = True
        return {"$pickle": base64.b64encode(data).decode("ascii")}

    def pairs(self, items: Iterable[tuple[Any, Any]], path: str) -> Json:
        """Returns an object when all keys allow it, else a list of pairs."""
        items = list(items)
        if all(type(key) is str and not key.startswith("$") for key, _ in items):
            return {key: self.node(value, self.below(path, key)) for key, value in items}
        return [
            [self.node(key, f"{path}/~key"), self.node(value, self.below(path, key))]
            for key, value in items
        ]

    def below(self, path: str, key: Any) -> str:
        """Returns the path of what stands under ``key`` at ``path``."""
        if type(key) is str:
            return paths.join(path, paths.segment(key))
        text = jsontext.dump(self.node(key, f"{path}/~key")).decode("utf-8", "surrogatepass")
        return paths.join(path, paths.key_segment(text))

    def items(self, values: Iterable[Any], path: str) -> list[Json]:
        """Returns the nodes of ``values``, numbered below ``path``."""
        return [self.node(value, f"{path}/{index}") for index, value in enumerate(values)]


class Decoder:
    """Turns nodes into values; not thread-safe.

    Args:
        restore: Called for every tag that this module does not know.
        allow_pickle: Unpickle what was pickled at save.
    """

    def __init__(self, restore: Restore, *, allow_pickle: bool = False) -> None:
        self._restore = restore
        self._allow_pickle = allow_pickle

    def value(self, node: Json, path: str) -> Any:
        """Returns the value of ``node``, which stands at ``path``.

        Raises:
            FormatError: The node is not one that an encoder writes.
            UnsupportedError: It needs a class that is not there, or pickle without permission.
        """
        if isinstance(node, list):
            return self.items(node, path)
        if not isinstance(node, dict):
            return node
        tag = next(iter(node), "")
        if len(node) != 1 or not tag.startswith("$"):
            return dict(self.pairs(node, path))
        try:
            return self._tagged(tag, node[tag], path)
        except _BAD_NODE as error:
            if isinstance(error, (FormatError, UnsupportedError)):
                raise
            raise FormatError(f"{path}: bad value node {tag[:40]}: {str(error)[:200]}") from error

    def _tagged(self, tag: str, payload: Any, path: str) -> Any:
        container = _FROM_CONTAINER.get(tag)
        if container is not None:
            return container(self, payload, path)
        scalar = scalars.DECODERS.get(tag)
        if scalar is not None:
            return scalar(payload)
        return self._restore(tag, payload, path)

    def pairs(self, payload: Json, path: str) -> Iterable[tuple[Any, Any]]:
        """Yields the keys and values that :meth:`Encoder.pairs` wrote."""
        if isinstance(payload, dict):
            for key, node in payload.items():
                yield key, self.value(node, f"{path}/{paths.segment(key)}")
            return
        rows: Any = payload
        for key_node, node in rows:
            key = key_node if type(key_node) is str else self.value(key_node, path)
            yield key, self.value(node, self._below(path, key, key_node))

    def _below(self, path: str, key: Any, key_node: Json) -> str:
        if type(key) is str:
            return f"{path}/{paths.segment(key)}"
        text = jsontext.dump(key_node).decode("utf-8", "surrogatepass")
        return f"{path}/{paths.key_segment(text)}"

    def items(self, payload: Iterable[Json], path: str) -> list[Any]:
        """Returns the values that :meth:`Encoder.items` wrote."""
        return [self.value(node, f"{path}/{index}") for index, node in enumerate(payload)]

    def unpickle(self, payload: str, path: str) -> Any:
        """Returns the pickled object, when the caller allowed that."""
        if not self._allow_pickle:
            raise UnsupportedError(
                f"{path}: was pickled at save; pass Options(allow_pickle=True) to restore it, and "
                f"only if you trust whoever wrote the snapshot",
                path=path,
            )
        data = base64.b64decode(payload, validate=True)
        return pickle.loads(data)  # noqa: S301 - the caller asked for it at save and at load


def decode_plain(node: Json, path: str) -> Any:
    """Returns the value of a node that holds no tensors, such as metrics and metadata.

    Raises:
        FormatError: It holds something else.
    """

    def refuse(tag: str, payload: Json, path: str) -> Any:
        raise FormatError(f"{path}: unexpected {tag}")

    return Decoder(refuse).value(node, path)


def _float_text(value: float) -> str:
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return "nan:" + struct.pack(">d", value).hex()


def float_from_text(text: str) -> float:
    """Returns the infinity or the NaN, with its payload, that ``text`` names."""
    if text in ("inf", "-inf"):
        return float(text)
    if not text.startswith("nan:"):
        raise ValueError(f"not a float: {text[:40]!r}")
    value: float = struct.unpack(">d", bytes.fromhex(text[4:]))[0]
    return value


def _encode_members(encoder: Encoder, value: Any, path: str) -> Json:
    name, (tag, members) = value
    return {tag: [name, encoder.pairs(members.items(), path)]}


def _sorted_nodes(encoder: Encoder, values: Iterable[Any], path: str) -> Json:
    nodes = [encoder.node(value, f"{path}/~item") for value in values]
    return sorted(nodes, key=jsontext.dump)


def _encode_dict(encoder: Encoder, value: Any, path: str) -> Json:
    found = encoder.pairs(value.items(), path)
    return found if isinstance(found, dict) else {"$dict": found}


def _encode_defaultdict(encoder: Encoder, value: Any, path: str) -> Json:
    factory = value.default_factory
    name = next((name for name, known in FACTORIES.items() if known is factory), None)
    if name is None and factory is not None:
        raise UnsupportedError(
            f"{path}: a defaultdict whose factory is {factory!r}; only builtin types can be stored",
            path=path,
        )
    return {"$defaultdict": [name, encoder.pairs(value.items(), path)]}


_CONTAINERS: Final[dict[type, Callable[[Encoder, Any, str], Json]]] = {
    list: lambda encoder, value, path: encoder.items(value, path),
    tuple: lambda encoder, value, path: {"$tuple": encoder.items(value, path)},
    dict: _encode_dict,
    OrderedDict: lambda encoder, value, path: {"$odict": encoder.pairs(value.items(), path)},
    Counter: lambda encoder, value, path: {"$counter": encoder.pairs(value.items(), path)},
    defaultdict: _encode_defaultdict,
    set: lambda encoder, value, path: {"$set": _sorted_nodes(encoder, value, path)},
    frozenset: lambda encoder, value, path: {"$frozenset": _sorted_nodes(encoder, value, path)},
    deque: lambda encoder, value, path: {"$deque": [value.maxlen, encoder.items(value, path)]},
    slice: lambda encoder, value, path: {
        "$slice": encoder.items((value.start, value.stop, value.step), path)
    },
}


def _decode_defaultdict(decoder: Decoder, payload: Any, path: str) -> Any:
    name, pairs = payload
    factory = None if name is None else FACTORIES[name]
    return defaultdict(factory, decoder.pairs(pairs, path))


def _decode_deque(decoder: Decoder, payload: Any, path: str) -> Any:
    maxlen, items = payload
    return deque(decoder.items(items, path), maxlen)


def _decode_registered(decoder: Decoder, payload: Any, path: str) -> Any:
    name, node = payload
    return classes.by_registered_name(name, path).decode(decoder.value(node, path))


def _decode_enum(decoder: Decoder, payload: Any, path: str) -> Any:
    name, member = payload
    cls = classes.find(name, path)
    if not issubclass(cls, Enum):
        raise FormatError(f"{path}: {name} is not an Enum")
    return cls(member) if type(member) is int else cls[member]


def _decode_namedtuple(decoder: Decoder, payload: Any, path: str) -> Any:
    name, pairs = payload
    return classes.make_namedtuple(name, dict(decoder.pairs(pairs, path)), path)


def _decode_dataclass(decoder: Decoder, payload: Any, path: str) -> Any:
    name, pairs = payload
    return classes.make_dataclass(name, dict(decoder.pairs(pairs, path)), path)


_FROM_CONTAINER: Final[dict[str, Callable[[Decoder, Any, str], Any]]] = {
    "$int": lambda decoder, payload, path: int(payload, 16),
    "$float": lambda decoder, payload, path: float_from_text(payload),
    "$tuple": lambda decoder, payload, path: tuple(decoder.items(payload, path)),
    "$dict": lambda decoder, payload, path: dict(decoder.pairs(payload, path)),
    "$odict": lambda decoder, payload, path: OrderedDict(decoder.pairs(payload, path)),
    "$counter": lambda decoder, payload, path: Counter(dict(decoder.pairs(payload, path))),
    "$defaultdict": _decode_defaultdict,
    "$set": lambda decoder, payload, path: set(decoder.items(payload, path)),
    "$frozenset": lambda decoder, payload, path: frozenset(decoder.items(payload, path)),
    "$deque": _decode_deque,
    "$slice": lambda decoder, payload, path: slice(*decoder.items(payload, path)),
    "$registered": _decode_registered,
    "$enum": _decode_enum,
    "$namedtuple": _decode_namedtuple,
    "$dataclass": _decode_dataclass,
    "$pickle": lambda decoder, payload, path: decoder.unpickle(payload, path),
}
