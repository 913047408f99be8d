#include "src/log/running_steps.h"

#include "tests/log/journal_folder.h"

namespace weft::log {
namespace {

constexpr AdapterKey kKey = AdapterKey{7};
const std::string kDigest = "t" + std::string(32, 'd');

class RunningStepsTest : public testing::Test {
 protected:
  std::unique_ptr<RunningSteps> Open() {
    return RunningSteps::Open(*state_).value();
  }
  // A process that ends while these steps of the adapter run.
  void EndWhile(uint64_t first, uint64_t last) {
    const auto running = Open();
    for (uint64_t s = first; s <= last; ++s) running->Begin(kKey, s, kDigest);
  }
  uint64_t EndsOf(uint64_t step) { return Open()->EndsOf(kKey, step, kDigest); }

  TestFolder files_;
  std::unique_ptr<StateFolder> state_ = files_.Open();
};

TEST_F(RunningStepsTest, CountsTheEndsOfProcessesInWhichAStepRan) {
  EXPECT_FALSE(Open()->has_suspects());
  EndWhile(3, 4);
  EXPECT_EQ(EndsOf(3), 1u);
  EXPECT_EQ(EndsOf(4), 1u);
  EXPECT_EQ(EndsOf(5), 0u);
  EndWhile(4, 5);
  EXPECT_TRUE(Open()->has_suspects());
  EXPECT_EQ(EndsOf(3), 1u);
  EXPECT_EQ(EndsOf(4), 2u);
  EXPECT_EQ(EndsOf(5), 1u);
}

TEST_F(RunningStepsTest, AStepThatHasEndedIsNoSuspect) {
  {
    const auto running = Open();
    running->Begin(kKey, 1, kDigest);
    running->End();
    running->Begin(kKey, 2, kDigest);
  }
  EXPECT_EQ(EndsOf(1), 0u);
  EXPECT_EQ(EndsOf(2), 1u);
}

TEST_F(RunningStepsTest, AStepIsOneOfAnAdapterWithAPayload) {
  EndWhile(3, 3);
  const auto running = Open();
  EXPECT_EQ(running->EndsOf(kKey, 3, kDigest), 1u);
  EXPECT_EQ(running->EndsOf(AdapterKey{8}, 3, kDigest), 0u);
  EXPECT_EQ(running->EndsOf(kKey, 3, "t" + std::string(32, 'e')), 0u);
}

TEST_F(RunningStepsTest, TheLatestSuspectsStayOfTooMany) {
  EndWhile(1, 2000);
  EndWhile(3001, 3001);
  EXPECT_EQ(EndsOf(3001), 1u);
  size_t known = 0;
  for (uint64_t s = 1; s <= 2000; ++s) {
    if (s % 20 == 0) known += EndsOf(s);
  }
  EXPECT_GT(known, 0u);
}

TEST_F(RunningStepsTest, AFileThatIsCutKeepsNoServerFromStarting) {
  EndWhile(3, 3);
  const std::string name = files_.path() + "/RUNNING";
  std::filesystem::resize_file(name, 100);
  EXPECT_EQ(EndsOf(3), 0u);
  EndWhile(3, 3);
  EXPECT_EQ(EndsOf(3), 1u);
}

}  // namespace
}  // namespace weft::log
