"""Verification in compiled halves, the choice between the loops, and the measurement of both: the texts are plain decoding's in every form."""
import argparse, copy, gc, json, threading
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mlx_lm.generate import stream_generate as mlx_stream_generate
from mlx_lm.models.cache import make_prompt_cache

from vllm_mlx.alignment import forward_prefix, forward_suffix
from vllm_mlx.dflash import tiny_draft
from vllm_mlx.graphs import owned
from vllm_mlx.halves import HALVES, check_form, half_graph, halves_refusal, pick_halves
from vllm_mlx.kod import BlockController
from vllm_mlx.mirror import DraftProcessor, MirrorStats, PipelineJudge, Proposal, SpecCache, stream_mirror
from vllm_mlx.mirror_bench import LOOPS, add_bench_options, bench_mirror, cost_table, main, mirror_table, record_timeline, run_bench
from vllm_mlx.mirror_sim import foresee, measured_costs
from vllm_mlx.models import TINY_FAMILIES, load, tiny_model
from vllm_mlx.pipeline import pipeline_block
from vllm_mlx.rollback import rollback
from vllm_mlx.speculate import stream_generate

PROMPT = np.random.default_rng(0).integers(1, 500, 30).tolist()
GRAPHS = ("llama", "qwen3", "qwen3_5", "nemotron_h")     # whose caches can be arguments of a graph


def tokens_of(gen): return [r.token for r in gen]
def workers(): return [t for t in threading.enumerate() if t.name.startswith("draft on")]
def near(a, b, eps=1e-4): return mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item() <= eps * max(1.0, mx.abs(b).max().item())

@pytest.fixture(scope="module")
def ids(): return load("smollm2-135m")[1]

@pytest.fixture(scope="module")
def family(ids):
    "family -> (model, an untrained draft, PROMPT and the model's greedy text)"
    known = {}
    def get(name):
        if name not in known:
            model = tiny_model(name)
            known[name] = model, tiny_draft(model, block_size=6), PROMPT + tokens_of(mlx_stream_generate(model, ids, mx.array(PROMPT), 60)) + [0] * 40
        return known[name]
    return get

@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    for t in workers(): t.join(2)
    assert workers() == []


class Told(DraftProcessor):
    "Gives the text, but for some places."
    def __init__(self, text, wrong=lambda i: False): super().__init__("a script"); self.text, self.wrong = text, wrong
    def work(self, job):
        out = []
        for b in job.branches:
            first = b.position + len(b.block)
            tokens = [511 - self.text[i] if self.wrong(i) else self.text[i] for i in range(first, first + b.drafts)]
            out.append(Proposal(tokens, None, [{t: 0.9, (t + 1) % 512: 0.1} for t in tokens] if job.top > 1 else None))
        return out

def check_cache(model, cache, tokens):
    "The target's cache stands for the tokens, to rounding; so does the draft's context with what is pending."
    assert cache.tokens == tokens and cache.unread == []
    probe, fresh = mx.array([[9]]), make_prompt_cache(model)
    model(mx.array([tokens]), cache=fresh)
    assert mx.abs(model(probe, cache=copy.deepcopy(cache.target)) - model(probe, cache=fresh)).max().item() < 2e-3
    assert cache.context.offset + cache.pending == len(tokens)


# --- two halves, in every form

