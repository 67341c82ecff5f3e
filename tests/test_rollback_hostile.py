"Rollback against careless callers: interrupted blocks, wrong shapes, odd counts and dtypes, nested caches, blocks out of order, what is let go."
import copy, gc, weakref
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (ArraysCache, BatchKVCache, BatchRotatingKVCache, CacheList, ChunkedKVCache, ConcatenateKVCache, KVCache, QuantizedKVCache, RotatingKVCache,
                                 make_prompt_cache)
from vllm_mlx import gdn
from vllm_mlx.gdn import fast_gdn
from vllm_mlx.models import tiny_model
from vllm_mlx.rollback import Recording, Records, batch_cache, cache_leaves, put_back, rollback, rollback_by_rerun, take_snapshot
from test_rollback import blocks, close, contents, fed, same_cache, text, the

def bits(cache):
    "Everything in a cache, copied out of MLX."
    return [[(n, np.array(a.astype(mx.float32)) if isinstance(a, mx.array) else a) for n, a in tree_flatten(dict(vars(leaf)))] for _, leaf in cache_leaves(cache)]

def same_bits(a, b):
    return len(a) == len(b) and all(n == m and (np.array_equal(p, q, equal_nan=True) if isinstance(p, np.ndarray) else p == q) for x, y in zip(a, b) for (n, p), (m, q) in zip(x, y, strict=True))

KINDS = dict(kv=KVCache, concatenate=ConcatenateKVCache, quantized=QuantizedKVCache, chunked=lambda: ChunkedKVCache(16), small_chunks=lambda: ChunkedKVCache(6), rotating=lambda: RotatingKVCache(12),
             sinks=lambda: RotatingKVCache(12, keep=4), wide=lambda: RotatingKVCache(64), batch=lambda: BatchKVCache([0, 2]), batch_rotating=lambda: BatchRotatingKVCache(12, [0, 2]))
def draw(n, seed=0, B=2): return mx.random.normal((B, 2, n, 64), key=mx.random.key(seed))
def feed(leaf, x):
    if hasattr(leaf, 'maybe_trim_front'): leaf.maybe_trim_front()                             # as a model does before its layers
    return leaf.update_and_fetch(x, 2 * x)

@pytest.mark.parametrize('pieces', [(4,), (1, 1, 1), (16,), (2, 5)])
@pytest.mark.parametrize('before', [(), (5,), (11,), (20,), (20, 1), (3, 1, 1)])
@pytest.mark.parametrize('kind', KINDS)
def test_an_interrupted_block_leaves_nothing(kind, before, pieces):
    "Whatever a block had put into a leaf when it was stopped, the leaf goes on as if there had been none."
    def filled():
        leaf = KINDS[kind]()
        for i, n in enumerate(before): feed(leaf, draw(n, i))
        return leaf
    leaf, fresh = filled(), filled()
    records = Records([leaf], (2, 16))
    for i, n in enumerate(pieces): feed(leaf, draw(n, 10 + i))
    records.undo()
    for n in (3, 1, 2):
        for a, b in zip(tree_flatten(feed(leaf, draw(n, 20 + n))), tree_flatten(feed(fresh, draw(n, 20 + n))), strict=True): assert mx.array_equal(a[1], b[1]).item()
        assert leaf.size() == fresh.size() and np.array_equal(np.array(leaf.offset), np.array(fresh.offset))

@pytest.mark.parametrize('kind', [k for k in KINDS])
def test_a_snapshot_of_any_leaf_is_good_many_times(kind):
    leaf = KINDS[kind]()
    for i, n in enumerate((9, 1, 4)): feed(leaf, draw(n, i))
    held, before = take_snapshot([CacheList(leaf)]), bits([leaf])
    for i in range(3):
        for n in (1, 5, 1): feed(leaf, draw(n, 30 + i + n))
        put_back(held)
        assert same_bits(bits([leaf]), before)

