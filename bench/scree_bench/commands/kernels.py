"""`kernels`: operations of a transformer on ragged batches, without attention and norms."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cached_property, partial
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

import scree

from .. import jax_operations, plots, results
from ..lengths import lognormal_with_total
from ..libraries import (
    Function,
    MeasuredLibrary,
    installed_libraries,
    nested_tensor_maker,
    resolve_device,
    torch_compiled,
)
from ..measure import PATIENCE
from ..operations import COPY, PHASES, Contender, Operation, measure
from ..options import Device, Dtype, KernelBackend, Out, Patience, Quick, Seconds, Seed, data_type
from ..peers import NO_TIME, compiler_unavailable, importable, unavailable_on_cuda
from ..results import Result, Row, Table
from ..session import SECONDS, Session

SHOWN = (
    *(f"{phase}_{value}" for phase in PHASES for value in ("s", "of_copy_share", "share")),
    "forward_host_s",
    "both_host_s",
    "both_peak_bytes",
    "relative_error",
)
#: Module of transformers that converts to and from padded batches.
TRANSFORMERS = "transformers.modeling_flash_attention_utils"
#: Last words of the names of operations along rows.
ALONG_ROWS = ("softmax", "logsumexp", "of rows", "cumulative_sum")
#: Maximum number of rows for which the reference is computed, in a loop over them.
MAX_CHECKED_ROWS = 1000


class Sizes(NamedTuple):
    """Lengths of the rows, and the shape and data type of a token."""

    lengths: Callable[[np.random.Generator], np.ndarray]
    token: tuple[int, ...]
    dtype: str


class Batch:
    """Rows of random tokens on PyTorch or JAX, and derived inputs that several operations share."""

    def __init__(self, lib: MeasuredLibrary, sizes: Sizes, seed: int, quick: bool = False) -> None:
        self.lib, self.token, self.dtype = lib, sizes.token, sizes.dtype
        self.rng = np.random.default_rng(seed)
        self.lengths = sizes.lengths(self.rng)
        self.total, self.max_length = int(self.lengths.sum()), int(self.lengths.max())
        self.width = int(np.prod(sizes.token))
        self.normal = lib.normal(seed, sizes.dtype)
        self.values = self.normal(self.total, *sizes.token)
        offsets = lib.make(np.concatenate([[0], np.cumsum(self.lengths)]), "int32")
        self.like = scree.Array(self.values, offsets, max_length=self.max_length)
        self.bytes = float(self.total * self.width * self.values.dtype.itemsize)
        self.quick = quick
        self.left_out: dict[str, str] = {}

    @cached_property
    def mask(self) -> Any:
        """Mask (rows, longest) of the tokens of a padded batch."""
        return self.lib.make(np.arange(self.max_length) < self.lengths[:, None], "bool")

    def runs(self, contender: str, reason: str | None) -> bool:
        """Return whether a contender can run; if it cannot, record the reason."""
        self.left_out |= {contender: reason} if reason else {}
        return not reason

    @property
    def compiles(self) -> bool:
        """Return whether `torch.compile` can run, without ``--quick``."""
        return self.runs(
            "compiled forms", NO_TIME if self.quick else compiler_unavailable(self.lib)
        )

    @property
    def transformers(self) -> bool:
        """Return whether transformers is installed, without ``--quick``."""
        installed = importable("transformers")
        return self.runs(
            "transformers", NO_TIME if self.quick else None if installed else "cannot be imported"
        )

    def classes(self, count: int) -> Any:
        """Return a random class per token."""
        return self.lib.make(self.rng.integers(0, count, self.total), "int64")

    def rows(self, values: Any) -> scree.Array:
        """Return values as ragged rows."""
        return self.like.with_values(values)

    @cached_property
    def nested(self) -> Function:
        """Function that makes PyTorch's nested tensor of values."""
        return nested_tensor_maker(self.lib, self.lengths)

    def padded(self, fill: float = 0.0) -> Any:
        """Return the values as a padded batch."""
        return scree.to_padded(self.like, fill_value=fill)[0]

    def by_row(
        self, function: Callable[[Any], Any], join: str = "cat", values: Any = None
    ) -> Callable[[], Any] | None:
        """Return a float64 loop over the rows of tensors, or None if there are too many rows."""
        import torch

        if len(self.lengths) > MAX_CHECKED_ROWS:
            return None
        values_float64 = self.lib.as_float64(self.values if values is None else values)
        return lambda: getattr(torch, join)(
            [function(x) for x in values_float64.split(self.lengths.tolist())]
        )


