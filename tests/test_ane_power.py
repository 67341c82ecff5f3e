"""Power meters, with children that stand in for the tools; and the profile of a draft step."""
import gc, json, os, plistlib, signal, subprocess, sys, threading, time
from types import SimpleNamespace

import mlx.core as mx
import pytest
from hypothesis import given, settings, strategies as st

from vllm_mlx.ane import power
from vllm_mlx.ane.power import (PHASES, PowerMeter, PowerParser, PowerReport, PowerUnavailable, Reading, find_source, meter_command, plot_power, profile_draft_step,
                                profile_summary, windows)

# No clock decides a test here: a test waits until its child has said what it needs, however long that takes, and a window has a known length or only a lower bound.

# A tool, as a small program: `python -c TOOL format seconds-between-samples samples [milliwatts ...]`; then it waits, or dies.
TOOL = r'''
import json, plistlib, sys, time
kind, pause, n, *mw = sys.argv[1:]
mw = [float(x) for x in mw] or [100.0]
then = time.perf_counter()
for i in range(int(n)):
    time.sleep(float(pause))
    now, power = time.perf_counter(), mw[min(i, len(mw) - 1)]
    if kind == "macmon":
        data = (json.dumps(dict(temp=dict(cpu_temp_avg=43.7), cpu_power=0.2, ane_power=power / 1000, ram_power=0.1)) + "\n").encode()
    elif kind == "text":
        data = (f"\n*** Sampled system activity (Mon Jan  5 10:00:00 2026 +0000) ({1000 * (now - then):.2f}ms elapsed) ***\n\n**** Processor usage ****\n\nE-Cluster Online: 100%\n"
                f"CPU Power: 41 mW\nGPU Power: 2 mW\nANE Power: {power:.0f} mW\nCombined Power (CPU + GPU + ANE): {43 + power:.0f} mW\n\n**** GPU usage ****\n\nGPU Power: 2 mW\n").encode()
    else:
        data = (b"\0" if i else b"") + plistlib.dumps(dict(is_delta=True, elapsed_ns=int(1e9 * (now - then)), processor=dict(cpu_power=41.5, gpu_power=2.0, ane_energy=int(power * (now - then)), ane_power=power)))
    then = now
    sys.stdout.buffer.write(data); sys.stdout.buffer.flush()
time.sleep(60)
'''
PATIENCE = 60 # seconds until a test is given up
SOURCE = dict(macmon="macmon", text="powermetrics", plist="powermetrics")

def meter_of(kind, *mw, pause=0.02, n=10_000, **options):
    return PowerMeter(SOURCE[kind], 20, [sys.executable, "-c", TOOL, kind, str(pause), str(n), *map(str, mw)], **{"wait_s": PATIENCE, **options})

def saying(code, source="macmon", **options): return PowerMeter(source, 20, [sys.executable, "-u", "-c", code], **{"wait_s": PATIENCE, **options})

def until(meter, enough):
    "Waits until enough(the meter's child) is true."
    child = meter._child
    with child.changed: assert child.changed.wait_for(lambda: enough(child), PATIENCE)

def times(n): return lambda child: len({t for t, _ in child.arrivals}) >= n       # readings of n different moments: n - 1 windows or more
def lines(n): return lambda child: len(child.arrivals) >= n
def ended(child): return child.ended

STAMPED = """print('{"ane_power": %s, "timestamp": "2026-01-05T10:00:%09.6f+00:00"}' % (power, second), flush=True)"""

def children(): # pids; where /proc is, that is not on macOS
    parent = lambda p: open(f"/proc/{p}/stat").read().rsplit(")", 1)[1].split()[1]
    out = set()
    for p in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else []):
        try:
            if parent(p) == str(os.getpid()): out.add(p)
        except OSError: pass
    return out

def meter_threads(): return [t for t in threading.enumerate() if t.name == "power meter"]

@pytest.fixture(autouse=True)
def nothing_left():
    "No thread, child or open file remains after a test."
    before, files = children(), len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    yield
    gc.collect()
    assert children() <= before and not meter_threads()
    if files: assert len(os.listdir("/proc/self/fd")) <= files

