"""Text in any encoding: the text comes back, and its bytes are those that the record names."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.readers.made import COMPRESS, TEXT, one, read, refusal, rows_bytes
from tilewright.data.readers.limits import ReadLimits, ReadOptions

SAMPLES = {
    "ru": "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему. Всё смешалось в "
    "доме Облонских. Жена узнала, что муж был в связи с бывшею в их доме француженкою-гувернанткой.",
    "ja": "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。"
    "何でも薄暗いじめじめした所で泣いていた事だけは記憶している。吾輩はここで始めて人間というものを見た。",
    "zh": "道可道，非常道。名可名，非常名。无名天地之始，有名万物之母。故常无欲以观其妙，常有欲以观其徼。",
    "ko": "모든 국민은 인간으로서의 존엄과 가치를 가지며, 행복을 추구할 권리를 가진다. 국가는 이를 보장할 의무를 진다.",
    "el": "Όλοι οι άνθρωποι από τη φύση τους επιθυμούν τη γνώση. Η αρχή είναι το ήμισυ του παντός.",
    "pl": "Litwo, ojczyzno moja! Ty jesteś jak zdrowie; ile cię trzeba cenić, ten tylko się dowie, kto cię "
    "stracił. Dziś piękność twą w całej ozdobie widzę i opisuję, bo tęsknię po tobie.",
    "fr": "Longtemps, je me suis couché de bonne heure. Parfois, à peine ma bougie éteinte, mes yeux se fermaient si "
    "vite que je n'avais pas le temps de me dire: «Je m'endors.»",
}
CASES = [
    *[("ru", name) for name in ("koi8-r", "cp1251", "iso8859-5", "cp866", "utf-16", "utf-32", "utf-8-sig")],
    *[("ja", name) for name in ("shift-jis", "euc-jp", "iso2022-jp", "utf-16-be", "utf-32-le")],
    *[("zh", "gb18030"), ("ko", "euc-kr"), ("el", "iso8859-7"), ("el", "cp1253")],
    *[("pl", "iso8859-2"), ("pl", "cp1250"), ("fr", "latin-1"), ("fr", "cp1252"), ("fr", "utf-16-le")],
]


@pytest.mark.parametrize(("language", "encoding"), CASES)
def test_text_of_any_encoding(language, encoding, tmp_path):
    text = SAMPLES[language] + "\n" + SAMPLES[language] + "\n"
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode(encoding))
    record = one(path)
    assert record.text == text
    data = path.read_bytes()
    assert data[record.start : record.stop].decode(record.facts["encoding"]) == text
    assert (record.modality, record.path, record.domain, record.id) == ("text", "a.txt", "d", "")


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=200).filter(str.strip))
def test_bytes_of_a_record_are_those_of_the_file(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(text.encode())
    records, rejects = read(path)
    for record in records:
        if "repaired" not in record.facts and record.facts["encoding"] == "utf-8":
            assert path.read_bytes()[record.start : record.stop].decode() == record.text
    assert len(records) + len(rejects) == 1


def test_a_large_file_comes_in_pieces_that_join_to_it(tmp_path):
    lines = [f"{number} {SAMPLES['ru']}\n" for number in range(15_000)]
    for encoding in ("utf-8", "cp1251", "utf-16-le"):
        path = tmp_path / f"{encoding}.txt"
        path.write_bytes("".join(lines).encode(encoding))
        records, rejects = read(path)
        assert rejects == []
        assert len(records) >= 3
        assert [r.start for r in records[1:]] == [r.stop for r in records[:-1]]
        assert records[-1].stop == path.stat().st_size
        assert "".join(r.text for r in records) == "".join(lines)


def test_lines_of_another_encoding_are_decoded_on_their_own(tmp_path):
    path = tmp_path / "a.txt"
    other = "Привет, дорогой друг мой, как твои дела сегодня"
    path.write_bytes("\n".join([TEXT] * 20).encode() + b"\n" + other.encode("cp1251"))
    record = one(path)
    assert record.text == "\n".join([TEXT] * 20) + "\n" + other
    assert record.facts["encoding"] == "utf-8 + cp1251"


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1"])
def test_mojibake_is_undone_and_clean_text_is_not_touched(encoding, tmp_path):
    wrong = "Ünïcödé naïve café déjà vu".encode().decode(encoding)
    path = tmp_path / "a.txt"
    path.write_text(f"a clean line: café “quoted” – «oui»\n{wrong}\n", encoding="utf-8")
    record = one(path)
    assert record.text == "a clean line: café “quoted” – «oui»\nÜnïcödé naïve café déjà vu\n"
    assert record.facts["repaired"] == 1
    path.write_text("\n".join(SAMPLES.values()), encoding="utf-8")
    assert "repaired" not in one(path).facts


def test_markdown_without_its_front_matter(tmp_path):
    path = tmp_path / "a.md"
    path.write_bytes(b'---\ntitle: "Of cats"\ntags: [x]\n---\n# Head\n\n[link](http://x) and `code`.\n')
    record = one(path)
    assert record.text == "# Head\n\n[link](http://x) and `code`.\n"
    assert record.facts["title"] == "Of cats"
    assert path.read_bytes()[record.start : record.stop].decode() == record.text


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "arrow"])
def test_rows(kind, tmp_path):
    path = tmp_path / f"a.{kind}"
    path.write_bytes(rows_bytes(kind))
    records, rejects = read(path)
    assert rejects == []
    assert [r.text for r in records] == ["first row", "second row"]
    assert len({r.part for r in records}) == 2
    assert all(r.part.startswith("row ") for r in records)
    if kind == "jsonl":
        assert [json.loads(path.read_bytes()[r.start : r.stop])["text"] for r in records] == ["first row", "second row"]
    rejects = read(path, options=ReadOptions(text_field="absent"))[1]
    assert {reject.rule for reject in rejects} == {"no field 'absent'"}


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv"])
@pytest.mark.parametrize(("language", "encoding"), [("ru", "koi8-r"), ("ru", "cp1251"), ("ja", "shift-jis")])
def test_rows_of_a_legacy_encoding(kind, language, encoding, tmp_path):
    texts = [f"{SAMPLES[language]} {number}" for number in range(4)]
    rows = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    mark = "\t" if kind == "tsv" else ","
    table = f"id{mark}text\n" + "".join(f'{i}{mark}"{text}"\n' for i, text in enumerate(texts))
    content = {"jsonl": "\n".join(rows), "json": f"[{','.join(rows)}]"}.get(kind, table)
    path = tmp_path / f"a.{kind}"
    path.write_bytes(content.encode(encoding))
    records, rejects = read(path)
    assert rejects == []
    assert [record.text for record in records] == texts
    for record in records:
        assert "fits".encode(record.facts["encoding"])
        if kind == "jsonl":
            line = path.read_bytes()[record.start : record.stop].decode(record.facts["encoding"])
            assert json.loads(line)["text"] == record.text


@pytest.mark.parametrize("shift", range(3))
def test_a_character_at_the_end_of_the_first_block_is_no_legacy_encoding(shift, tmp_path):
    text = "x" * shift + "日本" * 200_000
    (tmp_path / "a.json").write_text(json.dumps([{"text": text}], ensure_ascii=False), encoding="utf-8")
    records, rejects = read(tmp_path / "a.json")
    assert rejects == []
    assert "".join(record.text for record in records) == text
    assert "encoding" not in records[0].facts


def test_a_bad_row_of_a_file_in_utf8_is_set_aside_alone(tmp_path):
    rows = [json.dumps({"text": SAMPLES["ru"]}, ensure_ascii=False).encode() for _ in range(30)]
    rows[7] = json.dumps({"text": SAMPLES["fr"]}, ensure_ascii=False).encode("latin-1")
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(rows))
    records, (reject,) = read(tmp_path / "a.jsonl")
    assert (len(records), reject.rule, reject.part) == (29, "row is not UTF-8", "row 8")


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_text(suffix, tmp_path):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](TEXT.encode()))
    record = one(path)
    assert (record.text, record.part) == (TEXT, "a.txt")
    assert TEXT.encode()[record.start : record.stop].decode() == record.text
    torn = tmp_path / f"torn.txt{suffix}"
    torn.write_bytes(COMPRESS[suffix](TEXT.encode() * 50)[:-9])
    assert any("compressed file" in reject.rule for reject in read(torn)[1])


def test_the_language_on_request(tmp_path):
    for language in ("ru", "ja", "pl", "fr"):
        path = tmp_path / "a.txt"
        path.write_text(SAMPLES[language], encoding="utf-8")
        record = one(path, options=ReadOptions(language=True))
        assert record.language == language
        assert record.scores["language"] > 0.9
        assert one(path).language == ""


def test_what_is_no_text_is_said(tmp_path):
    for name, data, rule in [
        ("a.txt", bytes(range(256)) * 4, "binary, not text"),
        ("a.txt", b"", "empty file"),
        ("a.txt", b"  \n\n", "blank record"),
        ("a.key", b"-----BEGIN PRIVATE KEY-----\n", "file type is not read"),
    ]:
        (tmp_path / name).write_bytes(data)
        assert refusal(tmp_path / name).rule == rule


def test_a_line_that_does_not_end(tmp_path):
    limits = ReadLimits(line_bytes=1000)
    for name in ("a.txt", "a.jsonl"):
        path = tmp_path / name
        row = b'{"text": "short"}\n'
        path.write_bytes(row + b"x" * 5000 + b"\n" + row)
        records, (reject,) = read(path, limits)
        assert (reject.rule, reject.threshold) == ("line length", 1000)
        assert len(records) == 2
    assert read(tmp_path / "a.txt", limits)[1][0].value == 5001
    for name, data in (("a.csv", b"text\n" + b"y" * 5000 + b"\n"), ("a.json", b'["' + b"y" * 5000 + b'"]')):
        (tmp_path / name).write_bytes(data)
        assert [reject.rule for reject in read(tmp_path / name, limits)[1]] == ["line length"], name
