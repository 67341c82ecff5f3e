"The pipeline: the seed's 26 names to the letter, when and why it reads densely, requests in company, faults, memory."
import copy, gc, inspect, math, threading, time
from types import SimpleNamespace
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mlx_lm.generate import GenerationResponse, generate_step
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm_mlx import blas, specprefill
from vllm_mlx.layers import _get_rope, attention_layout
from vllm_mlx.models import TINY_FAMILIES, tiny_model
from vllm_mlx.specprefill import PrefillCancelled, PrefillResult, SparseKVCache, SpecPrefill, SpecPrefillSettings, generate, stream_generate

# --- the seed's API ---

class Required: pass

SEED = {   # name: [(parameter, default)], for classes the constructor's
    '_AttentionCapture': 'original buf_idx query_buffer query_extractor=None',
    '_qwen35_extract_queries': 'attn x cache=None',
    '_llama_extract_queries': 'attn x cache=None',
    '_nemotron_h_extract_queries': 'attn x cache=None',
    '_patch_attention_for_capture': 'model query_buffer query_extractor=None',
    '_unpatch_attention_capture': 'model originals',
    '_prefill_draft': 'model tokens cache step_size=2048 cancel_check=None',
    '_lookahead_decode': 'model first_logits cache n_steps temp=0.6 top_p=0.95 cancel_check=None',
    '_avg_pool1d': 'x kernel_size',
    '_compute_importance': 'query_buffer attn_caches n_prompt n_attn_heads n_kv_heads pool_kernel=13',
    'score_tokens': 'model tokens n_lookahead=8 pool_kernel=13 temp=0.6 top_p=0.95 prefill_step_size=2048 query_extractor=None cancel_check=None',
    'select_chunks': 'importance keep_pct=0.3 chunk_size=32 backbone_pct=0.0',
    'manual_rope': 'x positions dims base=10000.0 scale=1.0',
    'manual_rope_with_freqs': 'x positions dims freqs pre_scale=1.0',
    '_PositionMappedRoPE': 'original_rope all_positions cache_start=0',
    '_OffsetAdjustedRoPE': 'original_rope adjustment',
    '_get_dims': 'rope_module',
    '_get_pre_scale': 'rope_module',
    '_find_attention_layers': 'model',
    '_get_attn_module': 'layer',
    '_get_rope': 'attn',
    '_set_rope': 'attn rope_module',
    '_set_attn_module': 'layer module',
    '_build_layer_to_cache_map': 'model',
    'sparse_prefill': 'model tokens selected_indices cache step_size=2048 position_offset=0 cancel_check=None',
    'cleanup_rope': 'model',
}
SEED_CALLS = {('_AttentionCapture', '__call__'): 'x mask=None cache=None', ('_AttentionCapture', '__getattr__'): 'name',
              ('_PositionMappedRoPE', '__call__'): 'x offset=0', ('_OffsetAdjustedRoPE', '__call__'): 'x offset=0'}

def check_signature(signature, documented, drop_self=False):
    "The documented parameters first, by position or keyword, with their defaults and types of defaults; all others keyword-only."
    ours = list(signature.parameters.values())[1 if drop_self else 0:]
    want = [(w.partition('=')[0], eval(w.partition('=')[2]) if '=' in w else inspect.Parameter.empty) for w in documented.split()]
    assert [(p.name, p.default, type(p.default)) for p in ours[:len(want)]] == [(n, d, type(d)) for n, d in want]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in ours[:len(want)])
    for p in ours[len(want):]: assert p.kind is p.VAR_KEYWORD or p.kind is p.KEYWORD_ONLY and p.default is not p.empty, p

def test_seed_has_26_names(): assert len(SEED) == 26

@pytest.mark.parametrize('name', SEED)
def test_seed_signature(name):
    found = getattr(specprefill, name)
    assert name in specprefill.__all__ and found.__doc__ and inspect.isclass(found) == (name in ('_AttentionCapture', '_PositionMappedRoPE', '_OffsetAdjustedRoPE'))
    check_signature(inspect.signature(found), SEED[name])

