"Prompts made from what ships with Python: their parts, and the ones that the shipped draft learned from."
import ast, hashlib, json, sys
from importlib import resources
from pathlib import Path

import vllm_mlx   # before mlx.core
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from vllm_mlx import prompts as P
from vllm_mlx.models import load
from vllm_mlx.nano import part_of, python_files
from vllm_mlx.train_data import prompt_tokens

@pytest.fixture(scope='module')
def files(): return python_files()

@pytest.fixture(scope='module')
def made(files): return P.builtin_prompts(load('smollm2-135m')[1], files=files)

# SHA-256 of the training's tokens, and of the files that it had: those of CPython 3.11.7 on Linux
AS_TRAINED, FILES = '1547565b0793986ab9986424d5d6827530e53c088297e58b1b2c63ba962d12c3', 'f002987f16a1062bfbcea4241e9163c116d04fa64baf3acdd871c1503776cd0c'

def test_they_are_the_training_s_own_token_by_token(made, files):
    if hashlib.sha256(''.join(n + '\0' + t + '\0' for n, t in files.items()).encode()).hexdigest() != FILES: pytest.skip(f'Python {sys.version.split()[0]} has {len(files)} files, the training had those of 3.11.7')
    counts = {part: sum(p.part == part for p in made) for part in ('train', 'heldout')}
    assert counts == dict(train=27278, heldout=1068)
    assert {k: sum(c.values()) for k, c in P.count_prompts([p for p in made if p.part == 'train']).items()} == dict(code=16754, reference=6442, chat=4082)
    tokenizer = load('smollm2-135m')[1]
    tokens = np.concatenate([prompt_tokens(tokenizer, p.messages) for p in made]).astype(np.uint16)
    assert hashlib.sha256(tokens.tobytes()).hexdigest() == AS_TRAINED
    held = json.loads((Path(str(resources.files('vllm_mlx'))) / 'data' / 'draft_prompts.json').read_text(encoding='utf-8'))
    assert held == {'smollm2-135m': {k: P.judged_by(made)[k] for k in ('code', 'reference', 'chat')}, 'nano-hybrid': P.nano_judged_by()}

WINDOWS = '12536fb1fa1be9a9ddbb8ffda660da57c0b60bb217a8a45ad664c07b243f9c29'         # of the nano hybrid's windows, on the same files

@pytest.fixture(scope='module')
def windows(files): return P.builtin_windows(load('nano-hybrid')[1], files=files)

def test_the_windows_are_always_the_same(windows, files):
    if hashlib.sha256(''.join(n + '\0' + t + '\0' for n, t in files.items()).encode()).hexdigest() != FILES: pytest.skip(f'Python {sys.version.split()[0]} has other files than 3.11.7')
    assert hashlib.sha256(np.concatenate([p.tokens for p in windows]).astype(np.uint16).tobytes()).hexdigest() == WINDOWS
    assert sum(p.part == 'train' for p in windows) == 3 * 4096

def test_windows_are_of_their_part_and_keep_out_of_the_judgement(windows, files):
    tokenizer = load('nano-hybrid')[1]
    assert {(p.part, part_of(p.source)) for p in windows} == {('train', 'train'), ('heldout', 'valid')}
    assert {len(p.tokens) for p in windows} == {48, 96, 160} and {p.kind for p in windows if p.part == 'train'} == {'code', 'tests', 'reference'}
    assert len({p.tokens for p in windows}) > .99 * len(windows)
    judged = [t for ts in P.nano_judged_by({n: t for n, t in files.items() if part_of(n) == 'heldout'}).values() for t in ts]
    assert not [p.piece for p in windows if any(p.text.strip() and p.text.strip() in t for t in judged)]
    for p in windows[::50]:
        name, start = p.piece.rsplit(':', 1)
        assert files[name][int(start):].startswith(p.text.rstrip('\ufffd')) and tuple(tokenizer.encode(p.text))[:20] == p.tokens[:20]

