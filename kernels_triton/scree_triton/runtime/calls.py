"""Call records of scree with other arrays."""

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any


@cache
def attributes_of(record_type: type) -> dict[str, bool]:
    """Return the names of the attributes of a call record, and whether each is an argument.

    The others are derived from the arguments.
    """
    arguments = {field.name for field in fields(record_type) if field.init}
    slots = (x for base in record_type.__mro__ for x in getattr(base, "__slots__", ()))
    return {x: x in arguments for x in slots}


def make_call(record_type: type, values: Any) -> Any:
    """Return a call record with these attributes, in the order of `attributes_of`, unchecked."""
    call = object.__new__(record_type)
    for name, x in zip(attributes_of(record_type), values, strict=True):
        object.__setattr__(call, name, x)
    return call


def copy_call(call: Any, convert: Callable[[Any], Any]) -> Any:
    """Return a call record whose attributes are converted; it was validated already."""
    record_type = type(call)
    return make_call(record_type, [convert(getattr(call, x)) for x in attributes_of(record_type)])
