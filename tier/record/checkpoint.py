"""Turns a state machine as it stands into bytes, and back; bytes from outside can name data and nothing that acts. Pure.

The machine's own pickle would do but for two things. Pickles call what they name: here they can name containers and the
few functions at the end of this file, and classes not at all. Those stand in a table beside the pickle, must be of the
modules given, and are only ever filled with attributes. And a table of requests that share pages is one deep chain of
references, which pickle follows by recursion: here objects known by identity are numbered and written one by one.
"""

from __future__ import annotations

import gc
import importlib
import io
import pickle
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from itertools import count
from operator import attrgetter
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

State = dict[str, Any]  # an object's attributes
# May replace attributes of an object on their way into the bytes, of a copy that is its own.
Edit = Callable[[object, State], State]

# Not one of them can be changed, or does anything but hold what it is given.
_CONTAINERS: Mapping[tuple[str, str], object] = {
    (kind.__module__, kind.__name__): kind
    for kind in (
        *(bytearray, complex, dict, float, frozenset, int, list, range, set, tuple),
        *(OrderedDict, count, defaultdict, deque),
    )
}
_NUMBERS = (
    "biufcV"  # kinds of numpy arrays, V being records of others; "O" would be pickles within the pickle
)


class CheckpointError(ValueError):
    """The state can't be written, or the bytes are no state; the message says why."""


def dump(root: object, modules: Collection[str], edit: Edit | None = None) -> bytes:
    """`root` and all that hangs on it, as far as classes of `modules` and containers go.

    Raises CheckpointError naming the first class that is neither, or saying why the whole can't be bytes.
    """
    out = io.BytesIO()
    pickler = _Pickler(out, root, modules)
    numbers: list[int] = []
    try:
        with _uncollected():
            for one in pickler.entities:  # grows while it is gone through
                state = _attributes(one)
                state = state if edit is None else edit(one, state)
                numbers.append(pickler.number_of(type(one), tuple(state)))
                pickler.dump(tuple(state.values()))
        return msgspec.msgpack.encode((list(pickler.kinds), numbers, out.getvalue()))
    except MemoryError as error:
        raise CheckpointError("it takes more memory than there is") from error
    except (*_UNWRITABLE, pickle.PicklingError) as error:
        raise CheckpointError(str(error)) from error


def load(data: bytes, modules: Collection[str]) -> Any:
    """What `dump` was given. Raises CheckpointError."""
    try:
        named, numbers, pickles = msgspec.msgpack.decode(data, type=_Dumped)
        kinds = [_kind(name, names, modules) for name, names in named]
        entities = [_entity_of(kinds[number]) for number in numbers]
        unpickler = _Unpickler(io.BytesIO(pickles), entities, kinds)
        with _uncollected():
            for one, number in zip(entities, numbers, strict=True):
                _fill(one, kinds[number].names, unpickler.load())
        return entities[0]
    except (*_BROKEN, pickle.UnpicklingError) as error:
        raise CheckpointError(f"the state in it can't be read: {error}") from error


# Classes with the names of their attributes; for each object the number of its class; their attributes, pickled.
_Dumped = tuple[list[tuple[str, list[str]]], list[Annotated[int, msgspec.Meta(ge=0)]], bytes]
# What a state that can't be one message can raise: it is of an unknown kind, or has more than the 2**32 - 1 bytes that
# msgpack can count.
_UNWRITABLE = (AttributeError, OverflowError, RecursionError, TypeError, ValueError, msgspec.MsgspecError)
# What a pickle that isn't one can raise, beside UnpicklingError.
_BROKEN = (
    *(AttributeError, EOFError, ImportError, IndexError, KeyError, MemoryError, OverflowError),
    *(RecursionError, TypeError, UnicodeDecodeError, ValueError, msgspec.MsgspecError),
)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector, which would go through all that is being made again and again: half of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# ---- classes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kind:
    """A class, and attributes that objects of it have."""

    type: type
    names: list[str]

    def make(self, values: tuple[Any, ...]) -> object:
        """An object that is known by what it holds."""
        kind = self.type
        if issubclass(kind, msgspec.Struct):
            return kind(**dict(zip(self.names, values, strict=True)))
        if issubclass(kind, Enum):
            return kind(*values)
        if issubclass(kind, tuple):
            return tuple.__new__(kind, values)
        made: object = object.__new__(kind)
        _fill(made, self.names, values)
        return made


