"""The example clients, built and run as their README says, against a gateway, a scheduler and an oracle executor."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from pagemill.engine.v1 import frontend_pb2 as wire
from pagemill.v1 import inference_pb2 as pb
from pagemill.v1 import inference_pb2_grpc
from pagemill.zmq_links import new_identity
from scheduler_svc.gateway.config import GatewaySettings
from scheduler_svc.gateway.link import Identity
from scheduler_svc.gateway.server import Gateway
from tests.integration.gateway_fixture import (
    FakeStream,
    LoopbackAsync,
    connect,
    running_gateway,
    tiny,
    tiny_info,
    until,
)
from tests.oracles.base import Geometry
from tests.oracles.rig import LiveRig
from tests.oracles.scripted import Script, ScriptedExecutor
from tests.unit.gateway.tiny_tokenizer import EOS

ROOT = Path(__file__).resolve().parents[2]
GO_PACKAGES = Path("/usr/share/gocode/src")
BUILD_LIMIT_S = 240.0
INSTALL_LIMIT_S = 40.0
RUN_LIMIT_S = 60.0
pytestmark = pytest.mark.timeout(300)

PROMPT = "Nenne drei Flüsse."
ANSWER = "Rhein, Rhône,\n揚子江 🙂"
"""Characters of one to four bytes; each byte is a token here."""


@dataclass(frozen=True)
class Example:
    """A client that can be started, and how its language spells gRPC's codes."""

    command: tuple[str, ...]
    spell: Callable[[str], str] = str


def environment(**more: str) -> dict[str, str]:
    """This process's, without what would change a client or a build."""
    foreign = ("PAGEMILL_", "MAKE", "MFLAGS")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign) and not k.lower().endswith("_proxy")}
    return kept | more


def in_go(code: str) -> str:
    return "Canceled" if code == "CANCELLED" else code.title().replace("_", "")


def need(*commands: str) -> None:
    missing = [command for command in commands if shutil.which(command) is None]
    if missing:
        pytest.skip(f"not on PATH: {', '.join(missing)}")


def build(folder: Path, *command: str) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def node(folder: Path) -> Example:
    need("node", "npm")
    install = ["npm", "install", "--no-audit", "--no-fund", "--prefer-offline", "--fetch-retries=0"]
    try:
        subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=True)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"npm cannot install the packages: {(error.stderr.strip().splitlines() or ['no message'])[0]}")
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm has not installed the packages in {INSTALL_LIMIT_S:g} s")
    assert not (folder / "package-lock.json").exists(), "it would name a registry"
    return Example(("node", str(folder / "chat.js")))


def go(folder: Path) -> Example:
    need("make", "go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc")
    packages = ("google.golang.org/grpc", "google.golang.org/genproto", "google.golang.org/protobuf")
    missing = [name for name in packages if not (GO_PACKAGES / name).is_dir()]
    if missing:
        pytest.skip(f"not in {GO_PACKAGES}: {', '.join(missing)}")
    build(folder, "make")
    return Example((str(folder / "build/chat"),), in_go)


def cpp(folder: Path) -> Example:
    need("cmake", "g++", "protoc", "grpc_cpp_plugin", "pkg-config")
    if subprocess.run(["pkg-config", "--exists", "grpc++", "protobuf"], check=False, timeout=20).returncode:
        pytest.skip("pkg-config finds no grpc++ or no protobuf")
    build(folder, "cmake", "-B", "build")
    build(folder, "cmake", "--build", "build", "--parallel", "2")
    return Example((str(folder / "build/chat"),))


@pytest.fixture(scope="module", params=[node, go, cpp], ids=lambda language: language.__name__)
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Example:
    """The example, built in a copy of the tree, so that nothing is left here and nothing left here is used."""
    language: Callable[[Path], Example] = request.param
    tree = tmp_path_factory.mktemp("tree")
    left = shutil.ignore_patterns("node_modules", "build")
    shutil.copytree(ROOT / "client/examples", tree / "client/examples", ignore=left)
    (tree / "proto").symlink_to(ROOT / "proto")
    return language(tree / "client/examples" / language.__name__)


@dataclass
class Stack:
    """A whole service in this process: gateway, engine, and an executor that says what a test tells it."""

    gateway: Gateway
    rig: LiveRig
    executor: ScriptedExecutor

    async def answers(self, script: Script) -> int:
        """From now on PROMPT as a chat gives this. Returns the number of the prompt's tokens."""
        chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=PROMPT)])
        async with connect(self.gateway.port) as channel:
            api = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
            prompt_ids = (await api.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids
        self.executor.scripts = {tuple(prompt_ids): script}
        return len(prompt_ids)

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.gateway.port}"

    @property
    def is_idle(self) -> bool:
        """No call in the gateway, nothing to run in the scheduler, and every block can be used again."""
        stats = self.rig.engine.core.stats()
        is_free = stats.blocks_free + stats.blocks_cached == stats.blocks_total
        return len(self.gateway.registry) == 0 and stats.running == stats.queue_requests == 0 and is_free


