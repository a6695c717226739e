// NCCL's data types: how an element is stored, and in what it is combined.
//
// Narrowing rounds to nearest, ties to even. fp16 and bf16 overflow to infinity; the two fp8 types
// saturate to their largest finite number, as the GPU's conversions in NCCL do. A NaN stays a NaN.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace trlow_host {

inline std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

template <class T>
struct Plain {
    using Stored = T;
    using Wide = T;
    static T widen(T value) { return value; }
    static T narrow(T value) { return value; }
};

struct Bfloat16 {
    using Stored = std::uint16_t;
    using Wide = float;
    static float widen(Stored value) { return float_of(std::uint32_t{value} << 16); }
    static Stored narrow(float value) {
        const std::uint32_t bits = bits_of(value);
        if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<Stored>(bits >> 16 | 0x40u);
        return static_cast<Stored>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    }
};

// Without branches, so that loops over it become vectors.
struct Float16 {
    using Stored = std::uint16_t;
    using Wide = float;
    static float widen(Stored value) {
        const std::uint32_t sign = std::uint32_t{value & 0x8000u} << 16;
        const std::uint32_t shifted = std::uint32_t{value & 0x7fffu} << 13;
        // 2^112 moves the exponent from a bias of 15 to one of 127, of subnormal numbers too
        const std::uint32_t finite = bits_of(float_of(shifted) * 0x1p112f);
        return float_of(sign | (shifted >= 0x7c00u << 13 ? 0x7f800000u | shifted : finite));
    }
    static Stored narrow(float value) {
        const std::uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
        const std::uint32_t even = magnitude >> 13 & 1u;
        const std::uint32_t normal = (magnitude + 0xfffu + even - (112u << 23)) >> 13;
        // beside 0.5 a float's last bit is 2^-24, the smallest fp16 number: the addition rounds
        const std::uint32_t half = bits_of(0.5f);
        const std::uint32_t small = bits_of(float_of(magnitude) + 0.5f) - half;
        const std::uint32_t finite = magnitude < 0x38800000u ? small : normal;  // 2^-14
        const std::uint32_t number = magnitude >= 0x477ff000u ? 0x7c00u : finite;  // 65520
        const std::uint32_t nan = 0x7e00u | (magnitude >> 13 & 0x3ffu);
        return static_cast<Stored>(bits >> 16 & 0x8000u) |
               static_cast<Stored>(magnitude > 0x7f800000u ? nan : number);
    }
};

// fp8: sign, `kExponent` bits, `kMantissa` bits; `kFinite`: the largest finite pattern; kNan: a NaN.
template <class T, int kExponent, int kMantissa, std::uint32_t kFinite, std::uint32_t kNan>
struct Minifloat {
    using Stored = T;
    using Wide = float;
    static constexpr int kBias = (1 << (kExponent - 1)) - 1;
    static constexpr int kBits = kExponent + kMantissa;

    static float widen(Stored value) {
        const std::uint32_t sign = static_cast<std::uint32_t>(value >> kBits & 1) << 31;
        const std::uint32_t magnitude = value & ((1u << kBits) - 1u);
        if (magnitude > kFinite) {
            const bool infinite = kExponent == 5;  // e4m3 has no infinity
            const bool mantissa = (magnitude & ((1u << kMantissa) - 1u)) != 0;
            if (infinite && !mantissa) return float_of(sign | 0x7f800000u);
            return float_of(sign | 0x7fc00000u | (magnitude << (23 - kMantissa) & 0x3fffffu));
        }
        const std::uint32_t exponent = magnitude >> kMantissa;
        if (exponent == 0) {
            const float scaled = std::ldexp(static_cast<float>(magnitude), 1 - kBias - kMantissa);
            return float_of(sign | bits_of(scaled));
        }
        return float_of(sign | ((magnitude << (23 - kMantissa)) +
                                (static_cast<std::uint32_t>(127 - kBias) << 23)));
    }

    static Stored narrow(float value) {
        const std::uint32_t bits = bits_of(value);
        const std::uint32_t sign = bits >> 31 << kBits, magnitude = bits & 0x7fffffffu;
        if (magnitude > 0x7f800000u) return static_cast<Stored>(sign | kNan);
        const int exponent = static_cast<int>(magnitude >> 23) - 127;
        const int lowest = 1 - kBias;
        // how many of the 24 significant bits fall away
        const int shift = 23 - kMantissa + (exponent < lowest ? lowest - exponent : 0);
        if (shift > 24) return static_cast<Stored>(sign);
        const std::uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
        const std::uint32_t half = 1u << (shift - 1);
        std::uint32_t kept = mantissa >> shift;
        const std::uint32_t lost = mantissa & ((1u << shift) - 1u);
        if (lost > half || (lost == half && (kept & 1u) != 0)) ++kept;
        // a normal number's hidden bit adds one to the exponent field
        const int field = exponent < lowest ? 0 : exponent + kBias - 1;
        const std::uint64_t result =
            (static_cast<std::uint64_t>(field) << kMantissa) + kept;
        if (result > kFinite) return static_cast<Stored>(sign | kFinite);
        return static_cast<Stored>(sign | static_cast<std::uint32_t>(result));
    }
};

using Float8E4M3 = Minifloat<std::uint8_t, 4, 3, 0x7e, 0x7f>;
using Float8E5M2 = Minifloat<std::uint8_t, 5, 2, 0x7b, 0x7e>;

}  // namespace trlow_host
