"""Training: all forms have one loss, batches resume, and a killed run continues exactly."""

import json
import math
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from scree_bench import results
from scree_bench.cli import app
from scree_bench.gpt import IGNORED

pytestmark = pytest.mark.needs("torch")

SMALL = "--quick", "--device", "cpu"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The machine runs other tests at the same time."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def documents():
    """Forty documents of random tokens, most of them short, and some tokens much more frequent."""
    import scree
    from scree_bench.training.text import Documents

    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3, 0.8, 40).astype(int), 2, 64)
    tokens = (512 * rng.random(lengths.sum()) ** 4).astype(np.int64)
    return Documents(scree.from_lengths(tokens, lengths), "random")


@pytest.fixture(scope="module")
def text(documents, tmp_path_factory):
    """Options of a run on the documents."""
    from scree_bench.training.text import save

    path = tmp_path_factory.mktemp("text") / "tokens.npz"
    save(documents, path)
    return "--text", str(path)


def run(*options: str) -> str:
    result = CliRunner().invoke(app, ["train", *SMALL, *map(str, options)])
    assert result.exit_code == 0, result.output
    return result.output


# --- the models, against NumPy ---
def norm(x, p, name, size):
    if size.positions:
        x = x - x.mean(-1, keepdims=True)
    scaled = x / np.sqrt((x**2).mean(-1, keepdims=True) + size.eps) * p[name]
    return scaled + p.get(f"{name}.bias", 0)


def rotate(x):
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None] * 1e4 ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None]
    return np.concatenate([turned.real, turned.imag], -1)


def document_loss(p, size, tokens):
    """The sum of the losses of one document in float64, head by head and query by query."""

    def product(x, name):
        return x @ p[name] + p.get(f"{name}.bias", 0)

    x = p["embedding"][tokens]
    if size.positions:
        x = x + p["positions"][: len(tokens)]
    for i in range(size.layers):
        heads = product(norm(x, p, f"{i}.norm1", size), f"{i}.qkv").reshape(len(x), -1, size.dim)
        q, k, v = np.split(heads, [size.heads, size.heads + size.kv_heads], 1)
        if not size.positions:
            q, k = rotate(q), rotate(k)
        out = np.zeros_like(q)
        for h in range(size.heads):
            group = h * size.kv_heads // size.heads
            for t in range(len(x)):
                scores = np.exp(k[: t + 1, group] @ q[t, h] / math.sqrt(size.dim))
                out[t, h] = scores @ v[: t + 1, group] / scores.sum()
        x = x + product(out.reshape(len(x), -1), f"{i}.out")
        up = product(norm(x, p, f"{i}.norm2", size), f"{i}.up")
        if size.positions:
            up = up / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        else:
            gate, up = np.split(up, 2, -1)
            up = gate / (1 + np.exp(-gate)) * up
        x = x + product(up, f"{i}.down")
    logits = norm(x, p, "norm", size) @ p["embedding"].T
    lse = np.log(np.exp(logits).sum(1))
    return (lse[:-1] - logits[np.arange(len(x) - 1), tokens[1:]]).sum()


