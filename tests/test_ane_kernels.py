"Core ML programs of a draft: quantisation, planning, building, the cache of compiled drafts."
import io, json, os, subprocess, sys, threading
from dataclasses import fields, replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import vllm_mlx  # noqa: F401
import mlx.core as mx
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from vllm_mlx.ane.kernels import *
from vllm_mlx.ane.kernels import dense_weight, layer_linears
from vllm_mlx.ane.programs import *
from vllm_mlx.ane.programs import _head_rows
from vllm_mlx.dflash import make_draft, visible
from vllm_mlx.models import tiny_model

pytest.importorskip('coremltools', reason="not available here: pip install 'coremltools>=9.0,<10'")
from vllm_mlx.ane.interpreter import OPERATIONS, _block, load_program, read_blob

DIMS = DraftDims(hidden=32, heads=4, kv_heads=2, head_dim=8, mlp=48, n_features=3, block=8, width=64, context=64, layers=1, vocab=100, eps=1e-6)
ALONE = Limits(never_together=tuple(combinations(LAYER, 2)))
WHOLE = Limits(operations=1000, never_together=())


def weights_of(dims, seed=0, q8=False):
    rng = np.random.default_rng(seed)
    shapes = dims.matrices | dict(fc=(dims.hidden, dims.n_features * dims.hidden))
    W = {n: rng.normal(0, 0.2, s).astype(np.float16).astype(np.float32) for n, s in shapes.items()}
    return {n: Q8Matrix.of(w) for n, w in W.items()} if q8 else W


def inputs_of(kernel, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return {p.name: (scale * rng.normal(size=p.shape)).astype(np.float16) for p in kernel.inputs}


def run(kernel, inputs, tmp_path, precision='float32', **options):
    return load_program(kernel.save(tmp_path / f'{kernel.name}.mlpackage'), precision=precision, **options)(inputs)


# ---- quantisation

@settings(deadline=None)
@given(hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=12), elements=st.floats(-1e5, 1e5, width=32)))
def test_quantised_rows(w):
    q, scale = quantize_rows(w)
    s = scale.astype(np.float64)[:, None]
    assert q.dtype == np.int8 and q.shape == w.shape and q.min() >= -127 and scale.dtype == np.float16 and (scale > 0).all()
    assert (np.abs(w - q * s) <= s / 2 * (1 + 1e-6)).all()
    assert not q[~w.any(axis=1)].any()
    assert (quantize_rows(-w)[0] == -q).all()                                      # symmetric


def test_tiny_and_huge_rows_have_a_scale():
    for most in (1e-45, 1e-43, 1e-38, 1e-30, 1e-8, 1e-3, 1e3, 8e6):
        q, scale = quantize_rows([[most, -most / 2]])
        assert np.isfinite(scale).all() and scale > 0
        if most >= 1e-3: assert np.abs(q).max() in (126, 127)


def test_weights_of_a_layer_are_checked():
    draft = make_draft(tiny_model('llama'), block_size=4)
    dims, good = draft_dims(draft, 4, 10), Q8LayerWeights.of(draft.layers[0])
    assert good.check(dims) is good
    for f in fields(good):
        m = getattr(good, f.name)
        for bad in (m[1:, :], m[:, 1:]):
            with pytest.raises(ValueError, match=f'{f.name} has shape'): replace(good, **{f.name: bad}).check(dims)


# ---- planning

