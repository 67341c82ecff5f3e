"`vllm_mlx train`: full disks, wrong tokenizers and two processes. What the words of the command may be is in test_cli.py."
import errno, json, os, subprocess, sys, sysconfig
from pathlib import Path

import vllm_mlx   # before mlx.core
import mlx.core as mx
import numpy as np
import pytest

from vllm_mlx import dflash, nano, train_command as C, train_data as D
from vllm_mlx.dflash import load_dflash
from vllm_mlx.models import load

@pytest.fixture
def asked(tmp_path):
    (tmp_path / 'p.jsonl').write_text('\n'.join(json.dumps(dict(prompt=f'def f{i}(x):\n    return')) for i in range(6)))
    return C.train_settings(dict(target='nano-hybrid', prompts=str(tmp_path / 'p.jsonl'), output=str(tmp_path / 'mine'), max_tokens=12, block_size=4, layers=1, lr=2e-3, batch=2, anchors=4, every=2, steps=4, generate_batch=5))

def run(settings):
    said = []
    return C.run_train(settings, said.append, progress=False), said

@pytest.mark.parametrize('at', ['first checkpoint', 'second checkpoint', 'export'])
def test_a_full_disk_leaves_nothing_half_written(tmp_path, asked, monkeypatch, at):
    real, saves = mx.save_safetensors, []
    def save(path, arrays, **more):
        saves.append(path)
        name = 'checkpoint' if 'checkpoint' in str(path) else 'export' if 'mine' in str(path) and 'data' not in str(path) else 'data'
        if name == at or (name == 'checkpoint' and at == f"{['first', 'second'][sum('checkpoint' in str(p) for p in saves) - 1]} checkpoint"):
            Path(path).write_bytes(b'half')
            raise RuntimeError('[write] Unable to write 8 bytes to file.')
        real(path, arrays, **more)
    for module in (nano, dflash): monkeypatch.setattr(module.mx, 'save_safetensors', save)
    with pytest.raises(OSError, match='cannot write .*: is the disk full') as e: run(asked)
    assert ('mine' if at == 'export' else 'checkpoint.safetensors') in str(e.value)
    monkeypatch.undo()
    left = {str(f.relative_to(tmp_path)) for f in tmp_path.rglob('*')}
    assert not [f for f in left if '.part' in f] and 'mine' not in left
    assert ('mine-data/checkpoint.safetensors' in left) == (at != 'first checkpoint')
    records, said = run(asked)                                              # there is room again: it goes on
    assert [r['step'] for r in records] == [2, 4] and ' 0 new tokens' in said[0]
    assert load_dflash(asked['output']).config.block_size == 4

def test_interrupted_or_not_the_draft_is_the_same(tmp_path, asked):
    whole, _ = run(asked | dict(output=str(tmp_path / 'whole')))
    def stop(line):
        if line.startswith('step      4'): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): C.run_train(asked, stop, progress=False)
    records, _ = run(asked)
    assert [r['loss'] for r in records] == [r['loss'] for r in whole]
    assert (tmp_path / 'mine' / 'model.safetensors').read_bytes() == (tmp_path / 'whole' / 'model.safetensors').read_bytes()

def test_data_of_another_tokenizer(tmp_path, asked, monkeypatch):
    run(asked)
    before = {f: f.stat().st_mtime_ns for f in tmp_path.rglob('*')}
    model, tokenizer = load('nano-hybrid')
    class Other:
        "The same words with other numbers."
        def __getattr__(self, name): return getattr(tokenizer, name)
        def get_vocab(self): return {**tokenizer.get_vocab(), 'new': 99999}
    monkeypatch.setattr(C, 'load', lambda name: (model, Other()))
    with pytest.raises(ValueError, match='was made with tokenizer'): run(asked)
    assert {f: f.stat().st_mtime_ns for f in tmp_path.rglob('*')} == before

def test_one_prompt_is_too_few_and_apart_means_apart(tmp_path, asked):
    (tmp_path / 'one.jsonl').write_text('{"prompt": "def f"}')
    with pytest.raises(ValueError, match='holds one prompt: at least 2'): run(asked | dict(prompts=str(tmp_path / 'one.jsonl')))
    learn, held = C._prompts_for(asked, None)
    assert len(learn) == 5 and len(held['prompts']) == 1 and not set(learn) & set(held['prompts'])
    learn, held = C._prompts_for(asked | dict(heldout=str(tmp_path / 'one.jsonl')), None)
    assert len(learn) == 6 and held == dict(prompts=['def f'])

