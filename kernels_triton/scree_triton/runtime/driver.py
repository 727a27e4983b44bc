"""Launches by the CUDA driver, with arguments that are kept between calls.

Triton's launcher converts every argument at every launch. A kernel with four descriptors has about
a hundred, because a descriptor is passed with its shape and strides. Here a call with the addresses
of an earlier call passes the driver the arguments of that call.

The driver's functions are public. Two facts are Triton's own: the order of a kernel's parameters, and
the object that holds an encoded descriptor. So the sizes of the parameters are compared with those
that the driver reports, and tests compare both with the source of the installed Triton. Triton's
launcher launches all other kernels, and the first call with new addresses.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from math import gcd
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import torch

_MAP_BYTES = 128
# Triton's object of a descriptor ends with a CUtensorMap, which begins at one of these bytes.
_MAP_OFFSETS = 64, 128
# Later versions of Triton set another launch attribute for more shared memory.
_MAX_SHARED_MEMORY = 228 << 10
# Cells of 8 bytes of CUlaunchConfig before the stream and after it, and of CUlaunchAttribute.
_CELLS_BEFORE_STREAM, _CONFIG_CELLS, _ATTRIBUTE_CELLS = 4, 7, 9
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # of CUlaunchAttributeID: programmatic dependent launch
_BYTES = {"i32": 4, "fp32": 4}
#: The format of a number in a cell of 8 bytes.
_FORMATS = {"i32": "q", "fp32": "f4x"}
_MAX_FORMS = 1024
#: The numbers of calls whose arguments, and of which hashes, one function keeps.
_MAX_CALLS, _MAX_HASHES = 256, 1024


@cache
def load_driver() -> Any:
    """Return the CUDA driver's library; None if it is absent or lacks a function of this module."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            driver = ctypes.CDLL(name)
        except OSError:
            continue
        names = "cuLaunchKernelEx", "cuFuncGetParamInfo", "cuGetErrorString"
        return driver if all(hasattr(driver, x) for x in names) else None
    return None


class DriverKernel:
    """A compiled kernel and its parameters, as the driver takes them.

    Parameters
    ----------
    function
        The handle of the kernel.
    threads, shared_memory
        Threads and bytes of dynamic shared memory of one CTA.
    is_dependent
        Whether the kernel may start before the previous one ends.
    types
        Triton's types of the arguments, without "constexpr"; None for a constant.
    descriptors
        Triton's metadata of each descriptor.
    encoded
        The cache `launch.Launch.encoded`.
    """

    __slots__ = (
        "descriptors",
        "encoded",
        "function",
        "handle",
        "is_dependent",
        "shared_memory",
        "threads",
        "types",
    )

    def __init__(
        self,
        function: int,
        threads: int,
        shared_memory: int,
        is_dependent: bool,
        types: tuple[str | None, ...],
        descriptors: Sequence[dict[str, Any]],
        encoded: dict[tuple, tuple],
    ):
        self.function, self.threads, self.shared_memory = function, threads, shared_memory
        self.is_dependent, self.types, self.descriptors = is_dependent, types, descriptors
        self.handle = ctypes.c_void_p(function)
        self.encoded = encoded

    def parameter_sizes(self) -> list[int]:
        """Return the bytes of each parameter. The last two are pointers to scratch memory."""
        sizes, descriptors = [], iter(self.descriptors)
        for kind in self.types:
            if kind == "tensordesc":
                rank = len(next(descriptors)["block_size"])
                sizes += [_MAP_BYTES, *[4] * rank, *[8] * rank]
            elif kind is not None:
                sizes.append(_BYTES.get(kind, 8))
        return [*sizes, 8, 8]

    def find_maps(self, key: tuple) -> tuple[tuple[int, ...], tuple] | None:
        """Return the addresses of encoded descriptors, and the objects that hold their memory.

        None if the cache does not have them, or if Triton's C code did not make their objects.
        """
        if not self.descriptors:
            return (), ()
        arguments = self.encoded.get(key)
        if arguments is None:
            return None
        addresses, i = [], 0
        for metadata in self.descriptors:
            tensor_map = arguments[i]
            offset = type(tensor_map).__basicsize__ - _MAP_BYTES
            if type(tensor_map).__name__ != "PyCUtensorMap" or offset not in _MAP_OFFSETS:
                return None
            addresses.append(id(tensor_map) + offset)
            # The shape and the strides follow.
            i += 1 + 2 * len(metadata["block_size"])
        return tuple(addresses), arguments


