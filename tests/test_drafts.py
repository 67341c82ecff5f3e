"Aliases of shipped drafts, and the measurement of a draft: what it must notice, and what it must not invent."
import json
from types import SimpleNamespace

import vllm_mlx   # before mlx.core
import mlx.core as mx
import pytest

from vllm_mlx import dflash, drafts as D
from vllm_mlx.dflash import DRAFTS, default_draft, draft_folder, load_dflash, make_draft, tiny_draft
from vllm_mlx.models import load, tiny_model
from vllm_mlx.train import export_draft

@pytest.fixture(scope='module')
def nano(): return load('nano-hybrid')

@pytest.fixture
def shipped(tmp_path, monkeypatch, nano):
    "A stand-in for the draft of the nano hybrid, where shipped drafts lie."
    monkeypatch.setattr(dflash, '_DATA', tmp_path)
    export_draft(make_draft(nano[0], n_layers=1, block_size=4, tokenizer=nano[1]), tmp_path / 'nano-hybrid-dflash')
    return tmp_path

# --- aliases

def test_an_alias_is_a_folder(shipped, nano):
    assert draft_folder('nano-hybrid-dflash') == shipped / 'nano-hybrid-dflash'
    draft = load_dflash('nano-hybrid-dflash', nano[0])
    assert draft.config.block_size == 4 and draft.dtype == mx.float32
    assert (default_draft('nano-hybrid'), default_draft('smollm2-135m'), default_draft('me/nano-hybrid')) == ('nano-hybrid-dflash', None, None)
    with pytest.raises(ValueError, match='made for a target with hidden_size 256'): load_dflash('nano-hybrid-dflash', tiny_model('qwen3_5'))

@pytest.mark.parametrize('name', list(DRAFTS))
def test_missing_files_are_said_with_what_would_help(tmp_path, monkeypatch, name):
    monkeypatch.setattr(dflash, '_DATA', tmp_path)
    for lacks in ('config.json', 'model.safetensors'):
        with pytest.raises(ValueError, match=f"lacks {lacks} of the draft '{name}'.*vllm_mlx train --target {DRAFTS[name]['target']}"): load_dflash(name)
        assert default_draft(DRAFTS[name]['target']) is None
        (tmp_path / name).mkdir(exist_ok=True); (tmp_path / name / 'config.json').write_text('{}')
    with pytest.raises(ValueError, match='no draft is called'): draft_folder(name + '2')

def test_what_is_shipped_is_small_and_published():
    "Whatever drafts are there: at most 16 MB, bfloat16, and bound to their target without complaint."
    there = [name for name, d in DRAFTS.items() if default_draft(d['target']) == name]
    if not there: pytest.skip('no draft is in this installation')
    for name in there:
        folder = draft_folder(name)
        assert (folder / 'model.safetensors').stat().st_size <= 16e6 and json.loads((folder / 'config.json').read_text())['architectures'] == ['DFlashDraftModel']
        assert {a.dtype for a in mx.load(str(folder / 'model.safetensors')).values()} == {mx.bfloat16}
        assert (folder / 'README.md').is_file(), f'{name} has no model card'
        load_dflash(name, load(DRAFTS[name]['target'])[0])

# --- measuring

PROMPTS = dict(code=['def add(a, b):\n', 'class A:\n'], other=['import os\n'])

@pytest.fixture(scope='module')
def untrained(nano): return make_draft(nano[0], n_layers=1, block_size=4, tokenizer=nano[1])

def bench(nano, draft, **options):
    return D.bench_draft(nano[0], draft, nano[1], PROMPTS, **(dict(block_sizes=(None, 'kod'), temperatures=(0.0, 0.8), repeats=2, max_tokens=10, speed_prompts=1) | options))

@pytest.fixture(scope='module')
def result(nano, untrained): return bench(nano, untrained)

