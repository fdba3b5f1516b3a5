// How a function is reached from Python: by one pointer to eight bytes per argument, an integer, an address or a
// double each. ctypes converts arguments one by one, which at one row takes longer than many operations.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

template <class T> static inline T argument(const int64_t* at) {
    double number;
    if constexpr (std::is_floating_point_v<T>) return std::memcpy(&number, at, 8), (T)number;
    else return (T)*at;
}

template <class R, class... A, size_t... i>
static inline int64_t call(R (*fn)(A...), const int64_t* at, std::index_sequence<i...>) {
    if constexpr (std::is_void_v<R>) return fn(argument<A>(at + i)...), 0;
    else return fn(argument<A>(at + i)...);
}

template <class R, class... A> static inline int64_t call(R (*fn)(A...), const int64_t* at) {
    return call(fn, at, std::index_sequence_for<A...>());
}

#define EXPORT(name) \
    extern "C" __attribute__((visibility("default"))) int64_t call_##name(const int64_t* at) { return call(name, at); }
