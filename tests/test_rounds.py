"""What a round may never do: cost more than it gives, leave half of itself behind when something raises, or reach over a cache's quantisation."""
import gc, threading
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import stream_generate as mlx_stream_generate
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from test_speculate import N, PROMPT, Boom, FakeDraft, check_state, drafts_for, family, ids, tokens_of
from vllm_mlx import rounds, speculate
from vllm_mlx.acceptance import PROPOSALS
from vllm_mlx.dflash import tiny_draft
from vllm_mlx.kod import EXAMPLE_COSTS, CostCurve, KodMemory
from vllm_mlx.kod_memory import _pairs, forget_pair, pair_memory
from vllm_mlx.models import tiny_model
from vllm_mlx.speculate import SpecCache, SpecStats, generate, prompt_ids, stream_generate


# --- never a loss, by a clock that only the models move ---

class Clock:
    "Stands in for the module `time`: a forward of r rows takes verify(r) seconds, a draft `draft` seconds, and nothing else takes any."
    def __init__(self, cost, draft=0.0): self.now, self.cost, self.draft = 0.0, cost, draft
    def perf_counter(self): return self.now

@pytest.fixture
def clocked(monkeypatch, ids):
    "(run(cost, draft seconds, says, **settings) -> seconds a token, stats), on a small model whose text is known"
    model = tiny_model("llama", num_hidden_layers=2)
    want = tokens_of(mlx_stream_generate(model, ids, mx.array(PROMPT), 220))
    text, current, cls = PROMPT + want + [0] * 20, [None], type(model.layers[0].mlp)
    class Timed(cls):
        def __call__(self, x):
            current[0].now += current[0].cost(x.shape[1])
            return super().__call__(x)
    model.layers[0].mlp.__class__ = Timed
    def run(cost, draft_s, right, n=200, **kw):
        clock = current[0] = Clock(cost)
        monkeypatch.setattr(rounds, "time", clock); monkeypatch.setattr(speculate, "time", clock)
        draft = None if right is None else FakeDraft(lambda i: text[i] if right(i) else 511 - text[i], layers=(0,))
        if draft is not None:
            plain, draft.extend = draft.propose, lambda features, cache, positions: cache.positions.extend(map(int, positions))
            def propose(*a): clock.now += draft_s; return plain(*a)
            draft.propose = propose
        at, stats, out = [], SpecStats(), []
        for r in stream_generate(model, draft, ids, PROMPT, max_tokens=n, stats=stats, **kw): at.append(clock.now); out.append(r.token)
        assert out == want[:n]
        return (at[-1] - at[0]) / (n - 1), stats
    return run

VERIFY = {name: (lambda r, c=cost: c(r) - (0.006 if r > 1 and name in ("staircase", "two cores") else 0)) for name, cost in EXAMPLE_COSTS.items()} | {"slow draft": lambda r: 0.03 + 0.002 * r}

@pytest.mark.parametrize("name", VERIFY)
def test_an_always_wrong_draft_keeps_nine_tenths(name, clocked):
    cost, draft_s = VERIFY[name], 0.09 if name == "slow draft" else 0.006
    plain, _ = clocked(cost, 0, None)
    assert plain == pytest.approx(cost(1), rel=0.01)                                # without a draft the loop adds nothing
    wrong, stats = clocked(cost, draft_s, lambda i: False)
    assert plain / wrong > 0.9 and stats.accepted == 0 and stats.rounds >= 1      # tried, parked

def test_the_controller_beside_every_fixed_size(clocked):
    rng = np.random.default_rng(3).random(400)
    for name in ("staircase", "flat"):
        right, cost = lambda i: rng[i] < 0.85, VERIFY[name]
        fixed = {g: clocked(cost, 0.006, right, block_size=g)[0] for g in (1, 2, 3, 4, 5, 6, 7, 8)}
        curve = CostCurve()
        first, _ = clocked(cost, 0.006, right, curve=curve)
        known, _ = clocked(cost, 0.006, right, curve=curve)
        assert fixed[1] == pytest.approx(cost(1)) and min(fixed.values()) < 0.8 * fixed[1]
        assert first < 1.15 * min(fixed.values()) and known < 1.08 * min(fixed.values()), (name, fixed, first, known)

