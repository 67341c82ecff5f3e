"""The explorer in a real JupyterLab, driven in headless Chromium: mouse, keyboard, buttons, both themes.

Needs Chromium (or Chrome) and its driver. In CI they are installed when they are missing, and CI never skips; elsewhere `VLLM_MLX_BROWSER=install` asks for that,
and without them the tests skip. On macOS nothing is installed: Chrome at its usual place is found, chromedriver on the path, in Homebrew's folders or by
`CHROMEWEBDRIVER` (a folder) or `SE_CHROMEDRIVER` (a file). Selenium gets both paths, so its own manager, which would download, never runs.
`VLLM_MLX_SCREENSHOTS=folder` keeps the screenshots."""
import json, os, re, secrets, shutil, socket, subprocess, sys, time
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome", "/Applications/Chromium.app/Contents/MacOS/Chromium")
FLAGS = ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "disable-background-networking", "disable-component-update", "disable-sync", "no-first-run", "window-size=1400,1500", "force-device-scale-factor=1")
CELLS = [
"""import vllm_mlx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm_mlx.cost import CostModel
from vllm_mlx.explorer import explore, explore_needles
from vllm_mlx.models import tiny_model
from vllm_mlx.needles import make_case
letters = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"<end>": 256}, []))
letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer = TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<end>"))
model = tiny_model("llama", vocab_size=257)
case = make_case(tokenizer, "shared", 2000, 0.5, 1)""",
"""view = explore(case.tokens, tokenizer, model, cost=CostModel((.1, 1e-4, 0), (0, 1e-3, 0), (.01, 0)), max_tokens=8, protect_head=16, protect_tail=32)
view""",
"""rows = [dict(prompt_tokens=1200, depth=d, keep_pct=k, seed=0, correct=k > d, kept_tokens=int(1200 * k), facts_kept=1.0, answer="7") for d in (.25, .75) for k in (.1, .5)]
grid = explore_needles(rows, model, tokenizer, max_tokens=4)
grid"""]


def found():
    "(browser, driver), None for what is missing."
    browser = next((p for p in map(shutil.which, BROWSERS) if p), None)
    places = [os.environ.get("CHROMEWEBDRIVER"), os.environ.get("PATH"), "/usr/lib/chromium", "/usr/lib/chromium-browser", "/opt/homebrew/bin", "/usr/local/bin"]
    named = shutil.which(os.environ.get("SE_CHROMEDRIVER") or "")
    return browser, named or shutil.which("chromedriver", path=os.pathsep.join(p for p in places if p))


