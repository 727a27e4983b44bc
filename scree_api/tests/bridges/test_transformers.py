"""Small random models of transformers on scree, compared with `sdpa` and `eager`."""

from copy import deepcopy
from functools import cache, partial
from typing import Any

import pytest
import torch
import transformers
from ragged_cases import assert_as_accurate

import scree
from scree.bridges import to_hf_flattened, to_hf_padded
from scree.bridges import transformers as bridge

SIZE = dict(
    vocab_size=60,
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=59,
)
GROUPED = SIZE | dict(num_key_value_heads=2)
GEMMA = GROUPED | dict(head_dim=16, sliding_window=4, query_pre_attn_scalar=16)
MODELS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "qwen2": lambda: transformers.Qwen2Config(
        **GROUPED, use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED, head_dim=16),
    "gemma2": lambda: transformers.Gemma2Config(**GEMMA, attn_logit_softcapping=2.0),
    "gemma3": lambda: transformers.Gemma3TextConfig(**GEMMA, sliding_window_pattern=2),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **GROUPED, head_dim=16, sliding_window=4, num_local_experts=4, num_experts_per_tok=2,
        experts_implementation="eager",  # the default one has no float64 on CUDA
    ),
    "bert": lambda: transformers.BertConfig(**SIZE),
    "modernbert": lambda: transformers.ModernBertConfig(
        **SIZE, global_attn_every_n_layers=2, local_attention=4, cls_token_id=1, sep_token_id=2
    ),
}  # fmt: skip
DECODERS = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_oss"]
LENGTHS = [7, 1, 12, 5]

bridge.register()