@pytest.mark.parametrize('name', ['qwen3_5', 'nemotron_h', 'mamba2', 'mamba', 'lfm2', 'gemma3', 'rwkv7', 'recurrent_gemma', 'kimi_linear'])
@pytest.mark.parametrize('told', [(1, 3), (1, 8), (2, 5), (1, 1)])
def test_a_block_of_another_shape_is_refused(name, told):
    "The recording was told of one shape and another was run: nothing is guessed."
    model = the(name)
    cache = fed(model, text(6))
    with Recording(model, cache, told) as rec: rec.model(text(5), cache=cache)
    held = bits(cache)
    for n in sorted({0, 1, told[1] - 1}):
        if n == told[1]: continue
        with pytest.raises(ValueError, match='cannot roll back'): rollback(cache, rec.records, n)
        assert same_bits(bits(cache), held)

@pytest.mark.parametrize('bad', [-1, 6, 2.0, 1.5, True, None, 'all', [2, 2], [[2]], mx.array(2.0), np.array([2.0]), np.array([[2]]), mx.array([True]), [None], float('nan'), [10**20], 10**20, {2}, (), []], ids=str)
def test_counts_that_are_refused(bad):
    model = tiny_model('qwen3_5')
    cache = fed(model, text(6))
    _, records = blocks(model, cache, text(5))
    held = bits(cache)
    with pytest.raises(ValueError, match='accepted is'): rollback(cache, records, bad)
    assert same_bits(bits(cache), held) and not records.released
    rollback(cache, records, 2)
    same_cache(cache, fed(model, text(6), text(5)[:, :2]), 1e-5)

@pytest.mark.parametrize('good', [2, np.int8(2), np.uint64(2), [2], (2,), np.array([2], np.uint8), np.array(2), mx.array(2), mx.array([2], dtype=mx.uint32), mx.array([2], dtype=mx.int8)], ids=lambda x: f'{type(x).__name__}-{x}')
def test_counts_of_many_types(good):
    model = tiny_model('qwen3_5')
    cache = fed(model, text(6))
    _, records = blocks(model, cache, text(5))
    rollback(cache, records, good)
    same_cache(cache, fed(model, text(6), text(5)[:, :2]), 1e-5)

def test_blocks_out_of_order():
    "Two blocks are recorded. The older one cannot be cut while the younger one stands; refused before anything changes."
    for name in ('qwen3_5', 'gemma3', 'lfm2'):
        model = the(name)
        cache = fed(model, text(6))
        _, older = blocks(model, cache, text(4, seed=1))
        _, younger = blocks(model, cache, text(5, seed=2))
        held = bits(cache)
        with pytest.raises(ValueError, match='changed since|fed or trimmed since'): rollback(cache, older, 2)
        assert same_bits(bits(cache), held)
        rollback(cache, younger, 3)
        same_cache(cache, fed(model, text(6), text(4, seed=1), text(5, seed=2)[:, :3]), 1e-4)

def test_the_older_block_after_the_younger_is_gone():
    "The younger block is taken back as a whole, then the older one in part."
    for name in ('qwen3_5', 'gemma3', 'lfm2', 'nemotron_h', 'mamba'):
        model = the(name)
        cache = fed(model, text(18))
        _, older = blocks(model, cache, text(4, seed=1))
        _, younger = blocks(model, cache, text(5, seed=2))
        rollback(cache, younger, 0)
        rollback(cache, older, 2)
        same_cache(cache, fed(model, text(18), text(4, seed=1)[:, :2]), 1e-4)

def test_a_copied_cache_is_another_one():
    model = tiny_model('qwen3_5')
    cache = fed(model, text(6))
    _, records = blocks(model, cache, text(4))
    for other in (copy.deepcopy(cache), cache[:-1], [*cache, KVCache()], cache[::-1], []):
        with pytest.raises(ValueError, match='of another cache'): rollback(other, records, 2)
    rollback(list(cache), records, 2)                                                        # another list of the same caches is the same
    same_cache(cache, fed(model, text(6), text(4)[:, :2]), 1e-5)

@pytest.mark.parametrize('name', ['qwen3_5', 'gemma3', 'nemotron_h', 'lfm2'])
def test_nothing_was_run(name):
    model = the(name)
    for past in ((), (text(7),)):
        cache = fed(model, *past)
        held = bits(cache)
        with Recording(model, cache, (1, 4)) as rec: pass
        rollback(cache, rec.records, 2)
        assert same_bits(bits(cache), held)

