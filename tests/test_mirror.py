"""Drafting beside verification: the same tokens whatever is drafted and whenever, caches that hold exactly what was emitted, and no thread left, whatever fails."""
import copy, gc, threading, time, warnings
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mlx_lm.generate import stream_generate as mlx_stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors

from vllm_mlx.acceptance import chi_square
from vllm_mlx.dflash import tiny_draft
from vllm_mlx.gdn import fast_gdn
from vllm_mlx.layers import text_model
from vllm_mlx.mirror import (ANEDraftProcessor, Branch, Cancelled, DraftProcessor, EarlyExit, Job, MirrorStats, MLXDraftProcessor, PipelineJudge, Plan, ProcessDraftProcessor, Proposal, Span, WorkerError, align,
                             copy_draft, covered, draft_branches, forward_prefix, forward_suffix, likely_outcomes, make_soft_anchor, measure_conditions, mirror_sd_generate, overlap, parallel_generate,
                             pick_exit_layer, plot_timeline, processor_for, stream_mirror)
from vllm_mlx.mirror_sim import Costs, break_even, costs_of, gain_map, piped_round, play, plot_gain, run_both, serial_round
from vllm_mlx.models import TINY_FAMILIES, load, tiny_model
from vllm_mlx.rollback import rollback
from vllm_mlx.specprefill import SpecPrefill
from vllm_mlx.speculate import SpecCache, stream_generate
from vllm_mlx.verify import forward_with_hidden_states_and_rollback

PROMPT = np.random.default_rng(0).integers(1, 500, 30).tolist()
N = 40


def tokens_of(gen): return [r.token for r in gen]
def workers(): return [t for t in threading.enumerate() if t.name.startswith("draft on")]

@pytest.fixture(scope="module")
def ids(): return load("smollm2-135m")[1]

@pytest.fixture(scope="module")
def family(ids):
    "family -> (model, an untrained draft, PROMPT and the model's greedy text)"
    known = {}
    def get(name):
        if name not in known:
            model = tiny_model(name)
            known[name] = model, tiny_draft(model, block_size=6), PROMPT + tokens_of(mlx_stream_generate(model, ids, mx.array(PROMPT), N + 20)) + [0] * 40
        return known[name]
    return get

@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    for t in workers(): t.join(60)
    assert workers() == []


class Told(DraftProcessor):
    "Gives the text, but for some places; may fail, or wait, in its n-th job, in any of its three parts."
    def __init__(self, text, wrong=lambda i: False, seconds=0.0, fail_at=None, where="work", error=OSError("gone")):
        super().__init__("a script")
        self.text, self.wrong, self.seconds, self.fail_at, self.where, self.error, self.jobs, self.threads = text, wrong, seconds, fail_at, where, error, 0, set()
    def trip(self, where):
        self.threads.add((where, threading.current_thread().name))
        if where == self.where and self.fail_at is not None and (self.jobs == self.fail_at or where == "finish" and self.jobs > self.fail_at): raise self.error      # what is dropped is not finished: then the next that is
    def prepare(self, job): self.jobs += 1; self.trip("prepare"); return job
    def finish(self, out): self.trip("finish"); return out
    def work(self, job):
        self.trip("work")
        time.sleep(self.seconds(self.jobs) if callable(self.seconds) else self.seconds)
        out = []
        for b in job.branches:
            first = b.position + len(b.block)
            tokens = [511 - self.text[i] if self.wrong(i) else self.text[i] for i in range(first, first + b.drafts)]
            out.append(Proposal(tokens, None, [{t: 0.9, (t + 1) % 512: 0.1} for t in tokens] if job.top > 1 else None))
        return out

class StandIn:
    "The interface of the Neural Engine's draft."
    def __init__(self, draft, seconds=0.0): self.draft, self.config, self.seconds, self.ready = draft, draft.config, seconds, None
    def __getattr__(self, name): return getattr(self.draft, name)
    def prepare_forward(self, noise, cache, position): self.ready = np.array(self.draft.forward(noise, None, cache, position).astype(mx.float32))
    def run_kernels(self): time.sleep(self.seconds)
    def read_output(self): return mx.array(self.ready)


def check_cache(model, cache, tokens):
    "The target's cache stands for the tokens, to rounding; so does the draft's context with what is pending."
    assert cache.tokens == tokens and cache.unread == []
    probe, fresh = mx.array([[9]]), make_prompt_cache(model)
    model(mx.array([tokens]), cache=fresh)
    assert mx.abs(model(probe, cache=copy.deepcopy(cache.target)) - model(probe, cache=fresh)).max().item() < 2e-3
    assert cache.context.offset + cache.pending == len(tokens)


# --- two halves of a forward