@pytest.fixture
def some_files(monkeypatch):
    from vllm_mlx import prompts
    files = nano.python_files()
    some = {n: t for i, (n, t) in enumerate(files.items()) if i % 48 == 0 or nano.part_of(n) == 'valid' or (nano.part_of(n) == 'heldout' and len(t) < 20_000)}
    monkeypatch.setattr(prompts, 'python_files', lambda: some)
    return some

def test_builtin_prompts_are_parted_by_document(asked, some_files):
    learn, held = C._prompts_for(asked | dict(prompts='builtin', limit=50), load('smollm2-135m')[1])
    assert len(learn) == 50 and set(held) == {'code', 'reference', 'chat'} and all(1 < len(ps) <= 20 for ps in held.values())
    assert not {p[0]['content'] for p in learn} & {p[0]['content'] for ps in held.values() for p in ps}

def test_builtin_prompts_of_a_target_that_does_not_converse(asked, some_files):
    tokenizer = load('nano-hybrid')[1]
    learn, held = C._prompts_for(asked | dict(prompts='builtin', limit=50), tokenizer)
    assert len(learn) == 50 and {len(p) for p in learn} == {48, 96, 160} and set(held) >= {'code', 'tests'} and all(1 < len(ps) <= 30 for ps in held.values())
    text = {part: '\0'.join(t for n, t in some_files.items() if nano.part_of(n) == part) for part in nano.PARTS}
    for part, windows in (('train', learn), ('valid', [p for ps in held.values() for p in ps])):
        for p in windows: assert tokenizer.decode(p).strip('\ufffd') in text[part]
    learn, held = C._prompts_for(asked | dict(prompts='builtin', limit=50, max_prompt=20, measure=4), tokenizer)
    assert {len(p) for p in learn} == {20} and all(len(ps) <= 2 for ps in held.values())

# --- the best weights

@pytest.fixture
def measured(monkeypatch):
    "Acceptance lengths that are given out one after the other, and the weights that they were measured on."
    from vllm_mlx import train as T
    lengths, seen = [], []
    def walk(draft, samples, features, block_size=None):
        seen.append(np.array(draft.fc.weight))
        return dict(length=lengths[len(seen) - 1], lengths=[2], places=[.5] * 3)
    monkeypatch.setattr(T, 'walk_acceptance', walk)
    return lengths, seen

def exported(folder): return np.array(mx.load(str(folder / 'model.safetensors'))['fc.weight'].astype(mx.float32))

def test_the_best_weights_are_exported_and_the_last_are_kept(tmp_path, asked, measured):
    lengths, seen = measured
    lengths += [1.5, 3.0, 2.0, 3.0]
    records, said = run(asked | dict(steps=8))
    assert [r['best'] for r in records] == [True, True, False, False] and [r['acceptance'] for r in records] == lengths
    assert (exported(tmp_path / 'mine') == seen[1]).all() and not (seen[1] == seen[3]).all()
    assert 'the weights of step 4, 3.00 tokens a round on held-out answers (after the last step 3.00)' in said[-1] and 'the best so far' in said[2] and 'the best so far' not in said[3]
    last = np.array(mx.load(str(tmp_path / 'mine-data' / 'checkpoint.safetensors'))['model.fc.weight'].astype(mx.bfloat16).astype(mx.float32))
    assert (last == seen[3]).all()
    assert 'training' not in json.loads((tmp_path / 'mine' / 'config.json').read_text())

def test_the_best_is_remembered_over_an_interruption(tmp_path, asked, measured):
    lengths, seen = measured
    lengths += [4.0, 3.0, 2.0, 1.0]
    def stop(line):
        if line.startswith('step      4'): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): C.run_train(asked | dict(steps=6), stop, progress=False)
    assert (exported(tmp_path / 'mine-data' / 'best') == seen[0]).all() and not (tmp_path / 'mine').exists()
    records, said = run(asked | dict(steps=6))
    assert (exported(tmp_path / 'mine') == seen[0]).all() and 'the weights of step 2, 4.00 tokens' in said[-1]
    (tmp_path / 'mine-data' / 'checkpoint.safetensors').unlink()                # begun anew: what was best then is nothing now
    lengths += [1.2, 1.1, 1.0]
    _, said = run(asked | dict(steps=6))
    assert 'the weights of step 2, 1.20 tokens' in said[-1]

