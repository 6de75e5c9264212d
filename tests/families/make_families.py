#!/usr/bin/env python3
"""Write one tiny random checkpoint per model family, with transformers' answers.

    python make_families.py OUT

makes a directory OUT/<family>/ for each entry of FAMILIES, with

    config.json         as checkpoints on the hub have it
    model.safetensors   (or three shards and model.safetensors.index.json)
    reference.json      what transformers computes for a few prompts

The weights come from a seeded numpy generator, so the script writes the same
bytes each time. They are drawn wide, so that greedy output varies and every
part of the model has a say in it.

The references are computed by transformers from the files just written:
weights upcast from the stored type to float64, eager attention, no KV cache.
transformers keeps three spots in float32 even then (the mean square of
RMSNorm, the attention softmax, the rotary angles), which puts the numbers
about 1e-6 off an all-float64 computation. reference.json holds, per prompt:

    prompt            token ids
    prompt_logprobs   log P(prompt[i + 1] | prompt[..= i])
    greedy            24 greedy tokens; end-of-sequence ids do not end it
    logprobs          their log-probabilities (temperature 1)
    margins           logit of the greedy token minus that of the runner-up
    top5              the five likeliest [token, logprob] at each position

Before it writes a reference, the script checks that decoding with a KV cache
gives the same, and that each setting named in `knobs` is really at work:
dropping it must change the log-probabilities.

Needs numpy, safetensors, torch and transformers (written with 5.24).
"""

import argparse
import copy
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar

VOCAB = 128
PROMPT_LENGTHS = (1, 7, 40)
GREEDY_TOKENS = 24

# Smallest change of a log-probability that counts as "this knob does something".
KNOB_BITES = 1e-2
# Fewest different tokens in a greedy continuation.
VARIETY = 8
# Largest difference allowed between decoding with and without a KV cache.
CACHE_AGREES = 1e-5

BASE = {
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 24,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": VOCAB,
}

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "bos_token_id": 1, "eos_token_id": 2}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "bos_token_id": 0, "eos_token_id": 2}
V4 = "4.45.0"  # the transformers version that a config of the older style names

# family -> config       config.json, on top of BASE
#           knobs        name -> config changes that must change the output (None drops a key)
#           seed         of the weights and the prompts
#           shards       number of weight files (default 1)
#           embed_std    spread of the embeddings (default 1)
FAMILIES = {
    # No grouped queries, no rope_theta in the config (10000 is implied), and embeddings
    # so small that rms_norm_eps shows.
    "llama2": {
        "config": {
            **LLAMA,
            "num_key_value_heads": 4,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.31.0",
        },
        "embed_std": 0.02,
        "knobs": {
            "rope_theta": {"rope_theta": 500000.0},
            "rms_norm_eps": {"rms_norm_eps": 1e-6},
        },
        "seed": 202,
    },
    # Of the four frequencies, llama3 scaling leaves one, blends one and divides two.
    "llama3": {
        "config": {
            **LLAMA,
            "attention_bias": False,
            "eos_token_id": [2, 5],
            "intermediate_size": 16,
            "mlp_bias": False,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "factor": 8.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 0.5,
                "original_max_position_embeddings": 32,
                "rope_type": "llama3",
            },
            "rope_theta": 1000.0,
            "torch_dtype": "float32",
            "transformers_version": V4,
        },
        "knobs": {
            "rope_scaling": {"rope_scaling": None},
            "rope_theta": {"rope_theta": 10000.0},
        },
        "seed": 300,
    },
    "smollm2": {
        "config": {
            **LLAMA,
            "attention_bias": False,
            "hidden_size": 24,
            "intermediate_size": 32,
            "is_llama_config": True,
            "mlp_bias": False,
            "num_attention_heads": 3,
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-5,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers_version": V4,
        },
        "knobs": {"rope_theta": {"rope_theta": 100.0}},
        "seed": 222,
    },
    "mistral": {
        "config": {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "sliding_window": 8,
            "torch_dtype": "float16",
            "transformers_version": V4,
        },
        "knobs": {
            "sliding_window": {"sliding_window": None},
            "sliding_window (7 for 8)": {"sliding_window": 7},
            "sliding_window (9 for 8)": {"sliding_window": 9},
            "rope_theta": {"rope_theta": 100.0},
        },
        "seed": 400,
    },
    # Names a sliding window but turns it off.
    "qwen2": {
        "config": {
            **QWEN2,
            "max_window_layers": 0,
            "rope_theta": 1000000.0,
            "sliding_window": 4,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers_version": V4,
            "use_sliding_window": False,
        },
        "knobs": {
            "use_sliding_window": {"use_sliding_window": True},
            "rope_theta": {"rope_theta": 10000.0},
        },
        "seed": 506,
    },
    # The style of transformers 5: dtype and rope_parameters.
    "qwen3": {
        "config": {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "bos_token_id": 0,
            "dtype": "bfloat16",
            "eos_token_id": 2,
            "head_dim": 16,
            "layer_types": ["full_attention", "full_attention"],
            "max_window_layers": 2,
            "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
            "sliding_window": None,
            "transformers_version": "5.24.0",
            "use_sliding_window": False,
        },
        "knobs": {
            "rope_parameters": {"rope_parameters": {"rope_theta": 10000, "rope_type": "default"}},
        },
        "seed": 603,
    },
    # Of the four frequencies, YaRN leaves one, blends one and divides two; it also
    # scales the rotary cosines and sines by 0.1 ln(factor) + 1.
    "qwen2_yarn": {
        "config": {
            **QWEN2,
            "intermediate_size": 16,
            "max_position_embeddings": 128,
            "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32, "type": "yarn"},
            "rope_theta": 500.0,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            "transformers_version": V4,
            "use_sliding_window": False,
        },
        "knobs": {
            "rope_scaling": {"rope_scaling": None},
            "rope_scaling (attention factor)": {
                "rope_scaling": {
                    "attention_factor": 1.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                    "type": "yarn",
                }
            },
            "rope_scaling (truncation)": {
                "rope_scaling": {
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                    "truncate": False,
                    "type": "yarn",
                }
            },
        },
        "seed": 516,
    },
    "llama_linear_sharded": {
        "config": {
            **LLAMA,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_scaling": {"factor": 2.0, "type": "linear"},
            "rope_theta": 10000.0,
            "torch_dtype": "bfloat16",
            "transformers_version": V4,
        },
        "knobs": {"rope_scaling": {"rope_scaling": None}},
        "seed": 701,
        "shards": 3,
    },
}