def test_a_useless_draft_is_said_to_be_useless(result):
    assert {(r['kind'], r['temperature'], r['block_size'], r['prompts']) for r in result['acceptance']} == {(k, T, b, len(ps)) for k, ps in PROMPTS.items() for T in (0.0, 0.8) for b in (4, 'kod')}
    for r in result['acceptance']:
        assert r['same'] == r['prompts'] and r['first_difference'] == [] and r['gaps'] == []
        assert 1 <= r['length'] < 1.6 and 1 <= r['tokens_per_forward'] < 1.6 and (len(r['at_least']) == 3) == (r['block_size'] == 4)
        assert r['at_least'] == sorted(r['at_least'], reverse=True)
    assert json.loads(json.dumps(result)) == result

def test_speeds_are_of_the_same_run(result):
    rows = {(r['kind'], r['temperature'], r['name']): r for r in result['speed']}
    assert set(rows) == {(k, T, n) for k in (*PROMPTS, 'all') for T in (0.0, 0.8) for n in ('plain', '4', 'kod')}
    for (kind, T, name), r in rows.items():
        mid, low, high = r['tokens_per_second']
        assert 0 < low <= mid <= high and r['turns'] == 2
        assert r['speedup'] == [1.0] * 3 if name == 'plain' else r['speedup'][1] <= r['speedup'][0] <= r['speedup'][2]

def test_perfect_drafts_get_whole_blocks(nano):
    "A draft that knows the text: every round is as long as its block."
    answer = [t for t in D._Ways(*nano[:1], None, nano[1], 25, 0).mlx(nano[1].encode(PROMPTS['other'][0]), 0)[0]]
    n = len(nano[1].encode(PROMPTS['other'][0]))
    class Oracle:
        config = SimpleNamespace(block_size=4, target_layer_ids=[0], mask_token_id=1, num_hidden_layers=1, intermediate_size=1)
        def parameters(self): return {}
        def features(self, hidden): return hidden[0]
        def make_cache(self): return SimpleNamespace(state=[])
        def extend(self, features, cache, positions): pass
        def propose(self, last, features, cache, size, position):
            says = (answer + [0] * 9)[position + 1 - n:position + size - n]
            return 20.0 * (mx.arange(6144) == mx.array(says)[:, None])[None]
    r = D.bench_draft(nano[0], Oracle(), nano[1], dict(other=PROMPTS['other']), (None,), (0.0,), repeats=1, max_tokens=25)['acceptance'][0]
    assert r['length'] == 4 and r['at_least'] == [1, 1, 1] and r['tokens_per_forward'] > 3 and r['same'] == 1

def test_another_text_is_noticed(nano, untrained, monkeypatch):
    "The loop is made to say something else at token 3: the text is not the same, and the gap between the choices is the target's."
    real = D._Ways.ours
    def wrong(self, prompt, T, size):
        tokens, seconds, last = real(self, prompt, T, size)
        return (tokens if size is None else [*tokens[:3], (tokens[3] + 1) % 6144, *tokens[4:]]), seconds, last
    monkeypatch.setattr(D._Ways, 'ours', wrong)
    r = bench(nano, untrained, temperatures=(0.0,), block_sizes=(None,), repeats=1)
    for row in r['acceptance']: assert row['same'] == 0 and set(row['first_difference']) == {3} and len(row['gaps']) == row['prompts'] and min(row['gaps']) > 0
    assert '0 of 2' in D.draft_table(r)
    assert 'first differ at token 3' in D.model_card(r, 'nano-hybrid-dflash')

def test_a_text_that_ends_early_is_not_the_same():
    stats = SimpleNamespace(acceptance_lengths=[2], block_sizes=[4], rounds=1, plain_steps=0)
    r = D._acceptance([([1, 2], stats, [1, 2, 3]), ([1, 2, 3], stats, [1, 2, 3])], 4, [])
    assert (r['same'], r['first_difference']) == (1, [2])

