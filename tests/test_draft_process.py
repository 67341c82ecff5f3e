"A draft in a process of its own: the same drafts, the same texts, and nothing left behind, whatever ends it."
import vllm_mlx
import gc, os, re, signal, subprocess, sys, textwrap, threading, time
from pathlib import Path
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import stream_generate as mlx_stream_generate
from vllm_mlx import processors
from vllm_mlx.alignment import Branch, Cancelled, draft_branches
from vllm_mlx.dflash import DFlashDraftModel, make_draft, tiny_draft
from vllm_mlx.draft_process import DraftProcess, ProcessLost, copy_context, copy_draft
from vllm_mlx.graphs import owned
from vllm_mlx.mirror import stream_mirror
from vllm_mlx.models import load, tiny_model
from vllm_mlx.pipeline import MirrorStats
from vllm_mlx.processors import Job, MLXDraftProcessor, ProcessDraftProcessor, WorkerError, processor_for
from vllm_mlx.rounds import SpecCache

PROMPT = np.random.default_rng(0).integers(1, 500, 30).tolist()

@pytest.fixture(scope="module")
def ids(): return load("smollm2-135m")[1]

@pytest.fixture(scope="module")
def shared(pair):
    "One process for the tests that do not end it."
    p = ProcessDraftProcessor(pair[1])
    yield p
    p.process.end()

@pytest.fixture(scope="module")
def pair(ids):
    model = tiny_model("qwen3_5")
    draft = tiny_draft(model, block_size=6)
    return model, draft, PROMPT + [r.token for r in mlx_stream_generate(model, ids, mx.array(PROMPT), 60)]

def gone(pid, seconds=10):
    "Whether a process ends in time; one that nobody waits for counts as gone when it is a zombie."
    for _ in range(int(seconds * 20)):
        try: state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] if Path("/proc/self").exists() else (os.kill(pid, 0), "?")[1]
        except OSError: return True
        if state == "Z": return True
        time.sleep(0.05)
    return False

def tokens_of(gen): return [r.token for r in gen]


# --- the same drafts


OPTIONS = {"plain": {}, "sliding": dict(n_layers=3, layer_types=["sliding_attention", "full_attention", "sliding_attention"], sliding_window=9), "softcap": dict(final_logit_softcapping=5.0), "scaled": dict(input_embedding_scale=3.0, output_multiplier=0.5, attention_bias=True),
           "llama3": dict(rope_scaling=dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64))}

@pytest.mark.parametrize("family, options", list(zip(["llama", "qwen3_5", "gemma3", "llama", "qwen3_5"], OPTIONS)))
def test_it_drafts_as_the_draft_does(family, options):
    model = tiny_model(family)
    draft = tiny_draft(model, **OPTIONS[options])
    features = mx.random.normal((1, 40, draft.fc.weight.shape[1]), key=mx.random.key(1))
    context = draft.make_cache(sink=2, window=16) if options == "plain" else draft.make_cache()
    draft.extend(features[:, :30], context)
    process = DraftProcess(draft)
    try:
        process.open(context)
        branches = [Branch((), (t,), 40, 5) for t in range(3)] + [Branch((5,), (9,), 41, 4, soft=((3, .5), (5, .5)))]
        got, *_ = process.work([(np.array(features[:, 30:]), np.arange(30, 40))], branches, top=4, logits=True)
        draft.extend(features[:, 30:], context)
        for g, w in zip(got, draft_branches(draft, context, branches, None, 4, True)):
            assert g.tokens == w.tokens and np.abs(g.logits - w.logits).max() < 1e-3 and [set(b) for b in g.beliefs] == [set(b) for b in w.beliefs]
    finally: process.end()

