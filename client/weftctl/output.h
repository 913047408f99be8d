// Prints results as JSON or as a table.
#ifndef WEFT_CLIENT_WEFTCTL_OUTPUT_H_
#define WEFT_CLIENT_WEFTCTL_OUTPUT_H_

#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "google/protobuf/message.h"
#include "weft/v1/adapters.pb.h"
#include "weft/v1/server.pb.h"

namespace weft::client::weftctl {

using Row = std::vector<std::string>;

// Prints the message as one JSON document with the field names of the .proto
// files. 64-bit integers are strings, as in protobuf's JSON mapping.
void PrintJson(const google::protobuf::Message& message, std::ostream& out);

// Returns the text with escapes such as \u001b for what would change the
// terminal or the lines: control characters, line separators, the controls of
// bidirectional text, and bytes that are not UTF-8. A server chooses names and
// errors, and may be hostile.
std::string Printable(absl::string_view text);

// Prints rows of cells, each as Printable, in columns as wide as their longest
// cell. The first row may be a heading.
void PrintTable(std::vector<Row> rows, std::ostream& out);

// Returns a size such as "12.3 MB".
std::string FormatBytes(uint64_t bytes);
// Returns the local time to the second; "-" for 0.
std::string FormatTime(double unix_seconds);

// Returns what the server does now, such as "restoring 3 of 5 adapters, about
// 80 s left".
std::string DescribeState(const v1::ServerInfo& info);
// Returns "restoring" or "ready".
std::string DescribeState(const v1::Adapter& adapter);

}  // namespace weft::client::weftctl

#endif  // WEFT_CLIENT_WEFTCTL_OUTPUT_H_
