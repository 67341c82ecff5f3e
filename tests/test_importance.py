"Scoring: every family and dtype, explicit masks as the reference, a cancel or an error at every chunk, threads, memory."
import copy, gc, threading
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mlx_lm.models.cache import make_prompt_cache
from vllm_mlx import blas
from vllm_mlx.importance import (PrefillCancelled, _avg_pool1d, _llama_extract_queries, attention_rows, score_heads, score_segments,
                                 score_tokens, score_window, segment_spans, window_queries)
from vllm_mlx.layers import _get_rope, attention_layout
from vllm_mlx.models import TINY_FAMILIES, tiny_model

DTYPES = dict(float32=mx.float32, bfloat16=mx.bfloat16, float16=mx.float16)
MATRIX = [(f, d) for f in TINY_FAMILIES for d in DTYPES if f != 'gpt_oss' or d == 'float32']      # MLX runs experts in float32 only on a CPU
M = 48
PROMPT = [int(t) for t in np.random.default_rng(3).integers(1, 500, M)]
PREFIX = [int(t) for t in np.random.default_rng(4).integers(1, 500, 9)]
equal = lambda a, b: mx.array_equal(a, b, equal_nan=True).item()
logits = lambda model: model(mx.array(PROMPT)[None])

def with_prefix(model):
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array(PREFIX)[None], cache=cache), [c.state for c in cache])
    return cache

# ways to score, each with a step small enough for several chunks
SCORERS = dict(
    tokens=lambda m, **kw: score_tokens(m, PROMPT, 3, prefill_step_size=10, **kw),
    window=lambda m, **kw: score_window(m, PROMPT, window=8, step_size=10, **kw),
    body=lambda m, **kw: score_window(m, PROMPT, window=8, step_size=10, body=(2, 6), **kw),
    segments=lambda m, **kw: score_segments(m, PROMPT, 32, window=8, head=4, tail=8, overlap=4, step_size=10, **kw))

@pytest.mark.parametrize('family, dtype', MATRIX)
def test_matrix(family, dtype):
    "Scores are finite float32 in every dtype, near those of float32, and the model is as it was."
    model, exact = tiny_model(family, dtype=DTYPES[dtype]), tiny_model(family)
    before, cache = logits(model), with_prefix(model)
    assert before.dtype == DTYPES[dtype]
    for name in ('window', 'tokens'):
        s = SCORERS[name](model, cache=cache)
        assert s.dtype == mx.float32 and s.shape == (M,) and mx.isfinite(s).all() and (s > 0).all()
    near = np.array(SCORERS['window'](model)), np.array(SCORERS['window'](exact))
    assert np.corrcoef(*near)[0, 1] > 0.95 and np.abs(near[0] - near[1]).max() < 0.2 * near[1].max()
    assert equal(logits(model), before)
    assert {a.dtype for l in attention_layout(model) for a in (cache[l.slot].keys, cache[l.slot].values)} == {DTYPES[dtype]}

LLAMA = tiny_model('llama')

def by_mask(model, mask, window):
    "Window scores of a llama with an explicit (M, M) mask for the whole forward."
    h, per_layer = model.model.embed_tokens(mx.array(PROMPT)[None]), []
    for layer in model.layers:
        a, x = layer.self_attn, layer.input_layernorm(h)
        keys = a.rope(a.k_proj(x).reshape(1, M, a.n_kv_heads, -1).transpose(0, 2, 1, 3))
        per_layer.append(attention_rows(_llama_extract_queries(a, x)[:, :, -window:], keys, a.scale, M - window))
        h = layer(h, mx.array(mask))
    return _avg_pool1d(mx.stack(per_layer), 13).max(axis=(0, 1)).mean(axis=0)

@settings(max_examples=12, deadline=None)
@given(st.integers(0, 12), st.integers(1, 30), st.integers(1, 48), st.integers(1, 60))
def test_body_is_an_explicit_mask(sinks, near, window, step):
    "Sinks and a sliding window streamed through the cache: the same as their mask written out."
    model = LLAMA
    row, col = np.arange(M)[:, None], np.arange(M)[None]
    mask = (col <= row) & ((row >= M - window) | (col < sinks) | (col > row - near))
    got = score_window(model, PROMPT, window=window, body=(sinks, near), step_size=step)
    assert mx.allclose(got, by_mask(model, mask, window), atol=1e-5)