def tensor_shapes(config):
    """Name -> shape of every tensor of the checkpoint, in the model's order."""
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    qwen2 = config["model_type"] == "qwen2"
    qkv_bias = qwen2 or config.get("attention_bias", False)
    out_bias = not qwen2 and config.get("attention_bias", False)
    mlp_bias = config.get("mlp_bias", False)

    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}

    def linear(name, rows, columns, bias):
        shapes[name + ".weight"] = (rows, columns)
        if bias:
            shapes[name + ".bias"] = (rows,)

    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes[at + "input_layernorm.weight"] = (hidden,)
        linear(at + "self_attn.q_proj", heads * head_dim, hidden, qkv_bias)
        linear(at + "self_attn.k_proj", kv_heads * head_dim, hidden, qkv_bias)
        linear(at + "self_attn.v_proj", kv_heads * head_dim, hidden, qkv_bias)
        linear(at + "self_attn.o_proj", hidden, heads * head_dim, out_bias)
        if config["model_type"] == "qwen3":
            shapes[at + "self_attn.q_norm.weight"] = (head_dim,)
            shapes[at + "self_attn.k_norm.weight"] = (head_dim,)
        shapes[at + "post_attention_layernorm.weight"] = (hidden,)
        linear(at + "mlp.gate_proj", mlp, hidden, mlp_bias)
        linear(at + "mlp.up_proj", mlp, hidden, mlp_bias)
        linear(at + "mlp.down_proj", hidden, mlp, mlp_bias)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def random_weights(config, rng, embed_std):
    """Random tensors in the checkpoint's own type."""
    dtype = getattr(torch, config.get("dtype") or config["torch_dtype"])
    weights = {}
    for name, shape in tensor_shapes(config).items():
        values = rng.standard_normal(shape)
        if name.endswith("norm.weight"):
            values = 1 + 0.2 * values
        elif name.endswith(".bias"):
            values = 0.5 * values
        elif name == "model.embed_tokens.weight":
            values = embed_std * values
        elif name == "lm_head.weight":
            values = 2 / shape[1] ** 0.5 * values
        else:
            values = 1.5 / shape[1] ** 0.5 * values
        if name == "model.norm.weight" and config["tie_word_embeddings"]:
            # Tied to embeddings of spread 1, the logits would spread by sqrt(hidden). The
            # signs keep the head from naming the input token again and again.
            values = 2 / config["hidden_size"] ** 0.5 * values * rng.choice([-1, 1], shape)
        weights[name] = torch.from_numpy(values).to(dtype)
    return weights