def test_the_second_short_answer_knows_what_the_first_learnt(clocked):
    "Answers of 48 tokens on the loop's own clock: good drafts from the second on near the best fixed size, wrong ones near plain."
    rng = np.random.default_rng(5).random(400)
    for name in ("staircase", "flat"):
        right, cost, memory = lambda i: rng[i] < 0.8, VERIFY[name], KodMemory()
        best = min(clocked(cost, 0.006, right, n=48, block_size=g)[0] for g in range(2, 9))
        first, *later = [clocked(cost, 0.006, right, n=48, memory=memory)[0] for _ in range(4)]
        assert np.mean(later) < best / 0.9 and np.mean(later) <= first, (name, best, first, later)
        wrong = KodMemory()
        shares = [cost(1) / clocked(cost, 0.006, lambda i: False, n=48, memory=wrong)[0] for _ in range(5)]
        assert shares[0] > 0.85 and min(shares[1:]) > 0.9 and np.mean(shares[1:]) > 0.95, (name, shares)

def test_parked_speculation_comes_back(clocked):
    "Wrong, then right: probed, and taken up again."
    _, stats = clocked(VERIFY["flat"], 0.006, lambda i: i > 110)
    sizes = np.array(stats.block_sizes)
    assert stats.plain_steps > 20 and (sizes[-5:-1] >= 6).all() and stats.accepted > 50     # the last block may be cut short by max_tokens


# --- whose memory ---

def test_a_pair_remembers_until_told_or_gone(family, ids):
    model, want = family("qwen3_5")
    draft, key = drafts_for(model, PROMPT + want)["oracle"], (False, "plain", False, None, False, None)
    say = lambda **kw: tokens_of(stream_generate(model, draft, ids, PROMPT, max_tokens=N, **kw))
    want = want[:N]
    assert say() == want
    memory = pair_memory(model, draft, key)
    assert (seen := memory.rounds) > 0
    assert say(memory=False) == say(block_size=4) == want and memory.rounds == seen                  # neither asked nor told
    mine, curve = KodMemory(), CostCurve()
    assert say(memory=mine) == want and mine.rounds > 0 and memory.rounds == seen
    assert say(curve=curve) == want and curve.count(1) >= 2 and memory.rounds > seen                 # its costs elsewhere, the rest remembered
    say(exact=True), say(temperature=0.8, seed=1), say(temperature=0.8, seed=1, proposal="sampled")
    assert {k[0] for k in _pairs[id(model), id(draft)][2]} == {True, False} and len(_pairs[id(model), id(draft)][2]) == 4
    assert forget_pair(model, draft) and pair_memory(model, draft, key).rounds == 0
    at = id(model), id(draft)
    del draft, say; gc.collect()
    assert at not in _pairs
    for bad in (True, 3, CostCurve()):
        with pytest.raises(ValueError, match="memory is"): stream_generate(model, None, ids, PROMPT, memory=bad)

def test_two_at_once_on_one_memory(family, ids):
    "Interleaved by hand, then in threads: the texts are what they were, and every round is counted."
    model, want = family("qwen3")
    draft, memory, stats = drafts_for(model, PROMPT + want)["oracle"], KodMemory(), [SpecStats() for _ in range(6)]
    start = lambda i: stream_generate(model, draft, ids, PROMPT, max_tokens=N, memory=memory, stats=stats[i])
    gens, out = [start(0), start(1)], [[], []]
    for _ in range(N):
        for g, o in zip(gens, out): o.append(next(g).token)
    for g in gens: g.close()
    assert out == [want[:N]] * 2
    found, errors = {}, []
    def work(i):
        try: found[i] = tokens_of(start(i))
        except Exception as e: errors.append(e)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(2, 6)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert not errors and all(found[i] == want[:N] for i in range(2, 6))
    assert memory.rounds == sum(s.controller["rounds"] for s in stats)

