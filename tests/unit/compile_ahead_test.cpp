// Compiling in parallel while something else measures.
#include "autotune/compile_ahead.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "flashjit/flashjit.hpp"

namespace flashjit::autotune {
namespace {

TEST(CompileAhead, ResultsInOrderWhateverTheThreads) {
  for (unsigned threads : {1u, 2u, 7u, 32u}) {
    CompileAhead<int> work(50, threads, [](std::size_t i) {
      std::this_thread::sleep_for(std::chrono::microseconds((i * 7919) % 500));
      return static_cast<int>(i * i);
    });
    for (std::size_t i = 0; i < 50; i += 2) work.want(i);
    for (int i = 0; i < 50; ++i) EXPECT_EQ(work.take(i), i * i);
  }
}

TEST(CompileAhead, ErrorsReachTheTaker) {
  CompileAhead<int> work(2, 2, [](std::size_t i) -> int {
    if (i == 0) throw Error(ErrorCode::compile_failed, "first");
    return 1;
  });
  EXPECT_THROW(work.take(0), Error);
  EXPECT_EQ(work.take(1), 1);
}

TEST(CompileAhead, WorksOnlyOnWhatIsWantedAndFirstOnWhatIsWaitedFor) {
  std::vector<std::size_t> order;
  {
    std::promise<void> started, go;
    const auto gate = go.get_future().share();
    CompileAhead<int> work(100, 1, [&](std::size_t i) {
      if (i == 0) started.set_value(), gate.wait();
      order.push_back(i);
      return 0;
    });
    for (const std::size_t i : {0, 5, 6, 7}) work.want(i);
    started.get_future().wait();
    std::jthread opener([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));  // till take(7) waits
      go.set_value();
    });
    work.take(7);
    work.take(6);
  }
  ASSERT_GE(order.size(), 3u);
  EXPECT_EQ((std::vector<std::size_t>{0, 7}), (std::vector<std::size_t>{order[0], order[1]}));
  for (const std::size_t i : order) EXPECT_TRUE(i == 0 || (i >= 5 && i <= 7)) << i;
}

TEST(CompileAhead, LeavesOutTheRestWhenDropped) {
  constexpr int kItems = 100000;  // almost a minute of work, however late this thread comes
  std::atomic<int> done{0};
  {
    CompileAhead<int> work(kItems, 2, [&](std::size_t) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return ++done;
    });
    for (std::size_t i = 0; i < kItems; ++i) work.want(i);
    work.take(0);
  }
  EXPECT_LT(done.load(), kItems);
}

}  // namespace
}  // namespace flashjit::autotune
