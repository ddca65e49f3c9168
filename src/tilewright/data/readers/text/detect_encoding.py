"""Which legacy encoding bytes are in: what the text itself declares, else the likeliest that browsers know.

Labels mean what the WHATWG Encoding Standard (encoding.spec.whatwg.org, section 4.2) says: `iso-8859-1` is
windows-1252, `gb2312` is gb18030. Without a declaration charset-normalizer ranks the encodings. Encodings of one script
share most of their bytes or letters, so that its ranking among those of Latin or Cyrillic is near to a draw: of these
the one is taken whose letters belong to the alphabet of one language, the first one where several do.
"""

import codecs
import re
from importlib.util import find_spec
from itertools import pairwise

SAMPLE_BYTES = 1 << 16
"""Bytes from which an encoding is found."""
CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f\ufffd\ue000-\uf8ff]")
_WIDE_SCRIPTS = ("cp932", "euc_jp", "gb18030", "big5hkscs", "cp949", "johab")
_SCRIPTS = (
    (
        "cp1252",
        "cp1250",
        "iso8859_2",
        "cp1254",
        "cp1257",
        "iso8859_13",
        "cp1258",
        "mac_roman",
        "cp850",
        "cp437",
        "cp852",
    ),
    ("cp1251", "koi8_r", "koi8_u", "cp866", "iso8859_5", "mac_cyrillic", "cp855"),
)
"""Encodings of the Latin and of the Cyrillic script, in the order in which they are taken where nothing tells them
apart."""
_CANDIDATES = (
    *(name for script in _SCRIPTS for name in script),
    *("cp1253", "iso8859_7", "cp1255", "iso8859_8", "cp1256", "iso8859_6", "cp874"),
    *_WIDE_SCRIPTS,
    *("big5", "euc_kr"),
)
_SAME = {"big5": "big5hkscs", "euc_kr": "cp949"}
"""Encodings of which another one is a superset."""
_LABELS = {
    **dict.fromkeys(("latin1", "l1", "iso-8859-1", "iso8859-1", "iso_8859-1", "ascii", "us-ascii"), "cp1252"),
    **dict.fromkeys(("iso-8859-9", "iso8859-9", "iso_8859-9", "latin5", "l5"), "cp1254"),
    **dict.fromkeys(("iso-8859-11", "iso8859-11", "tis-620", "windows-874", "dos-874"), "cp874"),
    **dict.fromkeys(("gb2312", "gb_2312-80", "gbk", "x-gbk", "chinese", "gb_2312", "cn-gb"), "gb18030"),
    **dict.fromkeys(("shift_jis", "shift-jis", "sjis", "x-sjis", "ms_kanji", "windows-31j", "ms932"), "cp932"),
    **dict.fromkeys(("euc-kr", "korean", "ks_c_5601-1987", "ksc5601", "windows-949", "ks_c_5601"), "cp949"),
    **dict.fromkeys(("big5", "big5-hkscs", "x-x-big5", "cn-big5"), "big5hkscs"),
    **dict.fromkeys(("x-euc-jp", "euc-jp"), "euc_jp"),
    **{"iso-8859-8-i": "iso8859_8", "logical": "iso8859_8", "macintosh": "mac_roman", "x-mac-roman": "mac_roman"},
    **{"x-mac-cyrillic": "mac_cyrillic", "x-mac-ukrainian": "mac_cyrillic", "iso-2022-jp": "iso2022_jp_2"},
    **{f"x-cp{number}": f"cp{number}" for number in range(1250, 1259)},
}
"""Labels of the WHATWG standard for which Python has another encoding, or none."""
_TEXT = frozenset(
    (*_CANDIDATES, *_SAME, "utf_8", "iso2022_jp", "iso2022_jp_2", "iso2022_kr", "hz", "koi8_t", "kz1048", "cp1125")
) | {
    *(f"iso8859_{number}" for number in (3, 4, 10, 14, 15, 16)),
    *("cp737", "cp775", "cp857", "cp858", "cp860", "cp861", "cp862", "cp863", "cp864", "cp865", "cp869", "cp720"),
    *("mac_greek", "mac_latin2", "mac_turkish", "mac_iceland", "euc_jis_2004", "shift_jis_2004", "gb18030"),
}
"""What a declaration may name: codecs of text that write ASCII as ASCII."""
_DECLARED = (
    re.compile(rb"""\A\s*<\?xml[^>]{0,200}?\sencoding\s*=\s*["']([A-Za-z0-9_:.-]{2,40})["']"""),
    re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([A-Za-z0-9_:.-]{2,40})""", re.IGNORECASE),
    re.compile(
        rb"""\A(?:[^\n]*\n)?[ \t\f]*(?:#|//|%|;|--|/?\*|\.\.|<!--)[^\n]*?coding[:=][ \t]*([A-Za-z0-9_.-]{2,40})"""
    ),
    re.compile(rb"""\A@charset "([A-Za-z0-9_.-]{2,40})";"""),
)
_ALPHABETS = (
    *("àâæçèéêëîïôœùûüÿ", "áéíñóúü", "ªáâãàçéêíóôõúüº", "äöüß", "àèéìíòóùú", "åäöæøéü", "áðéíóúýþæö", "àçèéíïòóúü·"),
    *("éëïóöüèêáĳ", "äöõüšž", "âêîôûŵŷäëïöü", "ëç"),
    *("áčďéěíňóřšťúůýž", "áäčďéíĺľňóôŕšťúýž", "ąćęłńóśźż", "áéíóöőúüű", "čćđšž", "ăâîșțşţ", "çğıöşüâîû"),
    *("ąčęėįšųūž", "āčēģīķļņšūž"),
    *("абвгдежзийклмнопрстуфхцчшщъыьэюяё", "абвгґдеєжзиіїйклмнопрстуфхцчшщьюя", "абвгдђежзијклљмнњопрстћуфхцчџш"),
    *("абвгдеёжзійклмнопрстуўфхцчшыьэюя", "абвгдѓежзѕијклљмнњопрстќуфхцчџш"),
    "ăâđêôơưàảãáạằẳẵắặầẩẫấậèẻẽéẹềểễếệìỉĩíịòỏõóọồổỗốộờởỡớợùủũúụừửữứựỳỷỹýỵ\u0300\u0301\u0303\u0309\u0323",
)
"""Letters beyond a to z: French, Spanish, Portuguese, German, Italian, Nordic, Icelandic, Catalan, Dutch, Estonian and
Finnish, Welsh, Albanian; Czech, Slovak, Polish, Hungarian, Croatian and Slovene, Romanian, Turkish; Lithuanian,
Latvian; Russian and Bulgarian, Ukrainian, Serbian, Belarusian, Macedonian; Vietnamese."""
_SIGNS = "\xa0«»‹›“”„‘’‚–—…•·°§©®™€£¥¢¿¡º²³½¼×±†´¨№"
_BETWEEN_WORDS = re.compile(
    rf"(?<![^\W\d_])[{_SIGNS}]|(?:(?![„‚¿¡])[{_SIGNS}])(?![^\W\d_])|(?<=l)·(?=l)|(?<=[^\W\d_])’(?=[^\W\d_])"
)
_WORD = re.compile(r"[^\W\d_]*[^\W\d_\x00-\x7f][^\W\d_]*")
_COMPARED_BYTES = 1 << 14
"""Of lines that are not ASCII, by which encodings of one script are compared."""
_CAPITALS = 0.9
"""Weight of letters in words of capitals: in the wrong one of two encodings of Cyrillic most words are."""
_NEAR = 0.02
"""Share of letters by which an alphabet must be better to outweigh the order of encodings."""
_CERTAIN = 0.95
"""Share of letters from which the encoding is taken although charset-normalizer finds none."""


