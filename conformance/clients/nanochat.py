"""nanochat's model with random weights: training steps, and generation with its cache.

`python conformance/clients/nanochat.py CHECKOUT --attention scree` gives its module of attention the functions
of scree in place of the functions of FlashAttention 3.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from common import definitions, open_checkout, report

SIZES = {
    "tiny": dict(sequence_len=64, vocab_size=128, n_layer=3, n_head=2, n_kv_head=2, n_embd=64),
    "d12": dict(sequence_len=2048, vocab_size=32768, n_layer=12, n_head=6, n_kv_head=6, n_embd=768),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout")
    parser.add_argument("--attention", choices=["scree", "sdpa", "both"], default="both")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    checkout = open_checkout(options.checkout)
    import torch
    from nanochat import flash_attention
    from nanochat.gpt import GPT, GPTConfig

    from scree.bridges.flash_attn import v3

    # The module of the cache imports tokenizers, which this script does not need.
    KVCache = definitions(checkout / "nanochat/engine.py", {"KVCache"}, {"torch": torch})["KVCache"]
    is_cuda = torch.cuda.is_available()
    device = "cuda" if is_cuda else "cpu"
    if not is_cuda:  # the optimizer compiles, which takes most of the time of a short run
        torch.compiler.set_stance("force_eager")
    size = SIZES[options.size]
    module: Any = flash_attention
    results: dict[str, Any] = {"size": options.size}
    outcomes = []
    for attention in ["sdpa", "scree"] if options.attention == "both" else [options.attention]:
        module._fa3, module.USE_FA3 = (v3, True) if attention == "scree" else (None, False)
        torch.compiler.reset()
        torch.manual_seed(0)
        model = GPT(GPTConfig(**size, window_pattern="SSSL"))
        model.to(device)
        model.init_weights()
        optimizer = model.setup_optimizer()
        # Text of a language with one rule: the next token is a function of the last two.
        tokens = torch.randint(size["vocab_size"], (options.rows, size["sequence_len"] + 1))
        for i in range(2, tokens.shape[1]):
            tokens[:, i] = (3 * tokens[:, i - 1] + 5 * tokens[:, i - 2]) % 97
        inputs, targets = (x.contiguous().to(device) for x in (tokens[:, :-1], tokens[:, 1:]))
        step: Any = torch.compile(model, dynamic=False) if is_cuda else model
        losses = []
        for i in range(options.steps):
            if i == 5:
                if is_cuda:
                    torch.cuda.synchronize()
                begin = time.perf_counter()
            loss = step(inputs, targets)
            loss.backward()
            optimizer.step()
            model.zero_grad(set_to_none=True)
            losses.append(loss.detach())
        if is_cuda:
            torch.cuda.synchronize()
        values = [round(float(loss), 4) for loss in losses]
        results[f"{attention}_losses"] = [values[0], values[-1]]
        if options.steps > 5:
            seconds = time.perf_counter() - begin
            rate = (options.steps - 5) * inputs.numel() / seconds
            results[f"{attention}_tokens_per_s"] = round(rate)
        head_dim = size["n_embd"] // size["n_head"]
        dtype = torch.bfloat16 if is_cuda else torch.float32
        cache = KVCache(2, size["n_kv_head"], 48, head_dim, size["n_layer"], device, dtype)
        generated = []
        with torch.inference_mode():
            ids = inputs[:2, :20]
            for _ in range(12):
                ids = model(ids, kv_cache=cache)[:, -1:].argmax(-1)
                generated.append(ids)
        outcomes.append((values, torch.cat(generated, 1).tolist()))
    if len(outcomes) == 2:
        (losses_a, tokens_a), (losses_b, tokens_b) = outcomes
        difference = max(abs(a - b) for a, b in zip(losses_a, losses_b))
        results |= {"largest_difference_of_losses": round(difference, 5)}
        results |= {"equal_tokens": tokens_a == tokens_b}
    report("nanochat", checkout, **results)
    if results.get("equal_tokens") is False and not is_cuda:
        raise SystemExit("expected the tokens of sdpa")


if __name__ == "__main__":
    main()
