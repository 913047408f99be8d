// The table of weftd's flags, made of the rows of src/base/options/flags.inc.
#ifndef WEFT_SERVER_FLAGS_FLAG_TABLE_H_
#define WEFT_SERVER_FLAGS_FLAG_TABLE_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "server/flags/flags.h"

namespace weft::server {

// One flag: where its value is stored, and its help.
struct Flag {
  const char* group = nullptr;
  std::string name;
  std::string value_name;
  std::string wanted;  // What a value must be, in words.
  std::string help;
  bool is_bool = false;
  bool is_list = false;  // A list, with commas between its items.
  // An action, such as --help, has no environment variable.
  bool is_action = false;
  std::string default_value;
  std::string range;  // "1 to 64"; empty: every value of the type.
  // Stores the value in Settings. Returns false if the text is not a value of
  // the flag.
  std::function<bool(absl::string_view, Settings*)> read;
  // Returns the value in the form that `read` takes.
  std::function<std::string(Settings)> show;
  // Returns an error that names the flag, if its value is out of its range;
  // otherwise an empty text.
  std::function<std::string(Settings)> check;
  bool is_number = false;

  std::string environment() const;
  // Reads the value from `text` and stores `source` as its source. If the flag
  // is a list that `source` has set before, appends to the list. If `text` is
  // not a value of the flag, adds an error that names `source` to `errors`.
  void Set(absl::string_view source, absl::string_view text, Settings* settings,
           std::vector<std::string>* errors) const;
};

// Returns the table. The first call builds it. Threads: any.
const std::vector<Flag>& FlagTable();

// Returns the flag of this name; null if there is none.
const Flag* FindFlag(absl::string_view name);

// Returns the last part of the error message for an unknown flag: "; did you
// mean --X?" if a flag has a similar name, otherwise "; see --help".
std::string NearFlag(absl::string_view name);

}  // namespace weft::server

#endif  // WEFT_SERVER_FLAGS_FLAG_TABLE_H_
