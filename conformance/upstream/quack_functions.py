"""The public functions of quack, computed by scree.

quack cannot be imported without a GPU and its compiler. So these modules stand for it. The reference
functions of its tests, whose names end in ``_ref``, are taken from its source.
"""

import ast
import sys
import types
from pathlib import Path
from typing import Any, Literal, Optional

import torch
from dense_softmax import softmax
from torch.nn import functional

import scree
from scree.bridges.flash_attn import apply_rotary_emb


def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    weight_offset: float = 0.0,
) -> Any:
    """Compute `scree.rms_norm`, with weights per head, a bias and an offset by PyTorch."""
    if weight is not None and weight_offset:
        weight = weight.float() + weight_offset
    is_plain = bias is None and (weight is None or weight.ndim == 1)
    if residual_dtype is not None and residual_dtype != x.dtype:
        x, residual, out_dtype = x.float(), residual.float(), out_dtype or x.dtype
    if is_plain:
        out = scree.rms_norm(x, weight, residual=residual, eps=eps)
        out, total = (out, None) if residual is None else out
        out = out if out_dtype is None else out.to(out_dtype)
    else:
        dtype = out_dtype or x.dtype
        wide = None if residual is None else residual.float()
        normed = scree.rms_norm(x.float(), residual=wide, eps=eps)
        normed, total = (normed, None) if residual is None else normed
        normed = normed if weight is None else normed * weight.float()
        out = (normed if bias is None else normed + bias.float()).to(dtype)
        total = None if total is None else total.to(x.dtype)
    return (out, total) if prenorm and residual is not None else out


def rmsnorm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    eps: float = 1e-6,
    store_rstd: bool = False,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute the norm, the sum, and the reciprocal of the root mean square."""
    with torch.no_grad():
        arguments = x, weight, bias, residual, out_dtype, residual_dtype, eps, True, weight_offset
        result = rmsnorm(*arguments)
        out, total = (result, x) if residual is None else result
        rstd = torch.rsqrt(total.float().square().mean(-1) + eps) if store_rstd else None
    return out, total, rstd


def layernorm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    return_rstd: bool = False,
    return_mean: bool = False,
) -> Any:
    """Compute `scree.layer_norm`; the statistics are PyTorch's."""
    out = scree.layer_norm(x, weight, bias, eps=eps)
    wide, extra = x.float(), []
    if return_rstd:
        extra.append(torch.rsqrt(wide.var(-1, unbiased=False) + eps))
    if return_mean:
        extra.append(wide.mean(-1))
    return (out, *extra) if extra else out


def layernorm_bwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    dout: torch.Tensor,
    rstd: torch.Tensor,
    mean: torch.Tensor,
    has_bias: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Differentiate `scree.layer_norm`. The tests call both passes with eps 1e-6."""
    leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    if has_bias:
        leaves.append(torch.zeros_like(weight).requires_grad_())
    grads = torch.autograd.grad(scree.layer_norm(*leaves, eps=1e-6), leaves, dout)
    return grads if has_bias else (*grads, None)


def softmax_fwd(x: torch.Tensor) -> torch.Tensor:
    """Compute `softmax` without gradients."""
    with torch.no_grad():
        return softmax(x)


def softmax_bwd(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the softmax from its result."""
    wide, dwide = y.float(), dy.float()
    return (wide * (dwide - (wide * dwide).sum(-1, keepdim=True))).to(y.dtype)


def cross_entropy(
    x: torch.Tensor,
    target: torch.Tensor,
    lse_partial: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    inplace_backward: bool = False,
) -> torch.Tensor:
    """Compute `scree.cross_entropy`."""
    return scree.cross_entropy(
        x, target, class_weights=weight, ignore_index=ignore_index, reduction=reduction
    )


def cross_entropy_fwd(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    return_lse: bool = False,
    return_dx: bool = False,
    inplace_backward: bool = False,
) -> Any:
    """Compute the losses, and with `return_dx` their gradient for ones; the lse is PyTorch's."""
    leaf = x.detach().requires_grad_(return_dx)
    with torch.enable_grad():
        loss = cross_entropy(leaf, target, None, weight, ignore_index, "none")
    results = [loss.detach()]
    if return_lse:
        results.append(torch.logsumexp(x.detach().float(), -1))
    if return_dx:
        (dx,) = torch.autograd.grad(loss, leaf, torch.ones_like(loss))
        results.append(x.copy_(dx) if inplace_backward else dx)
    return tuple(results) if len(results) > 1 else results[0]


