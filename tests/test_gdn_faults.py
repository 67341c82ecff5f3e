"The gated delta rule at its edges: tokens that are not numbers, decays that vanish and their gradients, steps that lie on the device, compilation."
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mlx_lm.models.cache import make_prompt_cache

import vllm_mlx.gdn as G
from test_gdn import FORMS, TEXTS, _On, apart, in_float64, needs_compiler
from vllm_mlx.models import tiny_model
from vllm_mlx.rollback import Recording, _advance_gated_delta_states_python, advance_gated_delta_states, rollback

NAMES = ["q", "k", "v", "g", "beta"]
BAD = [float("nan"), float("inf"), -float("inf")]

def spoil(x, token, row=0, names=NAMES, value=BAD[0]):
    "The same inputs with one token of one row replaced in some of them."
    at = (mx.arange(x[1].shape[1]) == token)[None] & (mx.arange(x[1].shape[0]) == row)[:, None]
    return [mx.where(at.reshape(*at.shape, *[1] * (a.ndim - 2)), value, a) if n in names else a for n, a in zip(NAMES, x[:5])] + [x[5]]

def gradients(f, x, weight): return mx.grad(lambda *x: (f(*x)[0] * weight).sum() + (f(*x)[1] ** 2).sum(), argnums=range(6))(*x)

# ---- decays that vanish

@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("gate", [1e-6, 1e-8, 1e-10, 1e-14, 1e-20, 1e-30, 1e-38, 0.0, "mixed"])
def test_gradients_at_any_decay(gate, channels):
    "What a decay of 1e-12 would change if it were larger is not lost with its own value."
    x, r = G.random_inputs(2, 45, 1, 2, 16, 8, channels, (.5, 1)), np.random.default_rng(0)
    x[3] = mx.full(x[3].shape, gate) if gate != "mixed" else mx.array(np.where(r.random(x[3].shape) < .3, 10.0 ** r.uniform(-30, -6, x[3].shape), r.uniform(.5, 1, x[3].shape)).astype(np.float32))
    mask, weight = mx.arange(45)[None] >= mx.array([0, 11])[:, None], mx.random.normal(x[2].shape, key=mx.random.key(5))
    for name, a, b in zip([*NAMES, "state"], gradients(lambda *x: G.gdn_chunked(*x, mask), x, weight), gradients(lambda *x: G.gdn_reference(*x, mask), x, weight)):
        assert apart(a, b) < 1e-5, name
    for a, b in zip(mx.grad(lambda *x: (G.replay_chunked(*x, 20) ** 2).sum(), argnums=range(5))(*x[1:]), mx.grad(lambda *x: (G.replay_reference(*x, 20) ** 2).sum(), argnums=range(5))(*x[1:])): assert apart(a, b) < 1e-5

def test_a_decay_of_zero_learns():
    "By finite differences: a model whose gate is shut can open it."
    x = G.random_inputs(1, 8, 1, 1, 8, 4)
    def loss(g): return (G.gdn_chunked(*x[:3], mx.where(mx.arange(8)[None, :, None] == 3, g, x[3]), *x[4:])[0] ** 2).sum()
    slope = mx.grad(loss)(mx.array(0.0)).item()
    step = 1e-3
    assert abs(slope) > 1e-3 and abs(slope - (loss(mx.array(step)) - loss(mx.array(-step))).item() / (2 * step)) < 1e-2 * abs(slope)

# ---- tokens that are not numbers

@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("names", [NAMES, *[[n] for n in NAMES]], ids=lambda n: "".join(n))
@pytest.mark.parametrize("form", FORMS)
def test_a_masked_token_touches_nothing(form, names, channels):
    "Neither answers nor memory nor any gradient: all are those of a masked token that holds ordinary numbers."
    f, x = FORMS[form][0], G.random_inputs(2, 21, 1, 2, 16, 8, channels, (.1, 1))
    mask, weight = (mx.arange(21)[None] != 7) | (mx.arange(2) == 1)[:, None], mx.random.normal((2, 21, 2, 8), key=mx.random.key(5))
    for value in BAD:
        bad = spoil(x, 7, names=names, value=value)
        for a, b in zip(f(*bad, mask), f(*x, mask)): assert mx.array_equal(a, b).item()
        for a, b in zip(gradients(lambda *x: f(*x, mask), bad, weight), gradients(lambda *x: f(*x, mask), x, weight)): assert mx.array_equal(a, b).item()