@cache
def model(
    name: str, attention: str, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Any:
    """Return the model with one attention implementation; the weights are equal for all."""
    config = MODELS[name]()
    config._attn_implementation = attention
    torch.manual_seed(0)
    model_class = (
        transformers.AutoModelForCausalLM if name in DECODERS else transformers.AutoModelForMaskedLM
    )
    return model_class.from_config(config, attn_implementation=attention).eval().to(device, dtype)


def tokens() -> scree.Array:
    generator = torch.Generator().manual_seed(1)
    return scree.from_lengths(torch.randint(3, 59, (sum(LENGTHS),), generator=generator), LENGTHS)


def batches(
    name: str, side: str = "right", device: str = "cpu"
) -> tuple[dict[str, Any], dict[str, Any], torch.Tensor]:
    """Return the tokens as a flattened and as a padded batch, and the mask of the padded one."""
    padded, mask = (x.to(device) for x in to_hf_padded(tokens(), side=side))
    places = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if name in DECODERS else {}
    return (
        to_hf_flattened(tokens().to(device)),
        dict(input_ids=padded, attention_mask=mask, **places),
        mask.bool(),
    )


def peers(name: str) -> list[str]:
    return (
        ["eager"] if name in ("gemma2", "gpt_oss") else ["eager", "sdpa"]
    )  # sdpa has no softcap and no sinks


def gradients(module: Any) -> list[torch.Tensor]:
    results = [p.grad for p in module.parameters() if p.grad is not None]
    module.zero_grad(set_to_none=True)
    return results


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_batch_agrees_with_peers(name: str, side: str) -> None:
    _, padded, is_token = batches(name, side)
    results = {}
    for attention in ("scree", *peers(name)):
        logits = model(name, attention)(**padded).logits[is_token]
        logits.square().mean().backward()
        results[attention] = logits, gradients(model(name, attention))
    for attention in peers(name):
        torch.testing.assert_close(results["scree"], results[attention])


@pytest.mark.parametrize("name", MODELS)
def test_flattened_batch_agrees_with_single_sequences(name: str) -> None:
    ids = tokens()
    flat = to_hf_flattened(ids)
    scree_model = model(name, "scree")
    logits = scree_model(**flat).logits
    logits.square().mean().backward()
    scree_gradients = gradients(scree_model)
    for attention in peers(name):
        peer_model = model(name, attention)
        expected = torch.cat([peer_model(input_ids=row[None]).logits[0] for row in ids])
        torch.testing.assert_close(logits[0], expected)
        expected.square().mean().backward()
        torch.testing.assert_close(scree_gradients, gradients(peer_model))


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("use_cache", [False, True])
def test_flattened_batch_from_position_ids_alone(name: str, use_cache: bool) -> None:
    flat = to_hf_flattened(tokens())
    expected = model(name, "scree")(**flat).logits
    without_offsets = {key: flat[key] for key in ("input_ids", "position_ids")}
    torch.testing.assert_close(
        model(name, "scree")(**without_offsets, use_cache=use_cache).logits, expected
    )


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_generate_with_a_cache_agrees_with_peers(name: str, implementation: str) -> None:
    ids, mask = to_hf_padded(tokens(), side="left")
    options = dict(
        attention_mask=mask,
        max_new_tokens=6,
        do_sample=False,
        cache_implementation=implementation,
        disable_compile=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    actual = model(name, "scree").generate(ids, **options)
    for attention in peers(name):
        expected = model(name, attention).generate(ids, **options)
        assert torch.equal(actual.sequences, expected.sequences)
        torch.testing.assert_close(actual.logits, expected.logits)


def test_encoder_decoder_model_agrees_with_peers() -> None:
    config = transformers.BartConfig(
        vocab_size=60,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        dropout=0.0,
    )
    ids, mask = to_hf_padded(tokens())
    logits = []
    for attention in ("scree", "sdpa", "eager"):
        torch.manual_seed(0)
        bart = transformers.BartForConditionalGeneration._from_config(
            config, attn_implementation=attention
        ).eval()
        logits.append(
            bart(input_ids=ids, attention_mask=mask, decoder_input_ids=ids.flip(1)).logits
        )  # every query is real
    torch.testing.assert_close(logits[0], logits[1])
    torch.testing.assert_close(logits[0], logits[2])


def test_inference_mode_without_a_mask_agrees_with_sdpa() -> None:
    ids = tokens().values[None]
    with torch.inference_mode():
        torch.testing.assert_close(
            model("llama", "scree")(ids).logits, model("llama", "sdpa")(ids).logits
        )


def compiled(name: str, device: str = "cpu", **options: Any) -> Any:
    """Yield logits and gradients of the compiled and the plain model, for both kinds of batches."""
    flat, padded, is_token = batches(name, "left", device)
    plain = model(name, "scree", device)
    compiled_model = torch.compile(plain, fullgraph=True, **options)
    for batch, at in ((flat, 0), (padded, is_token)):
        results = []
        for f in (compiled_model, plain):
            logits = f(**batch, use_cache=False).logits[at]
            logits.square().mean().backward()
            results.append([logits, *gradients(plain)])
        yield results


@pytest.mark.parametrize("causal, length, kv_length", [(False, 7, 7), (True, 7, 7), (True, 3, 9)])
def test_compacted_attention_agrees_with_sequence_attention(
    causal: bool, length: int, kv_length: int
) -> None:
    """Compare one compiled layer on random masks; the queries are the last of 7 keys of a cache."""
    options = {"causal": causal, "window": None, "scale": None, "softcap": None}
    compacted = torch.compile(bridge.compacted_attention, backend="eager", fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(4 * n, heads, 8, generator=generator)
        for n, heads in ((length, 4), (kv_length, 2), (kv_length, 2))
    )
    qkv = [x.requires_grad_() for x in (q, k, v)]
    for probability in (0.0, 0.2, 0.5, 0.8, 1.0):
        key_mask = torch.rand(4, 7, generator=generator) < probability
        results = [
            compacted(*qkv, 4, key_mask, options),
            bridge.sequence_attention(*qkv, 4, key_mask, None, False, options),
        ]
        weight = torch.randn(results[0].shape, generator=generator)
        torch.testing.assert_close(*results)
        torch.testing.assert_close(
            *(torch.autograd.grad((x * weight).sum(), qkv, materialize_grads=True) for x in results)
        )


@pytest.mark.parametrize("name, backend", [("llama", "aot_eager"), ("gemma3", "eager")])
def test_model_compiles_as_one_graph(name: str, backend: str) -> None:
    for actual, expected in compiled(name, backend=backend):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name, use_cache", [("llama", True), ("gemma2", False)])
def test_rows_without_a_mask_compile_as_one_graph(name: str, use_cache: bool) -> None:
    """As in the test of transformers, "can compile with attention_mask None without graph break"."""
    torch.compiler.reset()
    ids = torch.randint(3, 59, (3, 7), generator=torch.Generator().manual_seed(0))
    plain = model(name, peers(name)[-1])
    compiled_model = torch.compile(model(name, "scree"), backend="eager", fullgraph=True)
    results = []
    for f, module in ((compiled_model, model(name, "scree")), (plain, plain)):
        out = f(ids, labels=ids, use_cache=use_cache)
        out.loss.backward()
        results.append([out.logits, *gradients(module)])
    torch.testing.assert_close(*results)


def test_compiled_rows_of_several_sequences_raise() -> None:
    torch.compiler.reset()
    positions = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]])
    compiled_model = torch.compile(model("llama", "scree"), backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="position_ids: expected one sequence per row"):
        compiled_model(positions + 5, position_ids=positions, use_cache=False)


