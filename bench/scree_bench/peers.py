"""Attention contenders, and the reason if one cannot run.

Reasons depend on the library, the device, the data type and the installed packages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from . import attentions as by
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
    return lambda lib, work: lacking(lib, work.dtype, dtypes, modules)


def lacking(
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
    except ImportError:  # raised for the parent package of the module
        return False


def compiler(lib: MeasuredLibrary) -> str | None:
    """Return the reason why nothing can be compiled here, or None."""
    from shutil import which

    if lib.device == "cpu" and not (which("g++") or which("clang++") or which("c++")):
        return "needs a C++ compiler on the CPU"
    return None


def _few(lib: MeasuredLibrary, work: Work) -> str | None:
    return None if work.padded_scores <= EINSUM else "takes minutes on so many scores"


def _nested(lib: MeasuredLibrary, work: Work) -> str | None:
    if work.causal and lib.device == "cpu":
        return "is not causal on the CPU"
    return None if work.heads == work.kv_heads else "has no grouped heads"


_HALF = ("float16", "bfloat16")

#: All contenders, scree first: ratios are relative to it.
PEERS: tuple[Peer, ...] = (
    Peer("scree", "numpy", by.ours(None)),
    Peer("scree", "torch", by.ours(None)),
    Peer("scree (jit)", "jax", packed(by.ours_traced)),
    Peer("scree", "mlx", by.ours(None)),
    Peer("scree, standard path", "torch", by.ours("standard")),
    Peer("padded, einsum", "numpy", padded(by.einsum), _few),
    *(Peer("padded, matmul", name, padded(by.naive)) for name in ("numpy", "torch", "jax", "mlx")),
    *(
        Peer("loop over rows", name, packed(by.rows), slow=name == "jax")
        for name in ("numpy", "jax", "mlx")
    ),
    Peer("padded, SDPA", "torch", padded(by.torch_sdpa(None))),
    Peer("loop over rows, SDPA", "torch", packed(by.torch_rows)),
    Peer("torch.nested, SDPA", "torch", packed(by.torch_nested), _nested),
    Peer(
        "flex_attention", "torch", packed(by.torch_flex), lambda lib, work: compiler(lib), slow=True
    ),
    Peer("padded, jax.nn", "jax", by.jax_own),
    Peer("padded, mx.fast", "mlx", padded(by.mlx_own)),
    *(
        Peer(
            f"padded, SDPA {b.partition('_')[0].lower()}",
            "torch",
            padded(by.torch_sdpa(b)),
            _on_cuda(*_HALF),
        )
        for b in ("FLASH_ATTENTION", "CUDNN_ATTENTION")
    ),
    Peer(
        "padded, SDPA efficient", "torch", padded(by.torch_sdpa("EFFICIENT_ATTENTION")), _on_cuda()
    ),
    Peer("FA2 (aten)", "torch", packed(by.fa2), _on_cuda(*_HALF)),
    Peer("varlen_attn (FA2)", "torch", packed(by.varlen), _on_cuda(*_HALF)),
    Peer(
        "FA3",
        "torch",
        packed(by.flash("flash_attn_interface")),
        _on_cuda(*_HALF, modules=["flash_attn_interface"]),
    ),
    Peer(
        "FA3 (forward only)",
        "torch",
        packed(by.flash("fa3_fwd_interface")),
        _on_cuda("bfloat16", modules=["fa3_fwd_interface"]),
        backward=False,
    ),
    Peer(
        "FA4",
        "torch",
        packed(by.flash("flash_attn.cute")),
        _on_cuda(*_HALF, modules=["flash_attn.cute"]),
    ),
    Peer("efficient, packed", "torch", packed(by.efficient), _on_cuda("float32")),
)


def contenders(
    session: Session, lib: MeasuredLibrary, work: Work, only: Sequence[str] = ()
) -> list[Peer]:
    """Return the peers that can run a work on a library.

    The session notes the other peers with the reason. `only` selects peers by name. An entry that
    is not a name selects all peers whose names start with it.
    """
    names = {peer.name for peer in PEERS}
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
