"""Frequencies of the rotary position embedding, scaled for rows longer than in training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from .. import checks

#: Type -> its required options, and its other options.
_OPTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
}
#: Options of every type, which `rope` compares with its arguments.
_MODEL = ("rope_theta", "partial_rotary_factor")


class FrequencyScaling(NamedTuple):
    """The scaling of given pairs: a pair keeps a part of its frequency, and the rest is divided.

    The part that pair i keeps is ``intercept + per_pair * i + per_turn * turns``, clipped to
    [0, 1], where ``turns`` is the number of turns per position.

    Attributes
    ----------
    intercept, per_pair, per_turn
        See above.
    slowdown
        Factor of the frequency of a pair that keeps nothing.
    attention_factor
        Factor of all cosines and sines.
    """

    intercept: float
    per_pair: float
    per_turn: float
    slowdown: float
    attention_factor: float

    def scale(self, xp: Any, pair: Any, frequency: Any) -> Any:
        """Return the scaled frequencies of the numbered pairs."""
        turns = frequency * (self.per_turn / (2 * math.pi))
        kept = xp.clip(self.intercept + pair * self.per_pair + turns, 0.0, 1.0)
        return frequency * (kept + (1.0 - kept) * self.slowdown)


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the frequencies of `rope`, in the terms of a Hugging Face configuration.

    Parameters
    ----------
    rope_type
        ``"linear"`` divides all frequencies by `factor`. ``"llama3"`` (Llama 3.1) and ``"yarn"``
        (Peng et al., 2023) divide low frequencies, and keep high ones. ``"default"`` changes
        nothing.
    factor
        The divisor of the frequencies.
    original_max_position_embeddings
        Longest row in training before the scaling; for Llama 3 and YaRN.
    low_freq_factor, high_freq_factor
        Turns in such a row up to which a frequency is divided, and from which it is kept; for
        Llama 3.
    beta_fast, beta_slow
        Turns in such a row from which a frequency is kept, 32 by default, and up to which it is
        divided, 1 by default; for YaRN.
    attention_factor
        Factor of cosines and sines, for YaRN; ``0.1 * log(factor) + 1`` by default.
    mscale, mscale_all_dim
        If both are given, the default of `attention_factor` is the ratio of
        ``0.1 * mscale * log(factor) + 1`` and the same for `mscale_all_dim`; for YaRN.
    truncate
        Whether the pairs between which YaRN interpolates are rounded; True by default.
    rope_theta, partial_rotary_factor
        Other numbers of a model. `rope` raises unless its `theta` and `rotary_dim` agree with them.

    Raises
    ------
    TypeError
        If an option is missing, or belongs to another type.
    ValueError
        If the type is unknown or a number is out of range.

    Examples
    --------
    >>> import scree
    >>> scaling = scree.RopeScaling("linear", factor=4.0)
    >>> scree.rope_frequencies(4, scaling=scaling)
    (array([0.25  , 0.0025]), 1.0)
    """

    rope_type: str
    factor: float | None = None
    original_max_position_embeddings: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None

    def __post_init__(self) -> None:
        kind = self.rope_type
        _check_type(kind)
        required, optional = _OPTIONS[kind]
        for name in _NAMES:
            x = getattr(self, name)
            if x is None:
                if name in required:
                    raise TypeError(f"scaling: expected {name} for rope_type {kind!r}, got None")
                continue
            if name not in (*required, *optional, *_MODEL):
                raise TypeError(f"scaling: expected no {name} for rope_type {kind!r}, got {x!r}")
            if name == "truncate":
                checks.check_flag(name, x)
            else:
                checks.check_number(name, x, above=0)
        low, high = self.low_freq_factor, self.high_freq_factor
        if kind == "llama3" and low is not None and high is not None and not low < high:
            raise ValueError(
                f"scaling: expected low_freq_factor < high_freq_factor, got {low} and {high}"
            )

    def resolve(self, rotary_dim: int, theta: float) -> FrequencyScaling | None:
        """Return the scaling of the pairs of a rotation; None if it changes nothing."""
        if self.rope_type == "default":
            return None
        slowdown, length = 1 / float(self.factor or 1.0), self.original_max_position_embeddings
        if self.rope_type == "linear":
            return FrequencyScaling(0.0, 0.0, 0.0, slowdown, 1.0)
        assert length is not None  # checked by the constructor
        if self.rope_type == "llama3":
            low, high = float(self.low_freq_factor or 0.0), float(self.high_freq_factor or 0.0)
            width = high - low
            return FrequencyScaling(-low / width, 0.0, length / width, slowdown, 1.0)
        if theta == 1:
            raise ValueError("theta: expected a number other than 1 with YaRN, got 1")

        def pair_of(turns: float) -> float:
            # The pair that turns so often in the longest row of the training.
            return rotary_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

        first, last = pair_of(self.beta_fast or 32), pair_of(self.beta_slow or 1)
        if self.truncate is None or self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotary_dim - 1)
        width = last - first if last != first else 1e-3
        return FrequencyScaling(
            1 + first / width, -1 / width, 0.0, slowdown, self._attention_factor()
        )

    def _attention_factor(self) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        growth = 0.1 * math.log(max(float(self.factor or 1.0), 1.0))
        if self.mscale is None or self.mscale_all_dim is None:
            return growth + 1
        return (growth * self.mscale + 1) / (growth * self.mscale_all_dim + 1)


