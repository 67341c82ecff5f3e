"""OpenBLAS is loaded before MLX, in a fresh process each time; nothing that goes wrong is raised."""
import json, os, subprocess, sys, textwrap
from pathlib import Path
import pytest
from vllm_mlx import blas

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a BLAS to replace")

def python(code, **env):
    "Run `code` in a fresh interpreter; its last line of output, as JSON, and what it logged."
    code = "import json, logging, sys; logging.basicConfig(level=logging.DEBUG)\n" + textwrap.dedent(code)
    p = subprocess.run([sys.executable, "-c", code], env=dict(os.environ, **env), capture_output=True, text=True, timeout=120)
    assert p.returncode == 0, p.stderr
    return json.loads(p.stdout.splitlines()[-1]), p.stderr

def available(): return python("import vllm_mlx; print(json.dumps(vllm_mlx.load_openblas()))")[0]

def test_import_of_the_package_does_not_import_mlx():
    found, _ = python("import vllm_mlx; print(json.dumps('mlx.core' in sys.modules))")
    assert found is False

@linux
@pytest.mark.parametrize("value", ["0", "false", "off", " No "])
def test_switch(value):
    path, log = python("""
        import vllm_mlx
        from vllm_mlx.blas import mapped_library
        print(json.dumps([vllm_mlx.load_openblas(), mapped_library("libopenblas")]))""", VLLM_MLX_OPENBLAS=value)
    assert path == [None, None] and "switched off by VLLM_MLX_OPENBLAS" in log

@linux
def test_log_says_what_was_loaded():
    path, log = python("import vllm_mlx; print(json.dumps(vllm_mlx.load_openblas()))", VLLM_MLX_OPENBLAS="1")
    if path is None: assert "OpenBLAS: not found" in log
    else: assert f"OpenBLAS: loaded {path}" in log and Path(path).is_file()

@linux
def test_too_late_after_mlx():
    path, log = python("import mlx.core, vllm_mlx; print(json.dumps(vllm_mlx.load_openblas()))")
    assert path is None and "mlx was imported already" in log

@linux
def test_imported_twice_reloaded_and_from_threads():
    paths, _ = python("""
        import importlib, threading, vllm_mlx
        paths = [vllm_mlx.load_openblas()]
        for name in [n for n in sys.modules if n.startswith("vllm_mlx")]: del sys.modules[name]
        import vllm_mlx.blas
        paths.append(vllm_mlx.load_openblas())
        importlib.reload(vllm_mlx.blas)
        work = lambda: paths.append(vllm_mlx.blas.load_openblas())
        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads: t.start()
        for t in threads: t.join()
        import mlx.core
        work()
        print(json.dumps(paths))""")
    assert len(paths) == 7 and len(set(paths)) == 1

@linux
def test_mlx_calls_it():
    "The C name that MLX asks for belongs to the library that was loaded."
    if available() is None: pytest.skip("no OpenBLAS here")
    same, _ = python("""
        import ctypes, vllm_mlx
        path, address = vllm_mlx.load_openblas(), lambda lib: ctypes.cast(lib.cblas_sgemm, ctypes.c_void_p).value
        import mlx.core
        print(json.dumps(address(ctypes.CDLL(None)) == address(ctypes.CDLL(path))))""")
    assert same

@linux
def test_a_broken_library_is_passed_over(tmp_path):
    "A file that is no library, first on sys.path: logged, and the next one is taken."
    lib = tmp_path / "cmeel.prefix" / "lib"
    lib.mkdir(parents=True)
    (lib / "libopenblas.so").write_bytes(b"no library at all")
    path, log = python("import vllm_mlx; print(json.dumps(vllm_mlx.load_openblas()))", PYTHONPATH=os.pathsep.join([str(tmp_path), str(Path(blas.__file__).parents[1])]))
    assert str(lib) in log and path == available()

@linux
def test_nothing_found_is_no_error():
    path, log = python("""
        import os; os.environ["VLLM_MLX_OPENBLAS"] = "0"
        from vllm_mlx import blas
        os.environ["VLLM_MLX_OPENBLAS"] = "1"
        blas.openblas_candidates = lambda: ["libnobody-has-this.so"]
        print(json.dumps(blas.load_openblas()))""")
    assert path is None and "not found; `pip install cmeel-openblas`" in log

def test_whatever_is_raised_inside_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("VLLM_MLX_OPENBLAS", "1")
    def fail(): raise RuntimeError("the disk is on fire")
    monkeypatch.setattr(blas, "_load_first", fail)
    monkeypatch.setattr(blas, "_already_there", fail)
    with caplog.at_level("DEBUG", logger="vllm_mlx.blas"): assert blas.load_openblas() is None
    assert "the disk is on fire" in caplog.text

def test_other_systems_are_left_alone(monkeypatch, caplog):
    monkeypatch.setattr(sys, "platform", "darwin")
    with caplog.at_level("DEBUG", logger="vllm_mlx.blas"): assert blas.load_openblas() is None
    assert "not needed on darwin" in caplog.text

@linux
def test_fortran_runtime_from_another_wheel():
    "A machine without libgfortran: the copy in MLX's or NumPy's wheel answers to the short name, and no file is written."
    (source, mapped, known), _ = python("""
        import os; os.environ["VLLM_MLX_OPENBLAS"] = "0"
        import ctypes
        from vllm_mlx.blas import load_fortran_runtime, mapped_library
        source = load_fortran_runtime()
        try: known = bool(ctypes.CDLL("libgfortran.so.5")._gfortran_etime)
        except OSError: known = False
        print(json.dumps([source, bool(mapped_library("memfd:libgfortran.so.5")), known]))""")
    if source is None: pytest.skip("no wheel here carries a Fortran runtime")
    assert mapped and known and Path(source).name.startswith("libgfortran-")
