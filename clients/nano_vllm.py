"""nano-vllm with random weights: its import of `flash_attn` gives the functions of scree, or others.

`python clients/nano_vllm.py CHECKOUT --attention scree` runs the engine unchanged. On a CPU it
replaces the calls of CUDA, and Triton's interpreter runs the engine's own kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

SIZES = {
    "tiny": dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=16, vocab_size=200),
    "0.6B": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
                 num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=151936),
}  # fmt: skip


def flash_functions(name: str) -> ModuleType:
    """Return a module `flash_attn` with the two functions that the engine imports."""
    import torch

    if name == "scree":
        from scree.bridges import flash_attn

        return flash_attn
    module: Any = ModuleType("flash_attn")
    if name == "fa4":
        from flash_attn.cute import flash_attn_varlen_func as run

        def varlen(
            q: Any,
            k: Any,
            v: Any,
            max_seqlen_q: int,
            cu_seqlens_q: Any,
            max_seqlen_k: int,
            cu_seqlens_k: Any,
            softmax_scale: float,
            causal: bool,
            block_table: Any,
        ) -> Any:
            assert block_table is None, "this run has no shared prefixes"
            out = run(
                q,
                k,
                v,
                cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_k=cu_seqlens_k,
                max_seqlen_q=max_seqlen_q,
                max_seqlen_k=max_seqlen_k,
                softmax_scale=softmax_scale,
                causal=causal,
            )
            return out[0] if isinstance(out, tuple) else out

        def kvcache(
            q: Any,
            k_cache: Any,
            v_cache: Any,
            cache_seqlens: Any,
            block_table: Any,
            softmax_scale: float,
            causal: bool,
        ) -> Any:
            out = run(
                q,
                k_cache,
                v_cache,
                page_table=block_table,
                seqused_k=cache_seqlens,
                softmax_scale=softmax_scale,
                causal=causal,
            )
            return out[0] if isinstance(out, tuple) else out
    else:  # the operators of PyTorch, which have no pages: the pages are copied first

        @cache
        def offsets(batch: int, length: int, device: Any) -> Any:
            return torch.arange(batch + 1, dtype=torch.int32, device=device) * length

        def packed(
            q: Any,
            k: Any,
            v: Any,
            cu_q: Any,
            cu_k: Any,
            max_q: int,
            max_k: int,
            scale: float,
            used: Any = None,
        ) -> Any:
            if q.is_cuda:
                return torch.ops.aten._flash_attention_forward(
                    q, k, v, cu_q, cu_k, max_q, max_k, 0.0, True, False, scale=scale, seqused_k=used
                )[0]
            rows = []
            for i in range(len(cu_q) - 1):
                row_q = q[cu_q[i] : cu_q[i + 1]]
                length = int(cu_k[i + 1] - cu_k[i]) if used is None else int(used[i])
                row_k, row_v = (x[cu_k[i] : cu_k[i] + length] for x in (k, v))
                mask = torch.ones(len(row_q), length, dtype=torch.bool).tril(length - len(row_q))
                row = torch.nn.functional.scaled_dot_product_attention(
                    *(x.transpose(0, 1)[None] for x in (row_q, row_k, row_v)),
                    attn_mask=mask,
                    scale=scale,
                    enable_gqa=True,
                )
                rows.append(row[0].transpose(0, 1))
            return torch.cat(rows)

        def varlen(
            q: Any,
            k: Any,
            v: Any,
            max_seqlen_q: int,
            cu_seqlens_q: Any,
            max_seqlen_k: int,
            cu_seqlens_k: Any,
            softmax_scale: float,
            causal: bool,
            block_table: Any,
        ) -> Any:
            assert block_table is None, "this run has no shared prefixes"
            return packed(
                q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale
            )

        def kvcache(
            q: Any,
            k_cache: Any,
            v_cache: Any,
            cache_seqlens: Any,
            block_table: Any,
            softmax_scale: float,
            causal: bool,
        ) -> Any:
            batch, width = block_table.shape
            length = width * k_cache.shape[1]
            k, v = (
                x[block_table.clamp(min=0)].reshape(-1, *x.shape[2:]) for x in (k_cache, v_cache)
            )
            out = packed(
                q[:, 0],
                k,
                v,
                offsets(batch, 1, q.device),
                offsets(batch, length, q.device),
                1,
                length,
                softmax_scale,
                cache_seqlens,
            )
            return out[:, None]

    module.flash_attn_varlen_func, module.flash_attn_with_kvcache = varlen, kvcache
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
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--median", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--write", help="file for the tokens")
    parser.add_argument("--compare", help="file with the tokens of another run")
    options = parser.parse_args()
    start = time.perf_counter()
    import torch

    is_cuda = torch.cuda.is_available()
    if not is_cuda:
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        use_cpu()
    from common import equal_prefix, log_normal_lengths, open_checkout, report

    checkout = open_checkout(options.checkout)
    sys.modules["flash_attn"] = flash_functions(options.attention)
    try:
        import xxhash  # noqa: F401
    except ImportError:  # the engine hashes full blocks of prompts with it
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
            max_num_batched_tokens=16384 if is_cuda else 512, max_num_seqs=min(options.prompts, 256),
            gpu_memory_utilization=0.8,
        )  # fmt: skip
    longest = options.max_model_len - options.tokens
    lengths = log_normal_lengths(options.prompts, options.median, longest)
    generator = random.Random(0)
    prompts = [[generator.randrange(100) for _ in range(n)] for n in lengths]
    sampling = SamplingParams(temperature=1e-4, max_tokens=options.tokens, ignore_eos=True)
    llm.generate([[1, 2, 3]], SamplingParams(temperature=1e-4, max_tokens=2), use_tqdm=False)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - begin
    tokens = [output["token_ids"] for output in outputs]
    results: dict[str, Any] = {"attention": options.attention, "size": options.size}
    results |= {"prompts": len(prompts), "prompt_tokens": sum(lengths)}
    results["tokens_per_s"] = round(sum(map(len, tokens)) / seconds, 1)
    if options.write:
        Path(options.write).write_text(json.dumps(tokens))
    if options.compare:
        results["equal_tokens"] = equal_prefix(
            json.loads(Path(options.compare).read_text()), tokens
        )
    report("nano-vllm", start, checkout, **results)
    if results.get("equal_tokens", 1.0) < 1 and not is_cuda:
        raise SystemExit("expected the tokens of the other run")


if __name__ == "__main__":
    main()
