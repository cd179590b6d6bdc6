"""A folder of a tiny Qwen2-VL of random weights, with what reads its text and images."""

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from tiny_models import with_random_weights
from vlm_models import IMAGE, IMAGE_START, VIDEO, whole_vlm_model

VOCABULARY = 128
# Tokens after the letters, which begin at the code of a blank.
SPECIAL = {
    "<|im_end|>": 119,
    "<|image_pad|>": IMAGE,
    "<|video_pad|>": VIDEO,
    "<|vision_start|>": IMAGE_START,
    "<|vision_end|>": 123,
}
TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
# Smallest and largest images, in pixels: 4 to 16 tokens.
PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}


def write_vlm_folder(folder: Path) -> None:
    """Write the model, its tokenizer of characters, and how it sees images."""
    model, config = whole_vlm_model("qwen2_vl", VOCABULARY, vision_config={"hidden_size": 128})
    weights = dict(tree_flatten(with_random_weights(model).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    fields = {**config, "eos_token_id": SPECIAL["<|im_end|>"]}
    (folder / "config.json").write_text(json.dumps(fields))
    sizes = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "size": PIXELS}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes))
    letters = {chr(code): i for i, code in enumerate(range(0x20, 0x20 + min(SPECIAL.values())))}
    tokenizer = Tokenizer(BPE(letters | SPECIAL, [], unk_token="?"))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
