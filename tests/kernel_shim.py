"""Runs the text of a Metal or CUDA kernel on the CPU: compiled as C++, every thread of a block a fiber, in lockstep at each barrier and lane exchange.

`ShimKernel` stands in for what `mx.fast.metal_kernel` and `mx.fast.cuda_kernel` return, so the code that calls a kernel is tested with it.
Types, index names and the signature are those MLX generates; a thread that takes part in another exchange than its neighbours, or in none, is an error."""
import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile

import mlx.core as mx
import numpy as np

COMPILER = next((c for c in (os.environ.get("CXX"), "g++", "c++", "clang++") if c and shutil.which(c)), None)

_PREAMBLE = r"""
#include <ucontext.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
using std::min; using std::max;
typedef unsigned int uint;

struct bfloat16_t {                                        // rounds to nearest even, as the device does
    uint16_t bits = 0;
    bfloat16_t() = default;
    explicit bfloat16_t(float f) { uint32_t u; std::memcpy(&u, &f, 4); bits = std::isnan(f) ? 0x7fc0 : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16); }
    explicit operator float() const { uint32_t u = uint32_t(bits) << 16; float f; std::memcpy(&f, &u, 4); return f; }
    explicit operator bool() const { return bits & 0x7fff; }
};
typedef _Float16 float16_t;

struct uint3 { uint x, y, z; };
struct float4 { float x, y, z, w; };
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- fibers: one for each thread of a block; a collective writes, yields once, and reads what the others wrote
struct Fiber { ucontext_t context; std::vector<char> stack; bool done; int ops; uint3 id, position; };
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static int current;
static const char* failure;
enum { SUM = 1, XOR = 2, SYNC = 3 };
struct Slot { float value; int kind, op; };
static std::vector<Slot> slots[2];

static const std::vector<Slot>& exchange(int kind, float value, bool whole_block) {
    const int me = current, op = ++fibers[me].ops;
    auto& table = slots[op & 1];
    table[me] = {value, kind, op};
    swapcontext(&fibers[me].context, &scheduler);
    const int from = whole_block ? 0 : me / 32 * 32, to = whole_block ? int(fibers.size()) : std::min(from + 32, int(fibers.size()));
    for (int i = from; i < to; ++i)
        if (table[i].op != op || table[i].kind != kind) failure = "threads of a group are at different exchanges";
    return table;
}
static inline float simd_sum(float x) {
    const int from = current / 32 * 32;
    auto& t = exchange(SUM, x, false);
    float sum = 0;
    for (int i = 0; i < 32; ++i) sum += t[from + i].value;
    return sum;
}
static inline float __shfl_xor_sync(unsigned mask, float x, int lanes) {
    if (mask != 0xffffffffu) failure = "a shuffle among part of a warp";
    const int from = current / 32 * 32, other = from + ((current - from) ^ lanes);
    return exchange(XOR, x, false)[other].value;
}
static inline void __syncthreads() { exchange(SYNC, 0, true); }

static uint3 blockIdx;
#define threadIdx (fibers[current].id)
#define thread_position_in_grid (fibers[current].position)
#define thread_position_in_threadgroup (fibers[current].id)
#define thread_index_in_simdgroup (uint(current % 32))
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define threadgroup static
typedef int Shape[8];
"""

_RUN = r"""
static void body() {
    kernel(%(call)s);
    fibers[current].done = true;
    swapcontext(&fibers[current].context, &scheduler);
}
extern "C" const char* run(void** pointers, const int* shapes, const uint* grid, const uint* block, int backwards) {
    arguments = pointers; all_shapes = shapes; failure = nullptr;
    const uint threads = block[0] * block[1] * block[2];
    if (threads %% 32) return "the threads of a block are no whole number of warps";
    fibers.assign(threads, Fiber());
    for (auto& s : slots) s.assign(threads, Slot{0, 0, 0});
    for (auto& f : fibers) f.stack.resize(1 << 17);
    for (uint bz = 0; bz < (grid[2] + block[2] - 1) / block[2]; ++bz)
    for (uint by = 0; by < (grid[1] + block[1] - 1) / block[1]; ++by)
    for (uint bx = 0; bx < (grid[0] + block[0] - 1) / block[0]; ++bx) {
        blockIdx = {bx, by, bz};
        for (uint i = 0; i < threads; ++i) {
            Fiber& f = fibers[i];
            f.id = {i %% block[0], i / block[0] %% block[1], i / block[0] / block[1]};
            f.position = {bx * block[0] + f.id.x, by * block[1] + f.id.y, bz * block[2] + f.id.z};
            f.ops = 0;
            f.done = %(partial)s && (f.position.x >= grid[0] || f.position.y >= grid[1] || f.position.z >= grid[2]);   // Metal starts no thread outside of the grid
            for (auto& s : slots) s[i] = {0, 0, 0};
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = f.stack.data();
            f.context.uc_stack.ss_size = f.stack.size();
            f.context.uc_link = &scheduler;
            makecontext(&f.context, body, 0);
        }
        for (bool more = true; more && !failure;) {
            more = false;
            for (uint i = 0; i < threads; ++i) {
                current = backwards ? threads - 1 - i : i;
                if (fibers[current].done) continue;
                swapcontext(&scheduler, &fibers[current].context);
                more = more || !fibers[current].done;
            }
        }
        if (failure) return failure;
        for (auto& f : fibers) if (!%(partial)s && f.ops != fibers[0].ops) return "threads of a block took part in different numbers of exchanges";
    }
    return failure;
}
"""

