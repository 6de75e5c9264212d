"""Times safetensors' load_file and torch's load_state_dict: `peer.py ROUNDS FILE...`.

Prints, for one thread and for as many as torch would take, a line per round: threads and seconds.
"""

import sys
import time

import torch
from safetensors.torch import load_file


def module_of(tensors):
    """A module with parameters of the names and shapes of `tensors`."""
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        module.register_parameter(leaf, torch.nn.Parameter(torch.zeros_like(tensor), requires_grad=False))
    return root


def load(files):
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


rounds, files = int(sys.argv[1]), sys.argv[2:]
module = module_of(load(files))
for threads in sorted({1, torch.get_num_threads()}):
    torch.set_num_threads(threads)
    for _ in range(rounds):
        begin = time.perf_counter()
        module.load_state_dict(load(files))
        print(threads, time.perf_counter() - begin)