@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_and_quantised_tables(dtype):
    "A copy is float32 whatever the draft is; codes stay codes."
    model = tiny_model("qwen3_5", dtype=dtype)
    nn.quantize(model, 32, 4, class_predicate=lambda _, m: isinstance(m, nn.Embedding))
    draft = tiny_draft(model)
    process, same = DraftProcess(draft), DraftProcess(draft, dtype=dtype)
    features = mx.random.normal((1, 12, draft.fc.weight.shape[1]), key=mx.random.key(1))
    exact, c = copy_draft(draft, mx.float32), None
    context = exact.make_cache(); exact.extend(features, context)
    try:
        for p, eps in ((process, 1e-3), (same, 0.2)):
            p.open()
            (g,), *_ = p.work([(np.array(features), np.arange(12))], [Branch((), (4,), 12, 5)], logits=True)
            assert np.abs(g.logits - draft_branches(exact, context, [Branch((), (4,), 12, 5)], None, 1, True)[0].logits).max() < eps * np.abs(g.logits).max()
    finally: process.end(); same.end()

def test_a_context_is_copied(pair):
    _, draft, _ = pair
    c = draft.make_cache()
    draft.extend(mx.random.normal((1, 9, draft.fc.weight.shape[1])), c)
    new = copy_context(c, mx.float16)
    assert new.offset == 9 and new.rows[0].keys.dtype == mx.float16 and c.rows[0].keys.dtype == mx.float32
    draft.extend(mx.zeros((1, 3, draft.fc.weight.shape[1])), new)
    assert (c.offset, new.offset) == (9, 12)


# --- the same texts

@pytest.mark.parametrize("plan", [dict(), dict(early=True), dict(condition="long"), dict(condition="known"), dict(early=True, branches=4), dict(early=True, soft=3), dict(fresh="target"), dict(fresh="processor")], ids=str)
def test_texts(pair, ids, plan, shared):
    model, draft, text = pair
    p = shared
    for _ in range(2):
        cache, stats = SpecCache(model, draft), MirrorStats()
        assert tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=30, processor=p, fall_back=False, prompt_cache=cache, stats=stats, **plan)) == text[30:60]
        assert cache.tokens == text[:60] and p.thread is None and not p.process.taken
        assert stats.of("draft", "ahead") and not stats.failures

def test_one_that_dies_in_the_middle(pair, ids):
    model, draft, text = pair
    for on_failure in ("serial", "raise"):
        p, out, stats, cache = ProcessDraftProcessor(draft), [], MirrorStats(), SpecCache(model, draft)
        try:
            for r in stream_mirror(model, draft, ids, PROMPT, max_tokens=30, processor=p, fall_back=False, fresh="processor", on_failure=on_failure, stats=stats, prompt_cache=cache):
                out.append(r.token)
                if len(out) == 7: os.kill(p.process._process.pid, signal.SIGKILL)
            assert on_failure == "serial" and out == text[30:60] and len(stats.failures) == 1 and "ended" in str(stats.failures[0])
        except WorkerError: assert on_failure == "raise" and out == text[30:30 + len(out)] and cache.tokens == text[:30 + len(out)]
        assert p.thread is None and not [t for t in threading.enumerate() if t.name.startswith("draft on")]
        assert tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=9, processor=p, fall_back=False)) == text[30:39]     # another process
        p.process.end()

def test_one_that_cannot_start(pair, ids):
    model, draft, text = pair
    class Local(type(draft)): pass                                             # cannot be found over there
    odd = copy_draft(draft)
    odd.__class__ = Local
    with pytest.raises(Exception, match="Local"): DraftProcess(odd)
    p, stats = ProcessDraftProcessor(draft), MirrorStats()
    p.process.end()
    type(p)._claim, kept = lambda self: self.process.claim(self._me), type(p)._claim   # as if it had died right before
    try:
        assert tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=20, processor=p, fall_back=False, fresh="processor", on_failure="serial", stats=stats)) == text[30:50]
        assert "could not be started" in str(stats.failures[0])
        with pytest.raises(WorkerError, match="could not be started"): tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=20, processor=p, fall_back=False, fresh="processor"))
    finally: type(p)._claim = kept

