"""Arguments of the CUDA driver in launches without Triton's launcher, with a stand-in for the driver."""

import ctypes
import re
import struct
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from attention_reference import Case, problem, reference

import scree
from scree_triton.runtime import device, driver
from scree_triton.runtime import launch as module
from scree_triton.runtime.descriptors import tiled
from scree_triton.runtime.launch import (
    BoundLaunch,
    Descriptor,
    Launch,
    Number,
    Pointer,
    Stride,
    bind_launches,
    launch_args,
)

SHAPE = tiled((32, 16), (16, 1), 16)
SIZES = {"*fp16": 8, "i32": 4, "fp32": 4}
#: The error of a launch in a thread without a CUDA context.
INVALID_CONTEXT = 201


@launch_args
class Args:
    Q: Descriptor
    X: Pointer
    Y: Pointer
    COUNTER: Pointer
    x_stride: Stride
    y_stride: Stride
    count: Number
    scale: Number


SIGNATURE = dict(
    Q="tensordesc<fp16[8,16],#layout>",
    X="*fp16",
    Y="*fp16",
    COUNTER="*fp16",
    x_stride="i32",
    y_stride="constexpr",  # a stride of 1
    count="i32",
    scale="fp32",
    BLOCK="constexpr",
)


class PyCUtensorMap:
    """An encoded descriptor. As in Triton's C code, the last 128 of its bytes are the map."""

    __slots__ = tuple(f"word{i:02}" for i in range(22))

    def __init__(self):
        for name in self.__slots__:
            setattr(self, name, object())

    @property
    def words(self):
        return [id(getattr(self, name)) for name in self.__slots__[-16:]]


class Config(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z")),
        *((name, ctypes.c_uint) for name in ("block_x", "block_y", "block_z")),
        ("shared_memory", ctypes.c_uint),
        ("stream", ctypes.c_uint64),
        ("attributes", ctypes.POINTER(ctypes.c_uint64 * 9)),
        ("num_attributes", ctypes.c_uint),
    )


class Driver:
    """A driver that keeps what each launch is given."""

    def __init__(self):
        self.launched, self.sizes, self.errors = [], {}, []
        self.before_launch = lambda: None
        pointer = ctypes.c_void_p
        launch = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, pointer)
        info = ctypes.CFUNCTYPE(ctypes.c_int, pointer, ctypes.c_size_t, pointer, pointer)
        text = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, pointer)
        self.cuLaunchKernelEx = launch(self.launch)
        self.cuFuncGetParamInfo = info(self.parameter_info)
        self.message = ctypes.c_char_p(b"invalid context")
        self.cuGetErrorString = text(self.error_string)

    def launch(self, config, function, parameters, extra):
        assert extra is None
        self.before_launch()
        if self.errors:
            return self.errors.pop()
        config = Config.from_address(config)
        sizes = self.sizes[function]
        addresses = (ctypes.c_uint64 * len(sizes)).from_address(parameters)
        self.launched.append(
            SimpleNamespace(
                function=function,
                grid=(config.grid_x, config.grid_y, config.grid_z),
                block=(config.block_x, config.block_y, config.block_z),
                shared_memory=config.shared_memory,
                stream=config.stream,
                attributes=[*config.attributes.contents][: 2 * config.num_attributes],
                values=[ctypes.string_at(x, n) for x, n in zip(addresses, sizes, strict=True)],
            )
        )
        return 0

    def parameter_info(self, function, i, offset, size):
        sizes = self.sizes[function]
        if i >= len(sizes):
            return 1
        ctypes.c_size_t.from_address(size).value = sizes[i]
        return 0

    def error_string(self, error, text):
        ctypes.c_uint64.from_address(text).value = ctypes.cast(self.message, ctypes.c_void_p).value
        return 0


