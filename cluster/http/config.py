"""Configuration of one HTTP ingress: the sections `ingress` and `tracing`. Read by `aerie.cluster.http.app`."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from aerie.attention.distribution import install_command
from aerie.attention.setting import Setting, check_settings
from aerie.cluster.http.keys import KeyConfig, checked
from aerie.workers.scheduling.plan import VALUES

Config = TypeVar("Config")

# Rows of `aerie.cluster.http.parsers.families.FAMILIES`.
OutputParserName = Literal[
    "text",
    "think",
    "hermes",
    "llama3",
    "pythonic",
    "mistral",
    "deepseek_v3",
    "kimi_k2",
    "qwen3_coder",
    "glm45",
    "minimax_m2",
    "seed_oss",
    "granite",
    "phi4_mini",
    "gemma4",
    "harmony",
    "response_template",
]


SERVER_DEFAULTS = {name: value for name, value in VALUES.items() if value.server_default}


def with_defaults(cls: type[Config]) -> type[Config]:
    """Add a key `default_NAME` to a section for each declared value that has `server_default`."""
    lines = [inspect.cleandoc(cls.__doc__ or "") + "\n"]  # Python 3.13 strips indentation itself
    for name, value in SERVER_DEFAULTS.items():
        cls.__annotations__[f"default_{name}"] = value.kind | None
        setattr(cls, f"default_{name}", None)
        lines.append(
            f"default_{name}: for requests without {name}; none: that of the model's generation_config.json, or "
            f"{value.default:g}.\n"
        )
    cls.__doc__ = "".join(lines)
    return cls


@dataclass(frozen=True)
@with_defaults
class EdgeConfig:
    """The section `ingress`: model names, load limits, limits of one request, access, defaults.

    served_model_name: name of the model for clients; "": that of its folder.
    model_aliases: further names that requests may use; replies have `served_model_name`.
    serves_adapters: whether requests may name LoRA adapters; filled in by `lora`.
    records_experts: whether requests may ask for routed experts; filled in by `cache.routed_experts`.
    max_model_len: tokens of prompt and answer together; 0: the engine's limit.
    max_concurrent_requests: generations in flight per ingress, more get 429; none: three quarters of the process's
        limit of open files.
    max_pending_bytes: memory of one ingress for bodies being read, prompts (44 bytes per token) and streams (48 KB
        each); more get 429.
    retry_after_s: seconds in `Retry-After` of a 429 or 503 if the engine gives none.
    request_timeout_s: longer generations are aborted: 504 with `x-should-retry: false` (OpenAI's client repeats a bare
        504 twice), in streams an error event; null: no limit.
    strict: refuse unknown request fields (400) instead of naming them in `x-aerie-ignored`.
    max_body_bytes: larger bodies get 413.
    body_timeout_s: time for a body to arrive, else 408.
    max_bytes_per_token: texts of more than `max_model_len` times these bytes are refused before tokenization; 0: the
        longest token of the vocabulary.
    max_n: choices per prompt.
    max_choices: prompts times choices of one call.
    max_tools: functions in `tools`; agents with several MCP servers may need more.
    max_prompt_logprobs: log-probabilities of prompts in one reply: prompt tokens of all choices times (1 + likely
        tokens asked for).
    max_stop_strings: entries of `stop`.
    max_stop_length: characters of each.
    max_grammar_bytes: size of a JSON schema, regular expression or grammar.
    max_schema_depth: nesting of schemas.
    grammar_timeout_s: limit of a grammar's compilation.
    image_hosts: hosts from which images may be fetched, such as `["images.example.com", "*.example.org"]`; none: images
        come in data URLs only. Their addresses must be public.
    max_images: images of one request.
    max_image_bytes: size of an image's file.
    max_source_pixels: pixels of an image before it is resized to at most `model.max_image_pixels`.
    image_timeout_s: limit of an image's arrival, and of its decoding.
    max_stored_responses: replies of /v1/responses that one ingress keeps for `previous_response_id`; 0: none.
    max_stored_bytes: memory of these replies and the conversations before them.
    api_keys: keys, or `sha256:` and the output of `printf %s KEY | sha256sum`, or keys with names and limits
        (docs/tenants.md). With any, all routes but health and the page require `Authorization: Bearer KEY`,
        `x-api-key: KEY` or basic authentication with the key as password. The server keeps digests only.
    share_prefix_cache: with several keys, one key's prompts may use prefixes that another's have cached. A client then
        learns from `cached_tokens` and from times what others have sent.
    allowed_hosts: without API keys: accepted Host names, in addition to addresses, private names and this machine's
        name; `["*"]`: all.
    allowed_origins: web pages that may use this server (CORS), such as `["https://chat.example.com"]`; `["*"]`: all.
    output_parser: parser of reasoning and tool calls, a name of the table in docs/http-api.md; auto: found from the
        chat template.
    chat_template: file of a chat template, under the same path on every node; "": the model's own.
    chat_template_kwargs: variables for the chat template, such as `{enable_thinking: false}`; a request's own override
        them.
    """

    served_model_name: str = ""
    model_aliases: tuple[str, ...] = ()
    serves_adapters: bool = False
    records_experts: bool = False
    max_model_len: Annotated[int, Setting(ge=0, rule="at least 1, or 0 for the engine's")] = 0
    max_concurrent_requests: Annotated[int | None, Setting(ge=1)] = None
    max_pending_bytes: Annotated[int, Setting(ge=1)] = 2**30
    retry_after_s: Annotated[float, Setting(gt=0)] = 1.0
    request_timeout_s: Annotated[float | None, Setting(gt=0, rule="above 0, or null for no limit")] = 3600.0
    # Aerie's own option, because other servers ignore unknown fields.
    strict: Annotated[bool, Setting("--strict")] = False
    max_body_bytes: Annotated[int, Setting(ge=1)] = 8 * 2**20
    body_timeout_s: Annotated[float, Setting(gt=0)] = 60.0
    max_bytes_per_token: Annotated[int, Setting(ge=0, rule="1 or more, or 0 for the longest")] = 0
    max_n: Annotated[int, Setting(ge=1)] = 16
    max_choices: Annotated[int, Setting(ge=1)] = 128
    max_tools: Annotated[int, Setting(ge=1)] = 128
    max_prompt_logprobs: Annotated[int, Setting(ge=1)] = 2**19
    max_stop_strings: Annotated[int, Setting(ge=1)] = 16
    max_stop_length: Annotated[int, Setting(ge=1)] = 1024
    max_grammar_bytes: Annotated[int, Setting(ge=1)] = 2**17
    max_schema_depth: Annotated[int, Setting(ge=1)] = 32
    grammar_timeout_s: Annotated[float, Setting(gt=0)] = 10.0
    image_hosts: tuple[str, ...] = ()
    max_images: Annotated[int, Setting(ge=1)] = 32
    max_image_bytes: Annotated[int, Setting(ge=1)] = 8 * 2**20
    max_source_pixels: Annotated[int, Setting(ge=1)] = 2**25
    image_timeout_s: Annotated[float, Setting(gt=0)] = 10.0
    max_stored_responses: Annotated[int, Setting(ge=0, rule="at least 0 (none)")] = 1024
    max_stored_bytes: Annotated[int, Setting(ge=1)] = 64 * 2**20
    api_keys: tuple[str | KeyConfig, ...] = ()
    share_prefix_cache: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    output_parser: OutputParserName | Literal["auto"] = "auto"
    chat_template: Annotated[str, Setting("--chat-template", metavar="FILE")] = ""
    chat_template_kwargs: Annotated[
        Mapping[str, str | int | float | bool | None] | None, Setting("--default-chat-template-kwargs")
    ] = None

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """The declared values that requests have by default, by name."""
        defaults = {name: vars(self)[f"default_{name}"] for name in SERVER_DEFAULTS}
        return {name: value for name, value in defaults.items() if value is not None}

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every model name that requests may use; the first is the name in replies."""
        return self.served_model_name, *self.model_aliases

    def __post_init__(self) -> None:
        check_settings(self)
        for name, value in self.sampling_defaults.items():
            SERVER_DEFAULTS[name].check(f"default_{name}", value)
        if self.max_concurrent_requests is not None and self.max_choices > self.max_concurrent_requests:
            raise ValueError(
                f"max_choices={self.max_choices}: must not exceed max_concurrent_requests="
                f"{self.max_concurrent_requests}, or such a request is refused for ever"
            )
        object.__setattr__(self, "api_keys", checked(self.api_keys))


