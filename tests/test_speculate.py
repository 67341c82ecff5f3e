"""The speculative loop: the same tokens as mlx-lm, and caches that hold exactly what was emitted, whenever one looks."""
import copy, gc, threading
from collections import Counter
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mlx_lm.generate import stream_generate as mlx_stream_generate
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from vllm_mlx.acceptance import PROPOSALS, Sampling, chi_square, draw_proposals, judge
from vllm_mlx.dflash import make_draft, tiny_draft
from vllm_mlx.kod import CostCurve
from vllm_mlx.models import TINY_FAMILIES, load, tiny_model
from vllm_mlx.speculate import SpecCache, SpecStats, bench_speculate, generate, repetition, stream_generate
from vllm_mlx.specprefill import SpecPrefill
from vllm_mlx.verify import forward_with_hidden_states

PROMPT = np.random.default_rng(0).integers(1, 500, 30).tolist()
N = 20


class FakeDraft:
    "Proposes `says(place)`, a token or a row of logits, and keeps a checksum of the features it is given, by place."
    def __init__(self, says, vocab=512, block_size=8, layers=(0, 2)):
        self.says, self.vocab, self.config, self.calls = says, vocab, SimpleNamespace(block_size=block_size, target_layer_ids=list(layers), mask_token_id=vocab - 1), 0
    def features(self, hidden): return mx.concatenate(hidden, axis=-1)
    def make_cache(self): return SimpleNamespace(positions=[], sums=[], state=[])
    def extend(self, features, cache, positions):
        assert features.shape[1] == len(positions) and (np.diff(cache.positions[-1:] + list(positions)) > 0).all()
        cache.positions.extend(map(int, positions)); cache.sums.extend(features[0].astype(mx.float32).sum(-1).tolist())
    def propose(self, last, features, cache, block_size, position):
        self.calls += 1
        assert features is None and cache.positions[-1] == position - 1
        rows = [self.says(position + 1 + i) for i in range(block_size - 1)]
        return mx.array(np.stack(rows))[None] if isinstance(rows[0], np.ndarray) else 20.0 * (mx.arange(self.vocab) == mx.array(rows)[:, None])[None]


def tokens_of(gen): return [r.token for r in gen]

@pytest.fixture(scope="module")
def ids(): return load("smollm2-135m")[1]

@pytest.fixture(scope="module")
def family(ids):
    "family -> (model, its greedy text after PROMPT)"
    known = {}
    def get(name):
        if name not in known:
            model = tiny_model(name)
            known[name] = model, tokens_of(mlx_stream_generate(model, ids, mx.array(PROMPT), 2 * N))
        return known[name]
    return get

def drafts_for(model, text):
    text = text + [0] * 40
    return dict(oracle=FakeDraft(text.__getitem__), some=FakeDraft(lambda i: text[i] if i % 3 else 511 - text[i]), wrong=FakeDraft(lambda i: 511 - text[i]),
                repeating=FakeDraft(lambda i: 7), mask=FakeDraft(lambda i: 511), untrained=tiny_draft(model))

def gap(a, b): return mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item()

def check_state(model, cache, draft, emitted, prompt=PROMPT):
    "Everything stands for prompt + emitted, to rounding."
    tokens = prompt + emitted
    assert cache.tokens == tokens and cache.unread == []
    probe, fresh = mx.array([[9]]), make_prompt_cache(model)
    model(mx.array([tokens]), cache=fresh)
    assert gap(model(probe, cache=copy.deepcopy(cache.target)), model(probe, cache=fresh)) < 2e-3
    if isinstance(draft, FakeDraft):
        _, _, hidden = forward_with_hidden_states(model, mx.array([tokens]), capture_layers=draft.config.target_layer_ids)
        sums = draft.features(hidden)[0].sum(-1).tolist()
        have = cache.context.sums + [x for f in cache._features for x in f[0].astype(mx.float32).sum(-1).tolist()]
        assert len(cache.context.sums) + cache.pending == len(tokens) == len(have)
        np.testing.assert_allclose(have, sums, atol=5e-3)
        assert cache.context.positions == list(range(len(cache.context.positions)))
    elif draft is not None: assert cache.context.offset + cache.pending == len(tokens)


