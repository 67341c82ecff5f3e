"""The draft on Core ML programs: the MLX draft's numbers, whatever the context, block and kind of layer; and no MLX in its thread."""
import copy, sys, threading

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

pytest.importorskip("coremltools", reason="not available here: pip install 'coremltools>=9.0,<10'")
from vllm_mlx.ane.draft import ANEContext, ANEDraftModel, forbid_mlx, why_not
from vllm_mlx.ane.kernels import Q8LayerWeights
from vllm_mlx.dflash import SPARE, tiny_draft
from vllm_mlx.models import tiny_model

KINDS = dict(full=dict(n_layers=2), causal=dict(n_layers=1, is_causal=True), sliding=dict(n_layers=3, layer_types=["full_attention", "sliding_attention", "full_attention"], sliding_window=12),
             scaled=dict(n_layers=1, output_multiplier=0.5, final_logit_softcapping=4.0, input_embedding_scale=3.0),
             yarn=dict(n_layers=1, rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)))

@pytest.fixture(scope="module")
def folder(tmp_path_factory): return tmp_path_factory.mktemp("programs")

@pytest.fixture(scope="module")
def models(folder):
    "kind -> (MLX draft, {weights: model}); compiled once"
    known, target = {}, tiny_model("qwen3")
    def get(kind, weights="fp16", **options):
        if kind not in known: known[kind] = tiny_draft(target, **KINDS[kind]), {}
        draft, made = known[kind]
        key = weights, *sorted(options.items())
        if key not in made:
            model = ANEDraftModel(draft, "reference", **(dict(context=64, folder=folder) | options))
            made[key] = model.load_weights() if weights == "fp16" else model.load_weights_q8()
        return draft, made[key]
    return get

def features_for(draft, T, seed=0): return mx.random.normal((1, T, len(draft.config.target_layer_ids) * draft.config.hidden_size), key=mx.random.key(seed))
def off(got, want): return (mx.abs(got - want).max() / mx.abs(want).max()).item()

def both(draft, model, T, at=None, window=64):
    "(MLX cache, context) with the same features"
    theirs, mine = draft.make_cache(window=window), model.make_cache()
    if T: draft.extend(features_for(draft, T), theirs, at); model.extend(features_for(draft, T), mine, at)
    return theirs, mine

# --- numbers. float16 keeps 11 bits: 2^-11 a rounding, and a few layers of sums of some hundred of them give errors of a few thousandths of the largest value.

@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("T", [0, 1, 20, 64, 65, 150])
def test_parity(models, kind, T):
    draft, model = models(kind)
    theirs, mine = both(draft, model, T)
    want = draft.propose(7, None, theirs, 6)
    assert off(model.propose(7, None, mine, 6), want) < 0.02 and model.ran == "reference float16"
    assert off(model.forward(model.embed(model.block(7, 6)), cache=mine), draft.forward(draft.embed(draft.block(7, 6)), cache=theirs)) < 0.02

def test_float32_is_nearer(models):
    draft, half = models("full")
    _, single = models("full", precision="float32")
    theirs, mine = both(draft, half, 40)
    want = draft.propose(7, None, theirs)
    errors = [off(m.propose(7, None, mine), want) for m in (half, single)]
    assert errors[1] < 0.004 and errors[1] < errors[0] and single.ran == "reference float32"

def test_q8_is_the_draft_with_rounded_weights(models):
    "Against an MLX draft whose weights are the dequantised ones, int8 is as near as float16 is."
    draft, model = models("sliding", "q8")
    rounded = copy.deepcopy(draft)
    for layer, q in zip(rounded.layers, (Q8LayerWeights.of(l) for l in draft.layers)):
        a, m = layer.self_attn, layer.mlp
        for module, w in ((a.q_proj, q.wq), (a.k_proj, q.wk), (a.v_proj, q.wv), (a.o_proj, q.wo), (m.gate_proj, q.gate), (m.up_proj, q.up), (m.down_proj, q.down)): module.weight = mx.array(w.dense())
    theirs, mine = both(rounded, model, 40)                              # fuse is not quantised
    got = model.propose(7, None, mine)
    assert off(got, rounded.propose(7, None, theirs)) < 0.02
    assert 0.001 < off(got, draft.propose(7, None, both(draft, model, 40)[0])) < 0.15

