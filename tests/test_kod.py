"Block sizes: the rule against brute force, estimates under any stopping, curves, and a controller that keeps its promises on machines it has never seen."
import copy, gc, json, math, threading
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from vllm_mlx.kod import (EXAMPLE_COSTS, Acceptance, BlockController, CostCurve, KodMemory, accepted_distribution, as_cost, best_block, estimate_alpha,
                          expected_tokens, kod_optimal_gamma, simulate)

chances, sizes = st.floats(0, 1), st.integers(1, 40)
times = st.floats(1e-3, 1e3)

@settings(max_examples=200, deadline=None)
@given(chances, sizes)
def test_expected_tokens_is_the_mean_of_the_distribution(alpha, gamma):
    p = accepted_distribution(alpha, gamma)
    assert p.shape == (gamma,) and (p >= 0).all() and math.isclose(p.sum(), 1, abs_tol=1e-9)
    exact, got = p @ np.arange(1, gamma + 1), expected_tokens(alpha, gamma)
    assert 1 <= got <= gamma and abs(exact - got) < 1e-9 if 0.001 <= alpha <= 0.999 else abs(exact - got) < 0.001 * gamma**2 + 1e-3

@settings(max_examples=300, deadline=None)
@given(chances, times, times, st.integers(2, 20), st.integers(0, 30))
def test_rule_is_the_first_best_of_all(alpha, a, b, low, more):
    got = kod_optimal_gamma(alpha, a, b, low, low + more)
    rates = {g: expected_tokens(alpha, g) / (a + b * g) for g in range(low, low + more + 1)}
    assert rates[got] == max(rates.values()) and all(r < rates[got] for g, r in rates.items() if g < got)

@settings(max_examples=200, deadline=None)
@given(st.floats(0.01, 0.95), st.floats(0, 0.04), times, times, st.integers(-6, 6))
def test_rule_rises_with_acceptance_and_fixed_cost_and_has_no_unit(alpha, more, a, b, power):
    g = kod_optimal_gamma(alpha, a, b)
    assert kod_optimal_gamma(alpha + more, a, b) >= g
    assert kod_optimal_gamma(alpha, 2 * a, b) >= g
    assert kod_optimal_gamma(alpha, a * 2.0**power, b * 2.0**power) == g     # a power of two rounds nothing

@pytest.mark.parametrize("args", [(-0.1, 1, 1), (1.1, 1, 1), (float("nan"), 1, 1), (0.5, 0, 0), (0.5, -10, 1), (0.5, float("inf"), 1), (0.5, float("nan"), 1)])
def test_rule_refuses(args):
    with pytest.raises(ValueError): kod_optimal_gamma(*args)

@settings(max_examples=100, deadline=None)
@given(chances, st.lists(times, min_size=1, max_size=16))
def test_best_block_and_the_log_rule(alpha, steps):
    cost = as_cost(dict(enumerate(accumulate(steps), 1)))
    top = len(steps)
    g, small = (best_block(alpha, cost, top, utility=u) for u in ("rate", "log"))
    assert all(expected_tokens(alpha, g) / cost(g) >= expected_tokens(alpha, k) / cost(k) for k in range(1, top + 1))
    assert 1 <= small <= top

@pytest.mark.parametrize("alpha", [0.05, 0.4, 0.75, 0.93])
@pytest.mark.parametrize("policy", ["fixed", "greedy", "stop when ahead"])
def test_estimate_is_right_however_blocks_are_chosen(alpha, policy):
    rng, excess, means, inside = np.random.default_rng(1), [], [], []
    for _ in range(400):
        runs = []
        while len(runs) < 60:
            mean = estimate_alpha(runs)[0]
            g = {"fixed": 5, "greedy": 2 + int(14 * mean), "stop when ahead": 8 if mean > alpha else 2}[policy]
            runs.append((g, min(int(rng.geometric(1 - alpha)) - 1, g - 1)))
        s, trials = sum(a for _, a in runs), sum(a + (a < g - 1) for g, a in runs)
        excess.append(s - alpha * trials)
        mean, sd = estimate_alpha(runs)
        means.append(mean), inside.append(abs(mean - alpha) < 1.96 * sd)
    assert abs(np.mean(excess)) < 4 * np.std(excess) / 20               # a martingale: its mean is 0
    assert abs(np.mean(means) - alpha) < 0.03 and 0.9 < np.mean(inside) <= 1

