// Functions that every library of kernels has for Python. A library includes this file once, in one of its sources.
//
// `foretoken_layout` returns a table of the structures that Python mirrors, one entry for each and for each of its fields;
// core/native/status.py compares it with the mirrors when the library is loaded.
#pragma once

#include <cstddef>
#include <type_traits>

#include "pool.hpp"

struct LayoutField {
    const char *structure, *name;  // name: null in the entry of the structure itself, structure: null behind the last entry
    int32_t offset, size;
};

// EACH_FIELD(f, S, a, b, ...) is f(S, a) f(S, b) ...
#define EXPAND(...) EXPAND_3(EXPAND_3(EXPAND_3(EXPAND_3(__VA_ARGS__))))
#define EXPAND_3(...) EXPAND_2(EXPAND_2(EXPAND_2(EXPAND_2(__VA_ARGS__))))
#define EXPAND_2(...) EXPAND_1(EXPAND_1(EXPAND_1(EXPAND_1(__VA_ARGS__))))
#define EXPAND_1(...) __VA_ARGS__
#define NOTHING
#define AGAIN() EACH_FIELD_STEP
#define EACH_FIELD(f, S, ...) __VA_OPT__(EXPAND(EACH_FIELD_STEP(f, S, __VA_ARGS__)))
#define EACH_FIELD_STEP(f, S, field, ...) f(S, field) __VA_OPT__(AGAIN NOTHING () (f, S, __VA_ARGS__))

#define LAYOUT_FIELD(S, field) {#S, #field, (int32_t)offsetof(S, field), (int32_t)sizeof(S::field)},
// The entries of a structure and of all its fields. A comma follows each.
#define LAYOUT(S, ...) {#S, nullptr, layout_offset<S>(), (int32_t)sizeof(S)}, EACH_FIELD(LAYOUT_FIELD, S, __VA_ARGS__)

template <class S>
constexpr int32_t layout_offset() {
    static_assert(std::is_standard_layout_v<S> && std::is_trivially_copyable_v<S>, "Python could not mirror it");
    return 0;
}

extern "C" {

void foretoken_use_pool(const void* functions) { POOL = (const PoolFunctions*)functions; }

// The error message of this thread's last call that failed.
const char* foretoken_problem() { return problem(); }

}  // extern "C"
