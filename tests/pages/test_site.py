"""The built pages: links, hosts, languages, leftover markup, figures, measured numbers."""

import os
import re
import subprocess
import sys
from collections import Counter
from urllib.parse import unquote, urlsplit

import pytest
from bs4 import BeautifulSoup
from languages import LANGUAGES
from site_build import CHINESE, CODES, Site, soup

NOT_PROSE = ("code", "pre", "script", "style", "math", "kbd", "samp", "template", "noscript")


def test_both_languages_build_without_a_warning(site):
    assert site.warnings == ""


# --- links and hosts


def references(page: BeautifulSoup) -> list[tuple[str, str, str]]:
    """(element, attribute, address) of everything that a page points to or loads."""
    found = []
    for element in page.find_all(True):
        for attribute in ("href", "xlink:href", "src", "data", "poster", "action"):
            if attribute in element.attrs:
                found.append((element.name, attribute, element[attribute]))
        for candidate in element.get("srcset", "").split(","):
            if candidate.strip():
                found.append((element.name, "srcset", candidate.split()[0]))
        for url in re.findall(r"url\(\s*['\"]?([^'\")]+)", element.get("style", "")):
            found.append((element.name, "style", url))
    return found


def elsewhere(address: str) -> bool:
    """Whether an address names a host (or a protocol that is not ours to follow)."""
    parts = urlsplit(address)
    return bool(parts.netloc) or parts.scheme not in ("", "data")


def broken(site) -> list[str]:
    found = []
    for page in [site.html / "index.html", *site.all_pages()]:
        for name, attribute, address in references(soup(page)):
            parts = urlsplit(address)
            if elsewhere(address) or parts.scheme == "data":
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            inside = not parts.path.startswith("/") and target.is_relative_to(site.html)
            good = inside and target.is_file()
            if good and parts.fragment and target.suffix == ".html":
                good = soup(target).find(id=unquote(parts.fragment)) is not None
            if not good:
                found.append(f"{site.name(page)}: <{name} {attribute}={address!r}>")
    return found


def test_every_link_and_anchor_resolves(site):
    assert not broken(site), "\n".join(broken(site))


def test_a_broken_link_would_be_found(tmp_path):
    html = tmp_path / "_build" / "html"
    (html / "en").mkdir(parents=True)
    (html / "index.html").write_text('<a href="en/page.html#here">good</a>')
    (html / "en" / "page.html").write_text(
        '<p id="here"><a href="#there">1</a><a href="/en/page.html">2</a><a href="page">3</a>'
        '<a href="../../../outside">4</a><a href="../index.html#no">5</a>'
        '<img srcset="a.png 2x"><script src="b.js"></script><a href="https://a.org">good</a>'
    )
    assert len(broken(Site(tmp_path, ""))) == 7


def test_nothing_is_loaded_from_another_host(site):
    found = []
    for page in [site.html / "index.html", *site.all_pages()]:
        for name, attribute, address in references(soup(page)):
            if elsewhere(address) and (name, attribute) != ("a", "href"):
                found.append(f"{site.name(page)}: <{name} {attribute}={address!r}>")
        for style in soup(page).find_all("style"):
            found += [f"{site.name(page)}: {url}" for url in loads(style.get_text(), ".css")]
    for path in site.html.rglob("*"):
        if path.suffix in (".css", ".js", ".svg"):
            found += [
                f"{site.name(path)}: {u}" for u in loads(path.read_text("utf-8"), path.suffix)
            ]
    assert not found, "\n".join(found)


NOT_FETCHED = (  # addresses in scripts that are names, notes or translated texts
    "http://www.w3.org/",
    "https://clipboardjs.com/",
    "https://developer.mozilla.org/",
    "https://snowballstem.org/",
    "https://www.sphinx-doc.org/",
)


def loads(text: str, suffix: str) -> list[str]:
    """Addresses on other hosts that a style sheet, script or drawing would load."""
    if suffix == ".css":
        text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
        found = re.findall(r"(?:url\(\s*|@import\s+)['\"]?((?:https?:)?//[^'\")\s]+)", text)
    elif suffix == ".svg":
        found = re.findall(r"(?:href|src)=['\"]((?:https?:)?//[^'\"]+)", text)
        found += loads(text, ".css")
    else:
        found = re.findall(r"https?://[^\s'\"`)]+|(?<=['\"`])//[\w-]+\.[^\s'\"`]+", text)
        found = [url for url in found if not url.startswith(NOT_FETCHED)]
    return found


