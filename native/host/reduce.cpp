// What collectives do to bytes.
//
// Invariant: the ranks' inputs are combined in rank order, so all ranks get the same bits, whoever
// came last. 16- and 8-bit floats are widened to float, combined in float, and rounded to nearest
// even once at the end; float stays float, double double. Integers wrap around. ncclAvg on floats
// multiplies each input by 1/n in the data type and then sums; on integers it sums and then
// divides, towards zero. Max and min ignore a NaN beside a number, as fmaxf does on the GPU.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <type_traits>

#include "float_types.h"
#include "state.h"

namespace trlow_host {

namespace {

constexpr std::size_t kChunk = 2048;  // elements combined at a time, small enough for the stack
enum Reduction { kSum, kProd, kMax, kMin, kAvg };

// Signed integers are combined as unsigned ones, which wrap around.
template <class T>
T add(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
        return a + b;
    } else {
        using Unsigned = std::make_unsigned_t<T>;
        return static_cast<T>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
    }
}

template <class T>
T multiply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
        return a * b;
    } else {
        using Unsigned = std::make_unsigned_t<T>;
        return static_cast<T>(static_cast<Unsigned>(a) * static_cast<Unsigned>(b));
    }
}

template <class T>
T greater(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) return std::fmax(a, b);
    return a < b ? b : a;
}

template <class T>
T smaller(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) return std::fmin(a, b);
    return b < a ? b : a;
}

template <class T>
void combine(int reduction, T* total, const T* input, std::size_t count) {
    switch (reduction) {
        case kProd:
            for (std::size_t i = 0; i < count; ++i) total[i] = multiply(total[i], input[i]);
            break;
        case kMax:
            for (std::size_t i = 0; i < count; ++i) total[i] = greater(total[i], input[i]);
            break;
        case kMin:
            for (std::size_t i = 0; i < count; ++i) total[i] = smaller(total[i], input[i]);
            break;
        default:
            for (std::size_t i = 0; i < count; ++i) total[i] = add(total[i], input[i]);
    }
}

template <class Type>
struct Reducer {
    using Stored = typename Type::Stored;
    using Wide = typename Type::Wide;

    static Wide factor_of(const Call& call) {
        Stored stored;
        const Factor& factor = call.factor;
        const void* from = factor.on_device ? factor.address : factor.bytes.data();
        std::memcpy(&stored, from, sizeof stored);
        return Type::widen(stored);
    }

    static void load(Wide* to, const Stored* from, std::size_t count) {
        for (std::size_t i = 0; i < count; ++i) to[i] = Type::widen(from[i]);
    }

    // In the data type: the product is rounded before it is summed.
    static void scale(Wide* values, Wide factor, std::size_t count) {
        for (std::size_t i = 0; i < count; ++i) {
            values[i] = Type::widen(Type::narrow(multiply(values[i], factor)));
        }
    }

    static void divide(Wide* values, std::size_t ranks, std::size_t count) {
        using Long = std::conditional_t<std::is_signed_v<Wide>, std::int64_t, std::uint64_t>;
        const auto by = static_cast<Long>(ranks);
        for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<Wide>(values[i] / by);
    }

    // One chunk: elements [first, first + count) of every rank's input into `total`.
    static void chunk(const Instance& instance, std::size_t first, std::size_t count,
                      Wide* total) {
        const int reduction = instance.signature.reduction;
        const std::size_t ranks = instance.sides.size();
        constexpr bool floats = std::is_floating_point_v<Wide>;
        const bool shares = floats && reduction == kAvg;
        Wide input[kChunk];
        for (std::size_t rank = 0; rank < ranks; ++rank) {
            const Call& call = *instance.sides[rank].call;
            const Stored* from = static_cast<const Stored*>(call.send) + first;
            if constexpr (std::is_same_v<Stored, Wide>) {  // nothing to widen: no copy either
                if (rank > 0 && !shares && reduction != kPreMulSum) {
                    combine<Wide>(reduction, total, from, count);
                    continue;
                }
            }
            Wide* to = rank == 0 ? total : input;
            load(to, from, count);
            if (reduction == kPreMulSum) scale(to, factor_of(call), count);
            if (shares) {
                const Wide share = static_cast<Wide>(1) / static_cast<Wide>(ranks);
                scale(to, Type::widen(Type::narrow(share)), count);
            }
            if (rank > 0) combine<Wide>(reduction, total, input, count);
        }
        if constexpr (!floats) {
            if (reduction == kAvg) divide(total, ranks, count);
        }
    }

