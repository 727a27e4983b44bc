"""Rotary position embedding of ragged rows; the backward is the same kernel with negated angles.

A CTA rotates all heads of a few tokens, of the queries and of the keys. It computes the angles of a
token once for all heads, while the elements are being loaded. It finds the row of a token by
bisection, so positions restart in each row without an array of positions.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import scree
from scree.ops.rope_scaling import FrequencyScaling

from ..layout.offsets import row_of
from ..runtime.autograd import differentiable, save_args, saved_args
from ..runtime.compile import define_operator, uses_operators
from ..runtime.device import unsupported_dtype
from ..runtime.fallback import falls_back_to, gradients
from ..runtime.launch import (
    Launch,
    Number,
    Pointer,
    Stride,
    Written,
    contiguous,
    empty,
    launch_args,
    method_on_device,
)

#: Minimum elements per CTA.
_MIN_ELEMENTS = 2048
#: Maximum elements that a CTA rotates at a time.
_MAX_ELEMENTS = 8192
_ELEMENTS_PER_WARP = 1024


@triton.jit
def _positions(
    OFFSETS, START, n, bisections, HALF: tl.constexpr, TOKENS: tl.constexpr, HAS_START: tl.constexpr
):
    """Return the positions (TOKENS * HALF,) of the tokens of a CTA in their rows."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS * HALF) // HALF
    row = row_of(OFFSETS, token, n - 1, bisections)  # tokens after the last row get the last row
    position = token - tl.load(OFFSETS + row)
    if HAS_START:
        position += tl.load(START + row)
    return position


