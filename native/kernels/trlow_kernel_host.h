// The host's half of trlow_kernel.h. g++ compiles every source twice: with TRLOW_HOST_SERIAL as one
// thread that does all the work, and with TRLOW_HOST_FIBERS as real threads and blocks.
//
// Flags: -std=c++17 -O3 -ffp-contract=off -fopenmp-simd (it needs no OpenMP library; without it the
// convolutions run at a fifth of their speed). The serial form is inlined into one runner per
// instruction set, chosen when the library loads. None may contract or reassociate, so all give the
// same bytes.
#pragma once

#include <time.h>

#include <cstdint>
#include <utility>

#include "kernel_entry.h"

#define TRLOW_INLINE static inline __attribute__((always_inline))

#if defined(TRLOW_HOST_SERIAL) == defined(TRLOW_HOST_FIBERS)
#error "define exactly one of TRLOW_HOST_SERIAL and TRLOW_HOST_FIBERS"
#endif

namespace {

template <auto kernel>
struct Runner;

template <class... Parameter, void (*kernel)(Parameter...)>
struct Runner<kernel> {
  static constexpr int parameters = sizeof...(Parameter);
  static_assert(((sizeof(Parameter) == 8) && ...), "every parameter of a kernel is 8 bytes");

  template <std::size_t... index>
  static inline __attribute__((always_inline)) void call(void** params,
                                                         std::index_sequence<index...>) {
    kernel(*static_cast<Parameter*>(params[index])...);
  }
  static inline __attribute__((always_inline)) void unpack(void** params) {
    call(params, std::make_index_sequence<parameters>());
  }

#ifdef TRLOW_HOST_SERIAL
  static void run_baseline(void** params, trlow_host::Geometry) { unpack(params); }
#ifdef __x86_64__
  __attribute__((target("avx2"))) static void run_avx2(void** params, trlow_host::Geometry) {
    unpack(params);
  }
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))) static void run_avx512(
      void** params, trlow_host::Geometry) {
    unpack(params);
  }
#endif
  static auto choose() -> void (*)(void**, trlow_host::Geometry) {
#ifdef __x86_64__
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
      return run_avx512;
    if (__builtin_cpu_supports("avx2")) return run_avx2;
#endif
    return run_baseline;
  }
#else
  static void run_thread(void* params) { unpack(static_cast<void**>(params)); }
  static void run_blocks(void** params, trlow_host::Geometry geometry) {
    trlow_host::fiber_run(geometry, run_thread, params);
  }
  static auto choose() -> void (*)(void**, trlow_host::Geometry) { return run_blocks; }
#endif
};

}  // namespace

// The GPU's declaration, plus an entry in the registry of this build's mode.
#define TRLOW_HOST_KERNEL(name, is_block, ...)                                           \
  TRLOW_INLINE void name(__VA_ARGS__);                                                   \
  static trlow_host::KernelEntry name##_entry = {#name, Runner<&name>::parameters, is_block, \
                                                 Runner<&name>::choose(), nullptr};      \
  static const trlow_host::RegisterKernel name##_registered(TRLOW_HOST_MODE, &name##_entry); \
  TRLOW_INLINE void name(__VA_ARGS__)
#define TRLOW_KERNEL(name, ...) TRLOW_HOST_KERNEL(name, false, __VA_ARGS__)
#define TRLOW_BLOCK_KERNEL(name, ...) TRLOW_HOST_KERNEL(name, true, __VA_ARGS__)

#ifdef TRLOW_HOST_SERIAL
#define TRLOW_HOST_MODE trlow_host::kSerialKernels
#define TRLOW_SHARED(type, name, count) alignas(64) type name[count]
#define TRLOW_BARRIER() ((void)0)
#define TRLOW_WIDTH 16  // the one thread holds tiles of TRLOW_ROWS x TRLOW_WIDTH, as vectors
#define TRLOW_ROWS 4
// With -fopenmp-simd (no OpenMP runtime) the loop becomes vectors before it can become scalars.
#define TRLOW_VECTOR _Pragma("omp simd")