# --- the three formats, through a child

@pytest.mark.parametrize("kind", ["macmon", "text", "plist"])
def test_formats(kind):
    meter = meter_of(kind, 0, 0, 500)
    with meter.measure() as r: child = meter._child; until(meter, lambda c: times(8)(c) and lines(10)(c))
    assert (r.error, r.malformed, r.source, r.peak_mw) == (None, 0, SOURCE[kind], 500.0)
    assert len(r.samples) >= 7 and r.energy_mj == pytest.approx(sum(mw * s for _, mw, s in r.samples)) and r.mean_mw == pytest.approx(r.energy_mj / r.covered_s)
    if kind == "macmon": assert r.covered_s == pytest.approx(child.arrivals[-1][0] - child.arrivals[0][0]) == r.samples[-1][0]   # windows follow each other without a gap
    else: assert all(s > 0.0199 for _, _, s in r.samples)                                                                        # as long as the tool slept, or longer
    d = r.to_dict()
    assert json.loads(json.dumps(d)) == d and d["samples"] == len(r.samples)

def test_energy_is_that_of_the_real_windows():
    "A child that is asked for 20 ms and takes 60: the energy is three times what nominal windows would say."
    meter = saying(f"import time\npower = 1.0\nfor i in range(900): time.sleep(0.01); second = 0.06 * i; {STAMPED}")
    with meter.measure() as r: until(meter, lines(6))
    assert len(r.samples) >= 5 and r.covered_s == pytest.approx(0.06 * len(r.samples)) and r.energy_mj == pytest.approx(60 * len(r.samples))

def test_time_stamps_of_the_tool():
    "All lines come at once, as after a pause of the reader; the stamps say how long the windows were."
    meter = saying(f"import time\npower = 0.1\nfor second in range(5): {STAMPED}\ntime.sleep(600)")
    with meter.measure() as r: until(meter, lines(5))
    assert [s for _, _, s in r.samples] == [1.0] * 4 and r.energy_mj == pytest.approx(400)