def test_answers_that_are_too_short_to_measure(tmp_path, asked):
    from vllm_mlx.train import KeepBest
    lines = []
    draft = load_dflash_tiny()
    watch = KeepBest(tmp_path / 'best', {})
    for step in (2, 4): found = watch(dict(step=step), draft)
    assert found == dict(acceptance=None, kinds={}, places=[], best=True) and watch.best['step'] == 4
    assert C._line(asked, dict(step=4, seconds=1., loss=2.) | found).endswith('no held-out answer is as long as a block')

def load_dflash_tiny():
    from vllm_mlx.dflash import tiny_draft
    from vllm_mlx.models import tiny_model
    return tiny_draft(tiny_model('qwen3_5'), n_layers=1, block_size=4, target_layer_ids=[0, 2])

# --- from a draft that is there, and within a time

def test_init_gives_the_weights(tmp_path, asked):
    run(asked)
    first = exported(tmp_path / 'mine')
    run(asked | dict(output=str(tmp_path / 'more'), init=str(tmp_path / 'mine'), lr=0.0, steps=2))
    assert (exported(tmp_path / 'more') == first).all()
    run(asked | dict(output=str(tmp_path / 'longer'), init=str(tmp_path / 'mine'), lr=0.0, steps=2, block_size=6))       # blocks of another length need no other weights
    assert (exported(tmp_path / 'longer') == first).all() and load_dflash(str(tmp_path / 'longer')).config.block_size == 6
    with pytest.raises(ValueError, match="is of a training with init '.*mine', now it is None"): run(asked | dict(output=str(tmp_path / 'more'), lr=0.0, steps=2))

@pytest.mark.parametrize('change, words', [(dict(layers=2), 'has num_hidden_layers 1, and the draft to train has 2: give --layers 1'),
                                           (dict(layer_ids=[1, 2]), 'has target_layer_ids .*, and the draft to train has .*: give --layer-ids 1,2,4,5'), (dict(intermediate_size=32), 'give --intermediate-size 640'), (dict(init='smollm2-135m-dflash'), 'made for a target with'), (dict(init='./nowhere'), 'nowhere')])
def test_init_must_be_the_same_draft(tmp_path, asked, change, words):
    model = load('nano-hybrid')
    dflash.save_dflash(dflash.make_draft(model[0], 1, 4, tokenizer=model[1]), tmp_path / 'there')
    before = sorted(tmp_path.rglob('*'))
    with pytest.raises(ValueError, match=words): run(asked | dict(init=str(tmp_path / 'there')) | change)
    assert sorted(tmp_path.rglob('*')) == before

def test_within_a_time(tmp_path, asked):
    s = C.train_settings({n: v for n, v in asked.items() if n not in ('steps', 'every', 'temperature')} | dict(limit_minutes=.05, generate_minutes=1, samples=3, every_seconds=1.0))
    records, said = run(s)
    assert s['steps'] is None and records[-1]['seconds'] >= 3 and records[-1]['rate'] < 2e-4 and len(records) >= 2
    assert said[0].startswith('5 samples') and ' of 0.05 minutes' in said[1]                     # a batch is the smallest thing that is made
    assert records[-1]['step'] > records[0]['step'] > 1
    assert run(s)[0] == records                                                                 # its time is over

# --- recipes

@pytest.mark.parametrize('name, draft', [('smollm2-135m', 'smollm2-135m-dflash'), ('nano-hybrid', 'nano-hybrid-dflash')])
def test_a_recipe_makes_the_shape_of_the_shipped_draft(name, draft):
    s = C.train_settings(dict(output='x'), name)
    assert s['target'] == name == dflash.DRAFTS[draft]['target'] and s['prompts'] == 'builtin' and s['temperature'] == {'smollm2-135m': [0, 0, 0, .7]}.get(name, [0, 0, .7, 1])
    target, tokenizer = load(name)
    sizes = {k: v for k, v in dict(intermediate_size=s['intermediate_size'], target_layer_ids=s['layer_ids']).items() if v is not None}
    config = dflash.make_draft(target, s['layers'], s['block_size'], tokenizer=tokenizer, **sizes).config.to_dict()
    shipped = json.loads((dflash._DATA / draft / 'config.json').read_text())
    if (trained := shipped.pop('training', {}).get('block_size')) is not None:                  # it was trained on longer blocks than it uses
        assert (config['block_size'], config['dflash_config']['block_size']) == (trained, trained)
        config['block_size'] = config['dflash_config']['block_size'] = shipped['block_size']
    assert {k: v for k, v in config.items() if k in shipped} == shipped

def test_how_the_target_is_loaded(asked, monkeypatch):
    class Loaded(Exception): pass
    def loaded(name, **how): raise Loaded(how)
    monkeypatch.setattr(C, 'load', loaded)
    for change, how in ((dict(), {}), (dict(bf16=True), dict(dtype=mx.bfloat16)), (dict(dequantize=True), dict(dequantize=True))):
        with pytest.raises(Loaded) as e: run(asked | change)
        assert e.value.args == (how,)

