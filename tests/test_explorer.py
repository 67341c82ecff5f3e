"""The explorer in Python: every architecture, odd scores and texts, threads, faults."""
import threading
from html.parser import HTMLParser
from types import SimpleNamespace
from xml.etree import ElementTree

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vllm_mlx import explorer, live_pictures
from vllm_mlx.chunks import select_chunks, snap_edges
from vllm_mlx.cost import CostModel, cache_bytes
from vllm_mlx.explorer import SCORERS, explore, explore_needles, needle_grid, score_prompt
from vllm_mlx.importance import score_tokens, score_window
from vllm_mlx.live_pictures import PAGE, choose, cost_curves, cost_svg, curve_svg, grid_cells, grid_svg, text_page
from vllm_mlx.models import TINY_FAMILIES, tiny_model
from vllm_mlx.specprefill import SpecPrefill

COST = CostModel((0.5, 2e-3, 0), (0, 4e-3, 1e-6), (0.3, 0))
LLAMA = tiny_model('llama', vocab_size=257)
PROMPT = [int(t) for t in np.random.default_rng(1).integers(1, 250, 400)]


def letters():
    "A tokenizer of the 256 bytes."
    t = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"<end>": 256}, []))
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=t, eos_token="<end>"))


TOK = letters()


def view_of(model=LLAMA, prompt=PROMPT, **kw):
    return explore(prompt, TOK, model, **dict(cost=COST, max_tokens=3, progress=False, protect_head=8, protect_tail=16) | kw)


class Text(HTMLParser):
    "The text of an HTML page, and whether its elements close in order."
    def __init__(self, page):
        super().__init__()
        self.text, self.open = "", []
        self.feed(page)
        assert self.open == []
    def handle_starttag(self, tag, attrs): self.open.append(tag)
    def handle_endtag(self, tag): assert self.open.pop() == tag
    def handle_data(self, data): self.text += data


class Bold(Text):
    "Also the text that is marked as kept or protected."
    bold = ""
    def handle_data(self, data):
        super().handle_data(data)
        if "b" in self.open: self.bold += data


# -- scores --

@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("scorer", SCORERS)
def test_each_architecture_scores_and_runs(family, scorer):
    model = tiny_model(family)
    view = view_of(model, scorer=scorer, keep_pct=0.3)
    assert view.scorer == scorer and view.importance.shape == (400,) and np.isfinite(view.importance).all() and view.importance.sum() > 0
    assert view.run(wait=True) and view.error == ""
    row = view.runs[0]
    assert row['kept_tokens'] >= len(view.selected) and set(view.selected) <= set(range(400)) and row['ttft_s'] > row['score_s'] > 0
    assert row['cache_bytes'] == cache_bytes(model, row['kept_tokens'] - 1, step_size=view.sp.step_size)


@pytest.mark.parametrize("pool", [1, 7, 49])
def test_draft_scores_for_the_target(pool):
    draft = tiny_model('qwen3', vocab_size=257, seed=3)
    view = view_of(draft=draft, scorer="query window")
    view.pool = pool
    np.testing.assert_array_equal(view.importance, np.array(score_window(draft, PROMPT, pool_kernel=pool)))
    view.scorer = "look-ahead"
    view.score(wait=True)
    np.testing.assert_array_equal(view.importance, np.array(score_tokens(draft, PROMPT, 8, pool, prefill_step_size=view.sp.step_size)))


def test_odd_pooling_width_and_given_layers():
    sp = SpecPrefill(LLAMA, layers={2: [0, 3]}, body=(4, 32), pool_kernel=5, threshold=0)
    s = score_prompt(sp, PROMPT)
    assert 5 in s.pooled and s.seconds > 0
    np.testing.assert_array_equal(s.at(5), np.array(sp.prefill(PROMPT).importance))


def test_short_prompts():
    for n in (1, 2, 33):
        for scorer in SCORERS:
            view = view_of(prompt=PROMPT[:n], scorer=scorer)
            assert view.error == "" and len(view.selected) >= 1
            assert view.run(wait=True) and view.error == "", (n, scorer, view.error)


