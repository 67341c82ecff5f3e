"Calibration: the choice against brute force, the key over dtypes and storage, what is remembered under fire, tiny models end to end."
import itertools, json, math, os, threading, warnings
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mlx_lm.tokenizer_utils import load as load_tokenizer
from vllm_mlx import calibration as cal
from vllm_mlx.calibration import (Calibration, Probe, by_depth, calibration_file, chunk_means, find_scoring_layers, model_key, needed_chunks, pick_heads,
                                  remember, scoring_layers, worst_rank)
from vllm_mlx.chunks import select_chunks
from vllm_mlx.importance import PrefillCancelled, score_heads, score_window
from vllm_mlx.models import TINY_FAMILIES, cast, load, smollm2_folder, tiny_model
from vllm_mlx.needles import make_case


@pytest.fixture(scope="module")
def tokenizer(): return load_tokenizer(smollm2_folder())


@pytest.fixture(scope="module")
def tiny(): return tiny_model("llama", vocab_size=49152)


@pytest.fixture(scope="module")
def smollm2(): return load("smollm2-135m", progress=False)[0]


QUICK = dict(kinds="shared", lengths=(300,), n_cases=2, progress=False)


def quick(model, tokenizer, folder, **options):
    "A calibration of a random model; that it finds little is no matter here."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return find_scoring_layers(model, tokenizer, **{**QUICK, "cache_dir": folder, **options})

# ---------------------------------------------------------------- a hit

@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_hit_is_what_select_chunks_keeps(data):
    "Protected head and tail of whole chunks: the worst rank is below k exactly when a budget of k chunks beyond them keeps the spans."
    size, n = data.draw(st.integers(1, 6)), data.draw(st.integers(4, 15))
    last = data.draw(st.integers(1, size))                              # tokens of the last chunk, which is the tail
    M = (n - 1) * size + last
    scores = np.array(data.draw(st.lists(st.integers(0, 3), min_size=M, max_size=M))) / 4
    a = data.draw(st.integers(0, M - 1))
    spans = [(a, data.draw(st.integers(a + 1, M)))]
    rank = int(worst_rank(chunk_means(scores, size, size, last), needed_chunks(spans, M, size, size, last)))
    for k in range(1, n - 2):
        kept = set(select_chunks(scores, (k + 2) / n - 1e-9, size, protect_head=size, protect_tail=last).tolist())
        assert (rank < k) == all(t in kept for t in range(*spans[0]))


def test_equal_scores_are_no_hit():
    "A head that says nothing must not look as if it had found the last chunk."
    means = chunk_means(np.zeros((1, 320)), 32)
    assert worst_rank(means, [9])[0] == 9 and worst_rank(means, [0])[0] == 0


def test_a_prompt_that_is_protected_whole():
    assert needed_chunks([(3, 9)], 12, 4, 12, 0) == [] and np.isneginf(chunk_means(np.ones(12), 4, 20, 20)).all()

# ---------------------------------------------------------------- the choice

def synthetic(rng, n_layers, n_heads, truth, cases=60, chunks=24, kind="shared"):
    "truth: {(layer, head): function of the case number}; all other heads put the needed chunk last."
    heads, probes = list(itertools.product(range(n_layers), range(n_heads))), []
    for i in range(cases):
        means, need = rng.uniform(0.1, 1, (len(heads), chunks)).astype(np.float32), int(rng.integers(chunks))
        means[:, need] = [2.0 if truth.get(h, lambda i: False)(i) else 0.0 for h in heads]
        probes.append(Probe(kind, 800, means, [need], 4))
    return heads, probes