def test_a_file_wins_over_a_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'nano-hybrid').mkdir()
    assert C.config_file('nano-hybrid').parent == C._RECIPES
    (tmp_path / 'smollm2-135m').write_text('steps: 3\n')
    assert C.train_settings(dict(target='a', prompts='b', output='c'), 'smollm2-135m')['steps'] == 3
    with pytest.raises(ValueError, match='is a folder; there are recipes called nano-hybrid, smollm2-135m'): C.config_file('.')

def test_the_recipe_of_the_nano_hybrid_end_to_end(tmp_path, some_files):
    s = C.train_settings(dict(output=str(tmp_path / 'mine'), limit=12, max_tokens=16, generate_batch=6, anchors=4, batch=2, measure=4, limit_minutes=.05, every_seconds=1.5), 'nano-hybrid')
    records, said = run(s)
    assert records[-1]['seconds'] >= 3 and set(records[-1]['kinds']) >= {'code', 'tests'} and 'the weights of step' in said[-1]
    assert load_dflash(tmp_path / 'mine', load('nano-hybrid')[0]).config.target_layer_ids == [1, 2, 4, 5]

# --- files

@pytest.mark.parametrize('text, words', [('[1]', 'holds a list'), ('a: [', 'is no YAML'), ('steps: 1.5', 'steps is 1.5: int is needed'), ('bf16: 1', 'bf16 is 1: bool is needed'), ('steps: true', 'steps is True'), ('temperature: [0, x]', 'temperature is'), ('limit_minutes: -1', 'limit_minutes is -1.0: a positive number'), ('every_seconds: 0', 'every_seconds is 0.0'), ('samples: 0', 'samples is 0'), ('measure: 0', 'measure is 0')])
def test_bad_files(tmp_path, text, words):
    (tmp_path / 'c.yaml').write_text(text)
    with pytest.raises(ValueError, match=words): C.train_settings(dict(target='a', prompts='b', output='c'), tmp_path / 'c.yaml')

def test_a_flag_wins_over_the_file(tmp_path):
    (tmp_path / 'c.yaml').write_text('steps: 7\nlr: 6e-4\ntemperature: [0, 0.7]\nlayer-ids: [1, 3]\nbf16: true\n')
    s = C.train_settings(dict(target='a', prompts='b', output='c', steps=9, bf16=None), tmp_path / 'c.yaml')
    assert (s['steps'], s['lr'], s['temperature'], s['layer_ids'], s['bf16'], s['batch']) == (9, 6e-4, [0, 0.7], [1, 3], True, 8)

@pytest.mark.parametrize('given, config, words', [({}, None, '--target, --prompts and --output are missing: give them, or a recipe with --config nano-hybrid or smollm2-135m'), (dict(target='a'), None, '--prompts and --output are missing: give them'),
                                                  (dict(target='a', prompts='b'), None, '--output is missing: give it'), ({}, 'nano-hybrid', '--output is missing, also in nano-hybrid;')])
def test_all_that_is_missing_is_named(given, config, words):
    with pytest.raises(ValueError) as e: C.train_settings(given, config)
    assert words in str(e.value) and '\n' not in str(e.value)

def test_two_processes_make_the_draft_of_one(tmp_path, asked, ring_port):
    launcher, command = (Path(sysconfig.get_path('scripts')) / n for n in ('mlx.launch', 'vllm_mlx'))
    if not launcher.exists(): pytest.skip('no mlx.launch beside this Python')
    (tmp_path / 'train.yaml').write_text(json.dumps({k: v for k, v in asked.items() if v is not None} | dict(output=str(tmp_path / 'two'))))     # JSON is YAML
    done = subprocess.run([launcher, '-n', '2', '--backend', 'ring', '--starting-port', str(ring_port), '--', command, 'train', '--config', str(tmp_path / 'train.yaml')], capture_output=True, text=True, timeout=240)
    assert (tmp_path / 'two' / 'model.safetensors').exists(), done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.count('step      4 of 4') == 1                       # one of them reports
    run(asked)
    one, two = (mx.load(str(tmp_path / n / 'model.safetensors')) for n in ('mine', 'two'))
    assert set(one) == set(two)
    for name in one: assert np.abs(np.array(one[name].astype(mx.float32)) - np.array(two[name].astype(mx.float32))).max() < 1e-3, name      # half a step
