"""For a checkout on ``sys.path``, whose folders are found under their bare names, too.

``import distributed`` means Dask's package, and ``import launch`` a file ``launch.py`` beside the script, whichever is
first on the path: ours are ``gradsplit.distributed`` and ``gradsplit.launch`` only.
"""

import sys
from importlib.util import module_from_spec
from pathlib import Path


def give_way(name: str) -> None:
    """Called while a folder of ours is imported as ``name``: imports what else is there of that name in its place.

    Raises:
        ModuleNotFoundError: there is nothing else.
    """
    # All but the checkouts, where gradsplit's package is a link to the folder.
    path = [
        entry for entry in sys.path if Path(entry, name).resolve() != Path(entry, "gradsplit", name).resolve()
    ]
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            sys.modules[name] = module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
            return
    raise ModuleNotFoundError(f"No module named {name!r} but gradsplit.{name}", name=name)
