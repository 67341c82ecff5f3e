"Properties of chunk selection on random prompts: parity with the specification, budget, protection, edges."
import math, re
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from vllm_mlx.chunks import _select_chunks_slowly, chunk_edges, chunk_spans, select_chunks, snap_edges

# Sixteenths: sums are exact in any order, so that a tie is a tie in both versions.
scores_ = st.lists(st.integers(-64, 64).map(lambda n: n / 16), min_size=1, max_size=160)
shares = st.one_of(st.floats(1e-3, 1.5), st.sampled_from([0.1, 0.2, 0.3, 0.5, 1.0]))
many = settings(max_examples=400, deadline=None)


@st.composite
def selections(draw):
    "Scores and a full set of valid options."
    scores = draw(scores_)
    M = len(scores)
    spans = draw(st.lists(st.tuples(st.integers(0, M), st.integers(0, M)).map(lambda p: (min(p), max(p))), max_size=3))
    edges = draw(st.one_of(st.none(), st.sets(st.integers(1, M), max_size=30).map(lambda s: sorted({0} | {e for e in s if e < M}))))
    options = dict(keep_pct=draw(shares), chunk_size=draw(st.integers(1, 48)), backbone_pct=draw(st.sampled_from([0.0, 0.05, 0.3, 1.0])),
                   protect=spans, protect_head=draw(st.integers(0, 40)), protect_tail=draw(st.integers(0, 40)), neighbours=draw(st.integers(0, 3)), edges=edges)
    return scores, options


@many
@given(selections())
def test_fast_equals_slow(case):
    scores, options = case
    assert select_chunks(mx.array(scores), **options).tolist() == _select_chunks_slowly(scores, **options)


@many
@given(selections())
def test_what_always_holds(case):
    scores, options = case
    M, got = len(scores), select_chunks(mx.array(scores), **options)
    kept = got.tolist()
    assert got.dtype == mx.int32 and got.ndim == 1 and kept == sorted(set(kept)) and 0 <= kept[0] and kept[-1] < M
    protected = {t for a, b in options["protect"] for t in range(a, b)} | set(range(min(M, options["protect_head"]))) | set(range(max(0, M - options["protect_tail"]), M))
    assert protected <= set(kept)
    starts = chunk_edges(M, options["chunk_size"]) if options["edges"] is None else options["edges"]
    spans = chunk_spans(starts, M)
    for a, b in spans:  # a chunk is kept whole or as far as it is protected
        inside = set(range(a, b))
        assert inside <= set(kept) or inside & set(kept) == inside & protected
    if options["keep_pct"] >= 1: assert kept == list(range(M)); return
    n = len(spans)
    budget = math.ceil(n * options["keep_pct"]) * options["chunk_size"] if options["edges"] is None else math.ceil(M * options["keep_pct"])
    if protected: assert len(kept) <= max(budget, len(protected))
    else: assert len(kept) <= budget or any(kept == list(range(a, b)) for a, b in spans)
    if len(protected) > budget: assert set(kept) == protected


@many
@given(scores_, st.floats(1e-3, 0.999), st.integers(1, 48), st.sampled_from([0.0, 0.1, 0.25, 1.0]))
def test_the_documented_seed(scores, keep_pct, chunk_size, backbone_pct):
    "Without new options: ceil(keep_pct * chunks) chunks, the evenly spaced backbone among them, and no chunk left out has a better mean than a chosen one."
    M, n = len(scores), math.ceil(len(scores) / chunk_size)
    kept = set(select_chunks(mx.array(scores), keep_pct, chunk_size, backbone_pct).tolist())
    chunks = [set(range(i * chunk_size, min(M, (i + 1) * chunk_size))) for i in range(n)]
    chosen = [i for i in range(n) if chunks[i] <= kept]
    assert len(chosen) == max(1, math.ceil(n * keep_pct)) and set().union(*(chunks[i] for i in chosen)) == kept
    count = min(len(chosen), math.floor(n * backbone_pct))
    assert {round(i * (n - 1) / max(1, count - 1)) for i in range(count)} <= set(chosen)
    if backbone_pct == 0:
        mean = lambda i: sum(scores[t] for t in chunks[i]) / len(chunks[i])
        rest = [i for i in range(n) if i not in chosen]
        assert all((mean(i), -i) >= (mean(j), -j) for i in chosen for j in rest)


@given(scores_, st.integers(1, 20))
def test_more_is_never_less(scores, chunk_size):
    "A larger share keeps what a smaller one kept."
    kept = [set(select_chunks(scores, k / 10, chunk_size).tolist()) for k in range(1, 11)]
    assert all(a <= b for a, b in zip(kept, kept[1:])) and kept[-1] == set(range(len(scores)))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.int32])
def test_dtypes(dtype):
    scores = mx.array(np.arange(64) % 7).astype(dtype)
    assert select_chunks(scores, 0.25, 8).tolist() == _select_chunks_slowly(scores.tolist(), 0.25, 8)
    assert select_chunks(np.arange(64.0) % 7, 0.25, 8).tolist() == select_chunks((np.arange(64) % 7).tolist(), 0.25, 8).tolist()


def test_inputs_are_left_alone():
    scores, edges, spans = np.ones(20), np.array([0, 7, 9]), [(3, 5)]
    select_chunks(scores, 0.3, edges=edges, protect=spans, protect_tail=4)
    assert (scores == 1).all() and edges.tolist() == [0, 7, 9] and spans == [(3, 5)]


def test_a_tool_block_survives_keep_5_percent():
    "Every token of the declared spans is kept although nothing scores lower."
    scores = np.linspace(1, 2, 4000)
    scores[100:450] = 0
    kept = set(select_chunks(mx.array(scores), 0.05, protect=[(100, 250), (300, 450)], protect_tail=64).tolist())
    assert set(range(100, 250)) | set(range(300, 450)) | set(range(3936, 4000)) == kept  # 364 tokens, over the budget of 224


pieces_ = st.lists(st.sampled_from([" word", "It", ".", ". ", "!", " \n", "\n", "\n\n", "    ", "", "é", "。", "?)", ' "No', "3", "x:", "<|im_end|>"]), min_size=1, max_size=200)


@many
@given(pieces_, st.integers(1, 40))
def test_snapped_edges(pieces, chunk_size):
    edges = snap_edges(pieces, chunk_size)
    spans = chunk_spans(edges, len(pieces))
    assert edges[0] == 0 and (np.diff(edges) > 0).all() and edges[-1] < len(pieces)
    assert all(max(1, chunk_size // 2) <= b - a <= chunk_size + chunk_size // 2 for a, b in spans[:-1])
    assert spans[-1][1] - spans[-1][0] <= chunk_size + chunk_size // 2
    assert "".join("".join(pieces[a:b]) for a, b in spans) == "".join(pieces)
    select_chunks(np.ones(len(pieces)), 0.3, edges=edges)


def test_every_sentence_begins_a_chunk():
    "Where sentences are as long as a chunk, all edges are between sentences, also when the space belongs to the next word."
    for space in ([" She"], [" ", "She"], ["\n", "She"], ["\n\n", "She"], ["\n", "\n", "   ", " She"]):
        pieces = (space + [" saw"] * 12 + ["."]) * 9
        for a, _ in chunk_spans(snap_edges(pieces, 14), len(pieces))[1:]:
            assert re.search(r"\.\s*$", "".join(pieces[:a])) and re.match(r"\s?She", "".join(pieces[a:])), (space, pieces[a - 2:a + 2])