_TYPES = {mx.float32: "float", mx.float16: "float16_t", mx.bfloat16: "bfloat16_t", mx.int32: "int32_t", mx.bool_: "bool", mx.uint32: "uint32_t"}

def _bytes(x):
    "A numpy array with the bits of an MLX array."
    return np.ascontiguousarray(np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x))

class ShimKernel:
    "A kernel made from a text, called as those of `mx.fast` are."
    def __init__(self, backend, input_names, output_names, source, backwards=False, calls=None):
        self.backend, self.input_names, self.output_names, self.source, self.backwards = backend, input_names, output_names, source, backwards
        self.libraries, self.calls = {}, [] if calls is None else calls

    def text(self, inputs, output_dtypes, template):
        "The whole C++ program: signature as MLX generates it, template values as constants."
        types = [_TYPES[x.dtype] for x in inputs]
        parameters = [f"const {t}* {n}" for n, t in zip(self.input_names, types)] + [f"const int* {n}_shape" for n in self.input_names if f"{n}_shape" in self.source]
        parameters += [f"{_TYPES[d]}* {n}" for n, d in zip(self.output_names, output_dtypes)]
        constants = [f"using {n} = {_TYPES[v]};" if isinstance(v, mx.Dtype) else f"constexpr {'bool' if isinstance(v, bool) else 'int'} {n} = {str(v).lower()};" for n, v in template]
        N = len(inputs)
        call = [f"(const {t}*)arguments[{i}]" for i, t in enumerate(types)] + [f"all_shapes + 8 * {i}" for i, n in enumerate(self.input_names) if f"{n}_shape" in self.source]
        call += [f"({_TYPES[d]}*)arguments[{N + i}]" for i, d in enumerate(output_dtypes)]
        function = f"static void kernel({', '.join(parameters)}) {{\n" + "\n".join(constants) + self.source + "\n}\nstatic void** arguments; static const int* all_shapes;\n"
        return _PREAMBLE + function + _RUN % dict(call=", ".join(call), partial="true" if self.backend == "metal" else "false")

    def library(self, text):
        key = hashlib.sha256(text.encode()).hexdigest()
        if key not in self.libraries:
            folder = tempfile.mkdtemp(prefix="kernel_shim_")
            try:
                source, target = os.path.join(folder, "kernel.cpp"), os.path.join(folder, "kernel.so")
                with open(source, "w") as f: f.write(text)
                done = subprocess.run([COMPILER, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-D_XOPEN_SOURCE=700", "-D_DARWIN_C_SOURCE", source, "-o", target], capture_output=True, text=True)
                if done.returncode: raise RuntimeError(f"the kernel's text does not compile:\n{done.stderr[:4000]}")
                library = ctypes.CDLL(target)
            finally: shutil.rmtree(folder, ignore_errors=True)
            library.run.restype = ctypes.c_char_p
            self.libraries[key] = library
        return self.libraries[key]

    def __call__(self, *, inputs, output_shapes, output_dtypes, grid, threadgroup, template=(), **_):
        if len(inputs) != len(self.input_names): raise ValueError(f"{len(inputs)} inputs for {self.input_names}")
        self.calls.append(dict(grid=grid, threadgroup=threadgroup, template=dict(template)))
        arrays = [_bytes(x) for x in inputs]
        outputs = [np.full(s, 0x7fc1 if d == mx.bfloat16 else np.nan, np.uint16 if d == mx.bfloat16 else np.float16 if d == mx.float16 else np.float32) for s, d in zip(output_shapes, output_dtypes)]
        shapes = np.zeros((len(inputs), 8), np.int32)
        for row, x in zip(shapes, inputs): row[:x.ndim] = x.shape
        library = self.library(self.text(inputs, output_dtypes, template))
        pointers = (ctypes.c_void_p * (len(arrays) + len(outputs)))(*[a.ctypes.data for a in arrays + outputs])
        group = [min(t, g) for t, g in zip(threadgroup, grid)] if self.backend == "metal" else threadgroup
        failure = library.run(pointers, shapes.ctypes.data_as(ctypes.c_void_p), (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*group), int(self.backwards))
        if failure: raise RuntimeError(failure.decode())
        return [mx.array(o).view(mx.bfloat16) if d == mx.bfloat16 else mx.array(o) for o, d in zip(outputs, output_dtypes)]
