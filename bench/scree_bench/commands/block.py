"""`block`: one transformer block on ragged arrays, forward and backward, whole and term by term, beside its limit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

import scree

from .. import plots, results, trace
from ..lengths import adding_up
from ..libraries import Function, Library, Step, torch_compiled, wanted, where
from ..measure import PATIENCE, median
from ..options import Device, Dtype, Out, Patience, Quick, Seconds, Seed, data_type
from ..peers import NO_TIME, PEERS, compiler
from ..results import Result, Row, Table
from ..session import SECONDS, Build, Session
from ..work import BACKWARD, Work, worst

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

#: ``mark(name, y)`` is told what came out of a term, and gives it back.
Mark = Callable[[str, Any], Any]


class Sizes(NamedTuple):
    """Tokens in all, and the sizes of the block."""

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
    """The weights of a block; queries, keys and values come out of one product, and so do gate and values of the second half."""

    norm1: Any
    qkv: Any
    out: Any
    norm2: Any
    up: Any
    down: Any


def block(x: scree.Array, w: Weights, s: Sizes, mark: Mark = lambda _, y: y) -> scree.Array:
    """(n, None, width): norm, attention with rotary positions, norm, gated feed-forward network, on any library."""
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


def plain(x: Any, w: Weights, s: Sizes, turn: Function, attend: Function) -> Any:
    """The same in PyTorch's own functions, on (..., width); `turn` gives positions to queries and keys."""
    import torch.nn.functional as F  # noqa: N812

    y = (F.rms_norm(x, (s.width,), w.norm1, EPS) @ w.qkv).unflatten(-1, (-1, s.dim))
    q, k, v = y.split([s.heads, s.kv_heads, s.kv_heads], -2)
    x = x + attend(turn(q), turn(k), v).flatten(-2) @ w.out
    gate, up = (F.rms_norm(x, (s.width,), w.norm2, EPS) @ w.up).chunk(2, -1)
    return x + (F.silu(gate) * up) @ w.down


class Case:
    """Random rows and weights, and the block in every form: ``function(x, *weights)`` and its `x`."""

    def __init__(self, lib: Library, s: Sizes, rows: int, dtype: str, seed: int) -> None:
        self.lib, self.s, self.dtype = lib, s, dtype
        self.lengths = adding_up(rows, s.tokens, np.random.default_rng(seed))
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
            self.x, lib.make(self.work.offsets, "int32"), max_length=self.work.longest
        )
        self.tokens, self.real = (
            lib.make(x, kind) for x, kind in zip(self.work.tokens, ("int64", "bool"), strict=True)
        )

    def ours(self, **marks: Mark) -> tuple[Function, Any]:
        """On ragged arrays."""
        offsets, longest, s = self.like.offsets, self.work.longest, self.s
        return (
            lambda x, *w: (
                block(scree.Array(x, offsets, max_length=longest), Weights(*w), s, **marks).values
            ),
            self.x,
        )

    def padded(self) -> tuple[Function, Any]:
        """On a padded batch."""
        import torch.nn.functional as F  # noqa: N812

        turn = self._turn(self.lib.make(np.arange(self.work.longest), "int32"))

        def attend(q: Any, k: Any, v: Any) -> Any:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            ).transpose(1, 2)

        return lambda x, *w: plain(x, Weights(*w), self.s, turn, attend), self.x[
            self.tokens
        ] * self.real[:, :, None]

    def varlen(self) -> tuple[Function, Any]:
        """On rows end to end, with the attention that PyTorch has for them."""
        name = "varlen_attn (FA2)" if find_spec("torch.nn.attention.varlen") else "FA2 (aten)"
        attend = (
            next(peer for peer in PEERS if peer.name == name).prepare(self.lib, self.work).function
        )
        turn = self._turn(scree.positions(self.like))
        return lambda x, *w: plain(x, Weights(*w), self.s, turn, attend), self.x

    def _turn(self, at: Any, dtype: str = "") -> Function:
        """Rotary positions; the angles are made once."""
        import torch

        half = self.s.dim // 2
        angle = at.double()[:, None, None] * 10000.0 ** (
            -torch.arange(half, device=at.device).double() / half
        )
        cos, sin = (
            t(angle).to(self.lib.arrays.dtypes[dtype or self.dtype]) for t in (torch.cos, torch.sin)
        )

        def turn(x: Any) -> Any:
            low, high = x.chunk(2, -1)
            return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

        return turn

    def truth(self) -> tuple[Any, ...]:
        """The result and the gradients of all leaves, in float64, with attention row by row."""
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

        leaves = [self.lib.wide(x).requires_grad_() for x in (self.x, *self.weights)]
        turn = self._turn(scree.positions(self.like), "float64")
        out = plain(leaves[0], Weights(*leaves[1:]), self.s, turn, attend)
        return (out.detach(), *torch.autograd.grad(out, leaves, self.lib.wide(self.gradient)))

    def packed(self, x: Any) -> Any:
        """A padded result as rows end to end; weights and packed results as they are."""
        return x[self.real] if x.shape[:2] == self.real.shape else x


