// What is done once: one of many threads does it, and a failure is no success.
#include "support/once.hpp"

#include <gtest/gtest.h>

#include <stdexcept>
#include <thread>
#include <vector>

namespace flashjit {
namespace {

TEST(Once, OneOfManyThreadsActsAndTheOthersSeeWhatItDid) {
  for (int round = 0; round < 50; ++round) {
    Once once;
    int acted = 0;
    std::vector<int> seen(8);
    std::vector<std::thread> threads;
    for (int& mine : seen)
      threads.emplace_back([&] {
        once.run([&] { ++acted; });
        mine = acted;
      });
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(seen, std::vector<int>(8, 1));
  }
}

TEST(Once, AfterAnExceptionTheNextTries) {
  Once once;
  for (int i = 0; i < 2; ++i)
    EXPECT_THROW(once.run([] { throw std::runtime_error("not yet"); }), std::runtime_error);
  bool acted = false;
  once.run([&] { acted = true; });
  EXPECT_TRUE(acted);
  once.run([] { throw std::runtime_error("never"); });
}

}  // namespace
}  // namespace flashjit