@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from([8, 16, 64]), st.integers(1, 40), st.integers(1, 500), st.integers(8, 64), st.integers(8, 64))
def test_no_convolution_exceeds_the_limits(kv, group, D, mlp, vocab, most_in, most_out):
    dims = replace(DIMS, hidden=24, heads=kv * group, kv_heads=kv, head_dim=D, mlp=mlp, vocab=vocab)
    limits = Limits(in_channels=most_in, out_channels=most_out, operations=10**6, never_together=())
    seen = []
    class Watch:
        def __getattr__(self, op):
            def call(**kw):
                if op == 'conv': seen.append(kw['weight'].shape[:2])
                return self
            return call
    W = {n: np.zeros(s, np.float16) for n, s in (dims.matrices | dict(fc=(24, 3 * 24))).items()}
    for name, (fragment, _, _) in STAGES.items():
        seen.clear()
        fragment(Watch(), dict.fromkeys(tensor_shapes(dims)), dims, W, limits)
        assert all(oc <= most_out and ic <= most_in for oc, ic in seen)
        if name == 'ffn_residual': assert sum(oc * ic for oc, ic in seen) == 3 * 24 * mlp          # every weight once
    plan = plan_kernels(dims, limits)
    assert sum(plan.layer, ()) == LAYER and plan.head[0][0] == 0 and plan.head[-1][1] == vocab
    assert all(a[1] == b[0] for a, b in zip(plan.head, plan.head[1:]))


def test_plans_of_published_sizes():
    base = dict(block=16, width=64, context=960, eps=1e-6, n_features=5, layers=5)
    b8 = DraftDims(hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp=12288, vocab=151936, **base)
    b27 = DraftDims(hidden=5120, heads=32, kv_heads=8, head_dim=128, mlp=17408, vocab=248320, **base)
    for d in (b8, b27):
        for bytes_, head in ((2, True), (1, True), (2, False)):
            plan = plan_kernels(d, Limits(), bytes_, head)
            assert plan.programs == 2 + 5 * len(plan.layer) + len(plan.head) <= 119
            assert all((b - a) * d.hidden * bytes_ <= Limits().program_bytes for a, b in plan.head) and bool(plan.head) == head
            for group in plan.layer:
                assert count_operations(d, group) <= Limits().operations
                assert not any(set(never) <= set(group) for never in Limits().never_together)
    assert len(plan_kernels(b8, Limits(), 1).head) < len(plan_kernels(b8, Limits(), 2).head)
    assert len(plan_kernels(b8, Limits(operations=1000, never_together=(), program_bytes=300 << 20)).layer) > 1           # weights of a layer do not fit into one
    with pytest.raises(ValueError, match='ffn_residual has .* bytes of weights'): plan_kernels(b27, Limits(program_bytes=300 << 20))


@pytest.mark.parametrize('change, said', [(dict(context=1024), '1088 columns of keys: at most 1024'), (dict(context=16384, width=64), 'keys is 16448'), (dict(layers=60), '122 programs are needed'), (dict(head_dim=20000), 'head_dim is 20000')])
def test_limits_are_named(change, said):
    with pytest.raises(ValueError, match=said): plan_kernels(replace(DIMS, **change), head=False)


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 2000), st.integers(1, 64), st.integers(8, 32), st.integers(30, 96))
def test_the_head_keeps_to_the_operations_of_a_program(vocab, most_out, most_in, operations):
    "Many tiles need many operations, and those are limited too: as many programs as it takes, and the count is that of a program that was built."
    limits, d = Limits(out_channels=most_out, in_channels=most_in, operations=operations), replace(DIMS, vocab=vocab)
    rows = _head_rows(d, limits, 2)
    a, b = tiles(vocab, rows)[0]
    assert build_final_norm_lm_head_kernel(d, np.zeros((b - a, 32), np.float32), limits=limits).operations <= operations
    if rows < vocab: assert build_final_norm_lm_head_kernel(d, np.zeros((rows + 1, 32), np.float32), limits=limits).operations > operations      # and no program is needed that could be saved
    with pytest.raises(ValueError, match='no row of the head fits'): _head_rows(d, replace(limits, operations=5), 2)


@pytest.mark.parametrize('change, said', [(dict(heads=5), 'heads is 5: no multiple of kv_heads, 2'), (dict(head_dim=7), 'head_dim is 7: RoPE'), (dict(width=100), 'width is 100: 128'), (dict(context=1), 'context is 1: 64'),
                                          *((dict([(n, 0)]), f'{n} is 0: a positive') for n in ('hidden', 'heads', 'kv_heads', 'head_dim', 'mlp', 'n_features', 'block', 'width', 'context', 'layers', 'vocab', 'eps'))])