@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("names", [NAMES, *[[n] for n in NAMES]], ids=lambda n: "".join(n))
@pytest.mark.parametrize("token", [0, 1, 13, 31, 32, 44])
def test_no_token_reaches_back(token, names, channels):
    "What comes before it, and other rows and heads, are as they would be; what comes after it is spoilt where it is in the specification."
    x = G.random_inputs(2, 45, 2, 4, 16, 8, channels, (.1, 1))
    for value, chunk in zip(BAD, (32, 64, 4)):
        bad = spoil(x, token, names=names, value=value)
        (y, S), (right, right_S), (spec, spec_S) = G.gdn_chunked(*bad, chunk=chunk), G.gdn_chunked(*x, chunk=chunk), G.gdn_reference(*bad)
        assert mx.array_equal(y[:, :token], right[:, :token]).item() and mx.array_equal(y[1], right[1]).item() and mx.array_equal(S[1], right_S[1]).item()
        for a, b in ((y, spec), (S, spec_S)): assert (mx.isfinite(b) | ~mx.isfinite(a)).all().item()
        if names == ["q"]: assert mx.array_equal(S, right_S).item() and mx.array_equal(y[:, token + 1:], right[:, token + 1:]).item()
        else: assert mx.isnan(S[0]).all().item() and mx.isnan(y[0, token + 1:]).all().item()

def test_one_head_does_not_spoil_another():
    x = G.random_inputs(1, 40, 2, 4, 16, 8)
    right, right_S = G.gdn_chunked(*x)
    for n, i in (("k", 1), ("v", 2), ("g", 3), ("beta", 4)):
        bad = list(x)
        bad[i] = mx.where((mx.arange(40) == 20).reshape(1, 40, *[1] * (x[i].ndim - 2)) & (mx.arange(x[i].shape[2]) == 0).reshape(-1, *[1] * (x[i].ndim - 3)), float("nan"), x[i])
        y, S = G.gdn_chunked(*bad)
        own = 2 if n == "k" else 1                                              # value heads 0 and 1 share key head 0
        assert mx.array_equal(y[:, :, own:], right[:, :, own:]).item() and mx.array_equal(S[:, own:], right_S[:, own:]).item() and mx.isnan(S[:, :own]).all().item()

@settings(max_examples=20, deadline=None)
@given(T=st.integers(1, 70), at=st.integers(0, 69), steps=st.integers(0, 70), seed=st.integers(0, 99))
def test_a_replay_does_not_see_what_it_leaves_out(T, at, steps, seed):
    at, steps = min(at, T - 1), min(steps, T)
    x = G.random_inputs(2, T, 1, 2, 8, 4, seed=seed)
    bad = spoil(x, at, row=1)
    for _, replay in FORMS.values():
        for n in (steps, mx.array([T, steps])):
            S, right = replay(*bad[1:], n), replay(*x[1:], n)
            assert mx.array_equal(S[0], right[0]).item()
            if at >= steps: assert mx.array_equal(S[1], right[1]).item()
            else: assert not mx.isfinite(S[1]).all().item()

