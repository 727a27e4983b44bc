"""Tokens per second of `generate_batch` of transformers, with random weights.

`python conformance/clients/continuous_batching.py --attention scree_flash2 --model llama` runs one
implementation. The peers are transformers' own paths:

- `sdpa`.
- `fa4_flash2`: its path for FlashAttention, with the functions of FlashAttention 4.
- `fa2_flash2`: the same path, with the kernels of FlashAttention 2 in PyTorch. These kernels take no
  pages, so this path has no block tables.
"""

from __future__ import annotations

import argparse
import inspect
import time
from typing import Any

from common import (
    add_generation_arguments,
    compare_tokens,
    log_normal_lengths,
    random_prompts,
    report,
)
from flash_peers import peer_functions

VOCABULARY = 32000
#: Names of implementations -> names of `peer_functions`.
PEERS = {"fa2_flash2": "torch", "fa4_flash2": "fa4"}
MODELS: dict[str, dict[str, Any]] = {
    # the sizes of Llama 3.2 1B and of Gemma 3 1B, with a smaller vocabulary
    "llama": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
                  num_attention_heads=32, num_key_value_heads=8, head_dim=64),
    "gemma3": dict(hidden_size=1152, intermediate_size=6912, num_hidden_layers=26,
                   num_attention_heads=4, num_key_value_heads=1, head_dim=256, sliding_window=512,
                   query_pre_attn_scalar=256),
    "tiny-llama": dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                       num_attention_heads=4, num_key_value_heads=2),
    "tiny-gemma3": dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                        num_attention_heads=4, num_key_value_heads=1, head_dim=16,
                        sliding_window=16, query_pre_attn_scalar=16, sliding_window_pattern=2),
}  # fmt: skip


def register_peer(name: str, peer: str) -> None:
    """Give transformers the functions of a peer for its own path of FlashAttention."""
    import transformers
    from transformers import modeling_flash_attention_utils as utils
    from transformers.integrations.flash_paged import paged_attention_forward

    load = utils._lazy_imports
    functions = None, *peer_functions(peer), utils._pad_input, utils._unpad_input

    def load_functions(implementation: Any, *args: Any, **kwargs: Any) -> Any:
        is_ours = (implementation or "").removeprefix("paged|") == name
        return functions if is_ours else load(implementation, *args, **kwargs)

    utils._lazy_imports = load_functions
    for prefix in ("", "paged|"):
        transformers.AttentionInterface.register(prefix + name, paged_attention_forward)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--attention", default="scree_flash2")
    parser.add_argument("--model", choices=MODELS, default="tiny-llama")
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--warmup-tokens", type=int, default=4)
    add_generation_arguments(parser, tokens=8)
    options = parser.parse_args()

    import torch
    import transformers

    import scree

    is_cuda = torch.cuda.is_available()
    name = options.attention
    is_prefixed = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 19)
    if name == "sdpa" and is_prefixed:  # the plain name would be replaced by FlashAttention
        name = "paged|sdpa"
    elif name in PEERS:
        register_peer(name, PEERS[name])
    elif name == "scree":
        scree.bridges.transformers.register()
    elif name.startswith("scree"):
        scree.bridges.transformers.register_continuous_batching(name)
    kind = transformers.Gemma3TextConfig if "gemma3" in options.model else transformers.LlamaConfig
    config = kind(
        **MODELS[options.model], vocab_size=VOCABULARY if is_cuda else 200,
        max_position_embeddings=8192, tie_word_embeddings=True, eos_token_id=None,
        bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    device, dtype = ("cuda", torch.bfloat16) if is_cuda else ("cpu", torch.float32)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=name
        ).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:  # larger weights: the next token depends on the tokens before it
            parameter.data *= 2
    lengths = log_normal_lengths(options.prompts, options.median, options.longest)
    cb_options: dict[str, Any] = {"num_blocks": 64, "max_batch_tokens": 64}
    if is_cuda:  # enough for all prompts; transformers allocates one block per group of layers
        cb_options = {"num_blocks": 640, "max_batch_tokens": 4096}
        if len(set(getattr(config, "layer_types", None) or [])) > 1:
            cb_options = {"num_blocks": 4096, "max_batch_tokens": 2048}
    if name == "fa2_flash2":
        cb_options["max_blocks_per_request"] = 0
    accepted = inspect.signature(transformers.ContinuousBatchingConfig).parameters
    if "auto_switch_to_flash" in accepted:
        cb_options["auto_switch_to_flash"] = False

    def generate(seed: int, tokens: int) -> tuple[list[list[int]], float]:
        generation = transformers.GenerationConfig(
            max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        begin = time.perf_counter()
        results = model.generate_batch(
            random_prompts(lengths, range(3, config.vocab_size), seed), generation_config=generation, persistent_manager=True,
            continuous_batching_config=transformers.ContinuousBatchingConfig(**cb_options),
        )  # fmt: skip
        seconds = time.perf_counter() - begin
        names = sorted(results, key=lambda request: int(request.rpartition("_")[2]))
        return [results[request].generated_tokens for request in names], seconds

    _, first = generate(1, options.warmup_tokens)
    tokens, seconds = generate(2, options.tokens)
    produced = sum(map(len, tokens))
    results = {
        "transformers": transformers.__version__, "attention": name, "model": options.model,
        "prompts": options.prompts, "prompt_tokens": sum(lengths), "new_tokens": produced,
        "tokens_per_s": round(produced / seconds, 1), "run_s": round(seconds, 2),
        "warmup_s": round(first, 1),
    }  # fmt: skip
    if is_cuda:
        results["memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    results |= compare_tokens(options, tokens)
    report("transformers generate_batch", **results)
    model.destroy_cached_continuous_batching_manager()


if __name__ == "__main__":
    main()