def test_sizes_that_do_not_fit(change, said):
    with pytest.raises(ValueError, match=said): replace(DIMS, **change)


def test_every_grouping_covers_the_layer():
    for cut in range(1 << 4):
        groups, group = [], []
        for i, s in enumerate(LAYER):
            group.append(s)
            if cut >> i & 1 or i == 4: groups.append(tuple(group)); group = []
        have = set(STAGES['mega_qkv'][1]) | {'mask', 'post_norm_w'}
        for g in groups:
            reads, writes = group_ports(g)
            assert set(reads) <= have
            have |= set(writes)
        assert 'hidden_out' in have


# ---- building

@pytest.mark.parametrize('q8', [False, True])
def test_tiles_change_nothing(tmp_path, q8):
    W = weights_of(DIMS, q8=q8)
    small = Limits(in_channels=20, out_channels=13)
    for stage in ('fc_norm', 'mega_qkv', 'o_proj_residual', 'ffn_residual'):
        whole, cut = (build_stages(DIMS, (stage,), W, limits) for limits in (Limits(), small))
        given_ = inputs_of(whole)
        a, b = run(whole, given_, tmp_path), run(cut, given_, tmp_path)
        assert cut.operations > whole.operations
        for n in a: np.testing.assert_allclose(a[n], b[n], rtol=2e-4, atol=2e-4)
    head = np.random.default_rng(1).normal(size=(100, 32)).astype(np.float32)
    head = Q8Matrix.of(head) if q8 else head
    one, many = build_final_norm_lm_head_kernel(DIMS, head), build_final_norm_lm_head_kernel(DIMS, head, first=4, limits=small)
    assert [p.name for p in many.outputs] == [f'logits{i}' for i in range(4, 12)]
    a, b = run(one, inputs_of(one), tmp_path), run(many, inputs_of(many), tmp_path)
    np.testing.assert_allclose(a['logits0'], np.concatenate([b[p.name] for p in many.outputs], axis=1), rtol=1e-4, atol=1e-4)
    assert read_argmax(a['logits0'], 64) == read_argmax([b[p.name] for p in many.outputs], 64)


def test_saved_programs_keep_order_shapes_and_int8(tmp_path):
    W, Q = weights_of(DIMS), weights_of(DIMS, q8=True)
    used = set()
    for stages in [(s,) for s in STAGES] + [LAYER]:
        sizes = []
        for w in (W, Q):
            kernel = build_stages(DIMS, stages, w)
            path = kernel.save(tmp_path / 'p.mlpackage')
            function, block = _block(path)
            assert [i.name for i in function.inputs] == [p.name for p in kernel.inputs] and list(block.outputs) == [p.name for p in kernel.outputs]
            assert all(tuple(d.constant.size for d in i.type.tensorType.dimensions) == p.shape for i, p in zip(function.inputs, kernel.inputs))
            kinds = [op.type for op in block.operations]
            used |= {k for k in kinds if k != 'const'}
            assert kinds.count('constexpr_affine_dequantize') == (kinds.count('conv') if w is Q else 0)
            sizes.append(sum(f.stat().st_size for f in path.rglob('weight.bin')))
        if 'conv' in kinds: assert sizes[1] < 0.75 * sizes[0]
    capped = build_o_proj_residual_kernel(DIMS, W['wo'], softcap=30.0).save(tmp_path / 'p.mlpackage')
    used |= {op.type for op in _block(capped)[1].operations if op.type != 'const'}
    assert used - {'constexpr_affine_dequantize'} == set(OPERATIONS)                          # exactly those that are used


