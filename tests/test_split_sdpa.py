"Split attention: every form beside mlx's fused call, in all kinds of masks, and its hooks in whole models."
import copy

import vllm_mlx
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

import vllm_mlx.split_sdpa as split
from vllm_mlx.compiled_verify import FORMS
from vllm_mlx.gdn import fast_gdn, gdn_layers
from vllm_mlx.layers import _find_attention_layers, attention_layout, model_view
from vllm_mlx.models import TINY_FAMILIES, tiny_model
from vllm_mlx.rollback import rollback
from vllm_mlx.split_sdpa import (NEVER, SPLIT_FORMS, SPLIT_TABLE, by_batched_keys, by_heads, by_keys, by_rows, check_rule, install_split_attention_hooks, install_split_sdpa_if_hybrid, key_parts,
                                 measure_split_threshold, pad_small_projections, remove_split_attention_hooks, split_attention, split_attention_hooks, split_rule)
from vllm_mlx.verify import forward_with_hidden_states_and_rollback

EVERY = ((32, 0, 'keys'),)
def ids(n, B=1, seed=0): return mx.random.randint(0, 500, (B, n), key=mx.random.key(100 * seed + n))
def gap(a, b): return mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item()

def inputs(L, M, H, KV, D, B=1, dtype=mx.float32, seed=0, buffer=64):
    k = mx.random.split(mx.random.key(seed), 3)
    return (mx.random.normal((B, H, L, D), key=k[0]).astype(dtype), *(mx.random.normal((B, KV, M + buffer, D), key=k[i]).astype(dtype)[..., :M, :] for i in (1, 2)))

