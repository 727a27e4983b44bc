"""Paragraphs, conversations, and their tokens."""

import random
import re
import zlib
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

from . import DemoError
from .model import MAX_TOKENS

Tokenizer = Callable[[Sequence[str]], list[list[int]]]

FEWEST_WORDS = 4  # what is shorter, in Python's documentation, is a heading or a line of code
CLS, SEP, FIRST_WORD = 101, 102, 1000  # in BERT's vocabulary


def paragraphs(path: str | None = None) -> list[str]:
    """The paragraphs of a file, one a line, or else those of Python's own documentation of itself.

    Raises
    ------
    DemoError
        If the file cannot be read or holds no text.
    """
    if path is None:
        from pydoc_data.topics import topics

        found = (
            " ".join(p.split()) for text in topics.values() for p in re.split(r"\n\s*\n", text)
        )
        return [p for p in found if len(p.split()) >= FEWEST_WORDS]
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DemoError(
            f"--text: expected a UTF-8 text file with a paragraph a line: {error}"
        ) from error
    if not any(line.strip() for line in lines):
        raise DemoError(f"--text: expected a paragraph a line, got no text in {path}")
    return [" ".join(line.split()) for line in lines if line.strip()]


def conversations() -> list[str]:
    """The English conversations of the package chatterbot-corpus, each of them once; a line a remark.

    Raises
    ------
    DemoError
        If the package is not installed.
    """
    try:
        import yaml

        corpus = files("chatterbot_corpus")
    except ModuleNotFoundError as error:
        message = f"--text: {error.name} is not installed; pip install 'scree[train]', or give a text of your own"
        raise DemoError(message) from error
    parts = sorted((corpus / "data" / "english").iterdir(), key=lambda part: part.name)
    talks = [
        talk
        for part in parts
        for talk in yaml.safe_load(part.read_text(encoding="utf-8"))["conversations"]
    ]
    return list(
        dict.fromkeys("\n".join(" ".join(str(remark).split()) for remark in talk) for talk in talks)
    )


def sample(texts: list[str], limit: int, seed: int) -> list[str]:
    """`limit` of the texts in random order, or all of them if there are fewer or the limit is 0."""
    return random.Random(seed).sample(texts, min(limit or len(texts), len(texts)))


def word_pieces(tokenizer_json: Path) -> Tokenizer:
    """BERT's own tokenizer; longer texts are cut to the 512 tokens that it can place."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return lambda texts: [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]


def hashed_words(vocabulary: int) -> Tokenizer:
    """A token a word or sign, numbered by its checksum: for weights that mean nothing, it needs no download."""

    def tokens(text: str) -> list[int]:
        words = re.findall(r"\w+|[^\w\s]", text.lower())[: MAX_TOKENS - 2]
        return [
            CLS,
            *(FIRST_WORD + zlib.crc32(word.encode()) % (vocabulary - FIRST_WORD) for word in words),
            SEP,
        ]

    return lambda texts: [tokens(text) for text in texts]
