"RoPE at arbitrary positions: bit-equal to the module's own rotation, whatever the positions, chunks, variant and dtype."
import copy, pickle
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.rope_utils import initialize_rope
from vllm_mlx.layers import _get_rope, _set_rope, attention_layout, model_view
from vllm_mlx.models import TINY_FAMILIES, tiny_model
from vllm_mlx.rope import _OffsetAdjustedRoPE, _PositionMappedRoPE, _get_dims, _get_pre_scale, _run_ends, manual_rope, manual_rope_with_freqs

D = 16
STRETCHED = dict(original_max_position_embeddings=512, factor=4.0)
LLAMA3 = dict(rope_type='llama3', low_freq_factor=1.0, high_freq_factor=4.0, **STRETCHED)
YARN = dict(rope_type='yarn', **STRETCHED)

def variants():
    "name -> (module, arguments of the manual function, or None where it has none)"
    from mlx_lm.models import hunyuan_v1_dense, deepseek_v2, smollm3
    longrope = dict(rope_type='longrope', short_factor=[1.0]*8, long_factor=[1 + i/2 for i in range(8)], **STRETCHED)
    return dict(default=nn.RoPE(D), base=nn.RoPE(D, base=500000.0), traditional=nn.RoPE(D, traditional=True), partial=nn.RoPE(D // 2),
        partial_traditional=nn.RoPE(D // 2, traditional=True),
        linear=initialize_rope(D, 10000.0, False, dict(rope_type='linear', factor=4.0)),
        linear_traditional=initialize_rope(D, 10000.0, True, dict(rope_type='linear', factor=8.0)),
        mrope=initialize_rope(D, 10000.0, False, dict(rope_type='mrope', mrope_section=[2, 3, 3])),
        llama3=initialize_rope(D, 500000.0, False, LLAMA3), llama3_traditional=initialize_rope(D, 500000.0, True, LLAMA3),
        yarn=initialize_rope(D, 10000.0, False, YARN), yarn_traditional=initialize_rope(D, 10000.0, True, YARN),
        yarn_partial=initialize_rope(D // 2, 10000.0, False, YARN),
        longrope=initialize_rope(D, 10000.0, False, longrope, 2048),
        proportional=initialize_rope(D, 10000.0, False, dict(rope_type='proportional', partial_rotary_factor=0.5)),
        ntk_alpha=hunyuan_v1_dense.DynamicNTKAlphaRoPE(D, 10000.0, 1000.0),
        deepseek_yarn=deepseek_v2.DeepseekV2YarnRotaryEmbedding(dim=D, max_position_embeddings=2048, base=10000.0, scaling_factor=4.0),
        none=smollm3.NoPE())

VARIANTS = variants()
DTYPES = [mx.float32, mx.bfloat16, mx.float16]

def one_by_one(rope, x, positions):
    "The specification: every token rotated alone, with an ordinary integer offset."
    return mx.concatenate([rope(x[:, :, i:i+1], offset=int(p)) for i, p in enumerate(positions)], axis=2)

def same(got, spec): return got.dtype == spec.dtype and got.shape == spec.shape and mx.array_equal(got, spec).item()

def tokens(B, L, dtype, seed=0, H=3): return mx.random.normal((B, L, H, D), key=mx.random.key(seed)).astype(dtype).transpose(0, 2, 1, 3)

@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('B', [1, 3])
@pytest.mark.parametrize('name', VARIANTS)
def test_equals_contiguous(name, B, dtype):
    "Rotate a whole prompt, pick the kept tokens: the same as to pick first and rotate at their positions."
    rope, x = VARIANTS[name], tokens(B, 2000, dtype)
    kept = np.sort(np.random.default_rng(0).choice(2000, 300, replace=False))
    spec, picked = rope(x, offset=11)[:, :, mx.array(kept)], x[:, :, mx.array(kept)]
    mapped = _PositionMappedRoPE(rope, kept + 11, cache_start=5)
    assert same(mapped(picked, offset=5), spec)
    assert same(mapped(mx.contiguous(picked), offset=5), spec)                       # whatever the memory layout
    chunks = [mapped(picked[:, :, a:a+64], offset=5 + a) for a in range(0, 300, 64)]
    assert same(mx.concatenate(chunks, axis=2), spec)

@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(sorted(VARIANTS)), dtype=st.sampled_from(DTYPES), B=st.integers(1, 2),
       positions=st.lists(st.integers(0, 200_000), min_size=1, max_size=24), start=st.integers(0, 100), cuts=st.lists(st.integers(1, 23), max_size=3))
def test_any_positions(name, dtype, B, positions, start, cuts):
    "Any positions, sorted or not, repeated or not, in any chunks."
    rope, x, N = VARIANTS[name], tokens(B, len(positions), dtype, seed=len(positions)), len(positions)
    mapped = _PositionMappedRoPE(rope, positions, cache_start=start)
    edges = sorted({0, N, *(c for c in cuts if c < N)})
    got = mx.concatenate([mapped(x[:, :, a:b], offset=start + a) for a, b in zip(edges, edges[1:])], axis=2)
    assert same(got, one_by_one(rope, x, positions))

@settings(max_examples=60, deadline=None)
@given(runs=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=8), data=st.data())
def test_runs(runs, data):
    "Positions made of runs, as chunks give them: the integer shortcut and the batch route agree wherever a call begins and ends."
    at, positions = 0, []
    for gap, length in runs:
        at += gap; positions += range(at, at + length); at += length
    a = data.draw(st.integers(0, len(positions) - 1)); b = data.draw(st.integers(a + 1, len(positions)))
    x = tokens(1, b - a, mx.bfloat16)
    got = _PositionMappedRoPE(VARIANTS['llama3'], positions)(x, offset=a)
    assert same(got, one_by_one(VARIANTS['llama3'], x, positions[a:b]))

@given(st.lists(st.integers(-50, 50), max_size=30))
def test_run_ends(positions):
    def slow(i): return next((j for j in range(i + 1, len(positions)) if positions[j] != positions[j-1] + 1), len(positions))
    assert _run_ends(np.array(positions, dtype=np.int64)) == [slow(i) for i in range(len(positions))]

@settings(max_examples=60, deadline=None)
@given(N=st.integers(0, 20), start=st.integers(0, 9), offset=st.integers(0, 40), L=st.integers(1, 25))
def test_never_out_of_range(N, start, offset, L):
    "Either all tokens have a known position, or an error gives the figures."
    mapped, x = _PositionMappedRoPE(VARIANTS['default'], np.arange(N) * 3, cache_start=start), tokens(1, L, mx.float32)
    if start <= offset and offset + L <= start + N: assert mapped(x, offset=offset).shape == x.shape
    else:
        with pytest.raises(IndexError, match=f'tokens {offset} to {offset + L} of the cache; positions are known from {start} to {start + N}'): mapped(x, offset=offset)

@pytest.mark.parametrize('name', ['default', 'yarn', 'longrope'])
def test_offset_kinds(name):
    rope, positions = VARIANTS[name], [4, 9, 10, 11, 50, 51, 90]
    mapped, x = _PositionMappedRoPE(rope, mx.array(positions)), tokens(3, 4, mx.float32)
    for offset in (2, np.int64(2), mx.array(2), mx.array([2]), mx.array(2, mx.uint32)): assert same(mapped(x, offset=offset), one_by_one(rope, x, positions[2:6]))
    assert same(mapped(x), one_by_one(rope, x, positions[:4]))
    rows = mapped(x, offset=mx.array([0, 3, 1]))
    for i, o in enumerate([0, 3, 1]): assert same(rows[i:i+1], one_by_one(rope, x[i:i+1], positions[o:o+4]))
    with pytest.raises(IndexError): mapped(x, offset=mx.array([0, 4, 1]))
    with pytest.raises(ValueError, match='2 offsets for 3 rows'): mapped(x, offset=mx.array([0, 1]))
    with pytest.raises(ValueError, match=r'shape \(4, 16\)'): mapped(x[0, 0])

def test_yarn_keywords_pass():
    rope, x = VARIANTS['yarn'], tokens(1, 3, mx.float32)
    there = _PositionMappedRoPE(rope, [1, 7, 30])(x)
    back = _PositionMappedRoPE(rope, [1, 7, 30])(there, inverse=True)
    assert mx.abs(back - x).max() < 1e-5 and not mx.array_equal(there, x)

@pytest.mark.parametrize('module', ['rope_utils', 'internlm3'])
def test_dynamic_ntk(module):
    "Inside its trained length the base is fixed and any positions go; beyond it there is no one right answer."
    if module == 'rope_utils': rope = initialize_rope(D, 10000.0, False, dict(rope_type='dynamic', factor=2.0), 1000)
    else:
        from mlx_lm.models.internlm3 import DynamicNTKScalingRoPE
        rope = DynamicNTKScalingRoPE(D, 1000, scale=2.0)
    for positions in ([3, 4, 5, 100, 101, 950], [900], [7, 6, 5]):
        x = tokens(2, len(positions), mx.bfloat16)
        assert same(_PositionMappedRoPE(rope, positions)(x), one_by_one(rope, x, positions))
    with pytest.raises(ValueError, match='position 1000 is beyond the 1000'): _PositionMappedRoPE(rope, [1, 1000])
    with pytest.raises(ValueError, match='position 1000 is beyond the 1000'): _PositionMappedRoPE(_OffsetAdjustedRoPE(rope, 1), [1, 1000])

@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(VARIANTS)), gap=st.integers(0, 50_000), offset=st.integers(0, 50_000), L=st.integers(1, 5), dtype=st.sampled_from(DTYPES))
def test_offset_adjusted(name, gap, offset, L, dtype):
    rope, x = VARIANTS[name], tokens(1, L, dtype)
    spec, wrapped = rope(x, offset=offset + gap), _OffsetAdjustedRoPE(rope, gap)
    assert same(wrapped(x, offset=offset), spec) and same(wrapped(x, offset=mx.array(offset)), spec)
    assert same(_OffsetAdjustedRoPE(_OffsetAdjustedRoPE(rope, gap), -gap)(x, offset=offset), rope(x, offset=offset))

