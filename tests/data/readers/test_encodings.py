"""Text of many languages in the encodings that it was written in comes back, declared or not, short or long."""

import unicodedata

import pytest

from tests.data.readers.made import read
from tilewright.data.readers.text.decode_text import decode_text, wide_encoding_of
from tilewright.data.readers.text.detect_encoding import codec_of, declared_encoding

# ruff: noqa: E501
WEST = ("cp1252", "mac_roman", "cp850")
SENTENCES = {
    "French": ("Le café coûte très cher à Besançon, où l'été dure à peine un mois. Il dépend à présent de son frère.", WEST),
    "German": ("Der Bär läuft über die große Brücke, während die Vögel schön früh für Öl und Käse zwitschern.", WEST),
    "Spanish": ("El niño comió piñones y después corrió hacia el jardín de su tía. ¿Qué pasó aquí mañana?", WEST),
    "Portuguese": ("A informação não chegou à região, então as crianças da avó comem pão e maçã com três irmãos.", WEST),
    "Italian": ("Perché la città è così lontana? Però la libertà non è più una novità, né una virtù di lunedì.", WEST),
    "Swedish": ("Åsa går till sjön för att äta räksmörgås, men båten är på väg över ån mot öarna i väst.", WEST),
    "Danish": ("På en rød ø bor en gæst, der får æbler og brød af en ældre mand fra Århus hver søndag.", WEST),
    "Icelandic": ("Það er kalt í dag og ég ætla að fara út með þér, þótt veðrið sé ekki gott og ísinn þunnur.", ("cp1252",)),
    "Finnish": ("Mökillä on hyvä olla, kun järvi jäätyy ja hämärä tulee. Äiti keittää yöllä kahvia pöydän ääressä.", WEST),
    "Polish": ("Zażółć gęślą jaźń, bo tęsknię po ojczyźnie. Dziś piękność twą w całej ozdobie widzę i opisuję.",
               ("cp1250", "iso8859_2")),
    "Czech": ("Příliš žluťoučký kůň úpěl ďábelské ódy. Dneska večer přijde náš učitel, který už dlouho nešel.",
              ("cp1250", "iso8859_2")),
    "Hungarian": ("Árvíztűrő tükörfúrógép. Az őszi erdőben sűrű köd ült, és a fiú külön utat keresett hősiesen.",
                  ("cp1250", "iso8859_2")),
    "Croatian": ("Čovjek iz šume došao je u kuću žedan i tražio čašu vode; već je đak išao u školu.",
                 ("cp1250", "iso8859_2")),
    "Turkish": ("Çocuğun ağabeyi dün akşam İstanbul'a gitti, çünkü ışık sönmüştü ve yağmur yağıyordu.", ("cp1254",)),
    "Lithuanian": ("Žąsys ir šunys ėjo į mišką, o ąžuolų lapai krito ant žemės; čia visą dieną šviečia saulė.", ("cp1257",)),
    "Latvian": ("Šodien ģimene brauc uz jūru, kur ķirši aug pie mājas un bērni ēd ābolus, bet vējš pūš stipri.", ("cp1257",)),
    "Russian": ("Все счастливые семьи похожи друг на друга, каждая несчастлива по-своему.",
                ("cp1251", "koi8_r", "cp866", "iso8859_5")),
    "Bulgarian": ("Днес времето е хубаво и децата играят в парка, докато майка им чете книга.", ("cp1251",)),
    "Greek": ("Όλοι οι άνθρωποι από τη φύση τους επιθυμούν τη γνώση. Η αρχή είναι το ήμισυ του παντός.",
              ("cp1253", "iso8859_7")),
    "Hebrew": ("בראשית ברא אלהים את השמים ואת הארץ והארץ היתה תהו ובהו וחשך על פני תהום.", ("cp1255",)),
    "Japanese": ("吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。", ("cp932", "euc_jp")),
    "Chinese": ("道可道，非常道。名可名，非常名。无名天地之始，有名万物之母。", ("gb18030",)),
    "Taiwanese": ("天下皆知美之為美，斯惡已；皆知善之為善，斯不善已。故有無相生，難易相成。", ("big5hkscs",)),
    "Korean": ("모든 국민은 인간으로서의 존엄과 가치를 가지며, 행복을 추구할 권리를 가진다.", ("cp949",)),
}  # fmt: skip
CASES = [(language, name) for language, (_, names) in SENTENCES.items() for name in names]
WIDE = ("Japanese", "Chinese", "Taiwanese", "Korean")


def _text(language: str, times: int = 2) -> str:
    return "\n".join([unicodedata.normalize("NFC", SENTENCES[language][0])] * times) + "\n"


@pytest.mark.parametrize(("language", "encoding"), CASES)
def test_text_comes_back(language, encoding):
    text = _text(language)
    decoded = decode_text(text.encode(encoding))
    assert decoded.text == text, decoded.encoding
    assert not decoded.lost


@pytest.mark.parametrize(("language", "encoding"), [("French", "cp1252"), ("Russian", "cp866"), ("French", "utf-8")])
@pytest.mark.parametrize("size", [1, 100])
def test_the_end_of_a_file_of_dos_is_no_text(language, encoding, size, tmp_path):
    """Nor a reason to take the text for bytes of no encoding."""
    text = _text(language).replace("\n", "\r\n").encode(encoding)
    (tmp_path / "a.txt").write_bytes(text + b"\x1a" * size)
    (record,), rejects = read(tmp_path / "a.txt")
    assert not rejects
    assert (record.text, record.stop) == (text.decode(encoding), len(text))


