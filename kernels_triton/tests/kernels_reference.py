"""The operations beside attention by their definitions, a row at a time, in any precision: what kernels are held against."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from attention_reference import distance, offsets

import scree

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
INF = math.inf


class Operation(NamedTuple):
    """`run(arr, *parameters)` on a ragged array; `row(values, position of its first token, *parameters)` on one row."""

    run: Callable[..., Any]
    row: Callable[..., torch.Tensor]
    tokens: tuple[tuple[int, ...], ...]  # shapes of a token
    parameters: Callable[[tuple[int, ...], int], tuple[tuple[int, ...], ...]] = lambda token, n: ()
    per_row: bool = False  # one result a row
    own: bool = False  # the last parameter has one entry a row
    wide: bool = False  # the result is float32, whatever the inputs are


def _reduction(name: str) -> Callable[[scree.Array], torch.Tensor]:
    return lambda x: getattr(scree.namespace(x), name)(x, axis=1)


def _add_norm(x: scree.Array, w: torch.Tensor) -> scree.Array:
    """Tokens (2, D) hold x and the residual, and of the result the norm and the sum."""
    a, b = (x.with_values(x.values[:, i]) for i in range(2))
    found = scree.rms_norm(a, w, residual=b, kernel="triton")
    return x.with_values(torch.stack([y.values for y in found], 1))


def _add_norm_row(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    total = x[:, 0] + x[:, 1]
    return torch.stack((functional.rms_norm(total, w.shape, w, 1e-6), total), 1)


def _rope_row(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, f32)
    half = x.shape[-1] // 2
    pair = torch.arange(half, dtype=wide, device=x.device)
    angle = torch.arange(x.shape[0], dtype=wide, device=x.device)[:, None] * 10000.0 ** (
        -pair / half
    )
    cos, sin = (f(angle)[:, None, :] for f in (torch.cos, torch.sin))
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    a, b = a.to(wide) * cos - b.to(wide) * sin, b.to(wide) * cos + a.to(wide) * sin
    return (torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)).to(
        x.dtype
    )


def _rope_both(x: scree.Array) -> scree.Array:
    """The last head is of the keys."""
    q, k = scree.rope(
        x.with_values(x.values[:, :-1]), x.with_values(x.values[:, -1:]), kernel="triton"
    )
    return x.with_values(torch.cat((q.values, k.values), 1))


def _swiglu_row(x: torch.Tensor) -> torch.Tensor:
    gate, value = x.chunk(2, -1)
    return functional.silu(gate) * value


def _with_one(x: torch.Tensor, value: float) -> torch.Tensor:
    """The row and one more token, so that it is not empty."""
    return torch.cat([x, x.new_full((1, *x.shape[1:]), value)])


def _classes(positions: torch.Tensor, count: int) -> torch.Tensor:
    """The class of a token follows from its position; every fifth token has none."""
    return torch.where(positions % 5 == 3, -100, (positions * 7 + 2) % count)


def _targets(x: scree.Array, count: int) -> scree.Array:
    return x.with_values(_classes(scree.positions(x).long(), count))


def _losses(logits: torch.Tensor) -> torch.Tensor:
    targets = _classes(torch.arange(logits.shape[0], device=logits.device), logits.shape[1])
    return functional.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, f32)), targets, reduction="none"
    )


def _mean_loss(logits: torch.Tensor) -> torch.Tensor:
    known = _classes(torch.arange(logits.shape[0], device=logits.device), logits.shape[1]) >= 0
    return _losses(logits).sum() / (int(known.sum()) or math.nan)


def _pairs(x: scree.Array) -> scree.Array:
    """A number for each token, the same for two neighbors in a row."""
    return x.with_values(scree.positions(x) // 2 + x.offsets[scree.segment_ids(x)])


def _last_of_pairs(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    return torch.cat(
        [*x[1::2].split(1), *x[len(x) - len(x) % 2 :].split(1), out[(len(x) + 1) // 2 :]]
    )


def _padded_row(x: torch.Tensor, left: bool) -> torch.Tensor:
    fill = x.new_full((LENGTH - len(x), *x.shape[1:]), -2.5)
    return torch.cat([fill, x] if left else [x, fill])


LENGTH = 333  # of padded rows
WIDTHS = ((), (3,), (2, 8), (200,))
COPIED = ((), (3,), (2, 64), (1024,))
OPERATIONS = {
    "rms_norm": Operation(
        lambda x, w: scree.rms_norm(x, w, kernel="triton"),
        lambda x, w: functional.rms_norm(x, w.shape, w, 1e-6),
        ((64,), (2, 100), (1, 1024), (2050,)),
        lambda token, n: (token[-1:],),
    ),
    "rms_norm alone": Operation(
        lambda x: scree.rms_norm(x, kernel="triton"),
        lambda x: functional.rms_norm(x, x.shape[-1:], None, 1e-6),
        ((96,), (4096,)),
    ),
    "rms_norm of a sum": Operation(
        _add_norm, _add_norm_row, ((2, 64), (2, 100), (2, 1024)), lambda token, n: (token[-1:],)
    ),
    "layer_norm": Operation(
        lambda x, w, b: scree.layer_norm(x, w, b, kernel="triton"),
        lambda x, w, b: functional.layer_norm(x, w.shape, w, b),
        ((64,), (2, 100), (1, 1024), (2050,)),
        lambda token, n: (token[-1:], token[-1:]),
    ),
    "swiglu": Operation(
        lambda x: scree.swiglu(x, kernel="triton"), _swiglu_row, ((6,), (2, 100), (2050,))
    ),
    "softmax": Operation(
        lambda x: scree.softmax(x, kernel="triton"), lambda x: x.softmax(0), WIDTHS
    ),
    "log_softmax": Operation(
        lambda x: scree.log_softmax(x, kernel="triton"), lambda x: x.log_softmax(0), WIDTHS
    ),
    "logsumexp": Operation(
        lambda x: scree.logsumexp(x, kernel="triton"),
        lambda x: x.logsumexp(0),
        WIDTHS,
        per_row=True,
    ),
    "sum": Operation(_reduction("sum"), lambda x: x.sum(0), WIDTHS, per_row=True),
    "mean": Operation(
        _reduction("mean"), lambda x: x.sum(0) / (x.shape[0] or math.nan), WIDTHS, per_row=True
    ),
    "max": Operation(_reduction("max"), lambda x: _with_one(x, -INF).amax(0), WIDTHS, per_row=True),
    "min": Operation(_reduction("min"), lambda x: _with_one(x, INF).amin(0), WIDTHS, per_row=True),
    "cumulative_sum": Operation(
        lambda x: scree.namespace(x).cumulative_sum(x, axis=1), lambda x: x.cumsum(0), WIDTHS
    ),
    "rope": Operation(
        lambda x: scree.rope(x, kernel="triton"),
        lambda x: _rope_row(x, False),
        ((1, 64), (3, 128), (5, 24)),
    ),
    "rope interleaved": Operation(
        lambda x: scree.rope(x, interleaved=True, kernel="triton"),
        lambda x: _rope_row(x, True),
        ((1, 64), (3, 128), (5, 24)),
    ),
    "rope of q and k": Operation(
        _rope_both, lambda x: _rope_row(x, False), ((2, 64), (9, 128), (5, 24))
    ),
    "grouped_matmul": Operation(
        lambda x, w: x @ w,
        lambda x, w: x @ w,
        ((64,), (40,), (128,), (20,)),
        lambda token, n: ((n, token[0], 320 if token == (128,) else 96),),
        own=True,
    ),
    "pad": Operation(
        lambda x: scree.to_padded(x, length=LENGTH, fill_value=-2.5, kernel="triton")[0],
        lambda x: _padded_row(x, False),
        COPIED,
        per_row=True,
    ),
    "pad left": Operation(
        lambda x: scree.to_padded(x, length=LENGTH, fill_value=-2.5, side="left", kernel="triton")[
            0
        ],
        lambda x: _padded_row(x, True),
        COPIED,
        per_row=True,
    ),
    "pad and unpad": Operation(
        lambda x: scree.from_padded(
            scree.to_padded(x, length=LENGTH)[0],
            lengths=x.lengths,
            total=x.total_length,
            kernel="triton",
        ),
        lambda x: x + 0,
        COPIED,
    ),
    "pad and unpad by mask": Operation(
        lambda x: scree.from_padded(
            *scree.to_padded(x, length=LENGTH, side="left"), total=x.total_length, kernel="triton"
        ),
        lambda x: x + 0,
        COPIED,
    ),
    "gather": Operation(
        lambda x: scree.gather(x, _pairs(x), kernel="triton"),
        lambda x: x[torch.arange(len(x), device=x.device) // 2],
        COPIED,
    ),
    "scatter": Operation(
        lambda x: scree.scatter(x, _pairs(x), x.total_length, kernel="triton"),
        _last_of_pairs,
        COPIED,
    ),
    "scatter_add": Operation(
        lambda x: scree.scatter_add(x, _pairs(x), x.total_length, kernel="triton"),
        lambda x: torch.zeros_like(x).index_add(0, torch.arange(len(x), device=x.device) // 2, x),
        COPIED,
    ),
    "flip": Operation(lambda x: scree.namespace(x).flip(x, axis=1), lambda x: x.flip(0), COPIED),
    "concat": Operation(
        lambda x: scree.namespace(x).concat([x, x.with_values(-x.values), x], axis=1),
        lambda x: torch.cat([x, -x, x]),
        COPIED,
    ),
    "cross_entropy": Operation(
        lambda x: scree.cross_entropy(
            x, _targets(x, x.shape[-1]), reduction="none", kernel="triton"
        ),
        _losses,
        ((40,), (77,), (1000,), (50257,)),
        wide=True,
    ),
    "cross_entropy of rows": Operation(
        lambda x: scree.cross_entropy(
            x, _targets(x, x.shape[-1]), reduction="row_mean", kernel="triton"
        ),
        _mean_loss,
        ((40,), (77,), (32768,)),
        per_row=True,
        wide=True,
    ),
    "linear_cross_entropy": Operation(
        lambda x, w, b: scree.linear_cross_entropy(
            x, w, _targets(x, w.shape[0]), b, reduction="none", kernel="triton"
        ),
        lambda x, w, b: _losses(x @ w.T + b),
        ((16,), (24,), (256,)),
        lambda token, n: ((77, *token), (77,)),
        wide=True,
    ),
    "linear_cross_entropy of rows": Operation(
        lambda x, w: scree.linear_cross_entropy(
            x, w, _targets(x, w.shape[0]), reduction="row_mean", kernel="triton"
        ),
        lambda x, w: _mean_loss(x @ w.T),
        ((16,), (24,)),
        lambda token, n: ((50, *token),),
        per_row=True,
        wide=True,
    ),
}


class Case(NamedTuple):
    """One operation on one layout."""

    name: str
    dtype: torch.dtype
    token: tuple[int, ...]
    lengths: tuple[int, ...]
    slack: int = 0  # tokens behind the last row
    bounded: bool = False  # the longest row is known on the host
    wide: bool = False  # int64 offsets
    sliced: bool = False  # values are columns of a wider tensor

    @property
    def id(self) -> str:
        """A readable test id."""
        rows = f"{len(self.lengths)}rows{sum(self.lengths)}"
        parts = [
            self.name.replace(" ", "_"),
            str(self.dtype)[6:],
            "x".join(map(str, self.token)) or "1",
            rows,
        ]
        return "-".join(
            parts
            + [k for k in ("bounded", "wide", "sliced") if getattr(self, k)]
            + ["slack"] * bool(self.slack)
        )


def inputs(
    case: Case, device: str, seed: int = 0
) -> tuple[scree.Array, list[torch.Tensor], torch.Tensor]:
    """The ragged array, the parameters and the gradient of the result. Tokens behind the last row hold NaN."""
    generator = torch.Generator(device=device).manual_seed(seed)
    operation, n, total = OPERATIONS[case.name], len(case.lengths), sum(case.lengths)

    def random(*shape: int) -> torch.Tensor:
        return (2 * torch.randn(shape, generator=generator, device=device)).to(case.dtype)

    values = random(total + case.slack, *case.token)
    if case.sliced:
        values = random(total + case.slack, *case.token[:-1], 2 * case.token[-1])[
            ..., : case.token[-1]
        ]
    values[total:] = math.nan
    cu = offsets(case.lengths, device).to(torch.int64 if case.wide else torch.int32)
    x = scree.from_offsets(
        values.requires_grad_(),
        cu,
        max_length=max(case.lengths, default=0) if case.bounded else None,
    )
    parameters = [random(*shape).requires_grad_() for shape in operation.parameters(case.token, n)]
    y = run(case, x, parameters)[0]
    return x, parameters, random(*y.shape)


def run(
    case: Case, x: scree.Array, parameters: list[torch.Tensor], dy: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """The result, and with dy the gradients of all inputs."""
    y = OPERATIONS[case.name].run(x, *parameters)
    y = y.values if isinstance(y, scree.Array) else y
    return [y, *([] if dy is None else torch.autograd.grad(y, [x.values, *parameters], dy))]


def reference(
    case: Case, x: scree.Array, parameters: list[torch.Tensor], dy: torch.Tensor, dtype: torch.dtype
) -> list[torch.Tensor]:
    """What `run` gives, by the definition, in `dtype`; NaN behind the last row, whatever stands there."""
    operation = OPERATIONS[case.name]
    leaves = [p.detach().to(dtype).requires_grad_() for p in (x.values, *parameters)]
    rows = leaves[0][: sum(case.lengths)].split(case.lengths) if case.lengths else ()
    out = []
    for i, row in enumerate(rows):
        out.append(operation.row(row, *(p[i] if operation.own else p for p in leaves[1:])))
    shape = dy.shape[1:]
    y = (
        leaves[0].new_zeros((0, *shape))
        if not out
        else torch.stack(out)
        if operation.per_row
        else torch.cat(out)
    )
    gradients = (
        torch.autograd.grad(y, leaves, dy[: y.shape[0]].to(y.dtype), allow_unused=True)
        if out
        else [None] * len(leaves)
    )
    gradients = [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, leaves)]
    return [y.detach(), *gradients]


def check(case: Case, device: str) -> None:
    """The error is at most about that of the eager functions of this dtype, and nothing reads what no row holds."""
    x, parameters, dy = inputs(case, device)
    found = run(case, x, parameters, dy)
    exact, eager = (reference(case, x, parameters, dy, dtype) for dtype in (f64, case.dtype))
    floor = {f16: 3e-4, bf16: 2.4e-3, f32: 4e-7}[case.dtype]
    for i, (got, right, rough) in enumerate(zip(found, exact, eager)):
        assert got.dtype == (f32 if i == 0 and OPERATIONS[case.name].wide else case.dtype)
        total = right.shape[0] if i == 0 else sum(case.lengths)
        got, right, rough = (p[:total] if i < 2 else p for p in (got, right, rough))
        nan = right.isnan()
        assert torch.equal(got.isnan(), nan), f"result {i}: NaN in other places"
        got, right, rough = (p.masked_fill(nan, 0) for p in (got, right, rough))
        error, allowed = distance(got, right), 2 * distance(rough, right) + floor
        assert error <= allowed, f"result {i}: error {error:.2g}, allowed {allowed:.2g}"


def check_product(
    lengths: tuple[int, ...],
    token: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    slack: int = 0,
    compiled: bool = False,
    bounded: bool = False,
) -> None:
    """The gradient of a product of tokens near 1 and -1, where row b has b % 3 zeros, against autograd in float64."""
    generator = torch.Generator(device=device).manual_seed(0)
    total = sum(lengths)
    shape = total + slack, *token
    values = (0.8 + 0.4 * torch.rand(shape, generator=generator, device=device)).to(dtype)
    values = torch.where(
        torch.rand(shape, generator=generator, device=device) < 0.5, -values, values
    )
    for b, row in enumerate(values[:total].split(lengths)):
        row[len(row) // 3 :][: b % 3] = 0
    values[total:] = math.nan
    cu, longest = offsets(lengths, device), max(lengths) if bounded else None
    dy = torch.randn((len(lengths), *token), generator=generator, device=device).to(dtype)

    def product(values: torch.Tensor) -> torch.Tensor:
        x = scree.from_offsets(values, cu, max_length=longest)
        return scree.namespace(x).prod(x, axis=1)

    assert (
        scree.explain(
            "segment_reduce",
            "prod",
            values.requires_grad_(),
            scree.from_offsets(values, cu).layout,
            dtype,
        ).provider
        == "triton"
    )
    y = torch.compile(product, fullgraph=True)(values * 1.0) if compiled else product(values)
    (found,) = torch.autograd.grad(y, values, dy)
    assert found.dtype == dtype and not found[total:].any()
    for row, got, one in zip(
        values.detach()[:total].split(lengths), found[:total].split(lengths), dy
    ):
        wide = row.double().requires_grad_()
        (right,) = torch.autograd.grad(wide.prod(0), wide, one.double())
        error = (got.double() - right).abs() - torch.finfo(dtype).tiny
        assert (
            error <= right.abs() * (torch.finfo(dtype).eps + 2 * len(row) * torch.finfo(f32).eps)
        ).all()
