"""The one render site: text parts joined, template errors as request errors, nothing escapes the sandbox."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ModelError, RequestError
from engine.text.chat import ChatTemplate

SIMPLE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] + '' }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_a_prompt_ends_ready_for_the_answer() -> None:
    assert ChatTemplate(SIMPLE).render(user("hi")) == "[user]hi>"
    assert ChatTemplate(SIMPLE).render(user("hi"), add_generation_prompt=False) == "[user]hi"


def test_list_content_is_joined_to_text_first() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ChatTemplate(SIMPLE).render(user(parts)) == "[user]a\nb>"


def test_missing_content_is_empty_text() -> None:
    assert (
        ChatTemplate(SIMPLE).render([{"role": "assistant", "content": None}, {"role": "user"}]) == "[assistant][user]>"
    )


def test_special_tokens_are_known_to_the_template() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", bos_token="<s>", eos_token="</s>"
    )
    assert template.render(user("x")) == "<s>x</s>"


def test_json_in_a_template_is_not_escaped_for_html() -> None:
    assert ChatTemplate("{{ messages[0] | tojson }}").render(user("<é>")) == '{"role": "user", "content": "<é>"}'


def test_block_lines_leave_no_blank_lines() -> None:
    assert ChatTemplate("{% if true %}\n  {% if true %}\nx\n  {% endif %}\n{% endif %}\n").render([]) == "x\n"


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ("{{ raise_exception('roles must alternate') }}", "x"),
        ("{{ messages[0].content.missing.deeper }}", "x"),
        ("{{ 1 // 0 }}", "x"),
        ("{{ messages[7].content + 1 }}", "x"),
        (SIMPLE, [{"type": "image_url", "image_url": {"url": "http://x"}}]),
        (SIMPLE, [{"type": "text", "text": 5}]),
        (SIMPLE, ["bare"]),
        (SIMPLE, 5),
        ("{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}", "x" * 10_000),
        ("{{ range(10000000) | length }}", "x"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "x"),
        ("{{ messages.append(1) }}", "x"),
        ("{{ raise_exception.__globals__['json'] }}", "x"),
    ],
)
def test_what_a_template_cannot_render_costs_the_line_alone(source: str, content: Any) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source).render(user(content))
    assert (caught.value.code, caught.value.param) == ("invalid_value", "messages")


def test_the_reason_the_template_gives_is_told() -> None:
    with pytest.raises(RequestError, match=r"refuses these messages: roles must alternate\.$"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render([])


def test_a_template_that_does_not_compile_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate("{% if %}")
