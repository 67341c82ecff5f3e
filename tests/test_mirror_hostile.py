"""Mirror-SD where it hurts: interrupts between any two steps, threads that cannot start or do not end, the collector in a worker, the end of the interpreter, and input that cannot be."""
import copy, gc, os, signal, subprocess, sys, textwrap, threading, time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import stream_generate as mlx_stream_generate
from mlx_lm.models.cache import make_prompt_cache

import vllm_mlx
import vllm_mlx.mirror as mirror
from vllm_mlx.ane.draft import forbid_mlx
from vllm_mlx.alignment import Branch
from vllm_mlx.dflash import tiny_draft
from vllm_mlx.draft_process import DraftProcess
from vllm_mlx.mirror import DraftProcessor, MirrorStats, MLXDraftProcessor, ProcessDraftProcessor, Proposal, SpecCache, WorkerError, stream_mirror
from vllm_mlx.mirror_sim import costs_of
from vllm_mlx.models import load, tiny_model
from vllm_mlx.processors import Job
from vllm_mlx.specprefill import SpecPrefill
from vllm_mlx.speculate import SpecStats, stream_generate

PROMPT = np.random.default_rng(0).integers(1, 500, 30).tolist()


def tokens_of(gen): return [r.token for r in gen]
def workers(): return [t for t in threading.enumerate() if t.name.startswith("draft on")]

@pytest.fixture(scope="module")
def ids(): return load("smollm2-135m")[1]

@pytest.fixture(scope="module")
def family(ids):
    known = {}
    def get(name):
        if name not in known:
            model = tiny_model(name)
            known[name] = model, tiny_draft(model, block_size=6), PROMPT + tokens_of(mlx_stream_generate(model, ids, mx.array(PROMPT), 70)) + [0] * 40
        return known[name]
    return get

@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    for t in workers(): t.join(5)
    assert workers() == []

class Told(DraftProcessor):
    "Gives the text, but for every `wrong`th token."
    def __init__(self, text, wrong=0, name="a script"): super().__init__(name); self.text, self.wrong = text, wrong
    def work(self, job):
        right = lambda i: 511 - self.text[i] if self.wrong and i % self.wrong == 0 else self.text[i]
        starts = [b.position + len(b.block) for b in job.branches]
        return [Proposal([right(i) for i in range(s, s + b.drafts)], None, [{right(i): 1.0} for i in range(s, s + b.drafts)] if job.top > 1 else None) for s, b in zip(starts, job.branches)]

def assert_exact(model, cache):
    "The target's cache and the draft's context hold the cache's tokens, no more and no less."
    fresh, probe = make_prompt_cache(model), mx.array([[9]])
    assert not cache.unread and cache.context.offset + cache.pending == len(cache.tokens)
    model(mx.array([cache.tokens]), cache=fresh)
    assert mx.abs(model(probe, cache=copy.deepcopy(cache.target)) - model(probe, cache=fresh)).max().item() < 2e-3


# --- interrupts

@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
@pytest.mark.parametrize("early, where", [(False, "verify_with"), (True, "forward_suffix"), (True, "HALVES"), (True, "process_rows"), (True, "rollback")])
def test_an_interrupt_after_any_step_of_a_verification(name, early, where, family, ids, monkeypatch):
    "The block is in the target's cache by then, and must go; the text goes on where it was."
    model, draft, text = family(name)
    for how in ("plain", "layers", "whole"):
        calls, cache, out = [0], SpecCache(model, draft), []
        def after(real):
            def call(*a, **k):
                got = real(*a, **k)
                calls[0] += 1
                if calls[0] == 3: raise KeyboardInterrupt
                return got
            return call
        with monkeypatch.context() as m:
            m.setattr(mirror, where, {k: after(f) for k, f in mirror.HALVES.items()} if where == "HALVES" else after(getattr(mirror, where)))
            with pytest.raises(KeyboardInterrupt):
                for r in stream_mirror(model, draft, ids, PROMPT, max_tokens=40, block_size=4, early=early, verify=how, processor=Told(text, 5), fresh="target", fall_back=False, prompt_cache=cache): out.append(r.token)
        assert calls[0] == 3 and out == text[30:30 + len(out)] and cache._run is None
        assert_exact(model, cache)
        assert tokens_of(stream_generate(model, draft, ids, [], max_tokens=8, prompt_cache=cache)) == text[30 + len(out):38 + len(out)]

