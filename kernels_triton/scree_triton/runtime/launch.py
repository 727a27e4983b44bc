"""Launch compiled kernels without the JIT's argument inspection at every call.

Every kernel has a class decorated by `launch_args` with one field per non-constexpr parameter, in
the kernel's order. The annotation of a field says how the launcher passes the parameter::

    @launch_args
    class ForwardArgs:
        Q: Descriptor  # (tensor, shape): read through a TMA descriptor
        X: Pointer
        x_stride: Stride  # the JIT specializes a stride on 1 and on multiples of 16
        count: Number  # not specialized

    launch = Launch(forward_kernel, dict(BLOCK=64), dict(num_warps=4), (64,), args=ForwardArgs)
    launch(programs, ForwardArgs(Q=(q, ragged(...)), X=x, x_stride=x.stride(0), count=3))

`Launch` compares the field names with the kernel's parameters when it is constructed, so a call
checks only that its names are complete. A launch config fixes the arguments that its metadata
determines::

    args = bind_args(ForwardArgs, x_stride=1024, count=3)
    launch(programs, args(Q=(q, ragged(...)), X=x))

`launch_on_device(launch, programs, args)` also selects the CUDA device of the tensors. Where a
launch config fixes all but the tensors, the launch takes a third of the time::

    launch_forward = bind_launch(
        launch, programs, ForwardArgs, Q=ragged(...), x_stride=1024, count=3
    )
    launch_forward(Q=q, X=x)
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, partial
from math import gcd, prod
from typing import Annotated, Any, NamedTuple, dataclass_transform

import torch
from triton import knobs
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from scree.dispatch.operation import KernelUnavailableError

from .descriptors import Ragged, Tiled
from .device import (
    INTERPRETED,
    TESTED_VERSIONS,
    TRITON_VERSION,
    current_device,
    current_stream,
    device_count,
    device_info,
)
from .driver import (
    ArgumentCache,
    DriverKernel,
    LaunchForm,
    LaunchPlan,
    describe_kernel,
    launch_kernel,
    retry,
)
from .recording import RecordedLaunch, current_recording

#: Errors of a kernel that does not compile or does not fit on the device.
COMPILE_ERRORS = (CompilationError, OutOfResources, PTXASError)
_LIMIT = 1 << 31  # numbers from here on need 64 bits, hence another variant
_MAX_ENCODED = 4096  # entries of a cache of encoded descriptors
_address = torch.Tensor.data_ptr
_before_launch: Callable[[], Any] | None = None  # see `observed_launches`
# 16 if all numbers are multiples of 16. `partial` passes them on without building a list.
_alignment = partial(gcd, 16)
# Later launchers truncate numbers that do not fit into 32 bits, where 3.6 raises OverflowError.
_TRUNCATES = TRITON_VERSION > (3, 6)


class UnalignedError(KernelUnavailableError):
    """The tensor of a descriptor is not at a multiple of 16 bytes, so the launch did not happen."""


def _check_alignment(described: Iterable[torch.Tensor]) -> None:
    if _alignment(*map(_address, described)) < 16:
        raise UnalignedError(
            "expected tensors at multiples of 16 bytes, as TMA needs; clone the tensors"
        )


@cache
def empty(kind: str) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]:
    """Return a function that allocates a tensor on the current device of this type.

    The function takes shape, strides and dtype. Where PyTorch has it, it is the allocator of code
    compiled by Inductor, which takes half the time of `empty_like`.
    """
    allocate = getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None)
    return allocate or (
        lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=kind)
    )


def contiguous(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a shape and its contiguous strides, the first arguments of `empty`'s function."""
    return tuple(shape), tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


class _Described(NamedTuple):
    """Fields of a tensor descriptor that Triton's launcher reads."""

    base: torch.Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str = "zero"
    round_f32_to_tf32: bool = False