@pytest.mark.parametrize("name", TINY_FAMILIES)
@pytest.mark.parametrize("how", HALVES)
def test_halves_of_every_form_are_the_whole(how, name, family):
    "At every exit layer and for every accepted count: outputs, captures, early features, records and caches."
    model, _, text = family(name)
    n, L = len(model.layers), 5
    wanted = list(range(0, n, 2))
    for exit_layer in sorted({0, n // 2, n - 1}):
        start = make_prompt_cache(model)
        mx.eval(model(mx.array([text[:20]]), cache=start))
        if how == "whole" and name not in GRAPHS:
            with pytest.raises(ValueError, match="RotatingKVCache in slot"): HALVES[how](model, mx.array([text[20:25]]), start, exit_layer, wanted)
            assert halves_refusal(model, start, exit_layer) is not None
            continue
        whole, halves, told = copy.deepcopy(start), copy.deepcopy(start), []
        want = forward_prefix(model, mx.array([text[20:20 + L]]), whole, exit_layer, wanted)
        got = HALVES[how](model, mx.array([text[20:20 + L]]), halves, exit_layer, wanted, lambda h, known: [h + 1, *known.values()], told.append)
        assert near(got.hidden, want.hidden) and set(got.captured) == {i for i in wanted if i <= exit_layer} and near(told[0][0], want.hidden + 1)
        a, b = forward_suffix(want), forward_suffix(got)
        for x, y in zip((*a[:2], *a[2]), (*b[:2], *b[2])): assert x.dtype == y.dtype and x.shape == y.shape and near(y, x)
        for keep in range(L, -1, -1):
            rollback(whole, a[3], keep, keep=True)
            rollback(halves, b[3], keep, keep=True)
            x, y = (model(mx.array([[3, 4]]), cache=copy.deepcopy(c)) for c in (whole, halves))
            assert near(y, x, 1e-3), (exit_layer, keep)

def test_no_graph_is_traced_twice():
    model = tiny_model("qwen3_5")
    cache = make_prompt_cache(model)
    model(mx.array([PROMPT]), cache=cache)
    for keep in (3, 0, 4, 2, 1):
        prefix = HALVES["whole"](model, mx.array([PROMPT[:4]]), cache, 1, [0, 1])
        mx.eval(forward_suffix(prefix)[0])
        rollback(cache, prefix.records, keep)
    assert [half_graph(model, 1, [0, 1], first).traces for first in (True, False)] == [1, 1]

@pytest.mark.parametrize("how", ["layers", "whole"])
@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_failing_half_changes_nothing(name, how, family):
    model, _, text = family(name)
    cache = make_prompt_cache(model)
    model(mx.array([text[:10]]), cache=cache)
    want = model(mx.array([[5]]), cache=copy.deepcopy(cache))
    def fail(*a): raise OSError("no")
    for kw in (dict(at_exit=fail), dict(then=fail)):
        with pytest.raises(OSError): HALVES[how](model, mx.array([text[10:16]]), cache, 1, [0, 1], **kw)
        assert near(model(mx.array([[5]]), cache=copy.deepcopy(cache)), want)
    with pytest.raises(ValueError, match="exit_layer is -1"): HALVES[how](model, mx.array([[1]]), cache, -1)
    HALVES[how](model, mx.array([text[10:16]]), cache, 1, [0]).abandon()
    assert near(model(mx.array([[5]]), cache=copy.deepcopy(cache)), want)

def test_a_quantised_cache_can_be_halved(ids):
    "mlx-lm's quantised cache is an argument like another; the text is the plain form's."
    model = tiny_model("llama", head_dim=32)
    draft, kv = tiny_draft(model, block_size=4), dict(max_tokens=14, kv_bits=8, kv_group_size=32, quantized_kv_start=34, fall_back=False, early=True)
    want = tokens_of(stream_generate(model, None, ids, PROMPT, **{k: v for k, v in kv.items() if k not in ("fall_back", "early")}))
    for how in HALVES: assert tokens_of(stream_mirror(model, draft, ids, PROMPT, verify=how, **kv)) == want

@given(st.lists(st.sampled_from(["plain", "layers", "whole"]), min_size=3, max_size=3, unique=True), st.integers(1, 16))
@settings(max_examples=20, deadline=None)
def test_the_fastest_half_is_taken(order, L):
    "Whatever rounds take, every form is tried the same number of times, and the fastest goes on if it wins by 5 %."
    model = tiny_model("llama", num_hidden_layers=2)
    ms, cache, asked = {f: 10.0 + 2 * i for i, f in enumerate(order)}, make_prompt_cache(model), []
    for _ in range(6):
        how, note = pick_halves(model, cache, L, 0)
        asked.append(how); note.append(ms[how])
    assert all(asked.count(f) == 2 for f in ms) and pick_halves(model, cache, L, 0) == (order[0], None)


# --- the same tokens

PLANS = [dict(), dict(branches=3), dict(condition="long"), dict(early=True), dict(early=True, branches=3), dict(early=True, soft=3)]

@pytest.mark.parametrize("how", ["layers", "whole", "auto"])
@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_same_tokens_in_every_form(name, how, family, ids):
    model, draft, text = family(name)
    if how == "whole" and name not in GRAPHS:
        for early in (False, True):
            with pytest.raises(ValueError, match="verify is 'whole'.*RotatingKVCache in slot"): stream_mirror(model, draft, ids, PROMPT, verify=how, early=early)
        return
    for i, plan in enumerate(PLANS if name == "qwen3_5" else PLANS[::3]):
        cache = SpecCache(model, draft)
        got = tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=18 + i, processor=Told(text, lambda j: j % 4 == i % 4), fresh="processor", fall_back=False, verify=how, prompt_cache=cache, **plan))
        assert got == text[30:48 + i]
        check_cache(model, cache, text[:48 + i])

@given(st.sets(st.integers(30, 80)), st.integers(2, 9), st.integers(1, 40), st.sampled_from(PLANS), st.sampled_from(["layers", "whole", "auto"]))
@settings(max_examples=12, deadline=None)
def test_same_tokens_at_any_acceptance(family, ids, wrong, block, n, plan, how):
    model, draft, text = family("qwen3_5")
    cache = SpecCache(model, draft)
    got = tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=n, processor=Told(text, wrong.__contains__), block_size=block, fall_back=False, fresh="processor", verify=how, prompt_cache=cache, **plan))
    assert got == text[30:30 + n]
    check_cache(model, cache, text[:30 + n])