def test_rounds_that_the_end_cut_short_do_not_count():
    stats = SimpleNamespace(acceptance_lengths=[4, 1, 2], block_sizes=[4, 4, 2], rounds=3, plain_steps=1)
    r = D._acceptance([([0] * 8, stats, [0] * 8)], 4, [])
    assert (r['rounds'], r['length'], r['at_least'], r['tokens_per_forward']) == (2, 2.5, [0.5, 0.5, 0.5], 7 / 4)

def test_a_limit_leaves_things_out_and_invents_nothing(nano, untrained):
    seen = []
    r = bench(nano, untrained, limit_s=1e-6, temperatures=(0.0,), repeats=5, report=lambda r: seen.append(json.dumps(r)))
    assert {(a['kind'], a['prompts']) for a in r['acceptance']} == {('code', 1), ('other', 1)}
    assert {s['turns'] for s in r['speed']} == {1} and len(seen) >= 2
    assert 'Held-out prompts (1 code, 1 other)' in D.model_card(r, 'nano-hybrid-dflash') and 'in 1 turns' in D.model_card(r, 'nano-hybrid-dflash')

def test_without_plain_there_is_no_speedup(nano, untrained):
    r = bench(nano, untrained, plain=False, repeats=1, temperatures=(0.0,), block_sizes=(None,))
    assert {s['speedup'] for s in r['speed']} == {None} and {s['name'] for s in r['speed']} == {'4'}
    assert D.draft_table(r).count('\n') == 1 + 2 + 1
    with pytest.raises(ValueError, match='no speedup was measured'): D.plot_speed(r)

@pytest.mark.parametrize('options, words', [(dict(repeats=0), 'repeats is 0'), (dict(max_tokens=1), 'max_tokens is 1'), (dict(block_sizes=('best',)), "block_sizes has 'best'"), (dict(block_sizes=(1,)), 'block_sizes has 1'), (dict(temperatures=(float('nan'),)), 'temperatures has nan')])
def test_settings_that_make_no_sense(nano, untrained, options, words):
    with pytest.raises(ValueError, match=words): bench(nano, untrained, **options)

def test_prompts_may_be_text_messages_or_tokens(nano, untrained):
    text = 'def f(x):\n'
    tokens = nano[1].encode(text)
    rows = [D.bench_draft(nano[0], untrained, nano[1], dict(k=[p]), (None,), (0.0,), repeats=1, max_tokens=6, plain=False)['acceptance'] for p in (text, tokens, [dict(role='user', content=text.rstrip('\n'))])]
    assert rows[0] == rows[1] == rows[2]

def test_held_out_prompts_are_there_for_every_draft():
    for d in DRAFTS.values():
        kinds = D.heldout_prompts(d['target'])
        assert {'code', 'reference'} <= set(kinds) and all(8 <= len(ps) <= 12 for ps in kinds.values())
    assert D.heldout_prompts('smollm2-135m')['chat'][0][0]['role'] == 'user' and isinstance(D.heldout_prompts('nano-hybrid')['code'][0], str)
    with pytest.raises(ValueError, match='no held-out prompts'): D.heldout_prompts('x')

def test_the_card_says_what_was_measured(result):
    card = D.model_card(result, 'smollm2-135m-dflash', training=dict(options=dict(lr=0.001), samples=9, answer_tokens=99, records=[dict(step=5, seconds=1.0, loss=2.5)]), limits=('It is a test.',), size=12_300_000)
    for words in ('# smollm2-135m-dflash', "load_dflash('smollm2-135m-dflash', target)", 'lr 0.001', '| 5 | 2.500 |', '12.3 MB', 'It is a test.', 'Apache-2.0', 'Python Software Foundation', '12 of 12 texts'): assert words in card, words
    for r in result['acceptance']: assert f"{r['length']:.2f}" in card
    with pytest.raises(ValueError, match="no draft is called 'x'"): D.model_card(result, 'x')
