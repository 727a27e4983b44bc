"""New tokens written to a paged cache, and their rotation, in one launch."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import scree

from ..norms.rope import (
    angle_constants,
    angles,
    copy_rest,
    load_pairs,
    rotate_and_store,
    standard_options,
    unsupported_tables,
)
from ..runtime.autograd import needs_gradient
from ..runtime.compile import define_operator, uses_operators
from ..runtime.device import unsupported_dtype
from ..runtime.fallback import fallback_note, falls_back_to
from ..runtime.launch import (
    BoundLaunch,
    Launch,
    Number,
    Pointer,
    Stride,
    Written,
    bind_launches,
    contiguous,
    empty,
    launch_args,
    on_device,
)

#: Rows whose offsets a CTA reads at a time; few sizes, as each compiles a kernel.
_ROWS_AT_A_TIME = (16, 64, 256, 1024)
#: Elements of a token, summed over its heads, that fit the registers of a CTA.
_MAX_ELEMENTS = 1 << 15
_ELEMENTS_PER_WARP = 1024
#: The parameters of the function that launches the kernel.
_PARAMETERS = (
    "k_pages, v_pages, k, v, q, q_out, pages, page_offsets, kv_lengths, offsets, inv_freq, cos, sin"
)


@triton.jit
def _copy_token(
    X,
    OUT,
    stride,
    out_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Copy the heads of one token."""
    head = tl.arange(0, BLOCK_H).to(tl.int64)[:, None]
    element = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < HEADS) & (element < DIM)
    x = tl.load(X + head * stride + element, mask=mask)
    tl.store(OUT + head * out_stride + element, x, mask=mask)


