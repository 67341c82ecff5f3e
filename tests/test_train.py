"Training of drafts: what no reader wants to scroll past."
import errno, json, os, shutil, subprocess, sys, textwrap
import vllm_mlx   # before mlx.core
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mlx.utils import tree_flatten

from vllm_mlx import train as T, train_data as D
from vllm_mlx.dflash import make_draft, tiny_draft
from vllm_mlx.models import tiny_model
from vllm_mlx.train_data import Sample

def gap(a, b): return np.abs(np.array(a, np.float64) - np.array(b, np.float64)).max()

class Words:
    "A tokenizer of digits: '12 7' is [12, 7]."
    eos_token_ids, chat_template = {0}, None
    def encode(self, text): return [int(w) for w in text.split()]
    def get_vocab(self): return {str(i): i for i in range(100)}

@pytest.fixture(scope='module')
def target(): return tiny_model('qwen3_5')

@pytest.fixture(scope='module')
def samples():
    rng = np.random.default_rng(0)
    return [Sample(i, rng.integers(0, 90, 30 + i).astype(np.int32), 8) for i in range(4)]

def fresh(target, **options): return tiny_draft(target, **(dict(n_layers=1, block_size=4, target_layer_ids=[0, 2]) | options))

# --- masks and weights against loops

@settings(max_examples=60, deadline=None)
@given(st.data())
def test_mask_and_weights_equal_the_loops(data):
    n, size = data.draw(st.integers(1, 40)), data.draw(st.integers(2, 9))
    ctx = data.draw(st.integers(0, 45))
    starts, at = [], data.draw(st.integers(0, 5))
    while at < n: starts.append(at); at += size + data.draw(st.integers(0, 6))
    starts = data.draw(st.permutations(starts))
    mask, weights = T.build_training_mask(n, starts, size, ctx), np.array(T.build_loss_weights(n, starts, size, 3.0))[0]
    if not starts: assert mask is None and not weights.any(); return
    seen, w = np.zeros((n, ctx + n), bool), np.zeros(n)
    for s in starts:
        rows = range(s, min(s + size, n))
        for r in rows:
            seen[r, :min(s, ctx)] = True
            for q in rows: seen[r, ctx + q] = True
            if r > s: w[r] = np.exp(-(r - s - 1) / 3)
    assert mask.shape == (1, 1, n, ctx + n) and mask.dtype == mx.float32
    assert ((np.array(mask)[0, 0] == 0) == seen).all() and (np.array(mask)[0, 0][~seen] == -1e9).all()
    assert np.abs(weights - w).max() < 1e-6

@settings(max_examples=60, deadline=None)
@given(n=st.integers(2, 30), prompt=st.integers(0, 20), anchors=st.integers(1, 12), size=st.integers(2, 8), seed=st.integers(0, 99))
def test_blocks_stay_in_their_answer(n, prompt, anchors, size, seed):
    s = Sample(0, np.arange(100, 100 + prompt + n, dtype=np.int32), prompt)
    b = T.block_batch([s], anchors, size, 1, [np.random.default_rng(seed)])
    for a, inputs, labels, w in zip(b['anchors'][0], b['inputs'][0], b['labels'][0], b['weights'][0]):
        assert prompt <= a < prompt + n - 1 and inputs[0] == 100 + a and (inputs[1:] == 1).all() and w[0] == 0
        for k in range(1, size): assert w[k] == 0 or labels[k] == 100 + a + k
    real = [a for a, w in zip(b['anchors'][0], b['weights'][0]) if w.any()]
    assert len(set(real)) == len(real) == min(anchors, n - 1)

@pytest.mark.parametrize('starts, size, says', [([0, 3], 4, 'overlap'), ([-1], 4, 'starts at -1'), ([20], 4, 'starts at 20'), ([2], 1, 'block_size is 1')])
def test_blocks_that_are_refused(starts, size, says):
    with pytest.raises(ValueError, match=says): T.build_training_mask(20, starts, size, 20)
    with pytest.raises(ValueError, match=says): T.build_loss_weights(20, starts, size)