rounds = st.lists(st.tuples(st.integers(2, 16), st.floats(0, 1)), max_size=60).map(lambda rs: [(g, int(u * (g - 1) + 0.5)) for g, u in rs])

@settings(max_examples=150, deadline=None)
@given(rounds, st.booleans(), st.floats(1, 200))
def test_beliefs_stay_probabilities(runs, per_position, half_life):
    a = Acceptance(15, half_life=half_life, per_position=per_position)
    for g, accepted in runs: a.update(g - 1, accepted)
    mean, sd = a.chances()
    tokens = a.tokens()
    assert ((0 < mean) & (mean < 1) & (sd > 0) & (sd < 0.5)).all() and (a.hits >= 0).all() and (a.misses >= 0).all()
    assert tokens.shape == (16,) and tokens[0] == 1 and (np.diff(tokens) >= 0).all() and (tokens <= np.arange(1, 17)).all()
    assert (a.tokens(0.5) <= tokens).all() and (a.tokens(-0.5) >= tokens).all()
    a.soften(3.0)
    assert a.hits.sum() + a.misses.sum() <= 3 + 1e-9

def test_without_forgetting_one_belief_is_the_beta_posterior():
    a, runs = Acceptance(7, prior=0.5, weight=2, half_life=1e12, per_position=False, alarm=1e9), [(8, 3), (8, 7), (4, 3), (4, 0)]
    for g, accepted in runs: a.update(g - 1, accepted)
    np.testing.assert_allclose(a.pooled(), estimate_alpha(runs), rtol=1e-9)