def _softmax(name: str) -> Callable[[Batch], Operation]:
    """Return the operation `softmax`, `log_softmax` or `logsumexp` (one number per row)."""
    ragged, per_row = getattr(scree, name), name == "logsumexp"

    def operation(b: Batch) -> Operation:
        import torch

        torch_function = getattr(torch, name)

        def values(x: Any) -> Any:
            return x if per_row else x.values

        contenders: dict[str, Contender] = {
            "scree": lambda: (lambda x: values(ragged(b.rows(x))), (b.values,))
        }
        # On other devices scree takes the standard path anyway.
        if b.lib.device == "cuda":
            contenders["scree, standard path"] = lambda: (
                lambda x: values(ragged(b.rows(x), kernel="standard")),
                (b.values,),
            )
        if b.total == b.max_length * len(b.lengths):
            shape = (len(b.lengths), b.max_length, *b.values.shape[1:])
            contenders["torch, dense"] = lambda: (
                lambda x: torch_function(x, 1),
                (b.values.reshape(shape),),
            )
        else:
            # PyTorch has no log_softmax and no logsumexp along nested rows.
            if name == "softmax":
                contenders["torch.nested"] = lambda: (
                    lambda x: torch_function(b.nested(x), 1).values(),
                    (b.values,),
                )
            contenders["padded"] = lambda: (
                lambda x: torch_function(x, 1) if per_row else torch_function(x, 1)[b.mask],
                (b.padded(-np.inf),),
            )
        forward, backward = (1 if per_row else 2) * b.bytes, (2 if per_row else 3) * b.bytes
        expected = b.by_row(lambda x: torch_function(x, 0), "stack" if per_row else "cat")
        return Operation(name, contenders, (forward, backward, forward + backward), expected)

    return operation


def _reduction(name: str) -> Callable[[Batch], Operation]:
    def operation(b: Batch) -> Operation:
        import torch

        xp, lengths = b.lib.xp, b.like.lengths.long()
        torch_name = {"max": "amax", "min": "amin"}.get(name, name)
        # A product of numbers about 0 underflows to 0.
        values = 1 + b.values / 32 if name == "prod" else b.values
        # The backward passes of all but sum and mean read their input again.
        backward = (1 if name in ("sum", "mean") else 2) * b.bytes
        contenders: dict[str, Contender] = {
            "scree": lambda: (lambda x: getattr(xp, name)(b.rows(x), axis=1), (values,)),
            "segment_reduce": lambda: (
                lambda x: torch.segment_reduce(x, name, lengths=lengths, axis=0, unsafe=True),
                (values,),
            ),
            "torch.nested": lambda: (lambda x: getattr(b.nested(x), torch_name)(1), (values,)),
        }
        whole: dict[str, Contender] = {
            "torch, all rows as one": lambda: (lambda x: getattr(x, torch_name)(0), (values,))
        }
        expected = b.by_row(lambda x: getattr(x, torch_name)(0), "stack", values)
        return Operation(
            f"{name} of rows",
            contenders,
            (b.bytes, backward, b.bytes + backward),
            expected,
            yardsticks=whole,
        )

    return operation


