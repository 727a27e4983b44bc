"""Reference attention by its definition, one row at a time, in any precision."""

import math
from typing import NamedTuple

import torch


class Case(NamedTuple):
    """One attention problem: dtype, shapes, layout and options."""

    dtype: torch.dtype
    dim: int
    dim_v: int
    heads: int
    k_heads: int
    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...] | None = None  # None: q and k share their offsets
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    packed: bool = False  # q, k and v are slices of one tensor
    slack: int = 0  # tokens after the last row
    alibi: bool = False

    @property
    def name(self) -> str:
        """Return a readable test id."""
        mask = ("causal" if self.causal else "full") + (
            f"-w{self.window[0]},{self.window[1]}"
            if any(side is not None for side in self.window)
            else ""
        )
        rows = f"{len(self.q_lengths)}rows{sum(self.q_lengths)}" + (
            "" if self.k_lengths is None else "x"
        )
        parts = [
            str(self.dtype)[6:],
            f"d{self.dim}",
            f"v{self.dim_v}",
            f"h{self.heads}/{self.k_heads}",
            mask,
            rows,
        ]
        parts += (
            [f"cap{self.softcap}"] * bool(self.softcap)
            + ["packed"] * self.packed
            + ["slack"] * bool(self.slack)
        )
        parts += ["alibi"] * self.alibi
        return "-".join(parts)