@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 16), st.floats(1e-3, 10), st.integers(0, 10_000)), min_size=1, max_size=40), st.integers(-5, 5))
def test_curve_gives_back_its_medians_and_has_no_unit(samples, power):
    curve, scaled, level = CostCurve(window=9, follow=0), CostCurve(), CostCurve()
    for r, s, c in samples: curve.add(r, s, c), scaled.add(r, s * 2.0**power, c), level.add(r, s, c)
    for context in (0, 1500, 9000):
        table = curve.table(16, context)
        assert table.shape == (16,) and (np.isfinite(table) & (table > 0)).all()
        np.testing.assert_allclose(scaled.table(16, context), level.table(16, context) * 2.0**power, rtol=1e-9)
        for r in range(1, 17):
            kept = [s for q, s, c in samples if q == r and curve.bucket(c) == curve.bucket(context)][-9:]
            assert curve.count(r, context) == len(kept)
            if kept: assert math.isclose(table[r - 1], sorted(kept)[(len(kept) - 1) // 2], rel_tol=1e-9)

@pytest.mark.parametrize("factor", [0.8, 1.0, 1.3])
def test_a_size_not_run_again_follows_the_machine(factor):
    rng, curve, stubborn = np.random.default_rng(0), CostCurve(), CostCurve(follow=0)
    for speed, sizes in ((1.0, [1, 4] * 31), (factor, [4] * 20)):
        for r in sizes:
            t = 10 * r * speed * math.exp(0.05 * rng.standard_normal())
            curve.add(r, t), stubborn.add(r, t)
    ratio = lambda c: c.seconds(4) / c.seconds(1)
    assert abs(ratio(curve) / 4 - 1) < 0.08 and (factor == 1 or abs(ratio(stubborn) / 4 - 1) > 0.12)
    curve.add(4, 4000.0)                                                  # a hiccup moves nothing
    assert abs(ratio(curve) / 4 - 1) < 0.08 and abs(curve.seconds(4) / (40 * factor) - 1) < 0.08

def test_prior_may_depend_on_context():
    curve = CostCurve(prior=lambda rows, context: 1 + rows * context / 1024)
    assert curve.seconds(3, 100) == 1 and curve.seconds(3, 3000) == 1 + 3 * 2

@settings(max_examples=100, deadline=None)
@given(st.integers(2, 24), st.lists(st.tuples(st.integers(0, 20), st.floats(0, 1), st.floats(1e-4, 10), st.integers(0, 9000)), max_size=60), st.integers(0, 5))
def test_controller_keeps_its_bounds_whatever_happens(trained, events, seed):
    one, two = BlockController(trained, seed=seed), BlockController(trained, seed=seed)
    for room, luck, seconds, context in events:
        g = one.next(room)
        assert g == two.next(room) == one.next(room) and 1 <= g <= max(1, min(room, trained)) and one.next() <= trained
        for c in (one, two): c.update(g, int(luck * (g - 1) + 0.5), seconds, context)
        assert one.stats() == two.stats()                             # same seed, same events: the same choice
        assert math.isfinite(one.stats()["gain"]) and one.stats()["drafts"] == one.next() - 1

@pytest.mark.parametrize("bad", [(0, 0, 1.0), (17, 0, 1.0), (4, -1, 1.0), (4, 4, 1.0), (4, 1, 0.0), (4, 1, float("nan")), (4, 1, float("inf")), (4, 1, 1.0, -1)])
def test_bad_news_changes_nothing(bad):
    c = BlockController(16)
    simulate(c, 0.7, EXAMPLE_COSTS["line"], 200)
    before, state = copy.deepcopy(c.stats()), (c.acceptance.hits.copy(), c.curve.table(16).copy(), c.next())
    with pytest.raises(ValueError): c.update(*bad)
    assert c.stats() == before and (c.acceptance.hits == state[0]).all() and (c.curve.table(16) == state[1]).all() and c.next() == state[2]

@pytest.mark.parametrize("kwargs", [dict(trained=1), dict(trained=8, max_block=9), dict(trained=8, max_block=1), dict(trained=8, prior=1.0)])
def test_controller_refuses(kwargs):
    with pytest.raises(ValueError): BlockController(**kwargs)

staircases = st.tuples(st.floats(1.05, 6), st.lists(st.sampled_from([0, 0, 0, 0.02, 0.1, 0.5, 2.0]), min_size=15, max_size=15)).map(
    lambda t: dict(enumerate([0.03, *(0.03 * x for x in accumulate(t[1], initial=t[0]))][:16], 1)))

@settings(max_examples=60, deadline=None)
@given(staircases, st.integers(0, 3), st.integers(256, 600))
def test_an_always_wrong_draft_costs_less_than_a_tenth(cost, seed, n):
    assert simulate(BlockController(16, seed=seed), 0.0, cost, n, seed=seed).rate > 0.9 * simulate(1, 0.0, cost, n).rate

@settings(max_examples=30, deadline=None)
@given(staircases, st.floats(0, 1), st.integers(0, 3))
def test_never_a_loss_at_any_acceptance(cost, alpha, seed):
    assert simulate(BlockController(16, seed=seed), alpha, cost, 400, seed=seed).rate > 0.9 * simulate(1, alpha, cost, 400).rate

@pytest.mark.parametrize("name", EXAMPLE_COSTS)
@pytest.mark.parametrize("alpha", [0.2, 0.6, 0.85, 0.95])
def test_regret_on_other_texts(name, alpha):
    cost, seeds = EXAMPLE_COSTS[name], range(10, 13)
    best = max(np.mean([simulate(g, alpha, cost, 2048, seed=s).rate for s in seeds]) for g in range(1, 17))
    got = np.mean([simulate(BlockController(16, seed=s), alpha, cost, 2048, seed=s).rate for s in seeds])
    assert got > 0.95 * best

@pytest.mark.parametrize("kwargs", [dict(noise=0.2), dict(spikes=0.05), dict(noise=0.1, spikes=0.02)])
def test_noise_and_hiccups_do_not_mislead(kwargs):
    cost, seeds = EXAMPLE_COSTS["staircase"], range(3)
    best = max(np.mean([simulate(g, 0.85, cost, 2048, seed=s).rate for s in seeds]) for g in range(1, 17))
    assert np.mean([simulate(BlockController(16, seed=s), 0.85, cost, 2048, seed=s, **kwargs).rate for s in seeds]) > 0.93 * best

def test_block_size_follows_the_depth():
    "Beyond 6 rows each row reads the cache again: at depth large blocks stop paying, and fixed ones lose on one side or the other."
    def cost(rows, context): return 0.03 + 0.004 * (rows > 1) + 0.0006 * rows + context * (2e-6 if rows <= 6 else 1e-6 * rows)
    seeds, n = range(2), 8192
    fixed = {g: np.mean([simulate(g, 0.9, cost, n, seed=s).rate for s in seeds]) for g in range(1, 17)}
    run = simulate(BlockController(16), 0.9, cost, n)
    assert simulate(BlockController(16), 0.9, cost, n, seed=0).rate > 0.95 * simulate(max(fixed, key=fixed.get), 0.9, cost, n).rate
    assert np.median(run.blocks[10:50]) > 6 >= np.median(run.blocks[-50:])

@pytest.mark.parametrize("name", EXAMPLE_COSTS)
def test_it_comes_back(name):
    run = simulate(BlockController(16), lambda done: 0.0 if done < 1000 else 0.95, EXAMPLE_COSTS[name], 2000)
    at = np.cumsum([a + 1 for a in run.accepted])
    late = np.array(run.blocks)[at > 1250]
    assert (late > 1).mean() > 0.7

@pytest.mark.parametrize("times", [5, 50])
def test_a_slow_first_round_is_forgiven(times):
    c, seen = BlockController(16), set()
    real = c.update
    def update(block, accepted, seconds, context=0):
        real(block, accepted, seconds * (1 if block in seen else times), context)
        seen.add(block)
    c.update = update
    run = simulate(c, 0.85, EXAMPLE_COSTS["staircase"], 2048)
    assert run.rate > 0.85 * simulate(6, 0.85, EXAMPLE_COSTS["staircase"], 2048).rate

def test_where_no_block_can_win_it_hardly_ever_probes():
    c = BlockController(4)
    run = simulate(c, 1.0, {1: 1.0, 2: 2.5, 3: 3.5, 4: 4.5}, 600, noise=0)
    assert sum(g > 1 for g in run.blocks) <= 6

def test_a_shared_curve_needs_no_second_measurement():
    first = BlockController(16)
    simulate(first, 0.8, EXAMPLE_COSTS["staircase"], 500)
    second = BlockController(16, first.curve)
    assert second.next() > 1 and second.stats()["why"] == "probe"

def test_larger_than_trained_only_when_asked():
    flat = {1: 0.03, 2: 0.031, 64: 0.032}
    assert max(simulate(BlockController(16), 0.99, flat, 2000).blocks) == 16
    assert max(simulate(BlockController(16, max_block=32, allow_larger=True), 0.99, flat, 2000).blocks) > 16

@pytest.mark.parametrize("trained", [2, 3, 32])
def test_other_trained_sizes(trained):
    run = simulate(BlockController(trained), 1.0, {1: 0.03, 2: 0.035, 32: 0.06}, 1500)
    assert trained - 3 <= np.median(run.blocks[-20:-1]) <= trained and sum(run.accepted) + len(run.accepted) == run.tokens == 1500

def test_a_block_cut_short_by_the_loop_is_fine():
    c = BlockController(16)
    for _ in range(100):
        g = min(c.next(), 3)
        c.update(g, g - 1, 0.03 + 0.001 * g)
    assert c.stats()["tokens"] > 200 and c.next() > 3


# --- what requests share ---

LOOP = dict(head_start=2.0, budget=0.03)
def sharing(**kw):
    memory = KodMemory(**kw)
    return lambda: BlockController(8, memory=memory, **LOOP)

@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 20), st.floats(0, 1), st.floats(1e-3, 10)), min_size=1, max_size=15), min_size=1, max_size=6), st.integers(0, 3))
def test_a_memory_stays_sound_whatever_its_requests_met(requests, seed):
    memory, told = KodMemory(), 0
    for events in requests:
        c = BlockController(8, memory=memory, seed=seed)
        mean, sd = c.acceptance.chances()
        assert ((0 < mean) & (mean < 1) & (sd > 0)).all() and c.acceptance.weight <= max(4, memory.differ) and 1 <= c.next() <= 8
        for room, luck, seconds in events:
            g = c.next(room)
            c.update(g, int(luck * (g - 1) + 0.5), seconds)
        told += len(events)
        assert memory.rounds == told and math.isfinite(memory.debt) and memory.trials() >= 0 and memory.pause is not None

