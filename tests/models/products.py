"""products.cpp, which calls the products of one number format: its flags name the headers that it includes."""

from __future__ import annotations

import hashlib
from pathlib import Path

from foretoken.core.native import build

SOURCES = Path(build.__file__).parents[2] / "models" / "runners" / "native" / "csrc"
# The cache looks at the headers beside a source; a change of these must compile products.cpp again too.
_HEADERS = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(SOURCES.glob("*.hpp")))).hexdigest()[:16]
PRODUCTS = (Path(__file__).parent / "products.cpp", (f"-I{SOURCES}", f"-DHEADERS_{_HEADERS}"))