def codec_of(label: str) -> str:
    """The codec that a declared encoding label means; "" for a label of anything but a text encoding.

    Example:
        >>> [codec_of(label) for label in ("ISO-8859-1", "Shift_JIS", "koi8-r", "unicode_escape", "utf8")]
        ['cp1252', 'cp932', 'koi8_r', '', 'utf_8']
    """
    label = label.strip().lower()
    try:
        name = _LABELS.get(label) or codecs.lookup(label).name.replace("-", "_")
    except LookupError:
        return ""
    name = {"iso8859_1": "cp1252", "ascii": "cp1252"}.get(name, name)
    return name if name in _TEXT else ""


def declared_encoding(head: bytes) -> str:
    """The codec of the encoding that the beginning of a text declares: in an XML declaration, HTML `meta`, `coding:` in
    a comment of the first two lines (PEP 263), or CSS `@charset`; "" where none does.

    Example:
        >>> declared_encoding(b'<?xml version="1.0" encoding="iso-8859-2"?>'), declared_encoding(b"# coding: koi8-r\\n")
        ('iso8859_2', 'koi8_r')
    """
    found = (pattern.search(head[:4096]) for pattern in _DECLARED)
    return next((codec for match in found if match and (codec := codec_of(match[1].decode()))), "")


def find_encoding(data: bytes) -> tuple[str, str]:
    """Detect the likeliest legacy encoding of `data`, and the next one where hardly anything tells the two apart.

    Returns:
        Names of codecs, each "" where there is none or charset-normalizer is not installed.

    Example:
        >>> find_encoding("Все счастливые семьи похожи друг на друга, каждая несчастлива.".encode("koi8-r"))
        ('koi8_r', '')
        >>> find_encoding("Le café dépend à présent de l'été.".encode("latin-1"))[0]
        'cp1252'
    """
    if find_spec("charset_normalizer") is None:
        return "", ""
    sample = _whole_lines(data)
    name = _likeliest(sample)
    if not name:
        name = _of_most_lines(sample)
    script = next((script for script in _SCRIPTS if name in script), () if name else _SCRIPTS[0])
    if not script:
        return _SAME.get(name, name), ""
    best, other, share = _of_script(sample, script)
    return (best, other) if name or share >= _CERTAIN else ("", "")


