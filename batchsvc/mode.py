"""Test mode: which project is one for tests, told by its id alone, and the queue of what test keys have run.

Each project has a twin for tests, made with its first test key, whose id is made of the project's own. A twin is a
project like any other, so its files, batches, usage and limits are its own; what is different is that its lines run on
the engine of test mode, and that none of it is money: it is posted against an account of its own, and is never billed.
"""

from __future__ import annotations

_LIVE, _TEST = "proj_", "proj_test_"  # no id of a live project has a second underscore

DIGEST = "testmode" * 8
"""What the lines of test mode wait for in place of their model's digest: the engine of test mode serves all models."""

LIKE = r"proj\_test\_%"
"""Matches the ids of twins in SQL, with the escape character \\."""


def is_test(project_id: str | None) -> bool:
    """Whether this is a project for tests."""
    return project_id is not None and project_id.startswith(_TEST)


def twin_of(project_id: str) -> str:
    """The id of the twin for tests; a twin is its own."""
    return project_id if is_test(project_id) else _TEST + project_id.removeprefix(_LIVE)


def served_by(project_id: str | None, model_digest: str) -> str:
    """The digest that lines of this project wait for."""
    return DIGEST if is_test(project_id) else model_digest
