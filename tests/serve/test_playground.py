"""The playground in a real browser, over the real server and the bundled pair."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.real import real_model
from tests.serve.conftest import running

from foretoken import LLM
from foretoken.serve.settings import ServerSettings

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found: install Debian's chromium"),
]

TURNS = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}<assistant>"
PROMPT = 'def read_lines(path):\n    """Return the lines of a file."""\n'
WAIT = 120_000  # milliseconds, on a busy machine
expect = sync_api.expect
expect.set_options(timeout=WAIT)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def site(server: Any) -> str:
    return f"{server.url}/"


@pytest.fixture(scope="module")
def chat_site(spare: LLM) -> Iterator[str]:
    """A page of the same model with a template that marks turns."""
    with running(spare, ServerSettings(model_names=("stdlib",), chat_template=TURNS)) as server:
        yield f"{server.url}/"


class Sight:
    """A page, and what a visitor would not see: its complaints, and whom it talked to."""

    def __init__(self, context: Any, site: str) -> None:
        self.page = context.new_page()
        self.page.set_default_timeout(WAIT)
        self.complaints: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.addresses: list[str] = []
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._asked)
        self.page.goto(site)
        expect(self.page.locator("#method option").first).to_be_attached()

    def _asked(self, request: Any) -> None:
        self.addresses.append(request.url)
        if request.url.endswith("/completions"):
            self.bodies.append(json.loads(request.post_data))

    def race(self, **fields: Any) -> None:
        """Fill ``fields`` in by their ids, race, and wait for the result."""
        for name, value in {"max-tokens": 40, "depth": 4, **fields}.items():
            self.page.fill(f"#{name}", str(value))
        self.page.click("#go")
        expect(self.page.locator("#result")).to_be_visible()

    def text(self, lane: str) -> str:
        """The lane's text without the prompt and without what is struck out."""
        return "".join(self.page.locator(f"#{lane}-text .token").all_text_contents())


@pytest.fixture(scope="module")
def contexts(browser: Any) -> Callable[[dict[str, Any]], Any]:
    """Makes a browser context for each set of options, whose window stays open: to open one takes a core's second."""
    made: dict[str, Any] = {}

    def context(options: dict[str, Any]) -> Any:
        if (key := json.dumps(options)) not in made:
            made[key] = browser.new_context(**options)
            made[key].new_page()
        return made[key]

    return context


@contextmanager
def visited(contexts: Callable[[dict[str, Any]], Any], site: str, options: dict[str, Any]) -> Iterator[Sight]:
    options = {"reduced_motion": "reduce", "viewport": {"width": 1240, "height": 900}, **options}
    seen = Sight(contexts(options), site)
    yield seen
    assert all(address.startswith(site) for address in seen.addresses), "something was fetched from elsewhere"
    seen.page.evaluate("localStorage.clear()")
    seen.page.close()
    assert not seen.complaints


@pytest.fixture
def sight(contexts: Callable[[dict[str, Any]], Any], site: str, request: pytest.FixtureRequest) -> Iterator[Sight]:
    """The page as a visitor finds it; ``parametrize`` it indirectly with a browser context's options."""
    with visited(contexts, site, getattr(request, "param", {})) as seen:
        yield seen


@pytest.fixture
def talk(contexts: Callable[[dict[str, Any]], Any], chat_site: str, request: pytest.FixtureRequest) -> Iterator[Sight]:
    """The page of a chat model, with options as for ``sight``."""
    with visited(contexts, chat_site, getattr(request, "param", {})) as seen:
        yield seen


def overflow(page: Any) -> int:
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


