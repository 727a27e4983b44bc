"""Programs of transformers that train or generate, on scree and on `sdpa` or `eager`."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_transformers import MODELS, gradients, model, tokens

from scree.bridges import to_hf_flattened, to_hf_padded

TEXTS = [[3 + (5 * i + 7 * j) % 50 for j in range(n)] for i, n in enumerate((9, 2, 5, 12, 7, 3))]


def train(
    attention: str, folder: Path, is_flattened: bool, use_cpu: bool = True, **options: Any
) -> list[Any]:
    """Return the losses and weights of three steps of `Trainer` on batches of two texts."""
    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    net = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)

    def pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        texts = [torch.tensor(row["input_ids"]) for row in rows]
        ids, masks = (
            torch.nn.utils.rnn.pad_sequence(x, batch_first=True)
            for x in (texts, [torch.ones_like(text) for text in texts])
        )
        return {"input_ids": ids, "attention_mask": masks, "labels": ids.where(masks == 1, -100)}

    collator: Any = pad
    if is_flattened:
        collator = transformers.DataCollatorWithFlattening(
            return_flash_attn_kwargs=True, return_tensors="pt"
        )
    trainer = transformers.Trainer(
        net,
        transformers.TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            max_steps=3,
            logging_steps=1,
            learning_rate=1e-3,
            seed=0,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=use_cpu,
            **options,
        ),
        train_dataset=[{"input_ids": text} for text in TEXTS],
        data_collator=collator,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3
    return [torch.tensor(losses), *(p.detach() for p in net.parameters())]


@pytest.mark.parametrize("is_flattened", [False, True])
def test_trainer_agrees_with_sdpa_on_padded_batches(is_flattened: bool, tmp_path: Path) -> None:
    expected = train("sdpa", tmp_path, is_flattened=False)
    actual = train("scree", tmp_path, is_flattened)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


def test_trainer_in_mixed_precision_agrees_with_sdpa_on_padded_batches(tmp_path: Path) -> None:
    """The rotation gives queries and keys in float32, and the projection values in bfloat16."""
    losses, *_ = train("scree", tmp_path, True, bf16=True)
    expected, *_ = train("sdpa", tmp_path, False, bf16=True)
    torch.testing.assert_close(losses, expected, rtol=2e-3, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("is_flattened", [False, True])
def test_trainer_on_cuda_agrees_with_sdpa_on_padded_batches(
    is_flattened: bool, tmp_path: Path
) -> None:
    expected = train("sdpa", tmp_path, is_flattened=False, use_cpu=False)
    for options in ({}, {"gradient_checkpointing": True}):
        actual = train("scree", tmp_path, is_flattened, use_cpu=False, **options)
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def test_trainer_with_gradient_checkpointing_agrees_with_trainer_without(tmp_path: Path) -> None:
    expected = train("scree", tmp_path, True)
    torch.testing.assert_close(
        train("scree", tmp_path, True, gradient_checkpointing=True), expected
    )


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_gives_the_gradients_without_it(
    name: str, use_reentrant: bool
) -> None:
    batch = to_hf_flattened(tokens())
    net = model(name, "scree").train()
    results = []
    for is_checkpointed in (False, True):
        if is_checkpointed:
            net.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        net(**batch, use_cache=False).logits.square().mean().backward()
        results.append(gradients(net))
    net.gradient_checkpointing_disable()
    net.eval()
    torch.testing.assert_close(*results)


def test_compiled_generate_with_a_static_cache_agrees_with_sdpa() -> None:
    torch.compiler.reset()
    config = MODELS["llama"]()
    config.num_hidden_layers = 1
    ids, mask = to_hf_padded(tokens(), side="left")
    options = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False}
    compile_config = transformers.CompileConfig(backend="eager", fullgraph=True)
    compile_config._compile_all_devices = True
    results = []
    for attention, static in (
        ("scree", {"cache_implementation": "static", "compile_config": compile_config}),
        ("sdpa", {}),
    ):
        torch.manual_seed(0)
        net = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        results.append(net.eval().generate(ids, **options, **static))
    assert torch.equal(*results)
