"The gated delta rule: every form against double precision, the kernels' texts run on the CPU, and the switch for mlx-lm's models."
import copy
import threading

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models import gated_delta, qwen3_5

import vllm_mlx.gdn as G
from kernel_shim import COMPILER, ShimKernel
from vllm_mlx.models import tiny_model

FORMS = dict(reference=(G.gdn_reference, G.replay_reference), chunked=(G.gdn_chunked, G.replay_chunked))

def f64(x): return np.array(x.astype(mx.float32)).astype(np.float64)

def in_float64(q, k, v, g, beta, S, mask=None):
    "The specification in double precision, written with numpy."
    q, k, v, g, beta, S = (f64(x) for x in (q, k, v, g, beta, S))
    B, T, shared = *k.shape[:2], v.shape[2] // k.shape[2]
    q, k, ys = np.repeat(q, shared, 2), np.repeat(k, shared, 2), np.zeros(v.shape)
    g = g[..., None, :] if g.ndim == 4 else g[..., None, None]
    for t in range(T):
        faded = g[:, t] * S
        w = beta[:, t, :, None] * (v[:, t] - np.einsum("bhvk,bhk->bhv", faded, k[:, t]))
        new = faded + w[..., None] * k[:, t, :, None]
        here = np.ones(B, bool) if mask is None else np.array(mask[:, t])
        S = np.where(here[:, None, None, None], new, S)
        ys[:, t] = np.where(here[:, None, None], np.einsum("bhvk,bhk->bhv", new, q[:, t]), 0)
    return ys, S

def apart(a, b):
    "Largest difference, relative to the largest number of the specification."
    a, b = f64(a), b if isinstance(b, np.ndarray) else f64(b)
    assert a.shape == b.shape
    assert np.isfinite(a).all()
    return np.abs(a - b).max() / max(np.abs(b).max(), 1e-30) if a.size else 0.0

# ---- numerics

DECAYS = {"1e-6 to 1": (1e-6, 1), "all 1": (1, 1), "all 1e-6": (1e-6, 1e-6), "near 1": (0.999, 1), "usual": (0.9, 1)}

@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
def test_long_in_float32(form, decay, channels):
    x = G.random_inputs(1, 4096 if form == "chunked" and not channels else 700, 1, 2, 32, 16, channels, DECAYS[decay], seed=3)
    (y, S), (y64, S64) = FORMS[form][0](*x), in_float64(*x)
    assert y.dtype == S.dtype == mx.float32
    assert apart(y, y64) < 1e-5 and apart(S, S64) < 1e-5

@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 16, 32, 64, 128])
def test_rare_forgetting(chunk, channels):
    "A chunk whose decay underflows many times over, between tokens that do not fade at all: what differences of logarithms get wrong."
    x = G.random_inputs(2, 200, 1, 2, 32, 16, channels, seed=4)
    r = np.random.default_rng(0)
    x[3] = mx.array(np.where(r.random(x[3].shape) < 0.3, 1e-6, 1 - 1e-4 * r.random(x[3].shape)).astype(np.float32))
    (y, S), (y64, S64) = G.gdn_chunked(*x, chunk=chunk), in_float64(*x)
    assert apart(y, y64) < 1e-5 and apart(S, S64) < 1e-5

@pytest.mark.parametrize("gate", [0.0, 1e-38, 1e-30, 1.0])
def test_extreme_gates(gate):
    x = G.random_inputs(1, 70, 2, 2, 32, 8)
    x[3] = mx.full(x[3].shape, gate)
    for f, _ in FORMS.values():
        y, S = f(*x)
        y64, S64 = in_float64(*x)
        assert apart(y, y64) < 1e-5 and apart(S, S64) < 1e-5
    grads = mx.grad(lambda *x: G.gdn_chunked(*x)[0].sum(), argnums=range(6))(*x)
    assert all(mx.isfinite(d).all().item() for d in grads)

def test_equal_keys_at_full_strength():
    "The worst matrix to invert: every key of a chunk the same, nothing fades, beta 1 (and 2, which Kimi K3 and OLMo allow)."
    x = G.random_inputs(1, 256, 1, 1, 32, 16, decay=(1, 1))
    x[1] = mx.broadcast_to(x[1][:, :1], x[1].shape)
    for beta in (1.0, 2.0):
        x[4] = mx.full(x[4].shape, beta)
        (y, S), (y64, S64) = G.gdn_chunked(*x), in_float64(*x)
        assert apart(y, y64) < 1e-5 and apart(S, S64) < 1e-5

