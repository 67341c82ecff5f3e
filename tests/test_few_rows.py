"Few rows at a time: the products, the switch, and on an NVIDIA GPU the kernel."
import vllm_mlx
import copy, itertools, pickle, sys, threading

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

import vllm_mlx.few_rows as F
import vllm_mlx.speculate as speculate
from vllm_mlx.dflash import tiny_draft
from vllm_mlx.few_rows import attend, few, few_rows_class, rows_attention, rows_mask, rows_product
from vllm_mlx.gdn import gdn_backend
from vllm_mlx.models import TINY_FAMILIES, load, tiny_model
import vllm_mlx.split_sdpa as split
from vllm_mlx.split_sdpa import SPLIT_FORMS, fast_rows, install_split_attention_hooks, remove_split_attention_hooks, split_attention_hooks
from vllm_mlx.turboquant import carries

cuda = pytest.mark.skipif(gdn_backend() != 'cuda', reason='not available here: an NVIDIA GPU is needed')

def kinds(model): return [type(m) for m in model.modules()]
def changed(model, mark='_few_rows'): return sum(carries(type(m), mark) for m in model.modules())

@pytest.mark.parametrize('shape', [(1, 2, 64), (1, 16, 64), (3, 5, 64), (2, 64), (1, 17, 64), (1, 1, 64), (64,), (0, 64)])
@pytest.mark.parametrize('bias', [True, False])
def test_products_are_the_same(shape, bias):
    layer, x = nn.Linear(64, 24, bias=bias), mx.random.normal(shape)
    want = layer(x)
    layer.__class__ = few_rows_class(nn.Linear)
    got = layer(x)
    assert got.shape == want.shape and np.allclose(got, want, atol=1e-5)

def test_a_row_is_the_same_whatever_is_beside_it():
    w, x = mx.random.normal((24, 64)), mx.random.normal((1, 16, 64))
    for n in (2, 5, 16): assert np.allclose(rows_product(x[:, :n], w), rows_product(x, w)[:, :n], atol=1e-6)

def test_what_few_rows_are():
    w = mx.zeros((24, 64))
    assert [few(mx.zeros(s), w) for s in ((1, 1, 64), (1, 2, 64), (4, 4, 64), (4, 5, 64), (64,), (0, 64))] == [False, True, True, False, False, False]
    assert not few(mx.zeros((1, 4, 60)), mx.zeros((24, 60)))                     # the one-row kernel takes multiples of 32
    big = mx.zeros((49152, 576), mx.bfloat16)
    assert few(mx.zeros((1, 2, 576)), big) and not few(mx.zeros((1, 8, 576)), big)

def test_masks():
    assert np.array_equal(rows_mask('causal', 3, 5), np.arange(5) <= np.arange(2, 5)[:, None])
    assert np.array_equal(rows_mask(None, 2, 3), np.ones((2, 3), bool))
    one = mx.array([[True, False, True]])
    for shape in ((1, 3), (1, 1, 3), (1, 1, 1, 3)): assert np.array_equal(rows_mask(one.reshape(shape), 2, 3), [[True, False, True]] * 2)
    for bad in (mx.zeros((2, 3)), mx.ones((2, 1, 2, 3), mx.bool_), mx.ones((1, 4, 2, 3), mx.bool_), 'window'): assert rows_mask(bad, 2, 3) is None

def test_the_kernel_says_what_is_wrong():
    q, k = mx.zeros((1, 4, 3, 8)), mx.zeros((1, 2, 9, 8))
    with pytest.raises(ValueError, match='do not fit'): rows_attention(mx.zeros((1, 3, 3, 8)), k, k, 1.0)
    with pytest.raises(ValueError, match='do not fit'): rows_attention(mx.zeros((1, 4, 3, 16)), k, k, 1.0)
    with pytest.raises(ValueError, match='heads of 264 numbers'): rows_attention(mx.zeros((1, 4, 3, 264)), *[mx.zeros((1, 2, 9, 264))] * 2, 1.0)
    with pytest.raises(ValueError, match='mask is .*float32'): rows_attention(q, k, k, 1.0, mx.zeros((3, 9)))
    with pytest.raises(ValueError, match='mask is window'): rows_attention(q, k, k, 1.0, 'window')
    if gdn_backend() != 'cuda':
        with pytest.raises(RuntimeError, match='needs an NVIDIA GPU'): rows_attention(q, k, k, 1.0)