Pointer = Annotated[torch.Tensor, "pointer"]
Written = Annotated[torch.Tensor, "pointer", "written"]
Stride = Annotated[int, "stride"]
Number = Annotated[int | float, "number"]
Descriptor = Annotated[tuple[torch.Tensor, Ragged | Tiled], "descriptor"]
WrittenDescriptor = Annotated[tuple[torch.Tensor, Ragged | Tiled], "descriptor", "written"]
_KINDS = "descriptor", "pointer", "stride", "number"


# Sources of generated functions. `_define` replaces the names in braces.
#: Fix the arguments `bound` of the constructor. Numbers that are all bound are packed once.
_BIND_ARGS = """
def bind({bound}):
    bound_numbers = {bound_numbers}

    def {name}(*, {free}):
        return {pointers}, {specialized}, {numbers}, {tensors}, {shapes}

    return {name}
"""
#: Fix all arguments of launches except the tensors `parameters`. After the first call, the function
#: launches tensors at multiples of 16 without `Launch.__call__`. The parts that follow are repeated
#: for every launch, with its number `i`.
_BIND_LAUNCHES = """
def bind(launches, kinds, current_stream, use_driver):
{constants}
    is_ready = False
    pools = take = start = index = {variables} = None

    def run_launches({parameters}):
        nonlocal is_ready, pools, take, start, index, {nonlocals}
{addresses}
        if is_ready{are_aligned}:
            stream = current_stream(index)
            if take is not None:
                key = stream, {stable}
                pool = pools.get(key)
                try:
                    buffer = pool.pop() if pool else take(key)
                except IndexError:  # another thread took the last buffer
                    buffer = take(key)
                if buffer is not None:
{writes}
                    {driver_calls}, = buffer.calls
{driver_starts}
                    if pool is None:
                        pool = pools.setdefault(key, [])
                    pool.append(buffer)
                    return
            if gcd(16, {checked}) == 16:
{starts}
                return
{calls}
        if is_ready:
            return
        variants = [x.variant(kind) for x, kind in zip(launches, kinds)]
        if None not in variants:
            {variants} = variants
            pools, take, start = use_driver(launches, kinds)
            is_ready, index = True, launch0.index

    return run_launches
"""
_CONSTANTS = """\
    launch{i}, programs{i}, shapes{i}, strides{i}, numbers{i}, fixed = launches[{i}].constants
    tail{i} = *strides{i}, *numbers{i}, *launch{i}.values
    encoded{i}, encode{i} = launch{i}.encoded, launch{i}.encode
    {fixed} = fixed
    {fixed_addresses} = map(address, fixed)"""
_ADDRESS = """\
        {tensor}_address = address({tensor})"""
_DESCRIPTORS = """\
                key = {bases}, shapes{i}
                descriptors = encoded{i}.get(key) or encode{i}(key, {described}, shapes{i})"""
_START = """\
                start{i}(programs{i}, 1, 1, stream, *arguments{i}, {arguments}, *tail{i})"""
_WRITE = """\
                    buffer.cells[{i}] = {address}"""
_DRIVER_START = """\
                    if start(*call{i}):
                        retry(call{i})"""
_CALL = """\
        specialized = {addresses}, *strides{i}
        launch{i}(programs{i}, ({pointers}, specialized, numbers{i}, {described}, shapes{i}))"""


def _tuple_source(items: Iterable[str]) -> str:
    """Return the source of a tuple."""
    return f"({''.join(f'{x}, ' for x in items)})"


def _define(source: str, **parts: str) -> Callable[..., Any]:
    """Return the function `bind` of a source above."""
    namespace: dict[str, Any] = {"address": _address, "gcd": gcd, "retry": retry}
    exec(source.format(**parts), namespace)
    return namespace["bind"]  # type: ignore[no-any-return]


