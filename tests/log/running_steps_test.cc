#include "src/log/running_steps.h"

#include "tests/log/journal_folder.h"

namespace weft::log {
namespace {

constexpr AdapterKey kKey = AdapterKey{7};
const std::string kDigest = "t" + std::string(32, 'd');

class RunningStepsTest : public testing::Test {
 protected:
  std::unique_ptr<RunningSteps> Open() {
    return RunningSteps::Open(state_->directory(), kRunningSteps).value();
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
  {
    const auto running = Open();
    EXPECT_TRUE(running->has_suspects());
    EXPECT_EQ(running->EndsOf(kKey, 3, kDigest), 1u);
    EXPECT_EQ(running->EndsOf(kKey, 4, kDigest), 1u);
    EXPECT_EQ(running->EndsOf(kKey, 5, kDigest), 0u);
    running->Begin(kKey, 4, kDigest);
    running->Begin(kKey, 5, kDigest);
  }
  const auto running = Open();
  EXPECT_EQ(running->EndsOf(kKey, 3, kDigest), 0u);
  EXPECT_EQ(running->EndsOf(kKey, 4, kDigest), 2u);
  EXPECT_EQ(running->EndsOf(kKey, 5, kDigest), 1u);
}

TEST_F(RunningStepsTest, TwoEndsAreNeverForgotten) {
  EndWhile(3, 3);
  EndWhile(3, 3);
  for (int start = 0; start < 3; ++start) EXPECT_EQ(EndsOf(3), 2u);
}

TEST_F(RunningStepsTest, AStepIsExcusedBeforeTheProcessEndsOnPurpose) {
  {
    const auto running = Open();
    running->Begin(kKey, 1, kDigest);
    running->Excuse();
    running->Begin(kKey, 2, kDigest);
  }
  EXPECT_FALSE(Open()->has_suspects());
}

TEST_F(RunningStepsTest, AStepThatHasEndedIsNoSuspect) {
  {
    const auto running = Open();
    running->Begin(kKey, 1, kDigest);
    running->End();
    running->Begin(kKey, 2, kDigest);
  }
  const auto running = Open();
  EXPECT_EQ(running->EndsOf(kKey, 1, kDigest), 0u);
  EXPECT_EQ(running->EndsOf(kKey, 2, kDigest), 1u);
}

TEST_F(RunningStepsTest, AStepIsOneOfAnAdapterWithAPayload) {
  EndWhile(3, 3);
  const auto running = Open();
  EXPECT_EQ(running->EndsOf(kKey, 3, kDigest), 1u);
  EXPECT_EQ(running->EndsOf(AdapterKey{8}, 3, kDigest), 0u);
  EXPECT_EQ(running->EndsOf(kKey, 3, "t" + std::string(32, 'e')), 0u);
}

TEST_F(RunningStepsTest, TheStepsOfTheLatestEndStayOfTooMany) {
  EndWhile(1, 600);
  EndWhile(1, 600);
  EndWhile(3001, 3001);
  EXPECT_EQ(EndsOf(3001), 1u);
}

TEST_F(RunningStepsTest, AFileOfOtherBytesKeepsNoServerFromStarting) {
  EndWhile(3, 3);
  const std::string name = files_.path() + "/RUNNING";
  WriteBytes(name, std::string(ReadBytes(name).size(), '\xff'));
  EXPECT_EQ(EndsOf(3), 0u);
  EndWhile(3, 3);
  EXPECT_EQ(EndsOf(3), 1u);
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