@needs_compiler
@pytest.mark.parametrize("backend", TEXTS)
def test_kernel_texts_and_tokens_that_are_not_numbers(backend, monkeypatch):
    on, x = _On(backend, monkeypatch), G.random_inputs(2, 21, 1, 2, 32, 8)
    mask = (mx.arange(21)[None] != 7) | (mx.arange(2) == 1)[:, None]
    bad, (y64, S64) = spoil(x, 7), in_float64(*x, mask)
    y, S = on.step(*bad, mask)
    assert apart(y, y64) < 1e-5 and apart(S, S64) < 1e-5
    y, S = on.step(*bad)
    right, right_S = on.step(*x)
    assert mx.array_equal(y[:, :7], right[:, :7]).item() and mx.array_equal(y[1], right[1]).item() and mx.isnan(y[0, 8:]).all().item()
    assert mx.array_equal(on.replay(*bad[1:], 7), on.replay(*x[1:], 7)).item()
    weight = mx.random.normal(x[2].shape, key=mx.random.key(5))
    for a, b in zip(gradients(lambda *x: on.step(*x, mask), bad, weight), gradients(lambda *x: G.gdn_reference(*x, mask), x, weight)): assert apart(a, b) < 1e-4

# ---- dtypes

@pytest.mark.parametrize("dtype", [mx.int32, mx.uint8, mx.int64])
def test_masks_of_integers(dtype, monkeypatch):
    x, mask = G.random_inputs(2, 9, 1, 2, 32, 8), mx.array(np.random.default_rng(0).random((2, 9)) < .6)
    for f, _ in FORMS.values():
        for a, b in zip(f(*x, mask.astype(dtype) * 3), f(*x, mask)): assert mx.array_equal(a, b).item()
    seen = []
    monkeypatch.setattr(G, "gdn_backend", lambda: "cuda")
    monkeypatch.setattr(G, "_kernels", {("cuda", "step"): lambda inputs, **more: seen.append([a.dtype for a in inputs]) or [mx.zeros(s, d) for s, d in zip(more["output_shapes"], more["output_dtypes"])]})
    G.gdn_cuda(*x, mask.astype(dtype))
    assert seen == [[mx.float32] * 6 + [mx.bool_]]                                # a compiled kernel does not know what type a mask has

@pytest.mark.parametrize("name", [*NAMES, "state", "mask"])
def test_dtypes_that_are_refused(name):
    x = dict(zip([*NAMES, "state"], G.random_inputs(1, 6, 1, 1, 32, 8))) | dict(mask=mx.ones((1, 6), mx.bool_))
    for dtype in ([mx.float32, mx.complex64] if name == "mask" else [mx.int32, mx.bool_, mx.complex64]):
        for f in [*(f for f, _ in FORMS.values()), G.gdn]:
            with pytest.raises(ValueError, match=f"{name} has dtype .*{str(dtype)[9:]}"): f(**x | {name: x[name].astype(dtype)})

@pytest.mark.parametrize("dtypes", [(mx.bfloat16, mx.float32), (mx.float32, mx.bfloat16), (mx.float16, mx.float16), (mx.bfloat16, mx.float16)])
def test_mixed_dtypes(dtypes):
    "Inputs in one, gates and state in another: answers in that of the queries, the memory in float32."
    x = G.random_inputs(2, 21, 1, 2, 16, 8, dtype=dtypes[0])
    x[3:] = [a.astype(dtypes[1]) for a in x[3:]]
    y64, S64 = in_float64(*x)
    for f in [*(f for f, _ in FORMS.values()), G.gdn]:
        y, S = f(*x)
        assert y.dtype == dtypes[0] and S.dtype == mx.float32 and apart(y, y64) < (1e-5 if dtypes[0] == mx.float32 else 2e-2) and apart(S, S64) < 1e-5

# ---- steps on the device

def every_replay(monkeypatch=None):
    yield from (replay for _, replay in FORMS.values())
    yield G.gdn_replay
    yield lambda k, v, g, beta, S, steps: advance_gated_delta_states(S, k, v, g, beta, steps=steps)