def _search(name: str) -> Callable[[Batch], Operation]:
    """Return the operation `argmax`, `any` or `all`, which have no gradient."""

    def operation(b: Batch) -> Operation:
        xp, fill = b.lib.xp, {"argmax": -np.inf, "any": 0.0, "all": 1.0}[name]
        contenders: dict[str, Contender] = {
            "scree": lambda: (lambda x: getattr(xp, name)(b.rows(x), axis=1), (b.values,)),
            "padded": lambda: (lambda x: getattr(x, name)(1), (b.padded(fill),)),
        }
        whole: dict[str, Contender] = {
            "torch, all rows as one": lambda: (lambda x: getattr(x, name)(0), (b.values,))
        }
        expected = b.by_row(lambda x: getattr(x, name)(0).double(), "stack")
        return Operation(
            f"{name} of rows",
            contenders,
            (b.bytes, 0, 0),
            expected,
            yardsticks=whole,
            differentiable=False,
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
    """Return rope, with the halves of a head or adjacent features as pairs.

    One compiled form gets cosines and sines as inputs; another computes them, as scree does.
    """

    def operation(b: Batch) -> Operation:
        import torch

        dim, offsets = b.values.shape[-1] if b.values.ndim > 2 else 64, b.like.offsets
        heads = b.values.reshape(b.total, -1, dim)
        frequencies = 10000.0 ** (-torch.arange(0, dim, 2, device=heads.device) / dim)

        def rotate(x: Any, cos: Any, sin: Any) -> Any:
            low, high = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, -1)
            parts = low * cos - high * sin, high * cos + low * sin
            return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)

        def angles() -> Any:
            at = torch.arange(b.total, dtype=offsets.dtype, device=heads.device)
            row = torch.searchsorted(offsets, at, right=True) - 1
            return (at - offsets[row]).float()[:, None, None] * frequencies

        def factors(angle: Any) -> tuple[Any, Any]:
            return angle.cos().to(heads.dtype), angle.sin().to(heads.dtype)

        def computed(x: Any) -> Any:
            return rotate(x, *factors(angles()))

        cos, sin = factors(angles())

        def precomputed(x: Any) -> Any:
            return rotate(x, cos, sin)

        def expected() -> Any:
            angle = angles().double()
            return rotate(b.lib.as_float64(heads), angle.cos(), angle.sin())

        contenders: dict[str, Contender] = {
            "scree": lambda: (
                lambda x: scree.rope(b.rows(x), interleaved=interleaved).values,
                (heads,),
            ),
            "by hand": lambda: (computed, (heads,)),
            "by hand, cos and sin given": lambda: (precomputed, (heads,)),
        }
        if b.compiles:
            contenders["compiled"] = lambda: (torch_compiled(computed), (heads,))
            contenders["compiled, cos and sin given"] = lambda: (
                torch_compiled(precomputed),
                (heads,),
            )
        name = "rope, neighbors as pairs" if interleaved else "rope"
        return Operation(name, contenders, (2 * b.bytes, 2 * b.bytes, 4 * b.bytes), expected)

    return operation


def _cross_entropy(b: Batch) -> Operation:
    """Return the cross entropy with the features of a token as its logits."""
    import torch.nn.functional as F

    targets = b.classes(b.width)

    def eager(x: Any) -> Any:
        return F.cross_entropy(x.float(), targets)

    contenders: dict[str, Contender] = {
        "scree": lambda: (lambda x: scree.cross_entropy(b.rows(x), b.rows(targets)), (b.values,)),
        "torch": lambda: (eager, (b.values,)),
    }
    if b.compiles:
        contenders["torch, compiled"] = lambda: (torch_compiled(eager), (b.values,))
    if b.dtype == "bfloat16":
        contenders["torch, in bfloat16"] = lambda: (
            lambda x: F.cross_entropy(x, targets),
            (b.values,),
        )
    traffic = b.bytes, 2 * b.bytes, 3 * b.bytes
    return Operation(
        "cross_entropy",
        contenders,
        traffic,
        lambda: F.cross_entropy(b.lib.as_float64(b.values), targets),
    )


def _linear_cross_entropy(classes: int | None = None) -> Callable[[Batch], Operation]:
    """Return the cross entropy of tokens times weights, by default with two classes per feature."""

    def operation(b: Batch) -> Operation:
        import torch.nn.functional as F

        count = classes or 2 * b.width
        targets, weight = b.classes(count), b.normal(count, b.width) / b.width**0.5

        def eager(x: Any, w: Any) -> Any:
            return F.cross_entropy((x @ w.T).float(), targets)

        def liger() -> tuple[Function, tuple[Any, ...]]:
            run = import_module(
                "liger_kernel.ops.fused_linear_cross_entropy"
            ).LigerFusedLinearCrossEntropyFunction.apply
            return lambda x, w: run(x, w, targets)[0], (b.values, weight)

        contenders: dict[str, Contender] = {
            "scree": lambda: (
                lambda x, w: scree.linear_cross_entropy(b.rows(x), w, b.rows(targets)),
                (b.values, weight),
            ),
            "torch": lambda: (eager, (b.values, weight)),
        }
        if b.compiles:
            contenders["torch, compiled"] = lambda: (torch_compiled(eager), (b.values, weight))
        if b.dtype == "bfloat16":
            contenders["torch, in bfloat16"] = lambda: (
                lambda x, w: F.cross_entropy(x @ w.T, targets),
                (b.values, weight),
            )
        if b.runs("liger_kernel", unavailable_on_cuda(b.lib, b.dtype, modules=["liger_kernel"])):
            contenders["liger_kernel"] = liger
        flops = 2.0 * b.total * b.width * count
        return Operation(
            "linear_cross_entropy",
            contenders,
            flops=(flops, 2 * flops, 3 * flops),
            peak=True,
            reference=lambda: F.cross_entropy(
                b.lib.as_float64(b.values) @ b.lib.as_float64(weight).T, targets
            ),
        )

    return operation


