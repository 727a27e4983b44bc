"""Frozen dataclasses that are quick to define.

`import scree` defines about thirty of them. ``dataclass(frozen=True)`` compiles two methods per class
that raise, which takes longer than compiling the constructor.
"""

from __future__ import annotations

import sys
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from typing import Any, NoReturn, TypeVar, dataclass_transform

T = TypeVar("T")


def _refuse(self: Any, name: str, value: Any = None) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to or delete field {name!r}")


# For `copy` and `pickle`, which assign to slots where a class has no such methods.
def _getstate(self: Any) -> list[Any]:
    return [getattr(self, x.name) for x in fields(self)]


def _setstate(self: Any, state: list[Any]) -> None:
    for x, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, x.name, value)


@dataclass_transform(eq_default=False, frozen_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Turn a class of annotated fields into a frozen dataclass with slots.

    It has no comparison and no repr. Fields take no `default_factory`. The constructor, if the class has
    none, sets the fields by ``object.__setattr__``, as the constructor of a frozen dataclass does.
    """
    decorated: Any = dataclass(init=False, eq=False, repr=False, slots=True)(cls)
    decorated.__setattr__ = decorated.__delattr__ = _refuse
    decorated.__getstate__, decorated.__setstate__ = _getstate, _setstate
    decorated.__dataclass_params__.frozen = True  # PyTorch's compiler traces such constructors
    if "__init__" in vars(cls):
        return decorated  # type: ignore[no-any-return]
    arguments, body, defaults = [], [], []
    for x in fields(decorated):
        has_default = x.default is not MISSING
        if x.init:
            arguments.append(f"{x.name}=None" if has_default else x.name)
            defaults += [x.default] if has_default else []
        if x.init or has_default:
            value = x.name if x.init else repr(x.default)
            body.append(f"object.__setattr__(self, {x.name!r}, {value})")
    if hasattr(decorated, "__post_init__"):
        body.append("self.__post_init__()")
    source = "\n    ".join([f"def __init__(self, {', '.join(arguments)}):", *body])
    names: dict[str, Any] = {}
    # The globals of the module, as compilers that trace the constructor look them up.
    exec(source, vars(sys.modules[cls.__module__]), names)
    decorated.__init__ = names["__init__"]
    decorated.__init__.__defaults__ = tuple(defaults)
    decorated.__init__.__qualname__ = f"{cls.__qualname__}.__init__"
    return decorated  # type: ignore[no-any-return]