def test_what_a_training_looks_at_is_not_what_it_is_judged_by(made):
    judged = {t for ts in P.judged_by(made).values() for t in ts}
    seen = P.looked_at(made, 32)
    assert set(seen) == {'code', 'reference', 'chat'} and all(len(ps) == 32 for ps in seen.values()) and not judged & {p.text for ps in seen.values() for p in ps}
    assert {k: ps[:5] for k, ps in seen.items()} == P.looked_at(made, 5)
    for n in (0, 33):
        with pytest.raises(ValueError, match=f'n is {n}: 1 to 32'): P.looked_at(made, n)

def test_who_converses():
    class Template:
        chat_template = 'x'
        def __init__(self, before, after): self.before, self.after = before, after
        def apply_chat_template(self, messages, **options): return self.before + messages[0]['content'] + self.after
    assert [P.converses(t) for t in (Template('', '\n'), Template('<user>', ''), Template('', '</s>'), object())] == [False, True, True, False]

def test_no_document_is_in_both_parts(made):
    parts = {}
    for p in made: parts.setdefault(p.source, set()).add(p.part)
    assert all(len(v) == 1 for v in parts.values()) and {frozenset(v) for v in parts.values()} == {frozenset(['train']), frozenset(['heldout'])}
    assert len({p.text for p in made}) == len(made)
    assert not {p.source for p in made if p.source.startswith('test/')}

def test_what_ships_as_held_out_was_not_learned(made):
    "The committed prompts, on any Python: no prompt of the training part shows the same piece."
    held = json.loads((Path(str(resources.files('vllm_mlx'))) / 'data' / 'draft_prompts.json').read_text(encoding='utf-8'))['smollm2-135m']
    learned = {p.text for p in made if p.part == 'train'}
    pieces = {' '.join(p.piece.split()) for p in made if p.part == 'train' and p.kind != 'chat' and len(p.piece) > 60}
    for kind, texts in held.items():
        assert len(texts) == 12
        for text in texts:
            assert text not in learned
            assert not [x for x in pieces if x in ' '.join(text.split())], text

def test_repeated_finds_every_copy(made):
    copies, learned = P.repeated(made), {}
    for p in made:
        if p.part == 'train': learned.setdefault(' '.join(p.piece.split()), p)
    for p in made:
        if p.part == 'heldout': assert (p.text in copies) == (' '.join(p.piece.split()) in learned)
    assert not {t for ts in P.judged_by(made).values() for t in ts} & copies

def test_counts_are_of_all(made):
    assert sum(n for c in P.count_prompts(made).values() for n in c.values()) == len(made)
    assert set(P.count_prompts(made)) == {k for s in P.SOURCES.values() for k in s['kinds']}

def test_another_seed_draws_other_forms(files):
    some = dict(list(files.items())[:40])
    a, b = P.all_prompts(some, chat=False), P.all_prompts(some, chat=False, seed=1)
    assert {p.piece for p in a if p.kind == 'code'} == {p.piece for p in b if p.kind == 'code'} and {p.text for p in a} != {p.text for p in b}

@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(['def f(x): return x', 'class Ä:\n    def g(self):\n        "Doc ü."\n        return "é" ; pass', 'x = 1', '', 'async def h(): pass', 'def k(\n  a,\n  b): return a', '# ↵ comment', 'if 1:\n\tdef t(): "🧀"; f(2)']), max_size=8))
def test_segments_are_those_of_ast(pieces):
    text = '\n'.join(pieces)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)): assert P._segment(text.split('\n'), node) == ast.get_source_segment(text, node)

def test_files_that_are_no_python_and_pages_that_are_short():
    assert P.all_prompts({'a.py': 'def (:'}, chat=False) == []
    made = P.all_prompts({'topics/x': 'Short.'}, chat=False)
    assert [p.kind for p in made] == ['reference'] * 3 and all('x' in p.text for p in made)

def test_a_tokenizer_without_a_template_takes_the_text():
    class Words:
        chat_template = None
        def encode(self, text, add_special_tokens=True): return text.split()
    made = P.builtin_prompts(Words(), most=9, files={})
    assert made and max(len(p.text.split()) for p in made) <= 9
    with pytest.raises(ValueError, match='prompts has 2 tokens or less'): P.builtin_prompts(Words(), most=2, files={})