class Problem(NamedTuple):
    """Inputs and gradients of a case on a device. Tokens after the last row hold NaN."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor
    slopes: torch.Tensor | None


def problem(case: Case, device: str, seed: int = 0) -> Problem:
    """Return random inputs for a case."""
    generator = torch.Generator(device=device).manual_seed(seed)
    k_lengths = case.q_lengths if case.k_lengths is None else case.k_lengths
    total_q, total_k = sum(case.q_lengths), sum(k_lengths)

    def values(total: int, heads: int, dim: int) -> torch.Tensor:
        x = torch.randn((total + case.slack, heads, dim), generator=generator, device=device)
        x[total:] = math.nan
        return x.to(case.dtype)

    if case.packed:
        sizes = [case.heads, case.k_heads, case.k_heads]
        q, k, v = values(total_q, sum(sizes), case.dim).split(sizes, 1)
    else:
        q = values(total_q, case.heads, case.dim)
        k, v = (values(total_k, case.k_heads, dim) for dim in (case.dim, case.dim_v))
    cu_q = offsets(case.q_lengths, device)
    cu_k = cu_q if case.k_lengths is None else offsets(k_lengths, device)
    dlse = torch.randn(q.shape[:2], generator=generator, device=device)
    dlse[total_q:] = math.nan
    slopes = torch.rand(case.heads, generator=generator, device=device) if case.alibi else None
    return Problem(q, k, v, cu_q, cu_k, values(total_q, case.heads, case.dim_v), dlse, slopes)


def offsets(lengths: tuple[int, ...], device: str) -> torch.Tensor:
    """Return the cumulative lengths, int32."""
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def reference(case: Case, p: Problem, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the output, log-sum-exp, dq, dk and dv, computed in `dtype`.

    Tokens outside the rows have 0, or -inf in the log-sum-exp.
    """
    q, k, v, dout = (x.detach().to(dtype) for x in (p.q, p.k, p.v, p.dout))
    stats = torch.promote_types(dtype, torch.float32)
    out = torch.zeros((*q.shape[:2], v.shape[2]), dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, dtype=stats, device=q.device)
    grads = [torch.zeros(x.shape, dtype=dtype, device=q.device) for x in (q, k, v)]
    left, right = case.window
    if case.causal:
        right = 0
    starts_q, starts_k = p.cu_q.tolist(), p.cu_k.tolist()
    for a, b, c, d in zip(starts_q, starts_q[1:], starts_k, starts_k[1:]):
        if a == b or c == d:
            continue
        one = [x.transpose(0, 1).contiguous().requires_grad_() for x in (q[a:b], k[c:d], v[c:d])]
        keys, values = (x.repeat_interleave(case.heads // case.k_heads, 0) for x in one[1:])
        x = (one[0] @ keys.transpose(1, 2)).to(stats) * case.dim**-0.5
        if case.softcap:
            x = case.softcap * torch.tanh(x / case.softcap)
        diagonal = torch.arange(b - a, device=q.device)[:, None] + (d - c) - (b - a)
        key = torch.arange(d - c, device=q.device)
        if p.slopes is not None:
            x = x - p.slopes.to(stats)[:, None, None] * (diagonal - key).abs()
        valid = torch.ones_like(diagonal * key, dtype=torch.bool)
        if left is not None:
            valid &= key >= diagonal - left
        if right is not None:
            valid &= key <= diagonal + right
        has_key = valid.any(1)[None, :, None]
        x = x.masked_fill(~valid, -math.inf).masked_fill(~has_key, 0)
        p_row = x.softmax(2) * (valid & has_key)
        o = p_row.to(dtype) @ values
        row_lse = x.logsumexp(2)
        out[a:b] = o.detach().transpose(0, 1)
        lse[a:b] = row_lse.detach().masked_fill(~has_key[..., 0], -math.inf).t()
        slope = p.dlse[a:b].t().to(stats) * has_key[..., 0]
        loss = (o * dout[a:b].transpose(0, 1)).to(stats).sum() + (row_lse * slope).sum()
        for grad, x, start, end in zip(grads, torch.autograd.grad(loss, one), (a, c, c), (b, d, d)):
            grad[start:end] = x.transpose(0, 1)
    return [out, lse, *grads]


def distance(x: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative error in the 2-norm over the finite entries of `exact`.

    It is infinite if the other entries differ, or if any entry of `x` is NaN.
    """
    x, exact = x.detach().double(), exact.detach()
    finite = exact.isfinite()
    if x.isnan().any() or not torch.equal(x[~finite], exact[~finite]):
        return math.inf
    x, exact = x[finite], exact[finite]
    return float((x - exact).norm() / exact.norm().clamp_min(1e-9))


def check_public_call(
    device: str,
    dtype: torch.dtype,
    dim: int,
    options: dict,
    bound: float,
    slopes_per_row: bool = False,
    factor: int = 1,
) -> None:
    """Compare `scree.attention` on these kernels with the standard path in float64.

    The calls have slopes and sinks, and the gradients of the sinks are compared too. Lengths are
    multiplied by `factor`.
    """
    import scree
    import scree_triton

    scree_triton.register()
    generator = torch.Generator(device=device).manual_seed(3)
    lengths, keys = ([n * factor for n in x] for x in ((30, 0, 21, 3), (11, 5, 40, 0)))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    inputs = [draw(sum(lengths), 4, dim), draw(sum(keys), 2, dim), draw(sum(keys), 2, dim), draw(4)]
    slopes, dout, dlse = (
        torch.rand((4, 4) if slopes_per_row else 4, generator=generator, device=device),
        draw(sum(lengths), 4, dim),
        draw(sum(lengths), 4),
    )
    inputs = [x.to(dtype) for x in inputs[:3]] + inputs[3:]

    def run(kernel: str, wide: torch.dtype | None) -> list[torch.Tensor]:
        q, k, v, sinks = (x.to(wide or x.dtype).detach().requires_grad_() for x in inputs)
        cu = [offsets(n, device) for n in (lengths, keys)]
        q_rows = scree.from_cu_seqlens(q, cu[0], max_length=max(lengths))
        k_rows = scree.from_cu_seqlens(k, cu[1], max_length=max(keys))
        out, lse = scree.attention(
            q_rows,
            k_rows,
            k_rows.with_values(v),
            alibi_slopes=slopes.to(wide or slopes.dtype),
            sinks=sinks,
            return_lse=True,
            kernel=kernel,
            **options,
        )
        loss = (out.values * dout.to(out.dtype)).to(lse.dtype).sum() + (lse.values * dlse).sum()
        return [out.values, lse.values, *torch.autograd.grad(loss, (q, k, v, sinks))]

    for name, x, exact in zip(
        ("out", "lse", "dq", "dk", "dv", "dsinks"),
        run("triton", None),
        run("standard", torch.float64),
    ):
        assert distance(x, exact) < bound, name
