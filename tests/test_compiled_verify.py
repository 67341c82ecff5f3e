"Compiled verification against the plain forward, over families, offsets, batches, weights, and when things go wrong."
import copy, gc, subprocess, sys, threading, weakref
from inspect import signature

import vllm_mlx
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, make_prompt_cache

from vllm_mlx.compiled_verify import (FORMS, Graph, bucket, find_head, forward_verifier_states_compiled, forward_with_hidden_states_compiled, forward_with_hidden_states_compiled_whole,
                                      get_compiled_full_attention_verify_fn, get_compiled_whole_model_verify_fn, lazy_head, make_room, measure_verify, owned, pick_verify, traces_of, verify_choices,
                                      verify_with, whole_refusal)
from vllm_mlx import compiled_verify
from vllm_mlx.graphs import _owned, traced_kind
from vllm_mlx import speculate
from vllm_mlx.dflash import tiny_draft
from vllm_mlx.gdn import fast_gdn
from vllm_mlx.layers import attention_layout
from vllm_mlx.models import load, tiny_model
from vllm_mlx.rollback import batch_cache, cache_leaves, rollback, take_snapshot
from vllm_mlx.sparse_prefill import SparseKVCache
from vllm_mlx.verify import forward_with_hidden_states_and_rollback

COMPILED = ('layers', 'whole')
WHOLE = ('llama', 'qwen3', 'qwen3_5', 'nemotron_h')

def ids(n, B=1, seed=0): return mx.random.randint(0, 500, (B, n), key=mx.random.key(100 * seed + n))
def close(a, b, tol=1e-5):
    assert a.shape == b.shape and a.dtype == b.dtype
    return (mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max() <= tol * max(1, mx.abs(b).max().item())).item()

_models = {}
def model(family, **more):
    key = family, *sorted(more.items())
    if key not in _models: _models[key] = tiny_model(family, **more)
    return _models[key]

def filled(m, n, B=1):
    cache = make_prompt_cache(m)
    for at in range(0, n, 200): m(ids(min(200, n - at), B, at), cache=cache)
    return cache

def same_rounds(m, how, n, blocks, B=1, tol=1e-5, layers=(1, 3)):
    "Rounds of a form beside the plain one on equal caches: outputs, records' effect, and what the caches say."
    a, b = filled(m, n, B), filled(m, n, B)
    for i, (L, keep) in enumerate(blocks):
        block = ids(L, B, 7 + i)
        ours, theirs = FORMS[how](m, block, a, layers), forward_with_hidden_states_and_rollback(m, block, b, layers)
        for p, q in zip((*ours[:2], *ours[2]), (*theirs[:2], *theirs[2])): assert close(p, q, tol), (how, i)
        assert sorted(ours[3]) == sorted(theirs[3])
        rollback(a, ours[3], keep); rollback(b, theirs[3], keep)
        for (_, x), (_, y) in zip(cache_leaves(a), cache_leaves(b)):
            if isinstance(x, ArraysCache):
                for s, t in zip(x.cache, y.cache): assert (s is None) == (t is None) and (s is None or close(s, t, tol))
            elif x.keys is None or y.keys is None: assert x.offset == y.offset == 0
            elif isinstance(x, KVCache):
                assert x.offset == y.offset
                for s, t in zip(x.keys_and_values(), y.keys_and_values()): assert close(s, t, tol)
    assert close(m(ids(1, B), cache=a), m(ids(1, B), cache=b), tol)
    return a

@pytest.mark.parametrize('how', COMPILED)
@pytest.mark.parametrize('family', WHOLE)
def test_rounds_across_growth(family, how):
    cache = same_rounds(model(family), how, 247, [(6, 6), (6, 3), (1, 1), (6, 0), (6, 6)])                # 247 -> 263: the buffer grows on the way
    kv = [c for _, c in cache_leaves(cache) if isinstance(c, KVCache)]
    assert all(bucket(c.keys.shape[2]) == c.keys.shape[2] for c in kv) and (not kv or kv[0].offset == 247 + 16 + 1)

