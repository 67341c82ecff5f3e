"Layers: a matrix over mlx-lm's families and dtypes, views that interleave, refusals by name."
import copy, importlib, threading
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from types import SimpleNamespace
from hypothesis import given, settings, strategies as st
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache
from vllm_mlx import layers
from vllm_mlx.layers import (_build_layer_to_cache_map, _find_attention_layers, _get_attn_module, _get_rope, _set_attn_module, _set_rope,
                             attention_layout, check_architecture, context_length, head_counts, model_view, text_model)
from vllm_mlx.models import TINY_FAMILIES, tiny_model
from vllm_mlx.rope import _OffsetAdjustedRoPE, _PositionMappedRoPE

BASE = dict(vocab_size=64, hidden_size=32, num_hidden_layers=4, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            rms_norm_eps=1e-5, layer_norm_eps=1e-5, rope_theta=10000., max_position_embeddings=4096, tie_word_embeddings=True)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True, num_local_experts=4)
GPT2 = dict(n_ctx=64, n_embd=32, n_head=4, n_layer=2, n_positions=64, n_inner=48, layer_norm_epsilon=1e-5)
MLA = dict(kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, moe_intermediate_size=16, n_routed_experts=None,
           n_shared_experts=None, n_group=1, topk_group=1, first_k_dense_replace=9)
SLIDING = dict(sliding_window=100, layer_types=['sliding_attention', 'full_attention'] * 2)
TEXT = {k: v for k, v in BASE.items() if k != 'head_dim'}

# families whose layers are all attention: (mlx-lm module, fields besides BASE)
ATTENTION_ONLY = {
    'cohere':        ('cohere', {}),
    'cohere2':       ('cohere2', dict(sliding_window=100)),
    'deepseek_v3':   ('deepseek_v3', MLA),
    'exaone4':       ('exaone4', dict(sliding_window=100, sliding_window_pattern='LLLG', rope_scaling=None)),
    'exaone':        ('exaone', dict(num_layers=2, layer_norm_epsilon=1e-5, rope_scaling=None)),
    'gemma':         ('gemma', {}),
    'gemma4':        ('gemma4_text', dict(num_kv_shared_layers=0, hidden_size_per_layer_input=0, global_head_dim=16, **SLIDING)),
    'glm4':          ('glm4', dict(attention_bias=True, partial_rotary_factor=0.5)),
    'gpt_neox':      ('gpt_neox', dict(rotary_pct=.25, rotary_emb_base=10000, use_parallel_residual=True)),
    'gptj':          ('gptj', dict(GPT2, rotary_dim=4)),
    'internlm2':     ('internlm2', {}),
    'minicpm':       ('minicpm', dict(dim_model_base=32, scale_depth=1., scale_emb=1.)),
    'olmo2':         ('olmo2', dict(attention_bias=False)),
    'phi':           ('phi', dict(partial_rotary_factor=.5)),
    'phi3':          ('phi3', dict(rope_scaling=None)),
    'phi3 longrope': ('phi3', dict(rope_scaling=dict(type='longrope', short_factor=[1.]*4, long_factor=[1., 2., 3., 4.]), original_max_position_embeddings=64)),
    'qwen':          ('qwen', dict(kv_channels=8, layer_norm_epsilon=1e-5)),
    'qwen2':         ('qwen2', {}),
    'qwen2_vl':      ('qwen2_vl', dict(text_config=dict(TEXT, model_type='qwen2'))),
    'qwen3_moe':     ('qwen3_moe', dict(decoder_sparse_step=1, mlp_only_layers=[], **MOE)),
    'stablelm':      ('stablelm', dict(partial_rotary_factor=.25, use_qkv_bias=False)),
    'starcoder2':    ('starcoder2', dict(norm_epsilon=1e-5)),
}
# families that mix attention with recurrent layers
HYBRID = {
    'lfm2':       ('lfm2', dict(norm_eps=1e-5, conv_bias=False, conv_L_cache=3, block_dim=32, block_ff_dim=48, block_multiple_of=16, block_ffn_dim_multiplier=1.,
                                block_auto_adjust_ff_dim=False, full_attn_idxs=[1, 3])),
    'qwen3_next': ('qwen3_next', dict(linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, linear_conv_kernel_dim=3,
                                      decoder_sparse_step=1, shared_expert_intermediate_size=16, mlp_only_layers=[], partial_rotary_factor=.5,
                                      full_attention_interval=2, **MOE)),
}
REFUSED = {
    'gpt2':         ('gpt2', GPT2, 'GPT2Model.wpe adds a learned embedding'),
    'gpt_bigcode':  ('gpt_bigcode', dict(GPT2, attention_bias=True, multi_query=True, num_key_value_heads=1), 'wpe adds a learned embedding'),
    'mamba2':       ('mamba2', dict(num_heads=4, state_size=8, conv_kernel=4, n_groups=1, layer_norm_epsilon=1e-5, use_conv_bias=True, use_bias=False,
                                    time_step_limit=(0., 1.), time_step_rank='auto'), 'no softmax-attention layer'),
    'ministral3':   ('ministral3', dict(rope_parameters=dict(rope_theta=1e4, rope_type='default', llama_4_scaling_beta=.1, original_max_position_embeddings=64)),
                     'something besides the RoPE'),
    'nanochat':     ('nanochat', {}, 'something besides the RoPE'),
    'phi3small':    ('phi3small', dict(ff_intermediate_size=48, dense_attention_every_n_layers=2, blocksparse_block_size=64, blocksparse_num_local_blocks=4,
                                       blocksparse_vert_stride=2, gegelu_limit=20., mup_attn_multiplier=1., mup_use_scaling=True, mup_embedding_multiplier=1.,
                                       mup_width_multiplier=1., rope_embedding_base=1e4, rope_position_scale=1., layer_norm_epsilon=1e-5), 'skips blocks of keys'),
    'gemma4 shared': ('gemma4_text', dict(num_kv_shared_layers=2, hidden_size_per_layer_input=0, global_head_dim=16, **SLIDING), 'reads the keys of another layer'),
}

