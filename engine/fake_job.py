"""One request that the engine without weights runs: what of its answers is out, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.fake_answers import FakeAnswer
from engine.request import Begun, Choice, Completion, FinishReason, NewText, Request, StepOutput, Usage


@dataclass(slots=True)
class Job:
    """`todo` are the tokens that no earlier run generated, as (answer, place in it), all answers growing together; the
    first `num_done` of them are out. With an `error`, a code and a sentence, it ends with its first step."""

    request: Request
    answers: tuple[FakeAnswer, ...] = ()
    todo: list[tuple[int, int]] = field(default_factory=list)
    num_resumed: int = 0
    num_done: int = 0
    steps: int = 0
    error: tuple[str, str] | None = None

    @classmethod
    def begin(cls, request: Request, answers: tuple[FakeAnswer, ...]) -> Job:
        """Goes on where an earlier run was. Raises AssertionError where that said something else."""
        lone = Begun(tuple(request.resume_ids), tuple(request.resume_logprobs))
        sizes = [0] * len(answers)
        for number, theirs in enumerate(request.resume_choices if request.n > 1 else (lone,)):
            mine, size = answers[number], len(theirs.token_ids)
            is_mine = (mine.token_ids[:size], mine.logprobs[:size]) == theirs
            assert is_mine, f"{request.id} resumes another answer"
            sizes[number] = size
        left = [(at, number) for number, mine in enumerate(answers) for at in range(sizes[number], len(mine.token_ids))]
        return cls(request, answers, [(number, at) for at, number in sorted(left)], num_resumed=sum(sizes))

    @property
    def num_left(self) -> int:
        return len(self.todo) - self.num_done

    def take(self, count: int) -> StepOutput:
        """The next tokens."""
        request_id, new = self.request.id, self.todo[self.num_done : self.num_done + count]
        brought = StepOutput(new_tokens={request_id: [self.answers[number].token_ids[at] for number, at in new]})
        if self.request.n > 1:
            brought.choices[request_id] = [number for number, _ in new]
        if self.request.params.logprobs is not None:
            brought.logprobs[request_id] = [self.answers[number].logprobs[at] for number, at in new]
        if not self.num_done and not self.num_resumed:
            brought.hit_tokens[request_id] = 0
        self.num_done += count
        if self.request.streams and self.num_left:  # the rest comes with the completion
            brought.texts[request_id] = [self._text_of(number, at) for number, at in new]
        return brought

    def _text_of(self, number: int, at: int) -> NewText:
        answer = self.answers[number]
        choice, start = answer.choice, answer.ends[at - 1] if at else 0
        return NewText(choice.text[start : answer.ends[at]], number, (choice.logprobs or ())[at : at + 1])

    def completion(self, reason: FinishReason) -> Completion:
        """Its end."""
        is_answer = reason in (FinishReason.STOP, FinishReason.LENGTH)
        first = self.answers[0].choice if is_answer else Choice("", reason)
        num_missing = sum(number == 0 for number, _ in self.todo[self.num_done :])
        token_ids = self.answers[0].token_ids if self.answers else ()
        code, message = self.error if self.error and reason is FinishReason.ERROR else (None, None)
        return Completion(
            request_id=self.request.id,
            token_ids=token_ids[: len(token_ids) - num_missing],
            text=first.text,
            finish_reason=reason,
            usage=Usage(len(self.request.prompt_ids), 0, self.num_resumed + self.num_done, self.steps),
            error_code=code,
            error_message=message,
            logprobs=first.logprobs,
            stopped_by=first.stopped_by,
            choices=tuple(one.choice for one in self.answers) if is_answer and self.request.n > 1 else (),
        )