def test_softcap(tmp_path):
    W = weights_of(DIMS)
    for build, names in ((build_o_proj_residual_kernel, ['wo']), (build_ffn_residual_kernel, ['gate', 'up', 'down'])):
        plain, capped = (build(DIMS, *(W[n] for n in names), softcap=c) for c in (0, 2.0))
        given_ = inputs_of(plain)
        (a,), (b,) = (run(k, given_, tmp_path).values() for k in (plain, capped))
        np.testing.assert_allclose(2 * np.tanh(a / 2), b, atol=1e-5)
    plain, capped = build_attention_kernel(DIMS), build_attention_kernel(DIMS, softcap=0.5)
    given_ = inputs_of(plain) | dict(mask=np.zeros((1, 1, 64, 128), np.float16))
    q, kv = given_['q_rope'].astype(np.float64), given_['kv_tiled'].astype(np.float64)
    for kernel, cap in ((plain, lambda s: s), (capped, lambda s: 0.5 * np.tanh(s / 0.5))):
        e = np.exp(cap(q @ kv[:, :4].swapaxes(2, 3) * float(np.float16(8 ** -0.5))))
        want = (e / e.sum(-1, keepdims=True) @ kv[:, 4:]).transpose(0, 1, 3, 2).reshape(1, 32, 1, 64)
        np.testing.assert_allclose(run(kernel, given_, tmp_path)['attn_flat'], want, atol=1e-5)


@pytest.mark.parametrize('hidden', [32, 5120])
@pytest.mark.parametrize('eps', [1e-5, 1e-6])
@pytest.mark.parametrize('flush', [False, True])
def test_norm_at_the_edges_of_fp16(tmp_path, hidden, eps, flush):
    kernel = build_final_norm_kernel(replace(DIMS, hidden=hidden, eps=eps))
    rng = np.random.default_rng(0)
    x = np.zeros((1, hidden, 1, 64), np.float16)
    for i, size in enumerate((30000, 65504, 256, 1, 0.02, 1e-3)):
        x[0, :, 0, i] = rng.uniform(-size, size, hidden)
        x[0, 5, 0, i + 8] = -size                                                  # one channel alone: the smallest mean of squares
        x[0, :, 0, i + 16] = size                                                  # all alike: the largest
    x[np.abs(x) < 2 ** -14] = 0
    w = rng.uniform(0.5, 1.5, hidden).astype(np.float16)
    got = run(kernel, dict(hidden=x, norm_w=spread_norm(w, x.shape)), tmp_path, 'float16', flush=flush)['output'][0, :, 0].astype(np.float64)
    X = x[0, :, 0].astype(np.float64)
    want = X / np.sqrt(np.mean(X ** 2, axis=0) + eps) * w[:, None]
    assert np.isfinite(got).all() and not got[:, 24:].any()
    error = np.abs(got - want).max(axis=0) / np.maximum(np.abs(want).max(axis=0), 1e-3)
    lost = hidden * 2 ** -14 / norm_scale(hidden, eps) ** 2 / 2 if flush else 0                   # what flushed squares can change, at the very worst
    assert error.max() < 4e-3 + lost and np.sort(error)[-2] < 4e-3                                # one column of all comes near that


def test_large_features_do_not_overflow(tmp_path):
    W, rng = weights_of(DIMS), np.random.default_rng(0)
    kernel = build_fc_norm_kernel(DIMS, W['fc'])
    base = rng.normal(size=(1, 96, 1, 64))
    base = base / np.abs(base).max(axis=1, keepdims=True)
    ones = np.ones((1, 32, 1, 64), np.float16)
    for size in (65000, 30000, 1, 0.05):
        x = (base * size).astype(np.float16)
        y = W['fc'].astype(np.float64) @ x[0, :, 0].astype(np.float64)
        want = y / np.sqrt(np.mean(y ** 2, axis=0) + DIMS.eps)
        got = run(kernel, dict(features=x, hidden_norm_w=ones), tmp_path, 'float16')['context'][0, :, 0]
        np.testing.assert_allclose(got, want, atol=0.01)
    assert not run(kernel, dict(features=np.zeros_like(x), hidden_norm_w=ones), tmp_path, 'float16', flush=True)['context'].any()


