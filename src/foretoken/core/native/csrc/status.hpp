// Statuses of the functions for Python. No exception leaves an extern "C" function: `guarded` turns it into a status, and
// keeps a text that says what was wrong.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <new>
#include <utility>

#if defined(_WIN32)
#define OF_THIS_LIBRARY
#else
#define OF_THIS_LIBRARY __attribute__((visibility("hidden")))
#endif

// core/native/status.py has the same numbers.
enum Status : int32_t { OK = 0, NO_MEMORY = 1, BAD_ARGUMENT = 2, INTERNAL = 3 };

constexpr int PROBLEM_BYTES = 256;

// The text of the last failure in this thread.
OF_THIS_LIBRARY inline char* problem() {
    static thread_local char text[PROBLEM_BYTES];
    return text;
}

// An argument that a function cannot take.
class BadArgument : public std::exception {
   public:
    BadArgument(const char* format, va_list numbers) { std::vsnprintf(text, sizeof text, format, numbers); }
    const char* what() const noexcept override { return text; }

   private:
    char text[PROBLEM_BYTES];
};

// Throws a BadArgument. The text says which argument is wrong, and what was expected.
[[noreturn]] __attribute__((format(printf, 1, 2), noinline, cold)) OF_THIS_LIBRARY inline void refuse(const char* format, ...) {
    va_list numbers;
    va_start(numbers, format);
    const BadArgument error(format, numbers);
    va_end(numbers);
    throw error;
}

// Calls f. Returns a status in place of its exception. purpose: what memory is needed for, with the numbers of its format.
template <class F, class... Numbers>
Status guarded(F f, const char* purpose, Numbers... numbers) noexcept {
    try {
        f();
        return OK;
    } catch (const BadArgument& error) {
        std::snprintf(problem(), PROBLEM_BYTES, "%s", error.what());
        return BAD_ARGUMENT;
    } catch (const std::bad_alloc&) {
        const int written = std::snprintf(problem(), PROBLEM_BYTES, "no memory for ");
        if constexpr (sizeof...(numbers) > 0) std::snprintf(problem() + written, PROBLEM_BYTES - written, purpose, numbers...);
        else std::snprintf(problem() + written, PROBLEM_BYTES - written, "%s", purpose);
        return NO_MEMORY;
    } catch (const std::exception& error) {
        std::snprintf(problem(), PROBLEM_BYTES, "%s", error.what());
    } catch (...) {
        std::snprintf(problem(), PROBLEM_BYTES, "an exception without a text");
    }
    return INTERNAL;
}
