"""`kernels`: what a transformer on ragged batches does beside attention and norms, against PyTorch's ways to do it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cached_property, partial
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

import scree

from .. import plots, results
from ..lengths import adding_up
from ..libraries import Function, Library, nesting, torch_compiled, wanted, where
from ..measure import PATIENCE
from ..operations import COPY, PHASES, Contender, Operation, measure
from ..options import Device, Dtype, Out, Patience, Quick, Seconds, Seed, data_type
from ..peers import NO_TIME, compiler, importable, lacking
from ..results import Result, Row, Table
from ..session import SECONDS, Session

SHOWN = (
    *(f"{phase}_{value}" for phase in PHASES for value in ("s", "of_copy_share", "share")),
    "forward_host_s",
    "both_host_s",
    "both_peak_bytes",
    "relative_error",
)
TRANSFORMERS = (
    "transformers.modeling_flash_attention_utils"  # where its ways in and out of padding are
)
ALONG = (
    "softmax",
    "logsumexp",
    "of rows",
    "cumulative_sum",
)  # how the names of operations along rows end
CHECKED = 1000  # rows up to which the truth is computed, in a loop over them


class Sizes(NamedTuple):
    """Rows, and what each of their tokens is."""

    lengths: Callable[[np.random.Generator], np.ndarray]
    token: tuple[int, ...]
    dtype: str


class Batch:
    """Rows of random tokens on PyTorch, and what several operations need of them."""

    def __init__(self, lib: Library, sizes: Sizes, seed: int, quick: bool = False) -> None:
        self.lib, self.rng, self.token, self.dtype = (
            lib,
            np.random.default_rng(seed),
            sizes.token,
            sizes.dtype,
        )
        self.lengths = sizes.lengths(self.rng)
        self.total, self.longest = int(self.lengths.sum()), int(self.lengths.max())
        self.width = int(np.prod(sizes.token))
        self.normal = lib.normal(seed, sizes.dtype)
        self.values = self.normal(self.total, *sizes.token)
        offsets = lib.make(np.concatenate([[0], np.cumsum(self.lengths)]), "int32")
        self.like = scree.Array(self.values, offsets, max_length=self.longest)
        self.bytes = float(self.values.numel() * self.values.element_size())
        self.quick = quick
        self.left_out: dict[str, str] = {}

    @cached_property
    def mask(self) -> Any:
        """(rows, longest) where a padded batch holds tokens."""
        return self.lib.make(np.arange(self.longest) < self.lengths[:, None], "bool")

    def runs(self, who: str, why: str | None) -> bool:
        """Whether there is no reason why a contender cannot run; one that there is is noted."""
        self.left_out |= {who: why} if why else {}
        return not why

    @property
    def compiles(self) -> bool:
        """Whether `torch.compile` can run, and there is time for it."""
        return self.runs("compiled forms", NO_TIME if self.quick else compiler(self.lib))

    @property
    def transformers(self) -> bool:
        """Whether there is such a package, and time to import it."""
        there = importable("transformers")
        return self.runs(
            "transformers", NO_TIME if self.quick else None if there else "cannot be imported"
        )

    def classes(self, count: int) -> Any:
        """A class for each token."""
        return self.lib.make(self.rng.integers(0, count, self.total), "int64")

    def rows(self, values: Any) -> scree.Array:
        """Values as rows."""
        return self.like.with_values(values)

    @cached_property
    def nested(self) -> Function:
        """What makes PyTorch's nested tensor of values."""
        return nesting(self.lib, self.lengths)

    def padded(self, fill: float = 0.0) -> Any:
        """The values as a padded batch."""
        return scree.to_padded(self.like, fill_value=fill)[0]

    def by_row(
        self, function: Callable[[Any], Any], put: str = "cat", values: Any = None
    ) -> Callable[[], Any] | None:
        """What a float64 loop over rows gives, on the tensors themselves; None where there are too many rows for it."""
        import torch

        if len(self.lengths) > CHECKED:
            return None
        wide = self.lib.wide(self.values if values is None else values)
        return lambda: getattr(torch, put)([function(x) for x in wide.split(self.lengths.tolist())])