def save_weights(directory, weights, shards):
    """model.safetensors, or `shards` files of about the same size and an index."""
    if shards == 1:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return
    total = sum(w.nbytes for w in weights.values())
    files = [{} for _ in range(shards)]
    weight_map, before = {}, 0
    for name, tensor in weights.items():
        shard = before * shards // total
        files[shard][name] = tensor
        weight_map[name] = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        before += tensor.nbytes
    for shard, tensors in enumerate(files):
        path = directory / f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_config(directory, config):
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load(directory):
    """The model as transformers reads it from the files, upcast to float64."""
    model, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), f"{directory}: {info}"
    return model.eval()


def logits_of(model, tokens):
    """Logits at every position, without a KV cache."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


def greedy(model, prompt):
    """Greedy continuation, the whole sequence recomputed for each token."""
    tokens = list(prompt)
    for _ in range(GREEDY_TOKENS):
        tokens.append(int(logits_of(model, tokens)[-1].argmax()))
    return tokens


def cached_logits(model, tokens, prompt_length):
    """Logits at every position: the prompt at once, the rest token by token over a KV cache."""
    cache = DynamicCache(config=model.config)
    steps = [tokens[:prompt_length]] + [[token] for token in tokens[prompt_length:]]
    return torch.cat([model(torch.tensor([step]), cache=cache).logits[0] for step in steps])


def reference_case(model, prompt):
    tokens = greedy(model, prompt)
    logits = logits_of(model, tokens[:-1])
    cached = cached_logits(model, tokens[:-1], len(prompt))
    off = (logits - cached).abs().max().item()
    assert off < CACHE_AGREES, f"with and without a KV cache: {off}"
    logprobs = logits.log_softmax(-1)

    def digits(values):
        return [round(float(v), 6) for v in values]

    chosen = [logprobs[i, token] for i, token in enumerate(tokens[1:])]
    ahead = len(prompt) - 1  # predictions that fall within the prompt
    top = logprobs[ahead:].topk(5)
    best = logits[ahead:].topk(2).values
    assert top.indices[:, 0].tolist() == tokens[len(prompt) :]
    return {
        "prompt": prompt,
        "prompt_logprobs": digits(chosen[:ahead]),
        "greedy": tokens[len(prompt) :],
        "logprobs": digits(chosen[ahead:]),
        "margins": digits(best[:, 0] - best[:, 1]),
        "top5": [
            [[i, v] for i, v in zip(indices, digits(values))]
            for indices, values in zip(top.indices.tolist(), top.values)
        ],
    }


def check_knobs(directory, family, model, prompt):
    """Each knob must change the log-probabilities of the prompt."""
    expected = logits_of(model, prompt).log_softmax(-1)
    for name, changes in family["knobs"].items():
        with tempfile.TemporaryDirectory() as temporary:
            other = Path(temporary)
            for path in directory.glob("model*"):
                (other / path.name).write_bytes(path.read_bytes())
            config = {**BASE, **family["config"], **copy.deepcopy(changes)}
            write_config(other, config)
            change = (logits_of(load(other), prompt).log_softmax(-1) - expected).abs().max().item()
        print(f"    {name}: changes log-probabilities by up to {change:.3f}")
        assert change > KNOB_BITES, f"{directory}: {name} does nothing"


def make(directory, family):
    directory.mkdir(parents=True, exist_ok=True)
    config = {**BASE, **family["config"]}
    rng = np.random.default_rng(family["seed"])
    weights = random_weights(config, rng, family.get("embed_std", 1.0))
    write_config(directory, config)
    save_weights(directory, weights, family.get("shards", 1))

    # Ids 0 to 5 are kept for special tokens.
    prompts = [rng.integers(6, VOCAB, length).tolist() for length in PROMPT_LENGTHS]
    model = load(directory)
    reference = {
        "model": directory.name,
        "computed": "transformers, float64, weights upcast, eager attention, no KV cache",
        "cases": [reference_case(model, prompt) for prompt in prompts],
    }
    (directory / "reference.json").write_text(json.dumps(reference, separators=(",", ":")) + "\n")

    variety = [len(set(case["greedy"])) for case in reference["cases"]]
    assert min(variety) >= VARIETY, f"{directory}: greedy output repeats itself, take another seed: {variety}"
    size = sum(path.stat().st_size for path in directory.iterdir())
    margins = sorted(m for case in reference["cases"] for m in case["margins"])
    print(
        f"{directory.name}: {size} bytes; distinct tokens of {GREEDY_TOKENS}: {variety};"
        f" margins: least {margins[0]:.4f}, median {margins[len(margins) // 2]:.2f}"
    )
    check_knobs(directory, family, model, prompts[-1])


def main():
    parser = argparse.ArgumentParser(description="Write tiny checkpoints and their references.")
    parser.add_argument("out", type=Path, help="directory to write the families into")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    disable_progress_bar()
    with torch.no_grad():
        for name, family in FAMILIES.items():
            make(out / name, family)


if __name__ == "__main__":
    main()
