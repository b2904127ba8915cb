"""Hatch's build hook: compiles the kernels into a wheel of one platform, if FORETOKEN_WHEEL asks for it.

Without that variable the wheel is pure Python, and kernels are compiled at first use.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PLATFORM = "FORETOKEN_WHEEL"  # a platform of foretoken.core.native.toolchain, or "here": this machine's own compiler
LEVELS = "FORETOKEN_WHEEL_LEVELS"  # instruction-set levels, by commas; by default all


class KernelsHook(BuildHookInterface[Any]):
    """Adds a library for each instruction-set level, and names the platform in the wheel's tag."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        return ["ziglang>=0.14"] if os.environ.get(PLATFORM, "here") != "here" else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        name = os.environ.get(PLATFORM)
        if not name or version == "editable":
            return
        sys.path.insert(0, str(Path(self.root) / "src"))  # only modules that need nothing but Python are imported
        from foretoken.models.runners.native.build import build_wheel_kernels

        tag, files = build_wheel_kernels(name, tuple(filter(None, os.environ.get(LEVELS, "").split(","))))
        build_data["tag"], build_data["pure_python"] = tag, False
        build_data["force_include"] |= {str(source): f"foretoken/_kernels/{name}" for name, source in files.items()}
