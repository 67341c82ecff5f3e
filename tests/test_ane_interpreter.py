"Saved Core ML programs, run by numpy, against the MLX draft."
import shutil, sys, threading
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import vllm_mlx  # noqa: F401
import mlx.core as mx
import mlx.nn as nn
from hypothesis import given, settings, strategies as st
from mlx.utils import tree_flatten

ct = pytest.importorskip('coremltools', reason="not available here: pip install 'coremltools>=9.0,<10'")
from vllm_mlx.ane.draft import why_not
from vllm_mlx.ane.interpreter import *
from vllm_mlx.ane.interpreter import OPERATIONS, ReferenceProgram
from vllm_mlx.ane.kernels import *
from vllm_mlx.ane.kernels import mil
from vllm_mlx.ane.programs import *
from vllm_mlx.ane.programs import head_matrix
from vllm_mlx.dflash import DFlashDraftModel, default_draft, load_dflash, make_draft
from vllm_mlx.models import load, tiny_model
from vllm_mlx.train import train
from vllm_mlx.train_data import Sample, target_features

NAME = 'nano-hybrid'                                                                # the target whose shipped draft is used, if there is one
ALONE, WHOLE = Limits(never_together=tuple(combinations(LAYER, 2))), Limits(operations=1000, never_together=())
in_float32 = lambda path: load_program(path, precision='float32')
EXACT = 1e-4     # float32 against float32, the same weights: sums in another order, and sqrt(eps) rounded to fp16
def exact_for(D): return EXACT if float(np.float16(D ** -0.5)) == D ** -0.5 else 3e-3 # else 1/sqrt(D) is rounded to fp16 in the file, and so is every score
ROUNDED = 0.01   # some twenty roundings of 2**-11 = 0.0005 each, of either sign, to the largest value of a tensor
ROUNDED_Q8 = 0.06 # and weights off by up to 0.4 % of their row's largest


def as_baked(draft, q8=False):
    "The draft with the weights that the files hold."
    bake = lambda a: Q8Matrix.of(a).dense() if q8 and a.ndim == 2 else a
    rounded = lambda a: mx.array(bake(np.array(a.astype(mx.float32))).astype(np.float16).astype(np.float32))
    new = DFlashDraftModel(draft.config)
    new.load_weights([(n, rounded(a)) for n, a in tree_flatten(draft.parameters())])
    head = rounded(mx.array(head_matrix(draft)))
    new._lent = SimpleNamespace(embed=draft._lent.embed, head=lambda h: h @ head.T, dtype=draft._lent.dtype, target=None)
    return new


def lively_draft(family='llama', seed=0, **options):
    "A random draft whose attention is not uniform, and whose norms all differ."
    draft = make_draft(tiny_model(family), **{**dict(n_layers=1, block_size=8, seed=seed), **options})
    rng = np.random.default_rng(seed)
    new = lambda n, a: rng.uniform(0.5, 2, a.shape) if n.endswith('norm.weight') else rng.normal(0, 0.3, a.shape) if n.endswith('.bias') else np.array(a) * 3
    draft.load_weights([(n, mx.array(new(n, a).astype(np.float32))) for n, a in tree_flatten(draft.parameters())])
    return draft


def block_and_context(draft, T, S, seed=0):
    rng, c = np.random.default_rng(seed), draft.config
    make = lambda n, width: mx.array(rng.normal(size=(1, n, width)).astype(np.float16).astype(np.float32))
    return make(S, c.hidden_size), make(T, c.hidden_size * len(c.target_layer_ids))


def drive(programs, draft, x, features, offset=0, precision='float32', spoil=None, runs=None):
    d, T, S = programs.dims, features.shape[1], x.shape[1]
    dtype = np.float32 if precision == 'float32' else np.float16
    buffers = fixed_inputs(programs, draft, T, S, offset, dtype)
    buffers |= dict(hidden=to_columns(x, d.width).astype(dtype), features=(to_columns(features, d.context) if T else np.zeros((1, features.shape[2], 1, d.context))).astype(dtype))
    if spoil: spoil(buffers, T, S)
    for i, p in enumerate(programs.programs):
        run = runs[i] if runs else load_program(p.path, precision=precision)
        out = run({q.name: buffers[q.buffer] for q in p.inputs})
        buffers |= {q.buffer: out[q.name] for q in p.outputs}
    return buffers


