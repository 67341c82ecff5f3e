"""The text is the target's own: every family, block sizes 1 to 16, any draft, stops and limits at any place of a block, ties of bfloat16, and the distribution of what is sampled."""
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import stream_generate as mlx_stream_generate
from mlx_lm.models.cache import make_prompt_cache

from test_speculate import N, PROMPT, FakeDraft, check_state, drafts_for, family, ids, tokens_of
from vllm_mlx.acceptance import Sampling, chi_square
from vllm_mlx.dflash import tiny_draft
from vllm_mlx.models import TINY_FAMILIES, tiny_model
from vllm_mlx.specprefill import SpecPrefill
from vllm_mlx.speculate import SpecCache, SpecStats, stream_generate


@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_block_sizes_1_to_16(name, family, ids):
    model, want = family(name)
    kinds = drafts_for(model, PROMPT + want)
    for size in range(1, 17):
        for kind, n in (("oracle", N), (("wrong", "repeating", "untrained", "mask", "some")[size % 5], 7)):
            stats = SpecStats()
            assert tokens_of(stream_generate(model, kinds[kind], ids, PROMPT, max_tokens=n, block_size=size, stats=stats)) == want[:n], (kind, size)
            assert set(stats.block_sizes) <= set(range(2, size + 1)) and stats.tokens_per_round <= size
            if kind == "oracle" and size > 1: assert stats.rounds + stats.plain_steps == -(-(N - 1) // size)     # the first token is the prompt's; every block is full


def test_stops_and_limits_at_every_place_of_a_block(family, ids):
    for name in ("qwen3_5", "gemma3"):
        model, want = family(name)
        draft = drafts_for(model, PROMPT + want)["oracle"]
        for k in range(1, 10):
            cache = SpecCache(model, draft)
            assert tokens_of(stream_generate(model, draft, ids, PROMPT, max_tokens=k, block_size=6, prompt_cache=cache)) == want[:k]
            check_state(model, cache, draft, want[:k])
            if want[k] in want[:k]: continue
            cache = SpecCache(model, draft)
            got = list(stream_generate(model, draft, ids, PROMPT, max_tokens=N, block_size=6, stop_tokens=[want[k]], prompt_cache=cache))
            assert tokens_of(got) == want[:k + 1] and got[-1].finish_reason == "stop"
            check_state(model, cache, draft, want[:k + 1])


@pytest.mark.parametrize("name", [n for n in TINY_FAMILIES if n != "gpt_oss" or mx.default_device() == mx.gpu])     # MLX's gathered products take float32 alone on a CPU
def test_bfloat16_differs_at_ties_alone(name, ids):
    "Where the texts part, the target's two choices are as near as bfloat16 can tell; row by row they never part."
    model = tiny_model(name, dtype=mx.bfloat16)
    want = tokens_of(mlx_stream_generate(model, ids, mx.array(PROMPT), N))
    text = PROMPT + want + [0] * 20
    for draft, size in ((FakeDraft(text.__getitem__), 8), (tiny_draft(model), 5)):
        got = tokens_of(stream_generate(model, draft, ids, PROMPT, max_tokens=N, block_size=size))
        i = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), None)
        if i is not None:
            row = model(mx.array([PROMPT + want[:i]]))[0, -1].astype(mx.float32)
            assert abs(row[want[i]] - row[got[i]]).item() <= 4 * 2**-8 * mx.abs(row).max().item(), (i, size)
        assert tokens_of(stream_generate(model, draft, ids, PROMPT, max_tokens=10, block_size=size, exact=True)) == want[:10]