@pytest.mark.parametrize("kind", [MLXDraftProcessor, ProcessDraftProcessor])
@pytest.mark.parametrize("where", ["after open", "in take_over", "no thread"])
def test_an_open_that_fails_leaves_nothing_open(where, kind, family, ids, monkeypatch):
    model, draft, text = family("llama")
    p = kind(draft)
    def hit(*a, **k): raise KeyboardInterrupt
    with monkeypatch.context() as m:
        if where == "after open":
            real = p.open
            m.setattr(p, "open", lambda c=None: (real(c), hit()))
        elif where == "in take_over":
            real = p.take_over
            m.setattr(p, "take_over", lambda c: (real(c), hit()))
        else: m.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("can't start new thread")))
        if where == "no thread":
            with pytest.raises(WorkerError, match="could not be started"): tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=8, processor=p, fresh="processor", fall_back=False))
            stats = MirrorStats()
            assert tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=8, processor=p, fresh="processor", fall_back=False, on_failure="serial", stats=stats)) == text[30:38] and len(stats.failures) == 1
        else:
            with pytest.raises(KeyboardInterrupt): tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=8, processor=p, fresh="processor", fall_back=False))
    assert p.thread is None and workers() == [] and p.close() is None
    if kind is ProcessDraftProcessor: assert not p.process.taken
    assert tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=8, processor=p, fresh="processor", fall_back=False)) == text[30:38]
    if kind is ProcessDraftProcessor: p.process.end()

def test_a_second_interrupt_while_it_is_closed(family):
    "The processor is free all the same, and the thread ends with its work."
    _, draft, text = family("llama")
    gate = threading.Event()
    class Slow(Told):
        def work(self, job): gate.wait(20); return super().work(job)
    p = Slow(text); p.open(); p.start(Job([Branch((), (3,), 30, 2)]))
    class Hit:
        def __getattr__(self, name): return getattr(thread, name)
        def join(self, timeout=None): raise KeyboardInterrupt
    thread, p.thread = p.thread, Hit()
    with pytest.raises(KeyboardInterrupt): p.close()
    assert p.thread is None and not p.busy
    p.open(); p.start(Job([Branch((), (3,), 30, 2)])); gate.set()
    assert p.join(20)[0][0].tokens == text[31:33] and p.close() is None
    thread.join(5); assert not thread.is_alive()


# --- threads that are left behind, and the collector

def test_a_thread_left_behind_shares_nothing_with_the_next(family):
    "Its stream, context and answers are of the generation that gave it up."
    model, draft, text = family("llama")
    gate, seen = threading.Event(), []
    class Hangs(MLXDraftProcessor):
        def work(self, job):
            if not seen: seen.append((job.context, threading.current_thread())); gate.wait(20)
            return super().work(job)
    p = Hangs(draft); p.open(); first = p._stream
    p.start(Job([Branch((), (3,), 0, 2)]))
    with pytest.raises(WorkerError, match="no answer in 0.1 s"): p.join(0.1)
    assert "its thread is left to itself" in str(p.close(0.1)) and p.left is seen[0][1] and p._stream is None
    p.open(); rows = mx.random.normal((1, 5, draft.fc.weight.shape[1]))
    assert p._stream is not first
    p.start(Job([Branch((), (3,), 5, 2)], [(rows, np.arange(5))])); p.join(20)
    gate.set(); seen[0][1].join(20)
    assert not seen[0][1].is_alive() and p.context.offset == 5 and seen[0][0] is not p.context and seen[0][0].offset == 0 and p._out.empty()
    assert p.close() is None