@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("form", FORMS)
def test_half_precision_inputs(form, dtype):
    x = G.random_inputs(2, 130, 2, 4, 64, 32, decay=(1e-6, 1), dtype=dtype)
    x[5] = x[5].astype(dtype)
    (y, S), (y64, S64) = FORMS[form][0](*x), in_float64(*x)
    assert y.dtype == dtype and S.dtype == mx.float32
    assert apart(y, y64) < 2e-2 and apart(S, S64) < 1e-5

def test_a_state_that_only_fades():
    x = G.random_inputs(1, 4, 1, 1, 32, 4, decay=(1e-6, 1e-6))
    x[4] = mx.zeros(x[4].shape)
    _, S64 = in_float64(*x)
    assert apart(G.gdn_chunked(*x)[1], S64) < 1e-5 and np.abs(S64).max() < 1e-23

# ---- shapes, masks, pieces

SHAPES = [(1, 1, 1, 1, 1, 1), (1, 0, 2, 2, 8, 4), (2, 3, 1, 3, 7, 5), (1, 65, 2, 4, 48, 20), (3, 64, 2, 2, 32, 32), (2, 31, 3, 3, 16, 40), (0, 5, 1, 1, 8, 8)]

@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, masked, channels):
    x = G.random_inputs(*shape, channels, decay=(0.01, 1))
    mask = mx.array(np.random.default_rng(1).random(shape[:2]) < 0.6) if masked else None
    y64, S64 = in_float64(*x, mask)
    for f, _ in FORMS.values():
        y, S = f(*x, mask)
        assert apart(y, y64) < 1e-5 and apart(S, S64) < 1e-5
        y, S = f(*x[:5], mask=mask)                                            # no state is a state of zeros
        y0, S0 = in_float64(*x[:5], mx.zeros(x[5].shape), mask)
        assert apart(y, y0) < 1e-5 and apart(S, S0) < 1e-5

@settings(max_examples=25)
@given(T=st.integers(1, 90), cut=st.integers(0, 90), chunk=st.sampled_from([1, 4, 32, 64]), channels=st.booleans(), seed=st.integers(0, 99))
def test_pieces_make_the_whole(T, cut, chunk, channels, seed):
    "Two calls with the state in between are one call; a replay of the first tokens gives that state."
    cut = min(cut, T)
    x = G.random_inputs(1, T, 1, 2, 8, 4, channels, (1e-3, 1), seed=seed)
    y, S = G.gdn_chunked(*x, chunk=chunk)
    y1, S1 = G.gdn_chunked(*(a[:, :cut] for a in x[:5]), x[5], chunk=chunk)
    y2, S2 = G.gdn_chunked(*(a[:, cut:] for a in x[:5]), S1, chunk=chunk)
    assert apart(mx.concatenate([y1, y2], 1), y) < 1e-5 and apart(S2, S) < 1e-5
    assert apart(G.replay_chunked(*x[1:], cut, chunk), S1) < 1e-5
    assert apart(G.replay_reference(*x[1:], mx.array([cut])), S1) < 1e-5

@settings(max_examples=25)
@given(keep=st.lists(st.booleans(), min_size=1, max_size=40), seed=st.integers(0, 99))
def test_masked_tokens_might_as_well_not_be_there(keep, seed):
    x = G.random_inputs(1, len(keep), 1, 2, 8, 4, decay=(1e-3, 1), seed=seed)
    y, S = G.gdn_chunked(*x, mx.array([keep]))
    at = mx.array(np.flatnonzero(keep).astype(np.int32))
    y_kept, S_kept = G.gdn_chunked(*(a[:, at] for a in x[:5]), x[5])
    assert apart(y[:, at], y_kept) < 1e-5 and apart(S, S_kept) < 1e-5
    assert not any(keep) or mx.abs(y).sum().item() > 0
    assert mx.abs(mx.where(mx.array([keep])[..., None, None], 0, y)).sum().item() == 0

@pytest.mark.parametrize("segment", [16, 64, 100])
def test_segments(segment, monkeypatch):
    x = G.random_inputs(2, 150, 1, 2, 16, 8)
    y, S = G.gdn_chunked(*x)
    monkeypatch.setattr(G, "SEGMENT", segment)
    y2, S2 = G.gdn_chunked(*x, chunk=16)
    assert apart(y2, y) < 1e-5 and apart(S2, S) < 1e-5

