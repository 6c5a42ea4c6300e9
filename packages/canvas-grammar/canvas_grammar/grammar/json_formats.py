r"""Give the string formats that automata follow as regular expressions of ECMA-262.

Each is a part of what the standard that names it allows, so that strict readers accept it as well:
host names are ASCII with short labels, for example. Other formats are annotations, as the
specification allows: they restrict nothing.
"""

from __future__ import annotations

YEAR = r"(?:000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d{3})"
# Years divisible by 4, but those divisible by 100 only if divisible by 400.
LEAP_YEAR = (
    r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
)  # fmt: skip
DATE = (
    rf"(?:{YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
    rf"|{LEAP_YEAR}-02-29)"
)
TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"

# A period is in weeks, or in units without a gap between the first and the last.
_CLOCK = r"T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)"
DURATION = (
    rf"P(?:\d+W|{_CLOCK}|(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)(?:{_CLOCK})?)"
)  # fmt: skip

# A label has at most 62 characters and no two hyphens in a row, which IDNA reserves.
_LABEL = "[a-zA-Z0-9]{1,20}(?:-[a-zA-Z0-9]{1,20}){0,2}"
_LAST_LABEL = "[a-zA-Z][a-zA-Z0-9]{0,19}(?:-[a-zA-Z0-9]{1,20}){0,2}"
HOST = rf"(?:{_LABEL}\.){{0,3}}{_LAST_LABEL}"
_NAME = "[a-zA-Z0-9_%+-]{1,20}"
EMAIL = rf"{_NAME}(?:\.{_NAME}){{0,2}}@(?:{_LABEL}\.){{1,2}}[a-zA-Z]{{2,18}}"

BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
IPV4 = rf"{BYTE}(?:\.{BYTE}){{3}}"
_GROUP = "[0-9a-fA-F]{1,4}"


def _ipv6() -> str:
    """Eight groups, or up to six with a ``::`` that stands for the others."""
    options = [rf"{_GROUP}(?::{_GROUP}){{7}}"]
    for count in range(7):
        left = rf"{_GROUP}(?::{_GROUP}){{{count - 1}}}" if count else ""
        right = rf"(?:{_GROUP}(?::{_GROUP}){{0,{5 - count}}})?" if count < 6 else ""
        options.append(f"{left}::{right}")
    return f"(?:{'|'.join(options)})"


# Every host is either an address or a name whose last label begins with a letter.
_NAMED_HOST = (
    r"(?:(?:[a-zA-Z0-9]+(?:-[a-zA-Z0-9]+)*\.)*[a-zA-Z][a-zA-Z0-9]*(?:-[a-zA-Z0-9]+)*)"
)  # fmt: skip
_PORT = r"(?::(?:[1-9]\d{0,3}|[1-5]\d{4}))?"
_PERCENT = "%[0-9A-Fa-f]{2}"
_PATH_CHARACTER = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|{_PERCENT})"
_COLONLESS = rf"(?:[A-Za-z0-9._~!$&'()*+,;=@-]|{_PERCENT})"
_SEGMENTS = rf"(?:/{_PATH_CHARACTER}*)*"
_QUERY = rf"(?:\?(?:{_PATH_CHARACTER}|[/?])*)?(?:#(?:{_PATH_CHARACTER}|[/?])*)?"
URI = (
    rf"[A-Za-z][A-Za-z0-9+.-]*:(?://(?:{_NAMED_HOST}|{IPV4}){_PORT}{_SEGMENTS}"
    rf"|/?{_PATH_CHARACTER}+{_SEGMENTS}){_QUERY}"
)
_RELATIVE = rf"(?:(?:/?{_COLONLESS}+{_SEGMENTS}|/)?{_QUERY})"

_VARIABLE = rf"(?:[A-Za-z0-9_]|{_PERCENT})+(?:\.(?:[A-Za-z0-9_]|{_PERCENT})+)*"
_VARIABLES = rf"{_VARIABLE}(?:\*|:[1-9]\d{{0,3}})?"
URI_TEMPLATE = (
    rf"(?:[A-Za-z0-9._~:/?#@!$&()*+,;=\[\]-]|{_PERCENT}"
    rf"|\{{[+#./;?&]?{_VARIABLES}(?:,{_VARIABLES})*\}})*"
)

POINTER = "(?:/(?:[^~/]|~[01])*)*"
HEX = "[0-9a-fA-F]"
COLOR = (
    rf"#{HEX}{{3}}(?:{HEX}{{3}})?|aqua|black|blue|fuchsia|gray|green|lime|maroon|navy|olive|orange"
    "|purple|red|silver|teal|white|yellow"
)


def _regex() -> str:
    """Expressions that all dialects read alike, with groups of one level."""
    escape = r"\\[dDwWsStnr.*+?()\[\]{}|^$\\/]"
    member = r"(?:[a-zA-Z0-9_ .,:;@/]|a-z|A-Z|0-9|\\[dws.\-\]\[\\/])"
    atom = rf"(?:[a-zA-Z0-9_ .,:;@/\"'<>=!#%&~-]|{escape}|\[\^?{member}+\])"
    count = r"(?:[*+?]|\{[1-9]\d?(?:,)?\})?"
    atoms = rf"(?:{atom}{count})*"
    group = rf"\((?:\?:)?{atoms}(?:\|{atoms})*\){count}"
    terms = rf"(?:{atom}{count}|{group})*"
    return rf"\^?{terms}(?:\|{terms})*\$?"


AUTOMATA = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "duration": DURATION,
    "email": EMAIL,
    "idn-email": EMAIL,
    "hostname": HOST,
    "idn-hostname": HOST,
    "host-name": HOST,
    "ipv4": IPV4,
    "ip-address": IPV4,
    "ipv6": _ipv6(),
    "uri": URI,
    "uri-reference": f"(?:{URI}|{_RELATIVE})",
    "iri": URI,
    "iri-reference": f"(?:{URI}|{_RELATIVE})",
    "uri-template": URI_TEMPLATE,
    "uuid": f"{HEX}{{8}}-{HEX}{{4}}-{HEX}{{4}}-{HEX}{{4}}-{HEX}{{12}}",
    "json-pointer": POINTER,
    "relative-json-pointer": rf"(?:0|[1-9]{{1,8}}0?)(?:#|{POINTER})",
    "regex": _regex(),
    "color": COLOR,
}
