"""What `--prompt` asks of each endpoint: the same wishes in its own words, and a sentence for those it can't have."""

from __future__ import annotations

from typing import Any

import pytest

from batchsvc.batches.endpoints import PARSERS
from batchsvc.cli.bodies import Bodies
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.input_file import ENDPOINTS
from batchsvc.cli.prompt import Prompting

SCHEMA = {"type": "object", "properties": {"label": {"type": "string"}}, "required": ["label"]}


@pytest.mark.parametrize(
    ("endpoint", "wishes", "body"),
    [
        ("chat", {"system": "s"}, {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "p"}]}),
        ("chat", {}, {"messages": [{"role": "user", "content": "p"}]}),
        ("completions", {"max_tokens": 3}, {"prompt": "p", "max_tokens": 3}),
        ("responses", {"system": "s", "max_tokens": 3}, {"input": "p", "instructions": "s", "max_output_tokens": 3}),
        ("embeddings", {}, {"input": "p"}),
        ("embeddings", {"dimensions": 8}, {"input": "p", "dimensions": 8}),
    ],
)
def test_each_endpoint_is_asked_in_its_own_words(endpoint: str, wishes: dict[str, Any], body: dict[str, Any]) -> None:
    made = Bodies(endpoint, model="m", **wishes).asking("p")
    temperature = {} if endpoint == "embeddings" else {"temperature": 0}
    assert made == {"model": "m", **body, **temperature}
    assert "model" not in Bodies(endpoint, model=None).asking("p")


@pytest.mark.parametrize("endpoint", list(ENDPOINTS))
def test_the_service_takes_every_body(endpoint: str) -> None:
    wishes: dict[str, Any] = {"max_tokens": 5, "temperature": 0.5, "schema": ("label", SCHEMA)}
    if endpoint in ("chat", "responses"):
        wishes["system"] = "s"
    if endpoint == "embeddings":
        wishes = {"dimensions": 8}
    body = Bodies(endpoint, model="m", **wishes).asking("p")
    PARSERS[ENDPOINTS[endpoint]](body)


def refusal(**options: Any) -> str:
    with pytest.raises(CommandError) as refused:
        Prompting(**options)
    assert refused.value.code == Exit.USAGE
    return refused.value.message


@pytest.mark.parametrize(
    ("endpoint", "wish", "why"),
    [
        ("completions", {"system": "s"}, "no system message"),
        ("embeddings", {"system": "s"}, "no system message"),
        ("embeddings", {"max_tokens": 5}, "the answer is a vector"),
        ("embeddings", {"temperature": 0.0}, "the answer is a vector"),
        ("embeddings", {"schema": "s.json"}, "the answer is a vector"),
        ("chat", {"dimensions": 8}, "only embeddings"),
        ("responses", {"dimensions": 8}, "only embeddings"),
    ],
)
def test_wishes_that_make_no_sense_are_named(endpoint: str, wish: dict[str, Any], why: str) -> None:
    says = refusal(prompt="{a}", endpoint=endpoint, **wish)
    (name,) = wish
    assert f"--{name.replace('_', '-')} makes no sense" in says and why in says
    if endpoint == "chat":
        assert refusal(prompt="{a}", **wish) == says, "chats are what is asked for without --endpoint"


def test_an_endpoint_is_a_word_or_its_url() -> None:
    for text in ("embeddings", "/v1/embeddings", "v1/embeddings/"):
        assert Prompting(endpoint=text).url == "/v1/embeddings"
    assert Prompting(endpoint="/v1/chat/completions").url == Prompting(endpoint="chat").url == "/v1/chat/completions"
    assert Prompting().url is None
    assert refusal(endpoint="images") == (
        "--endpoint can't be 'images': it is chat, completions, embeddings or responses."
    )
    assert "needs --prompt" in refusal(endpoint="embeddings", dimensions=3)
    assert "makes no sense with --endpoint embeddings" in refusal(endpoint="embeddings", schema="s.json")