@pytest.mark.parametrize("proposal", ("greedy", "shared"))
def test_a_seeds_text_is_the_same_whatever_was_learnt(proposal, family, ids):
    model, want = family("qwen3")
    draft = drafts_for(model, PROMPT + want)["some"]
    say = lambda **kw: tokens_of(stream_generate(model, draft, ids, PROMPT, max_tokens=N, temperature=0.7, seed=3, proposal=proposal, **kw))
    memory = KodMemory()
    assert say(memory=False) == say(memory=memory) == say(memory=memory) == say() == say() == say(block_size=3)


# --- whatever raises, wherever ---

MODES = {"block": dict(block_size=4), "exact": dict(block_size=4, exact=True), "kod": dict()}

def counted(f, n, error):
    count = [0]
    def g(*a, **kw):
        count[0] += 1
        if count[0] == n: raise error
        return f(*a, **kw)
    return g

@pytest.mark.parametrize("error", (Boom(), KeyboardInterrupt()), ids=("error", "interrupt"))
@pytest.mark.parametrize("where", ("propose", "features", "extend", "processor", "target"))
@pytest.mark.parametrize("name", ("qwen3_5", "gemma3", "nemotron_h"))
def test_raised_inside(name, where, error, family, ids):
    model, want = family(name)
    text = PROMPT + want + [0] * 40
    mode = list(MODES.values())[("propose", "features", "extend", "processor", "target").index(where) % 3]
    for kw in (mode, MODES["block"]):
        for n in (2, 4):
            draft, more = FakeDraft(text.__getitem__), {}
            layer = model.layers[1 if name == "nemotron_h" else 3]
            part = layer.mixer if name == "nemotron_h" else layer.mlp
            cls = type(part)
            if where == "processor": more = dict(logits_processors=[counted(lambda t, l: l, n + 1, error)])
            elif where == "target": part.__class__ = type(cls.__name__, (cls,), dict(__call__=counted(cls.__call__, n + 1, error)))
            else: setattr(draft, where, counted(getattr(draft, where), n, error))
            cache, out = SpecCache(model, draft), []
            try:
                with pytest.raises(type(error)):
                    for r in stream_generate(model, draft, ids, PROMPT, max_tokens=N, prompt_cache=cache, prefill_step_size=16, **kw, **more): out.append(r.token)
            finally: part.__class__ = cls
            assert out == want[:len(out)] and cache._run is None and cache.tokens == PROMPT + out
            good = FakeDraft(text.__getitem__)
            out += tokens_of(stream_generate(model, good, ids, [], max_tokens=N - len(out), prompt_cache=cache, **kw))
            assert out == want[:N], (kw, n)
            check_state(model, cache, good, out)


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_interrupted_right_after_the_booking(name, n, family, ids, monkeypatch):
    "The tokens are booked, and the target is put back: both must go."
    model, want = family(name)
    text = PROMPT + want + [0] * 40
    draft, cache, out, real, calls = FakeDraft(lambda i: text[i] if i % 3 else 511 - text[i]), None, [], rounds._Run.took, [0]
    def took(self, *a):
        real(self, *a)
        calls[0] += 1
        if calls[0] == n: raise KeyboardInterrupt("here")
    cache = SpecCache(model, draft)
    with monkeypatch.context() as m:
        m.setattr(rounds._Run, "took", took)
        with pytest.raises(KeyboardInterrupt):
            for r in stream_generate(model, draft, ids, PROMPT, max_tokens=N, block_size=4, prompt_cache=cache, prefill_step_size=16): out.append(r.token)
    good = FakeDraft(text.__getitem__)
    out += tokens_of(stream_generate(model, good, ids, [], max_tokens=N - len(out), block_size=4, prompt_cache=cache))
    assert out == want[:N] and cache.tokens == PROMPT + out
    check_state(model, cache, good, out)