@pytest.mark.parametrize(
    "text, suffix",
    [
        ("@import 'https://a.org/x.css';", ".css"),
        ("a { background: url(//a.org/x.png) }", ".css"),
        ("fetch('https://a.org')", ".js"),
        ('s.src = "//a.org/x.js"', ".js"),
        ('<image xlink:href="https://a.org/x.png"/>', ".svg"),
    ],
)
def test_a_load_from_another_host_would_be_found(text, suffix):
    assert len(loads(text, suffix)) == 1


# --- languages


def test_both_languages_have_the_same_pages_and_anchors(site):
    english, chinese = (site.html / code for code in CODES)
    pages = [page.relative_to(english) for page in site.pages("en")]
    assert len(pages) > 10
    assert pages == [page.relative_to(chinese) for page in site.pages("zh")]
    for page in pages:
        ids = [
            [s["id"] for s in soup(home / page).select("article section[id], figure[id]")]
            for home in (english, chinese)
        ]
        assert ids[0] == ids[1], page


@pytest.mark.parametrize("language", LANGUAGES, ids=lambda language: language.code)
def test_pages_say_their_language_and_where_the_others_are(site, language):
    for page in site.pages(language.code):
        name, head = site.name(page), soup(page).head
        assert soup(page).html["lang"] == language.tag, name
        inner = page.relative_to(site.html / language.code).as_posix()
        up = "../" * (inner.count("/") + 1)
        links = {link["hreflang"]: link["href"] for link in head.select("link[hreflang]")}
        wanted = {other.tag: f"{up}{other.code}/{inner}" for other in LANGUAGES}
        assert links == wanted | {"x-default": f"{up}en/{inner}"}, name
        switches = soup(page).select(".language-switch")
        assert switches, name
        for switch in switches:
            assert {a["hreflang"]: a["href"] for a in switch.find_all("a")} == wanted, name
            current = [a["hreflang"] for a in switch.find_all("a", attrs={"aria-current": True})]
            assert current == [language.tag], name


def test_site_url_makes_links_absolute(site, tmp_path):
    """With SITE_URL, hreflang and canonical links name the published address."""
    command = [sys.executable, "-m", "sphinx", "-q", "-c", site.tree, "-d", tmp_path / "doctrees"]
    command += ["-D", "language=zh_CN", site.tree / "docs", tmp_path / "zh"]
    environment = os.environ | {"SITE_URL": "https://example.org/x", "CUDA_VISIBLE_DEVICES": ""}
    built = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    head = soup(tmp_path / "zh" / "start" / "install.html").head
    root = "https://example.org/x"
    assert {link["hreflang"]: link["href"] for link in head.select("link[hreflang]")} == {
        "en": f"{root}/en/start/install.html",
        "zh-CN": f"{root}/zh/start/install.html",
        "x-default": f"{root}/en/start/install.html",
    }
    assert [link["href"] for link in head.select("link[rel=canonical]")] == [
        f"{root}/zh/start/install.html"
    ]


@pytest.mark.parametrize("language", LANGUAGES, ids=lambda language: language.code)
def test_titles_are_unique_and_name_the_site(site, language):
    titles = Counter(soup(page).title.get_text().strip() for page in site.pages(language.code))
    assert [title for title, count in titles.items() if count > 1] == []
    assert [title for title in titles if not title.endswith(language.title)] == []


def test_each_page_has_one_main_heading(site):
    for page in site.all_pages():
        if page.name != "search.html":  # a script writes that one's
            assert len(soup(page).select("article h1")) == 1, site.name(page)


# --- text


def texts(page: BeautifulSoup):
    """(text, its element, the paragraph around it) of all prose that is read or spoken."""
    for text in page.find_all(string=True):
        if type(text).__name__ == "NavigableString" and not text.find_parent(NOT_PROSE):
            block = text.find_parent(("p", "li", "td", "th", "dt", "dd"))
            yield str(text), text.parent, block.get_text() if block else str(text)
    for element in page.find_all(True):
        for attribute in ("alt", "title", "aria-label", "placeholder"):
            if element.get(attribute):
                yield element[attribute], element, element[attribute]
    for meta in page.select("meta[name=description][content]"):
        yield meta["content"], meta, meta["content"]


LEFTOVER = {
    r"\*\*|`": "emphasis or a literal",
    r":[a-z]+:`|\{[a-z-]+\}": "a role or directive",
    r"(?<![\w|])\|\w+\|(?![\w|])": "a substitution",
    r"\]\(\S*\)|\]\[|\[\]": "a link",
    r"^\s*\.\. |::\s*$|^\s*:::": "a directive",
    r"\$[^$]+\$|\\[a-z]{2,}": "a formula",
    r"^\s*(?:Figure\.|图：)": "a caption's mark",
}


