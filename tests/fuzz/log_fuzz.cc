// Fuzzes a segment of the log. No input may crash or take more memory than the
// file has bytes. After a repair the log has exactly the records that were
// read.
#include <stdlib.h>

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "src/log/folder/state_folder.h"

namespace {

using weft::log::LogReader;
using weft::log::StateFolder;

std::string MakeFolder() {
  std::string path = "/dev/shm/journal_fuzz_XXXXXX";
  if (::mkdtemp(path.data()) == nullptr) std::abort();
  return path;
}

struct Log {
  std::vector<std::string> records;
  bool good = false;
  uint64_t torn_bytes = 0;
};

Log Read(const StateFolder& folder) {
  Log log;
  auto reader = folder.OpenLog(0);
  if (!reader.ok()) std::abort();
  for (;;) {
    auto record = (*reader)->Next();
    log.good = record.ok();
    if (!record.ok() || !record->has_value()) break;
    if ((*record)->sequence != log.records.size()) std::abort();
    log.records.push_back(std::move((*record)->bytes));
  }
  log.torn_bytes = (*reader)->torn_bytes();
  if (log.good && !(*reader)->Repair().ok()) std::abort();
  return log;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::string path = MakeFolder();
  static const auto folder = StateFolder::Open(path, "fuzz");
  if (!folder.ok()) std::abort();
  std::ofstream(path + "/log/" + StateFolder::SegmentName(0), std::ios::binary)
      .write(reinterpret_cast<const char*>(data),
             static_cast<std::streamsize>(size));
  const Log first = Read(**folder);
  if (!first.good) return 0;
  const Log again = Read(**folder);
  if (!again.good || again.torn_bytes != 0 || again.records != first.records) {
    std::abort();
  }
  return 0;
}
