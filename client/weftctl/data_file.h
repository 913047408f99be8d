// Reads training data: token ids, in one JSON object per line.
#ifndef WEFT_CLIENT_WEFTCTL_DATA_FILE_H_
#define WEFT_CLIENT_WEFTCTL_DATA_FILE_H_

#include <cstddef>
#include <istream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "weft/v1/training.pb.h"

namespace weft::weftctl {

struct Example {
  v1::Datum datum;
  size_t num_scored = 0;  // Number of targets whose weight is not 0.
};

// Reads lines of the form {"tokens": [1, 2, 3]}, with an optional
// "prompt_length". Skips empty lines. Errors: UsageError, which names `name`
// and the line, or says that there are no data. If a line has "text" instead,
// the message explains how to tokenize.
[[nodiscard]] absl::StatusOr<std::vector<Example>> ReadExamples(
    std::istream& input, const std::string& name);

}  // namespace weft::weftctl

#endif  // WEFT_CLIENT_WEFTCTL_DATA_FILE_H_
