"""A compiler for PyTorch training that knows DDP: ``gradsplit.compile(model)`` in place of ``torch.compile(model)``.

The public names are loaded when the first of them is asked for. So a launcher's process, which lives as
``gradsplit.launch``, loads neither torch nor the compiler, and importing this beside torch costs nothing.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gradsplit.public_names import *  # noqa: F403
else:

    def __getattr__(name):
        found = {}
        if name == "__all__" or not name.startswith("__"):  # Python itself asks for such names
            public = importlib.import_module("gradsplit.public_names")
            found = {"__all__": public.__all__, **{key: getattr(public, key) for key in public.__all__}}
            # From here on they are plain attributes, which compiled code reads and guards like those of any module.
            globals().update(found)
        if name not in found:
            raise AttributeError(f"module 'gradsplit' has no attribute {name!r}")
        return found[name]

    def __dir__():
        return sorted({*globals(), *__getattr__("__all__")})
