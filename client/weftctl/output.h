// Results as JSON (the protos' own mapping) or as a table.
#ifndef WEFT_CLIENT_WEFTCTL_OUTPUT_H_
#define WEFT_CLIENT_WEFTCTL_OUTPUT_H_

#include <ostream>
#include <string>
#include <vector>

#include "google/protobuf/message.h"

namespace weft::weftctl {

using Row = std::vector<std::string>;

// One JSON document, field names as in the .proto files; 64-bit integers are
// strings, as protobuf's JSON mapping has them.
void PrintJson(const google::protobuf::Message& message, std::ostream& out);

// Columns wide enough for their longest cell; the first row is the heading.
void PrintTable(const std::vector<Row>& rows, std::ostream& out);

// "12.3 MB".
[[nodiscard]] std::string FormatBytes(uint64_t bytes);
// Local time to the second; "-" for 0.
[[nodiscard]] std::string FormatTime(double unix_seconds);

}  // namespace weft::weftctl

#endif  // WEFT_CLIENT_WEFTCTL_OUTPUT_H_