def test_programs_that_are_still_at_work_are_not_opened_again(family):
    gate = threading.Event()
    class One(Told):
        several = False
        def work(self, job): gate.wait(20); return super().work(job)
    p = One(family("llama")[2]); p.open(); p.start(Job([Branch((), (3,), 30, 2)]))
    assert "left to itself" in str(p.close(0.1))
    with pytest.raises(WorkerError, match="a script is still at a job that nobody waited for"): p.open()
    gate.set(); p.left.join(10)
    p.open(); assert p.close() is None

def test_a_worker_that_ends_by_itself(family):
    class Gone(Told):
        def around(self):
            class No:
                def __enter__(self): raise OSError("no device")
                def __exit__(self, *a): pass
            return No()
    p, hook = Gone(family("llama")[2]), threading.excepthook
    threading.excepthook = lambda args: None
    try:
        p.open(); p.start(Job([Branch((), (3,), 30, 2)]))
        began = time.perf_counter()
        with pytest.raises(WorkerError, match="ended without an answer"): p.join(30)
        assert time.perf_counter() - began < 10
    finally: p.close(); threading.excepthook = hook

def test_both_failures_are_told(family, ids):
    model, draft, text = family("llama")
    gate = threading.Event()
    class Hangs(Told):
        def work(self, job): gate.wait(20); return super().work(job)
    stats = MirrorStats()
    assert tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=12, processor=Hangs(text), fresh="processor", timeout=0.2, fall_back=False, on_failure="serial", stats=stats)) == text[30:42]
    gate.set()
    assert [str(f) for f in stats.failures] == ["the draft on a script gave no answer in 0.2 s", "the draft on a script did not end in 0.2 s; its thread is left to itself"]

@pytest.mark.parametrize("whose", ["its own", "another's", "a serial one in another's"])
def test_the_collector_runs_in_a_worker(whose, family, ids, monkeypatch):
    "Python collects cycles in whichever thread allocates. No MLX call is made there; who looks at the cache next makes those that are left."
    model, draft, text = family("qwen3_5")
    cache, armed, settled, unraisable = SpecCache(model, draft), [], [], []
    class Collects(Told):
        def work(self, job):
            if armed: armed.clear(); gc.collect()
            return super().work(job)
    monkeypatch.setattr(sys, "unraisablehook", lambda e: unraisable.append(e.exc_value))
    real = mirror._Run.settle
    monkeypatch.setattr(mirror._Run, "settle", lambda self: (settled.append(threading.current_thread().name), real(self))[1])
    mine, others = Collects(text), Collects(text)
    kw = dict(max_tokens=30, block_size=4, fall_back=False, fresh="processor")
    gen = stream_generate(model, draft, ids, PROMPT, max_tokens=30, block_size=4, prompt_cache=cache) if whose.startswith("a serial") else stream_mirror(model, draft, ids, PROMPT, processor=mine, prompt_cache=cache, **kw)
    out = [next(gen).token for _ in range(7)]
    gc.collect(); gc.disable()
    try:
        loop = [gen]; loop.append(loop); del gen, loop                                              # only the collector finds it now
        armed.append(True)
        if whose == "its own":
            if not mine.busy: mine.start(Job([Branch((), (text[37],), 37, 2)]))
            else: armed.clear(); mine._answer(20); mine.busy = False; armed.append(True); mine.start(Job([Branch((), (text[37],), 37, 2)]))
            for _ in range(2000):
                if not armed and not workers(): break
                time.sleep(0.005)
        else: assert tokens_of(stream_mirror(model, draft, ids, PROMPT, processor=others, **kw)) == text[30:60]
    finally: gc.enable()
    assert not armed and unraisable == [] and not any(n.startswith("draft on") for n in settled) and mine.thread is None and others.thread is None
    later = stream_mirror(model, draft, ids, PROMPT, processor=mine, **kw)                         # its processor is another's by now
    seen = [next(later).token for _ in range(6)]
    if mine.thread is None: mine.open()
    thread = mine.thread
    assert cache.tokens == PROMPT + out
    assert_exact(model, cache)
    assert tokens_of(stream_generate(model, draft, ids, [], max_tokens=8, prompt_cache=cache)) == text[37:45]
    assert mine.thread is thread and thread.is_alive() and seen + tokens_of(later) == text[30:60]

