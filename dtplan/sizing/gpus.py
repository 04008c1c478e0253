"""Rates of named GPUs. Measured on an H200 where it says so; others by their datasheets and the H200's fractions."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What one GPU and its links sustain: FLOP/s and bytes/s, not the datasheet's peaks."""

    name: str
    memory: int
    """Bytes."""
    matrix: float
    """FLOP/s of large bf16 matrix products."""
    fp8: float | None
    """The same in FP8; None: it has none."""
    attention: float
    """FLOP/s of torch's flash attention in long sequences, forward."""
    attention_backward: float
    memory_rate: float
    """Bytes/s that elementwise kernels read and write in eager code."""
    merged_rate: float
    """Bytes/s that kernels read and write which a compiler merged."""
    link: float
    """Bytes/s that a GPU sends to others of its host in a ring."""
    network: float
    """Bytes/s that a GPU sends to other hosts."""
    latency: float = 15e-6
    """Seconds that a collective takes without any bytes."""
    kernel: float = 2e-6
    """Seconds that the smallest kernel takes."""
    measured: bool = False


def _scaled(name: str, gib: int, *, bf16: float, fp8: float | None, hbm: float, nvlink: float, net: float) -> Gpu:
    """From the datasheet's dense TFLOP/s, TB/s of memory, GB/s of links (one direction), by the H200's fractions."""
    return Gpu(
        name=name,
        memory=gib * GIB,
        matrix=bf16 * 1e12 * 0.73,
        fp8=None if fp8 is None else fp8 * 1e12 * 0.69,
        attention=bf16 * 1e12 * 0.62,
        attention_backward=bf16 * 1e12 * 0.455,
        memory_rate=hbm * 1e12 * 0.54,
        merged_rate=hbm * 1e12 * 0.625,
        link=nvlink * 1e9 * 0.62,
        network=net * 1e9 * 0.85,
    )


GPUS: dict[str, Gpu] = {
    "a100": _scaled("A100", 80, bf16=312, fp8=None, hbm=2.04, nvlink=300, net=25),
    "h100": _scaled("H100", 80, bf16=989, fp8=1979, hbm=3.35, nvlink=450, net=50),
    # Products as profiles of whole steps show them (docs/speed.md); alone, large ones in bf16 reach 790 TFLOP/s.
    # Attention by a step of 16384 tokens; alone, 4096 tokens reach 572 and 424. A plain product of two tensors reaches
    # 4.2 TB/s; eager steps come to 2.6. Merged kernels alone reach 3.0 to 4.2. Links are measured alone.
    "h200": Gpu(
        name="H200",
        memory=141_000_000_000,
        matrix=725e12,
        fp8=1360e12,
        attention=610e12,
        attention_backward=450e12,
        memory_rate=2.6e12,
        merged_rate=3.0e12,
        link=280e9,
        network=42e9,
        measured=True,
    ),
    "b200": _scaled("B200", 180, bf16=2250, fp8=4500, hbm=8.0, nvlink=900, net=50),
}