# ---- programs of random drafts: every order and shape

SHAPES = [dict(heads=(4, 2, 16)), dict(heads=(4, 4, 8)), dict(heads=(6, 1, 32)), dict(heads=(9, 3, 64)), dict(heads=(8, 2, 16), bias=True)]

@pytest.mark.parametrize('shape', SHAPES, ids=lambda s: str(s['heads']))
def test_heads_offsets_and_lengths(shape, tmp_path):
    n, kv, D = shape['heads']
    draft = lively_draft(num_attention_heads=n, num_key_value_heads=kv, head_dim=D, attention_bias=shape.get('bias', False), seed=n)
    for q8, limits in ((False, ALONE), (True, WHOLE)) if shape is SHAPES[0] else ((True, WHOLE),):
        programs, baked = compile_draft(draft, 8, 64, precision='q8' if q8 else 'fp16', folder=tmp_path, limits=limits), as_baked(draft, q8)
        loaded = {p.path: in_float32(p.path) for p in programs.programs}
        for T, S, offset in ((64, 8, 0), (1, 1, 5), (17, 64, 1000)):
            errors = compare_stages(programs, baked, *block_and_context(draft, T, S, T), offset, load=loaded.get)
            assert max(errors.values()) < exact_for(D) and max(e for (_, o), e in errors.items() if o not in ('attn_flat', 'hidden_out')) < EXACT, (T, S, offset, max(errors, key=errors.get), max(errors.values()))


@pytest.mark.parametrize('options', [dict(sliding_window=6, layer_types=['sliding_attention', 'full_attention']), dict(is_causal=True), dict(rope_scaling=dict(rope_type='yarn', factor=4.0, original_max_position_embeddings=64)),
                                     dict(rms_norm_eps=1e-2), dict(rope_theta=1e6)], ids=lambda o: next(iter(o)))
def test_kinds_of_drafts(options, tmp_path):
    draft = lively_draft(**{'n_layers': len(options.get('layer_types', [0])), **options})
    programs = compile_draft(draft, 8, 64, folder=tmp_path)
    x, features = block_and_context(draft, 20, 8)
    assert max(compare_stages(programs, as_baked(draft), x, features, 100, load=in_float32).values()) < EXACT
    got = from_columns(drive(programs, draft, x, features)['output'], 8)                         # end to end, and against `forward`
    want = np.array(as_baked(draft).forward(x, features))
    assert np.abs(got - want).max() < 1e-3 * np.abs(want).max()


def test_no_context_at_all(tmp_path):
    draft = lively_draft()
    programs = compile_draft(draft, 8, 64, folder=tmp_path)
    x, features = block_and_context(draft, 0, 8)
    want = np.array(as_baked(draft).forward(x))
    np.testing.assert_allclose(from_columns(drive(programs, draft, x, features)['output'], 8), want, atol=1e-3 * np.abs(want).max())


def test_padding_may_hold_anything(tmp_path):
    draft = lively_draft(n_layers=2)
    programs = compile_draft(draft, 8, 128, folder=tmp_path)
    x, features = block_and_context(draft, 30, 5)
    def spoil(buffers, T, S):
        rng = np.random.default_rng(0)
        for name, n in (('hidden', S), ('features', T)): buffers[name][..., n:] = rng.normal(size=buffers[name][..., n:].shape) * 100
        for name in ('cos_k', 'sin_k'): buffers[name][:, :, T:programs.dims.context] = rng.uniform(-1, 1, buffers[name][:, :, T:programs.dims.context].shape)
        for name in ('cos_q', 'sin_q'): buffers[name][:, :, S:] = 0.5
    clean, spoilt = drive(programs, draft, x, features), drive(programs, draft, x, features, spoil=spoil)
    assert not (clean['output'][..., 5:] == spoilt['output'][..., 5:]).all()
    np.testing.assert_allclose(clean['logits0'][..., :5], spoilt['logits0'][..., :5], rtol=1e-5, atol=1e-5 * np.abs(clean['logits0'][..., :5]).max())


