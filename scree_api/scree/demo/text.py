"""Paragraphs, conversations, and tokenizers."""

import random
import re
import zlib
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

from . import DemoError
from .model import MAX_TOKENS

Tokenizer = Callable[[Sequence[str]], list[list[int]]]

MIN_WORDS = 4  # shorter paragraphs of Python's documentation are headings or lines of code
CLS, SEP, FIRST_WORD = 101, 102, 1000  # ids in BERT's vocabulary


def paragraphs(path: str | None = None) -> list[str]:
    """Return the paragraphs of a file, or of Python's own documentation.

    Parameters
    ----------
    path
        UTF-8 text file with one paragraph per line; None for Python's documentation.

    Returns
    -------
    list of str
        The paragraphs, with whitespace collapsed.

    Raises
    ------
    DemoError
        If the file cannot be read or holds no text.
    """
    if path is None:
        from pydoc_data.topics import topics

        candidates = (
            " ".join(p.split()) for text in topics.values() for p in re.split(r"\n\s*\n", text)
        )
        return [p for p in candidates if len(p.split()) >= MIN_WORDS]
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DemoError(
            f"--text: expected a UTF-8 text file with one paragraph per line: {error}"
        ) from error
    if not any(line.strip() for line in lines):
        raise DemoError(f"--text: expected one paragraph per line, got no text in {path}")
    return [" ".join(line.split()) for line in lines if line.strip()]


def conversations() -> list[str]:
    """Return the English conversations of the package chatterbot-corpus, without duplicates.

    Returns
    -------
    list of str
        The conversations, one remark per line.

    Raises
    ------
    DemoError
        If the package is not installed.
    """
    try:
        import yaml

        corpus = files("chatterbot_corpus")
    except ModuleNotFoundError as error:
        raise DemoError(
            f"--text: {error.name} is not installed; install scree with the extra train, "
            "or pass a text of your own"
        ) from error
    files_by_topic = sorted((corpus / "data" / "english").iterdir(), key=lambda file: file.name)
    texts = []
    for file in files_by_topic:
        for remarks in yaml.safe_load(file.read_text(encoding="utf-8"))["conversations"]:
            texts.append("\n".join(" ".join(str(remark).split()) for remark in remarks))
    return list(dict.fromkeys(texts))


def sample(texts: list[str], limit: int, seed: int) -> list[str]:
    """Return `limit` random texts, or all texts in random order.

    Parameters
    ----------
    texts
        Texts to sample from, without replacement.
    limit
        Number of texts; 0, or more than there are, returns all.
    seed
        Seed of the random generator.

    Returns
    -------
    list of str
        The sample.
    """
    return random.Random(seed).sample(texts, min(limit or len(texts), len(texts)))


def word_pieces(tokenizer_json: Path) -> Tokenizer:
    """Return BERT's tokenizer, which cuts texts to BERT's limit of 512 tokens.

    Parameters
    ----------
    tokenizer_json
        The file `tokenizer.json` of a checkpoint.

    Returns
    -------
    callable
        Function from texts to lists of token ids.
    """
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return lambda texts: [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]


def hashed_words(vocabulary: int) -> Tokenizer:
    """Return a tokenizer for random weights, which needs no download.

    Parameters
    ----------
    vocabulary
        Number of token ids.

    Returns
    -------
    callable
        Function from texts to lists of token ids. Each word or punctuation mark is one token, whose
        id is its checksum.
    """

    def word_id(word: str) -> int:
        return FIRST_WORD + zlib.crc32(word.encode()) % (vocabulary - FIRST_WORD)

    def tokenize(text: str) -> list[int]:
        words = re.findall(r"\w+|[^\w\s]", text.lower())[: MAX_TOKENS - 2]
        return [CLS, *map(word_id, words), SEP]

    return lambda texts: [tokenize(text) for text in texts]