@pytest.mark.parametrize("steps", [0, 1, 9, 16, [0, 16], [16, 3], np.array([5, 5]), mx.array([7, 0]), mx.array(4)])
@pytest.mark.parametrize("channels", [False, True])
def test_replay(channels, steps):
    x = G.random_inputs(2, 16, 2, 4, 32, 16, channels, (1e-4, 1))
    counts = np.broadcast_to(np.array(steps), (2,))
    spec = np.stack([in_float64(*(a[b:b + 1, :n] for a in x[:5]), x[5][b:b + 1])[1][0] for b, n in enumerate(counts)])
    for _, replay in FORMS.values():
        S = replay(*x[1:], steps)
        assert S.dtype == mx.float32 and apart(S, spec) < 1e-5
        for b, n in enumerate(counts):
            if n == 0: assert mx.array_equal(S[b], x[5][b]).item()                # not one bit

# ---- gradients

@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("decay", ["1e-6 to 1", "usual", "all 1e-6"])
def test_gradients(decay, channels):
    x = G.random_inputs(2, 45, 1, 2, 16, 8, channels, DECAYS[decay])
    mask = mx.arange(45)[None] >= mx.array([0, 11])[:, None]
    weight = mx.random.normal(x[2].shape, key=mx.random.key(5))
    def gradients(f): return mx.grad(lambda *x: (f(*x, mask)[0] * weight).sum() + (f(*x, mask)[1] ** 2).sum(), argnums=range(6))(*x)
    for name, a, b in zip("q k v g beta state".split(), gradients(G.gdn_chunked), gradients(G.gdn_reference)):
        assert apart(a, b) < 1e-4, name

def test_gradient_of_replay():
    x = G.random_inputs(2, 16, 1, 1, 16, 8)
    def gradients(f): return mx.grad(lambda *x: (f(*x, [3, 16]) ** 2).sum(), argnums=range(5))(*x[1:])
    for a, b in zip(gradients(G.replay_chunked), gradients(G.replay_reference)): assert apart(a, b) < 1e-4

def test_compiled():
    x = G.random_inputs(1, 70, 1, 2, 32, 16)
    y, S = mx.compile(G.gdn_chunked)(*x)
    assert apart(y, G.gdn_chunked(*x)[0]) < 1e-5 and apart(S, G.gdn_chunked(*x)[1]) < 1e-5

# ---- agreement with mlx-lm

@pytest.mark.parametrize("channels", [False, True])
def test_same_as_mlx_lm(channels):
    x = G.random_inputs(2, 50, 2, 4, 32, 16, channels)
    mask = mx.arange(50)[None] < mx.array([50, 30])[:, None]
    y, S = gated_delta.gated_delta_ops(*x, mask)
    for f, _ in FORMS.values():
        ours, state = f(*x, mask)
        assert apart(state, S) < 1e-5 and apart(ours[1, :30], y[1, :30]) < 1e-5 and apart(ours[0], y[0]) < 1e-5

# ---- the kernels' texts, run on the CPU

TEXTS = dict(metal=(G.METAL_STEP, G.METAL_REPLAY), cuda=(G.CUDA_STEP, G.CUDA_REPLAY))

class _On:
    def __init__(self, backend, monkeypatch, backwards=False):
        self.calls = []
        monkeypatch.setattr(G, "gdn_backend", lambda: backend)
        monkeypatch.setattr(G, "_kernels", {(backend, kind): ShimKernel(backend, G._INPUTS[kind], ["y", "state_out"][kind == "replay":], text, backwards, self.calls)
                                            for kind, text in zip(("step", "replay"), TEXTS[backend])})
        self.step, self.replay = (G.gdn_metal, G.replay_metal) if backend == "metal" else (G.gdn_cuda, G.replay_cuda)

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
KERNEL_SHAPES = [(1, 1, 1, 1, 32, 32), (2, 37, 1, 2, 64, 20), (1, 18, 1, 3, 128, 6), (2, 5, 2, 4, 32, 7), (1, 33, 1, 1, 256, 5)]