@pytest.mark.parametrize('name, method', SEED_CALLS)
def test_seed_method(name, method):
    check_signature(inspect.signature(inspect.getattr_static(getattr(specprefill, name), method)), SEED_CALLS[name, method], drop_self=True)

# --- small things to run ---

def words(n=513, prefix='w'):
    "A tokenizer of n words; its end token (512) is beyond the small models' vocabulary, so that nothing ends early."
    vocab = {f'{prefix}{i}': i for i in range(n - 1)} | {'<end>': n - 1}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=f'{prefix}0'))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token='<end>'))

IDS = words()
rng = np.random.default_rng(5)
PROMPT, SYSTEM = [int(t) for t in rng.integers(1, 500, 160)], [int(t) for t in rng.integers(1, 500, 30)]
MODELS = {f: tiny_model(f) for f in TINY_FAMILIES}
LLAMA, DRAFT = MODELS['llama'], tiny_model('qwen3', seed=3, num_hidden_layers=2)
SPARSE = dict(threshold=0, protect_head=8, protect_tail=16, chunk_size=8)
tokens_of = lambda gen: [r.token for r in gen]
equal = lambda a, b: mx.array_equal(a, b, equal_nan=True).item()
def spec(model=LLAMA, draft=None, **kw): return SpecPrefill(model, draft, **{**SPARSE, **kw})
def run(model=LLAMA, prompt=PROMPT, **kw): return list(stream_generate(model, IDS, prompt, **{**SPARSE, 'max_tokens': 5, **kw}))
def dense(model, prompt, n, cache=None, **kw): return [t for t, _ in generate_step(mx.array(prompt), model, max_tokens=n, prefill_step_size=128, prompt_cache=cache, **kw)]
def with_system(model=LLAMA):
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array(SYSTEM)[None], cache=cache), [c.state for c in cache])
    return cache

# --- dense or not ---

def test_threshold():
    for M, why in ((99, 'too short: 99 tokens, the threshold is 100'), (100, None), (101, None)):
        r = spec(threshold=100).prefill(PROMPT[:M])
        assert r.why_dense == why and (r.kept_tokens == M) == (why is not None)
        assert (r.importance is None, r.selected is None) == (why is not None,) * 2

def test_why_dense():
    assert spec(keep_pct=1).prefill(PROMPT).why_dense == 'keep_pct is 1'
    assert spec(keep_pct=2.5).prefill(PROMPT).why_dense == 'keep_pct is 2.5'
    assert spec().prefill(PROMPT, keep_pct=1.0).why_dense == 'keep_pct is 1'
    assert spec(keep_pct=1).prefill(PROMPT, keep_pct=.2).why_dense is None
    assert spec(protect_head=100, protect_tail=60).prefill(PROMPT).why_dense == 'too short: 160 tokens, all of them protected'
    assert spec(protect_head=100, protect_tail=59).prefill(PROMPT).why_dense is None
    r = spec(keep_pct=1).prefill(PROMPT)
    assert 'dense: keep_pct is 1' in str(r) and (r.score_s, r.kept_pct) == (0, 1)

@pytest.mark.parametrize('family', TINY_FAMILIES)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_matrix(family, dtype):
    "Everything kept by the scores, or by request: the tokens of mlx-lm's own generation; sparse: finite logits of the model's dtype."
    if family == 'gpt_oss' and dtype != 'float32': return                # MLX runs experts in float32 only on a CPU
    model = MODELS[family] if dtype == 'float32' else tiny_model(family, dtype=getattr(mx, dtype))
    want = dense(model, PROMPT, 4)
    assert tokens_of(run(model, keep_pct=1., max_tokens=4)) == want
    assert tokens_of(run(model, keep_pct=.2, protect=[(0, 160)], max_tokens=4)) == want
    out = run(model, keep_pct=.2, max_tokens=4)
    assert out[0].prefill.kept_tokens < 160 and all(r.logprobs.dtype == getattr(mx, dtype) and mx.isfinite(r.logprobs).all() for r in out)
    layout, r = attention_layout(model), out[0].prefill
    assert {a.dtype for l in layout for a in (r.cache[l.slot].keys, r.cache[l.slot].values)} == {getattr(mx, dtype)}
    assert {r.cache[l.slot].offset for l in layout} == {160 + 4 - 1} or {r.cache[l.slot].offset for l in layout} == {160 + 4}

