"DFlash draft: against a float64 forward in plain loops, every published config shape, the cache as a state machine, files that fail half-way."
import json, math, sys, threading
from dataclasses import fields, replace
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from vllm_mlx import dflash
from vllm_mlx.dflash import (SPARE, DFlashConfig, DFlashDraftModel, DraftCache, convert_dflash_to_mlx, default_target_layers, embedding_and_head, load_dflash,
                             make_draft, save_dflash, tiny_draft, visible)
from vllm_mlx.models import TINY_FAMILIES, tiny_model
from vllm_mlx.verify import forward_with_hidden_states

H = 16
SMALL = dict(hidden_size=H, num_hidden_layers=2, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-6, vocab_size=50,
             rope_theta=10000.0, block_size=5, mask_token_id=49, target_layer_ids=[0, 2, 3])


def gap(a, b): return np.abs(np.array(a, np.float64) - np.array(b, np.float64)).max()


def small(**changes): return DFlashConfig(**{**SMALL, **changes})


def random_draft(config, seed=0):
    draft, rng = DFlashDraftModel(config), np.random.default_rng(seed)
    draw = lambda n, s: 1 + .3 * rng.normal(size=s) if 'norm' in n else rng.normal(size=s) / s[-1] ** .5
    draft.load_weights([(n, mx.array(draw(n, a.shape).astype(np.float32))) for n, a in sorted(tree_flatten(draft.parameters()))])
    return draft


# ---------------------------------------------------------------- the published architecture, in float64 and in loops

def rms(v, w, eps): return v / math.sqrt((v * v).mean() + eps) * w


def frequencies(c):
    "(radians per position of each pair, factor on the rotated lanes), from the definitions of linear scaling, Llama 3 and YaRN."
    n, s = c.head_dim // 2, c.rope_scaling or {}
    kind = s.get('rope_type', s.get('type', 'default'))
    plain = [c.rope_theta ** (-2 * i / c.head_dim) for i in range(n)]
    if kind == 'default': return plain, 1.0
    factor = s['factor']
    if kind == 'linear': return [f / factor for f in plain], 1.0
    old = s['original_max_position_embeddings']
    if kind == 'llama3':
        low, high, out = s['low_freq_factor'], s['high_freq_factor'], []
        for f in plain:
            turns = old * f / (2 * math.pi)                                  # in the old context
            share = min(max((turns - low) / (high - low), 0), 1)
            out.append(share * f + (1 - share) * f / factor)
        return out, 1.0
    where = lambda turns: c.head_dim * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(c.rope_theta))
    lo, hi = max(math.floor(where(32)), 0), min(math.ceil(where(1)), c.head_dim - 1)
    ramp = [min(max((i - lo) / (hi - lo), 0), 1) for i in range(n)]
    return [r * f / factor + (1 - r) * f for r, f in zip(ramp, plain)], 0.1 * math.log(factor) + 1


def turned(v, position, c):
    half, (freqs, factor), out = len(v) // 2, frequencies(c), np.zeros_like(v)
    for i in range(half):
        a, b, angle = factor * v[i], factor * v[i + half], position * freqs[i]
        out[i], out[i + half] = a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)
    return out


