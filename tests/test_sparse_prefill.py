"Sparse prefill: against dense with the dropped keys masked, in every family and dtype; faults at every chunk; the cache that knows its gap."
import copy, gc, os, sys, tempfile, threading
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, load_prompt_cache, make_prompt_cache, save_prompt_cache, trim_prompt_cache
from vllm_mlx import blas
from vllm_mlx.importance import PrefillCancelled, score_tokens, score_window
from vllm_mlx.layers import _get_rope, attention_layout
from vllm_mlx.models import TINY_FAMILIES, tiny_model
from vllm_mlx.rope import _OffsetAdjustedRoPE
from vllm_mlx.sparse_prefill import SparseKVCache, cleanup_rope, sparse_prefill

DTYPES = dict(float32=mx.float32, bfloat16=mx.bfloat16, float16=mx.float16)
MATRIX = [(f, d) for f in TINY_FAMILIES for d in DTYPES if f != 'gpt_oss' or d == 'float32']      # MLX runs experts in float32 only on a CPU
M = 40
PROMPT = [int(t) for t in np.random.default_rng(1).integers(1, 500, M)]
PREFIX = [int(t) for t in np.random.default_rng(2).integers(1, 500, 9)]
KEPT = [0, 1, 2, 3, 13, 20, 21, 22, 23, 30, 36, 37, 38, 39]
equal = lambda a, b: mx.array_equal(a, b, equal_nan=True).item()
wide = lambda family: dict(sliding_window=200) if family in ('gemma3', 'gpt_oss') else {}
selections = st.sets(st.integers(0, M - 1), min_size=1).map(sorted)

def read(model, tokens, cache, step=1000):
    for a in range(0, len(tokens), step):
        out = model(mx.array(tokens[a:a + step])[None], cache=cache)
        mx.eval(out, [c.state for c in cache])
    return out

def with_prefix(model):
    cache = make_prompt_cache(model)
    read(model, PREFIX, cache)
    return cache

class Hiding:
    "A growing cache that hides given positions from all rows but their own: dense prefill with dropped keys masked."
    def __init__(self, hidden): self.keys, self.hidden = None, hidden
    offset = property(lambda self: 0 if self.keys is None else self.keys.shape[2])
    state = property(lambda self: (self.keys, self.values))
    def update_and_fetch(self, k, v):
        self.keys, self.values = (k, v) if self.keys is None else (mx.concatenate([self.keys, k], 2), mx.concatenate([self.values, v], 2))
        return self.keys, self.values
    def make_mask(self, N, return_array=False, window_size=None):
        seen = np.ones(self.offset + N, bool)
        seen[[h for h in self.hidden if h < len(seen)]] = False
        return create_causal_mask(N, self.offset, window_size=window_size) & (mx.array(seen) | (mx.arange(self.offset, self.offset + N)[:, None] == mx.arange(self.offset + N)))

class At:
    "A cache slot that stands at another offset, for one token read alone."
    def __init__(self, slot, offset): self.slot, self.offset = slot, offset
    def __getattr__(self, name): return getattr(self.slot, name)

@pytest.mark.parametrize('family, dtype', MATRIX)
def test_all_kept_is_dense(family, dtype):
    "N = M: logits, cache and what follows are dense prefill's bits, in the model's dtype, beyond the sliding window and after a prefix."
    model = tiny_model(family, dtype=DTYPES[dtype])
    for prefix, step in (([], 1000), ([], 11), (PREFIX, 11)):
        want, cache = make_prompt_cache(model), make_prompt_cache(model)
        for c in (want, cache): read(model, prefix, c) if prefix else None
        dense = read(model, PROMPT, want, step)[:, -1:]
        got = sparse_prefill(model, PROMPT, range(M), cache, step, len(prefix), carry='cache')
        assert got.dtype == DTYPES[dtype] and equal(got, dense)
        assert [type(c) for c in cache] == [type(c) for c in want]
        for l in attention_layout(model):
            a, b = cache[l.slot], want[l.slot]
            assert a.offset == b.offset and a.keys.dtype == a.values.dtype == DTYPES[dtype] and equal(a.keys_and_values()[0], b.keys_and_values()[0])
        assert equal(read(model, [5, 6, 7], cache), read(model, [5, 6, 7], want))