@needs_compiler
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("shape", KERNEL_SHAPES)
@pytest.mark.parametrize("backend", TEXTS)
def test_kernel_text(backend, shape, channels, monkeypatch):
    on = _On(backend, monkeypatch)
    x = G.random_inputs(*shape, channels, decay=(1e-6, 1))
    for mask in (None, mx.array(np.random.default_rng(1).random(shape[:2]) < 0.6)):
        (y, S), (y64, S64) = on.step(*x, mask), in_float64(*x, mask)
        assert apart(y, y64) < 1e-5 and apart(S, S64) < 1e-5
    B, T = shape[:2]
    for steps in (0, T, np.random.default_rng(2).integers(0, T + 1, B)):
        spec = G.replay_reference(*x[1:], steps)
        assert apart(on.replay(*x[1:], steps), spec) < 1e-5
    assert len(on.calls) == 4                                                   # a replay of nothing starts no kernel

@needs_compiler
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("backend", TEXTS)
def test_kernel_text_in_half_precision(backend, dtype, monkeypatch):
    on = _On(backend, monkeypatch)
    x = G.random_inputs(2, 20, 1, 2, 64, 12, decay=(1e-3, 1), dtype=dtype)
    x[4] = x[4].astype(dtype)                                                   # as sigmoid gives it
    (y, S), (y64, S64) = on.step(*x), in_float64(*x)
    assert y.dtype == dtype and S.dtype == mx.float32 and apart(y, y64) < 2e-2 and apart(S, S64) < 1e-5
    assert apart(on.replay(*x[1:], [20, 4]), G.replay_reference(*x[1:], [20, 4])) < 1e-5

@needs_compiler
@pytest.mark.parametrize("backend", TEXTS)
def test_kernel_text_in_another_order_of_threads(backend, monkeypatch):
    "The last thread of a block goes first: what is read before it was written shows."
    x = G.random_inputs(1, 40, 1, 2, 64, 20, True)
    forwards = _On(backend, monkeypatch).step(*x)
    backwards = _On(backend, monkeypatch, backwards=True).step(*x)
    for a, b in zip(forwards, backwards): assert mx.array_equal(a, b).item()

@needs_compiler
@pytest.mark.parametrize("backend", TEXTS)
def test_gradients_through_a_kernel(backend, monkeypatch):
    "Forward by the kernel, backward by the chunked form."
    on = _On(backend, monkeypatch)
    x, mask = G.random_inputs(1, 9, 1, 2, 32, 8), mx.arange(9)[None] != 4
    monkeypatch.setattr(G, "CHUNK", dict.fromkeys(G.CHUNK, 16))
    def gradients(f): return mx.grad(lambda *x: (f(*x, mask)[0] ** 2).sum() + f(*x, mask)[1].sum(), argnums=range(6))(*x)
    for a, b in zip(gradients(on.step), gradients(G.gdn_reference)): assert apart(a, b) < 1e-4
    def only_y(f): return mx.grad(lambda k: f(x[0], k, *x[2:])[0].sum())(x[1])
    assert apart(only_y(on.step), only_y(G.gdn_reference)) < 1e-4
    def of_replay(f): return mx.grad(lambda *x: (f(*x, [5]) ** 2).sum(), argnums=range(5))(*x[1:])
    for a, b in zip(of_replay(on.replay), of_replay(G.replay_reference)): assert apart(a, b) < 1e-4
    assert len(on.calls) >= 3

@needs_compiler
def test_shim_sees_what_is_wrong(monkeypatch):
    "The shim is no rubber stamp: a missing barrier, a lane that skips an exchange and a text that is no program are found."
    x = G.random_inputs(1, 40, 1, 1, 32, 16)
    on, (y64, _) = _On("cuda", monkeypatch), in_float64(*x)
    kernel = G._kernels["cuda", "step"]
    true = kernel.source
    kernel.source = true.replace("__syncthreads();", "")
    assert apart(mx.nan_to_num(on.step(*x)[0], nan=1e3), y64) > 1e-3
    kernel.source = true.replace("const float w =", "if (tid == 5) __syncthreads(); const float w =")
    with pytest.raises(RuntimeError, match="exchange"): on.step(*x)
    kernel.source = true.replace("float told", "flaot told")
    with pytest.raises(RuntimeError, match="does not compile"): on.step(*x)

@needs_compiler
def test_kernel_from_the_dispatcher(monkeypatch):
    on = _On("cuda", monkeypatch)
    x = G.random_inputs(1, 6, 1, 1, 32, 8)
    assert apart(G.gdn(*x)[0], in_float64(*x)[0]) < 1e-5 and len(on.calls) == 1
    G.gdn_replay(*x[1:], 3)
    assert len(on.calls) == 2
    x = G.random_inputs(1, 6, 1, 1, 48, 8)                                      # a key size no kernel takes
    assert apart(G.gdn(*x)[0], in_float64(*x)[0]) < 1e-5 and len(on.calls) == 2