@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_halves_are_the_whole(name, family):
    model, _, text = family(name)
    n, L = len(text_model(model).layers), 7
    block, wanted = mx.array([text[30:30 + L]]), list(range(0, n, 2))
    start = make_prompt_cache(model)
    mx.eval(model(mx.array([text[:30]]), cache=start))
    for exit_layer in (0, n // 2, n - 1):
        whole, halves = copy.deepcopy(start), copy.deepcopy(start)
        logits, embed, hidden, records = forward_with_hidden_states_and_rollback(model, block, whole, wanted)
        prefix = forward_prefix(model, block, halves, exit_layer, wanted)
        mx.eval(prefix.hidden, list(prefix.captured.values()))
        assert set(prefix.captured) == {i for i in wanted if i <= exit_layer}
        got = forward_suffix(prefix)
        for a, b in zip((logits, embed, *hidden), (*got[:2], *got[2])): assert a.dtype == b.dtype and mx.array_equal(a, b).item()
        for i, h in prefix.captured.items(): assert mx.array_equal(h, hidden[wanted.index(i)]).item()
        for keep in range(L, -1, -1):                                              # cut further and further
            rollback(whole, records, keep, keep=True)
            rollback(halves, got[3], keep, keep=True)
            a, b = (model(mx.array([[3, 4]]), cache=copy.deepcopy(c)) for c in (whole, halves))
            assert mx.array_equal(a, b).item()

def test_halves_with_fast_gdn(family):
    model, _, text = family("qwen3_5")
    with fast_gdn(model):
        c, d = (make_prompt_cache(model) for _ in range(2))
        a = forward_with_hidden_states_and_rollback(model, mx.array([text[:12]]), c, [1])
        b = forward_suffix(forward_prefix(model, mx.array([text[:12]]), d, 1, [1]))
        assert mx.array_equal(a[0], b[0]).item() and mx.array_equal(a[2][0], b[2][0]).item()

@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_failing_prefix_changes_nothing(name, family):
    model, _, text = family(name)
    cache = make_prompt_cache(model)
    model(mx.array([text[:10]]), cache=cache)
    want = model(mx.array([[5]]), cache=copy.deepcopy(cache))
    def fail(*a): raise OSError("no")
    for kw in (dict(at_exit=fail), dict(then=fail)):
        with pytest.raises(OSError): forward_prefix(model, mx.array([text[10:16]]), cache, 1, [0, 1], **kw)
        assert mx.array_equal(model(mx.array([[5]]), cache=copy.deepcopy(cache)), want).item()
    with pytest.raises(ValueError, match="exit_layer is -1"): forward_prefix(model, mx.array([[1]]), cache, -1)
    forward_prefix(model, mx.array([text[10:16]]), cache, 1, [0]).abandon()
    assert mx.array_equal(model(mx.array([[5]]), cache=copy.deepcopy(cache)), want).item()

def test_early_exit_refuses_what_it_cannot_copy(family):
    model = tiny_model("llama")
    class Scaled(type(model)):
        def __call__(self, x, cache=None): return super().__call__(x, cache=cache) * (1 + len([l for l in self.layers if type(l).__call__.__qualname__.startswith("Transformer")]))
    model.__class__ = Scaled
    with pytest.raises(ValueError, match="no early exit"): EarlyExit(model)

@given(st.integers(1, 12), st.integers(1, 20), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_soft_anchor(V, k, seed):
    rng = np.random.default_rng(seed)
    logits, table, x = rng.standard_normal(V).astype(np.float32), rng.standard_normal((V, 5)).astype(np.float32), rng.standard_normal((1, 3, 5)).astype(np.float32)
    got = np.array(make_soft_anchor(mx.array(x), mx.array(logits), mx.array(table).__getitem__, k))
    best = np.argsort(-logits)[:k]
    w = np.exp(logits[best]); w /= w.sum()
    np.testing.assert_allclose(got[0, 0], w @ table[best], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(got[:, 1:], x[:, 1:])


# --- alignment

tokens_, few = st.integers(0, 3), st.lists(st.integers(0, 3), min_size=1, max_size=5)

@given(few, st.lists(st.tuples(st.lists(tokens_, max_size=4), st.lists(tokens_, max_size=6)), max_size=4))
@settings(max_examples=300, deadline=None)
def test_align_is_dropping_a_prefix(new, guesses):
    branches, drafted = [Branch(tuple(p), (1,), 0, len(t)) for p, t in guesses], [t for _, t in guesses]
    found = align(new, branches, drafted)
    fits = [i for i, (p, t) in enumerate(guesses) if len(new) >= len(p) and (p + t)[:len(new)] == new and len(p + t) > len(new)]
    assert (found is None) == (not fits)
    if fits: assert found == (fits[0], len(new) - len(guesses[fits[0]][0])) and (guesses[fits[0]][0] + drafted[fits[0]])[len(new):] == drafted[fits[0]][found[1]:]

@given(st.lists(st.dictionaries(tokens_, st.floats(0.01, 1), min_size=1, max_size=4), min_size=1, max_size=4), st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_outcomes_are_the_joint_distribution(beliefs, seed):
    beliefs = [{t: p / sum(b.values()) for t, p in b.items()} for b in beliefs]
    drafts = np.random.default_rng(seed).integers(0, 4, len(beliefs) - 1).tolist()
    out = likely_outcomes(drafts, beliefs, 99)
    assert abs(sum(p for *_, p in out) - 1) < 1e-9 and [p for *_, p in out] == sorted((p for *_, p in out), reverse=True)
    assert len({(a, t) for a, t, _ in out}) == len(out) and all(a >= len(drafts) or t != drafts[a] for a, t, _ in out)


# --- the same tokens

PLANS = [dict(), dict(condition="known"), dict(condition="long"), dict(branches=3), dict(branches=3, condition="known"), dict(soft=3), dict(early=True), dict(early=True, branches=3), dict(early=True, soft=3), dict(early=True, condition="gap", branches=2), dict(early=True, condition="long")]

@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_same_tokens_in_every_family(name, family, ids):
    model, draft, text = family(name)
    for i, plan in enumerate(PLANS if name == "qwen3_5" else PLANS[::3]):
        n = 12 + i
        for wrong in ((lambda i: False), (lambda i: i % 4 == 0))[i % 2:]:
            stats = MirrorStats()
            got = tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=n, processor=Told(text, wrong), fall_back=False, fresh="processor", stats=stats, **plan))
            assert got == text[30:30 + n] and stats.generation_tokens == n and stats.finish_reason == "length"
            assert stats.useful + stats.wasted == stats.branches and 1 + sum(stats.acceptance_lengths) + stats.plain_steps >= n
    for plan in ({}, dict(early=True, branches=2)):
        assert tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=14, fall_back=False, **plan)) == text[30:44]