# --- the same tokens ---

@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_greedy_is_mlx_lms(name, family, ids):
    model, want = family(name)
    for kind, draft in drafts_for(model, PROMPT + want).items():
        for size in {"oracle": (2, 3, 8, 13, "kod", None), "some": (4, 7)}.get(kind, (6,)):
            got = list(stream_generate(model, draft, ids, PROMPT, max_tokens=N, block_size=size))
            assert tokens_of(got) == want[:N], (kind, size)
            assert got[-1].finish_reason == "length" and [r.generation_tokens for r in got] == list(range(1, N + 1))
        exact = list(stream_generate(model, draft, ids, PROMPT, max_tokens=8, block_size=5, exact=True))
        assert tokens_of(exact) == want[:8]
    assert any(r.from_draft for r in stream_generate(model, drafts_for(model, PROMPT + want)["oracle"], ids, PROMPT, max_tokens=8, block_size=4))


def test_responses_are_mlx_lms(family, ids):
    "Text, logprobs, counts and finish reasons, response by response; also without a draft, and with a stop token inside of a block."
    model, want = family("qwen3")
    stop = want[6]
    n = want.index(stop) + 1
    for extra, until in (((), N), ((stop,), n)):
        tok = copy.copy(ids); tok._eos_token_ids = {*ids.eos_token_ids, *extra}
        theirs = list(mlx_stream_generate(model, tok, mx.array(PROMPT), N))
        for draft in (None, drafts_for(model, PROMPT + want)["oracle"]):
            ours = list(stream_generate(model, draft, tok, PROMPT, max_tokens=N, block_size=5))
            assert [(r.text, r.token, r.generation_tokens, r.prompt_tokens, r.finish_reason) for r in ours] == [(r.text, r.token, r.generation_tokens, r.prompt_tokens, r.finish_reason) for r in theirs]
            assert len(ours) == until and max(gap(a.logprobs, b.logprobs) for a, b in zip(ours, theirs)) < 1e-3


@pytest.mark.parametrize("exact", (False, True))
def test_exact_mode_is_bit_for_bit(exact, ids):
    "In bfloat16 rows of a block round otherwise than single rows; row by row they do not."
    model = tiny_model("qwen3_5", dtype=mx.bfloat16)
    theirs = list(mlx_stream_generate(model, ids, mx.array(PROMPT), N))
    text = PROMPT + [r.token for r in theirs] + [0] * 20
    ours = list(stream_generate(model, FakeDraft(text.__getitem__), ids, PROMPT, max_tokens=N, block_size=6, exact=exact))
    same = all(mx.array_equal(a.logprobs, b.logprobs).item() for a, b in zip(ours, theirs))
    if exact: assert same and tokens_of(ours) == tokens_of(theirs)


def test_processors_see_committed_tokens_and_the_rows_drafts(family, ids):
    model, _ = family("qwen3_5")
    make = lambda: make_logits_processors(repetition_penalty=1.3, presence_penalty=0.5)
    theirs = list(mlx_stream_generate(model, ids, mx.array(PROMPT), N, logits_processors=make()))
    want = tokens_of(theirs)
    for kind, draft in drafts_for(model, PROMPT + want).items():
        for kw in (dict(block_size=5), dict(block_size=4, exact=True)) if kind in ("some", "untrained") else (dict(block_size="kod"),):
            ours = list(stream_generate(model, draft, ids, PROMPT, max_tokens=N, logits_processors=make(), **kw))
            assert tokens_of(ours) == want, (kind, kw)
            assert max(gap(a.logprobs, b.logprobs) for a, b in zip(ours, theirs)) < 1e-3