class Jit:
    """A kernel whose launcher keeps its arguments. The driver knows the sizes of its parameters."""

    arg_names = tuple(SIGNATURE)

    def __init__(self, library, function=7 << 20, **changes):
        self.launched = []
        signature = changes.pop("signature", SIGNATURE)
        self.packed_metadata = changes.pop("packed_metadata", (4, 1, 1000))
        sizes = [128, 4, 4, 8, 8, *(SIZES[x] for x in list(signature.values())[1:] if x in SIZES)]
        library.sizes[function] = [*sizes, *changes.pop("scratch", (8, 8))]
        run = dict(launch_cooperative_grid=False, launch_pdl=True)
        scratch = dict(global_scratch_size=0, profile_scratch_size=0)
        self.compiled = SimpleNamespace(
            function=function,
            run=SimpleNamespace(**run | scratch | changes, launch=self.wrap(self.launch)),
            packed_metadata=self.packed_metadata,
            metadata=SimpleNamespace(tensordesc_meta=[dict(block_size=[8, 16])]),
            src=SimpleNamespace(signature=signature),
        )

    def wrap(self, launcher):
        return lambda *args: launcher(*args)

    def __getitem__(self, grid):
        return lambda *args, **constants: self.compiled

    def launch(self, *args):
        self.launched.append(args)

    def bound(self, programs=5, **values):
        launch = Launch(self, dict(BLOCK=64), {}, (8,), args=Args)
        values = dict(X="x", Y="y", COUNTER="count", x_stride=16, y_stride=1) | values
        numbers = dict(count=-3, scale=0.5) | values
        return BoundLaunch(launch, programs, Args, Q=("q", SHAPE), **numbers)