@pytest.mark.parametrize("ahead", [3600.0, 1e9, -3600.0])
def test_a_clock_that_is_set(ahead):
    "One window of the tool's clock is off by an hour or more: its length is that between arrivals."
    for n in (2, 3, 9):
        whens = [i + (ahead if i >= n // 2 + 1 else 0) for i in range(n + 1)]
        assert [s for _, _, s in windows([(0.9 * i, Reading(5, when=w)) for i, w in enumerate(whens)])] == pytest.approx([0.9 if i == n // 2 else 1.0 for i in range(n)])
    slow = [(i, Reading(5, when=w)) for i, w in enumerate((0, 1, 2, 9, 10))]                # a window that was long is one
    assert [s for _, _, s in windows(slow)] == [1, 1, 7, 1]

def test_lines_that_come_at_once():
    "No stamps, and a reader that was asleep: the lines share the time, so that each has a window and the mean is one of power."
    code = "import sys, time\nline = '{\"ane_power\": %s}\\n'\nsys.stdout.write(line % 5); time.sleep(0.05); sys.stdout.write(line % 1 + line % 3 + line % 3 + line % 1)\ntime.sleep(600)"
    meter = saying(code)
    with meter.measure() as r: until(meter, lines(5))
    d = r.to_dict()                                                                  # with windows of no length this would divide by zero
    assert len(r.samples) in (0, 4) and (not r.samples or (r.mean_mw == pytest.approx(2000) and d["throttled"] is False and [s for _, _, s in r.samples] == pytest.approx([r.covered_s / 4] * 4)))
    assert str(r) and d["malformed"] == 0

def test_a_run_shorter_than_a_window_has_a_sample(monkeypatch, tmp_path):
    go = tmp_path/"go"
    code = f"import os, time\nfor i in range(2):\n    print('{{\"ane_power\": 0.3}}', flush=True)\n    while not os.path.exists({str(go)!r}): time.sleep(0.01)\ntime.sleep(600)"
    meter = PowerMeter("macmon", 1000 * PATIENCE, [sys.executable, "-c", code])
    with meter.measure() as r:
        child, wait = meter._child, meter._child.wait
        monkeypatch.setattr(child, "wait", lambda *a: (go.touch(), wait(*a))[1])     # the next reading comes once the run has ended
    assert len(r.samples) == 1 and r.duration_s < r.covered_s and r.error is None
    with saying("import time\nprint('{\"ane_power\": 0.3}', flush=True); time.sleep(600)").measure() as r: pass  # a child that is much slower than it was asked to be: nobody waits for it
    assert (r.samples, r.energy_mj, r.error) == ([], None, None)

def test_the_time_before_the_first_reading_does_not_count():
    meter = meter_of("macmon", 9000, 100, pause=0.1)
    began = time.perf_counter()
    meter.start()
    assert time.perf_counter() - began > 0.1                             # it has waited for a child that sleeps that long
    until(meter, times(3))
    assert meter.stop().peak_mw == 100.0                               # what the first reading stands for was before the start

# --- malformed output

def test_malformed_lines_are_counted_and_cost_only_their_window():
    stamped = lambda power, second: f'{{"ane_power": {power}, "timestamp": "2026-01-05T10:00:0{second}+00:00"}}'
    said = [stamped(0.1, 0), "not json", '{"ane_power": "x"}', '{"ane_power": null}', "{}", stamped(0.1, 5), stamped(0.3, 6)]
    meter = saying(f"import time\nfor s in {said}: print(s, flush=True); time.sleep(0.05)\ntime.sleep(600)").start()
    until(meter, lines(7))
    ends = [t for t, _ in meter._child.arrivals]
    r = meter.stop()
    assert r.malformed == 4 and r.examples[0] == "not json" and r.samples[-1][1:] == (pytest.approx(300), 1.0) and "4 malformed" in str(r)
    assert [round(mw) for _, mw, _ in r.samples] == [100, 300] if ends[0] < ends[5] else [300]    # all at once: the first window after a bad line has no length
    assert len(r.samples) == 1 or 0 < r.samples[0][2] <= ends[5] - ends[0]

def test_only_garbage_is_no_reading():
    with pytest.raises(PowerUnavailable, match=r"no reading in 0.4 s \(.* malformed"): saying("import time\nwhile 1: print('?', flush=True); time.sleep(0.02)", wait_s=0.4).start()

def test_a_line_without_an_end(monkeypatch):
    monkeypatch.setattr(power, "_MOST", 10_000)
    with pytest.raises(PowerUnavailable, match="no reading"): saying("import sys, time\nfor _ in range(50): sys.stdout.write('x' * 9000); sys.stdout.flush()\ntime.sleep(600)", wait_s=0.5).start()

@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=60) | st.sampled_from([b'{"ane_power": 1}', b'{"ane_power": 1e306}', b'{"ane_power": 1' + b"0" * 400 + b"}", b"<plist><key>a</key></plist>", b"<plist><date>x</date></plist>", b"ANE Power: 5 mW", b"*** Sampled system activity (x) (0.00ms elapsed) ***", b"*** Sampled system activity (x) (500.00ms elapsed) ***", b"<?xml", b"<plist>", b"</plist>", b'{"ane_power": 1e999}']), max_size=12),
       st.sampled_from(["macmon", "powermetrics"]))
def test_no_bytes_break_the_parser(lines, source):
    p = PowerParser(source)
    for line in lines:
        bad, r = p.malformed, p.feed(line)
        assert r is None or (0 <= r.mw < float("inf") and (r.seconds is None or 0 < r.seconds < float("inf")) and p.malformed == bad)

@pytest.mark.parametrize("line, mw", [(b"ANE Power: 0 mW", 0), (b"ANE Power: 1375 mW", 1375), (b"ANE Power: 1.5 W", 1500), (b"ANE Power:   12 mW  ", 12)])
def test_text_units(line, mw):
    p = PowerParser("powermetrics")
    p.feed(b"*** Sampled system activity (Mon) (250.00ms elapsed) ***")
    assert p.feed(line) == Reading(mw, 0.25) and p.feed(line) is None                 # once a sample

def test_property_lists():
    made = plistlib.dumps(dict(elapsed_ns=500_000_000, processor=dict(ane_energy=40)))           # older versions: energy alone
    p = PowerParser("powermetrics")
    got = [r for line in (made + b"\0" + made[:-30] + b"\n" + made).split(b"\n") if (r := p.feed(line))]
    assert got == [Reading(80.0, 0.5)] * 2 and p.malformed == 1
    for broken in (dict(processor={}), dict(elapsed_ns=0, processor=dict(ane_energy=1)), dict(elapsed_ns=0, processor=dict(ane_power=1.0)), dict(elapsed_ns=5, processor=dict(ane_power=-1.0)), []):
        p = PowerParser("powermetrics")
        assert not [r for line in plistlib.dumps(broken).split(b"\n") if (r := p.feed(line))] and p.malformed == 1
    one_line = b"".join(made.split(b"\n"))
    assert PowerParser("powermetrics").feed(one_line) == Reading(80.0, 0.5)

def test_intel():
    "Samples without an ANE line."
    p = PowerParser("powermetrics")
    for _ in range(3):
        for line in (b"*** Sampled system activity (Mon) (250.00ms elapsed) ***", b"Intel energy model derived package power (CPUs+GT+SA): 1.2W"): assert p.feed(line) is None
    assert p.malformed == 2 and "without ANE Power" in p.examples[0]

@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0.001, 2), st.floats(0, 9000) | st.none()), min_size=1, max_size=20))
def test_windows_cover_the_time_once(steps):
    t, arrivals = 0.0, [(0.0, Reading(1.0))]
    for pause, mw in steps: t += pause; arrivals.append((t, None if mw is None else Reading(mw)))
    got = windows(arrivals)
    good = [pause for pause, mw in steps if mw is not None]
    assert [s for _, _, s in got] == pytest.approx(good) and [mw for _, mw, _ in got] == [mw for _, mw in steps if mw is not None]