# --- what is kept ---

@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 159), st.integers(0, 40)), max_size=3), st.integers(0, 20), st.integers(1, 20), st.sampled_from([.05, .2, .6]))
def test_protected_is_kept(spans, head, tail, keep):
    "Spans, head and tail are kept at any share; what is kept beyond them fits the budget; the cache holds just these positions."
    spans = [(a, min(a + n, 160)) for a, n in spans if n]
    r = spec(keep_pct=keep, protect_head=head, protect_tail=tail).prefill(PROMPT, protect=spans, importance=SCORES)
    kept, guard = r.selected.tolist(), set(range(head)) | set(range(160 - tail, 160)) | {t for a, b in spans for t in range(a, b)}
    assert guard <= set(kept) and len(kept) <= max(len(guard), 8 * math.ceil(20 * keep)) and r.kept_tokens == len(kept)
    assert r.cache[0].offset == 159 and r.last_token == PROMPT[-1]
    positions = r.cache[0].positions().tolist() if isinstance(r.cache[0], SparseKVCache) else list(range(r.cache[0].offset))
    assert positions == kept[:-1]

SCORES = spec(keep_pct=.2).prefill(PROMPT).importance

def test_scores_decide():
    "Importance that is handed in is used as it is."
    scores = np.zeros(160, np.float32); scores[72:80] = 1
    r = spec(keep_pct=.2).prefill(PROMPT, importance=scores)
    assert set(range(72, 80)) <= set(r.selected.tolist()) and equal(r.importance, mx.array(scores))
    with pytest.raises(ValueError, match=r'importance has shape \(159,\)'): spec().prefill(PROMPT, importance=scores[:-1])

def test_window_tail_is_noted():
    r = spec(MODELS['gemma3'], keep_pct=.2, protect_tail=4).prefill(PROMPT)
    assert set(range(144, 160)) <= set(r.selected.tolist()) and any('sliding-window layers need the last 16 tokens' in n for n in r.notes)

def test_edges_at_lines():
    r = spec(edges='lines', tokenizer=IDS, keep_pct=.3).prefill(PROMPT)
    assert r.why_dense is None and r.kept_tokens <= max(24, math.ceil(.3 * 160)) and r.selected.tolist()[-1] == 159

# --- other scorers ---

@pytest.mark.parametrize('scorer', ['window', 'lookahead'])
def test_draft_scores(scorer):
    "The draft's scores, the target's cache; neither model is changed."
    before = LLAMA(mx.array(PROMPT)[None]), DRAFT(mx.array(PROMPT)[None])
    kw = dict(scorer=scorer, n_lookahead=3)
    r, alone = spec(LLAMA, DRAFT, **kw).prefill(PROMPT), spec(DRAFT, **kw).prefill(PROMPT)
    assert equal(r.importance, alone.importance) and not equal(r.importance, spec(**kw).prefill(PROMPT).importance)
    assert len(r.cache) == len(LLAMA.layers) and equal(r.selected, alone.selected)
    assert len(run(LLAMA, draft_model=DRAFT, **kw)) == 5
    assert equal(LLAMA(mx.array(PROMPT)[None]), before[0]) and equal(DRAFT(mx.array(PROMPT)[None]), before[1])

def test_lookahead_is_score_tokens():
    r = spec(scorer='lookahead', n_lookahead=2, step_size=50).prefill(PROMPT)
    assert equal(r.importance, specprefill.score_tokens(LLAMA, PROMPT, 2, prefill_step_size=50))

def test_tokenizers_differ():
    same, other, longer = words(), words(prefix='x'), words(600)
    for wrong, msg in ((other, r"different tokenizers: '[wx]\d+' is token (None|\d+) for the draft, (None|\d+) for the target"), (longer, r"different tokenizers: '(w\d+|<end>)' is token \d+ for the draft")):
        with pytest.raises(ValueError, match=msg): SpecPrefill(LLAMA, DRAFT, tokenizer=IDS, draft_tokenizer=wrong)
        with pytest.raises(ValueError, match=msg): stream_generate(LLAMA, IDS, PROMPT, DRAFT, draft_tokenizer=wrong)
    small = tiny_model('llama', vocab_size=300, num_hidden_layers=1)
    with pytest.raises(ValueError, match='the draft has a vocabulary of 300, the target of 512'): SpecPrefill(LLAMA, small)
    assert SpecPrefill(LLAMA, small, tokenizer=IDS, draft_tokenizer=same).draft is small          # padded vocabularies may differ