def _softmax(name: str) -> Callable[[Batch], Operation]:
    """`softmax`, `log_softmax` or `logsumexp`, which gives a number a row."""
    own, per_row = getattr(scree, name), name == "logsumexp"

    def operation(b: Batch) -> Operation:
        import torch

        bare = getattr(torch, name)

        def values(x: Any) -> Any:
            return x if per_row else x.values

        found: dict[str, Contender] = {
            "scree": lambda: (lambda x: values(own(b.rows(x))), (b.values,))
        }
        if b.lib.device == "cuda":  # elsewhere it is what runs anyway
            found["scree, standard path"] = lambda: (
                lambda x: values(own(b.rows(x), kernel="standard")),
                (b.values,),
            )
        if b.total == b.longest * len(b.lengths):
            shape = (len(b.lengths), b.longest, *b.values.shape[1:])
            found["torch, dense"] = lambda: (lambda x: bare(x, 1), (b.values.reshape(shape),))
        else:
            if name == "softmax":  # PyTorch has no other of them along nested rows
                found["torch.nested"] = lambda: (
                    lambda x: bare(b.nested(x), 1).values(),
                    (b.values,),
                )
            found["padded"] = lambda: (
                lambda x: bare(x, 1) if per_row else bare(x, 1)[b.mask],
                (b.padded(-np.inf),),
            )
        forward, backward = (1 if per_row else 2) * b.bytes, (2 if per_row else 3) * b.bytes
        truth = b.by_row(lambda x: bare(x, 0), "stack" if per_row else "cat")
        return Operation(name, found, (forward, backward, forward + backward), truth)

    return operation


def _reduction(name: str) -> Callable[[Batch], Operation]:
    def operation(b: Batch) -> Operation:
        import torch

        xp, lengths, bare = (
            b.lib.xp,
            b.like.lengths.long(),
            {"max": "amax", "min": "amin"}.get(name, name),
        )
        values = (
            1 + b.values / 32 if name == "prod" else b.values
        )  # a product of numbers about 0 is 0
        back = (
            1 if name in ("sum", "mean") else 2
        ) * b.bytes  # the others look at their input again
        found: dict[str, Contender] = {
            "scree": lambda: (lambda x: getattr(xp, name)(b.rows(x), axis=1), (values,)),
            "segment_reduce": lambda: (
                lambda x: torch.segment_reduce(x, name, lengths=lengths, axis=0, unsafe=True),
                (values,),
            ),
            "torch.nested": lambda: (lambda x: getattr(b.nested(x), bare)(1), (values,)),
        }
        whole: dict[str, Contender] = {
            "torch, all rows as one": lambda: (lambda x: getattr(x, bare)(0), (values,))
        }
        truth = b.by_row(lambda x: getattr(x, bare)(0), "stack", values)
        return Operation(
            f"{name} of rows", found, (b.bytes, back, b.bytes + back), truth, yardsticks=whole
        )

    return operation


def _search(name: str) -> Callable[[Batch], Operation]:
    """`argmax`, `any` or `all`, which have no gradient."""

    def operation(b: Batch) -> Operation:
        xp, fill = b.lib.xp, {"argmax": -np.inf, "any": 0.0, "all": 1.0}[name]
        found: dict[str, Contender] = {
            "scree": lambda: (lambda x: getattr(xp, name)(b.rows(x), axis=1), (b.values,)),
            "padded": lambda: (lambda x: getattr(x, name)(1), (b.padded(fill),)),
        }
        whole: dict[str, Contender] = {
            "torch, all rows as one": lambda: (lambda x: getattr(x, name)(0), (b.values,))
        }
        truth = b.by_row(lambda x: getattr(x, name)(0).double(), "stack")
        return Operation(
            f"{name} of rows", found, (b.bytes, 0, 0), truth, yardsticks=whole, differentiable=False
        )

    return operation


def _cumulative_sum(b: Batch) -> Operation:
    xp = b.lib.xp
    return Operation(
        "cumulative_sum",
        {
            "scree": lambda: (lambda x: xp.cumulative_sum(b.rows(x), axis=1).values, (b.values,)),
            "padded": lambda: (lambda x: x.cumsum(1)[b.mask], (b.padded(),)),
        },
        (2 * b.bytes, 2 * b.bytes, 4 * b.bytes),
        b.by_row(lambda x: x.cumsum(0)),
    )


