"""The measurement: the same paragraphs as ragged and as padded batches, on each backend."""

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

#: The backends, and the module of each whose `asarray` takes NumPy arrays.
BACKENDS = {
    "numpy": "numpy", "torch": "torch", "jax": "jax.numpy", "mlx": "scree.backends.mlx.namespace",
    "array_api_strict": "array_api_strict",
}  # fmt: skip
BATCH = 32  # paragraphs per batch, the default of sentence-transformers
PASSES = 2  # over all batches; the first pass warms up, and the faster time of each batch counts
TOLERANCE = 1e-5  # largest difference between any two embeddings of one paragraph
MAX_PAIRS = 3  # nearest paragraphs in the result
MIN_PAIR_WORDS = 8  # distinct words of each paragraph of a pair
MAX_SHARED_WORDS = 1 / 3  # words of both paragraphs, as a fraction of the words of either

#: Batch layouts: ragged, padded in input order, and padded after sorting all paragraphs by length.
LAYOUTS = ("ragged", "padded", "sorted")


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of the data of one batch layout, the same on every backend.

    Attributes
    ----------
    tokens
        Tokens of all batches, padding included.
    activations
        Bytes that one layer reads and writes in the largest batch. Input, queries, keys, values,
        context, and the wide hidden state of the feed-forward network count once each.
    scores
        Bytes of that layer's attention scores if they are in memory all at once. 0 for the ragged
        layout, which holds one tile.
    """

    tokens: int
    activations: int
    scores: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """Times and differences of one backend.

    Attributes
    ----------
    version
        Version of the library.
    seconds
        Time of all batches, by batch layout.
    tokens_per_second
        Tokens without padding per second, by batch layout.
    from_padded
        Largest difference between the embeddings of the three batch layouts.
    from_first_backend
        Largest difference from the ragged embeddings of the first backend.
    """

    version: str
    seconds: dict[str, float]
    tokens_per_second: dict[str, float]
    from_padded: float
    from_first_backend: float


@dataclass(frozen=True, slots=True)
class Pair:
    """Two similar paragraphs, and the cosine of their embeddings."""

    similarity: float
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Result:
    """The result of the demo; ``--json`` prints all fields."""

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
    backends: dict[str, Measurement]
    not_installed: list[str]
    largest_difference: float
    tolerance: float
    nearest: list[Pair]


def select_backends(choice: str) -> tuple[list[str], list[str]]:
    """Return the backends to run for the option ``--backend``.

    Parameters
    ----------
    choice
        A name in `BACKENDS`, or "all" for every installed backend.

    Returns
    -------
    selected, missing
        Names of the backends to run, and names of the backends that "all" omits because they are
        not installed.

    Raises
    ------
    DemoError
        If the chosen backend is not installed.
    """
    is_installed = {name: find_spec(name) is not None for name in BACKENDS}
    if choice == "all":
        selected = [name for name in BACKENDS if is_installed[name]]
        return selected, [name for name in BACKENDS if not is_installed[name]]
    if not is_installed[choice]:
        raise DemoError(
            f"--backend: {choice} is not installed; install it, or omit the option to run on NumPy"
        )
    return [choice], []


def measure(
    weights: dict[str, np.ndarray],
    origin: str,
    texts: Sequence[str],
    tokenize: Tokenizer,
    choice: str,
    seed: int,
    track: Callable[[str, int], Callable[[], None]] = lambda name, steps: lambda: None,
) -> Result:
    """Embed the texts in every batch layout on every chosen backend.

    Parameters
    ----------
    weights, origin
        The encoder's weights, and their name in the result.
    texts, tokenize
        The paragraphs in batch order, and the tokenizer.
    choice
        A name in `BACKENDS`, or "all".
    seed
        Seed of the sample, for the result only.
    track
        ``track(backend, steps)`` returns a function; `measure` calls it after each of the steps.

    Returns
    -------
    Result
        Sizes, times, differences and nearest paragraphs.
    """
    names, missing = select_backends(choice)
    rows = [np.asarray(ids, dtype=np.int32) for ids in tokenize(texts)]
    lengths = np.asarray([row.size for row in rows])
    input_order = np.arange(len(rows))
    orders = {
        "ragged": input_order,
        "padded": input_order,
        "sorted": np.argsort(lengths, kind="stable"),
    }
    batches = {
        layout: [order[i : i + BATCH] for i in range(0, len(rows), BATCH)]
        for layout, order in orders.items()
    }
    embeddings: dict[str, dict[str, np.ndarray]] = {}
    measurements: dict[str, Measurement] = {}
    for name in names:
        steps = PASSES * sum(map(len, batches.values()))
        out, seconds = _embed_all(name, weights, rows, batches, track(name, steps))
        embeddings[name] = out
        measurements[name] = Measurement(
            version=metadata.version(name),
            seconds=seconds,
            tokens_per_second={layout: int(lengths.sum()) / seconds[layout] for layout in LAYOUTS},
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
        sizes={
            layout: _size(layout, [lengths[batch] for batch in batches[layout]], weights)
            for layout in LAYOUTS
        },
        backends=measurements,
        not_installed=missing,
        largest_difference=_difference([e for out in embeddings.values() for e in out.values()]),
        tolerance=TOLERANCE,
        nearest=nearest(texts, embeddings[names[0]]["ragged"]),
    )


def _embed_all(
    name: str,
    weights: dict[str, np.ndarray],
    rows: list[np.ndarray],
    batches: dict[str, list[np.ndarray]],
    step: Callable[[], None],
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return the embeddings (paragraphs, width) and the seconds of each batch layout."""
    asarray = import_module(BACKENDS[name]).asarray
    w = {key: asarray(x) for key, x in weights.items()}
    width = weights["embeddings.LayerNorm.weight"].shape[0]
    out = {layout: np.zeros((len(rows), width), np.float32) for layout in LAYOUTS}
    seconds = {layout: np.full(len(batches[layout]), np.inf) for layout in LAYOUTS}
    # The layouts alternate, so that a change of the clock affects all of them.
    for _, i, layout in itertools.product(range(PASSES), range(len(batches["ragged"])), LAYOUTS):
        batch = batches[layout][i]
        tokens = scree.pack([asarray(rows[j]) for j in batch])
        encode = _encoder(w, tokens, layout)
        start = time.perf_counter()
        embeddings = encode()
        # Asynchronous libraries have computed the embeddings only after the read.
        embeddings = backend(embeddings).read(embeddings)
        seconds[layout][i] = min(seconds[layout][i], time.perf_counter() - start)
        out[layout][batch] = embeddings
        step()
    return out, {layout: float(seconds[layout].sum()) for layout in LAYOUTS}