def test_errors_name_the_matrix():
    W, Q = weights_of(DIMS), weights_of(DIMS, q8=True)
    builds = {build_mega_qkv_kernel_q8: ('wq', 'wk', 'wv'), build_o_proj_residual_kernel_q8: ('wo',), build_ffn_residual_kernel_q8: ('gate', 'up', 'down')}
    for build, names in builds.items():
        for n in names:
            with pytest.raises(ValueError, match=f'{n} is a ndarray'): build(DIMS, *((W if m == n else Q)[m] for m in names))
            with pytest.raises(ValueError, match=f'{n} has shape'): build(DIMS, *(Q[m][:-1, :] if m == n else Q[m] for m in names))
            with pytest.raises(ValueError, match=f'{n} holds values'): build_stages(DIMS, tuple(s for s in LAYER), W | {n: W[n] * np.inf})
    for stage, biases in dict(mega_qkv=('bq', 'bk', 'bv'), o_proj_residual=('bo',)).items():
        for b in biases:
            n = DIMS.matrices['w' + b[1]][0]
            for bad, said in ((np.zeros(n + 1), f'{b} has shape'), (np.full(n, 7e4), f'{b} holds values .*: 70000'), (np.full(n, np.nan), f'{b} holds values .*: nan')):
                with pytest.raises(ValueError, match=said): build_stages(DIMS, (stage,), W | {b: bad})
    for n in ('wq', 'wk', 'wv', 'wo', 'gate', 'up', 'down', 'fc'):                   # int8 holds what its fp16 does not
        with pytest.raises(ValueError, match=f'{n} holds values'): build_stages(DIMS, (next(s for s, names in STAGE_WEIGHTS.items() if n in names),), Q | {n: Q8Matrix.of(np.full(W[n].shape, 1e5, np.float32))})
    with pytest.raises(ValueError, match=r'head has shape \(10, 31\)'): build_final_norm_lm_head_kernel(DIMS, np.zeros((10, 31)))


# ---- the arg max

@settings(max_examples=60, deadline=None)
@given(st.data())
def test_argmax_is_the_slow_one(data):
    V, width, seq = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 5)), data.draw(st.integers(0, 5))
    a = data.draw(hnp.arrays(np.float16, (1, V, 1, width), elements=st.sampled_from([0, 1, -1, 2, np.nan, np.inf, -np.inf, 6e4])))
    cuts, vocab = sorted(data.draw(st.lists(st.integers(0, V), max_size=3))), data.draw(st.integers(1, V))
    parts = [a[:, i:j] for i, j in zip([0, *cuts], [*cuts, V])]
    if seq > width:
        with pytest.raises(ValueError, match='seq_len'): read_argmax(parts, seq, vocab)
        return
    want = []
    for p in range(seq):
        best, chosen = -np.inf, 0
        for c in range(vocab):
            if a[0, c, 0, p] > best: best, chosen = a[0, c, 0, p], c
        want.append(chosen)
    assert read_argmax(parts, seq, vocab) == want


# ---- tables, masks, norms

