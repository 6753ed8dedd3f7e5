#include "support/single_flight.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <stdexcept>
#include <thread>
#include <vector>

namespace flashjit {
namespace {

TEST(SingleFlight, MakesOnceAndKeeps) {
  SingleFlight<int> flights;
  EXPECT_FALSE(flights.holds("a"));
  const auto first = flights.get("a", [] { return 1; });
  const auto second = flights.get("a", [] { return 2; });
  EXPECT_TRUE(first.made);
  EXPECT_FALSE(second.made);
  EXPECT_EQ(second.value, 1);
  EXPECT_TRUE(flights.holds("a"));
  EXPECT_EQ(flights.get("b", [] { return 3; }).value, 3);
}

TEST(SingleFlight, ManyThreadsShareOneMaker) {
  constexpr int kThreads = 16;
  SingleFlight<int> flights;
  std::atomic<int> made = 0, makers = 0;
  std::latch start(kThreads);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([&] {
      start.arrive_and_wait();
      const auto result = flights.get("kernel", [&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        return ++made * 100;
      });
      EXPECT_EQ(result.value, 100);
      makers += result.made;
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(made, 1);
  EXPECT_EQ(makers, 1);
}

TEST(SingleFlight, DifferentKeysFlyTogether) {
  SingleFlight<int> flights;
  std::latch both_inside(2);
  const auto make = [&] {
    both_inside.arrive_and_wait();  // hangs if one key waited for the other
    return 1;
  };
  std::thread other([&] { flights.get("a", make); });
  flights.get("b", make);
  other.join();
  EXPECT_TRUE(flights.holds("a") && flights.holds("b"));
}

TEST(SingleFlight, AMakerThatAsksForItsOwnKeyIsToldSo) {
  SingleFlight<int> flights;
  EXPECT_THROW(flights.get("a", [&] { return flights.get("a", [] { return 1; }).value; }), Error);
  const auto make = [&] { return flights.get("b", [] { return 1; }).value + 1; };
  EXPECT_EQ(flights.get("a", make).value, 2) << "another key, and again, may be asked for";
  EXPECT_EQ(flights.get("a", make).value, 2);
}

TEST(SingleFlight, AFailureReachesAllWaitersAndIsNotKept) {
  constexpr int kThreads = 8;
  SingleFlight<int> flights;
  std::atomic<int> failed = 0, arrived = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([&] {
      ++arrived;
      try {
        flights.get("bad", [&]() -> int {
          while (arrived < kThreads) std::this_thread::yield();
          throw std::runtime_error("no");
        });
      } catch (const std::runtime_error&) {
        ++failed;
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failed, kThreads);
  EXPECT_FALSE(flights.holds("bad"));
  EXPECT_EQ(flights.get("bad", [] { return 7; }).value, 7);
}

}  // namespace
}  // namespace flashjit
