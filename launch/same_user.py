"""Proofs that what comes over a network is from a process of the same user: by munge, where Slurm's machines have it.

``munge`` seals a text so that munge on another machine of the cluster says which user did it; Slurm relies on that.
"""

import os
import re
import shutil
import subprocess

from gradsplit.launch.errors import LaunchError

_MOST_S = 20


def can_be_proved() -> bool:
    """Return whether this machine has munge. The machines of a cluster are taken to be alike in this."""
    return all(map(shutil.which, ("munge", "unmunge")))


def proof_of(text: str) -> str:
    """Return a proof that a process of this user knows ``text``; an empty one without munge.

    Raises `LaunchError` where munge does not work.
    """
    if not can_be_proved():
        return ""
    made = _run("munge", text)
    if made.returncode:
        raise LaunchError(f"munge, by which tasks know each other, does not work: {made.stderr.strip()}")
    return made.stdout.strip()


def is_proof_of(text: str, proof: str) -> bool:
    """Return whether `proof_of` made ``proof`` of ``text`` for this user; without munge only an empty one is."""
    if not can_be_proved() or not proof:
        return not can_be_proved() and not proof
    decoded = _run("unmunge", proof)
    header, _, payload = decoded.stdout.partition("\n\n")
    user = re.search(r"^UID:.*\((\d+)\)$", header, re.MULTILINE)
    return decoded.returncode == 0 and payload == text and user is not None and int(user[1]) == os.geteuid()


def _run(program: str, said: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [program], check=False, input=said, capture_output=True, text=True, timeout=_MOST_S
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{program}, by which tasks know each other, does not answer") from None