@pytest.mark.parametrize('scaling', [None, dict(rope_type='linear', factor=4.0), dict(rope_type='llama3', factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
                                     dict(rope_type='yarn', factor=4.0, original_max_position_embeddings=64)])
def test_tables_are_the_modules_own_rotation(scaling):
    layer = make_draft(tiny_model('llama'), block_size=4, rope_scaling=scaling).layers[0]
    positions = np.array([0, 1, 7, 63, 64, 500, 4000])
    cos, sin = rope_tables(layer, positions, np.float32)
    x = np.random.default_rng(0).normal(size=(len(positions), 1, 1, 16)).astype(np.float32)
    want = np.array(layer.self_attn.rope(mx.array(x), offset=mx.array(positions)))[:, 0, 0]
    turned = np.concatenate([-x[..., 8:], x[..., :8]], axis=-1)
    np.testing.assert_allclose(x[:, 0, 0] * cos + turned[:, 0, 0] * sin, want, atol=1e-5)


@settings(deadline=None)
@given(st.integers(0, 64), st.integers(1, 64), st.integers(1, 30))
def test_masks_show_what_is_visible(T, S, window):
    d, at = DIMS, 5 + np.arange(T + S)
    seen = visible(at[T:], at, window, True)
    mask = attention_mask(d, T, S, seen)
    columns = np.r_[np.arange(T), d.context + np.arange(S)]
    assert ((mask[0, 0, :S, columns].T == 0) == seen).all()
    rest = np.setdiff1d(np.arange(d.keys), columns)
    assert (mask[..., rest] == -4e4).all() and set(np.unique(mask)) <= {0, -4e4}
    assert (attention_mask(d, T, S)[0, 0] == attention_mask(d, T, S)[0, 0, 0]).all()


def test_norms_of_queries_and_keys_are_bounded():
    "√head_dim times the norms, times the square of what RoPE's tables stretch."
    target, yarn = tiny_model('qwen3'), dict(rope_type='yarn', factor=64.0, original_max_position_embeddings=32)
    def norms(size, **options):
        draft = make_draft(target, n_layers=1, block_size=8, **options)
        a = draft.layers[0].self_attn
        a.q_norm.weight, a.k_norm.weight = mx.full(a.q_norm.weight.shape, size), mx.full(a.k_norm.weight.shape, size)
        return layer_norms(draft_dims(draft, 8, 64), draft.layers[0], 0)
    root = draft_dims(make_draft(target, n_layers=1, block_size=8), 8, 64).head_dim ** 0.25
    norms(140 / root)
    with pytest.raises(ValueError, match="layer 0's norms of queries and keys allow scores of 20164: at most 19900 stay clear of the mask"): norms(142 / root)
    with pytest.raises(ValueError, match='allow scores of'): norms(140 / root, rope_scaling=yarn)
    stretch = float(np.abs(rope_tables(make_draft(target, n_layers=1, block_size=8, rope_scaling=yarn).layers[0], [0], np.float32)[0]).max())
    assert stretch > 1.3
    norms(140 / root / stretch, rope_scaling=yarn)
    with pytest.raises(ValueError, match='scores of nan'): norms(float('nan'))


# ---- whole drafts

@pytest.fixture(scope='module')
def draft(): return make_draft(tiny_model('llama'), n_layers=1, block_size=8)


def files(folder): return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(Path(folder).rglob('*')) if f.is_file() and not f.name.endswith('.lock')}


def test_a_draft_is_built_once(draft, tmp_path, monkeypatch):
    one = compile_draft(draft, 8, 64, folder=tmp_path)
    before = files(tmp_path)
    monkeypatch.setattr(Kernel, 'save', lambda *a: pytest.fail('built again'))
    assert compile_draft(draft, 8, 64, folder=tmp_path) == one
    other = compile_draft(draft, 64, 3, folder=tmp_path)                                       # the same columns
    assert other.programs == one.programs and (other.dims.block, other.dims.width, other.dims.context) == (64, 64, 64)
    assert files(tmp_path) == before


def test_what_changes_the_hash(draft, tmp_path, monkeypatch):
    import vllm_mlx.ane.programs as programs
    monkeypatch.setattr(programs, '_kernels', lambda *a: iter(()))                             # names alone
    base = dict(block=8, context=64, precision='fp16', head=False)
    made = [compile_draft(draft, **{**base, **change}, folder=tmp_path).folder for change in (dict(), dict(context=65), dict(precision='q8'), dict(limits=ALONE), dict(head=True))]
    weight = draft.layers[0].mlp.up_proj.weight
    draft.layers[0].mlp.up_proj.weight = weight + mx.where(mx.arange(weight.size).reshape(weight.shape) == 77, 1e-3, 0)         # one number
    try: made.append(compile_draft(draft, **base, folder=tmp_path).folder)
    finally: draft.layers[0].mlp.up_proj.weight = weight
    assert len(set(made)) == len(made)
    assert compile_draft(draft, **base, folder=tmp_path).folder == made[0]


