"The cost model: coefficients come back, predictions rise, cache sizes are exact in every family and step, bad input is named."
import json, math
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from vllm_mlx.cost import CostModel, _stored, cache_bytes, fit_terms, kept_tokens, measure_cost, plot_ttft
from vllm_mlx.importance import PrefillCancelled
from vllm_mlx.layers import attention_layout
from vllm_mlx.models import TINY_FAMILIES, tiny_model
from vllm_mlx.sparse_prefill import sparse_prefill
from vllm_mlx.specprefill import SpecPrefill

def some(low, high): return st.one_of(st.just(0.0), st.floats(low, high))
cubes = st.tuples(some(1e-2, 5), some(1e-5, 1e-2), some(1e-9, 1e-5))
models = st.builds(CostModel, cubes, cubes, st.tuples(some(1e-2, 1), some(1e-7, 1e-4)), window=st.sampled_from([0, 16, 1024]))
keeps, sizes = st.floats(0.01, 0.99), st.integers(1, 200_000)
AT = np.array([256, 700, 1500, 4096])

@settings(max_examples=200, deadline=None)
@given(cubes)
def test_coefficients_come_back(true):
    y = np.polyval(true[::-1], AT)
    got = fit_terms(list(zip(AT, y)))
    assert min(got) >= 0
    np.testing.assert_allclose(np.polyval(got[::-1], AT), y, rtol=1e-7)
    share = np.array(true) * 4096.0 ** np.arange(3)                    # a term must be seen to be found
    for t, g, s in zip(true, got, share):
        if t == 0: assert g * 4096 ** true.index(t) <= 1e-4 * max(y.max(), 1e-9) or share.sum() == 0
        elif s > 1e-3 * y.max(): assert math.isclose(t, g, rel_tol=1e-4)

@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(1e-3, 100)), min_size=2, max_size=8, unique_by=lambda p: p[0]), st.sampled_from([2, 3]))
def test_no_non_negative_fit_is_better(points, terms):
    x, y = np.array(points, float).T
    loss = lambda c: (((np.polyval(np.array(c)[::-1], x) - y) / np.maximum(y, 1e-3 * y.max())) ** 2).sum()
    got = fit_terms(points, terms)
    assert len(got) == terms and min(got) >= 0
    rng = np.random.default_rng(0)
    for _ in range(50):
        other = np.maximum(0, np.array(got) * rng.uniform(0.5, 1.5, terms) + rng.uniform(-1, 1, terms) * y.max() / x.max() ** np.arange(terms) * 10.0 ** rng.uniform(-6, 0))
        assert loss(got) <= loss(other) * (1 + 1e-9) + 1e-9

@settings(max_examples=200, deadline=None)
@given(models, keeps, keeps, sizes, sizes)
def test_predictions_rise_with_keep_rate_and_length(cost, k1, k2, m1, m2):
    (k1, k2), (m1, m2) = sorted((k1, k2)), sorted((m1, m2))
    near = 1 + 1e-12
    assert 0 <= cost.predict(m2, k1) <= cost.predict(m2, k2) * near
    assert cost.predict(m1, k1) <= cost.predict(m2, k1) * near
    assert cost.predict_dense(m1) <= cost.predict_dense(m2) * near
    assert cost.predict(m2, k2, positions="contiguous") == cost.predict(m2, k2)

@settings(max_examples=100, deadline=None)
@given(models, keeps)
def test_break_even_is_the_first_gain(cost, keep):
    M, limit = cost.break_even(keep, limit=5000), np.arange(1, 5001)
    faster = cost.predict(limit, keep) < cost.predict_dense(limit)
    assert (M is None and not faster.any()) or (faster[M - 1] and not faster[:M - 1].any())

@settings(max_examples=50, deadline=None)
@given(models)
def test_json_round_trip(cost): assert CostModel.from_json(cost.to_json()) == cost

def test_arrays_and_numbers_agree():
    cost = CostModel((0.1, 1e-3, 1e-8), (0.2, 3e-3, 1e-6), (0.1, 1e-5), window=512)
    for f in (cost.predict, cost.predict_dense, cost.speedup):
        many = f(AT)
        assert many.shape == AT.shape and all(isinstance(f(int(m)), float) and math.isclose(f(int(m)), v) for m, v in zip(AT, many))
    assert math.isclose(sum(cost.phases(900, 0.3).values()), cost.predict(900, 0.3))
    assert cost.phases(900, 1)['score'] == 0 and cost.predict(900, 2) == cost.predict_dense(900)