@pytest.mark.parametrize('family, dtype', MATRIX)
def test_dtype_is_kept(family, dtype):
    "With tokens dropped too, nothing is promoted, not by decoding either; nor by the wrapped RoPEs of the seed."
    model = tiny_model(family, dtype=DTYPES[dtype])
    for carry in ('cache', 'model'):
        cache = make_prompt_cache(model)
        got = sparse_prefill(model, PROMPT, KEPT, cache, 5, carry=carry)
        assert {got.dtype, model(mx.array([[3]]), cache=cache).dtype} == {DTYPES[dtype]} and mx.isfinite(got).all()
        assert {a.dtype for l in attention_layout(model) for a in (cache[l.slot].keys, cache[l.slot].values)} == {DTYPES[dtype]}
    cleanup_rope(model)

MODELS = {f: tiny_model(f, **wide(f)) for f in TINY_FAMILIES}

@pytest.mark.parametrize('family', ['llama', 'qwen3', 'gemma3', 'gpt_oss'])
@settings(max_examples=6, deadline=None)
@given(kept=selections, step=st.integers(1, 50), prefix=st.booleans(), carry=st.sampled_from(['cache', 'model']))
def test_dropped_keys_masked(family, kept, step, prefix, carry):
    "Dense prefill in which nobody sees the dropped tokens: the same logits, and the same for a block and a token that follow."
    model, start = MODELS[family], PREFIX if prefix else []
    spec = [Hiding([len(start) + i for i in range(M) if i not in kept]) for _ in make_prompt_cache(model)]
    want = [read(model, start + PROMPT, spec)[:, len(start) + kept[-1]]] + [read(model, block, spec) for block in ([4, 5, 6], [7])]
    cache = with_prefix(model) if prefix else make_prompt_cache(model)
    got = sparse_prefill(model, PROMPT, kept, cache, step, len(start), carry=carry)
    try:
        close = lambda a, b: mx.abs(a - b).max().item() < 2e-3 * max(1, mx.abs(b).max().item())
        assert close(got[:, 0], want[0])
        for block, w in zip(([4, 5, 6], [7]), want[1:]): assert close(read(model, block, cache), w)
    finally: cleanup_rope(model)

@pytest.mark.parametrize('family', ['gemma3', 'gpt_oss'])
@settings(max_examples=20, deadline=None)
@given(kept=selections, window=st.integers(3, 45), step=st.integers(1, 50), prefix=st.booleans(), blocks=st.lists(st.integers(1, 7), min_size=1, max_size=12),
       carry=st.sampled_from(['cache', 'model']))
def test_windows_count_positions(family, kept, window, step, prefix, blocks, carry):
    "Sliding-window layers, prompts longer and shorter than the window: during the prefill and long after it nobody sees further back than the model's window."
    model, start = tiny_model(family, sliding_window=window), PREFIX if prefix else []
    kept = sorted({*kept, *range(M - window, M)}) if M > window else kept
    spec = [Hiding([len(start) + i for i in range(M) if i not in kept]) for _ in make_prompt_cache(model)]
    want = read(model, start + PROMPT, spec)[:, len(start) + kept[-1]]
    cache = with_prefix(model) if prefix else make_prompt_cache(model)
    plain = tiny_model(family, sliding_window=window)                      # the other may carry wrappers
    got = sparse_prefill(model, PROMPT, kept, cache, step, len(start), carry=carry)
    close = lambda a, b: mx.abs(a - b).max().item() < 2e-3 * max(1, mx.abs(b).max().item())
    assert close(got[:, 0], want)
    for n, size in enumerate(blocks):
        block = [(7 * n + i) % 400 + 1 for i in range(size)]
        assert close(read(model, block, cache), read(plain, block, spec)), (n, size)
    if carry == 'model': return
    assert {c.offset for c in cache} == {len(start) + M + sum(blocks)}
    again = [copy.deepcopy(c) if not isinstance(c, SparseKVCache) else SparseKVCache.from_state(c.state) for c in cache]
    assert equal(read(model, [3, 4], again), read(model, [3, 4], cache))