def test_scores_of_any_kind_can_be_given():
    x = np.random.default_rng(0).random(400)
    wanted = explore(x, TOK, tokens=PROMPT).selected.tolist()
    for given_ in (x.tolist(), x.astype(np.float32), mx.array(x), mx.array(x).astype(mx.float32)):
        assert explore(given_, TOK, tokens=np.array(PROMPT)).selected.tolist() == wanted
    assert explore(mx.array(x).astype(mx.bfloat16), TOK, tokens=PROMPT).error == ""
    r = SpecPrefill(LLAMA, tokenizer=TOK, threshold=1000).prefill(PROMPT)
    with pytest.raises(ValueError, match="no scores: it was dense, too short: 400 tokens"): explore(r, TOK, tokens=PROMPT)
    x[7] = np.nan
    with pytest.raises(ValueError, match=r"importance\[7\] is nan"): explore(x, TOK, tokens=PROMPT).selection


def test_text_is_a_prompt():
    view = explore("a fact. " * 20, TOK, LLAMA, progress=False, cost=COST)
    assert "".join(view.pieces) == "a fact. " * 20 and view.tokens.size == 160


def test_prompts_beyond_a_context():
    small = tiny_model('llama', vocab_size=257, max_position_embeddings=256)
    with pytest.raises(ValueError, match="400 tokens, the scoring model's context is 256"): view_of(small, cost=None)
    short = CostModel((0, 1e-3, 0), (0, 1e-3, 0), (0, 0), context=256)
    with pytest.raises(ValueError, match="context is 256"): view_of(cost=short)


# -- what a setting keeps --

scores = st.lists(st.floats(0, 1e3, width=32), min_size=1, max_size=120)

@settings(max_examples=100, deadline=None)
@given(scores, st.floats(0.01, 1), st.integers(1, 40), st.integers(0, 50), st.integers(0, 50), st.floats(0, 1))
def test_choose_is_select_chunks(x, keep, size, head, tail, backbone):
    x = np.array(x, np.float32)
    kw = dict(protect_head=head, protect_tail=tail, backbone_pct=backbone)
    c = choose(x, keep, size, **kw)
    assert c.selected.tolist() == select_chunks(x, keep, size, **kw).tolist() and np.flatnonzero(c.kept).tolist() == c.selected.tolist()
    assert -1e-6 <= c.mass <= 1 + 1e-6 and len(c.means) == len(c.whole) == len(c.edges) == -(-len(x) // size)
    assert (c.cut is None) == bool(c.whole.all()) and (c.cut is None or c.cut == c.means[~c.whole].max())
    for log in (False, True):
        svg = curve_svg(x, c, log)
        ElementTree.fromstring(svg)
        assert "nan" not in svg and "inf" not in svg


def test_everything_above_the_line_is_kept():
    rng = np.random.default_rng(5)
    for _ in range(50):
        x, size = rng.random(500) ** 6, int(rng.integers(1, 60))
        c = choose(x, rng.uniform(0.02, 0.98), size, protect_head=int(rng.integers(0, 40)), protect_tail=int(rng.integers(0, 40)))
        if c.cut is not None: assert c.whole[c.means > c.cut].all()


# -- text --

@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=6), min_size=1, max_size=80), st.data())
def test_text_page_shows_the_text(pieces, data):
    n = len(pieces)
    c = choose(np.array(data.draw(st.lists(st.floats(0, 1), min_size=n, max_size=n))), data.draw(st.floats(0.05, 1)), data.draw(st.integers(1, 9)), protect_head=data.draw(st.integers(0, 9)))
    shown = Text(text_page(pieces, c, elide=None).replace("↵\n", "\n")).text
    plain = "".join(pieces)
    if not set(plain) & set("·→↵\t␡\x7f") and not any(ord(ch) < 32 and ch != "\n" or 0x2400 <= ord(ch) < 0x2420 or 0xd800 <= ord(ch) < 0xe000 for ch in plain): assert shown.replace("·", " ") == plain
    kept = "".join(p for p, k in zip(pieces, c.kept) if k)
    bold = Bold(text_page(pieces, c, elide=3).replace("↵\n", "\n")).bold
    if "→" not in plain and "↵" not in plain: assert len(bold.replace("→\t", "\t")) == len(kept)


def test_markup_in_a_prompt_is_text():
    evil = ["<script>alert(1)</script>", "</div>", "&amp;", '"', "'"]
    page = text_page(evil, choose(np.ones(5), 1.0))
    assert "<script" not in page and Text(page).text == "".join(evil)
    assert "<script" not in live_pictures.runs_table([dict(keep_pct=.2, kept_tokens=1, prompt_tokens=2, ttft_s=None, score_s=None, cache_bytes=1, scorer="<b>", answer=evil[0])])
    assert "<script" not in explore_needles([dict(prompt_tokens=1, depth=.5, keep_pct=.1, seed=0, correct=True, kept_tokens=1, facts_kept=1, answer=evil[0])]).detail.value