@pytest.mark.parametrize("kind", ["thread", "process"])
def test_two_threads_want_one_processor(kind, family, ids):
    "One gets it, the other is told, and neither takes anything from the other."
    model, draft, text = family("llama")
    base, here, go = MLXDraftProcessor if kind == "thread" else ProcessDraftProcessor, threading.Barrier(2), {}
    class Slow(base):
        def take_over(self, context): super().take_over(context); time.sleep(0.3)
    p = Slow(draft)
    def use(name):
        here.wait(20)
        try: p.open(); go[name] = "open"
        except RuntimeError as e: go[name] = str(e)
    threads = [threading.Thread(target=use, args=(i,)) for i in range(2)]
    for t in threads: t.start()
    for t in threads: t.join(120)
    assert sorted(v.endswith("is in use: close it first") for v in go.values()) == [False, True] and "open" in go.values()
    p.start(Job([Branch((), (3,), 0, 2)])); assert len(p.join(30)[0]) == 1 and p.close() is None
    done = {}
    def told(name):
        here.wait(20)
        try: done[name] = tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=12, processor=q, fresh="processor", fall_back=False))
        except RuntimeError as e: done[name] = str(e)
    class Late(Told):
        def take_over(self, context): time.sleep(0.3)
    q = Late(text)
    threads = [threading.Thread(target=told, args=(i,)) for i in range(2)]
    for t in threads: t.start()
    for t in threads: t.join(120)
    fine = [v for v in done.values() if v == text[30:42]]
    assert fine and all(v == text[30:42] or "is in use by another generation" in str(v) for v in done.values())
    if kind == "process": p.process.end()

@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="the system's threads cannot be counted here")
def test_generations_leave_nothing_in_the_system(family, ids):
    "Neither threads, nor streams, which have one each, nor files."
    model, draft, text = family("llama")
    count = lambda: (len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))
    def once(): assert tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=8, fresh="processor", fall_back=False)) == text[30:38]; mx.clear_cache()
    for _ in range(3): once()
    before = count()
    for _ in range(12): once()
    assert all(b <= a + 2 for a, b in zip(before, count())), (before, count())


# --- the end of the interpreter, and forks

@pytest.mark.parametrize("what", ["suspended", "error", "busy", "finished", "serial", "process"])
def test_the_interpreter_ends_in_peace(what, tmp_path):
    script = tmp_path / "main.py"
    script.write_text(textwrap.dedent("""
        import vllm_mlx, sys, time
        from vllm_mlx.alignment import Branch
        from vllm_mlx.dflash import tiny_draft
        from vllm_mlx.models import load, tiny_model
        from vllm_mlx.mirror import MLXDraftProcessor, ProcessDraftProcessor, stream_mirror
        from vllm_mlx.processors import Job
        from vllm_mlx.speculate import stream_generate
        what, model = sys.argv[1], tiny_model("llama")
        draft = tiny_draft(model)
        if what == "busy":
            p = MLXDraftProcessor(draft); p.open()
            p.start(Job([Branch((), (t,), t, 4) for t in range(400)])); time.sleep(0.05)
        else:
            ids = load("smollm2-135m")[1]
            gen = stream_generate(model, draft, ids, list(range(5, 30)), max_tokens=40) if what == "serial" else stream_mirror(model, draft, ids, list(range(5, 30)), max_tokens=40, fall_back=False, fresh="processor" if what != "process" else "target", processor=ProcessDraftProcessor(draft) if what == "process" else None)
            for i, r in enumerate(gen):
                if what != "finished" and i == 8: break
            if what == "error": 1 / 0
        print("end", flush=True)
    """))
    done = subprocess.run([sys.executable, str(script), what], capture_output=True, text=True, timeout=120, env=dict(os.environ, PYTHONPATH=str(Path(vllm_mlx.__file__).parent.parent)))
    if what == "error": assert done.returncode == 1 and done.stderr.rstrip().endswith("ZeroDivisionError: division by zero"), (done.returncode, done.stderr)
    else: assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")