@pytest.mark.parametrize('carry', ['cache', 'model'])
@pytest.mark.parametrize('family', ['gemma3', 'gpt_oss'])
def test_windows_over_two_turns(family, carry):
    "A second turn, dense or sparse, after a sparse one that did or did not fill the window."
    for first, second in ((20, None), (33, [0, 1, 2, 3, 18, 19]), (20, [0, 1, 2, 3, 18, 19]), (40, None)):
        model, plain = (tiny_model(family, sliding_window=32) for _ in range(2))
        kept = sorted({0, 5, first - 1, *range(first - 32 if first > 32 else first, first)})
        turn, end = PROMPT[:20], first + 20
        hidden = [i for i in range(first) if i not in kept] + [first + i for i in range(20) if second and i not in second]
        spec, cache = [Hiding(hidden) for _ in make_prompt_cache(plain)], make_prompt_cache(model)
        want = read(plain, PROMPT[:first] + turn, spec)[:, -1]
        sparse_prefill(model, PROMPT[:first], kept, cache, 7, carry=carry)
        got = sparse_prefill(model, turn, second, cache, 7, first, carry=carry)[:, 0] if second else read(model, turn, cache)[:, -1]
        close = lambda a, b: mx.abs(a - b).max().item() < 2e-3 * max(1, mx.abs(b).max().item())
        assert close(got, want), (first, second)
        for n in range(25): assert close(read(model, [n + 1], cache), read(plain, [n + 1], spec)), (first, second, n)
        cleanup_rope(model)

def test_trim_below_the_first_kept_token():
    "Nothing is left then; what follows is read at its own position."
    model = tiny_model('gemma3', sliding_window=32)
    cache, spec = make_prompt_cache(model), [Hiding(range(3)) for _ in make_prompt_cache(model)]
    sparse_prefill(model, list(range(1, 21)), [5, 9, 19], cache, carry='cache')
    trim_prompt_cache(cache, 17)
    read(model, [1, 1, 1], spec)
    assert mx.abs(read(model, [1, 2, 3], cache) - read(model, [1, 2, 3], spec)).max() < 2e-3

def test_tokens_outside_of_the_vocabulary():
    "MLX reads past the embedding without a word; here it is an error before anything is touched."
    model = tiny_model('llama')
    vocab = model.args.vocab_size
    for f in (lambda t: sparse_prefill(model, t, [0], make_prompt_cache(model)), lambda t: score_window(model, t), lambda t: score_tokens(model, t)):
        with pytest.raises(ValueError, match=f"token id {vocab} is outside the model's vocabulary of {vocab}"): f([1, vocab, 2])

@pytest.mark.parametrize('family', ['qwen3_5', 'nemotron_h', 'llama'])
def test_token_by_token(family):
    "Hybrids: the kept tokens read one by one, each at its own offset, give the same; recurrent layers see the kept tokens only."
    model = MODELS[family]
    slots, cache = make_prompt_cache(model), make_prompt_cache(model)
    for i in KEPT:
        here = [At(s, i) if isinstance(s, KVCache) else s for s in slots]
        want = model(mx.array([[PROMPT[i]]]), cache=here)
    got = sparse_prefill(model, PROMPT, KEPT, cache, 6, carry='cache')
    assert mx.abs(got - want).max() < 2e-3 * mx.abs(want).max()
    nxt = model(mx.array([[9]]), cache=[At(s, M) if isinstance(s, KVCache) else s for s in slots])
    assert mx.abs(read(model, [9], cache) - nxt).max() < 2e-3 * mx.abs(nxt).max()

@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(selections, st.integers(1, 50)), min_size=1, max_size=3))
def test_turn_upon_turn(turns):
    "Sparse turns on one cache: dense over all turns with every dropped token masked."
    model, cache, hidden, logits = MODELS['qwen3'], make_prompt_cache(MODELS['qwen3']), [], None
    for n, (kept, step) in enumerate(turns):
        logits = sparse_prefill(model, PROMPT, kept, cache, step, n * M, carry='cache')
        hidden += [n * M + i for i in range(M) if i not in kept]
    want = read(model, PROMPT * len(turns), [Hiding(hidden) for _ in cache])[:, (len(turns) - 1) * M + turns[-1][0][-1]]
    assert mx.abs(logits[:, 0] - want).max() < 2e-3 * mx.abs(want).max()
    assert {(c.offset, c.size()) for c in cache} == {(len(turns) * M, sum(len(k) for k, _ in turns))}

