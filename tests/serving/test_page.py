import contextlib
import os
import re
import shutil
from collections.abc import Iterator

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="no playwright (pip install playwright)").expect
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--disable-gpu", "--disable-quic", "--disable-sync", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]

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
    with opened_page(browser, served) as opened:
        yield opened


@contextlib.contextmanager
def opened_page(browser, served) -> Iterator:
    """A page that contacts only the server and must report no error."""
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
    assert [p for p in problems if not re.search("status of 404|ERR_INTERNET_DISCONNECTED", p)] == []


def search(page, question: str) -> None:
    page.keyboard.type(question)
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_have_text(re.compile("Answered"), timeout=30_000)


def test_start_page_shows_indexes_and_examples(page, world):
    expect(page.locator("#headline")).to_have_text("Search 64 passages")
    shown = [each.split("\n") for each in page.locator("#indexes li").all_inner_texts()]
    is_sparse = world.second_kind == "sparse"
    names = ["Meaning", "Keyword"] if is_sparse else ["Meaning (dense)", "Meaning (second)"]
    assert [each[0] for each in shown] == ["Combined", *names]
    assert shown[0][-1] == "reciprocal rank fusion"
    assert shown[1][-1] == "dense: 64 passages, model, 32 dimensions, exact index"
    assert not is_sparse or shown[2][-1] == "second: 64 passages, BM25, lucene index"
    expect(page.locator("#examples button")).to_have_count(4)
    example = page.locator("#examples button").nth(2).inner_text()
    page.locator("#examples button").nth(2).click()
    expect(page.locator("#status")).to_have_text(re.compile("Answered"))
    assert page.locator("#question").input_value() == example
    expect(page.locator("#start")).to_be_hidden()
    expect(page.locator("#headline")).to_be_hidden()
    if world.second_kind == "sparse":
        found = page.locator("section").nth(2).locator(".open").first
        expect(found).to_contain_text(example)


def test_documents_open_by_keyboard(page, world):
    search(page, "w1 w5 ends joins")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    opened = page.locator("section").nth(2).locator(".open:focus")
    item = page.locator("li", has=page.locator(".open:focus"))
    seen = {}
    for _ in range(page.locator("section").nth(2).locator("li").count()):
        page.keyboard.press("Enter")
        expect(opened).to_have_attribute("aria-expanded", "true")
        shown = item.locator("> .facts").inner_text().split(" · ")[0]
        expect(item.locator(".text")).to_have_text(world.documents[shown]["text"])
        expect(item.locator(".snippet")).to_be_hidden()
        snippet = item.locator(".snippet").text_content()
        seen[shown] = item.locator(".text mark").all_inner_texts()
        page.keyboard.press("Escape")
        expect(opened).to_have_attribute("aria-expanded", "false")
        expect(item.locator(".snippet")).to_be_visible(visible=bool(snippet))
        page.keyboard.press("ArrowDown")
    assert len(seen) == page.locator("section").nth(2).locator("li").count()
    if world.second_kind == "sparse":
        assert seen["xss"] == ["w1", "w5", "joins", "end"]  # the last match is beyond the snippet
    page.keyboard.press("ArrowLeft")
    expect(page.locator("section").nth(1).locator(".open:focus")).to_have_count(1)
    page.keyboard.press("Escape")
    expect(page.locator("#question")).to_be_focused()


def test_id_with_special_characters_is_opened(page, world):
    if world.second_kind == "dense":
        pytest.skip("no Pyserini sidecar: the document is not sure to be found")
    page.goto(page.url + "?q=w11")
    item = page.locator("section").nth(2).locator("li", has_text=f"{world.special_id} · ").first
    item.locator(".open").click()
    expect(item.locator(".text")).to_have_text("w11")


