"""Namespaces of its own for a run: processes, network, mounts. Nothing outside is touched, and when the run ends,
however it ends, the kernel ends every process in them and removes every interface.

Needs Linux with iproute2 and util-linux, and root or user namespaces. The first process inside is this module itself:
it starts the command and collects processes whose parents have died.
"""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support import ROOT

PRIVATE = ("/run", "/dev/shm")  # mounted anew inside: names of namespaces, Ray's sessions, its object stores
# Names of all addresses, and a name server that refuses at once: else gloo waits ten seconds for a peer's name.
_FILES = {
    "/etc/hosts": "127.0.0.1 localhost\n" + "".join(f"10.77.0.{i} n{i}\n" for i in (*range(1, 9), 100)),
    "/etc/resolv.conf": "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n",
}
_UNSHARE = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc")
_AS_ROOT = ("--user", "--map-root-user")
_TRY = "for p in /run /dev/shm; do mount -t tmpfs none $p; done && mkdir /run/netns && ip netns add try && ip link add \
name try0 type veth peer name try1 netns try && ip link add name try2 type bridge"
_TRY_WIRE = " && ip tuntap add dev try3 mode tap"


@functools.cache
def unavailable(wires: bool = True) -> str:
    """Why this machine cannot run it; "" if it can. wires: whether links must delay and lose frames."""
    for program in ("unshare", "setpriv", "ip", "mount"):
        if shutil.which(program) is None:
            return f"there is no program `{program}` (iproute2, util-linux)"
    tried = subprocess.run(
        [*_command(), "sh", "-ec", _TRY + (_TRY_WIRE if wires else "")], capture_output=True, text=True, timeout=30
    )
    if tried.returncode != 0:
        said = (tried.stderr.strip().splitlines() or ["no reason given"])[-1]
        kinds = "veth, bridge or tap" if wires else "veth or bridge"
        return f"namespaces, {kinds} devices are not allowed here: {said}"
    return ""


def run_inside(arguments: Sequence[str]) -> int:
    """Run this Python with `arguments` in a sandbox; returns its exit status. The sandbox ends with this process, even
    if that is killed, and at once when it is interrupted."""
    command = [*_command(), sys.executable, "-m", "tests.load.sandbox", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)

    def interrupted(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGTERM, interrupted)
    try:
        return process.wait()
    except KeyboardInterrupt:
        return 130
    finally:
        process.kill()  # unshare, and with it everything inside
        process.wait()
        signal.signal(signal.SIGTERM, former)


def _command() -> list[str]:
    return ["setpriv", "--pdeathsig", "KILL", *_UNSHARE, *(() if os.geteuid() == 0 else _AS_ROOT)]


def _put_over(path: str, text: str) -> None:
    """A file of this text in the place of `path`, which may be a link to what was in /run. One that is missing stays
    so."""
    target = Path(path).resolve()
    if not target.exists() and any(target.is_relative_to(private) for private in PRIVATE):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    if target.exists():
        own = Path("/run") / Path(path).name
        own.write_text(text)
        subprocess.run(["mount", "--bind", str(own), str(target)], check=True)


def _first_process(arguments: Sequence[str]) -> int:
    for path in PRIVATE:
        subprocess.run(["mount", "-t", "tmpfs", "none", path], check=True)
    for folder in ("/run/netns", "/run/tmp"):
        os.mkdir(folder)
    for path, text in _FILES.items():
        _put_over(path, text)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    environment = os.environ | {"TMPDIR": "/run/tmp", "HOME": "/run/tmp"}
    command = subprocess.Popen([sys.executable, *arguments], env=environment)
    while True:
        pid, status = os.waitpid(-1, 0)  # orphans too
        if pid == command.pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(_first_process(sys.argv[1:]))
