"""Formats: what is offered satisfies standard parsers, and what is wrong is not offered."""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
import uuid
from urllib.parse import urlsplit

import idna
import jsonschema
import pytest
from canvas_grammar.grammar.json_formats import AUTOMATA
from canvas_grammar.grammar.json_strings import StringFacts, string_tree
from canvas_grammar_support.derivations import derives, drawn

CHECKERS = [
    validator.FORMAT_CHECKER
    for validator in (
        jsonschema.Draft3Validator,
        jsonschema.Draft7Validator,
        jsonschema.Draft202012Validator,
    )
]
VALID = {
    "date": ["2024-02-29", "2000-02-29", "0001-01-01", "9999-12-31"],
    "time": ["00:00:00Z", "23:59:59.123456+23:59"],
    "date-time": ["2024-02-29T12:00:00Z", "1999-12-31T23:59:59.5-08:00"],
    "duration": ["P1Y2M3DT4H5M6S", "P4W", "PT36H", "P1D", "PT1H1M", "P0D"],
    "email": ["ada@example.org", "a.b-c+d@mail.example.co"],
    "hostname": ["localhost", "www.example.org", "a-b.c"],
    "ipv4": ["127.0.0.1", "255.255.255.255", "0.0.0.0"],
    "ipv6": ["::", "::1", "2001:db8::ff00:42:8329", "1:2:3:4:5:6:7:8", "fe80::", "1::2:3:4:5:6"],
    "uri": ["https://example.org:8080/a/b?c=d#e", "mailto:ada@example.org", "urn:isbn:0451450523",
            "http://127.0.0.1", "https://example.org/%7Eada/"],
    "uri-reference": ["", "/a/b", "a/b?c", "#top", "../x", "https://example.org"],
    "iri": ["https://example.org/"],
    "iri-reference": ["#a", "https://example.org/"],
    "uri-template": ["https://example.org/{user}/{?page,size:3}", "{+path}x"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
    "json-pointer": ["", "/a/b~0c~1d", "/", "/\"quoted\"/\\"],
    "relative-json-pointer": ["1/a", "2#", "0#"],  # some readers want more than digits
    "regex": ["", "^[a-z]+$", r"\d{3}-(?:a|b)*", "a.c"],
    "color": ["#fff", "#00ff7F", "navy"],
}  # fmt: skip
INVALID = {
    "date": ["2023-02-29", "1900-02-29", "2024-13-01", "2024-1-1", "0000-01-01", "2024-04-31"],
    "time": ["12:00:00", "24:00:00Z", "12:60:00Z", "12:00:60Z", "12:00Z"],
    "date-time": ["2024-02-29 12:00:00Z", "2024-02-30T12:00:00Z", "2024-02-29T12:00:00"],
    "duration": ["P", "PT", "P1Y2D", "P1H", "PT1D", "P1W2D", "PT1H2S", "1Y"],
    "email": ["ada", "ada@", "@b.org", "a..b@c.org", ".a@b.org", "a@-b.org", "a@b..org"],
    "hostname": ["", "-a", "a-", "a..b", "a_b", "a.", "xn--a", "a" * 64, "1.2.3.4"],
    "ipv4": ["1.2.3", "256.1.1.1", "01.2.3.4", "1.2.3.4.5"],
    "ipv6": [":::", "1:2:3:4:5:6:7", "1::2::3", "12345::", "1:2:3:4:5:6:7:8:9", "g::", ":1", "1:"],
    "uri": ["example.org", "//example.org", "http://a b", "http://[", "a:", "http://x/%zz", "1a:b"],
    "uri-reference": ["a b", "%", "\\", "1:b"],
    "iri": ["example.org"],
    "iri-reference": ["a b"],
    "uri-template": ["{", "}", "{}", "{a", "a b", "{a:0}", "{a:12345}", "%1"],
    "uuid": ["123e4567e89b12d3a456426614174000", "123e4567-e89b-12d3-a456-42661417400g"],
    "json-pointer": ["a", "/~", "/~2", "#/a"],
    "relative-json-pointer": ["", "/a", "01", "-1/a", "1a"],
    "regex": ["(", "[a", "*", "a**", "\\", "a{2,1}", "(?<=a)"],
    "color": ["#ff", "fff", "#gggggg", "redd"],
}


def parsed(name: str, text: str) -> bool:
    """Whether a parser of the standard library, or of idna, takes a text for what it should be."""
    if name == "date":
        datetime.date.fromisoformat(text)
    elif name == "time":
        datetime.time.fromisoformat(text.replace("Z", "+00:00"))
    elif name == "date-time":
        datetime.datetime.fromisoformat(text)
    elif name in ("hostname", "idn-hostname", "host-name"):
        idna.encode(text)
        assert len(text) <= 253 and all(0 < len(label) < 64 for label in text.split("."))
    elif name in ("email", "idn-email"):
        local, _, host = text.rpartition("@")
        assert len(local) <= 64 and len(text) <= 254 and parsed("hostname", host)
    elif name in ("ipv4", "ip-address", "ipv6"):
        assert ipaddress.ip_address(text).version == (6 if name == "ipv6" else 4)
    elif name in ("uri", "iri"):
        parts = urlsplit(text)
        assert parts.scheme and (parts.port is None or 0 < parts.port < 65536)
    elif name == "uuid":
        assert str(uuid.UUID(text)) == text.lower()
    elif name == "regex":
        re.compile(text)
    return True


@pytest.mark.parametrize("name", sorted(AUTOMATA))
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_is_offered_is_valid(name: str) -> None:
    texts = set(drawn(string_tree(StringFacts(formats=(name,))), 400))
    assert len(texts) > 15
    for text in map(json.loads, texts):
        for checker in CHECKERS:
            # Draft 3 alone has times without an offset.
            if name != "time" or checker is not jsonschema.Draft3Validator.FORMAT_CHECKER:
                assert checker.conforms(text, name), text
        assert parsed(name, text), text


@pytest.mark.parametrize("name", sorted(VALID))
def test_examples(name: str) -> None:
    language = string_tree(StringFacts(formats=(name,)))
    offered = [text for text in VALID[name] if derives(language, json.dumps(text))]
    assert offered == VALID[name]
    assert [text for text in INVALID[name] if derives(language, json.dumps(text))] == []


def test_other_formats_are_annotations() -> None:
    for name in ("int32", "password", "markdown", "", "utc-millisec", "Date"):
        assert derives(string_tree(StringFacts(formats=(name,))), '"anything"')


def test_formats_with_lengths_and_patterns() -> None:
    short = string_tree(StringFacts(formats=("uri",), most=20, least=12))
    assert derives(short, '"https://a.bc"') and not derives(short, '"https://a.b"')
    assert not derives(short, '"https://example.org/abc"')
    secure = string_tree(StringFacts(formats=("uri",), patterns=("^https:",)))
    assert derives(secure, '"https://a.b"') and not derives(secure, '"http://a.b"')
    assert string_tree(StringFacts(formats=("uuid",), most=35)).empty is False
    assert not derives(
        string_tree(StringFacts(formats=("uuid",), most=35)),
        '"123e4567-e89b-12d3-a456-426614174000"',
    )
