"""Codes that do not depend on company, a cache that behaves like mlx-lm's, attention equal to its specification, and models that are left as they were."""
import copy, json
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mlx_lm.generate import BatchGenerator, generate_step, speculative_generate_step
from mlx_lm.models.cache import (BatchKVCache, CacheList, KVCache, LRUPromptCache, QuantizedKVCache, RotatingKVCache, can_trim_prompt_cache, load_prompt_cache, make_prompt_cache,
                                 save_prompt_cache, trim_prompt_cache)

from vllm_mlx import coded_cache
from vllm_mlx.compiled_verify import FORMS, get_compiled_whole_model_verify_fn, whole_refusal
from vllm_mlx.layers import attention_layout, model_view
from vllm_mlx.models import load, tiny_model
from vllm_mlx.rollback import rollback
from vllm_mlx.sparse_prefill import SparseKVCache, sparse_prefill
from vllm_mlx.speculate import stream_generate
from vllm_mlx.turbo_codec import BITS, Codec, codec, distortion, lloyd_max, reference_codes, reference_decode, rotation
from vllm_mlx.turboquant import (TurboQuantKVCache, attention_reference, coded_attention, is_patched, key_centers, make_turboquant_cache, patch_attention,
                                 quantize_cache, unpatch_attention)
from vllm_mlx.nano import python_corpus
from vllm_mlx.turboquant_quality import _answer, bench_facts, bench_perplexity, bench_steps, bytes_per_token, main, ways, write_results
from vllm_mlx.verify import forward_with_hidden_states_and_rollback

PROMPT = np.random.default_rng(0).integers(1, 500, 60).tolist()


def draw(*shape, seed=0): return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))
def same(a, b): return a.shape == b.shape and a.dtype == b.dtype and mx.array_equal(a, b).item()
def held(c): return [a[..., :c.coded, :] for pair in (c.keys, c.values) for a in pair]
def same_codes(a, b): return a.coded == b.coded and all(map(same, held(a), held(b)))
def error(x, back): return float((((x - back) ** 2).sum(-1) / (x ** 2).sum(-1)).mean())
def gap(a, b): return mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item()


# --- codec

@pytest.mark.parametrize("dim", [16, 48, 64, 80, 96, 100, 128, 192, 576])
def test_error_is_what_theory_says_and_falls_with_the_bits(dim):
    "B80, B83: averaged over rotations, for vectors of every kind."
    x = np.concatenate([np.random.default_rng(dim).standard_normal((150, dim)), np.random.default_rng(1).standard_cauchy((150, dim))])
    seen = []
    for bits in BITS:
        errors, stretched = [], []
        for seed in range(4 if dim < 200 else 1):
            c = Codec(dim, bits, seed)
            back = lambda unbiased: np.array(c.decode(*c.encode(mx.array(x, dtype=mx.float32), unbiased=unbiased)), np.float64)
            errors.append(error(x, back(False))); stretched.append(error(x, back(True)))
            if seed == 0: assert abs(error(x, reference_decode(*reference_codes(x, bits), bits)) - errors[0]) < 3e-4
        D = distortion(dim, bits)
        assert abs(np.mean(errors) / D - 1) < 0.06, (bits, np.mean(errors), D)
        assert abs(np.mean(stretched) / (D / (1 - D)) - 1) < (0.1 if dim > 16 else 0.25)       # an estimate for many dimensions
        seen.append(np.mean(errors))
    assert all(a > b for a, b in zip(seen, seen[1:])), seen

def test_levels_are_those_of_the_density():
    for dim in (4, 5, 64, 1000):
        for bits in (1, 2, 3, 4, 5):
            levels, err = lloyd_max(dim, bits)
            assert (np.diff(levels) > 0).all() and np.allclose(levels, -levels[::-1]) and np.abs(levels).max() < 1 and 0 < err < 1 / dim
    assert 64 * lloyd_max(64, 4)[1] < 3 ** 0.5 * np.pi / 2 * 4 ** -4                         # the paper's bound

@settings(max_examples=15, deadline=None)
@given(st.sampled_from([16, 48, 80]), st.sampled_from(BITS), st.integers(0, 99), st.integers(-30, 30))
def test_codes_do_not_depend_on_company(dim, bits, seed, power):
    "B81: alone, in a batch, in another order and shape: the same bits."
    x, c = draw(37, dim, seed=seed) * 2.0 ** power, codec(dim, bits)
    codes, norms = c.encode(x)
    for i in (0, 17, 36): assert all(map(same, c.encode(x[i]), (codes[i], norms[i])))
    assert all(map(same, c.encode(x[::-1]), (codes[::-1], norms[::-1])))
    assert all(map(same, c.encode(x[None, :, None]), (codes[None, :, None], norms[None, :, None])))

def test_strange_vectors():
    c = codec(64, 4)
    for x in (mx.zeros((2, 64)), mx.zeros((2, 64), mx.bfloat16)): assert mx.abs(c.decode(*c.encode(x))).max().item() == 0
    for scale in (1e-15, 1e4, 1e15):
        x = np.array(draw(20, 64)) * scale
        assert error(x, np.array(c.decode(*c.encode(mx.array(x))), np.float64)) < 0.02
    one = mx.eye(64) * 7
    assert error(np.array(one), np.array(c.decode(*c.encode(one)))) < 0.02
    assert not mx.isfinite(c.decode(*c.encode(mx.full((1, 64), mx.nan)))).any().item()          # not hidden
    assert same(c.encode(draw(5, 64).astype(mx.bfloat16))[0], c.encode(draw(5, 64).astype(mx.bfloat16).astype(mx.float32))[0])

