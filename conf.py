"""Sphinx's decisions. The pages are in docs/; the extensions in docs/_ext are ours."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "docs" / "_ext"))
# Markup may touch Chinese letters. Docutils reads this variable late enough only from here.
os.environ["DOCUTILSCONFIG"] = str(ROOT / "docs" / "_ext" / "docutils.conf")

author = "The Learn Triton authors"
copyright = "2026, " + author

recorded_gpu = "nvidia-h200"  # what pages show without CUDA, and what gates freshness
site_url = os.environ.get("SITE_URL", "")  # makes canonical and hreflang links absolute
if site_url and not site_url.endswith("/"):
    site_url += "/"

extensions = [
    "sphinx_gallery.gen_gallery",
    "myst_parser",
    "sphinx_design",
    "sphinx_copybutton",
    # ours
    "languages",
    "gallery",
    "figures",
    "cards",
    "recorded",
    "proofs",
    "measured",
    "downloads",
    "mathml",
    "zhsearch",
]
exclude_patterns = ["_*", "recordings", "locale", "requirements.txt"]
templates_path = [str(ROOT / "docs" / "_templates")]
nitpicky = True

locale_dirs = [str(ROOT / "docs" / "locale")]  # absolute: it is not below the sources
gettext_compact = False  # one catalog a page
gettext_uuid = False
gettext_location = False  # line numbers would change in every catalog with every edit

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "attrs_inline"]
myst_heading_anchors = 3

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "lessons",
    "filename_pattern": r"/\d_\w+/\d\d_\w+\.py$",
    "ignore_pattern": r"/(?:tools|exercises)/",
    "within_subsection_order": "FileNameSortKey",
    "image_scrapers": ("figures.scrape",),
    "reset_modules": (),
    "capture_repr": (),  # a page shows what a lesson prints and draws
    "run_stale_examples": True,  # ask for the run every time; replaying is cheap
    "backreferences_dir": None,
    "write_computation_times": False,
    "download_all_examples": False,  # ours are in the language of the page
    "show_signature": False,
    "show_memory": False,
    "min_reported_time": 1e9,
    "nested_sections": True,
}

html_theme = "furo"
html_static_path = [str(ROOT / "docs" / "_static")]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_sourcelink = False
html_use_index = False
html_permalinks_icon = "#"
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "language-switch.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
copybutton_selector = "div.highlight-python pre, div.highlight-Python pre, div.highlight-bash pre"