def test_kernels_know_their_types():
    "On CUDA a compiled kernel is known by name and template values: two calls with other types must differ in them."
    q, k, v, g, beta, _ = G.random_inputs(1, 4, 1, 1, 32, 8)
    seen = set()
    for d in (mx.float32, mx.bfloat16, mx.float16):
        for i in range(5):
            x = [q, k, v, g, beta]
            x[i] = x[i].astype(d)
            seen.add(tuple(str(t) for t in G._template(*x, False)))
    assert len(seen) == 1 + 2 * 5

# ---- the dispatcher

def test_table_and_overrides(monkeypatch):
    x = G.random_inputs(1, 6, 1, 1, 32, 8)
    used = []
    monkeypatch.setattr(G, "_FORMS", {n: tuple(lambda *a, n=n, f=f: used.append(n) or f(*a) for f in fs) for n, fs in G._FORMS.items()})
    monkeypatch.setattr(G, "GDN_TABLE", dict(cpu=[(4, "reference"), (None, "chunked")]))
    G.gdn(*x); G.gdn(*(a[:, :4] for a in x[:5])); G.gdn(*x, how="reference"); G.gdn_replay(*x[1:], 2); G.gdn_replay(*x[1:], 2, how="reference")
    assert used == ["chunked", "reference", "reference", "chunked", "reference"]
    for how in ("", "Chunked", "cpu", 3):
        with pytest.raises(ValueError, match="how is .*there are reference, chunked, metal, cuda"): G.gdn(*x, how=how)
        with pytest.raises(ValueError, match="how is"): G.gdn_replay(*x[1:], 2, how=how)

def test_every_table_ends():
    for backend in ("cpu", "metal", "cuda"):
        for T in (0, 1, 2, 16, 17, 1000, 10**6):
            for Dk in (16, 48, 128, 1024):
                how = G.pick_gdn(T, Dk, backend)
                assert how in (("reference", "chunked") if not G.kernel_fits(Dk) or backend == "cpu" else ("reference", "chunked", backend))

@pytest.mark.parametrize("change, message", [
    (dict(q=(1, 5, 2, 16)), "q has shape"), (dict(k=(1, 5, 2, 16)), "must begin with"), (dict(v=(1, 5, 2, 16)), "must begin with"), (dict(v=(1, 6, 3, 16)), "3 value heads cannot be shared by 2"), (dict(k=(6, 2, 16)), "k has shape"),
    (dict(g=(1, 6)), "g has shape"), (dict(g=(1, 6, 2, 3)), "g has shape"), (dict(beta=(1, 6, 1)), "beta has shape"), (dict(state=(2, 16, 16)), "state has shape"), (dict(mask=(6,)), "mask has shape")])
def test_errors_name_the_shape(change, message):
    x = dict(zip("q k v g beta state".split(), G.random_inputs(1, 6, 2, 2, 16, 16)), mask=mx.ones((1, 6), mx.bool_))
    x |= {n: mx.zeros(s) for n, s in change.items()}
    for f, _ in FORMS.values():
        with pytest.raises(ValueError, match=message): f(**x)

@pytest.mark.parametrize("steps, message", [(-1, "0 to 6"), (7, "0 to 6"), (2.5, "one int"), ([1, 2], "one int"), (mx.array([1, 2]), "one number"), ("all", "one int")])
def test_errors_name_the_steps(steps, message):
    x = G.random_inputs(1, 6, 1, 1, 16, 16)
    for _, replay in FORMS.values():
        with pytest.raises(ValueError, match=message): replay(*x[1:], steps)

# ---- mlx-lm's models

PROMPT = mx.random.randint(0, 500, (2, 40), key=mx.random.key(7))

def kimi():
    from mlx_lm.models.kimi_linear import Model, ModelArgs
    return _random(Model(ModelArgs(model_type="kimi_linear", vocab_size=512, hidden_size=64, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2, intermediate_size=64,
        head_dim=32, rope_theta=10000.0, rms_norm_eps=1e-6, linear_attn_config=dict(kda_layers=[1, 2, 3], full_attn_layers=[4], num_heads=2, head_dim=32, short_conv_kernel_size=4),
        model_max_length=512, num_experts=0, moe_intermediate_size=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, mla_use_nope=True)))

