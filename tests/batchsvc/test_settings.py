"""Settings come from the mapping they are given, secrets may come from files, wrong values are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchsvc.settings import Settings, SettingsError

BASE = {"DATABASE_URL": "sqlite:///x.db", "REDIS_URL": "redis://127.0.0.1/0"}


def test_only_the_given_mapping_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHSVC_PORT", "9")
    monkeypatch.setenv("DATABASE_URL", "postgresql://elsewhere/db")
    settings = Settings.from_env(BASE)
    assert settings.port == 8080
    assert settings.database_url == "sqlite:///x.db"


def test_without_a_mapping_the_process_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in BASE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("BATCHSVC_LEASE_S", "7.5")
    assert Settings.from_env().lease_s == 7.5


def test_a_secret_may_come_from_a_file(tmp_path: Path) -> None:
    secret = tmp_path / "url"
    secret.write_text("postgresql://u:p@db/x\n")
    env = {"DATABASE_URL_FILE": str(secret), "REDIS_URL": "redis://h"}
    assert Settings.from_env(env).database_url == "postgresql://u:p@db/x"
    with pytest.raises(SettingsError, match="DATABASE_URL_FILE can't be read"):
        Settings.from_env({**env, "DATABASE_URL_FILE": str(tmp_path / "none")})


def test_the_general_s3_endpoint_is_used_where_the_special_one_is_unset() -> None:
    assert Settings.from_env({**BASE, "AWS_ENDPOINT_URL": "http://a"}).s3_endpoint == "http://a"
    both = {**BASE, "AWS_ENDPOINT_URL": "http://a", "AWS_ENDPOINT_URL_S3": "http://b"}
    assert Settings.from_env(both).s3_endpoint == "http://b"


@pytest.mark.parametrize("name", ["BATCHSVC_TERM_GRACE_S", "BATCHSVC_TERM_GRACE"])
def test_the_time_to_drain_has_two_names(name: str) -> None:
    assert Settings.from_env({**BASE, name: "7"}).term_grace_s == 7
    assert Settings.from_env(BASE).term_grace_s == 30
    with pytest.raises(SettingsError, match="BATCHSVC_TERM_GRACE"):
        Settings.from_env({**BASE, name: "-1"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BATCHSVC_PORT", "70000"),
        ("BATCHSVC_LEASE_S", "0"),
        ("BATCHSVC_ENGINE", "magic"),
        ("BATCHSVC_MAX_LINES", "many"),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=name):
        Settings.from_env({**BASE, name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DATABASE_URL", "mysql://me:hunter2@db/x"),
        ("DATABASE_URL", "hunter2"),
        ("REDIS_URL", "db:hunter2"),
        ("AWS_ENDPOINT_URL_S3", "minio:9000/hunter2"),
    ],
)
def test_a_url_of_the_wrong_kind_is_refused_without_showing_it(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=rf"^{name} can't be used: it must begin with [\w+:/ ]+\.$") as refused:
        Settings.from_env({**BASE, name: value})
    assert "hunter2" not in refused.value.message


def test_an_empty_variable_counts_as_unset() -> None:
    settings = Settings.from_env({**BASE, "AWS_ENDPOINT_URL_S3": "", "BATCHSVC_PORT": ""})
    assert (settings.s3_endpoint, settings.port) == (None, 8080)
    with pytest.raises(SettingsError, match=r"^DATABASE_URL is not set: give it, such as postgresql:"):
        Settings.from_env({**BASE, "DATABASE_URL": ""})


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(SettingsError, match=r"^REDIS_URL is not set: give it, such as redis:.* or REDIS_URL_FILE"):
        Settings.from_env({"DATABASE_URL": "sqlite:///x.db"})


WRONG = {  # by the kind of a field: what can't be its value
    "int": "many",
    "float": "soon",
    "bool": "perhaps",
    "Literal": "magic",
}
UNCHECKED = {  # any text is one: a name, a path, an address
    "s3_access_key",
    "s3_secret_key",
    "s3_region",
    "model",
    "fake_witness",
    "tls_cert",
    "draft",
    "models",
    "worker_name",
    "signals_host",
    "host",
}
OWN = {
    "tls_key": "/key.pem",
    "database_url": "mysql://x",
    "redis_url": "amqp://x",
    "s3_endpoint": "minio:9000",
    "public_s3_url": "minio",
    "public_url": "example.com",
    "otlp_endpoint": "collector:4317",
    "bucket": "ab",
    "fake_faults": "oops",
    "split_listen": "tcp://h:1",
    "split_key": "hunter2",
    "windows": "tomorrow",
    "offpeak": "at night",
    "timezone": "Mars/Base",
    "secret_key": "short",
    "egress_allow": "10.0.0.0/99",
    "seller_name": "x" * 300,
    "seller_address": "x" * 1001,
    "seller_country": "Germany",
    "seller_tax_id": "x" * 65,
    "seller_tax_rate": "200",
    "seller_prefix": "inv oice",
    "accelerator_cost_per_hour": "free",
}


def wrong_value(field: str) -> str | None:
    kind = str(Settings.model_fields[field].annotation)
    return OWN.get(field) or next((value for name, value in WRONG.items() if name in kind), None)


@pytest.mark.parametrize("field", sorted(set(Settings.model_fields) - UNCHECKED))
def test_each_setting_refuses_what_it_cannot_be_and_names_itself_and_the_way_out(field: str) -> None:
    value = wrong_value(field)
    assert value is not None, f"say in this test what {field} can't be, or that it can be anything"
    for variable in Settings.variables_of(field):
        with pytest.raises(SettingsError) as refused:
            Settings.from_env({**BASE, variable: value})
        says = refused.value.message
        assert says.startswith(f"{variable} can't be ")
        assert says.endswith(".")
        assert "Input should" not in says  # pydantic's words name no setting's meaning
        assert refused.value.param == variable


@pytest.mark.parametrize("value", ["inf", "nan", "1e999"])
def test_times_are_finite(value: str) -> None:
    with pytest.raises(SettingsError, match="BATCHSVC_POLL_S can't be"):
        Settings.from_env({**BASE, "BATCHSVC_POLL_S": value})


def test_a_lease_lives_until_it_is_renewed() -> None:
    with pytest.raises(
        SettingsError, match=r"BATCHSVC_RENEW_S can't be used: it must be less than BATCHSVC_LEASE_S \(3 s"
    ):
        Settings.from_env({**BASE, "BATCHSVC_LEASE_S": "3"})
    assert Settings.from_env({**BASE, "BATCHSVC_LEASE_S": "3", "BATCHSVC_RENEW_S": "1"}).lease_s == 3


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("DATABASE_URL", "postgresql://u:hunter2@h:port/x", "its host and port can't be read"),
        ("DATABASE_URL", "postgresql://u:hunter2/@h:5432/x", "its host and port can't be read"),
        ("REDIS_URL", "redis://:hunter2#@h/0", "its host and port can't be read"),
        ("REDIS_URL", "redis://", "it names no host"),
        ("AWS_ENDPOINT_URL_S3", "https://h:999999", "its host and port can't be read"),
        ("AWS_ENDPOINT_URL_S3", "https://h ost", "a URL has no spaces"),
    ],
)
def test_a_url_that_its_client_would_choke_on_is_refused_without_showing_it(name: str, value: str, says: str) -> None:
    with pytest.raises(SettingsError, match=f"^{name} can't be used: {says}") as refused:
        Settings.from_env({**BASE, name: value})
    assert "hunter2" not in refused.value.message