MANUAL = [n for n in VARIANTS if n not in ('ntk_alpha', 'none', 'deepseek_yarn')]
@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(MANUAL), positions=st.lists(st.integers(0, 5000), min_size=1, max_size=10), dtype=st.sampled_from(DTYPES))
def test_manual(name, positions, dtype):
    "The plain arithmetic agrees with the modules, dtype kept; 16-bit modules round sine and cosine too."
    rope, x = VARIANTS[name], tokens(1, len(positions), dtype)
    traditional = 'traditional' in name
    if isinstance(rope, nn.RoPE): got = manual_rope(x, positions, _get_dims(rope), rope.base, 1 / rope.scale, traditional=traditional)
    else: got = manual_rope_with_freqs(x, mx.array(positions), _get_dims(rope), rope._freqs, _get_pre_scale(rope), traditional=traditional)
    spec = one_by_one(rope, x, positions)
    assert got.dtype == dtype and got.shape == x.shape
    # float32: an angle of 5,000 radians is itself known to 2.4e-4
    tolerance = {mx.float32: 3e-3, mx.float16: 2e-2, mx.bfloat16: 1e-1}[dtype]
    assert mx.abs(got.astype(mx.float32) - spec.astype(mx.float32)).max().item() < tolerance

@settings(max_examples=30, deadline=None)
@given(p=st.integers(0, 2000), q=st.integers(0, 2000), shift=st.integers(0, 2000))
def test_only_distance_matters(p, q, shift):
    "A query at p and a key at q meet as at p + shift and q + shift."
    x = tokens(1, 2, mx.float32, H=1)
    def score(a, b):
        r = manual_rope(x, [a, b], D)[0, 0]
        return (r[0] * r[1]).sum().item()
    assert abs(score(p, q) - score(p + shift, q + shift)) < 1e-2

