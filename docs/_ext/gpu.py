"""The GPU of this machine, found through the driver alone (torch need not be installed)."""

import ctypes
import functools
import importlib.util
import platform
import re
import subprocess


@functools.cache
def name() -> str | None:
    """Name of the first CUDA device, or None where there is no usable one."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, device, buffer = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    found = (
        cuda.cuInit(0) == 0
        and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
        and count.value > 0
        and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
        and cuda.cuDeviceGetName(buffer, len(buffer), device) == 0
    )
    return buffer.value.decode() if found else None


def slug(gpu: str) -> str:
    """``NVIDIA H200`` -> ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def can_run_triton() -> bool:
    """Whether torch, triton and matplotlib, which a lesson needs, are installed."""
    return all(importlib.util.find_spec(m) for m in ("torch", "triton", "matplotlib"))


def describe() -> dict:
    """The machine and the versions, as a recording's manifest keeps them."""
    import torch
    import triton

    info = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    if name() is None:
        return {"gpu": {"name": "Triton interpreter", "slug": "interpreter"}} | info
    props = torch.cuda.get_device_properties(0)
    gpu = {
        "name": props.name,
        "slug": slug(props.name),
        "compute_capability": f"{props.major}.{props.minor}",
        "multiprocessors": props.multi_processor_count,
        "memory_bytes": props.total_memory,
        "l2_bytes": props.L2_cache_size,
    }
    return {"gpu": gpu} | _driver() | {"cuda": torch.version.cuda} | info


def _driver() -> dict:
    """The driver's version; nothing where a container lacks nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {"driver": found.stdout.strip()}