@pytest_asyncio.fixture
async def stack() -> AsyncIterator[Stack]:
    info = tiny_info(max_model_len=Geometry.max_model_len)
    geometry = Geometry(vocab_size=tiny().vocab_size, fingerprint=info.fingerprint, num_blocks=128)
    rig = LiveRig()
    executor = rig.add_executor(ScriptedExecutor, geometry)
    link = LoopbackAsync(rig.gateway_hub.connect(new_identity("gateway", "test")))
    settings = GatewaySettings(model=Path("tiny"), port=0, metrics_port=0, admin_port=0)
    gateway = Gateway(settings, info, tiny(), link, Identity("test", "1", "localhost", info.fingerprint))
    await gateway.start()
    try:
        await until(lambda: gateway.scheduler.ready)
        yield Stack(gateway, rig, executor)
    finally:
        await gateway.stop()
        rig.close()


@asynccontextmanager
async def started(example: Example, target: str, *arguments: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *example.command, *arguments, stdout=PIPE, stderr=PIPE, env=environment(PAGEMILL_TARGET=target)
    )
    try:
        async with asyncio.timeout(RUN_LIMIT_S):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def run(example: Example, target: str, *arguments: str) -> tuple[int | None, str, str]:
    """Exit status, stdout and stderr."""
    async with started(example, target, *arguments) as process:
        out, err = await process.communicate()
        return process.returncode, out.decode(), err.decode()


async def test_an_answer_is_printed_whole_with_its_usage(example: Example, stack: Stack) -> None:
    num_prompt_tokens = await stack.answers(Script(ids=[*ANSWER.encode(), EOS]))
    usage = f"{num_prompt_tokens} prompt tokens (0 cached), {len(ANSWER.encode()) + 1} generated"
    done = await run(example, stack.target, PROMPT)
    assert done == (0, f"{ANSWER}\n", f"FINISH_REASON_STOP: {usage}\n")
    assert stack.is_idle


async def test_max_tokens_is_the_second_argument(example: Example, stack: Stack) -> None:
    await stack.answers(Script(filler=ord("x")))
    status, out, err = await run(example, stack.target, PROMPT, "5")
    assert (status, out) == (0, "xxxxx\n")
    assert err.startswith("FINISH_REASON_LENGTH: ")


async def test_a_refused_request_names_code_reason_and_field(example: Example, stack: Stack) -> None:
    status, out, err = await run(example, stack.target, PROMPT, "0")
    assert (status, out) == (1, "")
    first, *rest = err.splitlines()
    assert first.startswith(f"{example.spell('INVALID_ARGUMENT')} (INVALID_PARAMETER): ")
    assert [line.partition(":")[0] for line in rest] == ["  stopping.max_tokens"]


async def test_an_interrupted_stream_ends_in_the_service_and_gives_its_blocks_back(
    example: Example, stack: Stack
) -> None:
    await stack.answers(Script(filler=ord("x")))
    stack.executor.step_s = 0.05  # 400 tokens take longer than a test may
    async with started(example, stack.target, PROMPT, "400") as process:
        assert process.stdout is not None
        assert await process.stdout.readexactly(2) == b"xx"
        assert stack.rig.engine.core.stats().running == 1
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
    assert process.returncode == 130
    assert len(out) < 100
    assert err.decode().startswith(example.spell("CANCELLED"))
    await until(lambda: stack.is_idle)


async def test_a_full_queue_says_when_to_come_back(example: Example) -> None:
    async def refuse(stream: FakeStream) -> None:
        stream.reject(wire.STREAM_ERROR_QUEUE_FULL, "the queue is full", retry_after_ms=1500)

    async with running_gateway() as rig:
        rig.scheduler.script = refuse
        status, out, err = await run(example, f"127.0.0.1:{rig.gateway.port}", PROMPT)
    assert (status, out) == (75, "")
    assert err.startswith(f"{example.spell('RESOURCE_EXHAUSTED')} (QUEUE_FULL): ")
    assert "\n  try again in 1.5" in err


async def test_no_service_at_the_address(example: Example, free_port: Callable[[], int]) -> None:
    status, out, err = await run(example, f"127.0.0.1:{free_port()}", PROMPT)
    assert (status, out) == (75, "")
    assert err.startswith(f"{example.spell('UNAVAILABLE')}: ")


async def test_wrong_usage_is_told_without_a_call(example: Example) -> None:
    for arguments in ([], [PROMPT, "many"], [PROMPT, "99999999999"], [PROMPT, "1", "2"]):
        status, out, err = await run(example, "127.0.0.1:1", *arguments)
        assert (status, out) == (2, ""), arguments
        assert err.startswith("usage: ")