# --- gradients

@pytest.mark.parametrize('family', ['llama', 'qwen3_5', 'gemma3'])
def test_no_gradient_leaks(family):
    target = tiny_model(family)
    draft = tiny_draft(target, n_layers=2, block_size=4, layer_types=['full_attention', 'sliding_attention'], sliding_window=6)
    text = mx.array(np.random.default_rng(1).integers(0, 60, (2, 24)))
    features = D.target_features(target, text, draft.config.target_layer_ids).astype(mx.float32)
    anchors = np.array([[5, 9, 10], [3, 4, 20]])
    inputs = mx.random.normal((2, 3, 4, draft.config.hidden_size))
    for b in range(2):
        for j in range(3):
            f, x = mx.grad(lambda f, x: (draft.forward_training(x, f, mx.array(anchors))[b, j] ** 2).sum(), argnums=(0, 1))(features, inputs)
            moved = np.abs(np.array(f)).max(-1) > 0
            assert moved[b, :anchors[b, j]].all() and not moved[b, anchors[b, j]:].any() and not moved[1 - b].any()
            assert [tuple(t) for t in np.argwhere(np.abs(np.array(x)).max((2, 3)) > 0)] == [(b, j)]

def test_the_target_is_never_trained(target, samples):
    before = {n: np.array(a) for n, a in tree_flatten(target.parameters())}
    T.train(fresh(target), samples, steps=3, batch=2, n_anchors=4, lr=1e-2)
    for n, a in tree_flatten(target.parameters()): assert (np.array(a) == before[n]).all(), n

def test_gradient_is_the_slope(target, samples):
    draft = fresh(target)
    options = dict(batch=4, n_anchors=4, target=target)
    loss, grads = T.step_gradient(draft, samples, 0, **options)
    w, g = draft.fc.weight, dict(tree_flatten(grads))['fc.weight']
    direction, eps = g / mx.sqrt((g ** 2).sum()), 1e-2
    ends = []
    for sign in (1, -1):
        draft.fc.weight = w + sign * eps * direction
        ends.append(T.step_gradient(draft, samples, 0, **options)[0].item())
    draft.fc.weight = w
    assert abs((ends[0] - ends[1]) / (2 * eps) / mx.sqrt((g ** 2).sum()).item() - 1) < .02

# --- learning

def test_a_text_by_heart(target):
    "64 tokens; every round gives a whole block, in the loop too."
    prompt = [5, 6, 7]
    answer = D.generate_answers(target, [prompt], 72)[0]
    draft = make_draft(target, n_layers=1, block_size=8)
    text = [Sample(0, np.array([*prompt, *answer], np.int32), 3)]
    T.train(draft, text, steps=150, batch=1, n_anchors=64, lr=5e-3)
    tokens, lengths = T.draft_rounds(draft, target, prompt, 65)
    assert tokens == answer[:65] and set(lengths) == {8}

def test_the_walk_is_the_loop(target):
    prompts = [[3, 4], [9, 8, 7], [11]]
    answers = D.generate_answers(target, prompts, 60)
    text = [Sample(i, np.array([*p, *a], np.int32), len(p)) for i, (p, a) in enumerate(zip(prompts, answers))]
    draft = make_draft(target, n_layers=1, block_size=6)
    T.train(draft, text, steps=25, batch=3, n_anchors=16, lr=4e-3)
    for s, p, a in zip(text, prompts, answers):
        walked = T.walk_acceptance(draft, [s], [D.target_features(target, s.tokens[None], draft.config.target_layer_ids)[0]])
        tokens, lengths = T.draft_rounds(draft, target, p, 50)
        assert tokens == a[:50] and lengths == walked['lengths'][:len(lengths)]