@dataclass_transform(kw_only_default=True)
def launch_args(cls: type) -> Any:
    """Turn a class of annotated fields into the constructor of the named arguments of one kernel.

    The fields are the kernel's parameters before its constants, in the kernel's order. Their
    annotations are `Descriptor`, `Pointer`, `Stride` or `Number`, in this order. Kernels whose
    launches can be recorded, see `recording`, annotate the tensors that they write with
    `WrittenDescriptor` or `Written` instead. A kernel whose constants decide whether it writes a
    tensor has the tensor annotated too. Its `Launch` names the tensor as `unwritten` where it does
    not, and such a launch may pass any tensor there, even one that the kernel reads elsewhere.

    The constructor takes the fields by name and returns the tuple (pointers, specialized, numbers,
    described, shapes). `specialized` has the addresses of the pointers and the strides, by which the
    JIT chooses a variant.

    The constructor is a generated function, as in `collections.namedtuple`: an instance of a class
    would cost 0.7 microseconds more per launch. CPython 3.11 passes more than 15 keywords through a
    dictionary, which costs 0.6 microseconds; `bind_args` avoids it.
    """
    kinds = {name: kind.__metadata__[0] for name, kind in cls.__annotations__.items()}
    order = [_KINDS.index(kind) for kind in kinds.values()]
    if order != sorted(order):
        raise TypeError(f"{cls.__name__}: the fields must be ordered {', '.join(_KINDS)}")
    described, pointers, strides, numbers = (
        [name for name, kind in kinds.items() if kind == wanted] for wanted in _KINDS
    )

    @cache
    def args_binder(*bound: str) -> Callable[..., Any]:
        """Return a function of the bound fields that returns the constructor from the others."""
        if unknown := set(bound) - set(kinds):
            raise TypeError(f"{cls.__name__} has no field {', '.join(sorted(unknown))}")
        are_numbers_bound = set(numbers) <= set(bound)
        return _define(
            _BIND_ARGS,
            name=cls.__name__,
            pointers=_tuple_source(pointers),
            bound=", ".join(bound),
            free=", ".join(x for x in kinds if x not in bound),
            specialized=_tuple_source([*(f"address({x})" for x in pointers), *strides]),
            bound_numbers=_tuple_source(numbers if are_numbers_bound else []),
            numbers="bound_numbers" if are_numbers_bound else _tuple_source(numbers),
            tensors=_tuple_source(f"{x}[0]" for x in described),
            shapes=_tuple_source(f"{x}[1]" for x in described),
        )

    constructor: Any = args_binder()()
    constructor.__qualname__ = cls.__name__
    constructor.__doc__, constructor.__module__ = cls.__doc__, cls.__module__
    constructor.fields, constructor.args_binder = tuple(kinds), args_binder
    constructor.described, constructor.pointers = described, pointers
    constructor.strides, constructor.numbers = strides, numbers
    constructor.written = frozenset(
        name for name, kind in cls.__annotations__.items() if "written" in kind.__metadata__
    )
    return constructor


def bind_args(args: Any, **values: Any) -> Callable[..., Any]:
    """Return the constructor `args`, declared with `launch_args`, with some of its fields fixed."""
    return args.args_binder(*values)(**values)  # type: ignore[no-any-return]


class BoundLaunch:
    """A launch whose arguments are fixed, except for tensors that a function of `bind_launches` takes.

    Parameters
    ----------
    launch
        The kernel.
    programs
        The number of CTAs.
    args
        The kernel's named arguments, declared with `launch_args`.
    **values
        Every field of `args`. A pointer is a tensor, or the name of a parameter of the function. A
        descriptor is the pair of such a name and a shape.
    """

    def __init__(self, launch: "Launch", programs: int, args: Any, **values: Any):
        self.launch = launch
        described = [values[name] for name in args.described]
        self.described, shapes = (tuple(x[i] for x in described) for i in range(2))
        pointers = [values[name] for name in args.pointers]
        fixed = tuple(x for x in pointers if not isinstance(x, str))
        #: The parameters of the function that are pointers; None for a fixed tensor.
        self.pointers = tuple(x if isinstance(x, str) else None for x in pointers)
        strides, numbers = (
            tuple(values[name] for name in names) for names in (args.strides, args.numbers)
        )
        self.constants = launch, programs, shapes, strides, numbers, fixed

    def kind(self) -> Any:
        """Return the key of the variant for tensors at multiples of 16.

        None for numbers beyond 32 bits, and for fixed tensors at other addresses: such launches
        never take the short path.
        """
        *_, strides, numbers, fixed = self.constants
        if max(0, *strides, *numbers) >= _LIMIT or _alignment(*map(_address, fixed)) < 16:
            return None
        return _kind((*(0 for _ in self.pointers), *strides))

    def variant(self, kind: Any) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
        """Return the launcher of a variant and its first arguments; None before it is compiled."""
        variant = self.launch.variants.get(kind)
        if variant is None or _before_launch is None:
            return variant
        start, arguments = variant
        return partial(_run_after, _before_launch, start), arguments


