// Encodes and decodes the objects of a log in an object store. An object is one
// group of records, or a seal, which has none. All numbers are little-endian.
//
//   "WEFTGRP1" | u64 epoch | u64 first sequence | u64 number of records | u32
//   CRC32C of all before | records as in log_format.h, whose salt is the epoch
//
// A group with more bytes than a store writes atomically is an object
// elsewhere, and the log has a reference to it:
//
//   "WEFTREF1" | u64 epoch | u64 first sequence | u64 length of the key | u32
//   CRC32C of all before and of the key | key
//
// The epoch counts the owners of the log. A seal takes a place in the log, so
// that no earlier owner can write there, but no sequence number.
#ifndef WEFT_SRC_LOG_BUCKET_LOG_OBJECT_H_
#define WEFT_SRC_LOG_BUCKET_LOG_OBJECT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace weft::log {

struct LogObject {
  // Every other object is larger.
  static constexpr size_t kSealBytes = 36;

  uint64_t epoch = 0;
  uint64_t first_sequence = 0;       // 0 for a seal.
  std::vector<std::string> records;  // Empty for a seal and a reference.
  std::string reference;             // The key of the group, or empty.
};

// No object has more bytes: a group, and a record that does not fit into it.
inline constexpr uint64_t kMaxLogObjectBytes = uint64_t{4} << 30;

std::string EncodeLogObject(uint64_t epoch, uint64_t first_sequence,
                            const std::vector<std::string>& records);
std::string EncodeReference(uint64_t epoch, uint64_t first_sequence,
                            const std::string& key);
std::string EncodeSeal(uint64_t epoch);
// Errors: DATA_LOSS. `name` is for the message.
absl::StatusOr<LogObject> DecodeLogObject(std::string_view bytes,
                                          const std::string& name);

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_BUCKET_LOG_OBJECT_H_