@pytest.mark.parametrize('how', COMPILED)
@pytest.mark.parametrize('family', WHOLE)
def test_from_nothing_and_far_out(family, how):
    same_rounds(model(family), how, 0, [(4, 2), (4, 0), (4, 4)])
    same_rounds(model(family), how, 0, [(4, 0), (4, 4)])
    same_rounds(model(family), how, 1030, [(4, 4), (4, 1)])

@pytest.mark.parametrize('how', COMPILED)
@pytest.mark.parametrize('family', WHOLE)
def test_batch(family, how): same_rounds(model(family), how, 20, [(5, 2), (5, 5)], B=3)

@pytest.mark.parametrize('family', ('gemma3', 'gpt_oss'))
def test_layers_form_serves_sliding_windows_and_whole_refuses(family):
    m = model(family)
    same_rounds(m, 'layers', 30, [(5, 2), (5, 5)])
    cache = filled(m, 30)
    before = [dict(vars(c)) for c in cache]
    with pytest.raises(ValueError, match=f'{m.__module__.split(".")[-1]}.*RotatingKVCache in slot 0'): forward_with_hidden_states_compiled_whole(m, ids(4), cache)
    assert all(vars(c)[k] is v for c, held in zip(cache, before) for k, v in held.items())
    assert close(verify_with(m, ids(4), cache, how='auto')[0], forward_with_hidden_states_and_rollback(m, ids(4), filled(m, 30))[0])

@pytest.mark.parametrize('family', ('llama', 'qwen3', 'qwen3_5'))
@pytest.mark.parametrize('tied', (True, False))
@pytest.mark.parametrize('bits', (None, 4))
def test_heads_and_quantised_weights(family, tied, bits):
    m = tiny_model(family, tie_word_embeddings=tied)
    if bits: nn.quantize(m, group_size=32, bits=bits)
    for how in COMPILED: same_rounds(m, how, 20, [(4, 2)])
    states = forward_verifier_states_compiled(m, ids(4), filled(m, 20))[0]
    want = forward_with_hidden_states_and_rollback(m, ids(4), filled(m, 20))[0]
    assert close(find_head(m)(states), want)
    again = forward_with_hidden_states_compiled_whole(m, ids(4), filled(m, 20), states=True)[0]
    assert close(again, states)
    best = want[0].argmax(-1).tolist()
    assert lazy_head(m, states, best[:3], 2)[:2] == (3, best[3]) and lazy_head(m, states, [best[0], best[1] + 1, 0], 1)[:2] == (1, best[1])

@pytest.mark.parametrize('family', ('llama', 'qwen3_5'))
def test_bfloat16(family):
    m = tiny_model(family, dtype=mx.bfloat16)
    for how in COMPILED: same_rounds(m, how, 20, [(4, 2), (4, 4)], tol=3e-2)

