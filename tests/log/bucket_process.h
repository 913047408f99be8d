// A process that keeps its state in a store in memory.
#ifndef WEFT_TESTS_LOG_BUCKET_PROCESS_H_
#define WEFT_TESTS_LOG_BUCKET_PROCESS_H_

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "src/log/bucket/log_owner.h"
#include "src/log/bucket/manifest.h"
#include "src/log/bucket/state_bucket.h"
#include "src/log/log_summary.h"
#include "src/log/record.h"
#include "tests/log/journal_folder.h"
#include "tests/support/memory_store.h"
#include "tests/support/status_matchers.h"

namespace weft::log {

// A process with a state in the store: it has taken a log, read it to its end,
// and may write.
class Process {
 public:
  explicit Process(store::MemoryObjects* objects, const std::string& name,
                   absl::Duration patience = absl::ZeroDuration(),
                   int num_logs = 1)
      : self_{.name = name, .process = absl::StrCat("process-", ++last_)},
        watches_(num_logs,
                 LogWatch(self_, patience, absl::InfiniteDuration())) {
    state = StateBucket::Open(std::make_unique<store::MemoryStore>(objects),
                              kModel, false)
                .value();
  }

  absl::StatusOr<bool> TryTake() { return state->TryTake(self_, &watches_); }
  // Returns the log that the process has.
  int log_number() const { return state->owner()->keys().log; }

  // Takes a log, reads it, and goes on with it.
  absl::Status Start() {
    const absl::StatusOr<bool> taken = TryTake();
    if (!taken.ok()) return taken.status();
    if (!*taken) return absl::UnavailableError("not free");
    return Read();
  }

  absl::Status Read() {
    const auto snapshot = state->ReadSnapshot();
    if (!snapshot.ok()) return snapshot.status();
    next = *snapshot ? (*snapshot)->next_sequence : 1;
    const absl::StatusOr<log::Snapshot> read = ToSnapshot(*snapshot);
    if (!read.ok()) return read.status();
    found = *snapshot ? *read->notes.at(kFound) : "";
    auto reader = state->OpenLog(next);
    if (!reader.ok()) return reader.status();
    for (;;) {
      const auto record = (*reader)->Next();
      if (!record.ok()) return record.status();
      if (!*record) break;
      EXPECT_EQ((*record)->sequence, next++);
      found += (*record)->bytes;
    }
    if (state->owner() == nullptr) return absl::OkStatus();
    auto sink = state->ContinueLog(next);
    if (sink.ok()) log = *std::move(sink);
    return sink.status();
  }

  // Appends a group of one-letter records. They stay in `group` until the
  // store has them.
  absl::Status Write(const std::string& letters) {
    if (group.empty()) {
      for (const char letter : letters) group.emplace_back(1, letter);
    }
    const absl::Status written = log->WriteGroup(next, group).status();
    if (written.ok()) {
      next += group.size();
      for (const std::string& letter : group) found += letter;
      group.clear();
    }
    return written;
  }

  // A snapshot of all that was written, with an adapter for each of `images`.
  absl::Status Snapshot(const std::set<std::string>& images = {}) {
    EXPECT_THAT(log->BeginSegment(next), IsOk());
    log::Snapshot snapshot;
    snapshot.notes[kFound] = std::make_shared<const std::string>(found);
    for (const std::string& file : images) {
      snapshot.adapters.push_back({.image = ImageRecord{.file = file}});
    }
    const absl::Status written = state->WriteSnapshot(
        {.next_sequence = next, .bytes = Encode(snapshot).value()});
    return written.ok() ? state->Cut(next, images) : written;
  }

  std::unique_ptr<StateBucket> state;
  std::unique_ptr<LogSink> log;
  uint64_t next = 0;
  std::string found;  // The letters of all records, in order.
  std::vector<std::string> group;

 private:
  static constexpr char kFound[] = "found";  // The note of a snapshot.
  static inline int last_ = 0;
  const Instance self_;
  std::vector<LogWatch> watches_;
};

}  // namespace weft::log

#endif  // WEFT_TESTS_LOG_BUCKET_PROCESS_H_