def test_mask_token_is_a_token_like_others(family, ids):
    model, _ = family("llama")
    always = [lambda tokens, logits: logits + 50.0 * (mx.arange(512) == 511)]
    for draft in (FakeDraft(lambda i: 511), tiny_draft(model)):
        assert draft.config.mask_token_id == 511
        got = list(stream_generate(model, draft, ids, PROMPT, max_tokens=9, block_size=4, logits_processors=always))
        assert tokens_of(got) == [511] * 9 and got[-1].stats.repetition > 0.8


# --- what the caches hold ---

@pytest.mark.parametrize("name", TINY_FAMILIES)
@pytest.mark.parametrize("kw", (dict(block_size=5), dict(block_size=4, exact=True), dict(block_size="kod")), ids=("block", "exact", "kod"))
def test_looking_between_yields(name, kw, family, ids):
    "After every single yield; looking changes no token that comes later."
    model, want = family(name)
    draft = drafts_for(model, PROMPT + want)["some"]
    cache, seen = SpecCache(model, draft), []
    for r in stream_generate(model, draft, ids, PROMPT, max_tokens=9, prompt_cache=cache, **kw):
        seen.append(r.token)
        check_state(model, cache, draft, seen)
    assert seen == want[:9]
    check_state(model, cache, draft, seen)


@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_closing_at_any_yield_and_going_on(name, family, ids):
    model, want = family(name)
    for draft, kw in ((drafts_for(model, PROMPT + want)["some"], dict(block_size=6)), (None, {})):
        for k in (1, 3, 4, 7) if draft is not None else (1, 2):
            cache = SpecCache(model, draft)
            gen = stream_generate(model, draft, ids, PROMPT, max_tokens=N, prompt_cache=cache, **kw)
            out = [next(gen).token for _ in range(k)]
            gen.close()
            check_state(model, cache, draft, out)
            out += tokens_of(stream_generate(model, draft, ids, [], max_tokens=N - k, prompt_cache=cache, **kw))
            assert out == want[:N], k


def test_an_mlx_cache_list_ends_as_mlx_lm_leaves_it(family, ids):
    "The next turn may be mlx-lm's own."
    for name in TINY_FAMILIES:
        model, want = family(name)
        draft, theirs, ours = drafts_for(model, PROMPT + want)["some"], make_prompt_cache(model), make_prompt_cache(model)
        list(mlx_stream_generate(model, ids, mx.array(PROMPT), 7, prompt_cache=theirs))
        list(stream_generate(model, draft, ids, PROMPT, max_tokens=7, block_size=5, prompt_cache=ours))
        assert [getattr(c, "offset", None) for c in ours] == [getattr(c, "offset", None) for c in theirs]
        second = [5, 6, 7]
        want2 = tokens_of(mlx_stream_generate(model, ids, mx.array(second), 6, prompt_cache=theirs))
        assert tokens_of(stream_generate(model, draft, ids, second, max_tokens=6, block_size=3, prompt_cache=ours)) == want2


def test_second_turn_reads_only_what_is_new(family, ids):
    model, want = family("qwen3_5")
    turn = [11, 12, 13, 14]
    whole = PROMPT + want[:9] + turn
    want2 = tokens_of(mlx_stream_generate(model, ids, mx.array(whole), N))
    draft = FakeDraft((whole + want2 + [0] * 20).__getitem__)
    cache = SpecCache(model, draft)
    list(stream_generate(model, draft, ids, PROMPT, max_tokens=9, prompt_cache=cache))
    new, stats = cache.rest_of(whole), SpecStats()
    assert new == turn
    told = []
    assert tokens_of(stream_generate(model, draft, ids, new, max_tokens=N, block_size=8, prompt_cache=cache, stats=stats, progress=lambda n, total: told.append((n, total)))) == want2
    assert stats.prompt_tokens == 4 and told[-1] == (4, 4) and stats.tokens_per_round > 6
    check_state(model, cache, draft, want2, whole)
    with pytest.raises(ValueError, match="differs from the .* tokens in the cache at token 3"): cache.rest_of(PROMPT[:3] + [0])