@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_does_not_keep_the_process(tmp_path):
    "Its maker is killed, the maker's fork lives on: the draft's process ends."
    script = tmp_path / "main.py"
    script.write_text(textwrap.dedent("""
        import vllm_mlx, os, time
        from vllm_mlx.dflash import tiny_draft
        from vllm_mlx.draft_process import DraftProcess
        from vllm_mlx.models import tiny_model
        p = DraftProcess(tiny_draft(tiny_model("llama"))); p.open()
        pid = os.fork()
        if pid == 0: time.sleep(120); os._exit(0)
        print(os.getpid(), pid, p._process.pid, flush=True)
        time.sleep(120)
    """))
    with subprocess.Popen([sys.executable, "-W", "ignore", str(script)], stdout=subprocess.PIPE, text=True, env=dict(os.environ, PYTHONPATH=str(Path(vllm_mlx.__file__).parent.parent))) as main:
        maker, fork, theirs = map(int, main.stdout.readline().split())
        try:
            os.kill(maker, signal.SIGKILL); main.wait()
            def gone(pid):
                try: os.kill(pid, 0)
                except ProcessLookupError: return True
                try: return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
                except OSError: return False
            for _ in range(200):
                if gone(theirs): break
                time.sleep(0.1)
            assert gone(theirs) and not gone(fork)
        finally: os.kill(fork, signal.SIGKILL)

def test_an_interrupt_from_the_keyboard_is_not_for_the_draft(family):
    p = DraftProcess(family("llama")[1])
    assert os.getsid(p._process.pid) != os.getsid(0)                                             # also while it starts
    p.open(); p.end()


# --- timestamps, and input that cannot be

@pytest.mark.parametrize("slow", [0.0, 0.01])
def test_a_suffix_begins_where_its_prefix_ends(slow, family, ids):
    "Also when a dropped draft is booked in between."
    model, draft, text = family("qwen3_5")
    class Slow(Told):
        def work(self, job): self._stop.wait(slow); return super().work(job)
    stats = MirrorStats()
    tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=40, block_size=4, early=True, processor=Slow(text, 3), fresh="target", fall_back=False, stats=stats))
    ends = {s.round: s.end for s in stats.spans if s.what == "prefix"}
    suffixes = [s for s in stats.spans if s.what == "suffix"]
    assert stats.dropped and len(suffixes) == len(ends) > 5 and all(s.begin == ends[s.round] for s in suffixes)
    target = sorted((s.begin, s.end) for s in stats.spans if s.side == "target")
    assert all(a[1] <= b[0] for a, b in zip(target, target[1:]))                                   # one thing after another
    c = costs_of(stats)
    assert 0 <= c.prefix <= c.verify

def test_join_without_a_job(family):
    p = Told(family("llama")[2])
    with pytest.raises(WorkerError, match="a script is not open"): p.join()
    p.open()
    with pytest.raises(RuntimeError, match="a script has no job under way"): p.join()
    p.start(Job([Branch((), (3,), 30, 2)])); p.close()
    with pytest.raises(WorkerError, match="a script is not open"): p.join()

def test_a_processor_in_use_is_refused_before_anything_is_read(family, ids):
    model, draft, text = family("llama")
    p, cache = Told(text), SpecCache(model, draft)
    first = stream_mirror(model, draft, ids, PROMPT, max_tokens=20, processor=p, fresh="processor", fall_back=False)
    out = [next(first).token for _ in range(4)]
    with pytest.raises(RuntimeError, match="a script is in use by another generation"): tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=20, processor=p, prompt_cache=cache))
    assert cache.tokens == [] and out + tokens_of(first) == text[30:50]
    assert tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=20, processor=p, prompt_cache=cache)) == text[30:50]