def masks(L, M, H, B, kind, seed=0):
    seen = create_causal_mask(L, M - L) if L > 1 else mx.ones((1, M), dtype=mx.bool_)
    holes = (mx.random.uniform(shape=(B, 1, L, M), key=mx.random.key(seed)) > 0.3) & seen | (mx.arange(M) == mx.arange(M - L, M)[:, None])
    return {'causal': 'causal', 'none': None, 'bool': seen, 'window': create_causal_mask(L, M - L, window_size=max(1, M // 3)) if L > 1 or M > 1 else seen, 'holes': holes,
            'heads': mx.broadcast_to(holes, (B, H, L, M)), 'additive': mx.where(holes, 0.0, -mx.inf), 'soft': mx.random.normal((H, L, M), key=mx.random.key(seed))}[kind]

@settings(max_examples=60, deadline=None)
@given(st.integers(1, 17), st.integers(0, 90), st.sampled_from([(4, 4, 8), (4, 2, 16), (9, 3, 32), (8, 1, 8)]), st.integers(1, 2), st.sampled_from(['causal', 'none', 'bool', 'window', 'holes', 'heads', 'additive', 'soft']),
       st.booleans(), st.integers(1, 40), st.integers(0, 99))
def test_forms_give_what_the_fused_call_gives(L, more, heads, B, kind, with_sinks, chunk, seed):
    (H, KV, D), M = heads, L + more
    a, mask = inputs(L, M, H, KV, D, B, seed=seed), masks(L, M, H, B, kind, seed)
    sinks = mx.random.normal((H,), key=mx.random.key(seed)) if with_sinks else None
    want = mx.fast.scaled_dot_product_attention(*a, scale=D ** -0.5, mask=mask, sinks=sinks)
    assert gap(by_keys(*a, D ** -0.5, mask, sinks, chunk=chunk), want) < 1e-5
    assert gap(by_rows(*a, D ** -0.5, mask, sinks, step=1 + chunk % 5), want) < 1e-5
    if not with_sinks:
        assert gap(by_heads(*a, D ** -0.5, mask), want) < 1e-5
        if kind in ('causal', 'none'): assert gap(by_batched_keys(*a, D ** -0.5, mask, parts=1 + chunk % 7), want) < 1e-5

@pytest.mark.parametrize('form', (by_keys, by_rows, by_heads, by_batched_keys))
def test_no_row_sees_what_is_after_it(form):
    L, M = 8, 300
    q, k, v = inputs(L, M, 4, 2, 16)
    base = form(q, k, v, 0.25, 'causal')
    for j in range(L):                                                             # another key and value at the block's row j
        at = M - L + j
        far = lambda x: mx.concatenate([x[..., :at, :], 50 + x[..., at:at + 1, :], x[..., at + 1:, :]], axis=2)
        out = form(q, far(k), far(v), 0.25, 'causal')
        assert gap(out[:, :, :j], base[:, :, :j]) < 1e-5 if j else True
        assert (mx.abs(out[:, :, j:] - base[:, :, j:]).max(axis=(0, 1, 3)) > 1e-3).sum() > 0

@pytest.mark.parametrize('dtype,tol', ((mx.float16, 2e-3), (mx.bfloat16, 2e-2)))
def test_dtypes(dtype, tol):
    for form in (by_keys, by_rows, by_heads, by_batched_keys):
        a = inputs(5, 200, 9, 3, 32, dtype=dtype)
        want = mx.fast.scaled_dot_product_attention(*(x.astype(mx.float32) for x in a), scale=0.18, mask='causal')
        out = form(*a, 0.18, 'causal')
        assert out.dtype == dtype and gap(out, want) < tol
        half = mx.where(create_causal_mask(5, 195), 0.0, -mx.inf).astype(dtype)
        if form is not by_batched_keys: assert gap(form(*a, 0.18, half), want) < tol

def test_a_long_cache_in_several_parts():
    a = inputs(7, 5000, 4, 2, 16)
    want = mx.fast.scaled_dot_product_attention(*a, scale=0.25, mask='causal')
    assert len(key_parts(5000, 7, 2048)) == 4
    for form in (by_keys, by_batched_keys): assert gap(form(*a, 0.25, 'causal'), want) < 1e-5
    window = create_causal_mask(7, 4993, window_size=100)
    assert gap(by_keys(*a, 0.25, window), mx.fast.scaled_dot_product_attention(*a, scale=0.25, mask=window)) < 1e-5      # whole parts are hidden

def test_extreme_scores_stay_finite():
    q, k, v = inputs(4, 60, 2, 2, 8)
    for size in (1e3, 1e6):
        out = by_keys(size * q, size * k, v, 1.0, 'causal')
        assert mx.isfinite(out).all() and gap(out, mx.fast.scaled_dot_product_attention(size * q, size * k, v, scale=1.0, mask='causal')) < 1e-2
    zero = by_keys(0 * q, k, v, 1.0, 'causal')
    assert gap(zero, mx.stack([v[..., :57 + i, :].mean(axis=2) for i in range(4)], axis=2)) < 1e-5

def test_values_of_another_width():
    q, k, _ = inputs(4, 60, 4, 2, 8)
    v = mx.random.normal((1, 2, 60, 5), key=mx.random.key(9))
    want = mx.softmax(mx.where(create_causal_mask(4, 56), q @ mx.repeat(k, 2, 1).swapaxes(-1, -2), -1e30), axis=-1) @ mx.repeat(v, 2, 1)
    for form in (by_keys, by_batched_keys): assert gap(form(q, k, v, 1.0, 'causal'), want) < 1e-5

def test_which_calls_are_split(monkeypatch):
    seen = []
    monkeypatch.setitem(split.SPLIT_FORMS, 'keys', lambda *a: seen.append(a[0].shape[2]) or by_keys(*a))
    rule = ((1, 100, 'keys'), (8, 50, 'keys'))
    for L, M, used in ((1, 99, False), (1, 100, True), (2, 60, True), (8, 49, False), (8, 50, True), (9, 500, False), (512, 2000, False)):
        seen.clear()
        a = inputs(L, M, 4, 2, 8)
        split_attention(*a, None, 0.3, 'causal' if L > 1 else None, rule=rule)
        assert bool(seen) == used, (L, M)
    seen.clear()
    quantised = type('Q', (), dict(bits=8, group_size=32))()
    a = inputs(2, 60, 4, 2, 32)
    packed = [mx.quantize(x, group_size=32, bits=8) for x in a[1:]]
    out = split_attention(a[0] + 0, *packed, quantised, 0.18, 'causal', rule=EVERY)
    assert not seen and gap(out, mx.fast.scaled_dot_product_attention(*a, scale=0.18, mask='causal')) < 0.1
    odd = mx.zeros((2, 33))                                                        # a mask about other keys is mlx's to judge
    with pytest.raises(ValueError): mx.eval(split_attention(*a, None, 0.18, odd, rule=EVERY))
    assert not seen
    assert all(line[0] <= split.MOST_ROWS for rule in SPLIT_TABLE.values() for line in check_rule(rule))

@pytest.mark.parametrize('rule,why', ((((0, 0, 'keys'),), '1 to 32 rows'), (((33, 0, 'keys'),), '1 to 32 rows'), (((2, -1, 'keys'),), 'at least 0 keys'), (((2, 5),), 'is needed'), (((2, 5, 'fast'),), "'fast'")))
def test_bad_rules_change_nothing(rule, why):
    m = tiny_model('llama')
    classes = [type(x) for x in m.modules()]
    with pytest.raises(ValueError, match=why): install_split_attention_hooks(m, rule)
    assert classes == [type(x) for x in m.modules()]

def run(m, B=1, n=30):
    cache = make_prompt_cache(m)
    return mx.concatenate([m(t, cache=cache) for t in (ids(n, B), ids(6, B), ids(1, B), ids(5, B))], axis=1)

@pytest.mark.parametrize('form', ('keys', 'rows', 'heads'))
@pytest.mark.parametrize('family', TINY_FAMILIES)
def test_models(family, form):
    m = tiny_model(family)
    plain, names = run(m, 2), [n for n, _ in tree_flatten(m.parameters())]
    with split_attention_hooks(m, ((32, 0, form),)):
        assert gap(run(m, 2), plain) < 2e-5 * mx.abs(plain).max().item()
        assert names == [n for n, _ in tree_flatten(m.parameters())]
    assert mx.array_equal(run(m, 2), plain)

def test_hooks_serve_every_layer_and_only_this_model(monkeypatch):
    seen = []
    monkeypatch.setitem(split.SPLIT_FORMS, 'keys', lambda *a: seen.append(1) or by_keys(*a))
    m, other = tiny_model('llama', num_hidden_layers=5), tiny_model('llama', num_hidden_layers=5)
    original, module_function = llama.Attention.__call__, llama.scaled_dot_product_attention
    assert install_split_attention_hooks(m, EVERY) == install_split_attention_hooks(m, EVERY) == 5
    run(m); assert len(seen) == 5 * 4
    seen.clear(); run(other); assert not seen
    assert llama.Attention.__call__ is original and llama.scaled_dot_product_attention is module_function
    twin = copy.deepcopy(m)
    assert remove_split_attention_hooks(m) == 5 and remove_split_attention_hooks(m) == 0 and type(m.layers[0].self_attn) is llama.Attention
    seen.clear(); run(m); assert not seen
    run(twin); assert len(seen) == 20 and remove_split_attention_hooks(twin) == 5
    install_split_attention_hooks(m, ((1, 0, 'keys'),)); install_split_attention_hooks(m, EVERY)      # the last rule counts
    seen.clear(); run(m); assert len(seen) == 20

def test_an_error_inside_the_block_takes_the_hooks_back():
    m = tiny_model('llama')
    with pytest.raises(KeyError):
        with split_attention_hooks(m, EVERY): raise KeyError
    assert remove_split_attention_hooks(m) == 0
    install_split_attention_hooks(m, EVERY)
    with split_attention_hooks(m, ((1, 0, 'rows'),)): pass
    assert remove_split_attention_hooks(m) == len(m.layers)                        # what was there before was kept

def test_whoever_replaces_the_function_is_still_asked(monkeypatch):
    m, asked = tiny_model('llama'), []
    install_split_attention_hooks(m, ((1, 10 ** 6, 'keys'),))
    real = llama.scaled_dot_product_attention
    monkeypatch.setattr(llama, 'scaled_dot_product_attention', lambda *a, **k: asked.append(1) or real(*a, **k))
    run(m)
    assert len(asked) == 4 * len(m.layers)

def test_a_rotating_cache_past_its_window():
    m = tiny_model('gemma3')
    window = next(l.window for l in attention_layout(m) if l.window)
    plain = run(m, n=2 * window + 3)
    with split_attention_hooks(m, EVERY): assert gap(run(m, n=2 * window + 3), plain) < 2e-5 * mx.abs(plain).max().item()

@pytest.mark.parametrize('family', ('llama', 'qwen3_5', 'gpt_oss'))
def test_under_verification_and_rollback(family):
    m = tiny_model(family)
    a, b = make_prompt_cache(m), make_prompt_cache(m)
    m(ids(30), cache=a); m(ids(30), cache=b)
    for how in ('plain', 'layers', *(['whole'] if family != 'gpt_oss' else [])):
        want = forward_with_hidden_states_and_rollback(m, ids(6), b, [1]); rollback(b, want[3], 2)
        with split_attention_hooks(m, EVERY): out = FORMS[how](m, ids(6), a, [1])
        assert gap(out[0], want[0]) < 3e-5 * mx.abs(want[0]).max().item(), how
        rollback(a, out[3], 2)
    after = FORMS['layers'](m, ids(6), a, [1])                                     # a graph traced with hooks is not used without
    assert gap(after[0], forward_with_hidden_states_and_rollback(m, ids(6), b, [1])[0]) < 3e-5 * mx.abs(want[0]).max().item()

def test_in_a_view_only():
    m = tiny_model('llama')
    plain, view = run(m), model_view(m)
    install_split_attention_hooks(view, EVERY)
    assert mx.array_equal(run(m), plain) and gap(run(view), plain) < 1e-4 and remove_split_attention_hooks(m) == 0

def test_hybrid_install_pads_and_leaves_others_alone():
    m = tiny_model('qwen3_5')
    plain, n = run(m), len(gdn_layers(m))
    with fast_gdn(m): fast = run(m)
    assert install_split_sdpa_if_hybrid(m, EVERY) == install_split_sdpa_if_hybrid(m, EVERY) == len(_find_attention_layers(m))
    assert gap(run(m), plain) < 3e-5 * mx.abs(plain).max().item()
    with fast_gdn(m): assert gap(run(m), fast) < 3e-5 * mx.abs(plain).max().item()
    assert remove_split_attention_hooks(m) == len(_find_attention_layers(m)) + 2 * n and mx.array_equal(run(m), plain)
    for family in ('llama', 'gemma3', 'nemotron_h'):
        other = tiny_model(family)
        assert install_split_sdpa_if_hybrid(other) == 0 and remove_split_attention_hooks(other) == 0

@pytest.mark.parametrize('bits', (None, 8))
@pytest.mark.parametrize('dtype', (mx.float32, mx.bfloat16))
def test_padded_projections_do_not_depend_on_the_block(bits, dtype):
    m = tiny_model('qwen3_5', dtype=dtype)
    if bits: nn.quantize(m, group_size=32, bits=bits)
    assert pad_small_projections(m) == pad_small_projections(m) == 2 * len(gdn_layers(m))
    p, x = m.layers[0].linear_attn.in_proj_b, mx.random.normal((2, 20, 64)).astype(dtype)
    whole = p(x[:, :16])
    for n in range(1, 17): assert mx.array_equal(p(x[:, :n]), whole[:, :n])
    assert p(x[:1]).shape[1] == 20 and p(x[:, :0]).shape[1] == 0
    remove_split_attention_hooks(m)

def test_thresholds():
    r = measure_split_threshold(4, 2, 16, rows=4, lengths=(64, 128), forms=('keys',), repeats=1)
    assert r['form'] == 'keys' and r['keys'] in (64, 128, None) and [set(row) for row in r['table']] == [{'cached', 'fused', 'keys'}] * 2
    for bad in (dict(lengths=(128, 64)), dict(rows=0), dict(rows=100, lengths=(64,)), dict(forms=('x',))):
        with pytest.raises(ValueError): measure_split_threshold(4, 2, 16, **{'lengths': (64,), **bad})

@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=1, max_size=4, unique=True), st.lists(st.sampled_from([256, 1024, 4096]), min_size=1, max_size=3, unique=True), st.integers(1, 3), st.integers(0, 999))
def test_a_rule_sends_no_measured_case_to_a_form_that_lost(blocks, lengths, shapes, seed):
    rng = np.random.default_rng(seed)
    cases = [dict(block=L, cached=M, fused=1.0, **{f: float(rng.choice([0.5, 0.9, 0.94, 0.96, 1.5])) for f in ('heads', 'keys')}) for L in blocks for M in lengths for _ in range(shapes)]
    rule = split_rule(cases)
    assert rule == check_rule(rule) and not (rule and rule[-1][1] == NEVER)
    for c in cases:
        line = next((l for l in rule if c['block'] <= l[0]), None)
        if line is not None and c['cached'] >= line[1]: assert c[line[2]] <= 0.95
        longest = [x for x in cases if x['block'] == c['block'] and x['cached'] == max(lengths)]
        if any(all(x[f] <= 0.95 for x in longest) for f in ('heads', 'keys')): assert line is not None and line[0] == c['block'] and line[1] <= max(lengths)      # and what wins everywhere is used