@pytest.mark.parametrize("dim", [4, 5, 7, 17, 33, 63, 81, 129, 255, 256])
def test_odd_sizes_and_broken_vectors(dim):
    x = np.random.default_rng(dim).standard_normal((40, dim))
    for bits in BITS:
        c = codec(dim, bits)
        codes, norms = c.encode(mx.array(x, dtype=mx.float32), unbiased=False)
        assert c.bytes_per_vector == 4 * codes.shape[-1] + 2
        assert abs(error(x, np.array(c.decode(codes, norms), np.float64)) - error(x, reference_decode(*reference_codes(x, bits), bits))) < 2e-3
    ones = np.ones((1, dim), np.float32)
    for bad in (np.nan, np.inf):
        ones[0, -1] = bad
        assert not mx.isfinite(c.decode(*c.encode(mx.array(ones)))).any().item()                # one broken number is not hidden by the rest
    for size in (1e-29, 1e36): assert error(x, np.array(c.decode(*c.encode(mx.array(x * size, dtype=mx.float32))), np.float64) / size) < 0.03

def test_rotations_and_refusals():
    for d in (5, 48, 80, 96, 128): assert np.abs(rotation(d) @ rotation(d).T - np.eye(d)).max() < 1e-12
    assert not np.allclose(rotation(64, 0), rotation(64, 1))
    for bad in (1, 4.5, 8, "2"):
        with pytest.raises(ValueError, match="bits is"): Codec(64, bad)
        with pytest.raises(ValueError, match="bits is"): TurboQuantKVCache(bad)
        with pytest.raises(ValueError, match="bits is"): TurboQuantKVCache((bad, 4))
    with pytest.raises(ValueError, match="recent is -1"): TurboQuantKVCache(4, recent=-1)


# --- cache

@settings(max_examples=12, deadline=None)
@given(st.sampled_from([0, 8, 40]), st.lists(st.one_of(st.integers(1, 50), st.integers(-60, -1)), min_size=2, max_size=9))
def test_any_history_of_appends_and_trims(recent, moves):
    "After appends and trims the codes are those of a bulk append of what is left, and what is read back is near it."
    rows, c, n = draw(1, 2, 500, 16), TurboQuantKVCache((4, 3), recent=recent), 0
    for m in moves:
        if m > 0: c.update_and_fetch(rows[..., n:n + m, :], rows[..., n:n + m, :] + 1); n += m
        else: assert c.trim(-m) == min(-m, n); n -= min(-m, n)
        assert c.offset == c.size() == n and c.coded <= n and (c.late is None or c.late[0].shape[2] == n - c.coded)
    if n == 0: return
    bulk = TurboQuantKVCache((4, 3)); bulk.update_and_fetch(rows[..., :n, :], rows[..., :n, :] + 1)
    if c.coded: assert all(same(a, b[..., :c.coded, :]) for a, b in zip(held(c), held(bulk)))
    for a, b in zip(c.keys_and_values(), (rows[..., :n, :], rows[..., :n, :] + 1)):
        assert a.shape == b.shape and (n == c.coded or same(a[..., c.coded:, :], b[..., c.coded:, :]))
        assert error(np.array(b), np.array(a)) < 0.08

@pytest.mark.parametrize("recent", [0, 40])
def test_one_by_one_equals_bulk(recent):
    rows = draw(1, 3, 330, 48)
    bulk, single = TurboQuantKVCache(3.5, recent=recent), TurboQuantKVCache(3.5, recent=recent)
    bulk.update_and_fetch(rows, rows)
    for t in range(330): single.update_and_fetch(rows[..., t:t + 1, :], rows[..., t:t + 1, :])
    n = min(bulk.coded, single.coded)
    assert n >= 256 and all(same(a[..., :n, :], b[..., :n, :]) for a, b in zip(held(bulk), held(single)))
    assert bulk.keys[0].shape[2] % 256 == single.keys[0].shape[2] % 256 == 0

def test_bytes_are_real():
    "B87, B89: what is stored is small integers, and nbytes counts all of it."
    c, plain = TurboQuantKVCache(2.5), KVCache()
    rows = draw(1, 2, 512, 64).astype(mx.bfloat16)
    for x in (c, plain): x.update_and_fetch(rows, rows)
    arrays = [a for pair in (c.keys, c.values) for a in pair]
    assert [a.dtype for a in arrays] == [mx.uint32, mx.bfloat16] * 2 and c.late is None
    assert c.nbytes == sum(a.size * a.itemsize for a in arrays) == 512 * 2 * 2 * (5 * 4 + 2) and c.nbytes < plain.nbytes / 5
    assert TurboQuantKVCache(4).nbytes == 0 and TurboQuantKVCache(4).empty() and not c.empty()
    kept = TurboQuantKVCache(4, recent=64, center=draw(2, 64)); kept.update_and_fetch(rows, rows)
    assert kept.nbytes == sum(a.nbytes for pair in (kept.keys, kept.values, kept.late) for a in pair) + 2 * 64 * 4