@pytest.mark.parametrize('name', ['qwen3_5', 'gemma3', 'nemotron_h', 'lfm2', 'mamba', 'falcon_h1'])
def test_everything_is_let_go(name):
    "No cycle keeps a record: without a garbage collector it is gone when the rollback is done, and the recording's view with the last name for it."
    model = the(name)
    cache = fed(model, text(6))
    gc.collect(); gc.disable()
    try:
        rec = Recording(model, cache, (1, 5))
        with rec: out = rec.model(text(5), cache=cache)
        watched = [weakref.ref(r) for r in rec.records.leaves]
        assert all(w() is not None for w in watched)
        rollback(cache, rec.records, 2)
        assert not any(w() is not None for w in watched)
        view = weakref.ref(rec.model) if rec.model is not model else None
        del rec, out
        assert view is None or view() is None
        try:
            with Recording(model, cache, (1, 5)) as rec:
                rec.model(text(5), cache=cache)
                watched = [weakref.ref(r) for r in rec.records.leaves]
                raise KeyError
        except KeyError: pass
        assert not any(w() is not None for w in watched)
    finally: gc.enable()

@pytest.mark.parametrize('name', ['qwen3_5', 'gemma3', 'nemotron_h', 'lfm2', 'falcon_h1'])
def test_rows_with_padding_and_counts_of_their_own(name):
    "Three rows that start at different places, over the wrap of a window, several blocks; each row against itself alone, and a refused cut in between."
    model, rng = the(name), np.random.default_rng(3)
    pad, past = [0, 4, 7], text(15, 3, seed=1)
    cache = batch_cache(model, pad)
    model(past, cache=cache)
    alone = [fed(model, past[i:i + 1, p:]) for i, p in enumerate(pad)]
    for i in range(5):
        L = int(rng.integers(1, 7))
        kept, block = rng.integers(0, L + 1, 3), text(L, 3, seed=20 + i)
        _, records = blocks(model, cache, block)
        with pytest.raises(ValueError, match='0 to'): rollback(cache, records, [0, L + 1, 0])
        first = np.minimum(kept + rng.integers(0, 2, 3), L)
        rollback(cache, records, first, keep=True)                                            # in two steps
        rollback(cache, records, kept)
        for row, n in enumerate(kept):
            if n: model(block[row:row + 1, :n], cache=alone[row])
    for L in (3, 1):
        then = text(L, 3, seed=L)
        out = model(then, cache=cache)
        for row in range(3): close(out[row:row + 1], model(then[row:row + 1], cache=alone[row]), 3e-4)

@pytest.mark.parametrize('name', ['qwen3_5', 'nemotron_h', 'gemma3'])
def test_float16(name):
    model = tiny_model(name, dtype=mx.float16)
    for n in (0, 1, 4, 5):
        cache = fed(model, text(9))
        _, records = blocks(model, cache, text(5, seed=1))
        rollback(cache, records, n)
        fresh = fed(model, text(9), text(5, seed=1)[:, :n])
        assert [[(a.dtype, a.shape) for a in contents(x) if isinstance(a, mx.array)] for _, x in cache_leaves(cache)] == [[(a.dtype, a.shape) for a in contents(x) if isinstance(a, mx.array)] for _, x in cache_leaves(fresh)]
        a, b = (model(text(3), cache=c).astype(mx.float32) for c in (cache, fresh))
        assert (mx.abs(a - b).max() / mx.abs(b).max()).item() < 2e-2

def test_lists_in_lists():
    x = draw(9, B=1)
    def filled():
        leaves = [KVCache(), RotatingKVCache(6), ArraysCache(1)]
        for l in leaves[:2]: feed(l, x)
        return leaves, [CacheList(leaves[0], CacheList(leaves[1])), None]
    leaves, cache = filled()
    records = Records(cache, (1, 4))
    for l in leaves[:2]: feed(l, draw(4, 1, 1))
    for r in records.leaves: r.finish(1, 4)
    rollback(cache, records, 1)
    fresh, _ = filled()
    for l in fresh[:2]: feed(l, draw(4, 1, 1)[..., :1, :])
    for a, b in zip(leaves[:2], fresh[:2]):
        for p, q in zip(feed(a, draw(2, 2, 1)), feed(b, draw(2, 2, 1))): assert mx.array_equal(p, q).item()