def test_abandoned_and_interrupted(pair, ids):
    model, draft, text = pair
    p = ProcessDraftProcessor(draft)
    for n in (1, 4, 9):
        gen = stream_mirror(model, draft, ids, PROMPT, max_tokens=30, processor=p, fall_back=False)
        assert [next(gen).token for _ in range(n)] == text[30:30 + n]
        gen.close()
        assert p.thread is None and not p.busy
    pid = p.process._process.pid
    os.kill(pid, signal.SIGINT)                                                  # Ctrl-C goes to both
    assert tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=9, processor=p, fall_back=False)) == text[30:39] and p.process._process.pid == pid
    p.process.end()
    assert gone(pid)


def test_interrupted_while_it_waits(pair):
    "Half a question, or an answer that nobody read, is no beginning for the next one: the process is ended, and another takes its place."
    _, draft, _ = pair
    def hit(*_): raise KeyboardInterrupt
    old = signal.signal(signal.SIGALRM, hit)
    try:
        p = ProcessDraftProcessor(draft)
        first = p.process
        signal.setitimer(signal.ITIMER_REAL, 0.2)                                    # it has not started yet
        with pytest.raises(KeyboardInterrupt): p.open()
    finally: signal.setitimer(signal.ITIMER_REAL, 0); signal.signal(signal.SIGALRM, old)
    assert not first.alive and gone(first._process.pid) and p.thread is None and not first.taken
    p.open(); p.start(Job([Branch((), (3,), 0, 4)])); assert len(p.join(60)[0][0].tokens) == 4 and p.close() is None and p.process is not first
    p.process.end()


@pytest.mark.parametrize("how", ["interrupted", "impatient"])
def test_no_answer_is_anothers(pair, how):
    _, draft, _ = pair
    def hit(*_): raise KeyboardInterrupt
    p, old = DraftProcess(draft), signal.signal(signal.SIGALRM, hit)
    try:
        p.open(); os.kill(p._process.pid, signal.SIGSTOP)
        if how == "interrupted":
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt): p.work([], [Branch((), (3,), 0, 4)])
        else:
            p.patience = 0.2
            with pytest.raises(ProcessLost, match="did not answer within 0.2 s"): p.open()
    finally: signal.setitimer(signal.ITIMER_REAL, 0); signal.signal(signal.SIGALRM, old)
    assert not p.alive
    with pytest.raises(ProcessLost): p.work([], [Branch((), (3,), 0, 4)])

def test_nobody_reads(pair):
    "Nothing waits for ever: not the beginning of a generation, not giving up a job, not the end."
    _, draft, _ = pair
    rows = np.zeros((1, 3000, draft.fc.weight.shape[1]), np.float32)
    p = DraftProcess(draft, patience=0.5)
    os.kill(p._process.pid, signal.SIGSTOP)
    began = time.perf_counter()
    with pytest.raises(ProcessLost): p.open()                                       # more than fits on the way
    assert time.perf_counter() - began < 10 and gone(p._process.pid)
    p = ProcessDraftProcessor(draft)
    p.open(); os.kill(p.process._process.pid, signal.SIGSTOP)
    began = time.perf_counter()
    p.start(Job([Branch((), (3,), 3000, 4)], [(mx.array(rows), np.arange(3000))]))
    time.sleep(0.2); p.drop()
    assert p.settle(0.1) is None
    failed = p.close(0.2)
    assert "its process was ended" in str(failed) and time.perf_counter() - began < 10 and p.thread is None and not p.process.taken

