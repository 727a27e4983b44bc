"""The measurement: the same paragraphs as ragged and as padded batches, on one backend after another."""

import itertools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import numpy as np

import scree

from ..backends import backend
from . import DemoError, model, padded
from .text import Tokenizer

#: The backends, and where each has an `asarray` that takes NumPy arrays.
BACKENDS = {
    "numpy": "numpy", "torch": "torch", "jax": "jax.numpy", "mlx": "scree.backends.mlx.namespace",
    "array_api_strict": "array_api_strict",
}  # fmt: skip
BATCH = 32  # paragraphs a batch, as sentence-transformers has it
PASSES = 2  # over all batches; the first one warms up, the faster one counts
TOLERANCE = 1e-5  # between any two embeddings of one paragraph
PAIRS = 3  # of paragraphs that are shown, of so many different words, of which at most so large a part is in both
PAIR_WORDS, PAIR_SHARED = 8, 1 / 3

#: The three ways to run a batch: as ragged rows, padded in the order given, padded after sorting all paragraphs by length.
WAYS = ("ragged", "padded", "sorted")


@dataclass(frozen=True, slots=True)
class Size:
    """What one way computes on, whatever the backend.

    Attributes
    ----------
    tokens
        Tokens of all batches, padding included.
    activations
        Bytes that one layer reads and writes in the largest batch: its input, queries, keys, values, context, the wide
        hidden state of the feed-forward network, each once.
    scores
        Bytes of that layer's attention scores, where they stand in memory all at once; the ragged path holds one tile.
    """

    tokens: int
    activations: int
    scores: int


@dataclass(frozen=True, slots=True)
class Measured:
    """One backend: seconds and real tokens per second of each way, and the largest differences between embeddings."""

    version: str
    seconds: dict[str, float]
    tokens_per_second: dict[str, float]
    from_padded: float
    from_first_backend: float


@dataclass(frozen=True, slots=True)
class Pair:
    """Two paragraphs that are alike, and the cosine between their embeddings."""

    similarity: float
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Result:
    """Everything that the demo says; ``--json`` prints it as it is."""

    scree: str
    weights: str
    seed: int
    paragraphs: int
    tokens: int
    shortest: int
    median: float
    longest: int
    batch: int
    sizes: dict[str, Size]
    backends: dict[str, Measured]
    not_installed: list[str]
    largest_difference: float
    tolerance: float
    nearest: list[Pair]


def installed(wanted: str) -> tuple[list[str], list[str]]:
    """The backends to run for ``--backend``, and those that "all" leaves out because they are not there."""
    there = {name: find_spec(name) is not None for name in BACKENDS}
    if wanted == "all":
        return [name for name in BACKENDS if there[name]], [
            name for name in BACKENDS if not there[name]
        ]
    if not there[wanted]:
        raise DemoError(
            f"--backend: {wanted} is not installed; install it, or leave the option out to run on NumPy"
        )
    return [wanted], []


def measure(
    weights: dict[str, np.ndarray],
    origin: str,
    texts: Sequence[str],
    tokenize: Tokenizer,
    wanted: str,
    seed: int,
    track: Callable[[str, int], Callable[[], None]] = lambda name, steps: lambda: None,
) -> Result:
    """Embed the texts in every way on every backend that is wanted.

    Parameters
    ----------
    weights, origin
        The encoder's weights and what they are called in the result.
    texts, tokenize
        The paragraphs in the order in which batches take them, and what makes tokens of them.
    wanted
        A name in `BACKENDS`, or "all".
    seed
        Only noted in the result.
    track
        ``track(backend, steps)`` gives the function that is called after each of so many steps.
    """
    names, missing = installed(wanted)
    rows = [np.asarray(ids, dtype=np.int32) for ids in tokenize(texts)]
    lengths = np.asarray([row.size for row in rows])
    given = np.arange(len(rows))
    orders = {"ragged": given, "padded": given, "sorted": np.argsort(lengths, kind="stable")}
    batches = {
        way: [order[i : i + BATCH] for i in range(0, len(rows), BATCH)]
        for way, order in orders.items()
    }
    embeddings: dict[str, dict[str, np.ndarray]] = {}
    measured: dict[str, Measured] = {}
    for name in names:
        steps = PASSES * sum(map(len, batches.values()))
        out, seconds = _on_backend(name, weights, rows, batches, track(name, steps))
        embeddings[name] = out
        measured[name] = Measured(
            version=metadata.version(name),
            seconds=seconds,
            tokens_per_second={way: int(lengths.sum()) / seconds[way] for way in WAYS},
            from_padded=_difference(out.values()),
            from_first_backend=_difference([out["ragged"], embeddings[names[0]]["ragged"]]),
        )
    return Result(
        scree=scree.__version__,
        weights=origin,
        seed=seed,
        paragraphs=len(rows),
        tokens=int(lengths.sum()),
        shortest=int(lengths.min()),
        median=float(np.median(lengths)),
        longest=int(lengths.max()),
        batch=BATCH,
        sizes={way: _size(way, [lengths[b] for b in batches[way]], weights) for way in WAYS},
        backends=measured,
        not_installed=missing,
        largest_difference=_difference([e for out in embeddings.values() for e in out.values()]),
        tolerance=TOLERANCE,
        nearest=nearest(texts, embeddings[names[0]]["ragged"]),
    )