def test_not_a_number_stops(target, samples):
    draft = fresh(target)
    draft.fc.weight = draft.fc.weight * float('nan')
    with pytest.raises(FloatingPointError, match='not been finite for 20 steps, at step 20'): T.train(draft, samples, steps=100, batch=1, n_anchors=1)

def slow_train(draft, data, steps, batch, n_anchors, lr, clip=1.0):
    "What `train` does, with every step finished before the next begins."
    optimizer = T.NanoAdamW(lr, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.0, bias_correction=True)
    optimizer.init(draft.trainable_parameters())
    losses = []
    for i in range(steps):
        optimizer.learning_rate = mx.array(T.nano_rate(i, i / steps, lr, max(1, round(.04 * steps))))
        loss, grads = T.step_gradient(draft, data, i, target=draft._lent.target, batch=batch, n_anchors=n_anchors)
        optimizer.update(draft, T.clip_gradient(grads, clip)[0])
        mx.eval(draft.parameters(), optimizer.state)
        losses.append(loss.item())
    return losses

def test_reading_a_loss_late_changes_nothing(target, samples):
    ours, theirs = fresh(target), fresh(target)
    options = dict(steps=7, batch=2, n_anchors=4, lr=3e-3)
    records, losses = T.train(ours, samples, every=3, **options), slow_train(theirs, samples, **options)
    assert [r['step'] for r in records] == [3, 6, 7] and [r['loss'] for r in records] == [float(np.mean(l)) for l in (losses[:3], losses[3:6], losses[6:])]
    for (n, a), (_, b) in zip(tree_flatten(ours.parameters()), tree_flatten(theirs.parameters())): assert (np.array(a) == np.array(b)).all(), n

def test_a_loss_is_read_while_the_next_step_runs(target, samples, monkeypatch):
    order, real = [], T.step_gradient
    class Loss:
        def __init__(self, step): self.step = step
        def item(self): order.append(f'read {self.step}'); return 1.0
    def step(draft, data, i, **more):
        order.append(f'begin {i + 1}')
        return Loss(i + 1), real(draft, data, i, **more)[1]
    monkeypatch.setattr(T, 'step_gradient', step)
    monkeypatch.setattr(T.mx, 'async_eval', lambda loss, *more: mx.eval(*more))
    T.train(fresh(target), samples, steps=5, every=3, batch=2, n_anchors=2)
    assert order == ['begin 1', 'begin 2', 'read 1', 'begin 3', 'read 2', 'read 3', 'begin 4', 'begin 5', 'read 4', 'read 5']

