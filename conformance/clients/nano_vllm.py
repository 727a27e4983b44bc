"""nano-vllm with random weights: its import of `flash_attn` gives the functions of scree, or others.

`python conformance/clients/nano_vllm.py CHECKOUT --attention scree` runs the engine unchanged. On a CPU it
replaces the calls of CUDA, and Triton's interpreter runs the engine's own kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from common import (
    add_generation_arguments,
    compare_tokens,
    log_normal_lengths,
    open_checkout,
    random_prompts,
    report,
)
from flash_peers import peer_functions

SIZES = {
    "tiny": dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=16, vocab_size=200),
    "0.6B": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
                 num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=151936),
}  # fmt: skip


def flash_functions(name: str) -> ModuleType:
    """Return a module `flash_attn` with the two functions that the engine imports."""
    if name == "scree":
        from scree.bridges import flash_attn

        return flash_attn
    if name == "fa4":  # import the package before the module below takes its name
        import flash_attn.cute
    module: Any = ModuleType("flash_attn")
    module.__spec__ = ModuleSpec("flash_attn", None)  # transformers asks for it
    module.flash_attn_varlen_func, module.flash_attn_with_kvcache = peer_functions(name)
    return module


def use_cpu() -> None:
    """Replace the calls of CUDA that the engine makes."""
    import torch
    import torch.distributed as dist

    tensor, init, device = torch.tensor, dist.init_process_group, torch.set_default_device
    memory = {"allocated_bytes.all.peak": 0, "allocated_bytes.all.current": 0}
    replaced: Any = torch
    replaced.tensor = lambda *args, pin_memory=False, **kwargs: tensor(*args, **kwargs)
    replaced.Tensor.cuda = lambda self, **kwargs: self
    replaced.set_default_device = lambda name: device("cpu")
    replaced.cuda.mem_get_info = lambda: (2**24, 2**24)
    replaced.cuda.memory_stats = lambda: memory
    for name in ("set_device", "empty_cache", "reset_peak_memory_stats", "synchronize"):
        setattr(torch.cuda, name, lambda *args: None)
    replaced_dist: Any = dist
    replaced_dist.init_process_group = lambda backend, *args, **kwargs: init(
        "gloo", *args, **kwargs
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout")
    parser.add_argument("--attention", choices=["scree", "fa4", "torch"], default="scree")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--max-model-len", type=int, default=512)
    add_generation_arguments(parser, tokens=6)
    options = parser.parse_args()
    import torch

    is_cuda = torch.cuda.is_available()
    if not is_cuda:
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        use_cpu()
    checkout = open_checkout(options.checkout)
    sys.modules["flash_attn"] = flash_functions(options.attention)
    if find_spec("xxhash") is None:  # the engine hashes full blocks of prompts with it
        import hashlib

        xxhash_module: Any = ModuleType("xxhash")

        class Hash:
            def __init__(self) -> None:
                self.hash = hashlib.blake2b(digest_size=8)
                self.update = self.hash.update

            def intdigest(self) -> int:
                return int.from_bytes(self.hash.digest(), "little")

        xxhash_module.xxh64 = Hash
        sys.modules["xxhash"] = xxhash_module

    import transformers
    from nanovllm.engine import llm_engine, model_runner
    from nanovllm.sampling_params import SamplingParams

    def load_random(model: Any, path: str) -> None:
        generator = torch.Generator(device="cuda" if is_cuda else "cpu").manual_seed(0)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data.fill_(1.0)
            else:
                parameter.data.normal_(0, 0.05, generator=generator)

    engine: Any = model_runner
    engine.load_model = load_random
    if not is_cuda:  # the sampler writes into float32 logits
        engine.ModelRunner.run = torch.inference_mode()(engine.ModelRunner.run)
    tokenizer = SimpleNamespace(eos_token_id=-1, decode=lambda ids: "")
    llm_engine.AutoTokenizer = SimpleNamespace(from_pretrained=lambda *a, **k: tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        config = transformers.Qwen3Config(
            **SIZES[options.size], max_position_embeddings=4096, tie_word_embeddings=True
        )
        config.dtype = torch.bfloat16 if is_cuda else torch.float32
        config.save_pretrained(folder)
        text = json.loads((Path(folder) / "config.json").read_text())
        text["dtype"] = "bfloat16" if is_cuda else "float32"
        (Path(folder) / "config.json").write_text(json.dumps(text))
        llm = llm_engine.LLMEngine(
            folder, enforce_eager=not is_cuda, max_model_len=options.max_model_len,
            max_num_batched_tokens=16384 if is_cuda else 64, max_num_seqs=min(options.prompts, 256),
            gpu_memory_utilization=0.8,
        )  # fmt: skip
    longest = options.max_model_len - options.tokens
    lengths = log_normal_lengths(options.prompts, options.median, longest)
    prompts = random_prompts(lengths, range(100))
    sampling = SamplingParams(temperature=1e-4, max_tokens=options.tokens, ignore_eos=True)
    llm.generate([[1, 2, 3]], SamplingParams(temperature=1e-4, max_tokens=2), use_tqdm=False)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - begin
    tokens = [output["token_ids"] for output in outputs]
    results: dict[str, Any] = {"attention": options.attention, "size": options.size}
    results |= {"prompts": len(prompts), "prompt_tokens": sum(lengths)}
    results["tokens_per_s"] = round(sum(map(len, tokens)) / seconds, 1)
    results |= compare_tokens(options, tokens)
    report("nano-vllm", checkout, **results)
    if results.get("equal_tokens", 1.0) < 1 and not is_cuda:
        raise SystemExit("expected the tokens of the other run")


if __name__ == "__main__":
    main()