@given(st.lists(st.tuples(st.just(0.0) | st.floats(1e-6, 2), st.booleans()), max_size=30))
def test_windows_of_lines_that_come_at_once(steps):
    "However the reader sleeps: windows have a length and an end within the time, follow each other, and with no bad line cover the time since the first reading."
    t, arrivals = 5.0, [(5.0, Reading(1.0))]
    for pause, good in steps: t += pause; arrivals.append((t, Reading(1.0) if good else None))
    got = windows(arrivals)
    assert all(s > 0 for _, _, s in got) and all(b - s >= a - 1e-9 for (a, _, _), (b, _, s) in zip([(0.0, 0, 0), *got], got)) and (not got or got[-1][0] <= t - 5 + 1e-9)
    if all(good for _, good in steps): assert sum(s for _, _, s in got) == pytest.approx(t - 5)

# --- children that misbehave, and callers that do

def test_start_twice_and_stop_twice():
    meter = meter_of("macmon", 100).start()
    child = meter._child
    until(meter, times(3))
    before = time.perf_counter()
    assert meter.start()._child is child and meter.running
    until(meter, times(2))
    r = meter.stop()
    assert r.samples and r.duration_s < time.perf_counter() - before and child.arrivals[0][0] > before and not meter.running   # it has begun anew
    again = meter.stop()
    assert again.samples == [] and again.energy_mj is None and "stop without start" in again.error
    with meter.measure() as r: until(meter, times(2))                    # and it can be used again
    assert r.samples and r.error is None

def test_a_dying_child_keeps_what_it_gave():
    meter = saying(f"import sys\npower = 0.2\nfor second in range(4): {STAMPED}\nsys.exit('sensor lost')")
    with meter.measure() as r: until(meter, ended)
    assert len(r.samples) == 3 and r.mean_mw == pytest.approx(200) and "exit status 1: sensor lost, before the stop" in r.error