def test_a_longer_compilation_changes_nothing(tmp_path):
    draft = lively_draft()
    x, features = block_and_context(draft, 40, 8)
    short, long = (drive(compile_draft(draft, block, context, folder=tmp_path), draft, x, features, 9)['logits0'][..., :8] for block, context in ((8, 40), (100, 200)))
    np.testing.assert_allclose(short, long, atol=1e-4 * np.abs(short).max())


# ---- a trained draft

@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    target, tokenizer = load(NAME)
    text = 'def add(a, b):\n    return a + b\n\nclass Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n    def move(self, dx, dy):\n        self.x += dx\n        self.y += dy\n        return self\n' * 2
    tokens = np.array(tokenizer.encode(text)[:80], np.int32)
    if default_draft(NAME): draft = load_dflash(default_draft(NAME), target)
    else:
        draft = make_draft(target, n_layers=2, block_size=8, n_features=2, tokenizer=tokenizer)
        rng = np.random.default_rng(0)
        draft.load_weights([(n, mx.array(rng.uniform(0.5, 1.5, a.shape).astype(np.float32))) for n, a in tree_flatten(draft.parameters()) if n.endswith('norm.weight')], strict=False)
    features = target_features(target, tokens[None], draft.config.target_layer_ids)
    if not default_draft(NAME): train(draft, [Sample(0, tokens, 8, features[0])], steps=15, batch=1, n_anchors=8, lr=3e-3)
    folder = tmp_path_factory.mktemp('programs')
    programs = {(p, name): compile_draft(draft, draft.config.block_size, 64, precision=p, folder=folder, limits=l) for p in ('fp16', 'q8') for name, l in dict(alone=ALONE, planned=Limits()).items()}
    return SimpleNamespace(target=target, draft=draft, tokens=tokens, features=features, programs=programs,
                           at=lambda a: (draft.embed(draft.block(int(tokens[a]))), features[:, :a]))


@pytest.mark.parametrize('precision', ['fp16', 'q8'])
@pytest.mark.parametrize('plan', ['alone', 'planned'])
def test_every_program_is_the_mlx_drafts_stage(trained, precision, plan):
    programs = trained.programs[precision, plan]
    if plan == 'alone': assert {p.name for p in programs.programs if p.name.startswith('layer0.')} == {f'layer0.{s}' for s in LAYER}
    x, context = trained.at(50)
    exact = compare_stages(programs, as_baked(trained.draft, programs.q8), x, context, 3, load=in_float32)
    assert max(exact.values()) < EXACT, max(exact, key=exact.get)
    for flush in (False, True):
        rounded = compare_stages(programs, trained.draft, x, context, 3, load=lambda path: load_program(path, flush=flush))
        assert max(rounded.values()) < (ROUNDED_Q8 if programs.q8 else ROUNDED), max(rounded, key=rounded.get)


@pytest.mark.parametrize('precision, least', [('fp16', 0.95), ('q8', 0.85)])
def test_the_same_tokens_are_drafted(trained, precision, least):
    programs, same = trained.programs[precision, 'planned'], []
    runs = [load_program(p.path) for p in programs.programs]
    for a in (10, 30, 55, 64):
        x, context = trained.at(a)
        out = drive(programs, trained.draft, x, context, precision='float16', runs=runs)
        got = read_argmax([out[f'logits{i}'] for i in range(len(programs.head_starts))], x.shape[1], programs.dims.vocab)
        same += (np.array(trained.draft.logits(trained.draft.forward(x, context))[0].argmax(-1)) == got).tolist()
    assert np.mean(same) >= least


