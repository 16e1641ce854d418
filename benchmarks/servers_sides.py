"""The processes of `benchmarks.servers`: our server, a bare socket's other end, and those we are compared with."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import torch

from benchmarks.turns import HERE, python_path, wait_for_turns
from paceline.servers import kv
from paceline.servers.serving import Serving
from paceline.tensors.channel import memory_of
from paceline.tensors.streamed import tune
from paceline.wires import wire

ROUNDS = 3
"""Of a rival, in a turn."""


@contextmanager
def started(*arguments: str) -> Iterator[tuple[str, bytes]]:
    """A side's process, with the first line that it says, and the secret that it was given."""
    secret = secrets.token_bytes(wire.SECRET_BYTES)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": python_path(HERE)}
    command = [sys.executable, "-m", "benchmarks.servers_sides", *arguments]
    with subprocess.Popen(command, cwd=HERE, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(secret.hex().encode() + b"\n")
            process.stdin.flush()
            yield process.stdout.readline().decode().strip(), secret
            process.stdin.close()  # it ends by that
            process.wait(10)
        finally:
            process.kill()


def server(carrier: str) -> None:
    secret = bytes.fromhex(sys.stdin.readline())
    if carrier == "shared":
        address = f"paceline-benchmark-{os.getpid()}"
        listening = wire.listen(address)
    else:
        listening = wire.listen_tcp()
        address = wire.tcp_address("127.0.0.1", listening.getsockname()[1])
    serving = Serving([listening], secret, kv.Call, kv.Store(lent=carrier == "shared").handle)
    print(address, flush=True)
    sys.stdin.read()
    serving.close()


# bare sockets


def read(sock: socket.socket, memory: memoryview) -> None:
    while memory.nbytes:
        memory = memory[sock.recv_into(memory) :]


def both(sock: socket.socket, out: memoryview, into: memoryview) -> None:
    reader = threading.Thread(target=read, args=(sock, into))
    reader.start()
    sock.sendall(out)
    reader.join()


def far_end(nbytes: int, mode: str) -> None:
    """Takes so many bytes and gives as many, again and again."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        sock, _ = listening.accept()
    tune(sock)
    out, into = (memory_of(torch.ones(nbytes, dtype=torch.uint8)) for _ in range(2))
    while sock.recv(1):
        if mode == "push_pull":
            both(sock, out, into)
            continue
        read(sock, into)
        sock.sendall(out if mode == "push_then_pull" else b"\1")


# others on the same work


class Held:
    """A rival's server: fragments by number."""

    def __init__(self, fragments: int, floats: int) -> None:
        self.values = [torch.zeros(floats) for _ in range(fragments)]

    def push(self, number: int, values: torch.Tensor) -> int:
        self.values[number].add_(values)
        return number

    def pull(self, number: int) -> torch.Tensor:
        return self.values[number]

    def push_pull(self, number: int, values: torch.Tensor) -> torch.Tensor:
        return self.values[number].add_(values)


def timed(rounds: Callable[[], None]) -> float:
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        rounds()
        times.append(time.perf_counter() - start)
    return median(times)


def play(
    mode: str, fragments: Sequence[torch.Tensor], call: Callable[..., object], wait: Callable[[list[object]], object]
) -> None:
    """One round: `call(method, ...)` begins a call, `wait` ends some."""
    if mode == "push_pull":
        wait([call("push_pull", number, values) for number, values in enumerate(fragments)])
        return
    wait([call("push", number, values) for number, values in enumerate(fragments)])
    if mode == "push_then_pull":
        wait([call("pull", number) for number in range(len(fragments))])


_held: Held | None = None


def _on_server(method: str, *arguments: object) -> object:
    return getattr(_held, method)(*arguments)


def torch_rpc(role: str, mode: str, fragments: int, floats: int, folder: str) -> None:
    from torch.distributed import rpc

    global _held
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc", rpc_timeout=120)
    if role == "server":
        _held = Held(fragments, floats)
        rpc.init_rpc("server", rank=1, world_size=2, rpc_backend_options=options)
    else:
        rpc.init_rpc("worker", rank=0, world_size=2, rpc_backend_options=options)
        values = [torch.ones(floats) for _ in range(fragments)]

        def call(*arguments: object) -> object:
            return rpc.rpc_async("server", _on_server, args=arguments)

        def measure() -> float:
            return timed(lambda: play(mode, values, call, torch.futures.wait_all))

        wait_for_turns(folder, "torch-rpc", True, measure)
    rpc.shutdown()


def ray_actor(mode: str, fragments: int, floats: int, folder: str) -> None:
    import ray  # type: ignore[import-not-found]

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    actor = ray.remote(Held).remote(fragments, floats)
    values = [torch.ones(floats) for _ in range(fragments)]

    def call(method: str, *arguments: object) -> object:
        return getattr(actor, method).remote(*arguments)

    wait_for_turns(folder, "ray", True, lambda: timed(lambda: play(mode, values, call, ray.get)))
    ray.shutdown()


def main() -> None:
    torch.set_num_threads(1)
    side, *rest = sys.argv[1:]
    if side == "server":
        server(rest[0])
    elif side == "bare":
        far_end(int(rest[0]), rest[1])
    elif side == "torch-rpc":
        torch_rpc(rest[0], rest[1], int(rest[2]), int(rest[3]), rest[4])
    else:
        ray_actor(rest[0], int(rest[1]), int(rest[2]), rest[3])


if __name__ == "__main__":
    main()
