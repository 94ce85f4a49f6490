"""What a student learns from: answers joined to their lines, failed ones skipped and counted, missing ones made."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.distill import answers
from engine.distill.errors import DistillError
from engine.distill.lines import Line, read_lines, split
from engine.distill.options import MOST_SAMPLES
from engine.request import SamplingParams
from engine.text import ChatTemplate, load_text


def line(number: int, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Where is order {number}?"}]
    return {"custom_id": f"c{number}", "method": "POST", "body": {"messages": messages, "max_tokens": 9, **body}}


def result(number: int, text: str = "Late.", **changes: Any) -> dict[str, Any]:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    response = {"status_code": 200, "body": {"choices": [choice]}}
    return {"custom_id": f"c{number}", "response": response, "error": None} | changes


def write(path: Path, *values: Any) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in values), "utf-8")
    return path


def test_answers_are_joined_and_what_failed_is_counted(tmp_path: Path, tiny_model: Path) -> None:
    text = load_text(tiny_model)
    data = write(
        tmp_path / "in.jsonl",
        *(line(number) for number in range(1, 7)),
        "no json",
        line(8, tools=[{"type": "function"}]),
        {**line(9), "response": result(9, "Lost.")["response"]},
        {"custom_id": "c10", "body": {"input": "vector"}},
        line(11, max_tokens=math.inf),
        line(12, messages=[{"role": "user", "content": "\ud800"}]),
    )
    cut = result(2)
    cut["response"]["body"]["choices"][0]["finish_reason"] = "length"
    odd = (result(6, custom_id=["c6"]), {"custom_id": None}, "[1]")
    output = write(tmp_path / "out.jsonl", result(3), result(1, "Soon."), cut, result(99), *odd)
    errors = write(
        tmp_path / "err.jsonl",
        result(4, response=None, error={"code": "batch_expired"}),
        result(5, response={"status_code": 400, "body": {"error": {}}}),
    )
    found = read_lines(data, [output, errors], text, most=100)
    said = {one.number: one.answer for one in found.usable}
    end = text.tokenizer.token_id("<|im_end|>")
    assert said[1] == (*text.tokenizer.encode("Soon."), end) and said[2] == tuple(text.tokenizer.encode("Late."))
    assert said[6] is None and said[9] == (*text.tokenizer.encode("Lost."), end)
    assert sorted(said) == [1, 2, 3, 6, 9]
    assert found.skipped == {
        "failed": 2,
        "no JSON objects": 1,
        "with tools or several answers": 1,
        "without messages or a prompt": 1,
        "with parameters that can't be run": 1,
        "can't be rendered": 1,
        "results that name no line": 3,
    }
    assert found.told().startswith("5 lines to learn from, 1 of them still to be answered by the teacher; 10 lines are")
    first = next(one for one in found.usable if one.number == 1)
    assert list(first.prompt) == text.prompt_ids([{"role": "user", "content": "Where is order 1?"}])
    assert len(read_lines(data, [], text, most=2).usable) == 2


def test_a_prompt_is_the_one_that_was_served(tmp_path: Path, tiny_model: Path) -> None:
    """With the system prompt that stands beside messages, and what else the line gives to the template; or it's no line
    to learn from."""
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}:{{ m.name }};{% endfor %}{{ enable_thinking }}"
    text = replace(load_text(tiny_model), template=ChatTemplate(template))
    user = {"role": "user", "content": "Hi"}
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    data = write(
        tmp_path / "in.jsonl",
        line(1, messages=[user], system=[{"type": "text", "text": "Be brief."}]),
        line(2, messages=[{"role": "developer", "content": "Be brief.", "name": "x"}, user]),
        line(3, messages=[user], **thinking),
        line(4, messages=[user], reasoning_effort="none"),
        line(5, messages=[user], output_config={"effort": "high"}),
        line(6, messages=[user, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]),
        line(7, messages=[user], chat_template_kwargs={"date": "today"}),
    )
    found = read_lines(data, [], text, most=9)
    told = "system:Be brief.:;user:Hi:;"
    assert [text.tokenizer.decode(one.prompt) for one in found.usable] == [
        *(told, told, "user:Hi:;True", "user:Hi:;False", "user:Hi:;True")
    ]
    unknown = "with variables that the teacher's chat template doesn't know"
    assert found.skipped == {"with tools or several answers": 1, unknown: 1}
    plain = replace(text, template=ChatTemplate("{{ messages[0].content }}"))
    found = read_lines(data, [], plain, most=9)
    assert [one.number for one in found.usable] == [1, 2, 4] and found.skipped[unknown] == 3


def test_a_string_that_stopped_an_answer_is_no_end_of_it(tmp_path: Path, tiny_model: Path) -> None:
    text = load_text(tiny_model)
    stopped, plain = result(1), result(2)
    stopped["response"]["body"]["choices"][0]["stop_reason"] = "\n"
    plain["response"]["body"]["choices"][0]["stop_reason"] = None
    data = write(tmp_path / "in.jsonl", line(1, stop="\n"), line(2))
    found = read_lines(data, [write(tmp_path / "out.jsonl", stopped, plain)], text, most=9).usable
    said = tuple(text.tokenizer.encode("Late."))
    assert [one.answer for one in found] == [said, (*said, text.tokenizer.token_id("<|im_end|>"))]


def test_files_that_give_nothing_are_told(tmp_path: Path, tiny_model: Path) -> None:
    text = load_text(tiny_model)
    with pytest.raises(DistillError, match="can't be read"):
        read_lines(tmp_path / "none.jsonl", [], text, most=9)
    with pytest.raises(DistillError, match=r"nothing to learn from: 0 lines .*1 failed"):
        read_lines(
            write(tmp_path / "in", line(1)), [write(tmp_path / "out", result(1, error={"code": "x"}))], text, most=9
        )


def test_the_teacher_answers_what_is_missing_once(tmp_path: Path, tiny_model: Path) -> None:
    text = load_text(tiny_model)
    data = write(tmp_path / "in.jsonl", line(1, temperature=0, ignore_eos=True), line(2), line(3, ignore_eos=True))
    lines = read_lines(data, [write(tmp_path / "out.jsonl", result(2))], text, most=9).usable
    config = EngineConfig(model=str(tiny_model), num_blocks=64, device="cpu")
    found, unanswered = answers.answered(lines, config, tmp_path)
    assert unanswered == 0 and [len(one.answer or ()) for one in found if one.number != 2] == [9, 9]
    (tmp_path / "more").mkdir()
    more = answers.drawn(found, 2)
    assert len({one.key for one in (*found, *more)}) == 9
    said, _ = answers.answered(more, config, tmp_path / "more")
    assert all(1 <= len(one.answer or ()) <= 9 for one in said)
    kept = tmp_path / answers.FILE
    whole = kept.read_text()
    kept.write_text(whole.splitlines()[0] + '\n{"key": 195, "ans')  # killed in the middle of a line
    again, _ = answers.answered(lines, config, tmp_path)
    assert again == found, "the same seeds say the same"
    assert [json.loads(row)["key"] // 65 for row in kept.read_text().splitlines() if row.endswith("}")] == [1, 3]


@given(kept=st.sets(st.integers(1, 70), min_size=1, max_size=6), samples=st.integers(1, MOST_SAMPLES))
def test_a_further_answer_is_that_of_no_other_line(kept: set[int], samples: int) -> None:
    """Whatever is held out of a file."""
    lines = [Line(number, (1,), (2,), SamplingParams(max_tokens=9)) for number in range(1, 71)]
    more = answers.drawn([line for line in lines if line.number in kept], samples)
    keys = {one.key for one in lines} | {one.key for one in more}
    assert len(keys) == len(lines) + len(kept) * samples and all(one.answer is None for one in more)


@given(
    prompts=st.lists(st.integers(1, 9), min_size=2, max_size=60).filter(lambda found: len(set(found)) > 1),
    holdout=st.floats(0.01, 0.99),
    seed=st.integers(0, 9),
)
def test_no_prompt_is_on_both_sides(prompts: list[int], holdout: float, seed: int) -> None:
    lines = [Line(number, (prompt,), (2,), SamplingParams(max_tokens=9)) for number, prompt in enumerate(prompts)]
    kept, apart = split(lines, holdout, seed)
    assert kept and apart and sorted((*kept, *apart), key=lambda line: line.number) == lines
    assert not {line.prompt for line in kept} & {line.prompt for line in apart}
    with pytest.raises(DistillError, match="2 different prompts"):
        split([line._replace(prompt=(1,)) for line in lines], holdout, seed)


def test_about_the_share_that_is_asked_for_is_kept_apart() -> None:
    lines = [Line(number, (number // 2,), (2,), SamplingParams(max_tokens=9)) for number in range(100)]
    assert [len(split(lines, share, 0)[1]) for share in (0.1, 0.001, 0.2)] == [10, 2, 20]