@pytest.mark.parametrize("sight", [{"reduced_motion": "no-preference"}], indirect=True)
def test_two_lanes_race_and_are_replayed_on_one_clock(sight):
    page = sight.page
    page.fill("#prompt", PROMPT)
    page.fill("#max-tokens", "48")
    page.fill("#depth", "4")
    page.press("#prompt", "Control+Enter")
    expect(page.locator("#status")).to_contain_text("Both recordings on one clock")
    expect(page.locator("#speculative[data-state=running] .token").first).to_be_visible()
    page.keyboard.press("Escape")  # enough: what is left comes at once
    expect(page.locator("#same")).to_contain_text("identical")

    assert sight.text("speculative") == sight.text("plain") != ""
    assert page.locator("#speculative-text .accepted").count() > 5
    assert page.locator("#speculative-text .target").count() > 2
    assert page.locator("#plain-text .accepted").count() == 0
    for lane in ("speculative", "plain"):
        tokens, seconds, rate = page.locator(f"#{lane}-figures b").all_text_contents()
        assert tokens == "48" and float(seconds.removesuffix(" s")) > 0 and float(rate.replace(",", "")) > 0
    assert float(page.inner_text("#ratio b").removesuffix("×")) > 0
    assert page.locator("#clock .end").count() == 2
    assert page.locator("#positions .bar").count() >= 2
    assert "mean acceptance length" in page.inner_text("#cards")


def test_the_server_is_followed_live(sight):
    live = sight.page.locator("#live")
    expect(live).to_be_visible()
    sight.race()
    expect(live).to_contain_text("% of drafted tokens accepted")
    expect(live).to_contain_text("draft_model since the server began")


def test_each_lane_asks_for_what_the_form_says(sight):
    sight.race(prompt=PROMPT, depth=3, temperature=0.8, seed="", **{"top-p": 0.9})
    expect(sight.page.locator("#same")).to_contain_text("No seed")
    ours, plain = (body for body in sight.bodies if body["max_tokens"] == 40)
    assert ours.pop("speculative_method") == sight.page.input_value("#method")
    assert (ours.pop("speculative_tokens"), plain.pop("speculative_tokens")) == (3, 0)
    assert ours == plain
    assert plain | {"prompt": PROMPT, "temperature": 0.8, "top_p": 0.9, "stream": True, "return_steps": True} == plain
    assert "seed" not in plain

    sight.race(depth=0, seed=3)
    expect(sight.page.locator("#drafter")).to_contain_text("auto")
    ours, plain = sight.bodies[-3], sight.bodies[-1]
    assert "speculative_tokens" not in ours and plain["speculative_tokens"] == 0
    assert ours["seed"] == plain["seed"] == 3


def test_tokens_tell_p_and_q_and_why(sight):
    page = sight.page
    for _ in range(5):  # without a seed a text may be over at once, all of it drafted or none of it
        sight.race(prompt=PROMPT, seed="")
        if all(page.locator(f"#speculative-text .{origin}").count() for origin in ("accepted", "target")):
            break
    tip = page.locator("#tip")
    page.hover("#speculative-text .accepted")
    expect(tip).to_contain_text("draft, accepted")
    expect(tip).to_contain_text("min(1, p/q)")
    assert tip.locator("dt").all_text_contents() == ["p target", "q draft"]
    for value in tip.locator("dd").all_inner_texts():
        assert 0 <= float(value.lstrip("<> ")) <= 1
    page.hover("#speculative-text .target")
    expect(tip).to_contain_text("the target’s own")
    page.hover("h1")
    expect(tip).to_be_hidden()

    page.locator("#speculative-text [tabindex='0']").focus()
    for key in ("ArrowRight", "ArrowRight", "End"):
        page.keyboard.press(key)
        expect(tip).to_be_visible()
    assert page.evaluate("document.activeElement.matches('.token:last-of-type')")
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()

    sight.race(seed=7)
    page.hover("#speculative-text .accepted")
    expect(tip).to_contain_text("noise that the seed fixes")


def test_the_tree_of_every_step_can_be_visited(sight):
    page = sight.page
    sight.race(prompt=PROMPT, temperature=1)
    page.click("#speculative-text .accepted >> nth=1")
    assert page.locator("#tree .node.accepted").count() >= 1
    assert page.locator("#tree .node.root").count() == 1
    expect(page.locator("#step-said")).to_contain_text("drafted")
    at = int(page.input_value("#step"))
    page.click("#on")
    assert int(page.input_value("#step")) == at + 1
    rejected = page.locator("#speculative-text .rejected").first
    expect(rejected).to_be_hidden()
    page.check("#struck")
    expect(rejected).to_be_visible()
    rejected.click()
    node = page.locator("#tree .described:has(.rejected)").first
    node.hover()
    expect(page.locator("#tip")).to_contain_text("Rejected")


