"""The speculative loop with a draft on Core ML programs, the profile of its steps, and the report for somebody with a Mac."""
import sys

import numpy as np
import pytest

pytest.importorskip("coremltools", reason="not available here: pip install 'coremltools>=9.0,<10'")
from vllm_mlx import cli
from vllm_mlx.ane import report
from vllm_mlx.ane.draft import ANEDraftModel, why_not
from vllm_mlx.ane.power import PowerMeter, profile_draft_step
from vllm_mlx.dflash import make_draft
from vllm_mlx.models import load
from vllm_mlx.speculate import SpecCache, SpecStats, stream_generate
from vllm_mlx.train import train
from vllm_mlx.train_data import Sample, generate_answers, target_features

# In the place of macmon, with watts; asked for a sample in 30 s and far quicker, so that a busy machine's meter waits for it. Its stamps give every window a length.
TOOL = """import time
for i in range(10**6): time.sleep(0.02); print('{"ane_power": %s, "timestamp": "2026-01-05T%%02d:%%02d:%%02d+00:00"}' %% (i // 3600 %% 24, i // 60 %% 60, i %% 60), flush=True)"""

@pytest.fixture(scope="module")
def folder(tmp_path_factory): return tmp_path_factory.mktemp("programs")

# --- the loop

@pytest.fixture(scope="module")
def taught():
    "The nano hybrid, and a draft that knows one of its answers by heart, nearly."
    target, tokenizer = load("nano-hybrid")
    prompts = [tokenizer.encode(t) for t in ('def read_lines(path):\n    """Return the lines', "class Queue:\n    def __init__(self")]
    answers = generate_answers(target, prompts, 72)
    draft = make_draft(target, n_layers=1, block_size=8, n_features=2, tokenizer=tokenizer)
    tokens = np.array([*prompts[0], *answers[0]], np.int32)
    sample = Sample(0, tokens, len(prompts[0]), target_features(target, tokens[None], draft.config.target_layer_ids)[0])
    train(draft, [sample], steps=60, batch=1, n_anchors=32, lr=3e-3)
    return target, tokenizer, draft, prompts, answers

def rounds(taught, model, n=40, **options):
    target, tokenizer, _, prompts, answers = taught
    stats = [SpecStats() for _ in prompts]
    for s, p, a in zip(stats, prompts, answers):
        assert [r.token for r in stream_generate(target, model, tokenizer, p, max_tokens=n, stats=s, **(dict(block_size=8) | options))] == a[:n]
    return sum(sum(s.acceptance_lengths) for s in stats) / max(1, sum(s.rounds for s in stats))

def test_acceptance_in_the_loop(taught, folder):
    "fp16 within 5 % of the MLX draft, as the definition of done says; int8 is reported by the notebook, and must at least be near."
    base = rounds(taught, taught[2])
    assert base > 1.5
    model = ANEDraftModel(taught[2], "reference", context=128, folder=folder)
    assert abs(rounds(taught, model.load_weights()) / base - 1) < 0.05
    assert abs(rounds(taught, model.load_weights_q8()) / base - 1) < 0.2

def test_kod_a_narrow_context_and_turns(taught, folder):
    "Blocks of any size as the controller asks, a context that is dropped, and a conversation."
    target, tokenizer, draft, prompts, answers = taught
    model = ANEDraftModel(draft, "reference", context=64, folder=folder).load_weights()
    rounds(taught, model, 24, block_size="kod")
    cache = SpecCache(target, model)
    first = [r.token for r in stream_generate(target, model, tokenizer, prompts[0], max_tokens=15, prompt_cache=cache, block_size=5)]
    gen = stream_generate(target, model, tokenizer, [], max_tokens=15, prompt_cache=cache, block_size=5)
    then = [next(gen).token for _ in range(7)]
    gen.close()                                                          # given up within a block
    last = [r.token for r in stream_generate(target, model, tokenizer, [], max_tokens=10, prompt_cache=cache, block_size=5)]
    assert first + then + last == answers[0][:32] and cache.context.tokens() + cache.pending == len(cache.tokens)

def test_sampling(taught, folder):
    "Same seed, same text as plain sampling: the loop's rule holds for this draft too."
    target, tokenizer, draft, prompts, _ = taught
    model = ANEDraftModel(draft, "reference", context=64, folder=folder).load_weights()
    run = lambda d: [r.token for r in stream_generate(target, d, tokenizer, prompts[0], max_tokens=16, temperature=0.8, seed=3, block_size=6)]
    assert run(model) == run(draft)

def test_profile_of_the_real_model(taught, folder):
    target, tokenizer, draft, prompts, answers = taught
    model = ANEDraftModel(draft, "reference", context=64, head="program", folder=folder).load_weights()
    cache, _ = report.prepare_step(model, prompts[0])
    want = model.propose(prompts[0][-1], None, cache)[0].argmax(-1).tolist()
    for head in ("mlx", "program", "deferred"):
        p = profile_draft_step(model, prompts[0][-1], cache, head=head)
        assert sum(p.phases.values()) + p.other == pytest.approx(p.total) and p.other < 0.05 * p.total + 2 and p.phases["run"] > 0.5 * p.total * (head == "program")
        assert p.ran == "reference float16" and p.tokens == ([] if head == "deferred" else want)