@pytest.mark.parametrize("settings_", [dict(bits=2.5), dict(bits=(4, 2), recent=16, seed=7), dict(bits=3, center=True)])
def test_save_load_copy_and_go_on(tmp_path, settings_):
    "B86: everything that is needed to go on is in the file."
    model = tiny_model("qwen3_5")
    centers = key_centers(model, PROMPT) if settings_.pop("center", False) else None
    cache = make_turboquant_cache(model, **settings_, centers=centers)
    save_prompt_cache(str(tmp_path / "empty.safetensors"), cache)
    model(mx.array([PROMPT]), cache=cache)
    save_prompt_cache(str(tmp_path / "c.safetensors"), cache, {"a": "b"})
    loaded, meta = load_prompt_cache(str(tmp_path / "c.safetensors"), return_metadata=True)
    fork, shallow = copy.deepcopy(cache), [copy.copy(c) for c in cache]
    outs = [[model(mx.array([[t]]), cache=c) for t in range(40)] for c in (cache, loaded, fork)]
    assert meta == {"a": "b"} and all(same(a, b) for other in outs[1:] for a, b in zip(outs[0], other))
    assert shallow[2].offset == 60 and same_codes(shallow[2], load_prompt_cache(str(tmp_path / "c.safetensors"))[2])
    first = load_prompt_cache(str(tmp_path / "empty.safetensors"))
    again = make_turboquant_cache(model, **settings_, centers=centers)
    assert same(model(mx.array([PROMPT]), cache=first), model(mx.array([PROMPT]), cache=again))

def test_wrong_shapes_change_nothing():
    c = TurboQuantKVCache(4); c.update_and_fetch(draw(1, 2, 5, 16), draw(1, 2, 5, 16))
    before = c.state
    for k, v in ((draw(1, 3, 1, 16), draw(1, 3, 1, 16)), (draw(1, 2, 1, 16), draw(1, 2, 2, 16)), (draw(1, 2, 1, 32), draw(1, 2, 1, 16)), (draw(2, 2, 1, 16), draw(2, 2, 1, 16))):
        with pytest.raises(ValueError, match="keys of shape"): c.update_and_fetch(k, v)
    assert all(a is b or a == b if not isinstance(a, mx.array) else same(a, b) for a, b in zip(before, c.state))
    with pytest.raises(ValueError, match="the center is of 3 heads of 16"): TurboQuantKVCache(4, center=draw(3, 16)).update_and_fetch(draw(1, 2, 1, 16), draw(1, 2, 1, 16))
    with pytest.raises(ValueError): TurboQuantKVCache(4).update_and_fetch(draw(1, 2, 1, 3), draw(1, 2, 1, 3))


@pytest.mark.parametrize("bits", BITS)
def test_no_tokens(bits):
    "Nothing is encoded to nothing, and a cache that is given no tokens is the cache that it was."
    c = codec(64, bits)
    codes, norms = c.encode(mx.zeros((1, 2, 0, 64)))
    assert codes.shape == (1, 2, 0, sum(c.words)) and norms.shape == (1, 2, 0, 1) and c.decode(codes, norms).shape == (1, 2, 0, 64)
    for recent in (0, 5):
        for n in (0, 1, 50):
            rows, cache = draw(2, 2, 60, 16), TurboQuantKVCache(bits, recent=recent)
            if n: cache.update_and_fetch(rows[..., :n, :], rows[..., :n, :])
            k, v = cache.update_and_fetch(rows[..., :0, :], rows[..., :0, :])
            assert cache.offset == n and k.shape == v.shape == (2, 2, n, 16) and coded_attention(draw(2, 4, 0, 16), k, v, 0.25).shape == (2, 4, 0, 16)
            k, v = cache.update_and_fetch(rows[..., n:n + 3, :], rows[..., n:n + 3, :])
            q = draw(2, 4, 3, 16, seed=1)
            assert cache.offset == n + 3 and gap(coded_attention(q, k, v, 0.25, "causal"), attention_reference(q, k, v, 0.25, "causal")) < 1e-5
            assert cache.trim(n + 9) == n + 3 and cache.offset == 0 and cache.keys_and_values()[0].shape == (2, 2, 0, 16)

def test_trims_across_the_recent_rows_and_the_growth_of_buffers():
    rows = draw(2, 2, 600, 16)
    for recent in (0, 5, 40):
        for n in (33, 256, 300):
            base = TurboQuantKVCache(4, recent=recent); base.update_and_fetch(rows[..., :n, :], rows[..., :n, :])
            for t in sorted({0, 1, max(0, recent - 1), recent, recent + 1, recent + 32, n - 1, n, *([n - 256, n - 255] if n >= 256 else [])}):
                c = copy.deepcopy(base)
                assert c.trim(t) == min(t, n)
                m = c.offset
                c.update_and_fetch(rows[..., m:m + 2, :], rows[..., m:m + 2, :])
                back = c.keys_and_values()[0]
                assert c.offset == m + 2 and error(np.array(rows[..., :m + 2, :]), np.array(back)) < 0.03, (recent, n, t)


# --- mlx-lm's functions

PUBLIC = {"update_and_fetch", "keys_and_values", "size", "empty", "is_trimmable", "trim", "make_mask", "nbytes", "state", "from_state", "step"}
MISSING = {"merge": "rows of a batch with an offset each are not served; without it mlx-lm says so itself", "to_quantized": "it is quantised: without it kv_bits passes it by"}

def test_every_public_method_of_mlx_lms_caches_is_there_or_left_out_on_purpose():
    "A new mlx-lm with a new method fails here."
    public = lambda cls: {n for n in dir(cls) if n[0] != "_"}
    assert public(KVCache) | public(QuantizedKVCache) == PUBLIC | set(MISSING)
    ours = TurboQuantKVCache(4)
    assert PUBLIC <= public(TurboQuantKVCache) and not any(hasattr(ours, n) for n in MISSING)
    batch_only = public(BatchKVCache) - public(KVCache)
    assert batch_only == {"prepare", "finalize", "filter", "extend", "extract"} and not any(hasattr(ours, n) for n in batch_only)