@given(st.sets(st.integers(30, 80)), st.integers(2, 9), st.integers(1, 40), st.sampled_from(PLANS), st.sampled_from(["processor", "target"]))
@settings(max_examples=14, deadline=None)
def test_same_tokens_at_any_acceptance(family, ids, wrong, block, n, plan, fresh):
    model, draft, text = family("qwen3_5")
    cache = SpecCache(model, draft)
    got = tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=n, processor=Told(text, wrong.__contains__), block_size=block, fall_back=False, fresh=fresh, prompt_cache=cache, **plan))
    assert got == text[30:30 + n]
    check_cache(model, cache, text[:30 + n])

def test_every_accepted_count_aligns(family, ids):
    "With one draft wrong, at each place of a block in turn, the block after it is right in full: nothing is shifted."
    model, draft, text = family("qwen3_5")
    for bad in range(1, 6):
        stats = MirrorStats()
        got = tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=36, processor=Told(text, lambda i: i == 30 + 6 + bad), block_size=6, fresh="processor", fall_back=False, stats=stats))
        assert got == text[30:66]
        lengths = stats.acceptance_lengths
        short = [i for i, a in enumerate(lengths[:-1]) if a < 6]
        assert len(short) == 1 and all(a == 6 for i, a in enumerate(lengths[:-1]) if i not in short), (bad, lengths)
        assert all((m if a == 5 else h) == 0 for a, (h, m) in stats.hits.items())

def test_branches_for_a_rejection_apply(family, ids):
    "A runner-up that is the right token makes the branch for that rejection apply, at its accepted count."
    model, draft, text = family("llama")
    class Knows(Told):
        def work(self, job):
            out = super().work(job)
            for b, p in zip(job.branches, out):
                for i, t in enumerate(p.tokens): p.beliefs[i] = {t: 0.6, text[b.position + len(b.block) + i]: 0.4} if t != text[b.position + len(b.block) + i] else {t: 1.0}
            return out
    stats = MirrorStats()
    got = tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=N, processor=Knows(text, lambda i: i % 3 == 0), block_size=6, branches=8, fresh="processor", fall_back=False, stats=stats))
    assert got == text[30:30 + N] and stats.hit_rate == 1.0 and len(stats.fresh) == 1
    assert {a for a in stats.hits} != {5}

def test_real_drafts_in_all_processors(family, ids):
    model, draft, text = family("qwen3_5")
    for processor in (MLXDraftProcessor(draft), MLXDraftProcessor(draft, copy=True), ANEDraftProcessor(StandIn(draft)), ProcessDraftProcessor(draft)):
        for plan in (dict(), dict(early=True)):
            cache = SpecCache(model, draft)
            assert tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=20, processor=processor, fall_back=False, fresh="processor", prompt_cache=cache, **plan)) == text[30:50]
            check_cache(model, cache, text[:50])
            assert processor.thread is None and (isinstance(processor, ProcessDraftProcessor) or processor.context.offset <= 50)

def test_worker_proposes_what_the_draft_would(family, ids):
    "The worker's context is right at every fresh draft, after hits, misses and rollbacks."
    model, draft, text = family("qwen3_5")
    seen = []
    class Spy(MLXDraftProcessor):
        def work(self, job):
            out = super().work(job)
            seen.append((job.branches[0], out[0].tokens, self.context.offset))
            return out
    tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=24, processor=Spy(draft, copy=True), fall_back=False, fresh="processor", early=True))
    fresh = [(b, t) for b, t, _ in seen if not b.presumed]
    assert len(fresh) > 3
    from vllm_mlx.verify import forward_with_hidden_states
    for b, tokens in fresh:
        features = draft.features(forward_with_hidden_states(model, mx.array([text[:b.position]]), capture_layers=draft.config.target_layer_ids)[2])
        context = draft.make_cache()
        draft.extend(features, context)
        assert b.block == (text[b.position],)
        want = draft.propose(b.block[0], None, context, b.drafts + 1, b.position)[0]
        best = mx.take_along_axis(want, mx.array(tokens)[:, None], axis=-1)[:, 0]
        assert mx.abs(best - want.max(-1)).max().item() < 1e-3                     # the likeliest, or as likely to rounding


# --- the rest of a generation

def test_turns_stops_and_looking(family, ids):
    model, draft, text = family("qwen3_5")
    cache = SpecCache(model, draft)
    gen = stream_mirror(model, draft, ids, PROMPT, max_tokens=30, processor=Told(text), fall_back=False, prompt_cache=cache)
    for i in range(9):
        assert next(gen).token == text[30 + i]
        if i % 2: check_cache(model, cache, text[:31 + i])                         # looking in the middle of a block
    gen.close()
    check_cache(model, cache, text[:39])
    assert tokens_of(stream_generate(model, draft, ids, [], max_tokens=4, block_size=4, prompt_cache=cache)) == text[39:43]
    for processor in (None, ANEDraftProcessor(StandIn(draft))):
        again = copy.copy(cache)
        again._target, again._context, again.tokens, again._features = copy.deepcopy(cache._target), cache._context.copy(), list(cache.tokens), list(cache._features)
        assert tokens_of(stream_mirror(model, draft, ids, [], max_tokens=6, processor=processor, fall_back=False, prompt_cache=again)) == text[43:49]
    stop = next(i for i in range(34, 60) if text[i] not in text[30:i])
    stats = MirrorStats()
    got = list(stream_mirror(model, draft, ids, PROMPT, stop_tokens=[text[stop]], processor=Told(text), fall_back=False, stats=stats))
    assert [r.token for r in got] == text[30:stop + 1] and stats.finish_reason == "stop"

