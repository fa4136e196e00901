"""A page's text as Markdown, for notebooks and scripts.

It starts from the finished page (translated, references and measured numbers
resolved), so no role or directive is left.
"""

import re

from docutils import nodes

SKIPPED = (nodes.comment, nodes.target, nodes.image, nodes.raw, nodes.system_message)


def blocks(node: nodes.Node, depth: int) -> str:
    """Markdown of one block-level node; ``depth`` counts the sections around it."""
    if isinstance(node, SKIPPED) or "not-in-downloads" in node.get("classes", ()):
        return ""
    if isinstance(node, nodes.title):
        return "#" * depth + " " + inline(node)
    if isinstance(node, (nodes.paragraph, nodes.caption)):
        return inline(node)
    if isinstance(node, nodes.rubric):
        return f"**{inline(node)}**"
    if isinstance(node, nodes.literal_block):
        return f"```{node.get('language', '').replace('none', '')}\n{node.astext()}\n```"
    if isinstance(node, nodes.math_block):
        return f"$$\n{node.astext().strip()}\n$$"
    if isinstance(node, (nodes.bullet_list, nodes.enumerated_list)):
        return list_items(node, depth)
    if isinstance(node, nodes.definition_list):
        return "\n\n".join(definition(item, depth) for item in node)
    if isinstance(node, nodes.table):
        return table(node)
    if isinstance(node, nodes.Admonition):
        body = join(node.children, depth)
        if not isinstance(node, nodes.admonition):
            body = f"**{node.tagname.capitalize()}**\n\n{body}"
        return quote(body)
    if isinstance(node, nodes.block_quote):
        return quote(join(node.children, depth))
    if isinstance(node, nodes.section):
        return join(node.children, depth + 1)
    if isinstance(node, (nodes.container, nodes.figure, nodes.compound)):
        return join(node.children, depth)
    raise NotImplementedError(f"Markdown of <{node.tagname}>: {node.astext()[:60]!r}")


def join(children, depth: int) -> str:
    texts = []
    for child in children:
        if isinstance(child, nodes.title) and isinstance(child.parent, nodes.admonition):
            texts.append(f"**{inline(child)}**")
        else:
            texts.append(blocks(child, depth))
    return "\n\n".join(text for text in texts if text)


def inline(node: nodes.Element) -> str:
    """Markdown of what is inside a paragraph, on one line."""
    return re.sub(r"\s*\n\s*", " ", "".join(map(span, node.children))).strip()


def span(node: nodes.Node) -> str:
    if isinstance(node, nodes.Text):
        return re.sub(r"[\\`*]|\b_|_\b", r"\\\g<0>", node.astext())
    if isinstance(node, nodes.literal):
        return code(node.astext())
    if isinstance(node, nodes.math):
        return f"${node.astext()}$"
    text = "".join(map(span, node.children))
    if isinstance(node, nodes.emphasis):
        return f"*{text}*"
    if isinstance(node, nodes.strong):
        return f"**{text}**"
    if isinstance(node, nodes.reference) and ":" in node.get("refuri", ""):
        return (
            f"<{node['refuri']}>"
            if node.astext() == node["refuri"]
            else f"[{text}]({node['refuri']})"
        )
    return text


def code(text: str) -> str:
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    pad = " " if "`" in (text[:1], text[-1:]) else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def list_items(node, depth: int) -> str:
    lines = []
    for number, item in enumerate(node, node.get("start", 1)):
        mark = f"{number}. " if isinstance(node, nodes.enumerated_list) else "- "
        body = join(item.children, depth).replace("\n", "\n" + " " * len(mark))
        lines.append(mark + body)
    return "\n".join(re.sub(r"[ ]+$", "", line, flags=re.M) for line in lines)


def definition(item, depth: int) -> str:
    term, *rest = item.children
    return f"**{inline(term)}**\n\n" + join([c for r in rest for c in r.children], depth)


def quote(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.split("\n"))


def table(node) -> str:
    rows = [
        [
            " ".join(inline(p) for p in entry.findall(nodes.paragraph)).replace("|", r"\|")
            for entry in row
        ]
        for row in node.findall(nodes.row)
    ]
    if not list(node.findall(nodes.thead)):
        rows.insert(0, [""] * len(rows[0]))
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
