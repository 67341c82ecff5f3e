"Verify: hidden states of every family, records through the whole round, explicit layers in dtypes and lengths."
import gc
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache
from vllm_mlx.layers import attention_layout, text_model
from vllm_mlx.models import TINY_FAMILIES, tiny_model
from vllm_mlx.rollback import batch_cache, rollback, rollback_linear_caches
from vllm_mlx.verify import (find_fa_mask_cache_idx, forward_full_attention_layer_explicit, forward_linear_layer_explicit, forward_with_hidden_states,
                             forward_with_hidden_states_and_rollback, forward_with_hidden_states_padded, noting_view)
from test_rollback import ALL, FAMILIES, blocks, close, fed, same_cache, small, text, the

@pytest.mark.parametrize('name', [*dict.fromkeys([*TINY_FAMILIES, *ALL])])
def test_hidden_states(name):
    "Logits to the bit; the output of a layer is the input of the next; recorded or not, alone or in a batch."
    model = tiny_model(name) if name in TINY_FAMILIES else the(name)
    past, block, n = text(9, 2), text(5, 2, seed=3), len(model.layers)
    logits, embed, hidden = forward_with_hidden_states(model, block, fed(model, past), range(n))
    assert mx.array_equal(logits, model(block, cache=fed(model, past)))
    assert embed.shape[:2] == (2, 5) and all(h.shape == embed.shape for h in hidden) and len(hidden) == n
    cache = fed(model, past)
    again, embed2, some, records = forward_with_hidden_states_and_rollback(model, block, cache, [n - 1, 0])
    assert mx.array_equal(again, logits) and mx.array_equal(embed, embed2)
    assert mx.array_equal(some[0], hidden[-1]) and mx.array_equal(some[1], hidden[0])
    rollback(cache, records, 3)
    same_cache(cache, fed(model, past, block[:, :3]), 2e-4)
    assert 0 <= find_fa_mask_cache_idx(model) < len(cache)

NO_MASK_ASKED = set()      # families whose attention makes its own mask: refused, and the cache as before

@pytest.mark.parametrize('name', [*dict.fromkeys([*TINY_FAMILIES, *ALL])])
def test_whole_buffers(name):
    "The padded forward against the plain one: logits, features, what is left after a cut, a second block, and plain decoding after it."
    model = tiny_model(name) if name in TINY_FAMILIES else the(name)
    past, one, other = text(9), text(5, seed=3), text(4, seed=4)
    theirs, mine = fed(model, past), fed(model, past)
    try: logits, embed, hidden, records = forward_with_hidden_states_padded(model, one, mine, [0, len(model.layers) - 1])
    except ValueError as e:
        assert name in NO_MASK_ASKED and 'asked no cache for a mask of 5 tokens at token 9' in str(e)
        return same_cache(mine, theirs, 0)
    assert name not in NO_MASK_ASKED
    for block, keep in ((one, 3), (other, 4)):
        if block is other: logits, embed, hidden, records = forward_with_hidden_states_padded(model, other, mine, [0, len(model.layers) - 1])
        want, embed2, features, spec = forward_with_hidden_states_and_rollback(model, block, theirs, [0, len(model.layers) - 1])
        assert mx.array_equal(embed, embed2)
        for a, b in zip([logits, *hidden], [want, *features]): close(a, b, 2e-4)
        rollback(theirs, spec, keep); rollback(mine, records, keep)
    same_cache(mine, theirs, 2e-4)
    close(model(text(1), cache=mine), model(text(1), cache=theirs), 2e-4)
    if plain := [c for c in mine if type(c) is KVCache]: assert {c.keys.shape[2] for c in plain} == {256}

def test_capture_errors_change_nothing():
    model = tiny_model('qwen3_5')
    cache, held = fed(model, text(6)), fed(model, text(6))
    for bad in ([6], [-1], [0, 99]):
        with pytest.raises(ValueError, match='capture_layers has'): forward_with_hidden_states_and_rollback(model, text(3), cache, bad)
    same_cache(cache, held, 0)

