"""Runs checks of clients and prints a line of JSON for each; in environments that have the clients alone."""

import json
from collections.abc import Callable, Mapping
from typing import Any


def report(checks: Mapping[str, Callable[[], Any]]) -> None:
    """Prints the name of each check, with the error that it raised if any."""
    for name, check in checks.items():
        try:
            check()
        except Exception as error:
            print(json.dumps({"name": name, "error": f"{type(error).__name__}: {error}"[:500]}), flush=True)
        else:
            print(json.dumps({"name": name}), flush=True)