def test_two_routes_to_the_last_query():
    "No look-ahead at all is a query window of one token."
    for family in TINY_FAMILIES:
        model = tiny_model(family)
        assert mx.allclose(score_tokens(model, PROMPT, 0), score_window(model, PROMPT, window=1), atol=1e-4), family

def test_include_last_adds_a_row():
    model = tiny_model('qwen3')
    zero, five, six = score_tokens(model, PROMPT, 0), score_tokens(model, PROMPT, 5), score_tokens(model, PROMPT, 5, include_last=True)
    assert mx.allclose(6 * six, 5 * five + zero, atol=1e-5)

def test_stop_token_ends_the_lookahead():
    model = tiny_model('llama')
    first = model(mx.array(PROMPT)[None])[0, -1].argmax().item()
    assert equal(score_tokens(model, PROMPT, 8, temp=0, stop_tokens=(first,)), score_tokens(model, PROMPT, 1, temp=0))

@pytest.mark.parametrize('family', TINY_FAMILIES)
def test_prefix_moves_positions_only(family):
    "Queries and keys after a prefix in the cache are those of one prompt read in one piece; the prefix gets no scores."
    model, n = tiny_model(family, **(dict(sliding_window=128) if family in ('gemma3', 'gpt_oss') else {})), len(PREFIX)
    cache = with_prefix(model)
    parts = window_queries(model, PROMPT, window=6, step_size=11, cache=cache)
    whole = window_queries(model, PREFIX + PROMPT, window=6, step_size=100)
    assert len(parts) == len(whole) == len(attention_layout(model))
    for (l, _, q, k), (_, _, q1, k1) in zip(parts, whole):
        assert k.shape[2] == M
        assert mx.allclose(q, q1, atol=1e-3) and mx.allclose(k, k1[:, :, n:], atol=1e-3), l.index
    assert cache[attention_layout(model)[0].slot].offset == n

def test_sliding_layers_are_skipped():
    for family in ('gemma3', 'gpt_oss'):
        model = tiny_model(family)
        layout = attention_layout(model)
        full, sliding = [l.index for l in layout if l.window is None], [l.index for l in layout if l.window]
        assert mx.allclose(score_window(model, PROMPT), score_window(model, PROMPT, layers=full), atol=1e-6)
        assert set(score_heads(model, PROMPT)) == set(full)
        with pytest.raises(RuntimeError, match='choose full-attention layers'): score_window(model, PROMPT, layers=sliding)
        assert score_window(model, PROMPT[:12], layers=sliding).shape == (12,)       # within their window they can

class Poison:
    "Calls the module it stands for, and raises at call number `at`."
    def __init__(self, module, at): self.module, self.left = module, at
    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left < 0: raise ZeroDivisionError('poisoned')
        return self.module(*args, **kwargs)

@pytest.mark.parametrize('family', ['qwen3_5', 'nemotron_h'])
def test_layers_above_are_not_run(family):
    "In hybrids too: what stands above the last wanted layer may be broken."
    model = tiny_model(family)
    first, last = [l.index for l in attention_layout(model)][::len(attention_layout(model)) - 1]
    want = score_window(model, PROMPT, layers=[first])
    layer, name = model.layers[first + 1], 'mixer' if family == 'nemotron_h' else 'mlp'
    sound = layer[name]
    setattr(layer, name, Poison(sound, 0))
    assert equal(score_window(model, PROMPT, layers=[first]), want)
    with pytest.raises(ZeroDivisionError): score_window(model, PROMPT, layers=[last])
    setattr(layer, name, sound)

# --- faults ---

@pytest.fixture
def blas_threads():
    "Two OpenBLAS threads, which must be two again afterwards."
    lib = blas._openblas()
    if lib is None: yield; return
    before = lib.openblas_get_num_threads()
    lib.openblas_set_num_threads(2)
    yield
    found = lib.openblas_get_num_threads()
    lib.openblas_set_num_threads(before)
    assert found == 2