def qwen3_next():
    from mlx_lm.models.qwen3_next import Model, ModelArgs
    return _random(Model(ModelArgs(model_type="qwen3_next", hidden_size=64, num_hidden_layers=4, intermediate_size=64, num_attention_heads=2, linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=32, linear_value_head_dim=32, linear_conv_kernel_dim=4, num_experts=0, num_experts_per_tok=0, decoder_sparse_step=1, shared_expert_intermediate_size=0,
        mlp_only_layers=[0, 1, 2, 3], moe_intermediate_size=0, rms_norm_eps=1e-6, vocab_size=512, num_key_value_heads=1, rope_theta=10000.0, partial_rotary_factor=0.5, max_position_embeddings=512, head_dim=32)))

def olmo_hybrid():
    from mlx_lm.models import olmo_hybrid as M
    known = {f for f in M.ModelArgs.__dataclass_fields__}
    wanted = dict(model_type="olmo_hybrid", hidden_size=64, num_hidden_layers=4, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2, rms_norm_eps=1e-6, vocab_size=512, max_position_embeddings=512,
        layer_types=["linear_attention"] * 3 + ["full_attention"], linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=32, linear_value_head_dim=32, linear_conv_kernel_dim=4, linear_allow_neg_eigval=True, rope_theta=10000.0, tie_word_embeddings=True, attention_bias=False)
    return _random(M.Model(M.ModelArgs(**{n: x for n, x in wanted.items() if n in known})))

def _random(model):
    model.eval()
    mx.eval(model.parameters())
    return model

MODELS = dict(qwen3_5=lambda: tiny_model("qwen3_5"), kimi_linear=kimi, qwen3_next=qwen3_next, olmo_hybrid=olmo_hybrid)

ORIGINAL = gated_delta.gated_delta_ops
def untouched(): return gated_delta.gated_delta_ops is ORIGINAL and G._uses == [0] and G._everywhere == [0] and G._inside.depth == 0

@pytest.mark.parametrize("family", MODELS)
def test_families(family):
    "Prefill, a block, single tokens and a padded batch, all with the cache; what was switched is as before afterwards."
    model = MODELS[family]()
    assert len(G.gdn_layers(model)) >= 3
    classes = [type(m) for m in G.gdn_layers(model)]
    def run():
        cache, out = model.make_cache(), []
        for a, b in ((0, 33), (33, 34), (34, 40)): out.append(model(PROMPT[:, a:b], cache=cache))
        return mx.concatenate(out, 1)
    slow = run()
    with G.fast_gdn(model) as n: fast = run()
    assert n == len(classes) and 0 < apart(fast, slow) < 1e-4
    assert untouched() and [type(m) for m in G.gdn_layers(model)] == classes and mx.array_equal(run(), slow).item()
    assert not any(G._COUNT in vars(m) for m in G.gdn_layers(model))

def test_left_padding():
    model = tiny_model("qwen3_5")
    def run():
        cache = model.make_cache()
        for c in cache:
            if hasattr(c, "left_padding"): c.left_padding = mx.array([0, 9])
        return model(PROMPT, cache=cache)[:, 9:]
    slow = run()
    with G.fast_gdn(model): assert apart(run(), slow) < 1e-4

@pytest.mark.parametrize("family", MODELS)
def test_training(family):
    model = MODELS[family]()
    model.train()
    def loss(m): return nn.losses.cross_entropy(m(PROMPT[:, :-1]), PROMPT[:, 1:], reduction="mean")
    slow, slow_grads = nn.value_and_grad(model, loss)(model)
    with G.fast_gdn(model): fast, fast_grads = nn.value_and_grad(model, loss)(model)
    assert abs(slow.item() - fast.item()) < 1e-4
    for (n, a), (_, b) in zip(tree_flatten(fast_grads), tree_flatten(slow_grads)): assert apart(a, b) < 2e-3, n

def test_order_of_leaving_does_not_matter():
    a, b = tiny_model("qwen3_5"), tiny_model("qwen3_5", seed=1)
    slow_a, slow_b = a(PROMPT), b(PROMPT)
    def is_fast(m, slow): return not mx.array_equal(m(PROMPT), slow).item()
    for first, second in ((a, b), (b, a)):
        one, two, again = G.fast_gdn(a), G.fast_gdn(b), G.fast_gdn(a)
        one.__enter__(); two.__enter__(); again.__enter__()
        one.__exit__(None, None, None)
        assert is_fast(a, slow_a) and is_fast(b, slow_b)
        (two if first is a else again).__exit__(None, None, None)
        assert (is_fast(a, slow_a), is_fast(b, slow_b)) == ((True, False) if first is a else (False, True))
        (again if first is a else two).__exit__(None, None, None)
        assert not is_fast(a, slow_a) and not is_fast(b, slow_b) and untouched()
    with G.fast_gdn():
        with G.fast_gdn(a): pass
        assert is_fast(a, slow_a) and is_fast(b, slow_b)
    assert not is_fast(a, slow_a) and untouched()

