"""The site in a browser: switch, redirect, search, downloads, themes, narrow screens, axe."""

import functools
import random
import re
import shutil
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from playwright.sync_api import sync_playwright
from site_build import CHINESE, CODES, soup

pytestmark = pytest.mark.browser

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def chromium():
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH: the site is not tested in a browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def root(site):
    """The address at which the built folder is served."""
    handler = functools.partial(Quiet, directory=site.html)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture
def visit(chromium, root):
    """Open pages as a new reader; fail on requests to other hosts and on script errors."""
    contexts, wrong = [], []

    def route(route):
        if route.request.url.startswith((root, "data:", "blob:")):
            route.continue_()
        else:
            wrong.append(f"request to {route.request.url}")
            route.abort()

    def open_page(path="", **options):
        context = chromium.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(10_000)
        context.route("**", route)
        page = context.new_page()
        page.on("console", lambda m: m.type == "error" and wrong.append(f"{page.url}: {m.text}"))
        page.on("pageerror", lambda error: wrong.append(f"{page.url}: {error}"))
        page.goto(root + path)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def lesson(site):
    """Path of a lesson's page inside a language, and an anchor in its middle."""
    page = next((site.html / "en" / "lessons").rglob("*_vector_add.html"))
    sections = [section["id"] for section in soup(page).select("article section[id]")]
    path = page.relative_to(site.html / "en").as_posix()
    return SimpleNamespace(path=path, anchor=sections[len(sections) // 2])


# --- languages


@pytest.mark.parametrize("width, place", [(1280, ".sidebar-drawer"), (390, "article")])
def test_switch_keeps_page_and_anchor_and_is_remembered(visit, root, lesson, width, place):
    page = visit(f"en/{lesson.path}#{lesson.anchor}", viewport={"width": width, "height": 800})
    page.locator(f"{place} .language-switch a[data-language=zh]").click()
    page.wait_for_url(f"{root}zh/{lesson.path}#{lesson.anchor}")
    assert page.locator("html").get_attribute("lang") == "zh-CN"
    assert page.locator(f"#{lesson.anchor}").is_visible()
    page.goto(root)
    page.wait_for_url(f"{root}zh/index.html")
    page.locator(f"{place} .language-switch a[data-language=en]").click()
    page.wait_for_url(f"{root}en/index.html")
    page.goto(root)
    page.wait_for_url(f"{root}en/index.html")


@pytest.mark.parametrize(
    "locale, code", [("zh-CN", "zh"), ("zh-TW", "zh"), ("en-US", "en"), ("fr", "en")]
)
def test_root_picks_the_language_of_the_browser(visit, root, locale, code):
    page = visit(locale=locale)
    page.wait_for_url(f"{root}{code}/index.html")


def test_root_picks_the_first_language_that_it_has(visit, root):
    page = visit("en/index.html")
    script = "Object.defineProperty(navigator, 'languages', {value: ['fr', 'zh-Hans', 'en']})"
    page.add_init_script(script)
    page.goto(root)
    page.wait_for_url(f"{root}zh/index.html")


def test_root_works_without_scripts(visit, root):
    page = visit(java_script_enabled=False)
    page.wait_for_url(f"{root}en/index.html")


# --- search


def hits(page, root, code, words) -> list[str]:
    """Pages that a search finds, as paths inside the language."""
    page.goto(f"{root}{code}/search.html?q={words}")
    page.wait_for_selector("#search-results .search-summary:not(:empty)")
    links = page.locator("#search-results ul.search > li > a")
    addresses = [link.get_attribute("href") for link in links.all()]
    return [address.split("?")[0].split("#")[0] for address in addresses]


def phrases(site, code, pattern):
    """Two phrases from the text of each of some pages, always the same ones."""
    choice = random.Random(0)
    pages = [page for page in site.pages(code) if soup(page).select("article p")]
    for page in choice.sample(pages, min(len(pages), 8)):
        text = "\n".join(p.get_text() for p in soup(page).select("article section > p"))
        found = sorted(set(re.findall(pattern, text)))
        for words in choice.sample(found, min(len(found), 2)):
            yield page.relative_to(site.html / code).as_posix(), words


def test_search_finds_chinese(site, visit, root):
    page = visit("zh/search.html")
    tried = 0
    for path, words in phrases(site, "zh", CHINESE.pattern + "{2,}"):
        start = random.Random(words).randrange(max(1, len(words) - 5))
        part = words[start : start + random.Random(words).randint(2, 6)]
        assert path in hits(page, root, "zh", part), f"{part} of {path}"
        tried += 1
    assert tried >= 8


def test_search_finds_english(site, visit, root):
    page = visit("en/search.html")
    tried = 0
    for path, words in phrases(site, "en", r"[a-z]{5,} [a-z]{5,}"):
        assert path in hits(page, root, "en", words), f"{words} of {path}"
        tried += 1
    assert tried >= 8


@pytest.mark.parametrize("code, words", [("en", "xylophone"), ("zh", "木琴独奏")])
def test_search_does_not_find_what_is_not_there(visit, root, code, words):
    page = visit(f"{code}/search.html")
    assert hits(page, root, code, words) == []
    said = page.locator("#search-results").inner_text()
    assert bool(CHINESE.search(said)) == (code == "zh"), said


@pytest.mark.parametrize("code", CODES)
def test_copy_buttons_speak_the_language_of_the_page(visit, lesson, code):
    page = visit(f"{code}/{lesson.path}")
    button = page.locator("button.copybtn").first
    for label in (button.get_attribute("data-tooltip"), button.text_content()):
        assert label.strip() and bool(CHINESE.search(label)) == (code == "zh"), label


DRAWN = """[...document.querySelectorAll("body *")].flatMap(element => ["::before", "::after"]
  .map(part => getComputedStyle(element, part).content).filter(text => /[a-z]{2,}/i.test(text)))"""


def test_style_sheets_write_no_english_on_chinese_pages(visit, root, lesson):
    page = visit(f"en/{lesson.path}")
    assert '"Out:"' in page.evaluate(DRAWN)  # Sphinx-Gallery, before what a cell printed
    page.goto(f"{root}zh/{lesson.path}")
    assert [text for text in page.evaluate(DRAWN) if text.startswith('"')] == []


# --- downloads


@pytest.mark.parametrize("code", CODES)
def test_downloads_arrive(site, visit, lesson, code):
    page = visit(f"{code}/{lesson.path}")
    links = page.locator(".run-card .downloads a")
    names = [link.inner_text() for link in links.all()]
    assert [name.partition(".")[2] for name in names] == ["py", "ipynb", "zip"]
    for link, name in zip(links.all(), names):
        with page.expect_download() as download:
            link.click()
        assert download.value.suggested_filename == name
        received = download.value.path().read_bytes()
        assert received == (site.html / code / "downloads" / name).read_bytes()


# --- light and dark


def shown(page) -> set[str]:
    """Which copies of the figures can be seen: only-light or only-dark."""
    images = page.locator(".recorded-figure img")
    assert images.count() >= 2
    return {image.get_attribute("class").split()[0] for image in images.all() if image.is_visible()}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_suit_the_theme(visit, root, lesson, scheme):
    page = visit(f"en/{lesson.path}", color_scheme=scheme)
    other = {"light": "dark", "dark": "light"}[scheme]
    assert shown(page) == {f"only-{scheme}"}
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    toggle = page.locator("button.theme-toggle:visible").first
    for _ in range(3):  # auto, light and dark follow each other
        toggle.click()
        if page.evaluate("document.body.dataset.theme") == other:
            break
    assert shown(page) == {f"only-{other}"}
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != ground
    page.goto(f"{root}zh/{lesson.path}")
    assert shown(page) == {f"only-{other}"}  # remembered


# --- every page


# Furo hides what the document is too wide for and lets .content scroll, so these are looked at too.
WIDEST = """Math.max(...[...document.querySelectorAll("html, body, .page, .main, .content")]
  .map(element => element.scrollWidth))"""


def test_pages_fit_a_phone(site, visit, root):
    page = visit("en/index.html", viewport={"width": 390, "height": 844})
    found = []
    for path in map(site.name, site.all_pages()):
        page.goto(root + path)
        if (width := page.evaluate(WIDEST)) > 390:
            found.append(f"{path} is {width} px wide")
    assert not found, "\n".join(found)


AXE = """async rules => {
  const options = {resultTypes: ["violations"], ...(rules && {runOnly: rules})};
  const result = await axe.run(document, options);
  return result.violations.filter(v => ["serious", "critical"].includes(v.impact)).map(v =>
    `${v.id} (${v.help}): ` + v.nodes.map(n => n.target.join(" ")).slice(0, 5).join(" | "));
}"""


@pytest.fixture
def violations(node_modules):
    """What axe finds serious or critical on a page. Only contrast depends on the theme."""
    axe = (node_modules / "axe-core" / "axe.min.js").read_text("utf-8")

    def find(page):
        page.emulate_media(color_scheme="light")
        page.add_style_tag(content="* { transition: none !important }")  # no colour in between
        page.evaluate(axe)
        found = page.evaluate(AXE, None)
        page.emulate_media(color_scheme="dark")
        return found + [f"dark: {v}" for v in page.evaluate(AXE, ["color-contrast"])]

    return find


@pytest.mark.parametrize(
    "code", [c if c == CODES[0] else pytest.param(c, marks=pytest.mark.full) for c in CODES]
)
def test_pages_are_accessible(site, visit, root, violations, code):
    page = visit(f"{code}/index.html")
    found = []
    for path in map(site.name, site.pages(code)):
        page.goto(root + path)
        found += [f"{path}: {violation}" for violation in violations(page)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "html, rule",
    [
        ('<img src="data:,">', "image-alt"),
        ('<p style="color: #eee; background: #fff">pale</p>', "color-contrast"),
        ('<p style="color: light-dark(#000, #222)">dark on dark</p>', "dark: color-contrast"),
    ],
)
def test_a_violation_would_be_found(visit, violations, html, rule):
    page = visit("en/index.html")
    page.locator("article").evaluate("(e, html) => e.insertAdjacentHTML('beforeend', html)", html)
    assert [v for v in violations(page) if v.startswith(rule)]