def test_page_explains_errors_in_plain_words(page):
    search(page, "w1")
    page.context.set_offline(True)
    page.locator(".open").first.click()
    expect(page.locator(".whole").first).to_have_text(re.compile("The service cannot be reached"))
    page.locator("#question").fill("w2")
    page.keyboard.press("Enter")
    expect(page.locator("#problem strong")).to_have_text("The service cannot be reached.")
    expect(page.locator("#status")).to_have_text("")
    assert page.locator("section").count() == 0
    page.context.set_offline(False)
    page.locator("#retry").click()
    expect(page.locator("#status")).to_have_text(re.compile("Answered"))
    expect(page.locator("#problem")).to_be_hidden()
    page.locator("#question").fill("w" * 3000)
    page.keyboard.press("Enter")
    expect(page.locator("#problem strong")).to_have_text("The question is too long.")
    expect(page.locator("#problem p")).to_have_text(re.compile("It has 3,000 characters; at most 2,000"))
    expect(page.locator("#retry")).to_be_hidden()
    words = "(status, said) => [problemOf(status, said).message, problemOf(status, said).more]"
    for status, said, what, more in [
        (503, "9 texts are waiting", "cannot answer just now", "9 texts are waiting. Try"),
        (502, None, "cannot answer just now", "It is busy. Try again in a moment."),  # a proxy's own page
        (429, None, "too many requests", "Wait a moment"),
        (422, "queries.0: is odd", "cannot be answered", "Queries.0: is odd."),
        (500, "internal error (KeyError)", "has failed", "Internal error (KeyError)."),
        (200, None, "has failed", "Its answer makes no sense."),
    ]:
        shown = page.evaluate(f"([status, said]) => ({words})(status, said)", [status, said])
        assert what in shown[0] and shown[1].startswith(more)


def test_index_without_texts_shows_ids_and_the_reason(browser, without_texts, world):
    with opened_page(browser, without_texts) as page:
        expect(page.locator("#no-texts")).to_contain_text("answers only show ids")
        expect(page.locator("#try")).to_be_hidden()
        search(page, "w1 w2")
        assert page.locator("section").count() == 1 and page.locator(".open").count() == 0
        titles = page.locator("h3").all_inner_texts()
        assert len(titles) == 10 and titles[0].split(". ", 1)[1] in world.ids


def test_question_by_keyboard_shows_columns_side_by_side(page, world):
    search(page, "joined arrays")  # the cursor is in the field from the start
    names = ["Combined", "Meaning", "Keyword"]
    if world.second_kind == "dense":
        names[1:] = ["Meaning (dense)", "Meaning (second)"]
    assert page.locator("section h2").all_inner_texts() == names
    expect(page.locator("#tabs")).to_be_hidden()
    facts = page.locator("section > p").all_inner_texts()
    assert re.search(r"the other lists agree on\s+[\d.]+ ms \(fuse ", facts[0])
    assert re.search(r"in any words\s+[\d.]+ ms \(encode [\d.]+ ms, search [\d.]+ ms\)", facts[1])
    assert "with the words of" in facts[2] or world.second_kind == "dense"
    boxes = [section.bounding_box() for section in page.locator("section").all()]
    assert len({box["y"] for box in boxes}) == 1 and boxes[0]["x"] < boxes[1]["x"] < boxes[2]["x"]
    assert re.fullmatch(r"Answered in [\d.]+ ms\.", page.locator("#status").inner_text())
    if world.second_kind == "sparse":
        first = page.locator("section").nth(2).locator("li").first
        assert first.locator("h3").inner_text() == "1. Joining arrays"
        assert first.locator("mark").all_inner_texts() == ["Joining", "arrays", "array", "joined"]
        assert re.search(r"cats · score [\d.]+ · Combined #\d", first.locator(".facts").inner_text())
        plain = page.locator("section").nth(2).locator("li", has_text="plain · ")
        # Without a title the first words are the heading, here the whole text.
        assert re.fullmatch(r"\d+\. w7 w8 𝒳🙂 arrays w9", plain.locator("h3").inner_text())
        assert plain.locator("h3 mark").all_inner_texts() == ["arrays"]
        expect(plain.locator(".snippet")).to_be_hidden()


