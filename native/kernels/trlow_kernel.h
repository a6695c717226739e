// Portability header of the kernels: one source, two compilers (NVRTC for the GPU, g++ for the host
// device, there as one thread and as real blocks of fibers). No other header on the GPU's side.
//
// A kernel is declared as TRLOW_KERNEL(name, type arg, ...) or TRLOW_BLOCK_KERNEL(name, ...). Every
// parameter is 8 bytes: T*, const T* or i64. A flat kernel strides over its work with TRLOW_EACH,
// so any grid and block are right. A block kernel strides over items with TRLOW_EACH_ITEM; its body
// is a list of phases of TRLOW_EACH_LANE loops with TRLOW_BARRIER() between them. What one phase
// leaves for another lies in TRLOW_SHARED or global memory, never in a register, so any block size
// is right. With every i64 argument 0 a kernel touches no memory: a warm-up launches it so.
//
// Both compilers run with contraction off, so the same expressions give the same bytes everywhere.
#pragma once

typedef float f32;
typedef double f64;
typedef unsigned char u8;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;

#define TRLOW_LANES 256   // lanes of a block kernel: the width of its sums, whatever the block is
#define TRLOW_STRANDS 16  // partial sums of a dot product, so that one thread can add as vectors

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------- the GPU
#define TRLOW_INLINE static __device__ __forceinline__
#define TRLOW_KERNEL(name, ...) extern "C" __global__ void name(__VA_ARGS__)
#define TRLOW_BLOCK_KERNEL(name, ...) extern "C" __global__ void name(__VA_ARGS__)
#define TRLOW_SHARED(type, name, count) __shared__ type name[count]
#define TRLOW_BARRIER() __syncthreads()
#define TRLOW_VECTOR _Pragma("unroll")  // the loop runs over neighbouring channels
#define TRLOW_WIDTH 1  // channels that a thread holds: neighbours take neighbouring ones
#define TRLOW_ROWS 1   // channels of the other operand that it holds

TRLOW_INLINE i64 trlow_thread() { return threadIdx.x; }
TRLOW_INLINE i64 trlow_threads() { return blockDim.x; }
TRLOW_INLINE i64 trlow_block() { return blockIdx.x; }
TRLOW_INLINE i64 trlow_blocks() { return gridDim.x; }

TRLOW_INLINE u32 trlow_bits(f32 value) { return __float_as_uint(value); }
TRLOW_INLINE f32 trlow_float(u32 bits) { return __uint_as_float(bits); }
TRLOW_INLINE f32 trlow_sqrt(f32 value) { return sqrtf(value); }
TRLOW_INLINE i64 trlow_address(const void* pointer) { return (i64)pointer; }

TRLOW_INLINE u32 trlow_blend(bool condition, u32 yes, u32 no) { return condition ? yes : no; }

