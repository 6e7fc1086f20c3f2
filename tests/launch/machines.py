"""Machines of a job, imitated by Linux's namespaces: each has a network, a host name, processes and files of its own.

A program that makes them runs itself in namespaces first (`in_own_namespaces`), so that nothing of the real machine
changes and everything ends with it. The way from one machine to another, which is ssh elsewhere, is a script.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path

_UNSHARE = [
    "unshare",
    "--net",
    "--mount",
    "--uts",
    "--ipc",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
]


def in_own_namespaces(command: list[str]) -> list[str]:
    """Return the command that runs ``command`` where it may make machines."""
    as_root = ["--user", "--map-root-user"] if os.geteuid() else []
    return [*_UNSHARE, *as_root, *command]


def can_be_imitated() -> bool:
    """Return whether this system lets us have namespaces, and ``ip`` to join them."""
    if not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
        return False
    trial = in_own_namespaces(
        ["sh", "-c", "ip link add trial0 type bridge && ip link add trial1 type veth peer name trial2"]
    )
    return subprocess.run(trial, check=False, capture_output=True).returncode == 0


class Machines:
    """``node1``, ``node2``, … on one network with this process, whose machine is ``front``. They share ``folder``."""

    def __init__(self, count: int, folder: Path) -> None:
        self._folder = folder
        self._names = [f"node{index}" for index in range(1, count + 1)]
        self.first: dict[str, int] = {}
        """The process that each machine ends with."""
        self.hosts = folder / "hosts"
        self.hosts.write_text("".join(f"{name}\n" for name in self._names))
        addresses = [f"10.77.0.{index} {name}\n" for index, name in enumerate(["front", *self._names], 1)]
        (folder / "etc_hosts").write_text("".join(["127.0.0.1 localhost\n", *addresses]))
        self._own_files = (
            f"mount --bind {folder} /mnt && mount -t tmpfs none /dev/shm && mount -t tmpfs none /tmp && "
            f"mkdir -p {folder} && mount --move /mnt {folder} && mount --bind {folder}/etc_hosts /etc/hosts"
        )
        _do("mount", "--make-rprivate", "/")
        _do("sh", "-c", f"{self._own_files} && hostname front")
        _do("ip", "link", "add", "switch", "type", "bridge")
        _do("ip", "address", "add", "10.77.0.1/24", "dev", "switch")
        for link in "lo", "switch":
            _do("ip", "link", "set", link, "up")
        for name in self._names:
            self.restore(name)

    def restore(self, name: str) -> None:
        """Start a machine, which does not run."""
        subprocess.run(["ip", "link", "delete", f"to_{name}"], check=False, capture_output=True)
        for mark in "up", "lost":
            (self._folder / f"{name}.{mark}").unlink(missing_ok=True)
        begin = f"hostname {name} && {self._own_files} && touch {self._folder}/{name}.up && exec sleep 100000"
        machine = subprocess.Popen([*_UNSHARE, "sh", "-c", begin])
        while not (self._folder / f"{name}.up").exists():
            time.sleep(0.01)
        first = int(Path(f"/proc/{machine.pid}/task/{machine.pid}/children").read_text())
        self.first[name] = first
        (self._folder / f"{name}.first").write_text(str(first))
        _do("ip", "link", "add", f"to_{name}", "type", "veth", "peer", "name", "eth0", "netns", str(first))
        _do("ip", "link", "set", f"to_{name}", "master", "switch", "up")
        inside = ["nsenter", "-t", str(first), "-n", "ip"]
        _do(*inside, "address", "add", f"10.77.0.{self._names.index(name) + 2}/24", "dev", "eth0")
        for link in "lo", "eth0":
            _do(*inside, "link", "set", link, "up")

    def lose(self, name: str) -> None:
        """Cut a machine off and end it, so that its connections are not closed for the others."""
        (self._folder / f"{name}.lost").touch()
        _do("ip", "link", "delete", f"to_{name}")
        os.kill(self.first[name], 9)

    def variables(self) -> dict[str, str]:
        """Return the variables with which an ``mpiexec`` reaches the machines."""
        agent = self._folder / "agent"
        agent.write_text(
            '#!/bin/sh\n[ "$1" = -x ] && shift\nname=$1; shift\n'
            f'nsenter -t $(cat {self._folder}/$name.first) -n -u -m -i -p -- sh -c "$*"\nended=$?\n'
            # ssh does not see a machine end whose network ends with it.
            f"[ -e {self._folder}/$name.lost ] && exec sleep 100000\nexit $ended\n"
        )
        agent.chmod(0o755)
        hydra = {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": str(agent)}
        return {"PRTE_MCA_plm_ssh_agent": str(agent), **hydra}

    def processes(self, name: str) -> list[tuple[int, str]]:
        """Return the processes on a machine, by the numbers that they have here, and their command lines."""
        own = os.readlink(f"/proc/{self.first[name]}/ns/pid")
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(process / "ns/pid") == own:
                    found.append((int(process.name), (process / "cmdline").read_text().replace("\0", " ")))
            except OSError:
                pass  # It has just ended.
        return found


def _do(*command: str) -> None:
    subprocess.run(command, check=True)