def test_generations_side_by_side(pair, ids, monkeypatch):
    "Made before either has begun, and in two threads at once: each has a process of its own."
    model, draft, text = pair
    monkeypatch.setattr(processors, "_is_cpu", lambda d: False)                       # as beside a GPU
    make = lambda: processor_for(draft)
    a, b = make(), make()
    monkeypatch.undo()
    assert a.process is b.process
    one, two = (stream_mirror(model, draft, ids, PROMPT, max_tokens=12, processor=p, fall_back=False, fresh="processor") for p in (a, b))
    assert [(x.token, y.token) for x, y in zip(one, two)] == list(zip(text[30:42], text[30:42])) and a.process is not b.process
    b.process.end()
    c = ProcessDraftProcessor(draft, process=a.process)
    got, start = {}, threading.Barrier(2)
    def go(n, p, count):
        start.wait(); p.open(); p.start(Job([Branch((), (t,), 0, 4) for t in range(count)])); got[n] = len(p.join(60)[0]); p.close()
    threads = [threading.Thread(target=go, args=args) for args in (("a", a, 2), ("c", c, 5))]
    for t in threads: t.start()
    for t in threads: t.join(120)
    assert got == dict(a=2, c=5)
    draft2 = copy_draft(draft); draft2._lent.target = model
    a.open(); other = ProcessDraftProcessor(draft2, process=a.process)                 # not one of its weights: left alone
    assert other.process is not a.process and a.process.alive
    a.start(Job([Branch((), (1,), 0, 4)])); assert len(a.join(60)[0]) == 1; a.close()
    for p in (a, c, other): p.process.end()

@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_of_its_maker_leaves_it_alone(tmp_path):
    script = tmp_path / "main.py"
    script.write_text(textwrap.dedent("""
        import vllm_mlx, gc, os
        from vllm_mlx.dflash import tiny_draft
        from vllm_mlx.draft_process import DraftProcess
        from vllm_mlx.alignment import Branch
        from vllm_mlx.models import tiny_model
        p = DraftProcess(tiny_draft(tiny_model('llama'))); p.open()
        pid = os.fork()
        if pid == 0:
            assert not p.alive
            p.end(); del p; gc.collect(); os._exit(0)
        os.waitpid(pid, 0)
        print(p.alive, len(p.work([], [Branch((), (3,), 0, 4)])[0]))
    """))
    done = subprocess.run([sys.executable, "-W", "ignore", str(script)], capture_output=True, text=True, timeout=120, env=dict(os.environ, PYTHONPATH=str(Path(vllm_mlx.__file__).parent.parent)))
    assert done.stdout.split() == ["True", "1"], done.stderr

def test_the_same_package_on_both_sides(tmp_path):
    "Started where the package lies, without being installed: the process finds it too."
    here = Path(vllm_mlx.__file__).parent
    (tmp_path / "vllm_mlx").symlink_to(here)
    code = "import vllm_mlx; from vllm_mlx.dflash import tiny_draft; from vllm_mlx.draft_process import DraftProcess; from vllm_mlx.models import tiny_model; p = DraftProcess(tiny_draft(tiny_model('llama'))); p.open(); print(vllm_mlx.__file__, open(f'/proc/{p._process.pid}/environ').read().split('PYTHONPATH=')[1].split(':')[0] if __import__('os').path.exists('/proc/self/environ') else '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path, env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    assert done.returncode == 0, done.stderr
    file, first = (done.stdout.split() + [""])[:2]
    assert file.startswith(str(tmp_path)) and first.rstrip("\0") in ("", str(tmp_path))


# --- giving up

def test_cancelled_between_branches(pair, shared):
    _, draft, _ = pair
    p = shared.process
    p.open()
    rows = np.random.default_rng(0).standard_normal((1, 8, draft.fc.weight.shape[1])).astype(np.float32)
    many = [Branch((), (t,), 8 + t, 4) for t in range(400)]                        # each a forward of its own
    stop = threading.Timer(0.2, p.cancel); stop.start()
    began = time.perf_counter()
    with pytest.raises(Cancelled): p.work([(rows, np.arange(8))], many)
    took = time.perf_counter() - began; stop.join()
    p.cancel()                                                                   # nothing is under way: it does not hit the next job
    got, *_ = p.work([], many[:1])
    c = draft.make_cache(); draft.extend(mx.array(rows), c)
    assert got[0].tokens == draft_branches(draft, c, many[:1])[0].tokens          # the features of the job that was given up are there
    began = time.perf_counter(); p.work([], many[1:41]); assert took < 10 * (time.perf_counter() - began) + 1

