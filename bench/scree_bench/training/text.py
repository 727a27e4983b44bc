"""Documents as tokens: reading, byte-pair encoding, and batches with a fixed number of tokens."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import typer

import scree
from scree.data import TokenBudgetSampler, chunk

from ..gpt import IGNORED

#: Token between documents: each document begins with it.
START = "<|document|>"
#: Suffixes of documents in a folder.
SUFFIXES: tuple[str, ...] = (".txt", ".md", ".rst", ".py", ".html", ".json")
#: Maximum tokens of a trained encoding; more tokens of a larger model are not used.
MAX_VOCABULARY = 32_768


class Documents(NamedTuple):
    """Documents as one ragged array of tokens, and the name of their source."""

    tokens: scree.Array
    source: str

    @property
    def lengths(self) -> np.ndarray:
        """(n,) tokens per document."""
        return np.asarray(self.tokens.lengths)


def read(text: Path | None) -> tuple[list[str], str]:
    """Return the documents of a file or a folder, and the name of the source.

    A file has one document per paragraph, that is, between empty lines. A folder has one document
    per file. Without a text, these are the conversations of the package chatterbot-corpus if it is
    installed, or else the sources of Python's own standard library, one document per module.

    Raises
    ------
    typer.BadParameter
        If there is no text.
    """
    if text is None and find_spec("chatterbot_corpus") and find_spec("yaml"):
        from scree.demo.text import conversations

        return conversations(), "conversations of chatterbot-corpus"
    suffixes, source = SUFFIXES, str(text)
    if text is None:
        text, suffixes = Path(sysconfig.get_paths()["stdlib"]), (".py",)
        source = "Python's standard library"
    if text.is_file():
        try:
            content = text.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise typer.BadParameter(f"--text: expected UTF-8 in {text}, got {error}") from error
        documents = content.split("\n\n")
    else:
        files = sorted(path for path in text.rglob("*") if path.suffix in suffixes)
        kept = [path for path in files if "site-packages" not in path.relative_to(text).parts]
        documents = [path.read_text(encoding="utf-8", errors="ignore") for path in kept]
    documents = [document.strip() for document in documents if document.strip()]
    if not documents:
        raise typer.BadParameter(
            f"--text: expected a UTF-8 file, or a folder of {', '.join(suffixes)}, "
            f"got no text in {text}"
        )
    return documents, source


def encoding(documents: list[str], tokenizer: Path | None, vocabulary: int) -> Any:
    """Return a tokenizer read from a file, or a byte-pair encoding trained on the documents.

    Raises
    ------
    typer.BadParameter
        If the tokenizer has more tokens than the model.
    """
    import tokenizers

    if tokenizer is not None:
        given = tokenizers.Tokenizer.from_file(str(tokenizer))
        if given.get_vocab_size() > vocabulary:
            raise typer.BadParameter(
                f"--tokenizer: expected at most {vocabulary} tokens, the vocabulary of the model, "
                f"got {given.get_vocab_size()}"
            )
        return given
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=min(vocabulary, MAX_VOCABULARY),
        special_tokens=[START],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(documents, trainer)
    return trained


def load(text: Path | None, tokenizer: Path | None, vocabulary: int, context: int) -> Documents:
    """Return the documents as tokens; documents longer than the context become several.

    A text with the suffix .npz has tokens that `save` wrote.

    Raises
    ------
    typer.BadParameter
        If the text, the tokenizer or the tokens do not fit the model.
    """
    if text is not None and text.suffix == ".npz":
        with np.load(text) as arrays:
            tokens, lengths = arrays["tokens"].astype(np.int64), arrays["lengths"]
        if tokens.max() >= vocabulary:
            raise typer.BadParameter(
                f"--text: expected tokens below {vocabulary}, the vocabulary of the model, "
                f"got {tokens.max()} in {text}"
            )
        rows, source = scree.from_lengths(tokens, lengths), str(text)
    else:
        documents, source = read(text)
        encoder = encoding(documents, tokenizer, vocabulary)
        start = encoder.token_to_id(START)
        first = [] if start is None else [start]
        encoded = encoder.encode_batch(documents, add_special_tokens=False)
        rows = scree.pack([np.asarray(first + x.ids, np.int64) for x in encoded if x.ids])
    pieces, _ = chunk(rows, context)
    # A piece of one token has no target.
    lengths = np.asarray(pieces.lengths)
    pieces = pieces[np.flatnonzero(lengths > 1)]
    return Documents(pieces, source)


def save(documents: Documents, path: Path) -> None:
    """Write the tokens of documents into a .npz file."""
    values = np.asarray(documents.tokens.values)
    small = values.astype(np.uint16 if values.max() < 1 << 16 else np.uint32)
    np.savez_compressed(path, tokens=small, lengths=documents.lengths.astype(np.int32))


class Batches:
    """Endless batches of documents with exactly `total` tokens each.

    `TokenBudgetSampler` draws the documents of a batch, in a new order in every epoch. The rest of
    a batch is filled with the beginning of another document. A batch depends on the seed, the epoch
    and the position alone, so a resumed run gets the same batches.

    Raises
    ------
    typer.BadParameter
        If the documents have fewer tokens than two batches.
    """

    def __init__(self, documents: Documents, total: int, seed: int) -> None:
        self.documents, self.total, self.seed = documents, total, seed
        self.lengths = documents.lengths
        self.offsets = np.asarray(documents.tokens.offsets)
        self.values = np.asarray(documents.tokens.values)
        if self.values.size < 2 * total:
            raise typer.BadParameter(
                f"--text: expected at least {2 * total:,} tokens, two batches, "
                f"got {self.values.size:,} in {documents.source}; give fewer --tokens"
            )
        self.sampler = self._new_sampler()
        self._iterator: Iterator[list[int]] = iter(self.sampler)

    def _new_sampler(self) -> TokenBudgetSampler:
        # The last batch of an epoch is dropped, so the rest of a batch is shorter than a document.
        return TokenBudgetSampler(self.lengths, self.total, seed=self.seed, drop_last=True)

    def max_rows(self, batches: int) -> int:
        """Return the most documents in one of the first batches, with the filling."""
        sampler, most, left = self._new_sampler(), 0, batches
        while left > 0:
            counts = [len(batch) for _, batch in zip(range(left), sampler, strict=False)]
            most, left = max(most, *counts), left - len(counts)
        return most + 1

    def take(self) -> list[np.ndarray]:
        """Return the documents of the next batch."""
        indices = next(self._iterator, None)
        if indices is None:
            self._iterator = iter(self.sampler)
            indices = next(self._iterator)
        rows = [self.values[self.offsets[i] : self.offsets[i + 1]] for i in indices]
        gap = self.total - sum(map(len, rows))
        if gap:
            seed = [self.seed, self.sampler.epoch, self.sampler.position]
            i = np.random.default_rng(seed).choice(np.flatnonzero(self.lengths >= gap))
            rows.append(self.values[self.offsets[i] : self.offsets[i] + gap])
        return rows

    def state(self) -> dict[str, int]:
        """Return the position in the data."""
        return {"epoch": self.sampler.epoch, "position": self.sampler.position}

    def load(self, state: dict[str, int]) -> None:
        """Continue at a position that `state` returned."""
        self.sampler.set_epoch(state["epoch"])
        self.sampler.position = state["position"]
        self._iterator = iter(self.sampler)


def labels(rows: list[np.ndarray]) -> np.ndarray:
    """Return the next token of each token; the last token of a document has none."""
    return np.concatenate([np.append(row[1:], IGNORED) for row in rows])
