"""`python -m batchsvc.deploy.probe URL [SECONDS]`: exit 0 once the URL answers 200; for units and health checks.

An image of ours has no curl, and a start that returns when a process answers needs patience that curl spells
differently in each version. Without SECONDS it asks once. Proxies of the environment are never asked.
"""

from __future__ import annotations

import sys
import time
import urllib.error
import urllib.request

TIMEOUT_S = 8  # clearly longer than /readyz waits for the parts that it names
_PAUSE_S = 0.5


def answers(url: str) -> bool:
    """Whether the URL answers 200 now."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):  # URLError and HTTPError are OSErrors; ValueError: no URL
        return False


def main(arguments: list[str]) -> int:
    """Ask until it answers or the time is over."""
    if not 1 <= len(arguments) <= 2:
        sys.stderr.write("Usage: python -m batchsvc.deploy.probe URL [SECONDS]\n")
        return 2
    deadline = time.monotonic() + float(arguments[1] if len(arguments) == 2 else 0)
    while not answers(arguments[0]):
        if time.monotonic() >= deadline:
            sys.stderr.write(f"{arguments[0]} doesn't answer 200.\n")
            return 1
        time.sleep(_PAUSE_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
