"""Attention contenders, and the reason if one cannot run.

Reasons depend on the library, the device, the data type and the installed packages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from . import attentions
from .attentions import Prepare, packed, padded
from .libraries import MeasuredLibrary
from .work import Work

if TYPE_CHECKING:
    from .session import Session

NO_TIME = "takes long; run without --quick"
#: Bytes of padded scores up to which NumPy's einsum runs, at a few operations per nanosecond.
EINSUM = 5e7


class Peer(NamedTuple):
    """A contender: its name, the library it needs, and its preparation.

    ``missing(lib, work)`` returns the reason why it cannot run, or None. `slow` contenders take
    long to compile and do not run with ``--quick``. `backward` says whether it has a backward pass.
    """

    name: str
    library: str
    prepare: Prepare
    missing: Callable[[MeasuredLibrary, Work], str | None] = lambda lib, work: None
    slow: bool = False
    backward: bool = True


def _on_cuda(
    *dtypes: str, modules: Sequence[str] = ()
) -> Callable[[MeasuredLibrary, Work], str | None]:
    return lambda lib, work: unavailable_on_cuda(lib, work.dtype, dtypes, modules)


def unavailable_on_cuda(
    lib: MeasuredLibrary, dtype: str, dtypes: Sequence[str] = (), modules: Sequence[str] = ()
) -> str | None:
    """Return the reason why a CUDA kernel cannot run, or None.

    The device, the data type or a module may be missing.
    """
    if lib.device != "cuda":
        return "runs on CUDA devices only"
    if dtypes and dtype not in dtypes:
        return f"takes {' and '.join(dtypes)}, not {dtype}"
    absent = [m for m in modules if not importable(m)]
    return f"{' and '.join(absent)} cannot be imported" if absent else None


def importable(module: str) -> bool:
    """Return whether a module can be imported."""
    try:
        return find_spec(module) is not None
    # find_spec raises if the parent package of the module is missing.
    except ImportError:
        return False


def compiler_unavailable(lib: MeasuredLibrary) -> str | None:
    """Return the reason why nothing can be compiled here, or None."""
    from shutil import which

    if lib.device == "cpu" and not (which("g++") or which("clang++") or which("c++")):
        return "needs a C++ compiler on the CPU"
    return None


def einsum_too_slow(lib: MeasuredLibrary, work: Work) -> str | None:
    return None if work.padded_scores <= EINSUM else "takes minutes on so many scores"


def _nested_unavailable(lib: MeasuredLibrary, work: Work) -> str | None:
    if work.causal and lib.device == "cpu":
        return "is not causal on the CPU"
    return None if work.heads == work.kv_heads else "has no grouped heads"


HALF_DTYPES = ("float16", "bfloat16")

#: All contenders, scree first: ratios are relative to it.
PEERS: tuple[Peer, ...] = (
    Peer("scree", "numpy", attentions.scree_attention(None)),
    Peer("scree", "torch", attentions.scree_attention(None)),
    Peer("scree (jit)", "jax", packed(attentions.scree_jitted)),
    Peer("scree", "mlx", attentions.scree_attention(None)),
    Peer("scree, standard path", "torch", attentions.scree_attention("standard")),
    Peer("padded, einsum", "numpy", padded(attentions.einsum), einsum_too_slow),
    *(
        Peer("padded, matmul", name, padded(attentions.naive))
        for name in ("numpy", "torch", "jax", "mlx")
    ),
    *(
        Peer("loop over rows", name, packed(attentions.loop_over_rows), slow=name == "jax")
        for name in ("numpy", "jax", "mlx")
    ),
    Peer("padded, SDPA", "torch", padded(attentions.torch_sdpa(None))),
    Peer("loop over rows, SDPA", "torch", packed(attentions.torch_rows)),
    Peer("torch.nested, SDPA", "torch", packed(attentions.torch_nested), _nested_unavailable),
    Peer(
        "flex_attention",
        "torch",
        packed(attentions.torch_flex),
        lambda lib, work: compiler_unavailable(lib),
        slow=True,
    ),
    Peer("padded, jax.nn", "jax", attentions.jax_nn),
    Peer(
        "padded, jax.nn cuDNN",
        "jax",
        partial(attentions.jax_nn, implementation="cudnn"),
        _on_cuda(*HALF_DTYPES),
    ),
    Peer(
        "padded, Tokamax",
        "jax",
        attentions.tokamax,
        lambda lib, work: None if importable("tokamax") else "tokamax cannot be imported",
    ),
    Peer("padded, mx.fast", "mlx", padded(attentions.mlx_fast)),
    *(
        Peer(
            f"padded, SDPA {b.partition('_')[0].lower()}",
            "torch",
            padded(attentions.torch_sdpa(b)),
            _on_cuda(*HALF_DTYPES),
        )
        for b in ("FLASH_ATTENTION", "CUDNN_ATTENTION")
    ),
    Peer(
        "padded, SDPA efficient",
        "torch",
        padded(attentions.torch_sdpa("EFFICIENT_ATTENTION")),
        _on_cuda(),
    ),
    Peer("FA2 (aten)", "torch", packed(attentions.fa2), _on_cuda(*HALF_DTYPES)),
    Peer("varlen_attn (FA2)", "torch", packed(attentions.varlen), _on_cuda(*HALF_DTYPES)),
    Peer(
        "FA3",
        "torch",
        packed(attentions.flash("flash_attn_interface")),
        _on_cuda(*HALF_DTYPES, modules=["flash_attn_interface"]),
    ),
    Peer(
        "FA3 (forward only)",
        "torch",
        packed(attentions.flash("fa3_fwd_interface")),
        _on_cuda("bfloat16", modules=["fa3_fwd_interface"]),
        backward=False,
    ),
    Peer(
        "FA4",
        "torch",
        packed(attentions.flash("flash_attn.cute")),
        _on_cuda(*HALF_DTYPES, modules=["flash_attn.cute"]),
    ),
    Peer("efficient, packed", "torch", packed(attentions.efficient), _on_cuda("float32")),
)


def available_peers(
    session: Session, lib: MeasuredLibrary, work: Work, only: Sequence[str] = ()
) -> list[Peer]:
    """Return the peers that can run a work on a library.

    The session notes the other peers with the reason. `only` selects peers by name. An entry that
    is not a name selects all peers whose names start with it.
    """
    names = {peer.name for peer in PEERS if peer.library == lib.name}
    prefixes = tuple(x for x in only if x not in names)
    peers = []
    for peer in PEERS:
        if peer.library == lib.name and (
            not only or peer.name in only or peer.name.startswith(prefixes)
        ):
            reason = NO_TIME if session.quick and peer.slow else peer.missing(lib, work)
            if reason is None:
                peers.append(peer)
            else:
                session.leave_out(f"{peer.name} on {lib.name}", reason)
    return peers
