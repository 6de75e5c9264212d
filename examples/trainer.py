"""The trainer's side of a weight update in Python, with nothing but the standard library.

    cargo run --release --example two_processes -- --trainer "python3 examples/trainer.py"

starts this with the path of the engine's socket. It sends the tensors of a safetensors file; a trainer sends its
own: all it needs for each is a name, a dtype, a shape and the bytes (`tensor.contiguous().cpu().numpy().tobytes()`,
or a view of bf16 as int16). The protocol is described at the begin of src/weights/shared_memory.rs.
"""

import json
import mmap
import os
import socket
import struct
import sys

DTYPES = {"F32": 4, "F16": 2, "BF16": 2}


class Engine:
    """A connection to an engine that takes weights."""

    def __init__(self, path, timeout=30.0):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(timeout)
        self.socket.connect(path)
        # The first message brings the descriptor of the shared memory with its first byte.
        first, descriptors, _, _ = socket.recv_fds(self.socket, 4, 1)
        welcome = self.receive("welcome", begun=first)
        if welcome["protocol"] != 1:
            raise RuntimeError(f"the engine speaks version {welcome['protocol']} of the protocol")
        self.half_bytes = welcome["half_bytes"]
        self.memory = mmap.mmap(descriptors[0], 2 * self.half_bytes)
        os.close(descriptors[0])

    def send_weights(self, tensors):
        """Sends `[(name, dtype, shape, bytes)]`; returns the version that they became."""
        index = [{"name": name, "dtype": dtype, "shape": shape} for name, dtype, shape, _ in tensors]
        self.send("index", {"tensors": index})
        while wanted := self.receive("want", "finish"):
            self.fill(tensors[position][3] for position in wanted["tensors"])
        self.send("sent", {})
        return self.receive("committed")

    def fill(self, pieces):
        """Writes all bytes into the two halves in turn; a half is ours again when the engine has copied it."""
        half, filled, busy = 0, 0, 0

        def pass_on():
            nonlocal half, filled, busy
            self.send("filled", {"half": half, "bytes": filled})
            half, filled, busy = 1 - half, 0, busy + 1
            if busy == 2:
                self.receive("taken")
                busy -= 1

        for piece in pieces:
            piece = memoryview(piece).cast("B")
            while piece:
                room = min(self.half_bytes - filled, len(piece))
                start = half * self.half_bytes + filled
                self.memory[start : start + room] = piece[:room]
                filled, piece = filled + room, piece[room:]
                if filled == self.half_bytes:
                    pass_on()
        if filled:
            pass_on()
        for _ in range(busy):
            self.receive("taken")

    def send(self, kind, fields):
        message = json.dumps({kind: fields}).encode()
        self.socket.sendall(struct.pack("<I", len(message)) + message)

    def receive(self, *kinds, begun=b""):
        """The fields of the next message, which must be one of these; `finish` has none."""
        length = struct.unpack("<I", begun + self.exactly(4 - len(begun)))[0]
        ((received, fields),) = json.loads(self.exactly(length)).items()
        if received == "refused":
            raise RuntimeError(f"the engine refuses: {fields['reason']}")
        if received not in kinds:
            raise RuntimeError(f"the engine said {received}, expected {' or '.join(kinds)}")
        return fields

    def exactly(self, length):
        received = bytearray()
        while len(received) < length:
            more = self.socket.recv(length - len(received))
            if not more:
                raise RuntimeError("the engine is gone")
            received += more
        return bytes(received)


def read_safetensors(path):
    with open(path, "rb") as file:
        data = file.read()
    (header_bytes,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + header_bytes])
    header.pop("__metadata__", None)
    body = memoryview(data)[8 + header_bytes :]
    for name, tensor in header.items():
        begin, end = tensor["data_offsets"]
        if tensor["dtype"] in DTYPES:
            yield name, tensor["dtype"], tensor["shape"], body[begin:end]


if __name__ == "__main__":
    model = os.path.join(os.path.dirname(os.path.abspath(__file__)), "model", "model.safetensors")
    weights = list(read_safetensors(model))
    engine = Engine(sys.argv[1])
    for update in 1, 2:
        version = engine.send_weights(weights)
        print(f"trainer {os.getpid()} (python): update {update} is version {version['counter']}@{version['digest'][:12]}")