# --- the report

def test_report(taught, folder):
    target, tokenizer, draft, prompts, _ = taught
    lines = list(report.ane_report(draft, tokenizer, prompts[0], context=64, max_tokens=12, folder=folder))
    text = "\n".join(lines)
    assert text.count("text as plain decoding") == 3 and "DIFFERS" not in text and text.count("ran on: reference float16") == 2
    if sys.platform != "darwin": assert "Core ML is not available here: it is a part of macOS" in text and text.count("not available here") == 7
    errors = {name: [float(l.split()[-1]) for l in lines if l.startswith(f"    - {name}")] for name in ("fc_norm", "layer0.", "final_norm", "lm_head")}
    assert {k: len(v) for k, v in errors.items()} == {"fc_norm": 2, "layer0.": 4, "final_norm": 2, "lm_head": 2}       # every program of both precisions
    assert all(0 < e < 0.02 for v in errors.values() for e in v) and "WRONG" not in text

def test_the_lines_of_a_mac(taught, folder, monkeypatch):
    "What needs Core ML, with the interpreter in its place and a tool that stands in for macmon: every line is there, and says what ran."
    import vllm_mlx.ane.draft as d
    target, tokenizer, draft, prompts, _ = taught
    real = d.load_program
    class Stand:
        ran = "coreml CPU_AND_NE (a stand-in)"
        def __init__(self, path): self.run = real(path, "reference")
        def __call__(self, given): return self.run(given)
    for module in (d, report): monkeypatch.setattr(module, "why_not", lambda backend: None)
    for module in (d, report): monkeypatch.setattr(module, "load_program", lambda path, backend, precision: Stand(path) if backend == "coreml" else real(path, backend, precision))
    monkeypatch.setattr(report, "compute_units", lambda path: [("conv", "q", "ANE"), ("conv", "k", "ANE"), ("softmax", "p", "CPU")])
    meter = PowerMeter("macmon", 30_000, [sys.executable, "-c", TOOL % 1.5], wait_s=60)
    text = "\n".join(report.backend_lines(draft, tokenizer, prompts[0], "coreml", context=64, max_tokens=4, seconds=0.2, folder=folder, meter=meter))
    assert text.count("ran on: coreml CPU_AND_NE (a stand-in)") == 2 and text.count("mean 1500 mW") == 2 and text.count("time of a step (median of 10): embed") == 2
    assert "10 operations on ANE, 5 operations on CPU (fc_norm: 1 softmax on CPU; layer0." in text and "not available here" not in text

def test_a_mac_without_an_ane(taught, folder, monkeypatch, capsys):
    "A virtual machine: nothing fails, the section of Core ML says why it is empty, and the reference runs."
    import coremltools as ct
    target, tokenizer, draft, prompts, _ = taught
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ct.models.compute_device.MLComputeDevice, "get_all_compute_devices", classmethod(lambda c: []))
    said = why_not("coreml")
    assert said.startswith("Core ML is not available here: this machine has no Neural Engine")
    with pytest.raises(RuntimeError, match="Core ML is not available here: this machine has no Neural Engine"): ANEDraftModel(draft, "coreml")
    monkeypatch.setattr(report, "load", lambda name: (target, tokenizer))
    monkeypatch.setattr(report, "load_dflash", lambda name, target: draft)
    assert report.main(["--model", "x", "--draft", "x", "--context", "64", "--max-tokens", "4", "--folder", str(folder)]) == 0
    out = capsys.readouterr().out
    assert f"- {said}" in out and "FAILED" not in out and out.count("ran on: reference float16") == 2 and out.count("not available here") == 7

def test_a_backend_that_fails_is_a_finding(taught, folder, monkeypatch, capsys):
    target, tokenizer, draft, prompts, _ = taught
    def lines(*args, **options): yield "- first"; raise RuntimeError("compiler error 7")
    monkeypatch.setattr(report, "backend_lines", lines)
    text = list(report.ane_report(draft, tokenizer, prompts[0]))
    assert text.count("- FAILED with RuntimeError: compiler error 7") == 2 and text.count("- first") == 2
    monkeypatch.setattr(report, "load", lambda name: (target, tokenizer))
    monkeypatch.setattr(report, "load_dflash", lambda name, target: draft)
    assert report.main(["--model", "x", "--draft", "x"]) == 1 and "FAILED" in capsys.readouterr().out

def test_report_sees_a_wrong_program(taught, folder):
    target, tokenizer, draft, prompts, _ = taught
    model = ANEDraftModel(draft, "reference", context=64, folder=folder).load_weights()
    report.prepare_step(model, prompts[0])
    name = model._steps[0][0].name
    good = report.program_errors(model)[name]
    program, run = model._steps[0]
    model._steps = [(program, lambda given: {k: np.flip(v, -1) for k, v in run(given).items()}), *model._steps[1:]]
    assert max(report.program_errors(model)[name].values()) > 0.2 > max(good.values())