def _rope(interleaved: bool = False) -> Callable[[Batch], Operation]:
    """Halves of a head as pairs, or neighbors; a compiled form is given the cosines and sines, another finds them as ours does."""

    def operation(b: Batch) -> Operation:
        import torch

        dim, offsets = b.values.shape[-1] if b.values.ndim > 2 else 64, b.like.offsets
        heads = b.values.reshape(b.total, -1, dim)
        frequencies = 10000.0 ** (-torch.arange(0, dim, 2, device=heads.device) / dim)

        def turn(x: Any, cos: Any, sin: Any) -> Any:
            low, high = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, -1)
            found = low * cos - high * sin, high * cos + low * sin
            return torch.stack(found, -1).flatten(-2) if interleaved else torch.cat(found, -1)

        def angles() -> Any:
            at = torch.arange(b.total, dtype=offsets.dtype, device=heads.device)
            row = torch.searchsorted(offsets, at, right=True) - 1
            return (at - offsets[row]).float()[:, None, None] * frequencies

        def factors(angle: Any) -> tuple[Any, Any]:
            return angle.cos().to(heads.dtype), angle.sin().to(heads.dtype)

        def itself(x: Any) -> Any:
            return turn(x, *factors(angles()))

        cos, sin = factors(angles())

        def given(x: Any) -> Any:
            return turn(x, cos, sin)

        def truth() -> Any:
            angle = angles().double()
            return turn(b.lib.wide(heads), angle.cos(), angle.sin())

        found: dict[str, Contender] = {
            "scree": lambda: (
                lambda x: scree.rope(b.rows(x), interleaved=interleaved).values,
                (heads,),
            ),
            "by hand": lambda: (itself, (heads,)),
            "by hand, cos and sin given": lambda: (given, (heads,)),
        }
        if b.compiles:
            found["compiled"] = lambda: (torch_compiled(itself), (heads,))
            found["compiled, cos and sin given"] = lambda: (torch_compiled(given), (heads,))
        name = "rope, neighbors as pairs" if interleaved else "rope"
        return Operation(name, found, (2 * b.bytes, 2 * b.bytes, 4 * b.bytes), truth)

    return operation


def _cross_entropy(b: Batch) -> Operation:
    """The features of a token are its logits."""
    import torch.nn.functional as F  # noqa: N812

    right = b.classes(b.width)

    def own(x: Any) -> Any:
        return F.cross_entropy(x.float(), right)

    found: dict[str, Contender] = {
        "scree": lambda: (lambda x: scree.cross_entropy(b.rows(x), b.rows(right)), (b.values,)),
        "torch": lambda: (own, (b.values,)),
    }
    if b.compiles:
        found["torch, compiled"] = lambda: (torch_compiled(own), (b.values,))
    if b.dtype == "bfloat16":
        found["torch, in bfloat16"] = lambda: (lambda x: F.cross_entropy(x, right), (b.values,))
    moved = b.bytes, 2 * b.bytes, 3 * b.bytes
    return Operation(
        "cross_entropy", found, moved, lambda: F.cross_entropy(b.lib.wide(b.values), right)
    )


def _linear_cross_entropy(classes: int | None = None) -> Callable[[Batch], Operation]:
    """The losses of the logits that a product makes of the tokens, for so many classes; twice the features by default."""

    def operation(b: Batch) -> Operation:
        import torch.nn.functional as F  # noqa: N812

        count = classes or 2 * b.width
        right, weight = b.classes(count), b.normal(count, b.width) / b.width**0.5

        def own(x: Any, w: Any) -> Any:
            return F.cross_entropy((x @ w.T).float(), right)

        def liger() -> tuple[Function, tuple[Any, ...]]:
            run = import_module(
                "liger_kernel.ops.fused_linear_cross_entropy"
            ).LigerFusedLinearCrossEntropyFunction.apply
            return lambda x, w: run(x, w, right)[0], (b.values, weight)

        found: dict[str, Contender] = {
            "scree": lambda: (
                lambda x, w: scree.linear_cross_entropy(b.rows(x), w, b.rows(right)),
                (b.values, weight),
            ),
            "torch": lambda: (own, (b.values, weight)),
        }
        if b.compiles:
            found["torch, compiled"] = lambda: (torch_compiled(own), (b.values, weight))
        if b.dtype == "bfloat16":
            found["torch, in bfloat16"] = lambda: (
                lambda x, w: F.cross_entropy(x @ w.T, right),
                (b.values, weight),
            )
        if b.runs("liger_kernel", lacking(b.lib, b.dtype, modules=["liger_kernel"])):
            found["liger_kernel"] = liger
        done = 2.0 * b.total * b.width * count
        return Operation(
            "linear_cross_entropy",
            found,
            flops=(done, 2 * done, 3 * done),
            peak=True,
            truth=lambda: F.cross_entropy(b.lib.wide(b.values) @ b.lib.wide(weight).T, right),
        )

    return operation