@pytest.fixture
def library(monkeypatch):
    from triton.backends.nvidia import driver as backend

    monkeypatch.setattr(module, "INTERPRETED", False)
    monkeypatch.setattr(module, "TRITON_VERSION", (3, 6))
    monkeypatch.setattr(module, "_TRUNCATES", False)
    monkeypatch.setattr(module, "current_stream", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    maps = {}

    def make_tensordesc_arg(arg, metadata):
        tensor_map = maps.setdefault(arg.base.data_ptr(), PyCUtensorMap())
        return [tensor_map, *arg.shape, *arg.strides]

    monkeypatch.setattr(backend, "make_tensordesc_arg", make_tensordesc_arg)
    library = Driver()
    library.maps = maps
    monkeypatch.setattr(driver, "load_driver", lambda: library)
    return library


def tensors(count, size=32):
    """Return tensors at multiples of 16."""
    memory = torch.zeros(count * size + 16, dtype=torch.uint8)
    first = -memory.data_ptr() % 16
    return memory[first:][: count * size].split(size)


def pack(kind, value):
    return struct.pack({"*fp16": "Q", "i32": "i", "fp32": "f"}[kind], value)


def expected_values(library, q, x, y, count, numbers=(16, -3, 0.5)):
    """Return the bytes of the parameters of `Jit.bound`, in Triton's order."""
    descriptor = struct.pack("16Q", *library.maps[q.data_ptr()].words)
    shape = [struct.pack("i", n) for n in SHAPE.shape] + [
        struct.pack("q", n) for n in SHAPE.strides
    ]
    pointers = [pack("*fp16", t.data_ptr()) for t in (x, y, count)]
    kinds = "i32", "i32", "fp32"
    return [descriptor, *shape, *pointers, *map(pack, kinds, numbers), bytes(8), bytes(8)]


def test_third_call_passes_the_driver_what_triton_would(library):
    """The first call compiles, the second encodes descriptors, and the third has all addresses."""
    kernel = Jit(library)
    run = bind_launches("q, x, y, count", kernel.bound(), varying=("count",))
    q, x, y, *counters = tensors(9)
    for counter in counters:
        run(q, x, y, counter)
    assert len(kernel.launched) == 1 and len(library.launched) == 4
    *_, stream = kernel.launched[0][:4]
    for launched, counter in zip(library.launched, counters[2:], strict=True):
        assert launched.values == expected_values(library, q, x, y, counter)
        assert launched.grid == (5, 1, 1) and launched.block == (128, 1, 1)
        assert (launched.function, launched.shared_memory) == (7 << 20, 1000)
        assert launched.stream == stream == 0
        assert launched.attributes == [6, 1]  # programmatic stream serialization


def test_kernel_that_is_not_dependent_has_no_attribute(library):
    run = bind_launches("q, x, y, count", Jit(library, launch_pdl=False).bound())
    q, x, y, counter = tensors(4)
    for _ in range(3):
        run(q, x, y, counter)
    assert [launched.attributes for launched in library.launched] == [[]]


def test_launch_of_no_ctas_uses_tritons_launcher(library):
    """The driver would reject it. The sum over splits has no CTAs where there are no keys."""
    kernels = Jit(library, 1 << 20), Jit(library, 2 << 20)
    run = bind_launches("q, x, y, count", kernels[0].bound(), kernels[1].bound(0))
    args = tensors(4)
    for _ in range(4):
        run(*args)
    assert not library.launched
    assert [[grid for grid, *_ in kernel.launched] for kernel in kernels] == [[5] * 3, [0] * 3]


def test_launches_run_in_order_with_their_own_arguments(library):
    kernels = Jit(library, 1 << 20), Jit(library, 2 << 20)
    fixed, q, other, x, y, counter = tensors(6)
    second = kernels[1].bound(6, X=fixed, Y="x", count=4, scale=-2.0)
    second.described = ("other",)
    run = bind_launches("q, other, x, y, count", kernels[0].bound(), second, varying=("count",))
    for _ in range(4):
        run(q, other, x, y, counter)
    first, second = library.launched[-2:]
    assert len(library.launched) == 4
    assert (first.function, second.function) == (1 << 20, 2 << 20)
    assert first.values == expected_values(library, q, x, y, counter)
    numbers = 16, 4, -2.0
    assert second.values == expected_values(library, other, fixed, x, counter, numbers)
    assert (first.grid, second.grid) == ((5, 1, 1), (6, 1, 1))


def test_other_addresses_use_tritons_launcher_once(library):
    kernel = Jit(library)
    run = bind_launches("q, x, y, count", kernel.bound(), varying=("count",))
    sets = [tensors(4) for _ in range(3)]
    for _ in range(3):
        for q, x, y, counter in sets:
            run(q, x, y, counter)
    # The first call of all goes through the JIT.
    assert len(kernel.launched) == 3 and len(library.launched) == 5
    wanted = [expected_values(library, *sets[i]) for i in (1, 2, 0, 1, 2)]
    assert [x.values for x in library.launched] == wanted


def test_each_stream_has_its_own_arguments(library, monkeypatch):
    kernel, args, streams = Jit(library), tensors(4), [0]
    monkeypatch.setattr(module, "current_stream", lambda index: streams[0])
    run = bind_launches("q, x, y, count", kernel.bound())
    for streams[0] in (0, 0, 0, 5, 5, 0, 5):
        run(*args)
    assert [launched.stream for launched in library.launched] == [0, 5, 0, 5]


@pytest.mark.parametrize("unaligned", range(4))
def test_unaligned_address_never_goes_to_the_driver(library, unaligned, monkeypatch):
    kernel = Jit(library)
    monkeypatch.setattr(module, "_check_alignment", lambda described: None)
    run = bind_launches("q, x, y, count", kernel.bound(), varying=("count",))
    args = tensors(4)
    others = [x[1:] if i == unaligned else x for i, x in enumerate(args)]
    for _ in range(3):
        run(*args)
    assert len(library.launched) == 1
    for _ in range(4):
        run(*others)
    assert len(library.launched) == 1
    run(*args)
    assert library.launched[1].values == library.launched[0].values


def test_call_during_a_launch_gets_its_own_arguments(library):
    """The driver runs without Python's lock, so another thread may call then."""
    kernel = Jit(library)
    run = bind_launches("q, x, y, count", kernel.bound(), varying=("count",))
    q, x, y, first, second = tensors(5)
    for _ in range(3):
        run(q, x, y, first)
    library.launched.clear()

    def call_once():
        library.before_launch = lambda: None
        thread = threading.Thread(target=run, args=(q, x, y, second))
        thread.start()
        thread.join()

    library.before_launch = call_once
    run(q, x, y, first)
    values = [launched.values for launched in library.launched]
    assert values == [expected_values(library, q, x, y, c) for c in (second, first)]


def test_failed_launch_is_repeated_with_a_context(library, monkeypatch):
    created = []
    run = bind_launches("q, x, y, count", Jit(library).bound())
    args = tensors(4)
    for _ in range(3):
        run(*args)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: created.append(1))
    library.errors = [INVALID_CONTEXT]
    run(*args)
    assert created and len(library.launched) == 2
    library.errors = [INVALID_CONTEXT, INVALID_CONTEXT]
    with pytest.raises(RuntimeError, match=r"CUDA error 201 .*invalid context"):
        run(*args)
    run(*args)
    assert len(library.launched) == 3


@pytest.mark.parametrize(
    "max_hashes, kept", [(100, lambda sets: sets[:3]), (4, lambda sets: sets[4:])]
)
def test_cache_of_arguments_is_bounded(library, monkeypatch, max_hashes, kept):
    """A full cache keeps its arguments, until many addresses are new."""
    monkeypatch.setattr(driver, "_MAX_CALLS", 3)
    monkeypatch.setattr(driver, "_MAX_HASHES", max_hashes)
    kernel = Jit(library)
    run = bind_launches("q, x, y, count", kernel.bound())
    sets = [tensors(4) for _ in range(6)]
    run(*sets[0])  # goes through the JIT
    for args in sets:
        for _ in range(3):
            run(*args)
    launched = len(library.launched)
    for args in reversed(sets):
        run(*args)
    values = [x.values for x in library.launched[launched:]]
    assert values == [expected_values(library, *args) for args in reversed(kept(sets))]


