"""Runs the text of a Metal or CUDA kernel on the CPU: compiled as C++, every thread of a block a fiber, which waits for the others at each barrier and lane exchange.

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

// ---- fibers: one for each thread of a block; who comes to an exchange waits for the others of its warp, or of the block
struct Group { int size = 0, arrived = 0, kind = 0; uint64_t turn = 0; };
struct Fiber { ucontext_t context; std::vector<char> stack; bool done; uint3 id, position; };
static std::vector<Fiber> fibers;
static std::vector<Group> groups;                          // the warps, and last the block
static ucontext_t scheduler;
static int current;
static bool moved;                                         // whether anything has happened since the scheduler last looked
static const char* failure;
enum { SUM = 1, XOR = 2, SYNC = 3, BALLOT = 4, SYNC_WARP = 5 };
static std::vector<uint32_t> slots[2];                     // of this exchange, and of the one before, which some may not have read yet

static const uint32_t* exchange(int kind, uint32_t value, bool whole_block) {
    const int me = current;
    Group& group = groups[whole_block ? groups.size() - 1 : me / 32];
    const uint64_t turn = group.turn;
    if (!whole_block) slots[turn & 1][me] = value;
    if (!group.arrived) group.kind = kind;
    else if (group.kind != kind) failure = "threads of a group are at different exchanges";
    moved = true;
    if (++group.arrived == group.size) { group.arrived = 0; ++group.turn; }
    else while (group.turn == turn) swapcontext(&fibers[me].context, &scheduler);
    return slots[turn & 1].data() + me / 32 * 32;
}
template <typename T> static inline uint32_t as_bits(T x) { static_assert(sizeof(T) == 4); uint32_t u; std::memcpy(&u, &x, 4); return u; }
template <typename T> static inline T of_bits(uint32_t u) { T x; std::memcpy(&x, &u, 4); return x; }
static inline float simd_sum(float x) {
    auto t = exchange(SUM, as_bits(x), false);
    float sum = 0;
    for (int i = 0; i < 32; ++i) sum += of_bits<float>(t[i]);
    return sum;
}
static inline void whole_warp(unsigned mask) { if (mask != 0xffffffffu) failure = "an exchange among part of a warp"; }
template <typename T> static inline T __shfl_xor_sync(unsigned mask, T x, int lanes) {
    whole_warp(mask);
    const int other = current % 32 ^ lanes;
    return of_bits<T>(exchange(XOR, as_bits(x), false)[other]);
}
static inline unsigned __ballot_sync(unsigned mask, bool yes) {
    whole_warp(mask);
    auto t = exchange(BALLOT, yes, false);
    unsigned all = 0;
    for (int i = 0; i < 32; ++i) all |= t[i] << i;
    return all;
}
static inline bool __all_sync(unsigned mask, bool yes) { return __ballot_sync(mask, yes) == 0xffffffffu; }
static inline void __syncthreads() { exchange(SYNC, 0, true); }
static inline void __syncwarp() { exchange(SYNC_WARP, 0, false); }

// ---- single operations that the compiler may not join
#define __expf(x) std::exp(float(x))                      // the C library has a name of its own there
static inline float __fmul_rn(float a, float b) { volatile float c = a * b; return c; }
static inline float __fdiv_rn(float a, float b) { volatile float c = a / b; return c; }
static inline float __fsqrt_rn(float a) { return std::sqrt(a); }

static uint3 blockIdx, gridDim;
#define __device__
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
extern "C" const char* run(void** pointers, const int* shapes, const int64_t* strides, const uint* grid, const uint* block, int backwards) {
    arguments = pointers; all_shapes = shapes; all_strides = strides; failure = nullptr;
    const uint threads = block[0] * block[1] * block[2];
    if (threads %% 32) return "the threads of a block are no whole number of warps";
    fibers.assign(threads, Fiber());
    for (auto& f : fibers) f.stack.resize(1 << 17);
    gridDim = {(grid[0] + block[0] - 1) / block[0], (grid[1] + block[1] - 1) / block[1], (grid[2] + block[2] - 1) / block[2]};
    for (uint bz = 0; bz < (grid[2] + block[2] - 1) / block[2]; ++bz)
    for (uint by = 0; by < (grid[1] + block[1] - 1) / block[1]; ++by)
    for (uint bx = 0; bx < (grid[0] + block[0] - 1) / block[0]; ++bx) {
        blockIdx = {bx, by, bz};
        for (auto& s : slots) s.assign(threads, 0);
        groups.assign(threads / 32 + 1, Group());
        for (uint i = 0; i < threads; ++i) {
            Fiber& f = fibers[i];
            f.id = {i %% block[0], i / block[0] %% block[1], i / block[0] / block[1]};
            f.position = {bx * block[0] + f.id.x, by * block[1] + f.id.y, bz * block[2] + f.id.z};
            f.done = %(partial)s && (f.position.x >= grid[0] || f.position.y >= grid[1] || f.position.z >= grid[2]);   // Metal starts no thread outside of the grid
            if (!f.done) { ++groups[i / 32].size; ++groups.back().size; }
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = f.stack.data();
            f.context.uc_stack.ss_size = f.stack.size();
            f.context.uc_link = &scheduler;
            makecontext(&f.context, body, 0);
        }
        for (bool more = true; more && !failure;) {
            more = moved = false;
            for (uint i = 0; i < threads && !failure; ++i) {
                current = backwards ? threads - 1 - i : i;
                if (fibers[current].done) continue;
                swapcontext(&scheduler, &fibers[current].context);
                more = more || !fibers[current].done;
                moved = moved || fibers[current].done;
            }
            if (more && !moved && !failure) failure = "threads wait at an exchange that others of their group do not come to";
        }
        if (failure) return failure;
    }
    return failure;
}
"""

