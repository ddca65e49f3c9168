"""Text out of HTML and PDF: what the parser's process (`worker`) does with one document. Imports only what that needs.

HTML: title and main text. Scripts, styles, navigation and lists that are mostly links are dropped, as are addresses of
links; an image is its alt text. PDF: the text of each page in the order that the file draws it.
"""

import re
from collections.abc import Iterator
from typing import Any

from tilewright.data.readers.parser_errors import PARSER_ERRORS, failure, only_damage

_DROP: str = "script style noscript template iframe svg button select textarea"
_AROUND = "nav, aside, footer, form, body > header"
"""Dropped where the page is around them; one that holds most of its text is the page itself."""
_MOST_SHARE = 0.5
_LINK_SHARE = 0.5
_MAIN_SHARE = 0.2
_PARAGRAPH: str = """
    p h1 h2 h3 h4 h5 h6 blockquote pre table ul ol dl article section main figure hr header address details
"""
_LINE: str = "div li tr br dt dd figcaption caption summary option fieldset body thead tbody"
_BREAKS: dict[str, int] = {tag: 1 for tag in _LINE.split()} | {tag: 2 for tag in _PARAGRAPH.split()}
"""Tag -> line ends before and after it."""
_SPACE = re.compile(r"[ \t\n\r\f\v]+")


def html_document(html: str) -> dict[str, str]:
    """The title, language (as the document says it) and text of an HTML document.

    Example:
        >>> html_document('<title>A  b</title><nav>Home</nav><p>One <b>two</b>.<p><img alt="A cat"><script>x</script>')
        {'title': 'A b', 'language': '', 'text': 'One two.\\n\\nA cat'}
    """
    from selectolax.lexbor import LexborHTMLParser, SelectolaxError

    try:
        tree = LexborHTMLParser(html)
    except SelectolaxError as error:  # any text is HTML: what can fail is to hold it
        raise MemoryError(str(error)) from None
    head = tree.css_first("title")
    title = _SPACE.sub(" ", head.text()).strip() if head is not None else ""
    root = tree.css_first("html")
    language = (root.attributes.get("lang") or "") if root is not None else ""
    tree.strip_tags(_DROP.split())
    body = tree.body
    if body is None:
        return {"title": title, "language": language[:20], "text": ""}
    whole = len(body.text())
    around = [part for part in body.css(_AROUND) if len(part.text()) <= _MOST_SHARE * whole]
    for part in reversed(around):  # what is in another one first
        part.decompose()
    for items in body.css("ul, ol, menu"):
        size = len(items.text().strip())
        if size and sum(len(link.text().strip()) for link in items.css("a")) > _LINK_SHARE * size:
            items.decompose()
    main = body.css_first("main, [role=main]")
    articles = body.css("article")
    if main is None and len(articles) == 1:
        main = articles[0]
    if main is not None and len(main.text()) < _MAIN_SHARE * len(body.text()):
        main = None
    return {"title": title, "language": language[:20], "text": _text(main if main is not None else body)}


def _text(root: Any) -> str:
    """The text below a node of an HTML document, blank lines between its paragraphs. A walk without recursion:
    documents nest deep."""
    out = _Lines()
    node, top = root, root.mem_id
    while True:
        out.enter(node)
        below = node.first_child
        if below is not None:
            node = below
            continue
        while True:
            out.leave(node)
            if node.mem_id == top:
                return out.text()
            after = node.next
            if after is not None:
                node = after
                break
            node = node.parent


class _Lines:
    """Text with white space as a browser shows it."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._breaks, self._pre, self._space = 0, 0, False

    def enter(self, node: Any) -> None:
        tag = node.tag
        if node.is_text_node:
            self._add(node.text_content or "")
        elif tag == "img":
            self._add(node.attributes.get("alt") or "")
        else:
            self._break(tag)
            self._pre += tag == "pre"

    def leave(self, node: Any) -> None:
        tag = node.tag
        if tag == "br":
            return
        self._pre -= tag == "pre"
        self._break(tag)
        self._space = self._space or tag in ("td", "th")

    def _break(self, tag: str) -> None:
        self._breaks = max(self._breaks, _BREAKS.get(tag, 0))

    def _add(self, text: str) -> None:
        if not self._pre:
            text = _SPACE.sub(" ", text)
            self._space = self._space or text.startswith(" ")
            ends, text = text.endswith(" "), text.strip(" ")
            if not text:
                return
        else:
            ends = False
        if self._breaks and self._parts:
            self._parts.append("\n" * self._breaks)
        elif self._space and self._parts:
            self._parts.append(" ")
        self._breaks, self._space = 0, ends
        self._parts.append(text)

    def text(self) -> str:
        return "".join(self._parts).strip("\n")


def pdf_pages(path: str, max_pages: int, max_bytes: int) -> Iterator[dict[str, Any]]:
    """The text of each page of a PDF as {"page", "text"}; a page that cannot be read as {"page", "error"}.

    Last comes {"pages": number of all, "bytes": of their text}, and nothing after `max_bytes` of text.
    """
    from pypdf import PdfReader
    from pypdf.errors import PyPdfError

    with open(path, "rb") as file:
        try:
            reader = PdfReader(file, strict=False)
            encrypted = reader.is_encrypted and not reader.decrypt("")
            num = 0 if encrypted else len(reader.pages)
        except (PyPdfError, *PARSER_ERRORS) as error:
            only_damage(error)
            yield {"error": failure(error)}
            return
        if encrypted:
            yield {"encrypted": True}
            return
        size = 0
        for index in range(min(num, max_pages)):
            try:
                text = reader.pages[index].extract_text()
            except (PyPdfError, *PARSER_ERRORS) as error:
                only_damage(error)
                yield {"page": index + 1, "error": failure(error)}
                continue
            text = text.encode("utf-8", "replace").decode()  # half a surrogate pair is no text
            size += len(text.encode())
            if size > max_bytes:
                break
            yield {"page": index + 1, "text": text}
        yield {"pages": num, "bytes": size}