def leftovers(text: str) -> list[str]:
    return [what for pattern, what in LEFTOVER.items() if re.search(pattern, text)]


def test_no_markup_is_left_over(site):
    found = [
        f"{site.name(page)}: {what}: {text.strip()[:80]!r}"
        for page in site.all_pages()
        for text, *_ in texts(soup(page))
        for what in leftovers(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    ["**重点：**然后", "a `x`", ":ref:`x`", "see {lesson}", "|x|", "[a](b.md)", ".. note::"]
    + [" $x$", r"\frac", "图：一", "Figure. A"],
)
def test_leftover_markup_would_be_found(text):
    assert leftovers(text)


# Latin words that may stand on a Chinese page with no Chinese around them.
NAMES = set(
    """
    Learn Triton GPU NVIDIA CUDA PyTorch torch triton Python Linux Windows WSL macOS Colab
    Docker Sphinx Furo NumPy Matplotlib LLM GB MB TFLOP float PTX SASS SIMT SPMD compute sanitizer
    GEMM softmax Liger Kernel Unsloth GemLite SGLang vLLM Flash Linear Attention
    provider ceiling
    """.split()  # the last line: words of recorded results
)
# File names, versions and dtypes, handles, addresses shown as such.
NOT_WORDS = re.compile(r"[\w./-]*[_.\d][\w./+-]*|@\w+|https:\S+")


def english(text: str) -> list[str]:
    """Words of a text without Chinese that are no names."""
    if CHINESE.search(text):
        return []
    return [w for w in re.findall(r"[A-Za-z]{2,}", NOT_WORDS.sub(" ", text)) if w not in NAMES]


def test_no_english_is_left_on_chinese_pages(site):
    """Each paragraph, heading, cell, link and spoken text is Chinese, or is a name."""
    found = [
        f"{site.name(page)}: <{element.name}> {text.strip()[:80]!r}"
        for page in site.pages("zh")
        for text, element, around in texts(soup(page))
        if english(text) and not CHINESE.search(around)
        if element.get("lang") != "en"
    ]
    assert not found, "\n".join(dict.fromkeys(found))


def test_english_pages_hold_no_chinese(site):
    found = [
        f"{site.name(page)}: {text.strip()[:80]!r}"
        for page in site.pages("en")
        for text, element, _ in texts(soup(page))
        if CHINESE.search(text) and element.get("lang") != "zh-CN"
    ]
    assert not found, "\n".join(found)


# --- figures and numbers


@pytest.mark.parametrize("code", CODES)
def test_figures_have_two_inks_a_caption_and_spoken_text(site, code):
    figures = [
        (page, f) for page in site.pages(code) for f in soup(page).select(".recorded-figure")
    ]
    assert len(figures) >= 3  # two on the home page, the lesson's own
    for page, figure in figures:
        where = f"{site.name(page)}: {figure.get('id')}"
        images = {image["class"][0]: image for image in figure.find_all("img")}
        assert set(images) == {"only-light", "only-dark"}, where
        files = [(page.parent / image["src"]).read_bytes() for image in images.values()]
        assert files[0] != files[1], where
        caption = figure.figcaption.get_text().strip()
        for image in images.values():
            assert len(image["alt"]) > 20, where
            assert bool(CHINESE.search(image["alt"])) == (code == "zh"), where
            assert image["alt"][:10] in caption, where


def test_images_say_what_they_show_or_that_they_show_nothing(site):
    for page in site.all_pages():
        for image in soup(page).find_all("img"):
            decorates = image.find_parent(class_="lesson-card") is not None
            assert image.get("alt") == "" if decorates else image.get("alt"), site.name(page)


def test_a_page_with_a_measured_number_says_which_run(site):
    pages = [page for page in site.all_pages() if soup(page).select(".measured")]
    assert {site.html / code / "index.html" for code in CODES} <= set(pages)
    for page in pages:
        assert soup(page).select(".run-card"), site.name(page)
        for number in soup(page).select(".measured"):
            assert re.search(r"\d", number.get_text()), f"{site.name(page)}: {number}"


def test_pages_show_gpu_runs_only(site):
    for page in site.all_pages():
        assert not soup(page).select(".run-interpreter, .run-none"), site.name(page)


def test_images_are_small(site):
    images = [p for p in site.html.rglob("*") if p.suffix in (".svg", ".png", ".jpg", ".webp")]
    assert images
    assert [site.name(image) for image in images if image.stat().st_size > 150_000] == []
