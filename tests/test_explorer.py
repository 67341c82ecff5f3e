"""The explorer in Python: every architecture, odd scores and texts, threads, faults."""
import json
import re
import threading
import unicodedata
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
from vllm_mlx.live_pictures import PAGE, _UNSEEN, cache_bytes_of, choose, cost_curves, cost_svg, curve_svg, grid_cells, grid_svg, plain_text, runs_table, text_page
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
    assert set(view.selected) <= set(range(400)) and row['ttft_s'] > row['score_s'] > 0
    assert row['cache_bytes'] == view.predicted(view.selection)[1]
    assert row['kept_tokens'] == len(view.selected) and row['notes'] == view.notes(view.selection)


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
    plain = _UNSEEN.sub(lambda m: f"U+{ord(m[0]):04X}", "".join(pieces))
    if not set(plain) & set("·→↵\t␡\x7f") and not any(ord(ch) < 32 and ch != "\n" or 0x2400 <= ord(ch) < 0x2420 or 0xd800 <= ord(ch) < 0xe000 for ch in plain): assert shown.replace("·", " ") == plain
    kept = _UNSEEN.sub(lambda m: f"U+{ord(m[0]):04X}", "".join(p for p, k in zip(pieces, c.kept) if k))
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
    with pytest.raises(ValueError, match="page is 4: a whole number from 1 to 3"): view.page = 4
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


WRONG_FIELDS = [("prompt_tokens", "long"), ("prompt_tokens", 0), ("depth", 1.5), ("depth", None), ("keep_pct", "10%"), ("keep_pct", 0), ("keep_pct", float("nan")), ("seed", 0.5), ("correct", 1), ("correct", "yes"),
                ("kept_tokens", -1), ("kept_tokens", 2.5), ("facts_kept", float("nan")), ("facts_kept", 7), ("answer", None), ("answer", 7)]
ROW = dict(prompt_tokens=100, depth=.5, keep_pct=.2, seed=0, correct=True, kept_tokens=20, facts_kept=1.0, answer="7")

@pytest.mark.parametrize("name, bad", WRONG_FIELDS)
def test_a_wrong_field_is_named(tmp_path, name, bad):
    file = tmp_path/"grid.json"
    file.write_text(json.dumps(dict(rows=[ROW, ROW | {name: bad}])))
    with pytest.raises(ValueError, match=re.escape(f"{file}, row 1: {name} is {bad!r}")): explore_needles(file)
    file.write_text(json.dumps(dict(rows=[ROW, {k: v for k, v in ROW.items() if k != name}])))
    with pytest.raises(ValueError, match=re.escape(f"{file}, row 1: the field '{name}' is missing")): explore_needles(str(file))
    file.write_text(json.dumps(dict(rows=[ROW, ROW])))
    assert len(explore_needles(file).rows) == 2


@pytest.mark.parametrize("content, why", [(b"", "is not JSON"), (b"{rows: []}", "is not JSON"), (b"\xff\xfe", "is not JSON"), (b"[" * 100_000, "is not JSON"), (b"[]", "no field 'rows'"), (b"{}", "no field 'rows'"), (b"7", "no field 'rows'"),
                                          (b'{"rows": {}}', "the rows are a dict"), (b'{"rows": null}', "the rows are a NoneType"), (b'{"rows": [7]}', "row 0: it is a int"), (b'{"rows": ["a"]}', "row 0: it is a str")])
def test_a_malformed_file_is_named(tmp_path, content, why):
    file = tmp_path/"grid.json"
    file.write_bytes(content)
    with pytest.raises(ValueError) as e: explore_needles(file)
    assert str(file) in str(e.value) and why in str(e.value)


def test_results_of_another_kind():
    for bad in (None, 7, SpecPrefill): 
        with pytest.raises(ValueError, match="the list that needle_grid gives"): explore_needles(bad)


# -- the view shows what Run does --

SLIDING = {f: tiny_model(f, vocab_size=257, sliding_window=64) for f in ("gemma3", "gpt_oss")}