@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1400), st.integers(1, 700), st.sampled_from([None, 2, 16, 100, 256, 300, 1000]))
def test_room_of_a_slot(N, step, window):
    cache = KVCache() if window is None else RotatingKVCache(max_size=window)
    for a in range(0, N, step):
        x = mx.zeros((1, 1, min(step, N - a), 1))
        cache.update_and_fetch(x, x)
    assert _stored(N, step, window) == (0 if cache.keys is None else cache.keys.shape[2])

@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('family', TINY_FAMILIES)
def test_cache_bytes_equals_nbytes(family, dtype):
    if family == 'gpt_oss' and dtype == 'bfloat16': pytest.skip("MLX runs experts in float32 only on a CPU")
    model = tiny_model(family, dtype=getattr(mx, dtype))
    for N, step in ((1, 128), (16, 16), (17, 16), (270, 100), (300, 299)):
        cache = make_prompt_cache(model)
        for a in range(0, N, step):
            model(mx.arange(a, min(a + step, N))[None] % 500, cache=cache)
            mx.eval([c.state for c in cache])
        assert cache_bytes(model, N, step_size=step) == sum(cache[l.slot].nbytes for l in attention_layout(model)), (N, step)

def test_cache_bytes_of_a_sparse_prefill_and_of_quantised_weights():
    import mlx.nn as nn
    model, kept = tiny_model("llama", hidden_size=64, dtype=mx.bfloat16), np.arange(0, 600, 2)
    nn.quantize(model, group_size=32, bits=4)
    cache = make_prompt_cache(model)
    sparse_prefill(model, mx.arange(600) % 500, kept, cache, 128, carry="cache")
    assert sum(c.nbytes for c in cache) == cache_bytes(model, 300, step_size=128)

def test_measured_costs_are_finite_for_a_draft_a_window_and_the_look_ahead():
    target, draft = tiny_model("gemma3"), tiny_model("llama")
    for sp in (SpecPrefill(target, draft, threshold=0), SpecPrefill(draft, threshold=0, scorer="lookahead", n_lookahead=2)):
        cost = measure_cost(sp, (32, 64, 96))
        assert cost.window == (16 if sp.model is target else 0)
        s = cost.predict(np.array([32, 500, 4000]), 0.3)
        assert np.isfinite(s).all() and (s > 0).all() and (np.diff(s) >= 0).all()
        assert CostModel.from_json(cost.to_json()) == cost

def test_measuring_can_be_cancelled_and_leaves_the_model_alone():
    model, x = tiny_model("llama"), mx.arange(20)[None]
    before, calls = np.array(model(x)), []
    def later(): calls.append(1); return len(calls) > 7
    with pytest.raises(PrefillCancelled): measure_cost(SpecPrefill(model, threshold=0), (64, 128), cancel_check=later)
    assert len(calls) == 8 and np.array_equal(before, np.array(model(x)))

@pytest.mark.parametrize('lengths', [(), (64,), (64, 64), (15, 64), (64, 10**6), (64, 65.5), (64, '128')])
def test_bad_lengths_are_named(lengths):
    sp = SpecPrefill(tiny_model("llama"), threshold=0)
    with pytest.raises(ValueError, match="lengths is"): measure_cost(sp, lengths)

def test_other_errors_are_named():
    good = dict(score=(0, 1, 0), prefill=(0, 1, 0), first=(0, 0))
    for name, value in (('score', (0, 1)), ('prefill', (0, -1, 0)), ('first', (0, math.inf)), ('first', (0, math.nan)), ('score', (0, '1', 0))):
        with pytest.raises(ValueError, match=f"{name} is"): CostModel(**{**good, name: value})
    with pytest.raises(ValueError, match="two lengths or more"): CostModel.fit([(1, 1)], [(1, 1), (2, 2)], [(1, 1), (2, 2)])
    with pytest.raises(ValueError, match="not a cost model"): CostModel.from_json(json.dumps(good))
    with pytest.raises(TypeError, match="SpecPrefill is needed"): measure_cost(None)
    with pytest.raises(ValueError, match="M is"): kept_tokens([5, 0], 0.2)
    with pytest.raises(ValueError, match="step_size is 0"): cache_bytes(tiny_model("llama"), 5, step_size=0)
    for keep in ([], [0.0], [0.5, 1.0]):
        with pytest.raises(ValueError, match="rates above 0"): plot_ttft(CostModel(**good), 100, keep)
