// The files of the console's page, which the build compiles into the program
// (embed.cmake).
#ifndef WEFT_SERVER_CONSOLE_ASSETS_H_
#define WEFT_SERVER_CONSOLE_ASSETS_H_

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace weft::server::console {

struct Asset {
  absl::string_view name;  // For example "console.css".
  absl::string_view body;
};

// Returns the files of the page.
// Threads: any.
absl::Span<const Asset> Assets();

}  // namespace weft::server::console

#endif  // WEFT_SERVER_CONSOLE_ASSETS_H_
