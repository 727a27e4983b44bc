"""`block`: one transformer block on ragged arrays, whole and term by term, against its limit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

import scree

from .. import plots, results, trace
from ..lengths import lognormal_with_total
from ..libraries import (
    Function,
    MeasuredLibrary,
    Step,
    installed_libraries,
    resolve_device,
    torch_compiled,
)
from ..measure import PATIENCE, median
from ..options import Device, Dtype, Out, Patience, Quick, Seconds, Seed, data_type
from ..peers import NO_TIME, PEERS, compiler_unavailable
from ..results import Result, Row, Table
from ..session import SECONDS, Build, Session
from ..work import BACKWARD, Work, max_relative_error

EPS = 1e-6
PHASES = ("forward", "both")
WHOLE = "the whole block"
SHOWN = (
    "forward_s",
    "both_s",
    "forward_host_s",
    "both_host_s",
    "real_tokens",
    "forward_error",
    "gradient_error",
)
SHOWN_OF_TERMS = (
    "forward_s",
    "forward_inside_s",
    "forward_limit_s",
    "forward_of_limit_share",
    "both_s",
    "both_inside_s",
    "both_limit_s",
    "both_of_limit_share",
)
BETWEEN = "between kernels"

#: ``mark(name, y)`` receives the result of a term, and returns it.
Mark = Callable[[str, Any], Any]


class Sizes(NamedTuple):
    """Total number of tokens, and the sizes of the block."""

    tokens: int
    width: int
    heads: int
    kv_heads: int
    dim: int
    hidden: int


SIZES = {
    "cuda": Sizes(16_384, 2048, 16, 4, 128, 5632),
    "cpu": Sizes(1024, 512, 8, 2, 64, 1408),
    "quick": Sizes(96, 32, 4, 1, 16, 64),
}


class Weights(NamedTuple):
    """Weights of a block.

    One product computes queries, keys and values; another computes gate and values of the second
    half.
    """

    norm1: Any
    qkv: Any
    out: Any
    norm2: Any
    up: Any
    down: Any


def block(x: scree.Array, w: Weights, s: Sizes, mark: Mark = lambda _, y: y) -> scree.Array:
    """Apply the block to an array (n, None, width), on any library.

    Its terms are norm, attention with rotary positions, norm, gated feed-forward network.
    """
    xp = scree.namespace(x)
    y = mark("norm", xp.ragged.rms_norm(x, w.norm1, eps=EPS))
    y = mark("product: queries, keys, values", y @ w.qkv)
    y = y.with_values(xp.reshape(y.values, (y.total_length, -1, s.dim)))
    q, k, v = mark(
        "queries, keys, values apart", xp.ragged.split(y, (s.heads, s.kv_heads, s.kv_heads), axis=2)
    )
    q, k = mark("rope", xp.ragged.rope(q, k))
    y = mark("attention", xp.ragged.attention(q, k, v, causal=True))
    y = mark("product: output", y.with_values(xp.reshape(y.values, (y.total_length, -1))) @ w.out)
    y, x = mark("norm of a sum", xp.ragged.rms_norm(y, w.norm2, residual=x, eps=EPS))
    y = mark("gate", xp.ragged.swiglu(mark("product: gate and up", y @ w.up)))
    y = mark("product: down", y @ w.down)
    return mark("sum", x + y)


def plain(x: Any, w: Weights, s: Sizes, rotate: Function, attend: Function) -> Any:
    """Apply the block in PyTorch's functions, on (..., width); `rotate` applies the positions."""
    import torch.nn.functional as F

    y = (F.rms_norm(x, (s.width,), w.norm1, EPS) @ w.qkv).unflatten(-1, (-1, s.dim))
    q, k, v = y.split([s.heads, s.kv_heads, s.kv_heads], -2)
    x = x + attend(rotate(q), rotate(k), v).flatten(-2) @ w.out
    gate, up = (F.rms_norm(x, (s.width,), w.norm2, EPS) @ w.up).chunk(2, -1)
    return x + (F.silu(gate) * up) @ w.down


