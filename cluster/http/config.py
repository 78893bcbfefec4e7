"""What one HTTP ingress is configured with: the `ingress` section of the configuration. Read by `cluster.http.app`."""

from dataclasses import dataclass
from typing import Literal

from cluster.http.keys import digest

# Rows of `cluster.http.parsers.table.PARSERS`.
OutputParserName = Literal[
    "text", "think", "hermes", "llama3", "mistral", "deepseek_v3", "harmony", "response_template"
]


@dataclass(frozen=True)
class EdgeConfig:
    """Names and lengths, load, bounds of one request, access, defaults.

    served_model_name: the name clients ask for; "" takes the name of the model's folder.
    model_aliases: further names that requests may ask by; replies have `served_model_name`.
    max_model_len: prompt and answer tokens together; 0 takes the engine's.
    max_concurrent_requests: generations (choices) carried by one ingress; more are refused with 429. None: as many as
        memory and open files allow.
    max_pending_bytes: memory that bodies being read, prompts and streams of one ingress may take, as
        `cluster.http.admission` counts it; more are refused with 429.
    retry_after_s: what a 429 or 503 advises if the engine does not.
    request_timeout_s: a generation that takes longer is aborted: 504 with `x-should-retry: false` (OpenAI's client
        would repeat a 408 or a bare 504 twice, and so triple the work), or an error event in a stream; None: no limit.
    strict: refuse fields of requests that no schema knows, instead of ignoring them and saying so.
    max_body_bytes: 413 above.
    body_timeout_s: for a request's body to come whole; 408 above.
    max_bytes_per_token: no token of the model's stands for more; longer texts than max_model_len of them are refused
        before they are tokenized. 0: the longest token of the vocabulary.
    max_n: choices per prompt.
    max_choices: prompts x n.
    max_prompt_logprobs: log-probabilities of prompts in a reply: prompt tokens of all choices x (1 + how many likely
        ones it asks for).
    max_stop_strings: entries of `stop`.
    max_stop_length: characters of each.
    max_grammar_bytes: of a JSON schema, regular expression or other grammar of an answer.
    max_schema_depth: of schemas in schemas.
    grammar_timeout_s: a grammar that takes longer to compile is refused.
    max_stored_responses: replies of /v1/responses that one ingress keeps for previous_response_id; 0: none.
    max_stored_bytes: of them and the conversations before them.
    api_keys: if any, every route but those of health wants `Authorization: Bearer <key>`. Keys, or their digests
        (`cluster.http.keys`); this object has the digests.
    allowed_hosts: without API keys, names in the Host header that are answered beside addresses, names without a dot,
        private domains and this machine's name (`cluster.http.origins`); "*": all.
    allowed_origins: pages of these origins ("https://chat.example.com") may use this server (CORS); "*": all.
    output_parser: what finds reasoning and tool calls in a chat's answer; "text": all of it is content; "auto": what
        the model's chat template tells of (`cluster.http.parsers.detection`).
    default_*: sampling parameters of a request that does not set them.
    """

    served_model_name: str = ""
    model_aliases: tuple[str, ...] = ()
    max_model_len: int = 0
    max_concurrent_requests: int | None = None
    max_pending_bytes: int = 2**30
    retry_after_s: float = 1.0
    request_timeout_s: float | None = 3600.0
    strict: bool = False
    max_body_bytes: int = 8 * 2**20
    body_timeout_s: float = 60.0
    max_bytes_per_token: int = 0
    max_n: int = 16
    max_choices: int = 128
    max_prompt_logprobs: int = 2**19
    max_stop_strings: int = 16
    max_stop_length: int = 1024
    max_grammar_bytes: int = 2**17
    max_schema_depth: int = 32
    grammar_timeout_s: float = 10.0
    max_stored_responses: int = 1024
    max_stored_bytes: int = 64 * 2**20
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    output_parser: OutputParserName | Literal["auto"] = "auto"
    default_temperature: float = 1.0
    default_top_p: float = 1.0
    default_top_k: int = 0
    default_min_p: float = 0.0
    default_repetition_penalty: float = 1.0

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every name that requests may ask by, that of replies first."""
        return self.served_model_name, *self.model_aliases

    def __post_init__(self) -> None:
        at_least_one = (
            "max_concurrent_requests",
            "max_pending_bytes",
            "max_body_bytes",
            "max_n",
            "max_choices",
            "max_prompt_logprobs",
            "max_stop_strings",
            "max_stop_length",
            "max_grammar_bytes",
            "max_schema_depth",
        )
        for name in at_least_one:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        if self.max_stored_responses < 0 or self.max_stored_bytes < 1:
            raise ValueError(
                f"max_stored_responses={self.max_stored_responses}, max_stored_bytes={self.max_stored_bytes}: the "
                "first must be at least 0 (none), the second at least 1"
            )
        if self.max_model_len < 0:
            raise ValueError(f"max_model_len={self.max_model_len}: must be at least 1, or 0 for the engine's")
        if self.max_concurrent_requests is not None and self.max_choices > self.max_concurrent_requests:
            raise ValueError(
                f"max_choices={self.max_choices}: must not exceed max_concurrent_requests="
                f"{self.max_concurrent_requests}, or such a request is refused for ever"
            )
        if self.request_timeout_s is not None and self.request_timeout_s <= 0:
            raise ValueError(f"request_timeout_s={self.request_timeout_s}: must be above 0, or null for no limit")
        if self.grammar_timeout_s <= 0:
            raise ValueError(f"grammar_timeout_s={self.grammar_timeout_s}: must be above 0 seconds")
        if self.body_timeout_s <= 0:
            raise ValueError(f"body_timeout_s={self.body_timeout_s}: must be above 0 seconds")
        if self.max_bytes_per_token < 0:
            raise ValueError(f"max_bytes_per_token={self.max_bytes_per_token}: must be 1 or more, or 0 for the longest")
        if self.retry_after_s <= 0:
            raise ValueError(f"retry_after_s={self.retry_after_s}: must be above 0")
        object.__setattr__(self, "api_keys", tuple(map(digest, self.api_keys)))
        self._check_sampling()

    def _check_sampling(self) -> None:
        ranges = {
            "default_temperature": (0.0, 2.0),
            "default_top_p": (0.0, 1.0),
            "default_min_p": (0.0, 1.0),
            "default_repetition_penalty": (0.01, 100.0),
        }
        for name, (low, high) in ranges.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name}={getattr(self, name)}: must be between {low:g} and {high:g}")
        if self.default_top_k < 0:
            raise ValueError(f"default_top_k={self.default_top_k}: must be at least 0 (0: off)")