# --- prefixes ---

@pytest.mark.parametrize('family', TINY_FAMILIES)
def test_prefix_composes(family):
    "All kept after a prefix: dense generation of both; sparse: positions go on from the prefix."
    model = MODELS[family]
    want = dense(model, PROMPT, 4, with_system(model))
    for kw in (dict(keep_pct=1), dict(protect=[(0, 160)])):
        out = run(model, prompt_cache=with_system(model), max_tokens=4, **kw)
        assert tokens_of(out) == want and out[0].prefill.prefix_tokens == 30
    cache = with_system(model)
    r = spec(model).prefill(PROMPT, prompt_cache=cache)
    layout = attention_layout(model)
    assert r.cache is cache and {cache[l.slot].offset for l in layout} == {30 + 159} and r.prompt_tokens == 160
    full = next(l.slot for l in layout if l.window is None)
    assert cache[full].positions().tolist() == [*range(30), *(30 + i for i in r.selected.tolist()[:-1])]

def test_prefix_shapes_the_scores():
    "The target scoring for itself reads the prompt as it stands, after its prefix; a draft does not know the prefix."
    cache = with_system()
    want = specprefill.score_window(LLAMA, PROMPT, cache=cache)
    assert equal(spec().prefill(PROMPT, prompt_cache=copy.deepcopy(cache)).importance, want) and not equal(want, SCORES)

def test_wrong_caches():
    cache = with_system()
    uneven = copy.deepcopy(cache); uneven[2].trim(3)
    for wrong, msg in ((tuple(cache), 'cache is a tuple'), (cache[0], 'cache is a KVCache'), (cache[:3], 'cache has 3 slots, the model needs 4'), (uneven, 'different offsets'),
                       ([QuantizedKVCache()] + cache[1:], 'QuantizedKVCache'), (make_prompt_cache(MODELS['nemotron_h'])[:1] + cache[1:], 'ArraysCache')):
        with pytest.raises(ValueError, match=msg): spec().prefill(PROMPT, prompt_cache=wrong)
        with pytest.raises(ValueError, match=msg): run(prompt_cache=wrong, keep_pct=1)

# --- decoding ---

def test_sampler_and_processors():
    "Top-p with a seed; processors see the whole prompt and each token that came; the sampler's logits are theirs."
    seen, kw = [], dict(temp=.8, top_p=.9)
    def note(tokens, logits): seen.append(tokens.tolist()); return logits
    runs = []
    for processors in ([note], None):
        mx.random.seed(7)
        runs.append(tokens_of(run(sampler=make_sampler(**kw), logits_processors=processors, max_tokens=6)))
    assert runs[0] == runs[1] and len(set(runs[0])) > 1
    assert seen[:6] == [PROMPT + runs[0][:n] for n in range(6)]
    only = lambda t: lambda tokens, logits: mx.where(mx.arange(logits.shape[-1]) == t, logits, -mx.inf)
    assert tokens_of(run(logits_processors=[only(77)])) == [77] * 5

def test_processors_as_in_a_dense_generation():
    "mlx-lm's repetition penalty over the whole prompt, everything kept: the same tokens."
    processors = lambda: make_logits_processors(repetition_penalty=1.5, repetition_context_size=100)
    want = dense(LLAMA, PROMPT, 8, logits_processors=processors())
    assert tokens_of(run(keep_pct=1, logits_processors=processors(), max_tokens=8)) == want
    assert want != dense(LLAMA, PROMPT, 8)