def test_dropped_jobs(pair, shared):
    _, draft, _ = pair
    c, job = draft.make_cache(), Job([Branch((), (3,), 0, 4)])
    for p in (MLXDraftProcessor(draft), shared):
        p.open(c)
        for _ in range(5):
            p.start(Job(list(job.branches)))
            p.drop(); p.drop()
            with pytest.raises(RuntimeError, match="busy"): p.start(job)
            span = p.settle(30)
            assert span is None and not p.busy or span[0] <= span[1] and span[2] in (True, False)
            p.start(Job(list(job.branches)))
            assert p.join(30)[0][0].tokens == draft_branches(draft, c, job.branches)[0].tokens and p.settle() is None
        p.start(Job(list(job.branches))); p.drop()
        assert p.close() is None and not p.dropped
        p.open(c); p.start(Job(list(job.branches))); assert len(p.join(30)[0]) == 1; p.close()

def test_nobody_waits_for_what_cannot_apply(pair, ids):
    "A second processor that is slow and always wrong about the ending: the target never waits for it."
    model, draft, text = pair
    class Slow(processors.DraftProcessor):
        def work(self, job):
            if job.branches[0].presumed: self._stop.wait(0.1)
            return [p for b in job.branches for p in [processors.Proposal([511 - text[b.position + len(b.block) + i] for i in range(b.drafts)])]]
    class Shared(Slow): apart = False
    took = {}
    for kind in (Slow, Shared):
        stats, p = MirrorStats(), kind("a slow one")
        assert tokens_of(stream_mirror(model, draft, ids, PROMPT, max_tokens=16, block_size=3, processor=p, fresh="target", fall_back=False, stats=stats)) == text[30:46]
        took[kind], jobs = stats.clock()["stall"], stats.dropped
        assert (jobs > 0) == (kind is Slow) and p.thread is None
    assert took[Slow] == 0 < took[Shared]                                           # the other way it waits for each


# --- who lives how long

def test_it_ends_with_whoever_made_it(pair, tmp_path):
    script = tmp_path / "main.py"                                                 # no guard around its main part, as people write them
    script.write_text(textwrap.dedent("""
        import vllm_mlx, os, sys, signal
        from vllm_mlx.dflash import tiny_draft
        from vllm_mlx.draft_process import DraftProcess
        from vllm_mlx.alignment import Branch
        from vllm_mlx.models import tiny_model
        draft = tiny_draft(tiny_model('llama'))
        p = DraftProcess(draft); p.open()
        print(p._process.pid, len(p.work([], [Branch((), (3,), 0, 4)])[0]), flush=True)
        how = sys.argv[1]
        if how == 'kill': os.kill(os.getpid(), signal.SIGKILL)
        if how == 'exit': os._exit(4)
    """))
    (tmp_path / "queue.py").write_text("raise ImportError('a module of the user that is called like one of the library')")
    for how, code in (("end", 0), ("exit", 4), ("kill", -9)):
        done = subprocess.run([sys.executable, "-c", f"import sys; sys.argv = ['main.py', {how!r}]; exec(open({str(script)!r}).read())"], capture_output=True, text=True, timeout=120, cwd=Path(vllm_mlx.__file__).parent.parent)
        assert done.returncode == code, done.stderr
        pid, n = map(int, done.stdout.split())
        assert n == 1 and gone(pid) and not done.stderr.strip(), done.stderr