def test_both_at_once(sight):
    sight.page.select_option("#mode", "together")
    sight.race(prompt=PROMPT)
    expect(sight.page.locator("#ratio")).to_contain_text("sharing the machine")
    expect(sight.page.locator("#same")).to_contain_text("identical")


def test_escape_stops_a_race(sight):
    page = sight.page
    page.fill("#max-tokens", "4000")
    page.click("#go")
    expect(page.locator("#speculative-text .token").nth(5)).to_be_attached()
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_have_text("Stopped.")
    expect(page.locator("#go")).to_have_text("Race")
    sight.race(**{"max-tokens": 8})  # and the next one runs


@pytest.mark.parametrize(
    "sight",
    [
        {"viewport": {"width": 360, "height": 740}, "color_scheme": "light"},
        {"viewport": {"width": 360, "height": 740}, "color_scheme": "dark"},
        {"viewport": {"width": 1240, "height": 900}, "color_scheme": "dark"},
    ],
    ids=["phone", "phone in the dark", "dark"],
    indirect=True,
)
def test_fits_and_follows_the_theme(sight):
    page = sight.page
    assert overflow(page) <= 0
    sight.race(prompt=PROMPT, depth=16)
    assert overflow(page) <= 0
    page.locator("#speculative-text .accepted").last.hover()
    expect(page.locator("#tip")).to_be_visible()
    assert overflow(page) <= 0
    box = page.locator("#tip").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= page.viewport_size["width"]

    def bright() -> bool:
        color = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, color[4:-1].split(","))) > 384

    before = bright()
    assert before == page.evaluate("!matchMedia('(prefers-color-scheme: dark)').matches")
    page.click("#theme")
    assert bright() != before


def turn(seen: Sight, message: str | None, **fields: Any) -> list[dict[str, Any]]:
    """Sends a message, or asks for the last turn again; returns the bodies of both lanes."""
    before = len(seen.bodies)
    for name, value in {"max-tokens": 24, "depth": 4, **fields}.items():
        seen.page.fill(f"#{name}", str(value))
    if message is not None:
        seen.page.fill("#prompt", message)
    seen.page.evaluate("document.getElementById('result').hidden = true")  # that of the turn before
    seen.page.click("#go" if message is not None else "#again")
    expect(seen.page.locator("#result")).to_be_visible()
    return [body for body in seen.bodies[before:] if body["max_tokens"] != 1]


def test_a_chat_model_is_raced_in_a_conversation(talk):
    page = talk.page
    assert page.inner_text("#prompt-name") == "Message" and "sky" in page.input_value("#prompt")
    ours, plain = turn(talk, "One?", system="Be brief.", seed=7)
    system, one = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "One?"}
    assert ours["messages"] == plain["messages"] == [system, one] and "prompt" not in plain
    assert ours["stream"] and ours["return_steps"] and plain["speculative_tokens"] == 0
    expect(page.locator("#same")).to_contain_text("identical")
    first = talk.text("speculative")
    assert first == talk.text("plain") != "" and page.locator("#speculative-text .accepted").count() > 1
    assert page.text_content("#speculative-text .said.user") == "You: One?" and page.input_value("#prompt") == ""
    assert page.locator("#tree .node").count() > 1 and page.locator("#positions .bar").count() >= 1
    page.hover("#speculative-text .accepted")
    expect(page.locator("#tip")).to_contain_text("draft, accepted")
    expect(page.locator("#earlier")).to_be_hidden()

    ours, _ = turn(talk, "Two?", system="")
    answer, two = {"role": "assistant", "content": first}, {"role": "user", "content": "Two?"}
    assert ours["messages"] == [one, answer, two]
    assert page.locator("#turns .said").all_inner_texts()[0].endswith("One?")
    assert page.locator("#turns .said.assistant").all_text_contents() == [f"Model: {first}"]
    (again, _), second = turn(talk, None, depth=3), talk.text("speculative")
    assert again == {**ours, "speculative_tokens": 3}
    assert turn(talk, "Three?")[0]["messages"][3:] == [
        {"role": "assistant", "content": second},
        {"role": "user", "content": "Three?"},
    ]
    page.click("#anew")
    expect(page.locator("#earlier")).to_be_hidden()
    assert page.locator("#speculative-text .token").count() == 0 and "sky" in page.input_value("#prompt")
    assert turn(talk, "One?")[0]["messages"] == [one]