@pytest.mark.parametrize("recent", [0, 8])
def test_each_method_answers_as_a_kvcache_does(recent):
    rows, ours, plain = draw(1, 2, 90, 16), TurboQuantKVCache(4, recent=recent), KVCache()
    says = lambda c: (c.offset, c.size(), c.empty(), c.is_trimmable(), c.make_mask(1, return_array=False, window_size=None), c.make_mask(5, return_array=False, window_size=None), c.step)
    array = lambda c: (c.make_mask(3, return_array=True, window_size=None), c.make_mask(3, return_array=False, window_size=2))
    assert says(ours)[:2] == says(plain)[:2] and ours.empty() and ours.nbytes == plain.nbytes == 0
    for n, t in ((40, 0), (1, 1), (5, 60), (44, 7)):
        out = [c.update_and_fetch(rows[..., :n, :], rows[..., :n, :]) for c in (ours, plain)]
        assert [a.shape for a in out[0]] == [a.shape for a in out[1]] and says(ours) == says(plain) and all(map(same, array(ours), array(plain)))
        assert [a.shape for a in ours.keys_and_values()] == [a.shape for a in plain.keys_and_values()] and ours.keys_and_values()[0].dtype == mx.float32
        assert ours.trim(t) == plain.trim(t) and says(ours) == says(plain)
    again = TurboQuantKVCache.from_state(ours.state)
    assert same_codes(again, ours) and says(again) == says(ours) and (again.bits, again.recent, again.dims) == (4, recent, (16, 16))
    with pytest.raises(ValueError, match="never held anything"): TurboQuantKVCache().keys_and_values()

def test_prompt_caches_are_kept_trimmed_and_found_again(tmp_path):
    "trim_prompt_cache, LRUPromptCache (copies, trims and counts bytes), CacheList, and files of both."
    model = tiny_model("llama")
    cache = make_turboquant_cache(model, 4)
    assert can_trim_prompt_cache(cache)
    model(mx.array([PROMPT]), cache=cache)
    lru = LRUPromptCache(max_size=2)
    lru.insert_cache("m", PROMPT, cache)
    assert lru.nbytes == sum(c.nbytes for c in cache) > 0
    same_text, rest = lru.fetch_nearest_cache("m", PROMPT)
    assert rest == [] and same_text[0] is not cache[0] and same_codes(same_text[0], cache[0])
    shorter, rest = lru.fetch_nearest_cache("m", PROMPT[:50] + [499, 7])
    assert rest == [499, 7] and shorter[0].offset == 50 and cache[0].offset == 60
    fork = copy.deepcopy(cache)
    assert trim_prompt_cache(fork, 10) == 10 and same(model(mx.array([[499]]), cache=shorter), model(mx.array([[499]]), cache=fork))
    pair = CacheList(cache[0], cache[1])
    assert pair.nbytes == cache[0].nbytes + cache[1].nbytes and pair.size() == 60 and pair.trim(3) == 3 and cache[1].offset == 57
    save_prompt_cache(str(tmp_path / "list.safetensors"), [pair])
    (back,) = load_prompt_cache(str(tmp_path / "list.safetensors"))
    assert same_codes(back.caches[1], cache[1]) and back.is_trimmable()

def test_mlx_lm_generates_with_it_and_kv_bits_pass_it_by():
    model = tiny_model("qwen3")
    plain, other = make_turboquant_cache(model, 4), make_turboquant_cache(model, 4)
    text = [t for t, _ in generate_step(mx.array(PROMPT), model, max_tokens=8, prompt_cache=plain)]
    again = [t for t, _ in generate_step(mx.array(PROMPT), model, max_tokens=8, prompt_cache=other, kv_bits=8, kv_group_size=16, quantized_kv_start=0)]
    assert text == again and {type(c) for c in other} == {TurboQuantKVCache}
    drafted = make_turboquant_cache(model, 4) + make_turboquant_cache(model, 4)           # mlx-lm's own speculative decoding, the model as its own draft
    got = [t for t, *_ in speculative_generate_step(mx.array(PROMPT), model, model, max_tokens=8, num_draft_tokens=2, prompt_cache=drafted)]
    assert [int(t) for t in got] == [int(t) for t in text]
    limited = [t for t, _ in generate_step(mx.array(PROMPT), model, max_tokens=4, prompt_cache=make_turboquant_cache(model, 4, recent=16), prefill_step_size=7)]
    assert len(limited) == 4

def test_batches_are_refused_by_name_and_plain_ones_still_run():
    model = tiny_model("llama")
    cache = make_turboquant_cache(model, 4)                                              # the model is patched from here on
    model(mx.array([PROMPT]), cache=cache)
    gen = BatchGenerator(model, max_tokens=3)
    with pytest.raises(ValueError, match="TurboQuantKVCache.*does not yet support batching"):
        gen.insert([[5]], caches=[cache]); gen.next()
    gen.close()
    gen, out = BatchGenerator(model, max_tokens=3), {}
    ids = gen.insert([PROMPT[:9], PROMPT[:5]])
    while len([1 for o in out.values() if len(o) == 3]) < 2:
        _, replies = gen.next()
        for r in replies: out.setdefault(r.uid, []).append(r.token)
    gen.close()
    alone = [[int(t) for t, _ in generate_step(mx.array(PROMPT[:n]), model, max_tokens=3)] for n in (9, 5)]
    assert [out[i] for i in ids] == alone
    with pytest.raises(ValueError, match="keeps a BatchKVCache"): quantize_cache(model, [BatchKVCache([0, 2]) for _ in model.layers], 4)