def test_three_heads_that_share_the_work():
    rng = np.random.default_rng(0)
    truth = {(1, 0): lambda i: i % 3 == 0, (2, 2): lambda i: i % 3 == 1, (4, 1): lambda i: i % 3 == 2, (6, 3): lambda i: True}
    heads, probes = synthetic(rng, 8, 4, truth)
    found = by_depth(probes, heads, 0.95, ["shared"])
    assert [d["last"] for d in found] == list(range(8))
    assert [round(d["recall"], 2) for d in found] == [0, 0.33, 0.67, 0.67, 1, 1, 1, 1]
    assert found[4]["layers"] == {1: [0], 2: [2], 4: [1]} and found[6]["layers"] == found[7]["layers"] == {6: [3]}
    assert max(len(sum(d["layers"].values(), [])) for d in by_depth(probes, heads, 0.95, ["shared"], max_heads=2)) == 2


def test_false_alarms_are_left_out():
    "A head that finds half of the prompts and shouts in the others is worse than none beside a good one."
    rng = np.random.default_rng(1)
    heads, probes = synthetic(rng, 3, 2, {(0, 0): lambda i: i % 10 > 0, (1, 1): lambda i: i % 10 == 0})
    for i, p in enumerate(probes):
        if i % 10: p.means[3] += 5.0
    assert by_depth(probes, heads, 0.95, ["shared"])[2]["layers"] == {0: [0]}


def test_extra_kinds_never_cost_the_goal():
    rng = np.random.default_rng(2)
    heads, goal = synthetic(rng, 3, 2, {(1, 0): lambda i: True})
    _, extra = synthetic(rng, 3, 2, {(0, 1): lambda i: True, (2, 0): lambda i: True}, kind="paraphrase")
    for p in goal: p.means[1] += 5.0                                    # head (0, 1) would drown the goal, head (2, 0) is quiet there
    found = by_depth(goal + extra, heads, 0.95, ["shared"], ["paraphrase"])
    assert [d["layers"] for d in found[1:]] == [{1: [0]}, {1: [0], 2: [0]}] and found[2]["recall"] == 1.0
    assert by_depth(goal + extra, heads, 0.95, ["shared"])[2]["layers"] == {1: [0]}


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_greedy_is_never_worse_than_the_best_single_head(seed):
    rng = np.random.default_rng(seed)
    probes = [Probe("shared", 500, rng.uniform(0, 1, (6, 12)), sorted(rng.choice(12, 2, replace=False).tolist()), 5) for _ in range(20)]
    single = max(np.mean([worst_rank(p.means[h], p.needed) < p.budget for p in probes]) for h in range(6))
    rows, recall = pick_heads(probes, range(6))
    together = np.mean([worst_rank(p.means[rows].max(0), p.needed) < p.budget for p in probes])
    assert recall == pytest.approx(together) and recall >= single and len(set(rows)) == len(rows) <= 4

# ---------------------------------------------------------------- the key

@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_key_does_not_depend_on_the_dtype(family):
    name, signature = model_key(tiny_model(family))
    assert signature.dtype == np.float16 and np.isfinite(signature).all()
    for dtype in (mx.bfloat16, mx.float16):
        other = model_key(tiny_model(family, dtype=dtype))
        assert other[0] == name and cal._alike(other[1], signature)
    other = model_key(tiny_model(family, seed=7))
    assert other[0] == name and not cal._alike(other[1], signature)


def test_families_and_configurations_have_names_of_their_own():
    names = [model_key(tiny_model(f))[0] for f in TINY_FAMILIES] + [model_key(tiny_model("llama", **o))[0] for o in (dict(rope_theta=5e5), dict(num_hidden_layers=5), dict(rms_norm_eps=1e-6))]
    assert len(set(names)) == len(names)


def test_a_changed_model_is_another_one():
    "The key is computed anew each time, so weights that are replaced in the same object are seen; the model stays as it is."
    model = tiny_model("llama")
    name, signature = model_key(model)
    logits = model(mx.arange(5)[None])
    model_key(model)
    assert mx.array_equal(model(mx.arange(5)[None]), logits)
    for l in model.layers: l.self_attn.q_proj.weight = l.self_attn.q_proj.weight * mx.random.uniform(0.8, 1.2, l.self_attn.q_proj.weight.shape)
    assert not cal._alike(model_key(model)[1], signature)