class Boom(Exception): pass

@pytest.mark.parametrize("name", ("qwen3_5", "gemma3", "nemotron_h"))
def test_whatever_raises_leaves_the_emitted_tokens(name, family, ids):
    model, want = family(name)
    text = PROMPT + want + [0] * 40
    def after(n, f):
        count = [0]
        def g(*a):
            count[0] += 1
            if count[0] > n: raise Boom
            return f(*a)
        return g
    def draft_fails(n): d = FakeDraft(text.__getitem__); d.propose = after(n, d.propose); return d, {}
    def extend_fails(n): d = FakeDraft(text.__getitem__); d.extend = after(n + 1, d.extend); return d, {}
    def processor_fails(n): return FakeDraft(text.__getitem__), dict(logits_processors=[after(3 * n, lambda t, l: l)])
    for make in (draft_fails, extend_fails, processor_fails):
        for n in (0, 2):
            draft, kw = make(n)
            cache, out = SpecCache(model, draft), []
            with pytest.raises(Boom):
                for r in stream_generate(model, draft, ids, PROMPT, max_tokens=N, block_size=4, prompt_cache=cache, **kw): out.append(r.token)
            good = FakeDraft(text.__getitem__)
            if not (make is processor_fails and n == 0): check_state(model, cache, good, out)
            assert out + tokens_of(stream_generate(model, good, ids, [], max_tokens=N - len(out), block_size=4, prompt_cache=cache)) == want[:N]


def test_target_that_fails_in_a_block(family, ids):
    model, want = family("qwen3_5")
    text = PROMPT + want + [0] * 40
    cls, state = type(model.layers[3].mlp), SimpleNamespace(left=10**9)
    class Failing(cls):
        def __call__(self, x):
            state.left -= 1
            if state.left < 0: raise Boom
            return super().__call__(x)
    model.layers[3].mlp.__class__ = Failing
    try:
        for left in (0, 1, 3):
            draft = FakeDraft(text.__getitem__)
            cache, out = SpecCache(model, draft), []
            with pytest.raises(Boom):
                for r in stream_generate(model, draft, ids, PROMPT, max_tokens=N, block_size=4, prompt_cache=cache):
                    out.append(r.token)
                    if len(out) == 5: state.left = left
            state.left = 10**9
            assert len(out) >= 5 and out == want[:len(out)] and len(cache.unread) <= 1               # the last could not be read
            assert out + tokens_of(stream_generate(model, draft, ids, [], max_tokens=N - len(out), block_size=4, prompt_cache=cache)) == want[:N]
            check_state(model, cache, draft, want[:N])
    finally: model.layers[3].mlp.__class__ = cls


def test_long_prompts_in_chunks_and_a_cancelled_prefill(family, ids):
    model, _ = family("qwen3_5")
    prompt = np.random.default_rng(4).integers(1, 500, 300).tolist()
    want = tokens_of(mlx_stream_generate(model, ids, mx.array(prompt), 6, prefill_step_size=64))
    draft = FakeDraft((prompt + want + [0] * 20).__getitem__)
    cache, sizes = SpecCache(model, draft), []
    def progress(n, total):
        sizes.append(len(cache._features))
        if n >= 128: raise Boom
    with pytest.raises(Boom): list(stream_generate(model, draft, ids, prompt, max_tokens=6, prefill_step_size=64, prompt_cache=cache, progress=progress))
    assert max(sizes) == 0                                            # features do not pile up
    left = cache.unread
    assert cache.target[2].offset == 300 - len(left)
    assert tokens_of(stream_generate(model, draft, ids, [], max_tokens=6, block_size=4, prompt_cache=cache)) == want
    assert cache.tokens == prompt + want and 100 < len(left) <= 172
    check_state(model, cache, draft, want, prompt)