def test_text_prompt_and_text_answer():
    text = ' '.join(f'w{t}' for t in PROMPT)
    by_text, by_ids = run(prompt=text), run()
    assert tokens_of(by_text) == tokens_of(by_ids)
    assert generate(LLAMA, IDS, text, max_tokens=5, **SPARSE).split() == [f'w{t}' for t in tokens_of(by_ids)]
    assert all(isinstance(r, GenerationResponse) and r.prompt_tokens == 160 and r.prefill is by_ids[0].prefill for r in by_ids)
    assert by_ids[-1].generation_tokens == 5 and by_ids[-1].finish_reason == 'length'

def test_quantised_decode():
    out = run(MODELS['qwen3'], kv_bits=8, kv_group_size=32, quantized_kv_start=0, max_tokens=4)
    assert all(isinstance(c.inner, QuantizedKVCache) for c in out[-1].prefill.cache) and tokens_of(out)[:2] == tokens_of(run(MODELS['qwen3'], max_tokens=4))[:2]

def test_prefilled_before():
    want, sp = tokens_of(run()), spec()
    assert tokens_of(sp.stream_generate(IDS, PROMPT, prefill=sp.prefill(PROMPT), max_tokens=5)) == want

def test_times_add_up(monkeypatch):
    "On a clock that only the parts of the work move: each is counted once, in its phase, and together they are all the time until the first token."
    now = [0.0]
    monkeypatch.setattr(specprefill, 'time', SimpleNamespace(perf_counter=lambda: now[0]))
    def takes(name, seconds, real):
        def part(*args, **kwargs): now[0] += seconds; return real(*args, **kwargs)
        monkeypatch.setattr(specprefill, name, part)
    for name, seconds in dict(_score=1, _select=2, _fill=4, _mlx_stream_generate=8).items(): takes(name, seconds, getattr(specprefill, name))
    for kw, phases in ((dict(), (1, 2, 4, 8)), (dict(scorer='lookahead'), (1, 2, 4, 8)), (dict(keep_pct=1), (0, 0, 4, 8))):
        now[0] = 0.0
        r = run(**kw)[0].prefill
        assert (r.score_s, r.select_s, r.prefill_s, r.first_token_s) == phases and r.ttft_s == now[0] == sum(phases)
    monkeypatch.undo()
    start = time.perf_counter()                                  # and by the clock on the wall
    r = next(stream_generate(LLAMA, IDS, PROMPT * 6, **SPARSE)).prefill
    assert 0 < min(r.score_s, r.select_s, r.prefill_s, r.first_token_s) and r.ttft_s == pytest.approx(r.score_s + r.select_s + r.prefill_s + r.first_token_s) and r.ttft_s <= time.perf_counter() - start

# --- mistakes ---

@pytest.mark.parametrize('keep', [0, -1, float('nan'), -float('inf')])
def test_bad_keep_pct(keep):
    cache = with_system()
    with pytest.raises(ValueError, match='keep_pct is'): stream_generate(LLAMA, IDS, PROMPT, keep_pct=keep)
    with pytest.raises(ValueError, match='keep_pct is'): spec().prefill(PROMPT, keep_pct=keep, prompt_cache=cache)
    assert cache[0].offset == 30

def test_empty_and_odd_prompts():
    for bad in ([], '', [[1, 2]], [1.5], [-1], [512]):
        with pytest.raises(ValueError): run(prompt=bad)
    assert run(prompt=[9])[0].prefill.kept_tokens == 1
    assert run(prompt=mx.array([9, 8]))[0].prefill.kept_tokens == 2

def test_unknown_options():
    for name in ('temperature', 'keep', 'max_kv_size', 'prefill_step_size', 'prompt_progress_callback', 'input_embeddings', 'draft'):
        with pytest.raises(TypeError): list(stream_generate(LLAMA, IDS, PROMPT, **{name: 1}))
    with pytest.raises(TypeError): SpecPrefill(LLAMA, nonsense=1)
    with pytest.raises(TypeError): spec().prefill(PROMPT, step=1)

def test_bad_settings_are_named():
    for bad, msg in ((dict(threshold=-1), 'threshold is -1'), (dict(protect_head=-1), 'protect_head is -1'), (dict(step_size=0), 'step_size is 0'), (dict(reserve=0), 'reserve is 0'),
                     (dict(edges='words', tokenizer=IDS), "edges is 'words'"), (dict(scorer='random'), "scorer is 'random'")):
        with pytest.raises(ValueError, match=msg): SpecPrefillSettings(LLAMA, **bad)
    for bad in (dict(protect=[(0, 161)]), dict(protect=[(5, 3)]), dict(protect=[(-1, 3)])):
        with pytest.raises(ValueError): spec().prefill(PROMPT, **bad)

