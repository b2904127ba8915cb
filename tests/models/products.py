"""products.cpp, which calls the products of one number format: its flags name the folder of the headers it includes."""

from pathlib import Path

from foretoken.core.native import build

SOURCES = Path(build.__file__).parents[2] / "models" / "runners" / "native" / "csrc"
PRODUCTS = (Path(__file__).parent / "products.cpp", (f"-I{SOURCES}",))
