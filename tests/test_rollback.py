"Rollback: every count of every block, over mlx-lm's families, against a fresh forward over the accepted tokens."
import copy, gc, importlib, threading
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import gated_delta, qwen3_5
from mlx_lm.models.cache import (ArraysCache, BatchKVCache, BatchRotatingKVCache, CacheList, ChunkedKVCache, ConcatenateKVCache, KVCache, QuantizedKVCache,
                                 RotatingKVCache, make_prompt_cache)
from vllm_mlx import rollback as rb
from vllm_mlx.gdn import fast_gdn
from vllm_mlx.models import tiny_model
from vllm_mlx.rollback import (Recording, Records, _advance_gated_delta_states_python, advance_gated_delta_states, batch_cache, cache_leaves, put_back, rollback,
                               rollback_by_rerun, rollback_linear_caches, take_snapshot)
from vllm_mlx.sparse_prefill import SparseKVCache, sparse_prefill

BASE = dict(vocab_size=64, hidden_size=32, num_hidden_layers=4, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5,
            norm_eps=1e-5, layer_norm_epsilon=1e-5, rope_theta=10000., max_position_embeddings=4096, tie_word_embeddings=True, attention_bias=False)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True)
DELTA = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, linear_conv_kernel_dim=4)
SSM = dict(mamba_n_heads=4, mamba_d_head=8, mamba_d_state=16, mamba_d_conv=4, mamba_n_groups=2)
MAMBA = dict(state_size=16, conv_kernel=4, use_bias=False, use_conv_bias=True, time_step_rank=4)
FAMILIES = {     # name: (mlx-lm module, fields besides BASE, how its recurrent layers are replayed)
    'qwen3_next': ('qwen3_next', dict(DELTA, decoder_sparse_step=1, shared_expert_intermediate_size=16, mlp_only_layers=[], partial_rotary_factor=.5,
                                      full_attention_interval=2, **MOE), 'gdn'),
    'kimi_linear': ('kimi_linear', dict(linear_attn_config=dict(num_heads=2, head_dim=8, short_conv_kernel_size=4, kda_layers=[1, 2, 3], full_attn_layers=[4]), kv_lora_rank=16,
                                        model_max_length=512, num_experts=0, moe_intermediate_size=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8), 'gdn'),
    'olmo_hybrid': ('olmo_hybrid', dict(DELTA, linear_allow_neg_eigval=True), 'gdn'),
    'mamba2': ('mamba2', dict(MAMBA, num_heads=4, head_dim=8, n_groups=2, time_step_limit=[0., 100.]), 'mamba2'),
    'falcon_h1': ('falcon_h1', dict(SSM, mamba_d_ssm=32), 'mamba2'),
    'granitemoehybrid': ('granitemoehybrid', dict(SSM, mamba_proj_bias=False, mamba_conv_bias=True, shared_intermediate_size=48, embedding_multiplier=1., attention_multiplier=.3,
                                                  logits_scaling=1., residual_multiplier=1., layer_types=['mamba', 'attention'] * 2), 'mamba2'),
    'plamo2': ('plamo2', dict(hidden_size_per_head=8, mamba_d_state=16, mamba_num_heads=4, mamba_step=2), 'mamba2'),
    'lfm2': ('lfm2', dict(conv_bias=False, conv_L_cache=3, block_dim=32, block_ff_dim=48, block_multiple_of=16, block_ffn_dim_multiplier=1.,
                          block_auto_adjust_ff_dim=False, full_attn_idxs=[1, 3]), 'conv'),
    'mamba': ('mamba', MAMBA, 'calls'),
    'jamba': ('jamba', dict(attn_layer_offset=1, attn_layer_period=2, expert_layer_offset=1, expert_layer_period=2, mamba_d_conv=4, mamba_d_state=8, mamba_expand=2,
                            num_experts=1, num_experts_per_tok=1), 'calls'),
    'rwkv7': ('rwkv7', dict(a_low_rank_dim=8, v_low_rank_dim=8, gate_low_rank_dim=8, decay_low_rank_dim=8), 'calls'),
    'recurrent_gemma': ('recurrent_gemma', dict(conv1d_width=4, logits_soft_cap=30., attention_window_size=16, block_types=['recurrent', 'recurrent', 'attention']), 'calls'),
    'bailing_moe_linear': ('bailing_moe_linear', dict(MOE, num_shared_experts=1, first_k_dense_replace=4, layer_group_size=2, group_norm_size=1), 'calls'),
}
TINY = dict(qwen3_5='gdn', nemotron_h='mamba2', gemma3=None, gpt_oss=None)
ALL = [*TINY, *FAMILIES]