def install():
    "Try to get them from the distribution; what went wrong, or an empty string."
    if not shutil.which("apt-get"): return "there is no apt-get here to install them with"
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium", "chromium-driver"]):
        try: done = subprocess.run([*sudo, *command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, env=dict(os.environ, DEBIAN_FRONTEND="noninteractive"))
        except (OSError, subprocess.TimeoutExpired) as e: return f"{' '.join(command)}: {e}"
        if done.returncode: return f"{' '.join(command)} ended with {done.returncode}: {done.stdout[-500:]}"
    return ""


def missing(browser, driver, why=""):
    "What to install, in words; `why` the attempt to do it here failed."
    what = " and ".join(n for n, path in (("Chrome or Chromium", browser), ("chromedriver of the same version", driver)) if not path)
    casks = " ".join(n for n, path in (("google-chrome", browser), ("chromedriver", driver)) if not path)
    if sys.platform == "darwin": how = f"install it with `brew install --cask {casks}`, or set CHROMEWEBDRIVER to the folder of chromedriver; looked for Chrome in /Applications and on the path"
    elif shutil.which("apt-get"): how = "install it with `apt-get install chromium chromium-driver`, or set VLLM_MLX_BROWSER=install to have that done"
    else: how = "install it with the system's package manager and put it on the path"
    return f"{what} is missing (browser: {browser}, driver: {driver}): {how}" + (f". The attempt to install it: {why}" if why else "")


@pytest.mark.parametrize("browser, driver, want, cask", [(None, None, "Chrome or Chromium and chromedriver", "google-chrome chromedriver"), ("/x/Chrome", None, "chromedriver of the same version is missing", "chromedriver"), (None, "/x/chromedriver", "Chrome or Chromium is missing", "google-chrome")])
def test_a_missing_browser_says_what_to_install(monkeypatch, browser, driver, want, cask):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(shutil, "which", lambda *a, **k: None)
    text = missing(browser, driver, install())
    assert text.startswith(want) and f"`brew install --cask {cask}`" in text and "CHROMEWEBDRIVER" in text and "no apt-get" in text
    monkeypatch.setattr(sys, "platform", "linux")
    assert "package manager" in missing(browser, driver)
    monkeypatch.setattr(shutil, "which", lambda *a, **k: "/usr/bin/apt-get")
    assert "VLLM_MLX_BROWSER=install" in missing(browser, driver)


def test_chrome_of_macos_is_found(monkeypatch, tmp_path):
    mac, driver = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome", tmp_path/"chromedriver"
    driver.write_text("")
    driver.chmod(0o755)
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, path=None: mac if name == mac else real(name, path=path) if name.startswith(str(tmp_path)) or path and str(tmp_path) in path else None)
    monkeypatch.delenv("SE_CHROMEDRIVER", raising=False)
    monkeypatch.setenv("CHROMEWEBDRIVER", str(tmp_path))
    assert found() == (mac, str(driver))
    monkeypatch.delenv("CHROMEWEBDRIVER")
    assert found() == (mac, None)
    monkeypatch.setenv("SE_CHROMEDRIVER", str(driver))
    assert found() == (mac, str(driver))


