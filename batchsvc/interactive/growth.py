"""How answers grow: how much of each was said before its end, what is left for the end, and both put together. Pure.

So nothing of an answer is sent twice, however long it is. What was said of an answer is its beginning, and stays so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.request import Choice, Completion, NewText, SpelledLogprob


class Growth:
    """How much of each answer was said."""

    def __init__(self) -> None:
        self._said: dict[int, tuple[int, int]] = {}

    def add(self, news: NewText) -> None:
        chars, logprobs = self._said.get(news.choice, (0, 0))
        self._said[news.choice] = (chars + len(news.text), logprobs + len(news.logprobs))

    def has_begun(self, choice: int) -> bool:
        return choice in self._said

    def chars(self, choice: int) -> int:
        return self._said.get(choice, (0, 0))[0]

    def rest(self, choice: int, whole: Choice) -> NewText:
        """What is left to be said of an answer."""
        chars, logprobs = self._said.get(choice, (0, 0))
        return NewText(whole.text[chars:], choice, (whole.logprobs or ())[logprobs:])

    def rest_of(self, completion: Completion) -> Completion:
        """The same with nothing in its answers but what is left of them."""

        def left(number: int, answer: Choice) -> Choice:
            rest = self.rest(number, answer)
            return answer._replace(text=rest.text, logprobs=None if answer.logprobs is None else rest.logprobs)

        return _with_answers(completion, left) if self._said else completion


class Gathered:
    """What was said of each answer."""

    def __init__(self) -> None:
        self._said: dict[int, tuple[list[str], list[SpelledLogprob]]] = {}

    def add(self, news: NewText) -> None:
        texts, logprobs = self._said.setdefault(news.choice, ([], []))
        texts.append(news.text)
        logprobs.extend(news.logprobs)

    def whole_of(self, completion: Completion) -> Completion:
        """The same with its answers whole, of which it has what is left."""

        def whole(number: int, rest: Choice) -> Choice:
            texts, logprobs = self._said.get(number, ([], []))
            found = None if rest.logprobs is None else (*logprobs, *rest.logprobs)
            return rest._replace(text="".join(texts) + rest.text, logprobs=found)

        return _with_answers(completion, whole) if self._said else completion


def _with_answers(completion: Completion, change: Callable[[int, Choice], Choice]) -> Completion:
    answers = tuple(change(number, answer) for number, answer in enumerate(completion.answers))
    first = answers[0]
    choices = answers if len(answers) > 1 else completion.choices
    return replace(completion, text=first.text, logprobs=first.logprobs, choices=choices)
