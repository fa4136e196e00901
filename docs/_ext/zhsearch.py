"""Chinese search by pairs of characters: any phrase is found, with no word list."""

import re

from docutils import nodes
from sphinx.search.en import SearchEnglish

RUN = re.compile(r"[\u3400-\u9fff]+|[a-zA-Z0-9_]+")


class SearchChinese(SearchEnglish):
    # language_name stays English: Sphinx 9.0 names the JavaScript stemmer after it.
    lang = "zh"
    js_splitter_code = r"""
function splitQuery(query) {
  const words = [];
  for (const run of query.match(/[\u3400-\u9fff]+|[a-zA-Z0-9_]+/g) || []) {
    if (run < "\u3400" || run.length === 1) words.push(run);
    else for (let i = 0; i + 1 < run.length; i++) words.push(run.slice(i, i + 2));
  }
  return words;
}
"""

    def split(self, text: str) -> list[str]:
        words = []
        for run in RUN.findall(text):
            words.append(run)
            if run >= "\u3400":
                words[-1:] = [*run, *(run[i : i + 2] for i in range(len(run) - 1))]
        return words

    def word_filter(self, word: str) -> bool:
        return word not in self.stopwords


def index_whole_paragraphs(app) -> None:
    """Index a paragraph as one text, so that a phrase is found across emphasis and links."""
    if app.builder.format != "html":
        return
    index_page = app.builder.index_page

    def flattened(pagename, doctree, title):
        doctree = doctree.deepcopy()
        for node in list(doctree.findall(nodes.TextElement)):
            if isinstance(node, (nodes.paragraph, nodes.term, nodes.caption)):
                node.children = [nodes.Text(node.astext())]
        index_page(pagename, doctree, title)

    app.builder.index_page = flattened


def setup(app):
    app.add_search_language(SearchChinese)
    app.connect("builder-inited", index_whole_paragraphs)
    return {"parallel_read_safe": True}