_TYPES = {mx.float32: "float", mx.float16: "float16_t", mx.bfloat16: "bfloat16_t", mx.int32: "int32_t", mx.bool_: "bool", mx.uint32: "uint32_t"}

def _bytes(x, contiguous=True):
    "A numpy array with the bits of an MLX array; otherwise with its strides too."
    a = np.asarray(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)
    return np.ascontiguousarray(a) if contiguous else a

def _multiplies_and_adds():
    try:
        with open("/proc/cpuinfo") as f: return any(" fma " in line for line in f if line.startswith("flags"))
    except OSError: return False
_JOINED = ["-ffp-contract=fast", *(["-mfma"] if _multiplies_and_adds() else [])]

_libraries = {}                                            # text -> what was made of it

class ShimKernel:
    "A kernel made from a text, called as those of `mx.fast` are."
    def __init__(self, backend, input_names, output_names, source, backwards=False, calls=None, header="", contiguous=True, joined=False):
        self.backend, self.input_names, self.output_names, self.source, self.backwards, self.header, self.contiguous = backend, input_names, output_names, source, backwards, header, contiguous
        self.joined = _JOINED if joined else ["-ffp-contract=off"]      # products and sums as one operation where the compiler likes, as on a GPU
        self.calls = [] if calls is None else calls

    def text(self, inputs, output_dtypes, template):
        "The whole C++ program: signature as MLX generates it, template values as constants."
        types = [_TYPES[x.dtype] for x in inputs]
        parameters = [f"const {t}* {n}" for n, t in zip(self.input_names, types)] + [f"const int* {n}_shape" for n in self.input_names if f"{n}_shape" in self.source] + [f"const int64_t* {n}_strides" for n in self.input_names if f"{n}_strides" in self.source]
        parameters += [f"{_TYPES[d]}* {n}" for n, d in zip(self.output_names, output_dtypes)]
        constants = [f"using {n} = {_TYPES[v]};" if isinstance(v, mx.Dtype) else f"constexpr {'bool' if isinstance(v, bool) else 'int'} {n} = {str(v).lower()};" for n, v in template]
        N = len(inputs)
        call = [f"(const {t}*)arguments[{i}]" for i, t in enumerate(types)] + [f"all_shapes + 8 * {i}" for i, n in enumerate(self.input_names) if f"{n}_shape" in self.source] + [f"all_strides + 8 * {i}" for i, n in enumerate(self.input_names) if f"{n}_strides" in self.source]
        call += [f"({_TYPES[d]}*)arguments[{N + i}]" for i, d in enumerate(output_dtypes)]
        function = f"static void kernel({', '.join(parameters)}) {{\n" + "\n".join(constants) + self.source + "\n}\nstatic void** arguments; static const int* all_shapes; static const int64_t* all_strides;\n"
        return _PREAMBLE + self.header + function + _RUN % dict(call=", ".join(call), partial="true" if self.backend == "metal" else "false")

    def library(self, text):
        key = hashlib.sha256("".join([text, *self.joined]).encode()).hexdigest()
        if key not in _libraries:
            folder = tempfile.mkdtemp(prefix="kernel_shim_")
            try:
                source, target = os.path.join(folder, "kernel.cpp"), os.path.join(folder, "kernel.so")
                with open(source, "w") as f: f.write(text)
                done = subprocess.run([COMPILER, "-std=c++17", "-O1", "-w", *self.joined, "-shared", "-fPIC", "-D_XOPEN_SOURCE=700", "-D_DARWIN_C_SOURCE", source, "-o", target], capture_output=True, text=True)
                if done.returncode: raise RuntimeError(f"the kernel's text does not compile:\n{done.stderr[:4000]}")
                library = ctypes.CDLL(target)
            finally: shutil.rmtree(folder, ignore_errors=True)
            library.run.restype = ctypes.c_char_p
            _libraries[key] = library
        return _libraries[key]

    def __call__(self, *, inputs, output_shapes, output_dtypes, grid, threadgroup, template=(), **_):
        if len(inputs) != len(self.input_names): raise ValueError(f"{len(inputs)} inputs for {self.input_names}")
        self.calls.append(dict(grid=grid, threadgroup=threadgroup, template=dict(template)))
        arrays = [_bytes(x, self.contiguous) for x in inputs]
        kinds = {mx.bfloat16: (0x7fc1, np.uint16), mx.float16: (np.nan, np.float16), mx.float32: (np.nan, np.float32), mx.uint32: (0xdeadbeef, np.uint32)}
        outputs = [np.full(s, *kinds[d]) for s, d in zip(output_shapes, output_dtypes)]
        shapes, strides = np.zeros((len(inputs), 8), np.int32), np.zeros((len(inputs), 8), np.int64)
        for i, a in enumerate(arrays): shapes[i, :a.ndim], strides[i, :a.ndim] = a.shape, np.array(a.strides, np.int64) // a.itemsize
        library = self.library(self.text(inputs, output_dtypes, template))
        pointers = (ctypes.c_void_p * (len(arrays) + len(outputs)))(*[a.ctypes.data for a in arrays + outputs])
        group = [min(t, g) for t, g in zip(threadgroup, grid)] if self.backend == "metal" else threadgroup
        failure = library.run(pointers, shapes.ctypes.data_as(ctypes.c_void_p), strides.ctypes.data_as(ctypes.c_void_p), (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*group), int(self.backwards))
        if failure: raise RuntimeError(failure.decode())
        return [mx.array(o).view(mx.bfloat16) if d == mx.bfloat16 else mx.array(o) for o, d in zip(outputs, output_dtypes)]
