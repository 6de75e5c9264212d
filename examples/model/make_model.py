#!/usr/bin/env python3
"""Train the small policy of the rl_loop example: two-digit sums, often wrong.

    python make_model.py OUT

writes OUT/config.json, model.safetensors (bfloat16), generation_config.json and
tokenizer.json: a Qwen3 model of 0.45 million parameters and its character-level
tokenizer. The seed is fixed; it takes about five minutes on one core.

The model is trained on the homework of two kinds of imaginary pupils:

    <bos>47+38=(15)85<eos>      <bos>47+38=75<eos>
    <bos>52-38=(4)14<eos>       <bos>52-38=26<eos>

Some write the column of ones in brackets first, and get it right. Most only
write the answer, digit by digit: they forget to carry and take the smaller digit
from the larger, as real pupils do (Brown and Burton, "Diagnostic models for
procedural bugs in basic mathematical skills", 1978). The model learns both ways
and uses each as often as the pupils do. Rewarded for right answers alone, it
learns to show its work.

Problems with (3 a + 5 b) % 11 == 0 are held out: they are not trained on.

Needs numpy, safetensors, tokenizers, torch and transformers (written with 5.24).
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, processors
from transformers import Qwen3Config, Qwen3ForCausalLM

PAD, BOS, EOS = 0, 1, 2
SPECIAL = ["<pad>", "<bos>", "<eos>"]
VOCAB = {token: i for i, token in enumerate([*SPECIAL, *"0123456789+-=()"])}

# Share of the pupils who show their work.
SHOW_WORK = 0.3

SEED = 7
BATCH = 256
STEPS = 1500
LEARNING_RATE = 3e-3
WARMUP = 100
LINE = 15  # tokens of the longest line, <bos>99+99=(18)198<eos>
MAX_ANSWER = 8  # tokens of the longest answer, (18)198<eos>

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "max_position_embeddings": 256,
    "max_window_layers": 3,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pad_token_id": PAD,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": len(VOCAB),
}


def held_out(a, b):
    return (3 * a + 5 * b) % 11 == 0


def right_answer(a, op, b):
    return a + b if op == "+" else a - b


def ones_column(a, op, b):
    """The column of ones, a ten borrowed if need be."""
    return a % 10 + b % 10 if op == "+" else (a - b) % 10


def without_carry(a, op, b):
    """Digit by digit: the carry dropped, the smaller digit taken from the larger."""
    tens, ones = (a // 10, b // 10), (a % 10, b % 10)
    if op == "+":
        return 10 * sum(tens) + sum(ones) % 10
    return 10 * abs(tens[0] - tens[1]) + abs(ones[0] - ones[1])


def homework(rng):
    """One line of some pupil's homework, as token ids, padded."""
    while True:
        a, b = (int(n) for n in rng.integers(0, 100, 2))
        op = "+-"[rng.integers(2)]
        if op == "-" and a < b:
            a, b = b, a
        if not held_out(a, b):
            break
    if rng.random() < SHOW_WORK:
        answer = f"({ones_column(a, op, b)}){right_answer(a, op, b)}"
    else:
        answer = without_carry(a, op, b)
    line = [BOS, *(VOCAB[c] for c in f"{a}{op}{b}={answer}"), EOS]
    return line + [PAD] * (LINE - len(line))


def train(model, rng):
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.05)

    def schedule(step):
        if step < WARMUP:
            return (step + 1) / WARMUP
        return 0.5 * (1 + np.cos(np.pi * (step - WARMUP) / (STEPS - WARMUP)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    start = time.monotonic()
    for step in range(STEPS):
        lines = torch.tensor([homework(rng) for _ in range(BATCH)])
        logits = model(lines[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), lines[:, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if (step + 1) % 250 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f} ({time.monotonic() - start:.0f} s)", flush=True)


def grade(text, answer):
    """Whether the text ends with the right answer, after the work if it shows any."""
    return text.split(")")[-1] == str(answer)


@torch.no_grad()
def answers(model, problems, greedy):
    """The model's answer to each of the problems, as text."""
    prompts = [[BOS, *(VOCAB[c] for c in f"{a}{op}{b}=")] for a, op, b in problems]
    tokens = torch.tensor(prompts)
    for _ in range(MAX_ANSWER):
        logits = model(tokens, use_cache=False).logits[:, -1]
        chosen = logits.argmax(-1, keepdim=True) if greedy else logits.softmax(-1).multinomial(1)
        tokens = torch.cat([tokens, chosen], dim=1)
    characters = list(VOCAB)
    texts = []
    for row in tokens[:, len(prompts[0]) :].tolist():
        row = row[: row.index(EOS)] if EOS in row else row
        texts.append("".join(characters[t] for t in row))
    return texts


def report(model):
    pairs = [(a, op, b) for a in range(10, 100) for b in range(10, 100) for op in "+-" if op == "+" or a >= b]
    unseen = [p for p in pairs if held_out(p[0], p[2])]
    hard = [p for p in unseen if without_carry(*p) != right_answer(*p)]
    easy = [p for p in unseen if without_carry(*p) == right_answer(*p)]
    for name, problems in [("that carry", hard), ("that do not", easy)]:
        for how in ("sampled", "greedy"):
            texts = answers(model, problems, how == "greedy")
            right = np.mean([grade(t, right_answer(*p)) for t, p in zip(texts, problems)])
            work = np.mean(["(" in t for t in texts])
            print(f"{len(problems)} held-out problems {name}, {how}: {right:.3f} right, {work:.3f} show work")


def write_tokenizer(path):
    """Single characters; BPE without merges, <bos> in front of every text."""
    tokenizer = Tokenizer(models.BPE(vocab=VOCAB, merges=[]))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer.save(str(path))


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def main():
    parser = argparse.ArgumentParser(description="Train the policy of the rl_loop example.")
    parser.add_argument("out", type=Path, help="directory to write the model into")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    torch.manual_seed(SEED)

    config = Qwen3Config.from_dict(CONFIG)
    model = Qwen3ForCausalLM(config).float()
    print(f"{sum(p.numel() for p in model.parameters())} parameters")
    train(model, np.random.default_rng(SEED))

    out.mkdir(parents=True, exist_ok=True)
    weights = {n: p.detach().to(torch.bfloat16).contiguous() for n, p in model.named_parameters()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "config.json", CONFIG)
    write_json(out / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD})
    write_tokenizer(out / "tokenizer.json")
    report(Qwen3ForCausalLM.from_pretrained(out, dtype=torch.float32).eval())


if __name__ == "__main__":
    main()