def test_a_child_killed_in_the_middle():
    meter = meter_of("macmon", 100).start()
    until(meter, times(2))
    os.kill(meter._child.process.pid, signal.SIGKILL)
    until(meter, ended)
    r = meter.stop()
    assert r.samples and "exit status -9" in r.error
    assert meter.start().running                                        # and a new child
    meter.stop()

def test_start_after_the_child_died():
    meter = saying("print('{\"ane_power\": 0.2}', flush=True)").start()
    first = meter._child
    until(meter, ended)
    assert meter.start()._child is not first
    meter.stop()

def test_a_child_that_closes_its_output_and_lives():
    "Before any reading, and after some: neither `start` nor `stop` waits for it, and it is ended."
    meter = saying("import os, time\nos.close(1)\ntime.sleep(600)")
    with pytest.raises(PowerUnavailable, match="closed its output and still runs: it said nothing"): meter.start()
    meter = saying(f"import os, time\npower = 0.2\nfor second in range(3): {STAMPED}\nos.close(1)\ntime.sleep(600)").start()
    child = meter._child
    until(meter, ended)
    r = meter.stop()
    assert len(r.samples) == 2 and "closed its output and still runs" in r.error and r.error.endswith("before the stop")
    assert child.process.returncode == -signal.SIGTERM and not meter.running

def test_a_child_that_ignores_sigterm(monkeypatch):
    code = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGPIPE, signal.SIG_IGN)\nprint('{\"ane_power\": 0.2}', flush=True)\ntime.sleep(60)"
    meter = saying(code).start()
    child = meter._child
    wait, limits = child.process.wait, iter([0.2])
    monkeypatch.setattr(child.process, "wait", lambda seconds: wait(next(limits, PATIENCE)))    # little for the polite request, and as long as it takes for the other
    assert meter.stop().error is None and child.process.returncode == -9

def test_a_child_of_root(monkeypatch):
    "It may not be signalled; it ends when it writes to a pipe that nobody reads."
    meter = meter_of("macmon", 100, pause=0.05).start()
    child = meter._child
    def refused(): raise PermissionError(1, "Operation not permitted")
    monkeypatch.setattr(child.process, "terminate", refused); monkeypatch.setattr(child.process, "kill", refused)
    monkeypatch.setattr(child.process, "wait", lambda seconds, wait=child.process.wait: wait(PATIENCE))
    assert meter.stop().error is None and child.process.returncode not in (None, 0)

def test_a_child_that_never_ends(monkeypatch):
    meter = saying("import time\nprint('{\"ane_power\": 0.2}', flush=True)\ntime.sleep(60)").start()
    child = meter._child
    def refused(): raise PermissionError(1, "Operation not permitted")
    monkeypatch.setattr(child.process, "terminate", refused)
    kill = child.process.kill
    monkeypatch.setattr(child.process, "kill", refused)
    monkeypatch.setattr(child, "close", lambda close=child.close: close(patience=0.1))
    assert f"process {child.process.pid} does not end" in meter.stop().error
    kill(); child.process.wait()

def test_a_dropped_meter_leaves_nothing():
    meter = meter_of("macmon", 100).start()
    process = meter._child.process
    del meter
    gc.collect()
    assert process.poll() is not None

def test_the_end_of_python_leaves_nothing(tmp_path):
    code = f"import vllm_mlx, sys\nfrom vllm_mlx.ane.power import PowerMeter\nm = PowerMeter('macmon', 20, [sys.executable, '-c', {TOOL!r}, 'macmon', '0.02', '9999']).start()\nprint(m._child.process.pid)"
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    with pytest.raises(ProcessLookupError): os.kill(pid, 0)

def test_an_error_in_the_block_comes_through_and_the_report_is_filled():
    meter = meter_of("macmon", 100)
    with pytest.raises(KeyError):
        with meter.measure() as r: until(meter, times(2)); raise KeyError("x")
    assert r.samples and not meter.running

