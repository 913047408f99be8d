// Fuzzes the target (path and query) of a Tinker request. No input may crash,
// and no part of an accepted path contains '/' or NUL.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "absl/strings/string_view.h"
#include "server/http/url.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto url = weft::server::ParseUrl(
      absl::string_view(reinterpret_cast<const char*>(data), size), "/api/v1/");
  if (!url.ok()) return 0;
  if (url->parts.empty()) std::abort();
  for (const std::string& part : url->parts) {
    if (part.find('/') != std::string::npos ||
        part.find('\0') != std::string::npos) {
      std::abort();
    }
  }
  return 0;
}