def test_sparse_prefill(family, ids):
    "The kept tokens at their own positions, for target and draft; then the same text as chapter 06's own decoding."
    prompt = np.random.default_rng(5).integers(1, 500, 300).tolist()
    for name in TINY_FAMILIES:
        model, _ = family(name)
        for positions in ("original", "contiguous") if name in ("llama", "gemma3") else ("original",):
            sp = SpecPrefill(model, threshold=0, keep_pct=0.5, positions=positions)
            theirs = list(sp.stream_generate(ids, prompt, max_tokens=12))
            want, r = tokens_of(theirs), theirs[0].prefill
            end = 300 if positions == "original" else r.kept_tokens
            text = [0] * end + want + [0] * 30
            draft, stats = FakeDraft(lambda i: text[i] if i % 4 else 3), SpecStats()
            cache = SpecCache(model, draft)
            assert tokens_of(stream_generate(model, draft, ids, prompt, max_tokens=12, block_size=5, sparse=sp, prompt_cache=cache, stats=stats)) == want, (name, positions)
            kept = r.selected.tolist() if positions == "original" else list(range(r.kept_tokens))
            seen = cache.context.positions + list(range(cache.position - cache.pending, cache.position))
            assert seen == kept + list(range(end, end + 12)) and stats.prefill.kept_tokens == r.kept_tokens and stats.accepted > 0
            if name != "nemotron_h": assert tokens_of(stream_generate(model, tiny_draft(model), ids, prompt, max_tokens=6, block_size=5, sparse=sp)) == want[:6]


def test_quantised_cache(family, ids):
    model, _ = family("qwen3_5")
    kw = dict(kv_bits=8, kv_group_size=32, quantized_kv_start=0)
    want = tokens_of(mlx_stream_generate(model, ids, mx.array(PROMPT), N, **kw))
    cache = make_prompt_cache(model)
    assert tokens_of(stream_generate(model, FakeDraft((PROMPT + want + [0] * 20).__getitem__), ids, PROMPT, max_tokens=N, block_size=4, prompt_cache=cache, **kw)) == want
    assert isinstance(cache[2], QuantizedKVCache) and cache[2].offset == 30 + N
    with pytest.raises(ValueError, match="kv_bits is 4: RotatingKVCache in slot 0 cannot be quantised"): stream_generate(tiny_model("gemma3"), None, ids, PROMPT, kv_bits=4)


# --- sampling ---

def test_a_seed_gives_one_text(family, ids):
    "With equality rules the text depends on the seed alone: not on the draft, the block size, the controller's clock or an interruption."
    model, _ = family("qwen3_5")
    kw = dict(max_tokens=14, temperature=0.8, top_p=0.9, top_k=50, min_p=0.01, seed=5)
    want = tokens_of(stream_generate(model, None, ids, PROMPT, **kw))
    assert want != tokens_of(stream_generate(model, None, ids, PROMPT, **{**kw, "seed": 6}))
    for kind, draft in drafts_for(model, PROMPT + want).items():
        for proposal in ("greedy", "shared"):
            for size in (4, "kod"): assert tokens_of(stream_generate(model, draft, ids, PROMPT, proposal=proposal, block_size=size, **kw)) == want, (kind, proposal, size)
    draft = drafts_for(model, PROMPT + want)["oracle"]
    cache = SpecCache(model, draft)
    gen = stream_generate(model, draft, ids, PROMPT, block_size=6, prompt_cache=cache, **kw)
    out = [next(gen).token for _ in range(4)]; gen.close()
    assert out + tokens_of(stream_generate(model, draft, ids, [], block_size=6, prompt_cache=cache, **{**kw, "max_tokens": 10})) == want
    mx.random.seed(3); a = tokens_of(stream_generate(model, None, ids, PROMPT, max_tokens=5, temperature=1.0))
    mx.random.seed(3); b = tokens_of(stream_generate(model, None, ids, PROMPT, max_tokens=5, temperature=1.0))
    assert a == b