def test_two_meters_and_two_threads():
    meters = [meter_of("macmon", 100), meter_of("plist", 700)]
    out = {}
    def use(i):
        with meters[i].measure() as r: until(meters[i], times(2))
        out[i] = r
    threads = [threading.Thread(target=use, args=(i,)) for i in (0, 1)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert (out[0].peak_mw, out[1].peak_mw) == (100.0, 700.0)

# --- tools and permissions

def test_missing_tools(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(PowerUnavailable, match="no power meter is available here: no macmon .*, and no powermetrics"): find_source()
    with pytest.raises(PowerUnavailable, match="no power meter is available here"): PowerMeter().start()
    for s in ("macmon", "powermetrics"):
        with pytest.raises(PowerUnavailable, match=f"{s} is not available here"): PowerMeter(s).start()
    with PowerMeter().measure() as r: ran = True
    assert ran and r.samples == [] and "not available" not in (r.source or "") and "no power meter" in r.error and r.to_dict()["energy_mj"] is None

def put(folder, name, text):
    (folder / name).write_text(f"#!{sys.executable}\n{text}"); (folder / name).chmod(0o755)

def test_auto_takes_macmon_first(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    put(tmp_path, "powermetrics", "print('never')")
    assert find_source() == "powermetrics"
    put(tmp_path, "macmon", "import sys, time, json\nassert sys.argv[1:] == ['pipe', '-i', '30'], sys.argv\nwhile 1: time.sleep(0.03); print(json.dumps(dict(ane_power=0.25)), flush=True)")
    assert find_source() == "macmon"
    meter = PowerMeter(interval_ms=30, wait_s=PATIENCE)
    with meter.measure() as r: until(meter, times(2))
    assert r.error is None and r.mean_mw == pytest.approx(250)

SUDO = "import os, sys\nassert sys.argv[1] == '-n'\nsys.exit('sudo: a password is required') if not os.environ.get('TEST_CACHED') else os.execvp(sys.argv[2], sys.argv[2:])"

def test_sudo_never_asks(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 501)
    put(tmp_path, "powermetrics", f"import sys\nsys.argv = ['-c', 'text', '0.02', '999', '640']\n{TOOL}")
    put(tmp_path, "sudo", SUDO)
    assert meter_command("powermetrics", 500)[:3] == ["sudo", "-n", "powermetrics"]
    meter = PowerMeter("powermetrics", 20, wait_s=PATIENCE)
    with pytest.raises(PowerUnavailable, match="run `sudo -v` in this terminal first"): meter.start()      # so it has ended: whoever asks waits for an answer
    monkeypatch.setenv("TEST_CACHED", "1")
    with meter.measure() as r: until(meter, times(2))
    assert r.error is None and r.mean_mw == pytest.approx(640)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert meter_command("powermetrics", 500)[0] == "powermetrics"

def test_not_the_superuser():
    "What powermetrics itself says, on its output."
    with pytest.raises(PowerUnavailable, match="needs root"): saying("import sys; print('powermetrics must be invoked as the superuser'); sys.exit(1)", "powermetrics").start()

@pytest.mark.parametrize("options, words", [(dict(source="x"), "source is 'x'"), (dict(interval_ms=0), "interval_ms is 0"), (dict(interval_ms=0.5), "interval_ms is 0.5"), (dict(interval_ms=True), "interval_ms is True"),
                                            (dict(command=["a"]), "command is given without source"), (dict(source="macmon", command="macmon pipe"), "a list of words"), (dict(source="macmon", command=[]), "a list of words")])
def test_settings(options, words):
    with pytest.raises(ValueError, match=words): PowerMeter(**options)

# --- reports

def test_empty_reports():
    r = PowerReport(error="why")
    assert (r.energy_mj, r.mean_mw, r.peak_mw, r.throttled, r.covered_s) == (None, None, None, None, 0) and "why" in str(r)
    with pytest.raises(ValueError, match="no samples to show: why"): plot_power(r)

def test_throttling_is_about_the_mean_over_time():
    "The second half has the same samples, but the high one was short."
    long = [(i, mw, s) for i, (mw, s) in enumerate([(100, 1), (200, 1), (100, 3), (200, 0.1)])]
    assert PowerReport(samples=long).throttled is True
    assert PowerReport(samples=[(i, 100, 1) for i in range(4)]).throttled is False

# --- the profile

class Paced:
    "A draft whose phases take what they are told, on a clock of its own."
    def __init__(self, **ms): self.ms, self.ran, self.where, self.now = ms, "stand-in", {}, 0.0
    def clock(self): return self.now / 1000
    def take(self, name, out=None): self.where[name] = threading.current_thread(); self.now += self.ms.get(name, 0); return out
    def block(self, last, size): return mx.array([[last] + [1] * ((size or 3) - 1)])
    def embed(self, tokens): return self.take("embed", mx.zeros((1, tokens.shape[1], 4)))
    def extend(self, features, cache): cache.append(1); self.take("context")
    def prepare_forward(self, noise, cache, position): self.noise, self.position = noise, position; self.take("prepare")
    def run_kernels(self): self.take("run")
    def read_output(self): return self.take("read", mx.zeros((1, 3, 4)))
    def logits(self, hidden): return self.take("lm_head", mx.arange(16).reshape(1, 2, 8))
    def read_draft_tokens(self): return self.take("lm_head", mx.array([[0, 5, 6]]))

class Context(list):
    state = []
    def copy(self): return Context(self)

def test_phases_add_up_to_the_clock():
    ms = dict(embed=4, context=12, prepare=8, run=30, read=6, lm_head=10)
    draft, context = Paced(**ms, anchor=5), Context()
    soft = lambda noise, logits, embed: draft.take("anchor", noise + 1)
    options = dict(correction_logits=mx.zeros(8), soft_anchor=soft, position=9)
    p = profile_draft_step(draft, 3, context, mx.zeros((1, 2, 4)), **options, clock=draft.clock)
    assert p.phases == pytest.approx({**dict.fromkeys(PHASES, 0), **ms, "soft anchor": 5}) and list(p.phases) == list(PHASES) and (p.total, p.other) == pytest.approx((75, 0))
    assert draft.where["run"] is not threading.main_thread() and draft.where["read"] is threading.main_thread()
    assert context == [] and draft.position == 9 and draft.noise.min().item() == 1 and p.tokens == [7, 7]
    began = time.perf_counter()                                          # and by the clock on the wall
    p = profile_draft_step(draft, 3, context, mx.zeros((1, 2, 4)), **options)
    assert sum(p.phases.values()) + p.other == pytest.approx(p.total) and p.total <= 1000 * (time.perf_counter() - began) and min(*p.phases.values(), p.other) > -1e-6

def test_heads_of_the_profile():
    for head, tokens in dict(mlx=[7, 7], program=[5, 6], deferred=[]).items():
        draft = Paced(read=5, lm_head=7)
        p = profile_draft_step(draft, 3, Context(), head=head, clock=draft.clock)
        assert (p.head, p.tokens) == (head, tokens) and (p.phases["soft anchor"], p.phases["read"], p.phases["lm_head"]) == pytest.approx((0, 0 if head == "program" else 5, 7))
    with pytest.raises(ValueError, match="head is 'ane'"): profile_draft_step(Paced(), 3, Context(), head="ane")

def test_summary():
    drafts = [Paced(run=r, read=5) for r in (5, 15, 25)]
    s = profile_summary([profile_draft_step(d, 3, Context(), clock=d.clock) for d in drafts])
    assert set(s) == {*PHASES, "other", "total"} and s["run"] == pytest.approx((15, 5, 25, 0.75)) and s["total"] == pytest.approx((20, 10, 30, 1)) and s["embed"] == pytest.approx((0, 0, 0, 0))

def test_the_error_of_the_thread():
    draft = Paced()
    draft.run_kernels = lambda: {}["nothing"]
    with pytest.raises(KeyError, match="nothing"): profile_draft_step(draft, 3, Context())
    assert not [t for t in threading.enumerate() if t.name == "draft step"]