def _kind(name: str, names: list[str], modules: Collection[str]) -> _Kind:
    """What the table names. Only what a module defines itself: what it imports could be anything."""
    module, _, own = name.partition(":")
    found = getattr(importlib.import_module(module), own, None) if module in modules else None
    if not isinstance(found, type) or found.__module__ != module:
        raise CheckpointError(f"{name} can't be part of a state machine's state")
    return _Kind(found, names)


def _is_entity(kind: type) -> bool:
    """Whether objects of a class are known by identity: what refers to one must refer to that one afterwards too."""
    return all(getattr(kind, name) is getattr(object, name) for name in ("__hash__", "__eq__"))


def _entity_of(kind: _Kind) -> object:
    if not _is_entity(kind.type):
        raise CheckpointError(f"objects of {kind.type.__name__} are not known by identity")
    return object.__new__(kind.type)


def _attributes(one: object) -> State:
    state: Any = one.__getstate__()
    named, slots = state if isinstance(state, tuple) else (state, None)
    return {**(named or {}), **(slots or {})}


def _fill(one: object, names: list[str], values: tuple[Any, ...]) -> None:
    for name, value in zip(names, values, strict=True):
        object.__setattr__(one, name, value)


def _values_of(kind: type) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """The attributes of a class of values, and how to read them all from one."""
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__, msgspec.structs.astuple
    if issubclass(kind, Enum):
        return ("value",), lambda one: (one.value,)
    if issubclass(kind, tuple):
        return (), tuple
    if is_dataclass(kind):
        names = tuple(field.name for field in fields(kind))
        return names, attrgetter(*names) if names[1:] else lambda one: tuple(_attributes(one).values())
    raise CheckpointError(f"{kind.__module__}.{kind.__qualname__} can't be part of a state machine's state")


# ---- pickles -----------------------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO, root: object, modules: Collection[str]) -> None:
        super().__init__(out, protocol=5)
        self.entities = [root]
        self.kinds: dict[tuple[str, tuple[str, ...]], int] = {}  # class and attributes -> its number
        self._numbers = {id(root): 0}
        self._modules = modules
        self._entity_kinds: set[type] = set()
        self._values: dict[type, tuple[int, Callable[[Any], tuple[Any, ...]]]] = {}

    def number_of(self, kind: type, names: tuple[str, ...]) -> int:
        """The number of a class in the table."""
        name = f"{kind.__module__}:{kind.__qualname__}"
        return self.kinds.setdefault((name, names), len(self.kinds))

    def reducer_override(self, obj: object) -> Any:
        """Called for all but the plain built-in types."""
        kind = type(obj)
        if kind in self._entity_kinds:
            return _entity, (self._entity(obj),)
        if kind in self._values:
            number, values = self._values[kind]
            return _value, (number, values(obj))
        if kind.__module__ in self._modules:
            self._learn(kind)
            return self.reducer_override(obj)
        return self._reduced(obj)

    def _learn(self, kind: type) -> None:
        if _is_entity(kind):
            self._entity_kinds.add(kind)
        else:
            names, values = _values_of(kind)
            self._values[kind] = self.number_of(kind, names), values

    def _entity(self, obj: object) -> int:
        number = self._numbers.setdefault(id(obj), len(self.entities))
        if number == len(self.entities):
            self.entities.append(obj)
        return number

    def _reduced(self, obj: object) -> Any:
        """What is none of the machine's own."""
        if isinstance(obj, np.ndarray):
            owner = _owner(obj)
            return (
                (_array, _array_parts(obj)) if owner is None else (_view, (owner, *_view_parts(obj, owner)))
            )
        if isinstance(obj, np.dtype):
            return _dtype, (_described(obj),)
        if isinstance(obj, np.generic):
            return _scalar, _array_parts(np.asarray(obj))
        if isinstance(obj, np.random.Generator):
            return _generator, (obj.bit_generator.state,)
        if type(obj) is Counter:
            return _counter, (dict(obj),)
        if type(obj) is array:
            return _items, (obj.typecode, obj.tobytes())
        named: Any = obj if isinstance(obj, type) or obj in _MAKERS.values() else type(obj)
        _named(named.__module__, named.__qualname__)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: io.BytesIO, entities: list[object], kinds: list[_Kind]) -> None:
        super().__init__(data)
        self._entities = entities
        self._kinds = kinds

    def find_class(self, module: str, name: str) -> Any:
        found = _named(module, name)
        if found is _entity:
            return self._entity
        return self._value if found is _value else found

    def _entity(self, number: int) -> object:
        return self._entities[number]

    def _value(self, number: int, values: tuple[Any, ...]) -> object:
        return self._kinds[number].make(values)


