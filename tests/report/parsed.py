"""A page as a browser would show it, and a check that it fetches nothing."""

from html.parser import HTMLParser
from xml.etree import ElementTree

VOID = {"meta", "br"}
FETCHING = {"href", "src", "srcset", "action", "data", "poster", "background", "xlink:href"}


class _Reader(HTMLParser):
    """Checks nesting as it goes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"


def read(page: str, scripts: int = 0) -> ElementTree.Element:
    """The page's tree, after checking that it is well-formed, offline, accessible and has ``scripts`` of our own."""
    assert page.startswith("<!DOCTYPE html>\n")
    page.encode("utf-8")
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open
    for tag, attributes in reader.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "form", "base"), tag
        assert not FETCHING & set(attributes), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
    assert sum(tag == "script" for tag, _ in reader.tags) == scripts
    root = ElementTree.fromstring(page.partition("\n")[2])
    style = root.findtext("head/style")
    assert "prefers-color-scheme: dark" in style
    assert "url(" not in style and "@import" not in style
    assert root.get("lang") == "en" and root.find(".//meta[@name='viewport']") is not None
    for drawing in root.iter("svg"):
        hidden = drawing.get("aria-hidden") == "true"
        assert hidden or (drawing.get("role") == "img" and drawing.findtext("title") and drawing.findtext("desc"))
    return root


def words(element: ElementTree.Element) -> str:
    return "".join(element.itertext())
