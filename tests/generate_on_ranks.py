"""What a model generates by each of some settings, on every rank: a program for mlx.launch."""

import json
import sys

import mlx.core as mx
from mlx_lm.generate import generate_step

import mlx_h2o

PROMPT = mx.array([i * 7 % 500 for i in range(200)])

model, _ = mlx_h2o.load("builtin:recall-4m")
if mx.distributed.init().size() > 1:
    model.shard()
told = []
for settings in json.loads(sys.argv[1]):
    cache = mlx_h2o.make_prompt_cache(model, **settings)
    tokens = generate_step(PROMPT, model, max_tokens=40, prompt_cache=cache, prefill_step_size=64)
    said = [int(token) for token, _ in tokens]
    rows = [cache[0].slots(run).positions[0, :, : run.length] for run in cache[0].store.runs]
    kept = [sorted(row) for of_run in rows for row in of_run.tolist()]
    told.append({"said": said, "kept": kept, "budgets": [list(entry.budgets) for entry in cache]})
if len(sys.argv) > 2:
    mlx_h2o.save_prompt_cache(f"{sys.argv[2]}.{mx.distributed.init().rank()}.safetensors", cache)
print(json.dumps({"rank": mx.distributed.init().rank(), "told": told}), flush=True)
