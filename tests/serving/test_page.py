"""The page, in a real browser."""

import os
import re
import shutil
from collections.abc import Iterator

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="no playwright (pip install playwright)").expect
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium (Debian: apt-get install chromium)")


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        flags = FLAGS + (["--no-sandbox"] if os.geteuid() == 0 else [])
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser, served) -> Iterator:
    """A page of which each test may ask nothing but the server, and that may report no error."""
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    context.set_default_timeout(30_000)
    opened = context.new_page()
    asked, problems = [], []
    opened.on("request", lambda request: asked.append(request.url))
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    opened.on("dialog", lambda dialog: problems.append(dialog.message))
    opened.goto(served.url)
    expect(opened.locator("#question")).to_be_focused()
    yield opened
    context.close()
    assert asked and all(url.startswith((served.url, "data:")) for url in asked)
    assert [p for p in problems if "status of 422" not in p] == []


def search(page, question: str) -> None:
    page.keyboard.type(question)
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_have_text(re.compile("Answered"), timeout=30_000)


def test_a_question_by_keyboard_gives_columns_side_by_side(page, world):
    search(page, "joined arrays")  # the cursor is in the field from the start
    assert page.locator("section h2").all_inner_texts() == ["dense", "second", "hybrid"]
    facts = page.locator("section > p").all_inner_texts()
    assert re.search(
        r"dense: model, exact, 64 documents\s+[\d.]+ ms \(encode [\d.]+ ms, search [\d.]+ ms\)", facts[0]
    )
    assert world.second_kind in facts[1] and re.search(r"fusion of all indexes\s+[\d.]+ ms \(fuse ", facts[2])
    boxes = [section.bounding_box() for section in page.locator("section").all()]
    assert len({box["y"] for box in boxes}) == 1 and boxes[0]["x"] < boxes[1]["x"] < boxes[2]["x"]
    assert re.fullmatch(r"Answered in [\d.]+ ms\.", page.locator("#status").inner_text())
    if world.second_kind == "sparse":
        first = page.locator("section").nth(1).locator("li").first
        assert first.locator("h3").inner_text() == "1. Joining arrays"
        assert first.locator("mark").all_inner_texts() == ["Joining", "arrays", "array", "joined"]
        assert re.search(r"cats · score [\d.]+ · .*hybrid #\d", first.locator(".facts").inner_text())
        plain = page.locator("section").nth(1).locator("li", has_text="plain · ")
        assert re.fullmatch(r"\d+\. plain", plain.locator("h3").inner_text())  # there is no title
        assert plain.locator("mark").all_inner_texts() == ["arrays"]


def test_documents_are_text_and_never_code(page, world):
    search(page, "w5 img joins document script")
    titles = " ".join(page.locator("h3").all_inner_texts())
    if world.second_kind == "sparse":
        assert "<script>document.title = 'owned'</script>" in titles
        assert "<img src=x onerror=" in " ".join(page.locator("li p").all_inner_texts())
    assert page.locator("img, #results script").count() == 0
    assert page.title() == "w5 img joins document script – jaxir search"
    # The question is in the address; there it may be anybody's.
    page.goto(page.url.split("?")[0] + "?q=%3Cimg%20src%3Dx%20onerror%3D%22document.title%3D1%22%3E%20w1")
    page.wait_for_selector("section li")
    assert page.locator("img").count() == 0 and page.title().startswith("<img src=x")


def test_back_slash_key_and_errors(page):
    search(page, "w1 w2")
    page.locator("section li").first.click()
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "question"
    search(page, "w3")  # the key selected the old question, so typing replaces it
    assert page.url.endswith("?q=w3")
    page.go_back()
    expect(page).to_have_title("w1 w2 – jaxir search")
    assert page.locator("#question").input_value() == "w1 w2"
    page.evaluate("question.value = 'w'.repeat(3000); form.requestSubmit()")
    page.wait_for_selector("#status.error")
    assert "at most 2000 characters" in page.locator("#status").inner_text()
    assert page.locator("section").count() == 0
    # Focus can be seen, and Tab reaches the button and the link.
    page.locator("#question").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "BUTTON"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_on_a_phone_in_the_dark(page):
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.set_viewport_size({"width": 360, "height": 740})
    page.emulate_media(color_scheme="dark")
    search(page, "w1 w2 " + "w3" * 60)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    boxes = [section.bounding_box() for section in page.locator("section").all()]
    assert len({box["x"] for box in boxes}) == 1 and boxes[0]["y"] < boxes[1]["y"] < boxes[2]["y"]
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    page.locator("nav a", has_text="hybrid").click()
    expect(page.locator("section").nth(2).locator("h2")).to_be_in_viewport()
    assert requests == []
    for selector in ("body", ".facts", "#results section > p", "mark", "button"):
        assert contrast(page, selector) >= 4.5, selector


def contrast(page, selector: str) -> float:
    """Returns the contrast of an element's text to what lies behind it, as WCAG 2 defines it."""
    colours = page.locator(selector).first.evaluate(
        """(element) => {
          const of = (node) => getComputedStyle(node).backgroundColor;
          let behind = element;
          while (of(behind) === "rgba(0, 0, 0, 0)" && behind.parentElement) behind = behind.parentElement;
          return [getComputedStyle(element).color, of(behind)];
        }"""
    )

    def luminance(colour: str) -> float:
        values = [int(v) / 255 for v in re.findall(r"\d+", colour)[:3]]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted(map(luminance, colours))
    return (high + 0.05) / (low + 0.05)
