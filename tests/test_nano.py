"""The nano hybrid: the model in the package, its tokenizer and text, and the training that made it."""
import itertools, json, math
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import mlx_lm.utils
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mlx.utils import tree_flatten
from vllm_mlx import models, nano as nano_module
from vllm_mlx.gdn import fast_gdn
from vllm_mlx.nano import (EOS, MASK, PARTS, NanoAdamW, ShiftConv, bits_per_byte, clip_gradient, encode_texts, is_language, load_checkpoint, masked, nano_batch,
                           nano_config, nano_model, nano_rate, nano_tokenizer, ngram_loss, part_of, python_corpus, python_files, save_checkpoint, save_nano,
                           shifted_convolutions, token_loss, train_nano)

RUN = json.loads((Path(__file__).parent.parent/"nbs"/"results"/"nano_training.json").read_text())
FOLDER = models.nano_hybrid_folder()


@pytest.fixture(scope="module")
def nano(): return models.load("nano-hybrid")

@pytest.fixture(scope="module")
def corpus(): return python_corpus()

def small(vocab_size=64, **changes):
    return nano_model(nano_config(vocab_size, **dict(hidden_size=32, intermediate_size=32, num_hidden_layers=4, head_dim=32, num_attention_heads=1, num_key_value_heads=1,
                                                     linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=32, linear_value_head_dim=32) | changes), embedding=0.125)

STREAM = np.tile(np.arange(2, 50, dtype=np.uint16), 40)   # always the same 48 tokens in a row

# ---------------------------------------------------------------- the model in the package

def test_loads_by_alias_and_by_mlx_lm(nano):
    model, tokenizer = nano
    theirs, _ = mlx_lm.load(str(FOLDER))
    assert type(model).__module__ == "mlx_lm.models.qwen3_5"
    assert models.content_hash(theirs) == models.content_hash(model)
    assert [layer.is_linear for layer in model.layers] == [True, True, True, False] * 2
    assert tokenizer.eos_token_ids == {0} and tokenizer.vocab_size == 6144
    assert json.loads((FOLDER/"config.json").read_text())["mask_token_id"] == tokenizer._tokenizer.convert_tokens_to_ids(MASK) == 1

def test_files_fit_and_name_their_licence():
    weights = sorted(FOLDER.glob("*.safetensors"))
    assert weights and all(f.stat().st_size <= 16_000_000 for f in weights)
    stored = {n: a for f in weights for n, a in mx.load(str(f)).items()}
    assert 6e6 < sum(a.size for a in stored.values()) < 10e6
    assert {n: a.dtype for n, a in stored.items()} == {n: mx.float32 if n.endswith("A_log") else mx.bfloat16 for n in stored}
    assert all(mx.isfinite(a).all().item() for a in stored.values())
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in (FOLDER/"LICENSE.txt").read_text()
    assert "PSF" in (FOLDER/"README.md").read_text() and RUN["data"]["python"] in (FOLDER/"README.md").read_text()

def test_heldout_loss_is_far_below_counting(nano, corpus):
    model, tokenizer = nano
    sample = [t for n, t in corpus.items() if part_of(n) == "heldout"][:12]
    tokens = encode_texts(tokenizer._tokenizer.backend_tokenizer, sample)[:6000]
    train = encode_texts(tokenizer._tokenizer.backend_tokenizer, [t for n, t in corpus.items() if part_of(n) == "train"][::6])
    with fast_gdn(model): loss = token_loss(model, tokens, 512, 4)
    assert loss < ngram_loss(train, tokens, 2, 6144, 0.03) - 1.5
    assert RUN["heldout"] < RUN["counted"]["2"] - 2

def test_the_cpu_agrees_with_the_gpu_that_trained_it():
    assert abs(RUN["heldout_32"] - RUN["cpu"]["heldout_32"]) < 1e-3

def test_no_text_without_order_is_likely(nano):
    "It has learned an order, not only words: the same tokens shuffled are worth less."
    model, tokenizer = nano
    tokens = np.array(tokenizer.encode("class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n    def __repr__(self):\n        return repr(self.x)\n"))
    assert token_loss(model, tokens) + 2 < token_loss(model, np.random.default_rng(0).permutation(tokens))

def greedy(model, tokenizer, prompt, n):
    return tokenizer.decode([r.token for r in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=n)])

def test_continues_python(nano):
    said = greedy(*nano, "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n", 24)
    assert said == greedy(*nano, "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n", 24)
    assert said.startswith("        self.items")
    for prompt, next in (("for i in", " range("), ("if __name__ ==", ' "__main__":\n'), ("    def __init__(", "self"), ("try:\n    import foo\nexcept", " ImportError")):
        assert greedy(*nano, prompt, 6).startswith(next), prompt

def test_fast_gdn_gives_the_same_words(nano):
    model, tokenizer = nano
    tokens = mx.array([tokenizer.encode("import os\nimport sys\n\ndef main(argv):\n    for name in argv:\n        print(name)\n" * 4)])
    slow = model(tokens)
    with fast_gdn(model): fast = model(tokens)
    assert mx.abs(slow - fast).max().item() < 1e-3

