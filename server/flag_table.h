// The table of weftd's flags: one row each, in the order of --help.
#ifndef WEFT_SERVER_FLAG_TABLE_H_
#define WEFT_SERVER_FLAG_TABLE_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "server/flags.h"

namespace weft {

// One flag: the place of its value, and its help.
struct Flag {
  const char* group = nullptr;
  std::string name;
  std::string value_name;
  std::string help;
  bool is_bool = false;
  bool is_action = false;  // Not a setting: no environment variable.
  std::string default_value;
  // Returns false if the text is not a value of this flag.
  std::function<bool(absl::string_view, Settings*)> read;

  [[nodiscard]] std::string environment() const;
};

// Threads: any. Created once.
[[nodiscard]] const std::vector<Flag>& FlagTable();

}  // namespace weft

#endif  // WEFT_SERVER_FLAG_TABLE_H_