def test_a_prefix_that_mlx_lm_has_read(family, ids):
    "The draft knows nothing of the prefix: its context begins in the middle, at the right positions."
    for name in ("llama", "qwen3_5", "gemma3"):
        model, want = family(name)
        for draft in (tiny_draft(model), FakeDraft((PROMPT + want + [0] * 20).__getitem__)):
            cache = make_prompt_cache(model)
            model(mx.array([PROMPT[:20]]), cache=cache)
            ours, stats = SpecCache(model, draft, cache), SpecStats()
            assert tokens_of(stream_generate(model, draft, ids, PROMPT[20:], max_tokens=N, block_size=5, prompt_cache=ours, stats=stats)) == want[:N]
            assert stats.prompt_tokens == 10 and ours.position == 30 + N
            if isinstance(draft, FakeDraft): assert ours.context.positions[0] == 20


def test_sparse_prefill_with_a_quantised_cache_and_in_a_second_turn(family, ids):
    model, _ = family("qwen3_5")
    rng = np.random.default_rng(5)
    prompt, turn = rng.integers(1, 500, 300).tolist(), rng.integers(1, 500, 200).tolist()
    sp, kv = SpecPrefill(model, threshold=0, keep_pct=0.5), dict(kv_bits=8, kv_group_size=32, quantized_kv_start=0)
    want = tokens_of(sp.stream_generate(ids, prompt, max_tokens=10, **kv))
    for draft in (None, tiny_draft(model)): assert tokens_of(stream_generate(model, draft, ids, prompt, max_tokens=10, sparse=sp, block_size=4, **kv)) == want
    texts = []
    for draft in (None, tiny_draft(model)):
        cache = SpecCache(model, draft)
        texts.append([tokens_of(stream_generate(model, draft, ids, p, max_tokens=6, sparse=sp, block_size=4, prompt_cache=cache)) for p in (prompt, turn)])
        assert cache.position == 512 and (draft is None or cache.context.offset + cache.pending == 512)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("proposal, kind", (("sampled", "mismatched"), ("sampled", "one-hot"), ("shared", "mismatched"), ("greedy", "one-hot")))
def test_the_loops_own_distribution(proposal, kind, ids):
    "Tokens 2 and 3 of a text, given the first, from blocks of three through the whole loop; top-k 2 leaves few outcomes, whose probabilities the model itself gives."
    model = tiny_model("llama", num_hidden_layers=1)
    s, prompt = Sampling(temperature=1.2, top_k=2, seed=0), PROMPT[:3]
    rng = np.random.default_rng(5)
    table = {}
    def probs(tokens):
        if tokens not in table: table[tokens] = np.exp(np.array(s.log_probs(model(mx.array([[*prompt, *tokens]]))[0, -1:]), np.float64))[0]
        return table[tokens]
    firsts = [t for t in np.nonzero(probs(()))[0].tolist()]
    likely = sorted({t for a in firsts for t in np.nonzero(probs((a,)))[0].tolist()})
    row = 3 * rng.normal(size=512).astype(np.float32) + 0
    row[likely] += 6 if kind == "mismatched" else 0
    if kind == "one-hot": row = 30 * (np.arange(512) == likely[0]).astype(np.float32)
    draft, counts, runs, accepted = FakeDraft(lambda i: row, block_size=3, layers=(0,)), Counter(), 400, 0
    draft.extend = lambda features, cache, positions: cache.positions.extend(map(int, positions))
    for seed in range(runs):
        stats = SpecStats()
        counts[tuple(tokens_of(stream_generate(model, draft, ids, prompt, max_tokens=4, block_size=3, temperature=1.2, top_k=2, seed=seed, proposal=proposal, stats=stats)))[:3]] += 1
        accepted += stats.accepted
    want = {(a, b, c): probs(())[a] * probs((a,))[b] * probs((a, b))[c] for a in firsts for b in np.nonzero(probs((a,)))[0].tolist() for c in np.nonzero(probs((a, b)))[0].tolist()}
    assert set(counts) <= set(want) and sum(want.values()) == pytest.approx(1)
    assert chi_square([counts[k] for k in want], [want[k] for k in want]) < 3.6                # 7 degrees: a chance of 0.0007
    assert 0 < accepted < 2 * runs                                                              # both ways were gone