def test_a_draft_is_there_whole_or_not_at_all(draft, tmp_path, monkeypatch):
    save, calls = Kernel.save, []
    def full(self, path):
        calls.append(path)
        if len(calls) == 3: raise OSError('No space left on device')
        return save(self, path)
    with monkeypatch.context() as m:
        m.setattr(Kernel, 'save', full)
        with pytest.raises(OSError, match='No space'): compile_draft(draft, 8, 64, folder=tmp_path)
    assert not files(tmp_path)
    made = compile_draft(draft, 8, 64, folder=tmp_path)
    before = files(tmp_path)
    lost = made.programs[1].path / 'Data/com.apple.CoreML/weights/weight.bin'
    lost.unlink()
    assert compile_draft(draft, 8, 64, folder=tmp_path) == made and lost.is_file()
    after = files(tmp_path)
    assert before.keys() == after.keys() and all(before[n] == after[n] for n in before if n.endswith('weight.bin'))


def test_two_processes_at_once(tmp_path):
    "The same draft compiled twice at the same time: both find one folder, whole, and nothing else is left."
    code = "import sys\nfrom vllm_mlx.ane.programs import compile_draft\nfrom vllm_mlx.dflash import make_draft\nfrom vllm_mlx.models import tiny_model\nd = make_draft(tiny_model('llama'), n_layers=1, block_size=8)\nprint('ready', flush=True); sys.stdin.readline()\nprint(compile_draft(d, 8, 64, folder=sys.argv[1]).folder)"
    both = [subprocess.Popen([sys.executable, '-c', code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for _ in range(2)]
    for p in both: assert p.stdout.readline().strip() == 'ready'
    for p in both: p.stdin.write('go\n'); p.stdin.flush()
    made = {p.communicate(timeout=300)[0].strip() for p in both}
    assert all(p.returncode == 0 for p in both) and len(made) == 1
    assert [f.name for f in tmp_path.iterdir() if not f.name.endswith('.lock')] == [Path(made.pop()).name]


def test_two_threads_at_once(tmp_path):
    "Two drafts in one process: coremltools builds one at a time, and standard error is what it was."
    target, before = tiny_model('llama'), sys.stderr
    drafts = [make_draft(target, n_layers=2, block_size=8, seed=i) for i in range(2)]
    for turn in range(5):
        got = {}
        def work(i):
            try: got[i] = compile_draft(drafts[i], 8, 64, folder=tmp_path / str(turn), head=False)
            except BaseException as e: got[i] = e
        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for t in threads: t.start()
        for t in threads: t.join()
        assert [type(got[i]) for i in range(2)] == [DraftPrograms] * 2, got
        assert sys.stderr is before
    weights = lambda programs: [f.read_bytes() for p in programs.programs for f in sorted(p.path.rglob('weight.bin'))]
    assert all(weights(got[i]) == weights(compile_draft(drafts[i], 8, 64, folder=tmp_path / 'alone', head=False)) for i in range(2))


@pytest.mark.parametrize('name', ['Data/com.apple.CoreML/weights/weight.bin', 'Data/com.apple.CoreML/model.mlmodel', 'Manifest.json', 'programs.json'])
def test_damage_of_the_same_size_is_found(draft, tmp_path, name):
    "A file whose bytes changed, not its size: the folder is built anew."
    made = compile_draft(draft, 8, 64, folder=tmp_path, head=False)
    before, damaged = files(tmp_path), made.folder / name if name == 'programs.json' else made.programs[1].path / name
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:200] + bytes(2800) + whole[3000:] if 'weight' in name else b' ' * len(whole))
    assert compile_draft(draft, 8, 64, folder=tmp_path, head=False) == made
    after = files(tmp_path)
    assert after.keys() == before.keys() and all(after[n] == before[n] for n in before if n.endswith('weight.bin')) and damaged.read_bytes().strip(b' ')
    known = json.loads((made.folder / 'programs.json').read_text())['files']
    assert f'{made.programs[1].name}.mlpackage/Manifest.json' in known and 'programs.json' not in known


