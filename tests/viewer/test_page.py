"""The page of traces: whole, self-contained, and nothing in it that somebody else wrote."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any

from tests.support.viewer_traces import HOSTILE, trace
from vllm_dllm.viewer.page import answer_of, live_page, page, policy


def told(name: str = "a question") -> dict[str, Any]:
    return answer_of(name, trace(0, 8, 2, 3), lambda token: HOSTILE.get(token, f"t{token}"))


def test_the_texts_of_all_tokens_are_told() -> None:
    answer = told()
    assert answer["name"] == "a question"
    assert answer["texts"]["5"] == "\ud83d"
    assert answer["trace"] == trace(0, 8, 2, 3)
    tokens = {token for block in answer["trace"]["blocks"] for token in block["tokens"]}
    assert set(answer["texts"]) == {str(token) for token in tokens}


def test_hostile_text_does_not_become_markup() -> None:
    name = "<script>alert(1)</script> \x1b[31m \ud800"
    text = page([told(name)])
    text.encode("ascii")
    assert text.count("<script") == 2, "the data and the page's own"
    assert text.count("</script") == 2
    assert "<img" not in text and "<!--" not in text.replace("<!doctype", "")
    data = re.search(r'id="traces">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])[0]["name"] == name


def test_the_page_asks_nobody() -> None:
    text = page([told()])
    assert "default-src 'none'" in text
    elsewhere = set(re.findall(r"https?://[^\s\"'<)]+", text))
    assert elsewhere == {"http://www.w3.org/2000/svg"}, "the name of SVG, which is not fetched"
    assert "innerHTML" not in text


def test_the_live_page_asks_its_server_alone() -> None:
    text = live_page()
    text.encode("ascii")
    assert "connect-src 'self'" in text and "connect-src 'none'" not in text
    assert "connect-src 'none'" in page([]), "a file asks nobody at all"
    script = text.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy(text), "no other script runs"
    assert "Storage" not in script and "cookie" not in script, "the key is kept in memory"
