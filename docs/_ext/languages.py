"""The site's languages: one table, the switch on every page, hreflang, the root page."""

import json
import re
from dataclasses import dataclass

from sphinx.locale import _


@dataclass(frozen=True)
class Language:
    code: str  # folder, URL, remembered choice
    sphinx: str  # Sphinx's language and the locale folder
    tag: str  # BCP 47, for lang and hreflang
    name: str
    title: str


LANGUAGES = [
    Language("en", "en", "en", "English", "Learn Triton"),
    Language("zh", "zh_CN", "zh-CN", "简体中文", "学习 Triton"),
]

# Furo writes these in English in its templates; page.html replaces the part in braces.
THEME_STRINGS = [
    'aria-label="{Toggle site navigation sidebar}"',
    'aria-label="{Toggle table of contents sidebar}"',
    'aria-label="{Toggle Light / Dark / Auto color theme}"',
    'aria-label="{Toggle navigation of }',
    "<title>{Contents}</title>",
    "<title>{Menu}</title>",
    "<title>{Expand}</title>",
    "<title>{Light mode}</title>",
    "<title>{Dark mode}</title>",
    "<title>{Auto light/dark, in light mode}</title>",
    "<title>{Auto light/dark, in dark mode}</title>",
    "@pradyunsg</a>{'s}",
]

ROOT_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>Learn Triton · 学习 Triton</title>
{links}
<script>
let code = null;
try {{ code = localStorage.getItem("language"); }} catch {{}}
const known = {known};
if (!(code in known)) {{
  const wanted = (navigator.languages || [navigator.language]).map(l => l.slice(0, 2).toLowerCase());
  code = wanted.find(l => l in known) || "en";
}}
location.replace(code + "/index.html" + location.search + location.hash);
</script>
<noscript><meta http-equiv="refresh" content="0; url=en/index.html"></noscript>
</head>
<body>
<p>{choices}</p>
</body>
</html>
"""


def of(sphinx_language: str | None) -> Language:
    return next(lang for lang in LANGUAGES if lang.sphinx == (sphinx_language or "en"))


def alternates(site_url: str, page: str) -> str:
    """The hreflang links of a page: absolute where the site's address is known."""
    pages = [(lang.tag, lang.code) for lang in LANGUAGES] + [("x-default", "en")]
    return "\n".join(
        f'<link rel="alternate" hreflang="{tag}" href="{site_url}{code}/{page}.html">'
        for tag, code in pages
    )


def root_page(site_url: str) -> str:
    """The page at the root: goes to the reader's language, without script to English."""
    choices = " · ".join(
        f'<a href="{lang.code}/index.html" lang="{lang.tag}">{lang.name}</a>' for lang in LANGUAGES
    )
    known = json.dumps({lang.code: lang.tag for lang in LANGUAGES})
    links = alternates(site_url, "index")
    return ROOT_PAGE.format(links=links, known=known, choices=choices)


def configure(app, config) -> None:
    language = of(config.language)
    config.project = config.html_title = language.title
    if config.site_url:
        config.html_baseurl = f"{config.site_url}{language.code}/"


def add_context(app, pagename, templatename, context, doctree) -> None:
    up = "../" * (pagename.count("/") + 1)
    current = of(app.config.language)
    context["languages"] = [
        (lang, f"{up}{lang.code}/{pagename}.html", lang is current) for lang in LANGUAGES
    ]
    context["theme_strings"] = [
        (re.sub("[{}]", "", text), re.sub("{(.*)}", lambda m: _(m[1]), text))
        for text in THEME_STRINGS
    ]
    context["copyright"] = _(app.config.copyright)
    links = alternates(app.config.site_url or up, pagename)
    context["metatags"] = f"{context.get('metatags', '')}\n{links}\n"


def leave_own_strings(app) -> None:
    """Keep `make gettext` from updating sphinx.po, which is written by hand.

    It holds the strings of templates, extensions and theme. Sphinx finds those of
    templates only, so an update would mark the others as obsolete.
    """
    if app.builder.name == "gettext":
        app.config.templates_path = []


def setup(app):
    app.add_config_value("site_url", "", "html")
    app.connect("config-inited", configure)
    app.connect("builder-inited", leave_own_strings)
    app.connect("html-page-context", add_context)
    return {"parallel_read_safe": True}
