"""TRL's `SFTTrainer` with `padding_free=True`, compared with its trainer on padded batches.

`python conformance/clients/trl_sft.py CHECKOUT` trains a small Llama with random weights on tokenized texts.
"""

from __future__ import annotations

import random
import tempfile
from typing import Any

from common import open_checkout, report


def main() -> None:
    checkout = open_checkout()
    import torch
    import transformers
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from trl import SFTConfig, SFTTrainer

    import scree

    scree.bridges.transformers.register()
    vocabulary = {f"t{i}": i for i in range(64)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t1")),
        pad_token="t0", eos_token="t2", unk_token="t1",
    )  # fmt: skip
    generator = random.Random(0)
    texts = [[generator.randrange(3, 64) for _ in range(n)] for n in (9, 30, 5, 12, 17, 3, 22, 8)]
    is_cuda = torch.cuda.is_available()

    def train(attention: str, is_padding_free: bool) -> list[Any]:
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, eos_token_id=2,
        )  # fmt: skip
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        with tempfile.TemporaryDirectory() as folder:
            trainer = SFTTrainer(
                model,
                SFTConfig(
                    output_dir=folder, per_device_train_batch_size=4, max_steps=4, logging_steps=1,
                    learning_rate=1e-3, padding_free=is_padding_free, max_length=None, bf16=False,
                    save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=not is_cuda,
                    gradient_checkpointing=False, seed=0,
                ),
                train_dataset=Dataset.from_dict({"input_ids": texts}),
                processing_class=tokenizer,
            )  # fmt: skip
            trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    expected, losses = train("sdpa", False), train("scree", True)
    difference = max(abs(a - b) for a, b in zip(losses, expected))
    report(
        "TRL SFT padding-free", checkout, losses=losses,
        largest_difference_of_losses=round(difference, 6),
    )  # fmt: skip
    if difference > 1e-3:
        raise SystemExit(f"expected the losses of padded batches on sdpa, {expected}")


if __name__ == "__main__":
    main()
