"""Alert rules and dashboard: what Prometheus and Grafana read, and that the runbook knows each rule and no other."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import typer
import yaml
from typer.testing import CliRunner

from batchsvc import dashboard
from batchsvc.alerts import ALERTS
from batchsvc.cli.app import app
from batchsvc.deploy.plan import SIGNALS_PORT, Plan
from tests.promql import Prometheus, names_in

README = Path(__file__).parents[2] / "README.md"
DURATION = re.compile(r"\d+[smh]")


def printed(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["alerts", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_rules_are_yaml_that_prometheus_reads() -> None:
    (group,) = yaml.safe_load(printed())["groups"]
    assert group["name"] == "batchsvc"
    assert [rule["alert"] for rule in group["rules"]] == [alert.name for alert in ALERTS]
    for rule, alert in zip(group["rules"], ALERTS, strict=True):
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["expr"] == alert.expr and promql_parser.parse(rule["expr"]) is not None
        assert DURATION.fullmatch(str(rule["for"]))
        assert rule["labels"] == {"severity": alert.severity}
        assert rule["annotations"]["summary"] == alert.says and alert.name in rule["annotations"]["runbook"]
        used = set(re.findall(r"\$labels\.(\w+)", alert.says))
        assert used <= set(re.findall(r"\w+", alert.expr)) | {"instance"}, "a label that the expression drops is empty"
        assert ("model" in used) == ("model_digest" in used), (
            "the label `model` of all projects' own models is the same"
        )


def test_the_dashboard_is_what_grafana_imports() -> None:
    shown = json.loads(printed("--dashboard"))
    assert shown["title"] == "batchsvc" and shown["templating"]["list"][0]["type"] == "datasource"
    places = [tuple(panel["gridPos"].values()) for panel in shown["panels"]]
    assert len(set(places)) == len(places) == len(dashboard.PANELS)
    assert len({panel["id"] for panel in shown["panels"]}) == len(places)
    for panel in shown["panels"]:
        for target in panel["targets"]:
            assert names_in(target["expr"]), target
            legend = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            by = re.search(r"by \(([^)]*)\)", target["expr"])
            kept = set(re.split(r", ?", by[1]) if by else [])
            assert legend == kept - {"le"}, "else several lines are one, or look like it"
            assert ("model" in kept) == ("model_digest" in kept), "models of projects are all named `private`"


def test_the_runbook_has_one_entry_for_each_alert() -> None:
    """With what it means, a command to run, and when to wake someone."""
    text = README.read_text(encoding="utf-8").partition("\n## Runbook\n")[2].partition("\n## ")[0]
    entries = re.findall(r"^\| `(Batchsvc\w+)` \| (.+?) \| (.+?) \| (.+?) \|$", text, re.MULTILINE)
    assert [entry[0] for entry in entries] == [alert.name for alert in ALERTS]
    severities = {alert.name: alert.severity for alert in ALERTS}
    for name, means, command, wake in entries:
        assert len(means) > 20 and "`" in command and wake
        assert wake.startswith("at once") == (severities[name] == "critical"), name


def test_the_events_that_the_runbook_looks_for_are_logged() -> None:
    text = README.read_text(encoding="utf-8").partition("\n## Runbook\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+\.[a-z_]+)`", text))
    sources = [path for part in ("batchsvc", "workers") for path in (README.parent / part).rglob("*.py")]
    code = "".join(path.read_text(encoding="utf-8") for path in sources)
    threads = {f"{name}.crashed" for name in re.findall(r'LastingThread\("(\w+)"', code)}
    assert len(named) > 10 and not [event for event in named - threads if f'"{event}"' not in code]


def commands_of_readme() -> Iterator[list[str]]:
    """The words after `batchsvc`, a host's `here` or compose's `run ... api`, and those in the table of commands."""
    text = README.read_text(encoding="utf-8").replace(" \\\n", " ").replace("\\|", "|")
    lines = [line for line in text.splitlines() if line.startswith("    ")] + re.findall(r"`([^`\n]+)`", text)
    for line in lines:
        with suppress(ValueError):  # quotes that don't match: no shell would take it either
            words = shlex.split(line, comments=True)
            for place, word in enumerate(words[:-1]):
                before = words[place - 1] if place else ""
                is_flags_value = re.match("-.", before) and before not in ("--", "--no-deps")
                is_ours = word.rpartition("/")[2] in ("batchsvc", "here") or (word == "api" and "--no-deps" in words)
                if is_ours and not is_flags_value and re.match("[a-z]", words[place + 1]):
                    yield list(itertools.takewhile(lambda one: one not in (">", "|", "&&"), words[place + 1 :]))
    table = text.partition("\n## On the command line\n")[2].partition("\n\nWhich server")[0]
    for row in re.findall(r"^\| (`.+?`) \| ", table, re.MULTILINE):
        yield from (span.removeprefix("batchsvc ").split() for span in re.findall(r"`([^`]+)`", row))


def test_every_command_of_readme_exists_with_its_flags() -> None:
    commands = {tuple(word.strip("[]") for word in words) for words in commands_of_readme()}
    assert len(commands) > 150, "else they aren't found any more"
    root = typer.main.get_command(app)
    for words in commands:
        command: Any = root
        left = list(words)
        while left and hasattr(command, "commands"):
            names = left.pop(0).split("|")
            assert set(names) <= set(command.commands), f"batchsvc {' '.join(words)}"
            command = command.commands[names[0]]
        options = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
        flags = {word.partition("=")[0] for word in left if re.match("--?[a-z]", word)}
        assert flags <= options, f"batchsvc {' '.join(words)}"


def test_every_flag_of_readme_exists() -> None:
    """Those that stand for themselves, as `--flag`: of some command, or of a program of the engine."""

    def flags(command: Any) -> set[str]:
        below = [flags(one) for one in getattr(command, "commands", {}).values()]
        return {name for one in command.params for name in (*one.opts, *one.secondary_opts)}.union(*below)

    text = README.read_text(encoding="utf-8")
    told = set(re.findall(r"`(--[a-z][a-z-]+)[^`\n]*`", text))
    assert len(told) > 50
    programs = "".join(path.read_text(encoding="utf-8") for path in (README.parent / "engine").rglob("*.py"))
    assert told <= flags(typer.main.get_command(app)) | set(re.findall(r'"(--[a-z-]+)"', programs))


def flags_of(command: Any) -> set[str]:
    """--from-env and --url, as far as this command or every one below it takes them."""
    if hasattr(command, "commands"):
        return set.intersection(*map(flags_of, command.commands.values()))
    return {name for one in command.params for name in one.opts} & {"--from-env", "--url"}


def test_the_runbook_tells_what_each_command_takes_on_a_deployment() -> None:
    text = README.read_text(encoding="utf-8").partition("\n| command | there |\n")[2].partition("\n\n")[0]
    rows = [row.strip("| ").split(" | ", 1) for row in text.splitlines()[1:]]
    assert len(rows) == 4
    for named, how in rows:
        for words in re.findall(r"`([a-z -]+)`", named):
            command: Any = typer.main.get_command(app)
            for word in words.split():
                command = command.commands[word]
            assert flags_of(command) == set(re.findall(r"--from-env|--url", how)), words


def test_the_scrape_configuration_of_readme_is_yaml_with_a_key_for_each_job() -> None:
    text = README.read_text(encoding="utf-8").partition("\n    rule_files:")[2].partition("\n\n")[0]
    jobs = yaml.safe_load(textwrap.dedent("    rule_files:" + text))["scrape_configs"]
    ports = {
        job["job_name"]: {target.rpartition(":")[2] for one in job["static_configs"] for target in one["targets"]}
        for job in jobs
    }
    assert all(job["authorization"]["credentials_file"] for job in jobs)
    api, engines = Plan().api_port, {f"911{number}" for number in range(2)}
    assert ports == {"batchsvc-api": {str(api)}, "batchsvc-control": {str(SIGNALS_PORT)}, "batchsvc-engine": engines}


def fires(name: str, prometheus: Prometheus, at_s: float) -> bool:
    (expr,) = (alert.expr for alert in ALERTS if alert.name == name)
    return bool(prometheus.query(expr, at_s))


@pytest.mark.parametrize("num_apis", [1, 3])
def test_error_lines_are_counted_once_by_however_many_processes_they_are_shown(num_apis: int) -> None:
    def shown(ok: int, error: int) -> bool:
        prometheus = Prometheus()
        for at_s, ended in ((100, (0, 0)), (160, (ok, error))):
            for api in range(num_apis):
                labels = 'model="m",model_digest="d"'
                lines = zip(("ok", "error"), ended, strict=True)
                text = "".join(f'batchsvc_lines_total{{{labels},outcome="{kind}"}} {num}\n' for kind, num in lines)
                prometheus.take(f"# TYPE batchsvc_lines counter\n{text}", at_s, instance=f"api-{api}")
        return fires("BatchsvcErrorLines", prometheus, 170)

    assert not shown(10, 10), "too few to tell"
    assert shown(11, 10) and shown(32, 9)
    assert not shown(40, 9), "less than a fifth"


@pytest.mark.parametrize(
    ("live", "serving", "leased", "age_s", "is_news"),
    [
        (1, 1, {0: 0, 4000: 0}, 700, True),
        (1, 1, {0: 0, 4000: 1}, 700, False),
        (1, 1, {0: 0, 4000: 0}, 500, False),
        (0, 1, {0: 0, 4000: 0}, 700, False),  # its worker serves another model: its turn comes
        (0, 1, {0: 0, 2000: 3, 4000: 0}, 3700, False),  # its turn came and will come again
        (0, 1, {0: 0, 2000: 0, 4000: 0}, 3700, True),  # it doesn't come: no worker can load it, or all are drained
        (0, 0, {0: 0, 2000: 0, 4000: 0}, 3700, False),  # that is what BatchsvcNoWorker tells
    ],
)
def test_work_that_nobody_begins(live: int, serving: int, leased: dict[int, int], age_s: int, is_news: bool) -> None:
    prometheus = Prometheus()
    for at_s, num in leased.items():
        shown = {"workers_live": live, "workers_serving": serving, "units_leased": num, "claimable_age_seconds": age_s}
        samples = (f'batchsvc_{name}{{model="m",model_digest="d"}} {value}\n' for name, value in shown.items())
        prometheus.take("".join(samples), at_s, instance="api")
    assert fires("BatchsvcWorkNotStarting", prometheus, 4001) == is_news


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        ("x", {"a": 3.0, "b": 5.0}),
        ("max_over_time(c_total[60s])", {"a": 5.0}),
        ("max(x) > 4", {"": 5.0}),
        ("max(x) > 5", {}),
        ('sum by (i) (x{i=~"a|b", i!="b"})', {"a": 3.0}),
        ("x > 4 and y > 0", {"b": 5.0}),
        ("x > 9 or y > 0", {"b": 1.0}),
        ("x unless y > 0", {"a": 3.0}),
        ("increase(c_total[60s])", {"a": 7.0}),
        ("x * 2 + 1", {"a": 7.0, "b": 11.0}),
        ("2 < x", {"a": 3.0, "b": 5.0}),
        ("time() - max(x) > 100", {"": 115.0}),
        ("absent_metric > 0", {}),
    ],
)
def test_the_evaluator_of_these_tests(expr: str, expected: dict[str, float]) -> None:
    prometheus = Prometheus()
    for at_s, count in ((60, 2), (90, 5), (100, 1), (119, 4)):  # up 3, a restart at 1, up 3 more
        prometheus.take(f'# TYPE c counter\nc_total{{i="a"}} {count}\n', at_s)
    prometheus.take('x{i="a"} 3\nx{i="b"} 5\ny{i="b"} 1\n', 119)
    found = prometheus.query(expr, 120)
    assert {dict(labels).get("i", ""): value for labels, value in found.items()} == expected


def test_a_series_that_its_target_shows_no_more_is_gone_at_once() -> None:
    prometheus = Prometheus()
    prometheus.take('x{i="a"} 3\nx{i="b"} 5\n', 10, instance="one")
    prometheus.take('x{i="a"} 4\n', 20, instance="one")
    prometheus.take('x{i="b"} 6\n', 20, instance="other")
    assert sorted(prometheus.query("x", 21).values()) == [4, 6]
    prometheus.take(None, 30, instance="one")
    assert list(prometheus.query("x", 31).values()) == [6]
    assert sorted(prometheus.query("up", 31).values()) == [0, 1]


def test_the_evaluator_refuses_what_it_does_not_know() -> None:
    with pytest.raises(NotImplementedError):
        Prometheus().query("avg_over_time(x[5m])", 0)
