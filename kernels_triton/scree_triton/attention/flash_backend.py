"""PyTorch's operators of flash attention, implemented with the kernels of scree.

`torch.nn.attention.activate_flash_attention_impl("scree")` calls `register_operators`. From then on
SDPA, `varlen_attn` and nested tensors run these functions. PyTorch's own formulas differentiate
them. Calls that the kernels of scree do not support run PyTorch's kernel, if it has one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import scree
from scree.bridges.flash_attn.common import equal_rows, ragged_array, window_bounds
from scree.bridges.varlen import varlen_attn
from scree.layout import Layout

from ..runtime.device import INTERPRETED, rejects_device
from .interface import attention_backward, attention_forward, make_spec, rejects_kind
from .metadata import AttentionSpec, VarlenLayout
from .tile_scheduler import UNBOUNDED

#: The dispatch key of the devices on which the kernels run.
DISPATCH_KEY = "CPU" if INTERPRETED else "CUDA"
_Tensor = torch.Tensor
_Results = tuple[_Tensor, _Tensor, _Tensor, _Tensor, _Tensor]


class _WithLse:
    """The `AuxRequest` of PyTorch that asks for the log-sum-exp."""

    lse = True


class Handle:
    """Registrations that `remove` undoes; PyTorch calls it before it activates anything else."""

    def __init__(self, library: torch.library.Library) -> None:
        self.library: torch.library.Library | None = library

    def remove(self) -> None:
        """Restore the kernels of PyTorch."""
        self.library = None


def register_operators() -> Handle:
    """Register the implementations with PyTorch's dispatcher.

    Returns
    -------
    Handle
        Its method `remove` restores the kernels that were registered before.
    """
    library = torch.library.Library("aten", "IMPL", DISPATCH_KEY)
    for name, (run, rejects) in OPERATORS.items():
        if hasattr(torch.ops.aten, name):
            implementation = _with_original(name, run, rejects)
            library.impl(name, implementation, DISPATCH_KEY, with_keyset=True, allow_override=True)
    return Handle(library)


def _with_original(
    name: str, run: Callable[..., Any], rejects: Callable[..., str | None]
) -> Callable[..., Any]:
    """Return an implementation that runs PyTorch's own kernel if `rejects` returns a reason."""
    try:
        original = torch.library.get_kernel(f"aten::{name}", DISPATCH_KEY)
    except (AttributeError, RuntimeError):  # an older PyTorch, or one without this kernel
        original = None

    def implementation(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if reason := rejects(*args, **kwargs):
            if original is not None:
                return original.call_boxed(keyset, *args, **kwargs)
            raise NotImplementedError(
                f"{name}: {reason}, and PyTorch has no kernel of its own on this device; "
                "call torch.nn.attention.restore_flash_attention_impl(), or use "
                "sdpa_kernel(SDPBackend.MATH)"
            )
        with torch.no_grad():
            return run(*args, **kwargs)

    return implementation


class _Rows(NamedTuple):
    """Packed queries and keys of a call, and the conversions of its other tensors.

    Attributes
    ----------
    tensors
        Queries, keys and values (total, num_heads, head_dim).
    layouts
        The rows of the queries and of the keys.
    pack, unpack
        Convert queries, an output or a gradient to the packed form and back.
    pack_lse, unpack_lse
        Convert a log-sum-exp to (num_heads, total_q) and back.
    """

    tensors: tuple[_Tensor, _Tensor, _Tensor]
    layouts: tuple[Layout, Layout]
    pack: Callable[[_Tensor], _Tensor]
    unpack: Callable[[_Tensor, _Tensor], _Tensor]
    pack_lse: Callable[[_Tensor], _Tensor]
    unpack_lse: Callable[[_Tensor], _Tensor]


def _varlen_rows(
    q: _Tensor, k: _Tensor, v: _Tensor, cu_q: _Tensor, cu_k: _Tensor | None, max_q: int, max_k: int
) -> _Rows:
    """Return the rows of packed tensors (total, num_heads, head_dim)."""
    queries = ragged_array(q, cu_q, max_q)
    keys = queries.layout if cu_k is None else ragged_array(k, cu_k, max_k).layout

    def pack(x: _Tensor) -> _Tensor:
        return x if x.stride(-1) == 1 else x.contiguous()

    return _Rows(
        (pack(q), pack(k), pack(v)),
        (queries.layout, keys),
        pack,
        _with_strides,
        torch.Tensor.contiguous,
        torch.Tensor.contiguous,
    )


def _dense_rows(q: _Tensor, k: _Tensor, v: _Tensor) -> _Rows:
    """Return the rows of dense tensors (batch, num_heads, seqlen, head_dim).

    Keys whose tokens are consecutive per head are not copied: each of their heads is a row.
    """
    batch, heads, max_q, _ = q.shape
    k_heads, max_k = k.shape[1], k.shape[2]
    by_head = k_heads > 1 and k.is_contiguous() and v.is_contiguous() and heads % k_heads == 0
    if by_head:
        layout_sizes = batch * heads * max_q, batch * k_heads * max_k, batch * k_heads
        kind = (q.dtype, k.dtype, v.dtype), (q.shape[3], v.shape[3])
        by_head = rejects_kind(*kind, layout_sizes) is None
    # The heads of a row: all of them, or the query heads that share a key head.
    row_heads = k_heads if by_head else 1

    def pack(x: _Tensor) -> _Tensor:
        per_row = x.shape[1] // row_heads
        rows = x.reshape(x.shape[0], row_heads, per_row, *x.shape[2:]).transpose(2, 3)
        packed = rows.reshape(batch * row_heads * x.shape[2], per_row, x.shape[3])
        return packed if packed.stride(-1) == 1 else packed.contiguous()

    def unpack(x: _Tensor, like: _Tensor) -> _Tensor:
        rows = x.view(batch, row_heads, like.shape[2], *x.shape[1:]).transpose(2, 3)
        return _with_strides(rows.reshape(like.shape), like)

    def pack_lse(lse: _Tensor) -> _Tensor:
        groups = lse.reshape(batch, row_heads, heads // row_heads, max_q)
        return groups.permute(2, 0, 1, 3).reshape(heads // row_heads, batch * row_heads * max_q)

    def unpack_lse(lse: _Tensor) -> _Tensor:
        groups = lse.reshape(heads // row_heads, batch, row_heads, max_q)
        return groups.permute(1, 2, 0, 3).reshape(batch, heads, max_q).contiguous()

    layouts = tuple(equal_rows(batch * row_heads, length, q) for length in (max_q, max_k))
    return _Rows((pack(q), pack(k), pack(v)), layouts, pack, unpack, pack_lse, unpack_lse)


def _with_strides(x: _Tensor, like: _Tensor) -> _Tensor:
    """Return x with the strides that `torch.empty_like(like)` has; compiled programs expect them."""
    if x.stride() == like.stride():
        return x
    expected = torch.empty_like(like, device="meta").stride()
    # The strides of an axis with one index are arbitrary.
    if all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), expected, strict=True)):
        return x.as_strided(x.shape, expected)
    return torch.empty_strided(x.shape, expected, dtype=x.dtype, device=x.device).copy_(x)


def _window(is_causal: bool, left: int | None, right: int | None) -> tuple[int | None, int | None]:
    left, right = window_bounds((left, right))
    return left, 0 if is_causal else right


def _scale(q: _Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def _forward(
    rows: _Rows,
    query: _Tensor,
    window: tuple[int | None, int | None],
    scale: float | None,
    num_splits: int | None = None,
) -> _Results:
    """Return the five results of the operators."""
    q, k, v = (x.detach() for x in rows.tensors)
    q_layout, k_layout = rows.layouts
    if num_splits == 1:
        layout = _varlen_layout(rows)._replace(max_seqlen=UNBOUNDED)
        out, lse = attention_forward(q, k, v, layout, _spec(query, window, scale))
    else:
        arrays = (
            scree.Array.from_layout(x, on)
            for x, on in ((q, q_layout), (k, k_layout), (v, k_layout))
        )
        # Another provider could call these operators again.
        results = scree.attention(
            *arrays, window=window, scale=_scale(query, scale), return_lse=True, kernel="triton"
        )
        out, lse = results[0].values, results[1].values.t()
    return (rows.unpack(out, query), rows.unpack_lse(lse), *_auxiliary(query))


def _auxiliary(query: _Tensor) -> tuple[_Tensor, _Tensor, _Tensor]:
    """Return the state of the random numbers and the mask of a call without dropout."""
    device = query.device
    return (
        torch.empty((2,), dtype=torch.uint64, device=device),
        torch.empty((), dtype=torch.uint64, device=device),
        torch.empty((0,), dtype=query.dtype, device=device),
    )


def _backward(
    rows: _Rows,
    tensors: tuple[_Tensor, _Tensor, _Tensor, _Tensor, _Tensor],
    lse: _Tensor,
    window: tuple[int | None, int | None],
    scale: float | None,
) -> tuple[_Tensor, _Tensor, _Tensor]:
    """Return the gradients from the gradient of the output, the inputs and the output."""
    dout, query, key, value, out = tensors
    gradients = attention_backward(
        rows.pack(dout),
        *rows.tensors,
        rows.pack(out),
        rows.pack_lse(lse).contiguous(),
        _varlen_layout(rows),
        _spec(query, window, scale),
    )
    dq, dk, dv = (rows.unpack(*pair) for pair in zip(gradients, (query, key, value), strict=True))
    return dq, dk, dv


def _spec(
    query: _Tensor, window: tuple[int | None, int | None], scale: float | None
) -> AttentionSpec:
    return make_spec(False, *window, _scale(query, scale), None)


def _varlen_layout(rows: _Rows) -> VarlenLayout:
    q, k = rows.layouts
    longest = max(q.max_length_bound, k.max_length_bound)
    return VarlenLayout(q.offsets, k.offsets, q.pair_cache(k), longest)


def _rows(
    query: _Tensor,
    key: _Tensor,
    value: _Tensor,
    cum_seq_q: _Tensor | None,
    cum_seq_k: _Tensor | None,
    max_q: int,
    max_k: int,
) -> _Rows:
    """Return the rows of packed tensors, or of dense ones (batch, seqlen, num_heads, head_dim)."""
    if cum_seq_q is not None:
        return _varlen_rows(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
    rows = _dense_rows(*(x.transpose(1, 2) for x in (query, key, value)))
    return rows._replace(
        pack=lambda x: rows.pack(x.transpose(1, 2)),
        unpack=lambda x, like: rows.unpack(x, like.transpose(1, 2)).transpose(1, 2),
    )


def _rejects(
    query: _Tensor,
    key: _Tensor,
    value: _Tensor,
    dropout_p: float,
    sizes: tuple[int, int, int],
    scale: float | None,
) -> str | None:
    """Return why the kernels of scree cannot run a call, from host metadata only, or None.

    A backward pass gets the same answer as its forward pass. `sizes` has the numbers of queries,
    keys and rows.
    """
    if dropout_p:
        return f"scree has no dropout in attention, got dropout_p={dropout_p}"
    if reason := rejects_device(query.device):
        return reason
    head_dims = query.shape[-1], value.shape[-1]
    if head_dims[0] != head_dims[1]:
        return "the operator takes one head_dim, got {} (q, k) and {} (v)".format(*head_dims)
    if not _scale(query, scale) > 0:
        return f"the Triton kernels need a positive scale, got {scale}"
    return rejects_kind((query.dtype, key.dtype, value.dtype), head_dims, sizes)


def _sizes(query: _Tensor, key: _Tensor, cum_seq_q: _Tensor | None) -> tuple[int, int, int]:
    """Return the numbers of queries, keys and rows of `_flash_attention_forward`."""
    if cum_seq_q is not None:
        return query.shape[0], key.shape[0], cum_seq_q.shape[0] - 1
    batch = query.shape[0]
    return batch * query.shape[1], batch * key.shape[1], batch


def _sdpa_sizes(query: _Tensor, key: _Tensor) -> tuple[int, int, int]:
    batch = query.shape[0]
    return batch * query.shape[2], batch * key.shape[2], batch


def flash_attention_forward(
    query: _Tensor,
    key: _Tensor,
    value: _Tensor,
    cum_seq_q: _Tensor | None,
    cum_seq_k: _Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: _Tensor | None = None,
    alibi_slopes: _Tensor | None = None,
    block_table: _Tensor | None = None,
    num_splits: int | None = None,
) -> _Results:
    """Compute ``aten::_flash_attention_forward``: packed or dense, also from a paged cache.

    The log-sum-exp has shape (num_heads, total_q), or (batch, num_heads, seqlen_q) of dense
    queries.
    """
    window = _window(is_causal, window_size_left, window_size_right)
    if seqused_k is not None or block_table is not None:
        sides = tuple(-1 if side is None else side for side in window)
        out, lse = varlen_attn(
            *(query.detach(), key.detach(), value.detach(), cum_seq_q, cum_seq_k, max_q, max_k),
            return_aux=_WithLse,
            scale=scale,
            window_size=sides,
            enable_gqa=True,
            seqused_k=seqused_k,
            block_table=block_table,
            num_splits=num_splits,
        )
        return _with_strides(out, query), lse.t().contiguous(), *_auxiliary(query)
    rows = _rows(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
    return _forward(rows, query, window, scale, num_splits)


def rejects_forward(
    query: _Tensor,
    key: _Tensor,
    value: _Tensor,
    cum_seq_q: _Tensor | None,
    cum_seq_k: _Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    seqused_k: _Tensor | None = None,
    alibi_slopes: _Tensor | None = None,
    block_table: _Tensor | None = None,
    **_: Any,
) -> str | None:
    """Return why `flash_attention_forward` cannot run a call, or None."""
    if return_debug_mask:
        return "scree returns no probabilities, got return_debug_mask=True"
    if alibi_slopes is not None:
        return "the gradient of the operator ignores alibi_slopes; use scree.attention"
    if cum_seq_q is None and (seqused_k is not None or block_table is not None):
        return "scree takes seqused_k and block_table only with cum_seq_q"
    if block_table is not None and seqused_k is None:
        return "scree takes block_table only with seqused_k"
    return _rejects(query, key, value, dropout_p, _sizes(query, key, cum_seq_q), scale)


def flash_attention_forward_inplace(out: _Tensor, *args: Any, **kwargs: Any) -> _Tensor:
    """Compute ``aten::_flash_attention_forward_no_dropout_inplace``, which writes into `out`."""
    result, lse, *_ = flash_attention_forward(*args, **kwargs)
    out.copy_(result)
    return lse


def _rejects_inplace(out: _Tensor, *args: Any, **kwargs: Any) -> str | None:
    return rejects_forward(*args, **kwargs)


def flash_attention_backward(
    grad_out: _Tensor,
    query: _Tensor,
    key: _Tensor,
    value: _Tensor,
    out: _Tensor,
    logsumexp: _Tensor,
    cum_seq_q: _Tensor | None,
    cum_seq_k: _Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: _Tensor,
    unused: _Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[_Tensor, _Tensor, _Tensor]:
    """Compute ``aten::_flash_attention_backward``; equal inputs give equal bits."""
    rows = _rows(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
    window = _window(is_causal, window_size_left, window_size_right)
    return _backward(rows, (grad_out, query, key, value, out), logsumexp, window, scale)


def _rejects_backward(
    grad_out: _Tensor,
    query: _Tensor,
    key: _Tensor,
    value: _Tensor,
    out: _Tensor,
    logsumexp: _Tensor,
    cum_seq_q: _Tensor | None,
    cum_seq_k: _Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    *_: Any,
    scale: float | None = None,
    **__: Any,
) -> str | None:
    return _rejects(query, key, value, dropout_p, _sizes(query, key, cum_seq_q), scale)


def sdpa_forward(
    query: _Tensor,
    key: _Tensor,
    value: _Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Compute ``aten::_scaled_dot_product_flash_attention`` of (batch, heads, seqlen, head_dim)."""
    rows = _dense_rows(query, key, value)
    out, lse, *auxiliary = _forward(rows, query, _window(is_causal, None, None), scale)
    return out, lse, None, None, query.shape[2], key.shape[2], *auxiliary


def rejects_sdpa(
    query: _Tensor,
    key: _Tensor,
    value: _Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> str | None:
    """Return why `sdpa_forward` cannot run a call, or None."""
    if return_debug_mask:
        return "scree returns no probabilities, got return_debug_mask=True"
    return _rejects(query, key, value, dropout_p, _sdpa_sizes(query, key), scale)


def sdpa_backward(
    grad_out: _Tensor,
    query: _Tensor,
    key: _Tensor,
    value: _Tensor,
    out: _Tensor,
    logsumexp: _Tensor,
    cum_seq_q: _Tensor | None,
    cum_seq_k: _Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: _Tensor,
    philox_offset: _Tensor,
    *,
    scale: float | None = None,
) -> tuple[_Tensor, _Tensor, _Tensor]:
    """Compute ``aten::_scaled_dot_product_flash_attention_backward``."""
    rows, window = _dense_rows(query, key, value), _window(is_causal, None, None)
    return _backward(rows, (grad_out, query, key, value, out), logsumexp, window, scale)


def _rejects_sdpa_backward(
    grad_out: _Tensor,
    query: _Tensor,
    key: _Tensor,
    value: _Tensor,
    out: _Tensor,
    logsumexp: _Tensor,
    cum_seq_q: _Tensor | None,
    cum_seq_k: _Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    *_: Any,
    scale: float | None = None,
) -> str | None:
    return _rejects(query, key, value, dropout_p, _sdpa_sizes(query, key), scale)


#: Operator -> its implementation, and the function that returns why it cannot run a call.
OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., str | None]]] = {
    "_flash_attention_forward": (flash_attention_forward, rejects_forward),
    "_flash_attention_forward_no_dropout_inplace": (
        flash_attention_forward_inplace,
        _rejects_inplace,
    ),
    "_flash_attention_backward": (flash_attention_backward, _rejects_backward),
    "_scaled_dot_product_flash_attention": (sdpa_forward, rejects_sdpa),
    "_scaled_dot_product_flash_attention_backward": (sdpa_backward, _rejects_sdpa_backward),
}