def test_a_failure_inside_of_a_switched_on_layer_leaves_no_trace():
    model = tiny_model('qwen3_5')
    cache = fed(model, text(6))
    held = bits(cache)
    with fast_gdn(model):
        with pytest.raises(Exception):
            with Recording(model, cache, (1, 3)) as rec: rec.model(mx.zeros((1, 3, 2), mx.int32), cache=cache)
        assert gdn._inside.depth == 0 and not gdn._inside.plain
        _, records = blocks(model, cache, text(5))
        rollback(cache, records, 2)
        assert gdn._inside.depth == 0 and not gdn._inside.plain
    assert gdn._uses == [0] and not same_bits(bits(cache), held)
    same_cache(cache, fed(model, text(6), text(5)[:, :2]), 1e-4)

def seed_records(L=(5, 5), B=2):
    "Two layers after a block, and the seed's fields of them."
    cache, records = [], {}
    for i, n in enumerate(L):
        r = lambda *shape: mx.random.normal(shape, key=mx.random.key(7 * i + len(shape)))
        cache.append(ArraysCache(2)); cache[i].cache = [r(B, 3, 6), r(B, 2, 4, 8)]
        records[i] = dict(initial_conv_state=r(B, 3, 6), initial_ssm_state=r(B, 2, 4, 8), qkv=r(B, n, 6), k=r(B, n, 2, 8) / 3, v=r(B, n, 2, 4), g=mx.sigmoid(r(B, n, 2)), beta=mx.sigmoid(r(B, n, 2)))
    return cache, records

@pytest.mark.parametrize('spoil, message', [
    (lambda c, r: c.pop(), 'record of layer 1, and no entry'), (lambda c, r: c.__setitem__(1, KVCache()), 'record of layer 1, and KVCache'), (lambda c, r: r.__setitem__(-1, r.pop(1)), 'record of layer -1, and no entry'),
    (lambda c, r: r[1].update(k=r[1]['k'][:, :4]), 'k has shape'), (lambda c, r: r[1].update(beta=r[1]['beta'][:1]), 'beta has shape'), (lambda c, r: r[1].update(g=r[1]['g'][..., :1]), 'g has shape'),
    (lambda c, r: r[1].update(initial_ssm_state=r[1]['initial_ssm_state'][:, :1]), 'state has shape'), (lambda c, r: r[1].pop('v'), 'has no v'), (lambda c, r: r.update({1: seed_records((5, 4))[1][1]}), 'blocks of different shapes')],
    ids=['short', 'keys', 'negative', 'k', 'beta', 'g', 'state', 'missing', 'lengths'])
def test_seed_records_that_do_not_fit(spoil, message):
    from vllm_mlx.rollback import rollback_linear_caches
    cache, records = seed_records()
    spoil(cache, records)
    held = bits([c for c in cache if isinstance(c, ArraysCache)])
    for counts in (2, [1, 3]):
        with pytest.raises(ValueError, match=message): rollback_linear_caches(cache, records, counts)
        assert same_bits(bits([c for c in cache if isinstance(c, ArraysCache)]), held)

def test_linear_records_of_another_cache():
    from vllm_mlx.rollback import rollback_linear_caches
    model = tiny_model('qwen3_5')
    cache, other = fed(model, text(6)), fed(model, text(6))
    _, records = blocks(model, cache, text(4))
    held = bits(cache), bits(other)
    with pytest.raises(ValueError, match='layer 0 is of another cache'): rollback_linear_caches(other, records, 2)
    assert same_bits(bits(cache), held[0]) and same_bits(bits(other), held[1])

def test_a_rerun_refuses_what_a_rollback_refuses():
    model = tiny_model('qwen3_5')
    cache = fed(model, text(6))
    held = take_snapshot(cache)
    model(text(5), cache=cache)
    after = bits(cache)
    for bad in (-1, 6, 2.5, [1, 2]):
        with pytest.raises(ValueError, match='accepted is'): rollback_by_rerun(model, cache, held, text(5), bad)
        assert same_bits(bits(cache), after)