class Reference:
    """The draft as its authors describe it. `keys[layer]` is a list of (position, key heads, value heads) of the context.

    Independent of the package but for the names of weights."""
    def __init__(self, draft):
        self.c = draft.config
        self.w = {n: np.array(a, np.float64) for n, a in tree_flatten(draft.parameters())}
        self.context = [[] for _ in range(self.c.num_hidden_layers)]
        self.next = 0

    def linear(self, name, v): return self.w[f'{name}.weight'] @ v + self.w.get(f'{name}.bias', 0)

    def heads(self, name, v, n): return self.linear(name, v).reshape(n, self.c.head_dim)

    def key_value(self, layer, v, position):
        at = f'layers.{layer}.self_attn'
        keys = [turned(rms(k, self.w[f'{at}.k_norm.weight'], self.c.rms_norm_eps), position, self.c) for k in self.heads(f'{at}.k_proj', v, self.c.num_key_value_heads)]
        return position, keys, self.heads(f'{at}.v_proj', v, self.c.num_key_value_heads)

    def extend(self, features, positions=None):
        for i, f in enumerate(features):
            position = self.next if positions is None else positions[i]
            fused = rms(self.linear('fc', f), self.w['hidden_norm.weight'], self.c.rms_norm_eps)
            for layer, rows in enumerate(self.context): rows.append(self.key_value(layer, fused, position))
            self.next = position + 1

    def sees(self, layer, query, key):
        c = self.c
        slides = c.layer_types[layer] == 'sliding_attention'
        if (slides if c.is_causal is None else c.is_causal) and key > query: return False
        return not slides or abs(query - key) < c.sliding_window

    def forward(self, block, start=None):
        c, xs, start = self.c, [np.array(b, np.float64) for b in block], self.next if start is None else start
        group = c.num_attention_heads // c.num_key_value_heads
        for layer in range(c.num_hidden_layers):
            at, normed = f'layers.{layer}', [rms(x, self.w[f'layers.{layer}.input_layernorm.weight'], c.rms_norm_eps) for x in xs]
            everyone = self.context[layer] + [self.key_value(layer, x, start + i) for i, x in enumerate(normed)]
            for i, x in enumerate(normed):
                queries = self.heads(f'{at}.self_attn.q_proj', x, c.num_attention_heads)
                seen, out = [e for e in everyone if self.sees(layer, start + i, e[0])], []
                for h, q in enumerate(queries):
                    q = turned(rms(q, self.w[f'{at}.self_attn.q_norm.weight'], c.rms_norm_eps), start + i, c)
                    scores = np.array([q @ keys[h // group] for _, keys, _ in seen]) / math.sqrt(c.head_dim)
                    weights = np.exp(scores - scores.max()); weights /= weights.sum()
                    out.append(sum(w * values[h // group] for w, (_, _, values) in zip(weights, seen)))
                xs[i] = xs[i] + self.linear(f'{at}.self_attn.o_proj', np.concatenate(out))
            for i, x in enumerate(xs):
                n = rms(x, self.w[f'{at}.post_attention_layernorm.weight'], c.rms_norm_eps)
                g, u = self.linear(f'{at}.mlp.gate_proj', n), self.linear(f'{at}.mlp.up_proj', n)
                xs[i] = x + self.linear(f'{at}.mlp.down_proj', g / (1 + np.exp(-g)) * u)
        return np.array([rms(x, self.w['norm.weight'], c.rms_norm_eps) for x in xs])


STRETCHED = dict(factor=4.0, original_max_position_embeddings=32)
SHAPES = {
    'full': {},
    'full, causal': dict(is_causal=True),
    'sliding': dict(layer_types=['sliding_attention'] * 2, sliding_window=4),
    'sliding, both ways': dict(layer_types=['sliding_attention'] * 2, sliding_window=4, is_causal=False),
    'sliding and full': dict(layer_types=['sliding_attention', 'full_attention'], sliding_window=7),
    'sliding and full, both ways': dict(layer_types=['full_attention', 'sliding_attention'], sliding_window=7, is_causal=False),
    'window wider than the text': dict(layer_types=['sliding_attention'] * 2, sliding_window=500),
    'no groups': dict(num_key_value_heads=4),
    'one key head, biases': dict(num_key_value_heads=1, attention_bias=True),
    'linear': dict(rope_scaling=dict(rope_type='linear', factor=4.0)),
    'llama3': dict(rope_scaling=dict(rope_type='llama3', low_freq_factor=1.0, high_freq_factor=4.0, **STRETCHED)),
    'yarn': dict(rope_scaling=dict(type='yarn', **STRETCHED), max_position_embeddings=128),
    'one feature, three layers': dict(num_hidden_layers=3, target_layer_ids=[1]),
    'fast rotation': dict(rope_theta=1e6, head_dim=16),
}


def features_and_block(config, n, S, seed=1):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, len(config.target_layer_ids) * H)).astype(np.float32), rng.normal(size=(S, H)).astype(np.float32)


@pytest.mark.parametrize('fixed', (False, True))
@pytest.mark.parametrize('shape', SHAPES)
def test_forward_equals_the_reference(shape, fixed):
    "Uncached, cached in chunks, and round after round; 1e-5 in float32."
    config = small(**SHAPES[shape])
    draft, n = random_draft(config), 29
    f, block = features_and_block(config, n, 5)
    reference = Reference(draft)
    reference.extend(f)
    wanted = reference.forward(block)
    assert gap(draft.forward(mx.array(block)[None], mx.array(f)[None])[0], wanted) < 1e-5
    cache = draft.make_cache(fixed=fixed)
    for a, b in ((0, 10), (10, 11), (11, 26), (26, 29)): draft.extend(mx.array(f[a:b])[None], cache)
    assert gap(draft.forward(mx.array(block)[None], None, cache)[0], wanted) < 1e-5
    rounds, reference = draft.make_cache(fixed=fixed), Reference(draft)
    for a, b in ((0, 7), (7, 8), (8, 13), (13, 18), (18, 29)):
        _, block = features_and_block(config, 1, 2 + b % 4, seed=b)
        reference.extend(f[a:b])
        assert gap(draft.forward(mx.array(block)[None], mx.array(f[a:b])[None], rounds)[0], reference.forward(block)) < 1e-5
        assert rounds.offset == rounds.tokens() == b


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_any_chunks_any_window_any_gaps(data):
    "Chunks, window, kind of layers, block size, and positions with gaps are free; context may be empty."
    window = data.draw(st.integers(1, 12))
    kinds = data.draw(st.lists(st.sampled_from(['full_attention', 'sliding_attention']), min_size=2, max_size=2))
    config = small(layer_types=kinds, sliding_window=window, is_causal=data.draw(st.sampled_from([None, True, False])))
    draft, chunks = random_draft(config), data.draw(st.lists(st.integers(1, 6), max_size=4))
    f, block = features_and_block(config, sum(chunks), data.draw(st.integers(2, 6)))
    positions = np.cumsum(data.draw(st.lists(st.integers(1, 4), min_size=len(f), max_size=len(f)))) if len(f) else np.zeros(0, int)
    reference, cache, at = Reference(draft), draft.make_cache(fixed=data.draw(st.booleans())), 0
    for n in chunks:
        reference.extend(f[at:at + n], positions[at:at + n].tolist())
        draft.extend(mx.array(f[at:at + n])[None], cache, positions[at:at + n])
        at += n
    start = cache.offset + data.draw(st.integers(0, 5))
    assert gap(draft.forward(mx.array(block)[None], None, cache, position=start)[0], reference.forward(block, start)) < 1e-5


@pytest.mark.parametrize('fixed', (False, True))
def test_long_context_with_dropped_rows(fixed):
    "A sliding layer that has forgotten most of its rows gives what the reference, which forgets nothing, gives."
    config = small(num_hidden_layers=1, layer_types=['sliding_attention'], sliding_window=9, target_layer_ids=[0])
    draft = random_draft(config)
    f, block = features_and_block(config, 700, 4)
    cache, reference = draft.make_cache(fixed=fixed), Reference(draft)
    for a in range(0, 700, 50): draft.extend(mx.array(f[a:a + 50])[None], cache)
    reference.next = 680
    reference.extend(f[680:])
    assert cache.rows[0].dropped > 0 and cache.tokens() == 700
    assert gap(draft.forward(mx.array(block)[None], None, cache)[0], reference.forward(block)) < 5e-4        # angles of 700 radians in float32
    back = draft.make_cache()
    draft.extend(mx.array(f[:690])[None], back)
    cache.trim(10)
    assert gap(draft.forward(mx.array(block)[None], None, cache), draft.forward(mx.array(block)[None], None, back)) < 1e-5


def test_sink_and_window_are_what_is_visible():
    config = small()
    draft = random_draft(config)
    f, block = features_and_block(config, 60, 4)
    bounded, picked = draft.make_cache(sink=3, window=8), draft.make_cache()
    for a in range(0, 60, 7): draft.extend(mx.array(f[a:a + 7])[None], bounded)
    kept = [0, 1, 2, *range(52, 60)]
    draft.extend(mx.array(f[kept])[None], picked, kept)
    assert gap(draft.forward(mx.array(block)[None], None, bounded), draft.forward(mx.array(block)[None], None, picked)) < 1e-5
    longer = draft.make_cache(sink=64, window=1024)                           # a sink longer than the prompt
    draft.extend(mx.array(f)[None], longer)
    assert gap(draft.forward(mx.array(block)[None], None, longer), draft.forward(mx.array(block)[None], mx.array(f)[None])) == 0


def test_batch_rows_are_independent():
    config = small(layer_types=['full_attention', 'sliding_attention'], sliding_window=6)
    draft = random_draft(config)
    pairs = [features_and_block(config, 12, 5, seed) for seed in range(3)]
    f, blocks = mx.array(np.stack([p[0] for p in pairs])), mx.array(np.stack([p[1] for p in pairs]))
    together = draft.forward(blocks, f)
    for i in range(3): assert gap(together[i:i + 1], draft.forward(blocks[i:i + 1], f[i:i + 1])) < 1e-5


# ---------------------------------------------------------------- training

@pytest.mark.parametrize('shape', ['full', 'sliding', 'sliding and full, both ways', 'full, causal', 'yarn'])
def test_training_forward_equals_inference(shape):
    config = small(**SHAPES[shape])
    draft, T, anchors = random_draft(config), 30, [[0, 3, 4, 4, 29], [30, 8, 9, 2, 1]]        # overlapping, repeated, at both ends
    f = mx.random.normal((2, T, 3 * H), key=mx.random.key(0))
    blocks = mx.random.normal((2, 5, 5, H), key=mx.random.key(1))
    together = draft.forward_training(blocks, f, mx.array(anchors))
    for b in range(2):
        for i, a in enumerate(anchors[b]):
            context = f[b:b + 1, :a] if a else None
            assert gap(together[b, i], draft.forward(blocks[b:b + 1, i], context)[0]) < 1e-5, (b, i)


def test_training_mask_and_gradients():
    draft, T = random_draft(small(layer_types=['full_attention', 'sliding_attention'], sliding_window=6)), 20
    f, blocks = mx.random.normal((1, T, 3 * H), key=mx.random.key(0)), mx.random.normal((1, 2, 5, H), key=mx.random.key(1))
    anchors, mask = mx.array([[9, 15]]), np.ones((1, 2, T), bool)
    mask[0, 1, :11] = False                                                                   # the second block's document begins at 11
    masked = draft.forward_training(blocks, f, anchors, mx.array(mask))
    other = mx.concatenate([f[:, :11] + 1, f[:, 11:]], axis=1)
    assert mx.array_equal(draft.forward_training(blocks, other, anchors, mx.array(mask))[:, 1], masked[:, 1])
    assert gap(draft.forward_training(blocks, other, anchors, mx.array(mask))[:, 0], masked[:, 0]) > 1e-4
    wanted = mx.random.normal(masked.shape, key=mx.random.key(3))
    loss = lambda w: (draft.update(dict(fc=dict(weight=w))) and 0) or (draft.forward_training(blocks, f, anchors) * wanted).sum()
    w, d = draft.fc.weight, 1e-3 * mx.random.normal(draft.fc.weight.shape, key=mx.random.key(4))
    slope, measured = (mx.grad(loss)(w) * d).sum().item(), ((loss(w + d) - loss(w - d)) / 2).item()
    assert abs(slope - measured) < 2e-2 * max(abs(slope), 1e-2)
    through = mx.grad(lambda f: draft.forward_training(blocks, f, anchors)[:, 0].sum())(f)
    assert mx.abs(through[:, 9:]).max().item() == 0 and mx.abs(through[:, :9]).min().item() > 0      # the anchor's feature, and all after it, are not seen


def test_the_target_is_neither_trained_nor_saved(tmp_path):
    target = tiny_model('llama')
    draft = tiny_draft(target)
    before = {n: np.array(a) for n, a in tree_flatten(target.parameters())}
    grads = nn.value_and_grad(draft, lambda m: m.propose(3, mx.ones((1, 4, 128))).sum())(draft)[1]
    names = {n for n, _ in tree_flatten(grads)}
    assert names == {n for n, _ in tree_flatten(draft.parameters())} == {n for n, _ in tree_flatten(draft.trainable_parameters())}
    assert not any('embed' in n or 'head' in n for n in names)
    draft.update({'fc': {'weight': draft.fc.weight + 1}})
    save_dflash(draft, tmp_path / 'd')
    assert set(mx.load(str(tmp_path / 'd' / 'model.safetensors'))) == names
    for n, a in tree_flatten(target.parameters()): assert np.array_equal(before[n], np.array(a))


# ---------------------------------------------------------------- features

def one_hot_target():
    "A target that repeats its token for ever. Its first layer shows the token's right neighbour instead; its second layer, the last, the token itself."
    V = 15
    m = tiny_model('llama', hidden_size=16, num_hidden_layers=2, intermediate_size=16, num_attention_heads=1, num_key_value_heads=1, head_dim=16, vocab_size=V, tie_word_embeddings=True)
    shift = np.roll(np.eye(V), 1, axis=0)                                     # shift @ e(t) = e(t + 1)
    wide = lambda a: mx.array(np.pad(a, ((0, 16 - a.shape[0]), (0, 16 - a.shape[1]))).astype(np.float32))
    m.model.embed_tokens.weight = mx.array(np.concatenate([np.eye(V), np.ones((V, 1))], axis=1).astype(np.float32))       # a last column of ones, for a constant
    gate = np.zeros((16, 16)); gate[:, 15] = 10.0
    for layer, map, strength in zip(m.layers, (shift, shift.T), (3.0, 40.0)):
        layer.self_attn.o_proj.weight = mx.zeros((16, 16))
        layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight = mx.array(gate.astype(np.float32)), wide(map)
        layer.mlp.down_proj.weight = mx.array((strength * np.diag([1.] * V + [0.])).astype(np.float32)) / 20
        layer.input_layernorm.weight = layer.post_attention_layernorm.weight = mx.ones(16)
    m.model.norm.weight = mx.array([1.] * V + [0.])
    return m


def test_features_are_outputs_of_the_layers_named():
    "A draft that copies the context's features to its output: all accepted when it reads the last layer, none when it reads the one before."
    target = one_hot_target()
    assert (target(mx.array([[4, 4, 4]])).argmax(-1) == 4).all().item()
    accepted = {}
    for layer in (0, 1):
        draft = make_draft(target, n_layers=1, block_size=6, target_layer_ids=[layer], mask_token_id=14, num_attention_heads=1, num_key_value_heads=1, head_dim=16)
        eye, none = mx.eye(16), mx.zeros((16, 16))
        weights = {n: mx.ones(a.shape) for n, a in tree_flatten(draft.parameters())} | {
            'fc.weight': eye, 'layers.0.self_attn.q_proj.weight': none, 'layers.0.self_attn.k_proj.weight': none, 'layers.0.self_attn.v_proj.weight': eye,
            'layers.0.self_attn.o_proj.weight': 50 * mx.diag(mx.array([1.] * 15 + [0.])), 'layers.0.mlp.down_proj.weight': none, 'norm.weight': mx.array([1.] * 15 + [0.])}
        draft.load_weights([(n, a) for n, a in weights.items() if n in dict(tree_flatten(draft.parameters()))])
        _, _, hidden = forward_with_hidden_states(target, mx.array([[4] * 20]), capture_layers=draft.config.target_layer_ids)
        proposed = draft.propose(4, draft.features(hidden)).argmax(-1)[0]
        own = target(mx.concatenate([mx.array([[4]]), proposed[None]], axis=1))[0, :-1].argmax(-1)
        accepted[layer] = int((own == proposed).cumprod(0).sum())
    assert accepted == {0: 0, 1: 5}


@pytest.mark.parametrize('family', TINY_FAMILIES)
def test_features_of_every_family(family):
    target = tiny_model(family)
    draft = tiny_draft(target, n_layers=3)
    tokens = mx.random.randint(0, 500, (1, 24), key=mx.random.key(0))
    _, _, hidden = forward_with_hidden_states(target, tokens, capture_layers=draft.config.target_layer_ids)
    whole = draft.propose(5, draft.features(hidden))
    cache, context = make_prompt_cache(target), draft.make_cache()
    for a in range(0, 24, 7):
        _, _, part = forward_with_hidden_states(target, tokens[:, a:a + 7], cache, draft.config.target_layer_ids)
        draft.extend(draft.features(part), context)
        mx.eval(context.state)
    assert gap(whole, draft.propose(5, None, context)) < 1e-3 and context.offset == 24


# ---------------------------------------------------------------- tables of the target

def test_tables_are_found_whatever_they_are_called():
    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe, self.layers = nn.Embedding(40, 8), nn.Embedding(16, 8), [nn.Linear(8, 40)]
    class Untied(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.output = GPT(), nn.Linear(8, 40, bias=False)
        @property
        def layers(self): return self.model.layers
    gpt, untied = GPT(), Untied()
    assert embedding_and_head(gpt)[0] is gpt.wte and gap(embedding_and_head(gpt)[1](mx.ones((1, 8))), gpt.wte.as_linear(mx.ones((1, 8)))) == 0
    assert embedding_and_head(untied) == (untied.model.wte, untied.output)
    untied.second = nn.Linear(8, 40)
    with pytest.raises(ValueError, match='Untied has 2 linear maps to its 40 tokens'): embedding_and_head(untied)


def test_quantised_target():
    target = tiny_model('qwen3')
    plain = tiny_draft(target)
    f = mx.random.normal((1, 6, 128))
    wanted = plain.propose(3, f)
    nn.quantize(target, group_size=32, bits=8)
    draft = DFlashDraftModel(plain.config).bind(target)
    draft.update(plain.parameters())
    assert type(embedding_and_head(target)[0]) is nn.QuantizedEmbedding and 0 < gap(draft.propose(3, f), wanted) < 0.5 * np.abs(np.array(wanted)).max()


def test_dtypes_follow_the_target(tmp_path):
    target = tiny_model('llama', dtype=mx.bfloat16)
    draft = make_draft(target)
    assert {a.dtype for _, a in tree_flatten(draft.parameters())} == {mx.bfloat16}
    cache = draft.make_cache()
    out = draft.propose(3, mx.ones((1, 4, 128), mx.float32), cache)
    assert out.dtype == mx.bfloat16 and cache.rows[0].keys.dtype == mx.bfloat16
    save_dflash(draft, tmp_path / 'd')
    assert load_dflash(tmp_path / 'd', target).dtype == mx.bfloat16
    assert load_dflash(tmp_path / 'd', tiny_model('llama')).dtype == mx.float32
    assert load_dflash(tmp_path / 'd', target, dtype=mx.float16).propose(3).dtype == mx.bfloat16          # the head is the target's


def test_scales_cap_and_the_rows_that_are_proposed():
    target = tiny_model('llama')
    plain, f = tiny_draft(target), mx.random.normal((1, 6, 128))
    scaled = tiny_draft(target, input_embedding_scale=3.0, output_multiplier=0.2, final_logit_softcapping=4.0)
    table, head = (np.array(a, np.float64) for a in (target.model.embed_tokens.weight, target.lm_head.weight if 'lm_head' in target else target.model.embed_tokens.weight))
    for draft, scale, multiplier, cap in ((plain, 1, 1, None), (scaled, 3, 0.2, 4)):
        reference = Reference(draft)
        reference.extend(np.array(f[0], np.float64))
        logits = reference.forward(scale * table[[7, 511, 511, 511, 511, 511, 511, 511]]) @ head.T * multiplier
        wanted = logits if cap is None else cap * np.tanh(logits / cap)
        assert gap(draft.propose(7, f)[0], wanted[1:]) < 1e-4 and gap(draft(draft.block(7), f)[0], wanted) < 1e-4
        assert gap(draft.propose(7, f, block_size=3)[0], draft(draft.block(7, 3), f)[0, 1:]) < 1e-4


@pytest.mark.parametrize('changes, message', [
    (dict(num_hidden_layers=3), 'num_target_layers 4; Model has 3'), (dict(vocab_size=300), 'vocab_size 512; Model has 300'), (dict(hidden_size=32), 'hidden_size 64; Model has 32')])
def test_a_draft_for_another_target_is_refused(changes, message):
    with pytest.raises(ValueError, match=message): DFlashDraftModel(make_draft(tiny_model('llama')).config).bind(tiny_model('llama', **changes))


# ---------------------------------------------------------------- the cache

@given(st.lists(st.tuples(st.sampled_from(['append', 'trim', 'copy']), st.integers(0, 40)), max_size=30), st.sampled_from([None, 3, 20]), st.sampled_from([None, 5]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_cache_is_a_list_of_rows(steps, sliding, bound, fixed):
    "Against a plain list. Key and value rows are told apart by their numbers."
    config = small(head_dim=2, **(dict(layer_types=['full_attention', 'sliding_attention'], sliding_window=sliding) if sliding else {}))
    cache, spec, copies, number = DraftCache(config, sink=2, window=bound, step=8, fixed=fixed), [], [], 0
    for what, n in steps:
        if what == 'append' and n:
            k = mx.arange(number, number + n, dtype=mx.float32).reshape(1, 1, n, 1) * mx.ones((1, 2, n, 2))
            cache.append([(k, -k)] * 2, cache.offset + np.arange(n))
            spec, number = spec + list(range(number, number + n)), number + n
        elif what == 'trim':
            most = min(r.trimmable() for r in cache.rows)
            if n <= most: cache.trim(n); spec = spec[:len(spec) - n]
            else:
                with pytest.raises(ValueError, match=f'cannot trim {n} tokens: 0 to {most}'): cache.trim(n)
        elif what == 'copy': copies.append((cache.copy(), list(spec)))
    for cache, spec in [*copies, (cache, spec)]:
        assert cache.offset == cache.tokens() == len(spec)
        for r in cache.rows:
            assert len(r.positions) == len(spec) - r.dropped
            if (pair := r.fetch()) is None: continue
            assert not fixed or pair[0].shape[2] % 8 == 0
            keys, values = (np.array(a[0, 0, :len(r.positions) if fixed else None, 0]).astype(int) for a in pair)
            kept = spec[:r.sink] + spec[len(spec) - (len(r.positions) - min(r.sink, len(spec))):] if r.dropped else spec
            assert keys.tolist() == kept and (-values).tolist() == kept
            assert r.recent is None or len(kept) >= min(len(spec), r.recent)


@pytest.mark.parametrize('bound', [dict(), dict(sink=3, window=10)])
def test_trim_is_exact_to_the_last_row_that_can_be_trimmed(bound):
    config = small(num_hidden_layers=2, layer_types=['sliding_attention', 'full_attention'], sliding_window=9)
    draft, (f, block) = random_draft(config), features_and_block(small(), 500, 4)
    cache = draft.make_cache(**bound)
    for a in range(0, 500, 20): draft.extend(mx.array(f[None, a:a + 20]), cache)
    assert all(r.keys.shape[2] <= len(r.positions) + 256 for r in cache.rows)                  # one step of room, no more
    most = min(r.trimmable() for r in cache.rows)
    assert SPARE <= most < 500 - 64
    with pytest.raises(ValueError, match=f'cannot trim {most + 1} tokens: 0 to {most}'): cache.trim(most + 1)
    assert cache.tokens() == 500 and cache.trim(most) == most
    fresh = draft.make_cache(**bound)
    draft.extend(mx.array(f[None, :500 - most]), fresh)
    assert gap(draft.forward(mx.array(block)[None], None, cache), draft.forward(mx.array(block)[None], None, fresh)) < 1e-5


def test_memory_is_bounded_and_nothing_of_a_block_stays():
    target = tiny_model('llama')
    draft = tiny_draft(target, layer_types=['sliding_attention'] * 2, sliding_window=16)
    cache, sizes = draft.make_cache(), []
    for i in range(200):
        mx.eval(draft.propose(i, mx.random.normal((1, 1 + i % 8, 128)), cache))
        sizes.append((cache.nbytes, mx.get_active_memory()))
    assert cache.tokens() == cache.offset == sum(1 + i % 8 for i in range(200))
    assert max(s for s, _ in sizes[100:]) <= max(s for s, _ in sizes[:100]) and cache.size() <= 15 + SPARE + 256 + 8
    assert sizes[-1][1] - sizes[100][1] < 200_000


def test_two_requests_interleave_and_threads_work():
    target = tiny_model('qwen3_5')
    draft, results = tiny_draft(target), {}
    width = len(draft.config.target_layer_ids) * 64
    f = {name: mx.random.normal((1, 12, width), key=mx.random.key(i)) for i, name in enumerate('ab')}
    mx.eval(list(f.values()))
    alone = {name: draft.propose(3, f[name]) for name in f}
    caches = {name: draft.make_cache() for name in f}
    for at in range(0, 12, 3):
        for name in f: draft.extend(f[name][:, at:at + 3], caches[name])
    for name in f: assert gap(draft.propose(3, None, caches[name]), alone[name]) < 1e-4
    def work(name): results[name] = np.array(draft.propose(3, f[name], draft.make_cache()))
    mx.eval(list(alone.values()))
    threads = [threading.Thread(target=work, args=(name,)) for name in f]
    for t in threads: t.start()
    for t in threads: t.join()
    for name in f: assert gap(results[name], alone[name]) < 1e-4


# ---------------------------------------------------------------- configurations

QWEN3 = dict(architectures=['DFlashDraftModel'], model_type='qwen3', dtype='bfloat16', hidden_act='silu', attention_bias=False, attention_dropout=0.0, rms_norm_eps=1e-6, head_dim=128,
             num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True, auto_map={'AutoModel': 'dflash.DFlashDraftModel'}, initializer_range=0.02, eos_token_id=151645)
OLD = dict(QWEN3, vocab_size=151936, max_position_embeddings=40960, rope_theta=1000000, rope_scaling=None, sliding_window=None, use_sliding_window=False, max_window_layers=5,
           num_hidden_layers=5, layer_types=['full_attention'] * 5, num_target_layers=36, block_size=16, dflash_config=dict(mask_token_id=151669, target_layer_ids=[1, 9, 17, 25, 33]))
NEW = dict(QWEN3, vocab_size=248320, max_position_embeddings=262144, rope_parameters=dict(rope_type='default', rope_theta=10000000))
PUBLISHED = {   # the shapes of published configs, with what each must be read as
    'Qwen3-4B b16': (dict(OLD, hidden_size=2560, intermediate_size=9728), dict(block_size=16, rope_theta=1000000, num_target_layers=36)),
    'Qwen3-8B b16': (dict(OLD, hidden_size=4096, intermediate_size=12288), dict(target_layer_ids=[1, 9, 17, 25, 33], mask_token_id=151669)),
    'LLaMA3.1-8B b10': (dict(OLD, hidden_size=4096, intermediate_size=14336, block_size=10, num_target_layers=32, vocab_size=128256, rope_theta=500000,
                             rope_scaling=dict(rope_type='llama3', factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192),
                             dflash_config=dict(mask_token_id=128002)), dict(block_size=10, target_layer_ids=[1, 8, 15, 22, 29])),
    'Qwen3.5-4B': (dict(NEW, hidden_size=2560, intermediate_size=9728, num_hidden_layers=5, num_target_layers=32, block_size=16,
                        dflash_config=dict(mask_token_id=248070, target_layer_ids=[1, 8, 15, 22, 29])), dict(rope_theta=10000000, layer_types=['full_attention'] * 5, rope_scaling=None)),
    'Qwen3.5-27B': (dict(NEW, hidden_size=5120, intermediate_size=17408, num_hidden_layers=6, num_target_layers=64, layer_types=['sliding_attention'] * 5 + ['full_attention'],
                         sliding_window=4096, dflash_config=dict(block_size=16, mask_token_id=248070, target_layer_ids=[1, 16, 31, 46, 61])),
                    dict(sliding_window=4096, is_causal=None)),
    'Qwen3.5-122B': (dict(NEW, hidden_size=3072, intermediate_size=9216, num_hidden_layers=6, use_sliding_window=True, sliding_window=4096, tie_word_embeddings=False,
                          dflash_config=dict(block_size=16, mask_token_id=248077, target_layer_ids=[1, 7, 14, 20, 26, 32, 39, 45])),
                     dict(num_target_layers=None, block_size=16, layer_types=['full_attention'] * 6)),
    'sliding by count': (dict(NEW, hidden_size=3072, intermediate_size=9216, num_hidden_layers=4, use_sliding_window=True, sliding_window=4096, max_window_layers=1,
                              dflash_config=dict(block_size=8, mask_token_id=7, target_layer_ids=[1])), dict(layer_types=['full_attention'] + ['sliding_attention'] * 3)),
    'causal inside': (dict(NEW, hidden_size=3072, intermediate_size=9216, num_hidden_layers=1, dflash_config=dict(causal=False, block_size=8, mask_token_id=7, target_layer_ids=[1])), dict(is_causal=False)),
    'yarn': (dict(NEW, hidden_size=2880, intermediate_size=7680, num_hidden_layers=8, block_size=8, mask_token_id=200019, num_target_layers=24, target_layer_ids=[1, 11, 21],
                  rope_parameters=dict(rope_type='yarn', rope_theta=150000, factor=32.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0)),
             dict(rope_theta=150000, rope_scaling=dict(rope_type='yarn', factor=32.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0), mask_token_id=200019)),
    'scaled and capped': (dict(NEW, hidden_size=6656, intermediate_size=19968, num_hidden_layers=5, is_causal=False, vocab_size=202048, rope_parameters=dict(rope_theta=500000),
                               dflash_config=dict(block_size=16, mask_token_id=201818, target_layer_ids=[1, 13, 25, 37, 49], final_logit_softcapping=20, output_multiplier=0.196)),
                          dict(output_multiplier=0.196, final_logit_softcapping=20, is_causal=False)),
    'flat, as older converters write it': ({k: v for k, v in dict(OLD, hidden_size=4096, intermediate_size=12288, mask_token_id=151669, target_layer_ids=[2, 9, 17, 25, 33]).items()
                                            if k not in ('architectures', 'dflash_config', 'layer_types')}, dict(target_layer_ids=[2, 9, 17, 25, 33])),
}


@pytest.mark.parametrize('name', PUBLISHED)
def test_published_shapes_are_read_and_survive(name):
    source, wanted = PUBLISHED[name]
    config = DFlashConfig.from_dict(source)
    for k, v in wanted.items(): assert getattr(config, k) == v, k
    again = json.loads(json.dumps(config.to_dict()))
    assert DFlashConfig.from_dict(again) == config
    inside = source.get('dflash_config', {})
    for k, v in {**source, **inside}.items():                                 # no value is lost, wherever it was
        if k in ('dflash_config', 'rope_parameters', 'causal') or v is None: continue
        assert again.get(k, again['dflash_config'].get(k)) == v, k
    assert again['dflash_config']['mask_token_id'] == config.mask_token_id == again['mask_token_id'] and again['rope_theta'] == again['rope_parameters']['rope_theta']


COMPLETE = PUBLISHED['Qwen3-8B b16'][0]
REQUIRED = ('hidden_size', 'num_hidden_layers', 'intermediate_size', 'num_attention_heads', 'num_key_value_heads', 'head_dim', 'rms_norm_eps', 'vocab_size', 'rope_theta', 'block_size')


@pytest.mark.parametrize('key', REQUIRED)
def test_a_missing_key_is_named(key):
    for gone in ({k: v for k, v in COMPLETE.items() if k != key}, {**COMPLETE, key: None}):
        with pytest.raises(ValueError, match=f'the config has no {key}'): DFlashConfig.from_dict(gone)


def test_missing_inside_is_named():
    with pytest.raises(ValueError, match='the config has no mask_token_id, neither'): DFlashConfig.from_dict({**COMPLETE, 'dflash_config': {}})
    with pytest.raises(ValueError, match='the config has no target_layer_ids'): DFlashConfig.from_dict({**{k: v for k, v in COMPLETE.items() if k != 'num_target_layers'}, 'dflash_config': dict(mask_token_id=1)})


@pytest.mark.parametrize('changes, message', [
    (dict(architectures=['DFlash2DraftModel']), 'DFlash2DraftModel'), (dict(architectures=['Qwen3ForCausalLM']), 'Qwen3ForCausalLM'), (dict(architectures=['DFlashLagunaForCausalLM']), 'Laguna'),
    (dict(selector_rank=256), 'the config has selector_rank'), (dict(quantization_config=dict(quant_method='gptq')), 'quantization_config'), (dict(speculators_model_type='dflash'), 'speculators'),
    (dict(dflash_config=dict(COMPLETE['dflash_config'], projector_type='dspark')), 'dflash_config has projector_type'), (dict(dflash_config=dict(COMPLETE['dflash_config'], attention_mode='mla')), "attention_mode is 'mla'"),
    (dict(hidden_act='gelu'), "hidden_act is 'gelu'"), (dict(draft_vocab_size=32000), 'draft_vocab_size is 32000'), (dict(target_hidden_size=8192), 'target_hidden_size is 8192'),
    (dict(rope_parameters=dict(rope_theta=5)), 'rope_theta is 1000000 at the top level but 5'), (dict(rope_parameters=dict(rope_type='default', partial_rotary_factor=.25)), 'partial_rotary_factor'),
    (dict(rope_scaling=dict(rope_type='longrope', factor=2)), "type 'longrope'"), (dict(rope_scaling=dict(rope_type='yarn', factor=2)), "'yarn' has no original_max_position_embeddings"),
    (dict(rope_scaling=dict(rope_type='linear', factor=2, attention_factor=1.2)), 'has attention_factor'),
    (dict(layer_types=['full_attention'] * 4 + ['chunked_attention']), "'chunked_attention'"), (dict(layer_types=['sliding_attention'] * 5), 'sliding_window is None'),
    (dict(num_key_value_heads=5), 'num_attention_heads is 32'), (dict(head_dim=127), 'head_dim is 127'), (dict(block_size=1), 'block_size is 1'), (dict(hidden_size=-1), 'hidden_size is -1'),
    (dict(dflash_config=dict(mask_token_id=151936)), 'mask_token_id is 151936'), (dict(dflash_config=dict(mask_token_id=5, target_layer_ids=[1, 36])), 'target_layer_ids has 36: the target has layers 0 to 35'),
    (dict(dflash_config=dict(mask_token_id=5, target_layer_ids=[])), 'target_layer_ids is empty'), (dict(output_multiplier=0), 'output_multiplier is 0'), (dict(final_logit_softcapping=-1), 'final_logit_softcapping is -1')])
def test_what_is_not_understood_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message): DFlashConfig.from_dict({**COMPLETE, **changes})


def test_from_file_and_default_layers(tmp_path):
    (tmp_path / 'config.json').write_text(json.dumps(COMPLETE))
    assert DFlashConfig.from_file(tmp_path) == DFlashConfig.from_file(tmp_path / 'config.json') == DFlashConfig.from_dict(COMPLETE)
    assert default_target_layers(32, 5) == [1, 8, 15, 22, 29] and default_target_layers(40, 5) == [1, 10, 19, 28, 37]
    for n in range(1, 12):
        for d in range(1, n + 1):
            ids = dflash._spread(n, d)
            assert len(set(ids)) == d and ids == sorted(ids) and 0 <= ids[0] and ids[-1] < n
    with pytest.raises(ValueError, match='0 feature layers'): dflash._spread(4, 0)


@given(st.integers(0, 60), st.integers(1, 8), st.integers(1, 9), st.booleans())
@settings(max_examples=40, deadline=None)
def test_visible_is_the_same_in_loops(start, S, window, causal):
    queries, keys = np.arange(start, start + S), np.arange(max(0, start - 12), start + S)
    loops = [[abs(q - k) < window and not (causal and k > q) for k in keys] for q in queries]
    assert visible(queries, keys, window, causal).tolist() == visible(mx.array(queries), mx.array(keys), window, causal).tolist() == loops


# ---------------------------------------------------------------- files

@pytest.fixture
def checkpoint(tmp_path):
    "A published-looking folder in two shards, with an index, a tokenizer and stray keys; and the draft it was made from."
    target = tiny_model('llama')
    draft = tiny_draft(target)
    folder, weights = tmp_path / 'source', dict(tree_flatten(draft.parameters()))
    folder.mkdir()
    names = sorted(weights)
    shards = {'model-00001-of-00002.safetensors': names[:9], 'model-00002-of-00002.safetensors': names[9:]}
    for file, part in shards.items(): mx.save_safetensors(str(folder / file), {n: weights[n] for n in part})
    (folder / 'model.safetensors.index.json').write_text(json.dumps(dict(weight_map={n: file for file, part in shards.items() for n in part})))
    (folder / 'config.json').write_text(json.dumps({**draft.config.to_dict(), 'dtype': 'float32', 'auto_map': {'AutoModel': 'x'}, 'pad_token_id': 3}))
    for name in ('tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json', 'merges.txt', 'chat_template.jinja', 'README.md', 'dflash.py'): (folder / name).write_text(name)
    return SimpleNamespace(folder=folder, draft=draft, target=target, weights=weights, out=tmp_path / 'out')


def test_convert_shards_dtype_tokenizer_config(checkpoint):
    convert_dflash_to_mlx(checkpoint.folder, checkpoint.out)
    assert sorted(f.name for f in checkpoint.out.iterdir()) == ['chat_template.jinja', 'config.json', 'merges.txt', 'model.safetensors', 'special_tokens_map.json', 'tokenizer.json', 'tokenizer_config.json']
    got = mx.load(str(checkpoint.out / 'model.safetensors'))
    for n, a in checkpoint.weights.items(): assert mx.array_equal(got[n], a.astype(mx.bfloat16)) and got[n].dtype == mx.bfloat16
    config = json.loads((checkpoint.out / 'config.json').read_text())
    assert (config['auto_map'], config['pad_token_id'], config['dtype']) == ({'AutoModel': 'x'}, 3, 'bfloat16')
    assert replace(DFlashConfig.from_file(checkpoint.out), extra={}) == checkpoint.draft.config
    f = mx.random.normal((1, 5, 128))
    assert 0 < gap(load_dflash(checkpoint.out, checkpoint.target).propose(3, f), checkpoint.draft.propose(3, f)) < 0.3
    convert_dflash_to_mlx(checkpoint.folder, checkpoint.out, dtype=None)                       # replaced, exactly
    assert mx.array_equal(load_dflash(checkpoint.out, checkpoint.target).propose(3, f), checkpoint.draft.propose(3, f))


@pytest.mark.parametrize('bits', [4, 8, dict(bits=8, group_size=32)])
def test_quantised_checkpoints(checkpoint, bits):
    convert_dflash_to_mlx(checkpoint.folder, checkpoint.out, dtype=None, quantize=bits)
    raw = mx.load(str(checkpoint.out / 'model.safetensors'))
    assert raw['fc.weight'].dtype == mx.uint32 and raw['norm.weight'].dtype == mx.float32
    draft, _ = dflash._read_draft(checkpoint.out)
    f = mx.random.normal((1, 5, 128))
    quantised, loaded = draft.bind(checkpoint.target).propose(3, f), load_dflash(checkpoint.out, checkpoint.target)
    assert gap(quantised, loaded.propose(3, f)) < 1e-3                                         # expanded on a CPU or not
    save_dflash(loaded, checkpoint.out)                                                        # and what is saved says what it is
    assert gap(load_dflash(checkpoint.out, checkpoint.target).propose(3, f), loaded.propose(3, f)) < 1e-5
    save_dflash(draft, checkpoint.out)
    assert 'quantization' in json.loads((checkpoint.out / 'config.json').read_text())
    with pytest.raises(ValueError, match='is quantised already'): convert_dflash_to_mlx(checkpoint.out, checkpoint.folder.parent / 'again', quantize=4)
    with pytest.raises(ValueError, match='nothing can be quantised in groups of 128'): convert_dflash_to_mlx_of(make_draft(checkpoint.target, n_layers=1, n_features=1), checkpoint.folder.parent)


def convert_dflash_to_mlx_of(draft, folder):
    save_dflash(draft, folder / 'one')
    convert_dflash_to_mlx(folder / 'one', folder / 'one-q', quantize=dict(bits=4, group_size=128))


def test_weights_that_do_not_fit(checkpoint):
    folder, weights = checkpoint.folder, checkpoint.weights
    (folder / 'model-00002-of-00002.safetensors').rename(folder / 'gone')
    with pytest.raises(ValueError, match='lists model-00002-of-00002.safetensors, which is not there'): load_dflash(folder)
    for f in folder.glob('model*'): f.unlink()
    def only(**changes): mx.save_safetensors(str(folder / 'model.safetensors'), {n: a for n, a in {**weights, **changes}.items() if a is not None})
    only(**{'lm_head.weight': mx.zeros((2, 2))})
    with pytest.raises(ValueError, match='holds lm_head.weight'): load_dflash(folder)
    only(**{'fc.weight': None})
    with pytest.raises(ValueError, match='lacks fc.weight'): load_dflash(folder)
    only(**{'norm.weight': mx.zeros(5)})
    with pytest.raises(ValueError, match=r'norm.weight has shape \(5,\)'): load_dflash(folder)
    mx.save_safetensors(str(folder / 'model.safetensors'), {f'model.{n}': a for n, a in weights.items()})       # a prefix that some exports have
    assert mx.array_equal(load_dflash(folder, checkpoint.target).fc.weight, weights['fc.weight'])
    mx.save_safetensors(str(folder / 'second.safetensors'), {'model.fc.weight': weights['fc.weight']})
    with pytest.raises(ValueError, match='second.safetensors holds model.fc.weight, as another file'): load_dflash(folder)


def test_torch_files(checkpoint, monkeypatch):
    "With a stand-in for torch: bfloat16 goes through float32, files are loaded without running code."
    for f in checkpoint.folder.glob('model*'): f.unlink()
    (checkpoint.folder / 'pytorch_model.bin').write_bytes(b'x')
    monkeypatch.setitem(sys.modules, 'torch', None)
    with pytest.raises(ImportError, match='pytorch_model.bin is a torch file: install torch'): load_dflash(checkpoint.folder)
    class Tensor:
        def __init__(self, a, dtype): self.a, self.dtype = a, dtype
        def float(self): return Tensor(self.a.astype(np.float32), 'float32')
        def numpy(self): assert self.dtype == 'float32'; return self.a
    asked = {}
    def torch_load(path, **kwargs): asked.update(kwargs); return {n: Tensor(np.array(a), 'bf16' if n == 'fc.weight' else 'float32') for n, a in checkpoint.weights.items()}
    monkeypatch.setitem(sys.modules, 'torch', SimpleNamespace(load=torch_load, bfloat16='bf16'))
    draft, _ = dflash._read_draft(checkpoint.folder)
    assert asked['weights_only'] is True and draft.fc.weight.dtype == mx.bfloat16 and mx.array_equal(draft.norm.weight, checkpoint.weights['norm.weight'])


def test_hub_names(checkpoint, monkeypatch):
    calls = []
    monkeypatch.setattr(dflash, 'find_model', lambda name, **k: str(name))
    monkeypatch.setattr(dflash.mlx_lm.utils, 'snapshot_download', lambda name, revision, allow_patterns: calls.append((name, revision, '*.bin' in allow_patterns)) or str(checkpoint.folder))
    load_dflash('someone/a-draft', revision='v2')
    assert calls == [('someone/a-draft', 'v2', False)]                                        # torch files are fetched only when there is nothing else
    for f in checkpoint.folder.glob('model*'): f.unlink()
    with pytest.raises(ValueError, match='holds no weights'): load_dflash('someone/a-draft')
    assert calls[1:] == [('someone/a-draft', None, False), ('someone/a-draft', None, True)]


def test_a_name_that_is_nothing(tmp_path):
    with pytest.raises(ValueError, match="cannot load 'no-such-draft'"): load_dflash('no-such-draft')
    with pytest.raises(ValueError, match='without a config.json'): load_dflash(tmp_path)


def test_folders_are_whole_or_not_there(checkpoint, monkeypatch):
    out, parent = checkpoint.out, checkpoint.out.parent
    def full(*a, **k): raise OSError('No space left on device')
    with monkeypatch.context() as m:
        m.setattr(dflash.mx, 'save_safetensors', full)
        with pytest.raises(OSError, match='No space'): convert_dflash_to_mlx(checkpoint.folder, out)
    assert not out.exists() and sorted(f.name for f in parent.iterdir()) == ['source']
    save_dflash(checkpoint.draft, out)
    before = {f.name: f.read_bytes() for f in out.iterdir()}
    with monkeypatch.context() as m:
        m.setattr(dflash.mx, 'save_safetensors', full)
        with pytest.raises(OSError): save_dflash(tiny_draft(checkpoint.target, seed=1), out)
    replace_ = dflash.os.replace
    with monkeypatch.context() as m:                                                          # the last step fails
        m.setattr(dflash.os, 'replace', lambda a, b: full() if str(a).endswith('new') else replace_(a, b))
        with pytest.raises(OSError): save_dflash(tiny_draft(checkpoint.target, seed=1), out)
    assert before == {f.name: f.read_bytes() for f in out.iterdir()} and sorted(f.name for f in parent.iterdir()) == ['out', 'source']
    (out / 'optimizer.npz').write_bytes(b'')
    with pytest.raises(ValueError, match='holds optimizer.npz'): save_dflash(checkpoint.draft, out)
    (parent / 'file').write_text('')
    with pytest.raises(ValueError, match='holds file'): save_dflash(checkpoint.draft, parent / 'file')


def test_making_a_draft_leaves_the_random_state_alone(checkpoint):
    mx.random.seed(5)
    before = mx.random.state[0].tolist()
    make_draft(checkpoint.target); tiny_draft(checkpoint.target); load_dflash(checkpoint.folder, checkpoint.target)
    assert mx.random.state[0].tolist() == before


def test_mask_token():
    target = tiny_model('llama')
    class Token(str): special = True
    def tokenizer(**options):
        return SimpleNamespace(**{**dict(mask_token_id=None, get_vocab=lambda: {'a': 511}, eos_token_ids={1}, bos_token_id=0, pad_token_id=2, chat_template='<user> {}',
                                         added_tokens_decoder={i: Token(t) for i, t in enumerate(('<bos>', '<eos>', '<pad>', '<spare>', '<user>'))}), **options})
    mask_of = lambda **options: make_draft(target, tokenizer=tokenizer(**options)).config.mask_token_id
    assert mask_of() == 3                                                     # neither bos, eos, pad nor in the template
    assert mask_of(mask_token_id=7) == 7 and mask_of(get_vocab=lambda: {'a': 500}) == 501 and mask_of(chat_template=None) == 4
    assert make_draft(target).config.mask_token_id == 511 and make_draft(target, mask_token_id=3, tokenizer=tokenizer(mask_token_id=7)).config.mask_token_id == 3
    with pytest.raises(ValueError, match='all 512 tokens of SimpleNamespace are in use'): mask_of(added_tokens_decoder={})
    with pytest.raises(ValueError, match='mask_token_id is 512'): make_draft(target, mask_token_id=512)


def test_fields_of_the_config_are_what_the_chapter_says():
    assert [f.name for f in fields(DFlashConfig)][:12] == ['hidden_size', 'num_hidden_layers', 'intermediate_size', 'num_attention_heads', 'num_key_value_heads', 'head_dim', 'rms_norm_eps',
                                                           'vocab_size', 'rope_theta', 'block_size', 'mask_token_id', 'target_layer_ids']