@pytest.mark.parametrize("n", [8_000, 100_000])
def test_long_prompts_stay_light(n):
    "What one move sends to the browser is bounded, whatever the length."
    pieces, x = [" word"] * n, np.random.default_rng(0).random(n).astype(np.float32)
    for keep in (0.02, 0.2, 1.0):
        c = choose(x, keep, protect_head=32, protect_tail=48)
        assert len(curve_svg(x, c)) < 150_000 and len(text_page(pieces, c)) < 200_000 and len(text_page(pieces, c, elide=None)) < 200_000


def test_pages_of_a_long_prompt():
    n = 2 * PAGE + 10
    view = explore(np.ones(n), TOK, tokens=np.arange(n) % 250)
    view.controls['page'].value, view.keep_pct = 3, 1.0
    assert view.controls['page'].max == 3 and view.controls['page'].layout.display is None and len(Text(view.text.value).text) <= 50
    with pytest.raises(ValueError, match="page is 4: a number from 1 to 3"): view.page = 4
    assert explore(np.ones(9), TOK, tokens=np.arange(9)).controls['page'].layout.display == "none"


# -- costs --

def test_cost_picture_for_every_share():
    curves = cost_curves(1000, COST, LLAMA)
    for share in (0.001, 0.5, 0.9, 1.0): ElementTree.fromstring(cost_svg(curves, share, COST.predict(1000, share), cache_bytes(LLAMA, int(1000 * share))))
    zero = CostModel((0, 0, 0), (0, 0, 0), (0, 0))
    ElementTree.fromstring(cost_svg(cost_curves(10, zero), 0.5, 0.0, None))


def test_dense_costs_no_scoring():
    view = view_of()
    view.keep_pct = 1
    assert view.predicted(view.selection)[0] == pytest.approx(COST.predict_dense(400))
    assert "(<b>1.0x</b>)" in view.summary.value


# -- the view --

@pytest.mark.parametrize("edges", [None, "lines"])
def test_view_keeps_what_a_run_keeps(edges):
    view = view_of(edges=edges, neighbours=1)
    for name, v in (("keep_pct", 0.37), ("chunk_size", 17), ("pool", 3), ("protect_head", 5), ("protect_tail", 40), ("backbone", 0.2)): setattr(view, name, v)
    assert view.run(wait=True) and view.error == ""
    assert view.runs[0]['kept_tokens'] == len(view.selected)
    sp = SpecPrefill(LLAMA, tokenizer=TOK, threshold=0, edges=edges, neighbours=1, keep_pct=0.37, chunk_size=17, pool_kernel=3, protect_head=5, protect_tail=40, backbone_pct=0.2)
    assert view.selected.tolist() == sp.prefill(PROMPT).selected.tolist()
    if edges: assert view.edges().tolist() == snap_edges(view.pieces, 17).tolist()


def test_a_run_keeps_its_setting_while_sliders_move(monkeypatch):
    view, gate, inside = view_of(keep_pct=0.2), threading.Event(), threading.Event()
    prefill = SpecPrefill.prefill
    def slow(*args, **kw):
        inside.set(), gate.wait(30)
        return prefill(*args, **kw)
    monkeypatch.setattr(SpecPrefill, "prefill", slow)
    kept = len(view.selected)
    assert view.run() and inside.wait(30) and view.running and view.run_button.disabled and not view.stop_button.disabled
    drawn = view.curve.value
    view.keep_pct, view.chunk_size = 0.8, 8
    assert view.curve.value != drawn and view.run() is False and view.score() is False
    gate.set()
    assert view.wait(60) and view.error == "" and not view.run_button.disabled and view.stop_button.disabled
    assert [(r['keep_pct'], r['kept_tokens'], r['chunk_size']) for r in view.runs] == [(0.2, kept, 32)]


def test_stop(monkeypatch):
    view, gate, inside = view_of(max_tokens=200), threading.Event(), threading.Event()
    fill = explorer.SpecPrefill.stream_generate
    def slow(*args, **kw):
        for r in fill(*args, **kw):
            inside.set(), gate.wait(30)
            yield r
    monkeypatch.setattr(SpecPrefill, "stream_generate", slow)
    view.run(), inside.wait(30), view.stop_button.click(), gate.set()
    assert view.wait(60) and view.runs == [] and view.error == "" and "stopped" in view.status.value
    monkeypatch.undo()
    view.max_tokens = 2
    assert view.run(wait=True) and len(view.runs) == 1