@pytest.fixture(scope="module")
def browser_paths():
    in_ci, asked = bool(os.environ.get("CI")), os.environ.get("VLLM_MLX_BROWSER") == "install"
    why = ""
    if None in found() and (in_ci or asked): why = install()
    if None in found():
        reason = missing(*found(), why)
        pytest.fail(reason) if in_ci else pytest.skip(reason)
    return found()


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    "A JupyterLab on this machine alone, whose root is a folder with the notebook; gives its address."
    top = tmp_path_factory.mktemp("lab")
    (top/"root").mkdir()
    no_news = top/"settings"/"@jupyterlab"/"apputils-extension"/"notification.jupyterlab-settings"
    no_news.parent.mkdir(parents=True)
    no_news.write_text(json.dumps(dict(fetchNews="false", checkForUpdates=False)))
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in CELLS], metadata=dict(kernelspec=dict(name="python3", display_name="python3", language="python")))
    nbformat.write(nb, top/"root"/"explorer.ipynb")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    token, log = secrets.token_hex(16), open(top/"lab.log", "w")
    env = {k: v for k, v in os.environ.items() if not k.startswith("JUPYTER")} | dict(JUPYTER_CONFIG_DIR=str(top/"config"), JUPYTER_RUNTIME_DIR=str(top/"runtime"), JUPYTERLAB_SETTINGS_DIR=str(top/"settings"), JUPYTERLAB_WORKSPACES_DIR=str(top/"workspaces"), JUPYTER_TOKEN=token)
    server = subprocess.Popen([sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={top/'root'}",
                               "--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", "--LabApp.expose_app_in_browser=True"], cwd=top, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        wait_for(lambda: connects(port), 90, lambda: f"JupyterLab did not start:\n{(top/'lab.log').read_text()[-3000:]}", lambda: server.poll() is None)
        yield f"http://127.0.0.1:{port}/lab/tree/explorer.ipynb?token={token}&reset"
    finally:
        server.terminate()
        try: server.wait(20)
        except subprocess.TimeoutExpired: server.kill()
        log.close()


def connects(port):
    with socket.socket() as s: return s.connect_ex(("127.0.0.1", port)) == 0


def wait_for(what, seconds, message="", going=lambda: True):
    "The first true value of what(); fails with the message after so many seconds, or when there is no use in waiting."
    from selenium.common.exceptions import StaleElementReferenceException
    def now():
        try: return what()
        except StaleElementReferenceException: return None       # drawn anew while it was read
    end = time.monotonic() + seconds
    while not (value := now()):
        if time.monotonic() > end or not going(): pytest.fail((message() if callable(message) else message) or f"nothing came within {seconds} s")
        time.sleep(0.1)
    return value


class Page:
    "The notebook in the browser."
    def __init__(self, driver, shots): self.driver, self.shots = driver, shots
    def js(self, code, *args): return self.driver.execute_script(code, *args)
    def all(self, css): return self.driver.find_elements("css selector", css)
    def one(self, css): return wait_for(lambda: self.all(css), 30, f"no {css} in the page")[0]
    def command(self, name, args=None): self.js("window.jupyterapp.commands.execute(arguments[0], arguments[1])", name, args or {})
    def python(self, code): self.js("window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.requestExecute({code: arguments[0]})", code)
    def shot(self, name): self.driver.save_screenshot(str(self.shots/f"{name}.png"))
    def kept(self): return int(self.one(".vmx-summary b").text.replace(",", ""))
    def drawn(self): return self.one(".vmx svg path").get_attribute("d")
    def handle(self, label): return self.one_in(label, ".noUi-handle")
    def one_in(self, label, css):
        "The part of the control with that label."
        for box in self.all(".widget-inline-hbox"):
            if box.find_elements("css selector", ".widget-label") and box.find_element("css selector", ".widget-label").text == label: return box.find_element("css selector", css)
        pytest.fail(f"no control {label!r} in the page")
    def button(self, name, nth=0): return [b for b in self.all("button.jupyter-button, button.widget-button") if b.text == name][nth]
    def rows(self): return self.all("table[aria-label=runs] tbody tr")
    def run(self):
        "A click on Run, and the row that it adds."
        n = len(self.rows()) + 1
        self.button("Run").click()
        wait_for(lambda: len(self.rows()) == n, 60, lambda: f"no row {n}; the view says {[e.text for e in self.all('.vmx-error, .vmx-status')]}")
        wait_for(lambda: self.button("Run").is_enabled(), 20)
    def into_view(self, element):
        self.js("arguments[0].scrollIntoView({block: 'center'})", element)
        return element


@pytest.fixture(scope="module")
def page(browser_paths, lab, tmp_path_factory):
    "The notebook, all cells run."
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    options = webdriver.ChromeOptions()
    options.binary_location = browser_paths[0]
    for flag in FLAGS: options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    shots = Path(os.environ.get("VLLM_MLX_SCREENSHOTS") or tmp_path_factory.mktemp("shots"))
    shots.mkdir(parents=True, exist_ok=True)
    for name in ("SE_OFFLINE", "SE_AVOID_STATS"): os.environ.setdefault(name, "true")   # should Selenium's manager ever be asked: no download, no statistics
    driver = webdriver.Chrome(options=options, service=Service(browser_paths[1]))
    try:
        page = Page(driver, shots)
        driver.get(lab)
        wait_for(lambda: page.js("return window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status == 'idle'"), 90, lambda: (page.shot("no-kernel"), f"no idle kernel; see {shots}")[1])
        page.command("application:toggle-left-area") if page.js("return !window.jupyterapp.shell.leftCollapsed") else None
        page.command("notebook:run-all-cells")
        wait_for(lambda: page.all(".vmx-summary") and len(page.all(".vmx svg")) == 3, 120, lambda: (page.shot("no-view"), f"no view; the page says {page.one('body').text[-1500:]}")[1])
        yield page
    finally: driver.quit()


def chain(page):
    from selenium.webdriver import ActionChains
    return ActionChains(page.driver)


def test_mouse_moves_the_slider(page):
    page.into_view(page.one(".vmx-summary"))
    kept, drawn, text = page.kept(), page.drawn(), page.one(".vmx-text").text
    chain(page).click_and_hold(page.handle("keep (%)")).move_by_offset(60, 0).release().perform()
    wait_for(lambda: page.kept() > kept, 20, "the number of kept tokens did not grow")
    wait_for(lambda: page.drawn() != drawn and page.one(".vmx-text").text != text, 20, "the pictures did not change")
    share = page.one_in("keep (%)", ".widget-readout").text
    assert re.fullmatch(r"\d+", share) and share != "20"
    assert "first token after" in page.one(".vmx-summary").text and "cache" in page.one(".vmx-summary").text


def test_keyboard_moves_each_slider(page):
    from selenium.webdriver.common.keys import Keys
    for label in ("keep (%)", "chunk size", "pooling", "keep first", "keep last", "backbone (%)"):
        handle = page.handle(label)
        before = page.one_in(label, ".widget-readout").text
        handle.send_keys(Keys.ARROW_LEFT if label == "keep (%)" else Keys.ARROW_RIGHT)
        wait_for(lambda: page.one_in(label, ".widget-readout").text != before, 20, f"{label} did not move")
    kept = page.kept()
    page.handle("keep (%)").send_keys(Keys.ARROW_LEFT * 5)
    wait_for(lambda: page.kept() < kept, 20, "the number of kept tokens did not fall")


def test_what_python_sets_stays(page):
    "A slider in the browser may round a value and send it back while Python is two steps ahead."
    page.python("for k in [*(i / 100 for i in range(3, 98, 5)), 0.2]: view.keep_pct = k")
    wait_for(lambda: page.one_in("keep (%)", ".widget-readout").text == "20", 20, "the slider did not follow")
    kept = page.kept()
    time.sleep(1)
    assert (page.kept(), page.one_in("keep (%)", ".widget-readout").text) == (kept, "20")


def test_every_control_has_a_name_a_tooltip_and_the_focus(page):
    from selenium.webdriver.common.keys import Keys
    labels = [l.text for l in page.all(".widget-label") if l.is_displayed() and l.text]
    for name in ("keep (%)", "chunk size", "pooling", "keep first", "keep last", "backbone (%)", "scorer", "show"): assert name in labels
    reached = set()
    page.js("arguments[0].focus()", page.handle("keep (%)"))
    for _ in range(40):
        reached.add(page.js("""const e = document.activeElement, box = e.closest('.widget-inline-hbox');
            return e.tagName == 'BUTTON' || e.type == 'checkbox' ? (e.innerText || e.closest('label')?.innerText || '').trim() : box?.querySelector('.widget-label')?.innerText || ''"""))
        chain(page).send_keys(Keys.TAB).perform()
    assert {"keep (%)", "chunk size", "pooling", "keep first", "keep last", "backbone (%)", "scorer", "Score", "log scale", "dropped text in full", "Run"} <= reached, reached
    titles = set(page.js("return [...document.querySelectorAll('.jupyter-widgets [title]')].map(e => e.title)"))
    assert {"Share of the prompt that the target reads, in percent", "Which queries score the prompt", "Logarithmic axis for the scores", "Only the text", "Depth of the fact in the cell that is framed"} <= titles
    assert page.js("""const has = e => e.title.length > 12 || [...e.querySelectorAll('[title]')].some(t => t.title.length > 12);
        return [...document.querySelectorAll('.jupyter-widgets button, .widget-slider, .widget-dropdown, .widget-checkbox, .widget-toggle-buttons')].filter(e => !has(e)).map(e => e.outerHTML.slice(0, 400))""") == []


def test_toggles(page):
    from selenium.webdriver.common.keys import Keys
    page.button("text").click()
    wait_for(lambda: "importance of" not in "".join(e.get_attribute("aria-label") for e in page.all(".vmx svg") if e.is_displayed()), 20, "the curve stayed")
    page.button("both").send_keys(Keys.SPACE)
    wait_for(lambda: page.one(".vmx svg").is_displayed(), 20, "the curve did not come back")
    box = page.one("input[type=checkbox]")
    box.send_keys(Keys.SPACE)
    wait_for(lambda: any("importance (log)" in t.text for t in page.all(".vmx svg text")), 20, "no logarithmic axis")


def test_run_adds_a_row(page):
    page.into_view(page.button("Run"))
    page.run(); page.run()
    n = len(page.rows())
    cells = [c.text for c in page.all("table[aria-label=runs] tbody tr:last-child td")]
    assert cells[0] == str(n) and re.fullmatch(r"[\d,]+ of 2,0\d\d|[\d,]+ of 1,9\d\d", cells[2]) and cells[3].endswith(" s") and cells[5].endswith("MiB")
    assert len(page.all(".vmx svg path.measured")) == 2 * n


def test_score_with_another_scorer(page):
    from selenium.webdriver.support.ui import Select
    Select(page.one_in("scorer", "select")).select_by_visible_text("look-ahead")
    wait_for(lambda: "not scored yet" in page.one(".vmx-status").text, 20, "the view did not say that look-ahead is not scored")
    drawn = page.all(".vmx svg polyline")[0].get_attribute("points")
    page.button("Score").click()
    wait_for(lambda: page.all(".vmx svg polyline")[0].get_attribute("points") != drawn, 60, "the curve did not change")
    assert page.all(".vmx-error") == []


def test_errors_are_shown_in_the_view(page):
    page.into_view(page.button("Run"))
    page.python("view.max_tokens = 0")                           # the kernel takes this before the click, which is sent after it
    page.button("Run").click()
    wait_for(lambda: page.all(".vmx-error") and "ValueError: max_tokens is 0" in page.one(".vmx-error").text, 30, "no error in the view")
    page.python("view.max_tokens = 8")
    page.run()
    wait_for(lambda: not page.all(".vmx-error"), 20, "the next run did not clear the error")


def test_needle_grid(page):
    from selenium.webdriver.support.ui import Select
    page.into_view(page.all("table[aria-label='answers of the cell']")[0])
    Select(page.one_in("depth", "select")).select_by_visible_text("75%")
    wait_for(lambda: "saved" in page.one("table[aria-label='answers of the cell']").text, 20)
    page.button("Run this cell").click()
    wait_for(lambda: "now" in page.one("table[aria-label='answers of the cell'] tbody").text, 60, lambda: f"the cell was not run; the view says {[e.text for e in page.all('.vmx-error')]}")


RATIO = """const rgb = c => c.match(/[\\d.]+/g).map(Number), lin = v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
const light = c => .2126 * lin(c[0]) + .7152 * lin(c[1]) + .0722 * lin(c[2]);
const over = (c, b) => c.length < 4 ? c : [0, 1, 2].map(i => c[i] * c[3] + b[i] * (1 - c[3]));
const back = rgb(getComputedStyle(document.querySelector('.jp-NotebookPanel-notebook')).backgroundColor);
return arguments[0].map(q => { const e = document.querySelector(q), s = getComputedStyle(e), c = over(rgb(e.closest('svg') ? s.fill : s.color), back);
    const [a, b] = [light(c), light(back)].sort((x, y) => y - x); return [q, (a + .05) / (b + .05)] })"""


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_both_themes_are_readable(page, theme):
    "Contrast of at least 4.5 to 1 between text and background, as WCAG asks for; screenshots to look at."
    page.command("apputils:change-theme", dict(theme=theme))
    wait_for(lambda: page.js("return document.body.dataset.jpThemeName") == theme, 30, f"the theme did not change to {theme}")
    if not page.rows(): page.run()
    faint = lambda: [(q, ratio) for q, ratio in page.js(RATIO, [".vmx-summary", ".vmx-text", ".vmx-text b", ".vmx-text s", ".vmx svg text", "table[aria-label=runs] td"]) if ratio < 4.5]
    wait_for(lambda: not faint(), 30, lambda: f"too little contrast: {faint()}")   # the colours of a theme come with style sheets, a while after its name
    name = theme.split()[-1].lower()
    page.js("document.querySelector('.jp-WindowedPanel-outer, .jp-Notebook').scrollTop = 0; arguments[0].scrollIntoView()", page.one(".jupyter-widgets .widget-slider"))
    time.sleep(0.3)
    page.shot(f"explorer-{name}")
    page.into_view(page.button("Run this cell"))
    time.sleep(0.3)
    page.shot(f"needles-{name}")