def step(case: Case, form: Callable[[], tuple[Function, Any]], phase: str) -> Step:
    """A pass through a form of the block; random numbers are sent back to every real token."""
    function, x = form()
    back = case.gradient if x.ndim == 2 else case.gradient[case.tokens] * case.real[:, :, None]
    return case.lib.steps(function, (x, *case.weights), back)[phase]()


def compiled(form: Callable[[], tuple[Function, Any]]) -> tuple[Function, Any]:
    """The form under `torch.compile`."""
    function, x = form()
    return torch_compiled(function), x


def captured(ready: Callable[[], Step]) -> Step:
    """The call as a CUDA graph; its results stand where they stood when it was captured."""
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
    """A part of the block: ``run(*args)``, and its least bytes and operations forward and backward.

    Its arrays are random as those of the block are: a product of ones takes a device less power, and so less time.
    """

    run: Function
    args: tuple[Any, ...]
    moved: tuple[float, float] = (0, 0)
    flops: tuple[float, float] = (0, 0)


def terms(case: Case) -> dict[str, Term]:
    """What the block consists of, by name."""
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
        return scree.rms_norm(
            like.with_values(x), w, eps=EPS
        ).values, x  # which meets its gradient behind the attention again

    def apart(y: Any) -> Any:
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

    row, turned = float(t * s.width * item), float(t * (s.heads + s.kv_heads) * s.dim * item)
    hidden, kv = float(t * s.hidden * item), (s.kv_heads, s.dim)
    return {
        "norm": Term(norm, (case.x, w.norm1), (2 * row, 6 * row)),
        "product: queries, keys, values": product(w.qkv),
        "queries, keys, values apart": Term(apart, (tokens(heads, s.dim),)),
        "rope": Term(lambda x: scree.rope(like.with_values(x)).values, (tokens(s.heads + s.kv_heads, s.dim),), (2 * turned,) * 2),
        "attention": Term(attend, (tokens(s.heads, s.dim), tokens(*kv), tokens(*kv)),
                          flops=(case.work.flops, BACKWARD * case.work.flops)),
        "product: output": product(w.out),
        "norm of a sum": Term(normed_sum, (case.x, tokens(s.width), w.norm2), (4 * row, 4 * row)),
        "product: gate and up": product(w.up),
        "gate": Term(lambda y: scree.swiglu(like.with_values(y)).values, (tokens(2 * s.hidden),), (3 * hidden, 5 * hidden)),
        "product: down": product(w.down),
        "sum": Term(lambda x, y: x + y, (case.x, tokens(s.width)), (3 * row, 0)),
    }  # fmt: skip