def test_processors_quantised_cache_and_sparse(family, ids):
    model, draft, text = family("llama")
    penalty = make_logits_processors(repetition_penalty=1.3)
    want = tokens_of(mlx_stream_generate(model, ids, mx.array(PROMPT), 16, logits_processors=penalty))
    assert tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=16, logits_processors=penalty, fall_back=False, early=True)) == want
    wide, kv = tiny_model("llama", head_dim=32), dict(max_tokens=12, kv_bits=8, kv_group_size=32, quantized_kv_start=0)
    want = tokens_of(stream_generate(wide, None, ids, PROMPT, **kv))
    assert tokens_of(stream_mirror(wide, tiny_draft(wide), ids, PROMPT, fall_back=False, **kv)) == want
    long, sparse = np.random.default_rng(5).integers(1, 500, 200).tolist(), SpecPrefill(model, threshold=0, keep_pct=0.5)
    want = tokens_of(sparse.stream_generate(ids, long, max_tokens=10))
    assert tokens_of(stream_mirror(model, draft, ids, long, max_tokens=10, sparse=sparse, fall_back=False, fresh="processor")) == want
    with pytest.raises(ValueError, match="a sparse prefill keeps no features"):
        class Other(StandIn):
            def make_cache(self): return SimpleNamespace()
        stream_mirror(model, draft, ids, long, sparse=sparse, processor=ANEDraftProcessor(Other(draft)))

def test_two_generations_at_once(family, ids):
    model, draft, text = family("qwen3_5")
    gens = [stream_mirror(model, draft, ids, PROMPT, max_tokens=18, fall_back=False, early=early) for early in (False, True)]
    got = list(zip(*gens))
    assert [a.token for a, _ in got] == [b.token for _, b in got] == text[30:48]

def test_whole_texts(family, ids):
    model, draft, text = family("llama")
    want = "".join(r.text for r in mlx_stream_generate(model, ids, mx.array(PROMPT), 16))
    for f in (parallel_generate, mirror_sd_generate):
        out, stats = f(model, draft, ids, PROMPT, max_tokens=16, fall_back=False)
        assert out == want and stats.generation_tokens == 16 and stats.to_dict()["processor"] == "the CPU"

def test_prompt_in_chunks_reaches_the_engine(family, ids):
    model, draft, text = family("qwen3_5")
    p = ANEDraftProcessor(StandIn(draft))
    assert tokens_of(stream_mirror(model, SimpleNamespaceDraft(draft), ids, PROMPT, max_tokens=10, processor=p, prefill_step_size=7, fall_back=False, fresh="processor")) == text[30:40]
    assert p.context.tokens() >= 30

class SimpleNamespaceDraft:
    "A draft whose context no processor can take over, so that the prompt's features are kept for it."
    def __init__(self, draft): self.draft = draft
    def __getattr__(self, name): return getattr(self.draft, name)
    def make_cache(self):
        class Own(type(self.draft.make_cache())): pass
        own = Own.__new__(Own); own.__dict__.update(self.draft.make_cache().__dict__)
        return own

@pytest.mark.parametrize("name, early", [("llama", False), ("qwen3_5", True)])
def test_sampling_is_exact(name, early, family, ids):
    "Pairs of tokens drawn through the pipeline follow the target's own probabilities, when drafts are drawn and rejected by probability; a hybrid's too, whose state is rolled back."
    model, draft, _ = family(name)
    kw, counts = dict(temperature=1.0, top_k=3, early=early), {}
    for seed in range(RUNS := 96):
        got = tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=4, block_size=3, seed=seed, proposal="sampled", fall_back=False, fresh="target", branches=2, processor=Echo(draft), **kw))
        counts[tuple(got[1:4:2])] = counts.get(tuple(got[1:4:2]), 0) + 1
    def rows(tokens):
        lp = model(mx.array([tokens]))[0, -1].astype(mx.float32)
        best = np.argsort(-np.array(lp))[:3]
        p = np.exp(np.array(lp)[best] - np.array(lp)[best].max())
        return list(zip(best.tolist(), p / p.sum()))
    want = {}
    def grow(tokens, share):
        if len(tokens) == 4 or tokens and tokens[-1] in ids.eos_token_ids: key = tuple(tokens[1:4:2]); want[key] = want.get(key, 0) + share; return
        for t, p in rows(PROMPT + tokens): grow(tokens + [t], share * p)
    grow([], 1.0)
    assert set(counts) <= set(want)
    keys = sorted(want, key=want.get)
    big = [k for k in keys if want[k] * RUNS >= 4]
    seen, weights = [counts.get(k, 0) for k in big], [want[k] for k in big]
    rest = RUNS - sum(seen), 1 - sum(weights)
    assert chi_square([*seen, rest[0]], [*weights, rest[1]]) < 2.2

class Echo(DraftProcessor):
    "Draft logits that depend on the place alone: a draft without a worker's cost."
    def __init__(self, draft): super().__init__("an echo"); self.V = draft.config.vocab_size
    def work(self, job):
        table = lambda i: np.random.default_rng(i).standard_normal(self.V).astype(np.float32) * 3
        out = []
        for b in job.branches:
            lg = np.stack([table(b.position + len(b.block) + i) for i in range(b.drafts)])
            out.append(Proposal(lg.argmax(-1).tolist(), lg, [{int(r.argmax()): 0.5, int(r.argsort()[-2]): 0.3} for r in lg]))
        return out

