"""How many processes a node gets: a number, or what the machine has."""

import importlib.util
import os

from gradsplit.launch.errors import LaunchError


def parse_process_count(text: str) -> int:
    """Return the number of processes a node for the value of ``--nproc-per-node``.

    ``text`` is a positive whole number, ``cpu`` (all processors), ``gpu`` or ``xpu`` (all that torch sees of them), or
    ``auto`` (the machine's accelerators where there are any, else its processors). Raises `LaunchError` for anything
    else, and for devices that are not there.
    """
    match text:
        case "cpu":
            return os.cpu_count() or 1
        case "gpu" | "xpu":
            devices = count_devices("cuda" if text == "gpu" else "xpu")
            if devices == 0:
                raise LaunchError(
                    f"--nproc-per-node {text}: torch sees no {text.upper()}; use a whole number from 1, cpu or auto"
                )
            return devices
        case "auto":
            return count_devices("cuda") or count_devices("xpu") or os.cpu_count() or 1
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise LaunchError(f"--nproc-per-node {text!r}: allowed: a whole number from 1, cpu, gpu, auto, xpu")
    return int(text)


def count_devices(kind: str) -> int:
    """Return the number of devices, ``cuda`` or ``xpu``, that torch can use here; 0 without torch."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch  # Seconds of import, and needed for these words of the command line only.

    devices = getattr(torch, kind)
    return devices.device_count() if devices.is_available() else 0