@pytest.mark.parametrize("module, name", [(qwen3_5, "gated_delta_update"), (gated_delta, "gated_delta_ops")])
def test_a_recorder_that_comes_and_goes(module, name):
    "Somebody else replaces a name while we are on, and we leave first, or while we are off, and we come later: nothing of theirs is undone."
    model, seen = tiny_model("qwen3_5"), []
    slow = model(PROMPT)
    G.fast_gdn_on(model)
    fast, before = model(PROMPT), getattr(module, name)
    def recorder(*args, **kwargs):
        seen.append(args[0].shape)
        return before(*args, **kwargs)
    try:
        setattr(module, name, recorder)
        assert mx.array_equal(model(PROMPT), fast).item() and len(seen) == 4
        G.fast_gdn_off(model)
        assert getattr(module, name) is recorder and mx.array_equal(model(PROMPT), slow).item() and len(seen) == 8
        with G.fast_gdn(model): assert mx.array_equal(model(PROMPT), fast).item()
        assert len(seen) == (12 if module is qwen3_5 else 8)                       # with their hands on the same name, the last one is the first asked
        assert getattr(module, name) is recorder and mx.array_equal(model(PROMPT), slow).item()
        setattr(module, name, before)
        assert mx.array_equal(model(PROMPT), slow).item()
        with G.fast_gdn(model): assert mx.array_equal(model(PROMPT), fast).item()
    finally:
        setattr(qwen3_5, "gated_delta_update", gated_delta.gated_delta_update)
        gated_delta.gated_delta_ops = ORIGINAL

