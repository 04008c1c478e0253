"""What torch says of this machine, asked in a process of its own: ``python -m dtplan.doctor.probe``.

One JSON line for each stage, so that what was said before a crash is not lost. Whatever CUDA sets up goes with the
process; no memory is allocated on a device and nothing runs there.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def torch_itself() -> dict[str, Any]:
    """Versions of torch and of what it was built with, and its backends."""
    import torch
    import torch.distributed as dist

    made = dist.is_available()
    nccl = made and dist.is_nccl_available()
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "gloo": made and dist.is_gloo_available(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
    }


def devices() -> dict[str, Any]:
    """The CUDA devices that torch sees, and the pairs of them that reach each other's memory."""
    import torch

    names = []
    if torch.cuda.is_available():
        for at in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(at)
            names.append({"name": found.name, "bytes": found.total_memory, "capability": [found.major, found.minor]})
    pairs = [(a, b) for a in range(len(names)) for b in range(len(names)) if a < b]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    return {"devices": names, "apart": apart}


def simulated() -> dict[str, Any]:
    """Whether ranks can be simulated, which proofs stand on."""
    from dtplan.prove.simulated import simulated_ranks

    return {"ranks": simulated_ranks(2, _rank)}


def _rank(rank: int) -> int:
    import torch
    import torch.distributed as dist

    number = torch.tensor([rank + 1])
    dist.all_reduce(number)
    return int(number)


def fused() -> dict[str, Any]:
    """TransformerEngine, or why there is none."""
    from dtplan.te.engine import Engine, find

    engine = find()
    return {"version": engine.version} if isinstance(engine, Engine) else {"reason": engine}


STAGES: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": torch_itself,
    "devices": devices,
    "simulated": simulated,
    "te": fused,
}


def main() -> None:
    """Each stage in turn; what a stage raises is its answer."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # to see whether there is a device sets up nothing
    for name, stage in STAGES.items():
        _say({"stage": name, "begins": True})
        try:
            _say({"stage": name, **stage()})
        except Exception as error:  # noqa: BLE001 - a broken installation raises anything; it is told, not hidden
            _say({"stage": name, "error": f"{type(error).__name__}: {error}"})


def _say(data: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(data) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