@pytest.mark.parametrize('mask', ['causal', None, 'bool', 'additive', 'heads'])
@pytest.mark.parametrize('L', [1, 2, 16, 17])
def test_attend_is_attention(mask, L):
    H, KV, C, D = 4, 2, 40, 32
    q, k, v = (mx.random.normal((2, h, n, D)) for h, n in ((H, L), (KV, C), (KV, C)))
    m = dict(bool=mx.random.uniform(shape=(1, 1, L, C)) < .6, additive=mx.random.normal((1, 1, L, C)), heads=mx.random.uniform(shape=(1, H, L, C)) < .6).get(mask, mask)
    if isinstance(m, mx.array) and m.dtype == mx.bool_: m = m | (mx.arange(C) == 0)
    want = mx.fast.scaled_dot_product_attention(q, k, v, scale=D ** -.5, mask=m)
    for form in (attend, SPLIT_FORMS['kernel']): assert np.allclose(form(q, k, v, D ** -.5, m), want, atol=2e-3 if gdn_backend() == 'cuda' else 1e-5)

def test_when_the_kernel_pays(monkeypatch):
    "By rows, keys, kind of mask and size of heads; anything that it cannot serve goes to mlx."
    assert [F.kernel_pays(*x) for x in ((1, 9, 0, 64), (1, 9, 0, 256), (1, 9, 2, 256), (2, 1, 1, 64), (16, 16, 1, 64), (17, 99, 1, 64), (4, 1024, 2, 64), (4, 1025, 2, 64), (4, 1 << 15, 1, 64), (4, 1 + (1 << 15), 0, 64), (4, 4097, 1, 129), (4, 9, 0, 257))] == \
        [False, True, False, False, True, False, True, False, True, False, False, False]
    asked = []
    monkeypatch.setattr(F, 'gdn_backend', lambda: 'cuda')
    monkeypatch.setattr(F, 'rows_attention', lambda q, k, v, scale, mask=None: asked.append(q.shape) or mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask))
    def go(L, C, H=4, KV=2, D=8, mask=None, sinks=None):
        asked.clear()
        attend(*(mx.zeros((1, h, n, D)) for h, n in ((H, L), (KV, C), (KV, C))), 1.0, mask, sinks)
        return len(asked)
    assert go(4, 9) and go(4, 9, mask='causal') and go(4, 9, mask=mx.ones((4, 9), mx.bool_)) and go(1, 9, D=136)
    assert not (go(1, 9) or go(17, 40) or go(4, 9, mask=mx.zeros((4, 9))) or go(4, 9, mask=mx.ones((1, 4, 4, 9), mx.bool_)) or go(4, 9, sinks=mx.zeros(4)) or go(4, 1100, mask=mx.ones((4, 1100), mx.bool_)))

@pytest.mark.parametrize('family', TINY_FAMILIES)
def test_switched_on_and_off(family):
    model = tiny_model(family)
    ids, was = mx.array([[5, 9, 2, 7]]), kinds(model)
    want = model(ids, cache=make_prompt_cache(model))
    with fast_rows(model, on=True):
        assert changed(model)
        got = model(ids, cache=make_prompt_cache(model))
    assert kinds(model) == was and np.allclose(got, want, atol=1e-4 * float(mx.abs(want).max()))

def test_quantised_layers_stay_as_they_are():
    model = tiny_model('llama')
    nn.quantize(model, group_size=32, bits=4)
    was = kinds(model)
    with fast_rows(model, on=True): assert changed(model) == 0
    assert kinds(model) == was

def test_off_after_an_error_and_in_any_order():
    model = tiny_model('llama')
    was = kinds(model)
    with pytest.raises(KeyError):
        with fast_rows(model, on=True): raise KeyError
    assert kinds(model) == was
    for order in itertools.permutations(range(3)):
        users = [fast_rows(model, on=True) for _ in range(3)]
        for u in users: u.__enter__()
        for i in order:
            assert changed(model)
            users[i].__exit__(None, None, None)
        assert kinds(model) == was

def test_somebody_elses_hooks_stay():
    model, ids = tiny_model('llama'), mx.array([[5, 9, 2, 7]])
    rule, plain = ((32, 0, 'rows'),), model(ids)
    install_split_attention_hooks(model, rule)
    was = kinds(model)
    with fast_rows(model, on=True): assert all(type(m)._rule == rule for m in model.modules() if carries(type(m), '_unhooked')) and not changed(model, '_few_attention')
    assert kinds(model) == was
    with fast_rows(model, on=True): remove_split_attention_hooks(model)           # taken back meanwhile: stays so
    assert not any(carries(type(m), mark) for m in model.modules() for mark in ('_unhooked', '_few_rows', '_few_attention'))
    with fast_rows(model, on=True):
        install_split_attention_hooks(model, rule)                                # put there meanwhile: likewise
        assert changed(model, '_unhooked') == changed(model, '_few_attention') > 0
        assert np.allclose(model(ids), plain, atol=1e-4)
    assert kinds(model) == was