def _grouped(wide: int | None = None) -> Callable[[Batch], Operation]:
    """Each row times a matrix of its own, (width, wide): rows are the tokens of an expert."""

    def operation(b: Batch) -> Operation:
        import torch

        xp, m, ends, lengths = b.lib.xp, wide or b.width, b.like.offsets[1:], b.lengths.tolist()
        weights = b.normal(len(b.lengths), b.width, m) / b.width**0.5
        one = weights[0]

        def loop(x: Any, w: Any) -> Any:
            return torch.cat([part @ w[i] for i, part in enumerate(x.split(lengths))])

        found: dict[str, Contender] = {
            "scree": lambda: (lambda x, w: xp.matmul(b.rows(x), w).values, (b.values, weights)),
            "loop over rows": lambda: (loop, (b.values, weights)),
        }
        dense: dict[str, Contender] = {
            "torch, one dense product": lambda: (lambda x, w: x @ w, (b.values, one))
        }
        if b.runs("grouped_mm", lacking(b.lib, b.dtype, ["bfloat16"])):
            found["grouped_mm"] = lambda: (
                lambda x, w: torch.nn.functional.grouped_mm(x, w, offs=ends),
                (b.values, weights),
            )
        done = 2.0 * b.total * b.width * m

        def truth() -> Any:
            return loop(b.lib.wide(b.values), b.lib.wide(weights))

        return Operation(
            "grouped product",
            found,
            truth=truth,
            flops=(done, 2 * done, 3 * done),
            yardsticks=dense,
        )

    return operation


def _gather(b: Batch) -> Operation:
    order = b.lib.make(b.rng.permutation(b.total), "int64")
    index, moved = b.rows(order), 2 * b.bytes + order.nbytes
    return Operation(
        "gather tokens",
        {
            "scree": lambda: (lambda x: scree.gather(b.rows(x), index).values, (b.values,)),
            "index_select": lambda: (lambda x: x.index_select(0, order), (b.values,)),
        },
        (moved, moved, 2 * moved),
    )