def command(
    rows: Annotated[int, typer.Option(min=1, help="Rows; lengths are log-normal.")] = 16,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens in all; 16,384 on CUDA, 1,024 on the CPU.")
    ] = None,
    dtype: Dtype = "",
    device: Device = "auto",
    seed: Seed = 0,
    seconds: Seconds = SECONDS,
    patience: Patience = PATIENCE,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """One transformer block on ragged arrays, forward and backward, against padding and PyTorch's varlen attention.

    Norm, one product for queries, keys and values, rotary positions, attention, product, norm, gated feed-forward network: width
    2,048, 16 heads on 4 of keys, 128 each, on CUDA, and less on the CPU. Eager and compiled, and on CUDA as a captured graph too.
    The limit is the sum of the terms: operations over the measured peak of matrix products, or bytes over the measured bandwidth.
    On CUDA each term is measured by itself, and inside of the whole block by PyTorch's profiler, with the time between kernels.
    """
    with Session("block", locals(), where(device)) as session:
        s = SIZES["quick" if quick else session.device]
        s = s._replace(tokens=tokens or s.tokens)
        dtype = data_type(dtype, session.device)
        for lib in wanted(session, "torch", ("torch",)):
            case = Case(lib, s, 4 if quick else rows, dtype, seed)
            about = {
                "rows": len(case.lengths),
                "tokens": case.work.total,
                "longest": case.work.longest,
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
    why = NO_TIME if session.quick else compiler(case.lib)
    if why:
        session.leave_out("compiled forms", why)
    if not cuda:
        session.leave_out("captured forms", "CUDA graphs exist on CUDA devices only")
    made: dict[str, Callable[[], tuple[Function, Any]]] = dict(forms)
    if not why:
        made |= {f"{who}, compiled": partial(compiled, form) for who, form in forms.items()}
    ready = {
        (who, phase): cache(partial(step, case, form, phase))
        for who, form in made.items()
        for phase in PHASES
    }
    for phase in PHASES:
        builds: dict[str, Build] = {who: ready[who, phase] for who in made}
        if cuda:
            builds |= {f"{who}, captured": partial(captured, ready[who, phase]) for who in made}
        for row in session.time(
            {"part": WHOLE, **about}, f"{phase}_s", builds, wait=case.lib.wait
        ).values():
            if phase == "both" and "both_s" in row.values:
                row.values["real_tokens"] = case.work.total / row.values["both_s"]
    right = case.truth()
    for who in made:
        for phase, name, truth in (
            ("forward", "forward_error", right[:1]),
            ("both", "gradient_error", right[1:]),
        ):
            if f"{phase}_s" in session.row({"part": WHOLE, **about}, who).values:
                session.value(
                    {"part": WHOLE, **about},
                    who,
                    name,
                    partial(_error, case, ready[who, phase], truth),
                )


def _error(case: Case, ready: Callable[[], Step], truth: tuple[Any, ...]) -> float:
    return worst(case.lib, case.lib.wait(ready()()), truth, case.packed)


def _terms(session: Session, case: Case, about: dict[str, Any]) -> None:
    limits = session.limits()
    peak, copy = limits[f"matmul_{case.dtype}_flops"], limits["copy_rate"]
    parts = terms(case)
    total = Row({"part": "the sum of the terms", **about}, "scree")
    for phase in PHASES:
        found = inside(case, phase) if session.device == "cuda" else {}
        for name in (*parts, *({BETWEEN} & found.keys())):
            row, values = session.row({"part": name, **about}, "scree"), {}
            if name in found:
                values[f"{phase}_inside_s"] = found[name]
            if name in parts:
                builds = {"scree": partial(_part, case, parts[name], phase)}
                session.time(row.case, f"{phase}_s", builds, wait=case.lib.wait)
                _, _, moved, flops = parts[name]
                passes = 1 if phase == "forward" else 2
                values |= {
                    f"{phase}_s": row.values.get(f"{phase}_s", float("nan")),
                    f"{phase}_limit_s": sum(flops[:passes]) / peak + sum(moved[:passes]) / copy,
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
    """Seconds of the kernels of each term in a pass through the whole block, and between all kernels; by PyTorch's profiler."""
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

    between = [trace.between(kernels) for kernels in trace.of(step(case, case.ours, phase))]
    run = step(case, partial(case.ours, mark=mark), phase)
    found = [trace.by_mark(kernels, marks) for kernels in trace.of(marked)]
    return {name: median([taken[name] for taken in found]) for name in dict.fromkeys(marks)} | {
        BETWEEN: median(between)
    }


def tables(result: Result) -> list[Table]:
    """The whole block by everyone; and its terms, each beside its limit."""
    whole, parts = (
        [row for row in result.rows if (row.case["part"] == WHOLE) is kind]
        for kind in (True, False)
    )
    return [*results.tables(whole, SHOWN), *results.tables(parts, SHOWN_OF_TERMS)]


def pictures(result: Result) -> plots.Pictures:
    """The whole block by everyone, and each term beside its limit."""
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
        "block-terms": (parts, "Its terms, forward and backward, beside the limit of the machine"),
    }

    def paint(figure: Any, groups: dict[str, dict[str, float]], title: str) -> None:
        plots.bars(figure.add_subplot(), groups, "both_s", title)

    return {
        name: partial(paint, groups=groups, title=title)
        for name, (groups, title) in titles.items()
        if any(groups.values())
    }