def test_a_fault_in_a_run_is_shown_and_leaves_the_view_alive(monkeypatch):
    view = view_of()
    for where in ("prefill", "stream_generate"):
        with monkeypatch.context() as m:
            def fail(*args, **kw): raise MemoryError("no room <b>")
            m.setattr(SpecPrefill, where, fail)
            assert view.run(wait=True)
            assert view.error == "MemoryError: no room <b>" and 'role="alert"' in view.error_box.value and "<b>" not in view.error_box.value and not view.running and view.runs == []
    view.keep_pct = 0.3
    assert view.error == "" and view.error_box.value == ""
    assert view.run(wait=True) and len(view.runs) == 1


def test_a_fault_in_a_callback_is_shown(monkeypatch):
    view = view_of()
    monkeypatch.setattr(explorer, "curve_svg", lambda *a: 1 / 0)
    view.controls['keep_pct'].value = 55                                      # as from the browser: nobody would catch it
    assert view.error == "ZeroDivisionError: division by zero" and 'role="alert"' in view.error_box.value
    monkeypatch.undo()
    view.controls['keep_pct'].value = 56
    assert view.error == ""


def test_button_presses():
    view = view_of(keep_pct=0.3)
    view.run_button.click()
    view.wait(60)
    assert len(view.runs) == 1
    view.scorer = "first layers"
    view.score_button.click()
    view.wait(60)
    assert set(view.scores) == {"query window", "first layers"} and view.error == ""
    view.score_button.click()
    assert "scored already" in view.status.value and not view.running


def test_two_views_at_once():
    views = [view_of(keep_pct=k) for k in (0.2, 0.6)]
    alone = []
    for v in views: v.run(wait=True); alone.append(v.runs[0]['answer'])
    for v in views: assert v.run()
    for v in views: v.wait(60)
    assert [v.runs[1]['answer'] for v in views] == alone and [v.error for v in views] == ["", ""]


def test_runs_of_an_earlier_view_are_drawn():
    first = view_of()
    first.run(wait=True)
    second = view_of(measured=first.runs)
    assert second.costs.value.count('class="line measured"') == 2 and second.runs == []


def test_unscored_choice_runs_the_shown_scores():
    view = view_of()
    view.scorer = "look-ahead"
    view.run(wait=True)
    assert view.runs[0]['scorer'] == "query window" and "look-ahead" not in view.scores


def test_pictures_for_a_code_host():
    view = view_of(keep_pct=0.3)
    fig = view.picture(spans=[(10, 20)])
    assert sum(b - a for a, b in fig.data['kept']) == len(view.selected) and len(fig._repr_png_()) < 80_000
    view.run(wait=True)
    assert list(view.cost_picture().data['measured'].values()) == [view.runs[0]['ttft_s']]
    with pytest.raises(ValueError, match="no cost model"): view_of(cost=None).cost_picture()
    assert sum(n for state, _, n in view.text_picture().data['runs'] if state in ("kept", "protected")) == len(view.selected)


# -- needles --

def test_grid_stops_in_time_and_scores_once(monkeypatch):
    scored, real = [], explorer._score
    monkeypatch.setattr(explorer, "_score", lambda *a, **k: (scored.append(1), real(*a, **k))[1])
    seen = []
    rows = needle_grid(LLAMA, TOK, (0.1, 0.5, 1.0), 2, (900,), 2, max_tokens=1, on_row=seen.append)
    assert len(rows) == 12 and len(scored) == 4 and seen == rows
    assert [r['kept_tokens'] for r in rows][:3] == sorted(r['kept_tokens'] for r in rows[:3])
    clock = iter(range(100))
    monkeypatch.setattr(explorer, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(explorer, "_grid_row", lambda *a: dict(a=1))
    assert len(needle_grid(LLAMA, TOK, (0.1, 0.5), 2, (900,), 2, budget_s=3)) == 3


def test_grid_cells_with_holes():
    rows = [dict(prompt_tokens=100, depth=d, keep_pct=k, seed=0, correct=True, kept_tokens=1, facts_kept=1.0, answer="") for d, k in ((.1, .2), (.9, 1.0))]
    svg = grid_svg(*grid_cells(rows))
    ElementTree.fromstring(svg)
    assert svg.count("not run") == 2 and "dense" in svg
    view = explore_needles(rows)
    view.depth = .9
    assert view.cell == [] and view.error == ""
    with pytest.raises(ValueError, match="there are no rows"): explore_needles([])
    with pytest.raises(FileNotFoundError): explore_needles("no such file.json")