@given(selections, st.integers(1, 50))
@settings(max_examples=6, deadline=None)
def test_contiguous_is_dense_on_the_kept(kept, step):
    model = MODELS['llama']
    cache, want = with_prefix(model), with_prefix(model)
    got = sparse_prefill(model, PROMPT, kept, cache, step, len(PREFIX), positions='contiguous', carry='cache')
    assert equal(got, read(model, [PROMPT[i] for i in kept], want, step)[:, -1:])
    assert [type(c) for c in cache] == [KVCache] * len(cache) and cache[0].offset == len(PREFIX) + len(kept)

def test_logits_off_fills_the_same():
    for family in TINY_FAMILIES:
        model, caches = MODELS[family], []
        for on in (True, False):
            caches.append(make_prompt_cache(model))
            assert (sparse_prefill(model, PROMPT, KEPT, caches[-1], 6, carry='cache', logits=on) is None) == (not on)
        assert equal(read(model, [3, 4], caches[0]), read(model, [3, 4], caches[1])), family

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

class Poison:
    "Calls the module it stands for, and raises at call number `at`."
    def __init__(self, module, at): self.module, self.left = module, at
    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left < 0: raise ZeroDivisionError('poisoned')
        return self.module(*args, **kwargs)

def at_call(n, error=None):
    calls = iter(range(10**6))
    def check(*_):
        if next(calls) == n:
            if error is not None: raise error
            return True
        return False
    return check

PREFIXES = dict(empty=[], dense=PREFIX, long=PREFIX * 4)            # the long one is beyond the small models' sliding window

def prepared(model, kind):
    "A cache and the position after it; kind 'sparse' is a prefix that was itself prefilled sparsely."
    cache = make_prompt_cache(model)
    if kind == 'sparse':
        sparse_prefill(model, PROMPT, KEPT, cache, carry='cache')
        return cache, M
    if PREFIXES[kind]: read(model, PREFIXES[kind], cache)
    return cache, len(PREFIXES[kind])

@pytest.mark.parametrize('kind', ['empty', 'dense', 'long', 'sparse'])
@pytest.mark.parametrize('family', TINY_FAMILIES)
def test_fault_at_every_chunk(family, kind, blas_threads):
    "A cancel, an error in cancel_check or progress, an error inside the model, at each chunk: model and cache to the bit as before, and usable."
    model, fresh = tiny_model(family), tiny_model(family)
    cache, end = prepared(model, kind)
    twin = prepared(fresh, kind)[0]
    dense, after = fresh(mx.array(PROMPT)[None]), read(fresh, [7, 8], copy.deepcopy(twin))
    ropes, slots = [_get_rope(l.attn) for l in attention_layout(model)], list(cache)
    layer = model.layers[-1]
    name = 'mixer' if family == 'nemotron_h' else 'mlp'
    sound = layer[name]
    def attempt(**kw): return sparse_prefill(model, PROMPT, range(3, M), cache, 13, end, carry='cache', **kw)
    def unharmed():
        assert all(a is b for a, b in zip(cache, slots)) and all(a is _get_rope(l.attn) for a, l in zip(ropes, attention_layout(model)))
        assert equal(read(model, [7, 8], copy.deepcopy(cache)), after)
    for n in range(3):
        with pytest.raises(PrefillCancelled): attempt(cancel_check=at_call(n))
        with pytest.raises(KeyboardInterrupt): attempt(cancel_check=at_call(n, KeyboardInterrupt()))
        with pytest.raises(ZeroDivisionError): attempt(progress=at_call(n, ZeroDivisionError()))
        unharmed()
        setattr(layer, name, Poison(sound, n))
        with pytest.raises(ZeroDivisionError): attempt()
        setattr(layer, name, sound)
        unharmed()
    assert equal(model(mx.array(PROMPT)[None]), dense)
    assert equal(attempt(), sparse_prefill(fresh, PROMPT, range(3, M), twin, 13, end, carry='cache'))