def cross_entropy_bwd(
    x: torch.Tensor,
    target: torch.Tensor,
    dloss: torch.Tensor,
    lse: torch.Tensor,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    inplace_backward: bool = False,
) -> torch.Tensor:
    """Differentiate `scree.cross_entropy`."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        loss = cross_entropy(leaf, target, None, weight, ignore_index, "none")
    return torch.autograd.grad(loss, leaf, dloss)[0]


def chunked_linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    chunk_size: int = 4096,
    ignore_index: int = -100,
    reduction: str = "mean",
    tuned: bool = True,
    use_scaled_exp: bool | None = None,
) -> torch.Tensor:
    """Compute `scree.linear_cross_entropy`."""
    arrays = x.reshape(-1, x.shape[-1]), weight, target.reshape(-1)
    return scree.linear_cross_entropy(*arrays, ignore_index=ignore_index, reduction=reduction)


def rotate(x: Any, cos: Any, sin: Any, interleaved: bool = False, inplace: bool = False,
           seqlen_offsets: Any = None, cu_seqlens: Any = None, max_seqlen: Any = None) -> Any:  # fmt: skip
    """Compute `scree.bridges.flash_attn.apply_rotary_emb`, whose offset is 0 by default."""
    offsets = 0 if seqlen_offsets is None else seqlen_offsets
    return apply_rotary_emb(x, cos, sin, interleaved, inplace, offsets, cu_seqlens, max_seqlen)


def rotate_raw(x: Any, cos: Any, sin: Any, seqlen_offsets: Any = None, cu_seqlens: Any = None,
               max_seqlen: Any = None, interleaved: bool = False, inplace: bool = False,
               conjugate: bool = False) -> Any:  # fmt: skip
    """Compute `rotate` without its gradient, and by the negative angles with `conjugate`."""
    sin = -sin if conjugate else sin
    return rotate(
        x.detach(), cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen
    )


def _internal(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("a function of quack without a counterpart in scree")


MODULES: dict[str, dict[str, Any]] = {
    "quack": {},
    "quack.cute_dsl_utils": {"get_device_capacity": lambda *_: (9, 0)},
    "quack.rmsnorm": {
        "rmsnorm": rmsnorm,
        "rmsnorm_fwd": rmsnorm_fwd,
        "layernorm_fwd": layernorm_fwd,
        "layernorm_bwd": layernorm_bwd,
        **dict.fromkeys(
            ("_compile_rmsnorm_fwd", "rmsnorm_bwd", "rmsnorm_bwd_tuned", "rmsnorm_fwd_tuned"),
            _internal,
        ),
    },
    "quack.rmsnorm_config": dict.fromkeys(("RmsNormBwdConfig", "RmsNormFwdConfig"), _internal),
    "quack.softmax": {"softmax": softmax, "softmax_fwd": softmax_fwd, "softmax_bwd": softmax_bwd},
    "quack.cross_entropy": {
        "cross_entropy": cross_entropy,
        "cross_entropy_fwd": cross_entropy_fwd,
        "cross_entropy_bwd": cross_entropy_bwd,
    },
    "quack.linear_cross_entropy": {
        "chunked_linear_cross_entropy": chunked_linear_cross_entropy,
        "scaled_exp_lce_supported": lambda *_: False,
        "scaled_exp_linear_cross_entropy": _internal,
    },
    "quack.rotary": {
        "apply_rotary_emb": rotate,
        "apply_rotary": rotate_raw,
        **dict.fromkeys(("apply_rotary_emb_kv_", "apply_rotary_emb_qkv_"), _internal),
    },
}


def install(source: Path) -> None:
    """Put modules with the names of quack into `sys.modules`."""
    for name, functions in MODULES.items():
        module = types.ModuleType(name)
        module.__dict__.update(functions)
        path = (source / name.replace(".", "/")).with_suffix(".py")
        if path.exists():
            module.__dict__.update(_references(path))
        if name == "quack":
            module.__path__ = []
        sys.modules[name] = module


def _references(path: Path) -> dict[str, Any]:
    """Return the functions of a source file whose names end in ``_ref``."""
    nodes = [
        node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_ref")
    ]
    names = {
        "torch": torch,
        "F": functional,
        "Tensor": torch.Tensor,
        "Optional": Optional,
        "Literal": Literal,
    }
    exec(compile(ast.Module(nodes, []), str(path), "exec"), names)
    return {node.name: names[node.name] for node in nodes}
