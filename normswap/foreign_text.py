"""Texts of others, made fit to be shown.

The name of a file or a layer, a key of a record and the message of an error may hold anything: an
escape sequence that a terminal obeys, a mark that turns the order of the letters around, a line
break that begins another line.
"""

import unicodedata

# What shows as a blank and moves nothing, such as a no-break space.
_BLANK = "Zs"


def printable(text: str, *, lines: bool = False) -> str:
    r"""Return the text with each character that is no visible one as its escape: `\x1b`, `\u202e`.

    Args:
        text: Any text.
        lines: Whether line breaks and tabs stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(_shown(character, lines) for character in text)


def _shown(character: str, lines: bool) -> str:
    if character.isprintable() or (lines and character in "\n\t"):
        return character
    if unicodedata.category(character) == _BLANK:
        return character
    return character.encode("unicode_escape").decode("ascii")