@pytest.mark.parametrize("proposal", PROPOSALS)
@pytest.mark.parametrize("kind", ("matched", "mismatched", "one-hot"))
def test_blocks_of_three_have_the_targets_joint_distribution(proposal, kind):
    "A Markov chain over 4 tokens as the target: the first two tokens of a block, 16 outcomes, top-p cuts some."
    rng = np.random.default_rng(1)
    chain = rng.normal(size=(4, 4)).astype(np.float32)
    kw = dict(temperature=0.9, top_p=0.92, proposal=proposal)
    q = {"matched": chain[[0, 1]], "mismatched": -chain[[0, 1]], "one-hot": 30 * np.eye(4, dtype=np.float32)[[2, 3]]}[kind]
    P = np.exp(np.array(Sampling(**kw, seed=1).log_probs(mx.array(chain)), np.float64))
    joint = P[0][:, None] * P
    counts, T = Counter(), 1500
    def one(seed):
        s, places = Sampling(**kw, seed=seed), range(3)
        drafts, log_q = draw_proposals(mx.array(q), s, places[:2])
        rows = mx.array(chain)[mx.concatenate([mx.array([0]), drafts])]
        a, token = judge(rows, drafts, s, places, log_q)
        return a, token, drafts
    for base in range(0, T, 250):
        runs = [one(s) for s in range(base, base + 250)]
        mx.eval(runs)
        for a, token, drafts in runs:
            out = drafts.tolist()[:a.item()] + [token.item()]
            counts[tuple(out[:2])] += 1
    firsts = np.array([sum(c for k, c in counts.items() if k[0] == i) for i in range(4)])
    assert chi_square(firsts, P[0]) < 5.5
    pairs = np.array([[counts[i, j] for j in range(4)] for i in range(4)])
    long = pairs.sum()                                              # runs of two or more: given the first, the second follows the chain
    for i in range(4):
        if pairs[i].sum() > 100: assert chi_square(pairs[i], P[i]) < 6
    assert long > 0 or kind != "matched"


# --- never a loss, memory, threads ---

def test_what_the_controller_is_told_adds_up(family, ids):
    model, want = family("qwen3")
    stats = SpecStats()
    got = tokens_of(stream_generate(model, drafts_for(model, PROMPT + want)["wrong"], ids, PROMPT, max_tokens=2 * N, stats=stats))
    assert got == want and stats.plain_steps >= 2 and stats.accepted == 0 and stats.controller["rounds"] == stats.rounds + stats.plain_steps and stats.plain_steps + sum(stats.acceptance_lengths) == 2 * N - 1
    assert stats.curve.count(1) >= 2


@pytest.mark.parametrize("mode", ("block", "parked"))
def test_200_rounds_leave_memory_flat(mode, ids):
    model = tiny_model("qwen3_5", num_hidden_layers=3)
    want = tokens_of(mlx_stream_generate(model, ids, mx.array(PROMPT), 410))
    text = PROMPT + want + [0] * 20
    draft = FakeDraft(lambda i: text[i] if i % 2 and mode == "block" else 511 - text[i], layers=(0,))
    draft.extend = lambda features, cache, positions: cache.positions.extend(map(int, positions))
    at, stats = [], SpecStats()
    for i, r in enumerate(stream_generate(model, draft, ids, PROMPT, max_tokens=410, block_size=4 if mode == "block" else "kod", prompt_cache=SpecCache(model, draft) if mode == "block" else None, stats=stats)):
        assert r.token == want[i]
        if i % 100 == 5 and i > 100: del r; gc.collect(); at.append(mx.get_active_memory())
    assert stats.rounds >= 200 if mode == "block" else stats.plain_steps >= 200
    row = 2 * 2 * 2 * 32 * 4 * 8                                     # generous: keys and values of a token in two layers
    assert max(at) - min(at) < 300 * row