@pytest.mark.parametrize("kind", ["full", "scaled"])
def test_head_in_the_programs(models, kind):
    draft, model = models(kind, head="program")
    theirs, mine = both(draft, model, 30)
    want, got = draft(draft.block(7), cache=theirs), model.propose(7, None, mine)
    assert got.shape == want[:, 1:].shape and off(got, want[:, 1:]) < 0.02
    tokens = model.read_draft_tokens()
    assert tokens.dtype == mx.int32 and tokens.shape == (1, draft.config.block_size) and tokens[0, 1:].tolist() == got[0].argmax(-1).tolist()

def test_bfloat16_draft(folder):
    draft = tiny_draft(tiny_model("qwen3", dtype=mx.bfloat16), n_layers=1)
    model = ANEDraftModel(draft, "reference", context=64, folder=folder).load_weights()
    theirs, mine = both(draft, model, 30)
    assert off(model.propose(7, None, mine).astype(mx.float32), draft.propose(7, None, theirs).astype(mx.float32)) < 0.06      # 8 bits

# --- context

@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 9), st.integers(0, 5), st.integers(2, 12))
def test_any_way_of_growing(models, pieces, gap, ahead, size):
    "Pieces, gaps between them, and an anchor beyond the end: as the MLX cache with a window does it."
    draft, model = models("sliding")
    theirs, mine = draft.make_cache(window=64), model.make_cache()
    for i, n in enumerate(pieces):
        at = mine.offset + (gap if i else 0) + np.arange(n)
        for m, c in ((draft, theirs), (model, mine)): m.extend(features_for(draft, n, i), c, at)
    assert mine.offset == theirs.offset and mine.tokens() == theirs.tokens()
    place = mine.offset + ahead
    assert off(model.propose(7, None, mine, size, place), draft.propose(7, None, theirs, size, place)) < 0.02

@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("atc"), st.integers(0, 90)), max_size=20), st.integers(1, 20))
def test_context_is_a_list(steps, room):
    c, want = ANEContext(room), []
    other, frozen = None, None
    for what, n in steps:
        if what == "a" and n:
            at = (want[-1] + 1 if want else 0) + np.cumsum(np.arange(n) % 3 > 0)
            at = at + np.arange(n)
            c.append(np.stack([at, at], 1).astype(np.float32), np.ones((n, 4)), np.zeros((n, 4)), at)
            want += at.tolist()
        elif what == "t":
            most = len(c.positions) - (room if c.dropped else 0)
            if n <= most: c.trim(n); want = want[:len(want) - n]
            else:
                with pytest.raises(ValueError, match=f"0 to {most} can be taken back"): c.trim(n)
        elif what == "c": other, frozen = c.copy(), list(want)
        rows, cos, sin, at = c.newest()
        assert at.tolist() == want[-room:] and c.tokens() == len(want) and c.offset == (want[-1] + 1 if want else 0)
        if want: assert rows[:, 0].astype(int).tolist() == [min(p, 2048) if p > 2048 else p for p in want[-room:]] and len(rows) == len(cos) == len(sin)
        if other is not None: assert other.newest()[3].tolist() == frozen[-room:]
    assert c.size() <= room + SPARE and c.state == []

def test_a_failed_extend_changes_nothing(models):
    draft, model = models("full")
    c = both(draft, model, 10)[1]
    before = c.newest()[0].copy()
    for features, at, words in ((features_for(draft, 2), [3, 4], "start at 10 or later"), (features_for(draft, 2), [10], r"shape \(1,\) for 2 rows"), (features_for(draft, 2), [11, 11], "must increase"),
                                (features_for(draft, 2)[..., 1:], None, "features have shape"), (mx.concatenate([features_for(draft, 2)] * 2), None, "2 sequences"),
                                (features_for(draft, 2) * float("nan"), None, "reach nan")):
        with pytest.raises(ValueError, match=words): model.extend(features, c, at)
    assert c.offset == 10 and np.array_equal(c.newest()[0], before)
    model.extend(features_for(draft, 0), c)
    assert c.offset == 10

