"""Maths as MathML, made at build time: no script, nothing fetched from elsewhere."""

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number

log = logging.getLogger(__name__)


def mathml(node, block: bool) -> str:
    try:
        return latex2mathml.tex2mathml(node.astext(), as_block=block)
    except MathError as error:
        log.warning("maths cannot be shown: %s in %r", error, node.astext(), location=node)
        return f"<code>{node.astext()}</code>"


def visit_inline(self, node):
    self.body.append(mathml(node, block=False))
    raise nodes.SkipNode


def visit_block(self, node):
    self.body.append(self.starttag(node, "div", CLASS="math"))
    if node["number"]:
        self.body.append(f'<span class="eqno">({get_node_equation_number(self, node)})</span>')
    self.body.append(mathml(node, block=True) + "</div>")
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True}