def describe_kernel(compiled: Any, encoded: dict[tuple, tuple]) -> DriverKernel | None:
    """Return a compiled kernel for the driver; None if only Triton's launcher can launch it."""
    signature = getattr(getattr(compiled, "src", None), "signature", None)
    driver = None if signature is None else load_driver()
    if driver is None:
        return None
    warps, ctas, shared_memory = compiled.packed_metadata
    run, metadata = compiled.run, getattr(compiled.metadata, "tensordesc_meta", None) or ()
    types = tuple(map(_kind_of_type, signature.values()))
    is_supported = (
        "other" not in types
        and types.count("tensordesc") == len(metadata)
        and ctas == 1
        and shared_memory <= _MAX_SHARED_MEMORY
        and not run.launch_cooperative_grid
    )
    if not is_supported:
        return None
    is_dependent = bool(run.launch_pdl)
    kernel = DriverKernel(
        compiled.function, 32 * warps, shared_memory, is_dependent, types, metadata, encoded
    )
    return kernel if kernel.parameter_sizes() == _read_sizes(driver, kernel.function) else None


def _kind_of_type(name: Any) -> str | None:
    """Return "tensordesc", "pointer", "i32", "fp32" or "other"; None for a constant."""
    if name == "constexpr":
        return None
    if not isinstance(name, str):  # a tuple
        return "other"
    if name.startswith("tensordesc<"):
        return "tensordesc"
    return "pointer" if name[0] == "*" else name if name in _BYTES else "other"


def _read_sizes(driver: Any, function: int) -> list[int]:
    """Return the bytes of each parameter of a kernel, by the driver."""
    offset, size, sizes = ctypes.c_size_t(), ctypes.c_size_t(), []
    results = ctypes.byref(offset), ctypes.byref(size)
    handle = ctypes.c_void_p(function)
    while not driver.cuFuncGetParamInfo(handle, ctypes.c_size_t(len(sizes)), *results):
        sizes.append(size.value)
    return sizes


class LaunchForm(NamedTuple):
    """The arguments of a launch that do not depend on the rows."""

    kernel: DriverKernel
    sources: tuple[int, ...]
    """For each descriptor the number of the address of its tensor."""
    shapes: tuple[Any, ...]
    """The shapes of the descriptors."""
    pointers: tuple[int | None, ...]
    """For each pointer the number of its address; None for a tensor that is the same in all calls."""


class _Cells(NamedTuple):
    """The memory of launches in sequence, in cells of 8 bytes.

    First come addresses, a null pointer, and values: fixed tensors, strides and numbers. Then come for
    each launch CUlaunchConfig, CUlaunchAttribute, the shapes and strides of its descriptors, and the
    addresses of its parameters.
    """

    template: np.ndarray
    """The initial contents. An address within the memory is relative to the first cell."""
    is_relative: np.ndarray
    """1 where a cell is such an address, else 0."""
    values: Struct
    """The format of the values."""
    first_value: int
    configs: tuple[int, ...]
    """For each launch the first cell of its configuration."""
    parameters: tuple[int, ...]
    """For each launch the first cell of the addresses of its parameters."""
    maps: tuple[tuple[int, ...], ...]
    """For each launch the cells of the addresses of its tensor maps."""


