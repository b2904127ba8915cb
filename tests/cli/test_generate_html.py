"""``foretoken generate --html``: the page of what was streamed."""

import json
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest

from foretoken.report.document import text as escaped

LENGTH = ("--max-tokens", "12", "--dtype", "float32")


def read(file: Path) -> ElementTree.Element:
    return ElementTree.fromstring(file.read_text(encoding="utf-8").partition("\n")[2])


@pytest.mark.parametrize("extra", [(), ("--json",)])
def test_the_page_is_of_the_text_that_is_printed(run, pair, tmp_path, extra):
    file = tmp_path / "text.html"
    result = run("generate", "def f(x):", *LENGTH, *extra, "--html", str(file)).ok()
    text = json.loads(result.out)["text"] if extra else result.out
    root = read(file)
    shown = [each for each in root.iter("span") if (each.get("class") or "").startswith("token")]
    inside = [each for each in shown if not {"rejected", "cut", "part"} & set(each.get("class").split())]
    kept = "".join(each.text for each in inside)
    assert unescape(escaped(text)).startswith(kept) and kept
    assert all("target p" in each.get("data-tip") for each in shown if "rejected" not in each.get("class"))
    assert str(pair.target) in "".join(root.itertext())


def test_several_completions_each_have_a_part(run, pair, tmp_path):
    file = tmp_path / "text.html"
    assert run("generate", "a", *LENGTH, "-n", "2", "--temperature", "1", "--html", str(file)).code == 0
    heads = [head.text for head in read(file).iter("h2")]
    assert heads[:2] == ["Completion 1 of 2", "Completion 2 of 2"]