@pytest.mark.parametrize("encoding", ["mac_roman", "utf-8"])
def test_lines_of_old_macs_are_lines(encoding):
    """One that is damaged loses itself alone."""
    lines = _text("French", 50).strip().encode(encoding).split(b"\n")
    damaged = [*lines[:20], b"\xff\xfe\x00 broken", *lines[20:]]
    assert decode_text(b"\r".join(lines)).text == _text("French", 50).strip().replace("\n", "\r")
    if encoding == "utf-8":
        decoded = decode_text(b"\r".join(damaged))
        assert (decoded.text, decoded.lost) == (_text("French", 50).strip().replace("\n", "\r"), [damaged[20]])


def test_chinese_in_seven_bits():
    text = _text("Chinese")
    assert decode_text(text.encode("hz")) == (text, "hz", [], "")
    for other in ("a~{b}~} c", "~{", "x = ~{1} ~~ ~}"):
        assert decode_text(other.encode()).text == other


@pytest.mark.parametrize("language", WIDE)
@pytest.mark.parametrize("line_end", ["\n", ""])
def test_text_above_the_sample_is_not_cut_inside_a_character(language, line_end):
    """Two bytes a character: of sixteen starts each parity and each place in the sentence is at the sample's end."""
    encoding = SENTENCES[language][1][0]
    for start in range(16):
        text = "x" * start + (SENTENCES[language][0] + line_end) * 2000
        decoded = decode_text(text.encode(encoding))
        assert decoded.text == text, (start, decoded.encoding, len(decoded.lost))


@pytest.mark.parametrize("language", WIDE)
def test_a_damaged_line_loses_itself_alone(language):
    encoding = SENTENCES[language][1][0]
    lines = _text(language, 50).encode(encoding).split(b"\n")
    lines[20] = b"\xff\xff broken \xff"
    decoded = decode_text(b"\n".join(lines))
    assert decoded.lost == [lines[20]]
    assert decoded.text == "\n".join(_text(language, 49).split("\n"))


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("language", [*SENTENCES, "English"])
def test_wide_text_without_a_mark(encoding, language):
    text = "Some lines of text, 1998.\n" * 4 if language == "English" else _text(language, 4)
    assert wide_encoding_of(text.encode(encoding)) == encoding


@pytest.mark.parametrize(
    ("label", "codec"),
    [
        *[("ISO-8859-1", "cp1252"), ("latin1", "cp1252"), ("us-ascii", "cp1252"), ("Windows-1252", "cp1252")],
        *[("iso-8859-9", "cp1254"), ("TIS-620", "cp874"), ("GB2312", "gb18030"), ("gbk", "gb18030")],
        *[("Shift_JIS", "cp932"), ("x-sjis", "cp932"), ("euc-kr", "cp949"), ("Big5", "big5hkscs"), ("EUC-JP", "euc_jp")],
        *[("iso-8859-2", "iso8859_2"), ("KOI8-R", "koi8_r"), ("x-mac-cyrillic", "mac_cyrillic"), ("UTF-8", "utf_8")],
        *[("unicode_escape", ""), ("rot13", ""), ("hex", ""), ("utf-7", ""), ("utf-16", ""), ("idna", ""), ("x", "")],
    ],
)  # fmt: skip
def test_labels_mean_what_browsers_mean(label, codec):
    assert codec_of(label) == codec


@pytest.mark.parametrize(
    "head",
    [
        '<?xml version="1.0" encoding="{}"?>\n',
        "<?xml version='1.0' standalone='yes' encoding='{}' ?>\n",
        '<!DOCTYPE html><html><head>\n<meta charset="{}">',
        '<html><meta http-equiv="Content-Type" content="text/html; charset={}">',
        "# -*- coding: {} -*-\n",
        "#!/usr/bin/env python\n# vim: set fileencoding={} :\n",
        "% !TEX encoding={}\n",
        '@charset "{}";\n',
    ],
)
def test_declarations_go_before_guesses(tmp_path, head):
    """A text too short to find its encoding from: Polish, in the encoding that it names."""
    assert declared_encoding(head.format("iso-8859-2").encode()) == "iso8859_2"
    path = tmp_path / "a.txt"
    path.write_bytes((head.format("iso-8859-2") + "łódź\n").encode("iso-8859-2"))
    records, rejects = read(path)
    assert not rejects
    assert "łódź" in records[0].text


def test_a_declaration_that_does_not_fit_is_not_taken():
    text = _text("Russian")
    assert decode_text(text.encode("koi8-r"), "cp949").text == text
    assert decode_text(text.encode(), "cp1251").text == text, "UTF-8 that says something else is UTF-8"


def test_doubt_is_a_fact(tmp_path):
    """French or Polish, by one letter: the likelier reading is taken and the other one is said."""
    (tmp_path / "a.txt").write_bytes("une forêt\n".encode("latin-1"))
    (tmp_path / "b.txt").write_bytes(_text("French").encode("latin-1"))
    short, long = (read(tmp_path / name)[0][0].facts for name in ("a.txt", "b.txt"))
    assert (short["encoding"], short["encoding_doubt"]) == ("cp1252", "cp1250")
    assert long == {"encoding": "cp1252"}