# --- as one graph

@pytest.mark.parametrize("family, settings_", [("llama", dict(bits=4)), ("qwen3", dict(bits=2.5, seed=3)), ("qwen3_5", dict(bits=(4, 2))), ("llama", dict(bits=3, centered=True))])
def test_the_whole_model_as_one_graph(family, settings_):
    "Blocks up to 32 rows and beyond, across growth, from nothing, every count taken back: as the plain forward, code for code."
    model, settings_ = tiny_model(family), dict(settings_)
    centers = key_centers(model, PROMPT) if settings_.pop("centered", False) else None
    make = lambda: make_turboquant_cache(model, **settings_, centers=centers)
    a, b, rng = make(), make(), np.random.default_rng(1)
    assert whole_refusal(model, a) is None
    for i, (L, keep) in enumerate([(60, 60), (6, 6), (6, 2), (6, 0), (33, 20), (160, 160), (6, 6), (6, 4), (6, 6)]):
        block = mx.array(rng.integers(1, 500, (1, L)))
        ours, theirs = FORMS["whole"](model, block, a, [1]), forward_with_hidden_states_and_rollback(model, block, b, [1])
        assert gap(ours[0], theirs[0]) < 1e-2 and gap(ours[2][0], theirs[2][0]) < 1e-2, i     # a code at a border may fall to either side
        rollback(a, ours[3], keep); rollback(b, theirs[3], keep)
    x, y = (next(c for c in caches if isinstance(c, TurboQuantKVCache)) for caches in (a, b))
    assert x.offset == y.offset == x.coded == 264 and x.dims == y.dims and x.kind == y.kind
    for p, q in zip(held(x), held(y)): assert p.shape == q.shape and p.dtype == q.dtype and (p != q).mean().item() < 0.01
    assert get_compiled_whole_model_verify_fn(model, [1]).traces == 5                        # 60 from nothing, 6, 33, 160, and 6 in a longer buffer
    assert gap(model(mx.array([[3]]), cache=a), model(mx.array([[3]]), cache=b)) < 1e-2

def test_the_loop_as_one_graph():
    model, tokenizer = tiny_model("qwen3_5"), load("nano-hybrid")[1]
    text = [int(t) for t, _ in generate_step(mx.array(PROMPT), model, max_tokens=18, prompt_cache=make_turboquant_cache(model, 4))]
    cache = make_turboquant_cache(model, 4)
    got = [r.token for r in stream_generate(model, HalfRight(PROMPT + text), tokenizer, PROMPT, max_tokens=18, block_size=6, prompt_cache=cache, verify="whole")]
    assert got == text[:len(got)] and get_compiled_whole_model_verify_fn(model, [0, 2]).traces >= 1
    with pytest.raises(ValueError, match="verify is 'whole'.*TurboQuantKVCache in slot 2.*recent"):
        list(stream_generate(model, HalfRight(PROMPT + text), tokenizer, PROMPT, max_tokens=4, block_size=6, prompt_cache=make_turboquant_cache(model, 4, recent=8), verify="whole"))
    sparse = make_prompt_cache(tiny := tiny_model("llama"))
    sparse_prefill(tiny, PROMPT, list(range(0, 60, 2)) + [59], sparse, carry="cache")
    quantize_cache(tiny, sparse, 4)
    twin = copy.deepcopy(sparse)
    assert gap(FORMS["whole"](tiny, mx.array([[7, 8, 9]]), sparse)[0], tiny(mx.array([[7, 8, 9]]), cache=twin)) < 3e-3 and sparse[0].offset == twin[0].offset == 63

# --- attention

@pytest.mark.parametrize("N, L", [(0, 1), (0, 40), (1, 1), (300, 1), (300, 7), (300, 33), (40, 100)])
@pytest.mark.parametrize("recent", [0, 40])
def test_attention_equals_its_specification(N, L, recent, monkeypatch):
    "B82: None, causal, boolean, additive, by row and by head, GQA and not, whole and in pieces."
    for i, (D, Dv, KV, G) in enumerate([(16, 16, 2, 2), (80, 48, 1, 3), (48, 48, 3, 1)]):
        B, T = 2, N + L
        c = TurboQuantKVCache((4, 3), recent=recent, center=draw(KV, D, seed=9) if i == 1 else None)
        if N: c.update_and_fetch(draw(B, KV, N, D, seed=1), draw(B, KV, N, Dv, seed=2))
        k, v = c.update_and_fetch(draw(B, KV, L, D, seed=3), draw(B, KV, L, Dv, seed=4))
        assert k.shape == (B, KV, T, D) and v.shape == (B, KV, T, Dv)
        q, seen = draw(B, KV * G, L, D, seed=5), mx.arange(T)[None] <= mx.arange(N, T)[:, None]
        for mask in (None, "causal", seen, mx.where(seen, draw(L, T), -1e9), mx.where(seen, 0, -mx.inf), (draw(B, 1, L, T) > 0) | (mx.arange(T) == 0), draw(B, KV * G, L, T), draw(T) * 3, (draw(1, KV * G, 1, T) > 0) | (mx.arange(T) == 0)):
            want = attention_reference(q, k, v, D ** -0.5, mask)
            for piece in (1, 2 ** 22):
                monkeypatch.setattr(coded_cache, "_PIECE", piece)
                got = coded_attention(q, k, v, D ** -0.5, mask)
                assert got.shape == want.shape and gap(got, want) < 1e-5