def go_on(model, want, ids, cache, out, draft):
    "The rest of the answer after something was interrupted, with a draft that is always right."
    good = FakeDraft((PROMPT + want + [0] * 40).__getitem__) if draft is None else draft
    out = out + tokens_of(stream_generate(model, good, ids, [], max_tokens=N - len(out), block_size=4, prompt_cache=cache))
    assert out == want[:N] and cache.tokens == PROMPT + out
    return out, good

def until_interrupted(model, draft, ids, cache):
    out = []
    with pytest.raises(KeyboardInterrupt):
        for r in stream_generate(model, draft, ids, PROMPT, max_tokens=N, block_size=4, prompt_cache=cache, prefill_step_size=16): out.append(r.token)
    return out

@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_interrupted_when_the_forward_is_done_and_nobody_has_its_records(name, family, ids, monkeypatch):
    model, want = family(name)
    text, real, calls = PROMPT + want + [0] * 40, rounds.verify_with, [0]
    draft = FakeDraft(lambda i: text[i] if i % 3 else 511 - text[i])
    def verify_with(*a):
        out = real(*a)
        calls[0] += 1
        if calls[0] == 2: raise KeyboardInterrupt("here")
        return out
    cache = SpecCache(model, draft)
    with monkeypatch.context() as m:
        m.setattr(rounds, "verify_with", verify_with)
        out = until_interrupted(model, draft, ids, cache)
    out, good = go_on(model, want, ids, cache, out, None)
    check_state(model, cache, good, out)

def test_interrupted_when_the_context_has_the_features(family, ids, monkeypatch):
    model, want = family("llama")
    draft, calls = tiny_draft(model), [0]
    real, cache = draft.extend, SpecCache(model, draft)
    def extend(*a):
        real(*a)
        calls[0] += 1
        if calls[0] == 3: raise KeyboardInterrupt("here")
    object.__setattr__(draft, "extend", extend)
    try: out = until_interrupted(model, draft, ids, cache)
    finally: object.__delattr__(draft, "extend")
    assert calls[0] == 3
    out, _ = go_on(model, want, ids, cache, out, draft)
    assert cache.context.offset + cache.pending == cache._read

def test_interrupted_between_the_layers_of_the_context(family, ids, monkeypatch):
    model, want = family("llama")
    draft, calls = tiny_draft(model), [0]
    cache = SpecCache(model, draft)
    rows = type(cache._context.rows[0])
    real = rows.append
    def append(self, *a):
        calls[0] += 1
        if calls[0] == 6: raise KeyboardInterrupt("here")               # of two layers the second, in the third round
        return real(self, *a)
    with monkeypatch.context() as m:
        m.setattr(rows, "append", append)
        out = until_interrupted(model, draft, ids, cache)
    assert len({len(r.positions) for r in cache._context.rows}) == 1 and cache._context.offset == len(cache._context.rows[0].positions)
    go_on(model, want, ids, cache, out, draft)

def test_interrupted_at_the_end_leaves_the_cache_free(family, ids, monkeypatch):
    model, want = family("llama")
    draft = tiny_draft(model)
    cache = SpecCache(model, draft)
    with monkeypatch.context() as m:
        m.setattr(rounds, "repetition", lambda tokens: (_ for _ in ()).throw(KeyboardInterrupt("here")))
        gen = stream_generate(model, draft, ids, PROMPT, max_tokens=6, block_size=4, prompt_cache=cache)
        out = []
        with pytest.raises(KeyboardInterrupt):
            for r in gen: out.append(r.token)
    go_on(model, want, ids, cache, out, draft)