def test_encoded_descriptors_live_as_long_as_the_arguments(library):
    kernel = Jit(library)
    bound = kernel.bound()
    run = bind_launches("q, x, y, count", bound)
    args = tensors(4)
    for _ in range(3):
        run(*args)
    wanted = expected_values(library, *args)
    bound.launch.encoded.clear()
    library.maps.clear()
    for _ in range(50):
        PyCUtensorMap()
    run(*args)
    assert library.launched[-1].values == wanted


def test_arguments_without_encoded_descriptors_use_tritons_launcher(library):
    kernel = Jit(library)
    bound = kernel.bound()
    run = bind_launches("q, x, y, count", bound)
    args = tensors(4)
    for _ in range(2):
        run(*args)
    bound.launch.encoded.clear()
    run(*args)
    assert len(kernel.launched) == 2 and not library.launched
    run(*args)
    assert len(kernel.launched) == 2 and len(library.launched) == 1


def test_observed_launches_run_the_function_before_the_driver(library):
    seen, args = [], tensors(4)
    bound = Jit(library).bound()
    with module.observed_launches(lambda: seen.append(len(library.launched))):
        run = bind_launches("q, x, y, count", bound)
        for _ in range(2):
            run(*args)
    run(*args)
    run(*args)
    assert seen[-2:] == [0, 1]


@pytest.mark.parametrize(
    "changes",
    [
        dict(scratch=(8,)),
        dict(scratch=(8, 4)),
        dict(signature=SIGNATURE | dict(count="i64")),
        dict(signature=SIGNATURE | dict(x_stride=("i32", "i32"))),
        dict(launch_cooperative_grid=True),
        dict(packed_metadata=(4, 2, 1000)),
        dict(packed_metadata=(4, 1, 229 << 10)),
    ],
    ids=str,
)
def test_describe_kernel_that_only_triton_launches_is_none(library, changes):
    kernel = Jit(library, **changes)
    assert driver.describe_kernel(kernel.compiled, {}) is None
    run = bind_launches("q, x, y, count", kernel.bound())
    args = tensors(4)
    for _ in range(4):
        run(*args)
    assert not library.launched and len(kernel.launched) == 3


def test_describe_kernel_without_a_driver_is_none(library, monkeypatch):
    assert driver.describe_kernel(Jit(library).compiled, {}) is not None
    monkeypatch.setattr(driver, "load_driver", lambda: None)
    assert driver.describe_kernel(Jit(library).compiled, {}) is None