def test_hooks_for_a_block_that_outlast_it():
    model = tiny_model('llama')
    was = kinds(model)
    ours, theirs = fast_rows(model, on=True), split_attention_hooks(model, ((32, 0, 'rows'),))
    ours.__enter__(); theirs.__enter__(); ours.__exit__(None, None, None)
    assert changed(model, '_unhooked') and not changed(model, '_few_attention') and not changed(model)
    theirs.__exit__(None, None, None)
    assert kinds(model) == was

def test_threads():
    model, failed = tiny_model('llama'), []
    was = kinds(model)
    def go():
        try:
            for _ in range(60):
                with fast_rows(model, on=True): pass
        except BaseException as e: failed.append(e)
    before = sys.getswitchinterval(); sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=go) for _ in range(4)]
        for t in threads: t.start()
        for t in threads: t.join()
    finally: sys.setswitchinterval(before)
    assert not failed and kinds(model) == was

def test_a_draft():
    target = tiny_model('llama')
    draft = tiny_draft(target)
    was, ids, features = kinds(draft), mx.array([[3, 1, 1, 1]]), mx.random.normal((1, 9, len(draft.config.target_layer_ids) * draft.config.hidden_size))
    want = draft(ids, features)
    with fast_rows(draft, on=True), fast_rows(target, on=True):
        assert changed(draft) and changed(draft, '_few_attention') == len(draft.layers)
        got = draft(ids, features)
        assert carries(type(draft._lent.embed), '_few_rows') and draft._lent.head.__func__ is type(draft._lent.embed).as_linear      # the head that is there now
    assert kinds(draft) == was and np.allclose(got, want, atol=1e-4)
    assert not carries(type(draft._lent.embed), '_few_rows')
    grads = nn.value_and_grad(draft, lambda d: d(ids, features).sum())(draft)[1]   # outside it has gradients, on every backend
    assert all(np.isfinite(np.array(g)).all() for _, g in tree_flatten(grads))

@pytest.mark.parametrize('again', [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_plain(again):
    layer = nn.Linear(64, 8)
    layer.__class__ = few_rows_class(nn.Linear)
    new = again(layer)
    assert type(new) is nn.Linear and mx.array_equal(new.weight, layer.weight)
    model = tiny_model('llama')
    was = kinds(model)
    with fast_rows(model, on=True): new = again(model)
    assert [k.__name__ for k in kinds(new)] == [k.__name__ for k in was] and not changed(new) and not changed(new, '_few_attention')
    assert mx.array_equal(new(mx.array([[5, 9, 2]])), model(mx.array([[5, 9, 2]])))

def test_a_failure_on_the_way_in_leaves_nothing(monkeypatch):
    model, tokenizer = tiny_model('llama'), load('smollm2-135m')[1]
    was = kinds(model)
    def broken(cls): raise KeyError(cls)
    monkeypatch.setitem(split._few, '_few_attention', (split._few['_few_attention'][0], broken))
    with pytest.raises(KeyError):
        with fast_rows(model, on=True): pass
    assert kinds(model) == was
    monkeypatch.setattr(speculate, 'fast_rows', lambda m: fast_rows(m, on=True))
    cache = speculate.SpecCache(model, None)
    with pytest.raises(KeyError): list(speculate.stream_generate(model, None, tokenizer, [5, 6, 7], max_tokens=4, prompt_cache=cache))
    monkeypatch.undo()
    assert len(list(speculate.stream_generate(model, None, tokenizer, [5, 6, 7], max_tokens=4, prompt_cache=cache))) == 4       # no generation is "under way" 

@pytest.mark.parametrize('family', ['llama', 'qwen3_5'])
@pytest.mark.parametrize('form', ['plain', 'layers', 'whole'])
def test_the_loop_switches_it_on_and_leaves_nothing(family, form, monkeypatch):
    model, tokenizer = tiny_model(family), load('smollm2-135m')[1]
    draft = tiny_draft(model)
    was, drafts_were = kinds(model), kinds(draft)
    how = dict(max_tokens=24, block_size=4, verify=form)
    want = [r.token for r in speculate.stream_generate(model, draft, tokenizer, [5, 6, 7], **how)]
    monkeypatch.setattr(speculate, 'fast_rows', lambda m: fast_rows(m, on=True))
    gen = speculate.stream_generate(model, draft, tokenizer, [5, 6, 7], **how)
    assert kinds(model) == was                                                    # not before it runs
    got = [next(gen).token]
    assert changed(model) and changed(draft)
    got += [r.token for r in gen]
    assert got == want and kinds(model) == was and kinds(draft) == drafts_were
    gen = speculate.stream_generate(model, draft, tokenizer, [5, 6, 7], **how)
    next(gen); gen.close()
    assert kinds(model) == was and kinds(draft) == drafts_were
