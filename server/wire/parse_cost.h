// The memory that a protobuf message takes when it is parsed. Two bytes on the
// wire can become an object of hundreds of bytes, so a request is measured, and
// charged to its tenant, before it is parsed.
// Threads: any.
#ifndef WEFT_SERVER_WIRE_PARSE_COST_H_
#define WEFT_SERVER_WIRE_PARSE_COST_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/io/zero_copy_stream.h"
#include "server/http/fair_budget.h"

namespace weft::server {

// A request may take this many bytes of memory for each of its own bytes, and
// kSmallRequestBytes besides. The latter is for requests of thousands of very
// short sequences.
inline constexpr int64_t kMaxGrowth = 12;
inline constexpr int64_t kSmallRequestBytes = int64_t{16} << 20;

// Returns at most how many bytes of memory a message of `type` takes that has
// `size` bytes on the wire. Reads the tags, not the contents, so it takes a
// small part of the time of parsing. Errors: INVALID_ARGUMENT if the bytes are
// no such message; RESOURCE_EXHAUSTED with reason TOO_LARGE for more than
// `size` * kMaxGrowth + kSmallRequestBytes.
absl::StatusOr<int64_t> ParsedBytes(
    const google::protobuf::Descriptor& type,
    google::protobuf::io::ZeroCopyInputStream* wire, int64_t size);

// Charges `holder` for a message of `size` bytes and its parsed form. Errors:
// those of ParsedBytes and FairBudget::Reserve.
absl::StatusOr<std::shared_ptr<void>> ChargeMessage(
    FairBudget* memory, const std::string& holder,
    const google::protobuf::Descriptor& type,
    google::protobuf::io::ZeroCopyInputStream* wire, int64_t size);

}  // namespace weft::server

#endif  // WEFT_SERVER_WIRE_PARSE_COST_H_