def small(family, args):
    module = importlib.import_module(f'mlx_lm.models.{family}')
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(dict(BASE, model_type=family, **{k: v for k, v in args.items() if k not in BASE})
                                                    | {k: v for k, v in args.items() if k in BASE}))
    model.update(tree_map(lambda p: p + 0.1 * mx.random.normal(p.shape) if mx.issubdtype(p.dtype, mx.floating) else p, model.parameters()))
    mx.eval(model.parameters())
    return model

class MaskedCache:
    "A growing KV cache that hides some of its keys, from all but the hidden token itself."
    def __init__(self, hidden=()): self.keys, self.hidden = None, list(hidden)
    offset = property(lambda self: 0 if self.keys is None else self.keys.shape[2])
    def update_and_fetch(self, k, v):
        self.keys, self.values = (k, v) if self.keys is None else (mx.concatenate([self.keys, k], 2), mx.concatenate([self.values, v], 2))
        return self.keys, self.values
    def make_mask(self, N, return_array=False, window_size=None):
        seen = np.ones(self.offset + N, bool); seen[[h for h in self.hidden if h < len(seen)]] = False
        own = mx.arange(self.offset, self.offset + N)[:, None] == mx.arange(self.offset + N)
        return create_causal_mask(N, self.offset) & (mx.array(seen) | own)

TOKENS = mx.array(np.random.default_rng(0).integers(0, 60, (1, 40)))
equal = lambda a, b: mx.array_equal(a, b, equal_nan=True).item()

def check_layout(model):
    "Keys in the slots have the heads and width that the layout says."
    cache = make_prompt_cache(model)
    model(TOKENS, cache=cache)
    for l in attention_layout(model):
        if hasattr(l.attn, 'kv_lora_rank'): continue     # latent attention keeps one compressed head
        assert cache[l.slot].keys.shape[1::2] == (l.n_kv_heads, l.head_dim)
        assert l.window == getattr(cache[l.slot], 'max_size', None)
        assert l.n_heads % l.n_kv_heads == 0