@pytest.mark.parametrize("rule", ["greedy", "shared"])
def test_a_seed_keeps_its_text(rule, family, ids):
    model, draft, _ = family("qwen3_5")
    kw = dict(max_tokens=20, temperature=0.9, seed=11, proposal=rule)
    want = tokens_of(stream_generate(model, None, ids, PROMPT, **kw))
    for plan in (dict(), dict(early=True, branches=2), dict(condition="long")): assert tokens_of(stream_mirror(model, draft, ids, PROMPT, fall_back=False, **kw, **plan)) == want


# --- no MLX where it must not be

def test_no_mlx_in_the_engines_thread(family, ids, monkeypatch):
    model, draft, text = family("llama")
    where = []
    def watched(f):
        def call(*a, **k):
            if threading.current_thread().name.startswith("draft on Core ML programs"): where.append(f)
            return f(*a, **k)
        return call
    p = ANEDraftProcessor(StandIn(draft, 0.002))
    for name in ("eval", "async_eval", "array", "matmul", "concatenate", "argpartition", "exp", "zeros", "softmax", "stream"):
        if not isinstance(getattr(mx, name), type): monkeypatch.setattr(mx, name, watched(getattr(mx, name)))
    assert tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=12, processor=p, fall_back=False, fresh="processor")) == text[30:42]
    assert where == []

def test_engine_draft_of_chapter_22(family, ids, tmp_path, monkeypatch):
    "The real programs, in the reference interpreter; as a processor beside its MLX twin, and as draft and processor in one."
    pytest.importorskip("coremltools", reason="not available here: pip install 'coremltools>=9.0,<10'")
    import vllm_mlx.ane.draft as ane
    model, draft, text = family("llama")
    engine, where = ane.ANEDraftModel(draft, "reference", context=64, folder=tmp_path, precision="float32").load_weights(), []
    def watched(f):
        def call(*a, **k):
            if threading.current_thread().name.startswith("draft on Core ML programs"): where.append(f)
            return f(*a, **k)
        return call
    for name in ("eval", "async_eval", "array", "matmul", "concatenate", "zeros", "softmax"):
        if not isinstance(getattr(mx, name), type): monkeypatch.setattr(mx, name, watched(getattr(mx, name)))
    for d in (draft, engine):
        stats = MirrorStats()
        assert tokens_of(stream_mirror(model, d, ids, PROMPT, max_tokens=6, processor=ANEDraftProcessor(engine), fall_back=False, fresh="processor", early=d is engine, stats=stats)) == text[30:36]
        assert stats.processor == "Core ML programs, run by reference" and len(stats.fresh) + len(stats.ahead) == stats.rounds > 0
    assert where == [] and isinstance(processor_for(engine), ANEDraftProcessor)

def test_parts_run_where_they_belong(family, ids):
    model, draft, text = family("llama")
    p, me = Told(text), threading.current_thread().name
    tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=20, processor=p, fall_back=False, early=True))
    assert p.threads == {("prepare", me), ("finish", me), ("work", "draft on a script")}

def test_copies_share_nothing(family):
    for tied in (True, False):
        model = tiny_model("llama", tie_word_embeddings=tied)
        draft = tiny_draft(model)
        for dtype in (None, mx.bfloat16):
            twin = copy_draft(draft, dtype)
            x = mx.array([[3, 511, 511, 511]])
            assert twin.fc.weight.dtype == (dtype or mx.float32)
            if dtype is None: assert mx.array_equal(twin(x), draft(x)).item()
            else: assert mx.abs(twin(x).astype(mx.float32) - draft(x)).max().item() < 0.3
        before = draft(x)
        twin.fc.weight = twin.fc.weight * 0
        twin._lent.embed.weight = twin._lent.embed.weight * 0
        assert mx.array_equal(draft(x), before).item()
    quantised = tiny_model("llama", hidden_size=64)
    nn.quantize(quantised, 32, 4)
    draft = tiny_draft(quantised)
    twin = copy_draft(draft)
    assert mx.array_equal(twin(x), draft(x)).item()

def test_work_in_many_threads_at_once(family):
    "Copies and shared drafts, eight jobs on three workers at once, give what one thread gives."
    model, draft, text = family("qwen3_5")
    features = mx.random.normal((1, 12, draft.fc.weight.shape[1]), key=mx.random.key(0))
    context = draft.make_cache()
    draft.extend(features, context)
    branches = [Branch((), (t,), 12, 5) for t in range(4)]
    want = [draft.propose(t, None, context, 6, 12)[0].argmax(-1).tolist() for t in range(4)]
    ps = [MLXDraftProcessor(draft, copy=c) for c in (False, True, False)]
    for p in ps: p.open(context)
    for _ in range(8):
        for p in ps: p.start(Job(list(branches)))
        mx.eval(model(mx.array([text[:30]])))
        for p in ps: assert [x.tokens for x in p.join(30)[0]] == want
    assert [p.close() for p in ps] == [None] * 3


# --- whatever fails