def _run_after(before: Callable[[], Any], start: Callable[..., Any], *args: Any) -> Any:
    before()
    return start(*args)


@contextmanager
def observed_launches(before: Callable[[], Any]) -> Iterator[None]:
    """Make calls that are prepared in this context run `before()` right before each launch.

    It is for measurements. A call is prepared once per layout, in its first two runs.
    """
    global _before_launch
    previous, _before_launch = _before_launch, before
    try:
        yield
    finally:
        _before_launch = previous


def bind_launches(
    parameters: str, *launches: BoundLaunch, varying: tuple[str, ...] = ()
) -> Callable[..., None]:
    """Return a function of tensors that runs launches on one device in sequence.

    The function is generated: it reads every address once, and calls the CUDA driver, see `driver`,
    or Triton's launchers in C. A closure that looks up tensors by name would take 2.1 to 2.6
    microseconds more per launch.

    Parameters
    ----------
    parameters
        The parameters of the function, as in its definition.
    *launches
        The launches, with the names of these parameters in place of tensors.
    varying
        The names of pointers that differ in every call, such as counters. The others often have the
        addresses of an earlier call.

    Returns
    -------
    Callable
        The function.
    """
    forms = tuple((x.described, x.pointers) for x in launches)
    bind = _launches_binder(parameters, forms, varying)
    names = _stable_names(forms, varying) + varying
    use_driver = partial(_use_driver, names)
    kinds = [x.kind() for x in launches]
    return bind(launches, kinds, current_stream, use_driver)  # type: ignore[no-any-return]


_Form = tuple[tuple[str, ...], tuple[str | None, ...]]


