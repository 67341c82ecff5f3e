"The drafts that are shipped, on their programs: every stage, and the loop."
import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("coremltools", reason="not available here: pip install 'coremltools>=9.0,<10'")
from vllm_mlx.ane.draft import ANEDraftModel
from vllm_mlx.ane.interpreter import compare_stages
from vllm_mlx.dflash import DRAFTS, default_draft, load_dflash
from vllm_mlx.models import load
from vllm_mlx.speculate import SpecStats, stream_generate
from vllm_mlx.train_data import target_features

SHIPPED = [n for n, d in DRAFTS.items() if default_draft(d["target"]) == n]
TEXT = 'def read_lines(path):\n    """Return the lines of a file, without their ends."""\n    with open(path) as f: return f.read().splitlines()\n'
TOKENS = 12

@pytest.fixture(scope="module", params=SHIPPED)
def shipped(request):
    "(target, tokenizer, draft, text in tokens, what plain decoding writes after it)"
    target, tokenizer = load(DRAFTS[request.param]["target"])
    tokens = tokenizer.encode(TEXT)
    return target, tokenizer, load_dflash(request.param, target), tokens, [r.token for r in stream_generate(target, None, tokenizer, tokens, max_tokens=TOKENS)]

@pytest.mark.parametrize("weights, most", [("fp16", 0.01), ("q8", 0.06)])
def test_every_shipped_draft(shipped, weights, most, tmp_path):
    "Each program against the MLX draft's stage; in the loop, the target's own text, at a rate that the precision hardly changes."
    target, tokenizer, draft, tokens, plain = shipped
    model = ANEDraftModel(draft, "reference", context=64, folder=tmp_path)
    (model.load_weights if weights == "fp16" else model.load_weights_q8)()
    features = target_features(target, np.array([tokens[:-1]], np.int32), draft.config.target_layer_ids)[:, :64]
    errors = compare_stages(model.programs, draft, draft.embed(draft.block(tokens[features.shape[1]])), features)
    assert max(errors.values()) < most, max(errors, key=errors.get)
    stats = SpecStats()
    assert [r.token for r in stream_generate(target, model, tokenizer, tokens, max_tokens=TOKENS, block_size=draft.config.block_size, stats=stats)] == plain
    assert stats.rounds and model.ran == "reference float16"
