"""Pictures of the playground for its page here, of a real race in a real browser.

    .venv/bin/python docs/screenshots.py                # the bundled pair, its target widened to 0.7 B parameters
    .venv/bin/python docs/screenshots.py --size none    # as they are

Needs playwright and a Chromium that is installed on the machine.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, expect, sync_playwright

from foretoken import LLM, zoo
from foretoken.serve.app import create_app
from foretoken.serve.server import Server
from foretoken.serve.settings import ServerSettings, bind
from foretoken.serve.worker import Worker
from foretoken.train.widen.checkpoint import scaled

IMAGES = Path(__file__).parent / "img"
DESKTOP = {"width": 1000, "height": 900}
PHONE = {"width": 360, "height": 760}
WAIT = 180_000  # milliseconds


@contextmanager
def served(llm: LLM, name: str) -> Iterator[str]:
    """The address of a server."""
    worker = Worker(llm)
    server = Server(create_app(worker, ServerSettings(model_names=(name,))), [worker])
    with bind("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()


def bundled(size: str) -> tuple[LLM, str]:
    """The bundled pair and its name on the page."""
    target = zoo.path("target") if size == "none" else scaled(size)
    llm = LLM(target, zoo.path("draft"), methods=("eagle3", "ngram"), enable_prefix_caching=True, isolate_failures=True)
    return llm, target.name if size == "none" else f"{zoo.path('target').name} widened to {size.upper()}"


@contextmanager
def raced(browser: Browser, address: str, viewport: dict[str, int], scheme: str, **fields: str) -> Iterator[Page]:
    """The page after a race with ``fields``, which are given by their ids."""
    options: dict[str, Any] = {"viewport": viewport, "color_scheme": scheme, "reduced_motion": "reduce"}
    with browser.new_context(**options) as context:
        page = context.new_page()
        page.goto(address)
        expect(page.locator("#method option").first).to_be_attached(timeout=WAIT)
        page.select_option("#method", fields.pop("method"))
        for name, value in {"max-tokens": "64", **fields}.items():
            page.fill(f"#{name}", value)
        page.click("#go")
        expect(page.locator("#result")).to_be_visible(timeout=WAIT)
        yield page


def visit(page: Page) -> None:
    """Goes to the first step with both accepted and rejected draft tokens, if there is one."""
    steps = int(page.get_attribute("#step", "max") or 1)
    for number in range(2, steps + 1):
        page.fill("#step", str(number))
        if page.locator("#tree .node.accepted").count() > 1 and page.locator("#tree .node.rejected").count() > 1:
            return


def main(size: str) -> None:
    """Takes all pictures; that of a conversation if the model is there."""
    sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
    from real_models import real_model_path

    IMAGES.mkdir(exist_ok=True)
    if (chat := real_model_path("smollm2")).exists():
        shoot_chat(LLM(chat, speculative_config={"method": "ngram"}, enable_prefix_caching=True, isolate_failures=True))
    with served(*bundled(size)) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        with raced(browser, address, DESKTOP, "light", method="draft_model", depth="6") as page:
            visit(page)
            page.mouse.move(0, 0)
            shoot(page, "light", "body", "#speculative")
        with raced(browser, address, DESKTOP, "dark", method="eagle3", depth="14") as page:
            visit(page)
            page.check("#struck")
            page.mouse.move(0, 0)
            shoot(page, "dark", ".lanes", "#stage")
        with raced(browser, address, DESKTOP, "light", method="draft_model", depth="6", seed="") as page:
            page.locator("#speculative-text .token.accepted").nth(8).hover()
            shoot(page, "token", "#speculative", "#speculative", "#tip")
        with raced(browser, address, PHONE, "light", method="draft_model", depth="6") as page:
            visit(page)
            page.mouse.move(0, 0)
            shoot(page, "phone", "body", "#speculative")
        browser.close()


def shoot_chat(llm: LLM) -> None:
    """Takes the picture of the second turn of a conversation."""
    with served(llm, "SmolLM2-135M-Instruct") as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        with raced(browser, address, DESKTOP, "light", method="ngram", depth="4", system="You answer briefly.") as page:
            page.fill("#prompt", "Now repeat that as a list.")
            page.evaluate("document.getElementById('result').hidden = true")  # that of the first turn
            page.click("#go")
            expect(page.locator("#result")).to_be_visible(timeout=WAIT)
            page.mouse.move(0, 0)
            shoot(page, "chat", "body", "#speculative")
        browser.close()


def shoot(page: Page, name: str, *elements: str) -> None:
    """Saves a picture of the smallest rectangle that contains all elements."""
    scrolled = page.evaluate("scrollY")
    boxes = [box for element in elements if (box := page.locator(element).bounding_box()) is not None]
    left = max(0, min(box["x"] for box in boxes) - 8)
    upper = max(0, min(box["y"] for box in boxes) + scrolled - 8)
    right = min(page.evaluate("innerWidth"), max(box["x"] + box["width"] for box in boxes) + 8)
    lower = max(box["y"] + box["height"] for box in boxes) + scrolled + 8
    clip = {"x": left, "y": upper, "width": right - left, "height": lower - upper}
    page.screenshot(path=IMAGES / f"playground-{name}.png", clip=clip, full_page=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="0.7b", help="as in `foretoken demo`; none leaves the target as it is")
    main(parser.parse_args().size)
