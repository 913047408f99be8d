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
  // The value as `read` takes it.
  std::function<std::string(Settings)> show;
  bool is_number = false;

  [[nodiscard]] std::string environment() const;
  // Reads the text and notes where it is from; else adds to `errors` that
  // `source` is no such value.
  void Set(absl::string_view source, absl::string_view text, Settings* settings,
           std::vector<std::string>* errors) const;
};

// Threads: any. Created once.
[[nodiscard]] const std::vector<Flag>& FlagTable();

// Null: there is none of this name.
[[nodiscard]] const Flag* FindFlag(absl::string_view name);

// What to say after the name of a flag that there is not: a near name or where
// to look.
[[nodiscard]] std::string NearFlag(absl::string_view name);

}  // namespace weft

#endif  // WEFT_SERVER_FLAG_TABLE_H_
