"""What a launch asks the JIT once and what it then hands to the launcher in C, with stand-ins for both."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from warnings import catch_warnings, simplefilter

import pytest
import torch
from triton.runtime.errors import OutOfResources

from scree.dispatch.operation import KernelUnavailableError
from scree_triton.runtime import device
from scree_triton.runtime import launch as module
from scree_triton.runtime.descriptors import Tiled, tiled
from scree_triton.runtime.launch import (
    BoundLaunch,
    Descriptor,
    Launch,
    Number,
    Pointer,
    Stride,
    UnalignedError,
    bind_args,
    bind_launch,
    bind_launches,
    launch_args,
)

PAGE = Path(__file__).parents[2] / "docs/pytorch.md"


@launch_args
class Args:
    X: Pointer
    x_stride: Stride
    count: Number


@launch_args
class NamedArgs:
    Q: Descriptor
    X: Pointer
    x_stride: Stride
    count: Number


class Jit:
    """A kernel whose compiled variants remember what their launcher was given; it refuses numbers as C does."""

    arg_names = "X", "x_stride", "count", "BLOCK"
    descriptors = None

    def __init__(self, **run):
        self.asked, self.launched = [], []
        plain = dict(
            launch_cooperative_grid=False,
            launch_pdl=False,
            global_scratch_size=0,
            profile_scratch_size=0,
            arg_annotations="annotations",
            kernel_signature="signature",
        )
        self.run = SimpleNamespace(**plain | run, launch=self.launch)

    def __getitem__(self, grid):
        def run(*args, **constants):
            self.asked.append((grid, args, constants))
            return SimpleNamespace(
                run=self.run,
                function="function",
                packed_metadata="metadata",
                metadata=SimpleNamespace(tensordesc_meta=self.descriptors),
            )

        return run

    def launch(self, *args):
        if not module._TRUNCATES and any(isinstance(x, int) and x >= 1 << 31 for x in args[-3:-1]):
            raise OverflowError
        self.launched.append(args)


@pytest.fixture
def jit(monkeypatch):
    monkeypatch.setattr(module, "INTERPRETED", False)
    monkeypatch.setattr(module, "TRITON_VERSION", (3, 6))
    monkeypatch.setattr(module, "_TRUNCATES", False)
    monkeypatch.setattr(module, "current_stream", lambda index: "stream")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return Jit


X = torch.empty(64, dtype=torch.uint8)
X = X[-X.data_ptr() % 16 :][:32]  # begins at a multiple of 16


def launch_of(kernel, options=None):
    return Launch(kernel, dict(BLOCK=64), options or {}, args=Args)


def test_the_common_variant_is_asked_for_once(jit):
    kernel = jit()
    launch = launch_of(kernel, dict(num_warps=4))
    for programs in (5, 6, 7):
        launch(programs, Args(X=X, x_stride=16, count=3))
    ((grid, args, constants),) = kernel.asked
    assert (
        grid == (5,)
        and args[0] is X
        and args[1:] == (16, 3)
        and constants == dict(BLOCK=64, num_warps=4, enable_fp_fusion=True)
    )
    assert [args[:4] for args in kernel.launched] == [(6, 1, 1, "stream"), (7, 1, 1, "stream")]
    assert kernel.launched[0][4:] == (
        "function",
        False,
        False,
        None,
        None,
        "metadata",
        None,
        None,
        None,
        X.data_ptr(),
        16,
        3,
        64,
    )


@pytest.mark.parametrize(("pointer", "stride"), [(X[1:], 16), (X, 8), (X, 1), (X[1:], 8)])
def test_each_alignment_is_asked_for_once(jit, pointer, stride):
    kernel = jit()
    launch = launch_of(kernel)
    for _ in range(3):
        launch(5, Args(X=X, x_stride=16, count=3))
        launch(5, Args(X=pointer, x_stride=stride, count=3))
    assert len(kernel.asked) == 2
    assert [args[-4:-2] for args in kernel.launched] == [
        (X.data_ptr(), 16),
        (pointer.data_ptr(), stride),
    ] * 2


def test_a_stride_of_one_is_a_variant_of_its_own(jit):
    kernel = jit()
    launch = launch_of(kernel)
    for stride in (1, 17, 1, 33):
        launch(5, Args(X=X, x_stride=stride, count=3))
    assert [args[1] for _, args, _ in kernel.asked] == [1, 17]


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize(("stride", "number"), [(16, 1 << 31), (1 << 31, 3)])
def test_large_numbers_are_asked_for_each_time(jit, monkeypatch, cuts, stride, number):
    monkeypatch.setattr(module, "_TRUNCATES", cuts)
    kernel = jit()
    launch = launch_of(kernel)
    for _ in range(2):
        launch(5, Args(X=X, x_stride=stride, count=number))
    assert not launch.variants
    launch(5, Args(X=X, x_stride=16, count=3))
    for _ in range(2):
        launch(5, Args(X=X, x_stride=stride, count=number))
    launch(5, Args(X=X, x_stride=16, count=3))
    assert len(kernel.asked) == 5 and len(kernel.launched) == 1


@pytest.mark.parametrize(("stride", "number", "calls"), [(16, 3, 3), (16, 1 << 31, 5), (8, 3, 3)])
def test_bind_launch_passes_what_a_launch_passes(jit, stride, number, calls):
    """Only one variant is kept; unaligned pointers and large numbers are launched by `Launch`."""
    kernels = jit(), jit()
    launch = launch_of(kernels[0])

    class Counted(Launch):
        __slots__ = ("calls",)

        def __call__(self, *args):
            self.calls += 1
            super().__call__(*args)

    counted = Counted(kernels[1], dict(BLOCK=64), {}, args=Args)
    counted.calls = 0
    bound = bind_launch(counted, 5, Args, x_stride=stride, count=number)
    for pointer in (X, X, X[1:], X, X[1:]):
        launch(5, Args(X=pointer, x_stride=stride, count=number))
        bound(X=pointer)
    assert kernels[0].launched == kernels[1].launched
    assert [x[0] for x in kernels[0].asked] == [x[0] for x in kernels[1].asked]
    assert counted.calls == calls


def test_bind_launches_passes_what_the_launches_pass_in_order(jit):
    """An unaligned tensor of one launch takes the long path of both."""
    kernels = [jit() for _ in range(4)]
    ours, theirs = ([launch_of(kernel) for kernel in pair] for pair in (kernels[:2], kernels[2:]))
    y = X.clone()
    run = bind_launches(
        "x, unused, y=None",
        BoundLaunch(ours[0], 5, Args, X="x", x_stride=16, count=3),
        BoundLaunch(ours[1], 6, Args, X="y", x_stride=32, count=4),
    )
    for tensor in (X, y, X[1:], X):
        run(X, None, y=tensor)
        theirs[0](5, Args(X=X, x_stride=16, count=3))
        theirs[1](6, Args(X=tensor, x_stride=32, count=4))
    assert [x.launched for x in kernels[:2]] == [x.launched for x in kernels[2:]]
    assert [len(x.launched) for x in kernels[:2]] == [3, 2]
    fixed = bind_launches("x", BoundLaunch(ours[0], 5, Args, X=y, x_stride=16, count=3))
    for _ in range(2):
        fixed(None)
    assert [args[-4] for args in kernels[0].launched[3:]] == [y.data_ptr()] * 2


def test_observed_launches_run_the_function_before_each_launch(jit):
    kernels, seen = [jit(), jit()], []
    bound = [
        BoundLaunch(launch_of(kernel), 5, Args, X="x", x_stride=16, count=3) for kernel in kernels
    ]
    with module.observed_launches(lambda: seen.append([len(x.launched) for x in kernels])):
        run = bind_launches("x", *bound)
        run(X)
        run(X)
    other = bind_launches("x", *bound)
    for _ in range(2):
        other(X)
    assert seen == [[0, 0], [1, 0]]
    run(X)
    assert seen[2:] == [[3, 3], [4, 3]]
    assert len({*kernels[0].launched}) == 1


def test_newer_launchers_take_the_arguments_as_one(jit, monkeypatch):
    monkeypatch.setattr(module, "TRITON_VERSION", (3, 7))
    kernel = jit()
    launch = launch_of(kernel)
    for _ in range(2):
        launch(5, Args(X=X, x_stride=16, count=3))
    assert kernel.launched == [
        (
            5,
            1,
            1,
            "stream",
            "function",
            False,
            False,
            "metadata",
            None,
            None,
            None,
            None,
            None,
            "annotations",
            "signature",
            (X.data_ptr(), 16, 3, 64),
        )
    ]


class Utilities:
    """The part of Triton's utilities in C that its launcher calls; it keeps the arguments."""

    def __init__(self):
        self.launched = []

    def launch(self, *args):
        self.launched.append((*args[:-1], tuple(args[-1])))

    def build_signature_metadata(self, signature):
        return tuple(signature)

    def fill_tma_descriptor_tiled(self, *args):
        return "tensor map", args


