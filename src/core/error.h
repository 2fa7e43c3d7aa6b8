// Errors. Two kinds, because they end a command differently:
//   UserError  what the user gave is wrong: a typo, a missing file, a damaged checkpoint. Exit code 2, one clear line.
//   Error      the work failed or an internal rule was broken. Exit code 1, with file and line.
// A UserError says what was found, what was wanted, and what to do next.
#pragma once

#include <fmt/core.h>

#include <new>
#include <stdexcept>
#include <string>

namespace tessera {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class UserError : public Error {
 public:
  using Error::Error;
};

constexpr int kFailed = 1;  // exit codes
constexpr int kUserMistake = 2;

// How an exception ends the process.
struct Ending {
  int exit_code;
  std::string message;
};
inline Ending ending_of(const std::exception& error) {
  if (dynamic_cast<const UserError*>(&error) != nullptr) return {kUserMistake, error.what()};
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) {
    return {kFailed, "out of memory; choose a smaller model, batch or sequence"};
  }
  return {kFailed, error.what()};
}

template <class... Args>
[[noreturn]] void fail_user(fmt::format_string<Args...> format, Args&&... args) {
  throw UserError(fmt::format(format, std::forward<Args>(args)...));
}

namespace detail {
template <class... Args>
[[noreturn]] void fail_check(const char* file, int line, const char* condition, fmt::format_string<Args...> format,
                             Args&&... args) {
  throw Error(fmt::format("{}:{}: {} (rule broken: {})", file, line, fmt::format(format, std::forward<Args>(args)...),
                          condition));
}
}  // namespace detail
}  // namespace tessera

// Checks a rule of ours, not of the user's: shapes between ops, offsets, states. Always on; none sits in an inner loop.
#define TESSERA_CHECK(condition, ...)                                             \
  do {                                                                            \
    if (!(condition)) {                                                           \
      ::tessera::detail::fail_check(__FILE__, __LINE__, #condition, __VA_ARGS__); \
    }                                                                             \
  } while (false)