@pytest.mark.parametrize("T", [0, 12])
def test_what_is_refused_changes_nothing(models, T):
    "`propose` and `forward` look at everything before the context grows."
    draft, model = models("full")
    c, f = both(draft, model, T)[1], features_for(draft, 5, 3)
    x = model.embed(model.block(7))
    for call, words in ((lambda: model.propose(7, f, c, 65), "the block has shape"), (lambda: model.forward(x[..., 1:], f, c), "the block has shape"), (lambda: model.forward(x * float("nan"), f, c), "reaches nan"),
                        (lambda: model.propose(7, f, c, position=T + 4), f"the context reaches to {T + 5}")):
        with pytest.raises(ValueError, match=words): call()
        assert c.offset == c.tokens() == T
    wide = ANEContext(80)
    with pytest.raises(ValueError, match="shows 70 rows: the programs have 64"): model.forward(x, features_for(draft, 70), wide)
    assert wide.offset == 0
    with model._running, pytest.raises(RuntimeError, match="under way"): model.propose(7, f, c)
    assert c.offset == T
    assert model.propose(7, f, c).shape == (1, 7, 512) and c.offset == T + 5

@pytest.mark.parametrize("size", [10, 44, 59])
def test_padding_never_beats_low_scores(folder, size):
    "Keys that point away from the queries: every score is as low as the norms allow, and zeros of the padding are far above."
    draft = tiny_draft(tiny_model("qwen3"), n_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=32)
    a = draft.layers[0].self_attn
    a.q_proj.weight, a.q_norm.weight, a.k_norm.weight = -a.k_proj.weight, mx.ones(32) * size, mx.ones(32) * size
    model = ANEDraftModel(draft, "reference", context=64, folder=folder).load_weights()
    x = mx.repeat(mx.random.normal((1, 1, 64), key=mx.random.key(1)), 2, 1)
    assert off(model.forward(x), draft.forward(x)) < 0.01
    a.q_norm.weight = a.k_norm.weight = mx.ones(32) * 60
    with pytest.raises(ValueError, match="allow scores of 20365: at most 19900"): model.load_weights()

# --- blocks

@pytest.mark.parametrize("sizes", [(64, 1), (2, 64, 3), (8, 7, 6, 5)])
def test_stale_columns(models, sizes):
    "After a larger block nothing of it shows."
    draft, model = models("sliding")
    theirs, mine = both(draft, model, 30)
    for n in sizes:
        model.set_block_size(n)
        x = mx.random.normal((1, n, draft.config.hidden_size), key=mx.random.key(n))
        assert off(model.forward(x, cache=mine), draft.forward(x, cache=theirs)) < 0.02
        assert not model._buffers["hidden"][..., n:].any()
    model.set_block_size(8)

def test_set_block_size(models, folder):
    draft, model = models("full")
    steps, made = model._steps, sorted(folder.iterdir())
    for n in (0, 65, -1, 2.5, True, None):
        with pytest.raises(ValueError, match="takes? 1 to 64 tokens"): model.set_block_size(n)
    model.set_block_size(3)
    assert model.block(5).shape == (1, 3) and model.propose(5, None, both(draft, model, 5)[1]).shape[1] == 2
    assert draft.config.block_size == 8 and model._steps is steps and sorted(folder.iterdir()) == made
    model.set_block_size(1)
    with pytest.raises(ValueError, match="block_size is 1: at least 2"): model.propose(5)
    with pytest.raises(RuntimeError, match="nothing is prepared"): model.run_kernels()
    model.set_block_size(8)
    with pytest.raises(ValueError, match=r"the block has shape \(1, 65, 64\): \(1, 1 to 64, 64\) is needed"): model.forward(mx.zeros((1, 65, 64)))

def test_sizes_share_programs(models, folder):
    draft, model = models("full")
    for n in (2, 64): assert ANEDraftModel(draft, "reference", context=33, block_size=n, folder=folder).load_weights().programs.folder == model.programs.folder