def test_compiled_window_with_gaps_raises() -> None:
    ids, mask = to_hf_padded(tokens())
    mask[2, 4] = 0
    compiled_model = torch.compile(model("gemma3", "scree"), backend="eager", fullgraph=True)
    with (
        pytest.raises(RuntimeError, match="attention_mask: expected padding before or after"),
        torch.no_grad(),
    ):
        compiled_model(ids, attention_mask=mask, use_cache=False)


DROPOUT = {
    "bert": transformers.BertConfig(**SIZE, attention_probs_dropout_prob=0.1),
    "roberta": transformers.RobertaConfig(**SIZE, attention_probs_dropout_prob=0.1),
    "gpt2": transformers.GPT2Config(
        vocab_size=60, n_positions=64, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.1
    ),
}


@pytest.mark.parametrize("name", DROPOUT)
@pytest.mark.parametrize("form", ["padded", "flattened"])
def test_training_with_attention_dropout_agrees_with_sdpa(name: str, form: str) -> None:
    """Equal seeds give equal dropout, so that losses and gradients are equal."""
    ids = tokens()
    batch: dict[str, Any] = dict(to_hf_flattened(ids))
    if form == "padded":
        padded, mask = to_hf_padded(ids)
        batch = {"input_ids": padded, "attention_mask": mask}
    elif name != "gpt2":
        return  # sdpa finds the sequences of a flattened batch in decoders only
    results = []
    for attention in ("scree", "sdpa"):
        torch.manual_seed(0)
        kind = transformers.AutoModelForCausalLM if name == "gpt2" else transformers.AutoModel
        net = kind.from_config(DROPOUT[name], attn_implementation=attention).train()
        torch.manual_seed(1)
        options = {"use_cache": False} if name == "gpt2" else {}
        out = net(**batch, **options, output_hidden_states=True).hidden_states[-1]
        is_token = batch.get("attention_mask", torch.ones(out.shape[:2])).bool()
        loss = out[is_token].square().mean()
        loss.backward()
        results.append([loss.detach(), *gradients(net)])
    torch.testing.assert_close(*results)


def test_attention_dropout_drops_the_given_fraction() -> None:
    layer = model("llama", "scree").train()
    q, k = torch.randn(1, 2, 400, 8), torch.zeros(1, 2, 400, 8)
    v = torch.eye(400).expand(1, 2, 400, 400)
    out, _ = bridge.forward(layer, q, k, v, None, dropout=0.25, is_causal=False)
    assert abs(float((out == 0).float().mean()) - 0.25) < 0.01
    torch.testing.assert_close(out.max(), torch.tensor(1 / 400 / 0.75))
    for more in ({"softcap": 1.0}, {"s_aux": torch.full((2,), -1e9)}):
        out, _ = bridge.forward(layer, q, k, v, None, dropout=0.25, is_causal=False, **more)
        assert abs(float((out == 0).float().mean()) - 0.25) < 0.01
        torch.testing.assert_close(out.max(), torch.tensor(1 / 400 / 0.75), rtol=1e-4, atol=0)