def test_page_reports_a_cut_question(page, world):
    search(page, "w1 w2 w3 " * 6)
    both = "“Meaning (dense)” (16 tokens) and “Meaning (second)”"
    who = "“Meaning”" if world.second_kind == "sparse" else both
    note = f"The question is too long for {who} (16 tokens): it was read up to “… w1 w2 w3 w1 w2”. Put what"
    expect(page.locator(".note")).to_have_count(1)
    expect(page.locator(".note")).to_contain_text(note)
    page.locator("#question").fill("w1")
    page.keyboard.press("Enter")
    expect(page.locator(".note")).to_have_count(0)


def test_documents_are_text_and_never_code(page, world):
    search(page, "w5 img joins document script")
    titles = " ".join(page.locator("h3").all_inner_texts())
    if world.second_kind == "sparse":
        assert "<script>document.title = 'owned'</script>" in titles
        assert "<img src=x onerror=" in " ".join(page.locator("li p").all_inner_texts())
        item = page.locator("section").nth(2).locator("li", has_text="xss · ")
        item.locator(".open").click()
        expect(item.locator(".text")).to_have_text(world.documents["xss"]["text"])
        expect(item.locator("dl")).to_have_text("author<i>Ada</i>pages[7,8]")
    assert page.locator("li i, li b").count() == 0
    assert page.locator("img, #results script").count() == 0
    assert page.title() == "w5 img joins document script – jaxir search"
    # The question is in the address, which anyone may have written.
    page.goto(page.url.split("?")[0] + "?q=%3Cimg%20src%3Dx%20onerror%3D%22document.title%3D1%22%3E%20w1")
    page.wait_for_selector("section li")
    assert page.locator("img").count() == 0 and page.title().startswith("<img src=x")


def test_back_button_and_slash_key(page):
    search(page, "w1 w2")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "question"
    search(page, "w3")  # the key / selected the old question, so typing replaces it
    assert page.url.endswith("?q=w3")
    page.go_back()
    expect(page).to_have_title("w1 w2 – jaxir search")
    assert page.locator("#question").input_value() == "w1 w2"
    page.go_back()
    expect(page.locator("#headline")).to_have_text("Search 64 passages")  # the start page
    assert page.locator("section").count() == 0 and page.locator("#question").input_value() == ""
    # Focus is visible, and Tab reaches the button and the link.
    page.locator("#question").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "BUTTON"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_narrow_screen_and_dark_mode(page):
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.set_viewport_size({"width": 360, "height": 740})
    page.emulate_media(color_scheme="dark")
    search(page, "w1 w2 " + "w3" * 60)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    tabs, sections = page.get_by_role("tab"), page.locator("section")
    assert tabs.first.inner_text() == "Combined" and tabs.count() == 3
    for number in (0, 2, 1):
        tabs.nth(number).click()
        expect(tabs.nth(number)).to_have_attribute("aria-selected", "true")
        assert [section.is_visible() for section in sections.all()] == [at == number for at in range(3)]
    page.keyboard.press("ArrowRight")
    expect(tabs.nth(2)).to_be_focused()
    expect(page.get_by_role("tabpanel")).to_have_count(1)
    assert requests == []
    page.locator("#question").fill("w3")
    page.keyboard.press("Enter")
    expect(page).to_have_title("w3 – jaxir search")
    expect(tabs.nth(2)).to_have_attribute("aria-selected", "true")  # the chosen tab stays
    page.set_viewport_size({"width": 1200, "height": 800})
    assert all(section.is_visible() for section in sections.all())
    expect(page.get_by_role("tabpanel")).to_have_count(0)
    page.set_viewport_size({"width": 360, "height": 740})
    for selector in ("body", ".chosen .facts", ".chosen > p", ".chosen mark", "button", "[role=tab]"):
        assert contrast(page, selector) >= 4.5, selector


def contrast(page, selector: str) -> float:
    """Returns the contrast of an element's text to its background (WCAG 2)."""
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