#: The options of all types. Compilers cannot trace `dataclasses.fields`.
_NAMES = tuple(field.name for field in fields(RopeScaling) if field.name != "rope_type")


def _check_type(kind: Any) -> None:
    if kind not in _OPTIONS:
        raise ValueError(
            f"scaling: expected rope_type {', '.join(map(repr, _OPTIONS))}, got {kind!r}; compute the frequencies "
            "and pass inv_freq="
        )


def as_rope_scaling(scaling: Any) -> RopeScaling | FrequencyScaling | None:
    """Return the scaling that a dictionary of a Hugging Face configuration describes.

    An entry that is None counts as missing. A scaling and None are returned as they are.
    """
    if scaling is None or isinstance(scaling, RopeScaling | FrequencyScaling):
        return scaling
    if not isinstance(scaling, Mapping):
        raise TypeError(f"scaling: expected a RopeScaling or a dictionary, got {scaling!r}")
    options = {name: x for name, x in scaling.items() if x is not None}
    if "type" in options:
        kind = options.pop("type")
        if options.setdefault("rope_type", kind) != kind:
            raise ValueError(
                f"scaling: expected equal rope_type and type, got {options['rope_type']!r} and {kind!r}"
            )
    if "rope_type" not in options:
        raise TypeError(f"scaling: expected the key 'rope_type', got {[*options]}")
    _check_type(options["rope_type"])
    if unknown := [name for name in options if name not in ("rope_type", *_NAMES)]:
        raise TypeError(
            f"scaling: expected only the keys rope_type, {', '.join(_NAMES)}, got {unknown[0]!r}; remove it"
        )
    return RopeScaling(**options)


def resolve_scaling(
    options: Any, rotary_dim: int, head_dim: int, theta: float
) -> FrequencyScaling | None:
    """Return the scaling of the pairs of a rotation.

    Raise unless `theta` and `rotary_dim` agree with the numbers of the model in the scaling.
    """
    scaling = as_rope_scaling(options)
    if scaling is None or isinstance(scaling, FrequencyScaling):
        return scaling
    if scaling.rope_theta is not None and scaling.rope_theta != theta:
        raise ValueError(
            f"theta: expected {scaling.rope_theta}, the rope_theta of scaling, got {theta}; pass theta="
        )
    if scaling.partial_rotary_factor is not None:
        expected = int(head_dim * scaling.partial_rotary_factor)
        if rotary_dim != expected:
            raise ValueError(
                f"rotary_dim: expected {expected}, head_dim {head_dim} times the partial_rotary_factor of scaling, "
                f"got {rotary_dim}; pass rotary_dim="
            )
    return scaling.resolve(rotary_dim, theta)


def rope_frequencies(
    rotary_dim: int,
    *,
    theta: float = 10000.0,
    scaling: RopeScaling | Mapping[str, Any] | None = None,
) -> tuple[np.ndarray, float]:
    """Return the frequencies by which `rope` rotates pairs, and the factor of cosines and sines.

    Parameters
    ----------
    rotary_dim
        Number of elements that are rotated, an even number.
    theta
        Base of the wavelengths.
    scaling
        None, a `RopeScaling`, or a dictionary with its fields, as in a Hugging Face configuration.

    Returns
    -------
    inv_freq
        (rotary_dim / 2,) float64 NumPy array, radians per position.
    attention_factor
        Factor of the cosines and sines; 1 except for YaRN.

    Raises
    ------
    TypeError
        If an option of the scaling is missing or unknown.
    ValueError
        If rotary_dim is odd, or a number is out of range.

    Examples
    --------
    >>> import scree
    >>> scree.rope_frequencies(4)
    (array([1.  , 0.01]), 1.0)
    >>> yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
    >>> inv_freq, attention_factor = scree.rope_frequencies(64, scaling=yarn)
    >>> round(attention_factor, 4)
    1.2079
    """
    check_rotary_dim(rotary_dim)
    checks.check_number("theta", theta, above=0)
    pair = np.arange(rotary_dim // 2, dtype=np.float64)
    frequency = float(theta) ** (-2 * pair / rotary_dim)
    resolved = resolve_scaling(scaling, rotary_dim, rotary_dim, theta)
    if resolved is None:
        return frequency, 1.0
    return resolved.scale(np, pair, frequency), resolved.attention_factor


def check_rotary_dim(rotary_dim: Any, head_dim: int | None = None) -> int:
    """Return `rotary_dim`; raise unless it is even, positive, and at most head_dim."""
    size = checks.check_integer("rotary_dim", rotary_dim)
    if size % 2 or size < 2 or (head_dim is not None and size > head_dim):
        limit = "" if head_dim is None else f", at most head_dim {head_dim}"
        raise ValueError(f"rotary_dim: expected an even number of at least 2{limit}, got {size}")
    return size