def small(family, args, kind=None):
    module = importlib.import_module(f'mlx_lm.models.{family}')
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(dict(BASE, model_type=family) | args))
    def random(p):
        if not mx.issubdtype(p.dtype, mx.floating): return p
        return p + (0.2 * mx.random.normal(p.shape) if p.ndim < 3 else 0.5 * mx.random.normal(p.shape))
    model.update(tree_map(random, model.parameters()))
    mx.eval(model.parameters())
    return model

def the(name): return tiny_model(name) if name in TINY else small(*FAMILIES[name])
def kind_of(name): return TINY[name] if name in TINY else FAMILIES[name][2]
def text(n, B=1, seed=0, vocab=64): return mx.array(np.random.default_rng(seed).integers(0, vocab, (B, n)))

def contents(leaf, row=slice(None)):
    "What a leaf says, without what its buffers hold beyond."
    if isinstance(leaf, ArraysCache): return [*leaf.cache, leaf.left_padding, leaf.lengths]
    if isinstance(leaf, RotatingKVCache): return [None, None, leaf.offset] if leaf.keys is None else [leaf._temporal_order(leaf.keys), leaf._temporal_order(leaf.values), leaf.offset]
    if leaf.keys is None: return [None, None, leaf.offset]
    return [*(a for _, a in tree_flatten(leaf.keys_and_values())), leaf.offset]

def close(a, b, tolerance=1e-5):
    if a is None or b is None: assert a is None and b is None; return
    if isinstance(a, int): assert a == b; return
    assert a.shape == b.shape and a.dtype == b.dtype
    if a.size: assert mx.abs(a - b).max().item() <= tolerance * max(1, mx.abs(b).max().item())

def same_cache(a, b, tolerance=1e-5):
    a, b = cache_leaves(a), cache_leaves(b)
    assert len(a) == len(b)
    for (_, x), (_, y) in zip(a, b):
        for p, q in zip(contents(x), contents(y)): close(p, q, tolerance)

def fed(model, *parts):
    cache = make_prompt_cache(model)
    for p in parts:
        if p.shape[1]: out = model(p, cache=cache)
    mx.eval([vars(leaf) for _, leaf in cache_leaves(cache)])
    return cache

def blocks(model, cache, tokens):
    with Recording(model, cache, tokens.shape) as rec: out = rec.model(tokens, cache=cache)
    return out, rec.records

def relative(a, b): return (mx.abs(a - b).max() / mx.maximum(1, mx.abs(b).max())).item()

def check(model, start, lengths, counts):
    """Blocks after `start` (list of lengths), cut to `counts(L)`. A matrix product over 16 rows rounds unlike one over 2, so a forward over the whole block
    and one over its first n tokens differ before anything is rolled back, in logits and keys; that difference is allowed, and 1e-5."""
    past, block, then = [text(n, seed=i) for i, n in enumerate(start)], text(max(lengths), seed=9), text(3, seed=10)
    past_cache = take_snapshot(cache := fed(model, *past))
    def again(): put_back(past_cache); return cache
    def fresh(n):
        c = fed(model, *past)
        logits = model(block[:, :n], cache=c) if n else None
        return copy.deepcopy(c), logits, model(then, cache=copy.deepcopy(c)), model(then[:, :1], cache=c)
    wanted = {n: fresh(n) for n in sorted({n for L in lengths for n in counts(L)})}
    for L in lengths:
        for n in counts(L):
            out, records = blocks(model, again(), block[:, :L])
            c, logits, *after = wanted[n]
            pairs = [(a.keys[..., :b.offset, :], b.keys[..., :b.offset, :]) for a, b in zip(cache, c) if type(a) is KVCache and b.keys is not None]
            own = max((relative(a, b) for a, b in [(out[:, :n], logits), *pairs]), default=0) if n else 0
            allowed = 1e-5 + own
            rollback(cache, records, n)
            same_cache(cache, c, allowed)
            close(model(then, cache=copy.deepcopy(cache)), after[0], 2 * allowed)
            close(model(then[:, :1], cache=cache), after[1], 2 * allowed)