def test_a_sparse_prefill_that_fails_forgets_nothing(family, ids):
    from vllm_mlx.specprefill import SpecPrefill
    model, want = family("llama")
    draft, cache = tiny_draft(model), None
    cache = SpecCache(model, draft)
    out = tokens_of(stream_generate(model, draft, ids, PROMPT, max_tokens=6, block_size=4, prompt_cache=cache))
    def no(*a): raise Boom("no")
    with pytest.raises(Boom):
        for _ in stream_generate(model, draft, ids, list(range(3, 60)), max_tokens=6, prompt_cache=cache, sparse=SpecPrefill(model, threshold=0, keep_pct=.5), progress=no): pass
    assert cache.tokens == PROMPT + out
    go_on(model, want, ids, cache, out, draft)

def test_features_do_not_pile_up(family, ids):
    model, _ = family("llama")
    draft = tiny_draft(model)
    cache = SpecCache(model, draft)
    for r in stream_generate(model, draft, ids, PROMPT, max_tokens=120, block_size=1, prompt_cache=cache): assert len(cache._features) <= 40
    assert cache.pending + cache.context.offset == cache._read

def test_rounds_that_trace_the_draft_are_not_told(family, ids, monkeypatch):
    "On a GPU the draft's block is a graph too."
    from vllm_mlx import draft_state, kod
    model, _ = family("llama")
    draft, told = tiny_draft(model), []
    real_cache, real = draft.make_cache, kod.BlockController.update
    def update(self, gamma, accepted, ms, at): told.append(gamma); return real(self, gamma, accepted, ms, at)
    self_run, init = [None], rounds._Run.block
    def block(self, gamma):
        self_run[0] = self
        before, n = self.traces(), len(told)
        init(self, gamma)
        assert len(told) == n or self.traces() == before
    def make_cache():
        cache = real_cache()
        cache.fixed = True
        return cache
    monkeypatch.setattr(kod.BlockController, "update", update)
    monkeypatch.setattr(rounds._Run, "block", block)
    object.__setattr__(draft, "make_cache", make_cache)
    try:
        for _ in range(3): tokens_of(stream_generate(model, draft, ids, PROMPT, max_tokens=40, memory=KodMemory()))
    finally: object.__delattr__(draft, "make_cache")
    assert self_run[0] is not None and self_run[0].traces() > 0

def test_a_rebound_draft_lets_its_old_target_go(ids):
    import weakref
    old, new = tiny_model("llama"), tiny_model("llama")
    draft = tiny_draft(old)
    cache = draft.make_cache()
    cache.fixed = True
    for _ in range(2): draft.extend(draft.features([mx.zeros((1, 3, draft.config.hidden_size))] * len(draft.config.target_layer_ids)), cache, np.arange(cache.offset, cache.offset + 3)); mx.eval(draft.propose(1, None, cache, 4, cache.offset))
    gone = weakref.ref(old)
    draft.bind(new)
    del old
    gc.collect()
    assert gone() is None


def test_thrown_at_a_yield_abandoned_and_closed_twice(family, ids):
    model, want = family("qwen3_5")
    draft = drafts_for(model, PROMPT + want)["oracle"]
    for end in ("throw", "drop", "close", "close before"):
        cache, out = SpecCache(model, draft), []
        gen = stream_generate(model, draft, ids, PROMPT, max_tokens=N, block_size=6, prompt_cache=cache)
        if end != "close before": out = [next(gen).token for _ in range(4)]
        if end == "throw":
            with pytest.raises(KeyboardInterrupt): gen.throw(KeyboardInterrupt())
        if end.startswith("close"): gen.close(); gen.close()
        del gen; gc.collect()
        assert cache._run is None
        if out: check_state(model, cache, draft, out)
        assert out + tokens_of(stream_generate(model, draft, ids, [] if out else PROMPT, max_tokens=N - len(out), block_size=6, prompt_cache=cache)) == want[:N]


# --- quantised caches ---