def test_attention_is_near_the_plain_one_and_writes_out_one_piece_at_a_time(monkeypatch):
    q, k, v = (draw(1, h, n, 64, seed=h) for h, n in ((4, 1), (2, 8192), (2, 8192)))
    plain = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125)
    errors = []
    for bits in BITS:
        c = TurboQuantKVCache(bits); c.update_and_fetch(k, v); seen = c._stand_ins()
        errors.append(gap(coded_attention(q, *seen, 0.125), plain))
    assert errors[-1] < 0.02 and errors[0] > errors[-1]
    c = TurboQuantKVCache(4); c.update_and_fetch(k, v); seen = c._stand_ins(); mx.eval(c.state)
    peaks = []
    for piece in (2 ** 30, 2 ** 16):
        monkeypatch.setattr(coded_cache, "_PIECE", piece)
        mx.eval(coded_attention(q, *seen, 0.125)); mx.clear_cache()
        base = mx.get_active_memory(); mx.reset_peak_memory()
        mx.eval(coded_attention(q, *seen, 0.125))
        peaks.append(mx.get_peak_memory() - base)
    assert peaks[1] < peaks[0] / 4, peaks

def test_bad_masks():
    c = TurboQuantKVCache(4); k, v = c.update_and_fetch(draw(1, 2, 5, 16), draw(1, 2, 5, 16))
    for mask in ("sideways", mx.ones((5, 4)) > 0, mx.ones((4, 5)) > 0, mx.array(0.0), mx.zeros((3, 1, 5, 5)), mx.zeros((1, 3, 5, 5)), mx.zeros((1, 1, 1, 5, 5)), 7):
        with pytest.raises(ValueError, match="mask is"): coded_attention(draw(1, 2, 5, 16), k, v, 1.0, mask)
    for f in (lambda: k[0], lambda: list(k), lambda: mx.fast.scaled_dot_product_attention(draw(1, 2, 5, 16), k, v, scale=1.0)):
        with pytest.raises((RuntimeError, TypeError)): f()


# --- models

@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5", "nemotron_h"])
def test_models_after_and_during_prefill(family):
    "B84: encoded after the prompt or while it is read, the next logits stay near; 4 bits nearer than 2."
    model = tiny_model(family, head_dim=32)
    plain = make_prompt_cache(model); model(mx.array([PROMPT]), cache=plain)
    probe = mx.array([[7]])
    want, errors = model(probe, cache=copy.deepcopy(plain))[0, -1], {}
    for bits in (2, 4):
        after = quantize_cache(model, copy.deepcopy(plain), bits)
        during = make_turboquant_cache(model, bits)
        for a in range(0, 60, 35): model(mx.array([PROMPT[a:a + 35]]), cache=during)
        errors[bits] = [(mx.linalg.norm(model(probe, cache=c)[0, -1] - want) / mx.linalg.norm(want)).item() for c in (after, during)]
    assert all(0.001 < four < 0.6 and four < 0.6 * two for four, two in zip(errors[4], errors[2])), errors     # random weights with sharp attention exaggerate
    assert {type(c) for c in plain} == {type(c) for c in make_prompt_cache(model)}                 # untouched

def test_what_cannot_be_served_is_named_and_nothing_changes():
    oss, gemma = tiny_model("gpt_oss"), tiny_model("gemma3")
    with pytest.raises(ValueError, match=r"AttentionBlock \(layer 0\) has attention sinks"): make_turboquant_cache(oss)
    with pytest.raises(ValueError, match=r"RotatingKVCache with a window of 16 tokens"): patch_attention(gemma)
    assert not any(is_patched(l.attn) for m in (oss, gemma) for l in attention_layout(m))
    some = make_turboquant_cache(gemma, 4, skip=[0, 1, 3, 4])
    assert [isinstance(c, TurboQuantKVCache) for c in some] == [False, False, True] * 2 and isinstance(some[0], RotatingKVCache)
    assert mx.isfinite(gemma(mx.array([PROMPT]), cache=some)).all().item()
    llama = tiny_model("llama")
    for call in (lambda: make_turboquant_cache(llama, skip=[9]), lambda: make_turboquant_cache(llama, skip=range(4)), lambda: make_turboquant_cache(llama, 5), lambda: key_centers(llama, [])):
        with pytest.raises(ValueError): call()
    cache = make_prompt_cache(llama); cache[3] = QuantizedKVCache()
    with pytest.raises(ValueError, match="keeps a QuantizedKVCache"): quantize_cache(llama, cache, 4)
    assert [type(c) for c in cache] == [KVCache] * 3 + [QuantizedKVCache] and not is_patched(attention_layout(llama)[0].attn)

def test_other_attention_is_refused():
    model = tiny_model("llama")
    attn = attention_layout(model)[1].attn
    own = type(attn)
    class Own(own):
        def __call__(self, x, mask=None, cache=None): return x
    object.__setattr__(attn, "__class__", Own)
    with pytest.raises(ValueError, match=r"Own \(layer 1\) does not call scaled_dot_product_attention; skip=\[1\]"): make_turboquant_cache(model)

