// Training data of token ids, one JSON object per line.
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
  size_t num_scored = 0;  // Tokens with a weight.
};

// Reads lines {"tokens": [1, 2, 3]} with an optional "prompt_length"; empty
// lines are skipped. Errors: UsageError naming `name` and the line. For lines
// with "text" it explains how to tokenize them.
[[nodiscard]] absl::StatusOr<std::vector<Example>> ReadExamples(
    std::istream& input, const std::string& name);

}  // namespace weft::weftctl

#endif  // WEFT_CLIENT_WEFTCTL_DATA_FILE_H_