@pytest.mark.parametrize("family", SLIDING)
@pytest.mark.parametrize("keep", [.05, .3, .6, .97, 1])
@pytest.mark.parametrize("guard", [(0, 1), (8, 16), (0, 100)])
def test_sliding_windows_need_their_tail(family, keep, guard):
    model = SLIDING[family]
    view = view_of(model, keep_pct=keep, protect_head=guard[0], protect_tail=guard[1])
    sel = view.selection
    seconds, held = view.predicted(sel)
    assert sel.kept[-64:].all() and sel.protected[-64:].all() and view.selected.tolist() == np.flatnonzero(sel.kept).tolist()
    if (keep, guard) == (.05, (0, 1)): assert len(view.selected) == 64 and view.notes(sel) == ["sliding-window layers need the last 64 tokens: 63 more are kept"] and view.notes(sel)[0] in view.status.value
    N = len(sel.selected)
    assert seconds == pytest.approx(COST.predict_dense(400) if keep == 1 else COST.predict(400, min(N / 400, 1 - 1e-9)))
    assert f"<b>{N:,}</b> of 400 tokens" in view.summary.value
    assert view.run(wait=True) and view.error == ""
    row = view.runs[0]
    assert (row['kept_tokens'], row['cache_bytes'], row['keep_pct'], row['notes']) == (N, held, keep, view.notes(sel))
    for note in row['notes']: assert note in view.status.value and note in view.table.value
    assert view.curves['share'][0] == pytest.approx(64 / 400) and len(view.picture().data['kept']) == len(explorer.plots.index_runs(sel.selected))
    result = SpecPrefill(model, tokenizer=TOK, threshold=0, protect_head=guard[0], protect_tail=guard[1], layers=view.sp.layers).prefill(PROMPT, keep_pct=keep)
    if keep < 1: assert result.selected.tolist() == view.selected.tolist()


def test_the_window_of_the_cost_model_counts_once():
    cost = CostModel(COST.score, COST.prefill, COST.first, window=64)
    for view in (view_of(SLIDING['gemma3'], cost=cost, protect_head=0, protect_tail=1, keep_pct=.05), explore(np.r_[1., np.zeros(399)], TOK, tokens=PROMPT, cost=cost, protect_head=0, protect_tail=1, keep_pct=.01)):
        N = len(view.selected)
        assert view.selection.kept[-64:].all() and 64 <= N <= 96
        assert view.predicted(view.selection)[0] == pytest.approx(COST.predict(400, N / 400))
        assert float(view.curves['score'][0] + view.curves['read'][0]) == pytest.approx(COST.predict(400, 64 / 400))
        assert view.cost_picture().data['keep'][0] == pytest.approx(64 / 400)


@pytest.mark.parametrize("keep", [.1, .5, .9, 1])
@pytest.mark.parametrize("with_cost", [False, True])
def test_a_prompt_beyond_the_context_shows_the_lowered_keep(keep, with_cost):
    small = tiny_model('llama', vocab_size=257, max_position_embeddings=256)
    x = np.random.default_rng(0).random(400)
    cost = CostModel(COST.score, COST.prefill, COST.first, context=256) if with_cost else None
    view = explore(x, TOK, small, tokens=PROMPT, positions='contiguous', reserve=16, keep_pct=keep, protect_head=0, protect_tail=1, cost=cost, max_tokens=2)
    sel, (used, _) = view.selection, view.plan()
    N, (seconds, held) = len(sel.selected), view.predicted(sel)
    assert N <= 240 and view.keep_pct == keep and used <= keep and ("lowered" in view.status.value) == (used < keep) == (keep > .6)
    assert (seconds is None) == (cost is None) and (seconds is None or seconds == pytest.approx(COST.predict(400, N / 400)))
    assert view.curves['share'][-1] == pytest.approx(240 / 400) and view.curves['dense_s'] is None and "dense" not in view.summary.value
    assert view.run(wait=True) and view.error == ""
    row = view.runs[0]
    assert (row['kept_tokens'], row['keep_pct'], row['cache_bytes'], row['notes']) == (N, used, held, view.notes(sel))
    if used < keep: assert row['notes'][0] in view.status.value and row['notes'][0] in view.table.value and f"<td>{100 * used:.3g}%</td>" in view.table.value
    if cost:
        with pytest.raises(ValueError, match="no dense run to compare with"): view.cost_picture()
    ElementTree.fromstring(view.costs.value)