def _named(module: str, name: str) -> object:
    """What a pickle may name."""
    if (module, name) in _CONTAINERS:
        return _CONTAINERS[module, name]
    if module == __name__ and name in _MAKERS:
        return _MAKERS[name]
    raise CheckpointError(f"{module}.{name} can't be part of a state machine's state")


def _entity(number: int) -> object:
    """Stands in a pickle for the object of this number; _Unpickler knows it."""
    raise AssertionError(f"object {number} is asked for outside of a state")


def _value(number: int, values: tuple[Any, ...]) -> object:
    """Stands in a pickle for an object of the class of this number; _Unpickler knows it."""
    raise AssertionError(f"a value of class {number} is asked for outside of a state: {values}")


def _counter(counts: dict[Any, int]) -> Counter[Any]:
    return Counter(counts)


def _array_parts(array: npt.NDArray[Any]) -> tuple[Any, tuple[int, ...], bytes]:
    return _described(array.dtype), array.shape, array.tobytes()


def _owner(array: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """The array whose memory this one looks into; what is written to one must be seen in the other afterwards too."""
    owner: object = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return owner if isinstance(owner, np.ndarray) and owner is not array else None


def _view_parts(
    array: npt.NDArray[Any], owner: npt.NDArray[Any]
) -> tuple[Any, tuple[int, ...], int, tuple[int, ...]]:
    if not owner.flags.c_contiguous:
        raise CheckpointError(f"a part of an array with strides {owner.strides}")
    offset = array.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
    return _described(array.dtype), array.shape, offset, array.strides


def _described(kind: np.dtype[Any]) -> Any:
    if kind.kind not in _NUMBERS or kind.hasobject:
        raise CheckpointError(f"an array of {kind}")
    return np.lib.format.dtype_to_descr(kind)


def _dtype(described: Any) -> np.dtype[Any]:
    kind = np.lib.format.descr_to_dtype(described)
    if kind.kind not in _NUMBERS or kind.hasobject:
        raise CheckpointError(f"the state in it can't be read: an array of {kind}")
    return kind


def _array(described: Any, shape: tuple[int, ...], data: bytes) -> npt.NDArray[Any]:
    return np.frombuffer(data, dtype=_dtype(described)).reshape(shape).copy()


def _view(
    owner: npt.NDArray[Any], described: Any, shape: tuple[int, ...], offset: int, strides: tuple[int, ...]
) -> npt.NDArray[Any]:
    return np.ndarray(shape, _dtype(described), owner, offset, strides)  # numpy checks that it lies inside


def _scalar(described: Any, shape: tuple[int, ...], data: bytes) -> Any:
    return _array(described, shape, data)[()]


def _items(typecode: str, data: bytes) -> array[Any]:
    return array(typecode, data)


def _generator(state: Any) -> np.random.Generator:
    bits = np.random.PCG64()
    bits.state = state
    return np.random.Generator(bits)


_MAKERS: Mapping[str, object] = {
    make.__name__: make
    for make in (_entity, _value, _counter, _dtype, _array, _view, _scalar, _items, _generator)
}
