"Kernels for few rows and for codes: their text on this machine's processor, and themselves where there is an NVIDIA GPU."
import vllm_mlx
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

import vllm_mlx.coded_cache as cache_module
import vllm_mlx.coded_kernels as K
import vllm_mlx.few_rows as F
from kernel_shim import COMPILER, ShimKernel
from vllm_mlx.coded_cache import TurboQuantKVCache, attention_reference, coded_attention
from vllm_mlx.coded_kernels import codes_attention, encode_rows, serves
from vllm_mlx.few_rows import kernel_mask, merge_parts, rows_attention, rows_launch, rows_mask
from vllm_mlx.gdn import gdn_backend, kernel_name
from vllm_mlx.models import tiny_model
from vllm_mlx.rollback import rollback
from vllm_mlx.turbo_codec import BITS, codec
from vllm_mlx.turboquant import make_turboquant_cache
from vllm_mlx.verify import forward_with_hidden_states_and_rollback

on_cuda = gdn_backend() == 'cuda'
needs = pytest.mark.skipif(COMPILER is None and not on_cuda, reason='no C++ compiler')
CODES = F.ROWS_HEADER + K.CODES_HEADER

@pytest.fixture
def kernels(monkeypatch):
    "The package's own code, on an NVIDIA GPU as it is; elsewhere with stand-ins for the compiled kernels, few warps, and parts of 128 keys. The calls are noted."
    calls = []
    if on_cuda: return calls
    shims = dict(_rows_kernel=ShimKernel('cuda', ['q', 'k', 'v', 'mask', 'scale'], ['out'], F.ROWS_KERNEL, header=F.ROWS_HEADER, contiguous=False, calls=calls), _merge_kernel=ShimKernel('cuda', ['x', 'turn'], ['out'], F.MERGE_KERNEL, calls=calls))
    for name, shim in shims.items(): monkeypatch.setattr(F, name, lambda shim=shim: shim)
    codes = dict(_codes_kernel=ShimKernel('cuda', ['q', 'k', 'kn', 'v', 'vn', 'mask', 'scale', 'table', 'turn'], ['out'], K.CODES_KERNEL, header=CODES, contiguous=False, calls=calls),
                 _encode_kernel=ShimKernel('cuda', ['x', 'center', 'turn', 'borders', 'levels'], ['out', 'norms'], K.ENCODE_KERNEL, header=CODES, contiguous=False, calls=calls))
    for name, shim in codes.items(): monkeypatch.setattr(K, name, lambda shim=shim: shim)
    for module in (F, K, cache_module): monkeypatch.setattr(module, 'gdn_backend', lambda: 'cuda')
    monkeypatch.setattr(F, 'KEYS_A_PART', 128); monkeypatch.setattr(K, 'KEYS_A_PART', 128)
    def small(*args):
        size = rows_launch(*args)
        return size | dict(warps=2, grid=(size['grid'][0] // size['warps'] * 2, *size['grid'][1:]), threadgroup=(64, 1, 1))
    for module in (F, K): monkeypatch.setattr(module, 'rows_launch', small)
    return calls

LIMIT = {mx.float32: 2e-6, mx.bfloat16: 8e-3, mx.float16: 1e-3}
def exact(q, k, v, scale, mask):
    "(B, H, L, Dv) float64"
    (B, H, L, D), KV, C = q.shape, k.shape[1], k.shape[2]
    q, k, v = (np.array(a.astype(mx.float32), np.float64) for a in (q, k, v))
    seen = np.array(rows_mask(mask, L, C))
    s = np.where(seen, np.einsum('bkgld,bkcd->bkglc', q.reshape(B, KV, H // KV, L, D), k) * scale, -np.inf)
    e = np.exp(s - np.maximum(s.max(-1, keepdims=True), -1e300))
    return np.einsum('bkglc,bkcd->bkgld', e / np.maximum(e.sum(-1, keepdims=True), 1e-300), v).reshape(B, H, L, v.shape[-1])

def close(got, want, dtype): return np.abs(np.array(got.astype(mx.float32)) - want).max() <= LIMIT[dtype] * max(1, np.abs(want).max())

@needs
@pytest.mark.parametrize('B, H, KV, L, C, D, Dv, dtype', [(1, 9, 3, 8, 300, 64, 64, mx.bfloat16), (1, 9, 3, 8, 300, 64, 64, mx.float32), (2, 4, 2, 5, 77, 80, 48, mx.float32), (1, 2, 1, 16, 260, 20, 36, mx.bfloat16), (1, 2, 2, 1, 100, 128, 128, mx.float16), (1, 3, 1, 2, 2, 8, 8, mx.float32), (1, 2, 1, 3, 40, 256, 256, mx.bfloat16), (1, 8, 2, 1, 33, 30, 30, mx.float16)])
def test_rows(kernels, dtype, B, H, KV, L, C, D, Dv):
    q = mx.random.normal((B, L, H, D)).astype(dtype).transpose(0, 2, 1, 3)                       # as a model has it: not in order
    k, v = (mx.random.normal((B, KV, C + 60, d)).astype(dtype)[..., :C, :] for d in (D, Dv))    # part of a buffer
    for mask in (None, 'causal', mx.random.uniform(shape=(1, 1, L, C)) < .3, mx.zeros((L, C), mx.bool_) | (mx.arange(C) == C - 1)):
        got = rows_attention(q, k, v, D ** -.5, mask)
        assert got.dtype == dtype and close(got, exact(q, k, v, D ** -.5, mask), dtype), mask if isinstance(mask, str) else 'array'

@needs
def test_what_is_hidden_adds_nothing_and_a_nan_stays_one(kernels):
    q, k, v = (mx.random.normal((1, 2, n, 32)) for n in (3, 200, 200))
    seen = mx.arange(200)[None] < mx.array([150, 20, 0])[:, None]                                # the last row sees nothing
    want = rows_attention(q, k, v, .2, seen)
    for bad in (mx.nan, mx.inf):
        spoilt = [mx.where(mx.arange(200)[:, None] < 150, a, bad) for a in (k, v)]
        assert mx.array_equal(rows_attention(q, *spoilt, .2, seen), want)
    assert (want[:, :, 2] == 0).all()
    one = mx.where(mx.arange(200)[:, None] == 100, mx.nan, k)                                    # seen by the first row alone
    got = rows_attention(q, one, v, .2, seen)
    assert mx.isnan(got[:, :, 0]).all() and mx.array_equal(got[:, :, 1:], want[:, :, 1:])
    assert mx.isnan(rows_attention(q, mx.full(k.shape, mx.nan), v, .2)).all()
    loud = rows_attention(100 * q, 100 * k, v, 1.0, 'causal')
    assert close(loud, exact(100 * q, 100 * k, v, 1.0, 'causal'), mx.float32)

@needs
def test_a_row_is_the_same_whatever_is_beside_it(kernels):
    "Bit for bit: in blocks of other lengths, in a longer buffer, and under a mask that says the same."
    q, k, v = mx.random.normal((1, 6, 9, 64)), *(mx.random.normal((1, 2, 330, 64)) for _ in range(2))
    whole = rows_attention(q, k[..., :300, :], v[..., :300, :], .1, 'causal')
    for n in (2, 5, 8): assert mx.array_equal(rows_attention(q[..., :n, :], k[..., :291 + n, :], v[..., :291 + n, :], .1, 'causal'), whole[..., :n, :])
    longer = rows_attention(q, k, v, .1, mx.arange(330) <= mx.arange(291, 300)[:, None])
    assert mx.array_equal(longer, whole)

@needs
@pytest.mark.skipif(on_cuda, reason='the test above asks the compiler that is there')
def test_nor_does_it_matter_what_the_others_may_see(kernels, monkeypatch):
    "A compiler may join products and sums, in one form of the loop over the values and not in the other."
    joined = ShimKernel('cuda', ['q', 'k', 'v', 'mask', 'scale'], ['out'], F.ROWS_KERNEL, header=F.ROWS_HEADER, contiguous=False, joined=True)
    monkeypatch.setattr(F, '_rows_kernel', lambda: joined)
    q, k, v = mx.random.normal((1, 2, 8, 64)), *(mx.random.normal((1, 2, 64, 64)) for _ in range(2))
    whole = rows_attention(q, k, v, .3, 'causal')
    assert mx.array_equal(rows_attention(q[:, :, 7:], k, v, .3), whole[:, :, 7:])
    seen = mx.ones((8, 64), mx.bool_)
    for other in (seen, seen & ((mx.arange(8) == 7)[:, None] | (mx.arange(64) > 40))): assert mx.array_equal(rows_attention(q, k, v, .3, other)[:, :, 7:], whole[:, :, 7:])

@needs
def test_any_strides(kernels):
    "Turned, thinned out, repeated: as mlx's attention takes them."
    q, base = mx.random.normal((1, 4, 3, 16)), mx.random.normal((1, 2, 40, 16))
    for odd in (mx.contiguous(base.swapaxes(-1, -2)).swapaxes(-1, -2), mx.random.normal((1, 2, 40, 32))[..., ::2], mx.broadcast_to(base[..., :1], base.shape), mx.broadcast_to(base[:, :1], base.shape), mx.random.normal((1, 2, 80, 16))[..., ::2, :]):
        for k, v in ((odd, base), (base, odd)): assert close(rows_attention(q, k, v, .3, 'causal'), exact(q, k, v, .3, 'causal'), mx.float32)

def test_what_does_not_fit_is_refused_before_a_kernel_is_started(kernels):
    z = lambda *shape, dtype=mx.float32: mx.zeros(shape, dtype)
    q, k = z(2, 4, 3, 16), z(2, 2, 9, 16)
    for args, why in (((z(1, 4, 3, 16), k, k), 'the same batch'), ((z(2, 5, 3, 16), k, k), 'whole groups'), ((z(2, 4, 3, 8), k, k), 'heads of one size'), ((q, z(2, 0, 9, 16), z(2, 0, 9, 16)), 'whole groups'), ((q, k, z(2, 2, 8, 16)), 'values .* do not fit'),
                      ((q, k, z(2, 1, 9, 16)), 'values .* do not fit'), ((q, k, z(1, 2, 9, 16)), 'values .* do not fit'), ((q[0], k, k), 'batch, heads, rows'), ((q, k, z(2, 2, 9, 16, dtype=mx.bfloat16)), 'one type'), ((q, k, z(2, 2, 9, 257)), 'heads of 257')):
        with pytest.raises(ValueError, match=why): rows_attention(*args, 1.0)
    c = codec(16, 4)
    for x, center, why in ((z(1, 2, 3, 8), None, 'x of shape'), (z(2, 3, 16), None, 'x of shape'), (z(1, 2, 3, 16), z(1, 1, 1, 16), 'center of shape'), (z(1, 2, 3, 16), z(2, 16), 'center of shape')):
        with pytest.raises(ValueError, match=why): encode_rows(c, x, center)
    assert not kernels
    with pytest.raises(ValueError): F.attend(z(1, 4, 3, 16), k, k, 1.0)                         # mlx says so
    cache = TurboQuantKVCache(4)
    for bad in (z(1, 2, 5, 3), z(1, 2, 5)):
        with pytest.raises(ValueError): cache.update_and_fetch(bad, bad)
        assert (cache.offset, cache.coded, cache.dims, cache.kind, cache.late, cache.keys) == (0, 0, None, None, None, None)
    with pytest.raises(ValueError, match='center has shape'): TurboQuantKVCache(4, center=z(16))

@needs
def test_merge(kernels):
    x = mx.random.normal((1, 2, 3, 4, 10)); x = mx.concatenate([x[..., :9], mx.abs(x[..., 9:]) + .1], axis=-1)
    turn, n = mx.random.normal((8, 8)), np.array(x, np.float64)
    w = np.exp(n[..., 8] - n[..., 8].max(-1, keepdims=True))
    want = (n[..., :8] * w[..., None]).sum(-2) / (n[..., 9] * w).sum(-1)[..., None]
    assert np.allclose(merge_parts(x, mx.float32), want, atol=1e-6) and np.allclose(merge_parts(x, mx.float32, turn), want @ np.array(turn), atol=1e-5)

@needs
@pytest.mark.parametrize('bits', BITS)
@pytest.mark.parametrize('dim', [4, 30, 64])
def test_codes_are_the_same_bits(kernels, dim, bits):
    c = codec(dim, bits, 3)
    x = mx.random.normal((2, 5, 3, dim)).transpose(0, 2, 1, 3) * mx.exp(3 * mx.random.normal((2, 3, 5, 1)))
    x[0, 0, 0] = 0; x[0, 0, 1] = 0; x[0, 0, 1, 3] = 7; x[0, 0, 2] = 1e-38
    center = mx.random.normal((1, 3, 1, dim))
    for dtype, offs in ((mx.float32, (None, center)), (mx.bfloat16, (None, center) if on_cuda else (center,))):
        rows = x.astype(dtype)
        for off in offs:
            want, got = c.encode(rows if off is None else rows.astype(mx.float32) - off), encode_rows(c, rows, off)
            for a, b in zip(want, got): assert a.dtype == b.dtype and mx.array_equal(a, b)
    odd = mx.where(mx.arange(dim) == 2, mx.nan, x)
    assert mx.isnan(encode_rows(c, odd)[1]).all() and mx.isnan(c.encode(odd)[1]).all()              # numbers that are none are not made to some

@needs
@pytest.mark.parametrize('D, Dv, H, KV, L, n, bits, dtype', [(64, 64, 9, 3, 8, 300, 4, mx.float32), (64, 64, 4, 2, 1, 130, (3.5, 2.5), mx.bfloat16), (48, 36, 2, 1, 5, 77, (3, 2), mx.float32), (20, 64, 2, 2, 20, 90, (2.5, 3.5), mx.float32), (128, 128, 3, 3, 3, 40, (2, 3), mx.bfloat16), (64, 64, 2, 1, 32, 32, 4, mx.float32)])
def test_attention_over_codes(kernels, dtype, D, Dv, H, KV, L, n, bits):
    cache = TurboQuantKVCache(bits, seed=1, center=mx.random.normal((KV, D)))
    k, v = (mx.random.normal((2, KV, n, d)).astype(dtype) for d in (D, Dv))
    if n > L: cache.update_and_fetch(k[:, :, :n - L], v[:, :, :n - L])
    keys, values = cache.update_and_fetch(k[:, :, n - L:], v[:, :, n - L:])
    q = mx.random.normal((2, L, H, D)).astype(dtype).transpose(0, 2, 1, 3)
    for mask in (None, 'causal', mx.random.uniform(shape=(1, 1, L, n)) < .5):
        if isinstance(mask, mx.array): mask = mask | (mx.arange(n) == 0)
        want, before = np.array(attention_reference(q.astype(mx.float32), keys, values, .3, mask)), len(kernels)
        got = coded_attention(q, keys, values, .3, mask)
        assert got.dtype == dtype and np.abs(np.array(got.astype(mx.float32)) - want).max() <= (1e-2 if dtype == mx.bfloat16 else 2e-3 if on_cuda else 1e-5) * np.abs(want).max()
        assert on_cuda or len(kernels) == before + 2                                              # it was the kernels that did it
    additive = mx.random.normal((L, n)).astype(dtype)
    want, before = np.array(attention_reference(q.astype(mx.float32), keys, values, .3, additive)), len(kernels)
    assert np.allclose(coded_attention(q, keys, values, .3, additive).astype(mx.float32), want, atol=5e-2) and len(kernels) == before

@needs
@pytest.mark.parametrize('family', ['llama', 'qwen3_5'])
def test_in_a_model(kernels, family):
    "A prompt, a block that is partly taken back, and single steps: the same codes as by operations, and logits as close as codes on a border allow."
    model, ids = tiny_model(family), mx.random.randint(0, 500, (1, 60), key=mx.random.key(2))
    def run():
        cache, out = make_turboquant_cache(model, (4, 3.5)), []
        model(ids[:, :40], cache=cache)
        logits, _, _, records = forward_with_hidden_states_and_rollback(model, ids[:, 40:46], cache)
        rollback(cache, records, 3)
        out = [logits[0, :3]] + [model(ids[:, i:i + 1], cache=cache)[0] for i in (43, 44)]
        return mx.concatenate(out), [a[..., :c.coded, :] for c in cache if isinstance(c, TurboQuantKVCache) for pair in (c.keys, c.values) for a in pair]
    got, codes = run()
    used = {next((k for k in ('LIMIT', 'KLOW') if k in c['template']), None) for c in kernels}
    assert on_cuda or {'LIMIT', 'KLOW'} <= used
    with pytest.MonkeyPatch.context() as m:
        m.setattr(K, 'gdn_backend', lambda: 'cpu'); m.setattr(cache_module, 'gdn_backend', lambda: 'cpu')
        want, theirs = run()
    assert mx.abs(got - want).max() <= 1e-2 * mx.abs(want).max()
    first = [a[..., :40, :] for a in codes[:4]], [a[..., :40, :] for a in theirs[:4]]            # of the first layer's prompt, whose keys do not depend on codes
    assert all(mx.array_equal(a, b) for a, b in zip(*first))

def test_whom_the_kernel_serves(monkeypatch):
    monkeypatch.setattr(K, 'gdn_backend', lambda: 'cuda')
    q, c = mx.zeros((1, 4, 3, 64)), codec(64, 4)
    held = lambda n=9, rows=0, B=1: SimpleNamespace(shape=(B, 2, n + rows, 64), n=n, codec=c)
    assert serves(q, held(), held(), None) and serves(q, held(), held(), 'causal') and serves(q, held(), held(), mx.zeros((3, 9), mx.bool_))
    for call in ((q, held(rows=2), held(rows=2), None), (mx.zeros((1, 4, 33, 64)), held(40), held(40), None), (q, held(2), held(2), None), (q, held(), held(), mx.zeros((3, 9))), (q, held(), held(), mx.zeros((1, 4, 3, 9), mx.bool_)), (q, held(), held(), 'window'),
                 (mx.zeros((1, 5, 3, 64)), held(), held(), None), (mx.zeros((1, 4, 3, 32)), held(), held(), None), (mx.zeros((2, 4, 3, 64)), held(), held(), None), (q, held(), held(8), None)):
        assert not serves(*call)
    monkeypatch.setattr(K, 'gdn_backend', lambda: 'cpu')
    assert not serves(q, held(), held(), None)
    with pytest.raises(RuntimeError, match='on cpu: see serves'): codes_attention(q, held(), held(), 1.0)

def test_kernels_know_their_types(kernels):
    "A compiled kernel is known by its name and template values: calls that differ in the types of what they are given must differ in them, and so must other texts."
    if on_cuda: pytest.skip('the calls are noted only where kernels are stood in for')
    for d in (mx.float32, mx.bfloat16): rows_attention(*(mx.zeros((1, 1, n, 8), d) for n in (2, 3, 3)), 1.0); encode_rows(codec(8, 4), mx.zeros((1, 1, 1, 8), d))
    seen = {tuple((k, str(v)) for k, v in c['template'].items()) for c in kernels}
    assert len(seen) == 4
    assert kernel_name('a', 'x') != kernel_name('a', 'y') and kernel_name('a', 'x') == kernel_name('a', 'x')

def test_masks_as_the_kernels_read_them():
    assert kernel_mask(None, 3, 5)[0] == 0 and kernel_mask('causal', 3, 5)[0] == 1 and kernel_mask('causal', 1, 5)[0] == 0
    form, seen = kernel_mask(mx.array([[True, False, True]]), 2, 3)
    assert form == 2 and np.array_equal(seen, [[True, False, True]] * 2)
    for bad in ('window', mx.zeros((2, 3)), mx.ones((1, 4, 2, 3), mx.bool_)): assert kernel_mask(bad, 2, 3) is None