def test_what_a_text_is_told_counts_for_few_trials_and_fades():
    memory, cost = KodMemory(), EXAMPLE_COSTS["staircase"]
    for s in range(4): simulate(BlockController(8, memory=memory), 0.9, cost, 200, seed=s)
    c = BlockController(8, memory=memory)
    assert memory.trials() > 100 and memory.differ / 2 < c.acceptance.weight < memory.differ and c.acceptance.pooled()[0] > 0.8
    began = c.acceptance.weight
    simulate(c, 0.9, cost, 400, seed=9)
    assert c.acceptance.weight < 0.8 * began
    wrong = memory.acceptance(7)
    for _ in range(8): wrong.update(7, 0)
    assert wrong.chances()[0][0] < 0.55                                       # a different text is believed
    bad = KodMemory()
    for s in range(4): simulate(BlockController(8, memory=bad, budget=0.5), 0.0, cost, 100, seed=s)
    good = bad.acceptance(7)
    assert good.pooled()[0] < 0.2 < 4 < good.weight
    for _ in range(3): good.update(7, 7)
    assert good.weight < 4 and good.pooled()[0] > 0.5                         # an alarm: what others taught is dropped

def test_it_keeps_the_shape_that_others_showed():
    memory, falls = KodMemory(), [0.95, 0.9, 0.8, 0.6, 0.4, 0.3, 0.2]
    for s in range(6): simulate(BlockController(8, memory=memory), falls, EXAMPLE_COSTS["flat"], 300, seed=s)
    a = memory.acceptance(7)
    assert np.abs(a.chances()[0] - falls).mean() < 0.12
    for _ in range(8): a.update(1, 0)                                      # a bad text: its first position is bad, so all are worse
    assert (a.chances()[0] < memory.acceptance(7).chances()[0]).all()

