"""Damaged GGUF files, and what reading and running one must not do.

Run as a program in a process of its own, since what is looked for ends it, or never ends:
`gguf_mutants.py FOLDER SEED COUNT`.
"""

import random
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np

from gguf_files import F32, Q4_1, Q8_0, write_gguf
from mlx_h2o.loading import gguf
from mutants import judge

HIDDEN, HEADS, KV_HEADS, INNER = 64, 4, 2, 32
BYTES = [chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 256)]]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTES, "Ġ", "Ċ", "al", "Ġal"]
METADATA = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "llama.embedding_length": HIDDEN,
    "llama.block_count": 2,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5000.0,
    "llama.context_length": 256,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(TOKENS) - 3),
    "tokenizer.ggml.merges": ["a l", "Ġ al"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
}
SHAPES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
    "attn_norm": (HIDDEN,),
    "ffn_norm": (HIDDEN,),
}
SMALL = [0, 1, 2, 3, 7, 9, 31, 33, 255]
LARGE = [2**n + d for n in (8, 16, 20, 31, 32, 40, 48, 61, 62, 63) for d in (-1, 0, 1)] + [
    2**64 - 1
]


def arrays(kind: int) -> dict[str, tuple[np.ndarray, int]]:
    """A model's arrays, its matrices of one kind."""
    rng = np.random.default_rng(kind)
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    shapes |= {f"blk.{layer}.{name}": shape for layer in (0, 1) for name, shape in SHAPES.items()}
    return {
        f"{name}.weight": (
            rng.normal(0, 0.1, shape).astype(np.float32),
            kind if len(shape) == 2 else F32,
        )
        for name, shape in shapes.items()
    }


def places(content: bytes) -> list[tuple[int, int, str]]:
    """Where the header has numbers: offset, bytes, and what each says."""
    found = [(4, 4, "version"), (8, 8, "arrays"), (16, 8, "entries")]
    for key, value in METADATA.items():
        at = content.index(key.encode())
        behind = at + len(key)
        found += [(at - 8, 8, f"length of {key}"), (behind, 4, f"type of {key}")]
        if isinstance(value, list):
            found += [(behind + 4, 4, f"items of {key}"), (behind + 8, 8, f"length of {key}")]
            found.append((behind + 16, 8, f"first of {key}"))
        else:
            found.append((behind + 4, 8 if isinstance(value, str) else 4, f"value of {key}"))
    for name, (array, _) in arrays(F32).items():
        at = content.index(name.encode())
        behind, axes = at + len(name), array.ndim
        found += [(at - 8, 8, f"length of {name}"), (behind, 4, f"axes of {name}")]
        found += [(behind + 4 + 8 * i, 8, f"axis {i} of {name}") for i in range(axes)]
        found += [(behind + 4 + 8 * axes, 4, f"type of {name}")]
        found += [(behind + 8 + 8 * axes, 8, f"offset of {name}")]
    return found


def mutant_of(content: bytes, rng: random.Random) -> tuple[str, bytes]:
    """A damaged file, and what was done to it."""
    kind = rng.choice(["number"] * 5 + ["bits", "cut", "key", "longer", "array"])
    changed = bytearray(content)
    if kind == "number":
        at, size, what = rng.choice(places(content))
        old = int.from_bytes(changed[at : at + size], "little")
        near = [old - 1, old + 1, 2 * old, old // 2, old + 32]
        value = rng.choice([*SMALL, *LARGE, *near]) % 2 ** (8 * size)
        changed[at : at + size] = value.to_bytes(size, "little")
        return f"{what}: {old} -> {value}", bytes(changed)
    if kind == "bits":
        for _ in range(rng.randint(1, 6)):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return kind, bytes(changed)
    if kind == "cut":
        length = rng.choice([rng.randrange(64), rng.randrange(len(changed))])
        return f"cut to {length}", bytes(changed[:length])
    if kind == "key":
        key = rng.choice(list(METADATA))
        at = content.index(key.encode())
        changed[at + len(key) - 1] ^= 1
        return f"without {key}", bytes(changed)
    if kind == "array":
        name = rng.choice(list(arrays(F32)))
        at = content.index(name.encode())
        changed[at + rng.randrange(len(name))] ^= 1
        return f"without {name}", bytes(changed)
    at = rng.randrange(len(changed))
    return f"longer at {at}", bytes(changed[:at]) + rng.randbytes(rng.randint(1, 40)) + content[at:]


def run(loaded: tuple[object, object]) -> None:
    model, tokenizer = loaded
    ids = tokenizer.encode("al 12 al")
    tokenizer.decode(ids)
    mx.eval(model(mx.array([[*ids, 0, 5]])))


def main() -> None:
    folder, rng, count = Path(sys.argv[1]), random.Random(int(sys.argv[2])), int(sys.argv[3])
    mx.set_default_device(mx.cpu)
    path = folder / "mutant.gguf"
    files = []
    for kind in (F32, Q4_1, Q8_0):
        write_gguf(path, METADATA, arrays(kind))
        files.append(path.read_bytes())
        run(gguf.load(path))  # what is whole, is read and runs
    ran = 0
    for number in range(count):
        what, content = mutant_of(rng.choice(files), rng)
        path.unlink()  # MLX may still look into the one before
        path.write_bytes(content)
        ran += judge(f"{number} {what}", lambda: gguf.load(path), run)
    print(f"{ran} ran", flush=True)


if __name__ == "__main__":
    main()