    // Elements [first, first + count) of the inputs to elements [0, count) of each of `to`.
    static void run(const Instance& instance, std::size_t first, std::size_t count,
                    const std::vector<void*>& to) {
        Wide total[kChunk];
        for (std::size_t done = 0; done < count; done += kChunk) {
            const std::size_t part = std::min(kChunk, count - done);
            chunk(instance, first + done, part, total);
            for (void* each : to) {
                Stored* out = static_cast<Stored*>(each) + done;
                for (std::size_t i = 0; i < part; ++i) out[i] = Type::narrow(total[i]);
            }
        }
    }
};

using Run = void (*)(const Instance&, std::size_t, std::size_t, const std::vector<void*>&);

struct DataType {
    const char* name;
    std::size_t nbytes;
    Run run;
};

// In the order of ncclDataType_t.
const DataType kTypes[] = {
    {"int8", 1, Reducer<Plain<std::int8_t>>::run},
    {"uint8", 1, Reducer<Plain<std::uint8_t>>::run},
    {"int32", 4, Reducer<Plain<std::int32_t>>::run},
    {"uint32", 4, Reducer<Plain<std::uint32_t>>::run},
    {"int64", 8, Reducer<Plain<std::int64_t>>::run},
    {"uint64", 8, Reducer<Plain<std::uint64_t>>::run},
    {"float16", 2, Reducer<Float16>::run},
    {"float32", 4, Reducer<Plain<float>>::run},
    {"float64", 8, Reducer<Plain<double>>::run},
    {"bfloat16", 2, Reducer<Bfloat16>::run},
    {"float8_e4m3", 1, Reducer<Float8E4M3>::run},
    {"float8_e5m2", 1, Reducer<Float8E5M2>::run},
};

void move(void* to, const void* from, std::size_t nbytes) {
    if (to != from && nbytes > 0) std::memmove(to, from, nbytes);
}

void* at(void* base, std::size_t offset) { return static_cast<char*>(base) + offset; }

void reduce_scatter(const Instance& instance, Run run) {
    const std::size_t count = instance.signature.count;
    for (std::size_t rank = 0; rank < instance.sides.size(); ++rank) {
        run(instance, rank * count, count, {instance.sides[rank].call->recv});
    }
}

void all_gather(const Instance& instance, std::size_t nbytes) {
    for (std::size_t from = 0; from < instance.sides.size(); ++from) {
        for (const Side& to : instance.sides) {
            move(at(to.call->recv, from * nbytes), instance.sides[from].call->send, nbytes);
        }
    }
}

}  // namespace

std::size_t dtype_nbytes(int dtype) {
    return dtype < 0 || dtype >= static_cast<int>(std::size(kTypes))
               ? 0
               : kTypes[static_cast<std::size_t>(dtype)].nbytes;
}

const char* dtype_name(int dtype) { return kTypes[static_cast<std::size_t>(dtype)].name; }

void reduce(const Instance& instance) {
    const Signature& signature = instance.signature;
    const DataType& type = kTypes[static_cast<std::size_t>(signature.dtype)];
    const std::size_t nbytes = signature.count * type.nbytes;
    const auto root = static_cast<std::size_t>(signature.root);
    const auto& sides = instance.sides;
    std::vector<void*> outputs;
    switch (signature.op) {
        case Op::all_reduce:
            for (const Side& side : sides) outputs.push_back(side.call->recv);
            type.run(instance, 0, signature.count, outputs);
            break;
        case Op::reduce:
            type.run(instance, 0, signature.count, {sides[root].call->recv});
            break;
        case Op::reduce_scatter:
            reduce_scatter(instance, type.run);
            break;
        case Op::broadcast:
            for (const Side& side : sides) move(side.call->recv, sides[root].call->send, nbytes);
            break;
        case Op::all_gather:
            all_gather(instance, nbytes);
            break;
        default:
            move(sides[1].call->recv, sides[0].call->send, nbytes);
    }
}

}  // namespace trlow_host