# ---------------------------------------------------------------- tokenizer

TOKENIZER = models.load("nano-hybrid")[1]

@given(st.text(max_size=200) | st.text("\n\t\r #x\u00a0\u2028", max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_comes_back(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text and max(ids, default=0) < 6144

def test_digits_alone_and_indentation_together(nano):
    tokenizer = nano[1]
    pieces = lambda text: [tokenizer.decode([i]) for i in tokenizer.encode(text)]
    assert pieces("12345") == list("12345")
    assert pieces("        return") == [" " * 7, " return"]
    assert pieces("x):\n    ") == ["x", "):\n", "    "]

def test_same_text_same_tokenizer():
    text = ["def f(x):\n    return x\n" * 20, "import os\n" * 9]
    one, two = nano_tokenizer(text, 270), nano_tokenizer(text, 270)
    assert one.to_str() == two.to_str() and one.get_vocab_size() == 270
    assert [one.token_to_id(t) for t in (EOS, MASK)] == [0, 1]

# ---------------------------------------------------------------- text

def library(folder, **files):
    for name, text in files.items():
        path = folder/name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder

def test_selection(tmp_path):
    good = "def area(width, height):\n    return width * height\n" * 6
    lib = library(tmp_path, **{"a.py": good, "b.py": good, "json__c.py": good + "# c\n", "test__badsyntax_1.py": good + "# d\n", "site-packages__e.py": good + "# e\n",
                               "encodings__cp1252.py": good + "# f\n", "short.py": "x = 1\n", "data.py": "d = b'\\x00\\x11'\n" * 30, "latin.py": b"# -*- coding: latin-1 -*-\n# \xe9\n" + good.encode(),
                               "broken.py": b"# \xe9\n" + good.encode(), "notes.txt": good + "# g\n"})
    found = {n: t for n, t in python_files(lib).items() if not n.startswith("topics/")}
    assert sorted(found) == ["a.py", "json/c.py", "latin.py"] and "é" in found["latin.py"]

def test_parts(corpus):
    again = python_corpus()
    assert list(again) == list(corpus) and again == corpus
    parts = [set(n for n in corpus if part_of(n) == part) for part in PARTS]
    assert sum(map(len, parts)) == len(corpus) == len(set.union(*parts))
    texts = [{corpus[n] for n in part} for part in parts]
    assert not texts[0] & texts[1] and not texts[0] & texts[2] and not texts[1] & texts[2]
    assert any(n.startswith("topics/") for n in corpus) and all(map(is_language, corpus.values()))
    assert [part_of(n) for n in ("json/decoder.py", "os.py", "argparse.py")] == ["heldout", "train", "heldout"]   # the shipped model's parts

# ---------------------------------------------------------------- counting

@given(st.lists(st.integers(0, 5), min_size=4, max_size=40), st.lists(st.integers(0, 5), min_size=4, max_size=12), st.integers(1, 3), st.sampled_from([0.01, 0.5, 2.0]))
@settings(max_examples=50, deadline=None)
def test_counted_probabilities(train, heldout, n, k):
    from collections import Counter
    grams = Counter(zip(*(train[i:] for i in range(n))))
    def p(gram): return (grams[gram] + k) / (sum(c for g, c in grams.items() if g[:-1] == gram[:-1]) + 6 * k)
    asked = list(zip(*(heldout[i:] for i in range(n))))
    assert math.isclose(ngram_loss(train, heldout, n, 6, k), -sum(math.log(p(g)) for g in asked) / len(asked), rel_tol=1e-9)
    assert math.isclose(sum(p((*asked[0][:-1], b)) for b in range(6)), 1)

# ---------------------------------------------------------------- training

def test_a_short_training_learns():
    model = small()
    records = train_nano(model, STREAM, steps=40, batch=4, seq=32, lr=1e-2, warmup=4, every_s=0, mask_share=0)
    assert records[0]["loss"] > 3.8 and records[-1]["loss"] < 1.5
    assert token_loss(model, STREAM[:300], 64) < 1.5 and not model.training
    assert all(type(l.linear_attn.conv1d) is nn.Conv1d for l in model.layers if l.is_linear)

@pytest.mark.parametrize("stop", [1, 3])
def test_stopped_and_resumed_is_the_same(tmp_path, stop):
    options = dict(steps=6, batch=2, seq=32, lr=1e-2, warmup=2)
    train_nano(whole := small(), STREAM, every_s=1e9, **options)
    class Stop(Exception): pass
    def interrupt(record, model):
        if record["step"] > stop: raise Stop
    with pytest.raises(Stop): train_nano(small(), STREAM, every_s=0, report=interrupt, checkpoint=tmp_path/"c.safetensors", **options)
    other = small()
    records = train_nano(other, STREAM, every_s=1e9, checkpoint=tmp_path/"c.safetensors", **options)
    assert [r["step"] for r in records] == [*range(1, stop + 1), 6]
    assert models.content_hash(other) == models.content_hash(whole)
    assert train_nano(other, STREAM, every_s=1e9, checkpoint=tmp_path/"c.safetensors", **options) == records   # nothing is left to do
    assert models.content_hash(other) == models.content_hash(whole)

def test_an_error_leaves_the_model_usable():
    model = small()
    def fail(record, model): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): train_nano(model, STREAM, steps=3, batch=2, seq=32, every_s=0, report=fail)
    assert all(type(l.linear_attn.conv1d) is nn.Conv1d for l in model.layers if l.is_linear)
    assert mx.isfinite(model(mx.array([[1, 2, 3]]))).all().item()

def test_a_limit_in_seconds_ends_it(monkeypatch):
    "By a clock that moves a tenth of a second whenever it is read."
    now = itertools.count()
    monkeypatch.setattr(nano_module, "time", SimpleNamespace(perf_counter=lambda: next(now) / 10))
    records = train_nano(small(), STREAM, limit_s=2.0, steps=10**9, batch=2, seq=32, every_s=1e9)
    assert len(records) == 1 and 2.0 <= records[0]["seconds"] < 2.5 and 3 < records[0]["step"] < 20

def test_loss_that_is_not_finite(tmp_path):
    model = small()
    model.model.norm.weight = model.model.norm.weight * float("nan")
    with pytest.raises(FloatingPointError, match="has not been finite for 20 steps"): train_nano(model, STREAM, steps=100, batch=1, seq=8)

def test_errors():
    with pytest.raises(ValueError, match="neither steps nor limit_s"): train_nano(small(), STREAM)
    with pytest.raises(ValueError, match="too few for a batch of 64 windows of 1024"): train_nano(small(), STREAM, steps=1, batch=64)
    with pytest.raises(ValueError, match="nano_config has no layers"): nano_config(layers=2)
    with pytest.raises(ValueError, match="unknown part 'dev'"): python_corpus("dev")

def test_checkpoint_of_another_model(tmp_path):
    model, optimizer = small(), NanoAdamW(1e-3)
    optimizer.init(model.trainable_parameters())
    save_checkpoint(tmp_path/"c.safetensors", model, optimizer, step=1)
    other = small(vocab_size=65)
    before = models.content_hash(other)
    with pytest.raises(ValueError, match="checkpoint of another model"): load_checkpoint(tmp_path/"c.safetensors", other, NanoAdamW(1e-3))
    assert models.content_hash(other) == before

@given(st.integers(0, 400), st.integers(1, 5), st.integers(1, 20), st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_batches(step, batch, seq, seed):
    stream = np.arange(300, dtype=np.uint16)
    rows = nano_batch(stream, step, batch, seq, seed)
    assert rows.shape == (batch, seq + 1) and rows.min() >= 0 and rows.max() < 300
    assert (np.diff(rows, axis=1) == 1).all() and len(set(rows[:, 0].tolist())) == batch
    assert (rows == nano_batch(stream, step, batch, seq, seed)).all()

@given(st.floats(0, 1), st.integers(0, 10_000))
def test_rate_is_within_its_bounds(progress, step):
    assert 0 < nano_rate(step, progress, 1e-3) <= 1e-3 and nano_rate(step, 1.0, 1e-3) <= 2.1e-5

def test_decay_touches_matrices_only():
    model, optimizer = small(), NanoAdamW(0.1, weight_decay=0.5)
    before = dict(tree_flatten(model.parameters()))
    optimizer.update(model, {n: v for n, v in nn.value_and_grad(model, lambda m: mx.array(0.0) * m(mx.array([[1]])).sum())(model)[1].items()})
    for n, a in tree_flatten(model.parameters()): assert mx.allclose(a, before[n] * (0.95 if a.ndim == 2 else 1), atol=1e-6).item(), n

def test_convolutions_come_back_with_what_was_learned():
    model = small()
    mixer = model.layers[0].linear_attn
    with shifted_convolutions(model):
        assert type(mixer.conv1d) is ShiftConv
        mixer.conv1d.weight = mixer.conv1d.weight + 1
        x = mx.random.normal((1, 9, mixer.conv_dim), key=mx.random.key(1))
        inside = mixer.conv1d(x)
    assert type(mixer.conv1d) is nn.Conv1d and mx.allclose(mixer.conv1d(x), inside, atol=1e-5).item()

@pytest.mark.parametrize("most", [16_000_000, 66_000 + 65536])
def test_saved_and_loaded(tmp_path, most):
    model = small(1000)
    names = save_nano(model, tmp_path, most=most)
    assert (len(names) == 1) == (most == 16_000_000) and all((tmp_path/n).stat().st_size <= most for n in names)
    again = mlx_lm.utils.load_model(tmp_path)[0]
    assert models.content_hash(again) == models.content_hash(model)

def test_random_state_is_left_alone():
    mx.random.seed(5)
    before = mx.random.state[0].tolist()
    small()
    assert mx.random.state[0].tolist() == before
