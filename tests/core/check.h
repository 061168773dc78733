// The tests of a C++ test program: TEST("claim") { CHECK(...); ... }. The program runs all of them, prints
// what failed and exits with 1 if something did.
#pragma once

#include <cstdio>
#include <exception>
#include <string>
#include <vector>

namespace check {

struct Test {
  const char* claim;
  void (*body)();
};

struct Failure {
  std::string text;
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline bool add(const char* claim, void (*body)()) {
  tests().push_back({claim, body});
  return true;
}

inline void require(bool holds, const char* condition, const char* file, int line) {
  if (!holds) throw Failure{std::string(file) + ":" + std::to_string(line) + ": " + condition};
}

inline bool passes(const Test& test) {
  try {
    test.body();
    return true;
  } catch (const Failure& failure) {
    std::printf("FAILED %s\n  %s\n", test.claim, failure.text.c_str());
  } catch (const std::exception& error) {
    std::printf("FAILED %s\n  threw: %s\n", test.claim, error.what());
  }
  return false;
}

inline int run() {
  int failed = 0;
  for (const Test& test : tests()) failed += passes(test) ? 0 : 1;
  std::printf("%zu tests, %d failed\n", tests().size(), failed);
  return failed > 0 || tests().empty() ? 1 : 0;
}

// The message of the exception of type E that `action` throws; empty if it throws none.
template <typename E, typename Action>
std::string thrown(const Action& action) {
  try {
    action();
  } catch (const E& error) {
    return error.what();
  }
  return "";
}

}  // namespace check

#define CHECK_JOIN_(a, b) a##b
#define CHECK_NAME_(prefix, line) CHECK_JOIN_(prefix, line)
#define TEST(claim)                                                                                  \
  static void CHECK_NAME_(test_, __LINE__)();                                                        \
  static const bool CHECK_NAME_(added_, __LINE__) = check::add(claim, CHECK_NAME_(test_, __LINE__)); \
  static void CHECK_NAME_(test_, __LINE__)()
#define CHECK(condition) check::require(static_cast<bool>(condition), #condition, __FILE__, __LINE__)
