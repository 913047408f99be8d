// A folder for the state of a test, with short names for what tests do to it.
#ifndef WEFT_TESTS_LOG_JOURNAL_FOLDER_H_
#define WEFT_TESTS_LOG_JOURNAL_FOLDER_H_

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "src/log/folder/state_folder.h"
#include "src/log/log_writer.h"
#include "tests/support/status_matchers.h"

namespace weft::log {

inline constexpr char kModel[] = "SmolLM2 0123456789abcdef";

inline std::string ReadBytes(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream bytes;
  bytes << file.rdbuf();
  return bytes.str();
}

inline void WriteBytes(const std::filesystem::path& path,
                       const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

// The folder is in memory if the system has such a file system, because a test
// syncs thousands of times and does not test the disk.
class TestFolder {
 public:
  TestFolder() {
    std::string path = std::filesystem::is_directory("/dev/shm")
                           ? std::string("/dev/shm/journal_XXXXXX")
                           : std::filesystem::temp_directory_path().string() +
                                 "/journal_XXXXXX";
    path_ = ::mkdtemp(path.data());
  }
  ~TestFolder() { std::filesystem::remove_all(path_); }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;

  std::string path() const { return path_ + "/state"; }
  std::filesystem::path Segment(uint64_t first) const {
    return std::filesystem::path(path()) / "log" /
           StateFolder::SegmentName(first);
  }
  std::unique_ptr<StateFolder> Open() const {
    return StateFolder::Open(path(), kModel).value();
  }

 private:
  std::string path_;
};

// The contents of a log, beginning at a given record.
struct LogContents {
  absl::Status status;  // How the reading ended.
  std::vector<std::string> records;
  uint64_t next_sequence = 0;
  uint64_t torn_bytes = 0;
};

inline LogContents ReadLog(const StateFolder& folder,
                           uint64_t first_sequence = 0, bool repair = false) {
  LogContents contents;
  absl::StatusOr<std::unique_ptr<LogReader>> reader =
      folder.OpenLog(first_sequence);
  contents.status = reader.status();
  if (!reader.ok()) return contents;
  for (uint64_t sequence = first_sequence;; ++sequence) {
    absl::StatusOr<std::optional<LogReader::Record>> record = (*reader)->Next();
    contents.status = record.status();
    if (!record.ok() || !record->has_value()) break;
    EXPECT_EQ((*record)->sequence, sequence);
    contents.records.push_back(std::move((*record)->bytes));
  }
  contents.next_sequence = (*reader)->next_sequence();
  contents.torn_bytes = (*reader)->torn_bytes();
  if (contents.status.ok()) {
    EXPECT_LE((*reader)->read_bytes() + contents.torn_bytes,
              (*reader)->total_bytes());
    if (repair) contents.status = (*reader)->Repair();
  }
  return contents;
}

// A writer with its own metrics.
class TestLog {
 public:
  TestLog(StateFolder& folder, uint64_t next_sequence,
          LogWriter::Options options = {.retry = absl::Milliseconds(5)})
      : writer_(LogWriter::Open(&folder, next_sequence, options, &metrics_)
                    .value()) {}

  LogWriter* operator->() { return writer_.get(); }
  LogMetrics& metrics() { return metrics_; }
  // Waits until all appended records are on disk.
  void Flush() {
    std::promise<void> durable;
    writer_->WhenDurable([&] { durable.set_value(); });
    durable.get_future().wait();
  }
  void Close() { writer_.reset(); }

 private:
  prometheus::Registry registry_;
  LogMetrics metrics_{&registry_};
  std::unique_ptr<LogWriter> writer_;
};

}  // namespace weft::log

#endif  // WEFT_TESTS_LOG_JOURNAL_FOLDER_H_