// A store that the host sees at once where `slot` is pinned host memory.
TRLOW_INLINE void trlow_publish(i64* slot, i64 value) {
  *(volatile i64*)slot = value;
  __threadfence_system();
}
// The GPU's own clock; its rate is the same on all GPUs of a machine, its zero need not be.
TRLOW_INLINE i64 trlow_clock_ns() {
  i64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

struct alignas(16) Chunk {
  u32 word[4];
};

TRLOW_INLINE u32 trlow_round_f16(f32 value) {
  u16 half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
}
TRLOW_INLINE f32 trlow_widen_f16(u16 half) {
  f32 value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}
TRLOW_INLINE u32 trlow_round_bf16(f32 value) {
  u16 half;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
}
#else
// ---------------------------------------------------------------------------------- the host
#include "trlow_kernel_host.h"
#endif

// ------------------------------------------------------------------------------------ loops
#define TRLOW_EACH(index, count)                                                        \
  for (i64 index = trlow_block() * trlow_threads() + trlow_thread(),                    \
           index##_step = trlow_blocks() * trlow_threads();                             \
       index < (count); index += index##_step)
#define TRLOW_EACH_ITEM(item, count) \
  for (i64 item = trlow_block(); item < (count); item += trlow_blocks())
#define TRLOW_EACH_LANE(lane, count) \
  for (i64 lane = trlow_thread(); lane < (count); lane += trlow_threads())
// Runs `call` with `lanes` = what is left of a tile of `width`; that of a whole tile is a constant,
// which the compiler unrolls into registers and vectors.
#define TRLOW_TILE(width, left, lanes, call) \
  do {                                       \
    if ((width) == 1 || (left) >= (width)) { \
      constexpr int lanes = (width);         \
      call;                                  \
    } else {                                 \
      const int lanes = (int)(left);         \
      call;                                  \
    }                                        \
  } while (false)

// Sum of the strands in one fixed order: halves onto halves.
TRLOW_INLINE f32 trlow_tree_sum(f32* strand) {
  for (int half = TRLOW_STRANDS / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) strand[j] += strand[j + half];
  }
  return strand[0];
}

// Every lane's `width` values onto those of lane 0, in the same order: phases of a block kernel.
TRLOW_INLINE void trlow_tree_lanes(f32* lanes, int width) {
  for (int half = TRLOW_LANES / 2; half > 0; half /= 2) {
    TRLOW_EACH_LANE(lane, half) {
      for (int j = 0; j < width; ++j) lanes[lane * width + j] += lanes[(lane + half) * width + j];
    }
    TRLOW_BARRIER();
  }
}

// ---------------------------------------------------------------------------- 16-bit floats
// Round to nearest, ties to even. A NaN keeps its sign and upper payload bits (as numpy's fp16
// conversions do) rather than the hardware's canonical one, so both sides give the same bytes.
TRLOW_INLINE u16 trlow_to_f16(f32 value) {
  const u32 bits = trlow_bits(value), magnitude = bits & 0x7fffffffu;
  const u32 payload = (magnitude >> 13) & 0x3ffu;
  const u32 nan = ((bits >> 16) & 0x8000u) | 0x7c00u | (payload ? payload : 1u);
  return (u16)(magnitude > 0x7f800000u ? nan : trlow_round_f16(value));
}
TRLOW_INLINE f32 trlow_from_f16(u16 half) {
  const bool is_nan = (half & 0x7fffu) > 0x7c00u;
  const u32 nan = ((u32)(half & 0x8000u) << 16) | 0x7f800000u | ((u32)(half & 0x3ffu) << 13);
  return trlow_float(trlow_blend(is_nan, nan, trlow_bits(trlow_widen_f16(half))));
}
TRLOW_INLINE u16 trlow_to_bf16(f32 value) {  // a NaN becomes quiet: its payload may lie below
  const u32 bits = trlow_bits(value);
  const u32 nan = (bits >> 16) | 0x0040u;
  return (u16)((bits & 0x7fffffffu) > 0x7f800000u ? nan : trlow_round_bf16(value));
}
TRLOW_INLINE f32 trlow_from_bf16(u16 half) { return trlow_float((u32)half << 16); }

// ------------------------------------------------------------------------------ mathematics
// exp and log from IEEE operations alone, so they are the same on both sides (within 2 ulp).

// exp(x) = 2^k exp(r), |r| <= ln(2)/2, Taylor series to r^7 (remainder below 6e-9).
TRLOW_INLINE f32 trlow_exp(f32 x) {
  if (!(x > -87.0f)) return x != x ? x : 0.0f;  // results below the normal numbers become 0
  if (x > 88.72283f) return trlow_float(0x7f800000u);
  const f32 scaled = x * 1.4426950408889634f;  // 1 / ln 2
  const i32 k = (i32)(scaled + (scaled < 0.0f ? -0.5f : 0.5f));
  // ln 2 in two parts; k times the first is exact
  const f32 r = (x - (f32)k * 0.693359375f) - (f32)k * -2.12194440054690583e-4f;
  f32 sum = 1.0f / 5040.0f;
  sum = sum * r + 1.0f / 720.0f;
  sum = sum * r + 1.0f / 120.0f;
  sum = sum * r + 1.0f / 24.0f;
  sum = sum * r + 1.0f / 6.0f;
  sum = sum * r + 0.5f;
  sum = sum * (r * r) + r + 1.0f;
  // 2^k in two factors: 2^128 alone has no exponent
  return sum * trlow_float((u32)(k / 2 + 127) << 23) * trlow_float((u32)(k - k / 2 + 127) << 23);
}

// log(x) = k ln 2 + 2 artanh(s), s = (m - 1) / (m + 1), m in [sqrt(1/2), sqrt(2)); series to s^11.
// For x a normal positive number (sums of exp are at least 1).
TRLOW_INLINE f32 trlow_log(f32 x) {
  if (!(x > 0.0f) || x > 3.4028235e38f) return x;  // NaN and +inf go through
  const u32 bits = trlow_bits(x) - 0x3f3504f3u;    // sqrt(1/2)
  const i32 k = (i32)bits >> 23;
  const f32 m = trlow_float((bits & 0x007fffffu) + 0x3f3504f3u);
  const f32 s = (m - 1.0f) / (m + 1.0f), s2 = s * s;
  f32 sum = 2.0f / 11.0f;
  sum = sum * s2 + 2.0f / 9.0f;
  sum = sum * s2 + 2.0f / 7.0f;
  sum = sum * s2 + 2.0f / 5.0f;
  sum = sum * s2 + 2.0f / 3.0f;
  const f32 fraction = 2.0f * s + s * s2 * sum;
  return (f32)k * 0.693359375f + ((f32)k * -2.12194440054690583e-4f + fraction);
}