@pytest.mark.parametrize("name", EXAMPLE_COSTS)
def test_short_texts_after_the_first(name):
    cost, make, seeds = EXAMPLE_COSTS[name], sharing(), range(12)
    for alpha in (0.5, 0.85):
        time = [simulate(make(), alpha, cost, 64, seed=s).seconds for s in seeds][1:]
        best = min(sum(simulate(g, alpha, cost, 64, seed=s).seconds for s in seeds[1:]) for g in range(1, 9))
        assert sum(time) < best / 0.92, (name, alpha, sum(time) / best)

@pytest.mark.parametrize("n", (24, 64))
def test_an_always_wrong_draft_loses_its_head_start_once(n):
    for name, cost in EXAMPLE_COSTS.items():
        make = sharing()
        share = [simulate(1, 0, cost, n).seconds / simulate(make(), 0.0, cost, n, seed=s).seconds for s in range(8)]
        assert share[0] > (0.9 if n == 64 else 0.8) and min(share[1:]) > 0.9 and np.mean(share[1:]) > 0.95, (name, share)

def test_no_single_answer_pays_for_the_winnings_of_others():
    for name, cost in EXAMPLE_COSTS.items():
        make = sharing()
        for s in range(5): simulate(make(), 0.9, cost, 64, seed=s)
        bad = simulate(make(), 0.0, cost, 64).seconds / cost(1) - 64
        assert bad < 2 + 4 + 0.03 * 75 + 0.5, (name, bad)                   # head start, what was carried, and the budget

