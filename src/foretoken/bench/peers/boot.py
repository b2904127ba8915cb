"""``python -P boot.py NAME``: the process of one peer, in the peer's own environment, where foretoken is not installed.

So the package is made known by its place, without the packages that live beside it.
"""

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path


def boot(name: str) -> None:
    """Serve the peer ``name`` on standard input and output."""
    root = Path(__file__).resolve().parents[2]
    spec = spec_from_file_location("foretoken", root / "__init__.py", submodule_search_locations=[str(root)])
    if spec is None or spec.loader is None:
        raise ImportError(f"{root} does not hold the package")
    sys.modules["foretoken"] = package = module_from_spec(spec)
    spec.loader.exec_module(package)
    import_module("foretoken.bench.peers.protocol").serve(import_module(f"foretoken.bench.peers.{name}").load)


if __name__ == "__main__":
    boot(sys.argv[1])