def test_no_room_in_the_context():
    small, x = tiny_model('llama', vocab_size=257, max_position_embeddings=256), np.ones(400)
    with pytest.raises(ValueError, match="400 tokens, the model's context is 256"): explore(x, TOK, small, tokens=PROMPT)
    view = explore(x, TOK, small, tokens=PROMPT, positions='contiguous', reserve=100, protect_head=0, protect_tail=1)
    view.protect_head = 200
    assert "no room for a prompt" in view.error and "no room" in repr(view)
    assert view.run(wait=True) and "no room for a prompt" in view.error and view.runs == []
    view.protect_head = 0
    assert view.error == "" and view.run(wait=True) and len(view.runs) == 1


def test_all_chosen_tokens_are_scored_all_read_densely_are_not():
    view = view_of(keep_pct=.999)
    assert len(view.selected) == 400 and view.predicted(view.selection)[0] == pytest.approx(COST.predict(400, 1 - 1e-9))
    view.run(wait=True)
    assert view.runs[0]['scorer'] == "query window"
    view.protect_tail = 400
    assert view.predicted(view.selection)[0] == pytest.approx(COST.predict_dense(400))
    view.run(wait=True)
    assert view.runs[1]['scorer'] == "none"


def test_a_result_brings_its_positions_and_notes():
    r = SpecPrefill(SLIDING['gemma3'], tokenizer=TOK, threshold=0, positions='contiguous', protect_head=0, protect_tail=1, keep_pct=.05).prefill(PROMPT)
    view = explore(r, TOK, tokens=PROMPT, protect_head=0, protect_tail=1)
    assert view.sp.positions == 'contiguous' and r.notes[0] in view.status.value
    view = explore(r, TOK, SLIDING['gemma3'], tokens=PROMPT, protect_head=0, protect_tail=1)
    assert view.selected.tolist() == r.selected.tolist() and view.keep_pct == .05


def test_settings_beyond_a_slider():
    view = view_of(chunk_size=200, protect_head=8)
    assert view.chunk_size == 200 and view.selected.tolist() == SpecPrefill(LLAMA, tokenizer=TOK, threshold=0, chunk_size=200, protect_head=8, protect_tail=16).prefill(PROMPT).selected.tolist()
    assert view_of(keep_pct=float("inf")).keep_pct == 1 and view_of(protect_head=9999).protect_head == 400


# -- what is refused --

@pytest.mark.parametrize("bad", [257, 9999, 2**32 + 5])
def test_a_token_outside_the_vocabulary_is_named(bad, monkeypatch):
    def never(*a, **k): raise AssertionError("a model ran")
    for name in ("window_queries", "_prefill_draft", "_score"): monkeypatch.setattr(explorer, name, never)
    why, prompt = f"token id {bad} is (outside the model's vocabulary of 257|too large: ids are 32-bit)", PROMPT[:-1] + [bad]
    for scorer in SCORERS:
        with pytest.raises(ValueError, match=why): score_prompt(SpecPrefill(LLAMA, threshold=0), prompt, scorer)
        with pytest.raises(ValueError, match=why): view_of(prompt=prompt, scorer=scorer)
    with pytest.raises(ValueError, match=why): explore(np.ones(400), TOK, LLAMA, tokens=np.array(prompt))
    big, small = tiny_model('llama', vocab_size=600), SimpleNamespace(model=None, scoring_model=LLAMA)
    with pytest.raises(ValueError, match="outside the scoring model's vocabulary of 257"): score_prompt(small, [300])
    with pytest.raises(ValueError, match="outside the model's vocabulary of 3"): needle_grid(tiny_model('llama', vocab_size=3), TOK, (.2,), 1, (900,), 1)


