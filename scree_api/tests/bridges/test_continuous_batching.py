"""`generate_batch` of transformers on scree: the tokens of `generate` with `eager`."""

import inspect
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import initialization, model_runner

from scree.bridges import continuous_batching
from scree.bridges import transformers as bridge

NAME = "scree_flash2"
SIZE = dict(
    vocab_size=60,
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=59,
)
GEMMA = SIZE | dict(head_dim=16, sliding_window=6, query_pre_attn_scalar=16)
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SIZE),
    "mistral": lambda: transformers.MistralConfig(**SIZE, sliding_window=6),
    "gemma2": lambda: transformers.Gemma2Config(**GEMMA, attn_logit_softcapping=2.0),
    "gemma3": lambda: transformers.Gemma3TextConfig(**GEMMA, sliding_window_pattern=2),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZE, head_dim=16, sliding_window=6, num_local_experts=4, num_experts_per_tok=2,
        experts_implementation="batched_mm",  # without a wait for the host: CUDA graphs
    ),
}  # fmt: skip
PROMPTS = [[3 + (7 * i + 5 * j) % 55 for j in range(n)] for i, n in enumerate((7, 1, 12, 5, 23))]
NUM_TOKENS = 12

bridge.register()
bridge.register_continuous_batching(NAME)


def model(name: str, attention: str, device: str = "cpu") -> Any:
    torch.manual_seed(0)
    config = CONFIGS[name]()
    net = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter in net.parameters():  # the next token depends on the tokens before it
        parameter.data *= 3
    return net.eval().to(device)


@cache
def expected_tokens(name: str) -> list[list[int]]:
    net = model(name, "eager")
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
    return [net.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in PROMPTS]


def generated_tokens(net: Any, **options: Any) -> list[list[int]]:
    """Return the tokens of `generate_batch` with pages of 4 tokens, and chunks of up to 16."""
    accepted = inspect.signature(ContinuousBatchingConfig).parameters
    page_size = "page_size" if "page_size" in accepted else "block_size"
    if "auto_switch_to_flash" in accepted:
        options["auto_switch_to_flash"] = False
    results = net.generate_batch(
        PROMPTS,
        generation_config=GenerationConfig(
            max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=-1
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=64, max_batch_tokens=16, **{page_size: 4}, **options
        ),
        progress_bar=False,
    )
    names = sorted(results, key=lambda name: int(name.rpartition("_")[2]))
    return [results[name].generated_tokens for name in names]


@pytest.fixture
def decode_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect the calls with a block table."""
    calls: list[Any] = []
    decode = continuous_batching._decode

    def watched(*args: Any) -> torch.Tensor:
        calls.append(args)
        return decode(*args)

    monkeypatch.setattr(continuous_batching, "_decode", watched)
    return calls


@pytest.mark.parametrize("name", CONFIGS)
def test_generate_batch_by_slots_agrees_with_eager(name: str, decode_calls: list[Any]) -> None:
    assert generated_tokens(model(name, NAME)) == expected_tokens(name)
    assert not decode_calls


@pytest.mark.parametrize("name", CONFIGS)
def test_generate_batch_by_block_tables_agrees_with_eager(
    name: str, decode_calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers uses block tables on accelerators only
    monkeypatch.setattr(
        initialization, "ensure_decode_fast_path_is_available", lambda *args, **kwargs: None
    )
    tokens = generated_tokens(model(name, NAME), max_blocks_per_request=16)
    assert tokens == expected_tokens(name)
    assert decode_calls


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
@pytest.mark.parametrize("max_blocks", [0, 16])
def test_generate_batch_of_padded_batches_agrees_with_eager(
    name: str, max_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA graphs need them: rows without tokens, and tokens after the last row."""
    monkeypatch.setattr(
        initialization, "ensure_decode_fast_path_is_available", lambda *args, **kwargs: None
    )
    construct = model_runner.ModelRunner.__init__

    def construct_padding(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        self.pad_inputs = True

    monkeypatch.setattr(model_runner.ModelRunner, "__init__", construct_padding)
    tokens = generated_tokens(
        model(name, NAME),
        max_blocks_per_request=max_blocks,
        q_padding_interval_size=8,
        kv_padding_interval_size=16,
        use_cuda_graph=False,
    )
    assert tokens == expected_tokens(name)


def test_block_tables_of_windowed_layers_depend_on_the_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    num_blocks = {}
    for name in (NAME, "sdpa"):
        config = CONFIGS["gemma3"]()
        config._attn_implementation = name
        batching = ContinuousBatchingConfig(max_blocks_per_request=16)
        initialization.ensure_decode_fast_path_is_available(config, batching, True)
        num_blocks[name] = batching.max_blocks_per_request
    assert num_blocks == {NAME: 16, "sdpa": 0}


def test_generate_batch_with_the_public_name() -> None:
    """Up to 5.18 transformers accepts every registered name, and later none without "flash"."""
    net = model("llama", "scree")
    if continuous_batching.VERSION < continuous_batching.WITHOUT_PREFIX:
        assert generated_tokens(net) == expected_tokens("llama")
    else:
        with pytest.raises(ValueError, match="is not supported"):
            generated_tokens(net)


def test_model_with_the_name_of_continuous_batching_runs_as_usual() -> None:
    ids = torch.tensor([PROMPTS[2], PROMPTS[4][:12]])
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    actual, expected = (
        model("gemma3", name)(ids, attention_mask=mask).logits[mask.bool()]
        for name in (NAME, "sdpa")
    )
    torch.testing.assert_close(actual, expected)


def test_register_continuous_batching_raises_for_other_names_and_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("scree", "scree2", "2flash"):
        with pytest.raises(ValueError, match="name: expected a name with 'flash' and then 2 or 3"):
            bridge.register_continuous_batching(name)
    monkeypatch.setattr(continuous_batching, "VERSION", (6, 0))
    with pytest.raises(RuntimeError, match=r"expected version 5\.17 to 5\.24"):
        bridge.register_continuous_batching()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("use_cuda_graph", [False, True])
def test_generate_batch_on_cuda_agrees_with_eager(
    name: str, use_cuda_graph: bool, decode_calls: list[Any]
) -> None:
    net = model(name, NAME, "cuda")
    options = {"use_cuda_graph": use_cuda_graph, "max_blocks_per_request": 16}
    assert generated_tokens(net, **options) == expected_tokens(name)
    assert decode_calls