def test_what_does_not_fit(models):
    draft, model = models("full")
    c = both(draft, model, 5)[1]
    for x, words in ((mx.zeros((2, 3, 64)), "the block has shape"), (mx.zeros((1, 3, 32)), "the block has shape"), (mx.zeros((3, 64)), "the block has shape"),
                     (mx.full((1, 3, 64), 1e6), r"reaches 1e\+06"), (mx.full((1, 3, 64), float("nan")), "reaches nan")):
        with pytest.raises(ValueError, match=words): model.prepare_forward(x, c)
    with pytest.raises(ValueError, match="position is 3: the context reaches to 5"): model.prepare_forward(mx.zeros((1, 3, 64)), c, 3)
    with pytest.raises(ValueError, match="80 rows: the programs have 64 columns"):
        wide = ANEContext(80); model.extend(features_for(draft, 80), wide); model.prepare_forward(mx.zeros((1, 3, 64)), wide)

# --- threads

def test_no_mlx_in_the_thread(models):
    for kind, options in (("sliding", dict()), ("full", dict(head="program")), ("full", dict(weights="q8"))):
        draft, model = models(kind, **options)
        c = both(draft, model, 70)[1]
        want = model.forward(model.embed(model.block(7)), cache=c)
        model.prepare_forward(model.embed(model.block(7)), c)
        failed = []
        with forbid_mlx() as trap:
            def work():
                trap.watch()
                try: model.run_kernels()
                except BaseException as e: failed.append(e)
            t = threading.Thread(target=work); t.start()
            mx.eval(mx.ones((50, 50)) @ mx.ones((50, 50)))                # this thread goes on with MLX
            t.join()
        assert not failed and mx.array_equal(model.read_output(), want)
        assert all(type(a) is np.ndarray for a in [*model._buffers.values(), *model._results.values()])

@pytest.mark.parametrize("call", ["extend", "prepare_forward", "read_output", "logits"])
def test_the_trap_is_one(models, call):
    "Every other method does use MLX, and is caught."
    draft, model = models("full")
    c = both(draft, model, 5)[1]
    x = model.embed(model.block(7))
    model.prepare_forward(x, c); model.run_kernels()
    hidden, f, caught = model.read_output(), features_for(draft, 2), []
    mx.eval(x, hidden, f)
    does = dict(extend=lambda: model.extend(f, c), prepare_forward=lambda: model.prepare_forward(x, c), read_output=lambda: model.read_output() + 1, logits=lambda: model.logits(hidden))[call]
    with forbid_mlx() as trap:
        def work():
            trap.watch()
            try: does()
            except RuntimeError as e: caught.append(str(e))
        t = threading.Thread(target=work); t.start(); t.join()
    assert caught and "MLX was called in a thread that must not" in caught[0]

def test_no_array_is_made_in_the_thread():
    "The constructor of a type of an extension cannot be replaced: a stand-in takes the name. It passes for the type in other threads."
    real, caught = mx.array, []
    a = mx.array([1.0])
    with forbid_mlx() as trap:
        def work():
            trap.watch()
            for make in (lambda: mx.array([1.0]), lambda: mx.array(np.ones(3))):
                try: caught.append(make())
                except RuntimeError as e: caught.append(str(e))
        t = threading.Thread(target=work); t.start(); t.join()
        b = mx.array(np.ones(3), dtype=mx.float16)
        assert isinstance(a, mx.array) and isinstance(b, mx.array) and not isinstance(1, mx.array) and issubclass(real, mx.array) and mx.array.tolist is real.tolist
        assert nn.Linear(3, 2)(b.astype(mx.float32)).shape == (2,) and copy.deepcopy(b).tolist() == [1, 1, 1]
    assert caught == ["MLX was called in a thread that must not: array"] * 2 and mx.array is real and type(b) is real

def test_mlx_is_as_before_the_trap():
    before, own = {(o, n): getattr(o, n) for o in (mx, np, mx.fast) for n in dir(o)}, dict(vars(mx.array))
    try:
        with forbid_mlx(): raise KeyError
    except KeyError: pass
    assert all(getattr(o, n) is f for (o, n), f in before.items()) and set(vars(mx.array)) == set(own) and (mx.array([1, 2]) + 1).tolist() == [2, 3]