@pytest.mark.parametrize('bad, message', [([-1], 'has -1: Model has layers 0 to 5'), ([6], 'has 6: Model has layers 0 to 5'), (['1'], "has '1': whole numbers from 0 to 5"), ([1.0], 'has 1.0: whole numbers'),
    ([True], 'has True: whole numbers'), ([None], 'has None: whole numbers'), ([[1]], 'whole numbers'), ('12', "is '12': a list of layers 0 to 5"), (3, 'is 3: a list'), (2.5, 'is 2.5: a list'), (True, 'is True: a list'),
    ({1: 2}, 'a list'), (b'1', 'a list'), (np.array([1.5]), 'has 1.5: whole numbers'), (mx.array([2.0]), 'has 2.0: whole numbers'), (np.array([True]), 'has True: whole numbers'), (mx.array(1), 'is 1: a list'),
    ([0, float('nan')], 'has nan: whole numbers'), ([10**30], 'Model has layers 0 to 5')], ids=str)
def test_capture_layers_of_odd_types(bad, message):
    model = tiny_model('qwen3_5')
    cache = fed(model, text(6))
    held = [list(c.cache) if isinstance(c, ArraysCache) else c.offset for c in cache]
    for f in (lambda: forward_with_hidden_states(model, text(3), cache, bad), lambda: forward_with_hidden_states_and_rollback(model, text(3), cache, bad), lambda: noting_view(model, bad, {})):
        with pytest.raises(ValueError, match=f'capture_layers .*{message}'): f()
    assert all(all(x is y for x, y in zip(h, c.cache)) if isinstance(c, ArraysCache) else h == c.offset for h, c in zip(held, cache))

@pytest.mark.parametrize('good', [None, [], (), [1, 4], (4, 1), [2, 2], range(2, 5), np.array([5, 0]), mx.array([3]), iter([1, 3]), {2}, [np.int64(3), np.uint8(1)]], ids=str)
def test_capture_layers_of_many_types(good):
    model, block = tiny_model('qwen3_5'), text(3)
    wanted = [int(i) for i in good] if good is not None and not hasattr(good, '__next__') else [1, 3] if good is not None else []
    every = forward_with_hidden_states(model, block, capture_layers=range(6))[2]
    some = forward_with_hidden_states(model, block, capture_layers=good)[2]
    assert len(some) == len(wanted) and all(mx.array_equal(a, every[i]).item() for a, i in zip(some, wanted))

def test_a_greedy_loop_is_plain_decoding():
    "Guesses, verified, cut back: the tokens are those of decoding one by one, on a hybrid."
    model, rng = tiny_model('qwen3_5'), np.random.default_rng(0)
    cache, out = fed(model, text(10)), [7]
    plain, spec = fed(model, text(10)), [7]
    for _ in range(24): spec.append(model(mx.array([[spec[-1]]]), cache=plain)[0, -1].argmax().item())
    while len(out) < 25:
        right = spec[len(out):len(out) + 5]
        guess = [t if rng.random() < .7 else int(rng.integers(0, 500)) for t in right]
        block = mx.array([[out[-1], *guess]])
        logits, _, _, records = forward_with_hidden_states_and_rollback(model, block, cache)
        best = logits[0].argmax(-1).tolist()
        n = next((i for i, g in enumerate(guess) if g != best[i]), len(guess))
        out += best[:n + 1]
        rollback(cache, records, n + 1)
    assert out[:25] == spec