def _scatter(b: Batch) -> Operation:
    size = max(1, b.total // 2)
    order = b.lib.make(b.rng.integers(0, size, b.total), "int64")
    moved = 1.5 * b.bytes + order.nbytes
    return Operation(
        "scatter and add",
        {
            "scree": lambda: (lambda x: scree.scatter_add(x, order, size), (b.values,)),
            "index_add": lambda: (
                lambda x: x.new_zeros((size, *b.token)).index_add(0, order, x),
                (b.values,),
            ),
        },
        (moved, moved, 2 * moved),
    )


def _pack(b: Batch) -> Operation:
    import torch

    rows = tuple(b.values.split(b.lengths.tolist()))
    return Operation(
        "pack",
        {
            "scree": lambda: (lambda *x: scree.pack(x).values, rows),
            "torch.cat": lambda: (lambda *x: torch.cat(x), rows),
        },
        (2 * b.bytes, b.bytes, 3 * b.bytes),
    )


def _concat(b: Batch) -> Operation:
    import torch

    xp, lengths, other = b.lib.xp, b.lengths.tolist(), b.normal(b.total, *b.token)

    def by_hand(x: Any, y: Any) -> Any:
        return torch.cat(
            [part for pair in zip(x.split(lengths), y.split(lengths), strict=True) for part in pair]
        )

    return Operation(
        "concat along the rows",
        {
            "scree": lambda: (
                lambda x, y: xp.concat([b.rows(x), b.rows(y)], axis=1).values,
                (b.values, other),
            ),
            "split and torch.cat": lambda: (by_hand, (b.values, other)),
        },
        (4 * b.bytes, 4 * b.bytes, 8 * b.bytes),
    )


def _to_padded(b: Batch) -> Operation:
    import torch

    slots, lengths = b.bytes * b.mask.numel() / b.total, b.lengths.tolist()
    pad = torch.nn.utils.rnn.pad_sequence

    def transformers() -> tuple[Function, tuple[Any, ...]]:
        run, real = import_module(TRANSFORMERS)._pad_input, b.mask.flatten().nonzero().flatten()
        return lambda x: run(x, real, *b.mask.shape), (b.values,)

    found: dict[str, Contender] = {
        "scree": lambda: (lambda x: scree.to_padded(b.rows(x))[0], (b.values,)),
        "pad_sequence": lambda: (lambda x: pad(x.split(lengths), batch_first=True), (b.values,)),
        "torch.nested": lambda: (lambda x: b.nested(x).to_padded_tensor(0.0), (b.values,)),
    }
    if b.transformers:
        found["transformers, pad_input"] = transformers
    return Operation("to_padded", found, (b.bytes + slots, b.bytes + slots, 2 * (b.bytes + slots)))


def _from_padded(b: Batch) -> Operation:
    slots = b.bytes * b.mask.numel() / b.total

    def transformers() -> tuple[Function, tuple[Any, ...]]:
        run = import_module(TRANSFORMERS)._unpad_input
        return lambda x: run(x, b.mask)[0], (b.padded(),)

    found: dict[str, Contender] = {
        "scree": lambda: (
            lambda x: scree.from_padded(x, b.mask, total=b.total).values,
            (b.padded(),),
        ),
        "scree, total unknown": lambda: (
            lambda x: scree.from_padded(x, b.mask).values,
            (b.padded(),),
        ),
        "boolean mask": lambda: (lambda x: x[b.mask], (b.padded(),)),
    }
    if b.transformers:
        found["transformers, unpad_input"] = transformers
    return Operation("from_padded", found, (2 * b.bytes, b.bytes + slots, 3 * b.bytes + slots))


TEXT = "text"  # the batch of the command line

#: Who does what on it.
OPERATIONS: tuple[Callable[[Batch], Operation], ...] = (
    *map(_softmax, ("softmax", "log_softmax", "logsumexp")),
    *map(_reduction, ("sum", "mean", "max", "min", "prod")),
    *map(_search, ("argmax", "any", "all")),
    _cumulative_sum,
    _rope(),
    _rope(interleaved=True),
    _cross_entropy,
    _linear_cross_entropy(),
    _grouped(),
    _gather,
    _scatter,
    _pack,
    _concat,
    _to_padded,
    _from_padded,
)


def about(rows: int, mean: int, sigma: float = 0.6) -> Callable[[np.random.Generator], np.ndarray]:
    """Log-normal lengths."""
    return lambda rng: adding_up(rows, rows * mean, rng, sigma)


def alike(length: int) -> Callable[[np.random.Generator], np.ndarray]:
    """So many rows of one length that they hold 16M tokens."""
    return lambda rng: np.full((1 << 24) // length, length)


def _skewed(rng: np.random.Generator) -> np.ndarray:
    return np.concatenate([np.full(500_000, 4), [10_000_000], np.full(500_000, 4)])


#: What stresses some of them, on CUDA alone: lengths of rows, what a token is, and who does what.
HARD: dict[str, tuple[Sizes, tuple[Callable[[Batch], Operation], ...]]] = {
    **{f"rows of {n:,}": (Sizes(alike(n), (), "float32"), (_softmax("softmax"),)) for n in (1, 4, 64, 500, 4096, 65_536, 1 << 20)},
    "rows of about 500": (Sizes(about(32_768, 500), (), "float32"),
                          (_softmax("softmax"), *map(_reduction, ("sum", "max", "prod")))),
    "rows of about 500, x 16": (Sizes(about(4096, 500), (16,), "bfloat16"), (_softmax("softmax"),)),
    "10M tokens among 1M rows of 4": (Sizes(_skewed, (), "float32"), (_reduction("sum"), _reduction("max"))),
    "1M rows of 4": (Sizes(lambda rng: np.full(1_000_000, 4), (), "float32"), tuple(map(_reduction, ("sum", "max", "prod")))),
    "narrow tokens": (Sizes(about(512, 2048), (8,), "bfloat16"), (_gather, _scatter, _concat, _to_padded, _from_padded)),
    "numbers": (Sizes(about(512, 8192), (), "float32"), (_gather, _scatter, _concat, _to_padded, _from_padded)),
    "heads of queries and keys": (Sizes(about(16, 1024), (20, 128), "bfloat16"), (_rope(), _rope(interleaved=True))),
    **{f"{n} experts, {k:,} x {m:,}": (Sizes(about(n, 32_768 // n, 1.0), (k,), "bfloat16"), (_grouped(m),))
       for n, k, m in ((8, 2048, 4096), (64, 2048, 1408), (128, 2048, 768))},
    **{f"{n:,} classes": (Sizes(about(16, (1 << 25) // n), (n,), "bfloat16"), (_cross_entropy,))
       for n in (32_768, 50_257, 262_144)},
    **{f"product, {n:,} classes": (Sizes(about(16, 512), (2048,), "bfloat16"), (_linear_cross_entropy(n),))
       for n in (32_768, 131_072)},
}  # fmt: skip


def command(
    rows: Annotated[
        int, typer.Option(min=1, help="Rows of the batch; lengths are log-normal.")
    ] = 16,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens in all; 16,384 on CUDA, 2,048 on the CPU.")
    ] = None,
    width: Annotated[int, typer.Option(min=1, help="Numbers in a token.")] = 1024,
    dtype: Dtype = "",
    only: Annotated[
        str,
        typer.Option(
            help="Batches, by the first letters of their names; text is that of these options."
        ),
    ] = "",
    operations: Annotated[
        str, typer.Option(help="Operations, by the first letters of their names.")
    ] = "",
    device: Device = "auto",
    seed: Seed = 0,
    seconds: Seconds = SECONDS,
    patience: Patience = PATIENCE,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Softmax, reductions, scans, rope, grouped products, gather and scatter, packing: against PyTorch's ways to do it.

    Bytes are those that must pass; the share is that of a plain copy of as many bytes in the same run, forward and backward.
    Products have a rate of operations instead, and the share is that of the peak. On CUDA there are also batches that stress
    some kernels: row lengths, skew, experts, classes.
    """
    with Session("kernels", locals(), where(device)) as session:
        dtype = data_type(dtype, session.device)
        tokens = tokens or (16_384 if session.device == "cuda" else 2048)
        if quick:
            rows, tokens, width = 8, 256, 64
        base = Sizes(about(rows, tokens // rows), (width,), dtype)
        batches = {
            TEXT: (base, OPERATIONS),
            **(HARD if session.device == "cuda" and not quick else {}),
        }
        if len(batches) == 1:
            session.leave_out(
                f"{len(HARD)} batches that stress some kernels",
                NO_TIME if quick else "run on CUDA devices only",
            )
        chosen = {name: found for name, found in batches.items() if name.startswith(_words(only))}
        if not chosen:
            raise typer.BadParameter(
                f"--only: expected the beginnings of some of {', '.join(batches)}, got {only!r}"
            )
        there: list[str] = []
        for lib in wanted(session, "torch", ("torch",)):
            for what, (sizes, makers) in session.track(chosen.items()):
                batch = Batch(lib, sizes, seed, quick)
                case = {
                    "rows": len(batch.lengths),
                    "tokens": batch.total,
                    "width": batch.width,
                    "dtype": sizes.dtype,
                }
                for operation in (make(batch) for make in makers):
                    there.append(operation.name)
                    if operation.name.startswith(_words(operations)):
                        measure(session, lib, {"batch": what, **case}, operation)
                for who, why in batch.left_out.items():
                    session.leave_out(who, why)
        if there and not session.result.rows:
            raise typer.BadParameter(
                f"--operations: expected the beginnings of some of {', '.join(there)}, got {operations!r}"
            )


def _words(text: str) -> tuple[str, ...]:
    """The beginnings that a list option names; every name has one of none."""
    return tuple(x.strip() for x in text.split(",") if x.strip()) or ("",)


def tables(result: Result) -> list[Table]:
    """The values that say most: of what moves bytes, and of products."""
    products = {repr(row.case) for row in result.rows if "forward_flops" in row.values}
    kinds = (
        [row for row in result.rows if (repr(row.case) in products) is kind]
        for kind in (False, True)
    )
    return [table for rows in kinds for table in results.tables(rows, SHOWN)]


def pictures(result: Result) -> plots.Pictures:
    """Times of ours and of the two fastest others: along rows and elsewhere, on texts and on what stresses some of them."""
    found: plots.Pictures = {}
    for phase, hard, along in itertools.product(
        ("forward", "backward"), (False, True), (False, True)
    ):
        rows = [
            row
            for row in result.rows
            if f"{phase}_s" in row.values
            and row.who != COPY
            and (row.case.get("batch", TEXT) != TEXT) is hard
            and row.case["operation"].endswith(ALONG) is along
        ]
        if rows:
            found[f"kernels-{'hard-' if hard else ''}{'rows-' if along else ''}{phase}"] = partial(
                _paint, rows=rows, phase=phase
            )
    return found


def _paint(figure: Any, rows: list[Row], phase: str) -> None:
    groups = plots.grouped(
        rows, f"{phase}_s", plots.labels(rows, "rows", "tokens", "width", "dtype")
    )
    title = f"{phase.capitalize()}: less is better, a scale for each operation"
    plots.bars(figure.add_subplot(), plots.fastest(groups, 3), f"{phase}_s", title, apart=True)