@pytest.mark.parametrize('form', ('keys', 'rows', 'heads', 'batched_keys'))
def test_what_may_not_be_seen_weighs_nothing(form):
    "Not even when it is enormous, or no number: rows before a broken one are those of an unbroken cache, bit for bit."
    f = split.SPLIT_FORMS[form]
    q, k, v = inputs(6, 50, 4, 2, 16, B=2)
    put = lambda x, value: mx.where((mx.arange(50) == 48)[:, None], value, x)
    seen = create_causal_mask(6, 44)
    for mask in ('causal', seen, mx.where(seen, 0.0, -mx.inf))[:1 if form == 'batched_keys' else 3]:
        base = f(q, k, v, 0.25, mask)[:, :, :4]
        assert mx.array_equal(f(q, k, put(v, 1e20), 0.25, mask)[:, :, :4], base)
        if isinstance(mask, str) or mask.dtype == mx.bool_:
            broken = f(q, put(k, mx.nan), v, 0.25, mask)
            assert mx.array_equal(broken[:, :, :4], base) and mx.isnan(broken[:, :, 4:]).all()

def test_masks_of_every_number_of_dimensions_and_no_rows():
    q, k, v = inputs(6, 50, 4, 2, 16, B=2)
    for form in ('keys', 'rows', 'heads'):
        for shape in ((50,), (1, 50), (6, 1), (6, 50), (4, 6, 50), (1, 4, 1, 50), (2, 1, 1, 50), (2, 4, 6, 50)):
            for mask in (mx.random.normal(shape, key=mx.random.key(1)), (mx.random.normal(shape, key=mx.random.key(2)) > -0.5) | (mx.arange(shape[-1]) == 0)):
                want = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=mask)
                assert gap(split_attention(q, k, v, None, 0.25, mask, rule=((32, 0, form),)), want) < 1e-5, (form, shape)
        assert split_attention(q[:, :, :0], k, v, None, 0.25, None, rule=((32, 0, form),)).shape == (2, 4, 0, 16)