def test_it_does_not_run_the_main_script_again(tmp_path):
    script = tmp_path / "main.py"
    script.write_text("import vllm_mlx\nprint('once', flush=True)\nfrom vllm_mlx.dflash import tiny_draft\nfrom vllm_mlx.draft_process import DraftProcess\nfrom vllm_mlx.models import tiny_model\np = DraftProcess(tiny_draft(tiny_model('llama'))); p.open(); print(p.ready)\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, env=dict(os.environ, PYTHONPATH=str(Path(vllm_mlx.__file__).parent.parent)))
    assert done.stdout.split() == ["once", "True"], done.stderr

def test_with_its_object(pair):
    _, draft, _ = pair
    p = DraftProcess(draft)
    pid, before = p._process.pid, len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else None
    p.open()
    del p; gc.collect()
    assert gone(pid, 5)
    if before is not None: assert len(os.listdir("/proc/self/fd")) <= before - 2    # both ends of what it had

def test_weights_that_changed(pair):
    model, _, _ = pair
    draft = tiny_draft(model)
    p = ProcessDraftProcessor(draft)
    first = p.process
    p.open(); p.start(Job([Branch((), (3,), 0, 4)], top=1, logits=True)); a = p.join(60)[0][0].logits; p.close()
    assert p.process is first
    draft.update(dict(fc=dict(weight=draft.fc.weight * 1), norm=dict(weight=draft.norm.weight * 3)))
    p.open(); p.start(Job([Branch((), (3,), 0, 4)], top=1, logits=True)); b = p.join(60)[0][0].logits; p.close()
    assert p.process is not first and not first.alive and np.abs(a - b).max() > 0.1
    with pytest.raises(ValueError, match="no target"): ProcessDraftProcessor(DFlashDraftModel(draft.config))
    p.process.end()

def test_beside_a_gpu_a_process_is_chosen_and_kept(pair, monkeypatch):
    model, _, _ = pair
    draft = tiny_draft(model)
    assert isinstance(processor_for(draft), MLXDraftProcessor)
    monkeypatch.setattr(processors.mx, "default_device", lambda: mx.Device(mx.gpu, 0))     # as on a Mac, or beside an NVIDIA GPU
    p = processor_for(draft)
    assert isinstance(p, ProcessDraftProcessor) and p.apart and p.name == "the CPU, in a process of its own"
    again = processor_for(draft)
    assert again is not p and again.process is p.process
    p.open()
    second = processor_for(draft)
    assert second.process is not p.process                                         # two generations at a time
    again.open()                                                                   # made before the other had begun
    assert again.process is not p.process and again.process.taken and p.process.taken
    p.close(); again.close()
    assert not p.process.taken and owned(draft)["process"] is p.process
    pid = p.process._process.pid
    second.process.end(); again.process.end()
    del p, again, second
    gc.collect()
    assert owned(draft)["process"].alive
    del draft; gc.collect()
    assert gone(pid)

def test_a_gpu_that_is_not_there(pair):
    if mx.is_available(mx.gpu): pytest.skip("there is one")
    with pytest.raises(ValueError, match="not available here"): DraftProcess(pair[1], mx.gpu)

def test_another_default_device_is_refused(pair, monkeypatch):
    p = MLXDraftProcessor(pair[1])
    other = mx.Device(mx.gpu, 0) if mx.default_device() == mx.Device(mx.cpu, 0) else mx.Device(mx.cpu, 0)
    monkeypatch.setattr(processors.mx, "default_device", lambda: other)
    with pytest.raises(RuntimeError, match="a thread on it would move everything else there"): p.open()
    assert p.thread is None

def test_no_device_is_set_for_everybody():
    "MLX's default device is the process's: the package sets it nowhere but in the process that is a draft's alone, and its threads enter streams of the default device only."
    sources = {p.name: p.read_text() for p in sorted(Path(vllm_mlx.__file__).parent.rglob("*.py"))}
    sets = {n for n, s in sources.items() if "set_default_device(" in s}
    assert sets == {"draft_process.py"} and sources["draft_process.py"].count("set_default_device(") == 1 and "-c" in sources["draft_process.py"]
    entered = {(n, m) for n, s in sources.items() for m in re.findall(r"mx\.stream\((.*?)\)", s)}
    assert entered <= {("processors.py", "_crossings[device.type]"), ("processors.py", "self._stream"), ("rounds.py", "generation_stream"), ("importance.py", "self.lanes[n % len(self.lanes")}, entered