def test_smollm2_is_known_in_every_form(smollm2, tmp_path):
    shipped = scoring_layers(smollm2, tmp_path)
    assert shipped.layers == {15: [6], 18: [7, 8]} and shipped.body == (16, 128) and shipped.recall >= shipped.wanted == 0.95
    assert {r["kind"] for r in shipped.table} == {"shared", "key_value", "several", "paraphrase", "tracing"} and len(shipped.table) == 30 * 9 * 5 * 4
    for dtype, dequantize in ((mx.bfloat16, True), (mx.float16, True), (mx.bfloat16, False), (None, False)):
        assert scoring_layers(load("smollm2-135m", dtype, dequantize=dequantize, progress=False)[0], tmp_path) == shipped
    assert scoring_layers(cast(load("smollm2-135m", progress=False)[0], mx.bfloat16), tmp_path) == shipped
    assert list(tmp_path.iterdir()) == []                               # looking leaves nothing behind


def test_shipped_heads_are_used_by_score_window(smollm2, tokenizer):
    case = make_case(tokenizer, "shared", 600, seed=3)
    scores = np.array(score_window(smollm2, case.tokens, **scoring_layers(smollm2).options()))
    kept = set(select_chunks(scores, 0.25, 32, protect_head=32, protect_tail=64).tolist())
    assert all(t in kept for a, b in case.spans for t in range(a, b))

# ---------------------------------------------------------------- what is remembered

def some(recall=0.96): return Calibration({1: [0, 2], 3: [1]}, None, 16, recall, 0.9, [], 4, 0.2, goal_kinds=("shared",), notes=["ä → ☃"])


def test_remembered_before_shipped(smollm2, tmp_path):
    remember(smollm2, some(), tmp_path)
    assert scoring_layers(smollm2, tmp_path) == some()
    remember(smollm2, some(0.5), tmp_path)
    assert scoring_layers(smollm2, tmp_path).recall == 0.5
    calibration_file(smollm2, tmp_path).unlink()
    assert scoring_layers(smollm2, tmp_path).layers == {15: [6], 18: [7, 8]}


def test_environment_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_MLX_CACHE", str(tmp_path / "elsewhere"))
    model = tiny_model("llama")
    path = remember(model, some())
    assert path == tmp_path / "elsewhere" / "calibration" / f"{model_key(model)[0]}.json" and scoring_layers(model) == some()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", "[1]", '[{"version": 2}]', '[{"version": 1, "signature": "!!", "calibration": {}}]', '[{"version": 1, "signature": "AAA=", "calibration": []}]',
                                  '[{"version": 1, "signature": "SIG", "calibration": {"layers": 3}}]', "\xff\xfe"])