class Harm:
    "What must be unchanged after a fault: logits, cache, RoPEs, random state."
    def __init__(self, family):
        self.model, self.family = tiny_model(family), family
        self.cache = with_prefix(self.model)
        self.ropes = [_get_rope(l.attn) for l in attention_layout(self.model)]
        self.modules = [l.attn for l in attention_layout(self.model)]
        self.fresh = tiny_model(family)
        self.dense = logits(self.fresh)
        self.next = self.fresh(mx.array([[7, 8]]), cache=with_prefix(self.fresh))
        mx.random.seed(21); self.key = mx.array(mx.random.state[0])
        mx.eval(self.dense, self.next, self.key)
    def check(self):
        assert equal(logits(self.model), self.dense)
        assert equal(self.model(mx.array([[7, 8]]), cache=copy.deepcopy(self.cache)), self.next)
        layout = attention_layout(self.model)
        assert all(a is l.attn for a, l in zip(self.modules, layout)) and all(r is _get_rope(l.attn) for r, l in zip(self.ropes, layout))
        assert equal(mx.random.state[0], self.key)

def prefixed(name, harm): return {} if name == 'segments' else dict(cache=harm.cache)

def at_call(n, error=None):
    "A cancel_check (or callback) whose call number n answers true, or raises."
    calls = iter(range(10**6))
    def check(*_):
        if next(calls) == n:
            if error is not None: raise error
            return True
        return False
    check.count = lambda: next(calls)
    return check

@pytest.mark.parametrize('name', SCORERS)
@pytest.mark.parametrize('family', ['llama', 'qwen3_5', 'gemma3', 'nemotron_h'])
def test_cancelled_at_every_chunk(family, name, blas_threads):
    harm, counter = Harm(family), at_call(-1)
    want = SCORERS[name](harm.model, cancel_check=counter, **prefixed(name, harm))
    chunks = counter.count()
    assert chunks >= 5
    for n in range(chunks):
        error = (None, KeyboardInterrupt(), ZeroDivisionError())[n % 3]
        with pytest.raises(PrefillCancelled if error is None else type(error)):
            SCORERS[name](harm.model, cancel_check=at_call(n, error), **prefixed(name, harm))
        if n in (0, 1, 2, chunks - 1): harm.check()
    assert equal(SCORERS[name](harm.model, **prefixed(name, harm)), want)
    harm.check()

@pytest.mark.parametrize('name', ['window', 'body', 'segments'])
def test_progress_raises_at_every_chunk(name, blas_threads):
    harm, counter = Harm('llama'), at_call(-1)
    SCORERS[name](harm.model, progress=counter, **prefixed(name, harm))
    for n in range(counter.count()):
        with pytest.raises(ZeroDivisionError): SCORERS[name](harm.model, progress=at_call(n, ZeroDivisionError()), **prefixed(name, harm))
    harm.check()

@pytest.mark.parametrize('name', SCORERS)
def test_model_raises_at_every_chunk(name, blas_threads):
    "The MLP of a layer fails at its n-th call, then is put right."
    harm = Harm('qwen3')
    layer = harm.model.layers[1]
    want = SCORERS[name](harm.model, **prefixed(name, harm))
    sound, counter = layer.mlp, Poison(layer.mlp, 10**6)
    layer.mlp = counter
    SCORERS[name](harm.model, **prefixed(name, harm))
    for n in range(10**6 - counter.left):
        layer.mlp = Poison(sound, n)
        with pytest.raises(ZeroDivisionError): SCORERS[name](harm.model, **prefixed(name, harm))
    layer.mlp = sound
    harm.check()
    assert equal(SCORERS[name](harm.model, **prefixed(name, harm)), want)

@pytest.mark.parametrize('family', TINY_FAMILIES)
def test_fast_functions_agree_with_exact_ones(family):
    "The exponential of chapter 01a moves no score by more than a thousandth, and leaves the model alone."
    model = tiny_model(family)
    before = logits(model)
    for kw in ({}, dict(body=(2, 6), step_size=10)):
        fast, exact = (np.array(score_window(model, PROMPT, window=8, exact=e, **kw)) for e in (False, True))
        np.testing.assert_allclose(fast, exact, rtol=1e-3)
    assert equal(logits(model), before)

