"""Binding of the standard's functions.

On dense arrays a namespace calls the library's own function, on ragged arrays an implementation of
scree.

`implements` registers an implementation for a kind of function (see `table`), and `bind` makes the
function of a namespace. Axis 0 of a ragged array is the batch; axis k >= 1 is axis k - 1 of its
values.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from ..array import Array
from ..backends import Backend, constant
from ..layout import RowCut
from .table import Kind

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)


class Standard:
    """The library's own function, which an implementation calls on values.

    Attributes
    ----------
    function, name
        The function and its name in the standard.
    backend, xp
        The library and its namespace.
    result_dtype
        ``result_dtype(dtype, *options)``: the dtype of the result, computed once per dtype and
        options.
    """

    # Not a frozen dataclass, which `torch.compile` cannot trace as a default argument.
    def __init__(
        self, function: Function, name: str, backend: Backend, dtype_rule: Function | None = None
    ) -> None:
        self.function = function
        self.name = name
        self.backend = backend
        self.xp = backend.xp
        self.result_dtype = _cached_dtype(self, dtype_rule)


def _cached_dtype(std: Standard, rule: Function | None) -> Function:
    """Return ``result_dtype(dtype, *options)``, which calls ``rule(std, dtype, *options)`` once each.

    `std` is bound, because `torch.compile` may pass only constants to it.
    """
    cache: dict[Any, Any] = {}

    @constant
    def result_dtype(dtype: Any, *options: Any) -> Any:
        key = (dtype, *options)
        if key not in cache:
            assert rule is not None, f"{std.name} has no rule for dtypes"
            cache[key] = rule(std, dtype, *options)
        return cache[key]

    return result_dtype


def library_dtype(std: Standard, dtype: Any, *options: Any) -> Any:
    """Return the dtype of the library's own result; options are pairs of a keyword and its value."""
    return std.function(std.xp.ones((2,), dtype=dtype), **dict(options)).dtype


#: Name of a kind -> implementation, the operands that decide whether a call is ragged, and the rule for the
#: dtype of the result.
IMPLEMENTATIONS: dict[str, tuple[Function, str, Function | None]] = {}


def implements(
    *kinds: str, ragged: str = "first", dtype_rule: Function | None = None
) -> Callable[[F], F]:
    """Register the decorated function as the implementation for kinds of functions of the standard.

    It has the signature of the standard's function and a keyword-only parameter `std`, which `bind`
    fills.

    Parameters
    ----------
    *kinds
        Names of `Kind`.
    ragged
        The operand that must be ragged: "first", "either" of the first two, or "list" for an entry
        of the list that is the first operand. With "all" the implementation is always called, for
        dense arrays too.
    dtype_rule
        ``dtype_rule(std, dtype, *options)`` returns the dtype of the result, for
        `Standard.result_dtype`.
    """

    def register(implementation: F) -> F:
        for kind in kinds:
            IMPLEMENTATIONS[kind] = implementation, ragged, dtype_rule
        return implementation

    return register


def bind(function: Function, name: str, kind: Kind, backend: Backend) -> Function:
    """Return the function of a namespace for the library's own function."""
    if kind.name == "unsupported":
        return _refuse(function, name, kind.why)
    f, operands, dtype_rule = IMPLEMENTATIONS[kind.name]
    ragged = FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__)
    # Python's TypeError about wrong arguments prints the qualified name.
    ragged.__qualname__ = getattr(function, "__name__", name)
    std = Standard(function, name, backend, dtype_rule)
    ragged.__kwdefaults__ = {**(f.__kwdefaults__ or {}), "std": std}
    return SELECTORS[operands](std, kind.name, ragged)


def check_library(std: Standard, *operands: Any) -> None:
    """Raise if a ragged operand is of another library than the namespace."""
    for x in operands:
        if isinstance(x, Array) and x.layout.backend is not std.backend:
            library = x.layout.backend.name
            raise TypeError(
                f"{std.name}: expected a ragged array of {std.backend.name}, the library of this namespace, "
                f"got one of {library}; use scree.namespace(arr), or convert it with "
                f'arr.to_backend("{std.backend.name}")'
            )


def _refuse(function: Function, name: str, why: str) -> Function:
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, Array) for x in (*args, *kwargs.values())):
            raise TypeError(f"{name} does not take ragged arrays: {why}")
        return function(*args, **kwargs)

    return call


def _if_first(std: Standard, kind: str, ragged: Function) -> Function:
    function, lib = std.function, std.backend

    def call(x: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, Array):
            if x.layout.backend is not lib:
                check_library(std, x)
            if (cut := x.layout.cut) is not None:
                return cut.call(kind, std.name, ragged, (x, *args), kwargs)
            return ragged(x, *args, **kwargs)
        return function(x, *args, **kwargs)

    return call


def _if_either(std: Standard, kind: str, ragged: Function) -> Function:
    function = std.function

    def call(x1: Any, x2: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x1, Array) or isinstance(x2, Array):
            check_library(std, x1, x2)
            if (cut := _cut_of(x1, x2)) is not None:
                return cut.call(kind, std.name, ragged, (x1, x2, *args), kwargs)
            return ragged(x1, x2, *args, **kwargs)
        return function(x1, x2, *args, **kwargs)

    return call


def _if_list(std: Standard, kind: str, ragged: Function) -> Function:
    function = std.function

    def call(arrays: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(arrays, list | tuple) and any(isinstance(x, Array) for x in arrays):
            check_library(std, *arrays)
            if (cut := _cut_of(*arrays)) is not None:
                return cut.call(kind, std.name, ragged, (arrays, *args), kwargs)
            return ragged(arrays, *args, **kwargs)
        return function(arrays, *args, **kwargs)

    return call


def _always(std: Standard, kind: str, ragged: Function) -> Function:
    return ragged


def _cut_of(*operands: Any) -> RowCut | None:
    """Return the cut of the first shard, or None."""
    for x in operands:
        if isinstance(x, Array) and x.layout.cut is not None:
            return x.layout.cut
    return None


#: The operand that must be ragged -> the function of both implementations that selects one.
SELECTORS = {"first": _if_first, "either": _if_either, "list": _if_list, "all": _always}
