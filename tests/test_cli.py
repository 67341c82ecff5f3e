"""The command line: what it refuses and when, what it prints where, how it stops; and the real thing, as a process."""
import io, json, os, pty, select, signal, subprocess, sys, sysconfig, time
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_mlx import __version__, cli
from vllm_mlx.models import load, tiny_model

COMMAND = Path(sysconfig.get_path("scripts"))/"vllm_mlx"
PNG = b"\x89PNG\r\n\x1a\n"
QUESTION = "What is the secret code of the old museum?"
JSON_KEYS = {"prompt_tokens", "kept_tokens", "keep_pct", "answer", "ttft_s", "score_s", "select_s", "prefill_s", "why_dense"}
COMPARE_KEYS = {"dense_ttft_s", "dense_answer", "speedup"}


@pytest.fixture(scope="module")
def real():
    "The default model, loaded once for all tests that run it in this process."
    return load(cli.DEFAULT_MODEL)


@pytest.fixture
def loaded(real, monkeypatch):
    monkeypatch.setattr(cli, "open_model", lambda name: real)


@pytest.fixture
def no_model(monkeypatch):
    "Fails the test if a model is loaded."
    monkeypatch.setattr(cli, "open_model", lambda name: pytest.fail("a model was loaded before the mistake was found"))


def text_file(tmp_path, n_lines=60, fact="The secret code of the old museum is 4821."):
    "A text of about 1,200 tokens by default, above the threshold for a sparse prefill, with a fact in its middle."
    lines = [f"Entry {i}: the weather was calm and nothing happened that was worth a note." for i in range(n_lines)]
    lines.insert(n_lines//2, fact)
    path = tmp_path/"diary.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def call(*words, stdin=b"", capsys=None, monkeypatch=None):
    "(exit code, standard output, standard error) of `main` in this process."
    if monkeypatch: monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin)))
    code = cli.main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


# --- mistakes ---

@pytest.mark.parametrize("words, phrase", [
    ((), "COMMAND"),
    (("sing",), "sing"),
    (("ask",), "FILE"),
    (("ask", "a.txt"), "QUESTION"),
    (("ask", "a.txt", "b", "c"), "unrecognized arguments: c"),
    (("ask", "missing.txt", "Why?"), "missing.txt: No such file"),
    (("ask", ".", "Why?"), "Is a directory"),
    (("ask", "latin1.txt", "Why?"), "latin1.txt is not UTF-8: byte 0xe9 at position 3"),
    (("ask", "empty.txt", "Why?"), "empty.txt is empty"),
    (("ask", "blank.txt", "Why?"), "blank.txt is empty"),
    (("ask", "-", "Why?"), "standard input is empty"),
    *((("demo", "--keep-pct", p), f"{p!r} is not a share") for p in ("0", "1.01", "20", "nan", "inf", "x", "1e-400")),
    (("demo", "--keep-pct=-0.2"), "'-0.2' is not a share"),
    *((("demo", "--max-tokens", n), f"{n!r} is not a whole number") for n in ("0", "1.5", "many", "²")),
    (("demo", "--scorer", "guess"), "guess"),
    (("demo", "--positions", "upside-down"), "upside-down"),
    (("demo", "--plot", "out.docx"), "does not end in"),
    (("demo", "--plot", "no/folder/out.png"), "cannot write no/folder/out.png: No such file"),
    (("demo", "--plot", "empty.txt/out.png"), "cannot write empty.txt/out.png: Not a directory"),
    (("demo", "--keep", "0.2"), "--keep"),
    (("demo", "--quiet"), "--quiet"),
    (("generate", "--prompt", "P"), "--model"),
    (("generate", "--model", "M"), "--prompt"),
    (("generate", "--model", "M", "--prompt", ""), "the prompt is empty"),
    (("generate", "--model", "M", "--prompt", "P", "--draft", "none", "--verify", "whole"), "--verify whole has nothing to verify: --draft none decodes token by token"),
    (("generate", "--model", "M", "--prompt", "P", "--verify", "auto"), "--verify auto has nothing to verify: no draft is shipped for M, name one with --draft"),
    (("generate", "--model", "M", "--prompt", "-"), "standard input is empty"),
    *((("generate", "--model", "M", "--prompt", "P", "--block-size", n), f"{n!r} is neither 'kod' nor") for n in ("0", "1.5", "Kod")),
    *((("generate", "--model", "M", "--prompt", "P", "--temperature", t), f"{t!r} is not a number") for t in ("nan", "inf", "warm")),
])
def test_mistake_is_one_line_and_two(words, phrase, tmp_path, monkeypatch, capsys, no_model):
    monkeypatch.chdir(tmp_path)
    (tmp_path/"latin1.txt").write_bytes("caf\xe9".encode("latin-1"))
    (tmp_path/"empty.txt").write_bytes(b"")
    (tmp_path/"blank.txt").write_bytes(b"\xef\xbb\xbf \n\t\n")
    before = sorted(p.name for p in tmp_path.iterdir())
    code, out, err = call(*words, capsys=capsys, monkeypatch=monkeypatch)
    assert (code, out) == (2, "")
    assert err.startswith("vllm_mlx: ") and err.count("\n") == 1 and phrase in err
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize("option", ["--model", "--draft"])
def test_unknown_model(option, tmp_path, monkeypatch, capsys, real):
    (tmp_path/"model").mkdir()
    good = cli.open_model
    monkeypatch.setattr(cli, "open_model", lambda name: real if name == cli.DEFAULT_MODEL else good(name))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("./nowhere", "nobody/no-such-model-here", str(tmp_path/"model")):
        code, out, err = call("demo", option, name, capsys=capsys)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert repr(name) in err