@pytest.mark.skipif(module.TRITON_VERSION == (3, 6), reason="3.6 generates the launcher as C code")
@pytest.mark.skipif(
    module.TRITON_VERSION not in module.TESTED_VERSIONS, reason="launches go through the JIT"
)
@pytest.mark.parametrize("described", [False, True])
def test_launch_passes_what_the_launcher_of_the_installed_triton_passes(described, monkeypatch):
    from triton.backends.nvidia import driver
    from triton.runtime import driver as runtime

    utilities = Utilities()
    active = SimpleNamespace(
        utils=utilities, get_current_target=lambda: None, allocate_default_profile_scratch=None
    )
    monkeypatch.setattr(runtime, "_active", active)
    monkeypatch.setattr(driver, "PyKernelArg", lambda nested_tuple, type: (nested_tuple, type))
    for name in ("ARG_CONSTEXPR", "ARG_KERNEL", "ARG_TUPLE"):
        monkeypatch.setattr(driver, name, name)
    monkeypatch.setattr(module, "current_stream", lambda index: "stream")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    fields = ["Q"] * described + ["X", "x_stride", "count"]
    types = ["tensordesc<fp16[16,16]>"] * described + ["*fp16", "i32", "i32"]
    names = [*fields, "BLOCK"]
    shape = {"swizzle": 1, "elem_size": 2, "elem_type": 6, "block_size": [16, 16]}
    metadata = SimpleNamespace(
        tensordesc_meta=[{**shape, "fp4_padded": False}] * described, num_ctas=1,
        global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0,
        profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=True, gsan=False,
    )  # fmt: skip
    source = SimpleNamespace(
        fn=SimpleNamespace(arg_names=names),
        signature=dict(zip(names, [*types, "constexpr"])),
        constants={(len(fields),): 64},
    )
    run = driver.CudaLauncher(source, metadata)
    arguments = dict(X=X, x_stride=16, count=3)
    descriptor = module._Described(X, (16, 16), (16, 1))
    run(
        5, 1, 1, "stream", "function", "packed", None, None, None,
        *[descriptor] * described, X.data_ptr(), 16, 3, 64,
    )  # fmt: skip

    kernel = SimpleNamespace(arg_names=names)
    args_class = NamedArgs if described else Args
    launch = Launch(kernel, dict(BLOCK=64), {}, (16,) * described, args=args_class)
    compiled = SimpleNamespace(
        run=run, function="function", packed_metadata="packed", metadata=metadata
    )
    launch._keep(16, compiled, 0)
    assert 16 in launch.variants
    q = dict(Q=(X, tiled((16, 16), (16, 1), 16))) if described else {}
    launch(5, args_class(**q, **arguments))
    triton_call, our_call = utilities.launched
    assert our_call == triton_call