def test_moe_hybrid():
    m = tiny_model('qwen3_5', num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
    for how in COMPILED: same_rounds(m, how, 20, [(4, 2), (4, 4)])

def test_traces_by_shape_only():
    m = tiny_model('llama')
    cache, fn = filled(m, 20), get_compiled_whole_model_verify_fn(m)
    for i in range(12):
        _, _, _, r = forward_with_hidden_states_compiled_whole(m, ids(5, seed=i), cache)
        rollback(cache, r, 1 + i % 5)
    assert fn.traces == 1
    for i in range(60): forward_with_hidden_states_compiled_whole(m, ids(5, seed=i), cache)
    assert cache[0].offset > 256 and fn.traces == 2                                # one more length of the buffer
    assert get_compiled_whole_model_verify_fn(m, ()) is fn and get_compiled_whole_model_verify_fn(m, [1]) is not fn
    m2 = tiny_model('llama')
    assert get_compiled_whole_model_verify_fn(m2) is not fn
    cache, n = filled(m2, 20), traces_of(m2)
    for i in range(6): forward_with_hidden_states_compiled(m2, ids(5, seed=i), cache)
    assert traces_of(m2) - n == len(m2.layers)                                     # each layer once

def test_owners_die_and_ids_are_reused():
    known = len(_owned)
    for seed in range(6):
        m = tiny_model('llama', seed=seed)
        for how in COMPILED: assert close(FORMS[how](m, ids(4), None, [0])[0], m(ids(4)))
        fn, gone = get_compiled_full_attention_verify_fn(m.layers[0]), weakref.ref(m)
        del m
        assert gone() is None                                                      # no circle keeps it
    del fn
    gc.collect()
    assert len(_owned) <= known + 1

@pytest.mark.parametrize('how', COMPILED)
def test_new_weights_are_seen(how):
    m = tiny_model('qwen3_5', tie_word_embeddings=False)
    FORMS[how](m, ids(4))
    traces = traces_of(m)
    other = tiny_model('qwen3_5', tie_word_embeddings=False, seed=5)
    m.update(other.parameters())                                                   # A_log, dt_bias and convolutions among them
    assert close(FORMS[how](m, ids(4))[0], other(ids(4))) and traces_of(m) == traces
    m.language_model.lm_head = nn.Linear(64, m.language_model.lm_head.weight.shape[0], bias=False)
    assert close(FORMS[how](m, ids(4))[0], m(ids(4)))
    nn.quantize(m, group_size=32, bits=8)
    assert close(FORMS[how](m, ids(4))[0], m(ids(4)))
    with fast_gdn(m):
        assert close(FORMS[how](m, ids(4))[0], m(ids(4)))
    assert close(FORMS[how](m, ids(4))[0], m(ids(4)))

@pytest.mark.parametrize('how', COMPILED)
def test_copies_of_a_cache_are_left_alone(how):
    m = model('qwen3_5')
    cache = filled(m, 30)
    held, kept = take_snapshot(cache), [mx.array(a) for c in cache for a in (c.cache if isinstance(c, ArraysCache) else c.keys_and_values())]
    twin = copy.deepcopy(cache)
    for i in range(3): mx.eval(FORMS[how](m, ids(6, seed=i), cache)[0])
    for a, b in zip(kept, [a for c in twin for a in (c.cache if isinstance(c, ArraysCache) else c.keys_and_values())]): assert mx.array_equal(a, b)
    leaf, attributes = next((l, h) for l, h in held if isinstance(l, KVCache))
    assert close(attributes['keys'][..., :30, :], twin[[c is leaf for c in cache].index(True)].keys[..., :30, :])

@pytest.mark.parametrize('how', COMPILED)
def test_whatever_is_changed_in_a_model_is_seen(how):
    "A trace takes scales, children and classes for granted: when one of them changes, it is made anew."
    m, block = tiny_model('llama'), ids(4)
    def check(): assert close(FORMS[how](m, block)[0], m(block))
    check()
    m.layers[0].self_attn.scale *= 3; check()
    m.layers[0].self_attn.q_proj.bias = mx.ones(m.layers[0].self_attn.q_proj.weight.shape[0]); check()
    del m.layers[0].self_attn.q_proj.bias; check()
    m.layers[1].self_attn.rope = nn.RoPE(16, base=50); check()
    m.layers[1].self_attn.rope.base = 5000; check()
    m.layers[0], m.layers[2] = m.layers[2], m.layers[0]; check()
    del m.model.layers[3]; check()
    n = traces_of(m); check(); check()
    assert traces_of(m) == n                                                       # and only then

class Bad(BaseException): pass                                                     # an interrupt is none of Exception's

@pytest.mark.parametrize('how', COMPILED)
def test_a_failing_layer_leaves_cache_and_model_whole(how):
    m = tiny_model('qwen3_5')
    cache, twin = filled(m, 20), filled(m, 20)
    mlp, original = m.layers[2].mlp, type(m.layers[2].mlp)
    def boom(self, x): raise Bad('no')
    mlp.__class__ = type('MLP', (original,), dict(__call__=boom))
    for _ in range(2):
        with pytest.raises(Bad): FORMS[how](m, ids(4), cache, [1])
    mlp.__class__ = original
    assert close(FORMS[how](m, ids(4), cache, [1])[0], m(ids(4), cache=twin))
    with pytest.raises(ValueError, match='capture_layers has 99'): FORMS[how](m, ids(4), cache, [99])

def test_refusals_name_slot_and_class():
    m = model('qwen3_5')
    assert whole_refusal(m, make_prompt_cache(m)) is None
    padded = batch_cache(m, [0, 2])
    assert 'in slot 0 is padded' in whole_refusal(m, padded)
    m = model('llama')
    assert 'BatchKVCache in slot 0' in whole_refusal(m, batch_cache(m, [0, 2]))
    assert whole_refusal(m, [QuantizedKVCache() for _ in m.layers]) is None
    class Own(KVCache): pass
    assert 'Own in slot 0: only KVCache, QuantizedKVCache' in whole_refusal(m, [Own() for _ in m.layers])
    uneven = filled(m, 20); uneven[1].trim(3)
    assert 'stand at tokens [(17, 17), (20, 20)]' in whole_refusal(m, uneven)
    with pytest.raises(ValueError, match='stand at tokens'): verify_with(m, ids(3), uneven, how='whole')

def test_layers_form_on_a_padded_batch():
    for family in ('llama', 'qwen3_5'):
        m = model(family)
        a, b, block = batch_cache(m, [0, 3]), batch_cache(m, [0, 3]), ids(5, 2)
        m(ids(10, 2), cache=a); m(ids(10, 2), cache=b)
        ours, theirs = forward_with_hidden_states_compiled(m, block, a, [1]), forward_with_hidden_states_and_rollback(m, block, b, [1])
        assert close(ours[0], theirs[0])
        rollback(a, ours[3], [2, 4]); rollback(b, theirs[3], [2, 4])
        assert close(m(block[:, :1], cache=a), m(block[:, :1], cache=b))

@pytest.mark.parametrize('how', COMPILED)
@pytest.mark.parametrize('family', ('llama', 'qwen3'))
def test_after_a_sparse_prefill(family, how):
    m = model(family)
    a, b = filled(m, 40), filled(m, 40)
    positions = np.arange(40) * 3
    a, b = ([SparseKVCache(c, positions, 130) for c in x] for x in (a, b))
    for keep in (2, 4):
        ours, theirs = FORMS[how](m, ids(5), a, [1]), forward_with_hidden_states_and_rollback(m, ids(5), b, [1])
        assert close(ours[0], theirs[0]) and a[0].offset == b[0].offset == 135 + (0 if keep == 2 else 2)
        rollback(a, ours[3], keep); rollback(b, theirs[3], keep)
    dense = filled(m, 40)
    assert not close(ours[0], FORMS[how](m, ids(5), dense, [1])[0])               # the positions did matter

def greedy(m, n):
    cache, out = make_prompt_cache(m), []
    token = m(ids(12), cache=cache)[:, -1].argmax(-1)
    for _ in range(n): out.append(token.item()); token = m(token[None], cache=cache)[:, -1].argmax(-1)
    return out

@pytest.mark.parametrize('how', ('plain', 'layers', 'whole', 'auto'))
@pytest.mark.parametrize('family', ('llama', 'qwen3_5', 'gemma3'))
def test_block_decoding_gives_the_text_of_plain_decoding(family, how):
    if family == 'gemma3' and how == 'whole': pytest.skip('refused')
    m = model(family)
    want, cache, rng = greedy(m, 60), make_prompt_cache(m), np.random.default_rng(0)
    out = [m(ids(12), cache=cache)[:, -1].argmax(-1).item()]
    while len(out) < 60:
        L = int(rng.integers(2, 7))
        drafts = [t if rng.random() < 0.7 else (t + 1) % 500 for t in want[len(out):len(out) + L - 1]]
        block = mx.array([[out[-1], *drafts]])
        logits, _, _, records = verify_with(m, block, cache, [1], how)
        said = logits[0].argmax(-1).tolist()
        n = next((i for i, (a, b) in enumerate(zip(drafts, said)) if a != b), len(drafts))
        out += drafts[:n] + [said[n]]
        rollback(cache, records, n + 1)
    assert out[:60] == want

def test_graphs_in_another_thread():
    m, got = tiny_model('qwen3_5'), []
    want = forward_with_hidden_states_compiled_whole(m, ids(4))[0]; mx.eval(want)
    def work():
        for how in COMPILED: out = FORMS[how](m, ids(4))[0]; mx.eval(out); got.append(np.array(out))
    t = threading.Thread(target=work); t.start(); t.join()
    assert len(got) == 2 and all(np.abs(g - np.array(want)).max() < 1e-4 for g in got)

def test_measuring_changes_nothing():
    m = tiny_model('qwen3_5')
    cache, twin = filled(m, 20), filled(m, 20)
    ms = measure_verify(m, cache, 3, [1], repeats=1)
    assert set(ms) == {'plain', 'layers', 'whole'} and cache[2].offset == 20
    assert close(m(ids(3), cache=cache), m(ids(3), cache=twin))
    with pytest.raises(ValueError, match="'best' is no form"): measure_verify(m, cache, 3, forms=['best'])

def spied(monkeypatch, refuses=()):
    used = []
    def spy(how, form):
        def run(*args):
            used.append(how)
            if how in refuses: raise ValueError('not today')
            return form(*args)
        return run
    for how, form in list(FORMS.items()): monkeypatch.setitem(FORMS, how, spy(how, form))
    return used

@pytest.mark.parametrize('family', ('llama', 'qwen3_5', 'gemma3'))
def test_auto_tries_each_form_on_real_rounds_and_then_keeps_to_one(family, monkeypatch):
    "Twelve rounds are twelve forwards: no block is run for the measurement alone."
    m = tiny_model(family)
    cache, twin, used = filled(m, 20), filled(m, 20), spied(monkeypatch)
    for i in range(12):
        got, want = verify_with(m, ids(4, seed=i), cache, [1]), forward_with_hidden_states_and_rollback(m, ids(4, seed=i), twin, [1])
        for a, b in zip((*got[:2], *got[2]), (*want[:2], *want[2])): assert close(a, b, 2e-5)
        rollback(cache, got[3], 1 + i % 4); rollback(twin, want[3], 1 + i % 4)
    forms = ('plain', 'layers') if family == 'gemma3' else ('plain', 'layers', 'whole')
    trials = 3 * len(forms) - 1                                                    # two times each, and a trace for each compiled form
    assert len(used) == 12 and {f: used[:trials].count(f) for f in forms} == {f: 2 if f == 'plain' else 3 for f in forms} and len(set(used[trials:])) == 1
    (row,) = verify_choices(m)
    assert row['rows'] == 4 and row['tokens'] == 1024 and used[-1] == row['form'] and set(forms) <= set(row)
    assert pick_verify(m, cache, 3)[1] is None and pick_verify(m, cache, 5)[1] is not None      # 3 rows are about 4; 5 are not

def test_auto_bounds_its_trials(monkeypatch):
    "A form that refuses, and one that is traced at every call, are given up; the answers stay right."
    m = tiny_model('llama')
    cache, used = filled(m, 20), spied(monkeypatch, refuses=('layers',))
    n = iter(range(10 ** 6))
    monkeypatch.setattr(compiled_verify, 'traces_of', lambda model: next(n))     # as if each call were traced
    want = m(ids(3), cache=copy.deepcopy(cache))
    for i in range(14):
        logits, *_, records = verify_with(m, ids(3), cache)
        assert close(logits, want)
        rollback(cache, records, 0)
    assert used.count('layers') == 1 and used.count('whole') == 5 and set(used[-3:]) == {'plain'}
    assert verify_choices(m) == []

def test_auto_forgets_with_the_model_and_tells_sizes_apart():
    m = tiny_model('llama')
    cache = filled(m, 20)
    owned(m)['verify ms'] = {(4, 1024, True, ('KVCache',) * 4): {4: dict(plain=[9, 9], layers=[5, 5], whole=[7, 7])}}
    assert pick_verify(m, cache, 4) == ('layers', None) == pick_verify(m, cache, 3)
    for other in (filled(m, 1100), [QuantizedKVCache() for _ in m.layers]): assert pick_verify(m, other, 4)[1] is not None
    gone, key = weakref.ref(m), id(m)
    del m
    assert gone() is None and key not in _owned

def test_an_interrupt_while_auto_waits_takes_the_block_back(monkeypatch):
    m = tiny_model('qwen3_5')
    cache, twin = filled(m, 20), filled(m, 20)
    calls = []
    real = mx.eval
    def stopped(*args):
        calls.append(1)
        if len(calls) == 2: raise Bad('stop')                                      # the first waits for what was there before
        return real(*args)
    monkeypatch.setattr(compiled_verify.mx, 'eval', stopped)
    with pytest.raises(Bad): verify_with(m, ids(4), cache, [1])
    monkeypatch.undo()
    assert close(m(ids(3), cache=cache), m(ids(3), cache=twin)) and cache[2].offset == 23

@pytest.mark.parametrize('family', ('llama', 'qwen3', 'qwen3_5'))
@pytest.mark.parametrize('bits', (4, 8))
def test_quantised_caches_in_one_graph(family, bits):
    "Filled as they are, and quantised on the way; across growth; taken back by every count."
    m = tiny_model(family, head_dim=32)
    a, b = filled(m, 240), filled(m, 240)
    fn = get_compiled_whole_model_verify_fn(m, (1,))
    to = lambda caches: [c.to_quantized(group_size=32, bits=bits) if hasattr(c, 'to_quantized') else c for c in caches]
    for i, keep in enumerate((5, 3, 0, 5, 1, 5)):
        if i == 1: a, b = to(a), to(b)
        ours, theirs = FORMS['whole'](m, ids(5, seed=i), a, (1,)), forward_with_hidden_states_and_rollback(m, ids(5, seed=i), b, (1,))
        for p, q in zip((*ours[:2], *ours[2]), (*theirs[:2], *theirs[2])): assert close(p, q, 2e-4 if i else 1e-5), i
        rollback(a, ours[3], keep); rollback(b, theirs[3], keep)
    leaf, other = (next(c for c in caches if isinstance(c, QuantizedKVCache)) for caches in (a, b))
    assert leaf.offset == other.offset == 259 and leaf.keys[0].shape[2] == bucket(leaf.keys[0].shape[2]) and fn.traces == 3          # plain; quantised; a longer buffer
    for p, q in zip(leaf.keys_and_values()[0], other.keys_and_values()[0]): assert p.shape == q.shape and p.dtype == q.dtype
    assert close(m(ids(1), cache=a), m(ids(1), cache=b), 2e-4)
    from_nothing = [QuantizedKVCache(group_size=32, bits=bits) if isinstance(c, KVCache) else c for c in make_prompt_cache(m)]
    again = [QuantizedKVCache(group_size=32, bits=bits) if isinstance(c, KVCache) else c for c in make_prompt_cache(m)]
    assert close(FORMS['whole'](m, ids(5), from_nothing)[0], m(ids(5), cache=again), 2e-4)

@pytest.mark.parametrize('family', ('llama', 'qwen3_5'))
def test_the_loop_as_one_graph_while_the_cache_becomes_quantised(family, monkeypatch):
    m, tok, prompt = tiny_model(family, head_dim=32), load("nano-hybrid")[1], ids(12)[0].tolist()
    draft, settings = tiny_draft(m), dict(max_tokens=40, block_size=4, kv_bits=8, kv_group_size=32, quantized_kv_start=30)
    want = [r.token for r in speculate.stream_generate(m, None, tok, prompt, **{k: v for k, v in settings.items() if k != 'block_size'})]
    cache, used = make_prompt_cache(m), spied(monkeypatch)
    got = [r.token for r in speculate.stream_generate(m, draft, tok, prompt, verify='whole', prompt_cache=cache, **settings)]
    assert got == want and set(used) == {'whole'}                                  # never back to layers
    assert any(isinstance(c, QuantizedKVCache) for c in cache)

def test_quantised_behind_a_gap():
    m = model('llama', head_dim=32)
    a, b = ([SparseKVCache(c.to_quantized(group_size=32, bits=8), np.arange(40) * 3, 130) for c in filled(m, 40)] for _ in range(2))
    ours, theirs = FORMS['whole'](m, ids(5), a), forward_with_hidden_states_and_rollback(m, ids(5), b)
    assert close(ours[0], theirs[0], 2e-4) and a[0].offset == 135
    rollback(a, ours[3], 2); rollback(b, theirs[3], 2)
    assert close(m(ids(1), cache=a), m(ids(1), cache=b), 2e-4)
    assert traced_kind(a[0]) is None and traced_kind(a[0].inner) == 'TracedQuantizedKV group_size=32 bits=8'

def test_make_room_keeps_what_is_there():
    for held, rows in ((0, 3), (5, 3), (250, 10), (300, 1), (2040, 20)):
        c = KVCache()
        if held: c.update_and_fetch(*mx.random.normal((2, 1, 2, held, 4)))
        before = None if not held else [mx.array(a) for a in c.keys_and_values()]
        size = make_room(c, rows)
        assert size == bucket(size) >= held + rows and c.offset == held
        if held: assert c.keys.shape[2] == c.values.shape[2] == size and all(mx.array_equal(a, b) for a, b in zip(before, c.keys_and_values()))
        else: assert c.keys is None
        assert make_room(c, rows) == size                                          # again: nothing to do

@pytest.mark.skipif('verify' not in signature(speculate.stream_generate).parameters, reason='the loop has no choice of forms')
def test_the_loop_with_each_form():
    m, tok = model("qwen3_5"), load("nano-hybrid")[1]
    draft, want = tiny_draft(m), greedy(m, 40)
    prompt = ids(12)[0].tolist()
    for how in ('plain', 'layers', 'whole', 'auto'):
        for size in (4, 'kod'):
            got = [r.token for r in speculate.stream_generate(m, draft, tok, prompt, max_tokens=40, block_size=size, verify=how)]
            assert got == want, (how, size)
    assert 'verify ms' in owned(m)
    with pytest.raises(ValueError, match="verify is 'best': plain, layers, whole or auto"): speculate.stream_generate(m, draft, tok, prompt, verify='best')
    g = model('gemma3')
    with pytest.raises(ValueError, match="verify is 'whole': gemma3.*RotatingKVCache"): speculate.stream_generate(g, tiny_draft(g), tok, prompt, verify='whole')
    assert len([r.token for r in speculate.stream_generate(g, tiny_draft(g), tok, prompt, max_tokens=20, block_size=3, verify='auto')]) == 20

THREADS = """
import vllm_mlx, threading
import mlx.core as mx, numpy as np
from vllm_mlx.compiled_verify import FORMS
from vllm_mlx.models import tiny_model
m, errors = tiny_model('qwen3_5'), []
blocks = {n: mx.random.randint(0, 500, (1, n), key=mx.random.key(n)) for n in range(1, 9)}
want = {n: np.array(m(b)) for n, b in blocks.items()}
def work(seed):
    try:
        for n in np.random.default_rng(seed).permutation(8) + 1:
            for how in FORMS:
                got = FORMS[how](m, blocks[n], None, [1])[0]; mx.eval(got)
                assert np.abs(np.array(got) - want[n]).max() < 1e-3
    except BaseException as e: errors.append(repr(e)[:200])
threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
for t in threads: t.start()
for t in threads: t.join()
assert np.abs(np.array(m(blocks[4])) - want[4]).max() < 1e-5
print(errors or 'all agree', flush=True)
"""

def test_threads_that_trace_one_model_at_once():
    "In a process of its own: where threads have computed, mlx 0.32.4 may abort at exit, with or without us."
    out = subprocess.run([sys.executable, '-c', THREADS], capture_output=True, text=True, timeout=300)
    assert 'all agree' in out.stdout, (out.stdout, out.stderr[-500:])