def _on_backend(
    name: str,
    weights: dict[str, np.ndarray],
    rows: list[np.ndarray],
    batches: dict[str, list[np.ndarray]],
    step: Callable[[], None],
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Embeddings (paragraphs, width) of each way, and its seconds."""
    asarray = import_module(BACKENDS[name]).asarray
    w = {key: asarray(x) for key, x in weights.items()}
    width = weights["embeddings.LayerNorm.weight"].shape[0]
    out = {way: np.zeros((len(rows), width), np.float32) for way in WAYS}
    seconds = {way: np.full(len(batches[way]), np.inf) for way in WAYS}
    for _, i, way in itertools.product(
        range(PASSES), range(len(batches["ragged"])), WAYS
    ):  # interleaved
        members = batches[way][i]
        tokens = scree.pack([asarray(rows[j]) for j in members])
        encode = _encoder(w, tokens, way)
        start = time.perf_counter()
        found = encode()
        found = backend(found).read(found)  # waits for libraries that run behind
        seconds[way][i] = min(seconds[way][i], time.perf_counter() - start)
        out[way][members] = found
        step()
    return out, {way: float(seconds[way].sum()) for way in WAYS}


def _encoder(w: model.Weights, tokens: scree.Array, way: str) -> Callable[[], Any]:
    """The run of one batch, everything about its shape being ready."""
    if way == "ragged":
        return lambda: model.encode(w, tokens)
    ids, mask = scree.to_padded(tokens)
    return lambda: padded.encode(w, ids, mask)


def _size(way: str, lengths: list[np.ndarray], weights: dict[str, np.ndarray]) -> Size:
    width, wide = weights["encoder.layer.0.intermediate.dense.weight"].shape
    heads, item = width // model.HEAD_DIM, 4
    if way == "ragged":
        tokens, scores = [int(x.sum()) for x in lengths], 0
    else:
        tokens = [x.size * int(x.max()) for x in lengths]
        scores = max(x.size * heads * int(x.max()) ** 2 * item for x in lengths)
    return Size(sum(tokens), max(tokens) * (5 * width + wide) * item, scores)


def _difference(arrays: Any) -> float:
    """The largest difference between any two of the arrays."""
    stacked = np.stack(list(arrays))
    return float(np.max(stacked.max(axis=0) - stacked.min(axis=0)))


def nearest(texts: Sequence[str], embeddings: np.ndarray) -> list[Pair]:
    """The paragraphs most alike in meaning though not in words, each at most once."""
    words = [frozenset(re.findall(r"\w+", text.lower())) for text in texts]
    alike = np.triu(embeddings @ embeddings.T, k=1)
    pairs: list[Pair] = []
    used: set[int] = set()
    for place in np.argsort(-alike, axis=None).tolist():
        i, j = divmod(place, len(texts))
        if len(pairs) == PAIRS or alike[i, j] <= 0:
            break
        fewest, shared = (
            min(len(words[i]), len(words[j])),
            len(words[i] & words[j]) / len(words[i] | words[j]),
        )
        if fewest >= PAIR_WORDS and shared <= PAIR_SHARED and not used & {i, j}:
            pairs.append(Pair(float(alike[i, j]), texts[i], texts[j]))
            used |= {i, j}
    return pairs