def test_one_run_at_a_time(models, monkeypatch):
    draft, model = models("full")
    c = both(draft, model, 5)[1]
    model.prepare_forward(model.embed(model.block(7)), c)
    inside, go = threading.Event(), threading.Event()
    (program, run), *rest = steps = model._steps
    def slow(given): inside.set(); assert go.wait(60); return run(given)
    monkeypatch.setattr(model, "_steps", [(program, slow), *rest])
    t = threading.Thread(target=model.run_kernels); t.start()
    assert inside.wait(60)
    for f in (model.run_kernels, model.read_output, model.load_weights, model.load_weights_q8, lambda: model.set_block_size(4), lambda: model.prepare_forward(mx.zeros((1, 3, 64)), c)):
        with pytest.raises(RuntimeError, match="under way"): f()
    model.extend(features_for(draft, 3), c)                               # the context may grow meanwhile: buffers are copies
    go.set(); t.join()
    assert model.read_output().shape == (1, 8, 64) and model.config.block_size == 8

def test_a_failing_program_can_be_run_again(models, monkeypatch):
    draft, model = models("full")
    c = both(draft, model, 5)[1]
    want = model.propose(7, None, c)
    steps = model._steps
    monkeypatch.setattr(model, "_steps", [(steps[0][0], lambda given: 1 / 0), *steps[1:]])
    with pytest.raises(ZeroDivisionError): model.propose(7, None, c)
    with pytest.raises(RuntimeError, match="there is no result"): model.read_output()
    monkeypatch.setattr(model, "_steps", steps)
    assert mx.array_equal(model.propose(7, None, c), want)

def test_a_run_that_fails_leaves_no_older_result(models, monkeypatch):
    "Run twice on the same buffers, the second time in vain: what is read then would be the first run's."
    draft, model = models("full")
    c = both(draft, model, 5)[1]
    model.prepare_forward(model.embed(model.block(7)), c); model.run_kernels(); model.read_output()
    monkeypatch.setattr(model, "_steps", [*model._steps[:-1], (model._steps[-1][0], lambda given: 1 / 0)])
    failed = []
    def work():
        try: model.run_kernels()
        except ZeroDivisionError as e: failed.append(e)
    t = threading.Thread(target=work); t.start(); t.join()
    assert failed and not model._running.locked()
    with pytest.raises(RuntimeError, match="there is no result"): model.read_output()

def test_another_kind_of_context(models):
    "The MLX draft's context is refused by name, before anything is touched."
    draft, model = models("full")
    theirs, mine = both(draft, model, 5)
    for f in (lambda: model.extend(features_for(draft, 2), theirs), lambda: model.prepare_forward(mx.zeros((1, 3, 64)), theirs), lambda: model.propose(7, features_for(draft, 2), theirs)):
        with pytest.raises(ValueError, match="the context is a DraftCache: an ANEContext"): f()
    assert theirs.offset == 5
    with pytest.raises(ValueError, match="positions are float"): model.extend(features_for(draft, 1), mine, [9.5])

@pytest.mark.parametrize("heads", [(2, 1, 48), (2, 2, 80), (3, 1, 256)])
def test_heads_of_any_size(heads, folder):
    "Sizes whose root is no power of two, and one above what is common."
    n, kv, D = heads
    draft = tiny_draft(tiny_model("llama"), n_layers=1, num_attention_heads=n, num_key_value_heads=kv, head_dim=D)
    model = ANEDraftModel(draft, "reference", context=64, folder=folder).load_weights()
    theirs, mine = both(draft, model, 20)
    assert off(model.propose(7, None, mine), draft.propose(7, None, theirs)) < 0.02

def test_running_twice_is_the_same(models):
    draft, model = models("full")
    c = both(draft, model, 5)[1]
    model.prepare_forward(model.embed(model.block(7)), c)
    outs = []
    for _ in range(2): model.run_kernels(); outs.append(model.read_output())
    assert mx.array_equal(*outs)

# --- backends and weights

def test_backends(models, monkeypatch):
    draft, _ = models("full")
    with pytest.raises(ValueError, match="backend is 'ane': 'coreml' or 'reference'"): ANEDraftModel(draft, "ane")
    with pytest.raises(TypeError): ANEDraftModel(draft)                   # no default that hides what runs
    if sys.platform != "darwin":
        with pytest.raises(RuntimeError, match="Core ML is not available here: it is a part of macOS"): ANEDraftModel(draft, "coreml")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "coremltools is missing" in why_not("coreml")

