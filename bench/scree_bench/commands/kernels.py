"""`kernels`: what a transformer on ragged batches does beside attention and norms, against PyTorch's ways to do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import typer

import scree

from .. import plots
from ..lengths import adding_up
from ..libraries import Function, Library, wanted, where
from ..operations import Operation, measure
from ..options import Device, Out, Quick, Seed
from ..results import Result
from ..session import Session

Build = Callable[[], tuple[Function, tuple[Any, ...]]]


class Batch:
    """Rows of random tokens on PyTorch, and what several operations need of them."""

    def __init__(self, lib: Library, rows: int, total: int, width: int, dtype: str, seed: int) -> None:
        self.lib, self.rng, self.dtype = lib, np.random.default_rng(seed), dtype
        self.lengths = adding_up(rows, total, self.rng)
        self.total, self.longest, self.width = int(self.lengths.sum()), int(self.lengths.max()), width
        self.values = self.normal(self.total, width)
        offsets = lib.make(np.concatenate([[0], np.cumsum(self.lengths)]), "int32")
        self.like = scree.Array(self.values, offsets, max_length=self.longest)
        self.mask = lib.make(np.arange(self.longest) < self.lengths[:, None], "bool")
        self.bytes = float(self.values.numel() * self.values.element_size())

    def normal(self, *shape: int) -> Any:
        """Random numbers."""
        return self.lib.make(self.rng.standard_normal(shape, dtype=np.float32), self.dtype)

    def rows(self, values: Any) -> scree.Array:
        """Values as rows."""
        return self.like.with_values(values)

    def nested(self, values: Any) -> Any:
        """Values as PyTorch's nested tensor, with the bounds that spare it a look at the device."""
        import torch

        shape = {"min_seqlen": int(self.lengths.min()), "max_seqlen": self.longest}
        return torch.nested.nested_tensor_from_jagged(values, self.like.offsets.long(), **shape)

    def padded(self, fill: float = 0.0) -> Any:
        """The values as a padded batch."""
        return scree.to_padded(self.like, fill_value=fill)[0]

    def by_row(self, function: Callable[[np.ndarray], np.ndarray], put: Any = np.concatenate) -> np.ndarray:
        """A float64 loop over rows."""
        return put([function(x) for x in np.split(self.lib.arrays.read(self.values), np.cumsum(self.lengths)[:-1])])


def _softmax(b: Batch) -> Operation:
    import torch.nn.functional as F  # noqa: N812

    def plain(x: np.ndarray) -> np.ndarray:
        x = np.exp(x - x.max(0, initial=-np.inf))
        return x / x.sum(0)

    return Operation("softmax", {
        "scree": lambda: (lambda x: scree.softmax(b.rows(x)).values, (b.values,)),
        "scree, standard path": lambda: (lambda x: scree.softmax(b.rows(x), kernel="standard").values, (b.values,)),
        "torch.nested": lambda: (lambda x: F.softmax(b.nested(x), 1).values(), (b.values,)),
        "padded": lambda: (lambda x: F.softmax(x, 1)[b.mask], (b.padded(-np.inf),)),
    }, (2 * b.bytes, 3 * b.bytes, 5 * b.bytes), lambda: b.by_row(plain))  # fmt: skip


def _reduction(name: str) -> Callable[[Batch], Operation]:
    def operation(b: Batch) -> Operation:
        import torch

        xp, lengths = b.lib.xp, b.like.lengths.long()
        return Operation(f"{name} of rows", {
            "scree": lambda: (lambda x: getattr(xp, name)(b.rows(x), axis=1), (b.values,)),
            "segment_reduce": lambda: (lambda x: torch.segment_reduce(x, name, lengths=lengths, axis=0), (b.values,)),
            "torch.nested": lambda: (lambda x: getattr(b.nested(x), name if name == "sum" else "amax")(1), (b.values,)),
        }, (b.bytes, b.bytes, 2 * b.bytes), lambda: b.by_row(lambda x: getattr(x, name)(0), np.stack))  # fmt: skip

    return operation


def _cumulative_sum(b: Batch) -> Operation:
    xp = b.lib.xp
    return Operation("cumulative_sum", {
        "scree": lambda: (lambda x: xp.cumulative_sum(b.rows(x), axis=1).values, (b.values,)),
        "padded": lambda: (lambda x: x.cumsum(1)[b.mask], (b.padded(),)),
    }, (2 * b.bytes, 2 * b.bytes, 4 * b.bytes), lambda: b.by_row(lambda x: x.cumsum(0)))  # fmt: skip


def _rope(b: Batch) -> Operation:
    import torch

    dim = 64 if b.width % 64 == 0 else b.width
    heads = b.values.reshape(b.total, -1, dim)
    at = scree.positions(b.like)
    at = at.values if isinstance(at, scree.Array) else at

    def by_hand(x: Any) -> Any:
        angle = at.float()[:, None] * 10000.0 ** (-torch.arange(0, dim, 2, device=x.device) / dim)
        cos, sin = (t(angle)[:, None, :].to(x.dtype) for t in (torch.cos, torch.sin))
        low, high = x.chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    return Operation("rope", {
        "scree": lambda: (lambda x: scree.rope(b.rows(x)).values, (heads,)),
        "by hand": lambda: (by_hand, (heads,)),
    }, (2 * b.bytes, 2 * b.bytes, 4 * b.bytes))  # fmt: skip