@pytest.mark.parametrize('family', TINY_FAMILIES)
def test_a_failed_evaluation_is_undone(family, monkeypatch):
    "An evaluation that fails half way (a GPU out of memory) may leave anything in the slots: they are put back as arrays, not by offset."
    model = tiny_model(family)
    cache, end = prepared(model, 'dense')
    after = read(model, [7, 8], copy.deepcopy(cache))
    module = sys.modules['vllm_mlx.sparse_prefill']
    class Failing:
        def __getattr__(self, name): return getattr(mx, name)
        def eval(self, states, *rest):
            for c in cache:
                if getattr(c, 'keys', None) is not None: c.keys, c.values = c.keys * float('nan'), c.values * float('nan')
            raise RuntimeError('out of memory')
    monkeypatch.setattr(module, 'mx', Failing())
    with pytest.raises(RuntimeError, match='out of memory'): sparse_prefill(model, PROMPT, range(3, M), cache, 13, end, carry='cache')
    monkeypatch.undo()
    assert equal(read(model, [7, 8], copy.deepcopy(cache)), after)

def test_fault_leaves_an_earlier_wrapper():
    "The seed's wrappers of an earlier request stay what they were when a second one fails."
    model = tiny_model('llama')
    cache = make_prompt_cache(model)
    sparse_prefill(model, PROMPT, KEPT, cache)
    ropes = [_get_rope(l.attn) for l in attention_layout(model)]
    assert all(type(r) is _OffsetAdjustedRoPE for r in ropes)
    for n in range(2):
        with pytest.raises(PrefillCancelled): sparse_prefill(model, PROMPT, KEPT, make_prompt_cache(model), 7, cancel_check=at_call(n))
        assert all(a is _get_rope(l.attn) for a, l in zip(ropes, attention_layout(model)))

def test_wrappers_do_not_nest():
    model = tiny_model('qwen3')
    own = [_get_rope(l.attn) for l in attention_layout(model)]
    for kept in (KEPT, KEPT[1:], [5]):
        sparse_prefill(model, PROMPT, kept, make_prompt_cache(model))
        assert [(r._original is o, r._adjustment) for o, r in zip(own, (_get_rope(l.attn) for l in attention_layout(model)))] == [(True, M - len(kept))] * len(own)
    sparse_prefill(model, PROMPT, range(M), make_prompt_cache(model))          # no gap, no wrapper
    assert all(o is _get_rope(l.attn) for o, l in zip(own, attention_layout(model)))
    cleanup_rope(model); cleanup_rope(model)
    assert equal(model(mx.array(PROMPT)[None]), tiny_model('qwen3')(mx.array(PROMPT)[None]))

def test_refused_before_anything_is_read():
    model, calls = MODELS['llama'], []
    cache = with_prefix(model)
    want = read(model, [7, 8], copy.deepcopy(cache))
    note = dict(cancel_check=lambda: calls.append(1), position_offset=9, carry='cache')
    for kept in ([], [[1]], [0.5], [-1], [M], [3, 3], [4, 2]):
        with pytest.raises(ValueError): sparse_prefill(model, PROMPT, kept, cache, **note)
    for kw in (dict(step_size=0), dict(position_offset=8), dict(carry='own'), dict(positions='none')):
        with pytest.raises(ValueError): sparse_prefill(model, PROMPT, KEPT, cache, **{**note, **kw})
    uneven = copy.deepcopy(cache); uneven[1].trim(1)
    for wrong in (tuple(cache), cache[:2], uneven, [QuantizedKVCache() for _ in cache]):
        with pytest.raises(ValueError): sparse_prefill(model, PROMPT, KEPT, wrong, **note)
    with pytest.raises(ValueError, match='is empty|non-empty'): sparse_prefill(model, [], [0], cache, **note)
    assert calls == [] and equal(read(model, [7, 8], cache), want)

# --- company ---

KINDS = dict(sparse=dict(kept=KEPT), thin=dict(kept=[0, 5, 39]), contiguous=dict(kept=KEPT, positions='contiguous'), dense=dict(kept=range(M)))

def request(model, kind):
    "A request in steps: each chunk of its prefill as far as the model has read it, then each decoded token; yields what it computed."
    kw, cache = dict(KINDS[kind]), make_prompt_cache(model)
    out = sparse_prefill(model, PROMPT, kw.pop('kept'), cache, 5, carry='cache', **kw)
    for _ in range(4):
        yield np.array(out)
        out = model(out[:, -1:].argmax(-1), cache=cache)