@lru_cache(_MAX_FORMS)
def _lay_out(num_addresses: int, forms: tuple[LaunchForm, ...]) -> _Cells:
    """Return the memory of launches of a function that reads so many addresses."""
    first_value = num_addresses + 1
    formats = ["".join(_value_formats(form)) for form in forms]
    values = Struct("<" + "".join(formats))
    cells = [0] * (first_value + values.size // 8)
    relative: list[int] = []
    configs, all_parameters, all_maps, value = [], [], [], first_value

    def refer(cell: int) -> int:
        """Return the relative address of a cell."""
        relative.append(len(cells))
        return 8 * cell

    for form in forms:
        kernel, shapes, pointers = form.kernel, iter(form.shapes), iter(form.pointers)
        configs.append(len(cells))
        attribute = len(cells) + _CONFIG_CELLS
        # Grid (1, 1, 1) until the number of CTAs is known, and blocks (threads, 1, 1).
        cells += [1 | 1 << 32, 1 | kernel.threads << 32, 1 | 1 << 32, kernel.shared_memory, 0]
        cells.append(refer(attribute))
        cells += [int(kernel.is_dependent), _PROGRAMMATIC_STREAM_SERIALIZATION, 1]
        cells += [0] * (_ATTRIBUTE_CELLS - 2)
        parameters: list[int] = []
        maps: list[int] = []
        for kind in kernel.types:
            if kind == "tensordesc":
                shape = next(shapes)
                numbers = *shape.shape, *shape.strides
                maps.append(len(parameters))
                parameters += [num_addresses, *range(len(cells), len(cells) + len(numbers))]
                cells += numbers
            elif kind == "pointer" and (number := next(pointers)) is not None:
                parameters.append(number)
            elif kind is not None:
                parameters.append(value)
                value += 1
        first = len(cells)
        all_parameters.append(first)
        all_maps.append(tuple(first + i for i in maps))
        for cell in (*parameters, num_addresses, num_addresses):
            cells.append(refer(cell))
    is_relative = np.zeros(len(cells), np.uint64)
    is_relative[relative] = 1
    template = np.array(cells, np.uint64)
    return _Cells(
        template,
        is_relative,
        values,
        first_value,
        tuple(configs),
        tuple(all_parameters),
        tuple(all_maps),
    )


def _value_formats(form: LaunchForm) -> list[str]:
    """Return the formats of the values of a launch, in order, see `_Cells`."""
    kinds = [x for x in form.kernel.types if x in _FORMATS]
    return ["Q"] * form.pointers.count(None) + [_FORMATS[x] for x in kinds]


class ArgumentBuffer(NamedTuple):
    """The arguments of the launches of one call, in the driver's form.

    Only one call at a time may use it, because the driver reads it without Python's lock.
    """

    cells: Any
    """The memory, an array of ctypes."""
    calls: tuple[tuple, ...]
    """The arguments of cuLaunchKernelEx, for each launch."""
    maps: list[Any]
    """The encoded descriptors whose addresses are in the memory."""


class LaunchPlan(NamedTuple):
    """Launches in sequence, with all arguments except the addresses of tensors."""

    num_addresses: int
    """The number of tensors whose addresses a call reads. The last ones may differ in every call."""
    forms: tuple[LaunchForm, ...]
    """The launches."""
    programs: list[int]
    """For each launch the number of CTAs."""
    fixed: list[tuple[torch.Tensor, ...]]
    """For each launch the tensors that are the same in all calls."""
    numbers: list[tuple[int | float, ...]]
    """For each launch the strides and numbers, in order."""

    def pack_values(self, layout: _Cells) -> bytes:
        """Return the values, see `_Cells`."""
        values: list[int | float] = []
        for form, tensors, numbers in zip(self.forms, self.fixed, self.numbers, strict=True):
            values += [x.data_ptr() for x in tensors]
            # A stride of 1 is a constant of the kernel.
            first = len(form.shapes) + len(form.pointers)
            kinds = form.kernel.types[first : first + len(numbers)]
            values += [x for x, kind in zip(numbers, kinds, strict=True) if kind is not None]
        return layout.values.pack(*values)


class ArgumentCache:
    """Argument buffers of calls that have the stream and the addresses of an earlier call.

    Making a buffer takes as long as several launches by Triton's launcher. So the first call with
    new addresses gets none.

    Parameters
    ----------
    make_plan
        Returns the launches. It is called for the first buffer.
    """

    __slots__ = ("hashes", "make_plan", "plan", "pools", "values")

    def __init__(self, make_plan: Callable[[], LaunchPlan]):
        self.make_plan = make_plan
        self.plan: LaunchPlan | None = None
        #: Stream and addresses -> free buffers that have them.
        self.pools: dict[tuple[int, ...], list[ArgumentBuffer]] = {}
        #: Hashes of the keys of all calls. Keys would take more memory, and time of the CPU's caches.
        self.hashes: set[int] = set()

    def take(self, key: tuple[int, ...]) -> ArgumentBuffer | None:
        """Return a new buffer, which the caller adds to `pools` after the call, or None.

        `key` has the stream and the addresses that do not vary. A first call gets None. It encodes the
        descriptors. Addresses that are no multiples of 16 always get None.
        """
        number = hash(key)
        if number not in self.hashes:
            # All addresses have changed, or they never repeat.
            if len(self.hashes) >= _MAX_HASHES:
                self.hashes.clear()
                self.pools.clear()
            self.hashes.add(number)
            return None
        # More calls in turns than buffers: without this limit each call would make a buffer.
        if len(self.pools) >= _MAX_CALLS and key not in self.pools:
            return None
        if gcd(16, *key[1:]) != 16:
            return None
        if self.plan is None:
            plan = self.make_plan()
            self.values = plan.pack_values(_lay_out(plan.num_addresses, plan.forms))
            self.plan = plan
        return self._new_buffer(self.plan, *key)

    def _new_buffer(self, plan: LaunchPlan, stream: int, *addresses: int) -> ArgumentBuffer | None:
        maps = [
            form.kernel.find_maps((tuple(addresses[i] for i in form.sources), form.shapes))
            for form in plan.forms
        ]
        if None in maps:
            return None
        layout = _lay_out(plan.num_addresses, plan.forms)
        memory = (ctypes.c_uint64 * len(layout.template))()
        base, cells = ctypes.addressof(memory), np.frombuffer(memory, np.uint64)
        np.multiply(layout.is_relative, base, out=cells)
        np.add(cells, layout.template, out=cells)
        memory[: len(addresses)] = addresses
        ctypes.memmove(base + 8 * layout.first_value, self.values, len(self.values))
        calls = []
        for form, programs, config, parameters, map_cells, (map_addresses, _) in zip(
            plan.forms,
            plan.programs,
            layout.configs,
            layout.parameters,
            layout.maps,
            maps,
            strict=True,
        ):
            memory[config] = programs | 1 << 32
            memory[config + _CELLS_BEFORE_STREAM] = stream
            for cell, address in zip(map_cells, map_addresses, strict=True):
                memory[cell] = address
            pointers = (ctypes.byref(memory, 8 * x) for x in (config, parameters))
            calls.append((next(pointers), form.kernel.handle, next(pointers), None))
        return ArgumentBuffer(memory, tuple(calls), maps)


def launch_kernel() -> Any:
    """Return the driver's function that launches a kernel; it returns an error or 0."""
    return load_driver().cuLaunchKernelEx


def retry(call: tuple) -> None:
    """Launch again after an error, and raise if it persists."""
    # A new thread has no CUDA context before its first call of the runtime. This call creates it.
    torch.cuda.is_current_stream_capturing()
    driver = load_driver()
    if error := driver.cuLaunchKernelEx(*call):
        text = ctypes.c_char_p()
        driver.cuGetErrorString(error, ctypes.byref(text))
        raise RuntimeError(f"CUDA error {error} at a launch: {(text.value or b'').decode()}")