def _stable_names(forms: Iterable[_Form], varying: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the tensors that launches read, except for `varying`."""
    # A dict as an ordered set: several launches take the same tensors.
    read = dict.fromkeys(x for form in forms for names in form for x in names if x)
    return tuple(x for x in read if x not in varying)


def _use_driver(
    names: tuple[str, ...], launches: Sequence[BoundLaunch], kinds: Sequence[Any]
) -> tuple[Any, Any, Any]:
    """Return the pools and the method `take` of an `ArgumentCache`, and the driver's function.

    All are None if a launch needs Triton's launcher.
    """
    kernels = [x.launch.driver_kernels.get(k) for x, k in zip(launches, kinds, strict=True)]
    # Triton's launcher skips a launch of no CTAs. The driver returns an error.
    if None in kernels or any(x.constants[1] == 0 for x in launches):
        return None, None, None
    cache = ArgumentCache(partial(_make_plan, names, launches, kernels))
    start = launch_kernel()
    if _before_launch is not None:
        start = partial(_run_after, _before_launch, start)
    return cache.pools, cache.take, start


def _make_plan(
    names: tuple[str, ...], launches: Sequence[BoundLaunch], kernels: Sequence[DriverKernel]
) -> LaunchPlan:
    """Return launches for the driver. `names` has the tensors in the order of their addresses."""
    number = {name: i for i, name in enumerate(names)}
    forms = tuple(
        LaunchForm(
            kernel,
            tuple(number[x] for x in bound.described),
            bound.constants[2],
            tuple(None if x is None else number[x] for x in bound.pointers),
        )
        for bound, kernel in zip(launches, kernels, strict=True)
    )
    constants = [x.constants for x in launches]
    return LaunchPlan(
        len(names),
        forms,
        programs=[x[1] for x in constants],
        fixed=[x[5] for x in constants],
        numbers=[(*x[3], *x[4]) for x in constants],
    )


@cache
def _launches_binder(
    parameters: str, forms: tuple[_Form, ...], varying: tuple[str, ...]
) -> Callable[..., Any]:
    """Return the function that makes the result of `bind_launches`.

    `forms` has `BoundLaunch.described` and `BoundLaunch.pointers` of each launch.
    """
    constants, starts, calls, variants = [], [], [], []
    # Dicts as ordered sets: several launches take the same tensors.
    free = dict.fromkeys(x for _, pointers in forms for x in pointers if x)
    read = free | dict.fromkeys(x for described, _ in forms for x in described)
    stable, launches = _stable_names(forms, varying), range(len(forms))
    for i, (described, pointers) in enumerate(forms):
        names = [x or f"fixed{i}_{j}" for j, x in enumerate(pointers)]
        fixed = [name for name, x in zip(names, pointers, strict=True) if x is None]
        addresses = ", ".join(_address_names(names))
        parts = dict(
            i=str(i),
            fixed=_tuple_source(fixed),
            fixed_addresses=_tuple_source(_address_names(fixed)),
            pointers=_tuple_source(names),
            described=_tuple_source(described),
            bases=_tuple_source(_address_names(described)),
            addresses=addresses,
            arguments=f"*descriptors, {addresses}" if described else addresses,
        )
        constants.append(_CONSTANTS.format(**parts))
        if described:
            starts.append(_DESCRIPTORS.format(**parts))
        starts.append(_START.format(**parts))
        calls.append(_CALL.format(**parts))
        variants.append((f"start{i}", f"arguments{i}"))
    variables = [x for variant in variants for x in variant]
    return _define(
        _BIND_LAUNCHES,
        parameters=parameters,
        constants="\n".join(constants),
        variables=" = ".join(variables),
        nonlocals=", ".join(variables),
        addresses="\n".join(_ADDRESS.format(tensor=x) for x in read),
        checked=", ".join(_address_names(free)),
        are_aligned="".join(f" and not {x} & 15" for x in _address_names(varying)),
        stable="".join(f"{x}, " for x in _address_names(stable)),
        writes="\n".join(
            _WRITE.format(i=i, address=x)
            for i, x in enumerate(_address_names(varying), start=len(stable))
        ),
        driver_calls=", ".join(f"call{i}" for i in launches),
        driver_starts="\n".join(_DRIVER_START.format(i=i) for i in launches),
        starts="\n".join(starts),
        calls="\n".join(calls),
        variants=_tuple_source(map(_tuple_source, variants)),
    )


def _address_names(tensors: Iterable[str]) -> list[str]:
    """Return the names of the variables that hold the addresses of tensors."""
    return [f"{x}_address" for x in tensors]


def bind_launch(launch: "Launch", programs: int, args: Any, **values: Any) -> Callable[..., None]:
    """Return a function of tensors that launches with all other arguments fixed.

    Parameters
    ----------
    launch
        The kernel.
    programs
        The number of CTAs.
    args
        The kernel's named arguments, declared with `launch_args`.
    **values
        Every stride and number, the shape of every descriptor, and each pointer that is the same in
        all launches.

    Returns
    -------
    Callable
        A function that takes the other pointers, and the tensors of all descriptors, by name.
    """
    described = {name: (name, values[name]) for name in args.described}
    pointers = {name: values.get(name, name) for name in args.pointers}
    free = *described, *(name for name in args.pointers if name not in values)
    bound = BoundLaunch(launch, programs, args, **(values | pointers | described))
    return bind_launches(f"*, {', '.join(free)}", bound)


def _launcher(compiled: Any, described: bool) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the C launcher of a variant, and its arguments between stream and kernel arguments."""
    run, launch = compiled.run, compiled.run.launch
    if described:  # Triton's wrapper around the launcher encodes the descriptors
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]
    fixed = compiled.function, run.launch_cooperative_grid, run.launch_pdl
    if TRITON_VERSION == (3, 6):  # scratch memory, metadata, hooks
        return launch, (*fixed, None, None, compiled.packed_metadata, None, None, None)
    fixed = (
        *fixed,
        compiled.packed_metadata,
        None,
        None,
        None,
        None,
        None,
        run.arg_annotations,
        run.kernel_signature,
    )
    n = 4 + len(fixed)
    return lambda *args: launch(*args[:n], args[n:]), fixed