class Negated:
    "Minus what an attention module gives, which may be a tuple; answers for the module otherwise."
    def __init__(self, attn): self.attn = attn
    def __call__(self, *args, **kwargs): return tree_map(lambda a: -a if isinstance(a, mx.array) else a, self.attn(*args, **kwargs))
    def __getattr__(self, name): return getattr(self.attn, name)

def check_view(model):
    "A view computes the same with the same arrays, and can be patched alone."
    names, before = [(n, id(a)) for n, a in tree_flatten(model.parameters())], model(TOKENS)
    view = model_view(model)
    assert [(n, id(a)) for n, a in tree_flatten(view.parameters())] == names
    assert equal(view(TOKENS), before)
    for l in attention_layout(view):
        if l.rope is not None: _set_rope(l.attn, _OffsetAdjustedRoPE(l.rope, 0))
        _set_attn_module(l.layer, Negated(l.attn))
    assert not equal(view(TOKENS), before)
    assert equal(model(TOKENS), before)
    assert [(n, id(a)) for n, a in tree_flatten(model.parameters())] == names

def check_sparse(model, tolerance=1e-4):
    "Tokens left out, the rest at their own positions: the same as nobody looking at the tokens left out."
    hidden = sorted(np.random.default_rng(1).choice(np.arange(2, 38), 20, replace=False).tolist())
    kept = np.array([i for i in range(40) if i not in hidden])
    slots = range(len(make_prompt_cache(model)))
    spec = model(TOKENS, cache=[MaskedCache(hidden) for _ in slots])[:, mx.array(kept)]
    view = model_view(model)
    for l in attention_layout(view):
        if l.rope is not None: _set_rope(l.attn, _PositionMappedRoPE(l.rope, kept))
    ours = view(TOKENS[:, mx.array(kept)], cache=[MaskedCache() for _ in slots])
    plain = model(TOKENS[:, mx.array(kept)], cache=[MaskedCache() for _ in slots])
    scale = mx.abs(spec).max().item()
    assert mx.abs(ours - spec).max().item() < tolerance * max(1, scale)
    assert mx.abs(plain - spec).max().item() > 10 * tolerance * max(1, scale)      # the test can fail

@pytest.mark.parametrize('name', ATTENTION_ONLY)
def test_attention_only_families(name):
    model = small(*ATTENTION_ONLY[name])
    check_architecture(model)
    assert [l.index for l in attention_layout(model)] == list(range(len(model.layers)))
    check_layout(model); check_view(model); check_sparse(model)

@pytest.mark.parametrize('name', HYBRID)
def test_hybrid_families(name):
    model = small(*HYBRID[name])
    check_architecture(model)
    cache = make_prompt_cache(model)
    assert [l.index for l in attention_layout(model)] == [i for i, c in enumerate(cache) if isinstance(c, KVCache)] != []
    check_layout(model); check_view(model)

@pytest.mark.parametrize('name', REFUSED)
def test_refused_families(name):
    family, args, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason) as e: check_architecture(small(family, args))
    assert f'{family}.Model cannot be prefilled sparsely' in str(e.value)