def test_draft_with_another_tokenizer(monkeypatch, capsys, real):
    other = SimpleNamespace(get_vocab=lambda: {"a": 0})
    monkeypatch.setattr(cli, "open_model", lambda name: (real[0], other) if name == "other" else real)
    code, out, err = call("demo", "--draft", "other", capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "draft and target have different tokenizers" in err


@pytest.mark.parametrize("words", [(), ("--positions", "contiguous", "--compare")])
def test_longer_than_the_context(words, tmp_path, monkeypatch, capsys, real):
    small = tiny_model("llama", max_position_embeddings=128, vocab_size=49152)
    monkeypatch.setattr(cli, "open_model", lambda name: (small, real[1]))
    monkeypatch.setattr(cli, "sparse_answer", lambda *a, **kw: pytest.fail("the model began to read"))
    code, out, err = call("ask", text_file(tmp_path), QUESTION, *words, capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "the model's context is 128" in err


def test_empty_question(tmp_path, capsys, loaded):
    code, out, err = call("ask", text_file(tmp_path), " ", capsys=capsys)
    assert (code, out, err) == (2, "", "vllm_mlx: the question is empty\n")


def test_help_imports_nothing_heavy():
    code = ("import sys; from vllm_mlx.cli import main; assert main(['--help']) == 0; assert main(['ask', '--help']) == 0; "
            "assert main(['demo', '--keep-pct', '20']) == 2; "
            "heavy = {'mlx.core', 'mlx_lm', 'transformers', 'matplotlib', 'numpy', 'tqdm'} & set(sys.modules); assert not heavy, heavy")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--keep-pct" in done.stdout


# --- options reach the pipeline ---

class Prefill(SimpleNamespace):
    "What the pipeline says it has done."
    def __init__(self, n, **kw):
        super().__init__(**{**dict(prompt_tokens=n, kept_tokens=n//5, keep_pct=0.2, importance=None, selected=None, why_dense="too short",
                                   score_s=0.0, select_s=0.0, prefill_s=0.0, first_token_s=0.0, notes=["a note"]), **kw})


@pytest.fixture
def pipeline(monkeypatch, loaded):
    "Stands in for the pipeline; records how it was made and called, and says what `pieces` holds."
    import vllm_mlx.specprefill as module
    seen = SimpleNamespace(calls=[], pieces=["It is ", "4821", "."], closed=0)

    class SpecPrefill:
        def __init__(self, model, draft=None, **settings):
            self.model, self.tokenizer, self.settings = model, settings["tokenizer"], dict(settings, draft=draft)

        def stream_generate(self, tokenizer, prompt, **how):
            seen.calls.append(dict(prompt=prompt, **self.settings, **how))
            try:
                for told in (("score", 0, 9), ("score", 9, 9), ("prefill", 2, 2)): how["progress"](*told)
                for i, piece in enumerate(seen.pieces):
                    if isinstance(piece, BaseException): raise piece
                    yield SimpleNamespace(text=piece, generation_tokens=i + 1, prefill=Prefill(len(prompt)))
            finally: seen.closed += 1

    monkeypatch.setattr(module, "SpecPrefill", SpecPrefill)
    return seen


@pytest.mark.parametrize("words, key, value", [
    ((), "keep_pct", 0.2), (("--keep-pct", "0.05"), "keep_pct", 0.05),
    ((), "max_tokens", 256), (("--max-tokens", "7"), "max_tokens", 7), (("--max-tokens", "999999"), "max_tokens", None),
    ((), "scorer", "window"), (("--scorer", "lookahead"), "scorer", "lookahead"),
    ((), "positions", "original"), (("--positions", "contiguous"), "positions", "contiguous"),
    ((), "draft", None), (("--max-tokens", "7"), "reserve", 7),
])
def test_option_reaches_the_pipeline(words, key, value, tmp_path, capsys, pipeline):
    assert call("ask", text_file(tmp_path), QUESTION, *words, capsys=capsys)[0] == 0
    seen, = pipeline.calls
    if value is None and key == "max_tokens": value = 8192 - len(seen["prompt"]) # what the context leaves
    assert seen[key] == value
    assert pipeline.closed == 1


def test_models_reach_the_pipeline(tmp_path, monkeypatch, capsys, real, pipeline):
    monkeypatch.setattr(cli, "open_model", lambda name: (real[0], real[1]) if name == "big" else (name, name + " tokenizer"))
    assert call("ask", text_file(tmp_path), QUESTION, "--model", "big", "--draft", "small", capsys=capsys)[0] == 0
    assert [pipeline.calls[0][k] for k in ("draft", "tokenizer", "draft_tokenizer")] == ["small", real[1], "small tokenizer"]


def test_answer_streams_piece_by_piece(tmp_path, monkeypatch, loaded, pipeline):
    "Each piece is written and flushed before the next is asked for."
    class Out(io.StringIO):
        def flush(self): flushed.append(self.getvalue())
    flushed = []
    monkeypatch.setattr(sys, "stdout", Out())
    assert cli.main(["ask", text_file(tmp_path), QUESTION]) == 0
    assert ["It is ", "It is 4821", "It is 4821."] == flushed[:3]
    assert "read all" in flushed[-1] and "too short" in flushed[-1] and "note: a note" in flushed[-1]


def test_json_is_alone_on_stdout(tmp_path, capsys, pipeline, real, monkeypatch):
    def chatty(name):
        print("a library says hello")
        return real
    monkeypatch.setattr(cli, "open_model", chatty)
    pipeline.pieces = ["Käse ", "芝士", " 🧀"]
    code, out, err = call("ask", text_file(tmp_path), QUESTION, "--json", capsys=capsys)
    assert code == 0 and out.count("\n") == 1 and "hello" in err
    report = json.loads(out)
    assert JSON_KEYS <= report.keys() and not COMPARE_KEYS & report.keys()
    assert report["answer"] == "Käse 芝士 🧀" and report["why_dense"] == "too short"


def test_standard_input(capsys, monkeypatch, pipeline, real):
    text = "Der Käse heißt 芝士.\n"
    assert call("ask", "-", "Wie?", stdin=text.encode(), capsys=capsys, monkeypatch=monkeypatch)[0] == 0
    assert text.strip() in real[1].decode(pipeline.calls[0]["prompt"])


@pytest.mark.parametrize("error, code, words", [
    (KeyboardInterrupt(), 130, "vllm_mlx: interrupted"),
    (ValueError("keep_pct 7 is not a share"), 2, "vllm_mlx: keep_pct 7 is not a share"),
    (OSError(28, "No space left on device"), 2, "No space left"),
])
def test_ends_without_traceback(error, code, words, tmp_path, capsys, pipeline):
    "What was said before stays said; the generator is closed."
    pipeline.pieces = ["It is ", error]
    got, out, err = call("ask", text_file(tmp_path), QUESTION, capsys=capsys)
    assert (got, out, pipeline.closed) == (code, "It is ", 1)
    assert words in err and "Traceback" not in err


def test_a_fault_of_ours_is_not_hidden(tmp_path, capsys, pipeline):
    pipeline.pieces = [RuntimeError("a bug")]
    with pytest.raises(RuntimeError, match="a bug"): call("ask", text_file(tmp_path), QUESTION, capsys=capsys)


def test_a_terminal_without_the_letters(tmp_path, monkeypatch, pipeline):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    pipeline.pieces = ["Käse"]
    assert cli.main(["ask", text_file(tmp_path), QUESTION]) == 0
    assert b"K?se" in raw.getvalue()


# --- the real pipeline, in this process ---

def test_ask_json_compare(tmp_path, capsys, loaded, real):
    picture = tmp_path/"kept.png"
    code, out, err = call("ask", text_file(tmp_path), QUESTION, "--json", "--compare", "--plot", str(picture), "--max-tokens", "16", capsys=capsys)
    assert code == 0, err
    report = json.loads(out)
    assert JSON_KEYS | COMPARE_KEYS <= report.keys()
    assert report["why_dense"] is None and "4821" in report["answer"]
    assert 0 < report["kept_tokens"] < 0.3*report["prompt_tokens"]
    phases = sum(report[k] for k in ("score_s", "select_s", "prefill_s", "first_token_s"))
    assert phases == pytest.approx(report["ttft_s"], rel=0.05, abs=0.05)
    assert report["speedup"] == pytest.approx(report["dense_ttft_s"]/report["ttft_s"])
    assert picture.read_bytes().startswith(PNG) and report["plot"] == str(picture)
    from mlx_lm import generate
    from vllm_mlx.importance import default_step
    from vllm_mlx.needles import ask_prompt
    prompt = ask_prompt(real[1], Path(text_file(tmp_path)).read_text(encoding="utf-8"), QUESTION)[0]
    assert report["dense_answer"] == generate(*real, prompt, max_tokens=16, prefill_step_size=default_step()).strip()


def test_keep_everything_says_why(tmp_path, capsys, loaded):
    picture = tmp_path/"kept.png"
    code, out, err = call("ask", text_file(tmp_path, 20), QUESTION, "--keep-pct", "1", "--max-tokens", "8", "--plot", str(picture), "--json", capsys=capsys)
    assert code == 0, err
    report = json.loads(out)
    assert "keep_pct is 1" in report["why_dense"] and report["kept_tokens"] == report["prompt_tokens"]
    assert not picture.exists() and report["plot"] is None
    assert "no picture, as nothing was scored: " in err


def test_nothing_to_compare(tmp_path, capsys, loaded):
    "A short text is read whole both times: then one run is not called faster than the other, and what there is to say comes after the answer."
    code, out, err = call("ask", text_file(tmp_path, 20), QUESTION, "--compare", "--max-tokens", "8", "--plot", str(tmp_path/"kept.png"), capsys=capsys)
    assert code == 0 and "times as fast" not in out and "both times all of it was read (" in out and "no picture" in err
    code, out, err = call("ask", text_file(tmp_path, 20), QUESTION, "--compare", "--max-tokens", "8", "--json", capsys=capsys)
    assert json.loads(out)["speedup"] is None


def test_standard_output_is_closed(tmp_path):
    done = subprocess.run(["sh", "-c", '"$0" "$@" >&-', COMMAND, "ask", text_file(tmp_path, 10), QUESTION, "--json"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "standard output is closed" in done.stderr


# --- the real thing, as a process ---

def start(*words, **kw):
    return subprocess.Popen([COMMAND, *words], **{**dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)), **kw})   # a parent in the background ignores it


def test_version():
    done = subprocess.run([COMMAND, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"vllm_mlx {__version__}\n", "")


def test_ask_as_a_person_sees_it(tmp_path):
    done = subprocess.run([COMMAND, "ask", text_file(tmp_path), QUESTION, "--compare", "--max-tokens", "16"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" # no bar where there is no terminal, no warning of any library
    assert done.stdout.count("4821") == 2
    for words in ("read ", " tokens (", "kept ", "first token after", "score ", "prefill ", "the whole prompt:", "times as fast"): assert words in done.stdout


def test_bar_on_a_terminal(tmp_path):
    "Standard error is a terminal: a bar shows while the prompt is read, and is wiped before the answer."
    mine, theirs = pty.openpty()
    process = start("ask", text_file(tmp_path), QUESTION, "--max-tokens", "8", stderr=theirs)
    os.close(theirs)
    shown, deadline = b"", time.time() + 300
    while time.time() < deadline:
        if select.select([mine], [], [], 1)[0]:
            try: piece = os.read(mine, 4096)
            except OSError: break # the other end is closed
            if not piece: break
            shown += piece
        elif process.poll() is not None: break
    out = process.communicate(timeout=60)[0]
    os.close(mine)
    assert process.returncode == 0 and b"first token after" in out
    assert b"reading" in shown and b"tokens" in shown
    assert shown.rsplit(b"\r", 2)[-2].strip() == b"" # wiped


def test_ctrl_c_while_it_reads(tmp_path):
    "As soon as the bar shows, so in the midst of the prompt."
    mine, theirs = pty.openpty()
    process = start("demo", "--keep-pct", "1", cwd=tmp_path, stderr=theirs)
    os.close(theirs)
    shown = b""
    def more():
        try: return os.read(mine, 4096)
        except OSError: return b"" # the other end is closed
    while b"reading" not in shown and (piece := more()): shown += piece
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    while piece := more(): shown += piece
    os.close(mine)
    assert process.returncode == 130 and b"secret code" in out
    assert b"Traceback" not in shown and b"Exception ignored" not in shown and shown.split(b"\r", 1)[-1].strip().endswith(b"vllm_mlx: interrupted")


def test_ctrl_c_while_it_loads(tmp_path):
    process = start("ask", "-", QUESTION, stdin=subprocess.PIPE)
    process.stdin.write(b"some text " * 50_000)
    process.stdin.flush() # that is more than a pipe holds: so it is reading, and waits for the rest
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err.strip()) == (130, b"", b"vllm_mlx: interrupted")


def test_reader_goes_away(tmp_path):
    process = start("ask", text_file(tmp_path, 10), QUESTION)
    process.stdout.close()
    err = process.stderr.read()
    assert (process.wait(120), err) == (141, b"")


def test_disk_is_full(tmp_path):
    if not os.path.exists("/dev/full"): return
    with open("/dev/full", "wb") as full: process = start("ask", text_file(tmp_path, 10), QUESTION, "--json", stdout=full)
    err = process.communicate(timeout=120)[1]
    assert process.returncode == 2 and b"No space left" in err and err.count(b"\n") == 1


def test_demo_finds_its_fact(tmp_path):
    done = subprocess.run([COMMAND, "demo", "--json"], stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert 3900 < report["prompt_tokens"] <= 4000 and report["why_dense"] is None
    assert report["expected"][0] in report["answer"] and report["expected"][0] in report["fact"]
    assert (tmp_path/report["plot"]).read_bytes().startswith(PNG)


# --- generate ---

@pytest.fixture(scope="module")
def nano(tmp_path_factory):
    "The nano hybrid, and a folder with an untrained draft for it."
    from vllm_mlx.dflash import make_draft, save_dflash
    folder, pair = tmp_path_factory.mktemp("drafts")/"draft", load("nano-hybrid")
    save_dflash(make_draft(pair[0], block_size=4), folder)
    return pair, str(folder)


def test_generate_is_the_models_own_text(nano, capsys, monkeypatch):
    from mlx_lm import stream_generate
    (model, tokenizer), draft = nano
    monkeypatch.setattr(cli, "open_model", lambda name: (model, tokenizer))
    prompt = "def add(a, b):"
    want = "".join(r.text for r in stream_generate(model, tokenizer, prompt, max_tokens=16))
    for more in (("--draft", "none"), ("--draft", draft), ("--draft", draft, "--block-size", "3")):
        code, out, err = call("generate", "--model", "nano-hybrid", "--raw", "--prompt", prompt, "--max-tokens", "16", *more, capsys=capsys)
        assert (code, err) == (0, "") and out.startswith(want + "\n\n16 tokens, ") and ("rounds" in out) == (more[1] != "none")
        code, out, err = call("generate", "--model", "nano-hybrid", "--raw", "--prompt", "-", "--max-tokens", "16", "--json", *more, stdin=prompt.encode(), capsys=capsys, monkeypatch=monkeypatch)
        report = json.loads(out)
        assert (code, err, out.count("\n")) == (0, "", 1) and report["answer"] == want and report["generation_tokens"] == 16
    texts = [json.loads(call("generate", "--model", "M", "--raw", "--prompt", prompt, "--temperature", "0.8", "--seed", seed, "--max-tokens", "8", "--json", *more, capsys=capsys)[1])["answer"]
             for seed, more in (("1", ()), ("1", ("--draft", draft)), ("2", ()))]
    assert texts[0] == texts[1] != texts[2]


def test_generate_refuses_a_draft_of_another_model(nano, real, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "open_model", lambda name: real)
    for folder, words in ((nano[1], "made for a target with hidden_size"), (str(tmp_path), "as a draft"), ("./nowhere", "as a draft")):
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        code, out, err = call("generate", "--model", "M", "--draft", folder, "--prompt", "P", capsys=capsys)
        assert (code, out, err.count("\n")) == (2, "", 1) and words in err and repr(folder) in err


@pytest.mark.parametrize("name", ["nosuch", "./nowhere", "no/such/folder", "~/no-such-draft", "smollm2-135m-dflash2"])
def test_generate_names_the_drafts_that_there_are(nano, capsys, monkeypatch, name):
    monkeypatch.setattr(cli, "open_model", lambda name: nano[0])
    code, out, err = call("generate", "--model", "nano-hybrid", "--draft", name, "--prompt", "P", capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    for words in (f"cannot use {name!r} as a draft", "smollm2-135m-dflash, nano-hybrid-dflash", "no folder", "no Hugging Face id (owner/name)"): assert words in err


def test_generate_says_when_the_answer_goes_round_in_circles(nano, capsys, monkeypatch):
    monkeypatch.setattr(cli, "open_model", lambda name: nano[0])
    words = ("generate", "--model", "nano-hybrid", "--draft", "none", "--prompt", "def add(a, b):", "--max-tokens", "64")
    for more in ((), ("--json",)):
        code, out, err = call(*words, *more, capsys=capsys)
        assert code == 0 and err.count("\n") == 1 and err.startswith("vllm_mlx: note: the answer repeats itself (") and "--temperature 0.7 may help" in err
    assert json.loads(out)["repetition"] >= 0.5
    assert call(*words[:-1], "8", capsys=capsys)[2] == ""                                # too short to tell
    calm = dict(generation_tokens=100, repetition=0.49, temperature=0.0)
    assert cli.repetition_line(calm) == "" and "--temperature" not in cli.repetition_line(calm | dict(repetition=0.9, temperature=0.7)) != ""


def test_generate_uses_the_chat_template_and_minds_the_context(real, capsys, monkeypatch):
    monkeypatch.setattr(cli, "open_model", lambda name: real)
    lengths = [json.loads(call("generate", "--model", "M", "--prompt", "Hi", "--max-tokens", "1", "--json", *more, capsys=capsys)[1])["prompt_tokens"] for more in ((), ("--raw",))]
    assert lengths[0] > lengths[1] == 1
    code, out, err = call("generate", "--model", "M", "--prompt", "word " * 9000, capsys=capsys)
    assert (code, out) == (2, "") and "the model's context is 8,192" in err


def test_generate_takes_the_shipped_draft_of_its_model(nano, capsys, monkeypatch, tmp_path):
    import shutil
    from vllm_mlx import dflash
    monkeypatch.setattr(cli, "open_model", lambda name: nano[0])
    monkeypatch.setattr(dflash, "_DATA", tmp_path)
    words = ("generate", "--model", "nano-hybrid", "--raw", "--prompt", "def add(a, b):", "--max-tokens", "8", "--json")
    without = json.loads(call(*words, capsys=capsys)[1])
    assert without["draft"] is None and without["rounds"] == 0                     # not in this installation
    code, out, err = call(*words, "--draft", "nano-hybrid-dflash", capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1) and "this installation lacks config.json of the draft 'nano-hybrid-dflash'" in err
    shutil.copytree(nano[1], tmp_path/"nano-hybrid-dflash")
    for more, name in (((), "nano-hybrid-dflash"), (("--draft", "none"), None), (("--draft", "nano-hybrid-dflash"), "nano-hybrid-dflash"), (("--draft", nano[1]), nano[1])):
        report = json.loads(call(*words, *more, "--block-size", "3", capsys=capsys)[1])
        assert report["draft"] == name and (report["rounds"] > 0) == (name is not None) and report["answer"] == without["answer"]


# --- train ---

def test_train_help_shows_how(capsys):
    code, out, err = call("train", "--help", capsys=capsys)
    assert (code, err) == (0, "")
    for words in ("Let a model answer prompts, and train a draft on the answers", "  vllm_mlx train --target smollm2-135m --prompts questions.jsonl --output my-draft", "the name of a", "nano-hybrid, smollm2-135m", "--limit-minutes", "--no-bf16"): assert words in out
    from vllm_mlx.train_command import TRAIN_OPTIONS, train_settings
    for line in out[out.index("example:"):].splitlines():                               # what it shows is understood
        if line.startswith("  vllm_mlx train"):
            given = vars(cli.make_parser(["train"]).parse_args(line.replace("vllm_mlx ", "").split()))
            assert set(train_settings(given, given["config"])) == set(TRAIN_OPTIONS)


@pytest.mark.parametrize("words, phrase", [((), "--target, --prompts and --output are missing"), (("--target", "nano-hybrid"), "--prompts and --output are missing"), (("--config", "smollm2-135m"), "--output is missing, also in smollm2-135m")])
def test_train_names_all_that_is_missing(words, phrase, capsys):
    code, out, err = call("train", *words, capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1) and phrase in err


def test_a_recipe_and_a_flag_that_takes_back(capsys):
    from vllm_mlx.train_command import train_settings
    given = vars(cli.make_parser(["train"]).parse_args(["train", "--config", "smollm2-135m", "--no-bf16", "--output", "mine"]))
    assert train_settings(given, given["config"])["bf16"] is False and train_settings(given | dict(bf16=None), given["config"])["bf16"] is True


def train_words(tmp_path, *more):
    (tmp_path/"p.jsonl").write_text("\n".join(json.dumps(dict(prompt=f"def f{i}(x, y):\n    return")) for i in range(20)))
    (tmp_path/"train.yaml").write_text(f"target: nano-hybrid\nprompts: {tmp_path/'p.jsonl'}\noutput: {tmp_path/'mine'}\nmax-tokens: 20\nblock_size: 4\nlayers: 1\nlr: 2e-3\nbatch: 2\nanchors: 6\nevery: 3\ngenerate_batch: 10\n")
    return "train", "--config", str(tmp_path/"train.yaml"), *more


def test_train_makes_a_draft_that_drives_the_loop(tmp_path, capsys):
    code, out, err = call(*train_words(tmp_path, "--steps", "6"), capsys=capsys)
    assert code == 0, err
    assert "step      6 of 6" in out and str(tmp_path/"mine") in out and "batch" not in out
    code, out, err = call("generate", "--model", "nano-hybrid", "--draft", str(tmp_path/"mine"), "--raw", "--prompt", "def add(a, b):", "--max-tokens", "12", "--block-size", "4", "--json", capsys=capsys)
    report = json.loads(out)
    assert (code, report["generation_tokens"]) == (0, 12) and report["rounds"] > 0 and set(report["block_sizes"]) <= {2, 3, 4}


@pytest.mark.parametrize("more, phrase", [
    (("--steps", "few"), "invalid int value: 'few'"),
    (("--learn", "1"), "unrecognized arguments: --learn 1"),
    (("--config", "missing.yaml"), "missing.yaml does not exist; there are recipes called nano-hybrid, smollm2-135m"),
    (("--limit-minutes", "0"), "limit_minutes is 0.0: a positive number"),
    (("--generate-minutes", "soon"), "invalid float value: 'soon'"),
    (("--init", "nosuch"), "nosuch"),
    (("--steps", "0"), "steps is 0: at least 1"),
    (("--temperature", "warm"), "temperature is 'warm'"),
    (("--block-size", "64"), "max_tokens is 20: more than block_size, 64"),
    (("--block-size", "1"), "block_size"),
    (("--batch", "3", "--accumulate", "2"), "batch is 3: a multiple of 1 machines times 2 parts"),
    (("--prompts", "./nowhere.jsonl"), "nowhere.jsonl does not exist"),
    (("--target", "./nowhere"), "cannot load './nowhere'"),
    (("--layer-ids", "1,99"), "99"),
    (("--layer-ids", "first"), "layer_ids is 'first'"),
    (("--lr", "nan"), "lr is nan"),
])
def test_train_mistakes_are_one_line_and_leave_nothing(tmp_path, capsys, more, phrase):
    code, out, err = call(*train_words(tmp_path, *more), capsys=capsys)
    assert (code, out) == (2, "") and err.count("\n") == 1 and phrase in err, err
    assert sorted(f.name for f in tmp_path.iterdir()) == ["p.jsonl", "train.yaml"]


@pytest.mark.parametrize("line, phrase", [('{"prompt": }', "line 21 of p.jsonl is no JSON"), ('{"question": "a"}', "line 21 of p.jsonl has no prompt"), ("7", "line 21 of p.jsonl holds a int")])
def test_train_names_the_bad_line_before_it_loads_a_model(tmp_path, capsys, monkeypatch, line, phrase):
    from vllm_mlx import train_command
    monkeypatch.setattr(train_command, "load", lambda name: pytest.fail("a model was loaded before the bad line was found"))
    words = train_words(tmp_path)
    with open(tmp_path/"p.jsonl", "a") as f: f.write("\n" + line)
    code, out, err = call(*words, capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1) and phrase in err


def test_train_refuses_what_was_made_for_another_training(tmp_path, capsys):
    "Other layers, another tokenizer, another learning rate: each is said, and the folder stays as it is."
    words = train_words(tmp_path, "--steps", "3")
    assert call(*words, capsys=capsys)[0] == 0
    state = lambda: {f: (f.stat().st_mtime_ns, f.stat().st_size) for f in tmp_path.rglob("*") if f.is_file()}
    index = tmp_path/"mine-data"/"train"/"index.json"
    before, good = state(), index.read_text()
    for more, phrase in ((("--layer-ids", "2,3"), "was made with layer_ids"), (("--lr", "1e-5"), "is of a training with lr 0.002, now it is 1e-05"), (("--max-tokens", "21"), "was made with max_tokens 20, now it is 21")):
        code, out, err = call(*words, *more, capsys=capsys)
        assert code == 2 and err.strip().splitlines()[-1].startswith("vllm_mlx:") and phrase in err, err
        assert state() == before
    index.write_text(good.replace(json.loads(good)["settings"]["tokenizer"], "0" * 16))
    code, out, err = call(*words, capsys=capsys)
    assert code == 2 and "was made with tokenizer '0000000000000000'" in err


def test_train_goes_on_after_ctrl_c(tmp_path):
    "SIGINT to the real process while it trains; the same command then ends in the draft of an undisturbed run."
    words = train_words(tmp_path, "--steps", "30")
    process = start(*words, text=True)
    for line in process.stdout:
        if line.startswith("step      6"): process.send_signal(signal.SIGINT); break
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command goes on" in err and "Traceback" not in err, err
    assert not (tmp_path/"mine").exists() and (tmp_path/"mine-data"/"checkpoint.safetensors").exists()
    assert not list(tmp_path.rglob("*.part*"))
    again = subprocess.run([str(COMMAND), *words], capture_output=True, text=True, timeout=120)
    assert again.returncode == 0 and " 0 new tokens" in again.stdout and "step      3 " not in again.stdout and "step     30 of 30" in again.stdout
    from vllm_mlx.dflash import load_dflash
    assert load_dflash(tmp_path/"mine").config.block_size == 4