def test_a_turn_that_was_stopped_or_refused_is_no_part_of_the_conversation(talk):
    page = talk.page
    turn(talk, "One?")
    page.fill("#max-tokens", "4000")
    page.fill("#prompt", "Stopped?")
    page.click("#go")
    expect(page.locator("#speculative-text .token").nth(3)).to_be_attached()
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_have_text("Stopped.")
    assert page.input_value("#prompt") == "Stopped?"
    page.route("**/v1/chat/completions", with_answer({"status": 400, "json": {"error": {"message": "planted"}}}))
    page.click("#go")
    expect(page.get_by_role("alert")).to_contain_text("planted")
    page.unroute("**/v1/chat/completions")
    talk.complaints.clear()  # the browser itself notes refused requests
    asked = [message["content"] for message in turn(talk, "Two?")[0]["messages"] if message["role"] == "user"]
    assert asked == ["One?", "Two?"]


@pytest.mark.parametrize("talk", [{"viewport": {"width": 360, "height": 740}}], ids=["phone"], indirect=True)
def test_a_conversation_fits_a_phone(talk):
    for message in ("One? " * 40, "x" * 300):
        turn(talk, message)
        assert overflow(talk.page) <= 0


def test_a_model_without_turns_completes_prompts(sight):
    page = sight.page
    assert page.inner_text("#prompt-name") == "Prompt" and "def read_lines" in page.input_value("#prompt")
    for hidden in ("#system-field", "#anew", "#again", "#earlier"):
        expect(page.locator(hidden)).to_be_hidden()


@pytest.mark.real
def test_a_real_chat_model_is_raced_in_a_conversation(contexts):
    llm = LLM(real_model("smollm2"), speculative_config={"method": "ngram"}, isolate_failures=True)
    with running(llm) as server, visited(contexts, f"{server.url}/", {}) as seen:
        ours, _ = turn(seen, "Correct and repeat: Teh fox jumps ovr the dog.")
        expect(seen.page.locator("#same")).to_contain_text("identical")
        assert [message["role"] for message in ours["messages"]] == ["user"] and seen.text("plain")


ANSWERS = [
    ({"status": 401, "json": {"error": {"message": "no key"}}}, "asks for an API key"),
    ({"status": 429, "headers": {"Retry-After": "3"}, "json": {}}, "Try again in 3 s"),
    ({"status": 503, "json": {"error": {"message": "draining"}}}, "shutting down or not ready"),
    ({"status": 400, "json": {"error": {"message": "max_tokens is too large"}}}, "max_tokens is too large"),
    ({"status": 200, "body": 'data: {"error": {"message": "it broke"}}\n\n'}, "it broke"),
    ({"status": 200, "body": 'data: {"choices": []}\n\n'}, "ended before its end mark"),
    (None, "No answer from the server"),
]


def with_answer(answer: dict[str, Any] | None) -> Callable[[Any], None]:
    return lambda route: route.fulfill(**answer) if answer else route.abort()


def test_errors_are_shown_in_words(sight):
    page = sight.page
    for answer, words in ANSWERS:
        page.route("**/v1/completions", with_answer(answer))
        page.click("#go")
        expect(page.get_by_role("alert")).to_contain_text(words)
        expect(page.locator("#go")).to_have_text("Race")
        page.unroute("**/v1/completions")
    sight.race()
    expect(page.get_by_role("alert")).to_be_hidden()
    sight.complaints.clear()  # the browser itself notes refused requests


def test_a_key_is_asked_for_and_sent(browser, site):
    """Over a server that wants one, played by the browser."""
    with browser.new_context() as context:
        page = context.new_page()

        def guard(route: Any) -> None:
            known = route.request.headers.get("authorization") == "Bearer sesame"
            route.continue_() if known else route.fulfill(status=401, json={})

        page.route("**/v1/models", guard)
        page.goto(site)
        expect(page.get_by_role("alert")).to_contain_text("asks for an API key")
        page.keyboard.type("sesame")  # the field has the focus
        page.keyboard.press("Tab")
        expect(page.get_by_role("alert")).to_be_hidden()
        expect(page.locator("#method option").first).to_be_attached()
        assert "sesame" not in page.evaluate("JSON.stringify(localStorage)")