@pytest.mark.parametrize('dtype', [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize('family', TINY_FAMILIES)
def test_tiny_families(family, dtype):
    if family == 'gpt_oss' and dtype != mx.float32 and mx.default_device() == mx.cpu: pytest.skip('MLX runs experts in float32 only on a CPU')
    model = tiny_model(family, dtype=dtype)
    check_architecture(model)
    check_layout(model); check_view(model)
    with_rope = [l for l in attention_layout(model) if l.rope is not None]
    assert bool(with_rope) == (family != 'nemotron_h')

@pytest.mark.parametrize('family', ['llama', 'qwen3', 'gpt_oss'])
def test_tiny_families_sparse(family):
    check_sparse(tiny_model(family, **(dict(sliding_window=100) if family == 'gpt_oss' else {})), 1e-3)

def test_the_trap():
    "A default RoPE is an empty dict, so false; it must still be found, replaced and restored."
    attn = SimpleNamespace(rope=nn.RoPE(8))
    assert not attn.rope and _get_rope(attn) is attn.rope
    for family in ('llama', 'qwen3', 'gemma3'):
        for l in attention_layout(tiny_model(family)):
            assert not l.rope and l.rope is l.attn.rope is not None
    both = SimpleNamespace(rope=None, rotary_emb=nn.RoPE(8))
    assert _get_rope(both) is both.rotary_emb
    _set_rope(both, 'new'); assert both.rotary_emb == 'new' and both.rope is None
    assert _get_rope(SimpleNamespace(rope=None)) is None

@given(st.lists(st.sampled_from('M*-E'), min_size=1, max_size=12))
def test_nemotron_slots(pattern):
    "Slots count the blocks with a state, whatever their order; attention is found in the starred ones."
    blocks = [SimpleNamespace(block_type=b, mixer=b) for b in pattern]
    model = SimpleNamespace(layers=blocks, make_cache=lambda: [KVCache() if b == '*' else ArraysCache(2) for b in pattern if b in 'M*'])
    where = _build_layer_to_cache_map(model)
    assert [pattern[i] for i in where] == [b for b in pattern if b in 'M*'] and list(where.values()) == list(range(len(where)))
    assert [i for i, _ in _find_attention_layers(model)] == [i for i, b in enumerate(pattern) if b == '*']

def test_wrapper_answers_for_its_module():
    attn = attention_layout(tiny_model('llama'))[0].attn
    class Capture:
        def __init__(self, original): self._original = original
        def __getattr__(self, name): return getattr(self._original, name)
    assert head_counts(Capture(attn)) == head_counts(attn) and _get_rope(Capture(attn)) is attn.rope

def test_quantised_model():
    "Packed weights have fewer columns, never fewer rows: heads and widths stay right."
    for family in ('llama', 'qwen3_5'):
        model = tiny_model(family)
        said = [(l.n_heads, l.n_kv_heads, l.head_dim) for l in attention_layout(model)]
        nn.quantize(model, 32, 4, class_predicate=lambda _, m: isinstance(m, nn.Linear) and m.weight.shape[1] % 32 == 0)
        assert [(l.n_heads, l.n_kv_heads, l.head_dim) for l in attention_layout(model)] == said
        check_view(model)

def test_views_interleave():
    "Two views of one model, patched differently and run in turns, give what each gives alone."
    model = tiny_model('llama')
    def patched(gap):
        view = model_view(model)
        for l in attention_layout(view): _set_rope(l.attn, _OffsetAdjustedRoPE(l.rope, gap))
        return view
    def steps(view, cache, n=6):
        for i in range(n): yield view(TOKENS[:, i * 4:(i + 1) * 4], cache=cache)
    def alone(gap):      # only the last chunks are moved, so that the gap shows in the logits
        cache = make_prompt_cache(model); model(TOKENS, cache=cache)
        return list(steps(patched(gap), cache))
    a_alone, b_alone, plain = alone(50), alone(700), alone(0)
    caches = [make_prompt_cache(model) for _ in range(3)]
    for c in caches: model(TOKENS, cache=c)
    turns = list(zip(steps(patched(50), caches[0]), steps(patched(700), caches[1]), steps(model, caches[2])))
    for got, *wanted in zip(turns, a_alone, b_alone, plain): assert all(equal(g, w) for g, w in zip(got, wanted))
    assert not equal(a_alone[0], b_alone[0]) and not equal(a_alone[0], plain[0])

def test_views_in_threads():
    "Threads that make and patch views at once do not see each other, and the model stays as it was."
    model = tiny_model('qwen3')
    before, results = model(TOKENS), {}
    mx.eval(before)
    def work(sign):
        for _ in range(5):
            view = model_view(model)
            for l in attention_layout(view): _set_rope(l.attn, lambda x, offset=0: sign * x)
            out = view(TOKENS); mx.eval(out)
            results.setdefault(sign, []).append(out)
    threads = [threading.Thread(target=work, args=(s,)) for s in (1., 2., 3.)]
    for t in threads: t.start()
    for t in threads: t.join()
    for outs in results.values(): assert len(outs) == 5 and all(equal(o, outs[0]) for o in outs)
    assert len(results) == 3 and not equal(results[1.][0], results[2.][0])
    assert equal(model(TOKENS), before)

def test_view_keeps_structure():
    model = tiny_model('gemma3')
    view = model_view(model)
    assert view is not model and view.args is model.args and type(view.layers[0]) is type(model.layers[0])
    assert text_model(view) is not text_model(model) and text_model(view).model.embed_tokens is text_model(model).model.embed_tokens
    view.layers[0].self_attn.freeze()                     # a frozen view does not freeze the model
    view.train()
    assert model.layers[0].self_attn._no_grad == set() and not model.layers[0].self_attn.training
    assert equal(copy.deepcopy(view)(TOKENS), model(TOKENS))

def test_shared_reference_stays_shared():
    "A module used twice is copied once."
    model = tiny_model('llama')
    model.model.layers[1].self_attn = model.model.layers[0].self_attn
    view = model_view(model)
    assert view.layers[1].self_attn is view.layers[0].self_attn is not model.layers[0].self_attn

def test_shared_slots():
    family, args, _ = REFUSED['gemma4 shared']
    model = small(family, args)
    assert [(l.slot, l.shared) for l in attention_layout(model)] == [(0, False), (1, False), (0, True), (1, True)]
    check_view(model); check_sparse(model)

def test_odd_slots_are_refused():
    from mlx_lm.models.cache import CacheList, ChunkedKVCache
    for slot in (lambda: ChunkedKVCache(8), lambda: CacheList(KVCache(), KVCache())):
        model = tiny_model('llama', num_hidden_layers=1)
        object.__setattr__(model, 'make_cache', lambda: [slot()])
        with pytest.raises(ValueError, match=rf'Attention \(layer 0\) keeps a {type(slot()).__name__}'): check_architecture(model)
    model = tiny_model('llama', num_hidden_layers=1)
    model.layers[0].self_attn.indexer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r'Attention \(layer 0\) ranks keys'): check_architecture(model)
    model = tiny_model('llama', num_hidden_layers=2)
    model.layers[1].strange = model.layers[1].self_attn; del model.layers[1].self_attn
    with pytest.raises(ValueError, match=r'TransformerBlock \(layer 1\) has a cache of keys but none of self_attn'): check_architecture(model)
    with pytest.raises(ValueError, match='cannot be prefilled sparsely: Attention has none of num_attention_heads'):
        model = tiny_model('llama', num_hidden_layers=1)
        del model.layers[0].self_attn.n_heads
        check_architecture(model)

def test_verdict_is_remembered(monkeypatch):
    model = tiny_model('llama', num_hidden_layers=1)
    calls, probe = [], layers._positions_only_in_rope
    monkeypatch.setattr(layers, '_positions_only_in_rope', lambda *args: calls.append(1) or probe(*args))
    check_architecture(model); check_architecture(model)
    assert len(calls) == 1
    check_architecture(tiny_model('llama', num_hidden_layers=1))
    assert len(calls) == 2
    before = model(TOKENS)
    check_architecture(model)
    assert equal(model(TOKENS), before)

def test_check_leaves_random_state_and_parameters():
    model = tiny_model('qwen3_5')
    mx.random.seed(5); key = mx.random.state[0]
    ids = [id(a) for _, a in tree_flatten(model.parameters())]
    check_architecture(model)
    assert mx.array_equal(mx.random.state[0], key) and [id(a) for _, a in tree_flatten(model.parameters())] == ids

def test_context_length():
    ns = SimpleNamespace
    assert context_length(ns(layers=[], args=ns(n_positions=10))) == 10
    assert context_length(ns(layers=[], model=ns(config=dict(max_position_embeddings=11)))) == 11
    assert context_length(ns(language_model=ns(layers=[]), args=ns(text_config=ns(seq_length=12), max_position_embeddings=99))) == 12
    assert context_length(ns(layers=[], args=ns(max_position_embeddings=None))) is None
