"""The report in a real Chromium: clicked through, in both themes and at both widths."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

import commands
from commands import conjugp

pytestmark = pytest.mark.browser
WIDTHS = {"phone": 390, "desktop": 1280}


@pytest.fixture(scope="module")
def browser():
    path = commands.find_browser()
    assert path, "no Chromium found: install one, or name it in CONJUGP_CHROMIUM"
    with sync_playwright() as playwright:
        # The sandbox needs rights that containers rarely have; the page is our own.
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def report(wine, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("browser") / "report.html"
    result = conjugp(wine, "report", "wine.conjugp", "wine.csv", "-o", path)
    assert result.code == 0, result.err
    return path


@pytest.fixture
def opened(browser, report):
    """Open the report; at the end, nothing was complained about and nothing was fetched."""
    contexts, said, fetched = [], [], []

    def open_(width: int = 1280, scheme: str = "light", path: Path = report):
        context = browser.new_context(
            viewport={"width": width, "height": 844}, color_scheme=scheme, offline=True
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: fetched.append(request.url))
        page.goto(path.as_uri())
        return page

    yield open_
    for context in contexts:
        context.close()
    assert not said
    assert all(url.startswith("file:") and url.endswith(".html") for url in fetched)


def column(page, i: int) -> list[str]:
    """The cells of a column of the table of rows, as far as they are shown."""
    return page.locator(f"#browse tbody tr:not([hidden]) td:nth-child({i})").all_inner_texts()


def test_sorting(opened):
    page = opened()
    heading = page.locator("#browse th").nth(3)  # p(true)
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "descending"
    values = [float(v) for v in column(page, 4)]
    assert values == sorted(values, reverse=True) and len(values) == 25
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    values = [float(v) for v in column(page, 4)]
    assert values == sorted(values)
    page.locator("#browse th").nth(1).locator("button").click()  # true class, as text
    labels = column(page, 2)
    assert labels == sorted(labels)
    assert page.locator("#browse th[aria-sort]").count() == 1


def test_filtering_and_more(opened):
    page = opened()
    assert page.locator("#count").inner_text() == "25 of 36 shown"
    page.locator("#more").click()
    assert len(column(page, 1)) == 36 and page.locator("#more").is_hidden()
    page.locator("#filter").fill("CLASS_2")
    rows = page.locator("#browse tbody tr:not([hidden])").all_inner_texts()
    assert rows and all("class_2" in row for row in rows)
    # Cells one by one: the end of one and the start of the next are no word.
    row, label = column(page, 1)[0], column(page, 2)[0]
    page.locator("#filter").fill(row + label)
    assert column(page, 1) == []
    page.locator("#filter").fill("nothing has this")
    assert column(page, 1) == [] and page.locator("#count").inner_text() == "0 of 0 shown"
    page.locator("#filter").fill("")
    page.locator("#wrong").check()
    wrong = [a != b for a, b in zip(column(page, 2), column(page, 3), strict=True)]
    assert all(wrong) and len(wrong) == page.locator("#browse tbody tr.wrong").count()


def background(page) -> str:
    return page.evaluate("getComputedStyle(document.querySelector('section')).backgroundColor")


def test_the_theme_follows_the_system_and_the_button(opened):
    light, dark = opened(scheme="light"), opened(scheme="dark")
    assert background(light) == "rgb(255, 255, 255)"
    assert background(dark) == "rgb(22, 27, 34)"
    for page, other in ((light, "rgb(22, 27, 34)"), (dark, "rgb(255, 255, 255)")):
        before = background(page)
        page.locator("#theme").click()
        assert background(page) == other
        page.locator("#theme").click()
        assert background(page) == before


def test_sections_are_reached_from_the_top(opened):
    page = opened()
    for link in page.locator("nav a").all():
        link.click()
        target = link.get_attribute("href")
        page.wait_for_function(
            "s => { const r = document.querySelector(s).getBoundingClientRect();"
            "return r.top < innerHeight && r.bottom > 0; }",
            arg=target,
        )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_nothing_is_cut_and_everything_can_be_read(opened, width, scheme):
    page = opened(width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    # Whatever is wider than its box has a box that scrolls.
    cut = page.evaluate(
        """() => [...document.querySelectorAll("main *:not(svg *)")].filter(e => {
          const r = e.getBoundingClientRect();
          return r.width && r.right > innerWidth + 1 && !e.closest(".scroll, nav");
        }).map(e => e.outerHTML.slice(0, 80))"""
    )
    assert not cut
    # No name or cell is cut off within its own box.
    sliced = page.evaluate(
        """() => [...document.querySelectorAll("td, th, .name, nav, nav a")].filter(e =>
          e.getClientRects().length && e.scrollWidth > e.clientWidth + 1 && e.clientWidth
        ).map(e => e.outerHTML.slice(0, 80))"""
    )
    assert not sliced
    # Contrast of text on what is behind it, as WCAG AA has it.
    poor = page.evaluate(CONTRAST)
    assert not poor


CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parse = (color) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => top.slice(0, 3).map((v, i) => v * top[3] + below[i] * (1 - top[3]));
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => {
      v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    const chain = [];
    for (let x = e; x; x = x.parentElement) chain.push(parse(getComputedStyle(x).backgroundColor));
    return chain.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const bad = [];
  for (const e of document.querySelectorAll("body *:not(script)")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.getClientRects().length) continue;
    const style = getComputedStyle(e);
    const ground = behind(e);
    const ink = over(parse(e.closest("svg") ? style.fill : style.color), ground);
    const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) bad.push(e.textContent.trim().slice(0, 40) + " " + ratio.toFixed(2));
  }
  return bad;
}"""


def test_text_of_the_user_runs_nothing(opened, wine, report):
    evil = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"
    path = report.with_name("evil.html")
    text = report.read_text(encoding="utf-8")
    # Even a page in which escaping had failed would not run what was put into it.
    path.write_text(text.replace("<h1>", f"<h1>{evil}"), encoding="utf-8")
    context = opened(path=report).context
    page = context.new_page()
    page.goto(path.as_uri())
    assert page.evaluate("window.hacked") is None
    assert page.locator("#count").inner_text() == "25 of 36 shown"


def test_without_scripts_the_page_is_still_whole(browser, report):
    context = browser.new_context(java_script_enabled=False, viewport={"width": 390, "height": 844})
    page = context.new_page()
    page.goto(report.as_uri())
    assert page.locator("#browse tbody tr").count() == 36
    assert page.locator("#browse tbody tr").last.is_visible()
    context.close()