def test_threads_and_interleaving(family, ids):
    jobs = {}
    for name in ("qwen3_5", "gemma3"):
        model, want = family(name)
        for kind in ("oracle", "some", "untrained"): jobs[name, kind] = (model, drafts_for(model, PROMPT + want)[kind], want[:N])
    mixed, running = {k: [] for k in jobs}, {k: stream_generate(m, d, ids, PROMPT, max_tokens=N, block_size=5) for k, (m, d, _) in jobs.items()}
    for _ in range(N):
        for k, gen in running.items(): mixed[k].append(next(gen).token)
    assert all(mixed[k] == want for k, (_, _, want) in jobs.items())
    out, errors = {}, []
    def work(k, m, d):
        try: out[k] = tokens_of(stream_generate(m, d, ids, PROMPT, max_tokens=N, block_size=5))
        except BaseException as e: errors.append(e)
    threads = [threading.Thread(target=work, args=(k, m, d)) for k, (m, d, _) in list(jobs.items())[:3]]
    for t in threads: t.start()
    for t in threads: t.join()
    assert not errors and all(out[k] == jobs[k][2] for k in out) and len(out) == 3


# --- refusals ---

def test_refused_before_anything_is_computed(family, ids):
    model, _ = family("llama")
    draft = tiny_draft(model)
    for kw, words in ((dict(max_tokens=0), "max_tokens is 0"), (dict(block_size=0), "block_size is 0"), (dict(block_size="best"), "block_size is 'best'"), (dict(temperature=-1), "temperature is -1"),
                      (dict(proposal="x"), "proposal is 'x'"), (dict(prefill_step_size=0), "prefill_step_size is 0"), (dict(sparse=SpecPrefill(tiny_model("llama"))), "another model"),
                      (dict(prompt_cache=SpecCache(model)), "made without a draft")):
        with pytest.raises(ValueError, match=words): stream_generate(model, draft, ids, PROMPT, **kw)
    with pytest.raises(ValueError, match="token id 512"): stream_generate(model, draft, ids, [512])
    with pytest.raises(ValueError, match="the prompt is empty"): stream_generate(model, draft, ids, [])
    with pytest.raises(ValueError, match="bound to another"): stream_generate(tiny_model("llama"), draft, ids, PROMPT)
    with pytest.raises(TypeError): stream_generate(model, draft, ids, PROMPT, sampler=None)
    cache = SpecCache(model, draft)
    gen = stream_generate(model, draft, ids, PROMPT, prompt_cache=cache); next(gen)
    with pytest.raises(ValueError, match="under way"): stream_generate(model, draft, ids, PROMPT, prompt_cache=cache)
    gen.close()
    from vllm_mlx.rollback import batch_cache
    with pytest.raises(ValueError, match="speculation takes one sequence"): stream_generate(model, draft, ids, PROMPT, prompt_cache=batch_cache(model, [0, 0]))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.booleans(), min_size=30, max_size=30), st.integers(2, 9), st.integers(1, 25), st.sampled_from(("llama", "qwen3_5", "gemma3")), st.integers(0, 12))
def test_any_pattern_of_right_and_wrong(ids, family, right, size, n, name, stop_at):
    model, want = family(name)
    draft = FakeDraft(lambda i: (want + [0] * 40)[i - 30] if right[(i - 30) % 30] else 3)
    cache, out = SpecCache(model, draft), []
    gen = stream_generate(model, draft, ids, PROMPT, max_tokens=n, block_size=size, prompt_cache=cache)
    for r in gen:
        out.append(r.token)
        if len(out) == stop_at: gen.close()
    assert out == want[:len(out)] and len(out) == (min(n, stop_at) or n)
    check_state(model, cache, draft, out)


def test_bench(family, ids):
    model, want = family("qwen3")
    rows = bench_speculate(model, drafts_for(model, PROMPT + want)["oracle"], ids, PROMPT, max_tokens=N, block_sizes=(4, "kod"), repeats=2)
    assert list(rows) == ["plain", "block 4", "kod"] and all(r["same"] for r in rows.values()) and rows["plain"]["speedup"] == 1
    assert all(r["low"] <= r["tokens_per_second"] <= r["high"] for r in rows.values()) and rows["block 4"]["tokens_per_round"] > 3