def test_threads_do_not_see_each_other():
    "Two threads interleave calls of two models, one switched on and off all the time; each gets its own numbers, to the last bit."
    models = [tiny_model("qwen3_5", seed=s) for s in (0, 1)]
    x = PROMPT[:1, :12]
    slow = [np.array(m(x)) for m in models]
    with G.fast_gdn(models[0]): fast = np.array(models[0](x))
    assert not np.array_equal(fast, slow[0])
    wrong, errors = [], []
    def switching():
        try:
            with mx.stream(mx.new_stream(mx.cpu)):
                for _ in range(15):
                    with G.fast_gdn(models[0]): wrong.append(not np.array_equal(np.array(models[0](x)), fast))
                    wrong.append(not np.array_equal(np.array(models[0](x)), slow[0]))
        except Exception as e: errors.append(e)
    def plain():
        try:
            with mx.stream(mx.new_stream(mx.cpu)):
                for _ in range(30): wrong.append(not np.array_equal(np.array(models[1](x)), slow[1]))
        except Exception as e: errors.append(e)
    threads = [threading.Thread(target=f) for f in (switching, plain)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert not errors and len(wrong) == 60 and not any(wrong)
    assert untouched()

def test_exception_and_generator():
    model = tiny_model("qwen3_5")
    slow = model(PROMPT)
    with pytest.raises(ZeroDivisionError):
        with G.fast_gdn(model), G.fast_gdn(model): 1 / 0
    def stream():
        with G.fast_gdn(model):
            while True: yield model(PROMPT)
    g = stream()
    next(g)
    g.close()                                                                   # abandoned
    with pytest.raises(Exception):
        with G.fast_gdn(model): model(mx.zeros((1, 2, 3, 4), mx.int32))          # a forward that fails inside of a layer
    assert untouched() and mx.array_equal(model(PROMPT), slow).item()

def test_lasting_switch():
    model = tiny_model("qwen3_5")
    slow = model(PROMPT)
    assert G.fast_gdn_on(model) == G.fast_gdn_on(model) == 4
    G.fast_gdn_off(model)
    assert not mx.array_equal(model(PROMPT), slow).item()                        # two on, one off
    twin = copy.deepcopy(model)
    G.fast_gdn_off(model)
    assert mx.array_equal(model(PROMPT), slow).item()
    assert apart(twin(PROMPT), slow) < 1e-4                                      # a copy made in the meantime still works
    with pytest.raises(RuntimeError, match="not on for this Model"): G.fast_gdn_off(model)
    with pytest.raises(RuntimeError, match="not on for every model"): G.fast_gdn_off()

def test_what_a_switched_layer_looks_like():
    "Same class name, same parameters, same answers to isinstance: whoever inspects the model sees no difference."
    model = tiny_model("qwen3_5")
    names, layer = [n for n, _ in tree_flatten(model.parameters())], G.gdn_layers(model)[0]
    with G.fast_gdn(model):
        assert isinstance(layer, qwen3_5.GatedDeltaNet) and type(layer).__name__ == "GatedDeltaNet" and type(layer).__module__ == qwen3_5.__name__
        assert [n for n, _ in tree_flatten(model.parameters())] == names and repr(layer)
        model.load_weights(tree_flatten(model.parameters()))
    assert type(layer) is qwen3_5.GatedDeltaNet

@pytest.mark.parametrize("options", [{}, dict(allow_neg_eigval=True), dict(lower_bound=-5.0), dict(use_kernel=False)])
def test_options_of_the_call(options, monkeypatch):
    "mlx-lm computes gates and strengths, whatever its options; only what follows is ours."
    q, k, v, _, _, S = G.random_inputs(1, 20, 2, 2, 32, 16)
    x = [q, k, v, mx.random.normal((1, 20, 2)), mx.random.normal((1, 20, 2)), mx.zeros(2), mx.ones(2), S]
    y, state = gated_delta.gated_delta_update(*x, **options)
    with G.fast_gdn():
        ours, ours_state = gated_delta.gated_delta_update(*x, **options)
        assert 0 < apart(ours, y) < 1e-5 and apart(ours_state, state) < 1e-5
    assert mx.array_equal(gated_delta.gated_delta_update(*x, **options)[0], y).item() and untouched()


# ---- the switch, used carelessly

def small_hybrid():
    from vllm_mlx.models import tiny_model
    return tiny_model('qwen3_5')

def counted_calls(monkeypatch):
    import vllm_mlx.gdn as module
    seen, true = [], module.gdn
    monkeypatch.setattr(module, 'gdn', lambda *a, **k: (seen.append(1), true(*a, **k))[1])
    return seen

@pytest.mark.parametrize('order', ['model first', 'copy first'])
def test_a_deep_copy_is_switched_off(order, monkeypatch):
    import copy
    import vllm_mlx.gdn as module
    model, seen = small_hybrid(), counted_calls(monkeypatch)
    slow, uses = [type(m) for m in model.modules()], module._uses[0]
    module.fast_gdn_on(model)
    twin = copy.deepcopy(model)
    assert [type(m) for m in twin.modules()] == slow
    with pytest.raises(RuntimeError, match='not on for this'): module.fast_gdn_off(twin)
    tokens = mx.array([[1, 2, 3]])
    out = model(tokens)
    assert len(seen) == len(module.gdn_layers(model)) and mx.allclose(twin(tokens), out, atol=1e-4) and len(seen) == len(module.gdn_layers(model))
    module.fast_gdn_off(model)
    assert module._uses[0] == uses and [type(m) for m in model.modules()] == slow

def test_a_layer_replaced_meanwhile(monkeypatch):
    import vllm_mlx.gdn as module
    model, other, uses, name = small_hybrid(), small_hybrid(), module._uses[0], module._mlx_lm.gated_delta_ops
    first = model.layers[0].linear_attn
    slow = type(first)
    with module.fast_gdn(model): model.layers[0].linear_attn = other.layers[0].linear_attn
    assert module._uses[0] == uses and module._mlx_lm.gated_delta_ops is name
    assert type(first) is slow and {type(m) for m in module.gdn_layers(model)} == {slow}
    module.fast_gdn_on(model)
    model.layers[0].linear_attn = first
    module.fast_gdn_off(model)
    assert module._uses[0] == uses and {type(m) for m in module.gdn_layers(model)} == {slow}

def test_layers_in_inference_ask_for_no_gradients(monkeypatch):
    "What lets gradients flow through a kernel costs as much as the kernel."
    import vllm_mlx.gdn as module
    model, seen, true = small_hybrid(), [], module.gdn
    monkeypatch.setattr(module, 'gdn', lambda *a, **k: (seen.append(module._inside.plain), true(*a, **k))[1])
    for training in (False, True):
        model.train(training)
        with module.fast_gdn(model): model(mx.array([[1, 2, 3]]))
        assert set(seen) == {not training} and not module._inside.plain
        seen.clear()
