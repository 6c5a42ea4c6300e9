r"""Character classes of ECMA-262: what ``\d``, ``.`` and ``\p{L}`` stand for.

`possible` holds also what Python's `re` matches, because many validators search with it. Unicode's
categories are those of the table of this Python (`unicodedata.unidata_version`). Characters that
this table does not know yet may get any category in another version: they possibly belong to each.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from itertools import groupby

from canvas_grammar.grammar.ecma_tree import Characters
from canvas_grammar.grammar.language import (
    ANY,
    LAST,
    Range,
    Ranges,
    complement,
    intersection,
    union,
)
from canvas_grammar.limits import ConstraintError

# Names of general categories beside their two letters, as ECMA-262 lists them.
CATEGORY_NAMES = {
    **{"Letter": "L", "Cased_Letter": "LC", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll"},
    **{"Titlecase_Letter": "Lt", "Modifier_Letter": "Lm", "Other_Letter": "Lo", "Mark": "M"},
    **{"Combining_Mark": "M", "Nonspacing_Mark": "Mn", "Spacing_Mark": "Mc"},
    **{"Enclosing_Mark": "Me", "Number": "N", "Decimal_Number": "Nd", "digit": "Nd"},
    **{"Letter_Number": "Nl", "Other_Number": "No", "Punctuation": "P", "punct": "P"},
    **{"Connector_Punctuation": "Pc", "Dash_Punctuation": "Pd", "Open_Punctuation": "Ps"},
    **{"Close_Punctuation": "Pe", "Initial_Punctuation": "Pi", "Final_Punctuation": "Pf"},
    **{"Other_Punctuation": "Po", "Symbol": "S", "Math_Symbol": "Sm", "Currency_Symbol": "Sc"},
    **{"Modifier_Symbol": "Sk", "Other_Symbol": "So", "Separator": "Z", "Space_Separator": "Zs"},
    **{"Line_Separator": "Zl", "Paragraph_Separator": "Zp", "Other": "C", "Control": "Cc"},
    **{"cntrl": "Cc", "Format": "Cf", "Surrogate": "Cs", "Private_Use": "Co", "Unassigned": "Cn"},
}
ASCII_DIGIT: Ranges = ((0x30, 0x39),)
ASCII_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
LINE_FEED: Ranges = ((0xA, 0xA),)
LINE_ENDS: Ranges = ((0xA, 0xA), (0xD, 0xD), (0x2028, 0x2029))
# White space for both: five controls, category Zs and two line ends. ECMA-262 adds U+FEFF.
BLANK = union([(0x9, 0xD), (0x20, 0x20), (0x2000, 0x200A), (0x2028, 0x2029),
               *((code, code) for code in (0xA0, 0x1680, 0x202F, 0x205F, 0x3000))])  # fmt: skip


def exactly(ranges: Ranges) -> Characters:
    """A set that all readers agree on; `ranges` must be as from `union`."""
    within = intersection(ranges, ANY)
    return Characters(within, within)


def negated(one: Characters) -> Characters:
    """All other characters."""
    return Characters(complement(one.possible), complement(one.sure))


def together(sets: list[Characters]) -> Characters:
    """The characters of all the sets."""
    return Characters(
        union(pair for one in sets for pair in one.sure),
        union(pair for one in sets for pair in one.possible),
    )


@cache
def escaped_class(letter: str) -> Characters:
    r"""The set of ``\d``, ``\w`` or ``\s``, or with a capital letter all others."""
    if letter.isupper():
        return negated(escaped_class(letter.lower()))
    if letter == "s":
        return Characters(BLANK, union([*_python(r"\s"), *BLANK, (0xFEFF, 0xFEFF)]))
    return Characters(ASCII_DIGIT if letter == "d" else ASCII_WORD, _python(f"\\{letter}"))


@cache
def dot() -> Characters:
    """The set of ``.``: in Python, only U+000A is the end of a line."""
    return Characters(complement(LINE_ENDS), complement(LINE_FEED))


@cache
def property_class(name: str) -> Characters:
    r"""The set of ``\p{name}``.

    Raises:
        ConstraintError: it is no general category, or one of a few other properties.
    """
    key, _, value = name.rpartition("=")
    fixed: dict[str, Ranges] = {
        **{"Any": ANY, "ASCII": ((0x1, 0x7F),)},
        **dict.fromkeys(("AHex", "ASCII_Hex_Digit"), ((0x30, 0x39), (0x41, 0x46), (0x61, 0x66))),
    }
    if not key and value in fixed:
        return exactly(fixed[value])
    category = CATEGORY_NAMES.get(value, value)
    if key not in ("", "gc", "General_Category") or category not in CATEGORY_NAMES.values():
        raise ConstraintError(
            rf"\p{{{name}}} is not supported; general categories such as \p{{L}} are"
        )
    known = _categories()
    wanted = ("Lu", "Ll", "Lt") if category == "LC" else (category,)
    members = [pair for label in known if label.startswith(wanted) for pair in known[label]]
    unassigned = union(known["Cn"])
    return Characters(
        intersection(union(members), complement(unassigned)), union([*members, *unassigned])
    )


@cache
def _python(text: str) -> Ranges:
    """The characters that a one-character expression of Python matches."""
    found = re.finditer(f"(?:{text})+", "".join(map(chr, range(LAST + 1))))
    return intersection(union((match.start(), match.end() - 1) for match in found), ANY)


@cache
def _categories() -> dict[str, list[Range]]:
    """From a general category to its ranges."""
    found: dict[str, list[Range]] = {}
    for label, run in groupby(range(LAST + 1), lambda code: unicodedata.category(chr(code))):
        codes = list(run)
        found.setdefault(label, []).append((codes[0], codes[-1]))
    return {label: list(intersection(union(pairs), ANY)) for label, pairs in found.items()}