@pytest.mark.parametrize("how", ["layers", "whole"])
@pytest.mark.parametrize("early", [False, True])
def test_failing_target_in_every_form(early, how, family, ids, monkeypatch):
    model, draft, text = family("qwen3_5")
    import vllm_mlx.mirror as mirror
    for moment in ("judge", "rollback", "forward_suffix"):
        real, calls = getattr(mirror, moment), []
        def failing(*a, **k):
            calls.append(1)
            if len(calls) == 3: raise MemoryError("no room")
            return real(*a, **k)
        monkeypatch.setattr(mirror, moment, failing)
        cache, out = SpecCache(model, draft), []
        try:
            for r in stream_mirror(model, draft, ids, PROMPT, max_tokens=30, processor=Told(text), early=early, fresh="processor", fall_back=False, verify=how, prompt_cache=cache): out.append(r.token)
        except MemoryError: assert len(out) < 30
        else: assert moment == "forward_suffix" and not early
        monkeypatch.undo()
        assert workers() == [] and out == text[30:30 + len(out)]
        check_cache(model, cache, text[:30 + len(out)])

@pytest.mark.parametrize("how", ["layers", "whole"])
def test_a_seed_keeps_its_text(how, family, ids):
    model, draft, _ = family("qwen3_5")
    kw = dict(max_tokens=16, temperature=0.9, seed=11)
    want = tokens_of(stream_generate(model, None, ids, PROMPT, **kw))
    for plan in (dict(), dict(early=True, branches=2)): assert tokens_of(stream_mirror(model, draft, ids, PROMPT, fall_back=False, verify=how, **kw, **plan)) == want

def test_what_is_refused(family, ids):
    model, draft, _ = family("llama")
    for kw, words in ((dict(verify="fast"), "verify is 'fast'"), (dict(early=True, exit_layer=99), "exit_layer is 99"), (dict(kv_bits=7), "kv_bits is 7")):
        with pytest.raises(ValueError, match=words): stream_mirror(model, draft, ids, PROMPT, **kw)
    with pytest.raises(ValueError, match="verify is 'best'"): check_form(model, make_prompt_cache(model), "best")


# --- which loop, and which block

class Priced(PipelineJudge):
    "What a round takes is told: no clock decides these tests."
    def __init__(self, serial, pipe): super().__init__(probe=12, wait=64); self.price, self.looks = {False: serial, True: pipe}, []
    def update(self, tokens, seconds, counts=True): self.looks.append((self.pipe, counts)); super().update(tokens, self.price[self.pipe], counts)

@pytest.mark.parametrize("early", [False, True])
def test_falls_back_as_it_comes(early, family, ids):
    "The defaults: KOD's blocks in both loops, and the slower loop is left; trying a size out and tracing a graph count for neither."
    model, draft, text = family("qwen3_5")
    for price, words, ends in (((0.02, 0.8), "the serial loop is faster", False), ((0.8, 0.02), "the pipeline pays", True)):
        stats, judge = MirrorStats(), Priced(*price)
        got = tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=56, processor=Told(text), fresh="processor", early=early, stats=stats, fall_back=judge, verify="layers"))
        assert got == text[30:86] and words in stats.why and judge.pipe == ends and {p for p, _ in judge.looks} == {False, True}
        assert (False, False) in judge.looks                                        # plain steps that only measured
        assert stats.serial_rounds + stats.plain_steps > 0 and len(stats.ahead) + len(stats.fresh) > 0

def test_rounds_that_do_not_count_change_nothing():
    j = PipelineJudge(probe=6)
    before = copy.deepcopy(vars(j))
    for _ in range(9): j.update(3, 1.0, counts=False)
    assert vars(j) == before

@given(st.floats(0.05, 0.98), st.floats(0.0, 0.05), st.integers(3, 12))
@settings(max_examples=40, deadline=None)
def test_pipeline_block_is_the_best_of_all(chance, draft, size):
    "By trying every size: tokens over the seconds of a round, where a miss takes turns."
    c, rng = BlockController(size), np.random.default_rng(0)
    for _ in range(60):
        b = c.next()
        c.update(b, int((rng.random(b - 1) < chance).cumprod().sum()), 0.020 + 0.003 * b + 0.006 * (b > 1))
    got = pipeline_block(c, draft, hit=0.5)
    tokens, cost = c.acceptance.tokens(0.0), c.curve.table(size, c.context)
    verify = [max(c - draft, 0.1 * c) for c in cost]
    rate = {g: tokens[g - 1] / (0.5 * max(verify[g - 1], draft) + 0.5 * (verify[g - 1] + draft)) for g in range(2, size + 1)}
    assert 2 <= got <= size and rate[got] >= max(rate.values()) - 1e-9
    assert 2 <= pipeline_block(c, draft) <= size