def loop_over_documents(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size, enable_gqa=False):
    """In place of `varlen_attn`, which has no kernel for the CPU."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    assert window_size == (-1, 0) and int(cu_q[-1]) == len(q)
    ends = cu_q.tolist()
    rows = [[x[a:b].transpose(0, 1)[None] for x in (q, k, v)] for a, b in zip(ends, ends[1:])]
    outs = [scaled_dot_product_attention(*r, is_causal=True, enable_gqa=enable_gqa) for r in rows]
    return torch.cat([out[0].transpose(0, 1) for out in outs])


@pytest.mark.parametrize("recompute", ["nothing", "activations", "layers"])
@pytest.mark.parametrize("size", ["tiny", "gpt2-tiny"])
def test_forms_have_the_loss_of_numpy_and_one_gradient(documents, size, recompute, monkeypatch):
    import torch

    from scree_bench.training import heads, models
    from scree_bench.training.forms import FORMS, Plan
    from scree_bench.training.text import Batches

    shape = models.SIZES[size]
    rows = Batches(documents, 192, 0).take()
    plan = Plan(shape, 192, len(rows) + 3, 64, recompute)
    p = models.parameters(shape, "cpu", torch.float32, 0)
    for x in p.values():
        with torch.no_grad():  # no norm of 1 and no bias of 0
            x += 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    exact = {name: x.detach().double().numpy() for name, x in p.items()}
    expected = sum(document_loss(exact, shape, row) for row in rows)
    gradients = {}
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", loop_over_documents)
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)  # FlexAttention, uncompiled
    forms = ["scree", "padded", "padded sorted", "varlen_attn"]
    with torch.no_grad():  # FlexAttention has no backward on the CPU
        form = FORMS["windows flex_attention"]
        (part,) = form.parts(plan, rows)
        value = form.make_loss(plan, heads.HEADS["full"]())(p, *map(torch.from_numpy, part.arrays))
        assert value.item() * part.targets == pytest.approx(expected, rel=2e-6)
    for form in forms:
        loss = FORMS[form].make_loss(plan, heads.HEADS["chunked"]())
        total = 0.0
        for part in FORMS[form].parts(plan, rows):
            value = loss(p, *map(torch.from_numpy, part.arrays)) * part.targets
            value.backward()
            total += float(value.detach())
        assert total == pytest.approx(expected, rel=2e-6), form
        gradients[form] = [x.grad.clone() for x in p.values()]
        for x in p.values():
            x.grad = None
    for form in forms[1:]:
        for a, b in zip(gradients["scree"], gradients[form], strict=True):
            assert (a - b).abs().max() < 1e-5 * b.abs().max() + 1e-6, form


def kept_bytes(form, documents, recompute):
    """The bytes of all arrays that the backward pass of a form keeps, without parameters."""
    import torch

    from scree_bench.training import models
    from scree_bench.training.forms import FORMS, Plan
    from scree_bench.training.text import Batches

    rows = Batches(documents, 192, 0).take()
    plan = Plan(models.SIZES["tiny"], 192, len(rows), 64, recompute)
    p = models.parameters(plan.size, "cpu", torch.float32, 0)
    (part,) = FORMS[form].parts(plan, rows)
    loss = FORMS[form].make_loss(plan, lambda x, *labels: x.sum())
    kept, parameters = {}, {x.untyped_storage().data_ptr() for x in p.values()}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss(p, *map(torch.from_numpy, part.arrays))
    return sum(x.untyped_storage().nbytes() for at, x in kept.items() if at not in parameters)


@pytest.mark.parametrize("form", ["scree", "varlen_attn"])
def test_recomputed_activations_are_not_kept(documents, form, monkeypatch):
    from scree_bench.training import models

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", loop_over_documents)
    all_of_them, fewer, least = (kept_bytes(form, documents, x) for x in models.RECOMPUTE)
    size = models.SIZES["tiny"]
    # Activations, and the queries and keys before the rotation.
    numbers = size.hidden + (size.heads + size.kv_heads) * size.dim
    assert all_of_them - fewer >= 4 * 192 * size.layers * numbers
    assert least < fewer


def test_packed_forms_get_the_same_tokens_and_labels(documents):
    from scree_bench.training import forms, models
    from scree_bench.training.text import Batches, labels

    rows = Batches(documents, 192, 0).take()
    plan = forms.Plan(models.SIZES["tiny"], 192, len(rows) + 3, 64)
    (packed,), (flex,) = forms.packed_with_positions(plan, rows), forms.with_documents(plan, rows)
    ids, targets, offsets, positions = packed.arrays
    assert offsets.shape == (plan.max_rows + 1,) and (np.diff(offsets)[len(rows) :] == 0).all()
    for i, row in enumerate(rows):
        part = slice(offsets[i], offsets[i + 1])
        np.testing.assert_array_equal(ids[part], row)
        np.testing.assert_array_equal(targets[part], [*row[1:], IGNORED])
        np.testing.assert_array_equal(positions[part], range(len(row)))
        assert (flex.arrays[3][part] == i).all()
    cut = forms.windows(plan._replace(context=80), rows)
    assert [x.arrays[0].shape for x in cut] == [(2, 80), (1, 32)]
    joined = np.concatenate([x.arrays[1].ravel() for x in cut])
    np.testing.assert_array_equal(joined, labels(rows))
    assert sum(x.targets for x in cut) == packed.targets


@pytest.mark.parametrize("head", ["chunked", "full"])
def test_heads_have_the_gradients_of_float64(head, monkeypatch):
    import torch

    from scree_bench.training import heads

    monkeypatch.setattr(heads, "MAX_LOGITS", 30 * 8)  # chunks of eight tokens
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 16, generator=generator, requires_grad=True) for n in (21, 30))
    targets = torch.randint(30, (21,), generator=generator)
    targets[::4] = IGNORED
    loss = heads.HEADS[head]()(x, w, targets)
    loss.backward()
    exact = [z.detach().double().requires_grad_() for z in (x, w)]
    logits = exact[0] @ exact[1].T
    expected = torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for a, b in zip((x, w), exact, strict=True):
        assert (a.grad - b.grad).abs().max() < 1e-6


def test_flops_count_parameters_and_pairs():
    from scree_bench.training import models

    size = models.SIZES["1.2b"]
    count = sum(math.prod(shape) for shape in models.shapes(size).values())
    assert count == 1_235_814_400  # as published for Llama 3.2 of this shape
    pairs = 1 + (1 + 2 + 3)
    assert models.flops(size, [1, 3]) == 6 * 4 * count + 16 * 32 * 64 * 12 * pairs


# --- text and batches ---
def test_batches_are_full_and_resume(documents):
    from scree_bench.training.text import Batches

    batches = Batches(documents, 256, seed=3)
    most, taken, states = batches.max_rows(12), [], []
    for _ in range(12):  # several epochs
        states.append(batches.state())
        taken.append(batches.take())
    assert states[-1]["epoch"] >= 2
    for state, rows in zip(states, taken, strict=True):
        assert sum(map(len, rows)) == 256 and len(rows) <= most
        resumed = Batches(documents, 256, seed=3)
        resumed.load(state)
        for a, b in zip(resumed.take(), rows, strict=True):
            np.testing.assert_array_equal(a, b)


def test_too_little_text_is_refused(documents):
    from scree_bench.training.text import Batches

    with pytest.raises(typer.BadParameter, match="expected at least 20,000 tokens"):
        Batches(documents, 10_000, 0)


def test_text_of_files_folders_and_saved_tokens(tmp_path):
    from scree_bench.training import text

    (tmp_path / "a.md").write_text("first document\n\nsecond one")
    (tmp_path / "b.rst").write_text("third " * 40)
    (tmp_path / "c.bin").write_text("not a document")
    assert text.read(tmp_path / "a.md")[0] == ["first document", "second one"]
    assert len(text.read(tmp_path)[0]) == 2
    loaded = text.load(tmp_path, None, 300, context=32)
    assert loaded.lengths.max() <= 32 and loaded.lengths.min() > 1
    text.save(loaded, tmp_path / "tokens.npz")
    again = text.load(tmp_path / "tokens.npz", None, 300, context=32)
    np.testing.assert_array_equal(again.tokens.values, loaded.tokens.values)
    with pytest.raises(typer.BadParameter, match="expected tokens below 10"):
        text.load(tmp_path / "tokens.npz", None, 10, context=32)
    with pytest.raises(typer.BadParameter, match="no text"):
        text.read(tmp_path / "c.bin" if (tmp_path / "c.bin").write_text(" ") else None)


def test_tokenizer_larger_than_the_model_is_refused(tmp_path):
    from scree_bench.training import text

    text.encoding(["some words"], None, 400).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(typer.BadParameter, match="expected at most 100 tokens"):
        text.encoding([], tmp_path / "tokenizer.json", 100)


# --- runs ---
def test_losses_of_scree_and_of_the_reference_stay_together(tmp_path, text):
    options = *text, "--steps", "12", "--contenders", "scree:eager,padded sorted", "--profile"
    said = run(*options, "--out", tmp_path)
    result = results.read(tmp_path / "train-cpu.json")
    assert all("host_s" in row.values for row in result.rows if row.case["part"] == "timed")
    assert "parts of a step" in said and "tokens/s / padded sorted" in said
    curves = result.extra["curves"]
    ours, reference = (np.asarray(curves[f"{who}, seed 0"]) for who in ("scree", "padded sorted"))
    np.testing.assert_allclose(ours[:, 2], reference[:, 2], rtol=1e-4)
    assert ours[-1, 0] == 12 * 256 and ours[-1, 2] < ours[0, 2] - 0.3
    names = {path.stem for path in tmp_path.glob("*.svg")}
    assert names == {"train-rate-cpu", "train-loss-tokens-cpu", "train-loss-seconds-cpu"}
    profiles = result.extra["profiles"]["tiny, scree"]
    assert {"attention", "optimizer", "matrix products", "loss", "embedding"} <= profiles.keys()
    page, report = tmp_path / "bench.md", ["report", str(tmp_path / "train-cpu.json"), "--out"]
    assert CliRunner().invoke(app, [*report, str(page)]).exit_code == 0
    written = (tmp_path / "bench" / "cpu.md").read_text()
    assert "\n## Train\n" in written and "train-loss-tokens-cpu.svg" in written


def test_parts_of_the_reference_cost_the_least(monkeypatch):
    from itertools import combinations

    from scree_bench.training import forms, models

    monkeypatch.setattr(forms, "PART_TOKENS", 50)
    rng = np.random.default_rng(0)
    rows = [np.arange(n) for n in rng.integers(2, 120, 9)]
    plan = forms.Plan(models.SIZES["tiny"], 400, len(rows), 120)
    lengths = sorted((-(-len(row) // 8) * 8 for row in rows), reverse=True)
    least = math.inf
    for count in range(len(rows)):
        for cuts in combinations(range(1, len(rows)), count):
            sizes = [lengths[a] * (b - a) for a, b in zip((0, *cuts), (*cuts, len(rows)))]
            if max(sizes) <= plan.total:
                least = min(least, sum(sizes) + 50 * len(sizes))
    parts = forms.padded_sorted(plan, rows)
    assert sum(part.arrays[0].size + 50 for part in parts) == least
    assert sum(part.targets for part in parts) == sum(len(row) - 1 for row in rows)


@pytest.mark.parametrize("clip", [0.0, 0.05, 1e6])
def test_step_clips_the_norm_of_the_gradient(documents, clip):
    import torch

    from scree_bench.training import loop, models
    from scree_bench.training.forms import Plan

    plan = Plan(models.SIZES["tiny"]._replace(layers=1), 192, 24, 64)
    settings = loop.Settings(plan, "cpu", "fp32", 1, steps=4, warm_up=1, rate=1e-3, clip=clip)
    training = loop.Training(settings, documents, "scree", False, "chunked")
    loss, taken = training.loss, {}

    def record(parameters, *arrays):
        taken["parameters"], taken["arrays"] = parameters, arrays
        return loss(parameters, *arrays)

    training.loss = record
    before = {name: p.detach().clone() for name, p in training.parameters.items()}
    training.run()
    leaves = {name: p.requires_grad_() for name, p in before.items()}
    loss(leaves, *taken["arrays"]).backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(leaves.values(), clip)
    # The first moment is a tenth of the gradient after one step.
    for name, p in training.parameters.items():
        expected = 0.1 * leaves[name].grad
        got = training.optimizer.state[p]["exp_avg"]
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max() + 1e-9, name


@pytest.mark.needs("jax", "optax")
def test_jax_makes_the_same_steps_and_compiles_once(documents):
    from scree_bench.training import jax_loop, loop, models
    from scree_bench.training.forms import Plan

    plan = Plan(models.SIZES["tiny"]._replace(layers=1), 192, 24, 64, "activations")
    settings = loop.Settings(plan, "cpu", "fp32", accumulate=1, steps=6, warm_up=2, rate=3e-3)
    losses = []
    for make, form in ((loop.Training, "scree"), (jax_loop.JaxTraining, "scree JAX")):
        training = make(settings, documents, form, False, "chunked")
        start = training.now()
        steps = [training.run() for _ in range(6)]
        training.wait()
        assert training.seconds(start, steps[-1].end) > 0
        losses.append([float(step.loss) for step in steps])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert losses[0][-1] < losses[0][0]
    assert training._run._cache_size() == 1


@pytest.mark.parametrize("form", ["scree", "padded sorted"])
def test_compiled_form_does_not_compile_for_each_batch(documents, form, monkeypatch):
    import torch
    import torch._dynamo.utils as dynamo

    from scree_bench.training import loop, models
    from scree_bench.training.forms import Plan

    compile_it = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **options: compile_it(f, backend="aot_eager", **options)
    )
    plan = Plan(models.SIZES["tiny"]._replace(layers=2), 256, 24, 64)
    settings = loop.Settings(plan, "cpu", "amp", 1, steps=8, warm_up=1, rate=1e-3)
    loop.release(compiled=True)
    dynamo.counters.clear()
    eager, compiled = (
        loop.Training(settings, documents, form, compiled=x, head="chunked") for x in (False, True)
    )
    for _ in range(4):
        assert compiled.run().loss.item() == pytest.approx(eager.run().loss.item(), rel=1e-3)
    # The reference compiles a layer and the loss, each for one row or token and for more.
    assert loop.compiled_graphs() <= (1 if form == "scree" else 4)
    assert not dynamo.counters["graph_break"]
    loop.release(compiled=True)


def losses(folder):
    """The exact losses of the newest checkpoint, and its step."""
    import torch
    import torch.distributed.checkpoint as dcp

    path = max((folder / "scree-seed-0").glob("step-*"))
    state = {"losses": torch.zeros(8, dtype=torch.float64)}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state["losses"].numpy(), path.name


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_save_that_ends_early_keeps_the_older_checkpoint(documents, error, tmp_path, monkeypatch):
    from torch.distributed.checkpoint.api import CheckpointException

    from scree_bench.training import loop, models
    from scree_bench.training.forms import Plan

    plan = Plan(models.SIZES["tiny"], 128, 24, 64)
    settings = loop.Settings(plan, "cpu", "amp", 1, steps=4, warm_up=1, rate=1e-3)
    training = loop.Training(settings, documents, "scree", False, "chunked")
    losses = [training.run().loss.item()]
    training.save(tmp_path, losses, 1.0)
    training.run()

    def fail(number):
        raise error

    # PyTorch raises CheckpointException for whatever happens while it writes.
    expected = error if error is KeyboardInterrupt else CheckpointException
    with monkeypatch.context() as patch, pytest.raises(expected):
        patch.setattr(os, "fsync", fail)
        training.save(tmp_path, [*losses, 0.0], 2.0)
    resumed = loop.Training(settings, documents, "scree", False, "chunked")
    assert resumed.resume(tmp_path) == (losses, 1.0)


def test_killed_run_resumes_bit_for_bit(tmp_path, text):
    options = [
        *text,
        *("--timed", "0", "--steps", "8", "--curves", "scree", "--checkpoint-every", "2"),
        *("--precision", "amp", "--accumulate", "2", "--checkpoint"),
    ]
    command = [sys.executable, "-m", "scree_bench", "train", *SMALL, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, str(tmp_path / "killed")], env=environment)
    until = time.monotonic() + 60
    while not list(tmp_path.glob("killed/*/step-*2")) and time.monotonic() < until:
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    run(*options, tmp_path / "whole")
    assert "resumed after step" in run(*options, tmp_path / "killed")
    (resumed, step), (whole, last) = losses(tmp_path / "killed"), losses(tmp_path / "whole")
    assert step == last == "step-00000008" and np.isfinite(whole).all()
    np.testing.assert_array_equal(resumed, whole)


def test_ctrl_c_keeps_the_curve_so_far(tmp_path, text):
    command = [
        *(sys.executable, "-m", "scree_bench", "train", *SMALL, *text),
        *("--timed", "2", "--contenders", "scree", "--steps", "100000", "--out", str(tmp_path)),
        *("--checkpoint", str(tmp_path / "state"), "--checkpoint-every", "2"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    path, until = tmp_path / "train-cpu.json", time.monotonic() + 60
    # The first steps may take seconds while other programs use the CPU.
    while not list(tmp_path.glob("state/*/step-*")) and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "Interrupted" in said
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"]["part"] for row in rows] == ["timed", "curve"]
    assert rows[1]["values"]["trained_count"] > 1


@pytest.mark.parametrize(
    ("names", "part"),
    [
        (("nvjet_tst_128x256", "aten::mm"), "matrix products"),
        (("triton_red_fused__to_copy_mm_3", "CompiledFunction"), "kernels of Inductor"),
        (("void at::native::multi_tensor_apply_kernel",), "optimizer"),
        (("elementwise", "aten::mul", "Optimizer.step#AdamW.step"), "optimizer"),
        (("embedding_backward_feature_kernel", "aten::embedding_dense_backward"), "embedding"),
        (("scatter_add_bucketed_add_kernel",), "embedding"),
        (("some kernel",), "other"),
    ],
)
def test_kernels_belong_to_parts_of_a_step(names, part):
    from scree_bench.training import profile

    assert profile.classify(*names) == part


def test_times_of_parts_add_up_to_the_time_of_all_kernels():
    from scree_bench.training.profile import IDLE, Kernel, seconds_per_part

    kernels = [
        Kernel("nvjet_tst_128x256", (), 1.0, 3.0),
        # The loss waits on the device until the product ends.
        Kernel("linear_cross_entropy_kernel", (), 1.5, 3.5),
        Kernel("elementwise", ("aten::mul", "Optimizer.step#AdamW.step"), 4.0, 6.0),
        Kernel("rms_norm_kernel", (), 5.0, 5.5),
    ]
    expected = {"matrix products": 2.0, "loss": 0.5, IDLE: 0.5, "optimizer": 2.0, "norms": 0.0}
    assert seconds_per_part(reversed(kernels)) == pytest.approx(expected)
    assert seconds_per_part([]) == {}


def test_ranges_and_calls_of_the_runtime_are_no_kernels():
    from types import SimpleNamespace

    from torch.autograd import DeviceType

    from scree_bench.training.profile import device_kernels

    def operator(name, number, parent=None, is_range=False):
        return SimpleNamespace(
            name=name, id=number, cpu_parent=parent, device_type=DeviceType.CPU,
            is_user_annotation=is_range,
        )  # fmt: skip

    def on_device(name, link, start, end):
        values = {
            "name": name, "linked_correlation_id": link, "start_ns": start,
            "end_ns": end, "device_type": DeviceType.CUDA,
        }  # fmt: skip
        return SimpleNamespace(**{key: lambda value=value: value for key, value in values.items()})

    outer = operator("optimizer", 1, is_range=True)
    events = [outer, operator("aten::mul", 7, outer), operator("cudaLaunchKernel", 7)]
    # Inductor names an event on the CPU like its kernel.
    events.append(operator("triton_poi_fused_cat_3", 8))
    ran = [on_device("optimizer", 1, 1_000, 9_000), on_device("elementwise", 7, 3_000, 4_000)]
    ran.append(on_device("triton_poi_fused_cat_3", 8, 5_000, 6_000))
    results = SimpleNamespace(events=lambda: ran, trace_start_ns=lambda: 1_000)
    profiler = SimpleNamespace(
        events=lambda: events, profiler=SimpleNamespace(kineto_results=results)
    )
    kernel, fused = device_kernels(profiler)
    assert fused.name == "triton_poi_fused_cat_3"
    assert kernel.name == "elementwise" and kernel.operators == ("aten::mul", "optimizer")
    assert (kernel.start, kernel.end) == pytest.approx((2e-6, 3e-6))


@pytest.mark.parametrize(
    "arguments",
    [("--size", "huge"), ("--contenders", "scre"), ("--modes", "fast"), ("--precision", "fp8")],
)
def test_unknown_choices_are_named(arguments):
    result = CliRunner().invoke(app, ["train", *SMALL, *arguments])
    assert result.exit_code == 2 and arguments[1] in result.output


@pytest.mark.needs("accelerate")
def test_fine_tuning_forms_have_the_same_losses(tmp_path, monkeypatch):
    script = Path(__file__).parents[2] / "docs" / "guides" / "fine_tuning.py"
    options = "--steps", "6", "--rows", "4", "--context", "32", "--out", str(tmp_path / "out.json")
    monkeypatch.setattr(sys, "argv", [str(script), *options])
    runpy.run_path(str(script), run_name="__main__")
    rows = json.loads((tmp_path / "out.json").read_text())["results"]
    assert len(rows) == 4
    for packed, padded in (rows[:2], rows[2:]):
        assert packed["task"] == padded["task"] and packed["form"] != padded["form"]
        for name in ("first_loss", "last_loss"):
            assert packed[name] == pytest.approx(padded[name], rel=1e-3)