def test_mutations_are_seen(trained):
    programs, (x, context), c = trained.programs['fp16', 'alone'], trained.at(50), trained.draft.config
    D, H, KV = c.head_dim, c.num_attention_heads, c.num_key_value_heads
    def swap(w, a, b):
        rows = np.arange(w.shape[0]); rows[a * D:(a + 1) * D], rows[b * D:(b + 1) * D] = np.arange(b * D, (b + 1) * D), np.arange(a * D, (a + 1) * D)
        return w[mx.array(rows)]
    cases = {('q_rope', f'q {a} {b}'): ('q_proj', lambda w, a=a, b=b: swap(w, a, b)) for a, b in combinations(range(H), 2)}
    cases |= {(t, f'{t} {a} {b}'): (m, lambda w, a=a, b=b: swap(w, a, b)) for t, m in (('k_rope', 'k_proj'), ('v', 'v_proj')) for a, b in combinations(range(KV), 2)}
    cases |= {('h1', 'columns of o'): ('o_proj', lambda w: swap(w.T, 0, 1).T)}
    only = SimpleNamespace(**{f: getattr(programs, f) for f in ('dims', 'norms', 'head_starts')}, programs=[p for p in programs.programs if p.name in ('layer0.mega_qkv', 'layer0.o_proj_residual')])
    for (tensor, said), (module, change) in cases.items():
        wrong = as_baked(trained.draft)
        m = getattr(wrong.layers[0].self_attn, module)
        m.weight = change(m.weight)
        errors = {o: e for (_, o), e in compare_stages(only, wrong, x, context, load=in_float32).items()}
        assert errors[tensor] > 100 * EXACT, said
        if tensor != 'h1': assert all(e < EXACT for o, e in errors.items() if o not in (tensor, 'h1')), said       # and nothing else


def test_threads_share_a_program(trained):
    programs = trained.programs['fp16', 'planned']
    runs = [load_program(p.path) for p in programs.programs]
    given_ = [{q: np.random.default_rng(i).normal(size=s).astype(np.float16) for q, s in r.inputs.items()} for i, r in enumerate(runs[:3])]
    want, got = [r(g) for r, g in zip(runs, given_)], [None] * 6
    def work(i): got[i] = runs[i % 3](given_[i % 3])
    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads: t.start()
    for t in threads: t.join()
    for i in range(6): assert all((got[i][n] == want[i % 3][n]).all() for n in want[i % 3])


# ---- single operations and broken files

def saved(tmp_path, emit, shape=(1, 8, 2, 64)):
    m = mil()
    with m.Function({'x': m.mb.placeholder(shape=shape, dtype=m.types.fp16)}, opset_version=m.ct.target.iOS17) as f:
        f.set_outputs([emit(m.mb, f.inputs['x'])])
    p = m.Program(); p.add_function('main', f)
    return Kernel('p', p, (), (), 1).save(tmp_path / 'p.mlpackage')


@pytest.mark.parametrize('name, emit, want', [
    ('abs', lambda mb, x: mb.abs(x=x), np.abs), ('tanh', lambda mb, x: mb.tanh(x=x), np.tanh), ('silu', lambda mb, x: mb.silu(x=x), lambda x: x / (1 + np.exp(-x))),
    ('maximum', lambda mb, x: mb.maximum(x=x, y=np.float16(0.5)), lambda x: np.maximum(x, 0.5)), ('pow', lambda mb, x: mb.pow(x=mb.abs(x=x), y=np.float16(-0.5)), lambda x: np.abs(x) ** -0.5),
    ('reduce_max', lambda mb, x: mb.reduce_max(x=x, axes=[1], keep_dims=True), lambda x: x.max(1, keepdims=True)), ('reduce_mean', lambda mb, x: mb.reduce_mean(x=x, axes=[-1], keep_dims=False), lambda x: x.mean(-1)),
    ('softmax', lambda mb, x: mb.softmax(x=x, axis=1), lambda x: np.exp(x) / np.exp(x).sum(1, keepdims=True)), ('concat', lambda mb, x: mb.concat(values=[x, x], axis=-1), lambda x: np.concatenate([x, x], -1)),
    ('slice_by_index', lambda mb, x: mb.slice_by_index(x=x, begin=[0, 1, 0, 3], end=[1, 7, 2, 60], stride=[1, 2, 1, 3]), lambda x: x[:, 1:7:2, :, 3:60:3]),
    ('slice_by_index', lambda mb, x: mb.slice_by_index(x=x, begin=[0, 0, 0, 3], end=[0, 0, 0, 9], end_mask=[True, True, True, False]), lambda x: x[..., 3:9]),
    ('transpose', lambda mb, x: mb.transpose(x=x, perm=[0, 3, 1, 2]), lambda x: x.transpose(0, 3, 1, 2)), ('reshape', lambda mb, x: mb.reshape(x=x, shape=[2, 4, 128, 1]), lambda x: x.reshape(2, 4, 128, 1)),
    ('matmul', lambda mb, x: mb.matmul(x=x, y=x, transpose_x=True), lambda x: x.swapaxes(2, 3) @ x), ('mul', lambda mb, x: mb.mul(x=x, y=x), lambda x: x * x), ('add', lambda mb, x: mb.add(x=x, y=np.float16(3)), lambda x: x + 3),
    ('conv', lambda mb, x: mb.conv(x=x, weight=np.arange(40, dtype=np.float16).reshape(5, 8, 1, 1), bias=np.ones(5, np.float16), pad_type='valid'), lambda x: np.einsum('oi,bihw->bohw', np.arange(40.).reshape(5, 8), x) + 1)])