@pytest.mark.parametrize("scores_, why", [
    (-np.ones(400), r"importance\[0\] is -1.0: a score is a share of attention"), (np.r_[np.ones(399), -.5], r"importance\[399\] is -0.5"), (np.ones(400) * 1j, "real numbers are needed, these are complex128"),
    (mx.ones(400).astype(mx.complex64), "these are complex64"), (None, "importance is None"), (["a"] * 400, "real numbers"), ("text", "importance is 'text'"), ({}, "real numbers"), (np.ones((400, 1)), r"shape \(400, 1\): one score for each of the 400"),
    (np.ones(399), r"shape \(399,\)"), (np.r_[np.ones(399), np.inf], r"importance\[399\] is inf"), (np.r_[np.ones(399), 1e300], r"importance\[399\] is inf"), ([[1], [1, 2]], "unequal length"), (3.0, r"shape \(\)")])
def test_scores_that_are_none_are_refused(scores_, why):
    for model in (None, LLAMA):
        with pytest.raises(ValueError, match=why): explore(scores_, TOK, model, tokens=PROMPT)


def test_scores_with_the_rounding_of_a_pooled_zero():
    x = np.r_[np.ones(200), np.full(200, -1e-8)].astype(np.float32)
    view = explore(x, TOK, tokens=PROMPT, protect_head=200, protect_tail=1)
    assert view.error == "" and "<b>100%</b> of the importance" in view.summary.value
    view.log_scale = True
    assert view.error == ""
    for bad in ([-1, -2], [1, -1, 5]):
        with pytest.raises(ValueError, match="a share of attention"): choose(np.array(bad), .5)


SETTINGS = [("chunk_size", 0), ("chunk_size", 2.7), ("chunk_size", None), ("chunk_size", True), ("edges", "zzz"), ("backbone_pct", 7), ("backbone_pct", "x"), ("backbone_pct", float("nan")), ("protect_tail", -4), ("protect_tail", 0), ("protect_head", -1), ("protect_head", 1.5),
            ("keep_pct", float("nan")), ("keep_pct", 0), ("keep_pct", None), ("keep_pct", "x"), ("keep_pct", 1j), ("neighbours", -1), ("neighbours", "1"), ("positions", "odd"), ("reserve", 0), ("step_size", 0), ("pool_kernel", -1), ("threshold", None), ("n_lookahead", -1), ("window", 0)]

@pytest.mark.parametrize("name, bad", SETTINGS)
@pytest.mark.parametrize("model", [None, LLAMA])
def test_a_bad_setting_is_named(name, bad, model):
    with pytest.raises(ValueError, match=re.escape(f"{name} is {bad!r}: ")): explore(np.ones(400), TOK, model, tokens=PROMPT, **{name: bad})


def test_a_bad_scorer_is_named_and_good_settings_pass():
    with pytest.raises(ValueError, match="scorer is 'zzz': one of first layers"): explore(np.ones(400), TOK, tokens=PROMPT, scorer="zzz")
    view = explore(np.ones(400), TOK, tokens=PROMPT, chunk_size=np.int64(16), keep_pct=np.float32(.5), layers={9: [1]}, window=None, step_size=None, pool_kernel=None, edges=None)
    assert (view.chunk_size, view.keep_pct) == (16, .5) and view.error == ""


PROPERTIES = dict(keep_pct=(0, -1, 1.1, float("nan"), float("inf"), "x", None, [.2], np.ones(2), 1j, True), backbone=(-.1, 2, float("nan"), "x", None), chunk_size=(0, 129, 2.7, 2.0, "8", None, True, float("nan"), np.ones(2)),
                  protect_head=(-1, 401, .5, None), protect_tail=(0, -4, 401, 1.5, "x"), pool=(5, "3", None, True, float("nan"), np.ones(2), [1]), scorer=("zzz", None, 1, ["query window"]), show=("curve", None, 0), log_scale=(2, "yes", None), full_text=(1, "no", None), page=(0, 2, 1.5, None))

@pytest.mark.parametrize("name", PROPERTIES)
def test_a_bad_value_is_refused_and_nothing_changes(name):
    view = view_of()
    state = lambda: ({n: c.value for n, c in view.controls.items()}, dict(view.exact), view.curve.value, view.summary.value, view.error)
    before = state()
    for bad in PROPERTIES[name]:
        with pytest.raises(ValueError, match=re.escape(f"{name} is {bad!r}: ")): setattr(view, name, bad)
        assert state() == before
    grid = explore_needles([ROW])
    for field in ("keep_pct", "depth", "prompt_tokens"):
        for bad in (None, "x", np.ones(2), .99):
            with pytest.raises(ValueError, match=re.escape(f"{field} is {bad!r}: one of ")): setattr(grid, field, bad)