def test_damaged_file_counts_as_none_and_is_replaced(tmp_path, text):
    model = tiny_model("llama")
    path = calibration_file(model, tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(text.replace("SIG", cal._encode(model_key(model)[1])).encode("latin-1"))
    assert scoring_layers(model, tmp_path) is None
    remember(model, some(), tmp_path)
    assert scoring_layers(model, tmp_path) == some()


def test_failure_while_writing_keeps_the_old_file(tmp_path, monkeypatch):
    model = tiny_model("llama")
    path = remember(model, some(), tmp_path)
    def fail(*_): raise OSError("disk full")
    monkeypatch.setattr(cal.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"): remember(model, some(0.1), tmp_path)
    monkeypatch.undo()
    assert scoring_layers(model, tmp_path) == some() and [p.name for p in path.parent.iterdir() if p.suffix == ".part"] == []


def test_many_writers(tmp_path):
    models = [tiny_model("llama", seed=i) for i in range(6)]
    threads = [threading.Thread(target=remember, args=(m, some(i / 10), tmp_path)) for i, m in enumerate(models)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert [scoring_layers(m, tmp_path).recall for m in models] == [i / 10 for i in range(6)]


def test_json_round_trip():
    table = [cal._row(k, n, 7, (l * 3 + h) % 8, layer=l, head=h) for k in ("shared", "tracing") for n in (500, 900) for l in (2, 5) for h in range(3)]
    c = Calibration({5: [0]}, (0, 1), 1, 1.0, 1.0, table, 7, 0.1, goal_kinds=("shared",), depths=[dict(last=5, layers={5: [0]}, recall=1.0)], held_out=[cal._row("shared", 500, 7, 7)], settings=dict(a=[1]))
    assert Calibration.from_json(c.to_json()) == c and len(cal._pack(table)) == 4
    assert c.plot(("tracing",)).data["matrix"].shape == (2, 2)

# ---------------------------------------------------------------- end to end

def test_result_agrees_with_score_heads_and_score_window(tiny, tokenizer, tmp_path):
    "The table is what score_heads says, the held-out rows are what score_window says, and both can be had again by hand."
    c = quick(tiny, tokenizer, tmp_path, kinds=("shared", "paraphrase"), extra_kinds=(), n_cases=3, seed=5)
    assert c.goal_kinds == ("shared",) and c.n_layers == 4 and len(c.table) == 4 * 4 * 2
    def hit(scores, case): return worst_rank(chunk_means(scores, 32, 32, 64), needed_chunks(case.spans, len(case.tokens), 32, 32, 64)) < math.ceil(0.15 * math.ceil(len(case.tokens) / 32))
    for kind in ("shared", "paraphrase"):
        chosen, held = ([make_case(tokenizer, kind, 300, seed=i) for i in r] for r in (range(5, 8), range(8, 11)))
        hits = np.sum([np.concatenate([hit(x, k) for x in score_heads(tiny, k.tokens, body=(16, 128)).values()]) for k in chosen], axis=0)
        assert [r["hits"] for r in c.table if r["kind"] == kind] == hits.tolist()
        held_hits = sum(bool(hit(np.array(score_window(tiny, k.tokens, **c.options())), k)) for k in held)
        assert [(r["hits"], r["n_cases"]) for r in c.held_out if r["kind"] == kind] == [(held_hits, 3)]
        if kind == "shared": assert c.recall == held_hits / 3


def test_same_question_same_file_other_question_anew(tiny, tokenizer, tmp_path):
    def never(): raise AssertionError("scored")
    first = quick(tiny, tokenizer, tmp_path)
    assert quick(tiny, tokenizer, tmp_path, cancel_check=never) == first == scoring_layers(tiny, tmp_path)
    for other in (dict(seed=9), dict(recall=0.5), dict(body=None), dict(force=True)):
        with pytest.raises(AssertionError, match="scored"): quick(tiny, tokenizer, tmp_path, cancel_check=never, **other)
    again = quick(tiny, tokenizer, tmp_path, seed=1)
    assert scoring_layers(tiny, tmp_path) == again != first


def test_cancel_at_every_step(tiny, tokenizer, tmp_path):
    "Whenever it is cancelled, nothing is remembered and the model is as it was."
    logits, calls = tiny(mx.arange(9)[None]), []
    quick(tiny, tokenizer, tmp_path / "whole", cancel_check=lambda: calls.append(1))
    for stop in (0, 1, len(calls) // 2, len(calls) - 1):
        seen = []
        def cancel():
            seen.append(1)
            return len(seen) > stop
        with pytest.raises(PrefillCancelled): quick(tiny, tokenizer, tmp_path / "cut", cancel_check=cancel)
        assert not (tmp_path / "cut").exists() and mx.array_equal(tiny(mx.arange(9)[None]), logits)


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3", "nemotron_h"])
def test_families(family, tokenizer, tmp_path):
    "Only layers that span the prompt are chosen: no recurrent and no sliding-window ones."
    model = tiny_model(family, vocab_size=49152)
    c = quick(model, tokenizer, tmp_path)
    spanning = set(score_heads(model, list(range(300)), body=(16, 128)))
    assert set(c.layers) <= spanning == {r["layer"] for r in c.table} and scoring_layers(model, tmp_path) == c


def test_a_layer_that_spans_short_prompts_only_is_left_out(tokenizer, tmp_path):
    model = tiny_model("gemma3", vocab_size=49152, sliding_window=400)
    assert len({r["layer"] for r in quick(model, tokenizer, tmp_path, lengths=(300, 500)).table}) < len({r["layer"] for r in quick(model, tokenizer, tmp_path).table})


def test_below_the_wanted_recall_it_warns_each_time(tiny, tokenizer, tmp_path):
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"no set of heads reached a recall of 1.0: the best has 0\.\d\d on held-out prompts"):
            c = find_scoring_layers(tiny, tokenizer, **QUICK | dict(n_cases=6, recall=1.0, cache_dir=tmp_path))
    assert c.recall < c.wanted == 1.0


def test_a_folder_that_cannot_be_written(tiny, tokenizer, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="could not be remembered"): find_scoring_layers(tiny, tokenizer, **QUICK | dict(recall=0.01, cache_dir=tmp_path / "file"))


def test_bars(tiny, tokenizer, tmp_path, capfd):
    quick(tiny, tokenizer, tmp_path, progress=True)
    assert "scoring with every head" in capfd.readouterr().err
    quick(tiny, tokenizer, tmp_path, progress=False, force=True)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("bad, message", [
    (dict(kinds=()), "kinds are empty"), (dict(kinds=("shared", "x")), "unknown kind 'x'"), (dict(goal_kinds=("several",)), "goal_kinds are"), (dict(goal_kinds=()), "goal_kinds are"),
    (dict(extra_kinds=("tracing",)), "extra_kinds"), (dict(lengths=()), "length is 0"), (dict(lengths=(0, 300)), "length is 0"), (dict(lengths=(20_000,)), "none fits the model's context of 8192"),
    (dict(lengths=(30,)), "n_tokens 30 is too short"), (dict(n_cases=0), "n_cases is 0"), (dict(n_cases=1.5), "n_cases is 1.5"), (dict(keep_pct=0), "keep_pct is 0"), (dict(keep_pct=1), "keep_pct is 1"),
    (dict(keep_pct=float("nan")), "keep_pct is nan"), (dict(recall=0), "recall is 0"), (dict(recall=1.1), "recall is 1.1"), (dict(body=(4,)), "body is"), (dict(body=(-1, 8)), "body is"),
    (dict(window=0), "window is 0"), (dict(pool_kernel=-1), "pool_kernel is -1"), (dict(chunk_size=0), "chunk_size is 0"), (dict(protect_tail=-1), "protect_tail is -1"), (dict(max_heads=0), "max_heads is 0")])
def test_bad_arguments(tiny, tokenizer, tmp_path, bad, message):
    def never(): raise AssertionError("work was begun")
    with pytest.raises(ValueError, match=message): find_scoring_layers(tiny, tokenizer, **QUICK | dict(cache_dir=tmp_path / "c", cancel_check=never) | bad)
    assert not (tmp_path / "c").exists()


def test_lengths_beyond_the_context_are_left_out(tokenizer, tmp_path):
    model = tiny_model("llama", vocab_size=49152, max_position_embeddings=512)
    c = quick(model, tokenizer, tmp_path, lengths=(300, 600, 900))
    assert c.notes == ["longer than the model's context of 512 tokens and left out: 600, 900"] and {r["n_tokens"] for r in c.table} == {300}


def test_unknown_architecture(tokenizer):
    with pytest.raises(ValueError): find_scoring_layers(mx.array, tokenizer, **QUICK)