def test_a_parked_pair_comes_back_for_a_good_text():
    for name, cost in EXAMPLE_COSTS.items():
        make = sharing()
        for s in range(5): simulate(make(), 0.0, cost, 64, seed=s)
        run = simulate(make(), 0.95, cost, 600)
        assert (np.array(run.blocks[-40:]) > 1).mean() > 0.8, name

def test_requests_in_threads_lose_nothing():
    memory, errors, rounds = KodMemory(), [], []
    def work(s):
        try:
            for _ in range(4): rounds.append(len(simulate(BlockController(8, memory=memory, seed=s), 0.7, EXAMPLE_COSTS["line"], 60, seed=s, context=900 * s).blocks))
        except Exception as e: errors.append(e)
    threads = [threading.Thread(target=work, args=(s,)) for s in range(6)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert not errors and len(rounds) == 24 and memory.rounds == sum(rounds) == max(memory.seen.values())

def test_memories_live_and_die_with_the_pair():
    from vllm_mlx.kod_memory import _pairs, forget_pair, pair_memory
    class Thing: pass
    model, drafts, before = Thing(), [Thing() for _ in range(3)], len(_pairs)
    memories = [pair_memory(model, d) for d in drafts]
    assert len({*map(id, memories)}) == 3 and all(pair_memory(model, d) is m for d, m in zip(drafts, memories)) and pair_memory(model, drafts[0], "exact") is not memories[0]
    del drafts[0]; gc.collect()
    assert len(_pairs) == before + 2
    assert forget_pair(model, drafts[0]) and not forget_pair(model, drafts[0])
    del model; gc.collect()
    assert len(_pairs) == before
    found, one, two = [], Thing(), Thing()
    threads = [threading.Thread(target=lambda: found.append(pair_memory(one, two))) for _ in range(8)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert len({*map(id, found)}) == 1

RESULTS = Path(__file__).parents[1] / "nbs" / "results"

def test_on_recorded_answers():
    "Real acceptances of the shipped draft, simulated times: the memory beside every fixed size, from the second answer on."
    from vllm_mlx.kod_memory import replay
    answers = [a | dict(runs={int(g): r for g, r in a["runs"].items()}) for a in json.loads((RESULTS / "kod_acceptance.json").read_text())["answers"]]
    cost = {1: 1.0, 2: 1.41, 4: 1.62, 6: 1.93, 8: 1.92}
    orders = [np.random.default_rng(s).permutation(12) for s in range(50, 56)]
    seconds = lambda make, **kw: [(answers[i], r.seconds) for s, o in enumerate(orders) for i, r in list(zip(o, replay(make(), [answers[i] for i in o], cost, seed=s, **kw)))[1:]]
    total = lambda rows, kind=None: sum(t for a, t in rows if kind in (None, a["kind"]))
    plain = lambda kind=None: sum(a["tokens"] - 1 for a, _ in fixed[1] if kind in (None, a["kind"]))
    fixed, mine = {g: seconds(lambda g=g: lambda: g) for g in range(1, 9)}, seconds(sharing)
    assert total(mine) < min(map(total, fixed.values())) / 0.95
    for kind in ("code", "reference", "chat"): assert total(mine, kind) < min(total(f, kind) for f in fixed.values()) / 0.93, kind
    assert plain("chat") / total(mine, "chat") > 1.05 and min((a["tokens"] - 1) / t for a, t in mine) > 0.85
    rough = seconds(sharing, noise=0.1, wander=0.2)
    assert total(rough) < min(map(total, fixed.values())) / 0.93 and plain("chat") / total(rough, "chat") > 0.95
    wrong = [a | dict(runs={g: [0] * len(r) for g, r in a["runs"].items()}) for a in answers]
    assert all(r.tokens / r.seconds > 0.9 for r in replay(sharing(), wrong, cost))


def test_cleared_while_requests_are_under_way():
    mem = KodMemory()
    a = BlockController(8, memory=mem)
    mem.clear()
    a.update(8, 5, .01)
    mem.clear()
    BlockController(3, memory=mem)
    for _ in range(4): a.update(8, 5, .01)
    assert mem.trials() >= 0