def test_unsupported_arguments_raise() -> None:
    ids, mask = to_hf_padded(tokens())
    llama = model("llama", "scree")
    with pytest.raises(ValueError, match=r"attention_mask: expected \(batch, length\) of 0 and 1"):
        llama(ids, attention_mask=mask[:, None, None, :] * torch.ones(4, 1, 12, 12))
    with pytest.raises(ValueError, match="cu_seq_lens_q: expected a flattened batch"):
        llama(ids, cu_seq_lens_q=torch.tensor([0, 12], dtype=torch.int32))
    gaps = mask.clone()
    gaps[2, 4] = 0
    with pytest.raises(ValueError, match="attention_mask: expected padding before or after"):
        model("gemma2", "scree")(ids, attention_mask=gaps)
    for name in ("position_bias", "cache"):
        with pytest.raises(ValueError, match=f"^{name}: scree's attention does not support it"):
            bridge.forward(llama, *(torch.ones(1, 1, 2, 8) for _ in range(3)), None, **{name: 0.5})
    from transformers.masking_utils import causal_mask_function, chunked_overlay, or_masks

    unsupported_mask = or_masks(causal_mask_function, causal_mask_function)
    for function in (
        chunked_overlay(2, torch.zeros(1)),
        unsupported_mask,
        partial(causal_mask_function, 0),
    ):
        with pytest.raises(
            ValueError, match="attention_mask: expected a causal, windowed, padded or packed mask"
        ):
            bridge.mask(1, 4, 4, mask_function=function)
    phimoe = transformers.PhimoeConfig(
        **GROUPED, sliding_window=4, num_local_experts=2, attn_implementation="scree"
    )
    with pytest.raises(ValueError, match="sliding_window: expected the window from the layer too"):
        transformers.AutoModelForCausalLM.from_config(phimoe, attn_implementation="scree")(ids)
    with pytest.raises(ValueError, match="name: expected"):
        bridge.register("my_flash")


def test_mask_with_gaps_without_a_window_agrees_with_sdpa() -> None:
    ids, mask = to_hf_padded(tokens())
    mask[2, 4] = mask[0, 0] = 0
    is_token = mask.bool()
    actual, expected = (
        model("llama", name)(ids, attention_mask=mask).logits[is_token]
        for name in ("scree", "sdpa")
    )
    torch.testing.assert_close(actual, expected)


# ---------------------------------------------------------------- on a device
@pytest.fixture
def providers(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Collect the providers of the attention calls of a model."""
    seen, attention = set(), bridge.attention

    def watched(*arrays: Any, **options: Any) -> Any:
        seen.add(scree.explain("attention", *arrays, **options).provider)
        return attention(*arrays, **options)

    monkeypatch.setattr(bridge, "attention", watched)
    return seen


def with_gradients(module: Any, logits: torch.Tensor) -> list[torch.Tensor]:
    logits.double().square().mean().backward()
    return [logits, *gradients(module)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_on_cuda_run_on_triton(name: str, dtype: torch.dtype, providers: set[str]) -> None:
    flat, padded, is_token = batches(name, device="cuda")
    scree_model, peer_model, eager = (
        model(name, attention, "cuda", dtype) for attention in ("scree", peers(name)[-1], "eager")
    )
    exact_model = deepcopy(eager).to(torch.float64 if dtype == torch.float32 else torch.float32)
    exact = with_gradients(
        exact_model,
        torch.cat([exact_model(input_ids=row[None].cuda()).logits[0] for row in tokens()]),
    )
    peer = with_gradients(peer_model, peer_model(**padded).logits[is_token])
    for logits in (scree_model(**padded).logits[is_token], scree_model(**flat).logits[0]):
        results = with_gradients(scree_model, logits)
        assert_as_accurate(results[0], peer[0], exact[0])
        assert_as_accurate(results[1:], peer[1:], exact[1:])
    assert providers == {"triton"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_generate_on_cuda_runs_on_triton(
    name: str, implementation: str, providers: set[str]
) -> None:
    ids, mask = to_hf_padded(tokens(), side="left")
    options = dict(
        attention_mask=mask.cuda(),
        max_new_tokens=6,
        do_sample=False,
        cache_implementation=implementation,
        disable_compile=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    actual, expected = (
        model(name, attention, "cuda").generate(ids.cuda(), **options)
        for attention in ("scree", peers(name)[-1])
    )
    assert torch.equal(actual.sequences, expected.sequences)
    torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-4, atol=1e-4)
    assert providers == {"triton"}


@pytest.mark.gpu
@pytest.mark.parametrize("name, backend", [("llama", "inductor"), ("gemma3", "aot_eager")])
def test_model_compiles_as_one_graph_on_cuda(name: str, backend: str) -> None:
    for actual, expected in compiled(name, "cuda", backend=backend):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