def test_bad_input_changes_nothing(family, ids):
    model, draft, text = family("llama")
    other, less = tiny_draft(model, block_size=6, target_layer_ids=[0, 1]), tiny_draft(model, block_size=6, n_layers=3)
    used = MirrorStats(); tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=3, stats=used))
    sparse = SpecPrefill(model, threshold=0, keep_pct=0.5)
    for kw, words in ((dict(prompt_cache=SpecCache(model, other)), "it was made for another draft"), (dict(prompt_cache=SpecCache(model, less)), "a draft with 3 layers"),
                      (dict(prompt_cache=SpecCache(tiny_model("qwen3_5", num_hidden_layers=8), draft)), "of another model"), (dict(processor=MLXDraftProcessor(other)), "reads layers [0, 1]"),
                      (dict(processor=draft), "a DraftProcessor is needed"), (dict(processor="cpu"), "processor is 'cpu'"), (dict(stats=used), "of another generation (3 tokens, length)"), (dict(stats=SpecStats()), "stats is a SpecStats"),
                      (dict(timeout=None), "timeout is None"), (dict(timeout="5"), "timeout is '5'"), (dict(timeout=0), "timeout is 0"), (dict(early="no"), "early is 'no'"), (dict(early=True, exit_layer=1.0), "exit_layer is 1.0"),
                      (dict(exit_layer=2), "exit_layer is 2: only"), (dict(sparse=sparse, sparse_options=dict(foo=1)), "sparse_options has 'foo'"), (dict(prefill_step_size=2.5), "prefill_step_size is 2.5"), (dict(branches=2.0), "branches is 2.0")):
        with pytest.raises(ValueError) as e: stream_mirror(model, draft, ids, PROMPT, **kw)
        assert words in str(e.value), (kw, str(e.value))
        if "prompt_cache" in kw: assert kw["prompt_cache"].tokens == []
    for good in (dict(prefill_step_size=np.int64(16)), dict(timeout=np.float32(5)), dict(early=np.True_, exit_layer=np.int64(1))): assert tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=4, processor=Told(text), **good)) == text[30:34]
    twice = SpecStats(); first, second = (stream_generate(model, draft, ids, PROMPT, max_tokens=4, stats=twice) for _ in range(2))
    assert tokens_of(first) == text[30:34]
    with pytest.raises(ValueError, match="of another generation"): tokens_of(second)
    p = Told(text); p.open(); job = Job([Branch((), (3,), 30, 2)])
    p.start(job); p.drop(); p.settle(10); p.start(job)
    assert p.join(10)[0][0].tokens == text[31:33] and not job.unwanted and p.close() is None
    with pytest.raises(ValueError, match="of another generation"): stream_generate(model, draft, ids, PROMPT, stats=SpecStats(finish_reason="stop"))
    with pytest.raises(ValueError, match="prefill_step_size is 2.5"): stream_generate(model, draft, ids, PROMPT, prefill_step_size=2.5)
    for forever in (float("inf"), 1e12): assert tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=6, processor=Told(text), fresh="processor", fall_back=False, timeout=forever)) == text[30:36]


# --- what the loop does with drafts made ahead

@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("wrong", [0, 3, 5])
def test_only_what_applies_counts_as_a_hit(wrong, apart, family, ids):
    "With one branch a hit needs the whole block right, and the token after it, whether the loop waits for drafts that miss or not."
    model, draft, text = family("qwen3_5")
    p, stats = Told(text, wrong), MirrorStats()
    p.apart = apart
    assert tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=40, block_size=4, processor=p, fresh="processor", fall_back=False, stats=stats)) == text[30:70]
    assert stats.hits and all(h == 0 for accepted, (h, _) in stats.hits.items() if accepted < 3)
    if wrong == 0: assert all(m == 0 for _, m in stats.hits.values()) and len(stats.ahead) > 5 and set(stats.ahead[:-2]) == {4}
    else: assert sum(m for _, m in stats.hits.values()) > 2