SHORT = tiny_model('llama', max_position_embeddings=128)

@settings(max_examples=10, deadline=None)
@given(st.integers(129, 400), st.integers(1, 40), st.sampled_from([.1, .5, 1.]), st.booleans())
def test_beyond_the_context(M, reserve, keep, system):
    "A prompt beyond the context: refused with original positions, cut to fit with contiguous ones, and that is said."
    prompt, n = (PROMPT * 3)[:M], 30 if system else 0
    cache = with_system(SHORT) if system else make_prompt_cache(SHORT)
    with pytest.raises(ValueError, match=f'the prompt has {n + M:,} tokens, the model.s context is 128'): spec(SHORT).prefill(prompt, prompt_cache=cache)
    assert cache[0].offset == n
    r = spec(SHORT, positions='contiguous', reserve=reserve, keep_pct=keep).prefill(prompt, prompt_cache=cache)
    assert n + r.kept_tokens + reserve <= 128 and cache[0].offset == n + r.kept_tokens - 1
    assert r.why_dense is None and any('scored in segments' in note for note in r.notes)
    assert keep < 1 or any(note.startswith('keep_pct lowered from 1 to') for note in r.notes)

def test_no_room_at_all():
    with pytest.raises(ValueError, match='no room for a prompt'): spec(SHORT, positions='contiguous', reserve=110).prefill(PROMPT)

# --- faults ---

def at_call(n, error=None):
    calls = iter(range(10**6))
    def check(*_):
        if next(calls) == n:
            if error is not None: raise error
            return True
        return False
    check.count = lambda: next(calls)
    return check

@pytest.fixture
def blas_threads():
    "Two OpenBLAS threads, which must be two again afterwards."
    lib = blas._openblas()
    if lib is None: yield; return
    before = lib.openblas_get_num_threads()
    lib.openblas_set_num_threads(2)
    yield
    found = lib.openblas_get_num_threads()
    lib.openblas_set_num_threads(before)
    assert found == 2

@pytest.mark.parametrize('scorer', ['window', 'lookahead'])
@pytest.mark.parametrize('family', ['llama', 'gemma3', 'nemotron_h'])
def test_fault_anywhere(family, scorer, blas_threads):
    "A cancel or an error at any chunk of scoring or prefill: model and prefix cache to the bit as before."
    model, fresh = tiny_model(family), tiny_model(family)
    sp, cache = spec(model, scorer=scorer, n_lookahead=2, step_size=24), with_system(model)
    want = fresh(mx.array(PROMPT)[None]), fresh(mx.array([[7, 8]]), cache=with_system(fresh))
    ropes, slots, counter = [_get_rope(l.attn) for l in attention_layout(model)], list(cache), at_call(-1)
    expected = sp.prefill(PROMPT, prompt_cache=copy.deepcopy(cache), cancel_check=counter)
    for n in range(counter.count()):
        with pytest.raises(PrefillCancelled): sp.prefill(PROMPT, prompt_cache=cache, cancel_check=at_call(n))
        with pytest.raises(KeyboardInterrupt): next(sp.stream_generate(IDS, PROMPT, prompt_cache=cache, progress=at_call(n % 2, KeyboardInterrupt())))
        assert all(a is b for a, b in zip(cache, slots)) and all(a is _get_rope(l.attn) for a, l in zip(ropes, attention_layout(model)))
        assert equal(model(mx.array([[7, 8]]), cache=copy.deepcopy(cache)), want[1])
    assert equal(model(mx.array(PROMPT)[None]), want[0])
    again = sp.prefill(PROMPT, prompt_cache=cache)
    assert equal(again.importance, expected.importance) and equal(model(mx.array([[3]]), cache=cache), model(mx.array([[3]]), cache=expected.cache))

