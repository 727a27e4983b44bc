"""The autograd functions of Liger-Kernel, computed by scree.

Liger's modules and functional forms call ``LigerRMSNormFunction.apply`` and so on. They stay as they
are; only these classes are replaced.
"""

import inspect
import sys
from pathlib import Path
from typing import Any

import torch
from dense_softmax import softmax

import scree


class _CrossEntropy:
    @staticmethod
    def apply(
        logits: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> tuple[Any, ...]:
        """Return loss, z-loss, accuracy and predictions; None for results that are not requested.

        Like PyTorch's loss, Liger's has the dtype of the logits. The loss of scree is float32.
        """
        options = {
            "class_weights": weight,
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "softcap": softcap,
            "reduction": reduction,
        }

        def loss(**others: Any) -> Any:
            return scree.cross_entropy(logits, target, **{**options, **others})

        total, z_loss, *others = _results(
            loss,
            lse_square_scale,
            reduction,
            return_z_loss,
            return_token_accuracy,
            _predictions(logits, target, ignore_index) if return_predicted_tokens else None,
        )
        z_loss = None if z_loss is None else z_loss.to(logits.dtype)
        return total.to(logits.dtype), z_loss, *others


class _LinearCrossEntropy:
    @staticmethod
    def apply(
        x: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
        ce_weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: Any = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> tuple[Any, ...]:
        """Return loss, z-loss, accuracy and predictions; None for results that are not requested."""
        options = {
            "class_weights": ce_weight,
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "softcap": softcap,
            "reduction": reduction,
        }
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)

        def loss(**others: Any) -> Any:
            arguments = {**options, **others}
            return scree.linear_cross_entropy(x, weight, target, bias, **arguments)

        if use_token_scaling:  # each loss times the detached probability of its class
            plain = {"class_weights": None, "label_smoothing": 0.0, "softcap": None}
            factor = torch.exp(-loss(**plain, reduction="none").detach())
            losses = loss(reduction="none", z_loss=lse_square_scale) * factor
            total = losses.sum() if reduction != "none" else losses
            if reduction == "mean":
                total = total / (target != ignore_index).sum()
            return total, None, None, None
        predictions = None
        if return_predicted_tokens:
            logits = x @ weight.T if bias is None else x @ weight.T + bias
            predictions = _predictions(logits, target, ignore_index)
        return _results(
            loss, lse_square_scale, reduction, return_z_loss, return_token_accuracy, predictions
        )


def _results(
    loss: Any,
    z_scale: float,
    reduction: str,
    return_z_loss: bool,
    return_accuracy: bool,
    predictions: Any,
) -> tuple[Any, ...]:
    z_loss = accuracy = None
    if return_z_loss:
        # With a factor of 1 the z-loss is not small relative to the loss, so the difference is accurate.
        z_loss = z_scale * (loss(z_loss=1.0) - loss()).detach()
    if return_accuracy:
        # Liger's accuracy of a sum is the mean of the tokens.
        kind = "none" if reduction == "none" else "mean"
        accuracy = loss(reduction=kind, return_accuracy=True)[1]
    return loss(z_loss=z_scale), z_loss, accuracy, predictions


def _predictions(logits: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    return torch.where(target == ignore_index, -1, logits.argmax(-1))


class _RMSNorm:
    @staticmethod
    def apply(
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        offset: float = 0.0,
        casting_mode: str = "llama",
        in_place: bool = True,
        row_mode: Any = None,
    ) -> torch.Tensor:
        """Return the RMS norm of x with the weight ``weight + offset``."""
        return scree.rms_norm(x, _shifted(weight, offset), eps=eps)


class _FusedAddRMSNorm:
    @staticmethod
    def apply(
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        offset: float = 0.0,
        casting_mode: str = "llama",
        in_place: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the RMS norm of the sum, and the sum."""
        return scree.rms_norm(x, _shifted(weight, offset), residual=residual, eps=eps)


def _shifted(weight: torch.Tensor | None, offset: float) -> torch.Tensor | None:
    return weight if weight is None or not offset else weight.float() + offset


class _LayerNorm:
    @staticmethod
    def apply(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Return the layer norm of x."""
        return scree.layer_norm(x, weight, bias, eps=eps)


class _SiLUMul:
    @staticmethod
    def apply(
        a: torch.Tensor, b: torch.Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
    ) -> torch.Tensor:
        """Return ``silu(a) * b``."""
        return scree.swiglu(torch.cat([a * gate_multiplier, b], -1)) * down_multiplier


class _GELUMul:
    @staticmethod
    def apply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return ``gelu(a) * b`` with the tanh approximation."""
        return scree.gelu(a.float(), approximate="tanh").to(a.dtype) * b


class _Softmax:
    apply = staticmethod(softmax)


class _Rope:
    @staticmethod
    def apply(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate (batch, heads, seqlen, head_dim) queries and keys."""
        # The last number of an odd head_dim is not rotated.
        half = q.shape[-1] // 2
        # (seqlen, half), or one table per sequence.
        cos, sin = (t[..., :half].float() for t in (cos, sin))
        tables = [(cos, sin)] if cos.ndim == 2 else list(zip(cos, sin, strict=True))
        rotated = []
        for x in (q, k):
            rows = [row.contiguous() for row in x.transpose(1, 2)]
            parts = []
            for i, row in enumerate(rows):
                cosines, sines = (t.contiguous() for t in tables[i % len(tables)])
                arr = scree.from_lengths(row, [row.shape[0]])
                parts.append(scree.rope(arr, cos=cosines, sin=sines).values)
            rotated.append(torch.stack(parts).transpose(1, 2))
        return rotated[0], rotated[1]


FUNCTIONS = {
    "LigerCrossEntropyFunction": _CrossEntropy,
    "LigerFusedLinearCrossEntropyFunction": _LinearCrossEntropy,
    "LigerRMSNormFunction": _RMSNorm,
    "LigerFusedAddRMSNormFunction": _FusedAddRMSNorm,
    "LigerLayerNormFunction": _LayerNorm,
    "LigerSiLUMulFunction": _SiLUMul,
    "LigerGELUMulFunction": _GELUMul,
    "LigerSoftmaxFunction": _Softmax,
    "LigerRopeFunction": _Rope,
}


def install(source: Path) -> None:
    """Replace the functions in ``liger_kernel.ops`` before other modules import them."""
    import liger_kernel.ops

    for name, function in FUNCTIONS.items():
        original = getattr(liger_kernel.ops, name)
        setattr(liger_kernel.ops, name, function)
        # Some modules import from the module of the function.
        setattr(sys.modules[original.__module__], name, function)
    _accept_device()


def _accept_device() -> None:
    """Let the rotary embedding of transformers 5 take the argument `device`."""
    from transformers.models.llama import modeling_llama

    original = modeling_llama.LlamaRotaryEmbedding
    if "device" in inspect.signature(original).parameters:
        return

    def make(config: Any, device: Any = None) -> Any:
        return original(config).to(device)

    modeling_llama.LlamaRotaryEmbedding = make
