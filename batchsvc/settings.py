"""Every setting of the service, read from the environment in this one place; a wrong value stops the process.

Settings of our own begin with BATCHSVC_; DATABASE_URL, REDIS_URL and AWS_* keep their usual names. Secrets may come
as `<NAME>_FILE`. README's table of settings is checked against this class.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Literal
from zoneinfo import ZoneInfo

from pydantic import AliasChoices, Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from batchsvc.egress import Egress
from batchsvc.errors import InvalidRequestError
from batchsvc.sealing import Seals
from batchsvc.setting_errors import check_url, sentences
from batchsvc.setting_sources import gathered, unknown, unknown_sentence

SECRETS = (
    *("DATABASE_URL", "REDIS_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    *("BATCHSVC_SECRET_KEY", "BATCHSVC_SPLIT_KEY"),
)
_URLS = {  # how a URL must begin; their clients would raise errors of their own in the middle of the start
    "database_url": ("sqlite:///", "postgresql://", "postgres://", "postgresql+psycopg://"),
    "redis_url": ("redis://", "rediss://", "unix://"),
    "s3_endpoint": ("http://", "https://"),
    "public_s3_url": ("http://", "https://"),
    "public_url": ("http://", "https://"),
    "otlp_endpoint": ("http://", "https://"),
}
_HOURS = re.compile(r"([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d")
_LISTENS = re.compile(r"shm:///.+|(gloo|nccl|nixl)://[^/\s]+:\d{1,5}/?")
_FAULT = re.compile(r"(oom|hang|gpu):\d+|(nan|die):.+")  # as engine/faults.py reads them
_WINDOWS = re.compile(r"[1-9]\d{0,3}[mhd](,[1-9]\d{0,3}[mhd])*")


class SettingsError(InvalidRequestError):
    """A setting can't be used; the message names it."""