@pytest.mark.parametrize("version, warnings", [((3, 9), 0), ((3, 10), 1)])
def test_device_info_warns_once_of_a_version_without_hopper_kernels(version, warnings, monkeypatch):
    properties = SimpleNamespace(multi_processor_count=132, L2_cache_size=50 << 20)
    monkeypatch.setattr(device, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(device.Device.__init__, "__defaults__", (version, True))
    monkeypatch.setattr(device, "_RECORDS", {})
    with catch_warnings(record=True) as caught:
        simplefilter("always")
        records = {device.device_info(torch.device("cuda", 0)) for _ in range(3)}
    assert len(caught) == warnings and [x.supports_sm90_gluon for x in records] == [not warnings]


def test_describe_meta_other_hardware_raises(monkeypatch):
    """Launch configs for the first hardware may be cached."""
    monkeypatch.setattr(device, "_RECORDS", {})
    meta, hopper = torch.device("meta"), device.Device("nvidia", (9, 0), 132, 227 << 10, 50 << 20)
    assert device.device_info(meta).vendor == "cpu"
    for _ in range(2):
        device.describe_meta(hopper)
    assert device.device_info(meta) == hopper
    with pytest.raises(RuntimeError, match="another process"):
        device.describe_meta(replace(hopper, sm_count=114))


def test_device_without_descriptors_runs_no_hopper_kernel_and_says_why():
    record = device.Device("nvidia", (9, 0), 132, 227 << 10, 50 << 20, has_descriptors=False)
    assert not record.supports_sm90_gluon and "TMA descriptors" in record.note


@pytest.mark.parametrize("capability", [(9, 0), (9, 4)])  # MI200 and MI300
def test_device_of_amd_runs_no_kernel_and_says_why(capability):
    record = device.Device("amd", capability, 104, 64 << 10, 8 << 20)
    assert record.rejection == "the Triton kernels take NVIDIA GPUs, not AMD GPUs"
    assert not record.supports_pdl and not record.supports_sm90_gluon


def test_table_of_versions_in_the_documentation_is_the_table_of_the_code():
    _, section = PAGE.read_text().split("## Versions of Triton")
    documented = {
        tuple(map(int, version.split("."))): tested
        for version, tested in re.findall(r"^\| (\d+\.\d+) \| ([^|]*) \|", section, re.MULTILINE)
    }
    assert documented == device.TESTED_VERSIONS


def test_a_cooperative_launch_stays_one(jit):
    kernel = jit(launch_cooperative_grid=True)
    launch = launch_of(kernel)
    for _ in range(2):
        launch(5, Args(X=X, x_stride=16, count=3))
    assert kernel.launched[0][4:7] == ("function", True, False)


def test_kernels_that_need_scratch_memory_go_through_the_jit(jit):
    kernel = jit(global_scratch_size=128)
    launch = launch_of(kernel)
    for _ in range(3):
        launch(5, Args(X=X, x_stride=16, count=3))
    assert len(kernel.asked) == 3 and not kernel.launched


def test_kernel_that_does_not_compile_is_compiled_once(jit):
    class Failing(jit):
        __name__ = "failing_kernel"

        def __getitem__(self, grid):
            def run(*args, **constants):
                self.asked.append(grid)
                raise OutOfResources(300_000, 100_000, "shared memory")

            return run

    launch = launch_of(kernel := Failing())
    for _ in range(2):
        with pytest.raises(KernelUnavailableError, match="failing_kernel does not compile"):
            launch(5, Args(X=X, x_stride=16, count=3))
    assert len(kernel.asked) == 1


def test_an_unknown_launcher_is_not_called(jit, monkeypatch):
    monkeypatch.setattr(module, "TRITON_VERSION", (4, 0))
    kernel = jit()
    launch = launch_of(kernel)
    for _ in range(3):
        launch(5, Args(X=X, x_stride=16, count=3))
    assert len(kernel.asked) == 3 and not kernel.launched


def test_a_descriptor_is_encoded_once_for_each_tensor(jit, monkeypatch):
    encoded = []
    driver = SimpleNamespace(
        make_tensordesc_arg=lambda described, how: encoded.append((described.base, how)) or [how]
    )
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", driver)

    @launch_args
    class Args:
        Q: Descriptor
        K: Descriptor
        X: Pointer
        x_stride: Stride
        count: Number

    kernel = named_kernel(jit, "Q", "K", "X", "x_stride", "count", "BLOCK")
    launch = Launch(kernel, dict(BLOCK=64), {}, (16, 16), args=Args)
    launch.variants[16], launch.index, launch.metadata = (kernel.launch, ()), 0, ("first", "second")
    shape, y = tiled((16, 16), (16, 1), 16), X.clone()
    for q, k in ((X, y), (X, y), (X, X), (y, X)):
        launch(5, Args(Q=(q, shape), K=(k, shape), X=X, x_stride=16, count=3))
    assert [how for _, how in encoded] == ["first", "second", "second", "first"]
    assert [args[4:6] for args in kernel.launched] == [("first", "second")] * 4
    unaligned = torch.cat([X[:1], X])[1:]
    launched, requested = len(kernel.launched), len(kernel.asked)
    for q, k in ((unaligned, y), (y, unaligned)):
        for x in (X, X[1:]):  # a variant that is in the cache, and one that the JIT would compile
            with pytest.raises(UnalignedError, match="multiples of 16 bytes"):
                launch(5, Args(Q=(q, shape), K=(k, shape), X=x, x_stride=16, count=3))
    assert len(encoded) == 4 and len(kernel.launched) == launched and len(kernel.asked) == requested


def test_bind_launch_with_descriptors_passes_what_a_launch_passes(jit, monkeypatch):
    """Launches with bound tensors and shapes equal calls of `Launch`, also at an unaligned address."""
    encoded = []

    def encode(described, how):
        encoded.append((described.base, described.shape, how))
        return [(described.base.data_ptr(), *described.shape, how)]

    driver = SimpleNamespace(make_tensordesc_arg=encode)
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", driver)
    monkeypatch.setattr(Tiled, "typed", lambda self, base, rows: (base, rows))
    monkeypatch.setattr(module, "_launcher", lambda compiled, described: (compiled.run.launch, ()))

    @launch_args
    class Args:
        Q: Descriptor
        K: Descriptor
        X: Pointer
        TILES: Pointer
        x_stride: Stride
        count: Number

    tiles, y = X.clone(), X.clone()
    q_shape, k_shape = tiled((16, 16), (16, 1), 16), tiled((8, 16), (16, 1), 16)
    numbers = dict(x_stride=32, count=3)
    kernels = [named_kernel(jit, *Args.fields, "BLOCK") for _ in range(2)]
    for kernel in kernels:
        kernel.descriptors = "first", "second"
    launches = [Launch(kernel, dict(BLOCK=64), {}, (16, 16), args=Args) for kernel in kernels]
    bound = bind_launch(launches[1], 5, Args, Q=q_shape, K=k_shape, TILES=tiles, **numbers)
    for q, k, x in ((X, y, X), (X, y, y), (y, y, X), (X, y, X[1:]), (X, y, X)):
        args = Args(Q=(q, q_shape), K=(k, k_shape), X=x, TILES=tiles, **numbers)
        launches[0](5, args)
        bound(Q=q, K=k, X=x)
    ours, theirs = (kernel.launched for kernel in reversed(kernels))
    assert ours == theirs and len(ours) == 3
    assert ours[0][-5:-1] == (y.data_ptr(), tiles.data_ptr(), 32, 3)
    for asked in zip(*(kernel.asked for kernel in kernels), strict=True):
        assert asked[0] == asked[1]
    assert len(encoded) == 2 * 3
    with pytest.raises(TypeError, match="TILES"):
        bound(Q=X, K=X, X=X, TILES=tiles)
    with pytest.raises(KeyError, match="count"):
        bind_launch(launches[1], 5, Args, Q=q_shape, K=k_shape, x_stride=32)


def test_method_on_device_selects_the_device_of_its_object(monkeypatch):
    entered = []

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            entered.append(self.index)

        def __exit__(self, *error):
            entered.append(None)

    class Config:
        def __init__(self, index):
            self.index = index

        @module.method_on_device
        def run(self, x):
            return x, [*entered]

    monkeypatch.setattr(module, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", Device)
    for devices in (1, 2):
        monkeypatch.setattr(module, "device_count", lambda devices=devices: devices)
        assert (
            Config(None).run(3) == Config(1).run(3) == (3, [])
        )  # in host memory, and on the current one
    other = Config(0)
    assert other.run(3) == (3, [0]) and other.run(4) == (4, [0, None, 0]) and entered[-1] is None


def named_kernel(jit, *names):
    kernel = jit()
    kernel.arg_names = [*names]
    return kernel


def test_launch_with_named_args_passes_them_in_the_order_of_the_kernel(jit):
    kernel = jit()
    launch = launch_of(kernel)
    for _ in range(2):
        launch(5, Args(count=3, x_stride=16, X=X))
    assert kernel.asked[0][1] == (X, 16, 3)
    assert kernel.launched[0][-4:] == (X.data_ptr(), 16, 3, 64)


def test_launch_args_groups_the_fields_by_kind():
    args = NamedArgs(Q=("tensor", "shape"), X=X, x_stride=1, count=2)
    assert args == ((X,), (X.data_ptr(), 1), (2,), ("tensor",), ("shape",))


@pytest.mark.parametrize("numbers", [dict(x_stride=1), dict(x_stride=1, count=2, size=3)])
def test_launch_args_with_a_missing_or_unknown_name_raises(numbers):
    with pytest.raises(TypeError, match=r"Args\(\) .*(count|size)"):
        Args(X=X, **numbers)
    with pytest.raises(TypeError, match=r"Args.*(count|size)"):
        bind_args(Args, **numbers)(X=X)


def test_launch_args_by_position_raise():
    with pytest.raises(TypeError, match="positional"):
        Args(X, 16, 3)


def test_bind_args_equals_all_args_at_once():
    bound = bind_args(Args, count=3, x_stride=16)
    assert bound(X=X) == Args(X=X, x_stride=16, count=3)
    with pytest.raises(TypeError, match="count"):
        bound(X=X, count=3)


@pytest.mark.parametrize(
    "names", [("Q", "Y", "x_stride", "count", "BLOCK"), ("Q", "X", "x_stride", "count")]
)
def test_launch_with_fields_unlike_the_parameters_raises(jit, names):
    with pytest.raises(TypeError, match="NamedArgs"):
        Launch(named_kernel(jit, *names), dict(BLOCK=64), {}, (16,), args=NamedArgs)


def test_launch_args_with_fields_out_of_order_raises():
    with pytest.raises(TypeError, match="ordered"):

        @launch_args
        class Unordered:
            count: Number
            X: Pointer