def _grouped(out_features: int | None = None) -> Callable[[Batch], Operation]:
    """Return the product of each row, one per expert, with a separate matrix (width, out_features)."""

    def operation(b: Batch) -> Operation:
        import torch

        xp, ends, lengths = b.lib.xp, b.like.offsets[1:], b.lengths.tolist()
        columns = out_features or b.width
        weights = b.normal(len(b.lengths), b.width, columns) / b.width**0.5
        single_weight = weights[0]

        def loop(x: Any, w: Any) -> Any:
            return torch.cat([part @ w[i] for i, part in enumerate(x.split(lengths))])

        contenders: dict[str, Contender] = {
            "scree": lambda: (lambda x, w: xp.matmul(b.rows(x), w).values, (b.values, weights)),
            "loop over rows": lambda: (loop, (b.values, weights)),
        }
        yardsticks: dict[str, Contender] = {
            "torch, one dense product": lambda: (lambda x, w: x @ w, (b.values, single_weight))
        }
        if b.runs("grouped_mm", unavailable_on_cuda(b.lib, b.dtype, ["bfloat16"])):
            contenders["grouped_mm"] = lambda: (
                lambda x, w: torch.nn.functional.grouped_mm(x, w, offs=ends),
                (b.values, weights),
            )
        flops = 2.0 * b.total * b.width * columns

        def expected() -> Any:
            return loop(b.lib.as_float64(b.values), b.lib.as_float64(weights))

        return Operation(
            "grouped product",
            contenders,
            reference=expected,
            flops=(flops, 2 * flops, 3 * flops),
            yardsticks=yardsticks,
        )

    return operation


def _gather(b: Batch) -> Operation:
    order = b.lib.make(b.rng.permutation(b.total), "int64")
    index, traffic = b.rows(order), 2 * b.bytes + order.nbytes
    return Operation(
        "gather tokens",
        {
            "scree": lambda: (lambda x: scree.gather(b.rows(x), index).values, (b.values,)),
            "index_select": lambda: (lambda x: x.index_select(0, order), (b.values,)),
        },
        (traffic, traffic, 2 * traffic),
    )