def test_operations_from_files(tmp_path, name, emit, want):
    x, path = np.random.default_rng(0).normal(size=(1, 8, 2, 64)).astype(np.float16), saved(tmp_path, emit)
    for precision, tolerance in (('float32', 1e-5), ('float16', 1e-3)):
        program = ReferenceProgram(path, precision)
        assert name in {s[0] for s in program.steps}
        got, expected = next(iter(program(dict(x=x)).values())), want(x.astype(np.float64))
        assert got.shape == expected.shape and got.dtype == precision
        np.testing.assert_allclose(got, expected, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize('emit, said', [(lambda mb, x: mb.erf(x=x), 'operation erf, which'), (lambda mb, x: mb.sqrt(x=x), 'operation sqrt, which'), (lambda mb, x: mb.reduce_sum(x=x, axes=[1]), 'operation reduce_sum, which')])
def test_unknown_operations_are_named(tmp_path, emit, said):
    with pytest.raises(NotImplementedError, match=said): load_program(saved(tmp_path, emit))


def test_a_larger_convolution_is_refused(tmp_path):
    run = load_program(saved(tmp_path, lambda mb, x: mb.conv(x=x, weight=np.ones((4, 8, 1, 3), np.float16), pad_type='same')))
    with pytest.raises(NotImplementedError, match='only 1x1'): run(dict(x=np.ones((1, 8, 2, 64), np.float16)))


def test_fp16_overflows_where_it_must(tmp_path):
    path, x = saved(tmp_path, lambda mb, x: mb.mul(x=x, y=x)), np.full((1, 8, 2, 64), 300, np.float16)
    assert np.isinf(load_program(path)(dict(x=x))[load_program(path).outputs[0]]).all()
    assert (load_program(path, precision='float32')(dict(x=x))[load_program(path).outputs[0]] == 90000).all()
    tiny = np.full_like(x, 2e-5)
    path = saved(tmp_path, lambda mb, x: mb.abs(x=x))
    kept, flushed = (next(iter(load_program(path, flush=f)(dict(x=tiny)).values())) for f in (False, True))
    assert (kept > 0).all() and not flushed.any()


def test_large_scores_and_logits(tmp_path):
    "Scores near fp16's end are still a softmax; logits beyond it are infinite, the same for all of them, and the lowest id wins; a NaN among them never does."
    dims = DraftDims(hidden=64, heads=2, kv_heads=1, head_dim=64, mlp=64, n_features=1, block=8, width=64, context=64, layers=1, vocab=8, eps=1e-6)
    q, kv, mask = np.zeros((1, 2, 64, 64), np.float16), np.zeros((1, 4, 128, 64), np.float16), attention_mask(dims, 64, 64)
    q[..., 0], kv[:, :2, :, 0], kv[:, 2:, :, 0] = 800, np.linspace(-500, 500, 128), np.arange(128)
    out = load_program(build_attention_kernel(dims).save(tmp_path / 'a.mlpackage'))(dict(q_rope=q, kv_tiled=kv, mask=mask))['attn_flat']       # scores from -50,000 to 50,000
    assert np.isfinite(out).all() and (out[0, 0, 0] == 127).all()
    head = np.zeros((8, 64), np.float32)
    head[[2, 5]], head[3] = 60000, -60000
    logits = load_program(build_final_norm_lm_head_kernel(dims, head).save(tmp_path / 'h.mlpackage'))(dict(hidden=np.full((1, 64, 1, 64), 30000, np.float16), norm_w=np.ones((1, 64, 1, 64), np.float16)))['logits0']
    assert np.isinf(logits[0, [2, 3, 5]]).all() and read_argmax(logits, 64) == [2] * 64
    logits[0, 2], logits[0, 0] = np.nan, np.nan
    assert read_argmax(logits, 64) == [5] * 64


def test_not_finite_results_are_reported(trained):
    programs, (x, context) = trained.programs['fp16', 'planned'], trained.at(20)
    def broken(path):
        run = load_program(path)
        return lambda inputs: {n: np.where(np.arange(a.shape[-1]) == a.shape[-1] - 1, np.nan, a) for n, a in run(inputs).items()}
    with pytest.raises(FloatingPointError, match='fc_norm gives numbers that are not finite in context'): compare_stages(programs, trained.draft, x, context, load=broken)


def test_broken_packages(tmp_path):
    W = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    dims = DraftDims(hidden=64, heads=4, kv_heads=2, head_dim=16, mlp=96, n_features=2, block=8, width=64, context=64, layers=1, vocab=100, eps=1e-6)
    path = build_o_proj_residual_kernel(dims, W).save(tmp_path / 'a.mlpackage')
    weights = path / 'Data/com.apple.CoreML/weights/weight.bin'
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match='weight.bin ends within the array at byte 64'): load_program(path)
    weights.write_bytes(b'\0' * len(whole))
    with pytest.raises(ValueError, match='no array at byte 64'): load_program(path)
    weights.write_bytes(whole[:68] + bytes([99]) + whole[69:])
    with pytest.raises(ValueError, match='an array of type 99'): load_program(path)
    weights.write_bytes(whole)
    model = path / 'Data/com.apple.CoreML/model.mlmodel'
    message = model.read_bytes()
    for bad in (message[:len(message) // 2], b'\xff' * 100, b''):
        model.write_bytes(bad)
        with pytest.raises(ValueError, match='a.mlpackage'): load_program(path)
    model.write_bytes(message)
    weights.unlink()
    with pytest.raises(OSError, match='weight.bin'): load_program(path)
    (path / 'Manifest.json').unlink()
    with pytest.raises(ValueError, match='is no .mlpackage'): load_program(path)
    with pytest.raises(ValueError, match='is no .mlpackage'): load_program(tmp_path / 'nothing.mlpackage')


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_blobs(data):
    import tempfile, pathlib
    from coremltools.libmilstoragepython import _BlobStorageWriter
    arrays = data.draw(st.lists(st.tuples(st.sampled_from([np.int8, np.float16, np.float32]), st.integers(1, 200)), min_size=1, max_size=5))
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / 'weight.bin'
        writer, placed = _BlobStorageWriter(str(file)), []
        for kind, n in arrays:
            a = np.random.default_rng(n).integers(-100, 100, n).astype(kind)
            write = {np.int8: lambda: writer.write_int8_data(a), np.float16: lambda: writer.write_fp16_data(a.view(np.uint16)), np.float32: lambda: writer.write_float_data(a)}[kind]
            placed.append((write(), a))
        del writer
        for offset, a in placed:
            got = read_blob(file, offset)
            assert got.dtype == a.dtype and (got == a).all()


# ---- the real thing, on a Mac

on_a_mac = pytest.mark.skipif(why_not('coreml') is not None, reason=str(why_not('coreml')))

@pytest.mark.skipif(sys.platform == 'darwin', reason='only where there is no Core ML')
def test_core_ml_is_refused_clearly(trained):
    path = trained.programs['fp16', 'planned'].programs[0].path
    for f in (lambda: load_program(path, 'coreml'), lambda: compute_units(path)):
        with pytest.raises(RuntimeError, match='Core ML is not available here'): f()


@on_a_mac
@pytest.mark.parametrize('precision', ['fp16', 'q8'])
@pytest.mark.parametrize('plan', ['alone', 'planned'])
def test_core_ml_agrees(trained, precision, plan):
    programs = trained.programs[precision, plan]
    errors = compare_stages(programs, trained.draft, *trained.at(50), 3, load=lambda path: load_program(path, 'coreml'))
    for p in programs.programs:
        units = [u for _, _, u in compute_units(p.path)]
        print(f"{p.name:45} {({u: units.count(u) for u in set(units)})}  largest error {max(e for (n, _), e in errors.items() if n == p.name):.4f}")
    assert max(errors.values()) < 2 * (ROUNDED_Q8 if programs.q8 else ROUNDED), max(errors, key=errors.get)       # twice: sums may be kept in fp16