def test_beside_attention_over_codes_in_any_order():
    "Hooks and `patch_attention` (chapter 30) come and go independently; whatever is taken away last leaves the model's own class."
    from vllm_mlx.turboquant import is_patched, patch_attention, unpatch_attention, TurboQuantKVCache, make_turboquant_cache
    m = tiny_model('llama')
    attn, plain = m.layers[0].self_attn, run(m)
    own = type(attn)
    acts = dict(h=lambda: install_split_attention_hooks(m, EVERY), H=lambda: remove_split_attention_hooks(m), p=lambda: patch_attention(m), P=lambda: unpatch_attention(m))
    for order in ('hpHP', 'hpPH', 'phHP', 'phPH', 'phphHP', 'hphpPH', 'hpHp', 'hphPpH'):
        hooked = patched = False
        for act in order:
            acts[act]()
            hooked, patched = (act == 'h') if act in 'hH' else hooked, (act == 'p') if act in 'pP' else patched
            assert is_patched(attn) == patched and hasattr(type(attn), '_unhooked') == hooked and len(type(attn).__mro__) == len(own.__mro__) + hooked + patched, (order, act)
        assert remove_split_attention_hooks(m) == (len(m.layers) if hooked else 0)
        unpatch_attention(m)
        assert type(attn) is own and mx.array_equal(run(m), plain)
    codes = make_turboquant_cache(m, 4)
    want = m(ids(20), cache=codes)
    with split_attention_hooks(m, EVERY):
        with patch_attention(m): assert gap(m(ids(20), cache=make_turboquant_cache(m, 4)), want) < 1e-4
    assert is_patched(attn) and not hasattr(type(attn), '_unhooked') and gap(m(ids(20), cache=make_turboquant_cache(m, 4)), want) < 1e-6
    unpatch_attention(m)
    with split_attention_hooks(m, EVERY): patch_attention(m)                        # within the block, and left there
    assert is_patched(attn) and not hasattr(type(attn), '_unhooked')
