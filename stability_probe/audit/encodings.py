"""Text that is not text: mojibake (D8), encoded bytes (D16), markup (D15). Pure functions of a decoded string."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

_CP1252 = bytes(range(0x80, 0xA0)).decode("cp1252", "ignore")
_TO_BYTES = {
    # What each wrong reading made of a byte, back to the byte. Latin-1 and cp1252 share one table: where cp1252
    # has no character, readers leave the C1 control in place.
    "cp1252": {ord(char): char.encode("cp1252")[0] for char in _CP1252},
    "cp1251": {ord(char): char.encode("cp1251")[0] for char in bytes(range(0x80, 0x100)).decode("cp1251", "ignore")},
}
_UTF8 = re.compile(rb"[\xC2-\xDF][\x80-\xBF]|[\xE0-\xEF][\x80-\xBF]{2}|[\xF0-\xF4][\x80-\xBF]{3}")
_C1 = re.compile("[\x80-\x84\x86-\x9f]")  # U+0085 is a line end in some old files
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_LATIN_WORD = re.compile("[A-Za-zÀ-ÖØ-öø-ÿ]+")
_HIGH_WORD = re.compile("[À-ÖØ-öø-ÿ]{4,}")
_BLOB = re.compile(r"[A-Za-z0-9+/_=-]{32,}")
_HEX = re.compile(r"(?<![0-9A-Za-z])(?:[0-9a-f]{4,}|[0-9A-F]{4,})(?![0-9A-Za-z])")
_BINARY = re.compile("0b[01]+")
_BASE32 = re.compile("(?:[A-Z2-7]+|[a-z2-7]+)=*")
# Bytes written out one by one: quoted-printable, percent signs, C strings.
_ESCAPED = re.compile(r"(?:[=%][0-9A-F]{2}|[=%][0-9a-f]{2}|\\x[0-9a-fA-F]{2}){4,}")
_SPACE = re.compile(r"\s+")
_TAG = re.compile(r"</?[A-Za-z][^<>]{0,300}>")

C1_SHARE = 0.01
BAD_PER_1000 = 20.0
MOST_OF_FOREIGN = 0.5  # of the non-ASCII characters: a quotation of mojibake in a good text is not mojibake
REPLACED_SHARE = 0.02
# Of rows of 512 tokens or more: code with an icon has 0.05–0.18, hex dumps with a text column 0.42–0.55, base64 1.
ENCODED_SHARE = 0.33
ENCODED_SHARE_SHORT = 0.45  # test vectors in ordinary code fill 0.41 of some rows of 256 tokens
BLOB_CHANGES = 0.35  # changes between lower, upper and digit per character: base64 0.65, camelCase 0.2–0.3
BASE32_DIGITS = (0.1, 0.4)  # six of its 32 symbols are digits; names in one case hold fewer, numbers nothing else
MARKUP_SHARE = 0.3


@dataclass(frozen=True)
class Mojibake:
    what: str
    share: float


def mojibake(text: str) -> Mojibake | None:
    """UTF-8 read as an 8-bit encoding, Cyrillic read as Latin-1, C1 controls, or bytes that are no UTF-8 (D8)."""
    n = max(1, len(text))
    foreign = len(_NOT_ASCII.findall(text))
    if foreign < BAD_PER_1000 / 1000 * n / 2:
        return None
    c1 = len(_C1.findall(text)) / n
    if c1 >= C1_SHARE:
        return Mojibake("C1 control characters", c1)
    for name, table in _TO_BYTES.items():
        raw = text.translate(table).encode("latin-1", "replace")
        inside = sum(len(found) for found in _UTF8.findall(raw))
        if 1000 * inside >= BAD_PER_1000 * n and inside >= MOST_OF_FOREIGN * foreign:
            return Mojibake(f"UTF-8 read as {name}", inside / n)
    letters = sum(map(len, _LATIN_WORD.findall(text)))
    high = sum(map(len, _HIGH_WORD.findall(text)))
    if 1000 * high >= BAD_PER_1000 * n and high >= 0.2 * letters and high >= MOST_OF_FOREIGN * foreign:
        return Mojibake("an 8-bit alphabet read as Latin-1", high / n)
    replaced = text.strip("�").count("�") / n  # at the ends: a row cut inside a character
    return Mojibake("bytes that are not UTF-8", replaced) if replaced >= REPLACED_SHARE else None


def encoded_share(text: str) -> tuple[str, float]:
    """Share of the characters (white space aside) in encoded bytes of one kind, and which kind is most (D16)."""
    bare = len(_SPACE.sub("", text))
    if not bare:
        return "", 0.0
    blob = sum(len(word) for word in _BLOB.findall(text) if _is_blob(word))
    hexes = sum(len(word) for word in _HEX.findall(text) if _is_hex(word))
    escaped = sum(map(len, _ESCAPED.findall(text)))
    share, kind = max((hexes, "hexadecimal words"), (blob, "base64-like words"), (escaped, "escaped bytes"))
    return kind, share / bare


def long_encoded_share(text: str) -> float:
    """As `encoded_share`, in words of 32 characters and more (escaped bytes: runs of four): no table has these."""
    bare = len(_SPACE.sub("", text))
    words = sum(len(word) for word in _BLOB.findall(text) if _is_blob(word) or _is_long_hex(word))
    return max(words, sum(map(len, _ESCAPED.findall(text)))) / bare if bare else 0.0


def _is_long_hex(word: str) -> bool:
    return bool(_HEX.fullmatch(word)) and _is_hex(word)


def _is_hex(word: str) -> bool:
    """Digits and letters, and no binary number behind its prefix."""
    return not word.isdigit() and not word.isalpha() and not _BINARY.fullmatch(word)


def _is_blob(word: str) -> bool:
    low, high = BASE32_DIGITS
    if _BASE32.fullmatch(word) and low * len(word) <= sum(map(str.isdigit, word)) <= high * len(word):
        return True
    kinds = [2 if char.isdigit() else int(char.isupper()) for char in word if char.isalnum()]
    changes = sum(a != b for a, b in itertools.pairwise(kinds))
    return len(set(kinds)) == 3 and changes >= BLOB_CHANGES * len(word)


def markup_share(text: str) -> float:
    """Share of the characters inside HTML or XML tags (D15)."""
    return sum(map(len, _TAG.findall(text))) / max(1, len(text))