@pytest.mark.parametrize('family', ['llama', 'gemma3', 'qwen3_5', 'nemotron_h'])
@settings(max_examples=3, deadline=None)
@given(schedule=st.permutations(list(KINDS) * 4))
def test_any_schedule(family, schedule):
    "Requests that take turns in any order give what each gives alone."
    model = SMALL[family]
    alone = ALONE.setdefault(family, {k: list(request(model, k)) for k in KINDS})
    running, got = {k: request(model, k) for k in KINDS}, {k: [] for k in KINDS}
    for k in schedule: got[k].append(next(running[k]))
    for k in KINDS: assert all(np.array_equal(a, b) for a, b in zip(got[k], alone[k])) and len(got[k]) == 4

SMALL, ALONE = {f: tiny_model(f) for f in ('llama', 'gemma3', 'qwen3_5', 'nemotron_h')}, {}

def test_request_inside_a_request():
    "A request run from within the progress callback of another, chunk by chunk."
    model = SMALL['llama']
    alone, inner = {k: list(request(model, k)) for k in KINDS}, []
    cache = make_prompt_cache(model)
    out = sparse_prefill(model, PROMPT, KEPT, cache, 5, carry='cache', progress=lambda *_: inner.append(list(request(model, 'thin'))))
    assert np.array_equal(np.array(out), alone['sparse'][0]) and len(inner) == 3
    for got in inner: assert all(np.array_equal(a, b) for a, b in zip(got, alone['thin']))

@pytest.mark.parametrize('family', ['llama', 'gemma3'])
def test_threads(family, blas_threads):
    "Two threads prefill and decode on one model at the same time."
    model = SMALL[family]
    alone = {k: list(request(model, k)) for k in KINDS}
    got, errors = {k: [] for k in KINDS}, []
    def work(kinds):
        try:
            for _ in range(3):
                for k in kinds: got[k].append(list(request(model, k)))
        except BaseException as e: errors.append(e)
    threads = [threading.Thread(target=work, args=(list(KINDS)[n::2],)) for n in range(2)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert not errors
    for k in KINDS: assert len(got[k]) == 3 and all(np.array_equal(a, b) for run in got[k] for a, b in zip(run, alone[k])), k

def test_memory_is_flat():
    model, seen = SMALL['llama'], []
    for n in range(50):
        cache = make_prompt_cache(model)
        out = sparse_prefill(model, PROMPT, KEPT, cache, 5, carry='cache')
        for _ in range(2): out = model(out[:, -1:].argmax(-1), cache=cache)
        if n % 3 == 0:
            with pytest.raises(PrefillCancelled): sparse_prefill(model, PROMPT, KEPT, cache, 5, 42, carry='cache', cancel_check=at_call(1))
        out.tolist(); del cache, out
        if n % 7 == 0:
            gc.collect(); seen.append((mx.get_active_memory(), sum(type(o) in (KVCache, SparseKVCache) for o in gc.get_objects())))
    assert len(seen) == 8 and len(set(seen[1:])) == 1, seen

# --- SparseKVCache ---

class Entries:
    "The obvious cache: a list of (position, serial number of the token) and the position to come."
    def __init__(self, positions, end): self.held, self.end, self.serial = [(p, n) for n, p in enumerate(positions)], end, len(positions)
    def update(self, n):
        self.held += [(self.end + i, self.serial + i) for i in range(n)]
        self.end, self.serial = self.end + n, self.serial + n
    def trim(self, n):
        self.end -= min(n, self.end)
        self.held = [h for h in self.held if h[0] < self.end]

def rows(serials):
    x = mx.array(np.array(list(serials), np.float32)).reshape(1, 1, -1, 1) + mx.zeros((1, 1, 1, 32))
    return x, -x

def reloaded(cache):
    with tempfile.TemporaryDirectory() as d:
        save_prompt_cache(os.path.join(d, 'c.safetensors'), [cache])
        return load_prompt_cache(os.path.join(d, 'c.safetensors'))[0]

OPERATIONS = st.one_of(st.tuples(st.just('update'), st.integers(1, 5)), st.tuples(st.just('trim'), st.integers(0, 40)),
                       st.tuples(st.sampled_from(['copy', 'save', 'state', 'twin']), st.just(0)))

def same(cache, ref, tolerance=0.):
    assert (cache.offset, cache.inner.offset, cache.positions().tolist()) == (ref.end, len(ref.held), [p for p, _ in ref.held])
    mask = cache.make_mask(3, return_array=True, window_size=None)
    assert mask.shape[-1] == 3 + len(ref.held) and mask[:, :len(ref.held)].all().item()
    if ref.held:
        k, v = cache.inner.keys_and_values()
        if isinstance(cache.inner, QuantizedKVCache): k, v = (mx.dequantize(*x, group_size=32, bits=8) for x in (k, v))
        serials = np.array([s for _, s in ref.held])
        assert np.abs(np.array(k)[0, 0, :, 0] - serials).max() <= tolerance and np.abs(np.array(v)[0, 0, :, 5] + serials).max() <= tolerance

@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 30), min_size=1).map(sorted), st.integers(1, 12), st.booleans(), st.booleans(), st.lists(OPERATIONS, max_size=8))
def test_cache_like_its_entries(positions, gap, rotating, quantise, operations):
    "Any mix of updates, trims, copies, saves and loads, also quantised, keeps the entries that a plain list keeps."
    inner = RotatingKVCache(300) if rotating else KVCache()
    inner.update_and_fetch(*rows(range(len(positions))))
    end = positions[-1] + gap
    cache, ref, tolerance = SparseKVCache(inner, positions, end), Entries(positions, end), 0.
    if quantise and not rotating: cache, tolerance = cache.to_quantized(group_size=32, bits=8), 1.
    same(cache, ref, tolerance)
    for what, n in operations:
        if what == 'update':
            cache.update_and_fetch(*rows(range(ref.serial, ref.serial + n))); ref.update(n)
        elif what == 'trim':
            assert cache.trim(n) == min(n, ref.end); ref.trim(n)
        elif what == 'copy': cache = copy.deepcopy(cache)
        elif what == 'save': cache = reloaded(cache)
        elif what == 'state': cache = SparseKVCache.from_state(cache.state)
        else:                                     # a copy goes its own way
            twin = copy.deepcopy(cache)
            twin.trim(2); twin.update_and_fetch(*rows([99]))
        same(cache, ref, tolerance)