@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("where", ["prepare", "work", "finish"])
@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_failing_worker(name, where, early, family, ids):
    model, draft, text = family(name)
    for k in (1, 2, 5):
        cache, out = SpecCache(model, draft), []
        with pytest.raises(WorkerError if where == "work" else OSError, match="gone") as e:
            for r in stream_mirror(model, draft, ids, PROMPT, max_tokens=N, processor=Told(text, lambda i: i % 7 == 0, fail_at=k, where=where), early=early, fresh="processor", fall_back=False, prompt_cache=cache): out.append(r.token)
        if where == "work": assert isinstance(e.value.__cause__, OSError)
        assert workers() == [] and out == text[30:30 + len(out)]
        check_cache(model, cache, text[:30 + len(out)]) if out else None
        assert tokens_of(stream_mirror(model, draft, ids, [], max_tokens=5, processor=Told(text), prompt_cache=cache, fall_back=False)) == text[30 + len(out):35 + len(out)]

class Patient(Told):
    "Only the third job may come too late: on a busy machine any might."
    def join(self, timeout=None): return super().join(timeout if self.jobs == 3 else 60)

def test_going_on_without_the_worker(family, ids):
    model, draft, text = family("qwen3_5")
    end = threading.Event()
    for kw in (dict(fail_at=3), dict(seconds=lambda n: (end.wait(60), 0)[1] if n == 3 else 0)):
        stats = MirrorStats()
        assert tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=N, processor=Patient(text, **kw), fresh="processor", on_failure="serial", timeout=0.3, block_size="kod", stats=stats, fall_back=False)) == text[30:30 + N]
        assert isinstance(stats.failures[0], WorkerError) and stats.why.startswith("the serial loop goes on alone")
    end.set()

@pytest.mark.parametrize("early", [False, True])
def test_failing_target(early, family, ids, monkeypatch):
    "The verification fails while the worker is busy: the error is the target's, the worker is joined, the caches are exact."
    model, draft, text = family("qwen3_5")
    import vllm_mlx.mirror as mirror
    for moment in ("judge", "rollback", "_log_softmax"):
        real, calls = getattr(mirror, moment), []
        def failing(*a, **k):
            calls.append(1)
            if len(calls) == 3: raise MemoryError("no room")
            return real(*a, **k)
        monkeypatch.setattr(mirror, moment, failing)
        cache, out = SpecCache(model, draft), []
        with pytest.raises(MemoryError, match="no room"):
            for r in stream_mirror(model, draft, ids, PROMPT, max_tokens=N, processor=Told(text, seconds=0.01), early=early, fresh="processor", fall_back=False, prompt_cache=cache): out.append(r.token)
        monkeypatch.undo()
        assert workers() == [] and len(out) > 3
        check_cache(model, cache, text[:30 + len(out)])

def test_two_failures_are_both_told(family, ids, monkeypatch):
    model, draft, text = family("llama")
    import vllm_mlx.mirror as mirror
    real, calls = mirror.rollback, []
    def failing(*a, **k):
        calls.append(1)
        if len(calls) == 2: raise MemoryError("no room")
        return real(*a, **k)
    monkeypatch.setattr(mirror, "rollback", failing)
    stats = MirrorStats()
    with pytest.raises(MemoryError) as e: tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=N, processor=Told(text, fail_at=3), fresh="processor", fall_back=False, stats=stats))
    assert "the draft's worker failed too: OSError('gone')" in e.value.__notes__ and isinstance(stats.failures[0], OSError)

def test_unseen_failure_is_warned_of(family, ids):
    "The last draft fails, and nobody needs it: the text is whole, and the failure is told."
    model, draft, text = family("llama")
    gen = stream_mirror(model, draft, ids, PROMPT, max_tokens=N, processor=Told(text, fail_at=2), fresh="processor", fall_back=False)
    assert [next(gen).token, next(gen).token] == text[30:32]
    with pytest.warns(RuntimeWarning, match="worker failed too: OSError"): gen.close()

def test_interrupt_throw_close_and_forgetting(family, ids):
    model, draft, text = family("qwen3_5")
    class Interrupted(Told):
        def join(self, timeout=None):
            if self.jobs == 4: raise KeyboardInterrupt
            return super().join(timeout)
    for early in (False, True):
        cache, out = SpecCache(model, draft), []
        with pytest.raises(KeyboardInterrupt):
            for r in stream_mirror(model, draft, ids, PROMPT, max_tokens=N, processor=Interrupted(text, seconds=0.005), fresh="processor", early=early, fall_back=False, prompt_cache=cache): out.append(r.token)
        check_cache(model, cache, text[:30 + len(out)])
        for end in ("throw", "close", "forget"):
            cache = SpecCache(model, draft)
            gen = stream_mirror(model, draft, ids, PROMPT, max_tokens=N, processor=Told(text, seconds=0.005), fresh="processor", early=early, fall_back=False, prompt_cache=cache)
            for _ in range(8): next(gen)
            assert len(workers()) == 1
            if end == "throw":
                with pytest.raises(ZeroDivisionError): gen.throw(ZeroDivisionError())
            elif end == "close": gen.close()
            else: del gen; gc.collect()
            assert workers() == []
            check_cache(model, cache, text[:38])
        stream_mirror(model, draft, ids, PROMPT, max_tokens=N)                      # never begun