@pytest.mark.parametrize('name', ALL)
def test_every_family(name):
    model = the(name)
    cache = fed(model, text(4))
    out, records = blocks(model, cache, text(5, seed=9))
    assert mx.array_equal(out, model(text(5, seed=9), cache=fed(model, text(4))))             # recording changes no bit
    kinds = {r.kind for r in records.values()}
    assert kinds == ({kind_of(name)} if kind_of(name) else set())
    for start in ([], [7], [20, 1]):                                                           # empty, filled; after 20 + 1 a window of 16 has wrapped
        check(model, start, (1, 2, 5, 16) if start == [7] else (1, 2, 5), lambda L: range(L + 1) if L < 16 else (2, 9))

@pytest.mark.parametrize('name', ['qwen3_5', 'gemma3'])
def test_every_length(name):
    model = tiny_model(name, num_hidden_layers=3)
    for start in ([], [14], [18, 1]): check(model, start, range(1, 17), lambda L: range(L + 1) if start == [14] else sorted({0, 1, 3, L // 2, L - 1, L} & set(range(L + 1))))

# ---- many blocks, batches, padding

@pytest.mark.parametrize('name', ['qwen3_5', 'gemma3', 'nemotron_h', 'lfm2', 'falcon_h1', 'mamba', 'recurrent_gemma'])
def test_blocks_in_a_row(name):
    "Block after block, each cut to something else, as a decoder does; against one fresh forward for each kept piece."
    model, rng = the(name), np.random.default_rng(0)
    cache, fresh = make_prompt_cache(model), make_prompt_cache(model)
    for i in range(12):
        L = int(rng.integers(1, 8)); n = int(rng.integers(0, L + 1))
        block = text(L, seed=i)
        _, records = blocks(model, cache, block)
        rollback(cache, records, n)
        if n: model(block[:, :n], cache=fresh)
    same_cache(cache, fresh, 2e-4)
    a, b = (model(text(2), cache=c) for c in (cache, fresh))
    close(a, b, 2e-4)
    assert (a.argmax(-1) == b.argmax(-1)).all().item()

BATCHED = ['qwen3_5', 'gemma3', 'nemotron_h', 'qwen3_next', 'lfm2', 'falcon_h1', 'granitemoehybrid']

@pytest.mark.parametrize('name', BATCHED)
def test_rows_of_their_own(name):
    "Three rows, several blocks, each row cut to its own count; each row against itself alone."
    model, rng = the(name), np.random.default_rng(1)
    past = text(18, 3, seed=1)
    cache = batch_cache(model, [0, 0, 0])
    model(past, cache=cache)
    alone = [fed(model, past[i:i + 1]) for i in range(3)]
    for i, kept in enumerate(([3, 0, 5], [1, 1, 0], [0, 4, 2], [5, 5, 5], [0, 1, 0], [2, 2, 2])):
        block = text(1 if max(kept) < 2 else 5, 3, seed=10 + i)
        _, records = blocks(model, cache, block)
        rollback(cache, records, kept)
        for row, n in enumerate(kept):
            if n: model(block[row:row + 1, :n], cache=alone[row])
    for L in (3, 1, 1):
        then = text(L, 3, seed=L)
        out = model(then, cache=cache)
        for row in range(3): close(out[row:row + 1], model(then[row:row + 1], cache=alone[row]), 3e-4)

@pytest.mark.parametrize('name', ['qwen3_5', 'gemma3'])
def test_left_padding(name):
    "Prompts of different lengths, padded in front; the block is the first thing fed after them, or the prompt itself is the block."
    model = the(name)
    for inside in (False, True):
        cache, past, block = batch_cache(model, [0, 3]), text(9, 2, seed=1), text(6, 2, seed=2)
        rows = [past[:1], past[1:, 3:]]
        if inside: tokens, kept = past, [7, 5]                                            # of the second row 3 are padding and 2 are kept
        else: model(past, cache=cache); tokens, kept = block, [4, 1]
        _, records = blocks(model, cache, tokens)
        rollback(cache, records, kept)
        alone = [fed(model, rows[i][:, :kept[i] - (3 if inside and i else 0)]) if inside else fed(model, rows[i], block[i:i + 1, :kept[i]]) for i in range(2)]
        for L in (4, 1):
            then = text(L, 2, seed=L)
            out = model(then, cache=cache)
            for row in range(2): close(out[row:row + 1], model(then[row:row + 1], cache=alone[row]), 1e-4)

@pytest.mark.parametrize('name', ['qwen3_5', 'nemotron_h', 'lfm2', 'kimi_linear'])
def test_lengths_inside_of_a_block(name):
    "Rows that end inside of the block (padding behind): what is kept counts only up to their end."
    model, L, lengths = the(name), 6, [6, 3]
    def started():
        cache = fed(model, text(5, 2, seed=1))
        for _, leaf in cache_leaves(cache):
            if isinstance(leaf, ArraysCache): leaf.lengths = mx.array(lengths)
        return cache
    block = text(L, 2, seed=2)
    for n in range(L + (name != 'nemotron_h')):                                              # its own forward loses the state of a row that ends early (mlx-lm 0.32.2)
        cache = started()
        _, records = blocks(model, cache, block)
        rollback(cache, records, n)
        for row in range(2):
            fresh = fed(model, text(5, 2, seed=1)[row:row + 1], block[row:row + 1, :min(n, lengths[row])])
            for (_, a), (_, b) in zip(cache_leaves(cache), cache_leaves(fresh)):
                if not isinstance(a, ArraysCache): continue
                for p, q in zip(a.cache, b.cache): close(p[row:row + 1], q, 2e-5)
                assert a.lengths.tolist() == [x - n for x in lengths]

@pytest.mark.parametrize('name', ['qwen3_5', 'gemma3', 'nemotron_h', 'lfm2', 'mamba'])
@pytest.mark.parametrize('B', [1, 3])
def test_cut_again(name, B):
    "The same block cut to fewer and fewer tokens, in rows of their own where the caches allow, is as good as one cut."
    model, rng = the(name), np.random.default_rng(B)
    for trial in range(4):
        past, block = text(18, B, seed=trial), text(6, B, seed=50 + trial)
        cache = batch_cache(model, [0] * B) if B > 1 and name != 'mamba' else make_prompt_cache(model)
        model(past, cache=cache)
        _, records = blocks(model, cache, block)
        counts = np.full(B, 6)
        for cut in range(3):
            counts = counts - rng.integers(0, 3, B)
            rollback(cache, records, counts.tolist(), keep=True)
        more = (counts + 1).tolist()
        if max(more) <= 6 and any(r.kind != 'untouched' if hasattr(r, 'kind') else True for r in records.leaves):
            with pytest.raises(ValueError, match='was already cut'): rollback(cache, records, more)
        records.release()
        for L in (2, 1):
            then = text(L, B, seed=L)
            if L == 2: alone = [fed(model, past[i:i + 1], block[i:i + 1, :n]) for i, n in enumerate(counts)]
            out = model(then, cache=cache)
            for i in range(B): close(out[i:i + 1], model(then[i:i + 1], cache=alone[i]), 1e-4)

def test_stacked(monkeypatch):
    "All layers of one shape in one call, as on a GPU."
    monkeypatch.setitem(rb.STACK, 'cpu', True)
    calls, replay = [], rb.gdn_replay
    monkeypatch.setattr(rb, 'gdn_replay', lambda *a, **k: calls.append(a[0].shape) or replay(*a, **k))
    model = tiny_model('qwen3_5')
    check(model, [7], (5,), lambda L: range(L + 1))
    assert calls == [(4, n, 1, 32) for n in range(1, 5)]                                      # 4 layers on the batch axis, cut to the accepted tokens
    check(tiny_model('nemotron_h'), [7], (5,), lambda L: range(L + 1))
    test_rows_of_their_own('qwen3_5')
    test_linear_rollback_is_the_loop_row_by_row()

@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 1000), st.booleans(), st.booleans())
def test_linear_rollback_is_the_loop_row_by_row(B, T, seed, channels, first):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: mx.array(rng.standard_normal(shape), dtype=mx.float32)
    cache, records, kept = [], {}, rng.integers(0, T + 1, B)
    for i, (Hk, Hv, Dk, Dv) in enumerate([(1, 2, 32, 16), (2, 2, 8, 24), (1, 2, 32, 16)]):            # layers of different shapes
        S = None if first else draw(B, Hv, Dv, Dk)
        k, v, g, beta, qkv = draw(B, T, Hk, Dk) / Dk ** .5, draw(B, T, Hv, Dv), mx.sigmoid(draw(B, T, Hv, *[Dk] * channels)), mx.sigmoid(draw(B, T, Hv)), draw(B, T, 6)
        conv = None if first else draw(B, 3, 6)
        cache.append(ArraysCache(2))
        cache[i].cache = [draw(B, 3, 6), draw(B, Hv, Dv, Dk)]
        records[i] = dict(initial_conv_state=conv, initial_ssm_state=S, qkv=qkv, k=k, v=v, g=g, beta=beta)
    done = [list(c.cache) for c in cache]
    rollback_linear_caches(cache, records, kept)
    for i, r in records.items():
        for row, n in enumerate(kept):
            if kept.max() == 0: assert cache[i].cache[1] is None if first else True; continue
            if n == T: assert mx.array_equal(cache[i][1][row], done[i][1][row]); continue
            S = mx.zeros(done[i][1].shape) if first else r['initial_ssm_state']
            spec = _advance_gated_delta_states_python(S[row:row + 1], *(r[x][row:row + 1, :n] for x in ('k', 'v', 'g', 'beta')))
            close(cache[i][1][row:row + 1], spec)
            old = mx.zeros((1, 3, 6)) if first else r['initial_conv_state'][row:row + 1]
            assert mx.array_equal(cache[i][0][row:row + 1], mx.concatenate([old, r['qkv'][row:row + 1, :n]], axis=1)[:, -3:])

@pytest.mark.parametrize('Dk,T', [(32, 1), (64, 7), (128, 16), (48, 5), (20, 3)])
def test_replay_forms(Dk, T):
    rng = np.random.default_rng(Dk)
    S, k, v, g, beta = (mx.array(rng.standard_normal(s), dtype=mx.float32) for s in ((2, 4, 12, Dk), (2, T, 2, Dk), (2, T, 4, 12), (2, T, 4), (2, T, 4)))
    k, g, beta = k / mx.linalg.norm(k, axis=-1, keepdims=True), mx.sigmoid(g), mx.sigmoid(beta)
    spec = gated_delta.gated_delta_ops(k, k, v, g, beta, S)[1]
    for f in (_advance_gated_delta_states_python, advance_gated_delta_states, rb.advance_gated_delta_states_metal, rb.advance_gated_delta_states_cuda):
        close(f(S, k, v, g, beta), spec)
        half = f(S.astype(mx.bfloat16), k, v, g, beta)
        assert half.dtype == mx.bfloat16

# ---- kinds of caches

def leaf_rollback(make, kept, L=5, start=9):
    draw = lambda n, seed: mx.random.normal((1, 2, n, 64), key=mx.random.key(seed))
    old, new = draw(start, 1), draw(L, 2)
    def filled(n):
        c = make()
        c.update_and_fetch(old, 2 * old)
        if n: c.update_and_fetch(new[..., :n, :], 2 * new[..., :n, :])
        return c
    c = filled(0)
    records = Records([c], (1, L))
    c.update_and_fetch(new, 2 * new)
    for r in records.leaves: r.finish(1, L)
    rollback(records.cache, records, kept)
    fresh = filled(kept)
    for x in (c, fresh): x.update_and_fetch(draw(2, 3), draw(2, 3))
    same_cache([c], [fresh], 0)

@pytest.mark.parametrize('make', [KVCache, ConcatenateKVCache, QuantizedKVCache, lambda: ChunkedKVCache(64), lambda: RotatingKVCache(12), lambda: RotatingKVCache(12, keep=4),
                                  lambda: RotatingKVCache(7), lambda: RotatingKVCache(300)], ids=['kv', 'concatenate', 'quantized', 'chunked', 'rotating', 'keep', 'small', 'large'])
def test_leaves(make):
    for kept in range(6): leaf_rollback(make, kept)
    for kept in (0, 1): leaf_rollback(make, kept, L=1)

def test_nested_lists_and_sparse_caches():
    inner = KVCache(); inner.update_and_fetch(*[mx.ones((1, 1, 4, 8))] * 2)
    sparse = SparseKVCache(inner, [0, 2, 5, 9], 12)
    rotating = RotatingKVCache(6); rotating.update_and_fetch(*[mx.ones((1, 1, 8, 8))] * 2)
    cache = [CacheList(sparse, rotating, KVCache())]
    records = Records(cache, (1, 3))
    for c in cache[0].caches: c.update_and_fetch(*[mx.zeros((1, 1, 3, 8))] * 2)
    for r in records.leaves: r.finish(1, 3)
    rollback(cache, records, 1)
    assert (sparse.offset, sparse.size(), sparse.positions().tolist()) == (13, 5, [0, 2, 5, 9, 12])
    assert (rotating.offset, cache[0][2].offset) == (9, 1)

@pytest.mark.parametrize('family', ['gemma3', 'gpt_oss'])
@pytest.mark.parametrize('kept', [[0, 1, 5, 9, 20, 31, 40, 45, 47, 49, 50, 52, 54, 56, 58, 59], [*range(11), 50, 52, 55, 59]])
@pytest.mark.parametrize('L', [1, 4, 8, 12])
def test_sparse_sliding_windows(family, kept, L):
    "After a sparse prefill a sliding window drops entries during the block: the wrapper and what it wraps go back together, by records, by snapshot and after a failure."
    model, prompt, block, after = tiny_model(family, sliding_window=64), text(60)[0], text(L, seed=3), text(5, seed=4)
    def filled():
        cache = make_prompt_cache(model)
        sparse_prefill(model, prompt, mx.array(kept), cache, carry='cache')
        for t in range(3): model(mx.array([[t + 1]]), cache=cache)
        return cache
    def close(cache, n):
        want = filled()
        if n: model(block[:, :n], cache=want)
        assert [c.offset for c in cache] == [c.offset for c in want]
        a, b = model(after, cache=cache), model(after, cache=want)
        return mx.abs(a - b).max().item() < 1e-3 * max(1, mx.abs(b).max().item())
    for n in sorted({0, 1, L // 2, L}):
        cache = filled()
        with Recording(model, cache, block.shape) as rec: rec.model(block, cache=cache)
        rollback(cache, rec.records, n)
        assert close(cache, n), n
        cache = filled(); held = take_snapshot(cache)
        model(block, cache=cache)
        rollback_by_rerun(model, cache, held, block, n)
        assert close(cache, n), n
    cache = filled()
    with pytest.raises(KeyError):
        with Recording(model, cache, block.shape) as rec:
            rec.model(block, cache=cache)
            raise KeyError
    assert close(cache, 0)

@pytest.mark.parametrize('how', ['bogus', 'metal'])
def test_a_replay_that_fails_changes_nothing(how):
    if how == 'metal' and mx.metal.is_available(): pytest.skip('there is Metal here')
    model = tiny_model('qwen3_5')
    cache, block = fed(model, text(6)), text(5)
    with Recording(model, cache, block.shape) as rec: rec.model(block, cache=cache)
    whole = take_snapshot(cache)
    with pytest.raises((ValueError, RuntimeError)): rollback(cache, rec.records, 2, how=how)
    assert all(mx.array_equal(a, b).item() for (_, x), (_, y) in zip(whole, take_snapshot(cache)) for (_, a), (_, b) in zip(tree_flatten(x), tree_flatten(y)) if isinstance(a, mx.array))
    rollback(cache, rec.records, 2)
    want = fed(model, text(6)); model(block[:, :2], cache=want)
    assert mx.allclose(model(text(3), cache=cache), model(text(3), cache=want), atol=1e-4)

# ---- the recorder

def test_nothing_is_patched():
    model = tiny_model('qwen3_5')
    names = [(n, id(a)) for n, a in tree_flatten(model.parameters())]
    classes, update = [type(m) for m in model.modules()], qwen3_5.gated_delta_update
    cache = fed(model, text(3))
    for fail in (False, True):
        try:
            with Recording(model, cache, (1, 4)) as rec:
                rec.model(text(4), cache=cache)
                assert qwen3_5.gated_delta_update is update and [type(m) for m in model.modules()] == classes
                if fail: raise KeyError
        except KeyError: pass
    assert [(n, id(a)) for n, a in tree_flatten(model.parameters())] == names and qwen3_5.gated_delta_update is update
    rec.model(text(4), cache=fed(model, text(3)))                                            # the view outlives the block and records nothing
    assert rec.records.released

@pytest.mark.parametrize('name', ['qwen3_5', 'gemma3', 'nemotron_h', 'falcon_h1', 'mamba'])
def test_a_failing_forward_leaves_the_cache(name):
    model = the(name)
    cache, held = fed(model, text(18), text(1)), fed(model, text(18), text(1))
    last = model.layers[-1]
    broken = copy.copy(last)
    class Broken(type(last)):
        def __call__(self, *a, **k): raise RuntimeError('out of memory')
    broken = rb._clone(last); object.__setattr__(broken, '__class__', Broken)
    with pytest.raises(RuntimeError, match='out of memory'):
        with Recording(model, cache, (1, 4)) as rec: rb.layer_view(rec.model, {len(model.layers) - 1: broken})(text(4), cache=cache)
    same_cache(cache, held, 0)
    assert mx.array_equal(model(text(3), cache=cache), model(text(3), cache=held))

def test_interleaved_and_threaded():
    model = tiny_model('qwen3_5')
    def request(seed, kept):
        past, block = text(7, seed=seed), text(5, seed=seed + 50)
        cache = fed(model, past)
        with Recording(model, cache, block.shape) as rec:
            yield
            rec.model(block, cache=cache)
            yield
        rollback(cache, rec.records, kept)
        yield
        same_cache(cache, fed(model, past, block[:, :kept]), 3e-5)
    requests = [request(i, i) for i in range(5)]
    for _ in range(4): [next(r, None) for r in requests]
    failed = []
    def work(seed):
        try:
            with mx.stream(mx.cpu): [None for _ in request(seed, seed % 5)]
        except BaseException as e: failed.append(e)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    [t.start() for t in threads]; [t.join() for t in threads]
    assert not failed, failed

def test_with_fast_gdn():
    "A layer that chapter 10 has switched on is recorded as it runs: by `gdn`."
    model = tiny_model('qwen3_5')
    block = text(70)
    plain = model(block)
    with fast_gdn(model):
        wanted, cache = model(block, cache=make_prompt_cache(model)), make_prompt_cache(model)
        out, records = blocks(model, cache, block)
        assert mx.array_equal(out, wanted) and not mx.array_equal(out, plain)
        rollback(cache, records, 33)
        same_cache(cache, fed(model, block[:, :33]), 5e-5)

def test_no_leak():
    model = tiny_model('qwen3_5')
    cache, seen = fed(model, text(8)), []
    gc.disable()
    try:
        for i in range(40):
            out, records = blocks(model, cache, text(8, seed=i))
            rollback(cache, records, 0 if i % 2 else 8)
            if i % 2 == 0:
                for c in cache:
                    if isinstance(c, KVCache): c.trim(8)                                    # the same length each time
            mx.eval(out, [c.state for c in cache])
            del out, records
            seen.append(mx.get_active_memory())
    finally: gc.enable()
    assert max(seen[20:]) <= max(seen[4:20]), seen

def test_snapshots_do_not_change():
    model = tiny_model('gemma3')
    cache = fed(model, text(20), text(1))
    held = take_snapshot(cache)
    before = [[np.array(a) for a in d.values() if isinstance(a, mx.array)] for _, d in held]
    _, records = blocks(model, cache, text(5))
    kept = [np.array(r.before[k]) for r in records.leaves for k in ('keys',) if k in r.before]
    rollback(cache, records, 3, keep=True)
    for _ in range(3): model(text(1), cache=cache)                                           # writes in place
    assert all(np.array_equal(a, b) for a, b in zip(kept, [np.array(r.before['keys']) for r in records.leaves if 'keys' in r.before]))
    assert all(np.array_equal(a, np.array(b)) for x, (_, d) in zip(before, held) for a, b in zip(x, [v for v in d.values() if isinstance(v, mx.array)]))
    put_back(held)
    same_cache(cache, fed(model, text(20), text(1)), 0)

@pytest.mark.parametrize('name', ['qwen3_5', 'nemotron_h', 'gemma3'])           # mlx has no bf16 experts on a CPU
def test_bf16_picks_the_same_tokens(name):
    model = tiny_model(name, dtype=mx.bfloat16)
    for n in (0, 1, 2, 5, 7, 8):
        cache, block = fed(model, text(12)), text(8, seed=9)
        _, records = blocks(model, cache, block)
        rollback(cache, records, n)
        a, b = (model(text(4, seed=3), cache=c).astype(mx.float32) for c in (cache, fed(model, text(12), block[:, :n])))
        top = mx.sort(b, axis=-1)
        clear = top[..., -1] - top[..., -2] > 2 * mx.abs(a - b).max()                        # a tie within rounding may fall either way
        assert ((a.argmax(-1) == b.argmax(-1)) | ~clear).all().item() and clear.sum().item() >= 2
        assert (mx.abs(a - b).max() / mx.abs(b).max()).item() < 5e-2

@given(st.lists(st.integers(0, 7), min_size=1, max_size=4), st.integers(0, 2))
@settings(max_examples=40, deadline=None)
def test_the_short_way_for_plain_caches(counts, start):
    "Cut after cut, what it leaves is what the general way leaves: offsets, records, refusals; and an interrupt in its middle leaves what was."
    ends = []
    for short in (True, False):
        cache = [KVCache() for _ in range(3)]
        fill = lambda n, seed: [c.update_and_fetch(*mx.random.normal((2, 1, 2, n, 4), key=mx.random.key(seed))) for c in cache]
        if start: fill(start, 0)
        records, out = Records(cache, (1, 6)), []
        fill(6, 1)
        for r in records.leaves: r.finish(1, 6)
        for n in counts:
            try:
                if n > 6: raise ValueError(n)
                if not (short and rb._cut_offsets(cache, records, np.array([n]))): rb._cut_all(cache, records, n, None)
                out.append([(c.offset, c.keys is None, r.at, r.count.tolist()) for c, r in zip(cache, records.leaves)])
            except ValueError as e: out.append(str(e))
        ends.append(out)
    assert ends[0] == ends[1]

def test_an_interrupt_in_the_short_way():
    cache = [KVCache() for _ in range(3)]
    fill = lambda n: [c.update_and_fetch(*mx.zeros((2, 1, 2, n, 4))) for c in cache]
    fill(5); records = Records(cache, (1, 4)); fill(4)
    for r in records.leaves: r.finish(1, 4)
    last = records.leaves[-1]
    class Guarded(type(last)):
        def __setattr__(self, name, value):
            if name == 'at' and value == 7: raise KeyboardInterrupt
            super().__setattr__(name, value)
    last.__class__ = Guarded
    with pytest.raises(KeyboardInterrupt): rollback(cache, records, 2)
    assert [c.offset for c in cache] == [9] * 3 and [r.at for r in records.leaves] == [9] * 3
    last.__class__ = Guarded.__mro__[1]
    rollback(cache, records, 2)
    assert [c.offset for c in cache] == [7] * 3
    with pytest.raises(ValueError, match='used and released'): rollback(cache, records, 1)

def test_refusals():
    model = small('baichuan_m1', dict(sliding_window=16, sliding_window_layers=[0, 2], conv_window=2, tie_word_embeddings=False))
    cache = make_prompt_cache(model)
    model(text(4), cache=cache)
    held = take_snapshot(cache)
    out, records = blocks(model, cache, text(5))
    with pytest.raises(ValueError, match='ArraysCache in slot 0.0: no module was seen to fill it'): rollback(cache, records, 2)
    rollback_by_rerun(model, cache, held, text(5), 2)                                        # the specification still can
    fresh = make_prompt_cache(model); model(text(4), cache=fresh); model(text(5)[:, :2], cache=fresh)
    assert mx.array_equal(model(text(1), cache=cache), model(text(1), cache=fresh))
    model = tiny_model('qwen3_5')
    cache = make_prompt_cache(model)
    with Recording(model, cache, (1, 3)) as rec:
        for i in range(3): rec.model(text(1, seed=i), cache=cache)                            # three forwards instead of one
    with pytest.raises(ValueError, match='cannot roll back: ArraysCache in slot 0'): rollback(cache, rec.records, 2)
    for bad in (-1, 4, [1, 2], 1.5, None):
        with pytest.raises(ValueError, match='accepted is'): rollback(cache, rec.records, bad)