def _grouped(b: Batch) -> Operation:
    import torch

    xp, wide, ends = b.lib.xp, b.width, b.like.offsets[1:]
    weights, lengths = b.normal(len(b.lengths), b.width, wide) / b.width**0.5, b.lengths.tolist()

    def loop(x: Any, w: Any) -> Any:
        return torch.cat([part @ w[i] for i, part in enumerate(x.split(lengths))])

    def truth() -> np.ndarray:
        w = b.lib.arrays.read(weights)
        return np.concatenate([x @ w[i] for i, x in enumerate(np.split(b.lib.arrays.read(b.values), np.cumsum(lengths)[:-1]))])

    found: dict[str, Build] = {
        "scree": lambda: (lambda x, w: xp.matmul(b.rows(x), w).values, (b.values, weights)),
        "loop over rows": lambda: (loop, (b.values, weights)),
    }
    if b.lib.device == "cuda" and b.dtype == "bfloat16":
        found["grouped_mm"] = lambda: (lambda x, w: torch.nn.functional.grouped_mm(x, w, offs=ends), (b.values, weights))
    return Operation("grouped product", found, (0, 0, 0), truth)


def _gather(b: Batch) -> Operation:
    order = b.lib.make(b.rng.permutation(b.total), "int64")
    index = b.rows(order)
    return Operation("gather tokens", {
        "scree": lambda: (lambda x: scree.gather(b.rows(x), index).values, (b.values,)),
        "index_select": lambda: (lambda x: x.index_select(0, order), (b.values,)),
    }, (2 * b.bytes, 2 * b.bytes, 4 * b.bytes))  # fmt: skip


def _scatter(b: Batch) -> Operation:
    size = max(1, b.total // 2)
    order = b.lib.make(b.rng.integers(0, size, b.total), "int64")
    return Operation("scatter and add", {
        "scree": lambda: (lambda x: scree.scatter_add(x, order, size), (b.values,)),
        "index_add": lambda: (lambda x: x.new_zeros((size, b.width)).index_add(0, order, x), (b.values,)),
    }, (1.5 * b.bytes, 1.5 * b.bytes, 3 * b.bytes))  # fmt: skip


def _pack(b: Batch) -> Operation:
    import torch

    rows = tuple(b.values.split(b.lengths.tolist()))
    return Operation("pack", {
        "scree": lambda: (lambda *x: scree.pack(x).values, rows),
        "torch.cat": lambda: (lambda *x: torch.cat(x), rows),
    }, (2 * b.bytes, b.bytes, 3 * b.bytes))  # fmt: skip


def _to_padded(b: Batch) -> Operation:
    import torch

    slots, lengths = b.bytes * b.mask.numel() / b.total, b.lengths.tolist()
    pad = torch.nn.utils.rnn.pad_sequence
    return Operation("to_padded", {
        "scree": lambda: (lambda x: scree.to_padded(b.rows(x))[0], (b.values,)),
        "pad_sequence": lambda: (lambda x: pad(x.split(lengths), batch_first=True), (b.values,)),
        "torch.nested": lambda: (lambda x: b.nested(x).to_padded_tensor(0.0), (b.values,)),
    }, (b.bytes + slots, b.bytes + slots, 2 * (b.bytes + slots)))  # fmt: skip


def _from_padded(b: Batch) -> Operation:
    slots = b.bytes * b.mask.numel() / b.total
    return Operation("from_padded", {
        "scree": lambda: (lambda x: scree.from_padded(x, b.mask).values, (b.padded(),)),
        "boolean mask": lambda: (lambda x: x[b.mask], (b.padded(),)),
    }, (2 * b.bytes, b.bytes + slots, 3 * b.bytes + slots))  # fmt: skip


OPERATIONS: tuple[Callable[[Batch], Operation], ...] = (
    _softmax, _reduction("sum"), _reduction("max"), _cumulative_sum, _rope, _grouped, _gather, _scatter, _pack, _to_padded,
    _from_padded,
)  # fmt: skip


def command(
    rows: Annotated[int, typer.Option(help="Rows of the batch; lengths are log-normal.")] = 16,
    tokens: Annotated[int, typer.Option(help="Tokens in all.")] = 16_384,
    width: Annotated[int, typer.Option(help="Numbers in a token.")] = 1024,
    dtype: Annotated[str, typer.Option(help="bfloat16 on CUDA and float32 on the CPU by default.")] = "",
    device: Device = "auto", seed: Seed = 0, quick: Quick = False, out: Out = None,
) -> None:  # fmt: skip
    """Softmax, reductions, scans, rope, grouped products, gather and scatter, packing: against PyTorch's ways to do it.

    Bytes are those that must pass; the share is that of a plain copy. The error of an operation that only moves tokens is not
    measured.
    """
    with Session("kernels", locals(), where(device)) as session:
        dtype = dtype or ("bfloat16" if session.device == "cuda" else "float32")
        if quick:
            rows, tokens, width = 8, 256, 64
        for lib in wanted(session, "torch", ("torch",)):
            batch = Batch(lib, rows, tokens, width, dtype, seed)
            for operation in session.track(OPERATIONS):
                measure(session, lib, {"rows": rows, "tokens": batch.total, "width": width, "dtype": dtype}, operation(batch))


def pictures(result: Result) -> plots.Pictures:
    """Times of each operation, forward and with its gradients."""

    def paint(figure: Any, value: str, title: str) -> None:
        plots.bars(figure.add_subplot(), plots.grouped(result.rows, value, plots.labels(result.rows)), value, title)

    found: plots.Pictures = {}
    for phase, title in (("forward", "Forward"), ("backward", "Backward"), ("both", "Forward and backward")):
        if any(f"{phase}_s" in row.values for row in result.rows):
            value, title = f"{phase}_s", f"{title}: less is better"
            found[f"kernels-{phase}"] = lambda figure, value=value, title=title: paint(figure, value, title)
    return found