@triton.jit
def _turns_per_position(
    INV_FREQ,
    BASE: tl.constexpr,
    INTERCEPT: tl.constexpr,
    PER_PAIR: tl.constexpr,
    PER_TURN: tl.constexpr,
    SLOWDOWN: tl.constexpr,
    TABLES: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Return the frequencies (TOKENS * HALF,) in turns per position; see `angles`."""
    pair = tl.arange(0, TOKENS * HALF) % HALF
    rate = tl.full([TOKENS * HALF], 0.15915494309189535, tl.float64)
    if TABLES:
        inv_freq = tl.load(INV_FREQ + pair, mask=pair < ROTARY_DIM // 2, other=0.0)
        rate *= inv_freq.to(tl.float64)
    else:
        for bit in tl.static_range(9):
            if 1 << bit < HALF:
                rate *= tl.where(
                    (pair >> bit) & 1 > 0,
                    tl.full([TOKENS * HALF], BASE ** (1 << bit), tl.float64),
                    1.0,
                )
        if SLOWDOWN != 1:
            # Constants would be rounded to float32 in an expression.
            kept = tl.full([TOKENS * HALF], INTERCEPT, tl.float64)
            kept += pair.to(tl.float64) * tl.full([TOKENS * HALF], PER_PAIR, tl.float64)
            kept += rate * tl.full([TOKENS * HALF], PER_TURN, tl.float64)
            kept = tl.minimum(tl.maximum(kept, 0.0), 1.0)
            rate *= kept + (1.0 - kept) * tl.full([TOKENS * HALF], SLOWDOWN, tl.float64)
    if TABLES or BASE > 1:
        rate -= tl.floor(rate + 0.5)
    return rate


@triton.jit
def _computed_angles(position, rate):
    """Return cos and sin of ``position * rate`` turns.

    An angle is an integer in units of 2**-64 turns, so whole turns overflow. The remainder of an
    angle of thousands of turns is therefore as exact as float32, at little cost. The polynomials
    are from the Cephes library.
    """
    turn = ((position.to(tl.int64) * (rate * 18446744073709551616.0).to(tl.int64)) >> 32).to(
        tl.int32
    )
    quarter = (turn + (1 << 29)) >> 30  # the nearest one
    x = (turn - (quarter << 30)).to(tl.float32) * 1.4629180792671596e-9
    y = x * x
    sin = x + x * y * (-1.6666654611e-1 + y * (8.3321608736e-3 + y * -1.9515295891e-4))
    cos = 1 + y * (
        -0.5 + y * (4.166664568298827e-2 + y * (-1.388731625493765e-3 + y * 2.443315711809948e-5))
    )
    odd = quarter & 1 > 0
    sin, cos = tl.where(odd, cos, sin), tl.where(odd, sin, cos)
    return tl.where((quarter + 1) & 2 > 0, -cos, cos), tl.where(quarter & 2 > 0, -sin, sin)


@triton.jit
def angles(
    position,
    sign,
    COS,
    SIN,
    table_rows,
    BASE: tl.constexpr,
    INTERCEPT: tl.constexpr,
    PER_PAIR: tl.constexpr,
    PER_TURN: tl.constexpr,
    SLOWDOWN: tl.constexpr,
    ATTENTION_FACTOR: tl.constexpr,
    TABLES: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Return cos and sin (TOKENS, 1, HALF) of `sign` times the angle of each position and pair.

    `position` has the shape (TOKENS * HALF,). Without TABLES the angle is
    ``position * BASE**pair``, scaled as in `FrequencyScaling`. With TABLES = 1 COS has the
    frequencies. With TABLES = 2 COS and SIN have table_rows rows of cosines and sines.
    """
    if TABLES == 2:
        pair = tl.arange(0, TOKENS * HALF) % HALF
        # A position outside of the table must not read other memory.
        table_row = tl.minimum(tl.maximum(position.to(tl.int64), 0), table_rows - 1)
        entry, mask = table_row * (ROTARY_DIM // 2) + pair, pair < ROTARY_DIM // 2
        cos = tl.load(COS + entry, mask=mask, other=0.0).to(tl.float32)
        sin = tl.load(SIN + entry, mask=mask, other=0.0).to(tl.float32)
    else:
        rate = _turns_per_position(
            COS, BASE, INTERCEPT, PER_PAIR, PER_TURN, SLOWDOWN, TABLES, ROTARY_DIM, HALF, TOKENS
        )
        cos, sin = _computed_angles(position, rate)
        if ATTENTION_FACTOR != 1:
            cos, sin = cos * ATTENTION_FACTOR, sin * ATTENTION_FACTOR
    sin *= sign
    # Packed into one number: otherwise each thread recomputes its angles for every head, instead
    # of receiving them from another thread.
    packed = (cos.to(tl.int32, bitcast=True).to(tl.int64) << 32) | sin.to(
        tl.uint32, bitcast=True
    ).to(tl.int64)
    packed = tl.reshape(packed, [TOKENS, HALF])[:, None, :]
    return (packed >> 32).to(tl.int32).to(tl.float32, bitcast=True), packed.to(tl.int32).to(
        tl.float32, bitcast=True
    )


@triton.jit
def _element_offsets(
    tokens,
    total,
    first_head,
    heads: tl.constexpr,
    stride,
    head_stride,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Return the offsets of the first element of each pair, (TOKENS, HEADS, HALF), and a mask.

    With INTERLEAVED they are the offsets of all elements.
    """
    head = first_head + tl.arange(0, HEADS).to(tl.int64)[None, :, None]
    element = tl.arange(0, 2 * HALF if INTERLEAVED else HALF)[None, None, :]
    tokens = tokens[:, None, None]
    return tokens * stride + head * head_stride + element, (tokens < total) & (head < heads) & (
        element < (DIM if INTERLEAVED else DIM // 2)
    )


@triton.jit
def load_pairs(
    X,
    tokens,
    total,
    first_head,
    heads: tl.constexpr,
    stride,
    head_stride,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Load the two elements of each pair, (TOKENS, HEADS, HALF), of some heads of some tokens.

    With INTERLEAVED both results are the array of all elements.
    """
    offsets, mask = _element_offsets(
        tokens, total, first_head, heads, stride, head_stride, DIM, HALF, HEADS, INTERLEAVED
    )
    a = tl.load(X + offsets, mask=mask, other=0.0, eviction_policy="evict_last")
    return a, a if INTERLEAVED else tl.load(
        X + offsets + DIM // 2, mask=mask, other=0.0, eviction_policy="evict_last"
    )


@triton.jit
def rotate_and_store(
    OUT,
    a,
    b,
    cos,
    sin,
    tokens,
    total,
    first_head,
    heads: tl.constexpr,
    stride,
    head_stride,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rotate the loaded elements by angles (TOKENS, 1, HALF), and store them."""
    offsets, mask = _element_offsets(
        tokens, total, first_head, heads, stride, head_stride, DIM, HALF, HEADS, INTERLEAVED
    )
    if INTERLEAVED:
        a, b = tl.split(tl.reshape(a, [TOKENS, HEADS, HALF, 2]))
    a, b = a.to(tl.float32), b.to(tl.float32)
    a, b = (
        (a * cos - b * sin).to(OUT.dtype.element_ty),
        (b * cos + a * sin).to(OUT.dtype.element_ty),
    )
    if INTERLEAVED:
        tl.store(OUT + offsets, tl.reshape(tl.join(a, b), [TOKENS, HEADS, 2 * HALF]), mask=mask)
    else:
        tl.store(OUT + offsets, a, mask=mask)
        tl.store(OUT + offsets + DIM // 2, b, mask=mask)


@triton.jit
def copy_rest(
    X,
    OUT,
    tokens,
    total,
    heads: tl.constexpr,
    stride,
    head_stride,
    out_stride,
    out_head_stride,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Copy the elements of each head after the first ROTARY_DIM."""
    tokens = tokens[:, None, None]
    element = ROTARY_DIM + tl.arange(0, BLOCK)[None, None, :]
    for first_head in range(0, heads, HEADS):
        head = first_head + tl.arange(0, HEADS).to(tl.int64)[None, :, None]
        mask = (tokens < total) & (head < heads) & (element < DIM)
        x = tl.load(X + tokens * stride + head * head_stride + element, mask=mask)
        tl.store(OUT + tokens * out_stride + head * out_head_stride + element, x, mask=mask)


@triton.jit
def _rotate_heads(
    X,
    OUT,
    a,
    b,
    cos,
    sin,
    tokens,
    total,
    heads: tl.constexpr,
    stride,
    head_stride,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rotate all heads of some tokens; the first HEADS are loaded already."""
    rotate_and_store(
        OUT,
        a,
        b,
        cos,
        sin,
        tokens,
        total,
        0,
        heads,
        heads * DIM,
        DIM,
        ROTARY_DIM,
        HALF,
        HEADS,
        TOKENS,
        INTERLEAVED,
    )
    for first_head in range(HEADS, heads, HEADS):
        a, b = load_pairs(
            X,
            tokens,
            total,
            first_head,
            heads,
            stride,
            head_stride,
            ROTARY_DIM,
            HALF,
            HEADS,
            INTERLEAVED,
        )
        rotate_and_store(
            OUT,
            a,
            b,
            cos,
            sin,
            tokens,
            total,
            first_head,
            heads,
            heads * DIM,
            DIM,
            ROTARY_DIM,
            HALF,
            HEADS,
            TOKENS,
            INTERLEAVED,
        )
    if REST:
        copy_rest(
            X,
            OUT,
            tokens,
            total,
            heads,
            stride,
            head_stride,
            heads * DIM,
            DIM,
            DIM,
            ROTARY_DIM,
            REST,
            HEADS,
        )


@triton.jit(do_not_specialize=("n", "total", "bisections", "sign", "table_rows"))
def rope_kernel(
    Q,
    K,
    Q_OUT,
    K_OUT,
    OFFSETS,
    START,
    COS,
    SIN,
    q_stride,
    q_head,
    k_stride,
    k_head,
    n,
    total,
    bisections,
    sign,
    table_rows,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    Q_TILE: tl.constexpr,
    K_TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    BASE: tl.constexpr,
    INTERCEPT: tl.constexpr,
    PER_PAIR: tl.constexpr,
    PER_TURN: tl.constexpr,
    SLOWDOWN: tl.constexpr,
    ATTENTION_FACTOR: tl.constexpr,
    TABLES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_START: tl.constexpr,
):
    """Rotate pair i of the token at position p of Q by ``sign * p * BASE**i``; with K_HEADS of K
    too.

    `angles` describes the constants of the angles. The elements after the first ROTARY_DIM of a head are
    copied, REST at a time.
    """
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    # Loaded before the angles are computed, to hide the latency of memory.
    a, b = load_pairs(
        Q, tokens, total, 0, Q_HEADS, q_stride, q_head, ROTARY_DIM, HALF, Q_TILE, INTERLEAVED
    )
    if K_HEADS:
        c, d = load_pairs(
            K, tokens, total, 0, K_HEADS, k_stride, k_head, ROTARY_DIM, HALF, K_TILE, INTERLEAVED
        )
    position = _positions(OFFSETS, START, n, bisections, HALF, TOKENS, HAS_START)
    cos, sin = angles(
        position,
        sign,
        COS,
        SIN,
        table_rows,
        BASE,
        INTERCEPT,
        PER_PAIR,
        PER_TURN,
        SLOWDOWN,
        ATTENTION_FACTOR,
        TABLES,
        ROTARY_DIM,
        HALF,
        TOKENS,
    )
    _rotate_heads(
        Q,
        Q_OUT,
        a,
        b,
        cos,
        sin,
        tokens,
        total,
        Q_HEADS,
        q_stride,
        q_head,
        DIM,
        ROTARY_DIM,
        HALF,
        REST,
        Q_TILE,
        TOKENS,
        INTERLEAVED,
    )
    if K_HEADS:
        _rotate_heads(
            K,
            K_OUT,
            c,
            d,
            cos,
            sin,
            tokens,
            total,
            K_HEADS,
            k_stride,
            k_head,
            DIM,
            ROTARY_DIM,
            HALF,
            REST,
            K_TILE,
            TOKENS,
            INTERLEAVED,
        )


@launch_args
class RopeArgs:
    """Arguments of `rope_kernel`."""

    Q: Pointer
    K: Pointer
    Q_OUT: Written
    K_OUT: Written
    OFFSETS: Pointer
    START: Pointer
    COS: Pointer
    SIN: Pointer
    q_stride: Stride
    q_head: Stride
    k_stride: Stride
    k_head: Stride
    n: Number
    total: Number
    bisections: Number
    sign: Number
    table_rows: Number


class Rotation(NamedTuple):
    """Parameters of the rotation.

    `start` holds the position of the first token of each row; None means 0. `base` is the ratio of
    the rates of consecutive pairs. `interleaved` pairs adjacent elements, not the two halves.
    `inv_freq`, `cos`, `sin` and `rotary_dim` are as in `RopeCall`; `scaling` has the fields of a
    `FrequencyScaling`.
    """

    offsets: torch.Tensor
    start: torch.Tensor | None
    inv_freq: torch.Tensor | None
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    base: float
    interleaved: bool
    rotary_dim: int
    scaling: tuple[float, ...] | None

    def launch_config(self, q: torch.Tensor, k: torch.Tensor | None) -> "_LaunchConfig":
        """Return the launch config for q and k, (total, ..., dim)."""
        table = self.inv_freq if self.cos is None else self.cos
        return _launch_config(
            q.device,
            q.dtype,
            q.shape,
            None if k is None else k.shape,
            self.offsets.dtype,
            None if self.start is None else self.start.dtype,
            None if table is None else (table.dtype, table.shape[0]),
            None if self.sin is None else self.sin.dtype,
            self.offsets.shape[0] - 1,
            *self[5:],
        )

    def with_arrays(
        self,
        offsets: torch.Tensor,
        start: torch.Tensor | None,
        inv_freq: torch.Tensor | None = None,
        cos: torch.Tensor | None = None,
        sin: torch.Tensor | None = None,
    ) -> "Rotation":
        """Return the rotation with other arrays."""
        tables = (None if x is None else x.contiguous() for x in (start, inv_freq, cos, sin))
        return Rotation(offsets.contiguous(), *tables, *self[5:])


class RopeVariant(NamedTuple):
    """The arguments that determine a variant of `rope_kernel`, besides the dtypes.

    `tables` is 0, 1 with frequencies, and 2 with cosines and sines.
    """

    heads: tuple[int, int]
    dim: int
    rotary_dim: int
    base: float
    interleaved: bool
    scaling: tuple[float, ...] | None
    tables: int
    has_start: bool


def angle_constants(scaling: tuple[float, ...] | None, tables: int) -> dict[str, Any]:
    """Return the constants of `angles` for the fields of a `FrequencyScaling` or None."""
    names = "INTERCEPT", "PER_PAIR", "PER_TURN", "SLOWDOWN", "ATTENTION_FACTOR"
    scaling = (0.0, 0.0, 0.0, 1.0, 1.0) if scaling is None else scaling
    return dict(zip(names, scaling, strict=True)) | {"TABLES": tables}


@cache
def _launch(
    device: torch.device, dtypes: tuple[torch.dtype | None, ...], variant: RopeVariant
) -> tuple[Launch, int]:
    """Return the launch for these numbers of heads of queries and keys, and the tokens per CTA."""
    half = triton.next_power_of_2(variant.rotary_dim // 2)
    rest = variant.dim - variant.rotary_dim
    rest = triton.next_power_of_2(rest) if rest else 0
    width = max(2 * half, rest)
    tiles = [min(triton.next_power_of_2(max(h, 1)), _MAX_ELEMENTS // width) for h in variant.heads]
    elements_per_token = width * max(tiles)
    tokens = max(1, _MIN_ELEMENTS // elements_per_token)
    constants = dict(
        DIM=variant.dim,
        ROTARY_DIM=variant.rotary_dim,
        HALF=half,
        REST=rest,
        Q_HEADS=variant.heads[0],
        K_HEADS=variant.heads[1],
        Q_TILE=tiles[0],
        K_TILE=tiles[1],
        TOKENS=tokens,
        BASE=variant.base,
        **angle_constants(variant.scaling, variant.tables),
        INTERLEAVED=variant.interleaved,
        HAS_START=variant.has_start,
    )
    options = dict(num_warps=elements_per_token * tokens // _ELEMENTS_PER_WARP)
    unwritten = () if variant.heads[1] else ("K_OUT",)
    return Launch(rope_kernel, constants, options, args=RopeArgs, unwritten=unwritten), tokens


class _LaunchConfig:
    """Everything that the metadata of the arrays determines, so that a call only allocates and
    launches.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        q: tuple[int, ...],
        k: tuple[int, ...] | None,
        offsets: torch.dtype,
        start: torch.dtype | None,
        table: tuple[torch.dtype, int] | None,
        sin: torch.dtype | None,
        n: int,
        base: float,
        interleaved: bool,
        rotary_dim: int,
        scaling: tuple[float, ...] | None,
    ):
        total, *_, dim = q
        heads = tuple(0 if shape is None else math.prod(shape[1:-1]) for shape in (q, k))
        self.index = device.index if device.type == "cuda" else None
        self.outs = tuple(
            None if shape is None else (*contiguous(shape), dtype) for shape in (q, k)
        )
        table_dtype, self.table_rows = (None, 0) if table is None else table
        tables = 0 if table is None else 1 if sin is None else 2
        variant = RopeVariant(
            heads, dim, rotary_dim, base, interleaved, scaling, tables, start is not None
        )
        dtypes = dtype, offsets, start, table_dtype, sin
        self.launch, tokens = _launch(device, dtypes, variant)
        self.programs = -(-total // tokens) if any(heads) else 0
        self.numbers = n, total, n.bit_length()
        self.new = empty(device.type)

    @method_on_device
    def rotate(
        self, q: torch.Tensor, k: torch.Tensor | None, rotation: Rotation, sign: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return q and k, (total, ..., dim), rotated by `sign` times their angles; contiguous."""
        q_out, k_out = (None if out is None else self.new(*out) for out in self.outs)
        if self.programs:
            q, q_strides = _as_heads(q)
            k, k_strides = (q, q_strides) if k is None else _as_heads(k)
            offsets, start, inv_freq, cos, sin = rotation[:5]
            n, total, bisections = self.numbers
            if cos is None:
                cos = offsets if inv_freq is None else inv_freq
            args = RopeArgs(
                Q=q,
                K=k,
                Q_OUT=q_out,
                K_OUT=q if k_out is None else k_out,
                OFFSETS=offsets,
                START=offsets if start is None else start,
                COS=cos,
                SIN=cos if sin is None else sin,
                q_stride=q_strides[0],
                q_head=q_strides[1],
                k_stride=k_strides[0],
                k_head=k_strides[1],
                n=n,
                total=total,
                bisections=bisections,
                sign=sign,
                table_rows=self.table_rows,
            )
            self.launch(self.programs, args)
        return q_out, k_out


_launch_config = lru_cache(1024)(_LaunchConfig)


def _standard(
    q: torch.Tensor, k: torch.Tensor | None, rotation: Rotation, sign: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    layout = scree.Array.unchecked(q, rotation.offsets, 0, None).layout
    options = standard_options(*rotation[2:])
    options |= dict(start=rotation.start, kernel="standard")

    def run(x: torch.Tensor) -> torch.Tensor:
        x = scree.Array.from_layout(x, layout)
        return scree.rope(x, **options).values

    def rotate(x: torch.Tensor) -> torch.Tensor:
        # The gradient of a rotation is the inverse rotation, wherever it is computed.
        return run(x) if sign > 0 else gradients(run, (torch.zeros_like(x),), x)[0]

    return rotate(q), None if k is None else rotate(k)


def standard_options(
    inv_freq: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    base: float,
    interleaved: bool,
    rotary_dim: int,
    scaling: Sequence[float] | None,
) -> dict[str, Any]:
    """Return the options of `scree.rope` for the fields of a `Rotation`, except `start`."""
    options = dict(interleaved=interleaved, rotary_dim=rotary_dim)
    if inv_freq is not None:
        return options | dict(inv_freq=inv_freq)
    if cos is not None:
        return options | dict(cos=cos, sin=sin)
    scaled = None if scaling is None else FrequencyScaling(*scaling)
    return options | dict(theta=base ** (-rotary_dim / 2), scaling=scaled)


@falls_back_to(_standard)
def rotate(
    q: torch.Tensor, k: torch.Tensor | None, rotation: Rotation, sign: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return q and k rotated; see `_LaunchConfig.rotate`."""
    return rotation.launch_config(q, k).rotate(q, k, rotation, sign)


def _as_heads(x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]]:
    """Return values as (total, heads, dim) with contiguous heads; and the strides of tokens and
    heads.
    """
    if x.ndim != 3:
        x = x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])
    *strides, last = x.stride()
    if last != 1:
        x = x.contiguous()
        *strides, _ = x.stride()
    return x, strides


def _record_rope(ctx, q, k, rotation, config):
    save_args(ctx, rotation)
    ctx.set_materialize_grads(False)
    q, k = config.rotate(q, k, rotation, 1)
    return q if k is None else (q, k)


def _rope_gradient(ctx, dq, dk=None):
    rotation = Rotation(*saved_args(ctx))
    if dq is None:
        return None, None if dk is None else rotate(dk, None, rotation, -1)[0], None, None
    return *rotate(dq, dk, rotation, -1), None, None


_differentiable_rope = differentiable("Rope", _record_rope, _rope_gradient)


def _run_operator(
    q: torch.Tensor,
    k: torch.Tensor | None,
    offsets: torch.Tensor,
    start: torch.Tensor | None,
    inv_freq: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    base: float,
    interleaved: bool,
    rotary_dim: int,
    scaling: Sequence[float] | None,
    sign: int,
) -> list[torch.Tensor]:
    options = base, interleaved, rotary_dim, None if scaling is None else tuple(scaling)
    rotation = Rotation(offsets, start, inv_freq, cos, sin, *options)
    return [x for x in rotate(q, k, rotation, sign) if x is not None]


def _fake(q, k, *rotation):
    return [x.new_empty(x.shape) for x in (q, k) if x is not None]


def _save(ctx, inputs, output):
    _, k, *arrays = inputs[:7]
    ctx.options, ctx.sign = inputs[7:-1], inputs[-1]
    ctx.both = k is not None
    ctx.save_for_backward(*arrays)


def _differentiate(ctx, grads):
    dq, *dk = _op(
        grads[0], grads[1] if ctx.both else None, *ctx.saved_tensors, *ctx.options, -ctx.sign
    )
    return dq, dk[0] if dk else None


_op = define_operator("rope", _run_operator, _fake, save=_save, backward=_differentiate)


def rejects(call: Any) -> str | None:
    """Return why the kernel does not support a `RopeCall`; None if it does."""
    dim = call.x.values.shape[-1]
    if not 2 <= dim <= 1024:
        return f"the Triton kernels take a head_dim of 2 to 1024, not {dim}"
    return unsupported_dtype(call.x.values) or unsupported_tables(call.tables)


def unsupported_tables(tables: Sequence[Any]) -> str | None:
    """Return why the kernels do not take the tables of a rotation; None if they do."""
    # The interpreter has no bfloat16.
    reasons = (unsupported_dtype(x) for x in tables if x is not None and x.dtype != torch.float64)
    return next((reason for reason in reasons if reason), None)


def rope(call: Any) -> Any:
    """Compute a `RopeCall`."""
    values = call.x.values, None if call.k is None else call.k.values
    if not uses_operators(*values):
        return rotate_arrays(call)(call.x, call.k, call.start, *call.tables)
    rotation = rotation_of(call.x, call.start, call.tables, call)
    q, *k = _op(*values, *rotation, 1)
    return (
        call.x.with_values(q)
        if call.k is None
        else (call.x.with_values(q), call.k.with_values(k[0]))
    )


def prepare_rope(call: Any) -> Callable[..., Any] | None:
    """Return a function for calls with the same metadata.

    None if a check depends on the positions: the host reads positions in its memory.
    """
    if call.cos is not None and call.start is not None and not call.start.is_cuda:
        return None
    return rotate_arrays(call)


def rotate_arrays(call: Any) -> Callable[..., Any]:
    """Return a function of the arrays of a `RopeCall`, for calls with the same metadata."""
    rotation = rotation_of(call.x, call.start, call.tables, call)
    options, has_tables = rotation[5:], rotation[2:5] != (None, None, None)
    q, k = call.x.values, None if call.k is None else call.k.values
    config, needs_grad = (
        rotation.launch_config(q, k),
        q.requires_grad or (k is not None and k.requires_grad),
    )

    def run(
        x: Any, k: Any, start: Any, inv_freq: Any = None, cos: Any = None, sin: Any = None
    ) -> Any:
        offsets, start = x.offsets.contiguous(), None if start is None else start.contiguous()
        if has_tables:
            current = rotation.with_arrays(offsets, start, inv_freq, cos, sin)
        else:
            current = Rotation(offsets, start, None, None, None, *options)
        arrays = x.values, None if k is None else k.values, current
        results = (
            _differentiable_rope(*arrays, config)
            if needs_grad and torch.is_grad_enabled()
            else config.rotate(*arrays, 1)
        )
        if k is not None:
            return x.from_layout(results[0], x.layout, x.ragged_dim), k.from_layout(
                results[1], k.layout, k.ragged_dim
            )
        return x.from_layout(
            results[0] if type(results) is tuple else results, x.layout, x.ragged_dim
        )

    return run


def rotation_of(x: Any, start: Any, tables: Sequence[Any], options: Any) -> Rotation:
    """Return the rotation of the rows of `x` with the options of a `RopeCall`."""
    rotary_dim, scaling = options.rotary_dim, options.scaling
    base = float(options.theta) ** (-2 / rotary_dim)
    rotation = Rotation(
        x.offsets,
        *(None,) * 4,
        base,
        bool(options.interleaved),
        rotary_dim,
        None if scaling is None else tuple(scaling),
    )
    return rotation.with_arrays(x.offsets, start, *tables)
