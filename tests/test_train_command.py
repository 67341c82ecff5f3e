"`vllm_mlx train`: full disks, wrong tokenizers and two processes. What the words of the command may be is in test_cli.py."
import errno, json, os, socket, subprocess, sys, sysconfig
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
    assert len(learn) == 5 and len(held) == 1 and not set(learn) & set(held)
    learn, held = C._prompts_for(asked | dict(heldout=str(tmp_path / 'one.jsonl')), None)
    assert len(learn) == 6 and held == ['def f']

def test_builtin_prompts_are_parted_by_document(asked, monkeypatch):
    from vllm_mlx import prompts
    files = dict(list(nano.python_files().items())[:60])
    monkeypatch.setattr(prompts, 'python_files', lambda: files)
    tokenizer = load('nano-hybrid')[1]
    learn, held = C._prompts_for(asked | dict(prompts='builtin', limit=50), tokenizer)
    assert len(learn) == 50 and 1 < len(held) <= 64
    assert not {p[0]['content'] for p in learn} & {p[0]['content'] for p in held}

@pytest.mark.parametrize('text, words', [('[1]', 'holds a list'), ('a: [', 'is no YAML'), ('steps: 1.5', 'steps is 1.5: int is needed'), ('bf16: 1', 'bf16 is 1: bool is needed'), ('steps: true', 'steps is True'), ('temperature: [0, x]', 'temperature is')])
def test_bad_files(tmp_path, text, words):
    (tmp_path / 'c.yaml').write_text(text)
    with pytest.raises(ValueError, match=words): C.train_settings(dict(target='a', prompts='b', output='c'), tmp_path / 'c.yaml')

def test_a_flag_wins_over_the_file(tmp_path):
    (tmp_path / 'c.yaml').write_text('steps: 7\nlr: 6e-4\ntemperature: [0, 0.7]\nlayer-ids: [1, 3]\nbf16: true\n')
    s = C.train_settings(dict(target='a', prompts='b', output='c', steps=9, bf16=None), tmp_path / 'c.yaml')
    assert (s['steps'], s['lr'], s['temperature'], s['layer_ids'], s['bf16'], s['batch']) == (9, 6e-4, [0, 0.7], [1, 3], True, 8)

def test_two_processes_make_the_draft_of_one(tmp_path, asked):
    launcher, command = (Path(sysconfig.get_path('scripts')) / n for n in ('mlx.launch', 'vllm_mlx'))
    if not launcher.exists(): pytest.skip('no mlx.launch beside this Python')
    (tmp_path / 'train.yaml').write_text(json.dumps({k: v for k, v in asked.items() if v is not None} | dict(output=str(tmp_path / 'two'))))     # JSON is YAML
    with socket.socket() as s: s.bind(('127.0.0.1', 0)); port = s.getsockname()[1]
    done = subprocess.run([launcher, '-n', '2', '--backend', 'ring', '--starting-port', str(port), '--', command, 'train', '--config', str(tmp_path / 'train.yaml')], capture_output=True, text=True, timeout=240)
    assert (tmp_path / 'two' / 'model.safetensors').exists(), done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.count('step      4 of 4') == 1                       # one of them reports
    run(asked)
    one, two = (mx.load(str(tmp_path / n / 'model.safetensors')) for n in ('mine', 'two'))
    assert set(one) == set(two)
    for name in one: assert np.abs(np.array(one[name].astype(mx.float32)) - np.array(two[name].astype(mx.float32))).max() < 1e-3, name      # half a step