TRLOW_INLINE i64 trlow_thread() { return 0; }
TRLOW_INLINE i64 trlow_threads() { return 1; }
TRLOW_INLINE i64 trlow_block() { return 0; }
TRLOW_INLINE i64 trlow_blocks() { return 1; }
#else
#define TRLOW_HOST_MODE trlow_host::kFiberKernels
#define TRLOW_SHARED(type, name, count) \
  static char name##_key;               \
  type* const name =                    \
      static_cast<type*>(trlow_host::fiber_shared(&name##_key, (count) * sizeof(type)))
#define TRLOW_BARRIER() trlow_host::fiber_barrier()
#define TRLOW_WIDTH 1  // both as on the GPU
#define TRLOW_ROWS 1
#define TRLOW_VECTOR

TRLOW_INLINE i64 trlow_thread() { return trlow_host::fiber_place().thread[0]; }
TRLOW_INLINE i64 trlow_threads() { return trlow_host::fiber_place().block_size[0]; }
TRLOW_INLINE i64 trlow_block() { return trlow_host::fiber_place().block[0]; }
TRLOW_INLINE i64 trlow_blocks() { return trlow_host::fiber_place().grid_size[0]; }
#endif

TRLOW_INLINE u32 trlow_bits(f32 value) {
  u32 bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}
TRLOW_INLINE f32 trlow_float(u32 bits) {
  f32 value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
TRLOW_INLINE f32 trlow_sqrt(f32 value) { return __builtin_sqrtf(value); }
TRLOW_INLINE i64 trlow_address(const void* pointer) {
  return static_cast<i64>(reinterpret_cast<std::intptr_t>(pointer));
}

struct __attribute__((may_alias, aligned(16))) Chunk {
  u32 word[4];
};

TRLOW_INLINE void trlow_publish(i64* slot, i64 value) {
  __atomic_store_n(slot, value, __ATOMIC_RELEASE);
}
TRLOW_INLINE i64 trlow_clock_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ll + now.tv_nsec;
}

// condition ? yes : no, without a branch that would keep a loop from becoming vectors.
TRLOW_INLINE u32 trlow_blend(bool condition, u32 yes, u32 no) {
  const u32 mask = 0u - (u32)condition;
  return (yes & mask) | (no & ~mask);
}

// The conversions of trlow_kernel.h for everything but NaN, in integers alone: they do not depend
// on the rounding and flushing modes that other code of the process may have set.
TRLOW_INLINE u32 trlow_round_f16(f32 value) {
  const u32 bits = trlow_bits(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  // normal: rebias the exponent by 112; a carry out of the mantissa moves it up,
  // from 65520 on to infinity
  const u32 normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // subnormal: the mantissa in units of 2^-24, which lie `shift` bits up
  const u32 exponent = magnitude >> 23, distance = exponent < 113u ? 126u - exponent : 14u;
  const u32 shift = distance < 25u ? distance : 25u;
  const u32 mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  const u32 small = (mantissa + ((1u << (shift - 1u)) - 1u) + ((mantissa >> shift) & 1u)) >> shift;
  const u32 finite = magnitude < 0x38800000u ? small : normal;  // 2^-14
  return sign | (magnitude >= 0x47800000u ? 0x7c00u : finite);  // 2^16
}
TRLOW_INLINE f32 trlow_widen_f16(u16 half) {
  const u32 sign = (u32)(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  // an integer mantissa times a power of two, exactly; subnormals share the least exponent
  const u32 exponent = magnitude >> 10, least = exponent < 1u ? 1u : exponent;
  const i32 mantissa = (i32)(magnitude - ((least - 1u) << 10));
  const u32 finite = trlow_bits((f32)mantissa * trlow_float((least + 102u) << 23));
  return trlow_float(sign | trlow_blend(magnitude >= 0x7c00u, 0x7f800000u, finite));
}
TRLOW_INLINE u32 trlow_round_bf16(f32 value) {
  const u32 bits = trlow_bits(value);
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}
