"""Environment variables of this process. The only module below `deploy/` that reads or sets them."""

import os
from pathlib import Path

PRESTART_VARIABLE = "AERIE_PRESTART_FOLDER"  # set by `aerie serve` for the processes of a Ray that it starts


def set_process_environment(threads: int) -> None:
    """Set variables in a worker before torch and NCCL are imported.

    NVLink multicast (NVLS, symmetric memory) stays off: it needs a fabric manager that containers often lack, and a
    failed set-up hangs instead of raising. Ray shows each worker one GPU, which is number 0 in every worker. Symmetric
    memory would take them for one shared GPU and refuse, so its check is off, and
    `aerie.workers.distributed.custom_all_reduce` compares UUIDs instead.
    """
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["MKL_NUM_THREADS"] = str(threads)


def visible_devices() -> str | None:
    """Return CUDA's names of the GPUs that this process can see; None for all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def set_visible_devices(devices: str | None) -> None:
    """Make the GPUs of another process visible to this one. CUDA reads the variable at its first use only."""
    if devices is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices


def prestart_folder() -> Path | None:
    """Return the folder with the sockets of ranks that `aerie serve` started ahead on this machine; None: no ranks."""
    folder = os.environ.get(PRESTART_VARIABLE)
    return Path(folder) if folder else None


def pin_network_interface(name: str) -> None:
    """Make gloo and NCCL use interface `name`, unless the operator chose one."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