def _scatter(b: Batch) -> Operation:
    size = max(1, b.total // 2)
    order = b.lib.make(b.rng.integers(0, size, b.total), "int64")
    traffic = 1.5 * b.bytes + order.nbytes
    return Operation(
        "scatter and add",
        {
            "scree": lambda: (lambda x: scree.scatter_add(x, order, size), (b.values,)),
            "index_add": lambda: (
                lambda x: x.new_zeros((size, *b.token)).index_add(0, order, x),
                (b.values,),
            ),
        },
        (traffic, traffic, 2 * traffic),
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
        run = import_module(TRANSFORMERS)._pad_input
        token_indices = b.mask.flatten().nonzero().flatten()
        return lambda x: run(x, token_indices, *b.mask.shape), (b.values,)

    contenders: dict[str, Contender] = {
        "scree": lambda: (lambda x: scree.to_padded(b.rows(x))[0], (b.values,)),
        "pad_sequence": lambda: (lambda x: pad(x.split(lengths), batch_first=True), (b.values,)),
        "torch.nested": lambda: (lambda x: b.nested(x).to_padded_tensor(0.0), (b.values,)),
    }
    if b.transformers:
        contenders["transformers, pad_input"] = transformers
    return Operation(
        "to_padded", contenders, (b.bytes + slots, b.bytes + slots, 2 * (b.bytes + slots))
    )


def _from_padded(b: Batch) -> Operation:
    slots = b.bytes * b.mask.numel() / b.total

    def transformers() -> tuple[Function, tuple[Any, ...]]:
        run = import_module(TRANSFORMERS)._unpad_input
        return lambda x: run(x, b.mask)[0], (b.padded(),)

    contenders: dict[str, Contender] = {
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
        contenders["transformers, unpad_input"] = transformers
    return Operation("from_padded", contenders, (2 * b.bytes, b.bytes + slots, 3 * b.bytes + slots))


#: Name of the batch that the command-line options describe.
TEXT = "text"

#: Operations along the rows of this batch, each with its contenders. A token may be a number.
ALONG_ROWS_OPERATIONS: tuple[Callable[[Batch], Operation], ...] = (
    *map(_softmax, ("softmax", "log_softmax", "logsumexp")),
    *map(_reduction, ("sum", "mean", "max", "min", "prod")),
    *map(_search, ("argmax", "any", "all")),
    _cumulative_sum,
)

#: All operations on this batch.
OPERATIONS: tuple[Callable[[Batch], Operation], ...] = (
    *ALONG_ROWS_OPERATIONS,
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
    """Return a function that draws log-normal lengths of about this mean."""
    return lambda rng: lognormal_with_total(rows, rows * mean, rng, sigma)


def equal_lengths(length: int) -> Callable[[np.random.Generator], np.ndarray]:
    """Return a function that makes rows of one length, 16M tokens in total."""
    return lambda rng: np.full((1 << 24) // length, length)


def _skewed(rng: np.random.Generator) -> np.ndarray:
    return np.concatenate([np.full(500_000, 4), [10_000_000], np.full(500_000, 4)])


#: Batches that stress some kernels, only on CUDA: name -> sizes, and operations.
HARD: dict[str, tuple[Sizes, tuple[Callable[[Batch], Operation], ...]]] = {
    **{f"rows of {n:,}": (Sizes(equal_lengths(n), (), "float32"), (_softmax("softmax"),))
       for n in (1, 4, 64, 500, 4096, 65_536, 1 << 20)},
    "rows of about 500": (Sizes(about(32_768, 500), (), "float32"),
                          (_softmax("softmax"), *map(_reduction, ("sum", "max", "prod")))),
    "rows of about 500, x 16": (Sizes(about(4096, 500), (16,), "bfloat16"), (_softmax("softmax"),)),
    "10M tokens among 1M rows of 4": (Sizes(_skewed, (), "float32"),
                                      (_reduction("sum"), _reduction("max"))),
    "1M rows of 4": (Sizes(lambda rng: np.full(1_000_000, 4), (), "float32"),
                     tuple(map(_reduction, ("sum", "max", "prod")))),
    "narrow tokens": (Sizes(about(512, 2048), (8,), "bfloat16"),
                      (_gather, _scatter, _concat, _to_padded, _from_padded)),
    "numbers": (Sizes(about(512, 8192), (), "float32"),
                (_gather, _scatter, _concat, _to_padded, _from_padded)),
    "heads of queries and keys": (Sizes(about(16, 1024), (20, 128), "bfloat16"),
                                  (_rope(), _rope(interleaved=True))),
    **{f"{n} experts, {k:,} x {m:,}": (Sizes(about(n, 32_768 // n, 1.0), (k,), "bfloat16"),
                                       (_grouped(m),))
       for n, k, m in ((8, 2048, 4096), (64, 2048, 1408), (128, 2048, 768))},
    **{f"{n:,} classes": (Sizes(about(16, (1 << 25) // n), (n,), "bfloat16"), (_cross_entropy,))
       for n in (32_768, 50_257, 262_144)},
    **{f"product, {n:,} classes": (Sizes(about(16, 512), (2048,), "bfloat16"),
                                   (_linear_cross_entropy(n),))
       for n in (32_768, 131_072)},
}  # fmt: skip


def command(
    rows: Annotated[
        int, typer.Option(min=1, help="Rows of the batch; lengths are log-normal.")
    ] = 16,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Total tokens; 16,384 on CUDA, 2,048 on the CPU.")
    ] = None,
    width: Annotated[
        int,
        typer.Option(
            min=0, help="Features per token; 0 for numbers, and operations along rows only."
        ),
    ] = 1024,
    dtype: Dtype = "",
    only: Annotated[
        str, typer.Option(help="Batches, by prefixes of names; text is the batch of these options.")
    ] = "",
    operations: Annotated[str, typer.Option(help="Operations, by prefixes of names.")] = "",
    backend: KernelBackend = "torch",
    device: Device = "auto",
    seed: Seed = 0,
    seconds: Seconds = SECONDS,
    patience: Patience = PATIENCE,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Measure softmax, reductions, scans, rope, products, gather and packing against PyTorch.

    Only necessary bytes count, forward and backward. The share is relative to a plain copy of as
    many bytes in the same run. Products have a rate of operations instead, relative to the peak of
    matrix products. On CUDA additional batches stress some kernels: row lengths, skew, experts,
    classes.
    """
    with Session("kernels", locals(), resolve_device(device)) as session:
        dtype = data_type(dtype, session.device)
        tokens = tokens or (16_384 if session.device == "cuda" else 2048)
        if quick:
            rows, tokens, width = 8, 256, min(width, 64)
        base = Sizes(about(rows, tokens // rows), (width,) if width else (), dtype)
        batches = {
            TEXT: (base, OPERATIONS if width else ALONG_ROWS_OPERATIONS),
            **(HARD if session.device == "cuda" and not quick else {}),
        }
        if len(batches) == 1:
            session.leave_out(
                f"{len(HARD)} batches that stress some kernels",
                NO_TIME if quick else "run on CUDA devices only",
            )
        chosen = {
            name: entry for name, entry in batches.items() if name.startswith(_prefixes(only))
        }
        if not chosen:
            raise typer.BadParameter(
                f"--only: expected the beginnings of some of {', '.join(batches)}, got {only!r}"
            )
        names: list[str] = []
        for lib in installed_libraries(session, backend, ("torch", "jax"), on_cuda=("jax",)):
            for what, (sizes, makers) in session.track(chosen.items()):
                if lib.name == "jax":
                    if what != TEXT:
                        session.leave_out(f"{what} on jax", "runs on PyTorch only")
                        continue
                    makers = jax_operations.OPERATIONS
                    if not width:
                        makers = jax_operations.ALONG_ROWS_OPERATIONS
                batch = Batch(lib, sizes, seed, quick)
                case = {
                    "rows": len(batch.lengths),
                    "tokens": batch.total,
                    "width": batch.width,
                    "dtype": sizes.dtype,
                }
                for operation in (make(batch) for make in makers):
                    names.append(operation.name)
                    if operation.name.startswith(_prefixes(operations)):
                        measure(session, lib, {"batch": what, **case}, operation)
                for contender, reason in batch.left_out.items():
                    session.leave_out(contender, reason)
        if names and not session.result.rows:
            raise typer.BadParameter(
                f"--operations: expected the beginnings of some of {', '.join(names)}, "
                f"got {operations!r}"
            )


def _prefixes(text: str) -> tuple[str, ...]:
    """Return the prefixes in a list option; without any, the empty one, which matches all."""
    return tuple(x.strip() for x in text.split(",") if x.strip()) or ("",)


def tables(result: Result) -> list[Table]:
    """Return the main values: of operations bound by bandwidth, and of products."""
    products = {repr(row.case) for row in result.rows if "forward_flops" in row.values}
    kinds = (
        [row for row in result.rows if (repr(row.case) in products) is kind]
        for kind in (False, True)
    )
    return [table for rows in kinds for table in results.tables(rows, SHOWN)]


def pictures(result: Result) -> plots.Pictures:
    """Return pictures of the times of scree and of the two fastest peers.

    There is one picture each for operations along rows and others, on texts and on stress batches.
    """
    drawn: plots.Pictures = {}
    for phase, hard, along in itertools.product(
        ("forward", "backward"), (False, True), (False, True)
    ):
        rows = [
            row
            for row in result.rows
            if f"{phase}_s" in row.values
            and row.who != COPY
            and (row.case.get("batch", TEXT) != TEXT) is hard
            and row.case["operation"].endswith(ALONG_ROWS) is along
        ]
        if rows:
            drawn[f"kernels-{'hard-' if hard else ''}{'rows-' if along else ''}{phase}"] = partial(
                _paint, rows=rows, phase=phase
            )
    return drawn


def _paint(figure: Any, rows: list[Row], phase: str) -> None:
    groups = plots.grouped(
        rows, f"{phase}_s", plots.labels(rows, "rows", "tokens", "width", "dtype")
    )
    title = f"{phase.capitalize()}: less is better, one scale per operation"
    plots.bars(figure.add_subplot(), plots.fastest(groups, 3), f"{phase}_s", title, apart=True)