def test_every_property_is_checked():
    assert set(PROPERTIES) == {n for n in view_of().controls}


@pytest.mark.parametrize("bad", [0, "x", None, 1.5])
def test_a_bad_number_of_tokens_is_shown(bad):
    view = view_of(max_tokens=bad)
    assert view.run(wait=True) and view.error.startswith(f"ValueError: max_tokens is {bad!r}: ") and view.runs == []


# -- text that hides or reorders --

HIDDEN = [*range(0x202a, 0x202f), *range(0x2066, 0x206a), *range(0x200b, 0x2010), 0xfeff, 0xa0, 0x2028, 0x2029, 0x85, 0xad, 0x80, 0x9f, 0x61c, 0x3000, 0xe0041, 0xfe0f, 0x3164, 0xd800]

@pytest.mark.parametrize("code", HIDDEN)
def test_a_hidden_character_is_shown_by_its_code(code):
    pieces = ["a", f"b{chr(code)}c", "d"]
    page = text_page(pieces, choose(np.array([1., 0, 1]), .5, 1))
    assert chr(code) not in page and page.count(f"<code>U+{code:04X}</code>") == 1 and Text(page).text == f"abU+{code:04X}cd"
    page.encode()
    table = runs_table([dict(keep_pct=.2, kept_tokens=1, prompt_tokens=2, ttft_s=None, score_s=None, cache_bytes=1, scorer="given", answer=pieces[1])])
    detail = explore_needles([ROW | dict(answer=pieces[1])]).detail.value
    for shown in (table, detail): assert chr(code) not in shown and f"<code>U+{code:04X}</code>" in shown


@pytest.mark.parametrize("code", [c for c in range(32) if chr(c) not in "\n\t"] + [127])
def test_a_control_character_is_shown(code):
    assert plain_text(f"a{chr(code)}b") == f"<bdi>a{chr(0x2400 + code) if code < 32 else '␡'}b</bdi>"


def test_each_run_is_isolated():
    page = text_page(["אבג", " kept", " 123", "ابج"] * 5, choose(np.arange(20.), .4, 1, protect_head=2), elide=2)
    inside = re.findall(r"<(b|s|i)(?: class=\"protected\")?>(.*?)</\1>", page)
    assert len(inside) > 3 and all(t.startswith("<bdi>") and t.endswith("</bdi>") and t.count("<bdi>") == 1 for _, t in inside)
    assert not any(unicodedata.bidirectional(c) in ("RLO", "LRO", "RLE", "LRE", "PDF", "RLI", "LRI", "FSI", "PDI") for c in text_page([chr(c) for c in HIDDEN], choose(np.ones(len(HIDDEN)), 1.0)))


# -- threads --

class Abrupt(BaseException): pass

@pytest.mark.parametrize("fault, shown", [(KeyboardInterrupt(), "KeyboardInterrupt"), (SystemExit(3), "SystemExit: 3"), (GeneratorExit("x"), "GeneratorExit: x"), (Abrupt("a\u202eb"), "Abrupt: a\u202eb")])
def test_what_ends_a_program_is_shown_too(fault, shown, monkeypatch):
    view = view_of()
    with monkeypatch.context() as m:
        def fail(*a, **k): raise fault
        m.setattr(SpecPrefill, "prefill", fail)
        assert view.run(wait=True)
    assert view.error == shown and 'role="alert"' in view.error_box.value and "\u202e" not in view.error_box.value and not view.running and not view.run_button.disabled
    assert view.run(wait=True) and view.error == "" and len(view.runs) == 1


def test_a_thread_that_cannot_start_leaves_the_view_alive(monkeypatch):
    view = view_of()
    with monkeypatch.context() as m:
        def fail(self): raise RuntimeError("can't start new thread")
        m.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start"): view.run()
    assert not view.running and not view.run_button.disabled and view.run(wait=True) and len(view.runs) == 1