def test_a_draft_from_the_old_anchor_begins_where_the_text_goes_on(family, ids):
    "Condition \"long\": what the block used up of it is cut off."
    model, draft, text = family("llama")
    for wrong in (0, 7):
        p, stats = Told(text, wrong), MirrorStats()
        p.apart = False
        assert tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=40, block_size=4, condition="long", processor=p, fresh="processor", fall_back=False, stats=stats)) == text[30:70]
        assert stats.useful and (min(stats.ahead[:-2]) == 4 if not wrong else max(stats.ahead) > 1)

def test_drawn_drafts_made_ahead_keep_the_law(family, ids):
    "Every place has three tokens of known probability, whatever came before; the draft has other ones. The tokens follow the target's, drafted ahead or not."
    model, draft, _ = family("llama")
    law, other, V = np.array([0.5, 0.3, 0.2]), np.array([0.3, 0.5, 0.2]), draft.config.vocab_size
    at = lambda i: np.random.default_rng(i).choice(np.arange(10, 500), 3, replace=False)
    def row(i, p):
        out = np.full(V, -40.0, np.float32)
        out[at(i)] = np.log(p)
        return out
    class Other(DraftProcessor):
        apart = False
        def work(self, job):
            lg = lambda b: np.stack([row(b.position + len(b.block) + i, other) for i in range(b.drafts)])
            return [Proposal(lg(b).argmax(-1).tolist(), lg(b), [dict(zip(at(b.position + len(b.block) + i).tolist(), other)) for i in range(b.drafts)]) for b in job.branches]
    counts, hits, ahead = np.zeros(3), 0, 0
    for seed in range(RUNS := 40):
        stats = MirrorStats()
        got = tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=16, block_size=3, temperature=1.0, seed=seed, proposal="sampled", branches=6, condition="known", fresh="processor", fall_back=False, processor=Other("a law"),
                                      logits_processors=[lambda tokens, logits: mx.broadcast_to(mx.array(row(len(tokens), law)), logits.shape)], stats=stats))
        for i, t in enumerate(got): counts[at(30 + i).tolist().index(t)] += 1
        hits, ahead = hits + stats.useful, ahead + sum(n - 1 for n in stats.ahead)
    want = law * counts.sum()
    assert hits > RUNS and ahead > RUNS / 2 and counts.sum() == 16 * RUNS
    assert ((counts - want) ** 2 / want).sum() < 9.2, counts                                       # two degrees of freedom: one in a hundred

@pytest.mark.parametrize("kind", ["programs", "process"])
def test_a_trap_in_the_worker(kind, family, ids, tmp_path):
    "MLX raises in the worker's thread there: nothing calls it. And the trap is one."
    model, draft, text = family("llama")
    if kind == "programs":
        pytest.importorskip("coremltools", reason="not available here: pip install 'coremltools>=9.0,<10'")
        from vllm_mlx.ane.draft import ANEDraftModel
        make = lambda: mirror.ANEDraftProcessor(ANEDraftModel(draft, "reference", context=64, folder=tmp_path, precision="float32").load_weights())
    else: make = lambda: ProcessDraftProcessor(draft)
    for also in (lambda: None, lambda: mx.array([1.0]) + 1):
        p = make(); real = p.timed
        gen = stream_mirror(model, draft, ids, PROMPT, max_tokens=12, block_size=3, processor=p, fresh="processor", fall_back=False)
        out = [next(gen).token for _ in range(2)]                                              # opened, at the latest with the second
        with forbid_mlx() as trap:
            def watched(job):
                trap.watch()
                also()
                return real(job)
            p.timed = watched
            if also() is None: assert out + tokens_of(gen) == text[30:42]
            else:
                with pytest.raises(WorkerError): tokens_of(gen)
        if kind == "process": p.process.end()
