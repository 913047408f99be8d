// A process that writes the log is killed at random failpoints, also during
// recovery. After the restart, each record that was reported as durable is in
// the log exactly once.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <map>
#include <set>

#include "src/log/image.h"
#include "tests/log/journal_folder.h"
#include "tests/support/failpoints.h"

namespace weft::log {
namespace {

constexpr int kLives = 200;
constexpr int kRecordsPerLife = 60;

// What the process reports: the records before `end` are durable.
struct Told {
  int life;
  uint64_t first;
  uint64_t end;
};

std::string RecordOf(int life, uint64_t sequence) {
  return absl::StrCat(life, ":", sequence, ":",
                      std::string((sequence * 37 + life) % 300, 'r'));
}

#define OR_EXIT(condition) \
  if (!(condition)) ::_exit(__LINE__ % 100 + 1)

// Runs one process, without gtest. Exits with 0 at its end.
[[noreturn]] void Live(const std::string& path, int life, int pipe) {
  SetFailpoints("*=kill@0.01", life);
  auto folder = StateFolder::Open(path, kModel);
  OR_EXIT(folder.ok());
  const auto snapshot = (*folder)->ReadSnapshot();
  OR_EXIT(snapshot.ok());
  const uint64_t begin = *snapshot ? (*snapshot)->next_sequence : 0;
  if (*snapshot) {
    std::vector<float> block(100);
    const std::string name = absl::StrCat("image-", begin);
    OR_EXIT(ReadImage(**folder, name, {block}).ok() && block[7] == begin);
  }
  const LogContents contents = ReadLog(**folder, begin, true);
  OR_EXIT(contents.status.ok());
  const uint64_t first = contents.next_sequence;
  prometheus::Registry registry;
  LogMetrics metrics(&registry);
  auto log = LogWriter::Open(folder->get(), first, {}, &metrics);
  OR_EXIT(log.ok());
  for (int i = 0; i < kRecordsPerLife; ++i) {
    const uint64_t sequence = first + i;
    OR_EXIT((*log)->Append(RecordOf(life, sequence)) == sequence);
    if (i % 4 == 0) {
      (*log)->WhenDurable([=] {
        const Told told{.life = life, .first = first, .end = sequence + 1};
        OR_EXIT(::write(pipe, &told, sizeof(told)) == sizeof(told));
      });
    }
    if (i % 20 == 19) {
      const uint64_t next = (*log)->StartSegment();
      std::promise<void> durable;
      (*log)->WhenDurable([&] { durable.set_value(); });
      durable.get_future().wait();
      const std::string name = absl::StrCat("image-", next);
      OR_EXIT(WriteImage(**folder, name,
                         {std::vector<float>(100, static_cast<float>(next))})
                  .ok());
      OR_EXIT((*folder)->WriteSnapshot({next, name}).ok());
      OR_EXIT((*folder)->Cut(next, {name}).ok());
    }
  }
  log->reset();
  ::_exit(0);
}

// Runs one process. Returns what it reported, and sets `status` to how it
// ended.
std::vector<Told> RunLife(const std::string& path, int life, int* status) {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    OR_EXIT(::freopen("/dev/null", "w", stderr));
    Live(path, life, ends[1]);
  }
  ::close(ends[1]);
  std::vector<Told> told;
  Told one{};
  while (::read(ends[0], &one, sizeof(one)) == sizeof(one)) told.push_back(one);
  ::close(ends[0]);
  EXPECT_EQ(::waitpid(child, status, 0), child);
  return told;
}

TEST(CrashTest, WhatIsAcknowledgedSurvivesEveryKill) {
  const TestFolder files;
  std::map<uint64_t, std::string> acknowledged;
  int kills = 0;
  int early_kills = 0;
  for (int life = 0; life < kLives; ++life) {
    int status = 0;
    const std::vector<Told> told = RunLife(files.path(), life, &status);
    ASSERT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0)
        << "life " << life << " ends with " << WEXITSTATUS(status);
    if (WIFSIGNALED(status)) ++kills;
    if (WIFSIGNALED(status) && told.empty()) ++early_kills;
    for (const Told& one : told) {
      for (uint64_t s = one.first; s < one.end; ++s) {
        acknowledged[s] = RecordOf(one.life, s);
      }
    }
    // This read does not repair the log. The next process does.
    const auto folder = files.Open();
    const auto snapshot = folder->ReadSnapshot().value();
    const uint64_t first = snapshot ? snapshot->next_sequence : 0;
    const LogContents contents = ReadLog(*folder, first);
    ASSERT_THAT(contents.status, IsOk()) << "life " << life;
    acknowledged.erase(acknowledged.begin(), acknowledged.lower_bound(first));
    for (const auto& [sequence, record] : acknowledged) {
      ASSERT_LT(sequence, contents.next_sequence) << "life " << life;
      ASSERT_EQ(contents.records[sequence - first], record);
    }
    const std::set<std::string> once(contents.records.begin(),
                                     contents.records.end());
    ASSERT_EQ(once.size(), contents.records.size());
  }
  // The test is useful only if many processes are killed, some before they
  // report anything and some later.
  EXPECT_GT(kills, kLives / 2);
  EXPECT_GT(early_kills, kLives / 10);
  EXPECT_LT(early_kills, kills);
}

}  // namespace
}  // namespace weft::log