def _specialization(x: int) -> int:
    """Return the property of a pointer or stride that the JIT specializes on, besides its type."""
    return 0 if x % 16 == 0 else 1 if x == 1 else 2


def _kind(specialized: Sequence[int]) -> int | tuple[int, ...]:
    """Return the key of the variant for these pointers and strides."""
    return 16 if _alignment(*specialized) == 16 else tuple(map(_specialization, specialized))


class Launch:
    """A Triton kernel with fixed constants, on one device.

    The JIT inspects every argument at every call to choose a variant, and Triton encodes every
    descriptor again. This class caches the variants by which pointers and strides are multiples of
    16, as nearly all are. It launches a cached variant directly, with descriptors that are encoded
    once per tensor. Calls with numbers beyond 32 bits go through the JIT.

    Parameters
    ----------
    kernel
        The jitted function. Its parameters are in the order descriptors, pointers, strides, other
        numbers, constants. The other numbers are not specialized.
    constants
        The constexpr arguments, in the kernel's order.
    options
        The compile options.
    rows
        The number of rows of a tile of each descriptor.
    args
        The kernel's named arguments, declared with `launch_args`. Their names, followed by the
        names of the constants, must be the names of the kernel's parameters.
    unwritten
        The names of arguments that the kernel does not write with these constants, although their
        fields in `args` say so.
    """

    __slots__ = (
        "constants",
        "driver_kernels",
        "encoded",
        "failures",
        "index",
        "kernel",
        "metadata",
        "options",
        "rows",
        "values",
        "variants",
        "written",
    )

    def __init__(
        self,
        kernel: Any,
        constants: dict[str, Any],
        options: dict[str, Any],
        rows: tuple[int, ...] = (),
        *,
        args: Any,
        unwritten: tuple[str, ...] = (),
    ):
        if (*args.fields, *constants) != tuple(kernel.arg_names):
            raise TypeError(
                f"{args.__name__} and the constants do not match the parameters of the kernel: "
                f"expected {tuple(kernel.arg_names)}, got {(*args.fields, *constants)}"
            )
        # Triton 3.9 warns if kernels do not choose, and 3.10 changes the default.
        self.kernel, self.options = kernel, {"enable_fp_fusion": True, **options}
        self.constants, self.rows = constants, rows
        self.values, self.written = tuple(constants.values()), args.written.difference(unwritten)
        self.variants: dict[int | tuple[int, ...], tuple[Callable[..., None], tuple[Any, ...]]] = {}
        #: The variants that the driver can launch without Triton's launcher.
        self.driver_kernels: dict[int | tuple[int, ...], DriverKernel | None] = {}
        self.encoded: dict[tuple, tuple] = {}
        self.failures: dict[int | tuple[int, ...], str] = {}  # why a variant does not compile

    def __call__(self, programs: int, args: Any) -> None:
        """Launch on the current stream of the current device, which must hold the tensors.

        `args` are the kernel's named arguments, see `launch_args`.
        """
        pointers, specialized, numbers, described, shapes = args
        kind = _kind(specialized)
        variant = self.variants.get(kind)
        if variant is not None and not (
            _TRUNCATES and max(0, *specialized[len(pointers) :], *numbers) >= _LIMIT
        ):
            launch, fixed = variant
            descriptors = ()
            if shapes:
                key = (*map(_address, described),), shapes
                descriptors = self.encoded.get(key) or self.encode(key, described, shapes)
            try:
                launch(
                    programs,
                    1,
                    1,
                    current_stream(self.index),
                    *fixed,
                    *descriptors,
                    *specialized,
                    *numbers,
                    *self.values,
                )
                return
            # A number beyond 32 bits, for which the JIT below has another variant.
            except OverflowError:
                pass
        if kind in self.failures:
            raise KernelUnavailableError(self.failures[kind])
        strides = specialized[len(pointers) :]
        if pointers[0].is_meta:
            described = zip(described, shapes, self.rows)
            arguments = *described, *pointers, *strides, *numbers
            launch = RecordedLaunch(
                self.kernel, programs, arguments, self.constants, self.options, self.written
            )
            current_recording().steps.append(launch)
            return
        _check_alignment(described)
        typed = [shape.typed(x, rows) for x, shape, rows in zip(described, shapes, self.rows)]
        try:
            compiled = self.kernel[(programs,)](
                *typed, *pointers, *strides, *numbers, **self.constants, **self.options
            )
        except COMPILE_ERRORS as error:
            self.failures[kind] = (
                f"{self.kernel.__name__} does not compile for "
                f"{device_info(pointers[0].device)}: {type(error).__name__}: {error}"
            )
            raise KernelUnavailableError(self.failures[kind]) from error
        if (
            max(0, *strides, *numbers) < _LIMIT
            and TRITON_VERSION in TESTED_VERSIONS
            and not INTERPRETED
        ):
            self._keep(kind, compiled, pointers[0].get_device())

    def _keep(self, kind: int | tuple[int, ...], compiled: Any, index: int) -> None:
        """Cache a variant, unless it needs scratch memory or a launch hook is installed."""
        run = compiled.run
        scratch = run.global_scratch_size or run.profile_scratch_size
        if not (
            scratch or knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls
        ):
            self.index, self.metadata = index, getattr(compiled.metadata, "tensordesc_meta", None)
            self.driver_kernels[kind] = describe_kernel(compiled, self.encoded)
            self.variants[kind] = _launcher(compiled, bool(self.rows))

    def encode(
        self, key: tuple, described: tuple[torch.Tensor, ...], shapes: tuple[Ragged | Tiled, ...]
    ) -> tuple:
        """Return the launcher's arguments for the descriptors.

        They are cached together and one by one, because usually only one of them is new.
        """
        _check_alignment(described)
        if len(self.encoded) >= _MAX_ENCODED:
            self.encoded.clear()
        from triton.backends.nvidia.driver import make_tensordesc_arg

        # A new thread, such as autograd's, has no CUDA context before its first call of the runtime,
        # and the encoder needs one. This call creates it.
        torch.cuda.is_current_stream_capturing()
        arguments: tuple = ()
        unused = (None,) if TRITON_VERSION >= (3, 8) else ()
        for i, (base, shape, metadata) in enumerate(zip(described, shapes, self.metadata)):
            single = i, _address(base), shape
            if single not in self.encoded:
                self.encoded[single] = (
                    *make_tensordesc_arg(
                        _Described(base, shape.shape, shape.strides), metadata, *unused
                    ),
                )
            arguments += self.encoded[single]
        self.encoded[key] = arguments
        return arguments


def on_device(index: int | None, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run` as a function that selects the CUDA device of this index; None means the CPU."""

    def run_on_device(*args: Any) -> Any:
        if index == current_device():
            return run(*args)
        with torch.cuda.device(index):
            return run(*args)

    return run_on_device if index is not None and device_count() > 1 else run


def launch_on_device(launch: Launch, programs: int, args: Any) -> None:
    """Launch on the device of the first pointer; see `Launch.__call__` for the arguments."""
    on_device(args[0][0].device.index, launch)(programs, args)


def method_on_device(run: Callable[..., Any]) -> Any:
    """Make a method select the CUDA device whose index is the attribute `index` of its object."""
    return cached_property(lambda config: on_device(config.index, run.__get__(config)))