def test_scale_divides():
    x = tokens(1, 3, mx.float32)
    assert mx.allclose(manual_rope(x, [0, 40, 80], D, scale=4.0), manual_rope(x, [0, 10, 20], D), atol=1e-5)

@pytest.mark.parametrize('args, words', [(dict(dims=5), 'dims is 5'), (dict(dims=18), 'dims is 18'), (dict(dims=0), 'dims is 0'), (dict(positions=[1]), '1 positions for 3')])
def test_manual_errors(args, words):
    args = dict(dict(dims=D, positions=[1, 2, 3]), **args)
    with pytest.raises(ValueError, match=words): manual_rope(tokens(1, 3, mx.float32), **args)
    if args['dims']:
        freqs = mx.ones(args['dims'] // 2 + args['dims'] % 2)
        with pytest.raises(ValueError, match=words): manual_rope_with_freqs(tokens(1, 3, mx.float32), freqs=freqs, **args)

def test_getters():
    assert {n: _get_dims(r) for n, r in VARIANTS.items() if n != 'none'} == {n: D // 2 if 'partial' in n else D for n in VARIANTS if n != 'none'}
    with pytest.raises(ValueError, match='NoPE'): _get_dims(VARIANTS['none'])
    assert _get_pre_scale(VARIANTS['yarn']) == VARIANTS['yarn'].mscale > 1
    assert _get_pre_scale(VARIANTS['longrope']) == VARIANTS['longrope']._scale > 1
    assert all(_get_pre_scale(VARIANTS[n]) == 1.0 for n in ('default', 'linear', 'llama3', 'proportional'))
    mapped = _PositionMappedRoPE(VARIANTS['yarn'], [1, 2])
    assert (_get_dims(mapped), _get_pre_scale(mapped)) == (D, VARIANTS['yarn'].mscale)

@pytest.mark.parametrize('bad', [[0.5, 1.0], [[1, 2]], 3, ['a']])
def test_bad_positions(bad):
    with pytest.raises(ValueError, match='one integer per token is needed'): _PositionMappedRoPE(VARIANTS['default'], bad)

@pytest.mark.parametrize('wrap', [lambda r: _PositionMappedRoPE(r, [0, 5, 9]), lambda r: _OffsetAdjustedRoPE(r, 7)])
def test_wrapper_is_no_part_of_the_model(wrap):
    "No parameter, no child; it survives the model's own operations, copies and pickles, and setting the module back."
    model = tiny_model('llama', rope_scaling=dict(LLAMA3, rope_type='llama3'))
    names, before = [n for n, _ in tree_flatten(model.parameters())], model(mx.array([[1, 2, 3]]))
    originals = [l.rope for l in attention_layout(model)]
    for l in attention_layout(model): _set_rope(l.attn, wrap(l.rope))
    assert [n for n, _ in tree_flatten(model.parameters())] == [n for n, _ in tree_flatten(model.trainable_parameters())] == names
    model.eval(); model.train(); model.freeze(); model.unfreeze(); mx.eval(model)
    model.update(model.parameters()); model.load_weights(tree_flatten(model.parameters()))
    nn.quantize(copy.deepcopy(model), 32, 4)
    assert model(mx.array([[1, 2, 3]])).shape == before.shape
    for twin in (copy.copy(wrap(originals[0])), copy.deepcopy(wrap(originals[0])), pickle.loads(pickle.dumps(wrap(originals[0])))):
        assert same(twin(tokens(1, 1, mx.float32)), wrap(originals[0])(tokens(1, 1, mx.float32)))
    for l, rope in zip(attention_layout(model), originals): _set_rope(l.attn, rope)
    assert mx.array_equal(model(mx.array([[1, 2, 3]])), before) and all(l.rope is r for l, r in zip(attention_layout(model), originals))

@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('family', TINY_FAMILIES)
def test_all_kept_equals_dense(family, dtype):
    "Positions 0..M-1 through the wrapper: bit-equal logits and cache, in every family, in chunks."
    if family == 'gpt_oss' and dtype != mx.float32 and mx.default_device() == mx.cpu: pytest.skip('MLX runs experts in float32 only on a CPU')
    model, M = tiny_model(family, dtype=dtype), 30
    prompt = mx.random.randint(0, 60, (1, M), key=mx.random.key(3))
    view = model_view(model)
    for l in attention_layout(view):
        if l.rope is not None: _set_rope(l.attn, _PositionMappedRoPE(l.rope, np.arange(M)))
    caches = [make_prompt_cache(model) for _ in range(2)]
    for a in range(0, M, 8):
        dense, ours = (m(prompt[:, a:a+8], cache=c) for m, c in zip((model, view), caches))
        assert same(ours, dense)
    for c, d in zip(*caches):
        for (_, a), (_, b) in zip(tree_flatten(c.state), tree_flatten(d.state)):
            if isinstance(a, mx.array): assert same(b, a)

@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('family', TINY_FAMILIES)
def test_cache_is_never_promoted(family, dtype):
    if family == 'gpt_oss' and dtype != mx.float32 and mx.default_device() == mx.cpu: pytest.skip('MLX runs experts in float32 only on a CPU')
    model = tiny_model(family, dtype=dtype)
    kept, view, cache = np.array([0, 1, 2, 9, 10, 25, 26, 27]), model_view(model), make_prompt_cache(model)
    for l in attention_layout(view):
        if l.rope is not None: _set_rope(l.attn, _PositionMappedRoPE(l.rope, kept))
    view(mx.array([kept.tolist()]), cache=cache)
    for l in attention_layout(view):
        if l.rope is not None: _set_rope(l.attn, _OffsetAdjustedRoPE(l.rope._original, 30 - len(kept)))
    view(mx.array([[5]]), cache=cache)
    for l in attention_layout(view): assert cache[l.slot].keys.dtype == cache[l.slot].values.dtype == dtype