@triton.jit
def _rotate_token(
    X,
    OUT,
    cos,
    sin,
    stride,
    out_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_H: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rotate the heads of one token."""
    first = tl.zeros([1], tl.int64)
    a, b = load_pairs(X, first, 1, 0, HEADS, 0, stride, ROTARY_DIM, HALF, BLOCK_H, INTERLEAVED)
    rotate_and_store(
        OUT, a, b, cos, sin, first, 1, 0, HEADS, 0, out_stride, ROTARY_DIM, HALF, BLOCK_H, 1,
        INTERLEAVED,
    )  # fmt: skip
    if REST:
        copy_rest(X, OUT, first, 1, HEADS, 0, stride, 0, out_stride, DIM, ROTARY_DIM, REST, BLOCK_H)


@triton.jit(do_not_specialize=("n", "table_width", "capacity", "table_rows"))
def append_paged_kernel(
    K_PAGES,
    V_PAGES,
    K,
    V,
    Q,
    Q_OUT,
    PAGES,
    PAGE_OFFSETS,
    KV_LENGTHS,
    OFFSETS,
    COS,
    SIN,
    stride_kp,
    stride_ks,
    stride_kh,
    stride_vp,
    stride_vs,
    stride_vh,
    stride_kt,
    stride_kth,
    stride_vt,
    stride_vth,
    stride_qt,
    stride_qh,
    n,
    table_width,
    capacity,
    table_rows,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    Q_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_RAGGED: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    BASE: tl.constexpr,
    INTERCEPT: tl.constexpr,
    PER_PAIR: tl.constexpr,
    PER_TURN: tl.constexpr,
    SLOWDOWN: tl.constexpr,
    ATTENTION_FACTOR: tl.constexpr,
    TABLES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write one token of K and V, (total, HEADS, DIM) and (total, HEADS, DIM_V), to its page.

    With ROTARY_DIM > 0 the keys, and the Q_HEADS heads of Q, are rotated by the position of the
    token in the cache; see `angles`.
    """
    token = tl.program_id(0).to(tl.int64)
    row = n * 0
    for start in range(0, n, ROWS):
        rows = start + tl.arange(0, ROWS)
        end = tl.load(OFFSETS + rows + 1, mask=rows < n, other=0)
        row += tl.sum(((end <= token) & (rows < n)).to(tl.int32))
    if row < n:
        position = tl.load(KV_LENGTHS + row) - (tl.load(OFFSETS + row + 1) - token)
        if IS_RAGGED:
            first_page = tl.load(PAGE_OFFSETS + row).to(tl.int64)
            PAGES += first_page
            room = (tl.load(PAGE_OFFSETS + row + 1) - first_page) * PAGE_SIZE
        else:
            PAGES += row.to(tl.int64) * table_width
            room = capacity
        # A token before the first page or after the last one is not written.
        is_inside = (position >= 0) & (position < room)
        page = tl.load(PAGES + position // PAGE_SIZE, mask=is_inside, other=0).to(tl.int64)
        place = (position % PAGE_SIZE).to(tl.int64)
        K_PAGES += page * stride_kp + place * stride_ks
        V_PAGES += page * stride_vp + place * stride_vs
        if is_inside:
            _copy_token(
                V + token * stride_vt, V_PAGES, stride_vth, stride_vh, HEADS, DIM_V, BLOCK_H,
                BLOCK_DV,
            )  # fmt: skip
        K += token * stride_kt
        if ROTARY_DIM > 0:
            cos, sin = angles(
                position + tl.zeros([HALF], tl.int64), 1, COS, SIN, table_rows, BASE, INTERCEPT,
                PER_PAIR, PER_TURN, SLOWDOWN, ATTENTION_FACTOR, TABLES, ROTARY_DIM, HALF, 1,
            )  # fmt: skip
            if is_inside:
                _rotate_token(
                    K, K_PAGES, cos, sin, stride_kth, stride_kh, HEADS, DIM, ROTARY_DIM, HALF,
                    REST, BLOCK_H, INTERLEAVED,
                )  # fmt: skip
            if Q_HEADS > 0:
                Q_OUT += token * (Q_HEADS * DIM)
                _rotate_token(
                    Q + token * stride_qt, Q_OUT, cos, sin, stride_qh, DIM, Q_HEADS, DIM,
                    ROTARY_DIM, HALF, REST, BLOCK_Q, INTERLEAVED,
                )  # fmt: skip
        elif is_inside:
            _copy_token(K, K_PAGES, stride_kth, stride_kh, HEADS, DIM, BLOCK_H, BLOCK_D)


@launch_args
class AppendArgs:
    """Arguments of `append_paged_kernel`."""

    K_PAGES: Written
    V_PAGES: Written
    K: Pointer
    V: Pointer
    Q: Pointer
    Q_OUT: Written
    PAGES: Pointer
    PAGE_OFFSETS: Pointer
    KV_LENGTHS: Pointer
    OFFSETS: Pointer
    COS: Pointer
    SIN: Pointer
    stride_kp: Stride
    stride_ks: Stride
    stride_kh: Stride
    stride_vp: Stride
    stride_vs: Stride
    stride_vh: Stride
    stride_kt: Stride
    stride_kth: Stride
    stride_vt: Stride
    stride_vth: Stride
    stride_qt: Stride
    stride_qh: Stride
    n: Number
    table_width: Number
    capacity: Number
    table_rows: Number


class _Rotation(NamedTuple):
    """The rotation of a call; rotary_dim 0 is none. See `Rotation` of `norms.rope`."""

    base: float = 0.0
    interleaved: bool = False
    rotary_dim: int = 0
    scaling: tuple[float, ...] | None = None


class _Shape(NamedTuple):
    """Arguments that determine a kernel."""

    device: torch.device
    dtypes: tuple[torch.dtype | None, ...]
    heads: int
    dim: int
    dim_v: int
    q_heads: int
    page_size: int
    is_table_ragged: bool
    rotation: _Rotation
    tables: int
    rows_at_a_time: int


@cache
def _launch(shape: _Shape) -> Launch:
    block_h, block_d, block_dv, block_q = (
        triton.next_power_of_2(max(size, 1))
        for size in (shape.heads, shape.dim, shape.dim_v, shape.q_heads)
    )
    elements = max(block_h * max(block_d, block_dv), block_q * block_d)
    rotation = shape.rotation
    rest = shape.dim - rotation.rotary_dim if rotation.rotary_dim else 0
    return Launch(
        append_paged_kernel,
        dict(
            HEADS=shape.heads,
            DIM=shape.dim,
            DIM_V=shape.dim_v,
            Q_HEADS=shape.q_heads,
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            BLOCK_DV=block_dv,
            BLOCK_Q=block_q,
            PAGE_SIZE=shape.page_size,
            IS_RAGGED=shape.is_table_ragged,
            ROTARY_DIM=rotation.rotary_dim,
            HALF=triton.next_power_of_2(max(rotation.rotary_dim // 2, 1)),
            REST=triton.next_power_of_2(rest) if rest else 0,
            BASE=rotation.base,
            **angle_constants(rotation.scaling, shape.tables),
            INTERLEAVED=rotation.interleaved,
            ROWS=shape.rows_at_a_time,
        ),
        dict(num_warps=min(max(triton.next_power_of_2(elements // _ELEMENTS_PER_WARP), 1), 8)),
        args=AppendArgs,
        unwritten=() if shape.q_heads else ("Q_OUT",),
    )


def _prepare(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q: torch.Tensor | None,
    pages: torch.Tensor,
    page_offsets: torch.Tensor | None,
    kv_lengths: torch.Tensor,
    offsets: torch.Tensor,
    inv_freq: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    rotation: _Rotation,
) -> Callable[..., torch.Tensor | None]:
    """Return a function that writes k and v of these sizes and strides to the pages.

    It takes the tensors in the same order, and returns the rotated q, or None without q.
    """
    n, total, is_ragged = offsets.shape[0] - 1, k.shape[0], page_offsets is not None
    arrays = k_pages, v_pages, k, v, q, pages, page_offsets, kv_lengths, offsets
    shape = _Shape(
        k.device,
        tuple(None if x is None else x.dtype for x in (*arrays, inv_freq, cos, sin)),
        *k.shape[1:],
        v.shape[2],
        0 if q is None else q.shape[1],
        k_pages.shape[1],
        is_ragged,
        rotation,
        2 if cos is not None else 1 if inv_freq is not None else 0,
        next((rows for rows in _ROWS_AT_A_TIME if rows >= n), _ROWS_AT_A_TIME[-1]),
    )
    stride_kp, stride_ks, stride_kh, _ = k_pages.stride()
    stride_vp, stride_vs, stride_vh, _ = v_pages.stride()
    stride_kt, stride_kth, _ = k.stride()
    stride_vt, stride_vth, _ = v.stride()
    stride_qt, stride_qh = (0, 0) if q is None else q.stride()[:2]
    new = empty(k.device.type)
    out_spec = None if q is None else (*contiguous(tuple(q.shape)), q.dtype)
    # Arrays that a call does not have get any pointer, which the kernel does not read.
    angles_name = "cos" if cos is not None else "inv_freq" if inv_freq is not None else "k"
    bound = BoundLaunch(
        _launch(shape),
        total,
        AppendArgs,
        K_PAGES="k_pages",
        V_PAGES="v_pages",
        K="k",
        V="v",
        Q="k" if q is None else "q",
        Q_OUT="k" if q is None else "q_out",
        PAGES="pages",
        PAGE_OFFSETS="page_offsets" if is_ragged else "pages",
        KV_LENGTHS="kv_lengths",
        OFFSETS="offsets",
        COS=angles_name,
        SIN=angles_name if sin is None else "sin",
        stride_kp=stride_kp,
        stride_ks=stride_ks,
        stride_kh=stride_kh,
        stride_vp=stride_vp,
        stride_vs=stride_vs,
        stride_vh=stride_vh,
        stride_kt=stride_kt,
        stride_kth=stride_kth,
        stride_vt=stride_vt,
        stride_vth=stride_vth,
        stride_qt=stride_qt,
        stride_qh=stride_qh,
        n=n,
        table_width=0 if is_ragged else pages.stride(0),
        # The kernel reads the pages of a row of a ragged table.
        capacity=0 if is_ragged else min(pages.shape[1] * k_pages.shape[1], (1 << 31) - 1),
        table_rows=0 if cos is None else cos.shape[0],
    )
    launch = bind_launches(_PARAMETERS, bound)

    def append(
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q: torch.Tensor | None,
        pages: torch.Tensor,
        page_offsets: torch.Tensor | None,
        kv_lengths: torch.Tensor,
        offsets: torch.Tensor,
        inv_freq: torch.Tensor | None = None,
        cos: torch.Tensor | None = None,
        sin: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        q_out = None if out_spec is None else new(*out_spec)
        if n and total:
            launch(
                k_pages,
                v_pages,
                k,
                v,
                q,
                q_out,
                pages,
                page_offsets,
                kv_lengths,
                offsets,
                inv_freq,
                cos,
                sin,
            )
        return q_out

    return on_device(k.device.index if k.device.type == "cuda" else None, append)


def rejects(call: Any) -> str | None:
    """Return why the kernel does not support an `AppendPagedCall`; None if it does."""
    k, v, q = call.k.values, call.v.values, None if call.q is None else call.q.values
    if reason := unsupported_dtype(k):
        return reason
    arrays = [x for x in (call.k_pages, call.v_pages, k, v, q) if x is not None]
    if any(x.stride(-1) != 1 for x in arrays):
        return "the Triton kernels need the last axis of caches, k, v and q to be contiguous"
    if reason := unsupported_tables(call.tables):
        return reason
    if q is not None and (q.dtype != k.dtype or q.shape[2] != k.shape[2]):
        return "the Triton kernels rotate q and k of one dtype and one head_dim"
    sizes = (triton.next_power_of_2(x.shape[-2] * x.shape[-1]) for x in arrays)
    if max(sizes) > _MAX_ELEMENTS:
        return f"the Triton kernels take up to {_MAX_ELEMENTS} elements per token"
    if needs_gradient(*arrays):
        return "the Triton kernels compute no gradients of writes to a cache"
    return None


def note(call: Any) -> str | None:
    """Return why another implementation replaces the kernel; None if none does."""
    return fallback_note(__name__, call.k.values.dtype)


def append_paged(call: Any) -> tuple[Any, ...]:
    """Compute an `AppendPagedCall`."""
    q, values = call.q, (call.k.values, call.v.values, None if call.q is None else call.q.values)
    if not uses_operators(call.k_pages, call.v_pages, *values):
        append = _prepare_call(call)
        arrays = call.k_pages, call.v_pages, call.page_table, call.kv_lengths
        return append(call.k, call.v, q, *arrays, *call.tables)  # type: ignore[no-any-return]
    caches, table = (call.k_pages, call.v_pages), call.page_table
    indices = table.values, table.offsets, call.kv_lengths, call.k.offsets
    out = _op(*caches, *values, *indices, *call.tables, *_rotation_of(call))
    return caches if q is None else (*caches, q.with_values(out))


def prepare_append_paged(call: Any) -> Callable[..., Any] | None:
    """Return a function for calls with the same metadata.

    None if an array requires a gradient: the kernel takes such calls only while gradients are
    disabled, which no guard of the call cache checks.
    """
    arrays = call.k.values, call.v.values, None if call.q is None else call.q.values
    if any(x is not None and x.requires_grad for x in (*arrays, call.k_pages, call.v_pages)):
        return None
    return _prepare_call(call)


def _prepare_call(call: Any) -> Callable[..., Any]:
    """Return a function for calls with the same metadata, in this grad mode."""
    rotation = _rotation_of(call)
    # Whether the page table is dense -> function that runs calls.
    prepared: dict[bool, Callable[..., Any]] = {}

    def prepare(*arrays: torch.Tensor | None) -> Callable[..., Any]:
        contiguous_arrays = _make_indices_contiguous(*arrays)
        run = launch = _prepare(*contiguous_arrays, rotation)
        if any(x is not y for x, y in zip(arrays, contiguous_arrays, strict=True)):

            def run(*arrays: torch.Tensor | None) -> Any:
                return launch(*_make_indices_contiguous(*arrays))

        prepared[arrays[6] is None] = run
        return run

    def append(
        k: Any,
        v: Any,
        q: Any,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        page_table: Any,
        kv_lengths: torch.Tensor,
        inv_freq: torch.Tensor | None = None,
        cos: torch.Tensor | None = None,
        sin: torch.Tensor | None = None,
    ) -> tuple[Any, ...]:
        # An instance check of another type takes longer.
        if isinstance(page_table, scree.Array):
            pages, page_offsets = page_table.values, page_table.offsets
        else:
            pages, page_offsets = page_table, None
        q_values, offsets = None if q is None else q.values, k.offsets
        indices = pages, page_offsets, kv_lengths, offsets, inv_freq, cos, sin
        arrays = k_pages, v_pages, k.values, v.values, q_values, *indices
        run = prepared.get(page_offsets is None) or prepare(*arrays)
        out = run(*arrays)
        return (k_pages, v_pages) if q is None else (k_pages, v_pages, q.from_layout(out, q.layout))

    return append


def _make_indices_contiguous(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q: torch.Tensor | None,
    pages: torch.Tensor,
    page_offsets: torch.Tensor | None,
    *others: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Return the arguments with contiguous arrays after q; a dense page table needs contiguous rows."""
    if page_offsets is not None or pages.stride(1) != 1:
        pages = pages.contiguous()
    rest = (x if x is None else x.contiguous() for x in (page_offsets, *others))
    return k_pages, v_pages, k, v, q, pages, *rest


def _rotation_of(call: Any) -> _Rotation:
    if call.rope is None:
        return _Rotation()
    theta, interleaved, rotary_dim, scaling = call.rope
    scaling = None if scaling is None else tuple(scaling)
    return _Rotation(float(theta) ** (-2 / rotary_dim), bool(interleaved), rotary_dim, scaling)


def _standard(k_pages, v_pages, k, v, q, pages, page_offsets, kv_lengths, offsets, *rotation):
    """Compute the operator without kernels; see `_run_operator`."""
    rows = scree.Array(k, offsets)
    rope = standard_options(*rotation) if _Rotation(*rotation[3:]).rotary_dim else None
    _, _, *rotated = scree.append_paged(
        k_pages,
        v_pages,
        rows,
        rows.with_values(v),
        scree.Array(pages, page_offsets),
        kv_lengths,
        q=None if q is None else rows.with_values(q),
        rope=rope,
        kernel="standard",
    )
    return rotated[0].values if rotated else k.new_empty(0)


@falls_back_to(_standard)
def _run_operator(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q: torch.Tensor | None,
    pages: torch.Tensor,
    page_offsets: torch.Tensor,
    kv_lengths: torch.Tensor,
    offsets: torch.Tensor,
    inv_freq: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    base: float,
    interleaved: bool,
    rotary_dim: int,
    scaling: Sequence[float] | None,
) -> torch.Tensor:
    indices = (x.contiguous() for x in (pages, page_offsets, kv_lengths, offsets))
    tables = (x if x is None else x.contiguous() for x in (inv_freq, cos, sin))
    arrays = k_pages, v_pages, k, v, q, *indices, *tables
    scaling = None if scaling is None else tuple(scaling)
    out = _prepare(*arrays, _Rotation(base, interleaved, rotary_dim, scaling))(*arrays)
    return k.new_empty(0) if out is None else out


def _fake(k_pages, v_pages, k, v, q, *arguments):
    return k.new_empty((0,) if q is None else q.shape)


_op = define_operator("append_paged", _run_operator, _fake, mutates=("k_pages", "v_pages"))