def test_cache_of_nothing():
    "Trimmed to nothing it starts again at position 0; empty inner caches save and load."
    for inner in (KVCache(), RotatingKVCache(16)):
        cache = reloaded(SparseKVCache(inner, [], 7))
        assert (cache.offset, cache.empty(), cache.positions().tolist()) == (7, True, [])
        cache.update_and_fetch(*rows([0, 1]))
        assert cache.positions().tolist() == [7, 8]
        assert cache.trim(99) == 9 and cache.offset == 0
        cache.update_and_fetch(*rows([0]))
        assert cache.positions().tolist() == [0]

def test_rotating_after_the_turn():
    "A rotating cache that has dropped entries still knows where it stands, and is not trimmable."
    cache = SparseKVCache(RotatingKVCache(8), [], 5)
    for n in range(20): cache.update_and_fetch(*rows([n]))
    assert (cache.offset, cache.size(), cache.is_trimmable()) == (25, 8, False)
    again = reloaded(copy.deepcopy(cache))
    for c in (cache, again): assert sorted(np.array(c.update_and_fetch(*rows([20]))[0])[0, 0, :, 0].tolist()) == list(range(13, 21))

@pytest.mark.parametrize('family', ['llama', 'qwen3_5', 'gemma3'])
def test_saved_and_copied_caches_continue(family):
    "In the model: a saved, a copied and a state-made cache go on with the same bits, recurrent and sliding slots included."
    model, cache = SMALL[family], make_prompt_cache(SMALL[family])
    sparse_prefill(model, PROMPT, KEPT, cache, carry='cache')
    with tempfile.TemporaryDirectory() as d:
        save_prompt_cache(os.path.join(d, 'c.safetensors'), cache)
        loaded = load_prompt_cache(os.path.join(d, 'c.safetensors'))
    twin = copy.deepcopy(cache)
    want = [np.array(read(model, block, cache)) for block in ([5], [6, 7, 8], [9])]
    for other in (loaded, twin): assert all(np.array_equal(np.array(read(model, block, other)), w) for block, w in zip(([5], [6, 7, 8], [9]), want))