@pytest.mark.parametrize("start", (0, 30, 33, 41, 500))
def test_quantised_where_plain_decoding_quantises(start, family, ids):
    "Blocks stop where the cache is quantised; looking and closing in the middle as ever."
    for name in ("qwen3_5", "qwen3"):
        model, _ = family(name)
        kw = dict(kv_bits=4, kv_group_size=32, quantized_kv_start=start)
        want = tokens_of(mlx_stream_generate(model, ids, mx.array(PROMPT), N, **kw))
        text = PROMPT + want + [0] * 20
        for draft, size in ((FakeDraft(text.__getitem__), 8), (FakeDraft(lambda i: text[i] if i % 4 else 3), 5), (tiny_draft(model), "kod")):
            cache = SpecCache(model, draft)
            gen = stream_generate(model, draft, ids, PROMPT, max_tokens=N, block_size=size, prompt_cache=cache, **kw)
            out = [next(gen).token for _ in range(6)]
            assert cache.target[-1].offset == 36
            gen.close()
            out += tokens_of(stream_generate(model, draft, ids, [], max_tokens=N - 6, block_size=size, prompt_cache=cache, **kw))
            assert out == want and isinstance(cache.target[-1], QuantizedKVCache) == (start < 30 + N), (name, size)


# --- prompts ---

def test_conversations_turn_by_turn(ids):
    "A whole conversation every time; what a SpecCache holds of it is not read again."
    model, words = tiny_model("llama", vocab_size=49152), [dict(role="user", content="Hello!")]
    draft, first = tiny_draft(model), prompt_ids(ids, words)
    say = [*ids.encode("Hello to you"), ids.eos_token_id]
    def says(tokens, logits): return logits + 1e4 * (mx.arange(49152) == (say + [0] * 9)[len(tokens) - len(first)])      # whatever the model thinks
    cache, stats = SpecCache(model, draft), SpecStats()
    text, _ = generate(model, draft, ids, words, prompt_cache=cache, block_size=3, logits_processors=[says], stats=stats)
    assert (text, stats.prompt_tokens, cache.tokens, stats.finish_reason) == ("Hello to you", len(first), first + say, "stop")
    words += [dict(role="assistant", content=text), dict(role="user", content="And then?")]
    whole, again = prompt_ids(ids, words), SpecStats()
    want = tokens_of(mlx_stream_generate(model, ids, mx.array(whole), 6))
    assert tokens_of(stream_generate(model, draft, ids, words, max_tokens=6, prompt_cache=cache, block_size=3, stats=again)) == want
    assert again.prompt_tokens == len(whole) - len(first) - len(say) < 20 and cache.tokens == whole + want
    with pytest.raises(ValueError, match="differs from the .* tokens in the cache at token"): stream_generate(model, draft, ids, [dict(role="user", content="Another one")], prompt_cache=cache)
    assert cache.tokens == whole + want                                   # refused before anything was read


@pytest.mark.parametrize("prompt, words", (
    ({"role": "user", "content": "x"}, "the prompt is {'role'"), (None, "the prompt is None"), ([{"role": "user", "content": "x"}, "y"], "message 1 of the prompt is 'y'"), (["x"], "message 0 of the prompt is 'x'"),
    ([{"content": "x"}], "message 0 of the prompt is"), ([{"role": 3, "content": "x"}], "message 0 of the prompt is"), ([{"role": "user"}], "message 0 of the prompt has no content: its keys are 'role'"),
    ([{"role": "user", "content": 7}], "has the content 7"), ([1.5], "integer token ids"), ([[1], [2]], "shape"), ([-1], "negative"), ([600], "token id 600 is outside")))
def test_prompts_that_are_none(prompt, words, family, ids):
    model, _ = family("llama")
    for f in (stream_generate, generate):
        with pytest.raises(ValueError, match=words): f(model, None, ids, prompt)


def test_a_template_that_refuses(family):
    def refuse(*a, **k): raise RuntimeError("roles must alternate")
    with pytest.raises(ValueError, match="the chat template refuses the messages: roles must alternate"): prompt_ids(SimpleNamespace(chat_template="x", apply_chat_template=refuse), [dict(role="user", content="x")])