@pytest.mark.parametrize("options, words", [(dict(context=0), "context is 0"), (dict(block_size=1.5), "block_size is 1.5"), (dict(head="ane"), "head is 'ane'"), (dict(precision="bfloat16"), "precision is 'bfloat16'"),
                                            (dict(block_size=1), "block is 1"), (dict(context=True), "context is True")])
def test_settings_that_do_not_fit(models, options, words):
    with pytest.raises(ValueError, match=words): ANEDraftModel(models("full")[0], "reference", **options)

def test_a_context_beyond_the_limits(models, folder):
    with pytest.raises(ValueError, match="1024"): ANEDraftModel(models("full")[0], "reference", context=1000, folder=folder).load_weights()

def test_before_weights(models, folder):
    model = ANEDraftModel(models("full")[0], "reference", context=64, folder=folder)
    with pytest.raises(RuntimeError, match="no weights are loaded: call load_weights"): model.propose(7)
    assert model.ran is None and model.describe()["weights"] is None and model.describe()["programs"] == 0

def test_norms_and_int8(models):
    draft, model = models("sliding", "q8")
    for i in range(3):
        model._buffers[f"layer{i}.q_norm_w"] = None
        model.load_layer_norm_weights(i)
    want = model.programs.norms(draft)
    for name in [n for n in want if n in model._buffers]: assert np.array_equal(model._buffers[name], want[name]) and model._buffers[name].dtype == np.float16
    assert sum(n.startswith("layer") for n in want) == 12
    w = model.load_layer_weights_q8(2)
    assert isinstance(w, Q8LayerWeights) and w.gate.q.dtype == np.int8 and w.gate.q.min() >= -127
    for f in (model.load_layer_weights_q8, model.load_layer_norm_weights):
        for i in (3, -1):
            with pytest.raises(ValueError, match=f"layer is {i}: the draft has layers 0 to 2"): f(i)

def test_q8_is_smaller_and_both_are_found_again(models, folder, monkeypatch):
    draft, full = models("full")
    _, q8 = models("full", "q8")
    assert 0.3 < q8.describe()["bytes"] / full.describe()["bytes"] < 0.95 and q8.describe()["weights"] == "q8"
    import vllm_mlx.ane.programs as programs
    monkeypatch.setattr(programs, "_kernels", lambda *a: pytest.fail("compiled again"))
    assert ANEDraftModel(draft, "reference", context=64, folder=folder).load_weights().programs.folder == full.programs.folder

def test_other_weights_are_other_programs(models, folder):
    draft, model = models("full")
    other = copy.deepcopy(draft)
    other.layers[1].mlp.down_proj.weight = other.layers[1].mlp.down_proj.weight + 0.25
    fresh = ANEDraftModel(other, "reference", context=64, folder=folder).load_weights()
    assert fresh.programs.folder != model.programs.folder
    theirs, mine = both(other, fresh, 20)
    assert off(fresh.propose(7, None, mine), other.propose(7, None, theirs)) < 0.02

def test_binding(models, folder):
    target = tiny_model("qwen3")
    draft = tiny_draft(target, n_layers=1)
    model = ANEDraftModel(draft, "reference", context=64, head="program", folder=folder).load_weights()
    assert model.bind(target) is model and model._lent.target is target
    with pytest.raises(ValueError, match="head of another target"): model.bind(tiny_model("qwen3", seed=1))
    other = tiny_model("qwen3", seed=1)
    draft.bind(other)                                                     # behind the model's back
    for f in (lambda: model.propose(7), lambda: model.bind(other), lambda: model.forward(mx.zeros((1, 3, 64)))):
        with pytest.raises(ValueError, match="head of another target"): f()
    context = model.make_cache()
    with pytest.raises(ValueError, match="load the weights again"): model.propose(7, features_for(draft, 3), context)
    assert context.offset == 0
    assert off(model.load_weights().propose(7), draft.propose(7)) < 0.02 and model.bind(other) is model
    free = ANEDraftModel(tiny_draft(target, n_layers=1), "reference", context=64, folder=folder)
    free.draft._lent = None
    free.load_weights()
    with pytest.raises(ValueError, match="the draft has no target"): free.propose(7)
    free.bind(target)
    assert free.propose(7).shape == (1, 7, 512)