@pytest.mark.parametrize("early", [False, True])
def test_interrupted_anywhere_in_a_round(early, family, ids, monkeypatch):
    "Before and after each step of the third block: the tokens so far, caches that hold them, no thread, and the text goes on."
    model, draft, text = family("qwen3_5" if early else "llama")
    import vllm_mlx.mirror as mirror
    for owner, moment in ((mirror, "judge"), (mirror, "forward_suffix"), (mirror._MirrorRun, "took"), (mirror._MirrorRun, "launch"), (DraftProcessor, "join")):
        for after in (False, True):
            real, calls = getattr(owner, moment), []
            def interrupted(*a, **k):
                calls.append(1)
                if len(calls) == 4 and not after: raise KeyboardInterrupt
                out = real(*a, **k)
                if len(calls) == 4 and after: raise KeyboardInterrupt
                return out
            monkeypatch.setattr(owner, moment, interrupted)
            cache, out = SpecCache(model, draft), []
            try:
                for r in stream_mirror(model, draft, ids, PROMPT, max_tokens=20, processor=Told(text, lambda i: i % 5 == 0), early=early, fresh="processor", fall_back=False, prompt_cache=cache): out.append(r.token)
            except KeyboardInterrupt: assert workers() == [] and len(out) < 20
            else: assert moment == "forward_suffix" and not early                   # which is not called there
            monkeypatch.undo()
            assert out == text[30:30 + len(out)], (moment, after)
            if len(out) < 20: check_cache(model, cache, text[:30 + len(out)])
    assert tokens_of(stream_mirror(model, draft, ids, [], max_tokens=5, processor=Told(text), prompt_cache=cache, fall_back=False)) == text[30 + len(out):35 + len(out)]

def test_hanging_worker(family, ids):
    model, draft, text = family("llama")
    cache, out, end = SpecCache(model, draft), [], threading.Event()
    with pytest.raises(WorkerError, match="gave no answer in 0.5 s"):
        for r in stream_mirror(model, draft, ids, PROMPT, max_tokens=N, processor=Patient(text, seconds=lambda n: 0 if n != 3 else (end.wait(), 0)[1]), fresh="processor", fall_back=False, timeout=0.5, prompt_cache=cache): out.append(r.token)
    assert len(workers()) == 1                                                     # it hangs for as long as it likes, and nobody waits
    end.set()
    check_cache(model, cache, text[:30 + len(out)])

def test_cancelled_between_groups(family):
    model, draft, text = family("llama")
    stops = iter([False, True])
    with pytest.raises(Cancelled): draft_branches(draft, draft.make_cache(), [Branch((), (1,), 3, 2), Branch((), (1,), 4, 2)], stop=lambda: next(stops))
    p = Told(text)
    with pytest.raises(RuntimeError, match="not open"): p.start(Job([]))
    p.open()
    with pytest.raises(RuntimeError, match="is in use"): p.open()
    assert p.close() is None and p.close() is None


# --- does it pay?

@given(st.floats(0.3, 3.0), st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_judge_finds_the_faster_loop(speed, per_round):
    j, piped, done = PipelineJudge(), 0, 0
    while done < 4000:
        piped += per_round * j.pipe
        j.update(per_round, per_round / (speed if j.pipe else 1.0))
        done += per_round
    if speed > 1.1: assert piped / done > 0.75
    if speed < 0.9: assert piped / done < 0.25

def test_a_look_that_begins_dearly_is_rare_and_one_that_pays_costs_nothing():
    "What a look costs decides when the next one comes, within bounds: one hiccup is not taken for the rule for ever."
    def looks(first, pipe, tokens=20_000):
        j, done, at = PipelineJudge(), 0, []
        while done < tokens:
            before = j.pipe
            j.update(3, 3 / 260 if not j.pipe else first if j.skip else 3 / pipe)
            done += 3
            if j.pipe and not before: at.append(done)
        return at, j
    dear, j = looks(1.3, 65)
    cheap, _ = looks(3 / 65, 65)
    assert len(dear) < len(cheap) and all(b - a > 4000 for a, b in zip(dear, dear[1:])) and not j.pipe
    hiccup, j = looks(60.0, 65)
    assert max(b - a for a, b in zip(hiccup, hiccup[1:])) < 2 * j.longest + 100
    j = PipelineJudge()
    while not (j.pipe and not j.looking): j.update(3, 3 / 260 if not j.pipe else 5.0 if j.skip else 3 / 400)
    assert "the pipeline pays" in j.why and j.left <= 128                          # it found the faster loop: nothing to repay
    for bad in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="share is"): PipelineJudge(share=bad)

@pytest.mark.parametrize("per_round", [1, 3, 8])
@pytest.mark.parametrize("turn", [700, 1500, 3000])
def test_a_pipeline_that_turns_slow_is_left_at_once(turn, per_round):
    "And one that is slower only because the whole machine is stays."
    def played(pipe, serial, tokens=6000):
        j, done, out = PipelineJudge(), 0, {True: 0, False: 0}
        while done < tokens:
            late = done >= turn
            if late: out[j.pipe] += per_round
            j.update(per_round, per_round / (pipe if j.pipe else serial)[late])
            done += per_round
        return out
    assert played((2.0, 0.5), (1.0, 1.0))[True] < 0.1 * (6000 - turn) + 60 * per_round                  # thirty rounds or so, and looks
    assert played((2.0, 0.2), (1.0, 0.1))[True] > 0.85 * (6000 - turn)