def test_a_wrong_program_fails_the_report(taught, folder, monkeypatch, capsys):
    "The loop's text is right whatever a draft says, so the errors have to decide: one program that is off, in the backend alone, and the command ends with 1."
    import vllm_mlx.ane.draft as d
    target, tokenizer, draft, prompts, _ = taught
    real = d.load_program
    def off(path, backend, precision):
        run = real(path, backend, precision)
        if "attention" not in str(path): return run
        wrong = lambda given: {k: np.flip(v, 1) for k, v in run(given).items()}
        wrong.ran = run.ran
        return wrong
    monkeypatch.setattr(d, "load_program", off)
    monkeypatch.setattr(report, "load", lambda name: (target, tokenizer))
    monkeypatch.setattr(report, "load_dflash", lambda name, target: draft)
    assert report.main(["--model", "x", "--draft", "x", "--context", "64", "--max-tokens", "4", "--folder", str(folder)]) == 1
    said = capsys.readouterr().out
    assert "DIFFERS" not in said and [l for l in said.splitlines() if "WRONG" in l and "attention" in l] and not [l for l in said.splitlines() if "WRONG" in l and "mega_qkv" in l]

def test_report_command(folder, capsys):
    "As it is typed: `vllm_mlx ane-report`."
    words = ["ane-report", "--model", "nano-hybrid", "--draft", "untrained", "--context", "64", "--max-tokens", "4", "--folder", str(folder)]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert said.startswith("# ANE report") and "untrained" in said and "reference float16" in said

def test_mistakes_of_the_command(monkeypatch, capsys):
    "One line on standard error, before a model is loaded; and a failed check is no success."
    with monkeypatch.context() as m:
        m.setattr(report, "load", lambda name: pytest.fail("a model was loaded before the mistake was found"))
        for words, phrase in ((["--context", "0"], "--context is 0: a number above 0"), (["--max-tokens", "-3"], "--max-tokens is -3"), (["--seconds", "inf"], "--seconds is inf"), (["--draft", "x"], "--draft is x without --model: name the target"), (["--contexts", "9"], "--contexts"), (["--context", "x"], "'x'")):
            assert cli.main(["ane-report", *words]) == 2
            out, err = capsys.readouterr()
            assert out == "" and phrase in err and err.count("\n") == 1
    for line, code in (("- fine", 0), ("- x **WRONG**: at most", 2), ("- text DIFFERS from", 2), ("- FAILED with", 2)):
        with monkeypatch.context() as m:
            m.setattr(report, "load", lambda name: (None, None)); m.setattr(report, "load_dflash", lambda *a: None)
            m.setattr(report, "ane_report", lambda *a, **k: iter([line]))
            assert cli.main(["ane-report", "--model", "x", "--draft", "x"]) == code and line in capsys.readouterr().out
    assert cli.main(["ane-report", "--help"]) == 0 and "--context" in capsys.readouterr().out
    with monkeypatch.context() as m:
        def missing(*a, **k): raise ImportError("pip install 'coremltools>=9.0,<10'")
        m.setattr(report, "run_report", missing)
        assert cli.main(["ane-report"]) == 2 and "coremltools>=9.0,<10" in capsys.readouterr().err

def test_every_shipped_draft_is_reported(monkeypatch, capsys):
    "Without a model: all of them, and one failure is the command's."
    asked, bad = [], []
    monkeypatch.setattr(report, "DRAFTS", dict(a=dict(target="A"), b=dict(target="B"), c=dict(target="C")))
    monkeypatch.setattr(report, "default_draft", lambda model: dict(A="a", C="c").get(model))     # b has no files here
    monkeypatch.setattr(report, "load", lambda name: (name, None))
    monkeypatch.setattr(report, "load_dflash", lambda name, target: asked.append((name, target)) or name)
    monkeypatch.setattr(report, "ane_report", lambda draft, *a, **k: iter(["- FAILED with" if draft in bad else "- fine"]))
    assert report.main([]) == 0 and asked == [("a", "A"), ("c", "C")] and "model A, draft a" in capsys.readouterr().out
    bad.append("a")
    assert report.main([]) == 1 and len(asked) == 4
    monkeypatch.setattr(report, "default_draft", lambda model: None)
    assert report.main([]) == 2 and "no draft is shipped" in capsys.readouterr().err

def test_report_module(capsys):
    assert report.main(["--model", "nano-hybrid", "--draft", "/no/such/draft"]) == 2
    assert "/no/such/draft" in capsys.readouterr().err

def test_power_of_a_block(taught, folder):
    "With a tool that stands in: the report divides energy by blocks."
    target, tokenizer, draft, prompts, _ = taught
    model = ANEDraftModel(draft, "reference", context=64, folder=folder).load_weights()
    report.prepare_step(model, prompts[0])
    said = report._power(model, 0.3, PowerMeter("macmon", 30_000, [sys.executable, "-c", TOOL % 2.0], wait_s=60))
    assert "mean 2000 mW" in said and "mJ a block" in said
    assert "not available here" in report._power(model, 0.05, PowerMeter("macmon", command=["no-such-tool"]))
