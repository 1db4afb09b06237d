"""Options of every `pagemill` subcommand: each a flag, a PAGEMILL_ variable and a key of the --config file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic_settings import CliPositionalArg

from pagemill.settings import ServiceSettings, Settings
from pagemill_client.channel import DEFAULT_TARGET, TlsCredentials


class ConnectionSettings(Settings):
    """Where the service is and how to reach it."""

    target: str = DEFAULT_TARGET
    """gRPC target, host:port or unix:/path"""
    insecure: bool = False
    """clear text also to another machine (to this one it is the default)"""
    tls_root_certificates: Path | None = None
    """PEM file with the authorities to trust; default: those that come with gRPC"""
    tls_private_key: Path | None = None
    """PEM file with this client's key, for mutual TLS"""
    tls_certificate_chain: Path | None = None
    """PEM file with this client's certificate, for mutual TLS"""
    timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    """deadline of each request, in seconds"""
    model_name: str = ""
    """model to ask, as the service lists it; default: its only one"""

    @property
    def tls(self) -> TlsCredentials | None:
        """Credentials if any file is named."""
        files = (self.tls_root_certificates, self.tls_private_key, self.tls_certificate_chain)
        return TlsCredentials(*files) if any(files) else None


class SamplingSettings(ConnectionSettings):
    """How to continue. Whatever is not given is the server's default."""

    max_tokens: int | None = Field(default=None, ge=1)
    """most tokens to generate; default: what is left of the model's context"""
    temperature: float | None = Field(default=None, ge=0)
    """divides the logits; 0 takes the most likely token; server's default 1"""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """smallest set of tokens with this probability in sum; server's default 1 (off)"""
    top_k: int | None = Field(default=None, ge=0)
    """number of most likely tokens to choose from; server's default 0 (off)"""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """least share of the best token's probability; server's default 0 (off)"""
    seed: int | None = None
    """seed of the random stream; the same seed gives the same tokens; default: drawn by the server"""
    stop: list[str] = Field(default=[])
    """text that ends the output; may be repeated; a text with a comma as JSON, ["a,b"]; default: none"""
    priority: int | None = None
    """higher runs first; server's default 0"""
    stats: bool = False
    """print token counts and times to stderr at the end"""


class GenerateSettings(SamplingSettings):
    """Continue a text."""

    prog: ClassVar[str] = "pagemill generate"
    prompt: CliPositionalArg[str]
    """the text to continue; - reads it from standard input"""
    ignore_eos: bool = False
    """go on after the model's end-of-sequence token"""


class ChatSettings(SamplingSettings):
    """Talk to the model."""

    prog: ClassVar[str] = "pagemill chat"
    max_tokens: int | None = Field(default=512, ge=1)
    """most tokens of one answer"""
    message: str = ""
    """answer this one message and stop; - reads it from standard input; default: talk until /exit"""
    system: str = ""
    """system message that opens the conversation; default: the chat template's own"""


class DemoSettings(ServiceSettings):
    """Start everything with the demo model, answer one message, stop."""

    prog: ClassVar[str] = "pagemill demo"
    message: str = "What is the capital of France? Answer in one sentence."
    """what to ask"""
    max_tokens: int = Field(default=64, ge=1)
    """most tokens of the answer"""
    ready_timeout_s: float = Field(default=120.0, gt=0)
    """longest wait until everything is ready, in seconds"""


class ServeSettings(ServiceSettings):
    """The whole stack on this machine. Options of the roles may follow; see below."""

    prog: ClassVar[str] = "pagemill serve"
    model: str
    """Hugging Face directory or GGUF file; "demo" is the installed demo model"""
    ready_timeout_s: float = Field(default=120.0, gt=0)
    """longest wait until everything is ready, in seconds; then everything stops and the culprit is named"""
    stop_timeout_s: float = Field(default=45.0, gt=0)
    """longest wait for each process to end by itself when told to stop, in seconds; then it is killed"""
    max_crashes: int = Field(default=5, ge=1)
    """crashes of one process in a row, each within a minute of its start, after which everything stops"""