def test_falls_back_and_comes_back(family, ids):
    "What a round takes is told to the judge: no clock decides this test. A judge goes on from what it has seen."
    model, draft, text = family("qwen3_5")
    class Priced(PipelineJudge):
        def __init__(self, price): super().__init__(probe=12, wait=64); self.price, self.looks = price, []
        def update(self, tokens, seconds, counts=True): self.looks.append(self.pipe); super().update(tokens, self.price(self.pipe), counts)
    n = N + 18
    for price, words, ends in ((lambda pipe: 0.8 if pipe else 0.02, "the serial loop is faster", False), (lambda pipe: 0.02, "the pipeline pays", True)):
        stats, judge = MirrorStats(), Priced(price)
        assert tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=n, processor=Told(text), fresh="processor", block_size="kod", stats=stats, fall_back=judge)) == text[30:30 + n]
        assert words in stats.why and set(judge.looks) == {False, True} and judge.looks[-1] == judge.pipe == ends
        seen = len(judge.looks)
        assert tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=4, processor=Told(text), fresh="processor", fall_back=judge)) == text[30:34] and judge.looks[seen] == ends
    for bad in ("yes", 1, None):
        with pytest.raises(ValueError, match="fall_back is"): stream_mirror(model, draft, ids, PROMPT, fall_back=bad)

def test_clock_is_made_of_timestamps(family, ids, monkeypatch):
    model, draft, text = family("llama")
    stats, began = MirrorStats(), threading.Event()
    class Begins(Told):
        def work(self, job): began.set(); return super().work(job)
    import vllm_mlx.mirror as mirror
    real = mirror.judge
    def waits(*a):                                                                  # within the verification: until the draft beside it has begun
        assert not p.busy or began.wait(30)
        began.clear()
        return real(*a)
    monkeypatch.setattr(mirror, "judge", waits)
    p = Begins(text, seconds=0.01)
    tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=N, processor=p, fresh="processor", fall_back=False, stats=stats))
    c = stats.clock()
    assert 0 < c["overlap"] <= min(c["target"], c["draft"]) + 1e-9 and c["draft"] >= 0.01 * len(stats.of("draft")) and c["target"] + c["draft"] - c["overlap"] <= c["total"] + 1e-9
    assert 0 < c["stall"] <= c["total"]
    for side in ("target", "draft"):
        spans = sorted(stats.of(side))
        assert all(a < b for a, b in spans) and all(x[1] <= y[0] + 1e-9 for x, y in zip(spans, spans[1:]))
    fig = plot_timeline(stats, 1, 4)
    assert set(fig.data) == {"target", "draft"} and all(b > a >= 0 for a, b in fig.data["draft"])

spans_ = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)).map(lambda s: (s[0], s[0] + s[1])), max_size=6)
@given(spans_, spans_)
@settings(max_examples=100, deadline=None)
def test_overlap_by_counting(one, two):
    at = lambda spans, t: any(a <= t < b for a, b in spans)
    assert covered(one)[0] == sum(at(one, t) for t in range(40)) and overlap(one, two) == overlap(two, one) == sum(at(one, t) and at(two, t) for t in range(40))

def test_conditions(family, ids):
    model, draft, text = family("qwen3_5")
    right = measure_conditions(model, draft, text[:50], first=20)
    assert list(right) == ["fresh", "long", "known", "gap", "early"] and all(0 <= r <= 5 for r in right.values())
    exact = measure_conditions(model, draft, text[:50], first=20, exit_layer=max(draft.config.target_layer_ids))
    assert exact["early"] == exact["fresh"]                                         # then early features are the features

@given(st.floats(0.05, 4), st.floats(0.05, 4), st.floats(0, 1), st.floats(1, 3), st.floats(1, 3))
@settings(max_examples=60, deadline=None)
def test_two_sides_at_once(verify, ahead, share, slow_t, slow_d):
    "Nobody is faster than alone, nobody slower than always slowed down, and all work is done."
    c = Costs(verify, 1.0, ahead, share * verify, slow_target=slow_t, slow_draft=slow_d)
    halves = [("prefix", c.prefix), ("suffix", verify - c.prefix)] if c.prefix else [("verify", verify)]
    end, spans, left = run_both(c, halves, ahead, 1 if c.prefix else 0, 0.0)
    assert left == 0
    target, drafts = max(e for s, _, _, e in spans if s == "target"), [(b, e) for s, _, b, e in spans if s == "draft"]
    assert len(drafts) == 1 and end == max(target, drafts[0][1]) and verify - 1e-9 <= target <= verify * slow_t + 1e-9
    assert ahead - 1e-9 <= drafts[0][1] - drafts[0][0] <= ahead * slow_d + 1e-9
    both = overlap([(b, e) for s, _, b, e in spans if s == "target"], drafts)
    assert abs(both * (1 - 1 / slow_t) - (target - verify)) < 1e-6 and abs(both * (1 - 1 / slow_d) - (drafts[0][1] - drafts[0][0] - ahead)) < 1e-6

def test_simulation_from_a_run(family, ids):
    model, draft, text = family("llama")
    stats = MirrorStats()
    tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=N, processor=Told(text, lambda i: i % 9 == 0, seconds=0.01), early=True, fresh="processor", fall_back=False, stats=stats))
    c = costs_of(stats)
    assert c.draft > 0.009 and c.slow_draft >= 1 and 0 < c.prefix < c.verify
    c = Costs(0.02, 0.01, 0.01, 0.01)                                               # what follows must not depend on this machine
    assert play(c, 0.7, hit=1.0, tokens=300).rate > play(c, 0.7, hit=0.0, tokens=300).rate
    assert abs(piped_round(Costs(1.0, 3.0), break_even(Costs(1.0, 3.0))) - serial_round(Costs(1.0, 3.0))) < 1e-9
    gain = gain_map([0.5, 1.0], [0.0, 1.0], tokens=200)
    fig = plot_gain(gain, [0.5, 1.0], [0.0, 1.0], {"here": (0.5 ** 0.5, 0.5)})
    assert gain.shape == (2, 2) and abs(gain[1, 1] - 2) < 0.05 and np.allclose(fig.data["points"]["here"], (0.5, 0.5))