def test_patching_is_per_model_once_and_removable():
    a, b = tiny_model("llama"), tiny_model("llama", seed=1)
    attn, own = attention_layout(a)[0].attn, type(attention_layout(a)[0].attn)
    plain = a(mx.array([PROMPT]))
    for _ in range(3): make_turboquant_cache(a)
    assert is_patched(attn) and type(attn).__mro__[1] is own and not any(is_patched(l.attn) for l in attention_layout(b))
    assert same(a(mx.array([PROMPT])), plain) and same(a(mx.array([PROMPT]), cache=make_prompt_cache(a)), plain)
    view = model_view(a)
    assert is_patched(attention_layout(view)[0].attn)
    with patch_attention(a): pass
    assert is_patched(attn)                                                                   # the lasting one stays
    unpatch_attention(a); unpatch_attention(a)
    assert type(attn) is own
    with pytest.raises(KeyError):
        with patch_attention(a): assert is_patched(attn); raise KeyError
    assert type(attn) is own
    cache = [TurboQuantKVCache(4) for _ in range(4)]
    with pytest.raises(RuntimeError, match="patch_attention"): a(mx.array([PROMPT]), cache=cache)

def test_bfloat16_models():
    model = tiny_model("llama", head_dim=64); model.set_dtype(mx.bfloat16)
    cache = make_turboquant_cache(model, 4, recent=8)
    out = model(mx.array([PROMPT]), cache=cache)
    assert out.dtype == model(mx.array([PROMPT])).dtype and cache[0].late[0].dtype == mx.bfloat16
    assert mx.isfinite(model(mx.array([[3]]), cache=cache)).all().item()


# --- speculation, sparse prefill

class HalfRight:
    "A draft that knows the text, and is wrong at every third place."
    def __init__(self, text): self.text, self.config = text + [0] * 60, SimpleNamespace(block_size=6, target_layer_ids=[0, 2], mask_token_id=511)
    def features(self, hidden): return mx.concatenate(hidden, axis=-1)
    def make_cache(self): return SimpleNamespace(state=[])
    def extend(self, features, cache, positions): self.at = int(positions[-1])
    def propose(self, last, features, cache, block_size, position):
        rows = [self.text[position + 1 + i] if (position + i) % 3 else 3 for i in range(block_size - 1)]
        return 20.0 * (mx.arange(512) == mx.array(rows)[:, None])[None]

@pytest.mark.parametrize("family, recent", [("llama", 0), ("qwen3_5", 0), ("qwen3_5", 24), ("nemotron_h", 0)])
def test_speculation_gives_the_text_of_plain_steps(family, recent):
    model, tokenizer = tiny_model(family), load("nano-hybrid")[1]
    plain, cache = make_turboquant_cache(model, 4, recent=recent), make_turboquant_cache(model, 4, recent=recent)
    text = [t if isinstance(t, int) else t.item() for t, _ in generate_step(mx.array(PROMPT), model, max_tokens=18, prompt_cache=plain)]
    got = list(stream_generate(model, HalfRight(PROMPT + text), tokenizer, PROMPT, max_tokens=18, block_size=6, prompt_cache=cache))
    stats = got[-1].stats
    assert [r.token for r in got] == text[:len(got)] and (len(got) == 18 or got[-1].finish_reason == "stop")
    assert 0 < stats.accepted < stats.drafted                                                 # blocks were cut
    leaf = next(c for c in cache if isinstance(c, TurboQuantKVCache))
    assert leaf.offset == 60 + len(got)                                                       # exactly what was emitted

@pytest.mark.parametrize("recent", [0, 8])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_rollback_to_every_count(family, recent):
    model, block, probe = tiny_model(family), mx.array([[5, 6, 7, 8, 9]]), mx.array([[11]])
    prefix = make_turboquant_cache(model, 3.5, recent=recent); model(mx.array([PROMPT]), cache=prefix)
    for kept in range(6):
        cache, alone = copy.deepcopy(prefix), copy.deepcopy(prefix)
        *_, records = forward_with_hidden_states_and_rollback(model, block, cache)
        rollback(cache, records, kept)
        for t in range(kept): model(block[:, t:t + 1], cache=alone)
        assert gap(model(probe, cache=cache), model(probe, cache=alone)) < 5e-3, kept
        leaf = next(c for c in cache if isinstance(c, TurboQuantKVCache))
        assert leaf.offset == 61 + kept
    cache = copy.deepcopy(prefix)
    *_, records = forward_with_hidden_states_and_rollback(model, block, cache)
    records.undo()
    assert same(model(probe, cache=cache), model(probe, cache=copy.deepcopy(prefix)))
    if family == "llama": assert trim_prompt_cache(cache, 21) == 21 and cache[0].offset == 40

def test_after_a_sparse_prefill(tmp_path):
    model, kept = tiny_model("llama"), list(range(0, 60, 2)) + [59]
    cache = make_prompt_cache(model)
    with pytest.raises(ValueError, match="quantise after the prefill"): sparse_prefill(model, PROMPT, kept, make_turboquant_cache(model, 4), carry="cache")
    sparse_prefill(model, PROMPT, kept, cache, carry="cache")
    want = model(mx.array([[7]]), cache=copy.deepcopy(cache))[0, -1]
    quantize_cache(model, cache, 4)
    assert all(isinstance(c, SparseKVCache) and isinstance(c.inner, TurboQuantKVCache) and (c.offset, c.inner.offset) == (60, 31) for c in cache)
    assert cache[0].positions().tolist() == kept
    save_prompt_cache(str(tmp_path / "s.safetensors"), cache)
    loaded, block = load_prompt_cache(str(tmp_path / "s.safetensors")), mx.array([[7, 8, 9]])
    assert (mx.linalg.norm(model(mx.array([[7]]), cache=copy.deepcopy(cache))[0, -1] - want) / mx.linalg.norm(want)).item() < 0.2
    *_, records = forward_with_hidden_states_and_rollback(model, block, cache)
    rollback(cache, records, 1)
    model(block[:, :1], cache=loaded)
    assert cache[0].offset == loaded[0].offset == 61 and gap(model(mx.array([[1]]), cache=cache), model(mx.array([[1]]), cache=loaded)) < 5e-3