@pytest.mark.parametrize("dtype", [mx.int32, mx.int64, mx.uint32, mx.int8, mx.uint8])
def test_steps_of_an_array_are_the_nearest_possible(dtype):
    x = G.random_inputs(2, 6, 1, 2, 16, 8)
    far = mx.array([120, -5 if "uint" not in str(dtype) else 0], dtype=dtype)
    for replay in every_replay(): assert mx.array_equal(replay(*x[1:], far), replay(*x[1:], [6, 0])).item()

@needs_compiler
@pytest.mark.parametrize("backend", TEXTS)
def test_steps_of_an_array_in_the_kernels(backend, monkeypatch):
    on, x = _On(backend, monkeypatch), G.random_inputs(2, 6, 1, 2, 32, 8)
    assert apart(on.replay(*x[1:], mx.array([99, -2])), G.replay_reference(*x[1:], [6, 0])) < 1e-5
    for bad, message in BAD_STEPS:
        with pytest.raises(ValueError, match=message): on.replay(*x[1:], bad)

BAD_STEPS = [(-1, "0 to 6"), (7, "0 to 6"), ([0, 7], "0 to 6"), (np.array([3, -1]), "0 to 6"), (2.0, "one int"), ([1], "one int"), (True, "one int"), ([1, 2, 3], "one int"), (None, "one int"), ("3", "one int"),
             (mx.array([1.0, 2.0]), "dtype"), (mx.array([True, False]), "dtype"), (mx.array([1]), "one number"), (mx.array([[1, 2]]), "one number"), (mx.array([1, 2, 3]), "one number")]

@pytest.mark.parametrize("steps, message", BAD_STEPS, ids=str)
def test_steps_that_are_refused(steps, message):
    x = G.random_inputs(2, 6, 1, 2, 16, 8)
    for replay in list(every_replay())[:3] + [None]:
        with pytest.raises(ValueError, match=message):
            if replay is not None: replay(*x[1:], steps)
            elif steps is None: raise ValueError("one int")                       # there None means all
            else: advance_gated_delta_states(x[5], *x[1:5], steps=steps)

# ---- compiled

def test_compiled_for_each_shape():
    compiled = mx.compile(G.gdn)
    for T in (2, 3, 2):
        x = G.random_inputs(1, T, 2, 4, 16, 8)
        for a, b in zip(compiled(*x), G.gdn_reference(*x)): assert apart(a, b) < 1e-5

@pytest.mark.parametrize("form", [*FORMS, "gdn"])
@pytest.mark.parametrize("first", [1, 7, 64])
def test_without_shapes_it_is_refused_and_never_wrong(form, first):
    f = FORMS[form][0] if form in FORMS else G.gdn
    compiled, refused = mx.compile(lambda *x: f(*x), shapeless=True), 0
    for T in (first, 1, 8, 64, 70):
        x = G.random_inputs(1, T, 2, 4, 16, 8)
        try: y, S = compiled(*x); mx.eval(y, S)
        except ValueError as e: refused += 1; assert "infer" in str(e); continue
        assert apart(y, G.gdn_reference(*x)[0]) < 1e-5
    assert refused >= 3

# ---- through a rollback

def test_padding_that_is_not_a_number_is_not_replayed():
    "Records of a padded row: what the padding holds does not get into the state."
    model, tokens = tiny_model("qwen3_5"), mx.array(np.random.default_rng(0).integers(0, 500, (2, 6)))
    def cut(spoilt):
        cache = make_prompt_cache(model)
        for c in cache:
            if hasattr(c, "left_padding"): c.left_padding = mx.array([0, 2])
        with Recording(model, cache, tokens.shape) as rec: rec.model(tokens, cache=cache)
        for r in rec.records.values():
            if spoilt:
                for n in "k v g beta".split():
                    a = r.inner[n]
                    r.inner[n] = mx.where(r.inner["mask"].reshape(2, 6, *[1] * (a.ndim - 2)), a, float("nan"))
        rollback(cache, rec.records, 4)
        return [c[1] for c in cache if hasattr(c, "left_padding")]
    assert cut(False)
    for a, b in zip(cut(True), cut(False)): assert mx.array_equal(a, b).item()