# --- the measurement

def test_bench(family, ids):
    model, draft, text = family("qwen3_5")
    saved = []
    r = bench_mirror(model, draft, ids, {"code": [PROMPT], "chat": [PROMPT[:12]]}, max_tokens=14, turns=1, loops={"one": dict(branches=2), "mirror": dict(early=True)}, report=lambda x: saved.append(json.dumps(x)))
    assert all(s["texts"] == s["same"] == 4 for s in r["same"].values()) and len(saved) == 4 and all(json.loads(s)["settings"] == r["settings"] for s in saved)
    assert {x["kind"] for x in r["speed"]} == {"code", "chat", "all"} and all(x["tokens_per_second"][0] > 0 for x in r["speed"])
    assert r["loops"]["one"]["all"]["rounds"] > 0 and len(mirror_table(r).splitlines()) == 8 and len(cost_table(r).splitlines()) == 5
    rows = foresee(r, 500)
    assert [x["loop"] for x in rows] == [n for n, c in r["costs"].items() if "missing" not in c] and all(x["simulated"] > 0 and x["measured"] > 0 for x in rows)
    with pytest.raises(ValueError, match="loop is 'best'"): measured_costs(r, "best")

    class Gone(DraftProcessor):
        def __init__(self): super().__init__("nobody")
        def work(self, job): raise OSError("gone")
    with pytest.raises(Exception, match="gone"): bench_mirror(model, draft, ids, {"code": [PROMPT]}, max_tokens=14, turns=1, loops={"on": dict(fresh="processor")}, processors={"x": Gone()})

def test_a_text_that_differs_is_told(family, ids, monkeypatch):
    "A loop whose text is not mlx-lm's is counted, with the token where it parts."
    model, draft, text = family("llama")
    import vllm_mlx.mirror_bench as bench
    real = bench.stream_mirror
    def other(*a, **k):
        for i, r in enumerate(real(*a, **k)):
            if i == 5: r.token = 511 - r.token
            yield r
    monkeypatch.setattr(bench, "stream_mirror", other)
    r = bench_mirror(model, draft, ids, {"code": [PROMPT]}, max_tokens=10, turns=1, loops={"one": {}})
    assert r["same"]["one"] == dict(texts=2, same=0, first_difference=[5, 5]) and r["same"]["serial 4"]["same"] == 2

@pytest.mark.parametrize("prompts, passes", [(1, 5), (2, 6)])                          # of a prompt, before the first turn: with its phases, and again if there is no second
def test_compiling_is_not_taken_for_a_turn(family, ids, monkeypatch, prompts, passes):
    "The first pass takes 120 s of 200: the turns of a few seconds have their time, and so has a second prompt."
    model, draft, _ = family("llama")
    import vllm_mlx.mirror_bench as bench
    now, calls, real = [0.0], [], bench._run
    def run(*a, **k):
        calls.append(0); now[0] += 20 if len(calls) <= 6 else 1
        return real(*a, **k)
    monkeypatch.setattr(bench, "_run", run)
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    r = bench_mirror(model, draft, ids, {"code": [PROMPT, PROMPT[:12]][:prompts]}, max_tokens=8, turns=3, loops={"one": {}}, limit_s=200)
    assert r["settings"]["prompts"] == {"code": prompts} and {x["turns"] for x in r["speed"]} == {3} and len(calls) == 6 + passes + 3 * 5 * prompts
    assert all(s["texts"] == s["same"] == (5 if prompts == 1 else 8) for s in r["same"].values()) and r["seconds"] == now[0]

def test_command_and_timeline(capsys, family, ids):
    assert main(["--loops", "best"]) == 2 and "--loops has 'best'" in capsys.readouterr().err
    parser = argparse.ArgumentParser(); add_bench_options(parser)
    o = parser.parse_args([])
    assert (o.max_tokens, o.turns, o.block, list(LOOPS)) == (64, 5, 4, ["parallel", "mirror", "mirror, 3 branches"])
    if mx.default_device() == mx.cpu:
        with pytest.raises(ValueError, match="--draft-on has 'gpu'"): run_bench(parser.parse_args(["--draft-on", "cpu,gpu"]))
    model, draft, _ = family("llama")
    t = record_timeline(model, draft, ids, PROMPT, 16, early=True, fresh="processor")
    assert t["same"] and json.loads(json.dumps(t)) == t and {s[2] for s in t["spans"]} >= {"prefix", "suffix", "fresh"} and len(t["block_sizes"]) == len(t["acceptance_lengths"])