def test_controls_have_names_and_the_tab_key_reaches_them(sight):
    page = sight.page
    for role in ("textbox", "slider", "spinbutton", "combobox", "button", "checkbox"):
        for control in page.get_by_role(role).all():
            name = control.evaluate("e => e.labels?.[0]?.innerText || e.ariaLabel || e.innerText || ''")
            assert name.strip(), control
    reached = set()
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    assert {"prompt", "method", "depth", "temperature", "top-p", "max-tokens", "seed", "mode", "key", "go"} <= reached


PURE = """async () => {
  const { Parser } = await import("/api.js");
  const { Trace, align, rejected, statistics } = await import("/trace.js");
  const tokens = (...texts) => texts.map((text) => ({ text }));
  const shared = ({ pieces, left }) => [pieces.map((piece) => [piece.text, piece.tokens.length]), left.length];
  const parser = new Parser();
  const chunk = (delta, ...texts) => ({
    choices: [{ delta }], ...(texts.length ? { steps: [{ draft: [], tokens: tokens(...texts) }] } : {}),
  });
  const chats = [
    [chunk({ role: "assistant", content: "" }), chunk({ content: "a" }), chunk({ content: "b" }), chunk({}, "a", "b")],
    [chunk({ role: "assistant" }), chunk({ reasoning_content: "h" }, "<t>", "h"), chunk({ content: "a" }, "</t>", "a")],
  ];
  const spoken = chats.map((chunks) => {
    const trace = new Trace();
    chunks.forEach((each, at) => trace.push(each, at));
    trace.close();
    return trace;
  });
  const node = (parent, accepted) => ({ parent, accepted });
  const chain = [node(-1, true), node(0, false), node(1, false)];
  return {
    events: ["data: a\\r", "\\n\\r\\nda", "ta: b\\ndata: c\\n", "\\n: x\\n\\ndata:d\\n\\n"].flatMap(
      (part) => parser.push(part)),
    whole: shared(align(tokens("a", "b"), "ab")),
    parts: shared(align(tokens("\\ufffd", "\\ufffd", "x"), "éx")),
    waiting: shared(align(tokens("\\ufffd"), "")),
    blanks: shared(align(tokens("foo", "bar"), " foo bar")),
    held: shared(align(tokens("foo", "bar"), "fo")),
    rejected: [
      rejected(chain), rejected([node(-1, true)]), rejected([node(-1, false), node(-1, true), node(0, false)]),
    ],
    chat: spoken.map(({ text, reasoning, answer }) => [text, reasoning, answer]),
    attributed: spoken.map((trace) => trace.events.flatMap(({ pieces }) =>
      pieces.map((piece) => [piece.text, piece.tokens.map((token) => token.text).join("")]))),
    statistics: statistics([{ draft: chain, tokens: [1, 2] }, { draft: [], tokens: [1] }]),
  };
}"""


def test_the_pure_parts(sight):
    got = sight.page.evaluate(PURE)
    assert got["events"] == ["a", "b\nc", "d"]
    assert got["whole"] == [[["a", 1], ["b", 1]], 0]
    assert got["parts"] == [[["é", 2], ["x", 1]], 0]
    assert got["waiting"] == [[], 1]
    assert got["blanks"] == [[[" foo", 1], [" bar", 1]], 0]
    assert got["held"] == [[["fo", 1]], 2]
    assert got["rejected"] == [[1, 2], [], []]
    assert got["chat"] == [["ab", "", "ab"], ["h\n\na", "h", "a"]]
    assert got["attributed"][0] == [["a", "a"], ["b", "b"]]
    assert ["h", "h"] in got["attributed"][1] and "".join(text for text, _ in got["attributed"][1]) == "h\n\na"
    assert got["statistics"] == {
        "steps": 2,
        "drafts": 1,
        "drafted": 3,
        "accepted": 1,
        "tokens": 3,
        "length": 2,
        "byPosition": [{"drafted": 1, "accepted": 1}, {"drafted": 1, "accepted": 0}, {"drafted": 1, "accepted": 0}],
    }