def _encoder(w: model.Weights, tokens: scree.Array, layout: str) -> Callable[[], Any]:
    """Return a function that encodes the batch; padding happens before, outside the timing."""
    if layout == "ragged":
        return lambda: model.encode(w, tokens)
    ids, mask = scree.to_padded(tokens)
    return lambda: padded.encode(w, ids, mask)


def _size(layout: str, lengths: list[np.ndarray], weights: dict[str, np.ndarray]) -> Size:
    """Return the sizes of batches with these row lengths."""
    width, hidden_width = weights["encoder.layer.0.intermediate.dense.weight"].shape
    heads, itemsize = width // model.HEAD_DIM, 4
    if layout == "ragged":
        tokens, scores = [int(batch.sum()) for batch in lengths], 0
    else:
        tokens = [batch.size * int(batch.max()) for batch in lengths]
        scores = max(batch.size * heads * int(batch.max()) ** 2 * itemsize for batch in lengths)
    return Size(sum(tokens), max(tokens) * (5 * width + hidden_width) * itemsize, scores)


def _difference(arrays: Any) -> float:
    """Return the largest elementwise difference between any two of the arrays."""
    stacked = np.stack(list(arrays))
    return float(np.max(stacked.max(axis=0) - stacked.min(axis=0)))


def nearest(texts: Sequence[str], embeddings: np.ndarray) -> list[Pair]:
    """Return the pairs of paragraphs that are most similar in meaning but share few words.

    Parameters
    ----------
    texts
        The paragraphs.
    embeddings
        (n, width) array with rows of length 1.

    Returns
    -------
    list of Pair
        At most `MAX_PAIRS` pairs, most similar first. A paragraph occurs in at most one pair.
    """
    words = [frozenset(re.findall(r"\w+", text.lower())) for text in texts]
    similarity = np.triu(embeddings @ embeddings.T, k=1)
    pairs: list[Pair] = []
    used: set[int] = set()
    for index in np.argsort(-similarity, axis=None).tolist():
        i, j = divmod(index, len(texts))
        if len(pairs) == MAX_PAIRS or similarity[i, j] <= 0:
            break
        if used & {i, j} or min(len(words[i]), len(words[j])) < MIN_PAIR_WORDS:
            continue
        shared_fraction = len(words[i] & words[j]) / len(words[i] | words[j])
        if shared_fraction <= MAX_SHARED_WORDS:
            pairs.append(Pair(float(similarity[i, j]), texts[i], texts[j]))
            used |= {i, j}
    return pairs