def _ranges(text: str) -> str:
    parse_range(text)
    return text


def parse_range(text: str) -> tuple[int, int]:
    """ "32-512" or "128" as (least, most). Raises ValueError."""
    low, _, high = text.partition("-")
    if not (low.isascii() and low.isdigit() and (not high or (high.isascii() and high.isdigit()))):
        raise ValueError("expected N or LOW-HIGH")
    least, most = int(low), int(high or low)
    if not 1 <= least <= most:
        raise ValueError("expected 1 <= LOW <= HIGH")
    return least, most


class LoadSettings(Settings):
    """Which requests to send, and how many at once."""

    workload: Path | None = None
    """JSON file: a list of {"ids": [token ids], "n_out": tokens, "at": seconds (optional)}; default: random requests"""
    num_requests: int = Field(default=64, ge=1)
    """random requests to make (without --workload)"""
    prompt_tokens: Annotated[str, AfterValidator(_ranges)] = "32-512"
    """tokens per random prompt, N or LOW-HIGH"""
    output_tokens: Annotated[str, AfterValidator(_ranges)] = "32-128"
    """tokens to generate per random request, N or LOW-HIGH"""
    seed: int = 0
    """seed of random requests and arrivals"""
    concurrency: int = Field(default=64, ge=1)
    """closed loop: requests in flight (without --rate)"""
    connections: int = Field(default=4, ge=1)
    """connections that share the requests; a gateway takes 100 streams on each by default"""
    warmup: int = Field(default=2, ge=0)
    """requests sent before the clock starts"""


class BenchSettings(LoadSettings, ConnectionSettings):
    """Load a running service and report what clients saw."""

    prog: ClassVar[str] = "pagemill bench"
    rate: list[float] = Field(default=[])
    """open loop: mean arrivals per second (Poisson); several values, one run each; default: closed loop"""
    use_arrivals: bool = False
    """open loop with the "at" of the workload file"""
    repeat: int = Field(default=1, ge=1)
    """runs of the whole workload"""
    slo_ttft_ms: float = Field(default=1000.0, gt=0)
    """goodput counts requests whose first token came within this, in milliseconds"""
    slo_itl_ms: float = Field(default=50.0, gt=0)
    """and whose mean time between tokens is at most this, in milliseconds"""
    output: Path | None = None
    """write the report to this JSON file as well"""
    format: Literal["table", "json"] = "table"
    """what goes to standard output"""


class TuneSettings(LoadSettings):
    """Find the settings that serve a load best on this machine. Options of `pagemill serve` may follow; they hold for
    every service that is measured, and --config names a file to start from.
    """

    prog: ClassVar[str] = "pagemill tune"
    model: str
    """Hugging Face directory or GGUF file; "demo" is the installed demo model"""
    output: Path = Path("pagemill-tuned.yaml")
    """config file to write, for pagemill serve --config"""
    report: Path | None = None
    """write every run to this JSON file as well"""
    overwrite: bool = False
    """replace files that exist"""
    budget_s: float = Field(default=900.0, gt=0, le=604_800)
    """seconds to spend; the first run is made in any case"""
    max_runs: int | None = Field(default=None, ge=1)
    """services to measure at most, those that confirm included; default: as many as the time allows"""
    choose: Literal["throughput", "latency"] = "throughput"
    """throughput: most tokens/s whose p99 ITL is at most --max-itl-ms; latency: least p99 ITL with at least
    --min-tokens-per-s"""
    max_itl_ms: float | None = Field(default=None, gt=0)
    """bound of the 99th percentile of the time between tokens, in milliseconds; default: that of the start, and 5 %"""
    min_tokens_per_s: float | None = Field(default=None, gt=0)
    """bound of the throughput; default: that of the start, less 5 %"""
    confirm: int = Field(default=2, ge=0, le=20)
    """runs that start and winner get again at the end, in turn; medians decide"""
    rate: float | None = Field(default=None, gt=0)
    """open loop: mean arrivals per second (Poisson); default: closed loop"""
    timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    """deadline of each request, in seconds"""