def test_damage_that_stays_is_an_error(draft, tmp_path, monkeypatch):
    import vllm_mlx.ane.programs as programs
    made = compile_draft(draft, 8, 64, folder=tmp_path, head=False)
    weights = made.programs[0].path / 'Data/com.apple.CoreML/weights/weight.bin'
    weights.write_bytes(bytes(len(weights.read_bytes())))
    monkeypatch.setattr(programs.shutil, 'rmtree', lambda *a, **k: None)                       # a folder of somebody else
    with pytest.raises(OSError, match='is damaged, and cannot be made anew: remove it'): compile_draft(draft, 8, 64, folder=tmp_path, head=False)


def test_a_folder_that_takes_no_files(draft, tmp_path, monkeypatch):
    "What is there is used without a write; what is not there is an error that names the place."
    import vllm_mlx.models as models
    made = compile_draft(draft, 8, 64, folder=tmp_path, head=False)
    def no(*a, **k): raise PermissionError(13, 'Permission denied', str(tmp_path))
    for name in ('file_lock',): monkeypatch.setattr(models, name, no)
    monkeypatch.setattr(models.tempfile, 'mkdtemp', no)
    assert compile_draft(draft, 8, 64, folder=tmp_path, head=False) == made
    with pytest.raises(OSError, match=str(tmp_path)): compile_draft(draft, 8, 64, precision='q8', folder=tmp_path, head=False)


def test_plans_give_the_same_programs_in_other_groups(draft, tmp_path):
    names = {k: [p.name for p in compile_draft(draft, 8, 64, folder=tmp_path, limits=l).programs] for k, l in dict(alone=ALONE, whole=WHOLE).items()}
    assert names['alone'] == ['fc_norm', *(f'layer0.{s}' for s in LAYER), 'final_norm', 'lm_head0']
    assert names['whole'] == ['fc_norm', 'layer0.' + '+'.join(LAYER), 'final_norm', 'lm_head0']


def test_a_head_that_is_quantised_or_missing(tmp_path):
    import mlx.nn as nn
    target = tiny_model('qwen3')
    draft = make_draft(target, n_layers=1, block_size=4)
    nn.quantize(target, 32, 8)
    draft.bind(target)
    programs = compile_draft(draft, 4, 8, folder=tmp_path)
    table = target.model.embed_tokens
    want = np.array(mx.dequantize(table.weight, table.scales, table.biases, 32, 8).astype(mx.float32)).astype(np.float16)
    got = read_blob(next(p for p in programs.programs if p.name == 'lm_head0').path / 'Data/com.apple.CoreML/weights/weight.bin', 64)
    assert (got.reshape(want.shape) == want).all()
    draft._lent = None
    with pytest.raises(ValueError, match='call `draft.bind'): compile_draft(draft, 4, 8, folder=tmp_path)
    assert compile_draft(draft, 4, 8, folder=tmp_path, head=False).head_starts == ()


def test_works_without_coremltools_until_it_is_needed(tmp_path):
    code = '''
import sys
sys.modules['coremltools'] = None
import vllm_mlx.ane.kernels as k, vllm_mlx.ane.programs as p, vllm_mlx.ane.interpreter as i, numpy as np
assert k.read_argmax(np.ones((1, 3, 1, 64), np.float16), 2) == [0, 0] and k.quantize_rows([[1.0]])[0] == 127
(__import__('pathlib').Path(sys.argv[1]) / 'a.mlpackage').mkdir()
(__import__('pathlib').Path(sys.argv[1]) / 'a.mlpackage' / 'Manifest.json').write_text('{}')
d = k.DraftDims(32, 4, 2, 8, 48, 3, 8, 64, 64, 1, 100, 1e-6)
for f in (lambda: k.build_gqa_tile_kernel(d), lambda: i.load_program(sys.argv[1] + '/a.mlpackage')):
    try: f()
    except ImportError as e: assert "coremltools>=9.0,<10" in str(e), e
    else: raise SystemExit('no error')
print('fine')
'''
    out = subprocess.run([sys.executable, '-c', code, str(tmp_path)], capture_output=True, text=True, env=os.environ)
    assert out.returncode == 0 and 'fine' in out.stdout, out.stderr