def test_refused_before_anything_is_read():
    model, calls = tiny_model('llama'), []
    note = lambda *_: calls.append(1)
    for bad in ([], [[1, 2]], [0.5], [-1]):
        for score in (score_tokens, score_window, lambda m, t, **kw: score_segments(m, t, 64, **kw)):
            with pytest.raises(ValueError): score(model, bad, cancel_check=note)
    for kw in (dict(layers=[0, 9]), dict(window=-1), dict(body=(1,)), dict(body=(-1, 3)), dict(step_size=-5)):
        with pytest.raises(ValueError): score_window(model, PROMPT, cancel_check=note, **kw)
    with pytest.raises(ValueError, match='no room'): score_segments(model, PROMPT, 32, head=20, tail=10, overlap=4, cancel_check=note)
    assert calls == []

# --- segments ---

@given(st.integers(0, 40), st.integers(1, 40), st.integers(0, 20), st.integers(1, 60), st.integers(0, 400))
def test_segment_spans(head, tail, overlap, extra, more):
    "Segments fit, touch with exactly the overlap, and leave nothing out."
    context = head + tail + overlap + extra
    length = context + more
    spans = segment_spans(length, context, head, tail, overlap)
    assert spans[0][0] == head and spans[-1][1] == length - tail
    assert all(0 < b - a <= context - head - tail for a, b in spans)
    assert all(a2 == b - overlap for (_, b), (a2, _) in zip(spans, spans[1:]))

def test_segments_one_softmax():
    "Products q·k of all segments under one softmax, where two segments share a token the larger."
    model, rows, n, tail, head = tiny_model('llama'), 8, 3 * M, 8, 4
    tokens = (PROMPT * 3)[:n]
    held = {l.index: np.full((l.n_heads, rows, n), -np.inf) for l in attention_layout(model)}
    for a, b in segment_spans(n, 40, head, tail, 6):
        places = [*range(head), *range(a, b), *range(n - tail, n)]
        for l, _, q, k in window_queries(model, [tokens[p] for p in places], window=rows):
            k = np.repeat(np.array(k[0]), l.n_heads // l.n_kv_heads, axis=0)
            s = np.einsum('hrd,hkd->hrk', np.array(q[0]), k) * l.head_dim ** -0.5
            for r in range(rows):
                for j, p in enumerate(places):
                    if p <= n - rows + r: held[l.index][:, r, p] = np.maximum(held[l.index][:, r, p], s[:, r, j])
    soft = [np.exp(h - h.max(-1, keepdims=True)) for h in held.values()]
    pooled = _avg_pool1d(mx.array(np.stack([s / s.sum(-1, keepdims=True) for s in soft]).astype(np.float32)), 13)
    told = []
    got = score_segments(model, tokens, 40, window=rows, head=head, tail=tail, overlap=6, progress=lambda *a: told.append(a))
    assert mx.allclose(got, pooled.max(axis=(0, 1)).mean(axis=0), rtol=2e-2, atol=1e-3)
    assert told[-1][0] == told[-1][1] and len({t for _, t in told}) == 1 and sorted(told) == told

# --- company ---

def test_two_threads_score_as_one():
    model = tiny_model('qwen3')
    want = {n: s(model) for n, s in SCORERS.items()}
    mx.eval(want); got, errors = {n: [] for n in want}, []
    def work(name):
        try:
            for _ in range(4): got[name].append(np.array(SCORERS[name](model)))
        except BaseException as e: errors.append(e)
    for pair in (('window', 'tokens'), ('body', 'segments')):
        threads = [threading.Thread(target=work, args=(n,)) for n in pair]
        for t in threads: t.start()
        for t in threads: t.join()
    assert not errors
    for n, w in want.items(): assert len(got[n]) == 4 and all(np.array_equal(g, np.array(w)) for g in got[n]), n

@pytest.mark.parametrize('name', SCORERS)
def test_memory_is_flat(name):
    model, seen = tiny_model('llama'), []
    cache = with_prefix(model)
    for _ in range(8):
        SCORERS[name](model, **({} if name == 'segments' else dict(cache=cache))).tolist()
        gc.collect(); seen.append(mx.get_active_memory())
    assert len(set(seen[2:])) == 1, seen
