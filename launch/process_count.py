"""How many processes a node gets: a number, or what the machine has."""

import importlib.util
import os

from gradsplit.launch.errors import LaunchError


def parse_process_count(text: str) -> int:
    """Return the number of processes a node for the value of ``--nproc-per-node``.

    ``text`` is a positive whole number, ``cpu`` (all processors), ``gpu`` (all GPUs that torch sees), or
    ``auto`` (GPUs where there are any, else processors). Raises `LaunchError` for anything else, and for
    ``gpu`` without one.
    """
    match text:
        case "cpu":
            return os.cpu_count() or 1
        case "gpu":
            gpus = count_gpus()
            if gpus == 0:
                raise LaunchError(
                    "--nproc-per-node gpu: torch sees no GPU; use a whole number from 1, cpu or auto"
                )
            return gpus
        case "auto":
            return count_gpus() or os.cpu_count() or 1
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise LaunchError(f"--nproc-per-node {text!r}: allowed: a whole number from 1, cpu, gpu, auto")
    return int(text)


def count_gpus() -> int:
    """Return the number of GPUs that torch can use here; 0 without torch."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch  # Seconds of import, and needed for these two words of the command line only.

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
