"""nano-vllm with random weights: its import of `flash_attn` gives the functions of scree, or others.

`python conformance/clients/nano_vllm.py CHECKOUT --attention scree` runs the engine unchanged. On a CPU it
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
from importlib.machinery import ModuleSpec
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
    if name == "scree":
        from scree.bridges import flash_attn

        return flash_attn
    if name == "fa4":  # import the package before the module below takes its name
        import flash_attn.cute
    attend = attend_by_fa4 if name == "fa4" else attend_by_torch
    module: Any = ModuleType("flash_attn")
    module.__spec__ = ModuleSpec("flash_attn", None)  # transformers asks for it

    def varlen(q: Any, k: Any, v: Any, *, cu_seqlens_k: Any, block_table: Any, **rest: Any) -> Any:
        used = None if block_table is None else cu_seqlens_k.diff()
        cu_q, max_q, max_k = (rest[x] for x in ("cu_seqlens_q", "max_seqlen_q", "max_seqlen_k"))
        scale = rest["softmax_scale"]
        return attend(q, k, v, cu_q, cu_seqlens_k, max_q, max_k, block_table, used, scale)

    def kvcache(
        q: Any, k: Any, v: Any, *, cache_seqlens: Any, block_table: Any, **rest: Any
    ) -> Any:
        cu_q = offsets(q.shape[0], 1, q.device)
        length, scale = block_table.shape[1] * k.shape[1], rest["softmax_scale"]
        arguments = cu_q, None, 1, length, block_table, cache_seqlens, scale
        return attend(q[:, 0], k, v, *arguments)[:, None]

    module.flash_attn_varlen_func, module.flash_attn_with_kvcache = varlen, kvcache
    return module


@cache
def offsets(batch: int, length: int, device: Any) -> Any:
    """Return the offsets of rows of equal length."""
    import torch

    return torch.arange(batch + 1, dtype=torch.int32, device=device) * length


def attend_by_fa4(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, table: Any, used: Any,
    scale: float,
) -> Any:  # fmt: skip
    """Compute causal attention with FlashAttention 4; with a table, `k` and `v` are pages."""
    from flash_attn.cute import flash_attn_varlen_func

    layout: dict[str, Any] = {"cu_seqlens_k": cu_k, "max_seqlen_k": max_k}
    if table is not None:
        layout = {"page_table": table, "seqused_k": used.int()}
    out = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cu_q, max_seqlen_q=max_q, softmax_scale=scale, causal=True, **layout
    )
    return out[0] if isinstance(out, tuple) else out


def attend_by_torch(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, table: Any, used: Any,
    scale: float,
) -> Any:  # fmt: skip
    """Compute causal attention with PyTorch's operators, which have no pages: copy them first."""
    import torch

    if table is not None:
        max_k = table.shape[1] * k.shape[1]
        cu_k = offsets(table.shape[0], max_k, q.device)
        k, v = (x[table.clamp(min=0)].reshape(-1, *x.shape[2:]) for x in (k, v))
    if q.is_cuda:
        used = None if used is None else used.int()
        return torch.ops.aten._flash_attention_forward(
            q, k, v, cu_q, cu_k, max_q, max_k, 0.0, True, False, scale=scale, seqused_k=used
        )[0]
    rows = []
    for i, (begin, end) in enumerate(zip(cu_q[:-1].tolist(), cu_q[1:].tolist())):
        length = int(cu_k[i + 1] - cu_k[i]) if used is None else int(used[i])
        row_k, row_v = (x[int(cu_k[i]) : int(cu_k[i]) + length] for x in (k, v))
        mask = torch.ones(end - begin, length, dtype=torch.bool).tril(length - (end - begin))
        row = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (q[begin:end], row_k, row_v)),
            attn_mask=mask, scale=scale, enable_gqa=True,
        )  # fmt: skip
        rows.append(row[0].transpose(0, 1))
    return torch.cat(rows)


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
            max_num_batched_tokens=16384 if is_cuda else 64, max_num_seqs=min(options.prompts, 256),
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
