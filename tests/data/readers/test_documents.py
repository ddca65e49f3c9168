"""HTML and PDF: the text that a person reads, page by page; and documents that hang a parser."""

import sys

import pytest

from tests.data.readers.made import HTML, TEXT, one, pdf_bytes, read, refusal, zip_bytes
from tilewright.core.errors import HardwareError
from tilewright.data.readers.limits import ReadLimits

PAGE = """<!doctype html><html lang="fr"><head><title> A
 title &amp; more </title><script>var x = 1;</script><style>p {}</style></head><body>
<header><a href="/">Home</a></header><nav><ul><li><a href="/a">A</a></ul></nav>
<main><h1>Head</h1><p>First <b>bold</b> and a <a href="http://x">link</a>.</p>
<img src="x.png" alt="A cat on a mat"><ul><li>One item</li><li>Two</li></ul>
<table><tr><td>a</td><td>b</td></tr></table><pre>  kept
    as it is</pre>after<br>a break</main>
<ul class="more"><li><a href="1">See this</a></li><li><a href="2">See that</a></li></ul>
<footer>Imprint</footer></body></html>"""


def test_the_main_text_of_a_page(tmp_path):
    path = tmp_path / "a.html"
    path.write_text(PAGE, encoding="utf-8")
    record = one(path)
    assert record.facts["title"] == "A title & more"
    assert record.facts["html_language"] == "fr"
    assert record.text.split("\n") == [
        *("Head", "", "First bold and a link.", "", "A cat on a mat", "", "One item", "Two", "", "a b", ""),
        *("  kept", "    as it is", "", "after", "a break"),
    ]


def test_the_words_are_those_of_another_parser(tmp_path):
    """Of pages without anything that is dropped: the same words, in the same order, as by Beautiful Soup."""
    soup = pytest.importorskip("bs4")
    body = "".join(
        f"<div><h2>Part {i}</h2><p>Some <i>text</i> &lt;{i}&gt; &eacute;<p>more</div><dl><dt>t{i}<dd>d{i}</dl>"
        for i in range(50)
    )
    path = tmp_path / "a.html"
    path.write_text(f"<title>t</title><body>{body}", encoding="utf-8")
    expected = soup.BeautifulSoup(f"<body>{body}", "lxml").get_text(" ").split()
    assert one(path).text.replace("é", " é ").split() == " ".join(expected).replace("é", " é ").split()


@pytest.mark.parametrize("encoding", ["windows-1251", "koi8-r", "shift_jis", "utf-16"])
def test_the_encoding_that_a_page_names(encoding, tmp_path):
    text = "東京は日本の首都である。" if encoding == "shift_jis" else "Привет, дорогой друг."
    path = tmp_path / "a.html"
    path.write_bytes(f'<html><meta charset="{encoding}"><title>t</title><p>{text}</p>'.encode(encoding))
    assert one(path).text == text


def test_html_by_its_content(tmp_path):
    path = tmp_path / "page"
    path.write_text(HTML)
    assert one(path).text == "First bold text."


def test_a_page_that_takes_too_long_ends_its_process_alone(tmp_path):
    """Open tags take time in the square of their number: minutes for this one."""
    path, small = tmp_path / "a.html", tmp_path / "b.html"
    path.write_text("<html>" + "<div>" * 200_000 + "x")
    small.write_text(HTML)
    reject = refusal(path, limits=ReadLimits(parse_s=1))
    assert (reject.rule, reject.threshold) == ("parser's processor seconds", 1)
    assert one(small).text == "First bold text."


def test_a_page_that_takes_too_much_memory(tmp_path):
    path, small = tmp_path / "a.html", tmp_path / "b.html"
    path.write_text("<html><p>" + "<p>a" * 4_000_000)
    small.write_text(HTML)
    reject = refusal(path, limits=ReadLimits(parse_memory_bytes=256 << 20))
    assert (reject.rule, reject.threshold) == ("parser's memory in bytes", 256 << 20)
    assert one(small).text == "First bold text."


def test_a_caller_that_stops_early_gets_the_right_answer_next(tmp_path):
    from tilewright.data.readers.read_file import read_file

    path, small = tmp_path / "a.pdf", tmp_path / "b.html"
    path.write_bytes(pdf_bytes([f"Page number {i}" for i in range(30)]))
    small.write_text(HTML)
    items = read_file(path, "a.pdf", "d")
    assert "Page number 0" in next(items).text
    del items
    assert one(small).text == "First bold text."


def test_a_document_that_is_too_large(tmp_path):
    path = tmp_path / "a.html"
    path.write_text(HTML * 10)
    reject = refusal(path, limits=ReadLimits(document_bytes=1000))
    assert (reject.value, reject.threshold) == (float(10 * len(HTML)), 1000)


@pytest.mark.parametrize("compress", [True, False])
def test_pages_of_a_pdf(compress, tmp_path):
    path = tmp_path / "a.pdf"
    path.write_bytes(pdf_bytes(["The first page", "", "The third page"], compress))
    records, rejects = read(path)
    assert [(r.part, r.text.strip(), r.facts["page"]) for r in records] == [
        ("page 1", "The first page", 1),
        ("page 3", "The third page", 3),
    ]
    assert [(r.rule, r.count) for r in rejects] == [("page without text", 1)]


def test_more_pages_than_are_read(tmp_path):
    path = tmp_path / "a.pdf"
    path.write_bytes(pdf_bytes([f"Page number {i}" for i in range(7)]))
    records, (reject,) = read(path, ReadLimits(pages=3))
    assert len(records) == 3
    assert (reject.rule, reject.value, reject.threshold, reject.count) == ("pages", 7.0, 3, 4)


def test_a_truncated_pdf_says_so(tmp_path):
    path = tmp_path / "a.pdf"
    whole = pdf_bytes([f"Page number {i}" for i in range(7)])
    for size in (20, 500, len(whole) // 2, len(whole) - 20):
        path.write_bytes(whole[:size])
        rules = {reject.rule for reject in read(path)[1]}
        assert rules & {"damaged PDF", "truncated PDF, pages may be lost"}, (size, rules)


def test_a_missing_package_names_itself(tmp_path, monkeypatch):
    for name, data, package in [
        ("a.html", HTML.encode(), "selectolax"),
        ("a.pdf", pdf_bytes(["x"]), "pypdf"),
        ("a.txt", "Привет, дорогой друг мой".encode("koi8-r"), "charset_normalizer"),
        ("b.txt", "Ã¼ber naÃ¯ve cafÃ©".encode(), "ftfy"),
    ]:
        (tmp_path / name).write_bytes(data)
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(HardwareError, match=f"Package {package} is not installed") as caught:
            read(tmp_path / name)
        assert 'pip install "tilewright[data]"' in str(caught.value)


@pytest.mark.parametrize("name", ["a.pptx", "a.XLSX", "a.odt", "a.doc"])
def test_office_documents_say_what_to_do(name, tmp_path):
    """They are archives of XML, which is no text to learn from."""
    inside = {"[Content_Types].xml": b"<Types/>", "word/document.xml": b"<w:document>text</w:document>"}
    (tmp_path / name).write_bytes(zip_bytes(inside))
    found = refusal(tmp_path / name)
    assert (found.rule, found.value) == ("office document is not read", name[1:].lower())
    assert "PDF" in str(found.threshold)
    (tmp_path / "many.zip").write_bytes(zip_bytes({name: zip_bytes(inside), "b.txt": TEXT.encode()}))
    records, rejects = read(tmp_path / "many.zip")
    assert [record.part for record in records] == ["b.txt"]
    assert [reject.part for reject in rejects] == [name]
