// The table of weftd's flags, with one row for each flag, in the order of
// --help.
#ifndef WEFT_SERVER_FLAG_TABLE_H_
#define WEFT_SERVER_FLAG_TABLE_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "server/flags.h"

namespace weft {

// One flag: where its value is stored, and its help.
struct Flag {
  const char* group = nullptr;
  std::string name;
  std::string value_name;
  std::string help;
  bool is_bool = false;
  bool is_list = false;    // Its value is a list, separated by commas.
  bool is_action = false;  // An action has no environment variable.
  std::string default_value;
  // Returns false if the text is not a value of this flag.
  std::function<bool(absl::string_view, Settings*)> read;
  // Returns the value in the form that `read` takes.
  std::function<std::string(Settings)> show;
  bool is_number = false;

  [[nodiscard]] std::string environment() const;
  // Reads the text and remembers its source. A list grows if the same source
  // gives it again. If the text is not a value of the flag, adds that to
  // `errors`, naming `source`.
  void Set(absl::string_view source, absl::string_view text, Settings* settings,
           std::vector<std::string>* errors) const;
};

// Threads: any. Created once.
[[nodiscard]] const std::vector<Flag>& FlagTable();

// Returns null if there is no flag of this name.
[[nodiscard]] const Flag* FindFlag(absl::string_view name);

// Returns what to say after the name of an unknown flag: a similar name, or
// where to look.
[[nodiscard]] std::string NearFlag(absl::string_view name);

}  // namespace weft

#endif  // WEFT_SERVER_FLAG_TABLE_H_