def test_abandoned_generators(blas_threads):
    "Generators dropped before, at and after their first token leave the model as it was."
    model = tiny_model('llama')
    want, alone = model(mx.array(PROMPT)[None]), tokens_of(run(model))
    for n in range(4):
        gen = stream_generate(model, IDS, PROMPT, max_tokens=50, **SPARSE)
        for _ in range(n): next(gen)
        gen.close() if n % 2 else None
        del gen; gc.collect()
        assert equal(model(mx.array(PROMPT)[None]), want) and tokens_of(run(model)) == alone

def test_failing_sampler_and_processor():
    model = tiny_model('llama')
    want, alone = model(mx.array(PROMPT)[None]), tokens_of(run(model))
    def fail(*_): raise ZeroDivisionError
    for kw in (dict(sampler=fail), dict(logits_processors=[fail])):
        with pytest.raises(ZeroDivisionError): run(model, **kw)
        assert equal(model(mx.array(PROMPT)[None]), want) and tokens_of(run(model)) == alone

# --- company ---

def starts(model):
    other = PROMPT[::-1]
    return {'sparse': lambda: stream_generate(model, IDS, PROMPT, max_tokens=4, **SPARSE), 'other': lambda: stream_generate(model, IDS, other, keep_pct=.5, max_tokens=4, **SPARSE),
            'dense': lambda: stream_generate(model, IDS, other, keep_pct=1, max_tokens=4), 'lookahead': lambda: stream_generate(model, IDS, PROMPT, scorer='lookahead', max_tokens=4, **SPARSE),
            'contiguous': lambda: stream_generate(model, IDS, PROMPT, positions='contiguous', max_tokens=4, **SPARSE)}
ALONE = {}
def alone(family): return ALONE.setdefault(family, {k: tokens_of(s()) for k, s in starts(MODELS[family]).items()})

@pytest.mark.parametrize('family', ['llama', 'gemma3', 'qwen3_5'])
@settings(max_examples=2, deadline=None)
@given(schedule=st.permutations(['sparse', 'other', 'dense', 'lookahead', 'contiguous'] * 4))
def test_any_schedule(family, schedule):
    "Generators that take turns in any order, prefills among others' decoding, give what each gives alone."
    running, got = {k: s() for k, s in starts(MODELS[family]).items()}, {k: [] for k in starts(LLAMA)}
    for k in schedule: got[k].append(next(running[k]).token)
    assert got == alone(family)

@pytest.mark.parametrize('family', ['llama', 'qwen3_5'])
def test_threads(family):
    "Each thread with its own generators, at the same time on one model."
    got, errors, kinds = [], [], starts(MODELS[family])
    want = alone(family)
    def work(mine):
        try: got.extend((k, tokens_of(kinds[k]())) for _ in range(3) for k in mine)
        except BaseException as e: errors.append(e)
    threads = [threading.Thread(target=work, args=(m,)) for m in (['sparse', 'dense', 'contiguous'], ['other', 'lookahead', 'sparse'])]
    for t in threads: t.start()
    for t in threads: t.join()
    assert not errors and len(got) == 18 and all(tokens == want[k] for k, tokens in got)

def test_memory_is_flat():
    "Fifty requests of all kinds, some cancelled, some abandoned: no bytes and no objects that hold arrays are left."
    model, seen = tiny_model('llama', num_hidden_layers=2), []
    kinds = (KVCache, RotatingKVCache, SparseKVCache, PrefillResult, type(model), type(model.layers[0]), type(model.layers[0].self_attn))
    for n in range(50):
        kw = (dict(), dict(scorer='lookahead', n_lookahead=2), dict(positions='contiguous'), dict(keep_pct=1))[n % 4]
        run(model, max_tokens=2, **kw)
        if n % 5 == 1:
            with pytest.raises(PrefillCancelled): run(model, cancel_check=at_call(n % 3))
        if n % 5 == 2: next(stream_generate(model, IDS, PROMPT, **SPARSE))
        if n % 7 == 0:
            gc.collect(); seen.append((mx.get_active_memory(), [sum(type(o) is k for o in gc.get_objects()) for k in kinds]))
    assert len(seen) == 8 and all(s == seen[1] for s in seen[1:]), seen