class Case:
    """Random rows and weights, and all forms of a block: ``function(x, *weights)`` and its `x`."""

    def __init__(self, lib: MeasuredLibrary, s: Sizes, rows: int, dtype: str, seed: int) -> None:
        self.lib, self.s, self.dtype = lib, s, dtype
        self.lengths = lognormal_with_total(rows, s.tokens, np.random.default_rng(seed))
        self.work = Work(
            tuple(map(int, self.lengths)), s.heads, s.kv_heads, s.dim, dtype, True, seed
        )
        self.normal = normal = lib.normal(seed, dtype)
        ones, features = (
            lib.make(np.ones(s.width, np.float32), dtype),
            (s.heads + 2 * s.kv_heads) * s.dim,
        )
        shapes = {
            "qkv": (s.width, features),
            "out": (s.heads * s.dim, s.width),
            "up": (s.width, 2 * s.hidden),
            "down": (s.hidden, s.width),
        }
        self.weights = Weights(
            norm1=ones,
            norm2=ones.clone(),
            **{name: normal(*shape) / shape[0] ** 0.5 for name, shape in shapes.items()},
        )
        self.x, self.gradient = (
            normal(self.work.total, s.width),
            0.01 * normal(self.work.total, s.width),
        )
        self.like = scree.Array(
            self.x, lib.make(self.work.offsets, "int32"), max_length=self.work.max_length
        )
        self.tokens, self.real = (
            lib.make(x, kind) for x, kind in zip(self.work.tokens, ("int64", "bool"), strict=True)
        )

    def ours(self, **marks: Mark) -> tuple[Function, Any]:
        """Return the form on ragged arrays."""
        offsets, max_length, s = self.like.offsets, self.work.max_length, self.s
        return (
            lambda x, *w: (
                block(
                    scree.Array(x, offsets, max_length=max_length), Weights(*w), s, **marks
                ).values
            ),
            self.x,
        )

    def padded(self) -> tuple[Function, Any]:
        """Return the form on a padded batch."""
        import torch.nn.functional as F

        rotate = self._rotary(self.lib.make(np.arange(self.work.max_length), "int32"))

        def attend(q: Any, k: Any, v: Any) -> Any:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            ).transpose(1, 2)

        return lambda x, *w: plain(x, Weights(*w), self.s, rotate, attend), self.x[
            self.tokens
        ] * self.real[:, :, None]

    def varlen(self) -> tuple[Function, Any]:
        """Return the form on packed rows, with PyTorch's varlen attention."""
        name = "varlen_attn (FA2)" if find_spec("torch.nn.attention.varlen") else "FA2 (aten)"
        attend = (
            next(peer for peer in PEERS if peer.name == name).prepare(self.lib, self.work).function
        )
        rotate = self._rotary(scree.positions(self.like))
        return lambda x, *w: plain(x, Weights(*w), self.s, rotate, attend), self.x

    def _rotary(self, at: Any, dtype: str = "") -> Function:
        """Return a function that applies rotary positions; the angles are computed once."""
        import torch

        half = self.s.dim // 2
        angle = at.double()[:, None, None] * 10000.0 ** (
            -torch.arange(half, device=at.device).double() / half
        )
        cos, sin = (
            t(angle).to(self.lib.arrays.dtypes[dtype or self.dtype]) for t in (torch.cos, torch.sin)
        )

        def rotate(x: Any) -> Any:
            low, high = x.chunk(2, -1)
            return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

        return rotate

    def reference(self) -> tuple[Any, ...]:
        """Return the result and the gradients of all leaves in float64, with attention per row."""
        import torch

        def attend(q: Any, k: Any, v: Any) -> Any:
            outs = []
            for row in zip(
                *(x.transpose(0, 1).split(list(self.work.lengths), 1) for x in (q, k, v)),
                strict=True,
            ):
                a, b, c = (
                    row[0],
                    *(x.repeat_interleave(self.s.heads // self.s.kv_heads, 0) for x in row[1:]),
                )
                scores = a @ b.transpose(1, 2) / self.s.dim**0.5
                outs.append(
                    scores.masked_fill(
                        scores.new_ones(scores.shape[1:]).triu(1).bool(), -np.inf
                    ).softmax(-1)
                    @ c
                )
            return torch.cat(outs, 1).transpose(0, 1)

        leaves = [self.lib.as_float64(x).requires_grad_() for x in (self.x, *self.weights)]
        rotate = self._rotary(scree.positions(self.like), "float64")
        out = plain(leaves[0], Weights(*leaves[1:]), self.s, rotate, attend)
        return (out.detach(), *torch.autograd.grad(out, leaves, self.lib.as_float64(self.gradient)))

    def packed(self, x: Any) -> Any:
        """Pack a padded result; return weights and packed results unchanged."""
        return x[self.real] if x.shape[:2] == self.real.shape else x


def step(case: Case, form: Callable[[], tuple[Function, Any]], phase: str) -> Step:
    """Return a pass through a form of the block; every real token gets a random gradient."""
    function, x = form()
    back = case.gradient if x.ndim == 2 else case.gradient[case.tokens] * case.real[:, :, None]
    return case.lib.steps(function, (x, *case.weights), back)[phase]()


def compiled(form: Callable[[], tuple[Function, Any]]) -> tuple[Function, Any]:
    """Return the form under `torch.compile`."""
    function, x = form()
    return torch_compiled(function), x


def captured(ready: Callable[[], Step]) -> Step:
    """Return the call as a CUDA graph; replays write to the results of the capture."""
    import torch

    call = ready()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()

    def replay() -> Any:
        graph.replay()
        return results

    return Step(replay)


class Term(NamedTuple):
    """A part of the block: ``run(*args)``, its fewest bytes and operations forward and backward.

    Its arrays are random, like the arrays of the block. A product of ones takes a device less
    power, and so less time.
    """

    run: Function
    args: tuple[Any, ...]
    traffic: tuple[float, float] = (0, 0)
    flops: tuple[float, float] = (0, 0)


def terms(case: Case) -> dict[str, Term]:
    """Return the terms of the block, by name."""
    s, w, like = case.s, case.weights, case.like
    t, item, heads = case.work.total, case.x.element_size(), s.heads + 2 * s.kv_heads
    tokens = partial(case.normal, t)

    def product(weight: Any) -> Term:
        flops = 2.0 * t * weight.shape[0] * weight.shape[1]
        return Term(
            lambda x, w: (like.with_values(x) @ w).values,
            (tokens(weight.shape[0]), weight),
            flops=(flops, 2 * flops),
        )

    def norm(x: Any, w: Any) -> Any:
        # The block adds x again after the attention: its gradient is a sum of two.
        return scree.rms_norm(like.with_values(x), w, eps=EPS).values, x

    def split_heads(y: Any) -> Any:
        return tuple(
            x.values
            for x in scree.split(like.with_values(y), (s.heads, s.kv_heads, s.kv_heads), axis=2)
        )

    def attend(q: Any, k: Any, v: Any) -> Any:
        return scree.attention(*(like.with_values(x) for x in (q, k, v)), causal=True).values

    def normed_sum(x: Any, y: Any, w: Any) -> Any:
        normed, total = scree.rms_norm(
            like.with_values(x), w, residual=like.with_values(y), eps=EPS
        )
        return normed.values, total.values

    row, rotated = float(t * s.width * item), float(t * (s.heads + s.kv_heads) * s.dim * item)
    hidden, kv = float(t * s.hidden * item), (s.kv_heads, s.dim)
    return {
        "norm": Term(norm, (case.x, w.norm1), (2 * row, 6 * row)),
        "product: queries, keys, values": product(w.qkv),
        "queries, keys, values apart": Term(split_heads, (tokens(heads, s.dim),)),
        "rope": Term(lambda x: scree.rope(like.with_values(x)).values,
                     (tokens(s.heads + s.kv_heads, s.dim),), (2 * rotated,) * 2),
        "attention": Term(attend, (tokens(s.heads, s.dim), tokens(*kv), tokens(*kv)),
                          flops=(case.work.flops, BACKWARD * case.work.flops)),
        "product: output": product(w.out),
        "norm of a sum": Term(normed_sum, (case.x, tokens(s.width), w.norm2), (4 * row, 4 * row)),
        "product: gate and up": product(w.up),
        "gate": Term(lambda y: scree.swiglu(like.with_values(y)).values,
                     (tokens(2 * s.hidden),), (3 * hidden, 5 * hidden)),
        "product: down": product(w.down),
        "sum": Term(lambda x, y: x + y, (case.x, tokens(s.width)), (3 * row, 0)),
    }  # fmt: skip


def command(
    rows: Annotated[int, typer.Option(min=1, help="Rows; lengths are log-normal.")] = 16,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Total tokens; 16,384 on CUDA, 1,024 on the CPU.")
    ] = None,
    dtype: Dtype = "",
    device: Device = "auto",
    seed: Seed = 0,
    seconds: Seconds = SECONDS,
    patience: Patience = PATIENCE,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Measure one transformer block, ragged, against padding and PyTorch's varlen attention.

    The block has a norm, one product for queries, keys and values, rotary positions, attention, a
    product, a norm, and a gated feed-forward network. On CUDA the width is 2,048, with 16 query
    heads and 4 key heads of 128 each; the CPU gets smaller sizes. The forms are eager and compiled,
    and on CUDA also a captured graph. The limit is the sum over the terms: operations over the
    measured peak of matrix products, or bytes over the measured bandwidth. On CUDA each term is
    measured alone and, by PyTorch's profiler, within the whole block, with the time between
    kernels.
    """
    with Session("block", locals(), resolve_device(device)) as session:
        s = SIZES["quick" if quick else session.device]
        s = s._replace(tokens=tokens or s.tokens)
        dtype = data_type(dtype, session.device)
        for lib in installed_libraries(session, "torch", ("torch",)):
            case = Case(lib, s, 4 if quick else rows, dtype, seed)
            about = {
                "rows": len(case.lengths),
                "tokens": case.work.total,
                "longest": case.work.max_length,
                "width": s.width,
                "heads": s.heads,
                "kv_heads": s.kv_heads,
                "dim": s.dim,
                "hidden": s.hidden,
                "dtype": dtype,
            }
            for part in session.track((_whole, _terms)):
                part(session, case, about)


def _whole(session: Session, case: Case, about: dict[str, Any]) -> None:
    cuda = session.device == "cuda"
    forms = {"scree": case.ours, "padded, SDPA": case.padded}
    if cuda and case.dtype != "float32":
        forms["packed, torch's varlen attention"] = case.varlen
    else:
        session.leave_out(
            "packed, torch's varlen attention", "takes half precision on CUDA devices only"
        )
    reason = NO_TIME if session.quick else compiler_unavailable(case.lib)
    if reason:
        session.leave_out("compiled forms", reason)
    if not cuda:
        session.leave_out("captured forms", "CUDA graphs exist on CUDA devices only")
    contenders: dict[str, Callable[[], tuple[Function, Any]]] = dict(forms)
    if not reason:
        contenders |= {
            f"{contender}, compiled": partial(compiled, form) for contender, form in forms.items()
        }
    ready = {
        (contender, phase): cache(partial(step, case, form, phase))
        for contender, form in contenders.items()
        for phase in PHASES
    }
    for phase in PHASES:
        builds: dict[str, Build] = {contender: ready[contender, phase] for contender in contenders}
        if cuda:
            builds |= {
                f"{contender}, captured": partial(captured, ready[contender, phase])
                for contender in contenders
            }
        for row in session.time(
            {"part": WHOLE, **about}, f"{phase}_s", builds, wait=case.lib.wait
        ).values():
            if phase == "both" and "both_s" in row.values:
                row.values["real_tokens"] = case.work.total / row.values["both_s"]
    reference = case.reference()
    for contender in contenders:
        for phase, name, expected in (
            ("forward", "forward_error", reference[:1]),
            ("both", "gradient_error", reference[1:]),
        ):
            if f"{phase}_s" in session.row({"part": WHOLE, **about}, contender).values:
                session.value(
                    {"part": WHOLE, **about},
                    contender,
                    name,
                    partial(_error, case, ready[contender, phase], expected),
                )


def _error(case: Case, ready: Callable[[], Step], expected: tuple[Any, ...]) -> float:
    return max_relative_error(case.lib, case.lib.wait(ready()()), expected, case.packed)


def _terms(session: Session, case: Case, about: dict[str, Any]) -> None:
    limits = session.limits()
    peak, copy = limits[f"matmul_{case.dtype}_flops"], limits["copy_rate"]
    parts = terms(case)
    total = Row({"part": "the sum of the terms", **about}, "scree")
    for phase in PHASES:
        kernel_times = inside(case, phase) if session.device == "cuda" else {}
        for name in (*parts, *({BETWEEN} & kernel_times.keys())):
            row, values = session.row({"part": name, **about}, "scree"), {}
            if name in kernel_times:
                values[f"{phase}_inside_s"] = kernel_times[name]
            if name in parts:
                builds = {"scree": partial(_part, case, parts[name], phase)}
                session.time(row.case, f"{phase}_s", builds, wait=case.lib.wait)
                _, _, traffic, flops = parts[name]
                passes = 1 if phase == "forward" else 2
                values |= {
                    f"{phase}_s": row.values.get(f"{phase}_s", float("nan")),
                    f"{phase}_limit_s": sum(flops[:passes]) / peak + sum(traffic[:passes]) / copy,
                }
            row.values |= values
            for key, value in values.items():
                total.values[key] = total.values.get(key, 0.0) + value
    session.result.rows.append(total)
    for row in session.result.rows:
        for phase in PHASES:
            taken = row.values.get(f"{phase}_inside_s", row.values.get(f"{phase}_s"))
            if taken and f"{phase}_limit_s" in row.values:
                row.values[f"{phase}_of_limit_share"] = row.values[f"{phase}_limit_s"] / taken
    limit = session.row({"part": WHOLE, **about}, "limit")
    limit.values |= {f"{phase}_s": total.values[f"{phase}_limit_s"] for phase in PHASES}


def _part(case: Case, term: Term, phase: str) -> Step:
    out = term.run(*term.args)
    back = tuple(0.01 * case.normal(*x.shape) for x in (out if isinstance(out, tuple) else (out,)))
    return case.lib.steps(term.run, term.args, back if isinstance(out, tuple) else back[0])[phase]()


def inside(case: Case, phase: str) -> dict[str, float]:
    """Return the seconds of the kernels per term in a whole pass, and between all kernels.

    PyTorch's profiler measures them.
    """
    marks: list[str] = []

    def mark(name: str, y: Any) -> Any:
        def tell(_: Any = None) -> None:
            marks.append(name)
            trace.mark()

        tell()
        values = (y[0] if isinstance(y, tuple) else y).values
        if values.requires_grad:
            values.register_hook(tell)
        return y

    def marked() -> None:
        marks.clear()
        run()

    between = [
        trace.idle_seconds(kernels) for kernels in trace.profile_calls(step(case, case.ours, phase))
    ]
    run = step(case, partial(case.ours, mark=mark), phase)
    profiled = [trace.seconds_by_mark(kernels, marks) for kernels in trace.profile_calls(marked)]
    return {name: median([taken[name] for taken in profiled]) for name in dict.fromkeys(marks)} | {
        BETWEEN: median(between)
    }


def tables(result: Result) -> list[Table]:
    """Return the whole block by all contenders, and each term with its limit."""
    whole, parts = (
        [row for row in result.rows if (row.case["part"] == WHOLE) is kind]
        for kind in (True, False)
    )
    return [*results.tables(whole, SHOWN), *results.tables(parts, SHOWN_OF_TERMS)]


def pictures(result: Result) -> plots.Pictures:
    """Return pictures of the whole block by all contenders, and of each term with its limit."""
    rows = [row for row in result.rows if "both_s" in row.values]
    whole = {WHOLE: {row.who: row.values["both_s"] for row in rows if row.case["part"] == WHOLE}}
    parts = {
        row.case["part"]: {
            "scree": row.values.get("both_inside_s", row.values["both_s"]),
            "limit": row.values["both_limit_s"],
        }
        for row in rows
        if "both_limit_s" in row.values
    }
    titles = {
        "block": (whole, "A transformer block, forward and backward: less is better"),
        "block-terms": (parts, "Its terms, forward and backward, and the limit of the machine"),
    }

    def paint(figure: Any, groups: dict[str, dict[str, float]], title: str) -> None:
        plots.bars(figure.add_subplot(), groups, "both_s", title)

    return {
        name: partial(paint, groups=groups, title=title)
        for name, (groups, title) in titles.items()
        if any(groups.values())
    }