def test_epochs_draw_what_they_did():
    for n, batch in ((3, 8), (10, 4), (64, 16)):
        for step in range(6):
            want = [np.random.default_rng([5, a // n]).permutation(n)[a % n] for a in range(step * batch, (step + 1) * batch)]
            assert T.pick_samples(n, step, batch, 5).tolist() == want

# --- several machines

WORKER = '''
import sys, json
import vllm_mlx, numpy as np, mlx.core as mx
from mlx.utils import tree_flatten
from vllm_mlx import train as T
from vllm_mlx.dflash import tiny_draft
from vllm_mlx.models import tiny_model
group = mx.distributed.init(backend='ring', strict=True)
rng = np.random.default_rng(0)
samples = [T.Sample(i, rng.integers(0, 90, 30 + i).astype(np.int32), 8) for i in range(4)]
draft = tiny_draft(tiny_model('qwen3_5'), n_layers=1, block_size=4, target_layer_ids=[0, 2])
records = T.train(draft, samples, steps=3, every=1, batch=4, n_anchors=5, checkpoint=sys.argv[1] + '/c.safetensors', group=group)
mx.save_safetensors(f'{sys.argv[1]}/{group.rank()}.safetensors', dict(tree_flatten(draft.parameters())))
timed = tiny_draft(tiny_model('qwen3_5'), n_layers=1, block_size=4, target_layer_ids=[0, 2])
T.train(timed, samples, limit_s=1.0, batch=4, n_anchors=5, group=group)
mx.save_safetensors(f'{sys.argv[1]}/timed{group.rank()}.safetensors', dict(tree_flatten(timed.parameters())))
open(f'{sys.argv[1]}/{group.rank()}.json', 'w').write(json.dumps([group.size(), [r['loss'] for r in records]]))
'''

def test_two_processes_take_the_step_of_one(tmp_path, target, samples, ring_port):
    (tmp_path / 'worker.py').write_text(WORKER)
    launcher = os.path.join(os.path.dirname(sys.executable), 'mlx.launch')
    if not os.path.exists(launcher): pytest.skip('no mlx.launch beside this Python')
    done = subprocess.run([launcher, '-n', '2', '--backend', 'ring', '--starting-port', str(ring_port), sys.executable, str(tmp_path / 'worker.py'), str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (tmp_path / '1.safetensors').exists(), done.stdout[-2000:] + done.stderr[-2000:]
    draft = fresh(target)
    records = T.train(draft, samples, steps=3, every=1, batch=4, n_anchors=5)
    alone = dict(tree_flatten(draft.parameters()))
    for rank in (0, 1):
        size, losses = json.loads((tmp_path / f'{rank}.json').read_text())
        assert size == 2 and np.abs(np.array(losses) - [r['loss'] for r in records]).max() < 1e-4
        for n, a in mx.load(str(tmp_path / f'{rank}.safetensors')).items(): assert gap(a, alone[n]) < 1e-4, n
    ends = [mx.load(str(tmp_path / f'timed{rank}.safetensors')) for rank in (0, 1)]             # their clocks differ, their steps and rates do not
    for n, a in ends[0].items(): assert (np.array(a) == np.array(ends[1][n])).all(), n

# --- data

def prompts(n): return [' '.join(map(str, range(1, 3 + i % 4))) for i in range(n)]
OPTIONS = dict(max_tokens=10, batch=3, progress=False)

@pytest.mark.parametrize('family', ['llama', 'qwen3_5', 'nemotron_h', 'gemma3'])
def test_a_batch_gives_what_each_gives_alone(family):
    model = tiny_model(family)
    some = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 13]]
    assert D.generate_answers(model, some, 12) == [D.generate_answers(model, [p], 12)[0] for p in some]

@pytest.mark.parametrize('at', ['generate_answers', 'target_features', 'write_shard', '_write_index'])
def test_an_interruption_loses_nothing(tmp_path, target, monkeypatch, at):
    D.prepare_data(target, Words(), prompts(8), tmp_path / 'whole', [0, 2], temperature=[0, 1], **OPTIONS)
    real, calls = getattr(D, at), [0]
    def breaks(*a, **k):
        calls[0] += 1
        if calls[0] == 3: raise KeyboardInterrupt
        return real(*a, **k)
    monkeypatch.setattr(D, at, breaks)
    with pytest.raises(KeyboardInterrupt): D.prepare_data(target, Words(), prompts(8), tmp_path / 'cut', [0, 2], temperature=[0, 1], **OPTIONS)
    monkeypatch.setattr(D, at, real)
    kept = {f.name: f.stat().st_mtime_ns for f in (tmp_path / 'cut').glob('*.safetensors')}
    listed = {s['file'] for s in json.loads((tmp_path / 'cut' / 'index.json').read_text())['shards']}
    assert listed <= set(kept)
    D.prepare_data(target, Words(), prompts(8), tmp_path / 'cut', [0, 2], temperature=[0, 1], **OPTIONS)
    for f in (tmp_path / 'whole').iterdir(): assert (tmp_path / 'cut' / f.name).read_bytes() == f.read_bytes(), f.name
    for name in listed: assert (tmp_path / 'cut' / name).stat().st_mtime_ns == kept[name], f'{name} was made again'
    assert not list((tmp_path / 'cut').glob('*.part*'))

def test_a_full_disk_is_told_before(tmp_path, target, monkeypatch):
    monkeypatch.setattr(D.shutil, 'disk_usage', lambda p: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(OSError, match='may grow by .* features=False') as e: D.prepare_data(target, Words(), prompts(4), tmp_path / 'd', [0, 2], **OPTIONS)
    assert e.value.errno == errno.ENOSPC and not (tmp_path / 'd').exists()

def test_a_disk_that_fills_up_leaves_whole_shards(tmp_path, target, monkeypatch):
    real, calls = mx.save_safetensors, [0]
    def save(path, arrays):
        calls[0] += 1
        if calls[0] == 2: open(path, 'wb').write(b'half'); return
        real(path, arrays)
    monkeypatch.setattr(D.mx, 'save_safetensors', save)
    with pytest.raises(OSError, match='only 4 of .* is the disk full'): D.prepare_data(target, Words(), prompts(8), tmp_path, [0, 2], **OPTIONS)
    monkeypatch.undo()
    assert 2 <= len(D.TrainingData(tmp_path)) <= 3 and not list(tmp_path.glob('*.part*'))

def test_the_prediction_is_an_upper_bound(tmp_path, target):
    made = D.prepare_data(target, Words(), prompts(8), tmp_path, [0, 2], **OPTIONS)
    lengths = [len(p.split()) for p in prompts(8)]
    width = json.loads((tmp_path / 'index.json').read_text())['settings']['width']
    assert made['bytes'] <= D.disk_need(lengths, 10, width, 4) <= made['bytes'] * 1.5 + 4096 * 8

def test_one_sample_is_read_not_its_shard(tmp_path, target, monkeypatch):
    D.prepare_data(target, Words(), prompts(8), tmp_path, [0, 2], **OPTIONS)
    whole = {s.id: s for f in tmp_path.glob('*.safetensors') for s in D.read_shard(f)}
    data, numbers, real = D.TrainingData(tmp_path), [], D.np.fromfile
    monkeypatch.setattr(D.mx, 'load', lambda *a, **k: pytest.fail('a whole file was loaded'))
    monkeypatch.setattr(D.np, 'fromfile', lambda f, kind, n: numbers.append(n) or real(f, kind, n))
    for turn in range(2):
        for s in data:
            w = whole[s.id]
            assert (s.tokens.tolist(), s.prompt, s.features.dtype) == (w.tokens.tolist(), w.prompt, w.features.dtype) and (np.array(s.features) == np.array(w.features)).all()
        assert numbers[-1] == s.features.size
    assert sum(n > 500 for n in numbers) == 2 * len(data) and len(numbers) == 2 * len(data) + 4 * len(list(tmp_path.glob('*.safetensors')))     # features each time, tokens once

@pytest.mark.parametrize('dtype', [mx.float32, mx.float16, mx.bfloat16])
def test_features_of_every_dtype(tmp_path, dtype):
    made = [Sample(i, np.arange(n, dtype=np.int32), 1, mx.random.normal((n, 6)).astype(dtype)) for i, n in enumerate((3, 9, 4))]
    D.write_shard(tmp_path / 's.safetensors', made)
    for a, b in zip(made, D.Shard(tmp_path / 's.safetensors'), strict=True): assert b.features.dtype == dtype and bool((a.features == b.features).all())

@pytest.mark.parametrize('damage, words', [(lambda raw: raw[:-5], 'is damaged'), (lambda raw: b'', 'is no shard'), (lambda raw: b'\xff' * 40, 'is no shard'), (lambda raw: raw[:8] + b'{' * 100, 'is no shard'), (lambda raw: raw.replace(b'"lengths"', b'"strengt"'), 'is no shard')])
def test_damaged_shards(tmp_path, damage, words):
    D.write_shard(tmp_path / 's.safetensors', [Sample(0, np.arange(5, dtype=np.int32), 2)])
    (tmp_path / 's.safetensors').write_bytes(damage((tmp_path / 's.safetensors').read_bytes()))
    with pytest.raises(ValueError, match=f's.safetensors {words}'): D.Shard(tmp_path / 's.safetensors')

def test_enough_is_enough(tmp_path, target):
    options = OPTIONS | dict(features=False)
    made = [D.prepare_data(target, Words(), prompts(8), tmp_path / 'a', [0, 2], most=m, **options) for m in (1, 4, 4, None)]
    assert [m['samples'] for m in made] == [made[0]['samples'], made[1]['samples'], made[1]['samples'], 8] and made[0]['samples'] <= 3 and 4 <= made[1]['samples'] <= 6 and made[2]['tokens'] == 0
    D.prepare_data(target, Words(), prompts(8), tmp_path / 'b', [0, 2], **options)
    for f in (tmp_path / 'b').iterdir(): assert (tmp_path / 'a' / f.name).read_bytes() == f.read_bytes(), f.name            # in steps or at once
    assert len(D.TrainingData(tmp_path / 'a', 5)) == 5
    brief = [D.prepare_data(target, Words(), prompts(8), tmp_path / 'c', [0, 2], limit_s=l, **options)['samples'] for l in (1e-6, 1e-6, 100)]
    assert brief[0] == brief[1] < brief[2] == 8
    for wrong in (dict(most=0), dict(limit_s=0), dict(limit_s=-1.0)):
        with pytest.raises(ValueError, match='a positive number is needed'): D.prepare_data(target, Words(), prompts(8), tmp_path / 'd', [0, 2], **wrong, **options)
    assert not (tmp_path / 'd').exists()

def test_short_answers(tmp_path, target):
    with pytest.raises(ValueError, match='all 4 answers have fewer than 99 tokens'): D.prepare_data(target, Words(), prompts(4), tmp_path / 'a', [0, 2], min_tokens=99, **OPTIONS)
    with pytest.raises(ValueError, match='capture_layers has 77'): D.prepare_data(target, Words(), prompts(4), tmp_path / 'b', [77], **OPTIONS)
    assert not (tmp_path / 'b').exists()

def test_data_and_draft_must_fit(tmp_path, target):
    D.prepare_data(target, Words(), prompts(4), tmp_path, [0, 2], **OPTIONS)
    data, draft = D.TrainingData(tmp_path), fresh(target)
    data.check(draft, Words())
    other = Words(); other.get_vocab = lambda: {'a': 1}
    with pytest.raises(ValueError, match='another tokenizer'): data.check(draft, other)
    with pytest.raises(ValueError, match='other weights'): data.check(fresh(tiny_model('qwen3_5', seed=1)))
    with pytest.raises(ValueError, match=r'layers \[0, 2\], the draft reads \[0, 1\]'): data.check(fresh(target, target_layer_ids=[0, 1]))
    (tmp_path / 'shard-00000.safetensors').unlink()
    with pytest.raises(ValueError, match='lacks shard-00000'): D.TrainingData(tmp_path)

def test_features_on_disk_and_on_line_train_alike(tmp_path, target):
    curves = []
    for features in (True, False):
        D.prepare_data(target, Words(), prompts(8), tmp_path / str(features), [0, 2], features=features, **OPTIONS)
        curves.append([r['loss'] for r in T.train(fresh(target), D.TrainingData(tmp_path / str(features)), steps=4, every=1, batch=2, n_anchors=3)])
    assert np.abs(np.array(curves[0]) - curves[1]).max() < 1e-3

@pytest.mark.parametrize('line, says', [('[1]', 'line 1 of p.jsonl holds a list'), ('{"messages": [{"role": "user"}]}', 'has the message'), ('{"text": ""}', 'has no prompt'), ('{"messages": [{"role": "assistant", "content": "x"}]}', 'has no prompt'), ('{"prompt": 5}', 'has no prompt')])
def test_bad_lines(tmp_path, line, says):
    (tmp_path / 'p.jsonl').write_text(line)
    with pytest.raises(ValueError, match=says): D.read_prompts(tmp_path / 'p.jsonl')
