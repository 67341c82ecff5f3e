"Block sizes: the rule against brute force, estimates under any stopping, curves, and a controller that keeps its promises on machines it has never seen."
import copy, math
from itertools import accumulate
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from vllm_mlx.kod import (EXAMPLE_COSTS, Acceptance, BlockController, CostCurve, accepted_distribution, as_cost, best_block, estimate_alpha,
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
    curve, scaled = CostCurve(), CostCurve()
    for r, s, c in samples: curve.add(r, s, c), scaled.add(r, s * 2.0**power, c)
    for context in (0, 1500, 9000):
        table = curve.table(16, context)
        assert table.shape == (16,) and (np.isfinite(table) & (table > 0)).all()
        np.testing.assert_allclose(scaled.table(16, context), table * 2.0**power, rtol=1e-9)
        for r in range(1, 17):
            kept = [s for q, s, c in samples if q == r and curve.bucket(c) == curve.bucket(context)][-9:]
            assert curve.count(r, context) == len(kept)
            if kept: assert math.isclose(table[r - 1], sorted(kept)[(len(kept) - 1) // 2], rel_tol=1e-9)

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