def _whole_lines(data: bytes) -> bytes:
    """The first whole lines of `data` for detection, so that no character is cut in two."""
    sample = data[:SAMPLE_BYTES]
    if len(data) == len(sample):
        return data
    end = sample.rfind(b"\n") + 1
    if end:
        return sample[:end]
    cuts = (sample[: len(sample) - cut] for cut in range(4))
    return next((part for part in cuts if any(try_decode(part, name) is not None for name in _WIDE_SCRIPTS)), sample)


def _likeliest(sample: bytes) -> str:
    """The likeliest encoding by detection, that charset-normalizer finds; of a draw with one of Chinese, Japanese or
    Korean, in which it knows the language, that one."""
    from charset_normalizer import from_bytes

    matches = from_bytes(sample, cp_isolation=list(_CANDIDATES))
    best = matches.best()
    if best is None:
        return ""
    if not best.coherence:
        near = [m for m in matches if m.encoding in (*_WIDE_SCRIPTS, *_SAME) and m.chaos <= best.chaos + 0.05]
        best = max(near, key=lambda m: m.coherence, default=best) if any(m.coherence for m in near) else best
    return "" if len(CONTROL.findall(str(best))) > 0.005 * len(str(best)) else best.encoding


def _of_most_lines(sample: bytes) -> str:
    """Detect the encoding of Chinese, Japanese or Korean that nearly all lines are in; the others are damaged."""
    lines = [line for line in sample.split(b"\n") if not line.isascii()]
    for name in _WIDE_SCRIPTS:
        good = [line for line in lines if try_decode(line, name) is not None]
        if len(good) >= 0.9 * len(lines) > 0 and _likeliest(b"\n".join(good)) in (name, _inverse(name)):
            return name
    return ""


def _inverse(name: str) -> str:
    return next((narrow for narrow, wide in _SAME.items() if wide == name), name)


def _of_script(sample: bytes, script: tuple[str, ...]) -> tuple[str, str, float]:
    """Detect the encoding of a script by its letters: the best one for one language, a near second one that reads other
    text, and the share of such letters."""
    lines = b"\n".join(line for line in sample.split(b"\n") if not line.isascii())[:_COMPARED_BYTES]
    texts = {name: text for name in script if (text := try_decode(lines, name)) is not None}
    shares = {name: alphabet_share(text) for name, text in texts.items()}
    if not shares:
        return "", "", 0.0
    most = max(shares.values())
    near = [name for name in script if name in shares and shares[name] >= most - _NEAR]
    best = near[0]
    other = next((name for name in near[1:] if texts[name] != texts[best]), "")
    return best, other, shares[best]


def alphabet_share(text: str) -> float:
    """The share of the characters beyond ASCII that are letters of one alphabet, in a case that a word may have, or
    signs where signs may be: evidence for an encoding.

    Example:
        >>> alphabet_share("dépend à"), alphabet_share("dķpend Ó"), alphabet_share("MškillŠ")
        (1.0, 0.5, 0.5)
    """
    others = sum(ord(c) > 127 for c in text)
    words = _WORD.findall(text)
    capitals = "".join(word.lower() for word in words if len(word) > 1 and word.isupper())
    small = "".join(_in_case(word) for word in words if len(word) == 1 or not word.isupper())
    counts = [
        sum(small.count(letter) + _CAPITALS * capitals.count(letter) for letter in alphabet) for alphabet in _ALPHABETS
    ]
    return (max(counts) + len(_BETWEEN_WORDS.findall(text))) / max(1, others)


def _in_case(word: str) -> str:
    """The letters of a word in lower case to detect an encoding by, without capitals that follow a small letter."""
    if word[1:].islower() or len(word) == 1:
        return word.lower()
    kept = (c.lower() for before, c in pairwise(word) if not (c.isupper() and before.islower()))
    return word[0].lower() + "".join(kept)


def try_decode(data: bytes, name: str) -> str | None:
    """Decode `data` in a detected encoding; None if it does not decode, or to control and private characters."""
    try:
        text = data.decode(name)
    except (UnicodeError, LookupError):
        return None
    return None if CONTROL.search(text) else text