@dataclass(frozen=True)
class TracingConfig:
    """Traces by OpenTelemetry.

    endpoint: a collector of OTLP over HTTP, such as `http://127.0.0.1:4318`; "": no traces.
    sample_ratio: share of requests traced, 0 to 1; a request with a `traceparent` follows its caller's choice.
    service_name: name of this server at the collector.
    """

    endpoint: Annotated[str, Setting("--otlp-traces-endpoint", metavar="URL")] = ""
    sample_ratio: Annotated[float, Setting(ge=0, le=1, rule="between 0 and 1")] = 1.0
    service_name: str = "aerie"

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.endpoint:
            return
        if urlsplit(self.endpoint).scheme not in ("http", "https") or not urlsplit(self.endpoint).netloc:
            raise ValueError(f"endpoint={self.endpoint}: must be a collector's URL, such as http://127.0.0.1:4318")
        try:
            import opentelemetry.exporter.otlp.proto.http  # noqa: F401
        except ImportError:
            raise ValueError(
                f"endpoint={self.endpoint}: needs OpenTelemetry's exporter; {install_command('tracing')}"
            ) from None

    @property
    def url(self) -> str:
        """Return the URL that spans are sent to: the endpoint's own path, or OTLP's."""
        return self.endpoint if urlsplit(self.endpoint).path.strip("/") else self.endpoint.rstrip("/") + "/v1/traces"
