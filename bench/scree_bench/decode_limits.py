"""A Triton kernel that only reads the pages of a batch: a limit of kernels that attend to them."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

#: Words of a page that a CTA loads at a time, loads in flight per CTA, and CTAs per SM.
CHUNK, STAGES, CTAS_PER_SM = 2048, 4, 4


@triton.jit
def _sum_pages_kernel(  # type: ignore[no-untyped-def]  # Triton reads the annotations
    K, V, PAGES, SUMS, num_chunks, PAGE: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr
):
    """Add up an equal share of the chunks of all pages."""
    position = tl.arange(0, CHUNK)
    program = tl.program_id(0)
    begin = program * num_chunks // tl.num_programs(0)
    end = (program + 1) * num_chunks // tl.num_programs(0)
    total = tl.zeros([CHUNK], tl.int32)
    for chunk in tl.range(begin, end, num_stages=STAGES):
        page = tl.load(PAGES + chunk // (PAGE // CHUNK)).to(tl.int64)
        start = page * PAGE + chunk % (PAGE // CHUNK) * CHUNK
        total += tl.load(K + start + position)
        total += tl.load(V + start + position)
    tl.store(SUMS + program * CHUNK + position, total)


def sum_pages(
    k_pages: torch.Tensor, v_pages: torch.Tensor, pages: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Return a call that adds up the 32-bit words of pages, with few dependent loads.

    A CTA reads an equal share of the pages, each of which is one run of memory.

    Parameters
    ----------
    k_pages, v_pages
        Contiguous caches, (num_pages, page_size, kv_heads, head_dim).
    pages
        Page numbers, int32.

    Returns
    -------
    Callable
        A call that returns sums of words, (CTAs, words per load), int32.
    """
    k, v = (x.flatten().view(torch.int32) for x in (k_pages, v_pages))
    size = k.numel() // k_pages.shape[0]
    chunk = min(size & -size, CHUNK)
    programs = CTAS_PER_SM
    if k.is_cuda:
        programs *= torch.cuda.get_device_properties(k.device).multi_processor_count
    sums = torch.empty((programs, chunk), dtype=torch.int32, device=k.device)
    num_chunks = pages.numel() * (size // chunk)

    def run() -> torch.Tensor:
        _sum_pages_kernel[(programs,)](k, v, pages, sums, num_chunks, size, chunk, STAGES)
        return sums

    return run
