"""Changes of Triton's interpreter that leave out work without a result, so that tests are faster."""

from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def speed_up_interpreter() -> None:
    """Change the interpreter of this process, once."""
    _patch_language_once()
    _skip_discarded_work()
    _build_shapes_once()


def _patch_language_once() -> None:
    """Make a launch in Triton's interpreter patch `triton.language` once, not once per function call.

    The interpreter replaces every built-in function when a kernel starts, and again at every call of
    a device function. These later replacements find nothing to replace, and take half of the run time.
    """
    patch = interpreter._patch_lang
    used: dict[Any, set[str]] = {}
    patched: set[str] = set()

    class Scope(interpreter._LangPatchScope):
        """Patches of a launch, which end with the launch."""

        def restore(self) -> None:
            super().restore()
            patched.clear()

    def patch_missing(function: Any) -> Any:
        if function not in used:
            values = {*map(id, function.__globals__.values())}
            used[function] = {m.__name__ for m in (tl, tl.core) if id(m) in values}
        if patched and used[function] <= patched:
            return None  # the call of a device function, which takes no scope
        scope = Scope()
        scope._changes = patch(function)._changes
        patched.update(used[function])
        return scope

    interpreter._patch_lang = patch_missing


def _skip_discarded_work() -> None:
    """Leave out work of Triton's interpreter that has no result. It takes half of the remaining run time.

    Without debug mode, the interpreter computes whether a sum of integers overflows and discards the
    answer. For each type of NumPy that it looks up, it builds the table of all types.
    """
    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    look_up, dtypes = interpreter._get_np_dtype, {}

    def look_up_once(dtype: Any) -> np.dtype:
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = look_up(dtype)
        return dtypes[name]

    interpreter._get_np_dtype = look_up_once


def _build_shapes_once() -> None:
    """Let blocks of one shape share the objects that describe it.

    They take a third of the remaining run time.
    """
    types: dict[tuple[str, tuple[int, ...]], tuple[Any, int, str]] = {}
    tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}
    initialize_type, initialize_tensor = tl.block_type.__init__, tl.tensor.__init__

    def initialize_type_once(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        sizes = tuple([x.value if isinstance(x, tl.constexpr) else x for x in shape])
        key = element_ty.name, sizes
        if key not in types:
            initialize_type(self, element_ty, shape)
            types[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = types[key]

    def initialize_tensor_once(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in tensors:
            initialize_tensor(self, handle, type)
            tensors[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensors[sizes]

    tl.block_type.__init__, tl.tensor.__init__ = initialize_type_once, initialize_tensor_once
