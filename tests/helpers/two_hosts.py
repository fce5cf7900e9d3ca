"""Two hosts on one machine: namespaces with a name, a boot id, a network and processes of their own, joined by a veth pair.

    with two_hosts.start() as hosts:
        subprocess.Popen(hosts[1].command("python", "program.py", hosts[0].address))

Nothing outlives the `with` block, whatever happens in it, nor the process that it is in: a host is a PID namespace, and the
kernel kills all processes of one whose first process ends. That one, this file as a program, ends with its standard input.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import uuid
from collections.abc import Iterator

ADDRESSES = {"hosta": "10.9.0.1", "hostb": "10.9.0.2"}
INTERFACE = "eth0"  # the same on both, as on hosts of a cluster
TIMEOUT_SECONDS = 60
UNSHARE = [
    "unshare",
    "--net",
    "--uts",
    "--mount",
    "--pid",
    "--fork",
    "--mount-proc",
    "--kill-child",
]


@dataclasses.dataclass(frozen=True)
class Host:
    name: str
    address: str
    first: subprocess.Popen[
        str
    ]  # in its namespaces, but for that of processes, in which its child is

    def command(self, *command: str) -> list[str]:
        """The command as one of this host, in the current folder. It ends when the process that it is given to is killed."""
        namespaces = f"/proc/{self.first.pid}/ns"
        kinds = {"net": "net", "uts": "uts", "mount": "mnt", "pid": "pid_for_children"}
        options = [f"--{kind}={namespaces}/{file}" for kind, file in kinds.items()]
        dies_with_parent = ["setpriv", "--pdeathsig=KILL", "--"]
        return ["nsenter", *options, f"--wd={os.getcwd()}", "--", *dies_with_parent, *command]


@contextlib.contextmanager
def start() -> Iterator[list[Host]]:
    """Two hosts; afterwards all of their processes are killed.

    Raises:
      unittest.SkipTest: this machine cannot have any.
    """
    if reason := _what_is_missing():
        raise unittest.SkipTest(f"two hosts need {reason}")
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        lines = ["127.0.0.1 localhost", *(f"{a} {name}" for name, a in ADDRESSES.items())]
        (folder / "hosts").write_text("\n".join([*lines, ""]))
        hosts = []
        for name, address in ADDRESSES.items():
            (folder / name).write_text(f"{uuid.uuid4()}\n")
            hosts.append(Host(name, address, _first_process(name, address, folder)))
            stack.callback(_end, hosts[-1].first)
        for host in hosts:
            _expect(host.first, "named")
        _connect(*hosts)
        for host in hosts:
            host.first.stdin.write("connected\n")
            host.first.stdin.flush()
        for host in hosts:
            _expect(host.first, "ready")
        yield hosts


def _what_is_missing() -> str | None:
    if os.geteuid() != 0:
        return "root, to make namespaces"
    for program in ("unshare", "nsenter", "setpriv", "mount"):
        if shutil.which(program) is None:
            return f"{program} of util-linux"
    if importlib.util.find_spec("pyroute2") is None:
        return "pyroute2 (pip install pyroute2)"
    return None


def _first_process(name: str, address: str, folder: pathlib.Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*UNSHARE, sys.executable, __file__, name, address, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _expect(first: subprocess.Popen[str], line: str) -> None:
    """Waits for a line of a host. There is none where the kernel refuses namespaces."""
    is_there, _, _ = select.select([first.stdout], [], [], TIMEOUT_SECONDS)
    if not is_there or first.stdout.readline().strip() != line:
        raise unittest.SkipTest(f"this machine makes no hosts of namespaces: {_end(first)}")


def _connect(one: Host, other: Host) -> None:
    from pyroute2 import IPRoute, NetlinkError

    peer = {"ifname": INTERFACE, "net_ns_pid": other.first.pid}
    try:
        with IPRoute() as route:
            route.link("add", ifname=INTERFACE, kind="veth", net_ns_pid=one.first.pid, peer=peer)
    except NetlinkError as error:
        raise unittest.SkipTest(f"this machine makes no pair of interfaces: {error}") from error


def _end(first: subprocess.Popen[str]) -> str:
    """Ends a host, and returns what its first process has said to stderr."""
    first.kill()
    _, errors = first.communicate()
    return errors


# ---- in a host


def main(name: str, address: str, folder: str) -> None:
    """The first process of a host."""
    from pyroute2 import IPRoute

    socket.sethostname(name)
    # JAX tells hosts apart by it, and jax_ep too.
    bind(f"{folder}/{name}", "/proc/sys/kernel/random/boot_id")
    bind(f"{folder}/hosts", "/etc/hosts")  # gloo looks up the host's own name
    print("named", flush=True)
    sys.stdin.readline()
    with IPRoute() as route:
        for interface in ("lo", INTERFACE):
            index = route.link_lookup(ifname=interface)[0]
            if interface != "lo":
                route.addr("add", index=index, address=address, prefixlen=24)
            route.link("set", index=index, state="up")
        # The kernel tells later that the cable is there, and UCX uses no interface before.
        while route.link("get", index=index)[0].get("operstate") != "UP":
            time.sleep(0.01)
    print("ready", flush=True)
    sys.stdin.read()


def bind(source: str, target: str) -> None:
    subprocess.run(["mount", "--bind", source, target], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