# --- measuring

def test_centers_take_off_what_keys_share():
    model = tiny_model("qwen3_5")
    for l in attention_layout(model): l.attn.k_norm.weight = l.attn.k_norm.weight + 0
    c = key_centers(model, PROMPT, step=7)
    plain = make_prompt_cache(model); model(mx.array([PROMPT]), cache=plain)
    for i, center in c.items(): assert gap(center, plain[i].keys[0, :, :60].mean(1)) < 1e-4
    cache = make_turboquant_cache(model, 4, centers=c)
    assert same(cache[2].center[0, :, 0], c[2])

def test_nano_hybrid_loses_little_and_less_with_more_bits():
    "B88: measured on a trained model."
    model, tok = load("nano-hybrid")
    tokens = tok.encode(list(python_corpus("heldout").values())[1][:4000])[:400]
    chosen = {n: w for n, w in ways((2, 3, 4)).items() if n != "uniform 8"}
    with patch_attention(model):
        nats = {r["way"]: r["nats"] for r in bench_perplexity(model, tokens, chosen, window=400, warm=240, windows=1)}
        size = {n: bytes_per_token(model, w, 256) for n, w in chosen.items()}
    assert nats["turboquant 2"] - nats["full"] < 0.2 and abs(nats["turboquant 4"] - nats["full"]) < 0.03
    assert size["turboquant 2"] < size["turboquant 3"] < size["turboquant 4"] < size["uniform 4"] < size["full"] / 5
    assert not is_patched(attention_layout(model)[0].attn)

def test_steps_and_facts_are_measured():
    model, tok = load("nano-hybrid")
    chosen = {n: w for n, w in ways((4,)).items() if "4" in n}
    rows = bench_steps(model, chosen, contexts=(64,), rows=2, steps=1)
    assert [r["way"] for r in rows] == list(chosen) and all(r["ms"] > 0 and r["mb"] > 0 and r["rows"] == 2 for r in rows)
    facts = bench_facts(model, tok, chosen, lengths=(200,), n_cases=1, max_tokens=2)
    assert [(r["way"], r["cases"]) for r in facts] == [(n, 1) for n in chosen] and all(r["correct"] in (0, 1) for r in facts)
    assert bench_facts(model, tok, chosen, budget_s=-1) == []

def test_budgets_stop_and_partial_rows_are_told():
    "Whatever has been told is a fair comparison: windows and cases that all ways have had."
    model, tok = load("nano-hybrid")
    chosen = {n: w for n, w in ways((4,)).items() if n in ("full", "uniform 4", "turboquant 4")}
    tokens, told = tok.encode(list(python_corpus("heldout").values())[1][:2000])[:200], []
    with patch_attention(model):
        rows = bench_perplexity(model, tokens, chosen, window=64, warm=32, windows=3, progress=told.append)
        assert [len(t) for t in told[:3]] == [1, 2, 3] and len(told) == 9 and [r["tokens"] for r in rows] == [93] * 3
        assert all({r["tokens"] for r in t} == {31} for t in told[:5]) and {r["tokens"] for r in told[5]} == {62}
        assert bench_perplexity(model, tokens, chosen, window=64, warm=32, windows=3, budget_s=-1) == []
        told.clear()
        facts = bench_facts(model, tok, chosen, lengths=(120,), n_cases=2, max_tokens=3, progress=told.append)
        assert [[r["cases"] for r in t] for t in told] == [[1] * 3, [2] * 3] and facts == told[-1]
        told.clear()
        assert bench_steps(model, chosen, contexts=(64, 128), steps=1, progress=lambda r: told.append(len(r))) and told == [3, 6]
        assert bench_steps(model, chosen, contexts=(64,), budget_s=-1) == []

def test_a_guess_changes_no_answer():
    "What one way has said is put to the next as a block: its answer is the one that single steps give."
    model = tiny_model("qwen3_5")
    def filled(bits=None):
        cache = make_turboquant_cache(model, bits) if bits else make_prompt_cache(model)
        model(mx.array([PROMPT]), cache=cache)
        return cache
    for bits in (None, 4):
        alone = _answer(model, filled(bits), 7, 10, {499})
        for n in (0, 1, 2, 5, len(alone)): assert _answer(model, filled(bits), 7, 10, {499}, [*alone[:n], *(3 for _ in alone[n:])]) == alone
        assert _answer(model, filled(bits), 7, 10, {alone[3]}, alone[:4]) == _answer(model, filled(bits), 7, 10, {alone[3]})

def test_the_command_writes_as_it_goes(tmp_path, capsys):
    out = tmp_path / "found.json"
    write_results(out, "other", {"bytes": {}}, device="x")
    assert main(["nano-hybrid", "--windows", "1", "--window", "70", "--warm", "64", "--facts", "1", "--lengths", "120", "--centers", "100", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert set(found["models"]) == {"other", "nano-hybrid"} and set(found["models"]["nano-hybrid"]) == {"bytes", "perplexity", "facts"} and found["dtype"] == "float32"
    assert len({r["way"] for r in found["models"]["nano-hybrid"]["facts"]}) == len(found["models"]["nano-hybrid"]["bytes"]) == 17 and not list(tmp_path.glob("*.part"))
    assert main(["no-such-model-anywhere", "--out", str(out)]) == 2 and "no-such-model-anywhere" in capsys.readouterr().err
