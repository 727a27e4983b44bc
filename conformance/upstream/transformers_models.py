"""Models for the tests of attention in transformers' `tests/test_modeling_common.py`.

The tests of the attention "flash_attention_2" run with the attention "scree" instead. The file is
part of the source distribution of transformers, the models that its own tests use are not.
"""

import os
import re
import sys
import types
import unittest
from pathlib import Path
from typing import Any

import torch
import transformers

import scree

PATH = Path(os.environ["SCREE_UPSTREAM_SOURCE"]) / "tests/test_modeling_common.py"
#: The tests that run, without the conditions on packages and devices in their decorators.
TESTS = r"test_flash_attn_2_(?:inference_equivalence\w*|can_compile_\w+|from_config)"
SIZE = dict(
    vocab_size=99, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip
DECODER = SIZE | dict(num_key_value_heads=2, bos_token_id=1, eos_token_id=2)
GEMMA = DECODER | dict(head_dim=16, query_pre_attn_scalar=16)
#: Name of a model -> the sizes of its configuration.
MODELS: dict[str, dict[str, Any]] = {
    "Llama": DECODER,
    "Mistral": DECODER,
    "Qwen3": DECODER | dict(head_dim=16),
    "Gemma2": GEMMA,
    "Gemma3": GEMMA | dict(sliding_window_pattern=2),
    "Olmo2": DECODER,
    "Phi3": DECODER,
    "Starcoder2": DECODER,
    "Bert": SIZE,
    "ModernBert": SIZE | dict(cls_token_id=3, sep_token_id=4, bos_token_id=3, eos_token_id=4),
}
#: Models whose configuration is named differently, and models without a causal language model.
CONFIG_NAMES = {"Gemma3": "Gemma3TextConfig"}
ENCODERS = ("Bert", "ModernBert")


def load_mixin() -> Any:
    """Return `ModelTesterMixin` of the file, with its other mixins empty."""
    version = re.search("^Version: (.*)$", (PATH.parents[1] / "PKG-INFO").read_text(), re.M)
    if version is None or version[1] != transformers.__version__:
        raise SystemExit(f"transformers: expected the sources of {transformers.__version__}")
    text = PATH.read_text(encoding="utf-8").replace('"flash_attention_2"', '"scree"')
    if not torch.cuda.is_available():
        # A graph break ends the test with any compiler. Inductor takes minutes per model on a CPU.
        text = text.replace("fullgraph=True)", 'fullgraph=True, backend="aot_eager")')
    text = re.sub(rf"(?:    @.*\n)+(    def {TESTS}\()", r"\1", text)
    for name, mixin in (
        ("tests.exporters.test_export", "ExportTesterMixin"),
        ("tests.generation.test_utils", "GenerationTesterMixin"),
    ):
        module: Any = types.ModuleType(name)
        setattr(module, mixin, type(mixin, (), {}))
        sys.modules[name] = module
    module = types.ModuleType("tests.test_modeling_common")
    module.__package__ = "tests"
    sys.modules.setdefault("tests", types.ModuleType("tests"))
    exec(compile(text, str(PATH), "exec"), module.__dict__)
    return module.ModelTesterMixin


class Tester:
    """The configuration and the inputs of a model."""

    def __init__(self, config: type, sizes: dict[str, Any]):
        self.config, self.sizes = config, sizes

    def get_config(self) -> Any:
        return self.config(**self.sizes)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        from transformers.testing_utils import torch_device

        ids = torch.randint(5, SIZE["vocab_size"], (3, 12), device=torch_device)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def make_test(name: str, mixin: Any) -> type:
    """Return the tests of a model."""
    config = getattr(transformers, CONFIG_NAMES.get(name, f"{name}Config"))
    head = f"{name}ForMaskedLM" if name in ENCODERS else f"{name}ForCausalLM"
    models = tuple(getattr(transformers, x) for x in (head, config.__name__[:-6] + "Model"))
    members: dict[str, Any] = {
        "all_model_classes": models,
        "model_tester": Tester(config, MODELS[name]),
    }
    if name not in ENCODERS:
        members["_torch_compile_train_cls"] = models[0]
    for test in dir(mixin):
        if test.startswith("test_") and not re.fullmatch(TESTS, test):
            members[test] = None
    return type(f"Test{name}", (mixin, unittest.TestCase), members)


scree.bridges.transformers.register()
_mixin = load_mixin()
for _name in MODELS:
    globals()[f"Test{_name}"] = make_test(_name, _mixin)