class Settings(BaseSettings):
    """Frozen settings; each field's description is its row in README."""

    model_config = SettingsConfigDict(
        frozen=True,
        env_prefix="BATCHSVC_",
        extra="ignore",
        protected_namespaces=(),
        populate_by_name=True,
        allow_inf_nan=False,
    )

    database_url: str = Field(
        validation_alias="DATABASE_URL",
        description="SQLite or PostgreSQL: the truth",
        examples=["postgresql://batchsvc@db.example.com/batchsvc"],
    )
    redis_url: str = Field(
        validation_alias="REDIS_URL",
        description="Redis or Valkey: the queue; may be wiped",
        examples=["redis://queue.example.com:6379/0"],
    )
    s3_endpoint: str | None = Field(
        default=None,
        validation_alias=AliasChoices("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        description="S3 endpoint; unset means AWS",
    )
    s3_access_key: str | None = Field(
        default=None,
        validation_alias="AWS_ACCESS_KEY_ID",
        description="S3 key; unset means boto3's own chain",
    )
    s3_secret_key: str | None = Field(default=None, validation_alias="AWS_SECRET_ACCESS_KEY", description="S3 secret")
    s3_region: str = Field(
        default="us-east-1",
        validation_alias=AliasChoices("AWS_REGION", "AWS_DEFAULT_REGION"),
        description="S3 region",
    )
    bucket: str = Field(default="batchsvc", min_length=3, description="bucket that holds inputs, parts and results")

    public_s3_url: str | None = Field(
        default=None,
        description="S3 endpoint as clients reach it: downloads are redirected there; unset: the API sends them",
    )

    model: str = Field(
        default="smollm2-135m",
        description="model that this engine worker serves: a name, a path, or hf:owner/name",
    )
    models: str = Field(
        default="",
        description="further models, separated by commas, that this engine worker serves in turn with that one",
    )
    worker_name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$",
        description="what `batchsvc workers` and `models load` call this engine worker, whenever it starts; unset: the "
        "name of its host",
    )
    engine: Literal["auto", "fake"] = Field(
        default="auto",
        description="auto: our engine; fake: deterministic answers of the shape that is asked for, no weights",
    )
    fake_witness: str | None = Field(default=None, description="file to which the fake engine logs every line it runs")
    fake_tokens_per_s: float = Field(default=0, ge=0, description="speed of the fake engine; 0 is as fast as it can")
    fake_faults: str = Field(
        default="", description="how the fake engine misbehaves: oom:N, hang:N, gpu:N, nan:WORD, die:WORD, joined by ;"
    )
    weight_format: Literal["auto", "int8", "fp8", "bf16", "float32", "w8a16", "w4a16"] = Field(
        default="auto",
        description="weights in the engine; auto: as a quantized model stores them (w4a16, w8a16, fp8), else int8 "
        "where that costs the model next to nothing, else bf16",
    )
    kv_format: Literal["auto", "int8", "fp8", "bf16", "float32"] = Field(
        default="auto", description="format of the KV cache; auto: int8 where weights are int8 by auto, else bf16"
    )
    force_format: bool = Field(
        default=False,
        description="serve formats whose cost in quality is over its limit; see `batchsvc models eval`",
    )
    kv_bytes: int | None = Field(
        default=None, gt=0, description="memory for the KV cache; unset: a share of what is free"
    )
    draft: str | None = Field(
        default=None,
        description="a smaller model of the same vocabulary, or heads on this one, that propose tokens; name or path",
    )
    spec: Literal["auto", "off", "ngram", "draft", "heads"] = Field(
        default="auto",
        description="what proposes tokens that the model then checks several at a time, with the same answers; auto: "
        "whatever there is, where it makes an engine faster",
    )
    role: Literal["unified", "prefill", "decode"] = Field(
        default="unified",
        description="what this engine worker does: all of a request; prompts alone, for decode workers; or the rest, "
        "with blocks from the prefill workers of its model",
    )
    split_listen: str = Field(
        default="gloo://127.0.0.1:0",
        description="where a prefill worker takes connections, as decode workers reach it: gloo://HOST:PORT, "
        "nccl://HOST:PORT, nixl://HOST:PORT, or shm:///PATH on one host; port 0 is any free one",
    )
    split_key: str | None = Field(
        default=None,
        min_length=32,
        description="what prefill and decode workers share to know each other, 32 characters or more; needed where "
        "BATCHSVC_SPLIT_LISTEN is beyond this host",
    )
    step_tokens: int = Field(default=2048, ge=1, description="most tokens computed in one step")
    max_running: int = Field(default=256, ge=1, description="most sequences in one step")
    ttft_target_ms: float | None = Field(
        default=None,
        gt=0,
        description="time to the first token that batch work leaves interactive requests, in milliseconds; unset: any",
    )
    itl_target_ms: float | None = Field(
        default=None,
        gt=0,
        description="time between two tokens that batch work leaves interactive answers, in milliseconds; unset: any",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="where the engine runs; auto: on a GPU that can run the formats, else on the CPU"
    )
    threads: int | None = Field(default=None, ge=1, description="CPU threads of the engine; unset: all cores")

    interactive_max: int = Field(
        default=128, ge=1, description="most interactive calls at once, of an API process and of an engine worker"
    )
    interactive_timeout_s: float = Field(
        default=600, gt=0, description="longest time until the answer of an interactive call is whole"
    )
    interactive_stall_s: float = Field(
        default=30, gt=0, description="how long the client of an interactive call may read or send nothing"
    )
    interactive_buffer_bytes: int = Field(
        default=262_144, ge=1_024, description="most of an answer that waits for a client which reads too slowly"
    )

    public_url: str | None = Field(
        default=None,
        description="address of the API as clients see it, such as https://batch.example.com; with it, /metrics needs "
        "a key from this machine, too",
    )
    host: str = Field(default="127.0.0.1", description="address that the API listens on")
    port: int = Field(default=8080, ge=0, le=65535, description="port of the API")
    tls_cert: str | None = Field(
        default=None, description="file with the API's certificate and its chain (PEM); unset: plain HTTP, for a proxy"
    )
    tls_key: str | None = Field(default=None, description="file with the key of that certificate (PEM)")
    signals_host: str = Field(
        default="127.0.0.1",
        description="address on which control and engine processes serve /livez, /readyz and /metrics",
    )
    signals_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="port for these; 0: any free one, which the log tells and, of a stack, `batchsvc status`",
    )

    max_lines: int = Field(default=1_000_000, ge=1, description="most requests in one batch")
    max_inputs: int = Field(
        default=10_000_000, ge=1, description="most texts that the lines of one batch of embeddings may have in all"
    )
    max_input_bytes: int = Field(default=8_000_000_000, ge=1, description="most bytes of one uploaded file")
    max_inline_bytes: int = Field(
        default=33_554_432, ge=1_024, description="most bytes of a call that holds the requests of its batch"
    )
    max_expansion: int = Field(
        default=100,
        ge=1,
        description="times its size that a compressed or Parquet file may decode to; 64 MiB are always allowed",
    )
    max_line_bytes: int = Field(default=1_048_576, ge=64, description="most bytes of one input line")
    max_problems: int = Field(default=1_000, ge=1, description="most problems listed in a failed batch")
    default_max_tokens: int = Field(default=1_024, ge=1, description="max_tokens of a line that names none")
    window_lines: int = Field(default=50_000, ge=1, description="most lines planned together")
    window_tokens: int = Field(default=64_000_000, ge=1, description="most tokens planned together")
    unit_lines: int = Field(default=512, ge=1, le=4096, description="most lines in a unit")
    unit_tokens: int = Field(default=2_000_000, ge=1, description="most prompt and output tokens in a unit")
    windows: str = Field(
        default="24h",
        description="completion windows that batches may ask for, such as 24h,1h,7d; each needs prices (tier batch_1h)",
    )
    offpeak: str | None = Field(
        default=None, description="hours in which batches run, such as 22:00-06:00; unset: they run at any time"
    )
    timezone: str = Field(default="UTC", description="IANA time zone of the off-peak hours, such as Europe/Berlin")
    quota_tokens: int | None = Field(
        default=None, ge=1, description="tokens that a project's unfinished batches may hold; unset: no limit"
    )
    requests_per_minute: int | None = Field(
        default=None, ge=1, le=6_000_000, description="calls that a project may make in a minute; unset: no limit"
    )
    max_open_batches: int | None = Field(
        default=None, ge=1, description="unfinished batches that a project may have; unset: no limit"
    )
    max_stored_bytes: int | None = Field(
        default=None, ge=1, description="bytes of files that a project may keep; unset: no limit"
    )
    quote_ttl_s: int = Field(default=86_400, ge=60, description="how long batches can be created at a quote's prices")
    upload_ttl_s: int = Field(
        default=3_600, ge=60, description="how long an upload in parts may take until it is completed"
    )
    file_ttl_s: int = Field(default=2_592_000, ge=3600, description="life of a batch file (30 days)")

    secret_key: str | None = Field(
        default=None,
        description="seals secrets of registered stores: 32 characters or more, or several such keys, the newest "
        "first, separated by commas; the embedded stack makes its own",
    )
    egress_allow: str = Field(
        default="",
        description="private networks and hosts that tenants may have us send to, such as 10.1.0.0/16,hooks.lan",
    )
    webhook_timeout_s: float = Field(default=10, gt=0, le=60, description="longest time that a webhook may take")

    seller_name: str = Field(default="", max_length=255, description="who issues invoices: name of the seller")
    seller_address: str = Field(
        default="", max_length=1000, description="address of the seller; its lines may be separated by ;"
    )
    seller_country: str = Field(
        default="", pattern=r"^([A-Z]{2})?$", description="country of the seller (ISO 3166), such as DE"
    )
    seller_tax_id: str = Field(default="", max_length=64, description="tax id of the seller")
    seller_tax_rate: str = Field(
        default="0", description="tax on invoices in percent, such as 19, where a buyer has no rate of its own"
    )
    seller_prefix: str = Field(
        default="INV",
        pattern=r"^[A-Z0-9]{1,12}$",
        description="what invoice numbers begin with; each prefix is a series of its own without gaps",
    )

    accelerator_cost_per_hour: str = Field(
        default="0",
        pattern=r"^[0-9]{1,9}(\.[0-9]{1,9})?$",
        description="what an hour of an engine worker costs in dollars: `batchsvc explain` shows the margin",
    )
    reconcile_s: float = Field(
        default=300, ge=0, description="how often the reaper adds up a batch that has ended; 0 means never"
    )

    otlp_endpoint: str | None = Field(
        default=None,
        validation_alias="OTEL_EXPORTER_OTLP_ENDPOINT",
        description="where traces are sent by OTLP over HTTP, such as http://127.0.0.1:4318; unset: none are made",
    )

    lease_s: float = Field(default=30, gt=0, description="how long a unit stays with a silent worker")
    renew_s: float = Field(default=5, gt=0, description="how often leases are renewed")
    reaper_s: float = Field(default=5, gt=0, description="how often the reaper looks")
    flush_s: float = Field(default=5, gt=0, description="longest time that finished lines wait for their part")
    flush_bytes: int = Field(default=1_048_576, ge=1, description="most bytes that wait for their part")
    poll_s: float = Field(default=2, gt=0, description="how often a worker with room claims without a ticket")
    waiting_requests: int = Field(
        default=512, ge=1, description="answers that a worker holds requests for beyond the running ones"
    )
    spool_bytes: int = Field(
        default=64 * 1024 * 1024, ge=1024, description="most bytes of a spool bucket while merging"
    )
    hung_s: float = Field(
        default=60, gt=0, description="after this time without progress, an engine that has work counts as crashed"
    )
    term_grace_s: float = Field(
        default=30,
        gt=0,
        validation_alias=AliasChoices("BATCHSVC_TERM_GRACE_S", "BATCHSVC_TERM_GRACE"),
        description="time to drain after SIGTERM",
    )
    garbage_grace_s: float = Field(
        default=86_400, ge=0, description="age at which an orphan object or upload is deleted; more than two leases"
    )
    retention_grace_s: float = Field(
        default=86_400,
        gt=0,
        validation_alias=AliasChoices("BATCHSVC_RETENTION_GRACE_S", "BATCHSVC_RETENTION_GRACE"),
        description="time within which deleted content is gone everywhere; more than four leases",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least severe log event"
    )
    log_bytes: int = Field(
        default=8_388_608, ge=4_096, description="size at which the embedded stack moves the log of a process aside"
    )
    log_files: int = Field(default=3, ge=1, le=100, description="how many of these it keeps beside each log")

    @field_validator(*_URLS)
    @classmethod
    def _begins_right(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None:
            check_url(value, _URLS[str(info.field_name)])
        return value

    @field_validator("fake_faults")
    @classmethod
    def _names_faults(cls, value: str) -> str:
        if not all(_FAULT.fullmatch(item.strip()) for item in filter(None, value.split(";"))):
            raise ValueError("it names oom:N, hang:N, gpu:N, nan:WORD or die:WORD, joined by ;")
        return value

    @field_validator("split_listen")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        if not _LISTENS.fullmatch(value):
            raise ValueError("it must be shm:///PATH, or gloo://HOST:PORT, nccl://HOST:PORT or nixl://HOST:PORT")
        return value

    @field_validator("windows")
    @classmethod
    def _names_windows(cls, value: str) -> str:
        if not _WINDOWS.fullmatch(value):
            raise ValueError("it names windows in minutes, hours or days, such as 24h,1h,7d")
        return value

    @field_validator("tls_key")
    @classmethod
    def _belongs_to_a_certificate(cls, value: str | None, info: ValidationInfo) -> str | None:
        if (value is None) != (info.data.get("tls_cert") is None):
            raise ValueError("it and BATCHSVC_TLS_CERT belong together: set both, or neither")
        return value

    @field_validator("renew_s")
    @classmethod
    def _renews_in_time(cls, value: float, info: ValidationInfo) -> float:
        lease_s = info.data.get("lease_s")
        if lease_s is not None and value >= lease_s:
            raise ValueError(
                f"it must be less than BATCHSVC_LEASE_S ({lease_s:g} s): a lease has to live until it is renewed"
            )
        return value

    @field_validator("garbage_grace_s")
    @classmethod
    def _outlasts_leases(cls, value: float, info: ValidationInfo) -> float:
        lease_s = info.data.get("lease_s", 0)
        if value <= 2 * lease_s:
            raise ValueError(f"it must be more than two leases ({lease_s:g} s each): what is younger may yet count")
        return value

    @field_validator("retention_grace_s")
    @classmethod
    def _outlasts_writers(cls, value: float, info: ValidationInfo) -> float:
        lease_s = info.data.get("lease_s", 0)
        if value <= 4 * lease_s:
            raise ValueError(f"it must be more than four leases ({lease_s:g} s each): only then nobody writes any more")
        return value

    @field_validator("offpeak")
    @classmethod
    def _names_hours(cls, value: str | None) -> str | None:
        if value is not None and (not _HOURS.fullmatch(value) or value[:5] == value[6:]):
            raise ValueError("it names two times of day, such as 22:00-06:00")
        return value

    @field_validator("egress_allow")
    @classmethod
    def _names_places(cls, value: str) -> str:
        Egress.parse(value)  # raises ValueError
        return value

    @field_validator("secret_key")
    @classmethod
    def _names_keys(cls, value: str | None) -> str | None:
        Seals.of(value)  # raises ValueError
        return value

    @field_validator("seller_tax_rate")
    @classmethod
    def _is_a_percentage(cls, value: str) -> str:
        if not re.fullmatch(r"\d{1,2}(\.\d{1,4})?|100", value, re.ASCII):
            raise ValueError("it is a percentage with at most 4 digits after the point")
        return value

    @field_validator("timezone")
    @classmethod
    def _names_a_zone(cls, value: str) -> str:
        try:
            ZoneInfo(value)
        except (KeyError, ValueError, OSError) as error:
            raise ValueError("it must be a name of the IANA time zone database, such as Europe/Berlin") from error
        return value

    @property
    def all_models(self) -> list[str]:
        """What an engine worker serves: the first model, and those that it serves in turn with it."""
        return list(dict.fromkeys(name for name in (self.model, *map(str.strip, self.models.split(","))) if name))

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Settings of this process; an empty variable counts as unset.

        Raises SettingsError with one sentence a wrong setting.
        """
        settings, problems = cls.examined(os.environ if env is None else env)
        if settings is None:
            raise SettingsError(" ".join(problems.values()), param=next(iter(problems)))
        return settings

    @classmethod
    def examined(cls, env: Mapping[str, str]) -> tuple[Settings | None, dict[str, str]]:
        """The settings, or a sentence for each variable that stands in their way."""
        found = gathered(env, SECRETS)
        source = EnvSettingsSource(cls)
        source.env_vars = {name.lower(): value for name, value in found.values.items()}
        named = {field: variable for field, (variable, _) in cls.used_variables(found.values).items()}
        try:
            settings = cls(**source())
        except ValidationError as error:
            wrong = sentences(error, cls.model_fields, named, SECRETS)
            by_variable = {named[field]: says for field, says in wrong.items()}
            return None, {**by_variable, **found.problems}  # a file that can't be read explains why nothing is set
        return (None, found.problems) if found.problems else (settings, {})

    @classmethod
    def strangers(cls, env: Mapping[str, str] | None = None) -> list[str]:
        """A sentence for each variable that begins as ours do and is no setting."""
        found = unknown(os.environ if env is None else env, cls.known_variables())
        return [unknown_sentence(name, near) for name, near in found.items()]

    @classmethod
    def known_variables(cls) -> frozenset[str]:
        """Every variable that is read."""
        names = {name for field in cls.model_fields for name in cls.variables_of(field)}
        return frozenset(names | {f"{name}_FILE" for name in SECRETS})

    @classmethod
    def used_variables(cls, values: Mapping[str, str]) -> dict[str, tuple[str, bool]]:
        """The variable that counts for each field, and whether it is set; where none is, the first that would."""
        used = {}
        for field in cls.model_fields:
            names = cls.variables_of(field)
            found = next((name for name in names if name in values), None)
            used[field] = (found or names[0], found is not None)
        return used

    @classmethod
    def variables_of(cls, field: str) -> tuple[str, ...]:
        """The environment variables of a field; the first that is set counts."""
        alias = cls.model_fields[field].validation_alias
        names = tuple(map(str, getattr(alias, "choices", [alias] if alias else [])))
        return names or (f"BATCHSVC_{field.upper()}",)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `from_env` passes counts: nothing is read behind its back."""
        return (init_settings,)