@pytest.mark.parametrize('dtype', [mx.float32, mx.bfloat16])
@pytest.mark.parametrize('L', [1, 2, 7])
def test_explicit_layers(dtype, L):
    model = tiny_model('qwen3_5', dtype=dtype)
    x = mx.random.normal((2, L, 64), key=mx.random.key(1)).astype(dtype)
    cache = fed(model, text(255, 2))
    for i, layer in enumerate(model.layers):
        c = cache[i]
        if layer.is_linear:
            before = list(c.cache)
            out, conv, state, qkv, k, v, g, beta = forward_linear_layer_explicit(layer, x, *before)
            assert mx.array_equal(out, layer(x, mask=None, cache=c)) and mx.array_equal(conv, c[0]) and mx.array_equal(state, c[1])
            assert (qkv.shape, k.shape, v.shape, g.shape, beta.shape) == ((2, L, 128), (2, L, 1, 32), (2, L, 2, 32), (2, L, 2), (2, L, 2)) and g.dtype == mx.float32
        else:
            keys, values, offset = c.keys[...], c.values[...], c.offset                            # 255 of 256 rows: the block does not fit into the buffer
            out, new_keys, new_values = forward_full_attention_layer_explicit(layer, x, keys, values, offset)
            wanted = layer(x, mask='causal' if L > 1 else None, cache=c)
            assert mx.array_equal(out, wanted) and mx.array_equal(new_keys, c.keys[..., offset:offset + L, :]) and mx.array_equal(new_values, c.values[..., offset:offset + L, :])

def test_explicit_linear_mask():
    model = tiny_model('qwen3_5')
    x, mask = mx.random.normal((2, 5, 64), key=mx.random.key(1)), mx.array([[True] * 5, [False, False, True, True, True]])
    out, conv, state, *_ = forward_linear_layer_explicit(model.layers[0], x, None, None, mask)
    alone = forward_linear_layer_explicit(model.layers[0], x[1:, 2:], None, None)
    close(state[1:], alone[2], 1e-5); close(conv[1:], alone[1], 1e-5); close(out[1:, 2:], alone[0], 1e-5)

def test_memory_of_records_is_let_go():
    model, cache, seen = tiny_model('qwen3_5'), None, []
    cache = fed(model, text(4))
    gc.disable()
    try:
        for i in range(12):
            logits, _, hidden, records = forward_with_hidden_states_and_rollback(model, text(8, seed=i), cache, [1, 3])
            rollback(cache, records, 0)
            mx.eval(logits, hidden, [c.state for c in cache])
            assert records.released and not records and records.cache is None
            del logits, hidden, records, _
            seen.append(mx.get_active_memory())
    finally: gc.enable()
    assert max(seen[2:]) <= max(seen[:2]), seen

def test_a_dropped_cache_is_freed_at_once():
    model, before = tiny_model('qwen3_5'), None
    gc.collect(); gc.disable()
    try:
        for i in range(4):
            cache = fed(model, text(4))
            out, _, hidden, records = forward_with_hidden_states_and_rollback(model, text(8), cache, [1])
            mx.eval(out, hidden)
            if i % 2: rollback(cache, records, 3); mx.eval([c.state for c in cache])
            del cache, out, hidden, records, _
            before = mx.get_active_memory() if before is None else before
            assert mx.get_active_memory() <= before
    finally: gc.enable()

@pytest.mark.parametrize('name', ['kimi_linear', 'olmo_hybrid'])
def test_three_convolutions_are_refused_by_name(name):
    model = the(name)
    layer = next(l for l in text_model(model).layers if not any(l is a.layer for a in attention_layout_of(model)))
    with pytest.raises(ValueError, match=f'{type(layer).__name__} is no gated delta rule with one convolution'):
        forward_linear_layer_explicit(layer, mx.zeros((1, 3, 32)), None, None)

def attention_layout_of(model):
    try: return attention_layout(model)
    except ValueError: return []

def test_explicit_attention_says_what_is_wrong():
    model = tiny_model('llama')
    layer, h = model.layers[0], mx.zeros((1, 2, model.args.hidden_size))
    with pytest.raises(ValueError, match='offset is 5: old_keys hold 0 rows'): forward_full_attention_layer_explicit(layer, h, None, None, 5)
    short = mx.zeros((1, model.args.num_key_value_heads, 4, 16))
    with pytest.raises(ValueError, match='offset is 9: old_keys hold 4 rows'): forward_full_attention_layer_explicit(layer, h, short, short, 9)
    hybrid = the('falcon_h1')
    with pytest.raises(ValueError, match='is not called as layer'): forward_full_attention_layer_explicit(text_model(hybrid).layers[0], mx.zeros((1, 2, 32)), None, None, 0)
