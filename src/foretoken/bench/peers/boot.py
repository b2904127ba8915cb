"""``python -P boot.py NAME``: runs one peer in its own environment, where foretoken is not installed.

``NAME_api`` answers requests of OpenAI's API in place of the race's.

The package is imported from its folder, without exposing the packages installed beside it.
"""

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path


def boot(name: str) -> None:
    """Serves the peer ``name`` on standard input and output."""
    root = Path(__file__).resolve().parents[2]
    spec = spec_from_file_location("foretoken", root / "__init__.py", submodule_search_locations=[str(root)])
    if spec is None or spec.loader is None:
        raise ImportError(f"{root} does not hold the package")
    sys.modules["foretoken"] = package = module_from_spec(spec)
    spec.loader.exec_module(package)
    engine, _, api = name.partition("_")
    peer, protocol = (import_module(f"foretoken.bench.peers.{each}") for each in (engine, "protocol"))
    protocol.serve(peer.load_api if api else peer.load)


if __name__ == "__main__":
    boot(sys.argv[1])