def test_load_driver_without_a_function_is_none(monkeypatch):
    load = driver.load_driver.__wrapped__
    functions = dict(cuLaunchKernelEx=1, cuFuncGetParamInfo=2, cuGetErrorString=3)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(**functions))
    assert load() is not None
    del functions["cuFuncGetParamInfo"]
    assert load() is None

    def fail(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", fail)
    assert load() is None


def test_descriptor_of_another_type_uses_tritons_launcher(library, monkeypatch):
    from triton.backends.nvidia import driver as backend

    def make_tensordesc_arg(arg, metadata):
        return [object(), *arg.shape, *arg.strides]

    monkeypatch.setattr(backend, "make_tensordesc_arg", make_tensordesc_arg)
    kernel = Jit(library)
    run = bind_launches("q, x, y, count", kernel.bound())
    args = tensors(4)
    for _ in range(4):
        run(*args)
    assert not library.launched and len(kernel.launched) == 3


@pytest.mark.skipif(
    device.TRITON_VERSION not in device.TESTED_VERSIONS, reason="launches go through the JIT"
)
def test_map_is_the_end_of_the_object_of_the_installed_triton():
    source = Path(triton.__file__).parent / "backends/nvidia/driver.c"
    pattern = (
        r"typedef struct \{\s*PyObject_HEAD;\s*_Alignas\((128|alignof\(CUtensorMap\))\) "
        r"CUtensorMap tensorMap;\s*\} PyCUtensorMapObject;"
    )
    assert re.search(pattern, source.read_text())


@pytest.mark.skipif(
    device.TRITON_VERSION not in device.TESTED_VERSIONS, reason="launches go through the JIT"
)
@pytest.mark.parametrize("rank", [2, 4, 5])
def test_parameter_sizes_are_those_of_the_installed_triton(rank):
    """Triton's launcher expands a descriptor; 3.6 does so where it generates code."""
    from triton.backends.nvidia import driver as backend

    shape = ",".join(["16"] * rank)
    signature = dict(q=f"tensordesc<fp16[{shape}]>", x="*fp16", n="i32", s="fp32", B="constexpr")
    metadata = [dict(block_size=[16] * rank)]
    sizes = {"nvTmaDesc": 128, "i64": 8} | SIZES
    if device.TRITON_VERSION == (3, 6):
        source = backend.make_launcher({}, signature, metadata)
        names = re.search(r"static void _launch\((.*?)\) \{", source).group(1).split(", ")
        of_c = dict(CUtensorMap=128, CUdeviceptr=8, int32_t=4, int64_t=8, uint32_t=4)
        # After grid, warps, CTAs, options, shared memory, stream and function come two scratch pointers.
        kinds = [name.split()[0] for name in names[10:]]
        wanted = [of_c[kind] for kind in (*kinds[2:], *kinds[:2])]
    else:
        arguments = (signature.values(), metadata, "nvTmaDesc")
        count = backend.expand_signature.__code__.co_argcount
        expanded = backend.expand_signature(*arguments[:count])
        wanted = [*(sizes[x] for x in expanded if x != "constexpr"), 8, 8]
    types = tuple(map(driver._kind_of_type, signature.values()))
    assert driver.DriverKernel(1, 128, 0, False, types, metadata, {}).parameter_sizes() == wanted


# --- On a GPU
LENGTHS = (5, 130, 0, 64, 17, 1, 3)
CASE = Case(torch.float16, 64, 64, 4, 2, LENGTHS, causal=True)


def attend(p, rows):
    """Return the gradients of public attention on existing rows."""
    leaves = [x.detach().requires_grad_() for x in (p.q, p.k, p.v)]
    out = scree.attention(*map(rows.with_values, leaves), causal=True)
    return [out.values.detach(), *torch.autograd.grad(out.values, leaves, p.dout)]


def wanted_results(p):
    out, _, *grads = reference(CASE, p._replace(dlse=torch.zeros_like(p.dlse)), torch.float64)
    return [out, *grads]


def check(results, wanted):
    for x, y in zip(results, wanted, strict=True):
        torch.testing.assert_close(x.double(), y, atol=5e-3, rtol=5e-3)


@pytest.fixture
def counted_buffers(monkeypatch):
    made, new = [], driver.ArgumentCache._new_buffer

    def count(*args):
        made.append(new(*args))
        return made[-1]

    monkeypatch.setattr(driver.ArgumentCache, "_new_buffer", count)
    return made


@pytest.mark.gpu
def test_repeated_attention_by_the_driver_matches_float64(counted_buffers):
    problems = [problem(CASE, "cuda", seed) for seed in range(6)]
    wanted = [wanted_results(p) for p in problems]
    rows = scree.from_lengths(problems[0].q, LENGTHS)
    for _ in range(4):
        for p, results in zip(problems, wanted, strict=True):
            check(attend(p, rows), results)
    assert counted_buffers and None not in counted_buffers
    # New values at the same addresses.
    other = problem(CASE, "cuda", 9)
    for x, y in zip(problems[0][:6], other[:6], strict=True):
        x.copy_(y)
    check(attend(problems[0], rows), wanted_results(other))


@pytest.mark.gpu
def test_attention_by_the_driver_on_streams_of_threads_matches_float64(counted_buffers):
    problems = [problem(CASE, "cuda", seed) for seed in range(4)]
    wanted = [wanted_results(p) for p in problems]
    rows = scree.from_lengths(problems[0].q, LENGTHS)
    attend(problems[0], rows)
    torch.cuda.synchronize()
    streams, results, errors = [torch.cuda.Stream() for _ in range(2)], {}, []

    def work(i):
        try:
            with torch.cuda.stream(streams[i % 2]):
                for _ in range(20):
                    results[i] = attend(problems[i], rows)
            torch.cuda.synchronize()
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and counted_buffers
    for i, p in enumerate(wanted):
        check(results[i], p)


@pytest.mark.gpu
def test_graph_of_attention_by_the_driver_follows_new_values(counted_buffers):
    static, other = (problem(CASE, "cuda", seed) for seed in range(2))
    rows = scree.from_lengths(static.q, LENGTHS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            attend(static, rows)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(3):
            results = attend(static, rows)
    for x, y in zip(static[:6], other[:6], strict=True):
        x.copy_(y)
    graph.replay()
    check(results, wanted_results(other))
